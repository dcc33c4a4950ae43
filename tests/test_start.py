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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unshared
from tests.world.processes import ROOT

WRAPPER = ROOT / "packaging/deb/wrapper"
SUFFIX = EXTENSION_SUFFIXES[0]
ABI = SUFFIX.split(".")[1]
NOT_EXTRACTED, NOT_RUNNABLE = 73, 78
MODULE = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob(f"*{SUFFIX}"))
# A program that loads an extension module and prints the state of its process.
PROGRAM = f"""
import json, os, sys
import extension.{MODULE.name.removesuffix(SUFFIX)}

def main():
    print(json.dumps({{
        "tree": os.path.dirname(os.path.dirname(__file__)),
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "umask": os.umask(0),
        "ssl": sys.modules.get("ssl", "not imported"),
    }}))
    return 7
"""


@dataclass(frozen=True)
class Zipapp:
    """A small program, packed with the bootstrap of the real one."""

    path: Path
    environment: Mapping[str, str]

    @property
    def root(self) -> Path:
        return Path(self.environment["SHIV_ROOT"])

    @property
    def tree(self) -> Path:
        """The directory of the extracted program."""
        return self.root / f"build-{ABI}"

    def run(
        self,
        *arguments: str,
        within: Sequence[str] = (),
        **variables: str | None,
    ) -> subprocess.CompletedProcess[str]:
        """Run it with these variables, without those that are None; `within` another command."""
        merged = {**self.environment, **variables}
        environment = {name: value for name, value in merged.items() if value is not None}
        command = [*within, sys.executable, "-I", "-S", str(self.path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def answer(self, *arguments: str, **variables: str | None) -> dict[str, Any]:
        """Return what the program prints; it must run without a line on stderr."""
        done = self.run(*arguments, **variables)  # type: ignore[arg-type]
        assert (done.returncode, done.stderr) == (7, ""), done
        return dict(json.loads(done.stdout))

    def error(self, status: int, within: Sequence[str] = (), **variables: str | None) -> str:
        """Return the one line that it prints instead of starting, with this exit status."""
        done = self.run(within=within, **variables)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
        return done.stderr


def pack(path: Path, *abis: str) -> None:
    """Write a zipapp as shiv does, for these ABIs."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import _bootstrap\n_bootstrap.start()\n")
        archive.write(ROOT / "packaging/bootstrap.py", "_bootstrap/__init__.py")
        archive.writestr("environment.json", '{"build_id": "build", "entry_point": "program:main"}')
        archive.writestr("site-packages/program.py", PROGRAM)
        archive.writestr("site-packages/extension/__init__.py", "")
        archive.writestr("site-packages/extension/stable.abi3.so", "for all Pythons")
        for abi in abis:
            name = f"{MODULE.name.partition('.')[0]}.{abi}.so"
            archive.write(MODULE, f"site-packages/extension/{name}")


@pytest.fixture
def zipapp(tmp_path: Path) -> Zipapp:
    path = tmp_path / "program.pyz"
    pack(path, ABI, "cpython-39-abacus")
    return Zipapp(path, {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root")})


# -- extraction ------------------------------------------------------------------------------------


def test_first_and_later_starts_are_alike(zipapp: Zipapp) -> None:
    """The program gets its arguments, umask and environment. A later start writes no file."""

    def changes() -> dict[str, int]:
        return {str(path): path.lstat().st_ctime_ns for path in zipapp.root.rglob("*")}

    umask = os.umask(0o027)

    try:
        first = zipapp.answer("run", "--flag=a b")
        files = changes()
        second = zipapp.answer("run", "--flag=a b")
    finally:
        os.umask(umask)

    assert first == second and files == changes()
    assert first["arguments"] == ["run", "--flag=a b"] and first["umask"] == 0o027
    assert first["ssl"] is None and first["environment"]["GRPC_VERBOSITY"] == "NONE"


def test_only_what_this_python_needs_is_extracted_and_compiled(zipapp: Zipapp) -> None:
    """What root extracts, every user can run."""
    umask = os.umask(0o077)
    try:
        zipapp.answer()
    finally:
        os.umask(umask)

    tree = zipapp.tree / "site-packages"
    assert {path.name for path in tree.glob("extension/*.so")} == {MODULE.name, "stable.abi3.so"}
    assert [*tree.glob("__pycache__/program.*.pyc")]
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in zipapp.root.rglob("*"))


DAMAGES = {
    "a short source": "truncate -s 20 site-packages/program.py",
    "a missing source": "rm site-packages/extension/__init__.py",
    "a short module": f"truncate -s 1000 site-packages/extension/{MODULE.name}",
    "a short .pyc": "truncate -s 20 site-packages/__pycache__/program.*.pyc",
    "an empty list": "truncate -s 0 sizes.json",
    "a file": 'rm -r "$PWD"; touch "$PWD"',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tree_is_extracted_again(zipapp: Zipapp, damage: str) -> None:
    """Such as one of a machine that has crashed; without a line, and nothing else is left."""
    zipapp.answer()
    subprocess.run(DAMAGES[damage], shell=True, check=True, cwd=zipapp.tree)

    assert zipapp.answer()["tree"] == str(zipapp.tree)
    assert os.listdir(zipapp.root) == [zipapp.tree.name]


def test_sixty_first_starts_at_once(zipapp: Zipapp) -> None:
    """All of them run without a message, and one tree remains."""
    command = [sys.executable, "-I", "-S", str(zipapp.path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    starts = [subprocess.Popen(command, env=zipapp.environment, **pipes) for _ in range(60)]

    for start in starts:
        out, error = start.communicate(timeout=60)
        assert (start.returncode, error) == (7, "") and json.loads(out)["tree"] == str(zipapp.tree)
    assert os.listdir(zipapp.root) == [zipapp.tree.name]


def test_without_shiv_root(zipapp: Zipapp, tmp_path: Path) -> None:
    """Run by hand, it is extracted below ~/.cache."""
    tree = zipapp.answer(SHIV_ROOT=None, HOME=str(tmp_path))["tree"]
    assert tree == str(tmp_path / ".cache/tt-device-plugin" / zipapp.tree.name)


# -- errors ----------------------------------------------------------------------------------------


def test_a_python_that_is_not_supported(zipapp: Zipapp) -> None:
    """78; the line names this Python and those that the package supports."""
    pack(zipapp.path, "cpython-38-abacus", "cpython-39-abacus")

    line = zipapp.error(NOT_RUNNABLE)

    assert f"supports cpython-38-abacus to cpython-39-abacus, not this Python ({ABI});" in line


def test_the_journal_gets_priorities(zipapp: Zipapp, tmp_path: Path) -> None:
    """A line begins with its priority exactly if stderr is the journal."""
    with (tmp_path / "journal").open("w+") as journal:
        found = os.fstat(journal.fileno())
        for stream in (f"{found.st_dev}:{found.st_ino}", f"{found.st_dev}:1"):
            environment = {**zipapp.environment, "SHIV_ROOT": "/dev/null", "JOURNAL_STREAM": stream}
            command = [sys.executable, "-I", "-S", str(zipapp.path)]
            subprocess.run(command, env=environment, stderr=journal)
        journal.seek(0)
        first, second = journal.readlines()

    assert first.startswith("<3>cannot extract the program to /dev/null: ")
    assert second.startswith("tt-device-plugin: cannot extract the program to /dev/null: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=4k", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_cache_that_cannot_be_written(zipapp: Zipapp, options: str, reason: str) -> None:
    """73, after which systemd tries again; it leaves no file behind, and starts on a good cache."""
    zipapp.root.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {zipapp.root}"
    script = f'{mount}; "$@"; status=$?; [ -z "$(ls -A {zipapp.root})" ] || status=99; exit $status'

    line = zipapp.error(NOT_EXTRACTED, within=[*unshared("--mount"), "sh", "-c", script, "sh"])

    assert reason in line and str(zipapp.root) in line
    zipapp.answer()


@pytest.mark.parametrize("option", ["ro", "noexec"])
def test_a_cache_that_was_remounted(zipapp: Zipapp, option: str) -> None:
    """From a read-only cache the program runs; from a noexec one not, and the line says why."""
    zipapp.answer()
    # Only a mount can be remounted, and so the directory is mounted on itself.
    bind = f"mount --bind {zipapp.root} {zipapp.root}"
    script = f'{bind} && mount -o remount,bind,{option} {zipapp.root} && exec "$@"'
    within = [*unshared("--mount"), "sh", "-c", script, "sh"]

    if option == "noexec":
        assert "mounted noexec" in zipapp.error(NOT_EXTRACTED, within)
    else:
        assert zipapp.run(within=within).returncode == 7


# -- the wrapper ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "ignores"),
    [(["run"], True), (["--log-level", "debug", "run"], True), (["list"], False), ([], False)],
)
def test_the_wrapper(tmp_path: Path, arguments: list[str], ignores: bool) -> None:
    """It ignores SIGHUP for the daemon, until that has a handler for it."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat /proc/$$/status\n")
    python.chmod(0o755)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(WRAPPER.read_text().replace("/usr/bin/python3", str(python)))

    said = subprocess.check_output(["sh", wrapper, *arguments], text=True)

    ignored = re.search(r"(?m)^SigIgn:\s*([0-9a-f]+)$", said)
    assert ignored and bool(int(ignored[1], 16) & 1 << (signal.SIGHUP - 1)) == ignores
