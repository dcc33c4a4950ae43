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
from ttdp import Fault, Fleet, Health, HealthSettings, Look, PciFunction, Reading, Telemetry

PATIENCE = ttdp.FIRMWARE_PATIENCE
BDF = "0000:05:00.0"
BLACKHOLE = PciFunction(BDF, "blackhole", "p150a", 0, 0, "/dev/tenstorrent/0", "/sys/devices/x")
WORMHOLE = BLACKHOLE._replace(arch="wormhole", pci_card="n150")


class Patient:
    """A chip under judgement: each look is one second after the last unless told."""

    def __init__(self, **rules: Any) -> None:
        self.rules = HealthSettings(**rules)
        self.health = Health()
        self.now = 1000.0
        self.circumstances: dict[str, Any] = {"function": BLACKHOLE}

    def look(self, *, after: float = 1, periodic: bool = True, **telemetry: Any) -> Fault | None:
        """The fault after a look that finds this: a poll, unless an event caused it."""
        self.now += after
        found = Telemetry(**telemetry)
        look = Look(telemetry=found, now=self.now, periodic=periodic, **self.circumstances)
        self.health = ttdp.judge(self.health, look, self.rules)
        assert (self.health.reason is None) == (self.health.fault is None)
        return self.health.fault

    @property
    def reason(self) -> str:
        return str(self.health.reason)


# -- heartbeat -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("misses", "beats", "verdicts"),
    [
        (1, "7 7 7", ".SS"),
        (2, "7 7 7 7", "..SS"),
        (5, "7 7 7 7 7 7 7", ".....SS"),
        (2, "1 1 2 2 3 3 3", "......S"),
        (2, f"7 {'e7 ' * 100} 7 e7 7 e7", f".{'.' * 100}..SS"),
        (1, "7 e8 8 8", "...S"),
        (1, "0 0", ".S"),
        (1, "4294967295 4294967295", ".S"),
        (1, "- - - 7 - - -", "......."),
    ],
    ids=[
        "of one", "of two", "of five", "a change starts the count again",
        "what an event causes proves nothing", "and is not what the next poll compares with",
        "zero is a count", "all ones are one that stands still", "there need not be any",
    ],
)  # fmt: skip
def test_a_heartbeat_has_stalled_at_the_nth_poll_without_a_change(
    misses: int, beats: str, verdicts: str
) -> None:
    """Not a poll earlier, and not a poll later. "e7" is found by an event, "-" is not offered."""
    patient = Patient(heartbeat_misses=misses)
    found = ""
    for beat in beats.split():
        heartbeat = ttdp.decimal(beat.strip("e-"))
        fault = patient.look(heartbeat=heartbeat, temperature=40.0, periodic=beat[0] != "e")
        found += {None: ".", Fault.STALLED: "S"}[fault]
        assert not fault or f"stalled at {heartbeat}" in patient.reason
    assert found == verdicts


@pytest.mark.parametrize("later", [8, 6, 0, 4294967294])
@pytest.mark.parametrize("periodic", [True, False])
def test_any_change_is_life(later: int, periodic: bool) -> None:
    """Up, down, wrapped: a reset starts the count again from below. An event can prove it, too."""
    patient = Patient(heartbeat_misses=1)
    assert [patient.look(heartbeat=beat) for beat in (7, 7)] == [None, Fault.STALLED]
    assert patient.look(heartbeat=later, periodic=periodic) is None


@pytest.mark.parametrize(
    "between", [{"error": ("tt_serial", errno.EIO)}, {"all_ones": True}, None], ids=str
)
def test_a_stalled_chip_is_not_healed_by_another_fault(between: dict[str, Any] | None) -> None:
    """The same heartbeat before and after: it is stalled still, without a healthy moment."""
    patient = Patient(heartbeat_misses=2)
    for _ in range(3):
        patient.look(heartbeat=7)
    if between:
        patient.look(**between)
    else:
        patient.health = ttdp.unhealthy(patient.health, Fault.BLOCKED, ttdp.BLOCKED)
    assert patient.look(heartbeat=7) is Fault.STALLED


# -- temperature -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "own"), [(90, None), (90, 75.0), (90, 100.0), ("card", 90.0)])
def test_hot_from_the_operators_limit_and_cool_from_five_degrees_below(
    limit: float | str, own: float | None
) -> None:
    """Both bounds to the thousandth that hwmon shows; the card's own counts by its name only."""
    patient = Patient(temperature_limit=limit)
    course = {
        89.999: None, 90.0: Fault.HOT, 85.001: Fault.HOT, 89.0: Fault.HOT, 85.0: None,
        89.998: None, 91.5: Fault.HOT, 20.0: None,
    }  # fmt: skip
    for celsius, fault in course.items():
        assert patient.look(temperature=celsius, throttles_at=own) is fault, celsius
        if fault:
            words = (f"{celsius:.1f} °C", "limit 90 °C", "cooling")
            assert all(word in patient.reason for word in words)


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
    """A card's own limit is where it throttles: a busy chip may be there for hours."""
    patient = Patient(temperature_limit=limit)
    patient.look(temperature=95.0, throttles_at=90.0)
    assert patient.look(**telemetry) is None


def test_heat_outlasts_another_fault() -> None:
    """A card that was hot before a reset is hot after it until it is five degrees cooler."""
    patient = Patient(temperature_limit=90)
    patient.look(temperature=90.0)
    patient.look(error=("tt_heartbeat", errno.ENODATA))
    assert patient.look(temperature=87.0) is Fault.HOT


# -- thermal trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("course", "faults"),
    [
        ([(3, 0), (4, 1), (4, 299.9), (4, 0.1), (4, 1000)], "-TT--"),
        ([(0, 0), (1, 1), (2, 299), (2, 299), (2, 1)], "-TTT-"),
        ([(17, 0), (17, 1)], "--"),
        ([(5, 0), (0, 1), (1, 1)], "--T"),
        ([(0, 0), (1, 1), (0, 299), (0, 1)], "-TT-"),
        ([(0, 0), (None, 1), (1, 1)], "--T"),
    ],
    ids=["holdoff", "again", "history", "cleared", "cleared during it", "behind a silence"],
)
def test_a_trip_counts_from_the_rise_until_the_holdoff_is_over(
    course: list[tuple[int | None, float]], faults: str
) -> None:
    """What was counted before the start is history; a reset clears the counter and nothing else."""
    patient = Patient(trip_holdoff=300)
    found = [patient.look(trips=trips, after=after, heartbeat=None) for trips, after in course]
    assert found == [Fault.TRIPPED if letter == "T" else None for letter in faults]


def test_no_holdoff_means_no_fault() -> None:
    """With `trip_holdoff = 0` a trip is nobody's concern."""
    patient = Patient(trip_holdoff=0)
    assert [patient.look(trips=trips) for trips in (0, 1)] == [None, None]


# -- reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (errno.ENODATA, Fault.RESETTING),
        (errno.ENODEV, Fault.GONE),
        (errno.EIO, Fault.READ_ERROR),
        (errno.EACCES, Fault.READ_ERROR),
        (0, Fault.READ_ERROR),
    ],
)
def test_the_errno_tells_the_kind_of_fault(number: int, fault: Fault) -> None:
    """Resetting and going away have one of their own; any other is told with the attribute."""
    patient = Patient()
    assert patient.look(error=("tt_serial", number)) is fault
    words = ("tt_serial", os.strerror(number)) if fault is Fault.READ_ERROR else ()
    assert all(word in patient.reason for word in words)


@pytest.mark.parametrize(("function", "advice"), [(BLACKHOLE, "unbind and bind"), (WORMHOLE, "")])
def test_a_blackhole_that_resets_is_told_the_remedy_of_lost_telemetry(
    function: PciFunction, advice: str
) -> None:
    """On Blackhole ENODATA can stay for good, until the driver is bound anew."""
    patient = Patient()
    patient.circumstances["function"] = function
    patient.look(error=("tt_heartbeat", errno.ENODATA))
    assert advice in patient.reason and ("bind" in patient.reason) is bool(advice)


def test_a_read_that_does_not_return_is_a_fault_until_it_does() -> None:
    """The look after it is judged like any other."""
    patient = Patient(heartbeat_misses=1)
    patient.look(heartbeat=7)
    patient.health = ttdp.unhealthy(patient.health, Fault.BLOCKED, ttdp.BLOCKED)
    assert patient.look(heartbeat=8) is None


def test_a_wrong_node_outweighs_all_that_the_chip_says() -> None:
    """A container could not use it, however well the chip is."""
    patient = Patient()
    wrong = BLACKHOLE._replace(node_fault="/dev/tenstorrent/0: No such file or directory")
    patient.circumstances["function"] = wrong
    assert patient.look(heartbeat=7) is Fault.NODE
    assert "/dev/tenstorrent/0: No such file" in patient.reason


def test_gone_tells_whether_the_card_or_the_driver_went() -> None:
    """A function that is still on the bus wants to be bound; the command holds its address."""
    away = ttdp.gone(Health(), BDF, on_bus=False)
    unbound = ttdp.gone(Health(), BDF, on_bus=True)
    assert away.fault is unbound.fault is Fault.GONE
    assert "PCI device is gone" in str(away.reason)
    assert f"echo {BDF} > /sys/bus/pci/drivers/tenstorrent/bind" in str(unbound.reason)


# -- silence ---------------------------------------------------------------------------------------


def test_silence_of_a_chip_that_has_never_spoken_is_no_fault() -> None:
    """Firmware that is late: healthy for ever as long as nothing contradicts it."""
    patient = Patient(heartbeat_misses=1)
    assert not any(patient.look(after=PATIENCE) for _ in range(5))


def test_a_chip_that_spoke_and_was_bound_anew_has_ten_seconds_to_speak() -> None:
    """Its attributes went with the driver; firmware that is well needs less to offer them again."""
    patient = Patient()
    patient.look(heartbeat=7)
    patient.circumstances["has_spoken"] = True
    assert patient.look() is None
    assert patient.look(after=PATIENCE - 0.1) is None
    assert patient.look(after=0.1) is Fault.SILENT
    assert patient.look(after=1000) is Fault.SILENT
    assert patient.look(heartbeat=3) is None
    assert patient.look() is None, "the time counts from the new silence"


@pytest.mark.parametrize("all_ones", [False, True])
def test_what_was_gone_is_not_healthy_again_before_it_speaks(all_ones: bool) -> None:
    """Bound anew with dead registers it offers nothing; its fault stays until it is another."""
    patient = Patient()
    patient.circumstances["has_spoken"] = True
    patient.health = ttdp.gone(patient.health, BDF, on_bus=True)
    assert patient.look() is Fault.GONE and "has not spoken yet" in patient.reason
    assert patient.look(after=PATIENCE) is Fault.SILENT
    if all_ones:
        assert patient.look(all_ones=True, off_bus=True) is Fault.NO_RESPONSE
    assert patient.look(heartbeat=3) is None


# -- remedies --------------------------------------------------------------------------------------

SICK: dict[Fault, list[dict[str, Any]]] = {
    Fault.STALLED: [{"heartbeat": 7}] * 2,
    Fault.NO_RESPONSE: [{"all_ones": True}],
    Fault.SILENT: [{}, {"after": PATIENCE}],
}


@pytest.mark.parametrize("fault", SICK)
@pytest.mark.parametrize("mates", [(), ("0000:04:00.0",)])
def test_a_remedy_names_its_chip_and_what_else_it_resets(fault: Fault, mates: Any) -> None:
    """`tt-smi -r` without an address resets every card; of a p300, its board's other chip, too."""
    patient = Patient(heartbeat_misses=1)
    patient.circumstances |= {"mates": mates, "has_spoken": True}
    faults = [patient.look(**look) for look in SICK[fault]]
    assert faults[-1] is fault
    remedy = "tt-smi -r 0000:05:00.0"
    more = " (that resets 0000:04:00.0 of its board, too)" if mates else ""
    assert patient.reason.endswith(f"reset it: {remedy}{more}")


def test_the_bus_tells_a_chip_that_left_it_from_one_whose_registers_are_dead() -> None:
    """Both do not respond; the reason says what was read."""
    words = {True: "PCI configuration space", False: "all registers"}
    for off_bus, what in words.items():
        patient = Patient()
        assert patient.look(all_ones=True, off_bus=off_bus) is Fault.NO_RESPONSE
        assert what in patient.reason


# -- whatever befalls a chip -----------------------------------------------------------------------

faulty = st.sampled_from(
    [
        {"error": ("tt_heartbeat", errno.ENODATA)},
        {"error": ("tt_heartbeat", errno.EIO)},
        {"all_ones": True},
        {"heartbeat": 5},
        {"temperature": 99.0, "throttles_at": 90.0},
        {"trips": 9},
        {},
    ]
)


@hypothesis_settings(deadline=None)
@given(st.lists(st.tuples(faulty, st.booleans(), st.sampled_from([0.1, 20.0])), max_size=8))
def test_whatever_befell_a_chip_it_recovers_by_itself(
    course: list[tuple[dict[str, Any], bool, float]],
) -> None:
    """After any faults in any order, a chip that is well for as long as the holdoff is healthy."""
    patient = Patient(temperature_limit=90, heartbeat_misses=1, trip_holdoff=60)
    patient.circumstances["has_spoken"] = True
    for telemetry, periodic, after in course:
        patient.look(periodic=periodic, after=after, **telemetry)
    patient.look(heartbeat=100, temperature=40.0, throttles_at=90.0, trips=9)
    well: dict[str, Any] = {"temperature": 40.0, "throttles_at": 90.0, "trips": 9}
    assert patient.look(after=60, heartbeat=101, **well) is None


# -- the log ---------------------------------------------------------------------------------------


class Watched:
    """A fleet that is looked at by hand, and what the log says of its health."""

    def __init__(self, node: SimulatedNode, caplog: pytest.LogCaptureFixture, **rules: Any) -> None:
        self.fleet = Fleet({}, [])
        self.settings = settings_of(node, node.root / "plugins", health=rules)
        self.now = 0.0
        self._caplog = caplog
        caplog.set_level("INFO")

    def look(self, after: float = 1) -> None:
        """A poll, in which every chip answers."""
        self.now += after
        self.observe()
        present = [chip.function for chip in self.fleet.chips.values() if chip.present]
        with kernel_errors():
            readings = [Reading(each, ttdp.read_telemetry(each), True, None) for each in present]
        self.fleet.learn(readings, self.settings.health, self.now)

    def observe(self) -> None:
        self.fleet.observe(self.settings)

    def health(self, chip: Chip) -> Health:
        return self.fleet.chips[chip.bdf].health

    def lines(self) -> list[str]:
        """What was logged since the last call, but for introductions: level and message."""
        said = [f"{r.levelname} {r.message}" for r in self._caplog.records]
        self._caplog.clear()
        return [line for line in said if "/dev/tenstorrent/" not in line]


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    return node.add("p150a")[0]


@pytest.fixture
def watched(node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture) -> Watched:
    """A fleet of the one chip, which has answered once."""
    watched = Watched(node, caplog, temperature_limit=95, heartbeat_misses=2)
    watched.look()
    return watched


def test_each_kind_of_fault_is_one_line_however_long_it_lasts(watched: Watched, chip: Chip) -> None:
    """Healthy, hot for a while, dead for a while, healthy: a line each, the last no warning."""
    assert watched.lines() == []
    for celsius in (96, 97, 98):  # figures in the reason change, its kind does not
        chip.heat(celsius)
        chip.beat()
        watched.look()
    (hot,) = watched.lines()
    assert hot.startswith(f"WARNING {chip.bdf} (p150a): unhealthy: too hot: 96.0")
    chip.die()
    watched.look()
    watched.look()
    (dead,) = watched.lines()
    assert dead.startswith(f"WARNING {chip.bdf} (p150a): unhealthy: chip does not respond")
    chip.revive()
    chip.heat(40)
    watched.look()
    watched.look()
    assert f"INFO {chip.bdf} (p150a): healthy again" in watched.lines()


def test_throttling_and_being_cool_again_are_a_line_each_and_no_fault(
    watched: Watched, chip: Chip
) -> None:
    """The card's own limit is 90 °C; the operator's is 95 °C."""
    for celsius in (89.9, 90, 92, 86, 90, 84, 84):
        chip.heat(celsius)
        chip.beat()
        watched.look()
        assert watched.health(chip).fault is None
    assert watched.lines() == [
        f"INFO {chip.bdf} (p150a): has reached 90 °C and throttles",
        f"INFO {chip.bdf} (p150a): is cool again",
    ]


def test_the_return_of_a_chip_that_went_waits_for_its_word(watched: Watched, chip: Chip) -> None:
    """Gone is one line and keeps its identity; back on the bus it is unhealthy until it is read."""
    known = watched.fleet.chips[chip.bdf].identity
    chip.unbind()
    watched.look()
    watched.look()
    gone = watched.fleet.chips[chip.bdf]
    assert (gone.present, gone.health.fault, gone.identity) == (False, Fault.GONE, known)
    assert "driver is not bound" in str(gone.health.reason) and len(watched.lines()) == 1
    chip.vanish()
    watched.observe()
    assert "PCI device is gone" in str(watched.health(chip).reason) and watched.lines() == []
    chip.come_back()
    watched.observe()
    assert watched.health(chip).fault is Fault.GONE and watched.lines() == []
    watched.look()
    assert watched.health(chip).fault is None
    assert watched.lines() == [f"INFO {chip.bdf} (p150a): healthy again"]


def test_a_chip_that_is_bound_anew_and_silent_is_not_healthy_again(
    watched: Watched, chip: Chip
) -> None:
    """Dead registers at the probe look like late firmware, but this chip has spoken."""
    chip.unbind()
    watched.look()
    chip.die()
    chip.bind()
    watched.look()
    watched.look(after=PATIENCE)
    assert watched.health(chip).fault is Fault.SILENT
    said = [line.partition("unhealthy: ")[2].split(";")[0] for line in watched.lines()]
    assert said == ["driver is not bound", "firmware is silent since the driver was bound anew"]
    chip.revive()
    chip.rebind()
    watched.look()
    assert watched.lines() == [f"INFO {chip.bdf} (p150a): healthy again"]


def test_a_p300s_remedy_names_its_other_chip(
    node: SimulatedNode, caplog: pytest.LogCaptureFixture
) -> None:
    """Which a reset concerns, too; the other board and a card of one chip are left alone."""
    first, mate, *_ = node.add("p300c") + node.add("p300c") + node.add("p150a")
    watched = Watched(node, caplog)
    watched.look()
    for chip in node.chips:
        chip.die()
    watched.look()
    resets = [str(watched.health(chip).reason).partition("tt-smi -r ")[2] for chip in node.chips]
    assert resets[0] == f"{first.bdf} (that resets {mate.bdf} of its board, too)"
    assert resets[4] == node.chips[4].bdf


def test_a_read_under_way_is_a_fault_from_its_deadline_on(
    node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    """At two seconds it still may answer; past them it is a fault, with one line, until it does."""
    watched = Watched(node, caplog)
    watched.observe()
    faults = []
    for seconds in (0.05, 2.0, 2.01, 9.0):
        watched.fleet.give_up_waiting({chip.bdf: seconds}.__getitem__)
        faults.append(watched.health(chip).fault)
    assert faults == [None, None, Fault.BLOCKED, Fault.BLOCKED] and len(watched.lines()) == 1
    watched.look()
    assert watched.health(chip).fault is None


def test_a_new_chip_is_listed_when_it_spoke_or_had_the_time_to(
    node: SimulatedNode, chip: Chip, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at once, so that its first list has its identity; after a tenth of a second without."""
    watched = Watched(node, caplog)
    watched.observe()
    listed = []
    for seconds in (0.0, 0.05, 0.2):
        watched.fleet.give_up_waiting({chip.bdf: seconds}.__getitem__)
        listed.append(watched.fleet.chips[chip.bdf].listed)
    assert listed == [False, False, True]
