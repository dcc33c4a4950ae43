"""Kubelets that start: what they know, what they lack, what they find anew."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.conftest import kubelet_of
from tests.test_custody import FAST, N150, P150, offers, train
from tests.world.kubelet import AdmissionError
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of

pytestmark = pytest.mark.usefixtures("ticking")


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """This kubelet writes at once."""
    monkeypatch.setattr("ttdp.SETTLING", 0.5)


@pytest.mark.parametrize("how", ["checksum", "older"])
@pytest.mark.parametrize("first", ["kubelet", "daemon", "daemon lives"])
async def test_a_kubelet_that_started_without_a_pods_entry_gives_nobody_its_chip(
    node: SimulatedNode, directory: Path, short_tmp: Path, how: str, first: str
) -> None:
    """The file is sound to us: its checksum is not, or it is a writing of before the pod."""
    node.add("p150a")
    settings = settings_of(node, directory, interval=FAST, state_dir=str(short_tmp))
    kubelet = kubelet_of(node, directory)
    async with kubelet, RunningDaemon(node, settings) as daemon:
        await kubelet.registered(P150)
        before = kubelet.file.path.read_bytes()
        await train(kubelet)
        await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
        await asyncio.sleep(0.6)  # the entry has settled
        if first != "daemon lives":
            await daemon.stop()
        await kubelet.kill()
        kubelet.corrupt("checksum" if how == "checksum" else before)
        await asyncio.sleep(2 * FAST)
        if first == "kubelet":
            await kubelet.start()
        if first != "daemon lives":
            daemon = await RunningDaemon(node, settings).__aenter__()
        if first != "kubelet":
            await asyncio.sleep(3 * FAST)
            await kubelet.start()
        await kubelet.registered(P150)
        await offers(kubelet, P150)
        with pytest.raises(AdmissionError):
            await kubelet.admit("other", "main", {P150: 1})
        kubelet.delete("train")
        await kubelet.wait_for(lambda: len(kubelet.healthy(P150)) == 1)
        if first != "daemon lives":
            await daemon.__aexit__()


@pytest.mark.parametrize("version", [(1, 31), (1, 36)])
async def test_a_stopped_nodes_pods_come_back_to_their_ids(
    node: SimulatedNode, directory: Path, monkeypatch: pytest.MonkeyPatch, version: Any
) -> None:
    """Their cgroups were gone for long, while no kubelet ran: its entries count when it starts."""
    monkeypatch.setattr("ttdp.LINGERING", 0.3)
    (chip,) = node.add("n150", numa_node=0)
    kubelet = kubelet_of(node, directory, version=version, policy="best-effort")
    async with kubelet, RunningDaemon(node, settings_of(node, directory, interval=FAST)) as daemon:
        await kubelet.registered(N150)
        await kubelet.admit("train", "main", {N150: 1})
        await kubelet.running("train", "main")
        await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
        await kubelet.power_cut()  # all processes end, and it is the same boot
        await asyncio.sleep(0.8)
        daemon.reload(device_id_strategy="asic")
        await asyncio.sleep(0.3)
        await kubelet.start()
        await kubelet.registered(N150)
        assert kubelet.healthy(N150) == {chip.bdf}
        await kubelet.running("train", "main")
        assert kubelet.violations == []


@pytest.mark.parametrize("who", ["the old one starts again", "both after a reboot"])
async def test_an_answer_that_names_another_chips_node_by_now_starts_nothing(
    tmp_path: Path, directory: Path, who: str
) -> None:
    """Without the package's links a pod's answer is the bare node; numbers change."""
    node = SimulatedNode(tmp_path / "unlinked", links=False)
    first, second = node.add("n150") + node.add("n150")
    settings = settings_of(node, directory, interval=FAST, health={"heartbeat_misses": 1_000_000})
    async with kubelet_of(node, directory) as kubelet, RunningDaemon(node, settings):
        await kubelet.registered(N150)
        await kubelet.admit("old", "main", {N150: 1})
        await kubelet.running("old", "main")
        kubelet.crash("old", "main")
        if who == "both after a reboot":
            await kubelet.power_cut()
        node.swap_ordinals(first.bdf, second.bdf)
        if who == "both after a reboot":
            await kubelet.start()
            await offers(kubelet, N150, first.bdf, second.bdf)
        await kubelet.admit("new", "main", {N150: 1})
        await kubelet.running("new", "main")
        await asyncio.sleep(5 * FAST)
        pids = node.root / f"proc/driver/tenstorrent/{second.ordinal}/pids"
        assert len(pids.read_text().split()) == 1
        assert "is another chip by now" in kubelet.find("not-started")[-1].fields["message"]
        node.swap_ordinals(first.bdf, second.bdf)
        await kubelet.running("old", "main")


async def test_a_kubelet_that_has_not_written_yet_gets_no_id_that_its_file_gives_to_a_pod(
    node: SimulatedNode, directory: Path
) -> None:
    """It asks for it because it could not read the file; what it writes comes later."""
    node.add("p150a")
    kubelet = kubelet_of(node, directory)
    async with kubelet, RunningDaemon(node, settings_of(node, directory, interval=FAST)) as daemon:
        await train(kubelet)
        await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
        await kubelet.kill()
        kubelet.corrupt("checksum")
        kubelet.overtake()  # each writing takes a third of a second
        await kubelet.start()
        await until(lambda: kubelet.healthy(P150))
        with pytest.raises(AdmissionError):
            await kubelet.admit("other", "main", {P150: 1}, static=True)
        assert not kubelet.find("running", since=kubelet.find("killed")[0].at)


@pytest.mark.parametrize("layout", ["cgroupfs", "systemd"])
def test_a_static_pods_uid_can_be_any_word(tmp_path: Path, layout: str) -> None:
    """A manifest may set one (metadata.uid); its cgroup is found all the same."""
    uid = "edge-trainer"
    name = f"pod{uid}" if layout == "cgroupfs" else "kubepods-podedge_trainer.slice"
    (tmp_path / f"fs/cgroup/kubepods/{name}").mkdir(parents=True)
    cgroups = ttdp.Cgroups(str(tmp_path), {})
    cgroups.look({uid}, 100)
    assert cgroups.exists(uid)
