"""Chips, holds and decisions without a file: for tests of what is pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ttdp
from ttdp import Chip, Fault, Hold, Identity, Kind, PciFunction, Settings

SUBSYSTEMS = {card: number for number, card in reversed(ttdp.CARDS.items())}
NAMES = {"u1": "default/train", "u2": "default/serve"}  # of pods, by UID


def bdf(bus: int) -> str:
    """Return the PCI address on this bus; a domain is 256 buses."""
    return f"{bus >> 8:04x}:{bus & 255:02x}:00.0"


def chip(
    bus: int,
    pci_card: str | None = "n150",
    *,
    number: int = 0,
    numa_node: int | None = None,
    present: bool = True,
    fault: Kind | None = None,
    **identity: str | None,
) -> Chip:
    """Return a listed chip. present: it has a device file; identity: as its firmware reports it."""
    known = pci_card or "n"
    function = PciFunction(
        bdf(bus),
        "wormhole" if known[0] == "n" or known.endswith("wormhole") else "blackhole",
        SUBSYSTEMS.get(known, 0),
        numa_node,
        f"/sys/devices/{bus}",
        driver="tenstorrent",
        number=number,
        path=f"/dev/tenstorrent/{number}",
    )
    if not present:
        function = function.without_class_device()._replace(on_bus=False)

    ill = Fault(fault, "it is ill") if fault else None
    return Chip(function, Identity(**identity), is_listed=True, telemetry_fault=ill)


def kind_of(chip: Chip) -> Kind | None:
    """Return the kind of a chip's fault."""
    return chip.fault.kind if chip.fault else None


def hold(resource: str, *ids: str, buses: Iterable[int], pod: str = "u1", token: str = "") -> Hold:
    """Return what a container was given: IDs of a resource, and the chips on these buses."""
    name = resource if "/" in resource else f"tenstorrent.com/{resource}"
    chips = frozenset(map(bdf, buses))
    return Hold(name, frozenset(ids), token, chips, pod=pod, container="main")


def decide(
    chips: Sequence[Chip],
    settings: Settings | None = None,
    holds: Sequence[Hold] = (),
    **more: Any,
) -> ttdp.Decision:
    """Return the decision about a host with these chips and current holds."""
    by_address = {each.address: each for each in chips}
    others = {"names": NAMES, "driver": "2.10.1", **more}
    return ttdp.decide(settings or Settings(), by_address, holds, **others)
