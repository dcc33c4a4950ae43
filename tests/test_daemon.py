"""The daemon's start, its turns, and its end; its own errors; the kubelet's directory."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, errors, kubelet_of, no_descriptors, plugin_sockets, polls
from tests.world.kubelet import Kubelet
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until
from tests.world.simulation import RunningDaemon, settings_of

N150, P150, P150A = (f"tenstorrent.com/{name}" for name in ("n150", "p150", "p150a"))
AN_HOUR = 3600.0
NO_DEVICE = "no Tenstorrent device on this node; waiting for one"
EMFILE = "Too many open files"


async def status_of(daemon: RunningDaemon) -> int:
    """Return the exit status of a daemon that ends by itself."""
    return await asyncio.wait_for(daemon.ended(), PATIENCE)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the times at which turns begin."""
    found, check = list[float](), ttdp.PluginDirectory.check

    def count(directory: ttdp.PluginDirectory) -> None:
        found.append(time.monotonic())
        check(directory)

    monkeypatch.setattr(ttdp.PluginDirectory, "check", count)
    return found


async def test_hot_plug_reaches_the_kubelet_by_events(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """Polls are an hour apart. The first card of a node becomes a resource, too."""
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    assert daemon.status == NO_DEVICE and not kubelet.find("register")

    (chip,) = node.add("p150a")
    await kubelet.wait_for(lambda: kubelet.healthy(P150) == {chip.bdf})
    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150) == {chip.bdf})
    chip.come_back()
    await kubelet.wait_for(lambda: not kubelet.unhealthy(P150))

    (new,) = node.add("p150a")
    await kubelet.wait_for(lambda: new.bdf in kubelet.healthy(P150))


async def test_events_that_come_together_are_handled_together(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first at once; those of the next 30 ms in one scan."""
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
    assert not [note for note in daemon.notes if note.startswith(("READY", "RELOADING"))]

    second.bind()
    await daemon.ready()
    (ready,) = (number for number, note in enumerate(daemon.notes) if note == "READY=1")
    status = f"STATUS=2 × {N150}, 2 healthy; 1 × {P150A}, 1 healthy; {ttdp.REGISTERED}"
    assert daemon.notes[ready - 1] == status


async def test_it_is_ready_after_ten_seconds_without_a_card(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """One line names the card; it is found all the same when it comes."""
    assert ttdp.BIND_TIMEOUT == 10.0
    monkeypatch.setattr(ttdp, "BIND_TIMEOUT", 0.3)
    (chip,) = node.add("n150")
    chip.unbind()
    began = time.monotonic()
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()

    assert time.monotonic() - began > 0.3
    assert caplog.messages.count(f"{chip.bdf}: no device file; starting without it") == 1
    chip.bind()
    await until(lambda: daemon.status.startswith(f"1 × {N150}, 1 healthy"))


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
    monkeypatch.setattr(ttdp, "BIND_TIMEOUT", AN_HOUR)
    (card,) = node.add("n150")
    card.unbind()
    CANNOT_BE_BOUND[why](node, card)
    excluded = (card.bdf,) if why == "it is out of service" else ()

    daemon = await start(interval=AN_HOUR, exclude=excluded)
    await daemon.ready()


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


async def test_the_first_list_has_every_chip_and_nothing_spins_before_it(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, turns: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each has answered, or had the time to; one whose reading takes too long is unhealthy then."""
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", 0.5)
    quick, slow = node.add("n150") + node.add("n150")
    slow.block()
    await start(interval=AN_HOUR)
    await kubelet.manager.write_checkpoint()  # this event is no reason to begin
    await kubelet.wait_for(lambda: kubelet.find("list", N150))

    first = kubelet.find("list", N150)[0].fields
    assert {*first["healthy_ids"], *first["unhealthy_ids"]} == {quick.bdf, slow.bdf}
    assert len(turns) < 100  # about 25, of 20 ms each, and those for events

    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {slow.bdf})
    slow.unblock()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {quick.bdf, slow.bdf})


async def test_a_manager_that_does_not_take_the_readiness_is_told_again(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """Its queue can be full."""
    daemon = await start(interval=AN_HOUR)
    daemon.refused_notes += ["READY=1"] * 3

    await daemon.ready()

    assert daemon.notes.count("READY=1") == 1 and not daemon.refused_notes


async def test_files_for_others_are_looked_at_once_after_each_scan(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, turns: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """When its readings are there. Turns for anything else cost less."""
    looks: list[str] = []
    monkeypatch.setattr(ttdp.OutputFiles, "keep", lambda _, path, text: looks.append(path))
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    await daemon.ready()

    for _ in range(3):
        turns.clear()
        await kubelet.manager.write_checkpoint()
        await until(lambda: turns)
    assert looks == [
        f"{daemon.settings.cdi_dir}/{ttdp.CDI_FILE}",
        f"{daemon.settings.labels_dir}/{ttdp.LABELS_FILE}",
    ]


# -- the watchdog ----------------------------------------------------------------------------------


async def test_the_watchdog_is_fed_in_half_its_time_whatever_the_interval_of_polls(
    node: SimulatedNode, start: StartDaemon
) -> None:
    """An administrator can set a shorter one; without one nothing is sent."""
    node.add("n150")
    daemon = await start({"WATCHDOG_USEC": "200000"}, interval=AN_HOUR)
    began = time.monotonic()
    await until(lambda: daemon.notes.count("WATCHDOG=1") >= 5)
    assert time.monotonic() - began > 0.35
    await daemon.stop()

    daemon = await start(interval=0.05)
    await polls(daemon)
    assert not daemon.notified("WATCHDOG=1")


@pytest.mark.parametrize(("metrics", "poll"), [(AN_HOUR, 0.05), (0.05, AN_HOUR), (0.05, 0.05)])
async def test_the_metrics_file_is_written_every_15_seconds_whatever_the_interval_of_polls(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch, metrics: float, poll: float
) -> None:
    """The first one at once; none without a path."""
    assert ttdp.METRICS_INTERVAL == 15.0
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", metrics)
    writings: list[str] = []
    monkeypatch.setattr(ttdp.OutputFiles, "write", lambda _, path, text: writings.append(path))
    others = {"metrics_file": ""} if metrics == poll else {}
    daemon = await start(interval=poll, **others)

    if poll == AN_HOUR:
        await until(lambda: len(writings) > 3)
        assert daemon.polls == 1
    else:
        await polls(daemon)
        assert writings == ([] if others else [daemon.settings.metrics_file])


# -- its own errors --------------------------------------------------------------------------------


async def test_observations_that_fail_change_nothing_and_feed_no_watchdog(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Without descriptors, say: each second it is tried again; one line at each change.

    These looks are no polls: two within the 0.1 s that a heartbeat takes would show a stall.
    """
    assert ttdp.RETRY_TICK == 1.0
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.0)
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
        daemon.forget_notes()
        await until(lambda: len(failed) > 8)
        assert daemon.notes == [] and kubelet.healthy(N150) == {chip.bdf}
        assert await daemon.metrics() is None
        (problem,) = (each for each in daemon.view()["problems"] if each["subject"] == "node")
        assert problem["level"] == "FAIL" and EMFILE in problem["problem"]
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {chip.bdf})

    await until(lambda: daemon.notified("WATCHDOG=1") and EMFILE not in daemon.status)
    assert len(failed) <= 4 + (failed[-1] - failed[0]) / 0.05  # and one for each event
    assert daemon.polls == before and await daemon.metrics()
    first, second = [line for line in caplog.messages if "the node's state" in line]
    assert EMFILE in first and second == "the node's state can be read again"
    assert errors(caplog) == []


async def test_reads_without_descriptors_are_repeated_until_they_succeed(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the next turns, not at the next poll; nothing is advertised before."""
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    first, second = node.add("n150") + node.add("n150")
    first.fail("tt_heartbeat", "EMFILE")
    daemon = await start(interval=AN_HOUR)
    await until(lambda: EMFILE in daemon.status)

    first.restore("tt_heartbeat")
    await kubelet.wait_for(lambda: kubelet.find("list", N150))
    assert kubelet.find("list", N150)[0].fields["healthy_ids"] == [first.bdf, second.bdf]
    await daemon.ready()


async def test_a_turn_with_an_error_that_nobody_has_foreseen_is_logged_and_followed_by_others(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Each second; systemd restarts a daemon that goes on so, as no watchdog is fed."""
    monkeypatch.setattr(ttdp, "RETRY_TICK", 0.05)
    daemon = await start({"WATCHDOG_USEC": "1"}, interval=0.05)
    await daemon.ready()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "decide", fail)
        await until(lambda: caplog.text.count("internal error (main loop)") >= 3)
        daemon.forget_notes()
        await until(lambda: caplog.text.count("internal error (main loop)") >= 6)
        assert not daemon.notified("WATCHDOG=1")

    await until(lambda: daemon.notified("WATCHDOG=1"))


async def test_what_keeps_holds_from_being_known_is_in_the_status(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """A checkpoint that cannot be read, until it can be; a kubelet whose pods have no cgroups."""
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    async with kubelet_of(node, directory) as kubelet:
        await kubelet.registered(N150)
        kubelet.corrupt("garbage")
        await until(lambda: f"{ttdp.CHECKPOINT} cannot be read: " in daemon.status)
        assert "; the kubelet writes it again when the next pod starts" in daemon.status
        await kubelet.manager.write_checkpoint()
        await until(lambda: daemon.status.endswith(ttdp.REGISTERED))

    shutil.rmtree(node.root / "sys/fs/cgroup")
    async with Kubelet(directory) as other:
        await other.registered(N150)
        await until(lambda: "give kubelet and container runtime the same cgroup" in daemon.status)


# -- the kubelet's directory -----------------------------------------------------------------------


@pytest.mark.parametrize("why", ["does not exist", "is a link to nothing"])
async def test_it_is_ready_and_waits_for_the_directory_around_the_kubelets(
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
        missing = f"no kubelet is installed ({own} does not exist)"
        await until(lambda: daemon.status.endswith(missing))
        assert not own.exists()

        target.mkdir()
        if not own.is_symlink():
            own.symlink_to(target)
        async with kubelet_of(node, plugins) as kubelet:
            await kubelet.registered(N150)
            await until(lambda: missing not in daemon.status)


def replaced(directory: Path) -> None:
    directory.rename(directory.with_name("former"))
    directory.mkdir()


def made_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.touch()


UNUSABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "is deleted": (shutil.rmtree, "No such file or directory"),
    "is replaced": (replaced, "it was replaced"),
    "becomes a file": (made_a_file, "it was replaced"),
}


@pytest.mark.parametrize("how", UNUSABLE)
async def test_a_directory_that_is_another_one_ends_the_daemon(
    start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Status 74, after which systemd starts it in a new mount namespace, and one line."""
    spoil, reason = UNUSABLE[how]
    # Of a directory that somebody has open, the kernel does not report the end.
    daemon = await start(interval=AN_HOUR if how == "is replaced" else 0.1)
    await daemon.ready()

    spoil(directory)

    assert await status_of(daemon) == 74
    assert errors(caplog) == [f"{directory} cannot be used: {reason}; exiting"]


async def test_a_directory_that_cannot_be_made_or_written_ends_the_start(
    start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Likewise."""
    directory.symlink_to("nowhere")
    assert await status_of(await start()) == 74

    directory.unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(directory))
    assert await status_of(await start()) == 74

    reasons = ["No such file or directory", "it is not writable"]
    assert errors(caplog) == [f"{directory} cannot be used: {each}; exiting" for each in reasons]


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


# -- the end, and the next start -------------------------------------------------------------------


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
    chip.unblock()

    assert not [line for line in errors(caplog) if "Registration/Register" not in line]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_status_0(start: StartDaemon, number: int) -> None:
    """systemd's, or Ctrl-C."""
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()

    os.kill(os.getpid(), number)

    assert await status_of(daemon) == 0


async def test_sockets_of_a_daemon_that_was_killed_are_removed(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """Before any of its own exists; those of others stay."""
    directory.mkdir()
    for name in ("tt-n150.7-1.sock", "other.sock"):
        (directory / name).touch()

    daemon = await start(interval=AN_HOUR)
    await daemon.ready()

    assert [*directory.iterdir()] == [directory / "other.sock"]


async def test_a_restart_keeps_chips_and_holds(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Also of a chip whose driver is not loaded any more; no recovery of one that was well."""
    one, other = node.add("n150") + node.add("n150")
    daemon = await start(interval=AN_HOUR, state_dir=str(tmp_path))
    await kubelet.run_pod("pod", N150)
    (its_chip,) = kubelet.allocated(N150)
    await daemon.stop()
    node.on_uevent = None
    node.chip(its_chip).vanish()
    node.unload_driver()

    daemon = await start(interval=AN_HOUR, state_dir=str(tmp_path))
    await daemon.ready()
    rows = {row["bdf"]: row for row in daemon.view()["chips"]}

    assert rows.keys() == {one.bdf, other.bdf}
    assert [pod["pod"] for pod in rows[its_chip]["pods"]] == ["pod"]
    assert rows[its_chip]["reason"].startswith("PCI device is gone")
    assert rows[its_chip]["serial"] is not None
    assert "healthy again" not in caplog.text
