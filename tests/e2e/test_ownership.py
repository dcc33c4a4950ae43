"""One chip, one pod: real kubelets, and real containers that keep their device files open.

While a test runs, a thread looks 20 times a second which pods have which device file open: no two
the same one, and none another one than it was given.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.conftest import Told
from tests.e2e.node import NodePod
from tests.e2e.watchednode import INTERVAL, ONE, P300, WatchedNode, holding
from tests.world.processes import wait_until

HAND_OVERS = int(os.environ.get("OWNERSHIP_HAND_OVERS", "60"))
SEED = int(os.environ.get("OWNERSHIP_SEED", "1"))
PROMPT = 15.0  # seconds for a container to start, on a busy machine; 2 on a quiet one

CARDS = 'resource_naming = "card"\n'
ELSEWHERE = 'resource_domain = "example.org"\n'
RESOURCES = {  # by configuration
    "": P300,
    CARDS: "tenstorrent.com/p300c",
    'unit = "board"\n': "tenstorrent.com/p300-board",
    ELSEWHERE: "example.org/p300",
}


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, tools: None) -> Iterator[WatchedNode]:
    """A node with a kubelet, a daemon and two p300c, four chips."""
    # The best effort changes nothing, but the kubelet looks at pods' IDs for it when it starts.
    with WatchedNode(request.param, config={"topologyManagerPolicy": "best-effort"}) as node:
        node.serve()
        yield node
        node.assert_apart()


def test_a_pod_that_is_deleted_by_force_and_runs_on(node: WatchedNode, told: Told) -> None:
    """The next container starts after its last process has ended."""
    others = [node.started(ONE) for _ in range(3)]
    first = node.started(ONE, stubborn=True, grace=120)

    first.force_delete()
    wait_until(first.is_forgotten, "the kubelet to forget it")
    second = node.create(ONE)
    wait_until(lambda: node.waits() > 0, second.why)
    assert node.machine.pod_processes(first.uid) and not node.opened(second)

    node.signal(first, signal.SIGKILL)
    ended = time.monotonic()
    node.wait_holds(second)
    second.wait_running()

    told(f"kubelet {node.version}: started {time.monotonic() - ended:.1f} s after the other's end")
    (state,) = second.status["containerStatuses"]
    assert state["restartCount"] == 0 and all(map(node.opened, others))


def test_hand_overs_of_short_jobs_on_a_full_node(node: WatchedNode, told: Told) -> None:
    """Jobs end and pods are deleted; the next ones wait until the kubelet has cleaned up."""
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


def test_a_kubelet_that_starts_without_its_checkpoint(node: WatchedNode) -> None:
    """No pod is killed, and the next one gets the one chip that none holds, of four free ones."""
    *_, last = [node.started(ONE) for _ in range(4)]
    others = {each for each in node.openers.now if each.pod != last.uid}
    free = node.opened(last)

    node.kubelet.crash(lose_checkpoint=True)
    node.wait_complete()  # the kubelet takes all for free
    last.delete()
    last.wait_ended()

    assert node.opened(node.started(ONE)) == free
    assert others <= node.openers.now  # the same processes


def test_what_crashes_a_kubelet(node: WatchedNode) -> None:
    """Kubelets 1.35 to 1.37 die of a pod's ID that is not listed; none does, whatever changes."""
    pods = [node.started(ONE) for _ in range(3)]
    running = node.openers.now
    held = {each.chip for each in running}
    offered = {P300: held, RESOURCES[ELSEWHERE]: all_chips(node) - held}

    node.reconfigure(ELSEWHERE)
    node.wait_complete(offered)
    for _ in range(2):
        node.kubelet.crash()
        node.wait_complete(offered)
        assert running <= node.openers.now

    (missing,) = node.opened(pods[0])
    node.reboot(while_off=node.cards.chip(missing).vanish)
    node.wait_holds(*pods[1:])
    node.kubelet.crash()
    assert all(map(node.opened, pods[1:])) and not node.opened(pods[0])


def all_chips(node: WatchedNode) -> set[str]:
    return {chip.bdf for chip in node.cards.chips}


# --- Anything, in any order -----------------------------------------------------------------------

DECK = {  # how often the methods of RandomSteps are taken
    "create": 9,
    "delete": 3,
    "force_delete": 3,
    "kill_container": 2,
    "complete": 1,
    "reconfigure": 3,
    "restart_kubelet": 1,
    "restart_kubelet_alone": 1,
    "lose_checkpoint": 1,
    "restart_daemon": 2,
    "restart_both": 1,
    "cut_power": 1,
}
KINDS = ("plain", "stubborn", "once", "init", "sidecar")


class RandomSteps:
    """Steps in an order of chance, decided by what was done and never by what has come of it."""

    def __init__(self, node: WatchedNode) -> None:
        self.node = node
        self.ran = 0
        self._random = random.Random(SEED)
        self._resource = P300
        self._pods: list[NodePod] = []  # not deleted
        self._undisturbed: dict[NodePod, set[int]] = {}  # their processes

    def take_all(self) -> None:
        names = [name for name, count in DECK.items() for _ in range(count)]
        self._random.shuffle(names)
        for name in names:
            print(name)
            if not self._pods:
                self.create()
            getattr(self, name)()
            self.node.assert_apart()
            for pod, pids in self._undisturbed.items():
                assert all(Path(f"/proc/{pid}").exists() for pid in pids), pod.why()

    def finish(self) -> None:
        """Delete everything: all chips are offered again, and a pod gets them."""
        for pod in self._pods:
            pod.delete()
        wait_until(lambda: not any(self.node.machine.pod_cgroups()), "all pods to end")

        # One that has started again has two minutes to end pods: this one knows of none.
        self.node.kubelet.crash(lose_checkpoint=True)
        self.node.reconfigure(CARDS)
        self.node.wait_complete({RESOURCES[CARDS]: all_chips(self.node)})
        last = self.node.started({RESOURCES[CARDS]: 4})
        wait_until(lambda: len(self.node.opened(last)) == 4, "all chips to be in use")

    # Pods

    def create(self, kind: str | None = None) -> bool:
        """Create a pod, and wait until it runs or is refused; return whether it runs."""
        kind = kind or self._random.choice(KINDS)
        manifest = holding({self._resource: 1}, stubborn=kind == "stubborn", once=kind == "once")
        (main,) = manifest["spec"]["containers"]
        if kind == "init":
            manifest["spec"]["initContainers"] = [main | {"name": kind, "command": ["true"]}]
        if kind == "sidecar":
            first = copy.deepcopy(main) | {"name": kind, "restartPolicy": "Always"}
            manifest["spec"]["initContainers"] = [first]

        self.node.wait_known(self._resource)
        pod = self.node.add(manifest)
        self._pods.append(pod)
        wait_until(lambda: self.node.opened(pod) or pod.refusal(), pod.why)
        if not self.node.opened(pod):
            return False
        self.ran += 1
        if kind != "sidecar":  # whose other container is still to come
            self._undisturbed[pod] = self.node.processes(pod)
        return True

    def _any_pod(self) -> NodePod:
        """Return a pod of which the caller disturbs the processes."""
        pod = self._random.choice(self._pods)
        self._undisturbed.pop(pod, None)
        return pod

    def _any_pod_out(self) -> NodePod:
        pod = self._any_pod()
        self._pods.remove(pod)
        return pod

    def delete(self) -> None:
        self._any_pod_out().delete()

    def force_delete(self) -> None:
        """Delete a pod of a full node by force; the next comes at once."""
        while self.create("stubborn"):
            pass
        self._any_pod_out().force_delete()
        self.create("plain")

    def kill_container(self) -> None:
        self.node.signal(self._any_pod(), signal.SIGKILL)

    def complete(self) -> None:
        self.node.signal(self._any_pod(), signal.SIGUSR1)

    # The node

    def reconfigure(self) -> None:
        config, self._resource = self._random.choice([*RESOURCES.items()])
        self.node.reconfigure(config)

    def restart_kubelet(self) -> None:
        self.node.kubelet.crash()

    def lose_checkpoint(self) -> None:
        self.node.kubelet.crash(lose_checkpoint=True)

    def restart_kubelet_alone(self) -> None:
        """Restart it while the API server is away, and delete a pod meanwhile."""
        self.node.kubelet.kill()
        self.node.api.close()
        self.node.kubelet.start()
        self._any_pod_out().force_delete()
        self.node.api.serve(self.node.machine.listen)

    def restart_daemon(self) -> None:
        """Kill it, and start it with another configuration."""
        config, self._resource = self._random.choice([*RESOURCES.items()])
        self.node.daemon.end(signal.SIGKILL)
        self.node.daemon.configure(config, INTERVAL)
        self.node.daemon.start()

    def restart_both(self) -> None:
        """Kill both: not even a pod whose init container had the device ends (#138446)."""
        self.node.kubelet.kill()
        self.restart_daemon()
        self.node.kubelet.start()

    def cut_power(self) -> None:
        """Cut the power, and find two chips with exchanged numbers."""
        self._undisturbed.clear()
        pair = self._random.sample(sorted(all_chips(self.node)), 2)
        self.node.reboot(while_off=partial(self.node.cards.swap_ordinals, *pair))


def test_any_sequence(node: WatchedNode, told: Told) -> None:
    """In any order (OWNERSHIP_SEED), no two pods have one device file open, and none is killed."""
    steps = RandomSteps(node)
    steps.take_all()
    steps.finish()
    looks, waited = node.openers.looks, node.waits()
    told(f"kubelet {node.version}: {steps.ran} pods ran, {waited} waited; {looks} looks")
