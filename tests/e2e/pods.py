"""Pods, as tests handle them: a manifest, and what the API server says has become of it.

Standard library only, for scripts on virtual machines.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.apiserver import ApiServer
from tests.e2e.steps import JSON
from tests.world.processes import LONG_PATIENCE, wait_until

IMAGE = "localhost/realkubelet/busybox:1"  # static; for the pods and for the pause container

Outcome = str  # what became of a pod: RUNNING, or why the kubelet refused it
RUNNING: Outcome = "running"

_numbers = itertools.count(1)


def manifest(
    resources: Mapping[str, int | str],
    *,
    containers: int = 1,
    command: Sequence[str] | None = None,
    once: bool = False,
    user: int | None = None,
    grace: int = 1,
    image: str = IMAGE,
) -> JSON:
    """Return a manifest: containers main, main-1, … that each ask for these resources and sleep.

    command: instead of sleeping; once: it is not started again; user: the containers', also their
    group; grace: seconds between SIGTERM and SIGKILL.
    """
    wanted = {resource: str(count) for resource, count in resources.items()}
    container: JSON = {
        "image": image,
        "resources": {"limits": wanted},
    }
    if command is not None:
        container["command"] = list(command)

    names = [f"main-{n}" if n else "main" for n in range(containers)]
    spec: JSON = {
        "hostNetwork": True,  # there is no network plugin
        "restartPolicy": "Never" if once else "Always",
        "terminationGracePeriodSeconds": grace,
        "containers": [{"name": each, **container} for each in names],
    }
    if user is not None:
        spec["securityContext"] = {"runAsUser": user, "runAsGroup": user}

    metadata = {"name": f"pod-{next(_numbers)}", "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


class Pod:
    """A pod that an API server has."""

    def __init__(
        self, api: ApiServer, name: str, logs: Path, patience: float = LONG_PATIENCE
    ) -> None:
        """logs: the node's /var/log/pods; patience: seconds after which nothing will happen."""
        found = api.pod(name)
        assert found, f"there is no pod {name}"
        self.name = name
        self.uid = str(found["metadata"]["uid"])
        self.patience = patience
        self._api = api
        self._logs = logs
        self._former: set[str] = set()  # IDs of containers that have ended

    # State

    @property
    def status(self) -> JSON:
        """The object's status; empty if there is no object."""
        found = self._api.pod(self.name)
        return dict(found["status"]) if found else {}

    def containers(self) -> dict[str, str]:
        """Return the IDs of the containers by name, which are others after a restart."""
        states = self.status.get("containerStatuses") or ()
        return {state["name"]: _identity(state) for state in states}

    def is_running(self) -> bool:
        """Return whether each container runs, and is none that `forget_containers` was told of."""
        found = self._api.pod(self.name)
        if found is None:
            return False

        states = found["status"].get("containerStatuses") or ()
        running = {_identity(state) for state in states if "running" in state["state"]}
        return len(running - self._former) == len(found["spec"]["containers"])

    def forget_containers(self) -> None:
        """Take the containers of now for ended.

        The API shows them as running until the kubelet has noticed their end, and after a reboot
        until the kubelet has reported others.
        """
        self._former |= set(self.containers().values())

    def refusal(self) -> str | None:
        """Return why the kubelet refused the pod ("reason: message"), if it did."""
        status = self.status
        message = str(status.get("message"))
        if status.get("phase") != "Failed" or not message.startswith("Pod was rejected"):
            return None
        return f"{status.get('reason')}: {message}"

    def output(self) -> list[str]:
        """Return the lines that container main has written, also before it was started again."""
        files = self._logs.glob(f"default_{self.name}_{self.uid}/main/*.log")
        lines: list[str] = []
        for file in sorted(files, key=lambda each: int(each.stem)):
            # Of several containers that have ended, the kubelet keeps the last one's only.
            with contextlib.suppress(FileNotFoundError):
                # The last line can be half written.
                lines += file.read_text(errors="replace").split("\n")[:-1]

        # "2026-01-01T00:00:00.0Z stdout F text"
        return [line.split(" ", 3)[3] for line in lines]

    def why(self) -> str:
        """Return what is known of a pod that is not as it should be."""
        return f"pod {self.name} is {self.status}; it wrote {self.output()[-5:]}"

    # Deletion and waiting

    def delete(self) -> None:
        """Delete the pod in an orderly manner, and do not wait."""
        self._api.delete_pod(self.name, grace=1)

    def force_delete(self) -> None:
        """Delete the pod's object at once: its containers run on for their grace."""
        self._api.delete_pod(self.name)

    def outcome(self) -> Outcome:
        """Wait until the pod runs or is refused; return which."""

        def settled() -> Outcome | None:
            return RUNNING if self.is_running() else self.refusal()

        return wait_until(settled, self.why, self.patience)

    def wait_running(self) -> None:
        """Wait until each container runs: another one than before, if that was killed."""
        outcome = self.outcome()
        assert outcome == RUNNING, f"{self.name} was refused: {outcome}"

    def wait_finished(self) -> None:
        """Wait until a scheduler would give the pod's devices to another one."""
        wait_until(
            lambda: self.status.get("phase") in (None, "Succeeded", "Failed"),
            lambda: f"the end of {self.why()}",
            self.patience,
        )


def _identity(state: JSON) -> str:
    return str(state.get("containerID")).rpartition("/")[2]
