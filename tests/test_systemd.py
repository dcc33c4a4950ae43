"""systemd's side: real notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import kubelet_of, plugin_sockets
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

P300 = "tenstorrent.com/p300"
AS_THE_UNIT = ["sh", "-c", 'umask 0077; exec "$0" "$@"', "env", "--default-signal=HUP"]

# -- the daemon's life -----------------------------------------------------------------------------


@pytest.fixture
async def service(node: SimulatedNode, directory: Path, ticking: None) -> AsyncIterator[Service]:
    """The daemon as a process, on a node with an n150 whose reads block, an n150 and a p300c."""
    node.add("n150")[0].block()
    node.add("n150")
    node.add("p300c")
    flags = [f"--device-plugin-dir={directory}", *node.flags, *outlet_flags(directory.parent)]
    command = [*AS_THE_UNIT, *SIMULATION, "run", *flags]
    async with Service(command, environment(ROOT), directory.with_name("notify")) as running:
        yield running


async def end_without_traceback(service: Service, number: int) -> None:
    assert await service.stop(number) == 0
    assert not [line for line in service.said if "Traceback" in line or " ERROR " in line]


async def test_is_ready_without_a_kubelet_and_though_a_read_blocks(
    node: SimulatedNode, service: Service, directory: Path
) -> None:
    """In a directory that the daemon has created (0750); the kubelet is registered with later.

    Nor does its end wait for the read, or for a container that waits for a chip; Ctrl-C is SIGINT.
    """
    await service.note("READY=1")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o750
    status = await service.status("waiting for kubelet")
    assert status.startswith("2 × tenstorrent.com/n150, ")
    waiting = f"waiting for kubelet ({directory}/kubelet.sock does not exist)"
    assert status.endswith(f"; 2 × {P300}, 2 healthy; {waiting}")

    async with kubelet_of(node, directory) as kubelet:
        await kubelet.run_pod("first", P300, 2)
        kubelet.force_delete("first")
        await kubelet.admit("second", "main", {P300: 1})
        await service.wait_for(lambda: "start waits" in "".join(service.said), "the wait")
        assert service.heard.count("READY=1") == 1

        await end_without_traceback(service, signal.SIGINT)
        assert "STOPPING=1" in service.heard and plugin_sockets(directory) == []


def handles_hup(pid: int) -> bool:
    """Return whether the program blocks SIGHUP or catches it; the wrapper ignores it before."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"(?m)^Sig(?:Blk|Cgt):\t([0-9a-f]+)$", status)
    is_handled = any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks)
    return is_handled and "python" in os.readlink(f"/proc/{pid}/exe")


async def test_a_reload_at_any_moment_of_the_start_ends_nothing(service: Service) -> None:
    """SIGHUP every few milliseconds until READY=1; the configuration is read again then."""
    await until(lambda: handles_hup(service.pid))
    service.send(signal.SIGHUP)  # on a busy machine it can be ready before the first one
    while "READY=1" not in service.heard:
        await asyncio.sleep(0.003)
        service.send(signal.SIGHUP)

    await service.wait_for(lambda: "configuration reloaded" in "".join(service.said), "the reload")
    await end_without_traceback(service, signal.SIGTERM)


# -- notifications ---------------------------------------------------------------------------------


@pytest.fixture
def manager(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NotifySocket]:
    """The service manager of a ttdp.ServiceManager that is made."""
    found = NotifySocket(short_tmp / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", found.address)
    yield found
    found.close()


def test_a_status_is_sent_when_it_changes(manager: NotifySocket) -> None:
    """systemd ignores a message of more than 4096 bytes: it would go on to show the last one."""
    service = ttdp.ServiceManager({})
    for status in ("2 × n150", "2 × n150", "x" + "é" * 5000):
        service.show(status)
    service.notify("READY=1", "STATUS=x")

    assert manager.receive() == ["STATUS=2 × n150", f"STATUS=x{'é' * 1999}", "READY=1\nSTATUS=x"]


def test_the_watchdog_is_fed_at_half_of_its_time(manager: NotifySocket) -> None:
    """As sd_watchdog_enabled(3) recommends; without a watchdog, not at all."""
    for environ, interval in ({"WATCHDOG_USEC": "30000000"}, 15.0), ({}, float("inf")):
        service = ttdp.ServiceManager(environ)
        service.feed_watchdog()
        assert service.feed_interval == interval
    assert manager.receive() == ["WATCHDOG=1"]


def test_it_runs_without_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by hand: nothing is to be repeated."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert ttdp.ServiceManager({}).notify("READY=1")


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
for error in (ttdp.DecodeError("garbage"), ValueError("two")):
    logging.getLogger("grpc").error(error, exc_info=error)
"""


def test_a_line_for_the_journal_has_its_priority() -> None:
    """Each line of a traceback, too; garbage from a client is no traceback at all."""
    lines = finished([sys.executable, "-c", LOGGING, "0", "times"]).stderr.splitlines()

    levels = ["<7>it is debug", "<6>it is info", "<4>it is warning", "<3>it is error"]
    assert lines == [*levels, "<3>garbage", "<3>two", "<3>ValueError: two"]


@pytest.mark.parametrize(("form", "time"), [("times", r"\d{4}-\S+ \S+ INFO    "), ("bare", "")])
def test_a_line_elsewhere_has_time_and_level(form: str, time: str) -> None:
    """The journal's stream is not stderr then: somebody has redirected it."""
    lines = finished([sys.executable, "-c", LOGGING, "1", form]).stderr.splitlines()
    assert re.fullmatch(f"{time}it is info", lines[1])
