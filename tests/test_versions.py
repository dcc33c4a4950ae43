"""The version of a build, and how a release is made, by packaging/version.sh and release.sh."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.world.processes import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="NOT RUN: no git")

NEWS = "# Changelog\n\n## 0.2.0 – unreleased\n\n- Something.\n\n## 0.1.0 – 2026-01-01\n"
ENVIRONMENT = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
for who in ("AUTHOR", "COMMITTER"):
    ENVIRONMENT |= {f"GIT_{who}_NAME": "Somebody", f"GIT_{who}_EMAIL": "s@example.invalid"}
VERSION, RELEASE = "packaging/version.sh", "packaging/release.sh"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A source with the two scripts and CHANGELOG.md, committed on main."""
    source = tmp_path / "source"
    (source / "packaging").mkdir(parents=True)
    for name in (VERSION, RELEASE):
        shutil.copy(ROOT / name, source / name)
    (source / "CHANGELOG.md").write_text(NEWS)
    (source / ".gitignore").write_text("/build/\n")
    run(source, "git", "init", "--quiet", "--initial-branch=main")
    run(source, "git", "add", "--all")
    commit(source, "First")
    return source


def run(source: Path, *command: str) -> str:
    """Return what a command prints; raises CalledProcessError with the same."""
    return subprocess.check_output(
        command, cwd=source, env=ENVIRONMENT, stderr=subprocess.STDOUT, text=True
    ).strip()


def commit(source: Path, message: str) -> None:
    run(source, "git", "commit", "--quiet", "--allow-empty", "--message", message)


def state(source: Path) -> list[str]:
    """Return everything that a release changes."""
    commands = ("rev-parse main", "tag", "status --porcelain", "branch", "worktree list")
    return [run(source, "git", *command.split()) for command in commands]


def test_versions_only_rise(source: Path) -> None:
    """From commit to commit, also with changes, through a release and after it.

    Each is below the next release.
    """
    seen = []
    for number in (1, 8, 0, 1, 9):  # then the count has a second digit
        for _ in range(number):
            commit(source, "Change")
        if not number:
            run(source, "git", "tag", "-m", "", "v0.2.0")
        seen.append(run(source, VERSION))

        (source / "CHANGELOG.md").write_text("changed")
        assert run(source, VERSION) == f"{seen[-1]}+dirty"
        if number:
            seen.append(f"{seen[-1]}+dirty")
        run(source, "git", "checkout", "--quiet", ".")

    assert re.fullmatch(r"0~git2\.g[0-9a-f]{10}", seen[0])
    assert seen[4] == "0.2.0" and re.fullmatch(r"0\.2\.0\+git1\.g[0-9a-f]{10}", seen[5])
    for old, new in pairwise([*seen, "0.2.1"]):
        subprocess.check_call(["dpkg", "--compare-versions", old, "lt", new])


def test_a_release(source: Path) -> None:
    """One command checks a worktree, whose commit has the date in CHANGELOG.md, and tags it."""
    checks = "! grep unreleased CHANGELOG.md && touch untracked && test $CI = true"

    said = run(source, RELEASE, "0.2.0", checks)

    assert "git push origin main v0.2.0" in said and run(source, VERSION) == "0.2.0"
    assert run(source, "git", "log", "--format=%s").splitlines() == ["Release 0.2.0", "First"]
    assert re.search(r"(?m)^## 0.2.0 – 20..-..-..$", (source / "CHANGELOG.md").read_text())
    _, tags, changes, _, worktrees = state(source)
    assert (tags, changes) == ("v0.2.0", "") and len(worktrees.splitlines()) == 1


@pytest.mark.parametrize(
    ("before", "version", "checks", "reason"),
    [
        ("true", "0.2.0", "false", "false failed; nothing was changed"),
        ("true", "0.1.0", "true", "with a list of changes"),
        ("git tag v0.10.0", "0.2.0", "true", "v0.10.0 is already released"),
        ("touch new", "0.2.0", "true", "uncommitted changes"),
    ],
)
def test_what_is_not_released(
    source: Path, before: str, version: str, checks: str, reason: str
) -> None:
    """The reason is given, and nothing has changed."""
    run(source, *before.split())
    then = state(source)

    with pytest.raises(subprocess.CalledProcessError) as error:
        run(source, RELEASE, version, checks)

    assert reason in error.value.output and state(source) == then
