"""The README's two commands for a newcomer: a minimal system, an ordinary user, a fresh clone."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import Container, in_tree, require_root
from tests.world.processes import ROOT

SUITE = "trixie"
COMMANDS = ("demo", "test")
PACKAGES = "git,make,python3,python3-venv"
USER = "newcomer"
TIMEOUT = 1500.0  # seconds for a command on a busy machine, setup included
# Variables that configure the access to the package index, some of them by files.
NETWORK = re.compile(
    r"PIP_|(HTTPS?|NO|ALL|FTP)_PROXY$|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$", re.IGNORECASE
)


class Tree(Container):
    """A clean system with a clone of this repository in its user's home; it is never booted."""

    def start(self) -> None:
        in_tree(self.root, "useradd", "--create-home", "--shell=/bin/bash", USER)
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT)]
        subprocess.run([*clone, str(self.root / "home" / USER / "clone")], check=True)
        in_tree(self.root, "chown", "-R", f"{USER}:", f"/home/{USER}")

    def make(self, target: str) -> tuple[int, list[tuple[float, str]]]:
        """Run make as the user; return its status, and its lines with seconds since the start."""
        # The network is the host's.
        options = ["--as-pid2", f"--user={USER}", f"--chdir=/home/{USER}/clone"]
        options += ["--resolv-conf=copy-host", *package_index()]
        began, lines = time.monotonic(), []
        with subprocess.Popen(
            self.nspawn(*options, "timeout", str(TIMEOUT), "make", target),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout
            for line in process.stdout:
                lines.append((time.monotonic() - began, line.rstrip()))
        return process.returncode, lines


def package_index() -> list[str]:
    """Return systemd-nspawn's options for an access to the package index like this machine's."""
    variables = {name: value for name, value in os.environ.items() if NETWORK.match(name)}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pip/pip.conf")
    if config.exists():
        variables["PIP_CONFIG_FILE"] = str(config)
    files = {*filter(os.path.isabs, variables.values()), "/etc/pip.conf"}

    options = [f"--setenv={name}={value}" for name, value in variables.items()]
    return options + [f"--bind-ro={file}" for file in sorted(files) if os.path.exists(file)]


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    require_root()
    with Tree(SUITE, {}, PACKAGES) as tree:
        yield tree


@pytest.mark.parametrize("target", COMMANDS)
def test_the_two_commands(tree: Tree, target: str, told: Told) -> None:
    """`make demo` and `make test` pass; both announce how long the setup takes.

    The demo packs one Python only. Its first step is timed against the announcement.
    """
    status, lines = tree.make(target)
    output = "\n".join(line for _, line in lines)
    assert status == 0, output[-6000:]
    assert "Traceback" not in output, output[-6000:]

    announced = [line for _, line in lines if " once: about " in line]
    assert announced, output[:3000]
    result = f"{lines[-1][0]:.0f} s; {lines[-1][1]}"
    if target == "demo":
        assert len(re.findall(r"(?m)^fetching .* for \w+, cp3\d+$", output)) == 1, output
        first = next(at for at, line in lines if re.match(r" 1  ", line))
        result = f"first step after {first:.1f} s ({announced[0]!r}); {result}"
    told(result)
