"""One chip, one pod: after reloads, restarts, reboots, and whatever kubelets have forgotten."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, polls
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of

P300, P150, P150A = (f"tenstorrent.com/{name}" for name in ("p300", "p150", "p150a"))
FAST = 0.1  # seconds between polls


def chips_of(kubelet: Kubelet, pod: str) -> set[str]:
    """Return the chips that a pod was given, also if the kubelet has forgotten that."""
    admitted = [each for each in kubelet.find("admitted") if each.fields["pod"] == pod]
    return set(admitted[0].fields["env"][ttdp.ADDRESSES].split(","))


async def test_a_kubelet_that_starts_without_its_checkpoint_ends_no_running_pod(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """No chip is unhealthy for that. Others are preferred; a start waits for the last process.

    A daemon that starts then knows the forgotten pod, too: it was saved before it started.
    """
    caplog.set_level("INFO")
    chips = {chip.bdf for _ in range(2) for chip in node.add("p150a")}
    settings = settings_of(node, directory, interval=FAST, state_dir=str(short_tmp))
    async with RunningDaemon(node, settings):
        await kubelet.run_pod("train", P150)
        await kubelet.kill()
        kubelet.corrupt("missing")
        await kubelet.start()
        started = kubelet.find("started")[-1].at
        await kubelet.wait_for(lambda: kubelet.healthy(P150) == chips)
        lists = kubelet.find("list", P150, since=started)
        assert not any(event.fields["unhealthy_ids"] for event in lists)

    await kubelet.wait_for(lambda: not kubelet.healthy(P150))
    async with RunningDaemon(node, settings):
        await kubelet.wait_for(lambda: kubelet.healthy(P150) == chips)
        await kubelet.run_pod("next", P150)
        assert chips_of(kubelet, "next") == chips - chips_of(kubelet, "train")

        kubelet.force_delete("train")
        await kubelet.admit("last", "main", {P150: 1})
        assert chips_of(kubelet, "last") == chips_of(kubelet, "train")
        await until(lambda: "default/train must end first" in caplog.text)
        assert not kubelet.pods.get("last").has_containers and kubelet.killed == []

        kubelet.end("train")
        await kubelet.running("last", "main")


async def test_a_kubelet_that_starts_finds_every_id_that_a_pod_holds(
    node: SimulatedNode, kubelet: Kubelet, directory: Path
) -> None:
    """After a reboot without its card. Kubelets of 1.35 to 1.37 would crash otherwise."""
    node.add("p300c", numa_node=0)
    settings = settings_of(node, directory, interval=FAST)
    async with RunningDaemon(node, settings):
        await kubelet.run_pod("train", P300)
        (mine,) = kubelet.allocated(P300)

    await kubelet.power_cut()
    node.chip(mine).vanish()
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.start()
        await kubelet.registered(P300)

        assert mine in kubelet.unhealthy(P300)
        rows = {row["bdf"]: row for row in daemon.view()["chips"]}
        assert "gone" in rows[mine]["reason"]


async def test_a_resource_with_only_a_pods_ids_ends_with_that_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A container could not start again without it. Until then its chip is withheld."""
    node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.run_pod("train", P150)

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    crashed = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=crashed))

    lists, registered = len(kubelet.find("list")), len(kubelet.find("registered"))
    await polls(daemon)
    assert daemon.sessions.keys() == {P150, P150A}
    # A list that has not changed is not sent.
    assert (len(kubelet.find("list")), len(kubelet.find("registered"))) == (lists, registered)
    assert not any(each.fields["healthy_ids"] for each in kubelet.find("list", P150A))
    (row,) = daemon.view()["chips"]
    assert row["withheld"] == "default/train" and row["resource"] == P150A

    await kubelet.remove_pod("train")
    await until(lambda: daemon.sessions.keys() == {P150A})
    await kubelet.wait_for(lambda: kubelet.healthy(P150A))


async def test_a_pods_id_stays_while_kubelet_and_pods_are_stopped(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl stop kubelet kubepods.slice`: however long, as no new kubelet is connected."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.run_pod("train", P150)
    daemon.reload(exclude=(chip.bdf,))
    await polls(daemon)

    await kubelet.power_cut()
    (node.root / "sys/fs/cgroup/kubepods").mkdir()  # a slice can be there again
    await until(lambda: daemon.state(P150) != ttdp.REGISTERED)
    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "STARTED_WITHIN", 0.0)
        await polls(daemon)
        assert daemon.sessions.keys() == {P150}

    await kubelet.start()
    await kubelet.running("train", "main")
    assert kubelet.killed == []


async def test_a_resource_that_has_ended_does_not_come_back_for_a_pod_that_has_ended(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a stream that the daemon closes tells nothing about the kubelet.

    Kubelets keep the entry of a pod that has ended until they admit another one with devices.
    """
    monkeypatch.setattr(ttdp, "STARTED_WITHIN", 0.5)
    (chip,) = node.add("p150a")
    daemon = await start(interval=0.05)
    await kubelet.run_pod("job", P150)
    kubelet.end("job")
    await until(lambda: daemon.decision.holds == [])

    daemon.reload(exclude=(chip.bdf,))
    await until(lambda: not kubelet.manager.is_listed(P150))
    await polls(daemon)
    assert not daemon.sessions and daemon.decision.holds == []
