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
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import kernel_errors, settings_of
from tests.world.tree import open_below
from ttdp import AttributeFiles, PciFunction, Reading, Telemetry, TelemetryReaders


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

    def _read(self, function: PciFunction, files: AttributeFiles) -> Telemetry:
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

    def submit(self, *functions: PciFunction, periodic: bool = False) -> None:
        self.readers.submit(functions, periodic=periodic)

    def answered(self) -> list[str]:
        """Collect, and return the chips that have answered so far."""
        self.readings += self.readers.collect(time.monotonic())
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
    """As long as chips answer."""
    started = []
    genuine = _thread.start_new_thread
    monkeypatch.setattr("_thread.start_new_thread", lambda *how: started.append(genuine(*how)))
    monkeypatch.setattr(ttdp, "SLOW_AFTER", PATIENCE)
    threads = _thread._count()
    chips.hold(ONE)
    for each in (ONE, TWO, THREE):
        chips.submit(each)
        await until(lambda: chips.reads)
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
        chips.submit(*stuck, periodic=True)
    await until(lambda: chips.answered() == ["0000:20:00.0"])
    await until(lambda: _thread._count() <= threads + len(stuck))
    assert len(chips.reads) == 32
    chips.release()
    await until(lambda: _thread._count() <= threads)


async def test_a_poll_during_a_read_has_nothing_read_after_it(chips: Chips) -> None:
    """Two readings, a moment apart, would show a stalled heartbeat."""
    chips.hold(ONE)
    chips.submit(ONE, periodic=True)
    await until(lambda: chips.reads)
    chips.submit(ONE, periodic=True)
    chips.release()
    await until(lambda: chips.answered() and not chips.readers.pending)
    assert chips.reads == [ONE.bdf]


async def test_without_threads_the_daemon_itself_has_an_error(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chips are read when there are threads again."""

    def exhausted(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", exhausted)
        chips.submit(ONE)
        await asyncio.sleep(0)  # a thread is started after the turn
        with pytest.raises(OSError, match="can't start new thread"):
            chips.answered()
    chips.submit(ONE, TWO)
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf])


async def test_an_internal_error_in_a_read_concerns_this_read_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged; the chip can be read again, and others are."""
    attempts: list[PciFunction] = []

    def read(function: PciFunction, _: AttributeFiles) -> Telemetry:
        attempts.append(function)
        if attempts == [ONE]:
            raise ZeroDivisionError
        return Telemetry()

    readers = TelemetryReaders(lambda: None, read)
    readings: list[Reading] = []
    for _ in range(2):
        readers.submit([ONE, TWO], periodic=True)
        await until(lambda: readings.extend(readers.collect(0.0)) or not readers.pending)  # type: ignore[func-returns-value]
    assert [each.function for each in readings] == [TWO, ONE, TWO]
    assert "internal error in reading 0000:01:00.0" in caplog.text


async def test_the_daemons_own_error_is_raised_once_the_others_are_collected() -> None:
    """Without descriptors, no chip is judged by this read."""

    def read(function: PciFunction, _: AttributeFiles) -> Telemetry:
        raise OSError(errno.EMFILE, "Too many open files")

    readers = TelemetryReaders(lambda: None, read)
    readers.submit([ONE], periodic=True)

    def fails() -> bool:
        try:
            return bool(readers.collect(time.monotonic()))
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
        found = [each for each in ttdp.scan(self._settings, {}).values() if each]
        self.readers.submit(found, periodic=True, **options)
        return found

    def slow(self) -> dict[str, float]:
        """Collect, and return the reads that take long."""
        for reading in self.readers.collect(time.monotonic()):
            self.readings[reading.function.bdf] = reading
        return self.readers.slow(time.monotonic())

    async def end(self) -> None:
        while self.readers.pending:
            self.slow()
            await asyncio.sleep(0.001)

    async def poll(self, *, details: bool = False) -> list[PciFunction]:
        found = self.begin(details=self._settings if details else None)
        await self.end()
        return found


async def test_descriptors_are_kept_of_present_chips_only(node: SimulatedNode) -> None:
    """Their number does not grow with polls."""
    node.add("p150a")
    node.add("n150")
    poll = Poll(node)
    with kernel_errors():
        first, _ = await poll.poll()
        each = open_below(node.root)
        for _ in range(3):
            await poll.poll()
        assert open_below(node.root) == each > 0
        poll.readers.close_files([first])
        assert 0 < open_below(node.root) < each
        poll.readers.close_files([])
    assert open_below(node.root) == 0


async def test_a_blocked_read_returns_its_descriptors_when_it_ends(node: SimulatedNode) -> None:
    """Also if the chip has vanished by then."""
    (chip,) = node.add("p150a")
    poll = Poll(node)
    with kernel_errors():
        await poll.poll()
        chip.block("tt_heartbeat")
        poll.begin()
        await until(poll.slow)
        poll.readers.close_files([])
        chip.vanish()
        await poll.end()
        poll.readers.close_files([])
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
    wanted = {} if is_dead else ttdp.read_sensors(found, AttributeFiles().hwmon(found))
    assert poll.readings[chip.bdf].sensors == wanted
