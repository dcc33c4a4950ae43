"""A node: a machine with a real kubelet, simulated cards, and tt-device-plugin as it is shipped.

There is no udev: the simulated node makes the links by PCI address. The cards' device files are
real character devices, of drivers that every kernel has and that containers may not open by
default: a container can really open what it is given.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.machine import (
    JSON,
    NODE_NAME,
    Containerd,
    Kubelet,
    Machine,
    Process,
    all_run,
    pod,
    refusal,
    tail,
)
from tests.world.checkpoint import CHECKPOINT
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, NotifySocket, wait_until

ZIPAPP = ROOT / "dist/tt-device-plugin.pyz"
STATE_DIRECTORY = "/var/lib/tt-device-plugin"
CDI_DIRECTORY = "/run/cdi"

N300 = "tenstorrent.com/n300"
# The first cards' numbers: fuse, loop-control, cpuid of two processors, autofs, btrfs-control. To
# open them takes no capability, as with a Tenstorrent card. runc lets all containers open tun.
OPENABLE = ((10, 229), (10, 237), (203, 0), (10, 235), (203, 1), (10, 234))
FORBIDDEN = "Operation not permitted"  # what a container has of all other numbers


# --- What is tested -------------------------------------------------------------------------------


def _without_version(text: str) -> str:
    """Return the program's text without the one line that a build replaces."""
    return re.sub(r'(?m)^__version__ = ".*"$', "", text)


def stale_zipapp() -> str | None:
    """Return why dist/ has no zipapp of this very program, or None if it has."""
    name = ZIPAPP.relative_to(ROOT)
    if not ZIPAPP.exists():
        return f"there is no {name}; run: make pyz"
    with zipfile.ZipFile(ZIPAPP) as packed:
        program = packed.read("site-packages/ttdp.py").decode()
    if _without_version(program) != _without_version((ROOT / "ttdp.py").read_text()):
        return f"{name} is of another ttdp.py than the one here; run: make pyz"
    return None


class Program:
    """The zipapp, of which copies are installed on machines."""

    def install(self, directory: Path) -> Path:
        """Replace the old one in one step, as dpkg does; return the new one."""
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ZIPAPP, directory / ".new")
        return (directory / ".new").rename(directory / ZIPAPP.name)


class Daemon:
    """The daemon on a machine, started and stopped as by systemd."""

    def __init__(
        self, machine: Machine, cards: SimulatedNode, program: Program, interval: float = 5.0
    ) -> None:
        """interval: seconds between two polls; the default is the daemon's own."""
        self.process: Process | None = None
        self.log = machine.logs / "tt-device-plugin.log"
        self.log.unlink(missing_ok=True)  # of another one, which has ended
        self._machine = machine
        self._program = program
        self._flags = cards.flags
        self._config = machine.scratch / "daemon.toml"
        self._interval = interval
        self._installed = 0
        self.configure("")
        self.install()

    def configure(self, config: str) -> None:
        """Write its configuration file: keys and tables."""
        # A poll that comes before the ticker's next beat is no fault of the chip.
        misses = max(2, round(5 / self._interval))
        health = f"[health]\ninterval = {self._interval}\nheartbeat_misses = {misses}\n"
        self._config.write_text(f"{config}\n{health}")

    def install(self) -> None:
        """Install the program, or over the installed one; the next start runs it."""
        self._installed += 1
        self._command = self._program.install(self._machine.scratch / "usr")
        # Another release unpacks itself into another directory.
        self._cache = self._machine.scratch / f"cache-{self._installed}"

    def start(self) -> None:
        """Start it, and wait for READY=1."""
        assert self.process is None, "it runs already"
        for directory in (STATE_DIRECTORY, CDI_DIRECTORY):  # the unit makes them
            self._machine.path(directory).mkdir(exist_ok=True)
        manager = NotifySocket(self._machine.scratch / "notify")
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "STATE_DIRECTORY": STATE_DIRECTORY,
            "NOTIFY_SOCKET": manager.address,
            "SHIV_ROOT": str(self._cache),
            "PYTHONPYCACHEPREFIX": str(self._cache),
        }
        # Nice as in the unit: a kubelet that starts takes all the processors that it can get.
        command = ["nice", "-n-10", str(self._command), "run", f"--config-file={self._config}"]

        def is_ready() -> bool:
            return any("READY=1" in note.text.splitlines() for note in manager.receive())

        with contextlib.closing(manager):
            self.process = self._machine.spawn([*command, *self._flags], self.log, environment)
            wait_until(is_ready, lambda: f"READY=1; the log ends\n{tail(self.log)}\n", 30)

    def stop(self) -> None:
        """Stop it; its exit status has to be 0."""
        assert self._end(signal.SIGTERM) == 0, tail(self.log)

    def reload(self) -> None:
        assert self.process is not None, "it does not run"
        os.kill(self.process.pid, signal.SIGHUP)

    def kill(self) -> None:
        """Kill it, as the kernel's OOM killer does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None, "it does not run"
        self.process.signal(number)
        status = self.process.status
        self.process = None
        return status


# --- The node -------------------------------------------------------------------------------------

_names = itertools.count(1)

Outcome = str  # what became of a pod: RUNNING, or why the kubelet refused it
RUNNING: Outcome = "running"
N = TypeVar("N", bound="Node")


class Node:
    """A running kubelet with its machine; cards, daemon and pods are made anew for each test."""

    def __init__(
        self,
        version: str,
        program: Program,
        *,
        static_pods: bool = True,
        config: JSON | None = None,
        containerd: Path | None = None,
        images: Sequence[Path] = (),
    ) -> None:
        """Args:
        static_pods: else an API server has the pods; config: the kubelet's; containerd: a
        directory with another one than the host's; images: archives of more than busybox.
        """
        self.version = version
        self.program = program
        self.machine = Machine(numa_nodes=2)
        self.containerd = Containerd(self.machine, containerd)
        self.containerd.images += images
        self.api = None if static_pods else ApiServer()
        api_server = None if static_pods else f"http://127.0.0.1:{PORT}"
        self.kubelet = Kubelet(
            version, self.machine, self.containerd, config=config, api_server=api_server
        )
        self._boot = ""
        self._daemon: Daemon | None = None
        self._cards: SimulatedNode | None = None
        self._hugepages = 0  # of 2 MiB, in a hugetlbfs of the machine's
        self._ticker = contextlib.ExitStack()
        self._dead: set[str] = set()  # containers of former boots
        self._pods: list[str] = []
        self._going: list[str] = []

    def __enter__(self: N) -> N:
        try:
            self._power_on()
            self.kubelet.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ticker.close()
        if self.api:
            self.api.close()
        self.machine.destroy()

    def _power_on(self) -> None:
        self.machine.power_on()
        self._begin_boot()
        self._mount_hugetlbfs()
        self.containerd.start()
        if self.api:
            self.api.serve(self.machine.listen)

    def _begin_boot(self) -> None:
        self._boot = str(uuid.uuid4())
        if self._cards is not None:
            self._show_boot(self._cards.root)

    def _show_boot(self, root: Path) -> None:
        """Show the cards' tree which boot this is, and the cgroups of this machine's pods."""
        file = root / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{self._boot}\n")
        cgroups = root / "sys/fs/cgroup"
        cgroups.parent.mkdir(exist_ok=True)
        if not cgroups.is_symlink():
            cgroups.symlink_to("/sys/fs/cgroup")

    @property
    def cards(self) -> SimulatedNode:
        """The machine's cards; without any until a test adds them. Their firmware lives."""
        if self._cards is None:
            root = self.machine.scratch / f"cards-{next(_names)}"
            self._cards = SimulatedNode(root, nodes="mknod", numbers=OPENABLE)
            self._show_boot(root)
            self._ticker.enter_context(Ticker(self._cards))
        return self._cards

    def set_hugepages(self, count: int) -> None:
        """Mount a hugetlbfs of that many pages of 2 MiB at /dev/hugepages, now and at each boot.

        The kernel must have the pages.
        """
        self._hugepages = count
        self._mount_hugetlbfs()

    def _mount_hugetlbfs(self) -> None:
        if self._hugepages:
            self._hugetlbfs.mkdir(exist_ok=True)
            options = f"pagesize=2M,size={2 * self._hugepages}M"
            command = ["mount", "-t", "hugetlbfs", "-o", options, "none", str(self._hugetlbfs)]
            done = self.machine.run(command)
            assert done.returncode == 0, done.stderr

    @property
    def _hugetlbfs(self) -> Path:
        return self.cards.root / "dev/hugepages"

    def hugetlbfs(self, *path: str) -> Path:
        """Return where a file in the machine's hugetlbfs is for the tests."""
        return self.machine.root.joinpath(str(self._hugetlbfs)[1:], *path)

    def free_hugepages(self) -> int:
        """Return how many pages of the hugetlbfs no file has."""
        return os.statvfs(self.hugetlbfs()).f_bfree

    @property
    def daemon(self) -> Daemon:
        assert self._daemon is not None, "no daemon was started"
        return self._daemon

    def start_daemon(
        self,
        *,
        interval: float = 5.0,
        config: str = "",
        expected: Mapping[str, set[str]] | None = None,
    ) -> None:
        """Install the daemon, start it, and wait until the kubelet has all cards.

        expected: IDs by resource, if not those of the default configuration.
        """
        self._daemon = Daemon(self.machine, self.cards, self.program, interval)
        self._daemon.configure(config)
        self._daemon.start()
        self.wait_complete(expected)

    def wait_complete(self, expected: Mapping[str, set[str]] | None = None) -> None:
        """Wait until every card is allocatable, or these IDs are, by resource."""
        by_resource: dict[str, set[str]] = {}
        for chip in self.cards.chips:
            card = chip.telemetry["tt_card_type"]
            board = card if card.startswith("galaxy") else card.rstrip("abc")
            by_resource.setdefault(f"tenstorrent.com/{board}", set()).add(chip.bdf)
        for resource, devices in (by_resource if expected is None else expected).items():
            self.kubelet.wait_allocatable(resource, devices)

    def last_words(self) -> str:
        """Return the end of the daemon's and of the kubelet's log."""
        return f"{tail(self._daemon.log) if self._daemon else ''}\n{tail(self.kubelet.log)}"

    def host_number(self, bdf: str) -> tuple[int, int]:
        """Return the major and minor number of a chip's device file as it is now."""
        status = os.stat(self.cards.chip(bdf).device_node)
        return os.major(status.st_rdev), os.minor(status.st_rdev)

    def clear(self) -> None:
        """Take out the pods, the daemon and the cards; `wait_clear` waits for the pods' end."""
        self.withdraw()
        if self._daemon is not None and self._daemon.process is not None:
            self._daemon.stop()
        self._ticker.close()
        self._daemon = self._cards = None
        self._hugepages = 0  # what is mounted stays until the machine's end

    def withdraw(self, *names: str) -> None:
        """Take out these pods, or all of them."""
        going = names or tuple(self._pods)
        for name in going:
            if self.api:
                self.api.delete_pod(name)
            else:
                self.kubelet.withdraw_pod(name)
        self._going += going
        self._pods = [name for name in self._pods if name not in going]

    def wait_clear(self) -> None:
        """Wait until the pods that were taken out are gone, with their processes."""
        for name in self._going:
            wait_until(partial(self._is_forgotten, name), f"{name} to go", 30)
        wait_until(lambda: not self.machine.pod_processes(), "all pods to end", 30)
        self._going = []
        self.kubelet.assigned("")  # it forgets pods that have ended when it is asked for them
        # No test has to wait for the end of their holds.
        (self.kubelet.device_plugin_dir / CHECKPOINT).unlink(missing_ok=True)
        shutil.rmtree(self.machine.path(STATE_DIRECTORY), ignore_errors=True)

    def _is_forgotten(self, name: str) -> bool:
        return self.kubelet.get_pod(name) is None

    def reboot(
        self, *, daemon_late_by: float | None = None, while_off: Callable[[], object] = lambda: None
    ) -> None:
        """Cut the power and start all again, the daemon before the kubelet or seconds after it."""
        self._dead |= {
            container for name in self._pods for container in self.containers(name).values()
        }
        self.machine.power_off()
        self.daemon.process = None
        self.cards.boot()
        while_off()
        self._power_on()
        if daemon_late_by is None:
            self.daemon.start()
            self.kubelet.start()
        else:
            self.kubelet.start()
            time.sleep(daemon_late_by)  # this is what is tried, nothing is waited for
            self.daemon.start()

    def restart_kubelet(self, **config: Any) -> None:
        """Restart it with these keys of its configuration."""
        self.kubelet.stop()
        self.kubelet.configure(**config)
        self.kubelet.start()

    # Pods

    def run(self, resources: Mapping[str, int], *, user: int | None = None, **others: Any) -> str:
        """Create a pod whose containers ask for these; return its name. others: of pod()."""
        name = f"pod-{next(_names)}"
        manifest = pod(name, resources, **others)
        if user is not None:
            manifest["spec"]["securityContext"] = {"runAsUser": user, "runAsGroup": user}
        self.adopt(manifest)
        return name

    def adopt(self, manifest: JSON) -> None:
        """Create a pod by its manifest."""
        self._pods.append(manifest["metadata"]["name"])
        if self.api:
            self.api.add_pod(manifest, NODE_NAME)
        else:
            self.kubelet.run_pod(manifest)

    def started(self, resources: Mapping[str, int], **others: Any) -> str:
        """Create a pod, and wait until it runs."""
        name = self.run(resources, **others)
        self.kubelet.wait_running(name)
        return name

    def outcome(self, name: str) -> Outcome:
        """Wait until a pod runs or is refused; return which."""

        def probe() -> Outcome | None:
            found = self.find(name)
            # An API server shows the containers of before the reboot until the kubelet reports
            # those of after it.
            if found and all_run(found) and self._dead.isdisjoint(self.containers(name).values()):
                return RUNNING
            return refusal(found["status"]) if found else None

        return wait_until(probe, f"pod {name} to run or be refused", 30)

    def devices(self, resource: str, name: str) -> set[str]:
        """Return the IDs that the pod's container has."""
        return self.kubelet.assigned(resource).get((name, "main"), set())

    def inside(self, name: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's container."""
        return self.kubelet.exec(name, argv)

    def device_files(self, name: str) -> set[str]:
        """Return the cards' device files in a pod's container."""
        found = self.inside(name, "ls", "-A", "/dev/tenstorrent").stdout
        return {f"/dev/tenstorrent/{each}" for each in found.split()}

    def open_inside(self, name: str, path: str) -> str:
        """Open a file in a pod's container to read and write: return "opened", or why not."""
        done = self.inside(name, "sh", "-c", f": <> {path}")
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def make_and_open_inside(self, name: str, number: tuple[int, int]) -> str:
        """Let the container itself create a device file, and open that."""
        path = f"/tmp/{number[0]}-{number[1]}"
        make = f"busybox rm -f {path}; busybox mknod {path} c {number[0]} {number[1]}"
        done = self.inside(name, "sh", "-c", f"{make} && : <> {path}")
        assert "mknod" not in done.stderr, done.stderr
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def number_inside(self, name: str, path: str) -> tuple[int, int]:
        """Return the major and minor number of a device file in a pod's container."""
        done = self.inside(name, "stat", "-c", "%F %t %T", path)
        assert done.stdout.startswith("character special file "), done.stdout + done.stderr
        major, minor = done.stdout.split()[-2:]
        return int(major, 16), int(minor, 16)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of the pod's first process."""
        done = self.inside(name, "cat", "/proc/1/environ")
        return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)

    def find(self, name: str) -> JSON | None:
        """Return the pod, as the API server shows it, or where there is none the kubelet."""
        return self.api.pod(name) if self.api else self.kubelet.get_pod(name)

    def containers(self, name: str) -> dict[str, str]:
        """Return the IDs of the pod's containers, which are others after a restart."""
        found = self.find(name)
        states = found["status"].get("containerStatuses", ()) if found else ()
        return {str(state["name"]): str(state.get("containerID")) for state in states}

    def crash_containers(self, names: Sequence[str]) -> None:
        """Kill these pods' containers, and wait until others run."""
        before = {name: self.containers(name) for name in names}
        for name in names:
            self.kill_container(name)

        def again(name: str) -> bool:
            return self.kubelet.running(name) and self.containers(name) != before[name]

        for name in names:
            wait_until(partial(again, name), f"another container of {name}", 40)

    def kill_container(self, name: str) -> None:
        container = self.kubelet.container_id(name)
        self.containerd.ctr("tasks", "kill", "--signal", "SIGKILL", container)
