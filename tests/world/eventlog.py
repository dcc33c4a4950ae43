"""What happens to a reference kubelet, and how tests wait for it."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

PATIENCE = 15.0  # seconds after which a test that waits for something is hung
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened, with `time.monotonic()` of the moment."""

    at: float
    kind: str
    fields: Mapping[str, Any]

    @property
    def resource(self) -> str:
        """The resource that it is about; empty where it is about none."""
        return str(self.fields.get("resource", ""))

    def line(self) -> str:
        """Return `kind key=value …`, lists comma-separated, values quoted as for a shell."""
        return " ".join(
            [self.kind, *(f"{key}={_text(value)}" for key, value in self.fields.items())]
        )

    def json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps({"event": self.kind, "at": self.at, **self.fields})


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6f}"
    return shlex.quote(
        ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    )


class EventLog:
    """What happened, in its order; and what a good plugin would not have done."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.violations: list[str] = []
        self._on_event = on_event
        self._changed = asyncio.Event()

    def record(self, kind: str, **fields: Any) -> None:
        """Add an event and wake up who waits for one."""
        event = Event(time.monotonic(), kind, fields)
        self.events.append(event)
        self._changed.set()
        if self._on_event:
            self._on_event(event)

    def violation(self, text: str) -> None:
        """Add something that the original swallows or chokes on, and that no good plugin does."""
        self.violations.append(text)
        self.record("violation", text=text)

    def find(self, kind: str, resource: str | None = None, since: float = 0.0) -> list[Event]:
        """Return the events of a kind since a moment of `time.monotonic()`."""
        return [
            event
            for event in self.events
            if event.kind == kind and resource in (None, event.resource) and event.at >= since
        ]

    async def wait_for(self, predicate: Callable[[], T], timeout: float = PATIENCE) -> T:
        """Return the predicate's first true value; it is evaluated again after every event.

        Raises TimeoutError, with the latest events in its text.
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
            text = f"nothing of the kind within {timeout} s; the kubelet's latest:\n{latest}"
            raise TimeoutError(text) from None
