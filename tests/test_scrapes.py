"""Metrics by HTTP: what a scrape gets, and that no client costs more than its own connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
GET = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"
OK = "HTTP/1.1 200 OK"
Running = tuple[int, RunningDaemon]


@pytest.fixture
async def running(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Running]:
    """The port of a daemon to which systemd has handed its socket, and the daemon."""
    node.add("n150")
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    handed_in = {"metrics": [listening]}
    monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda _, name: handed_in.get(name, []))
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    await until(lambda: daemon.notified("READY=1"))
    yield listening.getsockname()[1], daemon


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is dropped for being slow."""
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", 3600.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has a fifth of a second."""
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", 0.2)


async def answer(port: int, request: bytes) -> tuple[str, str]:
    """Return the status line and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


def served() -> list[asyncio.Task[object]]:
    """Return what serves the connections that there are."""
    tasks = asyncio.all_tasks()
    return [task for task in tasks if "MetricsServer._connected" in repr(task.get_coro())]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


async def test_a_scrape_gets_the_metrics(running: Running) -> None:
    """By either version of HTTP and with either end of line."""
    port, _ = running
    status, body = await answer(port, GET)
    assert status == OK and 'tt_device_healthy{device="0000:01:00.0"} 1\n' in body
    assert (await answer(port, b"GET /metrics?x=1 HTTP/1.0\n\n"))[0] == OK


async def test_other_questions_get_a_word(running: Running) -> None:
    """A HEAD gets no body, another path or method a status."""
    port, _ = running
    assert await answer(port, b"HEAD /metrics HTTP/1.1\r\n\r\n") == (OK, "")
    assert (await answer(port, b"GET / HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
    status, _ = await answer(port, b"POST /metrics HTTP/1.1\r\n\r\n")
    assert status == "HTTP/1.1 405 Method Not Allowed"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics HTTP/1.1\r\nX: "],
)
async def test_a_request_of_nonsense_costs_its_own_connection(
    running: Running,
    nonsense: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Answered with an error or dropped after its time; no line in the log."""
    port, _ = running
    with contextlib.suppress(ConnectionResetError):
        status, _ = await answer(port, nonsense)
        assert not status or status.split()[1] in ("404", "405")
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", PATIENCE)
    assert (await answer(port, GET))[0] == OK
    assert complaints(caplog) == []


@pytest.mark.usefixtures("patient")
async def test_a_header_without_end_is_dropped(running: Running) -> None:
    """A hundred kilobytes of it are not kept."""
    port, _ = running
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            writer.write(b"x" * 1024)
            await writer.drain()
            await asyncio.sleep(0)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()


# -- many clients ----------------------------------------------------------------------------------


@pytest.fixture
def renderings(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the text was made."""
    times: list[float] = []
    genuine = ttdp.exposition

    def counted(families: object) -> str:
        times.append(time.monotonic())
        return genuine(families)  # type: ignore[arg-type]

    monkeypatch.setattr(ttdp, "exposition", counted)
    return times


async def test_one_rendering_is_made_for_all_who_ask_at_once(
    running: Running, renderings: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those who ask while the figures are being read get what is made of them."""
    port, daemon = running
    read, asked = asyncio.Event(), 0
    genuine = ttdp.MetricsServer.text

    async def text(self: ttdp.MetricsServer) -> str:
        nonlocal asked
        asked += 1
        return await genuine(self)

    monkeypatch.setattr(ttdp.MetricsServer, "text", text)
    monkeypatch.setattr(daemon.daemon.monitor, "measure", read.wait)
    scrapes = [asyncio.create_task(answer(port, GET)) for _ in range(30)]
    await until(lambda: asked == 30)
    read.set()
    assert {status for status, _ in await asyncio.gather(*scrapes)} == {OK}
    assert len(renderings) == 1


@pytest.mark.usefixtures("patient")
async def test_idle_connections_keep_nobody_out(running: Running) -> None:
    """However many say nothing, and none is dropped for being slow: a scrape is answered."""
    port, _ = running
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
    for _ in range(3):
        assert (await answer(port, GET))[0] == OK
    for _, writer in idle:
        writer.close()


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    """A thousand, for clients that are in this process as the server is; fewer where there are."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    most = max(soft, hard if 0 < hard < 4096 else 4096)
    setrlimit(RLIMIT_NOFILE, (most, hard))
    yield min(1000, most // 3)
    setrlimit(RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("patient")
async def test_a_thousand_connections_hold_up_neither_the_kubelet_nor_a_scrape(
    running: Running, kubelet: Kubelet, many_descriptors: int
) -> None:
    """No more than a few are kept at a time."""
    port, _ = running
    with contextlib.ExitStack() as stack:
        for _ in range(many_descriptors):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        await kubelet.admit("pod", "main", {N150: 1})
        assert (await answer(port, GET))[0] == OK


# -- the end of a connection -----------------------------------------------------------------------


async def test_connections_that_are_open_at_the_end_are_not_worth_a_word(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the loop cancels what still waits."""
    port, _ = running
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for task in await until(served):
        task.cancel()
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    writer.close()
    assert complaints(caplog) == []


@pytest.mark.usefixtures("impatient")
async def test_a_client_that_does_not_read_is_dropped(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be sent is not kept for ever."""
    port, _ = running
    monkeypatch.setattr(ttdp, "exposition", lambda families: "x" * 50_000_000)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(GET)
        await until(served)
        await until(lambda: not served())
        assert len(await asyncio.to_thread(read_all, client)) < 50_000_000


def read_all(client: socket.socket) -> bytes:
    content = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(1 << 20):
            content += part
    return content
