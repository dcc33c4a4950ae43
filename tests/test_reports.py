"""What the daemon reports: the view that commands read, its problems, and the status.

Text for text, `list`, `check` and `fix` print what the view has: see tests/golden.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip, decide
from tests.commands import Served, view_of
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import OWN_DIRECTORY, Kind

N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
LONG_AGO = 1.5e9  # Unix time


async def problem_about(served: Served, subject: str) -> tuple[str, str, str]:
    """Return level, problem and command of the view's only problem with this subject."""
    (found,) = [each for each in (await served.view())["problems"] if each["subject"] == subject]
    return found["level"], found["problem"], found["command"]


# -- users -----------------------------------------------------------------------------------------


async def test_users_are_pods_and_the_hosts_processes(served: Served) -> None:
    """A pod is known by its name; a process by its command."""
    one, other = served.node.add("n150") + served.node.add("n150")
    daemon = await served.serve(N150)
    await served.kubelet.run_pod("team-a/train", N150, 1)
    holder = next(iter(daemon.decision.holds)).chips
    free = other if one.bdf in holder else one
    served.node.start_process(101, "0::/user.slice\n", [str(free.device_node)], "tt-smi")
    await until(lambda: daemon.host.holds.names)

    rows = {row["bdf"]: row for row in (await served.view())["chips"]}

    (held,) = holder
    pod = {"namespace": "team-a", "pod": "train", "container": "main"}
    assert rows[held]["pods"] == [pod] and rows[free.bdf]["pods"] == []
    process = {"pid": 101, "command": "tt-smi", "of_pod": False}
    assert rows[free.bdf]["processes"] == [process]


async def test_users_can_be_unknown(served: Served) -> None:
    """Processes of another PID namespace, with a driver before 2.5, or of another driver."""
    first, second = served.node.add("n150") + served.node.add("n150")
    await served.serve(N150, interval=0.1)
    first.set_pids([0])  # of another PID namespace
    second.bind_to("vfio-pci")
    await until(lambda: served.daemon.chip(second.bdf).fault)

    rows = (await served.view())["chips"]
    assert [row["processes"] for row in rows] == [None, None]


def processes_on(card: Card) -> list[ttdp.ProcessRow]:
    function = ttdp.PciFunction(card.bdf, ordinal=card.ordinal)
    return ttdp.processes_on(settings_of(card.node, card.node.root), function) or []


def test_a_hidden_process_is_a_user(node: SimulatedNode) -> None:
    """With hidepid, its PID is known."""
    (card,) = node.add("n150")
    node.start_process(7, "0::/user.slice\n", [str(card.device_node)], "hidden")
    shutil.rmtree(node.root / "proc/7")

    assert processes_on(card) == [{"pid": 7, "command": "?", "of_pod": False}]


def test_of_many_users_of_a_chip_a_thousand_are_listed(node: SimulatedNode) -> None:
    """Any process can open a device file without limit. They are more than a page of sysfs."""
    (card,) = node.add("n150")
    card.set_pids(range(1_000_000, 1_100_000))

    assert [row["pid"] for row in processes_on(card)] == [*range(1_000_000, 1_001_000)]


@pytest.mark.usefixtures("reads_time_out")
async def test_the_processes_of_a_chip_whose_reads_block_are_unknown(served: Served) -> None:
    """They are read with its telemetry: one that has ended would be named for hours."""
    (chip,) = served.node.add("n150")
    daemon = await served.serve(N150, interval=0.1)
    chip.block()
    await daemon.sees(chip.bdf, Kind.BLOCKED)
    (row,) = (await served.view())["chips"]
    assert row["processes"] is None

    chip.unblock()
    await daemon.sees(chip.bdf, None)
    (row,) = (await served.view())["chips"]
    assert row["processes"] == []


# -- faults ----------------------------------------------------------------------------------------

# A fault that telemetry shows, one that sysfs shows, and one that all chips have.
FAULTS: dict[str, tuple[Callable[[Card], object], str]] = {
    "tripped": (
        Card.trip,
        "thermal trip (1 since power-on; healthy again after 300 s without another one); "
        "check the cooling",
    ),
    "no_driver": (Card.unbind, "driver is not bound; run: tt-device-plugin fix {bdf}"),
    "no_driver of all": (
        lambda chip: chip.node.unload_driver(),
        "driver is not loaded; run: modprobe tenstorrent",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_log_status_list_check_and_metrics_agree_on_a_fault(
    served: Served, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Each has the same reason with the same command."""
    (chip,) = served.node.add("p150a")
    breaks, form = FAULTS[fault]
    kind, _, whose = fault.partition(" of ")
    has_file = kind != "no_driver"  # which comes by an event, so that no read meets it half done
    daemon = await served.serve(P150, interval=0.1 if has_file else 3600)
    reason = form.format(bdf=chip.bdf)

    breaks(chip)
    await served.kubelet.wait_for(lambda: served.kubelet.unhealthy(P150))
    await until(lambda: f"{chip.bdf} (p150a): unhealthy: {reason}" in caplog.messages)

    listed = (await served.ask("list")).out
    checked = (await served.ask("check")).out
    metrics = await daemon.metrics() or ""
    (row,) = (await served.ask("list", "--json")).rows

    status = f"1 × {P150}, 0 healthy ({chip.bdf}: {reason}); registered with kubelet"
    if whose == "all":
        text = "driver not loaded, 1 Tenstorrent PCI function; run: modprobe tenstorrent"
        status = f"{text}; {status}"
        assert f"FAIL  driver: {text}\n" in checked
    assert daemon.notified(f"STATUS={status}")

    assert (row["healthy"], row["reason"]) == (False, reason)
    assert row["path"] == (str(chip.device_node) if has_file else None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["since"])
    assert f" {kind.upper()} " in listed
    assert f"\n{chip.bdf}: {reason}\n" in re.sub(r" \(since [0-9: -]+\)", "", listed)
    assert f"FAIL  {chip.bdf}: {reason}\n" in checked
    assert f'tt_device_fault{{device="{chip.bdf}",kind="{kind}"}} 1' in metrics


async def test_the_time_of_a_fault_outlasts_the_daemon(served: Served) -> None:
    """The operator who comes at night asks since when, whatever was restarted meanwhile."""
    (chip,) = served.node.add("p150a")
    state = served.root / "state.json"
    daemon = await served.serve(P150, interval=0.1, state_dir=str(served.root))
    chip.die()
    await until(lambda: "no_response" in state.read_text())
    await daemon.stop()

    saved = json.loads(state.read_text())
    booted_at = time.time() - ttdp.seconds_since_boot()
    saved["chips"][chip.bdf]["since"] = LONG_AGO + 0.5 - booted_at
    state.write_text(json.dumps(saved))
    await served.serve(interval=0.1, state_dir=str(served.root))

    (row,) = (await served.view())["chips"]
    assert row["since"] == "2017-07-14T02:40:00Z"


# -- other problems --------------------------------------------------------------------------------


async def test_a_resource_that_is_not_registered_fails_while_a_kubelet_runs(served: Served) -> None:
    """The line has the reason that the kubelet gave."""
    served.node.add("n150")
    served.kubelet.refuse_with(ttdp.Status.UNKNOWN, "not welcome", times=99)
    daemon = await served.serve()
    await until(lambda: "not welcome" in str(daemon.notes))

    text = "not registered: kubelet rejected Register: not welcome"
    assert await problem_about(served, N150) == ("FAIL", text, "")


async def test_a_rejected_configuration_is_in_the_view(served: Served) -> None:
    """The daemon keeps the old one."""
    daemon = await served.serve()

    def load() -> ttdp.Settings:
        raise ttdp.ConfigError("/etc/x: unit: 'boards' is not valid; must be chip or board")

    daemon.loaded = load
    daemon.reload()
    await until(lambda: daemon.host.rejected)

    rejected = "/etc/x: unit: 'boards' is not valid; must be chip or board"
    assert (await served.view())["rejected"] == rejected


@pytest.mark.parametrize("unit", ["chip", "board"])
def test_a_board_that_is_not_known_or_not_whole_is_a_warning(unit: str) -> None:
    """Without its place a chip is not advertised if boards are."""
    chips = [chip(1, "p300c", serial="S"), chip(2, "p300c", serial="T"), chip(3, "p300c")]
    problems = view_of(decide(chips, ttdp.Settings(unit=unit)))["problems"]

    unplaced = [each["subject"] for each in problems if each["kind"] == "unplaced"]
    assert unplaced == ([bdf(3)] if unit == "board" else [])
    missing = view_of(decide(chips[:1]))["problems"]
    text = "only 1 of 2 chips of the board with serial S found"
    assert ("warn", "chips", text) in [(p["level"], p["subject"], p["problem"]) for p in missing]


async def test_a_directory_that_cannot_be_made_fails(served: Served) -> None:
    """A pod that has it cannot start again, so the view has the reason of the status."""
    served.node.add("n150")
    served.node.set_hugepages(4)
    daemon = await served.serve(N150, interval=0.1)
    await served.kubelet.admit("pod", "main", {N150: 1})

    own = served.node.root / "dev/hugepages-1G" / OWN_DIRECTORY
    shutil.rmtree(own)
    own.touch()
    await until(lambda: daemon.host.problems)

    text = f"directory for containers cannot be used: {own}: Not a directory"
    assert await problem_about(served, "directories") == ("FAIL", text, "")


async def test_a_directory_that_cannot_be_emptied_is_named_with_the_command(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that has the host's hugetlbfs can choose any name: it is quoted."""
    served.node.add("n150")
    served.node.set_hugepages(4)
    path = served.node.root / "dev/hugepages-1G" / OWN_DIRECTORY / "x; reboot\n<3>forged"
    path.mkdir(parents=True)
    monkeypatch.setattr(ttdp, "WRITTEN_WITHIN", 0.0)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(ttdp, "_remove_entry", busy)
    daemon = await served.serve(N150, interval=0.1)
    await until(lambda: daemon.host.directories.resisting)

    level, problem, command = await problem_about(served, "directories")
    assert (level, problem) == ("warn", f"{path} cannot be emptied: Device or resource busy")
    assert command == f"rm -rf --one-file-system {shlex.quote(str(path))}"


async def test_a_file_that_cannot_be_written_is_a_warning(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory that is newer than the service, a restart helps: its sandbox is older."""
    served.node.add("n150")
    labels = served.root / "features.d"
    labels.mkdir()

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(ttdp.OutputFile, "_replace", read_only)
    daemon = await served.serve(N150, interval=0.1)
    await until(lambda: daemon.host.files.problems)

    level, problem, command = await problem_about(served, "files")
    assert (level, command) == ("warn", ttdp.RESTART)
    assert problem == f"{labels}/tt-device-plugin cannot be written: Read-only file system"


async def test_a_daemon_started_by_hand_leaves_the_services_socket_to_it(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves another directory; else `list` would show its view, and none after its end."""
    daemon = await served.serve()
    other = replace(daemon.settings, device_plugin_dir=f"{served.root}/other")
    async with RunningDaemon(served.node, other) as second:
        await until(lambda: second.notified("READY=1"))
        text = f"cannot open the status socket {served.root}/status.sock: Address already in use"
        assert f"{text}; list and check cannot reach this daemon" in caplog.messages

        assert (await served.ask("list")).err == ""
    assert (await served.ask("list")).err == ""


# -- status ----------------------------------------------------------------------------------------


def test_a_card_that_was_never_bound_is_in_the_status_with_its_command() -> None:
    """It is not a device of a resource."""
    one = chip(1)
    unbound = one._replace(function=one.function.without_class_device(), is_listed=False)
    reason = f"driver is not bound; run: tt-device-plugin fix {bdf(1)}"
    status = f"1 Tenstorrent PCI function without a driver; {bdf(1)}: {reason}"
    assert ttdp.status_line(decide([unbound]), {}) == status


def test_a_checkpoint_that_cannot_be_read_is_in_the_status() -> None:
    """Beside the devices, which go on."""
    problem = f"{ttdp.CHECKPOINT} cannot be read"
    decision = decide([chip(1)], checkpoint_problem=problem)
    assert ttdp.status_line(decision, {}) == f"1 × {N150}, 1 healthy; {problem}"


def test_the_status_names_a_resource_that_is_not_registered() -> None:
    """If others are; else one word is enough for all of them."""
    decision = decide([chip(1), chip(2, "p150a")])
    devices = f"1 × {N150}, 1 healthy; 1 × {P150}, 1 healthy"
    registered = ttdp.Registration(ttdp.Phase.REGISTERED, ttdp.REGISTERED_TEXT)
    failed = ttdp.Registration(ttdp.Phase.FAILED, "not welcome")

    status = ttdp.status_line(decision, {N150: registered, P150: failed})
    assert status == f"{devices}; {P150} not welcome"

    status = ttdp.status_line(decision, {N150: registered, P150: ttdp.Registration()})
    assert status == f"{devices}; {P150} waiting for the kubelet's answer"

    status = ttdp.status_line(decision, {N150: registered, P150: registered})
    assert status == f"{devices}; registered with kubelet"


@pytest.mark.parametrize("driver", ["2.10.1", None])
def test_only_functions_that_wait_for_the_driver_are_counted(driver: str | None) -> None:
    """Not one that is gone, that another driver has, or that is bound.

    While the driver is loaded, nor is one that is a device: its resource has the reason.
    """
    kinds: list[dict[str, Any]] = [
        {"on_bus": False, "driver": None},
        {"driver": "vfio-pci"},
        {"driver": "tenstorrent"},
        {"driver": None},
        {"driver": None},
    ]
    chips = []
    for bus, changes in enumerate(kinds, 1):
        one = chip(bus)
        function = one.function.without_class_device()._replace(**changes)
        is_listed = bus == len(kinds)
        chips.append(one._replace(function=function, is_listed=is_listed))

    found = ttdp.driver_problem(decide(chips, driver=driver))

    assert found
    number = "1 Tenstorrent PCI function without" if driver else "2 Tenstorrent PCI functions"
    assert number in found.problem
    assert (bdf(4) in found.problem) is (driver is not None)
