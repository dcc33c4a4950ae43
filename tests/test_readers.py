"""Readers: who is read when, by threads that may hang, die, or not be had at all."""

from __future__ import annotations

import _thread
import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import ttdp
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until, wait_until
from tests.world.simulation import kernel_errors, settings_of
from tests.world.tree import open_below
from ttdp import (
    AttributeFiles,
    HostPaths,
    PciFunction,
    Reading,
    ReadJob,
    Telemetry,
    TelemetryReaders,
)


def function(bus: int, ordinal: int = 0) -> PciFunction:
    path = f"/dev/{ordinal}"
    return PciFunction(f"0000:{bus:02x}:00.0", "wormhole", "n150", None, ordinal, path, "/x/y/z")


ONE, TWO, THREE = (function(bus) for bus in (1, 2, 3))


class Chips:
    """Chips that answer at once unless they are held."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, Telemetry | None]] = []  # address, and what it said before
        self.delivered: list[Reading] = []
        self.read_twice_at_once: list[str] = []
        self._held: dict[str, threading.Event] = {}
        self._busy: set[str] = set()
        self.readers = TelemetryReaders(self.delivered.extend, self._read)

    def _read(
        self, function: PciFunction, former: Telemetry | None, files: AttributeFiles | None
    ) -> Telemetry:
        if function.bdf in self._busy:
            self.read_twice_at_once.append(function.bdf)
        self._busy.add(function.bdf)
        self.reads.append((function.bdf, former))
        if gate := self._held.get(function.bdf):
            gate.wait(4 * PATIENCE)  # longer than any test waits for what must not wait for it
        self._busy.discard(function.bdf)
        return Telemetry(heartbeat=len(self.reads))

    def hold(self, *functions: PciFunction) -> None:
        for each in functions:
            self._held[each.bdf] = threading.Event()

    def release(self) -> None:
        """Have all of them answer."""
        while self._held:
            self._held.popitem()[1].set()

    def ask(self, *functions: PciFunction, **how: Any) -> None:
        self.readers.submit(ReadJob(each, **how) for each in functions)

    def answered(self) -> list[str]:
        return [reading.function.bdf for reading in self.delivered]

    def seconds(self, function: PciFunction) -> float:
        return self.readers.pool.seconds_under_way(function.bdf)


@pytest.fixture
async def chips() -> AsyncIterator[Chips]:
    """Whatever a test does with them, none of them is read by two threads at once."""
    chips = Chips()
    yield chips
    chips.release()
    assert chips.read_twice_at_once == []


async def test_everyone_is_read_once_in_order_and_no_thread_is_left(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chips that answer are read on one thread, which ends with its work."""
    started = []
    genuine = _thread.start_new_thread
    monkeypatch.setattr("_thread.start_new_thread", lambda *how: started.append(genuine(*how)))
    monkeypatch.setattr(ttdp, "READ_PATIENCE", PATIENCE)  # however slow this machine is
    threads = _thread._count()
    chips.hold(ONE)
    for each in (ONE, TWO, THREE):
        chips.ask(each)
        await until(lambda: chips.reads)
        await asyncio.sleep(0)
    chips.release()
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf, THREE.bdf])
    assert len(started) == 1 and chips.readers.pool.is_settled()
    await until(lambda: _thread._count() <= threads)


async def test_one_that_hangs_holds_up_nobody(chips: Chips) -> None:
    """The others are read by another thread; it is known by how long it has been at it."""
    chips.hold(ONE)
    chips.ask(ONE, TWO, THREE)
    await until(lambda: len(chips.delivered) == 2)
    assert set(chips.answered()) == {TWO.bdf, THREE.bdf}
    await until(chips.readers.pool.is_settled)
    assert chips.seconds(ONE) > 0 and chips.seconds(TWO) == 0
    chips.release()
    await until(lambda: ONE.bdf in chips.answered())
    assert chips.seconds(ONE) == 0


async def test_what_was_read_when_another_is_asked_for_is_delivered(chips: Chips) -> None:
    """The first has answered; before the loop has heard of that, an event wants the second."""
    threads = _thread._count()
    chips.ask(ONE)
    await asyncio.sleep(0)  # which starts the thread
    wait_until(lambda: _thread._count() <= threads)
    chips.ask(TWO)
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf])


async def test_what_was_read_before_one_hangs_is_delivered(chips: Chips) -> None:
    """The thread hangs at the second chip: the first one's answer does not hang with it."""
    chips.hold(TWO)
    chips.ask(ONE, TWO)
    await until(lambda: chips.answered() == [ONE.bdf])
    chips.release()
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf])


async def test_many_that_hang_have_a_thread_each_and_no_more(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked again and again, thirty-one that hang keep thirty-one threads; the next is read."""
    monkeypatch.setattr(ttdp, "READ_PATIENCE", 0.01)
    threads = _thread._count()
    stuck = [function(bus) for bus in range(1, 32)]
    chips.hold(*stuck)
    chips.ask(*stuck, function(32))
    for _ in range(5):
        chips.ask(*stuck, periodic=True)
    await until(lambda: chips.answered() == ["0000:20:00.0"])
    await until(lambda: _thread._count() <= threads + len(stuck))
    assert len(chips.reads) == 32
    chips.release()
    await until(lambda: _thread._count() <= threads)


async def test_an_event_during_a_read_has_everything_read_after_it(chips: Chips) -> None:
    """What it tells of may have come after what the read saw; several such events are one."""
    chips.hold(ONE)
    chips.ask(ONE, former=Telemetry(heartbeat=7), periodic=True)
    await until(lambda: chips.reads)
    chips.ask(ONE, former=Telemetry(heartbeat=7))
    chips.ask(ONE, former=Telemetry(heartbeat=7))
    chips.release()
    await until(lambda: len(chips.delivered) == 2)
    assert chips.reads == [(ONE.bdf, Telemetry(heartbeat=7)), (ONE.bdf, None)]
    assert [reading.periodic for reading in chips.delivered] == [True, False]


async def test_a_poll_during_a_read_has_nothing_read_after_it(chips: Chips) -> None:
    """Two readings in a row, a moment apart, would make a heartbeat stand still that does not."""
    chips.hold(ONE)
    chips.ask(ONE, periodic=True)
    await until(lambda: chips.reads)
    chips.ask(ONE, periodic=True)
    chips.release()
    await until(lambda: chips.delivered and chips.readers.pool.is_settled())
    assert len(chips.delivered) == len(chips.reads) == 1


async def test_a_renumbered_chip_is_read_at_its_new_place_once_the_old_read_is_over(
    chips: Chips,
) -> None:
    """What the old read says is about another place."""
    moved = function(1, 5)
    chips.hold(ONE)
    chips.ask(ONE)
    await until(lambda: chips.reads)
    chips.ask(moved)
    chips.release()
    await until(lambda: [reading.function for reading in chips.delivered] == [ONE, moved])


async def test_threads_that_cannot_be_had_are_missed_once_and_wanted_again(
    chips: Chips, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line; nobody waits for those who wait, and all are read when there are threads again."""
    attempts = []

    def exhausted(*_: object) -> None:
        attempts.append(1)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", exhausted)
        chips.ask(ONE)
        chips.ask(TWO)
        await until(lambda: len(attempts) == 3)
        assert chips.readers.pool.is_settled() and chips.seconds(ONE) == 0
    (line,) = (record.message for record in caplog.records)
    assert line == "no thread can be started, nothing is read for now: can't start new thread"
    chips.ask(THREE)
    await until(lambda: sorted(chips.answered()) == [each.bdf for each in (ONE, TWO, THREE)])


async def test_an_error_in_a_reading_is_a_reading(caplog: pytest.LogCaptureFixture) -> None:
    """A reader that raises leaves neither its chip blocked nor the others unread; it is logged."""
    delivered: list[Reading] = []

    def read(function: PciFunction, *_: object) -> Telemetry:
        if function == ONE:
            raise MemoryError
        return Telemetry()

    readers = TelemetryReaders(delivered.extend, read)
    readers.submit(ReadJob(each) for each in (ONE, TWO))
    await until(lambda: len(delivered) == 2)
    errors = {reading.function: reading.telemetry.error for reading in delivered}
    assert errors == {ONE: ("telemetry", errno.EIO), TWO: None}
    assert readers.pool.is_settled() and "MemoryError" in caplog.text


# -- what is read, and how -------------------------------------------------------------------------


class Poll:
    """Reads the chips of a simulated node as polls do."""

    def __init__(self, node: SimulatedNode) -> None:
        self.readings: dict[str, Reading] = {}
        self.readers = TelemetryReaders(self._deliver)
        self._settings = settings_of(node, node.root / "plugins")

    def _deliver(self, readings: list[Reading]) -> None:
        self.readings |= {reading.function.bdf: reading for reading in readings}

    def begin(self, **how: Any) -> None:
        """Ask every chip, with what it said last at hand."""
        for bdf, function in ttdp.scan(self._settings).functions.items():
            former = self.readings[bdf].telemetry if bdf in self.readings else None
            self.readers.submit([ReadJob(function, former, periodic=True, **how)])

    async def end(self) -> None:
        """Wait for all answers."""
        pool = self.readers.pool
        await until(lambda: not any(pool.is_pending(f"0000:{bus:02x}:00.0") for bus in range(9)))


@pytest.fixture
def kernel() -> Iterator[None]:
    """Attributes that are kept open are what is at their path."""
    with kernel_errors():
        yield


async def test_what_polls_keep_open_is_bounded_and_returned(node: SimulatedNode) -> None:
    """Heartbeat and temperature, of a Blackhole its trips; none of a chip that is away."""
    first, _ = node.add("p150a") + node.add("n150")
    poll = Poll(node)
    for _ in range(4):
        node.tick()
        poll.begin()
        await poll.end()
    counts = [open_below(node.root)]
    for present in ({first.bdf}, set[str]()):
        poll.readers.release(present)
        counts.append(open_below(node.root))
    assert counts == [5, 3, 0]


@pytest.mark.usefixtures("kernel")
async def test_a_read_that_hangs_returns_its_descriptors_when_it_is_over(
    node: SimulatedNode,
) -> None:
    """They go to the thread and come back with what was read, though the chip is away by then."""
    (chip,) = node.add("p150a")
    poll = Poll(node)
    for _ in range(2):
        chip.beat()
        poll.begin()
        await poll.end()
    chip.block("tt_heartbeat")
    poll.begin()
    await until(lambda: poll.readers.pool.seconds_under_way(chip.bdf) > 0)
    poll.readers.release(set())
    chip.vanish()
    await poll.end()
    poll.readers.release(set())
    assert open_below(node.root) == 0


@pytest.mark.parametrize("is_dead", [False, True])
async def test_figures_are_read_for_who_wants_them_and_of_a_chip_that_lives(
    node: SimulatedNode, is_dead: bool
) -> None:
    """With its telemetry, on the same thread; a dead one's link says nothing of it."""
    (chip,) = node.add("p150a")
    poll = Poll(node)
    poll.begin()
    await poll.end()
    assert poll.readings[chip.bdf].figures is None
    if is_dead:
        chip.die()
    poll.begin(wants_figures=True)
    await poll.end()
    function = poll.readings[chip.bdf].function
    wanted = None if is_dead else ttdp.read_sensors(function)
    assert poll.readings[chip.bdf].figures == wanted


# -- paths of the host -----------------------------------------------------------------------------


async def test_a_dead_file_system_costs_its_time_and_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has waited long enough is told that there is no answer; one question serves all."""
    asked: list[str] = []
    answers = threading.Event()
    genuine = os.path.exists

    def exists(path: Any) -> bool:
        asked.append(str(path))
        return answers.wait(4 * PATIENCE) if path == "/dead" else genuine(path)

    monkeypatch.setattr("os.path.exists", exists)
    paths = HostPaths()
    patient = [asyncio.create_task(paths.exists("/dead", PATIENCE)) for _ in range(3)]
    assert await paths.exists("/dead", 0.01) is None
    assert await paths.exists("/", PATIENCE) is True
    assert await paths.exists("/nowhere", PATIENCE) is False
    answers.set()
    assert await asyncio.gather(*patient) == [True, True, True]
    assert asked.count("/dead") == 1
