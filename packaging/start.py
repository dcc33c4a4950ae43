"""Starts the program in the zipapp that holds this file, as `_bootstrap.start`.

An extension module cannot be loaded from a zip, so the first start extracts what this Python needs (extract.py). Each
start after that is only what stands here: it compares the tree's sizes, times and inode numbers with those that were
noted when every content was known to be right, and goes on in the same interpreter. So nothing is imported here that
the program would not import itself: zipfile, hashlib and what comes with them would stay in its memory for good.
"""

from __future__ import annotations

import importlib
import os
import stat
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NoReturn

from . import packed

ARCHIVE: str = __loader__.archive  # type: ignore[name-defined]
ABI = EXTENSION_SUFFIXES[0].split(".")[1]  # "cpython-311-x86_64-linux-gnu"
TREE = f"{packed.BUILD}-{ABI}"  # each build and each Python has its own
STAMP = "stamp"  # in the tree: the number of files and directories, and for each a line with mark, digest and path
CHECKED = "TTDP_CHECKED_TREE"  # tells the next process that a tree was checked in full


def start() -> NoReturn:
    checked = os.environ.pop(CHECKED, None)
    for root in roots():
        tree = f"{root}/{TREE}"
        if tree == checked or is_as_noted(tree):
            run(tree)
    from . import extract

    extract.prepare()


def roots() -> Iterator[str]:
    """Where the tree can be: in $SHIV_ROOT, which the package sets; else in a directory of the user's own."""
    if root := os.environ.get("SHIV_ROOT"):
        yield root
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [f"{cache}/tt-device-plugin"]
    for temporary in (os.environ.get("TMPDIR", "/tmp"), "/var/tmp"):
        places.append(f"{temporary}/tt-device-plugin-{os.geteuid()}")
    yield from (place for place in places if os.path.isabs(place) and is_private(place))


def is_private(directory: str) -> bool:
    """Whether nobody else can have put something there. True while there is nothing."""
    try:
        found = os.lstat(directory)
    except OSError:
        return True
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_as_noted(tree: str) -> bool:
    """Whether all that the stamp names is as it was. A directory's time changes with its entries."""
    try:
        return all(line.startswith(mark(f"{tree}/{path_in(line)}")) for line in lines_of_stamp(tree))
    except (OSError, ValueError, IndexError):
        return False


def lines_of_stamp(tree: str) -> list[str]:
    """One for each file and directory. Raises OSError or ValueError."""
    with open(f"{tree}/{STAMP}") as stamp:
        number, *lines = stamp.read().splitlines() or [""]
    if number != str(len(lines)):
        raise ValueError(f"{STAMP} is not complete")
    return lines


def path_in(line: str) -> str:
    return line.split(" ", 4)[4]


def mark(path: str) -> str:
    """What tells a file from a changed one without reading it."""
    found = os.lstat(path)
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns} "


def run(tree: str) -> NoReturn:
    sys.path[:] = [f"{tree}/site-packages", *(place for place in sys.path if place != ARCHIVE)]
    try:
        program = importlib.import_module(packed.MODULE)
    except (ImportError, OSError) as error:
        give_up(f"{tree} {'is mounted noexec' if is_noexec(tree) else f'cannot be loaded: {error}'}")
    sys.exit(getattr(program, packed.FUNCTION)())


def is_noexec(path: str) -> bool:
    """Whether no extension module can be loaded from there."""
    return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)


def say(text: str, priority: int) -> None:
    """A line on stderr, with its priority if that is the journal."""
    stderr = os.fstat(2)
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
    print(f"<{priority}>{text}" if is_journal else f"tt-device-plugin: {text}", file=sys.stderr)


def give_up(text: str) -> NoReturn:
    """Ends the process with the status after which systemd does not try again."""
    say(text, priority=3)
    sys.exit(78)
