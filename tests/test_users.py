"""Who uses what: pods by the kubelet's record, processes by the driver's, both in `list`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.commands import Answer, Host
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from ttdp import SharedResource, Sharing

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"


@pytest.fixture
def host(short_tmp: Path, node: SimulatedNode) -> Host:
    """The host of the kubelet and the daemon, on which somebody types commands."""
    return Host(short_tmp, node)


@pytest.fixture
async def three(node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> None:
    """Three cards, with which a daemon is registered."""
    for _ in range(3):
        node.add("n150")
    await start()
    await kubelet.registered(N150)


async def run(host: Host, *words: str) -> Answer:
    """Run a command while the kubelet answers, which is in this process."""
    return await asyncio.to_thread(host.run, *words)


async def used_by(host: Host) -> list[str]:
    """Return the last column of `list`."""
    header, *rows = (await run(host, "list")).table
    assert header[-1] == "USED BY"
    return [row[-1] for row in rows]


@pytest.mark.usefixtures("three")
async def test_list_names_pods_and_the_hosts_own_processes(host: Host, kubelet: Kubelet) -> None:
    """A pod's process is the pod; one of the host beside it is named."""
    await kubelet.admit("team-a/train", "main", {N150: 2})
    await kubelet.running("team-a/train", "main")
    _, second, _ = host.node.chips
    host.node.start_process(101, "0::/user.slice\n", [str(second.device_node)], "tt-smi")
    assert await used_by(host) == ["team-a/train", "team-a/train, tt-smi[101]", "-"]
    first, *_ = (await run(host, "list", "--json")).rows
    assert first["pods"] == [{"namespace": "team-a", "pod": "train", "container": "main"}]


@pytest.mark.usefixtures("three")
async def test_check_warns_of_a_process_beside_a_pods(host: Host, kubelet: Kubelet) -> None:
    """The chip is the pod's, and somebody of the host has it open."""
    await kubelet.admit("team-a/train", "main", {N150: 1})
    await kubelet.running("team-a/train", "main")
    first, *_ = host.node.chips
    host.node.start_process(101, "0::/user.slice\n", [str(first.device_node)], "tt-smi")
    warned = [each for each in (await run(host, "check")).complaints if each[1] == first.bdf]
    assert [each[0] for each in warned] == ["warn"]
    assert "team-a/train was given it, and tt-smi (101) of the host has it open" in warned[0][2]


@pytest.mark.usefixtures("three")
async def test_list_names_a_pod_by_its_uid_when_only_the_record_has_it(
    host: Host, kubelet: Kubelet
) -> None:
    """The API server is away, so that the API that has the names does not tell this one."""
    await kubelet.admit("train", "main", {N150: 1})
    kubelet.api_server_away()
    await kubelet.restart()
    await kubelet.registered(N150)
    first, *_ = (await run(host, "list", "--json")).rows
    uid = kubelet.uid("train")
    assert first["pods"] == [{"namespace": "", "pod": uid, "container": "main"}]
    assert (await used_by(host))[0] == uid


async def test_list_names_no_pod_whose_containers_have_ended(
    host: Host, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The kubelet's record keeps it until somebody asks; its cgroup has gone."""
    host.node.add("n150")
    state = host.root / "state"
    state.mkdir()
    host.environ["STATE_DIRECTORY"] = str(state)
    daemon = await start(interval=0.1, state_dir=str(state))
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    await kubelet.running("train", "main")
    await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
    assert await used_by(host) == ["default/train"]
    kubelet.complete("train")
    assert kubelet.uid("train") in (host.plugins / "kubelet_internal_checkpoint").read_text()
    assert await used_by(host) == ["-"]


async def test_list_names_all_who_share_a_chip(
    host: Host, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Each pod; the resource says for how many it is."""
    host.node.add("n150")
    config = host.root / "config.toml"
    config.write_text('[[sharing.resources]]\nname = "n150"\nreplicas = 4\n')
    await start(sharing=Sharing(lock_dir="", resources=(SharedResource("n150", 4),)))
    await kubelet.registered(N150)
    for pod in ("one", "two"):
        await kubelet.admit(pod, "main", {N150: 1})
    _, row = (await run(host, "list", f"--config-file={config}")).table
    assert sorted(row[-1].split(", ")) == ["default/one", "default/two"]
    assert "n150 ×4" in row


async def test_list_shows_what_a_pod_has_under_another_name(
    host: Host, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The same reason that the kubelet has for its being unhealthy."""
    host.node.add("p150a")
    await start()
    await kubelet.registered(P150)
    await kubelet.admit("train", "main", {P150: 1})
    (row,) = (await run(host, "list", "--json", "--resource-naming=card")).rows
    assert not row["healthy"] and f"held by default/train as {P150}" in row["reason"]


@pytest.mark.usefixtures("three")
async def test_who_uses_a_chip_is_a_question_mark_where_it_cannot_be_known(host: Host) -> None:
    """No kubelet, or a driver that does not tell; what is known is shown all the same."""
    assert await used_by(host) == ["-", "-", "-"]
    alone = Host(host.root / "elsewhere", host.node)
    assert await used_by(alone) == ["?", "?", "?"]
    first, *_ = host.node.chips
    host.node.start_process(7, "0::/user.slice\n", [str(first.device_node)], "tt-smi")
    assert await used_by(alone) == ["tt-smi[7]", "?", "?"]
    shutil.rmtree(host.node.root / "proc/driver/tenstorrent")
    assert await used_by(host) == ["?", "?", "?"]
