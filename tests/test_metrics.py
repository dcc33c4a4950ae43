"""Metrics: which exist, what they count, when sensors are read, and how they are served."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.conftest import StartDaemon, no_descriptors, polls
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, outlets, until
from tests.world.simulation import RunningDaemon, settings_of
from tests.world.tree import put
from ttdp import (
    ChipState,
    Fault,
    HealthSettings,
    Identity,
    Kind,
    ReadError,
    Reading,
    Samples,
    Settings,
    SharedResource,
    Sharing,
    Telemetry,
)

N150 = "tenstorrent.com/n150"


def samples(text: str) -> dict[str, float]:
    """The value of each series; a series that appears twice is an error."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len({series for series, _ in lines})
    return {series: float(value) for series, value in lines}


class CountingSocket(socket.socket):
    """A listening socket that counts the connections that its server has open."""

    def __init__(self) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen(4096)
        self.accepted = 0
        self.most = 0  # open at a time
        self._connections: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._connections = [*self.open, connection]
        self.accepted += 1
        self.most = max(self.most, len(self._connections))
        return connection, address

    @property
    def open(self) -> list[socket.socket]:
        return [each for each in self._connections if each.fileno() >= 0]


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> CountingSocket:
    """The socket that systemd passes to daemons."""
    found = CountingSocket()
    passed = {"metrics": [found]}
    monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda _, name: passed.get(name, []))
    return found


GET = b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n"
OK = "HTTP/1.1 200 OK"


async def answer(listening: CountingSocket, request: bytes = GET) -> tuple[str, str]:
    """Return the status line and the body."""
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(request)
    text = (await asyncio.wait_for(reader.read(), PATIENCE)).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def scrape(listening: CountingSocket) -> dict[str, float]:
    return samples((await answer(listening))[1])


def of(address: str, found: dict[str, float]) -> dict[str, float]:
    """The series of a chip, without `tt_device_` and its address."""
    mine = {}

    for series, value in found.items():
        if f'device="{address}"' in series and "_info{" not in series:
            rest = series.replace(f'device="{address}"', "").replace("{,", "{").replace("{}", "")
            mine[rest.removeprefix("tt_device_")] = value
    return mine


def rendered(decision: ttdp.Decision, *states: ChipState) -> str:
    """All metrics of a node and its daemon."""
    by_bdf = {bdf: ChipState(each) for bdf, each in decision.chips.items()}
    by_bdf |= {state.chip.bdf: state for state in states}
    return ttdp.chip_metrics(decision, by_bdf) + ttdp.plugin_metrics(decision, {}, Counter(), 1.5e9)


P150A = {  # as it was captured on the real driver, but for a PCIe error
    "healthy": 1,
    "temperature_celsius": 41.5,
    "temperature_limit_celsius": 90,
    "thermal_trips_total": 0,
    "power_watts": 24,
    "power_limit_watts": 150,
    "current_amperes": 33,
    "current_limit_amperes": 200,
    "voltage_volts": 0.712,
    "voltage_limit_volts": 0.9,
    "fan_rpm": 1650,
    'clock_hertz{clock="aiclk"}': 800e6,
    'clock_hertz{clock="axiclk"}': 960e6,
    'clock_hertz{clock="arcclk"}': 400e6,
    "open": 0,
    "pcie_link_width": 16,
    "pcie_link_width_max": 16,
    "pcie_link_transfers_per_second": 32e9,
    "pcie_link_transfers_per_second_max": 32e9,
    'pcie_errors_total{severity="correctable"}': 7,
    'pcie_errors_total{severity="nonfatal"}': 0,
    'pcie_errors_total{severity="fatal"}': 0,
}


async def test_a_card_has_its_sensors_in_base_units_though_polls_are_rare(
    tmp_path: Path, directory: Path, listening: CountingSocket
) -> None:
    """Watts, amperes, volts, hertz: a scrape has them read, and does not wait for a poll."""
    node = SimulatedNode.from_capture(tmp_path / "captured", "p150ax2")
    card = node.chips[0]
    errors = card.attribute("max_link_width").with_name("aer_dev_correctable")
    put(errors, "RxErr 0\nBadTLP 7\nTOTAL_ERR_COR 7")

    async with RunningDaemon(node, settings_of(node, directory, interval=3600)) as daemon:
        await daemon.ready()
        assert of(card.bdf, await scrape(listening)) == P150A


def measured() -> ChipState:
    """A chip of which everything has been read."""
    state = ChipState(chip(1))
    read(state, Telemetry(Identity(serial="A" * 16), temperature=41.5), sensors=SENSORS)
    return state


SENSORS = {sensor.attribute: 1.0 for sensor in ttdp.SENSORS}
CHIP = chip(1).function


def read(
    state: ChipState, telemetry: Telemetry, sensors: Mapping[str, float] | None = None
) -> None:
    """Apply a reading: also of processes, if it is one of sensors."""
    processes = None if sensors is None else ()
    reading = Reading(CHIP, telemetry, 1.0, sensors=sensors, processes=processes)
    state.apply(reading, HealthSettings())


def failure(number: int) -> Telemetry:
    return Telemetry(error=ReadError("tt_heartbeat", number))


# What happens to a chip, with the kind of fault that it has then.
ENDS: list[tuple[str, Callable[[ChipState], None]]] = [
    ("gone", lambda state: state.vanish(CHIP.without_class_device()._replace(on_bus=False))),
    ("no_driver", lambda state: state.vanish(CHIP.without_class_device())),
    ("node", lambda state: state.vanish(CHIP.without_class_device("tenstorrent"))),
    ("blocked", lambda state: state.block()),
    ("no_response", lambda state: read(state, Telemetry(all_ones=True))),
    ("no_response", lambda state: read(state, Telemetry(all_ones=True), sensors=SENSORS)),
    ("resetting", lambda state: read(state, failure(errno.ENODATA))),
    ("read_error", lambda state: read(state, failure(errno.EIO))),
]
each_end = pytest.mark.parametrize(("kind", "end"), ENDS, ids=[kind for kind, _ in ENDS])


@each_end
def test_a_chip_that_cannot_be_read_has_no_values(
    kind: str, end: Callable[[ChipState], None]
) -> None:
    """Neither all ones nor its last ones; its health and its fault stay."""
    state = measured()

    end(state)

    found = of(bdf(1), samples(rendered(decide([state.chip]), state)))
    assert found == {"healthy": 0, f'fault{{kind="{kind}"}}': 1}


@each_end
def test_a_chip_that_can_be_read_again_has_no_sensors_of_before(
    kind: str, end: Callable[[ChipState], None]
) -> None:
    """Telemetry is read at each poll, sensors only every 15 seconds."""
    state = measured()
    end(state)

    if not state.chip.is_present:
        state.appear(CHIP)
    read(state, Telemetry(temperature=30.0))

    found = of(bdf(1), samples(rendered(decide([state.chip]), state)))
    found.pop("open", None)
    assert found == {"healthy": 1, "temperature_celsius": 30}, kind


def test_a_chip_with_another_number_has_no_values_of_before() -> None:
    """Its driver was bound again between two scans: no process has that device file open."""
    state = measured()

    state.appear(CHIP)
    assert "open" in of(bdf(1), samples(rendered(decide([state.chip]), state)))

    state.appear(CHIP._replace(ordinal=7))
    assert of(bdf(1), samples(rendered(decide([state.chip]), state))) == {"healthy": 1}


@pytest.mark.parametrize("kind", ["stalled", "hot", "tripped", "silent", "node"])
def test_a_chip_that_can_be_read_has_its_values_whatever_its_fault_is(kind: str) -> None:
    """Sysfs needs no device file, and PCI's own attributes need no firmware."""
    state = measured()
    state.chip = state.chip._replace(telemetry_fault=Fault(Kind(kind), "it is ill"))

    found = of(bdf(1), samples(rendered(decide([state.chip]), state)))

    assert found[f'fault{{kind="{kind}"}}'] == 1
    assert {"temperature_celsius", "power_watts", "open"} <= found.keys()


def test_a_chip_that_reports_nothing_has_no_values_of_before() -> None:
    """After a rebind it is healthy for ten seconds, until its firmware must have reported."""
    state = ChipState(chip(1), telemetry=Telemetry(temperature=41.5))
    read(state, Telemetry())

    assert of(bdf(1), samples(rendered(decide([state.chip]), state))) == {"healthy": 1}


def test_another_card_in_the_slot_has_no_sensors_of_the_former_one() -> None:
    """Its serial shows that it is another one, and sensors are read every 15 s only."""
    state = measured()

    read(state, Telemetry(Identity(serial="B" * 16)))

    assert of(bdf(1), samples(rendered(decide([state.chip]), state))) == {"healthy": 1}


def test_a_chip_has_its_identity_as_labels() -> None:
    """It stays known while the chip is gone; a label without a known value is empty."""
    gone = chip(1, "n300", numa_node=1, present=False, serial="A" * 16, firmware="19.4.0.0")

    found = samples(rendered(decide([gone, chip(2, "p150a")])))

    assert {series for series in found if series.startswith("tt_device_info")} == {
        'tt_device_info{device="0000:01:00.0",board="n300",card="n300",arch="wormhole",'
        'serial="AAAAAAAAAAAAAAAA",firmware="19.4.0.0",numa_node="1",'
        'resource="tenstorrent.com/n300",excluded="false"}',
        'tt_device_info{device="0000:02:00.0",board="p150",card="p150a",arch="blackhole",'
        'serial="",firmware="",numa_node="",resource="tenstorrent.com/p150",excluded="false"}',
    }


def test_the_processes_that_have_a_device_file_open_are_counted() -> None:
    """So that "allocated but idle" is a query; one without a count is not shown by the driver."""
    unknown, idle, busy = (ChipState(chip(bus), telemetry=Telemetry()) for bus in (1, 2, 3))
    idle.processes = []
    busy.processes = [{"pid": pid, "command": "python3"} for pid in range(2)]

    states = [unknown, idle, busy]
    found = samples(rendered(decide([state.chip for state in states]), *states))

    counts = [found.get(f'tt_device_open{{device="{state.chip.bdf}"}}') for state in states]
    assert counts == [None, 0, 2]


def test_an_allocated_chip_has_its_containers() -> None:
    """Once each, however many replicas; a pod without a name by its UID; a pending one not yet."""
    pods = [
        hold("n150", f"{bdf(1)}::0", f"{bdf(1)}::1", buses=[1]),
        hold("n150", f"{bdf(1)}::2", buses=[1], pod="1f-2a"),
        hold("n150", f"{bdf(1)}::3", buses=[1], pod="")._replace(container=""),
    ]
    settings = Settings(sharing=Sharing(resources=(SharedResource("n150", 4),)))

    found = samples(rendered(decide([chip(1)], settings, pods)))

    labels = [
        'pod_namespace="default",pod_name="train",container_name="main"',
        'pod_namespace="",pod_name="1f-2a",container_name="main"',
    ]
    assert {series for series in found if "_allocated{" in series} == {
        f'tt_device_allocated{{device="{bdf(1)}",{each}}}' for each in labels
    }
    assert found[f'tt_resource_devices{{resource="{N150}",health="healthy"}}'] == 4


def test_functions_are_counted_by_driver_and_the_driver_is_shown_while_it_is_loaded() -> None:
    """An empty label is a function without a driver; one that left the bus does not count.

    A card of a generation that is not known is "unsupported", whatever is bound to it.
    """
    chips = [chip(99, present=False)]
    for bus, name in enumerate(["tenstorrent", "tenstorrent", "vfio-pci", None]):
        each = chip(bus)
        chips.append(each._replace(function=each.function._replace(driver=name)))

    counts = {"tenstorrent": 2, "vfio-pci": 1, "": 1, "unsupported": 1}
    wanted = {f'tt_pci_functions{{driver="{name}"}}': count for name, count in counts.items()}
    for driver in ("2.10.1", None):
        decision = decide(chips, driver=driver, unsupported=("0000:05:00.0",))
        found = samples(rendered(decision))
        shown = {series: value for series, value in found.items() if "driver" in series}
        assert shown == wanted | ({f'tt_driver_info{{version="{driver}"}}': 1} if driver else {})


async def test_what_the_daemon_does_is_counted_from_zero(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, listening: CountingSocket
) -> None:
    """Registrations, and allocations by result; a counter is there before it counts."""
    _, second = node.add("n150") + node.add("n150")
    await kubelet.stop()
    daemon = await start(interval=0.1)
    await daemon.ready()

    resource = f'resource="{N150}"'
    counters = [
        f"tt_kubelet_registered{{{resource}}}",
        f"tt_kubelet_registrations_total{{{resource}}}",
        f'tt_allocations_total{{{resource},result="granted"}}',
        f'tt_allocations_total{{{resource},result="refused"}}',
    ]
    found = await scrape(listening)
    assert [found[counter] for counter in counters] == [0, 0, 0, 0]

    await kubelet.start()
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 1})

    node.on_uevent = None
    second.device_node.unlink()
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})

    await until(lambda: daemon.chip(second.bdf).fault)
    found = await scrape(listening)
    assert [found[counter] for counter in counters] == [1, 1, 1, 1]
    for health in ("healthy", "unhealthy"):
        assert found[f'tt_resource_devices{{{resource},health="{health}"}}'] == 1
    assert found[f'tt_plugin_info{{version="{ttdp.__version__}"}}'] == 1
    assert abs(found["tt_plugin_start_time_seconds"] - time.time()) < 60


async def test_sensors_are_read_every_15_seconds_at_most_and_only_for_metrics(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch,
    listening: CountingSocket,
) -> None:  # fmt: skip
    """Not for polls; the file and requests share what was read."""
    reads: list[str] = []
    genuine = ttdp.read_sensors

    def read(function: ttdp.PciFunction) -> dict[str, float]:
        reads.append(function.bdf)
        return genuine(function)

    monkeypatch.setattr(ttdp, "read_sensors", read)
    file = Path(outlets(directory.parent)["metrics_file"])
    node.add("p150a")
    daemon = await start(interval=0.02)
    await polls(daemon)
    assert reads == []

    file.parent.mkdir()
    await until(file.exists)
    written = file.stat().st_mtime_ns
    for _ in range(3):
        assert of(bdf(1), await scrape(listening))["power_watts"] == 24

    await polls(daemon)
    assert reads == [bdf(1)] and file.stat().st_mtime_ns == written
    assert "tt_device_power_watts" in file.read_text()


@pytest.fixture
def file(directory: Path) -> Path:
    """The metrics file, whose directory exists."""
    path = Path(outlets(directory.parent)["metrics_file"])
    path.parent.mkdir()
    return path


async def test_without_a_rendering_the_file_grows_old_and_requests_get_503(
    node: SimulatedNode, start: StartDaemon, file: Path, monkeypatch: pytest.MonkeyPatch,
    listening: CountingSocket,
) -> None:  # fmt: skip
    """Figures are never passed off as newer than they are."""
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.05)
    node.add("n150")
    await start(interval=0.02)
    await until(file.exists)
    attempts: list[int] = []

    def fail(*_: object) -> str:
        attempts.append(0)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "plugin_metrics", fail)
        await until(lambda: attempts)
        written = file.stat().st_mtime_ns
        reason = ("HTTP/1.1 503 Service Unavailable", "the metrics cannot be collected\n")
        for _ in range(3):
            assert await answer(listening) == reason
        assert file.stat().st_mtime_ns == written and file.read_text() != ""

    # Then it is written again, though nothing changes.
    await until(lambda: file.stat().st_mtime_ns > written)
    assert (await answer(listening))[0] == OK


PLUGIN_METRICS = """driver_info pci_functions resource_devices kubelet_registered allocations_total
kubelet_registrations_total plugin_info plugin_start_time_seconds"""


def test_every_metric_of_the_design_has_a_help_text_and_a_type() -> None:
    """Once, before its samples; a help text is a sentence, as Prometheus shows it alone."""
    state = ChipState(chip(1), telemetry=Telemetry(temperature=1, throttles_at=2, trips=3))
    state.sensors = {sensor.attribute: 1.0 for sensor in ttdp.SENSORS}
    state.processes = []
    ill = chip(2, fault=Kind.HOT)

    text = rendered(decide([state.chip, ill], None, [hold("n150", "x", buses=[1])]), state)

    comments = re.findall(r"^# HELP (\S+) (.*)\n# TYPE (\S+) (\S+)\n(\S+?)[{ ]", text, re.MULTILINE)
    of_chips = {"info", "fault", "allocated", *(series.partition("{")[0] for series in P150A)}
    wanted = {f"tt_device_{name}" for name in of_chips}
    wanted |= {f"tt_{name}" for name in PLUGIN_METRICS.split()}
    assert sorted(name for name, *_ in comments) == sorted(wanted)

    for name, help, typed, kind, first in comments:
        assert name == typed == first
        assert kind == ("counter" if name.endswith("_total") else "gauge")
        assert re.fullmatch(r"[A-Z].* .* .*\.", help), help


@hypothesis_settings(deadline=None)
@given(st.text('ab"\\\n\r\t\x00\x85é\u2028😀'))
def test_a_label_can_have_any_value(value: str) -> None:
    """In one line; backslashes, quotes and newlines are escaped as the format requires."""
    found = Samples("tt_", {"x": "X."})
    found.add("x", 1, label=value)

    line = found.text().split("\n", 2)[2].removesuffix("\n")
    match = re.fullmatch(r'tt_x\{label="((?:[^"\\\n]|\\[\\n"])*)"\} 1', line)
    unescaped = {"n": "\n"}
    assert match and re.sub(r"\\(.)", lambda m: unescaped.get(m[1], m[1]), match[1]) == value


def test_no_series_appears_twice_and_no_metric_without_a_sample() -> None:
    """The last value of a series counts; None is no sample."""
    found = Samples("tt_", {"x": "X.", "y": "Y.", "z": "Z."})

    for value, label in ((1, 1), (5, 2), (3, 1)):
        found.add("x", value, a=label)
    found.add("y", None)

    assert samples(found.text()) == {'tt_x{a="1"}': 3, 'tt_x{a="2"}': 5}
    assert "tt_y" not in found.text() and "tt_z" not in found.text()


@contextlib.asynccontextmanager
async def serving(render: Callable[[], Coroutine[Any, Any, str]]) -> AsyncIterator[CountingSocket]:
    """Serve what `render` returns; the socket's address is the server's."""
    listening = CountingSocket()
    server = ttdp.MetricsServer(ttdp.SharedText(render))
    task = asyncio.create_task(server.serve(listening))
    yield listening
    task.cancel()
    listening.close()


async def render_at_once() -> str:
    return "x 1\n"


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelname in ("WARNING", "ERROR")]


NOT_FOUND = ("HTTP/1.1 404 Not Found", "use GET /metrics\n")


@pytest.mark.parametrize(
    ("request_text", "wanted"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", (OK, "x 1\n")),
        (b"GET /metrics?x=1 HTTP/1.0\n\n", (OK, "x 1\n")),
        (b"POST /metrics HTTP/1.1\r\n\r\n", NOT_FOUND),
        (b"\xff\x00\r\n\r\n", NOT_FOUND),
    ],
    ids=["get", "get with a query", "post", "garbage"],
)
async def test_get_metrics_is_answered_and_any_other_request_gets_404(
    request_text: bytes, wanted: tuple[str, str]
) -> None:
    """With what to use instead."""
    async with serving(render_at_once) as listening:
        assert await answer(listening, request_text) == wanted


@pytest.mark.parametrize(
    ("request_text", "timeout"),
    [(b"GET /metrics HTTP/1.1\r\nX: ", 0.5), (b"x" * 100_000, 3600)],
    ids=["without an end", "too long"],
)
async def test_a_request_that_is_not_complete_costs_only_its_connection(
    request_text: bytes, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without an end is closed after its time, a long one at once; the next is answered."""
    monkeypatch.setattr(ttdp.ConnectionServer, "TIMEOUT", timeout)
    async with serving(render_at_once) as listening:
        with contextlib.suppress(ConnectionResetError):
            assert await answer(listening, request_text) == ("", "")
        await until(lambda: not listening.open)

        assert await answer(listening) == (OK, "x 1\n")


async def test_simultaneous_requests_share_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it takes too long they get none; the next request gets a new one."""
    may_end = asyncio.Event()
    ended = 0

    async def render() -> str:
        nonlocal ended
        await may_end.wait()
        ended += 1
        return f"x {ended}\n"

    text = ttdp.SharedText(render)

    requests = asyncio.gather(*(text.get() for _ in range(30)))
    await asyncio.sleep(0)
    may_end.set()
    assert await requests == ["x 1\n"] * 30

    may_end.clear()
    monkeypatch.setattr(text, "TIMEOUT", 0.05)
    assert [await text.get(), await text.get()] == [None, None]

    may_end.set()
    await until(lambda: ended == 2)
    monkeypatch.setattr(text, "TIMEOUT", PATIENCE)
    assert await text.get() == "x 3\n"


@contextlib.asynccontextmanager
async def burst(listening: CountingSocket, count: int) -> AsyncIterator[None]:
    """Have so many clients that connect at once, ask, and wait."""
    loop = asyncio.get_running_loop()

    async def connect(client: socket.socket) -> None:
        client.setblocking(False)
        with contextlib.suppress(OSError):  # it was closed already
            await loop.sock_connect(client, listening.getsockname())
            await loop.sock_sendall(client, GET)

    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        await asyncio.gather(*map(connect, clients))
        await until(lambda: listening.accepted >= count)
        yield


@pytest.fixture
async def served(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, short_tmp: Path,
    listening: CountingSocket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> AsyncIterator[CountingSocket]:  # fmt: skip
    """The socket of a daemon that has a device, keeps connections, and complains of nothing."""
    node.add("n150")
    daemon = await start(interval=3600, runtime_dir=str(short_tmp))
    await kubelet.registered(N150)
    await daemon.ready()
    caplog.clear()
    monkeypatch.setattr(ttdp.ConnectionServer, "TIMEOUT", 3600)
    yield listening

    assert complaints(caplog) == []


async def test_at_most_32_connections_are_open_in_a_burst_and_nothing_else_notices(
    served: CountingSocket, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a rendering takes long: the oldest is closed for the newest, which is answered."""
    is_read = asyncio.Event()
    monkeypatch.setattr(ttdp.Reporter, "_await_details", lambda *_: is_read.wait())
    monkeypatch.setattr(ttdp.SharedText, "TIMEOUT", 3600)

    async with burst(served, 200):
        assert served.most == 32 and len(served.open) <= 32
        await kubelet.admit("pod", "main", {N150: 1})

        is_read.set()
        assert (await scrape(served))[f'tt_kubelet_registered{{resource="{N150}"}}'] == 1
        assert served.most == 32


@pytest.mark.usefixtures("served")
async def test_a_client_of_the_view_that_stops_reading_delays_nobody(
    kubelet: Kubelet, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its view is larger than a socket's buffer. The loop goes on, and the next one is served."""
    genuine = ttdp.view_of_node

    def large(*arguments: Any, **named: Any) -> dict[str, Any]:
        return {**genuine(*arguments, **named), "filler": "x" * 1_000_000}

    monkeypatch.setattr(ttdp, "view_of_node", large)
    path = str(short_tmp / ttdp.STATUS_SOCKET)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        await asyncio.to_thread(client.recv, 1)

        await kubelet.admit("pod", "main", {N150: 1})
        reader, writer = await asyncio.open_unix_connection(path)
        view = json.loads(await asyncio.wait_for(reader.read(), PATIENCE))
        writer.close()

    assert view["chips"]


async def test_without_descriptors_the_server_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log, however long that lasts; then it answers the client that waits."""
    monkeypatch.setattr(ttdp.ConnectionServer, "RETRY_AFTER", 0.01)
    refused = 0

    def refuse(*_: object) -> None:
        nonlocal refused
        refused += 1
        no_descriptors()

    async with serving(render_at_once) as listening:
        for times in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(CountingSocket, "accept", refuse)
                waiting = asyncio.create_task(answer(listening))
                await until(lambda: refused >= 5 * times)  # noqa: B023
            assert await waiting == (OK, "x 1\n")
            assert complaints(caplog) == ["cannot accept a connection: Too many open files"] * times

    assert not any(record.exc_info for record in caplog.records)
