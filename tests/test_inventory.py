"""Inventory: what is found is what the real driver showed in every capture; garbage is nothing."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.captures import capture, capture_names
from tests.world.node import CARDS, Chip, SimulatedNode, Ticker, dead_value
from tests.world.simulation import kernel_errors, settings_of
from ttdp import (
    SENSORS,
    AttributeFiles,
    Fleet,
    HealthSettings,
    Identity,
    PciFunction,
    Reading,
    Settings,
    Telemetry,
    parse_telemetry,
    read_telemetry,
)

unhurried = hypothesis_settings(deadline=None)


def settings(node: SimulatedNode) -> Settings:
    return settings_of(node, node.root / "plugins")


def functions(node: SimulatedNode) -> dict[str, PciFunction]:
    return dict(ttdp.scan(settings(node)).functions)


def function_of(chip: Chip) -> PciFunction:
    """The chip as a scan finds it now."""
    return functions(chip.node)[chip.bdf]


def chips_of(node: SimulatedNode) -> dict[str, ttdp.Chip]:
    """The node's chips after one look at each."""
    return {
        bdf: ttdp.Chip(function, identity=read_telemetry(function).identity)
        for bdf, function in functions(node).items()
    }


def look(fleet: Fleet, node: SimulatedNode, now: float = 0) -> None:
    """A poll of every chip, in which each answers."""
    fleet.observe(settings(node))
    present = [chip.function for chip in fleet.chips.values() if chip.present]
    readings = [Reading(function, read_telemetry(function), True, None) for function in present]
    fleet.learn(readings, HealthSettings(), now)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is such a place: a Galaxy is 2500 files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
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


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    """A Blackhole on a node of its own."""
    return node.add("p150a")[0]


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


class Facts(NamedTuple):
    """What a capture tells of one function."""

    function: tuple[str, int, str, int | None]  # address, ordinal, architecture, NUMA node
    card: str
    identity: Identity
    heartbeat: int | None
    celsius: float | None
    throttles_at: float | None
    shown: set[str]  # the names of its attributes


def facts_of(name: str) -> dict[str, Facts]:
    """The facts of every function of a capture; where it shows a node only, the board's own."""
    found = {}
    for function in capture(name)["functions"]:
        groups = [function.get(group, {}) for group in ("class", "pci", "sensors")]
        shown, pci, sensors = groups
        board = function.get("board", {})
        if not shown:
            shown = {"tt_serial": board["serial"], "tt_asic_id": board["asic_id"]}
            shown |= {"tt_heartbeat": "1219", "tt_fw_bundle_ver": "19.4.0.0"}
            sensors = {"temp1_input": "41500", "temp1_max": "75000"}
        architecture = {"0x401e": "wormhole", "0xb140": "blackhole"}
        arch = architecture[pci["device"]] if pci else board["arch"]
        code = int(pci.get("subsystem_device") or board["ssid"], 16)
        by_pci = next(card for card, known in CARDS.items() if known == code)
        card = shown.get("tt_card_type")
        numa_node = int(pci.get("numa_node", "-1"))
        place = (function["ordinal"], arch, None if numa_node == -1 else numa_node)
        ids = (shown.get(f"tt_{name}") for name in ("serial", "asic_id", "fw_bundle_ver"))
        celsius = {key: int(text) / 1000 for key, text in sensors.items() if key[:4] == "temp"
                   and text.isdecimal()}  # fmt: skip
        bdf = function["path"].rsplit("/")[-1]
        found[bdf] = Facts(
            (bdf, *place),
            card or by_pci,
            Identity(card if pci else by_pci, *ids),
            int(shown["tt_heartbeat"]) if "tt_heartbeat" in shown else None,
            celsius.get("temp1_input"),
            celsius.get("temp1_max"),
            set().union(*groups),
        )
    return dict(sorted(found.items()))


# -- every capture ---------------------------------------------------------------------------------


def test_every_function_of_a_capture_is_found_as_it_was(
    captured: tuple[str, SimulatedNode],
) -> None:
    """Address, node, architecture, NUMA node and card, in the order of addresses; nothing odd."""
    name, node = captured
    found = chips_of(node)
    assert list(found) == list(facts_of(name))
    assert ttdp.scan(settings(node)).oddities == ()
    for bdf, facts in facts_of(name).items():
        function = found[bdf].function
        assert (bdf, function.ordinal, function.arch, function.numa_node) == facts.function
        path = f"{node.root}/dev/tenstorrent/{function.ordinal}"
        assert (function.path, function.node_fault) == (path, None)
        assert (found[bdf].card_type, found[bdf].identity) == (facts.card, facts.identity)


def test_the_telemetry_of_a_capture_is_read_as_it_was(captured: tuple[str, SimulatedNode]) -> None:
    """Heartbeat, temperature, its limit; thermal trips of a Blackhole since driver 2.7 only."""
    name, node = captured
    for bdf, function in functions(node).items():
        telemetry = read_telemetry(function)
        facts = facts_of(name)[bdf]
        assert telemetry.heartbeat == facts.heartbeat
        assert (telemetry.temperature, telemetry.throttles_at) == (
            facts.celsius,
            facts.throttles_at,
        )
        assert telemetry.trips == (0 if "tt_therm_trip_count" in facts.shown else None)
        assert (telemetry.all_ones, telemetry.error) == (False, None)


def test_the_driver_of_a_capture_is_known(captured: tuple[str, SimulatedNode]) -> None:
    """Its version is what the module says, suffix and all."""
    name, node = captured
    assert ttdp.driver_version(settings(node)) == capture(name)["driver"]


def test_boards_and_trays_of_a_capture(captured: tuple[str, SimulatedNode]) -> None:
    """Chips are on one board if they share a serial; on one tray, in a Galaxy, by the bus nibble."""
    name, node = captured
    found = chips_of(node)
    for bdf, one in facts_of(name).items():
        for other_bdf, other in facts_of(name).items():
            serial = one.identity.serial
            same_board = bdf == other_bdf or (serial and serial == other.identity.serial)
            galaxy = "galaxy" in one.card and "galaxy" in other.card
            same_tray = bdf[5] == other_bdf[5] if galaxy else same_board
            assert (found[bdf].board == found[other_bdf].board) == bool(same_board)
            assert (found[bdf].tray == found[other_bdf].tray) == bool(same_tray)


@pytest.mark.parametrize("arch", ["wormhole", "blackhole"])
def test_a_galaxy_has_four_trays_of_eight(arch: str) -> None:
    """All 32 chips are in four trays, whose chips the driver numbers in one run."""
    with simulated(f"galaxy-{arch}") as node:
        trays: dict[object, list[int]] = {}
        for found in chips_of(node).values():
            trays.setdefault(found.tray, []).append(found.function.ordinal)
        assert sorted(trays.values()) == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]


# -- firmware that is late, or says nothing --------------------------------------------------------


def test_late_firmware_brings_the_identity_and_nothing_else() -> None:
    """Before, PCI tells the card and nobody the serial; after, both are known of the same chip."""
    with simulated("n150-late-before") as node:
        (before,) = chips_of(node).values()
        node.chip(before.bdf).speak()
        (after,) = chips_of(node).values()
    assert (before.card_type, before.identity) == ("n150", Identity())
    assert after.identity[:3] == ("n150", "0100018511732048", "3B1D7A5620E41F08")
    assert after.function == before.function


@pytest.mark.parametrize(
    "name", ["n150-late-before", "n150-never-ready", "p150a-late-before", "p150a-late-after"]
)
def test_a_silent_chip_offers_nothing_and_is_no_error(name: str) -> None:
    """Without any attribute there is no telemetry, no errno, and not a word about all ones."""
    with simulated(name) as node:
        (function,) = functions(node).values()
        assert read_telemetry(function) == Telemetry()


@pytest.mark.parametrize(("card", "code"), sorted(CARDS.items()))
def test_pci_tells_the_card_of_a_silent_chip(node: SimulatedNode, card: str, code: int) -> None:
    """Each board's code in the PCI subsystem ID stands for its card type."""
    node.add(card, firmware=False)
    assert {found.card_type for found in chips_of(node).values()} == {card}
    assert f"0x{code:04x}" == node.chips[0].facts.pci["subsystem_device"]


def test_a_card_that_nobody_knows_is_its_architecture(node: SimulatedNode) -> None:
    """Firmware that is silent and a code of tomorrow in PCI."""
    (chip,) = node.add("n150", firmware=False)
    chip.write("subsystem_device", b"0x0099\n")
    (found,) = chips_of(node).values()
    assert (found.card_type, found.board_type) == (None, "wormhole")


@pytest.mark.parametrize("card", ["n150", "p150a"])
def test_a_chip_that_offers_nothing_is_looked_up_in_its_configuration_space(
    node: SimulatedNode, card: str
) -> None:
    """Dead when the driver bound to it, it looks like late firmware, but for what PCI reads."""
    (chip,) = node.add(card, firmware=False)
    function = function_of(chip)
    chip.write("config", b"")  # what cannot be read is no proof
    assert read_telemetry(function) == Telemetry()
    chip.remove("config")
    assert read_telemetry(function) == Telemetry()
    chip.die(bus=True)
    assert read_telemetry(function) == Telemetry(all_ones=True, off_bus=True)


# -- chips that are dead, and garbage --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in capture_names() if any(f["hwmon"] for f in capture(n)["functions"])]
)
def test_all_ones_are_no_telemetry(name: str) -> None:
    """Of every captured chip that spoke, death is no identity, no temperature and no count."""
    with simulated(name) as node:
        for chip in [chip for chip in node.chips if chip.facts.hwmon is not None][:4]:
            chip.die()
            read = read_telemetry(function_of(chip))
            assert read._replace(hwmon=None) == Telemetry(all_ones=True)


VALUES: dict[str, Callable[[Telemetry], object]] = {
    "tt_card_type": lambda telemetry: telemetry.identity.card,
    "tt_serial": lambda telemetry: telemetry.identity.serial,
    "tt_asic_id": lambda telemetry: telemetry.identity.asic_id,
    "tt_fw_bundle_ver": lambda telemetry: telemetry.identity.firmware,
    "tt_heartbeat": lambda telemetry: telemetry.heartbeat,
    "tt_therm_trip_count": lambda telemetry: telemetry.trips,
    "temp1_input": lambda telemetry: telemetry.temperature,
    "temp1_max": lambda telemetry: telemetry.throttles_at,
}


@pytest.mark.parametrize("attribute", [name for name in VALUES if name != "tt_heartbeat"])
@pytest.mark.parametrize("instead", ["all ones", "ENODATA"])
def test_one_value_that_is_none_takes_no_other_with_it(
    chip: Chip, attribute: str, instead: str
) -> None:
    """A read that met the chip's death halfway, or a tag that its firmware no longer reports.

    Neither is a death or a reset, whether everything is read or only what changes.
    """
    function = function_of(chip)
    sound = read_telemetry(function)
    if instead == "ENODATA":
        chip.fail(attribute, "ENODATA")
    else:
        chip.write(attribute, dead_value(attribute, "").encode() + b"\n")
    with kernel_errors():
        everything = read_telemetry(function)
        chip.beat()
        changes = read_telemetry(function, sound)
    for telemetry in (everything, changes):
        assert (telemetry.all_ones, telemetry.error) == (False, None)
    for name, value in VALUES.items():
        assert value(everything) == (None if name == attribute else value(sound))


def test_a_dead_chip_that_offers_little_is_seen_to_be_dead() -> None:
    """Without a serial or a temperature, heartbeat and card type are proof enough."""
    assert parse_telemetry({"tt_heartbeat": "4294967295", "tt_card_type": "unknown"}).all_ones


@pytest.mark.parametrize("heartbeat", [{"tt_heartbeat": "1219"}, {}])
def test_a_card_type_that_the_driver_does_not_know_is_no_death(heartbeat: dict[str, str]) -> None:
    """`unknown` is also what a new board says, and what a zero gives."""
    assert not parse_telemetry(heartbeat | {"tt_card_type": "unknown"}).all_ones


FORMS = {
    "tt_heartbeat": r"-?[0-9]+",
    "tt_card_type": r"[a-z][a-z0-9-]*",
    "tt_serial": r"[0-9A-F]{16}",
    "tt_asic_id": r"[0-9A-F]{16}",
    "tt_fw_bundle_ver": r"[0-9]+(\.[0-9]+)+",
    "temp1_input": r"-?[0-9]+",
    "temp1_max": r"-?[0-9]+",
    "tt_therm_trip_count": r"[0-9]+",
}
NEARLY = ["1_000", "+7", " 7", "٣", "0x10", "-1", "1e3", "nan", "9" * 5000, "1.2.3.4", "p150a"]
texts = st.one_of(
    st.text(max_size=40),
    st.text("0123456789abcdefABCDEFx_+-. \n", max_size=18),
    st.from_regex(r"[0-9A-F]{16}", fullmatch=True),
    st.sampled_from([*NEARLY, "n150\n"]),
)


@unhurried
@given(st.dictionaries(st.sampled_from([*FORMS]), texts))
@example({"tt_heartbeat": "1_000"})
@example({"temp1_input": "+41500"})
def test_only_what_has_the_drivers_form_counts(raw: dict[str, str]) -> None:
    """From any texts: no exception, and each value has the driver's form or is not offered."""
    telemetry = parse_telemetry(raw)
    for attribute, value in VALUES.items():
        if value(telemetry) is not None:
            assert re.fullmatch(FORMS[attribute], raw[attribute], re.ASCII)
    assert telemetry.error is None


@hypothesis_settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from([*FORMS, *(each.attribute for each in SENSORS)]),
                       st.binary(max_size=20), min_size=1),
       st.integers(0, 6000))  # fmt: skip
def test_garbage_in_attributes_never_raises(
    fuzzed: Chip, content: dict[str, bytes], more: int
) -> None:
    """Binary, empty and huge attributes give telemetry without an error, and no false figure."""
    try:
        for attribute, data in content.items():
            fuzzed.write(attribute, data + b"x" * more)
        telemetry = read_telemetry(function_of(fuzzed))
        figures = ttdp.read_sensors(function_of(fuzzed))
    finally:
        for attribute in content:
            fuzzed.restore(attribute)
    assert telemetry.error is None
    if "tt_serial" in content:
        assert telemetry.identity.serial is None
    assert more == 0 or not figures.keys() & {a for a in content if not a.startswith("aer")}


NEARLY_PCI = [b"-2\n", b"0x\n", b"1_0\n", b"99999999999999999999999\n"]


@unhurried
@given(st.dictionaries(
    st.sampled_from(["vendor", "device", "subsystem_device", "numa_node"]),
    st.binary(max_size=20) | st.sampled_from(NEARLY_PCI), min_size=1,
))  # fmt: skip
@example({"numa_node": b"99999999999999999999\n"})
def test_garbage_in_pci_attributes_never_raises(fuzzed: Chip, content: dict[str, bytes]) -> None:
    """The other chip is found as ever, and what is found of this one can be told to a kubelet."""
    try:
        for attribute, data in content.items():
            fuzzed.write(attribute, data)
        found = functions(fuzzed.node)
    finally:
        for attribute in content:
            fuzzed.restore(attribute)
    assert "0000:02:00.0" in found and found.keys() <= {"0000:01:00.0", "0000:02:00.0"}
    chips = [ttdp.Chip(function) for function in found.values()]
    for resource in ttdp.configured_resources(chips, Settings()).values():
        ttdp.device_list(resource)


# -- reads that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("former", [False, True])
@pytest.mark.parametrize(
    ("attribute", "error"),
    [("tt_heartbeat", "ENODATA"), ("tt_heartbeat", "EIO"), ("temp1_input", "EIO"),
     ("tt_therm_trip_count", "EACCES")],
)  # fmt: skip
def test_a_read_that_fails_is_told_with_its_attribute_and_errno(
    chip: Chip, attribute: str, error: str, former: bool
) -> None:
    """Whether everything is read or only what changes, nothing of the others is guessed."""
    function = function_of(chip)
    last = read_telemetry(function) if former else None
    chip.beat()
    chip.fail(attribute, error)
    with kernel_errors():
        telemetry = read_telemetry(function, last)
    assert telemetry == Telemetry(error=(attribute, getattr(errno, error)))


def test_a_reset_is_told_by_the_heartbeat(chip: Chip) -> None:
    """Every attribute answers ENODATA then; the heartbeat is the one that does so only then."""
    chip.reset()
    with kernel_errors():
        telemetry = read_telemetry(function_of(chip))
    assert telemetry == Telemetry(error=("tt_heartbeat", errno.ENODATA))


def test_an_attribute_that_is_a_directory_is_an_error_of_that_chip(chip: Chip) -> None:
    """Nothing that a path can lead to makes a read raise."""
    chip.attribute("tt_serial").unlink()
    chip.attribute("tt_serial").mkdir()
    assert read_telemetry(function_of(chip)).error == ("tt_serial", errno.EISDIR)


def test_a_chip_that_went_between_scan_and_read_is_going_away(chip: Chip) -> None:
    """Its directory is gone: that is ENODEV, not a chip that offers nothing."""
    function = function_of(chip)
    chip.vanish()
    error = read_telemetry(function).error
    assert error is not None and error[1] == errno.ENODEV


def test_a_read_after_a_renumbering_does_not_reach_the_other_chip(node: SimulatedNode) -> None:
    """tenstorrent!0 is another chip's now: what was seen under that name gets nothing from it."""
    first, second = node.add("n150") + node.add("n150")
    before = function_of(first)
    node.swap_ordinals(first.bdf, second.bdf)
    assert read_telemetry(before).identity == Identity()
    asic_id = second.facts.telemetry["tt_asic_id"]
    assert read_telemetry(function_of(second)).identity.asic_id == asic_id


# -- what most polls read --------------------------------------------------------------------------


def test_while_a_heartbeat_goes_on_only_what_changes_is_read(chip: Chip) -> None:
    """The firmware has said who it is; after a restart, which the heartbeat shows, it says again."""
    function = function_of(chip)
    first = read_telemetry(function)
    chip.write("tt_serial", b"00000401319110FF\n")
    chip.beat()
    chip.heat(70)
    chip.trip()
    second = read_telemetry(function, first)
    assert second == first._replace(heartbeat=second.heartbeat, temperature=70, trips=1)
    chip.beat(-100)
    assert read_telemetry(function, second).identity.serial == "00000401319110FF"


@pytest.mark.parametrize("change", ["die", "reset", "silence", "freeze"])
def test_whatever_is_no_heartbeat_that_goes_on_has_everything_read(chip: Chip, change: str) -> None:
    """With the last telemetry at hand a look finds the same as without."""
    function = function_of(chip)
    last = read_telemetry(function)
    chip.beat()
    getattr(chip, change)()
    with kernel_errors():
        assert read_telemetry(function, last) == read_telemetry(function)


def descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_attributes_stay_open_and_are_returned(chip: Chip) -> None:
    """Of a chip there are three descriptors at most, however often it is read; then none."""
    function = function_of(chip)
    files = AttributeFiles()
    before = descriptors()
    telemetry = read_telemetry(function, None, files)
    assert descriptors() == before
    for _ in range(5):
        chip.beat()
        telemetry = read_telemetry(function, telemetry, files)
        assert descriptors() == before + 3
    assert telemetry.heartbeat == int(chip.attribute("tt_heartbeat").read_text())
    files.close()
    assert descriptors() == before
    chip.beat()
    assert read_telemetry(function, telemetry, files).error is None
    files.close()


@pytest.mark.parametrize("step", ["vanish", "unbind", "reset", "die"])
def test_what_a_file_that_was_kept_open_says_is_never_of_before(chip: Chip, step: str) -> None:
    """From an attribute whose device has gone the kernel answers ENODEV, and all are returned."""
    function = function_of(chip)
    files = AttributeFiles()
    with kernel_errors():
        first = read_telemetry(function, None, files)
        chip.beat()
        second = read_telemetry(function, first, files)
        before = descriptors()
        getattr(chip, step)()
        telemetry = read_telemetry(function, second, files)
        assert descriptors() == before - 3
        assert telemetry == read_telemetry(function) and telemetry.identity == Identity()
        with pytest.raises(OSError) if step in ("vanish", "unbind") else in_memory():
            files.read(f"{function.sysfs}/dev")
    files.close()


def test_a_file_of_a_device_that_has_gone_shows_no_other_chips_value(node: SimulatedNode) -> None:
    """A card that is unplugged for another one in its slot: what was open stays the first one's."""
    (chip,) = node.add("n150")
    files = AttributeFiles()
    path = f"{function_of(chip).sysfs}/tt_serial"
    with kernel_errors():
        assert files.read(path) == chip.facts.telemetry["tt_serial"]
        chip.vanish()
        with pytest.raises(OSError) as gone:
            files.read(path)
    files.close()
    assert gone.value.errno == errno.ENODEV


# -- what the card itself shows --------------------------------------------------------------------

# Of the p150a in the capture n150-p150a: metric, its labels' values, and its value, by attribute.
P150A: dict[str, tuple[str, list[str], float]] = {
    "power1_input": ("power_watts", [], 24),
    "power1_max": ("power_limit_watts", [], 150),
    "curr1_input": ("current_amperes", [], 33),
    "curr1_max": ("current_limit_amperes", [], 200),
    "in0_input": ("voltage_volts", [], 0.712),
    "in0_max": ("voltage_limit_volts", [], 0.9),
    "fan1_input": ("fan_rpm", [], 1650),
    "tt_aiclk": ("clock_hertz", ["aiclk"], 800e6),
    "tt_axiclk": ("clock_hertz", ["axiclk"], 960e6),
    "tt_arcclk": ("clock_hertz", ["arcclk"], 400e6),
    "current_link_width": ("pcie_link_width", [], 16),
    "max_link_width": ("pcie_link_width_max", [], 16),
    "current_link_speed": ("pcie_link_transfers_per_second", [], 32e9),
    "max_link_speed": ("pcie_link_transfers_per_second_max", [], 32e9),
    "aer_dev_correctable": ("pcie_errors_total", ["correctable"], 0),
    "aer_dev_nonfatal": ("pcie_errors_total", ["nonfatal"], 0),
    "aer_dev_fatal": ("pcie_errors_total", ["fatal"], 0),
}


def test_each_sensor_is_what_the_capture_shows_in_the_metrics_unit() -> None:
    """Watts, amperes, volts, rpm, hertz, lanes, transfers and counts, each under its metric."""
    with simulated("n150-p150a") as node:
        figures = ttdp.read_sensors(function_of(node.chip("0000:02:00.0")))
    shown = {
        each.attribute: (
            each.metric,
            [*each.labels.values()],
            pytest.approx(figures[each.attribute]),
        )
        for each in SENSORS
    }
    assert shown == P150A and figures.keys() == P150A.keys()


def test_a_sensor_that_a_capture_does_not_show_has_no_figure(
    captured: tuple[str, SimulatedNode],
) -> None:
    """A Wormhole has no fan, an old driver fewer limits, silent firmware nothing but its link."""
    name, node = captured
    for bdf, facts in facts_of(name).items():
        if facts.shown:
            figures = ttdp.read_sensors(functions(node)[bdf])
            assert figures.keys() == facts.shown & P150A.keys()


def test_a_dead_chip_has_no_figures_but_those_of_its_link(chip: Chip) -> None:
    """All ones are 4295 V and 4.3 PHz; the lanes and errors are the kernel's own to say."""
    chip.die(bus=True)
    figures = ttdp.read_sensors(function_of(chip))
    links = {"current_link_width", "max_link_width", "max_link_speed"}
    assert figures.keys() == links | {name for name in P150A if name.startswith("aer_")}


@pytest.mark.parametrize(
    ("attribute", "text", "figure"),
    [
        ("current_link_speed", "2.5 GT/s PCIe", 2.5e9),
        ("current_link_speed", "5 GT/s", 5e9),  # before Linux 5.8
        ("current_link_speed", "64.0 GT/s PCIe", 64e9),
        ("current_link_speed", "Unknown", None),
        ("current_link_width", "4", 4),
        ("current_link_width", "63", None),  # what all ones are in its six bits
        ("aer_dev_correctable", "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7", 7),
        ("aer_dev_fatal", "Undefined 1\nTOTAL_ERR_FATAL 12", 12),
        ("aer_dev_nonfatal", "Undefined 1", None),
        ("power1_input", "0", 0),
        ("fan1_input", "-1", None),
    ],
)
def test_link_and_errors_are_read_as_the_kernel_writes_them(
    chip: Chip, attribute: str, text: str, figure: float | None
) -> None:
    """Speeds with their unit, errors by their sum; a text of another form is no figure."""
    chip.write(attribute, f"{text}\n".encode())
    assert ttdp.read_sensors(function_of(chip)).get(attribute) == figure


# -- what is no device -----------------------------------------------------------------------------


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
def test_a_node_that_is_wrong_from_the_start_is_listed_when_it_is_right(
    node: SimulatedNode,
    instead: Callable[[Path], None] | None,
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says what it is instead, however often one looks; udev can be slower than a scan."""
    wrong, right = node.add("n150") + node.add("n150")
    path = wrong.device_node
    hidden = path.rename(node.root / "hidden")
    if instead:
        instead(path)
    fleet = Fleet({}, [])
    for _ in range(3):
        fleet.observe(settings(node))
    assert fleet.chips.keys() == {right.bdf}
    (oddity,) = fleet.oddities
    assert str(path) in oddity and words in oddity
    assert sum(str(path) in record.message for record in caplog.records) == 1
    if path.is_dir():
        path.rmdir()
    os.rename(hidden, path)
    assert [function.bdf for function in fleet.observe(settings(node))] == [wrong.bdf]
    assert fleet.oddities == ()


def test_a_node_may_be_a_link_to_one(chip: Chip) -> None:
    """What counts is what a container would open."""
    path = chip.device_node
    path.symlink_to(path.rename(chip.node.root / "moved"))
    assert function_of(chip).node_fault is None


@pytest.mark.parametrize("content", [b"", b"1:99\n", b"garbage\n", None])
def test_a_number_that_sysfs_does_not_confirm_is_a_wrong_node(
    chip: Chip, content: bytes | None
) -> None:
    """The node counts only if its number is the one in sysfs's `dev`."""
    if content is None:
        chip.remove("dev")
    else:
        chip.write("dev", content)
    assert function_of(chip).node_fault


@pytest.mark.parametrize(
    ("attribute", "content"), [("device", "0xfaca"), ("device", "0x1234"), ("vendor", "0x10de")]
)
def test_an_unknown_pci_device_is_odd(chip: Chip, attribute: str, content: str) -> None:
    """Grayskull, a chip of tomorrow, another maker's: named by its address and PCI IDs."""
    chip.write(attribute, f"{content}\n".encode())
    found = ttdp.scan(settings(chip.node))
    (oddity,) = found.oddities
    assert not found.functions and chip.bdf in oddity and content[2:] in oddity


def test_class_entries_that_are_none_of_the_drivers_are_odd(chip: Chip) -> None:
    """Strange names, and a device that is no PCI function; the chip beside them is found."""
    directory = chip.node.root / "sys/class/tenstorrent"
    for name in ("tenstorrent!", "tenstorrent!0x1", "tenstorrent0", "tenstorrent!1234567"):
        (directory / name).symlink_to("nowhere")
    (directory / "tenstorrent!7").symlink_to("../../devices/usb1/tenstorrent/tenstorrent!7")
    found = ttdp.scan(settings(chip.node))
    assert list(found.functions) == [chip.bdf] and len(found.oddities) == 5


def test_entries_that_are_just_going_away_are_nothing(node: SimulatedNode) -> None:
    """A link without its directory, a function without its PCI files: nothing to talk about."""
    going, half, other = (node.add("n150")[0] for _ in range(3))
    target = going.attribute("dev").parent
    target.rename(target.with_name("gone"))
    half.remove("vendor")
    other.remove("subsystem_device")
    found = ttdp.scan(settings(node))
    assert found.oddities == ()
    assert [function.bdf for function in found.functions.values() if not function.node_fault] == []


@pytest.mark.parametrize("root", ["sys", "nowhere", "state.json"])
def test_no_driver_no_devices(node: SimulatedNode, root: str) -> None:
    """Without the module there is neither a directory nor a version; without sysfs, neither."""
    node.unload_driver()
    looked = Settings(sysfs_root=str(node.root / root))
    assert ttdp.scan(looked) == ttdp.Scan({}, ()) and ttdp.driver_version(looked) is None


def test_a_driver_that_does_not_say_its_version_is_loaded(node: SimulatedNode) -> None:
    """A module without the file is there all the same."""
    (node.root / "sys/module/tenstorrent/version").unlink()
    assert ttdp.driver_version(settings(node)) == ""


# -- over time -------------------------------------------------------------------------------------


def test_only_what_is_new_back_or_moved_is_to_be_read(node: SimulatedNode) -> None:
    """A second look at an unchanged node wants no telemetry; a renumbering, that of both chips."""
    first, second = node.add("n150") + node.add("n150")
    fleet = Fleet({}, [])

    def news() -> list[tuple[str, int]]:
        return [(each.bdf, each.ordinal) for each in fleet.observe(settings(node))]

    assert news() == [(first.bdf, 0), (second.bdf, 1)]
    assert news() == []
    node.swap_ordinals(first.bdf, second.bdf)
    assert news() == [(first.bdf, 1), (second.bdf, 0)]
    second.vanish()
    assert news() == []
    second.come_back()
    assert news() == [(second.bdf, 0)]


def test_a_chip_is_followed_by_its_address(node: SimulatedNode) -> None:
    """Chips that swap their numbers stay who they are; a reading from before is dropped."""
    first, second = node.add("n150") + node.add("n150")
    fleet = Fleet({}, [])
    look(fleet, node)
    before = fleet.chips[first.bdf]
    node.swap_ordinals(first.bdf, second.bdf)
    fleet.observe(settings(node))
    late = Telemetry(Identity(asic_id="E" * 16))
    fleet.learn([Reading(before.function, late, False, None)], HealthSettings(), 0)
    after = fleet.chips[first.bdf]
    assert (after.identity, after.function.ordinal) == (before.identity, 1)


@pytest.mark.parametrize("said", [Telemetry(), Telemetry(all_ones=True), Telemetry(error=("x", 5))])
def test_silence_and_garbage_unlearn_nothing(chip: Chip, said: Telemetry) -> None:
    """What the firmware has said stays known when it says less; what it says anew counts."""
    fleet = Fleet({}, [])
    look(fleet, chip.node)
    known = fleet.chips[chip.bdf].identity
    newer = Telemetry(Identity(firmware="20.1.0.0"))
    for telemetry in (said, newer):
        reading = Reading(fleet.chips[chip.bdf].function, telemetry, True, None)
        fleet.learn([reading], HealthSettings(), 0)
    assert fleet.chips[chip.bdf].identity == known._replace(firmware="20.1.0.0")


def test_another_kind_of_card_at_an_address_has_another_identity(chip: Chip) -> None:
    """A slot that shows another card type than before does not keep the old card's serial."""
    fleet = Fleet({}, [])
    look(fleet, chip.node)
    chip.write("subsystem_device", b"0x0043\n")
    assert [seen.pci_card for seen in fleet.observe(settings(chip.node))] == ["p100a"]
    assert fleet.chips[chip.bdf].identity == Identity()


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize(("step", "is_known"), [("vanish", False), ("unbind", True)])
def test_what_left_the_bus_is_not_known_again_before_it_speaks(
    chip: Chip, step: str, is_known: bool, restarted: bool
) -> None:
    """Another card of the same type, with silent firmware, is not taken for the one before it.

    One that only the driver let go is the same, whether the daemon saw it go or was away.
    """
    fleet = Fleet({}, [])
    look(fleet, chip.node)
    known = fleet.chips[chip.bdf].identity
    getattr(chip, step)()
    if not restarted:
        look(fleet, chip.node)
    fleet = Fleet(fleet.memory(), ttdp.functions_on_bus(settings(chip.node)))
    chip.facts.firmware = False
    (chip.come_back if step == "vanish" else chip.bind)()
    chip.silence()
    look(fleet, chip.node)
    silent = fleet.chips[chip.bdf].identity
    assert silent == (known if is_known else Identity())
    chip.facts.firmware = True
    chip.rebind()
    look(fleet, chip.node)
    assert fleet.chips[chip.bdf].identity == known


def test_a_chip_is_read_in_its_functions_own_directory(chip: Chip) -> None:
    """The class device's link to it goes and comes back with the driver, in between two reads."""
    before = function_of(chip)
    (Path(before.sysfs) / "device").unlink()
    assert function_of(chip) == before and before.directory == str(chip.attribute("vendor").parent)


def test_chips_that_come_and_go_are_seen_as_they_are_or_not_at_all(node: SimulatedNode) -> None:
    """At every step of a plug, a rebinding, a renumbering and a removal, none is another card."""
    fleet = Fleet({}, [])
    steps = []

    def step() -> None:
        steps.append(fleet.observe(settings(node)))
        for seen in steps[-1]:
            card = ("n300", 0) if seen.bdf == "0000:01:00.0" else ("p150a", 1)
            assert (seen.pci_card, seen.numa_node) == card

    node.on_step = step
    first, second = node.add("n300", numa_node=0) + node.add("p150a", numa_node=1)
    first.rebind()
    node.swap_ordinals(first.bdf, second.bdf)
    second.vanish()
    assert len(steps) > 100 and len(fleet.chips) == 2


def test_a_numa_node_that_the_kernel_does_not_know_is_no_torn_reading(chip: Chip) -> None:
    """A kernel without NUMA has no such attribute: the chip is there all the same."""
    chip.remove("numa_node")
    assert function_of(chip).numa_node is None


def test_a_known_chip_is_the_same_at_a_second_look_but_for_its_node(node: SimulatedNode) -> None:
    """A scan that knows the chips finds what a thorough one does, whatever happened to them."""
    first, second = node.add("n150") + node.add("n150")
    known = functions(node).values()
    assert ttdp.scan(settings(node), known) == ttdp.scan(settings(node))
    node.swap_ordinals(first.bdf, second.bdf)
    assert ttdp.scan(settings(node), known) == ttdp.scan(settings(node))
    node.add("p150a")
    second.vanish()
    first.device_node.unlink()
    found = ttdp.scan(settings(node), known)
    assert found == ttdp.scan(settings(node)) and found.functions[first.bdf].node_fault


# -- never open a device ---------------------------------------------------------------------------

opened: list[str] | None = None


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opening)  # sees every way of opening a file that Python has


def test_no_device_is_ever_opened(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opening a node would power the chip up: a survey reads sysfs and asks stat() of the nodes."""
    paths: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "opened", paths)
    with Ticker(chip.node):
        ttdp.check(lambda: settings(chip.node), config_only=False)
    assert "p150a, " in capsys.readouterr().out
    assert any(path.endswith("tt_heartbeat") for path in paths)
    nodes = (f"{chip.node.root}/dev/", "/dev/tenstorrent")
    assert not [path for path in paths if path.startswith(nodes)]
