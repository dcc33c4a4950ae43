"""Inventory: what is found on a node is what the real driver showed in every capture, and garbage is nothing."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.captures import capture, capture_names
from tests.world.node import CARDS, Chip, SimulatedNode, Ticker, dead_value
from tests.world.simulation import kernel_errors, settings_of
from ttdp import Fleet, HealthSettings, Reading, Settings, Telemetry

unhurried = hypothesis_settings(deadline=None)
CARD_BY_CODE = {code: card for card, code in CARDS.items()}
TELEMETRY = ("tt_heartbeat", "tt_card_type", "tt_serial", "tt_asic_id", "tt_fw_bundle_ver", "tt_therm_trip_count")


def settings(node: SimulatedNode, **others: Any) -> Settings:
    return settings_of(node, node.root / "plugins", **others)


def devices(node: SimulatedNode) -> dict[str, ttdp.Chip]:
    """The node's devices after one look at each."""
    chips = ttdp.scan(settings(node)).functions
    return {bdf: ttdp.with_identity(ttdp.Chip(chip), ttdp.read_telemetry(chip)) for bdf, chip in chips.items()}


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is such a place: a Galaxy is 2500 files."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


@contextmanager
def simulated(capture_name: str) -> Iterator[SimulatedNode]:
    """The node of a capture."""
    with in_memory() as directory:
        yield SimulatedNode.from_capture(directory, capture_name)


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    """A machine without cards, driver loaded."""
    with in_memory() as directory:
        yield SimulatedNode(directory)


@pytest.fixture(scope="module", params=capture_names())
def captured(request: pytest.FixtureRequest) -> Iterator[tuple[str, SimulatedNode]]:
    """Each capture in turn, with its name."""
    with simulated(request.param) as node:
        yield request.param, node


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Chip]:
    """A p150a whose attributes can be overwritten, on a node that several examples share."""
    with simulated("p150ax2") as node:
        yield node.chip("0000:01:00.0")


@dataclass(frozen=True)
class Facts:
    """What a capture tells of one function."""

    bdf: str
    ordinal: int
    arch: str
    card: str
    numa_node: int | None
    serial: str | None
    asic_id: str | None
    firmware: str | None
    heartbeat: str | None
    celsius: float | None
    limit: float | None


def facts_of(name: str) -> dict[str, Facts]:
    """The facts of every function of a capture, by PCI address. Where it shows a node only, the board's own facts."""
    found = []
    for function in capture(name)["functions"]:
        shown, pci, sensors = (function.get(group, {}) for group in ("class", "pci", "sensors"))
        board = function.get("board", {})
        if not shown:
            shown = {"tt_serial": board["serial"], "tt_asic_id": board["asic_id"], "tt_heartbeat": "1219",
                     "tt_fw_bundle_ver": "19.4.0.0"}  # fmt: skip
            sensors = {"temp1_input": "41500", "temp1_max": "75000"}
        code = int(pci.get("subsystem_device") or board["ssid"], 16)
        numa = int(pci.get("numa_node", "-1"))
        found.append(
            Facts(
                bdf=function["path"].rsplit("/")[-1],
                ordinal=function["ordinal"],
                arch={"0x401e": "wormhole", "0xb140": "blackhole"}[pci["device"]] if pci else board["arch"],
                card=shown.get("tt_card_type", CARD_BY_CODE[code]),
                numa_node=None if numa == -1 else numa,
                serial=shown.get("tt_serial"),
                asic_id=shown.get("tt_asic_id"),
                firmware=shown.get("tt_fw_bundle_ver"),
                heartbeat=shown.get("tt_heartbeat"),
                celsius=int(sensors["temp1_input"]) / 1000 if "temp1_input" in sensors else None,
                limit=int(sensors["temp1_max"]) / 1000 if "temp1_max" in sensors else None,
            )
        )
    return {facts.bdf: facts for facts in sorted(found, key=lambda facts: facts.bdf)}


# -- every capture -----------------------------------------------------------------------------------------------------


def test_every_function_of_a_capture_is_found_as_it_was(captured: tuple[str, SimulatedNode]) -> None:
    """Address, node, architecture, card, NUMA node and identity, in the order of the addresses, and nothing odd."""
    name, node = captured
    found = devices(node)
    assert list(found) == list(facts_of(name))
    assert ttdp.scan(settings(node)).oddities == ()
    for bdf, facts in facts_of(name).items():
        device, chip = found[bdf], found[bdf].function
        assert (chip.bdf, chip.ordinal, chip.arch, chip.numa_node) == (bdf, facts.ordinal, facts.arch, facts.numa_node)
        assert (chip.path, chip.node_fault) == (f"{node.root}/dev/tenstorrent/{facts.ordinal}", None)
        assert (device.card_type, device.serial, device.asic_id, device.firmware) == (
            facts.card, facts.serial, facts.asic_id, facts.firmware,
        )  # fmt: skip


def test_the_telemetry_of_a_capture_is_read_as_it_was(captured: tuple[str, SimulatedNode]) -> None:
    """Heartbeat, temperature and its limit where there are any; thermal trips on a Blackhole since driver 2.7 only."""
    name, node = captured
    for bdf, chip in ttdp.scan(settings(node)).functions.items():
        telemetry, facts = ttdp.read_telemetry(chip), facts_of(name)[bdf]
        assert (telemetry.temperature, telemetry.temperature_limit) == (facts.celsius, facts.limit)
        assert telemetry.heartbeat == (None if facts.heartbeat is None else int(facts.heartbeat))
        counts_trips = facts.arch == "blackhole" and facts.heartbeat is not None
        assert telemetry.trips == (0 if counts_trips else None)
        assert (telemetry.all_ones, telemetry.error) == (False, None)


def test_the_driver_of_a_capture_is_known(captured: tuple[str, SimulatedNode]) -> None:
    """Its version is what the module says, suffix and all."""
    name, node = captured
    assert ttdp.driver_version(settings(node)) == capture(name)["driver"]


BOARDS = {
    "n150": "n150", "n300": "n300", "p150a": "p150", "p300c": "p300",
    "galaxy-wormhole": "galaxy-wormhole", "galaxy-blackhole": "galaxy-blackhole",
}  # fmt: skip


def test_the_resources_of_a_capture_are_named_after_its_cards(captured: tuple[str, SimulatedNode]) -> None:
    """Under each of the three namings, each resource holds the addresses of its cards."""
    name, node = captured
    facts, found = facts_of(name).values(), devices(node).values()
    for naming, name_of in (
        ("board", lambda f: BOARDS[f.card]),
        ("card", lambda f: f.card),
        ("arch", lambda f: f.arch),
    ):
        listed = ttdp.resources(found, settings(node, resource_naming=naming), {})
        assert {resource: list(listed[resource].devices) for resource in listed} == {
            f"tenstorrent.com/{wanted}": [f.bdf for f in facts if name_of(f) == wanted]
            for wanted in sorted({name_of(f) for f in facts})
        }


def test_boards_and_trays_of_a_capture(captured: tuple[str, SimulatedNode]) -> None:
    """Two chips are on one board exactly if they share a serial; on one tray, in a Galaxy, if on one bus nibble."""
    name, node = captured
    facts, found = facts_of(name), devices(node)
    for one in facts.values():
        for other in facts.values():
            same_serial = one.bdf == other.bdf or (one.serial is not None and one.serial == other.serial)
            galaxy = "galaxy" in one.card and "galaxy" in other.card
            same_tray = one.bdf[5] == other.bdf[5] if galaxy else same_serial
            assert (found[one.bdf].board == found[other.bdf].board) is same_serial
            assert (found[one.bdf].tray == found[other.bdf].tray) is same_tray


@pytest.mark.parametrize("arch", ["wormhole", "blackhole"])
def test_a_galaxy_has_four_trays_of_eight(arch: str) -> None:
    """All 32 chips are one resource, in four trays whose chips the driver numbers in one run."""
    with simulated(f"galaxy-{arch}") as node:
        found = devices(node).values()
        trays: dict[object, list[int]] = {}
        for device in found:
            trays.setdefault(device.tray, []).append(device.function.ordinal)
        assert sorted(trays.values()) == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]


# -- firmware that is late, or says nothing ----------------------------------------------------------------------------


def test_late_firmware_brings_the_identity_and_nothing_else() -> None:
    """Before, PCI tells the card and nobody the serial; after, both are known; ID and resource are the same ones."""
    with simulated("n150-late-before") as node:
        (before,) = devices(node).values()
        node.chip(before.bdf).speak()
        (after,) = devices(node).values()
    assert (before.card, before.card_type, before.serial, before.asic_id) == (None, "n150", None, None)
    assert (after.card, after.card_type, after.serial, after.asic_id) == (
        "n150", "n150", "0100018511732048", "3B1D7A5620E41F08",
    )  # fmt: skip
    assert after.function == before.function


@pytest.mark.parametrize("name", ["n150-late-before", "n150-never-ready", "p150a-late-before", "p150a-late-after"])
def test_a_silent_chip_offers_nothing_and_is_no_error(name: str) -> None:
    """Without any attribute there is no telemetry, and neither an errno nor a word about all ones."""
    with simulated(name) as node:
        (chip,) = ttdp.scan(settings(node)).functions.values()
        assert ttdp.read_telemetry(chip) == Telemetry()


@pytest.mark.parametrize(("card", "code"), sorted(CARDS.items()))
def test_pci_tells_the_card_of_a_silent_chip(node: SimulatedNode, card: str, code: int) -> None:
    """Each board's code in the PCI subsystem id stands for its card type."""
    node.add(card, firmware=False)
    assert {device.card_type for device in devices(node).values()} == {card}
    assert f"0x{code:04x}" == node.chips[0].facts.pci["subsystem_device"]


@pytest.mark.parametrize("subsystem", [b"0x0099\n", b"", b"?\n", None])
def test_a_card_that_nobody_knows_is_its_architecture(node: SimulatedNode, subsystem: bytes | None) -> None:
    """Firmware silent and no known code in PCI: the resource is wormhole under every naming."""
    (chip,) = node.add("n150", firmware=False)
    if subsystem is None:
        chip.remove("subsystem_device")
    else:
        chip.write("subsystem_device", subsystem)
    (device,) = devices(node).values()
    assert (device.card_type, device.board_type) == (None, "wormhole")
    for naming in ("board", "card", "arch"):
        assert list(ttdp.resources([device], settings(node, resource_naming=naming), {})) == [
            "tenstorrent.com/wormhole"
        ]


# -- chips that are dead, and garbage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in capture_names() if any(function["hwmon"] is not None for function in capture(n)["functions"])]
)
def test_all_ones_are_no_telemetry(name: str) -> None:
    """Of every captured chip that spoke, death shows as such and not as an identity, a temperature or a count."""
    with simulated(name) as node:
        spoke = [chip for chip in node.chips if chip.facts.hwmon is not None][:4]
        for chip in spoke:
            chip.die()
            read = ttdp.read_telemetry(ttdp.scan(settings(node)).functions[chip.bdf])
            assert read._replace(hwmon=None) == Telemetry(all_ones=True)


VALUES = {
    "tt_card_type": "card", "tt_serial": "serial", "tt_asic_id": "asic_id", "tt_fw_bundle_ver": "firmware",
    "tt_therm_trip_count": "trips", "temp1_input": "temperature", "temp1_max": "temperature_limit",
}  # fmt: skip


@pytest.mark.parametrize("attribute", VALUES)
def test_one_value_of_all_ones_is_no_value_and_no_death(node: SimulatedNode, attribute: str) -> None:
    """A read that met the chip's death halfway: that value counts as not offered, the others count."""
    (chip,) = node.add("p150a")
    sound = ttdp.read_telemetry(ttdp.scan(settings(node)).functions[chip.bdf])
    chip.write(attribute, dead_value(attribute, "").encode() + b"\n")
    telemetry = ttdp.read_telemetry(ttdp.scan(settings(node)).functions[chip.bdf])
    for other, name in VALUES.items():
        assert getattr(telemetry, name) == (None if other == attribute else getattr(sound, name))
    assert not telemetry.all_ones


def test_a_dead_chip_that_offers_little_is_seen_to_be_dead() -> None:
    """Without a serial or a temperature, heartbeat and card type are proof enough."""
    assert ttdp.parse_telemetry({"tt_heartbeat": "4294967295", "tt_card_type": "unknown"}).all_ones


@pytest.mark.parametrize("raw", [{"tt_heartbeat": "1219", "tt_card_type": "unknown"}, {"tt_card_type": "unknown"}])
def test_a_card_type_that_the_driver_does_not_know_is_no_death(raw: dict[str, str]) -> None:
    """`unknown` is also what a new board says, and what a zero gives."""
    assert not ttdp.parse_telemetry(raw).all_ones


def test_silence_and_garbage_unlearn_nothing() -> None:
    """What the firmware has said once stays known when it says less; what it says anew counts."""
    device = ttdp.Chip(ttdp.PciFunction("0000:01:00.0", "blackhole", "p150a", None, 0, "/dev/tenstorrent/0", "/sys/x"))
    known = ttdp.with_identity(device, Telemetry(card="p150b", serial="A" * 16, asic_id="B" * 16, firmware="1.2"))
    for nothing in (Telemetry(), Telemetry(all_ones=True), Telemetry(error=("tt_serial", 61))):
        assert ttdp.with_identity(known, nothing).shown == known.shown
    assert ttdp.with_identity(known, Telemetry(firmware="1.3")).firmware == "1.3"


FORMS = {
    "heartbeat": ("tt_heartbeat", r"-?[0-9]+"),
    "card": ("tt_card_type", r"[a-z][a-z0-9-]*"),
    "serial": ("tt_serial", r"[0-9A-F]{16}"),
    "asic_id": ("tt_asic_id", r"[0-9A-F]{16}"),
    "firmware": ("tt_fw_bundle_ver", r"[0-9]+(\.[0-9]+)+"),
    "temperature": ("temp1_input", r"-?[0-9]+"),
    "temperature_limit": ("temp1_max", r"-?[0-9]+"),
    "trips": ("tt_therm_trip_count", r"[0-9]+"),
}
texts = st.one_of(
    st.text(max_size=40),
    st.text("0123456789abcdefABCDEFx_+-. \n", max_size=18),
    st.from_regex(r"[0-9A-F]{16}", fullmatch=True),
    st.sampled_from(["1_000", "+7", " 7", "٣", "0x10", "-1", "1e3", "nan", "9" * 5000, "1.2.3.4", "p150a", "n150\n"]),
)


@unhurried
@given(st.dictionaries(st.sampled_from([attribute for attribute, _ in FORMS.values()]), texts))
@example({"tt_heartbeat": "1_000"})
@example({"temp1_input": "+41500"})
def test_only_what_has_the_drivers_form_counts(raw: dict[str, str]) -> None:
    """From any texts: no exception, and each value either has the form that the driver writes or is not offered."""
    telemetry = ttdp.parse_telemetry(raw)
    for name, (attribute, form) in FORMS.items():
        if getattr(telemetry, name) is not None:
            assert re.fullmatch(form, raw[attribute], re.ASCII)
    assert telemetry.error is None


@hypothesis_settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from([*TELEMETRY, "temp1_input", "temp1_max"]), st.binary(max_size=20), min_size=1),
       st.integers(0, 6000))  # fmt: skip
def test_garbage_in_telemetry_never_raises(fuzzed: Chip, content: dict[str, bytes], more: int) -> None:
    """Binary, empty and huge attributes give telemetry without an error, and nothing that has no form."""
    try:
        for attribute, data in content.items():
            fuzzed.write(attribute, data + b"x" * more)
        telemetry = ttdp.read_telemetry(ttdp.scan(settings(fuzzed.node)).functions[fuzzed.bdf])
    finally:
        for attribute in content:
            fuzzed.restore(attribute)
    assert telemetry.error is None
    if "tt_serial" in content:
        assert telemetry.serial is None


@unhurried
@given(st.dictionaries(
    st.sampled_from(["vendor", "device", "subsystem_device", "numa_node"]),
    st.binary(max_size=20) | st.sampled_from([b"-2\n", b"0x\n", b"1_0\n", b"99999999999999999999999\n"]), min_size=1,
))  # fmt: skip
@example({"numa_node": b"99999999999999999999\n"})
def test_garbage_in_pci_attributes_never_raises(fuzzed: Chip, content: dict[str, bytes]) -> None:
    """The other chip is found as ever, and what is found of this one can be told to a kubelet."""
    try:
        for attribute, data in content.items():
            fuzzed.write(attribute, data)
        scanned = ttdp.scan(settings(fuzzed.node))
    finally:
        for attribute in content:
            fuzzed.restore(attribute)
    assert "0000:02:00.0" in scanned.functions and scanned.functions.keys() <= {"0000:01:00.0", "0000:02:00.0"}
    for resource in ttdp.resources(
        [ttdp.Chip(chip) for chip in scanned.functions.values()], settings(fuzzed.node), {}
    ).values():
        ttdp.device_list(resource)


@pytest.mark.parametrize("error", ["ENODATA", "EIO", "EACCES"])
@pytest.mark.parametrize("attribute", ["tt_heartbeat", "temp1_input", "tt_serial"])
def test_a_read_that_fails_is_told_with_its_attribute_and_errno(
    node: SimulatedNode, attribute: str, error: str
) -> None:
    """The errno reaches whoever judges, and nothing of the other attributes is guessed."""
    (chip,) = node.add("p150a")
    chip.fail(attribute, error)
    with kernel_errors():
        telemetry = ttdp.read_telemetry(ttdp.scan(settings(node)).functions[chip.bdf])
    assert telemetry == Telemetry(error=(attribute, getattr(errno, error)))


def test_an_attribute_that_is_a_directory_is_an_error_of_that_chip(node: SimulatedNode) -> None:
    """Nothing that a path can lead to makes a read raise."""
    (chip,) = node.add("p150a")
    chip.attribute("tt_serial").unlink()
    chip.attribute("tt_serial").mkdir()
    error = ttdp.read_telemetry(ttdp.scan(settings(node)).functions[chip.bdf]).error
    assert error is not None and error[0] == "tt_serial"


def test_a_chip_that_went_between_scan_and_read_is_going_away(node: SimulatedNode) -> None:
    """Its directory is gone: that is ENODEV, not a chip that offers nothing."""
    (chip,) = node.add("p150a")
    seen = ttdp.scan(settings(node)).functions[chip.bdf]
    chip.vanish()
    error = ttdp.read_telemetry(seen).error
    assert error is not None and error[1] == errno.ENODEV


def test_a_read_after_a_renumbering_does_not_reach_the_other_chip(node: SimulatedNode) -> None:
    """tenstorrent!0 is now another chip's: what was seen under that name gets nothing from it."""
    first, second = node.add("n150") + node.add("n150")
    seen = ttdp.scan(settings(node)).functions[first.bdf]
    node.swap_ordinals(first.bdf, second.bdf)
    assert ttdp.read_telemetry(seen).serial != second.facts.telemetry["tt_serial"]
    assert (
        ttdp.read_telemetry(ttdp.scan(settings(node)).functions[second.bdf]).asic_id
        == (second.facts.telemetry["tt_asic_id"])
    )


# -- what is no device -------------------------------------------------------------------------------------------------


def regular_file(path: Path) -> None:
    path.touch(mode=0o666)


def loop(path: Path) -> None:
    path.symlink_to(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def other_number(path: Path) -> None:
    path.symlink_to("/dev/zero")  # 1:5; the node's own is 1:3, or 245:0


@pytest.mark.parametrize(
    ("instead", "words"),
    [
        (None, "No such file"),
        (regular_file, "not a character device"),
        (Path.mkdir, "not a character device"),
        (os.mkfifo, "not a character device"),
        (loop, "symbolic links"),
        (dangling, "No such file"),
        (other_number, "number 1:5"),
    ],
    ids=["missing", "file", "directory", "fifo", "loop", "dangling", "number"],
)
def test_a_node_that_is_wrong_from_the_start_is_not_listed(
    node: SimulatedNode, instead: Callable[[Path], None] | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Missing, no character device, or one with another number: one line says so, however often one looks."""
    wrong, right = node.add("n150") + node.add("n150")
    path = wrong.device_node
    path.unlink()
    if instead:
        instead(path)
    fleet = Fleet()
    for _ in range(3):
        fleet.observe(settings(node))
    assert fleet.chips.keys() == {right.bdf}
    (oddity,) = fleet.oddities
    assert str(path) in oddity and words in oddity
    assert [record.levelname for record in caplog.records if str(path) in record.message] == ["WARNING"]


def test_a_node_may_be_a_link_to_one(node: SimulatedNode) -> None:
    """What counts is what a container would open."""
    (chip,) = node.add("n150")
    chip.device_node.rename(node.root / "moved")
    chip.device_node.symlink_to(node.root / "moved")
    assert [found.node_fault for found in ttdp.scan(settings(node)).functions.values()] == [None]


def test_a_node_that_becomes_right_is_a_device_from_then_on(node: SimulatedNode) -> None:
    """udev can be slower than a scan."""
    (chip,) = node.add("n150")
    hidden = chip.device_node.rename(node.root / "hidden")
    fleet = Fleet()
    assert fleet.observe(settings(node)) == [] and fleet.oddities
    os.rename(hidden, chip.device_node)
    assert [seen.bdf for seen in fleet.observe(settings(node))] == [chip.bdf]
    assert fleet.oddities == ()


@pytest.mark.parametrize("content", [b"", b"1:99\n", b"garbage\n", None])
def test_a_number_that_sysfs_does_not_confirm_is_a_wrong_node(node: SimulatedNode, content: bytes | None) -> None:
    """The node counts only if its number is the one in sysfs's `dev`."""
    (chip,) = node.add("n150")
    if content is None:
        chip.remove("dev")
    else:
        chip.write("dev", content)
    fleet = Fleet()
    fleet.observe(settings(node))
    assert not fleet.chips and len(fleet.oddities) == 1


@pytest.mark.parametrize(
    ("attribute", "content"), [("device", b"0xfaca\n"), ("device", b"0x1234\n"), ("vendor", b"0x10de\n")]
)
def test_an_unknown_pci_device_is_odd(node: SimulatedNode, attribute: str, content: bytes) -> None:
    """Grayskull, a chip of tomorrow, another maker's: not listed, and named by its address and PCI ids."""
    (chip,) = node.add("n150")
    chip.write(attribute, content)
    scanned = ttdp.scan(settings(node))
    assert not scanned.functions
    (oddity,) = scanned.oddities
    assert chip.bdf in oddity and content.decode()[2:6] in oddity


def test_class_entries_that_are_none_of_the_drivers_are_odd(node: SimulatedNode) -> None:
    """Strange names and a device link that leads to no PCI function are told of; the chip beside them is found."""
    (chip,) = node.add("n150")
    directory = node.root / "sys/class/tenstorrent"
    for name in ("tenstorrent!", "tenstorrent!0x1", "tenstorrent0", "tenstorrent!1234567"):
        (directory / name).symlink_to("nowhere")
    (directory / "tenstorrent!7").mkdir()
    (directory / "tenstorrent!7/device").symlink_to("../usb1")
    scanned = ttdp.scan(settings(node))
    assert list(scanned.functions) == [chip.bdf] and len(scanned.oddities) == 5


def test_entries_that_are_just_going_away_are_nothing(node: SimulatedNode) -> None:
    """A link whose directory is gone, a function without its PCI files: no chip, and nothing to talk about."""
    going, half = node.add("n150") + node.add("n150")
    target = going.attribute("dev").parent
    target.rename(target.with_name("gone"))
    half.remove("vendor")
    assert ttdp.scan(settings(node)) == ttdp.Scan({}, ())


def test_no_driver_no_devices(node: SimulatedNode) -> None:
    """Without the module there is neither a directory nor a version; without sysfs, neither."""
    assert ttdp.driver_version(settings(node)) == "2.10.1-pre"
    node.unload_driver()
    for root in (node.root / "sys", node.root / "nowhere", node.root / "state.json"):
        looked = Settings(sysfs_root=str(root))
        assert ttdp.scan(looked) == ttdp.Scan({}, ()) and ttdp.driver_version(looked) is None


def test_a_driver_that_does_not_say_its_version_is_loaded(node: SimulatedNode) -> None:
    """A module without the file is there all the same."""
    (node.root / "sys/module/tenstorrent/version").unlink()
    assert ttdp.driver_version(settings(node)) == ""


# -- over time ---------------------------------------------------------------------------------------------------------


def test_only_what_is_new_back_or_moved_is_asked(node: SimulatedNode) -> None:
    """A second look at an unchanged node wants no telemetry; a renumbering wants that of both chips."""
    first, second = node.add("n150") + node.add("n150")
    fleet = Fleet()
    assert [chip.bdf for chip in fleet.observe(settings(node))] == [first.bdf, second.bdf]
    assert fleet.observe(settings(node)) == []
    node.swap_ordinals(first.bdf, second.bdf)
    assert {(chip.bdf, chip.ordinal) for chip in fleet.observe(settings(node))} == {(first.bdf, 1), (second.bdf, 0)}
    second.vanish()
    assert fleet.observe(settings(node)) == []
    second.come_back()
    assert [chip.bdf for chip in fleet.observe(settings(node))] == [second.bdf]


def test_a_device_is_followed_by_its_address(node: SimulatedNode) -> None:
    """After two chips have swapped their numbers each is the one that it was; a reading from before is dropped."""
    first, second = node.add("n150") + node.add("n150")
    fleet = Fleet()
    old = fleet.observe(settings(node))
    fleet.learn([Reading(chip, ttdp.read_telemetry(chip), False) for chip in old], HealthSettings(), 0)
    asic_id = fleet.chips[first.bdf].asic_id
    node.swap_ordinals(first.bdf, second.bdf)
    fleet.observe(settings(node))
    fleet.learn([Reading(chip, Telemetry(asic_id="E" * 16), False) for chip in old], HealthSettings(), 0)
    assert (fleet.chips[first.bdf].asic_id, fleet.chips[first.bdf].function.ordinal) == (asic_id, 1)


def test_another_card_at_the_same_address_has_another_identity(node: SimulatedNode) -> None:
    """A slot that gets a new card type does not keep the old card's serial."""
    (chip,) = node.add("n150")
    fleet = Fleet()
    fleet.learn(
        [Reading(seen, ttdp.read_telemetry(seen), False) for seen in fleet.observe(settings(node))], HealthSettings(), 0
    )
    chip.write("subsystem_device", b"0x0014\n")
    assert [seen.pci_card for seen in fleet.observe(settings(node))] == ["n300"]
    device = fleet.chips[chip.bdf]
    assert (device.serial, device.asic_id, device.card) == (None, None, None)


# -- never open a device -----------------------------------------------------------------------------------------------

opened: list[str] | None = None


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opening)  # sees every way of opening a file that Python has


def test_no_device_is_ever_opened(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening a node would power the chip up: scans, `list` and `check` read sysfs and stat() the nodes."""
    node.add("p150a")
    paths: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "opened", paths)
    with Ticker(node):
        ttdp.list_devices(settings(node), as_json=False)
        ttdp.check(lambda: settings(node), config_only=False)
    assert "p150a, " in capsys.readouterr().out
    assert any(path.endswith("tt_heartbeat") for path in paths)
    assert not [path for path in paths if path.startswith((f"{node.root}/dev/", "/dev/tenstorrent"))]


def test_while_a_heartbeat_goes_on_only_the_sensors_are_read(node: SimulatedNode) -> None:
    """The same firmware has said who it is; after a restart, by which the heartbeat falls, it is asked again."""
    chip = node.add("p150a")[0]
    seen = ttdp.scan(settings(node)).functions[chip.bdf]
    first = ttdp.read_telemetry(seen)
    chip.write("tt_serial", b"00000401319110FF\n")
    chip.beat()
    chip.heat(70)
    chip.trip()
    second = ttdp.read_telemetry(seen, first)
    assert (second.serial, second.temperature, second.trips) == (first.serial, 70, 1)
    chip.beat(-100)
    assert ttdp.read_telemetry(seen, second).serial == "00000401319110FF"


@pytest.mark.parametrize("change", ["die", "reset", "silence", "freeze"])
def test_whatever_is_not_a_heartbeat_that_goes_on_has_everything_read(node: SimulatedNode, change: str) -> None:
    """With the last telemetry at hand a look finds the same as without."""
    chip = node.add("p150a")[0]
    seen = ttdp.scan(settings(node)).functions[chip.bdf]
    last = ttdp.read_telemetry(seen)
    chip.beat()
    getattr(chip, change)()
    with kernel_errors():
        assert ttdp.read_telemetry(seen, last) == ttdp.read_telemetry(seen) != last._replace(heartbeat=-1)


@pytest.mark.parametrize("attribute", ["tt_heartbeat", "temp1_input", "tt_therm_trip_count"])
@pytest.mark.parametrize("error", ["ENODATA", "EIO"])
def test_an_error_is_told_with_the_attribute_that_had_it(node: SimulatedNode, attribute: str, error: str) -> None:
    """Where only the sensors are read, too, which is what most polls do: the heartbeat has gone on."""
    chip = node.add("p150a")[0]
    seen = ttdp.scan(settings(node)).functions[chip.bdf]
    last = ttdp.read_telemetry(seen)
    chip.beat()
    chip.fail(attribute, error)
    with kernel_errors():
        assert ttdp.read_telemetry(seen, last).error == (attribute, getattr(errno, error))


@pytest.mark.parametrize("card", ["n150", "p150a"])
def test_a_chip_that_offers_nothing_is_looked_up_in_its_configuration_space(node: SimulatedNode, card: str) -> None:
    """Dead when the driver bound to it, it looks like one whose firmware is late, but for what PCI reads of it."""
    chip = node.add(card, firmware=False)[0]
    seen = ttdp.scan(settings(node)).functions[chip.bdf]
    assert ttdp.read_telemetry(seen) == Telemetry()
    chip.write("config", b"")  # what cannot be read is no proof
    assert ttdp.read_telemetry(seen) == Telemetry()
    chip.remove("config")
    assert ttdp.read_telemetry(seen) == Telemetry()
    chip.die(bus=True)
    assert ttdp.read_telemetry(seen) == Telemetry(all_ones=True, off_bus=True)
    verdict = ttdp.judge(ttdp.Health(), seen, ttdp.read_telemetry(seen), HealthSettings(), 0, periodic=True)
    assert verdict.fault is ttdp.Fault.NO_RESPONSE and "PCI configuration space" in str(verdict.reason)


@pytest.mark.parametrize("reads", range(8))
def test_a_class_device_that_goes_while_it_is_read_is_not_taken_for_another_card(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """Unbound after any number of reads of a scan: it is seen as it was, or not at all, and keeps what it was."""
    chip = node.add("n150", numa_node=1)[0]
    fleet = Fleet()
    fleet.learn(
        [Reading(seen, ttdp.read_telemetry(seen), False) for seen in fleet.observe(settings(node))], HealthSettings(), 0
    )
    before, countdown = fleet.chips[chip.bdf], reads

    def tearing(genuine: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: str, *arguments: Any) -> Any:
            nonlocal countdown
            if "/sys/devices/" in path:
                if countdown == 0:
                    chip.unbind()
                countdown -= 1
            return genuine(path, *arguments)

        return read

    monkeypatch.setattr(ttdp, "_link_name", tearing(ttdp._link_name))
    monkeypatch.setattr(ttdp, "_read_quick", tearing(ttdp._read_quick))
    fleet.observe(settings(node))
    after = fleet.chips[chip.bdf]
    assert (after.function.pci_card, after.function.numa_node) == ("n150", 1)
    assert (after.serial, after.asic_id) == (before.serial, before.asic_id)
    assert after.present is (reads > 6)


def test_devices_that_come_and_go_are_seen_as_they_are_or_not_at_all(node: SimulatedNode) -> None:
    """Looked at after every step of a plug, a rebinding, a renumbering and a removal, none is another card."""
    fleet, looks = Fleet(), 0

    def look() -> None:
        nonlocal looks
        looks += 1
        for seen in fleet.observe(settings(node)):
            card, numa_node = ("n300", 0) if seen.bdf == "0000:01:00.0" else ("p150a", 1)
            assert (seen.pci_card, seen.numa_node) == (card, numa_node)

    node.on_step = look
    first, second = node.add("n300", numa_node=0) + node.add("p150a", numa_node=1)
    first.rebind()
    node.swap_ordinals(first.bdf, second.bdf)
    second.vanish()
    assert looks > 100 and len(fleet.chips) == 2


def test_a_numa_node_that_the_kernel_does_not_know_is_no_torn_reading(node: SimulatedNode) -> None:
    """A kernel without NUMA has no such attribute: the chip is there all the same."""
    (chip,) = node.add("n150")
    chip.remove("numa_node")
    assert ttdp.scan(settings(node)).functions[chip.bdf].numa_node is None


def test_a_known_chip_is_the_same_at_a_second_look_but_for_its_node(node: SimulatedNode) -> None:
    """A scan that knows the chips finds what a thorough one does: gone, new, renumbered, or with a wrong node."""
    first, second = node.add("n150") + node.add("n150")
    known = ttdp.scan(settings(node)).functions.values()
    assert ttdp.scan(settings(node), known) == ttdp.scan(settings(node))
    node.swap_ordinals(first.bdf, second.bdf)
    assert ttdp.scan(settings(node), known) == ttdp.scan(settings(node))
    node.add("p150a")
    second.vanish()
    first.device_node.unlink()
    looked = ttdp.scan(settings(node), known)
    assert looked == ttdp.scan(settings(node)) and looked.functions[first.bdf].node_fault
