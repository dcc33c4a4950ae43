"""systemd's side: real notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import asyncio
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
from tests.world.processes import ROOT, SIMULATION, Service, environment, outlet_flags, until

Launch = Callable[..., Coroutine[Any, Any, Service]]

# The shell becomes the daemon, so that $$ can name it beforehand, as systemd does; and who runs the
# tests can have SIGHUP ignored.
SHELL = 'export WATCHDOG_PID="${WATCHDOG_PID:-$$}"; exec env --default-signal=HUP "$@"'


@pytest.fixture
def config(directory: Path) -> Path:
    """The daemon's configuration, with short polls."""
    file = directory.with_name("config.toml")
    file.write_text(f'device_plugin_dir = "{directory}"\n[health]\ninterval = 0.1\n')
    return file


@pytest.fixture
async def launch(node: SimulatedNode, directory: Path, config: Path) -> AsyncIterator[Launch]:
    """Starts the daemon on the node as a service; it is ended at the end."""
    directory.mkdir()
    async with contextlib.AsyncExitStack() as stack:

        async def start(*words: str, notify: str = "", **environ: str) -> Service:
            flags = [f"--config-file={config}", *node.flags, *outlet_flags(directory.parent)]
            command = ["sh", "-c", SHELL, "sh", *SIMULATION, "run", *flags, *words]
            address = notify or str(directory.with_name("notify"))
            service = Service(command, environment(ROOT, **environ), address)
            return await stack.enter_async_context(service)

        yield start


def serves(directory: Path, resource: str) -> bool:
    """Whether there is a socket for this resource, for where no notification says so."""
    return any(name.startswith(f"tt-{resource}.") for name in plugin_sockets(directory))


async def reloaded(service: Service) -> None:
    """Wait until it has taken over its configuration anew."""
    await service.wait_for(
        lambda: any("configuration reloaded" in line for line in service.said), "the reload"
    )


def latest_status(service: Service) -> str:
    statuses = [text for text in service.heard if text.startswith("STATUS=")]
    return statuses[-1].removeprefix("STATUS=")


# -- ready and status ------------------------------------------------------------------------------


async def test_ready_without_a_kubelet_once_it_has_scanned_and_serves(
    node: SimulatedNode, launch: Launch, directory: Path
) -> None:
    """At READY=1 the sockets of both resources are there, and the status says what is missing."""
    node.add("n300")
    node.add("p300c")
    service = await launch()
    await service.note("READY=1")
    assert len(plugin_sockets(directory)) == 2
    status = latest_status(service)
    there = "1 × tenstorrent.com/n300, 1 healthy; 2 × tenstorrent.com/p300, 2 healthy; "
    assert status.startswith(there) and "waiting for kubelet" in status
    assert service.heard.count("READY=1") == 1


async def test_ready_without_the_directory_of_the_kubelet(
    node: SimulatedNode, launch: Launch, directory: Path
) -> None:
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
    assert latest_status(service) == "no Tenstorrent device on this node; waiting for one"


@pytest.mark.usefixtures("ticking")
async def test_ready_although_a_read_blocks(node: SimulatedNode, launch: Launch) -> None:
    """A chip whose telemetry does not return holds up neither the start nor the end."""
    node.add("n150")[0].block()
    node.add("n150")
    service = await launch()
    await service.note("READY=1")
    await service.status("1 healthy (0000:01:00.0: telemetry read does not return")
    assert (await service.stop())[0] == 0


@pytest.mark.usefixtures("ticking")
async def test_the_status_is_what_an_operator_wants_to_read(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet
) -> None:
    """How many of what, how many are healthy and why not all, and that the kubelet has them."""
    for _ in range(2):
        node.add("n300")
    service = await launch()
    await service.note("STATUS=2 × tenstorrent.com/n300, 2 healthy; registered with kubelet")
    node.chips[1].freeze()
    said = await service.status("1 healthy")
    reason = r"0000:02:00.0: heartbeat stalled .*tt-smi -r 0000:02:00.0"
    form = rf"2 × tenstorrent.com/n300, 1 healthy \({reason}\); registered with kubelet"
    assert re.fullmatch(form, said)
    node.chips[1].thaw()
    await service.status("2 healthy")


# -- watchdog --------------------------------------------------------------------------------------


async def test_a_sign_of_life_comes_at_half_of_the_watchdogs_time(
    node: SimulatedNode, launch: Launch, directory: Path, config: Path
) -> None:
    """No more of them than are due, although the polls are an hour apart."""
    node.add("n150")
    limit = 0.4
    began = time.monotonic()
    service = await launch(WATCHDOG_USEC=str(int(limit * 1e6)))
    config.write_text(f'device_plugin_dir = "{directory}"\n[health]\ninterval = 3600\n')
    await service.note("READY=1")
    service.send(signal.SIGHUP)
    await service.note("READY=1")
    await service.note("WATCHDOG=1")  # that of the reload
    times = [(await service.note("WATCHDOG=1")).at for _ in range(6)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) < limit
    due = (times[-1] - began) / (limit / 2)  # more if they are heard late
    assert len(times) <= due + 1


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({"WATCHDOG_PID": "1", "WATCHDOG_USEC": "20000"}, id="another process"),
        pytest.param({}, id="none"),
        pytest.param({"WATCHDOG_USEC": "0"}, id="zero"),
        pytest.param({"WATCHDOG_USEC": "-20000"}, id="negative"),
        pytest.param({"WATCHDOG_USEC": "soon"}, id="garbage"),
    ],
)
async def test_no_sign_of_life_for_a_watchdog_that_is_not_ours(
    node: SimulatedNode, launch: Launch, environ: dict[str, str]
) -> None:
    """Several polls on there was none; with a watchdog there is one at every poll."""
    (chip,) = node.add("n150")
    service = await launch(**environ)
    await service.note("READY=1")
    chip.freeze()
    await service.status("heartbeat stalled")
    await service.stop()
    assert "STOPPING=1" in service.heard and "WATCHDOG=1" not in service.heard


# -- reload ----------------------------------------------------------------------------------------


async def test_a_reload_is_announced_done_and_over(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """RELOADING=1 with the moment on the monotonic clock, the new settings, READY=1."""
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
    assert "1 × tenstorrent.com/p150a" in latest_status(service)


async def test_a_bad_file_is_refused_at_a_reload_and_the_old_settings_stay(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """One line names file and key; the status says so until it is mended."""
    (chip,) = node.add("p150a")
    service = await launch()
    await service.note("READY=1")
    good = config.read_text()
    config.write_text('resource_naming = "size"\nlog_level = "debug"\n')
    service.send(signal.SIGHUP)
    await service.note("RELOADING=1")
    await service.note("READY=1")
    refused = "the configuration on disk is refused"
    await service.status("1 × tenstorrent.com/p150", refused, "resource_naming: 'size'")
    chip.vanish()
    await service.status("1 × tenstorrent.com/p150, 0 healthy", "refused")
    config.write_text(good)
    service.send(signal.SIGHUP)
    await service.note("RELOADING=1")
    await service.note("READY=1")
    assert "refused" not in await service.status("1 × tenstorrent.com/p150, 0 healthy")
    await service.stop()
    (line,) = [line for line in service.said if str(config) in line]
    assert "resource_naming: 'size'" in line and "board, card or arch" in line
    assert not any(" DEBUG " in line for line in service.said)


async def test_a_reload_leaves_the_directory_until_a_restart(
    node: SimulatedNode, launch: Launch, short_tmp: Path, directory: Path, config: Path
) -> None:
    """What a running daemon cannot take over is said; the sockets stay where they are."""
    node.add("n150")
    service = await launch()
    await service.note("READY=1")
    elsewhere = short_tmp / "elsewhere"
    elsewhere.mkdir()
    config.write_text(f'device_plugin_dir = "{elsewhere}"\nresource_naming = "arch"\n')
    service.send(signal.SIGHUP)
    await service.note("READY=1")
    await until(lambda: serves(directory, "wormhole"))
    assert not list(elsewhere.iterdir())
    await service.stop()
    assert [line for line in service.said if "device_plugin_dir needs a restart" in line]


def minds_hup(pid: int) -> bool:
    """Whether the program blocks SIGHUP or catches it: the package's wrapper ignores it before."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"(?m)^Sig(?:Blk|Cgt):\t([0-9a-f]+)$", status)
    is_minded = any(int(mask, 16) & 1 << signal.SIGHUP - 1 for mask in masks)
    return is_minded and "python" in os.readlink(f"/proc/{pid}/exe")


async def test_a_reload_at_any_moment_of_the_start_does_not_kill_it(
    node: SimulatedNode, launch: Launch
) -> None:
    """SIGHUP every few milliseconds, until it is ready; what came early is done then."""
    node.add("n150")
    service = await launch()
    await until(lambda: minds_hup(service.pid))
    service.send(signal.SIGHUP)
    while "READY=1" not in service.heard:
        service.send(signal.SIGHUP)
        await asyncio.sleep(0.003)
    await reloaded(service)
    assert (await service.stop())[0] == 0


async def test_a_reload_while_it_waits_for_the_driver_does_not_make_it_ready(
    node: SimulatedNode, launch: Launch, config: Path
) -> None:
    """The new settings count, and the kubelet, which is ordered behind READY, goes on waiting."""
    (chip,) = node.add("p150a")
    chip.unbind()
    service = await launch()
    await service.status(f"waiting for the driver to make a node for {chip.bdf}")
    config.write_text(config.read_text().replace("[health]", 'resource_naming = "card"\n[health]'))
    service.send(signal.SIGHUP)
    await reloaded(service)
    assert not [text for text in service.heard if text.startswith(("READY", "RELOADING"))]
    chip.bind()
    await service.note("READY=1")
    assert "tenstorrent.com/p150a" in latest_status(service)


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_in_order_and_takes_its_sockets_along(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, number: signal.Signals, directory: Path
) -> None:
    """STOPPING=1, status 0, nothing left in the directory, with a kubelet that watches."""
    node.add("n150")
    node.add("p150a")
    service = await launch()
    await kubelet.registered("tenstorrent.com/n150")
    await kubelet.registered("tenstorrent.com/p150")
    assert len(plugin_sockets(directory)) == 2
    status, _ = await service.stop(number)
    assert status == 0 and "STOPPING=1" in service.heard
    assert plugin_sockets(directory) == []
    assert not [line for line in service.said if "Traceback" in line or " ERROR " in line]


async def test_a_second_daemon_ends_and_names_the_first(
    node: SimulatedNode, launch: Launch, directory: Path, short_tmp: Path
) -> None:
    """Status 75, upon which systemd tries again with back-off; the first goes on."""
    node.add("n150")
    first = await launch()
    await first.note("READY=1")
    second = await launch(notify=str(short_tmp / "second"))
    assert await second.ended() == 75
    (line,) = second.said
    assert f"{directory}: another tt-device-plugin serves it already, process {first.pid}" in line
    assert not any(text.startswith("READY") for text in second.heard)
    assert serves(directory, "n150") and (await first.stop())[0] == 0


async def test_the_next_daemon_starts_when_the_first_was_killed(
    node: SimulatedNode, launch: Launch, directory: Path, short_tmp: Path
) -> None:
    """The lock ends with its process."""
    node.add("n150")
    first = await launch()
    await first.note("READY=1")
    await first.stop(signal.SIGKILL)
    second = await launch(notify=str(short_tmp / "second"))
    await second.note("READY=1")
    assert len(plugin_sockets(directory)) == 1


@pytest.mark.parametrize("has_driver", [True, False])
async def test_nothing_to_serve_is_an_error_if_that_is_wanted(
    node: SimulatedNode, launch: Launch, has_driver: bool
) -> None:
    """With --fail-on-init-error: status 1 and one line that tells what is missing."""
    if not has_driver:
        node.unload_driver()
    service = await launch("--fail-on-init-error")
    assert await service.ended() == 1 and "READY=1" not in service.heard
    (line,) = service.said
    missing = "there is no Tenstorrent device" if has_driver else "no Tenstorrent driver is loaded"
    assert line.endswith(missing)


async def test_with_a_device_there_is_no_init_error(node: SimulatedNode, launch: Launch) -> None:
    """Firmware that is still silent is a device all the same."""
    node.add("n150", firmware=False)
    service = await launch("--fail-on-init-error")
    await service.note("READY=1")


# -- managers that are not there -------------------------------------------------------------------


async def test_an_abstract_address_is_heard_on(node: SimulatedNode, launch: Launch) -> None:
    """NOTIFY_SOCKET may begin with @: then it has no file."""
    service = await launch(notify=f"@tt-test-{os.getpid()}")
    await service.note("READY=1")


async def test_a_manager_that_does_not_listen_holds_up_nothing(
    node: SimulatedNode, launch: Launch, directory: Path, short_tmp: Path
) -> None:
    """With its socket full of what nobody reads, the daemon serves and ends as ever."""
    node.add("n150")
    full = str(short_tmp / "full")
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as manager:
        manager.bind(full)
        with socket.socket(socket.AF_UNIX, kind) as probe, pytest.raises(BlockingIOError):
            for _ in range(100_000):
                probe.sendto(b"X=1", full)
        service = await launch(NOTIFY_SOCKET=full, WATCHDOG_USEC="2000")
        await until(lambda: serves(directory, "n150"))
        assert (await service.stop())[0] == 0


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
async def test_without_a_manager_it_runs_all_the_same(
    node: SimulatedNode, launch: Launch, address: str, directory: Path
) -> None:
    """Started by hand, or with a socket that is gone."""
    node.add("n150")
    service = await launch(NOTIFY_SOCKET=address)
    await until(lambda: serves(directory, "n150"))
    assert (await service.stop())[0] == 0 and plugin_sockets(directory) == []
