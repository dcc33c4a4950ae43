"""Requests: which chips an answer has, whatever happens meanwhile; refusals; garbage."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import StartDaemon, client, plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

N150 = "tenstorrent.com/n150"
NINE = "0000:09:00.0"  # no device


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    """Two cards."""
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


async def test_the_link_of_udev_is_waited_for(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate waits for it if the rule is in force, as the kubelet keeps the answer."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    chip, _ = node.chips
    (chip.by_pci.parent / "0000:09:00.0").symlink_to("../9")  # the rule is in force
    lead(chip.by_pci, "../7")  # to another chip's
    await start(interval=3600)
    await kubelet.registered(N150)

    asyncio.get_running_loop().call_later(0.1, lead, chip.by_pci, f"../{chip.ordinal}")
    answer = await kubelet.admit("pod", "main", {N150: 2})

    assert str(chip.by_pci) in [device.host_path for device in answer.devices]
    assert chip.by_pci.readlink() == Path(f"../{chip.ordinal}")


@pytest.mark.parametrize("has_rule", [True, False])
async def test_without_the_link_a_container_gets_the_device_file(
    tmp_path: Path, directory: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    has_rule: bool,
) -> None:  # fmt: skip
    """After a second if the rule is in force, else at once."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", 0.2 if has_rule else 4 * PATIENCE)
    node = SimulatedNode(tmp_path / "unlinked", links=has_rule)
    chip, _ = node.add("n150") + node.add("n150")
    if has_rule:
        chip.by_pci.unlink()

    async with RunningDaemon(node, settings_of(node, directory, interval=3600)):
        await kubelet.registered(N150)
        answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    assert str(chip.device_node) in [device.host_path for device in answer.devices]


async def test_with_cdi_but_without_its_directory_allocate_is_refused(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Log and status report it, until the directory appears; a runtime finds no device before.

    Then nothing waits for udev's link: the runtime takes the host path from the CDI file.
    """
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", 4 * PATIENCE)
    chip, other = node.chips
    chip.by_pci.unlink()
    cdi = short_tmp / "cdi"

    daemon = await start(interval=0.1, device_list_strategy="cdi")
    await kubelet.registered(N150)

    file = f"{cdi}/tenstorrent.com-device.json"
    problem = f"pods cannot get devices through {file}: {cdi} does not exist"
    status = f"STATUS=2 × {N150}, 2 healthy; registered with kubelet"
    await until(lambda: f"{status}; {problem}" in daemon.notes)

    assert caplog.messages.count(problem) == 1
    async with client(directory) as stub:
        assert await refusal(stub.Allocate(allocation([chip.bdf]))) == ("UNAVAILABLE", problem)

    daemon.forget_notes()
    cdi.mkdir()
    await until(lambda: status in daemon.notes)
    answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    names = [f"tenstorrent.com/device={each.bdf}" for each in (chip, other)]
    assert answer.cdi_devices == names and not answer.devices
    assert ttdp.cdi_nodes(Path(file).read_text())[chip.bdf] == str(chip.device_node)


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
            results.append("refused")

    def allocate_each() -> None:
        for chip in chips:
            if is_scanning:
                daemon.host.read_chips(is_poll=False)
            allocate(chip)

    settings = settings_of(node, directory, interval=3600)
    async with RunningDaemon(node, settings) as daemon:
        await daemon.ready()

        node.on_step = allocate_each
        for _ in range(3):
            node.swap_ordinals(chips[0].bdf, chips[1].bdf)
            await until(lambda: all(daemon.chip(c.bdf).is_present for c in chips))
        node.on_step = None

    assert {*results} == {"answered", "refused"}


def looks_for_links(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the address is added each time that a chip's link is looked for."""
    looks: list[str] = []
    genuine = ttdp.link_path

    def look(settings: ttdp.Settings, function: ttdp.PciFunction) -> str | None:
        looks.append(function.bdf)
        return genuine(settings, function)

    monkeypatch.setattr(ttdp, "link_path", look)
    return looks


async def test_an_allocate_under_way_at_a_reload_gives_no_chip_twice(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It waits for a link while its resource ends; either it or the next one is granted."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    chip, _ = node.chips
    daemon = await start(interval=5)
    await kubelet.registered(N150)
    (old,) = plugin_sockets(directory)
    link = chip.by_pci.rename(node.root / "link")

    async def is_granted(socket_name: str) -> bool:
        async with client(directory, socket_name) as stub:
            try:
                await stub.Allocate(allocation([chip.bdf]))
            except grpc.aio.AioRpcError:
                return False
            return True

    looks = looks_for_links(monkeypatch)

    first = asyncio.create_task(is_granted(old))
    await until(lambda: looks)
    daemon.reload(resource_domain="example.org")
    link.rename(chip.by_pci)
    was_granted = await first

    await kubelet.registered("example.org/n150")
    (new,) = set(plugin_sockets(directory)) - {old}
    assert await is_granted(new) is not was_granted


async def test_an_answer_has_the_settings_of_one_moment(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a link while hugepages and the kind of answers change."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    (node.root / "dev/hugepages").mkdir()
    chip, _ = node.chips
    daemon = await start(interval=3600)
    Path(daemon.settings.cdi_dir).mkdir()
    await kubelet.registered(N150)
    link = chip.by_pci.rename(node.root / "link")
    looks = looks_for_links(monkeypatch)

    admission = asyncio.create_task(kubelet.admit("pod", "main", {N150: 2}))
    await until(lambda: looks)
    daemon.reload(hugepages="none", device_list_strategy="cdi")
    await until(lambda: daemon.host.settings.hugepages == "none")
    link.rename(chip.by_pci)
    answer = await admission

    assert answer.cdi_devices and not answer.devices and not answer.mounts


async def test_an_answer_while_the_daemon_ends_is_known_to_the_next_one(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A call that is under way then has a moment; a kubelet can write its checkpoint late."""
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    monkeypatch.setattr(ttdp, "LAST_GRACE", PATIENCE)
    monkeypatch.setattr(ttdp, "STOP_TIMEOUT", PATIENCE)
    chip, _ = node.chips
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.registered(N150)
    link = chip.by_pci.rename(node.root / "link")
    looks = looks_for_links(monkeypatch)

    admission = asyncio.create_task(kubelet.admit("pod", "main", {N150: 2}))
    await until(lambda: looks)
    ending = asyncio.create_task(daemon.stop())
    await until(lambda: not plugin_sockets(kubelet.directory))
    link.rename(chip.by_pci)
    await admission
    await kubelet.stop()
    await ending

    (kubelet.directory / ttdp.CHECKPOINT).unlink()
    later = await start(state_dir=str(short_tmp))
    (hold,) = later.host.holds.current(time.monotonic())
    assert hold.chips == {each.bdf for each in node.chips}


# -- refusals and garbage --------------------------------------------------------------------------


async def test_a_refusal_names_the_device(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """With the code of its cause; a device without its device file fails at that moment."""
    good, gone = (chip.bdf for chip in node.chips)
    await start(interval=3600)
    await kubelet.registered(N150)

    node.on_uevent = None
    node.chips[1].device_node.unlink()

    async with client(directory) as stub:
        for call, code, device in (
            (stub.Allocate(allocation([NINE])), "NOT_FOUND", NINE),
            (stub.Allocate(allocation([gone])), "FAILED_PRECONDITION", gone),
            (stub.GetPreferredAllocation(preference([NINE], 1)), "INVALID_ARGUMENT", NINE),
        ):
            found, message = await refusal(call)
            assert found == code and device in message
        assert await stub.Allocate(allocation([good]))


async def test_random_bytes_and_half_open_connections_are_closed(
    kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """A hundred clients that send garbage or nothing keep no descriptor for long."""
    await start()
    await kubelet.registered(N150)
    (name,) = plugin_sockets(directory)
    before = len(os.listdir("/proc/self/fd"))
    dice = random.Random(1)

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
        for number, client in enumerate(clients):
            client.connect(str(directory / name))
            if number % 2:
                client.send(dice.randbytes(dice.randrange(1, 5000)))

        await kubelet.admit("pod", "main", {N150: 1})
        # Ours are open still; the server's ends go when their time for a handshake is over.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(clients) + 1)

    await kubelet.admit("other", "main", {N150: 1})


@pytest.mark.parametrize("method", ["Allocate", "ListAndWatch"])
async def test_bytes_that_are_no_protobuf_are_an_error_and_one_line(
    kubelet: Kubelet, start: StartDaemon, directory: Path, method: str
) -> None:
    """gRPC would log a traceback; tracebacks of internal errors are kept."""
    await start()
    await kubelet.registered(N150)
    (name,) = plugin_sockets(directory)

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(ttdp._shorten_garbage)
    logging.getLogger("grpc").addHandler(handler)

    try:
        async with grpc.aio.insecure_channel(f"unix:{directory / name}") as channel:
            call: Any = channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")
            assert (await refusal(call(b"\xff\xff\xff\xff")))[0] == "UNKNOWN"
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
    kubelet: Kubelet, start: StartDaemon, directory: Path, method: str
) -> None:
    """Kubelets name one; the loop does other work between the answers for two of them."""
    entry = ttdp.SharedResource("n150", 1000)
    await start(sharing=ttdp.Sharing(lock_dir="", resources=(entry,)))
    await kubelet.registered(N150)

    ids = sorted(kubelet.healthy(N150))
    request: Any = allocation(*([each] for each in ids))
    if method == "GetPreferredAllocation":
        request = preference([ids[0]], 1)
        request.container_requests.extend([request.container_requests[0]] * 2000)

    async with client(directory) as stub:
        call = asyncio.ensure_future(getattr(stub, method)(request))
        for _ in range(3):
            await stub.Allocate(allocation(ids[:1]))
        assert not call.done()
        call.cancel()
