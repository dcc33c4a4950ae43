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
from tests.e2e.container import Container, require_root
from tests.world.processes import ROOT

SUITE = "trixie"
COMMANDS = ("demo", "test")
PACKAGES = "git,make,python3,python3-venv"
USER = "newcomer"
TIMEOUT = 1500.0  # seconds for a command on a busy machine, setup included
# Variables that configure the access to the package index. Their files are visible in the tree.
NETWORK = re.compile(
    r"PIP_|(HTTPS?|NO|ALL|FTP)_PROXY$|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$", re.IGNORECASE
)
# Like container.BOOT, but nothing is booted, and the network is the host's.
ENTER = """
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/nspawn "/sys/fs/cgroup/$NAME"
mount -t tmpfs tmpfs /run/systemd/nspawn
echo $$ > "/sys/fs/cgroup/$NAME/cgroup.procs"
exec systemd-nspawn --quiet --register=no --keep-unit --as-pid2 --console=pipe \\
    --machine="$NAME" "$@"
"""


class Tree(Container):
    """A clean system with a clone of this repository in its user's home."""

    def start(self) -> None:
        """Add the user and the clone; nothing is booted."""
        chroot = ["chroot", str(self.root), "/usr/bin/env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        subprocess.run([*chroot, "useradd", "--create-home", "--shell=/bin/bash", USER], check=True)
        self.clone = self.root / "home" / USER / "clone"
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(self.clone)]
        subprocess.run(clone, check=True)
        subprocess.run([*chroot, "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)

    def make(self, target: str) -> tuple[int, list[tuple[float, str]]]:
        """Run make as the user; return its status, and its lines with seconds since the start."""
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", ENTER, "sh"]
        command += [f"--directory={self.root}", f"--user={USER}", f"--chdir=/home/{USER}/clone"]
        command += ["--resolv-conf=copy-host"]
        variables = {name: value for name, value in os.environ.items() if NETWORK.match(name)}
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pip/pip.conf")
        if config.exists():
            variables["PIP_CONFIG_FILE"] = str(config)
        command += [f"--setenv={name}={value}" for name, value in variables.items()]
        for place in sorted({*variables.values(), "/etc/pip.conf"}):
            if os.path.isabs(place) and os.path.exists(place):
                command.append(f"--bind-ro={place}")
        began, lines = time.monotonic(), []
        with subprocess.Popen(
            ["timeout", str(TIMEOUT), *command, "make", target],
            env={**os.environ, "NAME": self.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout
            for line in process.stdout:
                lines.append((time.monotonic() - began, line.rstrip()))
        return process.returncode, lines


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    require_root()
    with Tree(SUITE, {}, PACKAGES) as tree:
        yield tree


@pytest.mark.parametrize("target", COMMANDS)
def test_the_two_commands(tree: Tree, target: str, told: Told) -> None:
    """`make demo` and `make test` pass; both announce how long the setup takes, and show progress.

    The demo packs one Python only. Its first step is timed against the announcement.
    """
    status, lines = tree.make(target)
    output = "\n".join(line for _, line in lines)
    assert status == 0, output[-6000:]
    result = f"{lines[-1][0]:.0f} s; {lines[-1][1]}"
    if announced := [line for _, line in lines if " once: about " in line]:
        if target == "demo":
            assert len(re.findall(r"(?m)^fetching .* for \w+-cp3\d+$", output)) == 1, output
            first = next(at for at, line in lines if re.match(r" 1  ", line))
            result = f"first step after {first:.1f} s ({announced[0]!r}); {result}"
        else:
            assert re.search(r"(?m)^    grpcio==", output), output[:3000]
    told(result)
