"""A reference kubelet: its side of the device plugin API and the pod resources API, as strict as the original.

It behaves as `pkg/kubelet/cm/devicemanager` of Kubernetes 1.31 to 1.37 does, oddities included, over real gRPC on real
sockets, and can in addition be killed, restarted, made deaf and asked what happened when. `Kubelet.violations` lists
what the original swallows or chokes on but a good plugin never does; tests assert that it stays empty.

Left out: the scheduler and the kubelet's resource predicates (both would stop a pod that asks for too much before the
device manager sees it), the plugin watcher, sidecar containers, and every topology policy but the two named below.

By hand: `python -m tests.world.kubelet --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import re
import shlex
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from generated import podresources_pb2 as pods_pb

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

CHECKPOINT = "kubelet_internal_checkpoint"
HEALTHY = "Healthy"
NO_NUMA_NODE = -1
PRE_START_TIMEOUT = 30.0  # seconds; the only call to a plugin for which the kubelet has a deadline
POD_CALLS_BURST, POD_CALLS_A_SECOND = 10, 100  # all callers of the pod resources API together; more are refused

Policy = Literal["none", "single-numa-node"]
Method = Literal["Register", "List"]
T = TypeVar("T")

# ------------------------------------------------------------------------------------------------------------- records


class AdmissionError(Exception):
    """A pod that the kubelet rejects, or a container that it cannot start: what `kubectl describe` would say.

    `reason` is UnexpectedAdmissionError, TopologyAffinityError, or CreateContainerConfigError: PreStartContainer
    failed, the pod stays admitted and keeps its devices, and the kubelet would try to start the container again.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class _Failure(Exception):
    """What is a plain `error` in the original: Register answers it with UNKNOWN, admission wraps it."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, with `time.monotonic()` of the moment."""

    at: float
    kind: str
    fields: Mapping[str, Any]

    @property
    def resource(self) -> str:
        return str(self.fields.get("resource", ""))

    def line(self) -> str:
        """`kind key=value …`, lists comma-separated, values quoted as for a shell: stable, made to be grepped."""
        return " ".join([self.kind, *(f"{key}={_text(value)}" for key, value in self.fields.items())])

    def json(self) -> str:
        return json.dumps({"event": self.kind, "at": self.at, **self.fields})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return shlex.quote(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))


@dataclass(slots=True)
class Allocation:
    """What a container gets: the answers to Allocate for all of its resources, merged as the kubelet merges them."""

    ids: dict[str, frozenset[str]] = field(default_factory=dict)  # by resource
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[pb.Mount] = field(default_factory=list)
    devices: list[pb.DeviceSpec] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[str] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        return {
            "ids": [f"{resource}={ident}" for resource, ids in sorted(self.ids.items()) for ident in sorted(ids)],
            "env": [f"{key}={value}" for key, value in sorted(self.envs.items())],
            "devices": [f"{d.host_path}:{d.container_path}:{d.permissions}" for d in self.devices],
            "mounts": [f"{m.host_path}:{m.container_path}:{'ro' if m.read_only else 'rw'}" for m in self.mounts],
            "annotations": [f"{key}={value}" for key, value in sorted(self.annotations.items())],
            "cdi": self.cdi_devices,
        }


@dataclass(slots=True)
class _Fault:
    """What the next calls of a method meet instead of their answer, or before it."""

    times: float
    seconds: float = 0.0
    code: grpc.StatusCode | None = None
    message: str = ""
    answer: bytes | None = None


@dataclass(eq=False, slots=True)
class _Client:
    """The connection to a plugin's socket, and the ListAndWatch stream on it."""

    resource: str
    path: str
    channel: grpc.aio.Channel
    stub: Any
    lists: int = 0  # messages on the stream so far
    last: list[bytes] | None = None  # the latest of them
    closed: bool = False

    async def close(self) -> None:
        self.closed = True
        await self.channel.close()


@dataclass(eq=False, slots=True)
class _Endpoint:
    client: _Client | None  # None: known from the checkpoint only
    options: pb.DevicePluginOptions | None
    stopped_at: float | None = None


@dataclass(slots=True)
class _Held:
    """The devices of one resource that a container holds, with the plugin's answer to Allocate."""

    per_node: dict[int, list[str]]
    answer: pb.ContainerAllocateResponse

    @property
    def ids(self) -> set[str]:
        return {ident for ids in self.per_node.values() for ident in ids}


def is_extended_resource(name: str) -> bool:
    """Whether the kubelet takes `name` for an extended resource, the only kind that a plugin may register.

    The name must still be a qualified one as a quota's key, that is with `requests.` in front.
    """
    if "/" not in name or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    domain, _, rest = f"requests.{name}".partition("/")
    label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    return (
        len(domain) <= 253
        and re.fullmatch(rf"{label}(\.{label})*", domain) is not None
        and len(rest) <= 63
        and re.fullmatch(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]", rest) is not None
    )


def _nodes(device: pb.Device | None) -> list[int]:
    return [node.ID for node in device.topology.nodes] if device is not None else []


def _go_error(error: grpc.aio.AioRpcError) -> str:
    code = "".join(word.capitalize() for word in error.code().name.split("_")).replace("Cancelled", "Canceled")
    return f"rpc error: code = {code} desc = {error.details()}"


async def _answer(client: _Client, call: Any) -> Any:
    """The answer to a call, or _Failure, also where our own closing of the channel cancelled it."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _Failure(_go_error(error)) from error
    except asyncio.CancelledError:
        if not client.closed:
            raise
        raise _Failure("rpc error: code = Canceled desc = grpc: the client connection is closing") from None


# ------------------------------------------------------------------------------------------------------------- kubelet


class Kubelet:
    """A kubelet's device manager in `directory`. Stopping or killing it forgets all but the checkpoint and the pods.

    `version` chooses between what differs in the original:

    - before 1.33 a starting kubelet deletes every file in the directory, since then only the sockets;
    - before 1.37 it knows one connection a resource: **when any stream of the resource ends, the newest connection is
      taken down**, so a plugin that registers anew first and ends its old stream afterwards loses both;
    - since 1.37 it knows one a socket: registering a socket that is still connected is refused ("already connected"),
      **and because the kubelet then forgets the old connection without closing it, that socket's name is refused from
      then on** until the kubelet restarts.

    The pod resources API is served on the socket `pod_resources`, by default `pod-resources/kubelet.sock` beside the
    directory, None for nowhere. Like the original's, a List right after a start knows of no pod: they are named from
    their admission in this life of the kubelet on.

    `clock` counts the grace period (seconds); `seed` drives what is random order in the original (Go's maps).
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        version: tuple[int, int] = (1, 36),
        policy: Policy = "none",
        numa_nodes: Sequence[int] = (0, 1),
        grace_period: float = 300.0,
        dial_timeout: float = 10.0,
        pod_resources: Path | Literal["beside"] | None = "beside",
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.version = version
        self.policy = policy
        self.numa_nodes = tuple(numa_nodes)
        self.grace_period = grace_period
        self.dial_timeout = dial_timeout
        beside = self.directory.parent / "pod-resources/kubelet.sock"
        self.pod_resources = beside if pod_resources == "beside" else pod_resources
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._clock = clock
        self._random = random.Random(seed)
        self._on_event = on_event
        self._changed = asyncio.Event()
        self._faults: dict[str, deque[_Fault]] = {"Register": deque(), "List": deque()}
        # The pods that the API server has for this node, their containers' requests, and which are init containers.
        self._pods: dict[str, dict[str, tuple[dict[str, int], bool]]] = {}
        self._servers: list[grpc.aio.Server] = []
        self._deaf: list[socket.socket] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._streams: set[asyncio.Task[None]] = set()
        self._forget()

    def _forget(self) -> None:
        self._clients: dict[str, list[_Client]] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._by_socket: dict[str, dict[str, _Endpoint]] = {}  # since 1.37
        self._devices: dict[str, dict[str, pb.Device]] = {}
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._allocated: dict[str, set[str]] = {}
        self._held: dict[str, dict[str, dict[str, _Held]]] = {}  # pod, container, resource
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})  # a pod, and what its init containers leave behind
        self._admitted: set[str] = set()  # pods, in this life
        self._tokens, self._tokens_at = float(POD_CALLS_BURST), time.monotonic()

    # --------------------------------------------------------------------------------------------------- what happened

    def find(self, kind: str, resource: str | None = None, since: float = 0.0) -> list[Event]:
        """The events of a kind since a moment of `time.monotonic()`."""
        return [e for e in self.events if e.kind == kind and resource in (None, e.resource) and e.at >= since]

    async def wait_for(self, predicate: Callable[[], T], timeout: float = 5.0) -> T:
        """The predicate's first true value; it is evaluated again after every event. TimeoutError with the latest."""

        async def wait() -> T:
            while not (value := predicate()):
                self._changed.clear()
                await self._changed.wait()
            return value

        try:
            return await asyncio.wait_for(wait(), timeout)
        except asyncio.TimeoutError:
            latest = "\n".join(event.line() for event in self.events[-8:])
            raise TimeoutError(f"nothing of the kind within {timeout} s; the kubelet's latest:\n{latest}") from None

    async def registered(self, resource: str, timeout: float = 5.0) -> None:
        """Waits until a plugin of the resource is connected and has sent its first list."""

        def listed() -> bool:
            endpoint = self._endpoints.get(resource)
            client = endpoint.client if endpoint and endpoint.stopped_at is None else None
            return client is not None and client.lists > 0

        await self.wait_for(listed, timeout)

    def _record(self, kind: str, **fields: Any) -> None:
        event = Event(time.monotonic(), kind, fields)
        self.events.append(event)
        self._changed.set()
        if self._on_event:
            self._on_event(event)

    def _violation(self, text: str) -> None:
        self.violations.append(text)
        self._record("violation", text=text)

    # ------------------------------------------------------------------------------------------------- its own lifetime

    @property
    def socket(self) -> Path:
        return self.directory / "kubelet.sock"

    async def start(self, *, deaf: bool = False) -> None:
        """Reads the checkpoint, empties the directory, creates `kubelet.sock`; `deaf`: and never answers on it."""
        if self._servers or self._deaf:
            raise RuntimeError("the kubelet runs already")
        self._forget()
        if self.pod_resources:
            self.pod_resources.unlink(missing_ok=True)
            self.pod_resources.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            server = self._new_server(deaf)
            if server:
                server.add_generic_rpc_handlers((_PodResources(self),))
            async with self._bound(server, self.pod_resources):  # it accepts from the moment on at which it is there
                if server:
                    await server.start()
        # 0755: the checkpoint's store makes the directory before the registration server would make it 0750.
        self.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._read_checkpoint()
        self._sweep()
        server = self._new_server(deaf)
        if server:
            rpc.add_RegistrationServicer_to_server(_Registration(self), server)
        async with self._bound(server, self.socket):
            pass
        self._record("started", socket=str(self.socket), version=".".join(map(str, self.version)), deaf=deaf)
        if server:
            await server.start()

    def _new_server(self, deaf: bool) -> grpc.aio.Server | None:
        if deaf:
            return None
        self._servers.append(grpc.aio.server())
        return self._servers[-1]

    @contextlib.asynccontextmanager
    async def _bound(self, server: grpc.aio.Server | None, path: Path) -> AsyncIterator[None]:
        """Bound to a name of its own inside, and at the end to this path; a socket that only listens without a server.

        gRPC deletes the path that it bound when it stops, and a killed kubelet deletes nothing: so `path` is a second
        name of the same socket.
        """
        with tempfile.TemporaryDirectory(prefix=".kubelet-", dir=self.directory.parent) as private:
            if server:
                server.add_insecure_port(f"unix:{private}/s")
            else:
                self._deaf.append(listening := socket.socket(socket.AF_UNIX))
                listening.bind(f"{private}/s")
                listening.listen()
            yield
            os.link(f"{private}/s", path)

    async def stop(self) -> None:
        """The original's orderly `Stop`: the streams end, everything turns unhealthy, `kubelet.sock` is removed.

        No released kubelet does this when it is stopped; it exits as if killed.
        """
        for clients in list(self._clients.values()):
            for client in clients:
                await self._disconnect(client)
        await self._silence()
        self.socket.unlink(missing_ok=True)
        self._record("stopped")

    async def kill(self) -> None:
        """What SIGKILL, SIGTERM and a crash leave: no connections, and a `kubelet.sock` that refuses them."""
        await self._silence()
        self._record("killed")

    async def restart(self, *, orderly: bool = False, deaf: bool = False) -> None:
        """A restart of the kubelet; the pods run on."""
        await (self.stop() if orderly else self.kill())
        await self.start(deaf=deaf)

    async def _silence(self) -> None:
        abandoned = [client for clients in self._clients.values() for client in clients]
        self._clients.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for server in self._servers:
            await server.stop(None)
        for listening in self._deaf:
            listening.close()
        self._servers, self._deaf = [], []
        for client in abandoned:
            await client.close()
        for stream in self._streams:  # those that a newer registration replaced are in nobody's list any more
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        for endpoint in self._endpoints.values():
            endpoint.stopped_at = endpoint.stopped_at or self._clock()

    async def __aenter__(self) -> Kubelet:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _sweep(self) -> None:
        """Deletes what plugins left behind: before 1.33 all files, since then sockets (and links to sockets)."""
        for path in self.directory.iterdir():
            if path.name == CHECKPOINT:
                continue
            try:
                mode = (path.lstat() if self.version < (1, 33) else path.stat()).st_mode
            except OSError:
                continue
            if not stat.S_ISDIR(mode) and (self.version < (1, 33) or stat.S_ISSOCK(mode)):
                path.unlink(missing_ok=True)  # its owner may have been faster

    # ---------------------------------------------------------------------------------------------------------- faults

    def refuse_with(
        self, code: grpc.StatusCode, message: str = "refused", times: float = 1, method: Method = "Register"
    ) -> None:
        """The next `times` calls fail with this status; UNIMPLEMENTED from List is a kubelet that does not know it."""
        self._faults[method].append(_Fault(times, code=code, message=message))

    def hang(self, seconds: float, times: float = 1, method: Method = "Register") -> None:
        """The next `times` calls are taken up only after that long."""
        self._faults[method].append(_Fault(times, seconds=seconds))

    def garble(self, answer: bytes = b"\xff\xff\xff", times: float = 1) -> None:
        """The next `times` calls of List are answered with these bytes."""
        self._faults["List"].append(_Fault(times, answer=answer))

    @property
    def is_sound(self) -> bool:
        """Whether no call that comes will fail or wait."""
        return not any(self._faults.values())

    def heal(self) -> None:
        """It is, from now on."""
        for faults in self._faults.values():
            faults.clear()

    async def _meet_fault(self, method: Method) -> _Fault | None:
        """The fault that this call has to suffer, after the time that it takes."""
        faults = self._faults[method]
        if not faults:
            return None
        fault = faults[0]
        fault.times -= 1
        if fault.times < 1:
            faults.popleft()
        await asyncio.sleep(fault.seconds)
        return fault

    async def drop_streams(self, resource: str | None = None) -> None:
        """Breaks the connections to plugins from this side, as when the original meets an error on a stream."""
        for name, clients in list(self._clients.items()):
            for client in clients if resource in (None, name) else []:
                await client.close()

    # ---------------------------------------------------------------------------------------------------- registration

    async def _register(self, request: pb.RegisterRequest) -> None:
        resource = request.resource_name
        if request.version != "v1beta1":
            quoted = json.dumps(request.version)
            raise _Failure(
                f'requested API version {quoted} is not supported by kubelet. Supported version is ["v1beta1"]'
            )
        if not is_extended_resource(resource):
            raise _Failure(f"the ResourceName {json.dumps(resource)} is invalid")
        if not request.endpoint or "/" in request.endpoint:
            self._violation(f"{resource} registers the endpoint {request.endpoint!r}, not a file name")
        client = self._new_client(resource, os.path.normpath(self.directory / request.endpoint))
        if self.version < (1, 37):
            self._clients[resource] = [client]  # the one before is neither closed nor remembered
        else:
            self._clients.setdefault(resource, []).append(client)
        try:
            await self._connect(client, request)
        except BaseException:
            self._deregister(client)
            await client.close()
            raise
        task = asyncio.create_task(self._run(client))
        self._streams.add(task)
        task.add_done_callback(self._streams.discard)

    def _new_client(self, resource: str, path: str) -> _Client:
        channel = grpc.aio.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.default_authority", "localhost"),
                # As in Go, every connection stands alone: a back-off from an older socket must not delay this one.
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        return _Client(resource, path, channel, rpc.DevicePluginStub(channel))

    async def _connect(self, client: _Client, request: pb.RegisterRequest) -> None:
        """Dials back and asks for the options, all within the plugin's call of Register."""
        try:
            await asyncio.wait_for(self._dial(client), self.dial_timeout)
        except asyncio.TimeoutError:
            raise _Failure("failed to dial device plugin: context deadline exceeded") from None
        try:
            options: pb.DevicePluginOptions = await _answer(client, client.stub.GetDevicePluginOptions(pb.Empty()))
        except _Failure as failure:
            raise _Failure(f"failed to get device plugin options: {failure}") from failure
        if request.HasField("options") and request.options != options:
            self._violation(f"{client.resource} registers other options than it answers to GetDevicePluginOptions")
        endpoint = _Endpoint(client, options)
        if self.version >= (1, 37):
            connected = self._by_socket.setdefault(client.resource, {})
            if client.path in connected:
                self._violation(f"{client.resource} registers {client.path} again while it is still connected")
                raise _Failure(f"device plugin already connected: {client.path}")
            connected[client.path] = endpoint
        self._endpoints[client.resource] = endpoint

    async def _dial(self, client: _Client) -> None:
        """Until the plugin answers; retried after 1 s, 1.6 s, … as gRPC does, which is what serving late costs."""
        failed = False
        while (state := client.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not failed:
                failed = True
                self._violation(f"{client.resource} registers {client.path} before it serves there")
            await client.channel.wait_for_state_change(state)

    def _deregister(self, client: _Client) -> None:
        """Forgets the resource's connection; since 1.37 all those to this socket, whichever was meant."""
        others = [c for c in self._clients.get(client.resource, []) if c.path != client.path]
        if others and self.version >= (1, 37):
            self._clients[client.resource] = others
        else:
            self._clients.pop(client.resource, None)

    async def _run(self, client: _Client) -> None:
        """Follows one ListAndWatch stream to its end, and then takes down what the original takes down."""
        try:
            async for response in client.stub.ListAndWatch(pb.Empty()):
                self._list(client, response)
            reason = "the plugin ended it"
        except grpc.aio.AioRpcError as error:
            reason = _go_error(error)
        except asyncio.CancelledError:
            if not client.closed:
                await client.close()
                raise
            reason = "closed by the kubelet"
        except grpc.aio.UsageError:  # the channel was closed before the call began
            reason = "closed by the kubelet"
        known = self._clients.get(client.resource, [])
        target = next((c for c in known if self.version < (1, 37) or c.path == client.path), None)
        self._record("ended", resource=client.resource, endpoint=os.path.basename(client.path), reason=reason)
        if target:
            if target is not client:
                self._violation(f"{client.resource} ended a stream after registering anew: the new one is lost as well")
            await self._disconnect(target)
        if not client.closed:
            await client.close()

    async def _disconnect(self, client: _Client) -> None:
        resource = client.resource
        self._deregister(client)
        if self.version < (1, 37):
            if endpoint := self._endpoints.get(resource):
                self._lose(resource, endpoint)
        elif endpoint := self._by_socket.get(resource, {}).pop(client.path, None):
            if others := self._by_socket[resource]:
                endpoint.stopped_at = self._clock()
                self._endpoints[resource] = self._random.choice(list(others.values()))
            else:
                self._lose(resource, endpoint)
        await client.close()

    def _lose(self, resource: str, endpoint: _Endpoint) -> None:
        """No plugin is left: its devices are unhealthy at once, and the resource goes when the grace period is over."""
        lost = self._healthy.get(resource, set())
        self._unhealthy.setdefault(resource, set()).update(lost)
        self._healthy[resource] = set()
        self._stopped(endpoint)
        self._record("lost", resource=resource, ids=sorted(lost))

    def _stopped(self, endpoint: _Endpoint) -> None:
        endpoint.stopped_at = self._clock()
        # The original looks whenever it reports the node's status, every few seconds.
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(self.grace_period + 0.001, self.capacity))

    def _list(self, client: _Client, response: pb.ListAndWatchResponse) -> None:
        resource = client.resource
        self._inspect(client, response)
        self._devices[resource] = {device.ID: device for device in response.devices}
        self._healthy[resource] = {device.ID for device in response.devices if device.health == HEALTHY}
        self._unhealthy[resource] = {device.ID for device in response.devices if device.health != HEALTHY}
        self._write_checkpoint()
        client.lists += 1
        healthy, unhealthy = self._healthy[resource], self._unhealthy[resource]
        counts = {"healthy": len(healthy), "unhealthy": len(unhealthy), "number": client.lists}
        ids = {"healthy_ids": sorted(healthy), "unhealthy_ids": sorted(unhealthy)}
        self._record("list", resource=resource, **counts, endpoint=os.path.basename(client.path), **ids)

    def _inspect(self, client: _Client, response: pb.ListAndWatchResponse) -> None:
        seen: set[str] = set()
        for device in response.devices:
            what = f"{client.resource} lists device {device.ID!r}"
            if not 0 < len(device.ID) <= 63:
                self._violation(f"{what}: an ID has 1 to 63 characters")
            if device.ID in seen:
                self._violation(f"{what} twice")
            if device.health not in (HEALTHY, "Unhealthy"):
                self._violation(f"{what} with health {device.health!r}")
            if any(node < 0 for node in _nodes(device)):
                self._violation(f"{what} with a negative NUMA node")
            seen.add(device.ID)
        content = sorted(device.SerializeToString(deterministic=True) for device in response.devices)
        if content == client.last:
            self._violation(f"{client.resource} sends the same list twice in a row")
        client.last = content

    # ------------------------------------------------------------------------------------------- what the node reports

    def _status(self) -> dict[str, tuple[int, int]]:
        expired = []
        for resource in {*self._healthy, *self._unhealthy}:
            endpoint = self._endpoints.get(resource)
            stopped_at = endpoint.stopped_at if endpoint else float("-inf")
            if stopped_at is not None and self._clock() - stopped_at > self.grace_period:
                expired.append(resource)
        for resource in expired:
            for table in (self._endpoints, self._healthy, self._unhealthy):
                table.pop(resource, None)
        if expired:
            self._write_checkpoint()
        for resource in expired:
            self._record("removed", resource=resource)
        return {
            resource: (len(healthy) + len(self._unhealthy.get(resource, ())), len(healthy))
            for resource, healthy in self._healthy.items()
        }

    def capacity(self) -> dict[str, int]:
        """Devices by resource, the unhealthy among them. Asking also removes resources whose grace period is over."""
        return {resource: capacity for resource, (capacity, _) in self._status().items()}

    def allocatable(self) -> dict[str, int]:
        """Healthy devices by resource, whether they are taken or not."""
        return {resource: allocatable for resource, (_, allocatable) in self._status().items()}

    def healthy(self, resource: str) -> frozenset[str]:
        return frozenset(self._healthy.get(resource, ()))

    def unhealthy(self, resource: str) -> frozenset[str]:
        return frozenset(self._unhealthy.get(resource, ()))

    def devices(self, resource: str) -> dict[str, pb.Device]:
        """The latest list, whatever became of the plugin since."""
        return dict(self._devices.get(resource, {}))

    def allocated(self, resource: str) -> frozenset[str]:
        """The devices that pods hold."""
        return frozenset(self._allocated.get(resource, ()))

    # ------------------------------------------------------------------------------------------------------------ pods

    def listed_pods(self) -> pods_pb.ListPodResourcesResponse:
        """What List of the pod resources API answers, in no order.

        One entry for each device, or for each of its NUMA nodes if it has any; of resources whose plugin is gone, too.
        What an init container holds by itself is not named. A pod's name can be `namespace/name`.
        """
        answer = pods_pb.ListPodResourcesResponse()
        for pod in self._shuffled(self._admitted):
            *namespace, name = pod.split("/")
            listed = answer.pod_resources.add(name=name, namespace=namespace[0] if namespace else "default")
            for container, (_, init) in self._pods[pod].items():
                if init:
                    continue
                devices = listed.containers.add(name=container).devices
                for resource, held in self._shuffled(self._held.get(pod, {}).get(container, {}).items()):
                    for ident in self._shuffled(ident for ids in held.per_node.values() for ident in ids):
                        devices.add(resource_name=resource, device_ids=[ident])
        return answer

    def allocatable_devices(self) -> pods_pb.AllocatableResourcesResponse:
        """What GetAllocatableResources answers: every healthy device, held or not, as List names them."""
        answer = pods_pb.AllocatableResourcesResponse()
        for resource, healthy in self._shuffled(self._healthy.items()):
            for ident in self._shuffled(healthy):
                for _ in _nodes(self._devices.get(resource, {}).get(ident)) or [NO_NUMA_NODE]:
                    answer.devices.add(resource_name=resource, device_ids=[ident])
        return answer

    def _may_call(self) -> bool:
        """Takes one of the tokens of the pod resources API, if there is one."""
        now = time.monotonic()
        refilled = self._tokens + (now - self._tokens_at) * POD_CALLS_A_SECOND
        self._tokens, self._tokens_at = min(POD_CALLS_BURST, refilled), now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def admit(self, pod: str, container: str, request: Mapping[str, int], *, init: bool = False) -> Allocation:
        """Admits a container of a pod and starts it. AdmissionError if not; a rejected pod gives back all it had.

        What an `init` container got, the pod's later containers get again: the plugin then sees *must-include* IDs. A
        resource that the kubelet has never heard of is ignored, as the original does: the container gets nothing.
        """
        self._pods.setdefault(pod, {})[container] = (dict(request), init)
        return await self._admit(pod, container, running=False)

    async def readmit(self, pod: str, *, running: bool = False) -> dict[str, Allocation]:
        """A restarted kubelet admits a pod that it had before; by container, what each gets.

        After a reboot no container is `running`, and one whose devices are not listed as healthy by then costs the pod
        its life. After a mere restart of the kubelet its containers run, and nothing is checked.
        """
        return {container: await self._admit(pod, container, running) for container in list(self._pods.get(pod, {}))}

    def remove_pod(self, pod: str) -> None:
        """The pod is gone. (The original notices at the next admission, and writes the checkpoint only then.)"""
        self._pods.pop(pod, None)
        self._admitted.discard(pod)
        if self._held.pop(pod, None) is not None:
            self._write_checkpoint()
        self._recount()
        self._record("freed", pod=pod)

    def _recount(self) -> None:
        self._allocated = {}
        for containers in self._held.values():
            for resources in containers.values():
                for resource, held in resources.items():
                    self._allocated.setdefault(resource, set()).update(held.ids)

    async def _admit(self, pod: str, container: str, running: bool) -> Allocation:
        request, init = self._pods[pod][container]
        try:
            known = {r: n for r, n in request.items() if r in self._healthy or r in self._allocated}
            node = self._numa_node(pod, container, known)
            try:
                await self._allocate(pod, container, known, init, node, running)
            except _Failure as failure:
                message = f"Allocate failed due to {failure}, which is unexpected"
                raise AdmissionError("UnexpectedAdmissionError", message) from failure
            if not running:
                try:
                    await self._pre_start(pod, container, known)
                except _Failure as failure:
                    raise AdmissionError("CreateContainerConfigError", str(failure)) from failure
        except AdmissionError as error:
            self._record("rejected", pod=pod, container=container, reason=error.reason, message=error.message)
            if error.reason != "CreateContainerConfigError":
                self.remove_pod(pod)
            raise
        self._admitted.add(pod)
        allocation = self._edits(pod, container)
        self._record("admitted", pod=pod, container=container, **allocation.fields())
        return allocation

    def _numa_node(self, pod: str, container: str, request: Mapping[str, int]) -> int | None:
        """The Topology Manager's answer: the node on which all resources must lie, None where that does not matter."""
        if self.policy == "none":
            return None
        candidates = set(self.numa_nodes)
        matters = False
        for resource, needed in request.items():
            devices = self._devices.get(resource, {})
            if not any(_nodes(device) for device in devices.values()):
                continue  # no device says where it is: no preference
            matters = True
            held = self._held.get(pod, {}).get(container, {}).get(resource)
            if held:
                usable, reusable = (held.ids if len(held.ids) == needed else set()), set[str]()
            else:
                usable = self._healthy.get(resource, set()) - self._allocated.get(resource, set())
                reusable = self._reuse(pod).get(resource, set())
            for ident in (usable | reusable) - devices.keys():
                self._violation(f"{resource} no longer lists {ident!r}, which a pod holds: the kubelet would panic")
            candidates = {
                node
                for node in candidates
                if sum(node in _nodes(devices.get(ident)) for ident in usable | reusable) >= needed
                and all(node in _nodes(devices.get(ident)) for ident in reusable)
            }
        if not candidates:
            raise AdmissionError("TopologyAffinityError", "Resources cannot be allocated with Topology locality")
        return min(candidates) if matters and len(self.numa_nodes) > 1 else None

    async def _allocate(
        self, pod: str, container: str, request: Mapping[str, int], init: bool, node: int | None, running: bool
    ) -> None:
        reusable = self._reuse(pod)
        allocated = False
        for resource, needed in self._shuffled(request.items()):
            spare = reusable.get(resource, set())
            ids = await self._choose(pod, container, resource, needed, spare, node, running)
            if not ids:
                continue
            endpoint = self._endpoints.get(resource)
            if not endpoint:
                self._recount()
                raise _Failure(f"unknown Device Plugin {resource}")
            begin = time.monotonic()
            requests = [pb.ContainerAllocateRequest(devices_ids=self._shuffled(ids))]
            try:
                client = self._running(resource, endpoint)
                call = client.stub.Allocate(pb.AllocateRequest(container_requests=requests))
                response: pb.AllocateResponse = await _answer(client, call)
            except _Failure:
                self._recount()
                raise
            seconds = time.monotonic() - begin
            self._record("allocate", resource=resource, pod=pod, container=container, ids=sorted(ids), seconds=seconds)
            if len(response.container_responses) != 1:
                self._violation(f"{resource} answers Allocate of one container for {len(response.container_responses)}")
            if not response.container_responses:
                raise _Failure(f"no containers return in allocation response {response}")
            answer = response.container_responses[0]
            for spec in answer.devices:
                if not spec.permissions or set(spec.permissions) - set("rwm"):
                    self._violation(f"{resource} gives {spec.host_path} the permissions {spec.permissions!r}")
            per_node: dict[int, list[str]] = {}
            for ident in sorted(ids):
                device = self._devices.get(resource, {}).get(ident)
                if device is None:
                    self._violation(f"{resource} dropped {ident!r} during its allocation: the kubelet would panic")
                for numa_node in _nodes(device) or [NO_NUMA_NODE]:
                    per_node.setdefault(numa_node, []).append(ident)
            self._held.setdefault(pod, {}).setdefault(container, {})[resource] = _Held(per_node, answer)
            allocated = True
        for resource, held in self._held.get(pod, {}).get(container, {}).items():
            spare = reusable.get(resource, set())
            reusable[resource] = spare | held.ids if init else spare - held.ids
        if allocated:
            self._write_checkpoint()

    def _reuse(self, pod: str) -> dict[str, set[str]]:
        if self._reusable[0] != pod:
            self._reusable = (pod, {})
        return self._reusable[1]

    def _running(self, resource: str, endpoint: _Endpoint) -> _Client:
        if endpoint.client is None or endpoint.stopped_at is not None:
            raise _Failure(f"endpoint {resource} has been stopped")
        if endpoint.client.closed:  # its stream ended, but another registration had made the kubelet forget it
            raise _Failure("rpc error: code = Unavailable desc = the plugin is gone")
        return endpoint.client

    async def _choose(
        self, pod: str, container: str, resource: str, required: int, spare: set[str], node: int | None, running: bool
    ) -> set[str]:
        """The devices that are still to be allocated to the container; none if it has all that it wants."""
        held = self._held.get(pod, {}).get(container, {}).get(resource)
        have = held.ids if held else set()
        needed = required - len(have)
        if held and needed != 0:
            change = f"from {len(have)} to {required}"
            raise _Failure(f'pod "{pod}" container "{container}" changed request for resource "{resource}" {change}')
        if running:
            return set()
        # A node that comes up admits its pods whether their plugins have registered or not: these three checks are
        # what kills the pods of a plugin that is late.
        if resource not in self._healthy:
            raise _Failure(f"cannot allocate unregistered device {resource}")
        if not self._healthy[resource]:
            raise _Failure(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not have <= self._healthy[resource]:
            raise _Failure(
                f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
            )
        if needed == 0:
            return set()
        chosen: set[str] = set()

        def take(candidates: set[str]) -> bool:
            new = self._shuffled(candidates - chosen)[: required - len(chosen)]
            chosen.update(new)
            self._allocated.setdefault(resource, set()).update(new)
            return len(chosen) == required

        if take(spare):
            return chosen
        available = self._healthy[resource] - self._allocated.get(resource, set())
        needed = required - len(chosen)
        if len(available) < needed:
            raise _Failure(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        aligned: set[str] = set()
        elsewhere: set[str] = set()
        devices = self._devices.get(resource, {})
        if node is not None and any(_nodes(device) for device in devices.values()):
            aligned = {ident for ident in available if node in _nodes(devices.get(ident))}
            elsewhere = {ident for ident in available - aligned if _nodes(devices.get(ident))}
        # The plugin is asked only where there is a choice: exactly enough aligned devices are taken unasked.
        if needed < len(aligned):
            preferred = await self._prefer(resource, aligned | chosen, set(chosen), required)
            if take(preferred & aligned) or take(aligned):
                return chosen
        elif take(aligned):
            return chosen
        preferred = await self._prefer(resource, available | chosen, set(chosen), required)
        if take(preferred & available) or take(elsewhere) or take(available):
            return chosen
        got = len(chosen)
        raise _Failure(f"unexpectedly allocated less resources than required. Requested: {required}, Got: {got}")

    async def _prefer(self, resource: str, available: set[str], must: set[str], size: int) -> set[str]:
        """The plugin's preference, if it has one. A wrong one is not refused: what is not available is ignored."""
        endpoint = self._endpoints.get(resource)
        if not endpoint:
            raise _Failure(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options or not endpoint.options.get_preferred_allocation_available:
            return set()
        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=self._shuffled(available),
            must_include_deviceIDs=self._shuffled(must),
            allocation_size=size,
        )
        begin = time.monotonic()
        try:
            client = self._running(resource, endpoint)
            call = client.stub.GetPreferredAllocation(pb.PreferredAllocationRequest(container_requests=[question]))
            response: pb.PreferredAllocationResponse = await _answer(client, call)
        except _Failure as failure:
            raise _Failure(f"device plugin GetPreferredAllocation rpc failed with err: {failure}") from failure
        ids = list(response.container_responses[0].deviceIDs) if response.container_responses else []
        asked = {"available": sorted(available), "must": sorted(must), "size": size}
        self._record("preferred", resource=resource, **asked, ids=ids, seconds=time.monotonic() - begin)
        if len(response.container_responses) != 1 or len(ids) != size or len(set(ids)) != size:
            self._violation(f"{resource} prefers {ids} where {size} devices were asked for")
        if not must <= set(ids) <= available:
            self._violation(f"{resource} prefers {ids}: not all available, or not all that must be included")
        return set(ids)

    async def _pre_start(self, pod: str, container: str, request: Mapping[str, int]) -> None:
        for resource, count in request.items():
            endpoint = self._endpoints.get(resource)
            if not count:
                continue
            if not endpoint:
                raise _Failure(f"endpoint not found in cache for a registered resource: {resource}")
            if not endpoint.options or not endpoint.options.pre_start_required:
                continue
            held = self._held.get(pod, {}).get(container, {}).get(resource)
            if not held:
                where = f"pod {pod}, container {container}, resource {resource}"
                raise _Failure(f"no devices found allocated in local cache for {where}")
            question = pb.PreStartContainerRequest(devices_ids=self._shuffled(held.ids))
            try:
                client = self._running(resource, endpoint)
                await _answer(client, client.stub.PreStartContainer(question, timeout=PRE_START_TIMEOUT))
            except _Failure as failure:
                raise _Failure(f"device plugin PreStartContainer rpc failed with err: {failure}") from failure
            self._record("prestart", resource=resource, pod=pod, container=container, ids=sorted(held.ids))

    def _edits(self, pod: str, container: str) -> Allocation:
        """Merges the answers of a container's resources: whichever comes first in Go's random order wins."""
        result = Allocation()
        for resource, held in self._shuffled(self._held.get(pod, {}).get(container, {}).items()):
            answer = held.answer
            result.ids[resource] = frozenset(held.ids)
            for mine, theirs in ((result.envs, answer.envs), (result.annotations, answer.annotations)):
                for key, value in theirs.items():
                    if mine.setdefault(key, value) != value:
                        self._record("conflict", resource=resource, pod=pod, key=key, ignored=value, kept=mine[key])
            known = {spec.container_path for spec in result.devices}
            result.devices.extend(spec for spec in answer.devices if spec.container_path not in known)
            known = {mount.container_path for mount in result.mounts}
            result.mounts.extend(mount for mount in answer.mounts if mount.container_path not in known)
            result.cdi_devices.extend(cdi.name for cdi in answer.cdi_devices if cdi.name not in result.cdi_devices)
        return result

    def _shuffled(self, items: Iterable[T]) -> list[T]:
        """In no order that a plugin could rely on."""
        result = sorted(items, key=repr)
        self._random.shuffle(result)
        return result

    # ------------------------------------------------------------------------------------------------------ checkpoint

    def _write_checkpoint(self) -> None:
        """As the original: same keys, written to a dot file beside it and renamed (a plugin sees both events).

        The checksum is a CRC of the JSON here; the original's is a hash of a Go value, which no other program can
        compute. So neither reads the other's file.
        """
        entries = [
            {
                "PodUID": pod,
                "ContainerName": container,
                "ResourceName": resource,
                "DeviceIDs": {str(node): ids for node, ids in held.per_node.items()},
                "AllocResp": base64.b64encode(held.answer.SerializeToString()).decode(),
            }
            for pod, containers in self._held.items()
            for container, resources in containers.items()
            for resource, held in resources.items()
        ]
        registered = {resource: sorted(ids) for resource, ids in self._healthy.items()}
        content = {"PodDeviceEntries": entries or None, "RegisteredDevices": registered}
        text = json.dumps({"Data": content, "Checksum": zlib.crc32(json.dumps(content, sort_keys=True).encode())})
        with tempfile.NamedTemporaryFile("w", prefix=".", dir=self.directory, delete=False) as file:
            file.write(text)
        os.rename(file.name, self.directory / CHECKPOINT)

    def _read_checkpoint(self) -> None:
        """The pods hold their devices again; their resources are known but empty until a plugin registers them.

        A file that cannot be read or fails its checksum is as good as none.
        """
        try:
            stored = json.loads((self.directory / CHECKPOINT).read_text())
            content = stored["Data"]
            if stored["Checksum"] != zlib.crc32(json.dumps(content, sort_keys=True).encode()):
                raise ValueError("checkpoint is corrupted")
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._record("checkpoint-ignored", error=str(error))
            return
        for entry in content["PodDeviceEntries"] or []:
            pod, container, resource = entry["PodUID"], entry["ContainerName"], entry["ResourceName"]
            answer = pb.ContainerAllocateResponse.FromString(base64.b64decode(entry["AllocResp"]))
            held = _Held({int(node): ids for node, ids in entry["DeviceIDs"].items()}, answer)
            self._held.setdefault(pod, {}).setdefault(container, {})[resource] = held
            # A pod that only the checkpoint knows (a new Kubelet object after a "reboot") is still in the API server.
            request, _ = self._pods.setdefault(pod, {}).setdefault(container, ({}, False))
            request.setdefault(resource, len(held.ids))
        self._recount()
        for resource in content["RegisteredDevices"] or {}:
            self._healthy[resource] = set()
            self._unhealthy[resource] = set()
            self._endpoints[resource] = _Endpoint(None, None)
            self._stopped(self._endpoints[resource])


class _Registration:
    """The `Registration` service: errors of the device manager reach the plugin as UNKNOWN, with their text."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.Empty:
        kubelet, begin = self._kubelet, time.monotonic()
        who = {"resource": request.resource_name, "endpoint": request.endpoint}
        kubelet._record("register", **who)
        code: grpc.StatusCode | None = None
        try:
            if (fault := await kubelet._meet_fault("Register")) and (code := fault.code):
                raise _Failure(fault.message)
            await kubelet._register(request)
        except _Failure as failure:
            kubelet._record("refused", **who, message=str(failure))
            await context.abort(code or grpc.StatusCode.UNKNOWN, str(failure))
        kubelet._record("registered", **who, seconds=time.monotonic() - begin)
        return pb.Empty()


class _PodResources(grpc.GenericRpcHandler):
    """The service `v1.PodResourcesLister`; generic, so that it can also answer what is no message."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet

    def service(self, handler_call_details: Any) -> Any:
        answers = {"List": self._kubelet.listed_pods, "GetAllocatableResources": self._kubelet.allocatable_devices}
        service, _, method = str(handler_call_details.method)[1:].partition("/")
        if service != "v1.PodResourcesLister" or method not in answers:
            return None  # UNIMPLEMENTED

        async def call(request: bytes, context: Any) -> bytes:
            kubelet = self._kubelet
            if not kubelet._may_call():
                kubelet._violation(f"{method} of the pod resources API is called too often")
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
            fault = await kubelet._meet_fault("List") if method == "List" else None
            if fault and fault.code:
                await context.abort(fault.code, fault.message)
            answer = fault.answer if fault and fault.answer is not None else answers[method]().SerializeToString()
            kubelet._record("asked", method=method, bytes=len(answer))
            return answer

        return grpc.unary_unary_rpc_method_handler(call)


# -------------------------------------------------------------------------------------------------------- command line

COMMANDS = """\
commands on standard input:
  capacity                              capacity and allocatable, a line per resource
  admit POD RESOURCE=N [...] [CONTAINER]  admit a container (default: main) and print what it gets
  readmit POD                           admit it again, as after a reboot
  remove POD                            free its devices
  restart | kill | start | stop         the kubelet itself (stop removes the socket, kill does not)
  drop [RESOURCE]                       break the connections to plugins
  violations                            how many so far
  quit                                  (end of input does not quit: signals do)
"""


async def _command(kubelet: Kubelet, line: str, say: Callable[[Event], None]) -> bool:
    """Carries out one line of input; False for `quit`."""

    def tell(kind: str, **fields: Any) -> None:
        say(Event(time.monotonic(), kind, fields))

    verb, *words = line.split() or [""]
    lifetime: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "restart": kubelet.restart,
        "kill": kubelet.kill,
        "start": kubelet.start,
        "stop": kubelet.stop,
    }
    try:
        if verb == "quit":
            return False
        if verb in lifetime and not words:
            await lifetime[verb]()
        elif verb == "capacity":
            status = kubelet._status()
            for resource, (capacity, allocatable) in sorted(status.items()):
                tell("capacity", resource=resource, capacity=capacity, allocatable=allocatable)
            tell("resources", number=len(status))
        elif verb == "admit" and words:
            request = {resource: int(n) for resource, _, n in (w.partition("=") for w in words[1:] if "=" in w)}
            await kubelet.admit(words[0], next((w for w in words[1:] if "=" not in w), "main"), request)
        elif verb == "readmit" and words:
            await kubelet.readmit(words[0])
        elif verb == "remove" and words:
            kubelet.remove_pod(words[0])
        elif verb == "drop":
            await kubelet.drop_streams(words[0] if words else None)
        elif verb == "violations":
            tell("violations", number=len(kubelet.violations))
        elif verb:
            tell("error", message=f"no such command: {line.strip()}")
    except AdmissionError:
        pass  # told as "rejected"
    except (OSError, ValueError, RuntimeError) as error:
        tell("error", message=str(error))
    return True


def _read_lines(put: Callable[[str], object]) -> None:
    """Reads the descriptor itself: a thread inside `sys.stdin` would make the interpreter abort when it exits."""
    rest = b""
    with contextlib.suppress(OSError, RuntimeError):  # closed input; closed loop
        while block := os.read(0, 4096):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                put(line.decode(errors="replace"))
        if rest:
            put(rest.decode(errors="replace"))


async def _main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str | None] = asyncio.Queue()  # None: stop

    def say(event: Event) -> None:
        try:
            print(event.json() if options.json else event.line(), flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            lines.put_nowait(None)

    kubelet = Kubelet(
        options.directory,
        version=options.kubelet_version,
        policy=options.policy,
        numa_nodes=options.numa_nodes,
        grace_period=options.grace_period,
        pod_resources=options.pod_resources,
        on_event=say,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lines.put_nowait, None)
    if sys.stdin is not None:  # None: descriptor 0 was closed, and by now is something else

        def put(line: str) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        threading.Thread(target=_read_lines, args=(put,), daemon=True).start()
    await kubelet.start(deaf=options.deaf)
    while (line := await lines.get()) is not None and await _command(kubelet, line, say):
        pass
    await kubelet.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world.kubelet",
        description="A reference kubelet for device plugins: prints a line for everything that happens.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="the device plugin directory, made if it is missing")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.add_argument(
        "--kubelet-version",
        type=lambda text: tuple(map(int, text.split("."))),
        default=(1, 36),
        metavar="1.N",
        help="whose behaviour to show: it differs before 1.33, before 1.37, and since (default: 1.36)",
    )
    parser.add_argument("--policy", choices=["none", "single-numa-node"], default="none", help="topology policy")
    parser.add_argument("--numa-nodes", type=int, nargs="+", default=[0, 1], metavar="N", help="(default: 0 1)")
    parser.add_argument("--grace-period", type=float, default=300.0, metavar="SECONDS", help="(default: 300)")
    parser.add_argument(
        "--pod-resources",
        type=Path,
        metavar="SOCKET",
        help="serve the pod resources API here (default: not at all)",
    )
    parser.add_argument("--deaf", action="store_true", help="create the socket, but never answer on it")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
