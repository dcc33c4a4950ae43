"""Chips over time: gone, returned, renumbered, late, blocked, hot, tripped, over restarts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.chips import kind_of
from tests.conftest import MISSES
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import workspace
from tests.world.watched import WatchedNode
from ttdp import Kind

LIMIT = 80.0  # °C


@dataclass
class Life:
    """What must be known of a card, by the rules of the design and by what has happened to it."""

    card: Card
    is_known: bool = False
    is_listed: bool = False
    had_telemetry: bool = False  # since boot
    number: int | None = None
    has_reading: bool = False  # since it is present under this number
    read_fault: Kind | None = None  # that the last reading has shown
    kind: Kind | None = None
    since: float | None = None  # when that kind began
    beat: str | None = None  # at the last poll
    misses: int = 0
    is_hot: bool = False
    trips: int | None = None
    tripped_at: float = -inf
    silent_since: float | None = None

    def after_look(self, now: float, *, is_read: bool, is_poll: bool, is_blocked: bool) -> None:
        """Expect what a look at this time must show."""
        kind = self._structural_kind()
        self.is_known |= self.card.present
        self.has_reading &= self.number == self.card.ordinal
        self.number = self.card.ordinal
        if kind in (Kind.GONE, Kind.NO_DRIVER):  # when it is back it must show that it is well
            self.beat, self.misses, self.is_hot, self.silent_since = None, 0, False, -inf
            self.read_fault = Kind.SILENT if self.had_telemetry else None
            self.has_reading = False
        else:
            self.is_listed |= kind is None
            if is_blocked:
                self.read_fault, self.has_reading = Kind.BLOCKED, False
            elif is_read:
                self.read_fault, self.has_reading = self._reading(now, is_poll), True

        if (kind or self.read_fault) != self.kind:
            self.kind = kind or self.read_fault
            self.since = now if self.kind else None

    def _structural_kind(self) -> Kind | None:
        if not self.card.present:
            return Kind.GONE
        if self.card.driver != "tenstorrent":
            return Kind.NO_DRIVER
        return None if self.card.device_node.exists() else Kind.DEVICE_FILE

    def _reading(self, now: float, is_poll: bool) -> Kind | None:
        card = self.card
        if card.hwmon is None:  # the firmware has not reported since the driver was bound
            self.silent_since = now if self.silent_since is None else self.silent_since
        elif card.condition == "resetting":
            return Kind.RESETTING
        elif card.condition == "dead":
            return Kind.NO_RESPONSE
        elif "tt_serial" in card.overridden:
            return Kind.READ_ERROR
        else:
            self._live_values(now, is_poll)

        if self.misses >= 2:
            return Kind.STALLED
        if self.is_hot:
            return Kind.HOT
        if now - self.tripped_at < 300:
            return Kind.TRIPPED
        is_late = self.silent_since is not None and now - self.silent_since >= 10
        return Kind.SILENT if is_late and self.had_telemetry else None

    def _live_values(self, now: float, is_poll: bool) -> None:
        self.had_telemetry, self.silent_since = True, None
        beat = self.card.telemetry["tt_heartbeat"]
        if beat != self.beat:
            self.misses = 0
        elif is_poll:
            self.misses += 1
        self.beat = beat if is_poll else self.beat

        celsius = int(self.card.sensors["temp1_input"]) / 1000
        self.is_hot = celsius >= LIMIT or (self.is_hot and celsius > LIMIT - 5)
        if "tt_therm_trip_count" in self.card.telemetry:
            trips = int(self.card.telemetry["tt_therm_trip_count"])
            if self.trips is not None and trips > self.trips:
                self.tripped_at = now
            self.trips = trips

    def after_restart(self) -> None:
        """Expect what the next daemon knows: of chips that were devices, all but their vitals."""
        kept = (
            (self.kind, self.since, self.had_telemetry) if self.is_listed else (None, None, False)
        )
        self.__init__(self.card, self.is_listed, self.is_listed)  # type: ignore[misc]
        self.kind, self.since, self.had_telemetry = kept
        self.silent_since = -inf if self.is_listed else None
        self.read_fault = Kind.SILENT if self.had_telemetry else None


class Walk:
    """A node with a Blackhole and a Wormhole, the daemon's inventory, and what this must know."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.lives = [Life(card) for card in node.add("p150a") + node.add("n150")]
        self.watched = WatchedNode(node, temperature_limit=LIMIT)
        self.blocked: set[str] = set()
        self.look()

    def happens(self, operation: str, number: int) -> None:
        """Let this happen to a card, or to the node."""
        card = self.lives[number].card
        if operation.endswith("error") and (card.hwmon is None or card.condition != "healthy"):
            return
        operations: dict[str, Callable[[], object]] = {
            "vfio": lambda: card.bind_to("vfio-pci"),
            "release": lambda: card.keep_for("(null)"),
            "load": self.node.load_driver,
            "unload": self.node.unload_driver,
            "swap": lambda: self.node.swap_ordinals(*(life.card.bdf for life in self.lives)),
            "error": lambda: card.fail("tt_serial"),
            "no error": lambda: card.restore("tt_serial"),
            "block": lambda: self.blocked.add(card.bdf),
            "unblock": lambda: self.blocked.discard(card.bdf),
            "no file": lambda: card.device_node.unlink(),
            "file": lambda: card.device_node.symlink_to(
                self.node.borrowed(*self.node.number_of(card.ordinal))
            ),
            "restart": self.restart,
            "event": lambda: self.look(is_poll=False),
        }
        if operation == "swap" and None in [life.card.ordinal for life in self.lives]:
            return
        if operation.endswith(" °C"):
            card.heat(int(operation[:2]))
        elif operation.endswith(" s"):
            self.watched.now += int(operation[:-2])
        else:
            # What cannot happen now does not: a card that is there does not come back.
            with suppress(ValueError, LookupError, FileNotFoundError, FileExistsError):
                (operations.get(operation) or getattr(card, operation))()

    def look(self, *, is_poll: bool = True, is_read: bool = True) -> None:
        """Look as the daemon does; all that it knows must be as expected."""
        self.watched.now += 1
        if is_poll:
            self.node.tick()
        if is_read:
            self.watched.look(is_poll=is_poll, blocked=frozenset(self.blocked))
        else:
            self.watched.scan()
            self.watched.date()

        for life in self.lives:
            card = life.card
            is_blocked = is_read and card.bdf in self.blocked
            life.after_look(
                self.watched.now, is_read=is_read, is_poll=is_poll, is_blocked=is_blocked
            )
            found = self.watched.chips.get(card.bdf)
            assert (found is not None) is life.is_known
            if found:
                assert (kind_of(found), found.since) == (life.kind, life.since)
                assert (found.function.number, found.function.on_bus) == (
                    card.ordinal,
                    card.present,
                )
                serial = card.telemetry["tt_serial"] if life.had_telemetry else None
                assert (found.is_listed, found.identity.serial) == (life.is_listed, serial)
                assert (found.reading is not None) is life.has_reading

    def restart(self) -> None:
        self.watched.restart()
        for life in self.lives:
            life.after_restart()


FAULTS = [
    "event", "vanish", "unbind", "rebind", "vfio", "unload", "swap", "die", "reset", "freeze",
    "silence", "error", "block", "restart", "no file", "74 °C", "79 °C", "80 °C",
]  # fmt: skip
ENDS = [
    "come_back", "release", "bind", "load", "revive", "post_reset", "thaw", "speak", "unblock",
    "trip", "event", "file", "no error", "9 s", "291 s", "80 °C",
]  # fmt: skip
OPERATIONS = FAULTS + 2 * ENDS  # most rules are about chips that can be read
LOOKS = ("poll", "", "poll poll", "slow", "slow poll")
steps = st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1), st.sampled_from(LOOKS))


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.lists(steps, min_size=15, max_size=40))
def test_whatever_happens_to_chips_is_known_by_the_rules(story: list[tuple[str, int, str]]) -> None:
    """The kind of fault, since when, the identity and the number, at each look of any story."""
    with workspace() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ttdp.MISSES", MISSES)
        walk = Walk(SimulatedNode(directory / "node"))
        for operation, number, looks in story:
            walk.happens(operation, number)
            if "slow" in looks:
                walk.look(is_poll=False, is_read=False)
            for _ in range(looks.count("poll")):
                walk.look()
