"""Files for others, the state file, lock directories: that they follow, and that none is stale."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import allocation, bdf, chip, decide
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from ttdp import AllocationTracker, Fault, Mount, OutputFile, Settings, SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
NOBODY = 65534


@pytest.fixture
def places(directory: Path) -> dict[str, Path]:
    """The files for others, by the key of their setting; their directories exist."""
    found = {key: Path(path) for key, path in outlets(directory.parent).items()}
    del found["pod_resources_socket"]
    found["cdi_dir"] /= ttdp.CDI_FILE
    found["labels_dir"] /= ttdp.LABELS_FILE
    for path in found.values():
        path.parent.mkdir()
    return found


def described(file: Path) -> dict[str, str]:
    """The device files by device in a CDI file; none without a file."""
    return ttdp.cdi_nodes(file.read_text()) if file.is_file() else {}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def device_files(node: SimulatedNode) -> dict[str, str]:
    """What a CDI file must contain now."""
    return {chip.bdf: str(chip.device_node) for chip in node.chips if chip.ordinal is not None}


@contextmanager
def no_room(file: Path) -> Iterator[None]:
    """A new version of a file cannot be written: its name is a directory's, for root, too."""
    obstacle = file.with_name(f".{file.name}.new")
    obstacle.mkdir()
    yield
    obstacle.rmdir()


async def test_the_files_follow_the_chips_and_outlive_the_daemon(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """Right before READY, then by events, with polls an hour apart; everybody can read them."""
    first, second = node.add("n150") + node.add("n150")
    cdi, features = places["cdi_dir"], places["labels_dir"]
    cdi.write_text(ttdp.cdi_spec([chip(1).function], Settings(), ()) or "")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    assert described(cdi) == device_files(node)
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: described(cdi) == device_files(node))
    second.vanish()
    await until(lambda: [*described(cdi)] == [first.bdf])
    await until(lambda: "n150.count=1\n" in features.read_text())
    first.vanish()
    await until(lambda: not cdi.exists() and "n150.count=0\n" in features.read_text())
    first.come_back()
    await until(lambda: described(cdi) == device_files(node))
    await daemon.stop()
    assert described(cdi) == device_files(node)
    assert mode_of(cdi) == mode_of(features) == 0o644


async def test_a_directory_that_does_not_exist_is_used_once_it_does(
    node: SimulatedNode, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a line in the log; a file that others remove or replace is written again."""
    node.add("n150")
    daemon = await start(interval=0.05, health={"heartbeat_misses": 1_000_000})
    await until(lambda: daemon.notified("READY=1"))
    file = Path(daemon.settings.cdi_dir) / ttdp.CDI_FILE
    file.parent.mkdir()
    await until(lambda: described(file) == device_files(node))
    file.unlink()
    await until(lambda: described(file) == device_files(node))
    file.write_text("{}")
    await until(lambda: file.read_text() != "{}")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


async def test_a_reload_moves_a_file_or_removes_it(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path], short_tmp: Path
) -> None:
    """One that cannot be removed is tried again at each poll."""
    node.add("n150")
    other = short_tmp / "other"
    other.mkdir()
    daemon = await start(interval=0.05)
    await until(lambda: all(file.is_file() for file in places.values()))
    features = places["labels_dir"]
    features.unlink()
    features.mkdir()  # which unlink() does not remove
    daemon.reload(cdi_dir=str(other), labels_dir="", metrics_file="")
    await until(lambda: described(other / ttdp.CDI_FILE) == device_files(node))
    await until(lambda: not places["cdi_dir"].exists() and not places["metrics_file"].exists())
    features.rmdir()
    features.write_text("stale")
    await until(lambda: not features.exists())


@pytest.mark.parametrize("boots", [1, 2])
async def test_the_next_daemon_removes_what_a_former_configuration_wanted(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path], short_tmp: Path, boots: int
) -> None:
    """Also what the last daemon could not remove, and after a reboot."""
    node.add("n150")
    state = short_tmp / "state.json"
    boot_id = node.root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("boot 0\n")
    none = dict.fromkeys(places, "")
    daemon = await start(interval=0.05, state_dir=str(short_tmp))
    await until(lambda: all(path.is_file() for path in places.values()))
    await until(lambda: str(places["metrics_file"]) in state.read_text())
    await daemon.stop()
    for path in places.values():
        path.unlink()
        path.mkdir()
    for number in range(2):  # the last daemon and its successor
        boot_id.write_text(f"boot {number % boots}\n")
        daemon = await start(interval=0.05, state_dir=str(short_tmp), **none)
        await until(lambda: daemon.notified("READY=1"))  # noqa: B023
        await daemon.stop()
    for path in places.values():
        path.rmdir()
        path.write_text("stale")
    await start(interval=0.05, state_dir=str(short_tmp), **none)
    await until(lambda: not any(path.exists() for path in places.values()))
    await until(lambda: '"files": []' in state.read_text())


def test_a_file_that_cannot_be_written_is_removed_if_stale_and_written_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is right is not touched; each failure is one line, however often it is met."""
    path = tmp_path / "file"
    file = OutputFile(str(path))
    file.keep("old\n")
    with no_room(path):
        file.keep("old\n")
        OutputFile(str(path)).keep("old\n")  # the next daemon's
        assert path.read_text() == "old\n"
        for _ in range(3):
            file.keep("new\n")
            assert not path.exists()
        path.mkdir()  # which can neither be replaced nor removed
        for _ in range(3):
            file.keep("new\n")
        path.rmdir()
    failures = [*["cannot be written"] * 2, "is out of date and cannot be removed"]
    assert caplog.messages == [f"{path} {each}: Is a directory" for each in failures]
    file.keep("new\n")
    assert path.read_text() == "new\n"


@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("name", [".x.prom.new", "x.prom"])
def test_a_planted_link_is_not_followed(tmp_path: Path, mode: int, name: str) -> None:
    """Whoever can write in a directory cannot have root write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / name).symlink_to(victim)
    path = tmp_path / "x.prom"
    OutputFile(str(path), mode).keep("text")
    assert victim.read_text() == "precious" and not path.is_symlink()
    assert path.read_text() == "text" and mode_of(path) == mode


def test_a_link_planted_at_the_last_moment_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is created, never opened; the next attempt succeeds."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    file = OutputFile(f"{tmp_path}/x.prom")
    link = tmp_path / ".x.prom.new"
    link.symlink_to(victim)
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", lambda _: None)  # as if it were planted afterwards
        file.keep("text")
        assert victim.read_text() == "precious" and link.is_symlink()
    file.keep("text")
    assert (tmp_path / "x.prom").read_text() == "text"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon whose state is saved."""
    boot_id = tmp_path / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("this boot\n")
    return Settings(
        state_dir=str(tmp_path), proc_root=f"{tmp_path}/proc", device_plugin_dir=str(tmp_path)
    )


def state_of(settings: Settings) -> tuple[Any, Any, Any]:
    """What a daemon that starts now knows."""
    state = ttdp.StateFile(settings)
    return state.files, state.chips, state.allocations


def test_chips_and_allocations_survive_a_restart_of_the_daemon(settings: Settings) -> None:
    """With their lasting faults; a chip is absent until it is seen again."""
    tripped = chip(1, fault=Fault.TRIPPED, serial="A" * 16)
    record = ttdp.ChipRecord(tripped, ttdp.Vitals(7, 0, False, 3, 4.5, None), was_seen=True)
    held = allocation("n150", bdf(1), buses=[1])
    pending = held._replace(pod="", container="")
    rows = [(each.resource, [bdf(1)], [bdf(1)], each.pod, each.container, at, None)
            for each, at in ((held, None), (pending, 12.5))]  # fmt: skip
    saved = {"files": ["/x"], "chips": {bdf(1): record.to_state()}, "allocations": rows}
    ttdp.StateFile(settings).save(**saved)
    files, chips, allocations = state_of(settings)
    (loaded,) = ttdp.Inventory(chips).records.values()
    assert files == ["/x"]
    assert not loaded.chip.present and loaded.chip.identity == tripped.identity
    assert loaded.to_state() == record.to_state() and loaded.vitals.tripped_at == 4.5
    tracker = AllocationTracker(settings, allocations, 20.0)
    assert {*tracker.in_force(20.0)} == {held, pending} and tracker.to_state() == rows


def test_only_files_are_kept_from_another_boot(settings: Settings, tmp_path: Path) -> None:
    """Pods and faults are new ones; files can outlive a reboot."""
    ttdp.StateFile(settings).save(files=["/x"], chips={"a": 1}, allocations=[1])
    assert state_of(settings) == (["/x"], {"a": 1}, [1])
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("next boot\n")
    assert state_of(settings) == (["/x"], {}, [])


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"precious", b"precioux"), (b'"version": 2', b'"version": 3'), (b"}", b""), (b"\n", b" "),
     (b"p", b"\xff"), (b"", b"garbage"), (None, b""), (None, b"[" * 100_000),
     (None, b'{"version": 0, "files": [], "boot": ""}')],
    ids=["a flipped byte", "edited by hand", "torn", "no checksum", "no text", "longer", "empty",
         "nested", "an older version"],
)  # fmt: skip
def test_a_state_file_that_the_daemon_did_not_write_is_discarded_as_a_whole(
    settings: Settings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    old: bytes | None,
    new: bytes,
) -> None:
    """With one line in the log; old: what is replaced; None: everything, with a checksum."""
    ttdp.StateFile(settings).save(files=["precious"], chips={"a": 1}, allocations=[1])
    path = tmp_path / "state.json"
    content = f"{ttdp._checksum(new.decode('latin-1'))}\n".encode() + new
    if old is not None:
        content = path.read_bytes().replace(old, new, 1)
    path.write_bytes(content)
    assert state_of(settings) == ([], {}, [])
    (line,) = caplog.messages
    assert line.startswith(f"{path} is discarded: ")


def test_the_state_stays_if_a_new_one_cannot_be_written(settings: Settings, tmp_path: Path) -> None:
    """It is checked when it is read, so an old one is better than none; only root can read it."""
    path = tmp_path / "state.json"
    state = ttdp.StateFile(settings)
    state.save(files=["/old"])
    text = path.read_text()
    with no_room(path):
        state.save(files=["/new"])
        assert path.read_text() == text
    state.save(files=["/new"])
    assert "/new" in path.read_text() and mode_of(path) == 0o600


def shared(lock_dir: Path | str) -> Sharing:
    return Sharing(lock_dir=str(lock_dir), resources=(SharedResource("n150", 4),))


async def mounts(kubelet: Kubelet, pod: str) -> list[tuple[str, str, bool]]:
    """Return host path, container path and read_only of the mounts in a new pod."""
    got = await kubelet.admit(pod, "main", {N150: 1})
    return [(each.host_path, each.container_path, each.read_only) for each in got.mounts]


async def test_containers_on_a_shared_device_share_their_locks_also_if_one_of_them_owns_them(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Under either strategy; root in a container can give them away and close them."""
    node.add("n150")
    locks = short_tmp / "locks/n150"
    own = (str(locks), "/dev/shm", False)
    more = {"mounts": (Mount("/m", "/m"),), "sharing": shared(locks.parent), "interval": 0.05}
    for strategy, wanted in (("device-specs", [("/m", "/m", False), own]), ("cdi", [own])):
        daemon = await start(device_list_strategy=strategy, **more)
        await kubelet.registered(N150)
        assert await mounts(kubelet, f"{strategy}-1") == wanted
        locks.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(locks, NOBODY, NOBODY)
        assert await mounts(kubelet, f"{strategy}-2") == wanted
        await daemon.stop()
        await kubelet.wait_for(lambda: not kubelet.manager.plugins.is_listed(N150))


async def test_locks_exist_before_any_allocation_and_are_created_again(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path
) -> None:
    """Containers start again with their former answer after a reboot, or a clean-up."""
    node.add("n150")
    daemon = await start(interval=0.05, sharing=shared(short_tmp / "locks"))
    await until(lambda: daemon.notified("READY=1"))
    locks = short_tmp / "locks/n150"
    locks.rmdir()
    await until(lambda: locks.is_dir() and mode_of(locks) == 0o1777)


def locks_of(lock_dir: Path | str) -> str | None:
    """The /dev/shm of a container on a shared n150."""
    settings = Settings(sharing=shared(lock_dir))
    resource = decide([chip(1)], settings).resources[N150]
    return ttdp.lock_path(resource, resource.devices, settings)


def test_without_a_lock_directory_there_are_no_locks_and_dev_shm_is_the_hosts() -> None:
    """The host's own stays as it is."""
    mode = os.stat("/dev/shm").st_mode
    assert locks_of("") is None and locks_of("/dev/shm") == "/dev/shm"
    assert os.stat("/dev/shm").st_mode == mode


@pytest.mark.parametrize(
    "spoil",
    [
        lambda locks, elsewhere: (locks / "n150").symlink_to(elsewhere),
        lambda locks, elsewhere: (locks / "n150").touch(),
        lambda locks, elsewhere: (locks.rmdir(), locks.symlink_to(elsewhere)),
        lambda locks, _: os.chown(locks, NOBODY, NOBODY) if os.geteuid() == 0 else None,
    ],
    ids=["a link", "a file", "a link above it", "another user's"],
)
def test_only_directories_of_root_are_used_and_links_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, Path], object]
) -> None:
    """The request is rejected; what is there stays as it is."""
    locks, elsewhere = tmp_path / "locks", tmp_path / "elsewhere"
    locks.mkdir()
    elsewhere.mkdir(mode=0o700)
    spoil(locks, elsewhere)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY + 1)  # so that it is not ours either
    with pytest.raises(ttdp.RequestError, match=f"no directory for the locks of {N150}: {locks}"):
        locks_of(locks)
    assert mode_of(elsewhere) == 0o700 and not [*elsewhere.iterdir()]
