"""Readers: threads that read chips, also if reads block or no thread can be started."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import ttdp
from tests.conftest import WATCHDOG, StartDaemon, no_descriptors
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import kernel_errors, settings_of
from ttdp import Inventory, Kind, PciFunction, Reading, ReadState, Telemetry, TelemetryReaders


def function(bus: int) -> PciFunction:
    return PciFunction(f"0000:{bus:02x}:00.0", "wormhole", ordinal=bus, path=f"/dev/{bus}")


ONE, TWO, THREE = (function(bus) for bus in (1, 2, 3))


class Chips:
    """Chips that answer at once unless they are held or have an error."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.readings: list[Reading] = []
        self.errors: dict[str, Exception] = {}
        self.read_twice_at_once: list[str] = []
        self.wakes: list[list[ReadState]] = []  # the states of reads whenever the loop was woken
        self._held: dict[str, threading.Event] = {}
        self._busy: set[str] = set()
        self.readers = TelemetryReaders(self._wake, self._read)

    def _wake(self) -> None:
        self.wakes.append([*self.states().values()])

    def _read(self, function: PciFunction, *, is_poll: bool, settings: object) -> Reading:
        if function.bdf in self._busy:
            self.read_twice_at_once.append(function.bdf)
        self._busy.add(function.bdf)
        self.reads.append(function.bdf)
        if gate := self._held.get(function.bdf):
            gate.wait(4 * PATIENCE)  # longer than any test waits

        self._busy.discard(function.bdf)
        if error := self.errors.get(function.bdf):
            raise error
        return Reading(function, Telemetry(), time.monotonic(), is_poll)

    def hold(self, *functions: PciFunction) -> None:
        for each in functions:
            self._held[each.bdf] = threading.Event()

    def release(self) -> None:
        while self._held:
            self._held.popitem()[1].set()

    def submit(self, *functions: PciFunction, is_poll: bool = False) -> None:
        self.readers.submit(functions, is_poll=is_poll)

    def answered(self) -> list[str]:
        """Collect, and return the chips that have answered so far."""
        self.readings += self.readers.collect()
        return [reading.function.bdf for reading in self.readings]

    def states(self) -> dict[str, ReadState]:
        return self.readers.under_way(time.monotonic())

    def failure(self) -> OSError | None:
        """Collect, and return the error that this raises."""
        try:
            self.answered()
        except OSError as error:
            return error
        return None


@pytest.fixture
async def chips() -> AsyncIterator[Chips]:
    """No test has two threads read one chip at once."""
    chips = Chips()
    yield chips

    chips.release()
    assert chips.read_twice_at_once == []


# -- threads ---------------------------------------------------------------------------------------


async def test_chips_that_answer_are_read_in_turn_on_one_thread_that_ends(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chip that is submitted during its read is not read after it: it would seem to stall."""
    started = []
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        genuine(thread)

    monkeypatch.setattr("threading.Thread.start", start)
    monkeypatch.setattr(ttdp, "SLOW_AFTER", PATIENCE)
    threads = _thread._count()
    chips.hold(ONE)

    chips.submit(ONE, TWO, THREE)
    await until(lambda: chips.reads)
    chips.submit(THREE, TWO, ONE)
    chips.release()
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf, THREE.bdf])

    await until(lambda: _thread._count() <= threads)
    assert len(started) == 1
    assert chips.reads == [ONE.bdf, TWO.bdf, THREE.bdf]
    assert chips.readers.is_settled(time.monotonic())


async def test_thirty_one_blocked_reads_keep_thirty_one_threads(chips: Chips) -> None:
    """Polls do not start more of them, and delay no other chip: the last one is read at each."""
    threads = _thread._count()
    stuck = [function(bus) for bus in range(1, 32)]
    sound = function(32)
    chips.hold(*stuck)

    for number in range(1, 4):
        chips.submit(*stuck, sound, is_poll=True)
        await until(lambda: chips.answered() == [sound.bdf] * number)  # noqa: B023

    await until(lambda: _thread._count() <= threads + len(stuck))
    assert len(chips.reads) == len(stuck) + 3
    chips.release()
    await until(lambda: len(chips.answered()) == len(stuck) + 3 and not chips.states())
    await until(lambda: _thread._count() <= threads)


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("reads_time_out")
async def test_a_read_is_slow_after_a_tenth_of_a_second_and_blocked_after_two(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each state has its consequence: see is_settled() and is_over()."""
    since = 1000.0
    monkeypatch.setattr(ttdp, "monotonic", lambda: since)
    readers = chips.readers
    chips.hold(ONE)
    chips.submit(ONE)
    await until(lambda: chips.reads)

    looks = [
        (readers.under_way(at)[ONE.bdf], readers.is_settled(at), readers.is_over(at))
        for at in (since, since + 0.1, since + 2.0)
    ]

    assert looks == [
        (ReadState.RUNNING, False, False),
        (ReadState.SLOW, True, False),
        (ReadState.BLOCKED, True, True),
    ]


async def test_a_chip_behind_a_blocked_one_is_not_late(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a read begins with it: the clock goes on by a second when a thread is started."""
    now = 1000.0
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        nonlocal now
        now += 1.0
        genuine(thread)

    monkeypatch.setattr("threading.Thread.start", start)
    monkeypatch.setattr(ttdp, "monotonic", lambda: now)
    chips.hold(ONE, TWO)

    chips.submit(ONE, TWO)
    await until(lambda: TWO.bdf in chips.reads)

    states = chips.readers.under_way(1000.0 + ttdp.READ_TIMEOUT)
    assert states[ONE.bdf] is ReadState.BLOCKED
    assert states[TWO.bdf] is not ReadState.BLOCKED


async def test_the_loop_is_woken_when_a_read_is_slow_when_it_is_blocked_and_when_it_ends(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that ends at once wakes it at its end only."""
    monkeypatch.setattr(ttdp, "SLOW_AFTER", 0.5)
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", 1.0)
    chips.hold(TWO)

    chips.submit(ONE)
    await until(lambda: chips.wakes)
    assert chips.answered() == [ONE.bdf]

    chips.submit(TWO)
    await until(lambda: len(chips.wakes) == 3)
    chips.release()
    await until(lambda: len(chips.wakes) == 4)

    first, *others = chips.wakes
    assert first == [ReadState.RUNNING]
    assert others == [[ReadState.SLOW], [ReadState.BLOCKED], [ReadState.BLOCKED]]


@pytest.mark.usefixtures("reads_time_out")
async def test_a_blocked_read_costs_a_handful_of_turns(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """The loop is not woken every tenth of a second until the read counts as blocked."""
    blocked, other = node.add("n150") + node.add("n150")
    daemon = await start(WATCHDOG, interval=3600)
    await daemon.ready()
    blocked.block()
    daemon.forget_notes()

    other.vanish()
    await daemon.sees(blocked.bdf, Kind.BLOCKED)

    assert daemon.notes.count("WATCHDOG=1") < 12, "each turn feeds the watchdog"


async def test_a_chip_that_has_an_event_during_a_slow_read_is_read_again(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read began before the event: its values can be those of before, as late firmware's."""
    (chip,) = node.add("n150")
    chip.silence()
    goes_on = threading.Event()
    genuine = ttdp.read_telemetry

    def read_and_wait(function: PciFunction) -> Telemetry:
        telemetry = genuine(function)
        goes_on.wait(PATIENCE)
        return telemetry

    monkeypatch.setattr(ttdp, "read_telemetry", read_and_wait)
    daemon = await start(interval=3600, metrics_file="")
    await daemon.ready()

    before = daemon.host.scanned_at
    chip.speak()
    await until(lambda: daemon.host.scanned_at > before)
    goes_on.set()

    await until(lambda: daemon.chip(chip.bdf).identity.serial)


async def test_metrics_wait_for_a_slow_read_and_have_the_sensors_of_its_chip(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for during the read that an event has caused; no other event follows."""
    _, other = node.add("p150a") + node.add("n150")
    began, goes_on = threading.Event(), threading.Event()
    genuine = ttdp.read_telemetry

    def read_and_wait(function: PciFunction) -> Telemetry:
        began.set()
        goes_on.wait(PATIENCE)
        return genuine(function)

    daemon = await start(interval=3600, metrics_file="")
    await daemon.ready()
    monkeypatch.setattr(ttdp, "read_telemetry", read_and_wait)
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", PATIENCE)

    other.vanish()
    await until(began.is_set)
    metrics = asyncio.create_task(daemon.metrics())
    await asyncio.sleep(2 * ttdp.SLOW_AFTER)
    assert not metrics.done()
    goes_on.set()

    assert "tt_device_power_watts{" in (await metrics or "")


# -- errors that are not a chip's ------------------------------------------------------------------


@pytest.fixture
async def unhandled() -> AsyncIterator[list[str]]:
    """No exception has left a callback of the loop."""
    found: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(str(context)))
    yield found

    assert found == []


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.usefixtures("unhandled")
async def test_without_threads_the_daemon_itself_has_an_error(
    chips: Chips, monkeypatch: pytest.MonkeyPatch, error: Exception, is_behind: bool
) -> None:
    """Also of a chip behind a slow read. It is read when there are threads again."""
    available = [1] if is_behind else []
    genuine = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if not available:
            raise error
        available.pop()
        genuine(thread)

    chips.hold(ONE)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", start)
        chips.submit(ONE, TWO)
        failure = await until(chips.failure)

    assert chips.wakes
    assert (failure.errno, failure.strerror) == (errno.EAGAIN, str(error))
    assert chips.states().keys() == ({ONE.bdf} if is_behind else set())
    chips.release()
    chips.submit(ONE, TWO)
    await until(lambda: sorted(chips.answered()) == [ONE.bdf, TWO.bdf])


async def test_an_internal_error_in_a_read_concerns_this_read_only(
    chips: Chips, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the others are read, and the chip is at the next poll."""
    chips.errors[ONE.bdf] = ZeroDivisionError()
    chips.submit(ONE, TWO)
    await until(lambda: chips.answered() == [TWO.bdf] and not chips.states())
    assert "internal error (reading 0000:01:00.0)" in caplog.text

    chips.errors.clear()
    chips.submit(ONE, TWO)
    await until(lambda: chips.answered() == [TWO.bdf, ONE.bdf, TWO.bdf])


async def test_without_descriptors_there_are_no_metrics_and_soon_new_ones(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensors of before would pass for new ones; they are not what the next scrape gets, either."""
    node.add("p150a")
    daemon = await start(interval=3600, metrics_file="")
    await daemon.ready()

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", no_descriptors)
        assert await daemon.metrics() is None

    assert "tt_device_power_watts{" in (await daemon.metrics() or "")


async def test_the_daemons_own_error_is_raised_once(chips: Chips) -> None:
    """Without descriptors no chip is judged by this read, and each can be read again."""
    for each in (ONE, TWO):
        chips.errors[each.bdf] = OSError(errno.EMFILE, "Too many open files")

    chips.submit(ONE, TWO)
    failure = await until(lambda: None if len(chips.reads) < 2 else chips.failure())
    await until(lambda: not chips.failure() and not chips.states())

    assert failure.errno == errno.EMFILE
    assert chips.readings == []


# -- what is read ----------------------------------------------------------------------------------


def only_function(node: SimulatedNode) -> PciFunction:
    """The one PCI function of this node, as a scan finds it."""
    inventory = Inventory({})
    inventory.scan(settings_of(node, node.root / "plugins"))
    (found,) = inventory.present
    return found


def read_all(node: SimulatedNode, function: PciFunction) -> Reading:
    """Read a chip with its sensors and processes."""
    settings = settings_of(node, node.root / "plugins")
    return ttdp.read_chip(function, is_poll=True, settings=settings)


def open_below(root: Path) -> int:
    """Return how many files below a directory this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            count += os.readlink(f"/proc/self/fd/{name}").startswith(f"{root}/")
    return count


async def test_a_read_leaves_no_descriptor_open(node: SimulatedNode) -> None:
    """Nor does one that fails, or that has blocked until its chip has vanished."""
    (chip,) = node.add("p150a")
    function = only_function(node)

    with kernel_errors():
        read_all(node, function)
        chip.fail("tt_serial", "EIO")
        read_all(node, function)

        chip.block()
        blocked = asyncio.ensure_future(asyncio.to_thread(read_all, node, function))
        _, pending = await asyncio.wait({blocked}, timeout=ttdp.SLOW_AFTER)
        assert pending
        chip.vanish()
        await blocked

    assert open_below(node.root) == 0


def test_sensors_and_processes_are_read_on_demand(node: SimulatedNode) -> None:
    """A poll leaves them out. A process that has the device file open twice is one."""
    (chip,) = node.add("p150a")
    chip.set_pids([7, 9, 7])
    function = only_function(node)

    reading = ttdp.read_chip(function, is_poll=True, settings=None)
    assert (reading.sensors, reading.processes) == (None, None)

    reading = read_all(node, function)
    assert reading.sensors == ttdp.read_sensors(function) != {}
    assert [row["pid"] for row in reading.processes or ()] == [7, 9]


def test_sensors_that_cannot_be_listed_are_an_error_of_their_chip(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a poll without sensors; it is not the daemon's own, which would concern all chips."""
    node.add("p150a")
    function = only_function(node)
    genuine = os.listdir

    def fail_for_sensors(path: str) -> list[str]:
        if path.endswith("/hwmon"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return genuine(path)

    monkeypatch.setattr("os.listdir", fail_for_sensors)

    reading = read_all(node, function)

    assert reading.telemetry == Telemetry(error=ttdp.ReadError("hwmon", errno.EIO))


def test_sensors_of_a_chip_that_dies_meanwhile_are_discarded(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them would be those of a dead chip."""
    (chip,) = node.add("p150a")
    genuine = ttdp.read_sensors

    def read_and_die(function: PciFunction) -> dict[str, float]:
        values = genuine(function)
        chip.die()
        return values

    monkeypatch.setattr(ttdp, "read_sensors", read_and_die)

    function = only_function(node)
    state = ttdp.ChipState(ttdp.Chip(function))
    state.apply(read_all(node, function), ttdp.HealthSettings())

    assert state.chip.fault and state.chip.fault.kind is ttdp.Kind.NO_RESPONSE
    assert state.sensors == {}
