"""What a build is called, and how a release is made, by packaging/version.py and release.py."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.world.processes import ROOT

CHANGELOG = """\
tt-device-plugin (0.2.0) UNRELEASED; urgency=medium

  * See CHANGELOG.md.

 -- Somebody <somebody@example.invalid>  Sat, 21 Nov 2026 12:00:00 +0000
"""
NEWS = """\
# Changelog

## 0.2.0 – unreleased

### Added

- Something.
"""
IDENTITY = {
    "GIT_AUTHOR_NAME": "Somebody",
    "GIT_AUTHOR_EMAIL": "somebody@example.invalid",
    "GIT_COMMITTER_NAME": "Somebody",
    "GIT_COMMITTER_EMAIL": "somebody@example.invalid",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}


class Repository:
    """A source with the two scripts, a small program and both changelogs, committed on main."""

    def __init__(self, top: Path) -> None:
        self.top = top
        (top / "packaging/deb").mkdir(parents=True)
        for name in ("version.py", "release.py"):
            shutil.copy(ROOT / "packaging" / name, top / "packaging")
        self.write("ttdp.py", '"""A program."""\n__version__ = "0.2.0"\n')
        self.write("shiv.toml", "")
        self.write("generated/nothing.py", "")
        self.write("packaging/deb/changelog", CHANGELOG)
        self.write("CHANGELOG.md", NEWS)
        self.write(".gitignore", "__pycache__/\n/build/\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("First")

    def write(self, name: str, text: str) -> None:
        (self.top / name).parent.mkdir(exist_ok=True)
        (self.top / name).write_text(text)

    def read(self, name: str) -> str:
        return (self.top / name).read_text()

    def git(self, *arguments: str) -> str:
        environment = {**os.environ, **IDENTITY}
        done = subprocess.run(
            ["git", *arguments],
            cwd=self.top,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, f"packaging/{script}", *arguments]
        return subprocess.run(
            command, cwd=self.top, env={**os.environ, **IDENTITY}, capture_output=True, text=True
        )

    def version(self) -> str:
        done = self.run("version.py")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self) -> tuple[str, ...]:
        """All that a release changes."""
        return (
            self.git("rev-parse", "main"),
            self.git("tag"),
            self.git("status", "--porcelain"),
            self.git("branch"),
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / "source").mkdir()
    return Repository(tmp_path / "source")


def rises(before: str, after: str) -> bool:
    """Return what dpkg says, whose order it is."""
    return subprocess.run(["dpkg", "--compare-versions", before, "lt", after]).returncode == 0


def test_versions_only_rise(repository: Repository) -> None:
    """From commit to commit, through a release and after it, also within one second."""
    seen = [repository.version()]
    for number in range(11):  # the tenth has one digit more
        repository.commit(f"Change {number}")
        seen.append(repository.version())
    assert repository.run("release.py", "0.2.0", "--checks", "true").returncode == 0
    repository.git("checkout", "--quiet", "v0.2.0")
    seen.append(repository.version())
    repository.git("checkout", "--quiet", "main")
    seen.append(repository.version())
    assert [version for version in seen if "git" not in version] == ["0.2.0"]
    assert seen[-1].startswith("0.3.0~git")
    for before, after in pairwise(seen):
        assert rises(before, after), (before, after)


def test_after_a_release_that_opened_nothing(repository: Repository) -> None:
    """A commit on a tag made by hand is above the release, and below every later one."""
    closed = CHANGELOG.replace("UNRELEASED", "unstable")
    repository.write("packaging/deb/changelog", closed)
    repository.commit("Release 0.2.0")
    repository.git("tag", "v0.2.0")
    assert repository.version() == "0.2.0"
    repository.commit("More")
    version = repository.version()
    assert (
        rises("0.2.0", version)
        and rises(version, "0.2.1~git1.g0")
        and version.startswith("0.2.0+git")
    )


def test_a_tag_alone_is_no_release(repository: Repository) -> None:
    """While the changelog says UNRELEASED, a tag changes nothing."""
    before = repository.version()
    repository.git("tag", "v0.2.0")
    assert repository.version() == before


def changes(repository: Repository) -> Iterator[None]:
    """Change what is packed, again and again."""
    repository.write("ttdp.py", repository.read("ttdp.py") + "# one\n")
    yield
    repository.write("ttdp.py", repository.read("ttdp.py") + "# two\n")
    yield
    repository.git("add", "ttdp.py")
    repository.write("packaging/new", "not tracked")
    yield
    (repository.top / "generated/nothing.py").unlink()
    yield


def test_changes_that_are_not_committed(repository: Repository) -> None:
    """Each has a version of its own, whether git knows the file or not; a README is not packed."""
    seen = {repository.version()}
    repository.write("README.md", "not packed")
    assert repository.version() in seen
    for number, _ in enumerate(changes(repository)):
        seen.add(repository.version())
        assert len(seen) == number + 2, seen
    assert len([version for version in seen if ".dirty." in version]) == 4


def test_two_branches(repository: Repository) -> None:
    """Commits of the same number are told apart by their hash."""
    versions = []
    for name in ("one", "two"):
        repository.git("checkout", "--quiet", "-b", name, "main")
        repository.write("ttdp.py", repository.read("ttdp.py") + f"# {name}\n")
        repository.commit(name)
        versions.append(repository.version())
    assert versions[0] != versions[1]
    assert [re.sub("g[0-9a-f]{10}$", "", version) for version in versions] == ["0.2.0~git2."] * 2


def test_a_shallow_clone_is_below_all(repository: Repository, tmp_path: Path) -> None:
    """It cannot count, so it says when the commit was made instead."""
    repository.commit("Second")
    shallow = tmp_path / "shallow"
    repository.git("clone", "--quiet", "--depth=1", f"file://{repository.top}", str(shallow))
    version = subprocess.check_output(
        [sys.executable, "packaging/version.py"], cwd=shallow, text=True
    ).strip()
    assert re.fullmatch(r"0\.2\.0~git0\.20\d{12}\.g[0-9a-f]{10}", version)
    assert rises(version, "0.2.0~git1.g0000000000")


def test_without_git(repository: Repository) -> None:
    """An unpacked release is that; other sources differ by their contents, below every commit."""
    shutil.rmtree(repository.top / ".git")
    first = repository.version()
    assert re.fullmatch(r"0\.2\.0~~src\.[0-9a-f]{8}", first) and rises(first, "0.2.0~git0.2026.g0")
    repository.write("ttdp.py", repository.read("ttdp.py") + "# more\n")
    assert repository.version() != first
    repository.write("packaging/deb/changelog", CHANGELOG.replace("UNRELEASED", "unstable"))
    assert repository.version() == "0.2.0"


def test_program_and_changelog_have_to_agree(repository: Repository) -> None:
    """One line names both."""
    repository.write("ttdp.py", '__version__ = "0.1.0"\n')
    done = repository.run("version.py")
    assert done.returncode and "changelog says 0.2.0, ttdp.py 0.1.0\n" in done.stderr, done


def test_a_release(repository: Repository) -> None:
    """One command checks a worktree, closes both changelogs, tags, and opens the next version."""
    repository.commit("Second")
    checks = "grep -q ' unstable;' packaging/deb/changelog && touch untracked && test $CI = true"
    done = repository.run("release.py", "0.2.0", "--checks", checks)
    assert done.returncode == 0, done.stderr
    assert "git push origin main v0.2.0" in done.stdout
    assert repository.git("log", "--format=%s").splitlines() == [
        "On the way to 0.3.0", "Release 0.2.0", "Second", "First",
    ]  # fmt: skip
    assert repository.git("rev-parse", "v0.2.0^{commit}") == repository.git("rev-parse", "main~1")
    assert re.match(
        r"# Changelog\n\n## 0.3.0 – unreleased\n\n## 0.2.0 – 20..-..-..\n",
        repository.read("CHANGELOG.md"),
    )
    assert '__version__ = "0.3.0"' in repository.read("ttdp.py")
    assert (
        repository.git("status", "--porcelain") == ""
        and len(repository.git("worktree", "list").splitlines()) == 1
    )


def test_checks_that_fail(repository: Repository) -> None:
    """Nothing is tagged, committed or left behind, and the status says so."""
    before = repository.state()
    done = repository.run("release.py", "0.2.0", "--checks", "false")
    assert done.returncode and "false failed with status 1" in done.stderr, done
    assert (
        repository.state() == before and len(repository.git("worktree", "list").splitlines()) == 1
    )


def test_main_that_moves_meanwhile(repository: Repository) -> None:
    """A commit that comes while the checks run is not released unseen."""
    checks = f"git -C {repository.top} commit --quiet --allow-empty --message Third"
    done = repository.run("release.py", "0.2.0", "--checks", checks)
    assert done.returncode and "main has changed" in done.stderr, done
    assert repository.git("tag") == ""


REASONS = {
    "dirty": "not committed",
    "branch": "not main",
    "number": "not three numbers",
    "version": "begins with 0.2.0",
    "news": "with what is new",
    "again": "v0.2.0 has been released",
    "closed": "begins with 0.2.0",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_release_that_is_refused(repository: Repository, reason: str, tmp_path: Path) -> None:
    """In words, before anything is checked or changed."""
    version = {"number": "0.2", "version": "0.5.0"}.get(reason, "0.2.0")
    if reason == "dirty":
        repository.write("new", "")
    elif reason == "branch":
        repository.git("checkout", "--quiet", "-b", "other")
    elif reason == "news":
        repository.write("CHANGELOG.md", NEWS.replace("- Something.\n", ""))
        repository.commit("Nothing is new")
    elif reason == "again":
        repository.git("tag", "v0.2.0")
    elif reason == "closed":
        repository.write("packaging/deb/changelog", CHANGELOG.replace("UNRELEASED", "unstable"))
        repository.commit("Closed by hand")
    before = repository.state()
    done = repository.run("release.py", version, "--checks", f"touch {tmp_path}/checked")
    assert done.returncode and REASONS[reason] in done.stderr, done
    assert repository.state() == before and not (tmp_path / "checked").exists()
