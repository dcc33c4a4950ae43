"""What the daemon costs and how fast it is, beside the least that gRPC in Python allows.

    python -m tests.bench [--json FILE] [--pyz PATH] [--quick] [--strict]

The floor is a bare grpc.aio server with the same stubs on a unix socket, in a process of its own, that answers
constants of the same size. Daemon and floor are measured in turns, on a simulated Galaxy with 32 devices; the reference
kubelet runs in this process.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported: its core writes to stderr otherwise

import argparse
import asyncio
import contextlib
import inspect
import itertools
import json
import platform
import random
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import (
    ROOT,
    Broken,
    Installation,
    Kernel,
    Service,
    cpu_seconds,
    footprint,
    outlets,
    percentile,
    run,
    wake_ups,
    within,
    workspace,
)

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

RESOURCE = "tenstorrent.com/galaxy-wormhole"
PATIENCE = 300.0  # seconds for one measurement
NEVER = 3600.0  # seconds between polls where a poll would disturb the measurement
YOUTH = 11.0  # seconds for which a kubelet may not have named every pod yet, and is asked more often
LOCAL = [("grpc.use_local_subchannel_pool", 1)]  # every channel a connection of its own

# ------------------------------------------------------------------------------------------------------------ the floor


def bare_server() -> None:
    """The floor: a plain grpc.aio server. Its source, as it stands here, is the whole program.

    Arguments: its socket, and a directory: `allocate` and `preferred` in it are the answers to be given, and a message
    on the datagram socket `push` makes it send a list of 32 devices on each of its streams.
    """
    import asyncio
    import os
    import socket
    import sys

    import grpc.aio

    from generated import deviceplugin_pb2 as pb
    from generated import deviceplugin_pb2_grpc

    rpc: Any = deviceplugin_pb2_grpc
    path, directory = sys.argv[1:]

    def answer(name: str) -> bytes:
        try:
            with open(f"{directory}/{name}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=0)])
    devices = [pb.Device(ID=f"0000:{n:02x}:00.0", health="Healthy", topology=topology) for n in range(32)]

    class Constant(rpc.DevicePluginServicer):  # type: ignore[misc]
        allocation = pb.AllocateResponse.FromString(answer("allocate"))
        preference = pb.PreferredAllocationResponse.FromString(answer("preferred"))
        pushed = asyncio.Event()

        async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
            return pb.DevicePluginOptions()

        async def Allocate(self, request: Any, context: Any) -> Any:
            return self.allocation

        async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
            return self.preference

        async def ListAndWatch(self, request: Any, context: Any) -> Any:
            while True:
                yield pb.ListAndWatchResponse(devices=devices)
                await self.pushed.wait()
                self.pushed.clear()

    async def serve() -> None:
        server = grpc.aio.server()
        constant = Constant()
        rpc.add_DevicePluginServicer_to_server(constant, server)
        server.add_insecure_port(f"unix:{path}")
        push = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        push.bind(f"{directory}/push")

        def pushed() -> None:
            push.recv(4096)
            constant.pushed.set()

        asyncio.get_running_loop().add_reader(push, pushed)
        await server.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
        await server.wait_for_termination()

    asyncio.run(serve())


class Bench:
    """The simulated node and the two programs on it: everything that a measurement starts from."""

    def __init__(self, home: Path, pyz: Path | None, quick: bool) -> None:
        self.home = home
        self.quick = quick
        self.installation = Installation(home, pyz)
        self.directory = home / "dp"
        self.uevents = home / "uevents"
        for path in outlets(home).values():  # whatever others can read is written
            Path(path if path.endswith(("cdi", ".d")) else os.path.dirname(path)).mkdir()
        self.node = SimulatedNode(home / "node")
        self.node.add("galaxy-wormhole")
        self.node.set_hugepages(32)
        self.kernel = Kernel(self.node, self.uevents)
        source = f"from __future__ import annotations\n\n{inspect.getsource(bare_server)}"
        (home / "bare_server.py").write_text(source)

    async def compile(self) -> None:
        """Start each once, so that its bytecode is there: an interpreter that compiles takes 5 MB more, for good."""
        for child in (self.daemon(), self.floor()):
            async with child:
                await child.ready()

    def daemon(self, *, interval: float = 5.0, events: bool = False) -> Service:
        return self.installation.daemon(
            self.node, self.directory, interval=interval, uevents=self.uevents if events else None
        )

    def floor(self) -> Service:
        (self.home / "push").unlink(missing_ok=True)
        command = [sys.executable, "-c", "from bare_server import bare_server; bare_server()"]
        environment = self.installation.environment(ROOT, self.home)
        return Service([*command, str(self.floor_socket), str(self.home)], environment, self.home / "floor.notify")

    @property
    def floor_socket(self) -> Path:
        return self.home / "floor.sock"

    @contextlib.asynccontextmanager
    async def both(self, *, interval: float, events: bool = False) -> AsyncIterator[tuple[Service, Service, Kubelet]]:
        """Daemon and floor, up and running, the daemon registered with a kubelet."""
        async with self.daemon(interval=interval, events=events) as daemon, self.floor() as floor:
            await daemon.ready()
            await floor.ready()
            async with Kubelet(self.directory) as kubelet:
                await kubelet.registered(RESOURCE)
                yield daemon, floor, kubelet
                if kubelet.violations:
                    raise Broken(f"the daemon does what no good plugin does: {kubelet.violations[0]}")

    def plugin_socket(self) -> Path:
        return next(self.directory.glob("tt-*.sock"))


def channel(path: Path) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{path}", options=LOCAL)


# ---------------------------------------------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Values are in `unit`; what was not measured, or makes no sense, is None."""

    what: str
    unit: str
    median: float
    p99: float | None = None
    most: float | None = None
    floor: float | None = None  # its median
    target: str = ""
    met: bool | None = None

    @property
    def ratio(self) -> float | None:
        return self.median / self.floor if self.floor else None


def timed(what: str, seconds: Sequence[float], floor: Sequence[float] | None = None) -> Row:
    """A row in milliseconds from times in seconds."""
    return Row(
        what,
        "ms",
        statistics.median(seconds) * 1000,
        percentile(seconds, 99) * 1000,
        max(seconds) * 1000,
        statistics.median(floor) * 1000 if floor else None,
    )


def judged(row: Row, target: str, met: bool) -> Row:
    return Row(row.what, row.unit, row.median, row.p99, row.most, row.floor, target, met)


async def start_to_ready(bench: Bench) -> list[Row]:
    """From before the exec to READY=1, in turns."""
    daemon: list[float] = []
    floor: list[float] = []
    for _ in range(5 if bench.quick else 25):
        for child, times in ((bench.daemon(), daemon), (bench.floor(), floor)):
            async with child:
                times.append(await child.ready())
    row = timed("start until READY=1", daemon, floor)
    assert row.ratio
    return [judged(row, "< 1.5 × floor", row.ratio < 1.5)]


async def at_rest(bench: Bench) -> list[Row]:
    """Memory, CPU and wake-ups of both at the same time, with polls every 5 s and a stream open on each.

    All is on: CDI, labels, and metrics in a file, for which the kubelet is asked every 15 s. The kubelet has been up
    for a while, so that it is not asked for the sake of its youth. How often gRPC's own threads wake differs by several
    a second from one process to the next, of the floor's, too: so the others are told by themselves as well.
    """
    seconds = 30 if bench.quick else 120
    async with bench.both(interval=5.0) as (daemon, floor, _), channel(bench.floor_socket) as connection:
        stream = rpc.DevicePluginStub(connection).ListAndWatch(pb.Empty())
        await stream.read()

        async def pass_by(seconds: float) -> None:
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                bench.node.tick()  # the firmware lives
                await asyncio.sleep(min(left, 2.0))

        await pass_by(YOUTH)
        children = (daemon, floor)
        begin = time.monotonic()
        before = [(cpu_seconds(child.pid), *wake_ups(child.pid)) for child in children]
        await pass_by(seconds)
        spent = time.monotonic() - begin
        after = [(cpu_seconds(child.pid), *wake_ups(child.pid)) for child in children]
        cpu, floor_cpu = ((b[0] - a[0]) / spent * 100 for a, b in zip(before, after, strict=True))
        woken, floor_woken = ((b[1] - a[1]) / spent for a, b in zip(before, after, strict=True))
        own, floor_own = ((b[2] - a[2]) / spent for a, b in zip(before, after, strict=True))
        held, bare = (footprint(child.pid) for child in children)
        stream.cancel()
    mb = 1024
    return [
        Row("memory: RSS", "MB", held.rss / mb, floor=bare.rss / mb, target="< 40 MB", met=held.rss < 40 * mb),
        Row("memory: anonymous part", "MB", held.anonymous / mb, floor=bare.anonymous / mb),
        Row("CPU at rest", "%", cpu, floor=floor_cpu),
        Row("  above the floor", "%", cpu - floor_cpu, target="≤ 0.02 %", met=cpu - floor_cpu <= 0.02),
        Row("wake-ups at rest", "/s", woken, floor=floor_woken),
        Row("  above the floor", "/s", woken - floor_woken, target="≤ 1 /s", met=woken - floor_woken <= 1),
        Row("  of threads that are not gRPC's", "/s", own, floor=floor_own),
    ]


async def kubelet_restarts(bench: Bench) -> list[Row]:
    """From the moment at which kubelet.sock appears. The floor is a call over a new connection: Register is one.

    Between the end of one kubelet and the start of the next lie up to 200 ms, so that it meets the daemon in every
    state; registering ends when the kubelet has called back over a second new connection and answered.
    """
    arrived: list[float] = []
    registered: list[float] = []
    listed: list[float] = []
    floor: list[float] = []
    pauses = random.Random(1)
    async with bench.both(interval=NEVER) as (_, _, kubelet):
        for _ in range(20 if bench.quick else 100):
            await kubelet.kill()
            await asyncio.sleep(pauses.uniform(0, 0.2))
            await kubelet.start()
            appeared = kubelet.find("started")[-1].at
            await kubelet.registered(RESOURCE, 15)
            for kind, times in (("register", arrived), ("registered", registered), ("list", listed)):
                times.append(kubelet.find(kind, RESOURCE, appeared)[0].at - appeared)
            begin = time.monotonic()
            async with channel(bench.floor_socket) as connection:
                await rpc.DevicePluginStub(connection).GetDevicePluginOptions(pb.Empty())
            floor.append(time.monotonic() - begin)
    row = timed("kubelet.sock until Register arrives", arrived, floor)
    assert row.p99 is not None
    return [
        judged(row, "p99 < 20 ms", row.p99 < 20),
        timed("kubelet.sock until registered", registered),
        timed("kubelet.sock until the devices are there", listed),
    ]


async def events_to_lists(bench: Bench) -> list[Row]:
    """From the moment at which a kernel event is sent until the kubelet has the list. The floor only passes one on."""
    gone: list[float] = []
    back: list[float] = []
    floor: list[float] = []
    push = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    async with bench.both(interval=NEVER, events=True) as (_, _, kubelet), channel(bench.floor_socket) as connection:
        stream = rpc.DevicePluginStub(connection).ListAndWatch(pb.Empty())
        await stream.read()

        async def listed(deliver: Callable[[], float], healthy: bool, bdf: str) -> float:
            begin = deliver()
            await kubelet.wait_for(lambda: (bdf in kubelet.healthy(RESOURCE)) is healthy)
            return kubelet.find("list", RESOURCE, begin)[-1].at - begin

        for chip in itertools.islice(itertools.cycle(bench.node.chips), 10 if bench.quick else 50):
            chip.vanish()
            gone.append(await listed(bench.kernel.deliver, False, chip.bdf))
            chip.come_back()
            back.append(await listed(bench.kernel.deliver, True, chip.bdf))
            for _ in range(2):
                begin = time.monotonic()
                push.sendto(b"1", str(bench.home / "push"))
                await stream.read()
                floor.append(time.monotonic() - begin)
        stream.cancel()
    push.close()
    row = timed("kernel event until the kubelet's list", gone + back, floor)
    assert row.p99 is not None
    return [
        judged(row, "p99 < 50 ms", row.p99 < 50),
        timed("  a card is gone", gone),
        timed("  a card is back, and has spoken", back),
    ]


async def calls(bench: Bench) -> list[Row]:
    """Unary calls over one connection each, in turns, with the same request and an answer of the same size."""
    number = 100 if bench.quick else 1000
    async with contextlib.AsyncExitStack() as stack:
        daemon, kubelet = bench.daemon(interval=NEVER), Kubelet(bench.directory)
        await stack.enter_async_context(daemon)
        await daemon.ready()
        await stack.enter_async_context(kubelet)
        await kubelet.registered(RESOURCE)
        ids = sorted(kubelet.healthy(RESOURCE))
        ours = rpc.DevicePluginStub(await stack.enter_async_context(channel(bench.plugin_socket())))
        one = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=ids[:1])])
        # Every other device of the first tray is taken; half of the rest is asked for.
        question = pb.ContainerPreferredAllocationRequest(available_deviceIDs=ids[1:8:2] + ids[8:], allocation_size=14)
        prefer = pb.PreferredAllocationRequest(container_requests=[question])
        for name, answer in (("allocate", ours.Allocate(one)), ("preferred", ours.GetPreferredAllocation(prefer))):
            (bench.home / name).write_bytes((await answer).SerializeToString())
        floor = bench.floor()
        await stack.enter_async_context(floor)
        await floor.ready()
        bare = rpc.DevicePluginStub(await stack.enter_async_context(channel(bench.floor_socket)))

        async def in_turns(what: str, name: str, request: object) -> Row:
            times: tuple[list[float], list[float]] = ([], [])
            methods: list[Callable[[object], Awaitable[object]]] = [getattr(ours, name), getattr(bare, name)]
            for turn in range(number + 50):
                for method, seconds in zip(methods, times, strict=True):
                    begin = time.monotonic()
                    await method(request)
                    if turn >= 50:
                        seconds.append(time.monotonic() - begin)
            return timed(what, *times)

        young = await in_turns("Allocate, for a kubelet that has just started", "Allocate", one)
        await asyncio.sleep(YOUTH)
        allocate = await in_turns("Allocate of one device", "Allocate", one)
        preferred = await in_turns("GetPreferredAllocation, 14 of 28 devices", "GetPreferredAllocation", prefer)
    assert allocate.ratio and preferred.p99 is not None
    return [
        judged(allocate, "≤ 1.1 × floor", allocate.ratio <= 1.1),
        young,
        judged(preferred, "p99 < 5 ms", preferred.p99 < 5),
    ]


# --------------------------------------------------------------------------------------------------------- the answer

MEASUREMENTS = (start_to_ready, at_rest, kubelet_restarts, events_to_lists, calls)


def table(rows: Sequence[Row]) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"

    lines = [["measurement", "unit", "median", "p99", "max", "floor", "ratio", "target", ""]]
    for row in rows:
        figures = [number(value) for value in (row.median, row.p99, row.most, row.floor)]
        ratio = f"{row.ratio:.2f}" if row.ratio else ""
        verdict = {True: "ok", False: "MISS", None: ""}[row.met]
        lines.append([row.what, row.unit, *figures, ratio, row.target, verdict])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = {0, 1, 7, 8}
    texts = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(text.rstrip() for text in [texts[0], "-" * len(texts[0].rstrip()), *texts[1:]])


async def bench(options: argparse.Namespace) -> int:
    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    rows: list[Row] = []
    with workspace() as home:
        bench = Bench(home, options.pyz, options.quick)
        await bench.compile()
        for number, measurement in enumerate(MEASUREMENTS, 1):
            tell(f"{number}/{len(MEASUREMENTS)} {measurement.__name__.replace('_', ' ')} ...")
            rows += await within(PATIENCE, "the measurement does not come to an end", measurement(bench))
        tell("")
    machine = {
        "program": "zipapp" if options.pyz else "source",
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "quick": options.quick,
    }
    print(table(rows))
    print("\nfloor: a bare grpc.aio server; other than the daemon it loads OpenSSL, because asyncio does")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if options.json:
        content = [asdict(row) | {"ratio": row.ratio} for row in rows]
        options.json.write_text(json.dumps({"environment": machine, "rows": content}, indent=1) + "\n")
    return 1 if options.strict and any(row.met is False for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument("--pyz", type=lambda text: Path(text).absolute(), metavar="PATH", help="measure this zipapp")
    parser.add_argument("--quick", action="store_true", help="a fifth of the samples")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a target is missed")
    try:
        return run(bench(parser.parse_args()))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
