"""Holds, explored: pods come and go in any order, and no rule is ever broken.

The moves are those of a kubelet, a runtime and an administrator. Checkpoint and cgroups are real
files, the clock is the test's, and hugepage directories are a dictionary.

Assumed: the kubelet writes within 30 s, and creates a container within 120 s. Nobody deletes a pod
whose entry was never written. A kubelet that has forgotten a pod's devices starts none of its
containers. A pod that was refused did not have an ID of another one. The daemon does not restart
while an answer is not written.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

import ttdp
from tests.chips import bdf, chip, decide
from tests.world.book import BookWorld
from tests.world.checkpoint import Entry
from tests.world.processes import workspace
from ttdp import Call, Mount, RequestError, SavedHolds, Settings, SharedResource, Sharing

SEEDS = 32
STORIES = 10  # of each seed
MOVES = 60  # of each story
SERIAL = "0000046131842007"
ONE = [chip(1, "p150a", number=1)]
PAIR = [chip(bus, "p300c", number=bus, serial=SERIAL) for bus in (2, 3)]
TWICE = tuple(SharedResource(name, 2) for name in ("p150", "p300"))
HALF = tuple(SharedResource(name, 2, f"{name}.half", (bdf(1), SERIAL)) for name in ("p150", "p300"))
CONFIGURATIONS = [  # what a reload can change
    Settings(),
    Settings(resource_naming="card"),
    Settings(unit="board", resource_naming="arch"),
    Settings(sharing=Sharing(resources=TWICE)),
    Settings(sharing=Sharing(resources=HALF)),
    Settings(exclude=(bdf(1), bdf(2))),
]
WRITTEN_WITHIN = 30.0  # seconds after an answer
CREATED_WITHIN = 120.0  # after an allowed start
CALL_LASTS = 25.0
MOST_PODS = 3


Given = tuple[str, Collection[str]]  # a resource and IDs


def are_shared(mine: Given, theirs: Given) -> bool:
    """Return whether both have replicas of one device of one resource."""
    devices = [
        {each.partition("::")[0] for each in ids if "::" in each} for _, ids in (mine, theirs)
    ]
    return mine[0] == theirs[0] and not devices[0].isdisjoint(devices[1])


class Container(NamedTuple):
    entry: Entry
    chips: frozenset[str]
    directory: str

    @property
    def is_shared(self) -> bool:
        return any("::" in each for each in self.entry.ids)

    @property
    def given(self) -> Given:
        return self.entry.resource, self.entry.ids


@dataclass(eq=False, repr=False)
class Pod:
    uid: str
    is_twin: bool  # the kubelet has given one of its IDs to two pods
    containers: list[Container] = field(default_factory=list)  # one after the other
    ended: int = 0  # so many of them
    state: str = "waits"  # the next one; "is created", "runs"
    allowed_at: float = 0.0
    life: str = "lives"  # "deleted", "deleted by force", "ended"
    was_written: bool = False
    is_to_come: bool = True  # this daemon gave its answers, and has not seen its cgroup
    has_cgroup: bool = False
    has_pause: bool = False
    may_run: bool = False  # a start was allowed that can be its
    call: Call | None = None
    waits: bool = False  # the call, for other pods
    files: set[str] = field(default_factory=set)  # the directories in which it has left some

    def __repr__(self) -> str:
        return self.uid

    @property
    def lives(self) -> bool:
        return self.life == "lives"

    @property
    def is_remembered(self) -> bool:
        """Whether the kubelet does not forget it: not if it has ended or was deleted by force."""
        return self.life in ("lives", "deleted")

    @property
    def is_busy(self) -> bool:
        return self.state != "waits"

    @property
    def container(self) -> Container:
        """The one that waits or runs."""
        return self.containers[self.ended]


class Node:
    """A node, and what happens to it."""

    def __init__(self, draw: Random, home: Path) -> None:
        self.draw = draw
        self.story: list[str] = []
        self.kubelet = draw.choice(["prompt", "late", "stale", "lossy"])
        self.has_pause = draw.random() < 0.3
        self.twins = 0.0 if self.kubelet == "late" else draw.choice([0.0, 0.5, 3.0])
        self.times = draw.choice([[0.2, 5.0], [0.2, 5.0, 20.0], [20.0], [5.0, 125.0]])
        self.reloads = draw.choice([0.0, 0.0, 0.7])

        self.chips = draw.choice([ONE, ONE, [*ONE, *PAIR]])
        self.settings = CONFIGURATIONS[0]
        self.world = BookWorld(home)
        self.connected_at = -math.inf  # for so long a kubelet has been connected

        self.pods: list[Pod] = []  # until nothing is left of them
        self.memory: list[Pod] = []  # to which the kubelet has given devices
        self.checkpoint: list[Pod] = []
        self.older: list[Pod] | None = None  # a writing that was overtaken, and can still land
        self.unwritten_since: float | None = None
        self.numbers = itertools.count()
        # The last answer's pod and time, by resource and IDs.
        self.newest: dict[tuple[str, frozenset[str]], tuple[Pod, float]] = {}
        self.pages: dict[str, set[Pod]] = {}  # who has left files in a directory that exists
        self.write()
        self.look()
        self.save()

    def go_on(self) -> None:
        """One of all that can happen now; no rule is broken then."""
        weights, moves = zip(*self.moves(), strict=True)
        (move,) = self.draw.choices(moves, weights)
        self.story.append(f"{self.world.now:g} s: {move.func.__name__} {move.args} {move.keywords}")

        move()

        self.look()
        self.no_two_pods_run_on_one_chip_and_each_has_its_files()
        self.no_pods_id_is_missing_and_none_of_its_chips_is_offered()
        self.nobody_who_is_gone_has_chips()

    def moves(self) -> Iterator[tuple[float, partial[Any]]]:
        """Yield what can happen, with its weight."""
        if len(self.pods) < MOST_PODS:
            if free := self.ids(taken=False):
                yield 8, partial(self.a_pod_is_admitted, free)
            if taken := self.ids(taken=True):  # kubernetes #137534
                yield self.twins, partial(self.a_pod_is_admitted, taken, is_twin=True)

        for pod in self.pods:
            yield from self.moves_of_pod(pod)

        forgets = 0.5 if all(pod.is_remembered for pod in self.memory) else 3
        yield forgets, partial(self.the_kubelet_forgets_and_writes)
        yield 2, partial(self.time_passes, self.draw.choice(self.times))
        yield self.reloads, partial(self.the_configuration_changes)
        if self.older is not None:
            yield 8 if self.kubelet == "stale" else 2, partial(self.an_older_writing_lands)
        if self.kubelet == "lossy":
            yield 1, partial(self.the_kubelet_forgets_all)

        # Afterwards only what stands in the checkpoint is known.
        if self.unwritten_since is None:
            yield 0.5, partial(self.the_node_reboots)
            yield 0.8, partial(self.the_daemon_restarts)

    def moves_of_pod(self, pod: Pod) -> Iterator[tuple[float, partial[Any]]]:
        if pod.call:
            yield 1 if pod.waits else 9, partial(self.answer, pod)
            yield 0.5, partial(self.the_call_ends_with_an_error, pod)
        elif pod.is_busy:
            runs = pod.state == "runs"
            yield 9, partial(self.a_container_ends if runs else self.a_container_runs, pod)
            yield 1 if pod in self.memory else 4, partial(self.a_container_fails, pod)
        elif not pod.lives:
            has_ended = pod.life == "ended"
            yield 9, partial(self.the_cgroup_goes if has_ended else self.the_sandbox_ends, pod)
        elif not pod.has_cgroup:
            yield 9, partial(self.the_sandbox_starts, pod)
        elif pod in self.memory and pod.ended < len(pod.containers):
            yield 9, partial(self.the_kubelet_calls, pod)
            yield 0.5, partial(self.whoever_is_left_alone_may_start, pod)

        if pod.lives and pod.was_written:
            yield 1, partial(self.a_pod_becomes, pod, "deleted")
            yield 8 if pod.waits else 3, partial(self.a_pod_becomes, pod, "deleted by force")

    # -- the daemon

    def look(self) -> None:
        """Look at everything, and decide."""
        self.world.look()
        self.decision = decide(self.chips, self.settings, self.world.current())
        for pod in self.checkpoint:
            pod.is_to_come &= not pod.has_cgroup

    def put_directories_in_order(self) -> None:
        """As at a poll, and before a start."""
        book, now = self.world.book, self.world.now
        holds = [*book.current(now), *book.unwritten(now)]
        named = {path for hold in holds for path in hold.directories}
        self.pages = {path: self.pages.get(path, set()) for path in named}

    def answer(self, pod: Pod) -> bool:
        """Answer a PreStartContainer call, unless it must wait."""
        book, call, container = self.world.book, pod.call, pod.container
        assert call
        self.look()
        try:
            blockers = book.blockers(call, self.world.now)
        except RequestError:
            # Then the kubelet tries again, if it still has the pod.
            is_superseded = self.newest[call.resource, call.ids][1] > call.came_at
            assert pod not in self.memory or pod not in self.checkpoint or is_superseded
            pod.call = None
            return True

        if blockers is None:
            last, at = self.newest[call.resource, call.ids]
            is_late = last not in self.checkpoint and self.world.now - at < WRITTEN_WITHIN
            assert is_late or pod not in self.checkpoint
        elif blockers:
            running = {each.uid for each in self.pods if each.may_run and each is not pod}
            for hold in blockers:
                assert hold.pod in running or pod.is_twin
                assert not hold.chips.isdisjoint(container.chips)
                assert not are_shared(container.given, (hold.resource, hold.ids))
        if blockers != []:
            pod.waits = True
            return False

        assert not call.callers.isdisjoint(each.uid for each in self.checkpoint)
        book.allow(call, self.world.now)
        self.save()
        self.put_directories_in_order()
        for each in self.pods:
            each.may_run |= each.uid in call.callers
        assert pod.may_run, "it is not among the callers"
        pod.call, pod.state, pod.allowed_at = None, "is created", self.world.now
        return True

    def save(self) -> None:
        self.saved = json.dumps(self.world.book.to_saved())

    def start_daemon(self, saved: SavedHolds) -> None:
        """Start the next daemon, to which the kubelet connects at once.

        A pod with a cgroup that it finds in the checkpoint counts as started.
        """
        self.world = BookWorld(self.world.home, saved, self.world.now, connected=0.0)
        self.connected_at = self.world.now
        for pod in {*self.pods, *self.memory, *self.checkpoint}:
            pod.may_run |= pod.has_cgroup and pod in self.checkpoint
            pod.is_to_come = False
        self.look()
        self.put_directories_in_order()
        self.save()

    def the_daemon_restarts(self) -> None:
        """The next one has the state that was saved last. This takes longer than a moment."""
        self.drop_calls()
        self.a_moment_passes()
        self.start_daemon(ttdp.saved_holds(json.loads(self.saved)))

    def the_configuration_changes(self) -> None:
        self.settings = self.draw.choice(CONFIGURATIONS)

    # -- the kubelet

    def put(self, pods: list[Pod]) -> None:
        """Replace the checkpoint, which the daemon reads at once."""
        self.checkpoint, self.older = pods, None
        for pod in pods:
            pod.was_written = True
        self.world.write(*(each.entry for pod in pods for each in pod.containers))
        self.world.book.refresh(self.world.now, look=False)

    def write(self) -> None:
        self.unwritten_since = None
        self.put([*self.memory])

    def an_older_writing_lands(self) -> None:
        """It lacks the pod that was admitted last, and stays until the next writing."""
        self.unwritten_since = self.world.now
        self.put(self.older or [])

    def a_moment_passes(self) -> None:
        """After which no older writing lands, and a prompt kubelet has written."""
        if self.kubelet not in ("late", "stale"):
            self.write()
        self.older = None

    def the_kubelet_forgets_and_writes(self) -> None:
        self.memory = [pod for pod in self.memory if pod.is_remembered]
        self.write()

    def the_kubelet_forgets_all(self) -> None:
        """It knows no pod, while they run on."""
        self.drop_calls()
        self.memory = []
        self.write()

    def drop_calls(self) -> None:
        for pod in self.pods:
            pod.call = None

    def ids(self, *, taken: bool) -> dict[str, list[str]]:
        """Return healthy IDs by resource that pods have, or do not have, as this kubelet has it."""
        given = {
            (each.entry.resource, device_id)
            for pod in self.memory
            if pod.is_remembered
            for each in pod.containers
            for device_id in each.entry.ids
        }

        found = {}
        for name, resource in sorted(self.decision.resources.items()):
            healthy = sorted(each for each, device in resource.devices.items() if not device.reason)
            if ids := [each for each in healthy if ((name, each) in given) is taken]:
                found[name] = ids
        return found

    def a_pod_is_admitted(self, offered: dict[str, list[str]], *, is_twin: bool = False) -> None:
        draw = self.draw
        self.memory = [pod for pod in self.memory if pod.is_remembered]
        name = draw.choice([*offered])
        is_one = is_twin or self.decision.resource(name).replicas
        ids = offered[name][: 1 if is_one else draw.choice([1, 1, 2])]

        pod = Pod(f"pod-{next(self.numbers)}", is_twin=is_twin)
        try:
            for container in draw.choice([["main"], ["prepare", "main"]]):
                own = ids[:1] if container == "prepare" and draw.random() < 0.5 else ids
                pod.containers.append(self.allocate(pod, container, name, own))
        except RequestError:
            return

        sets = {frozenset(each.entry.ids) for each in pod.containers}
        assert len({each.directory for each in pod.containers}) <= len(sets)
        if not is_twin and draw.random() < 0.1:
            return  # another plugin has refused the pod

        for other in self.memory if is_twin else ():
            other.is_twin |= any(each.entry.ids & {*ids} for each in other.containers)
        self.pods.append(pod)
        self.memory.append(pod)

        # The writing of a moment ago can still land after this one.
        if self.kubelet != "late":
            older = self.checkpoint
            self.write()
            self.older = None if is_twin else older
        elif self.unwritten_since is None:
            self.unwritten_since = self.world.now

    def allocate(self, pod: Pod, container: str, resource: str, ids: list[str]) -> Container:
        """Answer Allocate; raises RequestError."""
        world = self.world
        world.now += 0.001  # no two answers are given at one moment
        self.look()
        offered = self.decision.resource(resource)
        ttdp.check_request(offered, [ids])

        wanted, token = frozenset(ids), f"answer-{next(self.numbers)}"
        self.newest[resource, wanted] = pod, world.now
        name = world.book.hugepages_for(resource, wanted, world.now) or token
        directory = f"/dev/hugepages/{ttdp.OWN_DIRECTORY}/{name}"
        self.pages.setdefault(directory, set())

        mounts = [Mount(directory, "/dev/hugepages")]
        answer = ttdp.container_edits(offered.chips(ids), {}, self.settings, mounts, token)
        hold = ttdp.hold_of(answer, resource, wanted)
        world.book.add(hold, world.now)
        entry = Entry(pod.uid, container, resource, {-1: ids}, answer)
        return Container(entry, hold.chips, directory)

    def a_pod_becomes(self, pod: Pod, life: str) -> None:
        pod.life = life

    def the_kubelet_calls(self, pod: Pod) -> None:
        self.world.now += 0.001  # no call comes at the moment of another event
        pod.call, pod.waits = self.world.call(pod.container.entry), False

    def the_call_ends_with_an_error(self, pod: Pod) -> None:
        pod.call = None

    # -- the runtime

    def show(self, pod: Pod) -> None:
        """Show a pod's cgroup as it is."""
        if pod.has_cgroup:
            has_process = pod.state == "runs" or pod.has_pause
            self.world.make_cgroup(pod.uid, populated=has_process)
        else:
            self.world.remove_cgroup(pod.uid)

    def the_sandbox_starts(self, pod: Pod) -> None:
        pod.has_cgroup, pod.has_pause = True, self.has_pause
        self.show(pod)

    def a_container_runs(self, pod: Pod) -> None:
        """It finds an empty directory, but for what its own pod has left there."""
        container = pod.container
        assert container.directory in self.pages
        found = self.pages[container.directory]
        if pod.lives and not pod.is_twin and not container.is_shared:
            assert found == ({pod} if container.directory in pod.files else set())

        found.add(pod)
        pod.files.add(container.directory)
        pod.state = "runs"
        self.show(pod)

    def a_container_fails(self, pod: Pod) -> None:
        """It is tried again."""
        pod.state = "waits"
        self.show(pod)

    def a_container_ends(self, pod: Pod) -> None:
        pod.ended += 1
        pod.state = "waits"
        self.show(pod)

    def the_sandbox_ends(self, pod: Pod) -> None:
        pod.life, pod.has_pause = "ended", False
        self.show(pod)

    def the_cgroup_goes(self, pod: Pod) -> None:
        pod.has_cgroup = pod.may_run = False
        self.show(pod)
        self.pods.remove(pod)

    # -- time

    def time_passes(self, seconds: float) -> None:
        """What can be done at once is done before."""
        while any(self.answer(pod) for pod in self.pods if pod.call):
            pass

        self.a_moment_passes()
        then = self.world.now + seconds
        if self.unwritten_since is not None and then - self.unwritten_since >= WRITTEN_WITHIN:
            self.write()
        for pod in self.pods:
            if pod.state == "is created" and then - pod.allowed_at >= CREATED_WITHIN:
                self.a_container_fails(pod)

        self.world.now = then
        self.look()
        if seconds >= 5:
            self.put_directories_in_order()
            self.save()
        for pod in self.pods:
            if pod.call and then - pod.call.came_at >= CALL_LASTS:
                pod.call = None

    def the_node_reboots(self) -> None:
        """hugetlbfs is empty, and the kubelet knows what stands in its checkpoint."""
        self.drop_calls()
        for pod in {*self.pods, *self.memory}:
            pod.has_cgroup = pod.has_pause = pod.may_run = False
            pod.ended, pod.state = 0, "waits"
            pod.files.clear()
        self.pods = [pod for pod in self.pods if pod.lives and pod in self.memory]
        self.older = None
        self.pages = {}

        shutil.rmtree(self.world.cgroups)
        self.start_daemon(SavedHolds())

    # -- what must hold

    def whoever_is_left_alone_may_start(self, mine: Pod) -> None:
        """At the latest when neither a checkpoint nor a container can be late any more."""
        self.drop_calls()
        for pod in self.pods:
            if pod is not mine:
                pod.life, pod.has_cgroup, pod.may_run = "ended", False, False
                self.show(pod)

        self.pods = [mine]
        self.the_kubelet_forgets_and_writes()
        for _ in range(7):
            self.time_passes(20.0)

        self.the_kubelet_calls(mine)
        assert self.answer(mine) and mine.is_busy, "it waits for nobody"

    @property
    def is_young(self) -> bool:
        """Whether the kubelet has not had the time to end pods."""
        return self.world.now - self.connected_at < CREATED_WITHIN

    def no_two_pods_run_on_one_chip_and_each_has_its_files(self) -> None:
        running = [(pod, pod.container) for pod in self.pods if pod.state == "runs"]
        assert all(pod in self.pages[each.directory] for pod, each in running)
        for (one, first), (two, second) in itertools.combinations(running, 2):
            if one is not two and not first.chips.isdisjoint(second.chips):
                assert are_shared(first.given, second.given)

    def no_pods_id_is_missing_and_none_of_its_chips_is_offered(self) -> None:
        resources = self.decision.resources
        held = {(hold.resource, each) for hold in self.decision.holds for each in hold.ids}
        free = [
            ((name, {device_id}), device.addresses)
            for name, resource in resources.items()
            for device_id, device in resource.devices.items()
            if (name, device_id) not in held and not device.reason
        ]
        for pod in self.pods:
            if pod not in self.checkpoint and not pod.may_run:
                continue  # it is not written yet, or an older writing is there
            if not pod.has_cgroup and not self.is_young and not pod.is_to_come:
                continue  # it was not started again within two minutes

            is_known = pod.lives and pod in self.memory
            for each in pod.containers if is_known else [pod.container] if pod.is_busy else ():
                mine = resources[each.entry.resource].devices
                assert all(mine[device_id].reason is None for device_id in each.entry.ids)
                for given, addresses in free:
                    assert addresses.isdisjoint(each.chips) or are_shared(each.given, given)

    def nobody_who_is_gone_has_chips(self) -> None:
        """Nor a pod that the kubelet does not have, and that does not run."""
        found = {pod.uid: pod for pod in (*self.pods, *self.memory, *self.checkpoint)}
        for hold in self.decision.holds:
            pod = found[hold.pod]
            if pod in self.checkpoint:
                assert pod.has_cgroup or pod.is_to_come or self.is_young
            else:
                assert pod.has_cgroup and pod.may_run

        for name, resource in self.decision.resources.items():
            for device_id, device in resource.devices.items():
                holders = [
                    hold
                    for hold in self.decision.holds
                    if not hold.chips.isdisjoint(device.addresses)
                    and not are_shared((hold.resource, hold.ids), (name, {device_id}))
                ]
                assert holders or not device.withheld


@pytest.fixture
def home(caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """A directory in memory, if there is one. The story of a failure is not the program's log."""
    caplog.set_level("CRITICAL", ttdp.log.name)
    with workspace() as path:
        yield path


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_story_breaks_a_rule(seed: int, home: Path) -> None:
    """Whatever happens to pods, kubelet and daemon: see the rules in go_on()."""
    for number in range(STORIES):
        name = f"{seed}-{number}"
        node = Node(Random(name), home / name)
        try:
            for _ in range(MOVES):
                node.go_on()
        except Exception:
            print(f"The story of Random({name!r}):", *node.story, sep="\n")
            raise
