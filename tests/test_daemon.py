"""The main job: a simulated node, the daemon, and a kubelet with real gRPC on real sockets."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import WATCHDOG, StartDaemon, plugin_sockets
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import STALLS, RunningDaemon, settings_of

N150, P150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p150", "tenstorrent.com/p300"


async def ready(daemon: RunningDaemon) -> None:
    await until(lambda: daemon.notified("READY=1"))


async def test_each_board_is_a_resource_with_a_device_per_device_file(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """All are registered, healthy."""
    expected = {"n150": 1, "n300": 1, "p300": 2, "p150": 1}
    for card in ("n150", "n300", "p300c", "p150a"):
        node.add(card)
    await start()
    for resource in expected:
        await kubelet.registered(f"tenstorrent.com/{resource}")
    capacity = {f"tenstorrent.com/{name}": number for name, number in expected.items()}

    assert kubelet.capacity() == kubelet.allocatable() == capacity


async def test_a_container_gets_device_file_addresses_and_hugepages(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The device file by its link on the host, under the host's number in the container.

    The hugepages are in directories of the container's own.
    """
    (chip,) = node.add("n300")
    node.set_hugepages(8)
    await start()
    await kubelet.registered("tenstorrent.com/n300")
    got = await kubelet.admit("pod", "main", {"tenstorrent.com/n300": 1})
    assert got.envs == {"TT_VISIBLE_DEVICES": chip.bdf, "TT_DEVICE_PLUGIN_DEVICES": chip.bdf}
    devices = [(d.host_path, d.container_path, d.permissions) for d in got.devices]
    assert devices == [(str(chip.by_pci), "/dev/tenstorrent/0", "rw")]
    (name,) = got.annotations.values()
    assert [(m.host_path, m.container_path, m.read_only) for m in got.mounts] == [
        (f"{node.root}{path}/tt-device-plugin/{name}", path, False)
        for path in ("/dev/hugepages-1G", "/dev/hugepages")
    ]


@pytest.mark.usefixtures("ticking")
async def test_an_unhealthy_chip_leaves_allocatable_until_it_recovers(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Its capacity stays; the log has one line each way."""
    chip, other = node.add("n150") + node.add("n150")
    daemon = await start(health=STALLS)
    await kubelet.registered(N150)
    chip.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})

    assert kubelet.capacity()[N150] == 2 and kubelet.allocatable()[N150] == 1
    assert "heartbeat stalled" in str(daemon.chip(chip.bdf).reason)
    with pytest.raises(AdmissionError):
        await kubelet.admit("pod", "main", {N150: 2})

    chip.thaw()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {chip.bdf, other.bdf})
    lines = [line for line in caplog.messages if ": unhealthy: " in line or "again" in line]

    assert len(lines) == 2 and all(line.startswith(chip.bdf) for line in lines)


async def test_hot_plug_reaches_the_kubelet_by_events(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Polls are an hour apart. The first card of a node becomes a resource, too."""
    daemon = await start(interval=3600)
    await ready(daemon)
    assert not kubelet.find("register")

    (chip,) = node.add("p150a")
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == {chip.bdf})
    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150) == {chip.bdf})
    chip.come_back()
    await kubelet.wait_for(lambda: not kubelet.unhealthy(P150))
    (new,) = node.add("p150a")
    await kubelet.wait_for(lambda: new.bdf in kubelet.healthy(P150))


# -- ready -----------------------------------------------------------------------------------------


async def test_it_is_ready_when_the_driver_has_bound_to_every_card(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet that runs already gets the cards that are bound meanwhile."""
    node.add("p150a")
    first, second = node.add("n150") + node.add("n150")
    first.unbind()
    second.unbind()
    daemon = await start(interval=3600)
    waiting = "STATUS=waiting for the driver to create a device file for"
    await until(lambda: daemon.notified(f"{waiting} {first.bdf}"))
    await kubelet.registered(P150)
    first.bind()
    await until(lambda: daemon.notified(f"{waiting} {second.bdf}"))

    assert not daemon.notified("READY=1")

    second.bind()
    await ready(daemon)
    assert daemon.notified("STATUS=2 × tenstorrent.com/n150, 2 healthy; 1 × tenstorrent.com/p150")


async def test_it_is_ready_after_ten_seconds_without_a_card(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line names the card; it is found all the same when it comes."""
    monkeypatch.setattr("ttdp.BIND_TIMEOUT", 0.3)
    (chip,) = node.add("n150")
    chip.unbind()
    daemon = await start(interval=3600)
    await ready(daemon)

    assert sum(chip.bdf in line for line in caplog.messages) == 1

    chip.bind()
    await until(lambda: daemon.notified("STATUS=1 × tenstorrent.com/n150, 1 healthy"))


@pytest.mark.parametrize(
    "why", ["no driver", "another driver", "kept", "unknown", "gone", "excluded"]
)
async def test_it_does_not_wait_for_a_function_that_the_driver_cannot_have(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """None is loaded, vfio has or is to have it, it is a Grayskull, gone, or out of service."""
    monkeypatch.setattr("ttdp.BIND_TIMEOUT", 4 * PATIENCE)
    (chip,) = node.add("n150")
    chip.unbind()
    if why == "no driver":
        node.unload_driver()
    elif why == "another driver":
        chip.bind_to("vfio-pci")
    elif why == "kept":
        chip.keep_for("vfio-pci")
    elif why == "unknown":
        chip.write("device", b"0xfaca\n")
    elif why == "gone":
        chip.vanish()
    excluded = (chip.bdf,) if why == "excluded" else ()
    await ready(await start(interval=3600, exclude=excluded))


# -- host paths ------------------------------------------------------------------------------------


async def test_the_link_of_udev_is_waited_for(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocate waits for it if the rule is in force, as the kubelet keeps the answer."""
    monkeypatch.setattr("ttdp.LINK_TIMEOUT", PATIENCE)
    chip, _ = node.add("n150") + node.add("n150")
    (chip.by_pci.parent / "0000:09:00.0").symlink_to("../9")  # the rule is in force
    chip.mislead("../7")  # to another chip's
    later = asyncio.get_running_loop().call_later
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    await ready(daemon)
    later(0.1, chip.mislead, f"../{chip.ordinal}")
    answer = await kubelet.admit("pod", "main", {N150: 2})

    assert str(chip.by_pci) in [device.host_path for device in answer.devices]
    assert chip.by_pci.readlink() == Path(f"../{chip.ordinal}")


@pytest.mark.parametrize("has_rule", [True, False])
async def test_without_the_link_a_container_gets_the_device_file(
    tmp_path: Path, directory: Path, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    has_rule: bool,
) -> None:  # fmt: skip
    """After a second if the rule is in force, else at once."""
    monkeypatch.setattr("ttdp.LINK_TIMEOUT", 0.2 if has_rule else 4 * PATIENCE)
    node = SimulatedNode(tmp_path / "unlinked", links=has_rule)
    chip, _ = node.add("n150") + node.add("n150")
    if has_rule:
        chip.mislead()
    settings = settings_of(node, directory, interval=3600)
    async with RunningDaemon(node, settings) as daemon:
        await ready(daemon)
        await kubelet.registered(N150)
        answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    assert str(chip.device_node) in [device.host_path for device in answer.devices]


async def test_with_cdi_nothing_waits_for_the_link(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The answer has no host path; the runtime takes that from the CDI file."""
    monkeypatch.setattr("ttdp.LINK_TIMEOUT", 4 * PATIENCE)
    chip, _ = node.add("n150") + node.add("n150")
    chip.mislead()
    (short_tmp / "cdi").mkdir()
    await start(interval=3600, device_list_strategy="cdi")
    await kubelet.registered(N150)
    answer = await asyncio.wait_for(kubelet.admit("pod", "main", {N150: 2}), PATIENCE)

    assert f"tenstorrent.com/device={chip.bdf}" in answer.cdi_devices and not answer.devices


async def test_with_cdi_but_without_its_directory_allocate_is_refused(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Log and status report it, until the directory appears; a runtime finds no device before."""
    (chip,) = node.add("n150")
    cdi = short_tmp / "cdi"
    daemon = await start(interval=0.1, device_list_strategy="cdi")
    await kubelet.registered(N150)
    file = f"{cdi}/tenstorrent.com-device.json"
    problem = f"pods cannot get devices through {file}: {cdi} does not exist"
    status = f"STATUS=1 × {N150}, 1 healthy; registered with kubelet"
    await until(lambda: f"{status}; {problem}" in daemon.notes)

    assert caplog.messages.count(problem) == 1

    (name,) = plugin_sockets(directory)
    async with grpc.aio.insecure_channel(f"unix:{directory}/{name}") as channel:
        stub: Any = rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        request = pb.AllocateRequest()
        request.container_requests.add(devices_ids=[chip.bdf])

        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Allocate(request)
        assert (refusal.value.code().name, refusal.value.details()) == ("UNAVAILABLE", problem)
    daemon.forget_notes()
    cdi.mkdir()
    await until(lambda: status in daemon.notes)
    await kubelet.admit("pod", "main", {N150: 1})

    assert ttdp.cdi_nodes(Path(file).read_text()) == {chip.bdf: str(chip.device_node)}


@pytest.mark.parametrize("is_scanning", [True, False])
async def test_a_renumbering_at_any_moment_of_an_allocate_gives_no_wrong_chip(
    tmp_path: Path, directory: Path, is_scanning: bool
) -> None:
    """The answer is checked against sysfs at its moment, whatever the daemon has seen before."""
    node = SimulatedNode(tmp_path / "unlinked", links=False)
    chips = node.add("n150") + node.add("n150")
    results: list[str] = []

    def allocate() -> None:
        for chip in chips:
            if is_scanning:
                daemon.daemon.host.read_chips(is_poll=False)
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

    settings = settings_of(node, directory, interval=3600)
    async with RunningDaemon(node, settings) as daemon:
        await ready(daemon)
        node.on_step = allocate
        for _ in range(3):
            node.swap_ordinals(chips[0].bdf, chips[1].bdf)
            await until(lambda: all(daemon.chip(c.bdf).is_present for c in chips))
        node.on_step = None
    assert {*results} == {"answered", "refused"}


async def test_a_refusal_names_the_device(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Another resource's device is not found; one without its device file fails at that moment."""
    good, gone = node.add("n150") + node.add("n150")
    (other,) = node.add("p150a")
    await start(interval=3600)
    await kubelet.registered(N150)
    node.on_uevent = None
    gone.device_node.unlink()
    (name,) = (each for each in plugin_sockets(directory) if "n150" in each)
    async with grpc.aio.insecure_channel(f"unix:{directory}/{name}") as channel:
        stub: Any = rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        for chip, code in ((other, "NOT_FOUND"), (gone, "FAILED_PRECONDITION"), (good, None)):
            request = pb.AllocateRequest()
            request.container_requests.add(devices_ids=[chip.bdf])
            try:
                assert await stub.Allocate(request) and code is None
            except grpc.aio.AioRpcError as error:
                assert error.code().name == code and chip.bdf in str(error.details())


# -- starts, reloads, ends -------------------------------------------------------------------------


@pytest.mark.usefixtures("ticking")
async def test_a_chip_that_was_dead_before_a_restart_is_unhealthy_in_the_first_list(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Its heartbeat is where it was; another one's has changed."""
    dead, revived = node.add("n150") + node.add("n150")
    daemon = await start(health=STALLS, state_dir=str(short_tmp))
    await kubelet.registered(N150)
    dead.freeze()
    revived.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {dead.bdf, revived.bdf})
    await daemon.stop()
    revived.beat()
    restarted = time.monotonic()
    await start(interval=3600, health=STALLS, state_dir=str(short_tmp))
    await kubelet.wait_for(lambda: kubelet.find("list", since=restarted))
    first = kubelet.find("list", since=restarted)[0].fields

    assert first["unhealthy_ids"] == [dead.bdf] and first["healthy_ids"] == [revived.bdf]


async def test_observations_that_fail_change_nothing_and_feed_no_watchdog(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Without descriptors, say: each second it is tried again; one line at each change."""
    monkeypatch.setattr("ttdp.RETRY_TICK", 0.05)
    (chip,) = node.add("n150")
    daemon = await start(interval=0.05, environ=WATCHDOG)
    await kubelet.registered(N150)
    failed: list[float] = []

    def fail(*_: object, **__: object) -> None:
        failed.append(time.monotonic())
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("ttdp.scan", fail)
        await until(lambda: failed)
        daemon.forget_notes()
        chip.vanish()
        await until(lambda: len(failed) > 8)
        assert not daemon.notified("WATCHDOG=1") and kubelet.healthy(N150) == {chip.bdf}
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})
    assert len(failed) <= 3 + (failed[-1] - failed[0]) / 0.05  # and one for each event
    assert daemon.notified("WATCHDOG=1")
    lines = [line for line in caplog.messages if "the node's state" in line]
    assert len(lines) == 2 and "Too many open files" in lines[0]


async def test_a_device_that_is_not_listed_is_none(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For --fail-on-init-error, too."""
    monkeypatch.setattr("ttdp.BIND_TIMEOUT", 0.3)
    (bad,) = node.add("n150")
    bad.device_node.unlink()
    bad.device_node.touch()
    daemon = await start(interval=0.1, fail_on_init_error=True)

    assert await asyncio.wait_for(daemon.ended(), PATIENCE) == 1


async def test_the_remedy_of_a_module_that_is_removed_reaches_the_log(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """It releases one chip after the other, and then goes."""
    node.add("n150")
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    for step in (node.chips[0].unbind, node.unload_driver):
        step()
        reason = "not bound" if step != node.unload_driver else "modprobe"
        await until(lambda: reason in str(daemon.chip(node.chips[0].bdf).reason))  # noqa: B023

    assert len([text for text in caplog.messages if "unhealthy: " in text]) == 2


async def test_it_can_end_at_any_moment_of_its_start(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, while and after sessions are made, and with a chip that blocks: status 0."""
    chip, _ = node.add("n150") + node.add("p150a")
    for steps in range(40):
        if steps == 30:
            chip.block()
        async with RunningDaemon(node, settings_of(node, directory, interval=3600)) as daemon:
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            assert await asyncio.wait_for(daemon.stop(), PATIENCE) == 0
    chip.unblock()

    assert "ERROR" not in {record.levelname for record in caplog.records}
