"""A stand-in for the daemon: answers on the status socket with a view of a simulated node.

The view is made by the program's own functions, of chips that are looked at when it is asked for.
Commands print what depends on it and on sysfs alone, so their tests need no daemon.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import math
import socketserver
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ttdp
from tests.world.node import Chip, SimulatedNode
from tests.world.simulation import kernel_errors

JSON = dict[str, Any]
SINCE = calendar.timegm((2025, 11, 28, 17, 38, 0))  # when each fault began
TEXTS = {  # of faults that a single look does not show
    "blocked": ttdp.BLOCKED.text,
    "read_error": "telemetry cannot be read: tt_heartbeat: Input/output error",
    "stalled": "heartbeat stalled at 7 (firmware stopped)",
    "hot": "too hot: 95.0 °C, limit 90 °C; check the cooling",
    "tripped": "thermal trip; check the cooling",
}


class Service:
    """The daemon of a node, for `with`; its socket and runtime directory are in `directory`."""

    def __init__(self, node: SimulatedNode, directory: Path) -> None:
        self.node = node
        self.path = directory / ttdp.STATUS_SOCKET
        self.pods: dict[str, list[JSON] | None] = {}  # by address; None: not known
        self.processes: dict[str, list[JSON] | None] = {}
        self.faults: dict[str, str] = {}  # kinds that the tree does not show, by address
        self.excluded: set[str] = set()
        self.more: JSON = {}  # other values of the view
        self.rows: dict[str, JSON] = {}  # other values of chips' rows, by address
        self.settings: JSON = {}  # other settings
        self.problems: list[JSON] = []
        self.answer: bytes | None = None  # instead of a view
        self.before: Callable[[], object] = lambda: None  # called before each answer
        self._settings = ttdp.Settings(
            root=str(node.root),
            device_plugin_dir=f"{directory}/dp",
            cdi_dir=f"{directory}/cdi",
            runtime_dir=str(directory),
            health=ttdp.HealthSettings(interval=0.1),
        )
        self._errors = contextlib.ExitStack()

    def __enter__(self) -> Service:
        answer = self._answer

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(answer())

        self._errors.enter_context(kernel_errors())
        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.path.unlink(missing_ok=True)
        self._errors.close()

    def stop(self) -> None:
        """Go away, as a daemon that was killed: the socket's file stays."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self) -> bytes:
        self.before()
        return json.dumps(self.view()).encode() if self.answer is None else self.answer

    def view(self) -> JSON:
        """Return the view of this moment."""
        settings = replace(self._settings, exclude=tuple(self.excluded))
        with self.node.lock:
            driver = ttdp.driver_version(settings)
            bus = ttdp.scan(settings, {}, driver_is_loaded=driver is not None)
            chips = {card.bdf: self._chip(card, bus.get(card.bdf)) for card in self.node.chips}

        decision = ttdp.decide(settings, chips, driver=driver)
        faults = [problem for problem in ttdp.problems_of(decision) if problem.level == "FAIL"]
        made = ttdp.view_of_node(
            decision, {}, faults, status="", rejected=None, knows_pods=True, booted_at=SINCE
        )
        view: JSON = json.loads(json.dumps(made))
        for row in view["chips"]:
            row["pods"] = self.pods.get(row["bdf"], [])
            if not chips[row["bdf"]].function.driver or chips[row["bdf"]].is_present:
                row["processes"] = self.processes.get(row["bdf"], [])
            row |= self.rows.get(row["bdf"], {})
        view["settings"] |= self.settings
        view["problems"] += self.problems
        return view | self.more

    def _chip(self, card: Chip, function: ttdp.PciFunction | None) -> ttdp.Chip:
        """Return a chip that was seen since boot, and is looked at once more."""
        if function is None:
            subsystem = int(card.pci["subsystem_device"], 16)
            function = ttdp.PciFunction(card.bdf, card.arch, subsystem, on_bus=False)

        chip = ttdp.Chip(function, is_listed=True)
        if card.has_reported:  # if it does not any more, it is silent at once
            known = ("tt_card_type", "tt_serial", "tt_asic_id", "tt_fw_bundle_ver")
            identity = ttdp.Identity(*(card.telemetry.get(name) for name in known))
            chip = chip._replace(identity=identity, vitals=ttdp.Vitals(silent_since=-math.inf))
        if chip.is_present and (reading := ttdp.read_chip(self._settings, function, is_poll=True)):
            chip = chip.read(reading, None)

        kind = "stalled" if card.frozen else self.faults.get(card.bdf)
        if kind in TEXTS and not chip.telemetry_fault:
            chip = chip._replace(telemetry_fault=ttdp.Fault(ttdp.Kind(kind), TEXTS[kind]))
        return chip.dated(0.0)


def problem(level: str, subject: str, text: str, command: str = "", kind: str = "") -> JSON:
    """Return an entry of the view's problems."""
    values = (level, subject, kind, text, command)
    return dict(zip(("level", "subject", "kind", "problem", "command"), values, strict=True))
