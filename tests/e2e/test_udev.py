"""The driver and the links by PCI address, with a real kernel and udev, in a virtual machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import vm
from tests.e2e.container import optional
from tests.e2e.steps import JSON, Steps

GUEST = vm.Guest(
    script="udev_guest",
    suite="trixie",
    platform=vm.amd64("bookworm"),
    functions=("10.0", "11.0", "12.0"),
)
# What udevadm tells if udev takes longer than the five seconds that postinst waits for it.
SLOW = "Timed out while waiting for udev queue to empty."


@pytest.fixture(scope="module")
def steps(deb: Path) -> Steps:
    with optional():
        return vm.run(GUEST, deb)


def assert_links_lead_to_their_chips(found: JSON, number: int = len(GUEST.functions)) -> None:
    assert len(found["chips"]) == number and found["links"] == found["chips"], found


def test_the_driver_is_loaded_before_the_daemon_starts(steps: Steps) -> None:
    """systemd-modules-load does it, by the package's file; the links exist at the start."""
    boot = steps["boot"]
    assert 0 < boot["loaded"] < boot["began"] and not boot["failed units"], boot
    assert_links_lead_to_their_chips(boot)


def test_links_follow_their_chips(steps: Steps) -> None:
    """They come and go with the driver's functions, also if chips get other numbers."""
    assert_links_lead_to_their_chips(steps["two unbound"], 1)
    before, after = steps["boot"], steps["bound in the other order"]
    assert_links_lead_to_their_chips(after)
    assert before["chips"] != after["chips"], "the driver has given the same numbers again"

    assert steps["driver unloaded"]["directory"] is None
    assert_links_lead_to_their_chips(steps["driver loaded"])


def test_links_come_and_go_with_the_package(steps: Steps) -> None:
    """An installation makes them for existing cards; a removal leaves only the device files."""
    assert not steps["without the rule"]["links"]
    assert_links_lead_to_their_chips(steps["installed with cards there"])

    purged = steps["purged"]
    assert len(purged["chips"]) == len(GUEST.functions)
    assert purged["directory"] == sorted(purged["chips"].values()) and not purged["links"], purged


@pytest.mark.parametrize(
    ("reason", "is_loaded"),
    [
        ("with the driver not loaded", True),
        ("with the driver not wanted", False),
        ("without the driver", False),
    ],
)
def test_the_first_installation_loads_the_driver(
    steps: Steps, reason: str, is_loaded: bool
) -> None:
    """Without an error if the driver is blacklisted or not installed."""
    found = steps[f"installed {reason}"]
    said = [line for line in found["said"].splitlines() if line != SLOW]
    assert said == ["status 0"] and found["errors"] == "", found
    assert_links_lead_to_their_chips(found, len(GUEST.functions) if is_loaded else 0)


def test_a_boot_without_the_driver(steps: Steps) -> None:
    """That it is not installed is one line in the journal."""
    assert "Failed to find module 'tenstorrent'" in steps["booted without the driver"]["said"]
