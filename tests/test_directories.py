"""Directories for hugepages and locks: they exist while a current hold names them.

Which directory an answer names is in tests.test_holds_explored.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon, polls
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import HUGEPAGES_MODE, Directories, Mount, Settings, SharedResource, Sharing

N150 = "tenstorrent.com/n150"
HUGETLBFS = ("hugepages-1G", "hugepages")
PAGES = [f"device_0_channel_{number}_tenstorrent" for number in range(4)]  # as tt-umd names them
SHARED = (SharedResource("n150", 4),)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root, for another user")
OTHER = 1000  # a user


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    node.set_hugepages(4)
    return node


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def around(node: SimulatedNode, hugetlbfs: str = HUGETLBFS[0]) -> Path:
    """The daemon's own directory in a hugetlbfs."""
    return node.root / "dev" / hugetlbfs / ttdp.OWN_DIRECTORY


def mounts(kubelet: Kubelet, pod: str) -> dict[str, Path]:
    """The host paths of a pod's mounts, by their path in the container."""
    found = kubelet.allocation(pod, "main").mounts
    return {mount.container_path: Path(mount.host_path) for mount in found}


async def run(kubelet: Kubelet, pod: str) -> Path:
    """Run a pod; return its directory of 1 GiB pages."""
    await kubelet.run_pod(pod, N150)
    return mounts(kubelet, pod)["/dev/hugepages-1G"]


def leave_pages(directory: Path) -> None:
    """A pod that was killed leaves its files, with the node's pages."""
    for name in PAGES:
        (directory / name).touch()


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- which directories a container gets ------------------------------------------------------------


async def test_each_container_has_directories_of_its_own(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """One in each hugetlbfs: root's, 0777 and not sticky, in one that only root enters."""
    node.add("n150")
    await start()
    await run(kubelet, "one")
    await run(kubelet, "two")

    for hugetlbfs in HUGETLBFS:
        one, two = (mounts(kubelet, pod)[f"/dev/{hugetlbfs}"] for pod in ("one", "two"))
        assert one != two and one.parent == two.parent == around(node, hugetlbfs)
        assert mode_of(one) == mode_of(two) == 0o777 and mode_of(one.parent) == 0o700


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"mounts": (Mount("/srv", "/models"), Mount("/mine", "/dev/hugepages"))},
            {"/models": "/srv", "/dev/hugepages": "/mine", "/dev/hugepages-1G": "OWN"},
        ),
        ({"hugepages": "host"}, {f"/dev/{name}": f"ROOT/dev/{name}" for name in HUGETLBFS}),
        ({"hugepages": "none"}, {}),
        ({"device_list_strategy": "cdi", "mounts": (Mount("/m", "/m"),)}, {}),
        ({"device_list_strategy": "cdi", "sharing": True}, {"/dev/shm": "LOCKS"}),
    ],
    ids=["configured mounts", "host", "none", "cdi", "cdi, shared"],
)
async def test_a_container_has_the_mounts_of_its_mode(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path,
    settings: dict[str, Any], expected: dict[str, str],
) -> None:  # fmt: skip
    """With CDI they are in the one file that is for all; only locks depend on the resource."""
    (short_tmp / "cdi").mkdir()
    if "sharing" in settings:
        settings = settings | {"sharing": Sharing(lock_dir=str(short_tmp), resources=SHARED)}
    await start(**settings)
    await kubelet.registered(N150)
    await kubelet.admit("pod", "main", {N150: 1})

    found = {}
    for inside, path in mounts(kubelet, "pod").items():
        text = "OWN" if path.parent == around(node) else str(path).replace(str(node.root), "ROOT")
        found[inside] = text.replace(f"{short_tmp}/{ttdp.OWN_DIRECTORY}/n150", "LOCKS")
    assert found == expected
    assert around(node).exists() is ("OWN" in expected.values())


async def test_a_hugetlbfs_that_cannot_be_written_is_left_out_and_refuses_no_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """DPDK's and libvirt's belong to others. Status and check have path and reason."""
    around(node).touch()
    daemon = await start()
    await kubelet.run_pod("pod", N150)
    assert [*mounts(kubelet, "pod")] == ["/dev/hugepages"]

    await until(lambda: f"{around(node)}: Not a directory" in daemon.status)
    (problem,) = daemon.problems
    assert (problem.level, problem.subject) == ("FAIL", "directories")

    around(node).unlink()
    await until(lambda: "Not a directory" not in daemon.status)


@needs_root
def test_another_users_directory_or_a_link_is_not_used(tmp_path: Path) -> None:
    """A container that has the host's hugetlbfs could have put it there."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "theirs").mkdir(parents=True)
    own = tmp_path / "dev/hugepages" / ttdp.OWN_DIRECTORY
    own.parent.mkdir(parents=True)
    settings = Settings(root=str(tmp_path))

    own.symlink_to(elsewhere)
    assert not Directories().make_for_hugepages("one", settings)

    own.unlink()
    own.mkdir()
    os.chown(own, OTHER, OTHER)
    assert not Directories().make_for_hugepages("one", settings)
    assert names_in(elsewhere) == ["theirs"]


async def test_without_its_directory_for_locks_a_pod_is_refused_with_path_and_reason(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Containers that do not take turns would break each other's work. The status has it, too."""
    lock_dir = short_tmp / "missing"
    daemon = await start(sharing=Sharing(lock_dir=str(lock_dir), resources=SHARED))
    await kubelet.registered(N150)
    problem = f"{lock_dir}/{ttdp.OWN_DIRECTORY}: No such file or directory"
    await until(lambda: problem in daemon.status)
    with pytest.raises(AdmissionError, match=f"No such file or directory: '{lock_dir}"):
        await kubelet.admit("one", "main", {N150: 1})

    lock_dir.mkdir()
    await kubelet.admit("two", "main", {N150: 1})
    await until(lambda: problem not in daemon.status)


# -- a directory exists while a current hold names it ----------------------------------------------


async def test_a_directory_goes_with_its_pod_and_the_next_one_begins_with_an_empty_one(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Its pages are free before the successor's container starts; else it goes at a poll."""
    daemon = await start(interval=3600)
    former = await run(kubelet, "one")
    leave_pages(former)

    kubelet.delete("one")
    own = await run(kubelet, "two")
    await until(lambda: not former.exists())
    assert names_in(own) == []

    await kubelet.remove_pod("two")
    daemon.reload(health=ttdp.HealthSettings(interval=0.1))
    await until(lambda: not own.exists())


async def test_a_directory_is_there_before_the_kubelet_starts_and_if_somebody_has_removed_it(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Whatever the configuration says by now. A runtime would make it 0755, for root alone."""
    daemon = await start()
    own = await run(kubelet, "train")

    # hugetlbfs is empty after a boot. The kubelet starts when the daemon is ready.
    await kubelet.power_cut()
    await daemon.stop()
    for hugetlbfs in HUGETLBFS:
        shutil.rmtree(around(node, hugetlbfs))

    settings = settings_of(node, directory, hugepages="none", interval=0.1)
    async with RunningDaemon(node, settings) as booted:
        await booted.ready()
        assert mode_of(own) == 0o777
        await kubelet.start()
        await kubelet.running("train", "main")

        own.rmdir()
        await until(lambda: own.exists() and mode_of(own) == 0o777)


async def test_a_containers_own_files_stay_when_it_starts_again(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """After a restart of the daemon, too. Nothing is removed before it has read a checkpoint."""
    daemon = await start(interval=0.1)
    own = await run(kubelet, "train")
    leave_pages(own)
    former = around(node) / "former"

    await daemon.stop()
    await kubelet.kill()
    whole = kubelet.file.path.read_bytes()
    kubelet.corrupt("missing")
    former.mkdir()
    daemon = await start(interval=0.1)
    await polls(daemon)
    assert former.exists() and names_in(own) == PAGES

    kubelet.corrupt(whole)
    await until(lambda: not former.exists())
    await kubelet.start()
    await kubelet.registered(N150)
    restarted = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=restarted))
    assert names_in(own) == PAGES


async def test_containers_that_share_a_device_have_one_directory_and_common_locks(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Both are there until the last of them has ended."""
    daemon = await start(interval=0.1, sharing=Sharing(lock_dir=str(short_tmp), resources=SHARED))
    shared = await run(kubelet, "one")
    locks = mounts(kubelet, "one")["/dev/shm"]
    leave_pages(shared)
    (locks / "lock").touch()
    assert locks == short_tmp / ttdp.OWN_DIRECTORY / "n150"
    assert mode_of(locks) == 0o1777 and mode_of(locks.parent) == 0o700

    assert await run(kubelet, "two") == shared
    assert mounts(kubelet, "two")["/dev/shm"] == locks
    await kubelet.remove_pod("one")
    await polls(daemon)
    assert names_in(shared) == PAGES and names_in(locks) == ["lock"]

    await kubelet.remove_pod("two")
    await until(lambda: not shared.exists() and not locks.exists())


# -- removal ---------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The daemon's own directory in a hugetlbfs."""
    path = tmp_path / "dev/hugepages-1G" / ttdp.OWN_DIRECTORY
    path.parent.mkdir(parents=True)
    path.mkdir(0o700)
    return path


async def removed(own: Path, *named: Path) -> Directories:
    """Remove all that is not named, and wait until it has gone."""
    directories = Directories()
    settings = Settings(root=str(own.parents[2]), sharing=Sharing(lock_dir=""))
    directories.remove_unnamed({*map(str, named)}, settings)
    await directories.removed(PATIENCE)
    return directories


def make_deep(path: Path) -> None:
    """A tree that is deeper than a path can be long."""
    path.mkdir()
    for _ in range(600):
        outer = path.with_name("outer")
        outer.mkdir()
        path.rename(outer / "subdirectory")
        outer.rename(path)


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        make_deep,
        lambda path: path.symlink_to(path.parents[2]),
        lambda path: path.with_name("-rf").mkdir(),
    ],
    ids=["file", "deep", "link", "option"],
)
async def test_what_is_not_named_is_removed_whatever_it_is(
    own: Path, make: Callable[[Path], object]
) -> None:
    named, elsewhere = own / "named", own.parents[1] / "elsewhere"
    for path in (named, elsewhere):
        path.mkdir()
        (path / "file").touch()
    make(own / "x")

    directories = await removed(own, named)

    assert names_in(own) == ["named"] and directories.unremoved is None
    assert (named / "file").exists() and (elsewhere / "file").exists()


@needs_root
async def test_what_resists_is_a_problem_until_it_has_gone(own: Path) -> None:
    """What lies beside it is removed."""
    for name in ("closed", "open"):
        (own / name / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", own / "closed/inner"], check=True)
    (own / "closed/inner/file").touch()
    try:
        for _ in range(2):
            directories = await removed(own)
            [left] = own.iterdir()
            assert directories.unremoved and str(left) in str(directories.unremoved)
        assert (left / "inner/file").exists()
    finally:
        subprocess.run(["umount", *own.glob(".closed-*/inner")], check=True)

    assert (await removed(own)).unremoved is None
    assert names_in(own) == []


async def test_a_directory_that_is_needed_again_during_a_removal_stays(own: Path) -> None:
    """A shared device's locks always have the same name."""
    (own / "n300").mkdir()
    directories, settings = Directories(), Settings(root=str(own.parents[2]))
    directories.remove_unnamed((), settings)
    ttdp.make_directory(str(own / "n300"), ttdp.LOCKS_MODE)

    await directories.removed(PATIENCE)
    assert names_in(own) == ["n300"]


async def test_a_start_waits_for_a_removal_but_not_for_long(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the loop goes on, and no second removal begins meanwhile."""
    slow = own.parents[1] / "rm"
    slow.write_text(f"#!/bin/sh\necho >>{slow}.runs; exec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    (own / "x").mkdir()
    directories, settings = Directories(), Settings(root=str(own.parents[2]))

    for _ in range(2):
        directories.remove_unnamed((), settings)
        await directories.removed(0.2)
    await until(Path(f"{slow}.runs").exists)
    assert Path(f"{slow}.runs").read_text() == "\n"


def test_a_directory_is_made_only_where_the_daemon_has_its_own(tmp_path: Path) -> None:
    """hugetlbfs is not mounted there any more, or a hold is that of a daemon with another root."""
    (tmp_path / "dev/hugepages").mkdir(parents=True)
    settings = Settings(root=str(tmp_path), hugepages="none", sharing=Sharing(lock_dir=""))
    here = tmp_path / "dev/hugepages" / ttdp.OWN_DIRECTORY / "one"
    there = tmp_path / "other" / ttdp.OWN_DIRECTORY / "one"
    there.parents[1].mkdir()

    Directories().make_missing([str(here), str(there)], settings)

    assert mode_of(here) == HUGEPAGES_MODE and not there.parent.exists()
