"""Runs the daemon on a simulated node: plays the parts of the kernel that a tree cannot play.

In this process (RunningDaemon), uevents come from a socket pair, as only the kernel can send them
over netlink. A process of its own has them from the socket $TT_UEVENTS, if it is set.

    python -m tests.world.simulation …     # the arguments are tt-device-plugin's own
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ttdp
from tests.chips import kind_of
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from tests.world.tree import errno_of
from ttdp import Chip, Inventory, PciFunction, Reading


@contextlib.contextmanager
def kernel_errors() -> Iterator[None]:
    """Let os.open() fail as the simulated node says: see tests.world.tree."""
    genuine = os.open

    def simulated_open(path: Any, *arguments: Any, **keywords: Any) -> int:
        try:
            return genuine(path, *arguments, **keywords)
        except FileNotFoundError:
            number = errno_of(path) or errno.ENOENT
            raise OSError(number, os.strerror(number), path) from None

    with patch.object(os, "open", simulated_open):
        yield


class SimulatedUevents(socket.socket):
    """Each message has the kernel's address: port ID 0, group 1."""

    def recvfrom(self, *arguments: Any) -> tuple[bytes, tuple[int, int]]:
        return self.recv(*arguments), (0, 1)


def settings_of(node: SimulatedNode, directory: Path, **others: Any) -> ttdp.Settings:
    """Return settings for a daemon on this node, with short polls unless `others` say otherwise."""
    health = others.pop("health", {})
    sharing = ttdp.Sharing(lock_dir=f"{directory.parent}/locks")
    return ttdp.Settings(
        device_plugin_dir=str(directory),
        root=str(node.root),
        health=ttdp.HealthSettings(interval=others.pop("interval", 0.25), **health),
        **{**outlets(directory.parent), "sharing": sharing, **others},
    )


class RunningDaemon:
    """The daemon on this loop, on a simulated node whose events reach it at once."""

    def __init__(
        self, node: SimulatedNode, settings: ttdp.Settings, environ: Mapping[str, str] | None = None
    ) -> None:
        """environ: what a service manager would set, but for the NOTIFY_SOCKET."""
        self.node = node
        self.settings = settings
        self.loaded: Callable[[], ttdp.Settings] = lambda: self.settings
        self.daemon: ttdp.Daemon  # made on the loop
        self.notes: list[str] = []  # what systemd would have heard
        self.refused_notes: list[str] = []  # that systemd does not take, each once
        self._manager = ttdp.ServiceManager(environ or {})
        self._manager.notify = self._notified  # type: ignore[method-assign]

        self._kernel, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        self._events = SimulatedUevents(fileno=theirs.detach())
        self._errors = contextlib.ExitStack()
        self.polls = 0  # that have begun
        self.scans: list[float] = []  # when each has begun

    def _notified(self, *states: str) -> bool:
        note = "\n".join(states)
        if note in self.refused_notes:
            self.refused_notes.remove(note)
            return False
        self.notes.append(note)
        return True

    def notified(self, beginning: str) -> bool:
        """Return whether systemd has received a message that begins so."""
        return any(note.startswith(beginning) for note in self.notes)

    async def __aenter__(self) -> RunningDaemon:
        self._errors.enter_context(kernel_errors())
        self._errors.enter_context(patch.object(ttdp, "open_uevent_socket", lambda: self._events))
        self.node.on_uevent = self._kernel.send

        self.daemon = ttdp.Daemon(self.settings, lambda: self.loaded(), self._manager)
        scan = self.host.scan

        def counted_scan(*, is_poll: bool) -> None:
            self.polls += is_poll
            self.scans.append(time.monotonic())
            scan(is_poll=is_poll)

        self.host.scan = counted_scan  # type: ignore[method-assign]
        self._run = asyncio.get_running_loop().create_task(self.daemon.run())
        await asyncio.sleep(0)  # nobody can end what has not begun to hear signals
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        self.node.on_uevent = None
        self._kernel.close()
        self._errors.close()

    async def ended(self) -> int:
        """Return its exit status, once it has ended."""
        return await asyncio.shield(self._run)

    async def stop(self) -> int:
        self.daemon.end(0)
        return await self._run

    def reload(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)
        self.daemon.reload()

    async def ready(self) -> None:
        """Wait until it has told systemd that it is ready."""
        await until(lambda: self.notified("READY=1"), "READY=1")

    @property
    def status(self) -> str:
        """The text that `systemctl status` shows; empty before the first one."""
        texts = [note for note in self.notes if note.startswith("STATUS=")]
        return texts[-1].removeprefix("STATUS=") if texts else ""

    def state(self, resource: str) -> str:
        """Return the state of a resource's registration; empty without a session."""
        session = self.sessions.get(resource)
        return session.registration.text if session else ""

    def view(self) -> dict[str, Any]:
        """Return what readers of the status socket get."""
        return self.daemon.reporter.view()

    @property
    def problems(self) -> list[ttdp.Problem]:
        """All that is not right at this moment."""
        return self.host.problems(self.decision)

    async def sees(self, bdf: str, kind: ttdp.Kind | None) -> None:
        """Wait until it sees that a chip has a fault of this kind; None: that it is healthy."""

        await until(lambda: kind_of(self.chip(bdf)) is kind, f"{kind} of {bdf}")

    @property
    def host(self) -> ttdp.Host:
        """What the daemon knows of its node."""
        return self.daemon.host

    @property
    def sessions(self) -> dict[str, ttdp.KubeletSession]:
        return self.daemon.sessions.by_name

    @property
    def decision(self) -> ttdp.Decision:
        """What is to be advertised and reported at this moment."""
        return self.host.decide()

    def chip(self, bdf: str) -> ttdp.Chip:
        return self.decision.chips[bdf]


class WatchedNode:
    """A node, and an inventory that looks at it when a test says so."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.settings = settings_of(node, node.root / "plugins")
        self.inventory = Inventory({})

    @property
    def chips(self) -> dict[str, Chip]:
        return self.inventory.chips

    def scan(self) -> None:
        with kernel_errors():
            self.inventory.scan(self.settings)

    def read(self, function: PciFunction, *, is_poll: bool = True) -> Reading | None:
        """Read a chip; None: it is being removed."""
        with kernel_errors(), patch.object(ttdp, "monotonic", lambda: 1000.0):
            return ttdp.read_chip(self.settings, function, is_poll=is_poll)

    def look(self, *, is_poll: bool = True) -> None:
        """Scan and read, as at a poll or after an event."""
        self.scan()
        readings = [self.read(each, is_poll=is_poll) for each in self.inventory.present]
        self.inventory.apply(filter(None, readings), self.settings.health)


StartDaemon = Callable[..., Awaitable[RunningDaemon]]  # see the fixture `start`


def main(arguments: Sequence[str]) -> int:
    with kernel_errors(), contextlib.ExitStack() as stack:
        if path := os.environ.get("TT_UEVENTS"):
            events = SimulatedUevents(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            events.bind(path)
            stack.enter_context(patch.object(ttdp, "open_uevent_socket", lambda: events))
        return ttdp.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
