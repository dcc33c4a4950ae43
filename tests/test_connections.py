"""Connections: metrics for Prometheus on a socket of systemd's, and the view for commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import stat
import time
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, no_descriptors
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, outlets, until

N150 = "tenstorrent.com/n150"
GET = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"
OK, NOT_FOUND = "HTTP/1.1 200 OK", "HTTP/1.1 404 Not Found"


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The socket that systemd passes to daemons, of which the first one closes it."""
    found = socket.create_server(("127.0.0.1", 0))
    passed = {"metrics": [found]}
    monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda _, name: passed.get(name, []))
    return found


async def answer(listening: socket.socket, request: bytes = GET) -> tuple[str, str]:
    """Return the status line and the body."""
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(request)
    text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    length = re.search(r"Content-Length: (\d+)", head)
    assert length is None or int(length[1]) == len(body.encode())
    return head.split("\r\n")[0], body


async def scrape(listening: socket.socket) -> dict[str, float]:
    """Return the value of each series."""
    lines = [line.rsplit(" ", 1) for line in (await answer(listening))[1].splitlines()]
    return {series: float(value) for series, value in lines if not series.startswith("#")}


async def test_what_the_daemon_does_is_counted_from_zero(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, listening: socket.socket
) -> None:
    """Registrations, and allocations by result; the file has the same as the socket."""
    _, second = node.add("n150") + node.add("n150")
    await kubelet.stop()
    daemon = await start(interval=3600)
    await daemon.ready()
    resource = f'resource="{N150}"'
    counters = [
        f"tt_kubelet_registered{{{resource}}}",
        f"tt_kubelet_registrations_total{{{resource}}}",
        f'tt_allocations_total{{{resource},result="granted"}}',
        f'tt_allocations_total{{{resource},result="refused"}}',
    ]
    found = await scrape(listening)
    assert [found[counter] for counter in counters] == [0, 0, 0, 0]
    assert abs(found["tt_plugin_start_time_seconds"] - time.time()) < PATIENCE

    await kubelet.start()
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    node.on_uevent = None
    second.device_node.unlink()
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})

    found = await scrape(listening)
    assert [found[counter] for counter in counters] == [1, 1, 1, 1]


async def test_without_a_look_at_the_node_the_file_grows_old_and_requests_get_503(
    node: SimulatedNode, start: StartDaemon, directory: Path, listening: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Figures are never passed off as newer than they are."""
    file = Path(outlets(directory.parent)["metrics_file"])
    file.parent.mkdir()
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.01)
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.01)
    node.add("n150")
    daemon = await start(interval=0.02)
    await until(file.exists)

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", no_descriptors)
        await until(lambda: daemon.host.unreadable)
        written = file.stat().st_mtime_ns
        unavailable = "HTTP/1.1 503 Service Unavailable"
        assert await answer(listening) == (unavailable, "the node's state cannot be read\n")
        assert file.stat().st_mtime_ns == written

    await until(lambda: file.stat().st_mtime_ns > written)
    assert (await answer(listening))[0] == OK


async def test_each_connection_by_itself_is_answered_or_closed(
    node: SimulatedNode, start: StartDaemon, listening: socket.socket,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Other requests get 404; one that is too long or has no end gets nothing, nor a line."""
    monkeypatch.setattr(ttdp, "CONNECTION_TIMEOUT", 1.0)
    daemon = await start(interval=3600)
    await daemon.ready()
    caplog.clear()

    with socket.create_connection(listening.getsockname()):  # it says nothing
        assert (await answer(listening, b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"))[0] == OK
        for request in (
            b"POST /metrics HTTP/1.1\r\n\r\n",
            b"GET /metricsx \r\n\r\n",
            b"\xff\r\n\r\n",
        ):
            assert await answer(listening, request) == (NOT_FOUND, "use GET /metrics\n")
        assert await answer(listening, b"GET /metrics HTTP/1.1\r\nX: ") == ("", "")
        with contextlib.suppress(ConnectionResetError):
            assert await answer(listening, b"x" * 100_000) == ("", "")
    assert caplog.messages == []


async def test_a_client_of_the_view_that_stops_reading_delays_nobody(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its view is larger than a socket's buffer; it is root's, and gone with the daemon."""
    monkeypatch.setattr(ttdp, "PROGRAM", "x" * 1_000_000)
    node.add("n150")
    daemon = await start(interval=3600, runtime_dir=str(short_tmp))
    await kubelet.registered(N150)
    path = short_tmp / ttdp.STATUS_SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        await asyncio.to_thread(client.recv, 1)
        await kubelet.admit("pod", "main", {N150: 1})
        reader, writer = await asyncio.open_unix_connection(str(path))
        view = json.loads(await asyncio.wait_for(reader.read(), PATIENCE))
        writer.close()

    assert view["chips"][0]["pods"]
    await daemon.stop()
    assert not path.exists()
