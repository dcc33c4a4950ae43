"""The daemon: its start, turns, errors, end and reloads; the kubelet's directory."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

import ttdp
from tests.conftest import StartDaemon, errors, kubelet_of, no_descriptors, plugin_sockets, polls
from tests.world.kubelet import Kubelet
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

NAMES = ("n150", "p150", "p150a", "wormhole")
N150, P150, P150A, ARCH = (f"tenstorrent.com/{name}" for name in NAMES)
AN_HOUR = 3600.0
NO_DEVICE = "no Tenstorrent device on this node; waiting for one"
EMFILE = "Too many open files"


async def status_of(daemon: RunningDaemon) -> int:
    """Return the exit status of a daemon that ends by itself."""
    return await asyncio.wait_for(daemon.ended(), PATIENCE)


# -- kernel events ---------------------------------------------------------------------------------


async def test_hot_plug_reaches_the_kubelet_by_events(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Polls are an hour apart. The first card of a node becomes a resource; a change is a line."""
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    assert daemon.status == NO_DEVICE and not kubelet.find("register")

    (chip,) = node.add("p150a")
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == {chip.bdf})
    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150) == {chip.bdf})
    chip.come_back()
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == {chip.bdf})
    assert caplog.text.count("unhealthy: PCI device is gone") == 1


async def test_the_first_event_is_handled_at_once_and_those_of_the_next_30_ms_together(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one scan."""
    assert ttdp.DEBOUNCE == 0.03
    monkeypatch.setattr(ttdp, "DEBOUNCE", 1.0)
    for _ in range(4):
        node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    await until(lambda: time.monotonic() > daemon.scans[-1] + ttdp.DEBOUNCE)
    daemon.scans.clear()

    began = time.monotonic()
    for chip in node.chips:
        chip.vanish()
        await asyncio.sleep(0)
    await until(lambda: "4 × tenstorrent.com/n150, 0 healthy" in daemon.status)

    first, second = daemon.scans
    assert first - began < 1.0
    assert second - first > 0.9  # timers can be early by a tick


# -- ready -----------------------------------------------------------------------------------------


async def test_it_is_ready_when_the_driver_has_bound_to_every_card(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A kubelet that runs already gets the cards that are bound meanwhile.

    A reload meanwhile is in force, and notifies no readiness: the kubelet is ordered after READY=1.
    With fail_on_init_error it waits, too.
    """
    node.add("p150a")
    first, second = node.add("n150") + node.add("n150")
    first.unbind()
    second.unbind()

    daemon = await start(interval=AN_HOUR, fail_on_init_error=True)
    waiting = "waiting for the driver to create a device file for"
    await until(lambda: daemon.status == f"{waiting} {first.bdf}")
    await kubelet.registered(P150)

    first.bind()
    await until(lambda: daemon.status == f"{waiting} {second.bdf}")
    daemon.reload(resource_naming="card")
    await kubelet.registered(P150A)
    assert not daemon.notified("READY") and not daemon.notified("RELOADING")

    second.bind()
    await daemon.ready()
    assert daemon.notes.count("READY=1") == 1
    status = f"STATUS=2 × {N150}, 2 healthy; 1 × {P150A}, 1 healthy; {ttdp.REGISTERED}"
    assert daemon.notes[daemon.notes.index("READY=1") - 1] == status


CANNOT_BE_BOUND: dict[str, Callable[[SimulatedNode, Card], object]] = {
    "no driver is loaded": lambda node, card: node.unload_driver(),
    "another driver has it": lambda node, card: card.bind_to("vfio-pci"),
    "it is kept for another driver": lambda node, card: card.keep_for("vfio-pci"),
    "it is a Grayskull": lambda node, card: card.write("device", b"0xfaca\n"),
    "it has left the bus": lambda node, card: card.vanish(),
    "it is out of service": lambda node, card: None,
    "it does not come for ten seconds": lambda node, card: None,
}


@pytest.mark.parametrize("why", CANNOT_BE_BOUND)
async def test_it_does_not_wait_for_a_function_that_the_driver_cannot_have(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, why: str,
) -> None:  # fmt: skip
    """Nor for one that it shall not have, nor for ever: one line names that."""
    assert ttdp.BIND_TIMEOUT == 10.0
    is_late = why == "it does not come for ten seconds"
    monkeypatch.setattr(ttdp, "BIND_TIMEOUT", 0.3 if is_late else AN_HOUR)
    (card,) = node.add("n150")
    card.unbind()
    CANNOT_BE_BOUND[why](node, card)
    excluded = (card.bdf,) if why == "it is out of service" else ()

    daemon = await start(interval=AN_HOUR, exclude=excluded)
    daemon.refused_notes += ["READY=1"] * 3  # a manager whose queue is full is told again
    await daemon.ready()
    line = f"{card.bdf}: no device file; starting without it"
    assert caplog.messages.count(line) == is_late


@pytest.mark.parametrize(
    ("prepare", "found"),
    [
        (SimulatedNode.unload_driver, "driver is not loaded, 0 chips; no device to offer"),
        (lambda node: node.add("n150"), "driver 2.10.1-pre, 1 chip; no device to offer"),
    ],
    ids=["no driver", "all excluded"],
)
async def test_no_device_is_an_error_if_that_is_configured(
    node: SimulatedNode, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    prepare: Callable[[SimulatedNode], object], found: str,
) -> None:  # fmt: skip
    """Status 1, and one line that reports what is missing."""
    prepare(node)

    daemon = await start(fail_on_init_error=True, exclude=("0000:01:00.0",))

    assert await status_of(daemon) == 1
    assert not daemon.notified("READY=1")
    assert errors(caplog) == [f"exiting (fail_on_init_error): {found}"]


async def test_the_first_list_has_every_chip(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has answered, or had the time to; one whose reading blocks is unhealthy until it ends.

    A checkpoint that is written meanwhile is no reason to begin.
    """
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", 0.5)
    quick, slow, dead = (node.add("n150")[0] for _ in range(3))
    slow.block()
    dead.die()
    daemon = await start(interval=AN_HOUR)
    await kubelet.manager.write_checkpoint()
    await kubelet.wait_for(lambda: kubelet.find("list", N150))
    first = kubelet.find("list", N150)[0].fields
    assert (first["healthy_ids"], first["unhealthy_ids"]) == ([quick.bdf, slow.bdf], [dead.bdf])

    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {slow.bdf, dead.bdf})
    assert daemon.chip(slow.bdf).fault == ttdp.BLOCKED
    slow.show("tt_heartbeat")
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {quick.bdf, slow.bdf})


# -- timers and its own errors ---------------------------------------------------------------------


async def test_at_rest_it_takes_no_turns_and_looks_at_no_file_for_others(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are looked at when the readings of a scan are there; any other turn costs less."""
    turns, files = Mock(wraps=ttdp.decide), list[str]()
    monkeypatch.setattr(ttdp, "decide", turns)
    monkeypatch.setattr(ttdp.OutputFiles, "keep", lambda _, path, text: files.append(path))
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    await daemon.ready()

    turns.reset_mock()
    await asyncio.sleep(10 * ttdp.START_TICK)
    assert turns.call_count <= 2  # for what was still under way

    await kubelet.manager.write_checkpoint()
    await until(lambda: turns.call_count)
    names = [ttdp.CDI_FILE, ttdp.LABELS_FILE]
    assert [os.path.basename(path) for path in files] == names


@pytest.mark.parametrize(("metrics", "poll"), [(AN_HOUR, 0.05), (0.05, AN_HOUR)])
async def test_watchdog_and_metrics_file_have_their_own_intervals(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch, metrics: float, poll: float
) -> None:
    """The file is written at once, then every 15 s; the watchdog is fed in half of its time."""
    assert ttdp.METRICS_INTERVAL == 15.0
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", metrics)
    writings: list[str] = []
    monkeypatch.setattr(ttdp.OutputFiles, "write", lambda _, path, text: writings.append(path))
    daemon = await start({"WATCHDOG_USEC": "200000"}, interval=poll)

    began = time.monotonic()
    await until(lambda: daemon.notes.count("WATCHDOG=1") >= 5)
    assert time.monotonic() - began > 0.35
    if poll == AN_HOUR:
        await until(lambda: len(writings) > 3)
        assert daemon.polls == 1
    else:
        await polls(daemon)
        assert writings == [daemon.settings.metrics_file]


async def test_observations_that_fail_change_nothing_and_feed_no_watchdog(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Without descriptors, say: each second it is tried again; one line at each change.

    These looks are no polls: two within the 0.1 s that a heartbeat takes would show a stall.
    """
    assert ttdp.RETRY_TICK == 1.0
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    (chip,) = node.add("n150")
    daemon = await start({"WATCHDOG_USEC": "1"}, interval=AN_HOUR)
    await kubelet.registered(N150)
    before, failed = daemon.polls, list[float]()

    def fail(*_: object, **__: object) -> None:
        failed.append(time.monotonic())
        no_descriptors()

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "scan", fail)
        chip.vanish()
        await until(lambda: EMFILE in daemon.status)
        assert daemon.status.startswith(f"1 × {N150}, 1 healthy; {ttdp.REGISTERED}; cannot read")
        daemon.notes.clear()
        await until(lambda: len(failed) > 8)
        assert daemon.notes == [] and kubelet.healthy(N150) == {chip.bdf}
        (problem,) = (each for each in daemon.view()["problems"] if each["subject"] == "node")
        assert problem["level"] == "FAIL" and EMFILE in problem["problem"]
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})

    await until(lambda: daemon.notified("WATCHDOG=1") and EMFILE not in daemon.status)
    assert len(failed) <= 4 + (failed[-1] - failed[0]) / 0.05  # and one for each event
    assert daemon.polls == before
    first, second = [line for line in caplog.messages if "the node's state" in line]
    assert EMFILE in first and second == "the node's state can be read again"


async def test_a_turn_with_an_error_that_nobody_has_foreseen_is_logged_and_followed_by_others(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each second, and no watchdog is fed; a reload ends for systemd, which waits for READY=1."""
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    daemon = await start({"WATCHDOG_USEC": "1"}, interval=0.05)
    await daemon.ready()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "decide", fail)
        await until(lambda: "internal error (main loop)" in caplog.text)
        daemon.notes.clear()
        daemon.reload()
        await daemon.ready()
        await until(lambda: caplog.text.count("internal error (main loop)") >= 4)
        assert not daemon.notified("WATCHDOG=1")

    await until(lambda: daemon.notified("WATCHDOG=1"))


async def test_what_keeps_holds_from_being_known_is_in_the_status(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet
) -> None:
    """A checkpoint that cannot be read, until it can be; a kubelet whose pods have no cgroups."""
    node.add("n150")
    daemon = await start(interval=0.1)
    await kubelet.registered(N150)

    kubelet.corrupt("garbage")
    advice = "; the kubelet writes it again when the next pod starts"
    await until(lambda: "cannot be read: " in daemon.status and advice in daemon.status)
    await kubelet.manager.write_checkpoint()
    await until(lambda: daemon.status.endswith(ttdp.REGISTERED))

    shutil.rmtree(node.root / "sys/fs/cgroup")
    await until(lambda: "give kubelet and container runtime the same cgroup" in daemon.status)


# -- the kubelet's directory -----------------------------------------------------------------------


async def test_it_is_ready_and_waits_for_the_directory_around_the_kubelets(
    node: SimulatedNode, short_tmp: Path
) -> None:
    """It does not make /var/lib/kubelet, which MicroK8s makes a link, and looks at each poll."""
    node.add("n150")
    own, target = short_tmp / "kubelet", short_tmp / "snap"
    plugins = own / "device-plugins"

    async with RunningDaemon(node, settings_of(node, plugins, interval=0.05)) as daemon:
        await daemon.ready()
        missing = f"no kubelet is installed ({own} does not exist)"
        await until(lambda: daemon.status.endswith(missing))

        target.mkdir()
        own.symlink_to(target)
        async with kubelet_of(node, plugins) as kubelet:
            await kubelet.registered(N150)
            await until(lambda: missing not in daemon.status)


def replaced(directory: Path) -> None:
    directory.rename(directory.with_name("former"))
    directory.mkdir()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (shutil.rmtree, "No such file or directory"),
        (replaced, "it was replaced"),
        (lambda directory: None, "it is not writable"),
    ],
    ids=["deleted", "replaced", "read-only"],
)
async def test_a_directory_that_goes_or_cannot_be_written_ends_the_daemon(
    start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], None], reason: str,
) -> None:  # fmt: skip
    """Status 74, after which systemd starts it in a new mount namespace, and one line."""
    daemon = await start(interval=0.1)
    await daemon.ready()

    how(directory)
    if reason == "it is not writable":
        monkeypatch.setattr(os, "access", lambda path, mode: path != str(directory))

    assert await status_of(daemon) == 74
    assert errors(caplog) == [f"{directory} cannot be used: {reason}; exiting"]


async def test_a_second_daemon_ends_and_leaves_the_first_one_alone(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path, short_tmp: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Status 75 and one line; both have the service's directories, if it is started by hand."""
    node.add("n150")
    first = await start(interval=AN_HOUR, runtime_dir=str(short_tmp))
    await kubelet.registered(N150)
    before = plugin_sockets(directory)

    second = await start(interval=AN_HOUR, runtime_dir=str(short_tmp))

    assert await status_of(second) == 75
    assert errors(caplog) == [f"{directory} is in use by another tt-device-plugin; exiting"]
    assert plugin_sockets(directory) == before and first.state(N150) == ttdp.REGISTERED
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(f"{short_tmp}/{ttdp.STATUS_SOCKET}")


# -- the end -------------------------------------------------------------------


async def test_it_can_end_at_any_moment_of_its_start(
    node: SimulatedNode, directory: Path, short_tmp: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, while and after sessions are made, and with a chip that blocks: status 0.

    Nothing stays open.
    """
    before = 0
    chip, _ = node.add("n150") + node.add("p150a")
    settings = settings_of(node, directory, interval=AN_HOUR, runtime_dir=str(short_tmp))
    async with kubelet_of(node, directory):
        for steps in range(40):
            if steps == 30:
                chip.block()
            async with RunningDaemon(node, settings) as daemon:
                for _ in range(steps):
                    await asyncio.sleep(0.0005)
                assert await asyncio.wait_for(daemon.stop(), PATIENCE) == 0
            before = before or len(os.listdir("/proc/self/fd"))
            assert daemon.notes[-1] == "STOPPING=1"
            assert not [*short_tmp.glob("*.sock")] and not plugin_sockets(directory)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    chip.show("tt_heartbeat")

    # The kubelet's own line is about a call that nobody waits for any more.
    assert not [line for line in errors(caplog) if "Registration/Register" not in line]


# -- reloads --------------------------------------------------------------------------------------


async def test_a_reload_is_between_reloading_and_ready(
    node: SimulatedNode, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """RELOADING=1 has the time on the monotonic clock; at READY=1 the settings are in force.

    A new interval counts from now on, not from the end of the last one, an hour from now.
    """
    caplog.set_level("DEBUG")
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    daemon.notes.clear()
    before = time.monotonic_ns() // 1000

    health = ttdp.HealthSettings(interval=0.05)
    daemon.reload(resource_naming="arch", log_level="error", health=health)
    await daemon.ready()

    reloading, *_, status, ready = daemon.notes
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading)
    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    assert status.startswith(f"STATUS=1 × {ARCH}, 1 healthy") and ready == "READY=1"
    assert "configuration reloaded" not in caplog.messages  # the new level is in force

    await polls(daemon)
    assert daemon.notes.count("READY=1") == 1


async def test_a_rejected_configuration_changes_nothing_and_is_shown_until_it_is_valid(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, status and view have the reason; systemd hears that the reload has ended."""
    (chip,) = node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    valid = daemon.loaded
    error = "config.toml: unit: 'half' is not valid; must be chip or board"

    def reject() -> ttdp.Settings:
        raise ttdp.ConfigError(error)

    daemon.loaded = reject
    daemon.notes.clear()
    daemon.reload()
    await daemon.ready()
    reason = f"the configuration was rejected at the last reload: {error}"
    assert reason in daemon.status and daemon.view()["rejected"] == error
    assert errors(caplog) == [f"reload failed, keeping the old configuration: {error}"]

    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150))
    assert reason in daemon.status

    daemon.loaded = valid
    daemon.reload()
    await until(lambda: reason not in daemon.status)
    assert daemon.view()["rejected"] is None and len(kubelet.find("register")) == 1


async def test_root_and_the_kubelets_directory_take_a_restart(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, short_tmp: Path, directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A line for each; every other key takes effect, and the sockets stay where they are."""
    (chip,) = node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    elsewhere = str(short_tmp / "elsewhere")

    daemon.reload(device_plugin_dir=elsewhere, root=elsewhere, resource_naming="arch")
    await kubelet.wait_for(lambda: kubelet.healthy(ARCH) == {chip.bdf})

    for key, value in (("device_plugin_dir", directory), ("root", node.root)):
        line = f"{key} needs a restart to change; still using {value}"
        assert caplog.messages.count(line) == 1


async def test_files_for_others_go_with_their_keys(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path
) -> None:
    """Those at the former paths are removed."""
    node.add("n150")
    path = short_tmp / "files"
    path.mkdir()
    outputs = {"cdi_dir": str(path), "labels_dir": str(path), "metrics_file": f"{path}/m.prom"}
    daemon = await start(interval=AN_HOUR, **outputs)
    names = {ttdp.CDI_FILE, ttdp.LABELS_FILE, "m.prom"}
    await until(lambda: {each.name for each in path.iterdir()} == names)

    daemon.reload(**dict.fromkeys(outputs, ""))

    await until(lambda: not [*path.iterdir()])
