"""The installed command, and what the zipapp does first: signals, modules, another Python."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.test_start import ABI, Zipapp, pack
from tests.world.processes import ROOT

WRAPPER = ROOT / "packaging/deb/tt-device-plugin"
# A program that says what its process was given.
PROGRAM = """
import os, signal, sys

def main():
    print(signal.getsignal(signal.SIGHUP).name)
    print("ssl" in sys.modules and sys.modules["ssl"] is None)
    print(os.environ["GRPC_VERBOSITY"])
    return 0
"""


@pytest.fixture
def zipapp(tmp_path: Path) -> Zipapp:
    path = tmp_path / "program.pyz"
    pack(path)
    put_in(path, "site-packages/program.py", PROGRAM)
    return Zipapp(path, {"PATH": os.environ["PATH"], "SHIV_ROOT": str(tmp_path / "root")})


def put_in(path: Path, name: str, text: str) -> None:
    """Replace a file in a zipapp."""
    with zipfile.ZipFile(path) as old:
        entries = {entry: old.read(entry) for entry in old.infolist() if entry.filename != name}
    with zipfile.ZipFile(path, "w") as new:
        for entry, content in entries.items():
            new.writestr(entry, content)
        new.writestr(name, text)


def ignores_hangup(status: str) -> bool:
    """Return what the kernel says of a process: whether SIGHUP is ignored."""
    mask = re.search(r"(?m)^SigIgn:\s*([0-9a-f]+)$", status)
    assert mask, status
    return bool(int(mask[1], 16) & 1 << (signal.SIGHUP - 1))


@pytest.mark.parametrize(
    ("arguments", "ignores"),
    [(["run"], True), (["--log-level", "debug", "run"], True), (["list"], False), ([], False)],
)
def test_a_hangup_before_the_interpreter_is_there(
    tmp_path: Path, arguments: list[str], ignores: bool
) -> None:
    """SIGHUP, by which it is to read its configuration, ends no daemon; other commands it does."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat /proc/$$/status\n")
    python.chmod(0o755)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(WRAPPER.read_text().replace("/usr/bin/python3", str(python)))
    done = subprocess.run(
        ["sh", str(wrapper), *arguments], capture_output=True, text=True, check=True
    )
    assert ignores_hangup(done.stdout) == ignores


@pytest.mark.parametrize(("command", "handler"), [("run", "SIG_IGN"), ("list", "SIG_DFL")])
def test_a_hangup_before_the_program_is_there(zipapp: Zipapp, command: str, handler: str) -> None:
    """The same for the zipapp itself, at its first start, which extracts it, and at the next."""
    for _ in range(2):
        assert zipapp.run(command).stdout.splitlines()[0] == handler


def test_modules_are_prepared(zipapp: Zipapp) -> None:
    """OpenSSL is not loaded, and grpc writes no lines of its own; who asks for them gets them."""
    assert zipapp.run().stdout.splitlines()[1:] == ["True", "NONE"]
    assert zipapp.run(GRPC_VERBOSITY="DEBUG").stdout.splitlines()[2] == "DEBUG"


OTHER = '#!/bin/sh\necho "other: $@"\n'


@pytest.mark.parametrize("beside", [True, False], ids=["beside it", "nowhere"])
def test_another_python_that_is_packed(zipapp: Zipapp, tmp_path: Path, beside: bool) -> None:
    """Where python3 has become one that is not packed, another runs it, and a line says so."""
    machine = ABI.split("-", 2)[2]
    pack(zipapp.path, abis=(f"cpython-399-{machine}", "cpython-398-abacus"))
    (tmp_path / "bin").mkdir()
    for number in (98, 99) if beside else (98,):  # 98 is one of another machine
        other = tmp_path / f"bin/python3.{number}"
        other.write_text(OTHER)
        other.chmod(0o755)
    link = tmp_path / "bin/python"
    link.symlink_to(sys.executable)
    command = [str(link), "-I", "-S", str(zipapp.path), "run", "--flag=a b"]
    done = subprocess.run(command, env=zipapp.environment, capture_output=True, text=True)
    if beside:
        assert done.stdout == f"other: -I -S {zipapp.path} run --flag=a b\n"
        assert done.stderr.count("\n") == 1 and "python3.99 runs it; install a newer" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (78, "") and "nothing is packed" in done.stderr


def test_an_odd_build_of_a_packed_version_gives_up(zipapp: Zipapp, tmp_path: Path) -> None:
    """It looks for no other: that could be as odd, and they would start each other for ever."""
    machine = ABI.split("-", 2)[2]
    odd = f"cpython-3{sys.version_info.minor}-abacus"
    pack(zipapp.path, abis=(odd, f"cpython-399-{machine}"))
    other = tmp_path / "python3.99"
    other.write_text(OTHER)
    other.chmod(0o755)
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    command = [str(link), "-I", "-S", str(zipapp.path)]
    done = subprocess.run(command, env=zipapp.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (78, ""), done
