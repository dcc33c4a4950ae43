"""Locks: containers on a shared device find each other in one directory, which is nobody else's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from ttdp import SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"


def shared(lock_dir: Path | str, *entries: SharedResource) -> Sharing:
    return Sharing(lock_dir=str(lock_dir), resources=entries or (SharedResource("n150", 2),))


async def lock_mounts(kubelet: Kubelet, pod: str, resource: str) -> list[tuple[str, bool]]:
    """Return the host's path of each mount at /dev/shm in a new pod, and if it is read-only."""
    got = await kubelet.admit(pod, "main", {resource: 1})
    mounts = [mount for mount in got.mounts if mount.container_path == "/dev/shm"]
    return [(mount.host_path, mount.read_only) for mount in mounts]


async def test_those_who_share_a_device_share_their_locks(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """One directory a resource, in which all may make a lock and nobody remove another's."""
    for card in ("n150", "n150", "p150a"):
        node.add(card)
    entries = SharedResource("n150", 2), SharedResource("p150", 2, "p150-half")
    await start(sharing=shared(short_tmp / "locks", *entries))
    for name in ("n150", "p150-half"):
        await kubelet.registered(f"tenstorrent.com/{name}")
        locks = short_tmp / "locks" / name
        assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
        for number in range(2):
            mounts = await lock_mounts(kubelet, f"{name}-{number}", f"tenstorrent.com/{name}")
            assert mounts == [(str(locks), False)]


@pytest.mark.parametrize(("lock_dir", "mounts"), [("", []), ("/dev/shm", [("/dev/shm", False)])])
async def test_no_locks_or_the_hosts_own(
    node: SimulatedNode,
    kubelet: Kubelet,
    start: StartDaemon,
    lock_dir: str,
    mounts: list[tuple[str, bool]],
) -> None:
    """Without a directory there is no mount; with the host's /dev/shm its processes are in."""
    node.add("n150")
    mode = os.stat("/dev/shm").st_mode
    await start(sharing=shared(lock_dir))
    await kubelet.registered(N150)
    assert await lock_mounts(kubelet, "pod", N150) == mounts
    assert os.stat("/dev/shm").st_mode == mode


@pytest.mark.parametrize("what", ["a link", "a file"])
async def test_locks_that_somebody_else_has_put_there_are_not_used(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path, what: str
) -> None:
    """The pod is refused, in words; what is there stays as it is."""
    node.add("n150")
    locks = short_tmp / "locks"
    elsewhere = short_tmp / "elsewhere"
    locks.mkdir()
    elsewhere.mkdir(mode=0o700)
    if what == "a link":
        (locks / "n150").symlink_to(elsewhere)
    else:
        (locks / "n150").touch()
    await start(sharing=shared(locks))
    await kubelet.registered(N150)
    with pytest.raises(AdmissionError, match=r"no directory for the locks of tenstorrent\.com/n15"):
        await kubelet.admit("pod", "main", {N150: 1})
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700


async def test_the_locks_are_there_before_any_allocation_and_come_back(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path
) -> None:
    """Containers start again with the answer of before: after a reboot, or a clean-up."""
    node.add("n150")
    daemon = await start(interval=0.05, sharing=shared(short_tmp / "locks"))
    await until(lambda: daemon.notified("READY=1"))
    locks = short_tmp / "locks/n150"
    assert locks.is_dir()
    locks.rmdir()
    await until(lambda: locks.is_dir() and stat.S_IMODE(locks.stat().st_mode) == 0o1777)


async def test_locks_that_a_runtime_has_made_are_mended(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Some make what a mount lacks, for root alone."""
    node.add("n150")
    await start(sharing=shared(short_tmp / "locks"))
    await kubelet.registered(N150)
    locks = short_tmp / "locks/n150"
    locks.chmod(0o755)
    await kubelet.admit("pod", "main", {N150: 1})
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777
