"""The reference kubelet's connections to device plugins: registration, streams, lists.

It follows `pkg/kubelet/cm/devicemanager/plugin/v1beta1` and the parts of `manager.go` for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.world.eventlog import EventLog

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

HEALTHY = "Healthy"
DIAL_TIMEOUT = 10.0  # seconds for a plugin that registers before it serves


class Failure(Exception):
    """A plain `error` of the original: Register answers UNKNOWN, admission wraps it."""


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

    def __init__(
        self, directory: Path, log: EventLog, write_checkpoint: Callable[[], Awaitable[None]]
    ) -> None:
        self.clients: dict[str, Client] = {}  # the newest of each resource
        self.listed: dict[str, dict[str, pb.Device]] = {}  # the latest list of each resource
        self._directory = directory
        self._log = log
        self._write_checkpoint = write_checkpoint
        self._streams: dict[Client, asyncio.Task[None]] = {}  # all that have not ended

    # Questions

    @property
    def open_streams(self) -> int:
        """The number of streams whose end the kubelet has not noticed."""
        return len(self._streams)

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
        self._streams[client] = asyncio.create_task(self._follow(client))
        self._streams[client].add_done_callback(lambda _: self._streams.pop(client))

    async def _connect(self, client: Client, request: pb.RegisterRequest) -> None:
        """Dial back and ask for the options, all within the plugin's call of Register."""
        with socket.socket(socket.AF_UNIX) as probe:
            is_early = probe.connect_ex(client.path) != 0
        dial = {"wait_for_ready": True, "timeout": DIAL_TIMEOUT}
        client.options = await client.call("GetDevicePluginOptions", pb.Empty(), **dial)

        if is_early:  # gRPC has tried again, after a second
            self._log.violation(f"{client.resource} registers before it serves")
        if request.options != client.options:
            self._log.violation(f"{client.resource} registers other options than it answers")
        if any(each.path == client.path for each in self._streams):
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
        await self._write_checkpoint()

        healthy = self.healthy(resource)
        ids = {"healthy_ids": sorted(healthy), "unhealthy_ids": sorted(listed.keys() - healthy)}
        self._log.record("list", resource=resource, healthy=len(healthy), **ids)

    async def drop(self) -> None:
        """Break all connections, as after an error on each stream."""
        for client in [*self.clients.values()]:
            await client.close()

    async def abandon(self) -> None:
        """End all connections, as the end of the process does."""
        await self.drop()
        streams = [*self._streams.values()]
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
