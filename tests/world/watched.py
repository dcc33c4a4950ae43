"""The chips of a simulated node, as the program knows them at a time that a test holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar
from unittest.mock import patch

import ttdp
from tests.world.node import SimulatedNode
from tests.world.simulation import kernel_errors, settings_of
from ttdp import Chip, Inventory, Kind, PciFunction, Reading

T = TypeVar("T")


class WatchedNode:
    """A node, and an inventory that looks at it when a test says so."""

    def __init__(self, node: SimulatedNode, now: float = 1000.0, **health: Any) -> None:
        """health: settings of the section [health]."""
        self.node = node
        self.now = now
        self.settings = settings_of(node, node.root / "plugins", health=health)
        self.inventory = Inventory({})

    @property
    def chips(self) -> dict[str, Chip]:
        return self.inventory.chips

    def kind(self, address: str) -> Kind | None:
        """Return the kind of a chip's fault."""
        fault = self.chips[address].fault
        return fault.kind if fault else None

    def scan(self) -> None:
        self._at_this_time(lambda: self.inventory.scan(self.settings))

    def read(self, function: PciFunction, *, is_poll: bool = True) -> Reading | None:
        """Read a chip; None: it is being removed."""
        return self._at_this_time(lambda: ttdp.read_chip(self.settings, function, is_poll=is_poll))

    def look(self, *, is_poll: bool = True, blocked: frozenset[str] = frozenset()) -> None:
        """Scan and read, at a poll or after an event. blocked: chips that do not answer."""
        self.scan()
        present = {function.address: function for function in self.inventory.present}
        readings = [
            self.read(function, is_poll=is_poll)
            for address, function in present.items()
            if address not in blocked
        ]
        self.inventory.apply(filter(None, readings), self.settings.health)
        self.inventory.block(blocked & present.keys())
        self.date()

    def date(self) -> None:
        self._at_this_time(self.inventory.date_faults)

    def restart(self) -> None:
        """Begin anew with what the last daemon has saved."""
        saved = json.loads(json.dumps(self.inventory.to_saved()))
        chips = {address: ttdp.saved_chip(address, row) for address, row in saved.items()}
        self.inventory = Inventory(chips)

    def _at_this_time(self, do: Callable[[], T]) -> T:
        def now() -> float:
            return self.now

        with kernel_errors(), patch.multiple(ttdp, monotonic=now, seconds_since_boot=now):
            return do()
