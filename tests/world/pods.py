"""The pods of a reference kubelet's node: their objects, processes and cgroups.

These outlive the kubelet. A pod has one container.
"""

from __future__ import annotations

import itertools
import os
import shutil
import uuid
from dataclasses import dataclass, field

from tests.world.checkpoint import Entry
from tests.world.devicemanager import Allocation
from tests.world.eventlog import EventLog
from tests.world.node import SimulatedNode
from tests.world.tree import put

ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"


@dataclass(eq=False, slots=True)
class Pod:
    """A pod, from its creation until its container has ended and its object is deleted."""

    name: str
    uid: str
    container: str = "main"  # its name
    request: dict[str, int] = field(default_factory=dict)

    # What of it exists.
    wanted: bool = True  # its object in the API server
    has_cgroup: bool = False  # and in it, until the pod is over, the sandbox's process
    allocation: Allocation | None = None  # with which its container runs, if it does

    # What the kubelet does with it.
    known: bool = False  # in this life, it has learned of it
    calling: bool = False  # it waits for PreStartContainer
    ending: bool = False  # it starts no container any more
    over: bool = False  # rejected, completed, or terminated

    @property
    def has_containers(self) -> bool:
        return self.allocation is not None


def chips_in_conflict(one: Entry, other: Entry) -> set[str]:
    """Return the chips of both, if two pods must not use them together.

    They may as far as both use replicas, `<id>::<n>`, of the same devices of one resource; each of
    its devices has equally many chips.
    """
    chips, others = ({*each.answer.envs[ADDRESSES].split(",")} for each in (one, other))
    devices, theirs = ({i.partition("::")[0] for i in each.ids} for each in (one, other))

    are_replicas = all("::" in ident for ident in one.ids | other.ids)
    shared = devices & theirs if are_replicas and one.resource == other.resource else set()
    allowed = len(chips) // len(devices) * len(shared)
    return chips & others if len(chips & others) > allowed else set()


class Pods(list[Pod]):
    """All pods of a node, with their containers.

    A host shows their cgroups, of version 2. It is a violation if two run with one chip together.
    """

    def __init__(self, host: SimulatedNode | None, log: EventLog) -> None:
        super().__init__()
        self.sources_ready = False  # has the API server answered? Until then none is forgotten
        self._host = host
        self._log = log
        if host:
            self._root = host.root / "sys/fs/cgroup/kubepods"
            self._root.parent.mkdir(parents=True, exist_ok=True)
            self._root.with_name("cgroup.controllers").touch()

    def get(self, name: str) -> Pod:
        """Return the latest pod of this name, or the one that has this UID."""
        for pod in reversed(self):
            if name in (pod.name, pod.uid):
                return pod
        raise LookupError(f"there was never a pod {name}")

    def get_or_add(self, name: str) -> Pod:
        """Return the existing pod of this name, or a new one; UIDs are the same in each run."""
        same = [pod for pod in self if pod.name == name]
        if not same or same[-1].over or not same[-1].wanted:
            same.append(Pod(name, str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}#{len(same)}"))))
            self.append(same[-1])
        return same[-1]

    def active(self) -> dict[str, Pod]:
        """Return the pods that the kubelet knows and that have not ended, by UID."""
        return {pod.uid: pod for pod in self if pod.known and not pod.over}

    def make_roots(self) -> None:
        """Make the cgroups of the QoS classes, as a kubelet that starts does."""
        if self._host:
            for quality in ("burstable", "besteffort"):
                (self._root / quality).mkdir(parents=True, exist_ok=True)

    def show(self, pod: Pod) -> None:
        """Show the pod's cgroup, and the directory of its logs, as they are now."""
        if not self._host:
            return
        namespace, _, name = pod.name.rpartition("/")
        logs = self._host.root / f"var/log/pods/{namespace or 'default'}_{name}_{pod.uid}"
        cgroup = self._root / f"besteffort/pod{pod.uid}"

        if pod.has_cgroup:
            logs.mkdir(parents=True, exist_ok=True)
            cgroup.mkdir(parents=True, exist_ok=True)
            put(cgroup / "cgroup.events", f"populated {int(not pod.over)}\nfrozen 0")
        else:
            shutil.rmtree(logs, ignore_errors=True)
            shutil.rmtree(cgroup, ignore_errors=True)

    def start(self, pod: Pod, allocation: Allocation) -> None:
        """Run a container, which opens its device files. FileNotFoundError: one does not exist."""
        if self._host:
            for spec in allocation.devices:
                os.stat(spec.host_path)

        for other in self:
            others = other.allocation.entries.values() if other.allocation else ()
            for mine, theirs in itertools.product(allocation.entries.values(), others):
                if chips := chips_in_conflict(mine, theirs):
                    who = f"{pod.name} ({mine.resource}) and {other.name} ({theirs.resource})"
                    self._log.violation(f"{who} run with {chips} at the same time")
        pod.allocation = allocation

    def lose_power(self) -> None:
        """End all processes, and remove the cgroups; a boot has an ID of its own."""
        for pod in self:
            pod.allocation, pod.has_cgroup = None, False
        if self._host:
            self._host.boot()
            shutil.rmtree(self._root, ignore_errors=True)
