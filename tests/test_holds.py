"""Holds: who has which chips. The rules are those at the head of HOLDS in ttdp.py.

The checkpoint and the cgroups are real files, the clock is the test's.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.chips import bdf, chip, decide, hold
from tests.conftest import no_descriptors
from tests.world.book import ALWAYS, DOMAIN, FIRST, N150, BookWorld, entry
from tests.world.checkpoint import Entry, Held, Snapshot
from ttdp import Call, Hold

A, B = bdf(1), bdf(2)
SECOND = "5d1f7a52-0c3e-4f0b-9d55-3a1b2c4d5e6f"  # a pod
N150A = f"{DOMAIN}/n150a"
MONITOR = f"{ttdp.CONMON}1234"  # CRI-O's, beside a container's cgroup


@pytest.fixture
def world(tmp_path: Path) -> BookWorld:
    return BookWorld(tmp_path)


# -- which holds are current -----------------------------------------------------------------------


def answered(world: BookWorld) -> None:
    world.answer(entry())


def answered_and_started(world: BookWorld) -> None:
    world.answer(entry())
    world.start(entry())


def written(world: BookWorld) -> None:
    world.answer(entry())
    world.write(entry())


def written_and_started(world: BookWorld) -> None:
    world.run(entry())


def written_and_over(world: BookWorld) -> None:
    written_and_started(world)
    world.look()
    world.remove_cgroup()


def written_and_back(world: BookWorld) -> None:
    written_and_over(world)
    world.look()
    world.make_cgroup()


def forgotten(world: BookWorld) -> None:
    written_and_started(world)
    world.now += 60
    world.look()
    world.write()


def forgotten_soon(world: BookWorld) -> None:
    written(world)
    world.now += 10
    world.look()
    world.write()


def forgotten_with_a_sandbox(world: BookWorld) -> None:
    written(world)
    world.make_cgroup(FIRST, "pause")
    world.now += 60
    world.look()
    world.write()


def forgotten_and_empty(world: BookWorld) -> None:
    forgotten(world)
    world.make_cgroup()


def forgotten_while_created(world: BookWorld) -> None:
    written(world)
    world.make_cgroup()
    world.now += 60
    world.start(entry())
    world.write()


TABLE: list[tuple[Callable[[BookWorld], None], int]] = [
    # a hold of which this is seen; how many seconds it is current from then on
    (answered, 30),
    (answered_and_started, 121),
    (written, ALWAYS),
    (written_and_started, ALWAYS),
    (written_and_over, 0),
    (written_and_back, ALWAYS),
    (forgotten, ALWAYS),
    (forgotten_soon, 20),
    (forgotten_with_a_sandbox, 0),
    (forgotten_and_empty, 0),
    (forgotten_while_created, 121),
]


@pytest.mark.parametrize(("row", "seconds"), TABLE, ids=[row.__name__ for row, _ in TABLE])
def test_a_hold_is_current_by_the_table(
    world: BookWorld, row: Callable[[BookWorld], None], seconds: int
) -> None:
    """It is the table at the head of HOLDS in ttdp.py."""
    row(world)

    assert world.seconds(world.current) == seconds


def test_a_static_pod_that_returned_with_another_chip_does_not_run_on_its_former_one(
    world: BookWorld,
) -> None:
    """A late checkpoint made it a possible caller of a start on that chip."""
    former, returned = entry(2, pod="static"), entry(1, pod="static")
    heir = entry(2, pod=SECOND)
    world.run(former)
    world.look()
    world.remove_cgroup("static")
    world.now += 60
    for each in (returned, heir):
        world.answer(each)
        world.make_cgroup(each.uid, "pause")
    assert world.start(heir) == "allowed"

    world.write(returned, heir)
    world.make_cgroup(SECOND, "pause", "main")
    world.now += ttdp.WRITTEN_WITHIN
    assert world.start(heir) == "allowed", "it is a restart"


def test_a_pod_that_gets_other_devices_for_a_container_keeps_those_of_the_other_one(
    world: BookWorld,
) -> None:
    """A kubelet that has lost its checkpoint allocates again for the container that it restarts."""
    main, side = entry(1), entry(2, container="side")
    world.answer(main)
    world.answer(side)
    world.write(main, side)
    world.make_cgroup(FIRST, "pause")
    for each in (main, side):
        assert world.start(each) == "allowed"
        world.make_cgroup(FIRST, "pause", *{"main", each.container})
    world.look()
    world.now += 60
    world.write()
    world.look()

    again = entry(3)
    world.answer(again)
    world.write(again)
    world.make_cgroup(FIRST, "pause", "side")

    assert world.look() == {bdf(2), bdf(3)}

    world.write()
    assert world.look() == {bdf(2), bdf(3)}, "it has lost the checkpoint once more"


def test_nothing_is_kept_of_a_pod_that_has_ended(world: BookWorld) -> None:
    """Memory and state file would grow with every pod."""
    world.answer(entry(2))
    written_and_started(world)
    world.look()

    world.book.apply_names({(N150, A, "main"): {"default/train"}}, world.keys())
    assert world.book.names == {FIRST: "default/train"}

    world.write()
    world.remove_cgroup()
    world.look()
    world.now += ttdp.WRITTEN_WITHIN

    assert not world.look()
    assert not world.book.names and not world.book.to_saved()


def test_answers_that_no_checkpoint_names_do_not_pile_up(world: BookWorld) -> None:
    """A tool can ask for the same IDs again and again; the newest answers count."""
    answers = [Hold(N150, frozenset({A}), name=f"{number}") for number in range(10)]
    for each in answers:
        world.book.add(each, world.now)

    assert world.current() == (*answers[-4:],)


# -- which pods run --------------------------------------------------------------------------------


def waiting_to_start(world: BookWorld, *containers: str) -> Entry:
    """A pod in the checkpoint, with processes in these containers and no allowed start."""
    given = entry()
    world.answer(given)
    world.write(given)
    world.make_cgroup(FIRST, *containers)
    world.look()
    return given


def test_a_pod_runs_from_its_first_allowed_start_until_its_cgroup_is_empty(
    world: BookWorld,
) -> None:
    """Before, it has only a sandbox. When a new sandbox comes, a new start must be allowed."""
    given = waiting_to_start(world, "pause")
    assert not world.running()

    world.start(given)
    assert world.running() == {FIRST}

    world.make_cgroup(FIRST, "pause", "main")
    world.look()
    world.make_cgroup(FIRST, "pause")  # it has crashed: its pod lives
    world.look()
    assert world.running() == {FIRST}

    world.make_cgroup(FIRST)
    world.look()
    world.book.note_ended_pods()

    world.make_cgroup(FIRST, "another pause")
    world.look()
    assert not world.running()
    world.start(given)
    assert world.running() == {FIRST}


def test_a_pod_that_is_awaited_runs_for_two_minutes_at_most(world: BookWorld) -> None:
    """Runtimes without a pause process have no process meanwhile; each start has its own time."""
    given = waiting_to_start(world)
    world.start(given)
    world.now += 100
    world.start(given)

    assert world.book.is_awaiting_containers
    assert world.seconds(world.running) == 121
    assert not world.book.is_awaiting_containers


@pytest.mark.parametrize(
    ("before", "after", "is_awaited"),
    [
        ([], ["main"], False),
        ([], [MONITOR], True),
        (["side"], ["side"], True),
        (["side"], [], True),
        (["side"], [MONITOR], True),
        (["side"], ["side", "main"], False),
    ],
)
def test_a_start_is_over_when_the_new_containers_own_cgroup_was_seen_populated(
    world: BookWorld, before: list[str], after: list[str], is_awaited: bool
) -> None:
    """Not another container's, nor that of CRI-O's monitor; another one can end just then."""
    world.start(waiting_to_start(world, *before))

    world.make_cgroup(FIRST, *after)
    world.look()
    assert world.book.is_awaiting_containers is is_awaited
    assert world.running() == {FIRST}

    world.make_cgroup(FIRST)
    world.look()
    assert world.running() == ({FIRST} if is_awaited else set())


def test_a_pod_runs_though_its_new_process_came_while_it_was_looked_at(world: BookWorld) -> None:
    """After a forced deletion. Its own file was read for the hold of its first container."""
    prepare, main = entry(1, container="prepare"), entry(1, 2)
    for each in (prepare, main):
        world.answer(each)
    world.write(prepare, main)
    for each in (prepare, main):
        world.make_cgroup()
        world.start(each)
        world.make_cgroup(FIRST, each.container)
        if each is prepare:
            world.look()

    world.now += 60
    world.write()
    (world.cgroup(FIRST) / "cgroup.events").write_text("populated 0\n")  # as it was before
    world.look()

    world.make_cgroup(FIRST, "main")
    world.look()
    assert world.running() == {FIRST}


def test_a_hold_that_is_found_counts_as_started_if_its_pods_cgroup_is_there(
    world: BookWorld,
) -> None:
    """The daemon was installed while pods ran; after a reboot it is up before them."""
    world.make_cgroup(FIRST, "pause", "main")
    world.write(entry(), entry(2, pod=SECOND))
    world.look()

    world.make_cgroup(SECOND, "pause", "main")
    world.look()
    assert world.running() == {FIRST}


def test_a_pod_runs_on_the_chips_of_those_containers_whose_start_was_allowed(
    world: BookWorld,
) -> None:
    """Another container's wait for their own."""
    pod = [entry(1), entry(2, container="side")]
    others = [entry(bus, pod=SECOND, resource=N150A) for bus in (1, 2)]
    for each in (*pod, *others):
        world.answer(each)
    world.write(*pod, *others)
    world.make_cgroup(FIRST, "pause")
    world.start(pod[0])

    assert [world.start(each) for each in others] == [{FIRST}, "allowed"]


# -- starts ----------------------------------------------------------------------------------------


def two_pods(world: BookWorld, **second: Any) -> tuple[Entry, Entry]:
    """A pod that runs and was deleted by force, and one that has got its chip, with a sandbox."""
    first, heir = entry(), entry(pod=SECOND, **second)
    world.run(first)
    world.look()
    world.now += 1
    world.answer(heir)
    world.write(heir)
    world.look()
    world.make_cgroup(SECOND, "pause")
    return first, heir


@pytest.mark.parametrize(
    "second",
    [{}, {"resource": N150A}, {"ids": [f"{A}::0"]}, {"resource": f"{DOMAIN}/board", "ids": ["X"]}],
    ids=["same", "renamed", "shared", "regrouped"],
)
def test_a_container_waits_until_the_other_pod_has_ended(
    world: BookWorld, second: dict[str, Any]
) -> None:
    """Whatever the chip is called by now. A crash is no end, as the pod's container may return."""
    _, heir = two_pods(world, **second)
    call = world.call(heir)

    assert world.outcome(call) == {FIRST}
    world.make_cgroup(FIRST, "pause")
    assert world.outcome(call) == {FIRST}

    world.make_cgroup(FIRST)
    assert world.outcome(call) == "allowed"
    assert world.running() == {SECOND}


def test_a_container_does_not_wait_for_its_own_pods_first_one(world: BookWorld) -> None:
    """That runs on one of its chips, and a pod that was deleted by force on another one."""
    forced = entry(2, resource=N150A)
    prepare, main = (entry(1, pod=SECOND, container="prepare"), entry(1, 2, pod=SECOND))
    world.run(forced)
    for each in (prepare, main):
        world.answer(each)
    world.write(prepare, main)
    world.make_cgroup(SECOND, "pause")
    assert world.start(prepare) == "allowed"

    assert world.start(main) == {FIRST}
    world.make_cgroup(FIRST)
    assert world.start(main) == "allowed"


def test_containers_that_share_a_device_do_not_wait_for_each_other(world: BookWorld) -> None:
    """But for those that have the same chip under another resource."""
    one, two = entry(ids=[f"{A}::0"]), entry(pod=SECOND, ids=[f"{A}::1"])
    renamed = entry(pod="third", resource=N150A, ids=[f"{A}::1"])
    for each in (one, two, renamed):
        world.answer(each)
        world.make_cgroup(each.uid, "pause")
    world.write(one, two, renamed)

    assert world.start(one) == world.start(two) == "allowed"
    assert world.start(renamed) == {FIRST, SECOND}


def test_a_container_waits_for_the_processes_of_another_plugins_pod(world: BookWorld) -> None:
    """Its starts are not seen, so these alone decide. Its device file has today's number."""
    answer = pb.ContainerAllocateResponse()
    answer.devices.add(host_path="/dev/tenstorrent/3", container_path="/dev/x", permissions="rw")
    theirs, ours = Entry(FIRST, "main", N150, Held({-1: ["0"]}, answer)), entry(pod=SECOND)
    world.answer(ours)
    world.write(theirs, ours)
    world.look()
    world.make_cgroup(SECOND, "pause")

    for containers in ([], ["pause"], []):
        world.make_cgroup(FIRST, *containers)
        call = world.call(ours)
        found = [*ttdp.with_chips(world.current(), {A: chip(1, ordinal=3)})]
        waits_for = {each.pod for each in world.book.waits_for(call, found)}
        assert waits_for == ({FIRST} if containers else set())


def test_of_two_pods_with_one_id_the_first_start_goes_on(world: BookWorld) -> None:
    """kubernetes #137534. A start counts for both, as the call says only the ID; then one waits."""
    pods = [entry(), entry(pod=SECOND)]
    for each in pods:
        world.answer(each)
        world.make_cgroup(each.uid, "pause")
    world.write(*pods)

    assert world.start(entry()) == "allowed"
    world.make_cgroup(FIRST, "pause", "main")

    call = world.call(entry(pod=SECOND))
    assert world.outcome(call) == {FIRST, SECOND}

    decision = decide([chip(1)], holds=world.current())
    waits_for = world.book.waits_for(call, decision.holds)
    why = f"the kubelet has given {A} to pod {FIRST} and pod {SECOND}; delete one of these pods"
    assert ttdp._why_waiting(call, waits_for, decision) == why


def test_an_allowed_start_can_be_that_of_a_pod_that_was_deleted_during_the_call(
    world: BookWorld,
) -> None:
    """Two pods had its ID, and the kubelet does not cancel the call."""
    pods = [entry(), entry(pod=SECOND)]
    for each in pods:
        world.answer(each)
        world.make_cgroup(each.uid)
    world.write(*pods)
    assert world.start(entry()) == "allowed"
    world.make_cgroup(FIRST, "main")

    world.now += 100
    call = world.call(entry(pod=SECOND))
    assert world.outcome(call) == {FIRST, SECOND}

    world.write(entry())
    assert world.seconds(lambda: world.now < 1000 + ttdp.CREATED_WITHIN + 2)
    world.make_cgroup(FIRST)
    assert world.outcome(call) == "allowed"

    world.make_cgroup(SECOND, "main")
    world.remove_cgroup(FIRST)
    world.write()
    assert world.look() == {A} and world.running() == {SECOND}


def test_a_pods_name_is_recorded_if_it_is_known_which_pods_it_is(world: BookWorld) -> None:
    """Not if two have its ID. A known name stays when the kubelet's List has the next pod."""
    world.write(entry(), entry(pod=SECOND))
    world.look()

    names = {(N150, A, "main"): {"default/one", "default/other"}}
    world.book.apply_names(names, world.keys())
    assert not world.book.names

    world.book.names = {FIRST: "default/one"}
    world.book.apply_names(names, world.keys())
    assert world.book.names == {FIRST: "default/one", SECOND: "default/other"}

    world.book.apply_names({(N150, A, "main"): {"default/next"}}, world.keys())
    assert world.book.names == {FIRST: "default/one", SECOND: "default/other"}


def test_a_pod_does_not_get_the_name_of_the_next_one(world: BookWorld) -> None:
    """One that is deleted by force, runs on, and has no name yet: the kubelet lists its successor.

    Later the checkpoint, too, has the successor, whose name can be in the next answer only.
    """
    names = {(N150, A, "main"): {"default/next"}}
    world.run(entry())
    world.now += 1
    world.answer(entry(pod=SECOND))

    asked = world.keys()
    world.book.apply_names(names, asked)
    assert not world.book.names

    world.write(entry(pod=SECOND))
    world.look()
    world.book.apply_names({(N150, A, "main"): {"default/first"}}, asked)
    assert not world.book.names

    world.book.apply_names(names, world.keys())
    assert world.book.names == {SECOND: "default/next"}


def test_an_answer_that_was_refused_leaves_the_next_pod_its_name(world: BookWorld) -> None:
    """The refused pod's answer, which no checkpoint will name, is older."""
    world.answer(entry(container="refused"))
    world.now += 1
    world.run(entry(pod=SECOND))

    world.book.apply_names({(N150, A, "main"): {"default/train"}}, world.keys())

    assert world.book.names == {SECOND: "default/train"}


def test_a_start_before_its_answer_was_written_is_that_pods(world: BookWorld) -> None:
    """It waits like any other, and counts until the checkpoint names its pod."""
    first = entry()
    world.answer(first)
    assert world.start(first) == "allowed"

    other = entry(resource=N150A, pod=SECOND)
    world.answer(other)
    assert world.start(other) == {""}

    world.write(first, other)
    world.make_cgroup(FIRST)
    assert world.start(other) == {FIRST}


def test_a_start_counts_though_an_older_checkpoint_was_written_last(world: BookWorld) -> None:
    """It lacks the pod's entry, and a kubelet at rest writes no other one."""
    given = entry()
    world.answer(given)
    for entries in ([given], []):
        world.write(*entries)
        world.look()

    world.now += 1
    world.make_cgroup(FIRST, "pause")
    assert world.start(given) == "allowed"
    world.make_cgroup(FIRST, "pause", "main")
    world.now += ttdp.WRITTEN_WITHIN

    assert world.look() == {A}
    assert world.running() == {FIRST}


def test_a_start_waits_though_an_older_checkpoint_has_only_the_pod_that_runs(
    world: BookWorld,
) -> None:
    """It was deleted by force, and seemed to be the only one whose call this could be."""
    first, heir = two_pods(world)
    world.write(first)
    world.look()

    world.now += 1
    assert world.start(heir) == {FIRST}
    world.make_cgroup(FIRST)
    assert world.start(heir) == "allowed"


def test_a_call_without_any_possible_caller_is_allowed_if_nobody_runs(world: BookWorld) -> None:
    """A kubelet that cannot write its checkpoint has pods all the same."""
    assert world.start(entry(pod=SECOND)) == "allowed"

    waiting_to_start(world, "pause")
    world.start(entry())
    assert world.start(entry(pod=SECOND, resource=N150A)) == {FIRST}


def test_a_pod_that_was_refused_is_no_possible_caller(world: BookWorld) -> None:
    """At its second resource, so no checkpoint names it. Its successor's containers start."""
    world.answer(entry(pod=SECOND))
    world.now += 1
    pod = [entry(container=each) for each in ("prepare", "main")]
    for each in pod:
        world.answer(each)
    world.write(*pod)
    world.make_cgroup(FIRST, "pause")
    assert world.start(pod[0]) == "allowed"
    world.make_cgroup(FIRST, "pause", "prepare")

    world.make_cgroup(FIRST, "pause")
    assert world.start(pod[1]) == "allowed"


def test_a_pod_that_has_ended_is_no_possible_caller(world: BookWorld) -> None:
    """Its entry stays until the kubelet forgets it: not before its API server answers."""
    written_and_over(world)
    world.look()
    heir = entry(pod=SECOND)
    world.answer(heir)
    world.write(entry(), heir)

    assert [each.hold.pod for each in world.call(heir).callers] == [SECOND]


# -- directories -----------------------------------------------------------------------------------


def own(name: str) -> Path:
    return Path("/dev/hugepages-1G", ttdp.OWN_DIRECTORY, name)


def asks(*buses: int, resource: str = N150, ids: Iterable[str] = ()) -> Hold:
    """A hold that is about to be answered."""
    return Hold(resource, frozenset(ids or map(bdf, buses or (1,))))


def test_a_recent_answer_for_the_same_ids_has_the_directory_that_nobody_can_have_used(
    world: BookWorld,
) -> None:
    """That of the pod's init container. So its other containers find the node's pages."""
    prepare = entry(container="prepare", directory=own("x"))
    world.answer(prepare)

    assert world.book.directory_for(asks(), world.now) == "x"
    assert world.book.directory_for(asks(2), world.now) is None
    assert world.book.directory_for(asks(1, 2), world.now) is None
    assert world.book.directory_for(asks(resource=N150A), world.now) is None

    world.write(prepare)
    world.look()
    assert world.book.directory_for(asks(), world.now + 29) == "x"
    assert world.book.directory_for(asks(), world.now + 30) is None


def test_a_container_that_is_given_devices_again_before_it_starts_has_used_no_directory(
    world: BookWorld,
) -> None:
    """The kubelet was started again, without its checkpoint, before the pod's cgroup was made."""
    for order in ((1, 2), (2, 1)):  # the same devices, in answers of different names
        prepare = entry(*order, container="prepare", directory=own("x"))
        world.answer(prepare)
        world.write(prepare)
        world.look()
        world.now += 1

    assert world.book.directory_for(asks(1, 2), world.now) == "x"


@pytest.mark.parametrize("used_by", ["itself", "another that names it"])
@pytest.mark.parametrize("how", ["its cgroup", "its start"])
def test_a_directory_that_somebody_can_have_used_is_not_named_again(
    world: BookWorld, used_by: str, how: str
) -> None:
    """From the moment that a start was allowed, or the pod's cgroup was seen."""
    used = entry(directory=own("x"))
    world.answer(used)
    if how == "its cgroup":
        world.write(used)
        world.make_cgroup()
    else:
        world.start(used)

    if used_by != "itself":
        world.answer(entry(pod=SECOND, directory=own("x")))
    world.look()

    assert world.book.directory_for(asks(), world.now) is None


def test_without_private_directories_there_is_none_to_share(world: BookWorld) -> None:
    """The former answer was given with another setting."""
    world.answer(entry())
    assert world.book.directory_for(asks(), world.now) is None


def test_containers_that_share_a_device_have_its_directory_while_a_hold_is_current(
    world: BookWorld,
) -> None:
    """However long, and whoever has used it; of several devices, the first one's counts."""
    one = entry(2, ids=[f"{B}::0"], directory=own("x"))
    world.run(one)
    world.now += 60

    world.look()
    assert world.book.directory_for(asks(ids=[f"{B}::1"]), world.now) == "x"
    assert world.book.directory_for(asks(ids=[f"{A}::0", f"{B}::1"]), world.now) == "x"
    assert world.book.directory_for(asks(ids=[f"{A}::0"]), world.now) is None
    assert world.book.directory_for(asks(2), world.now) is None

    world.answer(entry(1, pod=SECOND, ids=[f"{A}::0"], directory=own("y")))
    assert world.book.directory_for(asks(ids=[f"{A}::1", f"{B}::1"]), world.now) == "y"

    world.remove_cgroup()
    world.look()
    assert world.book.directory_for(asks(ids=[f"{B}::1"]), world.now) is None


def left_behind(world: BookWorld, call: Call) -> set[str]:
    world.look()
    return {Path(path).name for path in world.book.left_behind(call, world.current())}


def test_what_a_pod_has_left_on_the_chips_is_emptied_unless_the_pod_runs(world: BookWorld) -> None:
    """A pod's containers have one directory, and it runs though not all of them have started.

    A possible caller's own directory is not emptied, nor one of a pod on other chips.
    """
    pod = [
        entry(1, container="prepare", directory=own("x")),
        entry(1, 2, container="main", directory=own("x")),
    ]
    heir = entry(1, 2, pod=SECOND, resource=N150A, directory=own("y"))
    other = entry(3, pod="third", directory=own("z"))
    for each in (*pod, heir, other):
        world.answer(each)
    world.write(*pod, heir, other)
    world.make_cgroup(FIRST, "pause")

    assert left_behind(world, world.call(heir)) == {"x"}

    world.start(pod[0])
    assert left_behind(world, world.call(heir)) == set()


def test_a_container_that_was_given_devices_again_does_not_run_in_its_former_directory(
    world: BookWorld,
) -> None:
    """There another pod with its ID has left pages, before the kubelet lost its checkpoint."""
    pods = [entry(directory=own("x")), entry(pod=SECOND, directory=own("x"))]
    for each in pods:
        world.answer(each)
        world.make_cgroup(each.uid, "pause")
    world.write(*pods)
    assert world.start(pods[1]) == "allowed"
    world.remove_cgroup(SECOND)
    world.now += 1

    again = entry(2, 1, directory=own("y"))
    world.answer(again)
    world.write(again)

    assert left_behind(world, world.call(again)) == {"x"}


# -- the checkpoint --------------------------------------------------------------------------------


def damage_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "disappeared": Path.unlink,
    "fifo": damage_by_fifo,
    "garbage": lambda path: path.write_bytes(b"\xff\xfe"),
    "deep": lambda path: path.write_bytes(b"[" * 100_000),
    "other": lambda path: path.write_bytes(b'{"Data": {"PodDeviceEntries": 1}}'),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_that_cannot_be_used_is_as_if_it_had_not_changed(
    world: BookWorld, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """One line when it cannot be used, one when it can be again; answers of ours stay, too."""
    caplog.set_level("INFO")
    world.write(entry(), registered={N150: ["GPU-1"]})
    world.look()
    assert world.book.other_plugins([]) == {N150}

    DAMAGES[how](world.path)

    world.answer(entry(2))
    assert world.seconds(lambda: world.look() == {A, B}) == ttdp.WRITTEN_WITHIN

    assert world.look() == {A}
    assert world.book.problem and len(caplog.messages) == 1
    assert not world.book.other_plugins([]), "what is registered now is not known"

    world.write()
    assert not world.look()
    assert world.book.problem is None and len(caplog.messages) == 2


def test_without_a_checkpoint_no_kubelet_was_here_yet(
    world: BookWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """This is no problem, unlike one that has disappeared."""
    assert not world.look()
    assert not (world.book.problem or world.book.has_read or caplog.messages)


def test_a_checkpoint_that_could_never_be_read_and_is_deleted_has_disappeared(
    world: BookWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody looks for the error in a file that is not there."""
    caplog.set_level("INFO")
    world.put(b"garbage")
    world.look()
    assert world.book.problem == f"{ttdp.CHECKPOINT} cannot be read"

    world.path.unlink()
    world.look()
    assert world.book.problem == f"{ttdp.CHECKPOINT} has disappeared"

    world.write(entry())
    assert world.look() == {A}
    assert world.book.problem is None and len(caplog.messages) == 2


def test_an_unchanged_checkpoint_is_read_once(
    world: BookWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 5 MB takes a while to parse, and each Allocate looks at it."""
    parsed: list[int] = []
    genuine: Callable[[bytes, str], ttdp.Checkpoint] = ttdp.parse_checkpoint

    def parse(content: bytes, domain: str) -> ttdp.Checkpoint:
        parsed.append(len(content))
        return genuine(content, domain)

    monkeypatch.setattr("ttdp.parse_checkpoint", parse)

    world.write(entry(), registered={"example.com/gpu": ["x" * 60] * 80_000})
    assert world.seconds(world.current) == ALWAYS and len(parsed) == 1

    world.write(entry(2))
    assert world.look() == {B} and len(parsed) == 2


def test_a_checkpoint_is_new_though_inode_and_time_are_those_of_the_last_one(
    world: BookWorld,
) -> None:
    """Kubelets write three in a millisecond; ext4 gives the third one the inode of the first."""
    world.write()
    assert not world.look()
    status = world.path.stat()

    world.path.write_bytes(Snapshot([entry()], {}).json())
    os.utime(world.path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert world.look() == {A}


def test_a_new_checkpoint_is_looked_at_in_any_case(world: BookWorld) -> None:
    """Without one, cgroups are listed only when that is asked for."""
    forgotten(world)
    assert world.look() == {A}

    world.make_cgroup()
    world.book.refresh(world.now, DOMAIN, look=False)
    assert world.current()

    world.write(entry(2, pod=SECOND))
    world.book.refresh(world.now + 1, DOMAIN, look=False)
    assert [each.pod for each in world.current()] == [SECOND]


@pytest.mark.parametrize("call", ["ttdp.read_others_file", "os.listdir"])
def test_the_daemons_own_error_ends_no_hold(
    world: BookWorld, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The observation fails as a whole, and is made up for at the next one."""
    written_and_started(world)
    world.look()

    with monkeypatch.context() as patch:
        patch.setattr(call, no_descriptors)
        world.write(entry(), entry(2, container="side"))
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            world.look()
        assert [each.container for each in world.current()] == ["main"]

    world.book.refresh(world.now, DOMAIN, look=False)
    assert [each.container for each in world.current()] == ["main", "side"]


# -- entries ---------------------------------------------------------------------------------------


def as_json(given: Entry, **others: Any) -> dict[str, Any]:
    return {**given.json(), **others}


def parsed(*entries: Any) -> ttdp.Checkpoint:
    data = {"PodDeviceEntries": entries, "RegisteredDevices": None}
    return ttdp.parse_checkpoint(json.dumps({"Data": data}).encode(), DOMAIN)


UNREADABLE: dict[str, Any] = {
    "a list": {"DeviceIDs": [A]},  # of kubelets before 1.20
    "null for a NUMA node": {"DeviceIDs": {"0": None}},
    "no IDs": {"DeviceIDs": {}},
    "no IDs under a former domain": {"DeviceIDs": {}, "ResourceName": "example.org/n150"},
    "not a text": {"DeviceIDs": {"0": [5]}},
    "control characters": {"DeviceIDs": {"0": ["\x1b[2J"]}},
    "no pod": {"PodUID": ""},
    "not base64": {"AllocResp": "{}"},
    "no answer": {"AllocResp": base64.b64encode(b"\xff\xff\xff").decode()},
}


@pytest.mark.parametrize("how", UNREADABLE)
def test_an_entry_of_ours_that_cannot_be_read_is_one_line(
    world: BookWorld, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The others count; `check` has it, too."""
    entries = [as_json(entry(), **UNREADABLE[how]), entry(2).json()]
    data = {"PodDeviceEntries": entries, "RegisteredDevices": {N150: [A]}}
    for _ in range(2):  # the kubelet writes a checkpoint again and again
        world.put(json.dumps({"Data": data}).encode())
        assert world.look() == {B}

    (unreadable,) = world.book.unreadable
    (line,) = caplog.messages
    assert unreadable in line and unreadable.isprintable()
    assert FIRST in unreadable or how == "no pod"


texts = st.text('aZ09/:=+.-"\\ \n\x00\x7fé😀', max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(entry().json())), anything)
def test_an_odd_entry_is_skipped(key: str, value: Any) -> None:
    """Whatever it is, the others count: it may be another vendor's."""
    found = parsed(as_json(entry(), **{key: value}), value, entry(2).json())
    assert found.holds[-1].chips == {B}


def test_a_device_on_two_numa_nodes_is_one() -> None:
    """The kubelet lists its ID for each node."""
    (found,) = parsed(as_json(entry(1, 2), DeviceIDs={"0": [A, B], "1": [B]})).holds
    assert found.ids == {A, B}


def test_a_hold_has_what_stands_in_the_answer(tmp_path: Path) -> None:
    """Chips, directories and the answer's name; a resource that was renamed since is ours, too."""
    own = tmp_path / "hugepages-1G" / ttdp.OWN_DIRECTORY / "x"
    renamed = entry(resource="example.org/n150", directory=own)
    (found,) = parsed(renamed.json()).holds

    assert found == Hold(
        "example.org/n150",
        frozenset([A]),
        name=f"{A}-main-{FIRST}",
        chips=frozenset([A]),
        directories=(str(own),),
        pod=FIRST,
        container="main",
    )


@pytest.mark.parametrize(
    ("path", "is_ours"),
    [
        ("/dev/hugepages-1G/tt-device-plugin/x", True),
        ("/dev/hugepages/tt-device-plugin/0000:01:00.0", True),  # by a former version
        ("/dev/hugepages-1G", False),
        ("/dev/hugepages-1G/tt-device-plugin", False),
        ("/dev/hugepages-1G/tt-device-plugin/", False),
        ("/dev/hugepages-1G/tt-device-plugin/..", False),
        ("/var/lib/tt-device-plugin/models", False),
    ],
)
def test_a_hold_names_directories_only_in_those_of_the_daemon(path: str, is_ours: bool) -> None:
    """What lies elsewhere is an administrator's or the host's, and nobody's to empty."""
    given = entry()
    given.held.answer.mounts.add(host_path=path, container_path="/dev/hugepages-1G")

    (found,) = parsed(given.json()).holds

    assert found.directories == ((path,) if is_ours else ())


@pytest.mark.parametrize(
    ("path", "resource", "ids", "locks"),
    [
        ("/run/ttdp/shm/n150", N150, [f"{A}::0"], "/run/ttdp/shm/n150"),
        ("/run/ttdp/shm/n150", N150, [A], ""),
        ("/srv/shm", N150, [f"{A}::0"], ""),
        ("/dev/shm", f"{DOMAIN}/shm", [f"{A}::0"], ""),
    ],
)
def test_a_hold_has_the_lock_directory_of_its_own_resource(
    path: str, resource: str, ids: list[str], locks: str
) -> None:
    """Not an administrator's own mount on /dev/shm, and not the host's."""
    given = entry(resource=resource, ids=ids)
    given.held.answer.mounts.add(host_path=path, container_path="/dev/shm")

    (found,) = parsed(given.json()).holds

    assert found.locks == locks


FOUND = [
    chip(1, ordinal=3, asic_id="3B1D7A5620E44601"),
    chip(2, ordinal=7),
    chip(3, ordinal=4, present=False, asic_id="3B1D7A5620E44602"),
]


@pytest.mark.parametrize(
    ("where", "text", "chips"),
    [
        ("devices", "/dev/tenstorrent/3", {A}),
        ("devices", f"/dev/tenstorrent/by-pci/{B}", {B}),
        ("devices", "/dev/tenstorrent/by-id/wormhole-3B1D7A5620E44601", {A}),
        ("devices", "/dev/tenstorrent/by-id/wormhole-3B1D7A5620E44602", set()),
        ("devices", "/dev/tenstorrent/4", set()),
        ("devices", "/dev/nvidia3", set()),
        ("envs", f"{A},{B}", {A, B}),
        ("envs", bdf(9), set()),
        ("envs", "3", set()),
        ("cdi_devices", f"tenstorrent/all={B}", {B}),
    ],
)
def test_another_plugins_answer_under_our_domain_is_a_hold(
    where: str, text: str, chips: set[str]
) -> None:
    """Of the chips whose addresses or device files it has, by today's numbers; there may be none.

    One under another domain is none: it may be that of a monitoring pod, which has them all.
    """
    answer = pb.ContainerAllocateResponse()
    if where == "devices":
        answer.devices.add(host_path=text, container_path="/dev/x")
    elif where == "envs":
        answer.envs["DEVICES"] = text
    else:
        answer.cdi_devices.add(name=text)
    held = Held({-1: ["0"]}, answer)

    assert not parsed(Entry(FIRST, "main", "squat.ai/any", held).json()).holds

    answer.envs[ttdp.ADDRESSES] = "none"  # as text, no proof that it is ours
    assert not parsed(Entry(FIRST, "main", "squat.ai/any", held).json()).holds

    holds = parsed(Entry(FIRST, "main", f"{DOMAIN}/any", held).json()).holds
    found = [({*each.chips}, each.is_ours) for each in decide(FOUND, holds=holds).holds]
    assert found == [(chips, False)]


OURS = [A, "10000:01:00.7", "0000:c0", "0000046131842007", f"{A}::0", "0000:c0::99"]
THEIRS = ["GPU-1", "0", "", "0000:01:00", f"{A}::", f"{A}::x", "0000046131842O07", "a\n", "\ud800"]


@pytest.mark.parametrize("identifier", [*OURS, *THEIRS])
def test_an_id_that_no_configuration_gives_is_another_plugins(
    world: BookWorld, identifier: str
) -> None:
    """Ours are addresses, board IDs and their replicas. One that a hold has is listed by us."""
    registered = {N150: [A, identifier], "example.com/gpu": [A], "odd": 5, "odder": [5]}
    world.put(
        json.dumps({"Data": {"PodDeviceEntries": [], "RegisteredDevices": registered}}).encode()
    )
    world.look()

    is_theirs = identifier in THEIRS
    assert world.book.other_plugins([]) == ({N150, "odder"} if is_theirs else {"odder"})
    listed = hold("n150", identifier, buses=[1])
    assert world.book.other_plugins([listed]) == {"odder"}


# -- pods' cgroups ---------------------------------------------------------------------------------

V2 = {  # of a pod, by cgroup driver and QoS class
    "guaranteed": "kubepods/pod{uid}",
    "burstable": "kubepods/burstable/pod{uid}",
    "besteffort": "kubepods/besteffort/pod{uid}",
    "systemd": "kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd, burstable": "kubepods.slice/kubepods-burstable.slice/"
    "kubepods-burstable-pod{uid_}.slice",
    "root with a name": "k8s-kubepods.slice/k8s-kubepods-besteffort.slice/"
    "k8s-kubepods-besteffort-pod{uid_}.slice",
    "one directory deep": "system.slice/kubepods/pod{uid}",
}
V1 = {
    "devices": "devices/kubepods/burstable/pod{uid}",
    "memory": "memory/kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd": "systemd/kubepods/pod{uid}",
}


class Tree:
    """A hierarchy of cgroups, of version 1 or 2."""

    def __init__(self, home: Path, *, is_v2: bool = True) -> None:
        self.top = home / "sys/fs/cgroup"
        self.top.mkdir(parents=True)
        if is_v2:
            (self.top / "cgroup.controllers").touch()
        self.is_v2 = is_v2
        self.cgroups = ttdp.Cgroups(ttdp.Settings(root=str(home)))

    def make(self, where: str, *, populated: bool = True, pod: str = FIRST) -> Path:
        """Make a pod's cgroup, whose process is in a container's."""
        path = self.top / where.format(uid=pod, uid_=pod.replace("-", "_"))
        (path / "container").mkdir(parents=True, exist_ok=True)
        if self.is_v2:
            (path / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
        else:
            (path / "tasks").touch()
            (path / "container/tasks").touch()
            (path / "container/inner").mkdir(exist_ok=True)
            (path / "container/inner/tasks").write_text("4711\n" if populated else "")
        return path

    def seen(self, pod: str = FIRST) -> bool | None:
        """Whether the pod has a process; None without a cgroup."""
        self.cgroups.refresh()
        return self.cgroups.is_populated(pod) if self.cgroups.exists(pod) else None


@pytest.mark.parametrize("pod", [FIRST, "34a7bb2f1e0c4c3b9d1f6e6a0c5d7e81"])
@pytest.mark.parametrize("layout", [*V2, *V1])
def test_a_pods_cgroup_is_found_in_every_layout(tmp_path: Path, layout: str, pod: str) -> None:
    """Of both drivers, each QoS class and both versions; a static pod's UID has no dashes."""
    tree = Tree(tmp_path, is_v2=layout in V2)
    where = (V2 | V1)[layout]
    for populated in (True, False):
        tree.make(where, populated=populated, pod=pod)
        assert tree.seen(pod) is populated

    shutil.rmtree(tree.top / where.split("/")[0])
    assert tree.seen(pod) is None


def test_a_hybrid_hierarchy_is_read_as_version_1(tmp_path: Path) -> None:
    """systemd mounts version 2 at `unified`, without controllers and pods."""
    tree = Tree(tmp_path, is_v2=False)
    (tree.top / "unified").mkdir()
    (tree.top / "unified/cgroup.controllers").touch()
    tree.make(V1["memory"])
    assert tree.seen() is True


def test_a_pod_with_two_cgroups_has_the_processes_of_both(tmp_path: Path) -> None:
    """After a change of the kubelet's cgroup driver."""
    tree = Tree(tmp_path)
    tree.make(V2["burstable"], populated=False)
    tree.make(V2["systemd, burstable"])
    assert tree.seen() is True


@pytest.mark.parametrize(
    "where",
    [
        "user.slice/kubepods/pod{uid}",
        "a.slice/docker/kubepods/pod{uid}",  # a node in a container has its own pods
        "kubepods/burstable/more/pod{uid}",
        "kubepods/burstable/x-pod{uid}",
        "pods/pod{uid}",
    ],
)
def test_what_is_no_pods_cgroup_is_not_taken_for_one(tmp_path: Path, where: str) -> None:
    """Users make cgroups in their sessions, and containers in theirs."""
    tree = Tree(tmp_path)
    tree.make(where)
    assert tree.seen() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root to give a directory away")
@pytest.mark.parametrize("theirs", ["theirs.slice/kubepods", "theirs.slice", "kubepods"])
def test_a_root_that_a_user_can_make_is_none(tmp_path: Path, theirs: str) -> None:
    """A user with a delegated subtree could keep any chip by a former pod's name."""
    tree = Tree(tmp_path)
    tree.make("kubepods/pod{uid}" if theirs == "kubepods" else "theirs.slice/kubepods/pod{uid}")
    assert tree.seen() is True

    os.chown(tree.top / theirs, 1000, 1000)
    assert tree.seen() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root to give a directory away")
def test_a_users_directory_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its user can close it, as that of an unprivileged LXC container: no observation may fail."""
    tree = Tree(tmp_path)
    tree.make(V2["burstable"])
    closed = tree.top / "lxc.payload.theirs"
    closed.mkdir()
    os.chown(closed, 1000, 1000)
    genuine = os.listdir

    def listdir(path: str) -> list[str]:
        if path == str(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return genuine(path)

    monkeypatch.setattr("os.listdir", listdir)
    assert tree.seen() is True


def test_a_cgroup_that_cannot_be_read_counts_as_populated(tmp_path: Path) -> None:
    """Only "not found" means that there is no process."""
    tree = Tree(tmp_path)
    events = tree.make(V2["burstable"]) / "cgroup.events"
    events.unlink()
    assert tree.seen() is False

    events.mkdir()
    assert tree.seen() is True


def test_any_number_of_waiting_containers_cost_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 containers wait for one former pod: all of them see the same, which is read once."""
    tree = Tree(tmp_path)
    for populated in (True, False):
        tree.make(V2["burstable"], populated=populated)
        assert tree.seen() is populated
        tree.make(V2["burstable"], populated=not populated)
        assert [tree.cgroups.is_populated(FIRST) for _ in range(31)] == [populated] * 31


def test_a_container_that_ends_hides_no_other_ones_process(tmp_path: Path) -> None:
    """Its cgroup vanishes while those of the pod are walked, in version 1, in whatever order."""
    tree = Tree(tmp_path, is_v2=False)
    pod = tree.make(V1["memory"], populated=False)
    running = [pod / f"container-{number}" for number in range(4)]
    for path in running:
        path.mkdir()

    for path in running:
        (path / "tasks").write_text("4711\n")
        assert tree.seen() is True
        (path / "tasks").unlink()
    assert tree.seen() is False
