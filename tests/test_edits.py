"""Container edits: exactly what a container needs to use the devices that it was given."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import chip
from ttdp import Chip, Edits, Mount, Settings

# Ordinals run against the addresses, as a reload of the driver can leave them.
THREE = [chip(0xC1, ordinal=0), chip(0x0A, ordinal=1), chip(0x03, ordinal=7)]
ADDRESSES = "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"
MOUNTS = (Mount("/srv/m", "/m", True), Mount("/run/locks/n150", "/dev/shm"))


def edits(chips: list[Chip], links: Mapping[str, str] | None = None, **settings: Any) -> Edits:
    return ttdp.container_edits(chips, links or {}, Settings(**settings), MOUNTS)


def device_files(answer: Edits) -> list[tuple[str, str, str]]:
    return [(each.host_path, each.container_path, each.permissions) for each in answer.devices]


def mounts(answer: Edits) -> list[tuple[str, str, bool]]:
    return [(each.host_path, each.container_path, each.read_only) for each in answer.mounts]


@pytest.mark.parametrize(
    ("style", "of_three", "of_one"),
    [("bdf", ADDRESSES, "0000:c1:00.0"), ("index", "0,1,2", "0"), ("none", None, None)],
)
def test_visible_devices_has_three_settings(
    style: str, of_three: str | None, of_one: str | None
) -> None:
    """Addresses, positions inside the container (never the host's numbers), or not set."""
    for chips, value in ((THREE, of_three), (THREE[:1], of_one)):
        variables = edits(chips, visible_devices=style).envs
        assert variables.get("TT_VISIBLE_DEVICES") == value
        addresses = ",".join(sorted(each.bdf for each in chips))
        assert variables["TT_DEVICE_PLUGIN_DEVICES"] == addresses, "always set"


def test_the_order_of_the_request_does_not_matter() -> None:
    """Device files and variables are in the order of the addresses."""
    wanted = edits(THREE)
    assert [each.container_path[-1] for each in wanted.devices] == ["7", "1", "0"]
    assert all(edits([*order]) == wanted for order in itertools.permutations(THREE))


def test_an_answer_has_the_device_file_the_mounts_and_two_variables_and_nothing_else() -> None:
    """Read and write but no mknod; on the host by udev's link if there is one."""
    answer = edits(THREE[1:], {"0000:03:00.0": "/dev/tenstorrent/by-pci/0000:03:00.0"})
    assert device_files(answer) == [
        ("/dev/tenstorrent/by-pci/0000:03:00.0", "/dev/tenstorrent/7", "rw"),
        ("/dev/tenstorrent/1", "/dev/tenstorrent/1", "rw"),
    ]
    assert mounts(answer) == [("/srv/m", "/m", True), ("/run/locks/n150", "/dev/shm", False)]
    assert answer.envs.keys() == {"TT_DEVICE_PLUGIN_DEVICES", "TT_VISIBLE_DEVICES"}
    assert not answer.annotations and not answer.cdi_devices


def test_the_strategy_cdi_names_cdi_devices_instead_of_device_files() -> None:
    """With the same variables; the caller leaves configured mounts to the CDI file."""
    answer = edits(THREE, device_list_strategy="cdi", resource_domain="a.b")
    names = [f"a.b/device={bdf}" for bdf in ADDRESSES.split(",")]
    assert [device.name for device in answer.cdi_devices] == names
    assert answer.envs == edits(THREE).envs and not answer.devices


@pytest.mark.parametrize(
    ("target", "is_used"),
    [("../7", True), ("{file}", True), ("../8", False), ("/dev/null", False), (None, False)],
)
def test_a_link_is_used_if_it_points_to_the_chips_device_file_now(
    tmp_path: Path, target: str | None, is_used: bool
) -> None:
    """A runtime resolves it at each start of the container."""
    directory = tmp_path / "tenstorrent/by-pci"
    directory.mkdir(parents=True)
    link = directory / "0000:03:00.0"
    function = chip(3, ordinal=7).function._replace(path=f"{tmp_path}/tenstorrent/7")
    if target:
        link.symlink_to(target.format(file=function.path))
    found = ttdp.link_path(Settings(dev_root=str(tmp_path)), function)
    assert found == (str(link) if is_used else None)


# -- mounts ----------------------------------------------------------------------------------------


def test_the_default_mounts_are_below_dev_root_and_only_if_they_exist(tmp_path: Path) -> None:
    """The hugepages, in the container under their usual path."""
    settings = Settings(dev_root=str(tmp_path))
    assert ttdp.existing_mounts(settings) == ()
    (tmp_path / "hugepages").mkdir()
    found = ttdp.existing_mounts(settings)
    assert found == (Mount(f"{tmp_path}/hugepages", "/dev/hugepages", False),)
    (tmp_path / "hugepages-1G").mkdir()
    containers = [each.container for each in ttdp.existing_mounts(settings)]
    assert containers == ["/dev/hugepages-1G", "/dev/hugepages"]


def test_a_configured_mount_replaces_the_default_ones_and_need_not_exist(tmp_path: Path) -> None:
    """A container with a mount that does not exist fails visibly."""
    (tmp_path / "hugepages").mkdir()
    mount = Mount("/does/not/exist", "/x")
    assert ttdp.existing_mounts(Settings(dev_root=str(tmp_path), mounts=(mount,))) == (mount,)
