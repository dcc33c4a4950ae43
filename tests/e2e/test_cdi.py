"""What reads the CDI file: its specification's library, podman, and containerd with a kubelet."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.builds import VERSIONS
from tests.e2e.containerd import containerd_of
from tests.e2e.daemon import CDI_DIRECTORY, FORBIDDEN, Site
from tests.e2e.images import busybox_archive
from tests.e2e.node import N300, Node, NodePod
from tests.e2e.pods import IMAGE
from tests.e2e.readers import judge
from tests.e2e.steps import JSON
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import wait_until

DEVICE = "tenstorrent.com/device"
FILE = f"{CDI_DIRECTORY}/tenstorrent.com-device.json"
PAGES = ("/dev/hugepages", "/dev/hugepages-1G")


class CdiHost(Site):
    """A host of podman's, without a kubelet."""

    def power_on(self) -> None:
        super().power_on()
        # podman keeps the locks of all containers in a file there.
        self.machine.mount("-t", "tmpfs", "tmpfs", "/dev/shm")

    def start(self) -> None:
        super().start()
        archive = self.machine.scratch / "podman.tar"
        archive.write_bytes(busybox_archive())
        loaded = self.podman("load", "--input", str(archive))
        assert loaded.returncode == 0, loaded.stderr

    @property
    def file(self) -> Path:
        return self.machine.path(FILE)

    def judged(self, *devices: str) -> JSON:
        """Return what a container with these devices gets, by the specification's library."""
        done = judge("cdi", str(self.file.parent), *(f"{DEVICE}={name}" for name in devices))
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def podman(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = ["podman", "--cgroup-manager=cgroupfs", "--events-backend=none", *argv]
        return self.machine.run(*command)

    def run(self, device: str, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script in a container of podman's with this device."""
        argv = ["run", "--rm", "--network=none", f"--cgroup-parent={self.machine.cgroup}"]
        argv += [f"--device={DEVICE}={device}", *options, "--entrypoint=/bin/sh", IMAGE]
        return self.podman(*argv, "-c", script)

    def numbers(self, chips: Iterable[Chip]) -> dict[str, tuple[int, int]]:
        """Return what a container has to have of these chips: numbers by path, both the host's."""
        return {f"/dev/tenstorrent/{chip.ordinal}": self.host_number(chip.bdf) for chip in chips}

    def seen(self, device: str) -> dict[str, tuple[int, int]]:
        """Return the device files in a container of podman's, each of which can be opened."""
        done = self.run(device, SHOW)
        assert done.returncode == 0 and not done.stderr, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        return {path: (int(major), int(minor)) for path, major, minor in lines}


@pytest.fixture(scope="module")
def host(tools: None) -> Iterator[CdiHost]:
    """A host with an n300, a p300c (two chips), hugepages, and the daemon's file."""
    with CdiHost() as host:
        host.cards.add("n300")
        host.cards.add("p300c")
        host.cards.set_hugepages(4)
        host.start_daemon()
        wait_until(host.file.exists, "the file")
        yield host


# -- The specification's own library ---------------------------------------------------------------


def test_the_file_is_valid(host: CdiHost) -> None:
    """The specification's library and schema accept it: each chip, and all, with their mounts."""
    chips_by_name = {chip.bdf: [chip] for chip in host.cards.chips} | {"all": host.cards.chips}
    assert host.judged()["devices"] == [f"{DEVICE}={name}" for name in sorted(chips_by_name)]

    for name, chips in chips_by_name.items():
        container = host.judged(name)["container"]
        devices = container["linux"]["devices"]
        found = {each["path"]: (each["major"], each["minor"]) for each in devices}
        assert found == host.numbers(chips)

        rules = container["linux"]["resources"]["devices"]
        allowed = {(rule["major"], rule["minor"], rule["access"]) for rule in rules}
        assert allowed == {(*number, "rw") for number in host.numbers(chips).values()}
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
    chip, other, _ = host.cards.chips
    assert host.seen(chip.bdf) == host.numbers([chip])
    for each, expected in ((chip, "opened"), (other, FORBIDDEN)):
        made = MAKE % host.host_number(each.bdf)
        done = host.run(chip.bdf, made, "--cap-add=MKNOD")
        assert done.stdout.strip().rpartition(": ")[2] == expected
    assert host.seen("all") == host.numbers(host.cards.chips)

    touch = " ".join(["busybox touch", *(f"{path}/written" for path in PAGES)])
    done = host.run(chip.bdf, touch)
    assert done.returncode == 0, done.stderr
    assert all((host.cards.root / path[1:] / "written").exists() for path in PAGES)


# -- A kubelet, with a containerd that knows CDI ---------------------------------------------------


@pytest.mark.usefixtures("tools")
def test_pods_by_cdi() -> None:
    """Each container has its own chip, also after a reboot that renumbers, and after a crash.

    The kubelet is the oldest one; test_cgroup2.py has the newest.
    """
    trixie = containerd_of("trixie")
    with Node(VERSIONS[0], programs=trixie) as node:
        bdfs = [chip.bdf for _ in range(3) for chip in node.cards.add("n300")]
        node.cards.set_hugepages(4)
        node.start_daemon('device_list_strategy = "cdi"', interval=0.5)
        pods = [node.started({N300: 1}) for _ in bdfs]
        held = {pod: pod.devices(N300) for pod in pods}

        assert_own_chips(held)
        for pod in pods:
            assert pod.run("sh", "-c", f": > {PAGES[1]}/written").returncode == 0
            mounts = pod.run("cat", "/proc/mounts").stdout.splitlines()
            mounted = [line.split()[1] for line in mounts]
            assert [mounted.count(path) for path in PAGES] == [1, 1]

        node.reboot(while_off=lambda: node.cards.swap_ordinals(*bdfs[:2]))
        for pod in pods:
            pod.wait_running()
        assert_own_chips(held)

        swap(node.cards, node.machine.path(FILE), *bdfs[1:])
        for pod in pods:
            pod.kill()
        for pod in pods:
            pod.wait_running()
        assert_own_chips(held)


def swap(cards: SimulatedNode, file: Path, one: str, other: str) -> None:
    """Renumber two chips, and wait until the file has that; while both are away there is none."""
    paths = described(file)
    cards.swap_ordinals(one, other)
    expected = paths | {one: paths[other], other: paths[one]}
    wait_until(lambda: described(file) == expected, "the file to follow")


def described(file: Path) -> dict[str, str]:
    """Return what a file describes: by name the host's path of its (first) device file."""
    try:
        devices = json.loads(file.read_text())["devices"]
    except FileNotFoundError:  # there is no chip
        return {}
    return {
        device["name"]: device["containerEdits"]["deviceNodes"][0]["hostPath"] for device in devices
    }


def assert_own_chips(held: Mapping[NodePod, set[str]]) -> None:
    """Check that each pod's container has the chip that it had at first, and no other."""
    for pod, bdfs in held.items():
        (bdf,) = pod.devices(N300)
        assert bdfs == {bdf}
        assert pod.environment()["TT_VISIBLE_DEVICES"] == bdf
        pod.assert_has_only(bdf)
        pod.assert_can_make_only(bdf)
