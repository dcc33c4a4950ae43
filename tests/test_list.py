"""`list`: a row per chip, for people in columns and for programs as JSON, with its users."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.commands import PROGRAM, Host, host_with
from tests.conftest import StartDaemon
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, environment, until
from tests.world.simulation import RunningDaemon

KEYS = ["id", "index", "path", "bdf", "card", "board", "arch", "serial", "asic_id", "numa_node",
        "firmware", "temperature", "power", "healthy", "reason", "withheld", "resource",
        "replicas", "pods", "processes"]  # fmt: skip
N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
SAMPLE = "the service is not running; this is a sample\n"


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
    assert (answer.status, answer.err) == (0, SAMPLE)


@pytest.mark.parametrize("columns", [0, 80, 110])
def test_no_line_is_wider_than_the_terminal(host: Host, columns: int) -> None:
    """Reasons and remedies are below the table, wrapped; less important columns go first.

    A serial console has 0 columns.
    """
    host.node.add("galaxy-wormhole")
    host.node.add("p300c", bdf="0001:05:00.0")
    for chip in host.node.chips[-2:]:
        chip.freeze()
    for pid in range(10_001, 10_004):
        device = str(host.node.chips[-1].device_node)
        host.node.start_process(pid, "0::/user.slice\n", [device], "x" * 15)
    out = host.run_in_terminal(columns, "list")
    assert max(map(len, out.splitlines())) <= (columns or ttdp.WIDTH)
    text = re.sub(r"\s+", " ", out)
    remedy = "reset it: tt-smi -r 0001:05:00.0 (also resets 0001:06:00.0 on that board)"
    assert re.search(
        rf"0001:05:00.0: heartbeat stalled at \d+ \(firmware stopped\); {re.escape(remedy)}", text
    )
    assert re.search(r"0001:06:00.0 .* STALLED +x{15}\[10001\], x+(…|\[10002\] \+1)\n", out)
    assert out.rstrip().endswith("34 chips, 2 unhealthy, 1 in use")


def test_the_id_of_a_board_has_a_column(mixed: Host) -> None:
    """A chip whose board's serial is unknown waits for it; an unhealthy chip's board does, too."""
    mixed.node.add("p300c", bdf="0000:91:00.0", firmware=False)
    mixed.node.chip("0000:42:00.0").freeze()
    answer = mixed.run("list", "--unit=board")
    serial = "0000046131842007"
    assert [row["ID"] for row in answer.table][1:5] == [serial, serial, "0000:81:00.0", "-"]
    assert answer.table[1]["RESOURCE"] == "p300-board"
    assert "0000:91:00.0: waiting for the serial number of its board" in answer.below
    assert [row["HEALTH"] for row in answer.table][1:3] == ["healthy", "STALLED"]


def test_names_that_others_choose_are_escaped(host: Host) -> None:
    """A terminal would obey a process's name; an ASCII terminal gets ASCII."""
    (chip,) = host.node.add("n150")
    name = "\x1b]0;owned\x07\x1b[2Jnaïve"
    host.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)], name)
    out = host.run("list").out
    assert r"\x1b]0;owned\x07\x1b[2Jnaïve[7]" in out and "\x1b" not in out and "\x07" not in out
    config = host.root / "config.toml"
    config.write_text('[[sharing.resources]]\nname = "n150"\nreplicas = 4\n')
    answer = host.run_as_process("list", f"--config-file={config}", PYTHONIOENCODING="ascii")
    assert answer.out.isascii() and "n150 x4" in answer.out and "[7]" in answer.out


def test_no_device_is_not_an_error(host: Host) -> None:
    """A sentence for people, an empty array for programs; also without a driver."""
    answer = host.run("list")
    assert (answer.out, answer.status) == ("no Tenstorrent device on this node\n", 0)
    host.node.unload_driver()
    assert host.run("list", "--json").rows == []


def test_a_closed_pipe_is_not_an_error(host: Host) -> None:
    """`list | head -1`."""
    host.node.add("n150")
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PROGRAM, "list", *host.flags]
    with subprocess.Popen(
        command, env=environment(), stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=4 * PATIENCE)
    assert err.decode() == SAMPLE and process.returncode in (0, -signal.SIGPIPE)


def test_list_works_with_an_invalid_configuration(mixed: Host) -> None:
    """One line reports it; the rest is shown with the defaults."""
    config = mixed.root / "config.toml"
    config.write_text("units = 'board'\n")
    answer = mixed.run("list", f"--config-file={config}")
    assert len(answer.table) == 4 and answer.status == 0
    assert "'units' is not a known key; did you mean unit?; valid keys: " in answer.err


# -- for programs ----------------------------------------------------------------------------------


def test_json_has_these_keys_and_values(mixed: Host) -> None:
    """An array of objects in the order of addresses; null for unknown values."""
    answer = mixed.run("--json", "list")
    assert all(list(row) == KEYS for row in answer.rows)
    values = [
        "0000:41:00.0", 1, f"{mixed.node.root}/dev/tenstorrent/1", "0000:41:00.0", "p300c", "p300",
        "blackhole", "0000046131842007", "5D8801E2B3C42B01", None, "19.4.0.0", 41.5, 24.0, True,
        None, None, "tenstorrent.com/p300", 0, None, [],
    ]  # fmt: skip
    assert answer.rows[1] == dict(zip(KEYS, values, strict=True))
    late = answer.rows[3]
    unknown = ("serial", "asic_id", "numa_node", "firmware", "temperature", "power", "reason")
    assert [late[key] for key in unknown] == [None] * 7


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "word", "reason"),
    [("freeze", "STALLED", "heartbeat stalled"), ("block", "BLOCKED", "telemetry read timed out")],
)
def test_a_sample_takes_the_time_to_see_a_fault(
    host: Host, fault: str, word: str, reason: str
) -> None:
    """A word in the row, and the reason and remedy below the table; status 0."""
    chip, _ = host.node.add("n150") + host.node.add("n150")
    getattr(chip, fault)()
    answer = host.run_as_process("list")
    assert [row["HEALTH"] for row in answer.table] == [word, "healthy"]
    assert answer.below.startswith(f"0000:01:00.0: {reason}")
    assert answer.below.endswith("\n2 chips, 1 unhealthy, 0 in use") and answer.status == 0


# -- users, and the view of a running daemon -------------------------------------------------------


class Served(Host):
    """The host of a kubelet and a daemon, on which an operator runs commands."""

    async def users(self) -> list[str]:
        return [row["USED BY"] for row in (await self.ask("list")).table]


@pytest.fixture
def served(short_tmp: Path, node: SimulatedNode, ticking: None) -> Served:
    return Served(short_tmp, node, {"RUNTIME_DIRECTORY": str(short_tmp)})


@pytest.fixture
async def three(served: Served, kubelet: Kubelet, start: StartDaemon) -> RunningDaemon:
    """Three cards, with which a daemon is registered."""
    for _ in range(3):
        served.node.add("n150")
    daemon: RunningDaemon = await start(runtime_dir=str(served.root))
    await kubelet.registered(N150)
    return daemon


async def test_users_are_pods_and_the_hosts_processes(
    served: Served, kubelet: Kubelet, three: RunningDaemon
) -> None:
    """A pod's process counts as the pod; two names and a count are shown."""
    await kubelet.admit("team-a/train", "main", {N150: 2})
    await kubelet.running("team-a/train", "main")
    _, second, third = served.node.chips
    start = served.node.start_process
    start(101, "0::/user.slice\n", [str(second.device_node)], "tt-smi")
    for pid in range(201, 205):
        start(pid, "0::/user.slice\n", [str(third.device_node)], "python3")
    await until(lambda: three.daemon.node.allocations.names)
    answer = await served.ask("list")
    assert answer.err == ""
    assert [row["USED BY"] for row in answer.table] == [
        "team-a/train",
        "team-a/train, tt-smi[101]",
        "python3[201], python3[202] +2",
    ]
    assert answer.below == "3 chips, 0 unhealthy, 3 in use"


async def test_a_name_stays_known_while_the_kubelet_is_away(
    served: Served, kubelet: Kubelet, three: RunningDaemon
) -> None:
    """Also when its socket is gone."""
    await kubelet.admit("train", "main", {N150: 1})
    await until(lambda: three.daemon.node.allocations.names)
    await kubelet.stop()
    assert await served.users() == ["default/train", "-", "-"]


async def test_a_pod_whose_name_was_never_known_is_shown_by_its_uid(
    served: Served, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The pod resources API did not answer."""
    served.node.add("n150")
    daemon = await start(runtime_dir=str(served.root), pod_resources_socket="/nowhere")
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})
    uid = kubelet.uid("train")
    await until(lambda: uid in str(daemon.daemon.node.allocations.to_state()))
    assert await served.users() == [uid]


async def test_a_damaged_checkpoint_hides_no_user(
    served: Served, kubelet: Kubelet, three: RunningDaemon
) -> None:
    """Status and `check` report it; the pod stays in `list`."""
    await kubelet.admit("train", "main", {N150: 1})
    await until(lambda: three.daemon.node.allocations.names)
    problem = f"{ttdp.CHECKPOINT} cannot be parsed"
    kubelet.corrupt("garbage")
    await until(lambda: three.notified(f"STATUS=3 × {N150}, 3 healthy; {problem}; registered"))
    assert await served.users() == ["default/train", "-", "-"]
    check = await served.ask("check")
    text = f"{problem}; the kubelet rewrites it with the next pod"
    assert ("warn", "kubelet", text) in check.complaints


async def test_a_sound_chip_that_is_held_under_another_name_is_withheld(
    served: Served, kubelet: Kubelet, start: StartDaemon
) -> None:
    """It is healthy; the pod is named in the table, below it, and in JSON."""
    served.node.add("p150a")
    daemon = await start(runtime_dir=str(served.root))
    await kubelet.registered(P150)
    await kubelet.admit("train", "main", {P150: 1})
    await until(lambda: daemon.daemon.node.allocations.names)
    daemon.reload(resource_naming="card")
    await kubelet.registered(f"{P150}a")
    answer = await served.ask("list")
    (row,) = answer.table
    assert (row["HEALTH"], row["USED BY"]) == ("withheld", "default/train")
    assert f"{P150}a {row['ADDRESS']}: withheld: held by default/train as {P150} " in answer.below
    (chip,) = (await served.ask("list", "--json")).rows
    assert (chip["healthy"], chip["withheld"]) == (True, "default/train")


@pytest.mark.usefixtures("three")
async def test_unknown_users_are_a_question_mark(served: Served) -> None:
    """Without a kubelet, with processes of another PID namespace, with a driver before 2.5."""
    assert await served.users() == ["-", "-", "-"]
    alone = Served(served.root / "elsewhere", served.node)
    assert await alone.users() == ["?", "?", "?"]
    first, second, _ = served.node.chips
    served.node.start_process(7, "0::/user.slice\n", [str(first.device_node)], "tt-smi")
    second.set_pids([0])  # of another PID namespace
    assert await served.users() == ["tt-smi[7]", "?", "-"]
    assert await alone.users() == ["tt-smi[7]", "?", "?"]
    shutil.rmtree(served.node.root / "proc/driver/tenstorrent")
    assert await served.users() == ["?", "?", "?"]


@pytest.mark.parametrize("comm", ["", None])
def test_a_hidden_process_is_a_user(host: Host, comm: str | None) -> None:
    """With hidepid (None), or without a name: its PID is shown."""
    (chip,) = host.node.add("n150")
    host.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)], comm or "")
    if comm is None:
        shutil.rmtree(host.node.root / "proc/7")
    assert [row["USED BY"] for row in host.run("list").table] == ["?[7]"]


REASONS = {
    "trip": "thermal trip (1 so far; healthy again after 300 s without another); check its cooling",
    "unbind": "driver is not bound; run: echo 0000:01:00.0 > /sys/bus/pci/drivers/tenstorrent/bind",
    "unload": "driver is not loaded; run: modprobe tenstorrent",
    "vanish": "PCI device is gone; healthy again when it returns",
    "die": "chip does not respond (registers read as ones); reset it: tt-smi -r 0000:01:00.0",
    "replace": "device file is invalid: {path} is not a character device; remove the file that is "
    "there, then run: udevadm trigger --subsystem-match=tenstorrent",
}


@pytest.mark.parametrize("fault", REASONS)
async def test_log_status_list_check_and_metrics_agree_on_a_fault(
    served: Served,
    kubelet: Kubelet,
    start: StartDaemon,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    """Each has the same reason with the same remedy, once."""
    (chip,) = served.node.add("p150a")
    has_event = fault in ("unbind", "unload", "vanish")  # no read shall meet these half done
    daemon = await start(runtime_dir=str(served.root), interval=3600 if has_event else 0.1)
    await kubelet.registered(P150)
    reason = REASONS[fault].format(path=chip.device_node)
    if fault == "replace":
        chip.device_node.unlink()
        chip.device_node.touch()
    elif fault == "unload":
        served.node.unload_driver()
    else:
        getattr(chip, fault)()
    await kubelet.wait_for(lambda: kubelet.unhealthy(P150))
    answer = await served.ask("list")
    check = await served.ask("check")
    metrics: Any = await daemon.daemon._reporter.metrics.text()
    (row,) = (await served.ask("list", "--json")).rows
    (word,) = (each["HEALTH"] for each in answer.table)
    node = f"driver not loaded, 1 Tenstorrent PCI function; {ttdp.LOAD_DRIVER}; "
    status = f"1 × {P150}, 0 healthy ({chip.bdf}: {reason}); registered with kubelet"
    status = f"{node if fault == 'unload' else ''}{status}"
    assert (row["healthy"], row["reason"]) == (False, reason)
    assert answer.below.startswith(f"{chip.bdf}: {reason}\n")
    assert check.findings[1] == ("ok", "service", f"{ttdp.__version__}: {status}")
    assert ("FAIL", chip.bdf, f"p150a: {reason}") in check.complaints
    assert daemon.notified(f"STATUS={status}")
    assert f"{chip.bdf} (p150a): unhealthy: {reason}" in caplog.messages
    assert f'tt_device_fault{{device="{chip.bdf}",kind="{word.lower()}"}} 1' in metrics
    assert ("tt_driver_info" in metrics) is (fault != "unload")
    assert ('tt_pci_functions{driver=""} 1' in metrics) is (fault in ("unbind", "unload"))


async def test_a_card_that_was_never_bound_is_reported_with_its_remedy(
    served: Served, start: StartDaemon
) -> None:
    """By status, `list` and `check`, which warns: it is not a device of a resource."""
    daemon = await start(runtime_dir=str(served.root))
    await until(lambda: daemon.notified("READY=1"))
    (chip,) = served.node.add("p150a")
    chip.unbind()
    reason = f"{chip.bdf}: {REASONS['unbind']}"
    status = f"1 Tenstorrent PCI function without a driver ({reason})"
    await until(lambda: daemon.notified(f"STATUS={status}"))
    answer = await served.ask("list")
    assert [row["HEALTH"] for row in answer.table] == ["GONE"]
    assert answer.below.startswith(reason)
    check = await served.ask("check")
    assert ("warn", chip.bdf, f"p150a: {REASONS['unbind']}") in check.complaints


@pytest.mark.usefixtures("three")
async def test_a_daemon_of_another_node_is_not_asked(served: Served) -> None:
    """Other roots or directories: a sample, and a line that names the daemon's directory."""
    line = f"uses other directories than this command ({served.plugins}); this is a sample\n"
    other = Served(served.root / "elsewhere", served.node, served.environ)
    assert (await other.ask("list")).err == f"the service {line}"
    invalid = await served.ask("list", "--unit=boards")  # so the defaults are used
    assert invalid.err.endswith(line) and "--unit: 'boards'" in invalid.err


def test_more_processes_than_a_page_holds_are_all_read(host: Host) -> None:
    """700 of a local user do not push the last one's PID out, nor cut it."""
    (chip,) = host.node.add("n150")
    chip.set_pids(range(1_000_000, 1_000_700))
    (row,) = host.run("list", "--json").rows
    assert [each["pid"] for each in row["processes"]] == [*range(1_000_000, 1_000_700)]
