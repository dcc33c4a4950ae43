"""Texts for others: container edits, mounts, the CDI file, labels."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, count_calls, decide, hold
from ttdp import Chip, Edits, Hold, Kind, Mount, RequestError, Settings, SharedResource, Sharing

# Ordinals run against the addresses, as a reload of the driver can leave them.
THREE = [chip(0xC1, ordinal=0), chip(0x0A, ordinal=1), chip(0x03, ordinal=7)]
ADDRESSES = "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"
MOUNTS = (Mount("/srv/m", "/m", True), Mount("/run/locks/n150", "/dev/shm"))


def edits(chips: list[Chip], links: Mapping[str, str] | None = None, **settings: Any) -> Edits:
    return ttdp.container_edits(chips, links or {}, Settings(**settings), MOUNTS, "a name")


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


def test_an_answer_has_device_files_mounts_variables_its_name_and_nothing_else() -> None:
    """Read and write but no mknod; on the host by udev's link if there is one; in any order."""
    links = {"0000:03:00.0": "/dev/tenstorrent/by-pci/0000:03:00.0"}

    answer = edits(THREE, links)

    assert [(each.host_path, each.container_path, each.permissions) for each in answer.devices] == [
        ("/dev/tenstorrent/by-pci/0000:03:00.0", "/dev/tenstorrent/7", "rw"),
        ("/dev/tenstorrent/1", "/dev/tenstorrent/1", "rw"),
        ("/dev/tenstorrent/0", "/dev/tenstorrent/0", "rw"),
    ]
    mounts = [(each.host_path, each.container_path, each.read_only) for each in answer.mounts]
    assert mounts == [("/srv/m", "/m", True), ("/run/locks/n150", "/dev/shm", False)]
    assert answer.envs.keys() == {"TT_DEVICE_PLUGIN_DEVICES", "TT_VISIBLE_DEVICES"}
    assert dict(answer.annotations) == {"tenstorrent.com/hold": "a name"}
    assert not answer.cdi_devices
    assert all(edits([*order], links) == answer for order in itertools.permutations(THREE))


def test_the_strategy_cdi_names_cdi_devices_instead_of_device_files() -> None:
    """With the same variables; the caller leaves configured mounts to the CDI file."""
    answer = edits(THREE, device_list_strategy="cdi", resource_domain="a.b")

    names = [f"a.b/device={address}" for address in ADDRESSES.split(",")]
    assert [device.name for device in answer.cdi_devices] == names
    assert answer.envs == edits(THREE).envs and not answer.devices


INVALID, NOT_FOUND, FAILED = "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    ("containers", "code", "reason"),
    [
        ([], INVALID, "names no container"),
        ([[bdf(1)], []], INVALID, "a container requests no devices"),
        ([[bdf(1), bdf(1)]], INVALID, f"duplicate device '{bdf(1)}'"),
        ([[bdf(1)], [bdf(1)]], INVALID, f"duplicate device '{bdf(1)}'"),
        ([[bdf(9)]], NOT_FOUND, f"tenstorrent.com/n150 has no device '{bdf(9)}'"),
        ([["x" * 100_000]], NOT_FOUND, "has no device 'x"),
        ([[bdf(2)]], FAILED, f"device {bdf(2)}: it is ill"),
    ],
    ids=["nothing", "no device", "twice", "in two containers", "unknown", "long", "unhealthy"],
)
def test_an_impossible_allocation_is_refused(
    containers: list[list[str]], code: str, reason: str
) -> None:
    """With the code of the cause, and a message of one line."""
    (resource,) = decide([chip(1), chip(2, fault=Kind.HOT)]).resources.values()

    with pytest.raises(RequestError) as refused:
        ttdp.check_request(resource, containers)

    found, message = refused.value.args
    assert found.name == code and reason in message and len(message) < 400


@pytest.mark.parametrize("target", ["../7", "{file}", "../8", None])
def test_a_link_is_used_if_it_points_to_the_chips_device_file_now(
    tmp_path: Path, target: str | None
) -> None:
    """A runtime resolves it at each start of the container."""
    link = tmp_path / "dev/tenstorrent/by-pci" / bdf(3)
    link.parent.mkdir(parents=True)
    function = chip(3, ordinal=7).function._replace(path=f"{tmp_path}/dev/tenstorrent/7")
    if target:
        link.symlink_to(target.format(file=function.path))

    found = ttdp.link_path(Settings(root=str(tmp_path)), function)

    assert found == (str(link) if target in ("../7", "{file}") else None)


def test_the_mounts_of_all_containers_are_the_configured_ones_and_hugepages_that_exist(
    tmp_path: Path,
) -> None:
    """Below root. A configured one need not exist; at the path of another it replaces that."""
    other, instead = Mount("/does/not/exist", "/x"), Mount("/mine", "/dev/hugepages-1G")
    for names in ([], ["hugepages"], ["hugepages-1G", "hugepages"]):
        for name in names:
            (tmp_path / "dev" / name).mkdir(parents=True, exist_ok=True)
        settings = Settings(root=str(tmp_path))
        hugepages = [Mount(f"{tmp_path}/dev/{name}", f"/dev/{name}") for name in names]

        assert ttdp.host_mounts(settings) == (*hugepages,)

        configured = replace(settings, mounts=(other, instead))
        small = [mount for mount in hugepages if mount.container == "/dev/hugepages"]
        assert ttdp.host_mounts(configured) == (other, instead, *small)
        assert ttdp.host_mounts(replace(configured, hugepages="none")) == (other, instead)


def test_the_cdi_file_describes_each_chip_and_all_of_them() -> None:
    """The device file under the host's number, `rw`; for every device the mounts."""
    settings = Settings(resource_domain="example.org")
    one, two = chip(1, ordinal=3).function, chip(2, "p150a", ordinal=0).function
    first, second = (
        {"path": path, "hostPath": path, "permissions": "rw"} for path in (one.path, two.path)
    )

    wanted: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": "example.org/device",
        "devices": [
            {"name": one.bdf, "containerEdits": {"deviceNodes": [first]}},
            {"name": two.bdf, "containerEdits": {"deviceNodes": [second]}},
            {"name": "all", "containerEdits": {"deviceNodes": [first, second]}},
        ],
    }
    assert json.loads(ttdp.cdi_spec([one, two], settings, ()) or "") == wanted

    binds = [
        {"hostPath": each.host, "containerPath": each.container, "options": ["rbind", option]}
        for each, option in zip(MOUNTS, ("ro", "rw"), strict=True)
    ]
    wanted["containerEdits"] = {"mounts": binds}
    assert json.loads(ttdp.cdi_spec([one, two], settings, MOUNTS) or "") == wanted

    assert ttdp.cdi_spec([], settings, MOUNTS) is None, "CDI has no file without devices"


def test_the_cdi_file_has_each_chip_with_a_device_file_healthy_or_not() -> None:
    """Not one whose file is invalid: a container would get another device."""
    invalid = chip(3)
    function = invalid.function._replace(file_fault="/dev/tenstorrent/0 does not exist")
    chips = [chip(1, fault=Kind.HOT), chip(2, present=False), invalid._replace(function=function)]

    spec = ttdp.cdi_file(decide(chips))

    assert ttdp.cdi_nodes(spec or "").keys() == {bdf(1)}


N150 = chip(1, numa_node=0, firmware="19.4.0.0")
P150 = chip(2, "p150a")
PAIR = [chip(bus, "p300c", numa_node=1, serial="1" * 16, firmware="19.5.2.0") for bus in (5, 6)]
HALF = chip(7, "p300c", numa_node=0, serial="2" * 16, firmware="19.5.2.0")


def labels(
    *chips: Chip, holds: tuple[Hold, ...] = (), driver: Any = "2.10.1", **settings: Any
) -> dict[str, str]:
    """The labels of a node with these chips, without the domain."""
    text = ttdp.labels_file(decide(chips, Settings(**settings), holds, driver=driver))
    prefix = f"{settings.get('resource_domain', 'tenstorrent.com')}/"
    return dict(line.removeprefix(prefix).split("=", 1) for line in text.splitlines())


def values(name: str, keys: str, *chips: Chip, **more: Any) -> list[str | None]:
    """The values of these labels of a resource."""
    found = labels(*chips, **more)
    return [found.get(f"{name}.{key}") for key in keys.split()]


def test_a_node_has_labels_for_architectures_resources_and_versions() -> None:
    """A label without a known value is left out."""
    wanted = f"""
        arch.blackhole=true arch.wormhole=true plugin.version={ttdp.__version__}
        driver.version=2.10.1 driver.major=2 driver.minor=10 firmware.version=19.4.0.0
        n150.count=1 n150.product=n150 n150.replicas=1 n150.sharing=false n150.memory=12288
        n150.boards=1 n150.numa-nodes=1
        n150.firmware.version=19.4.0.0 n150.firmware.major=19 n150.firmware.minor=4
        p150.count=1 p150.product=p150 p150.replicas=1 p150.sharing=false p150.memory=32768
        p150.boards=1
    """
    assert labels(N150, P150) == dict(each.split("=") for each in wanted.split())
    assert {"driver.version", "driver.major"}.isdisjoint(labels(N150, driver=None))


def galaxy(card: str = "galaxy-wormhole") -> list[Chip]:
    """The 32 chips of a Galaxy."""
    buses = [tray + position for tray in (0x00, 0x40, 0x80, 0xC0) for position in range(1, 9)]
    return [chip(bus, card, ordinal=number) for number, bus in enumerate(buses)]


def test_a_board_counts_when_all_its_chips_are_present() -> None:
    """Three chips of p300 boards are one whole board, on two NUMA nodes."""
    keys = "count boards memory numa-nodes firmware.minor"

    assert values("p300", keys, *PAIR, HALF) == ["3", "1", "32768", "2", "5"]
    assert values("p300-board", keys, *PAIR, unit="board") == ["1", "1", "65536", "1", "5"]


def test_the_trays_of_a_galaxy_are_boards() -> None:
    """A tray counts when all its chips are present."""
    chips = galaxy()

    assert values("galaxy-wormhole", "count boards", *chips) == ["32", "4"]
    assert values("galaxy-wormhole", "count boards", *chips[1:]) == ["31", "3"]
    of_trays = values("galaxy-wormhole-board", "count boards memory", *chips, unit="board")
    assert of_trays == ["4", "4", str(8 * 12288)]


def test_chips_that_belong_to_no_board_have_no_label() -> None:
    """Four report one serial, so which two are a board is not known."""
    chips = [chip(bus, "p300c", serial="1" * 16) for bus in (1, 2, 3, 4)]

    assert values("p300", "count boards memory", *chips) == ["4", "0", "32768"]
    assert not [key for key in labels(*chips, unit="board") if key.startswith("p300")]


def test_a_galaxy_with_seven_of_eight_memory_tiles_has_less_memory() -> None:
    """PCI subsystem 0x202, in trays like the others; a memory that differs has no label."""
    tray = galaxy("galaxy-blackhole")[:8]
    less = [each._replace(function=each.function._replace(subsystem=0x202)) for each in tray]

    for chips, memory in ((tray, "32768"), (less, "28672"), ([tray[0], *less[1:]], None)):
        assert values("galaxy-blackhole", "memory boards", *chips) == [memory, "1"]
    assert values("galaxy-blackhole-board", "memory", *less, unit="board") == [str(8 * 28672)]


def test_memory_is_that_of_devices_that_are_complete() -> None:
    """Half a board would show less than a device that a pod can get."""
    keys = "count memory"

    assert values("p300-board", keys, HALF, unit="board") == ["1", None]
    assert values("p300-board", keys, *PAIR, HALF, unit="board") == ["2", "65536"]
    absent = chip(6, "p300c", present=False, serial="1" * 16)
    assert values("p300-board", keys, PAIR[0], absent, unit="board") == ["1", "65536"]


def test_devices_count_whether_they_are_healthy_or_not_if_they_exist() -> None:
    """An ID that a pod holds adds none: of the same chip, of a missing one, of another domain."""
    found = labels(chip(2, "p150a", fault=Kind.HOT), chip(1, present=False))
    assert [*map(found.get, ("p150.count", "n150.count", "arch.wormhole"))] == ["1", "0", None]

    old = hold("n150", "0", f"{bdf(1)}::1", buses=[1])
    foreign = hold("example.org/n150", bdf(1), buses=[1])
    missing = hold("n300", bdf(9), buses=[9])
    found = labels(N150, holds=(old, foreign, missing))
    assert found["n150.count"] == "1" and "n300.count" not in found

    found = labels(P150, holds=(foreign,), resource_domain="a.b")
    assert {key.partition(".")[0] for key in found} == {"arch", "driver", "plugin", "p150"}


def test_values_that_differ_are_mixed() -> None:
    """They have no major and minor version."""
    chips = [N150, chip(9, "n300", firmware="19.5.0.0")]
    keys = "product firmware.version firmware.major"
    assert values("wormhole", keys, *chips, resource_naming="arch") == ["mixed", "mixed", None]
    assert labels(*chips)["firmware.version"] == "mixed"


def test_sharing_has_labels() -> None:
    """The product ends in -SHARED if the resource's name does not show it."""
    for entry, name, product in (
        (SharedResource("n150", 4), "n150", "n150-SHARED"),
        (SharedResource("n150", 4, "quarter"), "quarter", "n150"),
    ):
        sharing = Sharing(resources=(entry,))
        found = values(name, "count replicas sharing product", N150, sharing=sharing)
        assert found == ["1", "4", "true", product]

    sharing = Sharing(resources=(SharedResource("n150", 4),))
    gone = chip(1, present=False)
    assert values("n150", "count product", gone, sharing=sharing) == ["0", None]


def test_labels_of_a_hundred_replicas_cost_what_those_of_two_do() -> None:
    """They are made in each round, as the CDI file is."""
    costs = []
    for replicas in (2, 100):
        sharing = Sharing(resources=(SharedResource("n150", replicas),))
        decision = decide([chip(bus) for bus in range(1, 9)], Settings(sharing=sharing))
        ttdp.labels_file(decision)  # what a decision computes is kept
        costs.append(count_calls(partial(ttdp.labels_file, decision)))

    few, many = costs
    assert many < 1.2 * few


@pytest.mark.parametrize(("length", "is_written"), [(57, True), (58, False)])
def test_a_label_whose_name_is_longer_than_kubernetes_allows_is_left_out(
    length: int, is_written: bool
) -> None:
    """63 characters behind the domain: a resource's own name can have as many."""
    name = "x" * length
    sharing = Sharing(resources=(SharedResource("n150", 2, name),))

    assert (f"{name}.count" in labels(N150, sharing=sharing)) is is_written


versions = st.text("aZ019._-+/ \nü😀", max_size=90)


@hypothesis_settings(deadline=None)
@given(versions, versions)
@example("1" * 90, "2" * 90)
def test_labels_are_valid_whatever_versions_are_reported(firmware: str, driver: str) -> None:
    """The API server accepts each name and value."""
    part = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    settings = Settings(sharing=Sharing(resources=(SharedResource("n150", 2, "x" * 58),)))

    text = ttdp.labels_file(decide([chip(1, firmware=firmware)], settings, driver=driver))

    for line in text.splitlines():
        assert re.fullmatch(rf"tenstorrent\.com/{part}={part}", line), line
