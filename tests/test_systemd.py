"""systemd's side: real notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip, decide
from tests.conftest import kubelet_of, plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import (
    PATIENCE,
    ROOT,
    SIMULATION,
    NotifySocket,
    Service,
    environment,
    outlet_flags,
    until,
)

pytestmark = pytest.mark.usefixtures("ticking")

NON_BLOCKING = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
Launch = Callable[..., Coroutine[Any, Any, Service]]

N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
AS_THE_UNIT = ["sh", "-c", 'umask 0077; exec "$0" "$@"', "env", "--default-signal=HUP"]


@pytest.fixture
def config(directory: Path) -> Path:
    """The daemon's configuration: short polls, and no heartbeat is ever missed."""
    file = directory.with_name("config.toml")
    health = "[health]\ninterval = 0.5\n"
    file.write_text(f'device_plugin_dir = "{directory}"\n{health}')
    return file


@pytest.fixture
async def launch(node: SimulatedNode, directory: Path, config: Path) -> AsyncIterator[Launch]:
    """Starts the daemon on the node as a service; it is ended at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(*words: str, notify: str = "", **environ: str) -> Service:
            flags = [f"--config-file={config}", *node.flags, *outlet_flags(directory.parent)]
            command = [*AS_THE_UNIT, *SIMULATION, "run", *flags, *words]
            address = notify or str(directory.with_name("notify"))
            service = Service(command, environment(ROOT, **environ), address)
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


async def test_is_ready_while_a_telemetry_read_blocks(node: SimulatedNode, launch: Launch) -> None:
    """The chip is unhealthy when its read has timed out; neither start nor end waits for it."""
    node.add("n150")[0].block()
    node.add("n150")
    service = await launch()
    await service.note("READY=1")
    await service.status("1 healthy (0000:01:00.0: telemetry read timed out")
    await end_without_traceback(service)


# -- reload ----------------------------------------------------------------------------------------


async def test_a_reload_is_between_reloading_and_ready(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """RELOADING=1 has the time on the monotonic clock; at READY=1 the settings are in force."""
    node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    config.write_text(config.read_text().replace("[health]", 'resource_naming = "card"\n[health]'))
    before = time.monotonic_ns() // 1000

    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", await reload(service))

    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    statuses = [text for text in service.heard if text.startswith("STATUS=")]
    assert statuses[-1].startswith("STATUS=1 × tenstorrent.com/p150a")


async def test_an_unknown_variable_is_one_line_at_the_start_and_at_each_reload(
    launch: Launch,
) -> None:
    """Somebody believes in it; it may stand in a drop-in."""
    warning = "unknown variable 'TTDP_UNTI'; see tt-device-plugin.toml(5)"
    service = await launch(TTDP_UNTI="board")
    await service.note("READY=1")
    assert [line for line in service.said if "TTDP_" in line] == [service.said[0]]
    assert warning in service.said[0] and "WARNING" in service.said[0]

    await reload(service)

    await service.wait_for(lambda: sum(warning in line for line in service.said) == 2, "the line")


async def test_a_rejected_configuration_is_shown_until_it_is_valid_again(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """The old one stays in force; one line, and the status, name file, key and valid values."""
    (chip,) = node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    valid = config.read_text()

    config.write_text('resource_naming = "size"\nlog_level = "debug"\n')
    await reload(service)
    rejected = "the configuration was rejected at the last reload"
    await service.status("1 × tenstorrent.com/p150", rejected, "resource_naming: 'size'")

    chip.vanish()
    await service.status("1 × tenstorrent.com/p150, 0 healthy", rejected)

    config.write_text(valid)
    await reload(service)
    assert rejected not in await service.status("1 × tenstorrent.com/p150, 0 healthy")

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


# -- the end ---------------------------------------------------------------------------------------


async def test_it_ends_with_status_0_and_removes_its_sockets(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, directory: Path
) -> None:
    """STOPPING=1 comes first; a connected kubelet does not delay the end.

    SIGINT is Ctrl-C's; the other tests end it as systemd does, by SIGTERM.
    """
    node.add("n150")
    node.add("p150a")
    service = await launch()
    for name in (N150, P150):
        await kubelet.registered(name)
    await end_without_traceback(service, signal.SIGINT)

    assert "STOPPING=1" in service.heard and plugin_sockets(directory) == []


async def test_it_ends_while_containers_wait_for_a_chip(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet
) -> None:
    """SIGTERM during PreStartContainer: an error for the kubelet, which tries again."""
    node.add("n150")
    service = await launch()
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})
    await service.wait_for(lambda: any("start waits" in line for line in service.said), "the wait")
    await end_without_traceback(service)


# -- other daemons and managers --------------------------------------------------------------------


async def test_a_second_daemon_ends_and_names_the_first(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """Status 75, and one line with directory, PID and command; the first daemon goes on."""
    node.add("n150")
    first = await launch()
    await first.note("READY=1")
    second = await launch(notify=str(short_tmp / "second"))

    assert await second.ended() == 75

    (line,) = second.said
    command = Path(f"/proc/{first.pid}/comm").read_text().strip()
    assert line.endswith(f"{directory} is in use by process {first.pid} ({command!r}); exiting")
    assert not any(text.startswith("READY") for text in second.heard)

    await kubelet.registered(N150)
    await first.stop(signal.SIGKILL)
    third = await launch(notify=str(short_tmp / "third"))  # the lock has ended with its process
    await third.note("READY=1")
    await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2)

    assert len(plugin_sockets(directory)) == 1


def notifier(monkeypatch: pytest.MonkeyPatch, address: str, **environ: str) -> ttdp.ServiceManager:
    """Return what notifies a manager that has this NOTIFY_SOCKET."""
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    return ttdp.ServiceManager(environ)


def received(manager: socket.socket) -> list[str]:
    """Take all messages that wait."""
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(manager.recv(65536).decode())
    return found


def fill(address: str) -> None:
    """Send to a socket until its queue is full.

    One sender may not suffice: where systemd has booted, a queue takes more than a socket may send.
    """
    is_full = False
    while not is_full:
        with socket.socket(socket.AF_UNIX, NON_BLOCKING) as sender:
            is_full = True
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.sendto(b"X=1", address)
                    is_full = False


async def test_a_manager_that_reads_late_blocks_nothing_and_gets_all_in_order(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path
) -> None:
    """READY=1 comes once: without it, systemd would end the daemon after its time to start."""
    full = str(short_tmp / "full")
    with socket.socket(socket.AF_UNIX, NON_BLOCKING) as manager:
        manager.bind(full)
        fill(full)
        service = notifier(monkeypatch, full, WATCHDOG_USEC="2000000")

        def tell() -> None:
            service.notify("READY=1")
            for _ in range(1000):
                service.feed_watchdog()
            service.show("2 × n150")

        await asyncio.wait_for(asyncio.to_thread(tell), PATIENCE)

        assert {*received(manager)} == {"X=1"}
        service.notify("STOPPING=1")
        heard = received(manager)

    assert heard == ["READY=1", "WATCHDOG=1", "STATUS=2 × n150", "STOPPING=1"]


def galaxy_status() -> str:
    """Return the status of a Galaxy that is gone, each of whose chips has a resource of its own."""
    buses = [tray + position for tray in ttdp.GALAXY_TRAYS for position in ttdp.GALAXY_POSITIONS]
    names = {bdf(bus): f"galaxy-chip-{bus:02x}" for bus in buses}
    shared = [
        ttdp.SharedResource("galaxy-wormhole", 4, name, (each,)) for each, name in names.items()
    ]
    settings = ttdp.Settings(sharing=ttdp.Sharing(resources=tuple(shared)))
    chips = [chip(bus, "galaxy-wormhole", present=False) for bus in buses]
    return ttdp.status_line(decide(chips, settings), {}, ["the configuration was rejected"])


@pytest.mark.parametrize("status", [galaxy_status(), "é" * 5000, "x" + "é" * 5000])
def test_a_long_status_loses_its_middle(
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path, status: str
) -> None:
    """systemd ignores a message of more than 4096 bytes: it would go on to show the last one."""
    assert len(status.encode()) > 4096
    address = str(short_tmp / "manager")
    with socket.socket(socket.AF_UNIX, NON_BLOCKING) as manager:
        manager.bind(address)
        notifier(monkeypatch, address).show(status)
        (message,) = received(manager)

    assert 4080 < len(message.encode()) <= 4096
    begin, _, end = message.removeprefix("STATUS=").partition("…")
    assert status.startswith(begin) and status.endswith(end)
    assert len(end) > 1000, "the last part says whether the kubelet knows, and what is rejected"


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_it_runs_without_a_manager(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Started by hand, or with a socket that is gone: neither is an error."""
    notifier(monkeypatch, address).notify("READY=1")


def test_a_manager_can_have_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets states as lines, in UTF-8."""
    manager = NotifySocket(f"@tt-test-{os.getpid()}")

    notifier(monkeypatch, manager.address).notify("READY=1", "STATUS=2 × n150")

    (note,) = manager.receive()
    manager.close()
    assert note.text == "READY=1\nSTATUS=2 × n150"
