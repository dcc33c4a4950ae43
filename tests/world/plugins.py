"""The reference kubelet's connections to device plugins: registration, streams, lists.

It follows `pkg/kubelet/cm/devicemanager/plugin/v1beta1` and the parts of `manager.go` for these.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.world.eventlog import EventLog

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

HEALTHY = "Healthy"
DIAL_TIMEOUT = 10.0  # seconds for a plugin that registers before it serves
T = TypeVar("T")


@dataclass(slots=True)
class Config:
    """What distinguishes one kubelet from another."""

    directory: Path
    random: random.Random

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """Return the items in an order that no plugin can rely on, as Go's maps have none."""
        result = sorted(items, key=repr)
        self.random.shuffle(result)
        return result


class Failure(Exception):
    """A plain `error` of the original: Register answers UNKNOWN, admission wraps it."""


def numa_nodes(device: pb.Device | None) -> list[int]:
    """Return the NUMA nodes of a device; none of one that is not listed."""
    return [node.ID for node in device.topology.nodes] if device is not None else []


def is_extended_resource(name: str) -> bool:
    """Return whether a plugin may register a name: it must be an extended resource's."""
    if name.startswith("requests.") or "kubernetes.io/" in name or len(name) > 244 + 1 + 63:
        return False
    label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    rest = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    return re.fullmatch(rf"{label}(\.{label})*/{rest}", name) is not None


def _go_error(error: grpc.aio.AioRpcError) -> str:
    words = error.code().name.split("_")
    code = "".join(word.capitalize() for word in words).replace("Cancelled", "Canceled")
    return f"rpc error: code = {code} desc = {error.details()}"


@dataclass(eq=False, slots=True)
class Client:
    """The connection to a plugin's socket, and the ListAndWatch stream on it."""

    resource: str
    path: str
    channel: grpc.aio.Channel
    stub: Any
    has_listed: bool = False  # a list has come on the stream
    closed: bool = False

    @classmethod
    def to(cls, resource: str, path: str) -> Client:
        """Make a client for a plugin's socket; it connects with its first call."""
        # As in Go, connections share nothing: an older socket's back-off must not delay this one.
        options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.insecure_channel(f"unix:{path}", options=options)
        return cls(resource, path, channel, rpc.DevicePluginStub(channel))

    @property
    def name(self) -> str:
        """The socket's name, which the plugin has registered."""
        return os.path.basename(self.path)

    async def dial(self) -> None:
        """Wait until the plugin answers; if it serves late, gRPC tries again after a second."""
        while (state := self.channel.get_state(True)) is not grpc.ChannelConnectivity.READY:
            await self.channel.wait_for_state_change(state)

    async def close(self) -> None:
        self.closed = True
        await self.channel.close()

    async def answer(self, call: Any) -> Any:
        """Return the answer to a call. Raises Failure, also if closing the client cancelled it."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise Failure(_go_error(error)) from error
        except asyncio.CancelledError:
            if not self.closed:
                raise
            text = "rpc error: code = Canceled desc = grpc: the client connection is closing"
            raise Failure(text) from None


@dataclass(eq=False, slots=True)
class Endpoint:
    """The plugin that the kubelet calls for a resource."""

    client: Client | None = None  # None: known from the checkpoint only
    options: pb.DevicePluginOptions | None = None
    stopped: bool = False

    def running(self, resource: str) -> Client:
        if self.client is None or self.stopped:
            raise Failure(f"endpoint {resource} has been stopped")
        # Its stream ended, but another registration had made the kubelet forget it.
        if self.client.closed:
            raise Failure("rpc error: code = Unavailable desc = the plugin is gone")
        return self.client


class Devices:
    """The devices that plugins have listed, by resource."""

    def __init__(self) -> None:
        self.listed: dict[str, dict[str, pb.Device]] = {}
        self.healthy: dict[str, set[str]] = {}
        self.unhealthy: dict[str, set[str]] = {}

    def replace(self, resource: str, devices: Sequence[pb.Device]) -> None:
        self.listed[resource] = {device.ID: device for device in devices}
        self.healthy[resource] = {device.ID for device in devices if device.health == HEALTHY}
        self.unhealthy[resource] = {device.ID for device in devices if device.health != HEALTHY}

    def lose(self, resource: str) -> set[str]:
        """Make all devices of a resource unhealthy; returns those that were healthy."""
        lost = self.healthy.get(resource, set())
        self.unhealthy.setdefault(resource, set()).update(lost)
        self.healthy[resource] = set()
        return lost

    def get(self, resource: str, ident: str) -> pb.Device | None:
        return self.listed.get(resource, {}).get(ident)

    def has_topology(self, resource: str) -> bool:
        """Return whether any device of the resource has a NUMA node."""
        return any(numa_nodes(device) for device in self.listed.get(resource, {}).values())


def inspect_list(resource: str, devices: Sequence[pb.Device]) -> Iterator[str]:
    """Yield what the kubelet tolerates in a list, and no correct plugin sends."""
    seen: set[str] = set()
    for device in devices:
        what = f"{resource} lists device {device.ID!r}"
        if not 0 < len(device.ID) <= 63:
            yield f"{what}: an ID has 1 to 63 characters"
        if device.ID in seen:
            yield f"{what} twice"

        if device.health not in (HEALTHY, "Unhealthy"):
            yield f"{what} with health {device.health!r}"
        if any(node < 0 for node in numa_nodes(device)):
            yield f"{what} with a negative NUMA node"

        seen.add(device.ID)


def accepts(path: str) -> bool:
    """Return whether a unix socket accepts connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(path) in (0, errno.EAGAIN)


def refuse_impossible(request: pb.RegisterRequest) -> None:
    """Raise Failure for a registration that the kubelet refuses at once."""
    if request.version != "v1beta1":
        raise Failure(
            f"requested API version {json.dumps(request.version)} is not supported by kubelet. "
            'Supported version is ["v1beta1"]'
        )

    if not is_extended_resource(request.resource_name):
        raise Failure(f"the ResourceName {json.dumps(request.resource_name)} is invalid")


class Plugins:
    """The plugins that have registered, and their streams.

    It is as strict as two generations of kubelets together. Before 1.37 there is one connection per
    resource: when any stream of the resource ends, the newest connection is closed, so a plugin
    that registers again first and ends its old stream afterwards loses both. Since 1.37 there is
    one per socket: registering a connected socket is refused.
    """

    def __init__(
        self, config: Config, log: EventLog, devices: Devices, write: Callable[[], Awaitable[None]]
    ) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self._config = config
        self._log = log
        self._devices = devices
        self._write = write
        self._newest: dict[str, Client] = {}  # by resource
        self._streams: dict[Client, asyncio.Task[None]] = {}  # all that have not ended

    # Registration

    async def register(self, request: pb.RegisterRequest) -> None:
        """Answer a plugin's Register; raises Failure where the original returns an error."""
        resource = request.resource_name
        refuse_impossible(request)
        if not request.endpoint or "/" in request.endpoint:
            text = f"{resource} registers the endpoint {request.endpoint!r}, not a file name"
            self._log.violation(text)

        client = Client.to(resource, os.path.normpath(self._config.directory / request.endpoint))
        self._newest[resource] = client  # the former one is neither closed nor remembered
        try:
            await self._connect(client, request)
        except BaseException:
            self._newest.pop(resource, None)
            await client.close()
            raise

        # Register is answered before the first list comes.
        self._streams[client] = asyncio.create_task(self._follow(client))
        self._streams[client].add_done_callback(lambda _: self._streams.pop(client))

    async def _connect(self, client: Client, request: pb.RegisterRequest) -> None:
        """Dial back and ask for the options, all within the plugin's call of Register."""
        early = f"{client.resource} registers {client.path} before it serves there"
        is_missing = not os.path.exists(client.path)
        is_early = not accepts(client.path)
        try:
            await asyncio.wait_for(client.dial(), DIAL_TIMEOUT)
        except asyncio.TimeoutError:
            if is_missing:  # a plugin that was killed leaves a socket that refuses
                self._log.violation(early)
            raise Failure("failed to dial device plugin: context deadline exceeded") from None
        if is_early:
            self._log.violation(early)

        try:
            call = client.stub.GetDevicePluginOptions(pb.Empty())
            options: pb.DevicePluginOptions = await client.answer(call)
        except Failure as failure:
            raise Failure(f"failed to get device plugin options: {failure}") from failure

        if request.HasField("options") and request.options != options:
            text = "registers other options than GetDevicePluginOptions answers"
            self._log.violation(f"{client.resource} {text}")

        if any(each.path == client.path for each in self._streams):
            text = f"registers {client.path} again while it is still connected"
            self._log.violation(f"{client.resource} {text}")
            raise Failure(f"device plugin already connected: {client.path}")
        self.endpoints[client.resource] = Endpoint(client, options)

    # Streams

    async def _follow(self, client: Client) -> None:
        """Follow a ListAndWatch stream to its end, then close the connection that this ends."""
        try:
            async for response in client.stub.ListAndWatch(pb.Empty()):
                await self._receive(client, response)
            reason = "the plugin ended it"
        except grpc.aio.AioRpcError as error:
            reason = _go_error(error)
        except asyncio.CancelledError:
            if not client.closed:
                await client.close()
                raise
            reason = "closed by the kubelet"
        except grpc.aio.UsageError:  # the channel was closed before the call began
            reason = "closed by the kubelet"
        self._log.record("ended", resource=client.resource, endpoint=client.name, reason=reason)

        # The original looks the connection up again, and may find a newer one.
        if target := self._newest.get(client.resource):
            if target is not client:
                text = "ended a stream after registering again: both are lost"
                self._log.violation(f"{client.resource} {text}")
            await self._disconnect(target)
        if not client.closed:
            await client.close()

    async def _receive(self, client: Client, response: pb.ListAndWatchResponse) -> None:
        """Replace the resource's list and write the checkpoint, even if nothing has changed."""
        resource = client.resource
        for text in inspect_list(resource, response.devices):
            self._log.violation(text)

        self._devices.replace(resource, response.devices)
        await self._write()
        client.has_listed = True

        healthy, unhealthy = self._devices.healthy[resource], self._devices.unhealthy[resource]
        self._log.record(
            "list",
            resource=resource,
            healthy=len(healthy),
            unhealthy=len(unhealthy),
            endpoint=client.name,
            healthy_ids=sorted(healthy),
            unhealthy_ids=sorted(unhealthy),
        )

    async def _disconnect(self, client: Client) -> None:
        self._newest.pop(client.resource, None)
        if endpoint := self.endpoints.get(client.resource):
            self._lose(client.resource, endpoint)
        await client.close()

    def _lose(self, resource: str, endpoint: Endpoint) -> None:
        """Make all devices unhealthy, as no plugin is left; the checkpoint is not written."""
        lost = self._devices.lose(resource)
        endpoint.stopped = True
        self._log.record("lost", resource=resource, ids=sorted(lost))

    # What others ask and do

    @property
    def open_streams(self) -> int:
        """The number of streams whose end the kubelet has not noticed."""
        return len(self._streams)

    def is_listed(self, resource: str) -> bool:
        """Return whether a plugin of the resource is connected and has sent its first list."""
        endpoint = self.endpoints.get(resource)
        client = endpoint.client if endpoint and not endpoint.stopped else None
        return client is not None and client.has_listed

    async def drop(self) -> None:
        """Break all connections, as after an error on each stream."""
        for client in list(self._newest.values()):
            await client.close()

    async def abandon(self) -> None:
        """End all connections, as the end of the process does."""
        abandoned = [*self._newest.values()]
        self._newest.clear()
        for client in abandoned:
            await client.close()

        # Connections that a newer registration replaced are still followed.
        streams = [*self._streams.values()]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

        for endpoint in self.endpoints.values():
            endpoint.stopped = True
