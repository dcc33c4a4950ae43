"""Who uses what: pods by the kubelet's record, processes by the driver's, and both in `list`."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.simulation import RunningDaemon
from ttdp import SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"


async def rows_of(settings: ttdp.Settings) -> list[dict[str, Any]]:
    """What `list --json` says, as root on this node."""
    return list(ttdp._rows(settings, await ttdp.survey(settings)))


def used_by(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of `list`."""
    header, *lines = [re.split("  +", line) for line in ttdp._table_lines(rows)]
    return [line[header.index("USED BY")] for line in lines]


@pytest.fixture
async def daemon(node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> RunningDaemon:
    """A daemon that is registered, on a node with three cards."""
    for _ in range(3):
        node.add("n150")
    running: RunningDaemon = await start()
    await kubelet.registered(N150)
    return running


async def test_list_names_pods_and_the_hosts_own_processes(
    node: SimulatedNode, kubelet: Kubelet, daemon: RunningDaemon
) -> None:
    """A pod's process is the pod; one of the host beside it is named, and `check` warns of it."""
    await kubelet.admit("team-a/train", "main", {N150: 2})
    await kubelet.running("team-a/train", "main")
    _, second, _ = node.chips
    node.start_process(101, "0::/user.slice\n", [str(second.device_node)], "tt-smi")
    rows = await rows_of(daemon.settings)
    assert rows[0]["pods"] == [{"namespace": "team-a", "pod": "train", "container": "main"}]
    assert used_by(rows) == ["team-a/train", "team-a/train, tt-smi[101]", "-"]
    found = await ttdp.survey(daemon.settings)
    (warned,) = [each for each in ttdp._check_chips(daemon.settings, found) if each[0] != "ok"]
    assert warned[:2] == ("warn", second.bdf)
    assert "team-a/train" in warned[2] and "tt-smi (101)" in warned[2]


async def test_list_names_a_pod_by_its_uid_when_only_the_record_has_it(
    kubelet: Kubelet, daemon: RunningDaemon
) -> None:
    """The API that has the names is away; the chip is somebody's all the same."""
    await kubelet.admit("train", "main", {N150: 1})
    settings = replace(daemon.settings, pod_resources_socket="/nowhere")
    rows = await rows_of(settings)
    uid = kubelet.uid("train")
    assert rows[0]["pods"] == [{"namespace": "", "pod": uid, "container": "main"}]
    assert used_by(rows)[0] == uid


async def test_list_names_all_who_share_a_chip(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Each pod once; the resource says for how many it is."""
    node.add("n150")
    daemon = await start(sharing=Sharing(lock_dir="", resources=(SharedResource("n150", 4),)))
    await kubelet.registered(N150)
    for pod in ("one", "two"):
        await kubelet.admit(pod, "main", {N150: 1})
    rows = await rows_of(daemon.settings)
    assert sorted(used_by(rows)[0].split(", ")) == ["default/one", "default/two"]
    assert "n150 ×4" in [*ttdp._table_lines(rows)][1]


async def test_list_shows_what_a_pod_has_under_another_name(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The same reason that the kubelet has for its being unhealthy."""
    node.add("p150a")
    daemon = await start()
    await kubelet.registered(P150)
    await kubelet.admit("train", "main", {P150: 1})
    (row,) = await rows_of(replace(daemon.settings, resource_naming="card"))
    assert not row["healthy"] and f"held by default/train as {P150}" in row["reason"]


async def test_who_uses_a_chip_is_a_question_mark_where_it_cannot_be_known(
    node: SimulatedNode, daemon: RunningDaemon, kubelet: Kubelet
) -> None:
    """No kubelet, or a driver that does not tell; what is known is shown all the same."""
    assert used_by(await rows_of(daemon.settings)) == ["-", "-", "-"]
    alone = replace(daemon.settings, device_plugin_dir="/nowhere")
    assert used_by(await rows_of(alone)) == ["?", "?", "?"]
    node.start_process(7, "0::/user.slice\n", [str(node.chips[0].device_node)], "tt-smi")
    assert used_by(await rows_of(alone)) == ["tt-smi[7]", "?", "?"]
    shutil.rmtree(node.root / "proc/driver/tenstorrent")
    assert used_by(await rows_of(daemon.settings)) == ["?", "?", "?"]
