"""The pods of a reference kubelet's node, and the workers that start their containers.

The objects of the API server, manifests, and running containers outlive the kubelet: `Pods` belongs
to the node, a `Worker` to the kubelet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.world.devicemanager import Allocation, Claim
from tests.world.eventlog import EventLog
from tests.world.plugins import Failure

if TYPE_CHECKING:
    from tests.world.runtime import Runtime

Kind = Literal["main", "init", "restartable"]
Quality = Literal["guaranteed", "burstable", "besteffort"]


@dataclass(eq=False, slots=True)
class Container:
    """A container of a pod: its request, and its state."""

    name: str
    request: dict[str, int]
    kind: Kind = "main"
    pid: int | None = None  # while it runs
    over: bool = False  # an init container that has done its work


@dataclass(eq=False, slots=True)
class Pod:
    """A pod, from its creation until its containers have ended and its object is deleted."""

    name: str
    uid: str
    static: bool
    quality: Quality
    containers: dict[str, Container] = field(default_factory=dict)
    sandbox: int | None = None  # PID of its sandbox's process, while that runs
    wanted: bool = True  # its object is in the API server, or its manifest is there
    known: bool = False  # this kubelet, in this life, has learned of it
    over: bool = False  # rejected, completed, or terminated
    rejected: bool = False

    @property
    def full_name(self) -> tuple[str, str]:
        """Its namespace and name; tests can name a pod `namespace/name`."""
        *namespace, name = self.name.split("/")
        return (namespace[0] if namespace else "default"), name

    @property
    def has_containers(self) -> bool:
        """Whether a container runs."""
        return any(container.pid for container in self.containers.values())

    @property
    def has_processes(self) -> bool:
        """Whether its cgroup has processes, the sandbox's or a container's."""
        return self.sandbox is not None or self.has_containers

    @property
    def request(self) -> Counter[str]:
        """The devices that it requests, by resource, as PodRequests() of the kubelet adds them up.

        Init containers run one after another, beside those restartable ones that stand before them.
        """
        init, sidecars, main = Counter[str](), Counter[str](), Counter[str]()
        for container in self.containers.values():
            if container.kind == "main":
                main.update(container.request)
                continue
            if container.kind == "restartable":
                sidecars.update(container.request)
            own = container.request if container.kind == "init" else {}
            init |= sidecars + Counter(own)
        return init | (sidecars + main)

    def claim(self, container: str, *, running: bool) -> Claim:
        """Return what the device manager must know of a container."""
        wish = self.containers[container]
        return Claim(self.uid, self.name, container, wish.request, wish.kind == "init", running)


class Pods:
    """All pods of a node, the API server's and static ones, and which of them the kubelet knows.

    It learns of static pods as soon as it starts, and of the API server's when that answers. Until
    both have been seen once in its life, sources are not ready, and no pod is forgotten.
    """

    def __init__(self) -> None:
        self.all: list[Pod] = []
        self.api_away = False
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

    def get_or_add(self, name: str, static: bool, quality: Quality) -> Pod:
        """Return the existing pod of this name, or a new one.

        The UID is the same in each run of a test. A static pod's is 32 hex digits, a hash of its
        manifest: a manifest that returns has the same UID again. An API server's is a UUID.
        """
        same = [pod for pod in self.all if pod.name == name]
        if same and same[-1].wanted and not same[-1].over:
            return same[-1]
        if static:
            uid = hashlib.md5(name.encode(), usedforsecurity=False).hexdigest()
        else:
            uid = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{name}#{len(same)}"))
        self.all.append(Pod(name, uid, static, quality))
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


class Worker:
    """Starts the containers of one pod, in the order of their admission, one at a time.

    First come the pod's cgroup, its volumes and its sandbox. A container that cannot be started is
    tried again after `back_off` seconds, and others go on. Containers after an init container wait
    for it; an ordinary one has done its work when the next container is to start.
    """

    def __init__(
        self,
        pod: Pod,
        runtime: Runtime,
        log: EventLog,
        ready: Callable[[], Awaitable[object]],
        prepare: Callable[[Claim], Awaitable[Allocation]],
        back_off: float,
    ) -> None:
        """Args: ready: waits until volumes are mounted; prepare: calls PreStartContainer."""
        self._pod = pod
        self._runtime = runtime
        self._log = log
        self._ready = ready
        self._prepare = prepare
        self._back_off = back_off
        self._awake = asyncio.Event()
        self._starting = False
        self._then: Callable[[], None] | None = None
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look again for containers to start."""
        self._awake.set()

    def cancel(self) -> asyncio.Task[None]:
        """Start nothing more, as the kubelet is gone; returns the task that ends with that."""
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
        await self._ready()
        while True:
            self._awake.clear()
            if self._pod.sandbox is None:
                self._runtime.start_sandbox(self._pod)
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
        """Start all containers that do not run; returns whether nothing must be tried again."""
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
