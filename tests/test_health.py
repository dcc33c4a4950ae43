"""Health: each rule on its own, with a clock that the test holds, and the log that tells of it."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.node import Chip, SimulatedNode
from tests.world.simulation import kernel_errors, settings_of
from ttdp import Fault, Fleet, Health, HealthSettings, Reading, Telemetry

FUNCTION = ttdp.PciFunction("0000:01:00.0", "blackhole", "p150a", 0, 0, "/dev/tenstorrent/0", "/sys/devices/x")
WORMHOLE = FUNCTION._replace(arch="wormhole", pci_card="n150")


class Patient:
    """A device under judgement: each look is one second after the last unless told."""

    def __init__(self, **rules: Any) -> None:
        self.rules = HealthSettings(**rules)
        self.health = Health()
        self.now = 1000.0
        self.function = FUNCTION

    def look(self, *, after: float = 1, periodic: bool = True, **telemetry: Any) -> Fault | None:
        """The fault after a look that finds this telemetry; a poll, unless it says that an event caused it."""
        self.now += after
        told = Telemetry(**telemetry)
        self.health = ttdp.judge(self.health, self.function, told, self.rules, self.now, periodic=periodic)
        assert (self.health.reason is None) == (self.health.fault is None)
        return self.health.fault


# -- heartbeat ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("misses", [1, 2, 5])
def test_a_heartbeat_has_stalled_at_the_nth_poll_without_a_change(misses: int) -> None:
    """Not a poll earlier, and not a poll later."""
    patient = Patient(heartbeat_misses=misses)
    verdicts = [patient.look(heartbeat=7) for _ in range(misses + 3)]
    assert verdicts == [None] * misses + [Fault.STALLED] * 3
    assert patient.health.reason is not None
    assert "stalled at 7" in patient.health.reason and "tt-smi -r" in patient.health.reason


def test_a_poll_with_a_change_starts_the_count_again() -> None:
    """Misses count in a row only."""
    patient = Patient(heartbeat_misses=2)
    beats = [1, 1, 2, 2, 3, 3, 3]
    assert [patient.look(heartbeat=beat) for beat in beats] == [None] * 6 + [Fault.STALLED]


def test_looks_that_an_event_caused_do_not_count_as_misses() -> None:
    """A hundred of them in a row, without a change, prove nothing; they do not excuse anything either."""
    patient = Patient(heartbeat_misses=2)
    patient.look(heartbeat=7)
    assert not any(patient.look(heartbeat=7, periodic=False, after=0.001) for _ in range(100))
    assert patient.look(heartbeat=7) is None
    assert patient.look(heartbeat=7, periodic=False) is None
    assert patient.look(heartbeat=7) is Fault.STALLED
    assert patient.look(heartbeat=7, periodic=False) is Fault.STALLED


@pytest.mark.parametrize("later", [8, 6, 0, 4294967294])
@pytest.mark.parametrize("periodic", [True, False])
def test_any_change_is_life(later: int, periodic: bool) -> None:
    """Up, down, wrapped: a reset starts the count again from below. An event's look can prove life."""
    patient = Patient(heartbeat_misses=1)
    assert [patient.look(heartbeat=beat) for beat in (7, 7)] == [None, Fault.STALLED]
    assert patient.look(heartbeat=later, periodic=periodic) is None


def test_a_heartbeat_of_zero_is_a_heartbeat() -> None:
    """Zero is a count like any other: it can stall."""
    patient = Patient(heartbeat_misses=1)
    assert [patient.look(heartbeat=0) for _ in range(2)] == [None, Fault.STALLED]


def test_a_heartbeat_of_all_ones_does_not_pass_for_one_that_is_not_offered() -> None:
    """A dead chip that offers nothing else: its heartbeat does not change, and that is proof."""
    patient = Patient(heartbeat_misses=2)
    for raw in ("7", "8", "4294967295", "4294967295", "4294967295"):
        told = ttdp.parse_telemetry({"tt_heartbeat": raw})
        patient.look(heartbeat=told.heartbeat, all_ones=told.all_ones)
    assert patient.health.fault in (Fault.STALLED, Fault.NO_RESPONSE)


def test_a_driver_without_a_heartbeat_is_no_fault() -> None:
    """Before 2.7 there is none; where it went away, there is none either."""
    patient = Patient(heartbeat_misses=1)
    assert not any(patient.look() for _ in range(5))
    patient.look(heartbeat=7)
    assert not any(patient.look() for _ in range(5))


@pytest.mark.parametrize(
    "between", [{"error": ("tt_serial", errno.EIO)}, {"all_ones": True}, None], ids=["error", "all ones", "blocked"]
)
def test_a_stalled_chip_is_not_healed_by_another_fault(between: dict[str, Any] | None) -> None:
    """Same heartbeat before and after an error or a blocked read: it is stalled still, without a healthy moment."""
    patient = Patient(heartbeat_misses=2)
    for _ in range(3):
        patient.look(heartbeat=7)
    if between:
        patient.look(**between)
    else:
        patient.health = ttdp.unhealthy(patient.health, Fault.BLOCKED, ttdp.BLOCKED)
    assert patient.look(heartbeat=7) is Fault.STALLED


def test_the_poll_after_an_event_compares_with_the_poll_before_it() -> None:
    """The event's look and the poll can be closer together than two beats: that poll is no miss."""
    patient = Patient(heartbeat_misses=1)
    patient.look(heartbeat=7)
    patient.look(heartbeat=8, periodic=False)
    assert patient.look(heartbeat=8, after=0.01) is None
    assert patient.look(heartbeat=8) is Fault.STALLED


# -- temperature -------------------------------------------------------------------------------------------------------


def test_hot_from_the_limit_and_cool_from_five_degrees_below() -> None:
    """Both bounds to the thousandth that hwmon shows."""
    patient = Patient()
    course = [(89.999, None), (90.0, Fault.HOT), (85.001, Fault.HOT), (89.0, Fault.HOT), (85.0, None), (89.999, None),
              (91.0, Fault.HOT), (20.0, None)]  # fmt: skip
    assert [patient.look(temperature=celsius, temperature_limit=90.0) for celsius, _ in course] == [
        f for _, f in course
    ]


def test_a_hot_card_says_how_hot_and_what_to_do() -> None:
    """The reason holds both figures and the remedy."""
    patient = Patient()
    patient.look(temperature=91.5, temperature_limit=90.0)
    assert patient.health.reason is not None
    assert all(word in patient.health.reason for word in ("91.5 °C", "90 °C", "cooling"))


def test_the_configured_limit_wins_over_the_cards_own() -> None:
    """In both directions, and where the card has none."""
    lower, higher = Patient(temperature_limit=80), Patient(temperature_limit=95)
    assert lower.look(temperature=80.0, temperature_limit=90.0) is Fault.HOT
    assert lower.look(temperature=75.0, temperature_limit=90.0) is None
    assert higher.look(temperature=94.9, temperature_limit=90.0) is None
    assert lower.look(temperature=80.0) is Fault.HOT


def test_without_a_limit_or_a_temperature_nothing_is_hot() -> None:
    """An old driver shows no temp1_max; a firmware may lack the temperature."""
    patient = Patient()
    assert patient.look(temperature=500.0) is None
    assert patient.look(temperature_limit=90.0) is None
    patient.look(temperature=95.0, temperature_limit=90.0)
    assert patient.look(temperature_limit=90.0) is None


def test_heat_outlasts_another_fault() -> None:
    """A card that was hot before a reset is hot after it until it is five degrees below its limit."""
    patient = Patient()
    patient.look(temperature=90.0, temperature_limit=90.0)
    patient.look(error=("temp1_input", errno.ENODATA))
    assert patient.look(temperature=87.0, temperature_limit=90.0) is Fault.HOT


# -- thermal trips -----------------------------------------------------------------------------------------------------


def test_a_trip_counts_from_the_rise_until_the_holdoff_is_over() -> None:
    """Unhealthy at the rise, and up to the last moment of `trip_holdoff`."""
    patient = Patient(trip_holdoff=300)
    assert patient.look(trips=3) is None
    assert patient.look(trips=4) is Fault.TRIPPED
    assert patient.look(trips=4, after=299.9) is Fault.TRIPPED
    assert patient.look(trips=4, after=0.1) is None
    assert patient.look(trips=4, after=1000) is None


def test_another_trip_begins_the_holdoff_again() -> None:
    """Quiet means: since the last one."""
    patient = Patient(trip_holdoff=300)
    for trips in (0, 1):
        patient.look(trips=trips)
    assert patient.look(trips=2, after=299) is Fault.TRIPPED
    assert patient.look(trips=2, after=299) is Fault.TRIPPED
    assert patient.look(trips=2, after=1) is None


def test_trips_from_before_the_start_are_history() -> None:
    """The first count seen is no rise, whatever it is."""
    patient = Patient()
    assert patient.look(trips=17) is None


def test_a_count_that_starts_again_lower_is_no_trip_and_the_next_rise_is() -> None:
    """A reset clears the counter; the first trip after it would be missed by whoever compares with the old count."""
    patient = Patient(trip_holdoff=10)
    for trips in (5, 0):
        assert patient.look(trips=trips) is None
    assert patient.look(trips=1) is Fault.TRIPPED


def test_a_count_that_starts_again_does_not_end_the_holdoff() -> None:
    """The reset after a trip is no proof that the card stays cool."""
    patient = Patient(trip_holdoff=10)
    patient.look(trips=0)
    patient.look(trips=1)
    assert patient.look(trips=0, after=9) is Fault.TRIPPED
    assert patient.look(trips=0, after=1) is None


def test_a_trip_behind_a_silence_counts_when_the_chip_speaks() -> None:
    """What was missed between two readings, during a reset, is a rise all the same."""
    patient = Patient()
    patient.look(trips=0)
    patient.look(error=("tt_heartbeat", errno.ENODATA))
    patient.look(trips=None)
    assert patient.look(trips=1) is Fault.TRIPPED


def test_no_holdoff_means_no_fault() -> None:
    """With `trip_holdoff = 0` a trip is nobody's concern."""
    patient = Patient(trip_holdoff=0)
    assert [patient.look(trips=trips) for trips in (0, 1)] == [None, None]


# -- reads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENODATA, Fault.RESETTING),
        (errno.ENODEV, Fault.GONE),
        (errno.EIO, Fault.READ_ERROR),
        (errno.EACCES, Fault.READ_ERROR),
        (errno.ETIMEDOUT, Fault.READ_ERROR),
        (0, Fault.READ_ERROR),
    ],
)
def test_the_errno_tells_the_kind_of_fault(number: int, fault: Fault) -> None:
    """Resetting and going away have an errno of their own; any other is told with the attribute and the error."""
    patient = Patient()
    assert patient.look(error=("tt_serial", number)) is fault
    assert patient.health.reason is not None
    if fault is Fault.READ_ERROR:
        assert "tt_serial" in patient.health.reason and os.strerror(number) in patient.health.reason


def test_only_a_blackhole_that_resets_is_told_the_remedy_of_lost_telemetry() -> None:
    """On Blackhole ENODATA can stay for good, until the driver is bound anew."""
    blackhole, wormhole = Patient(), Patient()
    wormhole.function = WORMHOLE
    for patient in (blackhole, wormhole):
        patient.look(error=("tt_heartbeat", errno.ENODATA))
    assert blackhole.health.reason is not None and "unbind" in blackhole.health.reason
    assert wormhole.health.reason == "resetting (no telemetry)"


def test_all_ones_is_a_chip_that_does_not_respond() -> None:
    """At the first look already, with the remedy."""
    patient = Patient()
    assert patient.look(all_ones=True) is Fault.NO_RESPONSE
    assert patient.health.reason is not None and "tt-smi -r" in patient.health.reason


def test_a_read_that_does_not_return_is_a_fault_until_it_does() -> None:
    """Blocked says so; the look after it is judged like any other."""
    patient = Patient(heartbeat_misses=1)
    patient.look(heartbeat=7)
    patient.health = ttdp.unhealthy(patient.health, Fault.BLOCKED, ttdp.BLOCKED)
    assert patient.look(heartbeat=8) is None


def test_a_wrong_node_outweighs_all_that_the_chip_says() -> None:
    """A container could not use it, however well the chip is."""
    patient = Patient()
    patient.function = FUNCTION._replace(node_fault="/dev/tenstorrent/0: No such file or directory")
    assert patient.look(heartbeat=7) is Fault.NODE
    assert "/dev/tenstorrent/0: No such file" in str(patient.health.reason)
    patient.function = FUNCTION
    assert patient.look(heartbeat=8) is None


def test_gone_tells_whether_the_card_or_the_driver_went() -> None:
    """A function that is still on the bus wants to be bound; the command holds its address."""
    away = ttdp.gone(Health(), "0000:01:00.0", function_exists=False)
    unbound = ttdp.gone(Health(), "0000:01:00.0", function_exists=True)
    assert away.fault is unbound.fault is Fault.GONE
    assert "PCI device is gone" in str(away.reason)
    assert "echo 0000:01:00.0 > /sys/bus/pci/drivers/tenstorrent/bind" in str(unbound.reason)


def test_silence_is_no_fault() -> None:
    """Firmware that is late, or that offers nothing: healthy as long as nothing contradicts it."""
    patient = Patient(heartbeat_misses=1)
    assert not any(patient.look() for _ in range(5))


faulty = st.sampled_from(
    [
        {"error": ("tt_heartbeat", errno.ENODATA)},
        {"error": ("tt_heartbeat", errno.EIO)},
        {"all_ones": True},
        {"heartbeat": 5},
        {"temperature": 99.0, "temperature_limit": 90.0},
        {"trips": 9},
    ]
)


@hypothesis_settings(deadline=None)
@given(st.lists(faulty, max_size=8))
def test_whatever_befell_a_chip_it_recovers_by_itself(course: list[dict[str, Any]]) -> None:
    """After any faults in any order, a chip that is well for as long as the holdoff is healthy."""
    patient = Patient(heartbeat_misses=1, trip_holdoff=60)
    for telemetry in course:
        patient.look(**telemetry)
    patient.look(heartbeat=100, temperature=40.0, temperature_limit=90.0, trips=9)
    assert patient.look(after=60, heartbeat=101, temperature=40.0, temperature_limit=90.0, trips=9) is None


# -- the log -----------------------------------------------------------------------------------------------------------


class Watched:
    """A fleet of one chip that is looked at by hand, and what the log says of its health."""

    def __init__(self, node: SimulatedNode, caplog: pytest.LogCaptureFixture, **rules: Any) -> None:
        self.fleet = Fleet()
        self.settings = settings_of(node, node.root / "plugins", health=rules)
        self.caplog = caplog
        caplog.set_level("INFO")
        self.now = 0.0

    def look(self) -> None:
        self.now += 1
        self.observe()
        present = [chip.function for chip in self.fleet.chips.values() if chip.present]
        with kernel_errors():
            readings = [Reading(function, ttdp.read_telemetry(function), True) for function in present]
        self.fleet.learn(readings, self.settings.health, self.now)

    def observe(self) -> None:
        self.fleet.observe(self.settings)

    def lines(self) -> list[str]:
        """What was logged of health since the last call: level and message."""
        told = [f"{r.levelname} {r.message}" for r in self.caplog.records if "healthy" in r.message]
        self.caplog.clear()
        return told


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    return node.add("p150a")[0]


def test_each_kind_of_fault_is_one_line_however_long_it_lasts(
    node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    """Healthy, hot for a while, dead for a while, healthy: three lines, of which the last is no warning."""
    watched = Watched(node, caplog)
    watched.look()
    assert watched.lines() == []
    for celsius in (91, 92, 93):  # figures in the reason change, its kind does not
        chip.heat(celsius)
        chip.beat()
        watched.look()
    (hot,) = watched.lines()
    assert hot.startswith(f"WARNING {chip.bdf} (p150a): unhealthy: too hot: 91.0")
    chip.die()
    watched.look()
    watched.look()
    (dead,) = watched.lines()
    assert dead.startswith(f"WARNING {chip.bdf} (p150a): unhealthy: chip does not respond")
    chip.revive()
    chip.heat(40)
    watched.look()
    watched.look()
    assert watched.lines()[0] == f"INFO {chip.bdf} (p150a): healthy again"


def test_a_reset_and_a_stall_are_told_apart(node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture) -> None:
    """From one fault to the next without health in between: a line for each kind."""
    watched = Watched(node, caplog, heartbeat_misses=1)
    watched.look()
    watched.look()
    chip.reset()
    watched.look()
    chip.fail("tt_heartbeat", "EIO")
    watched.look()
    kinds = ["heartbeat stalled", "resetting", "telemetry cannot be read: tt_heartbeat"]
    lines = watched.lines()
    assert len(lines) == 3 and all(kind in line for kind, line in zip(kinds, lines, strict=True))


def test_a_device_that_went_keeps_its_identity_and_its_return_waits_for_its_word(
    node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    """Gone is one line; back on the bus it is still unhealthy until its telemetry is read."""
    watched = Watched(node, caplog)
    watched.look()
    known = watched.fleet.chips[chip.bdf]
    chip.vanish()
    watched.look()
    watched.look()
    device = watched.fleet.chips[chip.bdf]
    assert (device.present, device.health.fault, device.serial) == (False, Fault.GONE, known.serial)
    assert len(watched.lines()) == 1
    chip.come_back()
    watched.observe()
    assert watched.fleet.chips[chip.bdf].health.fault is Fault.GONE and watched.lines() == []
    watched.look()
    assert watched.fleet.chips[chip.bdf].health.fault is None
    assert watched.lines() == [f"INFO {chip.bdf} (p150a): healthy again"]


def test_a_driver_that_lets_go_is_told_from_a_card_that_went(node: SimulatedNode, chip: Chip) -> None:
    """The function stays on the bus: the remedy is to bind it, and from there on it is gone when it is."""
    fleet, settings = Fleet(), settings_of(node, node.root / "plugins")
    fleet.observe(settings)
    chip.unbind()
    fleet.observe(settings)
    assert "driver is not bound" in str(fleet.chips[chip.bdf].health.reason)
    chip.vanish()
    fleet.observe(settings)
    assert "PCI device is gone" in str(fleet.chips[chip.bdf].health.reason)


def test_a_read_under_way_is_a_fault_from_its_deadline_on(
    node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    """At two seconds it still may answer; past them it is unhealthy, with one line; when it answers, healthy."""
    watched = Watched(node, caplog)
    watched.observe()
    for seconds in (0.05, 2.0):
        watched.fleet.wait_no_longer(lambda bdf, seconds=seconds: seconds)  # type: ignore[misc]
        assert watched.fleet.chips[chip.bdf].health.fault is None
    for seconds in (2.01, 9.0):
        watched.fleet.wait_no_longer(lambda bdf, seconds=seconds: seconds)  # type: ignore[misc]
        assert watched.fleet.chips[chip.bdf].health.fault is Fault.BLOCKED
    assert len(watched.lines()) == 1
    watched.look()
    assert watched.fleet.chips[chip.bdf].health.fault is None


def test_a_new_device_is_listed_when_it_spoke_or_had_the_time_to(node: SimulatedNode, chip: Chip) -> None:
    """Not at once, so that its first list has its identity; after a tenth of a second without it."""
    fleet, settings = Fleet(), settings_of(node, node.root / "plugins")
    fleet.observe(settings)
    listed = [fleet.chips[chip.bdf].listed]
    for seconds in (0.05, 0.2):
        fleet.wait_no_longer(lambda bdf, seconds=seconds: seconds)  # type: ignore[misc]
        listed.append(fleet.chips[chip.bdf].listed)
    assert listed == [False, False, True]
