"""Files for others and the state file: what they hold, that they follow, that none is stale."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import allocation, bdf, chip
from tests.conftest import StartDaemon
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from ttdp import (
    AllocationTracker,
    Fault,
    HealthSettings,
    Inventory,
    Mount,
    OutputFile,
    Reading,
    Settings,
    Telemetry,
)

pytestmark = pytest.mark.usefixtures("ticking")

ONE = chip(1, ordinal=3).function
TWO = chip(2, "p150a", ordinal=0).function


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


# -- what they hold --------------------------------------------------------------------------------


def test_the_cdi_file_describes_each_chip_and_all_of_them() -> None:
    """The device file under the host's number, `rw`; for every device the mounts."""
    mounts = (Mount("/srv/m", "/m", True), Mount("/dev/hugepages", "/dev/hugepages"))
    settings = Settings(resource_domain="example.org")
    first, second = (
        {"path": path, "hostPath": path, "permissions": "rw"} for path in (ONE.path, TWO.path)
    )
    without_mounts = {
        "cdiVersion": "0.5.0",
        "kind": "example.org/device",
        "devices": [
            {"name": ONE.bdf, "containerEdits": {"deviceNodes": [first]}},
            {"name": TWO.bdf, "containerEdits": {"deviceNodes": [second]}},
            {"name": "all", "containerEdits": {"deviceNodes": [first, second]}},
        ],
    }
    binds = [
        {"hostPath": "/srv/m", "containerPath": "/m", "options": ["rbind", "ro"]},
        {"hostPath": "/dev/hugepages", "containerPath": "/dev/hugepages",
         "options": ["rbind", "rw"]},
    ]  # fmt: skip
    assert json.loads(ttdp.cdi_spec([ONE, TWO], settings, ()) or "") == without_mounts
    wanted = without_mounts | {"containerEdits": {"mounts": binds}}
    assert json.loads(ttdp.cdi_spec([ONE, TWO], settings, mounts) or "") == wanted
    assert ttdp.cdi_spec([], settings, mounts) is None, "CDI has no file without devices"


# -- that they follow ------------------------------------------------------------------------------


async def test_the_files_follow_the_chips_and_outlive_the_daemon(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """The CDI file has the chips with a device file, healthy or not; everybody can read it."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.05)
    cdi, features = places["cdi_dir"], places["labels_dir"]
    await until(lambda: described(cdi) == device_files(node))
    second.vanish()
    await until(lambda: [*described(cdi)] == [first.bdf])
    await until(lambda: "n150.count=1\n" in features.read_text())
    first.vanish()
    await until(lambda: not cdi.exists() and "n150.count=0\n" in features.read_text())
    first.come_back()
    second.come_back()
    await until(lambda: described(cdi) == device_files(node))
    first.die()
    await until(lambda: daemon.chip(first.bdf).fault)
    await until(places["metrics_file"].exists)
    await daemon.stop()
    assert described(cdi) == device_files(node)
    assert {stat.S_IMODE(file.stat().st_mode) for file in places.values()} == {0o644}


async def test_the_cdi_file_is_right_before_the_kubelet_starts_and_follows_events(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """With polls an hour apart: a stale one would give a container another pod's chip."""
    first, second = node.add("n150") + node.add("n150")
    places["cdi_dir"].write_text(ttdp.cdi_spec([ONE], Settings(), ()) or "")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    assert described(places["cdi_dir"]) == device_files(node)
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: described(places["cdi_dir"]) == device_files(node))


async def test_a_directory_that_does_not_exist_is_used_once_it_does(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a line in the log; a file that others remove or replace is written again."""
    node.add("n150")
    daemon = await start(interval=0.05, health={"heartbeat_misses": 1_000_000})
    await until(lambda: daemon.notified("READY=1"))
    file = Path(daemon.settings.cdi_dir) / ttdp.CDI_FILE
    for number in range(2):  # its reader is removed and installed again
        assert not file.parent.exists()
        file.parent.mkdir()
        await until(lambda: described(file) == device_files(node))
        file.unlink()
        await until(lambda: described(file) == device_files(node))
        file.write_text("{}")
        await until(lambda: file.read_text() != "{}")
        file.parent.rename(short_tmp / f"gone{number}")
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


# -- that none is stale ----------------------------------------------------------------------------


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
    node: SimulatedNode,
    start: StartDaemon,
    places: dict[str, Path],
    short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
    boots: int,
) -> None:
    """Also what the last daemon could not remove, and after a reboot; failures are logged once."""
    node.add("n150")
    boot_id = node.root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("boot 0\n")
    none = dict.fromkeys(places, "")
    daemon = await start(interval=0.05, state_dir=str(short_tmp))
    await until(lambda: all(path.is_file() for path in places.values()))
    await until(lambda: str(places["metrics_file"]) in (short_tmp / "state.json").read_text())
    await daemon.stop()
    for path in places.values():
        path.unlink()
        path.mkdir()
    for number in range(2):  # the last daemon and its successor
        boot_id.write_text(f"boot {number % boots}\n")
        caplog.clear()
        daemon = await start(interval=0.05, state_dir=str(short_tmp), **none)
        await until(lambda: sum("cannot be removed" in line for line in caplog.messages) == 3)
        await daemon.stop()
    for path in places.values():
        path.rmdir()
        path.write_text("stale")
    await start(interval=0.05, state_dir=str(short_tmp), **none)
    await until(lambda: not any(path.exists() for path in places.values()))
    await until(lambda: '"files": []' in (short_tmp / "state.json").read_text())


async def test_swapped_chips_leave_no_stale_file_even_if_none_can_be_written(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path]
) -> None:
    """A container gets the right chip or none, and the right one once there is room."""
    first, second = node.add("n150") + node.add("n150")
    file = places["cdi_dir"]
    await start(interval=0.05)
    await until(lambda: described(file) == device_files(node))
    with no_room(file):
        node.swap_ordinals(first.bdf, second.bdf)
        await until(lambda: not file.exists())
    await until(lambda: described(file) == device_files(node))


def test_a_file_that_cannot_be_written_is_removed_if_stale_and_written_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log; a file that is right is not touched."""
    path = tmp_path / "file"
    file = OutputFile(str(path))
    file.keep("old\n")
    with no_room(path):
        file.keep("old\n")
        assert path.read_text() == "old\n"
        for _ in range(3):
            file.keep("new\n")
            assert not path.exists()
    assert caplog.messages == [f"{path} cannot be written: Is a directory"]
    file.keep("new\n")
    assert path.read_text() == "new\n"


def test_failures_at_each_poll_are_one_line_for_each_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory in the way can neither be replaced nor removed."""
    path = tmp_path / "x"
    path.mkdir()
    file = OutputFile(str(path))
    for _ in range(3):
        file.keep(None)
    assert caplog.messages == [f"{path} is out of date and cannot be removed: Is a directory"]
    for _ in range(3):
        file.keep("text")
    assert len(caplog.messages) == 2


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
    assert path.read_text() == "text" and stat.S_IMODE(path.stat().st_mode) == mode


# -- the state file --------------------------------------------------------------------------------


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
    faults = [Fault.STALLED, Fault.TRIPPED]
    lasting = ttdp.Vitals(7, 2, False, 3, 4.5, None), ttdp.Vitals(6, 0, False, 3, 4.5, None)
    before = [chip(bus, fault=fault, serial="A" * 16) for bus, fault in enumerate(faults)]
    chips = {
        each.bdf: ttdp.ChipRecord(each, vitals, was_seen=True).to_state()
        for each, vitals in zip(before, lasting, strict=True)
    }
    held = allocation("n150", bdf(1), buses=[1])
    pending = held._replace(pod="", container="")
    rows = [(each.resource, [bdf(1)], [bdf(1)], each.pod, each.container, at, None)
            for each, at in ((held, None), (pending, 12.5))]  # fmt: skip
    ttdp.StateFile(settings).save(files=["/x"], chips=chips, allocations=rows)
    files, chips, allocations = state_of(settings)
    inventory = Inventory(chips)
    assert files == ["/x"]
    assert [each.fault for each in inventory.chips.values()] == [Fault.GONE] * 2
    for each, fault in zip(before, faults, strict=True):
        record = inventory.records[each.bdf]
        assert record.chip.identity == each.identity
        record.appear(each.function)
        record.apply(Reading(each.function, Telemetry(heartbeat=7, trips=3), 5.0), HealthSettings())
        assert record.chip.fault == fault
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
    [
        (b"precious", b"precioux"),
        (b'"version": 1', b'"version": 2'),
        (b"}", b""),
        (b"\n", b" "),
        (b"p", b"\xff"),
        (b"", b"garbage"),
    ],
    ids=["a flipped byte", "edited by hand", "torn", "no checksum", "no text", "longer"],
)
def test_a_state_file_that_was_changed_is_discarded_as_a_whole(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, old: bytes, new: bytes
) -> None:
    """With one line in the log."""
    ttdp.StateFile(settings).save(files=["precious"], chips={"a": 1}, allocations=[1])
    path = tmp_path / "state.json"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    assert state_of(settings) == ([], {}, [])
    (line,) = caplog.messages
    assert line.startswith(f"{path} is discarded: ")


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"version": 0, "allocations": []}'])
def test_a_file_that_is_no_state_is_discarded(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """Even with a valid checksum; also the file of an older version."""
    text = content.decode()
    (tmp_path / "state.json").write_text(f"{ttdp._checksum(text)}\n{text}")
    assert state_of(settings) == ([], {}, []) and len(caplog.messages) == 1


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
    assert "/new" in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
