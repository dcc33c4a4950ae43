"""Metrics: which there are, what they count, when they are read, and that none stands twice."""

from __future__ import annotations

import _thread
import asyncio
import re
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import Chip as Card
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, outlets, until
from tests.world.simulation import RunningDaemon, kernel_errors, settings_of
from tests.world.tree import put
from ttdp import Family, SharedResource, Sharing

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
P150 = "tenstorrent.com/p150"


def samples(text: str) -> dict[str, float]:
    """The value of each series; a series that stands twice is an error."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len({series for series, _ in lines})
    return {series: float(value) for series, value in lines}


def of(bdf: str, found: dict[str, float]) -> dict[str, float]:
    """The series of a chip by name and further labels, without `tt_device_`."""
    mine = {}
    for series, value in found.items():
        if f'device="{bdf}"' in series and "_info{" not in series:
            rest = series.replace(f'device="{bdf}"', "").replace("{,", "{").replace("{}", "")
            mine[rest.removeprefix("tt_device_")] = value
    return mine


class Scraper:
    """What takes the metrics from the socket that systemd has handed in."""

    def __init__(self) -> None:
        self._port = 0

    def hand_in(self, name: str) -> list[socket.socket]:
        """Make a socket for the daemon that starts now."""
        if name != "metrics":
            return []
        listening = socket.create_server(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        return [listening]

    async def text(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
        return answer.decode().partition("\r\n\r\n")[2]

    async def samples(self) -> dict[str, float]:
        return samples(await self.text())


@pytest.fixture
def scraper(monkeypatch: pytest.MonkeyPatch) -> Scraper:
    found = Scraper()
    monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda _, name: found.hand_in(name))
    return found


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and names are read anew for each scrape."""
    monkeypatch.setattr("ttdp.METRICS_PAUSE", 0.0)


AER = """RxErr 0
BadTLP {bad}
TOTAL_ERR_{kind} {total}"""


def count_errors(card: Card, correctable: int, nonfatal: int = 0, fatal: int = 0) -> None:
    """Let the card have had so many errors on its link, in the form of the kernel's AER files."""
    pci = card.attribute("max_link_width").parent
    for kind, total in (("COR", correctable), ("NONFATAL", nonfatal), ("FATAL", fatal)):
        name = {"COR": "correctable"}.get(kind, kind.lower())
        put(pci / f"aer_dev_{name}", AER.format(bad=total, kind=kind, total=total))


# -- what a chip shows -----------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
async def test_a_card_shows_what_the_driver_does_in_base_units(
    tmp_path: Path, directory: Path, scraper: Scraper
) -> None:
    """Of a p150a as it was captured on the real driver: watts, amperes, volts, hertz, transfers."""
    node = SimulatedNode.from_capture(tmp_path / "captured", "p150ax2")
    card = node.chips[0]
    count_errors(card, 7, 1)
    async with RunningDaemon(node, settings_of(node, directory)) as daemon:
        await until(lambda: daemon.notified("READY=1"))
        found = of(card.bdf, await scraper.samples())
    assert found == {
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
        "pcie_link_width": 16,
        "pcie_link_width_max": 16,
        "pcie_link_transfers_per_second": 32e9,
        "pcie_link_transfers_per_second_max": 32e9,
        'pcie_errors_total{severity="correctable"}': 7,
        'pcie_errors_total{severity="nonfatal"}': 1,
        'pcie_errors_total{severity="fatal"}': 0,
    }


def fail(card: Card) -> None:
    card.freeze()  # so that more than the heartbeat is read
    card.fail("tt_serial")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("ail", [Card.die, Card.reset, Card.vanish, Card.block, fail])
async def test_a_dead_or_blocked_chip_has_no_figures(
    node: SimulatedNode,
    start: StartDaemon,
    monkeypatch: pytest.MonkeyPatch,
    ail: Callable[[Card], None],
    scraper: Scraper,
) -> None:
    """Neither all ones nor what it showed last; its health and its fault stay."""
    monkeypatch.setattr("ttdp.READ_DEADLINE", 0.3)
    card, other = node.add("p150a") + node.add("p150a")
    daemon = await start(interval=0.05)
    await until(lambda: daemon.notified("READY=1"))
    assert "power_watts" in of(card.bdf, await scraper.samples())
    ail(card)
    fault = await until(lambda: daemon.chip(card.bdf).health.fault)
    found = await scraper.samples()
    assert of(card.bdf, found) == {"healthy": 0, f'fault{{kind="{fault.name.lower()}"}}': 1}
    assert of(other.bdf, found)["power_watts"] == 24
    if ail is Card.block:
        card.unblock()


@pytest.mark.usefixtures("fresh")
async def test_a_chip_is_introduced_by_what_it_is(
    node: SimulatedNode, start: StartDaemon, scraper: Scraper
) -> None:
    """Identity stays known while a chip is away; what nobody knows is empty."""
    (card,) = node.add("n300", numa_node=1)
    node.add("p150a", firmware=False)
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    card.vanish()
    await until(lambda: not daemon.chip(card.bdf).present)
    serial = card.facts.telemetry["tt_serial"]
    found = await scraper.samples()
    assert {series for series in found if series.startswith("tt_device_info")} == {
        f'tt_device_info{{device="{card.bdf}",board="n300",card="n300",arch="wormhole",'
        f'serial="{serial}",firmware="19.4.0.0",numa_node="1",resource="tenstorrent.com/n300"}}',
        'tt_device_info{device="0000:02:00.0",board="p150",card="p150a",arch="blackhole",'
        'serial="",firmware="",numa_node="",resource="tenstorrent.com/p150"}',
    }


# -- when figures are read -------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the reads of sensors ("figures") and of telemetry."""
    counts: Counter[str] = Counter()

    def counting(name: str, what: str) -> None:
        genuine = getattr(ttdp, name)

        def read(*arguments: Any) -> Any:
            counts[what] += 1
            return genuine(*arguments)

        monkeypatch.setattr(ttdp, name, read)

    counting("read_sensors", "figures")
    counting("_read_changes", "telemetry")
    return counts


async def test_nobody_takes_the_metrics_and_nothing_is_read_for_them(
    node: SimulatedNode, start: StartDaemon, reads: Counter[str]
) -> None:
    """Many polls on, no sensor was looked at."""
    node.add("p150a")
    await start(interval=0.02)
    await until(lambda: reads["telemetry"] > 20)
    assert reads["figures"] == 0


async def test_figures_are_read_for_the_file_every_15_seconds_at_most(
    node: SimulatedNode, start: StartDaemon, directory: Path, reads: Counter[str], scraper: Scraper
) -> None:
    """Polls that come more often do without; a scrape in between takes what is there."""
    file = Path(outlets(directory.parent)["metrics_file"])
    file.parent.mkdir()
    node.add("p150a")
    await start(interval=0.02)
    await until(file.exists)
    await until(lambda: reads["telemetry"] > 20)
    for _ in range(3):
        await scraper.samples()
    assert reads["figures"] == 1
    assert "tt_device_power_watts" in file.read_text()


async def test_a_poll_of_many_chips_needs_one_thread(
    node: SimulatedNode, start: StartDaemon, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read one after another: a thread for each would cost more than the reading."""
    node.add("galaxy-blackhole")
    await start(interval=0.2)
    await until(lambda: reads["telemetry"] >= 2 * 32)
    genuine = _thread.start_new_thread
    threads = 0

    def counted(*arguments: Any) -> Any:
        nonlocal threads
        threads += 1
        return genuine(*arguments)

    monkeypatch.setattr(_thread, "start_new_thread", counted)
    before = reads["telemetry"]
    await until(lambda: reads["telemetry"] >= before + 10 * 32)
    assert threads < 32


async def test_the_file_is_written_again_though_nothing_changes(
    node: SimulatedNode, start: StartDaemon, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its age tells others whether a daemon is at work."""
    monkeypatch.setattr("ttdp.METRICS_PAUSE", 0.1)
    file = Path(outlets(directory.parent)["metrics_file"])
    file.parent.mkdir()
    await start(interval=0.02)
    await until(file.exists)
    text, first = file.read_text(), file.stat().st_mtime_ns
    await until(lambda: file.stat().st_mtime_ns > first)
    assert file.read_text() == text


async def test_a_scrape_has_figures_though_polls_are_rare(
    node: SimulatedNode, start: StartDaemon, reads: Counter[str], scraper: Scraper
) -> None:
    """They are read for it, on the threads where telemetry is."""
    (card,) = node.add("p150a")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    assert of(card.bdf, await scraper.samples())["power_watts"] == 24
    assert reads["figures"] == 1


# -- what the daemon counts ------------------------------------------------------------------------


async def test_counters_begin_at_zero(
    node: SimulatedNode, start: StartDaemon, scraper: Scraper
) -> None:
    """A rate of what has not happened yet is 0, not unknown."""
    node.add("n150")
    daemon = await start(interval=3600)
    await until(lambda: daemon.notified("READY=1"))
    found = await scraper.samples()
    for result in ("granted", "refused"):
        assert found[f'tt_allocations_total{{resource="{N150}",result="{result}"}}'] == 0
    assert found[f'tt_kubelet_registrations_total{{resource="{N150}"}}'] == 0
    assert found[f'tt_kubelet_registered{{resource="{N150}"}}'] == 0


async def test_metrics_count_what_happens(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, scraper: Scraper
) -> None:
    """Registrations, allocations and refusals, and who has what by the kubelet's own account."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.1)
    await kubelet.registered(N150)
    await kubelet.admit("team-a/train", "main", {N150: 1})
    node.on_uevent = None
    second.device_node.unlink()
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})
    await until(lambda: daemon.chip(second.bdf).health.fault)
    holder = f'device="{first.bdf}",namespace="team-a",pod="train",container="main"'
    found = await scraper.samples()
    assert (
        found.items()
        >= {
            f'tt_resource_devices{{resource="{N150}",health="healthy"}}': 1,
            f'tt_resource_devices{{resource="{N150}",health="unhealthy"}}': 1,
            f'tt_kubelet_registered{{resource="{N150}"}}': 1,
            f'tt_kubelet_registrations_total{{resource="{N150}"}}': 1,
            f'tt_allocations_total{{resource="{N150}",result="granted"}}': 1,
            f'tt_allocations_total{{resource="{N150}",result="refused"}}': 1,
            f"tt_device_allocated{{{holder}}}": 1,
            f'tt_plugin_info{{version="{ttdp.__version__}"}}': 1,
        }.items()
    )
    assert abs(found["tt_plugin_start_time_seconds"] - time.time()) < 60


async def test_two_shares_of_a_container_are_one_series(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path, scraper: Scraper
) -> None:
    """node_exporter takes no series twice. Resources count IDs, as the kubelet has them."""
    (card,) = node.add("n150")
    sharing = Sharing(
        fail_requests_greater_than_one=False,
        lock_dir=str(short_tmp / "locks"),
        resources=(SharedResource("n150", 4),),
    )
    await start(interval=0.1, sharing=sharing)
    await kubelet.registered(N150)
    await kubelet.admit("train", "main", {N150: 2})
    await kubelet.admit("train", "helper", {N150: 1})
    found = await scraper.samples()
    holders = [series for series in found if series.startswith("tt_device_allocated")]
    labels = f'device="{card.bdf}",namespace="default",pod="train"'
    assert sorted(holders) == [
        f'tt_device_allocated{{{labels},container="helper"}}',
        f'tt_device_allocated{{{labels},container="main"}}',
    ]
    assert found[f'tt_resource_devices{{resource="{N150}",health="healthy"}}'] == 4


def allocated(text: str) -> list[str]:
    return re.findall(r'tt_device_allocated\{.*pod="(.*?)"', text)


@pytest.mark.parametrize("way_out", ["file", "socket"])
async def test_names_come_back_after_an_outage_of_the_api_server(
    node: SimulatedNode,
    kubelet: Kubelet,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    way_out: str,
    scraper: Scraper,
) -> None:
    """Meanwhile a pod goes by its UID; both ways out have its name once the kubelet tells it."""
    for name in ("METRICS_PAUSE", "NAMES_PAUSE"):
        monkeypatch.setattr(f"ttdp.{name}", 1.0)
    file = Path(outlets(directory.parent)["metrics_file"])
    if way_out == "file":
        file.parent.mkdir()
    node.add("n150")

    async def pods(daemon: RunningDaemon) -> list[str]:
        if way_out == "file":
            return allocated(file.read_text()) if file.exists() else []
        return allocated(await scraper.text())

    async def eventually(daemon: RunningDaemon, name: str) -> None:
        async def named() -> None:
            while await pods(daemon) != [name]:
                await asyncio.sleep(0.02)

        await asyncio.wait_for(named(), PATIENCE)

    async with RunningDaemon(node, settings_of(node, directory)):
        await kubelet.registered(N150)
        await kubelet.admit("train", "main", {N150: 1})
    kubelet.api_server_away()
    await kubelet.restart()
    async with RunningDaemon(node, settings_of(node, directory, interval=0.05)) as daemon:
        await kubelet.registered(N150)
        await eventually(daemon, kubelet.uid("train"))
        await kubelet.api_server_back()
        await eventually(daemon, "train")


# -- the text --------------------------------------------------------------------------------------


def test_the_samples_of_the_largest_node_are_counted(tmp_path: Path) -> None:
    """A Blackhole Galaxy has 22 series a chip, and one for each container that has one."""
    node = SimulatedNode(tmp_path / "galaxy")
    node.add("galaxy-blackhole")
    for card in node.chips:
        count_errors(card, 0)
    settings = settings_of(node, tmp_path / "dp")
    fleet = ttdp.Fleet({}, [])
    with kernel_errors():
        for function in fleet.observe(settings):
            telemetry, figures = ttdp.read_telemetry(function), ttdp.read_sensors(function)
            fleet.learn([ttdp.Reading(function, telemetry, True, figures)], settings.health, 0.0)
    chips = list(fleet.chips.values())
    users = [ttdp.ChipUser(chip.bdf, "team-a", "train", "main") for chip in chips]
    found = samples(ttdp.exposition(ttdp.chip_metrics(chips, {}, users)))
    assert len(chips) == 32 and len(found) == 32 * (22 + 1)


@hypothesis_settings(deadline=None)
@given(st.text())
def test_a_label_can_hold_anything(text: str) -> None:
    """One line for each sample; backslashes, quotes and newlines as the format wants them."""
    family = Family("x", "gauge", "X.", [({"label": text}, 1)])
    line = ttdp.exposition([family]).split("\n", 2)[2].removesuffix("\n")
    match = re.fullmatch(r'x\{label="((?:[^"\\\n]|\\[\\n"])*)"\} 1', line)
    unescaped = {"n": "\n"}
    assert match and re.sub(r"\\(.)", lambda m: unescaped.get(m[1], m[1]), match[1]) == text


def test_no_series_stands_twice() -> None:
    """Whatever a family has: the last value of a series counts."""
    family = Family("x", "gauge", "X.", [({"a": 1}, 1), ({"a": 2}, 5), ({"a": 1}, 3)])
    assert samples(ttdp.exposition([family])) == {'x{a="1"}': 3, 'x{a="2"}': 5}


def test_a_family_without_a_sample_is_left_out() -> None:
    """No help text for nothing."""
    assert ttdp.exposition([Family("x", "gauge", "X.", [])]) == ""
