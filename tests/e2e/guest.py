"""Runs in the virtual machine: does what an operator does to the driver and the package.

Prints what is to be seen, one JSON object per line: the step, the chips by number, the links by PCI
address.
"""

from __future__ import annotations

import glob
import json
import os

from tests.e2e.steps import shell

RULES = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"
BLACKLIST = "/etc/modprobe.d/test.conf"
DRIVER = "/usr/lib/modules/*/tenstorrent.ko"
AS_DPKG_DOES = "DPKG_MAINTSCRIPT_PACKAGE=tt-device-plugin DPKG_MAINTSCRIPT_NAME=postinst"
POSTINST = f"{AS_DPKG_DOES} /var/lib/dpkg/info/tt-device-plugin.postinst"


def show(step: str, **more: object) -> None:
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
    print(json.dumps({"step": step, "chips": chips, "links": links, "directory": left, **more}))


def started(unit: str, name: str) -> int:
    return int(shell(f"systemctl show --value --property={name} {unit}") or 0)


def driver(file: str, *addresses: str) -> None:
    for address in addresses:
        shell(f"echo {address} > /sys/bus/pci/drivers/tenstorrent/{file}")


show(
    "boot",
    version=shell("udevadm --version"),
    failed=shell("systemctl list-units --failed --no-legend --plain"),
    loaded=started("systemd-modules-load", "ActiveEnterTimestampMonotonic"),
    began=started("tt-device-plugin", "ExecMainStartTimestampMonotonic"),
)
bound = glob.glob("/sys/bus/pci/drivers/tenstorrent/0*")
first, second, *_ = sorted(os.path.basename(path) for path in bound)
driver("unbind", first, second)
show("two unbound")
driver("bind", second, first)
show("bound in the other order")
shell("rmmod tenstorrent")
show("driver unloaded")
shell("modprobe tenstorrent")
show("driver loaded")
shell(f"mv {RULES} /root && udevadm control --reload")
shell("udevadm trigger --subsystem-match=tenstorrent")
show("without the rule")
said = shell(f"mv /root/{os.path.basename(RULES)} {RULES} && {POSTINST} configure 0")
show("installed with cards there", said=said)
blacklist = f"echo 'blacklist tenstorrent' > {BLACKLIST}"
remove, bring = f"mv {DRIVER} /root", "mv /root/tenstorrent.ko /usr/lib/modules/*/"
for step, before, after in (
    ("installed with the driver not loaded", "true", "true"),
    ("installed with the driver not wanted", blacklist, f"rm {BLACKLIST}"),
    ("installed without the driver", f"{remove}; depmod -a", f"{bring}; depmod -a"),
):
    shell(f"rmmod tenstorrent; {before}; journalctl --rotate; journalctl --vacuum-time=1s")
    said = shell(f"{POSTINST} configure ''; echo status $?")
    show(step, said=said, errors=shell("journalctl --priority=err --output=cat --no-pager --quiet"))
    shell(after)
shell("modprobe tenstorrent")
said = shell("dpkg --purge tt-device-plugin")
show("purged", said=said)
shell("rmmod tenstorrent; mv /usr/lib/modules/*/tenstorrent.ko /root; depmod -a")
shell("echo tenstorrent > /etc/modules-load.d/tt-device-plugin.conf")
shell("systemctl restart systemd-modules-load")
show(
    "without the driver",
    status=shell("systemctl is-active systemd-modules-load"),
    journal=shell("journalctl --unit systemd-modules-load --output=cat --no-pager --lines=4"),
)
