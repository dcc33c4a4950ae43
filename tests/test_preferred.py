"""Preferred allocation: the optimum by the rules of the design, found here by brute force."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip
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


def resource(layout: Layout, replicas: int = 0) -> Resource:
    """The layout as the program knows it: a board is a serial, a Galaxy's tray a bus nibble."""
    devices: dict[str, Device] = {}
    for place in sorted(layout, key=lambda place: place.bus):
        card = "galaxy-blackhole" if place.tray.startswith("tray") else "p300c"
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
    return (users, *touched, len(nodes), *whole, len(nodes - partly_used), addresses)


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
    """A question about 32 chips of which up to ten are available."""
    layout = draw(st.sampled_from([GALAXY, HALVED, SPANNING]))
    free = draw(st.sets(st.sampled_from(range(32)), max_size=10))
    available = [place for index, place in enumerate(layout) if index in free]
    must = [place for place in available if not draw(st.integers(0, 9))]
    return layout, available, must, draw(st.integers(len(must), len(available))), []


@hypothesis_settings(deadline=None, max_examples=40)
@given(galaxies())
def test_the_answer_is_the_optimum_on_a_galaxy_that_is_nearly_full(question: Question) -> None:
    """Every set can be tried."""
    assert preferred(*question) == by_brute_force(*question)


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
