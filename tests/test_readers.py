"""Readers: threads that read chips, also if reads block or no thread can be started."""

from __future__ import annotations

import _thread
import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import ttdp
from tests.chips import kind_of
from tests.conftest import WATCHDOG, StartDaemon
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import kernel_errors, settings_of
from tests.world.tree import open_below
from ttdp import Kind, PciFunction, Reading, Telemetry, TelemetryReaders


def function(bus: int, ordinal: int = 0) -> PciFunction:
    return PciFunction(f"0000:{bus:02x}:00.0", "wormhole", ordinal=ordinal, path=f"/dev/{ordinal}")


ONE, TWO, THREE = (function(bus) for bus in (1, 2, 3))


class Chips:
    """Chips that answer at once unless they are held."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.readings: list[Reading] = []
        self.read_twice_at_once: list[str] = []
        self._held: dict[str, threading.Event] = {}
        self._busy: set[str] = set()
        self.readers = TelemetryReaders(lambda: None, self._read)

    def _read(self, function: PciFunction) -> Telemetry:
        if function.bdf in self._busy:
            self.read_twice_at_once.append(function.bdf)
        self._busy.add(function.bdf)
        self.reads.append(function.bdf)
        if gate := self._held.get(function.bdf):
            gate.wait(4 * PATIENCE)  # longer than any test waits
        self._busy.discard(function.bdf)
        return Telemetry(heartbeat=len(self.reads))

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


@pytest.fixture
async def chips() -> AsyncIterator[Chips]:
    """No test has two threads read one chip at once."""
    chips = Chips()
    yield chips
    chips.release()
    assert chips.read_twice_at_once == []


async def test_each_is_read_once_in_order_on_one_thread_that_ends(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as chips answer; what is asked for twice is read once."""
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
    assert len(started) == 1 and chips.readers.is_settled(time.monotonic())
    await until(lambda: _thread._count() <= threads)


async def test_a_read_that_blocks_delays_no_other_chip(chips: Chips) -> None:
    """Another thread goes on; the age of the read is known."""
    chips.hold(TWO)
    chips.submit(ONE, TWO, THREE)
    await until(lambda: chips.answered() == [ONE.bdf, THREE.bdf])
    assert chips.readers.slow(time.monotonic()).keys() == {TWO.bdf}
    assert chips.readers.is_settled(time.monotonic())
    chips.release()
    await until(lambda: TWO.bdf in chips.answered())
    assert chips.readers.slow(time.monotonic()) == {}


async def test_thirty_one_blocked_reads_keep_thirty_one_threads(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each poll asks again; the last chip is read."""
    monkeypatch.setattr(ttdp, "SLOW_AFTER", 0.01)
    threads = _thread._count()
    stuck = [function(bus) for bus in range(1, 32)]
    chips.hold(*stuck)
    chips.submit(*stuck, function(32))
    for _ in range(5):
        chips.submit(*stuck, is_poll=True)
    await until(lambda: chips.answered() == ["0000:20:00.0"])
    await until(lambda: _thread._count() <= threads + len(stuck))
    assert len(chips.reads) == 32
    chips.release()
    await until(lambda: _thread._count() <= threads)


async def test_a_poll_during_a_read_has_nothing_read_after_it(chips: Chips) -> None:
    """Two readings, a moment apart, would show a stalled heartbeat."""
    chips.hold(ONE)
    chips.submit(ONE, is_poll=True)
    await until(lambda: chips.reads)
    chips.submit(ONE, is_poll=True)
    chips.release()
    await until(lambda: chips.answered() and not chips.readers.pending)
    assert chips.reads == [ONE.bdf]


@pytest.fixture
async def unhandled() -> AsyncIterator[list[str]]:
    """No exception has left a callback of the loop."""
    found: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(str(context)))
    yield found
    assert found == []


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
@pytest.mark.usefixtures("unhandled")
async def test_without_threads_the_daemon_itself_has_an_error(
    chips: Chips, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Also if it is the one behind a slow read. The chips are read when there are threads again."""

    def exhausted(_: threading.Thread) -> None:
        raise error

    def fails() -> bool:
        try:
            chips.answered()
        except OSError as own:
            return own.errno == errno.EAGAIN and str(error) in str(own)
        return False

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", exhausted)
        chips.submit(ONE)
        await until(fails)

    chips.hold(TWO)
    chips.submit(TWO, THREE)
    await until(lambda: chips.reads)
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", exhausted)
        await until(fails)
    assert chips.readers.pending.keys() == {TWO.bdf}
    chips.submit(ONE, TWO, THREE)
    await until(lambda: chips.answered() == [ONE.bdf, THREE.bdf])


async def test_a_blocked_read_costs_a_handful_of_turns(
    node: SimulatedNode, start: StartDaemon, ticking: None
) -> None:
    """Not one every tenth of a second, until it counts as blocked after two seconds."""
    blocked, other = node.add("n150") + node.add("n150")
    daemon = await start(WATCHDOG, interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    blocked.block("tt_heartbeat")
    daemon.forget_notes()
    other.vanish()
    await until(lambda: kind_of(daemon.chip(blocked.bdf)) is Kind.BLOCKED)
    assert daemon.notes.count("WATCHDOG=1") < 12, "each turn feeds the watchdog"


async def test_an_internal_error_in_a_read_concerns_this_read_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged; the chip can be read again, and others are."""
    attempts: list[PciFunction] = []

    def read(function: PciFunction) -> Telemetry:
        attempts.append(function)
        if attempts == [ONE]:
            raise ZeroDivisionError
        return Telemetry()

    readers = TelemetryReaders(lambda: None, read)
    readings: list[Reading] = []
    for _ in range(2):
        readers.submit([ONE, TWO], is_poll=True)
        await until(lambda: readings.extend(readers.collect()) or not readers.pending)  # type: ignore[func-returns-value]
    assert [each.function for each in readings] == [TWO, ONE, TWO]
    assert "internal error (reading 0000:01:00.0)" in caplog.text


async def test_the_daemons_own_error_is_raised_once_the_others_are_collected() -> None:
    """Without descriptors, no chip is judged by this read."""

    def read(function: PciFunction) -> Telemetry:
        raise OSError(errno.EMFILE, "Too many open files")

    readers = TelemetryReaders(lambda: None, read)
    readers.submit([ONE], is_poll=True)

    def fails() -> bool:
        try:
            return bool(readers.collect())
        except OSError as error:
            return error.errno == errno.EMFILE

    await until(fails)
    assert not readers.pending


class Poll:
    """Reads the chips of a simulated node as polls do."""

    def __init__(self, node: SimulatedNode) -> None:
        self.readings: dict[str, Reading] = {}
        self.readers = TelemetryReaders(lambda: None)
        self._settings = settings_of(node, node.root / "plugins")

    def begin(self, **options: Any) -> list[PciFunction]:
        bus = ttdp.scan(self._settings, {}, driver_is_loaded=True)
        found = [each for each in bus.values() if each]
        self.readers.submit(found, is_poll=True, **options)
        return found

    def slow(self) -> dict[str, float]:
        """Collect, and return the reads that take long."""
        for reading in self.readers.collect():
            self.readings[reading.function.bdf] = reading
        return self.readers.slow(time.monotonic())

    async def end(self) -> None:
        while self.readers.pending:
            self.slow()
            await asyncio.sleep(0.001)

    async def poll(self, *, details: bool = False) -> list[PciFunction]:
        found = self.begin(settings=self._settings if details else None)
        await self.end()
        return found


async def test_a_read_leaves_no_descriptor_open(node: SimulatedNode) -> None:
    """Also one that fails, or that has blocked until its chip has vanished."""
    (chip,) = node.add("p150a")
    poll = Poll(node)
    with kernel_errors():
        await poll.poll(details=True)
        chip.fail("tt_serial", "EIO")
        await poll.poll(details=True)
        chip.block("tt_heartbeat")
        poll.begin()
        await until(poll.slow)
        chip.vanish()
        await poll.end()
    assert open_below(node.root) == 0


@pytest.mark.parametrize("is_dead", [False, True])
async def test_sensors_are_read_on_demand_and_not_of_a_dead_chip(
    node: SimulatedNode, is_dead: bool
) -> None:
    """A chip that dies while they are read would show 65.535 V."""
    (chip,) = node.add("p150a")
    poll = Poll(node)
    await poll.poll()
    assert poll.readings[chip.bdf].sensors is None
    if is_dead:
        chip.die()
    (found,) = await poll.poll(details=True)
    wanted = {} if is_dead else ttdp.read_sensors(found)
    assert poll.readings[chip.bdf].sensors == wanted
