"""What make prints when something is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.world.processes import ROOT

INSTALLED = "bash sh make sed date dirname find mkdir cmp git uname"

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="NOT RUN: no make")


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
    for name in INSTALLED.split():
        if path := shutil.which(name):
            (tmp_path / name).symlink_to(path)

    done = subprocess.run(
        ["make", target, "PYTHON=python3", f"VENV={tmp_path}/venv"],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip

    [line] = done.stdout.splitlines()
    assert done.returncode and " apt install --no-install-recommends " in line
    assert packages <= {*line.split()}
    assert all(each.startswith("make: ***") for each in done.stderr.splitlines()), done
