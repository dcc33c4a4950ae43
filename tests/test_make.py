"""What a newcomer sees of make: its help, and what it prints when something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import unshared
from tests.world.processes import ROOT

WIDTH = 80
MAKEFILES = ("Makefile", "packaging/packaging.mk")
INTERNAL = {"FORCE", "deb-tools", "repository-ready"}
COMMANDS = ("bash", "sh", "make", "sed", "date", "dirname", "find", "mkdir", "cmp", "git", "uname")

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="NOT RUN: no make")


def make(
    *arguments: str,
    top: Path = ROOT,
    within: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> subprocess.CompletedProcess[str]:
    """Run make with this Python, without what the calling make has set."""
    command = [*within, "make", f"PYTHON={sys.executable}", *arguments]
    cleared = ("MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "VIRTUAL_ENV")
    variables = {name: value for name, value in environment.items() if name not in cleared}
    return subprocess.run(
        command, cwd=top, env=variables, capture_output=True, text=True, timeout=300
    )


def test_help_is_for_users() -> None:
    """One line of 80 columns for each target that users need; CONTRIBUTING.md has the others."""
    lines = make("help").stdout.splitlines()
    assert len(lines) > 5 and max(map(len, lines)) <= WIDTH
    assert all(len(line.split()) > 2 for line in lines)

    makefiles = "".join((ROOT / name).read_text() for name in MAKEFILES)
    targets = re.findall(r"(?m)^\.PHONY: (.*)$", makefiles)
    named = {line.split()[0] for line in lines} | INTERNAL
    for target in {*" ".join(targets).split()} - named:
        assert f"make {target}" in (ROOT / "CONTRIBUTING.md").read_text(), target


@pytest.mark.skipif(not shutil.which("gpg"), reason="NOT RUN: no gpg")
def test_a_repository_needs_an_address_and_a_key(tmp_path: Path) -> None:
    """Without one of them, make refuses in one line that names it, and builds nothing."""
    environment = {**os.environ, "GNUPGHOME": str(tmp_path)}
    url = "REPOSITORY_URL=https://apt.example.org"
    for variables, reason in (
        ((), "REPOSITORY_URL=https://"),
        ((url,), "SIGN_KEY="),
        ((url, "SIGN_KEY=unknown"), "gpg has no secret key unknown"),
    ):
        done = make("repository", *variables, environment=environment)

        assert done.returncode and done.stdout.count("\n") == 1, done.stdout
        assert reason in done.stdout


def test_missing_tools_are_named_before_anything_is_built(tmp_path: Path) -> None:
    """One line names the packages of all tools that are missing."""
    for name in COMMANDS:
        if path := shutil.which(name):
            (tmp_path / name).symlink_to(path)
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}

    for target, packages in (
        ("repository", {"dpkg-dev", "debhelper", "fakeroot", "apt-utils", "gpg", "gpg-agent"}),
        ("deb", {"dpkg-dev", "debhelper", "fakeroot"}),
        ("demo", {"python3-venv"}),
    ):
        variables = ("PYTHON=python3", f"VENV={tmp_path}/venv")
        done = make(target, *variables, environment=environment)

        [line] = done.stdout.splitlines()
        assert done.returncode and " apt install --no-install-recommends " in line
        assert packages <= {*line.split()}
        assert all(each.startswith("make: ***") for each in done.stderr.splitlines()), done


@pytest.mark.skipif(not shutil.which("dh"), reason="NOT RUN: no debhelper")
def test_former_packages_are_removed(tmp_path: Path) -> None:
    """From dist/, where somebody could install one by mistake, and not from the repository."""
    shutil.copytree(ROOT / "packaging", tmp_path / "packaging")
    for name in ("Makefile", "ttdp.py", "shiv.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "generated").mkdir()
    # In place of the slow builds.
    build = "import pathlib, sys; pathlib.Path(sys.argv[3]).write_text('')"
    (tmp_path / "packaging/build_pyz.py").write_text(build)
    (tmp_path / "packaging/sbom.py").write_text("")
    (tmp_path / "packaging/build-deb.sh").write_text('touch "$3/tt-device-plugin_$2_$1.deb"')
    for directory in ("build/amd64", "dist/repository/pool"):
        (tmp_path / directory).mkdir(parents=True)
    published = "repository/pool/tt-device-plugin_0.9.0_amd64.deb"
    for name in (published, "tt-device-plugin_0.9.0_amd64.deb", "tt-device-plugin_0.9.0_arm64.deb"):
        (tmp_path / "dist" / name).touch()

    variables = ("PACKAGE_VERSION=0.10.0", "ARCHES=amd64", f"VENV={sys.prefix}")
    done = make("deb", *variables, top=tmp_path)

    assert done.returncode == 0, done
    package = "tt-device-plugin_0.10.0_amd64"
    left = {str(path.relative_to(tmp_path / "dist")) for path in tmp_path.rglob("dist/**/*.*")}
    assert left == {published, f"{package}.deb", f"{package}.cdx.json"}


def test_without_a_network(tmp_path: Path) -> None:
    """pip says what it cannot reach, and make asks for the network; there is no traceback."""
    offline = unshared("--net")
    made = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=made)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_RETRIES": "0"}

    done = make("test", top=tmp_path / "source", within=offline, environment=environment)

    said = done.stdout + done.stderr
    assert done.returncode and "Traceback" not in said, done
    assert "No matching distribution found" in said
    assert "pip cannot fetch the Python packages; is there a network?" in said
