"""Allocate and its like: which chips an answer has, whatever happens meanwhile; refusals."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import StartDaemon, client, no_descriptors, plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

N150 = "tenstorrent.com/n150"
NINE = "0000:09:00.0"  # no device
AN_HOUR = 3600.0


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    """Two cards, and directories for hugepages."""
    node.set_hugepages(8)
    node.add("n150")
    node.add("n150")
    return node


async def refusal(call: Awaitable[object]) -> tuple[str, str]:
    """Return the code and the message of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code().name, error.value.details() or ""


def allocation(*containers: list[str]) -> pb.AllocateRequest:
    requests = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    return pb.AllocateRequest(container_requests=requests)


def preference(*available: str) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=available, allocation_size=1)
    return request


# -- host paths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("udev", ["makes it", "does not", "does not run"])
async def test_a_link_is_waited_for_while_udev_runs(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    udev: str,
) -> None:  # fmt: skip
    """The kubelet keeps the answer. Without a right link, after a second, it is the device file."""
    assert ttdp.LINK_TIMEOUT == 1.0
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", 0.2 if udev == "does not" else AN_HOUR)
    one, other = node.chips
    one.by_pci.unlink()
    one.by_pci.symlink_to("../7")  # another chip's
    if udev == "does not run":
        (node.root / "run/udev/control").unlink()
    await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    looks, genuine = list[str](), ttdp.link_path

    def look(settings: ttdp.Settings, function: ttdp.PciFunction) -> str | None:
        looks.append(function.address)
        if udev == "makes it" and len(looks) == 5:
            one.by_pci.unlink()
            one.by_pci.symlink_to(f"../{one.ordinal}")
        return genuine(settings, function)

    monkeypatch.setattr(ttdp, "link_path", look)
    answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    path = one.by_pci if udev == "makes it" else one.device_node
    assert {each.host_path for each in answer.devices} == {str(path), str(other.by_pci)}


async def test_with_cdi_a_pod_gets_names_unless_the_file_cannot_be_written(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing waits for udev's link: the runtime takes the host path from the CDI file."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", AN_HOUR)
    one, _ = node.chips
    one.by_pci.unlink()
    file = short_tmp / "cdi" / ttdp.CDI_FILE
    file.mkdir(parents=True)
    daemon = await start(interval=0.1, device_list_strategy="cdi")
    await kubelet.registered(N150)
    problem = f"{file} cannot be written: Is a directory"
    await until(lambda: problem in daemon.status)

    async with client(directory) as stub:
        call = allocation([one.bdf])
        assert await refusal(stub.Allocate(call)) == ("UNAVAILABLE", problem)
        file.rmdir()
        await until(lambda: problem not in daemon.status)
        (answer,) = (await asyncio.wait_for(stub.Allocate(call), PATIENCE)).container_responses
    assert [each.name for each in answer.cdi_devices] == [f"tenstorrent.com/device={one.bdf}"]
    assert not answer.devices and not answer.mounts


# -- changes while a request is answered -----------------------------------------------------------


@pytest.mark.parametrize("is_scanning", [True, False])
async def test_a_renumbering_at_any_moment_of_an_allocate_gives_no_wrong_chip(
    tmp_path: Path, directory: Path, is_scanning: bool
) -> None:
    """The answer is checked against sysfs at its moment, whatever the daemon has seen before."""
    node = SimulatedNode(tmp_path / "unlinked", links=False)
    chips = node.add("n150") + node.add("n150")
    results: set[str] = set()

    def allocate(chip: Chip) -> None:
        """Ask for a chip, in the middle of what the driver does: there is nothing to wait for."""
        request = running.daemon.sessions.allocator.allocate(N150, [[chip.bdf]])
        try:
            request.send(None)
        except StopIteration as answered:
            (device,) = answered.value[0].devices
            assert device.host_path == str(chip.device_node)
            assert device.container_path == f"/dev/tenstorrent/{chip.ordinal}"
            results.add("answered")
        except ttdp.RequestError as error:
            assert error.args[0] == grpc.StatusCode.FAILED_PRECONDITION
            assert chip.bdf in error.args[1]
            results.add("refused")

    def allocate_each() -> None:
        for chip in chips:
            if is_scanning:
                running.host.scan(is_poll=False)
            allocate(chip)

    async with RunningDaemon(node, settings_of(node, directory, interval=AN_HOUR)) as running:
        await running.ready()

        node.on_step = allocate_each
        for _ in range(3):
            node.swap_ordinals(chips[0].bdf, chips[1].bdf)
            await until(lambda: all(running.chip(c.bdf).is_present for c in chips))
        node.on_step = None

    assert results == {"answered", "refused"}


# -- refusals and garbage --------------------------------------------------------------------------


async def test_a_refusal_names_the_device_and_is_counted(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the code of its cause; a device without its device file fails at that moment.

    The daemon's own error is not the device's.
    """
    good, gone = (chip.bdf for chip in node.chips)
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    node.on_uevent = None
    node.chips[1].device_node.unlink()

    async with client(directory) as stub:
        for method, request, code, device in (
            ("Allocate", allocation([NINE]), "NOT_FOUND", NINE),
            ("Allocate", allocation([good], [gone]), "FAILED_PRECONDITION", gone),
            ("GetPreferredAllocation", preference(NINE, good), "INVALID_ARGUMENT", NINE),
        ):
            found, message = await refusal(getattr(stub, method)(request))
            assert found == code and device in message
            assert f"{N150}: rejected {method}: {message}" in caplog.messages
        await stub.Allocate(allocation([good]))

        monkeypatch.setattr(ttdp, "file_stamp", no_descriptors)
        own = ("UNAVAILABLE", "internal error: [Errno 24] Too many open files")
        assert await refusal(stub.Allocate(allocation([good]))) == own
        assert await refusal(stub.GetPreferredAllocation(preference(good))) == own
        container_start = pb.PreStartContainerRequest(devices_ids=[good])
        assert await refusal(stub.PreStartContainer(container_start)) == own

    metrics = daemon.daemon.reporter.metrics() or ""
    for result, count in ("granted", 1), ("refused", 3):
        line = f'tt_allocations_total{{resource="{N150}",result="{result}"}} {count}'
        assert line in metrics


async def test_an_id_that_has_just_left_the_list_is_no_error_in_a_question(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """The kubelet still has the former list."""
    good, excluded = (chip.bdf for chip in node.chips)
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    daemon.reload(exclude=(excluded,))
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {good})

    async with client(directory) as stub:
        answer = await stub.GetPreferredAllocation(preference(excluded, good))
    assert answer.container_responses[0].deviceIDs == [good]


async def test_garbage_gets_an_error_and_harms_nobody(
    kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Bytes that are no protobuf, random ones, and clients that send nothing."""
    await start()
    await kubelet.registered(N150)
    path = str(directory / plugin_sockets(directory)[0])
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        call: Any = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
        assert (await refusal(call(b"\xff\xff\xff\xff")))[0] == "UNKNOWN"

    dice = random.Random(1)
    with contextlib.ExitStack() as stack:
        for number in range(100):
            garbler = stack.enter_context(socket.socket(socket.AF_UNIX))
            garbler.connect(path)
            garbler.send(dice.randbytes(50 * number))
        await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.admit("other", "main", {N150: 1})
