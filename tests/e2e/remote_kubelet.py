"""The reference kubelet (tests/world/kubelet.py) in a guest or container. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from tests.world.processes import LONG_PATIENCE, wait_until


class RemoteKubelet:
    """Its commands go through a FIFO, its events come in a file; both are in one directory."""

    def __init__(self, directory: Path, patience: float = LONG_PATIENCE) -> None:
        """Make the FIFO. patience: seconds within which an awaited event must come."""
        self._commands = directory / "commands"
        self._events = directory / "events"
        self._patience = patience
        os.mkfifo(self._commands)
        self._events.touch()

    @staticmethod
    def script(plugins: str, directory: str) -> str:
        """Return the shell script that becomes the kubelet.

        plugins: the directory of device plugins; directory: that of FIFO and file, as the script
        sees it.
        """
        # Opened for reading and writing the FIFO has no end when its writers close it.
        kubelet = f"exec /usr/bin/python3 -m tests.world.kubelet {plugins}"
        return f"{kubelet} <>{directory}/commands >>{directory}/events"

    def tell(self, line: str) -> None:
        def opened() -> int | None:
            with contextlib.suppress(OSError):  # ENXIO: no kubelet reads it yet
                return os.open(self._commands, os.O_WRONLY | os.O_NONBLOCK)
            return None

        commands = wait_until(opened, "a kubelet that takes commands", self._patience)
        os.write(commands, f"{line}\n".encode())
        os.close(commands)

    def events(self, kind: str, since: float = 0.0, **wanted: Any) -> list[dict[str, Any]]:
        """Return the events of a kind since a moment of CLOCK_MONOTONIC, with these values."""
        lines = self._events.read_text().splitlines(keepends=True)
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        events = (event for event in events if event["event"] == kind and event["at"] >= since)
        return [event for event in events if wanted.items() <= event.items()]

    def event(self, kind: str, since: float = 0.0, **wanted: Any) -> dict[str, Any]:
        """Wait for the first such event."""
        return wait_until(
            lambda: self.events(kind, since, **wanted),
            lambda: f"the kubelet's event {kind} {wanted}; it wrote\n{self.last_words()}\n",
            self._patience,
        )[0]

    def last_words(self) -> str:
        return "\n".join(self._events.read_text().splitlines()[-12:])
