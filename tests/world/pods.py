"""The pods of a reference kubelet's node: their objects, processes and cgroups.

These outlive the kubelet; only a `Worker`, which starts a pod's containers, is the kubelet's. A
`Judge` watches which pods run with which chips.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.world.checkpoint import Held
from tests.world.devicemanager import Allocation
from tests.world.eventlog import EventLog
from tests.world.node import SimulatedNode
from tests.world.plugins import Failure
from tests.world.tree import put

FIRST_PID = 4_194_305  # a 64-bit kernel gives no process of this machine such a number
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"


@dataclass(eq=False, slots=True)
class Container:
    """A container of a pod: its request, and its state."""

    name: str
    request: dict[str, int] = field(default_factory=dict)
    pid: int | None = None  # while it runs


@dataclass(eq=False, slots=True)
class Pod:
    """A pod, from its creation until its containers have ended and its object is deleted."""

    name: str
    uid: str
    containers: dict[str, Container] = field(default_factory=dict)
    sandbox: int | None = None  # PID of its process, while it exists
    wanted: bool = True  # its object is in the API server
    known: bool = False  # this kubelet, in this life, has learned of it
    over: bool = False  # rejected, completed, or terminated

    @property
    def full_name(self) -> tuple[str, str]:
        """Its namespace and name; tests can name a pod `namespace/name`."""
        *namespace, name = self.name.split("/")
        return (namespace[0] if namespace else "default"), name

    @property
    def has_containers(self) -> bool:
        return any(container.pid for container in self.containers.values())

    @property
    def has_processes(self) -> bool:
        """Whether its cgroup has processes, the sandbox's or a container's."""
        return bool(self.sandbox) or self.has_containers

    @property
    def request(self) -> Counter[str]:
        """The devices that it requests, by resource."""
        requests = (Counter(container.request) for container in self.containers.values())
        return sum(requests, Counter[str]())


class Pods:
    """All pods of a node, and which of them the kubelet knows.

    It learns of them when the API server answers. Until then sources are not ready, and no pod is
    forgotten.
    """

    def __init__(self) -> None:
        self.all: list[Pod] = []
        self.sources_ready = False

    def __iter__(self) -> Iterator[Pod]:
        return iter(self.all)

    def get(self, name: str) -> Pod:
        """Return the latest pod of this name, or the one that has this UID."""
        for pod in reversed(self.all):
            if name in (pod.name, pod.uid):
                return pod
        raise LookupError(f"there was never a pod {name}")

    def get_running(self, name: str) -> Pod:
        """Return the first pod of this name, or UID, that still has a container running."""
        found = (pod for pod in self.all if name in (pod.name, pod.uid) and pod.has_containers)
        return next(found, None) or self.get(name)

    def get_or_add(self, name: str) -> Pod:
        """Return the existing pod of this name, or a new one; UIDs are the same in each run."""
        same = [pod for pod in self.all if pod.name == name]
        if same and same[-1].wanted and not same[-1].over:
            return same[-1]

        uid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}#{len(same)}"))
        self.all.append(Pod(name, uid))
        return self.all[-1]

    def forget(self) -> None:
        """Let the kubelet know no pod, as after its start."""
        self.sources_ready = False
        for pod in self.all:
            pod.known = False

    def active(self) -> set[str]:
        """Return the UIDs of the pods that the kubelet knows and that have not ended."""
        return {pod.uid for pod in self.all if pod.known and not pod.over}

    def used_beside(self, pod: Pod) -> Counter[str]:
        """Return the devices that other active pods request, by resource."""
        others = [p for p in self.all if p.known and not p.over and p.uid != pod.uid]
        return sum((other.request for other in others), Counter[str]())


class Use(NamedTuple):
    """The use of one resource's devices by a running container."""

    pod: Pod
    resource: str
    held: Held

    @property
    def chips(self) -> frozenset[str]:
        """The PCI addresses in the plugin's answer."""
        return frozenset(filter(None, self.held.answer.envs.get(ADDRESSES, "").split(",")))

    @property
    def shared(self) -> set[str]:
        """The IDs of the devices whose replicas, `<id>::<n>`, are used; none if one is not one."""
        ids = self.held.ids
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
        mine = [Use(pod, resource, held) for resource, held in allocation.held.items()]
        others = [use for uses in self._uses.values() for use in uses]

        for use, other in itertools.product(mine, others):
            for chip in sorted(use.conflicts(other)):
                who = f"{use.pod.name} ({use.resource}) and {other.pod.name} ({other.resource})"
                self._log.violation(f"{who} run with {chip} at the same time")

        self._uses[pid] = mine

    def ended(self, pid: int) -> None:
        """Forget a container, as its process has ended."""
        del self._uses[pid]


SANDBOX_SECONDS = 0.11  # at least, from a pod's admission to its first PreStartContainer (measured)
BACK_OFF = 0.2  # seconds until a container is tried again (the original: 0.2 to 15 s)


class Runtime:
    """Runs containers and pods' sandboxes, and shows their processes in pods' cgroups.

    `host` is the node that has their processes and cgroups, of version 2; without one, nothing
    shows them. A sandbox has a process, as containerd's.
    """

    def __init__(self, host: SimulatedNode | None, judge: Judge) -> None:
        self._host = host
        self._judge = judge
        self._next = FIRST_PID
        if host:
            self._cgroups = host.root / "sys/fs/cgroup"
            self._cgroups.mkdir(parents=True, exist_ok=True)
            (self._cgroups / "cgroup.controllers").touch()

    # Cgroups

    def make_roots(self) -> None:
        """Make the cgroups of the QoS classes, as a kubelet that starts does."""
        if self._host:
            for quality in ("burstable", "besteffort"):
                (self._cgroups / "kubepods" / quality).mkdir(parents=True, exist_ok=True)

    def _cgroup(self, pod: Pod) -> Path:
        return self._cgroups / f"kubepods/besteffort/pod{pod.uid}"

    def _log_directory(self, host: SimulatedNode, pod: Pod) -> Path:
        return host.root / "var/log/pods" / "_".join([*pod.full_name, pod.uid])

    def make_cgroup(self, pod: Pod) -> None:
        """Make a pod's cgroup, as the kubelet does before it mounts volumes and pulls images."""
        if self._host:
            self._log_directory(self._host, pod).mkdir(parents=True, exist_ok=True)
            self._cgroup(pod).mkdir(parents=True, exist_ok=True)
            self._show_populated(pod)

    def remove_cgroup(self, pod: Pod) -> None:
        """Remove a pod's cgroup, as the kubelet does after its volumes are unmounted."""
        if self._host:
            shutil.rmtree(self._log_directory(self._host, pod), ignore_errors=True)
            shutil.rmtree(self._cgroup(pod), ignore_errors=True)

    def _show_populated(self, pod: Pod) -> None:
        """Show whether the pod's cgroup has processes, in its own or in containers' cgroups."""
        if self._host and self._cgroup(pod).exists():
            events = f"populated {int(pod.has_processes)}\nfrozen 0"
            put(self._cgroup(pod) / "cgroup.events", events)

    # Processes

    def start_sandbox(self, pod: Pod) -> None:
        """Start the pod's sandbox, whose process stays until the pod has ended."""
        pod.sandbox = self._new_pid()
        self._show_populated(pod)

    def stop_sandbox(self, pod: Pod) -> None:
        """End the pod's sandbox after its containers; its cgroup is empty then."""
        pod.sandbox = None
        self._show_populated(pod)

    def start(self, pod: Pod, container: Container, allocation: Allocation) -> None:
        """Run a container, which opens its device files. FileNotFoundError: one does not exist."""
        pid = self._new_pid()
        if self._host:
            nodes = [*(spec.host_path for spec in allocation.devices), *allocation.cdi_devices]
            inside = self._cgroup(pod).relative_to(self._cgroups)
            self._host.start_process(pid, f"0::/{inside}/{pid}", nodes)

        container.pid = pid
        self._show_populated(pod)
        self._judge.started(pod, pid, allocation)

    def stop(self, pod: Pod, container: Container) -> None:
        """End a container's process, if it runs: the pod's cgroup stays."""
        if container.pid is None:
            return
        if self._host:
            self._host.end_process(container.pid)

        self._judge.ended(container.pid)
        container.pid = None
        self._show_populated(pod)

    def _new_pid(self) -> int:
        self._next += 1
        return self._next

    def lose_power(self) -> None:
        """Remove all cgroups, as the kernel has none after a boot, which has an ID of its own."""
        if self._host:
            self._host.boot()
            shutil.rmtree(self._cgroups / "kubepods", ignore_errors=True)


class Worker:
    """Starts the containers of one pod, in the order of their admission, one at a time.

    First come the pod's cgroup and its sandbox. A container that cannot be started is tried again
    after BACK_OFF seconds, and others go on.
    """

    def __init__(
        self,
        pod: Pod,
        runtime: Runtime,
        log: EventLog,
        prepare: Callable[[Pod, Container], Awaitable[Allocation]],
    ) -> None:
        """Args: prepare: calls PreStartContainer."""
        self._pod = pod
        self._runtime = runtime
        self._log = log
        self._prepare = prepare

        self._awake = asyncio.Event()
        self._starting = False
        self._then: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look again for containers to start."""
        self._awake.set()

    def cancel(self) -> asyncio.Task[None]:
        """Start nothing more, as the kubelet is gone; returns the task that ends with that."""
        self._then = lambda: None  # a call that fails at the same moment swallows the cancellation
        self._task.cancel()
        return self._task

    def leave(self, then: Callable[[], None]) -> None:
        """Start nothing more, and call `then` after that.

        A pod's worker does one thing after the other, and the deletion of its pod does not cancel
        PreStartContainer (measured with 1.33 and 1.37): the pod stays until that has returned.
        """
        if self._starting:
            self._then = then
        else:
            self._task.cancel()
            then()

    async def _run(self) -> None:
        self._runtime.make_cgroup(self._pod)

        while True:
            self._awake.clear()
            if self._pod.sandbox is None:
                self._runtime.start_sandbox(self._pod)
                await asyncio.sleep(SANDBOX_SECONDS)

            self._starting = True
            complete = await self._start_all()
            self._starting = False
            if self._then:
                self._then()
                return

            if complete:
                await self._awake.wait()
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._awake.wait(), BACK_OFF)

    async def _start_all(self) -> bool:
        """Start all containers that do not run; returns whether nothing must be tried again."""
        complete = True
        for container in list(self._pod.containers.values()):
            if container.pid is None and not self._then:
                complete &= await self._start(container)
        return complete

    async def _start(self, container: Container) -> bool:
        where: Mapping[str, Any] = {"pod": self._pod.name, "container": container.name}

        try:
            allocation = await self._prepare(self._pod, container)
            if self._then:
                return True

            self._runtime.start(self._pod, container, allocation)
        except (Failure, FileNotFoundError) as error:
            kind = "Config" if isinstance(error, Failure) else ""
            reason = f"CreateContainer{kind}Error"
            self._log.record("not-started", **where, reason=reason, message=str(error))
            return False

        self._log.record("running", **where, pid=container.pid)
        return True
