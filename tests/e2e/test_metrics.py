"""The metrics and README's query, read by Prometheus' own programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine
from tests.e2e.node import Program
from tests.e2e.readers import Alone, labelled, promtool
from tests.world.processes import wait_until

TEXTFILES = "/var/lib/prometheus/node-exporter"
FILE = f"{TEXTFILES}/tt-device-plugin.prom"
PORT = 9100


class MetricsHost(Alone):
    """With an n300, a p300c (two chips), and Debian's node_exporter."""

    def scrape(self) -> str:
        """Return what Prometheus would get."""
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
        command = ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{PORT}"]
        command += ["--collector.disable-defaults", "--collector.textfile"]
        command += [f"--collector.textfile.directory={TEXTFILES}"]
        machine.spawn(command, machine.logs / "node-exporter.log")
        yield machine


@pytest.fixture
def host(machine: Machine, program: Program) -> Iterator[MetricsHost]:
    machine.path(FILE).unlink(missing_ok=True)
    with MetricsHost(machine, program) as host:
        host.cards.add("n300")
        host.cards.add("p300c")
        host.start()
        yield host


def test_node_exporter_shows_the_whole_file(host: MetricsHost) -> None:
    """Each metric is there, with the time of writing."""
    healthy = f'tt_device_healthy{{device="{host.cards.chips[0].bdf}"}} 1'
    host.wait_scraped(healthy, "node_textfile_scrape_error 0")
    lines = host.machine.path(FILE).read_text().splitlines()
    names = {re.split("[ {]", line)[0] for line in lines if line[0] != "#"}
    shown = host.scrape()
    found = {re.split("[ {]", line)[0] for line in shown.splitlines() if line.startswith("tt_")}
    assert names == found
    assert f'node_textfile_mtime_seconds{{file="{FILE}"}}' in shown


QUERIES = [
    """
count by (cluster, board) (
  tt_device_info{resource!=""} and on (cluster, instance, device) tt_device_healthy == 1
  unless on (cluster, instance, device) tt_device_allocated
)
"""
]


def test_the_query_for_free_chips(tmp_path: Path) -> None:
    """It counts by board and cluster, in two clusters with the same nodes and addresses."""
    values: dict[str, str] = {}
    for cluster in ("east", "west"):
        for number, board in enumerate(("n300", "n300", "p150")):
            place = {"cluster": cluster, "instance": "node-1", "device": f"0000:0{number}:00.0"}
            healthy = "1x15 0x15" if (cluster, number) == ("east", 1) else "1x30"
            name = f"tenstorrent.com/{board}"
            info = {"board": board, "resource": name, **place}
            values[labelled("tt_device_info", info)] = "1x30"
            values[labelled("tt_device_healthy", place)] = healthy
            if number == 2:  # another one is excluded
                place["device"] = "0000:09:00.0"
                values[labelled("tt_device_info", {"board": board, **place})] = "1x30"
                values[labelled("tt_device_healthy", place)] = "1x30"
            if (cluster, number) == ("west", 0):
                values[labelled("tt_device_allocated", {"pod_name": "train", **place})] = "1x30"

    def free(minute: int, **boards: int) -> dict[str, object]:
        samples = [
            {"labels": labelled("", {"cluster": name[:4], "board": name[5:]}), "value": count}
            for name, count in boards.items()
        ]
        return {"expr": QUERIES[0], "eval_time": f"{minute}m", "exp_samples": samples}

    west = {"west_n300": 1, "west_p150": 1}
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        "promql_expr_test": [
            free(10, east_n300=2, east_p150=1, **west),
            free(25, east_n300=1, east_p150=1, **west),
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"evaluation_interval": "1m", "tests": [case]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
