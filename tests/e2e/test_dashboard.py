"""Dashboard and rules on a real Prometheus, with what the daemon says of a node that is at work."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.readers import promtool
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, until, wait_until
from tests.world.simulation import RunningDaemon, settings_of
from tests.world.tree import put

DASHBOARD = ROOT / "packaging/deb/tt-device-plugin.dashboard.json"
RULES = ROOT / "packaging/deb/tt-device-plugin.rules.yml"
HOURS = 3
N150, P150 = "tenstorrent.com/n150", "tenstorrent.com/p150"


# -- a node at work --------------------------------------------------------------------------------


async def metrics_of_a_node(home: Path) -> str:
    """What the daemon says: cards in use and free, one dead, one on a narrow link with errors."""
    node = SimulatedNode(home / "node")
    for card in ("n150", "n150", "p150a", "p150a", "p300c"):
        node.add(card)
    used, dead, narrow = node.chips[0], node.chips[1], node.chips[2]
    pci = narrow.attribute("max_link_width").parent
    narrow.write("current_link_width", b"4\n")
    for chip in node.chips:
        for severity, kind in (
            ("correctable", "COR"),
            ("nonfatal", "NONFATAL"),
            ("fatal", "FATAL"),
        ):
            directory = chip.attribute("max_link_width").parent
            count = 5 if directory == pci else 0
            put(directory / f"aer_dev_{severity}", f"RxErr {count}\nTOTAL_ERR_{kind} {count}")
    settings = settings_of(node, home / "dp", interval=0.1)
    with Ticker(node, 0.05):
        async with Kubelet(home / "dp") as kubelet, RunningDaemon(node, settings) as daemon:
            for resource in (N150, P150):
                await kubelet.registered(resource)
            await kubelet.admit("team-a/train", "main", {N150: 1, P150: 1})
            dead.die()
            await until(lambda: daemon.chip(dead.bdf).health.fault)
            assert used.bdf != dead.bdf
            return await daemon.daemon._take_metrics()


@pytest.fixture(scope="module")
def metrics() -> str:
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as home:
        return asyncio.run(metrics_of_a_node(Path(home)))


# -- a real Prometheus -----------------------------------------------------------------------------


@dataclass
class Prometheus:
    """A server on loopback, and when its data end."""

    port: int
    end: float

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}?{query}") as answer:
            return json.load(answer)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression at the end of the data."""
        answer = self.get("/api/v1/query", query=expression, time=f"{self.end:.0f}")
        assert answer["status"] == "success"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@contextlib.contextmanager
def serving(home: Path, config: str, end: float) -> Iterator[Prometheus]:
    """Run Prometheus with this configuration on what is below `home`."""
    (home / "prometheus.yml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = [
        f"--config.file={home}/prometheus.yml",
        f"--storage.tsdb.path={home}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=10y",
    ]
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log) as process,
    ):
        try:
            server = Prometheus(port, end)
            wait_until(lambda: is_ready(server), "Prometheus to be ready", 60)
            yield server
        finally:
            process.terminate()


def is_ready(server: Prometheus) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://127.0.0.1:{server.port}/-/ready"
        return bool(urllib.request.urlopen(url).status == 200)
    return False


def history(metrics: str, end: int) -> Iterator[str]:
    """Yield the samples of some hours, in which counters rise, as OpenMetrics has them."""
    where = 'job="node",instance="node-1"'
    lines = [line for line in metrics.splitlines() if not line.startswith("#")]
    for line in [*lines, "up 1"]:
        series, value = line.rsplit(" ", 1)
        name, _, labels = series.rstrip("}").partition("{")
        all_labels = ",".join(filter(None, [labels, where]))
        for minute in range(HOURS * 60):
            at = end - HOURS * 3600 + 60 * minute
            rise = minute * float(value) if name.endswith("_total") else 0
            yield f"{name}{{{all_labels}}} {float(value) + rise} {at}"
    yield "# EOF\n"


@pytest.fixture(scope="module")
def prometheus(metrics: str) -> Iterator[Prometheus]:
    """With the last hours of the node in its database."""
    end = int(time.time()) // 7200 * 7200  # a block's border
    with tempfile.TemporaryDirectory(prefix="tt-") as directory:
        home = Path(directory)
        (home / "history").write_text("\n".join(history(metrics, end)))
        command = ("tsdb", "create-blocks-from", "openmetrics", "history", "data")
        done = subprocess.run(["promtool", *command], cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with serving(home, f"rule_files: [{RULES}]\n", end - 60) as server:
            yield server


# -- the dashboard ---------------------------------------------------------------------------------

BOARD = json.loads(DASHBOARD.read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}


def test_the_dashboard_can_be_imported() -> None:
    """One variable is the data source, which every panel uses; no ID and no place stands twice."""
    sources = [each for each in BOARD["templating"]["list"] if each["type"] == "datasource"]
    assert [each["name"] for each in sources] == ["datasource"]
    assert "id" not in BOARD and BOARD["uid"]
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(ids) == len(set(ids))
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Fleet", "Health", "Power and heat", "Pods", "Link and errors"]
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def expression(text: str) -> str:
    """Return what Grafana makes of a query for all nodes."""
    return text.replace("$node", ".*").replace("$__rate_interval", "5m")


@pytest.mark.parametrize("title", QUERIES)
def test_a_query_of_the_dashboard_finds_something(prometheus: Prometheus, title: str) -> None:
    """On the node that was at work; a name that the daemon does not write would find nothing."""
    assert prometheus.query(expression(QUERIES[title]))


def value(prometheus: Prometheus, title: str) -> dict[str, float]:
    """What a panel shows, by the labels that it tells apart."""
    found = prometheus.query(expression(QUERIES[f"{title}, A"]))
    kept = ("namespace", "pod", "board", "device", "kind")
    return {
        " ".join(each["metric"][key] for key in kept if key in each["metric"]): float(
            each["value"][1]
        )
        for each in found
    }


def test_what_the_panels_show_is_so(prometheus: Prometheus) -> None:
    """Six chips, one dead, two with a pod, which rests; one on a narrow link."""
    assert value(prometheus, "Unhealthy") == {"": 1}
    assert value(prometheus, "In use") == {"": 2}
    assert value(prometheus, "Free devices by board") == {"p150": 1, "p300": 2}
    (faulty,) = value(prometheus, "Faults")
    assert faulty.endswith(" no_response")
    assert value(prometheus, "Power by pod") == {"team-a train": 16 + 24}
    assert value(prometheus, "Cards by pod") == {"team-a train": 2}
    assert len(value(prometheus, "Held, and unused for an hour")) == 2
    (width,) = value(prometheus, "Links narrower than they can be").values()
    assert width == 4


def test_the_rules_run(prometheus: Prometheus) -> None:
    """A real server loads them, and none of them fails."""

    def health() -> set[str]:
        groups = prometheus.get("/api/v1/rules")["data"]["groups"]
        return {rule["health"] for group in groups for rule in group["rules"]}

    wait_until(lambda: "unknown" not in health(), "the rules to be evaluated", 120)
    assert health() == {"ok"}


# -- whose label is `pod`? -------------------------------------------------------------------------


@contextlib.contextmanager
def exporter(metrics: str) -> Iterator[int]:
    """Serve the metrics on loopback; yields the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(metrics.encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


JOB = """
 - job_name: {name}
   scrape_interval: 1s
   honor_labels: {honor}
   static_configs:
    - targets: ["127.0.0.1:{port}"]
      labels: {{namespace: monitoring, pod: node-exporter-x}}
"""


def test_honor_labels_decides_whose_pod_it_is(metrics: str, tmp_path: Path) -> None:
    """A target that has labels pod and namespace itself wins, unless its job honours ours."""
    with exporter(metrics) as port:
        kinds = {"ours": "true", "theirs": "false"}
        jobs = [JOB.format(name=name, honor=kind, port=port) for name, kind in kinds.items()]
        with serving(tmp_path, "scrape_configs:" + "".join(jobs), time.time() + 3600) as server:
            query = "count by (job, pod, exported_pod) (last_over_time(tt_device_allocated[2h]))"

            def pods() -> dict[str, tuple[str, str]]:
                found = (sample["metric"] for sample in server.query(query))
                return {each["job"]: (each["pod"], each.get("exported_pod", "")) for each in found}

            wait_until(lambda: len(pods()) == 2, "both jobs to have scraped", 60)
            assert pods() == {"ours": ("train", ""), "theirs": ("node-exporter-x", "train")}


def test_promtool_has_no_objection_to_a_node_at_work(metrics: str) -> None:
    """Names, units and help texts of everything that there is, faults and errors, too."""
    done = promtool("check", "metrics", text=metrics)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_rules_file_names_what_exists(metrics: str) -> None:
    """Every metric of ours in rules and dashboard is one that the daemon writes."""
    written = set(re.findall(r"(?m)^# TYPE (\S+)", metrics))
    text = RULES.read_text() + DASHBOARD.read_text()
    records = set(re.findall(r"record: (\S+)", RULES.read_text()))
    named = set(re.findall(r"(?<![\w:])tt_[a-z]+_[a-z_]+\b(?!:)", text))
    assert named <= written and records
    assert promtool("check", "rules", str(RULES)).returncode == 0
