"""systemd's side: a real socket for notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import ROOT, SIMULATION, Service, environment, finished, outlet_flags, until

Launch = Callable[..., Coroutine[Any, Any, Service]]


@pytest.fixture
def config(directory: Path) -> Path:
    """The daemon's configuration, with short polls."""
    file = directory.with_name("config.toml")
    file.write_text(f'device_plugin_dir = "{directory}"\n[health]\ninterval = 0.1\n')
    return file


@pytest.fixture
async def launch(node: SimulatedNode, directory: Path, config: Path) -> AsyncIterator[Launch]:
    """Starts the daemon on the node as a service, with an empty device plugin directory; it is ended at the end."""
    directory.mkdir()
    async with contextlib.AsyncExitStack() as stack:

        async def start(*words: str, notify: str = str(directory.with_name("notify")), **environ: str) -> Service:
            # The shell becomes the daemon, so that $$ can name it beforehand, as systemd does.
            shell = 'export WATCHDOG_PID="${WATCHDOG_PID:-$$}"; exec "$@"'
            command = [
                "sh",
                "-c",
                shell,
                "sh",
                *SIMULATION,
                "run",
                f"--config-file={config}",
                *node.flags,
                *outlet_flags(directory.parent),
                *words,
            ]
            return await stack.enter_async_context(Service(command, environment(ROOT, **environ), notify))

        yield start


def serves(directory: Path, resource: str) -> bool:
    """Whether there is a socket for this resource, for where no notification says so."""
    return any(name.startswith(f"tt-{resource}.") for name in plugin_sockets(directory))


# -- ready and status --------------------------------------------------------------------------------------------------


async def test_ready_without_a_kubelet_once_it_has_scanned_and_serves(
    node: SimulatedNode, launch: Launch, directory: Path
) -> None:
    """At READY=1 the sockets of both resources are there, and the status says what is, and what is waited for."""
    node.add("n300")
    node.add("p300c")
    service = await launch()
    await service.note("READY=1")
    assert len(plugin_sockets(directory)) == 2
    status = next(text for text in reversed(service.heard) if text.startswith("STATUS="))
    assert status.startswith("STATUS=1 × tenstorrent.com/n300, 1 healthy; 2 × tenstorrent.com/p300, 2 healthy; ")
    assert "waiting for kubelet" in status
    assert service.heard.count("READY=1") == 1


async def test_ready_without_the_directory_of_the_kubelet(node: SimulatedNode, launch: Launch, directory: Path) -> None:
    """A machine that joins the cluster later is ready for that."""
    node.add("n150")
    directory.rmdir()
    service = await launch()
    await service.note("READY=1")
    assert any(f"waiting for {directory}" in message for message in service.heard)


async def test_ready_without_a_device_on_the_machine(node: SimulatedNode, launch: Launch) -> None:
    """It waits for one, and says so."""
    node.unload_driver()
    service = await launch()
    await service.note("READY=1")
    assert "STATUS=no Tenstorrent device on this node; waiting for one" in service.heard


async def test_ready_although_a_read_blocks(node: SimulatedNode, launch: Launch, ticking: None) -> None:
    """A chip whose telemetry does not return holds up neither the start nor the end."""
    node.add("n150")[0].block()
    node.add("n150")
    service = await launch()
    await service.note("READY=1", 5)
    await service.status("2 × tenstorrent.com/n150, 1 healthy (0000:01:00.0: telemetry read does not return")
    status, seconds = await service.stop()
    assert status == 0 and seconds < 1


async def test_the_status_is_what_an_operator_wants_to_read(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, ticking: None
) -> None:
    """How many of what, how many of them healthy and why not all, and that the kubelet knows of them."""
    for _ in range(2):
        node.add("n300")
    service = await launch()
    await service.note("STATUS=2 × tenstorrent.com/n300, 2 healthy; registered with kubelet")
    node.chips[1].freeze()
    said = await service.status("1 healthy")
    assert re.fullmatch(
        r"2 × tenstorrent.com/n300, 1 healthy \(0000:02:00.0: heartbeat stalled .*\); registered with kubelet", said
    )
    node.chips[1].thaw()
    await service.status("2 healthy")


# -- watchdog ----------------------------------------------------------------------------------------------------------


async def test_a_sign_of_life_comes_at_half_of_the_watchdogs_time(
    node: SimulatedNode, launch: Launch, directory: Path, config: Path
) -> None:
    """Each in time for the watchdog, and no more of them than are due, although the polls are an hour apart."""
    node.add("n150")
    limit = 0.4
    service = await launch(WATCHDOG_USEC=str(int(limit * 1e6)))
    config.write_text(f'device_plugin_dir = "{directory}"\n[health]\ninterval = 3600\n')
    await service.note("READY=1")
    service.send(signal.SIGHUP)
    await service.note("READY=1")
    await service.note("WATCHDOG=1")  # that of the reload
    times = [(await service.note("WATCHDOG=1")).at for _ in range(6)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) < limit
    assert sum(gaps) / len(gaps) > 0.8 * limit / 2


@pytest.mark.parametrize(
    "environ",
    [{"WATCHDOG_PID": "1", "WATCHDOG_USEC": "20000"}, {}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "-20000"},
     {"WATCHDOG_USEC": "soon"}],
    ids=["another process", "none", "zero", "negative", "garbage"],
)  # fmt: skip
async def test_no_sign_of_life_for_a_watchdog_that_is_not_ours(
    node: SimulatedNode, launch: Launch, ticking: None, environ: dict[str, str]
) -> None:
    """Several polls on, there was none; with a watchdog of its own there would have been one at every poll."""
    (chip,) = node.add("n150")
    service = await launch(**environ)
    await service.note("READY=1")
    chip.freeze()
    await service.status("heartbeat stalled")
    await service.stop()
    assert "STOPPING=1" in service.heard and "WATCHDOG=1" not in service.heard


# -- reload ------------------------------------------------------------------------------------------------------------


async def test_a_reload_is_announced_done_and_over(node: SimulatedNode, launch: Launch, config: Path) -> None:
    """RELOADING=1 with the moment on the monotonic clock, then the new settings, then READY=1."""
    node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    config.write_text(config.read_text().replace("[health]", 'resource_naming = "card"\n[health]'))
    before = time.monotonic_ns() // 1000
    service.send(signal.SIGHUP)
    reloading = await service.note("RELOADING=1")
    await service.note("READY=1")
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading.text)
    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    status = next(text for text in reversed(service.heard) if text.startswith("STATUS="))
    assert "1 × tenstorrent.com/p150a" in status


async def test_a_bad_file_is_refused_at_a_reload_and_the_old_settings_stay(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """One line names the file and the key; the service goes on as before, and its status says so until it is mended."""
    node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    good = config.read_text()
    config.write_text('resource_naming = "size"\nlog_level = "debug"\n')
    service.send(signal.SIGHUP)
    await service.note("RELOADING=1")
    await service.note("READY=1")
    await service.status("1 × tenstorrent.com/p150", "the configuration on disk is refused", "resource_naming: 'size'")
    (chip,) = node.chips
    chip.vanish()
    await service.status("1 × tenstorrent.com/p150, 0 healthy", "refused")
    config.write_text(good)
    service.send(signal.SIGHUP)
    await service.note("RELOADING=1")
    await service.note("READY=1")
    assert "refused" not in await service.status("1 × tenstorrent.com/p150, 0 healthy")
    status, _ = await service.stop()
    (line,) = [line for line in service.said if str(config) in line]
    assert "resource_naming" in line and "'size'" in line and "board, card or arch" in line
    assert status == 0 and not any(" DEBUG " in line for line in service.said)


async def test_a_reload_leaves_the_directory_until_a_restart(
    node: SimulatedNode, launch: Launch, short_tmp: Path, directory: Path, config: Path
) -> None:
    """What a running daemon cannot take over is said; the sockets stay where they are."""
    node.add("n150")
    service = await launch()
    await service.note("READY=1")
    (short_tmp / "elsewhere").mkdir()
    config.write_text(f'device_plugin_dir = "{short_tmp}/elsewhere"\nresource_naming = "arch"\n')
    service.send(signal.SIGHUP)
    await service.note("READY=1")
    await until(lambda: serves(directory, "wormhole"))
    assert not list((short_tmp / "elsewhere").iterdir())
    await service.stop()
    assert [line for line in service.said if "device_plugin_dir" in line and "restart" in line]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_within_a_second_and_takes_its_sockets_along(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, ticking: None, number: signal.Signals, directory: Path
) -> None:
    """STOPPING=1, status 0, and nothing left in the kubelet's directory, with a kubelet that watches."""
    node.add("n150")
    node.add("p150a")
    service = await launch()
    await kubelet.registered("tenstorrent.com/n150")
    await kubelet.registered("tenstorrent.com/p150")
    assert len(plugin_sockets(directory)) == 2
    status, seconds = await service.stop(number)
    assert status == 0 and seconds < 1
    assert plugin_sockets(directory) == []
    assert "STOPPING=1" in service.heard
    assert not [line for line in service.said if "Traceback" in line or " ERROR " in line]


async def test_an_abstract_address_is_heard_on(node: SimulatedNode, launch: Launch) -> None:
    """NOTIFY_SOCKET may begin with @: then it has no file."""
    service = await launch(notify=f"@tt-test-{os.getpid()}")
    await service.note("READY=1")
    assert (await service.stop())[0] == 0


async def test_a_manager_that_does_not_listen_holds_up_nothing(
    node: SimulatedNode, launch: Launch, directory: Path, short_tmp: Path
) -> None:
    """With its socket full of what nobody reads, the daemon serves and ends as ever."""
    node.add("n150")
    full = str(short_tmp / "full")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(full)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe, pytest.raises(BlockingIOError):
            probe.setblocking(False)
            for _ in range(100_000):
                probe.sendto(b"X=1", full)
        service = await launch(NOTIFY_SOCKET=full, WATCHDOG_USEC="2000")
        await until(lambda: serves(directory, "n150"))
        status, seconds = await service.stop()
    assert status == 0 and seconds < 1


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
async def test_without_a_manager_it_runs_all_the_same(
    node: SimulatedNode, launch: Launch, address: str, directory: Path
) -> None:
    """Started by hand, or with a socket that is gone."""
    node.add("n150")
    service = await launch(NOTIFY_SOCKET=address)
    await until(lambda: serves(directory, "n150"))
    assert (await service.stop())[0] == 0 and plugin_sockets(directory) == []


@pytest.mark.parametrize("driver", [True, False])
async def test_nothing_to_serve_is_an_error_if_that_is_wanted(
    node: SimulatedNode, launch: Launch, driver: bool
) -> None:
    """With --fail-on-init-error: status 1 and one line that tells a missing driver from a missing device."""
    if not driver:
        node.unload_driver()
    service = await launch("--fail-on-init-error")
    status = await service.ended()
    (line,) = service.said
    assert ("device" in line.split("ERROR")[1]) if driver else ("no Tenstorrent driver" in line)
    assert status == 1 and "READY=1" not in service.heard


async def test_with_a_device_there_is_no_init_error(node: SimulatedNode, launch: Launch) -> None:
    """Firmware that is still silent is a device all the same."""
    node.add("n150", firmware=False)
    service = await launch("--fail-on-init-error")
    await service.note("READY=1")


async def test_a_bad_configuration_is_status_78_and_no_readiness(node: SimulatedNode, launch: Launch) -> None:
    """systemd does not restart on it, and the line in the journal says what to mend."""
    service = await launch(TTDP_VISIBLE_DEVICES="all")
    status = await service.ended()
    (line,) = service.said
    assert "TTDP_VISIBLE_DEVICES: 'all'" in line and "bdf, index or none" in line
    assert status == 78 and service.heard == []


def test_the_journal_gets_lines_with_priorities(node: SimulatedNode, short_tmp: Path) -> None:
    """As under systemd: stderr is the stream that JOURNAL_STREAM names, and a daemon's start and end are in order."""
    node.add("n150")[0].write("device", b"0xfaca\n")
    journal = short_tmp / "journal"
    with journal.open("w") as file:
        status = os.fstat(file.fileno())
        stream = f"{status.st_dev}:{status.st_ino}"
        ended = finished([*SIMULATION, "--fail-on-init-error", *node.flags], {"JOURNAL_STREAM": stream}, stderr=file)
    lines = journal.read_text().splitlines()
    assert [line[:3] for line in lines] == ["<4>", "<3>"] and ended.returncode == 1
