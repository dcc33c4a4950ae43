"""The extracted program: its name, its directories, and the stamp that shows changed files.

Part of the package `_bootstrap` in the zipapp; start.py explains it. Every start imports this file,
so it imports only modules that the program imports as well.
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
# Exit statuses from sysexits.h. The package's unit restarts the service after 73, at growing
# intervals: the cause can end by itself (a full disk). It does not restart it after 78.
EXIT_NOT_EXTRACTED = 73  # EX_CANTCREAT
EXIT_NOT_RUNNABLE = 78  # EX_CONFIG


def roots() -> Iterator[str]:
    """Yield the directories for trees: $SHIV_ROOT, which the package sets, or the user's."""
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
    """Return whether no other user can have written to a directory; True if it does not exist."""
    try:
        found = os.lstat(directory)
    except OSError:
        return True
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    )


def is_as_noted(tree: str) -> bool:
    """Return whether every file and directory in the stamp is unchanged.

    The stamp names directories too: their times change when entries are added or removed.
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
    """Return the path in a line of the stamp."""
    return line.split(" ", 4)[4]


def mark(path: str) -> str:
    """Return inode number, size and time of a file, which differ for a changed file."""
    found = os.lstat(path)
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} "


def is_noexec(path: str) -> bool:
    """Return whether a path's file system forbids loading extension modules."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


def log(text: str, priority: int) -> None:
    """Write a line to stderr, with a syslog priority if stderr is the journal."""
    stderr = os.fstat(2)
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
    print(f"<{priority}>{text}" if is_journal else f"tt-device-plugin: {text}", file=sys.stderr)


def give_up(text: str, status: int) -> NoReturn:
    """Exit with an error message and a status."""
    log(text, priority=3)
    sys.exit(status)
