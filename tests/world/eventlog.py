"""What happens to a reference kubelet, and how tests wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from tests.world.processes import PATIENCE

T = TypeVar("T")


class Event(NamedTuple):
    """Something that happened, with `time.monotonic()` of the moment."""

    at: float
    kind: str
    fields: dict[str, Any]


class EventLog:
    """The events so far, and the violations: what a correct plugin never causes."""

    def __init__(self, on_event: Callable[[Event], None] | None) -> None:
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._on_event = on_event
        self._changed = asyncio.Event()

    def record(self, kind: str, **fields: Any) -> None:
        """Add an event and wake up all that wait for one."""
        self.events.append(Event(time.monotonic(), kind, fields))
        self._changed.set()
        if self._on_event:
            self._on_event(self.events[-1])

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
            latest = "\n".join(f"{kind} {fields}" for _, kind, fields in self.events[-8:])
            text = f"waited {timeout} s for {what}; the kubelet's latest:\n{latest}"
            raise TimeoutError(text) from None
