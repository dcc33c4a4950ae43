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
PCI_ATTRIBUTES = (
    "vendor", "device", "subsystem_vendor", "subsystem_device", "class", "revision",
    "numa_node", "local_cpulist", "current_link_speed", "current_link_width",
    "max_link_speed", "max_link_width", "modalias", "driver_override",
    "config", "uevent", "aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal",
)  # fmt: skip
CONFIG_BYTES = 64  # of the configuration space: its header, all that an ordinary user may read
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
    placeholders. `config`, the beginning of the PCI configuration space, is in hex. `board` is what
    the firmware knew, if the attributes do not show it.
    """
    stored = _stored("captures.json")[name]

    functions = []
    for line in stored["functions"]:
        common = {group: values | line[group] for group, values in stored["common"].items()
                  if group in line}  # fmt: skip
        functions.append(line | common)

    return {**stored, "functions": functions}


def captured_tree(name: str) -> dict[str, str]:
    """Return a captured tree as attributes' contents, links' targets and directories, by path."""
    facts = capture(name)
    tree = dict.fromkeys(facts["directories"], "directory")
    for key, value in facts["module"].items():
        tree[f"/sys/module/tenstorrent/{key}"] = value

    for function in facts["functions"]:
        pci, ordinal = f"/sys/devices/{function['path']}", function["ordinal"]
        places = {
            "pci": pci,
            "class": f"{pci}/tenstorrent/tenstorrent!{ordinal}",
            "sensors": f"{pci}/hwmon/hwmon{function['hwmon']}",
        }
        for group, place in places.items():
            tree |= {f"{place}/{key}": value for key, value in function.get(group, {}).items()}

        own = {"bdf": pci.rpartition("/")[2], "path": function["path"]}
        own |= {"N": ordinal, "H": function["hwmon"]}
        for link, target in function["links"].items():
            tree[link.format(**own)] = f"-> {target.format(**own)}"

        tree |= {f"/dev/tenstorrent/by-id/{link}": f"-> ../{ordinal}" for link in function["by_id"]}
        if function["pids"] is not None:
            tree[f"/proc/driver/tenstorrent/{ordinal}/pids"] = function["pids"]
    return tree


def captured_uevents(name: str, step: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the kernel's events of one recorded step, as (action, devpath, other variables)."""
    return [(action, devpath, env) for action, devpath, env in _stored("uevents.json")[name][step]]
