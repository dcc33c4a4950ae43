"""Real kubelets and the daemon: pods get their devices, and keep them through a reboot.

Kubelets, containerd, runc and the device files are real; only the cards are simulated.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.conftest import Told
from tests.e2e.node import N300, Node
from tests.e2e.pods import RUNNING
from tests.world.node import Chip
from tests.world.processes import wait_until

GALAXY = "tenstorrent.com/galaxy-blackhole"
REBOOTS = int(os.environ.get("REBOOTS", "6"))  # README.md's are 20


def add(node: Node, count: int, card: str = "n300", numa_node: int = 0) -> set[str]:
    """Add cards; return the addresses of their chips."""
    return {chip.bdf for _ in range(count) for chip in node.cards.add(card, numa_node=numa_node)}


def test_a_pod_gets_exactly_its_device(node: Node) -> None:
    """A container can open its device file and no other, not even one that it creates itself."""
    add(node, 2)
    node.start_daemon()

    root, user = node.started({N300: 1}), node.started({N300: 1}, user=1000)

    for pod in (root, user):
        (bdf,) = pod.devices(N300)
        pod.assert_has_only(bdf)
    root.assert_can_make_only(*root.devices(N300))


def test_eight_of_a_galaxy_are_one_tray(node: Node) -> None:
    """Pods with eight chips of a Galaxy get a tray each, but not the one that is broken into."""
    chips = add(node, 1, "galaxy-blackhole")
    node.start_daemon()
    (single,) = node.started({GALAXY: 1}).devices(GALAXY)

    eights = [node.started({GALAXY: 8}) for _ in range(3)]

    found = [pod.devices(GALAXY) for pod in eights]
    assert set().union(*found) == {bdf for bdf in chips if bdf[:6] != single[:6]}
    assert all(len({bdf[:6] for bdf in tray}) == 1 for tray in found)  # "0000:c"
    assert len(eights[0].device_files()) == 8


@pytest.mark.usefixtures("tools")
@pytest.mark.parametrize("version", VERSIONS)
def test_single_numa_node(version: str) -> None:
    """Under `single-numa-node` two chips are of one NUMA node, or the pod is refused."""
    with Node(version, config={"topologyManagerPolicy": "single-numa-node"}) as node:
        near, far = add(node, 3), add(node, 1, numa_node=1)
        node.start_daemon()

        first = node.started({N300: 2}).devices(N300)
        refused = node.create({N300: 2}).outcome()  # one is free here, one there
        last = [node.started({N300: 1}).devices(N300) for _ in range(2)]

        assert len(first) == 2 and first < near
        assert refused.startswith("TopologyAffinityError: Pod was rejected: Resources cannot be")
        assert set().union(*last) == (near | far) - first


def test_a_pods_status_has_its_chips_health(node: Node) -> None:
    """A fault, or a chip's absence, is its pod's `allocatedResourcesStatus`; so is the recovery."""
    chips = add(node, 2)
    node.start_daemon(interval=0.5)
    pod = node.started({N300: 1})
    (bdf,) = pod.devices(N300)
    chip = node.cards.chip(bdf)

    def wait_health(expected: str) -> None:
        wanted = [{"name": N300, "resources": [{"resourceID": bdf, "health": expected}]}]
        wait_until(
            lambda: pod.status["containerStatuses"][0].get("allocatedResourcesStatus") == wanted,
            lambda: f"{wanted}: {pod.why()}",
        )

    wait_health("Healthy")
    for end, again in ((Chip.die, Chip.revive), (Chip.vanish, Chip.come_back)):
        end(chip)
        wait_health("Unhealthy")
        node.kubelet.wait_allocatable(N300, chips - {bdf})
        again(chip)
        wait_health("Healthy")


def test_the_daemon_is_restarted(node: Node, told: Told) -> None:
    """While the daemon is away, pods run on; then new ones run, too."""
    chips = add(node, 3)
    node.start_daemon()
    old = node.started({N300: 1})
    before, held = old.containers(), old.devices(N300)

    assert node.daemon.end(signal.SIGTERM) == 0
    node.kubelet.wait_allocatable(N300, set())
    began = time.monotonic()
    node.daemon.start()
    node.kubelet.wait_allocatable(N300, chips)
    told(f"kubelet {node.version}: allocatable after {time.monotonic() - began:.1f} s")

    new = node.started({N300: 2})
    assert old.is_running() and old.containers() == before
    assert old.devices(N300) == held and new.devices(N300) == chips - held


def test_a_restarted_container_keeps_its_chip(node: Node) -> None:
    """A container that crashes after a renumbering is made again with the chip that it had."""
    chips = add(node, 2)
    node.start_daemon(interval=0.5)
    pod = node.started({N300: 1})
    (mine,) = pod.devices(N300)
    files, number = pod.device_files(), node.host_number(mine)

    node.cards.swap_ordinals(*chips)
    node.kubelet.wait_allocatable(N300, chips)
    pod.kill()
    pod.wait_running()

    assert pod.device_files() == files  # it has been told this path
    assert node.host_number(mine) != number
    major, minor = node.host_number(mine)
    assert pod.run("stat", "-c", "%t %T", *files).stdout == f"{major:x} {minor:x}\n"
    assert pod.open(*files) == "opened"


def test_reboots(node: Node, told: Told) -> None:
    """Pods with devices are admitted again after each reboot, and have the same ones."""
    add(node, 6)
    node.start_daemon()
    pods = [node.started({N300: chips}, containers=n) for chips, n in ((1, 1), (1, 1), (1, 2))]
    held = node.kubelet.assigned(N300)

    for number in range(REBOOTS):
        node.reboot()
        outcomes = [pod.outcome() for pod in pods]
        where = f"reboot {number} of kubelet {node.version}: {outcomes}"
        assert set(outcomes) == {RUNNING}, f"{where}\n{node.last_words(200)}"
        assert node.kubelet.assigned(N300) == held, where

    told(f"kubelet {node.version}: {REBOOTS} reboots, all of {len(pods)} pods admitted each time")
