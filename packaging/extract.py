"""Extracts the program from the zipapp that contains this file, or checks the extracted tree.

start.py imports it as `_bootstrap.extract`, only if it finds no unchanged tree. At the end it
executes the same command again, so the program's own process contains none of these imports.
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

SOURCES = "site-packages/"  # the directory in the zipapp that is extracted


def prepare(variable: str) -> NoReturn:
    """Make an intact tree and start the program, or exit with one line that gives the reason.

    variable: the environment variable that passes the checked tree's path to the next process.
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
            text = f"reinstall tt-device-plugin: {trees.ARCHIVE} is damaged ({error})"
            trees.give_up(text, trees.EXIT_NOT_RUNNABLE)
        else:
            os.umask(umask)
            os.environ[variable] = f"{root}/{trees.NAME}"
            os.execv(sys.executable, sys.orig_argv)
    as_root = "; run it as root once" if os.geteuid() and "SHIV_ROOT" in os.environ else ""
    text = f"cannot extract the program: {'; '.join(reasons)}{as_root}"
    trees.give_up(text, trees.EXIT_NOT_EXTRACTED)


def use_another_python() -> NoReturn:
    """Execute the same command with a Python that the zipapp supports, or exit."""
    minors = {int(abi.split("-")[1][1:]): abi for abi in packed.ABIS}
    machine = trees.ABI.split("-", 2)[2]
    # A Python of a supported version with another ABI is an unusual build. Other Pythons may be
    # unusual as well, and would execute each other endlessly.
    candidates = [] if sys.version_info.minor in minors else sorted(minors, reverse=True)
    for minor in candidates:
        for directory in (os.path.dirname(sys.executable), "/usr/bin"):
            python = f"{directory}/python3.{minor}"
            if minors[minor].endswith(f"-{machine}") and os.access(python, os.X_OK):
                fault = f"this package does not support {sys.executable} ({trees.ABI})"
                remedy = f"using {python}; install a newer tt-device-plugin"
                trees.log(f"{fault}; {remedy}", priority=4)
                os.execv(python, [python, *sys.orig_argv[1:]])
    versions = ", ".join(f"3.{minor}" for minor in minors)
    packed_machine = packed.ABIS[0].split("-", 2)[2]
    trees.give_up(
        f"install a newer tt-device-plugin, or CPython {versions} on {packed_machine}: "
        f"this package does not support this Python ({trees.ABI})",
        trees.EXIT_NOT_RUNNABLE,
    )


def prepare_in(root: str) -> None:
    """Check the tree in `root`, or extract it. Raises OSError, or zipfile's and zlib's errors."""
    tree = f"{root}/{trees.NAME}"
    try:
        noted = {trees.path_in(line): line.split(" ")[3] for line in trees.lines_of_stamp(tree)}
        found = contents(tree)
        fault = difference(noted, found)
    except (OSError, ValueError, IndexError) as error:
        fault = str(error)
    if not fault:
        with contextlib.suppress(OSError):  # a user who cannot write checks in full each time
            write_stamp(tree, found)
        return
    os.makedirs(root, exist_ok=True)
    if root not in trees.roots():
        raise PermissionError(errno.EPERM, "other users can write to it")
    if trees.is_noexec(root):
        raise PermissionError(errno.EACCES, "mounted noexec")
    with open(f"{root}/.{trees.NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if trees.is_as_noted(tree):
            return  # another process has extracted it
        existed = os.path.lexists(tree)
        extract(tree, f"{root}/.{trees.NAME}.tmp")
    if existed:
        trees.log(f"the extracted program was damaged ({fault}); extracted again", priority=4)


def extract(tree: str, half: str) -> None:
    """Make the tree: it gets its name only when it is complete and on the disk.

    Raises OSError, or zipfile's and zlib's errors for a damaged zip.
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
    """Compile a source that will be at `place`.

    The interpreter does not compare source and bytecode at each start: the stamp has both.
    """
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(source, dfile=place, doraise=True, invalidation_mode=unchecked)


def is_loadable(name: str) -> bool:
    """Return whether this Python can load a file: False for other Pythons' extension modules."""
    return (
        not name.endswith(".so")
        or f".{name.rpartition('/')[2].partition('.')[2]}" in EXTENSION_SUFFIXES
    )


def difference(noted: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """Describe the first changed, missing or additional file; None if there is no difference."""
    for path in sorted(noted.keys() | found.keys()):
        if path not in found:
            return f"{path} is missing"
        if path not in noted:
            return f"{path} is not part of it"
        if noted[path] != found[path]:
            return f"{path} has changed"
    return None


def contents(tree: str) -> dict[str, str]:
    """Return the digest of each file by path, and "-" for each directory. Raises OSError."""
    found = {}
    for directory, _, names in os.walk(f"{tree}/{SOURCES}".rstrip("/")):
        found[os.path.relpath(directory, tree)] = "-"
        for path in (f"{directory}/{name}" for name in names):
            with open(path, "rb") as file:
                found[os.path.relpath(path, tree)] = hashlib.sha256(file.read()).hexdigest()
    return found


def write_stamp(tree: str, found: Mapping[str, str]) -> None:
    """Write the stamp when all files that it names are on the disk. Raises OSError."""
    lines = [f"{trees.mark(f'{tree}/{path}')}{digest} {path}" for path, digest in found.items()]
    with open(f"{tree}/{trees.STAMP}.new", "w") as stamp:
        stamp.write("\n".join([str(len(lines)), *lines, ""]))
        stamp.flush()
        if ctypes.CDLL(None, use_errno=True).syncfs(stamp.fileno()) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.rename(f"{tree}/{trees.STAMP}.new", f"{tree}/{trees.STAMP}")
