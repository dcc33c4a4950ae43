"""Health: what a chip's attributes show, and each rule by itself, at its boundaries.

Combinations of rules, over time, are in test_chips; the texts of reasons in golden/reports.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

import ttdp
from tests.chips import chip, kind_of
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.watched import WatchedNode
from ttdp import Fault, Identity, Kind, Reading

# -- what is read ----------------------------------------------------------------------------------


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


def alter(card: Card, attribute: str, text: str | None) -> None:
    """Let an attribute have this text, fail with this error, or (None) not be there."""
    if text is None:
        card.remove(attribute)
    elif text in errno.errorcode.values():
        card.fail(attribute, text)
    else:
        card.write(attribute, f"{text}\n".encode())


DEAD = {"tt_heartbeat": str(2**32 - 1), "tt_serial": "F" * 16, "tt_asic_id": "F" * 16}


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        ({**DEAD, "tt_serial": "A" * 16}, Kind.NO_RESPONSE),
        ({**DEAD, "tt_heartbeat": None}, Kind.NO_RESPONSE),  # drivers before 2.7
        ({**DEAD, "tt_heartbeat": None, "tt_serial": None}, Kind.NO_RESPONSE),
        ({"tt_heartbeat": "ENODATA"}, Kind.RESETTING),
        ({"tt_heartbeat": "EACCES"}, Kind.READ_ERROR),
        ({"temp1_input": "EIO"}, Kind.READ_ERROR),
    ],
)
def test_a_chip_that_is_dead_or_cannot_be_read_shows_nothing_else(
    card: Card, texts: dict[str, str | None], kind: Kind
) -> None:
    """No identity, no temperature, no sensor. The first of the three that exists shows death."""
    for attribute, text in texts.items():
        alter(card, attribute, text)

    reading = read(card)

    assert reading.fault and reading.fault.kind is kind
    assert reading == Reading(reading.function, reading.at, fault=reading.fault)


@pytest.mark.parametrize(
    "text", ["F" * 16, "FFFFFFFFB3C4AC04", "B3C4AC04FFFFFFFF", "0" * 16, "ENODATA", None]
)
def test_a_value_that_is_missing_takes_no_other_with_it(card: Card, text: str | None) -> None:
    """The driver reads each half of a serial by itself, and a reset can come between."""
    sound = read(card)
    for attribute in ("tt_serial", "tt_asic_id"):
        alter(card, attribute, text)

    found = sound.identity._replace(serial=None, asic_id=None)
    assert read(card)._replace(at=sound.at) == sound._replace(identity=found)


@pytest.mark.parametrize("number", ttdp.OWN_ERRORS)
def test_the_daemons_own_errors_are_not_the_chips(card: Card, number: int) -> None:
    """Out of descriptors or memory, a read raises."""
    card.fail("tt_heartbeat", errno.errorcode[number])
    with pytest.raises(OSError, match=os.strerror(number)):
        read(card)


def test_a_chip_that_dies_or_is_removed_meanwhile_shows_nothing(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some sensors would be those of a dead chip: 4295 V. A removed one is no late firmware."""
    watched = WatchedNode(card.node)
    watched.scan()
    genuine = ttdp.read_sensors

    def read_and_die(function: ttdp.PciFunction) -> dict[str, float]:
        values = genuine(function)
        card.die()
        return values

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "read_sensors", read_and_die)
        assert read(card).sensors == {}
    card.unbind()
    assert watched.read(watched.chips[card.bdf].function) is None


@pytest.mark.parametrize(
    ("attribute", "text", "value"),
    [
        ("tt_card_type", "unknown", None),  # of a new board
        ("tt_fw_bundle_ver", "0.0.0.0", None),  # of a reset
        ("tt_fw_bundle_ver", "255.255.1.0", None),
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
    alter(card, attribute, text)
    reading = read(card)
    values = {
        "tt_card_type": reading.identity.card,
        "tt_fw_bundle_ver": reading.identity.firmware,
        "temp1_input": reading.temperature,
        "temp1_max": reading.throttles_at,
        **reading.sensors,
    }
    assert values.get(attribute) == value


# -- the rules -------------------------------------------------------------------------------------

Story = list[tuple[float, dict[str, Any]]]  # readings: seconds after the last one, and values
LETTERS = {"-": None, "S": Kind.STALLED, "H": Kind.HOT, "T": Kind.TRIPPED, "Q": Kind.SILENT}
LETTERS |= {"R": Kind.RESETTING}
NAMED, RESETTING = {"identity": Identity(card="n150")}, {"fault": Fault(Kind.RESETTING, "")}


def beats(text: str) -> Story:
    """Return readings of these heartbeats: "e7" is read after an event, "-" is not offered."""
    return [
        (1, {"heartbeat": ttdp.to_integer(each.strip("e-")), "is_poll": each[0] != "e", "trips": 0})
        for each in text.split()
    ]


def heats(*degrees: float | None, limit: float | None = 90) -> Story:
    return [(1, {"temperature": each, "trips": 0, "limit": limit}) for each in degrees]


def trips(*counts: tuple[float, int | None]) -> Story:
    return [(after, {"trips": count, "temperature": 40.0}) for after, count in counts]


STORIES: dict[str, tuple[Story, str]] = {
    "stalled at the second poll without a change": (beats("7 7 7 7 8 8 9 9 9"), "--SS----S"),
    "readings by events do not count": (beats("7 e7 e7 e7 7 e7 7 e7"), "------SS"),
    "nor does the next poll compare with them": (beats("7 e8 8 8 8"), "----S"),
    "but a change that an event shows is life": (beats("7 7 7 e8"), "--S-"),
    "any change is life: up, down, wrapped": (beats("7 7 7 6 0 4294967294"), "--S---"),
    "zero is a count": (beats("0 0 0"), "--S"),
    "a heartbeat that is not offered": (beats("- - - 7 - - 7 7"), "--------"),
    "hot, and cool": (heats(89.999, 90.0, 85.001, None, 89.0, 85.0, 89.998), "-HHHH--"),
    "a new limit": (heats(81, limit=80) + heats(81, limit=86) + heats(81, None, limit=80), "H-HH"),
    "no limit": (heats(81, limit=80) + heats(81, None, limit=None), "H--"),
    "tripped": (trips((0, 3), (1, 4), (299.9, 4), (0.1, 4), (1000, 4)), "-TT--"),
    "tripped again": (trips((0, 0), (1, 1), (299, 2), (299, 2), (1, 2)), "-TTT-"),
    "cleared by a reset": (trips((0, 5), (1, 0), (1, 1)), "--T"),
    "not offered for a while": (trips((0, 0), (1, None), (1, 1), (1, None)), "--TT"),
    "late firmware": ([(100, {}), (100, {})], "--"),
    "silent after ten seconds": ([(1, NAMED), *[(5, {})] * 4, (1, NAMED), (9, {})], "---QQ--"),
    "the first of the table": (
        [
            (1, {**NAMED, "heartbeat": 7, "trips": 1}),
            (1, {"heartbeat": 7, "trips": 2, "temperature": 90.0}),
            (1, {"heartbeat": 7, "trips": 2, "temperature": 90.0}),
            (1, RESETTING),
            (1, {"heartbeat": 8, "trips": 2, "temperature": 90.0}),
            (1, {"heartbeat": 9, "trips": 3, "temperature": 40.0}),
            (100, {}),
            (100, {}),
            (100, {}),
        ],
        "-HSRHTTTQ",
    ),
}


@pytest.mark.parametrize("name", STORIES)
def test_the_kind_of_fault_after_each_reading(name: str, stalls: None) -> None:
    """Each rule not a reading earlier or later."""
    readings, letters = STORIES[name]
    followed, now, found = ttdp.Chip(chip(1).function), 1000.0, []
    for after, values in readings:
        now += after
        limit = values.get("limit", 90)
        known = {key: value for key, value in values.items() if key != "limit"}
        followed = followed.read(Reading(followed.function, now, **known), limit)
        found.append(kind_of(followed))
    assert found == [LETTERS[letter] for letter in letters]
