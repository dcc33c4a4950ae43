"""`fix ADDRESS`: one step at a time, each after a look and an answer, and whom it hits."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import ttdp
from tests.chips import bdf, chip, decide
from tests.commands import PROGRAM, Answer, Served, Terminal, view_of
from tests.conftest import StartDaemon
from tests.documents import DEB, fenced
from tests.world.controls import Controls
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import environment, until
from tests.world.simulation import STALLS
from ttdp import End, Fault, Kind, PciFunction, Situation, Step

N150, N300, P300 = "tenstorrent.com/n150", "tenstorrent.com/n300", "tenstorrent.com/p300"
QUESTION = "Do this? [y/N] "
# Seconds. An effect, which the daemon sees at its polls, has time on a busy machine, too.
QUICK = {"FOLLOWS_WITHIN": 15.0, "LOOK_INTERVAL": 0.05}
QUICK |= {"RESET_TAKES": 0.7, "WORMHOLE_STARTS_WITHIN": 0.9}

# -- the table, as a pure function -----------------------------------------------------------------

HERE = chip(1, "n150").function
UNBOUND = HERE.without_class_device()
UNLOADED = UNBOUND._replace(driver_is_loaded=False)
NO_FILE = HERE._replace(file_fault="/dev/tenstorrent/0 does not exist")
WORMHOLE, BLACKHOLE = HERE._replace(arch="wormhole"), HERE._replace(arch="blackhole")
TAKEN = frozenset(Step)


def seen(
    kind: Kind | None = None, function: PciFunction = HERE, *, lasts: float = 1e6, **more: Any
) -> Situation:
    """A chip with the driver and a fault that the daemon has seen for so many seconds."""
    fault = Fault(kind, "it is ill") if kind else None
    return Situation(function, {}, fault=fault, now=1e9, since=1e9 - lasts, **more)


REBOUND = frozenset({Step.REBIND})
STEPS: dict[str, tuple[Situation, Step]] = {
    "gone": (seen(Kind.GONE, UNBOUND._replace(on_bus=False)), Step.RESCAN),
    "driver not loaded": (seen(Kind.NO_DRIVER, UNLOADED), Step.LOAD),
    "driver not bound": (seen(Kind.NO_DRIVER, UNBOUND), Step.BIND),
    "kept for another driver": (seen(Kind.NO_DRIVER, UNBOUND, override="vfio-pci"), Step.BIND),
    "bound, but no device file": (
        seen(Kind.DEVICE_FILE, HERE.without_class_device("tenstorrent")),
        Step.REBIND,
    ),
    "device file is missing": (seen(Kind.DEVICE_FILE, NO_FILE), Step.MAKE_FILE),
    "no response": (seen(Kind.NO_RESPONSE), Step.RESET),
    "stalled": (seen(Kind.STALLED), Step.RESET),
    "blocked": (seen(Kind.BLOCKED), Step.RESET),
    "read error": (seen(Kind.READ_ERROR), Step.RESET),
    "resetting": (seen(Kind.RESETTING, lasts=29), Step.WAIT),
    "resetting for long": (seen(Kind.RESETTING, lasts=31), Step.REBIND),
    "resetting after a rebind": (seen(Kind.RESETTING, done=REBOUND), Step.RESET),
    "resetting on arm64": (seen(Kind.RESETTING, is_arm64=True), Step.REBIND),
    "silent Wormhole": (seen(Kind.SILENT, WORMHOLE, lasts=119), Step.WAIT),
    "silent Wormhole for long": (seen(Kind.SILENT, WORMHOLE, lasts=121), Step.REBIND),
    "silent Blackhole": (seen(Kind.SILENT, BLACKHOLE, lasts=29), Step.WAIT),
    "silent Blackhole for long": (seen(Kind.SILENT, BLACKHOLE, lasts=31), Step.REBIND),
    "silent after a rebind": (seen(Kind.SILENT, done=REBOUND), Step.RESET),
    "resetting, clock set back": (seen(Kind.RESETTING, lasts=-3600), Step.REBIND),
    "silent, clock set back": (seen(Kind.SILENT, WORMHOLE, lasts=-3600), Step.REBIND),
    # sysfs is right where the daemon has not looked yet.
    "unbound a moment ago": (seen(None, UNBOUND), Step.BIND),
    "stalled, file lost a moment ago": (seen(Kind.STALLED, NO_FILE), Step.MAKE_FILE),
}


@pytest.mark.parametrize("fault", STEPS)
def test_the_step_that_a_fault_needs(fault: str) -> None:
    """A row of the table each."""
    situation, step = STEPS[fault]
    assert ttdp.next_step(situation) is step


DAYS = 9 * 86400.0
END_OF_TRIP = time.strftime("%H:%M:%S", time.localtime(1e9 + 60))
LATER_END = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1e9 + DAYS))
OUT_OF_SERVICE = "the chip is excluded, and no pod holds it"
POWER_CYCLE = "what is left: power-cycle the host"
OF_VFIO = UNBOUND._replace(driver="vfio-pci")
ENDS: dict[str, tuple[Situation, str]] = {
    "healthy": (seen(), "nothing needs to be done"),
    "out of service": (seen(in_service=False), OUT_OF_SERVICE),
    "out of service, not bound": (seen(None, UNBOUND, in_service=False), OUT_OF_SERVICE),
    "another driver's": (seen(Kind.NO_DRIVER, OF_VFIO), "virtual machine"),
    "hot": (seen(Kind.HOT), "only cooling helps"),
    "tripped": (seen(Kind.TRIPPED, ends_at=1e9 + 60), f"the fault ends at {END_OF_TRIP} if"),
    "tripped for days": (seen(Kind.TRIPPED, ends_at=1e9 + DAYS), f"ends at {LATER_END} if"),
    "stalled on arm64": (seen(Kind.STALLED, is_arm64=True), "drain this node, reboot it"),
    "gone, but on the bus": (seen(Kind.GONE), "the service has no reading of it yet"),
    # No step is taken twice.
    "stalled, all done": (seen(Kind.STALLED, done=TAKEN), POWER_CYCLE),
    "silent, all done": (seen(Kind.SILENT, done=TAKEN), POWER_CYCLE),
    "not loaded, all done": (seen(Kind.NO_DRIVER, UNLOADED, done=TAKEN), "install the driver"),
}
WELL = {"healthy", "out of service", "out of service, not bound"}


@pytest.mark.parametrize("state", ENDS)
def test_where_no_step_helps(state: str) -> None:
    """It says why; a chip without a fault, or out of service, is well."""
    situation, text = ENDS[state]

    end = ttdp.next_step(situation)

    assert isinstance(end, End)
    assert text in end.text and end.is_well == (state in WELL)


ADDRESS = "0000:01:00.0"
DRIVERS = "/sys/bus/pci/drivers/tenstorrent"
BIND = f"echo {ADDRESS} > {DRIVERS}/bind"
CLEAR = f"echo > {HERE.directory}/driver_override"


@pytest.mark.parametrize(
    ("step", "override", "program", "command"),
    [
        (Step.RESCAN, None, "", "echo 1 > /sys/bus/pci/rescan"),
        (Step.LOAD, None, "/usr/sbin/modprobe", "/usr/sbin/modprobe tenstorrent"),
        (Step.BIND, None, "", BIND),
        (Step.BIND, "tenstorrent", "", BIND),
        (Step.BIND, "vfio-pci", "", f"{CLEAR} && {BIND}"),
        (Step.REBIND, None, "", f"echo {ADDRESS} > {DRIVERS}/unbind; {BIND}"),
        (Step.REBIND, "vfio-pci", "", f"{CLEAR} && echo {ADDRESS} > {DRIVERS}/unbind; {BIND}"),
        (Step.WAIT, None, "", ""),
        (Step.RESET, None, "/bin/tt-smi", "/bin/tt-smi -r /dev/tenstorrent/0 --no_reinit"),
    ],
)
def test_the_command_that_is_shown(
    step: Step, override: str | None, program: str, command: str
) -> None:
    """It does what the step does; a program is shown with its path."""
    situation = seen(override=override)
    assert ttdp.shown_command(step, situation, ttdp.Settings(), program) == command


def can_make_device_files(node: SimulatedNode) -> None:
    try:
        os.mknod(node.root / "probe", stat.S_IFCHR, os.makedev(245, 0))
    except OSError:
        pytest.skip("needs root to make device files")
    (node.root / "probe").unlink()


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


# What became of a device file, and how what is there now is removed.
FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "rm -f"),
    "its directory, too": (without_directory, "rm -f"),
    "a file": (instead(Path.touch), "rm -f"),
    "a link to nothing": (instead(lambda path: path.symlink_to("nothing")), "rm -f"),
    "a link to a directory": (instead(lambda path: path.symlink_to("/dev")), "rm -f"),
    "a runtime's directory": (instead(Path.mkdir), "rmdir"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_device_file_is_made_again(node: SimulatedNode, what: str) -> None:
    """With sysfs's numbers, and for every user, whatever the umask is and what was there.

    The command that is shown does the same.
    """
    can_make_device_files(node)
    (card,) = node.add("n150")
    breaks, remove = FILES[what]
    path = card.device_node
    breaks(path)
    settings = ttdp.Settings(root=str(node.root))
    function = ttdp.scan(settings, {}, driver_is_loaded=True)[card.bdf]
    assert function

    command = ttdp.shown_command(Step.MAKE_FILE, seen(function=function), settings, "")
    before = os.umask(0o077)
    try:
        ttdp.make_device_file(function)
    finally:
        os.umask(before)

    numbers = card.attribute("dev").read_text().strip()
    make = f"mknod -m 666 {path} c {numbers.replace(':', ' ')}"
    assert command == f"mkdir -p {path.parent}; {remove} {path}; {make}"
    status = path.lstat()
    assert stat.S_ISCHR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o666
    assert f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" == numbers
    assert path.parent.stat().st_mode & 0o777 == 0o755


BOARDS = [chip(1, "p300c", serial="0046"), chip(2, "p300c", serial="0046")]
TRAY = chip(0xC1, "galaxy-wormhole")
SEEN = view_of(decide([*BOARDS, TRAY], unsupported=("0000:05:00.0",)))


@pytest.mark.parametrize(
    ("answer", "address", "line", "status"),
    [
        (ttdp.NOT_RUNNING, ADDRESS, "the service is not running; run: systemctl start tt-", 1),
        (SEEN, "0000:05:00.0", "0000:05:00.0 is not supported: ", 1),
        (SEEN, "0000:99:00.0", "'0000:99:00.0' was not seen since boot; run: tt-device-plugin", 2),
        (SEEN, "a\x1b[2J", r"'a\x1b[2J' was not seen since boot", 2),
        # A board's ID, which a tray has, too.
        (SEEN, "0046", "0046 is a board; give the address of a chip: 0000:01:00.0 or 0000:02", 2),
        (SEEN, "0000:C0", "0000:c0 is a board; give the address of a chip: 0000:c1:00.0", 2),
    ],
)
def test_without_a_service_or_an_address_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    answer: Any, address: str, line: str, status: int,
) -> None:  # fmt: skip
    """One look instead would show neither a stalled heartbeat nor pods. 2 is a usage error."""
    monkeypatch.setattr(ttdp, "ask_service", lambda *_, **__: answer)

    found = ttdp.fix(ttdp.Settings(), address, is_valid=True, says_yes=False)

    (message,) = caplog.messages
    assert (message.startswith(line), found) == (True, status)


def test_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second is one line, which names the first."""
    settings = ttdp.Settings(runtime_dir=str(tmp_path), root=str(tmp_path))
    view = view_of(decide([chip(1)], settings))
    monkeypatch.setattr(ttdp, "ask_service", lambda *_, **__: view)

    with ttdp.locked(f"{tmp_path}/{ttdp.FIX_LOCK}"):
        assert ttdp.fix(settings, ADDRESS, is_valid=True, says_yes=False) == 1

    (line,) = caplog.messages
    assert line.startswith(f"another fix is at work on this node: process {os.getpid()} ")


def test_programs_are_looked_for_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sysfs is the real one."""
    program = tmp_path / "tt-smi"
    program.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = ttdp.Settings()
    assert ttdp.find_program("tt-smi", settings) == (str(program), str(tmp_path))
    assert ttdp.find_program("modprobe", settings) == (None, str(tmp_path))


def test_an_attribute_is_written_and_an_error_of_the_kernel_names_it(tmp_path: Path) -> None:
    """What a step writes to sysfs, which a simulated node answers itself."""
    attribute = tmp_path / "bind"
    attribute.touch()
    ttdp.write_attribute(str(attribute), "0000:01:00.0")
    assert attribute.read_text() == "0000:01:00.0"

    with pytest.raises(OSError) as caught:
        ttdp.write_attribute("/dev/full", "1")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")


# -- on a node -------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class FixHost(Served):
    """A host whose operator runs `fix`."""

    controls: Controls  # what the operator's commands and writes reach

    async def add(self, *cards: str, **settings: Any) -> list[Chip]:
        """Add cards, start the daemon, and return the chips."""
        for card in cards:
            self.node.add(card)
        await self.serve(**settings)
        return self.node.chips

    async def admit(self, resource: str, *pods: str, number: int = 1) -> None:
        """Give each pod so many devices, and wait until their names are known."""
        await self.kubelet.registered(resource)
        for pod in pods:
            await self.kubelet.admit(pod, "main", {resource: number})
        await until(lambda: len(self.daemon.host.holds.names) == len(pods))

    async def ill(
        self, card: str, breaks: Callable[[Chip], object], kind: Kind, **settings: Any
    ) -> Chip:
        """Serve a card; return its first chip, with a fault that the daemon sees."""
        chip, *_ = await self.add(card, **settings)
        breaks(chip)
        await self.daemon.sees(chip.bdf, kind)
        return chip

    async def dead(self) -> Chip:
        """Serve a chip that stops responding while the pod train-0 holds it."""
        (chip,) = await self.add("n150", interval=0.1)
        await self.admit(N150, "train-0")
        chip.die()
        await self.daemon.sees(chip.bdf, Kind.NO_RESPONSE)
        return chip

    async def fix(self, chip: Chip, *words: str, **environ: str) -> Answer:
        return await self.ask("fix", chip.bdf, *words, **environ)

    async def answer(
        self, chip: Chip, answer: str | Callable[[Terminal], object], *words: str
    ) -> tuple[int, str]:
        """Type this, or do that, at its one question; return its status and all that it showed."""
        async with self.on_terminal("fix", chip.bdf, *words) as terminal:
            await terminal.shows(QUESTION)
            if isinstance(answer, str):
                terminal.type(answer)
            else:
                answer(terminal)
            return await terminal.ended(), terminal.text


@pytest.fixture
async def host(
    short_tmp: Path, node: SimulatedNode, ticking: None, kubelet: Kubelet, start: StartDaemon
) -> AsyncIterator[FixHost]:
    """With a tt-smi and a modprobe that write down their calls."""
    controls = Controls(node, short_tmp)
    controls.install("tt-smi", "modprobe")
    environ = {"RUNTIME_DIRECTORY": str(short_tmp), "TT_CONTROLS": controls.path}
    async with controls.serving():
        yield FixHost(
            short_tmp, node, environ, {**QUICK}, kubelet=kubelet, start=start, controls=controls
        )


def unload(chip: Chip) -> None:
    chip.node.unload_driver()


def reserve(chip: Chip) -> None:
    chip.unbind()
    chip.keep_for("vfio-pci")


def reset_while_reserved(chip: Chip) -> None:
    chip.keep_for("vfio-pci")
    chip.reset()


RESET = "tt-smi -r /dev/tenstorrent/0 --no_reinit"
REBIND = [f"unbind {ADDRESS}", f"bind {ADDRESS}"]
SECOND = "0000:02:00.0"
ROWS: dict[str, tuple[Callable[[Chip], None], Kind, list[str]]] = {
    "gone": (Chip.vanish, Kind.GONE, ["rescan 1"]),
    "not loaded": (unload, Kind.NO_DRIVER, ["modprobe tenstorrent"]),
    "not bound": (Chip.unbind, Kind.NO_DRIVER, [f"bind {SECOND}"]),
    "reserved": (reserve, Kind.NO_DRIVER, [f"driver_override  {SECOND}", f"bind {SECOND}"]),
    "resetting": (Chip.reset, Kind.RESETTING, [f"unbind {SECOND}", f"bind {SECOND}"]),
    "resetting, reserved for when it is unbound": (
        reset_while_reserved,
        Kind.RESETTING,
        [f"driver_override  {SECOND}", f"unbind {SECOND}", f"bind {SECOND}"],
    ),
    "stalled": (Chip.freeze, Kind.STALLED, ["tt-smi -r /dev/tenstorrent/1 --no_reinit"]),
}


@pytest.mark.parametrize("row", ROWS)
async def test_each_step_mends_what_it_is_for(host: FixHost, row: str) -> None:
    """With the calls of its row of the table, and nothing else; the other chip is left alone."""
    breaks, kind, calls = ROWS[row]
    other, chip = await host.add("n150", "n150", health=STALLS)
    await host.kubelet.registered(N150)
    host.controls.finds = {SECOND}
    breaks(chip)
    await host.daemon.sees(chip.bdf, kind)

    answer = await host.fix(chip, "--yes")

    assert (host.controls.calls, answer.status, answer.err) == (calls, 0, ""), answer.out
    first, *_, healthy, last = answer.out.splitlines()
    assert first.startswith(f"{SECOND} (n150): ") and "(since " in first
    assert healthy == f"{SECOND} (n150): healthy; not in use"
    assert last == "nothing more needs to be done"
    assert ("driver_override keeps it for vfio-pci" in answer.out) == ("reserved" in row)
    assert host.daemon.chip(SECOND).fault is None and host.daemon.chip(other.bdf).fault is None


# -- several steps, and steps without effect -------------------------------------------------------


async def test_two_faults_are_mended_in_turn(host: FixHost) -> None:
    """A device file that is missing, and a chip that does not respond."""
    can_make_device_files(host.node)
    chip = await host.ill("n150", Chip.die, Kind.NO_RESPONSE)
    chip.device_node.unlink()
    await host.daemon.sees(chip.bdf, Kind.DEVICE_FILE)

    answer = await host.fix(chip, "--yes")

    assert answer.status == 0 and host.controls.calls == [RESET]
    assert re.findall(r"(?m)^next step: (\w+)", answer.out) == ["make", "reset"]


IN_VAIN: dict[str, tuple[Callable[[Chip], None], Kind, list[str], str]] = {
    "a rebind and a reset": (Chip.silence, Kind.SILENT, [*REBIND, RESET], POWER_CYCLE),
    "a driver that cannot be loaded": (
        unload,
        Kind.NO_DRIVER,
        ["modprobe tenstorrent"],
        "what is left: install the driver (tt-kmd) for the running kernel",
    ),
}


@pytest.mark.parametrize("what", IN_VAIN)
async def test_a_step_without_effect_is_not_taken_again(
    host: FixHost, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The next one is, if there is one; else it says what is left."""
    breaks, kind, calls, left = IN_VAIN[what]
    monkeypatch.setattr(ttdp, "FIRMWARE_TIMEOUT", 0.2)
    host.constants["FOLLOWS_WITHIN"] = 1.0
    host.controls.reset = lambda chip: None
    host.controls.refused = {"modprobe": "ENOENT"}
    chip = await host.ill("n150", breaks, kind)

    answer = await host.fix(chip, "--yes")

    assert (host.controls.calls, answer.status) == (calls, 1)
    assert answer.out.endswith(f"{left}\n")


async def test_what_the_kernel_refuses_has_its_reason(host: FixHost) -> None:
    """After the unbind of a rebind, the bind is not tried again: it is a part of that step."""
    host.constants["FOLLOWS_WITHIN"] = 1.0
    host.controls.refused = {"bind": "EBUSY"}
    chip = await host.ill("n150", Chip.reset, Kind.RESETTING)

    answer = await host.fix(chip, "--yes")

    assert (host.controls.calls, answer.status) == (REBIND, 1)
    refusal = f"{host.node.root}/sys/bus/pci/drivers/tenstorrent/bind: Device or resource busy\n"
    assert refusal in answer.out and answer.out.endswith(f"{POWER_CYCLE}\n")


async def test_a_reset_that_ends_by_itself_is_waited_for(host: FixHost) -> None:
    """Then no step is needed, and no answer."""
    chip = await host.ill("p150a", Chip.reset, Kind.RESETTING)
    host.constants["RESET_TAKES"] = 60.0

    async with host.on_terminal("fix", chip.bdf) as terminal:
        await terminal.shows("next step: wait")
        chip.post_reset()
        assert await terminal.ended() == 0

    assert host.controls.calls == [] and "healthy" in terminal.text


async def test_an_effect_has_four_health_intervals(host: FixHost) -> None:
    """If that is longer than the usual time, as the daemon sees it only at its polls."""
    chip = await host.ill("n150", Chip.die, Kind.NO_RESPONSE, interval=1.0)
    loop = asyncio.get_running_loop()
    host.controls.reset = lambda chip: loop.call_later(0.5, chip.post_reset)
    host.constants["FOLLOWS_WITHIN"] = 0.1

    answer = await host.fix(chip, "--yes")

    assert answer.status == 0, answer.out


# -- nothing is done -------------------------------------------------------------------------------


async def test_a_healthy_chip_is_left_alone(host: FixHost) -> None:
    """It says so, and which pod has it; addresses are accepted in any case."""
    host.node.add("n150", bdf="0000:0a:00.0")
    await host.add()
    await host.admit(N150, "train-0")

    answer = await host.ask("fix", "0000:0A:00.0")

    state = "0000:0a:00.0 (n150): healthy; used by default/train-0"
    assert (answer.out, answer.status) == (f"{state}\nnothing needs to be done\n", 0)
    assert host.controls.calls == []


async def test_a_chip_that_is_out_of_service_is_left_alone(host: FixHost) -> None:
    """Whatever it has, as it may be on its way back to the vendor; status 0."""
    (chip,) = await host.add("n150", exclude=(ADDRESS,))
    chip.unbind()

    answer = await host.fix(chip, "--yes")

    assert answer.out.endswith("nothing is done: the chip is excluded, and no pod holds it\n")
    assert (host.controls.calls, answer.status) == ([], 0)


async def test_what_no_command_helps(host: FixHost) -> None:
    """It says what would help; status 1."""
    chip = await host.ill("p150a", Chip.trip, Kind.TRIPPED)

    answer = await host.fix(chip, "--yes")

    assert "nothing is done: only cooling helps" in answer.out
    assert "the fault ends at " in answer.out
    assert (host.controls.calls, answer.status) == ([], 1)


# -- who may, and when -----------------------------------------------------------------------------


async def test_an_invalid_file_does_not_keep_from_mending(host: FixHost) -> None:
    """The daemon runs on with the last valid one; the file's error is a line on stderr."""
    dead = await host.dead()
    file = host.configure("unit = 7")
    answer = await host.fix(dead, "--yes", f"--config-file={file}")
    assert "unit" in answer.err and len(answer.err.splitlines()) == 1
    assert (len(host.controls.calls), answer.status) == (1, 0)


async def test_who_may_not_is_told_to_be_root(host: FixHost) -> None:
    """For a step, and for the daemon's view; in one line."""
    chip = await host.ill("n150", Chip.unbind, Kind.NO_DRIVER)
    bind = host.node.root / "sys/bus/pci/drivers/tenstorrent/bind"

    for path in (bind, host.root / ttdp.STATUS_SOCKET):
        path.chmod(0)
        words = ("fix", chip.bdf, "--yes")
        answer = await asyncio.to_thread(host.run_as_process, *words, as_other=True)

        (line,) = answer.err.splitlines()
        assert line.endswith(" as root") and str(path) in line
        assert answer.status == 1


async def test_a_view_that_is_old_is_none(host: FixHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chip can have recovered since, and a pod can have got it. A new one is waited for."""
    dead = await host.dead()
    failing = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(ttdp, "names_in", failing)
    await until(lambda: host.daemon.daemon.host.problems)

    asyncio.get_running_loop().call_later(0.5, monkeypatch.undo)
    mended = await host.fix(dead, "--yes")
    assert (host.controls.calls, mended.status) == ([RESET], 0)

    monkeypatch.setattr(ttdp, "names_in", failing)
    await until(lambda: host.daemon.daemon.host.problems)
    host.constants["FOLLOWS_WITHIN"] = 0.5
    answer = await host.fix(dead, "--yes")
    last = answer.out.splitlines()[-1]
    assert last.startswith("nothing is done: the service cannot read the node's state; keeping the")
    assert (host.controls.calls, answer.status) == ([RESET], 1)


# -- the question ----------------------------------------------------------------------------------


async def test_it_prints_readmes_example(host: FixHost) -> None:
    """Fault, users, step, command, question; then what it sees, and which pods lost their chip.

    All but the time, the heartbeat, and where tt-smi is and what it prints.
    """
    _, chip = await host.add("n300", "n300", health=STALLS)
    await host.admit(N300, "train-0", "train-1")
    chip.freeze()
    await host.daemon.sees(chip.bdf, Kind.STALLED)

    status, text = await host.answer(chip, "y\n")

    def in_general(text: str) -> str:
        text = re.sub(r"stalled at \d+|since \d\d:\d\d", "", text)
        text = re.sub(r" *\S*/bin/tt-smi|…|-r /dev/tenstorrent/1: done", "", text)
        return " ".join(text.split())  # the lines may be wrapped

    command = "# tt-device-plugin fix 0000:02:00.0\n"
    (block,) = (each for each in fenced("console") if command in each)
    _, example = block.split(command)
    assert status == 0
    assert in_general(text) == in_general(example)


async def test_any_answer_but_yes_is_a_no(host: FixHost) -> None:
    """Then nothing is done; status 1. (README's example has the short answer.)"""
    dead = await host.dead()

    for typed in ("yesterday\n", "\x04"):  # which is the end of input
        status, text = await host.answer(dead, typed)
        assert status == 1 and text.endswith("\nnothing is done\n")
    assert host.controls.calls == []

    status, _ = await host.answer(dead, " YES \n")
    assert (host.controls.calls, status) == ([RESET], 0)


async def test_what_was_typed_before_the_question_is_no_answer(host: FixHost) -> None:
    """Such as the rest of what was pasted."""
    dead = await host.dead()
    async with host.on_terminal("fix", dead.bdf) as terminal:
        terminal.type("y\n")
        await terminal.shows(QUESTION)
        terminal.type("n\n")
        assert await terminal.ended() == 1
    assert host.controls.calls == []


@pytest.mark.parametrize(
    ("breaks", "kind", "step"),
    [
        (Chip.die, Kind.NO_RESPONSE, "reset the chip with tt-smi"),
        (Chip.reset, Kind.RESETTING, Step.WAIT.value),
    ],
)
async def test_without_a_terminal_it_only_describes(
    host: FixHost, breaks: Callable[[Chip], None], kind: Kind, step: str
) -> None:
    """The first step, without the command; a pipe cannot answer. Status 1."""
    chip = await host.ill("p150a", breaks, kind)
    host.constants["RESET_TAKES"] = 3600.0

    answer = await host.fix(chip)

    assert answer.out.splitlines()[1:] == [
        f"next step: {step}",
        "nothing is done: the question needs a terminal; to answer yes in advance, use --yes",
    ]
    assert (host.controls.calls, answer.status, answer.err) == ([], 1, "")


async def renumber(host: FixHost, chip: Chip, other: Chip) -> None:
    host.node.swap_ordinals(chip.bdf, other.bdf)


async def end_the_pod(host: FixHost, chip: Chip, other: Chip) -> None:
    host.kubelet.delete("train-0")
    await until(lambda: not host.daemon.decision.holds)


@pytest.mark.parametrize(
    ("change", "asked", "asked_then"),
    [
        (renumber, "/dev/tenstorrent/0 ", "/dev/tenstorrent/1 "),
        (end_the_pod, "used by default/train-0", "not in use"),
    ],
)
async def test_after_a_change_the_answer_was_for_another_step(
    host: FixHost, change: Callable[..., Awaitable[None]], asked: str, asked_then: str
) -> None:
    """The number that was shown is another chip's now, or others are hit: it asks again."""
    (chip,) = await host.add("n150", health=STALLS)
    await host.admit(N150, "train-0")
    chip.freeze()  # a dead one would show another fault after the renumbering
    await host.daemon.sees(chip.bdf, Kind.STALLED)
    (other,) = host.node.add("n150")

    async with host.on_terminal("fix", chip.bdf) as terminal:
        assert asked in await terminal.shows(QUESTION)
        await change(host, chip, other)
        terminal.type("y\n")
        second = await terminal.shows(QUESTION)
        terminal.type("n\n")
        assert await terminal.ended() == 1

    assert "your answer was for another step" in second
    assert asked_then in second and asked not in second
    assert host.controls.calls == []


async def test_the_service_ends_before_the_answer(host: FixHost) -> None:
    """Nothing is done without its view."""
    dead = await host.dead()
    lost = host.root / "lost"  # the name is all that a connection needs

    def end_the_service(terminal: Terminal) -> None:
        (host.root / ttdp.STATUS_SOCKET).rename(lost)
        terminal.type("y\n")

    status, text = await host.answer(dead, end_the_service)
    assert "the service is not running; run: systemctl start" in text
    assert (host.controls.calls, status) == ([], 1)


# -- whom it hits ----------------------------------------------------------------------------------


async def test_a_reset_of_a_p300_hits_the_other_chip(host: FixHost) -> None:
    """That of its own board, and its pod; both pods have to be started again."""
    *_, chip, other = await host.add("p300c", "p300c")
    await host.admit(P300, "train-0", "train-1", "train-2", "train-3")
    chip.die()
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)

    answer = await host.fix(chip, "--yes")

    pods = {row["bdf"]: row["pods"][0]["pod"] for row in (await host.ask("list", "--json")).rows}
    lines = answer.out.splitlines()
    assert lines[0].endswith(f"; used by default/{pods[chip.bdf]}")
    too = "the other chip of its board, is reset too"
    assert lines[1] == f"{other.bdf}, {too}; used by default/{pods[other.bdf]}"
    both = f"default/{pods[chip.bdf]}, default/{pods[other.bdf]}"
    assert lines[-1] == f"pods that must be started again: {both}"


async def test_a_pod_that_gets_the_other_chip_during_a_reset_is_hit(host: FixHost) -> None:
    """It was healthy until then, so the kubelet could give it away."""
    chip, _ = await host.add("p300c")
    chip.die()
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)
    host.constants["FOLLOWS_WITHIN"] = 0.5
    began, may_end = host.root / "began", host.root / "may_end"
    wait = f"touch {began}; until [ -e {may_end} ]; do sleep 0.05; done"
    tt_smi = host.node.root / "bin/tt-smi"
    tt_smi.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo 6.8.0 && exit\n{wait}')

    fixing = asyncio.ensure_future(host.fix(chip, "--yes"))
    await until(began.exists)
    await host.admit(P300, "train-0")
    may_end.touch()

    assert (await fixing).out.endswith("pods that must be started again: default/train-0\n")


UNKNOWN = "the other chip of its board, which is not known, is reset too"


async def test_the_other_chip_can_be_unknown(host: FixHost) -> None:
    """Two chips are known as one board by its serial number, which the firmware reports.

    Until then it can be each chip whose board is not whole. Its pod is hit, too.
    """
    host.node.add("p300c")
    chip, other = host.node.add("p300c", firmware=False)
    other.speak()
    other.rebind()
    await host.add()
    await host.admit(P300, "train-0", number=4)
    chip.die(bus=True)
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)

    answer = await host.fix(chip)

    possible = f"{other.bdf} may be the other chip of its board; used by default/train-0"
    assert answer.out.splitlines()[1:3] == [UNKNOWN, possible]


P300S = (1, "a"), (2, "a"), (3, "b"), (4, None), (5, None), (6, "c"), (7, "c"), (8, "c")


@pytest.mark.parametrize(
    ("bus", "others"),
    [
        (1, [2]),
        (3, [4, 5]),  # each other one is known to be another board's
        (4, [3, 5, 6, 7, 8]),
        (6, [4, 5, 7, 8]),
        (9, []),
    ],
)
def test_the_chips_that_a_reset_can_reset(bus: int, others: list[int]) -> None:
    """The other one of a whole board, else each that can be it. A p150 is its own board."""
    p300s = [chip(bus, "p300c", serial=serial) for bus, serial in P300S]
    view = view_of(decide([*p300s, chip(9, "p150a", serial="a")]))
    found = ttdp.other_chips(view, ttdp.row_of(view, bdf(bus)))
    assert [row["bdf"] for row in found] == [*map(bdf, others)]


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_virtual_machine_may_use_the_other_chip(host: FixHost, is_known: bool) -> None:
    """Who uses it is not known then, so --yes does not answer."""
    chip, other = host.node.add("p300c", firmware=is_known)
    await host.add()
    other.unbind()
    other.bind_to("vfio-pci")
    await host.daemon.sees(other.bdf, Kind.NO_DRIVER)
    chip.die(bus=True)
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)

    in_pipe = await host.fix(chip, "--yes")
    status, _ = await host.answer(chip, "n\n", "--yes")

    assert "; driver vfio-pci is bound, so a virtual machine may use it\n" in in_pipe.out
    assert (host.controls.calls, in_pipe.status, status) == ([], 1, 1)
    table = (await host.ask("list")).table
    assert [row["USED BY"] for row in table] == ["-", "?"]


async def test_a_virtual_machine_gets_the_other_chip_before_the_answer(host: FixHost) -> None:
    """The answer was given without knowing that, so it asks again."""
    chip, other = await host.add("p300c", interval=0.1)
    chip.die(bus=True)
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)

    async with host.on_terminal("fix", chip.bdf) as terminal:
        assert "vfio-pci" not in await terminal.shows(QUESTION)
        other.bind_to("vfio-pci")
        await host.daemon.sees(other.bdf, Kind.NO_DRIVER)
        terminal.type("y\n")
        assert "driver vfio-pci is bound" in await terminal.shows(QUESTION)
        terminal.type("n\n")
        assert await terminal.ended() == 1

    assert host.controls.calls == []


async def test_the_driver_concerns_all_chips(host: FixHost) -> None:
    """Loading it is a step for the whole node, so the users of the other chips are named, too."""
    chip, other = await host.add("n150", "n150")
    await host.admit(N150, "train-0", number=2)
    unload(chip)
    await host.daemon.sees(chip.bdf, Kind.NO_DRIVER)

    answer = await host.fix(chip)

    assert "which concerns all chips of this node" in answer.out
    assert f"{other.bdf}: used by default/train-0\n" in answer.out


async def test_a_galaxys_chip_is_reset_only_after_an_answer(host: FixHost) -> None:
    """--yes does not give it; what is known of such resets is told."""
    (chip,) = host.node.add("p150a")  # 32 chips would take seconds
    chip.write("subsystem_device", b"0x0047\n")
    chip.write("tt_card_type", b"galaxy-blackhole\n")
    await host.add()
    chip.die()
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)

    in_pipe = await host.fix(chip, "--yes")
    status, text = await host.answer(chip, "n\n", "--yes")

    assert in_pipe.out.endswith("the question needs a terminal\n")
    assert "CPLD firmware 1.16" in in_pipe.out and "CPLD firmware 1.16" in text
    assert (host.controls.calls, in_pipe.status, status) == ([], 1, 1)


async def test_a_chip_that_only_a_pod_still_has_is_an_unknown_card(host: FixHost) -> None:
    """After a reboot without it: the pod's allocation has nothing but its address."""
    (chip,) = await host.add("n150")
    await host.admit(N150, "train-0")
    await host.daemon.stop()
    host.node.on_uevent = None
    chip.vanish()
    await host.serve()

    answer = await host.fix(chip)

    line, *_ = answer.out.splitlines()
    assert line.startswith(f"{chip.bdf} (unknown card): PCI device is gone")
    assert "used by default/train-0" in line


# -- tt-smi ----------------------------------------------------------------------------------------


async def test_a_missing_tt_smi(host: FixHost) -> None:
    """It says where it looked: on a simulated node never among the host's own programs."""
    dead = await host.dead()
    (host.node.root / "bin/tt-smi").rename(host.root / "tt-smi")
    answer = await host.fix(dead, "--yes", PATH=f"{host.root}:{os.environ['PATH']}")
    reason = f"tt-smi was not found in {host.node.root}/bin (sudo has a PATH of its own)\n"
    assert answer.out.endswith(reason) and answer.status == 1


@pytest.mark.parametrize(
    ("version", "is_old"),
    [
        ("4.1.9", True),
        ("", True),
        ("unknown", True),
        ("9" * 5000, True),
        ("4.2", False),
        ("4.10.0", False),
    ],
)
async def test_tt_smi_must_accept_a_device_file_as_target(
    host: FixHost, version: str, is_old: bool
) -> None:
    """As it does since 4.2; one without a version does not."""
    host.controls.version = version
    settings = ttdp.Settings(root=str(host.node.root))
    mender = ttdp.Mender(settings, ADDRESS, dict, says_yes=True)

    path, problem = await mender._program("tt-smi")

    place = f"{host.node.root}/bin/tt-smi"
    old = f"{place} is version {version[:63] or 'unknown'}; 4.2 or later is needed"
    assert (path, problem) == (("", old) if is_old else (place, ""))


@pytest.mark.parametrize("script", ["sleep 600", "while :; do echo -n 4.2; done", "exit 3"])
async def test_a_tt_smi_that_does_not_print_its_version(host: FixHost, script: str) -> None:
    """It hangs, or prints without an end, or nothing: then it is not used."""
    dead = await host.dead()
    host.constants["VERSION_TAKES"] = 1.0
    tt_smi = host.node.root / "bin/tt-smi"
    tt_smi.write_text(f"#!/bin/sh\n{script}")

    answer = await host.fix(dead, "--yes")

    assert answer.out.endswith(f"{tt_smi} is version unknown; 4.2 or later is needed\n")
    assert (answer.status, answer.err) == (1, "")


async def test_the_environment_and_the_status_of_tt_smi(host: FixHost) -> None:
    """It sees all devices: without this one, it would reset none. Its status proves nothing."""
    dead = await host.dead()
    host.controls.status = 1

    answer = await host.fix(dead, "--yes", TT_VISIBLE_DEVICES="0000:77:00.0", HOME="/nowhere")

    assert {environ["HOME"] for environ in host.controls.environments} == {"/nowhere"}
    assert not any("TT_VISIBLE_DEVICES" in environ for environ in host.controls.environments)
    assert "tt-smi ended with status 1\n" in answer.out and answer.status == 0


async def test_a_tt_smi_that_cannot_be_run(host: FixHost) -> None:
    """It was replaced meanwhile: nothing was reset, and no pod has lost its chip."""
    dead = await host.dead()
    tt_smi, other = host.node.root / "bin/tt-smi", host.node.root / "bin/other"
    other.write_bytes(b"\0")
    other.chmod(0o755)
    tt_smi.write_text(f"#!/bin/sh\nmv {other} {tt_smi}\necho 6.8.0")

    answer = await host.fix(dead, "--yes")

    assert (answer.status, answer.err) == (1, f"{tt_smi}: Exec format error\n")
    assert answer.out.endswith(
        "next step: reset the chip with tt-smi, which interrupts its users\n"
    )


async def test_ctrl_c_ends_a_tt_smi_that_hangs(host: FixHost) -> None:
    """The chip is looked at afterwards. One that does not end is killed."""
    dead = await host.dead()
    host.controls.install("tt-smi", ignored=(signal.SIGINT, signal.SIGTERM))
    host.controls.hangs = True
    host.constants["ENDS_WITHIN"] = 0.3

    async with host.on_terminal("fix", dead.bdf) as terminal:
        await terminal.shows(QUESTION)
        terminal.type("y\n")
        await until(lambda: host.controls.calls)
        terminal.type("\x03")
        assert await terminal.ended() == 130

    assert "chip does not respond" in await terminal.shows("interrupted\n")
    await until(lambda: host.controls.waiting == 0)
    assert terminal.text.endswith("pods that must be started again: default/train-0\n")


# -- interrupts ------------------------------------------------------------------------------------


INTERRUPTS: dict[str, Callable[[Terminal], None]] = {
    "Ctrl-C": lambda terminal: terminal.type("\x03"),
    "SIGTERM": lambda terminal: terminal.send(signal.SIGTERM),
    "SIGHUP": lambda terminal: terminal.send(signal.SIGHUP),
    "a closed terminal": Terminal.close,
}


async def test_an_interrupt_at_the_question(host: FixHost) -> None:
    """However it comes, no step is taken, and the status is 130."""
    dead = await host.dead()

    for how, interrupt in INTERRUPTS.items():
        status, _ = await host.answer(dead, interrupt)
        assert (host.controls.calls, status) == ([], 130), how


@pytest.mark.parametrize(
    ("breaks", "kind", "calls", "how"),
    [
        (Chip.reset, Kind.RESETTING, REBIND, "a closed terminal"),
        (unload, Kind.NO_DRIVER, ["modprobe tenstorrent"], "Ctrl-C"),
    ],
)
async def test_an_interrupt_counts_after_a_step(
    host: FixHost, breaks: Callable[[Chip], None], kind: Kind, calls: list[str], how: str
) -> None:
    """An unbind is followed by its bind, and the terminal's Ctrl-C does not end modprobe."""
    chip = await host.ill("p150a", breaks, kind)

    def say_yes(terminal: Terminal) -> None:
        interrupt = partial(INTERRUPTS[how], terminal)
        host.controls.before = lambda call: interrupt() if call == calls[0] else None
        terminal.type("y\n")

    status, _ = await host.answer(chip, say_yes)

    assert (host.controls.calls, status) == (calls, 130)
    assert chip.ordinal is not None


@pytest.mark.parametrize(
    ("starter", "number"),
    [
        (["nohup"], signal.SIGHUP),
        (["sh", "-c", 'trap "" INT; exec "$@"', "sh"], signal.SIGINT),  # as `&` in a script
    ],
)
async def test_a_signal_that_is_ignored_is_no_interrupt(
    host: FixHost, starter: list[str], number: int
) -> None:
    """The program goes on when the session has ended, or the script is interrupted."""
    dead = await host.dead()
    command = [*starter, *PROGRAM, "fix", dead.bdf, "--yes", *host.flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=environment() | host.environ,
    )  # fmt: skip
    host.controls.before = lambda call: process.send_signal(number)

    assert await process.wait() == 0
    assert host.controls.calls == [RESET]


async def test_an_interrupt_while_it_waits(host: FixHost) -> None:
    """For the effect of a step: it says how the chip is, and ends.

    With --yes, the command is shown on a terminal, and nothing is asked.
    """
    dead = await host.dead()
    host.controls.reset = lambda chip: None
    host.constants["FOLLOWS_WITHIN"] = 600.0

    async with host.on_terminal("fix", dead.bdf, "--yes") as terminal:
        await terminal.shows("done")
        terminal.type("\x03")
        assert await terminal.ended() == 130

    assert QUESTION not in terminal.text and f"    {host.node.root}/bin/{RESET}" in terminal.text
    assert terminal.text.rstrip().endswith("pods that must be started again: default/train-0")


# -- from a fault to an empty node, and back -------------------------------------------------------


async def test_the_condition_of_the_example_ends_with_the_command_in_its_message(
    host: FixHost,
) -> None:
    """node-problem-detector runs a check; its status is the condition, which taints the node.

    The message, as long as it may be, has the command, and after that the check finds no failure.
    """
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    monitor = json.loads(example["data"]["check.json"])
    (rule,) = monitor["rules"]
    words = rule["args"][rule["args"].index("tt-device-plugin") + 1 :]

    async def check() -> tuple[int, str]:
        answer = await host.ask(*words)
        return answer.status, answer.out[: monitor["pluginConfig"]["max_output_length"]]

    (chip,) = await host.add("n150")
    await host.kubelet.registered(N150)
    assert (await check())[0] == 0

    chip.die()
    await host.daemon.sees(chip.bdf, Kind.NO_RESPONSE)
    status, message = await check()
    assert status == 1
    (command,) = re.findall(r"(?m)^FAIL .*; run: tt-device-plugin (.*)$", message)

    assert (await host.ask(*command.split(), "--yes")).status == 0
    assert (await check())[0] == 0


def test_the_taint_of_the_example_follows_that_condition() -> None:
    """It has the name of node-problem-detector's condition, and is there while that is True."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    (condition,) = json.loads(example["data"]["check.json"])["conditions"]
    spec = yaml.safe_load((DEB / "tt-device-plugin.readiness-rule.yml").read_text())["spec"]
    required = {"type": condition["type"], "requiredStatus": "False", "defaultStatus": "False"}
    assert spec["conditions"] == [required]
    assert spec["enforcementMode"] == "continuous"
    assert re.fullmatch(r"readiness\.k8s\.io/[a-z-]+", spec["taint"]["key"])
