"""Runs on a virtual machine: breaks what only the kernel can mend, has `fix` mend it, and does what
an operator does to the driver and the package."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

from tests.e2e.steps import JSON, PATIENCE, shell, step, wait_for

CHIP = "0000:00:11.0"
FUNCTION = Path("/sys/bus/pci/devices", CHIP)
BUS = "/sys/bus/pci/drivers/tenstorrent"
REMOVE_DRIVER = "rmmod tenstorrent; mv /usr/lib/modules/*/tenstorrent.ko /root; depmod -a"
RETURN_DRIVER = "mv /root/tenstorrent.ko /usr/lib/modules/*/; depmod -a"
# As dpkg runs it; the argument is the former version, and none at a first installation.
POSTINST = (
    "DPKG_MAINTSCRIPT_PACKAGE=tt-device-plugin DPKG_MAINTSCRIPT_NAME=postinst "
    "/var/lib/dpkg/info/tt-device-plugin.postinst configure"
)
BREAKS = {
    "unbound": f"echo {CHIP} >{BUS}/unbind",
    "kept for another driver": f"""
        echo {CHIP} >{BUS}/unbind
        echo vfio-pci >{FUNCTION}/driver_override
    """,
    "off the bus": f"echo 1 >{FUNCTION}/remove",
    "driver unloaded": "rmmod tenstorrent",
    "file removed": f"rm /dev/tenstorrent/$(ls {FUNCTION}/tenstorrent | cut -d! -f2)",
    # No step of `fix` can mend this.
    "driver not installed": REMOVE_DRIVER,
}
CHANGES = {
    "driver installed": f"{RETURN_DRIVER}; modprobe tenstorrent",
    "bound in the other order": f"""
        cd {BUS}
        for chip in 0000:00:10.0 {CHIP}; do echo $chip >unbind; done
        for chip in {CHIP} 0000:00:10.0; do echo $chip >bind; done
    """,
    "upgraded with cards there": f"""
        rm /dev/tenstorrent/by-pci/*
        {POSTINST} 0; echo status $?
    """,
    "installed, not loaded": f"rmmod tenstorrent; {POSTINST} ''; echo status $?",
    "installed, not wanted": f"""
        rmmod tenstorrent
        echo 'blacklist tenstorrent' >/etc/modprobe.d/test.conf
        {POSTINST} ''; echo status $?
        rm /etc/modprobe.d/test.conf
    """,
    "installed, no driver": f"""
        {REMOVE_DRIVER} 2>/dev/null
        {POSTINST} ''; echo status $?
        {RETURN_DRIVER}
    """,
    "purged": "modprobe tenstorrent; dpkg --purge tt-device-plugin; ls /dev/tenstorrent",
}


def devices() -> JSON:
    """Return what there is when udev is done: chips by number, and links."""
    shell(f"udevadm settle --timeout={PATIENCE:.0f}")
    chips = {}
    for device in glob.glob("/sys/class/tenstorrent/*"):
        number = os.path.basename(device).partition("!")[2]
        chips[os.path.basename(os.path.realpath(f"{device}/device"))] = number
    links = {
        os.path.basename(link): os.path.basename(os.path.realpath(link))
        for link in glob.glob("/dev/tenstorrent/by-pci/*")
    }
    return {"chips": chips, "links": links}


def is_healthy() -> bool:
    rows = json.loads(shell("tt-device-plugin list --json"))
    return {row["bdf"]: bool(row["healthy"]) for row in rows}[CHIP]


def timestamp(unit: str, name: str) -> int:
    return int(shell(f"systemctl show --value --property={name}TimestampMonotonic {unit}") or 0)


def main() -> None:
    with step("boot") as found:
        found |= devices()
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        found["loaded"] = timestamp("systemd-modules-load", "ActiveEnter")
        found["began"] = timestamp("tt-device-plugin", "ExecMainStart")

    for name, script in BREAKS.items():
        with step(name) as found:
            shell(script)
            wait_for(lambda: not is_healthy(), "the service to see it")
            found["said"] = shell(f"tt-device-plugin fix {CHIP} --yes; echo status $?").splitlines()
            found |= devices()
            for device in FUNCTION.glob("tenstorrent/*"):
                status = os.stat("/dev/tenstorrent/" + device.name.partition("!")[2])
                found["file"] = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                found["in sysfs"] = (device / "dev").read_text().strip()
                found["mode"] = oct(status.st_mode & 0o777)

    for name, script in CHANGES.items():
        with step(name) as found:
            found["said"] = shell(script).splitlines()
            found |= devices()


if __name__ == "__main__":
    main()
