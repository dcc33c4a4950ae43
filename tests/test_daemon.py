"""The main job, end to end in one process: simulated node, daemon, reference kubelet, real gRPC on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until

pytestmark = pytest.mark.usefixtures("ticking")


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
    assert kubelet.capacity() == kubelet.allocatable() == {f"tenstorrent.com/{k}": n for k, n in expected.items()}


async def test_a_container_gets_its_node_its_address_and_the_hugepages(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """An allocation is the node under the host's number, the two variables, and the hugepages that the host has."""
    node.add("n300")
    node.set_hugepages(8)
    await start()
    await kubelet.registered("tenstorrent.com/n300")
    got = await kubelet.admit("pod", "main", {"tenstorrent.com/n300": 1})
    bdf = node.chips[0].bdf
    assert got.envs == {"TT_VISIBLE_DEVICES": bdf, "TT_DEVICE_PLUGIN_DEVICES": bdf}
    assert [(d.host_path, d.container_path, d.permissions) for d in got.devices] == [
        (f"{node.root}/dev/tenstorrent/0", "/dev/tenstorrent/0", "rw")
    ]
    assert [(m.host_path, m.container_path, m.read_only) for m in got.mounts] == [
        (f"{node.root}/dev/hugepages-1G", "/dev/hugepages-1G", False),
        (f"{node.root}/dev/hugepages", "/dev/hugepages", False),
    ]


async def test_two_chips_are_the_two_of_one_board(node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> None:
    """Of three p300 with one chip taken, a pod that asks for two gets a whole board, one that asks for one the rest."""
    for _ in range(3):
        node.add("p300c")
    daemon = await start()
    await kubelet.registered("tenstorrent.com/p300")
    first = await kubelet.admit("one", "main", {"tenstorrent.com/p300": 1})
    pair = await kubelet.admit("two", "main", {"tenstorrent.com/p300": 2})
    other = await kubelet.admit("three", "main", {"tenstorrent.com/p300": 1})
    one, two, three = (
        [daemon.device(bdf).serial for bdf in got.envs["TT_DEVICE_PLUGIN_DEVICES"].split(",")]
        for got in (first, pair, other)
    )
    assert two[0] == two[1] != one[0] == three[0]


async def test_a_stalled_heartbeat_takes_the_device_out_and_its_return_brings_it_back(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Allocatable drops, capacity stays, the log has one line each way."""
    chip, other = node.add("n150") + node.add("n150")
    daemon = await start()
    name = "tenstorrent.com/n150"
    await kubelet.registered(name)
    chip.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {chip.bdf})
    assert kubelet.capacity()[name] == 2 and kubelet.allocatable()[name] == 1
    assert "heartbeat stalled" in daemon.device(chip.bdf).health.reason
    with pytest.raises(AdmissionError):
        await kubelet.admit("pod", "main", {name: 2})
    chip.thaw()
    await kubelet.wait_for(lambda: kubelet.healthy(name) == {chip.bdf, other.bdf})
    lines = [record.message for record in caplog.records if chip.bdf in record.message and "health" in record.message]
    assert len(lines) == 2


async def test_a_device_keeps_its_identity_through_renumbering(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """After two chips have swapped their ordinals the same ID means the same chip, under its new node."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=3600)
    await kubelet.registered("tenstorrent.com/n150")
    known = daemon.device(first.bdf)
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: daemon.device(first.bdf).chip.ordinal == 1 and not kubelet.unhealthy("tenstorrent.com/n150"))
    assert (daemon.device(first.bdf).serial, daemon.device(first.bdf).asic_id) == (known.serial, known.asic_id)
    got = await kubelet.admit("pod", "main", {"tenstorrent.com/n150": 2})
    assert [d.container_path for d in got.devices] == ["/dev/tenstorrent/1", "/dev/tenstorrent/0"]


async def test_hot_plug_reaches_the_kubelet_by_events_alone(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """With polls an hour apart, a card that goes is Unhealthy and one that comes is there, each within 50 ms."""
    name = "tenstorrent.com/p150"
    gone, _ = node.add("p150a") + node.add("p150a")
    await start(interval=3600)
    await kubelet.registered(name)
    gone.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {gone.bdf}, 1)
    gone.come_back()
    await kubelet.wait_for(lambda: not kubelet.unhealthy(name), 1)
    new = node.add("p150a")[0]
    await kubelet.wait_for(lambda: new.bdf in kubelet.healthy(name), 1)


async def test_late_firmware_gains_its_identity_without_changing_its_id(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A silent card is listed, healthy, as what PCI says; when it speaks its serial is known and its ID the same."""
    name = "tenstorrent.com/n150"
    chip = node.add("n150", firmware=False)[0]
    daemon = await start(interval=3600)
    await kubelet.registered(name)
    assert kubelet.healthy(name) == {chip.bdf} and daemon.device(chip.bdf).serial is None
    chip.speak()
    await until(lambda: daemon.device(chip.bdf).serial == chip.facts.telemetry["tt_serial"])
    assert kubelet.healthy(name) == {chip.bdf} and len(kubelet.find("list")) == 1


async def test_a_late_asic_id_replaces_the_address_in_the_list(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Under the strategy asic, a device is its PCI address until the firmware tells, then the by-id name."""
    name = "tenstorrent.com/n150"
    chip = node.add("n150", firmware=False)[0]
    await start(interval=3600, device_id_strategy="asic")
    await kubelet.registered(name)
    assert kubelet.healthy(name) == {chip.bdf}
    chip.speak()
    await kubelet.wait_for(lambda: kubelet.healthy(name) == {f"wormhole-{chip.facts.telemetry['tt_asic_id']}"}, 1)


async def test_a_read_that_blocks_concerns_nobody_but_its_chip(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """While one chip's read does not return, another's failure is seen as fast as ever; at the end it is healthy."""
    name = "tenstorrent.com/n150"
    stuck, failing = node.add("n150") + node.add("n150")
    daemon = await start()
    await kubelet.registered(name)
    stuck.block("tt_heartbeat")
    failing.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {failing.bdf}, 1.5)
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {failing.bdf, stuck.bdf}, 4)
    assert "does not return" in daemon.device(stuck.bdf).health.reason
    stuck.unblock("tt_heartbeat")
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {failing.bdf}, 1.5)


async def test_a_reset_shows_and_passes(node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> None:
    """ENODATA between reset and POST_RESET makes a device unhealthy; a lower heartbeat afterwards is life."""
    name = "tenstorrent.com/p150"
    chip = node.add("p150a")[0]
    daemon = await start()
    await kubelet.registered(name)
    chip.reset()
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {chip.bdf})
    assert "resetting" in daemon.device(chip.bdf).health.reason
    chip.post_reset(heartbeat=20)
    await kubelet.wait_for(lambda: kubelet.healthy(name) == {chip.bdf})


async def test_a_chip_that_reads_all_ones_keeps_its_identity(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """All ones never pass for a serial, a card type or a temperature."""
    name = "tenstorrent.com/p150"
    chip = node.add("p150a")[0]
    daemon = await start()
    await kubelet.registered(name)
    known = daemon.device(chip.bdf)
    chip.die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(name) == {chip.bdf})
    dead = daemon.device(chip.bdf)
    assert (dead.serial, dead.asic_id, dead.card, dead.firmware) == (
        known.serial, known.asic_id, known.card, known.firmware,
    )  # fmt: skip
    assert "does not respond" in dead.health.reason
    chip.revive()
    await kubelet.wait_for(lambda: kubelet.healthy(name) == {chip.bdf})


async def test_nothing_is_registered_without_devices_and_the_first_one_is_at_once(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """A node without cards serves no socket; a card that is plugged in later becomes a resource."""
    await start(interval=3600)
    await kubelet.wait_for(lambda: True)
    assert not kubelet.find("register")
    node.add("n150")
    await kubelet.registered("tenstorrent.com/n150", 1)


async def test_a_link_by_address_leads_to_the_right_node_whatever_its_number(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """The kubelet keeps the answer to Allocate over reboots, so it names a link that follows its chip.

    A link whose chip is gone is gone, too: another chip may have its number by then.
    """
    first, second = node.add("n150") + node.add("n150")
    await start(interval=3600, runtime_dir=str(short_tmp))
    await kubelet.registered("tenstorrent.com/n150")
    links = short_tmp / "by-pci"
    got = await kubelet.admit("pod", "main", {"tenstorrent.com/n150": 2})
    assert [d.host_path for d in got.devices] == [f"{links}/{first.bdf}", f"{links}/{second.bdf}"]
    assert [d.container_path for d in got.devices] == ["/dev/tenstorrent/0", "/dev/tenstorrent/1"]
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: (links / first.bdf).readlink() == node.root / "dev/tenstorrent/1")
    assert (links / second.bdf).readlink() == node.root / "dev/tenstorrent/0"
    second.vanish()
    await until(lambda: [link.name for link in links.iterdir()] == [first.bdf])
