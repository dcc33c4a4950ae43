"""Runs on the arm64 machine: installs, runs and purges the package. steps.py prints the results."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

from tests.e2e.steps import (
    JSON,
    OTHER,
    UNIT,
    probing,
    properties,
    shell,
    status_with,
    step,
    wait_for,
)
from tests.world.node import SimulatedNode, Ticker

CONFIG = Path("/etc/tt-device-plugin/config.toml")
DIRECTORY = "/var/lib/kubelet/device-plugins"
NODE = Path("/srv/node")
CONFIGURATION = f"""
sysfs_root = "{NODE}/sys"
dev_root = "{NODE}/dev"
proc_root = "{NODE}/proc"
[health]
interval = 2.0
"""
N150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p300"


class Kubelet:
    """The reference kubelet as a separate process, with the Python packages in the package."""

    def __init__(self) -> None:
        [modules] = glob.glob("/var/cache/tt-device-plugin/*/site-packages")
        environment = os.environ | {"PYTHONPATH": f"/srv/project:{modules}"}
        command = ["/usr/bin/python3", "-m", "tests.world.kubelet", "--json", DIRECTORY]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._events: list[JSON] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._events.append(json.loads(line))

    def command(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    @property
    def moment(self) -> int:
        """The number of events so far."""
        return len(self._events)

    def event(self, since: int, kind: str, **wanted: Any) -> JSON:
        """Wait for the first event of a kind, since a moment, with these values."""

        def found() -> JSON | None:
            assert self._process.poll() is None, "the kubelet has ended"
            for event in self._events[since:]:
                if event["event"] == kind and wanted.items() <= event.items():
                    return event
            return None

        return wait_for(found, lambda: f"{kind} {wanted} among {self._events[since:]}")

    def violations(self) -> list[str]:
        return [event["text"] for event in self._events if event["event"] == "violation"]


def run_probe() -> JSON:
    """Run probe.py in the service's own sandbox; return its results."""
    unit = Path(properties("FragmentPath")["FragmentPath"]).read_text()
    shell(OTHER)
    process = shell("systemctl show --value --property=MainPID other")
    unit = probing(unit, f"/srv/probe.py /dev/tenstorrent/7 {process}", "/srv/probe")
    Path("/run/systemd/system/probe.service").write_text(unit)
    # The number of the serial port. Outside the sandbox, any user can open it by this file.
    shell("mkdir -p /dev/tenstorrent && mknod -m 666 /dev/tenstorrent/7 c 4 64")
    user = "setpriv --reuid=65534 --clear-groups"
    outside = shell(f"{user} sh -c ': <> /dev/tenstorrent/7' && echo yes")
    output = shell("systemctl daemon-reload && systemctl start probe && echo done")
    shell("systemctl stop other")
    shell("rm -r /dev/tenstorrent /run/systemd/system/probe.service && systemctl daemon-reload")
    assert output == "done", output
    found: JSON = json.loads(Path("/srv/probe").read_text())
    return found | {"outside": outside}


def findings() -> list[list[str]]:
    """Return the lines of `check`: level, subject, text."""
    return [line.split(None, 2) for line in shell("tt-device-plugin check").splitlines()]


def hugepages() -> str:
    """Return the line of `check` about hugepages."""
    [found] = [f"{level} {text}" for level, subject, text in findings() if subject == "hugepages"]
    return found


with step("boot") as seen:
    seen["kernel"] = f"Linux {platform.release()}, pages of {os.sysconf('SC_PAGE_SIZE')} bytes"
    seen["machine"] = platform.machine()
    seen["page size"] = os.sysconf("SC_PAGE_SIZE")
    processor = Path("/proc/cpuinfo").read_text()
    seen["features"] = re.findall(r"(?m)^Features\s*: (.*)$", processor)[0].split()
    seen["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
    checked = "apt-get check >/dev/null; echo $?"
    seen["dpkg"] = shell(f"dpkg --print-architecture; dpkg --audit; {checked}")
    seen["hugepage sizes"] = sorted(os.listdir("/sys/kernel/mm/hugepages"))

with step("install") as seen:
    install = "apt-get install --yes -o Dpkg::Use-Pty=0 /srv/package.deb; echo status $?"
    seen["output"] = shell(install)
    seen["verify"] = shell(f"dpkg --verify {UNIT}")
    seen["version"] = shell("tt-device-plugin --version")
    seen["properties"] = properties("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    analysis = shell(f"systemd-analyze security {UNIT}")
    seen["exposure"] = float(re.findall(r"Overall exposure level for \S+: ([\d.]+)", analysis)[0])

with step("sandbox") as seen:
    seen["answers"] = run_probe()

node = SimulatedNode(NODE)
for card in ("n150", "p300c"):
    node.add(card)
# Hugepages and mounts are those of the kernel.
(NODE / "sys/kernel").mkdir(exist_ok=True)
(NODE / "sys/kernel/mm").symlink_to("/sys/kernel/mm")
(NODE / "proc/mounts").symlink_to("/proc/self/mounts")
firmware = Ticker(node, 0.5)
firmware.__enter__()

with step("allocate") as seen:
    CONFIG.write_text(CONFIGURATION)
    shell(f"systemctl restart {UNIT}")
    status_with("waiting for kubelet")
    kubelet = Kubelet()
    for resource in (N150, P300):
        kubelet.event(0, "registered", resource=resource)
        seen[resource] = kubelet.event(0, "list", resource=resource)["healthy"]
    seen["status"] = status_with("registered with kubelet")
    kubelet.command(f"admit pod {P300}=2")
    seen["admitted"] = kubelet.event(0, "admitted", pod="pod")

with step("fault and restart") as seen:
    chip, since = node.chip("01:00.0"), kubelet.moment
    chip.die()
    seen["lost"] = kubelet.event(since, "list", resource=N150, healthy=0)
    status_with("0000:01:00.0: chip does not respond")
    seen["check"] = [line for line in findings() if line[1] == "0000:01:00.0"]
    since = kubelet.moment
    chip.revive()
    kubelet.event(since, "list", resource=N150, healthy=1)
    since = kubelet.moment
    shell(f"systemctl kill --signal=KILL {UNIT}")
    kubelet.event(since, "registered", resource=N150)
    status_with(f"1 × {N150}, 1 healthy", "registered with kubelet")
    seen["properties"] = properties("ActiveState", "NRestarts")

with step("commands") as seen:
    *lines, seen["status"] = shell("tt-device-plugin check; echo status $?").splitlines()
    seen["findings"] = [line.split(None, 2) for line in lines]
    seen["rows"] = json.loads(shell("tt-device-plugin list --json"))

with step("hugepages") as seen:
    seen["reserved"] = hugepages()
    mount = NODE / "dev/hugepages-1G"
    mount.mkdir()
    shell(f"mount -t hugetlbfs -o pagesize=1G none {mount}")
    seen["mounted"] = hugepages()
    node.add("n150")
    seen["two cards"] = hugepages()

with step("purge") as seen:
    seen["violations"] = kubelet.violations()
    shell(f"systemctl stop {UNIT}")
    seen["properties"] = properties("ActiveState", "Result")
    seen["sockets"] = [name for name in os.listdir(DIRECTORY) if name.endswith(".sock")]
    firmware.__exit__()
    seen["output"] = shell(f"apt-get purge --yes -o Dpkg::Use-Pty=0 {UNIT}; echo status $?")
    elsewhere = "-not -path '/srv/*' -not -path '/var/log/*'"
    seen["left"] = shell(f"find / -xdev -name '*{UNIT}*' {elsewhere}").splitlines()
