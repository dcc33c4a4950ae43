"""A node with two p300c, four chips, of whose pods it is known what they have open."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.e2e.machine import Machine
from tests.e2e.node import Node, NodePod
from tests.e2e.pods import manifest
from tests.e2e.steps import JSON
from tests.world.node import SimulatedNode
from tests.world.processes import wait_until

INTERVAL = 0.5  # seconds between two polls
PAUSE = 0.05  # seconds between two looks at the pods
P300 = "tenstorrent.com/p300"
ONE = {P300: 1}
STUBBORN = 6  # seconds for which a pod that ignores SIGTERM runs on, unless a test says otherwise

# What containers run: they open every device file that they have, and keep it open.
HOLD = """
trap {term} TERM
trap 'exit 0' USR1
descriptor=3
for node in /dev/tenstorrent/*; do
    eval "exec $descriptor<>$node"
    descriptor=$((descriptor + 1))
done
while :; do sleep 3600 & wait; done
"""


def holding(
    resources: Mapping[str, int],
    *,
    stubborn: bool = False,
    grace: int = STUBBORN,
    script: str = HOLD,
    **others: Any,
) -> JSON:
    """Return a pod's manifest. stubborn: it ignores SIGTERM; others: of pods.manifest()."""
    filled = script.replace("{term}", "''" if stubborn else "'exit 0'")
    return manifest(resources, command=["sh", "-c", filled], grace=grace, **others)


class Opener(NamedTuple):
    """A process of a pod that has a chip's device file open."""

    pid: int
    pod: str  # its UID
    chip: str
    given: frozenset[str]  # the chips that its environment names; none while it starts


class Openers:
    """Looks 20 times a second, while the context lasts, who has which device file open.

    No two pods may have the same one open, and none another one than it was given.
    """

    def __init__(self, machine: Machine, cards: SimulatedNode) -> None:
        self.now: set[Opener] = set()
        self.violations: list[str] = []
        self.looks = 0
        self._machine = machine
        self._cards = cards
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="openers", daemon=True)

    def __enter__(self) -> Openers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(PAUSE):
            with self._cards.lock:  # no device file comes or goes meanwhile
                self.now = set(self._look())
                # One may have closed it while another's process was looked at.
                if _foul(self.now) and (foul := _foul(self.now & set(self._look()))):
                    self.violations.append(f"look {self.looks}: {foul}")
            self.looks += 1

    def _look(self) -> Iterator[Opener]:
        chips = {
            os.stat(chip.device_node).st_rdev: chip.bdf
            for chip in self._cards.chips
            if chip.ordinal is not None
        }
        for cgroup in self._machine.pod_cgroups():
            uid = re.search(r"/pod([0-9a-f-]{36})(/|$)", str(cgroup))
            assert uid is not None, cgroup
            with contextlib.suppress(OSError):  # it has just gone
                for pid in (cgroup / "cgroup.procs").read_text().split():
                    yield from _opened(Path("/proc", pid), uid[1], chips)


def _opened(process: Path, pod: str, chips: Mapping[int, str]) -> Iterator[Opener]:
    """Yield a process for each device file that it has open."""
    with contextlib.suppress(OSError):  # it has just ended
        text = (process / "environ").read_text(errors="replace")
        named = re.search(r"(?:^|\0)TT_DEVICE_PLUGIN_DEVICES=([^\0]+)", text)
        given = frozenset(named[1].split(",") if named else ())
        for descriptor in os.scandir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):
                number = os.stat(descriptor.path).st_rdev
                if number in chips:
                    yield Opener(int(process.name), pod, chips[number], given)


def _foul(openers: set[Opener]) -> list[Opener]:
    """Return those that have another chip than they were given, or one that another pod has."""
    given = [each for each in openers if each.given]
    pods = {each.chip: each.pod for each in given}
    return [each for each in given if each.chip not in each.given or each.pod != pods[each.chip]]


class WatchedNode(Node):
    """A node of whose pods it is known what they have open."""

    def start(self) -> None:
        super().start()
        for _ in range(2):
            self.cards.add("p300c")
        self.openers = self._while_on.enter_context(Openers(self.machine, self.cards))

    def assert_apart(self) -> None:
        """Look once more, and tell whether any look has found two pods at one chip."""
        looks = self.openers.looks + 2
        wait_until(lambda: self.openers.looks >= looks, "a look")
        assert not self.openers.violations, "\n".join(self.openers.violations)

    # The daemon

    def serve(self) -> None:
        """Start the daemon, and wait until the kubelet has all chips."""
        self.start_daemon(interval=INTERVAL)

    def waits(self) -> int:
        """Return how many container starts have waited for a pod, by the daemon's log."""
        return self.daemon.log.read_text().count("container start waits: ")

    def reconfigure(self, config: str) -> None:
        """Do what systemctl reload does, with another configuration."""

        def reloads() -> int:
            return self.daemon.log.read_text().count("configuration reloaded")

        before = reloads()
        self.daemon.configure(config, INTERVAL)
        self.daemon.send(signal.SIGHUP)
        wait_until(lambda: reloads() > before, "the reload")

    def wait_known(self, resource: str) -> None:
        """Wait until the kubelet has had a list of a resource.

        Before that it admits a pod that wants one, without it, and never makes the container. A
        scheduler gives no such pod to the node.
        """

        def is_known() -> bool:
            # There is none while a kubelet that has lost it has had no list at all.
            if not self.kubelet.checkpoint.exists():
                return False
            written = json.loads(self.kubelet.checkpoint.read_text())["Data"]
            return resource in written["RegisteredDevices"]

        wait_until(is_known, f"a list of {resource}")

    # Pods

    def create(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod that keeps its device files open; others: of holding()."""
        return self.add(holding(resources, **others))

    def started(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod, and wait until it has its device files open."""
        pod = self.create(resources, **others)
        self.wait_holds(pod)
        return pod

    def opened(self, pod: NodePod) -> set[str]:
        """Return the chips whose device files a pod had open at the last look."""
        return {each.chip for each in self.openers.now if each.pod == pod.uid}

    def wait_holds(self, *pods: NodePod) -> None:
        """Wait until these pods have something open."""
        for pod in pods:
            wait_until(partial(self.opened, pod), pod.why)

    def processes(self, pod: NodePod) -> set[int]:
        """Return the processes that have a pod's device files open."""
        return {each.pid for each in self.openers.now if each.pod == pod.uid}

    def signal(self, pod: NodePod, number: signal.Signals) -> None:
        """Send a signal to the processes that have a pod's device files open."""
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
