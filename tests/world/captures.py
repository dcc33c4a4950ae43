"""What the real driver showed on emulated PCI functions, in compact form.

`data/captures.json` holds the trees and `data/uevents.json` the events.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
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
    """The names that `from_capture` and `capture` take."""
    return sorted(_stored("captures.json"))


def capture(name: str) -> dict[str, Any]:
    """One captured tree: `driver`, `module`, `directories`, `functions`, perhaps `events_on_load`.

    A function is `path` (below /sys/devices), `ordinal`, `dev`, `mode` (of the node), `by_id`,
    `pids`, `hwmon` (its number), the attributes of its three directories in `pci`, `class` and
    `sensors`, and `links`. Texts are without the newline that ends every attribute, and `config`,
    the beginning of PCI's configuration space, is in hex. In links `{path}`, `{bdf}`, `{N}`, `{H}`
    and `{dev}` stand for its own. `board` (what the emulated firmware knew) is there for a function
    whose attributes do not tell it.
    """
    stored = _stored("captures.json")[name]
    common = stored["common"]
    functions = [
        {
            **line,
            **{
                group: {**common.get(group, {}), **line[group]} for group in GROUPS if group in line
            },
        }
        for line in stored["functions"]
    ]
    return {key: value for key, value in stored.items() if key != "common"} | {
        "functions": functions
    }


def captured_uevents(name: str, step: str) -> list[tuple[str, str, dict[str, str]]]:
    """The kernel's events of one recorded step, as (action, devpath, environment).

    `wire` makes messages of them.

    The environment is without ACTION, DEVPATH and SEQNUM. `wakeup` events come from the emulated
    platform's ACPI.
    """
    return [(action, devpath, env) for action, devpath, env in _stored("uevents.json")[name][step]]


GROUPS = ("pci", "class", "sensors", "links")
DIRECTORIES = (
    "/sys/class/tenstorrent",
    "/sys/class/hwmon",
    "/sys/bus/pci/drivers/tenstorrent",
    "/proc/driver/tenstorrent",
    "/dev/tenstorrent",
    "/dev/tenstorrent/by-id",
)


def compact(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Reduce {path: entry} of a tree, captured or `observe`d, to what `capture` describes."""

    def text(path: str) -> str:
        if "hex" in entries[path]:
            return str(entries[path]["hex"])[: 2 * CONFIG_BYTES]
        content = str(entries[path]["content"])
        if content and (content == "\n" or not content.endswith("\n") or content.endswith("\n\n")):
            raise ValueError(f"{path} does not end in exactly one newline")
        return content.removesuffix("\n")

    def texts(directory: str, wanted: Callable[[str], object]) -> dict[str, str]:
        below = [path for path in entries if path.startswith(directory)]
        files = [path for path in below if entries[path]["type"] == "file"]
        names = [path.removeprefix(directory) for path in files]
        return {name: text(directory + name) for name in sorted(names) if wanted(name)}

    functions = []
    for char, entry in entries.items():
        if not char.startswith("/sys/dev/char/"):
            continue
        target = entry["target"].removeprefix("../../devices/")
        path, _, ordinal = target.partition("/tenstorrent/tenstorrent!")
        pci, bdf, dev = f"/sys/devices/{path}", path.rsplit("/")[-1], char.rsplit("/")[-1]
        numbered = re.compile(re.escape(pci) + r"/hwmon/hwmon(\d+)")
        hwmon = next((found[1] for p in entries if (found := numbered.fullmatch(p))), "")
        parts = (path, bdf, f"tenstorrent!{ordinal}", f"hwmon{hwmon}", dev)
        templates = ("{path}", "{bdf}", "tenstorrent!{N}", "hwmon{H}", "{dev}")

        def templated(
            name: str, parts: Sequence[str] = parts, templates: Sequence[str] = templates
        ) -> str:
            for part, template in zip(parts, templates, strict=True):
                name = re.sub(rf"(?<=/){re.escape(part)}(?=/|$)", template, name)
            return name

        own = [p for p, e in entries.items() if e["type"] == "link" and p.startswith("/sys/")
               and (bdf in f"{p} {e['target']}".replace("/", " ").split() or p == char)
               and not p.endswith(("firmware_node", "iommu_group"))]  # fmt: skip
        node = entries.get(f"/dev/tenstorrent/{ordinal}", {})
        pids = entries.get(f"/proc/driver/tenstorrent/{ordinal}/pids")
        shown = re.compile("tt_.*|dev|uevent|pcie_.*")
        sensor = re.compile(SENSOR.pattern + "|uevent")
        groups = {
            "pci": texts(f"{pci}/", PCI_ATTRIBUTES.__contains__),
            "class": texts(f"{pci}/tenstorrent/tenstorrent!{ordinal}/", shown.match),
            "sensors": texts(f"{pci}/hwmon/hwmon{hwmon}/", sensor.fullmatch),
            "links": {templated(p): templated(entries[p]["target"]) for p in own},
        }
        by_id = [path for path in entries if path.startswith("/dev/tenstorrent/by-id/")]
        own_ids = [path for path in by_id if entries[path]["target"] == f"../{ordinal}"]
        functions.append({
            "path": path, "ordinal": int(ordinal), "dev": dev, "mode": node.get("mode"),
            "by_id": sorted(path.rsplit("/")[-1] for path in own_ids),
            "pids": pids and pids["content"], "hwmon": int(hwmon) if hwmon else None,
            **{group: values for group, values in groups.items() if values},
        })  # fmt: skip
    return {
        "driver": text("/sys/module/tenstorrent/version")
        if "/sys/module/tenstorrent/version" in entries
        else None,
        "module": texts("/sys/module/tenstorrent/", {"version", "initstate"}.__contains__),
        "directories": [directory for directory in DIRECTORIES if directory in entries],
        "functions": sorted(functions, key=lambda function: function["ordinal"]),
    }
