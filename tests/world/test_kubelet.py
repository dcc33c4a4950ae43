"""The reference kubelet does what the original does, and shows what no scenario can show."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from generated import deviceplugin_pb2 as pb
from generated import podresources_pb2 as pods_pb
from tests.world.kubelet import CHECKPOINT, AdmissionError, Panic
from tests.world.plugins import is_extended_resource
from tests.world.reference import Bench, ReferenceWorld, lister
from tests.world.scenarios import SCENARIOS, Scenario, perform
from tests.world.stage import Plugin, device

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"
A, B, C = (device(ident) for ident in "abc")


@pytest.fixture
async def bench(short_tmp: Path) -> AsyncIterator[Bench]:
    async with Bench(short_tmp / "d") as bench:
        yield bench


@pytest.mark.parametrize("version", [(1, 33), (1, 37)], ids=["1.33", "1.37"])
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
async def test_it_does_what_the_original_does(
    short_tmp: Path, scenario: Scenario, version: tuple[int, int]
) -> None:
    """It writes the record that originals have written, see tests.e2e.test_reference."""
    world = ReferenceWorld(short_tmp, version)
    async with world.kubelet:
        record = await perform(scenario, world, "s")
    assert record == scenario.expected(version)


# ------------------------------------------------------------------------------- starting, ending


@pytest.mark.parametrize(("version", "kept"), [((1, 32), set[str]()), ((1, 33), {"notes.txt"})])
async def test_a_start_deletes_what_its_version_deletes(
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
    left = {path.name for path in bench.directory.iterdir()}
    assert left == kept | {"sub", CHECKPOINT, "kubelet.sock"}


async def test_a_stop_removes_the_socket_and_a_kill_leaves_it(bench: Bench) -> None:
    """After a kill it refuses connections; the directory is made with the modes of the original."""
    kubelet = await bench.kubelet()
    assert bench.directory.stat().st_mode & 0o777 == 0o755
    await kubelet.kill()
    for path in (kubelet.socket, kubelet.pod_resources):
        with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(path))
    await kubelet.start()
    await kubelet.stop()
    assert list(bench.directory.iterdir()) == []


# ----------------------------------------------------------------------------------- registration


GOOD = ["tenstorrent.com/n150", "tenstorrent.com/" + "n" * 63]
BAD = [
    "n150 kubernetes.io/n150 node.kubernetes.io/n150 requests.tenstorrent.com/n150",
    "tenstorrent.com/a/b Tenstorrent.com/n150 tenstorrent.com/-n150 tenstorrent.com/ /n150",
    f"tenstorrent.com/{'n' * 64} {'d' * 63}.{'e' * 200}.com/n150",
]


@pytest.mark.parametrize("name", [*GOOD, *" ".join(BAD).split(), "tenstorrent.com/n150\n"])
def test_only_extended_resource_names_are_taken(name: str) -> None:
    """domain/name, both well-formed, not Kubernetes' own, and still a qualified name as a quota."""
    assert is_extended_resource(name) is (name in GOOD)


@pytest.mark.parametrize(
    ("version", "resource", "message"),
    [
        ("v1", N150, 'API version "v1" is not supported by kubelet. Supported version is ["v1b'),
        ("v1beta1", "n150", 'the ResourceName "n150" is invalid'),
    ],
)
async def test_a_bad_registration_is_refused(
    bench: Bench, version: str, resource: str, message: str
) -> None:
    """A wrong version or name is answered with UNKNOWN, and nothing is dialled."""
    await bench.kubelet()
    plugin = await bench.plugin(A, resource=resource)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await plugin.register(version=version)
    assert refusal.value.code() is grpc.StatusCode.UNKNOWN
    assert message in str(refusal.value.details())
    assert plugin.calls == []


async def test_a_plugin_that_does_not_serve_is_refused_in_the_end(bench: Bench) -> None:
    """Register fails when the dial-back's time is over, and it is a violation."""
    kubelet = await bench.kubelet(dial_timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError, match="failed to dial device plugin"):
        await Plugin(bench.directory, [A], N150, "p.sock").register()
    early = f"{N150} registers {bench.directory / 'p.sock'} before it serves there"
    assert kubelet.violations == [early]


async def test_a_plugin_that_ends_while_it_registers_has_done_nothing_wrong(bench: Bench) -> None:
    """Its socket refuses, as a killed plugin's does: Register fails, which nobody hears."""
    kubelet = await bench.kubelet(dial_timeout=0.2)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(bench.directory / "p.sock"))
    with pytest.raises(grpc.aio.AioRpcError, match="failed to dial device plugin"):
        await Plugin(bench.directory, [A], N150, "p.sock").register()
    assert kubelet.violations == []


@pytest.mark.parametrize("end", ["stop", "end_streams", "drop"])
async def test_the_end_of_the_stream_makes_all_devices_unhealthy(bench: Bench, end: str) -> None:
    """Whether the plugin stops, ends the stream politely, or the connection breaks."""
    kubelet = await bench.kubelet(grace_period=0.05)
    plugin = await bench.registered(kubelet, A, device("b", "Unhealthy"))
    assert (kubelet.capacity(), kubelet.allocatable()) == ({N150: 2}, {N150: 1})
    if end == "stop":
        await plugin.stop()
    elif end == "end_streams":
        plugin.end_streams()
    else:
        await kubelet.drop_streams()
    await kubelet.wait_for(lambda: kubelet.find("lost", N150))
    assert kubelet.unhealthy(N150) == {"a", "b"}
    await kubelet.wait_for(lambda: kubelet.find("removed", N150))
    assert kubelet.capacity() == {}
    assert json.loads(kubelet.file.path.read_text())["Data"]["RegisteredDevices"] == {}


async def test_until_1_36_the_end_of_an_old_stream_takes_down_the_new_one(bench: Bench) -> None:
    """A plugin that registers anew and only then ends its old stream loses both."""
    kubelet = await bench.kubelet(version=(1, 36))
    old = await bench.registered(kubelet, A)
    new = await bench.plugin(B, name="new.sock")
    await new.register()
    await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"b"})
    await old.stop()
    await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 0})
    assert len(kubelet.violations) == 1


async def test_since_1_37_a_connected_socket_cannot_be_registered_again(bench: Bench) -> None:
    """It is refused, and that name from then on, even when the plugin has gone."""
    kubelet = await bench.kubelet(version=(1, 37))
    plugin = await bench.registered(kubelet, A)
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError, match="device plugin already connected"):
            await plugin.register()
        await plugin.stop()
        await kubelet.wait_for(lambda: kubelet.find("ended", N150))
        await plugin.serve()
    await kubelet.restart()
    await plugin.stop()
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)


# ---------------------------------------------------------------------- what no good plugin does


@pytest.mark.parametrize(
    ("devices", "what"),
    [
        ([A, A], "twice"),
        ([device("")], "1 to 63 characters"),
        ([device("x" * 64)], "1 to 63 characters"),
        ([device("a", "healthy")], "with health 'healthy'"),
        ([device("a", nodes=[-1])], "negative NUMA node"),
    ],
)
async def test_what_the_kubelet_swallows_in_a_list_is_a_violation(
    bench: Bench, devices: Sequence[pb.Device], what: str
) -> None:
    """Duplicates, impossible IDs, unknown health and negative NUMA nodes."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, *devices)
    assert len(kubelet.violations) == 1
    assert what in kubelet.violations[0]


@pytest.mark.parametrize("preference", [[], ["a"], ["a", "z"], ["a", "a"], ["a", "b", "c"]])
async def test_a_wrong_preference_is_a_violation_and_made_up_for(
    bench: Bench, preference: list[str]
) -> None:
    """Too few, too many or unknown IDs are told; the container gets its number all the same."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B, C, get_preferred_allocation_available=True)
    plugin.preference = preference
    plugin.permissions = "rwx"
    allocation = await kubelet.admit("pod", "main", {N150: 2})
    assert len(allocation.ids[N150]) == 2
    assert any("prefers" in text for text in kubelet.violations)
    assert f"{N150} gives /dev/null the permissions 'rwx'" in kubelet.violations


# -------------------------------------------------------------------------------------- admission


async def test_the_answers_of_two_resources_are_merged(bench: Bench) -> None:
    """Where they contradict each other one wins, and the kubelet says so."""
    kubelet = await bench.kubelet()
    await bench.registered(kubelet, A)
    await bench.registered(kubelet, B, resource=P150)
    allocation = await kubelet.admit("pod", "main", {N150: 1, P150: 1, "other.com/x": 1})
    assert allocation.ids == {N150: {"a"}, P150: {"b"}}
    assert {spec.container_path for spec in allocation.devices} == {"/dev/a", "/dev/b"}
    assert [mount.container_path for mount in allocation.mounts] == ["/etc/ids"]
    assert {event.fields["key"] for event in kubelet.find("conflict")} == {"IDS", "of"}
    assert kubelet.allocation("pod", "main").ids == allocation.ids


async def test_a_pod_that_wants_another_number_is_refused(bench: Bench) -> None:
    """Admitted a second time it keeps what it has; a pod that has ended is followed by another."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A, B)
    first = await kubelet.admit("pod", "main", {N150: 1})
    assert (await kubelet.admit("pod", "main", {N150: 1})).ids == first.ids
    uid = kubelet.uid("pod")
    with pytest.raises(AdmissionError, match=r"changed request for resource .* from 1 to 2"):
        await kubelet.admit("pod", "main", {N150: 2})
    await kubelet.admit("pod", "main", {N150: 2})
    assert len(plugin.calls) == 3 and kubelet.uid("pod") != uid


async def test_before_1_32_the_pod_that_was_admitted_last_is_kept(bench: Bench) -> None:
    """Whether List asks or not, until another pod is admitted."""
    kubelet = await bench.kubelet(version=(1, 31))
    await bench.registered(kubelet, A, B)
    for name in ("one", "two"):
        await kubelet.admit(name, "main", {N150: 1})
        kubelet.delete(name)
        async with lister(kubelet) as stub:
            await stub.List(pods_pb.ListPodResourcesRequest())
        (entry,) = kubelet.manager.pods.entries()
        assert entry.uid == kubelet.uid(name)


async def test_a_device_that_is_dropped_while_it_is_allocated_is_fatal_since_1_34(
    bench: Bench,
) -> None:
    """The kubelet is dead; it can be started again."""
    kubelet = await bench.kubelet(version=(1, 34))
    plugin = await bench.registered(kubelet, A, pre_start_required=True)

    def drop(method: str) -> bool:
        kubelet.manager.devices.replace(N150, [B])
        return False

    plugin.refuses = drop
    with pytest.raises(Panic):
        await kubelet.admit("pod", "main", {N150: 1})
    assert kubelet.find("panicked") and len(kubelet.violations) == 1
    with pytest.raises(RuntimeError):
        await kubelet.admit("pod", "main", {N150: 1})
    await kubelet.start()
