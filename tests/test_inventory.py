"""Inventory: what is found is what the real driver showed in every capture; garbage is nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
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
from tests.world.tree import open_below
from ttdp import SENSORS, Fleet, HealthSettings, Identity, PciFunction, Reading, Telemetry
from ttdp import parse_telemetry as parse
from ttdp import read_telemetry as read


def settings(node: SimulatedNode) -> ttdp.Settings:
    return settings_of(node, node.root / "plugins")


def functions(node: SimulatedNode) -> dict[str, PciFunction]:
    return dict(ttdp.scan(settings(node)).functions)


def function_of(chip: Chip) -> PciFunction:
    """The chip as a scan finds it now."""
    return functions(chip.node)[chip.bdf]


def look(fleet: Fleet, node: SimulatedNode) -> dict[str, ttdp.Chip]:
    """A poll in which every chip answers; what is known after it."""
    fleet.observe(settings(node))
    present = [chip.function for chip in fleet.chips.values() if chip.present]
    fleet.learn([Reading(each, read(each), True, None) for each in present], HealthSettings(), 0)
    return fleet.chips


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory where there is such a place: a Galaxy is 2500 files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@contextlib.contextmanager
def simulated(name: str) -> Iterator[SimulatedNode]:
    """The node of a capture."""
    with in_memory() as directory:
        yield SimulatedNode.from_capture(directory, name)


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


def shown(name: str) -> dict[str, dict[str, str]]:
    """The attributes' texts of each function of a capture, but where it has the node only."""
    return {
        each["path"].rsplit("/")[-1]: each["pci"] | each["class"] | each.get("sensors", {})
        for each in capture(name)["functions"]
        if "class" in each
    }


# -- every capture ---------------------------------------------------------------------------------


def test_every_function_of_a_capture_is_found_as_it_was(
    captured: tuple[str, SimulatedNode],
) -> None:
    """In the order of addresses, with its node, architecture, card and NUMA node; nothing odd."""
    name, node = captured
    found = ttdp.scan(settings(node))
    places = {each["path"].rsplit("/")[-1]: each["ordinal"] for each in capture(name)["functions"]}
    assert {bdf: each.ordinal for bdf, each in found.functions.items()} == places
    assert list(found.functions) == sorted(places) and found.oddities == ()
    for bdf, function in found.functions.items():
        path = f"{node.root}/dev/tenstorrent/{places[bdf]}"
        assert (function.path, function.node_fault) == (path, None)
    for bdf, texts in shown(name).items():
        function = found.functions[bdf]
        assert function.arch == {"0x401e": "wormhole", "0xb140": "blackhole"}[texts["device"]]
        assert CARDS[function.pci_card or ""] == int(texts["subsystem_device"], 16)
        numa_node = -1 if function.numa_node is None else function.numa_node
        assert str(numa_node) == texts["numa_node"]
    assert ttdp.driver_version(settings(node)) == capture(name)["driver"]


def test_the_telemetry_of_a_capture_is_read_as_it_was(captured: tuple[str, SimulatedNode]) -> None:
    """Identity, heartbeat, temperature, its limit, thermal trips: what is shown, and no more."""
    name, node = captured
    for bdf, texts in shown(name).items():
        telemetry = read(functions(node)[bdf])
        ids = ("tt_card_type", "tt_serial", "tt_asic_id", "tt_fw_bundle_ver")
        assert telemetry.identity == tuple(map(texts.get, ids))
        for attribute, scale in (("tt_heartbeat", 1), ("tt_therm_trip_count", 1),
                                 ("temp1_input", 1000), ("temp1_max", 1000)):  # fmt: skip
            value = VALUES[attribute](telemetry)
            assert (value if value is None else f"{value * scale:g}") == texts.get(attribute)
        assert (telemetry.all_ones, telemetry.error) == (False, None)


# -- firmware that is late, or says nothing --------------------------------------------------------


def test_late_firmware_brings_the_identity_and_nothing_else() -> None:
    """Before, PCI tells the card and nobody the serial; after, both are known of the same chip."""
    with simulated("n150-late-before") as node:
        (before,) = look(Fleet({}, []), node).values()
        node.chip(before.bdf).speak()
        (after,) = look(Fleet({}, []), node).values()
    assert (before.card_type, before.identity) == ("n150", Identity())
    assert after.identity[:3] == ("n150", "0100018511732048", "3B1D7A5620E41F08")
    assert after.function == before.function


def test_pci_tells_the_card_of_a_silent_chip(chip: Chip) -> None:
    """Each board's code stands for its type; of one that nobody knows there is no type."""
    for card, code in [*CARDS.items(), (None, 0x99)]:
        chip.write("subsystem_device", f"0x{code:04x}\n".encode())
        assert function_of(chip).pci_card == card


def test_a_chip_that_offers_nothing_is_looked_up_in_its_configuration_space(chip: Chip) -> None:
    """Dead when the driver bound to it, it looks like late firmware, but for what PCI reads."""
    chip.silence()
    function = function_of(chip)
    chip.write("config", b"")  # what cannot be read is no proof
    assert read(function) == Telemetry()
    chip.remove("config")
    assert read(function) == Telemetry()
    chip.die(bus=True)
    assert read(function) == Telemetry(all_ones=True, off_bus=True)


# -- chips that are dead, and garbage --------------------------------------------------------------

SPOKE = [
    name for name in capture_names() if name[:6] != "galaxy" and "temp1_input" in str(shown(name))
]


@pytest.mark.parametrize("name", SPOKE)
def test_all_ones_are_no_telemetry(name: str) -> None:
    """Of every captured chip that spoke, death is no identity, no temperature and no count."""
    with simulated(name) as node:
        for chip in node.chips[:4]:
            chip.die()
            assert read(function_of(chip))._replace(hwmon=None) == Telemetry(all_ones=True)


VALUES: dict[str, Callable[[Telemetry], Any]] = {
    "tt_card_type": lambda telemetry: telemetry.identity.card,
    "tt_serial": lambda telemetry: telemetry.identity.serial,
    "tt_asic_id": lambda telemetry: telemetry.identity.asic_id,
    "tt_fw_bundle_ver": lambda telemetry: telemetry.identity.firmware,
    "tt_therm_trip_count": lambda telemetry: telemetry.trips,
    "temp1_input": lambda telemetry: telemetry.temperature,
    "temp1_max": lambda telemetry: telemetry.throttles_at,
    "tt_heartbeat": lambda telemetry: telemetry.heartbeat,
}


@pytest.mark.parametrize("attribute", [*VALUES][:-1])
@pytest.mark.parametrize("instead", ["all ones", "ENODATA"])
def test_one_value_that_is_none_takes_no_other_with_it(
    chip: Chip, attribute: str, instead: str
) -> None:
    """A read that met the chip's death halfway, or a tag that its firmware no longer reports.

    Neither is a death or a reset, whether everything is read or only what changes.
    """
    function = function_of(chip)
    sound = read(function)
    if instead == "ENODATA":
        chip.fail(attribute, "ENODATA")
    else:
        chip.write(attribute, dead_value(attribute, "").encode())
    with kernel_errors():
        everything = read(function)
        chip.beat()
        changes = read(function, sound)
    assert not (everything.all_ones or everything.error or changes.all_ones or changes.error)
    for name, value in VALUES.items():
        assert value(everything) == (None if name == attribute else value(sound))


@pytest.mark.parametrize(
    ("raw", "is_dead"),
    [
        ({"tt_heartbeat": "4294967295", "tt_card_type": "unknown"}, True),
        ({"tt_heartbeat": "1219", "tt_card_type": "unknown"}, False),
        ({"tt_card_type": "unknown"}, False),
    ],
)
def test_a_card_type_that_the_driver_does_not_know_is_no_death(
    raw: dict[str, str], is_dead: bool
) -> None:
    """`unknown` is also what a new board says; with the heartbeat of all ones it is proof."""
    assert parse(raw).all_ones is is_dead


FORMS = dict(zip(VALUES, ["[a-z][a-z0-9-]*", "[0-9A-F]{16}", "[0-9A-F]{16}", r"\d+(\.\d+)+",
                          r"\d+", r"\d+", r"\d+", r"-?\d+"], strict=True))  # fmt: skip
NEARLY = ["1_000", "+7", " 7", "٣", "0x10", "-1", "1e3", "nan", "9" * 5000, "1.2.3.4", "n150\n"]
texts = st.one_of(
    st.text(st.characters(codec="latin-1"), max_size=40),
    st.text("0123456789abcdefABCDEFx_+-. \n", max_size=18),
    st.from_regex(r"[0-9A-F]{16}", fullmatch=True),
    st.sampled_from(NEARLY),
)


@hypothesis_settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from([*VALUES]), texts))
@example({"tt_heartbeat": "1_000"})
@example({"temp1_input": "+41500"})
def test_only_what_has_the_drivers_form_counts(raw: dict[str, str]) -> None:
    """From any texts: no exception, and each value has the driver's form or is not offered."""
    telemetry = parse(raw)
    for attribute, value in VALUES.items():
        if value(telemetry) is not None:
            assert re.fullmatch(FORMS[attribute], raw[attribute], re.ASCII)


IN_PCI = ["vendor", "device", "subsystem_device", "numa_node"]
attributes = st.sampled_from([*VALUES, *(each.attribute for each in SENSORS), *IN_PCI])
nearly_hex = st.sampled_from([b"-2\n", b"0x\n", b"1_0\n", b"99999999999999999999999\n"])


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.dictionaries(attributes, st.binary(max_size=20) | nearly_hex, min_size=1),
       st.sampled_from([0, 0, 6000]))  # fmt: skip
@example({"numa_node": b"99999999999999999999\n"}, 0)
def test_garbage_in_attributes_never_raises(
    fuzzed: Chip, content: dict[str, bytes], more: int
) -> None:
    """Binary, empty, huge: the other chip is found, and what is found can be told to a kubelet."""
    try:
        for attribute, data in content.items():
            fuzzed.write(attribute, data + b"x" * more)
        found = functions(fuzzed.node)
        chips = [ttdp.Chip(each, identity=read(each).identity) for each in found.values()]
        figures = [ttdp.read_sensors(each) for each in found.values()]
    finally:
        for attribute in content:
            fuzzed.restore(attribute)
    assert "0000:02:00.0" in found and found.keys() <= {fuzzed.bdf, "0000:02:00.0"}
    assert not (more and figures[0].keys() & content.keys() and len(figures) == 2)
    for resource in ttdp.configured_resources(chips, ttdp.Settings()).values():
        ttdp.device_list(resource)


# -- reads that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    ("attribute", "error"),
    [
        ("tt_heartbeat", "ENODATA"),
        ("tt_heartbeat", "EIO"),
        ("temp1_input", "EIO"),
        ("tt_therm_trip_count", "EACCES"),
    ],
)
def test_a_read_that_fails_is_told_with_its_attribute_and_errno(
    chip: Chip, attribute: str, error: str, is_known: bool
) -> None:
    """Whether everything is read or only what changes, nothing of the others is guessed."""
    function = function_of(chip)
    former = read(function) if is_known else None
    chip.beat()
    chip.fail(attribute, error)
    with kernel_errors():
        assert read(function, former) == Telemetry(error=(attribute, getattr(errno, error)))


def test_an_attribute_that_is_a_directory_is_an_error_of_that_chip(chip: Chip) -> None:
    """Nothing that a path can lead to makes a read raise."""
    chip.remove("tt_serial")
    chip.attribute("tt_serial").mkdir()
    assert read(function_of(chip)).error == ("tt_serial", errno.EISDIR)


def test_a_chip_that_went_between_scan_and_read_is_going_away(chip: Chip) -> None:
    """Its directory is gone: that is ENODEV, not a chip that offers nothing."""
    function = function_of(chip)
    chip.vanish()
    assert read(function) == Telemetry(error=("tenstorrent!0", errno.ENODEV))


def test_a_read_after_a_renumbering_does_not_reach_the_other_chip(node: SimulatedNode) -> None:
    """What was seen under a name gets nothing from the chip that has that name now."""
    first, second = node.add("n150") + node.add("n150")
    before = function_of(first)
    node.swap_ordinals(first.bdf, second.bdf)
    assert read(before).identity == Identity()
    asic_id = second.facts.telemetry["tt_asic_id"]
    assert read(function_of(second)).identity.asic_id == asic_id


# -- what most polls read --------------------------------------------------------------------------


def test_while_a_heartbeat_goes_on_only_what_changes_is_read(chip: Chip) -> None:
    """The firmware has said who it is; after a restart, which the heartbeat shows, it says so."""
    function = function_of(chip)
    first = read(function)
    chip.write("tt_serial", b"00000401319110FF\n")
    chip.beat()
    chip.heat(70)
    chip.trip()
    second = read(function, first)
    assert second == first._replace(heartbeat=second.heartbeat, temperature=70, trips=1)
    chip.beat(-100)
    assert read(function, second).identity.serial == "00000401319110FF"


@pytest.mark.parametrize("change", ["die", "reset", "silence", "freeze", "unbind", "vanish"])
def test_whatever_is_no_heartbeat_that_goes_on_has_everything_read(chip: Chip, change: str) -> None:
    """With open files and the last telemetry a look finds what one without finds; none stays."""
    function = function_of(chip)
    files = ttdp.AttributeFiles()
    with kernel_errors():
        former = read(function)
        chip.beat()
        former = read(function, former, files)
        getattr(chip, change)()
        assert read(function, former, files) == read(function)
    assert open_below(chip.node.root) == 0


def test_a_file_of_a_device_that_has_gone_shows_no_other_chips_value(chip: Chip) -> None:
    """A card that is unplugged for another one in its slot: what is kept open answers ENODEV."""
    files = ttdp.AttributeFiles()
    path = f"{function_of(chip).sysfs}/tt_heartbeat"
    with kernel_errors():
        files.read(path)
        chip.beat()
        assert files.read(path) == chip.attribute("tt_heartbeat").read_text().strip()
        chip.vanish()
        with pytest.raises(OSError) as gone:
            files.read(path)
    files.close()
    assert gone.value.errno == errno.ENODEV


# -- what the card itself shows --------------------------------------------------------------------

LINK = {"current_link_width", "max_link_width", "max_link_speed"}
LINK |= {f"aer_dev_{kind}" for kind in ("correctable", "nonfatal", "fatal")}


ALL = {sensor.attribute for sensor in SENSORS}


def test_a_sensor_that_a_capture_does_not_show_has_no_figure(
    captured: tuple[str, SimulatedNode],
) -> None:
    """A Wormhole has no fan, an old driver fewer limits, silent firmware nothing but its link."""
    name, node = captured
    for bdf, texts in shown(name).items():
        assert ttdp.read_sensors(functions(node)[bdf]).keys() == texts.keys() & ALL


def test_a_dead_chip_has_no_figures_but_those_of_its_link(chip: Chip) -> None:
    """All ones are 4295 V and 4.3 PHz; lanes and errors are the kernel's own to say."""
    chip.die(bus=True)
    assert ttdp.read_sensors(function_of(chip)).keys() == LINK


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

INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "No such file"),
    "file": (lambda path: path.touch(0o666), "not a character device"),
    "directory": (lambda path: path.mkdir(), "not a character device"),
    "fifo": (os.mkfifo, "not a character device"),
    "loop": (lambda path: path.symlink_to(path), "symbolic links"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "other number": (lambda path: path.symlink_to("/dev/zero"), "number 1:5"),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_a_node_that_is_wrong_from_the_start_is_a_device_when_it_is_right(
    node: SimulatedNode, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says what it is instead, however often one looks; udev can be slower than a scan."""
    wrong, right = node.add("n150") + node.add("n150")
    path = wrong.device_node
    hidden = path.rename(node.root / "hidden")
    make, words = INSTEAD[what]
    make(path)
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
    """A function that has lost some of its PCI files, a class device without its directory."""
    half, other, going = (node.add("n150")[0] for _ in range(3))
    half.remove("vendor")
    other.remove("subsystem_device")
    directory = going.attribute("dev").parent
    directory.rename(directory.with_name("gone"))
    (function,) = functions(node).values()
    assert ttdp.scan(settings(node)).oddities == ()
    assert function.node_fault == f"{function.path} is going away"


@pytest.mark.parametrize("root", ["sys", "nowhere", "state.json"])
def test_no_driver_no_devices(node: SimulatedNode, root: str) -> None:
    """Without the module there is neither a directory nor a version; without sysfs, neither."""
    node.unload_driver()
    looked = ttdp.Settings(sysfs_root=str(node.root / root))
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
    before = look(fleet, node)[first.bdf]
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
    known = look(fleet, chip.node)[chip.bdf]
    for telemetry in (said, Telemetry(Identity(firmware="20.1.0.0"))):
        fleet.learn([Reading(known.function, telemetry, True, None)], HealthSettings(), 0)
    assert fleet.chips[chip.bdf].identity == known.identity._replace(firmware="20.1.0.0")


def test_another_kind_of_card_at_an_address_has_another_identity(chip: Chip) -> None:
    """A slot that shows another card type than before does not keep the old card's serial."""
    fleet = Fleet({}, [])
    look(fleet, chip.node)
    chip.write("subsystem_device", b"0x0043\n")
    assert [seen.pci_card for seen in fleet.observe(settings(chip.node))] == ["p100a"]
    assert fleet.chips[chip.bdf].identity == Identity()


def restarted(fleet: Fleet, node: SimulatedNode) -> Fleet:
    """The fleet of the daemon's next process."""
    memory = json.loads(json.dumps(fleet.memory()))
    return Fleet(memory, ttdp.functions_on_bus(settings(node)))


@pytest.mark.parametrize(("step", "is_known"), [("vanish", False), ("unbind", True)])
@pytest.mark.parametrize(
    ("is_seen", "restart"), [(True, ""), (True, "away"), (False, "away"), (True, "back")]
)
def test_what_left_the_bus_is_not_known_again_before_it_speaks(
    chip: Chip, step: str, is_known: bool, is_seen: bool, restart: str
) -> None:
    """Another card of the same type, with silent firmware, is not taken for the one before it.

    One that only the driver let go is who it was. The daemon may be restarted meanwhile.
    """
    fleet = Fleet({}, [])
    known = look(fleet, chip.node)[chip.bdf].identity
    getattr(chip, step)()
    if is_seen:
        look(fleet, chip.node)
    fleet = restarted(fleet, chip.node) if restart == "away" else fleet
    (chip.come_back if step == "vanish" else chip.bind)()
    chip.silence()
    fleet = restarted(fleet, chip.node) if restart == "back" else fleet
    silent = look(fleet, chip.node)[chip.bdf].identity
    assert silent == (known if is_known else Identity())
    chip.speak()
    chip.rebind()
    assert look(fleet, chip.node)[chip.bdf].identity == known


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
    """A scan that knows the chips finds what a thorough one does, but for what seldom changes."""
    first, second = node.add("n150") + node.add("n150")
    known = functions(node).values()
    second.write("numa_node", b"1\n")
    assert ttdp.scan(settings(node), known).functions == {each.bdf: each for each in known}
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
