"""A user of the host logs out: what becomes of locks of containers whose user has that number.

logind, the session and tt-umd's mutex are the real ones; the containers have namespaces of their
own for mounts and processes, a root file system of their own, and the directory that the package's
unit has made as their /dev/shm.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import umd
from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, Missing
from tests.world.processes import wait_until

SUITES = ("bookworm", "trixie")
TREE = f"{PACKAGES},libpam-systemd,passwd"
USER = 1000
LOCK = "TT_UMD_LOCK.CHIP_IN_USE_0_PCIe"
HOLD = """
import time, tt_umd
mutex = tt_umd.RobustMutex("CHIP_IN_USE_0_PCIe")
owner = mutex.probe_lock(2)
print("waits" if owner else "holds", flush=True)
if owner:
    mutex.lock()
    print("holds", flush=True)
time.sleep(3600)
"""
"""What tt-umd does before it starts a chip; after two seconds it says that it waits."""
ENTER = """
import os, sys
_, root, *command = sys.argv[1:]
os.chroot(root)
os.chdir("/")
os.setgroups([])
os.setgid({user})
os.setuid({user})
os.execv(command[0], command)
"""
"""Becomes the user in the container's root file system, and executes a command."""


class System(Container):
    """A system with the package, a user, and what containers with tt-umd need."""

    def __init__(self, suite: str, deb: Path) -> None:
        super().__init__(suite, {deb.parent: "/srv/packages"}, TREE)
        image = self.shared / "image"
        unpack(umd.image(), image)
        for name in ("dev/shm", "proc"):
            (image / name).mkdir(parents=True, exist_ok=True)
        (self.shared / "enter.py").write_text(ENTER.format(user=USER))
        self.deb = f"/srv/packages/{deb.name}"

    def start(self) -> None:
        self.boot()
        self("useradd", "--create-home", f"--uid={USER}", "somebody")
        # Ten seconds by default, from the end of a user's last session to the end of all that is
        # his.
        self.write("/etc/systemd/logind.conf.d/test.conf", "[Login]\nUserStopDelaySec=0\n")
        self("systemctl", "restart", "systemd-logind")
        assert self("apt-get", "install", "--yes", self.deb)

    def container(self, name: str, shm: str) -> None:
        """Start one as the user, with this as its /dev/shm, that wants the chip's lock."""
        mounts = 'mount --bind "$1" "$2/dev/shm" && mount -t proc proc "$2/proc"'
        script = f'{mounts} && exec python3 /srv/shared/enter.py "$@"'
        unit = [
            "systemd-run",
            "--quiet",
            "--collect",
            f"--unit={name}",
            "--property=KillSignal=SIGKILL",
            f"--property=StandardOutput=file:/srv/shared/{name}",
        ]
        namespaces = [
            "unshare",
            "--mount",
            "--propagation=private",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        self(
            *unit,
            *namespaces,
            "sh",
            "-c",
            script,
            "sh",
            shm,
            "/srv/shared/image",
            *umd.python(HOLD),
        )

    def said(self, name: str) -> list[str]:
        """What it has said of the lock; tt-umd adds lines of its own."""
        file = self.shared / name
        words = (
            [line.split()[-1] for line in file.read_text().splitlines() if line.strip()]
            if file.exists()
            else []
        )
        return [word for word in words if word in ("waits", "holds")]

    def said_first(self, name: str) -> str:
        return wait_until(lambda: self.said(name), f"{name} to say something", 60)[0]

    def log_in(self) -> None:
        """Begin a session of the user's, as a login does: by PAM, which tells logind."""
        session = ["--unit=session", f"--uid={USER}", "--property=PAMName=login"]
        self("systemd-run", "--quiet", "--collect", *session, "sleep", "infinity")
        wait_until(
            lambda: str(USER) in self("loginctl", "list-sessions", "--no-legend"), "the session", 60
        )

    def log_out(self) -> None:
        """End it, and wait until logind has deleted what the user has in /dev/shm."""
        self(
            "setpriv",
            f"--reuid={USER}",
            f"--regid={USER}",
            "--clear-groups",
            "touch",
            "/dev/shm/marker",
        )
        self("systemctl", "stop", "session")
        wait_until(
            lambda: self.status_of("test", "-e", "/dev/shm/marker") != 0,
            "logind to delete the user's files",
            60,
        )


def unpack(archive: Path, target: Path) -> None:
    """Unpack the root file system of an image of one layer."""
    with tarfile.open(archive) as image, tempfile.TemporaryDirectory(dir=target.parent) as work:
        layer = max(image.getmembers(), key=lambda member: member.size)
        content = image.extractfile(layer)
        assert content
        with open(f"{work}/layer.tar", "wb") as file:
            shutil.copyfileobj(content, file)
        target.mkdir()
        subprocess.run(["tar", "-C", str(target), "-xf", f"{work}/layer.tar"], check=True)


@pytest.fixture(scope="module", params=SUITES)
def system(request: pytest.FixtureRequest, deb: Path) -> Iterator[System]:
    if os.geteuid() != 0 or not shutil.which("systemd-nspawn"):
        pytest.exit(
            "this boots system containers: run it as root, with systemd-container installed",
            returncode=1,
        )
    try:
        system = System(request.param, deb)
    except Missing as reason:
        pytest.fail(str(reason))
    try:
        system.start()
        yield system
    finally:
        system.delete()


@pytest.fixture
def no_containers(system: System) -> Iterator[None]:
    yield
    units = [f"{name}.service" for name in ("owner", "early", "late", "session")]
    system("systemctl", "stop", *units, check=False)
    wait_until(
        lambda: not system("systemctl", "list-units", "--all", "--no-legend", *units),
        "all to have gone",
        60,
    )
    for name in ("owner", "early", "late"):
        (system.shared / name).unlink(missing_ok=True)


@pytest.mark.usefixtures("no_containers")
@pytest.mark.parametrize("place", ["/run/ttdp/shm", "/dev/shm/tt-device-plugin"])
def test_a_user_logs_out(system: System, place: str, told: Told) -> None:
    """Below /run/ttdp/shm the lock stays, and who comes then waits. Below /dev/shm it goes."""
    shm = f"{place}/n300"
    system.shell(f"mkdir -p {shm} && chmod 1777 {shm}")
    system.container("owner", shm)
    assert system.said_first("owner") == "holds"
    system.container("early", shm)
    assert system.said_first("early") == "waits"
    assert system("stat", "--format=%u", f"{shm}/{LOCK}").strip() == str(USER)

    system.log_in()
    system.log_out()
    system.container("late", shm)
    late = system.said_first("late")
    assert (
        system.said("owner") == ["holds"]
        and system("systemctl", "is-active", "owner").strip() == "active"
    )
    if place == "/run/ttdp/shm":
        assert late == "waits" and system.said("early") == ["waits"]
    else:
        assert late == "holds"  # beside the owner: why the locks are not there any longer
    told(f"{place}: whoever comes after the log-out {late}")
