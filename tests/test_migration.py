"""Coming from another way to hand out the cards, and going back; coming-from.md says how.

Device plugins are played by what they register, list and answer. What they do when they start or
fail does not matter here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import ROOT
from tests.world.simulation import RunningDaemon

pytestmark = pytest.mark.usefixtures("ticking")

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

N300, P150 = "tenstorrent.com/n300", "tenstorrent.com/p150"


@dataclass(frozen=True)
class FormerPlugin(deviceplugin_pb2_grpc.DevicePluginServicer):
    """A plugin that offers some numbers of /dev/tenstorrent under one name.

    Its IDs are these numbers, or what they are numbers of in generic-device-plugin: hashes.
    """

    resource: str
    numbers: dict[str, int]
    """The number of the device file by device ID."""
    tells_devices: bool
    """Whether the container gets TT_VISIBLE_DEVICES."""
    root: Path = Path("/")

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        devices = [pb.Device(ID=each, health="Healthy") for each in self.numbers]
        yield pb.ListAndWatchResponse(devices=devices)
        await asyncio.Event().wait()  # until the server stops

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        response = pb.AllocateResponse()
        for container in request.container_requests:
            answer = response.container_responses.add()
            for each in container.devices_ids:
                path = f"/dev/tenstorrent/{self.numbers[each]}"
                host_path = f"{self.root}{path}"
                answer.devices.add(host_path=host_path, container_path=path, permissions="rw")
            if self.tells_devices:
                answer.envs["TT_VISIBLE_DEVICES"] = ",".join(container.devices_ids)
        return response


def octopus(kind: str) -> FormerPlugin:
    """OctopusET's plugin on a node with two cards of a kind: n150, n300 or blackhole."""
    return FormerPlugin(f"tenstorrent.com/{kind}", {"0": 0, "1": 1}, tells_devices=True)


def generic(resource: str) -> FormerPlugin:
    """generic-device-plugin with a group of paths /dev/tenstorrent/*, on a node with two cards."""
    hashes = {"b6589fc6ab0dc82cf12099d1c2d40ab994e8410c": 0}
    hashes["356a192b7913b04c54574d18c28d46e6395428ab"] = 1
    return FormerPlugin(resource, hashes, tells_devices=False)


@contextlib.asynccontextmanager
async def running(
    plugin: FormerPlugin, kubelet: Kubelet, node: SimulatedNode
) -> AsyncIterator[None]:
    """Run a plugin until it is removed from the node."""
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(replace(plugin, root=node.root), server)
    server.add_insecure_port(f"unix:{kubelet.directory}/former.sock")
    await server.start()
    request = pb.RegisterRequest(
        version="v1beta1", endpoint="former.sock", resource_name=plugin.resource
    )
    async with grpc.aio.insecure_channel(f"unix:{kubelet.socket}") as channel:
        await rpc.RegistrationStub(channel).Register(request)
    await kubelet.registered(plugin.resource)
    yield
    await server.stop(None)


async def runs(kubelet: Kubelet, pod: str, resource: str) -> None:
    """Admit a pod with one device, and wait until it runs."""
    await kubelet.admit(pod, "main", {resource: 1})
    await kubelet.running(pod, "main")


def number_of(kubelet: Kubelet, pod: str) -> str:
    """Return the device file that a pod's container has."""
    (device,) = kubelet.allocation(pod, "main").devices
    return str(device.container_path)


async def offers(kubelet: Kubelet, resource: str, *healthy: str) -> None:
    await kubelet.wait_for(lambda: kubelet.healthy(resource) == {*healthy})


CASES = [
    (octopus("n300"), "n300", N300),
    (octopus("blackhole"), "p150a", P150),
    (octopus("blackhole"), "p150a", "tenstorrent.com/blackhole"),
    (generic(N300), "n300", N300),
    (generic("tenstorrent.com/card"), "p150a", P150),
]


@pytest.mark.parametrize(("former", "card", "resource"), CASES)
async def test_a_former_plugins_pod_keeps_its_chip_until_it_ends(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, former: FormerPlugin, card: str,
    resource: str,
) -> None:  # fmt: skip
    """Whatever the plugin called it. A new pod gets the other chip, and then there is none."""
    chips = {node.add(card)[0].ordinal: node.chips[-1].bdf for _ in range(2)}
    async with running(former, kubelet, node):
        await runs(kubelet, "old", former.resource)
    taken = int(number_of(kubelet, "old").rpartition("/")[2])

    naming = "arch" if resource.endswith("/blackhole") else "board"
    await start(interval=0.1, resource_naming=naming)
    await kubelet.wait_for(lambda: kubelet.healthy(resource) & {*chips.values()})
    await runs(kubelet, "new", resource)
    assert number_of(kubelet, "new") == f"/dev/tenstorrent/{1 - taken}"
    with pytest.raises(AdmissionError):
        await kubelet.admit("third", "main", {resource: 1})
    assert kubelet.killed == []

    kubelet.end("old")
    await offers(kubelet, resource, *chips.values())
    await runs(kubelet, "fourth", resource)
    assert number_of(kubelet, "fourth") == f"/dev/tenstorrent/{taken}"


async def test_a_pod_with_a_chip_of_another_domain_is_not_known(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """So the text says to drain such a node first: generic-device-plugin's own is squat.ai."""
    chips = {node.add("n300")[0].bdf for _ in range(2)}
    former = generic("squat.ai/tenstorrent")
    async with running(former, kubelet, node):
        await runs(kubelet, "old", former.resource)

    await start(interval=0.1)
    await offers(kubelet, N300, *chips)
    assert "squat.ai" in (ROOT / "packaging/deb/coming-from.md").read_text()


async def with_a_pod_of_ours(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> RunningDaemon:
    """Return the daemon of a node with two cards, of which a pod has one."""
    for _ in range(2):
        node.add("n300")
    daemon: RunningDaemon = await start(interval=0.1)
    await kubelet.registered(N300)
    await runs(kubelet, "ours", N300)
    return daemon


async def test_another_plugin_does_not_know_which_chips_are_in_use(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """So the way back begins with a drained node, too: here two pods get one chip."""
    daemon = await with_a_pod_of_ours(node, kubelet, start)
    await daemon.stop()

    async with running(octopus("n300"), kubelet, node):
        await kubelet.wait_for(lambda: kubelet.healthy(N300) == {"0", "1"})
        for pod in ("theirs-0", "theirs-1"):
            await kubelet.admit(pod, "main", {N300: 1})
        assert number_of(kubelet, "ours") in [
            number_of(kubelet, pod) for pod in ("theirs-0", "theirs-1")
        ]


async def test_after_the_way_back_the_other_plugin_has_all_devices(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """On a drained node nothing of ours is left with the kubelet."""
    daemon = await with_a_pod_of_ours(node, kubelet, start)
    kubelet.end("ours")
    await daemon.stop()

    async with running(octopus("n300"), kubelet, node):
        await offers(kubelet, N300, "0", "1")
        for pod in ("theirs-0", "theirs-1"):
            await runs(kubelet, pod, N300)
    assert {number_of(kubelet, pod)[-1] for pod in ("theirs-0", "theirs-1")} == {"0", "1"}
