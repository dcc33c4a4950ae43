"""A book of holds with the files that it reads, in a directory, and a clock that a test holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import ttdp
from tests.chips import chip
from tests.world.checkpoint import Entry, Snapshot, replace
from ttdp import Call, Hold, HoldBook, Mount, RequestError, SavedHolds, Settings

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
    chips = [chip(bus, number=bus) for bus in buses or (1,)]
    mounts = [Mount(str(directory), "/dev/hugepages-1G")] if directory else []
    token = f"{chips[0].address}-{container}-{pod}"
    answer = ttdp.container_edits(chips, {}, Settings(), mounts, token)

    given = [*ids] or [each.address for each in chips]
    return Entry(pod, container, resource, {-1: given}, answer)


class BookWorld:
    """A book of holds, and the checkpoint, the cgroups and the clock that a test gives it.

    A kubelet has been connected for a long time, unless `connected` says otherwise.
    """

    def __init__(
        self,
        home: Path,
        saved: SavedHolds = SavedHolds(),  # noqa: B008
        now: float = 1000.0,
        *,
        connected: float | None = ALWAYS,
    ) -> None:
        """connected: seconds for which a kubelet has been connected; None: there is none."""
        self.home = home
        self.now = now
        self.settings = Settings(device_plugin_dir=str(home), root=str(home))

        self.path = home / ttdp.CHECKPOINT
        self.cgroups = home / "sys/fs/cgroup"
        (self.cgroups / "kubepods/burstable").mkdir(parents=True, exist_ok=True)
        (self.cgroups / "cgroup.controllers").touch()
        self.book = HoldBook(self.settings, saved)
        if connected is not None:
            self.book.note_stream(now - connected, is_open=True)

    # The kubelet

    def answer(self, given: Entry) -> None:
        """Answer Allocate; the kubelet has not written it yet."""
        self.look()
        found = ttdp.hold_of(given.answer, given.resource, frozenset(given.ids))
        self.book.add(found, self.now)

    def write(self, *entries: Entry) -> None:
        replace(self.path, Snapshot([*entries], {}).json())

    # The pods' cgroups, of version 2

    def cgroup(self, pod: str) -> Path:
        return self.cgroups / f"kubepods/burstable/pod{pod}"

    def make_cgroup(self, pod: str = FIRST, *, populated: bool = True) -> None:
        """Give a pod a cgroup, with processes or without."""
        self.cgroup(pod).mkdir(parents=True, exist_ok=True)
        (self.cgroup(pod) / "cgroup.events").write_text(f"populated {int(populated)}\n")

    def remove_cgroup(self, pod: str = FIRST) -> None:
        shutil.rmtree(self.cgroup(pod), ignore_errors=True)

    # What the daemon sees

    def look(self) -> set[str]:
        """Look at everything; return the chips of the current holds."""
        self.book.refresh(self.now, look=True)
        return {address for each in self.current() for address in each.chips}

    def current(self) -> list[Hold]:
        return self.book.current(self.now)

    def runs(self, pod: str = FIRST) -> bool:
        """Return whether a stranger's container would wait for a pod."""
        self.look()
        return self.book.runs(pod, self.now)

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
        call = Call(given.resource, frozenset(given.ids), self.now)
        with suppress(RequestError):  # outcome() has it again
            self.book.blockers(call, self.now)
        return call

    def outcome(self, call: Call) -> str | set[str]:
        """Return what becomes of a call now: the pods for which it waits, if it does."""
        self.look()
        try:
            blockers = self.book.blockers(call, self.now)
        except RequestError:
            return "refused"
        if blockers is None:
            return "unknown"
        if blockers:
            return {each.pod for each in blockers}

        self.book.allow(call, self.now)
        return "allowed"

    def start(self, given: Entry) -> str | set[str]:
        return self.outcome(self.call(given))

    def run(self, given: Entry) -> None:
        """Answer for a pod that is the only one in the checkpoint then, and run its container."""
        self.answer(given)
        self.write(given)
        self.make_cgroup(given.uid)
        assert self.start(given) == "allowed"
