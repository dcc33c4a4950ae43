"""Which pods have the cards' device files open, in the driver's files, and whether two have one.

The stand-in device files are other drivers', so nobody writes /proc/driver/tenstorrent/<N>/pids for
them. This does, from what the processes in the pods' cgroups really have open.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.e2e.machine import Machine
from tests.world.node import SimulatedNode

PAUSE = 0.05  # seconds between two looks
LOCKS = "/ttdp-locks"  # what a directory with common locks is called, in a machine


class Opener(NamedTuple):
    """A process of a pod that has a card's device file open."""

    host_pid: int
    pid: int  # in the machine
    pod: str  # its UID
    ordinal: int
    given: frozenset[str]  # PCI addresses that its environment names; none: nobody's answer
    locks: str  # the directory that is its /dev/shm, if it has one in common with others


class Openers:
    """Looks 20 times a second, while the context lasts, who has which device file open."""

    def __init__(self, machine: Machine, cards: SimulatedNode) -> None:
        self.now: list[Opener] = []
        self.violations: list[str] = []
        self.looks = 0
        self._machine = machine
        self._cards = cards
        self._links: set[int] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="openers", daemon=True)

    def __enter__(self) -> Openers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def of(self, pod: str) -> set[str]:
        """Return the addresses of the chips whose device files a pod had open at the last look."""
        addresses = {chip.ordinal: chip.bdf for chip in self._cards.chips}
        return {addresses[each.ordinal] for each in self.now if each.pod == pod}

    def _run(self) -> None:
        while not self._end.wait(PAUSE):
            # No device file comes or goes meanwhile.
            with self._cards.lock:
                self.now = [*self._look()]
                self._show(self.now)
                self._judge(self.now)
            self.looks += 1

    def _look(self) -> Iterator[Opener]:
        directory = self._cards.root / "dev/tenstorrent"
        ordinals = {os.stat(node).st_rdev: int(node.name) for node in directory.glob("[0-9]*")}

        for cgroup in self._machine.pod_cgroups():
            uid = re.search(r"/pod([0-9a-f-]{32,36})(/|$)", str(cgroup))
            assert uid is not None, cgroup
            with contextlib.suppress(OSError):  # it has just gone
                for pid in (cgroup / "cgroup.procs").read_text().split():
                    yield from _opened(int(pid), uid[1], ordinals)

    def _show(self, openers: Iterable[Opener]) -> None:
        """Let the daemon find them, where the driver's and the kernel's files would be."""
        processes = self._cards.root / "proc"
        pids = {each.pid for each in openers}
        for pid in self._links - pids:
            (processes / str(pid)).unlink()
        for pid in pids - self._links:
            (processes / str(pid)).symlink_to(f"/proc/{pid}")  # as the daemon sees it
        self._links = pids

        for chip in self._cards.chips:
            if chip.ordinal is None:
                continue
            file = processes / f"driver/tenstorrent/{chip.ordinal}/pids"
            theirs = [each.pid for each in openers if each.ordinal == chip.ordinal]
            if file.read_text().split() != [*map(str, theirs)]:
                chip.set_pids(theirs)

    def _judge(self, openers: Iterable[Opener]) -> None:
        given = [each for each in openers if each.given]
        met = _meetings(given)
        # One may have closed it while another's process was looked at.
        if met:
            met &= _meetings([each for each in self._look() if each.given])

        addresses = {chip.ordinal: chip.bdf for chip in self._cards.chips}
        for ordinal, *pods in met:
            self._accuse(f"pods {' and '.join(pods)} both have {addresses[ordinal]} open")

        for each in given:
            if addresses[each.ordinal] not in each.given:
                theirs = ", ".join(sorted(each.given))
                what = f"{addresses[each.ordinal]} open, and was given {theirs}"
                self._accuse(f"pod {each.pod} has {what}")

    def _accuse(self, what: str) -> None:
        if not any(what in said for said in self.violations):
            self.violations.append(f"{time.strftime('%H:%M:%S')} {what}")


def _opened(pid: int, pod: str, ordinals: dict[int, int]) -> Iterator[Opener]:
    """Yield a process once for each device file that it has open."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):  # it has just ended
        found = set()
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):
                number = os.stat(descriptor.path).st_rdev
                if number in ordinals:
                    found.add(ordinals[number])
        if not found:
            return

        # A process has a number here, one in the machine, and one in the container.
        numbers = re.findall(r"\nNSpid:(.*)\n", _read(process / "status"))[0].split()
        named = re.search(r"(?:^|\0)TT_DEVICE_PLUGIN_DEVICES=([^\0]+)", _read(process / "environ"))
        given = frozenset(named[1].split(",") if named else ())
        mounted = re.search(rf" \S*{LOCKS}(/\S+) /dev/shm ", _read(process / "mountinfo"))
        locks = mounted[1] if mounted else ""

        for ordinal in found:
            yield Opener(pid, int(numbers[1]), pod, ordinal, given, locks)


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _meetings(given: Iterable[Opener]) -> set[tuple[int, str, str]]:
    """Return which two pods have a device file open that they do not share."""
    found = set()
    for one, other in itertools.combinations(given, 2):
        fellows = one.locks != "" and one.locks == other.locks
        if one.ordinal == other.ordinal and one.pod != other.pod and not fellows:
            found.add((one.ordinal, min(one.pod, other.pod), max(one.pod, other.pod)))
    return found
