"""The reference kubelet's checkpoint is what the original's is, and can be damaged in every way."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest

from tests.world.kubelet import Corruption
from tests.world.reference import Bench
from tests.world.stage import device

N150 = "tenstorrent.com/n150"
A = device("a")


@pytest.fixture
async def bench(short_tmp: Path) -> AsyncIterator[Bench]:
    async with Bench(short_tmp / "d") as bench:
        yield bench


async def test_the_file_is_as_the_original_writes_it(bench: Bench) -> None:
    """For root alone; keys in this order; other orders of entries at each writing; UIDs' forms."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, *(device(f"d{n}") for n in range(9)))
    for number in range(4):
        await kubelet.admit(f"pod{number}", "main", {N150: 1}, static=number == 0)
    contents: list[bytes] = []
    for _ in range(8):
        plugin.send(*plugin.devices)
        await kubelet.wait_for(lambda: len(kubelet.find("list")) == len(contents) + 2)
        contents.append(kubelet.file.path.read_bytes())
    assert kubelet.file.path.stat().st_mode & 0o777 == 0o600
    assert contents[0].startswith(b'{"Data":{"PodDeviceEntries":[{"PodUID":"')
    parsed = [json.loads(content)["Data"] for content in contents]
    for key in ("PodDeviceEntries", "RegisteredDevices"):
        assert len({json.dumps(data[key]) for data in parsed}) > 1
    lengths = sorted(len(e["PodUID"].replace("-", "")) for e in parsed[0]["PodDeviceEntries"])
    assert lengths == [32] * 4
    assert sum("-" in entry["PodUID"] for entry in parsed[0]["PodDeviceEntries"]) == 3


@pytest.mark.parametrize("how", [None, *get_args(Corruption)])
async def test_a_damaged_file_counts_as_none(bench: Bench, how: Corruption | None) -> None:
    """A start with it knows of nobody; the next writing replaces it."""
    kubelet = await bench.kubelet()
    plugin = await bench.registered(kubelet, A)
    await kubelet.admit("pod", "main", {N150: 1})
    damages = [how] if how else [text for _, text in kubelet.file.misshapen()]
    for damage in damages:
        await kubelet.kill()
        kubelet.corrupt(damage)
        kubelet.api_server_away()
        await kubelet.start()
        assert kubelet.allocated(N150) == set()
        if how == "directory":
            kubelet.file.path.rmdir()
    await plugin.stop()
    await plugin.serve()
    await plugin.register()
    await kubelet.registered(N150)
    assert json.loads(kubelet.file.path.read_text())["Data"]["PodDeviceEntries"] is None


async def test_writings_overtake_each_other_if_told_to(bench: Bench) -> None:
    """In a burst of messages on several resources, never for good; one stream is in order."""
    kubelet = await bench.kubelet(seed=7)
    names = [f"tenstorrent.com/r{number}" for number in range(6)]
    plugins = [await bench.registered(kubelet, A, resource=name) for name in names]
    kubelet.overtake()
    for plugin in plugins:
        for health in ("Unhealthy", "Healthy") * 4:
            plugin.send(device("a", health))
    await kubelet.admit("pod", "main", {names[0]: 1})
    await kubelet.wait_for(lambda: len(kubelet.find("written")) == 6 + 6 * 8 + 1)
    assert any(event.fields["stale"] for event in kubelet.find("written"))
    snapshot = kubelet.file.read()
    assert snapshot and len(snapshot.entries) == 1 and len(snapshot.registered) == 6
    since = kubelet.find("written")[-1].at
    for health in ("Unhealthy", "Healthy") * 2:
        plugins[0].send(device("a", health))
    await kubelet.wait_for(lambda: len(kubelet.find("written", since=since)) == 5)
    assert not any(event.fields["stale"] for event in kubelet.find("written", since=since)[1:])
