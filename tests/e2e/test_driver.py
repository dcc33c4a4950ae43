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

GUEST = vm.Guest(
    script="driver_guest",
    suite="trixie",
    platform=vm.amd64("bookworm"),
    functions=("10.0", "11.0", "12.0"),
)
DONE = ["waiting, at most 30 s", f"{CHIP} (n150): healthy; its users are not known"]
DONE += ["no fault is left", "status 0"]
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


# -- fix -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("unbound", "bind the driver to the chip"),
        ("kept for another driver", "bind the driver to the chip"),
        ("off the bus", "rescan the PCI bus"),
        ("driver unloaded", "load the driver"),
        ("file removed", "make the device file again"),
    ],
)
def test_the_kernel_takes_each_step_of_fix(steps: Steps, name: str, step: str) -> None:
    """One is enough; driver, link and a device file with sysfs's numbers are there afterwards."""
    found = steps[name]
    said = found["said"]
    taken = [line for line in said if line.startswith("next step: ")]
    assert len(taken) == 1 and taken[0].startswith(f"next step: {step}"), said
    assert said[-4:] == DONE, said

    assert found["override"] in ("", "(null)") and found["file"] == found["in sysfs"], found
    assert_links_lead_to_their_chips(found)
    # The kernel makes it for root. The driver's udev rules, which are not here, change that.
    assert found["mode"] == ("0o666" if name == "file removed" else "0o600")


def test_fix_clears_a_driver_override_first(steps: Steps) -> None:
    """And says so, as the kernel refuses to bind what is kept for another driver."""
    found = steps["kept for another driver"]
    assert "error" in found["broken"]  # ENODEV, for which dash has no name
    assert "driver_override keeps the chip for vfio-pci, and is cleared" in found["said"]


def test_fix_without_an_installed_driver(steps: Steps) -> None:
    """modprobe says so, and is not run twice."""
    said = steps["driver not installed"]["said"]
    assert any("Module tenstorrent not found" in line for line in said), said
    advice = "no step is left; install the driver (tt-kmd) for the running kernel"
    assert said[-2:] == [advice, "status 1"]


# -- links and the package -------------------------------------------------------------------------


def test_links_follow_their_chips(steps: Steps) -> None:
    """They come and go with the driver's functions, also if chips get other numbers."""
    assert_links_lead_to_their_chips(steps["driver installed"])
    assert_links_lead_to_their_chips(steps["two unbound"], 1)
    after = steps["bound in the other order"]
    assert_links_lead_to_their_chips(after)
    assert steps["driver installed"]["chips"] != after["chips"], "they have the same numbers again"


def test_links_come_and_go_with_the_package(steps: Steps) -> None:
    """The package makes them for existing cards; its removal leaves only the device files."""
    assert not steps["without the rule"]["links"]
    assert_links_lead_to_their_chips(steps["upgraded with cards there"])

    purged = steps["purged"]
    assert len(purged["chips"]) == len(GUEST.functions) and not purged["links"], purged
    assert purged["directory"] == sorted(purged["chips"].values())


@pytest.mark.parametrize("reason", ["not loaded", "not wanted"])
def test_the_first_installation_loads_the_driver(steps: Steps, reason: str) -> None:
    """But not one that is blacklisted."""
    found = steps[f"installed with the driver {reason}"]
    said = [line for line in found["said"] if line != SLOW]
    assert said == ["status 0"] and found["errors"] == "", found
    assert_links_lead_to_their_chips(found, 3 if reason == "not loaded" else 0)


def test_an_installation_without_the_driver(steps: Steps) -> None:
    """It succeeds; at a boot, one line in the journal says that the driver is missing."""
    found = steps["installed without the driver"]
    assert "status 0" in found["said"] and not found["chips"], found
    assert "Failed to find module 'tenstorrent'" in found["said"], found
