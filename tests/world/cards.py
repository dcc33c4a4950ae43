"""The kinds of cards, and what their drivers and the platform make of them: tables only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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

    @property
    def is_galaxy(self) -> bool:
        return self.functions == len(GALAXY_BUSES)


# A machine has one Galaxy, whose chips are always on these buses: a tray in the high nibble, a
# position in the low one. In the order in which the captured machine enumerated its root buses.
GALAXY_BUSES = [tray << 4 | chip for tray in (0x0, 0xC, 0x8, 0x4) for chip in range(1, 9)]

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


class Place(NamedTuple):
    """Where a function of a card is plugged in."""

    bdf: str
    board: int  # the functions of one board share its serial
    numa_node: int = -1

    @property
    def path(self) -> str:
        """The function's path: below a root bus for every 16 buses, a root port for each card."""
        domain, bus = self.bdf.split(":")[0], bus_of(self.bdf)
        root = max(bus - 1, 0) & 0xF0
        port = bus - root + (1 if root == 0 else -1)  # the first two slots of bus 0 are taken
        return f"pci{domain}:{root:02x}/{domain}:{root:02x}:{port:02x}.0/{self.bdf}"


# A tray is a board, with a serial of its own, and two trays are on each socket.
GALAXY = [Place(f"0000:{bus:02x}:00.0", bus >> 4, int(bus >= 0x80)) for bus in GALAXY_BUSES]


def bus_of(bdf: str) -> int:
    return int(bdf.split(":")[1], 16)
