"""`fix ADDRESS`: one step at a time, each after a look and an answer, and whom it hits."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip
from tests.commands import Answer, Host, Terminal
from tests.conftest import StartDaemon
from tests.world.controls import Controls
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon
from ttdp import End, Fault, Kind, PciFunction, Situation, Step

N150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p300"
QUESTION = "Do this? [y/N] "
# Seconds that the daemon's polls, each 0.25 s, fit in.
QUICK = {"FOLLOWS_WITHIN": 1.5, "LOOK_INTERVAL": 0.05}
QUICK |= {"RESET_TAKES": 0.7, "WORMHOLE_STARTS_WITHIN": 0.9}

# -- the table, as a pure function -----------------------------------------------------------------

HERE = chip(1, "n150").function
UNBOUND = HERE.without_device_file()
NO_FILE = HERE._replace(file_fault="/dev/tenstorrent/0 does not exist")
TAKEN = frozenset(Step)


def seen(kind: Kind | None = None, function: PciFunction = HERE, **more: Any) -> Situation:
    """A chip with the driver and a fault that the daemon sees."""
    fault = Fault(kind, "it is ill") if kind else None
    return Situation(function, fault=fault, **more)


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
        (seen(Kind.TRIPPED, ends_in=60), "if the chip does not trip again", False),
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
    end = ttdp.next_step(seen(Kind.TRIPPED, ends_in=3600.0))
    assert isinstance(end, End)
    moments = [time.strftime("%H:%M", time.localtime(time.time() + 3600 + s)) for s in (-1, 1)]
    assert any(moment in end.text for moment in moments)


# -- on a node -------------------------------------------------------------------------------------


@pytest.fixture
async def controls(node: SimulatedNode, short_tmp: Path) -> AsyncIterator[Controls]:
    """The node's kernel, with a tt-smi and a modprobe that write down their calls."""
    controls = Controls(node, short_tmp)
    controls.install("tt-smi", "modprobe")
    async with controls.serving():
        yield controls


@pytest.fixture
def host(short_tmp: Path, node: SimulatedNode, ticking: None, controls: Controls) -> Host:
    environ = {"RUNTIME_DIRECTORY": str(short_tmp), "TT_CONTROLS": controls.path}
    return Host(short_tmp, node, environ, dict(QUICK))


Serve = Callable[..., Any]


@pytest.fixture
def serve(host: Host, start: StartDaemon) -> Serve:
    """Starts a daemon that `fix` can ask."""

    async def serve(**settings: Any) -> RunningDaemon:
        daemon: RunningDaemon = await start(runtime_dir=str(host.root), **settings)
        await until(lambda: daemon.notified("READY=1"))
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
    host: Host,
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
    assert last == "nothing needs to be done"
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
    host: Host, controls: Controls, serve: Serve, what: str
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
