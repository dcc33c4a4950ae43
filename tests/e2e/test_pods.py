"""Real kubelets and the daemon: pods get their devices, and keep them through a reboot.

Kubelets, containerd, runc and the device files are real; only the cards are simulated.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.conftest import Told
from tests.e2e.node import N300, Node, NodePod
from tests.e2e.pods import RUNNING, Outcome
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

    for user in (None, None, 1000):
        pod = node.started({N300: 1}, user=user)
        (bdf,) = pod.devices(N300)
        pod.assert_has_only(bdf)
        if user is None:
            pod.assert_can_make_only(bdf)


def test_eight_of_a_galaxy_are_one_tray(node: Node) -> None:
    """Pods with eight chips of a Galaxy get a tray each, but not the one that is broken into."""
    trays: dict[str, set[str]] = {}
    for chip in add(node, 1, "galaxy-blackhole"):
        trays.setdefault(chip.bdf[: len("0000:c")], set()).add(chip.bdf)
    node.start_daemon()
    single = node.started({GALAXY: 1}).devices(GALAXY)
    whole = [tray for tray in trays.values() if not single <= tray]

    eights = [node.started({GALAXY: 8}) for _ in whole]

    found = [pod.devices(GALAXY) for pod in eights]
    assert len(whole) == 3 and sorted(map(sorted, found)) == sorted(map(sorted, whole))
    assert len(eights[0].device_files()) == 8


def test_single_numa_node(node: Node) -> None:
    """Under `single-numa-node` two chips are of one NUMA node, or the pod is refused."""
    near = {chip.bdf for _ in range(3) for chip in node.cards.add("n300", numa_node=0)}
    far = {chip.bdf for chip in node.cards.add("n300", numa_node=1)}
    try:
        node.kubelet.restart(topologyManagerPolicy="single-numa-node")
        node.start_daemon()

        first = node.started({N300: 2}).devices(N300)
        assert len(first) == 2 and first < near

        refused = node.create({N300: 2}).outcome()  # one is free here, one there
        assert refused.startswith("TopologyAffinityError: Pod was rejected: Resources cannot be")

        last = [node.started({N300: 1}).devices(N300) for _ in range(2)]
        assert set().union(*last) == (near | far) - first
    finally:
        node.kubelet.restart(topologyManagerPolicy="none")


# --- Faults and restarts --------------------------------------------------------------------------


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_pods_status_has_its_chips_health(version: str) -> None:
    """`allocatedResourcesStatus` is on by default since 1.36, and a feature gate before."""
    config = {"featureGates": {"ResourceHealthStatus": True}} if version == "1.35" else {}
    with Node(version, static_pods=False, config=config) as node:
        chips = add(node, 2)
        node.start_daemon(interval=0.5)
        pod = node.started({N300: 1})
        (bdf,) = pod.devices(N300)
        (other,) = ids(chips) - {bdf}

        def health() -> object:
            (container,) = pod.status["containerStatuses"]
            return container.get("allocatedResourcesStatus")

        def wait_health(expected: str) -> None:
            wanted = [{"name": N300, "resources": [{"resourceID": bdf, "health": expected}]}]
            wait_until(lambda: health() == wanted, lambda: f"{wanted}, not {health()}")

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
    before, held = old.containers(), old.devices(N300)

    # dpkg replaces the file under the running daemon, then systemd restarts it.
    node.daemon.install()
    node.daemon.stop()
    node.kubelet.wait_allocatable(N300, set())
    began = time.monotonic()
    node.daemon.start()
    node.kubelet.wait_allocatable(N300, ids(cards))
    told(f"kubelet {node.version}: allocatable after {time.monotonic() - began:.1f} s")

    new = node.started({N300: 2})
    assert old.is_running() and old.containers() == before
    assert old.devices(N300) == held and new.devices(N300) == ids(cards) - held


def test_restarted_container_keeps_its_chip(node: Node) -> None:
    """A container that crashes after a renumbering is made again with the chip that it had."""
    bdfs = [chip.bdf for chip in add(node, 2)]
    node.start_daemon(interval=0.5)
    pod = node.started({N300: 1})
    (mine,) = pod.devices(N300)
    path, former = f"/dev/tenstorrent/{node.cards.chip(mine).ordinal}", node.host_number(mine)

    node.cards.swap_ordinals(*bdfs)
    node.kubelet.wait_allocatable(N300, set(bdfs))
    pod.kill()
    pod.wait_running()

    assert pod.number(path) == node.host_number(mine) != former
    assert pod.open(path) == "opened"


# --- Reboots --------------------------------------------------------------------------------------

REBOOTS = int(os.environ.get("REBOOTS", "6"))  # of each kind; README.md's are 20
LATE = 5.0  # seconds, at least
DEVICE_PODS = ((1, 1), (1, 1), (2, 2))  # chips and containers
REFUSED = (
    "UnexpectedAdmissionError: Pod was rejected: Allocate failed due to "
    f"no healthy devices present; cannot allocate unhealthy devices {N300}, which is unexpected"
)


def start_device_pods(node: Node) -> list[NodePod]:
    """Return pods that run; right after others were refused that takes a few seconds."""

    def attempt() -> list[NodePod] | None:
        pods = [node.create({N300: chips // n}, containers=n) for chips, n in DEVICE_PODS]
        if {pod.outcome() for pod in pods} == {RUNNING}:
            return pods
        for pod in pods:
            pod.force_delete()
        return None

    return wait_until(attempt, "pods with devices to run")


def reboot(version: str, late: float | None) -> list[Outcome]:
    """Reboot a node REBOOTS times; return what became of its pods each time.

    late: how many seconds later than the kubelet the daemon starts; more if the kubelet, on a busy
    machine, takes longer to decide on its pods.
    """
    found: list[Outcome] = []
    pods: list[NodePod] = []

    def be_late() -> None:
        time.sleep(late or 0.0)
        for pod in pods:
            pod.outcome()

    with Node(version, static_pods=False) as node:
        add(node, 6)
        node.start_daemon()
        for _ in range(REBOOTS):
            pods = pods or start_device_pods(node)
            held = node.kubelet.assigned(N300)

            node.reboot(before_daemon=be_late if late else None)
            node.wait_complete()

            outcomes = [pod.outcome() for pod in pods]
            found += outcomes
            if set(outcomes) == {RUNNING}:
                assert node.kubelet.assigned(N300) == held
            else:  # a pod that was refused stays so
                for pod in pods:
                    pod.force_delete()
                pods = []
    return found


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("late", [None, LATE], ids=["first", "late"])
def test_reboot(told: Told, late: float | None) -> None:
    """A daemon that starts before the kubelet loses no pod; one that starts after it loses all."""
    expected = REFUSED if late else RUNNING

    with ThreadPoolExecutor(len(VERSIONS)) as threads:
        reboots = [threads.submit(reboot, version, late) for version in VERSIONS]

    for version, done in zip(VERSIONS, reboots, strict=True):
        outcomes = done.result()
        count = f"{outcomes.count(RUNNING)} of {len(outcomes)} pods admitted"
        start = f"{late:g} s late" if late else "first"
        told(f"kubelet {version}, daemon {start}, {REBOOTS} reboots: {count}")
        assert set(outcomes) == {expected} and len(outcomes) == REBOOTS * len(DEVICE_PODS)
