"""What the daemon costs and how fast it is, beside the least that gRPC in Python allows.

    python -m tests.bench [MEASUREMENT …]     # `soak`, which takes ten minutes, only if named

The floor is a bare grpc.aio plugin, tests.floor. Daemon and floor are measured in turns, on a
simulated Galaxy with 32 devices; the reference kubelets, one for each, run in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import platform
import random
import signal
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from tests.floor import RESOURCE, rpc
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode, Ticker
from tests.world.processes import (
    ROOT,
    Broken,
    Installation,
    Service,
    run,
    workspace,
)  # fmt: skip

NEVER = 3600.0  # seconds between polls where a poll would disturb the measurement
SETTLING = 7.0  # seconds after which a daemon is at rest: the first poll is over
AFTERWARDS = 0.1  # seconds in which what follows a call or a registration is done
QUIET = 1.0  # seconds after which the daemon gathers no more events
WARM_UP = 50  # calls that are not measured
LOCAL = [("grpc.use_local_subchannel_pool", 1)]  # every channel a connection of its own

# Neither of the two loads OpenSSL, as asyncio would, 4 MB for nothing; the zipapp does not either.
WITHOUT_OPENSSL = 'import sys; sys.modules.setdefault("ssl", None)'


class Bench:
    """The simulated node and the two programs on it: everything that a measurement starts from."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.installation = Installation(home)
        self.directory = home / "dp"  # the daemon's
        self.bare_directory = home / "bare/dp"  # the floor's
        self.bare_directory.mkdir(parents=True)
        for name in ("cdi", "features.d", "locks", "customized"):  # files for others are written
            (home / name).mkdir()

        self.node = SimulatedNode(home / "node")
        self.node.add("galaxy-wormhole")
        self.node.set_hugepages(32)
        self.uevents: list[bytes] = []  # to be delivered
        self.node.on_uevent = self.uevents.append

        # Of the two programs.
        (home / "customized/sitecustomize.py").write_text(WITHOUT_OPENSSL)
        os.environ["PYTHONPATH"] = str(home / "customized")

    def daemon(
        self, interval: float = 5.0, *, events: bool = False, configuration: str = ""
    ) -> Service:
        """Return the daemon for `async with`. events: from the simulated kernel."""
        return self.installation.daemon(
            self.node,
            self.directory,
            interval=interval,
            uevents=self.home / "uevents" if events else None,
            configuration=configuration,
            STATE_DIRECTORY=str(self.home),
        )

    def deliver(self) -> float:
        """Send the kernel events to the daemon; return the time just before."""
        begin = time.monotonic()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as kernel:
            for message in self.uevents:
                kernel.sendto(message, str(self.home / "uevents"))
        self.uevents.clear()
        return begin

    def floor(self) -> Service:
        command = [sys.executable, "-m", "tests.floor", str(self.bare_directory)]
        return Service(command, self.installation.environment(ROOT), self.home / "floor.notify")

    @contextlib.asynccontextmanager
    async def both(
        self, interval: float = NEVER, *, events: bool = False
    ) -> AsyncIterator[tuple[tuple[Service, Kubelet], tuple[Service, Kubelet]]]:
        """Daemon and floor, up and running, each registered with its kubelet."""
        kubelet, other = Kubelet(self.directory), Kubelet(self.bare_directory)
        async with self.daemon(interval, events=events) as daemon, self.floor() as floor:
            await daemon.ready()
            await floor.ready()
            async with kubelet, other:
                await kubelet.registered(RESOURCE)
                await other.registered(RESOURCE)
                yield (daemon, kubelet), (floor, other)

        if kubelet.violations:
            raise Broken(f"the daemon does what no good plugin does: {kubelet.violations[0]}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads, ended ones too, in seconds: clock_getcpuclockid(3)."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def loop_seconds(pid: int) -> float:
    """Return the CPU time of a process's first thread, on which its loop runs, in seconds."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def resident(pid: int) -> float:
    """Return the MB of a process in memory, as the kernel counts them."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


@contextlib.asynccontextmanager
async def calling(directory: Path) -> AsyncIterator[Any]:
    """Give a connection of its own to the plugin that serves in a directory."""
    (path,) = (each for each in directory.glob("*.sock") if each.name != "kubelet.sock")
    async with grpc.aio.insecure_channel(f"unix:{path}", options=LOCAL) as channel:
        yield rpc.DevicePluginStub(channel)


# -- what is measured ------------------------------------------------------------------------------

Pair = tuple[list[float], list[float]]  # seconds, of the daemon and of the floor


class Row(NamedTuple):
    """One line of the table: values of the daemon, beside those of the floor if there are any."""

    what: str
    values: Sequence[float]
    floor: Sequence[float] = ()
    target: float = math.inf  # at most
    of: str = "ratio"  # the figure that has the target
    unit: str = "ms"  # of values in seconds; of others, any

    def figures(self) -> dict[str, float]:
        factor = 1000 if self.unit == "ms" else 1
        ordered = sorted(value * factor for value in self.values)
        found = {"median": statistics.median(ordered)}
        if len(ordered) > 1:
            found |= {"p99": ordered[math.ceil(0.99 * len(ordered)) - 1], "max": ordered[-1]}
        if self.floor:
            found["floor"] = statistics.median(self.floor) * factor
            found["ratio"] = found["median"] / found["floor"]
        return found


async def start_to_ready(bench: Bench) -> list[Row]:
    """Measure from before the exec to READY=1, in turns."""
    times: Pair = ([], [])
    for _ in range(25):
        for child, seconds in zip((bench.daemon(), bench.floor()), times, strict=True):
            async with child:
                seconds.append(await child.ready())
    return [Row("start until READY=1", *times, 1.35)]


async def at_rest(bench: Bench) -> list[Row]:
    """Memory and CPU of both at the same time, with polls every 5 s and a stream each."""
    with Ticker(bench.node, 2.0):
        async with bench.both(5.0) as pairs:
            pids = [child.pid for child, _ in pairs]
            await asyncio.sleep(SETTLING)

            begin, before = time.monotonic(), [cpu_seconds(pid) for pid in pids]
            await asyncio.sleep(90)
            spent = time.monotonic() - begin
            ours, bare = (
                (cpu_seconds(pid) - seconds) / spent * 100
                for pid, seconds in zip(pids, before, strict=True)
            )
            held, least = map(resident, pids)

    return [
        Row("memory: RSS", [held], [least], 40, "median", "MB"),
        Row("CPU at rest", [ours], [bare], unit="%"),
        Row("  above the floor", [ours - bare], (), 0.12, "median", "%"),
    ]


async def restart(kubelet: Kubelet, pause: float) -> float:
    """Return the seconds from kubelet.sock until the first list."""
    await kubelet.kill()
    await asyncio.sleep(pause)
    await kubelet.start()
    appeared = kubelet.find("started")[-1].at

    await kubelet.registered(RESOURCE)
    return kubelet.find("list", RESOURCE, appeared)[0].at - appeared


async def kubelet_restarts(bench: Bench) -> list[Row]:
    """Measure from the moment at which kubelet.sock appears, in turns; and the CPU time of it all.

    Between the end of one kubelet and the start of the next lie up to 200 ms, so that it meets the
    daemon in every state.
    """
    pauses = random.Random(1)
    times: Pair = ([], [])
    costs: Pair = ([], [])
    async with bench.both() as pairs:
        for _ in range(100):
            pause = pauses.uniform(0, 0.2)
            for (child, kubelet), seconds, spent in zip(pairs, times, costs, strict=True):
                before = cpu_seconds(child.pid)
                seconds.append(await restart(kubelet, pause))
                await asyncio.sleep(AFTERWARDS)
                spent.append(cpu_seconds(child.pid) - before)

    return [
        Row("kubelet.sock until the devices are there", *times, 1.1),
        Row("CPU time of a kubelet restart", *costs, 1.5),
    ]


async def changes(
    bench: Bench, kubelet: Kubelet, chips: Sequence[Chip], quiet: float
) -> list[float]:
    """Return the seconds until the list without a card, and until the one with it."""
    seconds = []
    for chip in chips:
        for operation in (chip.vanish, chip.come_back):
            await asyncio.sleep(quiet)
            operation()
            begin = bench.deliver()
            await kubelet.wait_for(
                lambda: (chip.bdf in kubelet.healthy(RESOURCE)) is chip.present  # noqa: B023
            )
            seconds.append(kubelet.find("list", RESOURCE, begin)[-1].at - begin)
    return seconds


async def events_to_lists(bench: Bench) -> list[Row]:
    """Measure from the moment at which a kernel event is sent until the kubelet has the list.

    One after the other they are gathered for 30 ms; a lone one is handled at once.
    """
    async with bench.both(events=True) as ((_, kubelet), _):
        busy = await changes(bench, kubelet, [*bench.node.chips, *bench.node.chips[:18]], 0)
        lone = await changes(bench, kubelet, bench.node.chips[:20], QUIET)

    return [
        Row("kernel event until the kubelet's list", busy, (), 50, "p99"),
        Row("  after a quiet second", lone, (), 5, "median"),
    ]


async def calls(bench: Bench) -> list[Row]:
    """Unary calls in turns, with answers of the same size; one pod starts again and again."""
    containers = [pb.ContainerAllocateRequest(devices_ids=[each.bdf]) for each in bench.node.chips]
    of_each = [pb.AllocateRequest(container_requests=[each]) for each in containers]
    # Every other device of the first tray is taken; half of the rest is asked for.
    ids = sorted(chip.bdf for chip in bench.node.chips)
    wanted = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=ids[1:8:2] + ids[8:], allocation_size=14
    )
    question = pb.PreferredAllocationRequest(container_requests=[wanted])

    async with (
        bench.both() as ((_, kubelet), _),
        calling(bench.directory) as ours,
        calling(bench.bare_directory) as bare,
    ):

        async def in_turns(method: str, requests: Sequence[Any]) -> Pair:
            times: Pair = ([], [])
            for request in itertools.islice(itertools.cycle(requests), WARM_UP + 1000):
                for plugin, seconds in zip((ours, bare), times, strict=True):
                    begin = time.monotonic()
                    await getattr(plugin, method)(request)
                    seconds.append(time.monotonic() - begin)
            return times[0][WARM_UP:], times[1][WARM_UP:]

        await kubelet.admit("pod", "main", {RESOURCE: 1})
        start = pb.PreStartContainerRequest(devices_ids=kubelet.allocated(RESOURCE))
        started = await in_turns("PreStartContainer", [start])
        allocated = await in_turns("Allocate", of_each)
        preferred = await in_turns("GetPreferredAllocation", [question])

    return [
        Row("Allocate of one device", *allocated, 1.5),
        Row("GetPreferredAllocation, 14 of 28 devices", *preferred, 3.5),
        Row("PreStartContainer that does not wait", *started, 1.5),
    ]


SHARED = """
[sharing]
lock_dir = "{home}/locks"
[[sharing.resources]]
name = "galaxy-wormhole"
replicas = 100
"""


async def one_more_pod(bench: Bench) -> list[Row]:
    """Measure the CPU time of the daemon's loop in all that a pod causes, beside a hundred others.

    These are GetPreferredAllocation, Allocate, PreStartContainer, and the new checkpoint.
    """
    costs: list[float] = []
    (bench.home / "state.json").unlink(missing_ok=True)  # it has the responses of other rows
    kubelet = Kubelet(bench.directory, host=bench.node)
    daemon = bench.daemon(NEVER, configuration=SHARED.format(home=bench.home))

    async with daemon, kubelet:
        await daemon.ready()
        await kubelet.registered(RESOURCE)

        for number in range(150):
            begin = loop_seconds(daemon.pid)
            await kubelet.admit(f"pod-{number}", "main", {RESOURCE: 1})
            await kubelet.running(f"pod-{number}", "main")
            if number >= 100:
                await asyncio.sleep(2 * AFTERWARDS)
                costs.append(loop_seconds(daemon.pid) - begin)

    return [Row("one more pod, 32 chips × 100 replicas: loop", costs, (), 10, "median")]


# -- leaks -----------------------------------------------------------------------------------------

GROWTH = 2.0  # MB of RSS, after a quarter of all, when the pools of malloc and gRPC are full


async def soak(bench: Bench) -> list[Row]:
    """Restart the kubelet $RESTARTS times; raises Broken if memory or descriptors have grown.

    In between pods run, cards go and come back, streams end, and the configuration is reloaded.
    """
    restarts = int(os.environ.get("RESTARTS", 10_000))
    chance = random.Random(1)
    kubelet = Kubelet(bench.directory, host=bench.node)
    with Ticker(bench.node, 1.0):
        async with bench.daemon(events=True) as daemon, kubelet:
            await daemon.ready()
            await kubelet.registered(RESOURCE)

            for number in range(restarts):
                kubelet.events.clear()
                if number == restarts // 4:
                    first = await least_footprint(daemon.pid)

                if chance.random() < 0.2:
                    await kubelet.run_pod(f"pod-{number}", RESOURCE, chance.randrange(1, 9))
                    await kubelet.remove_pod(f"pod-{number}")
                if chance.random() < 0.04:
                    await changes(bench, kubelet, [chance.choice(bench.node.chips)], 0)
                if chance.random() < 0.02:
                    await kubelet.drop_streams()
                if chance.random() < 0.01:
                    daemon.send(signal.SIGHUP)
                    await daemon.note("READY=1")
                await restart(kubelet, chance.choice((0, 0.001, 0.02)))

            last = await least_footprint(daemon.pid)

    if kubelet.violations or last[0] > first[0] + GROWTH or last[1] != first[1]:
        raise Broken(f"MB and descriptors: {first}, at the end {last}; {kubelet.violations[:1]}")
    return [
        Row("memory after kubelet restarts: RSS", [last[0]], [first[0]], unit="MB"),
        Row("  open descriptors", [last[1]], [first[1]], unit=""),
    ]


async def least_footprint(pid: int) -> tuple[float, int]:
    """Return the least of a few looks: a poll's thread or a connection may be just ending."""
    looks = []
    for _ in range(6):
        await asyncio.sleep(0.25)
        looks.append((resident(pid), len(os.listdir(f"/proc/{pid}/fd"))))
    megabytes, descriptors = map(min, zip(*looks, strict=True))
    return megabytes, int(descriptors)


# -- the answer ------------------------------------------------------------------------------------

MEASUREMENTS = (start_to_ready, at_rest, kubelet_restarts, events_to_lists, calls, one_more_pod)
FIGURES = ("median", "p99", "max", "floor", "ratio")


def table(rows: Sequence[Row]) -> str:
    form = "{:43} {:3} {:>7} {:>7} {:>7} {:>7} {:>6}  {:15} {}"
    heading = form.format("measurement", "", *FIGURES, "target", "")
    lines = [heading, "-" * len(heading)]
    for row in rows:
        figures = row.figures()
        shown = [f"{figures[name]:.3f}"[:6] if name in figures else "" for name in FIGURES]
        has_target = row.target < math.inf
        target = f"{row.of} ≤ {row.target:g}" if has_target else ""
        verdict = ("ok" if figures[row.of] <= row.target else "MISS") if has_target else ""
        lines.append(form.format(row.what, row.unit, *shown, target, verdict).rstrip())
    return "\n".join(lines)


async def bench(*only: str) -> int:
    rows: list[Row] = []
    with workspace() as home:
        bench = Bench(home)
        async with bench.both():  # an interpreter that compiles takes 5 MB more, for good
            pass
        chosen = [globals()[name] for name in only] or MEASUREMENTS
        for measurement in chosen:
            print(f"{measurement.__name__.replace('_', ' ')} ...", file=sys.stderr)
            rows += await measurement(bench)

    print(table(rows))
    print("\nfloor: a bare grpc.aio plugin; neither of the two loads OpenSSL")
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, grpcio {grpc.__version__}, load {os.getloadavg()[0]:.2f}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run(bench(*sys.argv[1:])))
    except (Broken, TimeoutError, KeyError) as error:
        sys.exit(f"FAIL  {error}")
