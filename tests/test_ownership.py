"""One chip, one pod: after reloads, restarts, reboots, and whatever kubelets have forgotten."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon, kubelet_of, polls
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of

DOMAIN = "tenstorrent.com"
P300, P150, P150A = f"{DOMAIN}/p300", f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
FAST: dict[str, Any] = {"interval": 0.1}


def chips_of(kubelet: Kubelet, pod: str) -> set[str]:
    """Return the chips that a pod was given, also if the kubelet has forgotten that."""
    admitted = [each for each in kubelet.find("admitted") if each.fields["pod"] == pod]
    variables = dict(each.split("=", 1) for each in admitted[0].fields["env"])
    return set(variables[ttdp.ADDRESSES].split(","))


def ever_offered(kubelet: Kubelet, resource: str) -> set[str]:
    """Return every ID of a resource that was ever healthy in a list."""
    lists = kubelet.find("list", resource)
    return {identifier for event in lists for identifier in event.fields["healthy_ids"]}


async def test_a_kubelet_that_starts_without_its_checkpoint_ends_no_running_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """No chip is unhealthy for that. Others are preferred; a start waits for the last process."""
    caplog.set_level("INFO")
    monkeypatch.setattr(ttdp, "STARTED_WITHIN", 0.5)
    chips = {node.add("p150a")[0].bdf for _ in range(4)}
    pods = ["one", "two", "three"]
    await start(**FAST)
    for pod in pods:
        await kubelet.run_pod(pod, P150)
    taken = {address for pod in pods for address in chips_of(kubelet, pod)}

    await kubelet.kill()
    kubelet.corrupt("missing")
    await kubelet.start()
    started = kubelet.find("started")[-1].at
    await kubelet.wait_for(lambda: kubelet.find("sources-ready", since=started))
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == chips)
    assert kubelet.killed == []

    await kubelet.run_pod("next", P150)
    assert chips_of(kubelet, "next") == chips - taken

    kubelet.force_delete("one")
    await kubelet.admit("last", "main", {P150: 1})
    (holder,) = (pod for pod in pods if chips_of(kubelet, "last") == chips_of(kubelet, pod))
    await until(lambda: f"default/{holder} must end first" in caplog.text)
    assert not kubelet.pods.get("last").has_containers

    if holder != "one":
        kubelet.force_delete(holder)
    kubelet.end(holder)
    await kubelet.running("last", "main")
    lists = kubelet.find("list", P150, since=started)
    assert not any(event.fields["unhealthy_ids"] for event in lists)


async def test_a_daemon_that_starts_too_knows_the_pods_that_the_kubelet_has_forgotten(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """They were saved before their containers started."""
    chips = {node.add("p150a")[0].bdf for _ in range(2)}
    settings = settings_of(node, directory, interval=3600, state_dir=str(short_tmp))
    async with RunningDaemon(node, settings):
        await kubelet.run_pod("train", P150)
        held = chips_of(kubelet, "train")
        assert kubelet.uid("train") in (short_tmp / "state.json").read_text()

    await kubelet.kill()
    kubelet.corrupt("missing")
    await kubelet.start()
    async with RunningDaemon(node, settings):
        await kubelet.run_pod("next", P150)
        assert chips_of(kubelet, "next") == chips - held
        assert kubelet.killed == []


async def test_a_saved_state_that_does_not_fit_costs_nothing_but_the_state(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """As after an upgrade from another version: nobody dies, and nobody shares a chip."""
    node.add("p150a")
    settings = settings_of(node, directory, **FAST, state_dir=str(short_tmp))
    async with RunningDaemon(node, settings):
        await kubelet.run_pod("train", P150)

    (short_tmp / "state.json").write_text('{"format": 6}')
    await kubelet.wait_for(lambda: not kubelet.healthy(P150))
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.wait_for(lambda: kubelet.healthy(P150))
        kubelet.force_delete("train")
        await kubelet.admit("next", "main", {P150: 1})
        await polls(daemon)
        assert not kubelet.pods.get("next").has_containers

        kubelet.end("train")
        await kubelet.running("next", "main")
        assert kubelet.killed == []


async def test_a_kubelet_that_starts_finds_every_id_that_a_pod_holds(
    node: SimulatedNode, directory: Path
) -> None:
    """After a reboot without its card. Kubelets of 1.35 to 1.37 would crash otherwise."""
    node.add("p300c", numa_node=0)
    async with kubelet_of(node, directory) as kubelet:
        async with RunningDaemon(node, settings_of(node, directory, **FAST)):
            await kubelet.run_pod("train", P300)
            (mine,) = kubelet.allocated(P300)

        await kubelet.power_cut()
        node.chip(mine).vanish()
        async with RunningDaemon(node, settings_of(node, directory, **FAST)) as daemon:
            await kubelet.start()
            await kubelet.registered(P300)

            assert mine in kubelet.unhealthy(P300) and kubelet.violations == []
            rows = {row["bdf"]: row for row in daemon.daemon.reporter.view()["chips"]}
            assert "gone" in rows[mine]["reason"]


async def test_a_resource_with_only_a_pods_ids_ends_with_that_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A container could not start again without it. Until then its chip is withheld."""
    node.add("p150a")
    daemon = await start(**FAST)
    await kubelet.run_pod("train", P150)

    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    crashed = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=crashed))
    lists, registered = len(kubelet.find("list")), len(kubelet.find("registered"))
    await polls(daemon)
    assert daemon.sessions.keys() == {P150, P150A} and not ever_offered(kubelet, P150A)
    # A list that has not changed is not sent.
    assert (len(kubelet.find("list")), len(kubelet.find("registered"))) == (lists, registered)
    (row,) = daemon.daemon.reporter.view()["chips"]
    assert row["withheld"] == "default/train" and row["resource"] == P150A

    await kubelet.remove_pod("train")
    await until(lambda: daemon.sessions.keys() == {P150A})
    await kubelet.wait_for(lambda: ever_offered(kubelet, P150A))


async def test_a_pods_id_stays_while_kubelet_and_pods_are_stopped(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl stop kubelet kubepods.slice`, a soft reboot: the boot ID is the same.

    However long that lasts: the time of a new kubelet has not begun.
    """
    (chip,) = node.add("p150a")
    daemon = await start(**FAST)
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
