"""Recordings of the real driver on emulated PCI functions, in compact form.

`data/captures.json` has the trees and `data/uevents.json` the kernel's events.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
SENSOR = re.compile(r"(temp|power|in|curr|fan)\d+_\w+|name")


@functools.cache
def _stored(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / file).read_text())
    return loaded


def capture_names() -> list[str]:
    """Return the names of all captures."""
    return sorted(_stored("captures.json"))


def capture(name: str) -> dict[str, Any]:
    """Return a capture: `driver`, `module`, `directories`, `functions`.

    A function has `path` (below /sys/devices), `ordinal`, `by_id`, `pids`, `hwmon` (its number),
    the attributes of its directories in `pci`, `class` and `sensors`, and `links`, with
    placeholders.
    """
    stored = _stored("captures.json")[name]

    functions = []
    for line in stored["functions"]:
        common = {group: values | line[group] for group, values in stored["common"].items()
                  if group in line}  # fmt: skip
        functions.append(line | common)

    return {**stored, "functions": functions}


def captured_uevents(name: str, step: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the kernel's events of one recorded step, as (action, devpath, other variables)."""
    return [(action, devpath, env) for action, devpath, env in _stored("uevents.json")[name][step]]
