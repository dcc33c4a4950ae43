"""The reference kubelet sees what a plugin does wrong: the daemon's tests rely on it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from generated import deviceplugin_pb2 as pb
from tests.world.kubelet import Kubelet
from tests.world.pods import ADDRESSES
from tests.world.reference import Plugin, another_plugin, device

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"
A, B = device("a"), device("b")


@contextlib.asynccontextmanager
async def listed_plugin(
    kubelet: Kubelet, *devices: pb.Device, resource: str = N150
) -> AsyncIterator[Plugin]:
    """A plugin that has registered, and whose list the kubelet has."""
    name = f"{resource.rpartition('/')[2]}.sock"
    async with another_plugin(kubelet, resource, *devices, name=name) as plugin:
        await kubelet.registered(resource)
        yield plugin


@pytest.mark.parametrize("was_killed", [False, True])
async def test_a_plugin_must_serve_before_it_registers(
    directory: Path, monkeypatch: pytest.MonkeyPatch, was_killed: bool
) -> None:
    """Register fails after the dial timeout; a socket left by a killed plugin is no violation."""
    monkeypatch.setattr("tests.world.plugins.DIAL_TIMEOUT", 0.2)
    async with Kubelet(directory) as kubelet:
        if was_killed:
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(directory / "p.sock"))
        with pytest.raises(grpc.aio.AioRpcError, match="failed to dial device plugin"):
            await Plugin(directory, [A], N150, "p.sock").register()

    early = f"{N150} registers {directory / 'p.sock'} before it serves there"
    assert kubelet.violations == ([] if was_killed else [early])


async def test_a_plugin_must_end_its_stream_before_it_registers_again(directory: Path) -> None:
    """A connected socket is refused, and the end of an old stream takes down the new one."""
    async with Kubelet(directory) as kubelet, listed_plugin(kubelet, A) as plugin:
        with pytest.raises(grpc.aio.AioRpcError, match="device plugin already connected"):
            await plugin.register()

        async with another_plugin(kubelet, N150, B, name="new.sock"):
            await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"b"})
            await plugin.stop()
            await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 0})

    assert len(kubelet.violations) == 2


# -- what no correct plugin does -------------------------------------------------------------------


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
async def test_a_wrong_list_is_a_violation(
    directory: Path, devices: Sequence[pb.Device], what: str
) -> None:
    """Duplicates, impossible IDs, unknown health and negative NUMA nodes are reported."""
    async with Kubelet(directory) as kubelet, listed_plugin(kubelet, *devices):
        (violation,) = kubelet.violations
        assert what in violation


SHARED = [device("one::0"), device("one::1")]


@pytest.mark.parametrize(
    ("devices", "chips", "other", "is_violation"),
    [
        ([A, B], ["1", "2"], N150, False),
        ([A, B], ["1,2", "2,3"], N150, True),
        ([A, B], ["1", "1"], P150, True),
        (SHARED, ["1,2", "2,3,1,4"], N150, False),
        ([device("one::0"), device("two::0")], ["1", "1"], N150, True),
        (SHARED, ["1", "1"], P150, True),
    ],
    ids=[
        "two chips", "a chip in common", "two resources", "replicas of one board",
        "replicas of two devices", "replicas of two resources",
    ],
)  # fmt: skip
async def test_two_pods_that_run_with_one_chip_are_a_violation(
    directory: Path, devices: Sequence[pb.Device], chips: Sequence[str], other: str,
    is_violation: bool,
) -> None:  # fmt: skip
    """Unless both have replicas of one device of one resource; a pod deleted by force runs on."""
    async with contextlib.AsyncExitStack() as stack:
        kubelet = await stack.enter_async_context(Kubelet(directory))
        for resource in dict.fromkeys([N150, other]):
            context = listed_plugin(kubelet, *devices, resource=resource)
            plugin = await stack.enter_async_context(context)
            plugin.envs = {ADDRESSES: chips[resource != N150]}

        await kubelet.admit("first", "main", {N150: 1})
        await kubelet.running("first", "main")
        (taken,) = kubelet.allocated(N150)
        kubelet.force_delete("first")
        plugin.envs = {ADDRESSES: chips[1]}
        plugin.send(*(each for each in devices if taken != each.ID))
        await kubelet.wait_for(lambda: taken not in kubelet.healthy(other))

        await kubelet.admit("second", "main", {other: 1})
        await kubelet.running("second", "main")

        assert bool(kubelet.violations) is is_violation, kubelet.violations

        kubelet.violations.clear()
        kubelet.end("first")
        kubelet.crash("second", "main")
        await kubelet.running("second", "main")

        assert kubelet.violations == []


# -- pods ------------------------------------------------------------------------------------------


async def test_a_running_pod_that_is_rejected_at_a_start_was_killed(directory: Path) -> None:
    """`killed` names it, so that a test can assert that no pod was killed."""
    async with Kubelet(directory) as kubelet, listed_plugin(kubelet, A) as plugin:
        await kubelet.admit("pod", "main", {N150: 1})
        await kubelet.running("pod", "main")

        for health, killed in (("Healthy", []), ("Unhealthy", ["pod"])):
            await kubelet.kill()
            await plugin.stop()
            kubelet.corrupt("missing")
            await kubelet.start()

            plugin.devices = [device("a", health)]
            await plugin.serve()
            await plugin.register()
            await kubelet.wait_for(lambda: kubelet.pods.sources_ready)

            assert kubelet.killed == killed
