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
from tests.conftest import StartDaemon, kubelet_of, needs_root, polls
from tests.world.kubelet import AdmissionError, Event, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import Directories, Mount, Settings, SharedResource, Sharing

N150 = "tenstorrent.com/n150"
PAGES = "device_0_channel_0_tenstorrent"  # as tt-umd names them
SHARED = (SharedResource("n150", 4),)


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    node.set_hugepages(4)
    return node


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def around(node: SimulatedNode, hugetlbfs: str = "hugepages-1G") -> Path:
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


def use_rm(home: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rm be this shell command."""
    (home / "rm").write_text(f"#!/bin/sh\n{command}\n")
    (home / "rm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")


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

    for hugetlbfs in ttdp.HUGETLBFS:
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
        ({"hugepages": "host"}, {f"/dev/{name}": f"ROOT/dev/{name}" for name in ttdp.HUGETLBFS}),
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


# -- a directory exists while a current hold names it ----------------------------------------------


async def test_a_directory_goes_with_its_pod_before_the_next_one_starts_or_at_a_poll(
    node: SimulatedNode, directory: Path, start: StartDaemon, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """So the successor finds the node's pages free, and an empty directory."""
    use_rm(tmp_path, 'sleep 0.2; exec /bin/rm "$@"', monkeypatch)
    monkeypatch.setattr(ttdp, "REMOVED_WITHIN", PATIENCE)
    found: list[list[str]] = []

    def look(event: Event) -> None:
        if event.kind == "prestart":
            found.append(names_in(around(node)))

    async with kubelet_of(node, directory, on_event=look) as kubelet:
        daemon = await start(interval=3600)
        former = await run(kubelet, "one")
        (former / PAGES).touch()

        kubelet.delete("one")
        own = await run(kubelet, "two")
        assert found == [[former.name], [own.name]] and names_in(own) == []

        await kubelet.remove_pod("two")
        daemon.reload(health=ttdp.HealthSettings(interval=0.1))
        await until(lambda: not own.exists())


async def test_a_directory_is_there_while_no_checkpoint_has_named_it_yet(
    kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    daemon = await start(interval=0.1)
    await kubelet.registered(N150)
    await kubelet.manager.write_checkpoint()
    await until(lambda: daemon.host.holds.has_read)

    kubelet.file.path = directory.with_name("late")
    await kubelet.admit("train", "main", {N150: 1})
    await polls(daemon)
    assert mounts(kubelet, "train")["/dev/hugepages-1G"].exists()

    kubelet.file.path.rename(directory / ttdp.CHECKPOINT)
    await kubelet.running("train", "main")


async def test_a_directory_is_there_before_the_kubelet_starts_and_if_somebody_has_removed_it(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Whatever the configuration says by now. A runtime would make it 0755, for root alone."""
    daemon = await start()
    own = await run(kubelet, "train")

    # hugetlbfs is empty after a boot. The kubelet starts when the daemon is ready.
    await kubelet.power_cut()
    await daemon.stop()
    for hugetlbfs in ttdp.HUGETLBFS:
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
    (own / PAGES).touch()
    former = around(node) / "former"

    await daemon.stop()
    await kubelet.kill()
    whole = kubelet.file.path.read_bytes()
    kubelet.corrupt("missing")
    former.mkdir()
    daemon = await start(interval=0.1)
    await polls(daemon)
    assert former.exists() and names_in(own) == [PAGES]

    kubelet.file.path.write_bytes(whole)
    await until(lambda: not former.exists())
    await kubelet.start()
    await kubelet.registered(N150)
    restarted = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=restarted))
    assert names_in(own) == [PAGES]


async def test_containers_that_share_a_device_have_one_directory_and_common_locks(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Both are there until the last of them has ended."""
    daemon = await start(interval=0.1, sharing=Sharing(lock_dir=str(short_tmp), resources=SHARED))
    shared = await run(kubelet, "one")
    locks = mounts(kubelet, "one")["/dev/shm"]
    (shared / PAGES).touch()
    (locks / "lock").touch()
    assert locks == short_tmp / ttdp.OWN_DIRECTORY / "n150"
    assert mode_of(locks) == 0o1777 and mode_of(locks.parent) == 0o700

    assert await run(kubelet, "two") == shared
    assert mounts(kubelet, "two")["/dev/shm"] == locks
    await kubelet.remove_pod("one")
    await polls(daemon)
    assert names_in(shared) == [PAGES] and names_in(locks) == ["lock"]

    await kubelet.remove_pod("two")
    await until(lambda: not shared.exists() and not locks.exists())


# -- one daemon's directories, without the daemon --------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The daemon's own directory in a hugetlbfs."""
    path = tmp_path / "dev/hugepages-1G" / ttdp.OWN_DIRECTORY
    path.parent.mkdir(parents=True)
    path.mkdir(0o700)
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(root=str(tmp_path), sharing=Sharing(lock_dir=""))


async def removed(settings: Settings, *named: Path) -> Directories:
    """Remove all that is not named, and wait until it has gone."""
    directories = Directories()
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


@needs_root
def test_another_users_directory_or_a_link_is_not_used(own: Path, settings: Settings) -> None:
    """A container that has the host's hugetlbfs could have put it there."""
    os.chown(own, 1000, 1000)
    assert not Directories().make_for_hugepages("one", settings)

    elsewhere = own.with_name("elsewhere")
    own.rename(elsewhere)
    os.chown(elsewhere, 0, 0)
    own.symlink_to(elsewhere)
    assert not Directories().make_for_hugepages("one", settings)
    assert names_in(elsewhere) == []


def test_a_directory_is_made_only_where_the_daemon_has_its_own(
    own: Path, settings: Settings
) -> None:
    """hugetlbfs is not mounted there any more, or a hold is that of a daemon with another root."""
    there = own.parents[2] / "other" / ttdp.OWN_DIRECTORY / "one"
    there.parents[1].mkdir()

    Directories().make_missing([str(own / "one"), str(there)], settings)

    assert mode_of(own / "one") == 0o777 and not there.parent.exists()


@pytest.mark.parametrize(
    "make",
    [
        Path.touch,
        make_deep,
        lambda path: path.symlink_to(path.parents[2]),
    ],
    ids=["file", "deep", "link"],
)
async def test_what_is_not_named_is_removed_whatever_it_is(
    own: Path, settings: Settings, make: Callable[[Path], object]
) -> None:
    named, elsewhere = own / "named", own.parents[1] / "elsewhere"
    for path in (named, elsewhere):
        path.mkdir()
        (path / "file").touch()
    make(own / "x")

    directories = await removed(settings, named)

    assert names_in(own) == ["named"] and directories.unremoved is None
    assert (named / "file").exists() and (elsewhere / "file").exists()


@needs_root
async def test_what_resists_is_a_problem_until_it_has_gone(own: Path, settings: Settings) -> None:
    """What lies beside it is removed."""
    for name in ("closed", "open"):
        (own / name / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", own / "closed/inner"], check=True)
    (own / "closed/inner/file").touch()
    try:
        for _ in range(2):
            directories = await removed(settings)
            [left] = own.iterdir()
            assert directories.unremoved and str(left) in str(directories.unremoved)
        assert (left / "inner/file").exists()
    finally:
        subprocess.run(["umount", *own.glob("*closed*/inner")], check=True)

    assert (await removed(settings)).unremoved is None
    assert names_in(own) == []


async def test_a_directory_that_is_needed_again_during_a_removal_stays(
    own: Path, settings: Settings
) -> None:
    """A shared device's locks always have the same name."""
    (own / "n300").mkdir()
    directories = Directories()
    directories.remove_unnamed((), settings)
    ttdp.make_directory(str(own / "n300"), ttdp.LOCKS_MODE)

    await directories.removed(PATIENCE)
    assert names_in(own) == ["n300"]


async def test_a_start_waits_for_a_removal_but_not_for_long(
    own: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the loop goes on, and no second removal begins meanwhile."""
    runs = own.parents[1] / "runs"
    use_rm(own.parents[1], f"echo >>{runs}; exec sleep 60", monkeypatch)
    (own / "x").mkdir()
    directories = Directories()

    for _ in range(2):
        directories.remove_unnamed((), settings)
        await directories.removed(0.2)
    await until(runs.exists)
    assert runs.read_text() == "\n"
