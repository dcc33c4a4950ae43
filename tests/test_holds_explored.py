"""Holds, explored: pods come and go in any order, and no rule is ever broken.

The moves are those of a kubelet, a runtime and an administrator. Checkpoint, cgroups and hugepage
directories are real files, the clock is the test's. Nothing depends on the machine's time.

Assumed: the kubelet writes within 30 s, and creates a container within 120 s. Nobody deletes a pod
whose entry was never written. A kubelet that has forgotten a pod does not start its containers.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import note
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ttdp
from tests.chips import bdf, chip, decide
from tests.world.book import BookWorld
from tests.world.checkpoint import Entry, Held
from ttdp import Call, Chip, Directories, Settings, SharedResource, Sharing, Steps

SERIAL = "0000046131842007"
PAIR = [chip(bus, "p300c", ordinal=bus, serial=SERIAL) for bus in (2, 3)]
ONE = [chip(1, "p150a", ordinal=1)]
TWICE = tuple(SharedResource(name, 2) for name in ("p150", "p300"))
HALF = tuple(SharedResource(name, 2, f"{name}.half", 1) for name in ("p150", "p300"))
CONFIGURATIONS = [  # what a reload can change
    Settings(),
    Settings(resource_naming="card"),
    Settings(unit="board", resource_naming="arch"),
    Settings(sharing=Sharing(resources=TWICE)),
    Settings(sharing=Sharing(resources=HALF)),
    Settings(exclude=(bdf(1), bdf(2))),
]
CALL_LASTS = 25.0  # seconds
MOST_PODS = 3
STATIC = "static"  # the UID of a pod that can come back
DOMAIN = CONFIGURATIONS[0].resource_domain


@dataclass(eq=False, repr=False)
class Container:
    name: str
    entry: Entry
    state: str = "waits"  # "is created", "runs", "is over"
    cgroup: str = ""
    allowed_at: float = 0.0

    @property
    def is_busy(self) -> bool:
        return self.state in ("is created", "runs")

    @property
    def directory(self) -> Path:
        return Path(self.entry.held.answer.mounts[0].host_path)

    @property
    def is_shared(self) -> bool:
        return any("::" in ident for ident in self.entry.held.ids)

    @property
    def chips(self) -> frozenset[str]:
        return ttdp.read_answer(self.entry.held.answer).chips

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
    is_written: bool = False
    call: Call | None = None
    called_at: float = 0.0
    twin: Pod | None = None  # the kubelet has given both one ID
    files: set[Path] = field(default_factory=set)  # that it has left in its directories

    def __repr__(self) -> str:
        return f"pod {self.number} ({self.uid})"

    @property
    def lives(self) -> bool:
        return self.life == "lives"

    def end(self, life: str) -> None:
        self.life = life

    def end_call(self) -> None:
        self.call = None

    @property
    def waiting(self) -> Container | None:
        """The container that is to be started next, if there is one."""
        left = [each for each in self.containers if each.state != "is over"]
        return left[0] if left and left[0].state == "waits" else None

    @property
    def busy(self) -> Container | None:
        """The container that is created or runs."""
        return next((each for each in self.containers if each.is_busy), None)


Move = tuple[float, str, Callable[[Random], object]]  # with its weight


class Node(RuleBasedStateMachine):
    """A node, and what happens to it."""

    pods: list[Pod]  # until nothing is left of them
    memory: list[Pod]  # to which the kubelet has given devices

    @initialize(
        chips=st.sampled_from([ONE, ONE, [*ONE, *PAIR]]),
        has_pause=st.booleans(),
        kubelet=st.sampled_from(["prompt", "late", "lossy"]),
    )
    def boot(self, chips: list[Chip], has_pause: bool, kubelet: str) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(dir=memory))
        (self.home / "dev/hugepages-1G").mkdir(parents=True)
        self.has_pause, self.kubelet = has_pause, kubelet
        self.decision = decide(chips)
        self.settings = CONFIGURATIONS[0]
        self.world = BookWorld(self.home)
        self.start_directories(self.world.now)
        self.pods = []
        self.memory = []
        self.unwritten_since: float | None = None
        self.older: bytes | None = None  # that lacks the pod which was admitted last
        self.numbers = itertools.count()
        self.write()

    @rule(seed=st.integers(0, 2**16 - 1))
    def something_happens(self, seed: int) -> None:
        """One of all that can happen now."""
        draw = Random(seed)
        weights, names, happenings = zip(*self.moves(), strict=True)
        (number,) = draw.choices(range(len(names)), weights)
        note(f"{self.world.now:g} s: {names[number]}")
        happenings[number](draw)

    def moves(self) -> Iterator[Move]:
        """Yield what can happen."""
        if len(self.pods) < MOST_PODS:
            yield 8, "a pod is admitted", self.a_pod_is_admitted
        for pod in self.pods:
            yield from self.moves_of_pod(pod)

        yield 1, "the kubelet forgets and writes", lambda _: self.the_kubelet_forgets_and_writes()
        yield 2, "time passes", lambda draw: self.time_passes(draw.choice([0.2, 5.0, 20.0]))
        yield 0.7, "the configuration changes", self.the_configuration_changes
        yield 0.4, "the daemon restarts", lambda _: self.the_daemon_restarts()
        if self.older is not None:
            yield 2, "an older writing lands", lambda _: self.an_older_writing_lands()
        yield 0.4, "the checkpoint is damaged", lambda _: self.the_checkpoint_is_damaged()
        if self.kubelet == "lossy":
            yield 0.4, "the kubelet restarts without its checkpoint", lambda _: self.forget_all()
        if self.unwritten_since is None:
            yield 0.3, "the node reboots", lambda _: self.the_node_reboots()
            busy = [pod for pod in self.pods if pod.busy]
            if all(pod in self.memory and pod.busy.state == "runs" for pod in busy if pod.busy):
                anew = "the daemon is installed anew"
                yield 0.3, anew, lambda _: self.the_daemon_is_installed_anew()

    def moves_of_pod(self, pod: Pod) -> Iterator[Move]:
        if step := self.next_step(pod):
            yield 9, f"{pod} goes on: {step.__name__}", lambda _: step(pod)
        if pod.call:
            yield 0.5, f"{pod}: its call ends with an error", lambda _: pod.end_call()
        if pod.busy:
            yield 1, f"{pod}: its container fails", lambda _: self.a_container_fails(pod)
        if pod.lives and pod.is_written:
            yield 1, f"{pod} is deleted", lambda _: pod.end("is deleted")
            yield 3, f"{pod} is deleted by force", lambda _: pod.end("was deleted by force")
        if self.can_call(pod):
            yield 0.5, f"{pod} is left alone", lambda _: self.whoever_is_left_alone_may_start(pod)

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home)

    # -- the daemon

    def decide(self) -> ttdp.Decision:
        seen = self.decision.observation._replace(
            settings=self.settings, holds=self.world.current()
        )
        self.decision = ttdp.decide(seen, self.decision)
        return self.decision

    def start_directories(self, began_at: float) -> None:
        self.began_at = began_at
        self.directories = Directories(self.world.settings, began_at)

    def the_daemon_looks(self) -> None:
        """As at each turn of its loop."""
        self.world.look()
        for hold in self.world.current():
            self.directories.put_right(hold)
        self.clear()

    def clear(self, call: Call | None = None) -> None:
        book, now, holds = self.world.book, self.world.now, self.world.current()
        unnamed = set() if book.problem else self.directories.unnamed(holds, now)
        left_behind = book.left_behind(call, holds) if call else ()
        kept = call.directories if call else frozenset()
        self.directories.clear(unnamed - kept, left_behind, now, Steps())

    def answer(self, pod: Pod) -> bool:
        """Answer a PreStartContainer call, unless it must wait."""
        book, call, container = self.world.book, pod.call, pod.waiting
        assert call and container
        self.world.look()
        if book.was_deleted(call, self.world.now):
            pod.call = None
            return True
        if book.waits_for(call, self.world.current()):
            return False

        for state in call.callers:
            self.directories.put_right(state.hold)
        self.clear(call)
        book.allow(call, self.world.now)
        pod.call = None
        assert not [*self.pages_of_others(pod, container, call)]
        container.allowed_at = self.world.now
        container.cgroup = f"container-{next(self.numbers)}"
        container.state = "is created"
        self.show(pod)
        return True

    def pages_of_others(self, mine: Pod, container: Container, call: Call) -> Iterator[Path]:
        """Yield what pods that do not run have left on a container's chips.

        Not of a possible caller, nor while the daemon may remove nothing.
        """
        is_young = self.world.now - self.began_at < ttdp.WRITTEN_WITHIN
        if is_young or self.world.book.problem or container.is_shared:
            return
        callers = {state.hold.pod for state in call.callers}
        for pod in self.pods:
            if pod is mine or pod.busy or pod.uid in callers:
                continue
            for each in pod.containers:
                is_there = each.directory.is_dir() and not each.is_shared
                if is_there and not each.chips.isdisjoint(container.chips):
                    yield from each.directory.iterdir()

    def the_daemon_restarts(self) -> None:
        """This takes longer than the moment in which an older writing is there."""
        self.drop_calls()
        if self.kubelet != "late":
            self.write()
        self.world = self.world.restarted()
        self.start_directories(self.world.now)
        self.the_daemon_looks()

    def the_daemon_is_installed_anew(self) -> None:
        """Without a state file it takes every pod that has a cgroup for one that runs.

        What it cannot know is which containers are created, and which pods were forgotten.
        """
        self.drop_calls()
        self.older = None
        self.world = BookWorld(self.home, now=self.world.now)
        self.start_directories(-math.inf)
        self.the_daemon_looks()

    def the_configuration_changes(self, draw: Random) -> None:
        self.settings = draw.choice(CONFIGURATIONS)

    # -- the kubelet

    def read(self) -> None:
        """The daemon reads the checkpoint as soon as that has changed."""
        self.world.book.refresh(self.world.now, DOMAIN, look=False)

    def write(self) -> None:
        for pod in self.memory:
            pod.is_written = True
        self.unwritten_since = self.older = None
        self.world.write(*(each.entry for pod in self.memory for each in pod.containers))
        self.read()

    def forget(self) -> None:
        """Forget pods that have ended or were deleted by force."""
        self.memory = [pod for pod in self.memory if pod.life in ("lives", "is deleted")]

    def the_kubelet_forgets_and_writes(self) -> None:
        self.forget()
        self.write()

    def a_pod_is_admitted(self, draw: Random) -> None:
        """It gets devices of some resource that are healthy and nobody's, by this kubelet."""
        self.forget()
        resources = list(self.decide().resources.values())
        if not resources:
            return
        resource = draw.choice(resources)
        is_twin = draw.random() < 0.1  # kubernetes #137534: it gives an ID to two pods
        taken = {
            ident
            for pod in self.memory
            for each in pod.containers
            if each.entry.resource == resource.name
            for ident in each.entry.held.ids
        }
        healthy = [ident for ident, device in resource.devices.items() if not device.reason]
        free = [ident for ident in healthy if (ident in taken) is is_twin]
        ids = free[: 1 if resource.replicas or is_twin else draw.choice([1, 1, 2])]
        if not ids:
            return

        number = next(self.numbers)
        is_static = draw.random() < 0.5 and all(pod.uid != STATIC for pod in self.pods)
        pod = Pod(STATIC if is_static else f"uid-{number}", number)
        try:
            for name in draw.choice([["main"], ["prepare", "main"]]):
                pod.containers.append(self.allocate(pod, name, resource.name, ids))
        except ttdp.RequestError:
            return
        assert len({each.directory for each in pod.containers}) == 1
        for other in self.memory if is_twin else ():
            if any(each.entry.held.ids & {*ids} for each in other.containers):
                pod.twin, other.twin = other, pod
        self.pods.append(pod)
        self.memory.append(pod)
        if self.kubelet != "late":
            older = self.world.path.read_bytes()
            self.write()
            self.older = None if is_twin else older
        elif self.unwritten_since is None:
            self.unwritten_since = self.world.now

    def allocate(self, pod: Pod, container: str, resource: str, ids: list[str]) -> Container:
        """Answer Allocate; raises RequestError."""
        world = self.world
        world.now += 0.001  # no two answers are given at one moment
        world.look()
        decision = self.decide()
        ttdp.check_request(decision.resource(resource), [ids])
        hold = ttdp.Hold(resource, frozenset(ids), name=f"answer-{next(self.numbers)}")
        name = world.book.directory_for(hold, world.now) or hold.name
        hugetlbfs = ttdp.hugetlbfs_mounts(world.settings)
        mounts = self.directories.make_for_hugepages(name, hugetlbfs)
        chips = decision.resource(resource).chips(ids)
        answer = ttdp.container_edits(chips, {}, self.settings, mounts, hold.name)
        world.book.add(ttdp.read_answer(answer).of(resource, ids), world.now)
        return Container(container, Entry(pod.uid, container, resource, Held({-1: ids}, answer)))

    def the_sandbox_starts(self, pod: Pod) -> None:
        pod.has_cgroup = True
        pod.has_pause = self.has_pause
        self.show(pod)

    def the_kubelet_calls(self, pod: Pod) -> None:
        assert pod.waiting
        pod.call = self.world.call(pod.waiting.entry)
        pod.called_at = self.world.now

    def can_call(self, pod: Pod) -> bool:
        is_ready = pod.lives and pod.has_cgroup and pod in self.memory
        return bool(is_ready and pod.waiting and not pod.call)

    def an_older_writing_lands(self) -> None:
        """It overtook the one with the pod's entry; a moment later that lands again."""
        if self.older is not None:
            self.world.put(self.older)
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
        if not pod.twin and not container.is_shared:
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

        if self.kubelet != "late":
            self.write()
        then = self.world.now + seconds
        if self.unwritten_since is not None and then - self.unwritten_since >= ttdp.WRITTEN_WITHIN:
            self.write()
        for pod in self.pods:
            creating = pod.busy and pod.busy.state == "is created"
            if pod.busy and creating and then - pod.busy.allowed_at >= ttdp.CREATED_WITHIN:
                self.a_container_fails(pod)

        self.world.now = then
        self.the_daemon_looks()
        if seconds >= 5:
            self.world.book.note_ended_pods()
        for pod in self.pods:
            if pod.call and then - pod.called_at >= CALL_LASTS:
                pod.call = None

    def the_node_reboots(self) -> None:
        """hugetlbfs is empty, and the kubelet knows what stands in its checkpoint."""
        self.drop_calls()
        self.older = None
        self.pods = [pod for pod in self.pods if pod.lives]
        for pod in self.pods:
            pod.has_cgroup = pod.has_pause = False
            pod.files.clear()
            for each in pod.containers:
                each.state = "waits"
        shutil.rmtree(self.world.cgroups)
        for directory in (self.home / "dev/hugepages-1G").iterdir():
            shutil.rmtree(directory)

        self.world = BookWorld(self.home, now=5.0)
        self.start_directories(self.world.now)
        self.the_daemon_looks()

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

        assert mine.waiting
        mine.call = self.world.call(mine.waiting.entry)
        mine.called_at = self.world.now
        assert self.answer(mine) and mine.busy, "it waits for nobody"

    def users(self) -> Iterator[tuple[Pod, Container]]:
        """Yield who has chips: containers that run, and those of pods that the kubelet knows."""
        for pod in self.pods:
            is_known = pod.lives and pod in self.memory
            yield from ((pod, each) for each in pod.containers if is_known or each.is_busy)

    @invariant()
    def no_two_pods_run_on_one_chip(self) -> None:
        running = [(pod, each) for pod, each in self.users() if each.state == "runs"]
        for (one, first), (two, second) in itertools.combinations(running, 2):
            if one is not two and one.twin is not two and not first.chips.isdisjoint(second.chips):
                assert first.shares(second.entry.resource, second.entry.held.ids)

    @invariant()
    def the_directory_of_a_container_that_runs_is_there(self) -> None:
        assert all(each.directory.is_dir() for _, each in self.users() if each.state == "runs")

    @invariant()
    def no_pods_id_is_missing_and_none_of_its_chips_is_offered(self) -> None:
        if not self.pods:
            return
        self.world.look()
        decision = self.decide()
        held = {(each.resource, ident) for each in decision.holds for ident in each.ids}
        for _, each in self.users():
            mine = decision.resources[each.entry.resource].devices
            assert all(mine[ident].reason is None for ident in each.entry.held.ids)

            for name, resource in decision.resources.items():
                for ident, device in resource.devices.items():
                    is_free = (name, ident) not in held and not device.reason
                    if is_free and not device.addresses.isdisjoint(each.chips):
                        assert each.shares(name, {ident})


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The story of a failure is what Hypothesis prints."""
    caplog.set_level("CRITICAL", ttdp.log.name)


TestNode = Node.TestCase
TestNode.settings = hypothesis_settings(deadline=None, max_examples=100, stateful_step_count=80)
