"""Starts the program in the zipapp that contains this file, as `_bootstrap.start`.

start.py, trees.py and extract.py replace shiv's own bootstrap, which does not suit a packaged
daemon. It extracts the modules of every Python. It trusts an existing tree, even if another user
wrote it or its files are damaged (or, with an option, it re-reads all sources at each start, but no
extension module). And zipfile, hashlib and its other imports stay in the daemon's memory. shiv
still builds the zipapp.

An extension module cannot be loaded from a zip, so the first start extracts the files that this
Python needs (extract.py). Each later start uses only the code in this file and trees.py: it
compares the tree's sizes, times and inode numbers with those recorded after the last full check,
and continues in the same interpreter.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from typing import NoReturn

from . import packed, trees

CHECKED = "TTDP_CHECKED_TREE"  # passes the path of a fully checked tree to the next process


def start() -> NoReturn:
    """Start the program from an intact tree, or let extract.py make one."""
    if "run" in sys.argv[1:]:
        # systemd sends SIGHUP for a reload. Its default action would kill the process before the
        # daemon has a handler, and the daemon reads its configuration at its start anyway.
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
    # Nothing that is imported becomes garbage: without the collector imports are 6 ms faster, and
    # frozen objects need not be looked at again.
    gc.disable()
    try:
        program = importlib.import_module(packed.MODULE)
    except (ImportError, OSError) as error:
        fault = "is mounted noexec" if trees.is_noexec(path) else f"cannot be loaded: {error}"
        trees.give_up(f"{path} {fault}", trees.EXIT_NOT_EXTRACTED)
    gc.freeze()
    gc.enable()
    sys.exit(getattr(program, packed.FUNCTION)())


def prepare_modules() -> None:
    """Change the settings that grpc and asyncio read when they are imported."""
    # gRPC's core would write its own lines to stderr, without priority.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # asyncio would load OpenSSL (4 MB of memory) for TLS, which a unix socket does not use.
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
