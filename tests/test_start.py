"""The zipapp's start: extracted once, checked cheaply ever after, and never run damaged."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.world.processes import ROOT, wait_until

SUFFIX = EXTENSION_SUFFIXES[0]
ABI = SUFFIX.split(".")[1]
# A program that loads an extension module and says what it is.
PROGRAM = """
import json, os, sys
import extension.{module}

def main():
    umask = os.umask(0)
    tree = os.path.dirname(os.path.dirname(__file__))
    print(json.dumps({{"tree": tree, "arguments": sys.argv[1:], "environment": dict(os.environ),
                      "umask": umask, "modules": sorted(sys.modules)}}))
    return 7
"""
Completed: TypeAlias = "subprocess.CompletedProcess[str]"
HEAVY = {
    "zipfile",
    "hashlib",
    "shutil",
    "py_compile",
    "_bootstrap.extract",
}  # what a program should not carry along


@dataclass(frozen=True)
class Zipapp:
    """A small program, packed with the bootstrap of the real one."""

    path: Path
    environment: Mapping[str, str]

    def run(
        self, *arguments: str, within: Sequence[str] = (), **variables: str | None
    ) -> Completed:
        """Run it with these variables, without those that are None; `within` another command."""
        environment = {
            name: value
            for name, value in {**self.environment, **variables}.items()
            if value is not None
        }
        command = [*within, sys.executable, "-I", "-S", str(self.path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    def answer(self, *arguments: str, **variables: str | None) -> dict[str, Any]:
        """What the program says of itself; it has to have run without a word on stderr."""
        done = self.run(*arguments, within=(), **variables)
        assert (done.returncode, done.stderr) == (7, ""), done
        return dict(json.loads(done.stdout))

    def refusal(self, within: Sequence[str] = ()) -> str:
        """The one line with which it does not start."""
        done = self.run(within=within)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (78, "", 1), done
        return done.stderr


def pack(path: Path, abis: tuple[str, ...] = (ABI, "cpython-39-abacus")) -> None:
    module = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob(f"*{SUFFIX}"))
    bootstrap = runpy.run_path(str(ROOT / "packaging/build_pyz.py"))["bootstrap_files"]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("__main__.py", "import _bootstrap.start\n_bootstrap.start.start()\n")
        for name, text in bootstrap("build", "program:main", abis).items():
            archive.writestr(f"_bootstrap/{name}", text)
        archive.writestr(
            "site-packages/program.py", PROGRAM.format(module=module.name.removesuffix(SUFFIX))
        )
        archive.writestr("site-packages/extension/__init__.py", "")
        archive.write(module, f"site-packages/extension/{module.name}")
        archive.writestr("site-packages/extension/stable.abi3.so", "for all Pythons")
        archive.writestr("site-packages/extension/other.cpython-39-abacus.so", "for another Python")


@pytest.fixture
def zipapp(tmp_path: Path) -> Zipapp:
    path = tmp_path / "program.pyz"
    pack(path)
    return Zipapp(path, {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root")})


def tree_of(zipapp: Zipapp) -> Path:
    return Path(zipapp.environment["SHIV_ROOT"], f"build-{ABI}")


def test_only_what_this_python_can_load_is_extracted(zipapp: Zipapp) -> None:
    """The extension modules of other Pythons stay packed; sources are compiled."""
    zipapp.answer()
    files = {
        str(path.relative_to(tree_of(zipapp)))
        for path in tree_of(zipapp).rglob("*")
        if path.is_file()
    }
    assert "site-packages/extension/stable.abi3.so" in files
    assert not [name for name in files if "abacus" in name]
    assert f"site-packages/__pycache__/program.{sys.implementation.cache_tag}.pyc" in files


def test_arguments_status_and_umask_pass_through(zipapp: Zipapp) -> None:
    """The first start and the second give the program the same arguments, umask and environment."""
    umask = os.umask(0o027)
    try:
        answers = [zipapp.answer("run", "--flag=a b") for _ in range(2)]
    finally:
        os.umask(umask)
    assert answers[0]["arguments"] == ["run", "--flag=a b"] and answers[0]["umask"] == 0o027
    assert answers[0] == answers[1]


def test_the_program_carries_nothing_of_its_bootstrap(zipapp: Zipapp) -> None:
    """What extracts and checks in full is not in the program's process, not even at first."""
    for _ in range(2):
        modules = zipapp.answer()["modules"]
        assert not HEAVY & set(modules)


def test_a_start_writes_nothing(zipapp: Zipapp) -> None:
    """Once extracted, a start leaves every file as it is."""
    zipapp.answer()

    def times() -> dict[str, int]:
        return {str(path): path.lstat().st_ctime_ns for path in tree_of(zipapp).parent.rglob("*")}

    before = times()
    zipapp.answer()
    assert times() == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def no_directory(tree: Path) -> None:
    shutil.rmtree(tree)
    tree.touch()


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "changed": (
        "program.py has changed",
        lambda tree: (tree / "site-packages/program.py").write_text("broken"),
    ),
    "missing": (
        "__init__.py is missing",
        lambda tree: (tree / "site-packages/extension/__init__.py").unlink(),
    ),
    "cut": (
        "stable.abi3.so has changed",
        lambda tree: cut(tree / "site-packages/extension/stable.abi3.so"),
    ),
    "foreign": (
        "stray.py is not ours",
        lambda tree: (tree / "site-packages/stray.py").write_text("broken"),
    ),
    "compiled": (
        ".pyc has changed",
        lambda tree: cut(next(tree.glob("site-packages/__pycache__/program.*"))),
    ),
    "stamp cut": ("stamp is not complete", lambda tree: cut(tree / "stamp")),
    "stamp empty": ("stamp is not complete", lambda tree: os.truncate(tree / "stamp", 0)),
    "no stamp": ("No such file", lambda tree: (tree / "stamp").unlink()),
    "not a directory": ("Not a directory", no_directory),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_tree_is_told_of_and_extracted_anew(zipapp: Zipapp, damage: str) -> None:
    """One line names what was wrong; what runs then is as packed; the next start is silent."""
    words, act = DAMAGES[damage]
    zipapp.answer()
    act(tree_of(zipapp))
    done = zipapp.run()
    assert done.returncode == 7 and json.loads(done.stdout)["tree"] == str(tree_of(zipapp)), done
    assert (
        done.stderr.count("\n") == 1 and words in done.stderr and "extracted anew" in done.stderr
    ), done.stderr
    zipapp.answer()
    assert set(os.listdir(tree_of(zipapp).parent)) == {
        f".{tree_of(zipapp).name}.lock",
        tree_of(zipapp).name,
    }


def test_a_tree_that_was_moved_is_hashed_once(zipapp: Zipapp) -> None:
    """Other times and inode numbers, but the same contents: those are noted, and that is all."""
    zipapp.answer()
    tree, stamp = tree_of(zipapp), tree_of(zipapp) / "stamp"
    tree.rename(tree.with_name("moved"))
    shutil.copytree(tree.with_name("moved"), tree, copy_function=shutil.copyfile)
    copied = {path: path.stat().st_ino for path in tree.rglob("*.so")}
    noted = []
    for _ in range(3):
        noted.append(stamp.read_text())
        zipapp.answer()
    assert noted[0] != noted[1] == noted[2]
    assert copied == {path: path.stat().st_ino for path in tree.rglob("*.so")}


def test_a_start_that_was_killed_leaves_nothing(zipapp: Zipapp) -> None:
    """Half of a tree, from an extraction that did not end, is neither used nor kept."""
    root = tree_of(zipapp).parent
    half = root / f".{tree_of(zipapp).name}.tmp/new/site-packages"
    half.mkdir(parents=True)
    (half / "program.py").write_text("raise ValueError")
    zipapp.answer()
    assert set(os.listdir(root)) == {f".{tree_of(zipapp).name}.lock", tree_of(zipapp).name}


def test_several_first_starts_at_once(zipapp: Zipapp) -> None:
    """One of them extracts, the others wait for it; all of them run, silently."""
    root = tree_of(zipapp).parent
    root.mkdir()
    command = [sys.executable, "-I", "-S", str(zipapp.path)]
    with (root / f".{tree_of(zipapp).name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        starts = [
            subprocess.Popen(
                command,
                env=zipapp.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        waiter = re.compile(rf"(?m)^\d+: +-> FLOCK .*:{os.fstat(lock.fileno()).st_ino} ")
        wait_until(
            lambda: len(waiter.findall(Path("/proc/locks").read_text())) == 3, "all of them to wait"
        )
    for start in starts:
        out, error = start.communicate(timeout=60)
        assert (start.returncode, error) == (7, "") and json.loads(out)["tree"] == str(
            tree_of(zipapp)
        )


def test_no_wheel_for_this_python(zipapp: Zipapp) -> None:
    """The line names this Python and those that it would work with."""
    pack(zipapp.path, abis=("cpython-38-abacus", "cpython-39-abacus"))
    assert f"({ABI}): it takes CPython 3.8, 3.9 on abacus\n" in zipapp.refusal()


def test_a_damaged_zipapp(zipapp: Zipapp) -> None:
    """What cannot be unpacked is said to be damaged, and nothing is left of the attempt."""
    content = bytearray(zipapp.path.read_bytes())
    with zipfile.ZipFile(zipapp.path) as archive:
        entry = max(archive.infolist(), key=lambda entry: entry.compress_size)
    content[entry.header_offset + 1000 : entry.header_offset + 1100] = bytes(100)
    zipapp.path.write_bytes(content)
    assert "is damaged" in zipapp.refusal()
    assert os.listdir(tree_of(zipapp).parent) == [f".{tree_of(zipapp).name}.lock"]


def test_without_a_home(zipapp: Zipapp, tmp_path: Path) -> None:
    """Run by hand: below $XDG_CACHE_HOME or ~/.cache, else in a private temporary directory."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    home = tmp_path / "home"
    private = temporary / f"tt-device-plugin-{os.geteuid()}"
    for variables, root in (
        ({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg/tt-device-plugin"),
        ({"HOME": str(home)}, home / ".cache/tt-device-plugin"),
        ({"HOME": "/dev/null"}, private),
    ):
        for _ in range(2):
            tree = zipapp.answer(SHIV_ROOT=None, TMPDIR=str(temporary), **variables)["tree"]
            assert tree == str(root / tree_of(zipapp).name)


def test_a_directory_of_somebody_else_is_not_used(zipapp: Zipapp, tmp_path: Path) -> None:
    """Who makes our directory in /tmp before us, or can write there, does not choose what runs."""
    private = tmp_path / f"tt-device-plugin-{os.geteuid()}"
    zipapp.answer()
    shutil.copytree(tree_of(zipapp).parent, private)
    private.chmod(0o777)
    variables = {"SHIV_ROOT": None, "HOME": "/dev/null", "TMPDIR": str(tmp_path)}
    program = private / tree_of(zipapp).name / "site-packages/program.py"
    program.write_text("raise ValueError")
    tree = zipapp.answer(**variables)["tree"]
    try:
        assert not tree.startswith(str(tmp_path))
    finally:
        shutil.rmtree(Path(tree).parent)


def test_the_journal_gets_priorities(zipapp: Zipapp, tmp_path: Path) -> None:
    """A line begins with its priority exactly if stderr is the journal."""
    with (tmp_path / "journal").open("w+") as journal:
        found = os.fstat(journal.fileno())
        for stream in (f"{found.st_dev}:{found.st_ino}", f"{found.st_dev}:1"):
            environment = {**zipapp.environment, "SHIV_ROOT": "/dev/null", "JOURNAL_STREAM": stream}
            subprocess.run(
                [sys.executable, "-I", "-S", str(zipapp.path)], env=environment, stderr=journal
            )
        journal.seek(0)
        first, second = journal.readlines()
    assert first.startswith("<3>there is no place") and second.startswith(
        "tt-device-plugin: there is no place"
    )


# -- file systems that refuse, of our own ----------------------------------------------------------


NAMESPACES = [["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]]


@pytest.fixture(scope="module")
def namespace() -> list[str]:
    """A command that runs another in a mount namespace of its own."""
    for command in NAMESPACES:
        if (
            shutil.which("unshare")
            and not subprocess.run([*command, "true"], capture_output=True).returncode
        ):
            return command
    pytest.skip(
        "neither root nor allowed to make user namespaces: no file system of our own to be had"
    )


MOUNTS = {
    "full": ("size=4k", "No space left on device"),
    "read-only": ("ro", "Read-only file system"),
    "noexec": ("noexec", "noexec"),
}


@pytest.mark.parametrize("kind", MOUNTS)
def test_a_place_that_refuses(
    zipapp: Zipapp, namespace: list[str], tmp_path: Path, kind: str
) -> None:
    """A full disk, a read-only one, a noexec one: one line says so, and nothing is left behind."""
    options, words = MOUNTS[kind]
    root = Path(zipapp.environment["SHIV_ROOT"])
    root.mkdir()
    mount = f"mount -t tmpfs -o {options} tmpfs {root}"
    script = f'{mount}; "$@"; status=$?; ls -A {root} >{tmp_path}/left; exit $status'
    line = zipapp.refusal(within=(*namespace, "sh", "-c", script, "sh"))
    assert words in line and str(root) in line
    assert [
        name for name in (tmp_path / "left").read_text().split() if not name.endswith(".lock")
    ] == []


def test_a_tree_that_has_become_noexec(zipapp: Zipapp, namespace: list[str]) -> None:
    """A tree that was extracted, and is mounted noexec now: one line says so."""
    zipapp.answer()
    root = zipapp.environment["SHIV_ROOT"]
    script = f'mount --bind {root} {root} && mount -o remount,bind,noexec {root} && exec "$@"'
    assert "mounted noexec" in zipapp.refusal(within=(*namespace, "sh", "-c", script, "sh"))


def test_a_read_only_tree_runs(zipapp: Zipapp, namespace: list[str]) -> None:
    """Nothing needs to be written to run what is extracted, even if its times are not as noted."""
    zipapp.answer()
    root = zipapp.environment["SHIV_ROOT"]
    os.utime(tree_of(zipapp) / "site-packages/program.py")
    script = f'mount --bind {root} {root} && mount -o remount,bind,ro {root} && exec "$@"'
    done = zipapp.run(within=(*namespace, "sh", "-c", script, "sh"))
    assert (done.returncode, done.stderr) == (7, "")
