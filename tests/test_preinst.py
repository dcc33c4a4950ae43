"""The package's preinst, which refuses a version that would reject the present configuration."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import tomli

from tests.world.processes import ROOT

CONFIG = "/etc/tt-device-plugin/config.toml"
INSTALLED = "/usr/lib/tt-device-plugin/tt-device-plugin.pyz"
Edit = Callable[[str], str]


def preinst() -> str:
    """Return the script for the program of this checkout."""
    module = runpy.run_path(str(ROOT / "packaging/preinst.py"))
    return str(module["preinst"]((ROOT / "ttdp.py").read_text()))


@dataclass(frozen=True)
class Node:
    """Directories in place of /etc and /usr, and the commands that preinst runs."""

    top: Path

    @property
    def config(self) -> Path:
        return self.top / "config.toml"

    @property
    def bin(self) -> Path:
        return self.top / "bin"

    def command(self, name: str, script: str) -> None:
        """Make a command that preinst finds."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def run(
        self, *arguments: str, edit: Edit = lambda text: text
    ) -> subprocess.CompletedProcess[str]:
        """Run preinst as dpkg does, with a changed text."""
        text = preinst().replace(CONFIG, str(self.config))
        script = self.top / "preinst"
        script.write_text(edit(text.replace(INSTALLED, str(self.top / "installed.pyz"))))
        environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
        return subprocess.run(
            ["sh", script, *arguments], env=environment, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node with this Python, and without the service."""
    node = Node(tmp_path)
    node.bin.mkdir()
    (node.bin / "python3").symlink_to(Path(sys.executable).resolve())
    node.command("systemctl", "echo 0")
    with zipfile.ZipFile(tmp_path / "installed.pyz", "w") as packed:
        for path in Path(tomli.__file__).parent.glob("*.py"):
            packed.write(path, f"site-packages/tomli/{path.name}")
    return node


CONFIGURATIONS = {
    "empty": "",
    "former key that means the present behaviour": 'device_id_strategy = "bdf"',
    "former key": 'device_id_strategy = "asic"',
    "unknown key": 'unti = "board"',
    "value": 'log_level = "loud"',
    "type": "[health]\ninterval = true",
    "syntax": "unit = board",
    "sharing": '[[sharing.resources]]\nname = "n300"\nreplicas = 4\n',
    "sharing without a name": "[[sharing.resources]]\nreplicas = 4",
    "mounts": '[[mounts]]\nhost = "/srv/models"\ncontainer = "/dev"',
    "quotes": 'resource_domain = "a\'b$(id)`id`\\\\"',
}


@pytest.mark.parametrize("text", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("python", ["this Python", "Python 3.10"])
def test_preinst_and_the_program_agree(node: Node, text: str, python: str) -> None:
    """An upgrade is refused exactly if the program rejects the configuration, with its reason.

    Python 3.10 has no TOML reader; preinst uses the one of the installed version.
    """
    node.config.write_text(text)
    condition = "sys.version_info >= (3, 11)"
    edited = preinst().count(condition)
    result = "False" if python == "Python 3.10" else condition
    done = node.run("upgrade", "0.1.0", "0.2.0", edit=lambda x: x.replace(condition, result))
    file = str(node.config)
    command = [sys.executable, "ttdp.py", "check", "--config-only", "--config-file", file]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert edited == 1 and "not checked" not in done.stderr
    assert (done.returncode == 0) == (checked.returncode == 0), done.stderr
    if checked.returncode:
        [reason] = [line for line in done.stderr.splitlines() if line.startswith("    ")]
        printed = " ".join(checked.stdout.split())  # `check` wraps lines
        assert " ".join(reason.split()) in printed, (reason, checked.stdout)


def test_the_message_names_versions_and_reason(node: Node) -> None:
    """An upgrade leaves the installed version; a first installation leaves none."""
    node.config.write_text('log_level = "loud"')
    upgrade = node.run("upgrade", "0.1.0", "0.2.0")
    assert upgrade.returncode == 1 and upgrade.stdout == ""
    first, reason, stays, remedy = upgrade.stderr.splitlines()
    assert first.startswith("tt-device-plugin: 0.2.0 is not installed")
    assert f"{node.config}: log_level: 'loud'" in reason
    assert stays.startswith("Version 0.1.0 stays installed") and "install again" in remedy
    install = node.run("install")
    assert install.returncode == 1 and "stays installed" not in install.stderr


@pytest.mark.parametrize("arguments", [["install"], ["upgrade", "0.1.0", "0.2.0"]])
def test_without_a_configuration(node: Node, arguments: list[str]) -> None:
    """There is nothing to check, and nothing is printed, also without Python."""
    done = node.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    node.command("python3", "exit 127")
    done = node.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_configuration_that_cannot_be_checked(node: Node) -> None:
    """One line gives the reason, and the installation continues: postinst checks again."""
    node.config.write_text('log_level = "loud"')
    node.command("python3", "echo Traceback >&2; echo 'No module named tomli' >&2; exit 1")
    done = node.run("upgrade", "0.1.0", "0.2.0")
    assert done.returncode == 0
    line = "tt-device-plugin: the configuration was not checked: No module named tomli\n"
    assert done.stderr == line


def test_the_environment_of_the_service_counts(node: Node) -> None:
    """A drop-in can name another file, or set an option."""
    node.config.write_text("")
    other = node.top / "other.toml"
    other.write_text('log_level = "loud"')
    for variables, reason in (
        ({"TTDP_CONFIG_FILE": str(other)}, f"{other}: log_level"),
        ({"TTDP_UNIT": "rack"}, "TTDP_UNIT: 'rack'"),
        ({"TTDP_UNIT": "board"}, None),
    ):
        service = subprocess.Popen(["sleep", "infinity"], env={**os.environ, **variables})
        try:
            node.command("systemctl", f"echo {service.pid}")
            done = node.run("upgrade", "0.1.0", "0.2.0")
        finally:
            service.kill()
            service.wait()
        assert done.returncode == (1 if reason else 0), done.stderr
        assert (reason or "") in done.stderr


def test_dpkg_calls_without_a_new_version(node: Node) -> None:
    """After a failed upgrade of the next version dpkg calls the old preinst: nothing is checked."""
    node.config.write_text('log_level = "loud"')
    done = node.run("abort-upgrade", "0.3.0")
    assert (done.returncode, done.stderr) == (0, "")


def test_rules_that_need_other_packages_are_not_built() -> None:
    """preinst runs without the package's files: it can import Python's own modules only."""
    rules = runpy.run_path(str(ROOT / "packaging/preinst.py"))["rules"]
    program = "import grpc\nclass ConfigError(Exception): ...\ndef load_settings(): {}\n"
    assert "grpc" not in rules(program.format("pass"))
    with pytest.raises(SystemExit, match="need grpc"):
        rules(program.format("grpc.aio.server()"))
    with pytest.raises(SystemExit, match="does not define load_settings"):
        rules("class ConfigError(Exception): ...\n")


@pytest.mark.skipif(not shutil.which("dash"), reason="NOT RUN: dash is not installed")
def test_it_is_a_posix_script(node: Node) -> None:
    """Debian's /bin/sh is dash."""
    (node.top / "preinst").write_text(preinst())
    assert not subprocess.run(["dash", "-n", node.top / "preinst"]).returncode
