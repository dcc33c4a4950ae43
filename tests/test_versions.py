"""The version of a build, and how a release is made, by packaging/version.py and release.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.world.processes import ROOT

CHANGELOG = """\
tt-device-plugin (0.2.0) UNRELEASED; urgency=medium

  * See CHANGELOG.md.

 -- Somebody <somebody@example.invalid>  Sat, 21 Nov 2026 12:00:00 +0000
"""
CLOSED = CHANGELOG.replace("UNRELEASED", "unstable")
NEWS = "# Changelog\n\n## 0.2.0 – unreleased\n\n### Added\n\n- Something.\n"
ENVIRONMENT = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
for who in ("AUTHOR", "COMMITTER"):
    ENVIRONMENT |= {f"GIT_{who}_NAME": "Somebody", f"GIT_{who}_EMAIL": "s@example.invalid"}


class Repository:
    """A source with the two scripts, a small program and both changelogs, committed on main."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "packaging/deb").mkdir(parents=True)
        for name in ("version.py", "release.py"):
            shutil.copy(ROOT / "packaging" / name, top / "packaging")
        self.write("ttdp.py", '"""A program."""\n__version__ = "0.2.0"\n')
        self.write("generated/nothing.py", "")
        self.write("packaging/deb/changelog", CHANGELOG)
        self.write("CHANGELOG.md", NEWS)
        self.write(".gitignore", "__pycache__/\n/build/\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("First")

    def write(self, name: str, text: str) -> None:
        (self.top / name).parent.mkdir(exist_ok=True)
        (self.top / name).write_text(text)

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=self.top, env=ENVIRONMENT, text=True).strip()

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def version(self, top: Path | None = None) -> str:
        command = [sys.executable, "packaging/version.py"]
        return subprocess.check_output(command, cwd=top or self.top, text=True).strip()

    def release(self, version: str, checks: str = "true") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "packaging/release.py", version, "--checks", checks]
        return subprocess.run(
            command, cwd=self.top, env=ENVIRONMENT, capture_output=True, text=True
        )

    def state(self) -> list[str]:
        """Everything that a release changes."""
        commands = ("rev-parse main", "tag", "status --porcelain", "branch", "worktree list")
        return [self.git(*command.split()) for command in commands]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "source")


def rises(*versions: str) -> bool:
    """Return whether each version is later than the one before, as dpkg compares them."""
    command = ["dpkg", "--compare-versions"]
    pairs = pairwise(versions)
    return all(not subprocess.call([*command, old, "lt", new]) for old, new in pairs)


def test_versions_only_rise(repository: Repository) -> None:
    """From commit to commit, through a release and after it, also within one second.

    Commits of two branches with the same count differ in their hash.
    """
    repository.git("checkout", "--quiet", "-b", "other")
    repository.commit("Other")
    other = repository.version()
    repository.git("checkout", "--quiet", "main")

    seen = [repository.version()]
    for commits in (1, 7, 1):  # then the count has a second digit
        for _ in range(commits):
            repository.commit("Change")
        seen.append(repository.version())
    assert repository.release("0.2.0").returncode == 0
    for commit in ("v0.2.0", "main"):
        repository.git("checkout", "--quiet", commit)
        seen.append(repository.version())

    assert seen[-2] == "0.2.0" and seen[-1].startswith("0.3.0~git")
    assert rises(*seen), seen
    assert other.startswith("0.2.0~git2.g") and other not in seen


def test_uncommitted_changes(repository: Repository) -> None:
    """Each has its own version; tests are not packed."""
    clean = repository.version()
    repository.write("tests/new.py", "not packed")
    assert repository.version() == clean

    versions = set()
    for name in ("generated/nothing.py", "packaging/not-tracked", "ttdp.py"):
        repository.write(name, '__version__ = "0.2.0"\n')
        versions.add(repository.version())
    assert len(versions) == 3 and all(".dirty." in version for version in versions)


def test_a_shallow_clone_is_below_other_commits(repository: Repository, tmp_path: Path) -> None:
    """It has the time of the commit instead of a count."""
    repository.commit("Second")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.top}", str(shallow))

    version = repository.version(shallow)

    assert re.fullmatch(r"0\.2\.0~git0\.20\d{12}\.g[0-9a-f]{10}", version)
    assert rises(version, "0.2.0~git1.g0000000000")


def test_without_git(repository: Repository) -> None:
    """A released source has its version; others differ by their contents, below every commit."""
    shutil.rmtree(repository.top / ".git")
    first = repository.version()
    assert re.fullmatch(r"0\.2\.0~~src\.[0-9a-f]{8}", first) and rises(first, "0.2.0~git0.2026.g0")

    repository.write("generated/nothing.py", "# more\n")
    assert repository.version() != first

    repository.write("packaging/deb/changelog", CLOSED)
    assert repository.version() == "0.2.0"


def test_a_release(repository: Repository) -> None:
    """One command checks a worktree, closes both changelogs, tags, and opens the next version."""
    repository.commit("Second")
    checks = "grep -q ' unstable;' packaging/deb/changelog && touch untracked && test $CI = true"
    done = repository.release("0.2.0", checks)

    assert done.returncode == 0 and "git push origin main v0.2.0" in done.stdout, done

    log = repository.git("log", "--format=%s").splitlines()
    assert log == ["Open 0.3.0", "Release 0.2.0", "Second", "First"]
    assert repository.git("rev-parse", "v0.2.0^{commit}") == repository.git("rev-parse", "main~1")

    headings = re.findall(r"(?m)^## (.*)$", (repository.top / "CHANGELOG.md").read_text())
    assert headings[0] == "0.3.0 – unreleased" and re.fullmatch("0.2.0 – 20..-..-..", headings[1])
    assert '__version__ = "0.3.0"' in (repository.top / "ttdp.py").read_text()
    opened = (repository.top / "packaging/deb/changelog").read_text().split("\n -- ")[0]
    named = (ROOT / "packaging/deb/changelog").read_text().split("\n -- ")[0]
    assert opened.splitlines()[1:] == named.splitlines()[1:]

    _, _, changes, _, worktrees = repository.state()
    assert not changes and len(worktrees.splitlines()) == 1


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("false", "false failed with status 1"),
        ("git -C {top} commit --quiet --allow-empty --message Third", "main has changed"),
    ],
)
def test_checks_that_fail(repository: Repository, checks: str, reason: str) -> None:
    """No tag is made, and a commit during the checks is not released unchecked."""
    done = repository.release("0.2.0", checks.format(top=repository.top))

    assert done.returncode and reason in done.stderr, done

    _, tags, changes, branches, worktrees = repository.state()
    assert (tags, changes, branches) == ("", "", "* main") and len(worktrees.splitlines()) == 1


def refusal(repository: Repository, version: str = "0.2.0") -> str:
    """The reason, given before anything is checked or changed."""
    before = repository.state()

    done = repository.release(version, "touch ../checked")

    assert done.returncode and repository.state() == before
    assert not (repository.top.parent / "checked").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("packaging/deb/changelog", CLOSED, "already closed"),
        ("CHANGELOG.md", NEWS.replace("- S", "S"), "with a list of changes"),
        ("ttdp.py", '__version__ = "0.1.0"\n', "changelog has 0.2.0, ttdp.py has 0.1.0"),
    ],
)
def test_a_source_that_is_not_ready_is_not_released(
    repository: Repository, name: str, text: str, reason: str
) -> None:
    """The version must be open, the same everywhere, and have a list of changes."""
    repository.write(name, text)
    repository.commit("Change")

    assert reason in refusal(repository)


def test_only_the_next_version_is_released_once_and_from_main(repository: Repository) -> None:
    """Three numbers, the same as in the changelog, and everything is committed."""
    assert "must be three numbers" in refusal(repository, "0.2")
    assert "begins with 0.2.0;" in refusal(repository, "0.5.0")

    repository.git("tag", "v0.2.0")
    assert "v0.2.0 is already released" in refusal(repository)

    repository.git("checkout", "-qb", "other")
    assert "not main" in refusal(repository)

    repository.write("new", "")
    assert "uncommitted changes" in refusal(repository)
