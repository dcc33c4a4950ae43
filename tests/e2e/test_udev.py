"""The driver and the links by PCI address, with a real kernel and udev, in a virtual machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import vm
from tests.e2e.container import optional

SUITE = "trixie"
FUNCTIONS = ("10.0", "11.0", "12.0")


@pytest.fixture(scope="module")
def steps(deb: Path) -> vm.Steps:
    """The output of guest.py, by step."""
    with optional():
        said = vm.run(SUITE, deb, Path(__file__).with_name("guest.py"), FUNCTIONS)
    return vm.steps(said)


def assert_links_lead_to_their_chips(step: dict[str, Any], number: int = len(FUNCTIONS)) -> None:
    assert len(step["chips"]) == number and step["links"] == step["chips"], step


def test_the_driver_is_loaded_before_the_daemon_starts(steps: vm.Steps) -> None:
    """systemd-modules-load does it, by the package's file; the links exist at the start."""
    boot = steps["boot"]
    assert 0 < boot["loaded"] < boot["began"] and not boot["failed"], boot
    assert_links_lead_to_their_chips(boot)


def test_links_follow_their_chips(steps: vm.Steps) -> None:
    """They come and go with the driver's functions, also if chips get other numbers."""
    assert_links_lead_to_their_chips(steps["two unbound"], 1)
    before, after = steps["boot"], steps["bound in the other order"]
    assert_links_lead_to_their_chips(after)
    assert before["chips"] != after["chips"], "the driver has given the same numbers again"
    assert steps["driver unloaded"]["directory"] is None
    assert_links_lead_to_their_chips(steps["driver loaded"])


def test_links_come_and_go_with_the_package(steps: vm.Steps) -> None:
    """An installation makes them for existing cards; a removal leaves only the device files."""
    assert not steps["without the rule"]["links"]
    assert_links_lead_to_their_chips(steps["installed with cards there"])
    purged = steps["purged"]
    assert purged["directory"] == sorted(purged["chips"].values()) and not purged["links"], purged


def test_the_first_installation_loads_the_driver(steps: vm.Steps) -> None:
    """Without an error if the driver is blacklisted or not installed."""
    assert_links_lead_to_their_chips(steps["installed with the driver not loaded"])
    for reason in (
        "with the driver not loaded",
        "with the driver not wanted",
        "without the driver",
    ):
        step = steps[f"installed {reason}"]
        assert step["said"] == "status 0" and step["errors"] == "", step
        assert bool(step["chips"]) == (reason == "with the driver not loaded"), step
    # Nor does the boot fail without the driver.
    assert "Failed to find module 'tenstorrent'" in steps["without the driver"]["journal"]
