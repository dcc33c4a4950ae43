"""System containers: a minimal Debian with its own systemd, booted by systemd-nspawn.

The host needs neither systemd nor machined: the container is not registered with anybody, gets a
cgroup of its own in the unified hierarchy and is entered with nsenter. Its network has nothing but
a loopback interface.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from tests.e2e.machine import remove_cgroups
from tests.world.processes import wait_until

C = TypeVar("C", bound="Container")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-device-plugin/e2e"
PACKAGES = "systemd,systemd-sysv,dbus,python3"
FRESH = 14 * 86400  # seconds for which a root tree is used again
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
    "SYSTEMD_COLORS": "0",
    "SYSTEMD_PAGER": "",
}
# In a mount namespace of its own: nspawn wants the unified hierarchy and a tmpfs.
BOOT = """
set -e
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/nspawn "/sys/fs/cgroup/$NAME"
mount -t tmpfs tmpfs /run/systemd/nspawn
echo $$ > "/sys/fs/cgroup/$NAME/cgroup.procs"
# The container's systemd makes a BPF program of DevicePolicy=.
exec systemd-nspawn --quiet --boot --register=no --keep-unit --console=pipe --private-network \\
    --machine="$NAME" --system-call-filter=bpf --capability=CAP_BPF,CAP_NET_ADMIN "$@"
"""


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


def require_root(**tools: str) -> None:
    """End the run with one line if it lacks root or a tool, given with its Debian package."""
    if os.geteuid() != 0:
        pytest.exit("run this as root: it boots systems", returncode=1)
    tools = {"mmdebstrap": "mmdebstrap", "systemd_nspawn": "systemd-container", **tools}
    missing = [name for tool, name in tools.items() if not shutil.which(tool.replace("_", "-"))]
    if missing:
        pytest.exit(f"apt-get install --no-install-recommends {' '.join(missing)}", returncode=1)


def root_tree(suite: str, packages: str = PACKAGES) -> Path:
    """Return a tarball of a minimal system, from the cache or made; raises Missing."""
    arguments = ["--variant=minbase", f"--include={packages}"]
    arguments += ["--aptopt=Acquire::Check-Valid-Until false"]
    key = hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]
    tarball = CACHE / f"{suite}-{key}.tar"
    if tarball.exists() and time.time() - tarball.stat().st_mtime < FRESH:
        return tarball
    CACHE.mkdir(parents=True, exist_ok=True)
    half = tarball.with_suffix(f".{os.getpid()}.tar")
    made = subprocess.run(
        ["mmdebstrap", "--quiet", *arguments, suite, str(half)], capture_output=True, text=True
    )
    if made.returncode:
        half.unlink(missing_ok=True)
        reason = (made.stderr.strip().splitlines() or ["mmdebstrap failed"])[-1]
        raise Missing(f"no root tree of {suite}: {reason}")
    half.rename(tarball)
    return tarball


class Container:
    """One system, booted and deleted with the context; it can be booted several times."""

    def __init__(self, suite: str, binds: Mapping[Path, str], packages: str = PACKAGES) -> None:
        """binds: what of the host is where in it, read-only. packages: what it has."""
        tree = root_tree(suite, packages)
        work = Path(tempfile.mkdtemp(prefix="ttdp-e2e-", dir="/var/tmp"))
        self.root = work / "root"
        self.shared = work / "shared"  # /srv/shared, read-write
        self.console = work / "console.log"
        self.name = f"ttdp-{suite}-{os.getpid()}"
        self.arguments = [f"--directory={self.root}", f"--bind={self.shared}:/srv/shared"]
        self.arguments += [f"--bind-ro={source}:{target}" for source, target in binds.items()]
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.leader = 0
        self.root.mkdir()
        self.shared.mkdir()
        subprocess.run(["tar", "-C", str(self.root), "-xf", str(tree)], check=True)

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

    def boot(self, begun: Callable[[], object] = lambda: None) -> float:
        """Boot, call `begun` early on, wait until all is started; returns the seconds taken."""
        since = time.monotonic()
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", BOOT, "sh"]
        with self.console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                [*command, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NAME": self.name},
            )
        wait_until(self._begun, f"the systemd of {self.name}", 30)
        begun()
        what = f"{self.name} to be up, whose console says\n"
        wait_until(self._up, lambda: f"{what}{self._last_words()}\n", 60)
        return time.monotonic() - since

    def _begun(self) -> bool:
        assert self._nspawn and self._nspawn.poll() is None, (
            f"systemd-nspawn has ended:\n{self._last_words()}"
        )
        pid = self._nspawn.pid
        with contextlib.suppress(OSError, IndexError):
            self.leader = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            return Path(f"/proc/{self.leader}/comm").read_text() == "systemd\n"
        return False

    def _up(self) -> bool:
        assert self._begun(), f"systemd has ended:\n{self._last_words()}"
        state = self("systemctl", "is-system-running", check=False).strip()
        return state in ("running", "degraded")

    def _last_words(self) -> str:
        return self.console.read_text(errors="replace")[-2000:] if self.console.exists() else ""

    def run(self, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in the container to its end."""
        entering = ["nsenter", f"--target={self.leader}", "--all", "--"]
        return subprocess.run(
            [*entering, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=timeout,
        )

    def __call__(self, *command: str, check: bool = True) -> str:
        """Return standard output and error of a command in the container."""
        done = self.run("sh", "-c", 'exec "$@" 2>&1', "sh", *command)
        assert not check or done.returncode == 0, (
            f"{' '.join(command)}: status {done.returncode}:\n{done.stdout}"
        )
        return done.stdout

    def shell(self, script: str, check: bool = True) -> str:
        return self("sh", "-ec", script, check=check)

    def status_of(self, *command: str) -> int:
        return int(self("sh", "-c", '"$@" >/dev/null 2>&1; echo $?', "sh", *command))

    def write(self, path: str, text: str) -> None:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.root / path.lstrip("/"))

    def files(self) -> set[str]:
        """Return everything in the root tree but what logs and package management keep."""
        kept = ("var/lib/apt", "var/lib/dpkg", "var/log", "var/backups", "var/cache/apt",
                "var/cache/debconf", "var/cache/ldconfig", "tmp", "var/tmp", "run", "dev", "proc",
                "sys")  # fmt: skip
        found: set[str] = set()
        for directory, names, files in os.walk(self.root):
            place = os.path.relpath(directory, self.root)
            paths = {name: os.path.normpath(os.path.join(place, name)) for name in names}
            names[:] = [name for name in names if paths[name] not in kept]
            found.update(os.path.normpath(os.path.join(place, name)) for name in [*names, *files])
        return found

    def shut_down(self) -> float:
        """Power off in an orderly manner; return the seconds that it took."""
        assert self._nspawn
        since = time.monotonic()
        self("systemctl", "poweroff", check=False)
        try:
            self._nspawn.wait(60)
        finally:
            self.close()
        return time.monotonic() - since

    def close(self) -> None:
        """End it in whatever state it is."""
        if self._nspawn:
            if self._nspawn.poll() is None:
                self._nspawn.kill()
                with contextlib.suppress(OSError):
                    os.kill(self.leader, 9)
            self._nspawn.wait()
            self._nspawn = None
        remove_cgroups(f"/{self.name}")

    def delete(self) -> None:
        self.close()
        shutil.rmtree(self.root.parent, ignore_errors=True)
