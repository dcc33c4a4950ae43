#!/usr/bin/env python3
"""Builds the zipapp and the .deb twice and compares the bytes.

Each build has a copy of the sources at another path, of another length, with files made in another
order, and another umask, time zone, locale and home; the second one begins when the clock has moved
on and fetches nothing from the first. What they share is the commit: its version, and its time, the
only one that may go into the packages.
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

TOP = Path(__file__).resolve().parent.parent
SOURCES = ("ttdp.py", "shiv.toml", "generated", "packaging")
WORLDS = (
    ("a", 0o022, {"TZ": "UTC", "LC_ALL": "C"}),
    (
        "somewhere/else/entirely",
        0o077,
        {"TZ": "Pacific/Auckland", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "42"},
    ),
)


def build(place: Path, umask: int, variables: dict[str, str], version: str) -> dict[str, str]:
    """Hashes of what a build in a copy of the sources makes, by file name."""
    place.mkdir(parents=True)
    names = sorted(SOURCES, reverse=umask == 0o077)
    for name in names:
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(TOP / name, place)
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
