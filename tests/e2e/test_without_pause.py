"""One chip, one pod, with a runtime that has no pause process in a pod's cgroup, as CRI-O has none.

From the moment at which the first container may start until its first process exists, the pod's
cgroup is empty: a pod that starts looks like one that has ended.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from tests.e2e.bare_runc import BareRuntime
from tests.e2e.conftest import Told
from tests.e2e.machine import VERSIONS
from tests.e2e.node import Program
from tests.e2e.ward import LONG, P300, Pod, Ward
from tests.world.processes import wait_until

GRANTED = 60.0  # seconds that a pod has from an allowed start to its first process


class BareWard(Ward):
    """A node on which no pod has a pause process, and containers are made when a test wants it."""

    def __init__(self, version: str, program: Program) -> None:
        super().__init__(version, program)
        self.runtime = BareRuntime(self.machine.scratch / "runtime")
        self.containerd.runtime = self.runtime.program

    def deleted_before_its_first_process(self) -> Pod:
        """Return a pod, deleted by force, of which the runtime is just making the container."""
        self.runtime.hold()
        first = self.create(P300, stubborn=True)
        is_held = partial(self.runtime.is_held, first.name)
        wait_until(is_held, partial(self.why, first), LONG)
        self.runtime.hold_no_more()
        assert not self.machine.pod_processes(first.uid)

        self.force_delete(first)
        wait_until(lambda: not self.kubelet.get_pod(first.name), "the pod to be forgotten", LONG)
        return first

    def wait_waiting(self, holder: Pod) -> None:
        """Wait until a pod's start waits, or until it has its chip open, which must not be."""
        why = partial(self.why, holder)
        wait_until(lambda: self.waits() > 0 or self.opened(holder), why, LONG)

    def clear(self) -> None:
        self.runtime.release_all()
        super().clear()


@pytest.fixture(scope="module")
def wards(program: Program) -> Iterator[Mapping[str, BareWard]]:
    with contextlib.ExitStack() as stack:
        yield {version: stack.enter_context(BareWard(version, program)) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def ward(request: pytest.FixtureRequest, wards: Mapping[str, BareWard]) -> Iterator[BareWard]:
    """Return a node with two chips, of which a pod has one; no two pods may share the other."""
    found = wards[request.param]
    found.wait_clear()
    found.cards.add("p300c")
    found.serve()
    other = found.started(P300)
    assert not found.machine.pod_processes(other.uid) - found.processes(other)
    yield found
    try:
        found.assert_apart()
    finally:
        found.clear()


def test_a_pod_that_is_deleted_by_force_before_its_first_process(
    ward: BareWard, told: Told
) -> None:
    """The next container starts after the last process of a pod that had none when it was deleted.

    The runtime is making that pod's container, so it starts after all.
    """
    first = ward.deleted_before_its_first_process()
    second = ward.create(P300)
    ward.wait_waiting(second)

    ward.runtime.release(first.name)
    wait_until(lambda: ward.opened(first), partial(ward.why, first), LONG)
    last_seen = 0.0
    while ward.machine.pod_processes(first.uid):
        last_seen = time.monotonic()
        time.sleep(0.01)
    ended = time.monotonic()
    ward.wait_holds(second)
    started = ward.started_at(second)
    told(f"kubelet {ward.version}: started {started - ended:.2f} s after the last process")
    assert started > last_seen > 0


def test_a_pod_that_is_deleted_by_force_and_never_has_a_process(ward: BareWard, told: Told) -> None:
    """The next container waits until the cgroup of such a pod has gone, and no longer."""
    first = ward.deleted_before_its_first_process()
    held = time.monotonic()
    second = ward.create(P300)
    ward.wait_waiting(second)
    assert not ward.opened(second) and not ward.has_ended(first)

    ward.runtime.release(first.name, fail=True)
    ward.wait_ended(first)
    ended = time.monotonic()
    ward.wait_holds(second)
    started = ward.started_at(second)
    told(f"kubelet {ward.version}: started {started - ended:.2f} s after the cgroup was removed")
    assert started < held + GRANTED
