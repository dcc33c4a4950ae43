"""A stand-in for the daemon: answers on the status socket with its view of a simulated node.

What commands print depends on this view and on sysfs alone, so their tests need no daemon. That the
daemon's own view has the same form, tests/test_list.py shows.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socketserver
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ttdp
from tests.world.node import Chip, SimulatedNode

JSON = dict[str, Any]
SINCE = "2025-11-28T17:38:00Z"  # when each fault began
TEXTS = {
    "gone": "PCI device is gone",
    "no_driver": "driver is not bound",
    "node": "device file is missing",
    "resetting": "resetting (no telemetry)",
    "no_response": "chip does not respond (registers read as ones)",
    "blocked": "telemetry read timed out",
    "read_error": "telemetry cannot be read: tt_heartbeat: Input/output error",
    "stalled": "heartbeat stalled at 7 (firmware stopped)",
    "hot": "too hot: 95.0 °C, limit 90 °C; check the cooling",
    "tripped": "thermal trip; check the cooling",
    "silent": "firmware reports no telemetry",
}


def has_device_file(chip: Chip) -> bool:
    """Return whether a chip's device file is the one that sysfs names."""
    try:
        status = chip.device_node.stat()
    except (LookupError, OSError):
        return False
    number = f"{status.st_rdev >> 8}:{status.st_rdev & 255}"
    return stat.S_ISCHR(status.st_mode) and number == chip.attribute("dev").read_text().strip()


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

    def __enter__(self) -> Service:
        answer = self._answer

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.sendall(answer())

        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """Go away, as a daemon that was killed: the socket's file stays."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self) -> bytes:
        self.before()
        return json.dumps(self.view()).encode() if self.answer is None else self.answer

    def view(self) -> JSON:
        """Return the view of this moment."""
        with self.node.lock:
            chips = sorted(self.node.chips, key=lambda chip: chip.bdf)
            kinds = {chip.bdf: self._kind(chip) for chip in chips}
            rows = [self._row(chip, kinds[chip.bdf]) for chip in chips]

        settings = json.loads(json.dumps(dataclasses.asdict(self._settings))) | self.settings
        return {
            "program": "tt-device-plugin",
            "version": ttdp.__version__,
            "status": "",
            "settings": settings,
            "rejected": None,
            "driver": ".".join(map(str, self.node.version)) if self.node.is_loaded else None,
            "unsupported": [],
            "chips": rows,
            "resources": [],
            "problems": [*self._faults(kinds), *self.problems],
            **self.more,
        }

    def _kind(self, chip: Chip) -> str:
        """Return the kind of a chip's fault; empty: none."""
        if not chip.present:
            return "gone"
        if chip.driver != "tenstorrent":
            return "no_driver"
        if not has_device_file(chip):
            return "node"
        if chip.condition != "healthy":
            return "resetting" if chip.condition == "resetting" else "no_response"
        if chip.frozen:
            return "stalled"
        kind = self.faults.get(chip.bdf, "")
        return "" if kind == "silent" and chip.hwmon is not None else kind

    def _row(self, chip: Chip, kind: str) -> JSON:
        """Return a chip as `list --json` shows it."""
        known = chip.telemetry if chip.firmware else {}
        card = chip.telemetry["tt_card_type"]
        board = re.sub(r"^([np]\d+)[a-z]$", r"\1", card)
        is_live = chip.hwmon is not None and not kind
        is_excluded = chip.bdf in self.excluded
        numa = int(chip.pci["numa_node"])
        row = {
            "id": chip.bdf,
            "index": chip.ordinal,
            "path": str(chip.device_node) if has_device_file(chip) else None,
            "bdf": chip.bdf,
            "card": card,
            "board": board,
            "arch": chip.arch,
            "serial": known.get("tt_serial"),
            "asic_id": known.get("tt_asic_id"),
            "numa_node": numa if numa >= 0 else None,
            "firmware": known.get("tt_fw_bundle_ver"),
            "temperature": int(chip.sensors["temp1_input"]) / 1000 if is_live else None,
            "power": int(chip.sensors["power1_input"]) / 1e6 if is_live else None,
            "healthy": None if is_excluded else not kind,
            "reason": f"{TEXTS[kind]}; run: tt-device-plugin fix {chip.bdf}" if kind else None,
            "withheld": None,
            "resource": None if is_excluded else f"tenstorrent.com/{board}",
            "replicas": 0,
            "pods": self.pods.get(chip.bdf, []),
            "processes": self.processes.get(chip.bdf, []),
            "excluded": is_excluded,
            "since": SINCE if kind and not is_excluded else None,
        }
        if chip.driver not in ("", "tenstorrent"):  # a virtual machine may use it
            row["processes"] = None
        return row | self.rows.get(chip.bdf, {})

    def _faults(self, kinds: dict[str, str]) -> Iterator[JSON]:
        for bdf, kind in kinds.items():
            if kind and bdf not in self.excluded:
                helps = f"tt-device-plugin fix {bdf}"
                command = helps if kind not in ("hot", "tripped") else ""
                yield problem("FAIL", bdf, TEXTS[kind], command, kind)


def problem(level: str, subject: str, text: str, command: str = "", kind: str = "") -> JSON:
    """Return an entry of the view's problems."""
    return {
        "level": level,
        "subject": subject,
        "kind": kind,
        "problem": text,
        "command": command,
    }
