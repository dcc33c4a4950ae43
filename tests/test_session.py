"""Sessions with a kubelet that starts late, restarts, rejects, hangs, dies, or loses a socket."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import gc
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio._server import Server

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import (
    WATCHDOG,
    StartDaemon,
    client,
    kubelet_of,
    no_descriptors,
    plugin_sockets,
    turns,
)
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until, within
from tests.world.reference import another_plugin
from tests.world.simulation import RunningDaemon

N150, P150, P150A = (f"tenstorrent.com/{name}" for name in ("n150", "p150", "p150a"))
REGISTERED = "registered with kubelet"
VERSIONS = [(1, 32), (1, 37)]  # the oldest one, and the first that knows sockets


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    return node


def state(daemon: RunningDaemon, name: str = N150) -> str:
    session = daemon.sessions.get(name)
    return session.registration.text if session else ""


async def offers(kubelet: Kubelet, resource: str, *healthy: str) -> None:
    """Wait until exactly these IDs are healthy."""
    await kubelet.wait_for(lambda: kubelet.healthy(resource) == {*healthy})


@contextlib.asynccontextmanager
async def tool(directory: Path, *, asks_first: bool = False) -> AsyncIterator[None]:
    """A debugging tool with a stream; `asks_first`: for the options, as a kubelet does."""
    async with client(directory) as stub:
        if asks_first:
            await stub.GetDevicePluginOptions(pb.Empty())
        stream = stub.ListAndWatch(pb.Empty())
        assert (await stream.read()).devices
        yield
        stream.cancel()


class Session:
    """A session of n150 with a kubelet, without the daemon: its turns are made by hand."""

    def __init__(self, kubelet: Kubelet) -> None:
        allocator = ttdp.Allocator(ttdp.Host(ttdp.Settings(), lambda: None))
        directory = str(kubelet.directory)
        self.session = ttdp.KubeletSession(N150, allocator, directory, lambda: None)
        self.checkpoint = kubelet.directory / ttdp.CHECKPOINT

    def turn(self, *ids: str, has_others_ids: bool = False) -> None:
        """Make a turn of the loop, with this list, and others' IDs in the checkpoint or not."""
        devices = [pb.Device(ID=each, health="Healthy") for each in ids]
        checkpoint = ttdp.file_stamp(str(self.checkpoint)) if has_others_ids else None
        self.session.update(ttdp.DeviceList(devices=devices), checkpoint, is_disturbed=False)

    @property
    def state(self) -> str:
        return self.session.registration.text

    async def close(self) -> None:
        await self.session.close()


@pytest.fixture
async def session(kubelet: Kubelet) -> AsyncIterator[Session]:
    """A session that has registered one device, and listed it."""
    session = Session(kubelet)
    session.turn("a")
    await offers(kubelet, N150, "a")
    await until(lambda: session.state == REGISTERED)
    yield session
    await session.close()


@pytest.fixture
def slow_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take time to stop, as on a busy machine."""
    stop = Server.stop

    async def slow_stop(self: Server, grace: float | None) -> None:
        await asyncio.sleep(0.05)
        await stop(self, grace)

    monkeypatch.setattr(Server, "stop", slow_stop)


def in_use() -> tuple[int, int, int]:
    """Return the descriptors, threads and tasks of this process, also the kubelet's."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())


# -- when a registration is lost -------------------------------------------------------------------

STAMPS = {"missing": None, "same": (0, 0, 0, 1), "other": (0, 0, 0, 2)}  # beside those at Register
WHY_LOST = {  # by kubelet.sock, own socket, whether another plugin's list counts: the first fits
    "missing * *": None,
    "other * *": "the kubelet has restarted; registering again",
    "same missing *": "the plugin's socket was deleted; registering again",
    "same other *": "the plugin's socket was deleted; registering again",
    "same same yes": "another device plugin has registered this resource; stop that plugin",
    "same same no": None,
}


def test_why_a_registration_is_lost() -> None:
    """By both sockets, and the other plugin's list."""
    at_register = ttdp.Sockets(STAMPS["same"], STAMPS["same"])
    for combination in itertools.product(STAMPS, STAMPS, ("yes", "no")):
        kubelet, own, anothers = combination
        row = next(each for each in WHY_LOST if fnmatch.fnmatch(" ".join(combination), each))

        now = ttdp.Sockets(STAMPS[kubelet], STAMPS[own])
        ended = ttdp.why_lost(at_register, now, is_anothers=anothers == "yes")

        assert (ended[1] if ended else None) == WHY_LOST[row], combination


# -- kubelets that start ---------------------------------------------------------------------------


@pytest.mark.parametrize("has_inotify", [True, False])
async def test_a_kubelet_that_starts_is_registered_with_by_an_event_or_within_a_second(
    node: SimulatedNode, start: StartDaemon, directory: Path, has_inotify: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Polls and pauses are an hour long. One line reports that there is no inotify instance."""
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    monkeypatch.setattr(ttdp, "ROUND", 3600.0)
    if not has_inotify:  # there are 128 for each user, often used up on such nodes
        monkeypatch.setattr(ttdp._libc, "inotify_init1", lambda flags: -1)
    daemon = await start(interval=3600)
    await until(lambda: state(daemon).startswith("waiting for kubelet"))

    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)
        await kubelet.restart()
        await kubelet.registered(N150)
        assert kubelet.violations == []

    lines = [each for each in caplog.messages if "fs.inotify.max_user_*" in each]
    assert len(lines) == (not has_inotify)


@pytest.mark.parametrize("version", VERSIONS)
async def test_thirty_restarts_leave_nothing_behind(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
) -> None:  # fmt: skip
    """Registered after each start without a pause; no thread, task, socket or descriptor more.

    Every other kubelet starts before the end of the former one has been noticed.
    """
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 3600.0)  # nothing is open whose end is to be noticed
    daemon = await start(interval=3600)
    kubelet = kubelet_of(node, directory, version=version)
    before = (0, 0, 0)

    for number in range(30):
        await kubelet.start()
        await kubelet.registered(N150)
        await offers(kubelet, N150, node.chips[0].bdf)

        if number == 1:
            before = in_use()
        if number < 29:
            await kubelet.kill()
            if number % 2:
                await until(lambda: state(daemon) != REGISTERED)

    await until(lambda: all(now <= then for now, then in zip(in_use(), before, strict=True)))
    assert len(plugin_sockets(directory)) == 1 and kubelet.violations == []
    await kubelet.stop()


async def test_a_kubelet_that_dies_before_it_answers_delays_the_next_one_by_nothing(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the device list already; the next kubelet need not notice the end of its stream."""
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 3600.0)
    kubelet = kubelet_of(node, directory)
    register = ttdp.Endpoint.register

    async def without_answer(endpoint: ttdp.Endpoint) -> str:
        monkeypatch.setattr(ttdp.Endpoint, "register", register)
        await register(endpoint)
        await kubelet.registered(N150)
        return "kubelet closed its socket before it answered Register"

    monkeypatch.setattr(ttdp.Endpoint, "register", without_answer)
    await start(interval=3600)
    await kubelet.start()
    await until(lambda: kubelet.find("list") and not plugin_sockets(directory))

    await kubelet.kill()
    await kubelet.start()

    await kubelet.registered(N150)
    await kubelet.stop()


@pytest.mark.parametrize("does", ["replaces its socket", "deletes ours"])
async def test_a_kubelet_that_comes_during_an_attempt_is_registered_with_once(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    """It is another one than the loop has seen; kubelets before 1.37 could lose a second one."""
    monkeypatch.setattr(ttdp._libc, "inotify_init1", lambda flags: -1)  # no event ends the attempt
    connection_error = ttdp.connection_error

    def comes_now(path: str) -> int:
        if does == "replaces its socket":
            os.utime(kubelet.socket)
        else:
            monkeypatch.setattr(ttdp, "connection_error", connection_error)
            for name in plugin_sockets(kubelet.directory):
                (kubelet.directory / name).unlink()
        return connection_error(path)

    monkeypatch.setattr(ttdp, "connection_error", comes_now)

    daemon = await start(interval=0.05, environ=WATCHDOG)
    await kubelet.registered(N150)

    await turns(daemon)
    assert len(kubelet.find("register")) == 1


@pytest.mark.parametrize("moment", ["during Register", "later"])
@pytest.mark.parametrize("asks_first", [False, True])
async def test_the_stream_of_a_debugging_tool_means_nothing(
    start: StartDaemon, kubelet: Kubelet, directory: Path,
    monkeypatch: pytest.MonkeyPatch, moment: str, asks_first: bool,
) -> None:  # fmt: skip
    """One ends, which ends no registration; another is open when the kubelet's ends, which does."""
    may_answer = asyncio.Event()
    register = kubelet.manager.plugins.register

    async def register_later(request: pb.RegisterRequest) -> None:
        await may_answer.wait()
        await register(request)

    monkeypatch.setattr(kubelet.manager.plugins, "register", register_later)
    daemon = await start(interval=0.05, environ=WATCHDOG)
    await kubelet.wait_for(lambda: kubelet.find("register"))
    if moment == "later":
        may_answer.set()
        await kubelet.registered(N150)

    async with tool(directory, asks_first=asks_first):
        async with tool(directory, asks_first=asks_first):
            may_answer.set()
            await kubelet.registered(N150)
        await turns(daemon)
        assert state(daemon) == REGISTERED and len(kubelet.find("registered")) == 1

        await kubelet.drop_streams()
        await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)


# -- sockets that are deleted ----------------------------------------------------------------------


@pytest.mark.usefixtures("slow_stops")
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_deleted_socket_is_bound_and_registered_again(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
) -> None:  # fmt: skip
    """The old stream ends first, else kubelets would forget the resource."""
    monkeypatch.setattr(ttdp, "LAST_GRACE", 3600.0)  # it is the daemon's end that leaves calls time
    daemon = await start(interval=3600)

    async with kubelet_of(node, directory, version=version) as kubelet:
        for number in range(1, 4):
            await until(lambda: state(daemon) == REGISTERED and kubelet.healthy(N150))
            assert len(kubelet.find("registered")) == number

            (name,) = plugin_sockets(directory)
            (directory / name).unlink()
            await kubelet.wait_for(lambda: len(kubelet.find("registered")) > number)  # noqa: B023

        await kubelet.wait_for(lambda: kubelet.healthy(N150))
        await kubelet.admit("pod", "main", {N150: 1})
        assert kubelet.violations == []


async def test_a_kubelet_has_time_to_notice_the_end_of_its_stream(
    start: StartDaemon, kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next Register; also if a debugging tool has called what the kubelet calls."""
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 1.0)
    await start(interval=3600)
    await kubelet.registered(N150)
    async with tool(directory, asks_first=True):
        pass

    (socket_name,) = plugin_sockets(directory)
    (directory / socket_name).unlink()
    await kubelet.wait_for(lambda: len(kubelet.find("register")) == 2)

    (ended,) = kubelet.find("ended")
    assert kubelet.find("register")[-1].at - ended.at > 0.5


async def test_a_deleted_kubelet_socket_ends_nothing(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """The open stream works on, for changes and for pods; the next kubelet is registered with.

    The plugin's own socket is deleted, too: there is no kubelet to register with.
    """
    daemon = await start(interval=0.05, environ=WATCHDOG)
    await kubelet.registered(N150)

    for path in kubelet.directory.glob("*.sock"):
        path.unlink()
    await turns(daemon)

    (chip, *_) = node.chips
    chip.die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150))
    chip.revive()
    await offers(kubelet, N150, chip.bdf)
    await kubelet.admit("pod", "main", {N150: 1})
    assert state(daemon) == REGISTERED and len(kubelet.find("registered")) == 1

    await kubelet.restart()
    await kubelet.registered(N150)


# -- kubelets that reject, hang or refuse ----------------------------------------------------------


async def test_a_kubelet_that_rejects_is_tried_again_with_back_off(
    start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """The pauses double from 0.1 s; one line has the kubelet's reason."""
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "the plugin is not welcome", times=4)

    await start(interval=3600)
    await kubelet.registered(N150)

    attempts = [event.at for event in kubelet.find("register")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert all(pause >= least for pause, least in zip(pauses, [0.1, 0.2, 0.4, 0.8], strict=True))
    assert sum("rejected Register: the plugin is not welcome" in m for m in caplog.messages) == 1


async def test_pauses_are_short_again_after_a_registration_that_has_lasted(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve doublings would make the last pause three minutes long."""
    monkeypatch.setattr(ttdp, "BACKOFF", (0.05, 3600.0))
    monkeypatch.setattr(ttdp, "LASTING", 0.0)
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, times=12)

    await start(interval=3600)

    await kubelet.registered(N150)


async def test_an_event_in_the_directory_ends_the_pause(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Another plugin's socket does; the daemon's own sockets and the checkpoint do not."""
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    node.add("p150a")
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "no", times=2)
    daemon = await start(interval=0.05, environ=WATCHDOG)
    for name in (N150, P150):
        await until(lambda: "rejected Register" in state(daemon, name))  # noqa: B023

    await kubelet.manager.write_checkpoint()
    await turns(daemon)
    assert len(kubelet.find("register")) == 2

    (directory / "another-plugin.sock").touch()
    await kubelet.registered(N150)
    await kubelet.registered(P150)


async def test_a_kubelet_that_hangs_blocks_nothing_and_is_given_up_when_the_next_one_starts(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """While one Register is not answered, the other resource is served.

    That Register ends at once, not after its time, when there is another kubelet.sock.
    """
    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", 3600.0)
    caplog.set_level("INFO")
    daemon = await start(interval=3600)
    await kubelet.registered(N150)

    kubelet.hang(3600)
    node.add("p150a")
    await until(lambda: len(kubelet.find("register")) == 2)
    await kubelet.admit("pod", "main", {N150: 1})
    assert state(daemon) == REGISTERED

    async with kubelet_of(node, directory) as other:
        await other.registered(N150)
        await other.registered(P150)
    assert f"{P150}: the kubelet has restarted; registering again" in caplog.messages


async def test_a_kubelet_that_does_not_answer_is_tried_again(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its socket refuses connections, closes them, or accepts them only; one line has which."""
    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", 0.3)
    monkeypatch.setattr(ttdp, "BACKOFF", (0.01, 0.01))
    directory.mkdir()
    path = directory / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    daemon = await start(interval=3600)
    await until(lambda: state(daemon) == "waiting for kubelet (its socket refuses connections)")

    path.unlink()
    closed = 0

    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        closed += 1
        await reader.read(closed % 3)  # before the request, or in its midst
        writer.close()

    async with await asyncio.start_unix_server(close, path):
        await until(lambda: closed > 50)
        reason = "kubelet closed its socket before it answered Register"
        assert state(daemon) == reason and caplog.messages.count(f"{N150}: {reason}") == 1

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        await until(lambda: state(daemon) == "kubelet did not answer Register within 0.3 s")

    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", PATIENCE)
    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)


async def test_a_kubelet_that_opens_no_stream_is_tried_again(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts Register, and does nothing more."""

    async def ignore(request: pb.RegisterRequest) -> None:
        pass

    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(kubelet.manager.plugins, "register", ignore)
        daemon = await start(interval=3600)
        await until(lambda: state(daemon).startswith("kubelet accepted Register but opened no"))

    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", PATIENCE)
    await kubelet.registered(N150)


async def test_a_kubelet_that_is_about_to_listen_is_not_taken_for_a_dead_one(
    start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket exists a moment before it accepts connections."""
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    connection_error = ttdp.connection_error
    listens = asyncio.Event()
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.setblocking(False)
        listening.bind(str(directory / "kubelet.sock"))

        def listens_afterwards(path: str) -> int:
            number = connection_error(path)
            listening.listen()
            listens.set()
            return number

        monkeypatch.setattr(ttdp, "connection_error", listens_afterwards)
        await start(interval=3600)
        await listens.wait()

        for _ in ("is anyone there?", "Register"):
            connection, _ = await within(
                PATIENCE, "no connection", asyncio.get_running_loop().sock_accept(listening)
            )
            connection.close()


@pytest.mark.parametrize("moment", ["while it begins", "while it ends"])
async def test_a_session_can_be_closed_at_any_moment(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """SIGTERM while a socket is bound, registered or closed leaves no socket and no traceback."""
    tasks = len(asyncio.all_tasks())

    for steps in range(40):
        session = Session(kubelet)
        session.turn("a")
        if moment == "while it ends":
            await kubelet.registered(N150)
            await kubelet.drop_streams()

        for _ in range(steps):
            await asyncio.sleep(0)
        await session.close()

        assert plugin_sockets(kubelet.directory) == []
        await until(lambda: not kubelet.manager.plugins.is_listed(N150))

    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    errors = [r.message for r in caplog.records if r.levelname == "ERROR"]
    assert not [m for m in errors if "Registration/Register" not in m]  # the kubelet's own


async def test_a_session_can_be_closed_though_its_server_cannot_be_stopped(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is logged; the daemon does not wait for the session until systemd kills it."""
    stop = Server.stop

    async def fail(self: Server, grace: float | None) -> None:
        await stop(self, grace)
        raise RuntimeError("no threads")

    monkeypatch.setattr(Server, "stop", fail)

    closing = asyncio.create_task(session.close())
    await asyncio.wait({closing}, timeout=PATIENCE)

    assert closing.done()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


@contextlib.contextmanager
def stopped_client(directory: Path) -> Iterator[None]:
    """A client that calls ListAndWatch and is stopped then: not even its kernel buffer is read."""
    head = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/v1beta1.DevicePlugin/ListAndWatch",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    header = b""
    for name, value in head.items():  # literal fields of HPACK (RFC 7541, 6.2.2)
        header += b"\0" + bytes([len(name)]) + name.encode()
        header += bytes([len(value)]) + value.encode()
    most = 2**31 - 1
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(directory / plugin_sockets(directory)[0]))
        client.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + frame(4, 0, 0, struct.pack(">HI", 4, most))  # SETTINGS: the window of streams
            + frame(8, 0, 0, struct.pack(">I", most - 65535))  # WINDOW_UPDATE: of the connection
            + frame(1, 4, 1, header)  # HEADERS, all of them
            + frame(0, 1, 1, bytes(5))  # DATA, the last: an empty message
        )
        yield


async def list_much(kubelet: Kubelet, session: Session) -> None:
    """Send lists to all clients, more than a connection can hold."""
    for number in range(4):
        ids = [f"{number}-{each}".rjust(60, "x") for each in range(3200)]
        session.turn(*ids)
        await until(lambda: kubelet.healthy(N150) == {*ids})  # noqa: B023


async def test_a_client_that_is_stopped_delays_neither_the_next_registration_nor_the_end(
    kubelet: Kubelet, session: Session
) -> None:
    """A debugging tool, or the kubelet itself."""
    with stopped_client(kubelet.directory), contextlib.ExitStack() as second:
        await list_much(kubelet, session)
        (name,) = plugin_sockets(kubelet.directory)
        (kubelet.directory / name).unlink()
        session.turn("a")
        await until(lambda: len(kubelet.find("registered")) == 2)

        second.enter_context(stopped_client(kubelet.directory))
        await list_much(kubelet, session)
        closing = asyncio.create_task(session.close())
        await asyncio.wait({closing}, timeout=PATIENCE)

        assert closing.done() and plugin_sockets(kubelet.directory) == []


async def test_the_daemons_end_leaves_calls_a_moment_and_waits_for_nothing_else(
    kubelet: Kubelet, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other session of the resource follows, before which the kubelet must notice something."""
    monkeypatch.setattr(ttdp, "LAST_GRACE", PATIENCE)
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 3600.0)
    is_called, may_answer = asyncio.Event(), asyncio.Event()

    async def allocate(*_: object) -> list[ttdp.Edits]:
        is_called.set()
        await may_answer.wait()
        return []

    monkeypatch.setattr(ttdp.Allocator, "allocate", allocate)
    async with client(kubelet.directory) as plugin:
        call = plugin.Allocate(pb.AllocateRequest())
        await is_called.wait()

        closing = asyncio.create_task(session.session.close(is_exiting=True))
        await until(lambda: not plugin_sockets(kubelet.directory))
        may_answer.set()
        assert await call == pb.AllocateResponse()

    await kubelet.drop_streams()
    await asyncio.wait_for(closing, PATIENCE)


async def test_a_session_without_descriptors_has_a_reason_and_no_traceback(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """It is registered as soon as there are descriptors again, whatever its pause."""
    monkeypatch.setattr(ttdp, "BACKOFF", (3600.0, 3600.0))
    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "connection_error", no_descriptors)
        daemon = await start()
        await until(lambda: "Too many open files" in state(daemon))

        patch.setattr(ttdp, "scan", no_descriptors)
        await until(lambda: "cannot read the node's state" in caplog.text)

    await kubelet.registered(N150)
    assert "internal error" not in caplog.text


async def test_a_server_that_does_not_start_is_logged_and_tried_again(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With its traceback; the resource is registered soon after."""

    async def fail(self: Server) -> None:
        raise RuntimeError("no threads")

    with monkeypatch.context() as patch:
        patch.setattr(Server, "start", fail)
        await start(interval=3600)
        await until(lambda: caplog.text.count("the session of") >= 2)

    await kubelet.registered(N150)
    assert "RuntimeError: no threads" in caplog.text


async def test_the_status_follows_registrations_at_once(
    start: StartDaemon, kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other event wakes the loop: the kubelet writes no checkpoint."""
    monkeypatch.setattr(ttdp, "ROUND", 3600.0)
    kubelet.file.path = directory.with_name("elsewhere")
    daemon = await start(interval=3600)
    await daemon.ready()

    await kubelet.kill()
    await until(lambda: any("its socket refuses connections" in note for note in daemon.notes))

    daemon.forget_notes()
    await kubelet.start()
    await until(lambda: any(REGISTERED in note for note in daemon.notes))


# -- sockets' names --------------------------------------------------------------------------------


def test_names_of_sockets_fit_into_an_address_and_are_recognised(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the largest process ID, and after 99,999 registrations.

    The next daemon removes those of one that was killed; any other file stays.
    """
    name = "a.name_of-63-characters".ljust(63, "x")
    monkeypatch.setattr(os, "getpid", lambda: 4194304)
    monkeypatch.setattr(ttdp, "_socket_numbers", itertools.count(99_998))

    names = [ttdp.new_socket_name(f"tenstorrent.com/{name}") for _ in range(3)]

    assert len({*names}) == 3 and all(each.startswith(f"tt-{name[:20]}.") for each in names)
    assert max(map(len, names)) <= 107 - len("/") - ttdp.PLUGIN_DIR_MAX

    directory.mkdir()
    for each in (*names, "other.sock", "tt-notes.txt"):
        (directory / each).touch()
    ttdp.remove_dead_sockets(str(directory))
    assert sorted(os.listdir(directory)) == ["other.sock", "tt-notes.txt"]


# -- resources that end and return -----------------------------------------------------------------


async def test_a_reload_moves_devices_to_another_resource_and_leaves_other_streams_alone(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """By card, p150a is a resource; n150 has the same name, and keeps its stream."""
    node.add("p150a")
    daemon = await start(interval=3600)
    await kubelet.registered(N150)
    await kubelet.registered(P150)

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)

    await kubelet.wait_for(lambda: kubelet.find("ended", P150) and not kubelet.healthy(P150))
    assert len(kubelet.find("registered", N150)) == 1 and not kubelet.find("ended", N150)


@pytest.mark.usefixtures("slow_stops")
@pytest.mark.parametrize("version", VERSIONS)
async def test_a_resource_that_ends_and_returns_at_once_has_one_session_at_a_time(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, int],
) -> None:  # fmt: skip
    """Two SIGHUPs in a row, or in one turn of the loop; also if the kubelet restarts meanwhile."""
    monkeypatch.setattr(ttdp, "ROUND", 3600.0)  # the end of the former session wakes the loop
    (chip,) = node.add("p150a")
    async with kubelet_of(node, directory, version=version) as kubelet:
        daemon = await start(interval=3600)
        for number in range(0, 48, 3):
            await until(lambda: state(daemon, P150) == REGISTERED)
            await offers(kubelet, P150, chip.bdf)

            daemon.reload(resource_naming="card")
            for _ in range(number % 24):
                await asyncio.sleep(0)
            if number >= 24:
                await kubelet.restart()
            daemon.reload(resource_naming="board")

        await until(lambda: state(daemon, P150) == REGISTERED and P150A not in daemon.sessions)
        await offers(kubelet, P150, chip.bdf)

        sockets = [name for name in plugin_sockets(directory) if name.startswith("tt-p150.")]
        assert len(sockets) == 1 and kubelet.violations == []

        order = [e.kind for e in kubelet.events if e.fields.get("resource") == P150]
        order = [kind for kind in order if kind in ("registered", "ended")]
        assert all(one != other for one, other in itertools.pairwise(order)), order


async def test_sessions_that_have_ended_leave_nothing_behind(
    start: StartDaemon, kubelet: Kubelet
) -> None:
    """However many resources there have been."""
    daemon = await start(interval=3600)
    before = 0
    for number in range(12):
        if number == 2:
            before = count_of_tasks()
        domain = f"example-{number}.org"
        daemon.reload(resource_domain=domain)
        await kubelet.registered(f"{domain}/n150")

    await until(lambda: count_of_tasks() <= before)


def count_of_tasks() -> int:
    """Return the number of tasks that are kept, also those that are done."""
    gc.collect()
    return sum(isinstance(each, asyncio.Task) for each in gc.get_objects())


# -- another plugin under our name, and checkpoints that are late ----------------------------------


async def test_another_plugin_with_the_same_name_is_reported_and_registered_over(
    node: SimulatedNode, start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Our stream stays open; the checkpoint has IDs that the daemon gives in no configuration.

    The other one's new sockets do not make the pauses short again.
    """
    ours = {"0000:01:00.0", node.add("n150")[0].bdf}
    daemon = await start(interval=0.05)

    async with kubelet_of(node, directory) as kubelet, contextlib.AsyncExitStack() as others:
        begin = time.monotonic()
        for number in range(4):
            await offers(kubelet, N150, *ours)
            await until(lambda: state(daemon) == REGISTERED)
            other = another_plugin(kubelet, N150, "theirs", name=f"other-{number}.sock")
            await others.enter_async_context(other)
            await until(lambda: state(daemon) != REGISTERED)

        await offers(kubelet, N150, *ours)
        first, longest = ttdp.BACKOFF
        assert time.monotonic() - begin > sum(min(first * 2**n, longest) for n in range(4))
        await kubelet.admit("train", "main", {N150: 2})

    report = "another device plugin has registered this resource; stop that plugin"
    assert sum(report in line for line in caplog.messages) == 4


async def test_only_a_checkpoint_after_the_last_list_shows_another_plugin(
    kubelet: Kubelet, session: Session
) -> None:
    """Else an ID that we have listed ourselves, and list no longer, would be another plugin's.

    A kubelet can write it late, or not at all.
    """
    kubelet.file.path = kubelet.directory.with_name("elsewhere")
    session.checkpoint.write_text("1")

    # The list changes, and the loop makes another turn before the kubelet is sent it.
    session.turn("a", "b", has_others_ids=True)
    session.checkpoint.write_text("22")
    session.turn("a", "b", has_others_ids=True)
    await offers(kubelet, N150, "a", "b")
    session.turn("a", "b", has_others_ids=True)

    # The kubelet writes one for a pod before it is sent the list, and the loop reads it after that.
    session.turn("a")
    session.checkpoint.write_text("333")
    await offers(kubelet, N150, "a")
    session.turn("a", has_others_ids=True)

    for number in range(20):  # the end of the registration would be noticed by then
        session.turn(f"{number}")
        await offers(kubelet, N150, f"{number}")
    assert not kubelet.find("ended")

    session.checkpoint.write_text("4444")
    for _ in range(2):
        session.turn("19", has_others_ids=True)
    await until(lambda: session.state != REGISTERED)
    assert session.state.startswith("another device plugin has registered this resource")

    # That one is from before the next registration.
    await until(lambda: session.state == REGISTERED)
    for number in range(20):
        session.turn("19", has_others_ids=True)
        session.turn(f"{number}", has_others_ids=True)
        await offers(kubelet, N150, f"{number}")
    assert session.state == REGISTERED and len(kubelet.find("registered")) == 2


# -- work that must not be interrupted -------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
async def test_work_that_is_completed_survives_cancellations(fails: bool) -> None:
    """The task is cancelled after it, and the work's own error is not left unread."""
    may_end, has_ended = asyncio.Event(), asyncio.Event()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))

    async def work() -> None:
        await may_end.wait()
        has_ended.set()
        if fails:
            raise ZeroDivisionError

    task = asyncio.create_task(ttdp.completed(work()))
    for _ in range(5):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()

    may_end.set()
    await asyncio.wait({task})
    assert task.cancelled() and has_ended.is_set()

    del task
    gc.collect()
    assert problems == []
