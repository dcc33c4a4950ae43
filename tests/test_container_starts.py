"""Starts of containers: which wait for another pod, for how long, and what they say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.conftest import StartDaemon, client, kubelet_of
from tests.world.kubelet import Event, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until

N150 = "tenstorrent.com/n150"
AN_HOUR = 3600.0


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    """One card."""
    node.add("n150")
    return node


@pytest.fixture
async def kubelet(
    node: SimulatedNode, directory: Path, start: StartDaemon
) -> AsyncIterator[Kubelet]:
    """Give a kubelet with a daemon that polls once an hour: whoever waits looks itself."""
    async with kubelet_of(node, directory) as running:
        await start(interval=AN_HOUR)
        yield running
    assert running.violations == []


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines about why starts wait."""
    lines = [line for line in caplog.messages if "container start waits: " in line]
    return [line.partition("container start waits: ")[2] for line in lines]


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the times at which the daemon looks at pods' cgroups."""
    found: list[float] = []
    refresh = ttdp.Cgroups.refresh

    def look(self: ttdp.Cgroups) -> None:
        found.append(time.monotonic())
        refresh(self)

    monkeypatch.setattr(ttdp.Cgroups, "refresh", look)
    return found


def runs(kubelet: Kubelet, pod: str) -> bool:
    return kubelet.pods.get(pod).has_containers


async def test_a_container_waits_for_the_last_process_of_a_pod_that_was_deleted_by_force(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    looks: list[float],
) -> None:  # fmt: skip
    """The kubelet gives its device away at once. One line has whom the start waits for."""
    monkeypatch.setattr(ttdp, "STARTED_WITHIN", 0.1)
    await kubelet.run_pod("first", N150)

    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})
    await until(lambda: waits(caplog))
    looks.clear()
    await until(lambda: len(looks) > 3)
    assert not runs(kubelet, "second")

    kubelet.end("first")
    await kubelet.running("second", "main")
    assert waits(caplog) == ["default/first must end first; it still has the device"]


async def test_jobs_one_after_the_other_wait_for_nothing(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that has ended has no cgroup any more. Until then its successor waits."""
    for number in range(10):
        await kubelet.run_pod(f"job-{number}", N150)
        kubelet.complete(f"job-{number}")
    assert waits(caplog) == []

    await kubelet.run_pod("slow", N150)
    kubelet.keep_cgroups()
    kubelet.complete("slow")
    await kubelet.admit("next", "main", {N150: 1})
    await until(lambda: waits(caplog))
    assert not runs(kubelet, "next")

    kubelet.keep_cgroups(False)
    await kubelet.running("next", "main")


async def test_of_two_pods_with_one_id_the_first_runs_until_one_is_deleted(
    node: SimulatedNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """kubernetes #137534. The message names both; the kubelet's next call finds one."""
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0.5)
    (other_chip,) = node.add("n150")
    await kubelet.wait_for(lambda: len(kubelet.healthy(N150)) == 2)
    for pod in ("one", "two"):
        kubelet.manager.pods.allocated[N150] = {other_chip.bdf}
        await kubelet.admit(pod, "main", {N150: 1})

    first = await kubelet.wait_for(lambda: [pod for pod in ("one", "two") if runs(kubelet, pod)])
    (other,) = {"one", "two"}.difference(first)
    reason, *_ = await until(lambda: waits(caplog))
    device = f"the kubelet has given {kubelet.allocation('one', 'main').envs[ttdp.ADDRESSES]}"
    assert reason == f"{device} to default/{first[0]} and default/{other}; delete one of these pods"
    assert not runs(kubelet, other)

    kubelet.delete(first[0])
    await kubelet.running(other, "main")


async def test_a_pod_that_is_deleted_during_its_call_delays_its_successor_by_nothing(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """The call outlives it, and is refused: it must not hold the chip for the deleted pod."""
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("deleted", "main", {N150: 1})
    await until(lambda: waits(caplog))

    kubelet.force_delete("deleted")
    await kubelet.admit("last", "main", {N150: 1})
    await until(lambda: f"{N150}: container start delayed: the pod was deleted" in caplog.messages)
    kubelet.end("first")
    await kubelet.running("last", "main")

    assert not kubelet.find("prestart", since=kubelet.find("deleted")[-1].at)[:-1]


async def test_a_start_that_waits_too_long_is_an_error_that_the_kubelet_repeats(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 s of the kubelet's 30; the error has the reason, and the pod starts in the end."""
    assert ttdp.START_TIMEOUT == 25.0
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0.3)
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})

    failed = await kubelet.wait_for(lambda: kubelet.find("not-started"))
    _, began, *_ = kubelet.find("prestarting")
    assert failed[0].at - began.at > 0.25
    assert "Unavailable desc = default/first must end first" in failed[0].fields["message"]

    kubelet.end("first")
    await kubelet.running("second", "main")


async def test_a_call_of_nobody_waits_for_the_checkpoint(
    kubelet: Kubelet, directory: Path, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose call it is, only the kubelet's checkpoint tells."""
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0.2)
    await kubelet.registered(N150)

    async with client(directory) as stub:
        request = pb.PreStartContainerRequest(devices_ids=[node.chips[0].bdf])
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.PreStartContainer(request)

    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert error.value.details() == "the kubelet has not written its checkpoint yet"


async def test_a_late_checkpoint_delays_a_start_until_it_is_there(
    kubelet: Kubelet, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before has another pod with this ID."""
    await kubelet.run_pod("first", N150)
    kubelet.complete("first")
    await kubelet.manager.write_checkpoint()

    kubelet.file.path = directory.with_name("late")
    await kubelet.admit("second", "main", {N150: 1})
    await until(lambda: waits(caplog))
    assert not runs(kubelet, "second")

    kubelet.file.path.rename(directory / ttdp.CHECKPOINT)
    await kubelet.running("second", "main")
    assert waits(caplog) == ["the kubelet has not written its checkpoint yet"]


async def test_starts_that_wait_at_the_same_time_share_their_looks(
    kubelet: Kubelet, directory: Path, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch,
    looks: list[float],
) -> None:  # fmt: skip
    """At pods' cgroups, every 0.1 s: a node can have 110 pods."""
    monkeypatch.setattr(ttdp, "START_INTERVAL", 0.05)
    await kubelet.registered(N150)
    async with client(directory) as stub:
        request = pb.PreStartContainerRequest(devices_ids=[node.chips[0].bdf])
        calls = [asyncio.ensure_future(stub.PreStartContainer(request)) for _ in range(10)]
        await until(lambda: len(looks) >= 40)
        for call in calls:
            call.cancel()

    # Each call looks when it comes.
    assert looks[-1] - looks[-20] > 10 * ttdp.START_INTERVAL


@pytest.mark.parametrize("disk_is_full", [False, True])
async def test_a_start_is_saved_before_it_is_answered_and_goes_on_if_it_cannot_be(
    node: SimulatedNode, directory: Path, start: StartDaemon, short_tmp: Path,
    caplog: pytest.LogCaptureFixture, disk_is_full: bool,
) -> None:  # fmt: skip
    """So the next daemon knows of it. A full disk is one line."""
    file = short_tmp / "state" / "state.json"
    if not disk_is_full:
        file.parent.mkdir()
    saved: list[bool] = []
    running = kubelet_of(node, directory, on_event=lambda event: look(event))

    def look(event: Event) -> None:
        if event.kind == "prestart":
            saved.append(file.exists() and running.uid("pod") in file.read_text())

    async with running:
        daemon = await start(interval=AN_HOUR, state_dir=str(file.parent))
        await running.run_pod("pod", N150)
        running.crash("pod", "main")
        await running.wait_for(lambda: len(saved) == 2)

        line = f"{file} cannot be written: No such file or directory"
        assert saved == [not disk_is_full] * 2
        await until(lambda: (line in daemon.status) is disk_is_full)
    assert caplog.messages.count(line) == disk_is_full
