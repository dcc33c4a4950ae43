"""A directory tree that stands in for sysfs, /dev and /proc: attributes change, fail and block.

A file cannot return ENODATA, so an attribute whose read is to fail is a dangling symlink to
`errno:NAME`, and kernel_errors() of tests.world.simulation wraps os.open(). One that blocks is a
FIFO.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

WRITABLE = {"numa_node", "driver_override"}  # 0644 in sysfs; everything else is 0444


def errno_of(path: str | os.PathLike[str]) -> int | None:
    """Return the errno with which a read of this attribute is to fail; None for other files."""
    with contextlib.suppress(OSError, ValueError):
        prefix, _, name = os.readlink(path).partition(":")
        if prefix == "errno":
            return int(getattr(errno, name))
    return None


def replace(path: Path, make: Callable[[Path], object], answer: bytes = b"") -> None:
    """Replace `path` by what `make` makes, in one step; readers that a FIFO held get `answer`."""
    waiting = os.open(path, os.O_RDWR | os.O_NONBLOCK) if path.is_fifo() else None
    new = path.with_name(f".{path.name}.new")  # nothing in sysfs begins with a dot
    make(new)
    os.replace(new, path)

    # Its opening let the readers in; they get one answer, and then the end of the file.
    if waiting is not None:
        os.write(waiting, answer)
        os.close(waiting)


def put(path: Path, content: str | bytes) -> None:
    """Write an attribute; a str gets the newline that ends every attribute of the driver."""
    data = content if isinstance(content, bytes) else f"{content}\n".encode() if content else b""

    def make(new: Path) -> None:
        new.write_bytes(data)
        new.chmod(0o644 if path.name in WRITABLE else 0o444)

    replace(path, make, data)


def put_control(path: Path) -> None:
    """Make a file that is only written to; what a write does, tests.world.controls knows."""
    os.mkfifo(path)
    path.chmod(0o600)  # sysfs has 0200, but the simulation must open it for reading, too


def put_errno(path: Path, name: str) -> None:
    replace(path, lambda new: new.symlink_to(f"errno:{name}"))


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
