#!/usr/bin/env python3
"""Fails if PyPI has the pinned grpcio for a newer Python than those in shiv.toml.

When a distribution has that Python, the installed program does not start there; it should be packed
before. The check uses pip, like a build. It first looks for a wheel that exists, to see whether
pip's answers are valid.
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
    """Print and return the result: 0 no newer Python, 1 a newer one, 3 PyPI cannot be reached."""
    settings = tomllib.loads(build_pyz.SETTINGS.read_text())
    grpcio = f"grpcio=={settings['requirements']['grpcio']}"
    packed = max(int(abi.removeprefix("cp3")) for abi in settings["abis"])
    for architecture, platforms in settings["architectures"].items():
        if not has_wheel(grpcio, packed, platforms):
            report(f"*** NOT CHECKED: pip finds no {grpcio} for Python 3.{packed}, which exists")
            return UNREACHABLE
        if has_wheel(grpcio, packed + 1, platforms):
            report(f"add cp3{packed + 1} to abis in shiv.toml, and run: make lock")
            report("raise the limit of python3 in packaging/deb/control")
            report(f"{grpcio} has a wheel for Python 3.{packed + 1} on {architecture}")
            return 1
    print(f"PyPI has {grpcio} for no Python after 3.{packed}, the newest in shiv.toml")
    return 0


def report(line: str) -> None:
    """Write a line to stderr."""
    print(line, file=sys.stderr)


def has_wheel(requirement: str, minor: int, platforms: list[str]) -> bool:
    """Return whether pip finds a wheel for this Python."""
    tags = [f"--abi=cp3{minor}", *(f"--platform={tag}" for tag in platforms)]
    python = [f"--python-version=3.{minor}", "--implementation=cp", *tags]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", directory]
        command += [*python, requirement]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
