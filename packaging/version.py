#!/usr/bin/env python3
"""Prints the version of what is built here. Two commits of different bytes never have the same.

    0.2.0                         the commit with the tag v0.2.0; a source without git, if released
    0.2.0~git170.g1a2b3c4d5e      a commit on the way to 0.2.0, the 170th of all that lead to it
    0.2.0+git175.g6f7a8b9c0d      one after it, where the next version is not opened yet
    ….dirty.9f8e7d6c              with changes; the last word is of all that would be packed
    0.2.0~git0.20261122143015.g…  a commit in a shallow clone, which cannot count: below the others
    0.2.0~~src.9f8e7d6c           a source without git between two releases: below these

So along a branch versions only rise. Which version is being worked on is what
packaging/deb/changelog says at its top; while that says UNRELEASED it is open. `make release`
closes it and opens the next (release.py).
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
PACKED = (PROGRAM, "shiv.toml", "generated", "packaging")  # what the packages are made of
LINE = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)  # of the program's text


class Unknown(Exception):
    """Why the version cannot be told, in words."""


class Entry(NamedTuple):
    """The first entry of Debian's changelog."""

    version: str
    released: bool


def main() -> int:
    """Print the version."""
    try:
        print(version(TOP))
    except Unknown as reason:
        sys.exit(f"what version is this? {reason}")
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
    """Return the changelog's first entry, whose version has to be the program's. Raises Unknown."""
    found = re.match(r"tt-device-plugin \(([^)]+)\) ([\w-]+);", (top / CHANGELOG).read_text())
    program = LINE.findall((top / PROGRAM).read_text())
    if not found:
        raise Unknown(f"{CHANGELOG} does not begin with one")
    if program != [found[1]]:
        raise Unknown(
            f"{CHANGELOG} says {found[1]}, {PROGRAM} {' and '.join(program) or 'nothing'}"
        )
    return Entry(found[1], found[2] != "UNRELEASED")


def with_version(text: str, version: str) -> str:
    """Return the program's text with another version in its one line that has it."""
    changed, number = LINE.subn(f'__version__ = "{version}"', text)
    assert number == 1, f"{number} lines of {PROGRAM} set __version__"
    return changed


def git(top: Path, *arguments: str) -> str:
    """Return what git says. Raises Unknown, where it refuses or is not there."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC0"}
    # Root may build what belongs to somebody else.
    command = ["git", "-c", "safe.directory=*", "-C", str(top), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError:
        raise Unknown("this is a git repository, and git is not installed") from None
    if done.returncode:
        raise Unknown(done.stderr.strip())
    return done.stdout.strip()


def all_files(top: Path) -> list[str]:
    """Return what is packed of a source without git, without what Python leaves there."""
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
    """Return eight digits that are others for other contents or names."""
    total = hashlib.sha256()
    for name in sorted(names):
        path = top / name
        content = path.read_bytes() if path.exists() else b""
        total.update(f"{name}\0{path.exists()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:8]


if __name__ == "__main__":
    sys.exit(main())
