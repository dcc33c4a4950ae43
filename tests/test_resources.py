"""Resources: what devices are called, which chips are one device, and what a pod's hold changes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chips import SUBSYSTEMS, bdf, chip, decide, hold
from tests.reporting import Golden
from ttdp import Chip, Hold, Kind, Settings, SharedResource, Sharing

SERIAL, OTHER = "0000046131842007", "0000046131842099"


def n150s(*buses: int) -> list[Chip]:
    return [chip(bus, number=bus) for bus in buses]


def p300s(*buses: int, serial: str | None = SERIAL) -> list[Chip]:
    return [chip(bus, "p300c", number=bus, serial=serial) for bus in buses]


def tray(high: int, chips: range = range(1, 9), arch: str = "wormhole") -> list[Chip]:
    return [chip(high << 4 | low, f"galaxy-{arch}", serial=SERIAL) for low in chips]


def strange_galaxy(bus: int) -> list[Chip]:
    """A Galaxy with a chip on this bus, as in a virtual machine, beside another card."""
    return [*(chip(each, "galaxy-blackhole") for each in (0x01, 0x02, bus)), chip(0x61)]


def shared(*entries: SharedResource, **more: Any) -> Settings:
    return Settings(sharing=Sharing(resources=entries), **more)


ARCH, BOARD = Settings(resource_naming="arch"), Settings(unit="board")
TWICE, HALF = SharedResource("n150", 2), SharedResource("n150", 2, "half", (bdf(1),))
ILL = chip(2, "p300c", serial=SERIAL, fault=Kind.STALLED)
TRAIN = hold("n150", bdf(1), buses=[1])

# What there is; the lists are in golden/reports.
LISTS: dict[str, tuple[list[Chip], Settings, list[Hold]]] = {
    # Hosts with six equal serials exist (tt-smi #243).
    "cards with one device file have a board each": (
        [chip(bus, "p150b", serial=SERIAL) for bus in (1, 2, 3)], BOARD, []
    ),
    "boards by serial, trays by buses, other cards by address": (
        [*p300s(0x61, 0x62), *p300s(0x67, 0x91, serial=OTHER), *p300s(0x68, serial=None), chip(9),
         *tray(0xC), *tray(0, arch="blackhole"), *tray(0x1C)],
        BOARD, [],
    ),
    "one request means one thing": (
        [*p300s(1, 2), chip(3)], Settings(unit="board", resource_naming="arch"), []
    ),
    "half a p300, perhaps": ([*p300s(1), *p300s(2, serial=None)], BOARD, []),
    "three chips with one serial": (p300s(1, 2, 3), BOARD, []),
    "a part of a tray": (tray(8, range(3, 9)), BOARD, []),
    "an ill chip of a board": ([*p300s(1), ILL], BOARD, []),
    "half a board, ill": ([ILL], BOARD, []),
    "a bus between trays": (strange_galaxy(0x11), BOARD, []),
    "a position that no tray has": (strange_galaxy(0x09), BOARD, []),
    "position 0": (strange_galaxy(0x00), BOARD, []),
    "some are shared": (
        [*n150s(1, 2, 3, 4), chip(9, "n300")],
        shared(HALF, SharedResource("n150", 3, "third", (bdf(2), bdf(4)))), [],
    ),
    "a board is shared by its serial": (
        p300s(1, 2), shared(SharedResource("p300-board", 2, "x", (SERIAL,)), unit="board"), []
    ),
    "a board is shared by a chip of it": (
        p300s(1, 2), shared(SharedResource("p300-board", 2, "x", (bdf(2),)), unit="board"), []
    ),
    "renamed by default": (n150s(1), Settings(sharing=Sharing(True, resources=(TWICE,))), []),
    "renamed by the entry": (n150s(1), Settings(sharing=Sharing(True, resources=(HALF,))), []),
    "an excluded chip, and an address without one": (
        [*p300s(1, 2), *n150s(3)], Settings(exclude=(bdf(2), bdf(9))), []
    ),
    "an excluded chip's board": (
        [*p300s(1, 2), *p300s(3, 4, serial=OTHER)],
        shared(SharedResource("p300-board", 2), unit="board", exclude=(bdf(2),)), [],
    ),
    "an excluded chip that a pod has": (
        n150s(1, 2, 3), Settings(exclude=(bdf(1), bdf(2))), [TRAIN]
    ),
    "a pod has a chip under another name": (n150s(1, 2), ARCH, [TRAIN]),
    "two pods have a chip: no held ID is withheld": (
        n150s(1), ARCH, [TRAIN, hold("wormhole", bdf(1), buses=[1], pod="u2")]
    ),
    "a chip that only a hold knows": ([], Settings(), [TRAIN]),
    "a pod has a board whose chips are devices now": (
        p300s(1, 2), Settings(), [hold("p300-board", SERIAL, buses=[1, 2])]
    ),
    "a pod has a chip of a board": (p300s(1, 2), BOARD, [hold("p300", bdf(2), buses=[2])]),
    "a pod has a board of which a chip has no serial yet": (
        [*p300s(1), *p300s(2, serial=None)], BOARD, [hold("p300-board", SERIAL, buses=[1, 2])]
    ),
    "an ID of a pod is that of another device now": (
        p300s(1, 2), BOARD, [hold("p300-board", SERIAL, buses=[2, 5])]
    ),
    "two pods share": (
        n150s(1), shared(TWICE),
        [hold("n150", f"{bdf(1)}::{n}", buses=[1], pod=f"u{n + 1}") for n in (0, 1)],
    ),
    "a pod has a replica, and another the chip": (
        n150s(1), shared(TWICE),
        [hold("n150", f"{bdf(1)}::0", buses=[1], pod="u2"), hold("x", "y", "z", buses=[1])],
    ),
}  # fmt: skip


def test_the_kubelet_is_told_of_each_device_and_why_it_is_unhealthy(golden: Golden) -> None:
    """No ID of a pod is missing, and nothing else offers its chips; what is not offered at all."""
    lines = []
    for title, arguments in LISTS.items():
        found = decide(*arguments)
        lines.append(f"== {title}")
        for name, resource in found.resources.items():
            lines.append(name)
            for device_id, device in sorted(resource.devices.items()):
                refused = " (refused)" if device_id in resource.refused else ""
                lines.append(f"    {device_id}: {device.reason or 'healthy'}{refused}")
        lines += [f"{address} is unplaced: {why}" for address, why in found.offer.unplaced.items()]
        out = filter(found.is_out_of_service, found.chips)
        lines += [f"{address} is out of service" for address in out]
    golden("lists", "\n".join([*lines, ""]))


def test_entries_are_by_address_with_health_and_numa_nodes() -> None:
    """By number, not by text. Device files that are swapped change nothing. A board has each NUMA
    node of its chips once.
    """
    nodes = [1, 0, None, 1, 0, 0, 1, 1]
    galaxy = [chip(0x41 + n, "galaxy-wormhole", numa_node=node) for n, node in enumerate(nodes)]
    for number in (1, 2):
        n150s = [chip(0x101, numa_node=0), chip(2, number=number), chip(0x1000001)]
        n150s.append(chip(16, number=3 - number, fault=Kind.STALLED))
        trays, found = decide([*n150s, *galaxy], BOARD).resources.values()
        assert trays.list_entries == [("0000:40", True, (0, 1))]
        assert found.list_entries == [
            (bdf(2), True, ()),
            (bdf(16), False, ()),
            (bdf(0x101), True, (0,)),
            (bdf(0x1000001), True, ()),
        ]


@pytest.mark.parametrize("card", SUBSYSTEMS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Board (no trailing letter), exact type or architecture; the firmware overrules PCI."""
    board = re.sub("^(p[13][05]0)[abc]$", r"\1", card)
    arch = str(chip(1, card).function.arch)
    other = chip(1, "p150b" if arch == "blackhole" else "n150", card=card)

    for naming, name in {"board": board, "card": card, "arch": arch}.items():
        settings = Settings(resource_naming=naming, resource_domain="example.org")
        for each in (chip(1, card), other):
            assert [*decide([each], settings).resources] == [f"example.org/{name}"]
        assert [*decide([chip(1, None)], settings).resources] == ["example.org/wormhole"]
