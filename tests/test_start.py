"""The start of the zipapp, by packaging/bootstrap.py: extracted once, never run damaged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unshared
from tests.world.processes import ROOT

SUFFIX = EXTENSION_SUFFIXES[0]
ABI = SUFFIX.split(".")[1]
MODULE = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob(f"*{SUFFIX}"))
# A program that loads an extension module and prints the state of its process.
PROGRAM = f"""
import json, os, sys
import extension.{MODULE.name.removesuffix(SUFFIX)}

def main():
    print(json.dumps({{
        "tree": os.path.dirname(os.path.dirname(__file__)),
        "arguments": sys.argv[1:],
        "variable": os.environ["GRPC_VERBOSITY"],
        "umask": os.umask(0),
        "ssl": sys.modules.get("ssl", "not imported"),
    }}))
    return 7
"""


class Zipapp:
    """A small program, packed with the bootstrap of the real one."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "program.pyz"
        self.root = directory / "root"
        self.tree = self.root / f"build-{ABI}"  # the extracted program
        self.command = [sys.executable, "-I", "-S", str(self.path)]
        self.environment = {"PATH": os.environ["PATH"], "SHIV_ROOT": str(self.root)}

    def pack(self, *abis: str) -> None:
        """Write it as shiv does, for these ABIs."""
        with zipfile.ZipFile(self.path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("__main__.py", "import _bootstrap\n_bootstrap.start()\n")
            archive.write(ROOT / "packaging/bootstrap.py", "_bootstrap/__init__.py")
            settings = {"build_id": "build", "entry_point": "program:main"}
            archive.writestr("environment.json", json.dumps(settings))
            archive.writestr("site-packages/program.py", PROGRAM)
            archive.writestr("site-packages/extension/__init__.py", "")
            archive.writestr("site-packages/extension/stable.abi3.so", "for all Pythons")
            for abi in abis:
                name = f"{MODULE.name.partition('.')[0]}.{abi}.so"
                archive.write(MODULE, f"site-packages/extension/{name}")

    def start(self, *arguments: str, within: Sequence[str] = ()) -> tuple[int, str, str]:
        """Run it, `within` another command; return its status and what it prints."""
        command = [*within, *self.command, *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def run(self, *arguments: str) -> dict[str, Any]:
        """Return what the program prints; it must run without a line on stderr."""
        status, out, error = self.start(*arguments)
        assert (status, error) == (7, "")
        return dict(json.loads(out))

    def error(self, within: Sequence[str] = (), status: int = 73) -> str:
        """Return the one line that it prints instead of starting, with this exit status."""
        *ended, error = self.start(within=within)
        assert (*ended, error.count("\n")) == (status, "", 1), error
        return error


@pytest.fixture
def zipapp(tmp_path: Path) -> Zipapp:
    zipapp = Zipapp(tmp_path)
    zipapp.pack(ABI, "cpython-39-abacus")
    return zipapp


def test_only_what_this_python_needs_is_extracted_and_compiled(zipapp: Zipapp) -> None:
    """What root extracts, every user can run. A later start is alike, and writes no file."""

    def changes() -> dict[Path, int]:
        return {path: path.lstat().st_ctime_ns for path in zipapp.root.rglob("*")}

    umask = os.umask(0o077)
    try:
        first = zipapp.run("run", "--flag=a b")
        files = changes()
        second = zipapp.run("run", "--flag=a b")
    finally:
        os.umask(umask)

    assert first == second and files == changes()
    assert first["arguments"] == ["run", "--flag=a b"] and first["umask"] == 0o077
    assert first["ssl"] is None and first["variable"] == "NONE"
    tree = zipapp.tree / "site-packages"
    assert {path.name for path in tree.glob("extension/*.so")} == {MODULE.name, "stable.abi3.so"}
    assert [*tree.glob("__pycache__/program.*.pyc")]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in zipapp.root.rglob("*"))


DAMAGES = {
    "a short source": "truncate -s 20 site-packages/program.py",
    "a missing source": "rm site-packages/extension/__init__.py",
    "an empty list": "truncate -s 0 sizes.json",
    "a file": 'rm -r "$PWD"; touch "$PWD"',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tree_is_extracted_again(zipapp: Zipapp, damage: str) -> None:
    """Such as one of a machine that has crashed; without a line, and nothing else is left."""
    zipapp.run()
    subprocess.run(DAMAGES[damage], shell=True, check=True, cwd=zipapp.tree)

    assert zipapp.run()["tree"] == str(zipapp.tree)
    assert os.listdir(zipapp.root) == [zipapp.tree.name]


def test_many_first_starts_at_once(zipapp: Zipapp) -> None:
    """All of them run without a message, and one tree remains."""
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}

    starts = [subprocess.Popen(zipapp.command, env=zipapp.environment, **pipes) for _ in range(40)]

    for start in starts:
        _, error = start.communicate(timeout=60)
        assert (start.returncode, error) == (7, b"")
    assert os.listdir(zipapp.root) == [zipapp.tree.name]


# -- errors ----------------------------------------------------------------------------------------


def test_a_python_that_is_not_supported(zipapp: Zipapp) -> None:
    """78; the line names this Python and those that the package supports."""
    zipapp.pack("cpython-38-abacus", "cpython-39-abacus")

    line = zipapp.error(status=78)

    assert f"supports cpython-38-abacus to cpython-39-abacus, not this Python ({ABI});" in line


MOUNTS = {
    "No space left on device": "mount -t tmpfs -o size=4k tmpfs $0",
    "mounted noexec": "mount --bind $0 $0 && mount -o remount,bind,noexec $0",
}


@pytest.mark.parametrize("reason", MOUNTS)
def test_a_cache_that_cannot_be_used(zipapp: Zipapp, reason: str) -> None:
    """73, after which systemd tries again; the line says why, and no file is left behind."""
    zipapp.run()
    check = 'status=$?; [ "$before" = "$(ls -A $0)" ] || status=99; exit $status'
    script = f'{MOUNTS[reason]}; before=$(ls -A $0); "$@"; {check}'

    line = zipapp.error([*unshared("--mount"), "sh", "-c", script, str(zipapp.root)])

    assert reason in line and str(zipapp.root) in line


# -- the wrapper ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "ignores"), [("run", True), ("--log-level debug run", True), ("list", False)]
)
def test_the_wrapper(tmp_path: Path, line: str, ignores: bool) -> None:
    """It ignores SIGHUP for the daemon, until that has a handler for it."""
    wrapper = (ROOT / "packaging/deb/wrapper").read_text()
    script = wrapper.replace("/usr/bin/python3", "cat /proc/self/status; :")

    said = subprocess.check_output(["sh", "-c", script, "sh", *line.split()], text=True)

    ignored = re.search(r"(?m)^SigIgn:\s*([0-9a-f]+)$", said)
    assert ignored and bool(int(ignored[1], 16) & 1 << (signal.SIGHUP - 1)) == ignores
