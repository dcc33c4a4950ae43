"""Starts the zipapp, which holds this file beside shiv's bootstrap: never runs a tree that is not what was packed.

shiv extracts the packed tree once, under a lock and with a rename at the end, and from then on uses whatever is there.
Its own check (--no-modify) sees changed Python sources, but neither missing files nor extension modules. The one here
takes its place and sees them all. A tree that is damaged, by a crash before the disk had it or by hand, is said to be
so and extracted anew; where that does not help, the program does not start (status 78).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import _bootstrap  # type: ignore[import-not-found]

_umask = 0o022  # the caller's


def damage(tree: Path, hashes: Mapping[str, str]) -> str | None:
    """The first file that is not as it was packed, in words. Other Pythons' extension modules only have to be there."""
    for name, digest in hashes.items():
        path = tree / name
        try:
            if path.suffix == ".so" and not is_ours(path):
                path.stat()
            elif hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                return f"{path} is not what was packed"
        except OSError as error:
            return f"{path}: {error.strerror}"
    for path in tree.rglob("*"):
        if path.suffix in (".py", ".so", ".pth") and str(path.relative_to(tree)) not in hashes:
            return f"{path} was not packed"
    return None


def is_ours(library: Path) -> bool:
    """Whether this Python would load the extension module, by its name."""
    return library.name[library.name.index(".") :] in EXTENSION_SUFFIXES


def ensure_as_packed(tree: Path, hashes: Mapping[str, str]) -> None:
    """shiv calls this before it imports anything from the tree."""
    for library in (name for name in hashes if "/cygrpc." in name):
        if is_ours(Path(library)):
            break
    else:
        sys.exit(give_up(f"nothing is packed for Python {sys.version_info[0]}.{sys.version_info[1]} on this machine"))
    if fault := damage(tree, hashes):
        say(f"the extracted program is damaged: {fault}; extracting it anew")
        try:
            with _bootstrap.current_zipfile() as archive:
                _bootstrap.extract_site_packages(archive, tree.parent, force=True)
            fault = damage(tree, hashes)
        except OSError as error:
            fault = f"{error.filename}: {error.strerror}"
        if fault:
            sys.exit(give_up(f"{fault}; make room and run as root: rm -r {tree.parent}"))
    os.umask(_umask)


def say(text: str, priority: int = 4) -> None:
    """A line on stderr, with its priority where the journal may read it."""
    print(f"<{priority}>{text}" if "JOURNAL_STREAM" in os.environ else text, file=sys.stderr)


def give_up(text: str) -> int:
    say(text, priority=3)
    return 78


def start() -> None:
    global _umask
    _umask = os.umask(0o022)  # what root extracts, every user may run
    _bootstrap.ensure_no_modify = ensure_as_packed
    _bootstrap.bootstrap()
