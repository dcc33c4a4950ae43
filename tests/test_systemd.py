"""systemd's side: a real socket for notifications, real signals, and the daemon as a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ttdp
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode

REPOSITORY = Path(ttdp.__file__).parent


def environment(**more: str) -> dict[str, str]:
    """The present environment without what systemd or a configuration would put there, and this."""
    ours = re.compile("TTDP_|WATCHDOG_|NOTIFY_|RUNTIME_DIR|JOURNAL_")
    return {key: value for key, value in os.environ.items() if not ours.match(key)} | more


class Service:
    """The daemon under a service manager that hears what it notifies of.

    It looks at `node` and serves in `directory`; a file `config.toml` beside that directory is its configuration.
    """

    def __init__(self, node: SimulatedNode, directory: Path, *words: str, address: str = "", **environ: str) -> None:
        self.directory = directory
        self.heard: list[str] = []
        self.config = directory.with_name("config.toml")
        if not self.config.exists():
            self.config.write_text(f'device_plugin_dir = "{directory}"\n[health]\ninterval = 0.1\n')
        self.address = address or str(directory.with_name("notify"))
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(self.address.replace("@", "\0"))
        command = [
            sys.executable,
            "-m",
            "tests.world.simulation",
            "run",
            f"--config-file={self.config}",
            *node.flags,
            *words,
        ]
        # The shell becomes the daemon, so that $$ can name it beforehand, as systemd does.
        shell = 'test -z "$OURS" || export WATCHDOG_PID=$$; exec "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *command],
            env=environment(**{"NOTIFY_SOCKET": self.address} | environ),
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def wait(self, wanted: str | Callable[[str], object], seconds: float = 10) -> str:
        """The next notification that is, or fulfils, this."""
        deadline = time.monotonic() + seconds
        while True:
            self.manager.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                message = self.manager.recv(65536).decode()
            except TimeoutError:
                raise AssertionError(f"not {wanted} but {self.heard}") from None
            self.heard.append(message)
            if message == wanted if isinstance(wanted, str) else wanted(message):
                return message

    def status(self, *words: str) -> str:
        """The next status that holds all of these words."""
        message = self.wait(lambda message: message.startswith("STATUS=") and all(word in message for word in words))
        return message.removeprefix("STATUS=")

    def end(self, number: signal.Signals | None = signal.SIGTERM) -> tuple[int, list[str], float]:
        """Stop it: exit status, the lines that it has logged, and the seconds that it took."""
        began = time.monotonic()
        if number is not None:
            self.process.send_signal(number)
        _, err = self.process.communicate(timeout=15)
        seconds = time.monotonic() - began
        self.manager.setblocking(False)
        while True:
            try:
                self.heard.append(self.manager.recv(65536).decode())
            except BlockingIOError:
                return self.process.returncode, err.splitlines(), seconds

    def sockets(self) -> list[str]:
        """The names of the sockets in the device plugin directory, the kubelet's apart."""
        return [path.name for path in self.directory.iterdir() if path.is_socket() and path.name != "kubelet.sock"]

    def serves(self, resource: str, seconds: float = 10) -> None:
        """Returns when there is a socket for this resource, for where no notification says so."""
        deadline = time.monotonic() + seconds
        while not any(name.startswith(f"tt-{resource}.") for name in self.sockets()):
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.005)


Launch = Callable[..., Service]


@pytest.fixture
def launch(node: SimulatedNode, directory: Path) -> Iterator[Launch]:
    """Starts the service on the node, with an empty device plugin directory; it is killed at the end."""
    directory.mkdir()
    services: list[Service] = []

    def start(*words: str, **more: str) -> Service:
        services.append(Service(node, directory, *words, **more))
        return services[-1]

    yield start
    for service in services:
        service.process.kill()
        service.process.communicate()
        service.manager.close()


# -- ready and status --------------------------------------------------------------------------------------------------


def test_ready_without_a_kubelet_once_it_has_scanned_and_serves(node: SimulatedNode, launch: Launch) -> None:
    """At READY=1 the sockets of both resources are there, and the status says what is, and what is waited for."""
    node.add("n300")
    node.add("p300c")
    service = launch()
    service.wait("READY=1")
    assert len(service.sockets()) == 2
    status = next(m for m in reversed(service.heard) if m.startswith("STATUS="))
    assert status.startswith("STATUS=1 × tenstorrent.com/n300, 1 healthy; 2 × tenstorrent.com/p300, 2 healthy; ")
    assert "waiting for kubelet" in status
    assert service.heard.count("READY=1") == 1


def test_ready_without_the_directory_of_the_kubelet(node: SimulatedNode, launch: Launch, directory: Path) -> None:
    """A machine that joins the cluster later is ready for that."""
    node.add("n150")
    directory.rmdir()
    service = launch()
    service.wait("READY=1")
    assert any(f"waiting for {directory}" in message for message in service.heard)


def test_ready_without_a_device_on_the_machine(node: SimulatedNode, launch: Launch) -> None:
    """It waits for one, and says so."""
    node.unload_driver()
    service = launch()
    service.wait("READY=1")
    assert "STATUS=no Tenstorrent device on this node; waiting for one" in service.heard


def test_ready_although_a_read_blocks(node: SimulatedNode, launch: Launch, ticking: None) -> None:
    """A chip whose telemetry does not return holds up neither the start nor the end."""
    node.add("n150")[0].block()
    node.add("n150")
    service = launch()
    service.wait("READY=1", 5)
    service.status("2 × tenstorrent.com/n150, 1 healthy (0000:01:00.0: telemetry read does not return")
    status, _, seconds = service.end()
    assert status == 0 and seconds < 1


async def test_the_status_is_what_an_operator_wants_to_read(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, ticking: None
) -> None:
    """How many of what, how many of them healthy and why not all, and that the kubelet knows of them."""
    for _ in range(2):
        node.add("n300")
    service = launch()
    await asyncio.to_thread(service.wait, "STATUS=2 × tenstorrent.com/n300, 2 healthy; registered with kubelet")
    node.chips[1].freeze()
    said = await asyncio.to_thread(service.status, "1 healthy")
    assert re.fullmatch(
        r"2 × tenstorrent.com/n300, 1 healthy \(0000:02:00.0: heartbeat stalled .*\); registered with kubelet", said
    )
    node.chips[1].thaw()
    await asyncio.to_thread(service.status, "2 healthy")
    await asyncio.to_thread(service.end)


# -- watchdog ----------------------------------------------------------------------------------------------------------


def test_a_sign_of_life_comes_at_half_of_the_watchdogs_time(node: SimulatedNode, launch: Launch) -> None:
    """Each in time for the watchdog, and no more of them than are due, although the polls are an hour apart."""
    node.add("n150")
    limit = 0.4
    service = launch(WATCHDOG_USEC=str(int(limit * 1e6)), OURS="yes")
    service.config.write_text(f'device_plugin_dir = "{service.directory}"\n[health]\ninterval = 3600\n')
    service.wait("READY=1")
    service.process.send_signal(signal.SIGHUP)
    service.wait("READY=1")
    service.wait("WATCHDOG=1")  # that of the reload
    times = [time.monotonic() for _ in range(6) if service.wait("WATCHDOG=1")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) < limit
    assert sum(gaps) / len(gaps) > 0.8 * limit / 2


@pytest.mark.parametrize(
    "environ",
    [{"WATCHDOG_PID": "1", "WATCHDOG_USEC": "20000"}, {}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "-20000"},
     {"WATCHDOG_USEC": "soon"}],
    ids=["another process", "none", "zero", "negative", "garbage"],
)  # fmt: skip
def test_no_sign_of_life_for_a_watchdog_that_is_not_ours(
    node: SimulatedNode, launch: Launch, ticking: None, environ: dict[str, str]
) -> None:
    """Several polls on, there was none; with a watchdog of its own there would have been one at every poll."""
    (chip,) = node.add("n150")
    service = launch(**environ)
    service.wait("READY=1")
    chip.freeze()
    service.status("heartbeat stalled")
    service.end()
    assert "STOPPING=1" in service.heard and "WATCHDOG=1" not in service.heard


# -- reload ------------------------------------------------------------------------------------------------------------


def test_a_reload_is_announced_done_and_over(node: SimulatedNode, launch: Launch) -> None:
    """RELOADING=1 with the moment on the monotonic clock, then the new settings, then READY=1."""
    node.add("p150a")
    service = launch()
    service.wait("READY=1")
    service.config.write_text(service.config.read_text().replace("[health]", 'resource_naming = "card"\n[health]'))
    before = time.monotonic_ns() // 1000
    service.process.send_signal(signal.SIGHUP)
    reloading = service.wait(lambda message: message.startswith("RELOADING=1"))
    service.wait("READY=1")
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading)
    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    status = next(message for message in reversed(service.heard) if message.startswith("STATUS="))
    assert "1 × tenstorrent.com/p150a" in status


def test_a_bad_file_is_refused_at_a_reload_and_the_old_settings_stay(node: SimulatedNode, launch: Launch) -> None:
    """One line names the file and the key; the service goes on as before, and its status says so until it is mended."""
    node.add("p150a")
    service = launch()
    service.wait("READY=1")
    good = service.config.read_text()
    service.config.write_text('resource_naming = "size"\nlog_level = "debug"\n')
    service.process.send_signal(signal.SIGHUP)
    service.wait(lambda message: message.startswith("RELOADING=1"))
    service.status("1 × tenstorrent.com/p150", "the configuration on disk is refused", "resource_naming: 'size'")
    service.wait("READY=1")
    (chip,) = node.chips
    chip.vanish()
    service.status("1 × tenstorrent.com/p150, 0 healthy", "refused")
    service.config.write_text(good)
    service.process.send_signal(signal.SIGHUP)
    assert "refused" not in service.status("1 × tenstorrent.com/p150, 0 healthy")
    status, lines, _ = service.end()
    (line,) = [line for line in lines if str(service.config) in line]
    assert "resource_naming" in line and "'size'" in line and "board, card or arch" in line
    assert status == 0 and not any(" DEBUG " in line for line in lines)


def test_a_reload_leaves_the_directory_until_a_restart(node: SimulatedNode, launch: Launch, short_tmp: Path) -> None:
    """What a running daemon cannot take over is said; the sockets stay where they are."""
    node.add("n150")
    service = launch()
    service.wait("READY=1")
    (short_tmp / "elsewhere").mkdir()
    service.config.write_text(f'device_plugin_dir = "{short_tmp}/elsewhere"\nresource_naming = "arch"\n')
    service.process.send_signal(signal.SIGHUP)
    service.wait("READY=1")
    service.serves("wormhole")
    assert not list((short_tmp / "elsewhere").iterdir())
    _, lines, _ = service.end()
    assert [line for line in lines if "device_plugin_dir" in line and "restart" in line]


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_within_a_second_and_takes_its_sockets_along(
    node: SimulatedNode, launch: Launch, kubelet: Kubelet, ticking: None, number: signal.Signals
) -> None:
    """STOPPING=1, status 0, and nothing left in the kubelet's directory, with a kubelet that watches."""
    node.add("n150")
    node.add("p150a")
    service = launch()
    await kubelet.registered("tenstorrent.com/n150")
    await kubelet.registered("tenstorrent.com/p150")
    assert len(service.sockets()) == 2
    status, lines, seconds = await asyncio.to_thread(service.end, number)
    assert status == 0 and seconds < 1
    assert service.sockets() == []
    assert "STOPPING=1" in service.heard
    assert not [line for line in lines if "Traceback" in line or " ERROR " in line]


def test_an_abstract_address_is_heard_on(node: SimulatedNode, launch: Launch) -> None:
    """NOTIFY_SOCKET may begin with @: then it has no file."""
    service = launch(address=f"@tt-test-{os.getpid()}")
    service.wait("READY=1")
    assert service.end()[0] == 0


def test_a_manager_that_does_not_listen_holds_up_nothing(node: SimulatedNode, launch: Launch) -> None:
    """With its socket full of what nobody reads, the daemon serves and ends as ever."""
    node.add("n150")
    service = launch(WATCHDOG_USEC="2000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        with pytest.raises(BlockingIOError):
            for _ in range(100_000):
                probe.sendto(b"X=1", service.address)
    service.serves("n150")
    status, _, seconds = service.end()
    assert status == 0 and seconds < 1


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_without_a_manager_it_runs_all_the_same(node: SimulatedNode, launch: Launch, address: str) -> None:
    """Started by hand, or with a socket that is gone."""
    node.add("n150")
    service = launch(NOTIFY_SOCKET=address)
    service.serves("n150")
    assert service.end()[0] == 0 and service.sockets() == []


@pytest.mark.parametrize("driver", [True, False])
def test_nothing_to_serve_is_an_error_if_that_is_wanted(node: SimulatedNode, launch: Launch, driver: bool) -> None:
    """With --fail-on-init-error: status 1 and one line that tells a missing driver from a missing device."""
    if not driver:
        node.unload_driver()
    service = launch("--fail-on-init-error")
    status, lines, _ = service.end(None)
    (line,) = lines
    assert ("device" in line.split("ERROR")[1]) if driver else ("no Tenstorrent driver" in line)
    assert status == 1 and "READY=1" not in service.heard


def test_with_a_device_there_is_no_init_error(node: SimulatedNode, launch: Launch) -> None:
    """Firmware that is still silent is a device all the same."""
    node.add("n150", firmware=False)
    service = launch("--fail-on-init-error")
    service.wait("READY=1")


def test_a_bad_configuration_is_status_78_and_no_readiness(node: SimulatedNode, launch: Launch) -> None:
    """systemd does not restart on it, and the line in the journal says what to mend."""
    service = launch(TTDP_VISIBLE_DEVICES="all")
    status, lines, _ = service.end(None)
    (line,) = lines
    assert "TTDP_VISIBLE_DEVICES: 'all'" in line and "bdf, index or none" in line
    assert status == 78 and service.heard == []


def test_the_journal_gets_lines_with_priorities(node: SimulatedNode, short_tmp: Path) -> None:
    """As under systemd: stderr is the stream that JOURNAL_STREAM names, and a daemon's start and end are in order."""
    node.add("n150")[0].write("device", b"0xfaca\n")
    journal = short_tmp / "journal"
    with journal.open("w") as file:
        status = os.fstat(file.fileno())
        ended = subprocess.run(
            [sys.executable, "-m", "tests.world.simulation", "--fail-on-init-error", *node.flags],
            env=environment(JOURNAL_STREAM=f"{status.st_dev}:{status.st_ino}"), stderr=file, cwd=REPOSITORY, timeout=20,
        )  # fmt: skip
    lines = journal.read_text().splitlines()
    assert [line[:3] for line in lines] == ["<4>", "<3>"] and ended.returncode == 1
