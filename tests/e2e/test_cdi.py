"""What reads the CDI file: the specification's own library, podman, and containerd with a real
kubelet.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import JSON, VERSIONS, Machine
from tests.e2e.node import CDI_DIRECTORY, OPENABLE, RUNNING, Node, Program
from tests.e2e.readers import Alone, Podman, containerd_of, device_numbers, judge
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import wait_until

N300 = "tenstorrent.com/n300"
DEVICE = "tenstorrent.com/device"
FILE = f"{CDI_DIRECTORY}/tenstorrent.com-device.json"


def described(file: Path) -> dict[str, str]:
    """What a file describes, by name, with the host's path of its (first) node; without a chip
    there is no file.
    """
    try:
        devices = json.loads(file.read_text())["devices"]
    except FileNotFoundError:
        return {}
    return {
        device["name"]: device["containerEdits"]["deviceNodes"][0]["hostPath"] for device in devices
    }


def swap(cards: SimulatedNode, file: Path, one: str, other: str) -> None:
    """Renumber two chips, and wait for the file to say so; while both are away there is none."""
    paths = described(file)
    cards.swap_ordinals(one, other)
    swapped = [paths[other], paths[one]]
    wait_until(
        lambda: [described(file).get(bdf) for bdf in (one, other)] == swapped,
        "the file to follow",
        10,
    )


class CdiHost(Alone):
    """With an n300, a p300c (two chips) and hugepages."""

    def __init__(self, machine: Machine, program: Program, podman: Podman) -> None:
        super().__init__(machine, program)
        self.podman = podman
        self.cards.add("n300")
        self.cards.add("p300c")
        self.cards.set_hugepages(4)

    @property
    def file(self) -> Path:
        return self.machine.path(FILE)

    def names(self) -> set[str]:
        """The devices that the file has, by their names in it."""
        return set(described(self.file))

    def wait_names(self, names: set[str]) -> None:
        wait_until(lambda: self.names() == names, f"the file to name {sorted(names)}", 10)

    def judged(self, *devices: str) -> JSON:
        """What a container with these devices gets, by the specification's library; the file has to
        be valid.
        """
        done = judge("cdi", str(self.file.parent), *(f"{DEVICE}={name}" for name in devices))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))


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
    """What a container has to have of these chips: numbers by path, both as on the host."""
    found = {}
    for chip in chips:
        major, minor = chip.attribute("dev").read_text().split(":")
        found[f"/dev/tenstorrent/{chip.ordinal}"] = (int(major), int(minor))
    return found


# -- The specification's own library ---------------------------------------------------------------


def test_the_file_is_valid(host: CdiHost) -> None:
    """The specification's library and its JSON schema accept the file, which has every chip and all
    of them.
    """
    names = [chip.bdf for chip in host.cards.chips]
    assert host.judged()["devices"] == [f"{DEVICE}={name}" for name in sorted([*names, "all"])]


def test_the_judge_objects(host: CdiHost, tmp_path: Path) -> None:
    """What the specification forbids is found: a link in place of a node, a key that it does not
    know.
    """
    described = json.loads(host.file.read_text())
    edits = described["devices"][0]["containerEdits"]
    link = tmp_path / "link"
    link.symlink_to(edits["deviceNodes"][0]["hostPath"])
    edits["deviceNodes"][0]["hostPath"] = str(link)
    (tmp_path / "linked.json").write_text(json.dumps(described))
    assert judge("cdi", str(tmp_path)).returncode == 0  # nobody has looked at the node yet
    done = judge("cdi", str(tmp_path), f"{DEVICE}={described['devices'][0]['name']}")
    assert done.returncode == 1 and "link" in done.stderr
    (tmp_path / "linked.json").write_text(json.dumps(described | {"remark": "unknown"}))
    assert judge("cdi", str(tmp_path)).returncode == 1


def test_a_device_is_its_node(host: CdiHost) -> None:
    """A chip's device is its node under the host's number, to read and write, and what all devices
    need is mounted.
    """
    for chip in host.cards.chips:
        container = host.judged(chip.bdf)["container"]
        expected = numbers([chip])
        assert device_numbers(container) == expected
        allowed = container["linux"]["resources"]["devices"]
        assert [(rule["major"], rule["minor"], rule["access"]) for rule in allowed] == [
            (*expected.popitem()[1], "rw")
        ]
        assert {mount["destination"] for mount in container["mounts"]} == {
            "/dev/hugepages",
            "/dev/hugepages-1G",
        }
    assert device_numbers(host.judged("all")["container"]) == numbers(host.cards.chips)


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


def seen(host: CdiHost, device: str) -> dict[str, tuple[int, int]]:
    """The device nodes in a container of podman's, each of which can be opened."""
    done = host.podman.run(f"{DEVICE}={device}", SHOW)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {path: (int(major), int(minor)) for path, major, minor in lines}


def test_podman_gives_one_chip(host: CdiHost) -> None:
    """`podman run --device` with a PCI address: this node can be opened and no other, not even one
    that is made.
    """
    for chip in host.cards.chips[:2]:
        own = numbers([chip])
        assert seen(host, chip.bdf) == own
        for number in OPENABLE:
            done = host.podman.run(f"{DEVICE}={chip.bdf}", MAKE % number, "--cap-add=MKNOD")
            expected = "opened" if number in own.values() else "Operation not permitted"
            assert done.stdout.strip().rpartition(": ")[2] == expected


def test_podman_gives_all_chips(host: CdiHost) -> None:
    """`podman run --device tenstorrent.com/device=all`: every node, each of which can be opened."""
    assert seen(host, "all") == numbers(host.cards.chips)


def test_podman_mounts_hugepages(host: CdiHost) -> None:
    """What is written to the container's hugepages arrives in the host's."""
    written = ["/dev/hugepages/written", "/dev/hugepages-1G/written"]
    done = host.podman.run(
        f"{DEVICE}={host.cards.chips[0].bdf}", f"busybox touch {' '.join(written)}"
    )
    assert done.returncode == 0, done.stderr
    assert all((host.cards.root / path[1:]).exists() for path in written)


def test_podman_after_a_renumbering(host: CdiHost) -> None:
    """After the chips were renumbered a name still means the same chip, under its new number."""
    first, second = host.cards.chips[:2]
    before = numbers([first])
    swap(host.cards, host.file, first.bdf, second.bdf)
    assert numbers([first]) != before
    assert set(device_numbers(host.judged(first.bdf)["container"])) == set(numbers([first]))
    assert seen(host, first.bdf) == numbers([first])


def test_the_file_follows_the_chips(host: CdiHost) -> None:
    """A chip that goes leaves the file and comes back to it; one that is only ill stays in it."""
    first, *others = host.cards.chips
    first.vanish()
    host.wait_names({*(chip.bdf for chip in others), "all"})
    assert host.podman.run(f"{DEVICE}={first.bdf}", "true").returncode != 0
    assert seen(host, "all") == numbers(others)
    first.come_back()
    host.wait_names({*(chip.bdf for chip in host.cards.chips), "all"})
    first.die()
    wait_until(
        lambda: "does not respond" in host.daemon.log.read_text(), "the daemon to notice", 10
    )
    assert seen(host, first.bdf) == numbers([first])


def test_the_file_outlives_the_daemon(host: CdiHost) -> None:
    """While the daemon is stopped, or was killed, containers still start."""
    host.daemon.stop()
    assert seen(host, "all") == numbers(host.cards.chips)
    host.daemon.start()
    host.daemon.kill()
    assert seen(host, "all") == numbers(host.cards.chips)


def test_the_file_is_never_half_written(host: CdiHost) -> None:
    """Whoever reads it at any moment while chips come and go reads a whole one."""
    over, broken, reads = threading.Event(), [], itertools.count()

    def read() -> None:
        while not over.is_set():
            next(reads)
            try:
                json.loads(host.file.read_text())
            except (OSError, ValueError) as error:
                broken.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        everyone = {*(chip.bdf for chip in host.cards.chips), "all"}
        for _ in range(5):
            for chip in host.cards.chips:
                chip.vanish()
                host.wait_names(everyone - {chip.bdf})
                chip.come_back()
                host.wait_names(everyone)
    finally:
        over.set()
        reader.join()
    assert broken == [] and next(reads) > 100


# -- A kubelet, with a containerd that knows CDI ---------------------------------------------------


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, program: Program) -> Iterator[Node]:
    """A node whose containerd is that of Debian 13, and whose pods are an API server's."""
    with Node(
        request.param, program, static_pods=False, containerd=containerd_of("trixie")
    ) as node:
        yield node


def own_chip(node: Node, name: str) -> None:
    """The pod's container has the node of the chip that the kubelet gave it, can open it, and has
    no other.
    """
    (bdf,) = node.devices(N300, name)
    path = f"/dev/tenstorrent/{node.cards.chip(bdf).ordinal}"
    assert node.inside(name, "ls", "/dev/tenstorrent").stdout.split() == [path.rpartition("/")[2]]
    assert node.number_inside(name, path) == node.host_number(bdf)
    assert node.open_inside(name, path) == "opened"
    assert node.environment(name)["TT_VISIBLE_DEVICES"] == bdf
    for number in OPENABLE:
        expected = "opened" if number == node.host_number(bdf) else "Operation not permitted"
        assert node.make_and_open_inside(name, number) == expected


CDI = 'device_list_strategy = "cdi"'


def test_pods_by_cdi(node: Node) -> None:
    """The daemon names devices, containerd looks them up: each container has its own chip, and
    hugepages.
    """
    chips = [chip for _ in range(3) for chip in node.cards.add("n300")]
    node.cards.set_hugepages(4)
    node.start_daemon(config=CDI)
    names = [node.run({N300: 1}) for _ in chips]
    for name in names:
        node.kubelet.wait_running(name)
        own_chip(node, name)
        assert node.inside(name, "sh", "-c", ": > /dev/hugepages-1G/written").returncode == 0
        mounted = [
            line.split()[1] for line in node.inside(name, "cat", "/proc/mounts").stdout.splitlines()
        ]
        assert [mounted.count(f"/dev/{each}") for each in ("hugepages", "hugepages-1G")] == [1, 1]


def test_swapped_ordinals_by_cdi(node: Node) -> None:
    """After a reboot that renumbered the chips, and after a crash, each container has its own chip
    under its number.
    """
    bdfs = [chip.bdf for _ in range(2) for chip in node.cards.add("n300")]
    node.start_daemon(interval=0.2, config=CDI)
    names = [node.started({N300: 1}) for _ in bdfs]
    held = {name: node.devices(N300, name) for name in names}

    node.reboot(while_off=lambda: node.cards.swap_ordinals(*bdfs))
    assert [node.outcome(name) for name in names] == [RUNNING, RUNNING]
    for name in names:
        assert node.devices(N300, name) == held[name]
        own_chip(node, name)

    before = {name: node.containers(name) for name in names}
    swap(node.cards, node.machine.path(FILE), *bdfs)
    for name in names:
        node.containerd.ctr("tasks", "kill", "--signal", "SIGKILL", node.kubelet.container_id(name))
    wait_until(
        lambda: all(node.containers(name) != before[name] for name in names), "other containers", 40
    )
    for name in names:
        node.kubelet.wait_running(name)
        own_chip(node, name)
