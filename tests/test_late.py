"""What comes late, while something else is under way, or is there already."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon, kubelet_of, plugin_sockets
from tests.test_custody import DOMAIN, FAST, N150, P150, P150A, offers, reasons, sharing
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that has not written by now never will."""
    monkeypatch.setattr("ttdp.SETTLING", 0.5)


async def test_a_cgroup_that_was_seen_is_known_after_a_restart(
    node: SimulatedNode, directory: Path, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no API tells names: an old kubelet keeps the entry of a pod that has completed."""
    monkeypatch.setattr("ttdp.LINGERING", 0.5)
    (chip,) = node.add("p150a")
    common: dict[str, Any] = {
        "interval": FAST,
        "state_dir": str(short_tmp),
        "pod_resources_socket": str(short_tmp / "nobody.sock"),
    }
    async with kubelet_of(node, directory, version=(1, 31)) as kubelet:
        async with RunningDaemon(node, settings_of(node, directory, **common)) as daemon:
            await kubelet.registered(P150)
            await kubelet.admit("job", "main", {P150: 1})
            await kubelet.running("job", "main")
            memory = short_tmp / "state.json"
            await until(lambda: json.loads(memory.read_text())["custody"]["cgroups"])
        kubelet.complete("job")
        after = settings_of(node, directory, resource_naming="card", **common)
        async with RunningDaemon(node, after) as daemon:
            await kubelet.registered(P150A)
            await until(lambda: not reasons(daemon, P150A))
            await offers(kubelet, P150A, chip.bdf)


@pytest.mark.parametrize("after", ["unshared", "renamed"])
async def test_fellow_users_do_not_wait_for_each_other_after_a_reload(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, after: str
) -> None:
    """What was shared on purpose when it was given stays so while its pods run."""
    node.add("n150")
    daemon = await start(interval=FAST, **sharing(name="n150", replicas=2))
    await kubelet.registered(N150)
    for pod in ("one", "other"):
        await kubelet.admit(pod, "main", {N150: 1})
        await kubelet.running(pod, "main")
    changes: dict[str, Any] = {
        "unshared": {"sharing": Sharing(lock_dir="")},
        "renamed": sharing(name="n150", replicas=2, rename="half"),
    }
    daemon.reload(**changes[after])
    if after == "renamed":
        await kubelet.registered(f"{DOMAIN}/half")
    kubelet.crash("one", "main")
    await kubelet.running("one", "main")


async def test_locks_of_a_share_that_is_no_more_are_there_after_a_reboot(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """A pod that goes on with the old answer mounts them, as somebody who is not root."""
    node.add("n150")
    locks = short_tmp / "shm"
    shared = Sharing(lock_dir=str(locks), resources=(SharedResource("n150", 2),))
    async with RunningDaemon(node, settings_of(node, directory, interval=FAST, sharing=shared)):
        await kubelet.registered(N150)
        await kubelet.admit("one", "main", {N150: 1})
        mounts = kubelet.allocation("one", "main").mounts
        (mount,) = (each for each in mounts if each.container_path == "/dev/shm")
    (locks / "n150").rmdir()  # a reboot empties /run
    after = settings_of(node, directory, interval=FAST, sharing=Sharing(lock_dir=str(locks)))
    async with RunningDaemon(node, after) as daemon:
        await kubelet.registered(N150)
        await until(lambda: daemon.notified("READY=1"))
        assert Path(mount.host_path).is_dir()
        assert Path(mount.host_path).stat().st_mode & 0o7777 == 0o1777


async def test_the_cdi_file_is_true_when_chips_are_offered(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """Also while the daemon waits for a chip that its driver has not bound."""
    first, second = node.add("n150") + node.add("n150")
    (third,) = node.add("n150")
    cdi = short_tmp / "cdi"
    cdi.mkdir()
    settings = settings_of(
        node, directory, interval=FAST, cdi_dir=str(cdi), device_list_strategy="cdi"
    )
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(N150)
        await until(lambda: daemon.notified("READY=1"))

    def is_true() -> bool:
        nodes = ttdp.cdi_nodes((cdi / ttdp.CDI_FILE).read_text())
        return nodes == {chip.bdf: str(chip.device_node) for chip in (first, second)}

    third.unbind()
    node.swap_ordinals(first.bdf, second.bdf)
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(N150)
        await kubelet.admit("one", "main", {N150: 1})
        assert is_true()
        node.swap_ordinals(first.bdf, second.bdf)
        await until(is_true)
        assert not daemon.notified("READY=1")


async def test_of_two_daemons_that_wait_for_a_directory_one_serves(
    node: SimulatedNode, directory: Path
) -> None:
    """The other one ends; each would offer the chip under a name of its own."""
    node.add("p150a")
    one = RunningDaemon(node, settings_of(node, directory, interval=5))
    async with one:
        other = RunningDaemon(
            node, settings_of(node, directory, interval=5, resource_naming="card")
        )
        async with other:
            await until(lambda: one.notified("READY=1") and other.notified("READY=1"))
            async with kubelet_of(node, directory) as kubelet:
                await until(lambda: one._run.done() or other._run.done())
                await kubelet.wait_for(lambda: kubelet.capacity())
                assert len(kubelet.capacity()) == 1


async def test_an_allocate_under_way_at_a_reload_gives_nothing_twice(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, monkeypatch: Any
) -> None:
    """It waits for a link while its resource ends."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=5)
    await kubelet.registered(P150)
    asked, waits = asyncio.Event(), asyncio.Event()

    async def links(*_: object) -> None:
        asked.set()
        await waits.wait()

    monkeypatch.setattr("ttdp.wait_for_links", links)
    request = pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=[chip.bdf])]
    )

    async def allocate(path: str) -> bool:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            try:
                await rpc.DevicePluginStub(channel).Allocate(request)  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError:
                return False
            return True

    (old,) = plugin_sockets(directory)
    first = asyncio.create_task(allocate(f"{directory}/{old}"))
    await asyncio.wait_for(asked.wait(), PATIENCE)
    daemon.reload(resource_naming="card")
    waits.set()
    got_first = await first
    await kubelet.registered(P150A)
    (new,) = set(plugin_sockets(directory)) - {old}
    assert not (got_first and await allocate(f"{directory}/{new}"))


@pytest.mark.parametrize("change", ["id", "domain"])
async def test_labels_count_devices_that_exist(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path, change: str
) -> None:
    """Not IDs that pods have beside those of the configuration."""
    for _ in range(3):
        node.add("n150")
    features = short_tmp / "features"
    features.mkdir()
    settings = settings_of(node, directory, interval=FAST, labels_dir=str(features))
    async with RunningDaemon(node, settings):
        await kubelet.registered(N150)
        await kubelet.admit("one", "main", {N150: 1})
    after = {"id": {"device_id_strategy": "asic"}, "domain": {"resource_domain": "example.org"}}
    settings = settings_of(
        node, directory, interval=FAST, labels_dir=str(features), **after[change]
    )
    async with RunningDaemon(node, settings) as daemon:
        await until(lambda: daemon.notified("READY=1"))
        assert "n150.count=3\n" in (features / ttdp.LABELS_FILE).read_text()


async def test_another_plugins_pod_keeps_a_chip_that_comes_late(
    node: SimulatedNode, kubelet: Kubelet, directory: Path
) -> None:
    """Its answer names a node only, and the checkpoint is as old as before when the chip comes."""
    _, second = node.add("n150") + node.add("n150")
    path = str(second.device_node)
    answer = pb.ContainerAllocateResponse()
    answer.devices.add(container_path="/dev/tenstorrent/1", host_path=path, permissions="rw")
    uid = "11111111-2222-3333-4444-555555555555"
    entry = {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": N150,
        "DeviceIDs": {"-1": ["tt1"]},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    (node.root / f"sys/fs/cgroup/kubepods/pod{uid}").mkdir(parents=True)
    ordinal = second.ordinal
    second.vanish()
    settings = settings_of(node, directory, interval=FAST)
    await kubelet.stop()
    data = {"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}, "Checksum": 1}
    (directory / ttdp.CHECKPOINT).write_text(json.dumps(data))
    async with RunningDaemon(node, settings) as daemon:
        await until(lambda: daemon.notified("READY=1"))
        second.come_back(ordinal)
        await until(lambda: second.bdf in daemon.sessions[N150].listing.resource.devices)
        assert second.bdf in reasons(daemon, N150)


async def test_a_pods_id_is_listed_from_the_start_though_every_chip_is_missing(
    node: SimulatedNode, kubelet: Kubelet, directory: Path
) -> None:
    """After a reboot, before the kubelet asks."""
    (chip,) = node.add("p150a")
    async with RunningDaemon(node, settings_of(node, directory, interval=FAST)):
        await kubelet.registered(P150)
        await kubelet.admit("train", "main", {P150: 1})
    await kubelet.stop()
    chip.vanish()
    settings = settings_of(node, directory, interval=5)
    async with RunningDaemon(node, settings) as daemon:
        await until(lambda: daemon.notified("READY=1"))
        assert chip.bdf in reasons(daemon, P150)


async def test_a_pod_that_has_ended_unseen_holds_nothing_after_a_restart(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path
) -> None:
    """It was too short for a poll to see its cgroup; the kubelet's file lacks it by now."""
    node.add("p150a")
    settings = settings_of(node, directory, interval=60, state_dir=str(short_tmp))
    async with RunningDaemon(node, settings):
        await kubelet.registered(P150)
        await kubelet.admit("short", "main", {P150: 1})
        await kubelet.running("short", "main")
    kubelet.complete("short")
    kubelet.manager.prune()
    kubelet.manager.write_checkpoint_now()
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(P150)
        assert not reasons(daemon, P150)
        await kubelet.admit("next", "main", {P150: 1})


async def test_a_kubelet_that_writes_during_the_start_gets_no_list_of_some_devices(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """Nothing is listed before each chip has answered, or has had the time to."""
    quick, slow = node.add("n150") + node.add("n150")
    slow.block()
    checkpoint = directory / ttdp.CHECKPOINT
    content = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": {}}, "Checksum": 0}
    checkpoint.write_text(json.dumps(content))
    daemon = await start(interval=3600)
    await until(lambda: daemon.daemon.monitor.fleet.listed)
    checkpoint.rename(directory / ".1")
    (directory / ".1").rename(checkpoint)
    await kubelet.wait_for(lambda: kubelet.find("list", N150))
    listed = kubelet.find("list", N150)[0].fields
    assert {*listed["healthy_ids"], *listed["unhealthy_ids"]} == {quick.bdf, slow.bdf}
    slow.unblock()
