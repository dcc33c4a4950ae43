"""systemd's side: real notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import kubelet_of, plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import (
    ROOT,
    SIMULATION,
    NotifySocket,
    Service,
    environment,
    finished,
    outlet_flags,
    until,
)

Launch = Callable[..., Coroutine[Any, Any, Service]]
N150 = "tenstorrent.com/n150"
AS_THE_UNIT = ["sh", "-c", 'umask 0077; exec "$0" "$@"', "env", "--default-signal=HUP"]


@pytest.fixture
def config(directory: Path) -> Path:
    """The daemon's configuration."""
    file = directory.with_name("config.toml")
    file.write_text(f'device_plugin_dir = "{directory}"\n')
    return file


@pytest.fixture
async def launch(node: SimulatedNode, directory: Path, config: Path) -> AsyncIterator[Launch]:
    """Starts the daemon on the node as a service; it is ended at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*, notify: str = "notify", **environ: str) -> Service:
            flags = [f"--config-file={config}", *node.flags, *outlet_flags(directory.parent)]
            command = [*AS_THE_UNIT, *SIMULATION, "run", *flags]
            service = Service(command, environment(ROOT, **environ), directory.with_name(notify))
            return await stack.enter_async_context(service)

        yield start


async def reload(service: Service) -> str:
    """Send SIGHUP; return the notification that begins the reload, after the one that ends it."""
    service.send(signal.SIGHUP)
    begin = await service.note("RELOADING=1")
    await service.note("READY=1")
    return begin.text


async def end_without_traceback(service: Service, number: int = signal.SIGTERM) -> None:
    status, _ = await service.stop(number)
    assert status == 0
    assert not [line for line in service.said if "Traceback" in line or " ERROR " in line]


# -- ready and status ------------------------------------------------------------------------------


async def test_is_ready_without_a_kubelet(
    node: SimulatedNode, launch: Launch, directory: Path
) -> None:
    """In a directory that the daemon has created (0750); the kubelet is registered with later."""
    node.add("n300")
    node.add("p300c")
    service = await launch()
    await service.note("READY=1")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    devices = "1 × tenstorrent.com/n300, 1 healthy; 2 × tenstorrent.com/p300, 2 healthy"
    waiting = f"waiting for kubelet ({directory}/kubelet.sock does not exist)"
    assert await service.status("waiting") == f"{devices}; {waiting}"

    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered("tenstorrent.com/n300")
        await kubelet.registered("tenstorrent.com/p300")
        assert len(plugin_sockets(directory)) == 2
    assert service.heard.count("READY=1") == 1


async def test_neither_start_nor_end_waits_for_a_read_that_blocks(
    node: SimulatedNode, launch: Launch
) -> None:
    """The driver can block it for ten seconds; the thread is left behind."""
    node.add("n150")[0].block()
    node.add("n150")
    service = await launch()
    await service.note("READY=1")
    await end_without_traceback(service)


# -- reload ----------------------------------------------------------------------------------------


async def test_a_reload_is_between_reloading_and_ready(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """RELOADING=1 has the time on the monotonic clock; at READY=1 the settings are in force."""
    node.add("p150a")
    service = await launch(TTDP_UNTI="board")
    await service.note("READY=1")
    config.write_text(f'{config.read_text()}resource_naming = "card"\n')
    before = time.monotonic_ns() // 1000

    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", await reload(service))

    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    statuses = [text for text in service.heard if text.startswith("STATUS=")]
    assert statuses[-1].startswith("STATUS=1 × tenstorrent.com/p150a")
    # An unknown variable is one line at the start, and at each reload: somebody believes in it.
    await service.stop()
    assert sum("'TTDP_UNTI'" in line and "WARNING" in line for line in service.said) == 2


async def test_a_rejected_configuration_is_shown_until_it_is_valid_again(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """The old one stays in force; one line, and the status, name file, key and valid values."""
    node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    valid = config.read_text()

    config.write_text('resource_naming = "size"\nlog_level = "debug"\n')
    await reload(service)
    rejected = "the configuration was rejected at the last reload"
    await service.status("1 × tenstorrent.com/p150", rejected, "resource_naming: 'size'")

    config.write_text(valid)
    await reload(service)
    assert rejected not in await service.status("1 × tenstorrent.com/p150")

    await service.stop()
    (line,) = [line for line in service.said if str(config) in line]
    assert "resource_naming: 'size'" in line and "board, card or arch" in line
    assert not any(" DEBUG " in line for line in service.said)


def handles_hup(pid: int) -> bool:
    """Return whether the program blocks SIGHUP or catches it; the wrapper ignores it before."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"(?m)^Sig(?:Blk|Cgt):\t([0-9a-f]+)$", status)
    is_handled = any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks)
    return is_handled and "python" in os.readlink(f"/proc/{pid}/exe")


async def test_a_reload_at_any_moment_of_the_start_ends_nothing(
    node: SimulatedNode, launch: Launch
) -> None:
    """SIGHUP every few milliseconds until READY=1; the configuration is read again then."""
    node.add("n150")
    service = await launch()
    await until(lambda: handles_hup(service.pid))

    service.send(signal.SIGHUP)  # on a busy machine it can be ready before the first one
    while "READY=1" not in service.heard:
        await asyncio.sleep(0.003)
        service.send(signal.SIGHUP)

    await service.wait_for(lambda: any("reloaded" in line for line in service.said), "the reload")
    await end_without_traceback(service)


# -- the end, and other daemons --------------------------------------------------------------------


async def test_it_ends_with_status_0_and_removes_its_sockets(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, directory: Path
) -> None:
    """Also while a container waits for a chip, whose call fails, as the kubelet calls again.

    SIGINT is Ctrl-C's; the other tests end it as systemd does, by SIGTERM.
    """
    node.add("n150")
    node.add("p150a")
    service = await launch()
    await kubelet.registered("tenstorrent.com/p150")
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})
    await service.wait_for(lambda: any("start waits" in line for line in service.said), "the wait")

    await end_without_traceback(service, signal.SIGINT)

    assert "STOPPING=1" in service.heard and plugin_sockets(directory) == []


async def test_a_second_daemon_ends_and_the_first_goes_on(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, directory: Path
) -> None:
    """Status 75, and one line with the directory. A daemon that was killed has no directory."""
    node.add("n150")
    first = await launch()
    await first.note("READY=1")
    second = await launch(notify="second")

    assert await second.ended() == 75

    (line,) = second.said
    assert line.endswith(f"{directory} is in use by another tt-device-plugin; exiting")
    assert not any(text.startswith("READY") for text in second.heard)
    await kubelet.registered(N150)

    await first.stop(signal.SIGKILL)
    third = await launch(notify="third")
    await third.note("READY=1")
    await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2)
    assert len(plugin_sockets(directory)) == 1


# -- notifications ---------------------------------------------------------------------------------


@pytest.fixture
def manager(short_tmp: Path) -> Iterator[NotifySocket]:
    """A service manager's socket."""
    found = NotifySocket(short_tmp / "notify")
    yield found
    found.close()


def service_of(
    monkeypatch: pytest.MonkeyPatch, address: str, **environ: str
) -> ttdp.ServiceManager:
    """Return what notifies the manager that has this address."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    return ttdp.ServiceManager(environ)


def texts(manager: NotifySocket) -> list[str]:
    return [note.text for note in manager.receive()]


def test_a_status_is_sent_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, manager: NotifySocket
) -> None:
    """systemd ignores a message of more than 4096 bytes: it would go on to show the last one."""
    service = service_of(monkeypatch, manager.address)
    for status in ("2 × n150", "2 × n150", "é" * 5000, "x" + "é" * 5000):
        service.show(status)
    service.notify("READY=1", "STATUS=x")

    first, long, longer, last = texts(manager)
    assert (first, last) == ("STATUS=2 × n150", "READY=1\nSTATUS=x")
    assert long == f"STATUS={'é' * 2000}" and longer == f"STATUS=x{'é' * 1999}"


@pytest.mark.parametrize(
    ("environ", "interval"), [({"WATCHDOG_USEC": "30000000"}, 15.0), ({}, float("inf"))]
)
def test_the_watchdog_is_fed_at_half_of_its_time(
    monkeypatch: pytest.MonkeyPatch, manager: NotifySocket, environ: dict[str, str], interval: float
) -> None:
    """As sd_watchdog_enabled(3) recommends; without a watchdog, not at all."""
    service = service_of(monkeypatch, manager.address, **environ)
    service.feed_watchdog()
    assert service.feed_interval == interval
    assert texts(manager) == (["WATCHDOG=1"] if environ else [])


def test_a_manager_that_does_not_read_is_told_later(
    monkeypatch: pytest.MonkeyPatch, manager: NotifySocket
) -> None:
    """A message that it has not taken is repeated by the next turn, and blocks none for long."""
    monkeypatch.setattr(ttdp, "NOTIFY_TIMEOUT", 0.01)
    service = service_of(monkeypatch, manager.address)
    while service.notify("X=1"):
        pass
    service.show("2 × n150")
    assert set(texts(manager)) == {"X=1"}

    service.show("2 × n150")
    assert texts(manager) == ["STATUS=2 × n150"]


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_it_runs_without_a_manager(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Started by hand, or with a socket that is not there: nothing is to be repeated."""
    assert service_of(monkeypatch, address).notify("READY=1")


def test_sockets_that_systemd_passes_in_are_found_by_their_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is descriptor 3. Those that were meant for another process are not ours."""
    monkeypatch.setattr("socket.socket", lambda fileno: fileno)

    def passed(**environ: str) -> list[Any]:
        given = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", **environ}
        return ttdp.ServiceManager(given).sockets("metrics")

    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert passed(LISTEN_FDNAMES="metrics:other:metrics:metrics") == [3, 5]
    assert passed(LISTEN_FDNAMES="metrics", LISTEN_PID="1") == []
    assert passed(LISTEN_FDNAMES="metrics", LISTEN_FDS="") == passed() == []


# -- the log ---------------------------------------------------------------------------------------

LOGGING = """
import logging, os, sys, ttdp
status = os.fstat(2)
stream = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + int(sys.argv[1])}"}
ttdp.set_up_logging(stream, has_timestamps=sys.argv[2] == "times")
ttdp.log.setLevel("DEBUG")
for level in ("debug", "info", "warning", "error"):
    getattr(ttdp.log, level)("it is %s", level)
logging.getLogger("grpc").info("none of ours")
try:
    ttdp.pb.Empty.FromString(b"garbage")
except ttdp.DecodeError:
    logging.getLogger("grpc").exception("garbage")
try:
    sys.exit(1 / 0)
except ZeroDivisionError:
    ttdp.log.exception("two")
"""


def test_a_line_for_the_journal_has_its_priority() -> None:
    """Each line of a traceback, too; garbage from a client is no traceback at all."""
    lines = finished([sys.executable, "-c", LOGGING, "0", "times"]).stderr.splitlines()

    assert lines[:6] == [
        "<7>it is debug", "<6>it is info", "<4>it is warning", "<3>it is error", "<3>garbage",
        "<3>two",
    ]  # fmt: skip
    assert lines[6] == "<3>Traceback (most recent call last):"
    assert all(line.startswith("<3>") for line in lines[6:])


@pytest.mark.parametrize(("form", "time"), [("times", r"\d{4}-\S+ \S+ INFO    "), ("bare", "")])
def test_a_line_elsewhere_has_time_and_level(form: str, time: str) -> None:
    """The journal's stream is not stderr then: somebody has redirected it."""
    lines = finished([sys.executable, "-c", LOGGING, "1", form]).stderr.splitlines()
    assert re.fullmatch(f"{time}it is info", lines[1])
