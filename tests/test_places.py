"""Places: which chips are one board, and where a Galaxy's are, by addresses and serial numbers.

What becomes of a board that was moved to another slot is in test_resources.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import ttdp
from tests.chips import bdf, chip
from ttdp import Chip, Place, Tray

SERIAL = "0000046131842007"
BUSES = [tray + position for tray in (0x00, 0x40, 0x80, 0xC0) for position in range(1, 9)]


def p300(bus: int, serial: str | None = SERIAL, *, present: bool = True) -> Chip:
    return chip(bus, "p300c", serial=serial, ordinal=bus, present=present)


def board_ids(chips: Sequence[Chip]) -> list[str | None]:
    """The ID of each chip's board; None: it is not known."""
    found = ttdp.places(chips)
    return [found[each.bdf].board_id for each in chips]


# -- cards with one chip ---------------------------------------------------------------------------


def test_a_card_with_one_device_file_is_a_board_whatever_its_serial_is() -> None:
    """Hosts with six equal serials exist (tt-smi #243)."""
    chips = [chip(bus, "p150b", serial="1" * 16) for bus in (1, 2, 3)]
    assert ttdp.places(chips) == {each.bdf: Place(each.bdf, 1, each.bdf) for each in chips}


# -- p300 ------------------------------------------------------------------------------------------


def test_the_two_chips_that_report_one_serial_are_a_p300() -> None:
    """They have nothing else in common, wherever they are."""
    chips = [p300(0x01), p300(0x91), p300(0x02, "2" * 16)]

    assert board_ids(chips) == [SERIAL, SERIAL, "2" * 16]
    assert {place.board_size for place in ttdp.places(chips).values()} == {2}


def test_a_p300_without_its_serial_waits() -> None:
    """Late firmware reports it; two such chips need not be of one board."""
    chips = [p300(1, None), p300(2, None)]
    reason = "waiting for the board's serial number"
    assert ttdp.places(chips) == {each.bdf: Place(each.bdf, 2, unknown=reason) for each in chips}


def test_chips_wait_if_more_than_two_report_one_serial() -> None:
    """Which two are a board is not known."""
    chips = [p300(bus) for bus in (1, 2, 3)]
    reason = f"3 chips report the serial number {SERIAL}, but a p300 has 2"
    assert ttdp.places(chips) == {each.bdf: Place(each.bdf, 2, unknown=reason) for each in chips}


def test_such_chips_wait_also_while_the_driver_is_unloaded() -> None:
    """They are on the bus, so none of them has left its slot for another one."""
    chips = []
    for bus in (1, 2, 3, 4):
        found = p300(bus)
        chips.append(found._replace(function=found.function.without_class_device()))

    assert board_ids(chips) == [None] * 4


# -- Galaxy ----------------------------------------------------------------------------------------


def test_on_a_galaxy_the_address_is_the_place() -> None:
    """The bus's high nibble is the tray, its low one the position; a serial means nothing."""
    card = "galaxy-wormhole"
    chips = [chip(bus, card, serial=SERIAL) for bus in BUSES]

    found = ttdp.places(chips)

    tray = Tray(card, 0, 0xC0)
    assert found["0000:c8:00.0"] == Place(tray, 8, "0000:c0", tray=tray, position=8)
    assert len({place.board for place in found.values()}) == 4
    assert {(place.tray, place.position) for place in found.values()} == {
        (Tray(card, 0, tray), position)
        for tray in ttdp.GALAXY_TRAYS
        for position in ttdp.GALAXY_POSITIONS
    }


def test_a_galaxy_in_another_pci_domain_has_other_trays() -> None:
    """The ID of a tray has the domain."""
    found = ttdp.places([chip(0x1C1, "galaxy-wormhole"), chip(0x0C1, "galaxy-wormhole")])
    assert [place.board_id for place in found.values()] == ["0001:c0", "0000:c0"]


@pytest.mark.parametrize("strange", [0x09, 0x00, 0x11])
def test_if_one_galaxy_chip_is_on_another_bus_no_galaxy_chip_has_a_place(strange: int) -> None:
    """In a virtual machine the buses are the machine's; other cards have their boards."""
    chips = [chip(bus, "galaxy-blackhole") for bus in (0x01, 0x02, strange)]
    other = chip(0x61)

    found = ttdp.places([*chips, other])

    reason = f"bus {strange:02x} is not one of a Galaxy's, so its trays are not known"
    for each in chips:
        assert found[each.bdf] == Place(each.bdf, 8, unknown=reason)
    assert found[other.bdf].board_id == bdf(0x61)


def test_if_two_galaxy_chips_are_on_one_bus_no_galaxy_chip_has_a_place() -> None:
    """A Galaxy has a bus for each; eight on the first one would be taken for a whole tray."""
    chips = []
    for slot in range(8):
        found = chip(0x01, "galaxy-blackhole")
        address = f"0000:01:{slot:02x}.0"
        chips.append(found._replace(function=found.function._replace(bdf=address)))

    reason = "bus 01 is not one of a Galaxy's, so its trays are not known"
    assert ttdp.places(chips) == {each.bdf: Place(each.bdf, 8, unknown=reason) for each in chips}
