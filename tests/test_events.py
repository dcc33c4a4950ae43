"""Kernel events: what netlink's socket takes for true, what the watch on a directory tells."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import shutil
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ttdp
from tests.world.captures import captured_uevents
from tests.world.node import wire
from tests.world.processes import PATIENCE, finished, until
from ttdp import Uevent


def captured(name: str, step: str) -> list[Uevent | None]:
    events = captured_uevents(name, step)
    return [ttdp.parse_uevent(wire(action, devpath, env, 1)) for action, devpath, env in events]


def test_the_events_of_a_loading_driver_name_the_new_nodes() -> None:
    """Of all that the real driver sent, those about a node carry its number, of PCI none."""
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


# -- what comes over netlink -----------------------------------------------------------------------
#
# Each of these runs in a network namespace of its own, where an ordinary user may send, and the
# kernel tells only what concerns it: that its one interface, `lo`, has another name now.


def alone(function: Callable[[], list[str]]) -> list[str]:
    """Return what a function of this module does in a network namespace of its own."""
    unshare = (
        ["unshare", "--net"]
        if os.geteuid() == 0
        else ["unshare", "--user", "--map-root-user", "--net"]
    )
    if (tried := finished([*unshare, "true"])).returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    call = f"print(json.dumps(test_events.{function.__name__}()))"
    call = f"import json; from tests import test_events; {call}"
    ended = finished([*unshare, sys.executable, "-c", call])
    assert ended.returncode == 0, ended.stderr
    outcome: list[str] = json.loads(ended.stdout)
    return outcome


def rename_interface(old: bytes, new: bytes) -> None:
    """Makes the kernel send an event, `move` of a net device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8923, old.ljust(16, b"\0") + new.ljust(16, b"\0"))  # SIOCSIFNAME


def received(kernel: socket.socket) -> list[str]:
    """All that waits in the socket, by action; "lost" where something was."""
    assert select.select([kernel], [], [], PATIENCE)[0], "nothing has arrived"
    return [
        event.action if event else "lost"
        for event in ttdp.receive_uevents(kernel, ttdp.sent_by_kernel)
    ]


def take_events_of_net_devices_for_ours() -> None:
    ttdp.parse_uevent = lambda message: (
        Uevent("move", None) if b"SUBSYSTEM=net\0" in message else None
    )


def forged() -> list[str]:
    with (
        ttdp.open_uevent_socket() as kernel,
        socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, ttdp.NETLINK_KOBJECT_UEVENT) as forger,
    ):
        forger.bind((0, 0))
        event = wire(
            "add",
            "/devices/x/tenstorrent!0",
            {"SUBSYSTEM": "tenstorrent", "DEVNAME": "tenstorrent/0"},
            1,
        )
        forger.sendto(event, (kernel.getsockname()[0], 0))
        return received(kernel)


def genuine() -> list[str]:
    take_events_of_net_devices_for_ours()
    with ttdp.open_uevent_socket() as kernel:
        rename_interface(b"lo", b"other")
        return received(kernel)


def overrun() -> list[str]:
    take_events_of_net_devices_for_ours()
    with ttdp.open_uevent_socket() as kernel:
        kernel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        for number in range(100):
            rename_interface(
                b"lo" if number % 2 == 0 else b"other", b"other" if number % 2 == 0 else b"lo"
            )
        return received(kernel)


def test_what_a_process_sends_is_not_believed() -> None:
    """Only the kernel has port id 0; a forged event in its own words is dropped."""
    assert alone(forged) == []


def test_what_the_kernel_sends_is_believed() -> None:
    """A real event of the real kernel passes the check of the sender."""
    assert alone(genuine) == ["move"]


def test_events_that_were_lost_are_reported_as_such() -> None:
    """A socket whose buffer ran over says so once; the daemon then looks at everything."""
    actions = alone(overrun)
    assert actions.count("lost") == 1 and 1 < len(actions) < 100


class Happenings:
    """What a DirectoryWatch tells."""

    def __init__(self, path: Path) -> None:
        self._names: asyncio.Queue[set[str]] = asyncio.Queue()
        self.watch = ttdp.DirectoryWatch(str(path), self._happened)

    def _happened(self, names: Collection[str]) -> None:
        self._names.put_nowait(set(names))

    async def next(self) -> set[str]:
        return await asyncio.wait_for(self._names.get(), PATIENCE)

    async def until(self, name: str) -> None:
        """Wait until something happened to a name."""
        while name not in await self.next():
            pass

    async def __aenter__(self) -> Happenings:
        self.watch.open(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.watch.close(asyncio.get_running_loop())


async def test_the_watch_tells_to_which_names_something_happened(tmp_path: Path) -> None:
    """Made, moved, deleted."""
    async with Happenings(tmp_path) as happenings:
        (tmp_path / "a").touch()
        assert await happenings.next() == {"a"}
        (tmp_path / "a").rename(tmp_path / "b")
        assert await happenings.next() == {"a", "b"}
        (tmp_path / "b").unlink()
        assert await happenings.next() == {"b"}


async def test_the_watch_follows_a_path_into_being_and_out_of_it(tmp_path: Path) -> None:
    """Each level that is made is watched in turn; removed and made anew, it is watched again."""
    deep = tmp_path / "a" / "b" / "c"
    async with Happenings(deep) as happenings:
        for _ in range(3):
            deep.mkdir(parents=True)
            names: set[str] = set()
            while "kubelet.sock" not in names:  # until then it tells that the directory is another
                (deep / "kubelet.sock").touch()
                names = await happenings.next()
                (deep / "kubelet.sock").unlink()
            shutil.rmtree(tmp_path / "a")
            await happenings.until("")


async def test_a_check_finds_that_the_path_leads_elsewhere(tmp_path: Path) -> None:
    """An ancestor renamed and made anew sends no event; check() notices, once."""
    directory = tmp_path / "a" / "b"
    directory.mkdir(parents=True)
    async with Happenings(directory) as happenings:
        (tmp_path / "a").rename(tmp_path / "old")
        directory.mkdir(parents=True)
        happenings.watch.check()
        happenings.watch.check()
        assert await happenings.next() == {""}
        (directory / "x").touch()
        assert await happenings.next() == {"x"}


async def test_a_watch_that_was_refused_is_had_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others can have used up the user's watches for a moment; each check tries again, silently."""
    told: list[str] = []
    loop = asyncio.get_running_loop()
    watch = ttdp.DirectoryWatch(str(tmp_path), told.extend)
    with monkeypatch.context() as patch:
        patch.setattr(ttdp._libc, "inotify_add_watch", lambda *_: -1)
        watch.open(loop)
        watch.check()
        watch.check()
    assert told == ["", ""]
    watch.check()
    told.clear()
    (tmp_path / "kubelet.sock").touch()
    await until(lambda: told == ["kubelet.sock"])
    watch.check()
    assert told == ["kubelet.sock"] and len(caplog.records) == 1
    watch.close(loop)
