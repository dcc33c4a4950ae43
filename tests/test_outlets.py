"""What others read: CDI files, labels, metrics, by file and by HTTP; and the locks of those who share a device."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import stat
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from tests.world.simulation import RunningDaemon
from ttdp import Chip, Holder, Mount, PciFunction, Settings, SharedResource, Sharing, Telemetry

pytestmark = pytest.mark.usefixtures("ticking")

N150 = "tenstorrent.com/n150"
ONE = Chip(PciFunction("0000:01:00.0", "wormhole", "n150", 0, 3, "/dev/tenstorrent/3", "/sys/x"), firmware="19.4.0.0")
TWO = Chip(PciFunction("0000:02:00.0", "blackhole", "p150a", None, 0, "/dev/tenstorrent/0", "/sys/y"))


# -- CDI ---------------------------------------------------------------------------------------------------------------


def spec(*chips: Chip, mounts: tuple[Mount, ...] = (), **settings: Any) -> dict[str, Any]:
    text = ttdp.cdi_spec([chip.function for chip in chips], Settings(**settings), mounts)
    return dict(json.loads(text or "{}"))


def test_a_chip_is_a_device_by_its_address_and_so_are_all_of_them() -> None:
    """The node under the host's number, to read and to write; the vendor is the resource domain."""
    node = {"path": "/dev/tenstorrent/3", "hostPath": "/dev/tenstorrent/3", "permissions": "rw"}
    found = spec(ONE, TWO, resource_domain="example.org")
    assert (found["cdiVersion"], found["kind"]) == ("0.5.0", "example.org/device")
    assert [device["name"] for device in found["devices"]] == ["0000:01:00.0", "0000:02:00.0", "all"]
    assert found["devices"][0]["containerEdits"] == {"deviceNodes": [node]}
    assert [n["path"] for n in found["devices"][2]["containerEdits"]["deviceNodes"]] == [
        "/dev/tenstorrent/3", "/dev/tenstorrent/0",
    ]  # fmt: skip
    assert "containerEdits" not in found


def test_mounts_are_for_every_device() -> None:
    """Bound as they are configured."""
    found = spec(ONE, mounts=(Mount("/srv/m", "/m", True), Mount("/dev/hugepages", "/dev/hugepages")))
    assert found["containerEdits"]["mounts"] == [
        {"hostPath": "/srv/m", "containerPath": "/m", "options": ["rbind", "ro"]},
        {"hostPath": "/dev/hugepages", "containerPath": "/dev/hugepages", "options": ["rbind", "rw"]},
    ]


def test_without_a_chip_there_is_no_file() -> None:
    """CDI knows no specification without devices."""
    assert ttdp.cdi_spec([], Settings(), ()) is None


async def test_an_allocation_by_cdi_names_devices_and_leaves_the_rest_to_the_file(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """Names and environment; nodes and mounts are the runtime's to find. A shared device's locks are the resource's."""
    first, second = node.add("n150") + node.add("n150")
    node.set_hugepages(4)
    sharing = Sharing(lock_dir=str(short_tmp / "locks"), resources=(SharedResource("n150", 2, "half", (second.bdf,)),))
    await start(device_list_strategy="cdi", sharing=sharing)
    await kubelet.registered(N150)
    await kubelet.registered("tenstorrent.com/half")
    alone = await kubelet.admit("alone", "main", {N150: 1})
    half = await kubelet.admit("half", "main", {"tenstorrent.com/half": 1})
    assert alone.cdi_devices == [f"tenstorrent.com/device={first.bdf}"]
    assert (alone.devices, alone.mounts, alone.envs["TT_VISIBLE_DEVICES"]) == ([], [], first.bdf)
    assert [(m.host_path, m.container_path) for m in half.mounts] == [(f"{short_tmp}/locks/half", "/dev/shm")]


# -- labels ------------------------------------------------------------------------------------------------------------


def labels(*chips: Chip, driver: str | None = "2.10.1", **settings: Any) -> dict[str, str]:
    chosen = Settings(**settings)
    found = ttdp.resources(list(chips), chosen, {}).values()
    lines = ttdp.feature_file(found, chips, chosen, driver).splitlines()
    return dict(line.removeprefix("tenstorrent.com/").split("=", 1) for line in lines)


def test_labels_tell_what_a_node_has() -> None:
    """Architectures, each resource, and versions; unknown things have none."""
    listed = [chip._replace(listed=True) for chip in (ONE, TWO)]
    assert labels(*listed) == {
        "arch.blackhole": "true", "arch.wormhole": "true", "driver.major": "2", "driver.minor": "10",
        "driver.version": "2.10.1", "firmware.version": "19.4.0.0", "n150.count": "1", "n150.product": "n150",
        "n150.replicas": "1", "n150.sharing": "false", "p150.count": "1", "p150.product": "p150",
        "p150.replicas": "1", "p150.sharing": "false", "plugin.version": ttdp.__version__,
    }  # fmt: skip
    assert {"driver.version", "driver.major"}.isdisjoint(labels(*listed, driver=None))


def test_labels_count_what_is_there_healthy_or_not() -> None:
    """They are for the choice of a node; what is gone is not there. Chips that differ are mixed."""
    ill = TWO._replace(health=ttdp.unhealthy(ttdp.Health(), ttdp.Fault.HOT, "too hot"), firmware="19.5.0.0")
    gone = ONE._replace(present=False)
    found = labels(ill, gone)
    assert (found["p150.count"], found["n150.count"]) == ("1", "0")
    assert labels(ONE, ill)["firmware.version"] == "mixed"
    assert labels(ONE, ONE._replace(function=ONE.function._replace(bdf="0000:09:00.0", pci_card="n300")),
                  resource_naming="arch")["wormhole.product"] == "mixed"  # fmt: skip


@hypothesis_settings(deadline=None)
@given(st.text(max_size=90), st.text(max_size=90))
def test_labels_are_valid_whatever_is_said(firmware: str, driver: str) -> None:
    """Names and values as the API server takes them."""
    part = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    long_name = Sharing(resources=(SharedResource("n150", 2, "x" * 63),))
    found = ttdp.resources([ONE], Settings(sharing=long_name), {}).values()
    text = ttdp.feature_file(found, [ONE._replace(firmware=firmware)], Settings(), driver)
    for line in text.splitlines():
        assert re.fullmatch(rf"tenstorrent\.com/{part}={part}", line), line


# -- metrics -----------------------------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, float]:
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def test_metrics_of_chips() -> None:
    """Identity, health, the fault while it lasts, and what was read anyway."""
    telemetry = Telemetry(temperature=41.5, temperature_limit=75.0, trips=2)
    hot = TWO._replace(health=ttdp.unhealthy(ttdp.Health(), ttdp.Fault.HOT, "too hot"), telemetry=telemetry)
    (resource,) = ttdp.resources([ONE], Settings(), {}).values()
    holders = {ONE.bdf: [Holder(N150, ONE.bdf, "team-a/train", "main")]}
    found = samples(ttdp.exposition(ttdp.chip_metrics([ONE, hot], {ONE.bdf: resource}, holders)))
    assert found == {
        'tt_device_info{device="0000:01:00.0",board="n150",card="n150",arch="wormhole",serial="",firmware="19.4.0.0",'
        'numa_node="0",resource="tenstorrent.com/n150"}': 1,
        'tt_device_info{device="0000:02:00.0",board="p150",card="p150a",arch="blackhole",serial="",firmware="",'
        'numa_node="",resource=""}': 1,
        'tt_device_healthy{device="0000:01:00.0"}': 1,
        'tt_device_healthy{device="0000:02:00.0"}': 0,
        'tt_device_fault{device="0000:02:00.0",kind="hot"}': 1,
        'tt_device_temperature_celsius{device="0000:02:00.0"}': 41.5,
        'tt_device_temperature_limit_celsius{device="0000:02:00.0"}': 75,
        'tt_device_thermal_trips_total{device="0000:02:00.0"}': 2,
        'tt_device_allocated{device="0000:01:00.0",namespace="team-a",pod="train",container="main"}': 1,
    }


@hypothesis_settings(deadline=None)
@given(st.text())
def test_a_label_can_hold_anything(text: str) -> None:
    """One line for each sample, with backslashes, quotes and newlines as the format wants them."""
    line = ttdp.exposition([("x", "gauge", "X.", [({"label": text}, 1)])]).split("\n", 2)[2].removesuffix("\n")
    match = re.fullmatch(r'x\{label="((?:[^"\\\n]|\\[\\n"])*)"\} 1', line)
    assert match and re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1]) == text


async def test_metrics_count_what_happens(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path
) -> None:
    """Registrations, allocations and refusals, and who has what by the kubelet's own account."""
    chip, _ = node.add("n150") + node.add("n150")
    daemon = await start(interval=0.1)
    await kubelet.registered(N150)
    await kubelet.admit("team-a/train", "main", {N150: 1})
    node.on_uevent = None
    node.chips[1].device_node.unlink()
    with pytest.raises(AdmissionError):
        await kubelet.admit("other", "main", {N150: 1})
    await until(lambda: daemon.chip(node.chips[1].bdf).health.fault)
    await daemon.daemon.owners.ask(outlets(directory.parent)["pod_resources_socket"])
    found = samples(await daemon.daemon._metrics())
    wanted = {
        f'tt_resource_devices{{resource="{N150}",health="healthy"}}': 1,
        f'tt_resource_devices{{resource="{N150}",health="unhealthy"}}': 1,
        f'tt_kubelet_registered{{resource="{N150}"}}': 1,
        f'tt_kubelet_registrations_total{{resource="{N150}"}}': 1,
        f'tt_allocations_total{{resource="{N150}",result="granted"}}': 1,
        f'tt_allocations_total{{resource="{N150}",result="refused"}}': 1,
        f'tt_device_allocated{{device="{chip.bdf}",namespace="team-a",pod="train",container="main"}}': 1,
        f'tt_plugin_info{{version="{ttdp.__version__}"}}': 1,
    }
    assert wanted.items() <= found.items()
    assert abs(found["tt_plugin_start_time_seconds"] - time.time()) < 60


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def places(directory: Path) -> dict[str, Path]:
    """The files for others, by the key of their setting; their directories are there."""
    found = {key: Path(path) for key, path in outlets(directory.parent).items()}
    found["cdi_dir"] /= "tenstorrent.com-device.json"
    found["labels_dir"] /= "tt-device-plugin"
    for path in list(found.values())[:3]:
        path.parent.mkdir()
    return found


async def test_the_files_follow_what_is_there(node: SimulatedNode, start: StartDaemon, places: dict[str, Path]) -> None:
    """By events alone; an unhealthy chip stays in the CDI file, one without a node does not; all may read them."""
    first, second = node.add("n150") + node.add("n150")
    daemon = await start(interval=3600)
    cdi, features = places["cdi_dir"], places["labels_dir"]
    await until(lambda: cdi.exists() and features.exists())

    def names() -> list[str]:
        return [device["name"] for device in json.loads(cdi.read_text())["devices"]] if cdi.exists() else []

    assert names() == [first.bdf, second.bdf, "all"]
    assert stat.S_IMODE(cdi.stat().st_mode) == 0o644
    second.vanish()
    await until(lambda: names() == [first.bdf, "all"] and "n150.count=1\n" in features.read_text(), seconds=1)
    first.vanish()
    await until(lambda: not cdi.exists() and "n150.count=0\n" in features.read_text(), seconds=1)
    first.come_back()
    second.come_back()
    await until(lambda: names() == [first.bdf, second.bdf, "all"], seconds=1)
    cdi.unlink()
    daemon.daemon.poll()
    await until(cdi.exists)
    first.die()
    await until(lambda: daemon.daemon.poll() or daemon.chip(first.bdf).health.fault)
    assert names() == [first.bdf, second.bdf, "all"]


async def test_the_files_outlive_the_daemon_and_go_when_they_are_not_wished_for(
    node: SimulatedNode, start: StartDaemon, places: dict[str, Path], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container can be started while the daemon is not there. A reload moves a file, or removes it."""
    monkeypatch.setattr("ttdp.METRICS_PAUSE", 0.0)
    node.add("n150")
    files = list(places.values())[:3]
    daemon = await start(interval=0.05)
    await until(lambda: all(file.exists() for file in files))
    await daemon.stop()
    assert all(file.exists() for file in files)
    daemon = await start(interval=0.05)
    other = directory.parent / "other"
    other.mkdir()
    await until(lambda: daemon.notified("READY=1"))
    daemon.reload(cdi_dir=str(other), labels_dir="", metrics_file="")
    await until(lambda: (other / "tenstorrent.com-device.json").exists())
    assert not any(file.exists() for file in files)


async def test_no_directory_no_file_and_no_word(
    node: SimulatedNode, start: StartDaemon, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has no such reader hears nothing of it; one that is installed later finds its file."""
    node.add("n150")
    daemon = await start(interval=0.05)
    await until(lambda: daemon.notified("READY=1"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    labels_dir = Path(outlets(directory.parent)["labels_dir"])
    assert not labels_dir.exists()
    labels_dir.mkdir()
    daemon.daemon._described = None  # as after the next change
    await until(lambda: (labels_dir / "tt-device-plugin").exists())


async def test_a_full_disk_is_said_once_and_leaves_the_old_file_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written is tried again; nobody sees half of it, and nothing is left beside it."""
    file = ttdp.OwnFile(str(tmp_path / "file"))
    file.write("old\n")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fchmod", full)
        for _ in range(3):
            file.write("new\n")
    assert (tmp_path / "file").read_text() == "old\n" and sorted(os.listdir(tmp_path)) == ["file", "node"]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/file cannot be written: No space left on device"
    ]
    file.write("new\n")
    assert (tmp_path / "file").read_text() == "new\n"


# -- metrics by HTTP ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handed_in(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """systemd's socket, as if it were handed in."""
    monkeypatch.setattr(ttdp.ServiceManager, "sockets", lambda self, name: [listening] if name == "metrics" else [])
    yield


@pytest.fixture
async def port(
    node: SimulatedNode, start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[int, RunningDaemon]]:
    """Where the daemon answers."""
    node.add("n150")
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    with handed_in(listening, monkeypatch):
        daemon = await start(interval=3600)
        await until(lambda: daemon.notified("READY=1"))
        yield listening.getsockname()[1], daemon


async def answer(port: int, request: bytes) -> tuple[str, str]:
    """The status line and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    text = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def test_a_scrape_gets_the_metrics(port: tuple[int, RunningDaemon]) -> None:
    """The same text as the file; a HEAD gets no body, another path or method a word."""
    number, _ = port
    status, body = await answer(number, b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n")
    assert status == "HTTP/1.1 200 OK" and 'tt_device_healthy{device="0000:01:00.0"} 1\n' in body
    assert (await answer(number, b"GET /metrics?x=1 HTTP/1.0\n\n"))[0] == "HTTP/1.1 200 OK"
    assert await answer(number, b"HEAD /metrics HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "")
    assert (await answer(number, b"GET / HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
    assert (await answer(number, b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 405 Method Not Allowed"


@pytest.mark.parametrize(
    "request_", [b"", b"\r\n\r\n", b"\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics HTTP/1.1\r\nX: "]
)
async def test_a_request_of_nonsense_costs_its_own_connection(
    port: tuple[int, RunningDaemon], request_: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answered with an error or dropped after its time; no line in the log."""
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", 0.2)
    number, _ = port
    with contextlib.suppress(ConnectionResetError):
        status, _ = await answer(number, request_)
        assert not status or status.split()[1] in ("404", "405")
    assert (await answer(number, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_the_kubelet_is_asked_for_the_metrics_only_while_somebody_holds_something(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has nobody can give back, and what is given out is known here first."""
    monkeypatch.setattr("ttdp.METRICS_PAUSE", 0.0)
    monkeypatch.setattr("ttdp.ADMISSION", 0.0)  # no kubelet is young
    node.add("n150")
    daemon = (await start(interval=3600)).daemon
    await kubelet.registered(N150)
    await daemon.owners.ask(daemon.settings.pod_resources_socket)
    asked, genuine = [], daemon.owners.ask

    async def ask(path: str) -> str | None:
        asked.append(path)
        reason: str | None = await genuine(path)
        return reason

    monkeypatch.setattr(daemon.owners, "ask", ask)
    await daemon._metrics()
    assert not asked
    await kubelet.admit("pod", "main", {N150: 1})
    assert "tt_device_allocated{" in await daemon._metrics()
    kubelet.remove_pod("pod")
    assert "tt_device_allocated{" not in await daemon._metrics()
    asked.clear()
    await daemon._metrics()
    assert not asked


async def test_a_header_without_end_is_dropped(port: tuple[int, RunningDaemon]) -> None:
    """A hundred kilobytes of it are not kept."""
    number, _ = port
    with pytest.raises(ConnectionError):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        for _ in range(100):
            writer.write(b"x" * 1024)
            await writer.drain()
            await asyncio.sleep(0.001)
        await reader.readexactly(1)
        raise ConnectionResetError


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    """A thousand, for clients that are in this process as well as the server; fewer if the system has not so many."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    most = max(soft, hard if 0 < hard < 4096 else 4096)
    setrlimit(RLIMIT_NOFILE, (most, hard))
    yield min(1000, most // 3)
    setrlimit(RLIMIT_NOFILE, (soft, hard))


async def test_a_thousand_connections_hold_up_neither_the_kubelet_nor_the_next_scrape(
    port: tuple[int, RunningDaemon], kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch, many_descriptors: int
) -> None:
    """No more than a few are kept at a time, and none of them for long."""
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", 1.0)
    number, _ = port
    await kubelet.registered(N150)
    idle = []
    for _ in range(many_descriptors):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", number))
        idle.append(one)
    began = time.monotonic()
    await kubelet.admit("pod", "main", {N150: 1})
    assert time.monotonic() - began < 1
    status = ""
    while not status:  # refused as long as there are too many
        assert time.monotonic() - began < 15
        with contextlib.suppress(ConnectionError):
            status, _ = await answer(number, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    for one in idle:
        one.close()


async def test_connections_that_are_open_at_the_end_are_not_worth_a_word(
    port: tuple[int, RunningDaemon], caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the loop cancels what still waits."""
    number, daemon = port
    _, writer = await asyncio.open_connection("127.0.0.1", number)
    await until(lambda: daemon.daemon._scrapes.open == 1)
    for task in asyncio.all_tasks():
        if "MetricsServer._connected" in repr(task.get_coro()):
            task.cancel()
    await until(lambda: daemon.daemon._scrapes.open == 0)
    await asyncio.sleep(0)
    writer.close()
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_client_that_does_not_read_is_dropped(
    port: tuple[int, RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be sent is not kept for ever."""
    monkeypatch.setattr(ttdp.MetricsServer, "SECONDS", 0.3)
    number, daemon = port
    monkeypatch.setattr(ttdp, "exposition", lambda families: "x" * 50_000_000)
    with socket.create_connection(("127.0.0.1", number)) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        await until(lambda: daemon.daemon._scrapes.open)
        await until(lambda: not daemon.daemon._scrapes.open, seconds=5)


# -- locks -------------------------------------------------------------------------------------------------------------


async def test_those_who_share_a_device_share_their_locks(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path
) -> None:
    """One directory for each resource, in which everybody may make a lock and nobody remove another's."""
    for card in ("n150", "n150", "p150a"):
        node.add(card)
    shares = SharedResource("n150", 2), SharedResource("p150", 2, "p150-half")
    await start(sharing=Sharing(lock_dir=str(short_tmp / "locks"), resources=shares))
    await kubelet.registered(N150)
    await kubelet.registered("tenstorrent.com/p150-half")
    for name in ("n150", "p150-half"):
        assert stat.S_IMODE((short_tmp / "locks" / name).stat().st_mode) == 0o1777
        got = [await kubelet.admit(f"{name}-{n}", "main", {f"tenstorrent.com/{name}": 1}) for n in range(2)]
        for one in got:
            mounts = [
                (m.host_path, m.container_path, m.read_only) for m in one.mounts if m.container_path == "/dev/shm"
            ]
            assert mounts == [(f"{short_tmp}/locks/{name}", "/dev/shm", False)]


@pytest.mark.parametrize(("lock_dir", "mounts"), [("", []), ("/dev/shm", [("/dev/shm", "/dev/shm")])])
async def test_no_locks_or_the_hosts_own(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, lock_dir: str, mounts: list[tuple[str, str]]
) -> None:
    """Without a directory there is no mount; with the host's /dev/shm its processes are in."""
    node.add("n150")
    mode = stat.S_IMODE(os.stat("/dev/shm").st_mode)
    await start(sharing=Sharing(lock_dir=lock_dir, resources=(SharedResource("n150", 2),)))
    await kubelet.registered(N150)
    got = await kubelet.admit("pod", "main", {N150: 1})
    assert [(m.host_path, m.container_path) for m in got.mounts] == mounts
    assert stat.S_IMODE(os.stat("/dev/shm").st_mode) == mode


@pytest.mark.parametrize("what", ["a link", "a file"])
async def test_locks_that_somebody_else_has_put_there_are_not_used(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path, what: str
) -> None:
    """/dev/shm is everybody's. The pod is refused, in words; what is there stays as it is."""
    node.add("n150")
    locks = short_tmp / "locks"
    locks.mkdir()
    (short_tmp / "elsewhere").mkdir(mode=0o700)
    (locks / "n150").symlink_to(short_tmp / "elsewhere") if what == "a link" else (locks / "n150").touch()
    await start(sharing=Sharing(lock_dir=str(locks), resources=(SharedResource("n150", 2),)))
    await kubelet.registered(N150)
    with pytest.raises(AdmissionError, match=r"no directory for the locks of tenstorrent\.com/n150"):
        await kubelet.admit("pod", "main", {N150: 1})
    assert stat.S_IMODE((short_tmp / "elsewhere").stat().st_mode) == 0o700


async def test_the_locks_are_there_before_any_allocation(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path
) -> None:
    """After a reboot /dev/shm is empty, and containers start with the answer of before."""
    node.add("n150")
    daemon = await start(sharing=Sharing(lock_dir=str(short_tmp / "locks"), resources=(SharedResource("n150", 2),)))
    await until(lambda: daemon.notified("READY=1"))
    assert (short_tmp / "locks/n150").is_dir()


# -- who uses what -----------------------------------------------------------------------------------------------------


def used_by(rows: list[dict[str, Any]]) -> list[str]:
    header, *lines = [re.split("  +", line) for line in ttdp._as_text(rows).splitlines()]
    return [line[header.index("USED BY")] for line in lines]


async def test_list_names_the_pods_that_hold_a_chip_and_the_processes_of_the_host(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """A pod's process is the pod; a process of the host beside it is named, and `check` warns of that one."""
    for _ in range(3):
        node.add("n150")
    daemon = await start()
    await kubelet.registered(N150)
    await kubelet.admit("team-a/train", "main", {N150: 2})
    for pid, (command, cgroup) in enumerate([("python3", "/kubepods/pod1/x"), ("tt-smi", "/user.slice")], start=100):
        process = node.root / f"proc/{pid}"
        process.mkdir()
        (process / "comm").write_text(f"{command}\n")
        (process / "cgroup").write_text(f"0::{cgroup}\n")
    node.chips[0].set_pids([100])
    node.chips[1].set_pids([100, 101])
    fleet, holders = await ttdp.survey(daemon.settings)
    rows = list(ttdp._rows(daemon.settings, fleet, holders))
    assert rows[0]["pods"] == [{"namespace": "team-a", "pod": "train", "container": "main"}]
    assert used_by(rows) == ["team-a/train", "team-a/train, tt-smi[101]", "-"]
    warned = [finding for finding in ttdp._check_chips(daemon.settings, fleet, holders or {}) if "tt-smi" in finding[2]]
    assert [finding[:2] for finding in warned] == [("warn", node.chips[1].bdf)]
    assert "team-a/train" in warned[0][2] and "101" in warned[0][2]


async def test_list_shows_what_a_pod_holds_under_another_name(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon
) -> None:
    """The same reason that the kubelet has for its being unhealthy."""
    node.add("p150a")
    daemon = await start()
    await kubelet.registered("tenstorrent.com/p150")
    await kubelet.admit("train", "main", {"tenstorrent.com/p150": 1})
    settings = replace(daemon.settings, resource_naming="card")
    (row,) = ttdp._rows(settings, *await ttdp.survey(settings))
    assert not row["healthy"] and "held by default/train as tenstorrent.com/p150" in row["reason"]


def test_who_uses_a_chip_is_a_question_mark_where_it_cannot_be_known() -> None:
    """No kubelet, or a driver that does not tell; what is known is shown all the same."""
    row: dict[str, Any] = dict.fromkeys(("id", "index", "path", "bdf", "card", "serial", "numa_node", "firmware"))
    row |= {"resource": None, "replicas": 0, "healthy": True, "reason": None}
    process = {"pid": 7, "command": "a", "of_pod": False}
    cases: list[tuple[Any, Any, str]] = [(None, [], "?"), ([], None, "?"), ([], [], "-"), (None, [process], "a[7]")]
    assert used_by([{**row, "pods": pods, "processes": known} for pods, known, _ in cases]) == [c[2] for c in cases]
