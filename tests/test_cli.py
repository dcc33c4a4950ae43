"""The command line, from outside: the program as a process, on simulated nodes, with all that it prints."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import (
    PATIENCE,
    ROOT,
    SIMULATION,
    environment,
    finished,
    outlet_flags,
    wait_until,
    workspace,
)

PROGRAM = [sys.executable, str(ROOT / "ttdp.py")]
KEYS = ["id", "index", "path", "bdf", "card", "board", "arch", "serial", "asic_id", "numa_node", "firmware", "healthy",
        "reason", "resource", "replicas", "pods", "processes"]  # fmt: skip

# Root may write everywhere; without this capability it is told apart from a directory that it cannot write to.
AS_OTHERS = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@dataclass
class Answer:
    """What one run of the program gave, and the node that it was about."""

    node: SimulatedNode
    status: int
    out: str
    err: str
    seconds: float

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The objects of `list --json`."""
        rows: list[dict[str, Any]] = json.loads(self.out)
        return rows

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """The lines of `check`: level, subject and text."""
        found = [re.fullmatch(r"(ok|warn|FAIL) +(\S+) +(\S.*)", line) for line in self.out.splitlines()]
        assert all(found)
        return [(line[1], line[2], line[3]) for line in found if line]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return finished([*PROGRAM, *words])


# -- scenes: each is a node and a command; all of them run side by side, since each takes a second by design -----------

Scene = Callable[[SimulatedNode], list[str]]
SCENES: dict[str, Scene] = {}


def scene(arrange: Scene) -> Scene:
    SCENES[arrange.__name__] = arrange
    return arrange


def plugins(node: SimulatedNode) -> Path:
    """The node's device plugin directory."""
    return node.root / "dp"


def sound(node: SimulatedNode, card: str = "n150") -> list[str]:
    """A node with one card behind an IOMMU and a kubelet: nothing is wrong with it."""
    node.set_iommu(node.add(card)[0].bdf)
    plugins(node).mkdir()
    kubelet = HELD.enter_context(socket.socket(socket.AF_UNIX))
    kubelet.bind(str(plugins(node) / "kubelet.sock"))
    kubelet.listen()
    return ["check"]


HELD = contextlib.ExitStack()  # what has to stay open while the program looks


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Answer]]:
    """What the program says of each scene."""
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(workspace())
        stack.callback(HELD.close)
        with ThreadPoolExecutor(12) as pool:
            runs = {name: pool.submit(_play, top / str(n), SCENES[name]) for n, name in enumerate(SCENES)}
        yield {name: answer.result() for name, answer in runs.items()}


def _play(root: Path, arrange: Scene) -> Answer:
    root.mkdir()
    driver = {"old_driver": "2.5.0", "driver_of_yore": "1.34"}.get(arrange.__name__, "2.10.1-pre")
    node = SimulatedNode(root, driver=driver, nodes="link")
    words = arrange(node)
    program = SIMULATION if arrange in (resetting, listed_resetting) else PROGRAM  # attributes fail with an errno
    program = [*AS_OTHERS, *program] if arrange in (unwritable, forbidden) else program
    began = time.monotonic()
    with Ticker(node, 0.2):
        words = [*words, *node.flags, f"--device-plugin-dir={plugins(node)}", *outlet_flags(root)]
        ended = finished([*program, *words])
    return Answer(node, ended.returncode, ended.stdout, ended.stderr, time.monotonic() - began)


# -- check -------------------------------------------------------------------------------------------------------------


@scene
def in_order(node: SimulatedNode) -> list[str]:
    return sound(node)


def test_check_finds_a_sound_node_in_order(answers: dict[str, Answer]) -> None:
    """Configuration, driver, the device by its address, hugepages, the kubelet's directory and socket: ok, status 0."""
    answer = answers["in_order"]
    assert [(level, subject) for level, subject, _ in answer.findings] == [
        ("ok", "configuration"), ("ok", "driver"), ("ok", "0000:01:00.0"), ("ok", "hugepages"), ("ok", "kubelet"),
        ("ok", "kubelet"),
    ]  # fmt: skip
    assert "2.10.1-pre" in answer.out
    assert (answer.status, answer.err) == (0, "")


@scene
def bad_configuration(node: SimulatedNode) -> list[str]:
    return [*sound(node), "--log-level=loud"]


@scene
def no_driver(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.unload_driver()
    return words


@scene
def stalled(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.chips[0].freeze()
    return words


@scene
def resetting(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.chips[0].reset()
    return words


@scene
def wrong_node(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.chips[0].device_node.unlink()
    node.chips[0].device_node.touch()
    return words


@scene
def unwritable(node: SimulatedNode) -> list[str]:
    words = sound(node)
    plugins(node).chmod(0o555)
    HELD.callback(plugins(node).chmod, 0o755)
    return words


@scene
def no_device(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.chips[0].vanish()
    return words


@scene
def no_hugepages(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.add("n150")
    return words


@scene
def identity_iommu(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.set_iommu("0000:01:00.0", "identity")
    return words


@scene
def too_few_hugepages(node: SimulatedNode) -> list[str]:
    words = no_hugepages(node)
    mount_hugepages(node, 3)
    return words


@scene
def unmounted_hugepages(node: SimulatedNode) -> list[str]:
    words = no_hugepages(node)
    mount_hugepages(node, 4)
    (node.root / "proc/mounts").chmod(0o644)
    (node.root / "proc/mounts").write_text("proc /proc proc rw 0 0\n")
    return words


def mount_hugepages(node: SimulatedNode, count: int, other_mounts: int = 0) -> None:
    """Pages, and their mount under the node's own /dev, after so many others."""
    node.set_hugepages(count)
    lines = [f"overlay /run/containerd/rootfs/{n:064x} overlay rw,relatime 0 0\n" for n in range(other_mounts)]
    mounts = node.root / "proc/mounts"
    mounts.unlink()
    mounts.write_text("".join([*lines, f"hugetlbfs {node.root}/dev/hugepages-1G hugetlbfs rw,pagesize=1024M 0 0\n"]))


@scene
def no_kubelet(node: SimulatedNode) -> list[str]:
    words = sound(node)
    (plugins(node) / "kubelet.sock").unlink()
    return words


@scene
def dead_kubelet(node: SimulatedNode) -> list[str]:
    words = sound(node)
    (plugins(node) / "kubelet.sock").unlink()
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(plugins(node) / "kubelet.sock"))
    return words


@scene
def no_directory(node: SimulatedNode) -> list[str]:
    words = sound(node)
    shutil.rmtree(plugins(node))
    return words


@scene
def closed_node(node: SimulatedNode) -> list[str]:
    """A device node that is not for everybody: a terminal's, which any user can have."""
    words = sound(node)
    ends = pty.openpty()
    for descriptor in ends:
        HELD.callback(os.close, descriptor)
    terminal = os.ttyname(ends[1])
    status = os.stat(terminal)
    node.chips[0].device_node.unlink()
    node.chips[0].device_node.symlink_to(terminal)
    node.chips[0].write("dev", f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}\n".encode())
    return words


@scene
def old_driver(node: SimulatedNode) -> list[str]:
    return sound(node)


@scene
def driver_of_yore(node: SimulatedNode) -> list[str]:
    return sound(node)


@pytest.mark.parametrize(
    ("name", "level", "subject", "words"),
    [
        (bad_configuration, "FAIL", "configuration", ["--log-level", "'loud'", "debug, info, warning or error"]),
        (no_driver, "FAIL", "driver", ["modprobe tenstorrent"]),
        (stalled, "FAIL", "0000:01:00.0", ["n150", "heartbeat stalled", "tt-smi -r"]),
        (resetting, "FAIL", "0000:01:00.0", ["resetting"]),
        (wrong_node, "FAIL", "devices", ["/dev/tenstorrent/0", "not a character device"]),
        (unwritable, "FAIL", "kubelet", ["/dp cannot be written"]),
        (no_device, "warn", "devices", ["lspci -d 1e52:"]),
        (no_hugepages, "warn", "hugepages", ["0 of 1 GiB", "1 Wormhole", "hugepages=4"]),
        (identity_iommu, "warn", "hugepages", ["0 of 1 GiB"]),
        (too_few_hugepages, "warn", "hugepages", ["3 of 1 GiB"]),
        (unmounted_hugepages, "warn", "hugepages", ["/dev/hugepages-1G is not mounted"]),
        (no_kubelet, "warn", "kubelet", ["kubelet.sock"]),
        (dead_kubelet, "warn", "kubelet", ["kubelet.sock"]),
        (no_directory, "warn", "kubelet", ["/dp is not there"]),
        (closed_node, "warn", "0000:01:00.0", ["has mode 06", "not 0666", "udev rules"]),
        (old_driver, "warn", "driver", ["2.5.0", "2.7"]),
        (driver_of_yore, "warn", "driver", ["1.34", "2.7"]),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_check_names_what_is_not_in_order(
    answers: dict[str, Answer], name: Scene, level: str, subject: str, words: list[str]
) -> None:
    """One line with its level, and what to do; status 1 for a FAIL only; everything else is as it was."""
    answer = answers[name.__name__]
    (line,) = [text for found, about, text in answer.findings if (found, about) == (level, subject)]
    assert all(word in line for word in words)
    assert answer.status == (1 if level == "FAIL" else 0)
    others = [found for found in answer.findings if found[0] != "ok" and found[2] != line]
    if name is no_driver:
        assert [found[:2] for found in others] == [("warn", "devices")]
    elif name is not bad_configuration:  # which leaves the defaults, and so this machine, to be looked at
        assert others == []


@scene
def unbound(node: SimulatedNode) -> list[str]:
    words = sound(node)
    node.add("p150a")[0].unbind()
    return words


@scene
def forbidden(node: SimulatedNode) -> list[str]:
    words = sound(node)
    plugins(node).chmod(0)
    return words


def test_check_says_what_it_may_not_see_and_what_has_no_driver(answers: dict[str, Answer]) -> None:
    """A function on the bus that nobody is bound to; a directory that an ordinary user may not look into."""
    (finding,) = [found for found in answers["unbound"].findings if found[0] != "ok"]
    assert finding[:2] == ("warn", "0000:02:00.0") and "no driver is bound" in finding[2]
    (finding,) = [found for found in answers["forbidden"].findings if found[0] != "ok"]
    assert finding[:2] == ("warn", "kubelet") and "you may not look there; run as root" in finding[2]


@scene
def config_only(node: SimulatedNode) -> list[str]:
    return ["check", "--config-only"]


@scene
def bad_config_only(node: SimulatedNode) -> list[str]:
    return ["check", "--config-only", "--log-level=loud"]


def test_check_of_the_configuration_alone_looks_at_nothing_else(answers: dict[str, Answer]) -> None:
    """One line, at once, for `systemctl reload` and the package: status 1 if it could not be used."""
    good, bad = answers["config_only"], answers["bad_config_only"]
    assert good.findings == [("ok", "configuration", "valid")] and good.status == 0
    ((level, subject, text),) = bad.findings
    assert (level, subject, bad.status) == ("FAIL", "configuration", 1) and "--log-level: 'loud'" in text


@scene
def enough_hugepages(node: SimulatedNode) -> list[str]:
    words = no_hugepages(node)
    mount_hugepages(node, 4)
    return words


@scene
def many_mounts(node: SimulatedNode) -> list[str]:
    words = no_hugepages(node)
    mount_hugepages(node, 4, other_mounts=500)
    return words


@scene
def blackhole(node: SimulatedNode) -> list[str]:
    words = sound(node, "p150a")
    node.add("p150a")
    return words


@pytest.mark.parametrize("name", [enough_hugepages, many_mounts, blackhole], ids=lambda part: part.__name__)
def test_check_is_content_with_hugepages_where_they_are_not_missing(answers: dict[str, Answer], name: Scene) -> None:
    """Mounted, on a node with many pods' mounts too; and a Blackhole needs none."""
    answer = answers[name.__name__]
    assert [level for level, subject, _ in answer.findings if subject == "hugepages"] == ["ok"]
    assert answer.status == 0


# -- list --------------------------------------------------------------------------------------------------------------


def mixed(node: SimulatedNode) -> None:
    """An n150 on NUMA node 1, a p300c, and an n300 whose firmware says nothing."""
    node.add("n150", numa_node=1, serial="0100018511732048", asic_id="3B1D7A5620E41F08")
    node.add("p300c", bdf="0000:41:00.0", serial="0000046131842007", asic_id="5D8801E2B3C42B01")
    node.add("n300", bdf="0000:81:00.0", firmware=False)


@scene
def listed(node: SimulatedNode) -> list[str]:
    mixed(node)
    return ["list"]


@scene
def listed_as_json(node: SimulatedNode) -> list[str]:
    mixed(node)
    return ["--json", "list"]


@scene
def listed_otherwise(node: SimulatedNode) -> list[str]:
    mixed(node)
    return ["list", "--json", "--device-id-strategy=asic", "--resource-naming=card", "--resource-domain=example.org"]


def table(answer: Answer) -> list[list[str]]:
    """The cells, the heading's first."""
    return [re.split(r"  +", line) for line in answer.out.splitlines()]


def test_list_is_a_row_for_each_chip(answers: dict[str, Answer]) -> None:
    """In 100 columns: its node's number, address, card, serial, NUMA node, firmware, resource, users and health."""
    answer = answers["listed"]
    header, *rows = table(answer)
    assert header == ["N", "ADDRESS", "CARD", "SERIAL", "NUMA", "FIRMWARE", "RESOURCE", "USED BY", "HEALTH"]
    assert rows[0] == ["0", "0000:01:00.0", "n150", "0100018511732048", "1", "19.4.0.0", "n150", "?", "healthy"]
    assert [row[1] for row in rows] == ["0000:01:00.0", "0000:41:00.0", "0000:42:00.0", "0000:81:00.0"]
    assert rows[3] == ["3", "0000:81:00.0", "n300", "-", "-", "-", "n300", "?", "healthy"]
    assert max(map(len, answer.out.splitlines())) <= 100
    assert (answer.status, answer.err) == (0, "")


@scene
def listed_boards(node: SimulatedNode) -> list[str]:
    mixed(node)
    node.add("p300c", bdf="0000:91:00.0", firmware=False)
    return ["list", "--unit=board"]


def test_list_shows_an_id_that_is_no_address_and_who_waits_for_one(answers: dict[str, Answer]) -> None:
    """A board's serial for both of its chips; a chip whose board is not known yet says so."""
    header, *rows = table(answers["listed_boards"])
    assert header[:3] == ["N", "ADDRESS", "ID"]
    assert [row[2] for row in rows] == ["0000:01:00.0", *["0000046131842007"] * 2, "0000:81:00.0", "-", "-"]
    assert rows[1][-3] == "p300-board"
    assert rows[5][-3:] == ["-", "?", "UNHEALTHY: its board is not known yet"]


def hold(node: SimulatedNode, chip: int, pid: int, command: str, cgroup: str) -> None:
    """A process has the chip's node open."""
    process = node.root / f"proc/{pid}"
    process.mkdir()
    (process / "comm").write_text(f"{command}\n")
    (process / "cgroup").write_text(f"0::{cgroup}\n")
    node.chips[chip].set_pids([pid, pid])


@scene
def listed_users(node: SimulatedNode) -> list[str]:
    for _ in range(3):
        node.add("n150")
    hold(node, 0, 4711, "tt-smi", "/user.slice")
    node.chips[1].set_pids([0])  # of another PID namespace
    node.chips[2].set_pids([999])  # has ended
    return ["list", "--json"]


@scene
def listed_users_of_an_old_driver(node: SimulatedNode) -> list[str]:
    node.add("n150")
    shutil.rmtree(node.root / "proc/driver/tenstorrent")
    return ["list", "--json"]


def test_list_names_the_processes_that_have_a_node_open(answers: dict[str, Answer]) -> None:
    """Each once; null where nobody can know, an empty list where there is none."""
    processes = [row["processes"] for row in answers["listed_users"].rows]
    assert processes == [[{"pid": 4711, "command": "tt-smi", "of_pod": False}], None, []]
    assert [row["processes"] for row in answers["listed_users_of_an_old_driver"].rows] == [None]


def test_list_as_json_has_these_keys_and_values(answers: dict[str, Answer]) -> None:
    """An array of objects, in the order of the addresses; null for what nobody knows."""
    answer = answers["listed_as_json"]
    assert all(list(row) == KEYS for row in answer.rows)
    assert answer.rows[1] == dict(zip(KEYS, [
        "0000:41:00.0", 1, f"{answer.node.root}/dev/tenstorrent/1", "0000:41:00.0", "p300c", "p300", "blackhole",
        "0000046131842007", "5D8801E2B3C42B01", None, "19.4.0.0", True, None, "tenstorrent.com/p300", 0, None, [],
    ], strict=True))  # fmt: skip
    silent = answer.rows[3]
    assert (silent["card"], silent["healthy"], silent["resource"]) == ("n300", True, "tenstorrent.com/n300")
    assert [silent[key] for key in ("serial", "asic_id", "numa_node", "firmware", "reason")] == [None] * 5
    assert [row["numa_node"] for row in answer.rows] == [1, None, None, None]


def test_list_names_devices_and_resources_as_the_options_say(answers: dict[str, Answer]) -> None:
    """The ASIC's ID where it is known, the exact card type, another domain."""
    rows = answers["listed_otherwise"].rows
    assert [row["id"] for row in rows][::3] == ["wormhole-3B1D7A5620E41F08", "0000:81:00.0"]
    assert [row["resource"] for row in rows] == [f"example.org/{card}" for card in ("n150", "p300c", "p300c", "n300")]


@scene
def listed_unknown(node: SimulatedNode) -> list[str]:
    node.add("n150", firmware=False)[0].write("subsystem_device", b"0x0099\n")
    return ["list", "--json"]


def test_list_knows_no_card_where_nobody_does(answers: dict[str, Answer]) -> None:
    """Neither card nor board is guessed; the resource is the architecture."""
    (row,) = answers["listed_unknown"].rows
    assert (row["card"], row["board"], row["arch"], row["resource"]) == (
        None, None, "wormhole", "tenstorrent.com/wormhole",
    )  # fmt: skip


@scene
def listed_stalled(node: SimulatedNode) -> list[str]:
    node.add("n150")[0].freeze()
    node.add("n150")
    return ["list", "--json"]


@scene
def listed_resetting(node: SimulatedNode) -> list[str]:
    node.add("n150")[0].reset()
    return ["list"]


@scene
def listed_blocked(node: SimulatedNode) -> list[str]:
    node.add("n150")[0].block()
    node.add("n150")
    return ["list", "--json"]


def test_list_shows_a_heartbeat_that_stands_still(answers: dict[str, Answer]) -> None:
    """Two samples a second apart tell; the chip beside it is healthy. A sick device is no failure of `list`."""
    answer = answers["listed_stalled"]
    sick, well = answer.rows
    assert (sick["healthy"], well["healthy"], well["reason"]) == (False, True, None)
    assert "heartbeat stalled" in sick["reason"]
    assert answer.status == 0


def test_list_shows_a_chip_in_reset(answers: dict[str, Answer]) -> None:
    """In the table the reason is in words."""
    assert "UNHEALTHY: resetting" in answers["listed_resetting"].out.splitlines()[1]


def test_list_shows_a_read_that_blocks_and_ends_all_the_same(answers: dict[str, Answer]) -> None:
    """After the two seconds that a read has; the thread that is stuck does not keep the program from its end."""
    answer = answers["listed_blocked"]
    stuck, well = answer.rows
    assert (stuck["healthy"], well["healthy"]) == (False, True)
    assert "does not return" in stuck["reason"]
    # Two seconds more than one that does not block, and what a busy machine makes of both.
    assert answer.seconds < 4 + 2 * answers["listed_stalled"].seconds


@scene
def listed_nothing(node: SimulatedNode) -> list[str]:
    return ["list"]


@scene
def listed_nothing_as_json(node: SimulatedNode) -> list[str]:
    node.unload_driver()
    return ["list", "--json"]


def test_list_of_nothing(answers: dict[str, Answer]) -> None:
    """No device is no error: a sentence for people, an empty array for programs, without a driver too."""
    assert answers["listed_nothing"].out == "no Tenstorrent device on this node\n"
    assert answers["listed_nothing_as_json"].rows == []
    assert answers["listed_nothing"].status == answers["listed_nothing_as_json"].status == 0


@scene
def listed_oddity(node: SimulatedNode) -> list[str]:
    mixed(node)
    node.chips[0].device_node.unlink()
    return ["list", "--json"]


def test_list_tells_of_a_wrong_node_on_stderr(answers: dict[str, Answer]) -> None:
    """It is not listed, one line says why, and what a program reads is JSON all the same."""
    answer = answers["listed_oddity"]
    assert [row["index"] for row in answer.rows] == [1, 2, 3]
    (line,) = answer.err.splitlines()
    assert "not listed" in line and f"{answer.node.root}/dev/tenstorrent/0" in line


def test_list_shows_a_device_that_goes_while_it_looks(short_tmp: Path) -> None:
    """Between the two samples: it has no path any more, and the reason says that it is gone."""
    node = SimulatedNode(short_tmp / "node")
    (chip,) = node.add("n150")
    chip.block()
    fifo = chip.attribute("tt_heartbeat")
    with subprocess.Popen(
        [*PROGRAM, "list", "--json", *node.flags], env=environment(), stdout=subprocess.PIPE
    ) as process:
        wait_until(lambda: has_reader(fifo), "a reader of the heartbeat")
        chip.vanish()
        out, _ = process.communicate(timeout=PATIENCE)
    (row,) = json.loads(out)
    assert (row["bdf"], row["path"], row["healthy"], row["card"]) == (chip.bdf, None, False, "n150")
    assert "gone" in row["reason"]


def has_reader(fifo: Path) -> bool:
    """Whether somebody waits for what is in a FIFO."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_a_reader_that_has_gone_is_no_error(short_tmp: Path) -> None:
    """`list | head -1` may close the pipe before all is written: nothing to complain about."""
    node = SimulatedNode(short_tmp / "node")
    node.add("n150")
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [*PROGRAM, "list", *node.flags], env=environment(), stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=PATIENCE)
    assert err == b"" and process.returncode in (0, -signal.SIGPIPE)


# -- words -------------------------------------------------------------------------------------------------------------


def test_version_is_one_line() -> None:
    """The program's name and its version, on stdout."""
    ended = run("--version")
    assert (ended.stdout, ended.returncode) == (f"tt-device-plugin {ttdp.__version__}\n", 0)


def test_help_mentions_every_command_flag_variable_and_default() -> None:
    """What can be set is in the help, and so are the sections that only the file has."""
    text = " ".join(run("--help").stdout.split())
    for option in ttdp.OPTIONS:
        default = getattr(ttdp.Settings(), option.key)
        assert option.flag in text and f"[{option.variable}]" in text
        assert f"default {str(default).lower() if option.is_switch else default}" in text
    for word in ("run", "list", "check", "--json", "--version", "--config-file", "TTDP_CONFIG_FILE",
                 "/etc/tt-device-plugin/config.toml", "interval", "temperature_limit", "heartbeat_misses",
                 "trip_holdoff", "[[mounts]]"):  # fmt: skip
        assert word in text


@pytest.mark.parametrize("words", [["--json"], ["check", "--json"], ["list", "run"], ["--config-only"]])
def test_words_that_do_not_go_together_are_a_usage_error(words: list[str]) -> None:
    """Status 2 and the usage, before anything is looked at."""
    ended = run(*words)
    assert ended.returncode == 2 and ended.stderr.startswith("usage: tt-device-plugin [run|list|check]")


# -- log lines ---------------------------------------------------------------------------------------------------------

TALK = """
import logging, os, ttdp
ttdp.set_up_logging(os.environ, timestamps=True)
ttdp.log.setLevel("DEBUG")
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    ttdp.log.log(level, "said")
with ttdp.surviving("a test"):
    raise RuntimeError("first line\\nsecond line")
"""


def talk(err: Path, stream: Callable[[os.stat_result], str]) -> list[str]:
    """The lines of a process that logs at each level and has an error, with a JOURNAL_STREAM made of its stderr."""
    with err.open("w") as file:
        variable = {"JOURNAL_STREAM": stream(os.fstat(file.fileno()))}
        finished([sys.executable, "-c", TALK], variable, stderr=file)
    return err.read_text().splitlines()


def test_lines_for_the_journal_have_a_priority(tmp_path: Path) -> None:
    """When stderr is the journal's stream, each line begins with its syslog level, each line of a traceback too."""
    lines = talk(tmp_path / "err", lambda status: f"{status.st_dev}:{status.st_ino}")
    assert lines[:4] == ["<7>said", "<6>said", "<4>said", "<3>said"]
    traceback = lines[4:]
    assert "a test" in traceback[0] and traceback[-1] == "<3>second line" and len(traceback) > 4
    assert all(line.startswith("<3>") for line in traceback)


@pytest.mark.parametrize("stream", [lambda s: f"{s.st_dev}:{s.st_ino + 1}", lambda s: "garbage"])
def test_lines_for_a_terminal_have_a_time_and_a_level(tmp_path: Path, stream: Any) -> None:
    """A stderr that was redirected since is not the journal, whatever JOURNAL_STREAM says."""
    lines = talk(tmp_path / "err", stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG +said", lines[0])
    assert not any(line.startswith("<") for line in lines)
