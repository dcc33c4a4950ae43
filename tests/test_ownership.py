"""One chip, one pod: after reloads, restarts, reboots, and whatever kubelets have forgotten."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from tests.conftest import (
    WATCHDOG,
    StartDaemon,
    half_a_minute_later,
    kubelet_of,
    polls,
    turns,
)
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.pods import Container
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

DOMAIN = "tenstorrent.com"
P300, P300C, N150 = f"{DOMAIN}/p300", f"{DOMAIN}/p300c", f"{DOMAIN}/n150"
P150, P150A = f"{DOMAIN}/p150", f"{DOMAIN}/p150a"
FAST: dict[str, Any] = {"interval": 0.1}


@pytest.fixture(autouse=True)
def informed(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the starts that wait."""
    caplog.set_level("INFO")


def sharing(**entry: Any) -> dict[str, Sharing]:
    """Return the setting that this resource is shared, without locks."""
    return {"sharing": Sharing(lock_dir="", resources=(SharedResource(**entry),))}


def chips_of(kubelet: Kubelet, pod: str, container: str = "main") -> set[str]:
    """Return the PCI addresses in a container's environment."""
    return set(kubelet.allocation(pod, container).envs[ttdp.ADDRESSES].split(","))


async def run_pod(kubelet: Kubelet, pod: str, resource: str = P150, **options: Any) -> None:
    await kubelet.registered(resource)
    await kubelet.admit(pod, "main", {resource: 1}, **options)
    await kubelet.running(pod, "main")


async def offers(kubelet: Kubelet, resource: str, *healthy: str) -> None:
    """Wait until exactly these IDs are healthy."""
    await kubelet.wait_for(lambda: kubelet.healthy(resource) == {*healthy})


def ever_offered(kubelet: Kubelet, resource: str) -> set[str]:
    """Return every ID of a resource that was ever healthy in a list."""
    lists = kubelet.find("list", resource)
    return {identifier for event in lists for identifier in event.fields["healthy_ids"]}


# -- a kubelet that has forgotten pods -------------------------------------------------------------


@pytest.mark.parametrize("how", ["missing", "garbage", "intact"])
async def test_a_kubelet_that_starts_without_its_checkpoint_ends_no_running_pod(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, how: Any,
) -> None:  # fmt: skip
    """No chip is unhealthy for that. Others are preferred; a start waits for the last process."""
    monkeypatch.setattr("ttdp.START_TIMEOUT", 0.3)
    chips = {node.add("p150a")[0].bdf for _ in range(7)}
    pods = [f"pod-{number}" for number in range(6)]
    running = RunningDaemon(node, settings_of(node, directory, **FAST))
    async with kubelet_of(node, directory) as kubelet, running as daemon:
        for pod in pods:
            await run_pod(kubelet, pod)
        taken = {bdf for pod in pods for bdf in chips_of(kubelet, pod)}
        await until(lambda: len(daemon.daemon.host.holds.names) == 6)
        await kubelet.kill()
        if how != "intact":
            kubelet.corrupt(how)
        await kubelet.start()
        started = kubelet.find("started")[-1].at
        await kubelet.wait_for(lambda: kubelet.find("sources-ready", since=started))

        assert kubelet.killed == [] and kubelet.healthy(P150) == chips

        await run_pod(kubelet, "seventh")
        assert chips_of(kubelet, "seventh") == chips - taken

        if how == "intact":
            return
        kubelet.force_delete("pod-0")
        await kubelet.admit("eighth", "main", {P150: 1})
        await kubelet.wait_for(lambda: kubelet.find("not-started"))
        message = kubelet.find("not-started")[0].fields["message"]
        (holder,) = (pod for pod in pods if f"default/{pod} must end first" in message)
        kubelet.crash(holder, "main")  # its sandbox has a process yet
        failures = len(kubelet.find("not-started"))
        await kubelet.wait_for(lambda: len(kubelet.find("not-started")) > failures + 2)

        assert len(kubelet.find("running", since=started)) == 1

        kubelet.end(holder)
        await kubelet.running("eighth", "main")
        lists = kubelet.find("list", P150, since=started)

        assert not any(event.fields["unhealthy_ids"] for event in lists)
        assert kubelet.violations == [] and "unhealthy" not in caplog.text


async def test_the_chip_of_a_forgotten_pod_that_has_just_ended_is_preferred(
    node: SimulatedNode, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the last look at pods, in which it still ran: another pod's chip would be chosen."""
    monkeypatch.setattr("ttdp.ROUND", 3600)
    for _ in range(2):
        node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, interval=3600))
    async with kubelet_of(node, directory) as kubelet, running:
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


@pytest.mark.parametrize("first", ["kubelet", "daemon"])
async def test_a_daemon_that_starts_too_knows_the_pods_that_the_kubelet_has_forgotten(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, short_tmp: Path, first: str
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
    if first == "kubelet":
        await kubelet.start()
    async with RunningDaemon(node, settings):
        if first == "daemon":
            await kubelet.start()
        await run_pod(kubelet, "next")
        assert chips_of(kubelet, "next") == chips - held
        assert kubelet.killed == []


@pytest.mark.parametrize("change", ["a card is missing", "sharing", "another unit"])
async def test_a_kubelet_that_starts_finds_every_id_that_a_pod_holds(
    node: SimulatedNode, directory: Path, change: str
) -> None:
    """After a reboot, whatever has changed. Kubelets of 1.35 to 1.37 would crash otherwise."""
    node.add("p300c", numa_node=0)
    changes: dict[str, Any] = {}
    if change == "sharing":
        changes = sharing(name="p300", replicas=2)
    elif change == "another unit":
        changes = {"unit": "board"}
    async with kubelet_of(node, directory, version=(1, 37), policy="best-effort") as kubelet:
        async with RunningDaemon(node, settings_of(node, directory, **FAST)):
            await run_pod(kubelet, "train", P300)
            (mine,) = kubelet.allocated(P300)
        await kubelet.power_cut()
        if change == "a card is missing":
            node.chip(mine).vanish()
        async with RunningDaemon(node, settings_of(node, directory, **FAST, **changes)):
            await kubelet.start()
            await kubelet.registered(P300)
            is_missing = change == "a card is missing"

            assert mine in (kubelet.unhealthy(P300) if is_missing else kubelet.healthy(P300))
            assert kubelet.violations == []


async def test_a_kubelet_without_its_api_server_frees_nothing(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kubelet and daemon start again with another configuration; no pod has a name for long."""
    node.add("p150a")
    async with RunningDaemon(node, settings_of(node, directory, **FAST)):
        await run_pod(kubelet, "train")
    kubelet.api_server_away()
    await kubelet.restart()
    settings = settings_of(node, directory, **FAST, resource_naming="card")
    async with RunningDaemon(node, settings) as daemon:
        await kubelet.registered(P150A)
        await polls(daemon)
        with pytest.raises(AdmissionError):
            await kubelet.admit("other", "main", {P150A: 1}, static=True)
        assert f"withheld: held until pod {kubelet.uid('train')} ends (as {P150}" in caplog.text

        await kubelet.api_server_back()
        await until(lambda: "held until default/train ends" in "".join(daemon.notes))

    assert not ever_offered(kubelet, P150A)


async def test_a_pod_keeps_its_name_when_another_pod_gets_its_device(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The kubelet's List already has the next pod, its checkpoint does not yet."""
    for _ in range(2):
        node.add("p150a")
    daemon = await start(**FAST)

    def names() -> dict[str, str]:
        found: dict[str, str] = daemon.daemon.host.holds.names
        return found

    await run_pod(kubelet, "first")
    await until(lambda: kubelet.uid("first") in names())
    kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, times=999, method="List")
    await run_pod(kubelet, "other")
    await polls(daemon)
    path, kubelet.file.path = kubelet.file.path, kubelet.file.path.with_name("elsewhere")
    kubelet.force_delete("first")
    await kubelet.admit("next", "main", {P150: 1})
    kubelet.faults.clear()
    await until(lambda: kubelet.uid("other") in names())
    assert names()[kubelet.uid("first")] == "default/first"
    kubelet.file.path = path
    kubelet.manager.write_checkpoint_now()
    await until(lambda: names().get(kubelet.uid("next")) == "default/next")
    kubelet.end("first")


# -- the check before each start of a container ----------------------------------------------------


@pytest.mark.parametrize("layout", ["cgroupfs", "systemd", "v1"])
async def test_a_container_waits_for_the_pod_that_was_deleted_by_force(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture, layout: Any
) -> None:
    """It waits for the last process, though no process has the device open, or opens it later."""
    (chip,) = node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, **FAST), WATCHDOG)
    async with kubelet_of(node, directory, layout=layout) as kubelet, running as daemon:
        await run_pod(kubelet, "first")
        await until(lambda: daemon.daemon.host.holds.names)
        chip.set_pids([])
        kubelet.force_delete("first")
        await kubelet.admit("second", "main", {P150: 1})
        reason = "default/first must end first; it still runs on the device"
        waits = f"{P150}: container start waits: {reason}"
        await until(lambda: waits in caplog.messages)
        kubelet.manager.write_checkpoint_now()
        await turns(daemon)

        assert not kubelet.find("running", since=kubelet.find("deleted")[0].at)

        kubelet.end("first")
        await kubelet.running("second", "main")
        assert not kubelet.find("not-started") and kubelet.violations == []


async def test_a_container_waits_for_one_that_is_being_created(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a pause process, the pod that was deleted by force has no process until later."""
    node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, **FAST))
    async with kubelet_of(node, directory, has_pause=False) as kubelet, running as daemon:
        await kubelet.registered(P150)
        kubelet.hold_creation()
        await kubelet.admit("first", "main", {P150: 1})
        await kubelet.wait_for(lambda: kubelet.find("creating"))
        kubelet.force_delete("first")
        await kubelet.admit("second", "main", {P150: 1})
        await until(lambda: "container start waits: " in caplog.text)
        with half_a_minute_later():
            await polls(daemon)
        kubelet.hold_creation(False)
        await kubelet.running("first", "main")
        await polls(daemon)

        assert len(kubelet.find("running")) == 1

        kubelet.end("first")
        await kubelet.running("second", "main")
        assert not kubelet.find("not-started") and kubelet.violations == []


async def test_a_start_that_failed_delays_other_pods_for_a_limited_time(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The container was allowed to start; its process never came, and its cgroup stays."""
    node.add("p150a")
    running = RunningDaemon(node, settings_of(node, directory, **FAST))
    async with kubelet_of(node, directory, has_pause=False) as kubelet, running:
        await kubelet.registered(P150)
        kubelet.hold_creation()
        await kubelet.admit("first", "main", {P150: 1})
        await kubelet.wait_for(lambda: kubelet.find("creating"))
        kubelet.force_delete("first")
        await kubelet.admit("second", "main", {P150: 1})
        await until(lambda: "container start waits: " in caplog.text)

        monkeypatch.setattr("ttdp.CREATED_WITHIN", 0.0)  # two minutes later
        await kubelet.wait_for(lambda: len(kubelet.find("creating")) == 2)
        assert not kubelet.find("not-started")


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


async def test_processes_outside_the_former_pod_do_not_count(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the host's, nor a pod's that monitors every card, nor users of a shared device."""
    chip, _ = node.add("p150a") + node.add("n150")
    monitor = "0::/kubepods/besteffort/pod11111111-2222-3333-4444-555555555555/x"
    node.start_process(70, "0::/user.slice/session-1.scope", [str(chip.device_node)])
    node.start_process(71, monitor, [str(chip.device_node)])
    await start(**FAST, **sharing(name="n150", replicas=2))
    for pod, resource in (("alone", P150), ("one", N150), ("other", N150)):
        await run_pod(kubelet, pod, resource)

    assert "container start waits" not in caplog.text


async def test_a_container_that_starts_again_does_not_wait_for_its_own_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """An init container had the same device, and other containers of the pod still run."""
    node.add("p150a")
    await start(**FAST)
    await kubelet.registered(P150)
    containers = [Container("prepare", {P150: 1}, "init"), Container("main", {P150: 1})]
    await kubelet.admit_pod("train", [*containers, Container("side", {})])
    await kubelet.running("train", "side")

    assert chips_of(kubelet, "train") == chips_of(kubelet, "train", "prepare")

    for _ in range(3):
        crashed = time.monotonic()
        kubelet.crash("train", "main")
        await kubelet.wait_for(functools.partial(kubelet.find, "running", since=crashed))
    assert "container start waits" not in caplog.text


# -- chips that a pod holds under another name -----------------------------------------------------

BEFORE: dict[str, Any] = {
    "resource_naming": "board",
    "unit": "chip",
    "resource_domain": DOMAIN,
    "sharing": Sharing(lock_dir=""),
}
CHANGES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str, int]] = {
    # before, what the pod asks for, after, its chip's resource then, free IDs of that
    "another naming": ({}, P300, {"resource_naming": "card"}, P300C, 3),
    "another domain": ({}, P300, {"resource_domain": "example.org"}, "example.org/p300", 3),
    "chip to board": ({}, P300, {"unit": "board"}, f"{P300}-board", 1),
    "board to chip": ({"unit": "board"}, f"{P300}-board", {}, P300, 2),
    "to shared": ({}, P300, sharing(name="p300", replicas=2), P300, 6),
    "from shared": (sharing(name="p300", replicas=2), P300, {}, P300, 3),
    "renamed": ({}, P300, sharing(name="p300", replicas=3, rename="third"), f"{DOMAIN}/third", 9),
}


@pytest.mark.parametrize(
    ("change", "how"),
    [*((change, "a reload") for change in CHANGES), ("chip to board", "both restart")],
)
async def test_a_chip_that_a_pod_holds_is_withheld_under_another_name(
    node: SimulatedNode, kubelet: Kubelet, directory: Path, change: str, how: str
) -> None:
    """The pod's own ID stays healthy; the other one is free soon after the pod has ended."""
    before, old, after, new, free = CHANGES[change]
    for _ in range(2):
        node.add("p300c")
    settings = settings_of(node, directory, **FAST, **(BEFORE | before))
    daemon = await RunningDaemon(node, settings).__aenter__()
    await run_pod(kubelet, "train", old)
    (mine,) = kubelet.allocated(old)
    held = chips_of(kubelet, "train")
    if how == "a reload":
        daemon.reload(**(BEFORE | after))
    else:
        await daemon.__aexit__()
        await kubelet.restart()
        settings = settings_of(node, directory, **FAST, **(BEFORE | after))
        daemon = await RunningDaemon(node, settings).__aenter__()
    try:
        await kubelet.wait_for(lambda: len(kubelet.healthy(new) - {mine}) == free)
        await kubelet.wait_for(lambda: mine in kubelet.healthy(old))
        reason = f"held until default/train ends (as {old} {mine})"
        await until(lambda: reason in "".join(daemon.notes))
        for number in range(free):
            await kubelet.admit(f"other-{number}", "main", {new: 1})
            assert not chips_of(kubelet, f"other-{number}") & held

        with pytest.raises(AdmissionError):
            await kubelet.admit("unlucky", "main", {new: 1})

        kubelet.delete("train")
        await kubelet.wait_for(lambda: not kubelet.unhealthy(new))
        await kubelet.admit("heir", "main", {new: 1})

        assert chips_of(kubelet, "heir") & held
    finally:
        await daemon.__aexit__()


async def test_a_resource_with_only_a_pods_ids_ends_with_that_pod(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A container could not start again without it. Both kinds of containers hold the chip."""
    node.add("p150a")
    daemon = await start(**FAST)
    await kubelet.registered(P150)
    await kubelet.admit("train", "prepare", {P150: 1}, init=True)
    await run_pod(kubelet, "train")
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    crashed = time.monotonic()
    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: kubelet.find("running", since=crashed))
    await polls(daemon)

    assert daemon.sessions.keys() == {P150, P150A} and not ever_offered(kubelet, P150A)

    kubelet.delete("train")
    await until(lambda: daemon.sessions.keys() == {P150A})


async def test_polls_cost_the_kubelet_nothing(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Once pods' names are known; also while a device is withheld, whose pod's end is noticed."""
    (chip,) = node.add("p150a")
    daemon = await start(**FAST)
    await run_pod(kubelet, "train")
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    await until(lambda: daemon.daemon.host.holds.names)
    asked, lists = len(kubelet.find("asked")), len(kubelet.find("list"))
    await polls(daemon, 8)

    assert (len(kubelet.find("asked")), len(kubelet.find("list"))) == (asked, lists)

    kubelet.complete("train")
    await offers(kubelet, P150A, chip.bdf)


@pytest.mark.parametrize("how", ["slow", "refused", "garbage", "missing"])
async def test_nothing_depends_on_the_pod_resources_api(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Without names, one line reports that; the pod's chip is withheld, and its end is seen."""
    (chip,) = node.add("p150a")
    served = None if how == "missing" else directory.parent / "pod-resources/kubelet.sock"
    async with kubelet_of(node, directory, pod_resources=served) as kubelet:
        if how == "slow":
            kubelet.hang(30, method="List", times=999)
        elif how == "refused":
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            kubelet.refuse_with(code, "rejected by rate limit", times=999, method="List")
        elif how == "garbage":
            kubelet.garble(times=999)
        async with RunningDaemon(node, settings_of(node, directory, **FAST)) as daemon:
            await run_pod(kubelet, "train")
            daemon.reload(resource_naming="card")
            await kubelet.registered(P150A)
            await until(lambda: f"held until pod {kubelet.uid('train')} ends" in caplog.text)
            await until(lambda: "cannot get pod names" in caplog.text)
            assert not ever_offered(kubelet, P150A)
            kubelet.remove_pod("train")
            await offers(kubelet, P150A, chip.bdf)

    assert sum("cannot get pod names" in line for line in caplog.messages) == 1
