"""The program under the Pythons of newer Debians; tests/pythons.py has those of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import pythons
from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, optional
from tests.e2e.host import PYZ, Packages
from tests.world.processes import ROOT

RELEASES = {13: "trixie", 14: "forky", 15: "forky"}
REQUIRED = (13,)  # the others are tested if they are available
PYTHON = "/srv/shared/venv/bin/python"


class Debian(Container):
    """A release with a Python, the package, this project's sources and their requirements."""

    def __init__(self, minor: int, packages: Packages) -> None:
        binds = {ROOT: "/srv/project", packages.directory: "/srv/packages"}
        binds |= {packages.modules: "/srv/modules"}
        super().__init__(RELEASES[minor], binds, f"{PACKAGES},python3.{minor}")
        self.minor = minor

    def start(self) -> None:
        shutil.copytree(pythons.tools(self.minor, pythons.WORK), self.shared / "tools")
        self.boot()
        venv = pythons.make_venv(Path("/srv/shared/venv"), "/srv/modules", "/srv/shared/tools")
        for command in venv:
            self(f"python3.{self.minor}", *command)

    def run_in_project(self, *command: str) -> str:
        """Run a command, which must succeed; return the last line of its output."""
        variables = ["HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis", "PYTHONDONTWRITEBYTECODE=1"]
        enter = ["env", "--chdir=/srv/project", *variables, "HOME=/root"]
        done = self.run(*enter, *command, timeout=pythons.TIMEOUT)
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr
        return pythons.last_line(done)


@pytest.fixture(scope="module", params=RELEASES, ids=lambda minor: f"3.{minor}")
def debian(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Debian]:
    with optional(unless=request.param in REQUIRED):
        debian = Debian(request.param, packages)
    with debian:
        yield debian


def test_the_suite_and_the_zipapp(debian: Debian, packages: Packages, told: Told) -> None:
    """The tests that depend on the language pass without the package; then the zipapp runs."""
    results = [debian.run_in_project(PYTHON, *pythons.suite(Path("/srv/project"), "/tmp/suite"))]

    debian("apt-get", "install", "--yes", packages.current)
    for command in pythons.zipapp_commands(PYTHON, Path(PYZ)).values():
        results.append(debian.run_in_project(*command))
    told("; ".join(results))
