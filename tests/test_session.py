"""The life with a kubelet that starts late, restarts, refuses, hangs, dies, or loses our socket."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon, plugin_sockets
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of

NAME = "tenstorrent.com/n150"


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    return node


def state(daemon: RunningDaemon) -> str:
    session = daemon.sessions.get(NAME)
    return session.state if session else ""


def registered_anew(kubelet: Kubelet, former_endpoint: str) -> bool:
    return str(kubelet.find("registered")[-1].fields["endpoint"]) != former_endpoint


def in_use() -> tuple[int, int, int]:
    """File descriptors, threads and tasks of this process, the kubelet's among them."""
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(asyncio.all_tasks())


async def test_waits_for_a_directory_that_does_not_exist_yet(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Whoever makes the directory, levels of it even, is registered with, by events alone."""
    daemon = await start(interval=3600)
    await until(lambda: state(daemon).startswith("waiting"))
    async with Kubelet(directory) as kubelet:
        await kubelet.registered(NAME)


async def test_a_directory_that_goes_and_comes_back_is_used_again(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Removed with all that is in it, as by `kubeadm reset`, and made anew: registered again."""
    await start(interval=3600)
    async with Kubelet(directory) as kubelet:
        await kubelet.registered(NAME)
    shutil.rmtree(directory)
    async with Kubelet(directory) as kubelet:
        await kubelet.registered(NAME)


async def test_a_directory_that_is_put_in_the_place_of_another_is_found_by_the_next_poll(
    node: SimulatedNode, start: StartDaemon, directory: Path, short_tmp: Path
) -> None:
    """No event tells that an ancestor was renamed; the poll sees that the path leads elsewhere."""
    deep = directory / "device-plugins"
    deep.mkdir(parents=True)
    async with RunningDaemon(node, settings_of(node, deep, interval=0.1)):
        await until(lambda: plugin_sockets(deep))
        directory.rename(short_tmp / "old")
        deep.mkdir(parents=True)
        async with Kubelet(deep) as kubelet:
            await kubelet.registered(NAME)


@pytest.mark.parametrize("version", [(1, 32), (1, 36), (1, 37)])
async def test_fifty_restarts_leave_nothing_behind(
    node: SimulatedNode, start: StartDaemon, directory: Path, version: tuple[int, int]
) -> None:
    """Registered again after each start; no thread, task, socket or descriptor more."""
    await start(interval=3600)
    kubelet = Kubelet(directory, version=version)
    await kubelet.start()
    await kubelet.registered(NAME)
    before = (0, 0, 0)
    for number in range(50):
        await kubelet.kill()
        await kubelet.start()
        await kubelet.registered(NAME)
        await kubelet.wait_for(lambda: kubelet.healthy(NAME))
        if number == 0:
            before = in_use()
    await until(lambda: all(now <= then for now, then in zip(in_use(), before, strict=True)))
    assert len(plugin_sockets(directory)) == 1 and kubelet.violations == []
    await kubelet.stop()


@pytest.mark.parametrize("version", [(1, 32), (1, 36), (1, 37)])
async def test_a_deleted_socket_is_bound_anew_and_registered_within_a_second(
    node: SimulatedNode, start: StartDaemon, directory: Path, version: tuple[int, int]
) -> None:
    """Though the kubelet lives and still has the old stream: its devices are healthy, and stay."""
    await start(interval=3600)
    async with Kubelet(directory, version=version) as kubelet:
        await kubelet.registered(NAME)
        for _ in range(5):
            (old,) = plugin_sockets(directory)
            (directory / old).unlink()
            await kubelet.wait_for(functools.partial(registered_anew, kubelet, old))
            await kubelet.wait_for(lambda: kubelet.healthy(NAME))
            await kubelet.admit("pod", "main", {NAME: 1})
            kubelet.remove_pod("pod")
        assert kubelet.violations == []


async def test_a_socket_that_a_starting_kubelet_has_swept_is_not_registered(
    kubelet: Kubelet, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine its sweep and its socket can come between two steps of ours."""
    monkeypatch.setattr("ttdp.REGISTER_TIMEOUT", 0.3)
    allocator: Any = None
    endpoint = ttdp.Endpoint(ttdp.Listing(ttdp.Resource(NAME, {})), allocator, str(directory))
    await endpoint.serve()
    (directory / plugin_sockets(directory)[0]).unlink()
    with pytest.raises(ttdp.RegistrationError):
        await endpoint.register(str(kubelet.socket))
    await endpoint.close()
    assert not kubelet.find("register")


async def test_a_stream_that_the_kubelet_drops_leads_to_a_new_registration(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """A kubelet that lost its watch would count all devices unhealthy for ever."""
    await start(interval=3600)
    await kubelet.registered(NAME)
    await kubelet.wait_for(lambda: kubelet.healthy(NAME))
    await kubelet.drop_streams()
    await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2 and kubelet.healthy(NAME))


@contextlib.contextmanager
def ruler() -> Iterator[list[float]]:
    """The moments at which this loop has slept for 0.01 s: what it was kept from is not one."""
    beats: list[float] = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.01)
            beats.append(time.monotonic())

    task = asyncio.get_running_loop().create_task(beat())
    yield beats
    task.cancel()


async def test_a_kubelet_that_refuses_is_asked_again_ever_more_slowly_and_says_why_once(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """The pauses double from 0.1 s; one line tells what the kubelet said; then it is registered."""
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "the plugin is not welcome", times=4)
    with ruler() as beats:
        daemon = await start(interval=3600)
        await until(lambda: "not welcome" in state(daemon))
        await kubelet.registered(NAME)
    attempts = [event.at for event in kubelet.find("register")]
    for pause, (begin, end) in zip([0.1, 0.2, 0.4, 0.8], itertools.pairwise(attempts), strict=True):
        assert end - begin >= pause
        assert sum(begin < at < end for at in beats) < 150 * pause + 60  # the attempt's own time
    assert sum("not welcome" in record.message for record in caplog.records) == 1


async def test_something_new_in_the_directory_ends_the_pause(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """A pause of seconds is cut short when anything else happens where the kubelet lives."""
    kubelet.refuse_with(grpc.StatusCode.UNKNOWN, "no", times=5)
    await start(interval=3600)
    await kubelet.wait_for(
        lambda: len(kubelet.find("register")) == 5
    )  # the next would come after 1.6 s
    (directory / "another-plugin.sock").touch()
    await kubelet.registered(NAME)


async def test_a_kubelet_that_hangs_blocks_nobody_and_its_successor_is_not_kept_waiting(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """While one Register does not return, the other resource is served."""
    daemon = await start(interval=3600)
    await kubelet.registered(NAME)
    kubelet.hang(30)
    node.add("p150a")
    await until(lambda: len(kubelet.find("register")) == 2)
    await kubelet.admit("pod", "main", {NAME: 1})
    assert daemon.sessions[NAME].state == "registered with kubelet"
    await kubelet.kill()
    await kubelet.start()
    await kubelet.registered(NAME)
    await kubelet.registered("tenstorrent.com/p150")


async def test_a_deaf_kubelet_is_given_up_after_its_time(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that takes the connection and never says a word costs an attempt its timeout."""
    monkeypatch.setattr("ttdp.REGISTER_TIMEOUT", 0.3)
    kubelet = Kubelet(directory)
    await kubelet.start(deaf=True)
    daemon = await start(interval=3600)
    await until(lambda: "has not answered within" in state(daemon))
    await kubelet.restart()
    await kubelet.registered(NAME)
    await kubelet.stop()


async def test_a_socket_that_a_dead_kubelet_left_is_told_from_a_live_one(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """A stopping kubelet leaves kubelet.sock: nobody listens there, and the state says so."""
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "kubelet.sock"))
    daemon = await start(interval=3600)
    await until(lambda: "nobody listens" in state(daemon))
    async with Kubelet(directory) as kubelet:
        await kubelet.registered(NAME)


async def test_what_a_killed_daemon_left_is_removed(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Dead sockets of ours go at the start; a live one, another plugin's, and files stay."""
    directory.mkdir()
    live = socket.socket(socket.AF_UNIX)
    live.bind(str(directory / "tt-n300.77-1.sock"))
    live.listen()
    for name in ("tt-n150.99-1.sock", "other.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(directory / name))
    (directory / "tt-notes.txt").touch()
    daemon = await start(interval=3600)
    await until(lambda: state(daemon).startswith("waiting"))
    left = {name for name in os.listdir(directory) if f".{os.getpid()}-" not in name}
    assert left == {"tt-n300.77-1.sock", "other.sock", "tt-notes.txt"}
    live.close()


async def test_a_reload_moves_devices_to_another_resource_and_leaves_other_streams_alone(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """By another naming p150a is its own resource; n150 has the same name and keeps its stream."""
    node.add("p150a")
    daemon = await start(interval=3600)
    for name in (NAME, "tenstorrent.com/p150"):
        await kubelet.registered(name)
    await kubelet.wait_for(lambda: kubelet.healthy("tenstorrent.com/p150"))
    daemon.reload(resource_naming="card")
    await kubelet.registered("tenstorrent.com/p150a")
    await kubelet.wait_for(lambda: not kubelet.healthy("tenstorrent.com/p150"))
    assert len(kubelet.find("registered", NAME)) == 1 and not kubelet.find("ended", NAME)


@pytest.mark.parametrize("version", [(1, 33), (1, 37)])
async def test_a_stream_of_a_kubelet_that_came_during_the_attempt_ends_before_it_registers_anew(
    start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]
) -> None:
    """The socket that was there when we looked was another's.

    Before 1.37 the kubelet forgets a new registration when an older stream ends: the reference
    kubelet has that for a violation, as it does when its socket is only touched.
    """
    stub = rpc.RegistrationStub
    came = iter([True])

    def comes_now(channel: grpc.aio.Channel) -> Any:
        if next(came, False):
            os.utime(directory / "kubelet.sock")
        return stub(channel)  # type: ignore[no-untyped-call]

    class Endpoint(ttdp.Endpoint):
        async def close(self, grace: float | None = None) -> None:
            await asyncio.sleep(0.2)  # as on a busy machine
            await super().close(grace)

    monkeypatch.setattr(ttdp, "Endpoint", Endpoint)
    monkeypatch.setattr(rpc, "RegistrationStub", comes_now)
    async with Kubelet(directory, version=version) as kubelet:
        daemon = await start(interval=3600)
        await until(lambda: len(kubelet.find("registered")) == 2)
        await until(lambda: state(daemon) == "registered with kubelet")
        await until(lambda: kubelet.find("ended"))
        assert kubelet.violations == []


async def test_attempts_that_are_dropped_at_any_moment_leave_the_next_one_a_clean_start(
    node: SimulatedNode, start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Begun anew hundreds of times, after any number of steps, it ends up registered, once."""
    async with Kubelet(
        directory
    ) as kubelet:  # hears of sockets that are gone when it looks: that is no violation here
        daemon = await start(interval=3600)
        await kubelet.registered(NAME)
        session = daemon.sessions[NAME]
        for number in range(400):
            session.start_anew()
            for _ in range(number % 40):
                await asyncio.sleep(0)

        def settled() -> bool:
            """The one socket there is, is the one that the kubelet was told of last."""
            told = kubelet.find("registered")[-1].fields["endpoint"]
            return plugin_sockets(directory) == [told] and bool(kubelet.healthy(NAME))

        await until(lambda: settled() and state(daemon) == "registered with kubelet")
        (path,) = plugin_sockets(directory)
        (directory / path).unlink()
        await kubelet.wait_for(functools.partial(registered_anew, kubelet, path))
    # The kubelet's own gRPC may log of calls that were dropped under its hands.
    assert not [
        record
        for record in caplog.records
        if record.levelname == "ERROR" and "grpc" not in record.name
    ]


@pytest.mark.parametrize("since", ["before the registration", "after it"])
async def test_a_stream_of_somebody_else_does_not_hide_that_the_kubelet_is_gone(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path, since: str
) -> None:
    """Whoever else watches: a kubelet that drops its stream is registered with again."""
    if since == "before the registration":
        await kubelet.kill()
    await start(interval=3600)
    if since == "after it":
        await kubelet.registered(NAME)
    await until(lambda: plugin_sockets(directory))
    async with grpc.aio.insecure_channel(
        f"unix:{directory}/{plugin_sockets(directory)[0]}"
    ) as channel:
        stream = rpc.DevicePluginStub(channel).ListAndWatch(pb.Empty())  # type: ignore[no-untyped-call]
        assert (await stream.read()).devices
        if since == "before the registration":
            await kubelet.start()
            await kubelet.registered(NAME)
        before = len(kubelet.find("registered"))
        await kubelet.drop_streams()
        await kubelet.wait_for(
            lambda: len(kubelet.find("registered")) > before and kubelet.healthy(NAME)
        )
        stream.cancel()
