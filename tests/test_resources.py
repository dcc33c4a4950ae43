"""Resources: what devices are called, which of them share an ID, and what of them stays when a chip is away."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.node import CARDS
from ttdp import Chip, Fault, Health, Holder, Settings, SharedResource, Sharing, Telemetry

ASIC, OTHER_ASIC = "3B1D7A5620E41F08", "9F02C4B77A10E301"
STRATEGIES = ("bdf", "asic", "index")


def device(bdf: str, ordinal: int = 0, *, arch: Any = "wormhole", pci_card: str | None = "n150", **known: Any) -> Chip:
    """A device at an address; it is listed, and there, unless told."""
    path = f"/dev/tenstorrent/{ordinal}"
    return Chip(ttdp.PciFunction(bdf, arch, pci_card, None, ordinal, path, "/sys/devices/x"), listed=True, **known)


def identifiers(devices: list[Chip], strategy: Any) -> dict[str, str]:
    """Address by ID, over all resources."""
    listed = ttdp.resources(devices, Settings(device_id_strategy=strategy), {})
    return {key: one.chips[0].bdf for resource in listed.values() for key, one in resource.devices.items()}


# -- names -------------------------------------------------------------------------------------------------------------

NAMES = {  # card: board and architecture
    "n150": ("n150", "wormhole"), "n300": ("n300", "wormhole"), "galaxy-wormhole": ("galaxy-wormhole", "wormhole"),
    "p100": ("p100", "blackhole"), "p100a": ("p100", "blackhole"),
    "p150a": ("p150", "blackhole"), "p150b": ("p150", "blackhole"), "p150c": ("p150", "blackhole"),
    "p300a": ("p300", "blackhole"), "p300b": ("p300", "blackhole"), "p300c": ("p300", "blackhole"),
    "galaxy-blackhole": ("galaxy-blackhole", "blackhole"),
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Its board (without the trailing letter), its exact type, or its architecture, told by PCI or by the firmware."""
    board, arch = NAMES[card]
    by_pci = device("0000:01:00.0", arch=arch, pci_card=card)
    by_firmware = device("0000:01:00.0", arch=arch, pci_card=None, card=card)
    for naming, name in (("board", board), ("card", card), ("arch", arch)):
        settings = Settings(resource_domain="example.org", resource_naming=naming)  # type: ignore[arg-type]
        assert ttdp.resource_name(by_pci, settings) == ttdp.resource_name(by_firmware, settings) == name


def test_the_firmware_knows_better_than_pci() -> None:
    """A card type that arrives late and says something else moves the device to the right resource."""
    silent = device("0000:01:00.0", arch="blackhole", pci_card="p150a")
    spoken = ttdp.with_identity(silent, Telemetry(card="p300c"))
    assert list(ttdp.resources([silent], Settings(), {})) == ["tenstorrent.com/p150"]
    assert list(ttdp.resources([spoken], Settings(), {})) == ["tenstorrent.com/p300"]


@hypothesis_settings(deadline=None)
@given(st.text(max_size=80) | st.from_regex(r"[a-z0-9-]{1,80}", fullmatch=True) | st.from_regex(r"[a-z]+[0-9]+[a-z]"))
def test_whatever_a_firmware_calls_its_card_the_name_is_valid(card: str) -> None:
    """At most 63 characters of those that Kubernetes takes, with an alphanumeric one at both ends."""
    spoken = ttdp.with_identity(device("0000:01:00.0"), ttdp.parse_telemetry({"tt_card_type": card}))
    for naming in ("board", "card", "arch"):
        settings = Settings(resource_naming=naming)
        (name,) = ttdp.resources([spoken], settings, {})
        assert re.fullmatch(r"tenstorrent\.com/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)


def test_no_devices_are_no_resources() -> None:
    """A resource exists only with a device."""
    assert ttdp.resources([], Settings(), {}) == {}


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text: domain, bus, device, function."""
    order = ["0000:02:00.0", "0000:0a:00.0", "0000:0a:00.1", "0000:10:00.0", "0001:01:00.0", "10000:01:00.0"]
    mixed = [
        device(bdf, arch="blackhole", pci_card=card) for bdf, card in zip(order, ["p150a", "p150b"] * 3, strict=True)
    ]
    random.Random(0).shuffle(mixed)
    resources = ttdp.resources(mixed, Settings(), {})
    assert {name: list(resource.devices) for name, resource in resources.items()} == {"tenstorrent.com/p150": order}


def test_the_healthy_ones_are_counted() -> None:
    """For the status line: devices that are healthy, of all that are listed."""
    ill = device("0000:02:00.0")._replace(health=Health(fault=Fault.HOT, reason="too hot"))
    (resource,) = ttdp.resources([device("0000:01:00.0"), ill], Settings(), {}).values()
    assert (resource.healthy, len(resource.devices)) == (1, 2)


def test_chips_that_have_swapped_their_numbers_are_the_same_list() -> None:
    """By ordinals the kubelet has the same IDs as before, in the same order: that is no change."""

    def listed(*ordinals: int) -> Any:
        chips = [device(f"0000:0{bus}:00.0", ordinal) for bus, ordinal in enumerate(ordinals, 1)]
        (resource,) = ttdp.resources(chips, Settings(device_id_strategy="index"), {}).values()
        return ttdp.device_list(resource)

    assert listed(0, 1) == listed(1, 0)


# -- IDs ---------------------------------------------------------------------------------------------------------------


def test_an_id_is_the_address_the_asic_or_the_ordinal() -> None:
    """As the strategy says; the ASIC's with its architecture, as udev's by-id names have it."""
    wormhole = device("0000:01:00.0", 3, asic_id=ASIC)
    blackhole = device("0000:02:00.0", 0, arch="blackhole", pci_card="p150a", asic_id=OTHER_ASIC)
    wanted = {
        "bdf": ["0000:01:00.0", "0000:02:00.0"],
        "asic": [f"wormhole-{ASIC}", f"blackhole-{OTHER_ASIC}"],
        "index": ["3", "0"],
    }
    for strategy, names in wanted.items():
        assert identifiers([wormhole, blackhole], strategy) == dict(zip(names, wanted["bdf"], strict=True))


def test_an_asic_that_is_not_told_yet_is_its_address() -> None:
    """Silent firmware, or a driver before 2.1."""
    assert identifiers([device("0000:01:00.0")], "asic") == {"0000:01:00.0": "0000:01:00.0"}


def test_two_present_chips_with_one_asic_id_are_their_addresses() -> None:
    """Neither may hide the other; a third keeps the name that it has alone."""
    twins = [device("0000:01:00.0", 0, asic_id=ASIC), device("0000:02:00.0", 1, asic_id=ASIC)]
    third = device("0000:03:00.0", 2, asic_id=OTHER_ASIC)
    assert list(identifiers([*twins, third], "asic")) == ["0000:01:00.0", "0000:02:00.0", f"wormhole-{OTHER_ASIC}"]


def test_a_card_that_moved_is_listed_once_where_it_is() -> None:
    """Under `asic` the ID follows the card to its new slot; under `bdf` the old slot stays, unhealthy."""
    old = device("0000:01:00.0", 0, asic_id=ASIC)._replace(present=False)
    new = device("0000:02:00.0", 0, asic_id=ASIC)
    assert identifiers([old, new], "asic") == {f"wormhole-{ASIC}": "0000:02:00.0"}
    assert list(identifiers([old, new], "bdf")) == ["0000:01:00.0", "0000:02:00.0"]


def test_an_ordinal_that_was_reused_is_the_present_device() -> None:
    """A freed number is given to the next comer at once; the device that had it is left out until it is back."""
    old = device("0000:01:00.0", 0)._replace(present=False)
    new = device("0000:02:00.0", 0)
    assert identifiers([old, new], "index") == {"0": "0000:02:00.0"}
    assert identifiers(
        [old._replace(present=True), new._replace(function=new.function._replace(ordinal=1))], "index"
    ) == {
        "0": "0000:01:00.0",
        "1": "0000:02:00.0",
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_vanished_device_stays_under_its_id_and_its_resource(strategy: Any) -> None:
    """What was once listed does not leave the list: it would leave the node's capacity."""
    there = device("0000:01:00.0", 4, asic_id=ASIC, card="n300")
    away = there._replace(present=False)
    before, after = (ttdp.resources([one], Settings(device_id_strategy=strategy), {}) for one in (there, away))
    assert {name: list(r.devices) for name, r in before.items()} == {name: list(r.devices) for name, r in after.items()}


some_devices = st.lists(
    st.builds(
        lambda bus, ordinal, asic_id, present: device(f"0000:{bus:02x}:00.0", ordinal, asic_id=asic_id)._replace(
            present=present
        ),
        st.integers(1, 8), st.integers(0, 3), st.sampled_from([None, ASIC, OTHER_ASIC]), st.booleans(),
    ),
    max_size=6, unique_by=lambda one: one.bdf,
)  # fmt: skip


@hypothesis_settings(deadline=None)
@given(some_devices, st.sampled_from(STRATEGIES), st.randoms())
def test_every_present_device_has_exactly_one_id(devices: list[Chip], strategy: Any, order: random.Random) -> None:
    """However ordinals and ASIC IDs are mixed up: short and unique IDs, the same in whatever order devices come."""
    found = identifiers(devices, strategy)
    assert sorted(found.values()) == sorted(set(found.values()))
    assert {one.bdf for one in devices if one.present} <= set(found.values()) <= {one.bdf for one in devices}
    assert all(0 < len(identifier) <= 63 for identifier in found)
    order.shuffle(devices)
    assert identifiers(devices, strategy) == found


# -- the list that the kubelet gets ------------------------------------------------------------------------------------


def test_the_list_tells_health_and_numa_node_where_it_is_known() -> None:
    """Node 0 is a node; a device of unknown locality has no topology at all."""
    ill = device("0000:02:00.0", 1)._replace(health=Health(fault=Fault.STALLED, reason="stalled"))
    near = device("0000:03:00.0", 2)._replace(function=device("0000:03:00.0").function._replace(numa_node=0))
    (resource,) = ttdp.resources([device("0000:01:00.0"), ill, near], Settings(), {}).values()
    listed = ttdp.device_list(resource).devices
    assert [(d.ID, d.health) for d in listed] == [
        ("0000:01:00.0", "Healthy"), ("0000:02:00.0", "Unhealthy"), ("0000:03:00.0", "Healthy"),
    ]  # fmt: skip
    assert [d.HasField("topology") for d in listed] == [False, False, True]
    assert [node.ID for node in listed[2].topology.nodes] == [0]


# -- boards as devices -------------------------------------------------------------------------------------------------

BOARD = Settings(unit="board")
PAIR = "0000046131842007"


def p300(bus: int, serial: str | None = PAIR, **known: Any) -> Chip:
    return device(f"0000:{bus:02x}:00.0", bus, arch="blackhole", pci_card="p300c", serial=serial, **known)


def tray(high: int, chips: range = range(1, 9), arch: str = "wormhole") -> list[Chip]:
    buses = [f"0000:{high:x}{low:x}:00.0" for low in chips]
    return [device(bdf, n, arch=arch, pci_card=f"galaxy-{arch}") for n, bdf in enumerate(buses)]


def reasons(chips: list[Chip], settings: Settings = BOARD) -> dict[str, dict[str, str | None]]:
    """Why each device is not healthy, by resource and ID."""
    found = ttdp.resources(chips, settings, {})
    return {name.split("/")[1]: {i: d.reason for i, d in found[name].devices.items()} for name in found}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_board_is_one_device_under_one_id(strategy: Any) -> None:
    """A p300 by its serial, a Galaxy's tray by its buses, whatever the strategy; what has one node is as ever."""
    settings = Settings(unit="board", device_id_strategy=strategy)
    single = device("0000:41:00.0", 5, asic_id=ASIC)
    alone = {"bdf": "0000:41:00.0", "asic": f"wormhole-{ASIC}", "index": "5"}[strategy]
    assert reasons([p300(1), single, p300(2), *tray(0xC)], settings) == {
        "galaxy-wormhole-board": {"0000:c0": None},
        "n150": {alone: None},
        "p300-board": {PAIR: None},
    }


@pytest.mark.parametrize(
    ("naming", "names"),
    [("board", ["n150", "p300-board"]), ("card", ["n150", "p300c-board"]), ("arch", ["blackhole-board", "wormhole"])],
)
def test_a_name_tells_boards_of_several_nodes_from_chips(naming: Any, names: list[str]) -> None:
    """One request never means two things in one cluster."""
    chips = [p300(1), p300(2), device("0000:41:00.0")]
    assert list(reasons(chips, Settings(unit="board", resource_naming=naming))) == names


def test_a_board_is_not_smaller_for_a_chip_that_was_never_seen() -> None:
    """It is unhealthy until all of them are there, and says how many are."""
    assert reasons([p300(1)]) == {"p300-board": {PAIR: "1 of 2 chips"}}
    assert reasons(tray(0x8, range(3, 9))) == {"galaxy-wormhole-board": {"0000:80": "6 of 8 chips"}}


def test_a_board_is_as_healthy_as_its_chips() -> None:
    """The reason names the chip; a chip that is gone is one of them still."""
    hot = p300(2)._replace(health=Health(fault=Fault.HOT, reason="too hot"))
    gone = p300(2)._replace(present=False, health=ttdp.gone(Health(), "0000:02:00.0", function_exists=False))
    assert reasons([p300(1), hot]) == {"p300-board": {PAIR: "0000:02:00.0: too hot"}}
    assert str(reasons([p300(1), gone])["p300-board"][PAIR]).startswith("0000:02:00.0: PCI device is gone")


def test_a_chip_whose_board_is_not_known_yet_waits() -> None:
    """It belongs to no board; a Galaxy's tray needs no serial."""
    assert reasons([p300(1, None)]) == {}
    assert reasons([p300(1, None), p300(2)]) == {"p300-board": {PAIR: "1 of 2 chips"}}
    assert reasons(tray(0x0, arch="blackhole")) == {"galaxy-blackhole-board": {"0000:00": None}}


def test_a_board_that_moved_to_other_slots_is_where_it_is() -> None:
    """Its chips at the old addresses are away, and no longer count."""
    away = [p300(bus)._replace(present=False) for bus in (1, 2)]
    assert reasons([*away, p300(5), p300(6)]) == {"p300-board": {PAIR: None}}
    assert reasons([p300(bus) for bus in (1, 2, 5, 6)]) == {"p300-board": {PAIR: "4 of 2 chips"}}


def test_a_boards_topology_names_every_numa_node_that_it_touches() -> None:
    """Each once, in order; of an unknown one nothing."""
    chips = [
        chip._replace(function=chip.function._replace(numa_node=node))
        for chip, node in zip(tray(0x4), [1, 0, None, 1, 0, 0, 1, 1], strict=True)
    ]
    (resource,) = ttdp.resources(chips, BOARD, {}).values()
    (listed,) = ttdp.device_list(resource).devices
    assert [node.ID for node in listed.topology.nodes] == [0, 1]


# -- shared devices ----------------------------------------------------------------------------------------------------


def shared(*entries: SharedResource, **others: Any) -> Settings:
    names = {key: others.pop(key) for key in ("rename_by_default", "fail_requests_greater_than_one") if key in others}
    return Settings(sharing=Sharing(resources=entries, **names), **others)


FOUR = [device(f"0000:0{bus}:00.0", bus - 1) for bus in (1, 2, 3, 4)]
BDFS = [one.bdf for one in FOUR]


def test_a_shared_device_is_listed_once_for_each_replica() -> None:
    """As <id>::<n>, with the health and the topology of the device; counted as the one that it is."""
    ill = FOUR[1]._replace(health=Health(fault=Fault.HOT, reason="too hot"))
    (resource,) = ttdp.resources([FOUR[0], ill], shared(SharedResource("n150", 2)), {}).values()
    assert [(d.ID, d.health) for d in ttdp.device_list(resource).devices] == [
        ("0000:01:00.0::0", "Healthy"), ("0000:01:00.0::1", "Healthy"),
        ("0000:02:00.0::0", "Unhealthy"), ("0000:02:00.0::1", "Unhealthy"),
    ]  # fmt: skip
    assert (resource.name, resource.replicas, resource.healthy, len(resource.distinct)) == (
        "tenstorrent.com/n150",
        2,
        1,
        2,
    )


def ids(settings: Settings, chips: list[Chip] = FOUR) -> dict[str, list[str]]:
    found = ttdp.resources(chips, settings, {})
    return {name.split("/")[1]: [*found[name].devices] for name in found}


def test_what_is_not_selected_stays_exclusive() -> None:
    """Selected by address, ID or ordinal, or so many in the order of addresses, each in the entry's own resource."""
    by_name = SharedResource("n150", 2, "half", ("0000:03:00.0", "0"))
    first = SharedResource("n150", 3, "third", 1)
    assert ids(shared(by_name)) == {"n150": [BDFS[1], BDFS[3]],
                                    "half": [f"{BDFS[n]}::{r}" for n in (0, 2) for r in (0, 1)]}  # fmt: skip
    assert ids(shared(by_name, first)) == ids(shared(by_name)) | {
        "n150": [BDFS[3]], "third": [f"{BDFS[1]}::{n}" for n in range(3)],
    }  # fmt: skip


def test_a_selection_of_what_is_not_there_is_nothing() -> None:
    """Nobody is shared, and nobody is lost; it counts when it comes."""
    late = SharedResource("n150", 2, "half", ("0000:09:00.0",))
    assert ids(shared(late)) == {"n150": BDFS}
    assert ids(shared(late), [*FOUR, device("0000:09:00.0", 9)])["half"] == ["0000:09:00.0::0", "0000:09:00.0::1"]
    assert ids(shared(SharedResource("p150", 2))) == {"n150": BDFS}


def test_boards_can_be_shared_like_chips() -> None:
    """By the board's name and ID, or by a chip of it."""
    for devices in ("all", (PAIR,), ("0000:02:00.0",)):
        entry = SharedResource("p300-board", 2, "p300-half", devices)
        assert ids(shared(entry, unit="board"), [p300(1), p300(2)]) == {"p300-half": [f"{PAIR}::0", f"{PAIR}::1"]}


def test_all_of_them_keep_their_name_unless_it_is_wished_otherwise() -> None:
    """Under `rename_by_default` with `.shared` behind it."""
    assert list(ids(shared(SharedResource("n150", 2)))) == ["n150"]
    assert list(ids(shared(SharedResource("n150", 2), rename_by_default=True))) == ["n150.shared"]


def test_one_replica_for_a_container_unless_more_are_allowed() -> None:
    """Refused in words that say why; allowed, it gets the distinct devices behind them."""
    wanted = [[f"{BDFS[0]}::0", f"{BDFS[0]}::1", f"{BDFS[1]}::0"]]
    (strict,) = ttdp.resources(FOUR, shared(SharedResource("n150", 2)), {}).values()
    with pytest.raises(ttdp.Refusal, match=r"3 of tenstorrent\.com/n150 for one container") as refused:
        ttdp.check_allocation(strict, wanted)
    assert refused.value.code.name == "INVALID_ARGUMENT"
    ttdp.check_allocation(strict, [[one] for one in wanted[0]])
    settings = shared(SharedResource("n150", 2), fail_requests_greater_than_one=False)
    (lenient,) = ttdp.resources(FOUR, settings, {}).values()
    ttdp.check_allocation(lenient, wanted)
    chosen = [lenient.devices[i] for i in wanted[0]]
    edits = ttdp.container_edits(chosen, Settings(), (), None, lambda function: function.path)
    assert [node.host_path for node in edits.devices] == ["/dev/tenstorrent/0", "/dev/tenstorrent/1"]
    assert edits.envs["TT_VISIBLE_DEVICES"] == f"{BDFS[0]},{BDFS[1]}"


# -- chips that somebody holds under another name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "in_the_way"),
    [
        (Holder("tenstorrent.com/n150", "0000:01:00.0", "default/train"), False),
        (Holder("tenstorrent.com/wormhole", "0000:01:00.0", "default/train"), True),
        (Holder("tenstorrent.com/n150", "0", "default/train"), True),
        (Holder("tenstorrent.com/n150", "0000:01:00.0::0", "default/train"), True),
    ],
)
def test_a_chip_is_unhealthy_while_a_pod_holds_it_under_another_name(holder: Holder, in_the_way: bool) -> None:
    """With that pod as the reason; a pod that holds it under its present name and ID is as it should be."""
    (resource,) = ttdp.resources(FOUR, Settings(), {"0000:01:00.0": [holder]}).values()
    found = {identifier: one.reason for identifier, one in resource.devices.items() if one.reason}
    said = f"held by default/train as {holder.resource} {holder.identifier}, until that ends"
    assert found == ({"0000:01:00.0": said} if in_the_way else {})


def test_a_shared_device_is_for_those_who_share_it_only() -> None:
    """Pods on its replicas are no objection to each other; one that had it alone, or a replica that is no more, is."""
    settings, name = shared(SharedResource("n150", 2)), "tenstorrent.com/n150"
    for identifiers, free in (("::0", "::1"), True), (("::0", ""), False), (("::2",), False):
        holders = {BDFS[0]: [Holder(name, BDFS[0] + suffix, "a/b") for suffix in identifiers]}
        (resource,) = ttdp.resources(FOUR[:1], settings, holders).values()
        assert [one.reason is None for one in resource.devices.values()] == [free, free]


def test_a_board_is_held_if_one_of_its_chips_is() -> None:
    """Under the name that the chip had."""
    holders = {"0000:02:00.0": [Holder("tenstorrent.com/p300", "0000:02:00.0", "a/b")]}
    (resource,) = ttdp.resources([p300(1), p300(2)], BOARD, holders).values()
    assert "held by a/b as tenstorrent.com/p300 0000:02:00.0" in str(resource.devices[PAIR].reason)
