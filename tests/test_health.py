"""Health: each rule on its own, with a clock that the test holds, and its log lines."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, decide, hold, kind_of
from ttdp import (
    ChipState,
    Fault,
    HealthSettings,
    Identity,
    Kind,
    ReadError,
    Reading,
    Reason,
    Telemetry,
)

TIMEOUT = ttdp.FIRMWARE_TIMEOUT
RESETTING = ReadError("tt_heartbeat", errno.ENODATA)


class Followed:
    """A chip as the daemon follows it: a reading is one second after the last unless told."""

    def __init__(self, **rules: Any) -> None:
        self.rules = HealthSettings(**rules)
        self.function = chip(1).function
        self.state = ChipState(chip(1))
        self.history = [self.state.chip]
        self.now = 1000.0

    def read(self, *, after: float = 1, is_poll: bool = True, **telemetry: Any) -> Kind | None:
        """Return the fault's kind after a reading: of a poll, unless an event caused it."""
        self.now += after
        reading = Reading(self.function, Telemetry(**telemetry), self.now, is_poll)
        self.state.apply(reading, self.rules)
        self.history.append(self.state.chip)
        return self.kind

    def vanish(self) -> None:
        self.state.vanish(self.function.without_class_device()._replace(on_bus=False))
        self.history.append(self.state.chip)

    def come_back(self) -> None:
        self.state.appear(self.function)
        self.history.append(self.state.chip)

    @property
    def kind(self) -> Kind | None:
        return kind_of(self.state.chip)

    @property
    def text(self) -> str:
        fault = self.state.chip.fault
        return fault.text if fault else ""

    @property
    def throttling(self) -> list[str]:
        """The log's lines about throttling so far."""
        pairs = itertools.pairwise(self.history)
        found = [line for one, next_one in pairs for line in lines([one], [next_one])]
        name = f"INFO {bdf(1)} (n150): "
        return [line.removeprefix(name) for line in found if "throttl" in line]

    def since(self, now: float) -> float | None:
        """Return when the present fault began, as a look at this time knows it."""
        self.state.date_fault(now)
        return self.state.since


# -- heartbeat -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misses", "beats", "faults"),
    [
        (1, "7 7 7", ".SS"),
        (2, "7 7 7 7", "..SS"),
        (5, "7 7 7 7 7 7 7", ".....SS"),
        (2, "1 1 2 2 3 3 3", "......S"),
        (2, f"7 {'e7 ' * 100} 7 e7 7 e7", f".{'.' * 100}..SS"),
        (1, "7 e8 8 8", "...S"),
        (1, "e7 7 7", "..S"),
        (1, "7 7 8 8 6 6 0 0 4294967294", ".S.S.S.S."),
        (1, "7 7 e8", ".S."),
        (1, "0 0", ".S"),
        (1, "4294967295 4294967295", ".S"),
        (1, "- - - 7 - - -", "......."),
    ],
    ids=[
        "of one", "of two", "of five", "a change starts the count again",
        "readings by events do not count", "nor does the next poll compare with them",
        "also if the first reading is one",
        "any change shows life: up, down, wrapped", "also one that an event shows",
        "zero is a count", "all ones are one", "not offered",
    ],
)  # fmt: skip
def test_a_heartbeat_has_stalled_at_the_nth_poll_without_a_change(
    misses: int, beats: str, faults: str
) -> None:
    """Not a poll earlier or later; a reset restarts the count lower.

    "e7" is read by an event, "-" is not offered.
    """
    followed = Followed(heartbeat_misses=misses)

    found = ""
    for beat in beats.split():
        heartbeat = ttdp.to_integer(beat.strip("e-"))
        kind = followed.read(heartbeat=heartbeat, temperature=40.0, is_poll=beat[0] != "e")
        found += {None: ".", Kind.STALLED: "S"}[kind]
        assert not kind or f"stalled at {heartbeat}" in followed.text

    assert found == faults


@pytest.mark.parametrize(
    "between", [{"error": ReadError("tt_serial", errno.EIO)}, {"all_ones": True}]
)
def test_another_fault_does_not_end_a_stall(between: dict[str, Any]) -> None:
    """The same heartbeat before and after: the chip is not healthy for a moment."""
    followed = Followed(heartbeat_misses=2)
    for _ in range(3):
        followed.read(heartbeat=7)

    followed.read(**between)

    assert followed.read(heartbeat=7) is Kind.STALLED


# -- temperature and thermal trips -----------------------------------------------------------------


@pytest.mark.parametrize(("limit", "own"), [(90, None), (90, 75.0), (90, 100.0), ("card", 90.0)])
def test_hot_from_the_operators_limit_and_cool_from_five_degrees_below(
    limit: float | str, own: float | None
) -> None:
    """To the thousandth; the card's own limit counts only as "card"."""
    followed = Followed(temperature_limit=limit)
    course = {
        89.999: None, 90.0: Kind.HOT, 85.001: Kind.HOT, 89.0: Kind.HOT, 85.0: None,
        89.998: None, 91.5: Kind.HOT, 20.0: None,
    }  # fmt: skip

    for celsius, kind in course.items():
        assert followed.read(temperature=celsius, throttles_at=own) is kind, celsius
        if kind:
            assert f"{celsius:.1f} °C, limit 90 °C" in followed.text


@pytest.mark.parametrize(
    ("limit", "telemetry"),
    [
        (None, {"temperature": 95.0, "throttles_at": 90.0}),
        ("card", {"temperature": 500.0}),
        ("card", {"throttles_at": 90.0}),
        (90, {"throttles_at": 90.0}),
    ],
)
def test_nothing_is_hot_without_a_limit_and_a_temperature(
    limit: float | str | None, telemetry: dict[str, Any]
) -> None:
    """A busy card may throttle for hours."""
    followed = Followed(temperature_limit=limit)
    followed.read(temperature=95.0, throttles_at=90.0)

    assert followed.read(**telemetry) is None


@pytest.mark.parametrize(("limit", "kind"), [(79, Kind.HOT), (84, None), ("card", None)])
def test_a_limit_that_is_raised_by_less_than_five_degrees_takes_effect(
    limit: float | str, kind: Kind | None
) -> None:
    """A chip that was too hot for the former limit has not reached the new one."""
    followed = Followed(temperature_limit=80)
    followed.read(temperature=81.0, throttles_at=83.0)
    followed.rules = HealthSettings(temperature_limit=limit)

    assert followed.read(temperature=81.0, throttles_at=83.0) is kind


@pytest.mark.parametrize(
    ("holdoff", "course", "faults"),
    [
        (300, [(3, 0), (4, 1), (4, 299.9), (4, 0.1), (4, 1000)], "-TT--"),
        (300, [(0, 0), (1, 1), (2, 299), (2, 299), (2, 1)], "-TTT-"),
        (300, [(17, 0), (17, 1)], "--"),
        (300, [(5, 0), (0, 1), (1, 1)], "--T"),
        (300, [(0, 0), (1, 1), (0, 299), (0, 1)], "-TT-"),
        (300, [(0, 0), (None, 1), (1, 1)], "--T"),
        (0, [(0, 0), (1, 1)], "--"),
    ],
    ids=[
        "once", "again", "history", "cleared", "cleared during it", "not offered for a while",
        "without holdoff",
    ],
)  # fmt: skip
def test_a_trip_lasts_from_the_rise_until_the_holdoff_is_over(
    holdoff: float, course: list[tuple[int | None, float]], faults: str
) -> None:
    """Trips before the start are history; a reset clears the counter and nothing else."""
    followed = Followed(trip_holdoff=holdoff)
    # With a temperature, as a chip without any telemetry keeps everything.
    found = [followed.read(trips=trips, temperature=40.0, after=after) for trips, after in course]
    assert found == [Kind.TRIPPED if letter == "T" else None for letter in faults]


# -- reads that fail, telemetry that is missing ----------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENODATA, Kind.RESETTING),
        (errno.EIO, Kind.READ_ERROR),
        (errno.EACCES, Kind.READ_ERROR),
        (0, Kind.READ_ERROR),
    ],
)
def test_the_errno_decides_the_kind_of_fault(number: int, kind: Kind) -> None:
    """A reset; any other error is reported with its attribute."""
    followed = Followed()

    assert followed.read(error=ReadError("tt_serial", number)) is kind

    words = ("tt_serial", os.strerror(number)) if kind is Kind.READ_ERROR else ()
    assert all(word in followed.text for word in words)


@pytest.mark.parametrize("before", [{"heartbeat": 7}, {"all_ones": True}])
def test_a_device_that_is_being_removed_is_as_it_was(before: dict[str, Any]) -> None:
    """ENODEV: the next scan shows whether the chip is gone or has lost its driver."""
    followed = Followed()
    kind = followed.read(**before)

    assert followed.read(error=ReadError("tt_serial", errno.ENODEV)) is kind


def test_what_was_read_before_a_blocked_read_is_not_shown_after_it() -> None:
    """Sensors are read for metrics only; a scrape while reads of the chip block gets none."""
    followed = Followed()
    reading = Reading(followed.function, Telemetry(heartbeat=7), 0.0)
    row: ttdp.ProcessRow = {"pid": 7, "command": "python3", "of_pod": False}
    sensors = {"power1_input": 40.0}
    followed.state.apply(reading._replace(sensors=sensors, processes=[row]), followed.rules)

    followed.state.block()
    assert followed.kind is Kind.BLOCKED
    followed.read(heartbeat=8)

    assert followed.kind is None
    assert (followed.state.sensors, followed.state.processes) == ({}, None)


def test_late_firmware_is_not_a_fault() -> None:
    """A chip that never had telemetry is healthy as long as nothing contradicts it."""
    followed = Followed(heartbeat_misses=1)
    assert not any(followed.read(after=TIMEOUT) for _ in range(5))


def test_a_rebound_chip_has_ten_seconds_for_its_telemetry() -> None:
    """It is healthy meanwhile; each time they begin again."""
    followed = Followed()
    followed.read(heartbeat=7)

    assert followed.read() is None
    assert followed.read(after=TIMEOUT - 0.1) is None
    assert followed.read(after=0.1) is Kind.SILENT
    assert followed.read(after=1000) is Kind.SILENT

    assert followed.read(heartbeat=3) is None
    assert followed.read() is None


@pytest.mark.parametrize("kind", [Kind.GONE, Kind.NO_DRIVER, Kind.RESETTING])
def test_a_chip_that_was_ill_and_returns_without_telemetry_is_silent_at_once(kind: Kind) -> None:
    """It has to show that it is well. The reason claims nothing of how that came."""
    followed = Followed()
    followed.read(heartbeat=7)
    followed.state.chip = chip(1, fault=kind)

    assert followed.read() is Kind.SILENT
    assert followed.text == "firmware reports no telemetry"
    assert followed.read(all_ones=True) is Kind.NO_RESPONSE
    assert followed.read(heartbeat=4) is None


FAULTS: list[tuple[Kind, dict[str, Any]]] = [  # in the order in which they count
    (Kind.RESETTING, {"error": RESETTING}),
    (Kind.NO_RESPONSE, {"all_ones": True}),
    (Kind.STALLED, {"heartbeat": 7}),
    (Kind.HOT, {"temperature": 90.0}),
    (Kind.TRIPPED, {"trips": 2}),
    (Kind.SILENT, {}),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_of_several_faults_the_first_of_the_table_is_the_kind(number: int) -> None:
    """A chip that has all that follow, too."""
    followed = Followed(temperature_limit=80, heartbeat_misses=1)
    followed.read(heartbeat=7, trips=1)

    telemetry: dict[str, Any] = {}
    for _, values in FAULTS[number:]:
        telemetry |= values

    followed.read(after=TIMEOUT, **telemetry)  # silence begins with it
    assert followed.read(after=TIMEOUT, **telemetry) is FAULTS[number][0]


faulty = st.sampled_from(
    [
        {"error": RESETTING},
        {"error": ReadError("tt_heartbeat", errno.EIO)},
        {"all_ones": True},
        {"heartbeat": 5},
        {"temperature": 99.0, "throttles_at": 90.0},
        {"trips": 9},
        {},
    ]
)


@hypothesis_settings(deadline=None)
@given(st.lists(st.tuples(faulty, st.booleans(), st.sampled_from([0.1, 20.0])), max_size=8))
def test_a_chip_recovers_by_itself_from_anything(
    course: list[tuple[dict[str, Any], bool, float]],
) -> None:
    """After any faults in any order, a chip without one for the holdoff is healthy."""
    followed = Followed(temperature_limit=90, heartbeat_misses=1, trip_holdoff=60)
    followed.read(heartbeat=1)
    for telemetry, is_poll, after in course:
        followed.read(is_poll=is_poll, after=after, **telemetry)

    well: dict[str, Any] = {"temperature": 40.0, "throttles_at": 90.0, "trips": 9}
    followed.read(heartbeat=100, **well)

    assert followed.read(after=60, heartbeat=101, **well) is None


# -- reasons, with the command that helps ----------------------------------------------------------


FIX = "tt-device-plugin fix 0000:01:00.0"
NO_COMMAND = (Kind.HOT, Kind.TRIPPED)  # only cooling helps
OF_DEVICE_FILES = (Kind.GONE, Kind.NO_DRIVER, Kind.DEVICE_FILE)


@pytest.mark.parametrize("kind", [each for each in Kind if each not in OF_DEVICE_FILES])
def test_a_fault_that_can_be_mended_ends_with_the_one_command(kind: Kind) -> None:
    """`fix` with the address; it comes last, so that it can be pasted."""
    reason = str(chip(1, fault=kind).reason)
    assert reason == ("it is ill" if kind in NO_COMMAND else f"it is ill; run: {FIX}")


NOT_BOUND = {"driver": None, "ordinal": None, "path": ""}
OF_VFIO = NOT_BOUND | {"driver": "vfio-pci"}
VFIO = Reason("driver vfio-pci is bound; release the card there, or add it to exclude")
UNUSABLE: Mapping[str, tuple[dict[str, Any], Kind, Reason]] = {
    "not on the bus": (
        NOT_BOUND | {"on_bus": False},
        Kind.GONE,
        Reason("PCI device is gone", FIX),
    ),
    "not on the bus, not loaded": (
        NOT_BOUND | {"on_bus": False, "driver_is_loaded": False},
        Kind.GONE,
        Reason("PCI device is gone", FIX),
    ),
    "not loaded": (
        NOT_BOUND | {"driver_is_loaded": False},
        Kind.NO_DRIVER,
        Reason("driver is not loaded", "modprobe tenstorrent"),
    ),
    "not bound": (NOT_BOUND, Kind.NO_DRIVER, Reason("driver is not bound", FIX)),
    "another's": (OF_VFIO, Kind.NO_DRIVER, VFIO),
    "another's, not loaded": (OF_VFIO | {"driver_is_loaded": False}, Kind.NO_DRIVER, VFIO),
    "without a class device": (
        NOT_BOUND | {"driver": "tenstorrent"},
        Kind.DEVICE_FILE,
        Reason("driver is bound, but there is no device file", FIX),
    ),
    "invalid": (
        {"file_fault": "/dev/tenstorrent/0 does not exist"},
        Kind.DEVICE_FILE,
        Reason("device file is invalid: /dev/tenstorrent/0 does not exist", FIX),
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_chip_that_no_container_could_use_has_the_reason_of_that(case: str) -> None:
    """Whatever its telemetry was. Nobody is told to take a card from another driver."""
    state, kind, reason = UNUSABLE[case]
    stalled = chip(1, fault=Kind.STALLED)

    found = stalled._replace(function=stalled.function._replace(**state))

    assert found.fault == Fault(kind, reason.problem)
    assert found.reason == reason


# -- the log ---------------------------------------------------------------------------------------


def lines(before: list[ttdp.Chip], after: list[ttdp.Chip], **more: Any) -> list[str]:
    """Return the log lines of a change."""
    found = ttdp.changes(decide(before, **more), decide(after, **more))
    return [f"{'WARNING' if level > 20 else 'INFO'} {line}" for level, line in found]


def ill(kind: Kind, problem: str) -> ttdp.Chip:
    return chip(1)._replace(telemetry_fault=Fault(kind, problem))


def test_each_kind_of_fault_is_one_line() -> None:
    """New numbers in a reason are not logged."""
    hot, hotter = (ill(Kind.HOT, f"too hot: {celsius} °C") for celsius in (96, 97))
    dead = ill(Kind.NO_RESPONSE, "chip does not respond")
    well = chip(1)
    name = f"{well.bdf} (n150)"

    assert lines([well], [hot]) == [f"WARNING {name}: unhealthy: too hot: 96 °C"]
    assert lines([hot], [hotter]) == []
    unhealthy = f"unhealthy: chip does not respond; run: {FIX}"
    assert lines([hotter], [dead]) == [f"WARNING {name}: {unhealthy}"]
    assert lines([dead], [well]) == [f"INFO {name}: healthy again"]


def test_the_log_has_the_faults_of_chips_that_are_no_devices_yet_or_no_longer() -> None:
    """One that waits for its board; one that only a pod has, and that is not on the node."""
    waits, ill = chip(1, "p300c"), chip(1, "p300c", fault=Kind.STALLED)
    settings = ttdp.Settings(unit="board")
    assert lines([waits], [ill], settings=settings) == [
        f"WARNING {waits.bdf} (p300c): unhealthy: it is ill; run: {FIX}"
    ]

    held = decide([], holds=[hold("n150", bdf(1), buses=[1])])
    unhealthy = f"{bdf(1)} (unknown card): unhealthy: PCI device is gone; run: {FIX}"
    assert unhealthy in [line for _, line in ttdp.changes(None, held)]


def test_the_log_has_the_fault_of_a_held_chip_without_whom_that_concerns() -> None:
    """The same text as everywhere; `fix` names the pods when it runs."""
    held = [hold("n150", bdf(1), buses=[1])]
    before, after = [chip(1)], [chip(1, fault=Kind.STALLED)]
    assert lines(before, after, holds=held) == lines(before, after)


THROTTLES = "throttling: it has reached its temperature limit"
NO_LONGER = "no longer throttling"


def test_throttling_is_one_line_and_not_a_fault() -> None:
    """Its end is another one, five degrees below."""
    followed = Followed()
    for celsius, number in {89.9: 0, 90.0: 1, 92.0: 1, 85.1: 1, 85.0: 2, 89.8: 2}.items():
        assert followed.read(temperature=celsius, throttles_at=90.0) is None
        assert followed.throttling == [THROTTLES, NO_LONGER][:number], celsius


@pytest.mark.parametrize(
    "end",
    [
        lambda chip: chip.read(all_ones=True),
        lambda chip: chip.read(error=RESETTING),
        lambda chip: chip.read(error=ReadError("temp1_input", errno.EIO)),
        lambda chip: chip.read(),
        lambda chip: [chip.vanish(), chip.come_back(), chip.read()],
    ],
    ids=["dead", "resetting", "unreadable", "silent", "vanished"],
)
def test_a_chip_that_shows_no_temperature_has_not_cooled_down(
    end: Callable[[Followed], object],
) -> None:
    """Neither a line nor the end of the hysteresis, of throttling and of heat alike."""
    followed = Followed(temperature_limit=88)
    assert followed.read(temperature=90.0, throttles_at=90.0) is Kind.HOT

    for _ in range(2):
        end(followed)

    assert followed.read(temperature=86.0, throttles_at=90.0) is Kind.HOT
    assert followed.throttling == [THROTTLES]
    assert followed.read(temperature=82.9, throttles_at=90.0) is None
    assert followed.throttling == [THROTTLES, NO_LONGER]


def test_a_chip_is_introduced_once_more_when_its_firmware_reports_its_identity() -> None:
    """Its device file first, then its serial."""
    known = chip(1, serial="A" * 16, asic_id="B" * 16, firmware="19.4.0.0")
    found = f"INFO {bdf(1)} (n150): found /dev/tenstorrent/0"

    assert lines([], [chip(1)]) == [found]
    identity = f"serial {'A' * 16}, ASIC {'B' * 16}, firmware 19.4.0.0"
    assert lines([chip(1)], [known]) == [f"{found}, {identity}"]
    assert lines([known], [known]) == []


# -- over time -------------------------------------------------------------------------------------


def test_a_fault_has_the_time_at_which_its_kind_began() -> None:
    """New numbers do not change it; another kind begins anew, and health ends it."""
    followed = Followed(temperature_limit=80)
    assert followed.since(100) is None

    followed.read(temperature=81.0)
    assert followed.since(200) == 200
    followed.read(temperature=85.0)
    assert followed.since(300) == 200

    followed.read(all_ones=True)
    assert followed.since(400) == 400

    followed.read(temperature=40.0)
    assert followed.since(500) is None


def test_a_chip_that_returns_is_as_ill_as_it_was_until_it_is_read() -> None:
    """The fault and its time stay; there is nothing to run meanwhile."""
    followed = Followed()
    followed.read(heartbeat=7)
    followed.vanish()
    assert followed.since(100) == 100

    followed.come_back()

    assert followed.kind is Kind.GONE
    assert followed.since(200) == 100
    assert followed.state.chip.reason == Reason("waiting for firmware telemetry")
    followed.read(heartbeat=8)
    assert followed.kind is None


OTHER = Identity(card="n150", serial="B" * 16)


@pytest.mark.parametrize("is_seen_to_vanish", [True, False])
@pytest.mark.parametrize(("celsius", "kind", "since"), [(79.0, None, None), (90.0, Kind.HOT, 200)])
def test_another_card_in_the_slot_begins_anew(
    is_seen_to_vanish: bool, celsius: float, kind: Kind | None, since: float | None
) -> None:
    """Its trips are no rise of the former one's counter, nor is its heartbeat the same one's.

    A fault of the same kind is that card's, and begins with it.
    """
    followed = Followed(temperature_limit=80, heartbeat_misses=1)
    followed.read(identity=Identity(serial="A" * 16), heartbeat=7, trips=1)
    followed.read(identity=Identity(serial="A" * 16), heartbeat=8, trips=2, temperature=90.0)
    assert (followed.kind, followed.since(100)) == (Kind.HOT, 100)
    if is_seen_to_vanish:
        followed.vanish()
        followed.come_back()

    followed.read(identity=OTHER, heartbeat=8, trips=9, temperature=celsius)

    assert (followed.kind, followed.since(200)) == (kind, since)
    assert followed.state.chip.identity == OTHER
    followed.read(identity=OTHER, heartbeat=8)
    assert followed.kind is Kind.STALLED
