"""A node: a machine with cards and the daemon, a real kubelet, containerd, and pods.

A test begins like this one, with the fixture `node` of conftest.py:

    def test_a_pod_gets_a_chip(node: Node) -> None:
        node.cards.add("n300")
        node.start_daemon()
        pod = node.started({N300: 1})
        assert pod.device_files() == {"/dev/tenstorrent/0"}
"""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.apiserver import ApiServer
from tests.e2e.containerd import Containerd
from tests.e2e.daemon import FORBIDDEN, OPENABLE, Site
from tests.e2e.kubelet import Kubelet
from tests.e2e.kubeletconfig import NODE_NAME
from tests.e2e.machine import tail
from tests.e2e.pods import Pod, manifest
from tests.e2e.steps import JSON
from tests.world.processes import wait_until

N300 = "tenstorrent.com/n300"


class Node(Site):
    """A running kubelet with its machine, cards, daemon and pods."""

    def __init__(
        self,
        version: str,
        *,
        config: JSON | None = None,
        programs: Path | None = None,
        images: Sequence[Path] = (),
    ) -> None:
        """config: the kubelet's; programs: a directory with another containerd than the host's;
        images: archives of more than busybox.
        """
        super().__init__()
        self.version = version
        self.containerd = Containerd(self.machine, programs, images)
        self.api = ApiServer()
        self.kubelet = Kubelet(version, self.machine, config)
        self._pods: list[NodePod] = []

        for path in ("sys/fs/cgroup", "var/log/pods"):
            (self.cards.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.cards.root / path).symlink_to(f"/{path}")

    # Start and end

    def start(self) -> None:
        super().start()
        self.kubelet.start()

    def power_on(self) -> None:
        super().power_on()
        self.containerd.start()
        self.api.serve(self.machine.listen)

    def reboot(self, while_off: Callable[[], object] = lambda: None) -> None:
        """Cut the power and start all again: the daemon, then the kubelet."""
        for pod in self._pods:
            pod.forget_containers()
        self.machine.power_off()
        self.cards.boot()
        while_off()

        self.power_on()
        self.daemon.start()
        self.kubelet.start()

    def destroy(self) -> None:
        self.api.close()
        super().destroy()

    def last_words(self, lines: int = 40) -> str:
        """Return the end of the daemon's and of the kubelet's log."""
        return f"{super().last_words(lines)}\n{tail(self.kubelet.log, lines)}"

    # Devices

    def start_daemon(
        self,
        config: str = "",
        interval: float = 5.0,
        expected: Mapping[str, set[str]] | None = None,
    ) -> None:
        """Install the daemon, start it, and wait until the kubelet has all cards.

        interval: seconds between two polls; expected: IDs by resource, if not those of the default
        configuration.
        """
        super().start_daemon(config, interval)
        self.wait_complete(expected)

    def wait_complete(self, expected: Mapping[str, set[str]] | None = None) -> None:
        """Wait until every card is allocatable, or these IDs are, by resource."""
        by_resource: dict[str, set[str]] = {}
        for chip in self.cards.chips:
            card = chip.telemetry["tt_card_type"]
            board = card if card.startswith("galaxy") else card.rstrip("abc")
            by_resource.setdefault(f"tenstorrent.com/{board}", set()).add(chip.bdf)

        for resource, devices in (by_resource if expected is None else expected).items():
            self.kubelet.wait_allocatable(resource, devices)

    # Pods

    def create(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod whose containers ask for these; others: of pods.manifest()."""
        return self.add(manifest(resources, **others))

    def started(self, resources: Mapping[str, int], **others: Any) -> NodePod:
        """Create a pod, and wait until it runs."""
        pod = self.create(resources, **others)
        pod.wait_running()
        return pod

    def add(self, described: JSON) -> NodePod:
        """Create a pod by its manifest, and wait until the kubelet has heard of it."""
        self.api.add_pod(described, NODE_NAME)
        pod = NodePod(self, described["metadata"]["name"])
        self._pods.append(pod)
        wait_until(lambda: not pod.is_forgotten(), f"{pod.name} to be known")
        return pod


class NodePod(Pod):
    """A pod of a Node: what its container main has and can do."""

    def __init__(self, node: Node, name: str) -> None:
        super().__init__(node.api, name, node.machine.path("/var/log/pods"))
        self._node = node

    def is_forgotten(self) -> bool:
        """Return whether the kubelet knows the pod no longer."""
        return self.uid not in self._node.kubelet.pods()

    def wait_ended(self) -> None:
        """Wait until the pod has no cgroup."""
        cgroups = partial(self._node.machine.pod_cgroups, self.uid)
        wait_until(lambda: not any(cgroups()), lambda: f"the end of {self.why()}")

    # Its container

    def devices(self, resource: str) -> set[str]:
        """Return the IDs that the container has."""
        return self._node.kubelet.assigned(resource).get((self.name, "main"), set())

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, and again if its output does not come to its end.

        A process that ends at once can be gone before containerd has copied what it wrote.
        """
        end = uuid.uuid4().hex
        script = f'"$@"; status=$?; printf {end}; printf {end} >&2; exit $status'
        container = self.containers()["main"]
        for _ in range(10):
            command = ("tasks", "exec", "--exec-id", uuid.uuid4().hex, container)
            done = self._node.containerd.ctr(*command, "sh", "-c", script, "sh", *argv)
            if done.stdout.endswith(end) and end in done.stderr:
                done.stdout = done.stdout.removesuffix(end)
                done.stderr = done.stderr.replace(end, "")
                return done
        raise RuntimeError(f"{' '.join(argv)} in {self.name}: no whole output in ten attempts")

    def kill(self) -> None:
        """Kill the container; `wait_running` then waits for another one."""
        container = self.containers()["main"]
        self.forget_containers()
        self._node.containerd.ctr("tasks", "kill", "--signal", "SIGKILL", container)

    def environment(self) -> dict[str, str]:
        """Return the environment of the container's first process."""
        done = self.run("cat", "/proc/1/environ")
        return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)

    def device_files(self) -> set[str]:
        """Return the cards' device files in the container."""
        found = self.run("ls", "-A", "/dev/tenstorrent").stdout
        return {f"/dev/tenstorrent/{each}" for each in found.split()}

    def open(self, path: str) -> str:
        """Open a file in the container to read and write: return "opened", or why not."""
        done = self.run("sh", "-c", f": <> {path}")
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def assert_has_only(self, bdf: str) -> None:
        """Check that the container has this chip's device file, can open it, and has no other."""
        path = f"/dev/tenstorrent/{self._node.cards.chip(bdf).ordinal}"
        assert self.device_files() == {path}

        major, minor = self._node.host_number(bdf)
        shown = self.run("stat", "-c", "%F %t %T", path).stdout
        assert shown == f"character special file {major:x} {minor:x}\n"
        assert self.open(path) == "opened"

    def assert_can_make_only(self, bdf: str) -> None:
        """Check that of device files that it makes itself, the container can open this chip's."""
        own = self._node.host_number(bdf)
        for number in OPENABLE:  # of this chip, other chips, and something else of the host
            path = f"/tmp/{number[0]}-{number[1]}"
            make = f"busybox rm -f {path}; busybox mknod {path} c {number[0]} {number[1]}"
            done = self.run("sh", "-c", make)
            assert done.returncode == 0, done.stderr
            assert self.open(path) == ("opened" if number == own else FORBIDDEN)
