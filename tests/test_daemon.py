"""The main job, end to end: simulated node, daemon, kubelet, real gRPC on real sockets."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

pytestmark = pytest.mark.usefixtures("ticking")

N150, P150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p150", "tenstorrent.com/p300"


async def test_registers_every_resource_with_all_its_devices(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Each board type becomes a resource whose capacity is its number of device nodes."""
    for card in ("n150", "n300", "p300c", "p150a"):
        node.add(card)
    await start()
    for resource in ("n150", "n300", "p300", "p150"):
        await kubelet.registered(f"tenstorrent.com/{resource}")
    expected = {"n150": 1, "n300": 1, "p300": 2, "p150": 1}
    assert (
        kubelet.capacity()
        == kubelet.allocatable()
        == {f"tenstorrent.com/{k}": n for k, n in expected.items()}
    )


async def test_a_container_gets_its_node_its_address_and_the_hugepages(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The node under the host's number, the two variables, and the hugepages of the host."""
    node.add("n300")
    node.set_hugepages(8)
    await start()
    await kubelet.registered("tenstorrent.com/n300")
    got = await kubelet.admit("pod", "main", {"tenstorrent.com/n300": 1})
    bdf = node.chips[0].bdf
    assert got.envs == {"TT_VISIBLE_DEVICES": bdf, "TT_DEVICE_PLUGIN_DEVICES": bdf}
    assert [(d.host_path, d.container_path, d.permissions) for d in got.devices] == [
        (f"{node.root}/dev/tenstorrent/by-pci/{bdf}", "/dev/tenstorrent/0", "rw")
    ]
    assert [(m.host_path, m.container_path, m.read_only) for m in got.mounts] == [
        (f"{node.root}/dev/hugepages-1G", "/dev/hugepages-1G", False),
        (f"{node.root}/dev/hugepages", "/dev/hugepages", False),
    ]


async def test_two_chips_are_the_two_of_one_board(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """With one chip of three p300 taken, two are a whole board, and one is the broken board's."""
    for _ in range(3):
        node.add("p300c")
    daemon = await start()
    await kubelet.registered(P300)
    first = await kubelet.admit("one", "main", {P300: 1})
    pair = await kubelet.admit("two", "main", {P300: 2})
    other = await kubelet.admit("three", "main", {P300: 1})
    one, two, three = (
        [
            daemon.chip(bdf).identity.serial
            for bdf in got.envs["TT_DEVICE_PLUGIN_DEVICES"].split(",")
        ]
        for got in (first, pair, other)
    )
    assert two[0] == two[1] != one[0] == three[0]


async def test_a_stalled_heartbeat_takes_the_device_out_and_its_return_brings_it_back(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Allocatable drops, capacity stays, the log has one line each way."""
    chip, other = node.add("n150") + node.add("n150")
    daemon = await start()
    await kubelet.registered(N150)
    chip.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})
    assert kubelet.capacity()[N150] == 2 and kubelet.allocatable()[N150] == 1
    assert "heartbeat stalled" in daemon.chip(chip.bdf).health.reason
    with pytest.raises(AdmissionError):
        await kubelet.admit("pod", "main", {N150: 2})
    chip.thaw()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {chip.bdf, other.bdf})
    lines = [
        record.message
        for record in caplog.records
        if chip.bdf in record.message and "health" in record.message
    ]
    assert len(lines) == 2


async def test_a_device_keeps_its_identity_through_renumbering(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """After two chips have swapped their ordinals an ID is the same chip, under its new node."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    known = daemon.chip(first.bdf)
    node.swap_ordinals(first.bdf, second.bdf)
    await until(
        lambda: daemon.chip(first.bdf).function.ordinal == 1 and not kubelet.unhealthy(N150)
    )
    assert (daemon.chip(first.bdf).identity.serial, daemon.chip(first.bdf).identity.asic_id) == (
        known.identity.serial,
        known.identity.asic_id,
    )
    got = await kubelet.admit("pod", "main", {N150: 2})
    assert [d.container_path for d in got.devices] == ["/dev/tenstorrent/1", "/dev/tenstorrent/0"]


async def test_hot_plug_reaches_the_kubelet_by_events_alone(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """With polls an hour apart, a card that goes is Unhealthy and one that comes is there."""
    gone, _ = node.add("p150a") + node.add("p150a")
    await start(interval=3600)
    await kubelet.registered(P150)
    gone.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150) == {gone.bdf})
    gone.come_back()
    await kubelet.wait_for(lambda: not kubelet.unhealthy(P150))
    new = node.add("p150a")[0]
    await kubelet.wait_for(lambda: new.bdf in kubelet.healthy(P150))


async def test_late_firmware_gains_its_identity_without_changing_its_id(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A silent card is listed, healthy, as what PCI says; when it speaks its serial is known."""
    chip = node.add("n150", firmware=False)[0]
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    assert kubelet.healthy(N150) == {chip.bdf} and daemon.chip(chip.bdf).identity.serial is None
    chip.speak()
    await until(lambda: daemon.chip(chip.bdf).identity.serial == chip.facts.telemetry["tt_serial"])
    assert kubelet.healthy(N150) == {chip.bdf} and len(kubelet.find("list")) == 1


async def test_nothing_is_registered_without_devices_and_the_first_one_is_at_once(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """A node without cards serves no socket; a card that is plugged in later becomes a resource."""
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    assert not kubelet.find("register")
    node.add("n150")
    await kubelet.registered(N150)


# -- a driver that comes late ----------------------------------------------------------------------


async def ready(daemon: RunningDaemon) -> None:
    await until(lambda: daemon.notified("READY=1"))


async def test_is_ready_when_the_driver_has_bound_to_everything_on_the_bus(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """At boot coldplug may load the driver after us; the kubelet is ordered behind READY."""
    first, second = node.add("n150") + node.add("n150")
    first.unbind()
    second.unbind()
    daemon = await start(interval=3600)
    await until(
        lambda: daemon.notified(f"STATUS=waiting for the driver to make a node for {first.bdf}")
    )
    first.bind()
    await until(
        lambda: daemon.notified(f"STATUS=waiting for the driver to make a node for {second.bdf}")
    )
    assert not daemon.notified("READY=1")
    second.bind()
    await ready(daemon)
    assert daemon.notified("STATUS=2 × tenstorrent.com/n150, 2 healthy")


async def test_serves_what_is_there_while_it_waits_for_the_rest(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Only READY is put off: a kubelet that runs already has the cards that are bound."""
    node.add("p150a")
    node.add("n150")[0].unbind()
    daemon = await start(interval=3600)
    await kubelet.registered(P150)
    assert not daemon.notified("READY=1")


async def test_is_ready_in_the_end_without_a_function_that_the_driver_does_not_bind_to(
    node: SimulatedNode,
    start: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After its time, with a line that names it; what comes later is found all the same."""
    monkeypatch.setattr("ttdp.BIND_PATIENCE", 0.3)
    chip = node.add("n150")[0]
    chip.unbind()
    daemon = await start(interval=3600)
    await ready(daemon)
    assert sum(chip.bdf in record.message for record in caplog.records) == 1
    chip.bind()
    await until(lambda: daemon.notified("STATUS=1 × tenstorrent.com/n150, 1 healthy"))


@pytest.mark.parametrize(
    "why", ["no driver", "another driver", "kept for another", "not for the driver", "gone"]
)
async def test_waits_for_nothing_that_the_driver_cannot_have(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """No driver, a function that vfio has or shall have, a Grayskull: no delay."""
    monkeypatch.setattr("ttdp.BIND_PATIENCE", 4 * PATIENCE)
    chip = node.add("n150")[0]
    chip.unbind()
    if why == "no driver":
        node.unload_driver()
    elif why == "another driver":
        chip.bind_to("vfio-pci")
    elif why == "kept for another":
        chip.keep_for("vfio-pci")
    elif why == "not for the driver":
        chip.write("device", b"0xfaca\n")
    elif why == "gone":
        chip.vanish()
    daemon = await start(interval=3600)
    await ready(daemon)


# -- which node ------------------------------------------------------------------------------------


async def test_a_link_that_udev_has_yet_to_make_is_waited_for(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet keeps the answer over reboots; without a link it is the node of now."""
    chip = node.add("n150")[0]
    await start(interval=3600)
    await kubelet.registered(N150)

    async def host_path() -> str:
        got = await kubelet.admit("pod", "main", {N150: 1})
        kubelet.remove_pod("pod")
        return got.devices[0].host_path

    chip.mislead()
    monkeypatch.setattr("ttdp.LINK_PATIENCE", 0.05)
    assert await host_path() == str(chip.device_node)
    monkeypatch.setattr("ttdp.LINK_PATIENCE", PATIENCE)
    asyncio.get_running_loop().call_later(0.1, chip.mislead, f"../{chip.ordinal}")
    assert await host_path() == str(chip.by_pci)


async def test_an_allocation_looks_at_the_nodes_at_the_moment_of_its_answer(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A node that has just gone, of which no event has told yet, is refused."""
    chip, other = node.add("n150") + node.add("n150")
    await start(interval=3600)
    await kubelet.registered(N150)
    node.on_uevent = None
    node.swap_ordinals(chip.bdf, other.bdf)
    with pytest.raises(AdmissionError, match="is going away"):
        await kubelet.admit("pod", "main", {N150: 1})
    node.swap_ordinals(chip.bdf, other.bdf)
    chip.device_node.unlink()
    with pytest.raises(AdmissionError, match="No such file"):
        await kubelet.admit("pod", "main", {N150: 2})


async def test_a_mount_that_does_not_answer_refuses_its_own_pods_only_for_as_long(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead network file system blocks a thread, not the loop; the pod hears which path it is."""
    answers, genuine = threading.Event(), os.path.exists
    monkeypatch.setattr(
        "os.path.exists", lambda path: answers.wait(10) if path == "/dead" else genuine(path)
    )
    monkeypatch.setattr("ttdp.MOUNT_PATIENCE", 0.2)
    chip = node.add("n150")[0]
    await start(
        mounts=(
            ttdp.Mount("/dead", "/data"),
            ttdp.Mount("/nowhere", "/x"),
            ttdp.Mount("/", "/host"),
        )
    )
    await kubelet.registered(N150)
    with pytest.raises(AdmissionError, match="the host's /dead, a mount, does not answer"):
        await kubelet.admit("pod", "main", {N150: 1})
    assert kubelet.healthy(N150) == {chip.bdf}
    answers.set()
    got = await kubelet.admit("another", "main", {N150: 1})
    assert [mount.container_path for mount in got.mounts] == ["/data", "/host"]


# -- what a restart must not forget ----------------------------------------------------------------


async def test_a_restart_does_not_hand_out_a_chip_that_was_known_to_be_dead(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """A heartbeat that stands where it stood is unhealthy from the first list on."""
    dead, revived = node.add("n150") + node.add("n150")
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.registered(N150)
    dead.freeze()
    revived.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {dead.bdf, revived.bdf})
    await daemon.stop()
    revived.beat()
    restarted = time.monotonic()
    daemon = await start(interval=3600, state_dir=str(short_tmp))
    await kubelet.wait_for(lambda: kubelet.find("list", since=restarted))
    assert kubelet.unhealthy(N150) == {dead.bdf} and kubelet.healthy(N150) == {revived.bdf}
    assert "heartbeat stalled" in str(daemon.chip(dead.bdf).health.reason)


async def test_a_state_directory_that_is_full_is_a_line_and_no_more(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else depends on it; when there is room again it is written."""
    state = short_tmp / "state"
    state.touch()
    chip = node.add("n150")[0]
    daemon = await start(interval=3600, state_dir=str(state))
    await ready(daemon)
    chip.vanish()
    await until(lambda: not daemon.chip(chip.bdf).present)
    assert [r.levelname for r in caplog.records if "state.json" in r.message] == ["WARNING"]
    state.unlink()
    state.mkdir()
    chip.come_back()
    await until(lambda: (state / "state.json").exists())


# -- what must not end or deceive the daemon -------------------------------------------------------


async def test_without_an_inotify_instance_it_goes_on_with_the_polls(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """128 per user are often used up on such nodes: a kubelet is then found by the next poll."""
    monkeypatch.setattr(ttdp._libc, "inotify_init1", lambda flags: -1)
    node.add("n150")
    await start(interval=0.1)
    async with Kubelet(directory) as kubelet:
        await kubelet.registered(N150)
        await kubelet.restart()
        await kubelet.registered(N150)
    assert sum("fs.inotify.max_user_instances" in record.message for record in caplog.records) == 1


async def test_polls_that_fail_each_time_give_no_sign_of_life(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop whose work fails is not alive: systemd restarts it. One that recovers is."""
    node.add("n150")
    daemon = await start(interval=0.05, environ={"WATCHDOG_USEC": "100000"})
    await until(lambda: daemon.notified("WATCHDOG=1"))
    polls = 0

    def fail(*_: object, **__: object) -> None:
        nonlocal polls
        polls += 1
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(daemon.daemon.monitor.fleet, "observe", fail)
        await until(lambda: polls > 2)
        daemon.forget_notes()
        await until(lambda: polls > 8)
        assert not daemon.notified("WATCHDOG=1")
    await until(lambda: daemon.notified("WATCHDOG=1"))


async def test_an_end_at_any_moment_of_the_start_is_an_end(
    node: SimulatedNode, directory: Path
) -> None:
    """Before, while and after sessions are made, and with chips that block: status 0."""
    directory.mkdir()
    chip = node.add("n150")[0]
    node.add("p150a")
    for steps in range(40):
        if steps == 30:
            chip.block()
        async with RunningDaemon(node, settings_of(node, directory, interval=3600)) as daemon:
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            assert await asyncio.wait_for(daemon.stop(), PATIENCE) == 0
    chip.unblock()


async def test_a_session_that_is_closed_before_it_could_serve_holds_up_nobody(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it to have tried, as the start does, goes on."""
    listing = ttdp.Listing(ttdp.Resource(N150, {}))
    allocator: Any = None
    session = ttdp.KubeletSession(listing, allocator, "/nowhere", lambda: None)
    await session.close()
    await asyncio.wait_for(session.tried_to_serve.wait(), PATIENCE)


async def test_a_reload_before_the_first_chip_is_known_is_taken_over_as_a_whole(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The configuration can change between its being read and the start's end."""
    node.add("p150a")
    daemon = await start()
    assert not daemon.sessions, "this comes before the first session"
    daemon.reload(resource_naming="card")
    await kubelet.registered("tenstorrent.com/p150a")
    await kubelet.admit("train", "main", {"tenstorrent.com/p150a": 1})
    assert [*daemon.sessions] == ["tenstorrent.com/p150a"]
