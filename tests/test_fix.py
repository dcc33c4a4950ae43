"""`fix ADDRESS`: which step, whom it hits, and that nothing else is done. Dialogues: golden/fix."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ttdp
from tests.commands import Commanded, Served, Terminal, commanded
from tests.world.controls import Controls
from tests.world.node import Chip
from tests.world.processes import wait_until
from ttdp import End, Look, PciFunction, Settings, Step

ADDRESS, SECOND = "0000:01:00.0", "0000:02:00.0"

# -- which step: pure ------------------------------------------------------------------------------

HERE = PciFunction(ADDRESS, "wormhole", directory="/sys/1", driver="tenstorrent", number=3)
HERE = HERE._replace(path="/dev/tenstorrent/3")
UNBOUND = HERE.without_class_device()
NO_CLASS = HERE.without_class_device("tenstorrent")
UNLOADED = UNBOUND._replace(driver_is_loaded=False)
OF_VFIO = UNBOUND._replace(driver="vfio-pci")
NO_FILE = HERE._replace(file_fault="/dev/tenstorrent/3 does not exist")
GONE = UNBOUND._replace(on_bus=False)


def look(kind: str = "", function: PciFunction = HERE, **more: Any) -> Look:
    """Return a look at a chip with a fault of this kind; more: of its row, or of the look."""
    given = {name: more.pop(name) for name in Look._fields if name in more}
    row = {"bdf": ADDRESS, "excluded": False, "healthy": not kind, **more}
    faults = [{"subject": ADDRESS, "kind": kind}] if kind else []
    return Look(function, {"chips": [row], "problems": faults}, **given)


SICK = ("no_response", "stalled", "blocked", "read_error")  # while sysfs is in order
EXCLUDED = "nothing is done: the chip is excluded"
LATE = "no step is left; if the firmware is late"
NEXT: list[tuple[Look, Sequence[Step], Step | tuple[str, bool]]] = [
    (look("gone", GONE), (), Step.RESCAN),
    (look("no_driver", UNLOADED), (), Step.LOAD),
    (look("no_driver", OF_VFIO._replace(driver_is_loaded=False)), (), Step.LOAD),
    (look("no_driver", OF_VFIO), (), ("nothing is done: a virtual machine may use", False)),
    (look("no_driver", UNBOUND), (), Step.BIND),
    (look("node", NO_CLASS), (), Step.REBIND),
    (look("silent", NO_FILE), (), Step.REBIND),
    (look("node", NO_FILE), (), Step.MAKE_FILE),
    *((look(kind, NO_FILE), (), Step.MAKE_FILE) for kind in SICK),
    *((look(kind), (), Step.RESET) for kind in SICK),
    (look("stalled", is_arm64=True), (), ("tt-smi cannot reset chips on arm64; drain this", False)),
    (look("resetting"), (), Step.WAIT),
    (look("resetting", is_arm64=True), (Step.WAIT,), Step.REBIND),
    (look("hot"), (), ("nothing is done: only cooling helps", False)),
    (look("tripped"), (), ("nothing is done: only cooling helps", False)),
    (look(), (), ("nothing needs to be done", True)),
    (look(), (Step.RESET,), ("no fault is left", True)),
    (look("stalled", excluded=True, healthy=None), (), (EXCLUDED, True)),
    (look("stalled", excluded=True), (), (EXCLUDED, False)),  # a pod holds it
    # A reset is less than a power cycle; and a Blackhole's firmware is asked only when it is bound.
    (look("silent"), (Step.REBIND,), Step.RESET),
    (look("silent"), (Step.REBIND, Step.RESET), Step.REBIND),
    (look("silent"), (Step.REBIND, Step.RESET, Step.REBIND), (LATE, False)),
    (look("resetting"), (Step.WAIT, Step.REBIND), Step.RESET),
    (look("stalled"), (Step.RESET,), (LATE, False)),
    (look("no_driver", UNLOADED), (Step.LOAD,), ("no step is left; install the driver", False)),
    # sysfs is right where the daemon has not looked yet.
    (look("", UNBOUND), (), Step.BIND),
    (look("stalled", GONE), (), Step.RESCAN),
    *((look(kind), (), Step.WAIT) for kind in ("gone", "no_driver", "node")),
    (look("gone"), (Step.WAIT,), ("nothing is done: the service still reports", False)),
]


@pytest.mark.parametrize(("seen", "done", "expected"), NEXT)
def test_the_first_row_that_applies_is_the_step(
    seen: Look, done: Sequence[Step], expected: Step | tuple[str, bool]
) -> None:
    """Without one it says why, and whether a fault is left."""
    found = ttdp.next_step(seen, done)
    if isinstance(found, End) and isinstance(expected, tuple):
        assert found.text.startswith(expected[0]) and found.is_well is expected[1]
    else:
        assert found is expected


any_look = st.builds(
    look,
    st.sampled_from(["", *(kind.value for kind in ttdp.Kind)]),
    st.sampled_from([HERE, UNBOUND, OF_VFIO, NO_FILE, GONE, NO_CLASS]),
    excluded=st.sampled_from([False, False, False, True]),
    is_arm64=st.booleans(),
)


@given(st.lists(any_look, min_size=12, max_size=12))
def test_no_step_is_taken_twice_and_none_on_an_excluded_chip(looks: list[Look]) -> None:
    """But unbinding and binding once more, after a reset. So it always ends."""
    done: list[Step] = []
    for seen in looks:
        step = ttdp.next_step(seen, done)
        if isinstance(step, End):
            break
        before = done[done.index(Step.RESET) :] if Step.RESET in done else done
        assert step not in done or (step is Step.REBIND and step not in before)
        assert not seen.row["excluded"]
        done.append(step)
    assert len(done) <= len(Step) + 1


# -- what a step is: pure --------------------------------------------------------------------------

BIND = f"echo {ADDRESS} > /sys/bus/pci/drivers/tenstorrent/bind"
UNBIND = f"echo {ADDRESS} > /sys/bus/pci/drivers/tenstorrent/unbind"
CLEAR = f"echo > {HERE.directory}/driver_override"
MAKE = "mkdir -p -m 755 /dev/tenstorrent; rm -df /dev/tenstorrent/3; mknod -m 666"
MAKE += f" /dev/tenstorrent/3 c $(tr : ' ' < '{HERE.class_device}/dev')"


@pytest.mark.parametrize(
    ("step", "override", "command"),
    [
        (Step.RESCAN, None, "echo 1 > /sys/bus/pci/rescan"),
        (Step.LOAD, None, "modprobe tenstorrent"),
        (Step.BIND, "tenstorrent", BIND),
        (Step.BIND, "vfio-pci", f"{CLEAR}; {BIND}"),
        (Step.REBIND, None, f"{UNBIND}; {BIND}"),
        (Step.REBIND, "vfio-pci", f"{CLEAR}; {UNBIND}; {BIND}"),
        (Step.MAKE_FILE, None, MAKE),
        (Step.RESET, None, "env -u TT_VISIBLE_DEVICES /tt-smi -r /dev/tenstorrent/3 --no_reinit"),
    ],
)
def test_a_step_is_the_command_that_is_shown(
    step: Step, override: str | None, command: str
) -> None:
    """An unbind is followed by its bind, also if it fails; tt-smi never gets an address."""
    seen = look(override=override)
    assert ttdp.command_of(step, seen, Settings(), "/tt-smi") == command


# -- what is done ----------------------------------------------------------------------------------

QUESTION = "Do this? [y/N] "
TT_SMI = "tt-smi -r /dev/tenstorrent/0 --no_reinit"


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


@pytest.mark.parametrize(
    ("typed", "status", "end"),
    [
        (" YES \n", 0, "pods that must be started again: default/train\n"),
        ("\n", 1, "\nnothing is done\n"),
        ("yesterday\n", 1, "\nnothing is done\n"),
        ("\x04", 1, "\nnothing is done\n"),  # Ctrl-D
        ("\x03", 130, "\ninterrupted\n"),  # Ctrl-C
    ],
)
def test_any_answer_but_yes_is_a_no(
    host: Commanded, dead: Chip, typed: str, status: int, end: str
) -> None:
    """Nor is what was typed before the question, such as the rest of what was pasted."""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.type("y\n")
        terminal.shows(QUESTION)
        terminal.type(typed)
        assert terminal.ended() == status

    assert terminal.text.endswith(end)
    assert host.controls.calls == ([] if status else [TT_SMI])


def renumber(host: Commanded) -> None:
    host.node.swap_ordinals(ADDRESS, SECOND)
    host.node.chip(ADDRESS).freeze()


CHANGES: dict[str, tuple[Callable[[Commanded], object], str]] = {
    "its number": (renumber, "-r /dev/tenstorrent/1 "),
    "its pod has ended": (lambda host: host.service.pods.clear(), "); not in use"),
    "another user": (lambda host: host.open(ADDRESS, 7, "python3"), "train, python3[7]"),
    "a pod on the other chip": (lambda host: host.admit("a/b", SECOND), "used by a/b"),
    "its fault": (lambda host: host.node.chip(ADDRESS).unbind(), "bind the driver to the chip"),
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
        change(host)
        terminal.type("y\n")
        terminal.shows("have changed since the question; nothing was done yet")
        assert shown in terminal.shows(QUESTION)
        terminal.type("n\n")
        terminal.ended()

    assert host.controls.calls == []


def test_one_at_a_time(host: Commanded, dead: Chip) -> None:
    """On a node, whatever the chip."""
    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        found = host.run("fix", SECOND, "--yes")

    assert (found.err, found.status) == ("another fix is at work on this node\n", 1)


def test_a_number_that_changes_while_tt_smi_starts(host: Commanded, dead: Chip) -> None:
    """This cannot be closed: the card that was hit is named, and all pods, also new ones."""
    host.admit("default/other", SECOND)

    def change(call: str) -> None:
        host.node.swap_ordinals(ADDRESS, SECOND)
        host.admit("default/new", ADDRESS)

    host.controls.before = change
    host.constants["FOLLOWS_WITHIN"] = 0.5

    found = host.run("fix", ADDRESS, "--yes")

    assert f"the device number 0 is that of {SECOND} now: tt-smi may have reset it" in found.out
    assert found.out.endswith("started again: default/train, default/new, default/other\n")


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


def test_a_reset_that_ends_by_itself_is_waited_for(host: Commanded) -> None:
    """Then no step is needed, and no answer: it needs no terminal."""
    (chip,) = host.node.add("p150a")
    chip.reset()
    threading.Timer(0.3, chip.post_reset).start()

    found = host.run("fix", ADDRESS)

    assert (host.controls.calls, found.status, found.err) == ([], 0, "")


def test_each_step_is_a_line_in_the_journal(host: Commanded, dead: Chip) -> None:
    """Who, which command, which pods. (In all other tests there is no journal.)"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(host.node.root / "dev/log"))
        host.run("fix", ADDRESS, "--yes", SUDO_USER="alice", USER="root")
        line = journal.recv(4096, socket.MSG_DONTWAIT).decode()

    program = f"env -u TT_VISIBLE_DEVICES {host.node.root}/bin/{TT_SMI}"
    text = f"fix {ADDRESS}: alice runs: {program}; pods: default/train"
    assert re.sub(r"\d+\]", "N]", line, count=1) == f"<29>tt-device-plugin[N]: {text}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make device files")
@pytest.mark.parametrize("is_directory", [False, True])
def test_a_device_file_is_made_again(short_tmp: Path, is_directory: bool) -> None:
    """Also without its directory, or where a container runtime has made one for it."""
    with commanded(short_tmp, nodes="mknod") as host:
        (chip,) = host.node.add("n150")
        shutil.rmtree(chip.device_node.parent)
        if is_directory:
            chip.device_node.mkdir(parents=True)

        found = host.run("fix", ADDRESS, "--yes")

        assert found.status == 0, found.out + found.err
        assert chip.device_node.stat().st_mode & 0o777 == 0o666


# -- interrupts ------------------------------------------------------------------------------------

INTERRUPTS: dict[str, Callable[[Terminal], object]] = {
    "Ctrl-C": lambda terminal: terminal.type("\x03"),
    "SIGTERM": lambda terminal: terminal.send(signal.SIGTERM),
    "a closed terminal": Terminal.close,
}


@pytest.mark.parametrize("how", INTERRUPTS)
def test_an_unbind_is_followed_by_its_bind(host: Commanded, how: str) -> None:
    """Whatever ends the command in between."""
    (chip,) = host.node.add("p150a")
    host.service.faults[ADDRESS] = "silent"
    chip.silence()
    host.controls.block("drivers/tenstorrent/bind")

    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        wait_until(lambda: host.controls.calls == [f"unbind {ADDRESS}"])
        INTERRUPTS[how](terminal)
        host.controls.blocked.clear()
        wait_until(lambda: host.controls.calls == [f"unbind {ADDRESS}", f"bind {ADDRESS}"])
        assert terminal.ended() != 0


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_an_interrupt_ends_a_tt_smi_that_hangs(host: Commanded, dead: Chip, how: str) -> None:
    """One that does not end is killed. The pods that it has hit are named."""
    host.controls.install("tt-smi", ignored=(signal.SIGINT, signal.SIGTERM))
    host.controls.hangs = True
    host.constants["ENDS_WITHIN"] = 0.3

    with host.terminal("fix", ADDRESS) as terminal:
        terminal.shows(QUESTION)
        terminal.type("y\n")
        wait_until(lambda: host.controls.waiting)
        INTERRUPTS[how](terminal)
        assert terminal.ended() == 130

    wait_until(lambda: host.controls.waiting == 0)
    assert terminal.text.endswith("pods that must be started again: default/train\n")


# -- with the daemon -------------------------------------------------------------------------------


async def test_the_daemon_and_fix_agree(served: Served) -> None:
    """The command that a reason names mends the chip, and then the daemon has no fault."""
    chip, _ = served.node.add("n150") + served.node.add("n150")
    with Controls(served.node, served.root) as controls:
        daemon = await served.serve("tenstorrent.com/n150", interval=0.1)
        chip.die()
        await daemon.sees(chip.bdf, ttdp.Kind.NO_RESPONSE)
        reason = (await served.view())["chips"][0]["reason"]
        program, *words = reason.partition("run: ")[2].split()

        found = await served.ask(*words, "--yes")

        assert (program, found.status) == ("tt-device-plugin", 0), found.out + found.err
        assert controls.calls == [TT_SMI]
        await daemon.sees(chip.bdf, None)
