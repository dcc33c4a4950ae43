"""A directory tree that stands in for sysfs, /dev and /proc: attributes change, fail and block.

* **A read that fails.** A file cannot return ENODATA, so an attribute that is to fail with an errno
  is a dangling symlink to `errno:NAME` (any name of the errno module). `errno_of(path)` recognises
  it; tests.world.simulation wraps `os.open` with it and raises OSError there.
* **A read that blocks.** The attribute is a FIFO: open() for reading waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

# Mode 0644 in sysfs; everything else is 0444.
WRITABLE = {"uevent", "numa_node", "config", "driver_override"}


def errno_of(path: str | os.PathLike[str]) -> int | None:
    """Return the errno with which a read of this attribute is to fail; None for other files."""
    try:
        target = os.readlink(path)
    except (OSError, ValueError):
        return None
    if not target.startswith("errno:"):
        return None
    return int(getattr(errno, target.removeprefix("errno:")))


def replace(path: Path, make: Callable[[Path], None], *, answer: str = "") -> None:
    """Replace `path` by what `make` makes, in one step; readers that a FIFO held get `answer`."""
    new = path.with_name(f".{path.name}.new")  # nothing in sysfs begins with a dot
    try:
        is_fifo = stat.S_ISFIFO(path.lstat().st_mode)
        blocked = os.open(path, os.O_RDWR | os.O_NONBLOCK) if is_fifo else None
    except FileNotFoundError:
        blocked = None

    make(new)
    os.replace(new, path)

    # Its opening let the readers in; they get one answer, and then the end of the file.
    if blocked is not None:
        os.write(blocked, answer.encode())
        os.close(blocked)


def put(path: Path, content: str | bytes) -> None:
    """Write an attribute; a str gets the newline that ends every attribute of the driver.

    A small one that exists is written in place: an open descriptor reads the new value.
    """
    data = content if isinstance(content, bytes) else f"{content}\n".encode() if content else b""
    if data and _overwrite(path, data):
        return

    def make(new: Path) -> None:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.fchmod(fd, 0o644 if path.name in WRITABLE else 0o444)
        os.write(fd, data)
        os.close(fd)

    replace(path, make, answer=data.decode("utf-8", "replace"))


def _overwrite(path: Path, data: bytes) -> bool:
    """Write into a small regular file in one step; return whether there was one."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or max(status.st_size, len(data)) > 4096:
            return False
        reading = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False

    os.fchmod(reading, 0o644)  # for other users than root
    writing = os.open(f"/proc/self/fd/{reading}", os.O_WRONLY)
    # A reader between the two calls gets the new value and empty lines, never a mixture.
    os.pwrite(writing, data.ljust(status.st_size, b"\n"), 0)
    os.ftruncate(writing, len(data))

    os.fchmod(reading, status.st_mode & 0o7777)
    os.close(writing)
    os.close(reading)
    return True


def put_control(path: Path) -> None:
    """Make a file that is only written to; what a write does, tests.world.controls knows."""
    os.mkfifo(path)
    path.chmod(0o600)  # sysfs has 0200, but the simulation must open it for reading, too


def put_errno(path: Path, name: str) -> None:
    replace(path, lambda new: os.symlink(f"errno:{name}", new))


def link(path: Path, target: Path) -> None:
    """Make a relative symlink, as sysfs does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.join(os.path.relpath(target.parent, path.parent), target.name))


def remove(path: Path) -> None:
    """Remove a file, link or directory, and release readers that wait in a FIFO there."""
    is_directory = path.is_dir() and not path.is_symlink()
    for each in [path, *path.rglob("*")] if is_directory else [path]:
        if each.is_fifo():
            put(each, b"")

    if is_directory:
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
