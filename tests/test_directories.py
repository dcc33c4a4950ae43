"""Directories for hugepages and locks: they exist while a current hold names them."""

from __future__ import annotations

import asyncio
import errno
import functools
import itertools
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.chips import bdf, chip, decide, hold
from tests.conftest import StartDaemon, client, half_a_minute_later, polls
from tests.world.book import BookWorld, entry
from tests.world.checkpoint import Entry
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import (
    Directories,
    Hold,
    Mount,
    OutOfSteps,
    RemovalSteps,
    Settings,
    SharedResource,
    Sharing,
)

DOMAIN = "tenstorrent.com"
N150 = f"{DOMAIN}/n150"
HUGETLBFS = ("hugepages-1G", "hugepages")
PAGES = [f"device_0_channel_{number}_tenstorrent" for number in range(4)]  # as tt-umd names them
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root, for another user")
OTHER = 1000  # a user


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    node.set_hugepages(4)
    return node


@pytest.fixture
async def kubelet(kubelet: Kubelet) -> AsyncIterator[Kubelet]:
    """No pod is killed."""
    yield kubelet

    assert kubelet.killed == []


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every five seconds is done at each poll."""
    monkeypatch.setattr(ttdp, "ROUND", 0.1)


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


async def for_a_while(daemon: RunningDaemon) -> None:
    """Wait for longer than anything lasts that is not current, and for some turns after it."""
    with half_a_minute_later():
        await polls(daemon)


# -- which directory a container gets --------------------------------------------------------------


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


async def test_configured_mounts_come_in_addition_or_in_the_place_of_a_directory(
    kubelet: Kubelet, start: StartDaemon
) -> None:
    """A mount at /dev/hugepages replaces that directory."""
    await start(mounts=(Mount("/srv", "/models"), Mount("/mine", "/dev/hugepages")))
    own = await run(kubelet, "pod")

    assert mounts(kubelet, "pod") == {
        "/models": Path("/srv"),
        "/dev/hugepages": Path("/mine"),
        "/dev/hugepages-1G": own,
    }


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"hugepages": "host"}, HUGETLBFS),
        ({"hugepages": "none"}, ()),
        ({"device_list_strategy": "cdi"}, ()),
    ],
    ids=["host", "none", "cdi"],
)
async def test_other_modes_make_no_directories(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path,
    settings: dict[str, str], names: Iterable[str],
) -> None:  # fmt: skip
    """Containers have the host's own, by the one CDI file that is for all of them, or none."""
    (short_tmp / "cdi").mkdir()
    await start(**settings)
    await kubelet.registered(N150)
    await kubelet.admit("pod", "main", {N150: 1})

    assert mounts(kubelet, "pod") == {f"/dev/{name}": node.root / "dev" / name for name in names}
    assert not around(node).exists()


async def test_without_a_directory_allocate_is_refused_with_path_and_reason(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """It works again as soon as the directory can be made."""
    obstacle = around(node)
    obstacle.touch()
    await start()
    await kubelet.registered(N150)

    with pytest.raises(AdmissionError, match=f"{obstacle}: Not a directory"):
        await kubelet.admit("pod", "main", {N150: 1})

    obstacle.unlink()
    assert (await run(kubelet, "next")).is_dir()


SHARED = Sharing(lock_dir="", resources=(SharedResource("n150", 2),))


async def test_containers_that_share_a_device_have_one_directory(
    kubelet: Kubelet, start: StartDaemon, hurried: None
) -> None:
    """It is there until the last of them has ended."""
    daemon = await start(sharing=SHARED)
    shared = await run(kubelet, "one")
    leave_pages(shared)

    assert await run(kubelet, "two") == shared

    kubelet.delete("one")
    assert await run(kubelet, "three") == shared
    await for_a_while(daemon)
    assert sorted(path.name for path in shared.iterdir()) == PAGES

    kubelet.delete("two")
    kubelet.delete("three")
    await until(lambda: not shared.exists())


async def test_the_directory_of_a_shared_devices_last_user_is_not_given_again(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Not by the last look at pods, in which it still ran: its pages are in there."""
    monkeypatch.setattr(ttdp, "ROUND", 3600)
    daemon = await start(interval=3600, sharing=SHARED)
    former = await run(kubelet, "one")
    leave_pages(former)
    await until(lambda: not daemon.host.holds.is_awaiting_containers)

    kubelet.delete("one")
    await until(lambda: not [*node.root.glob("sys/fs/cgroup/**/pod*")])

    async with client(directory) as plugin:
        container = pb.ContainerAllocateRequest(devices_ids=[f"{bdf(1)}::0"])
        answer = await plugin.Allocate(pb.AllocateRequest(container_requests=[container]))

    paths = [Path(each.host_path) for each in answer.container_responses[0].mounts]
    (given,) = (path for path in paths if path.parent == former.parent)
    assert given != former and not any(given.iterdir())


# -- a directory exists while a current hold names it ----------------------------------------------


class Witness(list[str]):
    """The messages to systemd, and a directory's mode when the first READY=1 came."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.mode: int | None = None
        self._directory = directory

    def append(self, note: str) -> None:
        if note == "READY=1" and self.mode is None:
            self.mode = mode_of(self._directory) if self._directory.exists() else 0
        super().append(note)


async def test_after_a_reboot_a_pods_directory_is_there_before_the_kubelet_starts(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Whatever the configuration says by now. A runtime would make it 0755, for root alone."""
    daemon = await start()
    own = await run(kubelet, "train")

    daemon.forget_notes()
    daemon.reload(hugepages="none")
    await daemon.ready()
    assert mode_of(own) == 0o777

    # hugetlbfs is empty after a boot. The kubelet starts when the daemon is ready.
    await kubelet.power_cut()
    await daemon.stop()
    for hugetlbfs in HUGETLBFS:
        shutil.rmtree(around(node, hugetlbfs))

    booted = RunningDaemon(node, settings_of(node, directory, hugepages="none"))
    booted.notes = witness = Witness(own)
    async with booted:
        await booted.ready()
        assert witness.mode == 0o777
        await kubelet.start()
        await kubelet.running("train", "main")


async def test_a_containers_own_files_stay_when_it_starts_again(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path, hurried: None
) -> None:
    """Over restarts of the daemon, with its state file and without."""
    daemon = await start(state_dir=str(short_tmp))
    own = await run(kubelet, "train")
    leave_pages(own)

    for settings in ({"state_dir": str(short_tmp)}, {}):
        await daemon.stop()
        restarted = time.monotonic()
        daemon = await start(**settings)
        await kubelet.wait_for(functools.partial(kubelet.find, "registered", since=restarted))
        await for_a_while(daemon)

        kubelet.crash("train", "main")
        await kubelet.wait_for(functools.partial(kubelet.find, "running", since=restarted))
        assert sorted(path.name for path in own.iterdir()) == PAGES


async def test_a_directory_that_cannot_be_put_right_stops_nothing_else(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, hurried: None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Log and status show path and reason; devices and watchdog go on."""
    daemon = await start(interval=0.05)
    own = await run(kubelet, "train")

    own.rmdir()
    own.symlink_to("/")
    await until(lambda: "directory for containers cannot be used" in daemon.status)

    await polls(daemon)
    assert "cannot read" not in caplog.text and "internal error" not in caplog.text

    node.chips[0].vanish()
    await kubelet.wait_for(lambda: not kubelet.healthy(N150))

    own.unlink()
    await until(lambda: "directory for containers" not in daemon.status)
    assert mode_of(own) == 0o777


# -- locks -----------------------------------------------------------------------------------------


def locked(short_tmp: Path) -> dict[str, Sharing]:
    """Settings with a directory for locks, of a resource with four replicas."""
    entries = (SharedResource("n150", 4),)
    return {"sharing": Sharing(lock_dir=f"{short_tmp}/locks", resources=entries)}


async def mounts_of_new(kubelet: Kubelet, pod: str) -> list[tuple[str, str, bool]]:
    """Return host path, container path and read_only of the mounts in a new pod."""
    got = await kubelet.admit(pod, "main", {N150: 1})
    return [(each.host_path, each.container_path, each.read_only) for each in got.mounts]


async def test_containers_on_a_shared_device_share_their_locks_also_if_one_of_them_owns_them(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Under either strategy; root in a container can give them away and close them."""
    (short_tmp / "cdi").mkdir()
    locks = short_tmp / "locks/n150"
    own = (str(locks), "/dev/shm", False)
    more = {"mounts": (Mount("/m", "/m"),), "hugepages": "none", "interval": 0.05}
    more |= locked(short_tmp)

    for strategy, wanted in (("device-specs", [("/m", "/m", False), own]), ("cdi", [own])):
        daemon = await start(device_list_strategy=strategy, **more)
        await kubelet.registered(N150)
        assert await mounts_of_new(kubelet, f"{strategy}-1") == wanted

        locks.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(locks, OTHER, OTHER)
        assert await mounts_of_new(kubelet, f"{strategy}-2") == wanted

        await daemon.stop()
        await kubelet.wait_for(lambda: not kubelet.manager.plugins.is_listed(N150))


async def test_what_users_of_a_shared_device_left_in_dev_shm_is_removed_after_the_last_one(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path, hurried: None
) -> None:
    """It would take memory until the next boot; and later containers find it open to all."""
    daemon = await start(**locked(short_tmp))
    await run(kubelet, "one")
    await run(kubelet, "two")
    shm = mounts(kubelet, "two")["/dev/shm"]

    assert shm == short_tmp / "locks/n150" and mode_of(shm) == 0o1777
    (shm / "lock").touch()

    kubelet.delete("one")
    await for_a_while(daemon)
    assert (shm / "lock").exists()

    shutil.rmtree(shm)
    await until(lambda: shm.exists() and mode_of(shm) == 0o1777)
    (shm / "lock").touch()

    kubelet.delete("two")
    await until(lambda: not any(shm.iterdir()))
    assert mode_of(shm) == 0o1777


async def test_locks_are_removed_after_users_that_ended_while_the_daemon_was_not_there(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path, hurried: None
) -> None:
    """The next daemon has no hold that names their directory, but its configuration does."""
    daemon = await start(**locked(short_tmp))
    await run(kubelet, "train")
    lock = mounts(kubelet, "train")["/dev/shm"] / "lock"
    lock.touch()

    await daemon.stop()
    await kubelet.remove_pod("train")
    await start(**locked(short_tmp))

    with half_a_minute_later():
        await until(lambda: not lock.exists())


# -- directories without a daemon ------------------------------------------------------------------


@pytest.fixture
def dev() -> Iterator[Path]:
    """A /dev, in memory as hugetlbfs is."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path, "dev")


@pytest.fixture
def parent(dev: Path) -> Path:
    """The daemon's own directory in a hugetlbfs."""
    path = dev / "hugepages" / ttdp.OWN_DIRECTORY
    path.mkdir(parents=True)
    path.chmod(0o700)
    return path


@pytest.fixture
def directories(dev: Path, parent: Path) -> Directories:
    """As a daemon has them some time after its start."""
    found = Directories(Settings(root=str(dev.parent)))
    tidy(found, now=0.0)
    return found


def named(*paths: Path) -> Hold:
    return hold("n150", bdf(1), buses=[1])._replace(directories=tuple(map(str, paths)))


def fill(parent: Path, **numbers: int) -> None:
    """Make directories with so many files."""
    for name, number in numbers.items():
        (parent / name).mkdir()
        for file in range(number):
            (parent / name / str(file)).touch()


def tidy(
    directories: Directories, *holds: Hold, now: float = 1000.0, steps: int = ttdp.STEPS
) -> bool:
    """Remove what these holds do not name, in one turn; return whether all was tried."""
    try:
        directories.clear(directories.unnamed(holds, now), (), now, RemovalSteps(steps))
    except OutOfSteps:
        return False
    return True


def turns(directories: Directories, steps: int = ttdp.STEPS) -> int:
    """Return the number of turns until all was removed."""
    number = 1
    while not tidy(directories, steps=steps):
        number += 1
    return number


def test_a_named_directory_that_cannot_be_looked_at_keeps_no_other_from_being_removed(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer can name a path on a file system that has failed since."""
    fill(parent, former=1)
    failed = parent.parent / "failed/x"
    genuine = os.lstat

    def lstat(path: Any, **keywords: Any) -> os.stat_result:
        if path == str(failed.parent):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return genuine(path, **keywords)

    monkeypatch.setattr("os.lstat", lstat)
    tidy(directories, named(failed))
    assert not any(parent.iterdir())


def test_nothing_is_made_elsewhere(tmp_path: Path, directories: Directories, parent: Path) -> None:
    """hugetlbfs is not mounted there any more, or a hold is that of a daemon with another root."""
    of_another_root = tmp_path / "hugepages" / ttdp.OWN_DIRECTORY
    of_another_root.parent.mkdir()
    shutil.rmtree(parent.parent)

    for path in (parent, of_another_root):
        directories.put_right(named(path / "x"))
        assert not path.exists()


def test_a_wrong_mode_is_put_right(directories: Directories, parent: Path) -> None:
    """A runtime made what was missing, 0755, while the daemon was not there."""
    (parent / "x").mkdir(mode=0o755)
    parent.chmod(0o755)

    directories.put_right(named(parent / "x"))

    assert mode_of(parent / "x") == 0o777 and mode_of(parent) == 0o700


@needs_root
def test_a_mode_that_a_container_has_changed_is_left_to_it(
    directories: Directories, parent: Path
) -> None:
    """If its user has made the directory its own, who else may use it is that user's choice."""
    directories.put_right(named(parent / "x"))

    os.chown(parent / "x", OTHER, OTHER)
    (parent / "x").chmod(0o700)
    directories.put_right(named(parent / "x"))

    assert mode_of(parent / "x") == 0o700


def test_a_mode_that_cannot_be_put_right_is_an_error_of_that_path(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status shows it, and the command for the file system around it."""
    (parent / "x").mkdir(mode=0o755)

    def chmod(path: str, _: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr("os.chmod", chmod)
    with pytest.raises(OSError, match=str(parent / "x")):
        directories.put_right(named(parent / "x"))


def another_users(parent: Path, precious: Path) -> None:
    precious.rename(parent)
    os.chown(parent, OTHER, OTHER)


def a_link(parent: Path, precious: Path) -> None:
    parent.symlink_to(precious)


@needs_root
@pytest.mark.parametrize("make", [another_users, a_link])
def test_a_directory_around_them_that_is_not_roots_own_is_not_used(
    directories: Directories, parent: Path, dev: Path, make: Callable[[Path, Path], None]
) -> None:
    """Whoever made it could put anything in the place of a container's directory."""
    precious = dev / "precious"
    (precious / "x").mkdir(parents=True)
    (precious / "x/file").touch()
    parent.rmdir()
    make(parent, precious)

    mounts = [Mount(str(parent.parent), "/dev/hugepages")]
    with pytest.raises(OSError, match=str(parent)):
        directories.make_for_hugepages("y", mounts)
    with pytest.raises(OSError, match=str(parent)):
        directories.put_right(named(parent / "y"))

    tidy(directories)
    assert (parent / "x/file").exists() and [*parent.iterdir()] == [parent / "x"]


# -- what is removed -------------------------------------------------------------------------------


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Fewer than a deep tree has levels."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_tree_is_removed_however_deep_it_is(
    directories: Directories, parent: Path, few_descriptors: None
) -> None:
    """A container can make more levels than there are descriptors, or bytes in a path."""
    depth = 2000
    (parent / "x").mkdir()

    directory = os.open(parent / "x", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=directory)
        os.close(os.open("file", os.O_CREAT, dir_fd=directory))
        inner = os.open("deeper", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)

    assert turns(directories) <= 4 * depth / ttdp.STEPS + 1
    assert not any(parent.iterdir())


def test_many_files_are_removed_in_several_turns(directories: Directories, parent: Path) -> None:
    """A turn has one budget, whatever is to be removed: the loop has other work."""
    fill(parent, one=300, two=300)

    assert turns(directories, steps=100) == 6
    assert not any(parent.iterdir())


def test_large_files_are_removed_in_several_turns(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes seconds for what a container had in /dev/shm, such as a model's weights."""
    fill(parent, x=5)
    now = time.monotonic()
    genuine = os.unlink

    def unlink(path: str, **keywords: Any) -> None:
        nonlocal now
        now += 1
        genuine(path, **keywords)

    monkeypatch.setattr("os.unlink", unlink)
    monkeypatch.setattr(ttdp, "monotonic", lambda: now)

    left = []
    while (parent / "x").exists():
        with suppress(OutOfSteps):
            directories.clear([str(parent / "x")], (), now, RemovalSteps(seconds=0.02))
        left.append(len([*(parent / "x").glob("*")]))
    assert left == [4, 3, 2, 1, 0]


def test_a_large_directory_delays_no_other_one(directories: Directories, parent: Path) -> None:
    """The one that took all steps comes last in the next turn."""
    fill(parent, a=100, b=3, c=100)
    tidy(directories, now=1000.0, steps=10)
    tidy(directories, now=1001.0, steps=10)

    assert not (parent / "b").exists()

    tidy(directories, now=1002.0, steps=10)
    assert all(len([*(parent / name).iterdir()]) < 100 for name in "ac")


def test_a_directory_that_a_hold_names_by_another_path_is_not_removed(
    dev: Path, directories: Directories, parent: Path
) -> None:
    """An administrator has given one hugetlbfs both paths, after the answer."""
    directories.put_right(named(parent / "x"))
    (dev / "hugepages-1G").symlink_to("hugepages")

    tidy(directories, named(parent / "x"))
    assert (parent / "x").is_dir()
    tidy(directories)
    assert not (parent / "x").exists()


def test_no_link_leads_out_of_a_directory(
    directories: Directories, parent: Path, tmp_path: Path
) -> None:
    """Links are removed, not followed."""
    precious = tmp_path / "precious"
    (precious / "inner").mkdir(parents=True)
    (precious / "file").touch()
    (parent / "x/inner").mkdir(parents=True)
    (parent / "x/link").symlink_to(precious)
    (parent / "x/inner/link").symlink_to(precious)
    (parent / "y").symlink_to(precious)

    tidy(directories)

    assert not any(parent.iterdir())
    assert sorted(path.name for path in precious.iterdir()) == ["file", "inner"]


def test_what_is_mounted_in_a_directory_is_not_removed(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel neither removes nor moves a mount point; all that is beside it is removed."""
    for path in ("x/mount/disk", "x/a/mount/disk", "x/a/b/file", "mount/disk"):
        (parent / path).parent.mkdir(parents=True)
        (parent / path).touch()

    def refuse(call: Callable[..., None]) -> Callable[..., None]:
        def refusing(path: str, *others: Any, **keywords: Any) -> None:
            if path == "mount":
                raise OSError(errno.EBUSY, "Device or resource busy")
            call(path, *others, **keywords)

        return refusing

    for name in ("rmdir", "rename"):
        monkeypatch.setattr(os, name, refuse(getattr(os, name)))
    tidy(directories)

    left = sorted(str(path.relative_to(parent)) for path in parent.rglob("disk"))
    assert left == ["mount/disk", "x/a/mount/disk", "x/mount/disk"]
    assert not [*parent.rglob("file")]
    assert {each.reason for each in directories.resisting.values()} == {"Device or resource busy"}


def test_what_resists_is_tried_again_with_growing_pauses_and_keeps_nothing_else(
    directories: Directories, parent: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One line reports it, and `check` as long as it is there."""
    for path in ("a/stuck", "a/other", "b/file"):
        (parent / path).parent.mkdir(exist_ok=True)
        (parent / path).touch()

    tried: list[float] = []
    genuine = os.unlink

    def unlink(path: Any, **keywords: Any) -> None:
        if path == "stuck":
            tried.append(now)
            raise PermissionError(1, "Operation not permitted")
        genuine(path, **keywords)

    monkeypatch.setattr("os.unlink", unlink)
    for now in range(1000, 3000):
        tidy(directories, now=now)

    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300, 300]
    assert [path.name for path in parent.rglob("*")] == ["a", "stuck"]
    (reason,) = (each.reason for each in directories.resisting.values())
    assert caplog.messages == [f"{parent}/a cannot be emptied: {reason}"]

    monkeypatch.setattr("os.unlink", genuine)
    tidy(directories, now=4000.0)
    assert not directories.resisting and not any(parent.iterdir())


@pytest.mark.parametrize(("number", "left"), [(1, 1), (99, 999)])
def test_what_lies_beside_what_resists_is_removed_without_pauses(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch, number: int, left: int
) -> None:
    """But a directory of which most resists must not take all steps of each turn."""
    fill(parent, x=1000)
    stuck = os.listdir(parent / "x")[:number]
    genuine = os.unlink

    def unlink(path: str, **keywords: Any) -> None:
        if path in stuck:
            raise PermissionError(1, "Operation not permitted")
        genuine(path, **keywords)

    monkeypatch.setattr("os.unlink", unlink)
    turns(directories, steps=100)

    assert len([*(parent / "x").iterdir()]) == left
    assert [*directories.resisting] == [str(parent / "x")]


def test_what_resists_a_start_is_known_until_it_is_emptied(
    directories: Directories, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses between the loop's attempts do not count for the next start."""
    own = parent / "x"
    directories.put_right(named(own))
    leave_pages(own)
    genuine = os.unlink

    def unlink(path: Any, **_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    def start(now: float) -> None:
        directories.clear((), [str(own)], now, RemovalSteps())

    monkeypatch.setattr("os.unlink", unlink)
    start(1000.0)
    tidy(directories, named(own), now=1001.0)
    assert [*directories.resisting] == [str(own)]
    # The pod can start again: only the directory of one that has ended is to be removed by hand.
    assert directories.problems([named(own)])[str(own)].command == ""
    assert directories.problems([])[str(own)].command.startswith("rm -rf ")

    monkeypatch.setattr("os.unlink", genuine)
    start(1002.0)
    assert not directories.resisting and not any(own.iterdir())


def without_capabilities(dev: Path, script: str) -> str:
    """Return what a script prints that has `directories`, as root without capabilities."""
    begin = f"import json, ttdp; directories = ttdp.Directories(ttdp.Settings(root='{dev.parent}'))"
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c"]
    done = subprocess.run(
        [*without, f"{begin}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(ttdp.__file__).parent,
    )
    return done.stdout


TIDY = """
for now in (0.0, 1000.0):
    directories.clear(directories.unnamed((), now), (), now, ttdp.RemovalSteps())
print(json.dumps({path: each.reason for path, each in directories.resisting.items()}))
"""


@needs_root
def test_a_directory_that_another_user_has_closed_resists(dev: Path, parent: Path) -> None:
    """The service is root without capabilities. What lies beside it is removed."""
    for name in ("closed", "full", "open"):
        (parent / name / "inner").mkdir(parents=True)
        (parent / name / "inner/page").touch()
        (parent / name / "page").touch()
    for path, mode in {"closed": 0o700, "full/inner": 0o700, "open/inner": 0o777}.items():
        os.chown(parent / path, OTHER, OTHER)
        (parent / path).chmod(mode)
    for path in ("closed", "full", "open"):
        (parent / path).chmod(0o700 if path == "closed" else 0o777)

    resisting = json.loads(without_capabilities(dev, TIDY))
    denied = "Permission denied"
    assert resisting == {str(parent / name): denied for name in ("closed", "full")}
    assert (parent / "closed/page").exists() and not (parent / "full/page").exists()
    assert not (parent / "open").exists()


@needs_root
@pytest.mark.parametrize("mode", [0o000, 0o555])
def test_what_root_has_closed_in_a_container_is_removed(dev: Path, parent: Path, mode: int) -> None:
    """Its directories are the service's own, such as a read-only cache in /dev/shm."""
    locks = dev / "locks/n150"
    for own in (parent / "x", locks):
        nested = [own, own / "first", own / "first/second", own / "first/second/third"]
        nested[-1].mkdir(parents=True)
        for each in reversed(nested):
            (each / "page").touch()
            each.chmod(mode)

    resisting = without_capabilities(dev, f"directories.note_locks('{locks}'){TIDY}")

    assert json.loads(resisting) == {}
    assert not any(parent.iterdir())
    assert mode_of(locks) == 0o1777 and not any(locks.iterdir())


@needs_root
def test_what_is_in_a_directory_that_stays_is_removed(dev: Path, parent: Path) -> None:
    """As another user has made the one around it sticky, it cannot be removed itself."""
    inner = parent / "sticky/inner"
    inner.mkdir(parents=True)
    (inner / "page").touch()
    for path, owner, mode in ((inner, OTHER + 1, 0o777), (inner.parent, OTHER, 0o1777)):
        os.chown(path, owner, owner)
        path.chmod(mode)

    resisting = json.loads(without_capabilities(dev, TIDY))

    assert [*resisting] == [str(parent / "sticky")]
    assert inner.exists() and not any(inner.iterdir())


PUT_RIGHT = """
names = [f"{parent}/{name}" for name in ("theirs", "roots")]
directories.put_right(ttdp.Hold("", frozenset(), directories=tuple(names)))
for name in names:
    directories.make_for_locks(name)
"""


@needs_root
def test_a_directory_that_a_container_has_closed_is_no_obstacle(dev: Path, parent: Path) -> None:
    """The service is root without capabilities, and the container's next start needs it."""
    for name in ("theirs", "roots"):
        (parent / name).mkdir()
        (parent / name).chmod(0)
    os.chown(parent / "theirs", OTHER, OTHER)

    without_capabilities(dev, f"parent = '{parent}'{PUT_RIGHT}")

    assert mode_of(parent / "theirs") == 0 and mode_of(parent / "roots") == 0o1777


# -- before a container starts ---------------------------------------------------------------------


class StartingWorld(BookWorld):
    """A book of holds, with directories, by which starts are allowed; there is no loop."""

    def __init__(self, home: Path) -> None:
        super().__init__(home, now=time.monotonic() - 100)
        (home / "dev/hugepages-1G").mkdir(parents=True)
        self.host = ttdp.Host(self.settings, lambda: None)
        self.began_at = time.monotonic()
        self.book = self.host.holds

    def directory(self, name: str) -> Path:
        return self.home / "dev/hugepages-1G" / ttdp.OWN_DIRECTORY / name

    def unnamed(self, *, seconds: float = 30.0) -> set[str]:
        """Return the names of what can be removed so long after the daemon's start."""
        self.look()
        now = self.began_at + seconds
        paths = self.host.unnamed_directories(self.host.decide(now), now)
        return {Path(path).name for path in paths}

    async def wait_until_free(self, given: Entry) -> None:
        """Answer PreStartContainer for a container."""
        await ttdp.Allocator(self.host).wait_until_free(given.resource, given.held.ids)


@pytest.fixture
def world(dev: Path) -> StartingWorld:
    return StartingWorld(dev)


def test_nothing_is_removed_while_it_is_not_known_which_pods_there_are(
    world: StartingWorld,
) -> None:
    """Without a checkpoint, while it cannot be read, and while the first one can be late.

    Only what this daemon has made for an answer is known at once.
    """
    former = world.directory("former")
    former.mkdir(parents=True)
    former.parent.chmod(0o700)
    world.host.directories.make_for_hugepages("new", ttdp.hugetlbfs_mounts(world.settings))
    assert world.unnamed() == set(), "no kubelet has started yet"

    world.write()
    assert world.unnamed(seconds=29.0) == {"new"}
    assert world.unnamed() == {"former", "new"}

    odd = {**entry().json(), "DeviceIDs": [bdf(1)]}
    entries = {"PodDeviceEntries": [odd], "RegisteredDevices": {}}
    for unreadable in (b"garbage", json.dumps({"Data": entries}).encode()):
        world.put(unreadable)
        assert world.unnamed() == set()

        world.write()
        assert world.unnamed() == {"former", "new"}


async def test_a_start_removes_what_no_hold_names_but_no_directory_of_a_possible_caller(
    world: StartingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is missing for a moment, and no process shows that its hold is current."""
    monkeypatch.setattr(ttdp, "MISSING_FOR", 30)
    own, former = world.directory("x"), world.directory("former")
    train = entry(directory=own)

    world.answer(train)
    world.write(train)
    world.make_cgroup()
    world.look()
    world.host.directories.put_right(world.current()[0])
    leave_pages(own)
    fill(own.parent, former=1)

    world.now = time.monotonic()
    world.write()
    assert not world.look()

    with half_a_minute_later():
        await world.wait_until_free(train)

    assert not former.exists()
    assert sorted(path.name for path in own.iterdir()) == PAGES


@pytest.mark.parametrize(("seconds", "is_empty"), [(60.0, True), (-1.0, False)])
async def test_a_start_waits_until_all_is_removed_but_not_for_long(
    world: StartingWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    seconds: float, is_empty: bool,
) -> None:  # fmt: skip
    """The loop takes its turns meanwhile. What is left then is removed later; one line says so."""
    monkeypatch.setattr(ttdp, "STEPS_TAKE", 0.0)  # so that each turn removes one file
    monkeypatch.setattr(ttdp, "EMPTY_WITHIN", seconds)
    former = world.directory("former")
    train = entry(directory=world.directory("own"))
    world.answer(train)
    world.write(train)
    world.look()
    world.host.directories.put_right(world.current()[0])
    fill(former.parent, former=5)

    with half_a_minute_later():
        await world.wait_until_free(train)

    assert former.exists() is not is_empty
    assert ("starts before all hugepages are free" in caplog.text) is not is_empty


async def test_a_start_that_has_to_wait_again_finds_no_page_of_the_pod_for_which_it_waited(
    world: StartingWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That one's start was allowed while pages of others were removed."""
    caplog.set_level("INFO")
    mine = entry(directory=world.directory("mine"))
    rival = entry(pod="rival", resource=f"{N150}a", directory=world.directory("rival"))

    for each in (mine, rival):
        world.answer(each)
    world.write(mine, rival)
    for each in (mine, rival):
        world.make_cgroup(each.uid, "pause")

    free_pages = ttdp.Allocator._free_pages

    async def be_late(*arguments: Any) -> None:
        await free_pages(*arguments)
        monkeypatch.setattr(ttdp.Allocator, "_free_pages", free_pages)
        assert world.start(rival) == "allowed"
        world.host.directories.put_right(world.current()[-1])
        leave_pages(world.directory("rival"))

    monkeypatch.setattr(ttdp.Allocator, "_free_pages", be_late)
    start = asyncio.create_task(world.wait_until_free(mine))
    await until(lambda: "container start waits" in caplog.text)

    # The rival runs, and ends.
    world.make_cgroup("rival", "pause", "main")
    world.look()
    world.make_cgroup("rival")
    world.host.refresh_holds(world.now, look=True)
    await start

    assert not any(world.directory("rival").iterdir())


async def test_a_containers_directory_that_is_missing_is_made_before_it_starts(
    world: StartingWorld,
) -> None:
    """Runtimes resolve the paths of an answer each time that they create a container."""
    own = world.directory("x")
    train = entry(directory=own)
    world.answer(train)
    world.write(train)

    await world.wait_until_free(train)

    assert mode_of(own) == 0o777


async def test_a_start_does_not_wait_for_a_pod_that_has_ended_since_the_last_look_at_pods(
    world: StartingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary hand-over waits for nothing."""
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0)
    first, heir = entry(), entry(pod="heir", resource=f"{N150}a")
    world.run(first)
    world.answer(heir)
    world.write(first, heir)
    world.make_cgroup(heir.uid, "pause")
    world.look()
    assert world.running() == {first.uid}

    world.make_cgroup(first.uid)
    await world.wait_until_free(heir)

    assert world.running() == {heir.uid}


# -- locks without a daemon ------------------------------------------------------------------------


def test_a_pod_keeps_its_dev_shm_whatever_its_resource_is_called_by_now(
    directories: Directories, tmp_path: Path
) -> None:
    """Until it has ended; by the path, which stands in its answer."""
    shm = tmp_path / "locks/n150"
    directories.make_for_locks(str(shm))
    (shm / "lock").touch()

    tidy(directories, hold("example.org/card", bdf(1), buses=[1])._replace(locks=str(shm)))
    assert (shm / "lock").exists()

    tidy(directories)
    assert shm.exists() and not any(shm.iterdir())


def test_the_hosts_dev_shm_is_never_emptied(directories: Directories) -> None:
    """With lock_dir = "/dev/shm" containers have the host's own."""
    directories.note_locks("/dev/shm")
    directories.note_locks("/run/ttdp/shm/n150")
    assert directories.unnamed((), 1000.0) == {"/run/ttdp/shm/n150"}


@pytest.mark.parametrize(
    ("lock_dir", "path"),
    [("/run/locks", "/run/locks/n150"), ("/dev/shm", "/dev/shm"), ("", None)],
)
def test_a_lock_directory_is_for_one_resource(lock_dir: str, path: str | None) -> None:
    """The host's own /dev/shm is as it is; without a directory there are no common locks."""
    sharing = Sharing(lock_dir=lock_dir, resources=(SharedResource("n150", 4),))
    settings = Settings(sharing=sharing)
    found = decide([chip(1)], settings).resources[N150]

    assert ttdp.lock_path(found, found.devices, settings) == path


@pytest.mark.parametrize(
    "spoil",
    [
        lambda locks, elsewhere: (locks / "n150").symlink_to(elsewhere),
        lambda locks, elsewhere: (locks / "n150").touch(),
        lambda locks, elsewhere: (locks.rmdir(), locks.symlink_to(elsewhere)),
        lambda locks, _: os.chown(locks, OTHER, OTHER) if os.geteuid() == 0 else None,
        lambda locks, _: locks.chmod(0o777),
    ],
    ids=["a link", "a file", "a link above it", "another user's", "open to all"],
)
def test_only_directories_of_root_are_used_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, Path], object]
) -> None:
    """What is there stays as it is. A container may own its /dev/shm, but not what is around it."""
    locks, elsewhere = tmp_path / "locks", tmp_path / "elsewhere"
    locks.mkdir()
    elsewhere.mkdir(mode=0o700)
    spoil(locks, elsewhere)
    monkeypatch.setattr(os, "geteuid", lambda: OTHER + 1)  # so that it is not ours either

    with pytest.raises(OSError):
        Directories(Settings()).make_for_locks(f"{locks}/n150")

    assert mode_of(elsewhere) == 0o700 and not [*elsewhere.iterdir()]
