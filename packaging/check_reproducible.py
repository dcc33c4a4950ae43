#!/usr/bin/env python3
"""Builds the zipapp and the .deb twice and compares the bytes.

The builds differ in the path of the sources and its length, the order in which files are created,
umask, time zone, locale and home. The second one begins later, and fetches all files again. Both
have the same commit: its version and its time are the only ones that may appear in the packages.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import build_pyz
from version import PACKED

TOP = Path(__file__).resolve().parent.parent
WORLDS = (
    ("a", 0o022, {"TZ": "UTC", "LC_ALL": "C"}),
    (
        "somewhere/else/entirely",
        0o077,
        {"TZ": "Pacific/Auckland", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "42"},
    ),
)


def build(place: Path, umask: int, variables: dict[str, str], version: str) -> dict[str, str]:
    """Build in a copy of the sources; return the hash of each package by file name."""
    place.mkdir(parents=True)
    names = sorted(PACKED, reverse=umask == 0o077)
    for name in names:
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(TOP / name, place)
    if umask == 0o022:  # as in an old checkout, from before the commit
        for path in place.rglob("*"):
            os.utime(path, (1e9, 1e9))
    environment = {
        **os.environ,
        **variables,
        "HOME": str(place),
        "SOURCE_DATE_EPOCH": str(build_pyz.source_date_epoch()),
    }
    for script in ("build_pyz.py", "build_deb.py"):
        command = [sys.executable, f"packaging/{script}", "--version", version]
        command += ["--no-lintian"] if script == "build_deb.py" else []
        subprocess.run(
            command, cwd=place, check=True, env=environment, umask=umask, stdout=subprocess.DEVNULL
        )
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((place / "dist").iterdir())
    }


def main() -> int:
    """Build twice and compare."""
    results, begun = [], []
    version = build_pyz.package_version()
    with tempfile.TemporaryDirectory(prefix="ttdp-") as work:
        for place, umask, variables in WORLDS:
            begun.append(time.time())
            results.append(build(Path(work, place), umask, variables, version))
    first, second = results
    for name in first:
        same = first[name] == second.get(name)
        print("same" if same else "DIFFERENT", name, first[name], "" if same else second.get(name))
    seconds = begun[1] - begun[0]
    print(f"two builds, {seconds:.0f} s apart, in different directories, with umask 022 and 077")
    return 0 if first == second else 1


if __name__ == "__main__":
    sys.exit(main())
