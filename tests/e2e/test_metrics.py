"""What Prometheus' own programs make of the metrics, the alerts and the queries that go with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttdp
from tests.e2e.machine import JSON, Machine
from tests.e2e.node import Program
from tests.e2e.readers import Alone, promtool
from tests.world.processes import ROOT, wait_until

RULES = ROOT / "packaging/deb/tt-device-plugin.rules.yml"
TEXTFILES = "/var/lib/prometheus/node-exporter"
FILE = f"{TEXTFILES}/tt-device-plugin.prom"
PORT = 9100


# --- The text ---------------------------------------------------------------------------------------------------------


class MetricsHost(Alone):
    """With an n300, a p300c (two chips), and Debian's node_exporter."""

    def scrape(self) -> str:
        """What Prometheus would get."""
        with self.machine.connect(PORT) as connection:
            connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: node\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = answer.decode().partition("\r\n\r\n")
        assert " 200 " in head.splitlines()[0]
        return body

    def wait_scraped(self, *lines: str) -> None:
        wait_until(lambda: {*lines} <= {*self.scrape().splitlines()}, f"a scrape with {lines}", 30)


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        machine.path(TEXTFILES).mkdir(parents=True)
        only = ["--collector.disable-defaults", "--collector.textfile", f"--collector.textfile.directory={TEXTFILES}"]
        machine.spawn(
            ["prometheus-node-exporter", *only, f"--web.listen-address=127.0.0.1:{PORT}"],
            machine.logs / "node-exporter.log",
        )
        yield machine


@pytest.fixture
def host(machine: Machine, program: Program) -> Iterator[MetricsHost]:
    machine.path(FILE).unlink(missing_ok=True)
    with MetricsHost(machine, program) as host:
        host.cards.add("n300")
        host.cards.add("p300c")
        host.start()
        yield host


def test_promtool_has_no_objection(host: MetricsHost) -> None:
    """`promtool check metrics` accepts the text and has no remark on a name, a unit or a help text."""
    file = host.machine.path(FILE)
    wait_until(file.exists, "the file", 20)
    done = promtool("check", "metrics", text=file.read_text())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_promtool_objects(host: MetricsHost) -> None:
    """It would: a counter that is not called so, and a metric without help."""
    assert "no help text" in promtool("check", "metrics", text="# TYPE a gauge\na 1\n").stderr
    wrong = "# HELP a_total What.\n# TYPE a_total gauge\na_total 1\n"
    assert "should not" in promtool("check", "metrics", text=wrong).stderr


def test_node_exporter_shows_them(host: MetricsHost) -> None:
    """Debian's node_exporter shows the whole file as it is, beside the time at which it was written."""
    healthy = [f'tt_device_healthy{{device="{chip.bdf}"}} 1' for chip in host.cards.chips]
    host.wait_scraped(*healthy, "node_textfile_scrape_error 0")
    names = {re.split("[ {]", line)[0] for line in host.machine.path(FILE).read_text().splitlines() if line[0] != "#"}
    shown = host.scrape()
    assert names == {re.split("[ {]", line)[0] for line in shown.splitlines() if line.startswith("tt_")}
    assert f'node_textfile_mtime_seconds{{file="{FILE}"}}' in shown


def test_a_daemon_that_lives_writes(host: MetricsHost) -> None:
    """The file is written again and again, though nothing changes: its age tells whether a daemon is at work."""
    file = host.machine.path(FILE)
    wait_until(file.exists, "the file", 20)
    text, first = file.read_text(), file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns > first, "another one", 60)
    assert file.read_text() == text


def test_a_fault_is_shown(host: MetricsHost) -> None:
    """A chip that dies is shown with the kind of its fault, and no longer when it lives again."""
    chip = host.cards.chips[0]
    fault = f'tt_device_fault{{device="{chip.bdf}",kind="no_response"}} 1'
    host.wait_scraped(f'tt_device_healthy{{device="{chip.bdf}"}} 1')
    chip.die()
    host.wait_scraped(f'tt_device_healthy{{device="{chip.bdf}"}} 0', fault)
    chip.revive()
    host.wait_scraped(f'tt_device_healthy{{device="{chip.bdf}"}} 1')
    assert "tt_device_fault" not in re.sub("(?m)^#.*", "", host.scrape())


# --- Alerts -----------------------------------------------------------------------------------------------------------

ALERTS = {
    # kind of the fault: its alert, and the minutes for which it has to last
    "gone": ("TenstorrentDeviceGone", 2),
    "node": ("TenstorrentDeviceNode", 2),
    "blocked": ("TenstorrentDeviceBlocked", 2),
    "resetting": ("TenstorrentDeviceResetting", 5),
    "read_error": ("TenstorrentDeviceUnreadable", 2),
    "no_response": ("TenstorrentDeviceNoResponse", 1),
    "stalled": ("TenstorrentDeviceStalled", 1),
    "hot": ("TenstorrentDeviceHot", 2),
    "tripped": ("TenstorrentDeviceTripped", 0),
}
NO_HAND: set[str] = set()
"""Kinds that end by themselves; if one does not, TenstorrentDeviceUnhealthy says so."""
WHERE = {"instance": "node-1", "job": "node"}


def labelled(name: str, **labels: str) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


def device(**labels: str) -> str:
    """What Prometheus keeps of a device: its tt_device_info."""
    identity = {"device": "0000:03:00.0", "board": "n300", "card": "n300", "serial": "0100014511111111"}
    return labelled("tt_device_info", **(WHERE | identity | labels))


def series(values: dict[str, str]) -> list[JSON]:
    return [{"series": name, "values": text} for name, text in values.items()]


def unit_test(tmp_path: Path, values: dict[str, str], **tests: list[JSON]) -> None:
    """promtool's unit test of the rules: with these series, a value a minute, the tests have to hold."""
    file = tmp_path / "test.yml"
    case = {"interval": "1m", "input_series": series(values), **tests}
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def firing(minute: int, *alerts: str) -> JSON:
    """That at this minute these alerts fire, each once, and no others."""
    samples = [{"labels": labelled("", alert=name), "value": 1} for name in alerts]
    return {
        "expr": 'count by (alert) (label_replace(ALERTS{alertstate="firing"}, "alert", "$1", "alertname", "(.*)"))',
        "eval_time": f"{minute}m",
        "exp_samples": samples,
    }


def test_rules_are_valid() -> None:
    """promtool takes the file, and its texts use no label that is not there."""
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    assert {*re.findall(r"\$labels\.(\w+)", RULES.read_text())} <= {"instance", "device", "card", "serial", "resource"}


def test_every_fault_has_an_alert() -> None:
    """No kind of fault that the program knows is without one, and no alert is of a kind that it does not know."""
    assert {fault.name.lower() for fault in ttdp.Fault} == ALERTS.keys() | NO_HAND
    assert {*re.findall(r'kind="(\w+)"', RULES.read_text())} == ALERTS.keys()


@pytest.mark.parametrize("kind", ALERTS)
def test_a_fault_fires_its_alert(tmp_path: Path, kind: str) -> None:
    """Once it has lasted, until it ends, and no other's; after ten minutes there is the one for any fault, too."""
    alert, minutes = ALERTS[kind]
    fault = labelled("tt_device_fault", device="0000:03:00.0", kind=kind, **WHERE)
    healthy = labelled("tt_device_healthy", device="0000:03:00.0", **WHERE)
    values = {fault: "_ 1x15 stale", healthy: "1 0x15 1x5", device(): "1x21"}
    before = [firing(minutes)] if minutes else []
    after = [firing(minutes + 1, alert), firing(11, alert, "TenstorrentDeviceUnhealthy"), firing(18)]
    unit_test(tmp_path, values, promql_expr_test=[firing(0), *before, *after])


def test_an_alert_says_which_card(tmp_path: Path) -> None:
    """Whoever goes to the rack knows the host, the slot, the card's type and the board's serial number."""
    fault = labelled("tt_device_fault", device="0000:03:00.0", kind="no_response", **WHERE)
    labels = WHERE | {"device": "0000:03:00.0", "kind": "no_response", "card": "n300", "serial": "0100014511111111"}
    expected = {
        "exp_labels": labels | {"severity": "critical"},
        "exp_annotations": {
            "summary": "n300 at 0000:03:00.0 on node-1 is dead; board 0100014511111111",
            "action": "Reset it: tt-smi -r. If it stays so, switch the host off and on again.",
        },
    }
    rule = {"eval_time": "3m", "alertname": "TenstorrentDeviceNoResponse", "exp_alerts": [expected]}
    unit_test(tmp_path, {fault: "1x5", device(): "1x5"}, alert_rule_test=[rule])


def test_the_daemon_fires_alerts(tmp_path: Path) -> None:
    """A kubelet that has not taken a resource fires one, and so does a daemon that writes no longer."""
    registered = labelled("tt_kubelet_registered", resource="tenstorrent.com/n300", **WHERE)
    refused = firing(6, "TenstorrentResourceNotRegistered")
    unit_test(tmp_path, {registered: "1 0x9 1"}, promql_expr_test=[firing(5), refused, firing(11)])
    written = labelled("node_textfile_mtime_seconds", file=FILE, **WHERE)
    others = labelled("node_textfile_mtime_seconds", file="/var/lib/prometheus/node-exporter/apt.prom", **WHERE)
    values = {written: "0+60x10 600x10", others: "0x20"}
    unit_test(tmp_path, values, promql_expr_test=[firing(10), firing(15), firing(16, "TenstorrentPluginSilent")])


def test_a_healthy_cluster_fires_none(tmp_path: Path) -> None:
    """Devices that are well, in use or not, fire nothing in an hour."""
    values = {
        device(): "1x60",
        labelled("tt_device_healthy", device="0000:03:00.0", **WHERE): "1x60",
        labelled("tt_device_allocated", device="0000:03:00.0", pod="a", **WHERE): "1x60",
        labelled("tt_kubelet_registered", resource="tenstorrent.com/n300", **WHERE): "1x60",
        labelled("node_textfile_mtime_seconds", file=FILE, **WHERE): "0+60x60",
    }
    unit_test(tmp_path, values, promql_expr_test=[firing(minute) for minute in (1, 30, 60)])


# --- Queries ----------------------------------------------------------------------------------------------------------

FREE = """
count by (board) (
  tt_device_info and on (instance, device) tt_device_healthy == 1 unless on (instance, device) tt_device_allocated
)
"""
UNHEALTHY = "max_over_time(tt_device_healthy[10m]) == 0"
HOTTEST = "topk(1, tt_device_temperature_celsius) * on (instance, device) group_right () tt_device_allocated"


def test_queries(tmp_path: Path) -> None:
    """Free devices by board across a cluster; a chip that is unhealthy for ten minutes; who holds the hottest chip."""
    values: dict[str, str] = {}
    nodes = [("node-1", "n300"), ("node-1", "n300"), ("node-1", "p150"), ("node-2", "n300"), ("node-2", "p150")]
    slots = [{"device": f"0000:0{n}:00.0", "instance": instance} for n, (instance, _) in enumerate(nodes)]
    for number, (slot, (_, board)) in enumerate(zip(slots, nodes, strict=True)):
        values[device(board=board, **slot)] = "1x30"
        values[labelled("tt_device_healthy", **slot)] = "1x15 0x15" if number == 3 else "1x30"
        values[labelled("tt_device_temperature_celsius", **slot)] = f"{50 + number}x30"
    holders = [{"namespace": "default", "pod": f"pod-{n}", "container": "main"} | slot for n, slot in enumerate(slots)]
    held = [labelled("tt_device_allocated", **holder) for holder in holders]
    values |= {held[0]: "1x30", held[2]: "1x30", held[4]: "_x20 1x10"}
    ill = {"labels": labelled("", **slots[3]), "value": 0}
    hottest = {"labels": labelled("", **holders[4]), "value": 54}

    def free(**boards: int) -> list[JSON]:
        return [{"labels": labelled("", board=board), "value": count} for board, count in boards.items()]

    tests: list[JSON] = [
        {"expr": FREE, "eval_time": "10m", "exp_samples": free(n300=2, p150=1)},
        {"expr": FREE, "eval_time": "25m", "exp_samples": free(n300=1)},
        {"expr": UNHEALTHY, "eval_time": "24m", "exp_samples": []},
        {"expr": UNHEALTHY, "eval_time": "27m", "exp_samples": [ill]},
        {"expr": HOTTEST, "eval_time": "10m", "exp_samples": []},  # nobody does
        {"expr": HOTTEST, "eval_time": "25m", "exp_samples": [hottest]},
    ]
    unit_test(tmp_path, values, promql_expr_test=tests)
