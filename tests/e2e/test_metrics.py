"""What Prometheus' own programs make of the metrics, the alerts and README's queries."""

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


# -- The text --------------------------------------------------------------------------------------


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
        only = [
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={TEXTFILES}",
        ]
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
    """`promtool check metrics` has no remark on a name, a unit or a help text."""
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
    """Debian's node_exporter shows the whole file as it is, beside the time at which it was
    written.
    """
    healthy = [f'tt_device_healthy{{device="{chip.bdf}"}} 1' for chip in host.cards.chips]
    host.wait_scraped(*healthy, "node_textfile_scrape_error 0")
    names = {
        re.split("[ {]", line)[0]
        for line in host.machine.path(FILE).read_text().splitlines()
        if line[0] != "#"
    }
    shown = host.scrape()
    assert names == {
        re.split("[ {]", line)[0] for line in shown.splitlines() if line.startswith("tt_")
    }
    assert f'node_textfile_mtime_seconds{{file="{FILE}"}}' in shown


def test_a_daemon_that_lives_writes(host: MetricsHost) -> None:
    """The file is written again and again, though nothing changes: its age tells whether a daemon
    is at work.
    """
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


# -- Alerts ----------------------------------------------------------------------------------------

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
    "silent": ("TenstorrentDeviceSilent", 2),
    "tripped": ("TenstorrentDeviceTripped", 0),
}
WHERE = {"instance": "node-1", "job": "node"}


def labelled(name: str, **labels: str) -> str:
    return f"{name}{{{','.join(f'{key}={json.dumps(value)}' for key, value in labels.items())}}}"


def device(**labels: str) -> str:
    """What Prometheus keeps of a device: its tt_device_info."""
    identity = {
        "device": "0000:03:00.0",
        "board": "n300",
        "card": "n300",
        "serial": "0100014511111111",
    }
    return labelled("tt_device_info", **(WHERE | identity | labels))


def series(values: dict[str, str]) -> list[JSON]:
    return [{"series": name, "values": text} for name, text in values.items()]


def unit_test(tmp_path: Path, values: dict[str, str], **tests: list[JSON]) -> None:
    """promtool's unit test of the rules: with these series, a value a minute, the tests have to
    hold.
    """
    file = tmp_path / "test.yml"
    case = {"interval": "1m", "input_series": series(values), **tests}
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]})
    )
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


FIRING = 'label_replace(ALERTS{alertstate="firing"}, "alert", "$1", "alertname", "(.*)")'


def firing(minute: int, *alerts: str) -> JSON:
    """That at this minute these alerts fire, each once, and no others."""
    samples = [{"labels": labelled("", alert=name), "value": 1} for name in alerts]
    return {
        "expr": f"count by (alert) ({FIRING})",
        "eval_time": f"{minute}m",
        "exp_samples": samples,
    }


def test_rules_are_valid() -> None:
    """promtool takes the file, and a reset is always that of one card."""
    done = promtool("check", "rules", str(RULES))
    assert done.returncode == 0, done.stderr
    commands = re.findall(r"(?m)^ +action: .*tt-smi -r(.*)$", RULES.read_text())
    assert len(commands) >= 5
    assert all(rest.startswith(" {{ $labels.device }}") for rest in commands)


def test_every_fault_has_an_alert() -> None:
    """No kind of fault that the program knows is without one, and no alert is of a kind that it
    does not know.
    """
    assert {fault.name.lower() for fault in ttdp.Fault} == ALERTS.keys()
    assert {*re.findall(r'kind="(\w+)"', RULES.read_text())} == ALERTS.keys()


@pytest.mark.parametrize("kind", ALERTS)
def test_a_fault_fires_its_alert(tmp_path: Path, kind: str) -> None:
    """Once it has lasted, until it ends, and no other's; after ten minutes there is the one for any
    fault, too.
    """
    alert, minutes = ALERTS[kind]
    fault = labelled("tt_device_fault", device="0000:03:00.0", kind=kind, **WHERE)
    healthy = labelled("tt_device_healthy", device="0000:03:00.0", **WHERE)
    values = {fault: "_ 1x15 stale", healthy: "1 0x15 1x5", device(): "1x21"}
    before = [firing(minutes)] if minutes else []
    after = [
        firing(minutes + 1, alert),
        firing(11, alert, "TenstorrentDeviceUnhealthy"),
        firing(18),
    ]
    unit_test(tmp_path, values, promql_expr_test=[firing(0), *before, *after])


def test_an_alert_says_which_card(tmp_path: Path) -> None:
    """Whoever goes to the rack knows the host, the slot, the card's type and the board's serial
    number.
    """
    fault = labelled("tt_device_fault", device="0000:03:00.0", kind="no_response", **WHERE)
    labels = WHERE | {
        "device": "0000:03:00.0",
        "kind": "no_response",
        "card": "n300",
        "serial": "0100014511111111",
    }
    expected = {
        "exp_labels": labels | {"severity": "critical"},
        "exp_annotations": {
            "summary": "n300 at 0000:03:00.0 on node-1 is dead; board 0100014511111111",
            "action": "Reset it: tt-smi -r 0000:03:00.0. "
            "If it stays so, switch the host off and on again.",
        },
    }
    rule = {"eval_time": "3m", "alertname": "TenstorrentDeviceNoResponse", "exp_alerts": [expected]}
    unit_test(tmp_path, {fault: "1x5", device(): "1x5"}, alert_rule_test=[rule])


def at(minute: int, *alerts: str) -> list[JSON]:
    return [firing(minute, *alerts)]


def of_device(name: str, **labels: str) -> str:
    """A series of the device."""
    return labelled(name, device="0000:03:00.0", **labels, **WHERE)


def test_a_resource_that_the_kubelet_has_not_taken_fires(tmp_path: Path) -> None:
    """After five minutes, until it has."""
    registered = labelled("tt_kubelet_registered", resource="tenstorrent.com/n300", **WHERE)
    late = at(6, "TenstorrentResourceNotRegistered")
    unit_test(tmp_path, {registered: "1 0x9 1"}, promql_expr_test=at(5) + late + at(11))


def test_a_daemon_that_writes_no_longer_fires(tmp_path: Path) -> None:
    """Its file stays, and grows old; another program's file is none of ours."""
    written = labelled("node_textfile_mtime_seconds", file=FILE, **WHERE)
    others = labelled("node_textfile_mtime_seconds", file=f"{TEXTFILES}/apt.prom", **WHERE)
    values = {written: "0+60x10 600x10", others: "0x20"}
    silent = at(16, "TenstorrentPluginSilent")
    unit_test(tmp_path, values, promql_expr_test=at(10) + at(15) + silent)


def test_a_daemon_that_does_not_answer_fires(tmp_path: Path) -> None:
    """systemd's socket takes the connection, so the scrape fails. Other targets are not ours."""
    other = {"instance": "node-2", "job": "node"}
    values = {
        labelled("up", **WHERE): "1x10 0x10 1x10",
        labelled("tt_plugin_info", version="0.1.0", **WHERE): "1x10 stale _x9 1x10",
        labelled("up", **other): "0x30",
    }
    tests = at(10) + at(13) + at(14, "TenstorrentPluginSilent") + at(22)
    unit_test(tmp_path, values, promql_expr_test=tests)


def test_a_narrow_link_fires(tmp_path: Path) -> None:
    """A link of x4 where x16 could be. A speed that drops at rest is no fault."""
    values = {
        of_device("tt_device_pcie_link_width"): "4x15 16x15",
        of_device("tt_device_pcie_link_width_max"): "16x30",
        of_device("tt_device_pcie_link_transfers_per_second"): "2.5e9x30",
        of_device("tt_device_pcie_link_transfers_per_second_max"): "32e9x30",
    }
    tests = at(9) + at(10, "TenstorrentLinkNarrow") + at(16) + at(30)
    unit_test(tmp_path, values, promql_expr_test=tests)


def test_corrected_errors_that_rise_fast_fire(tmp_path: Path) -> None:
    """Thirty a minute; one a minute is a link's daily life."""
    errors = of_device("tt_device_pcie_errors_total", severity="correctable")
    tests = at(5) + at(25, "TenstorrentLinkErrorsCorrected") + at(60)
    unit_test(tmp_path, {errors: "0+30x30 900x60"}, promql_expr_test=tests)
    unit_test(tmp_path, {errors: "0+1x60"}, promql_expr_test=at(30) + at(60))


@pytest.mark.parametrize("severities", [["nonfatal"], ["fatal"], ["nonfatal", "fatal"]])
def test_any_error_that_is_not_corrected_fires(tmp_path: Path, severities: list[str]) -> None:
    """A single one, for an hour; what has been counted long ago does not. Both kinds: one alert."""
    values = {
        of_device("tt_device_pcie_errors_total", severity=severity): "5x10 6x100"
        for severity in severities
    }
    tests = at(9) + at(12, "TenstorrentLinkErrors") + at(100)
    unit_test(tmp_path, values, promql_expr_test=tests)


HOLDER = {"namespace": "team-a", "pod": "train", "container": "main"}


def work(clock: str, power: str, arch: str = "wormhole") -> dict[str, str]:
    """A device that a pod has, with what its clock and its power do."""
    return {
        device(arch=arch): "1x200",
        of_device("tt_device_allocated", **HOLDER): "1x200",
        of_device("tt_device_clock_hertz", clock="aiclk"): clock,
        of_device("tt_device_power_watts"): power,
        of_device("tt_device_power_limit_watts"): "150x200",
    }


def test_a_device_that_is_held_and_not_used_fires(tmp_path: Path) -> None:
    """Clock and power at rest for an hour, by the architecture's own clock."""
    unused = at(59) + at(61, "TenstorrentDeviceUnused")
    unit_test(tmp_path, work("500e6x100 1e9x100", "16x200"), promql_expr_test=unused + at(110))
    unit_test(tmp_path, work("800e6x200", "24x200", "blackhole"), promql_expr_test=unused)


@pytest.mark.parametrize(
    ("clock", "power"),
    [
        pytest.param("1e9x200", "16x200", id="its clock is up"),
        pytest.param("500e6x200", "100x200", id="it draws power"),
        pytest.param("500e6x50 1e9x1 500e6x50 1e9x1 500e6x50", "16x200", id="now and then"),
    ],
)
def test_a_device_that_is_used_does_not(tmp_path: Path, clock: str, power: str) -> None:
    """Nor does one that nobody has."""
    values = work(clock, power)
    unit_test(tmp_path, values, promql_expr_test=at(61) + at(120))
    values = work("500e6x200", "16x200")
    del values[of_device("tt_device_allocated", **HOLDER)]
    unit_test(tmp_path, values, promql_expr_test=at(61) + at(120))


def test_power_is_summed_up_by_pod(tmp_path: Path) -> None:
    """A pod's two cards; of a card that two pods share each has half."""
    cards = [{"device": f"0000:0{n}:00.0", **WHERE} for n in range(3)]
    pods = [{"namespace": "default", "pod": pod, "container": "main"} for pod in ("one", "two")]
    values = {labelled("tt_device_power_watts", **card): f"{10 * (n + 1)}x9"
              for n, card in enumerate(cards)}  # fmt: skip
    for pod, card in ((0, 0), (0, 1), (0, 2), (1, 2)):
        values[labelled("tt_device_allocated", **pods[pod], **cards[card])] = "1x9"
    record = "namespace_pod:tt_device_power_watts:sum"
    samples = [
        {"labels": labelled(record, namespace="default", pod=pod), "value": watts}
        for pod, watts in (("one", 45), ("two", 15))
    ]
    test = {"expr": record, "eval_time": "5m", "exp_samples": samples}
    unit_test(tmp_path, values, promql_expr_test=[test])


def test_a_healthy_cluster_fires_none(tmp_path: Path) -> None:
    """Devices that are well, at work and at the limit where they throttle: nothing in an hour."""
    values = work("1e9x60", "100x60") | {
        of_device("tt_device_healthy"): "1x60",
        of_device("tt_device_temperature_celsius"): "75x60",
        of_device("tt_device_temperature_limit_celsius"): "75x60",
        of_device("tt_device_pcie_link_width"): "16x60",
        of_device("tt_device_pcie_link_width_max"): "16x60",
        of_device("tt_device_pcie_errors_total", severity="fatal"): "0x60",
        labelled("tt_kubelet_registered", resource="tenstorrent.com/n300", **WHERE): "1x60",
        labelled("node_textfile_mtime_seconds", file=FILE, **WHERE): "0+60x60",
        labelled("up", **WHERE): "1x60",
        labelled("tt_plugin_info", version="0.1.0", **WHERE): "1x60",
    }
    unit_test(tmp_path, values, promql_expr_test=at(1) + at(30) + at(60))


# -- Queries ---------------------------------------------------------------------------------------

FREE = """
count by (board) (
  tt_device_info and on (instance, device) tt_device_healthy == 1 unless on (instance, device)
  tt_device_allocated
)
"""
UNHEALTHY = "max_over_time(tt_device_healthy[10m]) == 0"
HOTTEST = (
    "topk(1, tt_device_temperature_celsius)"
    " * on (instance, device) group_right () tt_device_allocated"
)


def test_queries(tmp_path: Path) -> None:
    """Free devices by board; a chip that is ill for ten minutes; who holds the hottest chip."""
    values: dict[str, str] = {}
    boards = ("n300", "n300", "p150", "n300", "p150")
    instances = ("node-1", "node-1", "node-1", "node-2", "node-2")
    slots = [{"device": f"0000:0{n}:00.0", "instance": each} for n, each in enumerate(instances)]
    for number, (slot, board) in enumerate(zip(slots, boards, strict=True)):
        values[device(board=board, **slot)] = "1x30"
        values[labelled("tt_device_healthy", **slot)] = "1x15 0x15" if number == 3 else "1x30"
        values[labelled("tt_device_temperature_celsius", **slot)] = f"{50 + number}x30"
    holders = [
        {"namespace": "default", "pod": f"pod-{n}", "container": "main"} | slot
        for n, slot in enumerate(slots)
    ]
    held = [labelled("tt_device_allocated", **holder) for holder in holders]
    values |= {held[0]: "1x30", held[2]: "1x30", held[4]: "_x20 1x10"}
    ill = {"labels": labelled("", **slots[3]), "value": 0}
    hottest = {"labels": labelled("", **holders[4]), "value": 54}

    def free(**boards: int) -> list[JSON]:
        return [
            {"labels": labelled("", board=board), "value": count} for board, count in boards.items()
        ]

    tests: list[JSON] = [
        {"expr": FREE, "eval_time": "10m", "exp_samples": free(n300=2, p150=1)},
        {"expr": FREE, "eval_time": "25m", "exp_samples": free(n300=1)},
        {"expr": UNHEALTHY, "eval_time": "24m", "exp_samples": []},
        {"expr": UNHEALTHY, "eval_time": "27m", "exp_samples": [ill]},
        {"expr": HOTTEST, "eval_time": "10m", "exp_samples": []},  # nobody does
        {"expr": HOTTEST, "eval_time": "25m", "exp_samples": [hottest]},
    ]
    unit_test(tmp_path, values, promql_expr_test=tests)
