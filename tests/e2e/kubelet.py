"""The real kubelet on a machine: its process, its configuration, and what it answers.

Without an API server (`apiserver.ApiServer`) it runs standalone: all pods are static pods, and what
became of them is read from the kubelet's own /pods.
"""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

from tests.e2e import podresources
from tests.e2e.builds import build_kubelet
from tests.e2e.kubeletconfig import (
    COMMON,
    NODE_ADDRESS,
    NODE_NAME,
    READ_ONLY_PORT,
    WITH_API_SERVER,
    kubeconfig,
)
from tests.e2e.machine import Machine, Process, tail
from tests.e2e.steps import JSON
from tests.world.checkpoint import CHECKPOINT
from tests.world.processes import wait_until


def _configuration(version: str, machine: Machine) -> JSON:
    """Return the KubeletConfiguration of a kubelet without API server."""
    config: JSON = {
        **COMMON,
        "staticPodPath": str(machine.scratch / "manifests"),
        "fileCheckFrequency": "1s",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": machine.cgroup,
        "registerNode": False,
    }

    has_v1 = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    if int(version.split(".")[1]) >= 31 and has_v1:
        config["failCgroupV1"] = False  # refused by default since 1.35
    return config


class Kubelet:
    """A kubelet of one minor version; stopped, killed and started again it keeps its state."""

    def __init__(
        self,
        version: str,
        machine: Machine,
        *,
        config: JSON | None = None,
        api_server: str | None = None,
    ) -> None:
        """Args:
        config: further keys of its configuration, which win over the ones made here;
        api_server: the URL of one; without it, all pods are static.
        """
        self.version = version
        self._machine = machine
        self._api_server = api_server
        self._config = _configuration(version, machine)
        if api_server is not None:
            self._config |= WITH_API_SERVER
        self._config |= config or {}

        self._manifests = Path(self._config["staticPodPath"])
        self._manifests.mkdir()
        self._starts = 0
        self._stale_socket: int | None = None
        self._process: Process | None = None

    @property
    def device_plugin_dir(self) -> Path:
        path = self._machine.path("/var/lib/kubelet/device-plugins")
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        return path

    @property
    def checkpoint(self) -> Path:
        """The file in which it writes down which pod has which devices."""
        return self.device_plugin_dir / CHECKPOINT

    @property
    def log(self) -> Path:
        """What this start of the kubelet has logged."""
        return self._machine.logs / f"kubelet-{self.version}-{self._starts}.log"

    # Start and end

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it answers."""
        assert self._process is None or not self._process.alive, "it runs already"
        self._starts += 1
        self._stale_socket = self._socket_identity()

        config = self._machine.scratch / "kubelet.json"
        config.write_text(json.dumps(self._config, indent=1))
        command = [str(build_kubelet(self.version)), f"--config={config}", "--v=4"]
        command += [f"--hostname-override={NODE_NAME}", *self._flags()]
        self._process = self._machine.spawn(command, self.log)
        wait_until(self._ready, lambda: f"kubelet {self.version} to answer\n{tail(self.log)}")

    def _flags(self) -> list[str]:
        if self._api_server is None:
            return []
        file = self._machine.scratch / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(self._api_server)))
        return [f"--kubeconfig={file}", f"--node-ip={NODE_ADDRESS}"]

    def _ready(self) -> bool:
        """Return whether it answers on its port and takes registrations."""
        if self._process is not None and not self._process.alive:
            raise RuntimeError(f"kubelet {self.version} ended:\n{tail(self.log)}")
        try:
            is_healthy = self._get("/healthz") == b"ok"
        except (OSError, http.client.HTTPException):
            return False
        return is_healthy and self._socket_identity() not in (None, self._stale_socket)

    def _socket_identity(self) -> int | None:
        """Return what tells this start's registration socket from the one that the last left."""
        try:
            return (self.device_plugin_dir / "kubelet.sock").stat().st_ctime_ns
        except FileNotFoundError:
            return None

    def stop(self) -> None:
        """Stop it; the pods run on."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.end(number)
            self._process = None

    def restart(self, **config: Any) -> None:
        """Stop it, and start it with these keys of its configuration."""
        self.stop()
        self._config |= config
        self.start()

    def crash(self, *, lose_checkpoint: bool = False) -> None:
        """Kill it and start it again."""
        self.kill()
        if lose_checkpoint:
            self.checkpoint.unlink()
        self.start()

    def _get(self, path: str) -> bytes:
        """GET a path of its read-only port."""
        with self._machine.connect(READ_ONLY_PORT) as connected:
            connection = http.client.HTTPConnection("127.0.0.1", READ_ONLY_PORT)
            connection.sock = connected
            connection.request("GET", path)
            return connection.getresponse().read()

    def wait_logged(self, text: str) -> None:
        """Wait until this start's log has a text."""
        wait_until(
            lambda: text in self.log.read_text(errors="replace"), f"the kubelet to log {text!r}"
        )

    # Pods

    def add_static(self, manifest: JSON) -> None:
        """Put a pod's manifest where the kubelet finds it.

        Take a new name each time: the kubelet lets ten seconds pass before it starts a static pod
        whose name was that of one just deleted. And give it a UID: without one it is a hash of the
        manifest, and a kubelet that sees a UID again remembers what became of it.
        """
        name = manifest["metadata"]["name"]
        hidden = self._manifests / f".{name}"  # which it leaves alone
        hidden.write_text(json.dumps(manifest))
        hidden.rename(self._manifests / f"{name}.json")

    def withdraw_static(self, name: str) -> None:
        """Remove a pod's manifest; the kubelet takes about two seconds to remove the pod."""
        (self._manifests / f"{name}.json").unlink(missing_ok=True)

    def pod(self, name: str) -> JSON | None:
        """Return the pod as the kubelet's /pods shows it, None while it knows none of that name."""
        listed = json.loads(self._get("/pods"))
        for item in listed.get("items") or ():
            if item["metadata"]["name"] == name:
                return dict(item)
        return None

    # Devices

    def allocatable(self) -> dict[str, set[str]]:
        """Return the IDs of all healthy devices by resource, in use or not."""
        answer = self._ask("GetAllocatableResources")
        found: dict[str, set[str]] = {}
        for devices in answer.devices:
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
        answer = self._ask("List")
        found: dict[tuple[str, str], set[str]] = {}
        for pod in answer.pod_resources:
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
