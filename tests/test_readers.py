"""Telemetry readers: who is read when, by threads that may hang, die, or not be had at all."""

from __future__ import annotations

import _thread
import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.world.processes import until, wait_until
from ttdp import HostPaths, PciFunction, Reading, Request, Telemetry, TelemetryReaders


def function(bus: int, ordinal: int = 0) -> PciFunction:
    return PciFunction(f"0000:{bus:02x}:00.0", "wormhole", "n150", None, ordinal, f"/dev/{ordinal}", f"/sys/{bus}")


class Chips:
    """Chips that answer at once unless they are held."""

    def __init__(self) -> None:
        self.reads: list[tuple[str, Telemetry | None]] = []  # address, and what the reader was told of the last time
        self.delivered: list[Reading] = []
        self.read_twice_at_once: list[str] = []
        self._held: dict[str, threading.Event] = {}
        self._busy: set[str] = set()
        self.readers = TelemetryReaders(self.delivered.extend, self._read)

    def _read(self, function: PciFunction, last: Telemetry | None) -> Telemetry:
        if function.bdf in self._busy:
            self.read_twice_at_once.append(function.bdf)
        self._busy.add(function.bdf)
        self.reads.append((function.bdf, last))
        if gate := self._held.get(function.bdf):
            gate.wait(10)
        self._busy.discard(function.bdf)
        return Telemetry(heartbeat=len(self.reads))

    def hold(self, *chips: PciFunction) -> None:
        for chip in chips:
            self._held[chip.bdf] = threading.Event()

    def release(self, *chips: PciFunction) -> None:
        for chip in chips:
            self._held.pop(chip.bdf).set()

    def ask(self, *chips: PciFunction, last: Telemetry | None = None, periodic: bool = False) -> None:
        self.readers.request(Request(chip, last, periodic) for chip in chips)

    def answered(self) -> list[str]:
        return [reading.function.bdf for reading in self.delivered]


@pytest.fixture
async def chips() -> AsyncIterator[Chips]:
    """Whatever a test does with them, none of them is read by two threads at once."""
    chips = Chips()
    yield chips
    assert chips.read_twice_at_once == []


ONE, TWO, THREE = (function(bus) for bus in (1, 2, 3))


async def test_everyone_is_read_once_in_order_and_no_thread_is_left(chips: Chips) -> None:
    """Chips that answer are read on one thread, which ends with its work."""
    threads = _thread._count()
    chips.ask(ONE, TWO, THREE)
    assert _thread._count() <= threads + 1
    await until(lambda: len(chips.delivered) == 3)
    assert chips.answered() == [chip.bdf for chip in (ONE, TWO, THREE)]
    await until(lambda: _thread._count() <= threads)
    assert chips.readers.is_settled()


async def test_one_that_hangs_holds_up_nobody(chips: Chips) -> None:
    """The others are read by another thread; the one that hangs is known by how long it does."""
    chips.hold(ONE)
    chips.ask(ONE, TWO, THREE)
    await until(lambda: len(chips.delivered) == 2, seconds=1)
    assert set(chips.answered()) == {TWO.bdf, THREE.bdf}
    await until(chips.readers.is_settled, seconds=1)
    assert chips.readers.seconds_under_way(ONE.bdf) > 0 and not chips.readers.seconds_under_way(TWO.bdf)
    chips.release(ONE)
    await until(lambda: ONE.bdf in chips.answered(), seconds=1)
    assert chips.readers.seconds_under_way(ONE.bdf) == 0


async def test_what_was_read_when_another_is_asked_for_is_delivered(chips: Chips) -> None:
    """The first chip has answered, and before the loop has come to hear of that an event has the second one asked."""
    chips.ask(ONE)
    await asyncio.sleep(0)  # which starts the thread
    wait_until(lambda: chips.readers._done.qsize() == 1)
    chips.ask(TWO)
    await until(lambda: len(chips.delivered) == 2, seconds=2)


async def test_what_was_read_before_one_hangs_is_delivered(chips: Chips) -> None:
    """The thread hangs at the second chip: the first one's answer does not hang with it."""
    chips.hold(TWO)
    chips.ask(ONE, TWO)
    await until(lambda: chips.answered() == [ONE.bdf], seconds=1)
    chips.release(TWO)
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf], seconds=1)


async def test_many_that_hang_have_a_thread_each_and_no_more(chips: Chips) -> None:
    """Asked again and again, thirty-one chips that hang keep thirty-one threads; the thirty-second is read."""
    threads = _thread._count()
    stuck = [function(bus) for bus in range(1, 32)]
    chips.hold(*stuck)
    chips.ask(*stuck, function(32))
    for _ in range(5):
        chips.ask(*stuck, periodic=True)
    await until(lambda: chips.answered() == ["0000:20:00.0"], seconds=10)
    assert _thread._count() <= threads + len(stuck) + 1
    assert len(chips.reads) == 32
    chips.release(*stuck)
    await until(lambda: _thread._count() <= threads)


async def test_a_request_during_a_read_is_asked_again_after_it(chips: Chips) -> None:
    """An event during a read may have come after what the read saw: once it has answered everything is read anew."""
    chips.hold(ONE)
    chips.ask(ONE, last=Telemetry(heartbeat=7), periodic=True)
    await until(lambda: chips.reads)
    chips.ask(ONE)
    chips.ask(ONE)
    chips.release(ONE)
    await until(lambda: len(chips.delivered) == 2)
    assert chips.reads == [(ONE.bdf, Telemetry(heartbeat=7)), (ONE.bdf, None)]
    assert [reading.periodic for reading in chips.delivered] == [True, False]


async def test_a_poll_during_a_read_is_not_asked_again(chips: Chips) -> None:
    """Two readings in a row, a moment apart, would make a heartbeat stand still that does not."""
    chips.hold(ONE)
    chips.ask(ONE, periodic=True)
    await until(lambda: chips.reads)
    chips.ask(ONE, periodic=True)
    chips.release(ONE)
    await until(chips.readers.is_settled)
    assert len(chips.delivered) == len(chips.reads) == 1


async def test_a_renumbered_chip_is_read_at_its_new_place_once_the_old_read_is_over(chips: Chips) -> None:
    """Even if it is a poll that asks for it: what the old read says is about another place."""
    moved = function(1, 5)
    chips.hold(ONE)
    chips.ask(ONE)
    await until(lambda: chips.reads)
    chips.ask(moved, periodic=True)
    chips.release(ONE)
    await until(lambda: [reading.function for reading in chips.delivered] == [ONE, moved])


async def test_threads_that_cannot_be_had_are_missed_once_and_asked_for_again(
    chips: Chips, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line; nobody counts as being read, and the next request reads everyone who waits."""

    def exhausted(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("_thread.start_new_thread", exhausted)
        chips.ask(ONE)
        chips.ask(TWO)
        await until(chips.readers.is_settled, seconds=0.05)  # else the start would wait for ever
        await asyncio.sleep(0.25)  # its own attempts, which nobody hears of
    assert [record.message for record in caplog.records] == ["telemetry is not read for now: can't start new thread"]
    assert not chips.readers.seconds_under_way(ONE.bdf)
    chips.ask(THREE)
    await until(lambda: chips.answered() == [ONE.bdf, TWO.bdf, THREE.bdf])


async def test_an_error_in_a_reading_is_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that raises leaves neither its chip blocked nor the others unread."""
    delivered: list[Reading] = []

    def read(function: PciFunction, last: Telemetry | None) -> Telemetry:
        if function == ONE:
            raise MemoryError
        return Telemetry()

    readers = TelemetryReaders(delivered.extend, read)
    readers.request(Request(chip, None, False) for chip in (ONE, TWO))
    await until(lambda: len(delivered) == 2)
    assert [reading.telemetry for reading in delivered] == [Telemetry(error=("telemetry", 0)), Telemetry()]
    assert readers.is_settled()


# -- paths of the host -------------------------------------------------------------------------------------------------


@pytest.fixture
def dead_path(monkeypatch: pytest.MonkeyPatch) -> tuple[str, threading.Event, list[str]]:
    """A path on a file system that does not answer until the event is set, and what was asked for."""
    asked, answers = list[str](), threading.Event()
    genuine = os.path.exists

    def exists(path: Any) -> bool:
        asked.append(str(path))
        return answers.wait(10) if path == "/dead" else genuine(path)

    monkeypatch.setattr("os.path.exists", exists)
    return "/dead", answers, asked


async def test_a_dead_file_system_costs_a_second_and_one_thread(
    dead_path: tuple[str, threading.Event, list[str]],
) -> None:
    """Who asks is told that there is no answer; it is not asked again before it has given one; then it counts."""
    path, answers, asked = dead_path
    paths = HostPaths()
    assert [await paths.is_there(path, 0.05) for _ in range(3)] == [None, None, None]
    assert await paths.is_there("/", 1) is True and await paths.is_there("/nowhere", 1) is False
    assert asked.count(path) == 1
    answers.set()
    assert await paths.is_there(path, 1) is True
