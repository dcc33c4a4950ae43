"""Container edits: exactly what a container needs to use the devices that it was given."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

import ttdp
from ttdp import ContainerEdits, Device, DeviceNode, Mount, Settings

HUGEPAGES = ("/dev/hugepages-1G", "/dev/hugepages")


def device(bdf: str, ordinal: int, dev_root: str = "/dev") -> Device:
    path = f"{dev_root}/tenstorrent/{ordinal}"
    return Device(ttdp.Chip(bdf, "wormhole", "n150", None, ordinal, path, "/sys/devices/x", None), asic_id="A" * 16)


# Ordinals run against the addresses, as a reload of the driver can leave them.
THREE = [device("0000:c1:00.0", 0), device("0000:0a:00.0", 1), device("0000:03:00.0", 7)]


def edits(devices: list[Device], existing: Collection[str] = (), **settings: Any) -> ContainerEdits:
    """The edits on a host where only these paths exist."""
    return ttdp.container_edits(devices, Settings(**settings), existing.__contains__)


@pytest.mark.parametrize(
    ("style", "value"),
    [("bdf", "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"), ("index", "0,1,2"), ("none", None)],
)
def test_visible_devices_in_each_style(style: Any, value: str | None) -> None:
    """Addresses, positions inside the container (never the host's numbers), or nothing."""
    environment = edits(THREE, visible_devices=style).environment
    assert environment.get("TT_VISIBLE_DEVICES") == value
    assert (
        edits(THREE[:1], visible_devices=style).environment.get("TT_VISIBLE_DEVICES")
        == ({"bdf": "0000:c1:00.0", "index": "0", "none": None}[style])
    )


@pytest.mark.parametrize("style", ["bdf", "index", "none"])
@pytest.mark.parametrize("strategy", ["bdf", "asic", "index"])
def test_the_allocated_addresses_are_always_told(style: Any, strategy: Any) -> None:
    """TT_DEVICE_PLUGIN_DEVICES is there under every style and ID strategy, and nothing but these two variables."""
    environment = edits(THREE, visible_devices=style, device_id_strategy=strategy).environment
    assert environment["TT_DEVICE_PLUGIN_DEVICES"] == "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"
    assert environment.keys() - {"TT_VISIBLE_DEVICES"} == {"TT_DEVICE_PLUGIN_DEVICES"}


def test_the_order_of_the_request_does_not_matter() -> None:
    """Nodes and variables are in the order of the addresses, by number, however the kubelet asks."""
    wanted = edits(THREE)
    assert [node.container for node in wanted.nodes] == [f"/dev/tenstorrent/{n}" for n in (7, 1, 0)]
    for order in itertools.permutations(THREE):
        assert edits(list(order)) == wanted


def test_a_node_has_the_hosts_number_inside_the_container() -> None:
    """Read and write, but no mknod; tt-umd names its locks after the number."""
    assert edits(THREE[2:]).nodes == (DeviceNode("/dev/tenstorrent/7", "/dev/tenstorrent/7", "rw"),)


def test_the_host_path_is_the_link_that_follows_the_chip_where_there_is_one() -> None:
    """A container that starts again gets the chip, not its former number; inside, the node is where it was."""
    link = "/run/tt/by-pci/0000:03:00.0"
    linked = edits([THREE[0], THREE[2]], (link,), runtime_dir="/run/tt")
    assert linked.nodes == (
        DeviceNode(link, "/dev/tenstorrent/7"),
        DeviceNode("/dev/tenstorrent/0", "/dev/tenstorrent/0"),
    )


def test_the_links_lead_to_the_nodes_and_to_nothing_else(tmp_path: Path) -> None:
    """Made, moved when a chip has another number, removed with the chip; what is right is not touched."""
    runtime = str(tmp_path / "run")

    def links(nodes: dict[str, str]) -> dict[str, tuple[str, int]]:
        ttdp.keep_node_links(runtime, nodes)
        found = {path.name: (os.readlink(path), path.lstat().st_ino) for path in (tmp_path / "run/by-pci").iterdir()}
        assert {bdf: target for bdf, (target, _) in found.items()} == nodes
        return found

    first, second, third = (f"0000:0{bus}:00.0" for bus in (1, 2, 3))
    before = links({first: "/dev/tenstorrent/0", second: "/dev/tenstorrent/1"})
    after = links({first: "/dev/tenstorrent/0", second: "/dev/tenstorrent/2", third: "/dev/tenstorrent/1"})
    assert before[first] == after[first]
    assert ttdp.node_link(runtime, third) == f"{runtime}/by-pci/{third}"
    links({third: "/dev/tenstorrent/1"})
    (tmp_path / "run/by-pci/.new").symlink_to("left by a daemon that was killed")
    links({third: "/dev/tenstorrent/0"})
    links({})


def test_the_hugepages_are_mounted_where_the_host_has_them() -> None:
    """Each of the two counts for itself, writable, under the same path."""
    for count in range(3):
        for existing in itertools.combinations(HUGEPAGES, count):
            assert edits(THREE, existing).mounts == tuple(Mount(path, path, False) for path in existing)


def test_own_mounts_replace_the_default_ones() -> None:
    """With any mount in the configuration the hugepages are not added; each counts only while its host path exists."""
    own = (Mount("/srv/models", "/models", True), Mount("/srv/cache", "/cache"))
    assert edits(THREE, (*HUGEPAGES, "/srv/models", "/srv/cache"), mounts=own).mounts == own
    assert edits(THREE, (*HUGEPAGES, "/srv/cache"), mounts=own).mounts == own[1:]
    assert edits(THREE, ("/models", "/cache"), mounts=own).mounts == ()


def test_dev_root_moves_the_hosts_paths_only() -> None:
    """Inside the container everything is where software looks for it."""
    moved = edits(
        [device("0000:01:00.0", 4, "/host/dev")], ("/host/dev/hugepages", "/dev/hugepages-1G"), dev_root="/host/dev"
    )
    assert moved.nodes == (DeviceNode("/host/dev/tenstorrent/4", "/dev/tenstorrent/4"),)
    assert moved.mounts == (Mount("/host/dev/hugepages", "/dev/hugepages"),)


def test_dev_root_does_not_move_own_mounts(tmp_path: Path) -> None:
    """What the configuration names is a path of the host as it stands."""
    own = (Mount("/srv/models", "/srv/models"),)
    assert edits(THREE, ("/srv/models",), mounts=own, dev_root=str(tmp_path)).mounts == own


def test_the_answer_to_the_kubelet_says_the_same() -> None:
    """Every edit, and nothing else, in the API's words."""
    answer = ttdp.container_response(edits(THREE[2:], ("/srv/m",), mounts=(Mount("/srv/m", "/m", True),)))
    assert dict(answer.envs) == {
        "TT_DEVICE_PLUGIN_DEVICES": "0000:03:00.0",
        "TT_VISIBLE_DEVICES": "0000:03:00.0",
    }
    assert [(d.host_path, d.container_path, d.permissions) for d in answer.devices] == [
        ("/dev/tenstorrent/7", "/dev/tenstorrent/7", "rw")
    ]
    assert [(m.host_path, m.container_path, m.read_only) for m in answer.mounts] == [("/srv/m", "/m", True)]
    assert not answer.annotations and not answer.cdi_devices
