"""The pods of a reference kubelet's node: what is wanted of them, what runs, and what starts it.

What the API server and the directory of manifests have, and what the container runtime keeps
running, outlives the kubelet: `Pods` and `Runtime` are the node's, a `Worker` is the kubelet's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tests.world.devicemanager import Allocation, Claim
from tests.world.eventlog import EventLog
from tests.world.plugins import Failure

FIRST_PID = 4_194_305  # beyond what a 64-bit kernel gives to a process of this machine
CONTROLLERS = ("blkio", "cpu", "cpuacct", "cpuset", "devices", "freezer", "memory", "pids")

Kind = Literal["main", "init", "restartable"]
Quality = Literal["guaranteed", "burstable", "besteffort"]
Layout = Literal["cgroupfs", "systemd", "v1"]


@dataclass(eq=False, slots=True)
class Container:
    """A container of a pod: what it asks for, and how far it is."""

    name: str
    request: dict[str, int]
    kind: Kind = "main"
    pid: int | None = None  # while it runs
    over: bool = False  # an init container that has done its work


@dataclass(eq=False, slots=True)
class Pod:
    """A pod, from its creation until its containers have ended and nobody asks for it."""

    name: str
    uid: str
    static: bool
    quality: Quality
    containers: dict[str, Container] = field(default_factory=dict)
    wanted: bool = True  # the API server has it, or its manifest is there
    known: bool = False  # this kubelet, in this life, has learned of it
    over: bool = False  # rejected, completed, or terminated
    rejected: bool = False

    @property
    def full_name(self) -> tuple[str, str]:
        """Its namespace and name; the name that tests give it can be `namespace/name`."""
        *namespace, name = self.name.split("/")
        return (namespace[0] if namespace else "default"), name

    def claim(self, container: str, *, running: bool) -> Claim:
        """Return what the device manager has to know of a container."""
        wish = self.containers[container]
        return Claim(self.uid, self.name, container, wish.request, wish.kind == "init", running)


class Pods:
    """All pods of a node, its API server's and static ones; and what the kubelet knows of them.

    It learns of static pods as soon as it starts, and of the API server's when that answers. Until
    both have been seen once in its life, sources are not ready, and nobody is forgotten.
    """

    def __init__(self) -> None:
        self.all: list[Pod] = []
        self.api_away = False
        self._ready = False

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
        for pod in self.all:
            if name in (pod.name, pod.uid) and any(c.pid for c in pod.containers.values()):
                return pod
        return self.get(name)

    def get_or_add(self, name: str, static: bool, quality: Quality) -> Pod:
        """Return the pod of this name that there is, or a new one, with a UID of its own.

        A UID is the same in each run of a test. A static pod's is 32 hex digits, a hash of its
        manifest; one of an API server is a UUID.
        """
        same = [pod for pod in self.all if pod.name == name]
        if same and same[-1].wanted and not same[-1].over:
            return same[-1]
        seed = f"{name}#{len(same)}"
        if static:
            uid = hashlib.md5(seed.encode(), usedforsecurity=False).hexdigest()
        else:
            uid = str(uuid.uuid5(uuid.NAMESPACE_OID, seed))
        self.all.append(Pod(name, uid, static, quality))
        return self.all[-1]

    def forget(self) -> None:
        """Let the kubelet know of no pod, as after its start."""
        self._ready = False
        for pod in self.all:
            pod.known = False

    def is_heard_of(self, pod: Pod) -> bool:
        """Tell whether news of the pod reach the kubelet now."""
        return pod.static or not self.api_away

    def sources_are_ready(self) -> None:
        """Remember that the kubelet has heard of all pods that there are."""
        self._ready = True

    # What the device manager asks

    def active(self) -> set[str]:
        """Return the UIDs of the pods that the kubelet knows and that have not ended."""
        return {pod.uid for pod in self.all if pod.known and not pod.over}

    def all_sources_ready(self) -> bool:
        """Tell whether the kubelet has heard of all pods once in its life."""
        return self._ready


# ------------------------------------------------------------------------------ what runs


class Host(Protocol):
    """Where a container's process shows: a simulated node (tests.world.node)."""

    def start_process(self, pid: int, cgroup: str, nodes: Sequence[str]) -> None:
        """Show a process of this /proc/<pid>/cgroup that has opened these device nodes.

        A node is named by its host path, or by its CDI name. FileNotFoundError if there is none.
        """

    def end_process(self, pid: int) -> None:
        """Show it no longer."""


class Runtime:
    """The container runtime and the kernel: containers' processes, their cgroups, what they open.

    `cgroups` is where a simulated node's cgroup hierarchies are, such as `<sysfs_root>/fs/cgroup`,
    None for nowhere; they have directories only. `layout` is of version 2 with either of the
    kubelet's cgroup drivers, or of version 1, where each controller has its own.
    """

    def __init__(self, cgroups: Path | None, layout: Layout, host: Host | None) -> None:
        self._cgroups = cgroups
        self._layout = layout
        self._host = host
        self._next = FIRST_PID

    def pod_cgroup(self, pod: Pod) -> str:
        """Return the path of a pod's cgroup below a hierarchy (pod_container_manager_linux.go)."""
        quality = "" if pod.quality == "guaranteed" else pod.quality
        if self._layout == "systemd":
            slices = ["kubepods", *filter(None, [quality]), f"pod{pod.uid.replace('-', '_')}"]
            names = ["-".join(slices[: n + 1]) for n in range(len(slices))]
            return "/".join(f"{name}.slice" for name in names)
        return "/".join(filter(None, ["kubepods", quality, f"pod{pod.uid}"]))

    def _hierarchies(self) -> list[Path]:
        if self._cgroups is None:
            return []
        if self._layout == "v1":
            return [self._cgroups / name for name in (*CONTROLLERS, "systemd", "unified")]
        return [self._cgroups]

    def make_cgroup(self, pod: Pod) -> None:
        """Make a pod's cgroup, as the kubelet does before it pulls images."""
        for hierarchy in self._hierarchies():
            (hierarchy / self.pod_cgroup(pod)).mkdir(parents=True, exist_ok=True)

    def remove_cgroup(self, pod: Pod) -> None:
        """Remove it, as the kubelet does after the pod's last container."""
        for hierarchy in self._hierarchies():
            shutil.rmtree(hierarchy / self.pod_cgroup(pod), ignore_errors=True)

    def start(self, pod: Pod, container: Container, allocation: Allocation) -> None:
        """Run a container, which opens its nodes. FileNotFoundError: there is none."""
        pid = self._next
        self._next += 1
        inside = self._container_cgroup(pod, pid)
        if self._host:
            nodes = [spec.host_path for spec in allocation.devices]
            text = self._proc_cgroup(inside)
            self._host.start_process(pid, text, [*nodes, *allocation.cdi_devices])
        for hierarchy in self._hierarchies():
            (hierarchy / inside).mkdir(parents=True)
        container.pid = pid

    def stop(self, pod: Pod, container: Container) -> None:
        """End a container, if it runs: it closes its nodes and its cgroup goes. The pod's stays."""
        if container.pid is None:
            return
        if self._host:
            self._host.end_process(container.pid)
        inside = self._container_cgroup(pod, container.pid)
        for hierarchy in self._hierarchies():
            shutil.rmtree(hierarchy / inside, ignore_errors=True)
        container.pid = None

    def _container_cgroup(self, pod: Pod, pid: int) -> str:
        name = hashlib.sha256(f"{pod.uid}/{pid}".encode()).hexdigest()
        name = f"cri-containerd-{name}.scope" if self._layout == "systemd" else name
        return f"{self.pod_cgroup(pod)}/{name}"

    def _proc_cgroup(self, inside: str) -> str:
        """Return /proc/<pid>/cgroup."""
        lines = [f"0::/{inside}"]
        if self._layout == "v1":
            numbered = enumerate(CONTROLLERS, start=2)
            lines = [f"{number}:{name}:/{inside}" for number, name in numbered]
            lines += [f"1:name=systemd:/{inside}", f"0::/{inside}"]
        return "\n".join(lines)

    def lose_power(self) -> None:
        """Remove all cgroups, as the kernel has none after a boot."""
        for hierarchy in self._hierarchies():
            for directory in hierarchy.glob("kubepods*"):
                shutil.rmtree(directory)


# ------------------------------------------------------------------------------ what starts it


class Worker:
    """What starts the containers of one pod, in the order of their admission, one at a time.

    A container that cannot be started is tried again after `back_off` seconds, and others go on.
    What comes after an init container waits for it; an ordinary one has done its work when the next
    container is to start.
    """

    def __init__(
        self,
        pod: Pod,
        runtime: Runtime,
        log: EventLog,
        prepare: Callable[[Claim], Awaitable[Allocation]],
        back_off: float,
    ) -> None:
        self._pod = pod
        self._runtime = runtime
        self._log = log
        self._prepare = prepare
        self._back_off = back_off
        self._awake = asyncio.Event()
        self._starting = False
        self._then: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look again what there is to start."""
        self._awake.set()

    def cancel(self) -> asyncio.Task[None]:
        """Start nothing any more, as the kubelet is gone; returns what ends with that."""
        self._task.cancel()
        return self._task

    def leave(self, then: Callable[[], None]) -> None:
        """Start nothing any more, and do something then.

        A pod's worker does one thing after the other, and the deletion of its pod does not call off
        PreStartContainer (measured with 1.33 and 1.37): the pod stays until that has returned.
        """
        if self._starting:
            self._then = then
        else:
            self._task.cancel()
            then()

    async def _run(self) -> None:
        while True:
            self._awake.clear()
            self._runtime.make_cgroup(self._pod)
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
                    await asyncio.wait_for(self._awake.wait(), self._back_off)

    async def _start_all(self) -> bool:
        """Start what does not run; tells whether nothing is left to be tried again."""
        complete = True
        for container in list(self._pod.containers.values()):
            if container.pid is not None or container.over or self._then:
                continue
            self._finish_init_containers()
            if not await self._start(container):
                complete = False
                if container.kind != "main":
                    break
        return complete

    def _finish_init_containers(self) -> None:
        for container in self._pod.containers.values():
            if container.kind == "init" and container.pid is not None:
                self._runtime.stop(self._pod, container)
                container.over = True
                self._log.record("exited", pod=self._pod.name, container=container.name)

    async def _start(self, container: Container) -> bool:
        where: Mapping[str, Any] = {"pod": self._pod.name, "container": container.name}
        try:
            allocation = await self._prepare(self._pod.claim(container.name, running=False))
            if self._then:
                return True
            self._runtime.start(self._pod, container, allocation)
        except Failure as failure:
            reason = "CreateContainerConfigError"
            self._log.record("not-started", **where, reason=reason, message=str(failure))
            return False
        except FileNotFoundError as error:
            reason = "CreateContainerError"
            self._log.record("not-started", **where, reason=reason, message=str(error))
            return False
        self._log.record("running", **where, pid=container.pid)
        return True
