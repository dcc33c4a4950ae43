"""Preferred allocation: the optimum of the design's fine print, found here by slower means."""

from __future__ import annotations

import collections
import itertools
import random
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from ttdp import Chip, Device, Identity, PciFunction, Refusal, Resource


@dataclass(frozen=True)
class Place:
    """One device of a layout, in the words of the design."""

    bus: int
    board: str
    tray: str
    nodes: tuple[int | None, ...]  # NUMA nodes that it touches

    @property
    def bdf(self) -> str:
        return f"0000:{self.bus:02x}:00.0"


def single(bus: int, *nodes: int | None) -> Place:
    """An n150, or a board as one device: a board, and tray, of its own."""
    return Place(bus, f"board {bus}", f"board {bus}", nodes or (None,))


def on_board(bus: int, board: str, numa: int | None = None) -> Place:
    """A chip of a p300: a board is its own tray."""
    return Place(bus, board, board, (numa,))


def on_tray(bus: int, serial: str, *nodes: int | None) -> Place:
    """A chip of a Galaxy: its tray is the bus's high nibble, and no board reaches beyond it."""
    return Place(bus, f"{bus >> 4:x} {serial}", f"tray {bus >> 4:x}", nodes or (None,))


ONE = "0000:01:00.0"
TWO = "0000:02:00.0"
NINE = "0000:09:00.0"
Layout = Sequence[Place]
Question = tuple[Layout, list[Place], list[Place], int]  # available, a must, and how many
BUSES = [tray << 4 | chip for tray in (0x0, 0x4, 0x8, 0xC) for chip in range(1, 9)]
GALAXY = [on_tray(bus, "", bus >> 7) for bus in BUSES]
# The same with two boards in each tray, and with every tray on both NUMA nodes.
HALVED = [on_tray(bus, f"half {(bus & 15) > 4}", bus >> 7) for bus in BUSES]
SPANNING = [on_tray(bus, "", bus % 2) for bus in BUSES]
SINGLES = [single(bus, bus % 2) for bus in range(1, 33)]
PAIRS = [on_board(bus, f"pair{bus // 2}", bus // 16) for bus in range(32)]


def resource(layout: Layout, names: Mapping[int, str] | None = None) -> Resource:
    """The layout as the program knows it: a board is a serial, a Galaxy's tray a bus nibble."""
    devices = {}
    for place in sorted(layout, key=lambda place: place.bus):
        card = "galaxy-blackhole" if place.tray.startswith("tray") else "p300c"
        serial = place.board.rsplit(" ", 1)[-1].encode().hex().upper().rjust(16, "A")
        said = Identity(card, None if place.board.startswith("board") else serial)
        chips = [
            Chip(PciFunction(place.bdf, "blackhole", card, node, 0, "/dev/0", "/x"), identity=said)
            for node in place.nodes
        ]
        name = names[place.bus] if names else place.bdf
        devices[name] = Device(name, tuple(chips), len(chips))
    return Resource("tenstorrent.com/test", devices)


def cost(
    layout: Layout, available: Collection[Place], chosen: Iterable[Place]
) -> tuple[object, ...]:
    """What the fine print compares, in its order: the smaller the better."""
    chosen = sorted(chosen, key=lambda place: place.bus)
    taken = [place for place in layout if place not in available]
    touched = []
    whole = []  # of these: all their listed devices are available
    for key in ("board", "tray"):
        groups = {getattr(place, key) for place in chosen}
        touched.append(len(groups))
        whole.append(len(groups - {getattr(place, key) for place in taken}))
    nodes = {node for place in chosen for node in place.nodes}
    broken = {node for place in taken for node in place.nodes}
    return (*touched, len(nodes), *whole, len(nodes - broken), [place.bus for place in chosen])


def names_of(places: Iterable[Place]) -> list[str]:
    """IDs in the order of the addresses."""
    return [place.bdf for place in sorted(places, key=lambda place: place.bus)]


def by_brute_force(
    layout: Layout, available: Sequence[Place], must: Collection[Place], size: int
) -> list[str]:
    """The best of all sets that there are."""
    others = [place for place in available if place not in must]
    sets = ([*must, *more] for more in itertools.combinations(others, size - len(must)))
    return names_of(min(sets, key=lambda chosen: cost(layout, available, chosen)))


def preferred(
    layout: Layout, available: Iterable[Place], must: Iterable[Place], size: int
) -> list[str]:
    return ttdp.preferred_allocation(resource(layout), names_of(available), names_of(must), size)


# -- by example ------------------------------------------------------------------------------------


def test_single_cards_are_of_one_numa_node_and_the_unknown_is_one() -> None:
    """Of two nodes, and of one that nobody knows; of a node that is no longer whole rather."""
    nodes = {1: 0, 2: 1, 3: 0, 4: 1, 5: None, 6: None, 7: None}
    layout = [single(bus, node) for bus, node in nodes.items()]
    assert preferred(layout, layout, [], 2) == ["0000:01:00.0", "0000:03:00.0"]
    assert preferred(layout, layout, [], 3) == ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0"]
    assert preferred(layout, layout[1:], [], 1) == ["0000:03:00.0"]


WHOLE = [single(bus, 0) for bus in range(1, 6)]
REMAINS = [on_board(bus, f"pair{bus // 2}", bus // 18 + 1) for bus in range(10, 20)]
SCATTERED = [on_tray(bus, f"s{bus}") for bus in range(0x01, 0x05)]
TWOS = [on_tray(bus, "t") for bus in (0x81, 0x82, 0x91, 0x92)]
APART = [on_tray(0x01, "u", None), on_tray(0x11, "u", None)]
TOGETHER = [on_tray(0x81, "u", 0), on_tray(0x82, "v", 1)]
BROKEN_TRAYS = [on_tray(0x01, "u", 1), on_tray(0x11, "u", 1)]
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
        (ONE_OF_EACH, BROKEN_TRAYS, [*THEIR_REST, *ANOTHER]),
        (WHOLE_NODE, WHOLE_TRAY, TAKEN),
    ],
    ids=[
        "fewer NUMA nodes, rather than any number of whole boards",
        "fewer boards, rather than fewer trays",
        "fewer trays, rather than fewer NUMA nodes",
        "fewer whole boards, rather than fewer whole trays",
        "fewer whole trays, rather than fewer whole NUMA nodes",
    ],
)
def test_what_counts_for_more(better: Layout, worse: Layout, taken: Layout) -> None:
    """Of two sets that differ in two ways the weightier one decides."""
    available = [*better, *worse]
    assert preferred([*available, *taken], available, [], len(better)) == names_of(better)


def test_none_of_nothing() -> None:
    """Size 0 is an empty answer, with devices and without."""
    assert preferred(GALAXY, GALAXY, [], 0) == preferred([], [], [], 0) == []


def test_the_lowest_address_not_the_lowest_text() -> None:
    """Under the strategy `index` an ID is a number that has nothing to do with the order."""
    names = {1: "10", 2: "9", 3: "11", 4: "2"}
    found = resource([single(bus) for bus in names], names)
    assert ttdp.preferred_allocation(found, ["2", "9", "10", "11"], [], 2) == ["10", "9"]


# -- against brute force ---------------------------------------------------------------------------

numa_nodes = st.sampled_from([None, 0, 1])
several_nodes = st.sampled_from([(None,), (0,), (1,), (0, 1), (1, 2), (0, 3)])


@st.composite
def questions(draw: st.DrawFn, layouts: st.SearchStrategy[Layout]) -> Question:
    """A layout, some of it available, some of that a must, and a size."""
    layout = draw(layouts)
    available = [place for place in layout if draw(st.integers(0, 4))]
    must = [place for place in available if not draw(st.integers(0, 5))]
    return layout, available, must, draw(st.integers(len(must), len(available)))


def some(*kinds: st.SearchStrategy[Place], most: int = 9) -> st.SearchStrategy[Layout]:
    """Lists of one of these kinds."""
    return st.one_of(*(st.lists(each, max_size=most, unique_by=lambda p: p.bus) for each in kinds))


singles = st.builds(lambda bus, nodes: single(bus, *nodes), st.integers(1, 40), several_nodes)
boards = st.builds(on_board, st.integers(1, 16), st.sampled_from(["p", "q", "r", "s"]), numa_nodes)
trays = st.builds(
    lambda tray, chip, half, nodes: on_tray(tray << 4 | chip, half, *nodes),
    st.sampled_from([0x0, 0x1, 0x8]),
    st.integers(1, 5),
    st.sampled_from(["u", "v"]),
    several_nodes,
)
pairs = st.lists(st.builds(on_board, st.integers(1, 5), st.just(""), numa_nodes), max_size=5).map(
    lambda cards: [
        on_board(2 * number + half, f"pair{number}", *card.nodes)
        for number, card in enumerate(cards)
        for half in (0, 1)
    ]
)


@hypothesis_settings(deadline=None, max_examples=200)
@given(questions(some(singles, boards, trays) | pairs))
def test_the_answer_is_the_optimum_whatever_the_layout(question: Question) -> None:
    """Boards of any number of chips, trays of several boards, devices over any NUMA nodes."""
    assert preferred(*question) == by_brute_force(*question)


@st.composite
def galaxies(draw: st.DrawFn, least: int, most: int, *layouts: Layout) -> Question:
    """A question about 32 chips of which so many are available."""
    layout = draw(st.sampled_from(layouts))
    free = draw(st.sets(st.sampled_from(range(32)), min_size=least, max_size=most))
    available = [place for index, place in enumerate(layout) if index in free]
    must = [place for place in available if not draw(st.integers(0, 9))]
    return layout, available, must, draw(st.integers(len(must), len(available)))


@hypothesis_settings(deadline=None, max_examples=40)
@given(galaxies(0, 10, GALAXY, HALVED, SPANNING))
def test_the_answer_is_the_optimum_on_a_galaxy_that_is_nearly_full(question: Question) -> None:
    """Up to ten chips of 32 are available: every set can be tried."""
    assert preferred(*question) == by_brute_force(*question)


@hypothesis_settings(deadline=None, max_examples=12)
@given(galaxies(16, 32, GALAXY))
def test_the_answer_is_the_optimum_on_a_galaxy_with_holes(question: Question) -> None:
    """At any size: chips of a tray differ by their address only, so trays can be counted out."""
    layout, available, must, size = question
    options = []
    for tray in ("tray 0", "tray 4", "tray 8", "tray c"):
        places = [place for place in available if place.tray == tray]
        order = sorted(places, key=lambda place: (place not in must, place.bus))
        least = sum(place in must for place in places)
        options.append([order[:count] for count in range(least, len(order) + 1)])
    parts = (each for each in itertools.product(*options) if sum(map(len, each)) == size)
    sets = ([*itertools.chain(*each)] for each in parts)
    best = min(sets, key=lambda chosen: cost(layout, available, chosen))
    assert preferred(*question) == names_of(best)


@hypothesis_settings(deadline=None, max_examples=25)
@given(galaxies(16, 32, HALVED, SPANNING))
def test_no_exchange_of_one_chip_betters_the_answer(question: Question) -> None:
    """On other Galaxies and at any size, whichever chip is given for another makes it worse."""
    layout, available, must, size = question
    names = preferred(layout, available, must, size)
    chosen = {place for place in available if place.bdf in names}
    assert len(chosen) == size and chosen.issuperset(must)
    best = cost(layout, available, chosen)
    for out in chosen.difference(must):
        for into in set(available) - chosen:
            assert cost(layout, available, (chosen - {out}) | {into}) > best


# -- shared devices --------------------------------------------------------------------------------


def shared(layout: Layout, replicas: int) -> Resource:
    alone = resource(layout)
    listed: dict[str, Device] = {}
    for device in alone.devices.values():
        listed |= dict.fromkeys(ttdp.replica_ids(device.identifier, replicas), device)
    return Resource(alone.name, listed, replicas)


@st.composite
def shares(draw: st.DrawFn) -> tuple[Layout, int, list[str], list[str], int]:
    """A layout, how often each is shared, which replicas are available, musts, and a size."""
    layout = draw(some(singles, boards, trays, most=4))
    replicas = draw(st.integers(2, 3))
    available = [each for each in shared(layout, replicas).devices if draw(st.integers(0, 3))]
    must = [each for each in available if not draw(st.integers(0, 5))]
    return layout, replicas, available, must, draw(st.integers(len(must), len(available)))


@hypothesis_settings(deadline=None, max_examples=150)
@given(shares())
def test_shared_devices_are_distinct_then_the_least_used_then_neighbours(
    question: tuple[Layout, int, list[str], list[str], int],
) -> None:
    """Against every set of replicas: evenly spread, over the freest, and the best neighbours."""
    layout, replicas, available, must, size = question
    found = ttdp.preferred_allocation(shared(layout, replicas), available, must, size)
    assert len(set(found)) == size and set(must) <= set(found) <= set(available)
    by_bdf = {place.bdf: place for place in layout}
    left = collections.Counter(identifier.partition("::")[0] for identifier in available)
    free = [place for place in layout if left[place.bdf]]

    def badness(chosen: Iterable[str]) -> tuple[object, ...]:
        """How often devices are taken again, then their users, then what neighbours cost."""
        times = collections.Counter(identifier.partition("::")[0] for identifier in chosen)
        most = max(times.values(), default=0)
        last = [bdf for bdf, count in times.items() if count == most]
        users = sum(replicas - left[bdf] for bdf in last)
        near = cost(layout, free, [by_bdf[bdf] for bdf in times]) if most == 1 else ()
        return (sorted(times.values(), reverse=True), users, *near)

    others = [identifier for identifier in available if identifier not in must]
    sets = ([*must, *more] for more in itertools.combinations(others, size - len(must)))
    assert badness(found) == min(map(badness, sets))


# -- questions -------------------------------------------------------------------------------------


def test_a_device_that_is_not_on_this_node_is_one_to_choose() -> None:
    """A pod's ID whose chip is missing; a kubelet can ask before it hears that it is Unhealthy."""
    missing = Device(ONE, (), 0, absent=(ONE,), is_former=True)
    found = Resource("tenstorrent.com/n150", {ONE: missing})
    assert ttdp.preferred_allocation(found, [ONE], [], 1) == [ONE]


@hypothesis_settings(deadline=None, max_examples=40)
@given(questions(some(boards, trays)), st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_the_question(
    question: Question, order: random.Random
) -> None:
    """However the kubelet orders the IDs, and if it says one twice; the answer is in order."""
    layout, available, must, size = question
    answer = preferred(*question)
    assert answer == sorted(answer)
    order.shuffle(available)
    order.shuffle(must)
    assert preferred(layout, [*available, *available], [*must, *must], size) == answer


@pytest.mark.parametrize(
    ("available", "must", "size", "named"),
    [
        ([ONE], [], 2, "2"),
        ([], [], 1, "1"),
        ([ONE], [], -1, "-1"),
        ([ONE], [TWO], 1, TWO),
        ([ONE, TWO], [ONE, TWO], 1, "1"),
        ([ONE], [ONE], 0, "0"),
        ([ONE, NINE], [], 1, NINE),
        ([ONE], [NINE], 1, NINE),
        ([ONE, ONE], [], 2, "2"),
        ([ONE], [], 2**31 - 1, str(2**31 - 1)),
        ([""], [], 1, "''"),
        (["x" * 5000 + str(n) for n in range(5000)], [], 1, "and 4997 more"),
    ],
    ids=range(12),
)
def test_an_impossible_question_is_refused(
    available: list[str], must: list[str], size: int, named: str
) -> None:
    """More than there is, musts that are none or too many, unknown IDs, a negative size."""
    with pytest.raises(Refusal) as refused:
        ttdp.preferred_allocation(resource([single(1), single(2)]), available, must, size)
    assert named in str(refused.value) and len(str(refused.value)) < 500


def calls(found: Resource, available: Sequence[str], size: int) -> int:
    """How many functions an answer takes: a measure of its cost that no machine changes."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        ttdp.preferred_allocation(found, available, [], size)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "layout",
    [GALAXY, HALVED, SPANNING, SINGLES, PAIRS],
    ids=["galaxy", "halved", "spanning", "singles", "pairs"],
)
def test_the_cost_of_an_answer_is_bounded(layout: Layout) -> None:
    """For 32 devices, all of them free or every third one taken, at every size."""
    found = resource(layout)

    def costs() -> Iterator[int]:
        for available in (names_of(layout), names_of([*layout[::3], *layout[1::3]])):
            yield from (calls(found, available, size) for size in (1, 2, 4, 8, 15, 16, 21))

    assert max(costs()) < 12_000  # the most is 7,200


def test_a_hundred_replicas_of_each_cost_little_more() -> None:
    """One of 3,200: what is a replica of a device that has been looked at is not looked at."""
    found = shared(GALAXY, 100)
    assert calls(found, [*found.devices], 1) < 40_000
