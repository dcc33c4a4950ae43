"""Locks: containers on a shared device find each other's in one directory, which only they use."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import ttdp
from tests.chips import chip, decide
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from ttdp import Settings, SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
NOBODY = 65534


def shared(lock_dir: Path | str, *entries: SharedResource) -> Sharing:
    return Sharing(lock_dir=str(lock_dir), resources=entries or (SharedResource("n150", 2),))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def lock_mounts(kubelet: Kubelet, pod: str, resource: str) -> list[tuple[str, bool]]:
    """Return the host path of each mount at /dev/shm in a new pod, and whether it is read-only."""
    got = await kubelet.admit(pod, "main", {resource: 1})
    mounts = [mount for mount in got.mounts if mount.container_path == "/dev/shm"]
    return [(mount.host_path, mount.read_only) for mount in mounts]


async def test_containers_on_a_shared_device_share_their_locks(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """One directory a resource: any container can make a lock, and none can remove another's."""
    for card in ("n150", "n150", "p150a"):
        node.add(card)
    entries = SharedResource("n150", 2), SharedResource("p150", 2, "p150-half")
    await start(sharing=shared(short_tmp / "locks", *entries))
    for name in ("n150", "p150-half"):
        await kubelet.registered(f"tenstorrent.com/{name}")
        locks = short_tmp / "locks" / name
        assert mode_of(locks) == 0o1777 and mode_of(locks.parent) == 0o755
        for number in range(2):
            mounts = await lock_mounts(kubelet, f"{name}-{number}", f"tenstorrent.com/{name}")
            assert mounts == [(str(locks), False)]


@pytest.mark.parametrize(("lock_dir", "mounts"), [("", []), ("/dev/shm", [("/dev/shm", False)])])
async def test_there_are_no_locks_or_the_hosts_own(
    node: SimulatedNode,
    kubelet: Kubelet,
    start: StartDaemon,
    lock_dir: str,
    mounts: list[tuple[str, bool]],
) -> None:
    """By an empty lock_dir, or by /dev/shm itself, which stays as it is."""
    node.add("n150")
    mode = os.stat("/dev/shm").st_mode
    await start(sharing=shared(lock_dir))
    await kubelet.registered(N150)
    assert await lock_mounts(kubelet, "pod", N150) == mounts
    assert os.stat("/dev/shm").st_mode == mode


async def test_a_container_that_owns_its_dev_shm_breaks_no_later_allocation(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Root in it can give it away and close it; also after a restart of the daemon."""
    for _ in range(2):
        node.add("n150")
    locks = short_tmp / "locks/n150"
    for number in range(2):
        daemon = await start(sharing=shared(short_tmp / "locks"))
        await kubelet.registered(N150)
        assert await lock_mounts(kubelet, f"{number}", N150) == [(str(locks), False)]
        locks.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(locks, NOBODY, NOBODY)
        assert await lock_mounts(kubelet, f"{number}-later", N150) == [(str(locks), False)]
        await daemon.stop()


@pytest.mark.parametrize("what", ["a link", "a file", "a link above it", "another user's"])
def test_only_directories_of_root_are_used_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The request is rejected; what is there stays as it is."""
    lock_dir = tmp_path / "locks"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "a link above it":
        lock_dir.symlink_to(elsewhere)
    else:
        lock_dir.mkdir()
    if what == "a link":
        (lock_dir / "n150").symlink_to(elsewhere)
    if what == "a file":
        (lock_dir / "n150").touch()
    if what == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY + 1)
        if os.getuid() == 0:
            os.chown(lock_dir, NOBODY, NOBODY)
    settings = Settings(sharing=shared(lock_dir))
    resource = decide([chip(1)], settings).resources[N150]
    with pytest.raises(ttdp.RequestError) as rejected:
        ttdp.lock_path(resource, resource.devices, settings)
    code, reason = rejected.value.args
    path = lock_dir if "above" in what or "user" in what else lock_dir / "n150"
    assert code.name == "UNAVAILABLE"
    assert reason.startswith(f"no directory for the locks of {N150}: {path}: not a directory, or")
    assert mode_of(elsewhere) == 0o700 and not [*elsewhere.iterdir()]


async def test_the_locks_exist_before_any_allocation_and_are_created_again(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path
) -> None:
    """Containers start again with the former answer: after a reboot, or a clean-up."""
    node.add("n150")
    daemon = await start(interval=0.05, sharing=shared(short_tmp / "locks"))
    await until(lambda: daemon.notified("READY=1"))
    locks = short_tmp / "locks/n150"
    assert locks.is_dir()
    locks.rmdir()
    await until(lambda: locks.is_dir() and mode_of(locks) == 0o1777)
