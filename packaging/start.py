"""Starts the program in the zipapp that holds this file, as `_bootstrap.start`.

These files (this one, trees.py, extract.py) stand where shiv has a bootstrap of its own, which does
not do for a daemon of a package. It extracts the modules of every Python. It believes a tree that
is there, whoever has put it there and whatever has become of its files (or, with an option, reads
all sources at each start, and no extension module). And zipfile, hashlib and what else it imports
stay in the daemon's memory. shiv packs the zipapp all the same.

An extension module cannot be loaded from a zip, so the first start extracts what this Python needs
(extract.py). Each start after that is only what stands here: it compares the tree's sizes, times
and inode numbers with those that were noted when every content was known to be right, and goes on
in the same interpreter.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from typing import NoReturn

from . import packed, trees

CHECKED = "TTDP_CHECKED_TREE"  # tells the next process that a tree was checked in full


def start() -> NoReturn:
    """Start the program from a tree that is right, or leave it to extract.py to make one."""
    if "run" in sys.argv[1:]:
        # The daemon's sign to read its configuration again, which it will do anyway; untreated, the
        # signal kills.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    checked = os.environ.pop(CHECKED, None)
    for root in trees.roots():
        path = f"{root}/{trees.NAME}"
        if path == checked or trees.is_as_noted(path):
            run(path)
    from . import extract

    extract.prepare(CHECKED)


def run(path: str) -> NoReturn:
    """Run the program of a tree in this process."""
    prepare_modules()
    sys.path[:] = [
        f"{path}/site-packages",
        *(place for place in sys.path if place != trees.ARCHIVE),
    ]
    try:
        program = importlib.import_module(packed.MODULE)
    except (ImportError, OSError) as error:
        fault = "is mounted noexec" if trees.is_noexec(path) else f"cannot be loaded: {error}"
        trees.give_up(f"{path} {fault}")
    sys.exit(getattr(program, packed.FUNCTION)())


def prepare_modules() -> None:
    """Set what has to be set before grpc and asyncio are imported."""
    # gRPC's core would write lines of its own to stderr, without priority.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # asyncio would load OpenSSL, 4 MB of memory, for TLS, which nobody speaks on a unix socket.
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
