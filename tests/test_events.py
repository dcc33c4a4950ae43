"""Kernel events: uevents over netlink, and changes in the kubelet's directory."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sys
from pathlib import Path

import pytest

import ttdp
from tests.conftest import no_descriptors, unshared
from tests.world.cards import captured_uevents
from tests.world.node import wire
from tests.world.processes import finished

KERNEL, FORGER = (0, 1), (4711, 0)  # senders of messages: port ID and group
OVERRUN = OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
GARBAGE = bytes(range(256)) * 10
OURS = wire("add", "/devices/x/tenstorrent!0", {"SUBSYSTEM": "tenstorrent"})
OTHERS = b"add@/x\0ACTION=add\0SUBSYSTEM=pci\0PCI_ID=8086:1E52\0"
Waiting = tuple[bytes, tuple[int, int]] | OSError


async def take_all() -> None:
    """Let the loop read what has arrived: the kernel has delivered it when the sender goes on."""
    for _ in range(3):
        await asyncio.sleep(0)


class Netlink:
    """A socket on which messages and errors wait; test_the_kernel_is_like_ours is its proof."""

    def __init__(self, *waiting: Waiting) -> None:
        self.waiting = [*waiting]
        self._readable, writable = socket.socketpair()
        writable.close()
        self.fileno = self._readable.fileno
        self.close = self._readable.close

    def recvfrom(self, _: int) -> tuple[bytes, tuple[int, int]]:
        if not self.waiting:
            raise BlockingIOError
        found = self.waiting.pop(0)
        if isinstance(found, OSError):
            raise found
        return found


async def wakes_for(monkeypatch: pytest.MonkeyPatch, *waiting: Waiting) -> int:
    """Return how often these have the loop woken; all have been taken by then."""
    netlink = Netlink(*waiting)
    left: list[int] = []
    monkeypatch.setattr(ttdp, "open_uevent_socket", lambda: netlink)
    uevents = ttdp.UeventSocket(lambda: left.append(len(netlink.waiting)))

    uevents.open()
    await take_all()
    uevents.close()

    assert not any(left) and not netlink.waiting
    return len(left)


@pytest.mark.parametrize("step", ["module-load", "rmmod", "pci-remove"])
async def test_every_event_of_the_real_driver_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As captured, of class devices and PCI functions."""
    ours = 0
    for action, devpath, env in captured_uevents("p150ax2", step):
        is_ours = "tenstorrent" in devpath or env.get("PCI_ID", "").startswith("1E52:")
        message = wire(action, devpath, env)
        assert await wakes_for(monkeypatch, (message, KERNEL)) == is_ours
        ours += is_ours
    assert ours > 1


@pytest.mark.parametrize(
    ("waiting", "wakes"),
    [
        pytest.param([(OURS, KERNEL), (OTHERS, KERNEL), (OURS, KERNEL)], 1, id="together"),
        pytest.param([OVERRUN, (OTHERS, KERNEL)], 1, id="overrun"),
        pytest.param([OSError(errno.ENOMEM, "")], 1, id="another error"),
        pytest.param([(OURS, FORGER)], 0, id="forged"),
        pytest.param([(OTHERS, KERNEL)], 0, id="another vendor"),
        pytest.param([(b"", KERNEL), (GARBAGE, KERNEL)], 0, id="garbage"),
    ],
)
async def test_messages_that_wait_together_wake_the_loop_once_if_one_is_of_our_devices(
    monkeypatch: pytest.MonkeyPatch, waiting: list[Waiting], wakes: int
) -> None:
    """Only the kernel's are believed; an error can mean that some were lost."""
    assert await wakes_for(monkeypatch, *waiting) == wakes


def test_without_kernel_events_the_daemon_polls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user namespace has none: one line."""
    monkeypatch.setattr(ttdp, "open_uevent_socket", no_descriptors)
    uevents = ttdp.UeventSocket(lambda: None)

    uevents.open()
    uevents.close()

    line = "cannot receive kernel events (Too many open files); polling instead"
    assert caplog.messages == [line]


REAL = """
import fcntl, json, socket, ttdp
kernel = ttdp.open_uevent_socket()
kernel.settimeout(60)
with socket.socket() as any_socket:  # SIOCSIFNAME
    fcntl.ioctl(any_socket, 0x8923, b"lo".ljust(16, b"\\0") + b"other".ljust(16, b"\\0"))
told = kernel.recvfrom(8192)

forger = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, ttdp.NETLINK_KOBJECT_UEVENT)
forger.bind((0, 0))
forger.sendto(b"forged", (kernel.getsockname()[0], 0))
print(json.dumps([told[0].decode(), told[1], kernel.recvfrom(8192)[1][0]]))
"""


def test_the_kernel_is_like_ours() -> None:
    """It sends an event when an interface is renamed; a process cannot have its port ID, 0."""
    ended = finished([*unshared("--net"), sys.executable, "-c", REAL])
    assert ended.returncode == 0, ended.stderr

    text, sender, forger = json.loads(ended.stdout)
    assert "SUBSYSTEM=net\0" in text and tuple(sender) == KERNEL and forger != 0


# -- the kubelet's directory -----------------------------------------------------------------------


OWN, TEMPORARY = "tt-n150.1-2.sock", ".543210"  # a kubelet renames such a file to its checkpoint
CHANGES: list[tuple[str, str, bool, bool]] = [
    # former and new name; needs a turn of the loop; is a change of others' files
    ("", "kubelet.sock", True, True),
    ("kubelet.sock", "", True, True),
    ("", OWN, False, False),
    (OWN, "", True, False),
    ("", TEMPORARY, False, False),
    (TEMPORARY, ttdp.CHECKPOINT, True, False),
    ("../from-elsewhere", "other.sock", True, True),
    ("other.sock", "../elsewhere", True, True),
]


async def test_files_of_others_are_changes(tmp_path: Path) -> None:
    """Not those of the daemon, nor the checkpoint; what says nothing needs no turn."""
    path, woken = tmp_path / "device-plugins", asyncio.Event()
    watched = ttdp.PluginDirectory(str(path), woken.set)
    watched.check()
    (tmp_path / "from-elsewhere").touch()

    for former, new, needs_turn, is_change in CHANGES:
        if not former:
            (path / new).touch()
        elif new:
            (path / former).rename(path / new)
        else:
            (path / former).unlink()
        await take_all()

        found = (woken.is_set(), watched.take_changes())
        assert found == (needs_turn, is_change), (former, new)
        woken.clear()
    watched.close()
