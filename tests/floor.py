"""The floor of the bench: a plain grpc.aio plugin that answers constants. Argument: its directory.

It needs the kubelet's directory and the same stubs as the daemon, and nothing else of the tests.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from typing import Any

import grpc.aio
import sdnotify

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs
RESOURCE = "tenstorrent.com/galaxy-wormhole"
IDS = [f"0000:{number:02x}:00.0" for number in range(32)]


class Constant(rpc.DevicePluginServicer):  # type: ignore[misc]
    """Its answers have about the size of the daemon's."""

    devices = tuple(pb.Device(ID=each, health="Healthy") for each in IDS)
    allocated = pb.ContainerAllocateResponse(envs={"X": "x" * 500})
    preferred = pb.ContainerPreferredAllocationResponse(deviceIDs=IDS[:14])

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def Allocate(self, request: Any, context: Any) -> Any:
        return pb.AllocateResponse(container_responses=[self.allocated])

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        return pb.PreferredAllocationResponse(container_responses=[self.preferred])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:
        return pb.PreStartContainerResponse()

    async def ListAndWatch(self, request: Any, context: Any) -> Any:
        yield pb.ListAndWatchResponse(devices=self.devices)
        await asyncio.Event().wait()


async def serve(path: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(Constant(), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    return server


async def main(directory: str) -> None:
    """Register with each kubelet, which removes the sockets of all plugins when it starts."""
    appeared = asyncio.Event()
    libc = ctypes.CDLL(None)
    inotify = libc.inotify_init1(os.O_NONBLOCK)
    libc.inotify_add_watch(inotify, directory.encode(), 0x180)  # IN_CREATE, IN_MOVED_TO

    def read() -> None:
        if b"kubelet.sock" in os.read(inotify, 65536):
            appeared.set()

    asyncio.get_running_loop().add_reader(inotify, read)
    number = 0
    server = await serve(f"{directory}/bare-{number}.sock")
    sdnotify.SystemdNotifier().notify("READY=1")
    while True:
        await appeared.wait()
        appeared.clear()
        await server.stop(None)
        number += 1
        endpoint = f"bare-{number}.sock"
        server = await serve(f"{directory}/{endpoint}")
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=RESOURCE)
        async with grpc.aio.insecure_channel(f"unix:{directory}/kubelet.sock") as channel:
            await rpc.RegistrationStub(channel).Register(request)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
