"""The kinds of cards, and recordings of the real driver on emulated PCI functions.

`data/captures.json` has the trees and `data/uevents.json` the kernel's events, in compact form.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Architecture(NamedTuple):
    """What all cards of an architecture have in common."""

    device: str  # PCI device ID
    sample: int  # its function in the capture "n150-p150a", whose values all its cards have
    # First ordinal of a Galaxy's tray, by the high nibble of the bus number: a table of the driver.
    trays: Mapping[int, int]
    # Wormhole's driver asks the firmware for telemetry for 120 s, Blackhole's once in a probe.
    asks_again: bool


ARCHITECTURES = {
    "wormhole": Architecture("0x401e", 0, {0xC: 0, 0x8: 8, 0x0: 16, 0x4: 24}, asks_again=True),
    "blackhole": Architecture("0xb140", 1, {0x0: 0, 0x4: 8, 0xC: 16, 0x8: 24}, asks_again=False),
}
ARCHITECTURE_OF = {each.device: name for name, each in ARCHITECTURES.items()}


class Card(NamedTuple):
    """A kind of card. All else about it is its architecture's."""

    code: int  # bits 36-51 of its serial, and the PCI subsystem device id
    arch: str
    functions: int = 1


CARDS = {
    "n300": Card(0x14, "wormhole"),
    "n150": Card(0x18, "wormhole"),
    "galaxy-wormhole": Card(0x35, "wormhole", 32),
    "p100": Card(0x36, "blackhole"),
    "p150a": Card(0x40, "blackhole"),
    "p150b": Card(0x41, "blackhole"),
    "p150c": Card(0x42, "blackhole"),
    "p100a": Card(0x43, "blackhole"),
    "p300b": Card(0x44, "blackhole", 2),
    "p300a": Card(0x45, "blackhole", 2),
    "p300c": Card(0x46, "blackhole", 2),
    "galaxy-blackhole": Card(0x47, "blackhole", 32),
}
NAMES = {card.code: name for name, card in CARDS.items()}

# A machine has one Galaxy, whose chips are always on these buses: a tray in the high nibble, a
# position in the low one. In the order in which the captured machine enumerated its root buses.
GALAXY_BUSES = [tray << 4 | chip for tray in (0x0, 0xC, 0x8, 0x4) for chip in range(1, 9)]


def bus_of(bdf: str) -> int:
    return int(bdf.split(":")[1], 16)


# -- recordings ------------------------------------------------------------------------------------
DATA = Path(__file__).parent / "data"
SENSOR = re.compile(r"(temp|power|in|curr|fan)\d+_\w+|name")


@functools.cache
def _stored(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / file).read_text())
    return loaded


def capture_names() -> list[str]:
    """Return the names of all captures."""
    return sorted(_stored("captures.json"))


def capture(name: str) -> dict[str, Any]:
    """Return a capture: the driver's release, and the functions with what all have in common."""
    stored = _stored("captures.json")[name]
    functions = []
    for own in stored["functions"]:
        groups = stored["common"].keys() & own.keys()
        functions.append(own | {group: stored["common"][group] | own[group] for group in groups})
    return {**stored, "functions": functions}


def captured_uevents(name: str, step: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the kernel's events of one recorded step, as (action, devpath, other variables)."""
    return [(action, devpath, env) for action, devpath, env in _stored("uevents.json")[name][step]]
