"""What happens to a reference kubelet, and how tests wait for it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.world.processes import PATIENCE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, with `time.monotonic()` of the moment."""

    at: float
    kind: str
    fields: Mapping[str, Any]

    def line(self) -> str:
        """Return `kind key=value …`, for people."""
        return " ".join([self.kind, *(f"{key}={value}" for key, value in self.fields.items())])

    def json(self) -> str:
        """Return the event as one line of JSON."""
        return json.dumps({"event": self.kind, "at": self.at, **self.fields})


class EventLog:
    """The events so far, and the violations: what a correct plugin never causes."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._on_event = on_event
        self._changed = asyncio.Event()

    def record(self, kind: str, **fields: Any) -> None:
        """Add an event and wake up all that wait for one."""
        event = Event(time.monotonic(), kind, fields)
        self.events.append(event)
        self._changed.set()
        if self._on_event:
            self._on_event(event)

    def violation(self, text: str) -> None:
        """Add something that the kubelet tolerates or fails of, and that no correct plugin does."""
        self.violations.append(text)
        self.record("violation", text=text)

    def find(self, kind: str, resource: str | None = None, since: float = 0.0) -> list[Event]:
        """Return the events of a kind since a moment of `time.monotonic()`."""
        found = [event for event in self.events if event.kind == kind and event.at >= since]
        return [e for e in found if resource in (None, e.fields.get("resource"))]

    async def wait_for(
        self, predicate: Callable[[], T], timeout: float = PATIENCE, what: str = "an event"
    ) -> T:
        """Return the predicate's first true value; it is evaluated again after every event.

        Raises TimeoutError, with `what` and the latest events in its text.
        """

        async def wait() -> T:
            while not (value := predicate()):
                self._changed.clear()
                await self._changed.wait()
            return value

        try:
            return await asyncio.wait_for(wait(), timeout)
        except asyncio.TimeoutError:
            latest = "\n".join(event.line() for event in self.events[-8:])
            text = f"waited {timeout} s for {what}; the kubelet's latest:\n{latest}"
            raise TimeoutError(text) from None
