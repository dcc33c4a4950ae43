"""The scenarios of tests.world.scenarios on real kubelets: the measure of the reference kubelet."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest

from generated import podresources_pb2 as pods_pb
from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.machine import JSON, NODE_NAME, VERSIONS, Containerd, Kubelet, Machine, pod, tail
from tests.world.plugins import Policy
from tests.world.processes import until, wait_until
from tests.world.scenarios import SCENARIOS, Scenario, perform
from tests.world.stage import LONG, Listed, Plugin, Wish

T = TypeVar("T")

HEARD_OF_ALL = r"SyncLoop \(housekeeping\) end"  # of its log: housekeeping waits for all sources
SLEEP = (
    "trap 'exit 0' USR1; trap 'exit 1' USR2; trap {term} TERM; while :; do sleep 3600 & wait; done"
)
USUAL = (None, "ContainerCreating", "PodInitializing", "CrashLoopBackOff")
REFUSED = re.compile("UnexpectedAdmissionError|OutOf.*")
GRACE = 60  # seconds for which a stubborn container would run on


def manifest(wish: Wish) -> JSON:
    """Return a pod's manifest."""
    result = pod(wish.name, restart="Never" if wish.once else "Always")
    spec = result["spec"]
    (sample,) = spec.pop("containers")
    spec["containers"], spec["initContainers"] = [], []
    if wish.stubborn:
        spec["terminationGracePeriodSeconds"] = GRACE
    for part in wish.parts:
        amounts = {resource: str(count) for resource, count in part.request.items()}
        container = sample | {"name": part.name, "resources": {"limits": amounts}}
        term = "''" if wish.stubborn else "'exit 0'"
        container["command"] = ["sh", "-c", SLEEP.format(term=term)]
        if part.kind == "init":
            container["command"] = ["true"]
        elif part.kind == "restartable":
            container["restartPolicy"] = "Always"
        spec["containers" if part.kind == "main" else "initContainers"].append(container)
    return result


class RealWorld:
    """A real kubelet with its API server, on a machine of its own."""

    def __init__(self, version: str) -> None:
        major, minor = version.split(".")
        self.version = (int(major), int(minor))
        self.machine = Machine(numa_nodes=2)
        self.api = ApiServer()
        self.containerd = Containerd(self.machine)
        server = f"http://127.0.0.1:{PORT}"
        self.kubelet = Kubelet(version, self.machine, self.containerd, api_server=server)
        self._static: set[str] = set()
        self._deleted: set[str] = set()
        self._crashed: set[str] = set()  # IDs of containers, which the kubelet may still show
        self._uids: dict[str, str] = {}
        self._running: dict[str, dict[str, str]] = {}  # containers of pods that were deleted

    def power_on(self) -> None:
        """Switch on all but the kubelet."""
        self.machine.power_on()
        self.containerd.start()
        self.api.serve(self.machine)

    def destroy(self) -> None:
        self.api.close()
        self.machine.destroy()

    @property
    def directory(self) -> Path:
        return self.kubelet.device_plugin_dir

    @property
    def cgroups(self) -> Path:
        return self.machine.cgroups

    # Pods

    async def create(self, wish: Wish) -> None:
        if wish.static:
            self._static.add(wish.name)
            await _thread(self.kubelet.run_pod, manifest(wish))
        else:
            self.api.add_pod(manifest(wish), NODE_NAME)

    def _find(self, name: str) -> JSON | None:
        """Return a pod as the kubelet's /pods shows it, a static one with its own UID."""
        shown = f"{name}-{NODE_NAME}" if name in self._static else name
        with contextlib.suppress(OSError, http.client.HTTPException):  # it is, or goes, down
            listed = json.loads(self.kubelet.get("/pods"))
            for item in listed.get("items") or ():
                if item["metadata"]["name"] == shown:
                    return dict(item)
        return None

    async def uid(self, name: str) -> str:
        found = await _until(lambda: self._find(name), f"the kubelet to know {name}")
        self._uids[name] = str(found["metadata"]["uid"])
        return self._uids[name]

    async def state(self, name: str, container: str) -> str:
        if refused := self._refusal(name):
            return refused
        found = await _thread(self._find, name)
        if found is None:
            return ""
        status = found["status"]
        states = [*status.get("containerStatuses", ()), *status.get("initContainerStatuses", ())]
        mine: JSON = next((s for s in states if s["name"] == container), {})
        state = mine.get("state", {})
        if "running" in state:
            return "" if mine["containerID"] in self._crashed else "running"
        if "terminated" in state:
            return "done" if state["terminated"]["exitCode"] == 0 else ""
        waiting = state.get("waiting", {})
        is_usual = waiting.get("reason") in USUAL
        return "" if is_usual else f"{waiting['reason']}: {waiting.get('message')}"

    def _refusal(self, name: str) -> str:
        """Return why the kubelet has refused a pod, from its events: its status passes."""
        events, _ = self.api.collect("/api/v1/events")
        for event in events:
            is_mine = event["involvedObject"].get("uid") == self._uids[name]
            if is_mine and REFUSED.fullmatch(event["reason"]):
                return f"{event['reason']}: {event['message']}"
        return ""

    def _containers(self, name: str) -> dict[str, str]:
        """Return the IDs of a pod's containers, by name."""
        found = self._find(name)
        states = found["status"]["containerStatuses"] if found else []
        made = [s for s in states if "containerID" in s]
        return {s["name"]: s["containerID"].removeprefix("containerd://") for s in made}

    def _signal(self, container: str, number: str) -> None:
        self.containerd.ctr("tasks", "kill", "--signal", number, container)

    async def complete(self, name: str) -> None:
        containers = await _thread(self._containers, name)
        await _thread(self._signal, containers["main"], "SIGUSR1")

        def seen() -> bool:
            phase = (self.api.pod(name) or {}).get("status", {}).get("phase")
            return bool(phase == "Succeeded")

        await _until(seen, f"{name} to be complete")
        await self._cgroup_gone(name)

    async def crash(self, name: str, container: str) -> None:
        containers = await _thread(self._containers, name)
        self._crashed.add(f"containerd://{containers[container]}")
        await _thread(self._signal, containers[container], "SIGUSR2")

    async def delete(self, name: str) -> None:
        if name in self._static:
            with contextlib.suppress(FileNotFoundError):
                self.kubelet.withdraw_pod(name)
        else:
            self._deleted.add(name)
            self.api.delete_pod(name, grace=1)

    async def force_delete(self, name: str) -> None:
        self._running[name] = await _thread(self._containers, name)
        if name in self._static:
            self.kubelet.withdraw_pod(name)
        else:
            self.api.delete_pod(name)
        if self.kubelet.process is not None:
            await _until(lambda: not self._find(name), f"the kubelet to forget {name}")

    async def gone(self, name: str) -> None:
        for container in self._running.pop(name, {}).values():
            with contextlib.suppress(RuntimeError):  # it has ended already
                await _thread(self._signal, container, "SIGKILL")
        await self._cgroup_gone(name)
        if name in self._deleted:
            await _until(lambda: self.api.pod(name) is None, f"the API server to forget {name}")

    async def _cgroup_gone(self, name: str) -> None:
        cgroup = f"pod{self._uids[name]}"

        def gone() -> bool:
            return not any(cgroup in directories for _, directories, _ in os.walk(self.cgroups))

        await _until(gone, f"the containers of {name} to end")

    # The kubelet

    async def stop(self) -> None:
        await _thread(self.kubelet.kill)

    async def start(self, plugins: Iterable[Plugin], policy: Policy | None) -> None:
        if policy:
            self.kubelet.configure(topologyManagerPolicy=policy)
        plugins = list(plugins)
        for plugin in plugins:
            await plugin.stop()
        before = self.kubelet.socket_identity()
        await _thread(self.kubelet.spawn)

        def there() -> bool:
            return self.kubelet.socket_identity() not in (None, before)

        await until(there, "kubelet.sock", LONG)
        for plugin in plugins:
            await plugin.serve()
            await _register(plugin)

    async def heard_of_all(self) -> None:
        await _thread(self.kubelet.wait_ready, LONG)
        await _thread(self.kubelet.wait_logged, HEARD_OF_ALL, LONG)

    async def cut_power(self) -> None:
        await _thread(self.machine.power_off)
        self.kubelet.process = None
        await _thread(self.power_on)

    async def dead(self) -> bool:
        process = self.kubelet.process
        assert process is not None

        def decided() -> bool:
            return not process.alive or bool(self.kubelet.logged(HEARD_OF_ALL))

        await _until(decided, "the kubelet to die, or to hear of all pods")
        return not process.alive

    async def missed(self, plugin: Plugin) -> None:
        text = f'"Device plugin disconnected" resource="{re.escape(plugin.resource)}"'
        await _thread(self.kubelet.wait_logged, text, LONG)

    async def api_server_away(self) -> None:
        await _thread(self.api.close)

    async def api_server_back(self) -> None:
        self.api.serve(self.machine)

    async def listed(self) -> Listed:
        answer = await _thread(self.kubelet._ask, "List", pods_pb.ListPodResourcesRequest())
        return {
            p.name.removesuffix(f"-{NODE_NAME}"): {
                c.name: [(d.resource_name, i) for d in c.devices for i in d.device_ids]
                for c in p.containers
            }
            for p in answer.pod_resources
        }


async def _register(plugin: Plugin) -> None:
    """Register at a socket that has just appeared: it is there before it accepts connections."""
    deadline = time.monotonic() + LONG
    while True:
        try:
            return await plugin.register()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise


async def _thread(function: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.to_thread(function, *arguments)


async def _until(condition: Callable[[], T | None], what: str) -> T:
    """Wait in a thread, so that plugins answer meanwhile."""
    return await _thread(wait_until, condition, what, LONG)


@pytest.fixture(scope="module")
def worlds(tools: None) -> Iterator[list[RealWorld]]:
    """One for each version of the kubelet; what they do is waiting, so they do it side by side."""
    with contextlib.ExitStack() as stack:
        made = []
        for version in VERSIONS:
            made.append(RealWorld(version))
            stack.callback(made[-1].destroy)
        for world in made:
            world.power_on()
            world.kubelet.start()
        yield made


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_the_original_does_what_the_record_says(
    worlds: list[RealWorld], scenario: Scenario
) -> None:
    """The reference kubelet writes the same record, see tests.world.test_kubelet."""
    prefix = scenario.name.replace("_", "-")
    runs = [perform(scenario, world, prefix) for world in worlds]
    records = await asyncio.gather(*runs, return_exceptions=True)
    for world, record in zip(worlds, records, strict=True):
        print(tail(world.kubelet.log))  # shown if the test fails
        if isinstance(record, BaseException):
            raise record
        assert record == scenario.expected(world.version), world.version
