"""Kernel events: uevents over netlink, and changes in the kubelet's directory."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import socket
import sys
from collections.abc import AsyncIterator, Callable
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


async def wakes_for(monkeypatch: pytest.MonkeyPatch, *messages: bytes) -> int:
    """Return how often these messages of the kernel, which wait at once, have the loop woken."""
    wakes: list[bool] = []
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    monkeypatch.setattr(ttdp, "open_uevent_socket", lambda: SimulatedUevents(fileno=ours.detach()))
    uevents = ttdp.UeventSocket(lambda: wakes.append(True))
    uevents.open()

    for message in messages:
        kernel.send(message)
    await take_all()

    uevents.close()
    kernel.close()
    return len(wakes)


@pytest.mark.parametrize("step", ["module-load", "rmmod", "pci-remove"])
async def test_every_event_of_the_real_driver_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As captured, of class devices and PCI functions; those that wait together wake it once."""
    ours = []
    for action, devpath, env in captured_uevents("p150ax2", step):
        message = wire(action, devpath, env, 1)
        is_ours = "tenstorrent" in devpath or env.get("PCI_ID", "").startswith("1E52:")
        assert await wakes_for(monkeypatch, message) == is_ours
        ours += [message] * is_ours

    assert len(ours) > 1 and await wakes_for(monkeypatch, *ours[:5]) == 1


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
    assert await wakes_for(monkeypatch, message) == 0


async def test_without_kernel_events_the_daemon_polls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user namespace has none: one line."""
    monkeypatch.setattr(ttdp, "open_uevent_socket", no_descriptors)
    uevents = ttdp.UeventSocket(lambda: None)

    uevents.open()
    uevents.close()

    line = "cannot receive kernel events (Too many open files); polling instead"
    assert caplog.messages == [line]


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
    """Return whether the daemon takes the messages of `send` for events of its devices.

    None of them waits any more when it says so.
    """
    kernel = ttdp.open_uevent_socket()
    ttdp.open_uevent_socket = lambda: kernel

    async def receive() -> bool:
        waiting: list[bool] = []
        uevents = ttdp.UeventSocket(
            lambda: waiting.append(bool(select.select([kernel], [], [], 0)[0]))
        )
        send(kernel)
        assert select.select([kernel], [], [], PATIENCE)[0], "nothing has arrived"

        uevents.open()
        while select.select([kernel], [], [], 0)[0]:
            await take_all()
        uevents.close()
        assert not any(waiting)
        return bool(waiting)

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


def overrun() -> bool:
    def send(kernel: socket.socket) -> None:
        """Make the kernel send more events than the socket can hold."""
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for _ in range(50):
            rename_interface(b"lo", b"other")
            rename_interface(b"other", b"lo")

    return has_events(send)


def test_only_the_kernels_messages_are_believed() -> None:
    """A process cannot have its port ID, 0."""
    assert not alone(forged)
    assert alone(genuine)


def test_lost_events_count_as_events_once_all_that_wait_are_taken() -> None:
    """If the buffer overruns; until none waits, the kernel drops more without a second report."""
    assert alone(overrun)


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
        return self.directory.take_changes()


@contextlib.asynccontextmanager
async def watched(path: Path) -> AsyncIterator[Watched]:
    found = Watched(path)
    found.directory.check()
    assert not found.directory.take_changes()
    yield found
    found.directory.close()


async def test_files_of_others_are_changes(tmp_path: Path) -> None:
    """Created, moved, deleted; not the end of the daemon's own sockets, nor the checkpoint."""
    own = tmp_path / "tt-n150.1-2.sock"
    own.touch()

    async with watched(tmp_path) as found:
        (tmp_path / "kubelet.sock").touch()
        assert await found.change() and not found.directory.take_changes()

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
        assert not found.woken.is_set() and not found.directory.take_changes()

        (tmp_path / "other.sock").touch()
        assert await found.change()


@pytest.mark.parametrize("call", ["inotify_init1", "inotify_add_watch"])
async def test_a_watch_that_is_refused_is_tried_again_at_each_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """All instances or watches of the user can be in use. Until then each look is a change."""
    found = Watched(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ttdp._libc, call, lambda *_: -1)
        for _ in range(3):
            found.directory.check()
            assert not found.directory.is_watched and found.directory.take_changes()

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        found.directory.check()
    assert found.directory.is_watched and not found.directory.take_changes()
    assert len(os.listdir("/proc/self/fd")) == descriptors + (call == "inotify_init1")

    (tmp_path / "other.sock").touch()
    assert await found.change()
    found.directory.close()


@pytest.mark.parametrize("makes_it_first", [False, True])
async def test_a_missing_directory_is_made_for_root_and_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, makes_it_first: bool
) -> None:
    """0750, as a kubelet makes it, whatever the umask; a kubelet can be faster."""
    path = tmp_path / "device-plugins"
    mkdir = os.mkdir

    def come_second(path: str) -> None:
        mkdir(path, 0o755)
        mkdir(path)

    if makes_it_first:
        monkeypatch.setattr(os, "mkdir", come_second)
    umask = os.umask(0o077)
    try:
        async with watched(path) as found:
            monkeypatch.undo()
            (path / "kubelet.sock").touch()
            assert await found.change()
    finally:
        os.umask(umask)
    assert makes_it_first or path.stat().st_mode & 0o7777 == 0o750
