"""Allocate and its like: which chips an answer has, whatever happens meanwhile; refusals."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
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


def preference(available: list[str], size: int) -> pb.PreferredAllocationRequest:
    request = pb.PreferredAllocationRequest()
    request.container_requests.add(available_deviceIDs=available, allocation_size=size)
    return request


# -- host paths ------------------------------------------------------------------------------------


def lead(link: Path, target: str) -> None:
    """Let udev's link of a chip lead to another device file."""
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def looks_for_links(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the address is added each time that a chip's link is looked for."""
    looks: list[str] = []
    genuine = ttdp.link_path

    def look(settings: ttdp.Settings, function: ttdp.PciFunction) -> str | None:
        looks.append(function.address)
        return genuine(settings, function)

    monkeypatch.setattr(ttdp, "link_path", look)
    return looks


async def test_the_link_of_udev_is_waited_for(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate waits for all of them while udevd runs, as the kubelet keeps the answer."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    looks = looks_for_links(monkeypatch)
    one, other = node.chips
    lead(one.by_pci, "../7")  # to another chip's
    await start(interval=AN_HOUR)
    await kubelet.registered(N150)

    admission = asyncio.create_task(kubelet.admit("pod", "main", {N150: 2}))
    await until(lambda: len(looks) > 4)
    lead(one.by_pci, f"../{one.ordinal}")
    answer = await admission

    assert {each.host_path for each in answer.devices} == {str(one.by_pci), str(other.by_pci)}


@pytest.mark.parametrize("udev_runs", [True, False])
async def test_without_a_link_a_container_gets_the_device_file(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    udev_runs: bool,
) -> None:  # fmt: skip
    """After a second while udevd runs, else at once. The other chip has its link."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", 0.2 if udev_runs else AN_HOUR)
    one, other = node.chips
    one.by_pci.unlink()
    if not udev_runs:
        (node.root / "run/udev/control").unlink()
    await start(interval=AN_HOUR)
    await kubelet.registered(N150)

    answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    assert {each.host_path for each in answer.devices} == {str(one.device_node), str(other.by_pci)}


async def test_with_cdi_a_pod_gets_names_unless_the_file_cannot_be_written(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing waits for udev's link: the runtime takes the host path from the CDI file."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", AN_HOUR)
    for chip in node.chips:
        chip.by_pci.unlink()
    file = short_tmp / "cdi" / ttdp.CDI_FILE
    file.mkdir(parents=True)
    daemon = await start(interval=0.1, device_list_strategy="cdi")
    await kubelet.registered(N150)

    problem = f"{file} cannot be written: Is a directory"
    await until(lambda: problem in daemon.status)
    async with client(directory) as stub:
        call = stub.Allocate(allocation([node.chips[0].bdf]))
        assert await refusal(call) == ("UNAVAILABLE", problem)

    file.rmdir()
    await until(lambda: problem not in daemon.status)
    answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)
    assert answer.cdi_devices == [f"tenstorrent.com/device={each.bdf}" for each in node.chips]
    assert not answer.devices and not answer.mounts


# -- changes while a request is answered -----------------------------------------------------------


@pytest.mark.parametrize("is_scanning", [True, False])
async def test_a_renumbering_at_any_moment_of_an_allocate_gives_no_wrong_chip(
    tmp_path: Path, directory: Path, is_scanning: bool
) -> None:
    """The answer is checked against sysfs at its moment, whatever the daemon has seen before."""
    node = SimulatedNode(tmp_path / "unlinked", links=False)
    chips = node.add("n150") + node.add("n150")
    results: list[str] = []

    def allocate(chip: Chip) -> None:
        """Ask for a chip, in the middle of what the driver does: there is nothing to wait for."""
        request = daemon.daemon.sessions.allocator.allocate(N150, [[chip.bdf]])
        try:
            request.send(None)
        except StopIteration as answered:
            (device,) = answered.value[0].devices
            assert device.host_path == str(chip.device_node)
            assert device.container_path == f"/dev/tenstorrent/{chip.ordinal}"
            results.append("answered")
        except ttdp.RequestError as error:
            assert error.args[0] == grpc.StatusCode.FAILED_PRECONDITION
            assert chip.bdf in error.args[1]
            results.append("refused")

    def allocate_each() -> None:
        for chip in chips:
            if is_scanning:
                daemon.host.scan(is_poll=False)
            allocate(chip)

    async with RunningDaemon(node, settings_of(node, directory, interval=AN_HOUR)) as daemon:
        await daemon.ready()

        node.on_step = allocate_each
        for _ in range(3):
            node.swap_ordinals(chips[0].bdf, chips[1].bdf)
            await until(lambda: all(daemon.chip(c.bdf).is_present for c in chips))
        node.on_step = None

    assert {*results} == {"answered", "refused"}


async def test_an_allocate_under_way_at_a_reload_gives_no_chip_twice(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It waits for a link while its resource ends: it is rejected, and the next one granted."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    chip, _ = node.chips
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    (old,) = plugin_sockets(directory)
    link = chip.by_pci.rename(node.root / "link")
    looks = looks_for_links(monkeypatch)

    async def is_granted(socket_name: str) -> bool:
        async with client(directory, socket_name) as stub:
            try:
                await stub.Allocate(allocation([chip.bdf]))
            except grpc.aio.AioRpcError:
                return False
            return True

    first = asyncio.create_task(is_granted(old))
    await until(lambda: looks)
    daemon.reload(resource_domain="example.org")
    await kubelet.registered("example.org/n150")
    link.rename(chip.by_pci)

    assert not await first
    (new,) = set(plugin_sockets(directory)) - {old}
    assert await is_granted(new)


# -- refusals and garbage --------------------------------------------------------------------------


async def test_a_refusal_names_the_device_and_is_counted(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the code of its cause; a device without its device file fails at that moment."""
    good, gone = (chip.bdf for chip in node.chips)
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    node.on_uevent = None
    node.chips[1].device_node.unlink()

    async with client(directory) as stub:
        for call, code, device in (
            (stub.Allocate(allocation([NINE])), "NOT_FOUND", NINE),
            (stub.Allocate(allocation([good], [gone])), "FAILED_PRECONDITION", gone),
            (stub.GetPreferredAllocation(preference([NINE], 1)), "INVALID_ARGUMENT", NINE),
        ):
            found, message = await refusal(call)
            assert found == code and device in message
            assert f"{N150}: rejected {'Get' if code[0] == 'I' else 'Allocate'}" in caplog.text

        assert len((await stub.Allocate(allocation([good]))).container_responses) == 1
        with monkeypatch.context() as patch:
            patch.setattr(ttdp, "file_stamp", no_descriptors)
            own = ("UNAVAILABLE", "internal error: [Errno 24] Too many open files")
            assert await refusal(stub.Allocate(allocation([good]))) == own
            assert await refusal(stub.GetPreferredAllocation(preference([good], 1))) == own
            start_call = stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[good]))
            assert await refusal(start_call) == own

    metrics = await daemon.metrics() or ""
    for line in ("granted", 1), ("refused", 3):
        assert 'tt_allocations_total{{resource="{}",result="{}"}} {}'.format(N150, *line) in metrics


async def test_an_id_that_has_just_left_the_list_is_no_error_in_a_question(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """The kubelet still has the former list; an ID that was never listed is one."""
    good, excluded = (chip.bdf for chip in node.chips)
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    daemon.reload(exclude=(excluded,))
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {good})

    async with client(directory) as stub:
        answer = await stub.GetPreferredAllocation(preference([excluded, good], 1))
        assert answer.container_responses[0].deviceIDs == [good]
        code, _ = await refusal(stub.GetPreferredAllocation(preference([NINE, good], 1)))
        assert code == "INVALID_ARGUMENT"


async def test_random_bytes_and_half_open_connections_are_closed(
    kubelet: Kubelet, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred clients that send garbage or nothing keep no descriptor for long."""
    monkeypatch.setattr(ttdp, "SERVER_OPTIONS", (("grpc.server_handshake_timeout_ms", 500),))
    await start()
    await kubelet.registered(N150)
    (name,) = plugin_sockets(directory)
    before = len(os.listdir("/proc/self/fd"))
    dice = random.Random(1)

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for number, each in enumerate(clients):
            each.connect(str(directory / name))
            if number % 2:
                each.send(dice.randbytes(dice.randrange(1, 5000)))

        await kubelet.admit("pod", "main", {N150: 1})
        # Ours are open still; the server's ends go when their time for a handshake is over.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(clients) + 1)

    await kubelet.admit("other", "main", {N150: 1})


async def test_bytes_that_are_no_protobuf_are_an_error_and_one_line(
    kubelet: Kubelet, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would log a traceback; tracebacks of internal errors are kept."""
    await start()
    await kubelet.registered(N150)
    (name,) = plugin_sockets(directory)
    root, stderr = logging.getLogger(), io.StringIO()
    handlers = [*root.handlers]
    monkeypatch.setattr("sys.stderr", stderr)
    ttdp.set_up_logging({}, has_timestamps=False)

    try:
        async with grpc.aio.insecure_channel(f"unix:{directory / name}") as channel:
            call: Any = channel.unary_unary("/v1beta1.DevicePlugin/Allocate")
            assert (await refusal(call(b"\xff\xff\xff\xff")))[0] == "UNKNOWN"
        assert stderr.getvalue().count("DecodeError") == 1
        assert "Traceback" not in stderr.getvalue()

        with ttdp.log_and_continue("a test"):
            raise ValueError
        assert "Traceback" in stderr.getvalue()
    finally:
        logging.basicConfig(handlers=handlers, force=True)
