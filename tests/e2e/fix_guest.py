"""Runs in the virtual machine: breaks a chip in ways that only the kernel can mend, and runs `fix`.

Prints what is to be seen, one JSON object per line: the step, what `fix` has written and its
status, and the chip afterwards.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

from tests.e2e.steps import shell

CHIP = "0000:00:11.0"
FUNCTION = Path("/sys/bus/pci/devices", CHIP)
DRIVER = "/sys/bus/pci/drivers/tenstorrent"
PATIENCE = 120.0  # seconds


def is_healthy() -> bool:
    rows = json.loads(shell("tt-device-plugin list --json"))
    return {row["bdf"]: bool(row["healthy"]) for row in rows}[CHIP]


def device_file() -> dict[str, object]:
    """The number of the chip's device file, that in sysfs, and the mode."""
    (device,) = (FUNCTION / "tenstorrent").iterdir()
    status = os.stat("/dev/tenstorrent/" + device.name.partition("!")[2])
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    in_sysfs = (device / "dev").read_text().strip()
    return {"number": number, "in sysfs": in_sysfs, "mode": oct(stat.S_IMODE(status.st_mode))}


def mend(step: str, breaks: str) -> None:
    """Break the chip, wait until the service sees it, mend it."""
    seen: dict[str, object] = {"step": step, "broken": shell(breaks)}
    deadline = time.monotonic() + PATIENCE
    while is_healthy() and time.monotonic() < deadline:
        time.sleep(0.1)

    seen["said"] = shell(f"tt-device-plugin fix {CHIP} --yes; echo status $?").splitlines()
    if FUNCTION.exists():
        seen["driver"] = os.path.basename(os.path.realpath(FUNCTION / "driver"))
        seen["override"] = (FUNCTION / "driver_override").read_text().strip()
    if (FUNCTION / "tenstorrent").exists():
        seen["file"] = device_file()
    print(json.dumps(seen), flush=True)


def main() -> None:
    mend("unbound", f"echo {CHIP} > {DRIVER}/unbind")
    unbind = f"echo {CHIP} > {DRIVER}/unbind; echo vfio-pci > {FUNCTION}/driver_override"
    mend("kept for another driver", f"{unbind}; echo {CHIP} > {DRIVER}/bind")
    mend("off the bus", f"echo 1 > {FUNCTION}/remove")
    mend("driver unloaded", "rmmod tenstorrent")
    mend("file removed", f"rm /dev/tenstorrent/$(ls {FUNCTION}/tenstorrent | cut -d! -f2)")

    # And what no step can mend: the driver is not there.
    driver = "/usr/lib/modules/*/tenstorrent.ko"
    mend("driver not installed", f"rmmod tenstorrent; mv {driver} /root; depmod -a")


if __name__ == "__main__":  # never where tests import it
    main()
