"""Resources: what devices are called, which chips are one device, and what a pod's hold changes."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import SUBSYSTEMS, bdf, chip, decide, hold
from ttdp import Chip, Device, Hold, Kind, Place, Resource, Settings, SharedResource, Sharing, Tray

BOARD, ARCH = Settings(unit="board"), Settings(resource_naming="arch")
SERIAL, OTHER = "0000046131842007", "0000046131842099"
Reasons = dict[str, dict[str, str | None]]


def reasons(*arguments: Any) -> Reasons:
    """Why each ID is unhealthy, by resource without the domain; arguments: of decide()."""
    found = decide(*arguments).resources.items()
    return {
        name.removeprefix("tenstorrent.com/"): {
            device_id: device.reason for device_id, device in resource.devices.items()
        }
        for name, resource in found
    }


def ids(*arguments: Any) -> dict[str, list[str]]:
    return {name: [*devices] for name, devices in reasons(*arguments).items()}


def p300(bus: int, serial: str | None = SERIAL, **more: Any) -> Chip:
    return chip(bus, "p300c", number=bus, serial=serial, **more)


def tray(high: int, chips: range = range(1, 9), arch: str = "wormhole") -> list[Chip]:
    return [chip(high << 4 | low, f"galaxy-{arch}", number=low, serial=SERIAL) for low in chips]


def ill(bus: int) -> str:
    return f"it is ill; run: tt-device-plugin fix {bdf(bus)}"


def gone(bus: int) -> str:
    return f"PCI device is gone; run: tt-device-plugin fix {bdf(bus)}"


# -- names and lists -------------------------------------------------------------------------------


@pytest.mark.parametrize("card", SUBSYSTEMS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Board (no trailing letter), exact type or architecture; the firmware overrules PCI."""
    board = re.sub("^(p[13][05]0)[abc]$", r"\1", card)
    arch = str(chip(1, card).function.arch)
    other = chip(1, "p150b" if arch == "blackhole" else "n150", card=card)

    for naming, name in {"board": board, "card": card, "arch": arch}.items():
        settings = Settings(resource_naming=naming, resource_domain="example.org")
        for each in (chip(1, card), other):
            assert [*decide([each], settings).resources] == [f"example.org/{name}"]
        assert ids([chip(1, None)], Settings(resource_naming=naming)) == {"wormhole": [bdf(1)]}


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text; chips that swap their device files leave the list unchanged."""
    buses = (0x101, 0x02, 0x1000001, 0x10)
    chips = [chip(bus, "p150a", number=number) for number, bus in enumerate(buses)]
    swapped = [chip(bus, "p150b", number=9 - number) for number, bus in enumerate(buses)]

    assert ids(chips) == {"p150": [bdf(bus) for bus in (0x02, 0x10, 0x101, 0x1000001)]}
    (before,), (after,) = (decide(each).resources.values() for each in (chips, swapped))
    assert before.list_entries == after.list_entries


def test_the_list_has_health_and_numa_nodes() -> None:
    """A device without a known node has none; a board has each node of its chips once."""
    nodes = [1, 0, None, 1, 0, 0, 1, 1]
    galaxy = [chip(0x41 + n, "galaxy-wormhole", numa_node=node) for n, node in enumerate(nodes)]
    chips = [chip(1), chip(2, fault=Kind.STALLED), chip(3, numa_node=0), *galaxy]

    resources = decide(chips, BOARD).resources
    assert [each for resource in resources.values() for each in resource.list_entries] == [
        ("0000:40", True, (0, 1)),
        (bdf(1), True, ()),
        (bdf(2), False, ()),
        (bdf(3), True, (0,)),
    ]
    assert resources["tenstorrent.com/n150"].refused == {bdf(2)}


# -- boards and their places -----------------------------------------------------------------------


def test_a_card_with_one_device_file_is_a_board_whatever_its_serial_is() -> None:
    """Hosts with six equal serials exist (tt-smi #243)."""
    chips = [chip(bus, "p150b", serial=SERIAL) for bus in (1, 2, 3)]
    assert ttdp.places(chips) == {
        each.address: Place(each.address, 1, each.address) for each in chips
    }


def test_the_two_chips_that_report_one_serial_are_a_p300() -> None:
    """They have nothing else in common, wherever they are; one without a serial waits for it.

    So do chips of which more than two report one: which two are a board is not known.
    """
    found = ttdp.places([p300(0x01), p300(0x91), p300(0x02, OTHER), p300(0x03, None)])
    assert [*found.values()] == [
        Place(SERIAL, 2, SERIAL),
        Place(SERIAL, 2, SERIAL),
        Place(OTHER, 2, OTHER),
        Place(bdf(3), 2, unknown="waiting for the board's serial number"),
    ]

    reason = f"3 chips report the serial number {SERIAL}, but a p300 has 2"
    for address, place in ttdp.places([p300(bus) for bus in (1, 2, 3)]).items():
        assert place == Place(address, 2, unknown=reason)


def test_on_a_galaxy_the_address_is_the_place() -> None:
    """The bus's high nibble is the tray, its low one the position; a serial means nothing."""
    found = ttdp.places([*tray(0xC), *tray(0x0), *tray(0x1C)])

    tray_c = Tray("galaxy-wormhole", 0, 0xC0)
    assert found["0000:c8:00.0"] == Place(tray_c, 8, "0000:c0", tray=tray_c, position=8)
    boards = [found[address].board_id for address in map(bdf, (0xC1, 0x01, 0x08, 0x1C1))]
    assert boards == ["0000:c0", "0000:00", "0000:00", "0001:c0"]
    assert len({place.board for place in found.values()}) == 3


@pytest.mark.parametrize("strange", [0x09, 0x00, 0x11])
def test_if_one_galaxy_chip_is_on_another_bus_no_galaxy_chip_has_a_place(strange: int) -> None:
    """In a virtual machine the buses are the machine's; other cards have their boards."""
    chips = [chip(bus, "galaxy-blackhole") for bus in (0x01, 0x02, strange)]
    found = ttdp.places([*chips, chip(0x61)])

    reason = f"bus {strange:02x} is not one of a Galaxy's, so its trays are not known"
    for each in chips:
        assert found[each.address] == Place(each.address, 8, unknown=reason)
    assert found[bdf(0x61)].board_id == bdf(0x61)
    assert ids(chips, BOARD) == {}
    assert decide(chips, BOARD).resource("tenstorrent.com/galaxy-blackhole-board").devices == {}


def test_with_whole_boards_a_board_is_one_device() -> None:
    """A p300 by its serial, a tray by its buses, another card by its address; names tell them."""
    chips = [p300(0x61), p300(0x62), p300(0x63, None), chip(0x41), *tray(0xC)]
    chips += tray(0, arch="blackhole")

    assert reasons(chips, BOARD) == {
        "galaxy-blackhole-board": {"0000:00": None},
        "galaxy-wormhole-board": {"0000:c0": None},
        "n150": {bdf(0x41): None},
        "p300-board": {SERIAL: None},
    }
    by_arch = ids([p300(1), p300(2), chip(3)], Settings(unit="board", resource_naming="arch"))
    assert [*by_arch] == ["blackhole-board", "wormhole"], "one request means one thing"


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([p300(1)], "1 of 2 chips"),
        ([p300(1, None), p300(2)], "1 of 2 chips"),
        ([p300(1), p300(2, fault=Kind.STALLED)], f"{bdf(2)}: {ill(2)}"),
        ([p300(1), p300(2, present=False)], f"{bdf(2)}: {gone(2)}"),
        ([p300(1, fault=Kind.STALLED)], f"{bdf(1)}: {ill(1)}"),
        (tray(0x8, range(3, 9)), "6 of 8 chips"),
    ],
    ids=["never seen", "not known yet", "stalled", "gone", "alone", "a tray"],
)
def test_a_board_is_as_healthy_as_its_chips(chips: list[Chip], reason: str) -> None:
    """A chip that was never seen makes it no smaller."""
    (found,) = reasons(chips, BOARD).values()
    assert [*found.values()] == [reason]


# -- sharing and exclusion -------------------------------------------------------------------------

FOUR = [chip(bus, number=bus - 1) for bus in (1, 2, 3, 4)]
ONE, TWO, THREE, LAST = (each.address for each in FOUR)


def shared(*entries: SharedResource, more: Any = None, **others: Any) -> Settings:
    """Settings that share these; more: of the section [sharing]."""
    return Settings(sharing=Sharing(resources=entries, **(more or {})), **others)


def test_devices_that_are_not_selected_stay_exclusive() -> None:
    """Selected by address or board; shared ones have the ID <id>::<n>."""
    half = SharedResource("n150", 2, "half", (ONE,))
    third = SharedResource("n150", 3, "third", (TWO, LAST))
    others = [chip(9, "n300")]  # of another name, which the entries do not share

    assert ids([*FOUR, *others], shared(half, third)) == {
        "half": [f"{ONE}::0", f"{ONE}::1"],
        "n150": [THREE],
        "n300": [bdf(9)],
        "third": [f"{each}::{number}" for each in (TWO, LAST) for number in range(3)],
    }
    for devices in ((SERIAL,), (bdf(2),)):
        board = shared(SharedResource("p300-board", 2, "half", devices), unit="board")
        assert ids([p300(1), p300(2)], board) == {"half": [f"{SERIAL}::0", f"{SERIAL}::1"]}


def test_a_shared_resource_keeps_its_name_unless_it_is_renamed() -> None:
    """By an entry's `rename`, else by `rename_by_default`, which appends `.shared`."""
    renamed = {"rename_by_default": True}
    for entry, more, name in (
        (SharedResource("n150", 2), {}, "n150"),
        (SharedResource("n150", 2), renamed, "n150.shared"),
        (SharedResource("n150", 2, "half"), renamed, "half"),
    ):
        assert [*ids(FOUR, shared(entry, more=more))] == [name]


@pytest.mark.parametrize(
    ("settings", "offered"),
    [
        ({}, {"p300": [bdf(1), bdf(3), bdf(4)]}),
        ({"unit": "board"}, {"p300-board": [OTHER]}),
        (
            {"unit": "board", "sharing": Sharing(resources=(SharedResource("p300-board", 2),))},
            {"p300-board": [f"{OTHER}::0", f"{OTHER}::1"]},
        ),
    ],
    ids=["chips", "boards", "shared boards"],
)
def test_an_excluded_chip_is_not_offered(
    settings: dict[str, Any], offered: dict[str, list[str]]
) -> None:
    """With whole boards its board is out of service. An address without a chip changes nothing."""
    chips = [p300(1), p300(2), p300(3, OTHER), p300(4, OTHER)]
    found = decide(chips, Settings(exclude=(bdf(2), bdf(9)), **settings))

    assert {name: [*each.devices] for name, each in found.resources.items()} == {
        f"tenstorrent.com/{name}": listed for name, listed in offered.items()
    }
    out = {bdf(1), bdf(2)} if settings else {bdf(2)}
    assert {address for address in found.chips if found.is_out_of_service(address)} == out


def test_a_held_chip_is_not_out_of_service_though_it_is_excluded() -> None:
    """The pod's ID stays listed, with the chip's health, until the pod ends."""
    settings = Settings(exclude=(ONE, TWO))
    chips = [chip(1, fault=Kind.STALLED), *FOUR[1:]]
    found = decide(chips, settings, [hold("n150", ONE, buses=[1])])

    assert reasons(chips, settings, found.holds)["n150"] == {ONE: ill(1), THREE: None, LAST: None}
    assert [*map(found.is_out_of_service, (ONE, TWO, THREE))] == [False, True, False]


# -- holds -----------------------------------------------------------------------------------------


def test_a_held_id_is_never_withheld() -> None:
    """Even if another pod holds the chip under another name: both run already."""
    holds = [hold("n150", ONE, buses=[1]), hold("wormhole", ONE, buses=[1], pod="u2")]
    assert reasons(FOUR[:1], ARCH, holds) == {"n150": {ONE: None}, "wormhole": {ONE: None}}


@pytest.mark.parametrize(("resource", "is_withheld"), [("n150", False), ("other", True)])
def test_a_shared_device_is_withheld_if_a_pod_has_its_chip_under_another_name(
    resource: str, is_withheld: bool
) -> None:
    """Though another pod has one of its replicas, which stays healthy."""
    held = [hold("n150", f"{ONE}::0", buses=[1], pod="u2")]
    held.append(hold(resource, f"{ONE}::2", buses=[1]))
    twice = shared(SharedResource("n150", 2))
    found = decide(FOUR[:1], twice, held).resource("tenstorrent.com/n150")

    text = f"held until default/train ends (as tenstorrent.com/other {ONE}::2)"
    assert found.devices[f"{ONE}::0"].reason is None
    assert found.devices[f"{ONE}::1"].reason == (text if is_withheld else None)
    holders = [each.holder for each in found.unique_devices if not each.is_reserved]
    assert holders == ["default/train" if is_withheld else None]


SHARED = [
    Sharing(),
    Sharing(resources=(SharedResource("n150", 2), SharedResource("p300-board", 2, "pair"))),
    Sharing(resources=(SharedResource("n150", 2, "half", (bdf(2),)),)),
]
configurations = st.builds(
    Settings,
    unit=st.sampled_from(["chip", "board"]),
    resource_naming=st.sampled_from(["board", "arch"]),
    exclude=st.sampled_from([(), (), (bdf(2),)]),
    sharing=st.sampled_from(SHARED),
)
states = st.sampled_from([{}, {}, {"fault": Kind.STALLED}, {"present": False}, None])


@st.composite
def nodes(draw: st.DrawFn) -> list[Chip]:
    """Up to two n150 and a p300, of which some are missing or unhealthy."""
    cards = {1: "n150", 2: "n150", 5: "p300c", 6: "p300c"}
    found = [(bus, card, draw(states)) for bus, card in cards.items()]
    return [chip(bus, card, serial=SERIAL, **more) for bus, card, more in found if more is not None]


@st.composite
def pods(draw: st.DrawFn, resources: dict[str, Resource]) -> list[Hold]:
    """What a kubelet has given to pods: a chip to one of them, unless it is shared."""
    found: list[Hold] = []
    owners: dict[str, tuple[str, str]] = {}
    for name, resource in resources.items():
        for device_id, device in resource.devices.items():
            owner = (name, device.id)
            is_free = {owners.get(each, owner) for each in device.addresses} == {owner}
            if not device.reason and is_free and draw(st.booleans()):
                owners |= dict.fromkeys(device.addresses, owner)
                pod = f"u{len(found)}"
                found.append(Hold(name, frozenset([device_id]), "", device.addresses, pod=pod))
    return found


def advertised(found: dict[str, Resource], held: set[tuple[str, str]]) -> list[tuple[str, Device]]:
    """The healthy devices of which no pod holds the ID, with their resources."""
    pairs = [(name, *item) for name, each in found.items() for item in each.devices.items()]
    return [
        (name, each) for name, key, each in pairs if (name, key) not in held and not each.reason
    ]


@hypothesis_settings(deadline=None, max_examples=100)
@given(nodes(), configurations, nodes(), configurations, st.data())
def test_no_chip_of_a_pod_is_offered_and_no_id_of_a_pod_is_missing(
    before: list[Chip], former: Settings, after: list[Chip], now: Settings, data: st.DataObject
) -> None:
    """Whatever happens to chips and configuration while pods hold devices."""
    holds = data.draw(pods({**decide(before, former).resources}))
    decision = decide(after, now, holds)
    found, configured = decision.resources, decision.offer.resources

    for each in holds:
        are_healthy = all(decision.chips[address].reason is None for address in each.chips)
        for device in (found[each.resource].devices[key] for key in each.ids):
            assert device.addresses <= each.chips
            assert device.reason is None or not are_healthy
    assert all(found[name].devices.keys() >= configured[name].devices.keys() for name in configured)

    free = advertised(found, {(each.resource, key) for each in holds for key in each.ids})
    for name, device in free:
        for each in holds:
            assert each.shares_device(name, device.ids) or not each.chips & device.addresses
    for (name, one), (other_name, other) in itertools.combinations(free, 2):
        is_same = (name, one.id) == (other_name, other.id)
        assert is_same or not one.addresses & other.addresses
