"""Metrics, alerts (alerts.yml has them) and dashboard, judged by Prometheus' own programs.

The metrics are those of a node at work, as the program writes them.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.documents import DEB
from tests.world.processes import wait_until
from ttdp import Kind, Settings

RULES, ALERTS = DEB / "tt-device-plugin.rules.yml", Path(__file__).with_name("alerts.yml")
BOARD = json.loads((DEB / "tt-device-plugin.dashboard.json").read_text())
PANELS = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] != "row"}
N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
HOURS = 3


def promtool(*arguments: str | Path, text: str | None = None) -> None:
    """Run promtool, which must have nothing to say against it."""
    done = subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def metrics_of_a_node() -> str:
    """Return the metrics of six chips: two with a pod, one dead, one with a narrow link.

    A seventh one is excluded. Its link is narrow, too.
    """
    chips = [
        chip(1, "n150", number=0),
        chip(2, "n150", number=1, fault=Kind.NO_RESPONSE),
        chip(3, "p150a", number=2),
        chip(4, "p150a", number=3),
        *(chip(bus, "p300c", number=bus - 1, serial="A" * 16) for bus in (5, 6)),
        chip(9, "p100a", number=8),
    ]
    for place, each in enumerate(chips):
        if not each.fault:
            sensors = {sensor.attribute: 16.0 for sensor in ttdp.SENSORS}
            if each.address in (bdf(3), bdf(9)):
                sensors["current_link_width"] = 8.0
            values: Any = {"temperature": 41.5, "throttles_at": 90.0, "trips": 3, "processes": []}
            reading = ttdp.Reading(each.function, 1.0, sensors=sensors, **values)
            chips[place] = each._replace(reading=reading)

    holds = [hold("n150", bdf(1), buses=[1]), hold("p150", bdf(3), buses=[3])]
    decision = decide(chips, Settings(exclude=(bdf(9),)), holds)
    registered = ttdp.Registration("registered with kubelet", True, 2, True)
    registrations = dict.fromkeys(decision.resources, registered)
    counts = Counter({(N150, "granted"): 5})
    plugin = ttdp.plugin_metrics(decision, registrations, counts, 1.5e9)
    return ttdp.chip_metrics(decision) + plugin


def samples(metrics: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the labels and the value of each sample."""
    for line in metrics.splitlines():
        if match := re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line):
            yield match[1], match[2] or "", match[3]


def label_names(labels: str) -> set[str]:
    return set(re.findall(r'(\w+)="', labels))


# -- metrics ---------------------------------------------------------------------------------------


def test_prometheus_finds_no_fault_with_the_metrics() -> None:
    """Neither in their form nor in their names."""
    promtool("check", "metrics", text=metrics_of_a_node())


def test_node_exporter_shows_the_whole_file(tmp_path: Path) -> None:
    """Each sample is there, with the time of writing."""
    (tmp_path / "tt-device-plugin.prom").write_text(metrics_of_a_node())
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus-node-exporter", f"--web.listen-address={address}"]
    command += ["--collector.disable-defaults", "--collector.textfile"]
    command += [f"--collector.textfile.directory={tmp_path}"]

    def scrape() -> str:
        try:
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as exporter:
        text = wait_until(scrape, "node_exporter")
        exporter.terminate()

    def found(metrics: str) -> Iterator[tuple[str, frozenset[str], float]]:
        for name, labels, value in samples(metrics):
            if name.startswith("tt_"):
                yield name, frozenset(re.findall(r'\w+="[^"]*"', labels)), float(value)

    assert {*found(text)} == {*found(metrics_of_a_node())}
    assert "node_textfile_scrape_error 0" in text and "node_textfile_mtime_seconds{file=" in text


def test_no_label_is_one_of_a_scrape_target() -> None:
    """Prometheus would rename it, or the target's, depending on honor_labels."""
    of_targets = {"job", "instance", "cluster", "node", "namespace", "pod", "container", "service"}
    found = set().union(*(label_names(labels) for _, labels, _ in samples(metrics_of_a_node())))
    assert len(found) > 10 and found.isdisjoint(of_targets)


# -- alerts ----------------------------------------------------------------------------------------


def test_each_fault_raises_one_alert() -> None:
    """In time, with the remedy and the pods, and no other: see alerts.yml."""
    promtool("test", "rules", ALERTS)


def test_the_alerts_are_all_tested_with_series_of_the_program() -> None:
    """A series has no label that the program does not write, but those of a scrape target."""
    (test,) = yaml.safe_load(ALERTS.read_text())["tests"]
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"]: rule for rule in group["rules"] if "alert" in rule}
    assert {each["alertname"] for each in test["alert_rule_test"]} == alerts.keys()
    # A pager shows the summary alone.
    for rule in alerts.values():
        assert rule["annotations"]["summary"].endswith("on {{ $labels.instance }}")

    written = {name: label_names(labels) for name, labels, _ in samples(metrics_of_a_node())}
    for each in test["input_series"]:
        name, _, labels = each["series"].partition("{")
        if name.startswith("tt_"):
            assert label_names(labels) - {"cluster", "job", "instance", "pod"} <= written[name]


def test_the_rules_have_a_command_that_makes_a_prometheus_rule() -> None:
    """It is a comment in the file. The example configuration, which loads the file, is valid."""
    text = RULES.read_text()
    command = re.sub("(?m)^#", "", text[text.index("#   (echo") : text.index("| kubectl")])
    made = subprocess.run(["sh", "-c", command], cwd=DEB, capture_output=True, check=True).stdout
    assert yaml.safe_load(made)["spec"] == yaml.safe_load(text)

    for example in DEB.glob("*.prometheus.yml"):
        promtool("check", "config", example)


# -- dashboard -------------------------------------------------------------------------------------

TRAIN = '{cluster="east",pod_namespace="default",pod_name="train"}'
VALUES = {  # of panels, for the cluster "east" with its six nodes
    "Chips": {"{}": 6 * 6},
    "Unhealthy": {"{}": 6},
    "Allocated to pods": {"{}": 6 * 2},
    "Functions without a driver": {"{}": 0},
    "Free chips by board": {'{board="p150"}': 6, '{board="p300"}': 6 * 2},
    "Nodes registered with their kubelet": {
        f'{{resource="tenstorrent.com/{board}"}}': 6 for board in ("n150", "p150", "p300")
    },
    "Faults by kind": {'{kind="no_response"}': 6},
    "Chips by pod: top ten": {TRAIN: 6 * 2},
    "Power by pod: top ten": {TRAIN: 6 * 2 * 16},
}


def expression(title: str, cluster: str = ".*") -> str:
    """Return a panel's query as Grafana sends it."""
    variables = {"$cluster": cluster, "$instance": ".*", "$__rate_interval": "5m"}
    variables["$__range"] = "7200s"
    query = PANELS[title]["targets"][0]["expr"]
    return re.sub(r"\$\w+", lambda match: variables[match[0]], query)


def test_panels_show_what_there_is(tmp_path: Path) -> None:
    """Each something, at most ten lines of 72 chips, and none a chip that is excluded.

    Those with a number show the right one, of two clusters with the same nodes.
    """
    places = itertools.product(("east", "west"), range(6))
    history = []
    for (cluster, node), (name, labels, value) in itertools.product(
        places, samples(metrics_of_a_node())
    ):
        target = f'cluster="{cluster}",job="node",instance="node-{node}:9100"'
        series = f"{name}{{{','.join(filter(None, [labels, target]))}}}"
        steps = f"0+{value}" if name.endswith("_total") else value
        history.append({"series": series, "values": f"{steps}x{60 * HOURS}"})

    excluded = f'tt_device_info{{device="{bdf(9)}"}}'
    tests: list[dict[str, Any]] = [{"expr": f"count({excluded})", "exp_samples": [{"value": 12}]}]
    for title, panel in PANELS.items():
        query = expression(title)
        most = 10 if panel["type"] == "timeseries" else 72
        shown = f"count({query}) > bool 0 and count({query}) <= {most}"
        tests.append({"expr": shown, "exp_samples": [{"value": 1}]})
        tests.append({"expr": f"({query}) and on (device) {excluded}"})
        tests.append({"expr": f"({query}) and on (board) {excluded}"})
    for title, values in VALUES.items():
        expected = [{"labels": labels, "value": value} for labels, value in values.items()]
        tests.append({"expr": expression(title, "east"), "exp_samples": expected})

    at = {"eval_time": f"{HOURS}h"}
    test = {"interval": "1m", "input_series": history}
    test["promql_expr_test"] = [{**each, **at} for each in tests]
    (tmp_path / "test.yml").write_text(json.dumps({"tests": [test]}))
    promtool("test", "rules", tmp_path / "test.yml")


def test_the_dashboard_can_be_imported() -> None:
    """All panels use the variables; no ID and no place is used twice."""
    variables = [each["name"] for each in BOARD["templating"]["list"]]
    assert variables == ["datasource", "cluster", "instance"]
    assert "id" not in BOARD and BOARD["uid"]
    for title, panel in PANELS.items():
        assert panel["datasource"]["uid"] == "${datasource}" and len(panel["targets"]) == 1
        assert '{cluster=~"$cluster",instance=~"$instance"' in panel["targets"][0]["expr"], title

    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len({*ids})
    cells: list[tuple[int, int]] = []
    for place in (panel["gridPos"] for panel in BOARD["panels"]):
        columns = range(place["x"], place["x"] + place["w"])
        cells += itertools.product(columns, range(place["y"], place["y"] + place["h"]))
    assert len(cells) == len({*cells}) and max(x for x, _ in cells) < 24
