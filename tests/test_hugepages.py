"""Hugepage directories: one for each device, clean when a pod starts, and nobody else's."""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.pods import Container
from tests.world.processes import until
from tests.world.simulation import RunningDaemon
from ttdp import HugepageDirectories, Mount, Settings, SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
P300 = "tenstorrent.com/p300"
A = "0000:01:00.0"
PAGE = "device_0_tenstorrent"  # as tt-umd names it
SHARED = Sharing(lock_dir="", resources=(SharedResource("n150", 2),))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
OTHER = 1000  # a user


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    node.set_hugepages(4)
    return node


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evidence ends sooner than after half a minute."""
    monkeypatch.setattr(ttdp, "EVIDENCE_LASTS", 0.5)
    monkeypatch.setattr(ttdp, "ROUND", 0.1)


def directory_of(node: SimulatedNode, bdf: str = A, hugetlbfs: str = "hugepages-1G") -> Path:
    return node.root / "dev" / hugetlbfs / HugepageDirectories.NAME / bdf


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def status(daemon: RunningDaemon) -> str:
    """What systemd shows."""
    return [note for note in daemon.notes if note.startswith("STATUS=")][-1]


async def ready(daemon: RunningDaemon) -> None:
    await until(lambda: daemon.notified("READY=1"))


async def hugepages_of(kubelet: Kubelet, pod: str) -> dict[str, str]:
    """Admit a pod; return the host paths of its mounts by their path in the container."""
    got = await kubelet.admit(pod, "main", {N150: 1})
    return {mount.container_path: mount.host_path for mount in got.mounts}


async def run(kubelet: Kubelet, pod: str, resource: str = N150) -> None:
    await kubelet.admit(pod, "main", {resource: 1})
    await kubelet.running(pod, "main")


# -- directories -----------------------------------------------------------------------------------


async def test_each_device_has_directories_before_the_kubelet_starts(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """0777 and not sticky, in one that only root enters, in each hugetlbfs; also if removed."""
    node.add("n150")
    await ready(await start())
    for chip in node.chips:
        for hugetlbfs in ("hugepages-1G", "hugepages"):
            own = directory_of(node, chip.bdf, hugetlbfs)
            assert mode_of(own) == 0o777 and mode_of(own.parent) == 0o700
    own = directory_of(node)
    own.rmdir()
    await until(own.is_dir)
    assert mode_of(own) == 0o777


async def test_a_pod_keeps_its_directory_when_the_configuration_gives_its_chip_to_a_board(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """After a reboot it is created again, before the container restarts."""
    _, second = node.add("p300c")
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.registered(P300)
    await run(kubelet, "first", P300)
    await run(kubelet, "train", P300)
    assert second.bdf in kubelet.allocated(P300)
    own = directory_of(node, second.bdf)
    first_uid = kubelet.uid("first")
    kubelet.delete("first")
    daemon.reload(unit="board")
    await kubelet.registered(f"{P300}-board")
    counts = daemon.daemon.host.allocations.counting
    await until(lambda: first_uid not in {each.pod for each in counts(time.monotonic())})
    own.rmdir()
    await until(own.is_dir)
    assert mode_of(own) == 0o777


async def test_a_container_gets_the_directories_of_its_first_device(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """At the paths where tt-umd looks; configured mounts come in addition, or in their place."""
    first, second = (*node.chips, *node.add("n150"))
    mounts = (Mount("/srv", "/models"), Mount("/mine", "/dev/hugepages"))
    daemon = await start()
    await kubelet.registered(N150)
    got = await kubelet.admit("both", "main", {N150: 2})
    assert {mount.host_path for mount in got.mounts} == {
        str(directory_of(node, first.bdf)),
        str(directory_of(node, first.bdf, "hugepages")),
    }
    kubelet.delete("both")
    daemon.reload(mounts=mounts)
    await until(lambda: daemon.daemon.host.settings.mounts)
    await kubelet.wait_for(lambda: not kubelet.allocated(N150))
    found = await hugepages_of(kubelet, "one")
    assert found["/models"] == "/srv" and found["/dev/hugepages"] == "/mine"
    assert Path(found["/dev/hugepages-1G"]).name in (first.bdf, second.bdf)


@pytest.mark.parametrize("mode", ["host", "none"])
async def test_other_modes_use_no_directories(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, mode: str
) -> None:
    """The host's own, or nothing; none is made, and what is at their place does not matter."""
    obstacle = directory_of(node).parent
    obstacle.touch()
    daemon = await start(hugepages=mode)
    await kubelet.registered(N150)
    found = await hugepages_of(kubelet, "pod")
    own = {f"/dev/{name}": f"{node.root}/dev/{name}" for name in ("hugepages-1G", "hugepages")}
    assert found == (own if mode == "host" else {})
    await kubelet.running("pod", "main")
    assert obstacle.read_bytes() == b"" and "hugepage" not in status(daemon)


async def test_with_cdi_containers_have_the_hosts_directory(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """One CDI file is for all containers."""
    (short_tmp / "cdi").mkdir()
    await start(device_list_strategy="cdi", cdi_dir=str(short_tmp / "cdi"))
    await kubelet.registered(N150)
    assert await hugepages_of(kubelet, "pod") == {}
    spec = (short_tmp / "cdi" / ttdp.CDI_FILE).read_text()
    assert f'"{node.root}/dev/hugepages-1G"' in spec and HugepageDirectories.NAME not in spec


async def test_without_a_directory_allocate_is_refused_with_the_reason(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Log and status report it; it works again as soon as the directory can be made."""
    obstacle = directory_of(node).parent
    obstacle.touch()
    daemon = await start()
    await kubelet.registered(N150)
    await until(lambda: "hugepage directories cannot be used" in caplog.text)
    await until(lambda: "hugepage directories cannot be used" in status(daemon))
    with pytest.raises(AdmissionError, match=rf"no hugepage directory for device {A}"):
        await kubelet.admit("pod", "main", {N150: 1})
    obstacle.unlink()
    await until(lambda: "hugepage directories" not in status(daemon))
    assert await hugepages_of(kubelet, "next")


def another_users(parent: Path, precious: Path) -> None:
    precious.rename(parent)
    os.chown(parent, OTHER, OTHER)


def a_link(parent: Path, precious: Path) -> None:
    parent.symlink_to(precious)


@needs_root
@pytest.mark.parametrize("make", [another_users, a_link])
def test_a_directory_around_them_that_is_not_roots_own_is_not_used(
    tmp_path: Path, make: Any
) -> None:
    """Whoever made it could put anything in the place of a device's directory."""
    precious = tmp_path / "precious"
    (precious / A).mkdir(mode=0o700, parents=True)
    (precious / A / "file").touch()
    precious.chmod(0o700)
    parent = tmp_path / "hugepages" / HugepageDirectories.NAME
    parent.parent.mkdir()
    make(parent, precious)

    directories = HugepageDirectories(Settings(dev_root=str(tmp_path)))
    with pytest.raises(OSError, match=HugepageDirectories.NAME):
        directories.mounts(A)
    directories.clean_unused(())
    assert (parent / A / "file").exists() and [*parent.iterdir()] == [parent / A]


@pytest.mark.parametrize("obstacle", ["cleaning", "a link"])
async def test_what_cannot_be_cleaned_stops_nothing_else(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, obstacle: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Pods wait, and the reason is shown; devices, files and watchdog go on."""
    daemon = await start(interval=0.05)
    await kubelet.registered(N150)
    await run(kubelet, "train")
    parent = directory_of(node).parent
    with monkeypatch.context() as patch:
        if obstacle == "a link":
            parent.rename(parent.with_name("elsewhere"))
            parent.symlink_to("elsewhere")
        else:
            (parent / A / PAGE).touch()

            genuine = os.rename

            def refuse(source: Any, target: Any, **keywords: Any) -> None:
                if "closed" in str(target):
                    raise OSError(30, "Read-only file system")
                genuine(source, target, **keywords)

            def remove(*_: Any) -> None:
                raise OSError(30, "Read-only file system")

            patch.setattr("ttdp._remove_files", remove)
            patch.setattr("os.rename", refuse)
        kubelet.delete("train")
        await until(lambda: "hugepage directories cannot be used" in status(daemon))
        polls = daemon.daemon.host.polled_at
        await until(lambda: daemon.daemon.host.polled_at > polls + 0.2)
        assert "cannot read" not in caplog.text and "internal error" not in caplog.text
        node.chips[0].vanish()
        await kubelet.wait_for(lambda: not kubelet.healthy(N150))

    if obstacle == "a link":
        parent.unlink()
    await until(lambda: "hugepage directories" not in status(daemon))


# -- whose files are removed, and when -------------------------------------------------------------


async def test_the_files_of_a_pod_that_has_ended_are_removed(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Without a successor; also subdirectories. The directory itself stays."""
    await start()
    await kubelet.registered(N150)
    await run(kubelet, "train")
    own = directory_of(node)
    (own / PAGE).touch()
    (own / "a" / "b").mkdir(parents=True)
    (own / "a" / "b" / "c").symlink_to("/")
    kubelet.delete("train")
    await until(lambda: not any(own.iterdir()))
    assert own.is_dir()


async def test_a_pod_that_lives_keeps_its_files_for_as_long_as_it_lives(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Over restarts of its container and of the daemon, though evidence would have ended."""
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.registered(N150)
    await run(kubelet, "train")
    page = directory_of(node) / PAGE
    page.touch()
    begin = time.monotonic()
    await until(lambda: time.monotonic() > begin + 2 * ttdp.WRITTEN_WITHIN)
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: len(kubelet.find("running")) == 2)
    assert page.exists()
    await daemon.stop()
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2)
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: len(kubelet.find("running")) == 3)
    assert page.exists()


async def test_a_restarted_daemon_knows_which_containers_have_started(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that started a moment before: that is saved at once."""
    monkeypatch.setattr(ttdp, "ROUND", 3600)
    daemon = await start(state_dir=str(short_tmp), interval=3600)
    await kubelet.registered(N150)
    await run(kubelet, "train")
    node_state = daemon.daemon.node
    (record,) = node_state.allocations._records.values()
    node_state.save_state([], time.monotonic())

    def saved() -> bool:
        (row,) = json.loads((short_tmp / "state.json").read_text())["allocations"]
        return bool(row["start_was_allowed"])

    await until(saved)
    record.start_was_allowed = False
    node_state.save_state([], time.monotonic())
    assert not saved()
    node_state.allow_start(record.allocation)
    await until(saved)


async def test_a_restarted_daemon_without_its_state_removes_nothing_of_a_pod_that_runs(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """It does not know whether the container has started, so it takes it to have."""
    daemon = await start()
    await kubelet.registered(N150)
    await run(kubelet, "train")
    page = directory_of(node) / PAGE
    page.touch()
    await daemon.stop()
    await start()
    await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2)
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: len(kubelet.find("running")) == 2)
    assert page.exists()


async def test_containers_of_a_pod_find_the_files_of_those_before_them(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Only the first one's start removes files, those of former pods."""
    page = directory_of(node) / PAGE
    await start()
    await kubelet.registered(N150)
    containers = [
        Container("prepare", {N150: 1}, "init"),
        Container("side", {N150: 1}, "restartable"),
        Container("main", {}),
    ]
    await kubelet.admit_pod("train", containers)
    await kubelet.running("train", "prepare")
    page.touch()
    await kubelet.running("train", "main")
    assert page.exists()


async def test_a_successor_starts_with_clean_pages(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, not when the evidence for the former pod has ended; also after a forced deletion."""
    monkeypatch.setattr(ttdp, "EVIDENCE_LASTS", 3600)
    await start()
    await kubelet.registered(N150)
    page = directory_of(node) / PAGE
    for number, end in enumerate((kubelet.delete, kubelet.force_delete, kubelet.delete)):
        await kubelet.admit(f"pod-{number}", "main", {N150: 1})
        await kubelet.running(f"pod-{number}", "main")
        assert not page.exists()
        page.touch()
        end(f"pod-{number}")
        if end == kubelet.force_delete:
            kubelet.end(f"pod-{number}")


async def test_users_of_a_shared_device_keep_each_others_files(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """They have one directory, which is cleaned when none of them is left."""
    await start(sharing=SHARED)
    await kubelet.registered(N150)
    page = directory_of(node) / PAGE
    await run(kubelet, "one")
    page.touch()
    await run(kubelet, "two")
    assert page.exists()
    kubelet.delete("one")
    begin = time.monotonic()
    await until(lambda: time.monotonic() > begin + 2 * ttdp.WRITTEN_WITHIN)
    assert page.exists()
    kubelet.delete("two")
    await until(lambda: not page.exists())


async def test_what_users_of_a_shared_device_left_in_dev_shm_is_removed_after_the_last_one(
    kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """It would take memory until the next boot; and later containers find it open to all."""
    shm = short_tmp / "locks" / "n150"
    sharing = Sharing(lock_dir=str(shm.parent), resources=(SharedResource("n150", 2),))
    await start(sharing=sharing)
    await kubelet.registered(N150)
    await run(kubelet, "one")
    await run(kubelet, "two")
    (shm / "lock").touch()
    shm.chmod(0o700)
    kubelet.delete("one")
    begin = time.monotonic()
    await until(lambda: time.monotonic() > begin + 2 * ttdp.WRITTEN_WITHIN)
    assert (shm / "lock").exists()
    kubelet.delete("two")
    await until(lambda: not any(shm.iterdir()) and mode_of(shm) == 0o1777)


async def test_nothing_is_removed_before_a_checkpoint_was_read(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """Until then it is not known which pods run."""
    page = directory_of(node) / PAGE
    page.parent.mkdir(parents=True)
    page.parent.parent.chmod(0o700)
    page.touch()
    daemon = await start(interval=0.05)
    await ready(daemon)
    polls = daemon.daemon.host.polled_at
    await until(lambda: daemon.daemon.host.polled_at > polls + 0.3)
    assert page.exists()


# -- directories that a container has changed ------------------------------------------------------


@pytest.fixture
def directories(tmp_path: Path) -> HugepageDirectories:
    (tmp_path / "hugepages").mkdir()
    found = HugepageDirectories(Settings(dev_root=str(tmp_path)))
    found.mounts(A)
    return found


@pytest.fixture
def own(tmp_path: Path, directories: HugepageDirectories) -> Iterator[Path]:
    path = tmp_path / "hugepages" / HugepageDirectories.NAME / A
    (path / PAGE).touch()
    yield path


def given_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER)


def with_too_many_files(path: Path) -> None:
    for number in range(20):
        (path / str(number)).touch()


def with_too_deep_directories(path: Path) -> None:
    """A container could make more than there are descriptors, or levels of recursion."""
    path.joinpath(*"x" * 50).mkdir(parents=True)


def replaced(path: Path) -> None:
    (path / PAGE).unlink()
    path.rmdir()
    path.symlink_to("/")


@needs_root
@pytest.mark.parametrize(
    "spoil", [given_away, with_too_many_files, with_too_deep_directories, replaced]
)
def test_a_directory_that_cannot_be_cleaned_is_put_aside(
    directories: HugepageDirectories, own: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, spoil: Any,
) -> None:  # fmt: skip
    """The device has a new one; the log and `check` name the one that keeps its pages."""
    if spoil == with_too_many_files:
        monkeypatch.setattr(ttdp, "MAX_FILES", 10)
    spoil(own)
    directories.renew(A)
    assert mode_of(own) == 0o777 and own.stat().st_uid == 0 and not any(own.iterdir())
    (aside,) = directories.put_aside()
    assert aside.startswith(f"{own}.closed-") and aside in caplog.text

    # Later rounds try again: other processes may have gone, and the rest is less.
    for _ in range(3):
        directories.clean_unused(())
    can_be_removed = spoil in (given_away, with_too_many_files)
    assert [*directories.put_aside()] == ([] if can_be_removed else [aside])


def test_a_mode_that_was_changed_is_set_again(directories: HugepageDirectories, own: Path) -> None:
    """By a container; or the runtime created what a pod from before a reboot has mounted."""
    own.chmod(0o755)
    own.parent.chmod(0o755)
    directories.mounts(A)
    directories.renew(A)
    assert mode_of(own) == 0o777 and mode_of(own.parent) == 0o700
    assert not any(own.iterdir()) and not [*directories.put_aside()]


def test_what_is_no_directory_is_never_mounted(directories: HugepageDirectories, own: Path) -> None:
    """A container that had the host's hugetlbfs can have left a link there."""
    replaced(own)
    (mount,) = directories.mounts(A)
    assert Path(mount.host) == own and not own.is_symlink() and mode_of(own) == 0o777


@needs_root
def test_one_file_that_cannot_be_removed_keeps_no_others(
    directories: HugepageDirectories, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's user can close a directory to root, which has no capabilities here."""
    genuine = ttdp._opened_directory

    def closed(path: str, parent: int | None = None) -> Any:
        if path == "closed":
            raise PermissionError(errno.EACCES, "Permission denied")
        return genuine(path, parent)

    (own / "closed").mkdir()
    for number in range(5):
        (own / str(number)).touch()
    monkeypatch.setattr("ttdp._opened_directory", closed)
    directories.renew(A)
    (aside,) = directories.put_aside()
    assert os.listdir(aside) == ["closed"]


def test_a_former_pod_that_has_the_directory_open_finds_nothing_of_the_next(
    directories: HugepageDirectories, own: Path
) -> None:
    """It could have passed the descriptor on to another pod, by a socket."""
    former = os.open(own, os.O_RDONLY)
    directories.renew(A)
    (own / PAGE).touch()
    with pytest.raises(FileNotFoundError):
        os.open(PAGE, os.O_RDONLY, dir_fd=former)
    os.close(former)


def test_no_link_leads_out_of_a_directory(
    directories: HugepageDirectories, own: Path, tmp_path: Path
) -> None:
    """Links are removed, not followed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (own / "link").symlink_to(precious)
    (own / "file").symlink_to(precious / "file")
    directories.renew(A)
    assert (precious / "file").exists() and not any(own.iterdir())


def test_the_daemons_own_error_puts_nothing_aside(
    directories: HugepageDirectories, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors the directory stays, to be cleaned later."""

    genuine = os.open

    def exhausted(path: Any, *arguments: Any, **keywords: Any) -> int:
        if path == A:
            raise OSError(24, "Too many open files")
        return genuine(path, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many open files"):
        patch.setattr("os.open", exhausted)
        directories.renew(A)
    assert (own / PAGE).exists() and not [*directories.put_aside()]


@pytest.fixture
async def kubelet(kubelet: Kubelet) -> AsyncIterator[Kubelet]:
    yield kubelet
    assert kubelet.killed == []
