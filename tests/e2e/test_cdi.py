"""What reads the CDI file: its specification's library, podman, and containerd with a kubelet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import JSON, VERSIONS, Machine
from tests.e2e.node import CDI_DIRECTORY, FORBIDDEN, N300, OPENABLE, RUNNING, Node, Program
from tests.e2e.readers import Alone, Podman, containerd_of, device_numbers, judge
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import wait_until

DEVICE = "tenstorrent.com/device"
FILE = f"{CDI_DIRECTORY}/tenstorrent.com-device.json"
PAGES = ("/dev/hugepages", "/dev/hugepages-1G")


def described(file: Path) -> dict[str, str]:
    """Return what a file describes: by name the host's path of its (first) device file."""
    if not file.exists():  # there is no chip
        return {}
    devices = json.loads(file.read_text())["devices"]
    return {
        device["name"]: device["containerEdits"]["deviceNodes"][0]["hostPath"] for device in devices
    }


def swap(cards: SimulatedNode, file: Path, one: str, other: str) -> None:
    """Renumber two chips, and wait until the file has that; while both are away there is none."""
    paths = described(file)
    cards.swap_ordinals(one, other)
    expected = paths | {one: paths[other], other: paths[one]}
    wait_until(lambda: described(file) == expected, "the file to follow", 10)


class CdiHost(Alone):
    """With an n300, a p300c (two chips) and hugepages."""

    def __init__(self, machine: Machine, program: Program, podman: Podman) -> None:
        super().__init__(machine, program)
        self.podman = podman
        self.file = machine.path(FILE)
        self.cards.add("n300")
        self.cards.add("p300c")
        self.cards.set_hugepages(4)

    def judged(self, *devices: str) -> JSON:
        """Return what a container with these devices gets, by the specification's library."""
        done = judge("cdi", str(self.file.parent), *(f"{DEVICE}={name}" for name in devices))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def seen(self, device: str) -> dict[str, tuple[int, int]]:
        """Return the device files in a container of podman's, each of which can be opened."""
        done = self.podman.run(f"{DEVICE}={device}", SHOW)
        assert done.returncode == 0 and not done.stderr, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        return {path: (int(major), int(minor)) for path, major, minor in lines}


@pytest.fixture(scope="module")
def machine() -> Iterator[tuple[Machine, Podman]]:
    with Machine() as machine:
        yield machine, Podman(machine)


@pytest.fixture
def host(machine: tuple[Machine, Podman], program: Program) -> Iterator[CdiHost]:
    where, podman = machine
    with CdiHost(where, program, podman) as host:
        host.start()
        wait_until(host.file.exists, "the file")
        yield host
    host.file.unlink()


def numbers(chips: list[Chip]) -> dict[str, tuple[int, int]]:
    """Return what a container has to have of these chips: numbers by path, both the host's."""
    found = {}
    for chip in chips:
        major, minor = chip.attribute("dev").read_text().split(":")
        found[f"/dev/tenstorrent/{chip.ordinal}"] = (int(major), int(minor))
    return found


# -- The specification's own library ---------------------------------------------------------------


def test_the_file_is_valid(host: CdiHost) -> None:
    """The specification's library and schema accept it: each chip, and all, with their mounts."""
    names = [chip.bdf for chip in host.cards.chips]
    assert host.judged()["devices"] == [f"{DEVICE}={name}" for name in sorted([*names, "all"])]
    for name, chips in {**{c.bdf: [c] for c in host.cards.chips}, "all": host.cards.chips}.items():
        container = host.judged(name)["container"]
        assert device_numbers(container) == numbers(chips)
        allowed = container["linux"]["resources"]["devices"]
        found = {(rule["major"], rule["minor"], rule["access"]) for rule in allowed}
        assert found == {(*number, "rw") for number in numbers(chips).values()}
        assert {mount["destination"] for mount in container["mounts"]} == {*PAGES}


# -- podman, with no kubelet on the machine --------------------------------------------------------

SHOW = """
busybox stat -c '%n %t %T' /dev/tenstorrent/* | while read path major minor; do
    echo "$path $((0x$major)) $((0x$minor))"
    : <> $path || echo "$path cannot be opened"
done
"""
MAKE = """
{ busybox mknod /tmp/node c %d %d && : <> /tmp/node && echo opened; } 2>&1
"""


def test_podman_gives_chips(host: CdiHost) -> None:
    """A container can open the named chip and no other, not even one that it creates, or all."""
    for chip in host.cards.chips[:2]:
        own = numbers([chip])
        assert host.seen(chip.bdf) == own
        for number in OPENABLE:
            done = host.podman.run(f"{DEVICE}={chip.bdf}", MAKE % number, "--cap-add=MKNOD")
            expected = "opened" if number in own.values() else FORBIDDEN
            assert done.stdout.strip().rpartition(": ")[2] == expected
    assert host.seen("all") == numbers(host.cards.chips)
    touch = " ".join(["busybox touch", *(f"{path}/written" for path in PAGES)])
    done = host.podman.run(f"{DEVICE}={host.cards.chips[0].bdf}", touch)
    assert done.returncode == 0, done.stderr
    assert all((host.cards.root / path[1:] / "written").exists() for path in PAGES)


# -- A kubelet, with a containerd that knows CDI ---------------------------------------------------


def test_pods_by_cdi(program: Program) -> None:
    """Each container has its own chip, also after a reboot that renumbers, and after a crash.

    The kubelet is the oldest one; test_cgroup2.py has the newest.
    """
    trixie = containerd_of("trixie")
    with Node(VERSIONS[0], program, static_pods=False, containerd=trixie) as node:
        bdfs = [chip.bdf for _ in range(3) for chip in node.cards.add("n300")]
        node.cards.set_hugepages(4)
        node.start_daemon(interval=0.2, config='device_list_strategy = "cdi"')
        names = [node.started({N300: 1}) for _ in bdfs]
        held = {name: node.devices(N300, name) for name in names}
        assert_own_chips(node, held)
        for name in names:
            assert node.inside(name, "sh", "-c", f": > {PAGES[1]}/written").returncode == 0
            mounts = node.inside(name, "cat", "/proc/mounts").stdout.splitlines()
            mounted = [line.split()[1] for line in mounts]
            assert [mounted.count(path) for path in PAGES] == [1, 1]

        node.reboot(while_off=lambda: node.cards.swap_ordinals(*bdfs[:2]))
        assert [node.outcome(name) for name in names] == [RUNNING] * 3
        assert_own_chips(node, held)

        swap(node.cards, node.machine.path(FILE), *bdfs[1:])
        node.crash_containers(names)
        assert_own_chips(node, held)


def assert_own_chips(node: Node, held: dict[str, set[str]]) -> None:
    """Check that each pod's container has its chip's device file, can open it, and has no other."""
    for name, bdfs in held.items():
        (bdf,) = node.devices(N300, name)
        path = f"/dev/tenstorrent/{node.cards.chip(bdf).ordinal}"
        assert bdfs == {bdf} and node.device_files(name) == {path}
        assert node.number_inside(name, path) == node.host_number(bdf)
        assert node.open_inside(name, path) == "opened"
        assert node.environment(name)["TT_VISIBLE_DEVICES"] == bdf
        for number in OPENABLE:
            expected = "opened" if number == node.host_number(bdf) else FORBIDDEN
            assert node.make_and_open_inside(name, number) == expected
