"""node-problem-detector with the package's example: a condition and events of the node.

The real program runs beside the real package in a booted system, and reports to a small API server.
Its Go module cannot be had everywhere, so its path is given: NODE_PROBLEM_DETECTOR=<path>, built
with the tag journald. Without it only the documents are checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ttdp
from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.conftest import Told
from tests.e2e.container import Container, require_root
from tests.e2e.host import CONFIG, CONFIGURATION
from tests.e2e.machine import in_network
from tests.e2e.steps import UNIT
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, wait_until

SUITE = "trixie"
EXAMPLE = ROOT / "packaging/deb/tt-device-plugin.node-problem-detector.yml"
CONDITION = "TenstorrentProblem"


def documents() -> dict[str, Any]:
    """Return the two configurations in the example."""
    config_map = yaml.safe_load(EXAMPLE.read_text())
    return {name: json.loads(text) for name, text in config_map["data"].items()}


class ProblemHost(Container):
    """A system with the package, an n300, node-problem-detector and an API server."""

    def __init__(self, deb: Path, detector: Path) -> None:
        super().__init__(SUITE, {deb.parent: "/srv/packages"})
        self.deb = deb
        self.api = ApiServer()
        self.cards = SimulatedNode(self.shared / "node")
        self.cards.add("n300")
        self.chip = self.cards.chip(self.cards.chips[0].bdf)
        self._heartbeats = contextlib.ExitStack()
        shutil.copy(detector, self.shared / "node-problem-detector")

    def start(self) -> None:
        self._heartbeats.enter_context(Ticker(self.cards))
        self.boot()
        self.write(CONFIG, CONFIGURATION)
        self("apt-get", "install", "--yes", f"/srv/packages/{self.deb.name}")

        self.api.write("/api/v1/nodes/node", {"status": {"conditions": []}})
        self.api.serve(self.listen)

        for name, configuration in documents().items():
            if "invoke_interval" in configuration["pluginConfig"]:
                configuration["pluginConfig"]["invoke_interval"] = "1s"
            self.write(f"/etc/npd/{name}", json.dumps(configuration))
        self.shell("mkdir -p /var/log/journal && journalctl --flush")

        flags = (
            "--config.custom-plugin-monitor=/etc/npd/check.json",
            "--config.system-log-monitor=/etc/npd/journal.json",
            f"--apiserver-override=http://127.0.0.1:{PORT}?inClusterConfig=false",
            "--hostname-override=node",
        )
        program = "/srv/shared/node-problem-detector"
        self("systemd-run", "--unit=npd", program, *flags)

    def delete(self) -> None:
        self._heartbeats.close()
        self.api.close()
        super().delete()

    def listen(self, port: int) -> socket.socket:
        """Listen on the container's loopback device."""
        return in_network(self.leader, lambda: socket.create_server(("127.0.0.1", port)))

    @property
    def condition(self) -> dict[str, str]:
        """The condition, as `kubectl describe node` shows it; empty if it is not set."""
        conditions = self.api.node("node")["status"]["conditions"]
        return next((each for each in conditions if each["type"] == CONDITION), {})

    def events(self, reason: str) -> list[str]:
        """Return the messages of the node's events with this reason."""
        events, _ = self.api.collect("/api/v1/events")
        return [event["message"] for event in events if event.get("reason") == reason]

    def wait_for(self, is_so: Callable[[], object], what: str) -> None:
        journal = ("journalctl", "--no-pager", "--lines=40", "--unit=npd", f"--unit={UNIT}")
        wait_until(is_so, lambda: f"{what}\n{self.condition}\n{self(*journal)}")


@pytest.fixture(scope="module")
def host(deb: Path) -> Iterator[ProblemHost]:
    require_root()
    detector = os.environ.get("NODE_PROBLEM_DETECTOR")
    if not detector:
        pytest.skip("NOT RUN: no node-problem-detector; set NODE_PROBLEM_DETECTOR to its path")
    with ProblemHost(deb, Path(detector)) as host:
        yield host


def test_a_fault_is_a_condition_and_an_event(host: ProblemHost, told: Told) -> None:
    """Both contain the chip and the command; the recovery clears the condition."""
    host.wait_for(lambda: host.condition.get("status") == "False", "a healthy node's condition")
    assert host.condition["reason"] == "TenstorrentChecksPassed"

    host.chip.die()
    host.wait_for(lambda: host.condition["status"] == "True", "the condition of a fault")
    assert host.condition["reason"] == "TenstorrentCheckFailed"
    command = ttdp.fix_command(host.chip.bdf)
    message = host.condition["message"]
    assert "FAIL" in message and command in message and not re.search("(?m)^ok ", message)
    host.wait_for(lambda: host.events("TenstorrentFault"), "an event of the fault")
    assert command in host.events("TenstorrentFault")[0]

    host.chip.revive()
    host.wait_for(lambda: host.condition["status"] == "False", "the recovery")
    assert host.condition["reason"] == "TenstorrentChecksPassed"
    told(f"condition: {message!r}; events: {host.events('TenstorrentFault')}")


def test_lines_of_the_journal_are_events(host: ProblemHost) -> None:
    """A line with a remedy, and a rejected configuration; nothing else of the daemon is one."""
    logged = ("logger", "--tag=tt-device-plugin")
    fault = "0000:09:00.0 (p150a): resetting; if this persists, run: cd /sys && echo 1 > bind"
    host(*logged, "0000:09:00.0 (p150a): healthy again")
    host(*logged, fault)
    host.wait_for(lambda: fault in host.events("TenstorrentFault"), "an event of the fault")

    host.write(CONFIG, f'log_level = "loud"\n{CONFIGURATION}')
    host("systemctl", "reload", UNIT, check=False)
    rejected = "TenstorrentConfigurationRejected"
    host.wait_for(lambda: host.events(rejected), "an event of the configuration")
    assert "log_level" in host.events(rejected)[0]
    events, _ = host.api.collect("/api/v1/events")
    assert not [event for event in events if "healthy again" in event["message"]]
    host.wait_for(lambda: "log_level" in host.condition["message"], "a failed check")

    host.write(CONFIG, CONFIGURATION)
    host("systemctl", "reload", UNIT)
    host.wait_for(lambda: host.condition["status"] == "False", "the recovery")


def test_both_documents_are_complete() -> None:
    """Each rule's condition has a default, and each pattern is a regular expression."""
    found = documents()
    assert found.keys() == {"check.json", "journal.json"}

    for document in found.values():
        defaults = {each["type"] for each in document["conditions"]}
        for rule in document["rules"]:
            assert rule["type"] == "temporary" or rule["condition"] in defaults
            re.compile(rule.get("pattern", ""))
