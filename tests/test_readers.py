"""Readers: chips are read on threads of their own, also if reads block or no thread can start."""

from __future__ import annotations

import _thread
import errno
import threading
from collections.abc import AsyncIterator
from unittest.mock import Mock

import pytest

import ttdp
from tests.world.processes import PATIENCE, until
from ttdp import PciFunction, Readers, Reading, Settings

ONE, TWO, *OTHERS = (PciFunction(f"0000:{bus:02x}:00.0", number=bus) for bus in range(1, 33))
NEVER = float("inf")


class Chips:
    """Chips that answer at once unless they are held or have an error."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.held: set[str] = set()
        self.goes_on = threading.Event()
        self.busy: list[str] = []
        self.most_at_once = 0
        self.wakes: list[None] = []
        self.readers = Readers(lambda: self.wakes.append(None))

    def read(self, settings: Settings, function: PciFunction, *, is_poll: bool) -> Reading:
        address = function.address
        self.busy.append(address)
        self.reads.append(address)
        self.most_at_once = max(self.most_at_once, len(self.busy))
        # Others could begin meanwhile; a held one takes longer than any test waits.
        self.goes_on.wait(4 * PATIENCE if address in self.held else 0.001)
        self.busy.remove(address)
        if error := self.errors.get(address):
            raise error
        return Reading(function, 0.0, is_poll)

    async def are_read(self, *functions: PciFunction, wanted: int | None = None) -> list[str]:
        """Have these read; return which of them have answered once so many have."""
        self.readers.submit(Settings(), functions, is_poll=True)
        found: list[str] = []

        def have_answered() -> bool:
            found.extend(reading.function.address for reading in self.readers.collect())
            return len(found) == (len(functions) if wanted is None else wanted)

        await until(have_answered)
        return sorted(found)


@pytest.fixture
async def chips(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Chips]:
    """Chips that the program's readers read; all reads have ended when a test has."""
    chips = Chips()
    monkeypatch.setattr(ttdp, "read_chip", chips.read)
    yield chips

    chips.goes_on.set()
    await until(lambda: chips.readers.due(0.0) == NEVER)


async def test_chips_that_answer_are_read_one_after_the_other(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that contend for the interpreter cost several times as much. One wake at the end."""
    monkeypatch.setattr(ttdp, "SLOW_AFTER", PATIENCE)
    for number in range(1, 4):
        await chips.are_read(ONE, TWO, *OTHERS)
        assert (chips.most_at_once, len(chips.wakes)) == (1, number)


async def test_blocked_reads_keep_a_thread_each_and_delay_no_other_chip(chips: Chips) -> None:
    """A chip that is being read is not read once more: two readings of one moment are a stall."""
    threads = _thread._count()
    blocked = [TWO, *OTHERS]
    chips.held = {each.address for each in blocked}
    for _ in range(3):
        assert await chips.are_read(ONE, *blocked, wanted=1) == [ONE.address]

    await until(lambda: len(chips.reads) == 3 + len(blocked))
    assert _thread._count() == threads + 32

    chips.goes_on.set()
    assert await chips.are_read(wanted=len(blocked)) == sorted(chips.held)
    assert len(chips.reads) == 3 + len(blocked)


@pytest.mark.usefixtures("reads_time_out")
async def test_a_read_is_slow_after_a_tenth_of_a_second_and_blocked_after_five(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a slow one; until a blocked one returns its chip has a fault."""
    monkeypatch.setattr(ttdp, "monotonic", lambda: 1000.0)
    readers = chips.readers
    chips.held = {ONE.address}
    await chips.are_read(ONE, wanted=0)

    for seconds, is_settled, blocked, due in (
        (0.0, False, [], 0.1),
        (0.1, True, [], 5.0),
        (4.9, True, [], 5.0),
        (5.0, True, [ONE.address], NEVER),
    ):
        now = 1000.0 + seconds
        assert (readers.are_settled(now), readers.blocked(now)) == (is_settled, blocked)
        assert readers.due(now) == 1000.0 + due

    chips.goes_on.set()
    await chips.are_read(wanted=1)
    assert readers.blocked(2000.0) == []


async def test_an_error_in_a_read_is_no_reading(
    chips: Chips, caplog: pytest.LogCaptureFixture
) -> None:
    """An internal one is logged, the daemon's own raised once. Each chip is read again."""
    emfile = OSError(errno.EMFILE, "Too many open files")
    chips.errors = {ONE.address: ZeroDivisionError(), TWO.address: emfile}
    chips.readers.submit(Settings(), [ONE, TWO], is_poll=True)
    await until(lambda: chips.readers.due(0.0) == NEVER)

    assert "internal error (reading 0000:01:00.0)" in caplog.text
    with pytest.raises(OSError, match="Too many open files"):
        chips.readers.collect()

    chips.errors = {}
    assert await chips.are_read(ONE, TWO) == [ONE.address, TWO.address]


async def test_without_threads_the_daemon_itself_has_an_error(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chip is read when there are threads again."""
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("no new thread")))
        with pytest.raises(OSError, match="no new thread") as failure:
            await chips.are_read(ONE)

    assert failure.value.errno == errno.EAGAIN
    assert await chips.are_read(ONE) == [ONE.address]
