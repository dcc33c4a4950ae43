"""One chip, one owner: what a pod holds is nobody else's, whatever it is called by now."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import StartDaemon, plugin_sockets
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

DOMAIN = "tenstorrent.com"
P300, N150 = f"{DOMAIN}/p300", f"{DOMAIN}/n150"


def sharing(**entry: Any) -> dict[str, Sharing]:
    """Setting: this resource is shared, without locks."""
    return {"sharing": Sharing(lock_dir="", resources=(SharedResource(**entry),))}


def unhealthy_for(daemon: RunningDaemon, resource: str) -> dict[str, str]:
    """Why devices of a resource are not healthy, by ID."""
    session = daemon.daemon.sessions.get(resource)
    devices = session.plugin.resource.distinct if session else []
    return {device.identifier: device.reason for device in devices if device.reason}


def chips_of(kubelet: Kubelet, pod: str) -> set[str]:
    """The PCI addresses that a pod's container was told of."""
    held = kubelet._held[pod]["main"].values()
    return {bdf for one in held for bdf in one.answer.envs["TT_DEVICE_PLUGIN_DEVICES"].split(",")}


async def settled(daemon: RunningDaemon, kubelet: Kubelet, resource: str) -> None:
    """The kubelet has the resource, and the daemon waits for no answer."""
    await kubelet.registered(resource)
    await until(lambda: ttdp.ASKING not in unhealthy_for(daemon, resource).values())
    await kubelet.wait_for(
        lambda: len(kubelet.healthy(resource)) + len(kubelet.unhealthy(resource)) == kubelet.capacity()[resource]
    )


BEFORE: dict[str, Any] = {"resource_naming": "board", "unit": "chip", "device_id_strategy": "bdf",
                          "resource_domain": DOMAIN, "sharing": Sharing(lock_dir="")}  # fmt: skip
CHANGES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str, int, int]] = {
    # before, the resource that the pod asks for, after, what its chip is called then, devices, of which stay free
    "another naming": ({}, P300, {"resource_naming": "card"}, f"{DOMAIN}/p300c", 4, 3),
    "another domain": ({}, P300, {"resource_domain": "example.org"}, "example.org/p300", 4, 3),
    "another id": ({}, P300, {"device_id_strategy": "index"}, P300, 4, 3),
    "from an ordinal": ({"device_id_strategy": "index"}, P300, {"device_id_strategy": "asic"}, P300, 4, 3),
    "from an asic": ({"device_id_strategy": "asic"}, P300, {"device_id_strategy": "index"}, P300, 4, 3),
    "chip to board": ({}, P300, {"unit": "board"}, f"{P300}-board", 2, 1),
    "board to chip": ({"unit": "board"}, f"{P300}-board", {"unit": "chip"}, P300, 4, 2),
    "to shared": ({}, P300, sharing(name="p300", replicas=2), P300, 8, 6),
    "from shared": (sharing(name="p300", replicas=2), P300, {"sharing": Sharing()}, P300, 4, 3),
    "to a renamed share": ({}, P300, sharing(name="p300", replicas=3, rename="third"), f"{DOMAIN}/third", 12, 9),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["a reload", "a restart"])
async def test_what_a_pod_holds_is_not_offered_under_another_name(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path, caplog: pytest.LogCaptureFixture,
    change: str, how: str,
) -> None:  # fmt: skip
    """Unhealthy, with that pod as the reason, until it ends; then offered within a poll. Nobody gets it in between."""
    before, old, after, new, devices, free = CHANGES[change]
    for _ in range(2):
        node.add("p300c")
    settings = settings_of(node, directory, state_dir=str(short_tmp), **(BEFORE | before))
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(old)
        await kubelet.admit("train", "main", {old: 1})
        held = chips_of(kubelet, "train")
        if how == "a reload":
            daemon.reload(**(BEFORE | before | after))
            await let_go(daemon, kubelet, new, devices, free, held, caplog)
    if how == "a restart":
        settings = settings_of(node, directory, state_dir=str(short_tmp), **(BEFORE | before | after))
        async with RunningDaemon(node, settings) as daemon:
            await let_go(daemon, kubelet, new, devices, free, held, caplog)


async def let_go(
    daemon: RunningDaemon, kubelet: Kubelet, new: str, devices: int, free: int, held: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Whoever comes while the pod `train` holds chips gets none of them; when it ends they are there again."""
    await settled(daemon, kubelet, new)
    await kubelet.wait_for(lambda: len(kubelet.healthy(new)) == free and len(kubelet.unhealthy(new)) == devices - free)
    assert all("held by default/train as " in reason for reason in unhealthy_for(daemon, new).values())
    for number in range(free):
        await kubelet.admit(f"other-{number}", "main", {new: 1})
        assert not chips_of(kubelet, f"other-{number}") & held
    with pytest.raises(AdmissionError):
        await kubelet.admit("unlucky", "main", {new: 1})
    assert any("held by default/train" in record.message for record in caplog.records)
    kubelet.remove_pod("train")
    await kubelet.wait_for(lambda: len(kubelet.healthy(new)) == devices, 2)
    await kubelet.admit("heir", "main", {new: 1})
    assert chips_of(kubelet, "heir") & held


async def test_an_ordinal_that_is_another_chips_now_is_not_offered(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Under `index`, after two chips have swapped their numbers, the pod's own chip is still the pod's."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(device_id_strategy="index")
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    assert chips_of(kubelet, "train") == {first.bdf}
    node.swap_ordinals(first.bdf, second.bdf)
    await until(lambda: "held by default/train" in unhealthy_for(daemon, N150).get("1", ""))
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {"1"})
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})
    kubelet.remove_pod("train")
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"0", "1"}, 2)


async def test_an_asic_id_that_comes_late_is_not_offered_while_a_pod_holds_the_chip(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The chip has another ID from then on, and is the same chip."""
    (chip,) = node.add("n150", firmware=False)
    daemon = await start(device_id_strategy="asic")
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    chip.speak()
    name = f"wormhole-{chip.facts.telemetry['tt_asic_id']}"
    await until(lambda: "held by default/train" in unhealthy_for(daemon, N150).get(name, ""))
    assert not any(name in e.fields.get("healthy_ids", ()) for e in kubelet.find("list", N150)), "not for a moment"
    kubelet.remove_pod("train")
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {name}, 2)


async def test_an_allocation_that_no_list_names_yet_counts(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is being admitted is in nobody's list for a moment; one that never comes does not count for ever."""
    monkeypatch.setattr("ttdp.ADMISSION", 1.0)
    (chip,) = node.add("p150a")
    daemon = await start()
    await kubelet.registered(f"{DOMAIN}/p150")
    await until(lambda: not daemon.daemon.owners.kubelet_is_young(daemon.settings.pod_resources_socket))
    async with grpc.aio.insecure_channel(f"unix:{directory}/{plugin_sockets(directory)[0]}") as channel:
        asked = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[chip.bdf])])
        await rpc.DevicePluginStub(channel).Allocate(asked)  # type: ignore[no-untyped-call]
    daemon.reload(resource_naming="card")
    new = f"{DOMAIN}/p150a"
    await until(lambda: "a pod that is being admitted" in unhealthy_for(daemon, new).get(chip.bdf, ""))
    await kubelet.wait_for(lambda: kubelet.healthy(new) == {chip.bdf}, 3)


async def test_a_kubelet_that_restarts_forgets_for_a_while_who_holds_what_and_the_daemon_does_not(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Right after its start its list is empty: that is no proof that a pod has ended."""
    (chip, _) = node.add("p150a") + node.add("p150a")
    old, new = f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
    daemon = await start(interval=0.1)
    await kubelet.registered(old)
    await kubelet.admit("train", "main", {old: 1})
    assert chips_of(kubelet, "train") == {chip.bdf}
    daemon.reload(resource_naming="card")
    await kubelet.wait_for(lambda: kubelet.unhealthy(new) == {chip.bdf})
    asked = len(kubelet.find("asked"))
    await kubelet.restart()
    await kubelet.registered(new)
    await kubelet.wait_for(lambda: len(kubelet.find("asked")) > asked + 2)
    assert kubelet.unhealthy(new) == {chip.bdf}


async def test_a_pod_of_before_comes_first_even_if_nobody_remembers_it(
    node: SimulatedNode, kubelet: Kubelet, directory: Path
) -> None:
    """Kubelet and daemon start anew, with another configuration: each allocation asks the kubelet before it answers.

    The kubelet admits the pods of before first, so that a new one finds their chips taken.
    """
    node.add("p150a")
    old, new = f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
    async with RunningDaemon(node, settings_of(node, directory)):
        await kubelet.registered(old)
        await kubelet.admit("train", "main", {old: 1})
    await kubelet.kill()
    async with RunningDaemon(node, settings_of(node, directory, interval=3600, resource_naming="card")):
        await kubelet.start()
        await kubelet.registered(new)
        await kubelet.wait_for(lambda: kubelet.healthy(new) and kubelet.find("asked"))
        kubelet._admitted.add("train")  # it runs, so that the kubelet asks nobody
        with pytest.raises(AdmissionError, match="held by default/train"):
            await kubelet.admit("other", "main", {new: 1})


async def test_what_is_offered_anew_while_the_kubelet_is_being_asked_is_asked_for_after_that(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Two reloads in a row, the second while the question of the first is under way: both come to an end."""
    (chip,) = node.add("p150a")
    daemon = await start(interval=3600)
    await kubelet.registered(f"{DOMAIN}/p150")
    kubelet.hang(0.3, method="List", times=2)
    daemon.reload(resource_naming="card")
    await asyncio.sleep(0.1)
    daemon.reload(resource_naming="arch")
    await kubelet.registered(f"{DOMAIN}/blackhole")
    await kubelet.wait_for(lambda: kubelet.healthy(f"{DOMAIN}/blackhole") == {chip.bdf}, 3)


# -- kubelets that do not tell -----------------------------------------------------------------------------------------

Arrange = Callable[[Kubelet], object]
MUTE: dict[str, Arrange] = {
    "slow": lambda kubelet: kubelet.hang(30, method="List", times=99),
    "garbage": lambda kubelet: kubelet.garble(times=99),
    "refused": lambda kubelet: kubelet.refuse_with(grpc.StatusCode.INTERNAL, "no", times=99, method="List"),
    "unknown": lambda kubelet: kubelet.refuse_with(grpc.StatusCode.UNIMPLEMENTED, "no", times=99, method="List"),
}


@pytest.mark.parametrize("how", MUTE)
async def test_a_kubelet_that_does_not_tell_costs_the_guarantee_and_nothing_else(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, how: str,
) -> None:  # fmt: skip
    """Start, registration and allocations go on; it is said once, and by a reload that moves chips once more."""
    monkeypatch.setattr("ttdp.ADMISSION", 1.0)
    MUTE[how](kubelet)
    node.add("p150a")
    began = time.monotonic()
    daemon = await start(interval=0.1)
    await kubelet.registered(f"{DOMAIN}/p150", 3)
    assert time.monotonic() - began < 2.5
    await kubelet.admit("one", "main", {f"{DOMAIN}/p150": 1})
    await asyncio.sleep(0.5)  # some polls, which say nothing anew
    told = [record.message for record in caplog.records if "does not tell" in record.message]
    assert len(told) == 1
    daemon.reload(resource_naming="card")
    await kubelet.registered(f"{DOMAIN}/p150a")
    await kubelet.wait_for(lambda: kubelet.healthy(f"{DOMAIN}/p150a"), 3)
    assert sum("cannot be known" in record.message for record in caplog.records) == 1


async def test_a_kubelet_without_the_api_is_not_waited_for(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """No socket, or one on which nobody listens: no line, no delay."""
    (chip,) = node.add("p150a")
    async with Kubelet(directory, pod_resources=None) as kubelet:
        daemon = await start(interval=3600)
        await kubelet.registered(f"{DOMAIN}/p150", 1)
        daemon.reload(resource_naming="card")
        await kubelet.registered(f"{DOMAIN}/p150a", 1)
        await kubelet.wait_for(lambda: kubelet.healthy(f"{DOMAIN}/p150a") == {chip.bdf}, 1)


async def test_a_registration_is_not_delayed_by_the_question(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet that starts is asked after it has been registered with."""
    node.add("p150a")
    await start(interval=3600)
    await kubelet.registered(f"{DOMAIN}/p150")
    for _ in range(5):
        kubelet.hang(30, method="List", times=9)
        await kubelet.restart()
        started = kubelet.events[-1].at
        await kubelet.registered(f"{DOMAIN}/p150", 1)
        assert kubelet.find("registered", since=started)[0].at - started < 0.5


async def test_at_rest_nobody_is_asked(node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> None:
    """With a kubelet that is no longer young and no chip held under another name, polls cost no question."""
    node.add("p150a")
    await start(interval=0.05)
    await kubelet.registered(f"{DOMAIN}/p150")
    assert kubelet.pod_resources
    os.utime(kubelet.pod_resources, (0, 0))
    await asyncio.sleep(0.3)
    asked = len(kubelet.find("asked"))
    await asyncio.sleep(0.5)
    assert len(kubelet.find("asked")) == asked
