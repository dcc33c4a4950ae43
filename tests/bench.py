"""What the daemon costs and how fast it is, beside the least that gRPC in Python allows.

    python -m tests.bench [--json FILE] [--pyz PATH] [--quick] [--strict]

The floor is a bare grpc.aio server with the same stubs on a unix socket, in a process of its own,
that answers constants of the same size. Daemon and floor are measured in turns, on a simulated
Galaxy with 32 devices; the reference kubelet runs in this process.
"""

from __future__ import annotations

import os

# Read when grpc is imported: its core writes to stderr otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

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
    outlet_flags,
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
SETTLING = 7.0  # seconds after which a daemon is at rest: the first poll is over
SCRAPES = 1000
LOCAL = [("grpc.use_local_subchannel_pool", 1)]  # every channel a connection of its own

# -- the floor -------------------------------------------------------------------------------------


def bare_server() -> None:
    """The floor: a plain grpc.aio server. Its source, as it stands here, is the whole program.

    Arguments: its socket, and a directory: `allocate` and `preferred` in it are the answers to be
    given, and a message on the datagram socket `push` makes it send a list of 32 devices on each
    of its streams.
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
    devices = [
        pb.Device(ID=f"0000:{n:02x}:00.0", health="Healthy", topology=topology) for n in range(32)
    ]

    class Constant(rpc.DevicePluginServicer):  # type: ignore[misc]
        allocation = pb.AllocateResponse.FromString(answer("allocate"))
        preference = pb.PreferredAllocationResponse.FromString(answer("preferred"))
        pushed = asyncio.Event()

        async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
            return pb.DevicePluginOptions()

        async def Allocate(self, request: Any, context: Any) -> Any:
            return self.allocation

        async def PreStartContainer(self, request: Any, context: Any) -> Any:
            return pb.PreStartContainerResponse()

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


# Neither of the two loads OpenSSL, as asyncio would, 4 MB for nothing; the zipapp does not either.
WITHOUT_OPENSSL = 'import sys; sys.modules.setdefault("ssl", None)'

# Becomes a program to which a listening socket is handed in, see sd_listen_fds(3).
LISTEN = """
import os, socket, sys
listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
with open(sys.argv[1], "w") as port:
    port.write(str(listening.getsockname()[1]))
os.dup2(listening.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES="metrics")
os.execv(sys.argv[2], sys.argv[2:])
"""


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
        (home / "customized").mkdir()
        (home / "customized/sitecustomize.py").write_text(WITHOUT_OPENSSL)
        os.environ["PYTHONPATH"] = str(home / "customized")  # of the two programs

    async def compile(self) -> None:
        """Start each once, so that its bytecode is there: an interpreter that compiles takes 5 MB
        more, for good.
        """
        for child in (self.daemon(), self.floor()):
            async with child:
                await child.ready()

    def daemon(
        self, *, interval: float = 5.0, events: bool = False, listening: bool = False
    ) -> Service:
        """The daemon, to be started by `async with`.

        events: from the simulated kernel. listening: it gets a socket for its metrics, as systemd
        hands one in, whose port is in the file `port`.
        """
        configuration = self.home / "daemon.toml"
        configuration.write_text(f"[health]\ninterval = {interval}\n")
        flags = [f"--config-file={configuration}", f"--device-plugin-dir={self.directory}"]
        flags += [*self.node.flags, *outlet_flags(self.home)]
        uevents = self.uevents if events else None
        self.uevents.unlink(missing_ok=True)
        command, environ = self.installation.command("run", *flags, uevents=uevents)
        environ["STATE_DIRECTORY"] = str(self.home)
        if listening:
            command = [sys.executable, "-S", "-c", LISTEN, f"{self.home}/port", *command]
        return Service(command, environ, self.home / "daemon.notify")

    def floor(self) -> Service:
        (self.home / "push").unlink(missing_ok=True)
        command = [sys.executable, "-c", "from bare_server import bare_server; bare_server()"]
        environment = self.installation.environment(ROOT, self.home)
        return Service(
            [*command, str(self.floor_socket), str(self.home)],
            environment,
            self.home / "floor.notify",
        )

    @property
    def floor_socket(self) -> Path:
        return self.home / "floor.sock"

    @contextlib.asynccontextmanager
    async def both(
        self, *, interval: float, events: bool = False
    ) -> AsyncIterator[tuple[Service, Service, Kubelet]]:
        """Daemon and floor, up and running, the daemon registered with a kubelet."""
        async with self.daemon(interval=interval, events=events) as daemon, self.floor() as floor:
            await daemon.ready()
            await floor.ready()
            async with Kubelet(self.directory) as kubelet:
                await kubelet.registered(RESOURCE)
                yield daemon, floor, kubelet
                if kubelet.violations:
                    raise Broken(
                        f"the daemon does what no good plugin does: {kubelet.violations[0]}"
                    )

    def plugin_socket(self) -> Path:
        return next(self.directory.glob("tt-*.sock"))


def channel(path: Path) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(f"unix:{path}", options=LOCAL)


# -- what is measured ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. Values are in `unit`; what was not measured, or makes no sense, is
    None.
    """

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
    return [judged(row, "≤ 1.45 × floor", row.ratio <= 1.45)]


@dataclass(frozen=True, slots=True)
class Idle:
    """What a process spends while nothing happens."""

    cpu: float  # percent
    woken: float  # times a second
    own: float  # the same of threads that are not gRPC's

    def minus(self, other: Idle) -> Idle:
        return Idle(self.cpu - other.cpu, self.woken - other.woken, self.own - other.own)


async def idle(bench: Bench, seconds: float, *children: Service) -> list[Idle]:
    """Let time pass, in which the firmware lives, and see what these spend."""

    async def pass_by(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            bench.node.tick()
            await asyncio.sleep(min(left, 2.0))

    await pass_by(SETTLING)
    begin = time.monotonic()
    before = [(cpu_seconds(child.pid), *wake_ups(child.pid)) for child in children]
    await pass_by(seconds)
    spent = time.monotonic() - begin
    after = [(cpu_seconds(child.pid), *wake_ups(child.pid)) for child in children]
    found = []
    for then, now in zip(before, after, strict=True):
        cpu, woken, own = ((b - a) / spent for a, b in zip(then, now, strict=True))
        found.append(Idle(cpu * 100, woken, own))
    return found


async def at_rest(bench: Bench) -> list[Row]:
    """Memory, CPU and wake-ups of both at the same time, with polls every 5 s and a stream each.

    All is on: CDI, labels, and for the second half the metrics in a file, for which the cards'
    figures are read every 15 s. How often gRPC's own threads wake differs by several a second from
    one process to the next, of the floor's, too: so the others are counted by themselves as well.
    """
    seconds = 15 if bench.quick else 90
    metrics = Path(outlets(bench.home)["metrics_file"]).parent
    metrics.rename(f"{metrics}.away")
    async with (
        bench.both(interval=5.0) as (daemon, floor, _),
        channel(bench.floor_socket) as connection,
    ):
        stream = rpc.DevicePluginStub(connection).ListAndWatch(pb.Empty())
        await stream.read()
        ours, bare = await idle(bench, seconds, daemon, floor)
        Path(f"{metrics}.away").rename(metrics)
        taken, bare_then = await idle(bench, seconds, daemon, floor)
        held, bare_held = (footprint(child.pid) for child in (daemon, floor))
        stream.cancel()
    mb = 1024
    above, above_then = ours.minus(bare), taken.minus(bare_then)
    rss = Row("memory: RSS", "MB", held.rss / mb, floor=bare_held.rss / mb)
    cpu = Row("  above the floor", "%", above.cpu)
    cpu_then = Row("  above the floor", "%", above_then.cpu)
    woken = Row("  above the floor", "/s", above.woken)
    anonymous = held.anonymous / mb
    return [
        judged(rss, "≤ 40 MB", held.rss <= 40 * mb),
        Row("memory: anonymous part", "MB", anonymous, floor=bare_held.anonymous / mb),
        Row("CPU at rest", "%", ours.cpu, floor=bare.cpu),
        judged(cpu, "≤ 0.1 %", above.cpu <= 0.1),
        Row("CPU at rest, metrics taken", "%", taken.cpu, floor=bare_then.cpu),
        cpu_then,
        Row("wake-ups at rest", "/s", ours.woken, floor=bare.woken),
        judged(woken, "≤ 3 /s", above.woken <= 3),
        Row("  of threads that are not gRPC's", "/s", ours.own, floor=bare.own),
    ]


async def kubelet_restarts(bench: Bench) -> list[Row]:
    """From the moment at which kubelet.sock appears. The floor is a call over a new connection.

    Between the end of one kubelet and the start of the next lie up to 200 ms, so that it meets the
    daemon in every state; registering ends when the kubelet has called back over a second new
    connection and answered.
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
            for kind, times in (
                ("register", arrived),
                ("registered", registered),
                ("list", listed),
            ):
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
    """From the moment at which a kernel event is sent until the kubelet has the list. The floor
    only passes one on.
    """
    gone: list[float] = []
    back: list[float] = []
    floor: list[float] = []
    push = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    async with (
        bench.both(interval=NEVER, events=True) as (_, _, kubelet),
        channel(bench.floor_socket) as connection,
    ):
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
    """Unary calls over one connection each, in turns, with the same request and an answer of the
    same size.
    """
    number = 100 if bench.quick else 1000
    async with contextlib.AsyncExitStack() as stack:
        daemon, kubelet = bench.daemon(interval=NEVER), Kubelet(bench.directory)
        await stack.enter_async_context(daemon)
        await daemon.ready()
        await stack.enter_async_context(kubelet)
        await kubelet.registered(RESOURCE)
        ids = sorted(kubelet.healthy(RESOURCE))
        ours = rpc.DevicePluginStub(await stack.enter_async_context(channel(bench.plugin_socket())))
        one = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids[:1])]
        )
        # Every other device of the first tray is taken; half of the rest is asked for.
        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=ids[1:8:2] + ids[8:], allocation_size=14
        )
        prefer = pb.PreferredAllocationRequest(container_requests=[question])
        for name, answer in (
            ("allocate", ours.Allocate(one)),
            ("preferred", ours.GetPreferredAllocation(prefer)),
        ):
            (bench.home / name).write_bytes((await answer).SerializeToString())
        floor = bench.floor()
        await stack.enter_async_context(floor)
        await floor.ready()
        bare = rpc.DevicePluginStub(await stack.enter_async_context(channel(bench.floor_socket)))

        async def in_turns(what: str, name: str, request: object) -> Row:
            times: tuple[list[float], list[float]] = ([], [])
            methods: list[Callable[[object], Awaitable[object]]] = [
                getattr(ours, name),
                getattr(bare, name),
            ]
            for turn in range(number + 50):
                for method, seconds in zip(methods, times, strict=True):
                    begin = time.monotonic()
                    await method(request)
                    if turn >= 50:
                        seconds.append(time.monotonic() - begin)
            return timed(what, *times)

        allocate = await in_turns("Allocate of one device", "Allocate", one)
        start = pb.PreStartContainerRequest(devices_ids=ids[:1])
        started = await in_turns("PreStartContainer", "PreStartContainer", start)
        preferred = await in_turns(
            "GetPreferredAllocation, 14 of 28 devices", "GetPreferredAllocation", prefer
        )
    assert allocate.ratio and preferred.p99 is not None
    return [
        judged(allocate, "≤ 1.2 × floor", allocate.ratio <= 1.2),
        started,
        judged(preferred, "p99 < 5 ms", preferred.p99 < 5),
    ]


async def scrapes_and_restarts(bench: Bench) -> list[Row]:
    """1,000 scrapes by ten clients while the kubelet is restarted ten times: who has to wait?"""
    scraped: list[float] = []
    registered: list[float] = []
    lost = 0

    async def scrape(port: int, times: int) -> None:
        for _ in range(times):
            begin = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if not answer.startswith(b"HTTP/1.1 200 OK"):
                raise Broken(f"a scrape was answered with {answer[:40]!r}")
            scraped.append(time.monotonic() - begin)

    daemon = bench.daemon(listening=True)
    async with daemon, Kubelet(bench.directory) as kubelet:
        await daemon.ready()
        await kubelet.registered(RESOURCE, PATIENCE)
        port = int((bench.home / "port").read_text())
        number = SCRAPES // (50 if bench.quick else 10)
        clients = [asyncio.create_task(scrape(port, number)) for _ in range(10)]
        for _ in range(10):
            await kubelet.restart()
            appeared = kubelet.find("started")[-1].at
            try:
                await kubelet.registered(RESOURCE, 15)
                registered.append(kubelet.find("list", RESOURCE, appeared)[0].at - appeared)
            except TimeoutError:
                lost += 1
        await asyncio.gather(*clients)
    what = f"{10 * number} scrapes, 10 kubelet restarts: registrations lost"
    return [
        judged(Row(what, "", lost), "0", lost == 0),
        timed("  a scrape", scraped),
        timed("  kubelet.sock until the devices are there", registered),
    ]


async def to_the_end(bench: Bench) -> list[Row]:
    """From SIGTERM until the process is gone, with a kubelet that watches."""
    times: list[float] = []
    async with Kubelet(bench.directory) as kubelet:
        for _ in range(3 if bench.quick else 10):
            async with bench.daemon() as daemon:
                await daemon.ready()
                await kubelet.registered(RESOURCE, 15)
                times.append((await daemon.stop())[1])
    row = timed("SIGTERM until the end", times)
    return [judged(row, "max < 1 s", max(times) < 1)]


# -- the answer ------------------------------------------------------------------------------------

MEASUREMENTS = (
    start_to_ready,
    at_rest,
    kubelet_restarts,
    events_to_lists,
    calls,
    scrapes_and_restarts,
    to_the_end,
)


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
            rows += await within(
                PATIENCE, "the measurement does not come to an end", measurement(bench)
            )
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
    print("\nfloor: a bare grpc.aio server; neither of the two loads OpenSSL")
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    if options.json:
        content = [asdict(row) | {"ratio": row.ratio} for row in rows]
        options.json.write_text(
            json.dumps({"environment": machine, "rows": content}, indent=1) + "\n"
        )
    return 1 if options.strict and any(row.met is False for row in rows) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    parser.add_argument(
        "--pyz", type=lambda text: Path(text).absolute(), metavar="PATH", help="measure this zipapp"
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the samples")
    parser.add_argument("--strict", action="store_true", help="exit status 1 if a target is missed")
    try:
        return run(bench(parser.parse_args()))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
