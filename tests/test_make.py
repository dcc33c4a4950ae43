"""What a newcomer sees of make: its help, and what it prints when something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import unshared
from tests.world.processes import ROOT

WIDTH = 80
COMMANDS = ("bash", "sh", "make", "sed", "grep", "cut", "mkdir", "cmp", "git", "env", "uname")

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="NOT RUN: no make")


def make(
    *arguments: str,
    top: Path = ROOT,
    within: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Run make with this Python, without what the calling make has set."""
    command = [*within, "make", f"PYTHON={sys.executable}", *arguments]
    cleared = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "VIRTUAL_ENV")
    variables = {name: value for name, value in environment.items() if name not in cleared}
    return subprocess.run(
        command, cwd=top, env=variables, capture_output=True, text=True, timeout=300
    )


def test_help_fits_a_terminal() -> None:
    """Each target has one line of at most 80 columns, with a description."""
    lines = make("help").stdout.splitlines()

    assert len(lines) > 15 and max(map(len, lines)) <= WIDTH
    assert all(len(line.split()) > 2 for line in lines)


def test_a_repository_needs_an_address() -> None:
    """Without one, make refuses in one line that shows how to set it, and builds nothing."""
    done = make("repository")

    assert done.returncode and done.stdout.count("\n") == 1, done.stdout
    assert "make repository REPOSITORY_URL=https://" in done.stdout


def test_missing_tools_are_named_before_anything_is_built(tmp_path: Path) -> None:
    """One line names the packages of all tools that are missing."""
    for name in COMMANDS:
        if path := shutil.which(name):
            (tmp_path / name).symlink_to(path)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}

    done = make("repository", "REPOSITORY_URL=https://apt.example.org", environment=environment)
    [line] = done.stdout.splitlines()
    assert done.returncode and line.startswith("make repository needs: apt install")
    assert {"dpkg-dev", "debhelper", "fakeroot", "apt-utils", "gpg", "gpg-agent"} <= {*line.split()}

    done = make("deb", environment=environment)
    [line] = done.stdout.splitlines()
    assert done.returncode and line.startswith("make deb needs: ") and len(line) <= WIDTH


def test_manual_pages_that_cannot_be_checked_are_not_right(tmp_path: Path) -> None:
    """.ci/run's step fails without mandoc, also where its status is looked at."""
    [step] = re.findall(r"(?ms)^manual\(\) \{.*?^\}\n", (ROOT / ".ci/run").read_text())
    (tmp_path / "grep").symlink_to(str(shutil.which("grep")))
    command = [str(shutil.which("bash")), "-euc", f"{step}\nmanual || exit"]

    assert subprocess.run(command, env={"PATH": str(tmp_path)}).returncode == 127


def test_without_a_network(tmp_path: Path) -> None:
    """Two short lines name what cannot be fetched, and what to do; there is no traceback."""
    offline = unshared("--net")
    made = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=made)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_RETRIES": "0"}

    for target in ("demo", "test"):
        done = make(target, top=tmp_path / "source", within=offline, environment=environment)

        printed = done.stdout + done.stderr
        assert done.returncode and "Traceback" not in printed, printed

        lines = [line for line in printed.splitlines() if not line.startswith("make: ***")]
        reason, remedy = lines[-2:]
        assert reason.startswith("cannot fetch ") and "network" in reason
        assert "needs only python3 and libstdc++6" in remedy
        assert max(map(len, lines)) <= WIDTH, printed
