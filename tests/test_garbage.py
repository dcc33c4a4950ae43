"""Garbage never hurts: on the sockets, in requests, in sysfs and in /dev."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until

NAME = "tenstorrent.com/n150"
pytestmark = pytest.mark.usefixtures("ticking")


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    node.add("n150")
    return node


@pytest.fixture
async def endpoint(kubelet: Kubelet, start: StartDaemon, directory: Path) -> Path:
    """The daemon's socket for n150."""
    await start()
    await kubelet.registered(NAME)
    (path,) = directory.glob("tt-*")
    return path


@pytest.fixture
async def stub(endpoint: Path) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"unix:{endpoint}") as channel:
        yield rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]


async def refusal(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


def allocation(*containers: list[str]) -> pb.AllocateRequest:
    return pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers])


def preference(available: list[str], must: list[str], size: int) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
    )  # fmt: skip
    return request


async def test_random_bytes_and_half_open_connections_are_closed_and_forgotten(
    endpoint: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred strangers on the socket, talking nonsense or nothing, cost no descriptor for long and no service."""
    before = len(os.listdir("/proc/self/fd"))
    dice = random.Random(1)
    strangers = []
    for number in range(100):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(endpoint))
        if number % 2:
            stranger.send(dice.randbytes(dice.randrange(1, 5000)))
        strangers.append(stranger)
    await kubelet.admit("pod", "main", {NAME: 1})
    # Ours are still open; the server's ends of them go, at the latest when its time for a handshake is over.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(strangers) + 1)
    for stranger in strangers:
        stranger.close()
    await kubelet.admit("other", "main", {NAME: 1})


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (allocation(), grpc.StatusCode.INVALID_ARGUMENT),
        (allocation([]), grpc.StatusCode.INVALID_ARGUMENT),
        (allocation(["0000:01:00.0"], []), grpc.StatusCode.INVALID_ARGUMENT),
        (allocation(["0000:01:00.0", "0000:01:00.0"]), grpc.StatusCode.INVALID_ARGUMENT),
        (allocation(["0000:01:00.0"], ["0000:01:00.0"]), grpc.StatusCode.INVALID_ARGUMENT),
        (allocation(["0000:09:00.0"]), grpc.StatusCode.NOT_FOUND),
        (allocation([""]), grpc.StatusCode.NOT_FOUND),
        (allocation(["x" * 100_000]), grpc.StatusCode.NOT_FOUND),
        (allocation([f"id-{n}" for n in range(10_000)]), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_an_allocation_that_cannot_be_is_refused(
    stub: Any, request_: pb.AllocateRequest, code: grpc.StatusCode
) -> None:
    """With the code that says whose fault it is, and a message that fits on a line."""
    error = await refusal(stub.Allocate(request_))
    assert error.code() == code
    assert len(error.details() or "") < 400


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        (["0000:01:00.0"], [], 2),
        (["0000:01:00.0"], [], -1),
        (["0000:01:00.0"], ["0000:02:00.0"], 1),
        (["0000:01:00.0", "0000:02:00.0"], ["0000:01:00.0", "0000:02:00.0"], 1),
        (["0000:09:00.0"], [], 1),
        ([f"id-{n}" for n in range(10_000)], [], 10_000),
        ([], [], 2**31 - 1),
    ],
)
async def test_an_impossible_preference_is_an_invalid_argument(
    stub: Any, available: list[str], must: list[str], size: int
) -> None:
    """More than there is, a must that is not available, more musts than the size, unknown, negative."""
    error = await refusal(stub.GetPreferredAllocation(preference(available, must, size)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_preference_of_nothing_is_nothing(stub: Any) -> None:
    """Size 0 has an answer: an empty one."""
    answer = await stub.GetPreferredAllocation(preference(["0000:01:00.0"], [], 0))
    assert [list(container.deviceIDs) for container in answer.container_responses] == [[]]


async def test_an_unhealthy_device_is_not_allocated(node: SimulatedNode, stub: Any, kubelet: Kubelet) -> None:
    """Asked for nevertheless, it is a failed precondition that names the device and the reason."""
    chip = node.chips[0]
    chip.die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(NAME))
    error = await refusal(stub.Allocate(allocation([chip.bdf])))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert chip.bdf in (error.details() or "") and "does not respond" in (error.details() or "")


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe" * 50, b"9" * 1_000_000, b"\n\n\n", "µ".encode() * 9, b"-5\n"])
async def test_an_attribute_of_nonsense_counts_as_not_offered(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, content: bytes
) -> None:
    """Binary, empty, huge or foreign text in every attribute: the device is there, under PCI's name, and the daemon."""
    chip, other = node.chips
    for attribute in (*chip.facts.telemetry, *chip.facts.sensors):
        chip.write(attribute, content)
    daemon = await start()
    await kubelet.registered(NAME)
    await until(lambda: daemon.chip(other.bdf).health.heartbeat)
    assert kubelet.healthy(NAME) == {chip.bdf, other.bdf}
    assert daemon.chip(chip.bdf).serial is None


async def test_a_directory_in_an_attributes_place_is_a_read_error(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """What cannot be read makes its device unhealthy, with the attribute and the error in the reason."""
    chip, other = node.chips
    chip.remove("tt_heartbeat")
    chip.attribute("tt_heartbeat").mkdir()
    daemon = await start()
    await kubelet.registered(NAME)
    assert kubelet.healthy(NAME) == {other.bdf}
    assert daemon.chip(chip.bdf).health.reason == "telemetry cannot be read: tt_heartbeat: Is a directory"


@pytest.mark.parametrize("kind", ["file", "loop", "directory", "nothing", "another device"])
async def test_a_node_that_is_wrong_from_the_start_is_not_listed(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, however often it is looked at; made right, the device is there."""
    chip, other = node.chips
    path = chip.device_node
    right = path.with_name("right")
    path.rename(right)
    make: dict[str, Callable[[], object]] = {
        "file": path.touch,
        "loop": lambda: path.symlink_to(path.name),
        "directory": path.mkdir,
        "nothing": lambda: None,
        "another device": lambda: path.symlink_to("/dev/full"),
    }
    make[kind]()
    await start(interval=0.05)
    await kubelet.registered(NAME)
    assert kubelet.capacity() == {NAME: 1} and kubelet.healthy(NAME) == {other.bdf}
    if kind == "directory":
        path.rmdir()
    elif kind != "nothing":
        path.unlink()
    right.rename(path)
    await kubelet.wait_for(lambda: kubelet.healthy(NAME) == {chip.bdf, other.bdf})
    assert sum("not listed" in record.message for record in caplog.records) == 1


async def test_a_node_that_becomes_wrong_is_a_fault_until_it_is_right(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A known device whose node goes is Unhealthy, not gone from the list."""
    chip, other = node.chips
    daemon = await start(interval=0.05)
    await kubelet.registered(NAME)
    right = chip.device_node.with_name("right")
    chip.device_node.rename(right)
    await kubelet.wait_for(lambda: kubelet.unhealthy(NAME) == {chip.bdf})
    assert "device node is wrong" in daemon.chip(chip.bdf).health.reason
    right.rename(chip.device_node)
    await kubelet.wait_for(lambda: kubelet.healthy(NAME) == {chip.bdf, other.bdf})


async def test_many_calls_at_once_are_all_answered(stub: Any, node: SimulatedNode, kubelet: Kubelet) -> None:
    """Five hundred allocations and preferences at a time, good and bad ones mixed."""
    assert kubelet.pod_resources
    os.utime(kubelet.pod_resources, (0, 0))  # long started: who holds what need not be asked for each
    good = node.chips[0].bdf
    calls = [stub.Allocate(allocation([good if n % 2 else "no"])) for n in range(500)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(outcome, pb.AllocateResponse) for outcome in outcomes) == 250


@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation", "ListAndWatch"])
async def test_bytes_that_are_no_protobuf_are_an_error_and_one_line(
    endpoint: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """gRPC would log a traceback, as if the error were ours; a traceback of ours is still one."""
    handler = logging.StreamHandler(text := io.StringIO())
    handler.addFilter(ttdp._without_traceback_of_garbage)
    logging.getLogger().addHandler(handler)
    try:
        async with grpc.aio.insecure_channel(f"unix:{endpoint}") as channel:
            call: Any = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
            assert (await refusal(call(b"\xff\xff\xff\xff"))).code() == grpc.StatusCode.UNKNOWN
        assert len(text.getvalue().splitlines()) == 1 and "Traceback" not in text.getvalue()
        with ttdp.surviving("a test"):
            raise ValueError
        assert "Traceback" in text.getvalue()
    finally:
        logging.getLogger().removeHandler(handler)
