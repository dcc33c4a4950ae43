"""Garbage never hurts: on sockets, in requests, in what a restart remembers."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import settings_of

NAME = "tenstorrent.com/n150"
ONE = "0000:01:00.0"
TWO = "0000:02:00.0"
NINE = "0000:09:00.0"
INVALID = grpc.StatusCode.INVALID_ARGUMENT
MISSING = grpc.StatusCode.NOT_FOUND


@pytest.fixture
def node(node: SimulatedNode, ticking: None) -> SimulatedNode:
    """Two cards that live."""
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


# -- on the socket ---------------------------------------------------------------------------------


async def test_random_bytes_and_half_open_connections_are_closed_and_forgotten(
    endpoint: Path, kubelet: Kubelet
) -> None:
    """A hundred strangers who talk nonsense or nothing cost no descriptor for long."""
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
    # Ours are open still; the server's ends go when their time for a handshake is over.
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(strangers) + 1)
    for stranger in strangers:
        stranger.close()
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
async def test_an_allocation_that_cannot_be_is_refused(
    stub: Any, request_: pb.AllocateRequest, code: grpc.StatusCode
) -> None:
    """With the code that says whose fault it is, and a message that fits on a line."""
    error = await refusal(stub.Allocate(request_))
    assert error.code() == code
    assert len(error.details() or "") < 400


async def test_an_impossible_preference_is_an_invalid_argument(stub: Any) -> None:
    """More than there is, and unknown IDs by the thousand."""
    for available, size in (([ONE], 2), ([f"id-{n}" for n in range(10_000)], 10_000)):
        error = await refusal(stub.GetPreferredAllocation(preference(available, size)))
        assert error.code() == INVALID


async def test_what_asks_for_nothing_has_an_answer(stub: Any) -> None:
    """A preference of size 0, the start of a container whose devices nobody knows."""
    answer = await stub.GetPreferredAllocation(preference([ONE], 0))
    assert [list(container.deviceIDs) for container in answer.container_responses] == [[]]
    for ids in ([], [NINE, ""]):
        request = pb.PreStartContainerRequest(devices_ids=ids)
        assert await stub.PreStartContainer(request) == pb.PreStartContainerResponse()


async def test_an_unhealthy_device_is_not_allocated(
    node: SimulatedNode, stub: Any, kubelet: Kubelet
) -> None:
    """Asked for nevertheless, it is a failed precondition that names the device and the reason."""
    node.chips[0].die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(NAME))
    error = await refusal(stub.Allocate(allocation([ONE])))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert all(word in (error.details() or "") for word in (ONE, "does not respond"))


async def test_many_calls_at_once_are_all_answered(stub: Any) -> None:
    """Five hundred allocations at a time, good and bad ones mixed."""
    calls = [stub.Allocate(allocation([ONE if n % 2 else "no"])) for n in range(500)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(outcome, pb.AllocateResponse) for outcome in outcomes) == 250


@pytest.mark.parametrize("method", ["Allocate", "ListAndWatch", "PreStartContainer"])
async def test_bytes_that_are_no_protobuf_are_an_error_and_one_line(
    endpoint: Path, method: str
) -> None:
    """gRPC would log a traceback, as if the error were ours; a traceback of ours is still one."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(ttdp._without_traceback_of_garbage)
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


# -- in what a restart remembers -------------------------------------------------------------------

POD = "0b6cd6e4-9fd5-4b5c-8d4e-4a3a5f6f2d61"


class Remembered(NamedTuple):
    """A daemon's state directory, and what a former daemon of this boot has left in it."""

    settings: ttdp.Settings
    state: dict[str, Any]

    def recall(self, content: bytes) -> dict[str, ttdp.Resource]:
        """What a new daemon lists, before it has seen any chip, if the file holds this."""
        settings = self.settings
        Path(f"{settings.state_dir}/state.json").write_bytes(content)
        memory = ttdp.Memory(settings)
        fleet = ttdp.Fleet(memory.chips, [])
        fleet.show_former()
        custody = ttdp.Custody(settings.device_plugin_dir, settings.sysfs_root, memory.custody)
        custody.look(0)
        chips = fleet.chips.values()
        given = ttdp.configured_resources(chips, settings)
        listed = ttdp.resources(given, chips, ttdp.Claims(custody.allocations(0)))
        for name, resource in listed.items():
            pb.RegisterRequest(resource_name=name)
            ttdp.device_list(resource)
        fleet.observe(settings)
        memory.save(chips=fleet.memory(), custody=custody.memory())
        return listed


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remembered]:
    """Of a p300 and a pod that has one of its chips."""
    home = tmp_path_factory.mktemp("state")
    node = SimulatedNode(home / "node")
    node.add("p300c", numa_node=1)
    settings = settings_of(node, home / "plugins", state_dir=str(home))
    fleet = ttdp.Fleet({}, [])
    functions = fleet.observe(settings)
    readings = [ttdp.Reading(each, ttdp.read_telemetry(each), True, None) for each in functions]
    fleet.learn(readings, settings.health, 0)
    entry = ["tenstorrent.com/p300", [ONE], [ONE], POD, "main"]
    custody = {"allocations": [entry], "cgroups": {POD[::-1]: "/sys/fs/cgroup/pods"}}
    node.unload_driver()
    yield Remembered(settings, {"boot": None, "chips": fleet.memory(), "custody": custody})


def spoilt(state: Any, path: tuple[str | int, ...], value: object) -> bytes:
    """The state with another value at a place of it."""
    outer = {"": copy.deepcopy(state)}
    at: Any = outer
    for key in ("", *path)[:-1]:
        at = at[key]
    at[("", *path)[-1]] = value
    return json.dumps(outer[""]).encode()


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every path into a JSON value."""
    yield path
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def test_what_is_sound_is_remembered(remembered: Remembered) -> None:
    """The chips that were seen since boot, with their serials, and the ID that a pod has."""
    listed = remembered.recall(json.dumps(remembered.state).encode())
    (resource,) = listed.values()
    assert list(resource.devices) == [ONE, TWO]
    serials = {each.chips[0].identity.serial for each in resource.devices.values()}
    assert len(serials) == 1 and None not in serials
    reasons = {key: device.reason or "" for key, device in resource.devices.items()}
    assert all("PCI device is gone" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\0" * 99, b"\xff", b"{}", b'{"boot": null, "chips": 5}']
)
def test_what_is_no_state_is_none(remembered: Remembered, content: bytes) -> None:
    """Whatever is in the file, there is a daemon."""
    assert remembered.recall(content) == {}


def test_what_was_seen_before_the_boot_is_forgotten(remembered: Remembered) -> None:
    """Cards can be in other slots by now."""
    assert remembered.recall(spoilt(remembered.state, ("boot",), "another")) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [("arch", "grayskull"), ("arch", ["wormhole"]), ("pci_card", "x1"), ("ordinal", "0"),
     ("ordinal", True), ("numa_node", "1"), ("path", None), ("sysfs", 5)],
)  # fmt: skip
def test_a_chip_of_which_anything_is_false_is_not_remembered(
    remembered: Remembered, key: str, value: object
) -> None:
    """The other one is, and what the pod has is listed as what is not on this node."""
    path = ("chips", ONE, "function", key)
    (resource,) = remembered.recall(spoilt(remembered.state, path, value)).values()
    assert {key: len(device.chips) for key, device in resource.devices.items()} == {ONE: 0, TWO: 1}


def test_a_chip_at_no_address_is_not_remembered(remembered: Remembered) -> None:
    """Nothing but PCI addresses can be sorted, or asked of sysfs."""
    chips = {"01:00": remembered.state["chips"][ONE]}
    (resource,) = remembered.recall(spoilt(remembered.state, ("chips",), chips)).values()
    assert list(resource.devices) == [ONE] and not resource.devices[ONE].chips


def test_of_a_chip_only_what_has_its_form_is_remembered(remembered: Remembered) -> None:
    """Values of another type or form count as not said."""
    state = copy.deepcopy(remembered.state)
    identity = {"card": 5, "serial": "no hex", "asic_id": None, "firmware": [1]}
    state["chips"][TWO] |= {"identity": identity, "stalled_at": "7", "has_spoken": 1}
    (resource,) = remembered.recall(json.dumps(state).encode()).values()
    (chip,) = resource.devices[TWO].chips
    assert (chip.identity, chip.health.heartbeat) == (ttdp.Identity(), None)
    assert chip.has_spoken is False


def test_an_answer_without_chips_is_not_remembered(remembered: Remembered) -> None:
    """Its ID would be a healthy device that is none."""
    path = ("custody", "allocations", 0, 2)
    (resource,) = remembered.recall(spoilt(remembered.state, path, [])).values()
    assert [chip.bdf for chip in resource.devices[ONE].chips] == [ONE]


any_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(["card", ONE]), inner, max_size=3)
    ),
    max_leaves=5,
)


@hypothesis_settings(deadline=None, max_examples=80)
@given(any_json, st.data())
def test_what_is_remembered_is_checked_value_by_value(
    remembered: Remembered, value: object, data: st.DataObject
) -> None:
    """Any value in any place, and a file that is no state at all: the daemon starts."""
    path = data.draw(st.sampled_from([*places(remembered.state)]))
    remembered.recall(spoilt(remembered.state, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("chips", ONE, "function", "numa_node"), 2**70),
        (("custody", "allocations", 0, 0), "\ud800"),
        (("custody", "allocations", 0, 1, 0), "\ud800"),
    ],
)
def test_what_no_kubelet_can_be_told_is_not_remembered(
    remembered: Remembered, path: tuple[str | int, ...], value: object
) -> None:
    """A number beyond 64 bits, a text that is no Unicode: the daemon starts."""
    remembered.recall(spoilt(remembered.state, path, value))
