"""Starts the program in the zipapp that contains this file, in place of shiv's own bootstrap.

Extension modules cannot be loaded from a zip, so the first start extracts what this Python needs.
shiv's bootstrap would extract the modules of all Pythons (104 MB instead of 22). It would not
notice a file that a crash of the machine has cut, and so never start again. And each start would
import 30 ms more, which the daemon would keep in memory.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NoReturn

LOADER = __loader__  # type: ignore[name-defined]  # zipimport's
ABI = EXTENSION_SUFFIXES[0].split(".")[1]  # "cpython-311-x86_64-linux-gnu"
SIZES = "sizes.json"  # in the extracted tree: the size of each file by its path

# Exit statuses from sysexits.h. The package's unit restarts the service after 73, because a full
# disk gets space again, and not after 78.
EXIT_NOT_EXTRACTED = 73  # EX_CANTCREAT
EXIT_NOT_RUNNABLE = 78  # EX_CONFIG


def start() -> NoReturn:
    """Run the program, from a directory for this build and this Python."""
    packed = json.loads(LOADER.get_data(f"{LOADER.archive}/environment.json"))
    root = os.environ.get("SHIV_ROOT") or os.path.expanduser("~/.cache/tt-device-plugin")
    tree = f"{root}/{packed['build_id']}-{ABI}"
    if not is_complete(tree):
        umask = os.umask(0o022)  # every user can run what root extracts
        try:
            extract(root, tree)
        except OSError as error:
            give_up(f"cannot extract the program to {root}: {error}", EXIT_NOT_EXTRACTED)
        os.umask(umask)

    # gRPC's core would write to stderr, without priority.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # asyncio would load OpenSSL (4 MB of memory) for TLS, which a unix socket does not use.
    sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]
    sys.path[0] = f"{tree}/site-packages"
    module, _, function = packed["entry_point"].partition(":")

    # No import becomes garbage: without the collector they are 16 ms faster, and it need not look
    # at frozen objects again.
    gc.disable()
    try:
        program = importlib.import_module(module)
    except ImportError as error:
        noexec = " (mounted noexec)" if os.statvfs(tree).f_flag & os.ST_NOEXEC else ""
        give_up(f"cannot load the program from {tree}{noexec}: {error}", EXIT_NOT_EXTRACTED)
    gc.freeze()
    gc.enable()
    sys.exit(getattr(program, function)())


def is_complete(tree: str) -> bool:
    """Return whether each extracted file exists with its size.

    The files are not synced to the disk: a crash of the machine can cut or lose some of them.
    """
    try:
        with open(f"{tree}/{SIZES}") as file:
            sizes = json.load(file)
        return all(os.stat(f"{tree}/{path}").st_size == size for path, size in sizes.items())
    except (OSError, ValueError):
        return False


def extract(root: str, tree: str) -> None:
    """Extract and compile what this Python can load; exit if it is not supported. Raises OSError.

    The tree appears complete, by its renaming. Of several first starts the fastest one wins.
    """
    import py_compile
    import tempfile
    import zipfile

    with zipfile.ZipFile(LOADER.archive) as archive:
        names = [name for name in archive.namelist() if name.startswith("site-packages/")]
        modules = [name for name in names if name.endswith(".so")]
        abis = sorted({name.split(".")[-2] for name in modules if ".cpython-" in name})
        if ABI not in abis:
            supported = f"{abis[0]} to {abis[-1]}"
            give_up(
                f"this package supports {supported}, not this Python ({ABI}); "
                "install a newer tt-device-plugin",
                EXIT_NOT_RUNNABLE,
            )

        os.makedirs(root, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=root) as temporary:
            new = f"{temporary}/new"
            suffixes = tuple(EXTENSION_SUFFIXES[:-1])  # without ".so", the end of all of them
            others = {name for name in modules if not name.endswith(suffixes)}
            archive.extractall(new, [name for name in names if name not in others])

            for name in names:
                if name.endswith(".py"):
                    py_compile.compile(f"{new}/{name}", dfile=f"{tree}/{name}", doraise=True)

            paths = [f"{place}/{name}" for place, _, files in os.walk(new) for name in files]
            sizes = {os.path.relpath(path, new): os.path.getsize(path) for path in paths}
            with open(f"{new}/{SIZES}", "w") as file:
                json.dump(sizes, file)
            replace(tree, new, f"{temporary}/old")


def replace(tree: str, new: str, old: str) -> None:
    """Rename `new` to `tree`, unless another process was faster. Raises OSError."""
    if not is_complete(tree):
        with contextlib.suppress(FileNotFoundError):
            os.rename(tree, old)
    try:
        os.rename(new, tree)
    except OSError:
        if not is_complete(tree):
            raise


def give_up(text: str, status: int) -> NoReturn:
    """Exit with a line, which has syslog's priority for errors if stderr is the journal."""
    stderr = os.fstat(2)
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{stderr.st_dev}:{stderr.st_ino}"
    print(f"<3>{text}" if is_journal else f"tt-device-plugin: {text}", file=sys.stderr)
    sys.exit(status)
