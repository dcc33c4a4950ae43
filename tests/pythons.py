"""The program under every Python that is packed, by `make test-pythons`.

Or `python -m tests.pythons [--zipapp FILE] [3.10 …]`.

For each Python that is found here (on PATH, or pyenv's): the part of the suite that depends on the
language, with the modules that the zipapp bundles and not those of .venv; and the zipapp itself,
which says its version, lists the cards of a simulated node, and does what `make demo` shows.
tests/e2e/test_pythons.py does the same in Debian's releases.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORK = ROOT / "build/pythons"
ZIPAPP = ROOT / "dist/tt-device-plugin.pyz"
PARTS = (
    *("cli", "config", "daemon", "events", "files"),
    *("readers", "scrapes", "session", "start", "systemd"),
)
TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-xdist")
# What these want on Python 3.10 only; pip does not see that when another Python runs it.
OLD = {10: ("exceptiongroup", "backports.asyncio.runner", "tomli", "typing_extensions")}
PATIENCE = 900.0  # seconds for a suite, on a machine that has much else to do


def minors() -> list[int]:
    """Return the second numbers of the Pythons that are packed."""
    settings = tomllib.loads((ROOT / "shiv.toml").read_text())
    return sorted(int(abi.removeprefix("cp3")) for abi in settings["abis"])


def interpreters() -> dict[int, str]:
    """Return the Pythons of this machine, by their second number."""
    found = {}
    for minor in minors():
        name = f"python3.{minor}"
        pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/{name}"))
        for candidate in (shutil.which(name), *map(str, pyenv)):
            if candidate and _version(candidate) == minor:
                found[minor] = candidate
    return found


def _version(python: str) -> int | None:
    """Return its second number; None where it does not run, as pyenv's stand-ins may not."""
    command = [python, "-c", "import sys; print(sys.version_info.minor)"]
    done = subprocess.run(command, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def bundled(zipapp: Path, target: Path) -> Path:
    """Unpack what the zipapp bundles but the program itself; return where it is."""
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(zipapp) as packed:
        names = [name for name in packed.namelist() if name.startswith("site-packages/")]
        own = re.compile(r"site-packages/(ttdp\.py|generated/)")
        packed.extractall(target, [name for name in names if not own.match(name)])
    return target / "site-packages"


def tools(minor: int, target: Path) -> Path:
    """Have pip fetch pytest for a Python, which need not be here; return where it is."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    pinned = dict(re.findall(r"(?m)^([\w-]+)==([\w.]+)", "\n".join(dev)))
    # At most that version: the latest no longer comes for the oldest Python.
    wanted = [f"{name}<={pinned[name]}" for name in TOOLS] + list(OLD.get(minor, ()))
    place = target / f"3.{minor}"
    stamp = place / "wanted"
    if not (stamp.exists() and stamp.read_text() == "\n".join(wanted)):
        shutil.rmtree(place, ignore_errors=True)
        machine = os.uname().machine
        python = [f"--python-version=3.{minor}", "--implementation=cp", "--only-binary=:all:"]
        python += [f"--platform=manylinux2014_{machine}", f"--platform=manylinux_2_17_{machine}"]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--target",
            str(place),
        ]
        subprocess.run([*pip, *python, *wanted], check=True)
        stamp.write_text("\n".join(wanted))
    return place


def suite(root: Path, temporary: str) -> list[str]:
    """Return the command, without the Python, that runs the suite's part; `root`: the sources."""
    names = [f"tests/test_{part}.py" for part in PARTS]
    if missing := [name for name in names if not (ROOT / name).exists()]:
        raise FileNotFoundError(f"PARTS in tests/pythons.py names what is gone: {missing}")
    files = [str(root / name) for name in names]
    pytest = ["-m", "pytest", "-v", "-ra", "--numprocesses=2", "--dist=loadfile"]
    pytest += ["-p", "no:cacheprovider"]
    return [*pytest, f"--basetemp={temporary}", f"--rootdir={root}", *files]


def make_venv(place: Path, *modules: str) -> list[list[str]]:
    """Return the commands that make an environment with these modules for who runs them.

    Its path ends with "python": what a test starts finds the modules as well, whatever variables it
    has.
    """
    link = "import glob, sys; place = glob.glob(sys.argv[1])[0] + '/modules.pth'; "
    link += "open(place, 'w').write('\\n'.join(sys.argv[2:]))"
    site = f"{place}/lib/python3*/site-packages"
    return [["-m", "venv", "--clear", "--without-pip", str(place)], ["-c", link, site, *modules]]


def try_all(zipapp: Path, chosen: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield what was tried, in words, and whether it went well."""
    found = interpreters()
    modules = str(bundled(zipapp, WORK / "bundled"))
    for minor in chosen:
        if minor not in found:
            yield f"Python 3.{minor}: NOT RUN: there is none on this machine", True
            continue
        venv = WORK / f"venv-3.{minor}"
        for command in make_venv(venv, modules, str(tools(minor, WORK))):
            subprocess.run([found[minor], *command], check=True)
        variables = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(WORK / "hypothesis")}
        python = str(venv / "bin/python")
        done = run([python, *suite(ROOT, str(WORK / "tmp"))], variables)
        yield f"Python 3.{minor}: suite: {last_line(done)}", done.returncode == 0
        for what, command in zipapp_commands(python, zipapp).items():
            done = run(command, variables)
            yield f"Python 3.{minor}: zipapp, {what}: {last_line(done)}", done.returncode == 0


def zipapp_commands(python: str, zipapp: Path) -> dict[str, list[str]]:
    """Return what is tried with the zipapp, by name."""
    return {
        "--version": [python, "-I", "-S", str(zipapp), "--version"],
        "on a simulated node": [python, "-m", "tests.demo", "--pyz", str(zipapp)],
    }


def run(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run it; what it says is shown where it fails."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        print(done.stdout, flush=True)
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last words of what was run."""
    return (done.stdout.strip().splitlines() or ["nothing was said"])[-1].strip("= ")


def main() -> int:
    """Try what the command line names, or every Python that is packed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pythons", description="Tries the program under each Python."
    )
    parser.add_argument("versions", nargs="*", metavar="3.N", help="default: all that are packed")
    parser.add_argument("--zipapp", type=Path, default=ZIPAPP, help="default: %(default)s")
    options = parser.parse_args()
    chosen = [int(version.removeprefix("3.")) for version in options.versions] or minors()
    results = []
    for text, well in try_all(options.zipapp, chosen):
        print(text if well else f"{text}  FAILED", flush=True)
        results.append(well)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
