"""Readers: chips are read on threads of their own, also if reads block or no thread can start."""

from __future__ import annotations

import _thread
import asyncio
import errno
import threading
import time
from collections.abc import AsyncIterator

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from ttdp import Kind, PciFunction, Readers, Reading, Settings

SLOW, BLOCKED = 0.1, 5.0  # seconds
N150 = "tenstorrent.com/n150"


def function(bus: int) -> PciFunction:
    return PciFunction(f"0000:{bus:02x}:00.0", "wormhole", number=bus)


ONE, TWO, THREE = (function(bus) for bus in (1, 2, 3))


class Chips:
    """Chips that answer at once unless they are held or have an error."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.answered: list[str] = []
        self.wakes = 0
        self.most_at_once = 0
        self.read_twice_at_once: list[str] = []
        self._held: dict[str, threading.Event] = {}
        self._busy: set[str] = set()
        self.readers = Readers(self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def read(self, settings: Settings, function: PciFunction, *, is_poll: bool) -> Reading:
        address = function.address
        if address in self._busy:
            self.read_twice_at_once.append(address)
        self._busy.add(address)
        self.most_at_once = max(self.most_at_once, len(self._busy))
        self.reads.append(address)

        if gate := self._held.get(address):
            gate.wait(4 * PATIENCE)  # longer than any test waits
        time.sleep(0)  # other threads that may run do so
        self._busy.discard(address)
        if error := self.errors.get(address):
            raise error
        return Reading(function, 0.0, is_poll)

    def hold(self, *functions: PciFunction) -> None:
        self._held |= {each.address: threading.Event() for each in functions}

    def release(self) -> None:
        while self._held:
            self._held.popitem()[1].set()

    def submit(self, *functions: PciFunction, is_poll: bool = True) -> None:
        self.readers.submit(Settings(), functions, is_poll=is_poll)

    def have_answered(self, *functions: PciFunction) -> bool:
        """Collect; return whether just these have answered since the last time that it was so."""
        for reading in self.readers.collect():
            self.answered.append(reading.function.address)
        wanted = [each.address for each in functions]
        if sorted(self.answered) == wanted and self.readers.are_settled(time.monotonic()):
            self.answered.clear()
            return True
        return False

    def failure(self) -> OSError | None:
        """Collect, and return the error that this raises."""
        try:
            self.readers.collect()
        except OSError as error:
            return error
        return None


@pytest.fixture
async def chips(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Chips]:
    """No test has two threads read one chip at once."""
    chips = Chips()
    monkeypatch.setattr(ttdp, "read_chip", chips.read)
    yield chips

    chips.release()
    await until(lambda: chips.readers.due(0.0) == float("inf"))
    assert chips.read_twice_at_once == []


async def test_chips_that_answer_are_read_one_after_the_other(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that contend for the interpreter cost several times as much. One wake at the end."""
    monkeypatch.setattr(ttdp, "SLOW_AFTER", PATIENCE)
    for number in range(1, 4):
        chips.submit(ONE, TWO, THREE)
        await until(lambda: chips.have_answered(ONE, TWO, THREE))
        assert (chips.most_at_once, chips.wakes) == (1, number)


async def test_a_chip_that_is_being_read_is_not_read_again_after_it(chips: Chips) -> None:
    """It would seem to stall: two readings of one moment."""
    chips.hold(ONE)
    chips.submit(ONE)
    await until(lambda: chips.reads)
    chips.submit(ONE, TWO)
    await until(lambda: len(chips.reads) == 2)
    chips.release()
    await until(lambda: chips.have_answered(ONE, TWO))
    assert chips.reads == [ONE.address, TWO.address]


async def test_blocked_reads_keep_a_thread_each_and_delay_no_other_chip(chips: Chips) -> None:
    """The last one is read at each poll."""
    threads = _thread._count()
    stuck, sound = [function(bus) for bus in range(1, 32)], function(32)
    chips.hold(*stuck)

    for _ in range(3):
        chips.submit(*stuck, sound)
        await until(lambda: chips.have_answered(sound))

    assert _thread._count() == threads + 32
    chips.release()
    await until(lambda: chips.have_answered(*stuck))


async def test_a_read_is_slow_after_a_tenth_of_a_second_and_blocked_after_five(
    chips: Chips, monkeypatch: pytest.MonkeyPatch, reads_time_out: None
) -> None:
    """Nothing waits for a slow one; until a blocked one returns its chip has a fault."""
    since = 1000.0
    monkeypatch.setattr(ttdp, "monotonic", lambda: since)
    readers = chips.readers
    chips.hold(ONE)
    chips.submit(ONE)
    await until(lambda: chips.reads)

    for at, is_settled, blocked, due in (
        (since, False, [], since + SLOW),
        (since + SLOW, True, [], since + BLOCKED),
        (since + BLOCKED - 0.1, True, [], since + BLOCKED),
        (since + BLOCKED, True, [ONE.address], float("inf")),
    ):
        assert (readers.are_settled(at), readers.blocked(at)) == (is_settled, blocked)
        assert readers.due(at) == due

    chips.release()
    await until(lambda: chips.have_answered(ONE))
    assert readers.blocked(since + BLOCKED) == []


async def test_without_threads_the_daemon_itself_has_an_error(
    chips: Chips, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chip is read when there are threads again."""

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", no_thread)
        with pytest.raises(OSError, match="can't start new thread") as failure:
            chips.submit(ONE)
    assert failure.value.errno == errno.EAGAIN

    chips.submit(ONE, TWO)
    await until(lambda: chips.have_answered(ONE, TWO))


async def test_an_internal_error_in_a_read_concerns_this_read_only(
    chips: Chips, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the others are read, and the chip is at the next poll."""
    chips.errors[ONE.address] = ZeroDivisionError()
    chips.submit(ONE, TWO)
    await until(lambda: chips.have_answered(TWO))
    assert "internal error (reading 0000:01:00.0)" in caplog.text

    chips.errors.clear()
    chips.submit(ONE, TWO)
    await until(lambda: chips.have_answered(ONE, TWO))


async def test_the_daemons_own_error_is_raised_once(chips: Chips) -> None:
    """Without descriptors no chip is judged by this read, and each can be read again."""
    for each in (ONE, TWO):
        chips.errors[each.address] = OSError(errno.EMFILE, "Too many open files")
    chips.submit(ONE, TWO)
    await until(lambda: len(chips.reads) == 2 and chips.readers.are_settled(time.monotonic()))

    failure = chips.failure()
    assert failure and failure.errno == errno.EMFILE and chips.failure() is None
    chips.errors.clear()
    chips.submit(ONE, TWO)
    await until(lambda: chips.have_answered(ONE, TWO))


async def test_a_chip_whose_read_blocks_is_unhealthy_until_the_read_returns(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other chips are healthy meanwhile, and metrics have none of its former values."""
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", 0.3)
    blocked, other = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.05)
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {blocked.bdf, other.bdf})

    blocked.block()
    await daemon.sees(blocked.bdf, Kind.BLOCKED)
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {other.bdf})
    metrics = await daemon.metrics() or ""
    assert f'tt_device_temperature_celsius{{device="{other.bdf}"}}' in metrics
    assert f'tt_device_temperature_celsius{{device="{blocked.bdf}"}}' not in metrics

    blocked.unblock()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {blocked.bdf, other.bdf})


def test_a_loop_that_has_ended_minds_no_read_that_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon ends without waiting for its threads."""
    ended, returned = threading.Event(), threading.Event()

    def read(*_: object, **__: object) -> None:
        ended.wait(PATIENCE)
        returned.set()

    monkeypatch.setattr(ttdp, "read_chip", read)
    problems: list[object] = []
    monkeypatch.setattr(threading, "excepthook", problems.append)

    async def main() -> None:
        Readers(lambda: None).submit(Settings(), [ONE], is_poll=True)

    asyncio.run(main())
    ended.set()
    assert returned.wait(PATIENCE)
    assert problems == []
