"""Extracts the program from the zipapp that holds this file, as `_bootstrap.extract`, or checks a tree in full.

Imported only if start.py finds no tree that is as it was noted. In the end the same command is executed once more: the
program's own process holds nothing of what is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import py_compile
import shutil
import signal
import sys
import zipfile
import zlib
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NoReturn

from . import packed, start

SOURCES = "site-packages/"  # what is extracted of the zipapp


def prepare() -> NoReturn:
    """Finds or makes a tree and starts the program, or says in one line why there is none."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if start.ABI not in packed.ABIS:
        versions = ", ".join(f"3.{abi.split('-')[1][1:]}" for abi in packed.ABIS)
        machine = packed.ABIS[0].split("-", 2)[2]
        start.give_up(f"nothing is packed for this Python ({start.ABI}): it takes CPython {versions} on {machine}")
    umask = os.umask(0o022)  # what root extracts, every user can run
    reasons = []
    for root in start.roots():
        try:
            prepare_in(root)
        except OSError as error:
            reasons.append(f"{root}: {error.strerror or error}")
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            start.give_up(f"{start.ARCHIVE} is damaged ({error}); install it anew")
        else:
            os.umask(umask)
            os.environ[start.CHECKED] = f"{root}/{start.TREE}"
            os.execv(sys.executable, sys.orig_argv)
    as_root = "; run it as root once" if os.geteuid() and "SHIV_ROOT" in os.environ else ""
    start.give_up(f"there is no place for the extracted program: {'; '.join(reasons)}{as_root}")


def prepare_in(root: str) -> None:
    """Makes sure that the tree in `root` is there and right. Raises OSError, or what a damaged zip does."""
    tree = f"{root}/{start.TREE}"
    try:
        noted = {start.path_in(line): line.split(" ")[3] for line in start.lines_of_stamp(tree)}
        found = contents(tree)
        fault = difference(noted, found)
    except (OSError, ValueError, IndexError) as error:
        fault = str(error)
    if not fault:
        with contextlib.suppress(OSError):  # who may not write there checks it in full each time
            write_stamp(tree, found)
        return
    os.makedirs(root, exist_ok=True)
    if root not in start.roots():
        raise PermissionError(errno.EPERM, "others can write there")
    if start.is_noexec(root):
        raise PermissionError(errno.EACCES, "mounted noexec")
    with open(f"{root}/.{start.TREE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if start.is_as_noted(tree):
            return  # another process was first
        existed = os.path.lexists(tree)
        extract(tree, f"{root}/.{start.TREE}.tmp")
    if existed:
        start.say(f"the extracted program was damaged ({fault}) and is extracted anew", priority=4)


def extract(tree: str, half: str) -> None:
    """Makes the tree, complete and on the disk before it gets its name. Raises OSError, or what a damaged zip does."""
    shutil.rmtree(half, ignore_errors=True)
    try:
        with zipfile.ZipFile(start.ARCHIVE) as archive:
            names = [name for name in archive.namelist() if name.startswith(SOURCES) and is_loadable(name)]
            archive.extractall(f"{half}/new", names)
        for name in names:
            if name.endswith(".py"):
                unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # the stamp tells whether it has changed
                source, place = f"{half}/new/{name}", f"{tree}/{name}"
                py_compile.compile(source, dfile=place, doraise=True, invalidation_mode=unchecked)
        write_stamp(f"{half}/new", contents(f"{half}/new"))
        with contextlib.suppress(FileNotFoundError):
            os.rename(tree, f"{half}/old")
        os.rename(f"{half}/new", tree)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def is_loadable(name: str) -> bool:
    """Whether it is something for this Python: no other one's extension module."""
    return not name.endswith(".so") or f".{name.rpartition('/')[2].partition('.')[2]}" in EXTENSION_SUFFIXES


def difference(noted: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first file that is not as it was, in words."""
    for path in sorted(noted.keys() | found.keys()):
        if noted.get(path) != found.get(path):
            return f"{path} {'is missing' if path not in found else 'has changed' if path in noted else 'is not ours'}"
    return None


def contents(tree: str) -> dict[str, str]:
    """The digest of each file's content by its path, and a dash for each directory's. Raises OSError."""
    found = {}
    for directory, _, names in os.walk(f"{tree}/{SOURCES}".rstrip("/")):
        found[os.path.relpath(directory, tree)] = "-"
        for path in (f"{directory}/{name}" for name in names):
            with open(path, "rb") as file:
                found[os.path.relpath(path, tree)] = hashlib.sha256(file.read()).hexdigest()
    return found


def write_stamp(tree: str, found: Mapping[str, str]) -> None:
    """Writes the stamp once all that it vouches for is on the disk. Raises OSError."""
    lines = [f"{start.mark(f'{tree}/{path}')}{digest} {path}" for path, digest in found.items()]
    with open(f"{tree}/{start.STAMP}.new", "w") as stamp:
        stamp.write("\n".join([str(len(lines)), *lines, ""]))
        stamp.flush()
        if ctypes.CDLL(None, use_errno=True).syncfs(stamp.fileno()) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.rename(f"{tree}/{start.STAMP}.new", f"{tree}/{start.STAMP}")
