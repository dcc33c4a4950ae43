#!/usr/bin/env python3
"""Builds dist/tt-device-plugin.pyz from shiv.toml, for all Python ABIs of an architecture.

    build_pyz.py [--arch amd64|arm64] [--output FILE] [--version VERSION]
    build_pyz.py --demo --output FILE       packs only the Python that runs this
    build_pyz.py --lock                     writes the hashes of all files into shiv.toml

Wheels are downloaded, not compiled: any machine can build for any architecture. A commit gives the
same bytes, wherever and whenever it is built: modes and times are fixed. The packed program differs
from the source in one line, its version. shiv writes the zipapp; start.py and its two files in this
directory start the program.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).resolve().parent.parent
SETTINGS = TOP / "shiv.toml"
BUILD = TOP / "build"
BOOTSTRAP = ("start.py", "trees.py", "extract.py")
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def main() -> int:
    """Run the command."""
    options = command_line().parse_args()
    settings = read_settings()
    if options.lock:
        return lock(settings)
    if options.bootstrap:
        abis = ["cpython-310-x86_64-linux-gnu"]
        write_bootstrap(options.bootstrap, "0", settings["entry-point"], abis)
        return 0
    if options.arch not in settings["architectures"]:
        sys.exit(f"--arch: {options.arch} is not one of {', '.join(settings['architectures'])}")
    if options.demo:
        settings["abis"] = [this_abi(settings)]

    # Builds share what is below build/: of two at the same time, one waits.
    BUILD.mkdir(exist_ok=True)
    turn = os.open(BUILD, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    build_tools(settings)
    tree = BUILD / "site-packages" / ("demo" if options.demo else options.arch)
    version = options.version or package_version()
    stage(settings, options.arch, tree, version, complete=not options.demo)
    print("packing", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    pack(settings, tree, options.output)
    print(f"{shown(options.output)}: {options.output.stat().st_size / 1e6:.1f} MB")
    return 0


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="Builds the zipapp that shiv.toml describes.")
    here, output = MACHINES.get(platform.machine()), TOP / "dist/tt-device-plugin.pyz"
    parser.add_argument("--arch", default=here, help="Debian's name; default: this machine")
    parser.add_argument("--output", type=Path, default=output, help="default: %(default)s")
    parser.add_argument("--version", help="default: the version of version.py")
    parser.add_argument("--demo", action="store_true", help="pack only the Python that runs this")
    parser.add_argument(
        "--lock", action="store_true", help="only fetch all files and update shiv.toml's hashes"
    )
    parser.add_argument(
        "--bootstrap", type=Path, help="only write the program's bootstrap into this directory"
    )
    return parser


def read_settings() -> dict[str, Any]:
    """Return the contents of shiv.toml."""
    return tomllib.loads(SETTINGS.read_text())


def this_abi(settings: Mapping[str, Any]) -> str:
    """Return the ABI of the Python that runs this."""
    abi = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if abi not in settings["abis"]:
        sys.exit(f"{abi} is not one of the ABIs in shiv.toml; set PYTHON to one of these Pythons")
    return abi


# Fetching: pip accepts a file only if shiv.toml has its hash.


def wanted(settings: Mapping[str, Any], abi: str) -> dict[str, str]:
    """Return the requirements of one ABI, with their versions."""
    only = settings["only"]
    return {
        name: version
        for name, version in settings["requirements"].items()
        if abi in only.get(name, [abi])
    }


def fetch(
    requirements: Mapping[str, str], hashes: Mapping[str, str], directory: Path, *more: str
) -> list[Path]:
    """Fetch requirements with pip into `directory`; return the files. No hashes: any file."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [requirement(name, version, hashes) for name, version in requirements.items()]
    text = "\n".join([*lines, *more, ""])
    stamp = directory / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == text):
        print(f"fetching {', '.join(requirements)} for {directory.name}", flush=True)
        shutil.rmtree(directory)
        directory.mkdir()
        asked = directory / "requirements.tmp"
        asked.write_text("\n".join([*lines, ""]))
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        pip += ["--no-deps", "--no-build-isolation", "--dest", str(directory)]
        environment = {**os.environ, "PYTHONPATH": str(BUILD / "tools")}
        done = subprocess.run(
            [*pip, "--requirement", str(asked), *more],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            from offline import explanation

            sys.exit(explanation(next(iter(requirements)), done.stdout))
        print(done.stdout, end="")
        asked.rename(stamp)
        stamp.write_text(text)
    return sorted(path for path in directory.iterdir() if path != stamp)


def requirement(name: str, version: str, hashes: Mapping[str, str]) -> str:
    """Return pip's line for this version, with the hashes of its files."""
    stem = f"{name}-{version}".lower()
    known = []
    for file, digest in hashes.items():
        if file.lower().startswith((f"{stem}-", f"{stem}.")):
            known.append(f"--hash=sha256:{digest}")
    if hashes and not known:
        sys.exit(f"shiv.toml has no hash of {name} {version}; run: make lock")
    return " ".join([f"{name}=={version}", *known])


def fetch_abi(
    settings: Mapping[str, Any], arch: str, abi: str, hashes: Mapping[str, str]
) -> list[Path]:
    """Fetch the wheels of one ABI on one architecture, and sdnotify's source (it has no wheel)."""
    where = BUILD / "wheels" / f"{arch}-{abi}"
    python = ["--python-version", abi.removeprefix("cp"), "--implementation", "cp"]
    tags = [f"--abi={tag}" for tag in (abi, "abi3", "none")]
    tags += [f"--platform={tag}" for tag in settings["architectures"][arch]]
    wheels = {
        name: version for name, version in wanted(settings, abi).items() if name != "sdnotify"
    }
    files = fetch(wheels, hashes, where, "--only-binary=:all:", *python, *tags)
    return files + fetch(
        {"sdnotify": settings["requirements"]["sdnotify"]}, hashes, BUILD / "wheels/source"
    )


def build_tools(settings: Mapping[str, Any], hashes: Mapping[str, str] | None = None) -> list[Path]:
    """Fetch shiv and its requirements, and unpack them into build/tools."""
    tools = settings["build"]
    target = BUILD / "tools"
    files = fetch(
        tools,
        settings["sha256"] if hashes is None else hashes,
        BUILD / "wheels/tools",
        "--only-binary=:all:",
    )
    shutil.rmtree(target, ignore_errors=True)
    for file in files:
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(target)
    return files


def lock(settings: Mapping[str, Any]) -> int:
    """Fetch the files of all ABIs and architectures, and write their hashes into shiv.toml."""
    shutil.rmtree(BUILD / "wheels", ignore_errors=True)
    files = set(build_tools(settings, {}))
    for arch in settings["architectures"]:
        for abi in settings["abis"]:
            files |= set(fetch_abi(settings, arch, abi, {}))
    digests = {file.name: _sha256(file.read_bytes()) for file in files}
    head, section, _ = SETTINGS.read_text().partition("[sha256]")
    lines = [f'"{name}" = "{digests[name]}"' for name in sorted(digests)]
    SETTINGS.write_text("\n".join([f"{head}{section} # written by `make lock`", *lines, ""]))
    print(f"{SETTINGS}: {len(lines)} hashes")
    return 0


# Staging: one tree with the files of all ABIs.


def members(file: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path below site-packages and content of each file in a wheel or sdnotify's source."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            yield from (
                (entry.filename, wheel.read(entry))
                for entry in wheel.infolist()
                if not entry.is_dir()
            )
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


def stage(
    settings: Mapping[str, Any], arch: str, tree: Path, version: str, *, complete: bool
) -> None:
    """Make the zipapp's tree. Exits if a file differs between ABIs (extension modules may).

    complete: all ABIs are packed, so each pattern of [strip] must match a file.
    """
    from version import PROGRAM, with_version

    contents: dict[str, tuple[bytes, str]] = {}
    unused = {pattern for patterns in settings["strip"].values() for pattern in patterns}
    patterns = tuple(unused)
    for abi in settings["abis"]:
        for file in fetch_abi(settings, arch, abi, settings["sha256"]):
            for name, content in members(file):
                if matching := [
                    pattern for pattern in patterns if fnmatch.fnmatchcase(name, pattern)
                ]:
                    unused.difference_update(matching)
                elif contents.setdefault(name, (content, abi))[0] != content:
                    sys.exit(f"{name} of {file.name} is not the same as for {contents[name][1]}")
    if unused and complete:
        sys.exit(f"shiv.toml: [strip] matches no file: {', '.join(sorted(unused))}")
    for abi in settings["abis"]:
        if not any(
            name.startswith("grpc/_cython/cygrpc.") and f"-{abi[2:]}-" in name for name in contents
        ):
            sys.exit(f"grpcio has no extension module for {abi} on {arch}")
    for name in settings["program"]:
        text = (TOP / name).read_text()
        contents[name] = ((with_version(text, version) if name == PROGRAM else text).encode(), "")
    shutil.rmtree(tree, ignore_errors=True)
    for name, (content, _) in sorted(contents.items()):
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o644)


# Packing with shiv.


def pack(settings: Mapping[str, Any], tree: Path, output: Path) -> None:
    """Write the zipapp of a tree."""
    sys.path.insert(0, str(BUILD / "tools"))
    from shiv import __version__, builder  # type: ignore[import-not-found]
    from shiv.bootstrap.environment import Environment  # type: ignore[import-not-found]

    assert __version__ == settings["build"]["shiv"]
    packed = sorted(path for path in tree.rglob("*") if path.is_file())
    contents = "".join(
        f"{path.relative_to(tree)} {_sha256(path.read_bytes())}\n" for path in packed
    )
    build_id = _sha256(contents.encode())[:16]
    abis = sorted(path.name.split(".")[1] for path in tree.glob("grpc/_cython/cygrpc.*.so"))
    bootstrap = BUILD / "bootstrap"
    write_bootstrap(bootstrap, build_id, settings["entry-point"], abis)
    builder.iter_package_files = lambda package: [
        (path, path.name) for path in sorted(bootstrap.iterdir())
    ]
    environment = Environment(
        built_at=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(source_date_epoch())),
        build_id=build_id,
        entry_point=settings["entry-point"],
        shiv_version=__version__,
        reproducible=True,
    )
    half = output.with_suffix(".tmp")
    builder.create_archive(
        [tree],
        target=half,
        interpreter="/usr/bin/python3",
        main="_bootstrap.start:start",
        env=environment,
    )
    half.chmod(0o755)
    half.rename(output)


def write_bootstrap(directory: Path, build_id: str, entry_point: str, abis: Sequence[str]) -> None:
    """Write the package `_bootstrap` into a directory, and delete its former files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, text in bootstrap_files(build_id, entry_point, abis).items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o644)


def bootstrap_files(build_id: str, entry_point: str, abis: Sequence[str]) -> dict[str, str]:
    """Return the files of `_bootstrap`, which replaces shiv's own bootstrap."""
    module, _, function = entry_point.partition(":")
    constants = {"BUILD": build_id, "MODULE": module, "FUNCTION": function, "ABIS": tuple(abis)}
    return {
        "__init__.py": "",
        "packed.py": "".join(f"{name} = {value!r}\n" for name, value in constants.items()),
        **{name: (TOP / "packaging" / name).read_text() for name in BOOTSTRAP},
    }


def shown(path: Path) -> str:
    """Return a path as it is printed: below the sources, or absolute."""
    return str(path.relative_to(TOP)) if path.is_relative_to(TOP) else str(path)


def package_version() -> str:
    """Return the version of version.py, or exit with the reason why it is unknown."""
    from version import Unknown, version

    try:
        return version(TOP)
    except Unknown as reason:
        sys.exit(f"unknown version: {reason}")


def source_date_epoch() -> int:
    """Return $SOURCE_DATE_EPOCH, or the last commit's time, or outside git the changelog's."""
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(epoch)
    # Root may build in another user's clone.
    commands: Sequence[list[str]] = (
        ["git", "-c", "safe.directory=*", "-C", str(TOP), "log", "-1", "--format=%ct"],
        ["dpkg-parsechangelog", "-l", str(TOP / "packaging/deb/changelog"), "-S", "Timestamp"],
    )
    for command in commands:
        try:
            return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        except (OSError, subprocess.CalledProcessError, ValueError):
            continue
    sys.exit("set SOURCE_DATE_EPOCH: the time of the last change is unknown")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
