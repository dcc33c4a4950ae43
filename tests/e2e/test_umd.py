"""What tt-umd, the library of every program on these cards, makes of what a container is given.

tt-umd, kubelets and containers are real. What tt-umd asks the driver is answered by umd_driver.c.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.e2e import umd
from tests.e2e.builds import VERSIONS
from tests.e2e.node import N300, Node, NodePod
from tests.world.processes import wait_until


@pytest.fixture
def node(tools: None) -> Iterator[Node]:
    """A node that has the image with tt-umd."""
    with Node(VERSIONS[-1], images=[umd.image()]) as node:
        yield node


# --- Devices --------------------------------------------------------------------------------------

ENUMERATE = "import tt_umd; print(tt_umd.PCIDevice.enumerate_devices())"


def visible(node: Node, pod: NodePod, *environment: str) -> list[int] | str:
    """Return the numbers of the devices that tt-umd sees in a pod, or why it sees none."""
    cards = " ".join(f"{chip.ordinal}={chip.bdf}" for chip in node.cards.chips)
    done = pod.run("env", *environment, *umd.python(ENUMERATE, cards))
    if done.returncode:
        return [line for line in done.stderr.splitlines() if "TT_VISIBLE_DEVICES" in line][-1]
    return list(ast.literal_eval(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("style", ["bdf", "index", "none"])
def test_tt_umd_sees_its_devices(node: Node, style: str) -> None:
    """Whatever TT_VISIBLE_DEVICES holds, tt-umd sees in each container exactly its devices."""
    for _ in range(4):
        node.cards.add("n300")
    node.start_daemon(f'visible_devices = "{style}"')
    ordinals = {chip.bdf: chip.ordinal for chip in node.cards.chips if chip.ordinal is not None}

    for pod in [node.started({N300: count}, image=umd.IMAGE) for count in (1, 2, 1)]:
        held = pod.devices(N300)
        assert visible(node, pod) == sorted(ordinals[bdf] for bdf in held)

        # It has really looked: an address and an index that are none of the container's are errors.
        foreign = min(ordinals.keys() - held)
        assert "did not match any devices" in visible(node, pod, f"TT_VISIBLE_DEVICES={foreign}")
        assert "Invalid device ID" in visible(node, pod, f"TT_VISIBLE_DEVICES={len(held)}")


# --- Locks ----------------------------------------------------------------------------------------

LOCKS = "/run/locks"  # on a tmpfs of the node's, as /dev/shm is
SHARED = f"""
[sharing]
lock_dir = "{LOCKS}"
[[sharing.resources]]
name = "n300"
replicas = 3
"""


def start_holder(node: Node, user: int | None = None) -> NodePod:
    """Start a pod that starts a chip, as far as the lock goes, and keeps it."""
    command = umd.python(umd.HOLD)
    return node.started({N300: 1}, once=True, image=umd.IMAGE, command=command, user=user)


def said(pod: NodePod) -> list[str]:
    """Return what a pod has said of the lock."""
    return umd.said("\n".join(pod.output()))


def wait_said(pod: NodePod, *words: str) -> None:
    wait_until(lambda: said(pod) == [*words], lambda: f"{words}; {pod.why()}")


def test_containers_take_turns(node: Node) -> None:
    """Of those that share a chip one holds it and the others wait; killed, the next goes on.

    A container can neither remove nor replace another user's lock.
    """
    (chip,) = node.cards.add("n300")
    replicas = {f"{chip.bdf}::{n}" for n in range(3)}
    node.machine.path(LOCKS).mkdir()
    node.start_daemon(SHARED, expected={N300: replicas})

    first = start_holder(node)
    wait_said(first, "holds")
    second = start_holder(node, user=1001)
    wait_said(second, "waits")

    (lock,) = second.run("ls", "/dev/shm").stdout.split()
    assert lock == umd.LOCK
    for command in (["rm", f"/dev/shm/{lock}"], ["mv", f"/dev/shm/{lock}", "/dev/shm/moved"]):
        assert "not permitted" in second.run("busybox", *command).stderr
    assert node.machine.path(f"{LOCKS}/tt-device-plugin/n300").stat().st_mode & 0o7777 == 0o1777
    assert said(first) == ["holds"]

    first.kill()
    wait_said(second, "waits", "holds")
