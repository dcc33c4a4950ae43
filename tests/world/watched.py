"""The chips of a simulated node, as the program knows them."""

from __future__ import annotations

from unittest.mock import patch

import ttdp
from tests.world.node import SimulatedNode
from tests.world.simulation import kernel_errors, settings_of
from ttdp import Chip, Inventory, PciFunction, Reading


class WatchedNode:
    """A node, and an inventory that looks at it when a test says so."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.settings = settings_of(node, node.root / "plugins")
        self.inventory = Inventory({})

    @property
    def chips(self) -> dict[str, Chip]:
        return self.inventory.chips

    def scan(self) -> None:
        with kernel_errors():
            self.inventory.scan(self.settings)

    def read(self, function: PciFunction, *, is_poll: bool = True) -> Reading | None:
        """Read a chip; None: it is being removed."""
        with kernel_errors(), patch.object(ttdp, "monotonic", lambda: 1000.0):
            return ttdp.read_chip(self.settings, function, is_poll=is_poll)

    def look(self, *, is_poll: bool = True) -> None:
        """Scan and read, as at a poll or after an event."""
        self.scan()
        readings = [self.read(each, is_poll=is_poll) for each in self.inventory.present]
        self.inventory.apply(filter(None, readings), self.settings.health)
