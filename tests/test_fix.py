"""`fix ADDRESS`: one step at a time, each after a look and an answer, and whom it hits."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import ttdp
from tests.chips import chip
from tests.commands import Host, Terminal
from tests.conftest import StartDaemon
from tests.world.controls import Controls
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import ROOT, until
from tests.world.simulation import STALLS, RunningDaemon
from ttdp import End, Fault, Kind, PciFunction, Situation, Step

N150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p300"
QUESTION = "Do this? [y/N] "
# Seconds. An effect, which the daemon sees at its polls, has time on a busy machine, too.
QUICK = {"FOLLOWS_WITHIN": 15.0, "LOOK_INTERVAL": 0.05}
QUICK |= {"RESET_TAKES": 0.7, "WORMHOLE_STARTS_WITHIN": 0.9}
IN_VAIN = {"FOLLOWS_WITHIN": 1.5}  # for steps that have no effect

# -- the table, as a pure function -----------------------------------------------------------------

HERE = chip(1, "n150").function
UNBOUND = HERE.without_device_file()
NO_FILE = HERE._replace(file_fault="/dev/tenstorrent/0 does not exist")
TAKEN = frozenset(Step)


def seen(
    kind: Kind | None = None, function: PciFunction = HERE, *, lasts: float = 1e6, **more: Any
) -> Situation:
    """A chip with the driver and a fault that the daemon has seen for so many seconds."""
    fault = Fault(kind, "it is ill") if kind else None
    return Situation(function, fault=fault, now=1e9, since=1e9 - lasts, **more)


@pytest.mark.parametrize(
    ("situation", "step"),
    [
        (seen(Kind.GONE, UNBOUND._replace(on_bus=False)), Step.RESCAN),
        (seen(Kind.NO_DRIVER, UNBOUND._replace(driver_is_loaded=False)), Step.LOAD),
        (seen(Kind.NO_DRIVER, UNBOUND), Step.BIND),
        (seen(Kind.NO_DRIVER, UNBOUND, override="vfio-pci"), Step.BIND),
        (seen(Kind.DEVICE_FILE, HERE.without_device_file("tenstorrent")), Step.REBIND),
        (seen(Kind.DEVICE_FILE, NO_FILE), Step.MAKE_FILE),
        *((seen(kind), Step.RESET) for kind in (Kind.NO_RESPONSE, Kind.STALLED, Kind.BLOCKED)),
        (seen(Kind.READ_ERROR), Step.RESET),
        (seen(Kind.RESETTING, lasts=29), Step.WAIT),
        (seen(Kind.RESETTING, lasts=31), Step.REBIND),
        (seen(Kind.RESETTING, done=frozenset({Step.REBIND})), Step.RESET),
        (seen(Kind.SILENT, HERE._replace(arch="wormhole"), lasts=119), Step.WAIT),
        (seen(Kind.SILENT, HERE._replace(arch="wormhole"), lasts=121), Step.REBIND),
        (seen(Kind.SILENT, HERE._replace(arch="blackhole"), lasts=29), Step.WAIT),
        (seen(Kind.SILENT, HERE._replace(arch="blackhole"), lasts=31), Step.REBIND),
        (seen(Kind.SILENT, done=frozenset({Step.REBIND})), Step.RESET),
        (seen(Kind.RESETTING, is_arm64=True), Step.REBIND),
        # sysfs is right where the daemon has not looked yet.
        (seen(None, UNBOUND), Step.BIND),
        (seen(Kind.STALLED, NO_FILE), Step.MAKE_FILE),
    ],
)
def test_the_step_that_a_fault_needs(situation: Situation, step: Step) -> None:
    """A row of the table each."""
    assert ttdp.next_step(situation) is step


@pytest.mark.parametrize(
    ("situation", "text", "is_well"),
    [
        (seen(), "nothing needs to be done", True),
        (seen(in_service=False), "the chip is excluded, and no pod holds it", True),
        (seen(None, UNBOUND, in_service=False), "the chip is excluded, and no pod holds it", True),
        (seen(Kind.NO_DRIVER, UNBOUND._replace(driver="vfio-pci")), "virtual machine", False),
        (seen(Kind.HOT), "only cooling helps", False),
        (seen(Kind.TRIPPED, ends_at=1e9 + 60), "if the chip does not trip again", False),
        (seen(Kind.STALLED, is_arm64=True), "drain this node, reboot it", False),
        (seen(Kind.GONE), "the service has no reading of it yet", False),
    ],
)
def test_where_no_step_helps(situation: Situation, text: str, is_well: bool) -> None:
    """It says why; a chip without a fault, or out of service, is well."""
    end = ttdp.next_step(situation)
    assert isinstance(end, End)
    assert text in end.text and end.is_well == is_well


@pytest.mark.parametrize("kind", [Kind.STALLED, Kind.SILENT, Kind.RESETTING])
def test_no_step_is_taken_twice(kind: Kind) -> None:
    """What is left is a power cycle; of a driver that cannot be loaded, its installation."""
    end = ttdp.next_step(seen(kind, done=TAKEN))
    assert isinstance(end, End) and end.text == "what is left: power-cycle the host"

    unloaded = UNBOUND._replace(driver_is_loaded=False)
    end = ttdp.next_step(seen(Kind.NO_DRIVER, unloaded, done=TAKEN))
    assert isinstance(end, End) and "install the driver" in end.text


def test_a_trip_ends_at_a_time_of_day() -> None:
    """Of this machine's clock."""
    end = ttdp.next_step(seen(Kind.TRIPPED, ends_at=1e9 + 3600))
    moment = time.strftime("%H:%M:%S", time.localtime(1e9 + 3600))
    assert isinstance(end, End) and f"the fault ends at {moment} if" in end.text


DRIVERS = "/sys/bus/pci/drivers/tenstorrent"
COMMANDS = {
    Step.RESCAN: "echo 1 > /sys/bus/pci/rescan",
    Step.LOAD: "/usr/sbin/modprobe tenstorrent",
    Step.BIND: f"echo 0000:01:00.0 > {DRIVERS}/bind",
    Step.REBIND: f"echo 0000:01:00.0 > {DRIVERS}/unbind; echo 0000:01:00.0 > {DRIVERS}/bind",
    Step.WAIT: "",
    Step.RESET: "/usr/bin/tt-smi -r /dev/tenstorrent/0 --no_reinit",
}


@pytest.mark.parametrize("step", COMMANDS)
def test_the_command_that_is_shown(step: Step) -> None:
    """It does what the step does; a program is shown with its path."""
    program = {Step.LOAD: "/usr/sbin/modprobe", Step.RESET: "/usr/bin/tt-smi"}.get(step, "")
    assert ttdp.shown_command(step, seen(), ttdp.Settings(), program) == COMMANDS[step]


def test_the_command_that_clears_driver_override() -> None:
    """Only if it keeps the card for another driver."""
    kept = seen(Kind.NO_DRIVER, UNBOUND, override="vfio-pci")
    bind = COMMANDS[Step.BIND]
    clear = f"echo > {HERE.directory}/driver_override"

    assert ttdp.shown_command(Step.BIND, kept, ttdp.Settings(), "") == f"{clear} && {bind}"

    ours = kept._replace(override="tenstorrent")
    assert ttdp.shown_command(Step.BIND, ours, ttdp.Settings(), "") == bind


@pytest.mark.parametrize(
    ("what", "remove"), [("missing", "rm -f"), ("a file", "rm -f"), ("a directory", "rmdir")]
)
def test_the_command_that_makes_a_device_file(node: SimulatedNode, what: str, remove: str) -> None:
    """What is there is removed first, and its directory can be missing."""
    (card,) = node.add("n150")
    path = card.device_node
    path.unlink()
    if what == "a file":
        path.touch()
    if what == "a directory":
        path.mkdir()

    settings = ttdp.Settings(sysfs_root=f"{node.root}/sys", dev_root=f"{node.root}/dev")
    function = ttdp.scan(settings, {}, driver_is_loaded=True)[card.bdf]
    assert function
    number = card.attribute("dev").read_text().strip().replace(":", " ")
    make = f"mknod -m 666 {path} c {number}"
    command = ttdp.shown_command(Step.MAKE_FILE, seen(function=function), settings, "")
    assert command == f"mkdir -p {path.parent}; {remove} {path}; {make}"


# -- on a node -------------------------------------------------------------------------------------


@pytest.fixture
async def controls(node: SimulatedNode, short_tmp: Path) -> AsyncIterator[Controls]:
    """The node's kernel, with a tt-smi and a modprobe that write down their calls."""
    controls = Controls(node, short_tmp)
    controls.install("tt-smi", "modprobe")
    async with controls.serving():
        yield controls


@dataclass
class Served(Host):
    """A host on which `fix` can ask a daemon."""

    daemon: RunningDaemon = field(init=False)


@pytest.fixture
def host(short_tmp: Path, node: SimulatedNode, ticking: None, controls: Controls) -> Served:
    environ = {"RUNTIME_DIRECTORY": str(short_tmp), "TT_CONTROLS": controls.path}
    return Served(short_tmp, node, environ, dict(QUICK))


Serve = Callable[..., Any]


@pytest.fixture
def serve(host: Served, start: StartDaemon) -> Serve:
    """Starts the daemon."""

    async def serve(**settings: Any) -> RunningDaemon:
        given = {"health": STALLS, **settings}
        daemon: RunningDaemon = await start(runtime_dir=str(host.root), **given)
        await until(lambda: daemon.notified("READY=1"))
        host.daemon = daemon
        return daemon

    return serve


async def has_fault(daemon: RunningDaemon, chip: Chip, kind: Kind) -> None:
    """Wait until the daemon sees this fault."""
    await until(lambda: (fault := daemon.chip(chip.bdf).fault) and fault.kind is kind)


def can_make_device_files(node: SimulatedNode) -> None:
    try:
        os.mknod(node.root / "probe", stat.S_IFCHR, os.makedev(245, 0))
    except OSError:
        pytest.skip("needs root to make device files")
    (node.root / "probe").unlink()


def heal(chip: Chip) -> None:
    """What a reset does to a chip whatever it had."""
    chip.thaw()
    for attribute in [*chip.overridden]:
        chip.restore(attribute)
    chip.post_reset()
    chip.speak()


def take_for_a_machine(chip: Chip) -> None:
    chip.bind_to("vfio-pci")


def reserve(chip: Chip) -> None:
    chip.unbind()
    chip.keep_for("vfio-pci")


TT_SMI = "tt-smi -r /dev/tenstorrent/1 --no_reinit"
ADDRESS = "0000:02:00.0"
REBIND = [f"unbind {ADDRESS}", f"bind {ADDRESS}"]
ROWS: dict[str, tuple[Callable[[Chip], None], Kind, list[str]]] = {
    "gone": (Chip.vanish, Kind.GONE, ["rescan 1"]),
    "not loaded": (lambda it: it.node.unload_driver(), Kind.NO_DRIVER, ["modprobe tenstorrent"]),
    "not bound": (Chip.unbind, Kind.NO_DRIVER, [f"bind {ADDRESS}"]),
    "reserved": (reserve, Kind.NO_DRIVER, [f"driver_override  {ADDRESS}", f"bind {ADDRESS}"]),
    "no class device": (Chip.lose_class_device, Kind.DEVICE_FILE, REBIND),
    "no response": (Chip.die, Kind.NO_RESPONSE, [TT_SMI]),
    "stalled": (Chip.freeze, Kind.STALLED, [TT_SMI]),
    "blocked": (Chip.block, Kind.BLOCKED, [TT_SMI]),
    "read error": (lambda it: it.fail("tt_heartbeat"), Kind.READ_ERROR, [TT_SMI]),
    "resetting": (Chip.reset, Kind.RESETTING, REBIND),
    "silent": (Chip.silence, Kind.SILENT, [*REBIND, TT_SMI]),
}


@pytest.mark.parametrize("row", ROWS)
async def test_each_fault_is_mended(
    host: Served,
    kubelet: Kubelet,
    controls: Controls,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    row: str,
) -> None:
    """With the calls of its row of the table, and nothing else; the other chip is left alone."""
    breaks, kind, calls = ROWS[row]
    monkeypatch.setattr(ttdp, "FIRMWARE_TIMEOUT", 0.2)
    other, ill = host.node.add("n150") + host.node.add("n150")
    daemon = await serve()
    await kubelet.registered(N150)
    controls.finds = {ill.bdf}
    controls.reset = heal
    breaks(ill)
    await has_fault(daemon, ill, kind)

    answer = await host.ask("fix", ADDRESS, "--yes")
    assert (controls.calls, answer.status, answer.err) == (calls, 0, ""), answer.out
    first, *_, healthy, last = answer.out.splitlines()
    assert first.startswith(f"{ADDRESS} (n150): ") and "(since " in first
    assert healthy == f"{ADDRESS} (n150): healthy; not in use"
    assert last == "nothing more needs to be done"
    assert daemon.chip(ill.bdf).fault is None and daemon.chip(other.bdf).fault is None


def missing(path: Path) -> None:
    path.unlink()


def without_directory(path: Path) -> None:
    for each in path.parent.rglob("*"):
        if not each.is_dir() or each.is_symlink():
            each.unlink()
    os.rename(path.parent, path.parent.with_name("gone"))


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


FILES: dict[str, Callable[[Path], None]] = {
    "missing": missing,
    "its directory, too": without_directory,
    "a file": instead(Path.touch),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a link to another": instead(lambda path: path.symlink_to("/dev/null")),
    "another device": instead(lambda path: os.mknod(path, 0o20666, os.makedev(1, 3))),
    "a runtime's directory": instead(Path.mkdir),
}


@pytest.mark.parametrize("what", FILES)
async def test_a_device_file_is_made_again(
    host: Served, controls: Controls, serve: Serve, what: str
) -> None:
    """With sysfs's numbers, and for every user, whatever the umask is and what was there."""
    can_make_device_files(host.node)
    (ill,) = host.node.add("n150")
    daemon = await serve()
    FILES[what](ill.device_node)
    await has_fault(daemon, ill, Kind.DEVICE_FILE)

    before = os.umask(0o077)
    try:
        answer = await host.ask("fix", ill.bdf, "--yes")
    finally:
        os.umask(before)
    assert (controls.calls, answer.status) == ([], 0), answer.out + answer.err
    status = ill.device_node.lstat()
    assert stat.S_ISCHR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o666
    assert f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" == (
        ill.attribute("dev").read_text().strip()
    )
    assert ill.device_node.parent.stat().st_mode & 0o777 == 0o755


# -- several steps, and steps without effect -------------------------------------------------------


@pytest.fixture
async def stalled(host: Served, kubelet: Kubelet, serve: Serve) -> Chip:
    """A chip whose firmware has stopped while a pod holds it."""
    (chip,) = host.node.add("n150")
    daemon = await serve()
    await kubelet.registered(N150)
    await kubelet.admit("train-0", "main", {N150: 1})
    await until(lambda: "default/train-0" in daemon.daemon.host.holds.names.values())
    chip.freeze()
    await has_fault(daemon, chip, Kind.STALLED)
    return chip


async def test_two_faults_are_mended_in_turn(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """A device file that is missing, and firmware that has stopped."""
    can_make_device_files(host.node)
    (ill,) = host.node.add("n150")
    daemon = await serve()
    ill.freeze()
    await has_fault(daemon, ill, Kind.STALLED)
    ill.device_node.unlink()
    await has_fault(daemon, ill, Kind.DEVICE_FILE)

    answer = await host.ask("fix", ill.bdf, "--yes")
    assert answer.status == 0 and controls.calls == ["tt-smi -r /dev/tenstorrent/0 --no_reinit"]
    steps = [line for line in answer.out.splitlines() if line.startswith("next step: ")]
    assert [step.split()[2] for step in steps] == ["make", "reset"]


async def test_a_step_without_effect_is_not_taken_again(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """It says what is left, and which pods have lost their chip all the same."""
    host.constants |= IN_VAIN
    controls.reset = lambda chip: None
    answer = await host.ask("fix", stalled.bdf, "--yes")

    assert controls.calls == ["tt-smi -r /dev/tenstorrent/0 --no_reinit"]
    assert answer.status == 1
    assert answer.out.endswith(
        "what is left: power-cycle the host\npods that must be started again: default/train-0\n"
    )


async def test_what_the_kernel_refuses_is_told(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """With its reason; a bind that is a part of a rebind is not tried again by itself."""
    host.constants |= IN_VAIN
    (ill,) = host.node.add("p150a")
    daemon = await serve()
    controls.refused["bind"] = "EBUSY"
    ill.reset()
    await has_fault(daemon, ill, Kind.RESETTING)

    answer = await host.ask("fix", ill.bdf, "--yes")
    assert controls.calls == [f"unbind {ill.bdf}", f"bind {ill.bdf}"] and answer.status == 1
    path = host.node.root / "sys/bus/pci/drivers/tenstorrent/bind"
    assert f"{path}: Device or resource busy\n" in answer.out
    assert answer.out.endswith("what is left: power-cycle the host\n")


@pytest.mark.parametrize(
    ("breaks", "kind", "call", "left"),
    [
        (Chip.vanish, Kind.GONE, "rescan 1", "power-cycle the host"),
        (
            lambda it: it.node.unload_driver(),
            Kind.NO_DRIVER,
            "modprobe tenstorrent",
            "install the driver (tt-kmd) for the running kernel",
        ),
    ],
)
async def test_what_is_left_after_each_step(
    host: Served,
    controls: Controls,
    serve: Serve,
    breaks: Callable[[Chip], None],
    kind: Kind,
    call: str,
    left: str,
) -> None:
    """A card that a rescan does not find, and a driver that cannot be loaded."""
    host.constants |= IN_VAIN
    (ill,) = host.node.add("n150")
    daemon = await serve()
    controls.refused["modprobe"] = "ENOENT"
    breaks(ill)
    await has_fault(daemon, ill, kind)
    answer = await host.ask("fix", ill.bdf, "--yes")

    assert (controls.calls, answer.status) == ([call], 1)
    assert f"what is left: {left}\n" in answer.out


async def test_a_reset_that_ends_by_itself_is_waited_for(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """Then no step is needed, and no answer."""
    (ill,) = host.node.add("p150a")
    daemon = await serve()
    ill.reset()
    await has_fault(daemon, ill, Kind.RESETTING)
    host.constants["RESET_TAKES"] = 60.0
    async with host.on_terminal("fix", ill.bdf) as terminal:
        await terminal.shows("next step: wait")
        ill.post_reset()
        assert await terminal.ended() == 0

    assert controls.calls == [] and "healthy" in terminal.text


async def test_an_effect_has_four_health_intervals(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """If that is longer than the usual time, as the daemon sees it only at its polls."""
    (ill,) = host.node.add("n150")
    daemon = await serve(interval=3.0)
    ill.die()
    await has_fault(daemon, ill, Kind.NO_RESPONSE)
    loop = asyncio.get_running_loop()
    controls.reset = lambda chip: loop.call_later(0.5, heal, chip)
    host.constants["FOLLOWS_WITHIN"] = 0.1
    answer = await host.ask("fix", ill.bdf, "--yes")

    assert answer.status == 0, answer.out


async def test_to_wait_is_a_step_that_is_described(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """Without a terminal it only says so, and ends at once."""
    (ill,) = host.node.add("p150a")
    daemon = await serve()
    ill.reset()
    await has_fault(daemon, ill, Kind.RESETTING)
    host.constants["RESET_TAKES"] = 3600.0
    answer = await host.ask("fix", ill.bdf)

    assert "next step: wait, because a reset" in answer.out
    assert (answer.status, controls.calls) == (1, [])


# -- nothing is done -------------------------------------------------------------------------------


async def test_a_healthy_chip_is_left_alone(
    host: Served, controls: Controls, kubelet: Kubelet, serve: Serve
) -> None:
    """It says so, and which pod has it; addresses are accepted in any case."""
    host.node.add("n150", bdf="0000:0a:00.0")
    daemon = await serve()
    await kubelet.registered(N150)
    await kubelet.admit("train-0", "main", {N150: 1})
    await until(lambda: daemon.daemon.host.holds.names)
    answer = await host.ask("fix", "0000:0A:00.0")
    state = "0000:0a:00.0 (n150): healthy; used by default/train-0"

    assert (answer.out, answer.status) == (f"{state}\nnothing needs to be done\n", 0)
    assert controls.calls == []


async def test_a_chip_that_is_out_of_service_is_left_alone(
    host: Served, controls: Controls, serve: Serve
) -> None:
    """Whatever it has, as it may be on its way back to the vendor; status 0."""
    (chip,) = host.node.add("n150")
    await serve(exclude=(chip.bdf,))
    chip.unbind()
    answer = await host.ask("fix", chip.bdf, "--yes")

    assert answer.out.endswith("nothing is done: the chip is excluded, and no pod holds it\n")
    assert (controls.calls, answer.status) == ([], 0)


NOT_MENDED: dict[str, tuple[Callable[[Chip], None], Kind, str]] = {
    "another driver's": (take_for_a_machine, Kind.NO_DRIVER, "driver vfio-pci is bound"),
    "hot": (lambda it: it.write("temp1_input", b"91000\n"), Kind.HOT, "only cooling helps"),
    "tripped": (Chip.trip, Kind.TRIPPED, "the fault ends at "),
}


@pytest.mark.parametrize("what", NOT_MENDED)
async def test_what_no_command_helps(
    host: Served, controls: Controls, serve: Serve, what: str
) -> None:
    """It says what would help; status 1."""
    breaks, kind, text = NOT_MENDED[what]
    (ill,) = host.node.add("p150a")
    daemon = await serve(health={"temperature_limit": 90.0})
    breaks(ill)
    await has_fault(daemon, ill, kind)
    answer = await host.ask("fix", ill.bdf, "--yes")

    assert text in answer.out and "nothing is done" in answer.out
    assert (controls.calls, answer.status) == ([], 1)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("0000:99:00.0", "'0000:99:00.0' was not seen since boot; run: tt-device-plugin list\n"),
        ("a\x1b[2J", "'a\\x1b[2J' was not seen since boot; run: tt-device-plugin list\n"),
        (
            "0000046131842007",
            "0000046131842007 is a board; give the address of a chip: "
            "0000:01:00.0 or 0000:02:00.0\n",
        ),
    ],
)
async def test_an_address_that_is_none(
    host: Served, serve: Serve, address: str, reason: str
) -> None:
    """One line and status 2; of a board's ID its chips."""
    host.node.add("p300c", serial="0000046131842007")
    daemon = await serve()
    await until(lambda: all(each.identity.serial for each in daemon.decision.chips.values()))
    answer = await host.ask("fix", address, "--yes")

    assert (answer.out, answer.err, answer.status) == ("", reason, 2)


async def test_a_tray_is_a_board(host: Served, serve: Serve) -> None:
    """Whatever the unit is."""
    host.node.add("galaxy-wormhole")
    await serve()
    answer = await host.ask("fix", "0000:C0", "--yes")

    assert answer.err.startswith("0000:c0 is a board; give the address of a chip: 0000:c1:00.0, ")
    assert answer.status == 2


async def test_a_card_that_is_not_supported(host: Served, serve: Serve) -> None:
    """It was seen, but nothing is known of it."""
    (chip,) = host.node.add("n150")
    chip.unbind()
    chip.pci["device"] = "0xfaca"
    chip.show("device")
    await serve()
    answer = await host.ask("fix", chip.bdf, "--yes")

    assert answer.err.startswith(f"{chip.bdf} is not supported: ") and answer.status == 1


# -- who may, and when -----------------------------------------------------------------------------


async def test_without_a_daemon_it_is_one_line(host: Served, controls: Controls) -> None:
    """The view of one look does not know a stalled heartbeat, nor the pods."""
    (chip,) = host.node.add("n150")
    chip.unbind()
    answer = await host.ask("fix", chip.bdf, "--yes")

    assert answer.err == "the service is not running; run: systemctl start tt-device-plugin\n"
    assert (answer.out, controls.calls, answer.status) == ("", [], 1)


async def test_the_daemon_must_have_the_same_roots(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """Or its view would be of another machine; one line."""
    answer = await host.ask("fix", stalled.bdf, "--yes", TTDP_PROC_ROOT="/proc")
    assert answer.status == 0  # the flag outweighs it

    elsewhere = Host(host.root, SimulatedNode(host.root / "other"), host.environ)
    answer = await elsewhere.ask("fix", stalled.bdf, "--yes")
    assert answer.err.startswith("the service uses different directories")
    assert len(answer.err.splitlines()) == 1 and answer.status == 1


async def test_the_daemon_must_have_the_same_version(
    host: Served, stalled: Chip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade it must have been restarted; one line."""
    monkeypatch.setattr(ttdp, "__version__", "0.1.9")
    answer = await host.ask("fix", stalled.bdf, "--yes")
    expected = f"the service is still version 0.1.9, not {ttdp_version()}; run: systemctl restart "

    assert answer.err == f"{expected}tt-device-plugin\n" and answer.status == 1


def ttdp_version() -> str:
    """The version of the program's file, whatever a test pretends."""
    text = Path(ttdp.__file__).read_text()
    return text.partition('__version__ = "')[2].partition('"')[0]


async def test_an_invalid_file_does_not_keep_from_mending(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The daemon runs on with the last valid one; the file's error is a line on stderr."""
    file = host.configure("unit = 7")
    answer = await host.ask("fix", stalled.bdf, "--yes", f"--config-file={file}")
    assert "unit" in answer.err and len(answer.err.splitlines()) == 1
    assert (len(controls.calls), answer.status) == (1, 0)


@pytest.mark.parametrize("place", ["status.sock", "sys/bus/pci/drivers/tenstorrent/bind"])
async def test_who_may_not_is_told_to_be_root(host: Served, serve: Serve, place: str) -> None:
    """For the daemon's view, and for a step; one line."""
    (ill,) = host.node.add("n150")
    daemon = await serve()
    ill.unbind()
    await has_fault(daemon, ill, Kind.NO_DRIVER)
    path = (host.root if place == "status.sock" else host.node.root) / place
    path.chmod(0)
    answer = await asyncio.to_thread(host.run_as_process, "fix", ill.bdf, "--yes", as_other=True)

    assert answer.err.endswith(" as root\n") and str(path) in answer.err
    assert len(answer.err.splitlines()) == 1 and answer.status == 1


async def test_one_at_a_time(host: Served, controls: Controls, stalled: Chip) -> None:
    """The second is one line, which names the first."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        answer = await host.ask("fix", stalled.bdf, "--yes")
        assert answer.err.startswith("another fix is at work on this node: process ")
        assert len(answer.err.splitlines()) == 1
        assert (answer.out, answer.status, controls.calls) == ("", 1, [])


# -- the question ----------------------------------------------------------------------------------


async def test_it_says_what_it_would_do_and_asks(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """Fault, users, step and command; then what it sees, and which pods have lost their chip."""
    host.node.start_process(77, "0::/user.slice\n", [str(stalled.device_node)], "a\x1b[2Jb")
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        before = await terminal.shows(QUESTION)
        assert controls.calls == []
        terminal.type("y\n")
        assert await terminal.ended() == 0

    *state, step, command, _ = before.splitlines()
    first = " ".join(line.strip() for line in state)  # wrapped
    assert first.startswith(f"{stalled.bdf} (n150): heartbeat stalled at ")
    assert " (since " in first and first.endswith("; used by default/train-0, a\\x1b[2Jb[77]")
    assert step == "next step: reset the chip with tt-smi, which interrupts its users"
    tt_smi = host.node.root / "bin/tt-smi"
    assert command == f"    {tt_smi} -r /dev/tenstorrent/0 --no_reinit"
    assert controls.calls == ["tt-smi -r /dev/tenstorrent/0 --no_reinit"]
    assert terminal.text.endswith(
        f"{stalled.bdf} (n150): healthy; used by default/train-0, a\\x1b[2Jb[77]\n"
        "nothing more needs to be done\npods that must be started again: default/train-0\n"
    )


async def test_readmes_example_is_what_it_prints(
    host: Served, kubelet: Kubelet, serve: Serve
) -> None:
    """But for the time, the heartbeat, and where tt-smi is and what it prints."""
    host.node.add("n300")
    (ill,) = host.node.add("n300")
    daemon = await serve()
    await kubelet.registered("tenstorrent.com/n300")
    for name in ("train-0", "train-1"):
        await kubelet.admit(name, "main", {"tenstorrent.com/n300": 1})
    await until(lambda: len(daemon.daemon.host.holds.names) == 2)
    ill.freeze()
    await has_fault(daemon, ill, Kind.STALLED)
    async with host.on_terminal("fix", ill.bdf) as terminal:
        await terminal.shows(QUESTION)
        terminal.type("y\n")
        assert await terminal.ended() == 0

    def in_general(text: str) -> str:
        text = re.sub(r"stalled at \d+|since \d\d:\d\d", "", text)
        text = re.sub(r" *\S*/bin/tt-smi|…|-r /dev/tenstorrent/1: done", "", text)
        return " ".join(text.split())  # the lines may be wrapped

    readme = (Path(ttdp.__file__).parent / "README.md").read_text()
    (example,) = re.findall(r"(?s)# tt-device-plugin fix 0000:02:00.0\n(.*?)```", readme)
    assert in_general(terminal.text) == in_general(example)


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04", "yesterday\n", "ja\n"])
async def test_any_other_answer_is_a_no(
    host: Served, controls: Controls, stalled: Chip, answer: str
) -> None:
    """End of input, too; status 1."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        terminal.type(answer)
        assert await terminal.ended() == 1
    assert controls.calls == [] and terminal.text.endswith("\nnothing is done\n")


@pytest.mark.parametrize("answer", ["y\n", "Y\n", "yes\n", " YES \n"])
async def test_yes_has_several_forms(
    host: Served, controls: Controls, stalled: Chip, answer: str
) -> None:
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        terminal.type(answer)
        assert await terminal.ended() == 0
    assert len(controls.calls) == 1


async def test_what_was_typed_before_the_question_is_no_answer(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """Such as the rest of what was pasted."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        terminal.type("y\n")
        await terminal.shows(QUESTION)
        terminal.type("n\n")
        assert await terminal.ended() == 1
    assert controls.calls == []


async def test_without_a_terminal_it_only_describes(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The first step, without the command; a pipe cannot answer. Status 1."""
    answer = await host.ask("fix", stalled.bdf)
    lines = answer.out.splitlines()
    assert lines[1:] == [
        "next step: reset the chip with tt-smi, which interrupts its users",
        "nothing is done: the question needs a terminal; to answer yes in advance, use --yes",
    ]
    assert (controls.calls, answer.status, answer.err) == ([], 1, "")


async def test_yes_in_advance_on_a_terminal(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The command is shown, and nothing is asked."""
    async with host.on_terminal("fix", stalled.bdf, "--yes") as terminal:
        assert await terminal.ended() == 0
    assert QUESTION not in terminal.text and "/bin/tt-smi -r" in terminal.text
    assert len(controls.calls) == 1


async def test_a_chip_that_goes_away_before_the_answer(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The answer was for another step: it asks again."""
    controls.finds = {stalled.bdf}
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        stalled.vanish()
        stalled.thaw()
        terminal.type("y\n")
        second = await terminal.shows(QUESTION)

        assert "your answer was for another step" in second and "rescan the PCI bus" in second
        assert controls.calls == []

        terminal.type("y\n")
        assert await terminal.ended() == 0
    assert controls.calls == ["rescan 1"]


async def test_a_chip_that_is_renumbered_before_the_answer(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The number that was shown is another chip's now."""
    (other,) = host.node.add("n150")
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        assert "/dev/tenstorrent/0 " in await terminal.shows(QUESTION)
        host.node.swap_ordinals(stalled.bdf, other.bdf)
        terminal.type("y\n")
        assert "/dev/tenstorrent/1 " in await terminal.shows(QUESTION)
        assert controls.calls == []
        terminal.type("y\n")
        assert await terminal.ended() == 0
    assert controls.calls == ["tt-smi -r /dev/tenstorrent/1 --no_reinit"]


async def test_other_pods_before_the_answer(
    host: Served, controls: Controls, kubelet: Kubelet, stalled: Chip
) -> None:
    """Whom it hits is a part of the question."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        assert "default/train-0" in await terminal.shows(QUESTION)
        kubelet.delete("train-0")
        await until(lambda: not host.daemon.decision.holds)
        terminal.type("y\n")
        assert "default/train-0" not in await terminal.shows(QUESTION)
    assert controls.calls == []


async def test_the_service_ends_before_the_answer(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """Nothing is done without its view."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        await host.daemon.stop()
        (host.root / ttdp.STATUS_SOCKET).unlink()
        terminal.type("y\n")
        assert await terminal.ended() == 1
    assert "the service is not running; run: systemctl start" in terminal.text
    assert controls.calls == []


# -- whom it hits ----------------------------------------------------------------------------------


async def test_a_reset_of_a_p300_hits_the_other_chip(
    host: Served, controls: Controls, kubelet: Kubelet, serve: Serve
) -> None:
    """And its pod; both pods have to be started again."""
    ill, other = host.node.add("p300c")
    daemon = await serve()
    await kubelet.registered(P300)
    for name in ("train-0", "train-1"):
        await kubelet.admit(name, "main", {P300: 1})
    await until(lambda: len(daemon.daemon.host.holds.names) == 2)
    ill.die()
    await has_fault(daemon, ill, Kind.NO_RESPONSE)

    answer = await host.ask("fix", ill.bdf, "--yes")
    pods = {row["bdf"]: row["pods"][0]["pod"] for row in (await host.ask("list", "--json")).rows}
    lines = answer.out.splitlines()
    assert lines[0].endswith(f"; used by default/{pods[ill.bdf]}")
    assert lines[1] == (
        f"{other.bdf}, the other chip of its board, is reset too; used by default/{pods[other.bdf]}"
    )
    both = f"default/{pods[ill.bdf]}, default/{pods[other.bdf]}"
    assert lines[-1] == f"pods that must be started again: {both}"


async def test_the_other_chip_can_be_unknown(host: Served, serve: Serve) -> None:
    """Two chips are known as one board by its serial number, which the firmware reports."""
    ill, _ = host.node.add("p300c", firmware=False)
    daemon = await serve()
    ill.die(bus=True)
    await has_fault(daemon, ill, Kind.NO_RESPONSE)
    answer = await host.ask("fix", ill.bdf)

    assert "the other chip of its board, which is not known, is reset too\n" in answer.out


async def test_the_driver_concerns_all_chips(
    host: Served, controls: Controls, kubelet: Kubelet, serve: Serve
) -> None:
    """Their users are named, too."""
    first, second = host.node.add("n150") + host.node.add("n150")
    daemon = await serve()
    await kubelet.registered(N150)
    await kubelet.admit("train-0", "main", {N150: 2})
    await until(lambda: daemon.daemon.host.holds.names)
    host.node.unload_driver()
    await has_fault(daemon, first, Kind.NO_DRIVER)

    answer = await host.ask("fix", first.bdf)
    assert "which concerns all chips of this node" in answer.out
    assert f"{second.bdf}: used by default/train-0\n" in answer.out


@pytest.mark.parametrize("on_terminal", [True, False])
async def test_a_galaxys_chip_is_reset_only_after_an_answer(
    host: Served, controls: Controls, serve: Serve, on_terminal: bool
) -> None:
    """--yes does not give it; what is known of such resets is told."""
    ill, *_ = host.node.add("galaxy-wormhole")
    daemon = await serve()
    ill.freeze()
    await has_fault(daemon, ill, Kind.STALLED)
    if on_terminal:
        async with host.on_terminal("fix", ill.bdf, "--yes") as terminal:
            text = await terminal.shows(QUESTION)
            terminal.type("n\n")
            assert await terminal.ended() == 1
    else:
        answer = await host.ask("fix", ill.bdf, "--yes")
        text = answer.out
        assert answer.status == 1 and text.endswith("the question needs a terminal\n")

    assert "CPLD firmware 1.16" in text and controls.calls == []


# -- tt-smi ----------------------------------------------------------------------------------------


async def test_a_missing_tt_smi(host: Served, controls: Controls, stalled: Chip) -> None:
    """It says where it looked: never among the host's own programs."""
    (host.node.root / "bin/tt-smi").unlink()
    other = host.root / "path"
    other.mkdir()
    (other / "tt-smi").write_text("#!/bin/false\n")
    (other / "tt-smi").chmod(0o755)
    answer = await host.ask("fix", stalled.bdf, "--yes", PATH=f"{other}:{os.environ['PATH']}")
    reason = f"tt-smi was not found in {host.node.root}/bin (sudo has a PATH of its own)\n"

    assert answer.out.endswith(reason) and answer.status == 1


def test_programs_are_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sysfs is the real one."""
    program = tmp_path / "tt-smi"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = ttdp.Settings()

    assert ttdp.find_program("tt-smi", settings) == (str(program), str(tmp_path))
    assert ttdp.find_program("modprobe", settings) == (None, str(tmp_path))


@pytest.mark.parametrize("version", ["4.1.9", "3.0.38", "", "unknown"])
async def test_a_tt_smi_that_is_too_old(
    host: Served, controls: Controls, stalled: Chip, version: str
) -> None:
    """Or has no version: it would not accept a device file as target."""
    controls.version = version
    answer = await host.ask("fix", stalled.bdf, "--yes")
    expected = f"bin/tt-smi is version {version or 'unknown'}; 4.2 or later is needed\n"

    assert answer.out.endswith(expected)
    assert (controls.calls, answer.status) == ([], 1)


@pytest.mark.parametrize("version", ["4.2", "4.10.0", "6.8.0"])
async def test_a_tt_smi_that_is_new_enough(
    host: Served, controls: Controls, stalled: Chip, version: str
) -> None:
    controls.version = version
    answer = await host.ask("fix", stalled.bdf, "--yes")
    assert (len(controls.calls), answer.status) == (1, 0)


async def test_tt_smi_sees_all_devices(host: Served, controls: Controls, stalled: Chip) -> None:
    """A TT_VISIBLE_DEVICES without this one would make it reset none."""
    await host.ask("fix", stalled.bdf, "--yes", TT_VISIBLE_DEVICES="0000:77:00.0", HOME="/nowhere")
    assert controls.environments
    for environ in controls.environments:
        assert "TT_VISIBLE_DEVICES" not in environ and environ["HOME"] == "/nowhere"


async def test_the_status_of_tt_smi_proves_nothing(
    host: Served, controls: Controls, stalled: Chip
) -> None:
    """The chip is looked at afterwards."""
    controls.status = 1
    answer = await host.ask("fix", stalled.bdf, "--yes")
    assert "tt-smi ended with status 1\n" in answer.out and answer.status == 0


@pytest.mark.parametrize("ignored", [(), (signal.SIGINT, signal.SIGTERM)])
async def test_ctrl_c_ends_a_tt_smi_that_hangs(
    host: Served, controls: Controls, stalled: Chip, ignored: tuple[int, ...]
) -> None:
    """The chip is looked at afterwards. One that does not end is killed."""
    controls.install("tt-smi", ignored=ignored)
    controls.hangs = True
    host.constants["ENDS_WITHIN"] = 0.3
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        terminal.type("y\n")
        await until(lambda: controls.calls)
        terminal.type("\x03")

        assert await terminal.ended() == 130

    assert "heartbeat stalled" in await terminal.shows("interrupted\n")

    await until(lambda: controls.waiting == 0)
    assert terminal.text.endswith("pods that must be started again: default/train-0\n")


# -- interrupts ------------------------------------------------------------------------------------


def press_ctrl_c(terminal: Terminal) -> None:
    terminal.type("\x03")


INTERRUPTS: dict[str, Callable[[Terminal], None]] = {
    "Ctrl-C": press_ctrl_c,
    "SIGTERM": lambda terminal: terminal.send(signal.SIGTERM),
    "SIGHUP": lambda terminal: terminal.send(signal.SIGHUP),
    "a closed terminal": Terminal.close,
}


@pytest.mark.parametrize("how", INTERRUPTS)
async def test_an_interrupt_at_the_question(
    host: Served, controls: Controls, stalled: Chip, how: str
) -> None:
    """Nothing is done; status 130."""
    async with host.on_terminal("fix", stalled.bdf) as terminal:
        await terminal.shows(QUESTION)
        INTERRUPTS[how](terminal)
        assert await terminal.ended() == 130
    assert controls.calls == []


@pytest.mark.parametrize("how", INTERRUPTS)
async def test_an_unbind_is_followed_by_its_bind(
    host: Served, controls: Controls, serve: Serve, how: str
) -> None:
    """An interrupt in between counts afterwards."""
    (ill,) = host.node.add("p150a")
    daemon = await serve()
    ill.reset()
    await has_fault(daemon, ill, Kind.RESETTING)
    async with host.on_terminal("fix", ill.bdf) as terminal:

        def interrupt(call: str) -> None:
            if call.startswith("unbind"):
                INTERRUPTS[how](terminal)

        controls.before = interrupt
        await terminal.shows(QUESTION)
        terminal.type("y\n")
        assert await terminal.ended() == 130
    assert controls.calls == [f"unbind {ill.bdf}", f"bind {ill.bdf}"]
    assert ill.ordinal is not None


async def test_ctrl_c_does_not_end_modprobe(host: Served, controls: Controls, serve: Serve) -> None:
    """It counts when the driver is loaded."""
    (ill,) = host.node.add("n150")
    daemon = await serve()
    host.node.unload_driver()
    await has_fault(daemon, ill, Kind.NO_DRIVER)
    async with host.on_terminal("fix", ill.bdf) as terminal:
        controls.before = lambda call: press_ctrl_c(terminal)
        await terminal.shows(QUESTION)
        terminal.type("y\n")

        assert await terminal.ended() == 130

    assert controls.calls == ["modprobe tenstorrent"] and ill.ordinal is not None


async def test_an_interrupt_while_it_waits(host: Served, controls: Controls, stalled: Chip) -> None:
    """For the effect of a step: it says how the chip is, and ends."""
    controls.reset = lambda chip: None
    host.constants["FOLLOWS_WITHIN"] = 600.0
    async with host.on_terminal("fix", stalled.bdf, "--yes") as terminal:
        await until(lambda: controls.calls)
        await terminal.shows("done")
        terminal.type("\x03")

        assert await terminal.ended() == 130

    assert terminal.text.rstrip().endswith("pods that must be started again: default/train-0")


# -- from a fault to an empty node, and back -------------------------------------------------------


async def test_the_condition_of_the_example_ends_with_the_command_in_its_message(
    host: Served, kubelet: Kubelet, controls: Controls, serve: Serve
) -> None:
    """node-problem-detector runs a check; its status is the condition, which taints the node.

    The message, as long as it may be, has the command, and after that the check finds no failure.
    """
    deb = ROOT / "packaging/deb"
    example = yaml.safe_load((deb / "tt-device-plugin.node-problem-detector.yml").read_text())
    monitor = json.loads(example["data"]["check.json"])
    (rule,) = monitor["rules"]
    words = rule["args"][rule["args"].index("tt-device-plugin") + 1 :]

    async def check() -> tuple[int, str]:
        answer = await host.ask(*words)
        return answer.status, answer.out[: monitor["pluginConfig"]["max_output_length"]]

    (ill,) = host.node.add("n150")
    daemon = await serve()
    await kubelet.registered(N150)
    assert (await check())[0] == 0

    controls.finds, controls.reset = {ill.bdf}, heal
    ill.die()
    await has_fault(daemon, ill, Kind.NO_RESPONSE)
    status, message = await check()
    assert status == 1
    (command,) = re.findall(r"(?m)^FAIL .*; run: tt-device-plugin (.*)$", message)

    assert (await host.ask(*command.split(), "--yes")).status == 0
    assert (await check())[0] == 0


def test_the_taint_of_the_example_follows_that_condition() -> None:
    """It has the name of node-problem-detector's condition, and is there while that is True."""
    deb = ROOT / "packaging/deb"
    example = yaml.safe_load((deb / "tt-device-plugin.node-problem-detector.yml").read_text())
    (condition,) = json.loads(example["data"]["check.json"])["conditions"]
    spec = yaml.safe_load((deb / "tt-device-plugin.readiness-rule.yml").read_text())["spec"]
    required = {"type": condition["type"], "requiredStatus": "False", "defaultStatus": "False"}
    assert spec["conditions"] == [required]
    assert spec["enforcementMode"] == "continuous"
    assert re.fullmatch(r"readiness\.k8s\.io/[a-z-]+", spec["taint"]["key"])
