"""Health: what a chip's attributes show, and each rule on its own, with a clock of the test's."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import chip, kind_of
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.watched import WatchedNode
from ttdp import Fault, Identity, Kind, Reading

FUNCTION = chip(1).function
BEAT = "tt_heartbeat"


def parsed(texts: Mapping[str, str]) -> Reading:
    return ttdp.with_telemetry(Reading(FUNCTION, 0.0), texts)


@pytest.fixture
def card(node: SimulatedNode) -> Card:
    """A Blackhole alone on a node."""
    return node.add("p150a")[0]


def read(card: Card) -> Reading | None:
    """Return what is read of a card that was found before `happens`."""
    watched = WatchedNode(card.node)
    watched.scan()
    return watched.read(watched.chips[card.bdf].function)


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.34", "2.0.0", "2.5.0", "2.9.0", "2.10.0"])
def test_a_chip_whose_registers_read_as_ones_shows_nothing(short_tmp: Any, version: str) -> None:
    """No identity, no temperature, no sensor, whatever the driver makes of them.

    That is another number of a Wormhole's temperature before 2.9, and PCI's card type of a
    Blackhole before 2.2.
    """
    node = SimulatedNode.from_capture(short_tmp / "node", f"n150-p150a-kmd-{version}")
    for each in node.chips:
        each.die()
        reading = read(each)
        assert reading and kind_of_reading(reading) is Kind.NO_RESPONSE
        assert reading == Reading(reading.function, reading.at, fault=reading.fault)


def kind_of_reading(reading: Reading) -> Kind | None:
    return reading.fault.kind if reading.fault else None


@pytest.mark.parametrize(
    ("texts", "is_dead"),
    [
        ({BEAT: "4294967295", "tt_serial": "A" * 16}, True),
        ({BEAT: "1219", "tt_card_type": "unknown", "tt_serial": "F" * 16}, False),
        ({"tt_serial": "F" * 16}, True),
        ({"tt_serial": "A" * 16, "tt_asic_id": "F" * 16}, False),
        ({"tt_asic_id": "F" * 16}, True),
        ({"tt_card_type": "unknown", "temp1_input": "65535999"}, False),
        ({}, False),
    ],
)
def test_the_first_of_heartbeat_serial_and_asic_id_shows_a_dead_chip(
    texts: dict[str, str], is_dead: bool
) -> None:
    """Drivers before 2.7 have no heartbeat. A new board also has the card type `unknown`."""
    assert (ttdp.fault_of(texts) is not None) is is_dead


@pytest.mark.parametrize(
    ("attribute", "error", "fault"),
    [
        (BEAT, "ENODATA", Fault(Kind.RESETTING, "resetting (no telemetry)")),
        (
            "temp1_input",
            "EIO",
            Fault(Kind.READ_ERROR, "telemetry cannot be read: temp1_input: Input/output error"),
        ),
        (
            "tt_serial",
            "EACCES",
            Fault(Kind.READ_ERROR, "telemetry cannot be read: tt_serial: Permission denied"),
        ),
    ],
)
def test_a_read_that_fails_is_the_chips_fault(
    card: Card, attribute: str, error: str, fault: Fault
) -> None:
    """Nothing else counts then: neither values nor sensors."""
    card.fail(attribute, error)
    reading = read(card)
    assert reading == Reading(reading.function, reading.at, fault=fault) if reading else False


@pytest.mark.parametrize(
    "attribute", ["tt_card_type", "tt_serial", "tt_therm_trip_count", "temp1_input"]
)
@pytest.mark.parametrize("error", ["ENODATA", "ENOENT", "all ones"])
def test_a_value_that_is_missing_takes_no_other_with_it(
    card: Card, attribute: str, error: str
) -> None:
    """Firmware that reports fewer tags after a reset answers ENODATA for good."""
    sound = read(card)
    if error == "all ones":
        card.write(attribute, b"F" * 16)
    else:
        card.fail(attribute, error)

    found = read(card)

    assert sound and found and found.fault is None
    missing = {
        "tt_card_type": sound._replace(identity=sound.identity._replace(card=None)),
        "tt_serial": sound._replace(identity=sound.identity._replace(serial=None)),
        "tt_therm_trip_count": sound._replace(trips=None),
        "temp1_input": sound._replace(temperature=None),
    }
    assert found == missing[attribute]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_the_daemons_own_errors_are_not_the_chips(
    card: Card, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Out of descriptors or memory, a read raises."""
    watched = WatchedNode(card.node)
    watched.scan()
    card.fail(BEAT, errno.errorcode[number])

    with pytest.raises(OSError, match=os.strerror(number)):
        watched.read(watched.chips[card.bdf].function)


def test_a_chip_that_is_removed_between_scan_and_read_shows_nothing(card: Card) -> None:
    """The next scan finds out why; it does not look like late firmware meanwhile."""
    watched = WatchedNode(card.node)
    watched.look()
    before = watched.chips[card.bdf]
    card.unbind()

    assert watched.read(before.function) is None


def test_sensors_of_a_chip_that_dies_meanwhile_are_discarded(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them would be those of a dead chip: 4295 V."""
    genuine = ttdp.read_sensors

    def read_and_die(function: ttdp.PciFunction) -> dict[str, float]:
        values = genuine(function)
        card.die()
        return values

    monkeypatch.setattr(ttdp, "read_sensors", read_and_die)
    reading = read(card)
    assert reading and reading.fault and reading.sensors == {}


@pytest.mark.parametrize(
    ("torn", "version"),
    [
        ("FFFFFFFFB3C4AC04", "255.255.255.255"),
        ("B3C4AC04FFFFFFFF", "255.255.1.0"),
        ("0" * 16, "0.0.0.0"),
    ],
)
def test_an_identity_that_was_read_during_a_reset_is_discarded(torn: str, version: str) -> None:
    """The driver reads each half of a serial by itself, and it can be all ones."""
    texts = {"tt_serial": torn, "tt_asic_id": torn, "tt_fw_bundle_ver": version}
    assert parsed(texts).identity == Identity()


@pytest.mark.parametrize(
    ("text", "celsius"),
    [
        ("41500", 41.5),
        ("1", 0.001),
        ("0", None),
        ("-500", None),
        ("999999", 999.999),
        ("1000000", None),
        ("65535500", None),  # -0.5 °C as the driver shows it
        ("4095937", None),  # -0.1 °C of a Wormhole before 2.9
    ],
)
def test_a_temperature_below_zero_is_not_heat(text: str, celsius: float | None) -> None:
    """The driver shows the firmware's signed number without its sign."""
    assert parsed({"temp1_input": text}).temperature == celsius


FORMS = {
    "tt_card_type": "(?!unknown$)[a-z][a-z0-9-]*",
    "tt_serial": "[0-9A-F]{16}",
    "tt_asic_id": "[0-9A-F]{16}",
    "tt_fw_bundle_ver": r"\d+(\.\d+)+",
    "tt_therm_trip_count": r"\d+",
    "temp1_input": r"\d+",
    "temp1_max": r"\d+",
    BEAT: r"-?\d+",
}
NEARLY = ["1_000", "+7", " 7", "٣", "0x10", "1e3", "nan", "9" * 5000, "1.2.3.4", "n150\n",
          "unknown", "1.٣.0.0", f"{'9' * 400} GT/s", f"TOTAL_ERR_COR {'9' * 400}"]  # fmt: skip
texts = st.one_of(
    st.text("0123456789abcdefABCDEFx_+-. \n", max_size=18),
    st.text("0123456789ABCDEF", min_size=16, max_size=16),
    st.sampled_from(NEARLY),
)


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(FORMS, texts)))
@example(dict.fromkeys(FORMS, "1_000"))
@example(dict.fromkeys(FORMS, "+41500"))
def test_only_values_of_the_drivers_form_count(raw: dict[str, str]) -> None:
    """From any texts, without an exception."""
    reading = parsed(raw)
    values = (*reading.identity, reading.trips, reading.temperature, reading.throttles_at)
    names = ["tt_card_type", "tt_serial", "tt_asic_id", "tt_fw_bundle_ver"]
    names += ["tt_therm_trip_count", "temp1_input", "temp1_max", BEAT]
    for name, value in zip(names, (*values, reading.heartbeat), strict=True):
        assert value is None or re.fullmatch(FORMS[name], raw[name], re.ASCII)


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("current_link_speed", "2.5 GT/s PCIe", 2.5e9),
        ("current_link_speed", "5 GT/s", 5e9),  # before Linux 5.8
        ("current_link_speed", "Unknown", None),
        ("current_link_width", "16", 16),
        ("current_link_width", "0", None),  # no link: in a virtual machine's root complex
        ("aer_dev_correctable", "RxErr 3\nBadTLP 4\nTOTAL_ERR_COR 7", 7),
        ("aer_dev_fatal", "Undefined 1\nTOTAL_ERR_FATAL 12", 12),
        ("aer_dev_nonfatal", "Undefined 1", None),
        ("power1_input", "24500000", 24.5),
        ("power1_input", "0", 0),
        ("power1_max", "-1", None),
        ("tt_aiclk", "800", 800e6),
    ],
)
def test_sensors_are_read_as_the_kernel_writes_them(
    card: Card, attribute: str, text: str, value: float | None
) -> None:
    """Speeds with their unit, errors by their sum, in base units; what means nothing is none."""
    card.write(attribute, f"{text}\n".encode())
    reading = read(card)
    assert reading and reading.sensors.get(attribute) == value


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.sampled_from(ttdp.SENSORS), texts)
def test_a_sensor_has_a_finite_value_or_none(sensor: ttdp.Sensor, text: str) -> None:
    """Of any text, without an exception."""
    value = sensor.parse(text)
    assert value is None or 0 <= value < math.inf


# -- the rules -------------------------------------------------------------------------------------


class Followed:
    """A chip as the daemon follows it: a reading is one second after the last unless told."""

    def __init__(self, limit: float | None = None) -> None:
        self.chip = ttdp.Chip(FUNCTION)
        self.limit = limit
        self.now = 1000.0

    def read(self, *, after: float = 1, is_poll: bool = True, **values: Any) -> Kind | None:
        """Return the fault's kind after a reading: of a poll, unless an event caused it."""
        self.now += after
        self.chip = self.chip.read(Reading(FUNCTION, self.now, is_poll, **values), self.limit)
        return kind_of(self.chip)

    @property
    def text(self) -> str:
        return self.chip.fault.text if self.chip.fault else ""


@pytest.fixture(autouse=True)
def real_misses(stalls: None) -> None:
    """Heartbeats are missed as in the real program."""


@pytest.mark.parametrize(
    ("beats", "faults"),
    [
        ("7 7 7 7", "..SS"),
        ("1 1 2 2 3 3 3", "......S"),
        (f"7 {'e7 ' * 100} 7 e7 7 e7", f".{'.' * 100}..SS"),
        ("7 e8 8 8 8", "....S"),
        ("7 7 7 e8", "..S."),
        ("7 7 7 6 0 4294967294", "..S..."),
        ("0 0 0", "..S"),
        ("- - - - 7 - - - 7 7", ".........."),
    ],
    ids=[
        "no change in two polls in a row", "a change starts the count again",
        "readings by events do not count", "nor does the next poll compare with them",
        "but a change that an event shows is life", "any change shows life: up, down, wrapped",
        "zero is a count", "not offered",
    ],
)  # fmt: skip
def test_a_heartbeat_has_stalled_at_the_second_poll_without_a_change(
    beats: str, faults: str
) -> None:
    """Not a poll earlier or later. "e7" is read by an event, "-" is not offered."""
    followed = Followed()
    found = ""
    for beat in beats.split():
        heartbeat = ttdp.to_integer(beat.strip("e-"))
        kind = followed.read(heartbeat=heartbeat, temperature=40.0, is_poll=beat[0] != "e")
        found += {None: ".", Kind.STALLED: "S"}[kind]
        assert not kind or followed.text == f"heartbeat stalled at {heartbeat} (firmware stopped)"
    assert found == faults


def test_hot_from_the_operators_limit_and_cool_from_five_degrees_below() -> None:
    """To the thousandth; a temperature that is missing is not cooler."""
    followed = Followed(limit=90)
    course: list[tuple[float | None, Kind | None]] = [
        (89.999, None), (90.0, Kind.HOT), (85.001, Kind.HOT), (None, Kind.HOT), (89.0, Kind.HOT),
        (85.0, None), (89.998, None), (91.5, Kind.HOT), (20.0, None), (None, None),
    ]  # fmt: skip
    for celsius, kind in course:
        assert followed.read(temperature=celsius, trips=0) is kind, celsius
        degrees = f"{celsius:.1f} °C, " if celsius else ""
        assert not kind or followed.text == f"too hot: {degrees}limit 90 °C; check the cooling"


@pytest.mark.parametrize(("limit", "kind"), [(None, None), (83, Kind.HOT), (86, None)])
def test_a_new_limit_counts_from_the_next_reading(limit: float | None, kind: Kind | None) -> None:
    """Without one nothing is hot: a busy card may throttle for hours."""
    followed = Followed(limit=80)
    followed.read(temperature=81.0)
    followed.limit = limit

    assert followed.read(temperature=81.0, throttles_at=75.0) is kind
    assert followed.read(trips=0) is kind


@pytest.mark.parametrize(
    ("course", "faults"),
    [
        ([(3, 0), (4, 1), (4, 299.9), (4, 0.1), (4, 1000)], "-TT--"),
        ([(0, 0), (1, 1), (2, 299), (2, 299), (2, 1)], "-TTT-"),
        ([(17, 0), (17, 1)], "--"),
        ([(5, 0), (0, 1), (1, 1)], "--T"),
        ([(0, 0), (1, 1), (0, 298), (0, 2)], "-TT-"),
        ([(0, 0), (None, 1), (1, 1), (None, 1)], "--TT"),
    ],
    ids=["once", "again", "history", "cleared", "cleared during it", "not offered for a while"],
)
def test_a_trip_lasts_from_the_rise_for_300_seconds(
    course: list[tuple[int | None, float]], faults: str
) -> None:
    """Trips before the start are history; a reset clears the counter and nothing else."""
    followed = Followed()
    found = [followed.read(trips=trips, temperature=40.0, after=after) for trips, after in course]
    assert found == [Kind.TRIPPED if letter == "T" else None for letter in faults]


def test_a_rebound_chip_has_ten_seconds_for_its_telemetry() -> None:
    """It is healthy meanwhile, and each time they begin again; late firmware is not a fault."""
    followed = Followed()
    assert not any(followed.read(after=100) for _ in range(3))
    followed.read(identity=Identity(card="n150"))

    for _ in range(2):
        assert [followed.read(after=after) for after in (1, 9.9, 0.1, 1000)] == [
            None, None, Kind.SILENT, Kind.SILENT,
        ]  # fmt: skip
        assert followed.read(temperature=40.0) is None


FAULTS: list[tuple[Kind, dict[str, Any]]] = [  # in the order in which they count
    (Kind.RESETTING, {"fault": Fault(Kind.RESETTING, "")}),
    (Kind.STALLED, {"heartbeat": 7}),
    (Kind.HOT, {"temperature": 90.0}),
    (Kind.TRIPPED, {"trips": 2}),
    (Kind.SILENT, {}),
]


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_of_several_faults_the_first_of_the_table_is_the_kind(number: int) -> None:
    """A chip that has all that follow, too."""
    followed = Followed(limit=80)
    followed.read(identity=Identity(card="n150"), heartbeat=7, trips=1)
    followed.read(heartbeat=7, trips=1)

    values: dict[str, Any] = {}
    for _, each in FAULTS[number:]:
        values |= each
    followed.read(after=10, **values)  # silence begins with it
    assert followed.read(after=10, **values) is FAULTS[number][0]


@pytest.mark.parametrize("between", [{"fault": Fault(Kind.READ_ERROR, "")}, {}])
def test_a_reading_without_values_ends_neither_stall_nor_heat(between: dict[str, Any]) -> None:
    """The chip is not healthy for a moment because it reports nothing."""
    followed = Followed(limit=80)
    for _ in range(3):
        followed.read(heartbeat=7, temperature=90.0)

    followed.read(**between)

    assert followed.read(heartbeat=7, temperature=76.0) is Kind.STALLED
    assert followed.read(heartbeat=8, temperature=76.0) is Kind.HOT


faulty = st.sampled_from([values for _, values in FAULTS] + [{"temperature": 99.0, "trips": 9}])


@hypothesis_settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(faulty, st.booleans(), st.sampled_from([0.1, 20.0])), max_size=8))
def test_a_chip_recovers_by_itself_from_anything(
    course: list[tuple[dict[str, Any], bool, float]],
) -> None:
    """After any faults in any order, a chip without one for 300 s is healthy."""
    followed = Followed(limit=90)
    followed.read(heartbeat=1)
    for values, is_poll, after in course:
        followed.read(is_poll=is_poll, after=after, **values)

    well: dict[str, Any] = {"temperature": 40.0, "trips": 9}
    followed.read(heartbeat=100, **well)
    assert followed.read(after=301, heartbeat=101, **well) is None


# -- reasons, with the command that helps ----------------------------------------------------------

FIX = "tt-device-plugin fix 0000:01:00.0"
VFIO = "driver vfio-pci is bound; release the card there, or add it to exclude"
ABSENT = {"driver": None, "number": None, "path": ""}
UNUSABLE: list[tuple[dict[str, Any], Kind, str, str]] = [
    (ABSENT | {"on_bus": False}, Kind.GONE, "PCI device is gone", FIX),
    (ABSENT, Kind.NO_DRIVER, "driver is not bound", FIX),
    (
        ABSENT | {"driver_is_loaded": False},
        Kind.NO_DRIVER,
        "driver is not loaded",
        "modprobe tenstorrent",
    ),
    (ABSENT | {"driver": "vfio-pci", "driver_is_loaded": False}, Kind.NO_DRIVER, VFIO, ""),
    (
        ABSENT | {"driver": "tenstorrent"},
        Kind.DEVICE_FILE,
        "driver is bound, but there is no device file",
        FIX,
    ),
    (
        {"file_fault": "/dev/tenstorrent/0 does not exist"},
        Kind.DEVICE_FILE,
        "device file is invalid: /dev/tenstorrent/0 does not exist",
        FIX,
    ),
]


@pytest.mark.parametrize(("state", "kind", "text", "command"), UNUSABLE)
def test_a_chip_that_no_container_could_use_has_the_reason_of_that(
    state: dict[str, Any], kind: Kind, text: str, command: str
) -> None:
    """Whatever its telemetry was. Nobody is told to take a card from another driver."""
    stalled = chip(1, fault=Kind.STALLED)
    found = stalled._replace(function=stalled.function._replace(**state))

    assert found.fault == Fault(kind, text)
    assert found.reason == (f"{text}; run: {command}" if command else text)


@pytest.mark.parametrize("kind", [*Kind][3:])
def test_a_fault_that_can_be_fixed_ends_with_the_one_command(kind: Kind) -> None:
    """It comes last, so that it can be pasted; against heat there is none."""
    is_heat = kind in (Kind.HOT, Kind.TRIPPED)
    assert chip(1, fault=kind).reason == ("it is ill" if is_heat else f"it is ill; run: {FIX}")
    assert chip(1).reason is None
