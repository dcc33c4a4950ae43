"""A plugin that is not ours, for a reference kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.devicemanager import HEALTHY, rpc
from tests.world.kubelet import Kubelet


class Plugin(rpc.DevicePluginServicer):  # type: ignore[misc]
    """The least that a kubelet accepts as a device plugin: one resource, one socket, one list.

    `with` has it served and registered.
    """

    def __init__(
        self,
        kubelet: Kubelet,
        resource: str,
        *ids: str,
        health: str = HEALTHY,
        name: str = "other.sock",
    ) -> None:
        """The devices are on NUMA node 0. name: of its socket."""
        place = pb.TopologyInfo(nodes=[pb.NUMANode(ID=0)])
        self.devices = [pb.Device(ID=each, health=health, topology=place) for each in ids]
        self.envs: dict[str, str] = {}  # for every container
        self._directory = kubelet.directory
        self._name = name
        self._resource = resource
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)

    async def serve(self) -> None:
        self._server.add_insecure_port(f"unix:{self._directory}/{self._name}")
        await self._server.start()

    async def register(self) -> None:
        request = pb.RegisterRequest(
            version="v1beta1", endpoint=self._name, resource_name=self._resource
        )
        # The channels of a process share connections, and their back-off after a refused one.
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = f"unix:{self._directory}/kubelet.sock"
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await rpc.RegistrationStub(channel).Register(request)

    async def __aenter__(self) -> Plugin:
        await self.serve()
        await self.register()
        return self

    async def stop(self, *_: object) -> None:
        """Stop serving; gRPC removes the socket."""
        await self._server.stop(None)

    __aexit__ = stop

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        yield pb.ListAndWatchResponse(devices=self.devices)
        await asyncio.Event().wait()

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        answer = pb.ContainerAllocateResponse(envs=self.envs)
        return pb.AllocateResponse(container_responses=[answer])
