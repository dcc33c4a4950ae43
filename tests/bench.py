"""What the daemon costs and how fast it is, beside the least that gRPC in Python allows.

    python -m tests.bench [--json FILE] [--only MEASUREMENT]

The floor is a bare grpc.aio plugin with the same stubs, in a process of its own, that answers
constants of the same size. Daemon and floor are measured in turns, on a simulated Galaxy with 32
devices; the reference kubelets, one for each, run in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc
from tests.world.kubelet import Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import (
    ROOT,
    Broken,
    Installation,
    Kernel,
    Service,
    footprint,
    percentile,
    run,
    within,
    workspace,
)  # fmt: skip

rpc: Any = deviceplugin_pb2_grpc  # grpcio-tools writes no types for the stubs

RESOURCE = "tenstorrent.com/galaxy-wormhole"
PATIENCE = 300.0  # seconds for one measurement
NEVER = 3600.0  # seconds between polls where a poll would disturb the measurement
SETTLING = 7.0  # seconds after which a daemon is at rest: the first poll is over
AFTERWARDS = 0.1  # seconds in which what follows a call or a registration is done
QUIET = 1.0  # seconds after which the daemon gathers no more events
WARM_UP = 50  # calls that are not measured
LOCAL = [("grpc.use_local_subchannel_pool", 1)]  # every channel a connection of its own

# -- the floor -------------------------------------------------------------------------------------


def bare_plugin() -> None:
    """Be the floor: a plain grpc.aio plugin. Its source, as it stands here, is the whole program.

    Arguments: the kubelet's directory; that of the answers, named after methods; the resource.
    """
    import asyncio
    import ctypes
    import os
    import socket
    import sys

    import grpc.aio

    from generated import deviceplugin_pb2 as pb
    from generated import deviceplugin_pb2_grpc

    rpc: Any = deviceplugin_pb2_grpc
    directory, answers, resource = sys.argv[1:]

    def answer(name: str) -> bytes:
        with open(f"{answers}/{name}", "rb") as file:
            return file.read()

    topology = pb.TopologyInfo(nodes=[pb.NUMANode(ID=0)])
    devices = [
        pb.Device(ID=f"0000:{n:02x}:00.0", health="Healthy", topology=topology) for n in range(32)
    ]

    class Constant(rpc.DevicePluginServicer):  # type: ignore[misc]
        allocation = pb.AllocateResponse.FromString(answer("Allocate"))
        preference = pb.PreferredAllocationResponse.FromString(answer("GetPreferredAllocation"))

        async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
            return pb.DevicePluginOptions()

        async def Allocate(self, request: Any, context: Any) -> Any:
            return self.allocation

        async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
            return self.preference

        async def PreStartContainer(self, request: Any, context: Any) -> Any:
            return pb.PreStartContainerResponse()

        async def ListAndWatch(self, request: Any, context: Any) -> Any:
            yield pb.ListAndWatchResponse(devices=devices)
            await asyncio.Event().wait()

    async def serve(path: str) -> grpc.aio.Server:
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(Constant(), server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        return server

    async def register(endpoint: str) -> None:
        request = pb.RegisterRequest(version="v1beta1", endpoint=endpoint, resource_name=resource)
        async with grpc.aio.insecure_channel(f"unix:{directory}/kubelet.sock") as channel:
            await rpc.RegistrationStub(channel).Register(request)

    async def run() -> None:
        appeared = asyncio.Event()
        libc = ctypes.CDLL(None)
        inotify = libc.inotify_init1(os.O_NONBLOCK)
        libc.inotify_add_watch(inotify, directory.encode(), 0x180)  # IN_CREATE, IN_MOVED_TO

        def read() -> None:
            if b"kubelet.sock" in os.read(inotify, 65536):
                appeared.set()

        asyncio.get_running_loop().add_reader(inotify, read)
        server = await serve(f"{directory}/bare-0.sock")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(b"READY=1", os.environ["NOTIFY_SOCKET"])
        number = 0
        while True:
            await appeared.wait()
            appeared.clear()
            number += 1
            await server.stop(None)
            server = await serve(f"{directory}/bare-{number}.sock")
            await register(f"bare-{number}.sock")

    asyncio.run(run())


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
        for name in ("cdi", "features.d"):  # files for others are written
            (home / name).mkdir()

        self.uevents = home / "uevents"
        self.node = SimulatedNode(home / "node")
        self.node.add("galaxy-wormhole")
        self.node.set_hugepages(32)
        self.kernel = Kernel(self.node, self.uevents)

        source = f"from __future__ import annotations\n\n{inspect.getsource(bare_plugin)}"
        (home / "floor.py").write_text(source)
        for method in self.requests:  # the floor's answers, empty so far
            (home / method).touch()

        (home / "customized").mkdir()
        (home / "customized/sitecustomize.py").write_text(WITHOUT_OPENSSL)
        os.environ["PYTHONPATH"] = str(home / "customized")  # of the two programs

    def daemon(
        self, *, interval: float = 5.0, events: bool = False, configuration: str = ""
    ) -> Service:
        """Return the daemon for `async with`. events: from the simulated kernel."""
        uevents = self.uevents if events else None
        return self.installation.daemon(
            self.node,
            self.directory,
            interval=interval,
            uevents=uevents,
            configuration=configuration,
            STATE_DIRECTORY=str(self.home),
        )

    def floor(self) -> Service:
        command = [sys.executable, "-c", "from floor import bare_plugin; bare_plugin()"]
        arguments = [str(self.bare_directory), str(self.home), RESOURCE]
        environ = self.installation.environment(ROOT, self.home)
        return Service([*command, *arguments], environ, self.home / "floor.notify")

    @contextlib.asynccontextmanager
    async def both(
        self, *, interval: float = NEVER, events: bool = False
    ) -> AsyncIterator[tuple[Service, Service, Kubelet, Kubelet]]:
        """Daemon and floor, up and running, each registered with its kubelet."""
        kubelet = Kubelet(self.directory)
        other = Kubelet(self.bare_directory)
        async with self.daemon(interval=interval, events=events) as daemon, self.floor() as floor:
            await daemon.ready()
            await floor.ready()
            async with kubelet, other:
                await kubelet.registered(RESOURCE)
                await other.registered(RESOURCE)
                yield daemon, floor, kubelet, other

        if kubelet.violations:
            raise Broken(f"the daemon does what no good plugin does: {kubelet.violations[0]}")

    @property
    def requests(self) -> dict[str, Any]:
        """The requests whose answers are measured, by method."""
        ids = sorted(chip.bdf for chip in self.node.chips)
        one = pb.ContainerAllocateRequest(devices_ids=ids[:1])
        # Every other device of the first tray is taken; half of the rest is asked for.
        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=ids[1:8:2] + ids[8:], allocation_size=14
        )
        return {
            "Allocate": pb.AllocateRequest(container_requests=[one]),
            "GetPreferredAllocation": pb.PreferredAllocationRequest(container_requests=[question]),
        }

    async def prepare(self) -> None:
        """Start each once, as an interpreter that compiles takes 5 MB more, for good.

        The daemon's answers are kept for the floor.
        """
        async with self.both(), calling(self.directory) as plugin:
            for method, request in self.requests.items():
                answer = await getattr(plugin, method)(request)
                (self.home / method).write_bytes(answer.SerializeToString())


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads, ended ones too, in seconds: clock_getcpuclockid(3)."""
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def loop_seconds(pid: int) -> float:
    """Return the CPU time of a process's first thread, on which its loop runs, in seconds."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.asynccontextmanager
async def calling(directory: Path) -> AsyncIterator[Any]:
    """Give a connection of its own to the plugin that serves in a directory."""
    (path,) = (each for each in directory.glob("*.sock") if each.name != "kubelet.sock")
    async with grpc.aio.insecure_channel(f"unix:{path}", options=LOCAL) as channel:
        yield rpc.DevicePluginStub(channel)


# -- what is measured ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, with values in `unit`; None: not measured, or makes no sense."""

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

    def below(self, ratio: float) -> Row:
        """Judge it by its ratio to the floor."""
        met = self.ratio is not None and self.ratio <= ratio
        return replace(self, target=f"≤ {ratio:g} × floor", met=met)

    def within(self, most: float, value: str = "median") -> Row:
        """Judge it by one of its values."""
        target = f"{value} < {most:g} {self.unit}"
        return replace(self, target=target, met=getattr(self, value) < most)


def timed(what: str, seconds: Sequence[float], floor: Sequence[float] = ()) -> Row:
    """Return a row in milliseconds from times in seconds."""
    return Row(
        what,
        "ms",
        statistics.median(seconds) * 1000,
        percentile(seconds, 99) * 1000,
        max(seconds) * 1000,
        statistics.median(floor) * 1000 if floor else None,
    )


async def start_to_ready(bench: Bench) -> list[Row]:
    """Measure from before the exec to READY=1, in turns."""
    daemon: list[float] = []
    floor: list[float] = []
    for _ in range(25):
        for child, times in ((bench.daemon(), daemon), (bench.floor(), floor)):
            async with child:
                times.append(await child.ready())
    return [timed("start until READY=1", daemon, floor).below(1.35)]


async def idle(bench: Bench, seconds: float, *children: Service) -> list[float]:
    """Let time pass, in which the firmware lives; return the percentage of a core of each."""

    async def pass_by(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            bench.node.tick()
            await asyncio.sleep(min(left, 2.0))

    await pass_by(SETTLING)

    begin = time.monotonic()
    before = [cpu_seconds(child.pid) for child in children]
    await pass_by(seconds)
    spent = time.monotonic() - begin
    after = [cpu_seconds(child.pid) for child in children]
    return [(b - a) / spent * 100 for a, b in zip(before, after, strict=True)]


async def at_rest(bench: Bench) -> list[Row]:
    """Memory and CPU of both at the same time, with polls every 5 s and a stream each."""
    async with bench.both(interval=5.0) as (daemon, floor, _, _):
        ours, bare = await idle(bench, 90, daemon, floor)
        held, least = footprint(daemon.pid), footprint(floor.pid)

    return [
        Row("memory: RSS", "MB", held.rss / 1024, floor=least.rss / 1024).within(40),
        Row("CPU at rest", "%", ours, floor=bare),
        Row("  above the floor", "%", ours - bare).within(0.12),
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
    times: tuple[list[float], list[float]] = ([], [])
    costs: tuple[list[float], list[float]] = ([], [])
    async with bench.both() as (daemon, floor, kubelet, other):
        pairs = ((daemon, kubelet), (floor, other))
        for _ in range(100):
            pause = pauses.uniform(0, 0.2)
            for (child, its_kubelet), seconds, spent in zip(pairs, times, costs, strict=True):
                before = cpu_seconds(child.pid)
                seconds.append(await restart(its_kubelet, pause))
                await asyncio.sleep(AFTERWARDS)
                spent.append(cpu_seconds(child.pid) - before)

    return [
        timed("kubelet.sock until the devices are there", *times).below(1.1),
        timed("CPU time of a kubelet restart", *costs).below(1.5),
    ]


async def events_to_lists(bench: Bench) -> list[Row]:
    """Measure from the moment at which a kernel event is sent until the kubelet has the list.

    One after the other they are gathered for 30 ms; a lone one is handled at once.
    """
    busy: list[float] = []
    lone: list[float] = []
    async with bench.both(events=True) as (_, _, kubelet, _):

        async def change(chip: Chip, quiet: float) -> list[float]:
            """Return the seconds until the list without a card, and until the one with it."""
            seconds = []
            for operation in (chip.vanish, chip.come_back):
                await asyncio.sleep(quiet)
                operation()
                begin = bench.kernel.deliver()
                await kubelet.wait_for(
                    lambda: (chip.bdf in kubelet.healthy(RESOURCE)) is chip.present
                )
                seconds.append(kubelet.find("list", RESOURCE, begin)[-1].at - begin)
            return seconds

        for chip in itertools.islice(itertools.cycle(bench.node.chips), 50):
            busy += await change(chip, 0)
        for chip in bench.node.chips[:20]:
            lone += await change(chip, QUIET)

    return [
        timed("kernel event until the kubelet's list", busy).within(50, "p99"),
        timed("  after a quiet second", lone).within(5),
    ]


async def in_turns(ours: Any, bare: Any, what: str, method: str, requests: Sequence[Any]) -> Row:
    """Unary calls of both plugins in turns, with the next request each time."""
    times: tuple[list[float], list[float]] = ([], [])
    next_request = itertools.cycle(requests)
    for turn in range(WARM_UP + 1000):
        request = next(next_request)
        for plugin, seconds in zip((ours, bare), times, strict=True):
            begin = time.monotonic()
            await getattr(plugin, method)(request)
            if turn >= WARM_UP:
                seconds.append(time.monotonic() - begin)

    return timed(what, *times)


async def calls(bench: Bench) -> list[Row]:
    """Calls whose answers are of the same size; the device's only pod starts again and again."""
    containers = [pb.ContainerAllocateRequest(devices_ids=[each.bdf]) for each in bench.node.chips]
    of_each = [pb.AllocateRequest(container_requests=[each]) for each in containers]
    question = bench.requests["GetPreferredAllocation"]

    async with (
        bench.both() as (_, _, kubelet, _),
        calling(bench.directory) as ours,
        calling(bench.bare_directory) as bare,
    ):
        await kubelet.admit("pod", "main", {RESOURCE: 1})
        start = pb.PreStartContainerRequest(devices_ids=kubelet.allocated(RESOURCE))
        what = "PreStartContainer that does not wait"
        started = await in_turns(ours, bare, what, "PreStartContainer", [start])

        allocate = await in_turns(ours, bare, "Allocate of one device", "Allocate", of_each)
        what = "GetPreferredAllocation, 14 of 28 devices"
        prefer = await in_turns(ours, bare, what, "GetPreferredAllocation", [question])

    return [allocate.below(1.5), prefer.below(3.5), started.below(1.5)]


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
    (bench.home / "locks").mkdir()
    configuration = SHARED.format(home=bench.home)
    (bench.home / "state.json").unlink(missing_ok=True)  # it has the responses of other rows
    kubelet = Kubelet(bench.directory, host=bench.node)
    daemon = bench.daemon(interval=NEVER, configuration=configuration)

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

    return [timed("one more pod, 32 chips × 100 replicas: loop", costs).within(10)]


# -- the answer ------------------------------------------------------------------------------------

MEASUREMENTS = (
    start_to_ready,
    at_rest,
    kubelet_restarts,
    events_to_lists,
    calls,
    one_more_pod,
)


def table(rows: Sequence[Row]) -> str:
    form = "{:43} {:3} {:>7} {:>7} {:>7} {:>7} {:>6}  {:17} {}"
    heading = form.format("measurement", "", "median", "p99", "max", "floor", "ratio", "target", "")
    lines = [heading, "-" * len(heading)]
    for row in rows:
        values = (row.median, row.p99, row.most, row.floor, row.ratio)
        figures = ["" if value is None else f"{value:.3f}"[:6] for value in values]
        verdict = {True: "ok", False: "MISS", None: ""}[row.met]
        lines.append(form.format(row.what, row.unit, *figures, row.target, verdict).rstrip())
    return "\n".join(lines)


async def bench(options: argparse.Namespace) -> int:
    rows: list[Row] = []
    with workspace() as home:
        bench = Bench(home)
        await bench.prepare()
        for measurement in MEASUREMENTS:
            if options.only not in ("", measurement.__name__):
                continue
            print(f"{measurement.__name__.replace('_', ' ')} ...", file=sys.stderr)
            rows += await within(PATIENCE, "the measurement hangs", measurement(bench))

    print(table(rows))
    print("\nfloor: a bare grpc.aio plugin; neither of the two loads OpenSSL")
    machine = f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{machine}, grpcio {grpc.__version__}, load {os.getloadavg()[0]:.2f}")

    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = [asdict(row) | {"ratio": row.ratio} for row in rows]
        options.json.write_text(f"{json.dumps(content, indent=1)}\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    names = [measurement.__name__ for measurement in MEASUREMENTS]
    parser.add_argument("--only", default="", choices=names, help="measure only this")

    try:
        return run(bench(parser.parse_args()))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
