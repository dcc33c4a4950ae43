"""The README's two commands for a newcomer: a minimal system, an ordinary user, a fresh clone.

Each release has one tree, with git, make, python3 and python3-venv and nothing else, and each
command runs there twice: on a quiet machine, and beside two processes per processor that do nothing
but spin.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import CACHE, Missing, root_tree
from tests.e2e.machine import remove_cgroups
from tests.world.processes import ROOT

SUITES = ("bookworm", "trixie")
COMMANDS = ("demo", "test")
LOADS = os.environ.get("LOADS", "quiet busy").split()
PACKAGES = "git,make,python3,python3-venv"
USER = "newcomer"
PATIENCE = 1500.0  # seconds for a command on a busy machine, setting up included
# What may say how to reach the package index from here. Files and directories that it names are
# shown to the tree.
ABOUT_NETWORK = re.compile(
    r"PIP_|(HTTPS?|NO|ALL|FTP)_PROXY$|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$", re.IGNORECASE
)


# A mount namespace of its own, as in container.BOOT, but nothing is booted, and the network is the
# host's.
ENTER = """
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/nspawn "/sys/fs/cgroup/$NAME"
mount -t tmpfs tmpfs /run/systemd/nspawn
echo $$ > "/sys/fs/cgroup/$NAME/cgroup.procs"
exec systemd-nspawn --quiet --register=no --keep-unit --as-pid2 --console=pipe \\
    --machine="$NAME" "$@"
"""


class Tree:
    """A clean system with a clone of this repository in its user's home."""

    def __init__(self, suite: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ttdp-tree-", dir="/var/tmp"))
        tree = str(root_tree(suite, PACKAGES))
        subprocess.run(["tar", "-C", str(self.root), "-xf", tree], check=True)
        chroot = ["chroot", str(self.root), "/usr/bin/env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        subprocess.run([*chroot, "useradd", "--create-home", "--shell=/bin/bash", USER], check=True)
        self.clone = self.root / "home" / USER / "clone"
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(self.clone)]
        subprocess.run(clone, check=True)
        subprocess.run([*chroot, "chown", "-R", f"{USER}:", f"/home/{USER}"], check=True)

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        """Run it as the user, with the host's network and nothing else of the host."""
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", ENTER, "sh"]
        command += [
            f"--directory={self.root}",
            f"--user={USER}",
            f"--chdir=/home/{USER}/clone",
            "--resolv-conf=copy-host",
        ]
        about = {name: value for name, value in os.environ.items() if ABOUT_NETWORK.match(name)}
        places = {*about.values(), "/etc/pip.conf"}
        if config := self._pip_config():
            about["PIP_CONFIG_FILE"] = str(config)
            places.add(str(config))
        command += [f"--setenv={name}={value}" for name, value in about.items()]
        for place in sorted(places):
            if os.path.isabs(place) and os.path.exists(place):
                command.append(f"--bind-ro={place}")
        try:
            return subprocess.run(
                [*command, "make", target],
                # The name is one that a host may have.
                env={**os.environ, "NAME": self.root.name.replace("_", "0")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PATIENCE,
            )
        finally:
            remove_cgroups(f"/{self.root.name}")

    @staticmethod
    def _pip_config() -> Path | None:
        """The pip configuration of who runs this, if there is one."""
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        candidates = (home / "pip/pip.conf", Path.home() / ".pip/pip.conf")
        return next(filter(Path.exists, candidates), None)

    def delete(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def spinning(number: int) -> Iterator[None]:
    """So many processes that take all the processor time they get."""
    spinners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(number)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@pytest.fixture(scope="module", params=SUITES)
def tree(request: pytest.FixtureRequest) -> Iterator[Tree]:
    if os.geteuid() != 0 or not shutil.which("systemd-nspawn"):
        what = "this makes system containers: run it as root, with systemd-container installed"
        pytest.exit(what, returncode=1)
    try:
        tree = Tree(request.param)
    except Missing as reason:
        pytest.fail(f"{reason}; its cache is {CACHE}")
    yield tree
    tree.delete()


def test_make_deb_says_what_is_missing(tree: Tree) -> None:
    """Where Debian's tools are not installed one line names their packages; nothing is set up."""
    done = tree.make("deb")
    advice = "apt install --no-install-recommends dpkg-dev debhelper fakeroot\n"
    assert done.returncode != 0 and advice in done.stdout
    assert not (tree.clone / ".venv").exists(), done.stdout


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("target", COMMANDS)
def test_the_two_commands(tree: Tree, target: str, load: str, told: Told) -> None:
    """`make demo` and `make test` pass; the first sets up what it needs, and says so meanwhile."""
    began = time.monotonic()
    with spinning(2 * (os.cpu_count() or 1) if load == "busy" else 0):
        done = tree.make(target)
    seconds = time.monotonic() - began
    failed = re.findall(r"^_+ (test_\S+) _+$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{' '.join(failed)}\n{done.stdout[-6000:]}"
    if "setting up" in done.stdout:
        assert re.search(r"^    grpcio==", done.stdout, re.MULTILINE), done.stdout[:3000]
    told(f"{seconds:.0f} s; {done.stdout.strip().splitlines()[-1]}")
