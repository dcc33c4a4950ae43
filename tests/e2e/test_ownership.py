"""One chip, one pod: real kubelets, and real containers that keep their device files open.

While a test runs, a thread looks 20 times a second which pods have which device file open: no two
the same one, unless they share it on purpose, and none another one than it was given.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.conftest import Told
from tests.e2e.node import NodePod
from tests.e2e.steps import JSON
from tests.e2e.watchednode import (
    CARDS,
    ELSEWHERE,
    ONE,
    RESOURCES,
    SHARED,
    WatchedNode,
    holding,
)
from tests.world.processes import wait_until

STEPS = int(os.environ.get("OWNERSHIP_STEPS", "25"))
SEED = int(os.environ.get("OWNERSHIP_SEED", "1"))
HAND_OVERS = int(os.environ.get("OWNERSHIP_HAND_OVERS", "60"))
PROMPT = 15.0  # seconds for a container to start, on a busy machine; 2 on a quiet one
HEARD_OF_ALL = "SyncLoop (housekeeping) end"  # in the kubelet's: all pods were admitted


@pytest.fixture(scope="module")
def nodes(tools: None) -> Iterator[Mapping[str, WatchedNode]]:
    with contextlib.ExitStack() as stack:
        yield {version: stack.enter_context(WatchedNode(version)) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, nodes: Mapping[str, WatchedNode]) -> Iterator[WatchedNode]:
    """Return a node with a kubelet and two p300c, four chips; no two pods may share one."""
    with nodes[request.param].for_one_test() as node:
        yield node


@pytest.fixture
def aligned(tools: None) -> Iterator[WatchedNode]:
    """Return such a node with the last kubelet, under a Topology Manager policy."""
    with WatchedNode(VERSIONS[-1], "best-effort") as running, running.for_one_test() as node:
        yield node


# --- Ends -----------------------------------------------------------------------------------------


def test_a_pod_that_is_deleted_by_force_and_runs_on(node: WatchedNode, told: Told) -> None:
    """The next container starts after its last process has ended."""
    node.serve()
    others = [node.started(ONE) for _ in range(3)]
    first = node.started(ONE, stubborn=True, grace=120)

    first.force_delete()
    wait_until(first.is_forgotten, "the kubelet to forget it")
    second = node.create(ONE)
    wait_until(lambda: node.waits() > 0, second.why)

    # The start has to be later than each moment at which there was a process.
    node.signal(first, signal.SIGKILL)
    last_seen = now = time.clock_gettime(time.CLOCK_BOOTTIME)
    while node.machine.pod_processes(first.uid):
        last_seen = now
        time.sleep(0.01)
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
    ended = now

    node.wait_holds(second)
    second.wait_running()
    started = node.started_at(second)
    told(f"kubelet {node.version}: started {started - ended:.2f} s after the last process")
    assert started > last_seen
    (state,) = second.status["containerStatuses"]
    assert state["restartCount"] == 0 and all(map(node.opened, others))


def test_hand_overs_of_short_jobs_on_a_full_node(node: WatchedNode, told: Told) -> None:
    """Jobs end and pods are deleted; the next ones wait at most until the kubelet has cleaned up.

    That is a second. Only after pods that started less than two minutes before is it waited for.
    """
    node.serve()
    pods = [node.started(ONE, once=True) for _ in range(4)]

    slowest = 0.0
    for number in range(HAND_OVERS):
        former = pods.pop(0)
        if number % 2:
            former.delete()
        else:
            node.signal(former, signal.SIGUSR1)
        former.wait_finished()

        since = time.monotonic()
        pods.append(node.started(ONE, once=True))
        slowest = max(slowest, time.monotonic() - since)

    told(f"kubelet {node.version}: {HAND_OVERS} hand-overs, slowest {slowest:.1f} s")
    assert slowest < PROMPT


def test_a_kubelet_that_starts_without_its_checkpoint(node: WatchedNode, told: Told) -> None:
    """No running pod is killed, and the next pod gets the one chip that no pod holds."""
    node.cards.add("p300c")
    node.serve()
    pods = [node.started(ONE) for _ in range(6)]
    before = [node.opened(pod) for pod in pods]
    processes = {each.host_pid for each in node.openers.now}

    node.kubelet.crash(lose_checkpoint=True)
    node.wait_offered("")
    node.kubelet.wait_logged(HEARD_OF_ALL)

    # The last container's shell can have started its sleep meanwhile, which inherits what is open.
    assert processes <= {each.host_pid for each in node.openers.now}
    assert [node.opened(pod) for pod in pods] == before
    refused = [pod for pod in pods if pod.refusal()]
    told(f"kubelet {node.version}: 6 pods run, {len(refused)} refused, 0 killed")
    assert not refused

    pods[3].delete()
    pods[3].wait_ended()
    assert node.opened(node.started(ONE)) == before[3]  # of six that the kubelet takes for free


# --- Reboots and restarts -------------------------------------------------------------------------


def test_what_crashes_a_kubelet(aligned: WatchedNode, told: Told) -> None:
    """Kubelets 1.35 to 1.37 die of a pod's ID that is not listed; none does, whatever changes."""
    node = aligned
    node.serve()
    pods = [node.started(ONE) for _ in range(3)]
    held = node.held(*pods)

    for config in (ELSEWHERE, SHARED):
        node.reconfigure(config)
        node.wait_offered(config, held)
        for _ in range(3):
            node.kubelet.crash()
            node.wait_offered(config, held)
            assert all(map(node.opened, pods))

        node.crash(pods[0])
        pods.append(pods.pop(0))  # a second crash would be backed off from

    missing = next(iter(node.opened(pods[0])))
    node.reboot(while_off=node.cards.chip(missing).vanish)
    node.wait_holds(*pods[1:])
    node.kubelet.crash()

    assert all(map(node.opened, pods[1:])) and not node.opened(pods[0])
    told(f"kubelet {node.version} came up 8 times")


# --- Anything, in any order -----------------------------------------------------------------------

WEIGHTS = {  # how often the methods of RandomSteps are taken
    "create": 8,
    "create_with_init": 3,
    "delete": 4,
    "force_delete": 3,
    "crash": 2,
    "complete": 1,
    "reconfigure": 4,
    "restart_kubelet": 1,
    "restart_kubelet_alone": 1,
    "lose_checkpoint": 1,
    "kill_daemon": 2,
    "cut_power": 1,
}


class RandomSteps:
    """Steps at random, decided by what was done and never by what has come of it."""

    def __init__(self, node: WatchedNode, seed: int) -> None:
        self.node = node
        self.done: list[str] = []
        self._random = random.Random(seed)
        self._config = ""
        self._pods: list[NodePod] = []  # not deleted
        self._all: list[NodePod] = []
        self._ran = 0

    def step(self) -> None:
        (name,) = self._random.choices([*WEIGHTS], [*WEIGHTS.values()])
        self.done.append(name)
        getattr(self, name)()
        self.node.assert_apart()

    def finish(self) -> None:
        """Delete everything: all chips are offered again, and a pod gets them."""
        for pod in self._pods:
            pod.delete()
        for pod in self._all:
            pod.wait_ended()

        self.node.reconfigure(CARDS)
        self.node.wait_offered(CARDS)
        last = self.node.started({RESOURCES[CARDS]: 4})
        wait_until(lambda: len(self.node.opened(last)) == 4, "all chips to be in use")

    def summary(self) -> str:
        waited = self.node.waits()
        ran = f"of {len(self._all)} pods {self._ran} ran, {waited} of them after another's end"
        return f"{ran}; 0 violations in {self.node.openers.looks} looks"

    # Pods

    def _create(self, manifest: JSON, *, static: bool = False) -> bool:
        """Create a pod, and wait until it runs or is refused; return whether it runs."""
        self.node.wait_known(self._resource)
        pod = self.node.add(manifest, static=static)
        self._pods.append(pod)
        self._all.append(pod)

        wait_until(lambda: self.node.opened(pod) or pod.refusal(), pod.why)
        runs = bool(self.node.opened(pod))
        self._ran += runs
        return runs

    @property
    def _resource(self) -> str:
        return RESOURCES[self._config]

    def _any_pod(self) -> NodePod | None:
        return self._random.choice(self._pods) if self._pods else None

    def create(self) -> None:
        stubborn, once, static = (self._random.random() < each for each in (0.4, 0.2, 0.2))
        manifest = holding({self._resource: 1}, stubborn=stubborn, once=once)
        self._create(manifest, static=static)

    def create_with_init(self) -> None:
        """Create a pod that also has an init container, or a sidecar, with a device."""
        manifest = holding({self._resource: 1})
        (main,) = manifest["spec"]["containers"]
        first = copy.deepcopy(main)
        if self._random.random() < 0.5:
            first |= {"name": "sidecar", "restartPolicy": "Always"}
        else:
            first |= {"name": "init", "command": ["true"]}
        manifest["spec"]["initContainers"] = [first]
        self._create(manifest)

    def delete(self) -> None:
        if pod := self._any_pod():
            self._pods.remove(pod)
            pod.delete()

    def force_delete(self) -> None:
        """Delete a pod of a full node by force; the next comes at once."""
        while self._create(holding({self._resource: 1}, stubborn=True)):
            pass
        if pod := self._any_pod():
            self._pods.remove(pod)
            pod.force_delete()
            self._create(holding({self._resource: 1}))

    def crash(self) -> None:
        if pod := self._any_pod():
            self.node.signal(pod, signal.SIGKILL)

    def complete(self) -> None:
        if pod := self._any_pod():
            self.node.signal(pod, signal.SIGUSR1)

    # The node

    def reconfigure(self) -> None:
        self._config = self._random.choice([*RESOURCES])
        self.node.reconfigure(self._config)

    def restart_kubelet(self) -> None:
        self.node.kubelet.crash()

    def lose_checkpoint(self) -> None:
        self.node.kubelet.crash(lose_checkpoint=True)

    def restart_kubelet_alone(self) -> None:
        """Restart it while the API server is away, and delete a pod meanwhile."""
        assert self.node.api is not None
        self.node.kubelet.kill()
        self.node.api.close()
        self.node.kubelet.start()
        if pod := self._any_pod():
            self._pods.remove(pod)
            pod.force_delete()
        self.node.api.serve(self.node.machine.listen)

    def kill_daemon(self) -> None:
        """Kill it, and start it with another configuration."""
        self.node.daemon.kill()
        self._config = self._random.choice([*RESOURCES])
        self.node.configure(self._config)
        self.node.daemon.start()

    def cut_power(self) -> None:
        """Cut the power, and find two chips with exchanged numbers."""
        pair = self._random.sample([chip.bdf for chip in self.node.cards.chips], 2)
        self.node.reboot(while_off=partial(self.node.cards.swap_ordinals, *pair))


def test_any_sequence(node: WatchedNode, told: Told) -> None:
    """OWNERSHIP_STEPS random steps, from OWNERSHIP_SEED: no two pods have one device file open."""
    node.serve()
    sequence = RandomSteps(node, SEED)
    print(f"OWNERSHIP_SEED={SEED}")
    try:
        for _ in range(STEPS):
            sequence.step()
        sequence.finish()
    finally:
        print(" ".join(sequence.done))
    told(f"kubelet {node.version}: {STEPS} steps of seed {SEED}: {sequence.summary()}")
