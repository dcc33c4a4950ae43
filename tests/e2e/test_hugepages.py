"""Private hugepages on real kubelets: a hugetlbfs, and containers that use it as tt-umd does.

The pages are of 2 MiB, because every kernel can make some at any time. The daemon treats both
sizes alike.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.machine import CACHE, JSON, VERSIONS
from tests.e2e.node import Program
from tests.e2e.ward import HOLD, LONG, P300, Pod, Ward
from tests.world.processes import wait_until

PAGES = 16
RETURN = 60.0  # seconds after which pages of a pod that has ended are free
INSIDE = "/dev/hugepages"
# Tells which files there are, maps a page of one, and opens the devices.
PAGE = f"""
for file in $(ls -A {INSIDE}); do echo "file $file"; done
like_umd page {INSIDE}/tenstorrent &
{HOLD}
"""


class Pages(Ward):
    """A node with two chips and a hugetlbfs, and pods that map a page of it."""

    def create_page(self, *, user: int | None = None, stubborn: bool = False) -> Pod:
        """Create a pod whose container maps a page, as this user."""
        return self.create(P300, stubborn=stubborn, script=PAGE, change=_as_user(user))

    def wait_page(self, holder: Pod) -> list[str]:
        """Wait until a pod has a page; return all that it has written about files and pages."""
        wait_until(partial(self.kubelet.running, holder.name), partial(self.why, holder), LONG)

        def written() -> list[str] | None:
            log = self.kubelet.logs(holder.name).splitlines()
            lines = [line.split(" ", 3)[3] for line in log]
            return lines if lines and lines[-1] == "page is mapped" else None

        why = partial(self.why, holder)
        return wait_until(written, lambda: f"{self.kubelet.logs(holder.name)}\n{why()}", LONG)

    def directories(self) -> list[Path]:
        """Return the daemon's directories, of which each container has one."""
        return sorted(self.hugetlbfs("tt-device-plugin").iterdir())

    def wait_directories(self, count: int) -> None:
        """Wait until those of former pods are gone: their answers are current for 30 s."""
        wait_until(
            lambda: len(self.directories()) == count,
            lambda: f"{count} directories, not {self.directories()}",
            LONG,
        )

    def wait_free(self, count: int) -> None:
        """Wait until this many pages are free: those of a pod that has ended return."""
        wait_until(
            lambda: self.free_hugepages() == count,
            lambda: f"{count} free pages, not {self.free_hugepages()}",
            RETURN,
        )


def _as_user(user: int | None) -> Callable[[JSON], None]:
    def change(spec: JSON) -> None:
        if user is not None:
            spec["securityContext"] = {"runAsUser": user, "runAsGroup": user}

    return change


@contextlib.contextmanager
def reserved(count: int) -> Iterator[None]:
    """Let the kernel have pages of 2 MiB; one test run at a time, as they belong to all."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "hugepages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = setting.read_text()
        setting.write_text(str(int(before) + count))
        try:
            found = int(setting.read_text()) - int(before)
            if found < count:
                pytest.skip(f"NOT RUN: the kernel has memory for {found} hugepages only")
            yield
        finally:
            setting.write_text(before)


@pytest.fixture(scope="module")
def pages_ward(program: Program) -> Iterator[Pages]:
    """A node with the oldest kubelet; test_cgroup2.py has the newest."""
    # Before the kubelet starts: it counts them only then.
    with reserved(PAGES), Pages(VERSIONS[0], program) as found:
        yield found


@pytest.fixture
def ward(pages_ward: Pages) -> Iterator[Pages]:
    pages_ward.wait_clear()
    pages_ward.cards.add("p300c")
    pages_ward.set_hugepages(PAGES)
    pages_ward.serve()
    yield pages_ward
    try:
        pages_ward.assert_apart()
    finally:
        pages_ward.clear()


def test_a_killed_pods_page_returns_to_the_node(ward: Pages) -> None:
    """Within a minute of its end, without a successor; the pod was killed with the page mapped."""
    holder = ward.create_page(stubborn=True)
    assert ward.wait_page(holder) == ["clean page", "page is mapped"]
    assert ward.free_hugepages() == PAGES - 1
    ward.force_delete(holder)
    ward.wait_ended(holder)
    ward.wait_free(PAGES)


def test_a_killed_pods_successor_finds_no_page(ward: Pages) -> None:
    """Its container starts after the former pod's last process, with an empty directory."""
    other = ward.started(P300)
    former = ward.create_page(stubborn=True)
    ward.wait_page(former)
    ward.force_delete(former)
    successor = ward.create_page()
    assert ward.wait_page(successor) == ["clean page", "page is mapped"]
    assert ward.free_hugepages() == PAGES - 1
    assert ward.opened(other)


def test_a_reboot(ward: Pages) -> None:
    """The directory is there again when the container starts, and empty."""
    holder = ward.create_page(user=1000)
    ward.wait_page(holder)
    ward.wait_directories(1)
    ward.reboot()
    ward.wait_holds(holder)
    assert ward.wait_page(holder)[2:] == ["clean page", "page is mapped"]


def _with_volume(volume: JSON) -> Callable[[JSON], None]:
    def change(spec: JSON) -> None:
        spec["volumes"] = [{"name": "pages", **volume}]
        (main,) = spec["containers"]
        main["volumeMounts"] = [{"name": "pages", "mountPath": INSIDE}]
        if "emptyDir" in volume:
            more = {"hugepages-2Mi": "4Mi", "memory": "64Mi"}
            main["resources"]["limits"] |= more
            main["resources"]["requests"] |= more

    return change


@pytest.mark.parametrize("kind", ["emptyDir", "hostPath"])
def test_a_pods_own_volume_wins(ward: Pages, kind: str) -> None:
    """A pod that mounts something at that path itself has that, and the daemon's stays empty."""
    ward.hugetlbfs("of-the-pod").mkdir()
    host = f"{ward.cards.root}/dev/hugepages/of-the-pod"
    volume = {"emptyDir": {"medium": "HugePages"}, "hostPath": {"path": host}}[kind]
    holder = ward.create(P300, script=PAGE, change=_with_volume({kind: volume}))
    assert ward.wait_page(holder) == ["clean page", "page is mapped"]
    ward.wait_directories(1)
    assert [*ward.directories()[0].iterdir()] == []
    theirs = [each.name for each in ward.hugetlbfs("of-the-pod").iterdir()]
    assert theirs == ([] if kind == "emptyDir" else ["tenstorrent"])
