"""Container edits: exactly what a container needs to use the devices that it was given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from ttdp import Chip, Device, Mount, Settings


def device(bdf: str, ordinal: int, dev_root: str = "/dev") -> Device:
    path = f"{dev_root}/tenstorrent/{ordinal}"
    chip = Chip(ttdp.PciFunction(bdf, "wormhole", "n150", None, ordinal, path, "/sys/devices/x"), asic_id="A" * 16)
    return Device(bdf, (chip,))


# Ordinals run against the addresses, as a reload of the driver can leave them.
THREE = [device("0000:c1:00.0", 0), device("0000:0a:00.0", 1), device("0000:03:00.0", 7)]


def edits(
    devices: list[Device], style: Any = "bdf", mounts: tuple[Mount, ...] = (), **others: Any
) -> pb.ContainerAllocateResponse:
    settings = Settings(visible_devices=style, **others)
    return ttdp.container_edits(devices, settings, mounts, None, lambda function: function.path)


def nodes(edits: pb.ContainerAllocateResponse) -> list[tuple[str, str, str]]:
    return [(node.host_path, node.container_path, node.permissions) for node in edits.devices]


@pytest.mark.parametrize(
    ("style", "value"),
    [("bdf", "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"), ("index", "0,1,2"), ("none", None)],
)
def test_visible_devices_in_each_style(style: Any, value: str | None) -> None:
    """Addresses, positions inside the container (never the host's numbers), or nothing."""
    environment = edits(THREE, style).envs
    assert environment.get("TT_VISIBLE_DEVICES") == value
    assert (
        edits(THREE[:1], style).envs.get("TT_VISIBLE_DEVICES")
        == ({"bdf": "0000:c1:00.0", "index": "0", "none": None}[style])
    )


@pytest.mark.parametrize("style", ["bdf", "index", "none"])
def test_the_allocated_addresses_are_always_told(style: Any) -> None:
    """TT_DEVICE_PLUGIN_DEVICES is there under every style, and nothing but these two variables."""
    environment = edits(THREE, style).envs
    assert environment["TT_DEVICE_PLUGIN_DEVICES"] == "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"
    assert set(environment) - {"TT_VISIBLE_DEVICES"} == {"TT_DEVICE_PLUGIN_DEVICES"}


def test_the_order_of_the_request_does_not_matter() -> None:
    """Nodes and variables are in the order of the addresses, by number, however the kubelet asks."""
    wanted = edits(THREE)
    assert [node.container_path for node in wanted.devices] == [f"/dev/tenstorrent/{n}" for n in (7, 1, 0)]
    for order in itertools.permutations(THREE):
        assert edits(list(order)) == wanted


def test_a_node_has_the_hosts_number_inside_the_container() -> None:
    """Read and write, but no mknod; tt-umd names its locks after the number."""
    assert nodes(edits(THREE[2:])) == [("/dev/tenstorrent/7", "/dev/tenstorrent/7", "rw")]


def test_what_a_node_is_called_on_the_host_is_another_matter() -> None:
    """Inside the container everything is where software looks for it, by whatever path the runtime finds it."""
    moved = ttdp.container_edits(THREE[2:], Settings(), (), None, lambda function: f"/host/by-pci/{function.bdf}")
    assert nodes(moved) == [("/host/by-pci/0000:03:00.0", "/dev/tenstorrent/7", "rw")]


def test_the_answer_to_the_kubelet_says_this_and_nothing_else() -> None:
    """Variables, nodes and mounts; no annotations, and no CDI devices beside the nodes."""
    answer = edits(THREE[2:], mounts=(Mount("/srv/m", "/m", True),))
    assert dict(answer.envs) == {
        "TT_DEVICE_PLUGIN_DEVICES": "0000:03:00.0",
        "TT_VISIBLE_DEVICES": "0000:03:00.0",
    }
    assert nodes(answer) == [("/dev/tenstorrent/7", "/dev/tenstorrent/7", "rw")]
    assert [(m.host_path, m.container_path, m.read_only) for m in answer.mounts] == [("/srv/m", "/m", True)]
    assert not answer.annotations and not answer.cdi_devices
