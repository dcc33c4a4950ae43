"""A user of the host logs out: the locks of containers that run under the same user ID.

logind, the session and tt-umd's mutex are the real ones. The containers have namespaces and a root
file system, and the directory that the package mounts as their /dev/shm.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import umd
from tests.e2e.container import PACKAGES, Container, in_tree, require_root
from tests.world.processes import wait_until

SUITE = "trixie"
TREE = f"{PACKAGES},libpam-systemd,passwd"
USER = 1000
UNITS = ("owner", "early", "late")
# Executes a command as the user in another root file system.
ENTER = f"""
import os, sys
_, root, *command = sys.argv[1:]
os.chroot(root)
os.chdir("/")
os.setgroups([])
os.setgid({USER})
os.setuid({USER})
os.execv(command[0], command)
"""


class System(Container):
    """A system with the package, a user, and containers with tt-umd."""

    def __init__(self, deb: Path) -> None:
        super().__init__(SUITE, {deb.parent: "/srv/packages"}, TREE)
        self.deb = f"/srv/packages/{deb.name}"

    def start(self) -> None:
        image = self.shared / "image"
        image.mkdir()
        with tarfile.open(umd.image()) as archive:  # an image with one layer
            layer = archive.extractfile(max(archive.getmembers(), key=lambda member: member.size))
            assert layer
            unpack = ["tar", "-C", str(image), "-x"]
            subprocess.run(unpack, input=layer.read(), check=True)
        for name in ("dev/shm", "proc"):
            (image / name).mkdir(parents=True, exist_ok=True)

        (self.shared / "enter.py").write_text(ENTER)
        # By default, logind deletes a user's files ten seconds after the last session.
        self.write("/etc/systemd/logind.conf.d/test.conf", "[Login]\nUserStopDelaySec=0\n")
        in_tree(self.root, "useradd", "--create-home", f"--uid={USER}", "somebody")

        self.boot()
        self("apt-get", "install", "--yes", self.deb)

    def run_container(self, name: str, shm: str) -> str:
        """Start one with this /dev/shm; return whether it holds the lock or waits for it."""
        mounts = 'mount --bind "$1" "$2/dev/shm" && mount -t proc proc "$2/proc"'
        script = f'{mounts} && exec python3 /srv/shared/enter.py "$@"'

        unit = ["systemd-run", "--quiet", "--collect", f"--unit={name}"]
        unit += ["--property=KillSignal=SIGKILL"]
        unit += [f"--property=StandardOutput=file:/srv/shared/{name}"]
        namespaces = ["unshare", "--mount", "--propagation=private"]
        namespaces += ["--pid", "--fork", "--kill-child", "sh", "-c", script, "sh"]
        self(*unit, *namespaces, shm, "/srv/shared/image", *umd.python(umd.HOLD))

        return wait_until(lambda: self.states(name), f"{name} to report its state")[0]

    def states(self, name: str) -> list[str]:
        """Return what a container has reported."""
        file = self.shared / name
        return umd.said(file.read_text()) if file.exists() else []

    def log_in_and_out(self) -> None:
        """Begin a session by PAM, like a login; end it, and wait for logind to delete files."""
        session = ["--unit=session", f"--uid={USER}", "--property=PAMName=login"]
        self("systemd-run", "--quiet", "--collect", *session, "sleep", "infinity")
        sessions = ("loginctl", "list-sessions", "--no-legend")
        wait_until(lambda: str(USER) in self(*sessions), "the session")

        # logind deletes this one in the same pass as all others of the user.
        user = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups")
        self(*user, "touch", "/dev/shm/marker")
        self("systemctl", "stop", "session")
        is_deleted = ("test", "!", "-e", "/dev/shm/marker")
        wait_until(lambda: self.status_of(*is_deleted) == 0, "logind to delete files")
        self(*sessions)  # which logind answers after that pass

    def stop_containers(self) -> None:
        units = [f"{name}.service" for name in UNITS]
        self("systemctl", "stop", *units, check=False)
        listed = ("systemctl", "list-units", "--all", "--no-legend", *units)
        wait_until(lambda: not self(*listed), "the end of all containers")

        for name in UNITS:
            (self.shared / name).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def system(deb: Path) -> Iterator[System]:
    require_root()
    with System(deb) as system:
        yield system


@pytest.mark.parametrize("place", ["/run/ttdp/shm", "/dev/shm/tt-device-plugin"])
def test_a_user_logs_out(system: System, place: str) -> None:
    """Below /run/ttdp/shm the lock stays. Below /dev/shm it is deleted."""
    shm = f"{place}/n300"
    system.shell(f"mkdir -p {shm} && chmod 1777 {shm}")
    try:
        assert system.run_container("owner", shm) == "holds"
        assert system.run_container("early", shm) == "waits"
        assert system("stat", "--format=%u", f"{shm}/{umd.LOCK}") == f"{USER}\n"

        system.log_in_and_out()
        late = system.run_container("late", shm)

        assert system("systemctl", "is-active", "owner") == "active\n"
        assert late == ("waits" if place == "/run/ttdp/shm" else "holds")
        if late == "waits":
            assert system.states("early") == ["waits"]
    finally:
        system.stop_containers()
