"""Programs as processes: to start them, to wait for what they do, and to measure their costs.

Times are of `time.monotonic()`, which is one clock for all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.world.node import SimulatedNode

ROOT = Path(__file__).resolve().parents[2]
SIMULATION = [sys.executable, "-m", "tests.world.simulation"]
PATIENCE = 60.0  # seconds for what takes milliseconds, on a machine that has much else to do
LONG_PATIENCE = 300.0  # for what takes seconds: a boot, or the start of a kubelet or a pod
T = TypeVar("T")


class Broken(AssertionError):
    """An event that must happen did not; the text names it and the events seen instead."""


# -- waiting ---------------------------------------------------------------------------------------
async def until(
    condition: Callable[[], T | None], what: str | Callable[[], str] = "the condition"
) -> T:
    """Return the condition's first true value, or raise Broken with `what`; it is polled."""
    deadline = time.monotonic() + PATIENCE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Broken(f"{what() if callable(what) else what}: not within {PATIENCE:g} s")
        await asyncio.sleep(0.002)
    return value


def wait_until(
    condition: Callable[[], T | None],
    what: str | Callable[[], str] = "the condition",
    seconds: float = LONG_PATIENCE,
) -> T:
    """Do the same without a loop."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Broken(f"{what() if callable(what) else what}: not within {seconds:g} s")
        time.sleep(0.05)
    return value


def run(main: Coroutine[Any, Any, int]) -> int:
    """Return the exit status of `main`; 130 if a signal ended it, by cancelling it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return asyncio.run(main)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


# -- place and environment -------------------------------------------------------------------------
@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """Give a temporary directory with a path that is short enough for a unix socket.

    It is in memory if programs can run there: a disk takes five times as long for a node's files.
    """
    memory = "/dev/shm"
    has_memory = os.access(memory, os.W_OK) and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    path = Path(tempfile.mkdtemp(prefix="tt-", dir=memory if has_memory else "/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment(*python_path: Path, **more: str) -> dict[str, str]:
    """Return the present environment without variables that configure the program, plus `more`."""
    foreign = re.compile(
        "TTDP_|TT_|PYTHON|SHIV_|NOTIFY_|WATCHDOG_|LISTEN_|JOURNAL_|[A-Z]+_DIRECTORY$"
    )
    kept = {key: value for key, value in os.environ.items() if not foreign.match(key)}

    if python_path:
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        kept["PYTHONPATH"] = os.pathsep.join([*map(str, python_path), *inherited])
    return kept | more


def finished(command: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; `more` is added to its environment."""
    environ = environment(ROOT, **more)
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=LONG_PATIENCE
    )


# -- services --------------------------------------------------------------------------------------
class NotifySocket(socket.socket):
    """A service manager's end of $NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.address = str(path)
        path.unlink(missing_ok=True)
        self.bind(self.address)

    def receive(self) -> list[str]:
        """Return the notifications that have come; each can have several lines."""
        texts = []
        with contextlib.suppress(BlockingIOError):
            while True:
                texts.append(self.recv(65536).decode(errors="replace"))
        return texts


class Service:
    """A program under a service manager that receives its notifications; it ends with the context.

    Its lines on stderr and its notifications are kept, with times.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], notify: Path
    ) -> None:
        """notify: the path of its NOTIFY_SOCKET."""
        self.lines: list[tuple[float, str]] = []
        self.notes: list[tuple[float, str]] = []
        self.started = 0.0
        self._command = command
        self._environment = {"NOTIFY_SOCKET": str(notify), **environment}
        self._notify = notify
        self._awaited = 0  # notifications up to the last one that was waited for

    async def __aenter__(self) -> Service:
        self._manager = NotifySocket(self._notify)
        asyncio.get_running_loop().add_reader(self._manager, self._notified)

        self.started = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, cwd="/", stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            if self._process.returncode is None:
                await self.stop(seconds=3)
        except Broken:
            self._process.kill()

        await self._reader
        asyncio.get_running_loop().remove_reader(self._manager)
        self._manager.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> list[str]:
        return [line for _, line in self.lines]

    @property
    def heard(self) -> list[str]:
        return [text for _, text in self.notes]

    def _notified(self) -> None:
        self.notes += [(time.monotonic(), text) for text in self._manager.receive()]

    async def _read(self) -> None:
        assert self._process.stderr
        while line := await self._process.stderr.readline():
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

        # Its last notifications can come after its last line.
        await self._process.wait()
        self._notified()

    async def wait_for(self, found: Callable[[], T | None], what: str) -> T:
        """Return the first true value of `found`; Broken: the process has ended without it."""

        def found_while_running() -> T | None:
            value = found()
            if not value and self._reader.done():
                status = self._process.returncode
                raise Broken(f"{what}: the process ended with status {status}{self.latest()}")
            return value

        return await until(found_while_running, lambda: f"{self.latest()}\n{what}")

    def latest(self) -> str:
        """Return its latest lines and notifications, to be appended to an error."""
        words = sorted([*self.lines, *((at, text.replace("\n", " ")) for at, text in self.notes)])
        return "".join(f"\n    {text}" for _, text in words[-12:])

    async def note(self, wanted: str) -> float:
        """Return when the next notification with a line that begins so came; skip those before."""

        def found() -> float | None:
            while self._awaited < len(self.notes):
                at, text = self.notes[self._awaited]
                self._awaited += 1
                if f"\n{wanted}" in f"\n{text}":
                    return at
            return None

        return await self.wait_for(found, f"no {wanted}")

    async def status(self, *words: str) -> str:
        """Return the present or a later STATUS that has all of these words."""

        def found() -> str | None:
            *_, last = ["", *re.findall("(?m)^STATUS=(.*)", "\n".join(self.heard))]
            return last if all(word in last for word in words) else None

        return await self.wait_for(found, f"no status with {words}")

    async def ready(self) -> float:
        """Return the seconds from before the exec until READY=1."""
        return await self.note("READY=1") - self.started

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """End it by a signal; return its exit status, once all its output is read."""
        self.send(number)
        await asyncio.wait({self._reader}, timeout=seconds)
        if not self._reader.done() or self._process.returncode is None:
            raise Broken(f"no end within {seconds:g} s{self.latest()}")
        return self._process.returncode


# -- the daemon ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Installation:
    """The program to be run: imported from source, or the zipapp `pyz`, unpacked below `home`."""

    home: Path
    pyz: Path | None = None

    def environment(self, *python_path: Path, **more: str) -> dict[str, str]:
        """Return a child's environment, with bytecode in a place of its own."""
        own = {"PYTHONPYCACHEPREFIX": f"{self.home}/pyc", "SHIV_ROOT": f"{self.home}/shiv"}
        return environment(*python_path, **own, **more)

    def command(self, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """Return command line and environment."""
        if self.pyz:
            return [sys.executable, str(self.pyz), *arguments], self.environment()
        program = "import sys, ttdp; sys.exit(ttdp.main())"
        return [sys.executable, "-c", program, *arguments], self.environment(ROOT)

    def daemon(
        self,
        node: SimulatedNode,
        directory: Path,
        *,
        interval: float = 5.0,
        uevents: Path | None = None,
        configuration: str = "",
        **variables: str,
    ) -> Service:
        """Return the daemon on this node, for `async with`; `interval`: seconds between polls.

        The directory above the kubelet's is for its other files, its status socket among them.
        uevents: a socket that stands in for netlink's, only from source.
        """
        home = directory.parent
        file = home / "daemon.toml"
        file.write_text(f"[health]\ninterval = {interval}\n{configuration}")
        flags = [f"--config-file={file}", f"--device-plugin-dir={directory}", *node.flags]
        flags += outlet_flags(home)

        command, environ = self.command("run", *flags)
        if uevents:
            uevents.unlink(missing_ok=True)
            command = [*SIMULATION, "run", *flags]
            environ["TT_UEVENTS"] = str(uevents)
        environ |= {"RUNTIME_DIRECTORY": str(home), **variables}
        return Service(command, environ, home / "daemon.notify")


def outlets(home: Path) -> dict[str, str]:
    """Return settings without which a test that runs as root would change the machine itself."""
    return {
        "cdi_dir": f"{home}/cdi",
        "labels_dir": f"{home}/features.d",
        "metrics_file": f"{home}/metrics/tt-device-plugin.prom",
    }


def outlet_flags(home: Path) -> list[str]:
    return [f"--{key.replace('_', '-')}={path}" for key, path in outlets(home).items()]
