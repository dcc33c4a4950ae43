"""One host: a container with the package, simulated cards and, as a service of its own, the reference kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.container import Container
from tests.world.node import Chip, SimulatedNode, Ticker
from tests.world.processes import PATIENCE, ROOT, wait_until

UNIT = "tt-device-plugin"
KUBELET = """
[Unit]
Description=Reference kubelet
StartLimitIntervalSec=0

[Service]
Environment=PYTHONPATH=/srv/project:/srv/shared/python PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/sh -c 'exec /usr/bin/python3 -m tests.world.kubelet --json %s <>/srv/shared/input >>/srv/shared/events'

[Install]
WantedBy=multi-user.target
"""
CONFIGURATION = """
sysfs_root = "/srv/shared/node/sys"
dev_root = "/srv/shared/node/dev"
proc_root = "/srv/shared/node/proc"
[health]
interval = 0.5
"""


class Host:
    """What the tests see of it. Times are seconds of CLOCK_MONOTONIC, which the host and the container share."""

    def __init__(self, suite: str, work: Path, packages: Path, python: Path) -> None:
        """packages: the directory of the .debs; python: site-packages for the kubelet, of all ABIs."""
        self.suite = suite
        self.container = Container(suite, work, {ROOT: "/srv/project", packages: "/srv/packages"})
        self.shared = self.container.shared
        shutil.copytree(python, self.shared / "python")
        os.mkfifo(self.shared / "input")
        self._events = self.shared / "events"
        self._events.touch()
        self._node: SimulatedNode | None = None
        self._heartbeats = contextlib.ExitStack()
        self.files_before: set[str] = set()  # the runner's: the system as it was before the installation
        self.install_kubelet("/var/lib/kubelet/device-plugins")

    # The cards.

    def plug(self, *cards: str) -> None:
        """Cards, and firmware that lives."""
        self._node = SimulatedNode(self.shared / "node")
        for card in cards:
            self._node.add(card)
        self._heartbeats.enter_context(Ticker(self._node))

    def chip(self, name: str) -> Chip:
        assert self._node
        return self._node.chip(name)

    # The kubelet.

    def install_kubelet(self, directory: str) -> None:
        self.container.write("/etc/systemd/system/kubelet.service", KUBELET % directory)

    def tell_kubelet(self, line: str) -> None:
        with (self.shared / "input").open("w") as commands:
            commands.write(line + "\n")

    def events(self, since: float, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """What the kubelet has seen: the events of a kind since a moment, with these values."""
        lines = self._events.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [
            event
            for event in events
            if event["event"] == kind and event["at"] >= since and wanted.items() <= event.items()
        ]

    def event(self, since: float, kind: str, timeout: float = PATIENCE, **wanted: Any) -> dict[str, Any]:
        """The first such event, as soon as there is one."""
        return wait_until(lambda: self.events(since, kind, **wanted), f"the kubelet to see {kind} {wanted}", timeout)[0]

    def last_events(self, number: int) -> str:
        return "\n".join(self._events.read_text().splitlines()[-number:])

    # The service.

    def properties(self, unit: str = UNIT) -> dict[str, str]:
        pairs = self.container("systemctl", "show", "--all", unit).splitlines()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def property(self, name: str, unit: str = UNIT) -> str:
        """A property of a unit; of systemd itself where the unit is empty."""
        return self.container("systemctl", "show", "--value", f"--property={name}", *filter(None, [unit])).strip()

    def status(self) -> str:
        return self.property("StatusText")

    def status_becomes(self, *parts: str, timeout: float = PATIENCE) -> str:
        """The status text, once it holds all these parts."""

        def text() -> str:
            status = self.status()
            return status if all(part in status for part in parts) else ""

        return wait_until(text, lambda: f"STATUS to say {parts}; it says {self.status()!r}", timeout)

    def journal(self, since: float = 0.0) -> list[tuple[int, str]]:
        """Priorities and messages of the daemon's own lines."""
        lines = self.container("journalctl", "--unit", UNIT, "--output=json", "--no-pager").splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{")]
        return [
            (int(entry["PRIORITY"]), str(entry["MESSAGE"]))
            for entry in entries
            if entry.get("SYSLOG_IDENTIFIER") == UNIT and int(entry["__MONOTONIC_TIMESTAMP"]) >= since * 1e6
        ]

    def line(self, since: float, part: str, timeout: float = PATIENCE) -> tuple[int, str]:
        """The daemon's first line that holds a text, as soon as there is one."""

        def found() -> list[tuple[int, str]]:
            return [entry for entry in self.journal(since) if part in entry[1]]

        return wait_until(found, f"a line with {part!r} in the journal", timeout)[0]

    def seconds_to_ready(self) -> float:
        """From the program's start to READY=1, by systemd's clock."""
        properties = self.properties()
        ready, begun = (int(properties[f"{name}TimestampMonotonic"]) for name in ("ActiveEnter", "ExecMainStart"))
        return (ready - begun) / 1e6

    def recover(self) -> None:
        """After a test that has failed: as the next one expects it."""
        if self.container.exists("/etc/tt-device-plugin"):
            self.container.write("/etc/tt-device-plugin/config.toml", CONFIGURATION)
        self.install_kubelet("/var/lib/kubelet/device-plugins")
        kubelet = "systemctl restart kubelet" if self._events.stat().st_size else "true"
        self.container.shell(
            f"rm -rf /etc/systemd/system/{UNIT}.service.d /var/snap; systemctl daemon-reload; systemctl reset-failed;"
            f"systemctl --no-block restart {UNIT}; {kubelet}",
            check=False,
        )

    def close(self) -> None:
        self._heartbeats.close()
        self.container.delete()
