"""Runs on the arm64 machine: installs and runs the package."""

from __future__ import annotations

import glob
import json
import os
import platform
import re
import subprocess
import tempfile
from pathlib import Path

from tests.e2e import probe
from tests.e2e.remote_kubelet import RemoteKubelet
from tests.e2e.steps import PATIENCE, UNIT, properties, shell, status_with, step
from tests.world.node import SimulatedNode, Ticker

CONFIG = Path("/etc/tt-device-plugin/config.toml")
DIRECTORY = "/var/lib/kubelet/device-plugins"
NODE = Path("/srv/node")
CONFIGURATION = f"""
root = "{NODE}"
[health]
interval = 2.0
"""
N150, P300 = "tenstorrent.com/n150", "tenstorrent.com/p300"


def start_kubelet() -> RemoteKubelet:
    """Start the reference kubelet, with the Python packages in the package."""
    directory = Path(tempfile.mkdtemp())
    kubelet = RemoteKubelet(directory, PATIENCE)
    [modules] = glob.glob("/var/cache/tt-device-plugin/*/site-packages")
    environment = os.environ | {"PYTHONPATH": f"/srv/project:{modules}"}
    script = RemoteKubelet.script(DIRECTORY, str(directory))
    subprocess.Popen(["sh", "-c", script], env=environment)
    return kubelet


def main() -> None:
    with step("boot") as found:
        found["kernel"] = f"Linux {platform.release()}"
        found["machine"] = platform.machine()
        found["page size"] = os.sysconf("SC_PAGE_SIZE")
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        checked = "apt-get check >/dev/null; echo $?"
        found["dpkg"] = shell(f"dpkg --print-architecture; dpkg --audit; {checked}")

    with step("install") as found:
        install = "apt-get install --yes -o Dpkg::Use-Pty=0 /srv/package.deb; echo status $?"
        found["output"] = shell(install)
        found["verify"] = shell(f"dpkg --verify {UNIT}")
        found["version"] = shell("tt-device-plugin --version")
        found |= properties("Type", "ActiveState", "SubState", "UnitFileState", "Result")
        analysis = shell(f"systemd-analyze security {UNIT}")
        [exposure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", analysis)
        found["exposure"] = float(exposure)

    with step("sandbox") as found:
        # 4:64 is the serial port.
        script = ["sh", "-c", probe.RUN, "sh", probe.__file__, "/srv/probe", "4 64"]
        subprocess.run(script, check=True)
        found["answers"] = json.loads(Path("/srv/probe").read_text())

    node = SimulatedNode(NODE, nodes="mknod")
    for card in ("n150", "p300c"):
        node.add(card)
    with Ticker(node, 0.5), step("allocate") as found:
        CONFIG.write_text(CONFIGURATION)
        shell(f"systemctl restart {UNIT}")
        status_with("waiting for kubelet")

        kubelet = start_kubelet()
        for resource in (N150, P300):
            kubelet.event("registered", resource=resource)
            found[resource] = kubelet.event("list", resource=resource)["healthy"]
        found["status"] = status_with("registered with kubelet")

        kubelet.tell(f"admit pod {P300}=2")
        found["admitted"] = kubelet.event("admitted", pod="pod")
        found["violations"] = kubelet.events("violation")


if __name__ == "__main__":
    main()
