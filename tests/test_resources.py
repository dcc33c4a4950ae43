"""Resources: what devices are called, which chips an ID stands for, and who else may have them."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.node import CARDS
from ttdp import Allocation, Chip, Claims, Fault, Health, Identity, Resource, Settings, Sharing

Shared = ttdp.SharedResource
ASIC = "3B1D7A5620E41F08"
OTHER_ASIC = "9F02C4B77A10E301"
STRATEGIES = ("bdf", "asic", "index")
HEALTHY = Health()
HOT = Health(Fault.HOT, "too hot")
GONE = Health(Fault.GONE, "PCI device is gone")


def chip(
    bus: int,
    ordinal: int = 0,
    arch: Any = "wormhole",
    card: str | None = "n150",
    numa_node: int | None = None,
    present: bool = True,
    health: Health = HEALTHY,
    **said: str | None,
) -> Chip:
    """A chip on this bus, with what PCI and what its firmware says of it."""
    path = f"/dev/tenstorrent/{ordinal}"
    place = ttdp.PciFunction(bdf(bus), arch, card, numa_node, ordinal, path, "/sys/devices/x")
    return Chip(place, present, Identity(**said), health=health)


def bdf(bus: int) -> str:
    return f"{bus >> 8:04x}:{bus & 255:02x}:00.0"


def listed(
    chips: list[Chip], settings: Settings | None = None, claims: Claims = ttdp.NO_CLAIMS
) -> dict[str, Resource]:
    """What there is of these chips, by the resource's name without its domain."""
    given = ttdp.configured_resources(chips, settings or Settings())
    found = ttdp.resources(given, chips, claims)
    return {name.removeprefix("tenstorrent.com/"): resource for name, resource in found.items()}


def reasons(*arguments: Any) -> dict[str, dict[str, str | None]]:
    """Why each device is not healthy, by resource and ID."""
    found = listed(*arguments).items()
    return {name: {key: d.reason for key, d in each.devices.items()} for name, each in found}


def ids(chips: list[Chip], settings: Settings | None = None) -> dict[str, list[str]]:
    return {name: [*each.devices] for name, each in listed(chips, settings).items()}


def identifiers(chips: list[Chip], strategy: Any) -> dict[str, str]:
    """Address by ID, over all resources."""
    found = listed(chips, Settings(device_id_strategy=strategy)).values()
    return {key: one.chips[0].bdf for each in found for key, one in each.devices.items()}


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Board (no trailing letter), exact type, or architecture, told by PCI or by the firmware."""
    board = {"p100a": "p100"}.get(card, re.sub("^(p[13][05]0)[abc]$", r"\1", card))
    arch = "wormhole" if card[0] == "n" or card == "galaxy-wormhole" else "blackhole"
    by_pci = chip(1, arch=arch, card=card)
    by_firmware = by_pci._replace(
        function=by_pci.function._replace(pci_card=None), identity=Identity(card)
    )
    for naming, name in (("board", board), ("card", card), ("arch", arch)):
        settings = Settings(resource_naming=naming)  # type: ignore[arg-type]
        assert list(listed([by_pci], settings)) == list(listed([by_firmware], settings)) == [name]


def test_the_firmware_knows_better_than_pci() -> None:
    """A card type that arrives late and says something else moves the device."""
    silent = chip(1, arch="blackhole", card="p150a")
    assert list(listed([silent])) == ["p150"]
    assert list(listed([silent._replace(identity=Identity("p300c"))])) == ["p300"]


@hypothesis_settings(deadline=None)
@given(st.text(max_size=80) | st.from_regex("[a-z]+[0-9]+[a-z]|[a-z0-9-]{1,80}", fullmatch=True))
def test_whatever_a_firmware_calls_its_card_the_name_is_valid(card: str) -> None:
    """At most 63 characters of those that Kubernetes takes, alphanumeric ones at both ends."""
    spoken = chip(1)._replace(identity=ttdp.parse_telemetry({"tt_card_type": card}).identity)
    for naming in ("board", "card", "arch"):
        (name,) = listed([spoken], Settings(resource_naming=naming, unit="board"))
        assert re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text: domain, bus, device, function."""
    buses = {0x101: "p150a", 0x02: "p150b", 0x1000001: "p150a", 0x10: "p150c", 0x0A: "p150b"}
    mixed = [chip(bus, arch="blackhole", card=card) for bus, card in buses.items()]
    assert ids(mixed) == {"p150": [bdf(bus) for bus in (0x02, 0x0A, 0x10, 0x101, 0x1000001)]}


def test_chips_that_have_swapped_their_numbers_are_the_same_list() -> None:
    """By ordinals the kubelet has the same IDs as before: that is no change."""

    def message(*ordinals: int) -> Any:
        chips = [chip(bus, ordinal) for bus, ordinal in enumerate(ordinals, 1)]
        return ttdp.device_list(listed(chips, Settings(device_id_strategy="index"))["n150"])

    assert message(0, 1) == message(1, 0)


# -- IDs -------------------------------------------------------------------------------------------

BY_ID = f"wormhole-{ASIC}"
KNOWN = [chip(1, 3, asic_id=ASIC), chip(2, 0, "blackhole", "p150a", asic_id=OTHER_ASIC)]
TWINS = [chip(1, 0, asic_id=ASIC), chip(2, 1, asic_id=ASIC), chip(3, 2, asic_id="C" * 16)]
MOVED = [chip(1, 0, present=False, asic_id=ASIC), chip(2, 0, asic_id=ASIC)]


@pytest.mark.parametrize(
    ("chips", "strategy", "buses"),
    [
        (KNOWN, "bdf", {bdf(1): 1, bdf(2): 2}),
        (KNOWN, "asic", {BY_ID: 1, f"blackhole-{OTHER_ASIC}": 2}),
        (KNOWN, "index", {"3": 1, "0": 2}),
        ([chip(1)], "asic", {bdf(1): 1}),
        (TWINS, "asic", {bdf(1): 1, bdf(2): 2, f"wormhole-{'C' * 16}": 3}),
        (MOVED, "asic", {BY_ID: 2}),
        (MOVED, "bdf", {bdf(1): 1, bdf(2): 2}),
        (MOVED, "index", {"0": 2}),
    ],
    ids=[
        "the address", "the ASIC's, as udev's by-id links have it", "the node's number",
        "an ASIC that is not told is its address", "so are two with one ASIC ID",
        "it follows a card to another slot", "the old slot stays listed",
        "a number that is used again is the present chip's",
    ],
)  # fmt: skip
def test_an_id_is_what_the_strategy_says(
    chips: list[Chip], strategy: Any, buses: dict[str, int]
) -> None:
    """Silent firmware and a driver before 2.1 tell no ASIC ID; of twins neither hides the other."""
    assert identifiers(chips, strategy) == {key: bdf(bus) for key, bus in buses.items()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_vanished_chip_stays_under_its_id_and_its_resource(strategy: Any) -> None:
    """What was once listed does not leave the list: it would leave the node's capacity."""
    there = chip(1, 4, asic_id=ASIC)._replace(identity=Identity("n300", asic_id=ASIC))
    settings = Settings(device_id_strategy=strategy)
    before = reasons([there], settings)["n300"]
    after = reasons([there._replace(present=False, health=GONE)], settings)["n300"]
    assert before.keys() == after.keys() and [*after.values()] == [GONE.reason]


some_chips = st.lists(
    st.builds(
        chip,
        st.integers(1, 8),
        st.integers(0, 3),
        present=st.booleans(),
        asic_id=st.sampled_from([None, ASIC, OTHER_ASIC]),
    ),
    max_size=6,
    unique_by=lambda one: one.bdf,
)


@hypothesis_settings(deadline=None)
@given(some_chips, st.sampled_from(STRATEGIES), st.randoms())
def test_every_present_chip_has_exactly_one_id(
    chips: list[Chip], strategy: Any, order: random.Random
) -> None:
    """However ordinals and ASIC IDs are mixed up: short and unique, in whatever order they come."""
    found = identifiers(chips, strategy)
    assert len(set(found.values())) == len(found)
    present = {one.bdf for one in chips if one.present}
    assert present <= set(found.values()) <= {one.bdf for one in chips}
    assert all(0 < len(identifier) <= 63 for identifier in found)
    order.shuffle(chips)
    assert identifiers(chips, strategy) == found


def test_the_list_tells_health_and_numa_node_where_it_is_known() -> None:
    """Node 0 is a node; a device of unknown locality has no topology at all."""
    chips = [chip(1), chip(2, 1, health=HOT), chip(3, 2, numa_node=0)]
    found = ttdp.device_list(listed(chips)["n150"]).devices
    health = {bdf(1): "Healthy", bdf(2): "Unhealthy", bdf(3): "Healthy"}
    assert {device.ID: device.health for device in found} == health
    assert [device.HasField("topology") for device in found] == [False, False, True]
    assert [node.ID for node in found[2].topology.nodes] == [0]


# -- boards as devices -----------------------------------------------------------------------------

BOARD = Settings(unit="board")
PAIR = "0000046131842007"


def p300(bus: int, serial: str | None = PAIR, **more: Any) -> Chip:
    return chip(bus, bus, "blackhole", "p300c", serial=serial, **more)


def tray(high: int, chips: range = range(1, 9), arch: str = "wormhole") -> list[Chip]:
    return [chip(high << 4 | low, low, arch, f"galaxy-{arch}") for low in chips]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_board_is_one_device_under_one_id(strategy: Any) -> None:
    """A p300 by its serial, a Galaxy's tray by its buses; what has one node is as ever."""
    alone = {"bdf": bdf(0x41), "asic": f"wormhole-{ASIC}", "index": "5"}[strategy]
    chips = [p300(1), chip(0x41, 5, asic_id=ASIC), p300(2), *tray(0xC)]
    assert reasons(chips, Settings(unit="board", device_id_strategy=strategy)) == {
        "galaxy-wormhole-board": {"0000:c0": None},
        "n150": {alone: None},
        "p300-board": {PAIR: None},
    }


def test_a_name_tells_boards_of_several_nodes_from_chips() -> None:
    """One request never means two things in one cluster."""
    chips = [p300(1), p300(2), chip(0x41)]
    named = {
        "board": "n150 p300-board",
        "card": "n150 p300c-board",
        "arch": "blackhole-board wormhole",
    }
    for naming, names in named.items():
        settings = Settings(unit="board", resource_naming=naming)  # type: ignore[arg-type]
        assert list(listed(chips, settings)) == names.split()


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([p300(1)], "1 of 2 chips"),
        ([p300(1, None), p300(2)], "1 of 2 chips"),
        ([p300(1), p300(2, health=HOT)], f"{bdf(2)}: too hot"),
        ([p300(1), p300(2, present=False, health=GONE)], f"{bdf(2)}: PCI device is gone"),
        ([p300(1, present=False), p300(2, present=False), p300(5), p300(6)], None),
        ([p300(1), p300(2), p300(5), p300(6)], "4 of 2 chips"),
    ],
    ids=["never seen", "not known yet", "hot", "gone", "moved", "false"],
)
def test_a_board_is_as_healthy_as_its_chips(chips: list[Chip], reason: str | None) -> None:
    """One that was never seen makes it no smaller; those at its old addresses no longer count."""
    assert reasons(chips, BOARD) == {"p300-board": {PAIR: reason}}


def test_a_chip_whose_board_is_not_known_yet_waits() -> None:
    """It belongs to no board; a Galaxy's tray needs no serial, and has eight chips."""
    assert reasons([p300(1, None)], BOARD) == {}
    assert reasons(tray(0x0, arch="blackhole"), BOARD) == {
        "galaxy-blackhole-board": {"0000:00": None}
    }
    assert reasons(tray(0x8, range(3, 9)), BOARD) == {
        "galaxy-wormhole-board": {"0000:80": "6 of 8 chips"}
    }


def test_a_boards_topology_names_every_numa_node_that_it_touches() -> None:
    """Each once, in order; of an unknown one nothing."""
    nodes = [1, 0, None, 1, 0, 0, 1, 1]
    chips = [
        each._replace(function=each.function._replace(numa_node=node))
        for each, node in zip(tray(0x4), nodes, strict=True)
    ]
    (found,) = ttdp.device_list(listed(chips, BOARD)["galaxy-wormhole-board"]).devices
    assert [node.ID for node in found.topology.nodes] == [0, 1]


# -- shared devices --------------------------------------------------------------------------------


def shared(*entries: Shared, more: Any = None, **others: Any) -> Settings:
    """Settings by which these are shared; more: of the section [sharing]."""
    return Settings(sharing=Sharing(resources=entries, **(more or {})), **others)


FOUR = [chip(bus, bus - 1) for bus in (1, 2, 3, 4)]
BDFS = [one.bdf for one in FOUR]
TWICE = shared(Shared("n150", 2))


def test_a_shared_device_is_listed_once_for_each_replica() -> None:
    """As <id>::<n>, with the health and the topology of the device; it is one device."""
    found = listed([chip(1), chip(2, health=HOT)], TWICE)["n150"]
    assert {key: device.reason for key, device in found.devices.items()} == {
        f"{bdf(1)}::0": None, f"{bdf(1)}::1": None,
        f"{bdf(2)}::0": "too hot", f"{bdf(2)}::1": "too hot",
    }  # fmt: skip
    assert [device.identifier for device in found.distinct] == [bdf(1), bdf(2)]


def test_what_is_not_selected_stays_exclusive() -> None:
    """By address, ID or ordinal, or so many in the order of addresses, of the entry's resource."""
    by_name = Shared("n150", 2, "half", (BDFS[2], "0"))
    first = Shared("n150", 3, "third", 1)
    halves = [f"{BDFS[n]}::{replica}" for n in (0, 2) for replica in (0, 1)]
    thirds = [f"{BDFS[1]}::{replica}" for replica in range(3)]
    assert ids(FOUR, shared(by_name)) == {"n150": [BDFS[1], BDFS[3]], "half": halves}
    found = ids(FOUR, shared(by_name, first))
    assert found == {"n150": [BDFS[3]], "half": halves, "third": thirds}


def test_a_selection_of_what_is_not_there_is_said_and_counts_when_it_comes() -> None:
    """Nobody is shared, and nobody is lost; the words tell what is missing, and what there is."""
    late = shared(Shared("n150", 2, "half", (BDFS[0], bdf(9), "7")))
    other = shared(Shared("p150", 2))
    there = [*FOUR, chip(9, 7)]
    assert ids(there, late)["half"] == [f"{b}::{n}" for b in (BDFS[0], bdf(9)) for n in (0, 1)]
    assert ids(FOUR, other) == {"n150": BDFS}
    assert list(ttdp.unselected(FOUR, late)) == [f"n150: no device is called '{bdf(9)}', '7'"]
    (line,) = ttdp.unselected(FOUR, other)
    assert line == "no device is a p150; those that there are: n150"
    assert [*ttdp.unselected(there, late), *ttdp.unselected(FOUR, TWICE)] == []


@pytest.mark.parametrize("devices", ["all", (PAIR,), (bdf(2),)])
def test_boards_can_be_shared_like_chips(devices: Any) -> None:
    """By the board's name and ID, or by a chip of it."""
    half = shared(Shared("p300-board", 2, "p300-half", devices), unit="board")
    assert ids([p300(1), p300(2)], half) == {"p300-half": [f"{PAIR}::0", f"{PAIR}::1"]}


def test_all_of_them_keep_their_name_unless_it_is_wished_otherwise() -> None:
    """By an entry's own name, or under `rename_by_default` with `.shared` behind it."""
    entry = Shared("n150", 2)
    assert list(ids(FOUR, TWICE)) == ["n150"]
    renamed = {"rename_by_default": True}
    assert list(ids(FOUR, shared(entry, more=renamed))) == ["n150.shared"]
    assert list(ids(FOUR, shared(Shared("n150", 2, "half"), more=renamed))) == ["half"]


def test_one_replica_for_a_container_unless_more_are_allowed() -> None:
    """Refused in words that say why; one each, or allowed, they are granted."""
    three = [f"{BDFS[0]}::0", f"{BDFS[0]}::1", f"{BDFS[1]}::0"]
    strict = listed(FOUR, TWICE)["n150"]
    with pytest.raises(ttdp.Refusal, match=r"3 of tenstorrent\.com/n150 for one cont") as refused:
        ttdp.check_request(strict, [three])
    assert refused.value.code.name == "INVALID_ARGUMENT"
    ttdp.check_request(strict, [[one] for one in three])
    more = {"fail_requests_greater_than_one": False}
    lenient = listed(FOUR, shared(Shared("n150", 2), more=more))["n150"]
    ttdp.check_request(lenient, [three])


# -- what pods have --------------------------------------------------------------------------------

INDEX = Settings(device_id_strategy="index")
ARCH = Settings(resource_naming="arch")


def has(resource: str, *ids: str, chips: tuple[int, ...], pod: str = "u1") -> Allocation:
    """What a pod was given: IDs, and the buses of the chips behind them."""
    addresses = frozenset(map(bdf, chips))
    return Allocation(f"tenstorrent.com/{resource}", frozenset(ids), addresses, pod, "main")


def filed(*allocations: Allocation, **more: Any) -> Claims:
    """Claims of which the kubelet knows."""
    names = {"u1": "default/train", "u2": "default/serve"}
    return Claims(allocations, allocations, (), lambda each: names[each.pod], **more)


FORMER = has("n150", bdf(1), chips=(1,))
SAID = f"held by default/train as tenstorrent.com/n150 {bdf(1)}, until that ends"


@pytest.mark.parametrize(
    ("settings", "others"),
    [
        (INDEX, {"n150": ["0"]}),
        (TWICE, {"n150": [f"{bdf(1)}::0", f"{bdf(1)}::1"]}),
        (ARCH, {"wormhole": [bdf(1)]}),
        (shared(Shared("n150", 2, "half")), {"half": [f"{bdf(1)}::0", f"{bdf(1)}::1"]}),
    ],
    ids=["other IDs", "shared", "renamed", "shared and renamed"],
)
def test_the_id_that_a_pod_has_stays_listed_whatever_the_configuration_says(
    settings: Settings, others: dict[str, list[str]]
) -> None:
    """It stands for its chip; that chip's other IDs are withheld with the pod as the reason."""
    found = reasons(FOUR, settings, filed(FORMER))
    withheld = {n: [i for i, why in each.items() if why == SAID] for n, each in found.items()}
    assert found["n150"][bdf(1)] is None
    assert {name: held for name, held in withheld.items() if held} == others
    ended = listed(FOUR, settings)
    assert bdf(1) not in ended.get("n150", Resource("", {})).devices
    assert not any(why for each in reasons(FOUR, settings).values() for why in each.values())


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([chip(1), chip(2, 1)], None),
        ([chip(1, health=HOT), chip(2, 1)], "too hot"),
        ([chip(1, health=GONE, present=False), chip(2, 0)], "PCI device is gone"),
        ([chip(2, 0)], f"{bdf(1)}: PCI device is gone; it counts again when it comes back"),
    ],
    ids=["well", "ill", "gone", "not on this node"],
)
@pytest.mark.parametrize("settings", [Settings(), INDEX, TWICE])
def test_it_is_as_healthy_as_its_chips(
    chips: list[Chip], reason: str | None, settings: Settings
) -> None:
    """Also after a reboot in which the chip has gone missing; Unhealthy it does no harm."""
    assert reasons(chips, settings, filed(FORMER))["n150"][bdf(1)] == reason


def test_an_id_that_has_changed_its_meaning_stands_for_the_chip_of_its_pod() -> None:
    """Numbers that were swapped: "0" is the pod's still, and its chip is nobody else's."""
    swapped = [chip(1, 1), chip(2, 0)]
    found = listed(swapped, INDEX, filed(has("n150", "0", chips=(1,))))["n150"]
    assert found.devices["0"].addresses == {bdf(1)} and found.devices["0"].reason is None
    assert found.devices["1"].addresses == {bdf(1)} and "default/train" in str(
        found.devices["1"].reason
    )


@pytest.mark.parametrize(
    ("held", "free"),
    [
        (has("n150", f"{bdf(1)}::0", chips=(1,)), True),
        (has("n150", bdf(1), chips=(1,)), False),
        (has("n150", f"{bdf(1)}::2", chips=(1,)), False),
        (has("other", f"{bdf(1)}::0", chips=(1,)), False),
    ],
    ids=["a fellow", "alone", "a replica that is no more", "another resource's"],
)
def test_a_shared_device_is_for_those_who_share_it_only(held: Allocation, free: bool) -> None:
    """Pods on its replicas are no objection to each other; others are."""
    found = reasons(FOUR[:1], TWICE, filed(held))["n150"]
    assert (found[f"{bdf(1)}::1"] is None) is free


def test_a_board_is_withheld_if_a_pod_has_one_of_its_chips_and_the_other_way_round() -> None:
    """What a pod was given as a board is both its chips, whatever the unit is now."""
    chips = [p300(1), p300(2)]
    one = has("p300", bdf(2), chips=(2,))
    assert "default/train" in str(reasons(chips, BOARD, filed(one))["p300-board"][PAIR])
    both = has("p300-board", PAIR, chips=(1, 2))
    found = listed(chips, Settings(), filed(both))
    assert found["p300-board"].devices[PAIR].addresses == {bdf(1), bdf(2)}
    assert all("default/train" in str(each.reason) for each in found["p300"].devices.values())
    half = reasons([p300(1)], Settings(), filed(both))["p300-board"][PAIR]
    assert half == f"{bdf(2)}: PCI device is gone; it counts again when it comes back"


@pytest.mark.parametrize(
    ("allocation", "wanted"),
    [
        (has("n150", "0", "1", chips=(1, 2)), {"0": {1}, "1": {2}}),
        (has("n150", "0", "9", chips=(1, 4)), {"0": {1}, "9": {4}}),
        (has("n150", "8", "9", chips=(1, 4)), {"8": {1, 4}, "9": {1, 4}}),
        (has("n150", bdf(1), "9", chips=(1, 4)), {bdf(1): {1}, "9": {4}}),
        (has("n150", f"{bdf(4)}::3", "9", chips=(1, 4)), {f"{bdf(4)}::3": {4}, "9": {1}}),
        (has("n150", "0", "1", chips=(3, 4)), {"0": {3, 4}, "1": {3, 4}}),
    ],
)
def test_an_answers_chips_belong_to_its_ids(
    allocation: Allocation, wanted: dict[str, set[int]]
) -> None:
    """By what the configuration gives them for, by their name, else all that are left."""
    found = ttdp.chips_by_id(allocation, listed(FOUR, INDEX)["n150"])
    assert found == {key: frozenset(map(bdf, buses)) for key, buses in wanted.items()}


def test_an_id_of_which_the_kubelet_no_longer_knows_is_not_offered_for_other_chips() -> None:
    """A pod that was deleted by force: its ID would go to the next pod at once."""
    lingering = Claims([has("n150", "0", chips=(1,))], describe=lambda each: "default/train")
    swapped = [chip(1, 1), chip(2, 0)]
    assert "default/train" in str(reasons(swapped, INDEX, lingering)["n150"]["0"])
    as_ever = Claims([FORMER])
    assert reasons(FOUR, Settings(), as_ever)["n150"] == dict.fromkeys(BDFS), "the gate holds it"


@pytest.mark.parametrize(
    ("offered", "is_withheld"),
    [
        (ttdp.Offered("tenstorrent.com/n150", bdf(2), frozenset([bdf(2)])), False),
        (ttdp.Offered("tenstorrent.com/n150", bdf(2), frozenset([bdf(3)])), True),
        (ttdp.Offered("tenstorrent.com/wormhole", bdf(2), frozenset([bdf(2)])), True),
    ],
    ids=["the same", "other chips", "another resource"],
)
def test_a_checkpoint_that_nobody_understands_withholds_what_was_not_offered(
    offered: ttdp.Offered, is_withheld: bool
) -> None:
    """What was offered stays as it is, and so does what a pod is known to have."""
    claims = filed(FORMER, unreadable="garbage", offered=[offered])
    found = reasons(FOUR, Settings(), claims)["n150"]
    other = "garbage" if is_withheld else None
    assert found == {bdf(1): None, bdf(2): other, bdf(3): "garbage", bdf(4): "garbage"}


@pytest.mark.parametrize(
    ("settings", "claims", "code"),
    [
        (Settings(), filed(FORMER), None),
        (INDEX, filed(FORMER), "FAILED_PRECONDITION"),
        (Settings(), filed(has("wormhole", bdf(1), chips=(1,))), "FAILED_PRECONDITION"),
    ],
    ids=["given for that chip", "no longer given", "withheld"],
)
def test_what_a_pod_has_is_granted_again_while_the_configuration_gives_it(
    settings: Settings, claims: Claims, code: str | None
) -> None:
    """The kubelet asks again for the ID of an init container that its pod reuses."""
    resource = listed(FOUR, settings, claims)["n150"]
    try:
        ttdp.check_request(resource, [[bdf(1)]])
    except ttdp.Refusal as refusal:
        assert refusal.code.name == code and bdf(1) in str(refusal)
    else:
        assert code is None


def test_what_is_left_beside_a_pods_replica_is_preferred_as_ever() -> None:
    """Shared by ordinals and renumbered: a pod's "0::0" is no replica of the chip of "0::1"."""
    settings = shared(Shared("n150", 3), device_id_strategy="index")
    swapped = [chip(1, 1), chip(2, 0)]
    found = listed(swapped, settings, filed(has("n150", "0::0", chips=(1,))))["n150"]
    free = ["0::1", "0::2"]
    assert [found.devices[key].reason for key in free] == [None, None]
    assert ttdp.preferred_allocation(found, free, [], 2) == free


# -- whatever happens to a node while pods have its devices ----------------------------------------

entries = st.sampled_from(
    [
        (),
        (Shared("n150", 2),),
        (Shared("n150", 3, "third", 2),),
        (Shared("n150", 2, "half", (bdf(2), "0")),),
    ]
)
configurations = st.builds(
    Settings,
    device_id_strategy=st.sampled_from(STRATEGIES),
    resource_naming=st.sampled_from(["board", "arch"]),
    sharing=st.builds(Sharing, resources=entries),
)


@st.composite
def nodes(draw: st.DrawFn) -> list[Chip]:
    """Up to four chips with any numbers, of which some are away or ill."""
    numbers = draw(st.permutations(range(4)))
    asics = ["A" * 16, "B" * 16, "C" * 16, None]
    states = st.sampled_from([(True, HEALTHY), (True, HOT), (False, GONE), None])
    found = []
    for bus, (number, asic_id) in enumerate(zip(numbers, asics, strict=True), 1):
        state = draw(states)
        if state:
            found.append(chip(bus, number, present=state[0], health=state[1], asic_id=asic_id))
    return found


@st.composite
def pods(draw: st.DrawFn, resources: dict[str, Resource]) -> list[Allocation]:
    """What a kubelet has given to pods, one chip to one of them unless it is shared."""
    found: list[Allocation] = []
    owners: dict[str, tuple[str, str]] = {}
    for name, resource in resources.items():
        for number, (identifier, device) in enumerate(resource.devices.items()):
            owner = (name, device.identifier)
            is_free = {owners.get(each, owner) for each in device.addresses} == {owner}
            if not device.reason and is_free and draw(st.booleans()):
                owners |= dict.fromkeys(device.addresses, owner)
                new = Allocation(name, frozenset([identifier]), device.addresses, f"{number}", "c")
                if found and found[-1].resource == name and draw(st.booleans()):
                    last = found.pop()
                    both = (last.ids | new.ids, last.chips | new.chips)
                    new = new._replace(ids=both[0], chips=both[1])
                found.append(new)
    return found


@hypothesis_settings(deadline=None, max_examples=80)
@given(nodes(), configurations, nodes(), configurations, st.data())
def test_no_chip_of_a_pod_is_offered_and_no_id_of_a_pod_is_missing(
    before: list[Chip], former: Settings, after: list[Chip], now: Settings, data: st.DataObject
) -> None:
    """Chips come, go and are renumbered, names, IDs and shares change, and the pods run on."""
    allocations = data.draw(pods(ttdp.configured_resources(before, former)))
    known = [each for each in allocations if data.draw(st.booleans())]
    given_now = ttdp.configured_resources(after, now)
    found = ttdp.resources(given_now, after, Claims(allocations, known))
    held = {(each.resource, key): each for each in allocations for key in each.ids}
    for allocation in allocations:
        devices = [found[allocation.resource].devices[key] for key in allocation.ids]
        chips = frozenset[str]().union(*(device.addresses for device in devices))
        assert chips == allocation.chips
    offered: list[tuple[str, ttdp.Device]] = []
    for name, resource in found.items():
        ttdp.device_list(resource)
        for key, device in resource.devices.items():
            if (name, key) not in held and not device.reason:
                offered.append((name, device))
    assert all(found[name].devices.keys() >= given_now[name].devices.keys() for name in given_now)
    for name, device in offered:
        replicas = ttdp.replica_ids(device.identifier, found[name].replicas)
        for allocation in allocations:
            fellow = allocation.resource == name and allocation.ids & {*replicas}
            assert fellow or not allocation.chips & device.addresses
    for (name, one), (other_name, other) in itertools.combinations(offered, 2):
        same = (name, one.identifier) == (other_name, other.identifier)
        assert same or not one.addresses & other.addresses
