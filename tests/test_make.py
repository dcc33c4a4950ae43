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
    """Run make with nothing but what is always installed; its environment is in `directory`."""
    for name in NEEDED.split():
        if path := shutil.which(name):
            (directory / name).unlink(missing_ok=True)
            (directory / name).symlink_to(path)
    return subprocess.run(
        ["make", *words, "PYTHON=python3", f"VENV={directory}/venv"], cwd=ROOT,
        env={"PATH": str(directory)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_help_is_for_users(tmp_path: Path) -> None:
    """One line of 80 columns for each target that users need; CONTRIBUTING.md has the others."""
    lines = make(tmp_path, "help").stdout.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= 80

    makefiles = [(ROOT / name).read_text() for name in ("Makefile", "packaging/packaging.mk")]
    targets = " ".join(re.findall(r"(?m)^\.PHONY: (.*)$", "".join(makefiles))).split()
    for target in {*targets} - {line.split()[0] for line in lines} - INTERNAL:
        assert f"make {target}" in (ROOT / "CONTRIBUTING.md").read_text(), target


DEB = {"dpkg-dev", "debhelper", "fakeroot"}


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("demo", {"python3-venv"}),
        ("deb", DEB),
        ("repository", {*DEB, "apt-utils", "gpg", "gpg-agent"}),
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


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ([], "REPOSITORY_URL=https://"),
        (["REPOSITORY_URL=https://apt.example.org"], "SIGN_KEY="),
        (["REPOSITORY_URL=https://apt.example.org", "SIGN_KEY=x"], "gpg has no secret key x"),
    ],
)
def test_a_repository_needs_an_address_and_a_key(
    tmp_path: Path, variables: list[str], reason: str
) -> None:
    """Without one of them, make refuses in one line that names it, and builds nothing."""
    for tool in ("dpkg-buildpackage", "dh", "fakeroot", "apt-ftparchive", "gpg-agent", "gpg"):
        (tmp_path / tool).symlink_to("/bin/false")

    done = make(tmp_path, "repository", *variables)

    [line] = done.stdout.splitlines()
    assert done.returncode and reason in line
