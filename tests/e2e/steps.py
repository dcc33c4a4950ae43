"""Steps of the scripts that run on virtual machines, each of which prints what it found.

That is one JSON object per line: the step, the guest's seconds that it took, and what it found.
Nothing is judged in the guest, but a step that does not come to its end says so, and the next one
is tried. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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


def probing(unit: str, command: str, output: str) -> str:
    """Return the service's unit with another program in its sandbox, which runs once.

    output: the file that the program's standard output goes to.
    """
    unit = re.sub(r"(?m)^Type=.*$", "Type=oneshot", unit)
    others = r"Restart|WatchdogSec|ExecReload|NotifyAccess|ExecStopPost|ExecStartPre=\S*back-off"
    unit = re.sub(rf"(?m)^({others}).*\n", "", unit)
    # The end of the probe must not delete the daemon's run-time directory.
    unit = re.sub(r"(?m)^RuntimeDirectory=.*$", "RuntimeDirectory=probe", unit)
    started = f"ExecStart=/usr/bin/python3 {command}\nStandardOutput=file:{output}"
    return re.sub(r"(?m)^ExecStart=.*$", started, unit)


# Whose process the sandbox is to show, as a container's may be: another user's, with capabilities.
OTHER = "systemd-run --quiet --unit=other --uid=65534"
OTHER += " --property=AmbientCapabilities='CAP_NET_RAW CAP_SYS_CHROOT' sleep infinity"


def status_with(*parts: str) -> str:
    """Wait until the service's status text holds all of these, and return it."""

    def text() -> str:
        status = properties("StatusText")["StatusText"]
        return status if all(part in status for part in parts) else ""

    return wait_for(text, lambda: f"{parts} in the status {properties('StatusText')}")
