"""The simulated node shows what the captures of the real driver show."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.world.cards import capture, capture_names, captured_uevents
from tests.world.node import NOT_SIMULATED, Chip, SimulatedNode

NUMBERS = [(245, ordinal) for ordinal in range(32)]  # of every capture


def attributes(chip: Chip) -> dict[str, str]:
    """Return what can be read of a chip, by path below its directory in sysfs."""
    return {
        str(path.relative_to(chip.directory)): path.read_text().removesuffix("\n")
        for path in chip.directory.rglob("*")
        if path.is_file() and not path.is_symlink()
    }


def captured_attributes(function: dict[str, Any]) -> dict[str, str]:
    """Return the same of a captured function."""
    places = {
        "pci": "",
        "class": f"tenstorrent/tenstorrent!{function['ordinal']}/",
        "sensors": f"hwmon/hwmon{function['hwmon']}/",
    }
    return {
        place + name: text
        for group, place in places.items()
        for name, text in function.get(group, {}).items()
        if name not in NOT_SIMULATED
    }


@pytest.mark.parametrize("name", capture_names())
def test_every_capture_round_trips(short_tmp: Path, name: str) -> None:
    """A tree built from a capture has its attributes, links and numbers, and no other devices."""
    node = SimulatedNode.from_capture(short_tmp, name, numbers=NUMBERS)
    facts = capture(name)

    assert {each.path for each in node.chips} == {each["path"] for each in facts["functions"]}
    for function in facts["functions"]:
        chip = node.chip(function["ordinal"])
        assert attributes(chip) == captured_attributes(function) and chip.path == function["path"]
        assert function["pids"] == (chip.pids.read_text() if chip.pids.exists() else None)

        for link, target in function["links"].items():
            own = {"bdf": chip.bdf, "path": chip.path, "N": chip.ordinal}
            if "hwmon" not in link:
                path = node.root / link[1:].format(**own)
                assert str(path.readlink()) == target.format(**own)


BOARDS: dict[str, list[dict[str, Any]]] = {
    "n150": [{"card": "n150"}],
    "p150ax2": [{"card": "p150a"}] * 2,
    "p300cx2": [{"card": "p300c"}] * 2,
    "n300x4-numa2": [{"card": "n300", "bdf": f"0000:{bus}:00.0", "numa_node": numa}
                     for bus, numa in (("a1", 1), ("a2", 1), ("21", 0), ("22", 0))],
    "galaxy-wormhole": [{"card": "galaxy-wormhole"}],
    "galaxy-blackhole": [{"card": "galaxy-blackhole"}],
}  # fmt: skip


def anonymous(texts: dict[str, str], name: str) -> dict[str, str]:
    """Return attributes without the digits of IDs, and without what each machine has of its own."""
    left_out = ("tt_heartbeat", "numa_node" if name.startswith("galaxy") else "tt_heartbeat")
    kept = {path: text for path, text in texts.items() if not path.endswith(left_out)}
    ids = {path: kept[path] for path in kept if path.endswith(("tt_serial", "tt_asic_id"))}
    return kept | {path: re.sub("[0-9A-F]", "#", text) for path, text in ids.items()}


@pytest.mark.parametrize("name", BOARDS)
def test_added_boards_look_like_captured_ones(short_tmp: Path, name: str) -> None:
    """`add` gives a board the captured addresses, attributes, values and ordinals."""
    node = SimulatedNode(short_tmp, numbers=NUMBERS)
    for board in BOARDS[name]:
        node.add(**board)
    functions = {each["path"].rpartition("/")[2]: each for each in capture(name)["functions"]}
    addresses = sorted(functions)

    assert sorted(chip.bdf for chip in node.chips) == addresses
    for bdf in addresses:
        expected = captured_attributes(functions[bdf])
        assert anonymous(attributes(node.chip(bdf)), name) == anonymous(expected, name)

    # Chips of one board have one serial, whatever it is.
    ours = [node.chip(bdf).telemetry["tt_serial"] for bdf in addresses]
    theirs = [functions[bdf]["class"]["tt_serial"] for bdf in addresses]
    assert list(map(ours.index, ours)) == list(map(theirs.index, theirs))


# -- uevents ---------------------------------------------------------------------------------------
Operation = Callable[[], object]


def of_chips(events: Iterable[tuple[str, str, dict[str, str]]]) -> list[tuple[str, ...]]:
    """Return address, action, class device and IDs of each event, in their order, chip by chip."""
    chosen = []
    for action, devpath, env in events:
        device = re.search(r"/([^/]+)(/tenstorrent/tenstorrent!\d+)?$", devpath)
        if env["SUBSYSTEM"] in ("pci", "tenstorrent") and device:
            chosen.append((device[1], action, device[2] or "", env.get("PCI_ID", "")))
    return sorted(chosen, key=lambda event: event[0])


def replay(node: SimulatedNode, name: str, steps: dict[str, Operation]) -> None:
    """Let things happen, whose events about chips must be those of the recorded steps."""
    events: list[tuple[str, str, dict[str, str]]] = []

    def record(message: bytes) -> None:
        env = dict(each.split("=", 1) for each in message.decode().split("\0")[1:-1])
        events.append((env["ACTION"], env["DEVPATH"], env))

    node.on_uevent = record
    for step, operation in steps.items():
        events.clear()
        operation()
        found, expected = of_chips(events), of_chips(captured_uevents(name, step))
        # Wormhole's driver shows telemetry before or behind `bind`, at random.
        in_order: Callable[..., Any] = sorted if name.startswith("n150") else list
        assert in_order(found) == in_order(expected), step


@pytest.mark.parametrize(("name", "card"), [("p150ax2", "p150a"), ("n150", "n150")])
def test_the_life_of_a_chip_replays(short_tmp: Path, name: str, card: str) -> None:
    """From the load of the driver to the removal of a dead function."""
    node = SimulatedNode(short_tmp, numbers=NUMBERS)
    for _ in capture(name)["functions"]:
        node.add(card)
    node.unload_driver()
    chip = node.chip("0000:01:00.0")

    def vanish_dead() -> None:
        chip.die()
        chip.vanish()

    steps: dict[str, Operation] = {
        "module-load": node.load_driver, "pci-remove": chip.vanish, "pci-rescan": chip.come_back,
        "unbind": chip.unbind, "bind": chip.bind, "rmmod": node.unload_driver,
        "modprobe-again": node.load_driver, "unplug-surprise-bus-dead": vanish_dead,
    }  # fmt: skip
    replay(node, name, steps)


@pytest.mark.parametrize("card", ["n150", "p150a"])
def test_late_firmware_replays(short_tmp: Path, card: str) -> None:
    """Wormhole's driver polls for telemetry; Blackhole's asks once, and must be bound again."""
    node = SimulatedNode(short_tmp, numbers=NUMBERS)
    (chip,) = node.add(card, firmware=False)
    node.unload_driver()

    steps: dict[str, Operation] = {
        "module-load-not-ready": node.load_driver,
        "firmware-becomes-ready": chip.speak,
    }
    if card == "p150a":
        steps["unbind-bind-when-ready"] = chip.rebind
    replay(node, f"{card}-late", steps)
    assert chip.hwmon is not None
