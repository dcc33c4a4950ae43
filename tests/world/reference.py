"""The reference kubelet as a world for scenarios, and with plugins beside it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import podresources_pb2 as pods_pb
from generated import podresources_pb2_grpc as pods_rpc
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.plugins import Policy
from tests.world.pods import Container
from tests.world.stage import LONG, Listed, Plugin, Wish

N150 = "tenstorrent.com/n150"


@contextlib.asynccontextmanager
async def lister(kubelet: Kubelet) -> AsyncIterator[Any]:
    """Give a client of the pod resources API."""
    options, address = [("grpc.use_local_subchannel_pool", 1)], f"unix:{kubelet.pod_resources}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield pods_rpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]


class Bench(contextlib.AsyncExitStack):
    """A directory for a kubelet and for plugins, which are stopped with the context."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    async def kubelet(self, **options: Any) -> Kubelet:
        """Start a kubelet with these options of its class."""
        return await self.enter_async_context(Kubelet(self.directory, **options))

    async def plugin(
        self, *devices: pb.Device, resource: str = N150, name: str = "p.sock", **options: bool
    ) -> Plugin:
        """Start a plugin's server, with `options` for the kubelet."""
        plugin = Plugin(self.directory, devices, resource, name)
        plugin.options = pb.DevicePluginOptions(**options)
        self.push_async_callback(plugin.stop)
        await plugin.serve()
        return plugin

    async def registered(
        self, kubelet: Kubelet, *devices: pb.Device, resource: str = N150, **options: bool
    ) -> Plugin:
        """Start a plugin that registers, and wait until the kubelet has its list."""
        name = f"{resource.rpartition('/')[2]}.sock"
        plugin = await self.plugin(*devices, resource=resource, name=name, **options)
        await plugin.register()
        await kubelet.registered(resource)
        return plugin


class ReferenceWorld:
    """The reference kubelet, as scenarios see it."""

    def __init__(self, directory: Path, version: tuple[int, int]) -> None:
        self.version = version
        self.cgroups = directory / "cgroups"  # with `tasks` files in pods' cgroups, at any depth
        self.directory = directory / "d"  # of plugins' sockets and the checkpoint
        self.kubelet = Kubelet(
            self.directory, version=version, back_off=0.01, cgroups=self.cgroups, layout="v1"
        )
        self._forced: set[str] = set()

    async def create(self, wish: Wish) -> None:
        """Create a pod; `state` returns how far it is."""
        containers = [Container(part.name, dict(part.request), part.kind) for part in wish.parts]
        with contextlib.suppress(AdmissionError):
            await self.kubelet.admit_pod(wish.name, containers, static=wish.static)

    async def uid(self, name: str) -> str:
        """Return the UID by which the kubelet knows a pod."""
        return self.kubelet.uid(name)

    async def state(self, name: str, container: str) -> str:
        """Return "running", "done", or the kubelet's reason why not; "" while it starts."""
        found = self.kubelet.pods.get(name)
        about = [event.fields for event in self.kubelet.events if event.fields.get("pod") == name]
        failures = [fields for fields in about if "reason" in fields]
        state = found.containers[container]
        if not found.rejected:
            if state.pid is not None or state.over:
                return "done" if state.over else "running"
            failures = [fields for fields in failures if fields["container"] == container]
        return "".join(f"{fields['reason']}: {fields['message']}" for fields in failures[-1:])

    async def complete(self, name: str) -> None:
        """Let a pod's containers end with success, and wait until the kubelet has seen it."""
        self.kubelet.complete(name)

    async def crash(self, name: str, container: str) -> None:
        """Let a container end with failure; the kubelet starts it again."""
        self.kubelet.crash(name, container)

    async def delete(self, name: str) -> None:
        """Delete a pod in an orderly manner; `gone` waits for its end."""
        self.kubelet.delete(name)

    async def force_delete(self, name: str) -> None:
        """Delete a pod's object or manifest at once, and wait until the kubelet has seen it."""
        self._forced.add(name)
        self.kubelet.force_delete(name)

    async def gone(self, name: str) -> None:
        """Wait until a deleted or rejected pod has neither cgroup nor object any more.

        The containers of a pod whose deletion was forced are killed.
        """
        if name in self._forced:
            self.kubelet.end(name)
        pod = self.kubelet.pods.get(name)
        await self.kubelet.wait_for(lambda: pod.over)

    async def stop(self) -> None:
        """Kill the kubelet."""
        await self.kubelet.kill()

    async def start(self, plugins: Iterable[Plugin], policy: Policy | None) -> None:
        """Start it; `plugins` register as soon as they can. `policy`: a new one, if any."""
        if policy:
            self.kubelet.config.policy = policy
        plugins = list(plugins)
        for plugin in plugins:
            await plugin.stop()
        self.kubelet.pods_come = LONG if plugins else 0.0
        await self.kubelet.start()
        for plugin in plugins:
            await plugin.serve()
            await plugin.register()

    async def cut_power(self) -> None:
        """End all processes of the node, whose kubelet was stopped; `start` is then a reboot."""
        await self.kubelet.power_cut()

    async def heard_of_all(self) -> None:
        """Wait until a kubelet that was started has heard of all pods."""
        await self.kubelet.wait_for(lambda: self.kubelet.pods.sources_ready)

    async def dead(self) -> bool:
        """Return whether the kubelet has died by itself before it has heard of all pods."""
        kubelet = self.kubelet
        await kubelet.wait_for(lambda: not kubelet.alive or kubelet.pods.sources_ready)
        return not kubelet.alive

    async def missed(self, plugin: Plugin) -> None:
        """Wait until the kubelet has seen that a plugin is gone."""
        await self.kubelet.wait_for(lambda: self.kubelet.find("ended", plugin.resource))

    async def api_server_away(self) -> None:
        """Stop the API server."""
        self.kubelet.api_server_away()

    async def api_server_back(self) -> None:
        """Start the API server again."""
        self.kubelet.api_server_back()

    async def listed(self) -> Listed:
        """Call List."""
        async with lister(self.kubelet) as stub:
            answer = await stub.List(pods_pb.ListPodResourcesRequest())
        listed: Listed = {}
        for pod in answer.pod_resources:
            containers = listed.setdefault(pod.name, {})
            for container in pod.containers:
                devices = [(d.resource_name, i) for d in container.devices for i in d.device_ids]
                containers[container.name] = devices
        return listed
