"""The real kubelet on a machine: its process, its configuration, and what it answers."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

from tests.e2e import podresources
from tests.e2e.apiserver import PORT
from tests.e2e.builds import build_kubelet
from tests.e2e.kubeletconfig import (
    COMMON,
    NODE_ADDRESS,
    NODE_NAME,
    READ_ONLY_PORT,
    kubeconfig,
)
from tests.e2e.machine import Machine, Process, tail
from tests.e2e.steps import JSON
from tests.world.checkpoint import CHECKPOINT
from tests.world.processes import wait_until


class Kubelet:
    """A kubelet of one minor version; stopped, killed and started again it keeps its state."""

    def __init__(self, version: str, machine: Machine, config: JSON | None = None) -> None:
        """config: further keys of its configuration."""
        self.version = version
        self._machine = machine
        self._config = COMMON | {"cgroupDriver": "cgroupfs", "cgroupRoot": machine.cgroup}
        self._config["featureGates"] = {"ResourceHealthStatus": True}  # the default since 1.36
        if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
            self._config["failCgroupV1"] = False  # refused by default since 1.35
        self._config |= config or {}
        self._starts = 0
        self._process: Process | None = None

    @property
    def checkpoint(self) -> Path:
        """The file in which it writes down which pod has which devices."""
        return self._machine.path(f"/var/lib/kubelet/device-plugins/{CHECKPOINT}")

    @property
    def log(self) -> Path:
        """What this start of the kubelet has logged."""
        return self._machine.logs / f"kubelet-{self.version}-{self._starts}.log"

    # Start and end

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it answers."""
        assert self._process is None or not self._process.alive, "it runs already"
        self._starts += 1

        config = self._machine.scratch / "kubelet.json"
        config.write_text(json.dumps(self._config, indent=1))
        server = self._machine.scratch / "kubeconfig"
        server.write_text(json.dumps(kubeconfig(f"http://127.0.0.1:{PORT}")))
        command = [str(build_kubelet(self.version)), f"--config={config}", "--v=4"]
        command += [f"--kubeconfig={server}", f"--node-ip={NODE_ADDRESS}"]
        command.append(f"--hostname-override={NODE_NAME}")

        self._process = self._machine.spawn(command, self.log)
        wait_until(self._ready, lambda: f"kubelet {self.version} to answer\n{tail(self.log)}")

    def _ready(self) -> bool:
        if self._process is not None and not self._process.alive:
            raise RuntimeError(f"kubelet {self.version} ended:\n{tail(self.log)}")
        try:
            return self._get("/healthz") == b"ok"
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        """Kill it; the pods run on."""
        assert self._process is not None
        self._process.end(signal.SIGKILL)

    def crash(self, *, lose_checkpoint: bool = False) -> None:
        """Kill it and start it again."""
        self.kill()
        if lose_checkpoint:
            self.checkpoint.unlink(missing_ok=True)
        self.start()

    def _get(self, path: str) -> bytes:
        """GET a path of its read-only port."""
        with self._machine.connect(READ_ONLY_PORT) as connected:
            connection = http.client.HTTPConnection("127.0.0.1", READ_ONLY_PORT)
            connection.sock = connected
            connection.request("GET", path)
            return connection.getresponse().read()

    # Pods and devices

    def pods(self) -> set[str]:
        """Return the UIDs of the pods that it knows."""
        listed = json.loads(self._get("/pods"))
        return {item["metadata"]["uid"] for item in listed.get("items") or ()}

    def allocatable(self) -> dict[str, set[str]]:
        """Return the IDs of all healthy devices by resource, in use or not."""
        found: dict[str, set[str]] = {}
        for devices in self._ask("GetAllocatableResources").devices:
            found.setdefault(devices.resource_name, set()).update(devices.device_ids)
        return found

    def wait_allocatable(self, resource: str, devices: set[str]) -> None:
        """Wait until a resource has exactly these healthy devices."""
        wait_until(
            lambda: self.allocatable().get(resource, set()) == devices,
            lambda: f"{resource} to be {sorted(devices)}; there is {self.allocatable()}",
        )

    def assigned(self, resource: str) -> dict[tuple[str, str], set[str]]:
        """Return which devices the containers have, by pod and container."""
        found: dict[tuple[str, str], set[str]] = {}
        for pod in self._ask("List").pod_resources:
            for container in pod.containers:
                for devices in container.devices:
                    if devices.resource_name == resource:
                        place = found.setdefault((pod.name, container.name), set())
                        place.update(devices.device_ids)
        return found

    def _ask(self, method: str) -> Any:
        """Call the pod resources API."""
        socket_path = self._machine.path("/var/lib/kubelet/pod-resources/kubelet.sock")
        return podresources.ask(str(socket_path), method)
