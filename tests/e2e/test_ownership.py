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
from tests.e2e.ward import (
    CARDS,
    ELSEWHERE,
    ONE,
    RESOURCES,
    SHARED,
    Ward,
    holding,
)
from tests.world.processes import wait_until

STEPS = int(os.environ.get("OWNERSHIP_STEPS", "25"))
SEED = int(os.environ.get("OWNERSHIP_SEED", "1"))
HAND_OVERS = int(os.environ.get("OWNERSHIP_HAND_OVERS", "60"))
HEARD_OF_ALL = "SyncLoop (housekeeping) end"  # in the kubelet's: all pods were admitted


@pytest.fixture(scope="module")
def wards(tools: None) -> Iterator[Mapping[str, Ward]]:
    with contextlib.ExitStack() as stack:
        yield {version: stack.enter_context(Ward(version)) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def ward(request: pytest.FixtureRequest, wards: Mapping[str, Ward]) -> Iterator[Ward]:
    """Return a node with a kubelet and two p300c, four chips; no two pods may share one."""
    with wards[request.param].for_one_test() as ward:
        yield ward


@pytest.fixture
def aligned(tools: None) -> Iterator[Ward]:
    """Return such a node with the last kubelet, under a Topology Manager policy."""
    with Ward(VERSIONS[-1], "best-effort") as running, running.for_one_test() as ward:
        yield ward


# --- Ends -----------------------------------------------------------------------------------------


def test_a_pod_that_is_deleted_by_force_and_runs_on(ward: Ward, told: Told) -> None:
    """The next container starts after its last process has ended."""
    ward.serve()
    others = [ward.started(ONE) for _ in range(3)]
    first = ward.started(ONE, stubborn=True)

    first.force_delete()
    wait_until(first.is_forgotten, "the kubelet to forget it")
    second = ward.create(ONE)
    wait_until(lambda: ward.waits() > 0, second.why)

    # The start has to be later than each moment at which there was a process.
    last_seen = 0.0
    while ward.machine.pod_processes(first.uid):
        last_seen = time.monotonic()
        time.sleep(0.01)
    ended = time.monotonic()

    ward.wait_holds(second)
    started = ward.started_at(second)
    told(f"kubelet {ward.version}: started {started - ended:.2f} s after the last process")
    assert started > last_seen > 0
    (state,) = second.status["containerStatuses"]
    assert state["restartCount"] == 0 and all(map(ward.opened, others))


def test_hand_overs_on_a_full_node_do_not_wait(ward: Ward, told: Told) -> None:
    """Jobs end and pods are deleted in an orderly manner, and the next ones start at once."""
    ward.serve()
    pods = [ward.started(ONE, once=True) for _ in range(4)]

    slowest = 0.0
    for number in range(HAND_OVERS):
        former = pods.pop(0)
        if number % 2:
            former.delete()
        else:
            ward.signal(former, signal.SIGUSR1)
        former.wait_finished()

        since = time.monotonic()
        pods.append(ward.started(ONE, once=True))
        slowest = max(slowest, time.monotonic() - since)

    waits = ward.waits()
    told(f"kubelet {ward.version}: {HAND_OVERS} hand-overs, {waits} waits, slowest {slowest:.1f} s")
    assert waits == 0


def test_a_kubelet_that_starts_without_its_checkpoint(ward: Ward, told: Told) -> None:
    """No running pod is killed, and the next pod gets the one chip that no pod holds."""
    ward.cards.add("p300c")
    ward.serve()
    pods = [ward.started(ONE) for _ in range(6)]
    before = [ward.opened(pod) for pod in pods]
    processes = {each.host_pid for each in ward.openers.now}

    ward.kubelet.crash(lose_checkpoint=True)
    ward.wait_offered("")
    ward.kubelet.wait_logged(HEARD_OF_ALL)

    # The last container's shell can have started its sleep meanwhile, which inherits what is open.
    assert processes <= {each.host_pid for each in ward.openers.now}
    assert [ward.opened(pod) for pod in pods] == before
    refused = [pod for pod in pods if pod.refusal()]
    told(f"kubelet {ward.version}: 6 pods run, {len(refused)} refused, 0 killed")
    assert not refused

    pods[3].delete()
    pods[3].wait_finished()
    assert ward.opened(ward.started(ONE)) == before[3]  # of six that the kubelet takes for free


# --- Reboots and restarts -------------------------------------------------------------------------


def test_what_crashes_a_kubelet(aligned: Ward, told: Told) -> None:
    """Kubelets 1.35 to 1.37 die of a pod's ID that is not listed; none does, whatever changes."""
    ward = aligned
    ward.serve()
    pods = [ward.started(ONE) for _ in range(3)]
    held = ward.held(*pods)

    for config in (ELSEWHERE, SHARED):
        ward.reconfigure(config)
        ward.wait_offered(config, held)
        for _ in range(3):
            ward.kubelet.crash()
            ward.wait_offered(config, held)
            assert all(map(ward.opened, pods))
        ward.crash(pods[0])
        pods.append(pods.pop(0))  # a second crash would be backed off from

    missing = next(iter(ward.opened(pods[0])))
    ward.reboot(while_off=ward.cards.chip(missing).vanish)
    ward.wait_holds(*pods[1:])
    ward.kubelet.crash()
    assert all(map(ward.opened, pods[1:])) and not ward.opened(pods[0])
    told(f"kubelet {ward.version} came up 8 times")


# --- Anything, in any order -----------------------------------------------------------------------

WEIGHTS = {  # how often the methods of Steps are taken
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


class Steps:
    """Steps at random, decided by what was done and never by what has come of it."""

    def __init__(self, ward: Ward, seed: int) -> None:
        self.ward = ward
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
        self.ward.assert_apart()

    def finish(self) -> None:
        """Delete everything: all chips are offered again, and a pod gets them."""
        for pod in self._pods:
            pod.delete()
        for pod in self._all:
            pod.wait_ended()

        self.ward.reconfigure(CARDS)
        self.ward.wait_offered(CARDS)
        last = self.ward.started({RESOURCES[CARDS]: 4})
        wait_until(lambda: len(self.ward.opened(last)) == 4, "all chips to be in use")

    def summary(self) -> str:
        waited = self.ward.waits()
        ran = f"of {len(self._all)} pods {self._ran} ran, {waited} of them after another's end"
        return f"{ran}; 0 violations in {self.ward.openers.looks} looks"

    # Pods

    def _create(self, manifest: JSON, *, static: bool = False) -> bool:
        """Create a pod, and wait until it runs or is refused; return whether it runs."""
        pod = self.ward.add(manifest, static=static)
        self._pods.append(pod)
        self._all.append(pod)

        wait_until(lambda: self.ward.opened(pod) or pod.refusal(), pod.why)
        runs = bool(self.ward.opened(pod))
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
            self.ward.signal(pod, signal.SIGKILL)

    def complete(self) -> None:
        if pod := self._any_pod():
            self.ward.signal(pod, signal.SIGUSR1)

    # The node

    def reconfigure(self) -> None:
        self._config = self._random.choice([*RESOURCES])
        self.ward.reconfigure(self._config)

    def restart_kubelet(self) -> None:
        self.ward.kubelet.crash()

    def lose_checkpoint(self) -> None:
        self.ward.kubelet.crash(lose_checkpoint=True)

    def restart_kubelet_alone(self) -> None:
        """Restart it while the API server is away, and delete a pod meanwhile."""
        assert self.ward.api is not None
        self.ward.kubelet.kill()
        self.ward.api.close()
        self.ward.kubelet.start()
        if pod := self._any_pod():
            self._pods.remove(pod)
            pod.force_delete()
        self.ward.api.serve(self.ward.machine.listen)

    def kill_daemon(self) -> None:
        """Kill it, and start it with another configuration."""
        self.ward.daemon.kill()
        self._config = self._random.choice([*RESOURCES])
        self.ward.configure(self._config)
        self.ward.daemon.start()

    def cut_power(self) -> None:
        """Cut the power, and find two chips with exchanged numbers."""
        pair = self._random.sample([chip.bdf for chip in self.ward.cards.chips], 2)
        self.ward.reboot(while_off=partial(self.ward.cards.swap_ordinals, *pair))


def test_any_sequence(ward: Ward, told: Told) -> None:
    """OWNERSHIP_STEPS random steps, from OWNERSHIP_SEED: no two pods have one device file open."""
    ward.serve()
    sequence = Steps(ward, SEED)
    print(f"OWNERSHIP_SEED={SEED}")
    try:
        for _ in range(STEPS):
            sequence.step()
        sequence.finish()
    finally:
        print(" ".join(sequence.done))
    told(f"kubelet {ward.version}: {STEPS} steps of seed {SEED}: {sequence.summary()}")
