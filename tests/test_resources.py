"""Resources: what devices are called, which chips an ID stands for, and who else may have them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import SUBSYSTEMS, allocation, bdf, chip, count_calls, decide
from ttdp import Allocation, Chip, Device, Fault, Resource, Settings, SharedResource, Sharing

HOT = "it is ill; check its cooling"
GONE = "PCI device is gone; healthy again when it returns"
Reasons = dict[str, dict[str, str | None]]


def listed(*arguments: Any) -> dict[str, Resource]:
    """The resources of these chips, by name without the domain; arguments: of decide()."""
    found = decide(*arguments).resources
    return {name.removeprefix("tenstorrent.com/"): resource for name, resource in found.items()}


def reasons(*arguments: Any) -> Reasons:
    """Why each ID is unhealthy, by resource."""
    found = listed(*arguments).items()
    return {name: {key: d.reason for key, d in each.devices.items()} for name, each in found}


def ids(*arguments: Any) -> dict[str, list[str]]:
    return {name: [*each.devices] for name, each in listed(*arguments).items()}


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", SUBSYSTEMS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Board (no trailing letter), exact type, or architecture, by PCI or by the firmware."""
    board = re.sub("^(p[13][05]0)[abc]$", r"\1", card)
    by_pci = chip(1, card)
    by_firmware = chip(1, None, arch=by_pci.function.arch, card=card)
    names = {"board": board, "card": card, "arch": by_pci.function.arch}
    for naming, name in names.items():
        settings = Settings(resource_naming=naming)
        assert [*listed([by_pci], settings)] == [*listed([by_firmware], settings)] == [name]


def test_a_card_that_nobody_knows_has_the_name_of_its_architecture() -> None:
    """Neither the driver nor the PCI table knows a card that is newer than both."""
    for naming in ("board", "card", "arch"):
        assert [*listed([chip(1, None)], Settings(resource_naming=naming))] == ["wormhole"]


def test_the_firmware_overrules_pci() -> None:
    """A card type that the firmware reports later moves the device to another resource."""
    assert [*listed([chip(1, "p150a")])] == ["p150"]
    assert [*listed([chip(1, "p150a", card="p300c")])] == ["p300"]


@hypothesis_settings(deadline=None)
@given(st.text(max_size=80) | st.from_regex("[a-z]+[0-9]+[a-z]|[a-z0-9-]{1,80}", fullmatch=True))
def test_a_resource_has_a_valid_name_whatever_the_firmware_reports(card: str) -> None:
    """At most 63 characters of those that Kubernetes takes, alphanumeric at both ends."""
    identity = ttdp.parse_telemetry({"tt_card_type": card}).identity
    for naming in ("board", "card", "arch"):
        settings = Settings(resource_naming=naming, unit="board")
        (name,) = listed([chip(1, None)._replace(identity=identity)], settings)
        assert re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text: domain, bus, device, function."""
    cards = {0x101: "p150a", 0x02: "p150b", 0x1000001: "p150a", 0x10: "p150c", 0x0A: "p150b"}
    chips = [chip(bus, card) for bus, card in cards.items()]
    assert ids(chips) == {"p150": [bdf(bus) for bus in (0x02, 0x0A, 0x10, 0x101, 0x1000001)]}


# -- the list --------------------------------------------------------------------------------------


def test_chips_that_have_swapped_their_numbers_are_the_same_list() -> None:
    """IDs and their order come from addresses: the kubelet is sent nothing."""
    before = [chip(1, ordinal=0), chip(2, ordinal=1)]
    after = [chip(1, ordinal=1), chip(2, ordinal=0)]
    assert decide(before).lists == decide(after).lists


def test_the_list_has_the_health_and_the_numa_node_if_it_is_known() -> None:
    """Node 0 is a node; a device of unknown locality has no topology at all."""
    chips = [chip(1), chip(2, fault=Fault.HOT), chip(3, numa_node=0)]
    found = decide(chips).lists["tenstorrent.com/n150"].devices
    health = {bdf(1): "Healthy", bdf(2): "Unhealthy", bdf(3): "Healthy"}
    assert {device.ID: device.health for device in found} == health
    assert [device.HasField("topology") for device in found] == [False, False, True]
    assert [node.ID for node in found[2].topology.nodes] == [0]


def test_a_chip_that_has_vanished_stays_under_its_id_and_its_resource() -> None:
    """It would otherwise leave the node's capacity."""
    chips = [chip(1, card="n300", present=False), chip(2)]
    assert reasons(chips) == {"n150": {bdf(2): None}, "n300": {bdf(1): GONE}}


# -- boards as devices -----------------------------------------------------------------------------

BOARD = Settings(unit="board")
PAIR = "0000046131842007"


def p300(bus: int, serial: str | None = PAIR, **more: Any) -> Chip:
    return chip(bus, "p300c", ordinal=bus, serial=serial, **more)


def tray(high: int, chips: range = range(1, 9), arch: str = "wormhole") -> list[Chip]:
    return [chip(high << 4 | low, f"galaxy-{arch}", ordinal=low) for low in chips]


def test_a_board_is_one_device_under_one_id() -> None:
    """A p300 by its serial, a Galaxy's tray by its buses, a card with one chip by its address."""
    chips = [p300(0x61), p300(0x62), chip(0x41), *tray(0xC), *tray(0, arch="blackhole")]
    assert reasons(chips, BOARD) == {
        "galaxy-blackhole-board": {"0000:00": None},
        "galaxy-wormhole-board": {"0000:c0": None},
        "n150": {bdf(0x41): None},
        "p300-board": {PAIR: None},
    }


@pytest.mark.parametrize(
    ("naming", "names"),
    [
        ("board", ["n150", "p300-board"]),
        ("card", ["n150", "p300c-board"]),
        ("arch", ["blackhole-board", "wormhole"]),
    ],
)
def test_a_board_of_several_chips_has_another_name_than_its_chips(
    naming: str, names: list[str]
) -> None:
    """One request never means two things in one cluster."""
    chips = [p300(1), p300(2), chip(0x41)]
    assert [*listed(chips, Settings(unit="board", resource_naming=naming))] == names


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([p300(1)], "1 of 2 chips"),
        ([p300(1, None), p300(2)], "1 of 2 chips"),
        ([p300(1), p300(2, fault=Fault.HOT)], f"{bdf(2)}: {HOT}"),
        ([p300(1), p300(2, present=False)], f"{bdf(2)}: {GONE}"),
        ([p300(1, present=False), p300(2, present=False), p300(5), p300(6)], None),
        ([p300(1), p300(2), p300(5), p300(6)], "4 of 2 chips"),
    ],
    ids=["never seen", "not known yet", "hot", "gone", "moved", "wrong serial"],
)
def test_a_board_is_as_healthy_as_its_chips(chips: list[Chip], reason: str | None) -> None:
    """A chip that was never seen makes it no smaller; its former addresses no longer count."""
    assert reasons(chips, BOARD) == {"p300-board": {PAIR: reason}}


def test_a_chip_whose_board_is_not_known_yet_waits() -> None:
    """Without a serial it belongs to no board; a Galaxy's tray needs none, and has eight chips."""
    assert reasons([p300(1, None)], BOARD) == {}
    part = tray(0x8, range(3, 9))
    assert reasons(part, BOARD) == {"galaxy-wormhole-board": {"0000:80": "6 of 8 chips"}}


def test_a_boards_topology_has_every_numa_node_of_its_chips_once_and_in_order() -> None:
    """A chip of an unknown node adds none."""
    nodes = [1, 0, None, 1, 0, 0, 1, 1]
    chips = [chip(0x41 + n, "galaxy-wormhole", numa_node=node) for n, node in enumerate(nodes)]
    (found,) = decide(chips, BOARD).lists["tenstorrent.com/galaxy-wormhole-board"].devices
    assert [node.ID for node in found.topology.nodes] == [0, 1]


# -- shared devices --------------------------------------------------------------------------------


def shared(*entries: SharedResource, more: Any = None, **others: Any) -> Settings:
    """Settings that share these; more: of the section [sharing]."""
    return Settings(sharing=Sharing(resources=entries, **(more or {})), **others)


FOUR = [chip(bus, ordinal=bus - 1) for bus in (1, 2, 3, 4)]
BDFS = [each.bdf for each in FOUR]
TWICE = shared(SharedResource("n150", 2))
HALF = shared(SharedResource("n150", 2, "half"))


def test_a_shared_device_is_listed_once_for_each_replica() -> None:
    """As <id>::<n>, with the health of the device; it is one device."""
    found = listed([chip(1), chip(2, fault=Fault.HOT)], TWICE)["n150"]
    assert {key: device.reason for key, device in found.devices.items()} == {
        f"{bdf(1)}::0": None, f"{bdf(1)}::1": None,
        f"{bdf(2)}::0": HOT, f"{bdf(2)}::1": HOT,
    }  # fmt: skip
    assert [device.identifier for device in found.unique_devices] == [bdf(1), bdf(2)]


def test_devices_that_are_not_selected_stay_exclusive() -> None:
    """Selected by address or number, or by a count in the order of addresses."""
    by_name = SharedResource("n150", 2, "half", (BDFS[2], "0"))
    first = SharedResource("n150", 3, "third", 1)
    halves = [f"{BDFS[n]}::{replica}" for n in (0, 2) for replica in (0, 1)]
    thirds = [f"{BDFS[1]}::{replica}" for replica in range(3)]
    assert ids(FOUR, shared(by_name)) == {"n150": [BDFS[1], BDFS[3]], "half": halves}
    found = ids(FOUR, shared(by_name, first))
    assert found == {"n150": [BDFS[3]], "half": halves, "third": thirds}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (SharedResource("n150", 2, "half", (bdf(9), "7", "0")),
         f"n150: no such device: '{bdf(9)}', '7'"),
        (SharedResource("p150", 2), "p150: no such resource; available: n150"),
        (SharedResource("n150", 2), None),
    ],
)  # fmt: skip
def test_a_selected_device_that_does_not_exist_is_a_message(
    entry: SharedResource, message: str | None
) -> None:
    """The message names what is missing; the device is shared once it exists."""
    assert [*decide(FOUR, shared(entry)).unselected] == [message] * bool(message)
    new = chip(9, "p150a" if entry.name == "p150" else "n150", ordinal=7)
    after = decide([*FOUR, new], shared(entry))
    name = "tenstorrent.com/" + (entry.rename or entry.name)
    assert not after.unselected and f"{new.bdf}::1" in after.resources[name].devices


@pytest.mark.parametrize("devices", ["all", (PAIR,), (bdf(2),)])
def test_boards_can_be_shared_like_chips(devices: Any) -> None:
    """Under the board's resource, selected by the board's ID or by one of its chips."""
    half = shared(SharedResource("p300-board", 2, "p300-half", devices), unit="board")
    assert ids([p300(1), p300(2)], half) == {"p300-half": [f"{PAIR}::0", f"{PAIR}::1"]}


def test_a_shared_resource_keeps_its_name_unless_it_is_renamed() -> None:
    """By an entry's `rename`, else by `rename_by_default`, which appends `.shared`."""
    renamed = {"rename_by_default": True}
    assert [*ids(FOUR, TWICE)] == ["n150"]
    assert [*ids(FOUR, shared(SharedResource("n150", 2), more=renamed))] == ["n150.shared"]
    assert [*ids(FOUR, shared(SharedResource("n150", 2, "half"), more=renamed))] == ["half"]


def test_a_container_gets_one_replica_unless_more_are_allowed() -> None:
    """A request for several is rejected with the reason, but not several of one each."""
    three = [f"{BDFS[0]}::0", f"{BDFS[0]}::1", f"{BDFS[1]}::0"]
    strict = listed(FOUR, TWICE)["n150"]
    with pytest.raises(ttdp.RequestError) as rejected:
        ttdp.check_request(strict, [three])
    code, reason = rejected.value.args
    assert code.name == "INVALID_ARGUMENT" and "3 of tenstorrent.com/n150 for one cont" in reason
    ttdp.check_request(strict, [[one] for one in three])
    more = {"fail_requests_greater_than_one": False}
    lenient = listed(FOUR, shared(SharedResource("n150", 2), more=more))["n150"]
    ttdp.check_request(lenient, [three])
    assert [each.bdf for each in lenient.chips(three)] == BDFS[:2], "each device once"


# -- devices that pods hold ------------------------------------------------------------------------

ARCH = Settings(resource_naming="arch")
HELD = allocation("n150", bdf(1), buses=[1])
HELD_REASON = f"held by default/train as tenstorrent.com/n150 {bdf(1)}, until that pod ends"
REPLICAS = [f"{bdf(1)}::0", f"{bdf(1)}::1"]


@pytest.mark.parametrize(
    ("settings", "withheld"),
    [
        (Settings(), {}),
        (TWICE, {"n150": REPLICAS}),
        (ARCH, {"wormhole": [bdf(1)]}),
        (HALF, {"half": REPLICAS}),
        (Settings(resource_domain="example.org"), {"example.org/n150": [bdf(1)]}),
    ],
    ids=["unchanged", "shared", "renamed", "shared and renamed", "another domain"],
)
def test_an_id_that_a_pod_holds_stays_listed_and_the_chips_other_ids_are_withheld(
    settings: Settings, withheld: dict[str, list[str]]
) -> None:
    """A pod holds it until it ends, whatever the configuration; the reason names the pod."""
    found = reasons(FOUR, settings, [HELD])
    assert found["n150"][bdf(1)] is None
    unhealthy = {name: [key for key, why in each.items() if why] for name, each in found.items()}
    assert {name: keys for name, keys in unhealthy.items() if keys} == withheld
    texts = decide(FOUR, settings, [HELD]).withheld.values()
    assert {*texts} <= {HELD_REASON} and len(texts) == len(withheld)
    ended = decide(FOUR, settings)
    assert not ended.withheld and ended.resources == ttdp.configured_resources(FOUR, settings)


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([chip(1), chip(2)], None),
        ([chip(1, fault=Fault.HOT), chip(2)], HOT),
        ([chip(1, present=False), chip(2)], GONE),
        ([chip(2)], GONE),
    ],
    ids=["healthy", "hot", "gone", "not on this node"],
)
@pytest.mark.parametrize("settings", [Settings(), ARCH, TWICE, HALF])
def test_an_id_that_a_pod_holds_is_as_healthy_as_the_chips_of_the_pods_answer(
    chips: list[Chip], reason: str | None, settings: Settings
) -> None:
    """Also if the chip is missing after a reboot: kubelets can crash without the ID."""
    assert reasons(chips, settings, [HELD])["n150"][bdf(1)] == reason


def test_an_id_that_a_pod_holds_is_never_withheld() -> None:
    """Even if another pod holds the chip under another name: both run already."""
    other = allocation("wormhole", bdf(1), buses=[1], pod="u2")
    found = reasons(FOUR, ARCH, [HELD, other])
    assert found["n150"] == {bdf(1): None} and found["wormhole"] == dict.fromkeys(BDFS)


MOVED = [p300(1, present=False), p300(2, present=False), p300(5), p300(6)]


def test_an_id_of_which_the_meaning_has_changed_stands_for_the_chips_of_its_pod() -> None:
    """A board in another slot: the pod's ID is Unhealthy, as the chips at its addresses are."""
    held = allocation("p300-board", PAIR, buses=[1, 2])
    found = listed(MOVED, BOARD, [held])["p300-board"].devices[PAIR]
    assert found.addresses == {bdf(1), bdf(2)} and found.reason == f"{bdf(1)}: {GONE}"
    assert listed(MOVED, BOARD)["p300-board"].devices[PAIR].addresses == {bdf(5), bdf(6)}


def test_the_newest_allocation_decides_what_an_id_stands_for() -> None:
    """A pod deleted by force still runs on the chips that the ID stood for before."""
    old = allocation("p300-board", PAIR, buses=[1, 2])
    new = allocation("p300-board", PAIR, buses=[5, 6], pod="u2")
    for order, buses in (([old, new], (5, 6)), ([new, old], (1, 2))):
        found = listed(MOVED, BOARD, order)["p300-board"].devices[PAIR]
        assert found.addresses == {*map(bdf, buses)}


@pytest.mark.parametrize(
    ("held", "is_withheld"),
    [
        (allocation("n150", f"{bdf(1)}::0", buses=[1]), False),
        (allocation("n150", bdf(1), buses=[1]), True),
        (allocation("n150", f"{bdf(1)}::2", buses=[1]), True),
        (allocation("other", f"{bdf(1)}::0", buses=[1]), True),
    ],
    ids=["another replica", "the whole device", "a former replica", "another resource's"],
)
def test_replicas_of_a_shared_device_do_not_withhold_each_other(
    held: Allocation, is_withheld: bool
) -> None:
    """Only IDs that the configuration no longer gives, or another resource's, withhold them."""
    found = reasons(FOUR[:1], TWICE, [held])["n150"]
    assert (found[f"{bdf(1)}::1"] is not None) is is_withheld


def test_a_board_is_withheld_while_a_pod_holds_one_of_its_chips_and_vice_versa() -> None:
    """A pod that was given a board holds both its chips, whatever the unit is now."""
    chips = [p300(1), p300(2)]
    one = allocation("p300", bdf(2), buses=[2])
    assert "default/train" in str(reasons(chips, BOARD, [one])["p300-board"][PAIR])
    both = allocation("p300-board", PAIR, buses=[1, 2])
    found = listed(chips, Settings(), [both])
    assert found["p300-board"].devices[PAIR].addresses == {bdf(1), bdf(2)}
    assert all("default/train" in str(each.reason) for each in found["p300"].devices.values())


@pytest.mark.parametrize(
    ("ids", "chips", "wanted"),
    [
        ([PAIR, "S"], (1, 2, 5, 6), {PAIR: {1, 2}, "S": {5, 6}}),
        ([PAIR, "X"], (1, 2, 9), {PAIR: {1, 2}, "X": {9}}),
        (["X", "Y"], (1, 9), {"X": {1, 9}, "Y": {1, 9}}),
        ([bdf(1), "X"], (1, 9), {bdf(1): {1}, "X": {9}}),
        ([f"{bdf(9)}::3", "X"], (1, 9), {f"{bdf(9)}::3": {9}, "X": {1}}),
        ([PAIR, "S"], (7, 9), {PAIR: {7, 9}, "S": {7, 9}}),
    ],
    ids=["configured", "the rest", "unclear", "an address", "a replica", "another meaning"],
)
def test_the_chips_of_an_answer_belong_to_its_ids(
    ids: list[str], chips: tuple[int, ...], wanted: dict[str, set[int]]
) -> None:
    """By the configuration, else by an address in the ID, else all that are left."""
    boards = [p300(1), p300(2), p300(5, "S"), p300(6, "S")]
    resource = listed(boards, BOARD)["p300-board"]
    found = ttdp.chips_by_id(allocation("p300-board", *ids, buses=chips), resource)
    assert found == {key: frozenset(map(bdf, buses)) for key, buses in wanted.items()}


@pytest.mark.parametrize(
    ("settings", "held", "reason"),
    [
        (Settings(), HELD, None),
        (TWICE, HELD, f"this ID no longer refers to {bdf(1)}"),
        (ARCH, HELD, f"this ID no longer refers to {bdf(1)}"),
        (Settings(), allocation("wormhole", bdf(1), buses=[1]), "held by default/train"),
    ],
    ids=["given for that chip", "shared", "renamed", "withheld"],
)
def test_an_id_that_a_pod_holds_is_allocated_again_while_the_configuration_gives_it(
    settings: Settings, held: Allocation, reason: str | None
) -> None:
    """The kubelet asks again for the ID of an init container that its pod reuses."""
    resource = listed(FOUR, settings, [held])["n150"]
    if reason is None:
        ttdp.check_request(resource, [[bdf(1)]])
        return
    with pytest.raises(ttdp.RequestError) as rejected:
        ttdp.check_request(resource, [[bdf(1)]])
    code, text = rejected.value.args
    assert code.name == "FAILED_PRECONDITION" and f"device {bdf(1)}: {reason}" in text


@pytest.mark.parametrize(
    ("containers", "code", "reason"),
    [
        ([], "INVALID_ARGUMENT", "no container"),
        ([[BDFS[0]], []], "INVALID_ARGUMENT", "a container without devices"),
        ([[BDFS[0]], [bdf(9)]], "NOT_FOUND", f"has no device '{bdf(9)}'"),
        ([[BDFS[0]], [BDFS[0]]], "INVALID_ARGUMENT", f"duplicate device '{BDFS[0]}'"),
        ([[f"x{n}" * 99 for n in range(5000)]], "NOT_FOUND", "has no device 'x0x0x0"),
    ],
)
def test_an_impossible_request_is_rejected(
    containers: list[list[str]], code: str, reason: str
) -> None:
    """With the status code and a reason that stays short, whatever the IDs are."""
    with pytest.raises(ttdp.RequestError, match=re.escape(reason)) as rejected:
        ttdp.check_request(listed(FOUR)["n150"], containers)
    assert rejected.value.args[0].name == code and len(rejected.value.args[1]) < 400


# -- properties ------------------------------------------------------------------------------------

configurations = st.builds(
    Settings,
    unit=st.sampled_from(["chip", "board"]),
    resource_naming=st.sampled_from(["board", "arch"]),
    sharing=st.builds(
        Sharing,
        resources=st.sampled_from(
            [
                (),
                (SharedResource("n150", 2), SharedResource("p300-board", 2, "pair")),
                (SharedResource("n150", 3, "third", 1),),
                (SharedResource("n150", 2, "half", (bdf(2), "0")),),
            ]
        ),
    ),
)
states = st.sampled_from([{}, {}, {"fault": Fault.HOT}, {"present": False}, None])


@st.composite
def nodes(draw: st.DrawFn) -> list[Chip]:
    """Up to two n150 and a p300 in one of two slots, of which some are missing or unhealthy."""
    slot = draw(st.sampled_from([5, 7]))
    cards = {1: "n150", 2: "n150", slot: "p300c", slot + 1: "p300c"}
    found = [(bus, card, draw(states)) for bus, card in cards.items()]
    return [chip(bus, card, serial=PAIR, **more) for bus, card, more in found if more is not None]


@st.composite
def pods(draw: st.DrawFn, resources: dict[str, Resource]) -> list[Allocation]:
    """What a kubelet has given to pods: a chip to one of them, unless it is shared."""
    found: list[Allocation] = []
    owners: dict[str, tuple[str, str]] = {}
    for name, resource in resources.items():
        for identifier, device in resource.devices.items():
            owner = (name, device.identifier)
            is_free = {owners.get(each, owner) for each in device.addresses} == {owner}
            if not device.reason and is_free and draw(st.booleans()):
                owners |= dict.fromkeys(device.addresses, owner)
                given = Allocation(name, frozenset([identifier]), device.addresses)
                if found and found[-1].resource == name and draw(st.booleans()):
                    last = found.pop()
                    given = Allocation(name, last.ids | given.ids, last.chips | given.chips)
                found.append(given._replace(pod=f"u{len(found)}", container="main"))
    return found


def advertised(found: dict[str, Resource], held: set[tuple[str, str]]) -> list[tuple[str, Device]]:
    """The healthy devices of which no pod holds the ID, with their resources."""
    pairs = [(name, *item) for name, each in found.items() for item in each.devices.items()]
    return [(name, d) for name, key, d in pairs if (name, key) not in held and not d.reason]


@hypothesis_settings(deadline=None, max_examples=100)
@given(nodes(), configurations, nodes(), configurations, st.data())
def test_no_chip_of_a_pod_is_advertised_and_no_id_of_a_pod_is_missing(
    before: list[Chip], former: Settings, after: list[Chip], now: Settings, data: st.DataObject
) -> None:
    """Whatever happens to chips and configuration while pods hold devices."""
    allocations = data.draw(pods({**decide(before, former).resources}))
    found = {**decide(after, now, allocations).resources}
    configured = ttdp.configured_resources(after, now)
    for each in allocations:
        held = [found[each.resource].devices[key] for key in each.ids]
        assert frozenset[str]().union(*(device.addresses for device in held)) == each.chips
    assert all(found[name].devices.keys() >= configured[name].devices.keys() for name in configured)
    free = advertised(found, {(each.resource, key) for each in allocations for key in each.ids})
    for name, device in free:
        replicas = {*ttdp.replica_ids(device.identifier, found[name].replicas)}
        for each in allocations:
            shares_device = each.resource == name and each.ids & replicas
            assert shares_device or not each.chips & device.addresses
    for (name, one), (other_name, other) in itertools.combinations(free, 2):
        is_same = (name, one.identifier) == (other_name, other.identifier)
        assert is_same or not one.addresses & other.addresses


def full_galaxy(pods: int) -> Sequence[Any]:
    """Arguments for decide(): 32 chips with 100 replicas each, and so many pods."""
    chips = [chip(bus, "galaxy-wormhole", ordinal=bus, numa_node=bus % 2) for bus in range(1, 33)]
    given = [
        allocation("galaxy-wormhole", f"{bdf(1 + n % 32)}::{n}", buses=[1 + n % 32], pod=f"uid-{n}")
        for n in range(pods)
    ]
    return chips, shared(SharedResource("galaxy-wormhole", 100)), given


def test_one_more_pod_on_a_node_full_of_replicas_costs_little() -> None:
    """3,200 IDs, 110 pods: about 67,000 calls (10 ms); doubling the pods adds little."""
    few, many = full_galaxy(111), full_galaxy(222)
    calls = count_calls(lambda: decide(*few))
    assert calls < 150_000
    assert count_calls(lambda: decide(*many)) < 1.5 * calls
