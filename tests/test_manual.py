"""The man page names exactly what the program has; its options are generated."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import ttdp
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, Installation, outlet_flags

PAGE = (ROOT / "packaging/deb/tt-device-plugin.8").read_text()


def section(name: str) -> str:
    return re.split(r"(?m)^\.Sh ", PAGE.split(f"\n.Sh {name}\n")[1])[0]


@pytest.fixture
def node(short_tmp: Path) -> SimulatedNode:
    node = SimulatedNode(short_tmp / "node")
    for card in ("n300", "p300c"):
        node.add(card, numa_node=0)
    return node


def test_every_fault() -> None:
    """DIAGNOSTICS has an entry for each kind, and for chips that are withheld."""
    kinds = re.findall(r"(?m)^\.It Sy (\w+) : ", section("DIAGNOSTICS"))
    assert {*kinds} == {fault.value for fault in ttdp.Fault} | {"withheld"}
    text = " ".join(section("DIAGNOSTICS").split())
    for remedy in ttdp.REMEDIES.values():
        command = remedy.command.replace("{bdf}", "ADDRESS")
        assert f"{ttdp.Reason('', remedy.condition, command)} " in f"{text} "


def test_every_metric() -> None:
    named = re.findall(r"(?m)^\.It Li (tt_\w+)", section("METRICS"))
    chips = {f"tt_device_{name}" for name in ttdp.CHIP_METRICS}
    assert {*named} == chips | {f"tt_{name}" for name in ttdp.PLUGIN_METRICS}


def test_every_exit_status() -> None:
    trees = (ROOT / "packaging/trees.py").read_text()
    statuses = {value for name, value in vars(ttdp).items() if name.startswith("EXIT_")}
    statuses |= {int(value) for value in re.findall(r"(?m)^EXIT_\w+ = (\d+)", trees)}
    named = re.findall(r"(?m)^\.It (\d+)$", section("EXIT STATUS"))
    assert {*map(int, named)} == statuses | {0, 1, 2}


def test_every_json_key(node: SimulatedNode, short_tmp: Path) -> None:
    command, environ = Installation(short_tmp).command(
        "list", "--json", *node.flags, *outlet_flags(short_tmp), f"--device-plugin-dir={short_tmp}"
    )
    row = json.loads(subprocess.check_output(command, env=environ, text=True))[0]
    assert re.findall(r"(?m)^\.It Li (\w+)$", section("JSON")) == [*row]


async def test_every_label(node: SimulatedNode, short_tmp: Path) -> None:
    directory = short_tmp / "device-plugins"
    directory.mkdir()
    (short_tmp / "features.d").mkdir()
    with Ticker(node):
        async with Installation(short_tmp).daemon(node, directory) as daemon:
            await daemon.ready()
            features = (short_tmp / "features.d/tt-device-plugin").read_text()
    written = re.findall(r"(?m)^tenstorrent\.com/(?:[np]300(?=\.))?([^=]+)=", features)
    named = re.findall(r"(?m)^\.It Li tenstorrent\.com/(?:NAME)?(\S+)$", section("LABELS"))
    assert {*named} == {*written}
