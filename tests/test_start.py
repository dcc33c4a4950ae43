"""The start of the zipapp: extracted once, checked at each start, never run damaged."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import unshared
from tests.world.processes import ROOT, wait_until

WRAPPER = ROOT / "packaging/deb/tt-device-plugin"
SUFFIX = EXTENSION_SUFFIXES[0]
ABI = SUFFIX.split(".")[1]
MACHINE = ABI.split("-", 2)[2]
NOT_EXTRACTED, NOT_RUNNABLE = 73, 78
MODULE = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob(f"*{SUFFIX}"))
# A program that loads an extension module and prints the state of its process.
PROGRAM = f"""
import json, os, signal, sys
import extension.{MODULE.name.removesuffix(SUFFIX)}

def main():
    print(json.dumps({{
        "tree": os.path.dirname(os.path.dirname(__file__)),
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "umask": os.umask(0),
        "modules": sorted(sys.modules),
        "hangup": signal.getsignal(signal.SIGHUP).name,
        "ssl": sys.modules.get("ssl", "not imported"),
    }}))
    return 7
"""
EXTRACTION_ONLY = {"zipfile", "hashlib", "shutil", "py_compile", "_bootstrap.extract"}


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
        python: str | Path = sys.executable,
        within: Sequence[str] = (),
        **variables: str | None,
    ) -> subprocess.CompletedProcess[str]:
        """Run it with these variables, without those that are None; `within` another command."""
        merged = {**self.environment, **variables}
        environment = {name: value for name, value in merged.items() if value is not None}
        command = [*within, str(python), "-I", "-S", str(self.path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def answer(self, *arguments: str, **variables: str | None) -> dict[str, Any]:
        """Return what the program prints; it must run without a line on stderr."""
        done = self.run(*arguments, **variables)  # type: ignore[arg-type]
        assert (done.returncode, done.stderr) == (7, ""), done
        return dict(json.loads(done.stdout))

    def error(self, status: int, within: Sequence[str] = (), **variables: str | None) -> str:
        """Return the one line that it prints instead of starting, with this exit status."""
        done = self.run(within=within, **variables)  # type: ignore[arg-type]
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1), done
        return done.stderr


def pack(path: Path, *abis: str) -> None:
    """Write a zipapp that supports these ABIs."""
    bootstrap = runpy.run_path(str(ROOT / "packaging/build_pyz.py"))["bootstrap_files"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import _bootstrap.start\n_bootstrap.start.start()\n")
        for name, text in bootstrap("build", "program:main", abis).items():
            archive.writestr(f"_bootstrap/{name}", text)
        archive.writestr("site-packages/program.py", PROGRAM)
        archive.writestr("site-packages/extension/__init__.py", "")
        archive.write(MODULE, f"site-packages/extension/{MODULE.name}")
        archive.writestr("site-packages/extension/stable.abi3.so", "for all Pythons")
        archive.writestr("site-packages/extension/other.cpython-39-abacus.so", "for another Python")


@pytest.fixture
def zipapp(tmp_path: Path) -> Zipapp:
    path = tmp_path / "program.pyz"
    pack(path, ABI, "cpython-39-abacus")
    return Zipapp(path, {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root")})


# -- extraction ------------------------------------------------------------------------------------


def test_first_and_later_starts_are_alike(zipapp: Zipapp) -> None:
    """The program gets its arguments, umask and environment, and nothing of the extraction.

    Its process does not have the modules that extract, nor OpenSSL. A later start writes no file.
    """

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
    assert not EXTRACTION_ONLY & set(first["modules"])
    assert first["ssl"] is None and first["environment"]["GRPC_VERBOSITY"] == "NONE"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replace_by_a_file(tree: Path) -> None:
    shutil.rmtree(tree)
    tree.touch()


PACKAGES = "site-packages"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "program.py has changed": lambda tree: (tree / PACKAGES / "program.py").write_text("broken"),
    "__init__.py is missing": lambda tree: (tree / PACKAGES / "extension/__init__.py").unlink(),
    "stable.abi3.so has changed": lambda tree: cut(tree / PACKAGES / "extension/stable.abi3.so"),
    "stray.py is not part of it": lambda tree: (tree / PACKAGES / "stray.py").write_text("broken"),
    ".pyc has changed": lambda tree: cut(next((tree / PACKAGES / "__pycache__").iterdir())),
    "stamp is not complete": lambda tree: cut(tree / "stamp"),
    "No such file": lambda tree: (tree / "stamp").unlink(),
    "Not a directory": replace_by_a_file,
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_tree_is_reported_and_extracted_again(zipapp: Zipapp, fault: str) -> None:
    """One line names the damage, and the program runs as packed; the next start prints nothing."""
    zipapp.answer()
    DAMAGES[fault](zipapp.tree)

    done = zipapp.run()

    assert done.returncode == 7 and json.loads(done.stdout)["tree"] == str(zipapp.tree), done
    assert re.fullmatch(rf".*was damaged \(.*{fault}.*\); extracted again\n", done.stderr), done

    zipapp.answer()
    assert set(os.listdir(zipapp.root)) == {f".{zipapp.tree.name}.lock", zipapp.tree.name}


def test_an_interrupted_extraction_is_deleted(zipapp: Zipapp) -> None:
    """An incomplete tree of a start that was killed is neither used nor kept."""
    incomplete = zipapp.root / f".{zipapp.tree.name}.tmp/new/site-packages"
    incomplete.mkdir(parents=True)
    (incomplete / "program.py").write_text("raise ValueError")

    zipapp.answer()

    assert set(os.listdir(zipapp.root)) == {f".{zipapp.tree.name}.lock", zipapp.tree.name}


def test_several_first_starts_at_once(zipapp: Zipapp) -> None:
    """One of them extracts, the others wait for it; all of them run without a message."""
    zipapp.root.mkdir()
    command = [sys.executable, "-I", "-S", str(zipapp.path)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    with (zipapp.root / f".{zipapp.tree.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        starts = [subprocess.Popen(command, env=zipapp.environment, **pipes) for _ in range(3)]
        waiter = re.compile(rf"(?m)^\d+: +-> FLOCK .*:{os.fstat(lock.fileno()).st_ino} ")
        wait_until(
            lambda: len(waiter.findall(Path("/proc/locks").read_text())) == 3, "all of them to wait"
        )

    for start in starts:
        out, error = start.communicate(timeout=60)
        assert (start.returncode, error) == (7, "") and json.loads(out)["tree"] == str(zipapp.tree)


def test_without_a_cache_directory(zipapp: Zipapp, tmp_path: Path) -> None:
    """Run by hand: below $XDG_CACHE_HOME or ~/.cache, else in a private temporary directory."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    private = temporary / f"tt-device-plugin-{os.geteuid()}"

    for variables, root in (
        ({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg/tt-device-plugin"),
        ({"HOME": str(tmp_path / "home")}, tmp_path / "home/.cache/tt-device-plugin"),
        ({"HOME": "/dev/null"}, private),  # nobody can make a directory there
    ):
        for _ in range(2):
            tree = zipapp.answer(SHIV_ROOT=None, TMPDIR=str(temporary), **variables)["tree"]
            assert tree == str(root / zipapp.tree.name)


def test_a_directory_that_other_users_can_write_is_not_used(zipapp: Zipapp, tmp_path: Path) -> None:
    """A user who can write to the directory in /tmp does not choose what others run."""
    private = tmp_path / f"tt-device-plugin-{os.geteuid()}"
    zipapp.answer()
    shutil.copytree(zipapp.root, private)
    private.chmod(0o777)
    (private / zipapp.tree.name / "site-packages/program.py").write_text("raise ValueError")

    tree = zipapp.answer(SHIV_ROOT=None, HOME="/dev/null", TMPDIR=str(tmp_path))["tree"]

    try:
        assert not tree.startswith(str(tmp_path))
    finally:
        shutil.rmtree(Path(tree).parent)


# -- errors ----------------------------------------------------------------------------------------


def test_a_python_that_is_not_supported(zipapp: Zipapp) -> None:
    """78; the line names this Python and those that the package supports."""
    pack(zipapp.path, "cpython-38-abacus", "cpython-39-abacus")

    line = zipapp.error(NOT_RUNNABLE)

    assert "or CPython 3.8, 3.9 on abacus: this package does not support" in line and ABI in line


def test_a_damaged_zipapp(zipapp: Zipapp) -> None:
    """78 and one line; the incomplete tree is deleted."""
    content = bytearray(zipapp.path.read_bytes())
    with zipfile.ZipFile(zipapp.path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.compress_size)
    # Zeros within compressed data: the archive's own directory is as it was.
    content[entry.header_offset + 1000 : entry.header_offset + 1100] = bytes(100)
    zipapp.path.write_bytes(content)

    assert "is damaged" in zipapp.error(NOT_RUNNABLE)
    assert os.listdir(zipapp.root) == [f".{zipapp.tree.name}.lock"]


OTHER = '#!/bin/sh\necho "other: $@"\n'


@pytest.mark.parametrize(
    ("abis", "installed", "used"),
    [
        (("cpython-399-{0}", "cpython-398-abacus"), ("3.98", "3.99"), "3.99"),
        (("cpython-399-{0}", "cpython-398-abacus"), ("3.98",), None),
        # An unusual build: another Python may be unusual as well, and they would alternate.
        (("cpython-3{1}-abacus", "cpython-399-{0}"), ("3.99",), None),
    ],
)
def test_another_python_on_this_machine(
    zipapp: Zipapp, tmp_path: Path, abis: Sequence[str], installed: Sequence[str], used: str | None
) -> None:
    """If python3 has become one that is not supported, one that is runs the program."""
    pack(zipapp.path, *(abi.format(MACHINE, sys.version_info.minor) for abi in abis))
    for version in installed:
        (tmp_path / f"python{version}").write_text(OTHER)
        (tmp_path / f"python{version}").chmod(0o755)
    link = tmp_path / "python"
    link.symlink_to(sys.executable)

    done = zipapp.run("run", "--flag=a b", python=link)

    if used:
        assert done.stdout == f"other: -I -S {zipapp.path} run --flag=a b\n"
        assert re.fullmatch(rf".*; using .*/python{used}; install a newer .*\n", done.stderr), done
    else:
        assert (done.returncode, done.stdout) == (NOT_RUNNABLE, ""), done


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

    assert first.startswith("<3>cannot extract the program: /dev/null: ")
    assert second.startswith("tt-device-plugin: cannot extract the program: ")


@pytest.mark.parametrize(
    ("options", "reason"),
    [("size=4k", "No space left on device"), ("ro", "Read-only file system"), ("noexec", "noexec")],
)
def test_a_cache_that_cannot_be_written(zipapp: Zipapp, options: str, reason: str) -> None:
    """73, after which systemd tries again: a full, read-only or noexec cache can be repaired.

    It leaves no file behind, and starts when the cache is well again.
    """
    zipapp.root.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {zipapp.root}"
    script = f'{mount}; "$@"; status=$?; [ -z "$(ls {zipapp.root})" ] || status=99; exit $status'

    line = zipapp.error(NOT_EXTRACTED, within=[*unshared("--mount"), "sh", "-c", script, "sh"])

    assert reason in line and str(zipapp.root) in line
    zipapp.answer()


@pytest.mark.parametrize("option", ["ro", "noexec"])
def test_a_cache_that_was_remounted(zipapp: Zipapp, option: str) -> None:
    """From a read-only cache the program runs, even if its times have changed; from noexec not."""
    zipapp.answer()
    os.utime(zipapp.tree / "site-packages/program.py")
    # Only a mount can be remounted, and so the directory is mounted on itself.
    bind = f"mount --bind {zipapp.root} {zipapp.root}"
    script = f'{bind} && mount -o remount,bind,{option} {zipapp.root} && exec "$@"'
    within = [*unshared("--mount"), "sh", "-c", script, "sh"]

    if option == "noexec":
        assert "mounted noexec" in zipapp.error(NOT_EXTRACTED, within)
    else:
        assert zipapp.run(within=within).returncode == 7


# -- signals and the wrapper -----------------------------------------------------------------------


@pytest.mark.parametrize(("command", "handler"), [("run", "SIG_IGN"), ("list", "SIG_DFL")])
def test_a_reload_during_the_start(zipapp: Zipapp, command: str, handler: str) -> None:
    """SIGHUP does not end the daemon before it has a handler, at the first start and later."""
    for _ in range(2):
        assert zipapp.answer(command)["hangup"] == handler


@pytest.mark.parametrize(
    ("arguments", "ignores"),
    [(["run"], True), (["--log-level", "debug", "run"], True), (["list"], False), ([], False)],
)
def test_the_wrapper(tmp_path: Path, arguments: list[str], ignores: bool) -> None:
    """It ignores SIGHUP for the daemon, and names the daemon's directories unless they are set."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$STATE_DIRECTORY $RUNTIME_DIRECTORY"; cat /proc/$$/status\n'
    )
    python.chmod(0o755)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(WRAPPER.read_text().replace("/usr/bin/python3", str(python)))

    for environment, directories in (
        ({}, "/var/lib/tt-device-plugin /run/tt-device-plugin"),
        ({"STATE_DIRECTORY": "/state", "RUNTIME_DIRECTORY": "/run/other"}, "/state /run/other"),
    ):
        environment["PATH"] = os.environ["PATH"]
        said = subprocess.check_output(["sh", wrapper, *arguments], env=environment, text=True)

        ignored = re.search(r"(?m)^SigIgn:\s*([0-9a-f]+)$", said)
        assert said.startswith(f"{directories}\n") and ignored
        assert bool(int(ignored[1], 16) & 1 << (signal.SIGHUP - 1)) == ignores
