"""Extracts the program from the zipapp that holds this file (`_bootstrap.extract`), or checks it.

Imported only if start.py, which says why these files are there, finds no tree that is as it was
noted. In the end the same command is executed once more: the program's own process holds nothing of
what is imported here.
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

from . import packed, trees

SOURCES = "site-packages/"  # what is extracted of the zipapp


def prepare(variable: str) -> NoReturn:
    """Find or make a tree and start the program, or say in one line why there is none.

    `variable` of the environment tells the next process which tree was checked.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if trees.ABI not in packed.ABIS:
        use_another_python()
    umask = os.umask(0o022)  # what root extracts, every user can run
    reasons = []
    for root in trees.roots():
        try:
            prepare_in(root)
        except OSError as error:
            reasons.append(f"{root}: {error.strerror or error}")
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            trees.give_up(f"{trees.ARCHIVE} is damaged ({error}); install it anew")
        else:
            os.umask(umask)
            os.environ[variable] = f"{root}/{trees.NAME}"
            os.execv(sys.executable, sys.orig_argv)
    as_root = "; run it as root once" if os.geteuid() and "SHIV_ROOT" in os.environ else ""
    trees.give_up(f"there is no place for the extracted program: {'; '.join(reasons)}{as_root}")


def use_another_python() -> NoReturn:
    """Execute the same command with a Python that something is packed for; without one give up."""
    minors = {int(abi.split("-")[1][1:]): abi for abi in packed.ABIS}
    machine = trees.ABI.split("-", 2)[2]
    # One of a version that is packed and still not this one's is an odd build: others may be, too,
    # and so on for ever.
    candidates = [] if sys.version_info.minor in minors else sorted(minors, reverse=True)
    for minor in candidates:
        for directory in (os.path.dirname(sys.executable), "/usr/bin"):
            python = f"{directory}/python3.{minor}"
            if minors[minor].endswith(f"-{machine}") and os.access(python, os.X_OK):
                fault = f"nothing is packed for {sys.executable} ({trees.ABI})"
                trees.say(
                    f"{fault}; {python} runs it; install a newer tt-device-plugin", priority=4
                )
                os.execv(python, [python, *sys.orig_argv[1:]])
    versions = ", ".join(f"3.{minor}" for minor in minors)
    packed_machine = packed.ABIS[0].split("-", 2)[2]
    trees.give_up(
        "install a newer tt-device-plugin, or one of these Pythons: nothing is packed for this "
        f"Python ({trees.ABI}): it takes CPython {versions} on {packed_machine}"
    )


def prepare_in(root: str) -> None:
    """Make sure that the tree in `root` is right. Raises OSError, or what a damaged zip does."""
    tree = f"{root}/{trees.NAME}"
    try:
        noted = {trees.path_in(line): line.split(" ")[3] for line in trees.lines_of_stamp(tree)}
        found = contents(tree)
        fault = difference(noted, found)
    except (OSError, ValueError, IndexError) as error:
        fault = str(error)
    if not fault:
        with contextlib.suppress(OSError):  # who may not write there checks it in full each time
            write_stamp(tree, found)
        return
    os.makedirs(root, exist_ok=True)
    if root not in trees.roots():
        raise PermissionError(errno.EPERM, "others can write there")
    if trees.is_noexec(root):
        raise PermissionError(errno.EACCES, "mounted noexec")
    with open(f"{root}/.{trees.NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if trees.is_as_noted(tree):
            return  # another process was first
        existed = os.path.lexists(tree)
        extract(tree, f"{root}/.{trees.NAME}.tmp")
    if existed:
        trees.say(f"the extracted program was damaged ({fault}) and is extracted anew", priority=4)


def extract(tree: str, half: str) -> None:
    """Make the tree, complete and on the disk before it gets its name.

    Raises OSError, or what a damaged zip does.
    """
    shutil.rmtree(half, ignore_errors=True)
    try:
        with zipfile.ZipFile(trees.ARCHIVE) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.startswith(SOURCES) and is_loadable(name)
            ]
            archive.extractall(f"{half}/new", names)
        for name in names:
            if name.endswith(".py"):
                compile_source(f"{half}/new/{name}", f"{tree}/{name}")
        write_stamp(f"{half}/new", contents(f"{half}/new"))
        with contextlib.suppress(FileNotFoundError):
            os.rename(tree, f"{half}/old")
        os.rename(f"{half}/new", tree)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def compile_source(source: str, place: str) -> None:
    """Compile a source that will be at `place`. The interpreter need not compare it: stamps do."""
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(source, dfile=place, doraise=True, invalidation_mode=unchecked)


def is_loadable(name: str) -> bool:
    """Return whether it is something for this Python: no other one's extension module."""
    return (
        not name.endswith(".so")
        or f".{name.rpartition('/')[2].partition('.')[2]}" in EXTENSION_SUFFIXES
    )


def difference(noted: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Return the first file that is not as it was, in words."""
    for path in sorted(noted.keys() | found.keys()):
        if path not in found:
            return f"{path} is missing"
        if path not in noted:
            return f"{path} is not ours"
        if noted[path] != found[path]:
            return f"{path} has changed"
    return None


def contents(tree: str) -> dict[str, str]:
    """Return the digest of each file by its path, of each directory a dash. Raises OSError."""
    found = {}
    for directory, _, names in os.walk(f"{tree}/{SOURCES}".rstrip("/")):
        found[os.path.relpath(directory, tree)] = "-"
        for path in (f"{directory}/{name}" for name in names):
            with open(path, "rb") as file:
                found[os.path.relpath(path, tree)] = hashlib.sha256(file.read()).hexdigest()
    return found


def write_stamp(tree: str, found: Mapping[str, str]) -> None:
    """Write the stamp once all that it vouches for is on the disk. Raises OSError."""
    lines = [f"{trees.mark(f'{tree}/{path}')}{digest} {path}" for path, digest in found.items()]
    with open(f"{tree}/{trees.STAMP}.new", "w") as stamp:
        stamp.write("\n".join([str(len(lines)), *lines, ""]))
        stamp.flush()
        if ctypes.CDLL(None, use_errno=True).syncfs(stamp.fileno()) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.rename(f"{tree}/{trees.STAMP}.new", f"{tree}/{trees.STAMP}")
