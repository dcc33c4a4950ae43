"""A node of whose pods it is known what they were given, and what they have open."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from generated import deviceplugin_pb2 as pb
from tests.e2e.machine import JSON, NODE_NAME, pod, refusal
from tests.e2e.node import Node, Program
from tests.e2e.openers import LOCKS, Openers
from tests.world.checkpoint import CHECKPOINT
from tests.world.node import SimulatedNode
from tests.world.processes import wait_until

INTERVAL = 0.2  # seconds between two polls
DOMAIN = "tenstorrent.com"
P300 = f"{DOMAIN}/p300"
LONG = 60.0  # seconds after which something is taken for hung
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


class Held(NamedTuple):
    """What the kubelet has written down that a pod was given."""

    resource: str
    ids: frozenset[str]
    chips: frozenset[str]  # PCI addresses


Offer = dict[str, dict[str, frozenset[str]]]  # a configuration's chips, by resource and ID


class Pod(NamedTuple):
    name: str
    uid: str
    is_static: bool


class Ward(Node):
    """A node with an API server, of whose pods it is known what they have open."""

    def __init__(self, version: str, program: Program, policy: str = "none") -> None:
        """`policy`: the Topology Manager's."""
        config = {"topologyManagerPolicy": policy}
        super().__init__(version, program, static_pods=False, config=config)
        self._openers: Openers | None = None
        self._static: list[str] = []

    @property
    def cards(self) -> SimulatedNode:
        if self._cards is None:
            self._openers = Openers(self.machine, super().cards)
            self._ticker.enter_context(self._openers)
        return super().cards

    @property
    def openers(self) -> Openers:
        assert self._openers is not None, "there are no cards"
        return self._openers

    def assert_apart(self) -> None:
        """Look once more, and tell whether any look has found two pods at one node."""
        looks = self.openers.looks + 2
        wait_until(lambda: self.openers.looks >= looks, "a look", LONG)
        assert not self.openers.violations, "\n".join(self.openers.violations)

    # The daemon

    def serve(self, config: str = "") -> None:
        """Start the daemon, and wait until the kubelet has what it lists."""
        self.start_daemon(interval=INTERVAL, config=config, expected={})
        self.wait_offered(listing(self.cards, config), [])

    def waits(self) -> int:
        """Return how many container starts have waited for a pod, by the daemon's log."""
        return self.daemon.log.read_text().count("container start waits: ")

    def reconfigure(self, config: str) -> None:
        """Do what systemctl reload does, with another configuration."""

        def reloads() -> int:
            return self.daemon.log.read_text().count("configuration reloaded")

        before = reloads()
        self.daemon.configure(config)
        self.daemon.reload()
        wait_until(lambda: reloads() > before, "the reload", LONG)

    def offered(self) -> dict[str, set[str]]:
        """Return the IDs that the kubelet takes for healthy, by resource."""
        return self.kubelet.allocatable_by_resource()

    def wait_offered(self, given: Offer, held: Sequence[Held]) -> None:
        """Wait until exactly this is offered: what nobody has, and what they have."""
        expected = expectation(given, held)
        wait_until(
            lambda: self.offered() == expected,
            lambda: f"{expected} to be offered; there is {self.offered()}\n{self.last_words()}",
            LONG,
        )

    def _checkpoint(self) -> JSON:
        file = self.kubelet.device_plugin_dir / CHECKPOINT
        try:
            return dict(json.loads(file.read_text())["Data"])
        except FileNotFoundError:
            return {"PodDeviceEntries": None}

    def held(self, *pods: Pod) -> list[Held]:
        """Return what stands in the kubelet's file of these pods."""
        found = []
        for entry in self._checkpoint()["PodDeviceEntries"] or ():
            if entry["PodUID"] in {each.uid for each in pods}:
                answer = base64.b64decode(entry["AllocResp"])
                envs = pb.ContainerAllocateResponse.FromString(answer).envs
                ids = frozenset().union(*entry["DeviceIDs"].values())
                chips = frozenset(envs["TT_DEVICE_PLUGIN_DEVICES"].split(","))
                found.append(Held(entry["ResourceName"], ids, chips))
        return found

    # Pods

    def create(
        self,
        resource: str,
        count: int = 1,
        *,
        stubborn: bool = False,
        once: bool = False,
        static: bool = False,
        script: str = HOLD,
        change: Callable[[JSON], None] = lambda spec: None,
    ) -> Pod:
        """Create a pod. stubborn: it ignores SIGTERM; once: it is not started again."""
        name = f"{'static' if static else 'pod'}-{time.monotonic_ns()}"
        term = "''" if stubborn else "'exit 0'"
        command = ["sh", "-c", script.format(term=term)]
        restart = "Never" if once else "Always"
        manifest = pod(name, {resource: count}, command=command, restart=restart)
        manifest["spec"]["terminationGracePeriodSeconds"] = STUBBORN
        change(manifest["spec"])
        if static:
            self._static.append(name)
            self.kubelet.run_pod(manifest)
            name = f"{name}-{NODE_NAME}"
        else:
            self._pods.append(name)
            assert self.api is not None
            self.api.add_pod(manifest, NODE_NAME)
        # The API server's copy of a static pod has a UID of its own.
        find = self.kubelet.get_pod if static else self.find
        found = wait_until(lambda: find(name), f"{name} to be known", LONG)
        return Pod(name, str(found["metadata"]["uid"]), static)

    def started(self, resource: str, count: int = 1, **others: Any) -> Pod:  # type: ignore[override]
        """Create a pod, and wait until it has its nodes open."""
        created = self.create(resource, count, **others)
        self.wait_holds(created)
        return created

    def opened(self, holder: Pod) -> set[str]:
        """Return the chips that a pod has open."""
        return self.openers.of(holder.uid)

    def refused(self, holder: Pod) -> str | None:
        found = self.kubelet.get_pod(holder.name)
        return refusal(found["status"]) if found else None

    def wait_holds(self, *holders: Pod) -> None:
        """Wait until these pods have something open."""
        for each in holders:
            wait_until(partial(self.opened, each), partial(self.why, each), LONG)

    def why(self, holder: Pod) -> str:
        """Return what is known of a pod that is not as it should be."""
        return f"{self.kubelet.get_pod(holder.name)}\n{self.last_words()}"

    def has_ended(self, holder: Pod) -> bool:
        name = f"pod{holder.uid}"
        return not any(name in names for _, names, _ in os.walk(self.machine.cgroups))

    def started_at(self, holder: Pod) -> float:
        """Return when the first process started that has a pod's device files open."""
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in self.processes(holder)]
        ticks = [int(stat.rpartition(")")[2].split()[19]) for stat in stats]  # starttime
        return min(ticks) / os.sysconf("SC_CLK_TCK")

    def wait_released(self, holder: Pod) -> None:
        """Wait until a scheduler would give a pod's devices to the next one."""

        def has_ended() -> bool:
            found = self.find(holder.name)
            return not found or found["status"]["phase"] in ("Succeeded", "Failed")

        wait_until(has_ended, f"the end of {holder}", LONG)

    def delete(self, holder: Pod) -> None:
        """Delete a pod in an orderly manner, and do not wait."""
        if holder.is_static:
            return self.force_delete(holder)
        assert self.api is not None
        self.api.delete_pod(holder.name, grace=1)
        self._pods.remove(holder.name)
        self._going.append(holder.name)

    def force_delete(self, holder: Pod) -> None:
        """Delete a pod's object, or manifest, at once: its containers run on for their grace."""
        if holder.is_static:
            name = holder.name.removesuffix(f"-{NODE_NAME}")
            self._static.remove(name)
            self.kubelet.withdraw_pod(name)
            self._going.append(holder.name)
        else:
            self.withdraw(holder.name)

    def wait_ended(self, *holders: Pod) -> None:
        for holder in holders:
            wait_until(partial(self.has_ended, holder), f"the end of {holder}", LONG)

    def processes(self, holder: Pod) -> set[int]:
        """Return the processes that have a pod's device files open."""
        return {each.host_pid for each in self.openers.now if each.pod == holder.uid}

    def signal(self, holder: Pod, number: signal.Signals) -> None:
        """Send a signal to the processes that have a pod's device files open."""
        for pid in self.processes(holder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def crash(self, holder: Pod) -> None:
        """Kill a pod's container, and wait until it has been started again."""
        before = self.processes(holder)
        self.signal(holder, signal.SIGKILL)

        def again() -> bool:
            now = self.processes(holder)
            return bool(now) and now.isdisjoint(before)

        wait_until(again, lambda: f"{holder} to start again: {self.why(holder)}", LONG)

    def clear(self) -> None:
        for name in self._static:
            self.kubelet.withdraw_pod(name)
            self._going.append(f"{name}-{NODE_NAME}")
        self._static = []
        super().clear()
        self._openers = None


def listing(cards: SimulatedNode, config: str) -> Offer:
    """Return what each ID stands for, of two p300c."""
    chips = {chip.bdf: chip.telemetry for chip in cards.chips}
    if config == BOARDS:
        boards: dict[str, frozenset[str]] = {}
        for bdf, telemetry in chips.items():
            serial = telemetry["tt_serial"]
            boards[serial] = boards.get(serial, frozenset()) | {bdf}
        return {f"{DOMAIN}/p300-board": boards}
    single = {bdf: frozenset([bdf]) for bdf in chips}
    if config == CARDS:
        return {f"{DOMAIN}/p300c": single}
    if config == ELSEWHERE:
        return {"example.org/p300": single}
    if config in (SHARED, RENAMED):
        replicas = {f"{bdf}::{n}": chips for bdf, chips in single.items() for n in range(2)}
        return {P300 if config == SHARED else f"{DOMAIN}/p300-half": replicas}
    assert config == "", config
    return {P300: single}


def _shared(more: str = "") -> str:
    entry = f'[[sharing.resources]]\nname = "p300"\nreplicas = 2\n{more}'
    return f'[sharing]\nlock_dir = "/run{LOCKS}"\n{entry}'


BOARDS, CARDS = 'unit = "board"\n', 'resource_naming = "card"\n'
ELSEWHERE = 'resource_domain = "example.org"\n'
SHARED, RENAMED = _shared(), _shared('rename = "p300-half"\n')
CONFIGURATIONS = {
    "chips": "",
    "cards": CARDS,
    "boards": BOARDS,
    "elsewhere": ELSEWHERE,
    "shared": SHARED,
    "renamed": RENAMED,
}


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
    for each in held:
        bases = {other.partition("::")[0] for other in each.ids if "::" in other}
        is_fellow = (
            each.resource == resource and "::" in ident and ident.partition("::")[0] in bases
        )
        if each.chips & chips and not is_fellow:
            return False
    return True
