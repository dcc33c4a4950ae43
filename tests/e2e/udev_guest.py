"""Runs on a virtual machine: does what an operator does to the driver and the package."""

from __future__ import annotations

import glob
import os
import time

from tests.e2e.steps import JSON, PATIENCE, shell, step

BUS = "/sys/bus/pci/drivers/tenstorrent"
RULES = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"
BLACKLIST = "/etc/modprobe.d/test.conf"
REMOVE_DRIVER = "mv /usr/lib/modules/*/tenstorrent.ko /root; depmod -a"
RETURN_DRIVER = "mv /root/tenstorrent.ko /usr/lib/modules/*/; depmod -a"
# As dpkg runs it; the argument is the former version.
POSTINST = (
    "DPKG_MAINTSCRIPT_PACKAGE=tt-device-plugin DPKG_MAINTSCRIPT_NAME=postinst "
    "/var/lib/dpkg/info/tt-device-plugin.postinst configure"
)
CHANGES = {
    "two unbound": f"cd {BUS}; echo 0000:00:10.0 >unbind; echo 0000:00:11.0 >unbind",
    "bound in the other order": f"cd {BUS}; echo 0000:00:11.0 >bind; echo 0000:00:10.0 >bind",
    "driver unloaded": "rmmod tenstorrent",
    "driver loaded": "modprobe tenstorrent",
    "without the rule": f"""
        mv {RULES} /root/rules
        udevadm control --reload
        udevadm trigger --subsystem-match=tenstorrent
    """,
    "installed with cards there": f"mv /root/rules {RULES}; {POSTINST} 0",
    # First installations, which load the driver.
    "installed with the driver not loaded": f"rmmod tenstorrent; {POSTINST} ''; echo status $?",
    "installed with the driver not wanted": f"""
        rmmod tenstorrent
        echo 'blacklist tenstorrent' >{BLACKLIST}
        {POSTINST} ''; echo status $?
        rm {BLACKLIST}
    """,
    "installed without the driver": f"""
        {REMOVE_DRIVER}
        {POSTINST} ''; echo status $?
        {RETURN_DRIVER}
    """,
    "purged": "modprobe tenstorrent; dpkg --purge tt-device-plugin",
    # Nothing of the package asks for it any more.
    "booted without the driver": f"""
        rmmod tenstorrent
        {REMOVE_DRIVER}
        echo tenstorrent >/etc/modules-load.d/test.conf
        systemctl restart systemd-modules-load
        journalctl --unit=systemd-modules-load --output=cat --no-pager --lines=4
    """,
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


def timestamp(unit: str, name: str) -> int:
    return int(shell(f"systemctl show --value --property={name}TimestampMonotonic {unit}") or 0)


def main() -> None:
    with step("boot") as found:
        found |= devices()
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        found["loaded"] = timestamp("systemd-modules-load", "ActiveEnter")
        found["began"] = timestamp("tt-device-plugin", "ExecMainStart")

    for name, script in CHANGES.items():
        with step(name) as found:
            begun = time.time()
            found["said"] = shell(script)
            # Not the kernel's: it complains of an emulated processor that is not run for a while.
            sources = "_TRANSPORT=journal _TRANSPORT=stdout _TRANSPORT=syslog"
            errors = f"journalctl --priority=err --since=@{begun:.3f} --output=cat --quiet"
            found["errors"] = shell(f"{errors} --no-pager {sources}")
            found |= devices()


if __name__ == "__main__":
    main()
