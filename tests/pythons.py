"""The program under every Python that is packed: `python -m tests.pythons [3.10 …]`.

For each Python on PATH or in pyenv: the tests that depend on the language, with the packages in the
zipapp instead of those in .venv; and the zipapp itself, with --version and with tests.demo.
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
PARTS = "cli config daemon events files readers registration reports start systemd"
TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-xdist")
# Their requirements on Python 3.10, which pip does not see if another Python runs it.
OLD = {10: ("exceptiongroup", "backports.asyncio.runner", "tomli", "typing_extensions")}
TIMEOUT = 900.0  # seconds for the tests, on a busy machine


def minors() -> list[int]:
    """Return the minor versions of the Pythons that are packed."""
    settings = tomllib.loads((ROOT / "shiv.toml").read_text())
    return sorted(int(abi.removeprefix("cp3")) for abi in settings["abis"])


def interpreters() -> dict[int, str]:
    """Return the Pythons of this machine by minor version."""
    found = {}
    for minor in minors():
        name = f"python3.{minor}"
        pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/{name}"))
        for candidate in (shutil.which(name), *map(str, pyenv)):
            # A stand-in of pyenv can exist without its Python.
            if candidate and not subprocess.run([candidate, "-V"], capture_output=True).returncode:
                found[minor] = candidate
    return found


def bundled(zipapp: Path, target: Path) -> Path:
    """Unpack the Python packages in the zipapp, without the program; return their directory."""
    shutil.rmtree(target, ignore_errors=True)
    wanted = re.compile(r"site-packages/(?!ttdp\.py|generated/)")
    with zipfile.ZipFile(zipapp) as packed:
        packed.extractall(target, [name for name in packed.namelist() if wanted.match(name)])
    return target / "site-packages"


def tools(minor: int, target: Path) -> Path:
    """Fetch pytest for a Python, which need not be installed; return its directory."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    pinned = dict(re.findall(r"(?m)^([\w-]+)==([\w.]+)", "\n".join(dev)))
    # At most that version: the latest may not support the oldest Python.
    wanted = [f"{name}<={pinned[name]}" for name in TOOLS] + list(OLD.get(minor, ()))
    place = target / f"3.{minor}"
    stamp = place / "wanted"
    if stamp.exists() and stamp.read_text() == "\n".join(wanted):
        return place

    shutil.rmtree(place, ignore_errors=True)
    machine = os.uname().machine
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += [f"--target={place}", "--only-binary=:all:", "--implementation=cp"]
    # One platform under two names: older wheels have the first.
    pip += [f"--python-version=3.{minor}", f"--platform=manylinux2014_{machine}"]
    subprocess.run([*pip, f"--platform=manylinux_2_17_{machine}", *wanted], check=True)
    stamp.write_text("\n".join(wanted))
    return place


def suite(root: Path, temporary: str) -> list[str]:
    """Return pytest's command, without the Python, for these tests in a copy of the sources."""
    names = [f"tests/test_{part}.py" for part in PARTS.split()]
    pytest = ["-m", "pytest", "-v", "-ra", "--numprocesses=2", "--dist=loadfile"]
    pytest += ["-p", "no:cacheprovider", f"--basetemp={temporary}", f"--rootdir={root}"]
    return [*pytest, *(str(root / name) for name in names)]


def make_venv(place: Path, *modules: str) -> list[list[str]]:
    """Return the commands, without the Python, that make an environment with these modules.

    A path file names them, so child processes also find them, whatever their variables.
    """
    link = "import glob, sys; place = glob.glob(sys.argv[1])[0] + '/modules.pth'; "
    link += "open(place, 'w').write('\\n'.join(sys.argv[2:]))"
    site = f"{place}/lib/python3*/site-packages"
    return [["-m", "venv", "--clear", "--without-pip", str(place)], ["-c", link, site, *modules]]


def zipapp_commands(python: str, zipapp: Path) -> dict[str, list[str]]:
    """Return the commands that try the zipapp, by name."""
    return {
        "--version": [python, "-I", "-S", str(zipapp), "--version"],
        "on a simulated node": [python, "-m", "tests.demo", "--pyz", str(zipapp)],
    }


def try_all(chosen: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield the name and result of each trial, and whether it succeeded."""
    found = interpreters()
    modules = str(bundled(ZIPAPP, WORK / "bundled"))
    for minor in chosen:
        if minor not in found:
            yield f"NOT RUN: Python 3.{minor} is not installed", True
            continue

        venv = WORK / f"venv-3.{minor}"
        for command in make_venv(venv, modules, str(tools(minor, WORK))):
            subprocess.run([found[minor], *command], check=True)

        variables = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(WORK / "hypothesis")}
        python = str(venv / "bin/python")
        commands = {"tests": [python, *suite(ROOT, str(WORK / "tmp"))]}
        commands |= zipapp_commands(python, ZIPAPP)
        for name, command in commands.items():
            done = run(command, variables)
            yield f"Python 3.{minor}: {name}: {last_line(done)}", done.returncode == 0


def run(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command; print its output if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=variables, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        print(done.stdout, flush=True)
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a command's output."""
    return (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")


def main() -> int:
    """Try the Pythons of the command line, or all that are packed."""
    parser = argparse.ArgumentParser("python -m tests.pythons")
    parser.add_argument("versions", nargs="*", metavar="3.N", help="default: all that are packed")
    options = parser.parse_args()

    chosen = [int(version.removeprefix("3.")) for version in options.versions] or minors()
    results = []
    for text, succeeded in try_all(chosen):
        print(text if succeeded else f"{text}  FAILED", flush=True)
        results.append(succeeded)

    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
