"""A book of holds with the files that it reads, in a directory, and a clock that a test holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ttdp
from tests.chips import bdf, chip
from tests.world.checkpoint import Entry, Held, Snapshot, replace
from ttdp import Call, Hold, HoldBook, HoldKey, HoldState, Mount, Settings

DOMAIN = "tenstorrent.com"
N150 = f"{DOMAIN}/n150"
FIRST = "0b6cd6e4-9fd5-4b5c-8d4e-4a3a5f6f2d61"  # a pod
ALWAYS = 200  # seconds after which nothing changes any more


def entry(
    *buses: int,
    pod: str = FIRST,
    container: str = "main",
    resource: str = N150,
    ids: Iterable[str] = (),
    directory: Path | None = None,
) -> Entry:
    """Return what the kubelet writes of an answer.

    Args: ids: the chips' addresses unless they are given; directory: of its hugepages.
    """
    chips = [chip(bus, ordinal=bus) for bus in buses or (1,)]
    mounts = [Mount(str(directory), "/dev/hugepages-1G")] if directory else []
    name = f"{chips[0].bdf}-{container}-{pod}"
    answer = ttdp.container_edits(chips, {}, Settings(), mounts, name)

    held = Held({-1: [*ids] or [each.bdf for each in chips]}, answer)
    return Entry(pod, container, resource, held)


class BookWorld:
    """A book of holds, and the checkpoint, the cgroups and the clock that a test gives it."""

    def __init__(self, home: Path, saved: Iterable[HoldState] = (), now: float = 1000.0) -> None:
        self.home = home
        self.now = now
        self.settings = Settings(device_plugin_dir=str(home), root=str(home))

        self.path = home / ttdp.CHECKPOINT
        self.cgroups = home / "sys/fs/cgroup"
        self.cgroups.mkdir(parents=True, exist_ok=True)
        (self.cgroups / "cgroup.controllers").touch()
        self.book = HoldBook(self.settings, saved)

    def restarted(self) -> BookWorld:
        """Return the world with the next daemon of this boot, and what that knows."""
        saved = json.loads(json.dumps(self.book.to_saved()))
        return BookWorld(self.home, [HoldState.from_saved(each) for each in saved], self.now)

    # The kubelet

    def answer(self, given: Entry) -> None:
        """Answer Allocate; the kubelet has not written it yet."""
        self.look()
        found = ttdp.read_answer(given.held.answer).of(given.resource, given.held.ids)
        self.book.add(found, self.now)

    def write(self, *entries: Entry, registered: Any = None) -> None:
        self.put(Snapshot([*entries], registered or {}).json())

    def put(self, content: bytes) -> None:
        """Replace the checkpoint, also by what no kubelet writes."""
        replace(self.path, content)

    # The pods' cgroups, of version 2

    def cgroup(self, pod: str) -> Path:
        return self.cgroups / f"kubepods/burstable/pod{pod}"

    def make_cgroup(self, pod: str = FIRST, *containers: str) -> None:
        """Give a pod a cgroup with processes in these containers, and in no others."""
        for name in containers:
            (self.cgroup(pod) / name).mkdir(parents=True, exist_ok=True)
            (self.cgroup(pod) / name / "cgroup.events").write_text("populated 1\n")

        self.cgroup(pod).mkdir(parents=True, exist_ok=True)
        for directory in self.cgroup(pod).iterdir():
            if directory.is_dir() and directory.name not in containers:
                shutil.rmtree(directory)

        # The kernel counts what the cgroups below have.
        (self.cgroup(pod) / "cgroup.events").write_text(f"populated {int(bool(containers))}\n")

    def remove_cgroup(self, pod: str = FIRST) -> None:
        shutil.rmtree(self.cgroup(pod), ignore_errors=True)

    # What the daemon sees

    def look(self) -> set[str]:
        """Look at everything; return the chips of the current holds."""
        self.book.refresh(self.now, DOMAIN, look=True)
        return {bdf for each in self.current() for bdf in each.chips}

    def current(self) -> tuple[Hold, ...]:
        return self.book.current(self.now)

    def keys(self) -> set[HoldKey]:
        """Return the current holds, as a question for pods' names has them."""
        return {each.key for each in self.current()}

    def running(self) -> set[str]:
        """Return the pods for which a stranger's container would wait."""
        stranger = Call("example.com/any", frozenset(), frozenset(map(bdf, range(9))), ())
        return {each.pod for each in self.book.waits_for(stranger, self.current())}

    def seconds(self, holds: Callable[[], object]) -> float:
        """Return for how long this holds, looking each second; at most ALWAYS."""
        began = self.now
        self.look()
        while holds() and self.now < began + ALWAYS:
            self.now += 1
            self.look()
        return self.now - began

    def call(self, given: Entry) -> Call:
        """PreStartContainer comes for a container."""
        self.look()
        ids = frozenset(given.held.ids)
        chips = ttdp.read_answer(given.held.answer).chips
        return self.book.call(given.resource, ids, chips, self.now)

    def outcome(self, call: Call) -> str | set[str]:
        """Return what becomes of a call now: the pods for which it waits, if it does."""
        self.look()
        if self.book.was_deleted(call, self.now):
            return "refused"

        if others := self.book.waits_for(call, self.current()):
            return {each.pod for each in others}

        self.book.allow(call, self.now)
        return "allowed"

    def start(self, given: Entry) -> str | set[str]:
        return self.outcome(self.call(given))

    def run(self, given: Entry) -> None:
        """Answer for a pod that is the only one in the checkpoint then, and run its container."""
        self.answer(given)
        self.write(given)
        self.make_cgroup(given.uid, "pause")

        self.start(given)
        self.make_cgroup(given.uid, "pause", given.container)
