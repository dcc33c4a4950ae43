"""Coming from another way to hand out the cards; coming-from.md says how.

Another plugin is played by what it registers, lists and answers. What it does when it starts or
fails does not matter here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from generated import deviceplugin_pb2 as pb
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.reference import Plugin, device

N300 = "tenstorrent.com/n300"
NUMBERS = ["0", "1"]  # as OctopusET's plugin names devices
HASHES = [  # as generic-device-plugin does
    "b6589fc6ab0dc82cf12099d1c2d40ab994e8410c",
    "356a192b7913b04c54574d18c28d46e6395428ab",
]


class FormerPlugin(Plugin):
    """A plugin that offers the device files of a node, in their order, under one name."""

    def __init__(
        self, kubelet: Kubelet, node: SimulatedNode, resource: str, ids: Sequence[str]
    ) -> None:
        super().__init__(kubelet.directory, [*map(device, ids)], resource, "former.sock")
        self.root = node.root
        self.ids = ids

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        answer = pb.ContainerAllocateResponse()
        for each in request.container_requests[0].devices_ids:
            path = f"/dev/tenstorrent/{self.ids.index(each)}"
            host_path = f"{self.root}{path}"
            answer.devices.add(host_path=host_path, container_path=path, permissions="rw")
        return pb.AllocateResponse(container_responses=[answer])


async def run(kubelet: Kubelet, pod: str, resource: str) -> str:
    """Run a pod with one device; return the device file that its container has."""
    allocation = await kubelet.run_pod(pod, resource)
    (device_file,) = allocation.devices
    return str(device_file.container_path)


@pytest.mark.parametrize(
    ("resource", "ids"),
    [(N300, NUMBERS), ("tenstorrent.com/card", HASHES)],
    ids=["under the same name", "under another name"],
)
async def test_a_former_plugins_pod_keeps_its_chip_until_it_ends(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, resource: str, ids: Sequence[str]
) -> None:
    """Whatever the plugin called it. A new pod gets the other chip, and then there is none."""
    chips = {node.add("n300")[0].bdf for _ in range(2)}
    former = FormerPlugin(kubelet, node, resource, ids)
    await former.serve()
    await former.register()
    taken = await run(kubelet, "old", resource)
    await former.stop()

    await start(interval=0.1)
    await kubelet.wait_for(lambda: kubelet.healthy(N300) & chips)
    assert await run(kubelet, "new", N300) != taken
    with pytest.raises(AdmissionError):
        await kubelet.admit("third", "main", {N300: 1})
    assert kubelet.killed == []

    kubelet.end("old")
    await kubelet.wait_for(lambda: kubelet.healthy(N300) == chips)
    assert await run(kubelet, "fourth", N300) == taken
