"""The reference kubelet's device manager: plugins, their lists, and what containers get of them.

It follows `pkg/kubelet/cm/devicemanager` of Kubernetes; functions are named as in 1.37.1.
One `DeviceManager` is one life of a kubelet: a restart makes another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.world.checkpoint import CheckpointFile, Entry, Snapshot
from tests.world.eventlog import EventLog

if TYPE_CHECKING:
    from tests.world.pods import Pod, Pods

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

HEALTHY = "Healthy"
DIAL_TIMEOUT = 10.0  # seconds for a plugin that registers before it serves
T = TypeVar("T")


class Failure(Exception):
    """A plain `error` of the original: Register answers UNKNOWN, admission wraps it."""


class AdmissionError(Exception):
    """A rejected pod: UnexpectedAdmissionError or OutOf<resource>, and `kubectl`'s message."""


def numa_nodes(device: pb.Device) -> list[int]:
    return [node.ID for node in device.topology.nodes]


class Client:
    """The connection to a plugin's socket, with the ListAndWatch stream on it."""

    def __init__(self, resource: str, path: str) -> None:
        self.resource = resource
        self.path = path
        self.options = pb.DevicePluginOptions()
        self.has_listed = False  # a list has come on the stream
        self.closed = False

        # As in Go, connections share nothing: an older socket's back-off must not delay this one.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)
        self.stub = rpc.DevicePluginStub(self._channel)

    async def call(self, method: str, request: Any, **options: Any) -> Any:
        """Return the answer to a call. Raises Failure, also if closing the client cancelled it."""
        if self.closed:
            raise Failure(f"endpoint {self.resource} has been stopped")
        try:
            return await getattr(self.stub, method)(request, **options)
        except grpc.aio.AioRpcError as error:
            code = error.code().name.title().replace("_", "")
            raise Failure(f"rpc error: code = {code} desc = {error.details()}") from error
        except asyncio.CancelledError:
            if not self.closed:
                raise
            raise Failure("rpc error: code = Canceled desc = the client is closing") from None

    async def close(self) -> None:
        self.closed = True
        await self._channel.close()


class Plugins:
    """The plugins that have registered, their streams, and the devices that they have listed.

    It is as strict as two generations of kubelets together. Before 1.37 there is one connection per
    resource: when any stream of the resource ends, the newest connection is closed, so a plugin
    that registers again first and ends its old stream afterwards loses both. Since 1.37 there is
    one per socket: registering a connected socket is refused.
    """

    def __init__(self, directory: Path, log: EventLog) -> None:
        self.clients: dict[str, Client] = {}  # the newest of each resource
        self.listed: dict[str, dict[str, pb.Device]] = {}  # the latest list of each resource
        self.streams: dict[Client, asyncio.Task[None]] = {}  # whose end has not been noticed
        self._directory = directory
        self._log = log

    async def write_checkpoint(self) -> None:
        """Write down what has been listed."""
        raise NotImplementedError

    def is_listed(self, resource: str) -> bool:
        """Return whether a plugin of the resource is connected and has sent its first list."""
        client = self.clients.get(resource)
        return client is not None and client.has_listed and not client.closed

    def healthy(self, resource: str) -> set[str]:
        """Return the devices that are listed as healthy, none after the end of the stream."""
        listed = self.listed.get(resource, {}) if self.is_listed(resource) else {}
        return {ident for ident, device in listed.items() if device.health == HEALTHY}

    # Registration

    async def register(self, request: pb.RegisterRequest) -> None:
        """Answer a plugin's Register; raises Failure where the original returns an error."""
        if request.version != "v1beta1":
            raise Failure(f"requested API version {request.version!r} is not supported by kubelet")

        client = Client(request.resource_name, f"{self._directory}/{request.endpoint}")
        try:
            await self._connect(client, request)
        except BaseException:
            await client.close()
            raise

        # Register is answered before the first list comes. The former client is not closed.
        self.clients[client.resource] = client
        self.streams[client] = asyncio.create_task(self._follow(client))
        self.streams[client].add_done_callback(lambda _: self.streams.pop(client))

    async def _connect(self, client: Client, request: pb.RegisterRequest) -> None:
        """Dial back and ask for the options, all within the plugin's call of Register."""
        with socket.socket(socket.AF_UNIX) as probe:
            is_early = probe.connect_ex(client.path) != 0
        if is_early:
            self._log.record("early", resource=client.resource)
        dial = {"wait_for_ready": True, "timeout": DIAL_TIMEOUT}
        client.options = await client.call("GetDevicePluginOptions", pb.Empty(), **dial)

        if is_early:  # gRPC has tried again, after a second
            self._log.violation(f"{client.resource} registers before it serves")
        if request.options != client.options:
            self._log.violation(f"{client.resource} registers other options than it answers")
        if any(each.path == client.path for each in self.streams):
            self._log.violation(f"{client.resource} registers again while it is connected")
            raise Failure(f"device plugin already connected: {client.path}")

    # Streams

    async def _follow(self, client: Client) -> None:
        """Follow a ListAndWatch stream to its end, then close the connection that this ends."""
        closed = (asyncio.CancelledError, grpc.aio.UsageError)  # by the kubelet
        with contextlib.suppress(grpc.aio.AioRpcError, *closed):
            async for response in client.stub.ListAndWatch(pb.Empty()):
                await self._receive(client, response)
        self._log.record("ended", resource=client.resource)

        # The original looks the connection up again, and may find a newer one.
        newest = self.clients[client.resource]
        if newest is not client and not newest.closed:
            text = "ended a stream after registering again: both are lost"
            self._log.violation(f"{client.resource} {text}")
        await newest.close()
        await client.close()

    async def _receive(self, client: Client, response: pb.ListAndWatchResponse) -> None:
        """Replace the resource's list and write the checkpoint, even if nothing has changed."""
        resource = client.resource
        listed = {device.ID: device for device in response.devices}
        nodes = [node for device in response.devices for node in numa_nodes(device)]
        if len(listed) < len(response.devices) or any(node < 0 for node in nodes):
            self._log.violation(f"{resource} lists an ID twice, or a negative NUMA node")

        self.listed[resource] = listed
        client.has_listed = True
        await self.write_checkpoint()

        healthy = self.healthy(resource)
        ids = {"healthy_ids": sorted(healthy), "unhealthy_ids": sorted(listed.keys() - healthy)}
        self._log.record("list", resource=resource, **ids)

    async def drop(self) -> None:
        """Break all connections, as after an error on each stream."""
        for client in [*self.clients.values()]:
            await client.close()

    async def abandon(self) -> None:
        """End all connections, as the end of the process does."""
        await self.drop()
        streams = [*self.streams.values()]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


class Allocation(NamedTuple):
    """A container's devices, and the plugins' answers to Allocate, merged."""

    entries: dict[str, Entry]  # by resource
    envs: dict[str, str]
    mounts: list[pb.Mount]
    devices: list[pb.DeviceSpec]

    @property
    def ids(self) -> dict[str, frozenset[str]]:
        return {resource: frozenset(entry.ids) for resource, entry in self.entries.items()}


class DeviceManager(Plugins):
    """The device manager in one life of the kubelet."""

    def __init__(self, directory: Path, log: EventLog, file: CheckpointFile, desired: Pods) -> None:
        super().__init__(directory, log)
        self.entries: list[Entry] = []
        self.allocated: dict[str, set[str]] = {}  # by resource; also what is just being allocated
        self._file = file
        self._desired = desired
        self._random = random.Random(1)

    def of(self, uid: str) -> dict[str, Entry]:
        """Return the devices of a pod, by resource."""
        return {entry.resource: entry for entry in self.entries if entry.uid == uid}

    def recount(self) -> None:
        """Mark exactly those devices allocated that a pod has."""
        self.allocated = {}
        for entry in self.entries:
            self.allocated.setdefault(entry.resource, set()).update(entry.ids)

    def _shuffled(self, items: Iterable[T]) -> list[T]:
        """Return the items in an order that no plugin can rely on, as Go's maps have none."""
        ordered = sorted(items, key=repr)
        return self._random.sample(ordered, len(ordered))

    async def write_checkpoint(self) -> None:
        """Write the checkpoint; returns when it is there."""
        resources = self.listed
        registered = {each: self._shuffled(self.healthy(each)) for each in resources}
        self._file.write(Snapshot(self._shuffled(self.entries), registered))

    def read_checkpoint(self) -> None:
        """Read which pod has which devices; resources stay empty until a plugin registers."""
        snapshot = self._file.read()
        self.entries = [*snapshot.entries]
        self.recount()
        self.listed = {resource: {} for resource in snapshot.registered}

    def prune(self) -> None:
        """Forget pods that have ended, in memory only (UpdateAllocatedDevices())."""
        active = self._desired.active()
        kept = [entry for entry in self.entries if entry.uid in active]
        if self._desired.sources_ready and kept != self.entries:
            self.entries = kept
            self.recount()

    def edits(self, uid: str) -> Allocation:
        """Merge the answers for a pod's resources."""
        entries, answer = self.of(uid), pb.ContainerAllocateResponse()
        for each in entries.values():
            answer.MergeFrom(each.answer)
        return Allocation(entries, {**answer.envs}, [*answer.mounts], [*answer.devices])

    def _dereference(self, resource: str, ids: Iterable[str]) -> None:
        """Use devices that a pod has, or is just getting.

        Since 1.34 the original dies of one that is not listed: it holds pointers, which
        generateDeviceTopologyHints and allocateContainerResources do not check.
        """
        for ident in {*ids} - self.listed.get(resource, {}).keys():
            text = f"{resource} does not list {ident!r}, which a pod has or is just getting"
            self._log.violation(text)

    # Admission

    async def admit(self, pod: Pod, is_running: bool = False) -> Allocation:
        """Give a pod, that may be running already, the devices that it requests.

        Raises AdmissionError. A resource that no plugin has registered, and no pod has, is ignored.
        """
        self.prune()
        known = {*self.listed, *self.allocated}

        # The Topology Manager asks about them (GetTopologyHints()), with every policy but `none`.
        for resource, entry in self.of(pod.uid).items():
            if any(map(numa_nodes, self.listed.get(resource, {}).values())):
                self._dereference(resource, entry.ids)

        is_new = False
        try:
            # If one of several resources fails, the answers for the others stay in memory.
            for resource in [] if is_running else self._shuffled(known & pod.request.keys()):
                if ids := await self._choose(pod, resource, pod.request[resource]):
                    await self._allocate(pod, resource, ids)
                    is_new = True
        except Failure as failure:
            message = f"Allocate failed due to {failure}, which is unexpected"
            raise AdmissionError("UnexpectedAdmissionError", message) from failure

        if is_new:
            await self.write_checkpoint()
        self._check_fit(pod)
        return self.edits(pod.uid)

    def _check_fit(self, pod: Pod) -> None:
        """Raise AdmissionError if a pod's request does not fit beside those of others.

        Every pod must pass, also one that runs (pkg/kubelet/lifecycle/predicate.go, 1.33 to 1.37).
        Allocatable are the healthy devices; if the pod has devices, at least the number of
        allocated ones: so an intact checkpoint saves a pod whose device is Unhealthy.
        """
        others = [other for other in self._desired.active().values() if other is not pod]
        for resource, requested in pod.request.items():
            used = sum(other.request.get(resource, 0) for other in others)
            allocatable = len(self.healthy(resource))
            if self.of(pod.uid):
                allocatable = max(allocatable, len(self.allocated.get(resource, ())))

            if resource in self.listed and requested > max(0, allocatable - used):
                numbers = f"requested: {requested}, used: {used}, capacity: {allocatable}"
                text = f"Node didn't have enough resource: {resource}, {numbers}"
                raise AdmissionError(f"OutOf{resource}", text)

    async def _choose(self, pod: Pod, resource: str, required: int) -> set[str]:
        """Return the devices to be allocated; none if the pod has all (devicesToAllocate()).

        After a reboot pods are admitted whether their plugins have registered or not, and the
        checks of health reject those whose plugin is late.
        """
        entry = self.of(pod.uid).get(resource)
        have = entry.ids if entry else set()
        healthy = self.healthy(resource)
        unhealthy = f"cannot allocate unhealthy devices {resource}"
        if not healthy:
            raise Failure(f"no healthy devices present; {unhealthy}")
        if not have <= healthy:
            raise Failure(f"previously allocated devices are no longer healthy; {unhealthy}")
        if required <= len(have):
            return set()

        taken = self.allocated.setdefault(resource, set())
        available = healthy - taken
        if len(available) < required:
            numbers = f"Requested: {required}, Available: {len(available)}"
            raise Failure(f"requested number of devices unavailable for {resource}. {numbers}")

        preferred = await self._prefer(resource, available, required)
        others = self._shuffled(available - preferred)
        chosen = [*self._shuffled(preferred & available), *others][:required]
        taken.update(chosen)
        return {*chosen}

    async def _prefer(self, resource: str, available: set[str], size: int) -> set[str]:
        """Return the plugin's preference, if it has one."""
        client = self.clients[resource]
        if not client.options.get_preferred_allocation_available:
            return set()

        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=self._shuffled(available), allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[question])
        response = await client.call("GetPreferredAllocation", request)

        (answer,) = response.container_responses
        ids = {*answer.deviceIDs}
        if not len(answer.deviceIDs) == len(ids) == size or not ids <= available:
            self._log.violation(f"{resource} prefers {answer.deviceIDs}, not {size} available ones")
        return ids

    async def _allocate(self, pod: Pod, resource: str, ids: set[str]) -> None:
        """Call Allocate, and remember the answer."""
        container = pb.ContainerAllocateRequest(devices_ids=self._shuffled(ids))
        request = pb.AllocateRequest(container_requests=[container])
        try:
            response = await self.clients[resource].call("Allocate", request)
        except Failure:
            self.recount()
            raise
        (answer,) = response.container_responses

        # The list can have changed meanwhile. A device on two NUMA nodes stands in both lists.
        self._dereference(resource, ids)
        listed = self.listed[resource]
        per_node: dict[int, list[str]] = {}
        for ident in self._shuffled(ids):
            for node in numa_nodes(listed.get(ident, pb.Device())) or [-1]:
                per_node.setdefault(node, []).append(ident)

        self.entries.append(Entry(pod.uid, pod.container, resource, per_node, answer))

    async def prepare(self, pod: Pod) -> Allocation:
        """Call PreStartContainer if a plugin requires it (GetDeviceRunContainerOptions()).

        Raises Failure: the container cannot start.
        """
        edits = self.edits(pod.uid)
        for resource in self._shuffled(r for r, number in pod.request.items() if number):
            client = self.clients.get(resource)
            if not client or not client.options.pre_start_required:
                continue
            if resource not in edits.ids:
                text = "no devices found allocated in local cache"
                raise Failure(f"{text} for pod {pod.uid}, resource {resource}")

            ids = self._shuffled(edits.ids[resource])
            who = {"resource": resource, "pod": pod.name, "ids": ids}
            request = pb.PreStartContainerRequest(devices_ids=ids)
            self._log.record("prestarting", **who)
            await client.call("PreStartContainer", request, timeout=30.0)  # others: no deadline
            self._log.record("prestart", **who)
        return edits
