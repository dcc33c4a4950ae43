"""Health: each rule on its own, with a clock that the test holds, and its log lines."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import allocation, bdf, chip, decide
from ttdp import (
    Fault,
    FileFault,
    HealthSettings,
    Inventory,
    PciFunction,
    ReadError,
    Reading,
    Telemetry,
    Verdict,
    Vitals,
)

TIMEOUT = ttdp.FIRMWARE_TIMEOUT
FUNCTION = PciFunction("0000:05:00.0", "blackhole")


class Judged:
    """A chip that is judged: each reading is one second after the last unless told."""

    def __init__(self, **rules: Any) -> None:
        self.rules = HealthSettings(**rules)
        self.verdict = Verdict()
        self.vitals = Vitals()
        self.now = 1000.0
        self.had_telemetry = False

    def read(self, *, after: float = 1, is_poll: bool = True, **telemetry: Any) -> Fault | None:
        """Return the fault after a reading: of a poll, unless an event caused it."""
        self.now += after
        self.verdict, self.vitals = ttdp.judge(
            Reading(FUNCTION, Telemetry(**telemetry), self.now, is_poll),
            verdict=self.verdict,
            vitals=self.vitals,
            settings=self.rules,
            had_telemetry=self.had_telemetry,
        )
        assert (self.verdict.problem is None) == (self.verdict.fault is None)
        return self.verdict.fault

    @property
    def problem(self) -> str:
        return str(self.verdict.problem)


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
        (1, "0 0", ".S"),
        (1, "4294967295 4294967295", ".S"),
        (1, "- - - 7 - - -", "......."),
    ],
    ids=[
        "of one", "of two", "of five", "a change starts the count again",
        "readings by events do not count", "nor does the next poll compare with them",
        "also if the first reading is one",
        "zero is a count", "all ones are one", "not offered",
    ],
)  # fmt: skip
def test_a_heartbeat_has_stalled_at_the_nth_poll_without_a_change(
    misses: int, beats: str, faults: str
) -> None:
    """Not a poll earlier or later. "e7" is read by an event, "-" is not offered."""
    judged = Judged(heartbeat_misses=misses)
    found = ""
    for beat in beats.split():
        heartbeat = ttdp.to_integer(beat.strip("e-"))
        fault = judged.read(heartbeat=heartbeat, temperature=40.0, is_poll=beat[0] != "e")
        found += {None: ".", Fault.STALLED: "S"}[fault]
        assert not fault or f"stalled at {heartbeat}" in judged.problem
    assert found == faults


@pytest.mark.parametrize("later", [8, 6, 0, 4294967294])
@pytest.mark.parametrize("is_poll", [True, False])
def test_any_change_shows_life(later: int, is_poll: bool) -> None:
    """Up, down, wrapped: a reset restarts the count. An event can show it, too."""
    judged = Judged(heartbeat_misses=1)
    assert [judged.read(heartbeat=beat) for beat in (7, 7)] == [None, Fault.STALLED]
    assert judged.read(heartbeat=later, is_poll=is_poll) is None


@pytest.mark.parametrize(
    "between", [{"error": ReadError("tt_serial", errno.EIO)}, {"all_ones": True}]
)
def test_another_fault_does_not_end_a_stall(between: dict[str, Any]) -> None:
    """The same heartbeat before and after: the chip is not healthy for a moment."""
    judged = Judged(heartbeat_misses=2)
    for _ in range(3):
        judged.read(heartbeat=7)
    judged.read(**between)
    assert judged.read(heartbeat=7) is Fault.STALLED


# -- temperature and thermal trips -----------------------------------------------------------------


@pytest.mark.parametrize(("limit", "own"), [(90, None), (90, 75.0), (90, 100.0), ("card", 90.0)])
def test_hot_from_the_operators_limit_and_cool_from_five_degrees_below(
    limit: float | str, own: float | None
) -> None:
    """To the thousandth; the card's own limit counts only as "card"."""
    judged = Judged(temperature_limit=limit)
    course = {
        89.999: None, 90.0: Fault.HOT, 85.001: Fault.HOT, 89.0: Fault.HOT, 85.0: None,
        89.998: None, 91.5: Fault.HOT, 20.0: None,
    }  # fmt: skip
    for celsius, fault in course.items():
        assert judged.read(temperature=celsius, throttles_at=own) is fault, celsius
        if fault:
            assert f"{celsius:.1f} °C, limit 90 °C" in judged.problem


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
    judged = Judged(temperature_limit=limit)
    judged.read(temperature=95.0, throttles_at=90.0)
    assert judged.read(**telemetry) is None


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
    ids=["holdoff", "again", "history", "cleared", "cleared during it", "not offered for a while"],
)
def test_a_trip_lasts_from_the_rise_until_the_holdoff_is_over(
    course: list[tuple[int | None, float]], faults: str
) -> None:
    """Trips before the start are history; a reset clears the counter and nothing else."""
    judged = Judged(trip_holdoff=300)
    found = [judged.read(trips=trips, after=after) for trips, after in course]
    assert found == [Fault.TRIPPED if letter == "T" else None for letter in faults]


def test_without_holdoff_a_trip_is_not_a_fault() -> None:
    """`trip_holdoff = 0`."""
    judged = Judged(trip_holdoff=0)
    assert [judged.read(trips=trips) for trips in (0, 1)] == [None, None]


# -- reads that fail, telemetry that is missing ----------------------------------------------------


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
def test_the_errno_decides_the_kind_of_fault(number: int, fault: Fault) -> None:
    """A reset, a removal; any other error is reported with its attribute."""
    judged = Judged()
    assert judged.read(error=ReadError("tt_serial", number)) is fault
    words = ("tt_serial", os.strerror(number)) if fault is Fault.READ_ERROR else ()
    assert all(word in judged.problem for word in words)


def test_late_firmware_is_not_a_fault() -> None:
    """A chip that never had telemetry is healthy as long as nothing contradicts it."""
    judged = Judged(heartbeat_misses=1)
    assert not any(judged.read(after=TIMEOUT) for _ in range(5))


def test_a_rebound_chip_has_ten_seconds_for_its_telemetry() -> None:
    """Its health does not change meanwhile: healthy, or whatever it was."""
    judged = Judged()
    judged.read(heartbeat=7)
    judged.had_telemetry = True
    assert judged.read() is None
    assert judged.read(after=TIMEOUT - 0.1) is None
    assert judged.read(after=0.1) is Fault.SILENT
    assert judged.read(after=1000) is Fault.SILENT
    assert judged.read(heartbeat=3) is None
    assert judged.read() is None, "the ten seconds begin again"
    judged.verdict = Verdict(Fault.GONE, "gone")
    assert judged.read() is Fault.GONE
    assert judged.read(all_ones=True) is Fault.NO_RESPONSE
    assert judged.read(heartbeat=4) is None


faulty = st.sampled_from(
    [
        {"error": ReadError("tt_heartbeat", errno.ENODATA)},
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
    judged = Judged(temperature_limit=90, heartbeat_misses=1, trip_holdoff=60)
    judged.had_telemetry = True
    for telemetry, is_poll, after in course:
        judged.read(is_poll=is_poll, after=after, **telemetry)
    well: dict[str, Any] = {"temperature": 40.0, "throttles_at": 90.0, "trips": 9}
    judged.read(heartbeat=100, **well)
    assert judged.read(after=60, heartbeat=101, **well) is None


# -- reasons and remedies --------------------------------------------------------------------------


def reason(found: ttdp.Chip, *others: ttdp.Chip, **more: Any) -> str:
    return str(decide([found, *others], **more).chips[found.bdf].reason)


RESET = "tt-smi -r 0000:01:00.0"


@pytest.mark.parametrize("fault", [Fault.STALLED, Fault.NO_RESPONSE, Fault.SILENT])
def test_a_remedy_names_its_chip_and_all_that_it_affects(fault: Fault) -> None:
    """`tt-smi -r` without an address resets every card; of a p300, also the board's other chip."""
    assert reason(chip(1, fault=fault)) == f"it is ill; run: {RESET}"
    held = [allocation("p300", bdf(1), buses=[1])]
    effect = "a reset interrupts default/train"
    assert reason(chip(1, fault=fault), allocations=held) == f"it is ill; {effect}; run: {RESET}"

    pair = [chip(1, "p300c", fault=fault, serial="S"), chip(2, "p300c", serial="S")]
    effect = "a reset resets 0000:02:00.0 on the same board"
    assert reason(*pair) == f"it is ill; {effect}; run: {RESET}"
    held = [allocation("p300", bdf(2), buses=[2])]
    effect += " and interrupts default/train"
    assert reason(*pair, allocations=held) == f"it is ill; {effect}; run: {RESET}"


def test_rebinding_concerns_a_chip_alone() -> None:
    """It resets neither the board's other chip nor the pod on that one."""
    pair = [chip(1, "p300c", fault=Fault.RESETTING, serial="S"), chip(2, "p300c", serial="S")]
    held = [allocation("p300", bdf(2), buses=[2])]
    assert reason(*pair, allocations=held) == (
        "it is ill; if this persists, run: cd /sys/bus/pci/drivers/tenstorrent"
        " && echo 0000:01:00.0 > unbind && echo 0000:01:00.0 > bind"
    )


def test_the_pod_is_named_if_the_remedy_stops_its_programs() -> None:
    """A reset, or a rebinding. Each remedy comes last, for pasting."""
    held = [allocation("n150", bdf(1), buses=[1])]
    for fault in Fault:
        found = chip(1, fault=fault)
        text = reason(found, allocations=held)
        remedy = ttdp.REMEDIES.get(fault)
        assert "default/train" not in reason(found)
        assert ("interrupts default/train" in text) is (remedy is not None), fault
        if remedy is None:
            assert text == "it is ill"
        else:
            assert text.endswith(f"run: {remedy.command.replace('{bdf}', found.bdf)}")


@pytest.mark.parametrize("fault", [Fault.STALLED, Fault.BLOCKED, Fault.NO_RESPONSE])
def test_a_reset_is_a_reboot_on_arm64(fault: Fault) -> None:
    """tt-smi cannot reset a card there; a reboot concerns every pod of the node."""
    found = chip(1, fault=fault)
    text = "it is ill; drain this node, then run: systemctl reboot"
    assert reason(found, machine="aarch64") == text
    rebind = reason(chip(1, fault=Fault.RESETTING), machine="aarch64")
    assert rebind.endswith("> bind")


BIND = "echo 0000:01:00.0 > /sys/bus/pci/drivers/tenstorrent/bind"
ABSENT: Mapping[str, tuple[dict[str, Any], str | None, str]] = {
    "not loaded": ({}, None, "driver is not loaded; run: modprobe tenstorrent"),
    "not bound": ({}, "2.10", f"driver is not bound; run: {BIND}"),
    "another's": (
        {"driver": "vfio-pci"},
        "2.10",
        "driver vfio-pci is bound, not tenstorrent; run: "
        f"echo 0000:01:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind && {BIND}",
    ),
    "another's, not loaded": (
        {"driver": "vfio-pci"},
        None,
        "driver vfio-pci is bound, not tenstorrent; run: modprobe tenstorrent && "
        f"echo 0000:01:00.0 > /sys/bus/pci/drivers/vfio-pci/unbind && {BIND}",
    ),
    "bound": (
        {"driver": "tenstorrent"}, "2.10", "driver is bound; waiting for a device file"
    ),
    "not on the bus": (
        {"on_bus": False},
        "2.10",
        "PCI device is gone (power-cycle the host if a rescan does not find it); "
        "run: echo 1 > /sys/bus/pci/rescan",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ABSENT)
def test_an_absent_chip_has_the_remedy_of_its_cause(case: str) -> None:
    """No driver, not bound, another driver's, or not on the bus."""
    state, version, text = ABSENT[case]
    found = chip(1)
    function = found.function.without_device_file()._replace(**state)
    assert reason(found._replace(function=function), driver=version) == text


@pytest.mark.parametrize("command", ["rm /dev/tenstorrent/0 && mknod …", ""])
def test_an_invalid_device_file_outweighs_telemetry(command: str) -> None:
    """No container could use the chip. Its remedy is the file's, if it has one."""
    found = chip(1, fault=Fault.STALLED)
    fault = FileFault("/dev/tenstorrent/0 is not a character device", command)
    found = found._replace(function=found.function._replace(file_fault=fault))
    text = f"device file is invalid: {fault.problem}"
    assert reason(found) == (f"{text}; run: {command}" if command else text)


# -- the log ---------------------------------------------------------------------------------------


def lines(before: list[ttdp.Chip], after: list[ttdp.Chip], **more: Any) -> list[str]:
    """Return the log lines of a change."""
    found = ttdp.changes(decide(before, **more), decide(after, **more))
    return [f"{'WARNING' if level > 20 else 'INFO'} {line}" for level, line in found]


def ill(fault: Fault, problem: str) -> ttdp.Chip:
    return chip(1)._replace(verdict=Verdict(fault, problem))


def test_each_kind_of_fault_is_one_line() -> None:
    """New numbers in a reason are not logged."""
    hot, hotter = (ill(Fault.HOT, f"too hot: {celsius} °C") for celsius in (96, 97))
    dead = ill(Fault.NO_RESPONSE, "chip does not respond")
    first = f"WARNING {bdf(1)} (n150): unhealthy: too hot: 96 °C"
    assert lines([chip(1)], [hot]) == [first]
    assert lines([hot], [hotter]) == []
    assert len(lines([hotter], [dead])) == 1
    assert lines([dead], [chip(1)]) == [f"INFO {bdf(1)} (n150): healthy again"]


class Followed:
    """One chip as the daemon follows it: each step returns the log lines about throttling."""

    def __init__(self, **rules: Any) -> None:
        self.rules = HealthSettings(**rules)
        self.function = chip(1).function
        self.record = ttdp.ChipRecord(chip(1))
        self.inventory = Inventory({bdf(1): self.record})
        self.now = 1000.0

    @property
    def fault(self) -> Fault | None:
        return self.record.chip.fault

    def _step(self, change: Callable[[], object]) -> list[str]:
        before = self.record.chip
        change()
        label = f"INFO {bdf(1)} (n150): "
        found = lines([before], [self.record.chip])
        return [line.removeprefix(label) for line in found if "throttl" in line]

    def read(self, **telemetry: Any) -> list[str]:
        self.now += 1
        reading = Reading(self.function, Telemetry(**telemetry), self.now)
        return self._step(lambda: self.inventory.apply([reading], self.rules))

    def vanish(self) -> list[str]:
        gone = self.function.without_device_file()._replace(on_bus=False)
        return self._step(lambda: self.record.vanish(gone))

    def come_back(self) -> list[str]:
        return self._step(lambda: self.record.appear(self.function))


THROTTLES = "throttling: it has reached its temperature limit"
NO_LONGER = "no longer throttling"


def test_throttling_is_one_line_and_not_a_fault() -> None:
    """Its end is another one, five degrees below."""
    followed = Followed()
    course = {89.9: [], 90.0: [THROTTLES], 92.0: [], 85.1: [], 85.0: [NO_LONGER], 89.8: []}
    for celsius, texts in course.items():
        assert followed.read(temperature=celsius, throttles_at=90.0) == texts, celsius
        assert followed.fault is None


@pytest.mark.parametrize(
    "end",
    [
        lambda chip: chip.read(all_ones=True),
        lambda chip: chip.read(error=ReadError("tt_heartbeat", errno.ENODATA)),
        lambda chip: chip.read(error=ReadError("temp1_input", errno.EIO)),
        lambda chip: chip.read(),
        lambda chip: [*chip.vanish(), *chip.come_back(), *chip.read()],
    ],
    ids=["dead", "resetting", "unreadable", "silent", "vanished"],
)
def test_a_chip_that_shows_no_temperature_has_not_cooled_down(
    end: Callable[[Followed], list[str]],
) -> None:
    """Neither a line nor the end of the hysteresis, of throttling and of heat alike."""
    followed = Followed(temperature_limit=88)
    assert followed.read(temperature=90.0, throttles_at=90.0) == [THROTTLES]
    assert followed.fault is Fault.HOT
    for _ in range(2):
        assert end(followed) == []
    assert followed.read(temperature=86.0, throttles_at=90.0) == []
    assert followed.fault is Fault.HOT
    assert followed.read(temperature=82.9, throttles_at=90.0) == [NO_LONGER]
    assert followed.fault is None


def test_a_chip_is_introduced_once_more_when_its_firmware_reports_its_identity() -> None:
    """Its device file first, then its serial."""
    known = chip(1, serial="A" * 16)
    assert lines([], [chip(1)]) == [f"INFO {bdf(1)} (n150): found /dev/tenstorrent/0"]
    text = f"INFO {bdf(1)} (n150): found /dev/tenstorrent/0, board {'A' * 16}"
    assert lines([chip(1)], [known]) == [text]
    assert lines([known], [known]) == []
