"""The feature file: which labels a node has, and that the API server takes them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from ttdp import Chip, Identity, PciFunction, Settings, SharedResource, Sharing


def chip(bdf: str, card: str, *, numa_node: int | None = None, **identity: str) -> Chip:
    """A chip that is listed, of a card as PCI tells it."""
    arch: Any = "wormhole" if card.startswith("n") or card.endswith("wormhole") else "blackhole"
    function = PciFunction(bdf, arch, card, numa_node, 0, f"/dev/tenstorrent/{bdf}", "/sys/x")
    return Chip(function, identity=Identity(**identity), listed=True)


N150 = chip("0000:01:00.0", "n150", numa_node=0, firmware="19.4.0.0")
P150 = chip("0000:02:00.0", "p150a")
PAIR = [
    chip(f"0000:0{bus}:00.0", "p300c", numa_node=1, serial="1" * 16, firmware="19.5.2.0")
    for bus in (5, 6)
]
HALF = chip("0000:07:00.0", "p300c", numa_node=0, serial="2" * 16, firmware="19.5.2.0")


def labels(*chips: Chip, driver: str | None = "2.10.1", **settings: Any) -> dict[str, str]:
    """The labels of a node with these chips, without the domain."""
    chosen = Settings(**settings)
    found = ttdp.configured_resources(chips, chosen).values()
    lines = ttdp.feature_file(found, chips, chosen, driver).splitlines()
    return dict(line.removeprefix("tenstorrent.com/").split("=", 1) for line in lines)


def labels_of(name: str, *chips: Chip, **settings: Any) -> dict[str, str]:
    """Those of one resource."""
    found = labels(*chips, **settings)
    prefix = f"{name}."
    return {key[len(prefix) :]: value for key, value in found.items() if key.startswith(prefix)}


def test_a_node_is_labelled_with_what_it_has() -> None:
    """Architectures, each resource, and versions; what is unknown has no label."""
    assert labels(N150, P150) == {
        "arch.blackhole": "true",
        "arch.wormhole": "true",
        "driver.version": "2.10.1",
        "driver.major": "2",
        "driver.minor": "10",
        "firmware.version": "19.4.0.0",
        "plugin.version": ttdp.__version__,
        "n150.count": "1",
        "n150.product": "n150",
        "n150.replicas": "1",
        "n150.sharing": "false",
        "n150.memory": "12288",
        "n150.boards": "1",
        "n150.numa-nodes": "1",
        "n150.firmware.version": "19.4.0.0",
        "n150.firmware.major": "19",
        "n150.firmware.minor": "4",
        "p150.count": "1",
        "p150.product": "p150",
        "p150.replicas": "1",
        "p150.sharing": "false",
        "p150.memory": "32768",
        "p150.boards": "1",
    }


def test_without_a_driver_there_is_no_version_of_it() -> None:
    """A label that says nothing is left out."""
    assert {"driver.version", "driver.major"}.isdisjoint(labels(N150, driver=None))


def test_a_board_is_counted_when_all_of_it_is_there() -> None:
    """Three chips of p300 boards are one whole board, on two NUMA nodes."""
    found = labels_of("p300", *PAIR, HALF)
    assert (found["count"], found["boards"], found["numa-nodes"]) == ("3", "1", "2")
    assert (found["memory"], found["firmware.major"], found["firmware.minor"]) == (
        "32768",
        "19",
        "5",
    )


def test_a_device_that_is_a_board_has_the_memory_of_its_chips() -> None:
    """With unit = "board" each label is about boards."""
    found = labels_of("p300-board", *PAIR, unit="board")
    assert (found["count"], found["boards"], found["memory"]) == ("1", "1", "65536")


def test_a_tray_of_a_galaxy_is_a_board() -> None:
    """Eight chips on one bus' high nibble."""
    tray = [chip(f"0000:c{n}:00.0", "galaxy-wormhole", serial="3" * 16) for n in range(1, 9)]
    assert labels_of("galaxy-wormhole", *tray)["boards"] == "1"
    assert labels_of("galaxy-wormhole", *tray[1:])["boards"] == "0"


def test_devices_count_healthy_or_not_and_not_when_they_are_gone() -> None:
    """Labels are for the choice of a node, not for its health."""
    ill = P150._replace(health=ttdp.unhealthy(ttdp.Health(), ttdp.Fault.HOT, "too hot"))
    found = labels(ill, N150._replace(present=False))
    assert (found["p150.count"], found["n150.count"]) == ("1", "0")


def test_chips_that_differ_are_mixed() -> None:
    """In their firmware, and in what they are; their memory is then no one number."""
    other = chip("0000:09:00.0", "n300", firmware="19.5.0.0")
    found = labels(N150, other, resource_naming="arch")
    assert found["firmware.version"] == found["wormhole.product"] == "mixed"
    assert found["wormhole.firmware.version"] == "mixed"
    assert {"wormhole.memory", "wormhole.firmware.major"}.isdisjoint(found)


def test_sharing_shows() -> None:
    """How many containers a device is for; the product says it where the name does not."""
    same = labels_of("n150", N150, sharing=Sharing(resources=(SharedResource("n150", 4),)))
    renamed = SharedResource("n150", 4, "quarter")
    other = labels_of("quarter", N150, sharing=Sharing(resources=(renamed,)))
    assert (same["count"], same["replicas"], same["sharing"]) == ("1", "4", "true")
    assert (same["product"], other["product"]) == ("n150-SHARED", "n150")


@hypothesis_settings(deadline=None)
@given(st.text(max_size=90), st.text(max_size=90))
def test_labels_are_valid_whatever_is_said(firmware: str, driver: str) -> None:
    """Names and values are as the API server takes them."""
    part = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    sharing = Sharing(resources=(SharedResource("n150", 2, "x" * 63),))
    found = ttdp.configured_resources([N150], Settings(sharing=sharing)).values()
    chips = [N150._replace(identity=Identity(firmware=firmware))]
    for line in ttdp.feature_file(found, chips, Settings(), driver).splitlines():
        assert re.fullmatch(rf"tenstorrent\.com/{part}={part}", line), line
