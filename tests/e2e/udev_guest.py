"""Runs on a virtual machine: does what an operator does to the driver and the package."""

from __future__ import annotations

import glob
import os

from tests.e2e.steps import JSON, shell, step

RULES = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"
BLACKLIST = "/etc/modprobe.d/test.conf"
DRIVER = "/usr/lib/modules/*/tenstorrent.ko"
AS_DPKG_DOES = "DPKG_MAINTSCRIPT_PACKAGE=tt-device-plugin DPKG_MAINTSCRIPT_NAME=postinst"
POSTINST = f"{AS_DPKG_DOES} /var/lib/dpkg/info/tt-device-plugin.postinst"
REMOVE_DRIVER = f"mv {DRIVER} /root; depmod -a"
RETURN_DRIVER = "mv /root/tenstorrent.ko /usr/lib/modules/*/; depmod -a"


def devices() -> JSON:
    """Return what there is when udev is done: chips by number, links, all in /dev/tenstorrent."""
    shell("udevadm settle --timeout=60")
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


def first_installation(before: str, after: str) -> JSON:
    """Run postinst as for a first installation, with the driver not loaded; return what it did.

    before, after: scripts around it.
    """
    shell(f"rmmod tenstorrent; {before}; journalctl --rotate; journalctl --vacuum-time=1s")
    said = shell(f"{POSTINST} configure ''; echo status $?")
    errors = shell("journalctl --priority=err --output=cat --no-pager --quiet")
    found = {"said": said, "errors": errors} | devices()
    shell(after)
    return found


def main() -> None:
    with step("boot") as found:
        found |= devices()
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        found["loaded"] = timestamp("systemd-modules-load", "ActiveEnter")
        found["began"] = timestamp("tt-device-plugin", "ExecMainStart")

    bound = glob.glob("/sys/bus/pci/drivers/tenstorrent/0*")
    first, second, *_ = sorted(os.path.basename(path) for path in bound)
    with step("two unbound") as found:
        for address in (first, second):
            shell(f"echo {address} > /sys/bus/pci/drivers/tenstorrent/unbind")
        found |= devices()
    with step("bound in the other order") as found:
        for address in (second, first):
            shell(f"echo {address} > /sys/bus/pci/drivers/tenstorrent/bind")
        found |= devices()

    with step("driver unloaded") as found:
        shell("rmmod tenstorrent")
        found |= devices()
    with step("driver loaded") as found:
        shell("modprobe tenstorrent")
        found |= devices()

    with step("without the rule") as found:
        shell(f"mv {RULES} /root && udevadm control --reload")
        shell("udevadm trigger --subsystem-match=tenstorrent")
        found |= devices()
    with step("installed with cards there") as found:
        shell(f"mv /root/{os.path.basename(RULES)} {RULES} && {POSTINST} configure 0")
        found |= devices()

    with step("installed with the driver not loaded") as found:
        found |= first_installation("true", "true")
    with step("installed with the driver not wanted") as found:
        found |= first_installation(
            f"echo 'blacklist tenstorrent' > {BLACKLIST}", f"rm {BLACKLIST}"
        )
    with step("installed without the driver") as found:
        found |= first_installation(REMOVE_DRIVER, RETURN_DRIVER)

    with step("purged") as found:
        shell("modprobe tenstorrent && dpkg --purge tt-device-plugin")
        found |= devices()

    with step("without the driver") as found:
        shell(f"rmmod tenstorrent; {REMOVE_DRIVER}")
        shell("echo tenstorrent > /etc/modules-load.d/tt-device-plugin.conf")
        shell("systemctl restart systemd-modules-load")
        found["status"] = shell("systemctl is-active systemd-modules-load")
        shown = "--output=cat --no-pager --lines=4"
        found["journal"] = shell(f"journalctl --unit systemd-modules-load {shown}")


if __name__ == "__main__":
    main()
