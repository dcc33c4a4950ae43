"""The simulated node shows what the captures of the real driver show."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.world.captures import capture, capture_names, captured_tree, captured_uevents
from tests.world.node import SimulatedNode, wire

NUMBERS = [(245, ordinal) for ordinal in range(32)]  # of every capture
Build = Callable[..., SimulatedNode]


@pytest.fixture
def events() -> list[bytes]:
    return []


@pytest.fixture
def build(short_tmp: Path, events: list[bytes]) -> Build:
    """Make a node of these cards with the captures' numbers, whose uevents go into `events`."""

    def build(*cards: str, firmware: bool = True) -> SimulatedNode:
        node = SimulatedNode(short_tmp, numbers=NUMBERS)
        for card in cards:
            node.add(card, firmware=firmware)
        node.on_uevent = events.append
        return node

    return build


def recorded(name: str, step: str) -> list[bytes]:
    """Return the step's kernel messages, without those of the platform's ACPI, all of number 0."""
    messages = captured_uevents(name, step)
    return [wire(*message, 0) for message in messages if message[2]["SUBSYSTEM"] != "wakeup"]


def taken(events: list[bytes]) -> list[bytes]:
    """Return and remove the events so far."""
    messages = [*events]
    events.clear()
    return messages


# -- trees -----------------------------------------------------------------------------------------
def observed_tree(node: SimulatedNode, expected: dict[str, str]) -> dict[str, str]:
    """Return a node's tree in the form of captured_tree(), without what no capture has."""
    tree = {}
    for directory, directories, files in os.walk(node.root):
        for path in (Path(directory, name) for name in directories + files):
            name = f"/{path.relative_to(node.root)}"
            if path.name in ("rescan", "bind", "unbind"):
                continue

            if path.is_symlink():
                tree[name] = f"-> {path.readlink()}"
            elif path.is_dir():
                tree[name] = "directory"
            elif path.name == "config":
                tree[name] = path.read_bytes().hex()
            else:
                text = path.read_text()
                assert not text.endswith("\n\n") and (not text or text.endswith("\n")), name
                tree[name] = text.removesuffix("\n")

    not_captured = re.compile(
        r"/dev/tenstorrent/(\d+$|by-pci)|/(sys/module|proc/sys|run)/|.*/module$"
    )
    return {
        path: value
        for path, value in tree.items()
        if path in expected or not (value == "directory" or not_captured.match(path))
    }


@pytest.mark.parametrize("name", capture_names())
def test_every_capture_round_trips(short_tmp: Path, name: str) -> None:
    """A tree built from a capture has its names, contents, links and numbers, and no others."""
    node = SimulatedNode.from_capture(short_tmp, name, numbers=NUMBERS)
    expected = captured_tree(name)

    assert observed_tree(node, expected) == expected


BOARDS: dict[str, list[dict[str, Any]]] = {
    "n150": [{"card": "n150"}],
    "p150ax2": [{"card": "p150a"}] * 2,
    "p300cx2": [{"card": "p300c"}] * 2,
    "n300x4-numa2": [{"card": "n300", "bdf": f"0000:{bus}:00.0", "numa_node": numa}
                     for bus, numa in (("a1", 1), ("a2", 1), ("21", 0), ("22", 0))],
    "galaxy-wormhole": [{"card": "galaxy-wormhole"}],
    "galaxy-blackhole": [{"card": "galaxy-blackhole"}],
}  # fmt: skip
CHIPS_OWN = {"tt_serial": "[0-9A-F]{16}", "tt_asic_id": "[0-9A-F]{16}", "tt_heartbeat": r"\d+"}


def anonymous(tree: dict[str, str], name: str) -> dict[str, str]:
    """Return a tree's functions without IDs, heartbeats and addresses."""
    result = {}
    for path, value in tree.items():
        attribute = path.rpartition("/")[2]
        if path.startswith("/dev/tenstorrent/by-id/"):
            path = f"{path.rpartition('-')[0]} {value}"

        if attribute in CHIPS_OWN:
            assert re.fullmatch(CHIPS_OWN[attribute], value)
            value = "own"
        elif attribute == "config":
            value = value[:0x20] + value[0x50:]
        elif name.startswith("galaxy") and attribute in ("numa_node", "local_cpulist"):
            value = ""

        if value != "directory":
            result[path] = value
    return result


@pytest.mark.parametrize("name", BOARDS)
def test_added_boards_look_like_captured_ones(short_tmp: Path, name: str) -> None:
    """`add` gives a board the captured names, values, links and ordinals.

    Only IDs, heartbeat, a Galaxy's NUMA nodes and addresses in the configuration space are others.
    """
    node = SimulatedNode(short_tmp, numbers=NUMBERS)
    for board in BOARDS[name]:
        node.add(**board)
    expected = captured_tree(name)
    observed = observed_tree(node, expected)

    # Chips of one board have one serial, whatever it is.
    boards = []
    for tree in (observed, expected):
        serials = [tree[path] for path in sorted(tree) if path.endswith("/tt_serial")]
        boards.append([serials.index(serial) for serial in serials])

    assert boards[0] == boards[1]
    assert anonymous(observed, name) == anonymous(expected, name)


# -- uevents ---------------------------------------------------------------------------------------

# Wormhole's driver shows telemetry before or behind `bind`, at random.
TELEMETRY_CAME_LATE = [("n150", "module-load"), ("n150", "bind")]


@pytest.mark.parametrize(("name", "card"), [("p150ax2", "p150a"), ("n150", "n150")])
def test_the_life_of_a_chip_replays(
    build: Build, events: list[bytes], name: str, card: str
) -> None:
    """Message by message, from the load of the driver to the removal of a dead function."""
    node = build(*[card] * len(capture(name)["functions"]))
    chip = node.chip("0000:01:00.0")
    node.unload_driver()
    taken(events)

    def vanish_dead() -> None:
        chip.die(bus=True)
        chip.vanish()

    steps: dict[str, Callable[[], object]] = {
        "module-load": node.load_driver, "pci-remove": chip.vanish, "pci-rescan": chip.come_back,
        "unbind": chip.unbind, "bind": chip.bind, "rmmod": node.unload_driver,
        "modprobe-again": node.load_driver, "unplug-surprise-bus-dead": vanish_dead,
    }  # fmt: skip
    for step, operation in steps.items():
        operation()

        found, expected = taken(events), recorded(name, step)
        if (name, step) in TELEMETRY_CAME_LATE:
            found.sort()
            expected.sort()
        assert found == expected, step


@pytest.mark.parametrize(("card", "remedy"), [("n150", "speak"), ("p150a", "rebind")])
def test_late_firmware_replays(build: Build, events: list[bytes], card: str, remedy: str) -> None:
    """Wormhole's driver polls for telemetry; Blackhole's asks once, and must be bound again."""
    node = build(card, firmware=False)
    node.unload_driver()
    taken(events)
    node.load_driver()

    assert taken(events) == recorded(f"{card}-late", "module-load-not-ready")

    node.chips[0].speak()
    assert taken(events) == recorded(f"{card}-late", "firmware-becomes-ready")

    if remedy == "rebind":
        node.chips[0].rebind()
        assert taken(events) == recorded(f"{card}-late", "unbind-bind-when-ready")
