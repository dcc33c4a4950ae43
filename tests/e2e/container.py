"""Containers: a minimal Debian with its own systemd, booted by systemd-nspawn.

The host needs neither systemd nor machined: the container is not registered with anybody, gets a
cgroup of its own in the unified hierarchy and is entered with nsenter. Its network has nothing but
a loopback interface. Virtual machines (vm.py) have their root trees from here, too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from tests.e2e.builds import FRESH, cached, digest
from tests.e2e.machine import HUNG, Scratch, kill_processes, remove_cgroups
from tests.world.processes import LONG_PATIENCE, wait_until

C = TypeVar("C", bound="Container")
PACKAGES = "systemd,systemd-sysv,dbus,python3"
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
ENVIRONMENT = {
    "PATH": PATH,
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}


class Missing(Exception):
    """Something that a test needs is not available here; the text names it."""


@contextlib.contextmanager
def optional(*, unless: bool = False) -> Iterator[None]:
    """Skip the test if something is missing; `unless` it is required."""
    try:
        yield
    except Missing as reason:
        if unless:
            raise
        pytest.skip(f"NOT RUN: {reason}")


def require(tools: Mapping[str, str]) -> None:
    """Raise Missing, which says what to install, unless these tools are here.

    tools: the Debian package of each.
    """
    if missing := [package for tool, package in tools.items() if not shutil.which(tool)]:
        raise Missing(f"apt-get install --no-install-recommends {' '.join(missing)}")


def require_root(**tools: str) -> None:
    """End the run with one line if it lacks root or a tool, given with its Debian package."""
    if os.geteuid() != 0:
        pytest.exit("run this as root: it boots systems", returncode=1)

    named = {tool.replace("_", "-"): package for tool, package in tools.items()}
    try:
        require({"mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", **named})
    except Missing as reason:
        pytest.exit(str(reason), returncode=1)


def root_tree(suite: str, packages: str = PACKAGES) -> Path:
    """Return a tarball of a minimal system, from the cache or made; raises Missing."""
    arguments = ("--variant=minbase", f"--include={packages}", "--format=tar")

    make = partial(debootstrap, suite, arguments=arguments)
    return cached(f"{suite}-{digest(arguments)}.tar", make, lasts=FRESH)


def debootstrap(suite: str, target: Path, arguments: Sequence[str]) -> None:
    """Make a system of a Debian release; raises Missing."""
    # A mirror can be older than the time for which its indexes are valid. The user of its own, as
    # which apt downloads, cannot enter a cache in root's home.
    options = ["--aptopt=Acquire::Check-Valid-Until false", "--aptopt=APT::Sandbox::User root"]
    command = ["mmdebstrap", "--quiet", *options, *arguments, suite, str(target)]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise Missing(f"no system of {suite}: {made.stderr.strip()[-500:]}")


def unpack(tarball: Path, root: Path) -> None:
    """Unpack a root tree into a directory, which is made."""
    root.mkdir()
    subprocess.run(["tar", "-C", str(root), "-xf", str(tarball)], check=True)


def in_tree(root: Path, *command: str) -> str:
    """Run a command in a root tree that is not booted; return its output."""
    inside = ["chroot", str(root), "/usr/bin/env", f"PATH={PATH}", *command]
    done = subprocess.run(inside, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# Runs systemd-nspawn for the machine $1. It wants the unified hierarchy and a tmpfs, which the host
# may not have there, so this has a mount namespace of its own.
NSPAWN = """
set -e
name=$1
shift
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/nspawn "/sys/fs/cgroup/$name"
mount -t tmpfs tmpfs /run/systemd/nspawn
echo $$ > "/sys/fs/cgroup/$name/cgroup.procs"
exec systemd-nspawn --quiet --register=no --keep-unit --console=pipe --machine="$name" "$@"
"""


class Container:
    """One system, booted and deleted with the context; it can be booted several times.

    A subclass prepares it in start(). Whatever it is called with is run in it:
    container("systemctl", "start", "x") returns what that prints, and fails if that fails.
    """

    def __init__(self, suite: str, binds: Mapping[Path, str], packages: str = PACKAGES) -> None:
        """binds: what of the host is where in it, read-only. packages: what it has."""
        tree = root_tree(suite, packages)
        self._scratch = Scratch()
        self.name = self._scratch.path.name
        self.root = self._scratch.path / "root"
        self.shared = self._scratch.path / "shared"  # /srv/shared, read-write
        self.leader = 0  # the PID of its systemd, as the host sees it
        self._console = self._scratch.path / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._binds = [f"--bind={self.shared}:/srv/shared"]
        self._binds += [f"--bind-ro={source}:{target}" for source, target in binds.items()]

        self.shared.mkdir()
        unpack(tree, self.root)
        units = self.root / "etc/systemd/system"
        units.mkdir(parents=True, exist_ok=True)
        for timer in ("apt-daily.timer", "apt-daily-upgrade.timer"):  # which lock dpkg twice a day
            (units / timer).symlink_to("/dev/null")

    # Its life.

    def __enter__(self: C) -> C:
        try:
            self.start()
        except BaseException:
            self.delete()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.delete()

    def start(self) -> None:
        """Boot, and prepare the system for the tests."""
        self.boot()

    def boot(self) -> None:
        """Start it, and wait until all units are started that are wanted at the boot."""
        self.power_on()
        self.wait_up()

    def power_on(self) -> None:
        """Start it, and wait until its systemd runs."""
        # The container's systemd makes a BPF program of DevicePolicy=.
        options = ["--boot", "--private-network", "--system-call-filter=bpf"]
        options += ["--capability=CAP_BPF,CAP_NET_ADMIN", *self._binds]
        with self._console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                self.nspawn(*options), stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        wait_until(self._has_begun, f"the systemd of {self.name}")

    def nspawn(self, *options: str) -> list[str]:
        """Return the command that runs systemd-nspawn on the root tree with these options."""
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", NSPAWN, "sh"]
        return [*command, self.name, f"--directory={self.root}", *options]

    def wait_up(self) -> None:
        def is_up() -> bool:
            assert self._has_begun(), "systemd has ended"
            return self("systemctl", "is-system-running", check=False) in (
                "running\n",
                "degraded\n",
            )

        wait_until(is_up, lambda: f"{self.name}:\n{self._console.read_text(errors='replace')}\n")

    def shut_down(self) -> None:
        """Power off in an orderly manner."""
        assert self._nspawn
        self("systemctl", "poweroff", check=False)
        self._nspawn.wait(LONG_PATIENCE)
        remove_cgroups(f"/{self.name}")

    def delete(self) -> None:
        """End it in whatever state it is, and delete its files."""
        if self._nspawn:
            kill_processes(f"/{self.name}")
            self._nspawn.wait()
        self._scratch.remove()

    def _has_begun(self) -> bool:
        assert self._nspawn and self._nspawn.poll() is None, self._console.read_text()
        pid = self._nspawn.pid
        with contextlib.suppress(OSError, IndexError):
            self.leader = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            return Path(f"/proc/{self.leader}/comm").read_text() == "systemd\n"
        return False

    # What is done in it.

    def run(self, *command: str, timeout: float = HUNG) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which may fail."""
        return subprocess.run(
            ["nsenter", f"--target={self.leader}", "--all", "--", *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=timeout,
        )

    def __call__(self, *command: str, check: bool = True) -> str:
        """Return standard output and error of a command, which must succeed if `check`."""
        done = self.run("sh", "-c", 'exec "$@" 2>&1', "sh", *command)
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: status {done.returncode}:\n{done.stdout}"
        )
        return done.stdout

    def shell(self, script: str, check: bool = True) -> str:
        """Do the same with a shell script, which ends at its first error."""
        return self("sh", "-ec", script, check=check)

    def status_of(self, *command: str) -> int:
        """Return the exit status of a command, whose output is dropped."""
        return self.run(*command).returncode

    def write(self, path: str, text: str) -> None:
        """Write a file, and make its directory; this works also while it is not booted."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def path(self, path: str) -> Path:
        """Return a path of its root tree as one of this machine, where links of it are wrong."""
        return self.root / path.lstrip("/")
