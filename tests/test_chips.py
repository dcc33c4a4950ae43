"""Chips over time: gone, returned, renumbered, late, blocked, hot, tripped, over restarts."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from math import inf
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, kind_of
from tests.conftest import MISSES
from ttdp import Fault, HealthSettings, Identity, Inventory, Kind, PciFunction, Reading, Settings

FUNCTION = chip(1).function
SCANS: list[tuple[Kind | None, PciFunction | None]] = [  # with the fault that each shows
    (Kind.GONE, None),
    (Kind.NO_DRIVER, FUNCTION.without_class_device()),
    (Kind.NO_DRIVER, FUNCTION.without_class_device("vfio-pci")),
    (Kind.DEVICE_FILE, FUNCTION.without_class_device("tenstorrent")),
    (Kind.DEVICE_FILE, FUNCTION._replace(file_fault="it does not exist")),
    (None, FUNCTION._replace(number=1)),
]
CARD = Identity(card="n150")
DEAD = {"fault": Fault(Kind.NO_RESPONSE, "")}


@dataclass
class Model:
    """What must be known of a chip, by the rules of the design and by what has happened to it."""

    is_known: bool = False
    is_listed: bool = False
    had_telemetry: bool = False  # since boot
    number: int | None = None
    has_reading: bool = False  # since it is present under this number
    read_fault: Kind | None = None  # that the last reading has shown
    kind: Kind | None = None
    since: float | None = None  # when that kind began
    beat: int | None = None  # at the last poll
    misses: int = 0
    is_hot: bool = False
    trips: int | None = None
    tripped_at: float = -inf
    silent_since: float | None = None

    def after_scan(self, kind: Kind | None, function: PciFunction | None) -> None:
        number = function.number if function else None
        self.has_reading &= number == self.number
        self.number = number
        self.is_known |= function is not None
        self.is_listed |= kind is None
        if number is None:  # when it is back it must show that it is well
            self.beat, self.misses, self.is_hot, self.silent_since = None, 0, False, -inf
            self.read_fault = Kind.SILENT if self.had_telemetry else None

    def after_reading(self, reading: Reading, limit: float | None) -> None:
        values = (reading.heartbeat, reading.temperature, reading.trips, reading.identity.card)
        self.has_reading = True
        if reading.fault:
            self.read_fault = reading.fault.kind
            return
        if values == (None,) * 4:
            self.silent_since = reading.at if self.silent_since is None else self.silent_since
        else:
            self.silent_since = None
            self._live_values(reading, limit)

        silence = 0 if self.silent_since is None else reading.at - self.silent_since
        rules = {
            Kind.STALLED: self.misses >= 2,
            Kind.HOT: self.is_hot and limit is not None,
            Kind.TRIPPED: reading.at - self.tripped_at < 300,
            Kind.SILENT: silence >= 10 and self.had_telemetry,
        }
        self.read_fault = next((kind for kind, applies in rules.items() if applies), None)

    def _live_values(self, reading: Reading, limit: float | None) -> None:
        self.had_telemetry |= reading.identity == CARD
        if reading.heartbeat is None or reading.heartbeat != self.beat:
            self.misses = 0
        elif reading.is_poll:
            self.misses += 1
        self.beat = reading.heartbeat if reading.is_poll else self.beat

        if limit is None:
            self.is_hot = False
        elif reading.temperature is not None:
            cools = reading.temperature <= limit - 5
            self.is_hot = reading.temperature >= limit or (self.is_hot and not cools)

        if reading.trips is not None:
            if self.trips is not None and reading.trips > self.trips:
                self.tripped_at = reading.at
            self.trips = reading.trips

    def after_restart(self) -> Model:
        """Return what the next daemon knows: of chips that were devices, all but their vitals."""
        if not self.is_listed:
            return Model()
        told = Model(True, True, self.had_telemetry, kind=self.kind, since=self.since)
        told.after_scan(Kind.GONE, None)
        return told


NAMES = ("is_poll", "heartbeat", "temperature", "trips", "identity")
VALUES = itertools.product(  # what is there twice is drawn as often
    [True, True, False], [0, 0, 0, 1, None], [75.0, 75.1, 79.9, 80.0, None], [0, 1, 1, 1, 2, None],
    [CARD],
)  # fmt: skip
READINGS = [dict(zip(NAMES, values, strict=True)) for values in VALUES]
steps = st.tuples(
    st.sampled_from([0.5, 9.5, 10.0, 299.5, 300.0]),
    st.sampled_from([*[(None, FUNCTION)] * 12, *SCANS]),
    # None: there is none yet; "late": from before the chip was renumbered.
    st.tuples(
        st.sampled_from(READINGS) | st.sampled_from([{}, {}, {}, DEAD, None, "blocked", "late"]),
        st.sampled_from([80.0, 80.0, 80.0, 84.9, None]),
    ),
    st.sampled_from([False] * 9 + [True]),
)


def polls(*values: tuple[float, dict[str, Any] | None]) -> list[tuple[Any, ...]]:
    """Return a story of readings so many seconds after the last one; None: without telemetry."""
    told = [(after, each and {"identity": CARD, **each}) for after, each in values]
    return [(after, (None, FUNCTION), (each or {}, 80.0), False) for after, each in told]


BOUNDARIES = [
    *polls((1, {"temperature": 79.9, "trips": 0}), (1, {"temperature": 80.0})),
    *polls((1, {"temperature": 75.1}), (1, {"temperature": 75.0})),
    *polls((1, {"trips": 1}), (299.5, {"trips": 1}), (0.5, {"trips": 1})),
    *polls((1, None), (9.5, None), (0.5, None)),
    *polls(*[(1, {"heartbeat": 7})] * 3, (1, {"heartbeat": 8})),
]


@hypothesis_settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
@example(BOUNDARIES)
@given(st.lists(steps, min_size=15, max_size=40))
def test_whatever_happens_to_chips_is_known_by_the_rules(story: list[tuple[Any, ...]]) -> None:
    """The kind of fault, since when, the identity and the number, after each step of any story."""
    inventory, model, now = Inventory({}), Model(), 1000.0
    bus: dict[str, PciFunction] = {}
    simulated: dict[str, Any] = {
        "MISSES": MISSES,
        "driver_version": lambda _: "2.10",
        "scan": lambda *_, **__: bus,
        "seconds_since_boot": lambda: now,
    }
    with patch.multiple(ttdp, **simulated):
        for after, (kind, function), (what, limit), is_restart in story:
            now += after
            if is_restart:
                saved = json.loads(json.dumps(inventory.to_saved()))
                inventory = Inventory({each: ttdp.saved_chip(each, saved[each]) for each in saved})
                model = model.after_restart()

            bus = {function.address: function} if function else {}
            inventory.scan(Settings())
            model.after_scan(kind, function)
            if function and function.number is not None and what is not None:
                if what == "blocked":
                    inventory.block([function.address])
                    model.read_fault, model.has_reading = Kind.BLOCKED, False
                elif what == "late":
                    late = Reading(function._replace(number=7), now, temperature=99.0)
                    inventory.apply([late], HealthSettings(temperature_limit=limit))
                else:
                    reading = Reading(function, now, **what)
                    inventory.apply([reading], HealthSettings(temperature_limit=limit))
                    model.after_reading(reading, limit)
            inventory.date_faults()
            if (kind or model.read_fault) != model.kind:
                model.kind = kind or model.read_fault
                model.since = now if model.kind else None

            found = inventory.chips.get(bdf(1))
            assert (found is not None) is model.is_known
            if found:
                assert (kind_of(found), found.since) == (model.kind, model.since)
                assert (found.function.number, found.is_listed) == (model.number, model.is_listed)
                assert found.function.on_bus is (function is not None)
                assert (found.identity == CARD) is model.had_telemetry
                assert (found.reading is not None) is model.has_reading
