"""Health: what a chip's attributes show, and each rule by itself, at its boundaries.

Combinations of rules, over time, are in test_chips; the texts of reasons in golden/reports.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import chip, kind_of
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.watched import WatchedNode
from ttdp import Fault, Identity, Kind, Reading

FUNCTION = chip(1).function


@pytest.fixture
def card(node: SimulatedNode) -> Card:
    """A Blackhole alone on a node."""
    return node.add("p150a")[0]


def read(card: Card) -> Reading:
    """Return what is read of a card that can be read."""
    watched = WatchedNode(card.node)
    watched.scan()
    reading = watched.read(watched.chips[card.bdf].function)
    assert reading
    return reading


# -- what is read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.5.0", "2.10.0"])
def test_a_chip_whose_registers_read_as_ones_shows_nothing(short_tmp: Path, version: str) -> None:
    """No identity, no temperature, no sensor; also before 2.7, without a heartbeat."""
    node = SimulatedNode.from_capture(short_tmp / "node", f"n150-p150a-kmd-{version}")
    for each in node.chips:
        each.die()
        reading = read(each)
        assert reading.fault and reading.fault.kind is Kind.NO_RESPONSE
        assert reading == Reading(reading.function, reading.at, fault=reading.fault)


@pytest.mark.parametrize(
    ("texts", "is_dead"),
    [
        ({"tt_heartbeat": "4294967295", "tt_serial": "A" * 16}, True),
        ({"tt_heartbeat": "1219", "tt_card_type": "unknown", "tt_serial": "F" * 16}, False),
        ({"tt_serial": "F" * 16}, True),
        ({"tt_serial": "A" * 16, "tt_asic_id": "F" * 16}, False),
        ({"tt_asic_id": "F" * 16}, True),
        ({"tt_card_type": "unknown", "temp1_input": "65535999"}, False),
    ],
)
def test_the_first_of_heartbeat_serial_and_asic_id_shows_a_dead_chip(
    texts: dict[str, str], is_dead: bool
) -> None:
    """Drivers before 2.7 have no heartbeat. A new board also has the card type `unknown`."""
    assert (ttdp.fault_of(texts) is not None) is is_dead


@pytest.mark.parametrize(
    ("attribute", "error", "kind"),
    [
        ("tt_heartbeat", "ENODATA", Kind.RESETTING),
        ("temp1_input", "EIO", Kind.READ_ERROR),
        ("tt_heartbeat", "EACCES", Kind.READ_ERROR),
    ],
)
def test_a_read_that_fails_is_the_chips_fault(
    card: Card, attribute: str, error: str, kind: Kind
) -> None:
    """Nothing else counts then: neither values nor sensors."""
    card.fail(attribute, error)
    reading = read(card)
    assert reading.fault and reading.fault.kind is kind
    assert kind is Kind.RESETTING or attribute in reading.fault.text
    assert reading == Reading(reading.function, reading.at, fault=reading.fault)


TORN = ["F" * 16, "FFFFFFFFB3C4AC04", "B3C4AC04FFFFFFFF", "0" * 16]


@pytest.mark.parametrize("harm", ["ENODATA", "ENOENT", *TORN])
def test_a_value_that_is_missing_takes_no_other_with_it(card: Card, harm: str) -> None:
    """The driver reads each half of a serial by itself, and a reset can come between."""
    sound = read(card)
    for attribute in ("tt_serial", "tt_asic_id"):
        if harm in TORN:
            card.write(attribute, harm.encode())
        else:
            card.fail(attribute, harm)

    found = sound.identity._replace(serial=None, asic_id=None)
    assert read(card)._replace(at=sound.at) == sound._replace(identity=found)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_the_daemons_own_errors_are_not_the_chips(card: Card, number: int) -> None:
    """Out of descriptors or memory, a read raises."""
    card.fail("tt_heartbeat", errno.errorcode[number])
    with pytest.raises(OSError, match=os.strerror(number)):
        read(card)


def test_a_chip_that_is_removed_between_scan_and_read_shows_nothing(card: Card) -> None:
    """The next scan finds out why; it does not look like late firmware meanwhile."""
    watched = WatchedNode(card.node)
    watched.scan()
    card.unbind()
    assert watched.read(watched.chips[card.bdf].function) is None


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
    assert read(card).sensors == {}


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("tt_fw_bundle_ver", "0.0.0.0", None),  # of a reset
        ("tt_fw_bundle_ver", "255.255.1.0", None),
        ("temp1_input", "41500", 41.5),
        ("temp1_input", "1", 0.001),
        ("temp1_input", "0", None),
        ("temp1_input", "999999", 999.999),
        ("temp1_input", "1000000", None),
        ("temp1_input", "65535500", None),  # -0.5 °C: the driver shows no sign
        ("temp1_max", "0", None),
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
def test_values_are_read_in_base_units_and_what_means_nothing_is_none(
    card: Card, attribute: str, text: str, value: float | None
) -> None:
    """As driver and kernel write them."""
    card.write(attribute, f"{text}\n".encode())
    reading = read(card)
    values = {
        "tt_fw_bundle_ver": reading.identity.firmware,
        "temp1_input": reading.temperature,
        "temp1_max": reading.throttles_at,
        **reading.sensors,
    }
    assert values.get(attribute) == value


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


@pytest.fixture(autouse=True)
def real_misses(stalls: None) -> None:
    """Heartbeats are missed as in the real program."""


@pytest.mark.parametrize(
    ("beats", "faults"),
    [
        ("7 7 7 7", "..SS"),
        ("1 1 2 2 3 3 3", "......S"),
        ("7 e7 e7 e7 7 e7 7 e7", "......SS"),
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
    found = [
        followed.read(
            heartbeat=ttdp.to_integer(beat.strip("e-")),
            temperature=40.0,
            is_poll=not beat.startswith("e"),
        )
        for beat in beats.split()
    ]
    assert found == [Kind.STALLED if letter == "S" else None for letter in faults]


def test_hot_from_the_operators_limit_and_cool_from_five_degrees_below() -> None:
    """To the thousandth; a temperature that is missing is not cooler."""
    followed = Followed(limit=90)
    for celsius, is_hot in (
        (89.999, False), (90.0, True), (85.001, True), (None, True), (89.0, True), (85.0, False),
        (89.998, False), (91.5, True), (20.0, False), (None, False),
    ):  # fmt: skip
        assert (followed.read(temperature=celsius, trips=0) is Kind.HOT) is is_hot, celsius


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
        ([(5, 0), (0, 1), (1, 1)], "--T"),
        ([(0, 0), (None, 1), (1, 1), (None, 1)], "--TT"),
    ],
    ids=["once", "again", "cleared by a reset", "not offered for a while"],
)
def test_a_trip_lasts_from_the_rise_for_300_seconds(
    course: list[tuple[int | None, float]], faults: str
) -> None:
    """Trips before the start are history."""
    followed = Followed()
    found = [followed.read(trips=trips, temperature=40.0, after=after) for trips, after in course]
    assert found == [Kind.TRIPPED if letter == "T" else None for letter in faults]


def test_a_rebound_chip_has_ten_seconds_for_its_telemetry() -> None:
    """It is healthy meanwhile, and each time they begin again; late firmware is not a fault.

    A trip comes before silence.
    """
    followed = Followed()
    assert not any(followed.read(after=100) for _ in range(3))
    followed.read(identity=Identity(card="n150"))

    for _ in range(2):
        found = [followed.read(after=after) for after in (1, 9.9, 0.1, 1000)]
        assert found == [None, None, Kind.SILENT, Kind.SILENT]
        assert followed.read(temperature=40.0) is None

    for trips in (1, 2):
        followed.read(trips=trips)
    assert [followed.read(after=10) for _ in range(2)] == [Kind.TRIPPED] * 2


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
    for _ in range(2):
        followed.read(identity=Identity(card="n150"), heartbeat=7, trips=1)

    values: dict[str, Any] = {}
    for _, each in FAULTS[number:]:
        values |= each
    for _ in range(2):
        kind = followed.read(after=10, **values)  # silence begins with the first
    assert kind is FAULTS[number][0]


def test_sensors_are_those_of_the_last_poll(card: Card) -> None:
    """A reading after an event leaves them out, as events can be many; a dead chip has none."""
    watched = WatchedNode(card.node)

    def clock(*, is_poll: bool) -> float | None:
        watched.look(is_poll=is_poll)
        reading = watched.chips[card.bdf].reading
        assert reading
        return reading.sensors.get("tt_aiclk")

    before = clock(is_poll=True)
    card.write("tt_aiclk", b"1234")
    assert clock(is_poll=False) == before != 1234e6
    assert clock(is_poll=True) == 1234e6

    card.die()
    assert clock(is_poll=False) is None
