"""Preferred allocation: the answer is the optimum of the design's fine print, found here by slower means."""

from __future__ import annotations

import collections
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from ttdp import Chip, Device, Refusal, Resource


@dataclass(frozen=True)
class Place:
    """One device of a layout, in the words of the design."""

    bus: int
    board: str
    tray: str
    numa: int | None

    @property
    def bdf(self) -> str:
        return f"0000:{self.bus:02x}:00.0"


def single(bus: int, numa: int | None = None) -> Place:
    """An n150 or n300: a board, and tray, of its own."""
    return Place(bus, f"board {bus}", f"board {bus}", numa)


def on_board(bus: int, board: str, numa: int | None = None) -> Place:
    """A chip of a p300: a board is its own tray."""
    return Place(bus, board, board, numa)


def on_tray(bus: int, serial: str, numa: int | None = None) -> Place:
    """A chip of a Galaxy: the tray is the high nibble of the bus, and no board reaches beyond it."""
    return Place(bus, f"{bus >> 4:x} {serial}", f"tray {bus >> 4:x}", numa)


Layout = Sequence[Place]
GALAXY = [on_tray(tray << 4 | chip, "", tray // 8) for tray in (0x0, 0x4, 0x8, 0xC) for chip in range(1, 9)]
# The same with two boards in each tray, and with every tray on both NUMA nodes.
HALVED = [on_tray(p.bus, f"half {(p.bus & 15) > 4}", p.numa) for p in GALAXY]
SPANNING = [on_tray(p.bus, "", p.bus % 2) for p in GALAXY]


def resource(layout: Layout, identify: Callable[[Place], str] = lambda place: place.bdf) -> Resource:
    """The layout as the program knows it: a board is a serial, a Galaxy's tray a bus nibble."""
    devices = {}
    for place in sorted(layout, key=lambda place: place.bus):
        card = "galaxy-blackhole" if place.tray.startswith("tray") else "p300c"
        serial = place.board.rsplit(" ", 1)[-1].encode().hex().upper().rjust(16, "A")
        function = ttdp.PciFunction(place.bdf, "blackhole", card, place.numa, place.bus, "/dev/tenstorrent/0", "/sys/x")
        chip = Chip(function, card=card, serial=None if place.board.startswith("board") else serial)
        devices[identify(place)] = Device(identify(place), (chip,))
    return Resource("tenstorrent.com/test", devices)


def cost(layout: Layout, available: Collection[Place], chosen: Iterable[Place]) -> tuple[object, ...]:
    """What the fine print compares, in its order: the smaller the better."""
    chosen = sorted(chosen, key=lambda place: place.bus)

    def groups(key: str) -> tuple[int, int]:
        """Groups that the set touches, and how many of these are whole: all their listed devices are available."""
        touched = {getattr(place, key) for place in chosen}
        broken = {getattr(place, key) for place in layout if place not in available}
        return len(touched), len(touched - broken)

    touched, whole = zip(*(groups(key) for key in ("board", "tray", "numa")), strict=True)
    return (*touched, *whole, [place.bus for place in chosen])


def by_brute_force(layout: Layout, available: Sequence[Place], must: Collection[Place], size: int) -> list[str]:
    """The best of all sets that there are."""
    sets = (chosen for chosen in itertools.combinations(available, size) if set(must) <= set(chosen))
    best = min(sets, key=lambda chosen: cost(layout, available, chosen))
    return [place.bdf for place in sorted(best, key=lambda place: place.bus)]


def preferred(layout: Layout, available: Iterable[Place], must: Iterable[Place], size: int) -> list[str]:
    free, included = [place.bdf for place in available], [place.bdf for place in must]
    return ttdp.preferred_allocation(resource(layout), free, included, size)


# -- by example --------------------------------------------------------------------------------------------------------


def test_two_chips_are_those_of_one_board() -> None:
    """Also where a single chip of a lower address is free: fewest boards come first."""
    layout = [on_board(bus, name) for bus, name in enumerate("aabbcc", start=1)]
    assert preferred(layout, layout[1:], [], 2) == ["0000:03:00.0", "0000:04:00.0"]


def test_one_chip_comes_from_a_board_that_is_broken_into() -> None:
    """Whole boards are kept for those who need them, even at a higher address."""
    layout = [on_board(bus, name) for bus, name in enumerate("aabbcc", start=1)]
    assert preferred(layout, [*layout[:4], layout[5]], [], 1) == ["0000:06:00.0"]


def test_the_chip_beside_the_one_that_is_a_must() -> None:
    """The rest of the board on which a must-include device is, not the lowest address."""
    layout = [on_board(bus, name) for bus, name in enumerate("aabbcc", start=1)]
    assert preferred(layout, layout, [layout[4]], 2) == ["0000:05:00.0", "0000:06:00.0"]


def test_four_cards_are_on_one_numa_node() -> None:
    """Of single cards on two nodes, and of some whose node nobody knows, those of one node; the unknown are a node."""
    layout = [single(1, 0), single(2, 1), single(3, 0), single(4, 1), single(5), single(6), single(7)]
    assert preferred(layout, layout, [], 2) == ["0000:01:00.0", "0000:03:00.0"]
    assert preferred(layout, layout, [], 3) == ["0000:05:00.0", "0000:06:00.0", "0000:07:00.0"]
    assert preferred(layout, layout[1:], [], 1) == ["0000:03:00.0"]  # node 0 is no longer whole


def test_eight_chips_of_a_galaxy_are_a_tray_and_four_the_rest_of_one() -> None:
    """A whole tray where one is asked for; a part of one that is in use where a part is."""
    used = [p for p in GALAXY if p.bus not in (0x81, 0x82, 0x83, 0x84)]
    assert preferred(GALAXY, GALAXY, [], 8) == [f"0000:0{n}:00.0" for n in range(1, 9)]
    assert preferred(GALAXY, used, [], 4) == [f"0000:8{n}:00.0" for n in range(5, 9)]
    assert preferred(GALAXY, used, [], 16) == [f"0000:{tray}{n}:00.0" for tray in (0, 4) for n in range(1, 9)]


def test_a_board_does_not_reach_beyond_its_tray() -> None:
    """Where two trays tell the same serials: the remains of the one do not make the other's board a broken one."""
    low = [on_tray(bus, serial) for bus, serial in ((1, "u"), (2, "u"), (3, "v"))]
    high = [on_tray(bus, serial) for bus, serial in ((0x41, "u"), (0x42, "u"), (0x43, "v"))]
    available = [*low[:2], high[1], high[2]]
    assert by_brute_force([*low, *high], available, [], 1) == ["0000:42:00.0"]
    assert preferred([*low, *high], available, [], 1) == ["0000:42:00.0"]


def test_fewer_numa_nodes_are_worth_any_number_of_whole_boards() -> None:
    """Five whole cards on one node, rather than what is left of five boards on two."""
    whole = [single(bus, 0) for bus in range(1, 6)]
    remains = [on_board(bus, f"pair{bus // 2}", bus // 18 + 1) for bus in range(10, 20)]
    answer = preferred([*whole, *remains], [*whole, *remains[::2]], [], 5)
    assert answer == by_brute_force([*whole, *remains], [*whole, *remains[::2]], [], 5) == [p.bdf for p in whole]


def test_fewer_boards_count_for_more_than_fewer_trays() -> None:
    """Two boards of two chips on two trays, rather than four boards on one."""
    scattered = [on_tray(bus, f"s{bus}") for bus in range(0x01, 0x05)]
    twos = [on_tray(bus, "t") for bus in (0x81, 0x82, 0x91, 0x92)]
    assert preferred([*scattered, *twos], [*scattered, *twos], [], 4) == [place.bdf for place in twos]


def test_fewer_trays_count_for_more_than_fewer_numa_nodes() -> None:
    """Two boards of one tray that lies on two nodes, rather than two of different trays on one node."""
    apart = [on_tray(0x01, "u", None), on_tray(0x11, "u", None)]
    together = [on_tray(0x81, "u", 0), on_tray(0x82, "v", 1)]
    assert preferred([*apart, *together], [*apart, *together], [], 2) == ["0000:81:00.0", "0000:82:00.0"]


def test_whole_boards_count_for_more_than_whole_trays() -> None:
    """A whole tray and a broken board on one node, rather than two whole boards of broken trays on the other."""
    broken_trays = [on_tray(0x01, "u", 1), on_tray(0x02, "v", 1), on_tray(0x11, "u", 1), on_tray(0x12, "v", 1)]
    one_of_each = [on_tray(0x81, "u", 0), on_tray(0x91, "u", 0), on_tray(0x92, "u", 0)]
    available = [*broken_trays[::2], *one_of_each[:2]]
    assert preferred([*broken_trays, *one_of_each], available, [], 2) == ["0000:81:00.0", "0000:91:00.0"]


def test_whole_trays_count_for_more_than_whole_numa_nodes() -> None:
    """A chip of a broken tray on a whole node, rather than one of a whole tray on a broken node."""
    whole_tray, whole_node = on_tray(0x01, "u", None), on_tray(0x81, "u", 0)
    taken = [on_tray(0x11, "u", None), on_tray(0x82, "v", 1)]
    assert preferred([whole_tray, whole_node, *taken], [whole_tray, whole_node], [], 1) == ["0000:81:00.0"]


def test_none_of_nothing() -> None:
    """Size 0 is an empty answer, with devices and without."""
    assert preferred(GALAXY, GALAXY, [], 0) == preferred([], [], [], 0) == []


def test_the_lowest_address_not_the_lowest_text() -> None:
    """Under the strategy `index` an ID is a number that has nothing to do with the order."""
    names = {1: "10", 2: "9", 3: "11", 4: "2"}
    found = resource([single(bus) for bus in names], lambda place: names[place.bus])
    assert ttdp.preferred_allocation(found, ["2", "9", "10", "11"], [], 2) == ["10", "9"]


# -- against brute force -----------------------------------------------------------------------------------------------

numa_nodes = st.sampled_from([None, 0, 1])


@st.composite
def questions(draw: st.DrawFn, layouts: st.SearchStrategy[Layout]) -> tuple[Layout, list[Place], list[Place], int]:
    """A layout, some of it available, some of that a must, and a size."""
    layout = draw(layouts)
    available = [place for place in layout if draw(st.integers(0, 4))]
    must = [place for place in available if not draw(st.integers(0, 5))]
    return layout, available, must, draw(st.integers(len(must), len(available)))


def some(*kinds: st.SearchStrategy[Place], most: int = 9) -> st.SearchStrategy[Layout]:
    return st.one_of(
        *(st.lists(kind, max_size=most, unique_by=lambda place: place.bus) for kind in kinds)
    )  # fmt: skip


singles = st.builds(single, st.integers(1, 40), numa_nodes)
boards = st.builds(on_board, st.integers(1, 16), st.sampled_from(["p", "q", "r", "s"]), numa_nodes)
trays = st.builds(
    lambda tray, chip, half, numa: on_tray(tray << 4 | chip, half, numa),
    st.sampled_from([0x0, 0x1, 0x8]), st.integers(1, 5), st.sampled_from(["u", "v"]), numa_nodes,
)  # fmt: skip


@hypothesis_settings(deadline=None, max_examples=400)
@given(questions(some(singles, boards, trays)))
def test_the_answer_is_the_optimum_whatever_the_layout(
    question: tuple[Layout, list[Place], list[Place], int],
) -> None:
    """Boards of any number of chips, trays of several boards, either over any NUMA nodes, with any holes and musts."""
    assert preferred(*question) == by_brute_force(*question)


pairs = st.lists(numa_nodes, min_size=1, max_size=5).map(
    lambda nodes: [on_board(2 * i + j, f"pair{i}", numa) for i, numa in enumerate(nodes, start=1) for j in (0, 1)]
)


@hypothesis_settings(deadline=None, max_examples=150)
@given(questions(pairs))
def test_the_answer_is_the_optimum_on_p300(question: tuple[Layout, list[Place], list[Place], int]) -> None:
    """Boards of two chips, each on one NUMA node or none."""
    assert preferred(*question) == by_brute_force(*question)


@st.composite
def galaxies(draw: st.DrawFn, most: int, least: int = 0) -> tuple[Layout, list[Place], list[Place], int]:
    """A question about 32 chips of which so many are available."""
    layout = draw(st.sampled_from([GALAXY, HALVED, SPANNING]))
    free = draw(st.sets(st.sampled_from(range(32)), min_size=least, max_size=most))
    available = [place for index, place in enumerate(layout) if index in free]
    must = [place for place in available if not draw(st.integers(0, 9))]
    return layout, available, must, draw(st.integers(len(must), len(available)))


@hypothesis_settings(deadline=None, max_examples=60)
@given(galaxies(10))
def test_the_answer_is_the_optimum_on_a_galaxy_that_is_nearly_full(
    question: tuple[Layout, list[Place], list[Place], int],
) -> None:
    """Up to ten chips of 32 are available: every set can be tried."""
    assert preferred(*question) == by_brute_force(*question)


def by_counting(layout: Layout, available: Sequence[Place], must: Collection[Place], size: int) -> list[str]:
    """The optimum on a Galaxy whose trays lie on one NUMA node each, over every way to share a size among trays."""
    trays = [[p for p in available if p.tray == name] for name in dict.fromkeys(p.tray for p in layout)]
    options = []
    for tray in trays:
        order = sorted(tray, key=lambda place: (place not in must, place.bus))
        options.append([order[:count] for count in range(sum(p in must for p in tray), len(tray) + 1)])
    sets = ([*itertools.chain(*parts)] for parts in itertools.product(*options) if sum(map(len, parts)) == size)
    best = min(sets, key=lambda chosen: cost(layout, available, chosen))
    return [place.bdf for place in sorted(best, key=lambda place: place.bus)]


@pytest.mark.parametrize("seed", range(12))
def test_the_answer_is_the_optimum_on_a_galaxy_with_holes(seed: int) -> None:
    """Any size of 32, with up to half of the chips taken: chips of a tray differ by nothing but their address."""
    chance = random.Random(seed)
    available = sorted(chance.sample(GALAXY, chance.randint(16, 32)), key=lambda place: place.bus)
    must = chance.sample(available, chance.choice([0, 0, 1, 3]))
    size = chance.randint(max(1, len(must)), len(available))
    assert preferred(GALAXY, available, must, size) == by_counting(GALAXY, available, must, size)


@hypothesis_settings(deadline=None, max_examples=25)
@given(galaxies(32, least=16))
def test_no_exchange_of_one_chip_betters_the_answer(question: tuple[Layout, list[Place], list[Place], int]) -> None:
    """On any Galaxy and at any size, whichever chip is given for another makes it worse."""
    layout, available, must, size = question
    names = preferred(layout, available, must, size)
    chosen = [place for place in available if place.bdf in names]
    assert len(chosen) == size and set(must) <= set(chosen)
    best = cost(layout, available, chosen)
    for out in set(chosen) - set(must):
        for into in set(available) - set(chosen):
            assert cost(layout, available, [into, *(place for place in chosen if place != out)]) > best


# -- shared devices ----------------------------------------------------------------------------------------------------


def shared(layout: Layout, replicas: int) -> Resource:
    alone = resource(layout)
    listed = {i: device for device in alone.devices.values() for i in ttdp.replica_ids(device.identifier, replicas)}
    return Resource(alone.name, listed, replicas)


@st.composite
def shares(draw: st.DrawFn) -> tuple[Layout, int, list[str], list[str], int]:
    """A layout of few devices, how often each is shared, which replicas are available, musts, and a size."""
    layout = draw(some(singles, boards, trays, most=4))
    replicas = draw(st.integers(2, 3))
    available = [identifier for identifier in shared(layout, replicas).devices if draw(st.integers(0, 3))]
    must = [identifier for identifier in available if not draw(st.integers(0, 5))]
    return layout, replicas, available, must, draw(st.integers(len(must), len(available)))


@hypothesis_settings(deadline=None, max_examples=300)
@given(shares())
def test_shared_devices_are_distinct_then_the_least_used_then_neighbours(
    question: tuple[Layout, int, list[str], list[str], int],
) -> None:
    """Against every set of replicas: as evenly spread as can be, over the freest, and of those the best neighbours."""
    layout, replicas, available, must, size = question
    found = ttdp.preferred_allocation(shared(layout, replicas), available, must, size)
    assert len(set(found)) == size and set(must) <= set(found) <= set(available)
    by_bdf = {place.bdf: place for place in layout}
    users = {bdf: replicas - sum(i.startswith(f"{bdf}::") for i in available) for bdf in by_bdf}

    def badness(chosen: Iterable[str]) -> tuple[object, ...]:
        """How often devices are taken again, most often first; then users; then what neighbours are compared by."""
        times = collections.Counter(identifier.partition("::")[0] for identifier in chosen)
        rounds = sorted(times.values(), reverse=True)
        last = [bdf for bdf, count in times.items() if count == max(times.values(), default=0)]
        free = [place for place in layout if any(i.startswith(f"{place.bdf}::") for i in available)]
        near = cost(layout, free, [by_bdf[bdf] for bdf in times]) if max(times.values(), default=0) == 1 else ()
        return (rounds, sum(users[bdf] for bdf in last), *near)

    sets = (
        set(c) | set(must) for c in itertools.combinations([i for i in available if i not in must], size - len(must))
    )
    assert badness(found) == min(map(badness, sets))


# -- questions ---------------------------------------------------------------------------------------------------------


@hypothesis_settings(deadline=None, max_examples=60)
@given(questions(some(boards, trays)), st.randoms())
def test_the_answer_does_not_depend_on_the_order_of_the_question(
    question: tuple[Layout, list[Place], list[Place], int], order: random.Random
) -> None:
    """However the kubelet orders the IDs, and if it says one twice; the answer is in the order of the addresses."""
    layout, available, must, size = question
    answer = preferred(*question)
    assert answer == sorted(answer)
    order.shuffle(available)
    order.shuffle(must)
    assert preferred(layout, [*available, *available], [*must, *must], size) == answer


@pytest.mark.parametrize(
    ("available", "must", "size", "named"),
    [
        (["0000:01:00.0"], [], 2, "2"),
        ([], [], 1, "1"),
        (["0000:01:00.0"], [], -1, "-1"),
        (["0000:01:00.0"], ["0000:02:00.0"], 1, "0000:02:00.0"),
        (["0000:01:00.0", "0000:02:00.0"], ["0000:01:00.0", "0000:02:00.0"], 1, "1"),
        (["0000:01:00.0"], ["0000:01:00.0"], 0, "0"),
        (["0000:01:00.0", "0000:09:00.0"], [], 1, "0000:09:00.0"),
        (["0000:01:00.0"], ["0000:09:00.0"], 1, "0000:09:00.0"),
        (["0000:01:00.0", "0000:01:00.0"], [], 2, "2"),
        (["0000:01:00.0"], [], 2**31 - 1, str(2**31 - 1)),
        ([""], [], 1, "''"),
        (["x" * 5000 + str(n) for n in range(5000)], [], 1, "and 4997 more"),
    ],
    ids=range(12),
)
def test_an_impossible_question_is_refused(available: list[str], must: list[str], size: int, named: str) -> None:
    """More than there is, a must that is not available or too many of them, unknown IDs, a negative size: in words."""
    found = resource([single(1), single(2)])
    with pytest.raises(Refusal) as refused:
        ttdp.preferred_allocation(found, available, must, size)
    assert named in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "layout",
    [GALAXY, HALVED, SPANNING, [single(n, n % 2) for n in range(1, 33)],
     [on_board(n, f"pair{n // 2}", n // 16) for n in range(32)]],
    ids=["galaxy", "halved", "spanning", "singles", "pairs"],
)  # fmt: skip
def test_32_devices_take_less_than_5_ms(layout: Layout) -> None:
    """Every size, all devices free and every third one taken; of processor time, once in many: machines are busy."""
    found = resource(layout)
    for available in ([p.bdf for p in layout], [p.bdf for n, p in enumerate(layout) if n % 3]):
        for size in (1, 2, 4, 8, 15, 16, 21):
            assert any(timed(found, available, size) < 0.005 for _ in range(50))


def test_a_hundred_replicas_each_take_hardly_longer() -> None:
    """One of 3,200: what cannot be chosen beside another replica of its device is not looked at."""
    found = shared(GALAXY, 100)
    assert any(timed(found, [*found.devices], 1) < 0.015 for _ in range(50))


def timed(found: Resource, *question: Any) -> float:
    available, size = question
    began = time.thread_time()
    ttdp.preferred_allocation(found, available, [], size)
    return time.thread_time() - began
