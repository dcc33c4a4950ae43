"""Files for others and the state file: that they follow, and that none is stale."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ttdp
from tests.chips import bdf, chip, hold, kind_of
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, outlets, until
from ttdp import (
    ChipState,
    HoldState,
    Kind,
    OutputFile,
    SavedState,
    Settings,
    Start,
    Vitals,
)

N150 = "tenstorrent.com/n150"


@pytest.fixture
def paths(directory: Path) -> dict[str, Path]:
    """The paths of files for others, by the key of their setting; no directory exists."""
    found = {key: Path(path) for key, path in outlets(directory.parent).items()}
    found["cdi_dir"] /= ttdp.CDI_FILE
    found["labels_dir"] /= ttdp.LABELS_FILE
    return found


@pytest.fixture
def places(paths: dict[str, Path]) -> dict[str, Path]:
    """The same, and their directories exist."""
    for path in paths.values():
        path.parent.mkdir()
    return paths


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
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, places: dict[str, Path]
) -> None:
    """They are current when chips are advertised, also while the daemon waits for other chips.

    Then they follow by events, with polls an hour apart; everybody can read them.
    """
    first, second, third = [*node.add("n150"), *node.add("n150"), *node.add("n150")]
    third.unbind()
    cdi, features = places["cdi_dir"], places["labels_dir"]
    cdi.write_text(ttdp.cdi_spec([chip(1).function], Settings(), ()) or "")

    daemon = await start(interval=3600, device_list_strategy="cdi")
    await kubelet.registered(N150)
    await kubelet.admit("pod", "main", {N150: 1})
    assert described(cdi) == device_files(node) and not daemon.notified("READY=1")

    third.vanish()
    await daemon.ready()

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


async def test_a_file_appears_with_its_directory_and_is_written_again(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, paths: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Within 5 s, metrics within 15 s, whatever the interval of polls. So are names of pods.

    No line of the log reports a directory that does not exist.
    """
    monkeypatch.setattr(ttdp, "ROUND", 0.1)
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.1)
    node.add("n150")
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    await kubelet.admit("pod", "main", {N150: 1})
    await until(lambda: daemon.host.holds.names)

    for path in paths.values():
        path.parent.mkdir()
        await until(path.exists)

        path.unlink()
        await until(path.exists)

    paths["cdi_dir"].write_text("{}")
    await until(lambda: paths["cdi_dir"].read_text() != "{}")
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


async def test_the_next_daemon_removes_what_a_former_configuration_wanted(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path], short_tmp: Path
) -> None:
    """Also what the last daemon could not remove."""
    node.add("n150")
    state = short_tmp / "state.json"
    none = dict.fromkeys(places, "")
    daemon = await start(interval=0.05, state_dir=str(short_tmp))
    await until(lambda: all(path.is_file() for path in places.values()))
    await until(lambda: str(places["metrics_file"]) in state.read_text())
    await daemon.stop()

    for path in places.values():
        path.unlink()
        path.mkdir()  # which unlink() does not remove
    later = await start(interval=0.05, state_dir=str(short_tmp), **none)
    await later.ready()
    await later.stop()

    for path in places.values():
        path.rmdir()
        path.write_text("stale")
    await start(interval=0.05, state_dir=str(short_tmp), **none)
    await until(lambda: not any(path.exists() for path in places.values()))
    await until(lambda: '"files": []' in state.read_text())


def test_a_file_that_cannot_be_written_is_removed_if_stale_and_written_when_it_can_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is right is no problem; each failure is one line, however often it is met."""
    path = tmp_path / "file"
    file = OutputFile(str(path))
    file.keep("old\n")

    with no_room(path):
        file.keep("old\n")
        later = OutputFile(str(path))  # the next daemon's
        later.keep("old\n")
        assert path.read_text() == "old\n" and later.problem is None

        for _ in range(3):
            file.keep("new\n")
            assert not path.exists()
        assert file.problem == "cannot be written: Is a directory"

        path.mkdir()  # which can neither be replaced nor removed
        for _ in range(3):
            file.keep("new\n")
        path.rmdir()

    failures = ["cannot be written", "is out of date and cannot be removed"]
    assert caplog.messages == [f"{path} {each}: Is a directory" for each in failures]

    file.keep("new\n")
    assert path.read_text() == "new\n" and file.problem is None


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


# -- another user owns the directory ---------------------------------------------------------------


def make_sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 29)  # 1.5 GiB, without a block on disk


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as any_socket:
        any_socket.bind(str(path))


def bytes_read() -> int:
    """Return how many bytes this process has read since it began."""
    (line,) = [line for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line]
    return int(line.split()[1])


def at_once(work: Callable[[], object]) -> None:
    """Do this: it may neither block nor read a megabyte."""
    before = bytes_read()
    thread = threading.Thread(target=work, daemon=True)  # a FIFO could keep it for ever
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it blocks"
    assert bytes_read() - before < 1 << 20


@pytest.mark.parametrize("plant", [make_fifo, make_sparse_file, make_link, make_socket])
def test_what_another_user_plants_neither_delays_the_daemon_nor_stays(
    short_tmp: Path, plant: Callable[[Path], None]
) -> None:
    """In place of the file, of the new one, or where no file is wanted."""
    path, new = short_tmp / "file", short_tmp / ".file.new"
    file = OutputFile(str(path))

    with no_room(path):
        plant(path)
        at_once(lambda: file.keep("text\n"))
        assert not os.path.lexists(path), "it goes, as it would be stale"

    plant(path)
    plant(new)
    at_once(lambda: file.keep("text\n"))
    assert path.read_text() == "text\n" and not path.is_symlink()
    assert not os.path.lexists(new)

    path.unlink()
    plant(path)
    at_once(lambda: file.keep(None))
    assert not os.path.lexists(path)


# -- the state file --------------------------------------------------------------------------------

NOW = 1000.0


def set_boot_id(root: Path, boot: str | None) -> None:
    path = root / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if boot is not None:
        path.write_text(f"{boot}\n")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon whose state is saved."""
    set_boot_id(tmp_path, "this boot")
    return Settings(state_dir=str(tmp_path), root=str(tmp_path))


def loaded(settings: Settings) -> SavedState:
    """What a daemon that starts now knows."""
    return ttdp.StateFile(settings).load()


HELD = HoldState(
    hold("n150", bdf(1), buses=[1])._replace(
        name="a name",
        directories=("/dev/hugepages-1G/tt-device-plugin/a name",),
        locks="/run/ttdp/shm/n150",
    ),
    answered_at=NOW,
    is_in_checkpoint=True,
    cgroup_seen=True,
    start=Start.AWAITED,
    allowed_at=990.5,
    containers=frozenset({"pause"}),
)
PENDING = HoldState(HELD.hold._replace(pod="", container="", name="other"), NOW)
THEIRS = HoldState(
    hold("n300", "0", buses=[], pod="u2")._replace(
        device_files=("/dev/tenstorrent/0",), is_ours=False
    ),
    start=Start.OVER,
)
LASTING = Vitals(heartbeat=7, misses=2, trips=3, tripped_at=904.5, had_telemetry=True)
TRIPPED = ChipState(
    chip(1, fault=Kind.TRIPPED, serial="A" * 16, numa_node=1),
    LASTING._replace(empty_since=12.25),
    fault_kind="tripped",
    since=904.5,
)


def save(settings: Settings) -> Path:
    """Save these, and return the file."""
    chips = {bdf(1): TRIPPED, bdf(2): ChipState(chip(2, "p150a"))}
    ttdp.StateFile(settings).save(
        ["/x"],
        {address: state.to_saved() for address, state in chips.items()},
        [state.to_saved() for state in (HELD, THEIRS, PENDING)],
    )
    return Path(str(settings.state_dir)) / "state.json"


def test_chips_and_holds_survive_a_restart_of_the_daemon(settings: Settings) -> None:
    """With their lasting faults; a chip is absent until it is seen again."""
    save(settings)

    saved = loaded(settings)

    assert saved.files == ["/x"]
    assert saved.holds == [HELD, THEIRS, PENDING]
    state = saved.chips[bdf(1)]
    assert kind_of(state.chip) is Kind.GONE
    assert state.chip.was_present and state.chip.is_listed
    assert state.chip.identity == TRIPPED.chip.identity
    assert state.to_saved() == TRIPPED.to_saved()


def test_a_heartbeat_is_saved_only_while_it_has_stopped() -> None:
    """A healthy node's file is the same after each poll, so it is not written."""

    def saved(heartbeat: int, misses: int) -> object:
        vitals = Vitals(heartbeat=heartbeat, misses=misses, had_telemetry=True)
        return ChipState(chip(1), vitals).to_saved()

    assert saved(7, misses=0) == saved(8, misses=0)
    assert saved(7, misses=1) != saved(8, misses=1)


@pytest.mark.parametrize("boots", [("this", "next"), ("this", None), (None, "this"), (None, None)])
def test_only_files_are_kept_unless_the_boot_is_the_same(
    settings: Settings, tmp_path: Path, boots: tuple[str | None, str | None]
) -> None:
    """Pods and faults are new ones; files can outlive a reboot. None: there is no boot ID."""
    before, after = boots
    set_boot_id(tmp_path, before)
    save(settings)

    set_boot_id(tmp_path, after)

    assert loaded(settings) == SavedState(["/x"])


def test_without_a_state_file_or_directory_nothing_is_known(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """That is no reason for a line."""
    assert loaded(settings) == loaded(Settings()) == SavedState()
    assert caplog.messages == []


ENCODED = b'{"format": 6, "boot": "this boot", "files": [], "chips": {}, "holds": '


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format": 6', b'"format": 5'),
        (b'"holds": ', b'"allocations": '),
        (b'"identity": ', b'"identities": '),
        (b'"tripped"', b'"tripping"'),
        (b'"awaited"', b'"expected"'),
        (b'"name": ', b'"names": '),
        (b"}", b""),
        (b"", b"12345\n"),
        (b'"0000', b'"\xff'),
        (None, b""),
        (None, b"[" * 100_000),
        (None, b"null"),
        (None, ENCODED + b"[1]}"),
        (None, bytes(17 << 20)),
    ],
)
def test_a_state_file_that_does_not_fit_is_discarded_as_a_whole(
    settings: Settings, caplog: pytest.LogCaptureFixture, old: bytes | None, new: bytes
) -> None:
    """Of another version, torn, edited by hand: one line. `old`: what is replaced; None: all."""
    path = save(settings)
    content = path.read_bytes()
    assert old is None or old in content
    path.write_bytes(new if old is None else content.replace(old, new, 1))

    assert loaded(settings) == SavedState()

    (line,) = caplog.messages
    assert line.startswith(f"{path} is discarded: ")


def test_the_state_stays_if_a_new_one_cannot_be_written(settings: Settings, tmp_path: Path) -> None:
    """An old one is better than none; only root can read it."""
    path = tmp_path / "state.json"
    state = ttdp.StateFile(settings)
    state.save(["/old"], {}, [])
    text = path.read_text()

    with no_room(path):
        state.save(["/new"], {}, [])
        assert path.read_text() == text

    state.save(["/new"], {}, [])
    assert "/new" in path.read_text() and mode_of(path) == 0o600
