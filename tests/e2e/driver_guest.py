"""Runs on a virtual machine: breaks what only the kernel can mend, has `fix` mend it, and does what
an operator does to the driver and the package."""

from __future__ import annotations

import glob
import json
import os
import time
from pathlib import Path

from tests.e2e.steps import JSON, PATIENCE, shell, step, wait_for

CHIP = "0000:00:11.0"
FUNCTION = Path("/sys/bus/pci/devices", CHIP)
BUS = "/sys/bus/pci/drivers/tenstorrent"
RULES = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"
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
        echo {CHIP} >{BUS}/bind
    """,
    "off the bus": f"echo 1 >{FUNCTION}/remove",
    "driver unloaded": "rmmod tenstorrent",
    "file removed": f"rm /dev/tenstorrent/$(ls {FUNCTION}/tenstorrent | cut -d! -f2)",
    # No step of `fix` can mend this.
    "driver not installed": REMOVE_DRIVER,
}
CHANGES = {
    "driver installed": f"{RETURN_DRIVER}; modprobe tenstorrent",
    "two unbound": f"cd {BUS}; echo 0000:00:10.0 >unbind; echo 0000:00:11.0 >unbind",
    "bound in the other order": f"cd {BUS}; echo 0000:00:11.0 >bind; echo 0000:00:10.0 >bind",
    "without the rule": f"""
        mv {RULES} /root/rules
        udevadm control --reload
        udevadm trigger --subsystem-match=tenstorrent
    """,
    "upgraded with cards there": f"mv /root/rules {RULES}; {POSTINST} 0; echo status $?",
    "installed with the driver not loaded": f"rmmod tenstorrent; {POSTINST} ''; echo status $?",
    "installed with the driver not wanted": f"""
        rmmod tenstorrent
        echo 'blacklist tenstorrent' >/etc/modprobe.d/test.conf
        {POSTINST} ''; echo status $?
        rm /etc/modprobe.d/test.conf
    """,
    "installed without the driver": f"""
        {REMOVE_DRIVER} 2>/dev/null
        {POSTINST} ''; echo status $?
        systemctl restart systemd-modules-load
        journalctl --unit=systemd-modules-load --output=cat --no-pager --lines=4
        {RETURN_DRIVER}
    """,
    "purged": "modprobe tenstorrent; dpkg --purge tt-device-plugin",
}


def devices() -> JSON:
    """Return what there is when udev is done: chips by number, links, all in /dev/tenstorrent."""
    shell(f"udevadm settle --timeout={PATIENCE:.0f}")
    chips = {}
    for device in glob.glob("/sys/class/tenstorrent/*"):
        number = os.path.basename(device).partition("!")[2]
        chips[os.path.basename(os.path.realpath(f"{device}/device"))] = number
    links = {
        os.path.basename(link): os.path.relpath(os.path.realpath(link), "/dev/tenstorrent")
        for link in glob.glob("/dev/tenstorrent/by-pci/*")
    }
    left = sorted(os.listdir("/dev/tenstorrent")) if os.path.isdir("/dev/tenstorrent") else None
    return {"chips": chips, "links": links, "directory": left}


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
            found["broken"] = shell(script)
            wait_for(lambda: not is_healthy(), "the service to see it")
            found["said"] = shell(f"tt-device-plugin fix {CHIP} --yes; echo status $?").splitlines()
            found |= devices()
            if FUNCTION.exists():
                found["override"] = (FUNCTION / "driver_override").read_text().strip()
            for device in FUNCTION.glob("tenstorrent/*"):
                status = os.stat("/dev/tenstorrent/" + device.name.partition("!")[2])
                found["file"] = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
                found["in sysfs"] = (device / "dev").read_text().strip()
                found["mode"] = oct(status.st_mode & 0o777)

    for name, script in CHANGES.items():
        with step(name) as found:
            begun = time.time()
            found["said"] = shell(script).splitlines()
            # Not the kernel's: it complains of an emulated processor that is not run for a while.
            errors = f"journalctl --priority=err --since=@{begun:.3f} --output=cat --quiet"
            sources = "_TRANSPORT=journal _TRANSPORT=stdout _TRANSPORT=syslog"
            found["errors"] = shell(f"{errors} --no-pager {sources}")
            found |= devices()


if __name__ == "__main__":
    main()
