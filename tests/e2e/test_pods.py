"""Real kubelets and the daemon: pods get their devices, and keep them through a reboot.

Kubelets, containerd, runc and the device files are real; only the cards are simulated.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import Told
from tests.e2e.machine import VERSIONS
from tests.e2e.node import FORBIDDEN, N300, OPENABLE, RUNNING, Node, Outcome, Program
from tests.world.node import Chip
from tests.world.processes import wait_until

GALAXY = "tenstorrent.com/galaxy-blackhole"


def add(node: Node, count: int, card: str = "n300") -> list[Chip]:
    return [chip for _ in range(count) for chip in node.cards.add(card)]


def ids(chips: list[Chip]) -> set[str]:
    return {chip.bdf for chip in chips}


# --- Devices and pods -----------------------------------------------------------------------------


def test_pod_gets_exactly_its_device(node: Node) -> None:
    """A container can open its device file and no other, not even one that it creates itself."""
    add(node, 3)
    node.start_daemon()
    for name in [node.started({N300: 1}, user=user) for user in (None, None, 1000)]:
        (bdf,) = node.devices(N300, name)
        path = f"/dev/tenstorrent/{node.cards.chip(bdf).ordinal}"
        own = node.host_number(bdf)
        assert node.device_files(name) == {path}
        assert node.number_inside(name, path) == own
        assert node.open_inside(name, path) == "opened"
        if node.inside(name, "id", "-u").stdout.strip() == "0":
            for number in OPENABLE:  # its own device, other cards', and another one of the host
                expected = "opened" if number == own else FORBIDDEN
                assert node.make_and_open_inside(name, number) == expected


def test_eight_of_a_galaxy_are_one_tray(node: Node) -> None:
    """Pods with eight chips of a Galaxy get a tray each, but not the one that is broken into."""
    trays: dict[str, set[str]] = {}
    for chip in add(node, 1, "galaxy-blackhole"):
        trays.setdefault(chip.bdf[: len("0000:c")], set()).add(chip.bdf)
    node.start_daemon()
    single = node.devices(GALAXY, node.started({GALAXY: 1}))
    whole = [tray for tray in trays.values() if not single <= tray]
    eights = [node.started({GALAXY: 8}) for _ in whole]
    found = [node.devices(GALAXY, name) for name in eights]
    assert len(whole) == 3 and sorted(map(sorted, found)) == sorted(map(sorted, whole))
    assert len(node.device_files(eights[0])) == 8


def test_single_numa_node(node: Node) -> None:
    """Under `single-numa-node` two chips are of one NUMA node, or the pod is refused."""
    near = {chip.bdf for _ in range(3) for chip in node.cards.add("n300", numa_node=0)}
    far = {chip.bdf for chip in node.cards.add("n300", numa_node=1)}
    try:
        node.restart_kubelet(topologyManagerPolicy="single-numa-node")
        node.start_daemon()
        first = node.devices(N300, node.started({N300: 2}))
        assert len(first) == 2 and first < near
        refused = node.outcome(node.run({N300: 2}))  # one is free here, one there
        assert refused.startswith("TopologyAffinityError: Pod was rejected: Resources cannot be")
        last = [node.devices(N300, node.started({N300: 1})) for _ in range(2)]
        assert set().union(*last) == (near | far) - first
    finally:
        node.restart_kubelet(topologyManagerPolicy="none")


# --- Faults and restarts --------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pods_status_has_its_chips_health(program: Program, version: str) -> None:
    """`allocatedResourcesStatus` is on by default since 1.36, and a feature gate before."""
    config = {"featureGates": {"ResourceHealthStatus": True}} if version == "1.35" else {}
    with Node(version, program, static_pods=False, config=config) as node:
        chips = add(node, 2)
        node.start_daemon(interval=0.2)
        name = node.started({N300: 1})
        (bdf,) = node.devices(N300, name)
        (other,) = ids(chips) - {bdf}

        def health() -> object:
            found = node.find(name)
            assert found is not None
            (container,) = found["status"]["containerStatuses"]
            return container.get("allocatedResourcesStatus")

        def wait_health(expected: str) -> None:
            wanted = [{"name": N300, "resources": [{"resourceID": bdf, "health": expected}]}]
            wait_until(lambda: health() == wanted, lambda: f"{wanted}, not {health()}", 30)

        wait_health("Healthy")
        node.cards.chip(other).die()
        node.kubelet.wait_allocatable(N300, {bdf})
        for end, again in ((Chip.die, Chip.revive), (Chip.vanish, Chip.come_back)):
            end(node.cards.chip(bdf))
            wait_health("Unhealthy")
            again(node.cards.chip(bdf))
            wait_health("Healthy")


def test_daemon_is_upgraded(node: Node, told: Told) -> None:
    """While the daemon is away, pods run on; then new ones run, too."""
    cards = add(node, 3)
    node.start_daemon()
    old = node.started({N300: 1})
    before = node.containers(old)
    held = node.devices(N300, old)
    # dpkg replaces the file under the running daemon, then systemd restarts it.
    node.daemon.install()
    node.daemon.stop()
    node.kubelet.wait_allocatable(N300, set())
    began = time.monotonic()
    node.daemon.start()
    node.kubelet.wait_allocatable(N300, ids(cards))
    told(f"kubelet {node.version}: allocatable after {time.monotonic() - began:.1f} s")
    new = node.started({N300: 2})
    assert node.kubelet.running(old) and node.containers(old) == before
    assert node.devices(N300, old) == held and node.devices(N300, new) == ids(cards) - held


def test_restarted_container_keeps_its_chip(node: Node) -> None:
    """A container that crashes after a renumbering is made again with the chip that it had."""
    bdfs = [chip.bdf for chip in add(node, 2)]
    node.start_daemon(interval=0.2)
    name = node.started({N300: 1})
    (mine,) = node.devices(N300, name)
    path, number = f"/dev/tenstorrent/{node.cards.chip(mine).ordinal}", node.host_number(mine)
    node.cards.swap_ordinals(*bdfs)
    node.kubelet.wait_allocatable(N300, set(bdfs))
    node.crash_containers([name])
    assert node.number_inside(name, path) == node.host_number(mine) != number
    assert node.open_inside(name, path) == "opened"


# --- Reboots --------------------------------------------------------------------------------------

REBOOTS = int(os.environ.get("REBOOTS", "6"))  # of each kind; README.md's are 20
LATE = 5.0  # seconds
DEVICE_PODS = ((1, 1), (1, 1), (2, 2))  # chips and containers
REFUSED = (
    "UnexpectedAdmissionError: Pod was rejected: Allocate failed due to "
    f"no healthy devices present; cannot allocate unhealthy devices {N300}, which is unexpected"
)


def start_device_pods(node: Node) -> list[str]:
    """Return pods that run; right after others were refused that takes a few seconds."""

    def attempt() -> list[str] | None:
        names = [node.run({N300: chips // n}, containers=n) for chips, n in DEVICE_PODS]
        if {node.outcome(name) for name in names} == {RUNNING}:
            return names
        node.withdraw(*names)
        return None

    return wait_until(attempt, "pods with devices to run", 60)


def reboot(version: str, program: Program, late: float | None) -> list[Outcome]:
    """Reboot a node REBOOTS times; return what became of its pods each time."""
    found: list[Outcome] = []
    with Node(version, program, static_pods=False) as node:
        add(node, 6)
        node.start_daemon()
        names: list[str] = []
        for _ in range(REBOOTS):
            names = names or start_device_pods(node)
            held = node.kubelet.assigned(N300)
            node.reboot(daemon_late_by=late)
            node.wait_complete()
            outcomes = [node.outcome(name) for name in names]
            found += outcomes
            if set(outcomes) == {RUNNING}:
                assert node.kubelet.assigned(N300) == held
            else:
                names = []  # a pod that was refused stays so
                node.withdraw()
    return found


@pytest.mark.parametrize("late", [None, LATE], ids=["first", "late"])
def test_reboot(program: Program, told: Told, late: float | None) -> None:
    """A daemon that starts before the kubelet loses no pod; one that starts after it loses all."""
    expected = REFUSED if late else RUNNING
    with ThreadPoolExecutor(len(VERSIONS)) as threads:
        reboots = [threads.submit(reboot, version, program, late) for version in VERSIONS]
    for version, done in zip(VERSIONS, reboots, strict=True):
        outcomes = done.result()
        count = f"{outcomes.count(RUNNING)} of {len(outcomes)} pods admitted"
        start = f"{late:g} s late" if late else "first"
        told(f"kubelet {version}, daemon {start}, {REBOOTS} reboots: {count}")
        assert set(outcomes) == {expected} and len(outcomes) == REBOOTS * len(DEVICE_PODS)
