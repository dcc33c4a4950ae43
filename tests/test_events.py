"""Kernel events: uevents over netlink, and changes in the kubelet's directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

import ttdp
from tests.conftest import no_descriptors, unshared
from tests.world.captures import captured_uevents
from tests.world.node import wire
from tests.world.processes import PATIENCE, finished
from tests.world.simulation import SimulatedUevents


async def take_all() -> None:
    """Let the loop read what has arrived: the kernel has delivered it when the sender goes on."""
    for _ in range(3):
        await asyncio.sleep(0)


async def wakes_for(monkeypatch: pytest.MonkeyPatch, message: bytes) -> bool:
    """Return whether this message from the kernel has the loop make a turn."""
    wakes: list[bool] = []
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    monkeypatch.setattr(ttdp, "open_uevent_socket", lambda: SimulatedUevents(fileno=ours.detach()))

    uevents = ttdp.UeventSocket(lambda: wakes.append(True))
    uevents.open()

    kernel.send(message)
    await take_all()

    uevents.close()
    kernel.close()
    return bool(wakes)


@pytest.mark.parametrize("step", ["module-load", "rmmod", "pci-remove"])
async def test_every_event_of_the_real_driver_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As captured, of class devices and PCI functions."""
    for action, devpath, env in captured_uevents("p150ax2", step):
        is_ours = "tenstorrent" in devpath or env.get("PCI_ID", "").startswith("1E52:")
        assert await wakes_for(monkeypatch, wire(action, devpath, env, 1)) is is_ours


@pytest.mark.parametrize(
    "message",
    [
        b"add@/x\0ACTION=add\0SUBSYSTEM=pci\0PCI_ID=8086:1E52\0",
        b"libudev\0\xfe\xed\xca\xfe" + bytes(30),
        b"",
        bytes(range(256)) * 10,
    ],
)
async def test_other_messages_do_not(monkeypatch: pytest.MonkeyPatch, message: bytes) -> None:
    """Another vendor's device, udev's own format, garbage."""
    assert not await wakes_for(monkeypatch, message)


# -- real netlink ----------------------------------------------------------------------------------
#
# Each of these runs in its own network namespace, where an ordinary user may send, and the kernel
# sends events about the only interface, `lo`, when it is renamed.


def alone(function: Callable[[], object]) -> bool:
    """Return the result of a function of this module in its own network namespace."""
    call = f"from tests import test_events; print(json.dumps(test_events.{function.__name__}()))"
    ended = finished([*unshared("--net"), sys.executable, "-c", f"import json; {call}"])
    assert ended.returncode == 0, ended.stderr
    return bool(json.loads(ended.stdout))


def rename_interface(old: bytes, new: bytes) -> None:
    """Make the kernel send an event, `move` of a net device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8923, old.ljust(16, b"\0") + new.ljust(16, b"\0"))  # SIOCSIFNAME


def has_events(send: Callable[[socket.socket], object]) -> bool:
    """Return whether the daemon takes the messages of `send` for events of its devices."""
    kernel = ttdp.open_uevent_socket()
    ttdp.open_uevent_socket = lambda: kernel

    async def receive() -> bool:
        events: list[bool] = []
        uevents = ttdp.UeventSocket(lambda: events.append(True))

        send(kernel)
        assert select.select([kernel], [], [], PATIENCE)[0], "nothing has arrived"

        uevents.open()
        while select.select([kernel], [], [], 0)[0]:
            await take_all()

        uevents.close()
        return bool(events)

    return asyncio.run(receive())


def forged() -> bool:
    def send(kernel: socket.socket) -> None:
        kind = socket.SOCK_DGRAM
        with socket.socket(socket.AF_NETLINK, kind, ttdp.NETLINK_KOBJECT_UEVENT) as forger:
            forger.bind((0, 0))
            env = {"SUBSYSTEM": "tenstorrent", "DEVNAME": "tenstorrent/0"}
            event = wire("add", "/devices/x/tenstorrent!0", env, 1)
            forger.sendto(event, (kernel.getsockname()[0], 0))

    return has_events(send)


def genuine() -> bool:
    ttdp.DRIVER = "SUBSYSTEM=net"
    return has_events(lambda _: rename_interface(b"lo", b"other"))


def overrun_buffer(kernel: socket.socket) -> None:
    """Make the kernel send more events than the socket can hold."""
    kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    for _ in range(50):
        rename_interface(b"lo", b"other")
        rename_interface(b"other", b"lo")


def overrun() -> bool:
    return has_events(overrun_buffer)


def waiting_after_overrun() -> bool:
    """Return whether events still wait when the daemon reports that some were lost."""
    kernel = ttdp.open_uevent_socket()
    overrun_buffer(kernel)
    ttdp.open_uevent_socket = lambda: kernel

    async def receive() -> bool:
        reported = asyncio.get_running_loop().create_future()

        def report() -> None:
            if not reported.done():
                reported.set_result(bool(select.select([kernel], [], [], 0)[0]))

        uevents = ttdp.UeventSocket(report)
        uevents.open()
        is_waiting = await asyncio.wait_for(reported, PATIENCE)
        uevents.close()
        return bool(is_waiting)

    return asyncio.run(receive())


def test_only_the_kernels_messages_are_believed() -> None:
    """A process cannot have its port ID, 0."""
    assert not alone(forged)
    assert alone(genuine)


def test_lost_events_count_as_events() -> None:
    """If the buffer overruns, the daemon looks at everything."""
    assert alone(overrun)


def test_all_events_are_taken_before_the_look_for_lost_ones() -> None:
    """Until none waits, the kernel drops further ones and reports no second overrun."""
    assert not alone(waiting_after_overrun)


# -- the kubelet's directory -----------------------------------------------------------------------


class Watched:
    """A PluginDirectory, and whether it has woken the loop."""

    def __init__(self, path: Path) -> None:
        self.woken = asyncio.Event()
        self.directory = ttdp.PluginDirectory(str(path), self.woken.set)

    async def change(self) -> bool:
        """Wait for a wake, and return whether others' files came or went."""
        await asyncio.wait_for(self.woken.wait(), PATIENCE)
        self.woken.clear()
        self.directory.check()
        return self.directory.take_changes()


@contextlib.asynccontextmanager
async def watched(path: Path) -> AsyncIterator[Watched]:
    found = Watched(path)
    found.directory.check()
    found.directory.take_changes()
    yield found
    found.directory.close()


async def test_files_of_others_are_changes(tmp_path: Path) -> None:
    """Created, moved, deleted; not the end of the daemon's own sockets, nor the checkpoint."""
    own = tmp_path / "tt-n150.1-2.sock"
    own.touch()

    async with watched(tmp_path) as found:
        (tmp_path / "kubelet.sock").touch()
        assert await found.change()

        (tmp_path / "kubelet.sock").rename(tmp_path / "b")
        assert await found.change()

        (tmp_path / "b").unlink()
        assert await found.change()

        # The kubelet writes a checkpoint under such a name, and renames it.
        (tmp_path / ".543210").touch()
        own.unlink()
        assert not await found.change()

        (tmp_path / ".543210").rename(tmp_path / ttdp.CHECKPOINT)
        assert not await found.change()


async def test_a_file_that_says_nothing_needs_no_turn_of_the_loop(tmp_path: Path) -> None:
    """The daemon's own new socket, and a checkpoint that is being written."""
    async with watched(tmp_path) as found:
        for name in ("tt-n150.1-2.sock", ".543210"):
            (tmp_path / name).touch()

        await take_all()
        assert not found.woken.is_set()

        (tmp_path / "other.sock").touch()
        assert await found.change()


async def test_a_directory_that_is_deleted_is_created_and_watched_again(tmp_path: Path) -> None:
    """With mode 0750, as soon as the directory around it exists again."""
    path = tmp_path / "kubelet" / "device-plugins"
    path.parent.mkdir()
    async with watched(path) as found:
        for _ in range(3):
            assert path.stat().st_mode & 0o777 == 0o750
            shutil.rmtree(path.parent)
            found.directory.check()  # each turn of the loop does
            assert found.directory.problem and not path.parent.exists()

            path.parent.mkdir()
            found.directory.check()
            found.directory.take_changes()
            (path / "kubelet.sock").touch()
            while not await found.change():
                pass


async def test_a_new_directory_that_cannot_be_opened_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its status: the descriptor of the former one is closed once."""
    path = tmp_path / "a"
    async with watched(path) as found:
        path.rename(tmp_path / "b")

        with monkeypatch.context() as patch, pytest.raises(ttdp.DirectoryError) as error:
            patch.setattr("os.open", no_descriptors)
            found.directory.check()
    assert error.value.args[0] == 74 and "Too many open files" in error.value.args[1]


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
@pytest.mark.parametrize("moment", ["at the start", "later"])
async def test_a_watch_that_is_refused_is_one_line_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    call: str, moment: str,
) -> None:  # fmt: skip
    """All instances or watches of the user can be in use for a moment, also much later.

    Until then, and between the last look and the watch, changes are found without events.
    """
    path = tmp_path / "kubelet" / "device-plugins"
    found = Watched(path)
    if moment == "later":
        found.directory.check()
        assert found.directory.problem

    path.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(ttdp._libc, call, lambda *_: -1)
        for _ in range(3):
            found.directory.check()

        found.directory.take_changes()
        kubelet = path / "kubelet.sock"
        for change in (kubelet.touch, partial(os.utime, kubelet, (0, 0)), kubelet.unlink):
            change()  # it can be another kubelet's within one interval
            found.directory.check()
            assert found.directory.take_changes() and not found.directory.take_changes()

    (line,) = caplog.messages
    assert line.startswith(f"cannot watch {path} (") and line.endswith("; polling instead")

    kubelet.touch()
    found.directory.check()
    assert found.directory.take_changes() and not found.directory.take_changes()

    (path / "other.sock").touch()
    assert await found.change()
    found.directory.close()


async def test_a_directory_that_the_kubelet_makes_first_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of them look for it, and make it if it is missing."""
    path = tmp_path / "device-plugins"
    mkdir = os.mkdir

    def come_second(path: str) -> None:
        mkdir(path, 0o755)
        mkdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", come_second)
        async with watched(path) as found:
            (path / "kubelet.sock").touch()
            assert await found.change()


async def test_the_watch_can_have_the_descriptor_0(tmp_path: Path) -> None:
    """A daemon that was started by hand can have a closed stdin."""
    stdin = os.dup(0)
    os.close(0)
    try:
        async with watched(tmp_path) as found:
            (tmp_path / "kubelet.sock").touch()
            assert await found.change()
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
