"""The reference kubelet sees what a plugin does wrong: the daemon's tests rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import grpc
import pytest

from tests.world.kubelet import Kubelet
from tests.world.pods import ADDRESSES
from tests.world.reference import Plugin

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"


@pytest.fixture
async def kubelet(directory: Path) -> AsyncIterator[Kubelet]:
    """Give a kubelet that can have violations."""
    async with Kubelet(directory) as running:
        yield running


async def test_a_plugin_must_serve_before_it_registers(kubelet: Kubelet) -> None:
    """Its registration would come a second late."""
    plugin = Plugin(kubelet, N150)
    registering = asyncio.create_task(plugin.register())
    await kubelet.wait_for(lambda: kubelet.find("early"))
    await plugin.serve()
    await registering

    assert kubelet.violations == [f"{N150} registers before it serves"]
    await plugin.stop()


async def test_a_plugin_must_end_its_stream_before_it_registers_again(kubelet: Kubelet) -> None:
    """A connected socket is refused, and the end of an old stream takes down the new one."""
    async with Plugin(kubelet, N150, "a") as plugin:
        with pytest.raises(grpc.aio.AioRpcError, match="device plugin already connected"):
            await plugin.register()

        async with Plugin(kubelet, N150, "b", name="new.sock"):
            await kubelet.wait_for(lambda: kubelet.healthy(N150) == {"b"})
            await plugin.stop()
            await kubelet.wait_for(lambda: kubelet.allocatable() == {N150: 0})

    assert len(kubelet.violations) == 2


@pytest.mark.parametrize(
    ("one", "other", "is_violation"),
    [
        ((N150, "a", "1"), (N150, "b", "2"), False),
        ((N150, "a", "1,2"), (N150, "b", "2,3"), True),
        ((N150, "a", "1"), (P150, "a", "1"), True),
        ((N150, "a::0", "1,2"), (N150, "a::1", "1,2"), False),
        ((N150, "a::0", "1"), (N150, "b::0", "1"), True),
        ((N150, "a::0", "1"), (P150, "a::1", "1"), True),
    ],
    ids=["chips", "overlap", "resources", "replicas", "replicas of two", "replicas, resources"],
)
async def test_two_pods_that_run_with_one_chip_are_a_violation(
    kubelet: Kubelet, one: tuple[str, str, str], other: tuple[str, str, str], is_violation: bool
) -> None:
    """Unless both have replicas of one device of one resource; a pod deleted by force runs on."""
    for resource, ident, chips in (one, other):
        async with Plugin(kubelet, resource, ident) as plugin:
            plugin.envs = {ADDRESSES: chips}
            await kubelet.run_pod(ident, resource)
            kubelet.force_delete(ident)
        await kubelet.wait_for(lambda: not kubelet.healthy(resource))  # noqa: B023
    assert bool(kubelet.violations) is is_violation, kubelet.violations


@pytest.mark.parametrize(
    ("checkpoint", "listed", "health", "killed", "violations"),
    [
        ("missing", "a", "Healthy", [], 0),
        ("missing", "a", "Unhealthy", ["pod"], 0),
        (None, "a", "Unhealthy", [], 0),
        (None, "b", "Healthy", [], 1),
    ],
)
async def test_a_start_kills_a_running_pod_or_the_kubelet_for_what_is_listed(
    kubelet: Kubelet, checkpoint: Literal["missing"] | None, listed: str, health: str,
    killed: list[str], violations: int,
) -> None:  # fmt: skip
    """`killed` names a pod whose device is Unhealthy; it is a violation not to list the device."""
    async with Plugin(kubelet, N150, "a"):
        await kubelet.run_pod("pod", N150)
        await kubelet.kill()
    if checkpoint:
        kubelet.corrupt(checkpoint)
    await kubelet.start()

    async with Plugin(kubelet, N150, listed, health=health):
        await kubelet.wait_for(lambda: kubelet.pods.sources_ready)
    assert (kubelet.killed, len(kubelet.violations)) == (killed, violations)
