"""Health: what a chip's attributes show. The rules of its health are in test_chips."""

from __future__ import annotations

import errno
import os

import pytest

import ttdp
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.simulation import WatchedNode
from ttdp import Fault, Kind, Reading


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


NO_RESPONSE = Fault(Kind.NO_RESPONSE, "chip does not respond (registers read as ones)")


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        ({**DEAD, "tt_serial": "A" * 16}, NO_RESPONSE),
        ({**DEAD, "tt_heartbeat": None}, NO_RESPONSE),  # drivers before 2.7
        ({**DEAD, "tt_heartbeat": None, "tt_serial": None}, NO_RESPONSE),
        ({"tt_heartbeat": "ENODATA"}, Fault(Kind.RESETTING, "resetting (no telemetry)")),
        (
            {"temp1_input": "EIO"},
            Fault(Kind.READ_ERROR, "telemetry cannot be read: temp1_input: Input/output error"),
        ),
    ],
)
def test_a_chip_that_is_dead_or_cannot_be_read_shows_nothing_else(
    card: Card, texts: dict[str, str | None], fault: Fault
) -> None:
    """No identity, no temperature, no sensor. The first of the three that exists shows death."""
    for attribute, text in texts.items():
        alter(card, attribute, text)

    reading = read(card)
    assert reading == Reading(reading.function, reading.at, fault=fault)


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


def test_a_chip_that_is_removed_between_scan_and_read_shows_nothing(card: Card) -> None:
    """The next scan finds out why; it does not look like late firmware meanwhile."""
    watched = WatchedNode(card.node)
    watched.scan()
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
        ("tt_therm_trip_count", "4294967295", None),  # of a dead chip
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
        "tt_therm_trip_count": reading.trips,
        **reading.sensors,
    }
    assert values.get(attribute) == value


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
