"""Registration with kubelets that start late, restart, reject, hang, die, or lose a socket."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import socket
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from grpc.aio._server import Server

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import StartDaemon, client, kubelet_of, plugin_sockets, polls
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.reference import Plugin
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


def in_use() -> tuple[int, int, int]:
    """Return the numbers of descriptors, threads and tasks."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())


# -- kubelets that start ---------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("call", ["", "inotify_init1", "inotify_add_watch"])
async def test_each_kubelet_that_starts_is_registered_with_and_leaves_nothing_behind(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:  # fmt: skip
    """By an event; without inotify (128 instances for each user) within a second.

    Every other one starts before the end of the former one has been noticed. The status follows at
    once; no thread, task, socket or descriptor is left.
    """
    if call:
        monkeypatch.setattr(ttdp._libc, call, lambda *_: -1)
        monkeypatch.setattr(ttdp, "RETRY_TICK", 0.1)
    daemon = await start(interval=AN_HOUR)
    await until(lambda: daemon.status.endswith(f"({directory}/kubelet.sock does not exist)"))

    async with kubelet_of(node, directory) as kubelet:
        before = (0, 0, 0)
        for number in range(8):
            await kubelet.registered(N150)
            await until(lambda: daemon.status.endswith(ttdp.REGISTERED))
            if number == 1:
                before = in_use()
            await kubelet.kill()
            if number % 2 and not call:
                await until(lambda: not daemon.status.endswith(ttdp.REGISTERED))
            await kubelet.start()

        await kubelet.registered(N150)
        await until(lambda: all(now <= then for now, then in zip(in_use(), before, strict=True)))
        assert len(plugin_sockets(directory)) == 1 and kubelet.violations == []


# -- streams ---------------------------------------------------------------------------------------


async def test_every_stream_gets_a_changed_list_at_once_and_an_unchanged_one_never(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """The kubelet's and those of tools; the newest is taken for the kubelet's.

    So a tool costs one more Register when it leaves.
    """
    daemon = await start(interval=0.05)
    await kubelet.registered(N150)

    async with client(directory) as one, client(directory) as other:
        streams = []
        for stub in (one, other):
            streams.append(stub.ListAndWatch(pb.Empty()))
            assert [each.health for each in (await streams[-1].read()).devices] == ["Healthy"]
        await polls(daemon)

        node.chips[0].vanish()
        for stream in streams:
            assert [each.health for each in (await stream.read()).devices] == ["Unhealthy"]
        await polls(daemon)
        assert len(kubelet.find("list")) == 2

        streams[0].cancel()
        await polls(daemon)
        assert len(kubelet.find("register")) == 1
        streams[1].cancel()
        await kubelet.wait_for(lambda: len(kubelet.find("list")) == 3)

    await polls(daemon)
    assert len(kubelet.find("register")) == 2 and daemon.state(N150) == ttdp.REGISTERED


# -- disturbances ----------------------------------------------------------------------------------


DISTURBANCES = {
    "stream": "kubelet closed the ListAndWatch stream; registering again",
    "socket": "the plugin's socket was deleted; registering again",
    "new socket": "the plugin's socket was deleted at once",
    "refused": r"kubelet rejected Register: it is not \x1bwelcome",
    "no answer": "kubelet did not answer Register within 1 s",
    "no stream": "kubelet accepted Register but opened no ListAndWatch stream; retrying",
    "no sockets": "cannot create sockets in {}",
    "a bug": "internal error; registering again",
}


async def ignore(request: pb.RegisterRequest) -> None:
    """Accept a registration, and do nothing more."""


async def disturb(how: str, kubelet: Kubelet, patch: pytest.MonkeyPatch) -> None:
    """Have the registration be lost, and one of these happen then, until the patch is undone."""

    def fail(*_: object) -> None:
        raise (TypeError if how == "a bug" else RuntimeError)

    def delete() -> None:
        (name,) = plugin_sockets(kubelet.directory)
        (kubelet.directory / name).unlink()

    begin = Server.start

    async def lose(server: Server) -> None:
        await begin(server)
        delete()

    if how == "socket":
        delete()
        return
    if how == "new socket":
        patch.setattr(Server, "start", lose)
    elif how == "refused":
        kubelet.refuse_with("it\nis not \x1bwelcome", times=3)
    elif how == "no answer":
        patch.setattr(ttdp, "REGISTER_TIMEOUT", 1.0)
        kubelet.hang(AN_HOUR)
    elif how == "no stream":
        patch.setattr(ttdp, "REGISTER_TIMEOUT", 1.0)
        patch.setattr(kubelet.manager, "register", ignore)
    elif how != "stream":
        patch.setattr(Server, "add_insecure_port", fail)
    await kubelet.drop_streams()


@pytest.mark.parametrize("how", DISTURBANCES)
async def test_whatever_disturbs_a_registration_it_is_made_again(
    daemon: RunningDaemon, kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, how: str,
) -> None:  # fmt: skip
    """One line has the reason; one stream and one socket are left.

    The kubelet notices the end of the old stream before the next Register, else it would forget the
    resource.
    """
    monkeypatch.setattr(ttdp, "BACKOFF", (0.01, 0.01))
    is_ended_here = how == "socket"  # in the other cases, the kubelet knows
    monkeypatch.setattr(ttdp, "STREAM_DELAY", 0.2 if is_ended_here else AN_HOUR)
    caplog.set_level("INFO")
    line = f"{N150}: {DISTURBANCES[how].format(directory)}"
    began = time.monotonic()

    with monkeypatch.context() as patch:
        await disturb(how, kubelet, patch)
        await until(lambda: line in caplog.messages)

    await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)
    await kubelet.run_pod("pod", N150)
    assert daemon.state(N150) == ttdp.REGISTERED and caplog.messages.count(line) == 1
    assert ("Traceback" in caplog.text) is (how == "a bug")
    assert len(plugin_sockets(directory)) == len(kubelet.manager.streams) == 1
    assert kubelet.find("register")[-1].at - began >= 0.2 * is_ended_here


async def test_a_server_that_cannot_stop_delays_neither_the_next_registration_nor_the_end(
    daemon: RunningDaemon, kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a client is stopped (SIGSTOP) that has more to read than a connection holds."""
    end = Server.stop

    async def never_end(server: Server, grace: float | None) -> None:
        await end(server, grace)
        await asyncio.sleep(AN_HOUR)

    monkeypatch.setattr(Server, "stop", never_end)
    await disturb("socket", kubelet, monkeypatch)
    await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)

    assert await asyncio.wait_for(daemon.stop(), PATIENCE) == 0
    assert plugin_sockets(directory) == []


async def test_a_socket_on_which_nobody_answers_is_tried_until_a_kubelet_does(
    start: StartDaemon, node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is no failure: kubelets end and start. While none listens no server is made in vain."""
    caplog.set_level("INFO")
    monkeypatch.setattr(ttdp, "BACKOFF", (0.01, 0.01))
    looks = Mock(wraps=ttdp.why_not_listening)
    monkeypatch.setattr(ttdp, "why_not_listening", looks)
    directory.mkdir()
    text = "waiting for kubelet (its socket is closed)"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.setblocking(False)
        listening.bind(str(directory / ttdp.KUBELET_SOCKET))
        listening.listen()
        daemon = await start(interval=AN_HOUR)
        while daemon.state(N150) != text:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            connection.close()

    await until(lambda: not plugin_sockets(directory))
    with monkeypatch.context() as patch:
        patch.setattr(Server, "add_insecure_port", Mock(side_effect=RuntimeError))
        seen = looks.call_count
        await until(lambda: looks.call_count > seen + 3)
        assert daemon.state(N150) == text
    assert [each.levelname for each in caplog.records if text in each.message] == ["INFO"]

    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)


async def test_pauses_double_and_begin_anew_after_a_registration_that_lasted(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 10 ms to 5 s."""
    assert ttdp.BACKOFF == (0.01, 5.0)
    monkeypatch.setattr(ttdp, "BACKOFF", (0.002, 0.01))
    wait, pauses = ttdp.wait_for_event, list[float]()

    async def wait_and_note(event: asyncio.Event, timeout: float) -> bool:
        if timeout == ttdp.REGISTER_TIMEOUT:
            return await wait(event, timeout)
        pauses.append(timeout)
        return False

    monkeypatch.setattr(ttdp, "wait_for_event", wait_and_note)
    kubelet.refuse_with("refused", times=5)
    daemon = await start(interval=AN_HOUR)
    await kubelet.wait_for(lambda: kubelet.find("list"))
    assert pauses == [0.002, 0.004, 0.008, 0.01, 0.01]

    await asyncio.sleep(ttdp.BACKOFF[1])
    kubelet.refuse_with("refused", times=2)
    await kubelet.drop_streams()
    await until(lambda: daemon.sessions[N150].registration.successes == 2)
    assert pauses[5:] == [0.002, 0.004]


@pytest.mark.usefixtures("patient")
async def test_an_event_in_the_directory_ends_the_pause(
    start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """Another plugin's socket does; polls, the daemon's own sockets and the checkpoint do not.

    There is a pause after a registration that was lost sooner than the longest one lasts.
    """
    daemon = await start(interval=0.05)
    await kubelet.registered(N150)
    await kubelet.drop_streams()
    await until(lambda: daemon.state(N150).startswith("kubelet closed the ListAndWatch stream"))

    await kubelet.manager.write_checkpoint()
    await polls(daemon)
    assert len(kubelet.find("register")) == 1
    (directory / "another-plugin.sock").touch()
    await kubelet.registered(N150)


@pytest.mark.usefixtures("patient")
async def test_a_kubelet_that_hangs_blocks_nothing_and_is_given_up_when_the_next_one_starts(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet, directory: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """While one Register is not answered, which `check` shows, the other resource is served."""
    monkeypatch.setattr(ttdp, "REGISTER_TIMEOUT", AN_HOUR)
    caplog.set_level("INFO")
    kubelet.hang(AN_HOUR)
    node.add("p150a")
    await kubelet.wait_for(lambda: kubelet.find("register", P150))
    await kubelet.admit("pod", "main", {N150: 1})
    (problem,) = daemon.view()["problems"]
    assert (problem["subject"], problem["level"]) == (P150, "FAIL")
    assert problem["problem"].startswith("not registered: ")

    async with kubelet_of(node, directory) as other:
        await other.registered(N150)
        await other.registered(P150)
    assert f"{P150}: the kubelet has restarted; registering again" in caplog.messages
    await until(lambda: daemon.state(P150) != ttdp.REGISTERED)
    assert daemon.view()["problems"] == []  # there is none to register with


async def test_Plugin_with_the_same_name_is_a_problem_while_it_is_listed(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet
) -> None:
    """The checkpoint has IDs that the daemon gives in no configuration; IDs of former ones do."""
    text = "another device plugin has registered this resource; stop that plugin"
    for ids, is_reported in ((["theirs"], True), (["0000:c0::1", "0000:77:00.0"], False)):
        async with Plugin(kubelet, N150, *ids):
            await kubelet.wait_for(lambda: kubelet.healthy(N150) == {*ids})  # noqa: B023
            await until(lambda: (text in map(str, daemon.problems)) is is_reported)  # noqa: B023


# -- ends ------------------------------------------------------------------------------------------


async def test_a_reload_moves_devices_to_another_resource_and_leaves_other_streams_alone(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet
) -> None:
    """By card, p150a is a resource; n150 has the same name, and keeps its stream.

    If a resource returns at once, its former session ends first.
    """
    node.add("p150a")
    await kubelet.registered(P150)

    daemon.reload(resource_naming="card")
    await until(lambda: P150 not in daemon.sessions)
    daemon.reload(resource_naming="board")
    await kubelet.wait_for(lambda: len(kubelet.find("list", P150)) == 2)
    assert kubelet.find("ended", P150)[0].at < kubelet.find("register", P150)[1].at

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await kubelet.wait_for(lambda: kubelet.find("ended", P150) and not kubelet.healthy(P150))
    assert len(kubelet.find("registered", N150)) == 1 and not kubelet.find("ended", N150)


# -- sockets' names --------------------------------------------------------------------------------


async def test_names_of_sockets_fit_into_an_address_and_are_recognised(
    start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with the largest process ID, and after 99,999 registrations.

    The next daemon removes those of one that was killed; any other file stays.
    """
    monkeypatch.setattr(os, "getpid", lambda: 4194304)
    monkeypatch.setattr(ttdp, "_socket_numbers", itertools.count(99_998))
    names = {ttdp.new_socket_name(f"tenstorrent.com/{'x' * 63}") for _ in range(3)}
    assert len(names) == 3 and all(each.startswith("tt-xxxx") for each in names)
    assert max(map(len, names)) <= 107 - len("/") - ttdp.PLUGIN_DIR_MAX

    directory.mkdir()
    for each in (*names, "other.sock", "tt-notes.txt"):
        (directory / each).touch()
    await (await start(interval=AN_HOUR)).ready()
    assert names.isdisjoint(os.listdir(directory))
    assert {"other.sock", "tt-notes.txt"} <= {*os.listdir(directory)}
