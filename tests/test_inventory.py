"""Inventory: the real driver's captures are read as they are, and garbage is discarded."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import decide, kind_of
from tests.world.captures import capture, capture_names
from tests.world.node import CARDS, Chip, SimulatedNode, dead_value
from tests.world.processes import workspace
from tests.world.service import Service
from tests.world.simulation import kernel_errors, settings_of
from ttdp import (
    SENSORS,
    ChipState,
    HealthSettings,
    Identity,
    Inventory,
    Kind,
    PciFunction,
    ReadError,
    Reading,
    Telemetry,
    read_sensors,
    read_telemetry,
)
from ttdp import parse_telemetry as parse


def settings(node: SimulatedNode) -> ttdp.Settings:
    return settings_of(node, node.root / "plugins")


def functions(node: SimulatedNode) -> dict[str, PciFunction]:
    found = ttdp.scan(settings(node), {}, driver_is_loaded=True)
    return {bdf: function for bdf, function in found.items() if function}


def function_of(chip: Chip) -> PciFunction:
    """Return the chip as a scan finds it now."""
    return functions(chip.node)[chip.bdf]


def put_or_remove(chip: Chip, attribute: str, content: bytes | None) -> None:
    """Give the attribute this content; None: it does not exist."""
    if content is None:
        chip.remove(attribute)
    else:
        chip.write(attribute, content)


def restarted(inventory: Inventory) -> Inventory:
    """Return what the next daemon knows of these chips."""
    saved = {bdf: state.to_saved() for bdf, state in inventory.states.items()}
    loaded = json.loads(json.dumps(saved)).items()
    return Inventory({bdf: ChipState.from_saved(bdf, row) for bdf, row in loaded})


def look(inventory: Inventory, node: SimulatedNode, at: float = 0.0) -> dict[str, ttdp.Chip]:
    """Poll once, with an answer of every chip."""
    for each in node.chips:
        each.beat()
    inventory.scan(settings(node))
    readings = [Reading(each, read_telemetry(each), at) for each in inventory.present]
    inventory.apply(readings, HealthSettings())
    return inventory.chips


@contextlib.contextmanager
def simulated(name: str) -> Iterator[SimulatedNode]:
    with workspace() as directory:
        yield SimulatedNode.from_capture(directory, name)


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    """A Blackhole alone on a node."""
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
    """Return the attributes of each bound function of a capture."""
    return {
        each["path"].rsplit("/")[-1]: each["pci"] | each["class"] | each.get("sensors", {})
        for each in capture(name)["functions"]
        if "class" in each
    }


# -- every capture ---------------------------------------------------------------------------------


def test_every_function_of_a_capture_is_found_as_it_was(
    captured: tuple[str, SimulatedNode],
) -> None:
    """With its device file, architecture, card and NUMA node."""
    name, node = captured
    ordinals = {
        each["path"].rsplit("/")[-1]: each["ordinal"] for each in capture(name)["functions"]
    }

    found = functions(node)

    assert {bdf: each.ordinal for bdf, each in found.items()} == ordinals
    for bdf, function in found.items():
        path = f"{node.root}/dev/tenstorrent/{ordinals[bdf]}"
        assert (function.path, function.file_fault) == (path, None)

    for bdf, texts in shown(name).items():
        function = found[bdf]
        assert function.arch == {"0x401e": "wormhole", "0xb140": "blackhole"}[texts["device"]]
        assert function.subsystem == int(texts["subsystem_device"], 16)
        numa_node = -1 if function.numa_node is None else function.numa_node
        assert str(numa_node) == texts["numa_node"]

    assert ttdp.driver_version(settings(node)) == capture(name)["driver"]


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


def test_telemetry_and_sensors_of_a_capture_are_read_as_they_were(
    captured: tuple[str, SimulatedNode],
) -> None:
    """Every attribute that the capture has, and no other."""
    name, node = captured
    for bdf, texts in shown(name).items():
        function = functions(node)[bdf]

        telemetry = read_telemetry(function)

        assert (telemetry.all_ones, telemetry.error) == (False, None)
        for attribute, value_of in VALUES.items():
            value = value_of(telemetry)
            if value is not None and attribute.startswith("temp1"):
                value *= 1000
            found = f"{value:g}" if isinstance(value, float) else value
            assert (found if found is None else str(found)) == texts.get(attribute)

        assert read_sensors(function).keys() == texts.keys() & {each.attribute for each in SENSORS}


# -- late firmware, dead chips, garbage ------------------------------------------------------------


def test_the_pci_subsystem_indicates_the_card(chip: Chip) -> None:
    """A Galaxy Blackhole with 7 of 8 memory tiles has trays, and less memory."""
    chip.silence()

    codes = [(card, each.code) for card, each in CARDS.items()]
    for card, code in [*codes, ("galaxy-blackhole", 0x202), (None, 0x99)]:
        chip.write("subsystem_device", f"0x{code:04x}\n".encode())
        found = ttdp.Chip(function_of(chip))
        assert found.card_type == card
        assert found.is_galaxys == str(card).startswith("galaxy")

        if code == 0x202:
            assert found.memory == 28672
            assert ttdp.places([found])[found.bdf].board_id == "0000:00"
            (name,) = decide([found._replace(is_listed=True)]).resources
            assert name == "tenstorrent.com/galaxy-blackhole"


@pytest.mark.parametrize(
    ("harm", "telemetry"),
    [
        (lambda chip: None, Telemetry()),
        (lambda chip: chip.write("config", b""), Telemetry()),
        (lambda chip: chip.remove("config"), Telemetry()),
        (lambda chip: chip.die(bus=True), Telemetry(all_ones=True)),
    ],
    ids=["late firmware", "nothing in it", "not readable", "dead"],
)
def test_a_chip_without_telemetry_is_dead_if_its_configuration_space_is(
    chip: Chip, harm: Callable[[Chip], None], telemetry: Telemetry
) -> None:
    """It looks like late firmware otherwise."""
    chip.silence()
    function = function_of(chip)

    harm(chip)

    assert read_telemetry(function) == telemetry


@pytest.mark.parametrize("version", ["1.34", "2.0.0", "2.5.0", "2.9.0", "2.10.0"])
def test_all_ones_are_no_telemetry(version: str) -> None:
    """No identity, no temperature, no count, whichever attributes the driver has.

    And whatever it makes of them: another number of a Wormhole's temperature before 2.9, and PCI's
    card type of a Blackhole before 2.2.
    """
    with simulated(f"n150-p150a-kmd-{version}") as node:
        for chip in node.chips:
            chip.die()
            assert read_telemetry(function_of(chip)) == Telemetry(all_ones=True)


@pytest.mark.parametrize("attribute", [*VALUES][:-1])
@pytest.mark.parametrize("instead", ["all ones", "ENODATA"])
def test_a_value_that_is_missing_takes_no_other_with_it(
    chip: Chip, attribute: str, instead: str
) -> None:
    """A single one is neither a dead chip nor a reset."""
    function = function_of(chip)
    sound = read_telemetry(function)
    if instead == "ENODATA":
        chip.fail(attribute, "ENODATA")
    else:
        chip.write(attribute, dead_value(attribute).encode())

    with kernel_errors():
        found = read_telemetry(function)

    assert not (found.all_ones or found.error)
    for name, value in VALUES.items():
        assert value(found) == (None if name == attribute else value(sound))


@pytest.mark.parametrize(
    ("heartbeat", "is_dead"),
    [({"tt_heartbeat": "4294967295"}, True), ({"tt_heartbeat": "1219"}, False), ({}, False)],
)
def test_a_card_type_that_the_driver_does_not_know_is_not_a_dead_chip(
    heartbeat: dict[str, str], is_dead: bool
) -> None:
    """A new board also has the type `unknown`; a heartbeat of all ones is proof."""
    assert parse(heartbeat | {"tt_card_type": "unknown"}).all_ones is is_dead


@pytest.mark.parametrize(
    ("torn", "version"),
    [
        ("FFFFFFFFB3C4AC04", "255.255.255.255"),
        ("B3C4AC04FFFFFFFF", "255.255.255.255"),
        ("0" * 16, "0.0.0.0"),
    ],
)
def test_an_identity_that_was_read_during_a_reset_is_discarded(torn: str, version: str) -> None:
    """The driver reads each half of a serial by itself, and it can be all ones."""
    raw = {"tt_serial": torn, "tt_asic_id": torn, "tt_fw_bundle_ver": version}
    assert parse(raw).identity == Identity()


@pytest.mark.parametrize(
    ("text", "celsius"),
    [
        ("41500", 41.5),
        ("0", None),
        ("-500", None),
        ("65535500", None),  # -0.5 °C as the driver shows it
        ("65246000", None),  # -290 °C, of a sensor that has failed
        ("4095937", None),  # -0.1 °C of a Wormhole before 2.9
    ],
)
def test_a_temperature_below_zero_is_not_heat(text: str, celsius: float | None) -> None:
    """The driver shows the firmware's signed number without its sign."""
    assert parse({"tt_heartbeat": "7", "temp1_input": text}).temperature == celsius


FORMS = {
    "tt_card_type": "(?!unknown$)[a-z][a-z0-9-]*",
    "tt_serial": "[0-9A-F]{16}",
    "tt_asic_id": "[0-9A-F]{16}",
    "tt_fw_bundle_ver": r"\d+(\.\d+)+",
    "tt_therm_trip_count": r"\d+",
    "temp1_input": r"\d+",
    "temp1_max": r"\d+",
    "tt_heartbeat": r"-?\d+",
}
NEARLY = ["1_000", "+7", " 7", "٣", "0x10", "-1", "1e3", "nan", "9" * 5000, "1.2.3.4", "n150\n",
          "unknown", "1.٣.0.0", f"{'9' * 400} GT/s", f"TOTAL_ERR_COR {'9' * 400}"]  # fmt: skip
texts = st.one_of(
    st.binary(max_size=40).map(lambda content: content.decode("latin-1")),
    st.text("0123456789abcdefABCDEFx_+-. \n", max_size=18),
    st.text("0123456789ABCDEF", min_size=16, max_size=16),
    st.sampled_from(NEARLY),
)


@hypothesis_settings(deadline=None, max_examples=40)
@given(st.dictionaries(st.sampled_from([*VALUES]), texts))
@example({"tt_heartbeat": "1_000"})
@example({"temp1_input": "+41500"})
def test_only_values_of_the_drivers_form_count(raw: dict[str, str]) -> None:
    """From any texts, without an exception."""
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
    """Binary, empty, huge: the other chip is found, and a kubelet can be sent the list."""
    other = "0000:02:00.0"
    for attribute, data in content.items():
        fuzzed.write(attribute, data + b"x" * more)

    try:
        found = functions(fuzzed.node)
        chips = []
        for each in found.values():
            chips.append(ttdp.Chip(each, read_telemetry(each).identity, is_listed=True))
            read_sensors(each)
    finally:
        for attribute in content:
            fuzzed.restore(attribute)

    assert other in found and found.keys() <= {fuzzed.bdf, other}
    for resource in decide(chips).resources.values():
        resource.device_list.SerializeToString()


# -- reads that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attribute", "error"),
    [
        ("tt_heartbeat", "ENODATA"),
        ("temp1_input", "EIO"),
        ("tt_therm_trip_count", "EACCES"),
    ],
)
def test_a_read_that_fails_is_reported_with_its_attribute_and_errno(
    chip: Chip, attribute: str, error: str
) -> None:
    """The values of the other attributes do not count then."""
    chip.fail(attribute, error)

    with kernel_errors():
        found = read_telemetry(function_of(chip))

    assert found == Telemetry(error=ReadError(attribute, getattr(errno, error)))


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_the_daemons_own_errors_are_not_the_chips(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Out of descriptors or memory, a read raises."""
    function = function_of(chip)
    monkeypatch.setattr("os.open", failing(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        read_telemetry(function)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "listdir", "readlink", "stat"])
def test_a_scan_that_fails_changes_nothing(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Only "not found" means absence: no chip is gone, and the next scan is as ever."""
    node.add("n150")[0].unbind()
    node.add("n150")
    inventory = Inventory({})
    before = look(inventory, node)
    driver = inventory.driver

    with monkeypatch.context() as patch:
        patch.setattr(f"os.{call}", failing(number))
        with pytest.raises(OSError, match=os.strerror(number)):
            inventory.scan(settings(node))

    assert inventory.driver == driver
    assert inventory.chips == before == look(inventory, node)


def test_the_drivers_version_is_not_unknown_for_want_of_descriptors(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels and `list` would have another one for a while."""
    genuine = os.open

    def open_all_but_the_version(path: str, *arguments: Any) -> int:
        if path.endswith("/version"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return genuine(path, *arguments)

    monkeypatch.setattr("os.open", open_all_but_the_version)

    with pytest.raises(OSError, match="Too many open files"):
        Inventory({}).scan(settings(node))


def test_a_chip_that_vanished_between_scan_and_read_is_being_removed(chip: Chip) -> None:
    """ENODEV, not a chip without telemetry."""
    function = function_of(chip)

    chip.vanish()

    assert read_telemetry(function) == Telemetry(error=ReadError("tenstorrent!0", errno.ENODEV))


# -- sensors ---------------------------------------------------------------------------------------

LINK = {"current_link_width", "max_link_width", "max_link_speed"}
LINK |= {f"aer_dev_{kind}" for kind in ("correctable", "nonfatal", "fatal")}


def test_a_dead_chip_has_only_the_values_of_its_link(chip: Chip) -> None:
    """All ones would be 4295 V and 4.3 PHz; the kernel itself counts lanes and errors."""
    chip.die(bus=True)
    assert read_sensors(function_of(chip)).keys() == LINK


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("current_link_speed", "2.5 GT/s PCIe", 2.5e9),
        ("current_link_speed", "5 GT/s", 5e9),  # before Linux 5.8
        ("current_link_speed", "Unknown", None),
        ("current_link_width", "63", None),  # all ones of its six bits
        ("current_link_width", "0", None),  # unknown: no alert on a link of x0
        ("aer_dev_correctable", "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7", 7),
        ("aer_dev_fatal", "Undefined 1\nTOTAL_ERR_FATAL 12", 12),
        ("aer_dev_nonfatal", "Undefined 1", None),
        ("power1_input", "0", 0),
        ("power1_max", "4293967295", 4293.967295),  # one less than a dead chip's
        ("in0_max", "65535", None),  # all ones of its 16 bits
    ],
)
def test_sensors_are_read_as_the_kernel_writes_them(
    chip: Chip, attribute: str, text: str, value: float | None
) -> None:
    """Speeds with their unit, errors by their sum; values that mean nothing are none."""
    chip.write(attribute, f"{text}\n".encode())

    assert read_sensors(function_of(chip)).get(attribute) == pytest.approx(value)


@hypothesis_settings(deadline=None)
@given(st.sampled_from(SENSORS), texts)
def test_a_sensor_has_a_finite_value_or_none(sensor: ttdp.Sensor, text: str) -> None:
    """Of any text, without an exception."""
    value = sensor.parse(text)

    assert value is None or 0 <= value < math.inf


# -- device files ----------------------------------------------------------------------------------

INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist"),
    "file": (lambda path: path.touch(0o666), "is not a character device"),
    "directory": (lambda path: path.mkdir(), "is not a character device"),
    "fifo": (os.mkfifo, "is not a character device"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a link to nothing"),
    "link to itself": (lambda path: path.symlink_to(path.name), "is a link to nothing"),
    "other number": (lambda path: path.symlink_to("/dev/zero"), "is device 1:5, but sysfs has"),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_a_chip_whose_device_file_is_invalid_from_the_start_is_not_listed(
    node: SimulatedNode, what: str
) -> None:
    """It is when the file is valid: udev can be slower than a scan."""
    wrong, right = node.add("n150") + node.add("n150")
    path = wrong.device_node
    hidden = path.rename(node.root / "hidden")
    make, text = INSTEAD[what]
    make(path)

    inventory = Inventory({})
    chips = look(inventory, node)

    assert [chips[each.bdf].is_listed for each in (wrong, right)] == [False, True]
    fault = chips[wrong.bdf].fault
    assert fault and fault.kind is Kind.DEVICE_FILE
    assert fault.text.startswith(f"device file is invalid: {path} {text}")

    if path.is_dir():
        path.rmdir()
    os.rename(hidden, path)
    assert look(inventory, node)[wrong.bdf].is_listed


@pytest.mark.parametrize("content", [b"", b"1:99\n", b"garbage\n", None])
def test_a_device_file_of_another_number_than_sysfs_has_is_invalid(
    chip: Chip, content: bytes | None
) -> None:
    """A container would get another device; it is also invalid if sysfs has no number."""
    put_or_remove(chip, "dev", content)
    assert function_of(chip).file_fault


@pytest.mark.parametrize(
    ("attribute", "text", "is_named"),
    [
        ("vendor", b"0x10de\n", False),
        ("device", b"0xfaca\n", True),  # a Grayskull
        ("device", b"0xfeed\n", True),  # a generation to come
    ],
)
@pytest.mark.parametrize("driver", ["tenstorrent", "vfio-pci", ""])
def test_a_generation_that_is_not_known_is_named_and_never_a_chip(
    node: SimulatedNode, attribute: str, text: bytes, is_named: bool, driver: str
) -> None:
    """Whatever is bound to it. Other vendors' devices are ignored."""
    strange, known = node.add("p150a") + node.add("n150")
    if driver == "vfio-pci":
        strange.bind_to(driver)
    elif not driver:
        strange.unbind()
    strange.write(attribute, text)

    inventory = Inventory({})
    chips = look(inventory, node)

    assert inventory.unsupported == ((strange.bdf,) if is_named else ())
    assert chips.keys() == {known.bdf}


@pytest.mark.parametrize("udev_runs", [True, False])
def test_links_are_expected_where_udev_runs(tmp_path: Path, udev_runs: bool) -> None:
    """In a system container (LXC) it does not."""
    if udev_runs:
        (tmp_path / "run/udev").mkdir(parents=True)
        (tmp_path / "run/udev/control").touch()

    assert ttdp.expects_links(ttdp.Settings(root=str(tmp_path))) is udev_runs


def test_odd_names_of_class_devices_are_ignored(chip: Chip) -> None:
    """The chip beside them is found."""
    for name in ("tenstorrent!", "tenstorrent!0x1", "tenstorrent0", "power"):
        (chip.class_directory.parent / name).mkdir()

    assert function_of(chip).ordinal == chip.ordinal


@pytest.mark.parametrize(
    ("content", "version"),
    [
        (b"2.10.1\n", "2.10.1"),
        (b"2.10\x1b[2J", r"2.10\x1b[2J"),
        (b"2.1\xff", "2.1\ufffd"),
        (None, "unknown"),
    ],
)
def test_any_module_can_have_any_version(
    node: SimulatedNode, content: bytes | None, version: str
) -> None:
    """Control characters are escaped, as it is printed in logs and on terminals."""
    file = node.root / "sys/module/tenstorrent/version"
    file.unlink()  # an ordinary user cannot write into it
    if content is not None:
        file.write_bytes(content)
    assert ttdp.driver_version(settings(node)) == version

    node.unload_driver()
    assert ttdp.driver_version(settings(node)) is None


# -- over time -------------------------------------------------------------------------------------


def test_a_chip_is_followed_by_its_address(node: SimulatedNode) -> None:
    """After a renumbering, its former name leads nowhere; a reading from before is dropped."""
    first, second = node.add("n150") + node.add("n150")
    inventory = Inventory({})
    before = look(inventory, node)[first.bdf]

    node.swap_ordinals(first.bdf, second.bdf)
    assert read_telemetry(before.function).identity == Identity()
    inventory.scan(settings(node))
    late = Telemetry(Identity(asic_id="E" * 16))
    inventory.apply([Reading(before.function, late, 0.0)], HealthSettings())

    after = inventory.chips[first.bdf]
    assert (after.identity, after.function.ordinal) == (before.identity, 1)


@pytest.mark.parametrize(
    "found", [Telemetry(), Telemetry(all_ones=True), Telemetry(error=ReadError("x", 5))]
)
def test_an_identity_is_kept_until_the_firmware_reports_another(
    chip: Chip, found: Telemetry
) -> None:
    """Readings without one change nothing; parts of one replace parts."""
    inventory = Inventory({})
    known = look(inventory, chip.node)[chip.bdf]

    for telemetry in (found, Telemetry(Identity(firmware="20.1.0.0"))):
        inventory.apply([Reading(known.function, telemetry, 0.0)], HealthSettings())

    assert inventory.chips[chip.bdf].identity == known.identity._replace(firmware="20.1.0.0")


@pytest.mark.parametrize("step", ["vanish", "unbind"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_card_that_returns_keeps_its_identity_until_it_reports_one(
    chip: Chip, step: str, is_restarted: bool
) -> None:
    """The first telemetry replaces all of it: another card can be in the slot."""
    inventory = Inventory({})
    known = look(inventory, chip.node)[chip.bdf].identity
    getattr(chip, step)()
    look(inventory, chip.node)
    if is_restarted:
        inventory = restarted(inventory)

    (chip.come_back if step == "vanish" else chip.bind)()
    chip.silence()
    assert look(inventory, chip.node)[chip.bdf].identity == known

    function = inventory.chips[chip.bdf].function
    other = Identity(card="p150a", serial="A" * 16)
    inventory.apply([Reading(function, Telemetry(other), 0.0)], HealthSettings())
    assert inventory.chips[chip.bdf].identity == other


def test_a_chip_that_had_no_device_file_before_it_vanished_returns_without_a_fault(
    chip: Chip,
) -> None:
    """Only one that could be used before has to be read before it is healthy again."""
    inventory = Inventory({})
    chip.unbind()
    inventory.scan(settings(chip.node))
    chip.vanish()
    inventory.scan(settings(chip.node))

    chip.come_back()
    inventory.scan(settings(chip.node))

    assert kind_of(inventory.chips[chip.bdf]) is None


@pytest.mark.parametrize("late", ["vendor", "device", "subsystem_device"])
def test_a_function_whose_attributes_are_not_there_yet_is_looked_at_again(
    chip: Chip, late: str
) -> None:
    """The kernel makes the directory before its attributes."""
    path = Path(function_of(chip).directory) / late
    content = path.read_bytes()
    path.unlink()

    inventory = Inventory({})
    inventory.scan(settings(chip.node))
    assert inventory.chips == {}

    path.write_bytes(content)
    inventory.scan(settings(chip.node))
    assert inventory.chips[chip.bdf].card_type


@pytest.mark.parametrize("is_running", [True, False])
def test_a_thermal_trip_outlasts_a_restart_of_the_daemon(chip: Chip, is_running: bool) -> None:
    """Until the holdoff is over, also if it happened while no daemon was running."""
    inventory = Inventory({})
    look(inventory, chip.node)
    if is_running:
        chip.trip()
        look(inventory, chip.node)

    inventory = restarted(inventory)
    if not is_running:
        chip.trip()

    kinds = [kind_of(look(inventory, chip.node, at)[chip.bdf]) for at in (10.0, 299.0, 310.0)]
    assert kinds == [Kind.TRIPPED, Kind.TRIPPED, None]


def test_a_numa_node_that_is_corrected_is_seen_at_the_next_scan(chip: Chip) -> None:
    """An administrator can write the attribute, a kernel without NUMA has none; the rest stays."""
    inventory = Inventory({})
    before = look(inventory, chip.node)[chip.bdf]
    telemetry = inventory.states[chip.bdf].telemetry
    assert telemetry

    for text, number in ((b"1\n", 1), (b"0\n", 0), (b"-1\n", None), (b"2\n", 2), (None, None)):
        put_or_remove(chip, "numa_node", text)
        inventory.scan(settings(chip.node))

        function = before.function._replace(numa_node=number)
        assert inventory.chips[chip.bdf] == before._replace(function=function)
        assert inventory.states[chip.bdf].telemetry is telemetry


def test_another_kind_of_card_at_an_address_has_another_identity(chip: Chip) -> None:
    """It does not keep the former card's serial."""
    inventory = Inventory({})
    look(inventory, chip.node)
    chip.vanish()
    inventory.scan(settings(chip.node))

    chip.come_back()
    chip.write("subsystem_device", b"0x0043\n")
    inventory.scan(settings(chip.node))

    found = inventory.chips[chip.bdf]
    assert (found.card_type, found.identity) == ("p100a", Identity())


def test_chips_that_come_and_go_are_seen_as_they_are_or_not_at_all(node: SimulatedNode) -> None:
    """At every step of a plug, a rebinding, a renumbering and a removal."""
    inventory = Inventory({})
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        inventory.scan(settings(node))
        for each in inventory.present:
            card = CARDS["n300" if each.bdf == "0000:01:00.0" else "p150a"]
            assert each.subsystem == card.code

    node.on_step = step

    first, second = node.add("n300", numa_node=0) + node.add("p150a", numa_node=1)
    first.rebind()
    node.swap_ordinals(first.bdf, second.bdf)
    second.vanish()

    assert steps > 100 and len(inventory.chips) == 2


# -- never open a device ---------------------------------------------------------------------------

opened: list[str] | None = None


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opening)  # sees every way of opening a file that Python has


def test_no_device_is_ever_opened(
    chip: Chip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That would power the chip up: sysfs is read, and stat() looks at device files."""
    paths: list[str] = []
    monkeypatch.setattr(sys.modules[__name__], "opened", paths)

    function = ttdp.scan(settings(chip.node), {}, driver_is_loaded=True)[chip.bdf]
    assert function
    ttdp.read_chip(function, is_poll=True, settings=settings(chip.node))
    with Service(chip.node, tmp_path) as service:
        found = [*ttdp.findings(service.view(), None)]

    assert "p150a, " in str(found)
    assert any(path.endswith("tt_heartbeat") for path in paths)
    nodes = (f"{chip.node.root}/dev/", "/dev/tenstorrent")
    assert not [path for path in paths if path.startswith(nodes)]
