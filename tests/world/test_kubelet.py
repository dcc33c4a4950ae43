"""The reference kubelet is as strict as the original: shown with a plugin of a few lines over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from generated import podresources_pb2 as pods_pb
from generated import podresources_pb2_grpc as pods_rpc
from tests.world.kubelet import CHECKPOINT, AdmissionError, Kubelet, is_extended_resource
from tests.world.processes import PATIENCE, ROOT, until

rpc: Any = deviceplugin_pb2_grpc
N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"


def device(ident: str, health: str = "Healthy", node: int | None = None) -> pb.Device:
    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)]) if node is not None else None
    return pb.Device(ID=ident, health=health, topology=topology)


class Plugin:
    """The least that a kubelet takes for a device plugin: one resource, one socket, and knobs to misbehave with."""

    def __init__(
        self,
        directory: Path,
        devices: Iterable[pb.Device],
        resource: str = N150,
        name: str = "p.sock",
    ):
        self.directory, self.resource, self.name = directory, resource, name
        self.devices = list(devices)
        self.options = pb.DevicePluginOptions()
        self.preferred: list[str] = []
        self.calls: list[tuple[str, Any]] = []
        self.error: tuple[grpc.StatusCode, str] | None = None
        self.permissions = "rw"
        self._news: set[asyncio.Queue[bool]] = set()
        self._server: grpc.aio.Server | None = None

    async def serve(self) -> None:
        self._server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / self.name}")
        await self._server.start()

    async def register(self, *, version: str = "v1beta1", endpoint: str = "") -> None:
        request = pb.RegisterRequest(
            version=version,
            endpoint=endpoint or self.name,
            resource_name=self.resource,
            options=self.options,
        )
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(
            f"unix:{self.directory / 'kubelet.sock'}", options=options
        ) as channel:
            await rpc.RegistrationStub(channel).Register(request)

    async def stop(self) -> None:
        if self._server:
            await self._server.stop(None)
            self._server = None

    def send(self, *devices: pb.Device) -> None:
        self.devices = list(devices)
        for news in self._news:
            news.put_nowait(True)

    def end_streams(self) -> None:
        for news in self._news:
            news.put_nowait(False)

    def called(self, name: str) -> list[Any]:
        return [request for call, request in self.calls if call == name]

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: Any
    ) -> pb.DevicePluginOptions:
        self.calls.append(("options", request))
        return self.options

    async def ListAndWatch(
        self, request: pb.Empty, context: Any
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        news: asyncio.Queue[bool] = asyncio.Queue()
        self._news.add(news)
        try:
            yield pb.ListAndWatchResponse(devices=self.devices)
            while await news.get():
                yield pb.ListAndWatchResponse(devices=self.devices)
        finally:
            self._news.discard(news)

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Any
    ) -> pb.PreferredAllocationResponse:
        self.calls.append(("preferred", request.container_requests))
        answer = pb.ContainerPreferredAllocationResponse(deviceIDs=self.preferred)
        return pb.PreferredAllocationResponse(container_responses=[answer])

    async def Allocate(self, request: pb.AllocateRequest, context: Any) -> pb.AllocateResponse:
        self.calls.append(("allocate", request.container_requests))
        if self.error:
            await context.abort(*self.error)
        ids = sorted(request.container_requests[0].devices_ids)
        answer = pb.ContainerAllocateResponse(
            envs={"IDS": ",".join(ids)},
            annotations={"of": self.resource},
            mounts=[pb.Mount(container_path="/dev/hugepages", host_path="/dev/hugepages")],
            devices=[
                pb.DeviceSpec(
                    container_path=f"/dev/{i}", host_path=f"/dev/{i}", permissions=self.permissions
                )
                for i in ids
            ],
            cdi_devices=[pb.CDIDevice(name=f"{self.resource}={i}") for i in ids],
        )
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: Any
    ) -> pb.PreStartContainerResponse:
        self.calls.append(("prestart", sorted(request.devices_ids)))
        if self.error:
            await context.abort(*self.error)
        return pb.PreStartContainerResponse()


class Bench:
    """A kubelet, and plugins that are stopped with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = contextlib.AsyncExitStack()

    async def kubelet(self, **options: Any) -> Kubelet:
        return await self.stack.enter_async_context(Kubelet(self.directory, **options))

    async def plugin(
        self, *devices: pb.Device, resource: str = N150, name: str = "p.sock"
    ) -> Plugin:
        plugin = Plugin(self.directory, devices, resource, name)
        self.stack.push_async_callback(plugin.stop)
        await plugin.serve()
        return plugin

    async def registered(self, kubelet: Kubelet, *devices: pb.Device, **options: bool) -> Plugin:
        plugin = await self.plugin(*devices)
        plugin.options = pb.DevicePluginOptions(**options)
        await plugin.register()
        await kubelet.registered(plugin.resource)
        return plugin


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path / "d")
    async with bench.stack:
        yield bench


A, B, C, D = (device(ident) for ident in "abcd")


# ------------------------------------------------------------------------------------------------------------- starting


@pytest.mark.parametrize(("version", "kept"), [((1, 32), {"sub"}), ((1, 33), {"sub", "notes.txt"})])
async def test_a_starting_kubelet_deletes_what_its_version_deletes(
    bench: Bench, version: tuple[int, int], kept: set[str]
) -> None:
    """Sockets go, directories and the checkpoint stay; other files go before 1.33 only."""
    (bench.directory / "sub").mkdir(parents=True)
    (bench.directory / "notes.txt").touch()
    (bench.directory / CHECKPOINT).write_text("{}")
    for name in ("old.sock", "kubelet.sock"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(bench.directory / name))
    await bench.kubelet(version=version)
    assert {path.name for path in bench.directory.iterdir()} == kept | {CHECKPOINT, "kubelet.sock"}


async def test_a_missing_directory_is_made(bench: Bench) -> None:
    """A starting kubelet makes its directory, readable by all and writable by itself alone."""
    assert not bench.directory.exists()
    await bench.kubelet()
    assert bench.directory.stat().st_mode & 0o777 == 0o755


async def test_a_stop_removes_the_socket_and_a_kill_leaves_it(bench: Bench) -> None:
    """After a stop `kubelet.sock` is gone; after a kill it is there and refuses connections."""
    kubelet = await bench.kubelet()
    await kubelet.kill()
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(kubelet.socket))
    await kubelet.start()
    await kubelet.stop()
    assert list(bench.directory.iterdir()) == []


# --------------------------------------------------------------------------------------------------------- registration


async def test_register_dials_back_before_it_answers(bench: Bench) -> None:
    """When Register returns, the kubelet has called GetDevicePluginOptions on the plugin's socket."""
    kubelet = await bench.kubelet()
    plugin = await bench.plugin(A)
    await plugin.register()
    assert plugin.called("options")
    await kubelet.registered(N150)
    assert kubelet.capacity() == {N150: 1}
    kinds = [event.kind for event in kubelet.events]
    assert kinds == ["started", "sources-ready", "register", "registered", "written", "list"]
    assert kubelet.violations == []


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("tenstorrent.com/n150", True),
        ("tenstorrent.com/" + "n" * 63, True),
        ("tenstorrent.com/" + "n" * 64, False),
        ("n150", False),
        ("kubernetes.io/n150", False),
        ("node.kubernetes.io/n150", False),
        ("requests.tenstorrent.com/n150", False),
        ("tenstorrent.com/a/b", False),
        ("Tenstorrent.com/n150", False),
        ("tenstorrent.com/-n150", False),
        ("tenstorrent.com/", False),
        ("/n150", False),
        ("d" * 63 + "." + "e" * 200 + ".com/n150", False),
        ("tenstorrent.com/n150\n", False),
    ],
)
def test_only_extended_resource_names_are_taken(name: str, good: bool) -> None:
    """domain/name, both well-formed, not Kubernetes' own, and still a qualified name as a quota."""
    assert is_extended_resource(name) is good


@pytest.mark.parametrize(
    ("version", "resource", "message"),
    [
        (
            "v1",
            N150,
            'requested API version "v1" is not supported by kubelet. Supported version is ["v1beta1"]',
        ),
        ("v1beta1", "n150", 'the ResourceName "n150" is invalid'),
    ],
)
async def test_a_bad_registration_is_refused(
    bench: Bench, version: str, resource: str, message: str
) -> None:
    """A wrong version or name is answered with UNKNOWN and the original's text, and nothing is dialled."""
    kubelet = await bench.kubelet()
    plugin = await bench.plugin(A, resource=resource)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await plugin.register(version=version)
    assert (refusal.value.code(), refusal.value.details()) == (grpc.StatusCode.UNKNOWN, message)
    assert plugin.calls == []
    assert kubelet.capacity() == {}


async def test_a_plugin_that_does_not_serve_is_refused_in_the_end(bench: Bench) -> None:
    """Without a server behind the endpoint Register fails when the dial-back's time is over, and it is a violation."""
    kubelet = await bench.kubelet(dial_timeout=0.2)
    with pytest.raises(
        grpc.aio.AioRpcError, match="failed to dial device plugin: context deadline exceeded"
    ):
        await Plugin(bench.directory, [A]).register()
    assert kubelet.violations == [
        f"{N150} registers {bench.directory / 'p.sock'} before it serves there"
    ]


async def test_faults_hit_register_once(bench: Bench) -> None:
    """`refuse_with` and `hang` apply to the next calls, in their order, and then no more."""
    kubelet = await bench.kubelet()
    plugin = await bench.plugin(A)
    kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, "not now")
    kubelet.hang(60)
    with pytest.raises(grpc.aio.AioRpcError, match="not now"):
        await plugin.register()
    hanging = asyncio.create_task(plugin.register())
    await kubelet.wait_for(lambda: len(kubelet.find("register", N150)) == 2)
    await plugin.register()
    assert not hanging.done()
    hanging.cancel()
    await kubelet.registered(N150)


async def test_a_deaf_kubelet_never_answers(bench: Bench) -> None:
    """A deaf kubelet takes connections and leaves the plugin waiting until its own deadline."""
    kubelet = await bench.kubelet()
    plugin = await bench.plugin(A)
    await kubelet.restart(deaf=True)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(plugin.register(), 0.2)
    assert kubelet.find("register") == []


# --------------------------------------------------------------------------------------------------- registering anew


async def test_a_new_registration_replaces_the_endpoint(bench: Bench) -> None:
    """The devices are those of the newer plugin's list, and Allocate goes to it."""
    kubelet = await bench.kubelet()
    old = await bench.registered(kubelet, A, B)
    new = await bench.plugin(C, name="new.sock")
    await new.register()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"c"})
    assert kubelet.capacity() == {N150: 1}
    await kubelet.admit("pod", "main", {N150: 1})
    assert new.called("allocate")
    assert not old.called("allocate")


async def test_until_1_36_the_end_of_an_old_stream_takes_down_the_new_one(bench: Bench) -> None:
    """A plugin that registers anew and only then ends its old stream loses both, and all its devices are unhealthy."""
    kubelet = await bench.kubelet(version=(1, 36))
    old = await bench.registered(kubelet, A)
    new = await bench.plugin(B, name="new.sock")
    await new.register()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"b"})
    await old.stop()
    await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 0})
    assert len(kubelet.violations) == 1


async def test_since_1_37_the_end_of_an_old_stream_does_no_harm(bench: Bench) -> None:
    """Two sockets of one resource are two connections: the newer one stays."""
    kubelet = await bench.kubelet(version=(1, 37))
    old = await bench.registered(kubelet, A)
    new = await bench.plugin(B, name="new.sock")
    await new.register()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"b"})
    await old.stop()
    await kubelet.wait_for(lambda: kubelet.find("ended", N150))
    assert kubelet.allocatable() == {N150: 1}
    await kubelet.admit("pod", "main", {N150: 1})
    assert kubelet.violations == []


async def test_since_1_37_a_connected_socket_cannot_be_registered_again(bench: Bench) -> None:
    """It is refused as already connected, and from then on that name is refused even when the plugin has gone."""
    kubelet = await bench.kubelet(version=(1, 37))
    plugin = await bench.registered(kubelet, A)
    with pytest.raises(grpc.aio.AioRpcError, match="device plugin already connected"):
        await plugin.register()
    await plugin.stop()
    await kubelet.wait_for(lambda: kubelet.find("ended", N150))
    await plugin.serve()
    with pytest.raises(grpc.aio.AioRpcError, match="device plugin already connected"):
        await plugin.register()
    await kubelet.restart()
    await plugin.stop()
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)


# ----------------------------------------------------------------------------------------------------- lists and loss


async def test_each_message_replaces_the_list(bench: Bench) -> None:
    """An unhealthy device stays in capacity and leaves allocatable; one left out leaves both."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B, C)
    plugin.send(A, device("b", "Unhealthy"), C)
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150) == {"b"})
    assert (kubelet.capacity(), kubelet.allocatable()) == ({N150: 3}, {N150: 2})
    plugin.send(A)
    await kubelet.wait_for(lambda: kubelet.capacity() == {N150: 1})
    assert [event.fields["number"] for event in kubelet.find("list", N150)] == [1, 2, 3]
    assert kubelet.violations == []


@pytest.mark.parametrize("end", ["stop", "end_streams", "drop"])
async def test_the_end_of_the_stream_makes_all_devices_unhealthy(bench: Bench, end: str) -> None:
    """Whether the plugin stops, ends the stream politely, or the connection breaks: nothing is allocatable any more."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    if end == "stop":
        await plugin.stop()
    elif end == "end_streams":
        plugin.end_streams()
    else:
        await kubelet.drop_streams()
    await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 0})
    assert kubelet.capacity() == {N150: 2}
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        await kubelet.admit("pod", "main", {N150: 1})


async def test_without_a_plugin_the_resource_is_removed_after_the_grace_period(
    bench: Bench,
) -> None:
    """Five minutes after the stream's end, by the kubelet's clock, the resource is gone from the node."""
    now = 0.0
    kubelet = await bench.kubelet(clock=lambda: now)
    plugin = await bench.registered(kubelet, A)
    await plugin.stop()
    await kubelet.wait_for(lambda: kubelet.find("lost", N150))
    now = 300.0
    assert kubelet.capacity() == {N150: 1}
    now = 300.1
    assert kubelet.capacity() == {}
    assert kubelet.find("removed", N150)


async def test_the_removal_wakes_who_waits_for_it(bench: Bench) -> None:
    """The end of the grace period is an event like any other."""
    kubelet = await bench.kubelet(grace_period=0.05)
    plugin = await bench.registered(kubelet, A)
    await plugin.stop()
    await kubelet.wait_for(lambda: kubelet.find("removed", N150))


@pytest.mark.parametrize("version", [(1, 36), (1, 37)])
async def test_a_plugin_that_returns_in_time_has_its_devices_back(
    bench: Bench, version: tuple[int, int]
) -> None:
    """Registered again on the same socket within the grace period, its devices are healthy and the pods' theirs."""
    kubelet = await bench.kubelet(version=version)
    plugin = await bench.registered(kubelet, A, B)
    await kubelet.admit("pod", "main", {N150: 2})
    await plugin.stop()
    await kubelet.wait_for(lambda: kubelet.find("lost", N150))
    await plugin.serve()
    await plugin.register()
    await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 2})
    assert kubelet.allocated(N150) == {"a", "b"}
    assert kubelet.violations == []


@pytest.mark.parametrize(
    ("devices", "what"),
    [
        ([A, A], "twice"),
        ([device("")], "1 to 63 characters"),
        ([device("x" * 64)], "1 to 63 characters"),
        ([device("a", "healthy")], "with health 'healthy'"),
        ([device("a", node=-1)], "negative NUMA node"),
    ],
)
async def test_what_the_kubelet_swallows_in_a_list_is_a_violation(
    bench: Bench, devices: Sequence[pb.Device], what: str
) -> None:
    """Duplicates, impossible IDs, unknown health and negative NUMA nodes are told, though the list is taken."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, *devices)
    assert len(kubelet.violations) == 1
    assert what in kubelet.violations[0]


async def test_the_same_list_twice_is_marked(bench: Bench) -> None:
    """A message that changes nothing, in whatever order, makes the kubelet write its checkpoint again."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    plugin.send(B, A)
    await kubelet.wait_for(lambda: len(kubelet.find("list")) == 2)
    assert [event.fields["repeated"] for event in kubelet.find("list")] == [False, True]
    assert len(kubelet.find("written")) == 2
    assert kubelet.violations == []


# ------------------------------------------------------------------------------------------------------------ admission


async def test_admission_asks_for_one_container_and_returns_its_edits(bench: Bench) -> None:
    """Allocate gets one container request; environment, nodes, mounts, annotations and CDI names come back."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    [requests] = plugin.called("allocate")
    assert [sorted(request.devices_ids) for request in requests] == [["a", "b"]]
    assert allocation.ids == {N150: {"a", "b"}}
    assert allocation.envs == {"IDS": "a,b"}
    assert [spec.host_path for spec in allocation.devices] == ["/dev/a", "/dev/b"]
    assert [mount.container_path for mount in allocation.mounts] == ["/dev/hugepages"]
    assert allocation.annotations == {"of": N150}
    assert allocation.cdi_devices == [f"{N150}=a", f"{N150}=b"]


async def test_a_container_that_has_its_devices_is_not_allocated_again(bench: Bench) -> None:
    """Admitted a second time it keeps what it has, without a call; another number is refused."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    first = await kubelet.admit("pod", "main", {N150: 1})
    assert (await kubelet.admit("pod", "main", {N150: 1})).ids == first.ids
    assert len(plugin.called("allocate")) == 1
    with pytest.raises(
        AdmissionError, match=r'changed request for resource "tenstorrent\.com/n150" from 1 to 2'
    ):
        await kubelet.admit("pod", "main", {N150: 2})


async def test_more_than_there_is_is_refused(bench: Bench) -> None:
    """What is taken or unhealthy is not available; a removed pod's devices are."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A, B, device("c", "Unhealthy"))
    await kubelet.admit("one", "main", {N150: 1})
    with pytest.raises(AdmissionError) as refusal:
        await kubelet.admit("two", "main", {N150: 2})
    assert refusal.value.reason == "UnexpectedAdmissionError"
    assert refusal.value.message == (
        f"Allocate failed due to requested number of devices unavailable for {N150}. "
        "Requested: 2, Available: 1, which is unexpected"
    )
    kubelet.remove_pod("one")
    await kubelet.admit("two", "main", {N150: 2})


async def test_an_error_from_allocate_fails_the_pod_and_frees_its_devices(bench: Bench) -> None:
    """The plugin's status is in the message, and nothing of the pod stays allocated."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    await kubelet.admit("pod", "one", {N150: 1})
    plugin.error = (grpc.StatusCode.FAILED_PRECONDITION, "a is hot")
    with pytest.raises(
        AdmissionError, match="rpc error: code = FailedPrecondition desc = a is hot"
    ):
        await kubelet.admit("pod", "two", {N150: 1})
    plugin.error = None
    assert (await kubelet.admit("next", "main", {N150: 2})).ids == {N150: {"a", "b"}}


async def test_bad_permissions_are_a_violation(bench: Bench) -> None:
    """A device node's permissions are of r, w and m."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A)
    plugin.permissions = "rwx"
    await kubelet.admit("pod", "main", {N150: 1})
    assert kubelet.violations == [f"{N150} gives /dev/a the permissions 'rwx'"]


async def test_of_two_resources_answers_to_one_variable_one_is_ignored(bench: Bench) -> None:
    """Two resources' edits are merged; where they contradict each other one wins, and the kubelet says so."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A)
    other = await bench.plugin(B, resource=P150, name="other.sock")
    await other.register()
    await kubelet.registered(P150)
    allocation = await kubelet.admit("pod", "main", {N150: 1, P150: 1})
    assert len(allocation.devices) == 2
    assert len(allocation.mounts) == 1
    assert {event.fields["key"] for event in kubelet.find("conflict")} == {"IDS", "of"}


async def test_a_preference_is_asked_for_and_followed(bench: Bench) -> None:
    """The plugin gets all that is available, nothing that must be included, and the size; its choice is allocated."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B, C, D, get_preferred_allocation_available=True)
    plugin.preferred = ["d", "b"]
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    assert allocation.ids == {N150: {"b", "d"}}
    [[question]] = plugin.called("preferred")
    assert sorted(question.available_deviceIDs) == ["a", "b", "c", "d"]
    assert (list(question.must_include_deviceIDs), question.allocation_size) == ([], 2)
    assert kubelet.violations == []


@pytest.mark.parametrize("preferred", [[], ["a"], ["a", "z"], ["a", "a"], ["a", "b", "c"]])
async def test_a_wrong_preference_is_a_violation_and_made_up_for(
    bench: Bench, preferred: list[str]
) -> None:
    """Too few, too many or unknown IDs are told; the container gets its number all the same."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B, C, get_preferred_allocation_available=True)
    plugin.preferred = preferred
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    assert len(allocation.ids[N150]) == 2
    assert kubelet.violations


async def test_an_init_containers_devices_must_be_included(bench: Bench) -> None:
    """The pod's next container gets the init container's devices again, as must-include where it needs more."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B, C, get_preferred_allocation_available=True)
    plugin.preferred = ["b"]
    await kubelet.admit("pod", "setup", {N150: 1}, init=True)
    plugin.preferred = ["b", "c"]
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    assert allocation.ids == {N150: {"b", "c"}}
    question = plugin.called("preferred")[1][0]
    assert (list(question.must_include_deviceIDs), question.allocation_size) == (["b"], 2)
    assert sorted(question.available_deviceIDs) == ["a", "b", "c"]
    assert kubelet.violations == []


async def test_pre_start_is_called_before_each_start(bench: Bench) -> None:
    """An error keeps the container from starting; it is tried again, and the pod keeps its devices."""
    kubelet = await bench.kubelet(back_off=0.01)
    plugin = await bench.registered(kubelet, A, pre_start_required=True)
    plugin.error = None
    await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.running("pod", "main")
    assert plugin.called("prestart") == [["a"]]
    plugin.error = (grpc.StatusCode.INTERNAL, "no reset")
    kubelet.crash("pod", "main")
    await kubelet.wait_for(lambda: len(kubelet.find("not-started")) > 1)
    message = kubelet.find("not-started")[0].fields["message"]
    assert message.endswith("failed with err: rpc error: code = Internal desc = no reset")
    assert kubelet.allocated(N150) == {"a"}
    plugin.error = None
    await kubelet.running("pod", "main")
    assert len(plugin.called("allocate")) == 1


# ----------------------------------------------------------------------------------------------------------------- NUMA


async def test_single_numa_node_takes_all_devices_from_one_node(bench: Bench) -> None:
    """The plugin chooses among the devices of a node that has enough of them."""
    kubelet = await bench.kubelet(policy="single-numa-node")
    devices = [device("a", node=0), device("b", node=1), device("c", node=1), device("d", node=1)]
    plugin = await bench.registered(kubelet, *devices, get_preferred_allocation_available=True)
    plugin.preferred = ["b", "d"]
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    assert allocation.ids == {N150: {"b", "d"}}
    assert sorted(plugin.called("preferred")[0][0].available_deviceIDs) == ["b", "c", "d"]


async def test_single_numa_node_refuses_what_no_node_has(bench: Bench) -> None:
    """Enough devices on the machine but not on one node is a TopologyAffinityError, and without the policy none."""
    kubelet = await bench.kubelet(policy="single-numa-node")
    await bench.registered(kubelet, device("a", node=0), device("b", node=1))
    with pytest.raises(AdmissionError) as refusal:
        await kubelet.admit("pod", "main", {N150: 2})
    assert refusal.value.reason == "TopologyAffinityError"
    assert refusal.value.message == "Resources cannot be allocated with Topology locality"
    kubelet.config.policy = "none"
    await kubelet.admit("pod", "main", {N150: 2})


async def test_devices_without_topology_are_not_aligned(bench: Bench) -> None:
    """Where no device says where it is, the policy has no opinion."""
    kubelet = await bench.kubelet(policy="single-numa-node")
    await bench.registered(kubelet, A, B)
    assert (await kubelet.admit("pod", "main", {N150: 2})).ids == {N150: {"a", "b"}}


# --------------------------------------------------------------------------------------------------- who holds what


@contextlib.asynccontextmanager
async def lister(kubelet: Kubelet) -> AsyncIterator[Any]:
    """The pod resources API as a client has it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(
        f"unix:{kubelet.pod_resources}", options=options
    ) as channel:
        yield pods_rpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]


async def listed(kubelet: Kubelet) -> dict[str, dict[str, list[str]]]:
    """By pod and container, the IDs of the entries."""
    async with lister(kubelet) as stub:
        answer = await stub.List(pods_pb.ListPodResourcesRequest())
    return {
        f"{pod.namespace}/{pod.name}": {
            container.name: sorted(
                ident for entry in container.devices for ident in entry.device_ids
            )
            for container in pod.containers
        }
        for pod in answer.pod_resources
    }


async def test_list_names_the_pods_and_what_their_containers_hold(bench: Bench) -> None:
    """Pods without devices too, and a device once for each NUMA node; an init container is not named."""
    kubelet = await bench.kubelet()
    both = pb.Device(
        ID="b",
        health="Healthy",
        topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=0), pb.NUMANode(ID=1)]),
    )
    await bench.registered(kubelet, A, both, C)
    await kubelet.admit("one", "setup", {N150: 1}, init=True)
    await kubelet.admit("one", "main", {N150: 3})
    await kubelet.admit("kube-system/two", "main", {})
    assert await listed(kubelet) == {
        "default/one": {"main": ["a", "b", "b", "c"]},
        "kube-system/two": {"main": []},
    }
    kubelet.remove_pod("one")
    assert await listed(kubelet) == {"kube-system/two": {"main": []}}


async def test_list_names_what_is_held_of_a_resource_whose_plugin_is_gone(bench: Bench) -> None:
    """The resource may be gone from the node; the pod holds its device as before."""
    now = 0.0
    kubelet = await bench.kubelet(clock=lambda: now)
    plugin = await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    await plugin.stop()
    await kubelet.wait_for(lambda: kubelet.find("lost", N150))
    now = 301.0
    assert kubelet.capacity() == {}
    assert await listed(kubelet) == {"default/pod": {"main": ["a"]}}


async def test_a_kubelet_that_has_just_started_names_no_pod(bench: Bench) -> None:
    """It learns of its pods after it has begun to answer; until then its checkpoint is nothing that it tells."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.restart()
    assert await listed(kubelet) == {} and kubelet.allocated(N150) == {"a"}
    await kubelet.readmit("pod", running=True)
    assert await listed(kubelet) == {"default/pod": {"main": ["a"]}}


async def test_allocatable_devices_are_the_healthy_ones(bench: Bench) -> None:
    """Whether a pod holds them or not."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A, B, device("c", "Unhealthy"))
    await kubelet.admit("pod", "main", {N150: 1})
    async with lister(kubelet) as stub:
        answer = await stub.GetAllocatableResources(pods_pb.AllocatableResourcesRequest())
    assert sorted(ident for entry in answer.devices for ident in entry.device_ids) == ["a", "b"]


async def test_list_can_fail_in_every_way(bench: Bench) -> None:
    """Refused, late, nonsense: each for as many calls as it was asked for, and Register is not concerned."""
    kubelet = await bench.kubelet()
    kubelet.refuse_with(
        grpc.StatusCode.UNIMPLEMENTED, "unknown method List", times=2, method="List"
    )
    kubelet.hang(60, method="List")
    kubelet.garble()
    await bench.registered(kubelet, A)
    async with lister(kubelet) as stub:
        for _ in range(2):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stub.List(pods_pb.ListPodResourcesRequest())
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline Exceeded"):
            await stub.List(pods_pb.ListPodResourcesRequest(), timeout=0.1)
    async with grpc.aio.insecure_channel(f"unix:{kubelet.pod_resources}") as channel:
        call: Any = channel.unary_unary("/v1.PodResourcesLister/List")
        assert await call(b"") == b"\xff\xff\xff"
    assert await listed(kubelet) == {} and kubelet.is_sound


async def test_list_is_answered_in_a_kubelets_life_only(bench: Bench) -> None:
    """From before `kubelet.sock` is there until it is killed; then the socket is there and refuses; or it is deaf."""
    kubelet = await bench.kubelet()
    assert kubelet.pod_resources and await listed(kubelet) == {}
    for orderly in (False, True):
        await (kubelet.stop() if orderly else kubelet.kill())
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(kubelet.pod_resources))
        await kubelet.start()
        assert await listed(kubelet) == {}
    await kubelet.restart(deaf=True)
    async with lister(kubelet) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="Deadline Exceeded"):
            await stub.List(pods_pb.ListPodResourcesRequest(), timeout=0.2)


async def test_who_asks_too_often_is_refused(bench: Bench) -> None:
    """Ten calls at once, and a hundred a second; more are refused, and a violation."""
    kubelet = await bench.kubelet()
    async with lister(kubelet) as stub:
        calls = [stub.List(pods_pb.ListPodResourcesRequest()) for _ in range(100)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert {(error.code(), error.details()) for error in refused} == {
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    }
    assert 0 < len(refused) <= 90 and len(kubelet.violations) == len(refused)


# ----------------------------------------------------------------------------------------------------------- checkpoint


async def test_a_restarted_kubelet_knows_who_holds_what(bench: Bench) -> None:
    """After a restart the resource is there with no devices; registered again, what pods hold is not given away."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    held = (await kubelet.admit("pod", "main", {N150: 1})).ids[N150]
    await plugin.stop()
    await kubelet.restart()
    assert kubelet.capacity() == {N150: 0}
    assert kubelet.allocated(N150) == held
    assert (await kubelet.readmit("pod", running=True))["main"].envs == {"IDS": next(iter(held))}
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)
    assert (await kubelet.admit("other", "main", {N150: 1})).ids[N150] == {"a", "b"} - held
    assert kubelet.violations == []


async def test_after_a_reboot_a_late_plugin_costs_the_pods(bench: Bench) -> None:
    """Admitted again before the plugin has registered, the pod is rejected and its devices are free."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    await plugin.stop()
    await kubelet.power_cut()
    kubelet.api_server_away()
    await kubelet.start()
    with pytest.raises(AdmissionError) as refusal:
        await kubelet.readmit("pod")
    assert refusal.value.reason == "UnexpectedAdmissionError"
    assert refusal.value.message == (
        f"Allocate failed due to no healthy devices present; cannot allocate unhealthy devices {N150}, "
        "which is unexpected"
    )
    kubelet.api_server_back()
    await kubelet.wait_for(
        lambda: kubelet.find("sources-ready", since=kubelet.find("killed")[0].at)
    )
    assert await listed(kubelet) == {} and kubelet.allocated(N150) == set()


async def test_after_a_reboot_a_plugin_in_time_saves_the_pods(bench: Bench) -> None:
    """Registered first, with the pod's device healthy, the pod gets the very same back without an Allocate."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    before = await kubelet.admit("pod", "main", {N150: 1})
    await plugin.stop()
    await kubelet.power_cut()
    await kubelet.start()
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)
    await kubelet.wait_for(lambda: len(kubelet.find("admitted")) == 2)
    assert kubelet.find("admitted")[1].fields == {
        "pod": "pod",
        "container": "main",
        **before.fields(),
    }
    assert len(plugin.called("allocate")) == 1


async def test_after_a_reboot_the_pods_own_devices_must_be_healthy(bench: Bench) -> None:
    """Other healthy devices do not help a pod whose device has another ID or is unhealthy now."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.restart()
    await plugin.stop()
    plugin.devices = [device("a", "Unhealthy"), B]
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)
    with pytest.raises(AdmissionError, match="previously allocated devices are no longer healthy"):
        await kubelet.readmit("pod")


async def test_a_damaged_checkpoint_is_ignored(bench: Bench) -> None:
    """A checkpoint whose checksum is wrong counts as none."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.kill()
    stored = json.loads((bench.directory / CHECKPOINT).read_text())
    stored["Data"]["PodDeviceEntries"][0]["PodUID"] = "other"
    (bench.directory / CHECKPOINT).write_text(json.dumps(stored))
    await kubelet.start()
    assert kubelet.allocated(N150) == set()
    assert kubelet.find("checkpoint-ignored")


# -------------------------------------------------------------------------------------------------------- the long run


async def test_fifty_kills_leak_no_descriptor(bench: Bench) -> None:
    """A kubelet that is killed and started fifty times under a plugin that always registers again leaks nothing.

    gRPC closes a connection in its own time, so the count at any moment can be one or two too many.
    """

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    kubelet = await bench.kubelet()
    plugin = await bench.plugin(A)
    before = 0
    for number in range(50):
        await plugin.register()
        await kubelet.registered(N150)
        before = before or descriptors()
        await kubelet.restart(orderly=number % 2 == 1)
        await plugin.stop()
        await plugin.serve()
    await until(lambda: descriptors() <= before)
    assert kubelet.violations == []


# ---------------------------------------------------------------------------------------------------------- by hand


async def _run(
    *arguments: str, stdin: int | None = asyncio.subprocess.PIPE
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.world.kubelet",
        *arguments,
        cwd=ROOT,
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
    )


async def _until(process: asyncio.subprocess.Process, start: str) -> str:
    assert process.stdout
    while line := (await asyncio.wait_for(process.stdout.readline(), PATIENCE)).decode():
        if line.startswith(start):
            return line.rstrip("\n")
    raise AssertionError(f"ended without a line {start!r}")


async def test_the_command_line_tells_what_happens_and_obeys(bench: Bench) -> None:
    """One greppable line per event; commands on standard input; `quit` ends it with status 0 and no socket left."""
    process = await _run(str(bench.directory))
    assert process.stdin
    try:
        await _until(process, "started ")
        plugin = await bench.plugin(A, device("b", "Unhealthy"))
        await plugin.register()
        line = await _until(process, "list ")
        assert line.startswith(f"list resource={N150} healthy=1 unhealthy=1 number=1 ")
        assert line.endswith(" endpoint=p.sock healthy_ids=a unhealthy_ids=b")
        process.stdin.write(
            f"capacity\nadmit pod {N150}=1\nadmit two {N150}=1\nremove pod\nrestart\n".encode()
        )
        assert (
            await _until(process, "capacity ")
            == f"capacity resource={N150} capacity=2 allocatable=1"
        )
        assert f" ids={N150}=a " in await _until(process, "admitted pod=pod container=main")
        assert "Requested: 1, Available: 0" in await _until(process, "rejected pod=two")
        for start in ("freed pod=pod", "killed", "started"):
            await _until(process, start)
        process.stdin.write(b"quit\n")
        await _until(process, "stopped")
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        assert not (bench.directory / "kubelet.sock").exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_command_line_needs_no_terminal_and_ends_on_signals(
    bench: Bench, number: int
) -> None:
    """With an empty standard input it serves on, prints JSON if asked to, and a signal ends it with status 0."""
    process = await _run("--json", str(bench.directory), stdin=asyncio.subprocess.DEVNULL)
    try:
        assert json.loads(await _until(process, "{"))["event"] == "started"
        plugin = await bench.plugin(A)
        await plugin.register()
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
