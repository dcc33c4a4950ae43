"""Runs on a virtual machine: breaks a chip as only the kernel can mend it, and runs `fix`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from tests.e2e.steps import JSON, shell, step, wait_for

CHIP = "0000:00:11.0"
FUNCTION = Path("/sys/bus/pci/devices", CHIP)
DRIVER = "/sys/bus/pci/drivers/tenstorrent"
BREAKS = {
    "unbound": f"echo {CHIP} > {DRIVER}/unbind",
    "kept for another driver": f"""
        echo {CHIP} > {DRIVER}/unbind
        echo vfio-pci > {FUNCTION}/driver_override
        echo {CHIP} > {DRIVER}/bind
    """,
    "off the bus": f"echo 1 > {FUNCTION}/remove",
    "driver unloaded": "rmmod tenstorrent",
    "file removed": f"rm /dev/tenstorrent/$(ls {FUNCTION}/tenstorrent | cut -d! -f2)",
    # At the end, as no step of `fix` can mend it.
    "driver not installed": """
        rmmod tenstorrent
        mv /usr/lib/modules/*/tenstorrent.ko /root
        depmod -a
    """,
}


def is_healthy() -> bool:
    rows = json.loads(shell("tt-device-plugin list --json"))
    return {row["bdf"]: bool(row["healthy"]) for row in rows}[CHIP]


def device_file() -> JSON:
    """Return the number of the chip's device file, that in sysfs, and the mode."""
    (device,) = (FUNCTION / "tenstorrent").iterdir()
    status = os.stat("/dev/tenstorrent/" + device.name.partition("!")[2])
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    in_sysfs = (device / "dev").read_text().strip()
    return {"number": number, "in sysfs": in_sysfs, "mode": oct(stat.S_IMODE(status.st_mode))}


def main() -> None:
    for name, script in BREAKS.items():
        with step(name) as found:
            found["broken"] = shell(script)
            wait_for(lambda: not is_healthy(), "the service to see it")

            found["said"] = shell(f"tt-device-plugin fix {CHIP} --yes; echo status $?").splitlines()
            if FUNCTION.exists():
                found["driver"] = os.path.basename(os.path.realpath(FUNCTION / "driver"))
                found["override"] = (FUNCTION / "driver_override").read_text().strip()
            if (FUNCTION / "tenstorrent").exists():
                found["file"] = device_file()


if __name__ == "__main__":
    main()
