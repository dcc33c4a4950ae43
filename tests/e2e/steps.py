"""Steps of the scripts that run on virtual machines, each of which prints what it found.

    def main() -> None:
        with step("boot") as found:
            found["failed"] = shell("systemctl list-units --failed --no-legend --plain")

`Steps` is what the script's test gets. Nothing is judged in the guest, but a step that does not
come to its end says so, and the next one is tried. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tests.world.processes import wait_until

UNIT = "tt-device-plugin"
PATIENCE = 1200.0  # seconds for what an emulated machine does in some, on a busy host
JSON = dict[str, Any]
T = TypeVar("T")


@contextlib.contextmanager
def step(name: str) -> Iterator[JSON]:
    """Print what is put into the dictionary; if the step fails also why, and the journal's end."""
    found: JSON = {}
    try:
        yield found
    except Exception:
        found["failed"] = f"{traceback.format_exc()}\n{shell('journalctl --no-pager --lines=40')}"
    print(json.dumps({"step": name, "found": found}), flush=True)


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
    """Return the condition's first true value, for which an emulated machine gets more time."""
    return wait_until(condition, what, PATIENCE)


def status_with(*parts: str) -> str:
    """Wait until the service's status text has all these parts, and return it."""

    def text() -> str:
        status = shell(f"systemctl show --value --property=StatusText {UNIT}")
        return status if all(part in status for part in parts) else ""

    return wait_for(text, lambda: shell(f"systemctl status --no-pager {UNIT}"))


class Steps:
    """What a script has found: steps["boot"] is what its step with this name has put together."""

    def __init__(self, written: str) -> None:
        """written: all that the script has printed."""
        lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
        self._found: dict[str, JSON] = {line["step"]: line["found"] for line in lines}
        self._written = written

    def __getitem__(self, name: str) -> JSON:
        """Return what a step has found; it must have come to its end."""
        assert name in self._found, f"there is no step {name!r}; the script wrote:\n{self._written}"
        found = self._found[name]
        assert "failed" not in found, found["failed"]
        return found
