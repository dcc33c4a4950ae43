"""The status socket and the metrics socket: who is answered, and that nobody delays others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, no_descriptors
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon

AN_HOUR = 3600.0
SCRAPE = b"GET /metrics HTTP/1.1\r\n\r\n"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Give the metrics socket, which systemd passes to the daemon."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        found.setblocking(False)
        copies = {"metrics": [found.dup()]}
        monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda _, name: copies.get(name, []))
        yield found


@pytest.fixture
async def daemon(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path, listening: socket.socket
) -> RunningDaemon:
    """Return a daemon with a card, and both sockets."""
    node.add("n150")
    found = await start(interval=AN_HOUR, runtime_dir=str(short_tmp))
    await found.ready()
    return found


def status_socket(daemon: RunningDaemon) -> Path:
    return Path(f"{daemon.settings.runtime_dir}/{ttdp.STATUS_SOCKET}")


async def view(daemon: RunningDaemon) -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(status_socket(daemon))
    found: dict[str, object] = json.loads(await reader.read())
    writer.close()
    return found


async def request(listening: socket.socket, text: bytes) -> tuple[list[str], str]:
    """Return the lines of an answer's head, and its text; empty ones if there is none."""
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(text)
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return head.split("\r\n"), body


async def test_each_connection_to_the_status_socket_gets_the_view_of_that_moment(
    node: SimulatedNode, daemon: RunningDaemon
) -> None:
    """One JSON object; only root may ask."""
    before = await view(daemon)
    assert before["program"] == "tt-device-plugin" and before["status"] == daemon.status
    assert stat.S_IMODE(status_socket(daemon).stat().st_mode) == 0o600

    node.add("n150")
    await until(lambda: "2 × " in daemon.status)
    assert (await view(daemon))["status"] == daemon.status

    await daemon.stop()
    assert not status_socket(daemon).exists()


async def test_get_metrics_is_answered_and_any_other_request_gets_404(
    daemon: RunningDaemon, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As HTTP wants it; 503 while the node cannot be read: figures would be old."""
    for path in (b"/metrics", b"/metrics?name=up"):
        head, text = await request(listening, b"GET " + path + b" HTTP/1.1\r\n\r\n")
        assert 'tt_device_healthy{device="0000:01:00.0"} 1' in text
        assert head == [
            "HTTP/1.1 200 OK",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(text.encode())}",
            "Connection: close",
        ]

    for line in (b"GET / HTTP/1.1", b"POST /metrics HTTP/1.1", b"GET /metricsx HTTP/1.1"):
        head, text = await request(listening, line + b"\r\n\r\n")
        assert (head[0], text) == ("HTTP/1.1 404 Not Found", "use GET /metrics\n")

    monkeypatch.setattr(ttdp, "scan", no_descriptors)
    daemon.daemon.reload()
    await until(lambda: "cannot read the node's state" in daemon.status)
    head, text = await request(listening, SCRAPE)
    assert head[0] == "HTTP/1.1 503 Service Unavailable" and "cannot be read" in text


async def test_a_request_that_is_not_complete_costs_only_its_connection(
    daemon: RunningDaemon, listening: socket.socket, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is closed after its time, or when its head is too long; others are answered meanwhile."""
    assert ttdp.CONNECTION_TIMEOUT == 5.0
    monkeypatch.setattr(ttdp, "CONNECTION_TIMEOUT", 1.0)

    async def is_refused(text: bytes) -> bool:
        with contextlib.suppress(ConnectionResetError):
            return await request(listening, text) == ([""], "")
        return True

    reader, half = await asyncio.open_connection(*listening.getsockname())
    half.write(b"GET /metr")
    half.write_eof()  # it will send no more
    texts = (b"", b"GET /metrics HTTP/1.1\r\n", b"x" * 100_000)
    refusals = [asyncio.ensure_future(is_refused(text)) for text in texts]

    assert (await request(listening, SCRAPE))[0][0].endswith("200 OK")
    assert all(await asyncio.gather(*refusals)) and await reader.read() == b""
    half.close()
    assert caplog.messages == []


async def test_without_a_status_socket_the_daemon_works(
    start: StartDaemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line has the reason, and what it means."""
    daemon = await start(interval=AN_HOUR, runtime_dir=str(tmp_path / "missing"))
    await daemon.ready()

    reason = "No such file or directory; list, check and fix cannot reach this daemon"
    line = f"cannot open the status socket {status_socket(daemon)}: {reason}"
    assert caplog.messages.count(line) == 1
