"""Starts of containers: a daemon and a kubelet obey the book of holds, and say what they wait for.

Which start has to wait is in tests.test_holds_explored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, kubelet_of
from tests.world.kubelet import Event, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until

N150 = "tenstorrent.com/n150"
AN_HOUR = 3600.0


@pytest.fixture
def node(node: SimulatedNode, caplog: pytest.LogCaptureFixture) -> SimulatedNode:
    """One card."""
    caplog.set_level("INFO")
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
    lines = [line.partition("container start waits: ") for line in caplog.messages]
    return [reason for _, found, reason in lines if found]


def runs(kubelet: Kubelet, pod: str) -> bool:
    return kubelet.pods.get(pod).has_containers


async def test_a_container_waits_until_a_pod_that_was_deleted_by_force_has_ended(
    kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet gives its device away at once. One call, and one line with whom it waits for."""
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})
    await until(lambda: waits(caplog))
    assert not runs(kubelet, "second")

    kubelet.end("first")
    await kubelet.running("second", "main")
    assert waits(caplog) == ["default/first must end first; it still has the device"]
    assert len(kubelet.find("prestarting")) == 2


async def test_a_start_that_waits_too_long_is_an_error_that_the_kubelet_repeats(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """25 s of the kubelet's 30; the error has the reason, and the pod starts in the end."""
    assert ttdp.START_TIMEOUT == 25.0
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0.3)
    await kubelet.run_pod("first", N150)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {N150: 1})

    failed, *_ = await kubelet.wait_for(lambda: kubelet.find("not-started"))
    _, began, *_ = kubelet.find("prestarting")
    assert failed.at - began.at > 0.25
    assert "Unavailable desc = default/first must end first" in failed.fields["message"]

    kubelet.end("first")
    await kubelet.running("second", "main")


async def test_of_two_pods_with_one_id_the_first_runs_until_one_is_deleted(
    node: SimulatedNode, kubelet: Kubelet, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """kubernetes #137534. The message names both; the kubelet's next call finds one."""
    monkeypatch.setattr(ttdp, "START_TIMEOUT", 0.5)
    (other_chip,) = node.add("n150")
    await kubelet.wait_for(lambda: len(kubelet.healthy(N150)) == 2)
    for pod in ("one", "two"):
        kubelet.manager.allocated[N150] = {other_chip.bdf}
        await kubelet.admit(pod, "main", {N150: 1})

    first = await kubelet.wait_for(lambda: [pod for pod in ("one", "two") if runs(kubelet, pod)])
    (other,) = {"one", "two"}.difference(first)
    reason, *_ = await until(lambda: waits(caplog))
    device = f"the kubelet has given {kubelet.allocation('one', 'main').envs[ttdp.ADDRESSES]}"
    assert reason == f"{device} to default/{first[0]} and default/{other}; delete one of these pods"
    assert not runs(kubelet, other)

    kubelet.delete(first[0])
    await kubelet.running(other, "main")


async def test_a_late_checkpoint_delays_a_start_until_it_is_there(
    kubelet: Kubelet, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before has another pod with this ID."""
    await kubelet.run_pod("first", N150)
    kubelet.end("first")
    await kubelet.manager.write_checkpoint()

    kubelet.file.path = directory.with_name("late")
    await kubelet.admit("second", "main", {N150: 1})
    await until(lambda: waits(caplog))
    assert not runs(kubelet, "second")

    kubelet.file.path.rename(directory / ttdp.CHECKPOINT)
    await kubelet.running("second", "main")
    assert waits(caplog) == ["the kubelet has not written its checkpoint yet"]


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

    def look(event: Event) -> None:
        if event.kind == "prestart":
            saved.append(file.exists() and running.uid("pod") in file.read_text())

    running = kubelet_of(node, directory, on_event=look)
    async with running:
        daemon = await start(interval=AN_HOUR, state_dir=str(file.parent))
        await running.run_pod("pod", N150)
        running.crash("pod", "main")
        await running.wait_for(lambda: len(saved) == 2)

        line = f"{file} cannot be written: No such file or directory"
        assert saved == [not disk_is_full] * 2
        await until(lambda: (line in daemon.status) is disk_is_full)
    assert caplog.messages.count(line) == disk_is_full
