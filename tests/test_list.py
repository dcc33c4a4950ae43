"""`list`: a row per chip, for people in columns and for programs as JSON, with its users."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.commands import PROGRAM, Answer, Host, Served, forked, host_with, view_of
from tests.conftest import READ_TIMEOUT
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, environment, finished, until
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import Kind

KEYS = ["id", "index", "path", "bdf", "card", "board", "arch", "serial", "asic_id", "numa_node",
        "firmware", "temperature", "power", "healthy", "reason", "withheld", "resource",
        "replicas", "pods", "processes", "excluded", "since"]  # fmt: skip
N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
ONE_LOOK = "this is a single look at the node: the service"
NOT_RUNNING = f"{ONE_LOOK} is not running; run: systemctl start tt-device-plugin\n"


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Host]:
    """A host without cards, and without a daemon."""
    with host_with(short_tmp) as host:
        yield host


@pytest.fixture
def mixed(host: Host) -> Host:
    """With an n150 on NUMA node 1, a p300c, and an n300 with late firmware."""
    add = host.node.add
    add("n150", numa_node=1, serial="0100018511732048", asic_id="3B1D7A5620E41F08")
    add("p300c", bdf="0000:41:00.0", serial="0000046131842007", asic_id="5D8801E2B3C42B01")
    add("n300", bdf="0000:81:00.0", firmware=False)
    return host


# -- for people ------------------------------------------------------------------------------------


def test_a_chip_is_a_row_between_versions_and_totals(mixed: Host) -> None:
    """A dash stands for what is unknown; one line on stderr reports that no daemon runs."""
    answer = mixed.run("list")

    first, header, row, *_, last = answer.out.splitlines()
    assert first == "driver 2.10.1-pre, firmware 19.4.0.0"
    assert header.split() == ["N", "ADDRESS", "CARD", "SERIAL", "NUMA", "FIRMWARE", "RESOURCE",
                              "°C", "W", "HEALTH", "USED", "BY"]  # fmt: skip
    assert row.split() == ["0", "0000:01:00.0", "n150", "0100018511732048", "1", "19.4.0.0",
                           "n150", "41", "16", "healthy", "?"]  # fmt: skip
    late = ["3", "0000:81:00.0", "n300", "-", "-", "-", "n300", "-", "-", "healthy", "?"]
    assert [*answer.table[3].values()] == late
    assert last == "4 chips, 0 unhealthy, 0 in use"
    assert (answer.status, answer.err) == (0, NOT_RUNNING)


@pytest.mark.parametrize("name", ["x" * 15, "x" * 14 + "\x1b"])
@pytest.mark.parametrize("columns", [0, 80, 200])
async def test_no_line_is_wider_than_the_terminal_or_than_110_columns(
    host: Host, columns: int, name: str
) -> None:
    """Reasons are below the table, wrapped; a serial console has 0 columns. Names are escaped."""
    (chip,) = host.node.add("n150")
    chip.die()
    for pid in range(10_001, 10_004):
        host.node.start_process(pid, "0::/user.slice\n", [str(chip.device_node)], name)

    async with host.on_terminal("list", columns=columns) as terminal:
        await terminal.ended()

    out = terminal.text[terminal.text.index("driver ") :]  # below the line on stderr
    assert 60 < max(map(len, out.splitlines())) <= min(columns or ttdp.WIDTH, ttdp.WIDTH)
    assert re.search(r"0000:01:00.0 .* NO_RESPONSE +x{14}(x|\\x1b)\[10001\],?(…| x)", out)
    assert out.rstrip().endswith("1 chip, 1 unhealthy, 1 in use")


UNBOUND = {"driver": None, "ordinal": None, "path": ""}
FUNCTIONS: dict[str, dict[str, Any]] = {  # with a reason each
    "gone": {**UNBOUND, "on_bus": False},
    "unbound": UNBOUND,
    "bound to another driver": {**UNBOUND, "driver": "vfio-pci"},
    "without a device file": {"file_fault": "/dev/tenstorrent/0 is not a character device"},
}
LONG_AGO = 1.5e9  # Unix time


def views() -> Iterator[dict[str, Any]]:
    """Yield views of nodes that have every kind of reason, with users."""
    for driver, since in (("2.10.1", LONG_AGO), ("2.10.1", None), (None, LONG_AGO)):
        chips, holds = [], []
        for bus, kind in enumerate(Kind, 1):
            serial = f"{bus // 2:016}"
            chips.append(chip(bus, "p300c", fault=kind, ordinal=bus, serial=serial))
            holds.append(hold("p300", bdf(bus), buses=[bus], pod=f"{'long' * bus}-{bus}"))
        for bus, changes in enumerate(FUNCTIONS.values(), 0x101):
            one = chip(bus, "n150")
            chips.append(one._replace(function=one.function._replace(**changes)))

        # Held under another name, incomplete, and waiting for the board's serial number.
        settings = ttdp.Settings(unit="board")
        chips += [chip(0x201, "p300c", serial="S", ordinal=90), chip(0x202, "p300c", ordinal=91)]
        chips.append(chip(0x203, "p300c", serial="T", ordinal=92))

        decision = decide(chips, settings, holds, driver=driver, unsupported=("0000:99:00.0",))
        yield view_of(decision, since)


VIEWS = [*views()]


@pytest.mark.parametrize("view", VIEWS)
def test_on_a_terminal_no_line_ends_inside_a_command(view: dict[str, Any]) -> None:
    """Each command stands on a line of its own, whole, in whatever width."""
    commands = {fault["command"] for fault in view["faults"].values()} - {""}
    assert len(commands) > 5

    for width in range(40, 131):
        lines = [*ttdp.list_lines(view, width)]

        text = "\n".join(lines)
        assert commands <= {line.strip() for line in lines}
        assert all(line.endswith("run:") for line in lines if "run:" in line), text
        table = lines[1 : len(view["chips"]) + 2]
        assert max(map(len, table)) <= width


@pytest.mark.parametrize("view", VIEWS)
def test_in_a_pipe_nothing_is_wrapped_omitted_or_cut(view: dict[str, Any]) -> None:
    """Each reason is one line that ends in its command, so that `grep` gets all of it."""
    lines = [*ttdp.list_lines(view, None)]

    assert len(re.split("  +", lines[1])) == len(ttdp.COLUMNS) + 2
    assert not [line for line in lines if line.startswith(" ") or "…" in line]
    for fault in view["faults"].values():
        if fault["command"]:
            assert [line for line in lines if line.endswith(f"; run: {fault['command']}")]


@pytest.mark.parametrize("view", VIEWS)
def test_columns_that_do_not_fit_are_named(view: dict[str, Any]) -> None:
    """The least important ones go first; JSON has them."""
    for width in range(40, 131):
        lines = [*ttdp.list_lines(view, width)]
        titles = re.split("  +", lines[1])
        omitted = [title for title in ttdp.OMITTED_FIRST if title not in titles]

        assert omitted == [*ttdp.OMITTED_FIRST[: len(omitted)]]
        note = f"(no room for {', '.join(omitted)}; list --json has all)"
        assert (note in re.sub(r"\n +", " ", "\n".join(lines))) is bool(omitted)


@pytest.mark.parametrize(
    ("now", "time_of_fault"),
    [("2026-11-25 23:59", "17:38"), ("2026-11-26 00:00", "2026-11-25 17:38")],
)
def test_a_reason_has_the_time_at_which_the_fault_began(
    monkeypatch: pytest.MonkeyPatch, now: str, time_of_fault: str
) -> None:
    """Local time, with the date from the second day on; before the command, which comes last."""
    began, moment = map(unix_time, ("2026-11-25 17:38", now))
    monkeypatch.setattr("ttdp.time.time", lambda: moment)
    view = view_of(decide([chip(1, fault=Kind.STALLED)]), began)

    lines = [*ttdp.list_lines(view, None)]

    command = f"tt-device-plugin fix {bdf(1)}"
    assert f"{bdf(1)}: it is ill (since {time_of_fault}); run: {command}" in lines


def unix_time(local: str) -> float:
    return time.mktime(time.strptime(local, "%Y-%m-%d %H:%M"))


def shown(view: dict[str, Any]) -> Answer:
    """What `list` prints of this view."""
    return Answer(0, "\n".join(ttdp.list_lines(view, None)), "")


def test_chips_with_one_reason_are_ill_since_the_first_of_them() -> None:
    """A reason that several chips have is one line, with the earliest time."""
    chips = [chip(1, fault=Kind.HOT), chip(2, fault=Kind.HOT)]
    view = view_of(decide(chips))
    view["faults"][bdf(1)]["since"] = LONG_AGO
    view["faults"][bdf(2)]["since"] = time.time()

    lines = [*ttdp.list_lines(view, None)]

    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(LONG_AGO))
    assert f"2 chips: it is ill (since {began})" in lines


def test_the_id_of_a_board_has_a_column() -> None:
    """A chip whose board's serial is unknown waits for it."""
    chips = [chip(1, "p300c", serial="S"), chip(2, "p300c", serial="S"), chip(3), chip(4, "p300c")]
    view = view_of(decide(chips, ttdp.Settings(unit="board")))

    answer = shown(view)

    assert [row["ID"] for row in answer.table] == ["S", "S", bdf(3), "-"]
    assert answer.table[1]["RESOURCE"] == "p300-board"
    assert f"{bdf(4)}: not advertised: waiting for the board's serial number" in answer.below


def test_a_shared_device_has_the_number_of_its_replicas() -> None:
    """It stands behind the name of the resource."""
    sharing = ttdp.Sharing(resources=(ttdp.SharedResource("n150", 4),))
    view = view_of(decide([chip(1)], ttdp.Settings(sharing=sharing)))

    (row,) = shown(view).table

    assert row["RESOURCE"] == "n150 ×4"


def test_a_sound_chip_that_is_held_under_another_name_is_withheld() -> None:
    """It is healthy; the pod is named in the table, below it, and in JSON."""
    settings = ttdp.Settings(resource_naming="card")
    holds = [hold("p150", bdf(1), buses=[1])]
    view = view_of(decide([chip(1, "p150a")], settings, holds))

    answer = shown(view)

    (row,) = answer.table
    assert (row["HEALTH"], row["USED BY"]) == ("withheld", "default/train")
    reason = f"held until default/train ends (as {P150} {bdf(1)})"
    assert f"{P150}a {bdf(1)} is withheld: {reason}\n" in answer.below
    (found,) = view["chips"]
    assert (found["healthy"], found["withheld"]) == (True, "default/train")
    assert (found["id"], found["resource"]) == (bdf(1), f"{P150}a")


def test_names_that_others_choose_are_escaped(host: Host) -> None:
    """A terminal would obey a process's name."""
    (chip,) = host.node.add("n150")
    name = "\x1b]0;owned\x07\x1b[2Jnaïve"
    host.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)], name)

    out = host.run("list").out

    assert r"\x1b]0;owned\x07\x1b[2Jnaïve[7]" in out and "\x1b" not in out and "\x07" not in out


def test_an_ascii_terminal_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other characters are replaced; Python itself would raise an error."""
    written = io.BytesIO()
    with io.TextIOWrapper(written, "ascii", write_through=True) as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        ttdp.print_safely("n150 ×4, 41 °C, naïve …")

        assert written.getvalue() == b"n150 x4, 41  C, na?ve .\n"


@pytest.mark.parametrize(("locale", "title"), [("C", b"   C  W"), ("C.UTF-8", b"  \xc2\xb0C  W")])
def test_a_terminal_in_the_locale_c_gets_ascii(host: Host, locale: str, title: bytes) -> None:
    """Python itself would write UTF-8 there, which a serial console does not show."""
    host.node.add("n150")
    terminal, end = pty.openpty()
    command = [*PROGRAM, "list", *host.flags]
    subprocess.run(command, env=environment(LC_ALL=locale), stdout=end, stderr=subprocess.DEVNULL)
    os.close(end)
    with open(terminal, "rb", 0) as file:
        shown = file.read(65536)

    assert title in shown and (locale == "C") == shown.isascii()


def test_no_device_is_not_an_error(host: Host) -> None:
    """A sentence for people, an empty array for programs; also without a driver."""
    assert shown(view_of(decide([]))).out == "no Tenstorrent device on this node"

    host.node.unload_driver()
    answer = host.run("list", "--json")
    assert (answer.rows, answer.status) == ([], 0)


def test_a_closed_pipe_is_not_an_error(host: Host) -> None:
    """`list | head -1`: there is nothing to report, least of all a traceback."""
    host.node.add("n150")
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PROGRAM, "list", *host.flags]

    with subprocess.Popen(
        command, env=environment(), stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=4 * PATIENCE)

    assert err.decode() == NOT_RUNNING and process.returncode in (0, -signal.SIGPIPE)


def redirected(host: Host, redirection: str, *words: str) -> Answer:
    """Run the program with this redirection of a shell."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *PROGRAM, *words, *host.flags]
    ended = finished(command, host.environ)
    return Answer(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize(
    ("words", "redirection", "reason"),
    [
        (["list", "--json"], ">&-", "it is closed"),
        (["check", "--config-only"], ">/dev/full", "No space left on device"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line_and_status_1(
    host: Host, words: list[str], redirection: str, reason: str
) -> None:
    """A script that keeps the output must not take an empty file for that of an idle node."""
    answer = redirected(host, redirection, *words)

    assert answer.err.removeprefix(NOT_RUNNING) == f"cannot write to stdout: {reason}\n"
    assert answer.status == 1


def test_without_stderr_the_json_is_json(mixed: Host) -> None:
    """The line that no daemon runs has no place to go, least of all among the rows."""
    assert len(redirected(mixed, "2>&-", "list", "--json").rows) == 4


@pytest.mark.parametrize("chips", [[chip(1)], []], ids=["one of others", "all that there is"])
def test_a_card_of_a_generation_that_is_not_known_is_named_below_the_table(
    chips: list[ttdp.Chip],
) -> None:
    """It is not a chip that anybody could use, and not one that is waited for."""
    decision = decide(chips, unsupported=("0000:05:00.0",))

    lines = [*ttdp.list_lines(view_of(decision), None)]

    assert lines[3 if chips else 0].startswith("0000:05:00.0: not supported: ")
    assert len(lines) == (5 if chips else 1)  # versions, titles, chip, this and the total
    assert ttdp.status_line(decision, {}).endswith("0000:05:00.0 is not supported")
    logged = [line for _, line in ttdp.changes(None, decision)]
    assert sum(line.startswith("0000:05:00.0 is not supported: ") for line in logged) == 1
    assert [*ttdp.changes(decision, decision)] == []


# -- for programs ----------------------------------------------------------------------------------


def test_json_has_these_keys_and_values(mixed: Host) -> None:
    """An array of objects in the order of addresses; null for unknown values."""
    answer = mixed.run("list", "--json")

    assert all(list(row) == KEYS for row in answer.rows)
    values = [
        "0000:41:00.0", 1, f"{mixed.node.root}/dev/tenstorrent/1", "0000:41:00.0", "p300c", "p300",
        "blackhole", "0000046131842007", "5D8801E2B3C42B01", None, "19.4.0.0", 41.5, 24.0, True,
        None, None, "tenstorrent.com/p300", 0, None, [], False, None,
    ]  # fmt: skip
    assert answer.rows[1] == dict(zip(KEYS, values, strict=True))

    late = answer.rows[3]
    unknown = ("serial", "asic_id", "numa_node", "firmware", "temperature", "power", "reason")
    assert [late[key] for key in unknown] == [None] * 7


# -- faults ----------------------------------------------------------------------------------------


def test_one_look_takes_the_time_to_see_that_reads_are_blocked(host: Host) -> None:
    """Each has its time, and they begin one after the other; status 0."""
    host.constants["READ_TIMEOUT"] = READ_TIMEOUT
    for _ in range(6):
        host.node.add("n150")
    for blocked in host.node.chips[1:]:
        blocked.block()

    answer = host.run("list")

    assert [row["HEALTH"] for row in answer.table] == ["healthy"] + ["BLOCKED"] * 5
    reason = "telemetry read timed out (the driver may be waiting for a reset)"
    for blocked in host.node.chips[1:]:
        command = f"tt-device-plugin fix {blocked.bdf}"
        assert f"{blocked.bdf}: {reason}; run: {command}\n" in answer.below
    assert answer.status == 0


async def test_one_look_takes_no_longer_than_the_reads(
    mixed: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read counts as blocked after some time; nobody waits for that if the chips answer."""
    monkeypatch.setattr("ttdp.READ_TIMEOUT", 60 * PATIENCE)
    look = ttdp.look_once(settings_of(mixed.node, mixed.plugins))
    view = await asyncio.wait_for(look, PATIENCE)
    assert [row["healthy"] for row in view["chips"]] == [True] * 4


def test_a_node_that_cannot_be_looked_at_is_one_line(host: Host) -> None:
    """Status 1: without a look nothing can be said of any chip."""
    devices = host.node.root / "sys/bus/pci/devices"
    devices.chmod(0)

    answer = host.run_as_process("list", as_other=True)

    devices.chmod(0o755)
    assert answer.err == f"cannot look at this node: {devices}/: Permission denied\n"
    assert (answer.out, answer.status) == ("", 1)


def test_one_look_judges_no_heartbeat_and_cannot_say_when_a_fault_began(host: Host) -> None:
    """That would take two looks. (The time can be that of the last daemon: see below.)"""
    frozen, dead = host.node.add("n150") + host.node.add("n150")
    frozen.freeze()
    dead.die()

    rows = host.run("list", "--json").rows

    assert [(row["healthy"], row["since"]) for row in rows] == [(True, None), (False, None)]


# -- users, and the view of a running daemon -------------------------------------------------------


async def users(host: Host) -> list[str]:
    return [row["USED BY"] for row in (await host.ask("list")).table]


@pytest.fixture
async def three(served: Served) -> RunningDaemon:
    """Three cards, with which a daemon is registered."""
    for _ in range(3):
        served.node.add("n150")
    return await served.serve(N150)


async def test_users_are_pods_and_the_hosts_processes(served: Served, three: RunningDaemon) -> None:
    """A pod's process counts as the pod; two names and a count are shown."""
    await served.kubelet.run_pod("team-a/train", N150, 2)
    _, second, third = served.node.chips
    start = served.node.start_process

    start(101, "0::/user.slice\n", [str(second.device_node)], "tt-smi")
    for pid in range(201, 205):
        start(pid, "0::/user.slice\n", [str(third.device_node)], "python3")
    await until(lambda: three.daemon.host.holds.names)
    answer = await served.ask("list")

    assert answer.err == ""
    assert [row["USED BY"] for row in answer.table] == [
        "team-a/train",
        "team-a/train, tt-smi[101]",
        "python3[201], python3[202] +2",
    ]
    assert answer.below == "3 chips, 0 unhealthy, 3 in use"


def test_a_pod_whose_name_was_never_known_is_shown_by_its_uid() -> None:
    """The pod resources API did not answer."""
    holds = [hold("n150", bdf(1), buses=[1], pod="5ca1ab1e")]
    (row,) = shown(view_of(decide([chip(1)], holds=holds, names={}))).table
    assert row["USED BY"] == "5ca1ab1e"


@pytest.mark.usefixtures("three")
async def test_unknown_users_are_a_question_mark(served: Served) -> None:
    """Without a kubelet, with processes of another PID namespace, with a driver before 2.5."""
    assert await users(served) == ["-", "-", "-"]
    alone = Host(served.root / "elsewhere", served.node)
    assert await users(alone) == ["?", "?", "?"]

    first, second, _ = served.node.chips
    served.node.start_process(7, "0::/user.slice\n", [str(first.device_node)], "tt-smi")
    second.set_pids([0])  # of another PID namespace
    assert await users(served) == ["tt-smi[7]", "?", "-"]

    shutil.rmtree(served.node.root / "proc/driver/tenstorrent")
    assert await users(served) == ["?", "?", "?"]


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


@pytest.mark.usefixtures("three")
async def test_reads_that_are_slow_are_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine nothing is unknown for that."""
    genuine = ttdp.processes_on

    def slow(*arguments: Any) -> list[ttdp.ProcessRow] | None:
        time.sleep(4 * ttdp.SLOW_AFTER)
        return genuine(*arguments)

    monkeypatch.setattr(ttdp, "processes_on", slow)
    assert await users(served) == ["-", "-", "-"]


UNBOUND_REASON = "driver is not bound; run: tt-device-plugin fix {bdf}"
# A fault that telemetry shows, one that sysfs shows, and one that all chips have.
FAULTS: dict[str, tuple[Callable[[Card], object], str]] = {
    "tripped": (
        Card.trip,
        "thermal trip (1 since power-on; healthy again after 300 s without another one); "
        "check the cooling",
    ),
    "no_driver": (Card.unbind, UNBOUND_REASON),
    "no_driver of all": (
        lambda chip: chip.node.unload_driver(),
        "driver is not loaded; run: modprobe tenstorrent",
    ),
}


def without_times(text: str) -> str:
    return re.sub(r" \(since [0-9: -]+\)", "", text)


@pytest.mark.parametrize("fault", FAULTS)
async def test_log_status_list_check_and_metrics_agree_on_a_fault(
    served: Served, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Each has the same reason with the same command, once."""
    (chip,) = served.node.add("p150a")
    breaks, form = FAULTS[fault]
    kind, _, whose = fault.partition(" of ")
    has_file = kind != "no_driver"  # which comes by an event, so that no read meets it half done
    daemon = await served.serve(P150, interval=0.1 if has_file else 3600)
    reason = form.format(bdf=chip.bdf)

    breaks(chip)
    await served.kubelet.wait_for(lambda: served.kubelet.unhealthy(P150))
    await until(lambda: f"{chip.bdf} (p150a): unhealthy: {reason}" in caplog.messages)

    answer = await served.ask("list")
    check = await served.ask("check")
    metrics = await daemon.metrics() or ""
    (row,) = (await served.ask("list", "--json")).rows

    status = f"1 × {P150}, 0 healthy ({chip.bdf}: {reason}); registered with kubelet"
    finding = ("FAIL", chip.bdf, f"p150a: {reason}")
    if whose == "all":
        text = "driver not loaded, 1 Tenstorrent PCI function; run: modprobe tenstorrent"
        status = f"{text}; {status}"
        finding = ("FAIL", "driver", text)
    assert daemon.notified(f"STATUS={status}")

    assert (row["healthy"], row["reason"]) == (False, reason)
    assert row["path"] == (str(chip.device_node) if has_file else None)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", row["since"])
    assert [each["HEALTH"] for each in answer.table] == [kind.upper()]
    assert without_times(answer.below).startswith(f"{chip.bdf}: {reason}\n")

    assert check.findings[1][:2] == ("ok", "service")
    complaints = [(*start, without_times(text)) for *start, text in check.complaints]
    assert finding in complaints
    command = reason.rpartition("run: ")[2]
    assert sum(command in text for *_, text in check.findings) == 1, "one cause is one line"

    assert f'tt_device_fault{{device="{chip.bdf}",kind="{kind}"}} 1' in metrics


@pytest.mark.usefixtures("reads_time_out")
async def test_the_processes_of_a_chip_whose_reads_block_are_unknown(served: Served) -> None:
    """They are read with its telemetry: one that has ended would be named for hours."""
    (chip,) = served.node.add("n150")
    served.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)])
    daemon = await served.serve(N150, interval=0.1)
    assert await users(served) == ["python3[7]"]

    chip.block()
    await daemon.sees(chip.bdf, Kind.BLOCKED)
    served.node.end_process(7)

    assert await users(served) == ["?"]
    chip.unblock()
    await daemon.sees(chip.bdf, None)
    assert await users(served) == ["-"]


async def test_the_time_of_a_fault_outlasts_the_daemon(served: Served) -> None:
    """The operator who comes at night asks since when, whatever was restarted meanwhile."""
    (chip,) = served.node.add("p150a")
    state = served.root / "state.json"
    daemon = await served.serve(P150, interval=0.1, state_dir=str(served.root))
    chip.die()
    await served.kubelet.wait_for(lambda: served.kubelet.unhealthy(P150))
    await until(lambda: "no_response" in state.read_text())
    await daemon.stop()

    saved = json.loads(state.read_text())
    booted_at = time.time() - ttdp.seconds_since_boot()
    saved["chips"][chip.bdf]["since"] = LONG_AGO + 0.5 - booted_at
    state.write_text(json.dumps(saved))
    await served.serve(interval=0.1, state_dir=str(served.root))

    alone = Host(served.root / "elsewhere", served.node, {"STATE_DIRECTORY": str(served.root)})
    for host in (served, alone):
        (row,) = (await host.ask("list", "--json")).rows
        assert row["since"] == "2017-07-14T02:40:00Z"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(LONG_AGO))
    assert f" (since {began}); run: " in (await served.ask("list")).below


async def test_a_fault_that_the_view_finds_first_has_its_own_time(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not that of the fault before it; and though no event woke the loop, the log has it, too."""
    monkeypatch.setattr(ttdp, "ROUND", 3600.0)
    (chip,) = served.node.add("n150")
    daemon = await served.serve(N150, interval=3600)
    state = daemon.host.inventory.states[chip.bdf]
    chip.unbind()
    await until(lambda: state.since)
    state.since = LONG_AGO

    served.node.on_uevent = None
    chip.vanish()
    (row,) = (await served.ask("list", "--json")).rows

    assert row["reason"].startswith("PCI device is gone")
    assert row["since"] > "2018", "LONG_AGO is of 2017"
    await until(lambda: "PCI device is gone" in caplog.text)


def test_a_card_that_was_never_bound_is_in_the_status_with_its_command() -> None:
    """It is not a device of a resource."""
    one = chip(1)
    unbound = one._replace(function=one.function.without_class_device(), is_listed=False)
    reason = UNBOUND_REASON.format(bdf=bdf(1))
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


@pytest.mark.parametrize("key", ttdp.NEEDS_RESTART)
async def test_a_daemon_of_another_node_is_not_asked(
    served: Served, three: RunningDaemon, key: str
) -> None:
    """Other roots or directories: one look, and a line that names the option with both values.

    It can have changed in the file, where a reload does not apply it.
    """
    theirs, ours = getattr(three.settings, key), f"{served.root}/elsewhere"
    words = ["list", *served.flags, f"{ttdp.flag_of(key)}={ours}"]

    answer = await asyncio.to_thread(forked, words, environment() | served.environ)

    text = f"uses {key} {theirs}, not {ours}; restart it, or run this command with its options"
    assert answer.err == f"{ONE_LOOK} {text}\n"


async def test_a_daemon_started_by_hand_leaves_the_services_socket_to_it(
    served: Served, three: RunningDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """It serves another directory; else `list` would show its view, and none after its end."""
    other = replace(three.settings, device_plugin_dir=f"{served.root}/other")
    async with RunningDaemon(served.node, other) as second:
        await until(lambda: second.notified("READY=1"))
        text = f"cannot open the status socket {served.root}/status.sock: Address already in use"
        assert f"{text}; list and check cannot reach this daemon" in caplog.messages

        assert (await served.ask("list")).err == ""
    assert (await served.ask("list")).err == ""


@pytest.mark.usefixtures("three")
async def test_an_invalid_configuration_does_not_lead_to_other_directories(served: Served) -> None:
    """The daemon runs on with its last valid one, so its view is shown, whatever it uses."""
    config = served.configure("unit = 'boards'")
    problem = f"{config}: unit: 'boards' is not valid; must be chip or board"

    async def ask(command: str) -> Answer:
        words = [command, f"--config-file={config}"]  # without the flags of this host
        where = {"runtime_directory": str(served.root)}
        return await asyncio.to_thread(forked, words, environment(), **where)

    answer = await ask("list")
    assert (answer.err, answer.status) == (f"{problem}\n", 0)
    assert [row["USED BY"] for row in answer.table] == ["-", "-", "-"]

    answer = await ask("check")
    running = f"{ttdp.__version__} is running, registered with kubelet"
    assert answer.findings[:2] == [
        ("FAIL", "configuration", problem),
        ("ok", "service", f"{running}; it cannot start again with this configuration"),
    ]
    socket_works = f"{served.plugins}/kubelet.sock accepts connections"
    assert ("ok", "kubelet", socket_works) in answer.findings


@pytest.mark.usefixtures("three")
async def test_a_daemon_of_another_version_is_not_asked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its view can lack what this command shows: an upgrade did not restart the service."""
    monkeypatch.setattr("ttdp.view_of_node", lambda *_, **__: {"version": "0.1.9"})
    problem = f"is still version 0.1.9, not {ttdp.__version__}"
    command = "run: systemctl restart tt-device-plugin"

    answer = await served.ask("list")
    assert answer.err == f"{ONE_LOOK} {problem}; {command}\n"
    assert len(answer.table) == 3

    check = await served.ask("check")
    assert ("FAIL", "service", f"{problem}; {command}") in check.complaints
    assert check.status == 1


@contextlib.contextmanager
def answering(path: Path, answers: Iterable[bytes]) -> Iterator[None]:
    """Something else listens on the service's socket, and answers a connection with these."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            for answer in answers:
                connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join(PATIENCE)


STRANGE_ANSWERS: dict[str, Iterable[bytes]] = {
    "no JSON": [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
    "no text": [b"\xff\xfe"],
    "an array": [b"[]"],
    "an object": [b"{}"],
    "nested deeply": [b"[" * 1_000_000],
    "a version that is none": [b'{"version": ["\\u001b[2J"]}'],
    "only a version": [json.dumps({"version": ttdp.__version__}).encode()],
    "without an end": itertools.repeat(b"[" * (1 << 20)),  # no more of it is kept than of a view
}


@pytest.mark.parametrize("answer", STRANGE_ANSWERS)
def test_whatever_else_answers_on_the_services_socket_is_a_problem(
    short_tmp: Path, answer: str
) -> None:
    """No form of answer is taken for a view, or raises an error."""
    path = short_tmp / "status.sock"
    with answering(path, STRANGE_ANSWERS[answer]):
        found = ttdp.ask(str(path))
    text = f"does not answer on {path}: not a view of this program"
    assert found == ttdp.ServiceProblem("FAIL", text)


async def test_a_view_that_is_not_ready_in_time_is_a_problem_of_the_service(
    served: Served, three: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a starved machine: no other program has the socket."""
    monkeypatch.setattr(ttdp.SharedText, "TIMEOUT", 0.0)

    answer = await served.ask("check")

    text = f"closed {served.root}/status.sock without an answer: it is overloaded, or its log has "
    text += "an error; run: journalctl -t tt-device-plugin -p warning"
    assert ("FAIL", "service", text) in answer.complaints


def test_a_service_that_says_nothing_is_a_problem(
    short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon itself would end the connection sooner."""
    monkeypatch.setattr("ttdp.VIEW_TIMEOUT", 0.1)
    path = short_tmp / "status.sock"

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        found = ttdp.ask(str(path))

    assert found == ttdp.ServiceProblem("FAIL", f"does not answer on {path}: timed out")


@pytest.mark.usefixtures("three")
async def test_the_service_is_asked_where_it_is(served: Served) -> None:
    """Also in the shell of another service, whose RUNTIME_DIRECTORY is another."""
    elsewhere = Host(served.root, served.node, {"RUNTIME_DIRECTORY": "/run/another-service"})

    answer = await elsewhere.ask("list")

    assert (answer.err, [row["USED BY"] for row in answer.table]) == ("", ["-", "-", "-"])
