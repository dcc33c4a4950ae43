"""tt-device-plugin as it is shipped, on a machine with simulated cards.

There is no udev: the simulated node makes the links by PCI address. The cards' device files are
real character devices, of drivers that every kernel has and that containers may not open by
default: a container can really open what it is given.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import zipfile
from typing import TypeVar

from tests.e2e.machine import Machine, Process, tail
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, NotifySocket, wait_until

ZIPAPP = ROOT / "dist/tt-device-plugin.pyz"
STATE_DIRECTORY = "/var/lib/tt-device-plugin"
CDI_DIRECTORY = "/run/cdi"

# The first cards' numbers: fuse, loop-control, cpuid of two processors, autofs, btrfs-control. To
# open them takes no capability, as with a Tenstorrent card. runc lets all containers open tun.
OPENABLE = ((10, 229), (10, 237), (203, 0), (10, 235), (203, 1), (10, 234))
FORBIDDEN = "Operation not permitted"  # what a container has of all other numbers


def stale_zipapp() -> str | None:
    """Return why dist/ has no zipapp of this very program, or None if it has."""
    name = ZIPAPP.relative_to(ROOT)
    if not ZIPAPP.exists():
        return f"there is no {name}; run: make pyz"

    with zipfile.ZipFile(ZIPAPP) as packed:
        program = packed.read("site-packages/ttdp.py").decode()

    # A build replaces one line.
    texts = (program, (ROOT / "ttdp.py").read_text())
    if len({re.sub(r'(?m)^__version__ = ".*"$', "", text) for text in texts}) > 1:
        return f"{name} is of another ttdp.py than the one here; run: make pyz"
    return None


class Daemon:
    """The daemon on a machine, started and stopped as by systemd."""

    def __init__(self, machine: Machine, cards: SimulatedNode) -> None:
        self._process: Process | None = None
        self.log = machine.logs / "tt-device-plugin.log"
        self._machine = machine
        self._flags = cards.flags
        self._config = machine.scratch / "daemon.toml"

    def configure(self, config: str, interval: float = 5.0) -> None:
        """Write its configuration file: keys and tables; interval: seconds between two polls."""
        # On a busy machine, firmware that a thread plays does not keep up with the polls.
        health = f"[health]\ninterval = {interval}\n"
        self._config.write_text(f"{config}\n{health}")

    def start(self) -> None:
        """Start it, and wait for READY=1."""
        assert self._process is None or not self._process.alive, "it runs already"
        for directory in (STATE_DIRECTORY, CDI_DIRECTORY):  # the unit makes them
            self._machine.path(directory).mkdir(exist_ok=True)

        manager = NotifySocket(self._machine.scratch / "notify")
        cache = str(self._machine.scratch / "cache")
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "STATE_DIRECTORY": STATE_DIRECTORY,
            "NOTIFY_SOCKET": manager.address,
            "SHIV_ROOT": cache,
            "PYTHONPYCACHEPREFIX": cache,
        }
        # Nice as in the unit: a kubelet that starts takes all the processors that it can get.
        command = ["nice", "-n-10", str(ZIPAPP), "run", f"--config-file={self._config}"]

        def is_ready() -> bool:
            return any("READY=1" in text.splitlines() for text in manager.receive())

        with contextlib.closing(manager):
            self._process = self._machine.spawn([*command, *self._flags], self.log, environment)
            wait_until(is_ready, lambda: f"READY=1; the log ends\n{tail(self.log)}\n")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def end(self, number: signal.Signals) -> int:
        """Send it a signal that ends it; return its exit status, or the signal negated."""
        assert self._process is not None
        return self._process.end(number)


S = TypeVar("S", bound="Site")


class Site:
    """A machine with cards and the daemon, as a context: all of it is made and removed with it."""

    def __init__(self) -> None:
        self.machine = Machine()
        # Without any until a test adds them; their firmware lives.
        self.cards = SimulatedNode(self.machine.scratch / "node", nodes="mknod", numbers=OPENABLE)
        self.daemon = Daemon(self.machine, self.cards)
        self._while_on = contextlib.ExitStack()

    def __enter__(self: S) -> S:
        try:
            self.start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.last_words())
        self.destroy()

    def start(self) -> None:
        self._while_on.enter_context(Ticker(self.cards))
        self.power_on()

    def power_on(self) -> None:
        """Start what starts with the machine, before daemon and kubelet."""
        self.machine.power_on()

    def destroy(self) -> None:
        self._while_on.close()
        self.machine.destroy()

    def host_number(self, bdf: str) -> tuple[int, int]:
        """Return the major and minor number of a chip's device file as it is now."""
        status = os.stat(self.cards.chip(bdf).device_node)
        return os.major(status.st_rdev), os.minor(status.st_rdev)

    def start_daemon(self, config: str = "", interval: float = 5.0) -> None:
        """Configure the daemon and start it; interval: seconds between two polls."""
        self.daemon.configure(config, interval)
        self.daemon.start()

    def last_words(self, lines: int = 40) -> str:
        """Return the end of the daemon's log."""
        return tail(self.daemon.log, lines)
