"""Holds, explored: pods come and go in any order, and no rule is ever broken.

The moves are those of a kubelet, a runtime and an administrator. Checkpoint, cgroups and hugepage
directories are real files, the clock is the test's. Nothing depends on the machine's time.

Assumed: the kubelet writes within 30 s, and creates a container within 120 s. Nobody deletes a pod
whose entry was never written. A kubelet that has forgotten a pod allocates anew before it starts
one of its containers. A pod that was refused did not have an ID of another one. A static pod that
returns under its UID asks for the same devices.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

import ttdp
from tests.chips import bdf, chip, decide
from tests.world.book import BookWorld
from tests.world.checkpoint import Entry, Held
from tests.world.processes import workspace
from ttdp import Call, Directories, RemovalSteps, Settings, SharedResource, Sharing

SEEDS = 32
STORIES = 8  # of each seed
MOVES = 60  # of each story
SERIAL = "0000046131842007"
ONE = [chip(1, "p150a", ordinal=1)]
PAIR = [chip(bus, "p300c", ordinal=bus, serial=SERIAL) for bus in (2, 3)]
TWICE = tuple(SharedResource(name, 2) for name in ("p150", "p300"))
FIRST = {"p150": (bdf(1),), "p300": (bdf(2),)}  # of each
HALF = tuple(SharedResource(name, 2, f"{name}.half", one) for name, one in FIRST.items())
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
MISSING_FOR = 0.1  # while an older writing is there
CALL_LASTS = 25.0
MOST_PODS = 3
STATIC = "static"  # the UID of a pod that can come back
DOMAIN = CONFIGURATIONS[0].resource_domain


@dataclass(eq=False)
class Container:
    entry: Entry
    name: str  # of the answer
    chips: frozenset[str]
    directory: Path
    state: str = "waits"  # "is created", "runs", "is over"
    cgroup: str = ""
    allowed_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.state in ("is created", "runs")

    @property
    def is_shared(self) -> bool:
        return any("::" in ident for ident in self.entry.held.ids)

    def shares(self, resource: str, ids: set[str]) -> bool:
        """Whether these are replicas of a device of which it has a replica, too."""
        mine = {each.partition("::")[0] for each in self.entry.held.ids if "::" in each}
        theirs = {each.partition("::")[0] for each in ids if "::" in each}

        return self.entry.resource == resource and not mine.isdisjoint(theirs)


@dataclass(eq=False, repr=False)
class Pod:
    uid: str
    number: int
    life: str = "lives"  # "is deleted", "was deleted by force", "has ended"
    containers: list[Container] = field(default_factory=list)  # one after the other
    answered_at: float = -math.inf
    left_at: float = math.inf  # when the checkpoint lost it
    is_overtaken: bool = False  # its entry has landed before an older writing, and not since
    has_cgroup: bool = False
    had_cgroup: bool = False  # since the boot, or since the daemon was installed
    has_pause: bool = False
    may_run: bool = False  # a start was allowed that can be its
    call: Call | None = None
    waits: bool = False  # the call, for other pods
    called_at: float = 0.0
    twin: Pod | None = None  # the kubelet has given both one ID
    files: set[Path] = field(default_factory=set)  # that it has left in its directories

    def __repr__(self) -> str:
        return f"pod {self.number} ({self.uid})"

    @property
    def lives(self) -> bool:
        return self.life == "lives"

    def end_call(self) -> None:
        self.call = None

    def become(self, life: str) -> None:
        self.life = life

    @property
    def waiting(self) -> Container | None:
        """The container that is to be started next, if there is one."""
        left = [each for each in self.containers if each.state != "is over"]
        return left[0] if left and left[0].state == "waits" else None

    @property
    def busy(self) -> Container | None:
        """The container that is created or runs."""
        return next((each for each in self.containers if each.is_busy), None)


Move = tuple[float, str, Callable[[], object]]  # with its weight
Listed = tuple[dict[tuple[str, str, str], set[str]], set[ttdp.HoldKey]]  # and for which holds


class Node:
    """A node, and what happens to it."""

    pods: list[Pod]  # until nothing is left of them
    memory: list[Pod]  # to which the kubelet has given devices
    written: list[Pod]  # that it wrote last

    def __init__(self, draw: Random, home: Path) -> None:
        (home / "dev/hugepages-1G").mkdir(parents=True)

        self.draw, self.home = draw, home
        self.story: list[str] = []
        self.kubelet = draw.choice(["prompt", "late", "stale", "lossy"])
        self.has_pause = draw.random() < 0.3
        self.twins = 0.0 if self.kubelet == "late" else draw.choice([0.0, 0.5, 3.0])
        self.times = draw.choice([[0.2, 5.0], [0.2, 5.0, 20.0], [20.0]])
        self.reloads = draw.choice([0.0, 0.0, 0.7])

        self.decision = decide(draw.choice([ONE, ONE, [*ONE, *PAIR]]))
        self.settings = CONFIGURATIONS[0]
        self.world = BookWorld(home)
        self.start_directories()
        self.save()

        self.pods, self.memory, self.written = [], [], []
        self.unwritten_since: float | None = None
        # The writing before, and whose entries are in it: without the pod that was admitted last.
        self.older: tuple[bytes, list[Pod]] | None = None
        self.manifest: tuple[str, int, list[str]] | None = None  # of the static pod
        self.listed: Listed | None = None  # the kubelet's answer, which is under way
        self.numbers = itertools.count()
        self.owners: dict[str, Pod] = {}  # by the name of an answer
        self.answered: dict[str, float] = {}  # when, by that name
        self.write()

    def go_on(self) -> None:
        """One of all that can happen now; no rule is broken then."""
        weights, names, happenings = zip(*self.moves(), strict=True)
        (number,) = self.draw.choices(range(len(names)), weights)
        self.story.append(f"{self.world.now:g} s: {names[number]}")

        happenings[number]()

        self.look()
        self.no_two_pods_run_on_one_chip()
        self.what_a_running_container_has_written_is_there()
        self.no_pods_id_is_missing_and_none_of_its_chips_is_offered()
        self.nobody_who_is_gone_has_chips()
        self.no_pod_has_the_name_of_another_one()

    def moves(self) -> Iterator[Move]:
        """Yield what can happen."""
        if len(self.pods) < MOST_PODS:
            if free := self.free_ids():
                yield 8, "a pod is admitted", lambda: self.a_pod_is_admitted(free)
            if taken := self.free_ids(is_twin=True):  # kubernetes #137534
                twin = "a pod is given another one's ID"
                yield self.twins, twin, lambda: self.a_pod_is_admitted(taken, is_twin=True)

        for pod in self.pods:
            yield from self.moves_of_pod(pod)

        forgets = 3 if self.remembered != self.memory else 0.5
        yield forgets, "the kubelet forgets and writes", self.the_kubelet_forgets_and_writes
        if self.listed is None:
            yield 2, "the kubelet is asked for names", self.the_kubelet_is_asked_for_names
        else:
            yield 2, "the names come", self.the_names_come
        yield 2, "time passes", lambda: self.time_passes(self.draw.choice(self.times))
        yield self.reloads, "the configuration changes", self.the_configuration_changes
        yield 0.4, "the daemon restarts", self.the_daemon_restarts
        if self.has_saved_answers:
            yield 0.4, "the daemon is killed", self.the_daemon_is_killed

        if self.older is not None:
            lands = 8 if self.kubelet == "stale" else 2
            yield lands, "an older writing lands", self.an_older_writing_lands
        yield 0.4, "the checkpoint is damaged", self.the_checkpoint_is_damaged
        if self.kubelet == "lossy":
            yield 1, "the kubelet restarts without its checkpoint", self.forget_all

        # Afterwards only what stands in the checkpoint is known.
        if self.unwritten_since is None:
            yield 0.3, "the node reboots", self.the_node_reboots
            busy = [pod for pod in self.pods if pod.busy]
            if all(pod in self.memory and pod.busy.state == "runs" for pod in busy if pod.busy):
                weight = 3 if self.older and self.pods and self.pods[-1].busy else 0.4
                yield weight, "the daemon is installed anew", self.the_daemon_is_installed_anew

    def moves_of_pod(self, pod: Pod) -> Iterator[Move]:
        if step := self.next_step(pod):
            weight = 1 if pod.waits else 9
            yield weight, f"{pod} goes on: {step.__name__}", lambda: step(pod)
        if pod.call:
            yield 0.5, f"{pod}: its call ends with an error", pod.end_call

        if pod.busy:
            fails = 1 if pod in self.memory else 4
            yield fails, f"{pod}: its container fails", lambda: self.a_container_fails(pod)
        if pod.lives and pod in self.written:
            yield 1, f"{pod} is deleted", lambda: pod.become("is deleted")
            weight = 8 if pod.waits else 3
            yield weight, f"{pod} is deleted by force", lambda: pod.become("was deleted by force")

        if self.kubelet == "lossy" and (free := self.ids_for_another_start(pod)):
            again = f"{pod} is given devices again"
            yield 9, again, lambda: self.a_pod_is_given_devices_again(pod, free)

        if self.can_call(pod):
            yield 0.5, f"{pod} is left alone", lambda: self.whoever_is_left_alone_may_start(pod)

    # -- the daemon

    def look(self) -> None:
        """Look at everything, and decide."""
        self.world.book.refresh(self.world.now, DOMAIN, look=True)
        seen = self.decision.observation._replace(
            settings=self.settings, holds=self.world.current()
        )
        self.decision = ttdp.decide(seen, self.decision)

    def start_directories(self) -> None:
        self.began_at = self.world.now
        self.directories = Directories(self.world.settings, self.began_at)

    def the_daemon_looks(self) -> None:
        """As at each turn of its loop."""
        self.look()
        for hold in self.decision.holds:
            self.directories.put_right(hold)

        self.clear()

    def clear(self, call: Call | None = None) -> None:
        book, now, holds = self.world.book, self.world.now, self.world.current()
        unnamed = set() if book.problem else self.directories.unnamed(holds, now)
        left_behind = book.left_behind(call, holds) if call else ()

        kept = call.directories if call else frozenset()
        self.directories.clear(unnamed - kept, left_behind, now, RemovalSteps())

    def answer(self, pod: Pod) -> bool:
        """Answer a PreStartContainer call, unless it must wait."""
        book, call, container = self.world.book, pod.call, pod.waiting
        assert call and container
        self.look()

        if book.was_deleted(call, self.world.now):
            assert pod not in self.memory or pod.is_overtaken  # then the kubelet tries again
            pod.call = None
            return True

        # One of the possible callers is or was in the checkpoint, or its entry was overtaken.
        callers = [self.owners[each.hold.name] for each in call.callers]
        was_there = any(self.world.now - each.left_at < MISSING_FOR for each in callers)
        is_overtaken = any(each.is_overtaken for each in callers)
        assert self.unwritten_since is not None or was_there or is_overtaken or pod.twin

        if others := book.waits_for(call, self.decision.holds):
            running = {each.uid for each in self.pods if each.may_run}
            is_unknown = self.kubelet == "late"  # whose answer it was
            assert all(each.pod in running or (is_unknown and not each.pod) for each in others)
            pod.waits = True
            return False

        for state in call.callers:
            self.directories.put_right(state.hold)
        self.clear(call)

        book.allow(call, self.world.now)
        self.save()
        for each in self.pods:
            each.may_run |= any(it.entry.held.ids == call.ids for it in each.containers)
        pod.call = None
        assert not [*self.pages_of_others(pod, container, call)]

        container.allowed_at = self.world.now
        container.cgroup = f"container-{next(self.numbers)}"
        container.state = "is created"
        self.show(pod)
        return True

    def pages_of_others(self, mine: Pod, container: Container, call: Call) -> Iterator[Path]:
        """Yield what pods that do not run have left on a container's chips.

        Not of a possible caller, nor while the daemon may not remove it.
        """
        is_young = self.world.now - self.began_at < WRITTEN_WITHIN
        if self.world.book.problem or container.is_shared:
            return

        callers = {state.hold.pod for state in call.callers}
        for pod in self.pods:
            if pod is mine or pod.busy or pod.uid in callers:
                continue

            for each in pod.containers:
                answered_at = min(pod.answered_at, self.answered[each.name])
                if is_young and answered_at < self.began_at:
                    continue
                is_there = each.directory.is_dir() and not each.is_shared
                is_others = str(each.directory) not in call.directories
                if is_there and is_others and not each.chips.isdisjoint(container.chips):
                    yield from each.directory.iterdir()

    def the_daemon_restarts(self) -> None:
        """This takes longer than a moment."""
        self.drop_calls()
        self.a_moment_passes()

        self.world = self.world.restarted()
        self.start_directories()
        self.the_daemon_looks()

    def save(self) -> None:
        self.saved = json.dumps(self.world.book.to_saved())
        self.has_saved_answers = True

    def the_daemon_is_killed(self) -> None:
        """The next one has the state that was saved last."""
        self.drop_calls()
        self.a_moment_passes()
        saved = [ttdp.HoldState.from_saved(each) for each in json.loads(self.saved)]
        seen = {state.hold.name for state in saved if state.cgroup_seen}
        self.world = BookWorld(self.home, saved, self.world.now)
        self.start_directories()
        had_cgroup = {pod for name, pod in self.owners.items() if name in seen}
        for pod in self.owners.values():
            pod.had_cgroup = pod.has_cgroup or pod in had_cgroup
        self.the_daemon_looks()

    def the_daemon_is_installed_anew(self) -> None:
        """Without a state file it takes every pod that has a cgroup for one that runs.

        What it cannot know is which containers are created, and which pods were forgotten. What it
        reads first may be an older writing.
        """
        self.drop_calls()
        self.world = BookWorld(self.home, now=self.world.now)
        self.start_directories()
        if self.older is not None:
            content, pods = self.older
            # What it has of a static pod's former life would be taken for the present one's.
            if all(pod.uid != STATIC for pod in pods):
                self.world.put(content)
                self.the_daemon_looks()

        self.write()
        for pod in self.owners.values():
            pod.had_cgroup = pod.may_run = pod.has_cgroup
            pod.answered_at = -math.inf
        self.the_daemon_looks()
        self.save()

    def the_configuration_changes(self) -> None:
        self.settings = self.draw.choice(CONFIGURATIONS)

    # -- the kubelet

    def read(self) -> None:
        """The daemon reads the checkpoint as soon as that has changed."""
        self.world.book.refresh(self.world.now, DOMAIN, look=False)

    def write(self) -> None:
        for pod in self.written:
            if pod not in self.memory:
                pod.left_at = self.world.now

        for pod in self.memory:
            pod.is_overtaken = False
        self.written = [*self.memory]
        self.unwritten_since = self.older = None
        self.world.write(*(each.entry for pod in self.memory for each in pod.containers))
        self.read()

    def a_moment_passes(self) -> None:
        """After which no older writing lands, and a prompt kubelet has written."""
        if self.kubelet not in ("late", "stale"):
            self.write()
        self.older = None

    @property
    def remembered(self) -> list[Pod]:
        """Pods that the kubelet does not forget: they have not ended, nor were deleted by force."""
        return [pod for pod in self.memory if pod.life in ("lives", "is deleted")]

    def the_kubelet_forgets_and_writes(self) -> None:
        self.memory = self.remembered
        self.write()

    def free_ids(self, *, is_twin: bool = False) -> dict[str, list[str]]:
        """Return IDs by resource that are healthy and nobody's, as this kubelet has it."""
        taken = {
            (each.entry.resource, ident)
            for pod in self.remembered
            for each in pod.containers
            for ident in each.entry.held.ids
        }

        found = {}
        for name, resource in sorted(self.decision.resources.items()):
            healthy = sorted(each for each, device in resource.devices.items() if not device.reason)
            if free := [each for each in healthy if ((name, each) in taken) is is_twin]:
                found[name] = free
        return found

    def a_pod_is_admitted(self, free: dict[str, list[str]], *, is_twin: bool = False) -> None:
        draw = self.draw
        self.memory = self.remembered

        name = draw.choice([*free])
        is_one = is_twin or self.decision.resource(name).replicas
        ids = free[name][: 1 if is_one else draw.choice([1, 1, 2])]

        number = next(self.numbers)
        # A kubelet that remembers the former one gives it the same devices, without an Allocate.
        is_gone = all(each.uid != STATIC for each in (*self.pods, *self.memory))
        containers = draw.choice([["main"], ["prepare", "main"]])
        wanted = (name, len(ids), containers)
        is_static = is_gone and draw.random() < 0.5 and self.manifest in (None, wanted)
        if is_static:
            self.manifest = wanted  # its UID is a digest of that

        pod = Pod(STATIC if is_static else f"uid-{number}", number)
        try:
            for container in containers:
                own = ids[:1] if container == "prepare" and draw.random() < 0.5 else ids
                pod.containers.append(self.allocate(pod, container, name, own))
        except ttdp.RequestError:
            return
        sets = {frozenset(each.entry.held.ids) for each in pod.containers}
        assert len({each.directory for each in pod.containers}) <= len(sets)

        if not is_twin and draw.random() < 0.1:
            return  # another plugin has refused the pod

        for other in self.memory if is_twin else ():
            if any(each.entry.held.ids & {*ids} for each in other.containers):
                pod.twin, other.twin = other, pod

        self.pods.append(pod)
        self.memory.append(pod)

        # The writing of a moment ago can still land after this one.
        if self.kubelet != "late":
            older = self.world.path.read_bytes(), self.written
            self.write()
            self.older = None if is_twin else older
        elif self.unwritten_since is None:
            self.unwritten_since = self.world.now

    def ids_for_another_start(self, pod: Pod) -> list[str]:
        """Return the free IDs for a pod that the kubelet has forgotten, and restarts."""
        is_forgotten = pod.lives and pod.has_cgroup and pod not in self.memory
        if not is_forgotten or pod.call or pod.busy or not pod.waiting:
            return []
        return self.free_ids().get(pod.waiting.entry.resource, [])

    def a_pod_is_given_devices_again(self, pod: Pod, free: list[str]) -> None:
        """A kubelet that has lost its checkpoint allocates anew before it starts a container."""
        self.memory = self.remembered
        try:
            for number, each in enumerate(pod.containers):
                if each.state == "waits":
                    container, resource = each.entry.container, each.entry.resource
                    ids = [self.draw.choice(free)]
                    pod.containers[number] = self.allocate(pod, container, resource, ids)
        except ttdp.RequestError:
            return
        pod.left_at = math.inf
        self.memory.append(pod)
        self.write()

    def allocate(self, pod: Pod, container: str, resource: str, ids: list[str]) -> Container:
        """Answer Allocate; raises RequestError."""
        world = self.world
        world.now += 0.001  # no two answers are given at one moment
        self.look()
        ttdp.check_request(self.decision.resource(resource), [ids])

        hold = ttdp.Hold(resource, frozenset(ids), name=f"answer-{next(self.numbers)}")
        self.owners[hold.name], self.answered[hold.name] = pod, world.now

        name = world.book.directory_for(hold, world.now) or hold.name
        hugetlbfs = ttdp.hugetlbfs_mounts(world.settings)
        mounts = self.directories.make_for_hugepages(name, hugetlbfs)

        chips = self.decision.resource(resource).chips(ids)
        answer = ttdp.container_edits(chips, {}, self.settings, mounts, hold.name)
        hold = ttdp.read_answer(answer).of(resource, ids)

        world.book.add(hold, world.now)
        self.has_saved_answers = False
        pod.answered_at = world.now
        entry = Entry(pod.uid, container, resource, Held({-1: ids}, answer))
        return Container(entry, hold.name, hold.chips, Path(hold.directories[0]))

    def the_sandbox_starts(self, pod: Pod) -> None:
        pod.has_cgroup = pod.had_cgroup = True
        pod.has_pause = self.has_pause
        self.show(pod)

    def the_kubelet_calls(self, pod: Pod) -> None:
        """A pod that was forgotten is no possible caller, once its devices were given away."""
        self.world.now += 0.001  # nor does a call come at the moment of another event
        self.look()
        assert pod.waiting

        entry = pod.waiting.entry
        resource, ids = entry.resource, frozenset(entry.held.ids)
        chips = frozenset(each.bdf for each in self.decision.resource(resource).chips(ids))
        pod.call = self.world.book.call(resource, ids, chips, self.world.now)
        pod.called_at, pod.waits = self.world.now, False

        for state in pod.call.callers if self.unwritten_since is None else ():
            caller = self.owners[state.hold.name]
            is_older = caller.answered_at < pod.answered_at
            assert not state.hold.pod or caller in self.written or not is_older

    def can_call(self, pod: Pod) -> bool:
        is_ready = pod.lives and pod.has_cgroup and pod in self.memory
        return bool(is_ready and pod.waiting and not pod.call)

    def an_older_writing_lands(self) -> None:
        """It overtook the one with the pod's entry, and stays until the next one."""
        if self.older is not None:
            content, pods = self.older
            self.world.put(content)
            self.written += [pod for pod in pods if pod not in self.written]
            for pod in self.memory:
                pod.is_overtaken = pod not in pods
        self.unwritten_since, self.older = self.world.now, None
        self.read()

    def the_checkpoint_is_damaged(self) -> None:
        """Until the kubelet writes again."""
        self.world.put(b"{}")
        if self.unwritten_since is None:
            self.unwritten_since = self.world.now
        self.read()

    def forget_all(self) -> None:
        """A kubelet that restarts without its checkpoint knows no pod, while they run on."""
        self.drop_calls()
        self.memory = []
        self.write()

    def drop_calls(self) -> None:
        self.listed = None
        for pod in self.pods:
            pod.call = None

    def the_kubelet_is_asked_for_names(self) -> None:
        """It names those who have the devices now, but no init containers."""
        self.memory = self.remembered
        names: dict[tuple[str, str, str], set[str]] = {}
        for pod in self.memory:
            for ident in pod.containers[-1].entry.held.ids:
                key = (pod.containers[-1].entry.resource, ident, "main")
                names.setdefault(key, set()).add(f"default/{pod.uid}")

        self.listed = names, self.world.keys()

    def the_names_come(self) -> None:
        assert self.listed
        self.world.book.apply_names(*self.listed)
        self.listed = None

    def next_step(self, pod: Pod) -> Callable[[Pod], object] | None:
        if pod.call:
            return self.answer

        if pod.busy:
            return (
                self.a_container_runs if pod.busy.state == "is created" else self.a_container_ends
            )

        if not pod.lives:
            return self.the_cgroup_goes if pod.life == "has ended" else self.the_sandbox_ends

        if not pod.has_cgroup:
            return self.the_sandbox_starts
        return self.the_kubelet_calls if self.can_call(pod) else None

    def show(self, pod: Pod) -> None:
        """Show a pod's cgroup as it is."""
        if not pod.has_cgroup:
            self.world.remove_cgroup(pod.uid)
            return

        names = [each.cgroup for each in pod.containers if each.state == "runs"]
        if pod.has_pause:
            names.append("pause")
        self.world.make_cgroup(pod.uid, *names)

    def a_container_runs(self, pod: Pod) -> None:
        """It finds an empty directory, but for what its own pod has left there."""
        container = pod.busy
        assert container
        container.state = "runs"
        self.show(pod)

        directory = container.directory
        assert directory.is_dir() and directory.stat().st_mode & 0o7777 == 0o777

        found = {*directory.iterdir()}
        if pod.lives and not pod.twin and not container.is_shared:
            assert found == {path for path in pod.files if path.parent == directory}

        file = directory / str(pod.number)
        file.touch()
        pod.files.add(file)

    def a_container_fails(self, pod: Pod) -> None:
        """It is tried again."""
        assert pod.busy
        pod.busy.state = "waits"
        self.show(pod)

    def a_container_ends(self, pod: Pod) -> None:
        assert pod.busy
        pod.busy.state = "is over"
        self.show(pod)

    def the_sandbox_ends(self, pod: Pod) -> None:
        pod.life, pod.has_pause = "has ended", False
        self.show(pod)

    def the_cgroup_goes(self, pod: Pod) -> None:
        pod.has_cgroup = False
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
            creating = pod.busy and pod.busy.state == "is created"
            if pod.busy and creating and then - pod.busy.allowed_at >= CREATED_WITHIN:
                self.a_container_fails(pod)

        self.world.now = then
        self.the_daemon_looks()

        if seconds >= 5:
            self.world.book.note_ended_pods()
            self.save()
        for pod in self.pods:
            if pod.call and then - pod.called_at >= CALL_LASTS:
                pod.call = None

    def the_node_reboots(self) -> None:
        """hugetlbfs is empty, and the kubelet knows what stands in its checkpoint."""
        self.drop_calls()
        self.older = None
        self.pods = [pod for pod in self.pods if pod.lives]

        for pod in self.owners.values():
            pod.has_cgroup = pod.had_cgroup = pod.has_pause = pod.may_run = False
            pod.answered_at = -math.inf
            pod.files.clear()
            for each in pod.containers:
                each.state = "waits"

        shutil.rmtree(self.world.cgroups)
        for directory in (self.home / "dev/hugepages-1G").iterdir():
            shutil.rmtree(directory)

        self.world = BookWorld(self.home, now=5.0)
        self.start_directories()
        self.the_daemon_looks()
        self.save()

    # -- what must hold

    def whoever_is_left_alone_may_start(self, mine: Pod) -> None:
        """At the latest when neither a checkpoint nor a container can be late any more."""
        self.drop_calls()
        for pod in self.pods:
            if pod is not mine:
                pod.life, pod.has_cgroup = "has ended", False
                self.show(pod)

        self.pods = [mine]
        self.the_kubelet_forgets_and_writes()
        for _ in range(7):
            self.time_passes(20.0)

        self.the_kubelet_calls(mine)
        assert self.answer(mine) and mine.busy, "it waits for nobody"

        self.the_kubelet_is_asked_for_names()
        self.the_names_come()
        assert mine.twin or mine.uid in self.world.book.names

    def users(self) -> Iterator[tuple[Pod, Container]]:
        """Yield who has chips: containers that run, and those of pods that the kubelet knows."""
        for pod in self.pods:
            is_known = pod.lives and pod in self.memory
            yield from ((pod, each) for each in pod.containers if is_known or each.is_busy)

    def no_two_pods_run_on_one_chip(self) -> None:
        running = [(pod, each) for pod, each in self.users() if each.state == "runs"]
        for (one, first), (two, second) in itertools.combinations(running, 2):
            if one is not two and not first.chips.isdisjoint(second.chips):
                assert first.shares(second.entry.resource, second.entry.held.ids)

    def what_a_running_container_has_written_is_there(self) -> None:
        for pod, each in self.users():
            assert each.state != "runs" or (each.directory / str(pod.number)).exists()

    def no_pods_id_is_missing_and_none_of_its_chips_is_offered(self) -> None:
        decision = self.decision
        held = {(each.resource, ident) for each in decision.holds for ident in each.ids}
        for _, each in self.users():
            mine = decision.resources[each.entry.resource].devices
            assert all(mine[ident].reason is None for ident in each.entry.held.ids)

            for name, resource in decision.resources.items():
                for ident, device in resource.devices.items():
                    is_free = (name, ident) not in held and not device.reason
                    if is_free and not device.addresses.isdisjoint(each.chips):
                        assert each.shares(name, {ident})

    def nobody_who_is_gone_has_chips(self) -> None:
        """Nor a pod that the kubelet does not have, and that does not run.

        Nor a container those that it had before it was given others.
        """
        running = {
            (pod.uid, chip)
            for pod in self.pods
            for each in pod.containers
            for chip in each.chips
            if pod.may_run
        }
        cgroups = {pod.uid for pod in self.pods if pod.has_cgroup}
        valid = {each.name for pod in self.owners.values() for each in pod.containers}

        for hold in self.decision.holds:
            pod = self.owners[hold.name]
            answered_at = min(pod.answered_at, self.answered[hold.name])
            is_recent = self.world.now - answered_at < WRITTEN_WITHIN
            assert not hold.pod or pod.uid in cgroups or not pod.had_cgroup
            if hold.pod and self.unwritten_since is None and not is_recent:
                is_written = pod in self.written and hold.name in valid
                assert is_written or all((pod.uid, each) in running for each in hold.chips)

    def no_pod_has_the_name_of_another_one(self) -> None:
        for uid, name in self.world.book.names.items():
            assert name == f"default/{uid}"


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
