"""What the extracted program is: its name and places, and the stamp that tells of changes.

One of the files of the package `_bootstrap` in the zipapp: start.py says why they are there. As
every start imports this one, it imports nothing that the program would not import itself.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NoReturn

from . import packed

ARCHIVE: str = __loader__.archive  # type: ignore[name-defined]
ABI = EXTENSION_SUFFIXES[0].split(".")[1]  # "cpython-311-x86_64-linux-gnu"
NAME = f"{packed.BUILD}-{ABI}"  # each build and each Python has a tree of its own
# In the tree: the number of files and directories, and for each a line with mark, digest and path.
STAMP = "stamp"


def roots() -> Iterator[str]:
    """Yield where the tree can be: $SHIV_ROOT, which the package sets, or the user's own."""
    if root := os.environ.get("SHIV_ROOT"):
        yield root
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [f"{cache}/tt-device-plugin"]
    for temporary in (os.environ.get("TMPDIR", "/tmp"), "/var/tmp"):
        places.append(f"{temporary}/tt-device-plugin-{os.geteuid()}")
    for place in places:
        if os.path.isabs(place) and is_private(place):
            yield place


def is_private(directory: str) -> bool:
    """Return whether nobody else can have put something there. True while there is nothing."""
    try:
        found = os.lstat(directory)
    except OSError:
        return True
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def is_as_noted(tree: str) -> bool:
    """Return whether all that the stamp names is as it was.

    A directory's time changes with its entries.
    """
    try:
        return all(
            line.startswith(mark(f"{tree}/{path_in(line)}")) for line in lines_of_stamp(tree)
        )
    except (OSError, ValueError, IndexError):
        return False


def lines_of_stamp(tree: str) -> list[str]:
    """Return one line for each file and directory. Raises OSError or ValueError."""
    with open(f"{tree}/{STAMP}") as stamp:
        number, *lines = stamp.read().splitlines() or [""]
    if number != str(len(lines)):
        raise ValueError(f"{STAMP} is not complete")
    return lines


def path_in(line: str) -> str:
    """Return the path that a line of the stamp is about."""
    return line.split(" ", 4)[4]


def mark(path: str) -> str:
    """Return what tells a file from a changed one without reading it."""
    found = os.lstat(path)
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} "


def is_noexec(path: str) -> bool:
    """Return whether no extension module can be loaded from there."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


def say(text: str, priority: int) -> None:
    """Write a line to stderr, with its priority if that is the journal."""
    stderr = os.fstat(2)
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
    print(f"<{priority}>{text}" if is_journal else f"tt-device-plugin: {text}", file=sys.stderr)


def give_up(text: str) -> NoReturn:
    """End the process with the status after which systemd does not try again."""
    say(text, priority=3)
    sys.exit(78)
