"""Inventory: a node is seen as the real driver's captures are, and garbage in it harms nothing."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.conftest import StartDaemon
from tests.world.cards import capture, capture_names
from tests.world.kubelet import Kubelet
from tests.world.node import CARDS, Chip, SimulatedNode
from tests.world.processes import workspace
from tests.world.simulation import WatchedNode, settings_of
from ttdp import Kind, Mount, Reading, Settings

# The values of a chip's attributes, and the form in which the driver writes them.
VALUES: dict[str, tuple[Callable[[Reading], Any], str]] = {
    "tt_card_type": (lambda reading: reading.identity.card, "(?!unknown$)[a-z][a-z0-9-]*"),
    "tt_serial": (lambda reading: reading.identity.serial, "[0-9A-F]{16}"),
    "tt_asic_id": (lambda reading: reading.identity.asic_id, "[0-9A-F]{16}"),
    "tt_fw_bundle_ver": (lambda reading: reading.identity.firmware, r"\d+(\.\d+)+"),
    "tt_therm_trip_count": (lambda reading: reading.trips, r"-?\d+"),
    "temp1_input": (lambda reading: reading.temperature, r"\d+"),
    "temp1_max": (lambda reading: reading.throttles_at, r"\d+"),
    "tt_heartbeat": (lambda reading: reading.heartbeat, r"-?\d+"),
}
SENSORS = [sensor.attribute for sensor in ttdp.SENSORS]


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    """A Blackhole alone on a node."""
    return node.add("p150a")[0]


@pytest.fixture
def settings(node: SimulatedNode) -> Settings:
    return settings_of(node, node.root)


def found(chip: Chip) -> ttdp.Chip:
    """Return the chip as a first scan finds it."""
    watched = WatchedNode(chip.node)
    watched.scan()
    return watched.chips[chip.bdf]


# -- what is found ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", capture_names())
def test_a_captured_node_is_seen_as_it_was(short_tmp: Path, name: str) -> None:
    """Functions with device file, architecture, card and NUMA node; attributes, and no others."""
    node = SimulatedNode.from_capture(short_tmp / "node", name)
    watched = WatchedNode(node)
    watched.scan()

    facts = {each["path"].rsplit("/")[-1]: each for each in capture(name)["functions"]}
    assert watched.chips.keys() == facts.keys()
    for address, fact in facts.items():
        function = watched.chips[address].function
        path = f"{node.root}/dev/tenstorrent/{fact['ordinal']}"
        assert (function.number, function.path) == (fact["ordinal"], path)
        assert (function.driver, function.file_fault) == ("tenstorrent", None)
        if "pci" not in fact:
            continue

        pci, reading = fact["pci"], watched.read(function)
        assert function.arch == {"0x401e": "wormhole", "0xb140": "blackhole"}[pci["device"]]
        assert function.subsystem == int(pci["subsystem_device"], 16)
        numa_node = int(pci["numa_node"])
        assert function.numa_node == (None if numa_node < 0 else numa_node)

        texts = pci | fact.get("class", {}) | fact.get("sensors", {})
        assert reading and reading.fault is None
        assert reading.is_silent is texts.keys().isdisjoint(VALUES)
        for attribute, (value_of, _) in VALUES.items():
            value = value_of(reading)
            if attribute.startswith("temp1") and value is not None:
                value = round(value * 1000)
            assert (None if value is None else str(value)) == texts.get(attribute)
        assert reading.sensors.keys() == texts.keys() & {*SENSORS}


def test_the_pci_subsystem_indicates_the_card(chip: Chip) -> None:
    """A Galaxy Blackhole with 7 of 8 memory tiles is a Galaxy, with less memory."""
    codes = {card: each.code for card, each in CARDS.items()}
    assert {card: code for code, card in ttdp.CARDS.items() if code != 0x202} == codes
    assert {ttdp.board_of_card(card) for card in codes} == ttdp.MEMORY.keys()

    cards = {"0x0047": ("galaxy-blackhole", 32768), "0x0202": ("galaxy-blackhole", 28672)}
    for code, expected in (cards | {"0x0043": ("p100a", 28672), "x": (None, 0)}).items():
        chip.write("subsystem_device", f"{code}\n".encode())
        assert (found(chip).card_type, found(chip).memory) == expected


@pytest.mark.parametrize(
    ("attribute", "text", "is_named"),
    [("vendor", b"0x10de\n", False), ("device", b"0xfaca\n", True), ("device", b"x\n", True)],
)
def test_a_generation_that_is_not_known_is_named_and_never_a_chip(
    node: SimulatedNode, attribute: str, text: bytes, is_named: bool
) -> None:
    """Other vendors' functions are ignored."""
    strange, known = node.add("p150a") + node.add("n150")
    strange.write(attribute, text)
    watched = WatchedNode(node)
    for _ in range(2):
        watched.scan()
        assert watched.inventory.unsupported == ((strange.bdf,) if is_named else ())
        assert watched.chips.keys() == {known.bdf}


def test_chips_that_come_and_go_are_seen_as_they_are_or_not_at_all(node: SimulatedNode) -> None:
    """At every step of a plug, a rebinding, a renumbering and a removal, none is another card."""
    watched = WatchedNode(node)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        watched.scan()
        for each in watched.inventory.present:
            card = CARDS["n300" if each.address == "0000:01:00.0" else "p150a"]
            assert each.subsystem == card.code

    node.on_step = step
    first, second = node.add("n300", numa_node=0) + node.add("p150a", numa_node=1)
    first.rebind()
    node.swap_ordinals(first.bdf, second.bdf)
    second.vanish()

    assert steps > 100 and len(watched.chips) == 2


def test_the_driver_has_a_version_while_it_is_loaded(
    node: SimulatedNode, settings: Settings
) -> None:
    """Any text, with control characters escaped, as it is printed on terminals; or none."""
    file = node.root / "sys/module/tenstorrent/version"
    file.unlink()
    assert ttdp.driver_version(settings) == "unknown"
    file.write_bytes(b"2.1\x1b[2J\xff\n")
    assert ttdp.driver_version(settings) == r"2.1\x1b[2J�"

    node.unload_driver()
    assert ttdp.driver_version(settings) is None


# -- garbage, and errors of the daemon itself ------------------------------------------------------

IDS = ["vendor", "device", "subsystem_device", "numa_node"]
NEARLY = [
    "1_000", "+7", "٣", "0x10", "nan", "9" * 5000, "1.2.3.4", "unknown", "1.٣.0.0", "F" * 16,
    "ABCDEF0123456789", f"{'9' * 400} GT/s", f"TOTAL_ERR_COR {'9' * 400}",
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Chip]:
    """A p150a whose attributes are overwritten, beside a sound one; many examples share it."""
    with workspace() as directory:
        yield SimulatedNode.from_capture(directory, "p150ax2").chip("0000:01:00.0")


@hypothesis_settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from([*VALUES, *SENSORS, *IDS]),
        st.binary(max_size=20) | st.sampled_from([each.encode() for each in NEARLY]),
        min_size=1,
    )
)
@example(dict.fromkeys([*VALUES, *SENSORS], b"1_000"))
@example(dict.fromkeys([*VALUES, *SENSORS], b"+7"))
@example({"numa_node": b"-1"})
def test_only_values_of_the_drivers_form_count(fuzzed: Chip, content: dict[str, bytes]) -> None:
    """Binary, empty, huge: nothing is raised, and the other chip is healthy."""
    for attribute, data in content.items():
        fuzzed.write(attribute, data)
    watched = WatchedNode(fuzzed.node)
    try:
        watched.look()
    finally:
        for attribute in content:
            fuzzed.show(attribute)

    assert watched.chips["0000:02:00.0"].fault is None
    if fuzzed.bdf in watched.chips and (reading := watched.chips[fuzzed.bdf].reading):
        assert (reading.function.numa_node or 0) >= 0
        for attribute, (value_of, form) in VALUES.items():
            text = content.get(attribute, b"").decode("ascii", "replace").strip()
            if attribute in content and value_of(reading) is not None:
                assert re.fullmatch(form, text, re.ASCII)
        assert all(0 <= value < math.inf for value in reading.sensors.values())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "listdir", "readlink", "stat"])
def test_a_scan_that_fails_changes_nothing(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Only "not found" means absence: no chip is gone, and the driver is as ever."""
    (node.add("n150") + node.add("n150"))[0].unbind()
    watched = WatchedNode(node)
    watched.look()
    before, driver = dict(watched.chips), watched.inventory.driver

    monkeypatch.setattr(f"os.{call}", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match=os.strerror(number)):
        watched.scan()
    assert (watched.chips, watched.inventory.driver) == (before, driver)


# -- device files ----------------------------------------------------------------------------------

HARM: dict[str, tuple[Callable[[Chip, Path], object], str]] = {
    "none": (lambda _, path: None, "does not exist"),
    "directory": (lambda _, path: path.mkdir(), "is not a character device"),
    "link to itself": (lambda _, path: path.symlink_to(path.name), "does not exist"),
    "other": (lambda _, path: path.symlink_to("/dev/zero"), "is device 1:5, but sysfs has 1:3"),
    "no number": (lambda chip, _: chip.remove("dev"), "is being removed"),
}


@pytest.mark.parametrize("what", HARM)
def test_a_device_file_is_the_one_whose_number_sysfs_has(chip: Chip, what: str) -> None:
    """udev can be slower than a scan, and a runtime can have made a directory there."""
    path = chip.device_node
    path.unlink()
    harm, text = HARM[what]
    harm(chip, path)
    assert found(chip).fault == (Kind.DEVICE_FILE, f"device file is invalid: {path} {text}")
    assert not found(chip).is_listed


opened: list[str] = []  # of files that can be a chip's, or show that the hook works


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and re.search("/dev/tenstorrent|/tt_heartbeat$", str(arguments[0])):
        opened.append(str(arguments[0]))


sys.addaudithook(_note_opening)  # sees every way of opening a file that Python has


async def test_no_device_file_is_ever_opened(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """That would power the chip up; and one that another program has with O_EXCL would block."""
    node.add("p150a")
    opened.clear()
    await start()
    await kubelet.run_pod("train", "tenstorrent.com/p150")
    assert opened and all(path.endswith("/tt_heartbeat") for path in opened)


# -- processes and mounts --------------------------------------------------------------------------


def test_processes_on_a_chip_are_named_and_those_of_pods_are_known(
    chip: Chip, settings: Settings
) -> None:
    """One that has it open twice is one; one without a name has ended, or is hidden."""
    function = found(chip).function
    chip.node.start_process(9, "0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope", "python3")
    chip.node.start_process(7, "0::/user.slice", "tt-smi")
    chip.set_pids([9, 7, 7, 5])

    assert ttdp.processes_on(settings, function) == [
        {"pid": 5, "command": "?", "of_pod": False},
        {"pid": 7, "command": "tt-smi", "of_pod": False},
        {"pid": 9, "command": "python3", "of_pod": True},
    ]
    chip.set_pids(range(1, 400_000))  # any user can open a device file so often
    assert len(ttdp.processes_on(settings, function) or ()) == 1000

    chip.set_pids([7, 0])  # of another namespace
    assert ttdp.processes_on(settings, function) is None
    chip.pids.unlink()
    assert ttdp.processes_on(settings, function) is None


def test_mounts_are_the_configured_ones_and_hugepages_that_exist(tmp_path: Path) -> None:
    """Below root. A configured mount need not exist; at the path of another it replaces that."""
    other, instead = Mount("/does/not/exist", "/x"), Mount("/mine", "/dev/hugepages-1G")
    large, small = (Mount(f"{tmp_path}/dev/{name}", f"/dev/{name}") for name in ttdp.HUGETLBFS)
    settings = Settings(root=str(tmp_path), mounts=(other,))
    assert ttdp.host_mounts(settings) == [other]

    for mount in (small, large):
        Path(mount.host).mkdir(parents=True)
    for hugepages, mounts in {"host": [small], "private": [small], "none": []}.items():
        settings = Settings(root=str(tmp_path), mounts=(other, instead), hugepages=hugepages)
        assert ttdp.host_mounts(settings) == [other, instead, *mounts]
    assert ttdp.host_mounts(Settings(root=str(tmp_path))) == [large, small]


def test_a_function_that_is_just_appearing_is_looked_at_again(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is there before its attributes. Any other error is the daemon's own."""
    (card,) = node.add("n150")
    watched = WatchedNode(node)
    for number in (errno.ENOENT, errno.EIO):
        with monkeypatch.context() as patch:
            patch.setattr(ttdp, "read_attribute", Mock(side_effect=OSError(number, "")))
            with contextlib.nullcontext() if number in ttdp.ABSENT else pytest.raises(OSError):
                watched.scan()
        assert not watched.chips

    watched.scan()
    assert watched.chips.keys() == {card.bdf}
