"""Private hugepages on real kubelets: a hugetlbfs, and containers that use it as tt-umd does.

The pages are of 2 MiB, because every kernel can make some at any time. The daemon treats both
sizes alike.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.node import NodePod
from tests.e2e.watchednode import HOLD, ONE, WatchedNode, holding
from tests.world.processes import wait_until

PAGES = 16
INSIDE = "/dev/hugepages"
# Tells which files there are, maps a page of one, and opens the devices.
PAGE = f"""
for file in $(ls -A {INSIDE}); do echo "file $file"; done
like_umd page {INSIDE}/tenstorrent &
{HOLD}
"""
FIRST_PAGE = ["clean page", "page is mapped"]  # what that writes if there are no files


class HugepagesNode(WatchedNode):
    """A node with two cards and a hugetlbfs, and pods that map a page of it."""

    def create(self, *_: Any, **others: Any) -> NodePod:
        """Create a pod whose container maps a page; others: of holding()."""
        return self.add(holding(ONE, script=PAGE, **others))

    def power_on(self) -> None:
        super().power_on()
        place = self.cards.root / INSIDE[1:]
        place.mkdir(parents=True, exist_ok=True)
        options = f"pagesize=2M,size={2 * PAGES}M"
        self.machine.mount("-t", "hugetlbfs", "-o", options, "none", str(place))

    def free(self) -> int:
        """Return how many pages no file has."""
        hugetlbfs = self.machine.root.joinpath(str(self.cards.root)[1:], INSIDE[1:])
        return os.statvfs(hugetlbfs).f_bfree


def wait_page(pod: NodePod) -> list[str]:
    """Wait until a pod has mapped a page; return all that it has written."""
    wait_until(lambda: "page is mapped" in pod.output(), pod.why)
    return pod.output()


@contextlib.contextmanager
def reserved(count: int) -> Iterator[None]:
    """Let the kernel have pages of 2 MiB; one test run at a time, as they belong to all."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    with Path("/run/ttdp-e2e-hugepages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        usual = int(setting.read_text())
        setting.write_text(str(usual + count))
        try:
            found = int(setting.read_text()) - usual
            if found < count:
                pytest.skip(f"NOT RUN: the kernel has memory for {found} hugepages only")
            yield
        finally:
            setting.write_text(str(usual))


@pytest.fixture
def node(tools: None) -> Iterator[HugepagesNode]:
    """A node with the oldest kubelet."""
    # Before the kubelet starts: it counts them only then.
    with reserved(PAGES), HugepagesNode(VERSIONS[0]) as node:
        node.serve()
        yield node


def test_a_killed_pods_page_returns_to_the_node(node: HugepagesNode) -> None:
    """Within a minute of its end, without a successor; the pod was killed with the page mapped."""
    pod = node.create(stubborn=True)
    assert wait_page(pod) == FIRST_PAGE
    assert node.free() == PAGES - 1

    pod.force_delete()
    pod.wait_ended()

    wait_until(lambda: node.free() == PAGES, lambda: f"{PAGES} free pages, not {node.free()}")


def test_a_killed_pods_successor_finds_no_page(node: HugepagesNode) -> None:
    """Its container starts after the former pod's last process, with an empty directory."""
    others = [node.add(holding(ONE)) for _ in range(3)]
    node.wait_holds(*others)
    former = node.create(stubborn=True)
    wait_page(former)

    former.force_delete()
    successor = node.create()

    assert wait_page(successor) == FIRST_PAGE
    assert node.free() == PAGES - 1
    assert all(map(node.opened, others))
