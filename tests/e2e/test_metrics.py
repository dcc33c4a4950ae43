"""The metrics and README's query, read by Prometheus' own programs."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.documents import fenced
from tests.e2e.daemon import Site
from tests.e2e.readers import assert_rules, labelled
from tests.world.processes import wait_until

TEXTFILES = "/var/lib/prometheus/node-exporter"
FILE = f"{TEXTFILES}/tt-device-plugin.prom"
PORT = 9100


@pytest.fixture(scope="module")
def running_site(tools: None) -> Iterator[Site]:
    """A host with Debian's node_exporter."""
    with Site() as site:
        site.machine.path(TEXTFILES).mkdir(parents=True)
        command = ["prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{PORT}"]
        command += ["--collector.disable-defaults", "--collector.textfile"]
        command += [f"--collector.textfile.directory={TEXTFILES}"]
        site.machine.spawn(command, site.machine.logs / "node-exporter.log")
        yield site


@pytest.fixture
def host(running_site: Site) -> Iterator[Site]:
    with running_site.for_one_test() as site:
        yield site


def scrape(host: Site) -> str:
    """Return what Prometheus would get; wait until node_exporter listens, for the first time."""

    def connected() -> socket.socket | None:
        with contextlib.suppress(ConnectionRefusedError):
            return host.machine.connect(PORT)
        return None

    with wait_until(connected, "node_exporter") as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nHost: node\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.decode().partition("\r\n\r\n")
    assert " 200 " in head.splitlines()[0]
    return body


def names(lines: Iterable[str]) -> set[str]:
    """Return the names of the metrics in these lines."""
    return {re.split("[ {]", line)[0] for line in lines}


def test_node_exporter_shows_the_whole_file(host: Site) -> None:
    """Each metric is there, with the time of writing."""
    host.cards.add("n300")
    host.cards.add("p300c")
    host.start_daemon(interval=0.5)

    wanted = {f'tt_device_healthy{{device="{host.cards.chips[0].bdf}"}} 1'}
    wanted.add("node_textfile_scrape_error 0")
    wait_until(lambda: wanted <= {*scrape(host).splitlines()}, f"a scrape with {wanted}")

    def shown_and_written() -> tuple[set[str], set[str]]:
        lines = host.machine.path(FILE).read_text().splitlines()
        shown = names(line for line in scrape(host).splitlines() if line.startswith("tt_"))
        return shown, names(line for line in lines if line[0] != "#")

    # The daemon can write another metric between the two.
    def is_whole() -> bool:
        shown, written = shown_and_written()
        return shown == written

    wait_until(is_whole, lambda: f"{shown_and_written()} to be the same")
    assert f'node_textfile_mtime_seconds{{file="{FILE}"}}' in scrape(host)


N300, P150 = "n300", "p150"
CHIPS = (  # cluster and device; board and resource; in 30 minutes, healthy; pod
    ("east", "0000:01:00.0", N300, f"tenstorrent.com/{N300}", "1x30", ""),
    ("east", "0000:02:00.0", N300, f"tenstorrent.com/{N300}", "1x15 0x15", ""),
    ("east", "0000:03:00.0", P150, f"tenstorrent.com/{P150}", "1x30", ""),
    ("east", "0000:04:00.0", P150, "", "1x30", ""),  # excluded
    ("west", "0000:01:00.0", N300, f"tenstorrent.com/{N300}", "1x30", "train"),
    ("west", "0000:02:00.0", N300, f"tenstorrent.com/{N300}", "1x30", ""),
    ("west", "0000:03:00.0", P150, f"tenstorrent.com/{P150}", "1x30", ""),
    ("west", "0000:04:00.0", P150, "", "1x30", ""),
)
FREE = {  # by minute; by cluster and board
    10: {("east", N300): 2, ("east", P150): 1, ("west", N300): 1, ("west", P150): 1},
    25: {("east", N300): 1, ("east", P150): 1, ("west", N300): 1, ("west", P150): 1},
}


def test_readmes_query_for_free_chips(tmp_path: Path) -> None:
    """It counts by board and cluster, in two clusters with the same nodes and addresses."""
    series: dict[str, str] = {}
    for cluster, device, board, resource, healthy, pod in CHIPS:
        place = {"cluster": cluster, "instance": "node-1", "device": device}
        info = {"board": board, "resource": resource, **place}
        series[labelled("tt_device_info", info)] = "1x30"
        series[labelled("tt_device_healthy", place)] = healthy
        if pod:
            series[labelled("tt_device_allocated", {"pod_name": pod, **place})] = "1x30"

    (query,) = fenced("promql")
    expected = []
    for minute, free in FREE.items():
        samples = [
            {"labels": labelled("", {"cluster": cluster, "board": board}), "value": count}
            for (cluster, board), count in free.items()
        ]
        test = {"expr": query, "eval_time": f"{minute}m", "exp_samples": samples}
        expected.append(test)

    input_series = [{"series": name, "values": values} for name, values in series.items()]
    test = {"input_series": input_series, "promql_expr_test": expected}
    assert_rules(tmp_path / "test.yml", test)
