"""A chip that a pod holds is nobody else's, whatever it is called by now. Real kubelets, reloads, chips that change.

Every list of devices that the daemon sends is in the kubelet's log with the number of healthy ones; so a chip that was
on offer for a moment only is found, too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

import ttdp
from tests.e2e.machine import VERSIONS
from tests.e2e.node import Node, Program
from tests.world.processes import wait_until

INTERVAL = 0.2  # seconds between two polls
DOMAIN = "tenstorrent.com"


@dataclass(frozen=True)
class Holder:
    """A pod that holds chips under the name that a resource had when it started."""

    node: Node
    resource: str
    pod: str
    chips: frozenset[str]  # PCI addresses

    def holds(self) -> bool:
        return bool(self.node.devices(self.resource, self.pod))

    def in_log(self) -> bool:
        """Whether the daemon has said that this pod holds what is offered under another name now."""
        return f"held by default/{self.pod}" in self.node.daemon.log.read_text()

    def wait_ended(self) -> None:
        wait_until(lambda: not self.holds(), f"the end of {self.pod}", 30)


def start_holder(node: Node, resource: str) -> Holder:
    pod = node.started({resource: 1})
    return Holder(node, resource, pod, frozenset(node.environment(pod)["TT_DEVICE_PLUGIN_DEVICES"].split(",")))


def reload(node: Node, config: str) -> None:
    """systemctl reload, with another configuration."""
    before = node.daemon.log.read_text().count("configuration reloaded")
    node.daemon.configure(config)
    node.daemon.reload()
    wait_until(lambda: node.daemon.log.read_text().count("configuration reloaded") > before, "the reload")


def offered(node: Node, resource: str, since: float) -> list[int]:
    """How many healthy devices each list of the resource had that the kubelet has got since then."""
    pushed = rf'"Processed device updates for resource" resourceName="{resource}" totalCount=\d+ healthyCount='
    return [int(line.rpartition("=")[2]) for at, line in node.kubelet.logged(pushed) if at >= since]


def until_released(node: Node, holders: list[Holder], resource: str, free: set[str], all_of_it: set[str]) -> None:
    """Only what is free is on offer while the holders hold; when they end all is, within a poll."""
    since = time.time()
    node.kubelet.wait_allocatable(resource, free)
    for holder in holders:
        assert holder.holds() and node.kubelet.running(holder.pod)
        wait_until(holder.in_log, f"a line on {holder.pod}")
    assert node.outcome(node.run({resource: len(free) + 1})).startswith("UnexpectedAdmissionError")
    *first, last = holders
    for holder in first:
        node.withdraw(holder.pod)
        holder.wait_ended()
    assert last.holds() and node.kubelet.allocatable(resource) == free
    assert max(offered(node, resource, since), default=0) <= len(free)
    node.withdraw(last.pod)
    last.wait_ended()
    ended = time.monotonic()
    node.kubelet.wait_allocatable(resource, all_of_it, 10)
    assert time.monotonic() - ended < INTERVAL + 1
    node.kubelet.wait_running(node.run({resource: len(all_of_it)}))


def config(**keys: str) -> str:
    return "".join(f'{key} = "{value}"\n' for key, value in keys.items())


def shared(name: str = "n300", rename: str = "") -> str:
    renamed = f'rename = "{rename}"\n' if rename else ""
    return f'[sharing]\nlock_dir = ""\n[[sharing.resources]]\nname = "{name}"\nreplicas = 2\n{renamed}'


def replicas(bdfs: set[str]) -> set[str]:
    return {f"{bdf}::{n}" for bdf in bdfs for n in range(2)}


# --- Reloads ----------------------------------------------------------------------------------------------------------


def test_from_board_to_card(node: Node) -> None:
    """Resources that are named by the exact card do not offer the chip that a pod holds under the board's name."""
    bdfs = {chip.bdf for chip in node.cards.add("p300c")}
    node.start_daemon(interval=INTERVAL)
    holder = start_holder(node, f"{DOMAIN}/p300")
    reload(node, config(resource_naming="card"))
    until_released(node, [holder], f"{DOMAIN}/p300c", bdfs - holder.chips, bdfs)


def boards(node: Node) -> dict[str, set[str]]:
    """PCI addresses by the board's serial number."""
    found: dict[str, set[str]] = {}
    for chip in node.cards.chips:
        found.setdefault(chip.facts.telemetry["tt_serial"], set()).add(chip.bdf)
    return found


def test_from_chip_to_board(node: Node) -> None:
    """A board of which a pod holds one chip is not on offer as a whole."""
    for _ in range(2):
        node.cards.add("p300c")
    node.start_daemon(interval=INTERVAL)
    holder = start_holder(node, f"{DOMAIN}/p300")
    reload(node, config(unit="board"))
    free = {serial for serial, bdfs in boards(node).items() if not bdfs & holder.chips}
    assert len(free) == 1
    until_released(node, [holder], f"{DOMAIN}/p300-board", free, {*boards(node)})


def test_from_board_to_chip(node: Node) -> None:
    """Neither chip of a board that a pod holds is on offer."""
    for _ in range(2):
        node.cards.add("p300c")
    resource = f"{DOMAIN}/p300-board"
    node.start_daemon(interval=INTERVAL, config=config(unit="board"), expected={resource: {*boards(node)}})
    holder = start_holder(node, resource)
    assert len(holder.chips) == 2
    reload(node, "")
    bdfs = {chip.bdf for chip in node.cards.chips}
    until_released(node, [holder], f"{DOMAIN}/p300", bdfs - holder.chips, bdfs)


@pytest.mark.parametrize("rename", ["", "n300-half"])
def test_from_exclusive_to_shared(node: Node, rename: str) -> None:
    """A chip that a pod has for itself is not shared before the pod's end, under the old name or another."""
    bdfs = {chip.bdf for _ in range(2) for chip in node.cards.add("n300")}
    node.start_daemon(interval=INTERVAL)
    holder = start_holder(node, f"{DOMAIN}/n300")
    several = "fail_requests_greater_than_one = false"
    reload(node, shared(rename=rename).replace("[sharing]", f"[sharing]\n{several}"))
    resource = f"{DOMAIN}/{rename or 'n300'}"
    until_released(node, [holder], resource, replicas(bdfs - holder.chips), replicas(bdfs))


def test_from_shared_to_exclusive(node: Node) -> None:
    """A chip that pods share is nobody's own before the last of them has ended."""
    bdfs = {chip.bdf for _ in range(2) for chip in node.cards.add("n300")}
    resource = f"{DOMAIN}/n300"
    node.start_daemon(interval=INTERVAL, config=shared(), expected={resource: replicas(bdfs)})
    holders = [start_holder(node, resource) for _ in range(3)]  # distinct chips come first, so two share one
    (both,) = {holder.chips for holder in holders if [other.chips for other in holders].count(holder.chips) == 2}
    (single,) = (holder for holder in holders if holder.chips != both)
    node.withdraw(single.pod)
    single.wait_ended()
    reload(node, "")
    until_released(node, [holder for holder in holders if holder.chips == both], resource, bdfs - both, bdfs)


# --- Chips that change ------------------------------------------------------------------------------------------------


def test_index_across_a_renumbering(node: Node) -> None:
    """Under `index`, a chip that a pod holds under its former number is not on offer under the one that it has now."""
    bdfs = [chip.bdf for _ in range(3) for chip in node.cards.add("n300")]
    resource = f"{DOMAIN}/n300"
    start = {str(chip.ordinal) for chip in node.cards.chips}
    node.start_daemon(interval=INTERVAL, config=config(device_id_strategy="index"), expected={resource: start})
    holder = start_holder(node, resource)
    (mine,) = holder.chips
    (before,) = node.devices(resource, holder.pod)
    node.cards.swap_ordinals(mine, next(bdf for bdf in bdfs if bdf != mine))
    now = str(node.cards.chip(mine).ordinal)
    wait_until(lambda: now not in node.kubelet.allocatable(resource), "the chip to leave allocatable")
    since = time.time()
    wait_until(holder.in_log, f"a line on {holder.pod}")
    third = (start - {before, now}).pop()
    other = node.started({resource: 1})  # the last one that is neither held nor called as one that is
    assert node.devices(resource, other) == {third}
    assert node.outcome(node.run({resource: 1})).startswith("UnexpectedAdmissionError")
    assert max(offered(node, resource, since), default=0) <= 2
    node.withdraw(holder.pod)
    node.kubelet.wait_allocatable(resource, start)
    chips = {frozenset(start_holder(node, resource).chips) for _ in range(2)}
    assert chips == {frozenset({bdf}) for bdf in bdfs if bdf not in node.environment(other)["TT_DEVICE_PLUGIN_DEVICES"]}


def test_a_late_asic_id(node: Node) -> None:
    """Under `asic`, a chip that a pod holds by its address is not on offer by the ASIC ID that comes late."""
    (chip,) = node.cards.add("n150")
    chip.silence()
    resource = f"{DOMAIN}/n150"
    node.start_daemon(interval=INTERVAL, config=config(device_id_strategy="asic"), expected={resource: {chip.bdf}})
    holder = start_holder(node, resource)
    chip.speak()
    identifier = f"wormhole-{chip.facts.telemetry['tt_asic_id']}"
    until_released(node, [holder], resource, set(), {identifier})


# --- The kubelet restarts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kubelet_that_has_just_started(program: Program, version: str) -> None:
    """A kubelet names no holder for a second after its start, and the chip is not on offer in that second either."""
    with Node(version, program, static_pods=False) as node:
        bdfs = {chip.bdf for chip in node.cards.add("p300c")}
        node.start_daemon(interval=INTERVAL)
        holder = start_holder(node, f"{DOMAIN}/p300")
        reload(node, config(resource_naming="card"))
        free, resource = bdfs - holder.chips, f"{DOMAIN}/p300c"
        node.kubelet.wait_allocatable(resource, free)
        by_itself = time.monotonic() + ttdp.ADMISSION  # until then the daemon remembers what it has handed out
        last = False
        while not last:
            last = time.monotonic() > by_itself
            node.kubelet.stop()
            since = time.time()
            node.kubelet.start()
            wait_until(holder.holds, "the kubelet to name the holder", 30)
            assert offered(node, resource, since) and max(offered(node, resource, since)) == len(free)
        assert node.kubelet.running(holder.pod)
        until_released(node, [holder], resource, free, bdfs)
