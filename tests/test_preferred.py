"""Preferred allocation: the optimum by the rules of the design, found here by brute force."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, count_calls, decide
from ttdp import Device, Resource


@dataclass(frozen=True)
class Place:
    """One device of a layout, in the words of the design."""

    bus: int
    board: str
    tray: str
    nodes: tuple[int | None, ...]  # NUMA nodes that it touches

    @property
    def id(self) -> str:
        return bdf(self.bus)

    @property
    def is_galaxys(self) -> bool:
        return self.tray.startswith("tray")

    @property
    def position(self) -> int | None:
        """Its place in the tray's grid; None outside a Galaxy, or for a device of several chips."""
        return self.bus & 15 if self.is_galaxys and len(self.nodes) == 1 else None


def single(bus: int, *nodes: int | None) -> Place:
    """An n150, or a board as one device: its own board and tray."""
    return Place(bus, f"board {bus}", f"board {bus}", nodes or (None,))


def on_board(bus: int, board: str, numa: int | None = None) -> Place:
    """A chip of a p300: its board is its own tray."""
    return Place(bus, board, board, (numa,))


def on_tray(bus: int, serial: str, *nodes: int | None) -> Place:
    """A chip of a Galaxy: its tray is the bus's high nibble, and no board is on two trays."""
    return Place(bus, f"{bus >> 4:x} {serial}", f"tray {bus >> 4:x}", nodes or (None,))


Layout = Sequence[Place]
# A layout, the available devices, the must-includes, the size and the busy devices.
Question = tuple[Layout, list[Place], list[Place], int, list[Place]]
BUSES = [tray << 4 | number for tray in (0x0, 0x4, 0x8, 0xC) for number in range(1, 9)]
GALAXY = [on_tray(bus, "", bus >> 7) for bus in BUSES]
# The same with two boards in each tray, and with every tray on both NUMA nodes.
HALVED = [on_tray(bus, f"half {(bus & 15) > 4}", bus >> 7) for bus in BUSES]
SPANNING = [on_tray(bus, "", bus % 2) for bus in BUSES]
# Each chip its own board, and trays that are in no ring, or in another domain's.
SINGLE = [on_tray(bus, f"s{bus}") for bus in BUSES]
ODD_TRAYS = (0x00, 0x20, 0x80, 0x100, 0x140)
ODD = [on_tray(tray | number, f"s{number}") for tray in ODD_TRAYS for number in (1, 2, 5, 7, 8, 9)]


def resource(layout: Layout, replicas: int = 0, galaxy: str = "galaxy-blackhole") -> Resource:
    """The layout as the program knows it: a board is a serial, a Galaxy's tray a bus nibble."""
    devices: dict[str, Device] = {}
    for place in sorted(layout, key=lambda place: place.bus):
        card = galaxy if place.is_galaxys else "p300c"
        serial = place.board.rsplit(" ", 1)[-1].encode().hex().upper().rjust(16, "A")
        known = None if place.board.startswith("board") else serial
        chips = [chip(place.bus, card, numa_node=node, serial=known) for node in place.nodes]
        device = Device(place.id, tuple(chips), len(chips))
        devices |= dict.fromkeys(ttdp.replica_ids(place.id, replicas), device)
    return Resource("tenstorrent.com/test", devices, replicas)


def cost(
    layout: Layout,
    available: Collection[Place],
    chosen: Iterable[Place],
    busy: Collection[Place] = (),
) -> tuple[object, ...]:
    """What the design compares, in its order: the smaller the better."""
    chosen = sorted(chosen, key=lambda place: place.bus)
    taken = [place for place in layout if place not in available]
    touched = []
    whole = []  # of these: all their listed devices are available
    for key in ("board", "tray"):
        groups = {getattr(place, key) for place in chosen}
        touched.append(len(groups))
        whole.append(len(groups - {getattr(place, key) for place in taken}))
    nodes = {node for place in chosen for node in place.nodes}
    partly_used = {node for place in taken for node in place.nodes}
    addresses = [place.bus for place in chosen]
    users = len({*busy} & {*chosen})
    packing = (*touched, len(nodes), *whole, len(nodes - partly_used))
    return (users, *packing, *distance([p for p in chosen if p.is_galaxys], taken), addresses)


def distance(chosen: Collection[Place], taken: Collection[Place]) -> tuple[int, int, int, int]:
    """How far chips of Galaxies are from being neighbours, in the words of the design."""
    rings = [place.bus & ~0x0F for place in chosen]
    scattered = links = whole_halves = 0
    for tray in {*rings}:
        inside = [place for place in chosen if place.bus & ~0x0F == tray]
        positions = {place.position for place in inside if place.position is not None}
        scattered += count_islands(positions, is_linked) > 1
        links += sum(is_linked(*pair) for pair in itertools.combinations(positions, 2))

        missing = {place.bus & 15 for place in taken if place.bus & ~0x0F == tray}
        for half in ({1, 2, 5, 6}, {3, 4, 7, 8}):
            whole_halves += bool(half & positions and not half & missing)
    return (count_islands({*rings}, are_neighbours), scattered, -links, whole_halves)


def is_linked(one: int, other: int) -> bool:
    """Two positions of a tray, 1 to 4 in one row and 5 to 8 in the other: beside, or opposite."""
    if not {one, other} <= {*range(1, 9)}:
        return False
    is_same_row = (one <= 4) == (other <= 4)
    return abs(one - other) == (1 if is_same_row else 4)


RING = [0x00, 0x40, 0x80, 0xC0]


def are_neighbours(one: int, other: int) -> bool:
    """Two trays, by their buses, in the ring."""
    if one >> 8 != other >> 8 or not {one & 0xFF, other & 0xFF} <= {*RING}:
        return False
    steps = abs(RING.index(one & 0xFF) - RING.index(other & 0xFF))
    return steps in (1, 3)


def count_islands(things: Collection[int], touch: Callable[[int, int], bool]) -> int:
    """Into how many sets these fall between which nothing touches."""
    left = {*things}
    islands = 0
    while left:
        islands += 1
        reached = {left.pop()}
        while reached:
            here = reached.pop()
            near = {each for each in left if touch(here, each)}
            reached |= near
            left -= near
    return islands


def ids_of(places: Iterable[Place]) -> list[str]:
    """IDs in the order of the addresses."""
    return [place.id for place in sorted(places, key=lambda place: place.bus)]


def by_brute_force(
    layout: Layout, available: Sequence[Place], must: Collection[Place], size: int, busy: Layout
) -> list[str]:
    """The best of all possible sets."""
    others = [place for place in available if place not in must]
    sets = ([*must, *more] for more in itertools.combinations(others, size - len(must)))
    return ids_of(min(sets, key=lambda chosen: cost(layout, available, chosen, busy)))


def preferred(
    layout: Layout,
    available: Iterable[Place],
    must: Iterable[Place],
    size: int,
    busy: Iterable[Place] = (),
) -> list[str]:
    ids = ids_of(available)
    return ttdp.preferred_allocation(resource(layout), ids, ids_of(must), size, ids_of(busy))


WHOLE = [single(bus, 0) for bus in range(1, 6)]
REMAINS = [on_board(bus, f"pair{bus // 2}", bus // 18 + 1) for bus in range(10, 20)]
SCATTERED = [on_tray(bus, f"s{bus}") for bus in range(0x01, 0x05)]
TWOS = [on_tray(bus, "t") for bus in (0x81, 0x82, 0x91, 0x92)]
APART = [on_tray(0x01, "u", None), on_tray(0x11, "u", None)]
TOGETHER = [on_tray(0x81, "u", 0), on_tray(0x82, "v", 1)]
PARTLY_USED = [on_tray(0x01, "u", 1), on_tray(0x11, "u", 1)]
THEIR_REST = [on_tray(0x02, "v", 1), on_tray(0x12, "v", 1)]
ONE_OF_EACH = [on_tray(0x81, "u", 0), on_tray(0x91, "u", 0)]
ANOTHER = [on_tray(0x92, "u", 0)]
WHOLE_TRAY = [on_tray(0x01, "u", None)]
WHOLE_NODE = [on_tray(0x81, "u", 0)]
TAKEN = [on_tray(0x11, "u", None), on_tray(0x82, "v", 1)]


@pytest.mark.parametrize(
    ("better", "worse", "taken"),
    [
        (WHOLE, REMAINS[::2], REMAINS[1::2]),
        (TWOS, SCATTERED, []),
        (TOGETHER, APART, []),
        (ONE_OF_EACH, PARTLY_USED, [*THEIR_REST, *ANOTHER]),
        (WHOLE_NODE, WHOLE_TRAY, TAKEN),
    ],
    ids=[
        "fewer NUMA nodes before any number of whole boards",
        "fewer boards before fewer trays",
        "fewer trays before fewer NUMA nodes",
        "fewer whole boards before fewer whole trays",
        "fewer whole trays before fewer whole NUMA nodes",
    ],
)
def test_the_more_important_rule_decides(better: Layout, worse: Layout, taken: Layout) -> None:
    """Of two sets that differ in two rules."""
    available = [*better, *worse]
    assert preferred([*available, *taken], available, [], len(better)) == ids_of(better)


def test_a_busy_device_is_the_last_choice_unless_it_must_be_included() -> None:
    """Before all other rules: another pod, which the kubelet does not know, still runs on it."""
    far = on_board(40, "far", 1)
    layout = [on_board(1, "near"), on_board(2, "near"), on_board(3, "near"), far]
    assert preferred(layout, layout, [], 2) == [bdf(1), bdf(2)]
    assert preferred(layout, layout, [], 2, layout[:2]) == [bdf(3), far.id]
    assert preferred(layout, layout, layout[:1], 2, layout[:2]) == [bdf(1), bdf(3)]
    assert preferred(layout, layout, [], 4, layout[:2]) == ids_of(layout)


numa_nodes = st.sampled_from([None, 0, 1])
several_nodes = st.sampled_from([(None,), (0,), (1,), (0, 1), (1, 2), (0, 3)])


@st.composite
def questions(draw: st.DrawFn, layouts: st.SearchStrategy[Layout]) -> Question:
    """A layout, some of it available, some of that must-include or busy, and a size."""
    layout = draw(layouts)
    available = [place for place in layout if draw(st.integers(0, 4))]
    must = [place for place in available if not draw(st.integers(0, 5))]
    busy = [place for place in available if not draw(st.integers(0, 5))]
    return layout, available, must, draw(st.integers(len(must), len(available))), busy


def some(*kinds: st.SearchStrategy[Place], most: int = 9) -> st.SearchStrategy[Layout]:
    """Lists of one of these kinds."""
    return st.one_of(*(st.lists(each, max_size=most, unique_by=lambda p: p.bus) for each in kinds))


singles = st.builds(lambda bus, nodes: single(bus, *nodes), st.integers(1, 40), several_nodes)
boards = st.builds(on_board, st.integers(1, 16), st.sampled_from(["p", "q", "r", "s"]), numa_nodes)
trays = st.builds(
    lambda tray, number, half, nodes: on_tray(tray << 4 | number, half, *nodes),
    st.sampled_from([0x0, 0x1, 0x8]),
    st.integers(1, 5),
    st.sampled_from(["u", "v"]),
    several_nodes,
)


@hypothesis_settings(deadline=None, max_examples=200)
@given(questions(some(singles, boards, trays)), st.randoms())
def test_the_answer_is_the_optimum_whatever_the_layout(
    question: Question, order: random.Random
) -> None:
    """Boards of any number of chips, trays of several boards; in any order of the question."""
    layout, available, must, size, busy = question
    best = by_brute_force(*question)
    order.shuffle(available)
    order.shuffle(must)
    ids = [place.id for place in (*available, *available)]
    required = [place.id for place in (*must, *must)]
    found = ttdp.preferred_allocation(resource(layout), ids, required, size, ids_of(busy))
    assert found == best


@st.composite
def galaxies(draw: st.DrawFn) -> Question:
    """A question about some 32 chips of which up to ten are available."""
    layout = draw(st.sampled_from([GALAXY, HALVED, SPANNING, SINGLE, ODD]))
    free = draw(st.sets(st.sampled_from(range(len(layout))), max_size=10))
    available = [place for index, place in enumerate(layout) if index in free]
    must = [place for place in available if not draw(st.integers(0, 9))]
    return layout, available, must, draw(st.integers(len(must), len(available))), []


@hypothesis_settings(deadline=None, max_examples=200)
@given(galaxies())
def test_the_answer_is_the_optimum_on_a_galaxy_that_is_nearly_full(question: Question) -> None:
    """Every set can be tried."""
    assert preferred(*question) == by_brute_force(*question)


# -- neighbours on a Galaxy ------------------------------------------------------------------------

POSITIONS = range(1, 9)
NUMA_LAYOUTS: dict[str, Callable[[int], int | None]] = {
    "unknown": lambda position: None,
    "rows": lambda position: position // 5,
    "alternating": lambda position: position % 2,
    "each": lambda position: position,
}


def a_tray(numa: str, high: int = 0xC0) -> Layout:
    """The chips of a tray, each its own board, on these NUMA nodes."""
    node = NUMA_LAYOUTS[numa]
    return [on_tray(high | each, f"s{each}", node(each)) for each in POSITIONS]


def subsets(layout: Layout) -> Iterable[list[Place]]:
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


@pytest.mark.parametrize(
    ("card", "numa"),
    [
        ("galaxy-wormhole", "unknown"),
        ("galaxy-blackhole", "unknown"),
        ("galaxy-wormhole", "rows"),
        ("galaxy-blackhole", "alternating"),
    ],
)
def test_the_answer_is_the_optimum_for_each_set_of_free_chips_of_a_tray(
    card: str, numa: str
) -> None:
    """All 255 sets, all sizes, no must-include and each one."""
    layout = a_tray(numa)
    compare_all(layout, resource(layout, galaxy=card))


LINKED_PAIRS = [pair for pair in itertools.combinations(POSITIONS, 2) if is_linked(*pair)]
SQUARES = [{first, first + 1, first + 4, first + 5} for first in (1, 2, 3)]


def test_two_chips_are_linked_and_four_are_a_square_whenever_that_is_possible() -> None:
    """For each set of free chips of a tray."""
    layout = a_tray("unknown")
    devices = resource(layout)
    for free in subsets(layout):
        ids = ids_of(free)
        positions = {place.position for place in free}
        if any({*pair} <= positions for pair in LINKED_PAIRS):
            found = ttdp.preferred_allocation(devices, ids, [], 2)
            assert tuple(int(each[5:7], 16) & 15 for each in found) in LINKED_PAIRS, ids
        if any(square <= positions for square in SQUARES):
            found = ttdp.preferred_allocation(devices, ids, [], 4)
            assert {int(each[5:7], 16) & 15 for each in found} in SQUARES, ids


@pytest.mark.parametrize("trays", [*itertools.combinations(RING, 3)])
def test_chips_of_several_trays_are_of_trays_that_are_linked(trays: tuple[int, ...]) -> None:
    """Buses that differ by 0x80 are not: of three trays one is beside both others."""
    layout = [on_tray(tray | 1, f"s{tray}") for tray in trays]
    found = ttdp.preferred_allocation(resource(layout), ids_of(layout), [], 2)
    one, other = (int(each[5:7], 16) & 0xF0 for each in found)
    assert one ^ other != 0x80
    first = layout[0].id
    with_first = ttdp.preferred_allocation(resource(layout), ids_of(layout), [first], 2)
    assert first in with_first
    one, other = (int(each[5:7], 16) & 0xF0 for each in with_first)
    assert one ^ other != 0x80


BOARD_NUMA: dict[str, list[tuple[int | None, ...]]] = {  # of the trays in RING, of their chips
    "unknown": [(None,) * 8] * 4,
    "halves": [(0,) * 8, (0,) * 8, (1,) * 8, (1,) * 8],
    "opposite trays": [(0,) * 8, (1,) * 8, (0,) * 8, (1,) * 8],
    "each on two": [(0, 1) * 4, (1, 2) * 4, (2, 3) * 4, (3, 0) * 4],
}


@pytest.mark.parametrize("numa", BOARD_NUMA)
@pytest.mark.parametrize("card", ["galaxy-wormhole", "galaxy-blackhole"])
def test_the_answer_is_the_optimum_for_whole_trays(card: str, numa: str) -> None:
    """With unit = "board": all sets of free trays, all sizes, no must-include and each one."""
    layout = []
    chips = []
    for tray, nodes in zip(RING, BOARD_NUMA[numa], strict=True):
        layout.append(on_tray(tray, "s", *nodes))
        for position, node in zip(POSITIONS, nodes, strict=True):
            chips.append(chip(tray | position, card, ordinal=tray | position, numa_node=node))
    (devices,) = decide(chips, ttdp.Settings(unit="board")).resources.values()
    assert [*devices.devices] == ["0000:00", "0000:40", "0000:80", "0000:c0"]

    renamed = dict(zip(ids_of(layout), devices.devices.values(), strict=True))
    compare_all(layout, replace(devices, devices=renamed))  # the same under the layout's IDs


def lay_out(node: Callable[[int], int | None]) -> Layout:
    """32 chips, each its own board."""
    return [on_tray(bus, f"s{bus}", node(bus)) for bus in BUSES]


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (SINGLE, 30_000),
        (GALAXY, 30_000),
        (HALVED, 30_000),
        (lay_out(lambda bus: (bus & 15) - 1 if bus < 16 else 8 + (bus >> 6)), 50_000),
        (lay_out(lambda bus: (bus & 15) - 1), 250_000),
        (lay_out(BUSES.index), 80_000),
        ([single(bus, bus % 8) for bus in range(1, 33)], 30_000),
    ],
    ids=["one each", "trays", "half trays", "8 nodes on a tray", "8 nodes on every tray",
         "32 nodes", "no trays"],
)  # fmt: skip
def test_the_number_of_steps_is_small_for_32_chips(layout: Layout, most: int) -> None:
    """Whatever NUMA nodes they are on: the number of sets of chips, or of nodes, is not."""
    devices = resource(layout)
    ids = [*devices.devices]
    for free in (ids, ids[::2], [*ids[:8], *ids[9:20], *ids[23:]]):
        for size in (1, 2, 4, 7, 8, 12, 16, 17, 20, 32):
            if size <= len(free):
                ask = partial(ttdp.preferred_allocation, devices, free, [], size)
                assert count_calls(ask) < most, size


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
    by_id = {place.id: place for place in layout}
    left = collections.Counter(identifier.partition("::")[0] for identifier in available)
    free = [place for place in layout if left[place.id]]

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
        with pytest.raises(ttdp.RequestError, match=reason) as rejected:
            ttdp.preferred_allocation(resource([single(1), single(2)]), available, must, size)
        assert rejected.value.args[0].name == "INVALID_ARGUMENT" and len(str(rejected)) < 600
