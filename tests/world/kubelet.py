"""A reference kubelet: its side of the device plugin API, over real gRPC on real sockets.

It is as strict as Kubernetes 1.36 and 1.37 together. `Kubelet.violations` lists what the original
tolerates or fails of but a correct plugin never does, and every moment at which two pods run with
one chip; tests assert that it stays empty.

Left out: the scheduler, other predicates than that of extended resources, the alignment of devices
by the Topology Manager, the crash by an ID that is not listed (it is a violation here), static
pods, pods of several containers, an API server that is away, writes of the checkpoint that overtake
each other (test_holds_explored has these), and the end of a resource whose plugin has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CheckpointFile, replace
from tests.world.devicemanager import AdmissionError, Allocation, DeviceManager, Failure, rpc
from tests.world.eventlog import Event, EventLog
from tests.world.node import SimulatedNode
from tests.world.pods import Pod, Pods

__all__ = ["AdmissionError", "Allocation", "Event", "Kubelet"]

SANDBOX_SECONDS = 0.11  # at least, from a pod's admission to its first PreStartContainer (measured)
BACK_OFF = 0.2  # seconds until a container is tried again (the original: 0.2 to 15 s)


class Kubelet(EventLog, rpc.RegistrationServicer):  # type: ignore[misc]
    """A kubelet that serves in `directory`, and the pods of its node.

    Its end forgets all but the checkpoint; pods run on. When all resources are listed again, or
    after `pods_come` seconds (the original: 0.8), a start admits the existing pods again, and kills
    those that it rejects (`killed`). `host` shows pods' processes. Methods take a pod's name, for
    the latest pod of that name, or its UID.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        on_event: Callable[[Event], None] | None = None,
        pods_come: float = 5.0,
        host: SimulatedNode | None = None,
    ) -> None:
        super().__init__(on_event)
        self.directory = Path(directory)
        self.socket = self.directory / "kubelet.sock"
        self.file = CheckpointFile(self.directory)
        self.alive = False
        self.killed: list[str] = []  # running pods that a start did not admit again
        self._server: grpc.aio.Server | None = None
        self._faults: list[tuple[float, str]] = []  # seconds and text, of the next Registers

        # The pods of the node, and what this kubelet, in its latest life, knows of them.
        self.pods = Pods(host, self)
        self.manager = DeviceManager(self.directory, self, self.file, self.pods)
        self.pods_come = pods_come
        self._admission = asyncio.Lock()
        self._learning: asyncio.Task[None] | None = None  # of the API server's pods
        self._starts: dict[Pod, asyncio.Task[None]] = {}  # of containers

    async def __aenter__(self) -> Kubelet:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Questions

    async def registered(self, resource: str) -> None:
        """Wait until a plugin of the resource is connected and has sent its first list."""
        what = f"the first list of {resource}"
        await self.wait_for(lambda: self.manager.is_listed(resource), what=what)

    def capacity(self) -> dict[str, int]:
        return {resource: len(ids) for resource, ids in self.manager.listed.items()}

    def allocatable(self) -> dict[str, int]:
        """Return the number of healthy devices by resource, whether they are allocated or not."""
        return {resource: len(self.healthy(resource)) for resource in self.manager.listed}

    def healthy(self, resource: str) -> frozenset[str]:
        """Return the IDs that are listed as healthy, none after the end of the stream."""
        return frozenset(self.manager.healthy(resource))

    def unhealthy(self, resource: str) -> frozenset[str]:
        return frozenset(self.manager.listed.get(resource, ())) - self.healthy(resource)

    def allocated(self, resource: str) -> frozenset[str]:
        return frozenset(self.manager.allocated.get(resource, ()))

    def uid(self, pod: str) -> str:
        return self.pods.get(pod).uid

    def allocation(self, pod: str, container: str = "main") -> Allocation:
        """Return a container's devices, as the kubelet remembers them."""
        return self.manager.edits(self.uid(pod))

    async def running(self, pod: str, container: str = "main") -> None:
        """Wait until a container runs."""
        await self.wait_for(lambda: self.pods.get(pod).has_containers, what=f"{pod} to run")

    # Faults

    def corrupt(self, how: Literal["missing", "garbage"]) -> None:
        """Let a start find no checkpoint, or a damaged one, if nothing is written until then."""
        if how == "missing":
            self.file.path.unlink(missing_ok=True)
        else:
            replace(self.file.path, random.Random(1).randbytes(512))

    def refuse_with(self, message: str, times: int) -> None:
        """Let the next `times` calls of Register fail."""
        self._faults += times * [(0.0, message)]

    def hang(self, seconds: float) -> None:
        """Delay the next call of Register."""
        self._faults.append((seconds, ""))

    # Life

    async def start(self) -> None:
        """Read the checkpoint, empty the directory, make `kubelet.sock`, and answer on it."""
        assert not self._server
        self.alive = True
        self.pods.sources_ready = False
        for pod in self.pods:
            pod.known = False
        self.pods.make_roots()
        former = {*self.manager.listed}
        self.manager = DeviceManager(self.directory, self, self.file, self.pods)

        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)  # for the checkpoint
        self.manager.read_checkpoint()
        for path in self.directory.iterdir():
            if path.is_socket():  # of plugins
                path.unlink(missing_ok=True)  # its owner may have been faster

        # gRPC deletes the path that it bound when it stops, and a killed kubelet deletes nothing.
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        with tempfile.TemporaryDirectory(prefix=".kubelet-", dir=self.directory.parent) as private:
            self._server.add_insecure_port(f"unix:{private}/s")
            os.rename(f"{private}/s", self.socket)  # its ctime never changes afterwards
        self.record("started")

        # The checkpoint can be lost.
        resources = former | self.manager.listed.keys()
        self._learning = asyncio.create_task(self._hear_of_pods(resources))
        await self._server.start()

    async def stop(self) -> None:
        """End it for good, without a `kubelet.sock`."""
        await self._end()
        self.socket.unlink(missing_ok=True)
        self.record("stopped")

    async def kill(self) -> None:
        """Leave what SIGKILL, SIGTERM and a crash leave: a `kubelet.sock` that refuses."""
        await self._end()
        self.record("killed")

    async def restart(self) -> None:
        """Restart the kubelet; the pods run on."""
        await self.kill()
        await self.start()

    async def power_cut(self) -> None:
        """Kill it and end all processes of the node; `start` is then a reboot."""
        await self.kill()
        self.pods.lose_power()

    async def _end(self) -> None:
        self.alive = False
        ending = [*self._starts.values(), *filter(None, [self._learning])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

        server, self._server = self._server, None
        if server:
            await server.stop(None)
        await self.manager.abandon()

    async def drop_streams(self) -> None:
        """Break the connections to plugins from this side, as after an error on a stream."""
        await self.manager.drop()

    # The `Registration` service

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        """Errors reach the plugin as UNKNOWN, with their text."""
        resource = request.resource_name
        self.record("register", resource=resource)
        delay, message = self._faults.pop(0) if self._faults else (0.0, "")

        try:
            await asyncio.sleep(delay)
            if message:
                raise Failure(message)
            await self.manager.register(request)
        except Failure as failure:
            self.record("refused", resource=resource, message=str(failure))
            await context.abort(grpc.StatusCode.UNKNOWN, str(failure))

        self.record("registered", resource=resource)
        return pb.Empty()

    # Admission

    async def _hear_of_pods(self, resources: set[str]) -> None:
        """Admit the existing pods, the oldest first, also those that run.

        A running pod that is not admitted is killed (HandlePodAdditions and rejectPod of
        pkg/kubelet/kubelet.go, 1.33 to 1.37; its containers are orphans for HandlePodCleanups).
        """

        def plugins_are_back() -> bool:
            return all(map(self.manager.is_listed, resources))

        with contextlib.suppress(TimeoutError):
            await self.wait_for(plugins_are_back, self.pods_come)

        for pod in [each for each in self.pods if each.wanted]:
            if not pod.over:
                with contextlib.suppress(AdmissionError):
                    await self._admit(pod, is_running=pod.has_containers)
        self.pods.sources_ready = True
        self.record("sources-ready")

    async def admit(self, pod: str, container: str, request: Mapping[str, int]) -> Allocation:
        """Admit a pod, which is then started in the background. Raises AdmissionError.

        A pod that has ended, or was deleted, is followed by a new one, with another UID.
        """
        assert self._learning and self.alive
        await asyncio.wait({self._learning})  # older pods come first

        found = self.pods.get_or_add(pod)
        found.container, found.request = container, dict(request)
        return await self._admit(found)

    async def run_pod(self, pod: str, resource: str, number: int = 1) -> Allocation:
        """Have a pod's container `main` run with so many devices; first wait for the resource."""
        await self.registered(resource)
        allocation = await self.admit(pod, "main", {resource: number})
        await self.running(pod)
        return allocation

    async def _admit(self, pod: Pod, is_running: bool = False) -> Allocation:
        """Admit one pod at a time, or reject it, and kill it if it runs."""
        manager = self.manager
        async with self._admission:
            pod.known = True
            try:
                allocation = await manager.admit(pod, is_running)
            except AdmissionError as error:
                if self.manager is manager and self.alive:  # else its next start admits it again
                    reason, message = error.args
                    self.record("rejected", pod=pod.name, reason=reason, message=message)
                    self.killed += [pod.name] * pod.has_containers
                    self._terminate(pod)
                raise

            self.record("admitted", pod=pod.name, env=allocation.envs)
            self._work(pod)
        return allocation

    # Starts of containers

    def _work(self, pod: Pod) -> None:
        """Start the container of an admitted pod, if it does not run, and has not ended."""
        former = self._starts.get(pod)
        if not pod.has_containers and not pod.ending and (not former or former.done()):
            self._starts[pod] = asyncio.create_task(self._start(pod))

    async def _start(self, pod: Pod) -> None:
        """Make the pod's cgroup and sandbox; then try to start its container until it runs."""
        if not pod.has_cgroup:
            pod.has_cgroup = True
            self.pods.show(pod)
            await asyncio.sleep(SANDBOX_SECONDS)
        while not await self._has_started(pod):
            await asyncio.sleep(BACK_OFF)

    async def _has_started(self, pod: Pod) -> bool:
        """Try to start a pod's container; returns whether there is no more to do."""
        pod.calling = True
        try:
            allocation = await self.manager.prepare(pod)
            if not pod.ending:
                self.pods.start(pod, allocation)
                self.record("running", pod=pod.name)
        except (Failure, FileNotFoundError) as error:
            self.record("not-started", pod=pod.name, message=str(error))
        finally:
            pod.calling = False
        return pod.has_containers or pod.ending or not self.alive

    # Ends of pods

    def _leave(self, pod: Pod, then: Callable[[], None]) -> None:
        """Start the pod's container no more, and call `then` after that.

        A pod's worker does one thing after the other, and the deletion of its pod does not cancel
        PreStartContainer (measured with 1.33 and 1.37): the pod stays until that has returned.
        """
        pod.ending = True
        task = self._starts.get(pod)
        if task and pod.calling:
            task.add_done_callback(lambda _: then())
            return
        if task:
            task.cancel()
        then()

    def _terminate(self, pod: Pod) -> None:
        """End container, then sandbox, then cgroup, once the container is not being started."""

        def finish() -> None:
            pod.over, pod.has_cgroup, pod.allocation = True, False, None
            self.pods.show(pod)

        self._leave(pod, finish)

    def delete(self, pod: str) -> None:
        """Delete a pod in an orderly manner: container, then cgroup, then object."""
        if found := self._unwanted(pod):
            self._terminate(found)

    def force_delete(self, pod: str) -> None:
        """Delete a pod's object at once; its container runs on until `end`."""
        if found := self._unwanted(pod):
            found.known = False
            self._leave(found, lambda: None)

    def _unwanted(self, name: str) -> Pod | None:
        """Delete a pod's object; returns the pod if a kubelet runs, which does the rest."""
        pod = self.pods.get(name)
        pod.wanted = False
        self.record("deleted", pod=pod.name)
        return pod if self.alive else None

    async def remove_pod(self, pod: str) -> None:
        """Delete a pod, and let the device manager forget it and write that down at once."""
        self.delete(pod)
        self.manager.prune()
        await self.manager.write_checkpoint()

    def end(self, pod: str) -> None:
        """End a pod's container for good, and remove its cgroup; its object, if any, stays."""
        running = [p for p in self.pods if pod in (p.name, p.uid) and p.has_containers]
        self._terminate(running[0] if running else self.pods.get(pod))

    def crash(self, pod: str, container: str = "main") -> None:
        """End a container; it is started again, with PreStartContainer and without Allocate."""
        found = self.pods.get(pod)
        found.allocation = None
        if self.alive and found.known:
            self._work(found)
