"""A reference kubelet with plugins that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.kubelet import Kubelet
from tests.world.plugins import rpc

LONG = 60.0  # seconds after which something that a kubelet must do has failed


def device(ident: str, health: str = "Healthy", nodes: Sequence[int] = ()) -> pb.Device:
    """Return a device as plugins list them; `nodes`: its NUMA nodes."""
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=n) for n in nodes]) if nodes else None
    return pb.Device(ID=ident, health=health, topology=topology)


class Plugin(rpc.DevicePluginServicer):  # type: ignore[misc]
    """The least that a kubelet accepts as a device plugin: one resource, one socket."""

    def __init__(
        self, directory: Path, devices: Sequence[pb.Device], resource: str, name: str
    ) -> None:
        """Args: name: its socket's."""
        self.directory = directory
        self.devices = devices
        self.resource = resource
        self.name = name

        self.envs: dict[str, str] = {}  # for every container
        self._streams: set[asyncio.Queue[Sequence[pb.Device]]] = set()
        self._server: grpc.aio.Server | None = None

    async def serve(self) -> None:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / self.name}")
        await self._server.start()

    async def register(self) -> None:
        request = pb.RegisterRequest(
            version="v1beta1", endpoint=self.name, resource_name=self.resource
        )

        # The channels of a process share connections, and their back-off after a refused one.
        socket = f"unix:{self.directory / 'kubelet.sock'}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(socket, options=options) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=LONG)

    async def stop(self) -> None:
        """Stop serving; gRPC removes the socket."""
        if self._server:
            await self._server.stop(None)
            self._server = None

    def send(self, *devices: pb.Device) -> None:
        """Send another list on all streams."""
        self.devices = devices
        for stream in self._streams:
            stream.put_nowait(self.devices)

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        lists: asyncio.Queue[Sequence[pb.Device]] = asyncio.Queue()
        lists.put_nowait(self.devices)
        self._streams.add(lists)
        try:
            while True:
                yield pb.ListAndWatchResponse(devices=await lists.get())
        finally:
            self._streams.discard(lists)

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        answer = pb.ContainerAllocateResponse(envs=self.envs)
        return pb.AllocateResponse(container_responses=[answer])


@contextlib.asynccontextmanager
async def another_plugin(
    kubelet: Kubelet,
    resource: str,
    *devices: str | pb.Device,
    name: str = "other.sock",
) -> AsyncIterator[Plugin]:
    """Have another plugin register a resource with these devices; a bare ID is a healthy one."""
    listed = [device(each) if isinstance(each, str) else each for each in devices]
    plugin = Plugin(kubelet.directory, listed, resource, name)
    await plugin.serve()
    await plugin.register()
    try:
        yield plugin
    finally:
        await plugin.stop()
