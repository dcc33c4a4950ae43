"""The daemon while something fails, or happens at an unlucky moment."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio._server import Server

import ttdp
from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from tests.conftest import (
    StartDaemon,
    kubelet_of,
    no_descriptors,
    plugin_sockets,
)
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, until

pytestmark = pytest.mark.usefixtures("ticking")

NAME = "tenstorrent.com/n150"


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    return node


async def test_a_reload_ends_even_if_the_turn_fails(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd waits for READY=1 after RELOADING=1."""
    daemon = await start()
    await until(lambda: daemon.notified("READY"))
    daemon.forget_notes()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ttdp, "decide", fail)
    daemon.reload(resource_naming="arch")

    await until(lambda: daemon.notified("READY"))


async def test_a_start_logs_no_recovery_of_chips_that_were_well(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Chips that a pod holds are known before the first look at sysfs."""
    daemon = await start(state_dir=str(tmp_path))
    await kubelet.registered(NAME)
    await kubelet.admit("pod", "main", {NAME: 1})
    await until(lambda: daemon.daemon.host.holds.current(time.monotonic())[0].pod)
    await until(lambda: (tmp_path / "state.json").exists())
    await daemon.stop()

    caplog.clear()
    caplog.set_level("INFO")
    await start(state_dir=str(tmp_path))
    await until(lambda: len(kubelet.find("registered")) > 1)

    assert "/dev/tenstorrent/0" in caplog.text and "healthy again" not in caplog.text


@pytest.mark.parametrize("has_state", [True, False])
async def test_a_chip_that_a_pod_holds_has_one_reason_after_a_restart_without_the_driver(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, tmp_path: Path, has_state: bool
) -> None:
    """The same as before the restart: load the driver."""
    state_dir = str(tmp_path) if has_state else None
    daemon = await start(state_dir=state_dir)
    await kubelet.registered(NAME)
    await kubelet.admit("pod", "main", {NAME: 1})
    await until(lambda: daemon.daemon.host.holds.current(time.monotonic())[0].pod)
    await until(lambda: not has_state or (tmp_path / "state.json").exists())
    await daemon.stop()

    node.on_uevent = None
    node.unload_driver()
    daemon = await start(state_dir=state_dir)

    remedy = "run: modprobe tenstorrent"
    reason = f"{node.chips[0].bdf}: driver is not loaded; {remedy}"
    driver = f"driver not loaded, 1 Tenstorrent PCI function; {remedy}"
    status = f"{driver}; 1 × {NAME}, 0 healthy ({reason}); registered with kubelet"
    await until(lambda: daemon.notified(f"STATUS={status}"))


async def test_an_allocate_under_way_at_a_reload_gives_no_chip_twice(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It waits for a link while its resource ends."""
    (chip,) = node.chips
    daemon = await start(interval=5)
    await kubelet.registered(NAME)
    monkeypatch.setattr(ttdp, "LINK_TIMEOUT", PATIENCE)
    link = chip.by_pci.rename(node.root / "link")
    request = pb.AllocateRequest()
    request.container_requests.add(devices_ids=[chip.bdf])

    async def allocate(path: str) -> bool:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            try:
                await rpc.DevicePluginStub(channel).Allocate(request)  # type: ignore[no-untyped-call]
            except grpc.aio.AioRpcError:
                return False
            return True

    looks: list[str] = []
    genuine = ttdp.link_path

    def look(settings: ttdp.Settings, function: ttdp.PciFunction) -> str | None:
        looks.append(function.bdf)
        return genuine(settings, function)

    monkeypatch.setattr(ttdp, "link_path", look)
    (old,) = plugin_sockets(directory)

    first = asyncio.create_task(allocate(f"{directory}/{old}"))
    await until(lambda: looks)
    daemon.reload(resource_domain="example.org")
    link.rename(chip.by_pci)
    was_granted = await first

    await kubelet.registered("example.org/n150")
    (new,) = set(plugin_sockets(directory)) - {old}
    assert not (was_granted and await allocate(f"{directory}/{new}"))


async def test_the_first_list_has_every_chip(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, directory: Path
) -> None:
    """Each has answered, or had the time to; also if the kubelet writes its checkpoint."""
    (slow,) = node.add("n150")
    quick = node.chips[0]
    slow.block()
    checkpoint = directory / ttdp.CHECKPOINT

    await start(interval=3600)
    kubelet.manager.write_checkpoint_now()
    checkpoint.rename(directory / ".1")
    (directory / ".1").rename(checkpoint)
    await kubelet.wait_for(lambda: kubelet.find("list", NAME))

    first = kubelet.find("list", NAME)[0].fields
    assert {*first["healthy_ids"], *first["unhealthy_ids"]} == {quick.bdf, slow.bdf}
    slow.unblock()


async def test_looks_after_an_error_are_no_polls(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    directory: Path,
) -> None:  # fmt: skip
    """Two within the 0.1 s that a heartbeat takes would show a stall."""
    monkeypatch.setattr("ttdp.RETRY_TICK", 0.01)
    daemon = await start(interval=3600)
    await kubelet.registered(NAME)
    looks: list[bool] = []
    host = daemon.daemon.host
    look = host.read_chips

    def record(*, is_poll: bool) -> None:
        looks.append(is_poll)
        look(is_poll=is_poll)

    monkeypatch.setattr(host, "read_chips", record)
    with monkeypatch.context() as patch:
        patch.setattr(host.holds, "refresh", no_descriptors)
        (directory / "any").touch()
        await until(lambda: len(looks) > 3)

    assert not any(looks)


async def test_a_session_without_descriptors_has_a_reason_and_no_traceback(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Until there are some again."""
    with monkeypatch.context() as patch:
        patch.setattr(ttdp, "connection_error", no_descriptors)
        daemon = await start()
        await until(lambda: "Too many open files" in str(daemon.daemon.sessions.registrations))

    await kubelet.registered(NAME)
    assert "internal error" not in caplog.text


async def test_reads_without_descriptors_are_repeated_until_they_succeed(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """At the next turns, not at the next poll; the log has one line at each change."""
    monkeypatch.setattr("ttdp.RETRY_TICK", 0.05)
    scans: list[ttdp.Bus] = []
    genuine = ttdp.scan

    def scan(*given: Any, **named: Any) -> ttdp.Bus:
        scans.append(genuine(*given, **named))
        return scans[-1]

    monkeypatch.setattr(ttdp, "scan", scan)
    first, second = node.chip(0), *node.add("n150")
    first.fail("tt_heartbeat", "EMFILE")
    await start(interval=3600)
    await until(lambda: len(scans) > 3)

    lines = [line for line in caplog.messages if "the node's state" in line]
    assert len(lines) == 1 and lines[0].startswith("cannot read the node's state; keeping the last")

    first.restore("tt_heartbeat")
    await kubelet.wait_for(lambda: kubelet.find("list", NAME))
    found = kubelet.find("list", NAME)[0].fields
    assert found["healthy_ids"] == sorted([first.bdf, second.bdf])
    await until(lambda: "the node's state can be read again" in caplog.messages)


async def test_the_cdi_file_is_current_when_chips_are_advertised(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, tmp_path: Path
) -> None:
    """Also while the daemon waits for a chip that the driver has not bound."""
    (first,) = node.chips
    (second,), (third,) = node.add("n150"), node.add("n150")
    cdi = tmp_path / "cdi"
    cdi.mkdir()
    (cdi / ttdp.CDI_FILE).write_text('{"devices": []}')
    third.unbind()

    def is_current() -> bool:
        paths = ttdp.cdi_nodes((cdi / ttdp.CDI_FILE).read_text())
        return paths == {chip.bdf: str(chip.device_node) for chip in (first, second)}

    daemon = await start(cdi_dir=str(cdi), device_list_strategy="cdi")
    await kubelet.registered(NAME)
    await kubelet.admit("one", "main", {NAME: 1})
    assert is_current()

    node.swap_ordinals(first.bdf, second.bdf)
    await until(is_current)
    assert not daemon.notified("READY=1")


@pytest.mark.parametrize("after", ["unshared", "renamed"])
async def test_users_of_a_shared_device_do_not_wait_for_each_other_after_a_reload(
    kubelet: Kubelet, start: StartDaemon, after: str
) -> None:
    """It was shared when they got it."""
    entry = ttdp.SharedResource("n150", 2)
    daemon = await start(interval=0.1, sharing=ttdp.Sharing(lock_dir="", resources=(entry,)))
    await kubelet.registered(NAME)
    for pod in ("one", "other"):
        await kubelet.admit(pod, "main", {NAME: 1})
        await kubelet.running(pod, "main")

    renamed = (ttdp.SharedResource("n150", 2, "half"),) if after == "renamed" else ()
    daemon.reload(sharing=ttdp.Sharing(lock_dir="", resources=renamed))
    if renamed:
        await kubelet.registered("tenstorrent.com/half")

    kubelet.crash("one", "main")
    await kubelet.running("one", "main")


# -- what waits for no poll ------------------------------------------------------------------------


async def test_rare_polls_delay_neither_files_nor_names(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, short_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They are looked at every 5 s, and metrics written every 15 s, whatever the interval."""
    monkeypatch.setattr("ttdp.ROUND", 0.1)
    monkeypatch.setattr("ttdp.METRICS_INTERVAL", 0.3)
    for name in ("cdi", "features.d", "metrics"):
        (short_tmp / name).mkdir()
    daemon = await start(interval=600)
    settings = daemon.settings
    cdi = Path(settings.cdi_dir, ttdp.CDI_FILE)
    labels = Path(settings.labels_dir, ttdp.LABELS_FILE)
    metrics = Path(settings.metrics_file)
    await kubelet.registered(NAME)
    await kubelet.admit("pod", "main", {NAME: 1})
    await until(lambda: daemon.daemon.host.holds.names)

    for path in (cdi, labels, metrics):
        await until(path.exists)
        path.unlink()
    for path in (cdi, labels, metrics):
        await until(path.exists)


# -- registrations ---------------------------------------------------------------------------------


async def test_each_registration_connects_to_the_kubelet_twice_at_most(
    node: SimulatedNode, start: StartDaemon, directory: Path
) -> None:
    """To see whether it listens, and to call Register."""
    node.add("p150a")
    connections: list[asyncio.StreamWriter] = []
    kubelet = kubelet_of(node, directory)
    public, kubelet.socket = kubelet.socket, directory / "private.sock"

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        their_reader, their_writer = await asyncio.open_unix_connection(kubelet.socket)
        with contextlib.suppress(OSError):
            await asyncio.gather(pump(reader, their_writer), pump(their_reader, writer))

    daemon = await start(interval=0.1)
    await until(lambda: daemon.notified("READY=1"))
    async with kubelet, await asyncio.start_unix_server(relay, public):
        for number in (1, 2, 3):
            await kubelet.wait_for(lambda: len(kubelet.find("registered")) == 2 * number)  # noqa: B023
            await kubelet.registered(NAME)
            await kubelet.registered("tenstorrent.com/p150")
            assert 2 * number <= len(connections) <= 4 * number
            await kubelet.drop_streams()
    assert kubelet.violations == []


async def test_a_server_that_does_not_start_is_logged_and_tried_again(
    start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With its traceback; the resource is registered soon after."""
    failures: list[str] = []
    genuine = Server.start

    async def begin(self: Server) -> None:
        if len(failures) < 2:
            failures.append("failed")
            raise RuntimeError("no threads")
        await genuine(self)

    monkeypatch.setattr(Server, "start", begin)
    await start(interval=3600)
    await kubelet.registered(NAME)

    lines = [record for record in caplog.records if "the session of" in record.message]
    assert len(lines) == 2 and all("no threads" in str(record.exc_info) for record in lines)


@pytest.mark.parametrize("fails", [False, True])
async def test_work_that_is_completed_survives_cancellations(fails: bool) -> None:
    """The task is cancelled after it, and the work's own error is not left unread."""
    may_end, has_ended = asyncio.Event(), asyncio.Event()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))

    async def work() -> None:
        await may_end.wait()
        has_ended.set()
        if fails:
            raise ZeroDivisionError

    async def cancel() -> None:
        task = asyncio.create_task(ttdp.completed(work()))
        for _ in range(5):
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        await asyncio.wait({task})
        assert task.cancelled() and has_ended.is_set()

    await cancel()
    gc.collect()
    assert problems == []


async def test_work_that_is_completed_raises_its_error() -> None:
    """Or returns its result."""

    async def divide(number: int) -> float:
        return 1 / number

    assert await ttdp.completed(divide(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        await ttdp.completed(divide(0))
