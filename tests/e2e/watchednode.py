"""A node of whose pods it is known what they were given, and what they have open.

Its cards are p300c, of two chips each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e.node import Node, NodePod
from tests.e2e.openers import LOCKS, Openers
from tests.e2e.pods import manifest
from tests.e2e.steps import JSON
from tests.world.checkpoint import Entry
from tests.world.node import SimulatedNode
from tests.world.processes import wait_until

INTERVAL = 0.5  # seconds between two polls
DOMAIN = "tenstorrent.com"
P300 = f"{DOMAIN}/p300"
ONE = {P300: 1}
STUBBORN = 6  # seconds for which a pod that ignores SIGTERM runs on, unless a test says otherwise

# Configurations, and their one resource.
BOARDS, CARDS = 'unit = "board"\n', 'resource_naming = "card"\n'
ELSEWHERE = 'resource_domain = "example.org"\n'
SHARED = f"""
[sharing]
lock_dir = "/run{LOCKS}"
[[sharing.resources]]
name = "p300"
replicas = 2
"""
RENAMED = f'{SHARED}rename = "p300-half"\n'
RESOURCES = {
    "": P300,
    CARDS: f"{DOMAIN}/p300c",
    BOARDS: f"{DOMAIN}/p300-board",
    ELSEWHERE: "example.org/p300",
    SHARED: P300,
    RENAMED: f"{DOMAIN}/p300-half",
}

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


def chips_of(entry: Entry) -> set[str]:
    """Return the PCI addresses of the chips that the daemon gave to a container."""
    return {*entry.held.answer.envs["TT_DEVICE_PLUGIN_DEVICES"].split(",")}


W = TypeVar("W", bound="WatchedNode")


class WatchedNode(Node):
    """A node with an API server, of whose pods it is known what they have open."""

    def __init__(self, version: str, policy: str = "none") -> None:
        """`policy`: the Topology Manager's."""
        super().__init__(version, static_pods=False, config={"topologyManagerPolicy": policy})
        self._openers: Openers | None = None

    @contextlib.contextmanager
    def for_one_test(self: W) -> Iterator[W]:
        """Have two p300c; at the end of the test, no two pods have had one chip."""
        with super().for_one_test():
            for _ in range(2):
                self.cards.add("p300c")
            yield self
            self.assert_apart()

    def prepare(self, cards: SimulatedNode) -> None:
        super().prepare(cards)
        self._openers = Openers(self.machine, cards)
        self._while_cards.enter_context(self._openers)

    @property
    def openers(self) -> Openers:
        assert self._openers is not None, "there are no cards"
        return self._openers

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

    def configure(self, config: str) -> None:
        """Write another configuration, for the daemon's next start or reload."""
        self.daemon.configure(config, INTERVAL)

    def reconfigure(self, config: str) -> None:
        """Do what systemctl reload does, with another configuration."""

        def reloads() -> int:
            return self.daemon.log.read_text().count("configuration reloaded")

        before = reloads()
        self.configure(config)
        self.daemon.reload()
        wait_until(lambda: reloads() > before, "the reload")

    def wait_offered(self, config: str, held: Sequence[Entry] = ()) -> None:
        """Wait until the kubelet has the IDs that were given, and those of all other chips."""
        expected: dict[str, set[str]] = {}
        for entry in held:
            expected.setdefault(entry.resource, set()).update(entry.held.ids)

        assert config not in (BOARDS, RENAMED), "whose IDs are others"
        free = {chip.bdf for chip in self.cards.chips}.difference(*map(chips_of, held))
        if config == SHARED:
            free = {f"{bdf}::{n}" for bdf in free for n in range(2)}
        if free:
            expected.setdefault(RESOURCES[config], set()).update(free)

        wait_until(
            lambda: self.kubelet.allocatable() == expected,
            lambda: f"{expected} to be offered; there is {self.kubelet.allocatable()}",
        )

    # Pods

    def create(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod that keeps its device files open; others: of holding()."""
        return self.add(holding(resources, **others))

    def started(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod, and wait until it has its device files open."""
        pod = self.create(resources, **others)
        self.wait_holds(pod)
        return pod

    def wait_known(self, resource: str) -> None:
        """Wait until the kubelet has had a list of a resource.

        Before that it admits a pod that wants one, without it, and never makes the container. A
        scheduler gives no such pod to the node.
        """

        def is_known() -> bool:
            # There is none while a kubelet that has lost it has had no list at all.
            return (
                self.kubelet.checkpoint.exists()
                and resource in self._written()["RegisteredDevices"]
            )

        wait_until(is_known, f"a list of {resource}")

    def _written(self) -> JSON:
        """Return what the kubelet has written down."""
        return dict(json.loads(self.kubelet.checkpoint.read_text())["Data"])

    def held(self, *pods: NodePod) -> list[Entry]:
        """Return what the kubelet has written down that these pods were given."""
        uids = {pod.uid for pod in pods}
        data = self._written()
        entries = [Entry.parse(item) for item in data["PodDeviceEntries"] or ()]
        return [entry for entry in entries if entry.uid in uids]

    def opened(self, pod: NodePod) -> set[str]:
        """Return the chips that a pod has open."""
        return self.openers.of(pod.uid)

    def wait_holds(self, *pods: NodePod) -> None:
        """Wait until these pods have something open."""
        for pod in pods:
            wait_until(partial(self.opened, pod), pod.why)

    def processes(self, pod: NodePod) -> set[int]:
        """Return the processes that have a pod's device files open."""
        return {each.host_pid for each in self.openers.now if each.pod == pod.uid}

    def started_at(self, pod: NodePod) -> float:
        """Return when the first process started that has a pod's device files open.

        That is a time of CLOCK_BOOTTIME.
        """
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.processes(pod)]
        ticks = [int(stat.rpartition(")")[2].split()[19]) for stat in stats]  # starttime
        return min(ticks) / os.sysconf("SC_CLK_TCK")

    def signal(self, pod: NodePod, number: signal.Signals) -> None:
        """Send a signal to the processes that have a pod's device files open."""
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def crash(self, pod: NodePod) -> None:
        """Kill a pod's container, and wait until it has been started again."""
        before = self.processes(pod)
        self.signal(pod, signal.SIGKILL)

        def again() -> bool:
            now = self.processes(pod)
            return bool(now) and now.isdisjoint(before)

        wait_until(again, lambda: f"a container to start again: {pod.why()}")
