"""Runs on the arm64 machine: does with the package what an operator does.

See steps.py for what it prints.
"""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import subprocess
import threading
import time
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


def configure(text: str) -> None:
    CONFIG.write_text(text)


class Kubelet:
    """The reference kubelet, as a process of its own; it runs on what the package has brought."""

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
        """What has happened so far, to be told from what comes next."""
        return len(self._events)

    def event(self, since: int, kind: str, **wanted: Any) -> JSON:
        """Wait for the first event of a kind, since a moment, with these values; return it."""

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
    """Run probe.py in the service's own sandbox; return what it could do there."""
    unit = Path(properties("FragmentPath")["FragmentPath"]).read_text()
    shell(OTHER)
    process = shell("systemctl show --value --property=MainPID other")
    unit = probing(unit, f"/srv/probe.py /dev/tenstorrent/7 {process}", "/srv/probe")
    Path("/run/systemd/system/probe.service").write_text(unit)
    # The number of the serial port, which outside everybody can open by this node.
    shell("mkdir -p /dev/tenstorrent && mknod -m 666 /dev/tenstorrent/7 c 4 64")
    nobody = "setpriv --reuid=65534 --clear-groups"
    outside = shell(f"{nobody} sh -c ': <> /dev/tenstorrent/7' && echo yes")
    said = shell("systemctl daemon-reload && systemctl start probe && echo done")
    shell("systemctl stop other")
    shell("rm -r /dev/tenstorrent /run/systemd/system/probe.service && systemctl daemon-reload")
    assert said == "done", said
    found: JSON = json.loads(Path("/srv/probe").read_text())
    return found | {"outside": outside}


def findings() -> list[list[str]]:
    """Return the lines of `check`: level, subject, text."""
    return [line.split(None, 2) for line in shell("tt-device-plugin check").splitlines()]


def hugepages() -> str:
    """Return what `check` says of hugepages."""
    [found] = [f"{level} {text}" for level, subject, text in findings() if subject == "hugepages"]
    return found


with step("boot") as seen:
    seen["kernel"] = platform.release()
    seen["machine"] = platform.machine()
    seen["page size"] = os.sysconf("SC_PAGE_SIZE")
    processor = Path("/proc/cpuinfo").read_text()
    seen["features"] = re.findall(r"(?m)^Features\s*: (.*)$", processor)[0].split()
    seen["systemd"] = shell("systemctl --version").split()[1]
    seen["python"] = platform.python_version()
    seen["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
    checked = "apt-get check >/dev/null; echo $?"
    seen["dpkg"] = shell(f"dpkg --print-architecture; dpkg --audit; {checked}")
    seen["page sizes"] = sorted(os.listdir("/sys/kernel/mm/hugepages"))

with step("install") as seen:
    seen["depends"] = shell("dpkg-deb --field /srv/package.deb Depends")
    seen["said"] = shell(
        "apt-get install --yes -o Dpkg::Use-Pty=0 /srv/package.deb; echo status $?"
    )
    seen["verify"] = shell(f"dpkg --verify {UNIT}")
    seen["version"] = shell("tt-device-plugin --version")
    wanted = ("Type", "ActiveState", "SubState", "UnitFileState", "Result", "StatusText")
    seen["properties"] = properties(*wanted)

with step("sandbox") as seen:
    said = shell(f"systemd-analyze security {UNIT}")
    seen["exposure"] = float(re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)[0])

with step("sandbox from inside") as seen:
    seen["answers"] = run_probe()

node = SimulatedNode(NODE)
for card in ("n150", "p300c"):
    node.add(card)
# Hugepages and mounts are the kernel's own.
(NODE / "sys/kernel").mkdir(exist_ok=True)
(NODE / "sys/kernel/mm").symlink_to("/sys/kernel/mm")
(NODE / "proc/mounts").symlink_to("/proc/self/mounts")
firmware = Ticker(node, 0.5)
firmware.__enter__()

with step("register") as seen:
    configure(CONFIGURATION)
    shell(f"systemctl restart {UNIT}")
    seen["waiting"] = status_with("waiting for kubelet")
    kubelet = Kubelet()
    for resource in ("tenstorrent.com/n150", "tenstorrent.com/p300"):
        kubelet.event(0, "registered", resource=resource)
    seen["n150"] = kubelet.event(0, "list", resource="tenstorrent.com/n150")["healthy"]
    seen["p300"] = kubelet.event(0, "list", resource="tenstorrent.com/p300")["healthy"]
    seen["status"] = status_with("registered with kubelet")

with step("reload") as seen:
    pid, since = properties("MainPID"), kubelet.moment
    configure(f'resource_naming = "arch"\n{CONFIGURATION}')
    seen["good"] = shell(f"systemctl reload {UNIT}; echo status $?")
    for resource in ("tenstorrent.com/wormhole", "tenstorrent.com/blackhole"):
        kubelet.event(since, "registered", resource=resource)
    seen["renamed"] = status_with("1 × tenstorrent.com/wormhole", "2 × tenstorrent.com/blackhole")
    configure('log_level = "loud"\n')
    seen["bad"] = shell(f"systemctl reload {UNIT}; echo status $?")
    seen["status"] = status_with(str(CONFIG))
    since = kubelet.moment
    configure(CONFIGURATION)
    shell(f"systemctl reload {UNIT}")
    kubelet.event(since, "registered", resource="tenstorrent.com/n150")
    kubelet.event(since, "registered", resource="tenstorrent.com/p300")
    status_with("1 × tenstorrent.com/n150, 1 healthy", "registered with kubelet")
    seen["same process"] = properties("MainPID") == pid

with step("allocate") as seen:
    since = kubelet.moment
    kubelet.command("admit pod tenstorrent.com/p300=2")
    seen["admitted"] = kubelet.event(since, "admitted", pod="pod")

with step("fault and recovery") as seen:
    chip = node.chip("01:00.0")
    since = kubelet.moment
    chip.die()
    seen["lost"] = kubelet.event(since, "list", resource="tenstorrent.com/n150", healthy=0)
    seen["status"] = status_with("0000:01:00.0: chip does not respond")
    seen["check"] = [line for line in findings() if line[1] == "0000:01:00.0"]
    since = kubelet.moment
    chip.revive()
    seen["back"] = kubelet.event(since, "list", resource="tenstorrent.com/n150", healthy=1)
    status_with("1 × tenstorrent.com/n150, 1 healthy")

with step("kill -9") as seen:
    since = kubelet.moment
    begun = time.monotonic()
    shell(f"systemctl kill --signal=KILL {UNIT}")
    for resource in ("tenstorrent.com/n150", "tenstorrent.com/p300"):
        kubelet.event(since, "registered", resource=resource)
    seen["registered after"] = round(time.monotonic() - begun, 1)
    status_with("registered with kubelet")
    seen["properties"] = properties("ActiveState", "NRestarts")

with step("check") as seen:
    *lines, seen["status"] = shell("tt-device-plugin check; echo status $?").splitlines()
    seen["findings"] = [line.split(None, 2) for line in lines]

with step("list") as seen:
    seen["rows"] = json.loads(shell("tt-device-plugin list --json"))
    seen["text"] = shell("tt-device-plugin list")

with step("hugepages") as seen:
    seen["reserved"] = hugepages()
    mount = NODE / "dev/hugepages-1G"
    mount.mkdir()
    shell(f"mount -t hugetlbfs -o pagesize=1G none {mount}")
    seen["mounted"] = hugepages()
    node.add("n150")
    seen["two cards"] = hugepages()

with step("stop and purge") as seen:
    seen["violations"] = kubelet.violations()
    shell(f"systemctl stop {UNIT}")
    seen["properties"] = properties("ActiveState", "Result")
    seen["sockets"] = sorted(os.listdir(DIRECTORY))
    firmware.__exit__()
    seen["said"] = shell(f"apt-get purge --yes -o Dpkg::Use-Pty=0 {UNIT}; echo status $?")
    elsewhere = "-not -path '/srv/*' -not -path '/var/log/*'"
    seen["left"] = shell(f"find / -xdev -name '*{UNIT}*' {elsewhere}").splitlines()
