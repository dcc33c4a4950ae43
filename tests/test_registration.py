"""Registration with kubelets that start late, restart, reject, hang, die, or lose a socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio._server import Server

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import (
    StartDaemon,
    client,
    errors,
    kubelet_of,
    plugin_sockets,
    polls,
)
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.reference import another_plugin
from tests.world.simulation import RunningDaemon

N150, P150, P150A = (f"tenstorrent.com/{name}" for name in ("n150", "p150", "p150a"))
AN_HOUR = 3600.0


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    return node


@pytest.fixture
async def daemon(start: StartDaemon, kubelet: Kubelet) -> RunningDaemon:
    """Return a daemon that has registered, with polls an hour apart."""
    found = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    return found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only events end pauses."""
    monkeypatch.setattr(ttdp, "BACKOFF", (AN_HOUR, AN_HOUR))


@pytest.fixture
def slow_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers take time to stop, as on a busy machine."""
    stop = Server.stop

    async def slow_stop(self: Server, grace: float | None) -> None:
        await asyncio.sleep(0.05)
        await stop(self, grace)

    monkeypatch.setattr(Server, "stop", slow_stop)


async def offers(kubelet: Kubelet, resource: str, *healthy: str) -> None:
    """Wait until exactly these IDs are healthy."""
    await kubelet.wait_for(lambda: kubelet.healthy(resource) == {*healthy})


@contextlib.asynccontextmanager
async def tool(directory: Path) -> AsyncIterator[Any]:
    """A debugging tool, which has the list on a stream of its own."""
    async with client(directory) as stub:
        stream = stub.ListAndWatch(pb.Empty())
        assert (await stream.read()).devices
        yield stream
        stream.cancel()


def resource(*ids: str) -> ttdp.Resource:
    """Return an n150 resource with these healthy devices."""
    return ttdp.Resource(N150, {each: ttdp.Device(each, (), ttdp.Place(each), 0) for each in ids})


def session_with(kubelet: Kubelet, *ids: str) -> ttdp.KubeletSession:
    """Return a session without a daemon."""
    allocator = ttdp.Allocator(ttdp.Host(ttdp.Settings(), lambda: None))
    session = ttdp.KubeletSession(N150, allocator, str(kubelet.directory), lambda: None)
    session.update(resource(*ids), is_disturbed=False)
    return session


# -- kubelets that start ---------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", [None, "inotify_init1", "inotify_add_watch"])
async def test_a_kubelet_that_starts_is_registered_with_by_an_event_or_within_a_second(
    start: StartDaemon, directory: Path, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch,
    call: str | None,
) -> None:  # fmt: skip
    """Polls are an hour apart. Without inotify (128 instances for each user) the loop looks."""
    if call:
        monkeypatch.setattr(ttdp._libc, call, lambda *_: -1)
        monkeypatch.setattr(ttdp, "RETRY_TICK", 0.1)
    daemon = await start(interval=AN_HOUR)
    await until(lambda: daemon.state(N150).startswith("waiting for kubelet ("))

    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)
        await kubelet.restart()
        await kubelet.registered(N150)
        assert kubelet.violations == []


@pytest.mark.usefixtures("patient")
async def test_twenty_restarts_leave_nothing_behind(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Registered after each start without a pause; no thread, task, socket or descriptor more.

    Every other kubelet starts before the end of the former one has been noticed.
    """

    def in_use() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())

    daemon = await start(interval=AN_HOUR)
    kubelet = kubelet_of(node, directory)
    before = (0, 0, 0)

    for number in range(20):
        await kubelet.start()
        await kubelet.registered(N150)
        await offers(kubelet, N150, node.chips[0].bdf)

        if number == 1:
            before = in_use()
        if number < 19:
            await kubelet.kill()
            if number % 2:
                await until(lambda: daemon.state(N150) != ttdp.REGISTERED)

    await until(lambda: all(now <= then for now, then in zip(in_use(), before, strict=True)))
    assert len(plugin_sockets(directory)) == 1 and kubelet.violations == []
    await kubelet.stop()


async def test_the_status_follows_registrations_at_once(
    daemon: RunningDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """No other event wakes the loop: the kubelet writes no checkpoint."""
    kubelet.file.path = directory.with_name("elsewhere")
    await until(lambda: daemon.status.endswith(ttdp.REGISTERED))

    await kubelet.kill()
    await until(lambda: daemon.status.endswith("waiting for kubelet (its socket is closed)"))

    await kubelet.start()
    await until(lambda: daemon.status.endswith(ttdp.REGISTERED))


# -- lists -----------------------------------------------------------------------------------------


async def test_every_stream_gets_a_changed_list_at_once_and_an_unchanged_one_never(
    kubelet: Kubelet,
) -> None:
    """The kubelet's and those of tools; health, IDs and NUMA nodes are a list."""
    session = session_with(kubelet, "a")
    await offers(kubelet, N150, "a")

    async with tool(kubelet.directory) as one, tool(kubelet.directory) as other:
        for _ in range(3):
            session.update(resource("a"), is_disturbed=True)
            await asyncio.sleep(0)
        session.update(resource("a", "b"), is_disturbed=False)
        await offers(kubelet, N150, "a", "b")
        for stream in (one, other):
            assert [each.ID for each in (await stream.read()).devices] == ["a", "b"]

    assert len(kubelet.find("list")) == 2
    await session.close()


# -- registrations that are lost -------------------------------------------------------------------


@pytest.mark.usefixtures("slow_stops")
async def test_a_deleted_socket_is_bound_and_registered_again(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The old stream ends first, else kubelets would forget the resource."""
    monkeypatch.setattr(ttdp, "LAST_GRACE", AN_HOUR)  # only the daemon's end leaves calls time
    daemon = await start(interval=AN_HOUR)

    async with kubelet_of(node, directory) as kubelet:
        for number in range(1, 4):
            await until(lambda: daemon.state(N150) == ttdp.REGISTERED and kubelet.healthy(N150))
            assert len(kubelet.find("registered")) == number

            (name,) = plugin_sockets(directory)
            (directory / name).unlink()
            await kubelet.wait_for(lambda: len(kubelet.find("registered")) > number)  # noqa: B023

        await kubelet.wait_for(lambda: kubelet.healthy(N150))
        await kubelet.admit("pod", "main", {N150: 1})
        assert kubelet.violations == []


async def test_a_kubelet_has_time_to_notice_the_end_of_its_stream(
    daemon: RunningDaemon, kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next Register. A stream that the kubelet has ended itself takes no time."""
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 0.5)
    (name,) = plugin_sockets(directory)
    began = time.monotonic()
    (directory / name).unlink()
    await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)
    assert kubelet.find("register")[-1].at - began >= 0.5

    monkeypatch.setattr(ttdp, "STREAM_DELAY", AN_HOUR)
    await kubelet.drop_streams()
    await kubelet.wait_for(lambda: len(kubelet.find("list")) == 3)


async def test_a_deleted_kubelet_socket_ends_nothing(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """The open stream works on, for changes and for pods; the next kubelet is registered with.

    The plugin's own socket is deleted, too: there is no kubelet to register with.
    """
    daemon = await start(interval=0.05)
    await kubelet.registered(N150)

    for path in kubelet.directory.glob("*.sock"):
        path.unlink()
    await polls(daemon)

    (chip,) = node.chips
    chip.die()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150))
    chip.revive()
    await offers(kubelet, N150, chip.bdf)
    await kubelet.admit("pod", "main", {N150: 1})
    assert daemon.state(N150) == ttdp.REGISTERED and len(kubelet.find("registered")) == 1

    await kubelet.restart()
    await kubelet.registered(N150)


async def test_a_debugging_tool_costs_one_more_register_when_it_leaves(
    start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """The newest stream is taken for the kubelet's; the tool's list is no change of the node."""
    daemon = await start(interval=0.05)
    await kubelet.registered(N150)

    async with tool(directory):
        async with tool(directory):
            await polls(daemon)
            assert len(kubelet.find("register")) == 1
        await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)

    await polls(daemon)
    assert len(kubelet.find("register")) == 2 and daemon.state(N150) == ttdp.REGISTERED


# -- kubelets that reject, hang or refuse ----------------------------------------------------------


async def test_pauses_double_and_begin_anew_after_a_registration_that_lasted(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """From 0.01 to 5 s. A kubelet that rejects is one line, with its reason."""
    assert ttdp.BACKOFF == (0.01, 5.0)
    monkeypatch.setattr(ttdp, "BACKOFF", (0.002, 0.01))
    wait, pauses = ttdp.wait_for_event, list[float]()

    async def wait_and_note(event: asyncio.Event, timeout: float) -> bool:
        if timeout == ttdp.REGISTER_TIMEOUT:
            return await wait(event, timeout)
        pauses.append(timeout)
        return False

    monkeypatch.setattr(ttdp, "wait_for_event", wait_and_note)
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "the plugin\nis not \x1bwelcome", times=5)
    daemon = await start(interval=AN_HOUR)
    await kubelet.wait_for(lambda: kubelet.find("list"))
    assert pauses == [0.002, 0.004, 0.008, 0.01, 0.01]

    line = rf"{N150}: kubelet rejected Register: the plugin is not \x1bwelcome"
    assert caplog.messages.count(line) == 1

    await asyncio.sleep(ttdp.BACKOFF[1])
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "", times=2)
    await kubelet.drop_streams()
    await until(lambda: daemon.sessions[N150].registration.successes == 2)
    assert pauses[5:] == [0.002, 0.004]
    assert caplog.messages.count(f"{N150}: kubelet rejected Register: UNKNOWN") == 1


@pytest.mark.usefixtures("patient")
async def test_an_event_in_the_directory_ends_the_pause(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """Another plugin's socket does; the daemon's own sockets and the checkpoint do not.

    There is also a pause after a registration that was lost sooner than the longest one lasts.
    """
    node.add("p150a")
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "no", times=2)
    daemon = await start(interval=0.05)
    for name in (N150, P150):
        await until(lambda: "rejected Register" in daemon.state(name))  # noqa: B023

    await kubelet.manager.write_checkpoint()
    await polls(daemon)
    assert len(kubelet.find("register")) == 2
    (directory / "another-plugin.sock").touch()
    await kubelet.wait_for(lambda: kubelet.find("list", N150) and kubelet.find("list", P150))

    await kubelet.drop_streams()
    await until(lambda: daemon.state(N150).startswith("kubelet closed the ListAndWatch stream"))
    await polls(daemon)
    assert len(kubelet.find("register")) == 4
    (directory / "another-plugin.sock").unlink()
    await kubelet.registered(N150)


@pytest.mark.usefixtures("patient")
async def test_a_kubelet_that_hangs_blocks_nothing_and_is_given_up_when_the_next_one_starts(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet, directory: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """While one Register is not answered, the other resource is served.

    That Register ends at once, not after its time, when there is another kubelet.sock.
    """
    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", AN_HOUR)
    caplog.set_level("INFO")

    kubelet.hang(AN_HOUR)
    node.add("p150a")
    await until(lambda: len(kubelet.find("register")) == 2)
    await kubelet.admit("pod", "main", {N150: 1})
    assert daemon.state(N150) == ttdp.REGISTERED

    async with kubelet_of(node, directory) as other:
        await other.registered(N150)
        await other.registered(P150)
    assert f"{P150}: the kubelet has restarted; registering again" in caplog.messages


async def test_a_kubelet_that_does_not_answer_is_tried_again(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its socket refuses connections, or accepts them only: a line has which."""
    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", 1.0)
    monkeypatch.setattr(ttdp, "BACKOFF", (0.01, 0.01))
    caplog.set_level("INFO")
    directory.mkdir()
    path = directory / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    daemon = await start(interval=AN_HOUR)
    text = "waiting for kubelet (its socket is closed)"
    await until(lambda: daemon.state(N150) == text)
    assert caplog.messages.count(f"{N150}: {text}") == 1

    path.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        await until(lambda: daemon.state(N150) == "kubelet did not answer Register within 1 s")

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
        daemon = await start(interval=AN_HOUR)
        text = "kubelet accepted Register but opened no ListAndWatch stream; retrying"
        await until(lambda: daemon.state(N150) == text)

    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", PATIENCE)
    await kubelet.registered(N150)


async def test_another_plugin_with_the_same_name_is_a_problem_while_it_is_listed(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """The checkpoint has IDs that the daemon gives in no configuration; IDs of former ones do."""
    text = "another device plugin has registered this resource; stop that plugin"
    daemon = await start(interval=0.1)
    await offers(kubelet, N150, node.chips[0].bdf)

    for ids, is_reported in ((["theirs"], True), (["0000:c0::1", "0000:77:00.0"], False)):
        async with another_plugin(kubelet, N150, *ids):
            await offers(kubelet, N150, *ids)
            await until(lambda: (text in map(str, daemon.problems)) is is_reported)  # noqa: B023


# -- ends and errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["while it begins", "while it ends"])
async def test_a_session_can_be_closed_at_any_moment(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """SIGTERM while a socket is bound, registered or closed leaves no socket and no traceback."""
    tasks = len(asyncio.all_tasks())

    for steps in range(40):
        session = session_with(kubelet, "a")
        if moment == "while it ends":
            await kubelet.registered(N150)
            await kubelet.drop_streams()

        for _ in range(steps):
            await asyncio.sleep(0)
        closing = asyncio.create_task(session.close())
        await asyncio.wait({closing}, timeout=PATIENCE)

        assert closing.done()
        await until(lambda: not plugin_sockets(kubelet.directory))
        await until(lambda: not kubelet.manager.plugins.is_listed(N150))

    await until(lambda: len(asyncio.all_tasks()) <= tasks)
    # The kubelet's own line is about a call that nobody waits for any more.
    assert not [line for line in errors(caplog) if "Registration/Register" not in line]


async def test_a_server_that_cannot_stop_delays_neither_the_next_registration_nor_the_end(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a client is stopped (SIGSTOP) that has more to read than a connection holds."""
    stop = Server.stop

    async def never_end(self: Server, grace: float | None) -> None:
        await stop(self, grace)
        await asyncio.sleep(AN_HOUR)

    monkeypatch.setattr(Server, "stop", never_end)
    session = session_with(kubelet, "a")
    await offers(kubelet, N150, "a")

    (name,) = plugin_sockets(kubelet.directory)
    (kubelet.directory / name).unlink()
    session.update(resource("a"), is_disturbed=False)
    await until(lambda: len(kubelet.find("registered")) == 2)

    await asyncio.wait_for(session.close(), PATIENCE)
    assert plugin_sockets(kubelet.directory) == []


async def test_the_daemons_end_leaves_calls_a_moment_and_waits_for_nothing_else(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other session of the resource follows, before which the kubelet must notice something."""
    monkeypatch.setattr(ttdp, "STREAM_DELAY", AN_HOUR)
    is_called, may_answer = asyncio.Event(), asyncio.Event()

    async def allocate(*_: object) -> list[ttdp.Edits]:
        is_called.set()
        await may_answer.wait()
        return []

    monkeypatch.setattr(ttdp.Allocator, "allocate", allocate)
    session = session_with(kubelet, "a")
    await offers(kubelet, N150, "a")
    async with client(kubelet.directory) as plugin:
        call = plugin.Allocate(pb.AllocateRequest())
        await is_called.wait()

        closing = asyncio.create_task(session.close(grace=PATIENCE))
        await until(lambda: not plugin_sockets(kubelet.directory))
        may_answer.set()
        assert await call == pb.AllocateResponse()

    await kubelet.drop_streams()
    await asyncio.wait_for(closing, PATIENCE)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("start", OSError(errno.EMFILE, "Too many open files"), "[Errno 24] Too many open files"),
        ("add_insecure_port", RuntimeError(), "cannot create sockets in {}"),
        ("start", RuntimeError(), "internal error; registering again"),
    ],
)
async def test_a_server_that_cannot_be_made_is_tried_again(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, directory: Path, call: str, error: Exception, text: str,
) -> None:  # fmt: skip
    """gRPC hides why it has no socket; an error that nobody has foreseen has its traceback."""

    def fail(*_: object) -> None:
        raise type(error)(*error.args)  # a new one: its traceback keeps the server

    monkeypatch.setattr(ttdp, "BACKOFF", (0.01, 0.01))
    with monkeypatch.context() as patch:
        patch.setattr(Server, call, fail)
        daemon = await start(interval=AN_HOUR)
        await until(lambda: daemon.state(N150) == text.format(directory))

    await kubelet.registered(N150)
    assert ("Traceback" in caplog.text) is text.startswith("internal error")


# -- resources that end and return -----------------------------------------------------------------


async def test_a_reload_moves_devices_to_another_resource_and_leaves_other_streams_alone(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet
) -> None:
    """By card, p150a is a resource; n150 has the same name, and keeps its stream."""
    node.add("p150a")
    await kubelet.registered(P150)

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)

    await kubelet.wait_for(lambda: kubelet.find("ended", P150) and not kubelet.healthy(P150))
    assert len(kubelet.find("registered", N150)) == 1 and not kubelet.find("ended", N150)


@pytest.mark.usefixtures("slow_stops")
async def test_a_resource_that_ends_and_returns_at_once_has_one_session_at_a_time(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Two SIGHUPs in a row, or in one turn of the loop; also if the kubelet restarts meanwhile."""
    (chip,) = node.add("p150a")
    async with kubelet_of(node, directory) as kubelet:
        daemon = await start(interval=AN_HOUR)
        for number in range(0, 48, 5):
            await until(lambda: daemon.state(P150) == ttdp.REGISTERED)
            await offers(kubelet, P150, chip.bdf)

            daemon.reload(resource_naming="card")
            for _ in range(number % 24):
                await asyncio.sleep(0)
            if number >= 24:
                await kubelet.restart()
            daemon.reload(resource_naming="board")

        await until(lambda: daemon.sessions.keys() == {N150, P150})
        await until(lambda: daemon.state(P150) == ttdp.REGISTERED)
        await offers(kubelet, P150, chip.bdf)

        sockets = [name for name in plugin_sockets(directory) if name.startswith("tt-p150.")]
        assert len(sockets) == 1 and kubelet.violations == []
        order = [e.kind for e in kubelet.events if e.fields.get("resource") == P150]
        order = [kind for kind in order if kind in ("registered", "ended")]
        assert all(one != other for one, other in itertools.pairwise(order)), order


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
