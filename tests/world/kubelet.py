"""A reference kubelet: its side of the device plugin API and of the pod resources API.

It is as strict as the original and behaves as Kubernetes 1.30 to 1.37 do, errors included, over
real gRPC on real sockets, and can in addition be killed, restarted, made deaf and asked what
happened when. `Kubelet.violations` lists what the original swallows or chokes on but a good plugin
never does; tests assert that it stays empty. That it is right is shown by running the same
scenarios against the original: tests.world.scenarios.

Its parts: eventlog, plugins (connections), devicemanager, checkpoint, topology, pods.

Left out: the scheduler and the kubelet's resource predicates (both would stop a pod that asks for
too much before the device manager sees it), the plugin watcher, and topology scopes but the
container's.

By hand: `python -m tests.world.kubelet --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import podresources_pb2 as pods_pb
from tests.world.checkpoint import CHECKPOINT, CheckpointFile, Corruption, Snapshot
from tests.world.devicemanager import (
    NO_NUMA_NODE,
    Admission,
    AdmissionError,
    Allocation,
    Claim,
    DeviceManager,
    Panic,
    Preparation,
)
from tests.world.eventlog import PATIENCE, Event, EventLog
from tests.world.plugins import Config, Failure, is_extended_resource, rpc
from tests.world.pods import Container, Host, Kind, Layout, Pod, Pods, Quality, Runtime, Worker
from tests.world.topology import Policy, numa_nodes

__all__ = [
    "CHECKPOINT",
    "AdmissionError",
    "Allocation",
    "Corruption",
    "Event",
    "Kubelet",
    "Panic",
    "Snapshot",
    "is_extended_resource",
]

POD_CALLS_BURST, POD_CALLS_A_SECOND = 10, 100  # all callers of pod resources together; no more

Method = Literal["Register", "List"]
T = TypeVar("T")
K = TypeVar("K", bound="_Alive")


class KubeletDied(Exception):
    """What an admission ends with if the kubelet dies meanwhile; its next start repeats it."""


# ------------------------------------------------------------------------------------ faults


@dataclass(slots=True)
class _Fault:
    """What the next calls of a method meet instead of their answer, or before it."""

    times: float
    seconds: float = 0.0
    code: grpc.StatusCode | None = None
    message: str = ""
    answer: bytes | None = None


class Faults:
    """What goes wrong with the calls to come."""

    def __init__(self) -> None:
        self._next: dict[str, deque[_Fault]] = {"Register": deque(), "List": deque()}

    def add(self, method: Method, fault: _Fault) -> None:
        """Let calls of a method meet this, after those that were added before."""
        self._next[method].append(fault)

    def any(self) -> bool:
        """Tell whether a call that comes will fail or wait."""
        return any(self._next.values())

    def clear(self) -> None:
        """Let all go well from now on."""
        for faults in self._next.values():
            faults.clear()

    async def meet(self, method: Method) -> _Fault | None:
        """Return the fault that this call has to suffer, after the time that it takes."""
        faults = self._next[method]
        if not faults:
            return None
        fault = faults[0]
        fault.times -= 1
        if fault.times < 1:
            faults.popleft()
        await asyncio.sleep(fault.seconds)
        return fault


class RateLimit:
    """The rate limiter of the pod resources API: a bucket of tokens."""

    def __init__(self) -> None:
        self._tokens = float(POD_CALLS_BURST)
        self._at = time.monotonic()

    def allows(self) -> bool:
        """Take a token, if there is one."""
        now = time.monotonic()
        refilled = self._tokens + (now - self._at) * POD_CALLS_A_SECOND
        self._tokens, self._at = min(POD_CALLS_BURST, refilled), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Sockets:
    """The sockets that a kubelet listens on."""

    def __init__(self) -> None:
        self._servers: list[grpc.aio.Server] = []
        self._deaf: list[socket.socket] = []

    def open(self) -> bool:
        """Tell whether there are any."""
        return bool(self._servers or self._deaf)

    def new_server(self, deaf: bool) -> grpc.aio.Server | None:
        """Return a server; None where nobody shall answer."""
        if deaf:
            return None
        self._servers.append(grpc.aio.server())
        return self._servers[-1]

    @contextlib.asynccontextmanager
    async def bound(
        self, server: grpc.aio.Server | None, path: Path, workspace: Path
    ) -> AsyncIterator[None]:
        """Bind to a private name, and at the end to `path`; without a server it only listens.

        gRPC deletes the path that it bound when it stops, and a killed kubelet deletes nothing: so
        `path` is a second name of the same socket.
        """
        with tempfile.TemporaryDirectory(prefix=".kubelet-", dir=workspace) as private:
            if server:
                server.add_insecure_port(f"unix:{private}/s")
            else:
                self._deaf.append(listening := socket.socket(socket.AF_UNIX))
                listening.bind(f"{private}/s")
                listening.listen()
            yield
            os.link(f"{private}/s", path)

    async def close(self) -> None:
        """Answer nobody any more; the files stay."""
        servers, self._servers = self._servers, []
        for server in servers:
            await server.stop(None)
        for listening in self._deaf:
            listening.close()
        self._deaf = []


# -------------------------------------------------------------------------------------- node


class Node:
    """What of a node outlives its kubelet: pods, and what of them runs."""

    def __init__(self, log: EventLog, runtime: Runtime, back_off: float) -> None:
        self.log = log
        self.pods = Pods()
        self.runtime = runtime
        self.alive = False  # the kubelet
        self._back_off = back_off
        self._workers: dict[str, Worker] = {}

    def work(self, pod: Pod, prepare: Callable[[Claim], Coroutine[Any, Any, Allocation]]) -> None:
        """Start what of an admitted pod does not run yet."""
        if worker := self._workers.get(pod.uid):
            worker.wake()
        else:
            worker = Worker(pod, self.runtime, self.log, prepare, self._back_off)
            self._workers[pod.uid] = worker

    async def stop_all_work(self) -> None:
        """Start nothing any more, as the end of the kubelet does."""
        ending = [worker.cancel() for worker in self._workers.values()]
        self._workers.clear()
        await asyncio.gather(*ending, return_exceptions=True)

    def end(self, pod: Pod, *, forget: bool = False) -> None:
        """End a pod's containers and remove its cgroup, once nothing of it is being started."""

        def finish() -> None:
            for container in pod.containers.values():
                self.runtime.stop(pod, container)
            self.runtime.remove_cgroup(pod)
            pod.over = True
            pod.known = pod.known and not forget
            self.log.record("terminated", pod=pod.name, uid=pod.uid)

        if worker := self._workers.pop(pod.uid, None):
            worker.leave(finish)
        else:
            finish()

    def delete(self, pod: Pod, *, force: bool) -> None:
        """Delete a pod's object, and let the kubelet do what it does if it hears of that."""
        pod.wanted = False
        self.log.record("deleted", pod=pod.name, uid=pod.uid)
        if not self.alive or not self.pods.is_heard_of(pod):
            return
        if force:
            self._leave_alone(pod)
        else:
            self.end(pod, forget=True)

    def _leave_alone(self, pod: Pod) -> None:
        """Let the kubelet know no more of a pod; its containers run on."""
        pod.known = False
        if worker := self._workers.get(pod.uid):
            worker.leave(lambda: None)

    def halt(self, pod: Pod) -> None:
        """End a pod's containers without anybody's notice, as a reboot does."""
        if worker := self._workers.pop(pod.uid, None):
            worker.cancel()
        for container in pod.containers.values():
            self.runtime.stop(pod, container)
            container.over = False
        self.runtime.remove_cgroup(pod)

    def crash(self, pod: Pod, container: Container) -> None:
        """End a container; the kubelet starts it again."""
        self.runtime.stop(pod, container)
        if worker := self._workers.get(pod.uid):
            worker.wake()

    def learn_of_the_gone(self) -> None:
        """Let the kubelet take notice of pods that were deleted while nobody told it."""
        for pod in self.pods:
            if pod.known and not pod.wanted:
                self._leave_alone(pod)

    def lose_power(self) -> None:
        """End all processes; init containers will have to run again."""
        for pod in self.pods:
            self.halt(pod)
        self.runtime.lose_power()


# ----------------------------------------------------------------------------------- kubelet


class _Observed:
    """What tests ask a kubelet, and what they let go wrong with it."""

    def __init__(self, config: Config, node: Node) -> None:
        self.config = config
        self.log = node.log
        self.node = node
        self.faults = Faults()
        self.file = CheckpointFile(config.directory, self.log, config.random)
        self.manager = DeviceManager(config, self.log, self.file, node.pods)  # in its latest life

    @property
    def directory(self) -> Path:
        """Where plugins' sockets are."""
        return self.config.directory

    @property
    def socket(self) -> Path:
        """Where plugins register."""
        return self.directory / "kubelet.sock"

    @property
    def events(self) -> list[Event]:
        """What happened."""
        return self.log.events

    @property
    def violations(self) -> list[str]:
        """What no good plugin would have done."""
        return self.log.violations

    def find(self, kind: str, resource: str | None = None, since: float = 0.0) -> list[Event]:
        """Return the events of a kind since a moment of `time.monotonic()`."""
        return self.log.find(kind, resource, since)

    async def wait_for(self, predicate: Callable[[], T], timeout: float = PATIENCE) -> T:
        """Return the predicate's first true value; it is evaluated again after every event."""
        return await self.log.wait_for(predicate, timeout)

    async def registered(self, resource: str, timeout: float = PATIENCE) -> None:
        """Wait until a plugin of the resource is connected and has sent its first list."""
        await self.wait_for(lambda: self.manager.plugins.is_listed(resource), timeout)

    def capacity(self) -> dict[str, int]:
        """Return devices by resource, the unhealthy among them; removes what has expired."""
        return {resource: capacity for resource, (capacity, _) in self.manager.status().items()}

    def allocatable(self) -> dict[str, int]:
        """Return healthy devices by resource, whether they are taken or not."""
        status = self.manager.status().items()
        return {resource: allocatable for resource, (_, allocatable) in status}

    def healthy(self, resource: str) -> frozenset[str]:
        """Return the IDs that are listed as healthy, none after the end of the stream."""
        return frozenset(self.manager.devices.healthy.get(resource, ()))

    def unhealthy(self, resource: str) -> frozenset[str]:
        """Return the IDs that are not healthy."""
        return frozenset(self.manager.devices.unhealthy.get(resource, ()))

    def devices(self, resource: str) -> dict[str, pb.Device]:
        """Return the latest list, whatever became of the plugin since."""
        return dict(self.manager.devices.listed.get(resource, {}))

    def allocated(self, resource: str) -> frozenset[str]:
        """Return the devices that pods have."""
        return frozenset(self.manager.pods.allocated.get(resource, ()))

    def uid(self, pod: str) -> str:
        """Return the UID of the latest pod of this name."""
        return self.node.pods.get(pod).uid

    def allocation(self, pod: str, container: str) -> Allocation:
        """Return what a container has, as the kubelet remembers it."""
        found = self.node.pods.get(pod)
        return self.manager.edits(found.claim(container, running=False))

    async def running(self, pod: str, container: str, timeout: float = PATIENCE) -> None:
        """Wait until a container runs; one of init may have done its work already."""

        def runs() -> bool:
            found = self.node.pods.get(pod).containers[container]
            return found.pid is not None or found.over

        await self.wait_for(runs, timeout)

    def refuse_with(
        self,
        code: grpc.StatusCode,
        message: str = "refused",
        times: float = 1,
        method: Method = "Register",
    ) -> None:
        """Let the next `times` calls fail; UNIMPLEMENTED: a kubelet that does not know List."""
        self.faults.add(method, _Fault(times, code=code, message=message))

    def hang(self, seconds: float, times: float = 1, method: Method = "Register") -> None:
        """Let the next `times` calls be taken up only after that long."""
        self.faults.add(method, _Fault(times, seconds=seconds))

    def garble(self, answer: bytes = b"\xff\xff\xff", times: float = 1) -> None:
        """Let the next `times` calls of List be answered with these bytes."""
        self.faults.add("List", _Fault(times, answer=answer))

    @property
    def is_sound(self) -> bool:
        """Whether no call that comes will fail or wait."""
        return not self.faults.any()

    def heal(self) -> None:
        """Make it sound."""
        self.faults.clear()

    def corrupt(self, how: Corruption | bytes) -> None:
        """Damage the checkpoint, or replace it by these bytes, until the next writing."""
        self.file.corrupt(how)

    def overtake(self, overtaking: bool = True) -> None:
        """Let writings of the checkpoint overtake each other, see CheckpointFile."""
        self.file.overtaking = overtaking


def sweep(config: Config) -> None:
    """Delete what plugins left behind: before 1.33 all files, since then sockets."""
    for path in config.directory.iterdir():
        if path.name == CHECKPOINT:
            continue
        try:
            mode = (path.lstat() if config.sweeps_every_file else path.stat()).st_mode
        except OSError:
            continue
        if not stat.S_ISDIR(mode) and (config.sweeps_every_file or stat.S_ISSOCK(mode)):
            path.unlink(missing_ok=True)  # its owner may have been faster


class _Alive(_Observed):
    """A kubelet's own life: it starts, serves, and ends in one way or another."""

    def __init__(self, config: Config, node: Node, pod_resources: Path | None) -> None:
        super().__init__(config, node)
        self.pod_resources = pod_resources
        self.limit = RateLimit()
        self._sockets = Sockets()
        self._learning: asyncio.Task[None] | None = None  # of the API server's pods
        self._dying: asyncio.Task[None] | None = None

    async def start(self, *, deaf: bool = False) -> None:
        """Read the checkpoint, empty the directory, make `kubelet.sock`; `deaf`: never answer."""
        if self._sockets.open():
            raise RuntimeError("the kubelet runs already")
        self.limit = RateLimit()
        self.node.pods.forget()
        self.node.alive = True
        self.manager = DeviceManager(self.config, self.log, self.file, self.node.pods)
        # 0755: the checkpoint's store makes the directory before the registration server would make
        # it 0750.
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if self.pod_resources:
            await self._serve_pod_resources(self.pod_resources, deaf)
        self.manager.read_checkpoint()
        sweep(self.config)
        server = self._sockets.new_server(deaf)
        if server:
            rpc.add_RegistrationServicer_to_server(_Registration(self), server)
        async with self._sockets.bound(server, self.socket, self.directory.parent):
            pass
        version = ".".join(map(str, self.config.version))
        self.log.record("started", socket=str(self.socket), version=version, deaf=deaf)
        await self._meet_pods()
        if server:
            await server.start()

    async def _serve_pod_resources(self, path: Path, deaf: bool) -> None:
        path.unlink(missing_ok=True)
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        server = self._sockets.new_server(deaf)
        if server:
            server.add_generic_rpc_handlers((_PodResources(self),))
        # It accepts from the moment on at which it is there.
        async with self._sockets.bound(server, path, self.directory.parent):
            if server:
                await server.start()

    async def _meet_pods(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop in an orderly manner: streams end, everything turns unhealthy, `kubelet.sock` goes.

        No released kubelet does this when it is stopped; it exits as if killed.
        """
        await self.manager.plugins.disconnect_all()
        await self._fall_silent()
        self.socket.unlink(missing_ok=True)
        self.log.record("stopped")

    async def kill(self) -> None:
        """Leave what SIGKILL, SIGTERM and a crash leave: a `kubelet.sock` that refuses."""
        await self._fall_silent()
        self.log.record("killed")

    async def restart(self, *, orderly: bool = False, deaf: bool = False) -> None:
        """Restart the kubelet; the pods run on."""
        await (self.stop() if orderly else self.kill())
        await self.start(deaf=deaf)

    async def power_cut(self) -> None:
        """Kill it and end all processes of the node; `start` is then a reboot."""
        await self.kill()
        self.node.lose_power()

    async def _fall_silent(self) -> None:
        self.node.alive = False
        if self._dying and self._dying is not asyncio.current_task():
            await asyncio.wait({self._dying})
        if self._learning:
            self._learning.cancel()
            await asyncio.wait({self._learning})
        await self.node.stop_all_work()
        self.file.abandon()
        await self._sockets.close()
        await self.manager.plugins.abandon()

    def _panic(self, panic: Panic) -> asyncio.Task[None]:
        """Die of a nil dereference; returns what ends when it is dead."""
        self.node.alive = False
        self.log.violation(f"the kubelet panics: {panic}")
        self.log.record("panicked", message=str(panic))
        self._learning, learning = None, self._learning  # it may be what panics
        if learning and learning is not asyncio.current_task():
            learning.cancel()
        self._dying = asyncio.create_task(self._fall_silent())
        return self._dying

    async def __aenter__(self: K) -> K:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def drop_streams(self, resource: str | None = None) -> None:
        """Break the connections to plugins from this side, as after an error on a stream."""
        await self.manager.plugins.drop(resource)


class _PodEnds(_Alive):
    """How the pods of a kubelet's node end."""

    def delete(self, pod: str) -> None:
        """Delete a pod in an orderly manner: its containers end, its cgroup goes, then its object.

        The device manager forgets it when a List or the next admission asks, and the file with its
        next writing. While nobody tells the kubelet, because it is down or the API server away,
        only the object goes; the kubelet forgets it when it has heard of all pods, and the
        containers run on until `end`.
        """
        self.node.delete(self.node.pods.get(pod), force=False)

    def force_delete(self, pod: str) -> None:
        """Delete a pod's object, or a manifest, at once; containers run on until `end`."""
        self.node.delete(self.node.pods.get(pod), force=True)

    def end(self, pod: str) -> None:
        """End the containers of a pod whose object is gone, and remove its cgroup."""
        self.node.end(self.node.pods.get_running(pod))

    def complete(self, pod: str) -> None:
        """Let a pod's containers end by themselves, for good: its cgroup goes, its object stays."""
        self.node.end(self.node.pods.get(pod))

    def crash(self, pod: str, container: str) -> None:
        """End a container; it is started again, with PreStartContainer and without Allocate."""
        found = self.node.pods.get(pod)
        self.node.crash(found, found.containers[container])
        self.log.record("exited", pod=pod, container=container)

    def remove_pod(self, pod: str) -> None:
        """Delete a pod in an orderly manner, let the device manager forget it and write that down.

        A short form for tests of something else: the original forgets at the next List or
        admission.
        """
        with contextlib.suppress(LookupError):
            found = self.node.pods.get(pod)
            self.node.delete(found, force=False)
            if self.node.alive and found.uid in self.manager.pods.held:
                self.manager.pods.forget([found.uid])
                self.manager.write_checkpoint_now()
        self.log.record("freed", pod=pod)


class Kubelet(_PodEnds):
    """A kubelet that serves in `directory`, and the pods of its node.

    Stopping or killing it forgets all but the checkpoint; pods run on. What starts again admits the
    pods that there are: static ones at once, before any plugin can register, and those of the API
    server when all resources are listed again, or after `pods_come` seconds (the original: 0.8 s
    after `kubelet.sock` is there). Until then nothing is forgotten, and List does not name them.

    The pod resources API is served on the socket `pod_resources`, by default
    `pod-resources/kubelet.sock` beside the directory, None for nowhere. `clock` counts the grace
    period (seconds); `seed` drives what is random order in the original (Go's maps). `back_off`:
    seconds until a container that could not be started is tried again (the original: 0.2 to 1 s,
    then 12 to 15 s). For `cgroups`, `layout` and `host` see tests.world.pods.Runtime.

    Methods that name a pod take its name, for the latest pod of that name, or its UID.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        version: tuple[int, int] = (1, 36),
        policy: Policy = "none",
        numa_nodes: Sequence[int] = (0, 1),
        grace_period: float = 300.0,
        dial_timeout: float = 10.0,
        pod_resources: Path | Literal["beside"] | None = "beside",
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        on_event: Callable[[Event], None] | None = None,
        back_off: float = 0.2,
        pods_come: float = 5.0,
        cgroups: Path | None = None,
        layout: Layout = "cgroupfs",
        host: Host | None = None,
    ) -> None:
        config = Config(Path(directory), version, policy, tuple(numa_nodes))
        config.grace_period, config.dial_timeout = grace_period, dial_timeout
        config.clock, config.random = clock, random.Random(seed)
        node = Node(EventLog(on_event), Runtime(cgroups, layout, host), back_off)
        beside = config.directory.parent / "pod-resources/kubelet.sock"
        super().__init__(config, node, beside if pod_resources == "beside" else pod_resources)
        self.pods_come = pods_come
        self._admission = asyncio.Lock()

    # Hearing of pods

    def api_server_away(self) -> None:
        """Let the API server be away: a kubelet that starts learns of none of its pods."""
        self.node.pods.api_away = True

    def api_server_back(self) -> asyncio.Future[None]:
        """Let the API server answer again; what is returned ends when all pods are heard of."""
        self.node.pods.api_away = False
        if self.node.alive:
            self.node.learn_of_the_gone()
            if not self.node.pods.all_sources_ready():
                self._hear_of_api_pods()
        return self._learning or asyncio.ensure_future(asyncio.sleep(0))

    async def _meet_pods(self) -> None:
        await self._learn(static=True)
        if not self.node.pods.api_away:
            self._hear_of_api_pods()

    def _hear_of_api_pods(self) -> None:
        async def hear() -> None:
            plugins, resources = self.manager.plugins, list(self.manager.devices.healthy)
            with contextlib.suppress(TimeoutError):
                await self.wait_for(lambda: all(map(plugins.is_listed, resources)), self.pods_come)
            await self._learn(static=False)
            if self.node.alive:
                self.node.pods.sources_are_ready()
                self.log.record("sources-ready")

        self._learning = asyncio.create_task(hear())

    async def _learn(self, *, static: bool) -> None:
        """Admit the pods of a source that there are, the oldest first."""
        for pod in list(self.node.pods):
            if pod.static != static or not pod.wanted:
                continue
            if static and pod.rejected:  # a manifest is tried again at each start
                pod.over = pod.rejected = False
            pod.known = True
            running = {c.name for c in pod.containers.values() if c.pid is not None}
            try:
                if not pod.over:
                    await self._admit(pod, list(pod.containers.values()), running)
            except AdmissionError:
                continue
            except (Panic, KubeletDied):
                return

    # Admission

    async def admit(
        self,
        pod: str,
        container: str,
        request: Mapping[str, int],
        *,
        init: bool = False,
        restartable: bool = False,
        static: bool = False,
        quality: Quality = "besteffort",
    ) -> Allocation:
        """Admit a container of a pod, which is then started in the background, see `running`.

        Raises AdmissionError: the pod is rejected as a whole. What an `init` container got, the
        pod's later containers get again: the plugin then sees *must-include* IDs. One that is
        `restartable` too keeps its own. A resource that the kubelet has never heard of is ignored,
        as the original does: the container gets nothing. A pod that has ended, or was deleted, is
        followed by a new one of its name, with another UID. A pod's name can be `namespace/name`.
        """
        kind: Kind = "restartable" if restartable else "init" if init else "main"
        wish = Container(container, dict(request), kind)
        admitted = await self.admit_pod(pod, [wish], static=static, quality=quality)
        return admitted[container]

    async def admit_pod(
        self,
        pod: str,
        containers: Sequence[Container],
        *,
        static: bool = False,
        quality: Quality = "besteffort",
    ) -> dict[str, Allocation]:
        """Admit several containers of a pod before any is started, as the original does."""
        if not self.node.alive:
            raise RuntimeError("the kubelet does not run")
        if not static:
            if self.node.pods.api_away:
                raise RuntimeError("the API server is away: the kubelet does not hear of the pod")
            if self._learning:
                await asyncio.wait({self._learning})  # older pods come first
        found = self.node.pods.get_or_add(pod, static, quality)
        for wish in containers:
            known = found.containers.setdefault(wish.name, wish)
            known.request = wish.request
        wanted = [found.containers[wish.name] for wish in containers]
        return await self._admit(found, wanted, set())

    async def readmit(self, pod: str, *, running: bool = False) -> dict[str, Allocation]:
        """Admit a pod again, as a kubelet does that has started; by container, what each gets.

        After a reboot no container is `running`, and one whose devices are not listed as healthy by
        then costs the pod its life. After a mere restart of the kubelet its containers run, and
        nothing is checked. (Unless the API server is away, a start does this by itself.)
        """
        found = self.node.pods.get(pod)
        if not running:
            self.node.halt(found)
        everything = set(found.containers) if running else set()
        return await self._admit(found, list(found.containers.values()), everything)

    async def _admit(
        self, pod: Pod, containers: Sequence[Container], running: set[str]
    ) -> dict[str, Allocation]:
        """Admit containers of a pod, one pod at a time; `running` names those that run already."""
        manager, result = self.manager, {}
        async with self._admission:
            pod.known = True
            for container in containers:
                claim = pod.claim(container.name, running=container.name in running)
                try:
                    allocation = await Admission(manager, claim).run()
                except Panic as panic:
                    await self._panic(panic)
                    raise
                except AdmissionError as error:
                    if self.manager is not manager or not self.node.alive:
                        raise KubeletDied(str(error)) from error
                    self._reject(pod, container, error)
                    raise
                where = {"pod": pod.name, "container": container.name}
                self.log.record("admitted", **where, **allocation.fields())
                result[container.name] = allocation
            self.node.work(pod, self._prepare)
        return result

    def _reject(self, pod: Pod, container: Container, error: AdmissionError) -> None:
        text = {"reason": error.reason, "message": error.message}
        self.log.record("rejected", pod=pod.name, container=container.name, **text)
        self.node.end(pod)
        pod.over = pod.rejected = True

    async def _prepare(self, claim: Claim) -> Allocation:
        try:
            return await Preparation(self.manager, claim).run()
        except Panic as panic:
            self._panic(panic)
            raise Failure(str(panic)) from panic


# ---------------------------------------------------------------------------------- services


def listed_pods(manager: DeviceManager, pods: Pods) -> pods_pb.ListPodResourcesResponse:
    """Return what List of the pod resources API answers, in no order, and forget who has ended.

    One entry for each device, or for each of its NUMA nodes if it has any; of resources whose
    plugin is gone, too. What an ordinary init container has is not named.
    """
    manager.prune()
    answer = pods_pb.ListPodResourcesResponse()
    active = pods.active()
    for pod in manager.config.shuffled(pods):
        if pod.uid not in active and not (pod.known and manager.config.names_ended_pods):
            continue
        namespace, name = pod.full_name
        listed = answer.pod_resources.add(name=name, namespace=namespace)
        for container in pod.containers.values():
            if container.kind == "init":
                continue
            devices = listed.containers.add(name=container.name).devices
            for resource, held in manager.pods.of(pod.uid, container.name).items():
                for ident in (ident for ids in held.per_node.values() for ident in ids):
                    devices.add(resource_name=resource, device_ids=[ident])
    return answer


def allocatable_devices(manager: DeviceManager) -> pods_pb.AllocatableResourcesResponse:
    """Return what GetAllocatableResources answers: every healthy device, held or not."""
    answer = pods_pb.AllocatableResourcesResponse()
    for resource, healthy in manager.config.shuffled(manager.devices.healthy.items()):
        for ident in manager.config.shuffled(healthy):
            for _ in numa_nodes(manager.devices.get(resource, ident)) or [NO_NUMA_NODE]:
                answer.devices.add(resource_name=resource, device_ids=[ident])
    return answer


class _Registration:
    """The `Registration` service: errors reach the plugin as UNKNOWN, with their text."""

    def __init__(self, kubelet: _Alive) -> None:
        self._kubelet = kubelet

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        kubelet, begin = self._kubelet, time.monotonic()
        who = {"resource": request.resource_name, "endpoint": request.endpoint}
        kubelet.log.record("register", **who)
        code: grpc.StatusCode | None = None
        try:
            if (fault := await kubelet.faults.meet("Register")) and (code := fault.code):
                raise Failure(fault.message)
            await kubelet.manager.plugins.register(request)
        except Failure as failure:
            kubelet.log.record("refused", **who, message=str(failure))
            await context.abort(code or grpc.StatusCode.UNKNOWN, str(failure))
        kubelet.log.record("registered", **who, seconds=time.monotonic() - begin)
        return pb.Empty()


class _PodResources(grpc.GenericRpcHandler):
    """The service `v1.PodResourcesLister`; generic, so that it can answer what is no message."""

    def __init__(self, kubelet: _Alive) -> None:
        self._kubelet = kubelet

    def _answer(self, method: str) -> bytes:
        manager = self._kubelet.manager
        if method == "List":
            return listed_pods(manager, self._kubelet.node.pods).SerializeToString()
        return allocatable_devices(manager).SerializeToString()

    def service(self, handler_call_details: Any) -> Any:
        service, _, method = str(handler_call_details.method)[1:].partition("/")
        known = ("List", "GetAllocatableResources")
        if service != "v1.PodResourcesLister" or method not in known:
            return None  # UNIMPLEMENTED

        async def call(request: bytes, context: Any) -> bytes:
            kubelet = self._kubelet
            if not kubelet.limit.allows():
                kubelet.log.violation(f"{method} of the pod resources API is called too often")
                code = grpc.StatusCode.RESOURCE_EXHAUSTED
                await context.abort(code, "rejected by rate limit")
            fault = await kubelet.faults.meet("List") if method == "List" else None
            if fault and fault.code:
                await context.abort(fault.code, fault.message)
            garbage = fault.answer if fault else None
            answer = self._answer(method) if garbage is None else garbage
            kubelet.log.record("asked", method=method, bytes=len(answer))
            return answer

        return grpc.unary_unary_rpc_method_handler(call)


# ------------------------------------------------------------------------------ command line

COMMANDS = """\
commands on standard input:
  capacity                              capacity and allocatable, a line per resource
  admit POD RESOURCE=N [...] [CONTAINER]  admit a container (default: main) and print what it gets
  violations                            how many so far
  quit                                  (end of input does not quit: signals do)
and methods of Kubelet by their names:
  readmit, delete, force-delete, end, complete, remove-pod POD; crash POD CONTAINER
  restart, kill, start, stop (removes the socket, kill does not); drop-streams [RESOURCE]
  api-server-away, api-server-back
"""
METHODS = COMMANDS.partition("names:")[2]


class _Console:
    """What carries out lines of input."""

    def __init__(self, kubelet: Kubelet, say: Callable[[Event], None]) -> None:
        self._kubelet = kubelet
        self._say = say

    def _tell(self, kind: str, **fields: Any) -> None:
        self._say(Event(time.monotonic(), kind, fields))

    async def obey(self, line: str) -> bool:
        """Carry out a line; False for `quit`."""
        verb, *words = line.split() or [""]
        with contextlib.suppress(AdmissionError):  # told as "rejected"
            try:
                await self._act(verb, words)
            except (
                AttributeError,
                OSError,
                TypeError,
                ValueError,
                RuntimeError,
                LookupError,
                Panic,
            ) as error:
                self._tell("error", message=str(error))
        return verb != "quit"

    async def _act(self, verb: str, words: list[str]) -> None:
        kubelet = self._kubelet
        if verb == "capacity":
            status = kubelet.manager.status()
            for resource, (capacity, healthy) in sorted(status.items()):
                self._tell("capacity", resource=resource, capacity=capacity, allocatable=healthy)
            self._tell("resources", number=len(status))
        elif verb == "violations":
            self._tell("violations", number=len(kubelet.violations))
        elif verb == "admit":
            pairs = [word.partition("=") for word in words[1:] if "=" in word]
            container = next((word for word in words[1:] if "=" not in word), "main")
            request = {resource: int(number) for resource, _, number in pairs}
            await kubelet.admit(words[0], container, request)
        elif re.search(rf"\b{re.escape(verb)}\b(?!-)", METHODS) and verb.islower():
            done = getattr(kubelet, verb.replace("-", "_"))(*words)
            if isinstance(done, Coroutine):
                await done
        elif verb not in ("", "quit"):
            raise ValueError(f"no such command: {verb}")


def _read_lines(put: Callable[[str], object]) -> None:
    """Read the descriptor itself: a thread in `sys.stdin` would make Python abort at exit."""
    rest = b""
    with contextlib.suppress(OSError, RuntimeError):  # closed input; closed loop
        while block := os.read(0, 4096):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                put(line.decode(errors="replace"))
        if rest:
            put(rest.decode(errors="replace"))


async def _main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()  # None: stop

    def say(event: Event) -> None:
        try:
            print(event.json() if options.json else event.line(), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            lines.put_nowait(None)

    kubelet = Kubelet(
        options.directory,
        version=options.kubelet_version,
        policy=options.policy,
        numa_nodes=options.numa_nodes,
        grace_period=options.grace_period,
        pod_resources=options.pod_resources,
        cgroups=options.cgroups,
        on_event=say,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lines.put_nowait, None)
    if sys.stdin is not None:  # None: descriptor 0 was closed, and by now is something else

        def put(line: str) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        threading.Thread(target=_read_lines, args=(put,), daemon=True).start()
    console = _Console(kubelet, say)
    await kubelet.start(deaf=options.deaf)
    while (line := await lines.get()) is not None and await console.obey(line):
        pass
    await kubelet.stop()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world.kubelet",
        description="A reference kubelet: prints a line for everything that happens.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", type=Path, help="the device plugin directory, made if it is missing")
    add("--json", action="store_true", help="print events as JSON lines")
    add(
        "--kubelet-version",
        type=lambda text: tuple(map(int, text.split("."))),
        default=(1, 36),
        metavar="1.N",
        help="whose behaviour to show: it differs before 1.32, 1.33, 1.34, 1.37 (default: 1.36)",
    )
    policies = ["none", "best-effort", "restricted", "single-numa-node"]
    add("--policy", choices=policies, default="none", help="topology policy")
    add("--numa-nodes", type=int, nargs="+", default=[0, 1], metavar="N", help="(default: 0 1)")
    add("--grace-period", type=float, default=300.0, metavar="SECONDS", help="(default: 300)")
    add(
        "--pod-resources",
        type=Path,
        metavar="SOCKET",
        help="serve the pod resources API here (default: not at all)",
    )
    add("--cgroups", type=Path, metavar="DIR", help="make pods' cgroups here (default: nowhere)")
    add("--deaf", action="store_true", help="create the socket, but never answer on it")
    return parser.parse_args()


def main() -> None:
    """Run a kubelet by hand."""
    asyncio.run(_main(_arguments()))


if __name__ == "__main__":
    main()
