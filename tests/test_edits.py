"""Container edits: exactly what a container needs to use the devices that it was given."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from ttdp import Chip, Mount, PciFunction, Settings


def chip(bdf: str, ordinal: int, dev: str = "/nowhere") -> Chip:
    path = f"{dev}/tenstorrent/{ordinal}"
    return Chip(PciFunction(bdf, "wormhole", "n150", None, ordinal, path, "/sys/devices/x"))


# Ordinals run against the addresses, as a reload of the driver can leave them.
THREE = [chip("0000:c1:00.0", 0), chip("0000:0a:00.0", 1), chip("0000:03:00.0", 7)]
IN_ORDER = "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"


def edits(
    chips: list[Chip], *mounts: Mount, locks: str | None = None, **settings: Any
) -> pb.ContainerAllocateResponse:
    return ttdp.container_edits(chips, Settings(dev_root="/nowhere", **settings), mounts, locks)


def nodes(answer: pb.ContainerAllocateResponse) -> list[tuple[str, str, str]]:
    return [(node.host_path, node.container_path, node.permissions) for node in answer.devices]


def mounts(answer: pb.ContainerAllocateResponse) -> list[tuple[str, str, bool]]:
    return [(each.host_path, each.container_path, each.read_only) for each in answer.mounts]


@pytest.mark.parametrize(
    ("style", "of_three", "of_one"),
    [("bdf", IN_ORDER, "0000:c1:00.0"), ("index", "0,1,2", "0"), ("none", None, None)],
)
def test_visible_devices_in_each_style(
    style: Any, of_three: str | None, of_one: str | None
) -> None:
    """Addresses, positions inside the container (never the host's numbers), or nothing."""
    for chips, value in ((THREE, of_three), (THREE[:1], of_one)):
        variables = edits(chips, visible_devices=style).envs
        assert variables.get("TT_VISIBLE_DEVICES") == value
        addresses = ",".join(sorted(each.bdf for each in chips))
        assert variables["TT_DEVICE_PLUGIN_DEVICES"] == addresses, "is set under every style"


def test_the_order_of_the_request_does_not_matter() -> None:
    """Nodes and variables are in the order of the addresses, however the kubelet asks."""
    wanted = edits(THREE)
    assert [node.container_path[-1] for node in wanted.devices] == ["7", "1", "0"]
    assert all(edits([*order]) == wanted for order in itertools.permutations(THREE))


def test_the_answer_to_the_kubelet_says_this_and_nothing_else() -> None:
    """The node, read and write but no mknod, under the host's number; mounts; two variables."""
    answer = edits(THREE[2:], Mount("/srv/m", "/m", True), locks="/run/locks/n150")
    assert dict(answer.envs) == {
        "TT_DEVICE_PLUGIN_DEVICES": "0000:03:00.0",
        "TT_VISIBLE_DEVICES": "0000:03:00.0",
    }
    assert nodes(answer) == [("/nowhere/tenstorrent/7", "/dev/tenstorrent/7", "rw")]
    assert mounts(answer) == [("/srv/m", "/m", True), ("/run/locks/n150", "/dev/shm", False)]
    assert not answer.annotations and not answer.cdi_devices


def test_by_cdi_nodes_and_mounts_are_left_to_the_description() -> None:
    """Names, the container's own variables, and its locks, which no description can know."""
    plain = edits(THREE, Mount("/srv/m", "/m"), locks="/locks")
    answer = edits(
        THREE,
        Mount("/srv/m", "/m"),
        locks="/locks",
        device_list_strategy="cdi",
        resource_domain="a.b",
    )
    names = [f"a.b/device={bdf}" for bdf in IN_ORDER.split(",")]
    assert [device.name for device in answer.cdi_devices] == names
    assert answer.envs == plain.envs and not answer.devices
    assert mounts(answer) == [("/locks", "/dev/shm", False)]


@pytest.mark.parametrize(
    ("target", "is_named"),
    [("../7", True), ("{node}", True), ("../8", False), ("/dev/null", False), (None, False)],
)
def test_a_node_is_named_by_its_link_if_that_leads_there_now(
    tmp_path: Path, target: str | None, is_named: bool
) -> None:
    """A runtime follows it again at each start; one that leads elsewhere is another chip's."""
    directory = tmp_path / "tenstorrent/by-pci"
    directory.mkdir(parents=True)
    link = directory / "0000:03:00.0"
    node = tmp_path / "tenstorrent/7"
    if target:
        link.symlink_to(target.format(node=node))
    settings = Settings(dev_root=str(tmp_path))
    answer = ttdp.container_edits([chip(link.name, 7, str(tmp_path))], settings, (), None)
    assert nodes(answer) == [(str(link if is_named else node), "/dev/tenstorrent/7", "rw")]
