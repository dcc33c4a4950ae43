"""What tt-umd, the library of every program on these cards, makes of what a container is given.

tt-umd is the real one, and so are kubelets and containers. Only the driver is not: the device nodes
are somebody else's, and what tt-umd asks them is answered by driver.c.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import umd
from tests.e2e.machine import VERSIONS
from tests.e2e.node import Node, Program
from tests.world.processes import wait_until

N300 = "tenstorrent.com/n300"


@pytest.fixture(scope="module")
def umd_nodes(program: Program) -> Iterator[dict[str, Node]]:
    """Nodes that have the image with tt-umd."""
    with contextlib.ExitStack() as stack:
        yield {
            version: stack.enter_context(Node(version, program, images=[umd.image()]))
            for version in VERSIONS
        }


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, umd_nodes: dict[str, Node]) -> Iterator[Node]:
    node = umd_nodes[request.param]
    node.wait_clear()
    yield node
    node.clear()


# --- TT_VISIBLE_DEVICES ---------------------------------------------------------------------------

ENUMERATE = "import tt_umd; print(tt_umd.PCIDevice.enumerate_devices())"


def visible(node: Node, name: str, *environment: str) -> list[int] | str:
    """Return the numbers of the devices that tt-umd sees in a pod, or why it sees none."""
    cards = " ".join(f"{chip.ordinal}={chip.bdf}" for chip in node.cards.chips)
    done = node.inside(name, "env", *environment, *umd.python(ENUMERATE, cards))
    if done.returncode:
        return next(
            line for line in reversed(done.stderr.splitlines()) if "TT_VISIBLE_DEVICES" in line
        )
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


# --- Chips that are shared ------------------------------------------------------------------------

HOLD = """
import tt_umd, time
mutex = tt_umd.RobustMutex("CHIP_IN_USE_{number}_PCIe")
owner = mutex.probe_lock({patience})
print("waits" if owner else "holds")
if owner:
    mutex.lock()
    print("holds")
time.sleep(3600)
"""
"""What tt-umd does before it starts a chip; after `patience` seconds it says that it waits."""


class Holder:
    """A pod that starts a chip, as far as the lock goes, and keeps it."""

    def __init__(self, node: Node, resource: str, *, patience: int = 2, **others: Any) -> None:
        self.node = node
        (number,) = {chip.ordinal for chip in node.cards.chips}
        text = HOLD.format(number=number, patience=patience)
        self.name = node.started(
            {resource: 1}, restart="Never", image=umd.IMAGE, command=umd.python(text), **others
        )

    def said(self) -> list[str]:
        """What it has said of the lock; tt-umd adds lines of its own."""
        words = [line.split()[-1] for line in self.node.kubelet.logs(self.name).splitlines()]
        return [word for word in words if word in ("waits", "holds")]

    def wait_said(self, *words: str) -> None:
        wait_until(lambda: self.said() == [*words], f"{self.name} to say {words}", 20)

    def kill(self) -> None:
        """As the kernel's OOM killer does."""
        container = self.node.kubelet.container_id(self.name)
        self.node.containerd.ctr("tasks", "kill", "--signal", "SIGKILL", container)


SHARED = """
[sharing]
lock_dir = "{lock_dir}"
[[sharing.resources]]
name = "n300"
replicas = 3
"""


@pytest.fixture
def lock_dir(node: Node) -> Path:
    """Where the node's containers share their locks; on a tmpfs of the node's, as /dev/shm is."""
    return Path("/run/locks")


def start_shared(node: Node, lock_dir: Path | str, config: str = "") -> None:
    """One n300 for three containers."""
    (chip,) = node.cards.add("n300")
    replicas = {f"{chip.bdf}::{n}" for n in range(3)}
    node.start_daemon(config=config + SHARED.format(lock_dir=lock_dir), expected={N300: replicas})


def test_containers_take_turns(node: Node, lock_dir: Path) -> None:
    """Of those that share a chip one holds it and the others wait; killed, the next goes on."""
    start_shared(node, lock_dir)
    first = Holder(node, N300)
    first.wait_said("holds")
    others = [
        Holder(node, N300, user=1001),
        Holder(node, N300),
    ]  # another user's locks are ours, too
    for other in others:
        other.wait_said("waits")
    assert first.said() == ["holds"]
    first.kill()
    (second,) = wait_until(
        lambda: [other for other in others if other.said() == ["waits", "holds"]], "the next", 20
    )
    (third,) = [other for other in others if other is not second]
    assert third.said() == ["waits"]
    second.kill()
    third.wait_said("waits", "holds")


def test_a_killed_waiter_opens_the_lock(node: Node, lock_dir: Path) -> None:
    """The limit of these locks: a waiter that is killed lets the next in beside the holder.

    Such a lock names its owner by thread ID, and the kernel takes whoever dies with that ID for the
    owner, even one who only waits. Containers have PID namespaces of their own, in which most
    owners and waiters are 1.
    """
    start_shared(node, lock_dir)
    first, second, third = Holder(node, N300), Holder(node, N300), Holder(node, N300)
    first.wait_said("holds")
    second.wait_said("waits")
    third.wait_said("waits")
    second.kill()
    third.wait_said("waits", "holds")
    assert node.kubelet.running(first.name)


def test_without_common_locks_both_get_in(node: Node) -> None:
    """With `lock_dir = ""` two containers start one chip at once: locks keep them apart."""
    start_shared(node, "")
    holders = [Holder(node, N300), Holder(node, N300)]
    for holder in holders:
        holder.wait_said("holds")
        assert node.kubelet.running(holder.name)


def test_a_pod_with_its_own_shm_has_no_common_locks(node: Node, lock_dir: Path) -> None:
    """A pod's own volume at /dev/shm is what it has there; others do not see its locks."""
    start_shared(node, lock_dir)
    first, second = Holder(node, N300), Holder(node, N300, own_shm=True)
    first.wait_said("holds")
    second.wait_said("holds")


def test_locks_belong_to_who_made_them(node: Node, lock_dir: Path) -> None:
    """A container can neither remove nor replace another's lock, nor see other resources'."""
    start_shared(node, lock_dir)
    first = Holder(node, N300)
    first.wait_said("holds")
    other = node.started({N300: 1}, user=1001)
    (lock,) = node.inside(other, "ls", "/dev/shm").stdout.split()
    assert lock == "TT_UMD_LOCK.CHIP_IN_USE_0_PCIe"
    for command in (["rm", f"/dev/shm/{lock}"], ["mv", f"/dev/shm/{lock}", "/dev/shm/moved"]):
        assert "not permitted" in node.inside(other, "busybox", *command).stderr
    assert (
        node.inside(other, "sh", "-c", ": > /dev/shm/mine && busybox rm /dev/shm/mine").returncode
        == 0
    )
    assert node.machine.path(f"{lock_dir}/n300").stat().st_mode & 0o7777 == 0o1777
