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


class Repository:
    """A source with the two scripts and CHANGELOG.md, committed on main."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "packaging").mkdir(parents=True)
        for name in ("version.sh", "release.sh"):
            shutil.copy(ROOT / "packaging" / name, top / "packaging")
        (top / "CHANGELOG.md").write_text(NEWS)
        (top / ".gitignore").write_text("/build/\n")
        self.run("git", "init", "--quiet", "--initial-branch=main")
        self.commit("First")

    def run(self, *command: str) -> str:
        """Return what a command prints; raises CalledProcessError with the same."""
        return subprocess.check_output(
            command, cwd=self.top, env=ENVIRONMENT, stderr=subprocess.STDOUT, text=True
        ).strip()

    def commit(self, message: str) -> None:
        self.run("git", "add", "--all")
        self.run("git", "commit", "--quiet", "--allow-empty", "--message", message)

    def version(self) -> str:
        return self.run("packaging/version.sh")

    def state(self) -> list[str]:
        """Everything that a release changes."""
        commands = ("rev-parse main", "tag", "status --porcelain", "branch", "worktree list")
        return [self.run("git", *command.split()) for command in commands]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "source")


def test_versions_only_rise(repository: Repository) -> None:
    """From commit to commit, also with changes, through a release and after it.

    Each is below the next release.
    """
    seen = []

    def commit(number: int) -> None:
        for _ in range(number):
            repository.commit("Change")
        clean = repository.version()
        (repository.top / "CHANGELOG.md").write_text("changed")
        changed = repository.version()
        repository.run("git", "checkout", "--quiet", ".")
        assert changed == f"{clean}+dirty"
        seen.extend([clean, changed])

    for number in (1, 8):  # then the count has a second digit
        commit(number)
    repository.run("git", "tag", "-m", "", "v0.2.0")
    seen.append(repository.version())
    for number in (1, 9):
        commit(number)

    assert re.fullmatch(r"0~git2\.g[0-9a-f]{10}", seen[0])
    assert seen[4] == "0.2.0" and re.fullmatch(r"0\.2\.0\+git1\.g[0-9a-f]{10}", seen[5])
    for old, new in pairwise([*seen, "0.2.1"]):
        subprocess.check_call(["dpkg", "--compare-versions", old, "lt", new])


def test_a_source_that_is_no_clone_has_no_version(repository: Repository) -> None:
    """Nor is that of a clone around it taken."""
    inner = repository.top / "inner/packaging"
    inner.mkdir(parents=True)
    shutil.copy(ROOT / "packaging/version.sh", inner)
    assert repository.run(str(inner / "version.sh")) == "0~source"


def test_a_release(repository: Repository) -> None:
    """One command checks a worktree, whose commit has the date in CHANGELOG.md, and tags it."""
    checks = "! grep unreleased CHANGELOG.md && touch untracked && test $CI = true"

    said = repository.run("packaging/release.sh", "0.2.0", checks)

    assert "git push origin main v0.2.0" in said and repository.version() == "0.2.0"
    assert repository.run("git", "log", "--format=%s").splitlines() == ["Release 0.2.0", "First"]
    assert re.search(r"(?m)^## 0.2.0 – 20..-..-..$", (repository.top / "CHANGELOG.md").read_text())
    _, tags, changes, _, worktrees = repository.state()
    assert (tags, changes) == ("v0.2.0", "") and len(worktrees.splitlines()) == 1


@pytest.mark.parametrize(
    ("before", "version", "checks", "reason"),
    [
        ("true", "0.2.0", "false", "false failed; nothing was changed"),
        ("true", "0.2", "true", "must be three numbers"),
        ("true", "0.1.0", "true", "with a list of changes"),
        ("git tag v0.10.0", "0.2.0", "true", "v0.10.0 is already released"),
        ("git checkout -qb other", "0.2.0", "true", "not main"),
        ("touch new", "0.2.0", "true", "uncommitted changes"),
    ],
)
def test_what_is_not_released(
    repository: Repository, before: str, version: str, checks: str, reason: str
) -> None:
    """The reason is given, and nothing has changed."""
    repository.run(*before.split())
    state = repository.state()

    with pytest.raises(subprocess.CalledProcessError) as error:
        repository.run("packaging/release.sh", version, checks)

    assert reason in error.value.output and repository.state() == state
