"""Resources: what devices are called, which of them share an ID, and what of them stays when a chip is away."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.node import CARDS
from ttdp import Chip, Fault, Health, Settings, Telemetry

ASIC, OTHER_ASIC = "3B1D7A5620E41F08", "9F02C4B77A10E301"
STRATEGIES = ("bdf", "asic", "index")


def device(bdf: str, ordinal: int = 0, *, arch: Any = "wormhole", pci_card: str | None = "n150", **known: Any) -> Chip:
    """A device at an address; it is listed, and there, unless told."""
    path = f"/dev/tenstorrent/{ordinal}"
    return Chip(ttdp.PciFunction(bdf, arch, pci_card, None, ordinal, path, "/sys/devices/x"), listed=True, **known)


def identifiers(devices: list[Chip], strategy: Any) -> dict[str, str]:
    """Address by ID, over all resources."""
    listed = ttdp.resources(devices, Settings(device_id_strategy=strategy))
    return {key: one.chips[0].bdf for resource in listed.values() for key, one in resource.devices.items()}


# -- names -------------------------------------------------------------------------------------------------------------

NAMES = {  # card: board and architecture
    "n150": ("n150", "wormhole"), "n300": ("n300", "wormhole"), "galaxy-wormhole": ("galaxy-wormhole", "wormhole"),
    "p100": ("p100", "blackhole"), "p100a": ("p100", "blackhole"),
    "p150a": ("p150", "blackhole"), "p150b": ("p150", "blackhole"), "p150c": ("p150", "blackhole"),
    "p300a": ("p300", "blackhole"), "p300b": ("p300", "blackhole"), "p300c": ("p300", "blackhole"),
    "galaxy-blackhole": ("galaxy-blackhole", "blackhole"),
}  # fmt: skip


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_a_name_under_each_naming(card: str) -> None:
    """Its board (without the trailing letter), its exact type, or its architecture, told by PCI or by the firmware."""
    board, arch = NAMES[card]
    by_pci = device("0000:01:00.0", arch=arch, pci_card=card)
    by_firmware = device("0000:01:00.0", arch=arch, pci_card=None, card=card)
    for naming, name in (("board", board), ("card", card), ("arch", arch)):
        settings = Settings(resource_domain="example.org", resource_naming=naming)  # type: ignore[arg-type]
        assert (
            ttdp.resource_name(by_pci, settings) == ttdp.resource_name(by_firmware, settings) == f"example.org/{name}"
        )


def test_the_firmware_knows_better_than_pci() -> None:
    """A card type that arrives late and says something else moves the device to the right resource."""
    silent = device("0000:01:00.0", arch="blackhole", pci_card="p150a")
    spoken = ttdp.with_identity(silent, Telemetry(card="p300c"))
    assert list(ttdp.resources([silent], Settings())) == ["tenstorrent.com/p150"]
    assert list(ttdp.resources([spoken], Settings())) == ["tenstorrent.com/p300"]


@hypothesis_settings(deadline=None)
@given(st.text(max_size=80) | st.from_regex(r"[a-z0-9-]{1,80}", fullmatch=True) | st.from_regex(r"[a-z]+[0-9]+[a-z]"))
def test_whatever_a_firmware_calls_its_card_the_name_is_valid(card: str) -> None:
    """At most 63 characters of those that Kubernetes takes, with an alphanumeric one at both ends."""
    spoken = ttdp.with_identity(device("0000:01:00.0"), ttdp.parse_telemetry({"tt_card_type": card}))
    for naming in ("board", "card", "arch"):
        settings = Settings(resource_naming=naming)
        (name,) = ttdp.resources([spoken], settings)
        assert re.fullmatch(r"tenstorrent\.com/[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", name)


def test_no_devices_are_no_resources() -> None:
    """A resource exists only with a device."""
    assert ttdp.resources([], Settings()) == {}


def test_cards_of_one_board_type_are_one_resource_in_the_order_of_addresses() -> None:
    """By number, not by text: domain, bus, device, function."""
    order = ["0000:02:00.0", "0000:0a:00.0", "0000:0a:00.1", "0000:10:00.0", "0001:01:00.0", "10000:01:00.0"]
    mixed = [
        device(bdf, arch="blackhole", pci_card=card) for bdf, card in zip(order, ["p150a", "p150b"] * 3, strict=True)
    ]
    random.Random(0).shuffle(mixed)
    resources = ttdp.resources(mixed, Settings())
    assert {name: list(resource.devices) for name, resource in resources.items()} == {"tenstorrent.com/p150": order}


def test_the_healthy_ones_are_counted() -> None:
    """For the status line: devices that are healthy, of all that are listed."""
    ill = replace(device("0000:02:00.0"), health=Health(fault=Fault.HOT, reason="too hot"))
    (resource,) = ttdp.resources([device("0000:01:00.0"), ill], Settings()).values()
    assert (resource.healthy, len(resource.devices)) == (1, 2)


# -- IDs ---------------------------------------------------------------------------------------------------------------


def test_an_id_is_the_address_the_asic_or_the_ordinal() -> None:
    """As the strategy says; the ASIC's with its architecture, as udev's by-id names have it."""
    wormhole = device("0000:01:00.0", 3, asic_id=ASIC)
    blackhole = device("0000:02:00.0", 0, arch="blackhole", pci_card="p150a", asic_id=OTHER_ASIC)
    wanted = {
        "bdf": ["0000:01:00.0", "0000:02:00.0"],
        "asic": [f"wormhole-{ASIC}", f"blackhole-{OTHER_ASIC}"],
        "index": ["3", "0"],
    }
    for strategy, names in wanted.items():
        assert identifiers([wormhole, blackhole], strategy) == dict(zip(names, wanted["bdf"], strict=True))


def test_an_asic_that_is_not_told_yet_is_its_address() -> None:
    """Silent firmware, or a driver before 2.1."""
    assert identifiers([device("0000:01:00.0")], "asic") == {"0000:01:00.0": "0000:01:00.0"}


def test_two_present_chips_with_one_asic_id_are_their_addresses() -> None:
    """Neither may hide the other; a third keeps the name that it has alone."""
    twins = [device("0000:01:00.0", 0, asic_id=ASIC), device("0000:02:00.0", 1, asic_id=ASIC)]
    third = device("0000:03:00.0", 2, asic_id=OTHER_ASIC)
    assert list(identifiers([*twins, third], "asic")) == ["0000:01:00.0", "0000:02:00.0", f"wormhole-{OTHER_ASIC}"]


def test_a_card_that_moved_is_listed_once_where_it_is() -> None:
    """Under `asic` the ID follows the card to its new slot; under `bdf` the old slot stays, unhealthy."""
    old = replace(device("0000:01:00.0", 0, asic_id=ASIC), present=False)
    new = device("0000:02:00.0", 0, asic_id=ASIC)
    assert identifiers([old, new], "asic") == {f"wormhole-{ASIC}": "0000:02:00.0"}
    assert list(identifiers([old, new], "bdf")) == ["0000:01:00.0", "0000:02:00.0"]


def test_an_ordinal_that_was_reused_is_the_present_device() -> None:
    """A freed number is given to the next comer at once; the device that had it is left out until it is back."""
    old = replace(device("0000:01:00.0", 0), present=False)
    new = device("0000:02:00.0", 0)
    assert identifiers([old, new], "index") == {"0": "0000:02:00.0"}
    assert identifiers(
        [replace(old, present=True), replace(new, function=replace(new.function, ordinal=1))], "index"
    ) == {
        "0": "0000:01:00.0",
        "1": "0000:02:00.0",
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_vanished_device_stays_under_its_id_and_its_resource(strategy: Any) -> None:
    """What was once listed does not leave the list: it would leave the node's capacity."""
    there = device("0000:01:00.0", 4, asic_id=ASIC, card="n300")
    away = replace(there, present=False)
    before, after = (ttdp.resources([one], Settings(device_id_strategy=strategy)) for one in (there, away))
    assert {name: list(r.devices) for name, r in before.items()} == {name: list(r.devices) for name, r in after.items()}


some_devices = st.lists(
    st.builds(
        lambda bus, ordinal, asic_id, present: replace(
            device(f"0000:{bus:02x}:00.0", ordinal, asic_id=asic_id), present=present
        ),
        st.integers(1, 8), st.integers(0, 3), st.sampled_from([None, ASIC, OTHER_ASIC]), st.booleans(),
    ),
    max_size=6, unique_by=lambda one: one.bdf,
)  # fmt: skip


@hypothesis_settings(deadline=None)
@given(some_devices, st.sampled_from(STRATEGIES), st.randoms())
def test_every_present_device_has_exactly_one_id(devices: list[Chip], strategy: Any, order: random.Random) -> None:
    """However ordinals and ASIC IDs are mixed up: short and unique IDs, the same in whatever order devices come."""
    found = identifiers(devices, strategy)
    assert sorted(found.values()) == sorted(set(found.values()))
    assert {one.bdf for one in devices if one.present} <= set(found.values()) <= {one.bdf for one in devices}
    assert all(0 < len(identifier) <= 63 for identifier in found)
    order.shuffle(devices)
    assert identifiers(devices, strategy) == found


# -- the list that the kubelet gets ------------------------------------------------------------------------------------


def test_the_list_tells_health_and_numa_node_where_it_is_known() -> None:
    """Node 0 is a node; a device of unknown locality has no topology at all."""
    ill = replace(device("0000:02:00.0", 1), health=Health(fault=Fault.STALLED, reason="stalled"))
    near = replace(device("0000:03:00.0", 2), function=replace(device("0000:03:00.0").function, numa_node=0))
    (resource,) = ttdp.resources([device("0000:01:00.0"), ill, near], Settings()).values()
    listed = ttdp.device_list(resource).devices
    assert [(d.ID, d.health) for d in listed] == [
        ("0000:01:00.0", "Healthy"), ("0000:02:00.0", "Unhealthy"), ("0000:03:00.0", "Healthy"),
    ]  # fmt: skip
    assert [d.HasField("topology") for d in listed] == [False, False, True]
    assert [node.ID for node in listed[2].topology.nodes] == [0]
