"""The container runtime and the kernel of a reference kubelet's node.

Containers' processes, the cgroups that they are in, and a judge of which pods use which chips.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from tests.world.checkpoint import Held
from tests.world.devicemanager import Allocation
from tests.world.eventlog import EventLog
from tests.world.node import SimulatedNode
from tests.world.pods import Container, Pod
from tests.world.tree import put

FIRST_PID = 4_194_305  # a 64-bit kernel gives no process of this machine such a number
CONTROLLERS = ("cpu", "devices", "memory", "pids")
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"

Layout = Literal["cgroupfs", "systemd", "v1"]


class Use(NamedTuple):
    """The use of one resource's devices by a running container."""

    pod: Pod
    resource: str
    ids: set[str]
    chips: frozenset[str]  # PCI addresses, from the plugin's answer

    @classmethod
    def of(cls, pod: Pod, resource: str, held: Held) -> Use:
        """Return the use that an answer to Allocate permits."""
        addresses = held.answer.envs.get(ADDRESSES, "").split(",")
        return cls(pod, resource, held.ids, frozenset(filter(None, addresses)))

    @property
    def shared(self) -> set[str]:
        """The IDs of the devices whose replicas, `<id>::<n>`, are used; none if one is not one."""
        ids = self.ids
        return {ident.partition("::")[0] for ident in ids} if all("::" in i for i in ids) else set()

    def conflicts(self, other: Use) -> frozenset[str]:
        """Return the chips of both, if two pods must not use them at the same time.

        They may as far as both use replicas of the same devices of one resource; each of its
        devices has equally many chips.
        """
        both = self.chips & other.chips
        if self.pod.uid == other.pod.uid or not both:
            return frozenset()
        if self.resource == other.resource and self.shared:
            common = len(self.chips) // len(self.shared) * len(self.shared & other.shared)
            return frozenset() if len(both) <= common else both
        return both


class Judge:
    """Records a violation whenever running containers of two pods hold one chip.

    A container runs as long as its process is in its cgroup, whatever the kubelet knows of its pod.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._uses: dict[int, list[Use]] = {}  # by PID

    def started(self, pod: Pod, pid: int, allocation: Allocation) -> None:
        """Judge a container that has just started."""
        mine = [Use.of(pod, resource, held) for resource, held in allocation.held.items()]
        for use, other in ((use, other) for use in mine for other in self._all()):
            for chip in sorted(use.conflicts(other)):
                who = f"{use.pod.name} ({use.resource}) and {other.pod.name} ({other.resource})"
                self._log.violation(f"{who} run with {chip} at the same time")
        self._uses[pid] = mine

    def _all(self) -> Iterator[Use]:
        for uses in self._uses.values():
            yield from uses

    def ended(self, pid: int) -> None:
        """Forget a container, as its process has ended."""
        del self._uses[pid]


class Runtime:
    """Runs containers and pods' sandboxes, and shows their processes in pods' cgroups.

    `cgroups` is where a simulated node has its cgroup hierarchies, such as `<sysfs_root>/fs/cgroup`
    (None: nowhere); `host` is the node itself, which shows containers' processes. `layout` is
    version 2 with either of the kubelet's cgroup drivers, or version 1, where each controller has
    its own hierarchy. A pod's cgroup has `cgroup.events` with `populated` (version 2, whose root
    has `cgroup.controllers`), or `tasks` (version 1).
    """

    def __init__(
        self, cgroups: Path | None, layout: Layout, host: SimulatedNode | None, judge: Judge
    ) -> None:
        self._layout = layout
        self._host = host
        self._judge = judge
        self._next = FIRST_PID
        self._hierarchies: list[Path] = []
        if cgroups is not None and layout == "v1":
            self._hierarchies = [cgroups / name for name in (*CONTROLLERS, "systemd")]
        elif cgroups is not None:
            self._hierarchies = [cgroups]
            cgroups.mkdir(parents=True, exist_ok=True)
            put(cgroups / "cgroup.controllers", " ".join(CONTROLLERS))

    # Cgroups

    def pod_cgroup(self, pod: Pod) -> str:
        """Return the path of a pod's cgroup below a hierarchy (pod_container_manager_linux.go)."""
        return self._below_kubepods(pod.quality, f"pod{pod.uid}")

    def _below_kubepods(self, quality: str, *pod: str) -> str:
        parts = ["kubepods", *([] if quality == "guaranteed" else [quality]), *pod]
        if self._layout == "systemd":
            parts = [part.replace("-", "_") for part in parts]
            parts = [f"{'-'.join(parts[: n + 1])}.slice" for n in range(len(parts))]
        return "/".join(parts)

    def make_roots(self) -> None:
        """Make the cgroups of the QoS classes, as a kubelet that starts does."""
        for hierarchy in self._hierarchies:
            for quality in ("burstable", "besteffort"):
                (hierarchy / self._below_kubepods(quality)).mkdir(parents=True, exist_ok=True)

    def make_cgroup(self, pod: Pod) -> None:
        """Make a pod's cgroup, as the kubelet does before it mounts volumes and pulls images."""
        for hierarchy in self._hierarchies:
            (hierarchy / self.pod_cgroup(pod)).mkdir(parents=True, exist_ok=True)
        self._show_populated(pod)

    def remove_cgroup(self, pod: Pod) -> None:
        """Remove a pod's cgroup, as the kubelet does after its volumes are unmounted."""
        for hierarchy in self._hierarchies:
            shutil.rmtree(hierarchy / self.pod_cgroup(pod), ignore_errors=True)

    def _show_populated(self, pod: Pod) -> None:
        """Show whether the pod's cgroup has processes, in its own or in containers' cgroups."""
        for hierarchy in self._hierarchies:
            cgroup = hierarchy / self.pod_cgroup(pod)
            if not cgroup.exists():
                continue
            if self._layout == "v1":
                put(cgroup / "tasks", b"")  # all processes are in containers' cgroups
            else:
                put(cgroup / "cgroup.events", f"populated {int(pod.has_processes)}\nfrozen 0")

    # Processes

    def start_sandbox(self, pod: Pod) -> None:
        """Start the pod's sandbox, whose process stays until the pod has ended."""
        pod.sandbox = self._new_process(pod)
        self._show_populated(pod)

    def stop_sandbox(self, pod: Pod) -> None:
        """End the pod's sandbox after its containers; its cgroup is empty then."""
        if pod.sandbox is not None:
            self._end_process(pod, pod.sandbox)
        pod.sandbox = None
        self._show_populated(pod)

    def start(self, pod: Pod, container: Container, allocation: Allocation) -> None:
        """Run a container, which opens its device files. FileNotFoundError: one does not exist."""
        if self._host:
            nodes = [*(spec.host_path for spec in allocation.devices), *allocation.cdi_devices]
            self._host.start_process(self._next, self._proc_cgroup(pod, self._next), nodes)
        container.pid = self._new_process(pod)
        self._judge.started(pod, container.pid, allocation)

    def stop(self, pod: Pod, container: Container) -> None:
        """End a container's process, if it runs: its cgroup goes, the pod's stays."""
        if container.pid is None:
            return
        if self._host:
            self._host.end_process(container.pid)
        self._end_process(pod, container.pid)
        self._judge.ended(container.pid)
        container.pid = None

    def _new_process(self, pod: Pod) -> int:
        pid = self._next
        self._next += 1
        for hierarchy in self._hierarchies:
            cgroup = hierarchy / self._container_cgroup(pod, pid)
            cgroup.mkdir()
            if self._layout == "v1":
                put(cgroup / "tasks", str(pid))
        return pid

    def _end_process(self, pod: Pod, pid: int) -> None:
        for hierarchy in self._hierarchies:
            shutil.rmtree(hierarchy / self._container_cgroup(pod, pid), ignore_errors=True)

    def _container_cgroup(self, pod: Pod, pid: int) -> str:
        name = hashlib.sha256(f"{pod.uid}/{pid}".encode()).hexdigest()
        name = f"cri-containerd-{name}.scope" if self._layout == "systemd" else name
        return f"{self.pod_cgroup(pod)}/{name}"

    def _proc_cgroup(self, pod: Pod, pid: int) -> str:
        """Return the content of /proc/<pid>/cgroup."""
        inside = self._container_cgroup(pod, pid)
        if self._layout != "v1":
            return f"0::/{inside}"
        lines = [f"{number}:{name}:/{inside}" for number, name in enumerate(CONTROLLERS, 2)]
        return "\n".join([*lines, f"1:name=systemd:/{inside}"])

    def lose_power(self) -> None:
        """Remove all cgroups: the kernel has none after a boot."""
        for hierarchy in self._hierarchies:
            for directory in hierarchy.glob("kubepods*"):
                shutil.rmtree(directory)
