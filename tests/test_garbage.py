"""Garbage on sockets and in requests."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable
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
from tests.world.processes import PATIENCE, until

NAME = "tenstorrent.com/n150"
ONE = "0000:01:00.0"
NINE = "0000:09:00.0"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MISSING = grpc.StatusCode.NOT_FOUND


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    """Two cards."""
    node.add("n150")
    node.add("n150")
    return node


@pytest.fixture
async def endpoint(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> Path:
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
    requests = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    return pb.AllocateRequest(container_requests=requests)


def preference(available: list[str], size: int) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=available, allocation_size=size)
    return request


async def test_random_bytes_and_half_open_connections_are_closed(
    endpoint: Path, kubelet: Kubelet
) -> None:
    """A hundred clients that send garbage or nothing keep no descriptor for long."""
    before = len(os.listdir("/proc/self/fd"))
    dice = random.Random(1)
    clients = []
    for number in range(100):
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(endpoint))
        if number % 2:
            client.send(dice.randbytes(dice.randrange(1, 5000)))
        clients.append(client)
    await kubelet.admit("pod", "main", {NAME: 1})
    # Ours are open still; the server's ends go when their time for a handshake is over.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(clients) + 1)
    for client in clients:
        client.close()
    await kubelet.admit("other", "main", {NAME: 1})


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (allocation(), INVALID),
        (allocation([]), INVALID),
        (allocation([ONE], []), INVALID),
        (allocation([ONE, ONE]), INVALID),
        (allocation([ONE], [ONE]), INVALID),
        (allocation([NINE]), MISSING),
        (allocation([""]), MISSING),
        (allocation(["x" * 100_000]), MISSING),
        (allocation([f"id-{n}" for n in range(10_000)]), MISSING),
    ],
)
async def test_an_impossible_allocation_is_refused(
    stub: Any, request_: pb.AllocateRequest, code: grpc.StatusCode
) -> None:
    """With the code of the cause, and a message of one line."""
    error = await refusal(stub.Allocate(request_))
    assert error.code() == code
    assert len(error.details() or "") < 400


async def test_an_impossible_preference_is_an_invalid_argument(stub: Any) -> None:
    """More devices than exist, and thousands of unknown IDs."""
    for available, size in (([ONE], 2), ([f"id-{n}" for n in range(10_000)], 10_000)):
        error = await refusal(stub.GetPreferredAllocation(preference(available, size)))
        assert error.code() == INVALID


async def test_a_request_for_nothing_is_answered(stub: Any) -> None:
    """A preference of size 0, the start of a container with unknown devices."""
    answer = await stub.GetPreferredAllocation(preference([ONE], 0))
    assert [list(container.deviceIDs) for container in answer.container_responses] == [[]]
    for ids in ([], [NINE, ""]):
        request = pb.PreStartContainerRequest(devices_ids=ids)
        assert await stub.PreStartContainer(request) == pb.PreStartContainerResponse()


async def test_an_unhealthy_device_is_not_allocated(
    node: SimulatedNode, stub: Any, kubelet: Kubelet
) -> None:
    """A failed precondition, with the device and the reason."""
    node.chips[0].die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(NAME))
    error = await refusal(stub.Allocate(allocation([ONE])))

    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert all(word in (error.details() or "") for word in (ONE, "does not respond"))


async def test_many_calls_at_once_are_all_answered(
    stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five hundred allocations at a time, good and bad ones mixed."""
    # This one process plays all parts, so that a poll's threads get no turn meanwhile.
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", PATIENCE)
    calls = [stub.Allocate(allocation([ONE if n % 2 else "no"])) for n in range(500)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(outcome, pb.AllocateResponse) for outcome in outcomes) == 250


@pytest.mark.parametrize("method", ["Allocate", "ListAndWatch", "PreStartContainer"])
async def test_bytes_that_are_no_protobuf_are_an_error_and_one_line(
    endpoint: Path, method: str
) -> None:
    """gRPC would log a traceback; tracebacks of internal errors are kept."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(ttdp._shorten_garbage)
    logging.getLogger("grpc").addHandler(handler)
    try:
        async with grpc.aio.insecure_channel(f"unix:{endpoint}") as channel:
            call: Any = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
            assert (await refusal(call(b"\xff\xff\xff\xff"))).code() == grpc.StatusCode.UNKNOWN
        assert len(text.getvalue().splitlines()) == 1 and "Traceback" not in text.getvalue()

        ttdp.log.addHandler(handler)
        with ttdp.log_and_continue("a test"):
            raise ValueError
        assert "Traceback" in text.getvalue()
    finally:
        logging.getLogger("grpc").removeHandler(handler)
        ttdp.log.removeHandler(handler)


@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation"])
async def test_a_request_for_thousands_of_containers_keeps_no_other_call_waiting(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, method: str
) -> None:
    """Kubelets name one; the loop does other work between the answers for two of them."""
    entry = ttdp.SharedResource("n150", 1000)
    await start(sharing=ttdp.Sharing(lock_dir="", resources=(entry,)))
    await kubelet.registered(NAME)
    ids = sorted(kubelet.healthy(NAME))
    request: Any = allocation(*([each] for each in ids))
    if method == "GetPreferredAllocation":
        request = preference([ids[0]], 1)
        request.container_requests.extend([request.container_requests[0]] * 2000)

    (path,) = directory.glob("tt-*")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        stub: Any = rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        call = asyncio.ensure_future(getattr(stub, method)(request))
        for _ in range(3):
            await stub.Allocate(allocation(ids[:1]))
        assert not call.done()
        call.cancel()
