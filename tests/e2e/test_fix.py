"""`fix` on a real kernel, in a virtual machine: rescan, bind, modprobe, and device files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import vm
from tests.e2e.container import optional
from tests.e2e.fix_guest import CHIP
from tests.e2e.steps import Steps

GUEST = vm.Guest(
    script="fix_guest",
    suite="bookworm",
    platform=vm.amd64("bookworm"),
    functions=("10.0", "11.0"),
)
DONE = ["waiting, at most 30 s", f"{CHIP} (n150): healthy; its users are not known"]
DONE += ["nothing more needs to be done", "status 0"]


@pytest.fixture(scope="module")
def steps(deb: Path) -> Steps:
    with optional():
        return vm.run(GUEST, deb)


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
def test_the_kernel_takes_each_step(steps: Steps, name: str, step: str) -> None:
    """One is enough; the driver and a device file with sysfs's numbers are there afterwards."""
    found = steps[name]
    said = found["said"]
    taken = [line for line in said if line.startswith("next step: ")]
    assert len(taken) == 1 and taken[0].startswith(f"next step: {step}"), said
    assert said[-4:] == DONE, said

    assert found["driver"] == "tenstorrent" and found["override"] in ("", "(null)")
    file = found["file"]
    assert file["number"] == file["in sysfs"]
    # The kernel makes it for root. The driver's udev rules, which are not here, change that.
    assert file["mode"] == ("0o666" if name == "file removed" else "0o600")


def test_the_kernel_refuses_to_bind_what_is_kept_for_another_driver(steps: Steps) -> None:
    """So `fix` clears driver_override first, and says so."""
    found = steps["kept for another driver"]
    assert "error" in found["broken"]  # ENODEV, for which dash has no name
    assert "driver_override keeps the chip for vfio-pci, and is cleared" in found["said"]


def test_a_driver_that_is_not_installed(steps: Steps) -> None:
    """modprobe says so, and is not run twice."""
    said = steps["driver not installed"]["said"]
    assert any("Module tenstorrent not found" in line for line in said), said
    assert said[-2:] == [
        "no step is left; install the driver (tt-kmd) for the running kernel",
        "status 1",
    ]
