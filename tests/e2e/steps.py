"""Steps of the scripts that run on virtual machines, each of which prints what it found.

That is one JSON object per line: the step, the guest's seconds that it took, and what it found.
Nothing is judged in the guest, but a step that does not come to its end says so, and the next one
is tried. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tests.world.processes import wait_until

UNIT = "tt-device-plugin"
PATIENCE = 300.0  # seconds of the guest's clock, after which what was waited for will not happen
JSON = dict[str, Any]
T = TypeVar("T")


@contextlib.contextmanager
def step(name: str) -> Iterator[JSON]:
    """Print what is put into the dictionary; if the step fails also why, and the journal's end."""
    found: JSON = {"step": name}
    begun = time.monotonic()
    try:
        yield found
    except Exception:
        found["failed"] = f"{traceback.format_exc()}\n{shell('journalctl --no-pager --lines=40')}"
    found["seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(found), flush=True)


def shell(script: str) -> str:
    """Return output and error of a script; one whose status matters prints that itself."""
    done = subprocess.run(
        ["sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
    )
    return done.stdout.strip()


def wait_for(condition: Callable[[], T | None], what: str | Callable[[], str]) -> T:
    """Return the condition's first true value; an error names what was waited for."""
    return wait_until(condition, what, PATIENCE)


def properties(*names: str) -> dict[str, str]:
    """Return properties of the service."""
    lines = shell(f"systemctl show --property={','.join(names)} {UNIT}").splitlines()
    return dict(line.split("=", 1) for line in lines)


# Runs probe.py ($1) once in the service's own sandbox; its output is the file $2. The sandbox shows
# processes of containers, so there is one of another user, with capabilities. $3 is the number of a
# device that any user outside the sandbox can open.
PROBE = """
set -e
made="/dev/tenstorrent /var/lib/kubelet/pods /var/lib/prometheus"
mkdir -p $made /var/lib/prometheus/node-exporter
mkdir -p /etc/kubernetes/node-feature-discovery/features.d
mknod -m 666 /dev/tenstorrent/7 c $3
setpriv --reuid=65534 --clear-groups sh -c ': <>/dev/tenstorrent/7'
systemd-run --quiet --unit=other --uid=65534 \\
    --property=AmbientCapabilities='CAP_NET_RAW CAP_SYS_CHROOT' sleep infinity
probe="$1 /dev/tenstorrent/7 $(systemctl show --value --property=MainPID other)"
# The end of the probe must not delete the daemon's run-time directory.
sed -E -e 's/^Type=.*/Type=oneshot/' -e 's/^RuntimeDirectory=.*/RuntimeDirectory=probe/' \\
    -e '/^(Restart|WatchdogSec|ExecReload|NotifyAccess|ExecStopPost|ExecStartPre=.*back-off)/d' \\
    -e "s,^ExecStart=.*,ExecStart=/usr/bin/python3 $probe\\nStandardOutput=file:$2," \\
    $(systemctl show --value --property=FragmentPath tt-device-plugin) \\
    >/run/systemd/system/probe.service
systemctl daemon-reload
systemctl start probe
systemctl stop other
rm -r $made /run/systemd/system/probe.service
systemctl daemon-reload
"""
ALLOWED = {
    "stat a device",
    "unix sockets",
    "a socket in the run-time directory",
    "kernel events",
    "a directory for everybody's locks",
    "name of another user's process",
    "cgroup of another user's process",
    "cgroups",
    "write to the kubelet's directory",
    "write to CDI's",
    "write to the node exporter's",
    "write to labels",
}


def assert_sandboxed(found: JSON) -> str:
    """Check the output of probe.py; return a summary."""
    assert found.pop("capabilities") == "0000000000000000"
    assert found.pop("interfaces") in (["lo"], [])
    allowed = {name for name, answer in found.items() if answer == "yes"}
    assert allowed == ALLOWED, found
    assert found["open a device"] == "Operation not permitted", found
    return ", ".join(f"{name} ({found[name]})" for name in sorted(found.keys() - allowed))


def status_with(*parts: str) -> str:
    """Wait until the service's status text holds all of these, and return it."""

    def text() -> str:
        status = properties("StatusText")["StatusText"]
        return status if all(part in status for part in parts) else ""

    return wait_for(text, lambda: f"{parts} in the status {properties('StatusText')}")
