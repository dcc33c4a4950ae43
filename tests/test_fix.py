"""`fix ADDRESS`: which step, whom it hits, and that nothing else is done."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ttdp
from tests.commands import Answer, Commanded, Served, Terminal, commanded
from tests.documents import fenced
from tests.world.controls import Controls
from tests.world.node import Chip
from tests.world.processes import ROOT, environment, wait_until
from ttdp import End, Look, PciFunction, Settings, Step

ADDRESS, SECOND = "0000:01:00.0", "0000:02:00.0"
QUESTION = "Do this? [y/N] "

# -- which step: pure ------------------------------------------------------------------------------

HERE = PciFunction(
    ADDRESS,
    "wormhole",
    directory="/sys/bus/pci/devices/0000:01:00.0",
    driver="tenstorrent",
    number=3,
    path="/dev/tenstorrent/3",
)
UNBOUND = HERE.without_class_device()
OF_VFIO = UNBOUND._replace(driver="vfio-pci")
NO_FILE = HERE._replace(file_fault="/dev/tenstorrent/3 does not exist")
GONE = UNBOUND._replace(on_bus=False)


def row(bdf: str = ADDRESS, **values: Any) -> dict[str, Any]:
    """Return what the view has of a healthy n150 that nobody uses."""
    known = {"bdf": bdf, "board": "n150", "serial": "0018", "excluded": False, "healthy": True}
    return {**known, "pods": [], "processes": [], **values}


def look(
    kind: str = "", function: PciFunction = HERE, *others: Any, of: Any = None, **more: Any
) -> Look:
    """Return a look at a chip with a fault of this kind; of: its row, others: those of others."""
    faults = [{"subject": function.address, "kind": kind}] if kind else []
    chips = [{**row(), "healthy": not kind, **(of or {})}, *others]
    return Look(function, {"chips": chips, "problems": faults}, **more)


SICK = ("no_response", "stalled", "blocked", "read_error")  # while sysfs is in order
STEPS: list[tuple[Look, Sequence[Step], Step]] = [
    (look("gone", GONE), (), Step.RESCAN),
    (look("no_driver", UNBOUND._replace(driver_is_loaded=False)), (), Step.LOAD),
    (look("no_driver", OF_VFIO._replace(driver_is_loaded=False)), (), Step.LOAD),
    (look("no_driver", UNBOUND), (), Step.BIND),
    (look("no_driver", UNBOUND, override="vfio-pci"), (), Step.BIND),
    (look("node", HERE.without_class_device("tenstorrent")), (), Step.REBIND),
    (look("silent"), (), Step.REBIND),
    (look("silent", NO_FILE), (), Step.REBIND),
    (look("node", NO_FILE), (), Step.MAKE_FILE),
    *((look(kind), (), Step.RESET) for kind in SICK),
    *((look(kind, NO_FILE), (), Step.MAKE_FILE) for kind in SICK),
    (look("resetting"), (), Step.WAIT),
    (look("resetting"), (Step.WAIT,), Step.REBIND),
    (look("resetting", is_arm64=True), (Step.WAIT,), Step.REBIND),
    # A reset is less than a power cycle; and a Blackhole's firmware is asked only when it is bound.
    (look("silent"), (Step.REBIND,), Step.RESET),
    (look("resetting"), (Step.WAIT, Step.REBIND), Step.RESET),
    (look("silent"), (Step.REBIND, Step.RESET), Step.REBIND),
    (look("silent"), (Step.RESET,), Step.REBIND),
    # sysfs is right where the daemon has not looked yet.
    (look("", UNBOUND), (), Step.BIND),
    (look("stalled", GONE), (), Step.RESCAN),
    (look("gone"), (), Step.WAIT),
    (look("node"), (), Step.WAIT),
]


@pytest.mark.parametrize(("seen", "done", "step"), STEPS)
def test_the_step_that_a_fault_needs(seen: Look, done: Sequence[Step], step: Step) -> None:
    """The first row of the table that applies."""
    assert ttdp.next_step(seen, done) is step


LEFT = "no step is left; if the firmware is late"
EXCLUDED = {"excluded": True, "healthy": None}
ENDS: list[tuple[Look, Sequence[Step], str, bool]] = [
    (look(), (), "nothing needs to be done", True),
    (look(), (Step.RESET,), "no fault is left", True),
    (look("stalled", of=EXCLUDED), (), "nothing is done: the chip is excluded", True),
    (look("gone", GONE, of=EXCLUDED), (), "nothing is done: the chip is excluded", True),
    # A pod holds it.
    (look("stalled", of={"excluded": True}), (), "nothing is done: the chip is excluded", False),
    (look("no_driver", OF_VFIO), (), "nothing is done: a virtual machine may use the card", False),
    (look("hot"), (), "nothing is done: only cooling helps", False),
    (look("tripped"), (), "nothing is done: only cooling helps", False),
    (look("stalled", is_arm64=True), (), "tt-smi cannot reset chips on arm64; drain this", False),
    (look("silent", is_arm64=True), (Step.REBIND,), "tt-smi cannot reset chips on arm64", False),
    (look("gone"), (Step.WAIT,), "nothing is done: the service still reports", False),
    (look("stalled"), (Step.RESET,), LEFT, False),
    (look("silent"), (Step.REBIND, Step.RESET, Step.REBIND), LEFT, False),
    (look("node", HERE.without_class_device("tenstorrent")), (Step.REBIND,), LEFT, False),
    (look("no_driver", UNBOUND._replace(driver_is_loaded=False)), (Step.LOAD,),
     "no step is left; install the driver", False),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "done", "text", "is_well"), ENDS)
def test_without_a_step_it_says_why(
    seen: Look, done: Sequence[Step], text: str, is_well: bool
) -> None:
    """And whether a fault is left."""
    end = ttdp.next_step(seen, done)
    assert isinstance(end, End) and end.text.startswith(text) and end.is_well is is_well


any_look = st.builds(
    look,
    st.sampled_from(["", *(kind.value for kind in ttdp.Kind)]),
    st.sampled_from([HERE, UNBOUND, OF_VFIO, NO_FILE, GONE, HERE.without_class_device("x")]),
    is_arm64=st.booleans(),
)


@given(st.lists(any_look, min_size=12, max_size=12))
def test_no_step_is_taken_twice_whatever_comes_of_it(looks: list[Look]) -> None:
    """But unbinding and binding once more, after a reset. So it always ends."""
    done: list[Step] = []
    for seen in looks:
        step = ttdp.next_step(seen, done)
        if isinstance(step, End):
            break
        before = done[done.index(Step.RESET) :] if Step.RESET in done else done
        assert step not in done or (step is Step.REBIND and step not in before)
        done.append(step)
    assert len(done) <= len(Step) + 1


@given(any_look, st.sampled_from(Step))
def test_nothing_is_done_about_an_excluded_chip(seen: Look, done: Step) -> None:
    """It may be on its way back to the vendor, whatever it has."""
    seen.view["chips"][0]["excluded"] = True
    assert isinstance(ttdp.next_step(seen, (done,)), End)


# -- what a step is: pure --------------------------------------------------------------------------

DRIVERS = "/sys/bus/pci/drivers/tenstorrent"
BIND = f"echo {ADDRESS} > {DRIVERS}/bind"
UNBIND = f"echo {ADDRESS} > {DRIVERS}/unbind"
CLEAR = f"echo > {HERE.directory}/driver_override"
RESET = "env -u TT_VISIBLE_DEVICES /bin/tt-smi -r /dev/tenstorrent/3 --no_reinit"


@pytest.mark.parametrize(
    ("step", "override", "command"),
    [
        (Step.RESCAN, None, "echo 1 > /sys/bus/pci/rescan"),
        (Step.LOAD, None, "modprobe tenstorrent"),
        (Step.BIND, None, BIND),
        (Step.BIND, "tenstorrent", BIND),
        (Step.BIND, "vfio-pci", f"{CLEAR}; {BIND}"),
        (Step.REBIND, None, f"{UNBIND}; {BIND}"),
        (Step.REBIND, "vfio-pci", f"{CLEAR}; {UNBIND}; {BIND}"),
        (Step.MAKE_FILE, None, "mkdir -p -m 755 /dev/tenstorrent; rm -df /dev/tenstorrent/3; "
         f"mknod -m 666 /dev/tenstorrent/3 c $(tr : ' ' < '{HERE.class_device}/dev')"),
        (Step.RESET, None, RESET),
    ],
)  # fmt: skip
def test_a_step_is_the_command_that_is_shown(
    step: Step, override: str | None, command: str
) -> None:
    """An unbind is always followed by its bind; tt-smi never gets an address."""
    seen = look(override=override)
    assert ttdp.command_of(step, seen, Settings(), "/bin/tt-smi") == command


def p300(bus: int, serial: str | None, **more: Any) -> dict[str, Any]:
    return row(f"0000:{bus:02x}:00.0", board="p300", serial=serial, **more)


@pytest.mark.parametrize(
    ("serial", "others", "hit", "needs_answer"),
    [
        ("a", [p300(2, "a"), p300(3, "b"), row("0000:09:00.0", serial="a")], [2], False),
        ("a", [p300(2, None), p300(3, "b")], [], True),
        (None, [p300(2, None), p300(3, "b")], [], True),
        ("a", [p300(2, "a"), p300(3, "a")], [2, 3], True),  # no board has three chips
        # A virtual machine may use it.
        ("a", [p300(2, "a", pods=None)], [2], True),
        ("a", [p300(2, "a", processes=None)], [2], True),
    ],
)
def test_a_reset_of_a_p300_concerns_its_other_chip(
    serial: str | None, others: list[Any], hit: list[int], needs_answer: bool
) -> None:
    """While that or its users are not known, --yes does not answer."""
    seen = look("stalled", HERE, *others, of={"board": "p300", "serial": serial})
    found = ttdp.others_hit(Step.RESET, seen)
    plan = ttdp.plan_of(Step.RESET, seen)

    assert [each["bdf"] for each in found] == [f"0000:{bus:02x}:00.0" for bus in hit]
    assert plan.needs_answer is needs_answer
    assert ("which is not known" in str(plan.lines)) is (len(hit) != 1)


# -- on a node -------------------------------------------------------------------------------------


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Commanded]:
    """A host whose commands reach a card and a kernel that do as they are told."""
    with commanded(short_tmp) as host:
        # An effect has time on a busy machine, too.
        host.constants |= {"FOLLOWS_WITHIN": 15.0, "LOOK_INTERVAL": 0.02}
        yield host


@pytest.fixture
def dead(host: Commanded) -> Chip:
    """A chip that does not respond, which a pod holds; beside one that is well."""
    chip, _ = host.node.add("n150") + host.node.add("n150")
    host.admit("default/train", chip.bdf)
    chip.die()
    return chip


TT_SMI = "tt-smi -r /dev/tenstorrent/0 --no_reinit"
REBIND = [f"unbind {ADDRESS}", f"bind {ADDRESS}"]


@pytest.mark.parametrize(
    ("typed", "is_yes"),
    [("\n", False), ("n\n", False), ("yesterday\n", False), ("\x04", False), (" YES \n", True)],
)
def test_any_answer_but_yes_is_a_no(host: Commanded, dead: Chip, typed: str, is_yes: bool) -> None:
    """Then nothing is done; status 1. (Ctrl-D is the end of input.)"""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type(typed)
        status = terminal.ended()

    assert (host.controls.calls, status) == (([TT_SMI], 0) if is_yes else ([], 1))
    assert is_yes or terminal.text.endswith("\nnothing is done\n")


def test_it_prints_readmes_example(host: Commanded) -> None:
    """Fault, users, step, command, question; then what it sees, and which pods lost their chip.

    All but the time, the heartbeat, and where tt-smi is.
    """
    host.node.add("n300")
    (chip,) = host.node.add("n300")
    host.admit("default/train-1", chip.bdf)
    chip.freeze()

    with host.terminal("fix", chip.bdf) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        assert terminal.ended() == 0

    def in_general(text: str) -> str:
        text = re.sub(r"stalled at \d+|since [-\d: ]+|at most \d+ s", "", text)
        return re.sub(r"\S*/tt-smi", "tt-smi", text)

    command = "# tt-device-plugin fix 0000:02:00.0\n"
    (block,) = (each for each in fenced("console") if command in each)
    assert in_general(terminal.text) == in_general(block.split(command)[1])


def test_what_was_typed_before_the_question_is_no_answer(host: Commanded, dead: Chip) -> None:
    """Such as the rest of what was pasted."""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.type("y\n")
        terminal.shows(QUESTION)
        terminal.type("n\n")
        assert terminal.ended() == 1
    assert host.controls.calls == []


def renumber(host: Commanded, chip: Chip) -> None:
    host.node.swap_ordinals(ADDRESS, SECOND)
    chip.freeze()


def take_other_for_a_guest(host: Commanded, chip: Chip) -> None:
    host.node.chip(SECOND).bind_to("vfio-pci")


CHANGES: dict[str, tuple[Callable[[Commanded, Chip], object], str]] = {
    "its number": (renumber, "-r /dev/tenstorrent/1 "),
    "its pod has ended": (lambda host, chip: host.service.pods.clear(), "); not in use"),
    "another pod": (lambda host, chip: host.admit("a/b", ADDRESS), "default/train, a/b"),
    "a process": (lambda host, chip: host.open(ADDRESS, 7, "python3"), "train, python3[7]"),
    "a pod on the other chip": (lambda host, chip: host.admit("a/b", SECOND), "used by a/b"),
    "a guest on the other chip": (take_other_for_a_guest, "is reset, too; its users are not known"),
    "its fault": (lambda host, chip: chip.unbind(), "bind the driver to the chip"),
    "it is excluded": (lambda host, chip: host.service.excluded.add(ADDRESS), "excluded"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_after_a_change_it_asks_again(host: Commanded, what: str) -> None:
    """The answer was for the number, the step and the users that were shown."""
    change, shown = CHANGES[what]
    chip, _ = host.node.add("p300c")
    host.admit("default/train", ADDRESS)
    chip.freeze()

    with host.terminal("fix", ADDRESS) as terminal:
        assert shown not in terminal.shows(QUESTION)
        change(host, chip)
        terminal.type("y\n")
        if what != "it is excluded":
            terminal.shows(QUESTION)
            terminal.type("n\n")
        terminal.ended()

    _, asked_again = terminal.text.split("have changed since the question; nothing was done yet")
    assert shown in asked_again
    assert host.controls.calls == []


def test_a_service_that_does_not_answer_after_a_step_is_asked_again(
    host: Commanded, dead: Chip
) -> None:
    """The host can be starved for a while."""
    away = host.root / "away"

    def be_away(call: str) -> None:
        host.service.path.rename(away)
        threading.Timer(0.3, away.rename, [host.service.path]).start()

    host.controls.before = be_away

    found = host.run("fix", ADDRESS, "--yes")

    assert found.status == 0, found.out + found.err


def test_one_at_a_time(host: Commanded, dead: Chip) -> None:
    """On a node, whatever the chip."""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        found = host.run("fix", SECOND, "--yes")
        terminal.type("n\n")
        terminal.ended()
    assert (found.err, found.status) == ("another fix is at work on this node\n", 1)


def test_each_step_is_a_line_in_the_journal(host: Commanded, dead: Chip) -> None:
    """Who, which command, which pods. (In all other tests there is no journal.)"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(host.node.root / "dev/log"))
        host.run("fix", ADDRESS, "--yes", SUDO_USER="alice", USER="root")
        line = journal.recv(4096, socket.MSG_DONTWAIT).decode()

    program = f"env -u TT_VISIBLE_DEVICES {host.node.root}/bin/{TT_SMI}"
    text = f"fix {ADDRESS}: alice runs: {program}; pods: default/train"
    assert re.sub(r"\d+\]", "N]", line, count=1) == f"<29>tt-device-plugin[N]: {text}"


# -- steps -----------------------------------------------------------------------------------------


def test_tt_smi_sees_all_devices_and_its_status_proves_nothing(host: Commanded, dead: Chip) -> None:
    """With the variable it would reset none of those that it leaves out."""
    host.controls.status = 1
    found = host.run("fix", ADDRESS, "--yes", TT_VISIBLE_DEVICES="0000:77:00.0", HOME="/nowhere")

    *_, environ = host.controls.environments
    assert environ["HOME"] == "/nowhere" and "TT_VISIBLE_DEVICES" not in environ
    assert (host.controls.calls, found.status) == ([TT_SMI], 0)


def test_a_number_that_changes_while_tt_smi_starts(host: Commanded, dead: Chip) -> None:
    """This cannot be closed: the card that was hit is named, and its pods."""
    host.admit("default/other", SECOND)
    host.controls.before = lambda call: host.node.swap_ordinals(ADDRESS, SECOND)
    host.constants["FOLLOWS_WITHIN"] = 0.5

    found = host.run("fix", ADDRESS, "--yes")

    assert f"the device number 0 is that of {SECOND} now: tt-smi may have reset it" in found.out
    assert found.out.endswith("must be started again: default/train, default/other\n")


def test_a_pod_that_gets_the_other_chip_during_a_reset_is_named(host: Commanded) -> None:
    """It was healthy until then, so the kubelet could give it away."""
    chip, _ = host.node.add("p300c")
    chip.die()
    host.controls.before = lambda call: host.admit("default/train", SECOND)

    found = host.run("fix", ADDRESS, "--yes")

    assert found.out.endswith("pods that must be started again: default/train\n")


@pytest.mark.parametrize(
    "script, reason",
    [
        ("echo 4.2-beta; exec sleep 600", "--version does not answer"),
        ("exit 3", "--version fails: status 3"),
        (
            "echo Traceback >&2; echo 'ImportError: x' >&2; exit 1",
            "--version fails: ImportError: x",
        ),
    ],
)
def test_a_tt_smi_that_does_not_print_its_version_is_not_used(
    host: Commanded, dead: Chip, script: str, reason: str
) -> None:
    """It hangs, or fails."""
    host.constants["VERSION_TAKES"] = 0.5
    tt_smi = host.node.root / "bin/tt-smi"
    tt_smi.write_text(f"#!/bin/sh\n{script}")

    found = host.run("fix", ADDRESS, "--yes")

    assert found.err.startswith(f"{tt_smi} {reason}") and found.status == 1


def test_an_unbind_that_fails_is_followed_by_the_bind(host: Commanded) -> None:
    """The driver can have let go meanwhile."""
    (chip,) = host.node.add("p150a")
    host.service.faults[ADDRESS] = "silent"
    chip.silence()
    host.controls.refuse("drivers/tenstorrent/unbind")
    host.constants["FOLLOWS_WITHIN"] = 0.3

    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        terminal.shows(QUESTION)
        terminal.type("n\n")
        terminal.ended()

    assert host.controls.calls == [f"bind {ADDRESS}"]


def test_after_an_unbind_whose_bind_fails_binding_is_another_step(host: Commanded) -> None:
    """It is known at once, and then not taken again. The pod has lost its chip."""
    (chip,) = host.node.add("p150a")
    host.admit("default/train", ADDRESS)
    chip.reset()
    host.constants["FOLLOWS_WITHIN"] = 0.3
    host.controls.refuse("drivers/tenstorrent/bind")

    found = host.run("fix", ADDRESS, "--yes")

    assert re.findall("next step: (\\w+)", found.out) == ["unbind", "bind"]
    assert found.out.count("the command has ended with status") == 2
    assert found.out.endswith("pods that must be started again: default/train\n")
    assert (host.controls.calls, found.status) == ([f"unbind {ADDRESS}"], 1)


def test_a_reset_that_ends_by_itself_is_waited_for(host: Commanded) -> None:
    """Then no step is needed, and no answer: it needs no terminal."""
    (chip,) = host.node.add("p150a")
    chip.reset()
    threading.Timer(0.3, chip.post_reset).start()

    found = host.run("fix", ADDRESS)

    assert (host.controls.calls, found.status, found.err) == ([], 0, "")


FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "its directory, too": lambda path: shutil.rmtree(path.parent),
    "a file": Path.touch,
    "a runtime's directory": Path.mkdir,
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device files")
@pytest.mark.parametrize("what", FILES)
def test_a_device_file_is_made_again(short_tmp: Path, what: str) -> None:
    """With sysfs's numbers, and for every user, whatever the umask is and what was there."""
    with commanded(short_tmp, nodes="mknod") as host:
        (chip,) = host.node.add("n150")
        chip.device_node.unlink()
        FILES[what](chip.device_node)

        before = os.umask(0o077)
        try:
            found = host.run("fix", ADDRESS, "--yes")
        finally:
            os.umask(before)

    assert found.status == 0, found.out + found.err


# -- interrupts ------------------------------------------------------------------------------------

INTERRUPTS: dict[str, Callable[[Terminal], None]] = {
    "Ctrl-C": lambda terminal: terminal.type("\x03"),
    "SIGTERM": lambda terminal: terminal.send(signal.SIGTERM),
    "SIGHUP": lambda terminal: terminal.send(signal.SIGHUP),
    "a closed terminal": Terminal.close,
}


@pytest.mark.parametrize("how", INTERRUPTS)
def test_an_interrupt_at_the_question(host: Commanded, dead: Chip, how: str) -> None:
    """No step is taken."""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        INTERRUPTS[how](terminal)
        status = terminal.ended()

    assert host.controls.calls == [] and status != 0
    if how != "a closed terminal":
        assert status == 130 and terminal.text.endswith("\ninterrupted\n")


@pytest.mark.parametrize("how", INTERRUPTS)
def test_an_unbind_is_followed_by_its_bind(host: Commanded, how: str) -> None:
    """Whatever ends the command in between."""
    (chip,) = host.node.add("p150a")
    host.service.faults[ADDRESS] = "silent"
    chip.silence()
    host.controls.block("drivers/tenstorrent/unbind")

    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        wait_until(lambda: shells(host))
        INTERRUPTS[how](terminal)
        host.controls.blocked.clear()
        wait_until(lambda: host.controls.calls == REBIND)
        assert terminal.ended() != 0


def shells(host: Commanded) -> list[Path]:
    """Return the shells that run a step on this node."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes()
            if command.startswith(b"sh\0-c\0") and str(host.node.root).encode() in command:
                found.append(path)
    return found


def test_ctrl_c_ends_a_tt_smi_that_hangs(host: Commanded, dead: Chip) -> None:
    """One that does not end is killed."""
    host.controls.install("tt-smi", ignored=(signal.SIGINT, signal.SIGTERM))
    host.controls.hangs = True
    host.constants["ENDS_WITHIN"] = 0.3

    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        wait_until(lambda: host.controls.waiting)
        terminal.type("\x03")
        assert terminal.ended() == 130

    wait_until(lambda: host.controls.waiting == 0)
    assert terminal.text.endswith("pods that must be started again: default/train\n")


@pytest.mark.parametrize(
    ("starter", "number"),
    [
        (["nohup"], signal.SIGHUP),
        (["sh", "-c", 'trap "" INT; exec "$@"', "sh"], signal.SIGINT),  # as `&` in a script
    ],
)
def test_a_signal_that_is_ignored_is_no_interrupt(
    host: Commanded, dead: Chip, starter: list[str], number: int
) -> None:
    """The program goes on when the session has ended, or the script is interrupted."""
    command = [*starter, sys.executable, str(ROOT / "ttdp.py"), "fix", ADDRESS, "--yes"]
    environ = environment(RUNTIME_DIRECTORY=str(host.root))
    none = subprocess.DEVNULL
    with subprocess.Popen(command, env=environ, stdin=none, stdout=none, stderr=none) as process:
        host.controls.before = lambda call: process.send_signal(number)
        assert process.wait() == 0
    assert host.controls.calls == [TT_SMI]


# -- with the daemon -------------------------------------------------------------------------------


async def test_the_daemon_and_fix_agree(served: Served) -> None:
    """The command that a reason names mends the chip, and then the daemon has no fault."""
    chip, _ = served.node.add("n150") + served.node.add("n150")
    with Controls(served.node, served.root) as controls:
        daemon = await served.serve("tenstorrent.com/n150", interval=0.1)
        chip.die()
        await daemon.sees(chip.bdf, ttdp.Kind.NO_RESPONSE)
        (reason,) = [row["reason"] for row in (await served.ask("list", "--json")).rows[:1]]
        program, *words = reason.partition("run: ")[2].split()

        found: Answer = await served.ask(*words, "--yes")

        assert (program, found.status) == ("tt-device-plugin", 0), found.out + found.err
        assert controls.calls == [TT_SMI]
        await daemon.sees(chip.bdf, None)
