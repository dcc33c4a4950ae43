#!/usr/bin/env python3
"""Fails where PyPI has the pinned grpcio for a newer Python than those that shiv.toml packs.

Once a distribution has that Python, the installed program does not start there; until then there is
time to pack it. It is pip that is asked, as at a build; a wheel that is known to be there shows
that the answers mean something.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import build_pyz

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNREACHABLE = 3


def main() -> int:
    """Ask, and say what is so: 0 nothing newer, 1 something newer, 3 no answer."""
    settings = tomllib.loads(build_pyz.SETTINGS.read_text())
    grpcio = f"grpcio=={settings['requirements']['grpcio']}"
    packed = max(int(abi.removeprefix("cp3")) for abi in settings["abis"])
    for architecture, platforms in settings["architectures"].items():
        if not has_wheel(grpcio, packed, platforms):
            say(f"*** NOT CHECKED: PyPI does not even tell of {grpcio} for Python 3.{packed}")
            return UNREACHABLE
        if has_wheel(grpcio, packed + 1, platforms):
            say(f"{grpcio} has a wheel for Python 3.{packed + 1} on {architecture}; pack it:")
            say(f"add cp3{packed + 1} to abis in shiv.toml, and run: make lock")
            say("raise the bound of python3 in packaging/deb/control")
            return 1
    print(f"PyPI has {grpcio} for no Python that is newer than 3.{packed}, which is packed")
    return 0


def say(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr)


def has_wheel(requirement: str, minor: int, platforms: list[str]) -> bool:
    """Return whether pip finds one."""
    tags = [f"--abi=cp3{minor}", *(f"--platform={tag}" for tag in platforms)]
    python = [f"--python-version=3.{minor}", "--implementation=cp", *tags]
    with tempfile.TemporaryDirectory() as directory:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--only-binary=:all:", "--dest", directory, *python, requirement]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
