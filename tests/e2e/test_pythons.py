"""The program under the Pythons of newer Debians; tests/pythons.py has those of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pythons
from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, Missing
from tests.e2e.host import DROP_IN, UNIT
from tests.world.processes import ROOT

PYZ = "/usr/lib/tt-device-plugin/tt-device-plugin.pyz"
RELEASES = {13: "trixie", 14: "forky", 15: "forky"}
REQUIRED = (13,)  # the others only if they can be had
RESIDENT = 40.0  # MB, of a daemon without cards


class Debian(Container):
    """A release with a Python, the package, this project's sources and what they need."""

    def __init__(self, minor: int, deb: Path) -> None:
        python = f"{PACKAGES},python3.{minor}"
        super().__init__(
            RELEASES[minor], {ROOT: "/srv/project", deb.parent: "/srv/packages"}, python
        )
        self.minor = minor
        self.deb = f"/srv/packages/{deb.name}"
        subprocess.run(
            ["dpkg-deb", "--extract", str(deb), str(self.root.parent / "deb")], check=True
        )
        pythons.bundled(self.root.parent / f"deb{PYZ}", self.shared / "bundled")
        shutil.copytree(pythons.tools(minor, pythons.WORK), self.shared / "tools")
        self.python = "/srv/shared/venv/bin/python"

    def start(self) -> None:
        self.boot()
        modules = ("/srv/shared/bundled/site-packages", "/srv/shared/tools")
        for command in pythons.make_venv(Path("/srv/shared/venv"), *modules):
            self(f"python3.{self.minor}", *command)

    def be_installed(self) -> None:
        """The package; not before the suite has run, which is for a machine without it."""
        if not self.exists(PYZ):
            self("apt-get", "install", "--yes", self.deb)

    def run_in_project(self, *command: str) -> subprocess.CompletedProcess[str]:
        variables = [
            "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis",
            "PYTHONDONTWRITEBYTECODE=1",
            "HOME=/root",
        ]
        return self.run(
            "env", "--chdir=/srv/project", *variables, *command, timeout=pythons.PATIENCE
        )


@pytest.fixture(scope="module", params=RELEASES, ids=lambda minor: f"3.{minor}")
def debian(request: pytest.FixtureRequest, deb: Path) -> Iterator[Debian]:
    if os.geteuid() != 0 or not shutil.which("systemd-nspawn"):
        pytest.exit(
            "this boots system containers: run it as root, with systemd-container installed",
            returncode=1,
        )
    try:
        debian = Debian(request.param, deb)
    except Missing as reason:
        if request.param in REQUIRED:
            pytest.fail(str(reason))
        pytest.skip(f"NOT RUN: {reason}")
    try:
        debian.start()
        yield debian
    finally:
        debian.delete()


def test_the_suite(debian: Debian, told: Told) -> None:
    """Its part that depends on the language passes, with the modules that the package bundles."""
    done = debian.run_in_project(debian.python, *pythons.suite(Path("/srv/project"), "/tmp/suite"))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    told(pythons.last_line(done))


def test_the_zipapp(debian: Debian, told: Told) -> None:
    """It says its version, and does on a simulated node what `make demo` shows."""
    debian.be_installed()
    said = []
    for command in pythons.zipapp_commands(debian.python, Path(PYZ)).values():
        done = debian.run_in_project(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(pythons.last_line(done))
    told("; ".join(said))


def test_the_service(debian: Debian, told: Told) -> None:
    """It runs on this Python, soon ready, and needs no more memory than on others."""
    debian.be_installed()
    start = f"/usr/bin/python3.{debian.minor} -I -S {PYZ} run"
    variable = "Environment=SHIV_ROOT=/var/cache/tt-device-plugin"
    debian.write(DROP_IN, f"[Service]\nExecStart=\nExecStart={start}\n{variable}\n")
    debian("systemctl", "daemon-reload")
    for _ in range(2):  # the first extracts the program
        debian("systemctl", "restart", UNIT)
    names = ("MainPID", "ActiveEnterTimestampMonotonic", "ExecMainStartTimestampMonotonic")
    shown = debian("systemctl", "show", *(f"--property={name}" for name in names), UNIT)
    values = dict(line.split("=") for line in shown.splitlines())
    pid, ready, began = (int(values[name]) for name in names)
    assert debian("readlink", f"/proc/{pid}/exe").strip() == f"/usr/bin/python3.{debian.minor}"
    status = dict(line.split(":", 1) for line in debian("cat", f"/proc/{pid}/status").splitlines())
    resident = int(status["VmRSS"].split()[0]) / 1024
    assert resident < RESIDENT, resident
    told(f"start to READY {(ready - began) / 1000:.0f} ms, resident {resident:.1f} MB")
