"""A reference kubelet: its side of the device plugin API.

It is as strict as Kubernetes 1.36 and 1.37 together, errors included, over real gRPC on real
sockets. Tests can also kill it, restart it and make it fail. `Kubelet.violations`
lists what the original tolerates or fails of but a correct plugin never does, and every moment at
which two pods run with one chip; tests assert that it stays empty. What the daemon's tests say here
of pods, checkpoints and restarts, tests.e2e says of the originals.

Its parts: eventlog, plugins (connections), devicemanager, checkpoint, pods.

Left out: the scheduler, all predicates except the one of extended resources, the plugin watcher,
the alignment of devices by the Topology Manager, the crash by an ID that is not listed (it is a
violation here), static pods, an API server that is away, writes of the checkpoint that overtake
each other (test_holds_explored has these), the removal of a resource five minutes after its plugin
has gone, GetAllocatableResources, and the second Allocate for a container whose devices are lost
and whose plugin does not require PreStartContainer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CHECKPOINT, CheckpointFile, Corruption
from tests.world.devicemanager import (
    AdmissionError,
    Allocation,
    ContainerDevices,
    DeviceManager,
    check_fit,
)
from tests.world.eventlog import Event, EventLog
from tests.world.node import SimulatedNode
from tests.world.plugins import Config, Failure, rpc
from tests.world.pods import Container, Judge, Pod, Pods, Runtime, Worker
from tests.world.processes import PATIENCE

__all__ = ["CHECKPOINT", "AdmissionError", "Allocation", "Event", "Kubelet"]

T = TypeVar("T")


class KubeletDied(Exception):
    """The kubelet died during an admission; its next start repeats the admission."""


@dataclass(slots=True)
class Fault:
    """A delay or an error for the next calls of Register."""

    times: float
    seconds: float = 0.0
    code: grpc.StatusCode | None = None
    message: str = ""


class Kubelet:
    """A kubelet that serves in `directory`, and the pods of its node.

    Stopping or killing it forgets all but the checkpoint; pods run on. A kubelet that starts admits
    the existing pods again, and kills those that it rejects (`killed`): when all resources are
    listed again (see `plugins_are_back`), or after `pods_come` seconds (the original: 0.8 s after
    `kubelet.sock` exists). Until then no pod is forgotten. `host` shows pods' processes.

    Methods that name a pod take its name, for the latest pod of that name, or its UID.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        on_event: Callable[[Event], None] | None = None,
        pods_come: float = 5.0,
        host: SimulatedNode | None = None,
    ) -> None:
        log = EventLog(on_event)
        self.config = Config(Path(directory), random.Random(1))
        self.directory = self.config.directory
        self.socket = self.directory / "kubelet.sock"
        self.file = CheckpointFile(self.directory)
        self.alive = False
        self._server: grpc.aio.Server | None = None

        # What happens.
        self.log = log
        self.find = log.find
        self.events = log.events
        self.violations = log.violations  # what no correct plugin causes
        self.killed: list[str] = []  # running pods that a start did not admit again
        self.faults: list[Fault] = []  # in the order in which calls meet them

        # The pods of the node, and what this kubelet, in its latest life, knows of them.
        self.pods = Pods()
        self.manager = DeviceManager(self.config, log, self.file, self.pods)
        self.pods_come = pods_come
        self.plugins_are_back: Callable[[], bool] = self._lists_all_of_its_former_life
        self._former: set[str] = set()  # resources of the former life
        self._admission = asyncio.Lock()
        self._learning: asyncio.Task[None] | None = None  # of the API server's pods

        # Their containers.
        self.runtime = Runtime(host, Judge(log))
        self._workers: dict[Pod, Worker] = {}
        self._keeps_cgroups = False
        self._empty: list[Pod] = []  # ended pods whose cgroups still exist

    async def __aenter__(self) -> Kubelet:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # Questions

    async def wait_for(
        self, predicate: Callable[[], T], timeout: float = PATIENCE, what: str = "an event"
    ) -> T:
        """Return the predicate's first true value; it is evaluated again after every event."""
        return await self.log.wait_for(predicate, timeout, what)

    async def registered(self, resource: str) -> None:
        """Wait until a plugin of the resource is connected and has sent its first list."""
        what = f"the first list of {resource}"
        await self.wait_for(lambda: self.manager.plugins.is_listed(resource), what=what)

    def capacity(self) -> dict[str, int]:
        return {resource: capacity for resource, (capacity, _) in self.manager.status().items()}

    def allocatable(self) -> dict[str, int]:
        """Return the number of healthy devices by resource, whether they are allocated or not."""
        return {resource: healthy for resource, (_, healthy) in self.manager.status().items()}

    def healthy(self, resource: str) -> frozenset[str]:
        """Return the IDs that are listed as healthy, none after the end of the stream."""
        return frozenset(self.manager.devices.healthy.get(resource, ()))

    def unhealthy(self, resource: str) -> frozenset[str]:
        return frozenset(self.manager.devices.unhealthy.get(resource, ()))

    def allocated(self, resource: str) -> frozenset[str]:
        return frozenset(self.manager.pods.allocated.get(resource, ()))

    def uid(self, pod: str) -> str:
        return self.pods.get(pod).uid

    def allocation(self, pod: str, container: str) -> Allocation:
        """Return a container's devices, as the kubelet remembers them."""
        return self.manager.edits(self.uid(pod), container)

    async def running(self, pod: str, container: str) -> None:
        """Wait until a container runs."""
        await self.wait_for(lambda: self.pods.get(pod).containers[container].pid is not None)

    # Faults

    def refuse_with(
        self, code: grpc.StatusCode, message: str = "refused", times: float = 1
    ) -> None:
        """Let the next `times` calls of Register fail."""
        self.faults.append(Fault(times, code=code, message=message))

    def hang(self, seconds: float, times: float = 1) -> None:
        """Delay the next `times` calls of Register."""
        self.faults.append(Fault(times, seconds=seconds))

    async def meet_fault(self) -> Fault | None:
        """Return the fault of a call that has just arrived, after its delay."""
        fault = self.faults[0] if self.faults else None
        if fault:
            fault.times -= 1
            if fault.times < 1:
                self.faults.remove(fault)
            await asyncio.sleep(fault.seconds)
        return fault

    def corrupt(self, how: Corruption | bytes) -> None:
        """Damage the checkpoint, or replace it by these bytes, until the next write."""
        self.file.corrupt(how)

    # Life

    async def start(self) -> None:
        """Read the checkpoint, empty the directory, make `kubelet.sock`, and answer on it."""
        if self._server:
            raise RuntimeError("the kubelet runs already")
        self.pods.forget()
        self.alive = True
        self.runtime.make_roots()
        self._former.update(self.manager.devices.healthy)
        self.manager = DeviceManager(self.config, self.log, self.file, self.pods)

        # 0755: the checkpoint's store makes the directory before the registration server would make
        # it 0750.
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self.manager.read_checkpoint()
        for path in self.directory.iterdir():
            if path.is_socket():  # of plugins
                path.unlink(missing_ok=True)  # its owner may have been faster

        # gRPC deletes the path that it bound when it stops, and a killed kubelet deletes nothing.
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(_Registration(self), self._server)
        with tempfile.TemporaryDirectory(prefix=".kubelet-", dir=self.directory.parent) as private:
            self._server.add_insecure_port(f"unix:{private}/s")
            os.rename(f"{private}/s", self.socket)  # its ctime never changes afterwards
        self.log.record("started", socket=str(self.socket))

        self._learning = asyncio.create_task(self._hear_of_pods())
        await self._server.start()

    async def stop(self) -> None:
        """End it for good, without a `kubelet.sock`."""
        await self._end()
        self.socket.unlink(missing_ok=True)
        self.log.record("stopped")

    async def kill(self) -> None:
        """Leave what SIGKILL, SIGTERM and a crash leave: a `kubelet.sock` that refuses."""
        await self._end()
        self.log.record("killed")

    async def restart(self) -> None:
        """Restart the kubelet; the pods run on."""
        await self.kill()
        await self.start()

    async def power_cut(self) -> None:
        """Kill it and end all processes of the node; `start` is then a reboot."""
        await self.kill()
        for pod in self.pods:
            self._stop_processes(pod)
        self._empty.clear()
        self.runtime.lose_power()

    async def _end(self) -> None:
        self.alive = False
        if self._learning:
            self._learning.cancel()
            await asyncio.wait({self._learning})

        ending = [worker.cancel() for worker in self._workers.values()]
        self._workers.clear()
        await asyncio.gather(*ending, return_exceptions=True)

        server, self._server = self._server, None
        if server:
            await server.stop(None)
        await self.manager.plugins.abandon()

    async def drop_streams(self) -> None:
        """Break the connections to plugins from this side, as after an error on a stream."""
        await self.manager.plugins.drop()

    # Learning of pods

    async def _hear_of_pods(self) -> None:
        with contextlib.suppress(TimeoutError):
            await self.wait_for(self.plugins_are_back, self.pods_come)
        self._former.clear()
        await self._admit_again()
        if self.alive:
            self.pods.sources_ready = True
            self.log.record("sources-ready")

    def _lists_all_of_its_former_life(self) -> bool:
        resources = {*self.manager.devices.healthy, *self._former}  # the checkpoint can be lost
        return all(map(self.manager.plugins.is_listed, resources))

    async def _admit_again(self) -> None:
        """Admit the existing pods, the oldest first, also those that run.

        A running pod that is not admitted is killed (HandlePodAdditions and rejectPod of
        pkg/kubelet/kubelet.go, 1.33 to 1.37; its containers are orphans for HandlePodCleanups).
        """
        for pod in [each for each in self.pods if each.wanted]:
            pod.known = True
            running = {c.name for c in pod.containers.values() if c.pid is not None}
            try:
                if not pod.over:
                    await self._admit(pod, list(pod.containers), running)
            except AdmissionError:
                continue
            except KubeletDied:
                return

    # Admission

    async def admit(self, pod: str, container: str, request: Mapping[str, int]) -> Allocation:
        """Admit a container of a pod, which is then started in the background, see `running`.

        Raises AdmissionError: the pod is rejected as a whole. A resource that the kubelet does not
        know is ignored. A pod that has ended, or was deleted, is followed by a new one of its name,
        with another UID.
        """
        if not self.alive:
            raise RuntimeError("the kubelet does not run")
        if self._learning:
            await asyncio.wait({self._learning})  # older pods come first

        found = self.pods.get_or_add(pod)
        found.containers.setdefault(container, Container(container)).request = dict(request)
        admitted = await self._admit(found, [container], set())
        return admitted[container]

    async def run_pod(self, pod: str, resource: str, number: int = 1) -> Allocation:
        """Have a pod's container `main` run with so many devices; first wait for the resource."""
        await self.registered(resource)
        allocation = await self.admit(pod, "main", {resource: number})
        await self.running(pod, "main")
        return allocation

    async def _admit(
        self, pod: Pod, containers: Sequence[str], running: set[str]
    ) -> dict[str, Allocation]:
        """Admit containers of a pod, one pod at a time; `running` names those that run already."""
        manager, admitted = self.manager, dict[str, Allocation]()
        async with self._admission:
            pod.known = True
            try:
                for name in containers:
                    container = pod.containers[name]
                    devices = ContainerDevices(manager, pod, container, name in running)
                    admitted[name] = await devices.admit()
                check_fit(manager, pod.uid, pod.request, self.pods.used_beside(pod))
            except AdmissionError as error:
                if self.manager is not manager or not self.alive:
                    raise KubeletDied(str(error)) from error
                self._reject(pod, error)
                raise

            for name, allocation in admitted.items():
                self.log.record("admitted", pod=pod.name, container=name, **allocation.fields())
            self._work(pod)
        return admitted

    def _reject(self, pod: Pod, error: AdmissionError) -> None:
        """Reject a pod as a whole, and kill it if it runs."""
        about = {"pod": pod.name, "reason": error.reason, "message": error.message}
        self.log.record("rejected", **about)
        if pod.has_containers:
            self.killed.append(pod.name)
            self.log.record("pod-killed", **about)

        self._terminate(pod)
        pod.over = True

    # Starts and ends of pods, which outlive the kubelet

    def _work(self, pod: Pod) -> None:
        """Start those containers of an admitted pod that do not run yet."""
        if worker := self._workers.get(pod):
            worker.wake()
            return

        self._workers[pod] = Worker(pod, self.runtime, self.log, self._prepare)

    async def _prepare(self, pod: Pod, container: Container) -> Allocation:
        return await ContainerDevices(self.manager, pod, container).prepare()

    def _stop_processes(self, pod: Pod) -> None:
        for container in pod.containers.values():
            self.runtime.stop(pod, container)
        self.runtime.stop_sandbox(pod)

    def _terminate(self, pod: Pod, *, forget: bool = False) -> None:
        """End containers, then the sandbox, then the cgroup, once no container is being started."""

        def finish() -> None:
            self._stop_processes(pod)
            pod.over = True
            pod.known = pod.known and not forget
            self._empty.append(pod)
            self.keep_cgroups(self._keeps_cgroups)

        if worker := self._workers.pop(pod, None):
            worker.leave(finish)
        else:
            finish()

    def _leave_alone(self, pod: Pod) -> None:
        """Let the kubelet forget a pod, whose containers run on."""
        pod.known = False
        if worker := self._workers.pop(pod, None):
            worker.leave(lambda: None)

    def _delete(self, name: str, end: Callable[[Pod], None]) -> None:
        """Delete a pod's object; a kubelet that runs ends the pod like this."""
        pod = self.pods.get(name)
        pod.wanted = False
        self.log.record("deleted", pod=pod.name, uid=pod.uid)
        if self.alive:
            end(pod)

    def delete(self, pod: str) -> None:
        """Delete a pod in an orderly manner: containers end, its cgroup goes, then its object."""
        self._delete(pod, lambda found: self._terminate(found, forget=True))

    def force_delete(self, pod: str) -> None:
        """Delete a pod's object at once; containers run on until `end`."""
        self._delete(pod, self._leave_alone)

    async def remove_pod(self, pod: str) -> None:
        """Delete a pod, and let the device manager forget it and write that down at once."""
        self.delete(pod)
        self.manager.prune()
        await self.manager.write_checkpoint()

    def end(self, pod: str) -> None:
        """End the containers of a pod whose object is gone, and remove its cgroup."""
        self._terminate(self.pods.get_running(pod))

    def complete(self, pod: str) -> None:
        """Let a pod's containers end by themselves for good; its object stays."""
        self._terminate(self.pods.get(pod))

    def crash(self, pod: str, container: str) -> None:
        """End a container; it is started again, with PreStartContainer and without Allocate."""
        found = self.pods.get(pod)
        self.runtime.stop(found, found.containers[container])
        self.log.record("exited", pod=pod, container=container)
        if worker := self._workers.get(found):
            worker.wake()

    def keep_cgroups(self, kept: bool = True) -> None:
        """Keep the empty cgroups of pods that end, until not `kept`."""
        self._keeps_cgroups = kept
        if kept:
            return

        for pod in self._empty:
            self.runtime.remove_cgroup(pod)
        self._empty.clear()


# ---------------------------------------------------------------------------------- services


class _Registration:
    """The `Registration` service: errors reach the plugin as UNKNOWN, with their text."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        kubelet = self._kubelet
        who = {"resource": request.resource_name, "endpoint": request.endpoint}
        kubelet.log.record("register", **who)

        code: grpc.StatusCode | None = None
        try:
            if (fault := await kubelet.meet_fault()) and (code := fault.code):
                raise Failure(fault.message)
            await kubelet.manager.plugins.register(request)
        except Failure as failure:
            kubelet.log.record("refused", **who, message=str(failure))
            await context.abort(code or grpc.StatusCode.UNKNOWN, str(failure))

        kubelet.log.record("registered", **who)
        return pb.Empty()


# ------------------------------------------------------------------------------ as a process


async def _serve(directory: str) -> None:
    """Print events as JSON lines and obey lines `admit POD RESOURCE=N`, until a signal."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    kubelet = Kubelet(directory, on_event=lambda event: print(event.json(), flush=True))
    admissions = set()

    async def admit(pod: str, resource: str, number: str) -> None:
        with contextlib.suppress(AdmissionError):  # printed as "rejected"
            await kubelet.admit(pod, "main", {resource: int(number)})

    def read_lines() -> None:
        block = os.read(0, 4096)
        if not block:
            loop.remove_reader(0)
        for line in block.decode().splitlines():
            _, pod, wish = line.split()
            admissions.add(loop.create_task(admit(pod, *wish.split("="))))

    async with kubelet:
        loop.add_reader(0, read_lines)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[-1]))
