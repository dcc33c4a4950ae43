#!/usr/bin/env python3
"""Prints the version of this source. Two commits with different files never have the same one.

    0.2.0                         the commit with the tag v0.2.0, or a released source without git
    0.2.0~git170.g1a2b3c4d5e      a commit before 0.2.0; it and its ancestors are 170
    0.2.0+git175.g6f7a8b9c0d      a commit after 0.2.0, before the next version was opened
    ….dirty.9f8e7d6c              with uncommitted changes; the hash is that of all packed files
    0.2.0~git0.20261122143015.g…  a commit of a shallow clone, without a count; below the others
    0.2.0~~src.9f8e7d6c           a source without git between two releases; below all of these

So versions only rise along a branch. The next version is the first entry of
packaging/deb/changelog; it is open while that entry is UNRELEASED. `make release` closes it and
opens the next one (release.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TOP = Path(__file__).resolve().parent.parent
CHANGELOG = "packaging/deb/changelog"
PROGRAM = "ttdp.py"
# The files that the packages are made of.
PACKED = (PROGRAM, "shiv.toml", "README.md", "CHANGELOG.md", "generated", "packaging")
LINE = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)  # in the program


class Unknown(Exception):
    """The version is unknown, or a release is refused; the text is the reason."""


class Entry(NamedTuple):
    """The first entry of Debian's changelog."""

    version: str
    released: bool


def main() -> int:
    """Print the version."""
    try:
        print(version(TOP))
    except Unknown as reason:
        sys.exit(f"unknown version: {reason}")
    return 0


def version(top: Path) -> str:
    """Return the version of a checkout or an unpacked source. Raises Unknown."""
    entry = first_entry(top)
    if not (top / ".git").exists():
        return (
            entry.version
            if entry.released
            else f"{entry.version}~~src.{digest(top, all_files(top))}"
        )
    commit = git(top, "rev-parse", "HEAD")
    tag = f"v{entry.version}"
    dirty = git(top, "status", "--porcelain", "--", *PACKED)
    tags = git(top, "tag", "--points-at", "HEAD").splitlines()
    if entry.released and tag in tags and not dirty:
        return entry.version
    after = tag in git(top, "tag", "--merged", "HEAD").splitlines() and tag not in tags
    if git(top, "rev-parse", "--is-shallow-repository") == "true":
        number = "0." + git(top, "log", "-1", "--format=%cd", "--date=format-local:%Y%m%d%H%M%S")
    else:
        number = git(top, "rev-list", "--count", "HEAD")
    text = f"{entry.version}{'+' if after else '~'}git{number}.g{commit[:10]}"
    if dirty:
        listed = git(
            top,
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            "--deduplicate",
            "--",
            *PACKED,
        )
        text += f".dirty.{digest(top, listed.splitlines())}"
    return text


def first_entry(top: Path) -> Entry:
    """Return the changelog's first entry. Raises Unknown if the program's version differs."""
    found = re.match(r"tt-device-plugin \(([^)]+)\) ([\w-]+);", (top / CHANGELOG).read_text())
    program = LINE.findall((top / PROGRAM).read_text())
    if not found:
        raise Unknown(f"{CHANGELOG} does not begin with a version")
    if program != [found[1]]:
        raise Unknown(
            f"{CHANGELOG} has {found[1]}, {PROGRAM} has {' and '.join(program) or 'none'}"
        )
    return Entry(found[1], found[2] != "UNRELEASED")


def with_version(text: str, version: str) -> str:
    """Return the program's text with another version."""
    changed, number = LINE.subn(f'__version__ = "{version}"', text)
    assert number == 1, f"{number} lines of {PROGRAM} set __version__"
    return changed


def git(top: Path, *arguments: str) -> str:
    """Return git's output. Raises Unknown if it fails or is not installed."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    # Root may build in another user's clone.
    command = ["git", "-c", "safe.directory=*", "-C", str(top), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise Unknown("install git: this is a git repository") from None
    if done.returncode:
        raise Unknown(done.stderr.strip())
    return done.stdout.strip()


def all_files(top: Path) -> list[str]:
    """Return the packed files of a source without git, except for Python's caches."""
    found = []
    for name in PACKED:
        place = top / name
        files = place.rglob("*") if place.is_dir() else [place]
        found += [
            str(path.relative_to(top))
            for path in files
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return found


def digest(top: Path, names: list[str]) -> str:
    """Return eight digits of a hash of the files' names and contents."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = top / name
        content = path.read_bytes() if path.exists() else b""
        total.update(f"{name}\0{path.exists()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:8]


if __name__ == "__main__":
    sys.exit(main())
