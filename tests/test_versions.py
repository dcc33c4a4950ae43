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
        self.write("CHANGELOG.md", NEWS)
        self.write(".gitignore", "/build/\n")
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit("First")

    def write(self, name: str, text: str) -> None:
        (self.top / name).write_text(text)

    def git(self, *arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(command, cwd=self.top, env=ENVIRONMENT, text=True).strip()

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def version(self) -> str:
        command = [self.top / "packaging/version.sh"]
        return subprocess.check_output(command, env=ENVIRONMENT, text=True).strip()

    def release(self, version: str, checks: str = "true") -> subprocess.CompletedProcess[str]:
        command = ["packaging/release.sh", version, checks]
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


# -- versions --------------------------------------------------------------------------------------


def test_versions_only_rise(repository: Repository) -> None:
    """From commit to commit, also with changes, through a release and after it.

    Each is below the next release.
    """
    seen = []

    def commit(number: int) -> None:
        for _ in range(number):
            repository.commit("Change")
        clean = repository.version()
        repository.write("CHANGELOG.md", "changed")
        changed = repository.version()
        repository.git("checkout", "--quiet", ".")

        assert changed == f"{clean}+dirty"
        seen.extend([clean, changed])

    for number in (1, 7, 1):  # then the count has a second digit
        commit(number)
    repository.git("tag", "-m", "", "v0.2.0")
    seen.append(repository.version())
    for number in (1, 9):
        commit(number)

    assert re.fullmatch(r"0~git2\.g[0-9a-f]{10}", seen[0]), seen
    assert seen[6] == "0.2.0" and re.fullmatch(r"0\.2\.0\+git1\.g[0-9a-f]{10}", seen[7]), seen
    assert rises(*seen, "0.2.1"), seen


def test_without_git(repository: Repository) -> None:
    """A source that is no clone has no version of its own, also inside of another clone."""
    inner = repository.top / "inner/packaging"
    inner.mkdir(parents=True)
    shutil.copy(repository.top / "packaging/version.sh", inner)

    version = subprocess.check_output([inner / "version.sh"], text=True).strip()

    assert version == "0~source" and rises(version, "0.1.0")


def test_git_is_not_installed(repository: Repository, tmp_path: Path) -> None:
    """Building in a clone without git says nothing of it, as the demo needs no version."""
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))

    done = subprocess.run(
        [repository.top / "packaging/version.sh"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert (done.stdout, done.stderr) == ("0~source\n", "")


# -- releases --------------------------------------------------------------------------------------


def test_a_release(repository: Repository) -> None:
    """One command checks a worktree, whose commit has the date in CHANGELOG.md, and tags it."""
    repository.commit("Second")
    checks = "! grep unreleased CHANGELOG.md && touch untracked && test $CI = true"

    done = repository.release("0.2.0", checks)

    assert done.returncode == 0 and "git push origin main v0.2.0" in done.stdout, done
    log = repository.git("log", "--format=%s").splitlines()
    assert log == ["Release 0.2.0", "Second", "First"] and repository.version() == "0.2.0"

    [heading, _] = re.findall(r"(?m)^## (.*)$", (repository.top / "CHANGELOG.md").read_text())
    assert re.fullmatch("0.2.0 – 20..-..-..", heading)
    _, tags, changes, _, worktrees = repository.state()
    assert (tags, changes) == ("v0.2.0", "") and len(worktrees.splitlines()) == 1


@pytest.mark.parametrize(
    ("checks", "reason"),
    [
        ("false", "false failed; nothing was changed"),
        ("git -C {top} commit --quiet --allow-empty --message Third", "main has changed"),
    ],
)
def test_checks_that_fail(repository: Repository, checks: str, reason: str) -> None:
    """No tag is made, and a commit during the checks is not released unchecked."""
    done = repository.release("0.2.0", checks.format(top=repository.top))

    assert done.returncode and reason in done.stderr, done
    _, tags, changes, branches, worktrees = repository.state()
    assert (tags, changes, branches) == ("", "", "* main") and len(worktrees.splitlines()) == 1


def test_what_is_not_released(repository: Repository) -> None:
    """The reason is given before anything is checked or changed."""

    def refusal(version: str = "0.2.0") -> str:
        before = repository.state()
        done = repository.release(version, "touch ../../../checked")
        assert done.returncode and repository.state() == before
        assert not (repository.top.parent / "checked").exists()
        return done.stderr

    assert "must be three numbers" in refusal("0.2")
    assert "with a list of changes" in refusal("0.3.0")
    assert "with a list of changes" in refusal("0.1.0")

    repository.git("tag", "v0.10.0")
    assert "v0.10.0 is already released" in refusal()
    assert "v0.10.0 is already released" in refusal("0.10.0")

    repository.git("checkout", "-qb", "other")
    assert "not main" in refusal()

    repository.git("checkout", "-q", "main")
    repository.write("new", "")
    assert "uncommitted changes" in refusal()
