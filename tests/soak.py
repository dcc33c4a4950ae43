"""Ten thousand kubelet restarts against one daemon: does it keep its memory and its file descriptors?

    python -m tests.soak [--restarts 10000] [--minutes 10]

The reference kubelet runs in this process, the daemon in its own. Kubelets end orderly or as if killed, and in between
they refuse, hang, delete sockets, run pods, while cards go, come back, die and are reloaded. What is measured is the
daemon after things have settled: the first sample comes after a warm-up, and the last must have as many descriptors,
and not be more than 2 MB above the smallest. It runs until both the restarts and the minutes are reached.

The first half of this file, programs as processes of their own, also serves tests.bench and tests.demo.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported: its core writes to stderr otherwise

import argparse
import asyncio
import contextlib
import inspect
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode, Ticker

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")

# --------------------------------------------------------------------------------------- programs as processes of ours


class Broken(Exception):
    """Something that has to happen did not; its text says what, and what was seen instead."""


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A directory that is gone afterwards, with a short path: a unix socket's address holds 107 bytes."""
    long = len(os.fsencode(tempfile.gettempdir())) > 24
    path = Path(tempfile.mkdtemp(prefix="tt-", dir="/tmp" if long else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def run(main: Coroutine[Any, Any, int]) -> int:
    """The exit status of `main`; 130 if a signal ended it, which cancels it, so that what it started is cleaned up."""

    async def guarded() -> int:
        task = asyncio.ensure_future(main)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return 130
        except BrokenPipeError:  # nobody reads on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 1

    return asyncio.run(guarded())


async def within(seconds: float, otherwise: str, doing: Coroutine[Any, Any, T]) -> T:
    """What `doing` returns, or Broken if it has not by then."""
    task = asyncio.ensure_future(doing)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if not done:
        raise Broken(f"{otherwise}: not within {seconds:g} s")
    return task.result()


class Child:
    """A process that ends with the context. Its lines on stderr and its messages to systemd come with their time.

    Times are of `time.monotonic()`, which is one clock for all processes.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], notify: Path) -> None:
        """notify: path for the NOTIFY_SOCKET, which is made here."""
        self.lines: deque[tuple[float, str]] = deque(maxlen=500)
        self.notes: deque[tuple[float, str]] = deque(maxlen=500)
        self.on_line: Callable[[str], None] | None = None
        self.started = 0.0
        self._command = command
        self._environment = {**environment, "NOTIFY_SOCKET": str(notify)}
        self._notify = notify
        self._happened = asyncio.Event()

    async def __aenter__(self) -> Child:
        self._notify.unlink(missing_ok=True)
        self._messages = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._messages.bind(str(self._notify))
        asyncio.get_running_loop().add_reader(self._messages, self._notified)
        self.started = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._command, env=self._environment, cwd="/", stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._reader = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, TimeoutError, asyncio.TimeoutError):
            if self._process.returncode is None:
                self._process.terminate()
            await asyncio.wait_for(self._process.wait(), 3)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        await self._reader
        asyncio.get_running_loop().remove_reader(self._messages)
        self._messages.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _notified(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                text = self._messages.recv(8192).decode(errors="replace")
                self.notes.extend((time.monotonic(), note) for note in text.splitlines())
                self._happened.set()

    async def _read(self) -> None:
        assert self._process.stderr
        while line := await self._process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self.lines.append((time.monotonic(), text))
            if self.on_line:
                self.on_line(text)
            self._happened.set()
        await self._process.wait()
        self._happened.set()

    async def wait_for(self, found: Callable[[], T | None], what: str, timeout: float = 15.0) -> T:
        """The first true value of `found`, asked whenever the process says something; else Broken with `what`."""

        async def wait() -> T:
            while not (value := found()):
                if self._reader.done():
                    raise Broken(f"{what}: the process ended with status {self._process.returncode}{self.latest()}")
                self._happened.clear()
                await self._happened.wait()
            return value

        try:
            return await asyncio.wait_for(wait(), timeout)
        except asyncio.TimeoutError:
            raise Broken(f"{what}: not within {timeout:g} s{self.latest()}") from None

    def latest(self) -> str:
        """Its last lines, to be appended to what went wrong."""
        return "".join(f"\n    {line}" for _, line in list(self.lines)[-8:])

    async def note(
        self, prefix: str, containing: str = "", *, since: float = 0.0, timeout: float = 15.0
    ) -> tuple[float, str]:
        """A message to systemd, such as "READY=1": when it came, and what follows the prefix."""

        def found() -> tuple[float, str] | None:
            told = ((at, text.removeprefix(prefix)) for at, text in list(self.notes) if text.startswith(prefix))
            return next(((at, text) for at, text in told if containing in text and at >= since), None)

        return await self.wait_for(found, f"no {prefix}{containing}", timeout)

    async def ready(self) -> float:
        """Seconds from before the exec until READY=1."""
        at, _ = await self.note("READY=1")
        return at - self.started

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def stop(self) -> tuple[int, float]:
        """SIGTERM: the exit status, and the seconds until then. Broken if it takes more than five."""
        begin = time.monotonic()
        self._process.terminate()
        try:
            status = await asyncio.wait_for(self._process.wait(), 5)
        except asyncio.TimeoutError:
            raise Broken(f"no end after SIGTERM within 5 s{self.latest()}") from None
        return status, time.monotonic() - begin


def stand_in_for_netlink() -> None:
    """Lets an unchanged program take its kernel events from the unix socket $TT_UEVENTS; goes into a sitecustomize.

    For the zipapp, which cannot be run by way of tests.world.simulation.
    """
    import os
    import socket

    class Socket(socket.socket):
        def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
            self.is_uevents = family == socket.AF_NETLINK
            super().__init__(*((socket.AF_UNIX, type, 0) if self.is_uevents else (family, type, proto)), fileno)

        def bind(self, address: Any) -> None:
            super().bind(os.environ["TT_UEVENTS"] if self.is_uevents else address)

        def recvfrom(self, size: int, flags: int = 0) -> tuple[bytes, Any]:
            message, sender = super().recvfrom(size, flags)
            return message, (0, 1) if self.is_uevents else sender

    socket.socket = Socket  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class Installation:
    """The program as it is to be run: from source, or the zipapp `pyz`. Whatever it writes goes below `home`.

    From source it is imported, not run as a script, so that it comes from bytecode as it does when it is installed.
    """

    home: Path
    pyz: Path | None = None

    def environment(self, *python_path: Path) -> dict[str, str]:
        """For a child of ours: nothing that would configure the daemon, and bytecode in a place of its own."""
        foreign = ("TTDP_", "TT_", "WATCHDOG_", "PYTHON", "SHIV_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
        for name in ("NOTIFY_SOCKET", "JOURNAL_STREAM"):
            kept.pop(name, None)
        ours = {"PYTHONPYCACHEPREFIX": f"{self.home}/pyc", "SHIV_ROOT": f"{self.home}/shiv"}
        if python_path:
            inherited = filter(None, [os.environ.get("PYTHONPATH")])
            ours["PYTHONPATH"] = os.pathsep.join([*map(str, python_path), *inherited])
        return kept | ours

    def command(
        self, *arguments: str, uevents: Path | None = None, simulated: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Command line and environment for the program with these arguments.

        uevents: the unix socket that it makes for kernel events, instead of listening to the real kernel.
        """
        if self.pyz:
            command, environment = [sys.executable, str(self.pyz)], self.environment()
            if uevents:
                source = f"from typing import Any\n{inspect.getsource(stand_in_for_netlink)}\nstand_in_for_netlink()\n"
                customize = self.home / "site" / "sitecustomize.py"
                customize.parent.mkdir(exist_ok=True)
                customize.write_text(source)
                environment = self.environment(customize.parent) | {"TT_UEVENTS": str(uevents)}
        else:
            environment = self.environment(ROOT)
            if uevents or simulated:
                command = [
                    sys.executable,
                    "-m",
                    "tests.world.simulation",
                    *(["--uevents", str(uevents)] if uevents else []),
                ]
            else:
                command = [sys.executable, "-c", "import sys, ttdp; sys.exit(ttdp.main())"]
        return [*command, *arguments], environment

    def daemon(
        self,
        node: SimulatedNode,
        directory: Path,
        *,
        interval: float = 5.0,
        uevents: Path | None = None,
        name: str = "daemon",
    ) -> Child:
        """The daemon on this node, to be started by `async with`; `interval` is that of [health], in seconds."""
        configuration = self.home / f"{name}.toml"
        configuration.write_text(f"[health]\ninterval = {interval}\n")
        command, environment = self.command(
            "run", f"--config-file={configuration}", f"--device-plugin-dir={directory}", *node.flags, uevents=uevents
        )
        if uevents:
            uevents.unlink(missing_ok=True)
        return Child(command, environment, self.home / f"{name}.notify")


class Kernel:
    """Keeps the uevents of a simulated node until they are delivered to the daemon's socket."""

    def __init__(self, node: SimulatedNode, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        node.on_uevent = self._waiting.append

    def deliver(self) -> float:
        """Send what waits; returns the time just before."""
        messages = [*self._waiting]
        self._waiting.clear()
        begin = time.monotonic()
        for message in messages:
            self._socket.sendto(message, str(self._path))
        return begin


class RestartedKubelet(Kubelet):
    """The reference kubelet; while it empties the directory, a daemon may be removing its old sockets there."""

    def _sweep(self) -> None:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return super()._sweep()


# ------------------------------------------------------------------------------------------- what a process costs


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process holds at one moment. Sizes in kB, as the kernel counts them."""

    rss: int
    anonymous: int
    descriptors: int
    threads: int


def footprint(pid: int) -> Footprint:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    rss, anonymous = (int(lines[key].split()[0]) for key in ("VmRSS", "RssAnon"))
    return Footprint(rss, anonymous, descriptors, int(lines["Threads"]))


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads, ended ones too, in seconds to the nanosecond: clock_getcpuclockid(3)."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def wake_ups(pid: int) -> int:
    """How often the threads that there are have waited for something, and were woken."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            text = (task / "status").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("voluntary_ctxt"))
    return total


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__trunc__() - 1)]


# ------------------------------------------------------------------------------------------------------------ the soak

WARM_UP = 200  # restarts before the first sample
GROWTH = 2048  # kB of RSS that the last sample may be above the smallest
INTERVAL = 0.5  # seconds between the daemon's polls
STEP = 120.0  # seconds within which a restart and all that comes with it has to be over
CARDS = ("n150", "n150", "n300", "n300", "p300c", "p300c")
RESOURCES = ("tenstorrent.com/n150", "tenstorrent.com/n300", "tenstorrent.com/p300")


class Soak:
    """One daemon, one directory, and a kubelet that is restarted again and again."""

    def __init__(self, node: SimulatedNode, kubelet: Kubelet, daemon: Child, kernel: Kernel, seed: int) -> None:
        self.node = node
        self.kubelet = kubelet
        self.daemon = daemon
        self.kernel = kernel
        self.restarts = 0
        self.seconds: list[float] = []  # per plain restart, from kubelet.sock until every resource was registered
        self.disturbances: dict[str, int] = {}
        self._random = random.Random(seed)

    async def step(self) -> None:
        """One restart, which nothing may hold up: the kubelet, as the original, waits for most answers for ever."""
        await within(STEP, f"restart {self.restarts} does not come to an end", self.restart())

    async def restart(self) -> None:
        """One restart of the kubelet, and now and then something else that befalls a node."""
        number, kubelet = self.restarts, self.kubelet
        kubelet.events.clear()
        every: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (5, self.run_pods), (10, self.delete_a_socket), (25, self.hot_plug), (40, self.refuse), (50, self.drop),
            (75, self.kill_a_chip), (100, self.reload), (150, self.deaf), (200, self.renumber),
        ]  # fmt: skip
        # Every so often at a random moment of the period, so that they meet each other in every combination.
        for period, disturbance in every:
            if self._random.randrange(period) == 0:
                name = disturbance.__name__
                self.disturbances[name] = self.disturbances.get(name, 0) + 1
                await disturbance()
        plain = not kubelet._faults
        await (kubelet.stop() if number % 2 else kubelet.kill())
        await asyncio.sleep(self._random.choice((0, 0, 0.001, 0.005, 0.02)))
        await kubelet.start()
        since = kubelet.find("started")[-1].at
        await self.registered()
        if plain:
            self.seconds.append(max(kubelet.find("registered", name, since)[-1].at for name in RESOURCES) - since)
        self.restarts += 1

    async def registered(self) -> None:
        for name in RESOURCES:
            try:
                await self.kubelet.registered(name, 15)
            except TimeoutError:
                raise Broken(f"after {self.restarts} restarts, no {name}{self.daemon.latest()}") from None

    async def seen(self, what: str, condition: Callable[[], object]) -> None:
        try:
            await self.kubelet.wait_for(condition, 15)
        except TimeoutError:
            raise Broken(f"after {self.restarts} restarts, {what}{self.daemon.latest()}") from None

    async def run_pods(self) -> None:
        for pod, request in (("one", {RESOURCES[2]: 1}), ("two", {RESOURCES[2]: 2, RESOURCES[0]: 1})):
            with contextlib.suppress(AdmissionError):  # a chip is dead or away just now
                await self.kubelet.admit(pod, "main", request)
        for pod in ("one", "two"):
            self.kubelet.remove_pod(pod)

    async def delete_a_socket(self) -> None:
        name = self._random.choice(RESOURCES)
        since = time.monotonic()
        endpoint = self.kubelet.find("registered", name)
        ours = [path for path in self.kubelet.directory.glob("tt-*.sock") if name.partition("/")[2] in path.name]
        for path in ours:
            path.unlink(missing_ok=True)  # the daemon may be removing an old one itself
        if endpoint or ours:
            await self.seen("a deleted socket is not registered anew", lambda: self.kubelet.find("list", name, since))

    async def hot_plug(self) -> None:
        chip = self._random.choice(self.node.chips)
        facts = chip.facts
        if not facts.present or facts.condition != "healthy":
            return
        chip.vanish()
        self.kernel.deliver()
        await self.seen("a card that went is healthy", lambda: not self._is_healthy(chip.bdf))
        ordinals = {other.ordinal for other in self.node.chips}
        chip.come_back(next(n for n in self._random.sample(range(32), 32) if n not in ordinals))
        self.kernel.deliver()
        await self.seen("a card that came back is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def refuse(self) -> None:
        self.kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, times=self._random.randrange(1, 4))

    async def drop(self) -> None:
        since = time.monotonic()
        await self.kubelet.drop_streams()
        for name in RESOURCES:
            await self.seen("a broken stream is not opened again", lambda: self.kubelet.find("list", name, since))  # noqa: B023

    async def kill_a_chip(self) -> None:
        chip = self._random.choice(self.node.chips)
        for ail, cure in self._random.sample(((chip.die, chip.revive), (chip.reset, chip.post_reset)), 1):
            ail()
            await self.seen("a dead chip is healthy", lambda: not self._is_healthy(chip.bdf))
            cure()
            await self.seen("a revived chip is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def reload(self) -> None:
        since = time.monotonic()
        self.daemon.signal(signal.SIGHUP)
        await self.daemon.note("READY=1", since=since)

    async def deaf(self) -> None:
        await self.kubelet.restart(deaf=True)
        await asyncio.sleep(0.1)

    async def renumber(self) -> None:
        first, second = self._random.sample([chip.bdf for chip in self.node.chips], 2)
        self.node.swap_ordinals(first, second)
        self.kernel.deliver()

    def _is_healthy(self, bdf: str) -> bool:
        return any(bdf in self.kubelet.healthy(name) for name in RESOURCES)

    async def sample(self) -> Footprint:
        """What the daemon holds now that nothing is under way: the least of a few looks, for a poll's thread comes and
        goes, as does a connection that is just ending."""
        looks = []
        for _ in range(6):
            await asyncio.sleep(0.25)
            looks.append(footprint(self.daemon.pid))
        return Footprint(*(min(getattr(look, key) for look in looks) for key in Footprint.__slots__))


@contextlib.asynccontextmanager
async def soaking(seed: int) -> AsyncIterator[Soak]:
    with workspace() as home:
        node, directory, uevents = SimulatedNode(home / "node"), home / "dp", home / "uevents"
        for index, card in enumerate(CARDS):
            node.add(card, numa_node=index % 2)
        daemon = Installation(home).daemon(node, directory, interval=INTERVAL, uevents=uevents)
        kernel = Kernel(node, uevents)
        with Ticker(node, INTERVAL / 2):
            async with daemon, RestartedKubelet(directory) as kubelet:
                await daemon.ready()
                soak = Soak(node, kubelet, daemon, kernel, seed)
                await soak.registered()
                yield soak


async def soak(restarts: int, minutes: float, seed: int) -> int:
    async with soaking(seed) as soak:
        begin = time.monotonic()

        def progress() -> float:
            return min(soak.restarts / restarts, (time.monotonic() - begin) / (minutes * 60) if minutes else 1.0)

        def line(held: Footprint, remark: str = "") -> str:
            p99 = percentile(soak.seconds, 99) * 1000
            return (
                f"{progress():5.0%} {(time.monotonic() - begin) / 60:6.1f} {soak.restarts:9d} {held.rss:9d} "
                f"{held.anonymous:9d} {held.descriptors:5d} {held.threads:8d} {p99:12.1f}{remark}"
            )

        print("       min  restarts    RSS kB   anon kB   fds  threads  restart p99 ms", flush=True)
        while soak.restarts < min(WARM_UP, restarts // 2):
            await soak.step()
        samples = [await soak.sample()]
        print(line(samples[0], "   baseline"), flush=True)
        reported = int(progress() * 20)
        while progress() < 1:
            await soak.step()
            if int(progress() * 20) > reported:
                reported = int(progress() * 20)
                samples.append(await soak.sample())
                print(line(samples[-1]), flush=True)

        first, last, median = samples[0], samples[-1], statistics.median(soak.seconds) * 1000
        least = min(sample.rss for sample in samples)
        between = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in sorted(soak.disturbances.items()))
        print(f"{soak.restarts} restarts, registered again after {median:.1f} ms (median); in between: {between}")
        for violation in sorted(set(soak.kubelet.violations)):
            print(f"violation: {violation}")
        rss = f"RSS: {first.rss} kB before, {least} at least, {last.rss} after (limit: {GROWTH} above the least)"
        verdicts = {
            rss: last.rss - least <= GROWTH,
            f"descriptors: {first.descriptors} before, {last.descriptors} after": first.descriptors == last.descriptors,
            f"{len(soak.kubelet.violations)} violations of the kubelet's rules": not soak.kubelet.violations,
        }
        for text, ok in verdicts.items():
            print(f"{'ok  ' if ok else 'FAIL'}  {text}")
        return 0 if all(verdicts.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--restarts", type=int, default=10_000, help="at least as many (default: 10000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="at least as long (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the order of what happens in between (default: 1)")
    options = parser.parse_args()
    if options.restarts < 2:
        parser.error("--restarts: at least 2")
    try:
        return run(soak(options.restarts, options.minutes, options.seed))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
