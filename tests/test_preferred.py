"""Preferred allocation: the optimum by the rules of the design, found here by brute force."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, count_calls, decide, hold
from ttdp import Chip, Device, Kind, RequestError, Resource, Settings, SharedResource, Sharing

RING = [0x00, 0x40, 0x80, 0xC0]  # a Galaxy's trays, by their buses
POSITIONS = range(1, 9)
BUSES = [tray | position for tray in RING for position in POSITIONS]


@dataclass(frozen=True)
class Spot:
    """One device of a layout, in the words of the design."""

    bus: int  # of its first chip; a domain is 256 buses
    card: str = "n150"
    serial: str | None = None
    nodes: tuple[int | None, ...] = (None,)  # the NUMA node of each of its chips

    @property
    def id(self) -> str:
        return bdf(self.bus)

    @property
    def is_galaxys(self) -> bool:
        return self.card.startswith("galaxy")


Layout = Sequence[Spot]
# A layout, the available devices, the must-includes, the size and the forgotten devices.
Question = tuple[Layout, list[Spot], list[Spot], int, list[Spot]]


def single(bus: int, *nodes: int | None) -> Spot:
    """A p150, or, with several nodes, a device of several chips.

    All report one serial number, as some do: it means nothing.
    """
    return Spot(bus, "p150b", "p", nodes or (None,))


def on_board(bus: int, serial: str, node: int | None = None) -> Spot:
    """A chip of a p300."""
    return Spot(bus, "p300c", serial, (node,))


def on_tray(bus: int, *nodes: int | None, card: str = "galaxy-wormhole") -> Spot:
    """A chip of a Galaxy, or all of a tray. Their serial number is the same, and means nothing."""
    return Spot(bus, card, "0001", nodes or (None,))


def galaxy(node: Callable[[int], int | None]) -> Layout:
    """A Galaxy, each of its buses on this NUMA node."""
    return [on_tray(bus, node(bus)) for bus in BUSES]


def resource(layout: Layout, replicas: int = 0) -> Resource:
    """The layout as the program knows it."""
    members: dict[str, list[Chip]] = {}
    for spot in sorted(layout, key=lambda spot: spot.bus):
        make = partial(chip, spot.bus, spot.card, serial=spot.serial)
        members[spot.id] = [make(numa_node=node) for node in spot.nodes]
    places = ttdp.places([chips[0] for chips in members.values()])

    devices: dict[str, Device] = {}
    for identifier, chips in members.items():
        device = Device(identifier, tuple(chips), places[identifier], len(chips))
        devices |= dict.fromkeys(ttdp.replica_ids(identifier, replicas), device)
    return Resource("tenstorrent.com/test", devices, replicas)


# -- the rules, as the design states them ----------------------------------------------------------


@lru_cache
def boards_of(layout: tuple[Spot, ...]) -> dict[Spot, object]:
    """The board of each device.

    On a Galaxy it is the tray, by address; of a p300, the two chips that report one serial number.
    """
    serials = collections.Counter(spot.serial for spot in layout if spot.card == "p300c")

    boards: dict[Spot, object] = {}
    for spot in layout:
        boards[spot] = spot
        if spot.is_galaxys and has_trays(layout):
            boards[spot] = spot.bus & ~0x0F
        elif spot.card == "p300c" and serials[spot.serial] == 2:
            boards[spot] = spot.serial
    return boards


def has_trays(layout: Layout) -> bool:
    """Unless a chip of a Galaxy is on another bus than the 32."""
    return {spot.bus & 0xFF for spot in layout if spot.is_galaxys} <= {*BUSES}


def cost(
    layout: Layout,
    available: Collection[Spot],
    chosen: Iterable[Spot],
    forgotten: Collection[Spot] = (),
) -> tuple[object, ...]:
    """What the design compares, in its order: the smaller the better.

    A tray of a Galaxy is a board, and any other board is its own tray, so trays change nothing.
    """
    boards = boards_of(tuple(layout))
    chosen = sorted(chosen, key=lambda spot: spot.bus)
    taken = [spot for spot in layout if spot not in available]

    used = {boards[spot] for spot in chosen}
    nodes = nodes_of(spot for spot in layout if boards[spot] in used)
    whole_boards = used - {boards[spot] for spot in taken}
    whole_nodes = nodes - nodes_of(taken)

    packing = (len(used), len(nodes), len(whole_boards), len(whole_nodes))
    neighbours = distance(chosen, taken) if has_trays(layout) else ()
    addresses = [spot.bus for spot in chosen]
    return (len({*forgotten} & {*chosen}), *packing, *neighbours, addresses)


def nodes_of(spots: Iterable[Spot]) -> set[int | None]:
    return {node for spot in spots for node in spot.nodes}


def distance(chosen: Collection[Spot], taken: Collection[Spot]) -> tuple[int, int, int]:
    """How far the chosen chips of Galaxies are from being neighbours."""
    trays = {spot.bus & ~0x0F for spot in chosen if spot.is_galaxys}
    links = whole_halves = 0
    for tray in trays:
        positions = positions_on(tray, chosen)
        links += sum(is_linked(*pair) for pair in itertools.combinations(positions, 2))

        for half in ({1, 2, 5, 6}, {3, 4, 7, 8}):
            whole_halves += bool(half & positions and not half & positions_on(tray, taken))
    return (count_islands(trays), -links, whole_halves)


def positions_on(tray: int, spots: Iterable[Spot]) -> set[int]:
    """Those of single chips: a device that is a whole tray has none."""
    inside = [spot for spot in spots if spot.is_galaxys and spot.bus & ~0x0F == tray]
    return {spot.bus & 0x0F for spot in inside if len(spot.nodes) == 1}


def is_linked(one: int, other: int) -> bool:
    """Two positions of a tray, 1 to 4 in one row and 5 to 8 in the other: beside, or opposite."""
    is_same_row = (one <= 4) == (other <= 4)
    return abs(one - other) == (1 if is_same_row else 4)


def are_neighbours(one: int, other: int) -> bool:
    """Two trays, by their buses, in the ring of their domain."""
    steps = abs(RING.index(one & 0xFF) - RING.index(other & 0xFF))
    return one >> 8 == other >> 8 and steps in (1, 3)


def count_islands(trays: Collection[int]) -> int:
    """Into how many sets these trays fall between which none are neighbours."""
    left = {*trays}
    islands = 0

    while left:
        islands += 1
        reached = {left.pop()}
        while reached:
            here = reached.pop()
            near = {each for each in left if are_neighbours(here, each)}
            reached |= near
            left -= near
    return islands


def ids_of(spots: Iterable[Spot]) -> list[str]:
    """IDs in the order of the addresses."""
    return [spot.id for spot in sorted(spots, key=lambda spot: spot.bus)]


def by_brute_force(
    layout: Layout, available: Sequence[Spot], must: Collection[Spot], size: int, forgotten: Layout
) -> list[str]:
    """The best of all possible sets."""
    others = [spot for spot in available if spot not in must]
    sets = ([*must, *more] for more in itertools.combinations(others, size - len(must)))
    return ids_of(min(sets, key=lambda chosen: cost(layout, available, chosen, forgotten)))


def preferred(
    layout: Layout,
    available: Iterable[Spot],
    must: Iterable[Spot],
    size: int,
    forgotten: Iterable[Spot] = (),
) -> list[str]:
    ids = ids_of(available)
    return ttdp.preferred_allocation(resource(layout), ids, ids_of(must), size, ids_of(forgotten))


# -- single rules ----------------------------------------------------------------------------------

# Of each rule the best set, the other available devices, and those that are taken. With the others
# there is a set that is better by the next rule and has lower addresses.
RULES: dict[str, tuple[Layout, Layout, Layout]] = {
    "fewer boards before fewer NUMA nodes": (
        [on_board(3, "p", 0), on_board(4, "p", 1)],
        [single(1, 2), single(2, 2)],
        [],
    ),
    "fewer NUMA nodes before fewer whole boards": (
        [single(11, 0), single(12, 0), single(13, 0)],
        [on_board(1, "p", 1), on_board(3, "q", 1), on_board(5, "r", 2)],
        [on_board(2, "p", 1), on_board(4, "q", 1), on_board(6, "r", 2)],
    ),
    "fewer whole boards before fewer whole NUMA nodes": (
        [on_board(3, "p", 0)],
        [single(1, 2, 3)],
        [on_board(4, "p", 1), single(5, 2), single(6, 3)],
    ),
    "fewer whole NUMA nodes before neighbouring trays": (
        [on_tray(tray | each, tray) for tray in (0x40, 0xC0) for each in POSITIONS],
        [on_tray(0x00 | each, 0x00) for each in POSITIONS],
        [single(0xE0, 0x40), single(0xE1, 0xC0)],
    ),
    "neighbouring trays before links": (
        [on_tray(bus) for bus in (0x01, 0x02, 0xC1, 0xC8)],
        [on_tray(bus) for bus in (0x81, 0x82)],
        [on_tray(tray | each) for tray in (0x00, 0x80, 0xC0) for each in (3, 5)],
    ),
    "more links before fewer whole halves": (
        [on_tray(3), on_tray(4)],
        [on_tray(1), on_tray(6)],
        [on_tray(2), on_tray(5)],
    ),
    "fewer whole halves before lower addresses": (
        [on_tray(3), on_tray(4)],
        [on_tray(1), on_tray(2)],
        [on_tray(7)],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_more_important_rule_decides(rule: str) -> None:
    """Of two sets that differ in two rules."""
    best, others, taken = RULES[rule]
    available = [*best, *others]

    assert preferred([*available, *taken], available, [], len(best)) == ids_of(best)


def test_of_a_shared_device_a_forgotten_id_is_the_last_choice() -> None:
    """The device's other ID is not forgotten."""
    devices = resource([single(1), single(2)], replicas=2)
    one, two = bdf(1), bdf(2)
    forgotten = [f"{one}::0"]

    for size, chosen in (
        (1, [f"{one}::1"]),
        (2, [f"{one}::1", f"{two}::0"]),
        (3, [f"{one}::1", f"{two}::0", f"{two}::1"]),
    ):
        found = ttdp.preferred_allocation(devices, [*devices.devices], [], size, forgotten)
        assert found == chosen


def test_an_id_that_allocate_would_refuse_is_the_last_choice() -> None:
    """The kubelet can still offer it, by a former list. A pod can wait for a forgotten device."""
    excluded = Settings(exclude=(bdf(2),))
    former = hold("n150", bdf(2), buses=[2])
    chips = [chip(1, fault=Kind.STALLED), chip(2), chip(3), chip(4)]
    (devices,) = decide(chips, excluded, [former]).resources.values()

    ill, reserved, forgotten, free = map(bdf, (1, 2, 3, 4))
    for must, chosen in (
        ([], [free]),
        ([], [forgotten, free]),
        ([ill], [ill]),
        ([reserved], [reserved, free]),
        ([], [ill, reserved, forgotten, free]),
    ):
        found = ttdp.preferred_allocation(
            devices, [ill, reserved, forgotten, free], must, len(chosen), [reserved, forgotten]
        )
        assert {*found} == {*chosen}


# -- all rules together ----------------------------------------------------------------------------

numa_nodes = st.sampled_from([None, 0, 1])
several_nodes = st.sampled_from([(None,), (0,), (1,), (0, 1), (1, 2), (0, 3)])
singles = st.builds(lambda bus, nodes: single(bus, *nodes), st.integers(1, 40), several_nodes)
boards = st.builds(on_board, st.integers(1, 16), st.sampled_from(["p", "q", "r", "s"]), numa_nodes)
some_buses = [tray | each for tray in (0x00, 0x40, 0x80, 0x100, 0x180) for each in range(1, 6)]
trays = st.builds(on_tray, st.sampled_from(some_buses), numa_nodes)
in_a_machine = st.builds(on_tray, st.sampled_from([*some_buses, 0x09, 0x11]), numa_nodes)


def some(*kinds: st.SearchStrategy[Spot], most: int = 9) -> st.SearchStrategy[Layout]:
    """Lists of one of these kinds, or of all."""
    mixed = (*kinds, st.one_of(*kinds))
    return st.one_of(*(st.lists(each, max_size=most, unique_by=lambda s: s.bus) for each in mixed))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """A layout, some of it available, some of that must-include or forgotten, and a size."""
    layout = draw(some(singles, boards, trays, in_a_machine))
    available = [spot for spot in layout if draw(st.integers(0, 4))]
    must = [spot for spot in available if not draw(st.integers(0, 5))]
    forgotten = [spot for spot in available if not draw(st.integers(0, 5))]
    return layout, available, must, draw(st.integers(len(must), len(available))), forgotten


@hypothesis_settings(deadline=None, max_examples=300)
@given(questions(), st.randoms())
def test_the_answer_is_the_optimum_whatever_the_layout(
    question: Question, order: random.Random
) -> None:
    """In any order of the question, with repetitions."""
    layout, available, must, size, forgotten = question
    best = by_brute_force(*question)

    order.shuffle(available)
    order.shuffle(must)

    ids = [spot.id for spot in (*available, *available)]
    required = [spot.id for spot in (*must, *must)]
    found = ttdp.preferred_allocation(resource(layout), ids, required, size, ids_of(forgotten))

    assert found == best


LAYOUTS_OF_32 = {
    "Galaxy": galaxy(lambda bus: bus >> 7),
    "each tray on both NUMA nodes": galaxy(lambda bus: bus % 2),
    "8 NUMA nodes on a tray": galaxy(lambda bus: bus - 1 if bus < 16 else 8 + (bus >> 6)),
    "8 NUMA nodes on every tray": galaxy(lambda bus: (bus & 15) - 1),
    "32 NUMA nodes": galaxy(BUSES.index),
    "two Galaxies": [on_tray(each << 8 | bus, each) for each in (0, 1) for bus in BUSES[::2]],
    "Galaxy in a virtual machine": [on_tray(bus) for bus in range(0x01, 0x21)],
    "p300": [on_board(bus, f"{bus // 2}", bus // 16) for bus in range(32)],
    "p300 on two NUMA nodes each": [on_board(n, f"{n // 2}", n % 2 * n // 8) for n in range(32)],
    "n150 on 8 NUMA nodes": [single(bus, bus % 8) for bus in range(32)],
}


@st.composite
def full_nodes(draw: st.DrawFn) -> Question:
    """A question about 32 chips of which up to ten are available."""
    layout = LAYOUTS_OF_32[draw(st.sampled_from([*LAYOUTS_OF_32]))]
    free = draw(st.sets(st.sampled_from(range(32)), max_size=10))
    available = [spot for index, spot in enumerate(layout) if index in free]
    must = [spot for spot in available if not draw(st.integers(0, 9))]
    return layout, available, must, draw(st.integers(len(must), len(available))), []


@hypothesis_settings(deadline=None, max_examples=200)
@given(full_nodes())
def test_the_answer_is_the_optimum_on_a_node_that_is_nearly_full(question: Question) -> None:
    """Of 32 chips up to ten are available, so that every set can be tried."""
    assert preferred(*question) == by_brute_force(*question)


# -- neighbours on a Galaxy ------------------------------------------------------------------------

TRAYS = {
    "no NUMA nodes": [on_tray(0xC0 | each) for each in POSITIONS],
    "one for each row": [on_tray(each, each // 5, card="galaxy-blackhole") for each in POSITIONS],
}


def subsets(layout: Layout) -> Iterable[list[Spot]]:
    for size in range(1, len(layout) + 1):
        for chosen in itertools.combinations(layout, size):
            yield [*chosen]


def compare_all(layout: Layout, devices: Resource) -> None:
    """Ask for each number of each set of free devices, and with each of them as must-include."""
    for free in subsets(layout):
        ids = ids_of(free)
        ranked = sorted(subsets(free), key=lambda chosen: cost(layout, free, chosen))
        best = [ids_of(chosen) for chosen in ranked]

        for size in range(1, len(free) + 1):
            for must in ([], *([each] for each in ids)):
                wanted = next(each for each in best if len(each) == size and {*must} <= {*each})
                found = ttdp.preferred_allocation(devices, ids, must, size)
                assert found == wanted, (ids, must, size)


@pytest.mark.parametrize("layout", TRAYS.values(), ids=TRAYS)
def test_the_answer_is_the_optimum_for_each_set_of_free_chips_of_a_tray(layout: Layout) -> None:
    """All 255 sets, all sizes, no must-include and each one."""
    compare_all(layout, resource(layout))


BOARD_NUMA: dict[str, list[tuple[int | None, ...]]] = {  # of the trays in RING, of their chips
    "unknown": [(None,) * 8] * 4,
    "halves": [(0,) * 8, (0,) * 8, (1,) * 8, (1,) * 8],
    "opposite trays": [(0,) * 8, (1,) * 8, (0,) * 8, (1,) * 8],
    "each on two": [(0, 1) * 4, (1, 2) * 4, (2, 3) * 4, (3, 0) * 4],
}


@pytest.mark.parametrize("numa", BOARD_NUMA)
def test_the_answer_is_the_optimum_for_whole_trays(numa: str) -> None:
    """With unit = "board": all sets of free trays, all sizes, no must-include and each one."""
    layout = []
    chips = []
    for tray, nodes in zip(RING, BOARD_NUMA[numa], strict=True):
        layout.append(on_tray(tray | 1, *nodes, card="galaxy-blackhole"))
        for position, node in zip(POSITIONS, nodes, strict=True):
            chips.append(chip(tray | position, "galaxy-blackhole", numa_node=node))

    (devices,) = decide(chips, Settings(unit="board")).resources.values()
    assert [*devices.devices] == ["0000:00", "0000:40", "0000:80", "0000:c0"]

    renamed = dict(zip(ids_of(layout), devices.devices.values(), strict=True))
    compare_all(layout, replace(devices, devices=renamed))  # the same under the layout's IDs


# -- replicas --------------------------------------------------------------------------------------


@st.composite
def replica_questions(draw: st.DrawFn) -> tuple[Layout, int, list[str], list[str], int]:
    """A layout, the replicas of each device, those available, must-includes, and a size."""
    layout = draw(some(singles, boards, trays, most=4))
    replicas = draw(st.integers(2, 3))
    available = [each for each in resource(layout, replicas).devices if draw(st.integers(0, 3))]
    must = [each for each in available if not draw(st.integers(0, 5))]
    return layout, replicas, available, must, draw(st.integers(len(must), len(available)))


@hypothesis_settings(deadline=None, max_examples=150)
@given(replica_questions())
def test_replicas_are_of_distinct_devices_then_the_least_used_then_neighbours(
    question: tuple[Layout, int, list[str], list[str], int],
) -> None:
    """Compared with every set of replicas."""
    layout, replicas, available, must, size = question
    found = ttdp.preferred_allocation(resource(layout, replicas), available, must, size)

    assert len(set(found)) == size and set(must) <= set(found) <= set(available)

    by_id = {spot.id: spot for spot in layout}
    left = collections.Counter(identifier.partition("::")[0] for identifier in available)
    free = [spot for spot in layout if left[spot.id]]

    def replica_cost(chosen: Iterable[str]) -> tuple[object, ...]:
        """How often devices are taken again, then their users, then the packing."""
        times = collections.Counter(identifier.partition("::")[0] for identifier in chosen)
        most = max(times.values(), default=0)
        last = [each for each, count in times.items() if count == most]
        users = sum(replicas - left[each] for each in last)
        packing = cost(layout, free, [by_id[each] for each in times]) if most == 1 else ()
        return (sorted(times.values(), reverse=True), users, *packing)

    others = [identifier for identifier in available if identifier not in must]
    sets = ([*must, *more] for more in itertools.combinations(others, size - len(must)))
    assert replica_cost(found) == min(map(replica_cost, sets))


def test_more_replicas_than_a_container_may_have_are_refused() -> None:
    """With the reason that Allocate would give."""
    settings = Settings(sharing=Sharing(resources=(SharedResource("n150", 2),)))
    (devices,) = decide([chip(1), chip(2)], settings).resources.values()
    ids = [*devices.devices]

    assert ttdp.preferred_allocation(devices, ids, ids[-1:], 1) == ids[-1:]

    reason = "only 1 shared tenstorrent.com/n150, not 2 .fail_requests_greater_than_one"
    with pytest.raises(RequestError, match=reason) as rejected:
        ttdp.preferred_allocation(devices, ids, [], 2)
    assert rejected.value.args[0].name == "INVALID_ARGUMENT"


# -- what it costs ---------------------------------------------------------------------------------


def steps(devices: Resource, free: Sequence[str], size: int, must: Sequence[str] = ()) -> int:
    """How many functions are called for an answer. Of a search, 20,000 calls took 15 ms."""
    return count_calls(partial(ttdp.preferred_allocation, devices, free, must, size))


@pytest.mark.parametrize("layout", LAYOUTS_OF_32.values(), ids=LAYOUTS_OF_32)
def test_the_number_of_steps_is_small_for_32_chips(layout: Layout) -> None:
    """Wherever they are: the number of sets of chips, or of NUMA nodes, is not."""
    devices = resource(layout)
    ids = [*devices.devices]

    for free in (ids, ids[::2], [*ids[:8], *ids[9:20], *ids[23:]]):
        for size in (1, 2, 4, 7, 8, 9, 12, 16, 17, 20, 25, 32):
            if size <= len(free):
                assert steps(devices, free, size) < 20_000, size
                assert steps(devices, free, size, free[: size // 2]) < 20_000, size


@pytest.mark.parametrize("size", [1, 32, 33, 1600, 3199, 3200])
def test_replicas_take_no_part_in_the_search(size: int) -> None:
    """32 chips of 100 replicas: a few steps for each ID, whatever their number is."""
    devices = resource(LAYOUTS_OF_32["Galaxy"], 100)
    ids = [*devices.devices]
    assert not devices.refused  # which is computed once for each list

    for free in (ids, ids[1::2] * 2):
        for must in ([], free[: size // 2], free[-size:]):
            if len({*must}) <= size <= len({*free}):
                assert steps(devices, free, size, must) < 12 * len(ids)


def test_an_impossible_question_is_rejected() -> None:
    """With a reason that stays short, whatever the IDs are."""
    one, two, nine = map(bdf, (1, 2, 9))
    for available, must, size, reason in (
        ([one, one], [], 2, "cannot choose 2 of 1 available devices, 0 of them must-include"),
        ([one], [], -1, "allocation size -1 is negative"),
        ([one], [two], 1, f"must-include device '{two}' is not available"),
        ([one, two], [one, two], 1, "cannot choose 1 of 2 available devices, 2 of them must-inc"),
        ([one, nine], [], 1, f"tenstorrent.com/test has no device '{nine}'"),
        ([f"{n}" * 999 for n in range(5000)], [], 1, "and 4997 more"),
    ):
        with pytest.raises(RequestError, match=reason) as rejected:
            ttdp.preferred_allocation(resource([single(1), single(2)]), available, must, size)
        assert rejected.value.args[0].name == "INVALID_ARGUMENT" and len(str(rejected)) < 600
