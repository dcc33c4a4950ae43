"""A node of whose pods it is known what they were given, and what they have open.

Its cards are two p300c, four chips: the rules here know what each of CONFIGURATIONS lists of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.e2e.node import Node, NodePod
from tests.e2e.openers import LOCKS, Openers
from tests.e2e.pods import manifest
from tests.e2e.steps import JSON
from tests.world.checkpoint import Entry
from tests.world.node import SimulatedNode
from tests.world.processes import wait_until

INTERVAL = 0.2  # seconds between two polls
DOMAIN = "tenstorrent.com"
P300 = f"{DOMAIN}/p300"
ONE = {P300: 1}
STUBBORN = 6  # seconds for which a pod that ignores SIGTERM runs on

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
    resources: Mapping[str, int], *, stubborn: bool = False, script: str = HOLD, **others: Any
) -> JSON:
    """Return a pod's manifest. stubborn: it ignores SIGTERM; others: of pods.manifest()."""
    filled = script.replace("{term}", "''" if stubborn else "'exit 0'")
    return manifest(resources, command=["sh", "-c", filled], grace=STUBBORN, **others)


W = TypeVar("W", bound="Ward")


class Ward(Node):
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

    def serve(self, config: str = "") -> None:
        """Start the daemon, and wait until the kubelet has what it lists."""
        self.start_daemon(config, INTERVAL, expected={})
        self.wait_offered(config, [])

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

    def wait_offered(self, config: str, held: Sequence[Held]) -> None:
        """Wait until the kubelet has exactly this: what nobody has, and what these pods have."""
        expected = expectation(listing(self.cards, config), held)
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

    def held(self, *pods: NodePod) -> list[Held]:
        """Return what the kubelet has written down that these pods were given."""
        uids = {pod.uid for pod in pods}
        data = json.loads(self.kubelet.checkpoint.read_text())["Data"]
        entries = [Entry.parse(item) for item in data["PodDeviceEntries"] or ()]
        return [Held.of(entry) for entry in entries if entry.uid in uids]

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
        """Return when the first process started that has a pod's device files open."""
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


# --- What is listed, and what of it is healthy ----------------------------------------------------

Offer = dict[str, dict[str, frozenset[str]]]  # a configuration's chips, by resource and ID


class Held(NamedTuple):
    """What the kubelet has written down that a pod was given."""

    resource: str
    ids: frozenset[str]
    chips: frozenset[str]  # PCI addresses

    @classmethod
    def of(cls, entry: Entry) -> Held:
        chips = entry.held.answer.envs["TT_DEVICE_PLUGIN_DEVICES"].split(",")
        return cls(entry.resource, frozenset(entry.held.ids), frozenset(chips))


def _shared(more: str = "") -> str:
    entry = f'[[sharing.resources]]\nname = "p300"\nreplicas = 2\n{more}'
    return f'[sharing]\nlock_dir = "/run{LOCKS}"\n{entry}'


BOARDS, CARDS = 'unit = "board"\n', 'resource_naming = "card"\n'
ELSEWHERE = 'resource_domain = "example.org"\n'
SHARED, RENAMED = _shared(), _shared('rename = "p300-half"\n')
RESOURCES = {  # the one resource of each configuration
    "": P300,
    CARDS: f"{DOMAIN}/p300c",
    BOARDS: f"{DOMAIN}/p300-board",
    ELSEWHERE: "example.org/p300",
    SHARED: P300,
    RENAMED: f"{DOMAIN}/p300-half",
}
CONFIGURATIONS = [*RESOURCES]


def listing(cards: SimulatedNode, config: str) -> Offer:
    """Return what each ID stands for, of two p300c."""
    devices: dict[str, frozenset[str]] = {}
    for chip in cards.chips:
        if config == BOARDS:
            serial = chip.telemetry["tt_serial"]
            devices[serial] = devices.get(serial, frozenset()) | {chip.bdf}
        elif config in (SHARED, RENAMED):
            devices |= {f"{chip.bdf}::{n}": frozenset([chip.bdf]) for n in range(2)}
        else:
            devices[chip.bdf] = frozenset([chip.bdf])
    return {RESOURCES[config]: devices}


def expectation(given: Offer, held: Sequence[Held]) -> dict[str, set[str]]:
    """Return what is healthy: what pods have, by their IDs, and what is left of what is given."""
    expected: dict[str, set[str]] = {}
    for resource, devices in given.items():
        free = {ident for ident in devices if _is_free(resource, ident, devices[ident], held)}
        expected[resource] = free
    for each in held:
        expected.setdefault(each.resource, set()).update(each.ids)
    return {resource: ids for resource, ids in expected.items() if ids}


def _is_free(resource: str, ident: str, chips: frozenset[str], held: Sequence[Held]) -> bool:
    """Return whether no pod has one of these chips, but as another replica of the same device."""
    for each in held:
        bases = {other.partition("::")[0] for other in each.ids if "::" in other}
        is_fellow = (
            each.resource == resource and "::" in ident and ident.partition("::")[0] in bases
        )
        if each.chips & chips and not is_fellow:
            return False
    return True
