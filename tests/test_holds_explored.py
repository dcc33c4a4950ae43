"""Holds, explored: pods come and go in any order, and no rule is ever broken.

The moves are those of a kubelet, a runtime and an administrator. Checkpoint, cgroups and hugepage
directories are real files, the clock is the test's. Nothing depends on the machine's time.

Assumed: the kubelet writes within 30 s, and creates a container within 120 s. Nobody deletes a pod
whose entry was never written. A kubelet that has forgotten a pod's devices starts none of its
containers. A pod that was refused did not have an ID of another one. A static pod that returns
under its UID asks for the same devices. The daemon does not restart while an answer is not written.
"""

from __future__ import annotations

import contextlib
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
from ttdp import Call, RequestError, Settings, SharedResource, Sharing

SEEDS = 32
STORIES = 8  # of each seed
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
STATIC = "static"  # the UID of a pod that can come back


@dataclass(eq=False)
class Container:
    entry: Entry
    token: str
    chips: frozenset[str]
    directory: Path
    state: str = "waits"  # "is created", "runs", "is over"
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
    has_cgroup: bool = False
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


class Node:
    """A node, and what happens to it."""

    pods: list[Pod]  # until nothing is left of them
    memory: list[Pod]  # to which the kubelet has given devices
    written: list[Pod]  # that it wrote last

    def __init__(self, draw: Random, home: Path) -> None:
        (home / "dev/hugepages-1G").mkdir(parents=True)

        self.draw, self.home = draw, home
        self.directories = ttdp.Directories()
        self.story: list[str] = []
        self.kubelet = draw.choice(["prompt", "late", "stale", "lossy"])
        self.has_pause = draw.random() < 0.3
        self.twins = 0.0 if self.kubelet == "late" else draw.choice([0.0, 0.5, 3.0])
        self.times = draw.choice([[0.2, 5.0], [0.2, 5.0, 20.0], [20.0]])
        self.reloads = draw.choice([0.0, 0.0, 0.7])

        self.chips = draw.choice([ONE, ONE, [*ONE, *PAIR]])
        self.settings = CONFIGURATIONS[0]
        self.world = BookWorld(home)
        self.connected_at = -math.inf  # for so long a kubelet has been connected

        self.pods, self.memory, self.written = [], [], []
        self.unwritten_since: float | None = None
        # The writing before, and whose entries are in it: without the pod that was admitted last.
        self.older: tuple[bytes, list[Pod]] | None = None
        self.manifest: tuple[str, int, list[str]] | None = None  # of the static pod
        self.numbers = itertools.count()
        self.owners: dict[str, Pod] = {}  # by the token of an answer
        self.coming: set[str] = set()  # tokens of this daemon's answers, until a cgroup was seen
        # Token and time of the last answer, by resource and IDs.
        self.newest: dict[tuple[str, frozenset[str]], tuple[str, float]] = {}
        self.seen: set[str] = set()  # tokens in the last checkpoint that could be read
        self.look()
        self.save()
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
        yield 2, "time passes", lambda: self.time_passes(self.draw.choice(self.times))
        yield self.reloads, "the configuration changes", self.the_configuration_changes
        if self.older is not None:
            lands = 8 if self.kubelet == "stale" else 2
            yield lands, "an older writing lands", self.an_older_writing_lands
        yield 0.4, "the checkpoint is damaged", self.the_checkpoint_is_damaged
        if self.kubelet == "lossy":
            yield 1, "the kubelet restarts without its checkpoint", self.forget_all

        # Afterwards only what stands in the checkpoint is known.
        if self.unwritten_since is None:
            yield 0.3, "the node reboots", self.the_node_reboots
            yield 0.3, "the kubelet and its slice are stopped", self.the_slice_is_stopped
            yield 0.8, "the daemon restarts", self.the_daemon_restarts
            busy = [pod for pod in self.pods if pod.busy]
            if all(pod in self.memory and pod.busy.state == "runs" for pod in busy if pod.busy):
                yield 0.4, "the daemon is installed anew", self.the_daemon_is_installed_anew

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

        if self.can_call(pod):
            yield 0.5, f"{pod} is left alone", lambda: self.whoever_is_left_alone_may_start(pod)

    # -- the daemon

    def look(self) -> None:
        """Look at everything, and decide."""
        self.world.look()
        self.decision = decide(self.chips, self.settings, self.world.current())
        # While an older writing is there, which is for milliseconds, no cgroup is noticed.
        self.coming -= {each for each in self.seen & self.coming if self.owners[each].has_cgroup}

    def put_directories_in_order(self) -> None:
        """As at a poll, and before a start."""
        world = self.world
        named: set[str] = set()
        for hold in [*world.current(), *world.book.unwritten(world.now)]:
            named.update(hold.directories)

        if world.book.has_read:
            for parent, names in ttdp.unnamed_directories(named, world.settings).items():
                for name in names:
                    shutil.rmtree(Path(parent, name))
        self.directories.make_missing(named, world.settings)
        assert not self.directories.problems

    def answer(self, pod: Pod) -> bool:
        """Answer a PreStartContainer call, unless it must wait."""
        book, call, container = self.world.book, pod.call, pod.waiting
        assert call and container
        self.look()
        try:
            blockers = book.blockers(call, self.world.now)
        except RequestError:
            # Then the kubelet tries again, if it still has the pod.
            is_superseded = self.newest[call.resource, call.ids][1] > call.came_at
            is_missing = any(each.token not in self.seen for each in pod.containers)
            assert pod not in self.memory or is_missing or is_superseded
            pod.call = None
            return True

        if blockers is None:
            assert self.is_unknown(call)
        if blockers or blockers is None:
            running = {each.uid for each in self.pods if each.may_run}
            # An older writing can have the entry of a static pod's former life.
            assert {each.pod for each in blockers or ()} <= running | {STATIC}
            pod.waits = True
            return False

        book.allow(call, self.world.now)
        self.save()
        self.put_directories_in_order()
        for each in self.pods:
            each.may_run |= each.uid in call.callers
        assert pod.may_run, "it is not among the callers"
        pod.call = None

        container.allowed_at = self.world.now
        container.state = "is created"
        self.show(pod)
        return True

    def is_unknown(self, call: Call) -> bool:
        """Whether the checkpoint that was read does not tell whose a call is."""
        token, at = self.newest[call.resource, call.ids]
        if self.world.now - at < WRITTEN_WITHIN and token not in self.seen:
            return True
        for pod in self.pods:
            for each in pod.containers:
                mine = each.entry.resource, frozenset(each.entry.held.ids)
                if pod.has_cgroup and each.token in self.seen and mine == (call.resource, call.ids):
                    return False
        return True

    def save(self) -> None:
        self.saved = json.dumps(self.world.book.to_saved())

    def start_daemon(self, saved: ttdp.SavedHolds) -> None:
        """Start the next daemon, to which the kubelet connects at once.

        A pod with a cgroup that it finds in the checkpoint counts as started.
        """
        self.world = BookWorld(self.home, saved, self.world.now, connected=0.0)
        self.connected_at = self.world.now
        self.coming = set()
        for pod in self.pods:
            pod.may_run |= pod.has_cgroup and any(it.token in self.seen for it in pod.containers)
        self.look()
        self.put_directories_in_order()

    def the_daemon_restarts(self) -> None:
        """The next one has the state that was saved last. This takes longer than a moment."""
        self.drop_calls()
        self.a_moment_passes()
        self.start_daemon(ttdp.saved_holds(json.loads(self.saved)))

    def the_daemon_is_installed_anew(self) -> None:
        """Without a state file it takes every pod that has a cgroup for one that runs."""
        self.drop_calls()
        self.a_moment_passes()
        self.write()
        for pod in self.pods:
            pod.may_run = False
        self.start_daemon(ttdp.SavedHolds())
        self.save()

    def the_configuration_changes(self) -> None:
        self.settings = self.draw.choice(CONFIGURATIONS)

    # -- the kubelet

    def read(self) -> None:
        """The daemon reads the checkpoint as soon as that has changed."""
        self.world.book.refresh(self.world.now, look=False)

    def write(self) -> None:
        self.written = [*self.memory]
        self.unwritten_since = self.older = None
        self.world.write(*(each.entry for pod in self.memory for each in pod.containers))
        self.seen = {each.token for pod in self.memory for each in pod.containers}
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

    def allocate(self, pod: Pod, container: str, resource: str, ids: list[str]) -> Container:
        """Answer Allocate; raises RequestError."""
        world = self.world
        world.now += 0.001  # no two answers are given at one moment
        self.look()
        ttdp.check_request(self.decision.resource(resource), [ids])

        wanted, token = frozenset(ids), f"answer-{next(self.numbers)}"
        self.owners[token] = pod
        self.coming.add(token)
        self.newest[resource, wanted] = token, world.now

        name = world.book.hugepages_for(resource, wanted, world.now) or token
        mounts = self.directories.make_for_hugepages(name, world.settings)
        chips = self.decision.resource(resource).chips(ids)
        answer = ttdp.container_edits(chips, {}, self.settings, mounts, token)
        hold = ttdp.hold_of(answer, resource, wanted)

        world.book.add(hold, world.now)
        entry = Entry(pod.uid, container, resource, Held({-1: ids}, answer))
        return Container(entry, token, hold.chips, Path(hold.directories[0]))

    def the_sandbox_starts(self, pod: Pod) -> None:
        pod.has_cgroup = True
        pod.has_pause = self.has_pause
        self.show(pod)

    def the_kubelet_calls(self, pod: Pod) -> None:
        self.world.now += 0.001  # no call comes at the moment of another event
        assert pod.waiting
        pod.call = self.world.call(pod.waiting.entry)
        pod.called_at, pod.waits = self.world.now, False

    def can_call(self, pod: Pod) -> bool:
        is_ready = pod.lives and pod.has_cgroup and pod in self.memory
        return bool(is_ready and pod.waiting and not pod.call)

    def an_older_writing_lands(self) -> None:
        """It overtook the one with the pod's entry, and stays until the next one."""
        if self.older is not None:
            content, pods = self.older
            self.world.put(content)
            with contextlib.suppress(LookupError):  # it was damaged
                entries = map(Entry.parse, json.loads(content)["Data"]["PodDeviceEntries"] or ())
                self.seen = {each.held.answer.annotations[ttdp.TOKEN] for each in entries}
            self.written += [pod for pod in pods if pod not in self.written]
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
        for pod in self.pods:
            pod.call = None

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

        runs = any(each.state == "runs" for each in pod.containers)
        self.world.make_cgroup(pod.uid, populated=runs or pod.has_pause)

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
            creating = pod.busy and pod.busy.state == "is created"
            if pod.busy and creating and then - pod.busy.allowed_at >= CREATED_WITHIN:
                self.a_container_fails(pod)

        self.world.now = then
        self.look()
        if seconds >= 5:
            self.put_directories_in_order()
            self.save()
        for pod in self.pods:
            if pod.call and then - pod.called_at >= CALL_LASTS:
                pod.call = None

    def the_node_reboots(self) -> None:
        """hugetlbfs is empty, and the kubelet knows what stands in its checkpoint."""
        for directory in (self.home / "dev/hugepages-1G").iterdir():
            shutil.rmtree(directory)
        for pod in self.owners.values():
            pod.files.clear()
        self.all_pods_end()

        self.world.now = 5.0
        self.newest = {key: (token, -math.inf) for key, (token, _) in self.newest.items()}
        self.start_daemon(ttdp.SavedHolds())
        self.save()

    def the_slice_is_stopped(self) -> None:
        """As by `systemctl stop kubelet kubepods.slice`: the kubelet starts the pods again."""
        self.world.book.note_stream(self.world.now, is_open=False)
        self.all_pods_end()
        self.look()
        self.put_directories_in_order()
        self.save()
        self.world.book.note_stream(self.world.now, is_open=True)
        self.connected_at = self.world.now

    def all_pods_end(self) -> None:
        self.drop_calls()
        self.older = None
        self.pods = [pod for pod in self.pods if pod.lives and pod in self.memory]
        for pod in self.owners.values():
            pod.has_cgroup = pod.has_pause = pod.may_run = False
            for each in pod.containers:
                each.state = "waits"
        for cgroup in (self.world.cgroups / "kubepods/burstable").iterdir():
            shutil.rmtree(cgroup)

    # -- what must hold

    def whoever_is_left_alone_may_start(self, mine: Pod) -> None:
        """At the latest when neither a checkpoint nor a container can be late any more."""
        self.drop_calls()
        for pod in self.pods:
            if pod is not mine:
                pod.life, pod.has_cgroup, pod.may_run = "has ended", False, False
                self.show(pod)

        self.pods = [mine]
        self.the_kubelet_forgets_and_writes()
        for _ in range(7):
            self.time_passes(20.0)

        self.the_kubelet_calls(mine)
        assert self.answer(mine) and mine.busy, "it waits for nobody"

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
        is_young = self.world.now - self.connected_at < CREATED_WITHIN
        for pod, each in self.users():
            if each.token not in self.seen and not pod.may_run:
                continue  # it is not written yet, or an older writing is there
            if not pod.has_cgroup and not is_young and each.token not in self.coming:
                continue  # it was not started again within two minutes

            mine = decision.resources[each.entry.resource].devices
            assert all(mine[ident].reason is None for ident in each.entry.held.ids)

            for name, resource in decision.resources.items():
                for ident, device in resource.devices.items():
                    is_free = (name, ident) not in held and not device.reason
                    if is_free and not device.addresses.isdisjoint(each.chips):
                        assert each.shares(name, {ident})

    def nobody_who_is_gone_has_chips(self) -> None:
        """Nor a pod that the kubelet does not have, and that does not run."""
        is_young = self.world.now - self.connected_at < CREATED_WITHIN
        cgroups = {pod.uid for pod in self.pods if pod.has_cgroup}
        running = {pod.uid for pod in self.pods if pod.may_run}
        for hold in self.decision.holds:
            if hold.token in self.seen:
                assert hold.pod in cgroups or hold.token in self.coming or is_young
            else:
                # An older writing can have the entry of a static pod's former life.
                assert hold.pod in cgroups and (hold.pod in running or hold.pod == STATIC)


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
