"""Holds, explored: pods come and go in any order, and no rule is ever broken.

The moves are those of a kubelet, a runtime and an administrator. Checkpoint, cgroups and hugepage
directories are real files, the clock is the test's. Nothing depends on the machine's time.

Assumed: the kubelet writes within 30 s, and creates a container within 120 s. Nobody deletes a pod
whose entry was never written. A kubelet that has forgotten a pod does not start its containers.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ttdp
from tests.chips import bdf, chip, decide
from tests.test_holds import World
from tests.world.checkpoint import Entry, Held
from ttdp import Call, Directories, Settings, SharedResource, Sharing, Steps

SERIAL = "0000046131842007"
CHIPS = [chip(bus, "p300c", ordinal=bus, serial=SERIAL) for bus in (1, 2)]
CONFIGURATIONS = [  # what a reload can change
    Settings(),
    Settings(resource_naming="card"),
    Settings(unit="board"),
    Settings(sharing=Sharing(resources=(SharedResource("p300", 2),))),
    Settings(sharing=Sharing(resources=(SharedResource("p300", 2, "half", 1),))),
    Settings(exclude=(bdf(1),)),
]
CALL_LASTS = 25.0  # seconds
MOST_PODS = 3
STATIC = "static"  # the UID of a pod that can come back
MONITOR = f"{ttdp.CONMON}0"
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

    def __repr__(self) -> str:
        return f"pod {self.number} ({self.uid})"

    @property
    def lives(self) -> bool:
        return self.life == "lives"

    @property
    def waiting(self) -> Container | None:
        """The container that is to be started next, if there is one."""
        left = [each for each in self.containers if each.state != "is over"]
        return left[0] if left and left[0].state == "waits" else None

    @property
    def busy(self) -> Container | None:
        """The container that is created or runs."""
        return next((each for each in self.containers if each.is_busy), None)


class Wish(NamedTuple):
    """A pod that is to be admitted."""

    choice: int  # of a resource
    number: int  # of devices
    has_init: bool
    is_static: bool
    is_twin: bool


wishes = st.builds(
    Wish,
    choice=st.integers(0, 9),
    number=st.sampled_from([1, 1, 2]),
    has_init=st.booleans(),
    is_static=st.booleans(),
    is_twin=st.sampled_from([False] * 7 + [True]),
)


class Node(RuleBasedStateMachine):
    """A node, and what happens to it."""

    pods: list[Pod]  # until nothing is left of them
    memory: list[Pod]  # to which the kubelet has given devices

    @initialize(
        runtime=st.sampled_from(["pause", "bare", "monitored"]),
        kubelet=st.sampled_from(["prompt", "late", "lossy"]),
    )
    def boot(self, runtime: str, kubelet: str) -> None:
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.home = Path(tempfile.mkdtemp(dir=memory))
        (self.home / "dev/hugepages-1G").mkdir(parents=True)
        self.runtime, self.kubelet = runtime, kubelet
        self.settings = CONFIGURATIONS[0]
        self.world = World(self.home)
        self.directories = Directories(self.world.settings, self.world.now)
        self.pods = []
        self.memory = []
        self.unwritten_since: float | None = None
        self.numbers = itertools.count()
        self.write()

    @rule(data=st.data())
    def something_happens(self, data: st.DataObject) -> None:
        """One of all that can happen now: each draw is a move."""
        moves = {name: (weight, happen) for weight, name, happen in self.moves()}
        names = [name for name, (weight, _) in moves.items() for _ in range(weight)]
        name = data.draw(st.sampled_from(names))
        if name == "a pod is admitted":
            self.a_pod_is_admitted(data.draw(wishes))
        elif name == "the configuration changes":
            self.settings = data.draw(st.sampled_from(CONFIGURATIONS))
        else:
            moves[name][1]()

    def moves(self) -> Iterator[tuple[int, str, Callable[[], object]]]:
        """Yield what can happen, with its weight."""
        if len(self.pods) < MOST_PODS:
            yield 8, "a pod is admitted", lambda: None
        for pod in self.pods:
            yield from self.moves_of_pod(pod)

        yield 2, "the kubelet forgets and writes", self.the_kubelet_forgets_and_writes
        for seconds in (0.2, 5.0, 20.0):
            yield 1, f"{seconds:g} s pass", partial(self.time_passes, seconds)
        yield 2, "the configuration changes", lambda: None
        yield 1, "the daemon restarts", self.the_daemon_restarts
        yield 1, "the checkpoint is damaged", self.the_checkpoint_is_damaged
        if self.kubelet == "lossy":
            restart = self.the_kubelet_restarts_without_its_checkpoint
            yield 1, "the kubelet restarts without its checkpoint", restart
        if self.unwritten_since is None:
            yield 1, "the node reboots", self.the_node_reboots

    def moves_of_pod(self, pod: Pod) -> Iterator[tuple[int, str, Callable[[], object]]]:
        if step := self.next_step(pod):
            yield 9, f"{pod} goes on", partial(step, pod)
        if pod.call:
            yield 1, f"{pod}: its call ends with an error", partial(setattr, pod, "call", None)
        if pod.busy:
            yield 1, f"{pod}: its container fails", partial(self.a_container_fails, pod)
        if pod.lives and pod.is_written:
            yield 1, f"{pod} is deleted", partial(setattr, pod, "life", "is deleted")
            by_force = partial(setattr, pod, "life", "was deleted by force")
            yield 2, f"{pod} is deleted by force", by_force
        if self.can_call(pod):
            alone = partial(self.whoever_waits_while_all_others_are_over_may_start, pod)
            yield 1, f"{pod} is left alone", alone

    def teardown(self) -> None:
        if hasattr(self, "home"):
            shutil.rmtree(self.home)

    # -- the daemon

    def decide(self) -> ttdp.Decision:
        return decide(CHIPS, self.settings, self.world.current())

    def the_daemon_looks(self) -> None:
        """As at each turn of its loop."""
        self.world.look()
        for hold in self.world.current():
            self.directories.put_right(hold)
        self.clear(set())

    def clear(self, left_behind: set[str]) -> None:
        book, now = self.world.book, self.world.now
        unnamed = set() if book.problem else self.directories.unnamed(self.world.current(), now)
        self.directories.clear(unnamed, left_behind, now, Steps())

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
        self.clear(book.left_behind(call, self.world.current()))
        book.allow(call, self.world.now)
        pod.call = None
        container.allowed_at = self.world.now
        container.cgroup = f"container-{next(self.numbers)}"
        container.state = "is created"
        self.show(pod)
        return True

    def the_daemon_restarts(self) -> None:
        self.drop_calls()
        self.world = self.world.restarted()
        self.directories = Directories(self.world.settings, self.world.now)
        self.the_daemon_looks()

    # -- the kubelet

    def read(self) -> None:
        """The daemon reads the checkpoint as soon as that has changed."""
        self.world.book.refresh(self.world.now, DOMAIN, look=False)

    def write(self) -> None:
        for pod in self.memory:
            pod.is_written = True
        self.unwritten_since = None
        self.world.write(*(each.entry for pod in self.memory for each in pod.containers))
        self.read()

    def forget(self) -> None:
        """Forget pods that have ended or were deleted by force."""
        self.memory = [pod for pod in self.memory if pod.life in ("lives", "is deleted")]

    def the_kubelet_forgets_and_writes(self) -> None:
        self.forget()
        self.write()

    def a_pod_is_admitted(self, wish: Wish) -> None:
        """It gets devices of some resource that are healthy and nobody's, by this kubelet."""
        self.forget()
        resources = list(self.decide().resources.values())
        resource = resources[wish.choice % len(resources)]
        taken = {
            ident
            for pod in self.memory
            for each in pod.containers
            if each.entry.resource == resource.name
            for ident in each.entry.held.ids
        }
        healthy = [ident for ident, device in resource.devices.items() if not device.reason]
        # kubernetes #137534: it gives an ID to two pods.
        free = [ident for ident in healthy if (ident in taken) is wish.is_twin]
        ids = free[: 1 if resource.replicas or wish.is_twin else wish.number]
        if not ids:
            return

        number = next(self.numbers)
        is_static = wish.is_static and all(pod.uid != STATIC for pod in self.pods)
        pod = Pod(STATIC if is_static else f"uid-{number}", number)
        try:
            for name in ["prepare", "main"] if wish.has_init else ["main"]:
                pod.containers.append(self.allocate(pod, name, resource.name, ids))
        except ttdp.RequestError:
            return
        for other in self.memory if wish.is_twin else ():
            if any(each.entry.held.ids & {*ids} for each in other.containers):
                pod.twin, other.twin = other, pod
        self.pods.append(pod)
        self.memory.append(pod)
        if self.kubelet != "late":
            self.write()
        elif self.unwritten_since is None:
            self.unwritten_since = self.world.now

    def allocate(self, pod: Pod, container: str, resource: str, ids: list[str]) -> Container:
        """Answer Allocate; raises RequestError."""
        world = self.world
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
        pod.has_pause = self.runtime == "pause"
        self.show(pod)

    def the_kubelet_calls(self, pod: Pod) -> None:
        assert pod.waiting
        pod.call = self.world.call(pod.waiting.entry)
        pod.called_at = self.world.now

    def can_call(self, pod: Pod) -> bool:
        is_ready = pod.lives and pod.has_cgroup and pod in self.memory
        return bool(is_ready and pod.waiting and not pod.call)

    def a_call_ends_with_an_error(self, pod: Pod) -> None:
        pod.call = None

    def a_pod_is_deleted(self, pod: Pod) -> None:
        pod.life = "is deleted"

    def a_pod_is_deleted_by_force(self, pod: Pod) -> None:
        pod.life = "was deleted by force"

    def the_checkpoint_is_damaged(self) -> None:
        """Until the kubelet writes again."""
        self.world.put(b"{}")
        if self.unwritten_since is None:
            self.unwritten_since = self.world.now
        self.read()

    def the_kubelet_restarts_without_its_checkpoint(self) -> None:
        """It knows no pod then, while they run on."""
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
        if self.runtime == "monitored" and pod.busy:
            names.append(MONITOR)
        self.world.make_cgroup(pod.uid, *names)

    def a_container_runs(self, pod: Pod) -> None:
        """It finds an empty directory, but for what its own pod has left there."""
        container = pod.busy
        assert container
        container.state = "runs"
        self.show(pod)

        directory = container.directory
        assert directory.is_dir() and directory.stat().st_mode & 0o7777 == 0o777
        others = {path.name for path in directory.iterdir()} - {str(pod.number)}
        if pod.twin:
            others.discard(str(pod.twin.number))
        assert not others or any("::" in ident for ident in container.entry.held.ids)
        (directory / str(pod.number)).touch()

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
        self.pods = [pod for pod in self.pods if pod.lives]
        for pod in self.pods:
            pod.has_cgroup = pod.has_pause = False
            for each in pod.containers:
                each.state = "waits"
        shutil.rmtree(self.world.cgroups)
        for directory in (self.home / "dev/hugepages-1G").iterdir():
            shutil.rmtree(directory)

        self.world = World(self.home, now=5.0)
        self.directories = Directories(self.world.settings, self.world.now)
        self.the_daemon_looks()

    # -- what must hold

    def whoever_waits_while_all_others_are_over_may_start(self, mine: Pod) -> None:
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


TestNode = Node.TestCase
TestNode.settings = hypothesis_settings(deadline=None, max_examples=60, stateful_step_count=60)
