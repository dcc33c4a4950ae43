"""The package with the Pythons of newer Debians; make test-pythons runs all tests with others."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, optional
from tests.e2e.host import PYZ, Packages
from tests.world.processes import LONG_PATIENCE, ROOT

RELEASES = {13: "trixie", 14: "forky", 15: "forky"}
REQUIRED = 13  # the others are tested if they are available


@pytest.mark.parametrize("minor", RELEASES, ids=lambda minor: f"3.{minor}")
def test_the_package_does_its_main_job(packages: Packages, told: Told, minor: int) -> None:
    """It is installed, and its zipapp runs the demo, whose kubelet has the same modules."""
    python = f"python3.{minor}"
    binds = {ROOT: "/srv/project", packages.directory: "/srv/packages"}
    with optional(unless=minor == REQUIRED):
        debian = Container(RELEASES[minor], binds, f"{PACKAGES},{python}")

    with debian:
        debian("apt-get", "install", "--yes", packages.current)
        version = debian("env", "SHIV_ROOT=/srv/root", python, "-I", "-S", PYZ, "--version")
        demo = f"PYTHONPATH=$(echo /srv/root/*/site-packages) {python} -B -m tests.demo --pyz {PYZ}"
        enter = ["env", "--chdir=/srv/project", "HOME=/root"]
        done = debian.run(*enter, "sh", "-c", demo, timeout=LONG_PATIENCE)

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    told(f"{version.strip()}; {done.stdout.strip().splitlines()[-1]}")
