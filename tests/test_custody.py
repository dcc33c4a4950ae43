"""One chip, one owner: what a pod has is nobody else's, whatever it is called by now."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon, kubelet_of, plugin_sockets
from tests.world.kubelet import CHECKPOINT, AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

DOMAIN = "tenstorrent.com"
P300, P300C, N150 = f"{DOMAIN}/p300", f"{DOMAIN}/p300c", f"{DOMAIN}/n150"
P150, P150A = f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
FAST = 0.1  # seconds between two polls


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """This kubelet writes at once: three seconds are for one on a busy disk."""
    monkeypatch.setattr("ttdp.SETTLING", 0.5)


def sharing(**entry: Any) -> dict[str, Sharing]:
    """Setting: this resource is shared, without locks."""
    return {"sharing": Sharing(lock_dir="", resources=(SharedResource(**entry),))}


def reasons(daemon: RunningDaemon, resource: str) -> dict[str, str]:
    """Why IDs of a resource are not healthy."""
    session = daemon.sessions.get(resource)
    devices = session.listing.resource.devices if session else {}
    return {identifier: device.reason for identifier, device in devices.items() if device.reason}


def chips_of(kubelet: Kubelet, pod: str, container: str = "main") -> set[str]:
    """The PCI addresses that a container was told of."""
    return set(kubelet.allocation(pod, container).envs[ttdp.ADDRESSES].split(","))


async def train(kubelet: Kubelet) -> None:
    """A pod of this name runs, with a chip."""
    await kubelet.registered(P150)
    await kubelet.admit("train", "main", {P150: 1})
    await kubelet.running("train", "main")


async def offers(kubelet: Kubelet, resource: str, *healthy: str) -> None:
    """Wait until exactly these IDs are healthy."""
    await kubelet.wait_for(lambda: kubelet.healthy(resource) == {*healthy})


def ever_offered(kubelet: Kubelet, resource: str) -> set[str]:
    """Every ID of a resource that was ever healthy in a list."""
    lists = kubelet.find("list", resource)
    return {identifier for event in lists for identifier in event.fields["healthy_ids"]}


# -- another name for what a pod has ---------------------------------------------------------------

BEFORE: dict[str, Any] = {
    "resource_naming": "board",
    "unit": "chip",
    "device_id_strategy": "bdf",
    "resource_domain": DOMAIN,
    "sharing": Sharing(lock_dir=""),
}
CHANGES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str, int, int]] = {
    # before, what the pod asks for, after, what its chip is called then, IDs, of which are free
    "another naming": ({}, P300, {"resource_naming": "card"}, P300C, 4, 3),
    "another domain": ({}, P300, {"resource_domain": "example.org"}, "example.org/p300", 4, 3),
    "another id": ({}, P300, {"device_id_strategy": "asic"}, P300, 5, 3),
    "from an ordinal": ({"device_id_strategy": "index"}, P300, {}, P300, 5, 3),
    "chip to board": ({}, P300, {"unit": "board"}, f"{P300}-board", 2, 1),
    "board to chip": ({"unit": "board"}, f"{P300}-board", {}, P300, 4, 2),
    "to shared": ({}, P300, sharing(name="p300", replicas=2), P300, 9, 6),
    "from shared": (sharing(name="p300", replicas=2), P300, {}, P300, 5, 3),
    "renamed": (
        {},
        P300,
        sharing(name="p300", replicas=3, rename="third"),
        f"{DOMAIN}/third",
        12,
        9,
    ),
}


@pytest.mark.parametrize(
    ("how", "change"),
    [
        *(("a reload", change) for change in CHANGES),
        *(("a restart", change) for change in ("another naming", "another id", "to shared")),
        *(("both restarted", change) for change in ("another domain", "chip to board", "renamed")),
    ],
)
async def test_what_a_pod_has_is_not_offered_under_another_name(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, change: str, how: str
) -> None:
    """Withheld until the pod has ended, which is the reason; its own ID stays healthy."""
    before, old, after, new, _, free = CHANGES[change]
    for _ in range(2):
        node.add("p300c")
    settings = settings_of(node, directory, interval=FAST, **(BEFORE | before))
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(old)
        await kubelet.admit("train", "main", {old: 1})
        (mine,) = kubelet.allocated(old)
        if how == "a reload":
            daemon.reload(**(BEFORE | after))
            await nobody_else_gets_it(daemon, kubelet, old, mine, new, free)
            return
    if how == "both restarted":
        await kubelet.restart()
    settings = settings_of(node, directory, interval=FAST, **(BEFORE | after))
    async with RunningDaemon(node, settings) as daemon:
        await nobody_else_gets_it(daemon, kubelet, old, mine, new, free)


async def nobody_else_gets_it(
    daemon: RunningDaemon, kubelet: Kubelet, old: str, mine: str, new: str, free: int
) -> None:
    held = chips_of(kubelet, "train")
    await kubelet.registered(new)
    await kubelet.wait_for(lambda: len(kubelet.healthy(new) - {mine}) == free)
    await kubelet.wait_for(lambda: mine in kubelet.healthy(old))
    await until(lambda: any("held by default/train as" in r for r in reasons(daemon, new).values()))
    others = [f"other-{number}" for number in range(free)]
    for other in others:
        await kubelet.admit(other, "main", {new: 1})
        assert not chips_of(kubelet, other) & held
    with pytest.raises(AdmissionError):
        await kubelet.admit("unlucky", "main", {new: 1})
    kubelet.delete("train")
    await until(lambda: not reasons(daemon, new))
    await kubelet.wait_for(lambda: not kubelet.unhealthy(new))
    await kubelet.admit("heir", "main", {new: 1})
    assert chips_of(kubelet, "heir") & held


async def test_a_resource_of_which_only_pods_ids_are_left_ends_with_the_last_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A container of a resource that has gone could not start again."""
    node.add("p150a")
    daemon = await start(interval=FAST)
    await train(kubelet)
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    kubelet.crash("train", "main")
    await kubelet.running("train", "main")
    kubelet.delete("train")
    await until(lambda: daemon.sessions.keys() == {P150A})


async def test_an_ordinal_that_is_another_chips_now_stays_the_pods(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Under `index`, when two chips have swapped their numbers: as healthy as the pod's chip."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(device_id_strategy="index", interval=FAST)
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: "held by" in reasons(daemon, N150).get("1", ""))
    await offers(kubelet, N150, "0")
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})
    first.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {"0", "1"})
    first.thaw()
    kubelet.delete("train")
    await offers(kubelet, N150, "0", "1")


async def test_an_id_that_means_another_chip_by_now_is_not_allocated(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Refused when the kubelet asks anew, for a container that reuses an init container's."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(device_id_strategy="index", interval=FAST)
    await kubelet.registered(N150)
    await kubelet.admit("train", "prepare", {N150: 1}, init=True)
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: "held by" in reasons(daemon, N150).get("1", ""))
    with pytest.raises(AdmissionError, match="no longer gives it"):
        await kubelet.admit("train", "main", {N150: 1})


async def test_an_asic_id_that_comes_late_is_not_offered_while_a_pod_has_the_chip(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The chip has another ID from then on, and is the same chip."""
    (chip,) = node.add("n150", firmware=False)
    daemon = await start(device_id_strategy="asic", interval=FAST)
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    chip.speak()
    name = f"wormhole-{chip.facts.telemetry['tt_asic_id']}"
    await until(lambda: "held by" in reasons(daemon, N150).get(name, ""))
    assert name not in ever_offered(kubelet, N150), "not for a moment"
    kubelet.delete("train")
    await offers(kubelet, N150, name)


@pytest.mark.parametrize("policy", ["none", "best-effort", "single-numa-node"])
@pytest.mark.parametrize("what", ["a card is missing", "another strategy", "sharing"])
async def test_a_kubelet_that_starts_finds_every_id_that_a_pod_has(
    node: SimulatedNode, directory: Path, what: str, policy: Any
) -> None:
    """After a reboot, whatever has changed. One of 1.35 or later would crash otherwise."""
    chip, _ = node.add("n150", numa_node=0) + node.add("n150", numa_node=1)
    every_change: dict[str, dict[str, Any]] = {
        "a card is missing": {},
        "another strategy": {"device_id_strategy": "asic"},
        "sharing": {**sharing(name="n150", replicas=2)},
    }
    changes = every_change[what]
    async with kubelet_of(node, directory, version=(1, 37), policy=policy) as kubelet:
        async with RunningDaemon(node, settings_of(node, directory)):
            await kubelet.registered(N150)
            await kubelet.admit("train", "main", {N150: 1})
            (mine,) = kubelet.allocated(N150)
        await kubelet.power_cut()
        if what == "a card is missing":
            node.chip(mine).vanish()
        async with RunningDaemon(node, settings_of(node, directory, interval=FAST, **changes)):
            await kubelet.start()
            await kubelet.registered(N150)
            ids = kubelet.healthy(N150) | kubelet.unhealthy(N150)
            assert mine in ids
            assert (mine in kubelet.unhealthy(N150)) is (what == "a card is missing")
            assert kubelet.violations == []
        assert chip


# -- when the API server is late, or nobody answers ------------------------------------------------


async def test_a_kubelet_without_its_api_server_changes_nothing(
    node: SimulatedNode, kubelet: Kubelet, directory: Path
) -> None:
    """Kubelet and daemon start anew with another configuration, and no pod is named for long."""
    (chip,) = node.add("p150a")
    async with RunningDaemon(node, settings_of(node, directory)):
        await kubelet.registered(P150)
        await kubelet.admit("train", "main", {P150: 1})
    kubelet.api_server_away()
    await kubelet.restart()
    settings = settings_of(node, directory, interval=FAST, resource_naming="card")
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(P150A)
        await kubelet.wait_for(lambda: len(kubelet.find("asked")) > 10)
        with pytest.raises(AdmissionError):
            await kubelet.admit("other", "main", {P150A: 1}, static=True)
        assert f"held by pod {kubelet.uid('train')}" in reasons(daemon, P150A)[chip.bdf]
        await kubelet.api_server_back()
        await until(lambda: "default/train" in reasons(daemon, P150A)[chip.bdf])
    assert not ever_offered(kubelet, P150A)


async def test_an_init_containers_chip_is_its_pods(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """No API names it; its entry stays as long as the pod, which reuses the chip."""
    node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("train", "prepare", {P150: 1}, init=True)
    await kubelet.admit("train", "main", {P150: 1})
    await kubelet.running("train", "main")
    assert chips_of(kubelet, "train") == chips_of(kubelet, "train", "prepare")
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await until(lambda: reasons(daemon, P150A))
    kubelet.delete("train")
    await kubelet.wait_for(lambda: kubelet.healthy(P150A))


@pytest.mark.parametrize("how", ["slow", "refused", "garbage", "missing"])
async def test_nothing_depends_on_the_pod_resources_api(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """A reload withholds what a pod has, its end is seen; one line says that names are missing."""
    (chip,) = node.add("p150a")
    served = None if how == "missing" else directory.parent / "pod-resources/kubelet.sock"
    async with kubelet_of(node, directory, pod_resources=served) as kubelet:
        kubelet.hang(30 if how == "slow" else 0, method="List", times=999)
        if how == "refused":
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            kubelet.heal()
            kubelet.refuse_with(code, "rejected by rate limit", times=999, method="List")
        elif how == "garbage":
            kubelet.heal()
            kubelet.garble(times=999)
        settings = settings_of(node, directory, interval=FAST)
        async with RunningDaemon(node, settings) as daemon:
            await kubelet.registered(P150)
            await kubelet.admit("train", "main", {P150: 1})
            daemon.reload(resource_naming="card")
            await kubelet.registered(P150A)
            await until(lambda: chip.bdf in reasons(daemon, P150A))
            assert not ever_offered(kubelet, P150A)
            kubelet.remove_pod("train")
            await offers(kubelet, P150A, chip.bdf)
    assert sum("does not tell the names" in record.message for record in caplog.records) == 1


# -- when a pod has ended --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["cgroupfs", "systemd", "v1"])
async def test_a_forced_deletion_ends_with_the_containers(
    node: SimulatedNode, directory: Path, layout: Any
) -> None:
    """Its entry goes at once, its cgroup when the last container has ended: then it is over."""
    (chip,) = node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, interval=FAST))
    async with kubelet_of(node, directory, layout=layout) as kubelet, running as daemon:
        await train(kubelet)
        daemon.reload(resource_naming="card")
        await kubelet.registered(P150A)
        kubelet.force_delete("train")
        await kubelet.wait_for(lambda: not kubelet.allocated(P150))
        await kubelet.wait_for(lambda: len(kubelet.find("asked")) > 10)
        assert not ever_offered(kubelet, P150A)
        kubelet.end("train")
        await offers(kubelet, P150A, chip.bdf)


async def test_a_daemon_that_was_killed_knows_of_a_forced_deletion_before(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """What the checkpoint no longer has is in its own memory."""
    (chip,) = node.add("p150a")
    before = settings_of(node, directory, interval=FAST, state_dir=str(short_tmp))
    async with RunningDaemon(node, before):
        await train(kubelet)
        memory = short_tmp / "state.json"
        await until(lambda: json.loads(memory.read_text())["custody"]["cgroups"])
    kubelet.force_delete("train")
    kubelet.manager.prune()
    kubelet.manager.write_checkpoint_now()
    after = settings_of(
        node, directory, interval=FAST, state_dir=str(short_tmp), resource_naming="card"
    )
    async with RunningDaemon(node, after) as daemon:
        await kubelet.registered(P150A)
        assert "held by" in reasons(daemon, P150A)[chip.bdf]
        kubelet.end("train")
        await offers(kubelet, P150A, chip.bdf)


async def test_a_completed_pod_whose_entry_stays_has_ended(
    node: SimulatedNode, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old kubelets keep the entry of the pod that they admitted last; its cgroup has gone."""
    monkeypatch.setattr("ttdp.LINGERING", 0.5)
    (chip,) = node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, interval=FAST))
    async with kubelet_of(node, directory, version=(1, 31)) as kubelet, running as daemon:
        await kubelet.registered(P150)
        await kubelet.admit("job", "main", {P150: 1})
        await kubelet.running("job", "main")
        await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
        daemon.reload(resource_naming="card")
        await kubelet.registered(P150A)
        kubelet.complete("job")
        await offers(kubelet, P150A, chip.bdf)
        assert kubelet.uid("job") in (directory / CHECKPOINT).read_text()


async def test_an_answer_that_never_appears_is_dropped_after_a_writing_of_our_own(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """It counts before that: a kubelet may not have written it yet."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    async with grpc.aio.insecure_channel(
        f"unix:{directory}/{plugin_sockets(directory)[0]}"
    ) as channel:
        request = pb.ContainerAllocateRequest(devices_ids=[chip.bdf])
        stub = rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        await stub.Allocate(pb.AllocateRequest(container_requests=[request]))
    daemon.reload(resource_naming="card")
    assert "a pod that is being admitted" in reasons(daemon, P150A)[chip.bdf]
    await offers(kubelet, P150A, chip.bdf)


async def test_writings_that_overtake_each_other_free_no_chip(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """In bursts of messages the file lacks for a moment what it had, or should have."""
    for _ in range(4):
        node.add("p150a")
    kubelet.overtake()
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    for number in range(4):
        await kubelet.admit(f"pod-{number}", "main", {P150: 1})
        for session in daemon.sessions.values():
            for _ in range(10):
                session.listing.repeat()
                await asyncio.sleep(0)
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await kubelet.wait_for(lambda: len(kubelet.find("asked")) > 5)
    assert not ever_offered(kubelet, P150A)


async def test_a_chip_is_offered_within_three_polls_of_its_pods_end(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet forgets when it is asked, and writes when it gets a list: each poll does both."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=FAST)
    await train(kubelet)
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
    asked = len(kubelet.find("asked"))
    kubelet.delete("train")
    await offers(kubelet, P150A, chip.bdf)
    assert len(kubelet.find("asked")) - asked <= 3


async def test_at_rest_nobody_is_asked_and_nothing_is_sent(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """While nothing is withheld and every pod has a name, polls cost the kubelet nothing."""
    node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("train", "main", {P150: 1})
    await until(lambda: daemon.daemon.registrar.custody.names)
    asked, lists = len(kubelet.find("asked")), len(kubelet.find("list"))
    await asyncio.sleep(5 * FAST)
    assert (len(kubelet.find("asked")), len(kubelet.find("list"))) == (asked, lists)


# -- a checkpoint that cannot be understood --------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "truncated", "garbage", "not utf-8", "deep"])
async def test_a_checkpoint_of_garbage_withholds_what_is_new_and_is_said_once(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    how: Any,
) -> None:  # fmt: skip
    """What was offered stays as it is; the kubelet's next writing mends it."""
    first, second = node.add("p150a") + node.add("p150a")
    daemon = await start(interval=3600)
    await kubelet.registered(P150)
    await offers(kubelet, P150, first.bdf, second.bdf)
    await kubelet.admit("train", "main", {P150: 1})
    kubelet.corrupt(how)
    await until(lambda: daemon.daemon.registrar.custody.unreadable)
    daemon.reload(device_id_strategy="asic")
    assert {*reasons(daemon, P150).values()} > {"kubelet_internal_checkpoint cannot be understood"}
    await until(lambda: not daemon.daemon.registrar.custody.unreadable)
    await kubelet.wait_for(lambda: len(kubelet.healthy(P150)) == 2)
    said = [record for record in caplog.records if "cannot be understood" in record.message]
    assert len(said) == 1 and not said[0].exc_info


def test_a_grant_of_before_a_restart_is_not_lost_once_it_is_filed(tmp_path: Path) -> None:
    """The next grant of the same ID is as good as any."""
    memory = {"allocations": [[P150, ["a"], ["0000:01:00.0"], "", ""]]}
    custody = ttdp.Custody(str(tmp_path), str(tmp_path / "sys"), memory)
    content = {"Data": {"PodDeviceEntries": [ENTRY], "RegisteredDevices": {}}}
    (tmp_path / CHECKPOINT).write_text(json.dumps(content))
    custody.refresh((), lambda path: None, 100)
    assert [each.pod for each in custody.allocations(100)] == ["uid"] and not custody.lost


@pytest.mark.parametrize("how", ["missing", "garbage", "empty"])
@pytest.mark.parametrize("daemon_lives", [True, False])
async def test_a_kubelet_that_has_lost_its_checkpoint_gives_nobody_what_a_pod_has(
    node: SimulatedNode, directory: Path, short_tmp: Path, how: Any, daemon_lives: bool
) -> None:
    """It takes the ID for free, but the pod was not deleted: it can open its chip at any time."""
    node.add("p150a")
    kubelet = kubelet_of(node, directory, version=(1, 31))
    settings = settings_of(node, directory, interval=FAST, state_dir=str(short_tmp))
    async with kubelet, RunningDaemon(node, settings) as daemon:
        await train(kubelet)
        await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
        if not daemon_lives:
            await daemon.__aexit__()
        await kubelet.kill()
        kubelet.corrupt(how)
        await asyncio.sleep(2 * FAST)
        await kubelet.start()
        if not daemon_lives:
            daemon = await RunningDaemon(node, settings).__aenter__()
        await kubelet.registered(P150)
        await offers(kubelet, P150)
        assert all("held by" in reason for reason in reasons(daemon, P150).values())
        with pytest.raises(AdmissionError):
            await kubelet.admit("other", "main", {P150: 1})
        kubelet.delete("train")
        await kubelet.wait_for(lambda: len(kubelet.healthy(P150)) == 1)
        await kubelet.admit("next", "main", {P150: 1})
        if not daemon_lives:
            await daemon.__aexit__()


async def test_a_checkpoint_that_vanishes_changes_nothing(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet that starts without it knows of nobody, while the pod runs on."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=FAST)
    await train(kubelet)
    await until(lambda: daemon.daemon.registrar.custody.cgroups.seen)
    await kubelet.kill()
    kubelet.corrupt("missing")
    daemon.reload(resource_naming="card")
    await kubelet.start()
    await kubelet.registered(P150A)
    assert "held by" in reasons(daemon, P150A)[chip.bdf]
    await kubelet.wait_for(lambda: len(kubelet.find("asked")) > 10)
    assert not ever_offered(kubelet, P150A)


ENTRY: dict[str, Any] = {
    "PodUID": "uid", "ContainerName": "main", "ResourceName": P150, "DeviceIDs": {"-1": ["a"]},
    "AllocResp": base64.b64encode(
        pb.ContainerAllocateResponse(envs={ttdp.ADDRESSES: "0000:01:00.0"}).SerializeToString()
    ).decode(),
}  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def parsed(entries: object, registered: object = None, *ours: str) -> ttdp.Checkpoint:
    content = json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}})
    return ttdp.parse_checkpoint(content.encode(), ours, {"/dev/tenstorrent/3": "0000:03:00.0"}.get)


def test_a_checkpoint_says_who_has_what() -> None:
    """Allocations with the addresses in our answer; a device on two NUMA nodes stands twice."""
    found = parsed([{**ENTRY, "DeviceIDs": {"0": ["a", "b"], "1": ["b"]}}], {P150: ["a"]})
    chips = frozenset({"0000:01:00.0"})
    assert found.allocations == {ttdp.Allocation(P150, frozenset("ab"), chips, "uid", "main")}
    assert found.registered == {P150: {"a"}}


def test_entries_of_other_plugins_are_left_out() -> None:
    """But for those under a name of ours, whose chips are those of their nodes."""
    answer = pb.ContainerAllocateResponse()
    answer.devices.add(host_path="/dev/tenstorrent/3", container_path="/dev/x", permissions="rw")
    foreign = {**ENTRY, "AllocResp": base64.b64encode(answer.SerializeToString()).decode()}
    assert not parsed([{**foreign, "ResourceName": "example.com/gpu"}], {}, P150).allocations
    (allocation,) = parsed([foreign], {}, P150).allocations
    assert allocation.chips == {"0000:03:00.0"}


@hypothesis_settings(deadline=None, max_examples=50)
@given(st.sampled_from(sorted(ENTRY)), anything)
def test_a_value_of_any_type_in_any_place_is_no_traceback(key: str, value: Any) -> None:
    """It is a checkpoint, or it is said not to be one."""
    for entries, registered in (([{**ENTRY, key: value}], {}), (value, {}), ([], value)):
        try:
            found = parsed(entries, registered)
        except ValueError:
            continue
        assert all(isinstance(text, str) for each in found.allocations for text in each.ids)


@pytest.mark.parametrize(
    ("seconds", "has_cgroup", "counts"), [(0.1, False, True), (10, False, False), (10, True, True)]
)
def test_an_entry_of_a_pod_that_was_never_started_ends_with_it(
    tmp_path: Path, seconds: float, has_cgroup: bool, counts: bool
) -> None:
    """A pod that is refused after a reboot; but a new entry can be missing for a moment."""
    custody = ttdp.Custody(str(tmp_path), str(tmp_path / "sys"), {})
    file = tmp_path / CHECKPOINT
    entry = {**ENTRY, "PodUID": "0b6cd6e4-9fd5-4b5c-8d4e-4a3a5f6f2d61"}
    file.write_text(json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}}))
    custody.refresh((), lambda path: None, 100)
    if has_cgroup:
        (tmp_path / f"sys/fs/cgroup/kubepods/pod{entry['PodUID']}").mkdir(parents=True)
    file.write_text(json.dumps({"Data": {"PodDeviceEntries": None, "RegisteredDevices": None}}))
    custody.refresh((), lambda path: None, 100 + seconds)
    assert bool(custody.allocations(100 + seconds)) is counts


# -- the last gate: before each start of a container -----------------------------------------------


async def test_a_container_waits_for_the_end_of_the_pod_that_has_its_chip_open(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet gives away the device of a pod that was deleted by force, and runs on."""
    caplog.set_level("INFO")
    node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("first", "main", {P150: 1})
    await kubelet.running("first", "main")
    await until(lambda: daemon.daemon.registrar.custody.names)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    await until(lambda: "waits for the end of default/first" in caplog.text)
    assert not kubelet.find("running", since=kubelet.find("deleted")[0].at)
    kubelet.end("first")
    await kubelet.running("second", "main")
    assert not kubelet.find("not-started")


async def test_a_checkpoint_that_goes_back_for_a_moment_lets_nobody_in(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """An older writing lands last: it has the first pod still, and the second not yet."""
    caplog.set_level("INFO")
    node.add("p150a")
    await start(interval=5)
    await kubelet.registered(P150)
    await kubelet.admit("first", "main", {P150: 1})
    await kubelet.running("first", "main")
    before = kubelet.file.path.read_bytes()
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    await until(lambda: "waits for the end of" in caplog.text)
    kubelet.file.corrupt(before)
    await asyncio.sleep(5 * FAST)
    assert not kubelet.find("running", since=kubelet.find("deleted")[0].at)
    kubelet.end("first")
    await kubelet.running("second", "main")


async def test_a_container_that_has_waited_long_is_tried_again_by_the_kubelet(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the pod; nothing fails for good."""
    monkeypatch.setattr("ttdp.GATE_PATIENCE", 0.2)
    node.add("p150a")
    daemon = await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("first", "main", {P150: 1})
    await kubelet.running("first", "main")
    await until(lambda: daemon.daemon.registrar.custody.names)
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    await kubelet.wait_for(lambda: len(kubelet.find("not-started")) > 1)
    assert "default/first has the device open" in kubelet.find("not-started")[0].fields["message"]
    kubelet.end("first")
    await kubelet.running("second", "main")


async def test_where_the_driver_does_not_tell_the_cgroup_counts(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A driver before 2.5 shows nobody's PIDs."""
    (chip,) = node.add("p150a")
    await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("first", "main", {P150: 1})
    await kubelet.running("first", "main")
    (node.root / f"proc/driver/tenstorrent/{chip.ordinal}/pids").unlink()
    kubelet.force_delete("first")
    await kubelet.admit("second", "main", {P150: 1})
    await asyncio.sleep(5 * FAST)
    assert not kubelet.find("running", since=kubelet.find("deleted")[0].at)
    kubelet.end("first")
    await kubelet.running("second", "main")


async def test_others_that_have_a_chip_open_hinder_nobody(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Processes of the host, a pod that monitors every card, and fellow users of a share."""
    chip, _ = node.add("p150a") + node.add("n150")
    node.start_process(70, "0::/user.slice/session-1.scope", [str(chip.device_node)])
    node.start_process(
        71,
        "0::/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/x",
        [str(chip.device_node)],
    )
    await start(interval=FAST, **sharing(name="n150", replicas=2))
    await kubelet.registered(P150)
    await kubelet.registered(N150)
    for pod, resource in (("alone", P150), ("one", N150), ("other", N150)):
        await kubelet.admit(pod, "main", {resource: 1})
        await kubelet.running(pod, "main")


async def test_a_container_that_starts_again_does_not_wait_for_itself(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Its pod's other containers may have the chip open, too."""
    node.add("p150a")
    await start(interval=FAST)
    await kubelet.registered(P150)
    await kubelet.admit("train", "prepare", {P150: 1}, init=True)
    await kubelet.admit("train", "main", {P150: 1})
    await kubelet.running("train", "main")
    for _ in range(3):
        crashed = time.monotonic()
        kubelet.crash("train", "main")
        await kubelet.wait_for(functools.partial(kubelet.find, "running", since=crashed))


# -- one daemon, and a registration that is true ---------------------------------------------------


async def test_a_file_that_is_late_is_no_other_plugin(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it has the IDs that we listed before for longer than a moment."""
    monkeypatch.setattr("ttdp.RIVAL_PATIENCE", 0.2)
    (chip,) = node.add("n150")
    daemon = await start(interval=FAST)
    await offers(kubelet, N150, chip.bdf)
    before = kubelet.file.path.read_bytes()
    daemon.reload(device_id_strategy="index")
    await offers(kubelet, N150, str(chip.ordinal))
    for _ in range(3):
        kubelet.file.corrupt(before)
        await until(lambda: kubelet.file.path.read_bytes() != before)
    assert daemon.sessions[N150].registrations == 1


class Rival(rpc.DevicePluginServicer):
    """Another plugin, with a device of its own."""

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: Any
    ) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        yield pb.ListAndWatchResponse(devices=[pb.Device(ID="theirs", health="Healthy")])
        await asyncio.sleep(3600)


@contextlib.asynccontextmanager
async def rival(kubelet: Kubelet, resource: str) -> AsyncIterator[None]:
    """Have another plugin register a resource."""
    server = grpc.aio.server()
    rpc.add_DevicePluginServicer_to_server(Rival(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"unix:{kubelet.directory}/rival.sock")
    await server.start()
    request = pb.RegisterRequest(version="v1beta1", endpoint="rival.sock", resource_name=resource)
    async with grpc.aio.insecure_channel(f"unix:{kubelet.socket}") as channel:
        await rpc.RegistrationStub(channel).Register(request)  # type: ignore[no-untyped-call]
    yield
    await server.stop(None)


@pytest.mark.parametrize("version", [(1, 33), (1, 36), (1, 37)])
async def test_another_plugin_under_our_name_is_seen_and_registered_over(
    node: SimulatedNode, start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture,
    version: tuple[int, int],
) -> None:  # fmt: skip
    """Our stream stays open and silent then; the kubelet's file tells who it takes for healthy."""
    (chip,) = node.add("n150")
    await start(interval=FAST)
    async with kubelet_of(node, directory, version=version) as kubelet:
        await kubelet.registered(N150)
        await offers(kubelet, N150, chip.bdf)
        async with rival(kubelet, N150):
            await offers(kubelet, N150, "theirs")
            await offers(kubelet, N150, chip.bdf)
            assert "another plugin has registered this name" in caplog.text
            await kubelet.admit("train", "main", {N150: 1})
            assert chips_of(kubelet, "train") == {chip.bdf}
