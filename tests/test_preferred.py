"""Preferred allocation: its rules, and how far from the best set it can end, by brute force."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, decide
from tests.reporting import Golden
from ttdp import Chip, Kind, RequestError, Resource, Settings, SharedResource, Sharing

Board = list[Chip]
Place = tuple[int, int | None]  # a board, by its bus, and its NUMA node

RING = [0x00, 0x40, 0x80, 0xC0]  # a Galaxy's trays, by their buses
POSITIONS = range(1, 9)
LINKS = {(1, 2), (2, 3), (3, 4), (5, 6), (6, 7), (7, 8), (1, 5), (2, 6), (3, 7), (4, 8)}


def p150(bus: int, node: int | None = None, fault: Kind | None = None) -> Board:
    return [chip(bus, "p150b", numa_node=node, fault=fault)]


def p300(bus: int, node: int | None = None) -> Board:
    """A board with two chips, on this bus and the next one."""
    return [chip(bus + n, "p300c", serial=f"{bus}", numa_node=node) for n in (0, 1)]


def tray(bus: int, node: int | None = None) -> Board:
    """A tray of a Galaxy, with the chip at position n on the n-th bus after this one."""
    return [chip(bus + n, "galaxy-blackhole", numa_node=node) for n in POSITIONS]


def resource(boards: Iterable[Board], replicas: int = 0, at_most_one: bool = False) -> Resource:
    """All chips of these boards as one resource, whatever their cards are."""
    shared = (SharedResource("blackhole", replicas),) if replicas else ()
    sharing = Sharing(fail_requests_greater_than_one=at_most_one, resources=shared)
    chips = sorted((each for board in boards for each in board), key=lambda each: each.address)
    settings = Settings(resource_naming="arch", sharing=sharing)
    (found,) = decide(chips, settings).resources.values()
    return found


# -- the rules, each against the one that follows --------------------------------------------------


def at(*positions: str) -> list[int]:
    """The buses of these positions on the trays in RING."""
    return [bus + int(n) for bus, digits in zip(RING, positions, strict=False) for n in digits]


ALL = "12345678"
TRAYS = [tray(bus) for bus in RING]
P150S = [p150(1, 0), p150(2, 0), p150(3, 0), p150(4, 1), p150(5, 1)]
P300S = [p300(1, 0), p300(3, 0), p300(5, 1), p300(7, 1), p300(9, 2)]
MIXED = [p300(1, 0), p150(3, 0), p150(4, 0), p300(5, 1), p300(7, 1), p150(9, 1)]
THREE_NODES = [p150(bus, node) for bus, node in enumerate([0, 1, 1, 1, 1, 2, 2])]
HALF = [p150(1, 1), p300(3, 0), p150(5, 0)]
P300_FIRST = [p300(0x21), tray(0x40)]
TRAY_FIRST = [tray(0x00), p150(0x21)]

# Boards, the buses that are free, and those that are preferred.
RULES: dict[str, tuple[list[Board], Iterable[int], list[int]]] = {
    "one NUMA node, fewer boards": (MIXED, range(1, 7), [1, 2, 3, 4]),
    "fewer boards on a NUMA node, the smallest node": (MIXED, range(1, 10), [5, 6, 7, 8]),
    "the smallest NUMA node, larger boards": (MIXED, [1, 2, 3, 5, 6, 7, 8], [1, 2, 3]),
    "the NUMA nodes in use, a partly used board": (P300S, range(1, 10), [*range(1, 8)]),
    "a partly used board, a linked tray": (TRAYS, at(ALL, ALL, "12356"), at(ALL, "", "1256")),
    "a partly used board, the smallest": (P300_FIRST, [0x21, 0x22, *at("", "1234")], [0x41]),
    "a linked tray, the most links": (TRAYS, at(ALL, "", "1256", "1234"), at(ALL, "", "", "1234")),
    "a linked tray, the lowest addresses": (TRAYS, at(ALL, "", ALL, ALL), at(ALL, "", "", ALL)),
    "the most links, the smallest tray": (TRAYS, at("16", "348"), at("", "34")),
    "the smallest tray, the lowest addresses": (TRAYS, at("123", "12"), at("", "12")),
    "the smallest board, a partly used one": (TRAY_FIRST, [*at("1234567"), 0x21], [0x21]),
    "a partly used board, the smallest NUMA node": (HALF, [1, 3, 5], [3]),
    "a NUMA node that is large enough, the smallest": (THREE_NODES, range(7), [*range(1, 7)]),
    "the smallest NUMA node, the lowest addresses": (P150S, range(1, 6), [4]),
    "the smallest NUMA node for two, the lowest addresses": (P150S, range(1, 6), [4, 5]),
    "the lowest addresses": (P150S, [1, 2, 4, 5], [1, 2]),
}


@pytest.mark.parametrize("rules", RULES)
def test_of_two_rules_the_more_important_one_decides(rules: str) -> None:
    """A set that is better by the second one is not preferred."""
    boards, free, best = RULES[rules]
    found = ttdp.preferred_allocation(resource(boards), [*map(bdf, free)], [], len(best))
    assert found == [*map(bdf, best)]


def test_of_a_tray_the_set_with_the_most_links_is_preferred_then_the_lowest_addresses() -> None:
    """For each set of free chips, each size, no must-include and each one."""
    devices = resource([tray(0xC0)])
    numbers = {bdf(0xC0 + n): n for n in POSITIONS}

    def links(ids: Iterable[str]) -> int:
        return sum(pair in LINKS for pair in combinations([numbers[each] for each in ids], 2))

    for free in (each for size in POSITIONS for each in combinations(numbers, size)):
        for size in range(1, len(free) + 1):
            best_first = sorted(combinations(free, size), key=links, reverse=True)
            for must in [(), *combinations(free, 1)]:
                best = next(each for each in best_first if {*must} <= {*each})
                assert ttdp.preferred_allocation(devices, free, must, size) == [*best]


# -- how far from the best set it can end ----------------------------------------------------------


def nodes(places: Iterable[Place]) -> set[int | None]:
    return {node for _, node in places}


checked = hypothesis_settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow]
)


@checked
@given(st.data(), st.randoms())
def test_no_other_set_has_fewer_boards_or_numa_nodes_or_leaves_more_boards_whole(
    data: st.DataObject, order: random.Random
) -> None:
    """What fits on a board gets one. What fits on one NUMA node, or on those of the must-includes,
    stays there, and no set there has fewer boards. Else no set at all has fewer.

    Of the sets with so few boards none has fewer NUMA nodes, if the host has two, or boards are
    single chips. Else it can be one node more: of 22,726 questions to four nodes with p300s, in 16.
    """
    kinds = data.draw(st.sampled_from([(p150,), (p300,), (tray,), (p150, p300)]))
    buses = RING if tray in kinds else range(1, 16, 2)
    numa_nodes = data.draw(st.sampled_from([(None,), (0, 1), (0, 1, 2, 3)]))
    places: dict[str, Place] = {}  # by ID
    boards = []
    for bus in buses[: data.draw(st.integers(1, len(buses)))]:
        node = data.draw(st.sampled_from(numa_nodes))
        boards.append(data.draw(st.sampled_from(kinds))(bus, node))
        places.update((each.address, (bus, node)) for each in boards[-1])
    free = data.draw(st.lists(st.sampled_from([*places]), min_size=1, max_size=10, unique=True))
    must = data.draw(st.lists(st.sampled_from(free), max_size=2, unique=True))
    size = data.draw(st.integers(len(must), len(free)))

    devices = resource(boards)
    found = ttdp.preferred_allocation(devices, free, must, size)

    # So many of the free IDs, whatever the order of the question, and if it repeats IDs.
    assert len({*found}) == len(found) == size and {*must} <= {*found} <= {*free}
    more, again = (order.sample(each * 2, 2 * len(each)) for each in (free, must))
    assert ttdp.preferred_allocation(devices, more, again, size) == found

    used = {places[each] for each in found}
    others = combinations({*free} - {*must}, size - len(must))
    sets = [{places[each] for each in (*must, *more)} for more in others]
    near = [each for each in sets if nodes(each) <= nodes(places[each] for each in must)]
    if not must:
        near = [each for each in sets if len(nodes(each)) <= 1]
    sets = near or sets
    fewest = min(map(len, sets))
    assert used in sets and len(used) == fewest
    fewest_nodes = min(len(nodes(each)) for each in sets if len(each) == fewest)
    is_exact = len(nodes(places.values())) <= 2 or len({*places.values()}) == len(places)
    assert len(nodes(used)) <= fewest_nodes + (not is_exact)

    # At most one whole board is broken up, and none while a broken one of the NUMA node will do.
    whole, room, needed, chosen = (
        Counter(places[each] for each in ids) for ids in (places, free, must, found)
    )
    left = room - chosen
    broken_up = [
        each for each in left if chosen[each] > needed[each] == 0 == whole[each] - room[each]
    ]
    assert len(broken_up) <= 1
    for place in broken_up:
        for other in left:
            will_do = other[1] == place[1] and left[other] >= chosen[place]
            assert room[other] == whole[other] or not will_do


# -- IDs that are not equal ------------------------------------------------------------------------


@checked
@given(st.data(), st.sampled_from([0, 2, 3]))
def test_ids_are_chosen_by_rank(data: st.DataObject, replicas: int) -> None:
    """Must-includes; then what Allocate does not refuse, as the kubelet offers it by a former list;
    then what no pod runs on that it has forgotten; distinct devices; those that are used least.
    """
    devices = resource([p150(1), p300(3), p150(5, fault=Kind.HOT)], replicas)
    all_ids = [*devices.devices]
    free = data.draw(st.lists(st.sampled_from(all_ids), min_size=1, unique=True))
    some = st.lists(st.sampled_from(free), max_size=3, unique=True)
    must, forgotten = data.draw(some), data.draw(some)
    size = data.draw(st.integers(len(must), len(free)))

    def special(each: str) -> tuple[bool, bool, bool]:
        return each not in must, each in devices.refused, each in forgotten

    def ranks(chosen: Iterable[str]) -> list[tuple[bool | int, ...]]:
        ranked = []
        before: Counter[str] = Counter()
        for each in sorted(chosen, key=special):
            device = each.partition("::")[0]
            users = sum(other.startswith(device) and other not in free for other in all_ids)
            ranked.append((*special(each), before[device], users))
            before[device] += 1
        return sorted(ranked)

    found = ttdp.preferred_allocation(devices, free, must, size, forgotten)
    assert ranks(found) == ranks(free)[:size]


# -- what is impossible ---------------------------------------------------------------------------

ONE, TWO, NINE = (f"{bdf(bus)}::0" for bus in (1, 2, 9))
IMPOSSIBLE: list[tuple[list[str], list[str], int]] = [  # available, must-include, size
    ([ONE, ONE], [], 2),
    ([ONE], [NINE], 1),
    ([f"{n}" * 999 for n in range(5000)], [], 1),
    ([ONE], [], -1),
    ([ONE], [TWO], 1),
    ([ONE, TWO], [ONE, TWO], 1),
    ([], [], 1),
]


def test_an_impossible_question_is_rejected(golden: Golden) -> None:
    """With a reason that stays short, whatever the IDs are."""
    devices = resource([p150(1), p150(2)], 2, at_most_one=True)
    lines = []
    for question in IMPOSSIBLE:
        with pytest.raises(RequestError) as rejected:
            ttdp.preferred_allocation(devices, *question)
        status, reason = rejected.value.args
        lines.append(f"{status.name}: {reason}\n")
    golden("questions", "".join(lines))
