"""Files for others and the state file: they follow, none is stale, and none is a trap."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import ttdp
from tests.chips import bdf, chip, hold, kind_of
from tests.conftest import StartDaemon
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, outlets, until
from ttdp import Inventory, Kind, OutputFiles, SavedHolds, SavedState, Settings, StateFile


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def problem(files: OutputFiles) -> str:
    """Return the text of all problems."""
    return " ".join(map(str, files.problems.values()))


# -- files for others ------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "other text": lambda path: path.write_text("text, and more"),
    "fifo": os.mkfifo,
    "link to what has no end": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("victim"),
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("name", ["file", ".file.new"])
@pytest.mark.parametrize("text", ["text", None])
def test_what_another_user_plants_neither_delays_the_daemon_nor_is_followed(
    tmp_path: Path, planted: str, name: str, text: str | None
) -> None:
    """In place of the file, of the new one, or where no file is wanted. All can read the file."""
    (tmp_path / "victim").write_text("precious")
    PLANTED[planted](tmp_path / name)
    path, files = tmp_path / "file", OutputFiles()

    umask = os.umask(0o077)
    thread = threading.Thread(target=files.keep, args=(str(path), text), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    os.umask(umask)

    assert not thread.is_alive(), "it waits for the other end of a FIFO"
    assert (tmp_path / "victim").read_text() == "precious" and problem(files) == ""
    assert path.exists() is (text is not None) and not path.is_symlink()
    assert text is None or (path.read_text(), mode_of(path)) == (text, 0o644)


def test_a_link_planted_at_the_last_moment_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is created, never opened."""
    (tmp_path / "victim").write_text("precious")
    link = tmp_path / ".file.new"
    monkeypatch.setattr("os.unlink", lambda _: link.symlink_to("victim"))
    with contextlib.suppress(FileExistsError):
        OutputFiles().write(f"{tmp_path}/file", "text")

    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("operation", [OutputFiles.keep, OutputFiles.write])
def test_a_file_that_cannot_be_written_is_a_problem_until_it_can_be(
    tmp_path: Path, operation: Callable[[OutputFiles, str, str], None]
) -> None:
    """What is there stays, nothing is left beside it; without its directory it is not wanted."""
    path, files = tmp_path / "file", OutputFiles()
    operation(files, f"{tmp_path}/none/file", "text")
    assert problem(files) == ""

    path.mkdir()
    for _ in range(2):
        operation(files, str(path), "text")
    assert problem(files) == f"{path} cannot be written: Is a directory"
    assert [*tmp_path.iterdir()] == [path]

    path.rmdir()
    operation(files, str(path), "text")
    before = path.stat()
    operation(files, str(path), "text")
    assert path.read_text() == "text" and problem(files) == ""
    # A file that is new each time shows that the daemon is alive.
    assert (path.stat().st_ino != before.st_ino) is (operation is OutputFiles.write)


def test_a_directory_that_is_newer_than_the_service_needs_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is read-only in the service's mount namespace, unless the unit does not have it at all."""
    restart = "; run: systemctl restart tt-device-plugin"
    for directory, number, help in (
        ("/var/run/cdi", errno.EROFS, restart), ("/srv", errno.EROFS, ""),
        ("/var/run/cdi", errno.ENOSPC, ""),
    ):  # fmt: skip
        error = OSError(number, os.strerror(number))
        monkeypatch.setattr(ttdp, "replace_file", Mock(side_effect=error))
        files = OutputFiles()
        files.write(f"{directory}/x", "text")
        assert problem(files) == f"{directory}/x cannot be written: {error.strerror}{help}"


def has_cdi(file: Path, node: SimulatedNode) -> bool:
    """Return whether a CDI file has exactly the present device files."""
    text = file.read_text() if file.exists() else ""
    found = re.findall('"name": "([^"]+)", .*?"hostPath": "([^"]+)"', text)
    present = [(each.bdf, str(each.device_node)) for each in node.chips if each.ordinal is not None]
    return sorted(found)[:-1] == sorted(present)  # the last one is "all"


async def test_the_files_follow_the_chips_and_outlive_the_daemon(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """By events, with polls an hour apart; a stale one is replaced before READY=1."""
    first, second = [*node.add("n150"), *node.add("n150")]
    places = {key: Path(path) for key, path in outlets(directory.parent).items()}
    cdi, labels = places["cdi_dir"] / ttdp.CDI_FILE, places["labels_dir"] / ttdp.LABELS_FILE
    for path in (cdi, labels, places["metrics_file"]):
        path.parent.mkdir()
        path.write_text("stale")

    daemon = await start(interval=3600)
    await daemon.ready()
    assert has_cdi(cdi, node) and "tenstorrent.com/n150" in places["metrics_file"].read_text()

    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: has_cdi(cdi, node))

    second.vanish()
    await until(lambda: has_cdi(cdi, node) and "n150.count=1\n" in labels.read_text())

    first.vanish()
    await until(lambda: not cdi.exists() and "n150.count=0\n" in labels.read_text())

    first.come_back()
    await until(lambda: has_cdi(cdi, node))
    await daemon.stop()
    assert has_cdi(cdi, node) and labels.exists() and places["metrics_file"].exists()


# -- the state file --------------------------------------------------------------------------------


def set_boot_id(settings: Settings, boot: str | None) -> None:
    path = Path(settings.proc, "sys/kernel/random/boot_id")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if boot:
        path.write_text(boot)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon whose state is saved."""
    settings = Settings(state_dir=str(tmp_path), root=str(tmp_path))
    set_boot_id(settings, "this")
    return settings


HELD = hold("n150", bdf(1), buses=[1], token="a token")._replace(
    directories=("/dev/hugepages-1G/tt-device-plugin/a token",)
)
TRIPPED = chip(1, fault=Kind.TRIPPED, serial="A" * 16, numa_node=1).dated(904.5)
ALL = [TRIPPED, chip(2, "p150a")._replace(is_listed=False), chip(3, "n300")]
HOLDS = {
    "holds": [HELD._asdict() | {"ids": [*HELD.ids], "chips": [*HELD.chips]}],
    "allowed": {"u1": 990.5},
}


def save(settings: Settings) -> Path:
    """Save these, and return the file."""
    chips = {each.address: each for each in ALL}
    StateFile(settings).save(Inventory(chips).to_saved(), HOLDS)
    return Path(str(settings.state_dir)) / "state.json"


@pytest.mark.parametrize(
    "boots",
    [("this", "this"), ("this", "next"), ("this", None), (None, "this"), (None, None)],
)
def test_chips_and_holds_survive_a_restart_of_the_daemon_within_a_boot(
    settings: Settings, caplog: pytest.LogCaptureFixture, boots: tuple[str | None, str | None]
) -> None:
    """Those that are devices: identity, kind of fault and since when; they are to be seen again.
    Without a boot ID there is no same boot. Neither this nor a first start is a line.
    """
    set_boot_id(settings, boots[0])
    path = save(settings)
    set_boot_id(settings, boots[1])

    saved = StateFile(settings).load()
    assert StateFile(Settings(root=settings.root)).load() == SavedState()
    assert caplog.messages == []
    if boots != ("this", "this"):
        assert saved == SavedState()
        return

    assert mode_of(path) == 0o600
    assert saved.holds == SavedHolds([HELD], {"u1": 990.5})
    assert saved.chips.keys() == {bdf(1), bdf(3)}
    found = saved.chips[bdf(1)]
    assert (found.identity, found.kind, found.since) == (TRIPPED.identity, Kind.TRIPPED, 904.5)
    assert found.is_listed and kind_of(found) is Kind.GONE
    again = Inventory({bdf(1): TRIPPED, bdf(3): ALL[2]}).to_saved()
    assert Inventory(saved.chips).to_saved() == again


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format": ', b'"format": 9'),
        (b'"holds": {', b'"allocations": {'),
        (b'"tripped"', b'"tripping"'),
        (b'"token": ', b'"name": '),
        (b"990.5", b'"now"'),
        (b'"0000', b'"\xff'),
        (b"{", b"[" * 100_000),
        (b"{", bytes(17 << 20)),
    ],
)
def test_a_state_file_that_does_not_fit_is_discarded_as_a_whole(
    settings: Settings, caplog: pytest.LogCaptureFixture, old: bytes, new: bytes
) -> None:
    """Of another version, torn, edited by hand: one line."""
    path = save(settings)
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new, 1))

    assert StateFile(settings).load() == SavedState()

    (line,) = caplog.messages
    assert line.startswith(f"{path} is discarded: ")


def test_the_state_stays_if_a_new_one_cannot_be_written(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An old one is better than none. One line; a problem until it is written, or as it was."""
    path, state = tmp_path / "state.json", StateFile(settings)
    state.save({}, {"allowed": {}})
    written = path.stat()
    obstacle = tmp_path / ".state.json.new"
    obstacle.mkdir()

    text = f"{path} cannot be written: Is a directory"
    for _ in range(2):
        state.save({}, {"allowed": {"u1": 1.0}})
        assert (caplog.messages, str(state.problem)) == ([text], text)
    state.save({}, {"allowed": {}})
    assert state.problem is None and path.stat() == written

    obstacle.rmdir()
    state.save({}, {"allowed": {"u1": 1.0}})
    assert state.problem is None and '"u1"' in path.read_text()
