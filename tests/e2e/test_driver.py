"""What only a real kernel and udev can show, in a virtual machine: `fix`, the driver, the links.

The driver is loaded at boot and by the installation; the links are by PCI address.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import vm
from tests.e2e.container import optional
from tests.e2e.driver_guest import CHIP
from tests.e2e.steps import JSON, Steps

FUNCTIONS = ("10.0", "11.0", "12.0")
GUEST = vm.Guest(script="driver_guest", suite="trixie", kernel="bookworm", functions=FUNCTIONS)


@pytest.fixture(scope="module")
def steps(deb: Path) -> Steps:
    with optional():
        return vm.run(GUEST, deb)


def assert_links_lead_to_their_chips(found: JSON, number: int = len(FUNCTIONS)) -> None:
    assert len(found["chips"]) == number and found["links"] == found["chips"], found


def test_the_driver_is_loaded_before_the_daemon_starts(steps: Steps) -> None:
    """systemd-modules-load does it, by the package's file; the links exist at the start."""
    boot = steps["boot"]
    assert 0 < boot["loaded"] < boot["began"] and not boot["failed units"], boot
    assert_links_lead_to_their_chips(boot)


# -- fix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step", "mode"),
    [
        # The kernel makes files for root. The driver's udev rules, which are not here, change that.
        ("unbound", "bind the driver to the chip", "0o600"),
        ("kept for another driver", "bind the driver to the chip", "0o600"),
        ("off the bus", "rescan the PCI bus", "0o600"),
        ("driver unloaded", "load the driver", "0o600"),
        ("file removed", "make the device file again", "0o666"),
    ],
)
def test_the_kernel_takes_each_step_of_fix(steps: Steps, name: str, step: str, mode: str) -> None:
    """One is enough; driver, link and a device file with sysfs's numbers are there afterwards."""
    found = steps[name]
    said = found["said"]
    taken = [line for line in said if line.startswith("next step: ")]
    assert len(taken) == 1 and taken[0].startswith(f"next step: {step}"), said
    assert said[-4] == "waiting, at most 30 s" and f"{CHIP} (n150): healthy" in said[-3], said
    assert said[-2:] == ["no fault is left", "status 0"], said

    assert (found["file"], found["mode"]) == (found["in sysfs"], mode), found
    assert_links_lead_to_their_chips(found)


def test_fix_without_an_installed_driver(steps: Steps) -> None:
    """modprobe says so, and is not run twice."""
    said = steps["driver not installed"]["said"]
    assert any("Module tenstorrent not found" in line for line in said), said
    advice = "no step is left; install the driver (tt-kmd) for the running kernel"
    assert said[-2:] == [advice, "status 1"]


# -- links and the package -------------------------------------------------------------------------


def test_links_follow_their_chips(steps: Steps) -> None:
    """They come with the driver's functions, also if chips get other numbers."""
    before, after = steps["driver installed"], steps["bound in the other order"]
    assert before["chips"] != after["chips"], "they have the same numbers again"
    for found in (before, after):
        assert_links_lead_to_their_chips(found)


@pytest.mark.parametrize(
    ("name", "chips"),
    [
        ("upgraded with cards there", 3),
        ("installed, not loaded", 3),
        ("installed, not wanted", 0),
        ("installed, no driver", 0),
    ],
)
def test_the_installation_loads_the_driver_and_makes_the_links(
    steps: Steps, name: str, chips: int
) -> None:
    """But it loads none that is blacklisted, and does not fail without one."""
    found = steps[name]
    assert found["said"][-1] == "status 0", found
    assert_links_lead_to_their_chips(found, chips)


def test_a_removal_leaves_only_the_device_files(steps: Steps) -> None:
    purged = steps["purged"]
    assert len(purged["chips"]) == len(FUNCTIONS) and not purged["links"], purged
    assert purged["said"][-len(FUNCTIONS) :] == sorted(purged["chips"].values())
