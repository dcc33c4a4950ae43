"""The daemon's turns: what it reads and applies, when it is ready, and what a failure changes."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.commands import Served
from tests.conftest import WATCHDOG, StartDaemon, kubelet_of, no_descriptors, polls, turns
from tests.world.kubelet import Kubelet
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

N150, P150, P150A = (f"tenstorrent.com/{name}" for name in ("n150", "p150", "p150a"))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "ERROR"]


async def test_hot_plug_reaches_the_kubelet_by_events(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Polls are an hour apart. The first card of a node becomes a resource, too."""
    daemon = await start(interval=3600)
    await daemon.ready()
    assert daemon.notified("STATUS=no Tenstorrent device on this node; waiting for one")
    assert not kubelet.find("register")

    (chip,) = node.add("p150a")
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == {chip.bdf})
    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150) == {chip.bdf})
    chip.come_back()
    await kubelet.wait_for(lambda: not kubelet.unhealthy(P150))

    (new,) = node.add("p150a")
    await kubelet.wait_for(lambda: new.bdf in kubelet.healthy(P150))


# -- ready -----------------------------------------------------------------------------------------


async def test_it_is_ready_when_the_driver_has_bound_to_every_card(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet that runs already gets the cards that are bound meanwhile.

    A reload meanwhile is in force, and notifies no readiness: the kubelet is ordered after READY=1.
    """
    node.add("p150a")
    first, second = node.add("n150") + node.add("n150")
    first.unbind()
    second.unbind()

    daemon = await start(interval=3600)
    waiting = "STATUS=waiting for the driver to create a device file for"
    await until(lambda: daemon.notified(f"{waiting} {first.bdf}"))
    await kubelet.registered(P150)

    first.bind()
    await until(lambda: daemon.notified(f"{waiting} {second.bdf}"))
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    assert not [note for note in daemon.notes if note.startswith(("READY", "RELOADING"))]

    second.bind()
    await daemon.ready()
    assert daemon.notified(f"STATUS=2 × {N150}, 2 healthy; 1 × {P150A}, 1 healthy")


async def test_it_is_ready_after_ten_seconds_without_a_card(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line names the card; it is found all the same when it comes."""
    monkeypatch.setattr(ttdp, "BIND_TIMEOUT", 0.3)
    (chip,) = node.add("n150")
    chip.unbind()
    daemon = await start(interval=3600)
    await daemon.ready()

    assert sum(chip.bdf in line for line in caplog.messages) == 1

    chip.bind()
    await until(lambda: daemon.notified("STATUS=1 × tenstorrent.com/n150, 1 healthy"))


CANNOT_BE_BOUND: dict[str, Callable[[SimulatedNode, Card], object]] = {
    "no driver is loaded": lambda node, card: node.unload_driver(),
    "another driver has it": lambda node, card: card.bind_to("vfio-pci"),
    "it is kept for another driver": lambda node, card: card.keep_for("vfio-pci"),
    "it is a Grayskull": lambda node, card: card.write("device", b"0xfaca\n"),
    "it has left the bus": lambda node, card: card.vanish(),
    "it is out of service": lambda node, card: None,
}


@pytest.mark.parametrize("why", CANNOT_BE_BOUND)
async def test_it_does_not_wait_for_a_function_that_the_driver_cannot_have(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Nor for one that it shall not have."""
    monkeypatch.setattr(ttdp, "BIND_TIMEOUT", 4 * PATIENCE)
    (card,) = node.add("n150")
    card.unbind()
    CANNOT_BE_BOUND[why](node, card)
    excluded = (card.bdf,) if why == "it is out of service" else ()

    daemon = await start(interval=3600, exclude=excluded)
    await daemon.ready()


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (lambda node: None, "driver 2.10.1-pre, 0 chips"),
        (lambda node: node.unload_driver(), "driver is not loaded, 0 chips"),
        (lambda node: node.add("n150", bdf="0000:01:00.0"), "driver 2.10.1-pre, 1 chip"),
    ],
    ids=["no card", "no driver", "all excluded"],
)
async def test_no_device_is_an_error_if_that_is_configured(
    node: SimulatedNode, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    prepare: Callable[[SimulatedNode], None], found: str,
) -> None:  # fmt: skip
    """Status 1, and one line that reports what is missing."""
    prepare(node)

    daemon = await start(fail_on_init_error=True, exclude=("0000:01:00.0",))

    assert await asyncio.wait_for(daemon.ended(), PATIENCE) == 1
    assert not daemon.notified("READY=1")
    assert errors(caplog) == [f"exiting (fail_on_init_error): {found}; no device to offer"]


# -- the watchdog, and observations that fail ------------------------------------------------------


async def test_the_watchdog_is_fed_in_half_its_time_whatever_the_interval_of_polls(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator can set a shorter one."""
    monkeypatch.setattr(ttdp, "ROUND", 3600.0)
    node.add("n150")
    daemon = await start({"WATCHDOG_USEC": "400000"}, interval=3600)
    await daemon.ready()

    await turns(daemon, 3)


async def test_no_watchdog_is_fed_without_one(node: SimulatedNode, start: StartDaemon) -> None:
    """Polls bring WATCHDOG=1 only if systemd has set its time."""
    node.add("n150")
    daemon = await start(interval=0.05)
    await daemon.ready()

    await polls(daemon)

    assert not daemon.notified("WATCHDOG=1")


async def test_the_loop_has_pauses_while_a_container_starts(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at pods ten times a second then, beside its polls."""
    node.add("n150")
    daemon = await start(WATCHDOG)
    await daemon.ready()

    monkeypatch.setattr(ttdp.HoldBook, "is_awaiting_containers", True)
    daemon.forget_notes()
    await polls(daemon, 4)  # a second

    assert 4 <= daemon.notes.count("WATCHDOG=1") < 40


async def test_observations_that_fail_change_nothing_and_feed_no_watchdog(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Without descriptors, say: each second it is tried again; one line at each change.

    These looks are no polls: two within the 0.1 s that a heartbeat takes would show a stall.
    """
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    (chip,) = node.add("n150")
    daemon = await start(interval=3600, environ=WATCHDOG)
    await kubelet.registered(N150)
    polled_at = daemon.host.polled_at
    failed: list[float] = []

    def fail(*_: object, **__: object) -> None:
        failed.append(time.monotonic())
        no_descriptors()

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "scan", fail)
        chip.vanish()
        await until(lambda: failed)
        daemon.forget_notes()
        await until(lambda: len(failed) > 8)
        assert not daemon.notified("WATCHDOG=1") and kubelet.healthy(N150) == {chip.bdf}
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})

    assert len(failed) <= 3 + (failed[-1] - failed[0]) / 0.05  # and one for each event
    assert daemon.notified("WATCHDOG=1") and daemon.host.polled_at == polled_at
    lines = [line for line in caplog.messages if "the node's state" in line]
    assert len(lines) == 2 and "Too many open files" in lines[0]


async def test_a_failure_to_apply_is_one_line_however_often_it_is_repeated(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As when a hugetlbfs cannot be read: that the chips can be is no recovery."""
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    node.add("n150")
    daemon = await start(interval=0.1)
    failed: list[float] = []

    def fail(*_: object) -> None:
        failed.append(time.monotonic())
        no_descriptors()

    with monkeypatch.context() as patch:
        patch.setattr(daemon.host, "unnamed_directories", fail)
        await until(lambda: len(failed) > 8)
        assert await daemon.metrics() is None
    await until(lambda: not daemon.host.problems)

    first, second = (line for line in caplog.messages if "the node's state" in line)
    assert "Too many open files" in first and second == "the node's state can be read again"
    await until(lambda: "Too many open files" not in daemon.status)


async def test_the_next_turn_does_what_a_failed_one_has_not_done(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, tmp_path: Path,
) -> None:  # fmt: skip
    """The list, the log and the files for others have a change, though the first turn failed."""
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    (chip,) = node.add("n150")
    daemon = await start(interval=3600, cdi_dir=str(tmp_path))
    await kubelet.registered(N150)
    (cdi_file,) = tmp_path.glob("*.json")
    failed: list[float] = []
    update = daemon.daemon.sessions.update

    def fail_once(resources: ttdp.Resources, *arguments: Any, **more: Any) -> None:
        if resources[N150].unhealthy and not failed:
            failed.append(time.monotonic())
            no_descriptors()
        update(resources, *arguments, **more)

    monkeypatch.setattr(daemon.daemon.sessions, "update", fail_once)
    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})
    await until(lambda: not cdi_file.exists())

    assert failed
    assert len([line for line in caplog.messages if f"{chip.bdf} (n150): unhealthy" in line]) == 1


async def test_reads_without_descriptors_are_repeated_until_they_succeed(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """At the next turns, not at the next poll; nothing is advertised before."""
    first, second = node.add("n150") + node.add("n150")
    first.fail("tt_heartbeat", "EMFILE")
    await start(interval=3600)
    await until(lambda: "cannot read the node's state; keeping the last one" in caplog.text)

    first.restore("tt_heartbeat")
    await kubelet.wait_for(lambda: kubelet.find("list", N150))

    found = kubelet.find("list", N150)[0].fields
    assert found["healthy_ids"] == [first.bdf, second.bdf]
    await until(lambda: "the node's state can be read again" in caplog.messages)


@pytest.mark.parametrize("at_start", [True, False])
async def test_every_output_says_that_the_last_state_is_old(served: Served, at_start: bool) -> None:
    """Neither an empty node nor healthy chips, until it can be read again."""
    (chip,) = served.node.add("n150")
    if at_start:
        chip.fail("numa_node")
        daemon = await served.start(runtime_dir=str(served.root), interval=0.1)
    else:
        daemon = await served.serve(N150, interval=0.1)
        chip.fail("numa_node")

    text = "cannot read the node's state; keeping the last one: "
    await until(lambda: text in daemon.status)

    listed = await served.ask("list")
    assert f"node: {text}" in listed.out and "no Tenstorrent device" not in listed.out
    checked = await served.ask("check")
    assert f"FAIL  node: {text}" in checked.out and checked.status == 1

    assert await daemon.metrics() is None

    chip.restore("numa_node")
    await served.kubelet.registered(N150)
    await until(lambda: not daemon.host.problems)
    await until(lambda: text not in daemon.status)

    assert await daemon.metrics()


async def test_a_reader_finds_first_that_the_node_cannot_be_read(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour before the next poll: nobody is shown the last state as the present one."""
    (chip,) = served.node.add("n150")
    daemon = await served.serve(N150, interval=3600)
    chip.fail("numa_node")

    text = "cannot read the node's state; keeping the last one: "
    assert f"node: {text}" in (await served.ask("list")).out
    assert await daemon.metrics() is None
    assert len([line for line in caplog.messages if text in line]) == 1

    chip.restore("numa_node")
    await until(lambda: not daemon.host.problems)
    assert await daemon.metrics()


# -- the kubelet's directory -----------------------------------------------------------------------


async def test_a_directory_that_is_deleted_is_created_and_served_again(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """As by `kubeadm reset`; no other daemon can have it."""
    node.add("n150")
    daemon = await start(interval=0.05, environ=WATCHDOG)
    for _ in range(2):
        await turns(daemon)
        shutil.rmtree(directory)
        await until(directory.exists)

    # Only /proc/locks can tell, as a lock of the test would end the daemon.
    locked = f":{directory.stat().st_ino} "
    await until(lambda: locked in Path("/proc/locks").read_text())
    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)


@pytest.mark.parametrize("why", ["does not exist", "is a link to nothing"])
async def test_it_is_ready_and_waits_for_the_kubelets_own_directory(
    node: SimulatedNode, short_tmp: Path, why: str
) -> None:
    """It does not make /var/lib/kubelet, which MicroK8s makes a link, and looks at each poll."""
    node.add("n150")
    own, target = short_tmp / "kubelet", short_tmp / "snap"
    plugins = own / "device-plugins"
    if why == "is a link to nothing":
        own.symlink_to(target)

    async with RunningDaemon(node, settings_of(node, plugins, interval=0.05)) as daemon:
        await daemon.ready()
        assert any(f"no kubelet is installed ({own} {why})" in note for note in daemon.notes)
        assert not own.exists()

        target.mkdir()
        if not own.is_symlink():
            own.symlink_to(target)
        await until(plugins.exists)
        async with kubelet_of(node, plugins) as kubelet:
            await kubelet.registered(N150)


async def test_a_directory_that_cannot_be_made_ends_the_start(
    start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Status 74, after which systemd starts it again, and one line with directory and reason."""
    directory.symlink_to("nowhere")

    daemon = await start()

    assert await asyncio.wait_for(daemon.ended(), PATIENCE) == 74
    assert errors(caplog) == [f"{directory} cannot be used: it is a link to nothing; exiting"]


async def test_a_directory_that_becomes_a_file_ends_the_daemon(
    start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the same way: a new mount namespace may see the directory."""
    daemon = await start()
    await daemon.ready()

    directory.rename(directory.with_name("gone"))
    directory.write_text("")

    assert await asyncio.wait_for(daemon.ended(), PATIENCE) == 74
    assert errors(caplog) == [f"{directory} cannot be used: File exists; exiting"]


async def test_a_new_directory_takes_a_restart(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, short_tmp: Path, directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line reports it; every other key takes effect, and the sockets stay where they are."""
    node.add("n150")
    daemon = await start()
    await daemon.ready()
    elsewhere = short_tmp / "elsewhere"

    daemon.reload(device_plugin_dir=str(elsewhere), resource_naming="arch")
    await kubelet.registered("tenstorrent.com/wormhole")

    assert not elsewhere.exists()
    line = f"device_plugin_dir needs a restart to change; still using {directory}"
    assert caplog.messages.count(line) == 1


# -- starts, reloads, ends -------------------------------------------------------------------------


@pytest.mark.usefixtures("ticking")
async def test_a_chip_that_was_dead_before_a_restart_is_unhealthy_in_the_first_list(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Its heartbeat is where it was; another one's has changed."""
    dead, revived = node.add("n150") + node.add("n150")
    daemon = await start(state_dir=str(short_tmp))
    await kubelet.registered(N150)

    dead.freeze()
    revived.freeze()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {dead.bdf, revived.bdf})

    await daemon.stop()
    revived.beat()

    restarted = time.monotonic()
    await start(interval=3600, state_dir=str(short_tmp))
    await kubelet.wait_for(lambda: kubelet.find("list", since=restarted))
    first = kubelet.find("list", since=restarted)[0].fields

    assert first["unhealthy_ids"] == [dead.bdf] and first["healthy_ids"] == [revived.bdf]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_the_time_of_a_fault_follows_a_clock_that_is_set(
    node: SimulatedNode,
    start: StartDaemon,
    short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_restarted: bool,
) -> None:
    """At a boot the clock can be wrong; a fault of that time began then, not in 1970."""
    (chip,) = node.add("n150")
    daemon = await start(state_dir=str(short_tmp))
    await daemon.ready()
    chip.die()
    await daemon.sees(chip.bdf, ttdp.Kind.NO_RESPONSE)

    def since() -> float:
        since = daemon.host.inventory.states[chip.bdf].since
        assert since is not None
        return since + time.time() - ttdp.seconds_since_boot()

    before = since()
    if is_restarted:
        await daemon.stop()
    genuine = time.time
    monkeypatch.setattr("time.time", lambda: genuine() + 86400)
    if is_restarted:
        daemon = await start(state_dir=str(short_tmp))
        await daemon.ready()

    await polls(daemon, 2)
    assert since() == pytest.approx(before + 86400, abs=1)


async def test_the_remedy_of_a_module_that_is_removed_reaches_the_log(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """It releases one chip after the other, and then goes."""
    (chip,) = node.add("n150")
    await start(interval=3600)
    await kubelet.registered(N150)

    for step, reason in ((chip.unbind, "driver is not bound"), (node.unload_driver, "modprobe")):
        step()
        await until(lambda: reason in caplog.text)  # noqa: B023

    assert len([text for text in caplog.messages if "unhealthy: " in text]) == 2


async def test_it_can_end_at_any_moment_of_its_start(
    node: SimulatedNode, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, while and after sessions are made, and with a chip that blocks: status 0."""
    chip, _ = node.add("n150") + node.add("p150a")
    for steps in range(40):
        if steps == 30:
            chip.block()
        async with RunningDaemon(node, settings_of(node, directory, interval=3600)) as daemon:
            for _ in range(steps):
                await asyncio.sleep(0.0005)
            assert await asyncio.wait_for(daemon.stop(), PATIENCE) == 0
    chip.unblock()

    assert errors(caplog) == []


async def test_a_reload_ends_even_if_the_turn_fails(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd waits for READY=1 after RELOADING=1."""
    daemon = await start()
    await daemon.ready()
    daemon.forget_notes()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ttdp, "decide", fail)
    daemon.reload(resource_naming="arch")

    await daemon.ready()


async def stop_after_a_pod_has_started(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, state_dir: str | None
) -> None:
    """Leave a card that a pod holds to the next daemon."""
    node.add("n150")
    daemon = await start(state_dir=state_dir)
    await kubelet.registered(N150)
    await kubelet.admit("pod", "main", {N150: 1})
    await until(lambda: daemon.host.holds.current(time.monotonic())[0].pod)
    await daemon.stop()


async def test_a_start_logs_no_recovery_of_chips_that_were_well(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Chips that a pod holds are known before the first look at sysfs."""
    await stop_after_a_pod_has_started(node, start, kubelet, str(tmp_path))
    caplog.clear()
    caplog.set_level("INFO")

    daemon = await start(state_dir=str(tmp_path))
    await daemon.ready()

    assert "/dev/tenstorrent/0" in caplog.text and "healthy again" not in caplog.text


@pytest.mark.parametrize("has_state", [True, False])
async def test_a_chip_that_a_pod_holds_has_one_reason_after_a_restart_without_the_driver(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, tmp_path: Path, has_state: bool
) -> None:
    """The same as before the restart: load the driver."""
    state_dir = str(tmp_path) if has_state else None
    await stop_after_a_pod_has_started(node, start, kubelet, state_dir)
    node.on_uevent = None
    node.unload_driver()

    daemon = await start(state_dir=state_dir)

    remedy = "run: modprobe tenstorrent"
    reason = f"{node.chips[0].bdf}: driver is not loaded; {remedy}"
    driver = f"driver not loaded, 1 Tenstorrent PCI function; {remedy}"
    status = f"{driver}; 1 × {N150}, 0 healthy ({reason}); registered with kubelet"
    await until(lambda: daemon.notified(f"STATUS={status}"))


async def test_the_first_list_has_every_chip(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """Each has answered, or had the time to; also if the kubelet writes its checkpoint."""
    quick, slow = node.add("n150") + node.add("n150")
    slow.block()
    checkpoint = directory / ttdp.CHECKPOINT

    await start(interval=3600)
    await kubelet.manager.write_checkpoint()
    checkpoint.rename(directory / ".1")
    (directory / ".1").rename(checkpoint)
    await kubelet.wait_for(lambda: kubelet.find("list", N150))

    first = kubelet.find("list", N150)[0].fields
    assert {*first["healthy_ids"], *first["unhealthy_ids"]} == {quick.bdf, slow.bdf}
    slow.unblock()
