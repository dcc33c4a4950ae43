"""The feature file: which labels a node has, and that the API server accepts them."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import allocation, bdf, chip, decide
from ttdp import Allocation, Chip, Fault, Settings, SharedResource, Sharing

N150 = chip(1, numa_node=0, firmware="19.4.0.0")
P150 = chip(2, "p150a")
PAIR = [
    chip(bus, "p300c", numa_node=1, serial="1" * 16, firmware="19.5.2.0", ordinal=bus)
    for bus in (5, 6)
]
HALF = chip(7, "p300c", numa_node=0, serial="2" * 16, firmware="19.5.2.0")


def labels(
    *chips: Chip,
    driver: str | None = "2.10.1",
    allocations: tuple[Allocation, ...] = (),
    **settings: Any,
) -> dict[str, str]:
    """The labels of a node with these chips, without the domain."""
    text = decide(chips, Settings(**settings), allocations, driver=driver).labels
    prefix = f"{settings.get('resource_domain', 'tenstorrent.com')}/"
    return dict(line.removeprefix(prefix).split("=", 1) for line in text.splitlines())


def labels_of(name: str, *chips: Chip, **more: Any) -> dict[str, str]:
    """The labels of one resource."""
    prefix = f"{name}."
    found = labels(*chips, **more).items()
    return {key[len(prefix) :]: value for key, value in found if key.startswith(prefix)}


def test_a_node_has_labels_for_architectures_resources_and_versions() -> None:
    """A label without a known value is left out."""
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
    assert {"driver.version", "driver.major"}.isdisjoint(labels(N150, driver=None))


def test_a_board_counts_when_all_its_chips_are_present() -> None:
    """Three chips of p300 boards are one whole board, on two NUMA nodes."""
    found = labels_of("p300", *PAIR, HALF)
    assert (found["count"], found["boards"], found["numa-nodes"]) == ("3", "1", "2")
    assert (found["memory"], found["firmware.minor"]) == ("32768", "5")
    found = labels_of("p300-board", *PAIR, unit="board")
    assert (found["count"], found["boards"], found["memory"]) == ("1", "1", "65536")
    tray = [chip(0xC0 + n, "galaxy-wormhole", serial="3" * 16) for n in range(1, 9)]
    assert labels_of("galaxy-wormhole", *tray)["boards"] == "1"
    assert labels_of("galaxy-wormhole", *tray[1:])["boards"] == "0"


def test_a_galaxy_with_seven_of_eight_memory_tiles_has_less_memory() -> None:
    """PCI subsystem 0x202; in trays like the others."""
    buses = range(0xC1, 0xC9)
    tray = [chip(bus, "galaxy-blackhole", serial="4" * 16) for bus in buses]
    less = [each._replace(function=each.function._replace(subsystem=0x202)) for each in tray]
    for chips, memory in ((tray, "32768"), (less, "28672"), ([tray[0], *less[1:]], None)):
        found = labels_of("galaxy-blackhole", *chips)
        assert (found.get("memory"), found["boards"]) == (memory, "1")
    assert labels_of("galaxy-blackhole-board", *less, unit="board")["memory"] == str(8 * 28672)


def test_devices_count_whether_they_are_healthy_or_not_if_they_exist() -> None:
    """Labels are for the choice of a node, not for its health."""
    found = labels(chip(2, "p150a", fault=Fault.HOT), chip(1, present=False))
    assert (found["p150.count"], found["n150.count"]) == ("1", "0")
    assert "arch.wormhole" not in found


def test_an_id_that_a_pod_holds_adds_no_device() -> None:
    """Neither one of the same chip, nor a resource of another domain; a missing chip is none."""
    old = allocation("n150", f"{bdf(1)}::1", buses=[1])
    foreign = allocation("example.org/n150", bdf(1), buses=[1])
    missing = allocation("n300", bdf(9), buses=[9])
    found = labels(N150, allocations=(old, foreign, missing))
    assert found["n150.count"] == "1" and found["n300.count"] == "0"
    found = labels(N150, allocations=(foreign,), resource_domain="a.b")
    assert {key.partition(".")[0] for key in found} == {
        "arch", "driver", "firmware", "plugin", "n150"
    }  # fmt: skip


def test_values_that_differ_are_mixed() -> None:
    """A memory that differs has no label."""
    found = labels(N150, chip(9, "n300", firmware="19.5.0.0"), resource_naming="arch")
    assert found["firmware.version"] == found["wormhole.product"] == "mixed"
    assert found["wormhole.firmware.version"] == "mixed"
    assert {"wormhole.memory", "wormhole.firmware.major"}.isdisjoint(found)


def test_sharing_has_labels() -> None:
    """The product ends in -SHARED if the resource's name does not show it."""
    same = labels_of("n150", N150, sharing=Sharing(resources=(SharedResource("n150", 4),)))
    renamed = SharedResource("n150", 4, "quarter")
    other = labels_of("quarter", N150, sharing=Sharing(resources=(renamed,)))
    assert (same["count"], same["replicas"], same["sharing"]) == ("1", "4", "true")
    assert (same["product"], other["product"]) == ("n150-SHARED", "n150")


@hypothesis_settings(deadline=None)
@given(st.text(max_size=90), st.text(max_size=90))
def test_labels_are_valid_whatever_versions_are_reported(firmware: str, driver: str) -> None:
    """The API server accepts each name and value."""
    part = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    settings = Settings(sharing=Sharing(resources=(SharedResource("n150", 2, "x" * 63),)))
    text = decide([chip(1, firmware=firmware)], settings, driver=driver).labels
    for line in text.splitlines():
        assert re.fullmatch(rf"tenstorrent\.com/{part}={part}", line), line
