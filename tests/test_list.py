"""`list`: a row for each chip, for people in columns and for programs as JSON."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.commands import PROGRAM, Host, ended, host_with, wait_for_reader
from tests.test_check import remember
from tests.world.processes import PATIENCE, environment

KEYS = ["id", "index", "path", "bdf", "card", "board", "arch", "serial", "asic_id", "numa_node",
        "firmware", "temperature", "power", "healthy", "reason", "resource", "replicas", "pods",
        "processes"]  # fmt: skip


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Host]:
    """A host without cards."""
    with host_with(short_tmp) as host:
        yield host


@pytest.fixture
def mixed(host: Host) -> Host:
    """With an n150 on NUMA node 1, a p300c, and an n300 whose firmware says nothing."""
    add = host.node.add
    add("n150", numa_node=1, serial="0100018511732048", asic_id="3B1D7A5620E41F08")
    add("p300c", bdf="0000:41:00.0", serial="0000046131842007", asic_id="5D8801E2B3C42B01")
    add("n300", bdf="0000:81:00.0", firmware=False)
    return host


# -- for people ------------------------------------------------------------------------------------


def test_a_chip_is_a_row_of_110_columns(mixed: Host) -> None:
    """Health stands before the users, whose names can be long; what is unknown is a dash."""
    answer = mixed.run("list")
    header, *rows = answer.table
    assert header == ["N", "ADDRESS", "CARD", "SERIAL", "NUMA", "FIRMWARE", "RESOURCE", "°C", "W",
                      "HEALTH", "USED BY"]  # fmt: skip
    assert rows[0] == ["0", "0000:01:00.0", "n150", "0100018511732048", "1", "19.4.0.0", "n150",
                       "42", "16", "healthy", "?"]  # fmt: skip
    addresses = [row[1] for row in rows]
    assert addresses == ["0000:01:00.0", "0000:41:00.0", "0000:42:00.0", "0000:81:00.0"]
    silent = ["3", "0000:81:00.0", "n300", "-", "-", "-", "n300", "-", "-", "healthy", "?"]
    assert rows[3] == silent
    assert max(map(len, answer.out.splitlines())) <= 110
    assert (answer.status, answer.err) == (0, "")


def test_the_widest_card_fits_with_a_pod(host: Host) -> None:
    """A Galaxy's names are the longest; only a pod's own name can go beyond."""
    host.node.add("galaxy-wormhole")
    checkpoint = host.plugins / ttdp.CHECKPOINT
    checkpoint.write_text(record("tenstorrent.com/galaxy-wormhole", "0000:c1:00.0"))
    lines = host.run("list").out.splitlines()
    assert len(lines) == 33 and sum(line.endswith(UID) for line in lines) == 1
    assert max(len(line.removesuffix(UID)) for line in lines) <= 110


UID = "6f1cbb7a-4a08-4c31-9a5b-0f4f6a2a9d10"


def record(resource: str, bdf: str, pod: str = UID) -> str:
    """A kubelet's checkpoint, by which a pod has this chip."""
    answer = pb.ContainerAllocateResponse(envs={ttdp.ADDRESSES: bdf})
    entry = {
        "PodUID": pod,
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": {"-1": [bdf]},
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    return json.dumps({"Data": {"PodDeviceEntries": [entry], "RegisteredDevices": {}}})


def test_an_id_that_is_no_address_is_shown(mixed: Host) -> None:
    """A board's serial for both of its chips; one whose board is not known yet says so."""
    mixed.node.add("p300c", bdf="0000:91:00.0", firmware=False)
    header, *rows = mixed.run("list", "--unit=board").table
    assert header[:3] == ["N", "ADDRESS", "ID"]
    serial = "0000046131842007"
    ids = ["0000:01:00.0", serial, serial, "0000:81:00.0", "-", "-"]
    assert [row[2] for row in rows] == ids
    assert rows[1][7] == "p300-board"
    assert rows[5][-2] == "UNHEALTHY: its board is not known yet"


def test_a_healthy_chip_of_a_board_that_is_not_says_why(mixed: Host) -> None:
    """With unit = "board" it is the board that a container can have."""
    mixed.node.chip("0000:42:00.0").freeze()
    _, _, first, second, _ = mixed.run("list", "--unit=board").table
    assert first[-2].startswith("UNHEALTHY: 0000:42:00.0: heartbeat stalled")
    assert second[-2].startswith("UNHEALTHY: heartbeat stalled")


def test_a_chip_that_is_gone_stays_in_the_list(host: Host) -> None:
    """The daemon has seen it since boot: what it was, and that it has no node."""
    (chip,) = host.node.add("p150a")
    remember(host)
    chip.vanish()
    (row,) = host.run("list").table[1:]
    assert row[:3] == ["-", chip.bdf, "p150a"] and "UNHEALTHY: PCI device is gone" in row[-2]
    assert row[3] == chip.facts.telemetry["tt_serial"]


def test_names_that_others_choose_are_escaped(host: Host) -> None:
    """A process can call itself what it wants, and root's terminal would obey."""
    (chip,) = host.node.add("n150")
    evil = "\x1b]0;owned\x07\x1b[2J"
    host.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)], evil)
    out = host.run("list").out
    assert out.isascii() or "°" in out
    assert "\x1b" not in out and "\x07" not in out
    assert r"\x1b]0;owned\x07\x1b[2J[7]" in out


def test_an_ascii_terminal_gets_ascii(host: Host) -> None:
    """No traceback for a degree sign, a multiplication sign or a process called so."""
    (chip,) = host.node.add("n150")
    host.node.start_process(7, "0::/user.slice\n", [str(chip.device_node)], "naïve")
    config = host.root / "config.toml"
    config.write_text('[[sharing.resources]]\nname = "n150"\nreplicas = 4\n')
    answer = host.run_anew("list", f"--config-file={config}", PYTHONIOENCODING="ascii")
    assert answer.out.isascii() and "n150 x4" in answer.out and "[7]" in answer.out
    assert (answer.status, answer.err) == (0, "")


def test_nothing_is_a_sentence(host: Host) -> None:
    """No device is no error."""
    answer = host.run("list")
    assert (answer.out, answer.status) == ("no Tenstorrent device on this node\n", 0)


def test_a_reader_that_has_gone_is_no_error(host: Host) -> None:
    """`list | head -1` may close the pipe before all is written: nothing to complain about."""
    host.node.add("n150")
    reader, writer = os.pipe()
    os.close(reader)
    command = [*PROGRAM, "list", *host.flags]
    with subprocess.Popen(
        command, env=environment(), stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=4 * PATIENCE)
    assert err == b"" and process.returncode in (0, -signal.SIGPIPE)


# -- for programs ----------------------------------------------------------------------------------


def test_json_has_these_keys_and_values(mixed: Host) -> None:
    """An array of objects, in the order of the addresses; null for what nobody knows."""
    answer = mixed.run("--json", "list")
    assert all(list(row) == KEYS for row in answer.rows)
    values = [
        "0000:41:00.0", 1, f"{mixed.node.root}/dev/tenstorrent/1", "0000:41:00.0", "p300c", "p300",
        "blackhole", "0000046131842007", "5D8801E2B3C42B01", None, "19.4.0.0", 41.5, 24.0, True,
        None, "tenstorrent.com/p300", 0, None, [],
    ]  # fmt: skip
    assert answer.rows[1] == dict(zip(KEYS, values, strict=True))
    silent = answer.rows[3]
    assert (silent["card"], silent["resource"]) == ("n300", "tenstorrent.com/n300")
    unknown = ("serial", "asic_id", "numa_node", "firmware", "temperature", "power", "reason")
    assert [silent[key] for key in unknown] == [None] * 7
    assert [row["numa_node"] for row in answer.rows] == [1, None, None, None]


def test_devices_and_resources_are_named_as_the_options_say(mixed: Host) -> None:
    """The ASIC's ID where it is known, the exact card type, another domain."""
    options = ["device-id-strategy=asic", "resource-naming=card", "resource-domain=example.org"]
    rows = mixed.run("list", "--json", *(f"--{option}" for option in options)).rows
    assert [row["id"] for row in rows][::3] == ["wormhole-3B1D7A5620E41F08", "0000:81:00.0"]
    cards = ("n150", "p300c", "p300c", "n300")
    assert [row["resource"] for row in rows] == [f"example.org/{card}" for card in cards]


def test_a_card_that_nobody_knows_is_not_guessed(host: Host) -> None:
    """Neither card nor board; the resource is the architecture."""
    host.node.add("n150", firmware=False)[0].write("subsystem_device", b"0x0099\n")
    (row,) = host.run("list", "--json").rows
    assert (row["card"], row["board"], row["arch"]) == (None, None, "wormhole")
    assert row["resource"] == "tenstorrent.com/wormhole"


def test_nothing_is_an_empty_array(host: Host) -> None:
    """Without a driver, too."""
    host.node.unload_driver()
    answer = host.run("list", "--json")
    assert (answer.rows, answer.status) == ([], 0)


def test_processes_that_have_a_node_open_are_named(host: Host) -> None:
    """Each once; an empty list where there is none, null where nobody can know."""
    for _ in range(3):
        host.node.add("n150")
    first, second, third = host.node.chips
    host.node.start_process(4711, "0::/user.slice\n", [str(first.device_node)] * 2, "tt-smi")
    second.set_pids([0])  # of another PID namespace
    third.set_pids([999])  # has ended
    processes = [row["processes"] for row in host.run("list", "--json").rows]
    assert processes == [[{"pid": 4711, "command": "tt-smi", "of_pod": False}], None, []]
    shutil.rmtree(host.node.root / "proc/driver/tenstorrent")  # as a driver before 2.5
    assert [row["processes"] for row in host.run("list", "--json").rows] == [None] * 3


# -- chips that are ill ----------------------------------------------------------------------------


def test_a_heartbeat_that_stands_still_shows(host: Host) -> None:
    """Two samples a second apart tell. A sick device is no failure of `list`."""
    host.node.add("n150")[0].freeze()
    host.node.add("n150")
    answer = host.run_anew("list", "--json")
    sick, well = answer.rows
    assert (sick["healthy"], well["healthy"], well["reason"]) == (False, True, None)
    assert "heartbeat stalled" in sick["reason"] and answer.status == 0


def test_a_chip_in_reset_shows(host: Host) -> None:
    """In the table the reason is in words, and nothing is measured."""
    host.node.add("n150")[0].reset()
    (row,) = host.run("list").table[1:]
    assert row[-4:-1] == ["-", "-", "UNHEALTHY: resetting (no telemetry)"]


def test_a_read_that_blocks_shows_and_does_not_keep_the_program(host: Host) -> None:
    """It ends after the two seconds that a read has, though a thread is stuck."""
    host.node.add("n150")[0].block()
    host.node.add("n150")
    stuck, well = host.run_anew("list", "--json").rows
    assert (stuck["healthy"], well["healthy"]) == (False, True)
    assert "does not return" in stuck["reason"]


def test_a_wrong_node_is_told_on_stderr(mixed: Host) -> None:
    """It is not listed, one line says why, and what a program reads is JSON all the same."""
    mixed.node.chips[0].device_node.unlink()
    answer = mixed.run("list", "--json")
    assert [row["index"] for row in answer.rows] == [1, 2, 3]
    (line,) = answer.err.splitlines()
    assert "not listed" in line and f"{mixed.node.root}/dev/tenstorrent/0" in line


def test_a_device_that_goes_meanwhile_shows(host: Host) -> None:
    """Between the two samples: it has no path any more, and the reason says that it is gone."""
    (chip,) = host.node.add("n150")
    chip.block()
    with host.running("list", "--json") as process:
        wait_for_reader(chip.attribute("tt_heartbeat"))
        chip.vanish()
        (row,) = ended(process).rows
    shown = (row["bdf"], row["path"], row["healthy"], row["card"])
    assert shown == (chip.bdf, None, False, "n150")
    assert "gone" in row["reason"]
