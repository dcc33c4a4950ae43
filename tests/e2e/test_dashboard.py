"""The dashboard and the example configurations on a real Prometheus, with the daemon's metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.server
import itertools
import json
import re
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import ttdp
from tests.documents import DEB
from tests.e2e.readers import promtool
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, until, wait_until
from tests.world.simulation import RunningDaemon, settings_of
from tests.world.tree import put

RULES, IDLE = DEB / "tt-device-plugin.rules.yml", DEB / "tt-device-plugin.idle-rules.yml"
BOARD = json.loads((DEB / "tt-device-plugin.dashboard.json").read_text())
PANELS = {panel["title"]: panel for panel in BOARD["panels"] if panel["type"] != "row"}
QUERIES: dict[str, str] = {title: panel["targets"][0]["expr"] for title, panel in PANELS.items()}
N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"
PLACES = [*itertools.product(("east", "west"), [f"node-{number}" for number in range(6)])]
HOURS = 3
EXCLUDED = "0000:09:00.0"


# --- A node at work -------------------------------------------------------------------------------


async def metrics_of_a_node(home: Path) -> str:
    """Return the daemon's metrics: six chips, two with a pod, one dead, one with a narrow link.

    A seventh is excluded. Its link is narrow, too.
    """
    node = SimulatedNode(home / "node")
    for card in ("n150", "n150", "p150a", "p150a", "p300c"):
        node.add(card)
    (excluded,) = node.add("p100a", bdf=EXCLUDED)
    excluded.write("current_link_width", b"8\n")

    dead, narrow = node.chips[1], node.chips[2]
    narrow.write("current_link_width", b"4\n")
    narrow.write("tt_therm_trip_count", b"1\n")
    directory = narrow.attribute("max_link_width").parent
    for severity, kind in (("correctable", "COR"), ("nonfatal", "NONFATAL"), ("fatal", "FATAL")):
        put(directory / f"aer_dev_{severity}", f"RxErr 5\nTOTAL_ERR_{kind} 5")

    settings = settings_of(node, home / "dp", interval=0.1, exclude=(excluded.bdf,))
    file = Path(settings.metrics_file)
    file.parent.mkdir()

    with Ticker(node, 0.05):
        async with Kubelet(home / "dp") as kubelet, RunningDaemon(node, settings):
            for resource in (N150, P150):
                await kubelet.registered(resource)
            await kubelet.admit("team-a/train", "main", {N150: 1, P150: 1})
            dead.die()

            def complete() -> str | None:
                text = file.read_text() if file.exists() else ""
                wanted = ("no_response", '"train"', "tt_device_open")
                return text if all(each in text for each in wanted) else None

            return await until(complete, "the metrics of a pod and a fault")


@pytest.fixture(scope="module")
def metrics() -> str:
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as home:
        return asyncio.run(metrics_of_a_node(Path(home)))


# --- A real Prometheus ----------------------------------------------------------------------------


class Prometheus(NamedTuple):
    """A server on loopback, and when its data end."""

    url: str
    end: float

    def get(self, path: str, **parameters: object) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/{path}?{query}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        """Return the samples of an expression at the end of the data."""
        return [*self.get("query", query=expression, time=self.end)["result"]]

    def lines(self, expression: str) -> int:
        """Return how many lines a graph of the last two hours has."""
        times = {"start": self.end - 7200, "end": self.end, "step": 300}
        return len(self.get("query_range", query=expression, **times)["result"])

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("status/buildinfo"))
        return False


@contextlib.contextmanager
def serving(home: Path, config: object, end: float) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration on the data below `home`."""
    (home / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={home}/prometheus.yml"]
    command += [f"--storage.tsdb.path={home}/data", "--storage.tsdb.retention.time=10y"]
    command.append("--web.listen-address=127.0.0.1:0")

    log = home / "log"
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:

        def listens() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r'"Listening on".* address=(\S+)\n', log.read_text())

        try:
            address = wait_until(listens, "the port of Prometheus")[1]
            server = Prometheus(f"http://{address}/api/v1", end)
            wait_until(server.is_ready, "Prometheus to be ready")
            yield server
        finally:
            process.terminate()


def history(metrics: str, end: int) -> Iterator[str]:
    """Yield the samples of some hours for all places, in which counters rise (OpenMetrics)."""
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    for line, (cluster, node) in itertools.product([*lines, "up 1"], PLACES):
        series, value = line.rsplit(" ", 1)
        name, _, labels = series.rstrip("}").partition("{")
        target = f'cluster="{cluster}",job="node",instance="{node}:9100",pod="exporter-{node}"'
        all_labels = ",".join(filter(None, [labels, target]))

        for minute in range(HOURS * 60):
            at = end - HOURS * 3600 + 60 * minute
            rise = minute * float(value) if name.endswith("_total") else 0
            yield f"{name}{{{all_labels}}} {float(value) + rise} {at}"
    yield "# EOF\n"


@pytest.fixture(scope="module")
def prometheus(metrics: str) -> Iterator[Prometheus]:
    """A server with the last hours of two clusters of six nodes."""
    end = int(time.time()) // 7200 * 7200  # a block's border
    with tempfile.TemporaryDirectory(prefix="tt-") as directory:
        home = Path(directory)
        (home / "history").write_text("\n".join(history(metrics, end)))

        command = ("tsdb", "create-blocks-from", "openmetrics", "history", "data")
        done = subprocess.run(["promtool", *command], cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

        with serving(home, {"rule_files": [str(RULES)]}, end - 60) as server:
            yield server


# --- The dashboard --------------------------------------------------------------------------------


def test_the_dashboard_can_be_imported() -> None:
    """All panels use the variables; no ID and no place is used twice."""
    variables = [each["name"] for each in BOARD["templating"]["list"]]
    assert variables == ["datasource", "cluster", "instance"]

    assert "id" not in BOARD and BOARD["uid"]
    assert {panel["datasource"]["uid"] for panel in PANELS.values()} == {"${datasource}"}
    assert all('{cluster=~"$cluster",instance=~"$instance"' in each for each in QUERIES.values())

    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids)) and len(QUERIES) == len(PANELS)

    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def expression(title: str, cluster: str = ".*") -> str:
    """Return a panel's query as Grafana sends it."""
    variables = {"$cluster": cluster, "$instance": ".*", "$__rate_interval": "5m"}
    variables["$__range"] = "7200s"
    return re.sub(r"\$\w+", lambda match: variables[match[0]], QUERIES[title])


@pytest.mark.parametrize("title", QUERIES)
def test_a_panel_shows_some_lines(prometheus: Prometheus, title: str) -> None:
    """Not none, as with a metric that the daemon does not write; at most ten of 72 chips."""
    assert prometheus.query(expression(title))
    if PANELS[title]["type"] == "timeseries":
        assert prometheus.lines(expression(title)) <= 10


def values(prometheus: Prometheus, title: str) -> dict[str, float]:
    """Return a panel's values for one cluster, by the labels that distinguish them."""
    kept = ("pod_namespace", "pod_name", "board", "kind", "resource", "health")
    found = prometheus.query(expression(title, "east"))
    texts = [" ".join(each["metric"].get(key, "") for key in kept).split() for each in found]
    return {" ".join(x): float(each["value"][1]) for x, each in zip(texts, found, strict=True)}


def test_the_values_of_panels(prometheus: Prometheus) -> None:
    """On each of six nodes: six chips, one dead, two with a pod that is idle, a narrow link.

    No panel counts the chip that is excluded.
    """
    assert values(prometheus, "Chips") == {"": 6 * 6}
    assert values(prometheus, "Unhealthy") == {"": 6}
    assert values(prometheus, "Allocated to pods") == {"": 6 * 2}
    assert values(prometheus, "Functions without a driver") == {"": 0}
    assert values(prometheus, "Free chips by board") == {"p150": 6, "p300": 6 * 2}
    assert values(prometheus, "Nodes registered with their kubelet")[N150] == 6
    assert values(prometheus, "Faults by kind") == {"no_response": 6}
    assert values(prometheus, "Power by pod: top ten") == {"team-a train": 6 * (16 + 24)}
    assert values(prometheus, "Chips by pod: top ten") == {"team-a train": 6 * 2}
    assert values(prometheus, "Allocated and not opened for an hour") == {"team-a train": 1}
    assert set(values(prometheus, "Links narrower than the card supports").values()) == {4}


def test_no_panel_shows_a_chip_that_is_excluded(prometheus: Prometheus) -> None:
    """Prometheus has its sensors all the same, and neither health nor a fault."""
    has = {sample["metric"]["__name__"] for sample in prometheus.query(f'{{device="{EXCLUDED}"}}')}
    assert {"tt_device_info", "tt_device_temperature_celsius"} <= has
    assert not {"tt_device_healthy", "tt_device_fault"} & has

    for title in QUERIES:
        shown = json.dumps(prometheus.query(expression(title)))
        assert EXCLUDED not in shown and "p100" not in shown, title


# --- The examples ---------------------------------------------------------------------------------


def test_no_label_is_renamed(metrics: str, tmp_path: Path) -> None:
    """A target's labels of a pod, such as node_exporter's, stay beside those of the chip's pod."""
    (tmp_path / "metrics").write_text(metrics)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as exporter:
        threading.Thread(target=exporter.serve_forever, daemon=True).start()

        labels = {"namespace": "monitoring", "pod": "exporter-x", "container": "exporter"}
        target = {"targets": [f"127.0.0.1:{exporter.server_address[1]}"], "labels": labels}
        jobs = [
            {"job_name": str(honors), "honor_labels": honors, "static_configs": [target]}
            for honors in (True, False)
        ]
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}

        with serving(tmp_path, config, time.time() + 3600) as server:
            query = 'group by (job, pod, pod_name) (last_over_time({__name__=~"tt_.+"}[2h]))'
            wait_until(lambda: len(server.query(query)) == 4, "both jobs to have scraped")
            found = [sample["metric"] for sample in server.query(query)]
            names = server.get("labels")
        exporter.shutdown()

    assert {each["pod"] for each in found} == {"exporter-x"}
    assert {each.get("pod_name") for each in found} == {None, "train"}
    assert not [name for name in names if name.startswith("exported_")]


def test_the_service_monitor_finds_the_port(tmp_path: Path) -> None:
    """Prometheus scrapes the plugin's port on the nodes that have its label."""
    monitor = yaml.safe_load((DEB / "tt-device-plugin.servicemonitor.yml").read_text())
    # A ServiceMonitor's keys are those of prometheus.yml, in another spelling.
    steps = [
        {re.sub("[A-Z]", lambda match: f"_{match[0].lower()}", key): step[key] for key in step}
        for step in monitor["spec"]["endpoints"][0]["relabelings"]
    ]
    label = "__meta_kubernetes_node_labelpresent_tenstorrent_com_plugin_version"
    nodes = [{"targets": ["127.0.0.1:10250"], "labels": {label: "true"}}]
    nodes.append({"targets": ["127.0.0.2:10250"], "labels": {}})
    job = {"job_name": "kubelet", "relabel_configs": steps, "static_configs": nodes}

    with serving(tmp_path, {"scrape_configs": [job]}, 0) as server:
        wait_until(lambda: server.get("targets")["activeTargets"], "the target")
        (target,) = server.get("targets")["activeTargets"]

    unit = (ROOT / "packaging/systemd/tt-device-plugin-metrics.socket").read_text()
    port = re.findall(r"(?m)^ListenStream=(\d+)$", unit)[-1]
    assert target["scrapeUrl"] == f"http://127.0.0.1:{port}/metrics"
    assert target["labels"] == {"instance": f"127.0.0.1:{port}", "job": "tt-device-plugin"}
    assert f'"node-3:{port}"' in (DEB / "tt-device-plugin.prometheus.yml").read_text()


def test_the_metrics_are_those_that_the_examples_use(metrics: str) -> None:
    """promtool finds no fault with them, and every one in rules and dashboard is written."""
    done = promtool("check", "metrics", text=metrics)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    written = set(re.findall(r"(?m)^# TYPE (\S+)", metrics))
    uses = RULES.read_text() + IDLE.read_text() + json.dumps(QUERIES)
    assert set(re.findall(r"(?<![\w:])tt_[a-z]+_[a-z_]+\b(?!:)", uses)) <= written


def test_node_exporters_values_have_the_daemons_directory() -> None:
    """Those of its chart, in which the host's root is mounted at /host/root."""
    directory = Path(ttdp.Settings().metrics_file).parent
    values = (DEB / "tt-device-plugin.node-exporter.yml").read_text()

    (argument,) = yaml.safe_load(values)["prometheus-node-exporter"]["extraArgs"]
    assert argument == f"--collector.textfile.directory=/host/root{directory}"
    assert f"install -d {directory} " in values


def test_the_rules_have_a_command_that_makes_a_prometheus_rule() -> None:
    """It is a comment in the file. The example configuration, which loads the file, is valid."""
    text = RULES.read_text()
    command = re.sub("(?m)^#", "", text[text.index("#   (echo") : text.index("| kubectl")])
    made = subprocess.run(["sh", "-c", command], cwd=DEB, capture_output=True, check=True).stdout
    assert yaml.safe_load(made)["spec"] == yaml.safe_load(text)

    example = DEB / "tt-device-plugin.prometheus.yml"
    assert promtool("check", "config", str(example)).returncode == 0
