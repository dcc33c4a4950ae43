#!/usr/bin/env python3
"""Builds the zipapp that shiv.toml describes, for all its Pythons on one architecture.

    build_pyz.py ARCH VERSION OUTPUT            all Pythons on amd64 or arm64
    build_pyz.py ARCH VERSION OUTPUT --demo     only the Python that runs this
    build_pyz.py --lock                         writes the hashes of all files into shiv.toml
    build_pyz.py --newer                        looks on PyPI for grpcio for a newer Python

Wheels are downloaded, not compiled, so any machine can build for both architectures. pip accepts a
file only if shiv.toml has its hash. A commit gives the same bytes, wherever and whenever it is
built: modes are fixed, and times are SOURCE_DATE_EPOCH. The packed program differs from the source
in one line, its version. shiv writes the zipapp, and bootstrap.py starts the program.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).resolve().parent.parent
SHIV_TOML = TOP / "shiv.toml"
UNREACHABLE = 3  # exit status of --newer


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Builds the zipapp that shiv.toml describes.")
    parser.add_argument("arch", nargs="?", metavar="ARCH", help="Debian's name")
    parser.add_argument("version", nargs="?", metavar="VERSION")
    parser.add_argument("output", nargs="?", type=Path, metavar="OUTPUT")
    parser.add_argument("--demo", action="store_true", help="only the Python that runs this")
    parser.add_argument("--lock", action="store_true", help="update the hashes in shiv.toml")
    parser.add_argument("--newer", action="store_true", help="fail if PyPI has a newer Python")
    options = parser.parse_args()
    settings = read_settings()

    if options.lock:
        return lock(settings)
    if options.newer:
        return look_for_newer_python(settings)
    if options.output is None:
        parser.error("ARCH, VERSION and OUTPUT are required")

    if options.demo:
        settings["abis"] = [abi_of_this_python(settings)]
    work = options.output.resolve().parent
    work.mkdir(parents=True, exist_ok=True)
    fetch_tools(settings, settings["sha256"], work / "tools")
    wheels = fetch(settings, options.arch, settings["sha256"], work / "wheels", work / "tools")
    stage(settings, wheels, options.version, work / "site-packages")
    pack(settings, work, options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB")
    return 0


def read_settings() -> dict[str, Any]:
    """Return the contents of shiv.toml."""
    return tomllib.loads(SHIV_TOML.read_text())


def abi_of_this_python(settings: Mapping[str, Any]) -> str:
    """Return the ABI of the Python that runs this; exit if it is not packed."""
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if abi not in settings["abis"]:
        sys.exit(f"{abi} is not one of the ABIs in shiv.toml; set PYTHON to one of these Pythons")
    return abi


# -- fetching --------------------------------------------------------------------------------------


def fetch_tools(settings: Mapping[str, Any], hashes: Mapping[str, str], tools: Path) -> None:
    """Install shiv and its requirements into the directory `tools`."""
    text = requirements(settings["build"], hashes)
    if not is_stamped(tools, text):
        shutil.rmtree(tools, ignore_errors=True)
        run_pip("install", text, "--only-binary=:all:", f"--target={tools}")
        stamp(tools, text)


def fetch(
    settings: Mapping[str, Any], arch: str, hashes: Mapping[str, str], wheels: Path, tools: Path
) -> list[Path]:
    """Download the files of all ABIs into the directory `wheels`, and return them."""
    only = settings["only"]
    texts = {}
    for abi in settings["abis"]:
        versions = settings["requirements"].items()
        wanted = {name: version for name, version in versions if abi in only.get(name, [abi])}
        texts[abi] = requirements(wanted, hashes)

    key = f"{arch}\n{texts}"
    if not is_stamped(wheels, key):
        shutil.rmtree(wheels, ignore_errors=True)
        for abi, text in texts.items():
            print(f"fetching the Python packages for {arch}, {abi}", flush=True)
            options = [f"--dest={wheels}", *pip_tags(settings, arch, abi)]
            # pip runs setuptools, one of the tools, for the metadata of sdnotify.
            run_pip("download", text, "--no-build-isolation", *options, python_path=tools)
        stamp(wheels, key)
    return sorted(path for path in wheels.iterdir() if path.suffix in (".whl", ".gz"))


def requirements(wanted: Mapping[str, str], hashes: Mapping[str, str]) -> str:
    """Return a requirements file for pip: it takes only files with these hashes, if any."""
    lines = ["--require-hashes\n"] if hashes else []
    for name, version in wanted.items():
        files = (f"{name}-{version}-", f"{name}-{version}.tar.gz")
        known = [f"--hash=sha256:{hashes[file]}" for file in hashes if file.startswith(files)]
        lines.append(" ".join([f"{name}=={version}", *known, "\n"]))
    return "".join(lines)


def pip_tags(settings: Mapping[str, Any], arch: str, abi: str) -> list[str]:
    """Return pip's options for the wheels of a Python that need not be installed.

    sdnotify has no wheel.
    """
    tags = ["--only-binary=:all:", "--no-binary=sdnotify"]
    tags += [f"--python-version={abi.removeprefix('cp')}", "--implementation=cp"]
    tags += [f"--abi={name}" for name in (abi, "abi3", "none")]
    return tags + [f"--platform={platform}" for platform in settings["architectures"][arch]]


def run_pip(command: str, text: str, *options: str, python_path: Path | None = None) -> None:
    """Run pip with the text of a requirements file. Exit if it fails, and has said why."""
    environment = {**os.environ, "PYTHONPATH": str(python_path or "")}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", command]
        pip += ["--no-deps", f"--requirement={file.name}", *options]
        if subprocess.run(pip, env=environment).returncode:
            sys.exit("pip cannot fetch the Python packages; is there a network?")


def is_stamped(directory: Path, text: str) -> bool:
    """Return whether a directory was made completely, for this text."""
    file = directory / "made-for"
    return file.exists() and file.read_text() == text


def stamp(directory: Path, text: str) -> None:
    """Note what a directory was made for."""
    (directory / "made-for").write_text(text)


def lock(settings: Mapping[str, Any]) -> int:
    """Download the files of all ABIs and architectures, and write their hashes into shiv.toml."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        fetch_tools(settings, {}, work / "tools")
        run_pip("download", requirements(settings["build"], {}), f"--dest={work / 'build'}")
        files = {*(work / "build").iterdir()}
        for arch in settings["architectures"]:
            files |= {*fetch(settings, arch, {}, work / arch, work / "tools")}
        digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    head, section, _ = SHIV_TOML.read_text().partition("[sha256]")
    lines = [f'"{name}" = "{digests[name]}"' for name in sorted(digests)]
    SHIV_TOML.write_text("\n".join([f"{head}{section} # written by `make lock`", *lines, ""]))
    print(f"{SHIV_TOML}: {len(lines)} hashes")
    return 0


def look_for_newer_python(settings: Mapping[str, Any]) -> int:
    """Return 0 if PyPI has the pinned grpcio for no newer Python, 1 if it has, 3 if unreachable.

    When a distribution has that Python, the installed program does not start there.
    """
    newest = max(int(abi.removeprefix("cp3")) for abi in settings["abis"])
    grpcio = f"grpcio=={settings['requirements']['grpcio']}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]

    def is_on_pypi(minor: int) -> bool:
        with tempfile.TemporaryDirectory() as directory:
            options = [f"--dest={directory}", *pip_tags(settings, "amd64", f"cp3{minor}"), grpcio]
            return not subprocess.run([*pip, *options], capture_output=True).returncode

    if not is_on_pypi(newest):
        print(f"*** NOT CHECKED: pip does not find {grpcio} for Python 3.{newest}, which exists")
        return UNREACHABLE
    if is_on_pypi(newest + 1):
        print(f"{grpcio} has a wheel for Python 3.{newest + 1}: add it to abis in shiv.toml, run")
        print("`make lock`, and raise the limit of python3 in packaging/deb/control")
        return 1
    print(f"PyPI has {grpcio} for no Python after 3.{newest}, the newest in shiv.toml")
    return 0


# -- packing ---------------------------------------------------------------------------------------


def stage(settings: Mapping[str, Any], files: Iterable[Path], version: str, tree: Path) -> None:
    """Make the zipapp's tree. Exit if a file differs between ABIs."""
    patterns = [pattern for patterns in settings["strip"].values() for pattern in patterns]
    contents: dict[str, bytes] = {}
    for file in files:
        for name, content in members(file):
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                continue
            if contents.setdefault(name, content) != content:
                sys.exit(f"{name} of {file.name} is not the same as in another wheel")

    for name in settings["program"]:
        contents[name] = (TOP / name).read_bytes()
    line = f'__version__ = "{version}"'
    contents["ttdp.py"] = re.sub(rb'(?m)^__version__ = ".*"$', line.encode(), contents["ttdp.py"])

    shutil.rmtree(tree, ignore_errors=True)
    for name, content in contents.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path below site-packages and content of each file of a wheel or sdnotify's source."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            names = [name for name in wheel.namelist() if not name.endswith("/")]
            yield from ((name, wheel.read(name)) for name in names)
        return

    stem = file.name.removesuffix(".tar.gz")
    places = {
        "sdnotify/__init__.py": "sdnotify/__init__.py",
        "PKG-INFO": f"{stem}.dist-info/METADATA",
        "LICENSE.txt": f"{stem}.dist-info/licenses/LICENSE.txt",
    }
    with tarfile.open(file) as source:
        for name, place in places.items():
            content = source.extractfile(f"{stem}/{name}")
            assert content is not None
            yield place, content.read()


def pack(settings: Mapping[str, Any], work: Path, output: Path) -> None:
    """Write the zipapp with shiv, which gives it an ID by its contents."""
    sys.path.insert(0, str(work / "tools"))
    from shiv import __version__, builder  # type: ignore[import-not-found]
    from shiv.bootstrap.environment import Environment  # type: ignore[import-not-found]

    bootstrap = work / "bootstrap.py"
    shutil.copyfile(TOP / "packaging/bootstrap.py", bootstrap)
    bootstrap.chmod(0o644)
    builder.iter_package_files = lambda package: [(bootstrap, "__init__.py")]
    moment = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))
    environment = Environment(
        built_at=time.strftime("%Y-%m-%d %H:%M:%S", moment),
        entry_point=settings["entry-point"],
        shiv_version=__version__,
        reproducible=True,
    )
    half = work / "half.pyz"
    builder.create_archive(
        [work / "site-packages"],
        target=half,
        interpreter="/usr/bin/python3",
        main="_bootstrap:start",
        env=environment,
    )
    half.chmod(0o755)
    half.rename(output)


if __name__ == "__main__":
    sys.exit(main())
