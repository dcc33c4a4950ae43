"""A plugin that is not ours, for a reference kubelet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.kubelet import Kubelet
from tests.world.plugins import HEALTHY, rpc


class Plugin(rpc.DevicePluginServicer):  # type: ignore[misc]
    """The least that a kubelet accepts as a device plugin: one resource, one socket, one stream."""

    def __init__(self, kubelet: Kubelet, resource: str, name: str = "other.sock") -> None:
        """name: its socket's."""
        self.envs: dict[str, str] = {}  # for every container
        self._directory = kubelet.directory
        self._request = pb.RegisterRequest(version="v1beta1", endpoint=name, resource_name=resource)
        self._lists: asyncio.Queue[pb.ListAndWatchResponse] = asyncio.Queue()
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)

    def send(self, *ids: str, health: str = HEALTHY) -> None:
        """Send a list of these devices on NUMA node 0, the first one when the stream begins."""
        place = pb.TopologyInfo(nodes=[pb.NUMANode(ID=0)])
        devices = [pb.Device(ID=each, health=health, topology=place) for each in ids]
        self._lists.put_nowait(pb.ListAndWatchResponse(devices=devices))

    async def serve(self) -> None:
        self._server.add_insecure_port(f"unix:{self._directory}/{self._request.endpoint}")
        await self._server.start()

    async def register(self) -> None:
        # The channels of a process share connections, and their back-off after a refused one.
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"unix:{self._directory}/kubelet.sock"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await rpc.RegistrationStub(channel).Register(self._request)

    async def stop(self) -> None:
        """Stop serving; gRPC removes the socket."""
        await self._server.stop(None)

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        while True:
            yield await self._lists.get()

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        answer = pb.ContainerAllocateResponse(envs=self.envs)
        return pb.AllocateResponse(container_responses=[answer])


@contextlib.asynccontextmanager
async def another_plugin(
    kubelet: Kubelet, resource: str, *ids: str, health: str = HEALTHY, name: str = "other.sock"
) -> AsyncIterator[Plugin]:
    """Have another plugin register a resource with these devices."""
    plugin = Plugin(kubelet, resource, name)
    plugin.send(*ids, health=health)
    await plugin.serve()
    await plugin.register()
    try:
        yield plugin
    finally:
        await plugin.stop()
