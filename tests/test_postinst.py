"""The package's postinst, which ends if the new version rejects the present configuration.

And its postrm, which removes what the service has written for others.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.world.processes import ROOT

POSTINST = (ROOT / "packaging/deb/postinst").read_text()
CONFIG = "/etc/tt-device-plugin/config.toml"
FIRST = "/usr/share/tt-device-plugin/config-at-first.toml"
COMMANDS = ("env", "grep", "install", "sh", "xargs")  # of packages that are always installed
BAD = 'log_level = "loud"\n'
REASON = "log_level: 'loud' is not valid; must be debug, info, warning or error"


class System:
    """Directories in place of /etc, /usr/share and PATH."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = top / "etc/config.toml"

    def command(self, name: str, script: str) -> None:
        """Make a command that postinst finds."""
        path = self.top / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run postinst up to debhelper's part, which restarts the service.

        Returns its status and what it prints. variables: of the administrator.
        """
        text, debhelper, _ = POSTINST.partition("#DEBHELPER#")
        assert debhelper
        text = text.replace(CONFIG, str(self.config)).replace(FIRST, str(self.top / "first"))
        script = self.top / "postinst"
        script.write_text(text)

        done = subprocess.run(
            [self.top / "bin/sh", script, *arguments],
            env={**variables, "PATH": str(self.top / "bin"), "LC_ALL": "C.UTF-8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout.strip()


@pytest.fixture
def system(tmp_path: Path) -> System:
    """A system with the program of this checkout, and without the service."""
    system = System(tmp_path)
    for directory in ("bin", "etc"):
        (tmp_path / directory).mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "first").write_text("# nothing is set\n")

    code = f"import sys, ttdp; ttdp.DEFAULT_CONFIG_FILE = {str(system.config)!r}; "
    code += "sys.exit(ttdp.main())"
    program = shlex.join([sys.executable, "-c", code])
    # `--version` is there to extract the zipapp, which this program is not packed in.
    program = f'[ "$1" = --version ] || PYTHONPATH={ROOT} exec {program} "$@"'
    system.command("tt-device-plugin", program)
    system.command("systemctl", "echo 0")
    return system


@contextmanager
def service(system: System, **variables: str) -> Iterator[None]:
    """The service runs with these variables."""
    with subprocess.Popen(["sleep", "infinity"], env={**os.environ, **variables}) as process:
        system.command("systemctl", f"echo {process.pid}")
        yield
        process.kill()


def test_a_configuration_that_would_not_start_ends_it(system: System) -> None:
    """With the reason and the way out, and before the service is restarted.

    But not after a failed upgrade: dpkg calls the postinst of the version that stays.
    """
    system.config.write_text(BAD)

    status, said = system.run("configure", "0.2.0")

    assert status == 1
    assert f"{system.config}: {REASON}" in said
    assert said.endswith("Correct the configuration; then run: dpkg --configure -a")

    system.command("tt-device-plugin", "echo called")
    assert system.run("abort-upgrade", "0.3.0") == (0, "")


def test_only_a_first_installation_creates_the_configuration(system: System) -> None:
    """An administrator who has removed it wants the defaults; what is there is kept."""
    assert system.run("configure", "0.2.0") == (0, "")
    assert not system.config.exists()

    assert system.run("configure", "") == (0, "")
    assert system.config.read_text() == (system.top / "first").read_text()

    system.config.write_text("unit = 'board'\n")
    assert system.run("configure", "") == (0, "")
    assert system.config.read_text() == "unit = 'board'\n"


def test_the_variables_of_the_service_count(system: System) -> None:
    """A drop-in can name another file, also with spaces in its name.

    An unknown variable is not a reason to end.
    """
    other = system.top / "the other.toml"
    other.write_text(BAD)
    with service(system, TTDP_CONFIG_FILE=str(other)):
        status, said = system.run("configure", "0.2.0")
    assert status == 1 and f"{other}: {REASON}" in said

    with service(system, TTDP_UNIT="board", TTDP_UNTI="board"):
        assert system.run("configure", "0.2.0") == (0, "")


def test_the_variables_of_the_administrator_do_not_count(system: System) -> None:
    """They are for a command typed by hand, and could hide what the service rejects."""
    other = system.top / "for-a-test.toml"
    other.write_text("unit = 'board'\n")
    system.config.write_text(BAD)
    status, said = system.run("configure", "0.2.0", TTDP_CONFIG_FILE=str(other))
    assert status == 1 and f"{system.config}: {REASON}" in said

    system.config.write_text("unit = 'board'\n")
    assert system.run("configure", "0.2.0", TTDP_UNIT="bord") == (0, "")


def test_files_for_others_are_removed_with_the_package(tmp_path: Path) -> None:
    """As CDI and node labels would else describe devices that nobody serves any more."""
    files = [
        tmp_path / "run/cdi/tenstorrent.com-device.json",
        tmp_path / "etc/kubernetes/node-feature-discovery/features.d/tt-device-plugin",
        tmp_path / "var/lib/prometheus/node-exporter/tt-device-plugin.prom",
    ]
    for file in files:
        file.parent.mkdir(parents=True)
        file.touch()
        file.with_name(f".{file.name}.new").touch()
    foreign = files[0].with_name("foreign")
    foreign.touch()

    text, debhelper, _ = (ROOT / "packaging/deb/postrm").read_text().partition("#DEBHELPER#")
    assert debhelper
    script = tmp_path / "postrm"
    script.write_text(re.sub(" (?=/(run|var|etc)/)", f" {tmp_path}", text))
    subprocess.run(["sh", script, "remove"], timeout=60, check=True)

    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {*left} == {foreign, script}


@pytest.mark.skipif(not shutil.which("dash"), reason="NOT RUN: dash is not installed")
@pytest.mark.parametrize("script", ["postinst", "postrm"])
def test_the_scripts_are_posix(script: str) -> None:
    """Debian's /bin/sh is dash, which has nothing more."""
    assert not subprocess.run(["dash", "-n", ROOT / "packaging/deb" / script]).returncode
