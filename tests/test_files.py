"""Files for others and for ourselves: what they hold, that they follow, that none is false."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from ttdp import Mount, PciFunction, Settings

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
ONE = PciFunction("0000:01:00.0", "wormhole", "n150", 0, 3, "/dev/tenstorrent/3", "/sys/x")
TWO = PciFunction("0000:02:00.0", "blackhole", "p150a", None, 0, "/dev/tenstorrent/0", "/sys/y")


@pytest.fixture
def places(directory: Path) -> dict[str, Path]:
    """The files for others, by the key of their setting; their directories are there."""
    found = {key: Path(path) for key, path in outlets(directory.parent).items()}
    del found["pod_resources_socket"]
    found["cdi_dir"] /= ttdp.CDI_FILE
    found["labels_dir"] /= ttdp.LABELS_FILE
    for path in found.values():
        path.parent.mkdir()
    return found


def described(file: Path) -> dict[str, str]:
    """The host's nodes by the device's name in a CDI file; nothing where there is no file."""
    try:
        return ttdp.cdi_nodes(file.read_text())
    except FileNotFoundError:
        return {}


def nodes_of(node: SimulatedNode) -> dict[str, str]:
    """What a CDI file has to say now."""
    return {chip.bdf: str(chip.device_node) for chip in node.chips if chip.ordinal is not None}


# -- CDI -------------------------------------------------------------------------------------------


def spec(*functions: PciFunction, mounts: tuple[Mount, ...] = (), **settings: Any) -> Any:
    return json.loads(ttdp.cdi_spec(functions, Settings(**settings), mounts) or "{}")


def test_a_chip_is_a_device_by_its_address_and_so_are_all_of_them() -> None:
    """The node under the host's number, to read and write; the vendor is the resource domain."""
    found = spec(ONE, TWO, resource_domain="example.org")
    first, second = (
        {"path": path, "hostPath": path, "permissions": "rw"} for path in (ONE.path, TWO.path)
    )
    assert found == {
        "cdiVersion": "0.5.0",
        "kind": "example.org/device",
        "devices": [
            {"name": ONE.bdf, "containerEdits": {"deviceNodes": [first]}},
            {"name": TWO.bdf, "containerEdits": {"deviceNodes": [second]}},
            {"name": "all", "containerEdits": {"deviceNodes": [first, second]}},
        ],
    }


def test_mounts_are_for_every_device() -> None:
    """Bound as they are configured."""
    mounts = (Mount("/srv/m", "/m", True), Mount("/dev/hugepages", "/dev/hugepages"))
    binds = spec(ONE, mounts=mounts)["containerEdits"]["mounts"]
    shown = [(bind["hostPath"], bind["containerPath"], bind["options"]) for bind in binds]
    assert shown == [
        ("/srv/m", "/m", ["rbind", "ro"]),
        ("/dev/hugepages", "/dev/hugepages", ["rbind", "rw"]),
    ]


def test_without_a_chip_there_is_no_cdi_file() -> None:
    """CDI knows no specification without devices."""
    assert ttdp.cdi_spec([], Settings(), ()) is None


# -- files that follow -----------------------------------------------------------------------------


async def test_the_files_follow_what_is_there(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """A chip that is unhealthy stays in the CDI file, one without a node does not."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.05)
    cdi, features = places["cdi_dir"], places["labels_dir"]
    await until(lambda: described(cdi) == nodes_of(node))
    second.vanish()
    await until(lambda: [*described(cdi)] == [first.bdf])
    await until(lambda: "n150.count=1\n" in features.read_text())
    first.vanish()
    await until(lambda: not cdi.exists() and "n150.count=0\n" in features.read_text())
    first.come_back()
    second.come_back()
    await until(lambda: described(cdi) == nodes_of(node))
    first.die()
    await until(lambda: daemon.chip(first.bdf).health.fault)
    assert described(cdi) == nodes_of(node)


async def test_the_files_follow_by_events_alone(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """With polls an hour apart: between two polls a CDI file would give each chip for the other."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: daemon.chip(first.bdf).function.ordinal == first.ordinal)
    await until(lambda: described(places["cdi_dir"]) == nodes_of(node))


async def test_the_cdi_file_is_right_before_the_kubelet_starts(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """The kubelet is ordered behind READY, and its first containers look their devices up there."""
    node.add("n150")
    places["cdi_dir"].write_text(ttdp.cdi_spec([ONE], Settings(), ()) or "")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    assert described(places["cdi_dir"]) == nodes_of(node)


async def test_the_files_are_for_everybody_and_outlive_the_daemon(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """A container can be started while the daemon is not there."""
    node.add("n150")
    daemon = await start(interval=0.05)
    await until(lambda: all(file.exists() for file in places.values()))
    await daemon.stop()
    assert {stat.S_IMODE(file.stat().st_mode) for file in places.values()} == {0o644}


async def test_a_reload_moves_a_file_or_removes_it(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path], short_tmp: Path
) -> None:
    """What the configuration no longer wants is gone."""
    node.add("n150")
    other = short_tmp / "other"
    other.mkdir()
    daemon = await start(interval=0.05)
    await until(lambda: all(file.exists() for file in places.values()))
    daemon.reload(cdi_dir=str(other), labels_dir="", metrics_file="")
    await until(lambda: described(other / ttdp.CDI_FILE) == nodes_of(node))
    assert not any(file.exists() for file in places.values())


@pytest.mark.parametrize("boot", ["the same", "another"])
async def test_what_a_former_configuration_wanted_is_removed_at_the_next_start(
    start: StartDaemon, places: dict[str, Path], short_tmp: Path, node: SimulatedNode, boot: str
) -> None:
    """Nobody would keep it true. Also after a reboot, which labels and metrics outlive."""
    node.add("n150")
    others = {key: str(path.parent) for key, path in places.items()}
    others["metrics_file"] = str(places["metrics_file"])
    daemon = await start(interval=0.1, state_dir=str(short_tmp), **others)
    await until(lambda: all(path.exists() for path in places.values()))
    await daemon.stop()
    if boot == "another":
        state = short_tmp / "state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"boot": "another"}))
    await start(interval=0.1, state_dir=str(short_tmp), **dict.fromkeys(places, ""))
    await until(lambda: not any(path.exists() for path in places.values()))


async def test_a_directory_that_is_not_there_is_worth_no_word_and_one_that_comes_is_used(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has no such reader hears nothing of it; a reader that is installed later has its file."""
    node.add("n150")
    daemon = await start(interval=0.05, health={"heartbeat_misses": 1_000_000})
    await until(lambda: daemon.notified("READY=1"))
    cdi = Path(daemon.settings.cdi_dir)
    for _ in range(2):  # as when what made the directory is removed and installed again
        assert not cdi.exists()
        cdi.mkdir()
        await until(lambda: described(cdi / ttdp.CDI_FILE) == nodes_of(node))
        (cdi / ttdp.CDI_FILE).unlink()
        await until(lambda: described(cdi / ttdp.CDI_FILE) == nodes_of(node))
        (cdi / ttdp.CDI_FILE).rename(short_tmp / "moved away")
        await until(lambda: described(cdi / ttdp.CDI_FILE) == nodes_of(node))
        cdi.rename(short_tmp / f"gone{_}")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


# -- a disk that is full ---------------------------------------------------------------------------


class Disk:
    """A small file system that can be full: a real one for root, else one that fails like it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self._monkeypatch = monkeypatch
        self._filler = path / ".filler"

    def fill(self) -> None:
        """Leave no byte; what is there can be read and removed."""
        if os.path.ismount(self.path):
            full = pytest.raises(OSError, match="No space left")
            with open(self._filler, "wb", 0) as filler, full:
                while True:
                    filler.write(bytes(4096))
            return
        genuine = os.fchmod  # which follows the writing

        def fail(descriptor: int, mode: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{self.path}/"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            genuine(descriptor, mode)

        self._monkeypatch.setattr("os.fchmod", fail)

    def free(self) -> None:
        """There is room again."""
        self._filler.unlink(missing_ok=True)
        self._monkeypatch.undo()


@pytest.fixture
def disk(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """In the place of the CDI directory."""
    path = Path(outlets(directory.parent)["cdi_dir"])
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "none", str(path)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    yield Disk(path, monkeypatch)
    if mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_what_cannot_be_written_is_removed_said_once_and_tried_again(
    disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody sees half of a file or a false one, and nothing is left beside it."""
    file = ttdp.OutputFile(str(disk.path / "file"))
    file.want("old\n")
    file.keep()
    disk.fill()
    file.want("new\n" * 2000)
    for _ in range(3):
        file.keep()
        assert {name for name in os.listdir(disk.path) if name != ".filler"} == set()
    assert [record.message for record in caplog.records] == [
        f"{disk.path}/file cannot be written: No space left on device"
    ]
    disk.free()
    file.keep()
    assert (disk.path / "file").read_text() == "new\n" * 2000


def test_a_full_disk_does_not_touch_what_is_true(disk: Disk) -> None:
    """A file that is as it is wanted is left alone."""
    file = ttdp.OutputFile(str(disk.path / "file"))
    file.want("text\n")
    file.keep()
    before = (disk.path / "file").stat()
    disk.fill()
    file.want("text\n")
    file.keep()
    assert (disk.path / "file").stat().st_ino == before.st_ino


def test_our_own_state_is_better_old_than_not_there(disk: Disk) -> None:
    """What only we read is checked when it is read; it stays where a new one finds no room."""
    file = ttdp.OutputFile(str(disk.path / "state.json"), is_state=True)
    file.want("old")
    file.keep()
    disk.fill()
    file.want("new" * 3000)
    file.keep()
    assert (disk.path / "state.json").read_text() == "old"
    disk.free()
    file.keep()
    assert (disk.path / "state.json").read_text() == "new" * 3000
    assert stat.S_IMODE((disk.path / "state.json").stat().st_mode) == 0o600


async def test_swapped_chips_and_a_full_disk_leave_no_file_that_is_false(
    node: SimulatedNode, start: StartDaemon, disk: Disk
) -> None:
    """Once the daemon has looked, a container gets the right chip or none, and then the right."""
    first, second = node.add("n150") + node.add("n150")
    await start(interval=0.05)
    file = disk.path / ttdp.CDI_FILE
    await until(lambda: described(file) == nodes_of(node))
    disk.fill()
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: described(file) in ({}, nodes_of(node)))
    disk.free()
    await until(lambda: described(file) == nodes_of(node))


async def test_a_mount_that_does_not_answer_leaves_no_file_that_is_false(
    node: SimulatedNode,
    start: StartDaemon,
    places: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dead network file system, and chips that are renumbered meanwhile."""
    dead, answers = threading.Event(), threading.Event()
    genuine = os.path.exists

    def exists(path: Any) -> bool:
        return answers.wait(60) if path == "/data" and dead.is_set() else genuine(path)

    monkeypatch.setattr("os.path.exists", exists)
    monkeypatch.setattr("ttdp.MOUNT_PATIENCE", 0.1)
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.05, mounts=(Mount("/data", "/data"),))
    await until(lambda: described(places["cdi_dir"]) == nodes_of(node))
    dead.set()
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: daemon.chip(first.bdf).function.ordinal == first.ordinal)
    try:
        false = {first.bdf: str(second.device_node), second.bdf: str(first.device_node)}
        await until(lambda: described(places["cdi_dir"]) != false)
    finally:
        answers.set()


@pytest.mark.parametrize("is_state", [False, True])
def test_a_link_that_was_planted_is_not_followed(tmp_path: Path, is_state: bool) -> None:
    """Who may write in a directory of ours cannot have root write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".x.prom.new").symlink_to(victim)
    file = ttdp.OutputFile(str(tmp_path / "x.prom"), is_state=is_state)
    file.want("text")
    file.keep()
    assert victim.read_text() == "precious" and not (tmp_path / "x.prom").is_symlink()
    assert (tmp_path / "x.prom").read_text() == "text"


def test_a_file_that_became_a_link_is_a_file_again(tmp_path: Path) -> None:
    """What stands under its name is replaced, not written through."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "x").symlink_to(victim)
    file = ttdp.OutputFile(str(tmp_path / "x"))
    file.want("text")
    file.keep()
    assert victim.read_text() == "precious" and not (tmp_path / "x").is_symlink()


def test_a_file_that_cannot_be_removed_is_said_to_be_false(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory in its place, say: nobody should believe it."""
    (tmp_path / "x").mkdir()
    file = ttdp.OutputFile(str(tmp_path / "x"))
    file.want(None)
    file.keep()
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path}/x is false and cannot be removed: ")


def test_two_failures_at_each_poll_are_two_lines_in_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is in the way can neither be replaced nor removed, as where all is read-only."""
    (tmp_path / "x").mkdir()
    file = ttdp.OutputFile(str(tmp_path / "x"))
    file.want("text")
    for _ in range(3):
        file.keep()
    assert len(caplog.messages) == len({*caplog.messages}) == 2
