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

from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.containerd import Containerd
from tests.e2e.daemon import FORBIDDEN, OPENABLE, Site
from tests.e2e.kubelet import Kubelet
from tests.e2e.kubeletconfig import NODE_NAME
from tests.e2e.machine import tail
from tests.e2e.pods import Pod, manifest
from tests.e2e.steps import JSON
from tests.world.node import SimulatedNode
from tests.world.processes import wait_until

N300 = "tenstorrent.com/n300"


class Node(Site):
    """A running kubelet with its machine; cards, daemon and pods are made anew for each test."""

    def __init__(
        self,
        version: str,
        *,
        static_pods: bool = True,
        config: JSON | None = None,
        programs: Path | None = None,
        images: Sequence[Path] = (),
    ) -> None:
        """static_pods: else an API server has the pods; config: the kubelet's; programs: a
        directory with another containerd than the host's; images: archives of more than busybox.
        """
        super().__init__(numa_nodes=2)
        self.version = version
        self.containerd = Containerd(self.machine, programs, images)
        self.api = None if static_pods else ApiServer()
        api_server = None if static_pods else f"http://127.0.0.1:{PORT}"
        self.kubelet = Kubelet(version, self.machine, config=config, api_server=api_server)
        self._pods: list[NodePod] = []  # also those whose end nothing has waited for
        self._boot = ""

    # Start and end

    def start(self) -> None:
        super().start()
        self.kubelet.start()

    def power_on(self) -> None:
        super().power_on()
        self._boot = str(uuid.uuid4())
        if self._cards is not None:
            self._show_boot(self._cards.root)
        self.containerd.start()
        if self.api:
            self.api.serve(self.machine.listen)

    def prepare(self, cards: SimulatedNode) -> None:
        super().prepare(cards)
        self._show_boot(cards.root)
        (cards.root / "sys/fs").mkdir(exist_ok=True)
        (cards.root / "sys/fs/cgroup").symlink_to("/sys/fs/cgroup")
        (cards.root / "var/log").mkdir(parents=True)
        (cards.root / "var/log/pods").symlink_to("/var/log/pods")

    def _show_boot(self, root: Path) -> None:
        """Show the cards' tree which boot this is."""
        file = root / "proc/sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{self._boot}\n")

    def reboot(
        self,
        *,
        before_daemon: Callable[[], object] | None = None,
        while_off: Callable[[], object] = lambda: None,
    ) -> None:
        """Cut the power and start all again: the daemon, then the kubelet.

        before_daemon: what happens between the two if the kubelet is started first.
        """
        for pod in self._pods:
            pod.forget_containers()
        self.machine.power_off()
        self.daemon.process = None
        self.cards.boot()
        while_off()

        self.power_on()
        if before_daemon is None:
            self.daemon.start()
            self.kubelet.start()
        else:
            self.kubelet.start()
            before_daemon()
            self.daemon.start()

    def clear(self) -> None:
        """Take out the pods, the daemon and the cards; `wait_clear` waits for the pods' end."""
        for pod in self._pods:
            pod.force_delete()
        super().clear()

    def wait_clear(self) -> None:
        """Wait until the pods that were taken out are gone, with their processes."""
        for pod in self._pods:
            wait_until(partial(pod.is_forgotten), f"{pod.name} to go")
        wait_until(lambda: not self.machine.pod_processes(), "all pods to end")
        self._pods = []

        # The kubelet forgets pods that have ended when it is asked for them. No test has to wait
        # for the end of their holds.
        self.kubelet.assigned("")
        self.kubelet.checkpoint.unlink(missing_ok=True)
        super().wait_clear()

    def destroy(self) -> None:
        if self.api:
            self.api.close()
        super().destroy()

    def last_words(self) -> str:
        """Return the end of the daemon's and of the kubelet's log."""
        return f"{super().last_words()}\n{tail(self.kubelet.log)}"

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

    def add(self, described: JSON, *, static: bool = False) -> NodePod:
        """Create a pod by its manifest; static: also if there is an API server."""
        is_static = static or self.api is None
        name, uid = described["metadata"]["name"], uuid.uuid4()
        if is_static:  # the kubelet's own UIDs of static pods have no hyphens
            pod = NodePod(self, f"{name}-{NODE_NAME}", uid.hex, is_static)
        else:
            pod = NodePod(self, name, str(uid), is_static)
        described["metadata"]["uid"] = pod.uid

        self._pods.append(pod)
        if is_static or self.api is None:
            self.kubelet.add_static(described)
        else:
            self.api.add_pod(described, NODE_NAME)

        # From here on, a pod that cannot be found is one that has gone.
        wait_until(pod.read, f"{pod.name} to be known")
        return pod


class NodePod(Pod):
    """A pod of a Node: what became of it, and what its container main has and can do."""

    def __init__(self, node: Node, name: str, uid: str, is_static: bool) -> None:
        super().__init__(name, uid)
        self._node = node
        self._is_static = is_static

    def read(self) -> JSON | None:
        # Of a static pod, the API server has a copy with another UID, and not of one that the
        # kubelet has refused.
        if self._node.api and not self._is_static:
            return self._node.api.pod(self.name)
        return self._node.kubelet.pod(self.name)

    @property
    def logs(self) -> Path:
        return self._node.machine.path("/var/log/pods")

    # Its end

    def delete(self) -> None:
        """Delete the pod in an orderly manner, and do not wait; a static one has only one way."""
        if self._node.api and not self._is_static:
            self._node.api.delete_pod(self.name, grace=1)
        else:
            self.force_delete()

    def force_delete(self) -> None:
        """Delete the pod's object, or manifest, at once: its containers run on for their grace."""
        if self._node.api and not self._is_static:
            self._node.api.delete_pod(self.name)
        else:
            self._node.kubelet.withdraw_static(self.name.removesuffix(f"-{NODE_NAME}"))

    def is_forgotten(self) -> bool:
        """Return whether the kubelet knows the pod no longer."""
        return self._node.kubelet.pod(self.name) is None

    def wait_ended(self) -> None:
        """Wait until the pod has no cgroup."""
        cgroups = self._node.machine.pod_cgroups
        wait_until(lambda: not any(cgroups(self.uid)), lambda: f"the end of {self.why()}")

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

    def number(self, path: str) -> tuple[int, int]:
        """Return the major and minor number of a device file in the container."""
        done = self.run("stat", "-c", "%F %t %T", path)
        assert done.stdout.startswith("character special file "), done.stdout + done.stderr
        major, minor = done.stdout.split()[-2:]
        return int(major, 16), int(minor, 16)

    def open(self, path: str) -> str:
        """Open a file in the container to read and write: return "opened", or why not."""
        done = self.run("sh", "-c", f": <> {path}")
        return "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]

    def make_and_open(self, number: tuple[int, int]) -> str:
        """Let the container itself create a device file, which takes root, and open that."""
        path = f"/tmp/{number[0]}-{number[1]}"
        make = f"busybox rm -f {path}; busybox mknod {path} c {number[0]} {number[1]}"
        done = self.run("sh", "-c", make)
        assert done.returncode == 0, done.stderr
        return self.open(path)

    def assert_has_only(self, bdf: str) -> None:
        """Check that the container has this chip's device file, can open it, and has no other."""
        path = f"/dev/tenstorrent/{self._node.cards.chip(bdf).ordinal}"
        assert self.device_files() == {path}
        assert self.number(path) == self._node.host_number(bdf)
        assert self.open(path) == "opened"

    def assert_can_make_only(self, bdf: str) -> None:
        """Check that of device files that it makes itself, the container can open this chip's."""
        own = self._node.host_number(bdf)
        for number in OPENABLE:  # of this chip, other chips, and something else of the host
            assert self.make_and_open(number) == ("opened" if number == own else FORBIDDEN)
