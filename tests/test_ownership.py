"""One chip, one pod: after reloads, restarts, reboots, and whatever kubelets have forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

import ttdp
from generated.podresources_pb2 import ListPodResourcesResponse
from tests.conftest import (
    WATCHDOG,
    StartDaemon,
    kubelet_of,
    polls,
    turns,
)
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of

DOMAIN = "tenstorrent.com"
P300, N150 = f"{DOMAIN}/p300", f"{DOMAIN}/n150"
P150, P150A = f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
FAST: dict[str, Any] = {"interval": 0.1}


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the starts that wait."""
    caplog.set_level("INFO")


def chips_of(kubelet: Kubelet, pod: str) -> set[str]:
    """Return the PCI addresses in the environment of a pod's container."""
    return set(kubelet.allocation(pod, "main").envs[ttdp.ADDRESSES].split(","))


async def run_pod(kubelet: Kubelet, pod: str, resource: str = P150) -> None:
    await kubelet.registered(resource)
    await kubelet.admit(pod, "main", {resource: 1})
    await kubelet.running(pod, "main")


def ever_offered(kubelet: Kubelet, resource: str) -> set[str]:
    """Return every ID of a resource that was ever healthy in a list."""
    lists = kubelet.find("list", resource)
    return {identifier for event in lists for identifier in event.fields["healthy_ids"]}


# -- a kubelet that has forgotten pods -------------------------------------------------------------


async def test_a_kubelet_that_starts_without_its_checkpoint_ends_no_running_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No chip is unhealthy for that. Others are preferred; a start waits for the last process."""
    monkeypatch.setattr("ttdp.START_TIMEOUT", 0.3)
    chips = {node.add("p150a")[0].bdf for _ in range(4)}
    pods = ["one", "two", "three"]

    daemon = await start(**FAST)
    for pod in pods:
        await run_pod(kubelet, pod)

    taken = {bdf for pod in pods for bdf in chips_of(kubelet, pod)}
    await until(lambda: len(daemon.daemon.host.holds.names) == len(pods))

    await kubelet.kill()
    kubelet.corrupt("missing")
    await kubelet.start()
    started = kubelet.find("started")[-1].at
    await kubelet.wait_for(lambda: kubelet.find("sources-ready", since=started))

    assert kubelet.killed == [] and kubelet.healthy(P150) == chips

    await run_pod(kubelet, "next")
    assert chips_of(kubelet, "next") == chips - taken

    kubelet.force_delete("one")
    await kubelet.admit("last", "main", {P150: 1})
    await kubelet.wait_for(lambda: kubelet.find("not-started"))
    message = kubelet.find("not-started")[0].fields["message"]
    (holder,) = (pod for pod in pods if f"default/{pod} must end first" in message)

    kubelet.crash(holder, "main")  # its sandbox has a process yet
    failures = len(kubelet.find("not-started"))
    await kubelet.wait_for(lambda: len(kubelet.find("not-started")) > failures + 2)

    assert len(kubelet.find("running", since=started)) == 1

    kubelet.end(holder)
    await kubelet.running("last", "main")
    lists = kubelet.find("list", P150, since=started)

    assert not any(event.fields["unhealthy_ids"] for event in lists)
    assert "unhealthy" not in caplog.text


async def test_the_chip_of_a_forgotten_pod_that_has_just_ended_is_preferred(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the last look at pods, in which it still ran: another pod's chip would be chosen."""
    monkeypatch.setattr("ttdp.ROUND", 3600)
    for _ in range(2):
        node.add("p150a")
    await start(interval=3600)
    for pod in ("first", "second"):
        await run_pod(kubelet, pod)
    before = chips_of(kubelet, "second")
    assert before == {max(chip.bdf for chip in node.chips)}, "the lowest is the default"

    await kubelet.kill()
    kubelet.corrupt("missing")
    await kubelet.start()
    await kubelet.registered(P150)
    await kubelet.wait_for(lambda: len(kubelet.healthy(P150)) == 2)
    kubelet.force_delete("second")
    kubelet.end("second")
    await kubelet.admit("third", "main", {P150: 1})

    assert chips_of(kubelet, "third") == before


async def test_a_daemon_that_starts_too_knows_the_pods_that_the_kubelet_has_forgotten(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """They are in its state file."""
    chips = {node.add("p150a")[0].bdf for _ in range(2)}
    settings = settings_of(node, directory, **FAST, state_dir=str(short_tmp))

    async with RunningDaemon(node, settings):
        await run_pod(kubelet, "train")
        held = chips_of(kubelet, "train")
        state = short_tmp / "state.json"
        await until(lambda: kubelet.uid("train") in state.read_text())

    await kubelet.kill()
    kubelet.corrupt("missing")
    await kubelet.start()
    async with RunningDaemon(node, settings):
        await run_pod(kubelet, "next")
        assert chips_of(kubelet, "next") == chips - held
        assert kubelet.killed == []


async def test_a_kubelet_that_starts_finds_every_id_that_a_pod_holds(
    node: SimulatedNode, directory: Path
) -> None:
    """After a reboot without its card. Kubelets of 1.35 to 1.37 would crash otherwise."""
    node.add("p300c", numa_node=0)

    async with kubelet_of(node, directory, version=(1, 37), policy="best-effort") as kubelet:
        async with RunningDaemon(node, settings_of(node, directory, **FAST)):
            await run_pod(kubelet, "train", P300)
            (mine,) = kubelet.allocated(P300)

        await kubelet.power_cut()
        node.chip(mine).vanish()
        async with RunningDaemon(node, settings_of(node, directory, **FAST)):
            await kubelet.start()
            await kubelet.registered(P300)

            assert mine in kubelet.unhealthy(P300) and kubelet.violations == []


# -- the check before each start of a container ----------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the daemon looked at pods, without its rounds, which are an hour apart."""
    moments = []
    refresh = ttdp.Cgroups.refresh

    def noted(cgroups: ttdp.Cgroups) -> None:
        moments.append(time.monotonic())
        refresh(cgroups)

    monkeypatch.setattr(ttdp.Cgroups, "refresh", noted)
    for name in ("ROUND", "HELD_INTERVAL"):
        monkeypatch.setattr(ttdp, name, 3600)
    return moments


async def test_a_container_waits_for_the_pod_that_was_deleted_by_force(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    looks: list[float],
) -> None:  # fmt: skip
    """It waits for the last process, though no process has the device open, or opens it later.

    Polls are an hour apart: the call itself looks at pods while it waits.
    """
    (chip,) = node.add("p150a")
    daemon = await start(interval=3600)
    await run_pod(kubelet, "first")
    await until(lambda: not daemon.daemon.host.holds.is_awaiting_containers)
    chip.set_pids([])

    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    reason = f"pod {kubelet.uid('first')} must end first; it still runs on the device"
    waits = f"{P150}: container start waits: {reason}"
    await until(lambda: waits in caplog.messages)
    await kubelet.manager.write_checkpoint()
    before = len(looks)
    await until(lambda: len(looks) > before + 2)
    assert not kubelet.find("running", since=kubelet.find("deleted")[0].at)

    kubelet.end("first")
    await kubelet.running("second", "main")
    assert not kubelet.find("not-started")


async def test_starts_that_wait_at_the_same_time_share_their_looks_at_pods(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    looks: list[float],
) -> None:  # fmt: skip
    """There are ten looks a second, as for a single one."""
    starts = 8
    for _ in range(starts):
        node.add("p150a")
    daemon = await start(interval=3600)
    for number in range(starts):
        await run_pod(kubelet, f"first-{number}")
    await until(lambda: not daemon.daemon.host.holds.is_awaiting_containers)

    for number in range(starts):
        kubelet.force_delete(f"first-{number}")
        await kubelet.admit(f"second-{number}", "main", {P150: 1})
    await until(lambda: caplog.text.count("container start waits") >= starts)

    looks.clear()
    await until(lambda: len(looks) == 9)
    assert looks[-1] - looks[0] > 5 * ttdp.START_INTERVAL, "a checkpoint causes looks, too"

    for number in range(starts):
        kubelet.end(f"first-{number}")
        await kubelet.running(f"second-{number}", "main")


async def test_a_pod_that_is_deleted_while_its_container_waits_starts_none(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet does not cancel the call, and gives the chip to the next pod."""
    node.add("p150a")
    await start(**FAST)
    await run_pod(kubelet, "first")

    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    await until(lambda: "container start waits" in caplog.text)

    kubelet.force_delete("second")
    await kubelet.admit("third", "main", {P150: 1})
    await until(lambda: "container start delayed: the pod was deleted" in caplog.text)
    kubelet.end("first")
    await kubelet.running("third", "main")

    assert [event.fields["pod"] for event in kubelet.find("running")] == ["first", "third"]


@pytest.mark.parametrize("has_pause", [True, False])
@pytest.mark.parametrize("keeps_cgroup", [True, False])
async def test_an_ordinary_hand_over_waits_for_nothing(
    node: SimulatedNode, directory: Path, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, has_pause: bool, keeps_cgroup: bool,
) -> None:  # fmt: skip
    """Also for pods that live half a second, and while the former pod's empty cgroup exists.

    Polls are an hour apart: the daemon looks more often while a pod is starting.
    """
    monkeypatch.setattr("ttdp.ROUND", 3600)
    node.add("p150a")
    daemon = await start(interval=3600)

    async with kubelet_of(node, directory, has_pause=has_pause) as kubelet:
        kubelet.keep_cgroups(keeps_cgroup)
        for number in range(8):
            await run_pod(kubelet, f"pod-{number}")
            await until(lambda: not daemon.daemon.host.holds.is_awaiting_containers)
            kubelet.delete(f"pod-{number}")

        assert "container start waits" not in caplog.text and not kubelet.find("not-started")
        assert kubelet.violations == []


# -- chips that a pod holds under another name -----------------------------------------------------


async def test_a_resource_with_only_a_pods_ids_ends_with_that_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container could not start again without it. Both kinds of containers hold the chip.

    Polls are an hour apart: the daemon looks more often while the list depends on the pod's end.
    """
    monkeypatch.setattr("ttdp.ROUND", 3600)
    monkeypatch.setattr("ttdp.HELD_INTERVAL", 0.05)
    node.add("p150a")
    daemon = await start(WATCHDOG, interval=3600)
    await kubelet.registered(P150)
    await kubelet.admit("train", "prepare", {P150: 1}, init=True)
    await run_pod(kubelet, "train")

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    crashed = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=crashed))
    await turns(daemon)
    assert daemon.sessions.keys() == {P150, P150A} and not ever_offered(kubelet, P150A)

    kubelet.delete("train")
    await until(lambda: daemon.sessions.keys() == {P150A})


async def test_polls_cost_the_kubelet_nothing(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Once pods' names are known; also while a device is withheld."""
    node.add("p150a")
    daemon = await start(**FAST)
    await run_pod(kubelet, "train")

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await until(lambda: daemon.daemon.host.holds.names)

    asked, lists = len(kubelet.find("asked")), len(kubelet.find("list"))

    await polls(daemon, 8)

    assert (len(kubelet.find("asked")), len(kubelet.find("list"))) == (asked, lists)


async def test_questions_for_the_same_names_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause doubles with each answer, up to five minutes; a failure does not count."""
    asked: list[int] = []

    async def list_pods(path: str) -> ttdp.PodNames:
        asked.append(now)
        if now < 2:
            raise DecodeError
        return {}

    monkeypatch.setattr(ttdp, "list_pods", list_pods)
    pod_resources = ttdp.PodResources(lambda *_: None)
    for now in range(1200):
        pod_resources.ask("", (), {"a pod"}, now)
        for _ in range(3):
            await asyncio.sleep(0)

    assert asked == [0, 1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 513, 813, 1113]


async def test_a_late_answer_about_other_pods_makes_a_new_pod_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is admitted while the kubelet still answers the question before."""
    monkeypatch.setattr(ttdp, "NAMES_PAUSES", (600.0, 600.0))
    asked, may_answer = 0, asyncio.Event()

    async def list_pods(path: str) -> ttdp.PodNames:
        nonlocal asked
        asked += 1
        await may_answer.wait()
        return {}

    monkeypatch.setattr(ttdp, "list_pods", list_pods)
    answered = asyncio.Event()
    pod_resources = ttdp.PodResources(lambda *_: answered.set())
    pod_resources.ask("", (), {"one"}, 0.0)
    await asyncio.sleep(0)
    pod_resources.ask("", (), {"one", "two"}, 5.0)
    may_answer.set()
    await answered.wait()
    await asyncio.sleep(0)

    pod_resources.ask("", (), {"one", "two"}, 10.0)
    await asyncio.sleep(0)
    assert asked == 2


async def test_a_pod_that_is_never_listed_is_not_asked_for_at_each_poll(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some pods are never listed; and a question can make the kubelet give one ID to two pods."""
    monkeypatch.setattr("ttdp.NAMES_PAUSES", (600.0, 600.0))
    monkeypatch.setattr("tests.world.kubelet.listed_pods", lambda *_: ListPodResourcesResponse())
    node.add("p150a")
    node.add("p150a")
    daemon = await start(**FAST)

    await run_pod(kubelet, "train")
    await kubelet.wait_for(lambda: kubelet.find("asked"))
    await polls(daemon, 8)
    assert len(kubelet.find("asked")) == 1

    await run_pod(kubelet, "infer")
    await kubelet.wait_for(lambda: len(kubelet.find("asked")) == 2)
    await polls(daemon, 8)
    assert len(kubelet.find("asked")) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kubelet: kubelet.hang(30, method="List", times=999),
        lambda kubelet: kubelet.garble(times=999),
    ],
    ids=["slow", "garbage"],
)
async def test_nothing_depends_on_the_pod_resources_api(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Kubelet], object],
) -> None:  # fmt: skip
    """Without names, one line reports that; the pod's chip is withheld, and its end is seen."""
    (chip,) = node.add("p150a")
    spoil(kubelet)
    daemon = await start(**FAST)
    await run_pod(kubelet, "train")

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await until(lambda: f"held until pod {kubelet.uid('train')} ends" in caplog.text)
    await until(lambda: "cannot get pod names" in caplog.text)
    assert not ever_offered(kubelet, P150A)

    await kubelet.remove_pod("train")
    await kubelet.wait_for(lambda: kubelet.healthy(P150A) == {chip.bdf})

    await daemon.stop()
    assert sum("cannot get pod names" in line for line in caplog.messages) == 1
