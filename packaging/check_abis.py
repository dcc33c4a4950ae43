#!/usr/bin/env python3
"""Fails where PyPI has the pinned grpcio for a Python that is newer than those that shiv.toml packs.

Once a distribution has that Python, the installed program does not start there; until then there is time to pack it. It
is pip that is asked, as at a build; a wheel that is known to be there shows that the answers mean something.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import build_pyz
from build_pyz import tomllib

UNREACHABLE = 3


def main() -> int:
    """Ask, and say what is so: 0 nothing newer, 1 something newer, 3 no answer."""
    settings = tomllib.loads(build_pyz.SETTINGS.read_text())
    version = settings["requirements"]["grpcio"]
    packed = max(int(abi.removeprefix("cp3")) for abi in settings["abis"])
    for architecture, platforms in settings["architectures"].items():
        if not has_wheel(version, packed, platforms):
            print(f"*** NOT CHECKED: PyPI does not even tell of grpcio {version} for Python 3.{packed}", file=sys.stderr)
            return UNREACHABLE
        if has_wheel(version, packed + 1, platforms):
            print(
                f"grpcio {version} has a wheel for Python 3.{packed + 1} on {architecture}, which is not packed: add "
                f"cp3{packed + 1} to abis in shiv.toml, raise the bound in packaging/deb/control, and run: make lock",
                file=sys.stderr,
            )
            return 1
    print(f"grpcio {version} is packed for every Python up to 3.{packed}, the last one that it has a wheel for")
    return 0


def has_wheel(version: str, minor: int, platforms: list[str]) -> bool:
    """Return whether pip finds one."""
    tags = [f"--abi=cp3{minor}", *(f"--platform={tag}" for tag in platforms)]
    python = [f"--python-version=3.{minor}", "--implementation=cp", *tags]
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", directory, *python, f"grpcio=={version}"]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
