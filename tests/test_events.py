"""Kernel events: what the netlink socket takes for true, and what the watch on a directory tells."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ttdp
from tests.world.node import captured_uevents, wire
from ttdp import Uevent

SYNTHESIZED = Path("/sys/class/mem/null/uevent")
NOT_ALLOWED = not os.access(SYNTHESIZED, os.W_OK)


@pytest.fixture
def kernel() -> Iterator[socket.socket]:
    with ttdp.open_uevent_socket() as opened:
        yield opened


def captured(name: str, step: str) -> list[Uevent | None]:
    events = captured_uevents(name, step)
    return [ttdp.parse_uevent(wire(action, devpath, env, 1)) for action, devpath, env in events]


def test_the_events_of_a_loading_driver_name_the_new_nodes() -> None:
    """Of all that the real driver sent on load, those about a node carry its number, those about PCI none."""
    seen = [event for event in captured("p150ax2", "module-load") if event]
    assert [event for event in seen if event.ordinal is not None] == [
        Uevent("add", 0), Uevent("change", 0), Uevent("add", 1), Uevent("change", 1),
    ]  # fmt: skip
    assert [event.action for event in seen if event.ordinal is None] == ["bind", "bind"]


def test_other_devices_events_are_none_of_ours() -> None:
    """Another subsystem, another vendor, a message without variables."""
    for message in (
        b"add@/x\0ACTION=add\0SUBSYSTEM=net\0INTERFACE=tenstorrent\0",
        b"add@/x\0ACTION=add\0SUBSYSTEM=pci\0PCI_ID=8086:1E52\0",
        b"libudev\0\xfe\xed\xca\xfe" + bytes(30),
        b"",
    ):
        assert ttdp.parse_uevent(message) is None


@given(st.binary(max_size=3000))
def test_no_message_is_too_strange(message: bytes) -> None:
    """Any bytes give an event or none, and no error."""
    assert isinstance(ttdp.parse_uevent(message), Uevent | None)


def received(kernel: socket.socket) -> list[Uevent | None]:
    """All that is there when a last message of our own, which comes after it, has arrived."""
    return list(ttdp.receive_uevents(kernel, ttdp.sent_by_kernel))


def test_what_a_process_sends_is_not_believed(kernel: socket.socket) -> None:
    """Only the kernel has port id 0; a forged event in its own words is dropped, and nothing else is."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, ttdp.NETLINK_KOBJECT_UEVENT) as forger:
        forger.bind((0, 0))
        forged = wire("add", "/devices/x/tenstorrent!0", {"SUBSYSTEM": "tenstorrent", "DEVNAME": "tenstorrent/0"}, 1)
        forger.sendto(forged, (kernel.getsockname()[0], 0))
    kernel.settimeout(5)
    assert kernel.recv(8192, socket.MSG_PEEK)  # it has arrived
    kernel.setblocking(False)
    assert received(kernel) == []


@pytest.mark.skipif(NOT_ALLOWED, reason="only root can make the kernel send an event")
def test_what_the_kernel_sends_is_believed(kernel: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real event of the real kernel passes the check of the sender."""
    monkeypatch.setattr(
        ttdp, "parse_uevent", lambda message: Uevent("change", None) if b"/mem/null" in message else None
    )
    SYNTHESIZED.write_text("change")
    kernel.settimeout(5)
    while b"/mem/null" not in kernel.recv(8192, socket.MSG_PEEK):
        kernel.recv(8192)
    kernel.setblocking(False)
    assert received(kernel)[0] == Uevent("change", None)


@pytest.mark.skipif(NOT_ALLOWED, reason="only root can make the kernel send an event")
def test_events_that_were_lost_are_reported_as_such(kernel: socket.socket) -> None:
    """A socket whose buffer ran over says so once; the daemon then looks at everything."""
    kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    for _ in range(200):
        SYNTHESIZED.write_text("change")
    assert None in received(kernel)


class Happenings:
    """Collects what a DirectoryWatch tells."""

    def __init__(self, path: Path) -> None:
        self.names: list[set[str]] = []
        self.new: set[str] = set()
        self.came = asyncio.Event()
        self.watch = ttdp.DirectoryWatch(str(path), self._happened)

    def _happened(self, names: object, new: object) -> None:
        self.names.append(set(names))  # type: ignore[call-overload]
        self.new |= set(new)  # type: ignore[call-overload]
        self.came.set()

    async def next(self) -> set[str]:
        await asyncio.wait_for(self.came.wait(), 5)
        self.came.clear()
        return self.names[-1]

    async def __aenter__(self) -> Happenings:
        self.watch.open(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watch.close(asyncio.get_running_loop())


async def test_the_watch_tells_names_and_which_are_new(tmp_path: Path) -> None:
    """Made, moved here, moved away, deleted; the first two are new."""
    async with Happenings(tmp_path) as happenings:
        (tmp_path / "a").touch()
        assert await happenings.next() == {"a"}
        (tmp_path / "a").rename(tmp_path / "b")
        assert await happenings.next() == {"a", "b"}
        assert happenings.new == {"a", "b"}
        happenings.new.clear()
        (tmp_path / "b").unlink()
        assert await happenings.next() == {"b"} and not happenings.new


async def test_the_watch_follows_a_path_into_being_and_out_of_it(tmp_path: Path) -> None:
    """Each level that is made is watched in turn; removed and made anew, it is watched again."""
    deep = tmp_path / "a" / "b" / "c"
    async with Happenings(deep) as happenings:
        for _ in range(3):
            deep.mkdir(parents=True)
            await asyncio.wait_for(_watching(happenings, deep), 5)
            (deep / "kubelet.sock").touch()
            while "kubelet.sock" not in await happenings.next():
                pass
            shutil.rmtree(tmp_path / "a")
            while happenings.watch._watched[0] == str(deep):
                await happenings.next()


async def _watching(happenings: Happenings, path: Path) -> None:
    while happenings.watch._watched[0] != str(path):
        await happenings.next()


async def test_a_check_finds_that_the_path_leads_elsewhere(tmp_path: Path) -> None:
    """An ancestor renamed and made anew sends no event; check() notices, once."""
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    async with Happenings(directory) as happenings:
        (tmp_path / "a").rename(tmp_path / "old")
        directory.mkdir(parents=True)
        assert happenings.names == []
        happenings.watch.check()
        happenings.watch.check()
        assert happenings.names == [{""}]
        (directory / "x").touch()
        assert await happenings.next() == {"x"}
