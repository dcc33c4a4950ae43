"""Resources: what devices are called, which chips an ID stands for, and who else may have them."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import SUBSYSTEMS, bdf, chip, count_calls, decide, hold
from ttdp import Chip, Device, Hold, Kind, Resource, Settings, SharedResource, Sharing


def ill(bus: int) -> str:
    return f"it is ill; run: tt-device-plugin fix {bdf(bus)}"


def gone(bus: int) -> str:
    return f"PCI device is gone; run: tt-device-plugin fix {bdf(bus)}"


def listed(*arguments: Any) -> dict[str, Resource]:
    """The resources of these chips, by name without the domain; arguments: of decide()."""
    found = decide(*arguments).resources
    return {name.removeprefix("tenstorrent.com/"): resource for name, resource in found.items()}


def reasons(*arguments: Any) -> dict[str, dict[str, str | None]]:
    """Why each ID is unhealthy, by resource."""
    found = listed(*arguments).items()
    return {name: {key: d.reason for key, d in each.devices.items()} for name, each in found}


def ids(*arguments: Any) -> dict[str, list[str]]:
    return {name: [*each.devices] for name, each in listed(*arguments).items()}


def log_lines(before: ttdp.Decision | None, after: ttdp.Decision) -> list[str]:
    return [line for _, line in ttdp.changes(before, after)]


@pytest.mark.parametrize("card", SUBSYSTEMS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Board (no trailing letter), exact type or architecture; the firmware overrules PCI."""
    board = re.sub("^(p[13][05]0)[abc]$", r"\1", card)
    arch = chip(1, card).function.arch
    other = chip(1, "p150b" if arch == "blackhole" else "n150", card=card)

    for naming, name in {"board": board, "card": card, "arch": arch}.items():
        settings = Settings(resource_naming=naming)
        assert [*listed([chip(1, card)], settings)] == [*listed([other], settings)] == [name]
        assert [*listed([chip(1, None)], settings)] == ["wormhole"], "a card that nobody knows"


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text; chips that swap their device files leave the list unchanged."""
    cards = {0x101: "p150a", 0x02: "p150b", 0x1000001: "p150a", 0x10: "p150c", 0x0A: "p150b"}
    chips = [chip(bus, card, ordinal=n) for n, (bus, card) in enumerate(cards.items())]
    assert ids(chips) == {"p150": [bdf(bus) for bus in (0x02, 0x0A, 0x10, 0x101, 0x1000001)]}

    swapped = [chip(bus, card, ordinal=9 - n) for n, (bus, card) in enumerate(cards.items())]
    (before,), (after,) = (decide(each).resources.values() for each in (chips, swapped))
    assert before.device_list == after.device_list


def test_the_list_has_health_and_numa_nodes() -> None:
    """A device without a known node has no topology; a board has each node of its chips once."""
    nodes = [1, 0, None, 1, 0, 0, 1, 1]
    galaxy = [chip(0x41 + n, "galaxy-wormhole", numa_node=node) for n, node in enumerate(nodes)]
    chips = [chip(1), chip(2, fault=Kind.STALLED), chip(3, numa_node=0), *galaxy]

    resources = decide(chips, BOARD).resources.values()
    found = [each for resource in resources for each in resource.device_list.devices]

    assert [(d.ID, d.health, [node.ID for node in d.topology.nodes]) for d in found] == [
        ("0000:40", "Healthy", [0, 1]),
        (bdf(1), "Healthy", []),
        (bdf(2), "Unhealthy", []),
        (bdf(3), "Healthy", [0]),
    ]
    assert [d.HasField("topology") for d in found] == [True, False, False, True]


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

    by_arch = listed([p300(1), p300(2), chip(3)], Settings(unit="board", resource_naming="arch"))
    assert [*by_arch] == ["blackhole-board", "wormhole"], "one request means one thing"


def test_a_board_that_is_not_whole_is_a_line_of_the_log() -> None:
    """Another line reports that it is complete; nothing is logged in between."""
    part, whole = decide([p300(1)], BOARD), decide([p300(1), p300(2)], BOARD)
    name = f"tenstorrent.com/p300-board {PAIR}"

    assert f"{name} is unhealthy: only 1 of 2 chips found" in log_lines(None, part)
    assert f"{name} is complete" in log_lines(part, whole)
    assert not any(name in line for line in log_lines(part, part))


@pytest.mark.parametrize("settings", [Settings(unit="board", exclude=(bdf(1),)), Settings()])
def test_a_board_that_is_no_longer_a_device_is_not_complete(settings: Settings) -> None:
    """It was excluded, or its chips are devices now."""
    lines = log_lines(decide([p300(1)], BOARD), decide([p300(1)], settings))
    assert not any("p300-board" in line for line in lines)


def test_a_board_that_is_withheld_once_it_is_complete_is_one_line_of_the_log() -> None:
    """A pod holds one of its chips under another name: the reason is another kind."""
    held = [hold("p300", bdf(1), buses=[1])]
    part, whole = decide([p300(1)], BOARD, held), decide([p300(1), p300(2)], BOARD, held)

    (line,) = (line for line in log_lines(part, whole) if "p300-board" in line)
    assert line.startswith(f"tenstorrent.com/p300-board {PAIR} is withheld: held until default/")


def test_a_chip_whose_device_file_was_never_valid_is_a_line_of_the_log() -> None:
    """It is no device. Another reason for that is no other line, unlike its return to service."""
    invalid = []
    for why in ("does not exist", "is a link to nothing"):
        function = chip(1).function._replace(file_fault=f"/dev/tenstorrent/0 {why}")
        invalid.append(chip(1)._replace(function=function, is_listed=False))
    found, later = (decide([each]) for each in invalid)
    excluded = decide(invalid[:1], Settings(exclude=(bdf(1),)))

    assert not found.resources
    (line,) = log_lines(None, found)
    assert line.startswith(f"{bdf(1)} (n150) is not advertised: device file is invalid: /dev/")
    assert log_lines(found, later) == []
    assert line not in log_lines(None, excluded) and line in log_lines(excluded, found)


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([p300(1)], "only 1 of 2 chips found"),
        ([p300(1, None), p300(2)], "only 1 of 2 chips found"),
        ([p300(1), p300(2, fault=Kind.STALLED)], f"{bdf(2)}: {ill(2)}"),
        ([p300(1), p300(2, present=False)], f"{bdf(2)}: {gone(2)}"),
        ([p300(1, fault=Kind.STALLED)], f"{bdf(1)}: {ill(1)}"),
        ([p300(1, present=False), p300(2, present=False), p300(5), p300(6)], None),
        ([p300(1), p300(2), p300(5, present=False), p300(6, present=False)], None),
        (tray(0x8, range(3, 9)), "only 6 of 8 chips found"),
    ],
    ids=[
        "never seen",
        "not known yet",
        "stalled",
        "gone",
        "alone",
        "moved up",
        "moved down",
        "a tray",
    ],
)
def test_a_board_is_as_healthy_as_its_chips(chips: list[Chip], reason: str | None) -> None:
    """A chip that was never seen makes it no smaller; one without a serial waits for it."""
    (found,) = reasons(chips, BOARD).values()
    assert [*found.values()] == [reason]


def test_a_chip_whose_board_is_not_known_waits() -> None:
    """It is no device; `list` has the reason."""
    decision = decide([p300(1, None)], BOARD)
    assert not decision.resources
    assert decision.offer.unplaced == {bdf(1): "waiting for the board's serial number"}


def shared(*entries: SharedResource, more: Any = None, **others: Any) -> Settings:
    """Settings that share these; more: of the section [sharing]."""
    return Settings(sharing=Sharing(resources=entries, **(more or {})), **others)


FOUR = [chip(bus, ordinal=bus - 1) for bus in (1, 2, 3, 4)]
BDFS = [each.bdf for each in FOUR]
TWICE = shared(SharedResource("n150", 2))


def test_devices_that_are_not_selected_stay_exclusive() -> None:
    """Selected by address, board or number, or by a count; shared ones have the ID <id>::<n>."""
    by_name = SharedResource("n150", 2, "half", (BDFS[2], "0"))
    halves = [f"{BDFS[n]}::{replica}" for n in (0, 2) for replica in (0, 1)]
    thirds = [f"{BDFS[1]}::{replica}" for replica in range(3)]
    chips = [*FOUR, chip(9, "n300")]  # of another name, which the entries do not share
    left = {"n300": [bdf(9)], "half": halves}

    assert ids(chips, shared(by_name)) == left | {"n150": [BDFS[1], BDFS[3]]}
    found = ids(chips, shared(by_name, SharedResource("n150", 3, "third", 1)))
    assert found == left | {"n150": [BDFS[3]], "third": thirds}

    for devices in ((PAIR,), (bdf(2),)):
        board = shared(SharedResource("p300-board", 2, "half", devices), unit="board")
        assert ids([p300(1), p300(2)], board) == {"half": [f"{PAIR}::0", f"{PAIR}::1"]}


STALLED = [chip(bus, ordinal=bus - 1, fault=Kind.STALLED) for bus in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("chips", "settings", "text"),
    [
        (FOUR, None, "4 × tenstorrent.com/n150, 4 healthy"),
        ([STALLED[0], FOUR[1]], None, f"2 × tenstorrent.com/n150, 1 healthy ({BDFS[0]}: {ill(1)})"),
        (STALLED[:2], None, f"2 × tenstorrent.com/n150, 0 healthy ({BDFS[0]}: {ill(1)}, …)"),
        (FOUR[:1], TWICE, "1 × tenstorrent.com/n150, 2 replicas each, 1 healthy"),
    ],
)
def test_the_summary_counts_devices_and_has_the_first_reason(
    chips: list[Chip], settings: Settings | None, text: str
) -> None:
    """Replicas are not counted; an ellipsis stands for further reasons."""
    (found,) = listed(chips, settings).values()
    assert ttdp.summary(found) == text


def test_an_id_that_is_not_listed_has_no_chips() -> None:
    """A container can be started again when its resource is gone."""
    found = listed(FOUR[:2])["n150"]
    assert [each.bdf for each in found.chips(["gone", BDFS[1]])] == [BDFS[1]]


def test_a_selected_device_that_does_not_exist_is_a_message() -> None:
    """The message names what is missing; the device is shared once it exists."""
    half = SharedResource("n150", 2, "half", (bdf(9), "7", "0"))
    assert decide(FOUR, shared(half)).offer.without_effect == [
        f"sharing: n150 has no device '{bdf(9)}', '7'"
    ]

    later = decide([*FOUR, chip(9, ordinal=7)], shared(half))
    assert later.offer.without_effect == []
    assert f"{bdf(9)}::1" in later.resources["tenstorrent.com/half"].devices

    for no_device in (SharedResource("p150", 2), SharedResource("p150", 2, "half", ("0",))):
        none = decide(FOUR, shared(no_device))
        assert none.offer.without_effect == ["sharing: there is no resource p150; available: n150"]
        assert none.offer.without_effect[0] in log_lines(None, none)


@pytest.mark.parametrize(
    ("first", "second", "offered", "message"),
    [
        (("0",), (BDFS[0],), {"a": [0], "n150": [1, 2, 3]}, f"b lacks '{BDFS[0]}'"),
        (("0", "1"), (BDFS[0], "3"), {"a": [0, 1], "b": [3], "n150": [2]}, f"b lacks '{BDFS[0]}'"),
        (("0",), 1, {"a": [0], "b": [1], "n150": [2, 3]}, None),
        (1, ("0",), {"a": [1], "b": [0], "n150": [2, 3]}, None),
        (3, 3, {"a": [0, 1, 2], "b": [3]}, None),
        (4, 1, {"a": [0, 1, 2, 3]}, f"b lacks '{BDFS[0]}'"),
    ],
    ids=["number and address", "partly", "count last", "count first", "two counts", "none left"],
)
def test_a_device_that_two_tables_select_is_a_message(
    first: Any, second: Any, offered: dict[str, list[int]], message: str | None
) -> None:
    """The first one has it. A count selects none of those that another table names."""
    tables = (SharedResource("n150", 2, "a", first), SharedResource("n150", 2, "b", second))
    found = decide(FOUR, shared(*tables))

    of_chips = {
        name.removeprefix("tenstorrent.com/"): [each.chips[0].bdf for each in one.unique_devices]
        for name, one in found.resources.items()
    }
    assert of_chips == {name: [BDFS[n] for n in numbers] for name, numbers in offered.items()}
    wanted = [f"sharing: {message}, which another table selects"] if message else []
    assert found.offer.without_effect == wanted


def test_a_shared_resource_keeps_its_name_unless_it_is_renamed() -> None:
    """By an entry's `rename`, else by `rename_by_default`, which appends `.shared`."""
    renamed = {"rename_by_default": True}

    for entry, more, name in (
        (SharedResource("n150", 2), {}, "n150"),
        (SharedResource("n150", 2), renamed, "n150.shared"),
        (SharedResource("n150", 2, "half"), renamed, "half"),
    ):
        assert [*ids(FOUR, shared(entry, more=more))] == [name]


def test_a_container_gets_one_replica_unless_more_are_allowed() -> None:
    """A request for several is rejected with the reason, but not several of one each."""
    three = [f"{BDFS[0]}::0", f"{BDFS[0]}::1", f"{BDFS[1]}::0"]
    strict = listed(FOUR, TWICE)["n150"]
    ttdp.check_request(strict, [[one] for one in three])

    reason = "a container can request only 1 shared tenstorrent.com/n150, not 3"

    with pytest.raises(ttdp.RequestError, match=reason) as rejected:
        ttdp.check_request(strict, [three])
    assert rejected.value.args[0].name == "INVALID_ARGUMENT"

    settings = shared(SharedResource("n150", 2), more={"fail_requests_greater_than_one": False})
    lenient = listed(FOUR, settings)["n150"]
    ttdp.check_request(lenient, [three])

    assert [each.bdf for each in lenient.chips(three)] == BDFS[:2], "each device once"


ARCH = Settings(resource_naming="arch")
HELD = hold("n150", bdf(1), buses=[1])
HELD_BY = "held until default/train ends (as tenstorrent.com/%s)"
HELD_REASON = HELD_BY % f"n150 {bdf(1)}"
REPLICAS = [f"{bdf(1)}::0", f"{bdf(1)}::1"]


@pytest.mark.parametrize(
    ("settings", "withheld"),
    [
        (Settings(), {}),
        (TWICE, {"n150": REPLICAS}),
        (ARCH, {"wormhole": [bdf(1)]}),
    ],
    ids=["unchanged", "shared", "renamed"],
)
def test_an_id_that_a_pod_holds_stays_listed_and_the_chips_other_ids_are_withheld(
    settings: Settings, withheld: dict[str, list[str]]
) -> None:
    """A pod holds it until it ends, whatever the configuration; the reason names the pod."""
    found = reasons(FOUR, settings, [HELD])

    assert found["n150"][bdf(1)] is None

    unhealthy = {name: [key for key, why in each.items() if why] for name, each in found.items()}
    assert {name: keys for name, keys in unhealthy.items() if keys} == withheld
    texts = {why for each in found.values() for why in each.values() if why}
    assert texts == ({HELD_REASON} if withheld else set())

    ended = decide(FOUR, settings)
    assert ended.resources is ended.offer.resources


def test_a_device_that_is_withheld_is_a_line_of_the_log() -> None:
    """So is the end of that."""
    withheld, free = decide(FOUR, ARCH, [HELD]), decide(FOUR, ARCH)
    name = f"tenstorrent.com/wormhole {bdf(1)}"

    assert f"{name} is withheld: {HELD_REASON}" in log_lines(None, withheld)
    assert log_lines(withheld, free) == [f"{name} is no longer withheld"]


@pytest.mark.parametrize(
    ("chips", "reason"),
    [
        ([chip(1), chip(2)], None),
        ([chip(1, fault=Kind.STALLED), chip(2)], ill(1)),
        ([chip(1, present=False), chip(2)], gone(1)),
        ([chip(2)], gone(1)),
    ],
    ids=["healthy", "stalled", "gone", "not on this node"],
)
@pytest.mark.parametrize("settings", [Settings(), ARCH, TWICE])
def test_an_id_that_a_pod_holds_is_as_healthy_as_the_chips_of_the_pods_answer(
    chips: list[Chip], reason: str | None, settings: Settings
) -> None:
    """Also if the chip is missing after a reboot: kubelets can crash without the ID."""
    assert reasons(chips, settings, [HELD])["n150"][bdf(1)] == reason


def test_an_id_that_a_pod_holds_is_never_withheld() -> None:
    """Even if another pod holds the chip under another name: both run already."""
    other = hold("wormhole", bdf(1), buses=[1], pod="u2")
    found = reasons(FOUR, ARCH, [HELD, other])
    assert found == {"n150": {bdf(1): None}, "wormhole": dict.fromkeys(BDFS)}


def test_a_board_that_was_moved_and_is_then_absent_is_an_unhealthy_device() -> None:
    """Its chips are known at both places; a preference among devices can be asked for."""
    absent = [p300(bus, present=False) for bus in (1, 2, 5, 6)]
    other = [p300(bus, "0000046131842099") for bus in (9, 10)]
    resource = listed([*absent, *other], BOARD)["p300-board"]

    assert {key: each.reason for key, each in resource.devices.items()} == {
        PAIR: f"{bdf(5)}: {gone(5)}",
        "0000046131842099": None,
    }

    for available in (["0000046131842099"], [PAIR, "0000046131842099"]):
        found = ttdp.preferred_allocation(resource, available, [], len(available))
        assert {*found} == {*available}
    assert ttdp.preferred_allocation(resource, [PAIR], [PAIR], 1) == [PAIR]


@pytest.mark.parametrize(
    ("chips", "reason"), [([p300(1), p300(2, None)], None), ([p300(1)], f"{bdf(2)}: {gone(2)}")]
)
@pytest.mark.parametrize("settings", [Settings(), BOARD])
def test_a_board_that_a_pod_holds_has_all_its_chips_before_their_serials_are_known(
    chips: list[Chip], reason: str | None, settings: Settings
) -> None:
    """After a reboot a kubelet admits the pod again only if its device is healthy."""
    held = hold("p300-board", PAIR, buses=[1, 2])

    assert reasons(chips, settings, [held])["p300-board"][PAIR] == reason


def test_replicas_of_a_shared_device_do_not_withhold_each_other() -> None:
    """Not even one that is listed only for its pod; other names of the chip do."""
    for resource, identifier, is_withheld in (
        ("n150", f"{bdf(1)}::0", False),
        ("n150", f"{bdf(1)}::2", False),
        ("n150", bdf(1), True),
        ("other", f"{bdf(1)}::0", True),
    ):
        found = reasons(FOUR[:1], TWICE, [hold(resource, identifier, buses=[1])])["n150"]

        assert (found[f"{bdf(1)}::1"] is not None) is is_withheld


def test_another_plugins_ids_are_listed_only_under_our_names() -> None:
    """Whatever they are called: healthy while all chips of the answer are, or none is known."""
    for resource, buses, chips, listed_ids in (
        ("n150", [1], FOUR, {"0": None, BDFS[0]: HELD_BY % "n150 0"}),
        ("n150", [], FOUR, {"0": None, BDFS[0]: None}),
        ("n150", [1], [chip(1, fault=Kind.STALLED)], {"0": ill(1), BDFS[0]: ill(1)}),
        ("other", [1], FOUR, {BDFS[0]: HELD_BY % "other 0"}),
    ):
        theirs = hold(resource, "0", buses=buses)._replace(is_ours=False)
        found = reasons(chips[:1], Settings(), [theirs])
        assert found == {"n150": listed_ids}


def test_the_ids_of_a_hold_are_listed_in_one_order() -> None:
    """Whatever the order of the answer and of the checkpoint: a list is not sent again for it."""
    names = [f"{bdf(bus)}::{number}" for bus in (1, 2) for number in range(9)]

    for ids_of_pod in (names, names[::-1]):
        found = ids(FOUR, Settings(), [hold("old", *ids_of_pod, buses=[1, 2])])
        assert found["old"] == names


def test_an_id_that_a_pod_holds_is_allocated_again_while_the_configuration_gives_it() -> None:
    """The kubelet asks again for the ID of an init container that its pod reuses."""
    ttdp.check_request(listed(FOUR, Settings(), [HELD])["n150"], [[bdf(1)]])

    renamed = hold("wormhole", bdf(1), buses=[1])
    for settings, held, reason in (
        (TWICE, HELD, " is reserved for the pod that holds it"),
        (ARCH, HELD, " is reserved for the pod that holds it"),
        (Settings(), renamed, ": held until default/train ends"),
    ):
        resource = listed(FOUR, settings, [held])["n150"]

        with pytest.raises(ttdp.RequestError, match=f"device {bdf(1)}{reason}") as rejected:
            ttdp.check_request(resource, [[bdf(1)]])
        assert rejected.value.args[0].name == "FAILED_PRECONDITION"


SHARED = [
    (),
    (SharedResource("n150", 2), SharedResource("p300-board", 2, "pair")),
    (SharedResource("n150", 3, "third", 1),),
    (SharedResource("n150", 2, "half", (bdf(2), "0")),),
]
configurations = st.builds(
    Settings,
    unit=st.sampled_from(["chip", "board"]),
    resource_naming=st.sampled_from(["board", "arch"]),
    sharing=st.builds(Sharing, resources=st.sampled_from(SHARED)),
)
states = st.sampled_from([{}, {}, {"fault": Kind.STALLED}, {"present": False}, None])


@st.composite
def nodes(draw: st.DrawFn) -> list[Chip]:
    """Up to two n150 and a p300 in one of two slots, of which some are missing or unhealthy."""
    slot = draw(st.sampled_from([5, 7]))
    cards = {1: "n150", 2: "n150", slot: "p300c", slot + 1: "p300c"}
    found = [(bus, card, draw(states)) for bus, card in cards.items()]
    return [chip(bus, card, serial=PAIR, **more) for bus, card, more in found if more is not None]


@st.composite
def pods(draw: st.DrawFn, resources: dict[str, Resource]) -> list[Hold]:
    """What a kubelet has given to pods: a chip to one of them, unless it is shared."""
    found: list[Hold] = []
    owners: dict[str, tuple[str, str]] = {}
    for name, resource in resources.items():
        for identifier, device in resource.devices.items():
            owner = (name, device.id)
            is_free = {owners.get(each, owner) for each in device.addresses} == {owner}
            if not device.reason and is_free and draw(st.booleans()):
                owners |= dict.fromkeys(device.addresses, owner)
                given = Hold(name, frozenset([identifier]), chips=device.addresses)
                if found and found[-1].resource == name and draw(st.booleans()):
                    last = found.pop()
                    given = last._replace(ids=last.ids | given.ids, chips=last.chips | given.chips)
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
    holds = data.draw(pods({**decide(before, former).resources}))
    decision = decide(after, now, holds)
    found, configured = decision.resources, decision.offer.resources

    for each in holds:
        held = [found[each.resource].devices[key] for key in each.ids]
        are_healthy = all(decision.chips[bdf].reason is None for bdf in each.chips)
        for device in held:
            assert device.addresses <= each.chips
            assert device.reason is None or not are_healthy

    assert all(found[name].devices.keys() >= configured[name].devices.keys() for name in configured)

    free = advertised(found, {(each.resource, key) for each in holds for key in each.ids})
    for name, device in free:
        replicas = {*ttdp.replica_ids(device.id, found[name].replicas)}
        for each in holds:
            shares_device = each.shares_device(name, replicas)
            assert shares_device or not each.chips & device.addresses

    for (name, one), (other_name, other) in itertools.combinations(free, 2):
        is_same = (name, one.id) == (other_name, other.id)
        assert is_same or not one.addresses & other.addresses


def test_a_pod_on_a_node_full_of_replicas_costs_little() -> None:
    """32 chips with 100 replicas each, and 222 pods: 67,000 calls (10 ms)."""
    name = "galaxy-wormhole"
    chips = [chip(bus, name, ordinal=bus, numa_node=bus % 2) for bus in range(1, 33)]
    held = [(1 + number % 32, f"::{number % 100}", f"uid-{number}") for number in range(222)]
    given = [hold(name, bdf(bus) + n, buses=[bus], pod=pod) for bus, n, pod in held]
    arguments = (chips, shared(SharedResource(name, 100)), given)

    assert count_calls(lambda: decide(*arguments)) < 150_000


@pytest.mark.parametrize("settings", [TWICE, ARCH], ids=["shared", "renamed"])
def test_a_pod_that_changes_no_list_costs_no_new_one(settings: Settings) -> None:
    """Not even while another one's chip is withheld: a list of 3,200 replicas takes 10 ms."""
    former = decide(FOUR, settings, [HELD])
    (name,) = former.offer.resources
    another = hold(name, *[*former.offer.resources[name].devices][-1:], buses=[4], pod="u2")

    held = (*former.observation.holds, another)
    decision = ttdp.decide(former.observation._replace(holds=held), former)

    assert [*decision.holds] == [HELD, another]
    assert decision.resources is former.resources and decision.depends_on_holds
    ended = ttdp.decide(former.observation._replace(holds=(another,)), decision)
    assert ended.resources is ended.offer.resources and not ended.depends_on_holds


def test_a_pod_that_comes_costs_no_look_for_lines_of_the_log() -> None:
    """A call follows each Allocate; to look at 32 chips would take 0.3 ms."""
    former = decide([chip(bus, ordinal=bus) for bus in range(1, 33)])
    held = (hold("n150", bdf(1), buses=[1]),)
    decision = ttdp.decide(former.observation._replace(holds=held), former)

    assert count_calls(lambda: log_lines(former, decision)) < 20


def test_the_log_has_the_fault_of_an_excluded_chip_while_a_pod_holds_it() -> None:
    """Though the list is the same: another plugin has answered, under a name that is none here."""
    settings = Settings(exclude=(bdf(1),))
    free = decide([chip(1, fault=Kind.STALLED), chip(2)], settings)
    others = hold("former", bdf(1), buses=[1])._replace(is_ours=False)
    held = ttdp.decide(free.observation._replace(holds=(others,)), free)

    assert held.resources is free.resources
    assert log_lines(free, held)[-1].endswith(f"unhealthy: {ill(1)}")
    assert log_lines(held, free) == []


def test_a_shared_device_counts_as_withheld_if_one_of_its_ids_is() -> None:
    """A pod has the first replica, and another one has the chip under a former name."""
    pods = [
        hold("n150", f"{BDFS[0]}::0", buses=[1]),
        hold("former", BDFS[0], buses=[1], pod="u2"),
    ]

    found = decide(FOUR, shared(SharedResource("n150", 2)), pods).resources["tenstorrent.com/n150"]

    assert [each.holder for each in found.unique_devices] == ["default/serve", None, None, None]
