"""What a newcomer sees of make: its help, and what it prints when something is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.world.processes import ROOT

INTERNAL = {"FORCE", "deb-tools", "repository-ready"}
NEEDED = "bash sh make sed grep expand date dirname find mkdir cmp git uname"

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="NOT RUN: no make")


def make(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make with nothing but what is always installed, and with `directory` for the rest."""
    for name in NEEDED.split():
        if path := shutil.which(name):
            (directory / name).symlink_to(path)
    command = ["make", *words, "PYTHON=python3", f"VENV={directory}/venv"]
    environ = {"PATH": str(directory)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_help_is_for_users(tmp_path: Path) -> None:
    """One line of 80 columns for each target that users need; CONTRIBUTING.md has the others."""
    lines = make(tmp_path, "help").stdout.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80

    makefiles = [(ROOT / name).read_text() for name in ("Makefile", "packaging/packaging.mk")]
    targets = " ".join(re.findall(r"(?m)^\.PHONY: (.*)$", "".join(makefiles))).split()
    for target in {*targets} - {line.split()[0] for line in lines} - INTERNAL:
        assert f"make {target}" in (ROOT / "CONTRIBUTING.md").read_text(), target


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("demo", {"python3-venv"}),
        ("deb", {"dpkg-dev", "debhelper", "fakeroot"}),
        ("repository", {"dpkg-dev", "debhelper", "fakeroot", "apt-utils", "gpg", "gpg-agent"}),
    ],
)
def test_missing_tools_are_named_before_anything_is_built(
    tmp_path: Path, target: str, packages: set[str]
) -> None:
    """One line names the packages of all tools that are missing."""
    done = make(tmp_path, target)

    [line] = done.stdout.splitlines()
    assert done.returncode and " apt install --no-install-recommends " in line
    assert packages <= {*line.split()}
    assert all(each.startswith("make: ***") for each in done.stderr.splitlines()), done
