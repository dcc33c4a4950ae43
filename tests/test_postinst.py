"""The package's postinst: a configuration that the new version rejects ends it, before a restart.

tests/e2e/test_package.py shows what dpkg makes of it, and what is removed with the package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.world.processes import ROOT

COMMANDS = ("env", "grep", "sh", "xargs")  # of packages that are always installed
BAD = 'log_level = "loud"\n'
REASON = "log_level: 'loud' is not valid; must be debug, info, warning or error"
WAY_OUT = "Correct the configuration; then run: dpkg --configure -a"


class System:
    """Directories in place of /etc, /usr/share and PATH; the program is that of this checkout."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.config = top / "config.toml"
        (top / "bin").mkdir()
        for name in COMMANDS:
            (top / "bin" / name).symlink_to(str(shutil.which(name)))

        code = f"import sys, ttdp; ttdp.DEFAULT_CONFIG_FILE = {str(self.config)!r}; "
        program = shlex.join([sys.executable, "-c", f"{code} sys.exit(ttdp.main())"])
        # `--version` is there to extract the zipapp, which this program is not packed in.
        program = f'[ "$1" = --version ] || PYTHONPATH={ROOT} exec {program} "$@"'
        self.command("tt-device-plugin", program)
        self.command("systemctl", "echo 0")

    def command(self, name: str, script: str) -> None:
        """Make a command that postinst finds."""
        path = self.top / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run postinst with these variables; return its status and what it prints.

        In place of debhelper's part, which restarts the service, it says so, and ends.
        """
        text = (ROOT / "packaging/deb/postinst").read_text()
        text = text.replace("#DEBHELPER#", "echo restarted; exit")
        text = text.replace("/etc/tt-device-plugin/config.toml", str(self.config))
        environ = {**variables, "PATH": str(self.top / "bin"), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            ["sh", "-c", text, "postinst", *arguments], env=environ,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, done.stdout.strip()


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_the_variables_of_the_service_count(system: System) -> None:
    """Not the administrator's, for commands typed by hand. A drop-in can name another file."""
    system.config.write_text("unit = 'board'\n")
    assert system.run("configure", "0.2.0", TTDP_UNIT="bord") == (0, "restarted")

    other = system.top / "the other.toml"
    for variables, expected in (
        ({"TTDP_CONFIG_FILE": str(other)}, 1),
        ({"TTDP_UNIT": "board", "TTDP_UNTI": "board"}, 0),  # an unknown one is only a warning
    ):
        other.write_text(BAD)
        with subprocess.Popen(["sleep", "infinity"], env={**os.environ, **variables}) as service:
            system.command("systemctl", f"echo {service.pid}")
            status, said = system.run("configure", "0.2.0")
            service.kill()

        assert status == expected
        if status:
            assert f"{other}: {REASON}" in said and said.endswith(WAY_OUT)
        else:
            assert said == "restarted"


def test_after_a_failed_upgrade_nothing_is_done(system: System) -> None:
    """dpkg calls the postinst of the version that stays, with whatever configuration."""
    system.config.write_text(BAD)
    status, said = system.run("configure", "0.2.0")
    assert status == 1 and f"{system.config}: {REASON}" in said

    system.command("tt-device-plugin", "echo called")
    assert system.run("abort-upgrade", "0.3.0") == (0, "")
