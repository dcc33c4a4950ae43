"""The stage of a kubelet scenario: a world with plugins and pods, and the record of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import textwrap
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CHECKPOINT
from tests.world.plugins import Policy, rpc
from tests.world.pods import Kind
from tests.world.processes import Broken, until

DOMAIN = "example.com"
LONG = 60.0  # seconds after which something that a kubelet must do has failed
WIDTH = 88  # of a record's lines

CALLS = {
    "GetDevicePluginOptions": "options",
    "GetPreferredAllocation": "prefer",
    "Allocate": "allocate",
    "PreStartContainer": "prestart",
}  # methods, and their names in records


# ------------------------------------------------------------------------------------- the plugin


def device(ident: str, health: str = "Healthy", nodes: Sequence[int] = ()) -> pb.Device:
    """Return a device as plugins list them; `nodes`: its NUMA nodes."""
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=n) for n in nodes]) if nodes else None
    return pb.Device(ID=ident, health=health, topology=topology)


class Plugin:
    """The least that a kubelet accepts as a device plugin: one resource, one socket, and knobs."""

    def __init__(
        self,
        directory: Path,
        devices: Iterable[pb.Device],
        resource: str,
        name: str,
        calls: list[str] | None = None,
    ) -> None:
        """Args: name: its socket's; calls: a list to which it adds the calls that it gets."""
        self.directory = directory
        self.devices = list(devices)
        self.resource = resource
        self.name = name
        self.calls: list[str] = [] if calls is None else calls
        self.options = pb.DevicePluginOptions()
        self.refuses: Callable[[str], bool] = lambda method: False
        self.grants = asyncio.Event()  # PreStartContainer waits for this
        self.grants.set()
        self.permissions = "rw"
        self.envs: dict[str, str] = {}  # additional ones for every container
        self.preference: Sequence[str] | None = None  # None: must-include, then the lowest IDs
        self.alias = ""  # for the record, if a resource has two plugins
        self._streams: set[asyncio.Queue[list[pb.Device]]] = set()
        self._server: grpc.aio.Server | None = None

    async def serve(self) -> None:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / self.name}")
        await self._server.start()

    async def register(self) -> None:
        request = pb.RegisterRequest(
            version="v1beta1", endpoint=self.name, resource_name=self.resource, options=self.options
        )
        socket = f"unix:{self.directory / 'kubelet.sock'}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(socket, options=options) as channel:
            await rpc.RegistrationStub(channel).Register(request, timeout=LONG)

    async def stop(self) -> None:
        """Stop serving; gRPC removes the socket."""
        if self._server:
            await self._server.stop(None)
            self._server = None

    def send(self, *devices: pb.Device) -> None:
        self.devices = list(devices)
        for stream in self._streams:
            stream.put_nowait(self.devices)

    async def _note(self, method: str, ids: Iterable[str], context: Any, more: str = "") -> None:
        """Write a call down; refuse it, if told to."""
        name = self.resource.rpartition("/")[2]
        who = f"of {self.alias}" if self.alias else ""
        words = (CALLS[method], name, ",".join(sorted(ids)), more, who)
        self.calls.append(" ".join(filter(None, words)))
        if method == "PreStartContainer":
            await self.grants.wait()
        if self.refuses(method):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Any) -> Any:
        await self._note("GetDevicePluginOptions", [], context)
        return self.options

    async def ListAndWatch(self, request: pb.Empty, context: Any) -> AsyncIterator[Any]:
        lists: asyncio.Queue[list[pb.Device]] = asyncio.Queue()
        lists.put_nowait(self.devices)
        self._streams.add(lists)
        try:
            while True:
                yield pb.ListAndWatchResponse(devices=await lists.get())
        finally:
            self._streams.discard(lists)

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        question = request.container_requests[0]
        must, size = sorted(question.must_include_deviceIDs), question.allocation_size
        available = sorted(question.available_deviceIDs)
        more = f"with {','.join(must)} for {size}" if must else f"for {size}"
        await self._note("GetPreferredAllocation", available, context, more)
        lowest = [*must, *(ident for ident in available if ident not in must)][:size]
        ids = lowest if self.preference is None else self.preference
        answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
        return pb.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> Any:
        ids = sorted(request.container_requests[0].devices_ids)
        await self._note("Allocate", ids, context)
        node = pb.DeviceSpec(
            container_path=f"/dev/{ids[0]}", host_path="/dev/null", permissions=self.permissions
        )
        answer = pb.ContainerAllocateResponse(
            envs={"IDS": ",".join(ids), **self.envs},
            mounts=[pb.Mount(container_path="/etc/ids", host_path="/etc/hostname", read_only=True)],
            devices=[node],
        )
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(self, request: pb.PreStartContainerRequest, context: Any) -> Any:
        await self._note("PreStartContainer", request.devices_ids, context)
        return pb.PreStartContainerResponse()


# -------------------------------------------------------------------------------------- the world


class Part(NamedTuple):
    """A container of a pod to be created."""

    name: str
    request: Mapping[str, int]  # by the last part of a resource's name
    kind: Kind = "main"


class Wish(NamedTuple):
    """A pod to be created."""

    name: str
    parts: Sequence[Part]
    static: bool = False
    stubborn: bool = False  # ignores SIGTERM, and so runs on for its grace period
    once: bool = False  # is not started again


Listed = dict[str, dict[str, list[tuple[str, str]]]]
"""The answer of List: by pod and container, resources and IDs."""


World = Any
"""A kubelet with its node and an API server: tests.world.reference.ReferenceWorld, which describes
the methods, or the original in tests.e2e.test_reference. Containers sleep until told otherwise."""


# -------------------------------------------------------------------------------------- the stage


def wrapped(title: str, pieces: Sequence[str]) -> list[str]:
    """Return lines with `title: piece; piece; …`, broken between pieces only."""
    text = "; ".join(piece.replace(" ", "\xa0") for piece in pieces)
    title = f"{title}: ".replace(" ", "\xa0")
    wrapper = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in wrapper.wrap(title + text)]


class Record:
    """The record of a scenario, without parts that differ from run to run.

    Resources and pods are named without the scenario's prefix, pods' UIDs replaced by their names.
    """

    def __init__(self, world: World, prefix: str) -> None:
        self.lines: list[str] = []
        self.calls: list[str] = []
        self.pods: dict[str, str] = {}  # names by UID
        self.aliases: dict[str, str] = {}  # of resources, by their own names
        self._world = world
        self._prefix = prefix

    def write(self, text: str) -> None:
        """Write down a text that can be long and contain UIDs."""
        text = text.replace(f"{DOMAIN}/{self._prefix}.", "")
        for uid, name in self.pods.items():
            text = text.replace(uid, f"<{name}>")
        self.lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")

    def note(self, what: str) -> None:
        """Write down the state after a step: calls since the last one, the file, cgroups."""
        entries, registered = self._file()
        pieces = [self._short_call(call) for call in self.calls]
        self.calls.clear()
        pieces.append(f"file {' '.join(entries) or '-'} | {' '.join(registered) or '-'}")
        if cgroups := self._cgroups():
            pieces.append(f"cgroups {' '.join(cgroups)}")
        self.lines += wrapped(what, pieces)

    def note_listed(self, what: str, listed: Listed) -> None:
        texts = []
        for pod, containers in listed.items():
            if not pod.startswith(f"{self._prefix}-"):
                continue
            for container, devices in containers.items():
                named = sorted(f"{self._short(r)}:{ident}" for r, ident in devices)
                short = pod.removeprefix(f"{self._prefix}-")
                texts.append(f"{short}/{container}={','.join(named) or '-'}")
        self.lines.append(f"{what}: List names {' '.join(sorted(texts)) or 'none'}")

    def call_by_order(self, *aliases: str) -> None:
        """Let resources have these names, in the order in which they were allocated."""
        order = [call.split()[1] for call in self.calls if call.startswith("allocate ")]
        names = [name.removeprefix(f"{self._prefix}.") for name in order]
        self.aliases = dict(zip(names, aliases, strict=True))

    def _short(self, resource: str) -> str | None:
        """Return the record's name of a resource; None for one that is not this scenario's."""
        prefix = f"{DOMAIN}/{self._prefix}."
        name = resource.removeprefix(prefix)
        return self.aliases.get(name, name) if resource.startswith(prefix) else None

    def _short_call(self, call: str) -> str:
        method, resource, *rest = call.split()
        return " ".join([method, str(self._short(f"{DOMAIN}/{resource}")), *rest])

    def _file(self) -> tuple[list[str], list[str]]:
        """Return the file's entries and registered devices, as far as they are this scenario's."""
        try:
            data = json.loads((self._world.directory / CHECKPOINT).read_bytes())["Data"]
        except FileNotFoundError:
            return ["(none)"], []
        entries = []
        for entry in data["PodDeviceEntries"] or []:
            if (name := self._short(entry["ResourceName"])) is None:
                continue
            where = f"{self.pods.get(entry['PodUID'], '?')}/{entry['ContainerName']}"
            placed = []
            for node, ids in entry["DeviceIDs"].items():
                placed += [f"{ident}@{node}" if node != "-1" else ident for ident in ids]
            entries.append(f"{where}={name}:{','.join(sorted(placed))}")
        registered = []
        for resource, ids in (data["RegisteredDevices"] or {}).items():
            if (name := self._short(resource)) is not None:
                registered.append(f"{name}:{','.join(sorted(ids)) or '-'}")
        return sorted(entries), sorted(registered)

    def _cgroups(self) -> list[str]:
        """Return which of the pods have a cgroup, and whether it has no processes."""
        found: dict[str, bool] = {}
        for path, _, files in os.walk(self._world.cgroups):
            for uid, name in self.pods.items():
                if f"/pod{uid}" not in path or "tasks" not in files:
                    continue
                with contextlib.suppress(OSError):  # it has just been removed
                    is_populated = bool(Path(path, "tasks").read_text())
                    found[name] = found.get(name, False) or is_populated
        return sorted(name if populated else f"{name}(empty)" for name, populated in found.items())


class Stage:
    """The stage of one scenario: a world, plugins, pods, and the record."""

    def __init__(self, world: World, prefix: str) -> None:
        """Args: prefix: of pods' and resources' names; scenarios share a kubelet, but no names."""
        self.world = world
        self.record = Record(world, prefix)
        self._prefix = prefix
        self._plugins: list[Plugin] = []
        self._left: list[str] = []  # pods that still exist

    def full(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _resource(self, name: str) -> str:
        return f"{DOMAIN}/{self._prefix}.{name}"

    # Plugins and the file

    async def plugin(
        self,
        *devices: pb.Device,
        resource: str = "x",
        alias: str = "",
        prestart: bool = True,
    ) -> Plugin:
        """Start a plugin, and wait until the kubelet has written its list down."""
        socket = f"{self._prefix}-{len(self._plugins)}.sock"
        plugin = Plugin(
            self.world.directory, devices, self._resource(resource), socket, self.record.calls
        )
        plugin.options.pre_start_required = prestart
        plugin.options.get_preferred_allocation_available = True
        plugin.alias = alias
        self._plugins.append(plugin)
        await self.register(plugin)
        return plugin

    async def register(self, plugin: Plugin) -> None:
        """Serve and register, and wait until the kubelet has written the list down."""
        await plugin.serve()
        async with self._written():
            await plugin.register()

    async def send(self, plugin: Plugin, note: str = "") -> None:
        """Let a plugin send its list once more, and note the state after the write."""
        async with self._written():
            plugin.send(*plugin.devices)
        self.note(note)

    async def start(self, *plugins: Plugin, policy: Policy | None = None) -> None:
        """Start the kubelet, and wait until it has written the plugins' lists down."""
        if plugins:
            async with self._written():
                await self.world.start(plugins, policy)
        else:
            await self.world.start((), policy)

    async def restart(
        self, plugin: Plugin, *devices: pb.Device, file: bytes | None = None, note: str = ""
    ) -> None:
        """Restart the kubelet and all plugins, with other devices or checkpoint (b"": none)."""
        await self.world.stop()
        path = self.world.directory / CHECKPOINT
        if file:
            path.write_bytes(file)
        elif file is not None:
            path.unlink()
        plugin.devices = list(devices) or plugin.devices
        await self.start(*self._plugins)
        await self.world.heard_of_all()
        self.note(note)

    @contextlib.asynccontextmanager
    async def _written(self) -> AsyncIterator[None]:
        """Wait at the end until the kubelet has written its file."""
        before = self._identity()
        yield
        await until(lambda: self._identity() not in (before, None), "a write", LONG)

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self.world.directory / CHECKPOINT)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    async def called(self, method: str, times: int) -> None:
        """Wait until plugins have got so many calls since the last note."""

        def enough() -> bool:
            return sum(call.startswith(method) for call in self.record.calls) >= times

        await until(enough, f"{times} calls of {method or 'anything'}", LONG)

    # Pods

    async def create(self, wish: Wish) -> None:
        """Create a pod, and wait until the kubelet knows it."""
        parts = []
        for part in wish.parts:
            request = {self._resource(name): count for name, count in part.request.items()}
            parts.append(part._replace(request=request))
        full = wish._replace(name=self.full(wish.name), parts=parts)
        await self.world.create(full)
        self._left.append(full.name)
        self.record.pods[await self.world.uid(full.name)] = wish.name

    async def run(self, wish: Wish, note: str = "") -> None:
        """Create a pod, and wait until it runs, or until the reason why not is known."""
        await self.create(wish)
        for part in wish.parts:
            if not await self.settled(wish.name, part.name):
                break
        self.note(note)

    async def settled(self, name: str, container: str = "main", but: Sequence[str] = ("",)) -> bool:
        """Return whether a container runs, or has run; the reason why not goes into the record.

        `but`: states that are not its last.
        """
        state = await self.until_state(name, lambda state: state not in but, container)
        if state in ("running", "done"):
            return True
        self.record.write(f"{name}: {state}")
        return False

    async def until_state(
        self, name: str, wanted: Callable[[str], bool], container: str = "main"
    ) -> str:
        """Return the first state of a container that is wanted."""
        deadline = asyncio.get_running_loop().time() + LONG
        state: str = ""
        while not wanted(state := await self.world.state(self.full(name), container)):
            if asyncio.get_running_loop().time() > deadline:
                raise Broken(f"{name}/{container} is {state!r}")
            await asyncio.sleep(0.02)
        return state

    async def delete(self, name: str) -> None:
        """Delete a pod in an orderly manner, and wait for its end."""
        await self.world.delete(self.full(name))
        await self.gone(name)

    async def force_delete(self, name: str) -> None:
        """Delete a pod's object or manifest only, and wait until the kubelet has seen it."""
        await self.world.force_delete(self.full(name))

    async def stop(self, plugin: Plugin) -> None:
        """End a plugin, and wait until the kubelet has seen it."""
        await plugin.stop()
        await self.world.missed(plugin)

    async def gone(self, name: str) -> None:
        """Wait until a pod that was deleted has left nothing."""
        await self.world.gone(self.full(name))
        self._left.remove(self.full(name))

    async def crash(self, name: str, note: str = "") -> None:
        """Let a container end with failure, and wait until it has been started again."""
        self.record.calls.clear()
        await self.world.crash(self.full(name), "main")
        await self.called("", 1)
        await self.until_state(name, lambda state: state == "running")
        self.note(note)

    # The record

    def note(self, what: str) -> None:
        """Write down the state after a step, if the step has a name."""
        if what:
            self.record.note(what)

    async def ask(self, what: str) -> None:
        """Call List, which lets the kubelet forget, and write down its answer."""
        self.record.note_listed(what, await self.world.listed())

    async def close(self) -> None:
        """Remove all pods and plugins."""
        try:
            for plugin in self._plugins:
                plugin.grants.set()
            for name in self._left:
                await self.world.delete(name)
                await self.world.gone(name)
        finally:
            for plugin in self._plugins:
                await plugin.stop()
