"""A node: a machine with a real kubelet, simulated cards, and tt-device-plugin as it is shipped.

The daemon runs inside the machine, with what its systemd unit gives it: a directory for what it has
to remember, and a socket to say READY=1 on. There is no udev: the simulated node makes its links by
PCI address. The cards' device nodes are real character devices, of drivers that every kernel has
and that containers may not open by default: a container can really open what it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
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
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, NotifySocket, wait_until

ZIPAPP = ROOT / "dist/tt-device-plugin.pyz"
STATE_DIRECTORY = "/var/lib/tt-device-plugin"
CDI_DIRECTORY = "/run/cdi"

# fuse, loop-control, cpuid of CPU 0, autofs, btrfs-control, cpuid of CPU 1: opening these takes no
# capability, as with a Tenstorrent card. tun (10:200) would not do: runc lets every container open
# it.
OPENABLE = ((10, 229), (10, 237), (203, 0), (10, 235), (10, 234), (203, 1))
"""Numbers of the first cards' nodes; the rest get tests.world.node's, which nobody opens."""


# --- What is tested -------------------------------------------------------------------------------


def without_version(text: str) -> str:
    """The program's text without the one line that a build replaces."""
    return re.sub(r'(?m)^__version__ = ".*"$', "", text)


def stale_zipapp() -> str | None:
    """Why dist/ has no zipapp of this very program, in one line, or None if it has."""
    if not ZIPAPP.exists():
        return f"there is no {ZIPAPP.relative_to(ROOT)}; run: make pyz"
    with zipfile.ZipFile(ZIPAPP) as packed:
        program = packed.read("site-packages/ttdp.py").decode()
        if without_version(program) != without_version((ROOT / "ttdp.py").read_text()):
            return (
                f"{ZIPAPP.relative_to(ROOT)} is of another ttdp.py than the one here; run: make pyz"
            )
    return None


@dataclass(frozen=True, slots=True)
class Program:
    """The zipapp, or where there is none the sources, of which copies are installed on machines."""

    zipapp: bool

    @property
    def name(self) -> str:
        file = ZIPAPP if self.zipapp else ROOT / "ttdp.py"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        return f"{file.relative_to(ROOT)} (sha256 {digest[:12]})"

    def install(self, directory: Path) -> list[str]:
        """Put it there, as dpkg does: over the old one, in one step; returns the command."""
        directory.mkdir(parents=True, exist_ok=True)
        file = ZIPAPP if self.zipapp else ROOT / "ttdp.py"
        shutil.copy2(file, directory / ".new")
        (directory / ".new").rename(directory / file.name)
        if self.zipapp:
            return [str(directory / file.name)]
        shutil.copytree(
            ROOT / "generated",
            directory / "generated",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
        return [sys.executable, str(directory / file.name)]


class Daemon:
    """The daemon on a machine, under the hand of a service manager that is this class."""

    def __init__(
        self,
        machine: Machine,
        cards: SimulatedNode,
        program: Program,
        *,
        interval: float = 5.0,
        config: str = "",
    ) -> None:
        """`interval`: seconds between two polls; the default is the daemon's own.

        `config`: keys and tables for the configuration file.
        """
        self.machine = machine
        self.process: Process | None = None
        self.starting: Callable[[], object] = lambda: (
            None
        )  # called when it was started, before it is ready
        self._program = program
        self._flags = cards.flags
        self._config = machine.scratch / "daemon.toml"
        self._interval = interval
        self.configure(config)
        self._installed = 0
        self.install()

    @property
    def log(self) -> Path:
        return self.machine.logs / "tt-device-plugin.log"

    def configure(self, config: str) -> None:
        """Write its configuration file, which counts from the next start or SIGHUP on."""
        # A poll that comes before the ticker's next beat is no fault of the chip, so there are many
        # to wait.
        misses = max(2, round(5 / self._interval))
        health = f"[health]\ninterval = {self._interval}\nheartbeat_misses = {misses}\n"
        self._config.write_text(f"{config}\n{health}")

    def install(self) -> None:
        """Install the program, or over the installed one; the next start runs it."""
        self._installed += 1
        self._command = self._program.install(self.machine.scratch / "usr")
        # Another release unpacks itself into another directory; in here they are all the same
        # release.
        self._cache = self.machine.scratch / f"cache-{self._installed}"

    def start(self, timeout: float = 30) -> None:
        """Do what systemctl start does: return when it has said READY=1."""
        assert self.process is None, "it runs already"
        for directory in (STATE_DIRECTORY, CDI_DIRECTORY):  # the unit makes them
            self.machine.path(directory).mkdir(exist_ok=True)
        manager = NotifySocket(self.machine.scratch / "notify")
        with contextlib.closing(manager):
            self.process = self.machine.spawn(
                # Nice as in the unit: while a kubelet starts it takes all the processors that it
                # can get.
                [
                    "nice",
                    "-n-10",
                    *self._command,
                    "run",
                    f"--config-file={self._config}",
                    *self._flags,
                ],
                self.log,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "LANG": "C.UTF-8",
                    "STATE_DIRECTORY": STATE_DIRECTORY,
                    "NOTIFY_SOCKET": manager.address,
                    "SHIV_ROOT": str(self._cache),
                    "PYTHONPYCACHEPREFIX": str(self._cache),
                },
            )
            self.starting()
            wait_until(
                lambda: any("READY=1" in note.text.splitlines() for note in manager.receive()),
                lambda: f"READY=1 of the daemon, whose log ends\n{tail(self.log)}\n",
                timeout,
            )

    def stop(self) -> None:
        """systemctl stop; its exit status has to be 0."""
        assert self.end(signal.SIGTERM) == 0, tail(self.log)

    def reload(self) -> None:
        """systemctl reload: it reads its configuration again, soon."""
        assert self.process is not None, "it does not run"
        os.kill(self.process.pid, signal.SIGHUP)

    def kill(self) -> None:
        """As the kernel's OOM killer does."""
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None, "it does not run"
        self.process.signal(number)
        status = self.process.status
        self.process = None
        return status


# --- The node -------------------------------------------------------------------------------------

_names = itertools.count(1)

Outcome = str
"""What became of a pod: RUNNING, or the kubelet's words for why it was refused."""
RUNNING: Outcome = "running"


N = TypeVar("N", bound="Site")


class Site:
    """A running kubelet with its machine; cards and daemon are made anew for each test."""

    def __init__(
        self,
        version: str,
        program: Program,
        *,
        static_pods: bool = True,
        config: JSON | None = None,
        containerd: Path | None = None,
        images: Sequence[Path] = (),
        machine: Machine | None = None,
        kubelet: type[Kubelet] = Kubelet,
    ) -> None:
        """`static_pods=False`: an API server has the pods. `config`: the kubelet's.

        `containerd`: a directory with another one than the host's. `images`: archives of further
        ones than busybox. `machine`, `kubelet`: of another kind than usual.
        """
        self.version = version
        self.program = program
        self.machine = machine or Machine(numa_nodes=2)
        self.containerd = Containerd(self.machine, containerd)
        self.containerd.images += images
        self.api = None if static_pods else ApiServer()
        api_server = None if static_pods else f"http://127.0.0.1:{PORT}"
        self.kubelet = kubelet(
            version, self.machine, self.containerd, config=config, api_server=api_server
        )
        self._boot = ""
        self._daemon: Daemon | None = None
        self._cards: SimulatedNode | None = None
        self._ticker = contextlib.ExitStack()

    def __enter__(self: N) -> N:
        try:
            self._power_on()
            self.kubelet.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ticker.close()
        if self.api:
            self.api.close()
        self.machine.destroy()

    def _power_on(self) -> None:
        self.machine.power_on()
        self._begin_boot()
        self.containerd.start()
        if self.api:
            self.api.serve(self.machine)

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

        `config`: for its configuration file. `expected`: IDs by resource, where they are not what
        they are by default.
        """
        self._daemon = Daemon(
            self.machine, self.cards, self.program, interval=interval, config=config
        )
        self._daemon.start()
        self.wait_complete(expected)

    def wait_complete(self, expected: Mapping[str, set[str]] | None = None) -> None:
        """Until every card that is there is allocatable, or these IDs are, by resource."""
        if expected is None:
            by_resource: dict[str, set[str]] = {}
            for chip in self.cards.chips:
                by_resource.setdefault(
                    resource_of(chip.facts.telemetry["tt_card_type"]), set()
                ).add(chip.bdf)
            expected = by_resource
        for resource, devices in expected.items():
            self.kubelet.wait_allocatable(resource, devices)

    def wait_status(self, expected: Mapping[str, tuple[int, int]]) -> None:
        """Until the node's status in the API server has these capacities and allocatable counts."""
        assert self.api is not None
        api = self.api

        def probe() -> bool:
            status = api.node(NODE_NAME).get("status", {})
            return all(
                (
                    status.get("capacity", {}).get(resource),
                    status.get("allocatable", {}).get(resource),
                )
                == (str(capacity), str(allocatable))
                for resource, (capacity, allocatable) in expected.items()
            )

        wait_until(probe, f"the node's status to be {expected}", 30)

    def label(self, labels: Mapping[str, str]) -> None:
        """Give the node these labels, as nfd-master does."""
        assert self.api is not None
        self.api.patch(f"/api/v1/nodes/{NODE_NAME}", {"metadata": {"labels": dict(labels)}})

    def last_words(self) -> str:
        """What daemon and kubelet say at the end."""
        return f"{tail(self._daemon.log) if self._daemon else ''}\n{tail(self.kubelet.log)}"

    def host_number(self, bdf: str) -> tuple[int, int]:
        """Major and minor number of a chip's device node as it is now."""
        status = os.stat(self.cards.chip(bdf).device_node)
        return os.major(status.st_rdev), os.minor(status.st_rdev)


class Node(Site):
    """Such a site, with pods."""

    def __init__(self, version: str, program: Program, **others: Any) -> None:
        """`others`: of Site."""
        super().__init__(version, program, **others)
        self._dead: set[str] = set()  # containers of former boots
        self._pods: list[str] = []
        self._going: list[str] = []

    def clear(self) -> None:
        """Take out the pods, the daemon and the cards; `wait_clear` waits for the pods' end."""
        self.withdraw()
        if self._daemon is not None and self._daemon.process is not None:
            self._daemon.stop()
        self._ticker.close()
        self._daemon = self._cards = None

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
        """Until the pods are gone that were taken out, with their containers."""
        for name in self._going:
            self.kubelet.wait_gone(name)
        self._going = []
        self.kubelet.assigned("")  # it forgets pods that have ended when it is asked for them

    def reboot(
        self, *, daemon_late_by: float | None = None, while_off: Callable[[], object] = lambda: None
    ) -> None:
        """Cut the power and start all again, the daemon before the kubelet or seconds after it."""
        self._dead |= {
            container for name in self._pods for container in self.containers(name).values()
        }
        self.machine.power_off()
        self.daemon.process = None
        while_off()
        self._power_on()
        if daemon_late_by is None:
            self.daemon.start()
            self.kubelet.start()
        else:
            self.kubelet.start()
            time.sleep(daemon_late_by)  # this is what is tried, nothing is waited for
            self.daemon.start()

    # Pods

    def run(self, resources: Mapping[str, int], *, user: int | None = None, **others: Any) -> str:
        """Create a pod whose containers ask for these; its name. `others`: of `machine.pod`."""
        name = f"pod-{next(_names)}"
        manifest = pod(name, resources, **others)
        if user is not None:
            manifest["spec"]["securityContext"] = {"runAsUser": user, "runAsGroup": user}
        self._pods.append(name)
        if self.api:
            self.api.add_pod(manifest, NODE_NAME)
        else:
            self.kubelet.run_pod(manifest)
        return name

    def started(self, resources: Mapping[str, int], **others: Any) -> str:
        """A pod that runs."""
        name = self.run(resources, **others)
        self.kubelet.wait_running(name)
        return name

    def outcome(self, name: str, timeout: float = 30) -> Outcome:
        def probe() -> Outcome | None:
            found = self.find(name)
            # An API server shows the containers of before the reboot until the kubelet reports
            # those of after it.
            if found and all_run(found) and self._dead.isdisjoint(self.containers(name).values()):
                return RUNNING
            return refusal(found["status"]) if found else None

        return wait_until(probe, f"pod {name} to run or be refused", timeout)

    def assert_admitted(self, names: Sequence[str]) -> None:
        """Assert that these pods run, after a reboot and up to ten restarts for static ones.

        A kubelet takes static pods up milliseconds after its socket is there, and no plugin is
        quicker than that each time. Its next start takes them up again, with the devices that they
        had. An API server's have the one chance.
        """
        outcomes = [self.outcome(name) for name in names]
        for _ in range(0 if self.api else 10):
            if set(outcomes) == {RUNNING}:
                break
            assert all(
                outcome == RUNNING or "no healthy devices present" in outcome
                for outcome in outcomes
            ), outcomes
            self.kubelet.stop()
            self.kubelet.start()
            outcomes = [self.outcome(name) for name in names]
        assert outcomes == [RUNNING] * len(names)

    def devices(self, resource: str, name: str, container: str = "main") -> set[str]:
        """The IDs that a container of the pod has."""
        return self.kubelet.assigned(resource).get((name, container), set())

    def inside(
        self, name: str, *argv: str, container: str = "main"
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's container."""
        return self.kubelet.exec(name, argv, container)

    def open_inside(self, name: str, path: str) -> str:
        """Open a file in a pod's container for reading and writing: "opened", or why not."""
        done = self.inside(name, "sh", "-c", f": <> {path}")
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def make_and_open_inside(self, name: str, number: tuple[int, int]) -> str:
        """Let the container itself make a device node, and open that."""
        path = f"/tmp/{number[0]}-{number[1]}"
        make = f"busybox rm -f {path}; busybox mknod {path} c {number[0]} {number[1]}"
        done = self.inside(name, "sh", "-c", f"{make} && : <> {path}")
        assert "mknod" not in done.stderr, done.stderr
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def number_inside(self, name: str, path: str, container: str = "main") -> tuple[int, int]:
        """Major and minor number of a device node in a pod's container."""
        done = self.inside(name, "stat", "-c", "%F %t %T", path, container=container)
        assert done.stdout.startswith("character special file "), done.stdout + done.stderr
        major, minor = done.stdout.split()[-2:]
        return int(major, 16), int(minor, 16)

    def access(self, name: str, number: tuple[int, int], container: str = "main") -> str:
        """What the runtime was told that a container may do with a device: of r, w, m.

        In the container this cannot be seen: runc lets everyone make any device node, and forbids
        to open it.
        """
        told = self.containerd.ctr("containers", "info", self.kubelet.container_id(name, container))
        devices = json.loads(told.stdout)["Spec"]["linux"]["resources"]["devices"]
        return "".join(
            rule["access"] for rule in devices if (rule.get("major"), rule.get("minor")) == number
        )

    def environment(self, name: str) -> dict[str, str]:
        """The environment of the pod's first process."""
        done = self.inside(name, "cat", "/proc/1/environ")
        return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)

    def find(self, name: str) -> JSON | None:
        """The pod, as the API server shows it, or where there is none the kubelet."""
        return self.api.pod(name) if self.api else self.kubelet.get_pod(name)

    def containers(self, name: str) -> dict[str, str]:
        """The IDs of the pod's containers, which are others after a restart."""
        found = self.find(name)
        states = found["status"].get("containerStatuses", ()) if found else ()
        return {str(state["name"]): str(state.get("containerID")) for state in states}


def resource_of(card: str) -> str:
    """The resource that a card type belongs to: `p300c` is a p300, a Galaxy is called as it is."""
    return f"tenstorrent.com/{card if card.startswith('galaxy') else card.rstrip('abc')}"


# --- How fast -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Race:
    """A starting kubelet's race between plugin and pods: seconds from kubelet.sock on."""

    allocatable: float  # the devices count
    admission: float  # the first pod is up for admission

    @property
    def won(self) -> bool:
        return self.allocatable < self.admission


def race(kubelet: Kubelet, resource: str, devices: int) -> Race:
    """How the last start went, with at least one pod; waits for its end."""
    counted = (
        rf'"Processed device updates for resource" resourceName="{resource}"'
        rf" totalCount=\d+ healthyCount={devices}"
    )
    allocatable, _ = kubelet.wait_logged(counted)
    admission, _ = kubelet.wait_logged(r'"SyncLoop ADD" source="\w+" pods=\["')
    appeared = kubelet.socket_appeared()
    return Race(allocatable - appeared, admission - appeared)
