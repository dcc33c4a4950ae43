"""What tt-umd, the library of every program on these cards, makes of what a container is given.

tt-umd, kubelets and containers are real. What tt-umd asks the driver is answered by driver.c.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.e2e import umd
from tests.e2e.machine import VERSIONS
from tests.e2e.node import N300, Node, Program
from tests.world.processes import wait_until


@pytest.fixture(scope="module")
def umd_node(program: Program) -> Iterator[Node]:
    """A node that has the image with tt-umd."""
    with Node(VERSIONS[-1], program, images=[umd.image()]) as node:
        yield node


@pytest.fixture
def node(umd_node: Node) -> Iterator[Node]:
    umd_node.wait_clear()
    yield umd_node
    umd_node.clear()


ENUMERATE = "import tt_umd; print(tt_umd.PCIDevice.enumerate_devices())"


def visible(node: Node, name: str, *environment: str) -> list[int] | str:
    """Return the numbers of the devices that tt-umd sees in a pod, or why it sees none."""
    cards = " ".join(f"{chip.ordinal}={chip.bdf}" for chip in node.cards.chips)
    done = node.inside(name, "env", *environment, *umd.python(ENUMERATE, cards))
    if done.returncode:
        return [line for line in done.stderr.splitlines() if "TT_VISIBLE_DEVICES" in line][-1]
    return list(ast.literal_eval(done.stdout.strip().splitlines()[-1]))


@pytest.mark.parametrize("style", ["bdf", "index", "none"])
def test_tt_umd_sees_its_devices(node: Node, style: str) -> None:
    """Whatever TT_VISIBLE_DEVICES holds, tt-umd sees in each container exactly its devices."""
    for _ in range(4):
        node.cards.add("n300")
    node.start_daemon(config=f'visible_devices = "{style}"')
    names = [node.started({N300: count}, image=umd.IMAGE) for count in (1, 2, 1)]
    for name in names:
        held = node.devices(N300, name)
        ordinals = {chip.bdf: chip.ordinal for chip in node.cards.chips if chip.ordinal is not None}
        assert visible(node, name) == sorted(ordinals[bdf] for bdf in held)
        # It has really looked: an address and an index that are none of the container's are errors.
        foreign = min(ordinals.keys() - held)
        assert "did not match any devices" in visible(node, name, f"TT_VISIBLE_DEVICES={foreign}")
        assert "Invalid device ID" in visible(node, name, f"TT_VISIBLE_DEVICES={len(held)}")


LOCKS = "/run/locks"  # on a tmpfs of the node's, as /dev/shm is
SHARED = """
[sharing]
lock_dir = "%s"
[[sharing.resources]]
name = "n300"
replicas = 3
"""


def start_holder(node: Node, user: int | None = None) -> str:
    """Start a pod that starts a chip, as far as the lock goes, and keeps it."""
    command = umd.python(umd.HOLD)
    return node.started({N300: 1}, restart="Never", image=umd.IMAGE, command=command, user=user)


def wait_said(node: Node, name: str, *words: str) -> None:
    """Wait until a pod has said this of the lock."""
    wait_until(lambda: umd.said(node.kubelet.logs(name)) == [*words], f"{name} to say {words}", 20)


def test_containers_take_turns(node: Node) -> None:
    """Of those that share a chip one holds it and the others wait; killed, the next goes on.

    A container can neither remove nor replace another user's lock.
    """
    (chip,) = node.cards.add("n300")
    replicas = {f"{chip.bdf}::{n}" for n in range(3)}
    node.start_daemon(config=SHARED % LOCKS, expected={N300: replicas})
    first = start_holder(node)
    wait_said(node, first, "holds")
    second = start_holder(node, user=1001)
    wait_said(node, second, "waits")
    (lock,) = node.inside(second, "ls", "/dev/shm").stdout.split()
    assert lock == umd.LOCK
    for command in (["rm", f"/dev/shm/{lock}"], ["mv", f"/dev/shm/{lock}", "/dev/shm/moved"]):
        assert "not permitted" in node.inside(second, "busybox", *command).stderr
    assert node.machine.path(f"{LOCKS}/n300").stat().st_mode & 0o7777 == 0o1777
    assert umd.said(node.kubelet.logs(first)) == ["holds"]
    node.kill_container(first)
    wait_said(node, second, "waits", "holds")
