"""Reloads: what changes, what stays, and what systemd hears of it."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import pytest

import ttdp
from tests.conftest import StartDaemon, errors, polls
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import until

N150, P150, ARCH = (f"tenstorrent.com/{name}" for name in ("n150", "p150", "wormhole"))
AN_HOUR = 3600.0


async def test_a_reload_is_between_reloading_and_ready(
    node: SimulatedNode, start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """RELOADING=1 has the time on the monotonic clock; at READY=1 the settings are in force."""
    caplog.set_level("DEBUG")
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    daemon.forget_notes()
    before = time.monotonic_ns() // 1000

    daemon.reload(resource_naming="arch", log_level="error")
    await daemon.ready()

    reloading, *_, status, ready = daemon.notes
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading)
    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    assert status.startswith(f"STATUS=1 × {ARCH}, 1 healthy") and ready == "READY=1"
    assert "configuration reloaded" not in caplog.messages  # the new level is in force
    assert [note for note in daemon.notes if note.startswith("READY")] == ["READY=1"]


async def test_a_sighup_that_came_before_its_handler_is_a_reload(
    start: StartDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then it is blocked, as it would end the process."""
    caplog.set_level("INFO")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # other threads do not block it

    await start(interval=AN_HOUR)

    await until(lambda: "configuration reloaded" in caplog.messages)


async def test_a_rejected_configuration_changes_nothing_and_is_shown_until_it_is_valid(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, status and view have the reason; systemd hears that the reload has ended."""
    (chip,) = node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    valid = daemon.loaded

    def reject() -> ttdp.Settings:
        raise ttdp.ConfigError("config.toml: unit: 'half' is not valid; must be chip or board")

    daemon.loaded = reject
    daemon.forget_notes()
    daemon.reload()
    await daemon.ready()
    error = "config.toml: unit: 'half' is not valid; must be chip or board"
    reason = f"the configuration was rejected at the last reload: {error}"
    assert reason in daemon.status and daemon.view()["rejected"] == error
    assert len(errors(caplog)) == 1 and "keeping the old configuration" in errors(caplog)[0]

    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150))
    assert reason in daemon.status

    daemon.loaded = valid
    daemon.reload()
    await until(lambda: reason not in daemon.status)
    assert daemon.view()["rejected"] is None and len(kubelet.find("register")) == 1


async def test_a_reload_ends_for_systemd_even_if_the_turn_fails(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for READY=1 after RELOADING=1."""
    daemon = await start()
    await daemon.ready()
    daemon.forget_notes()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ttdp, "decide", fail)
    daemon.reload(resource_naming="arch")

    await daemon.ready()


async def test_root_and_the_kubelets_directory_take_a_restart(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, short_tmp: Path, directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A line for each; every other key takes effect, and the sockets stay where they are."""
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    elsewhere = str(short_tmp / "elsewhere")

    daemon.reload(device_plugin_dir=elsewhere, root=elsewhere, resource_naming="arch")
    await kubelet.registered(ARCH)

    assert not Path(elsewhere).exists()
    for key, value in (("device_plugin_dir", directory), ("root", node.root)):
        line = f"{key} needs a restart to change; still using {value}"
        assert caplog.messages.count(line) == 1

    daemon.reload(device_plugin_dir=str(directory), root=str(node.root))
    await polls(daemon, 1)
    assert len([line for line in caplog.messages if "needs a restart" in line]) == 2


async def test_a_new_interval_counts_from_now_on(node: SimulatedNode, start: StartDaemon) -> None:
    """Not from the end of the last one, an hour from now."""
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()

    daemon.reload(health=ttdp.HealthSettings(interval=0.05))

    await polls(daemon)


async def test_files_for_others_move_with_their_keys(
    node: SimulatedNode, start: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the former paths are removed."""
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.1)
    node.add("n150")
    keys = {"cdi_dir": ttdp.CDI_FILE, "labels_dir": ttdp.LABELS_FILE, "metrics_file": "m.prom"}

    def paths(where: str) -> dict[str, Path]:
        for key in keys:
            (tmp_path / where / key).mkdir(parents=True, exist_ok=True)
        return {key: tmp_path / where / key / file for key, file in keys.items()}

    def options(where: str) -> dict[str, str]:
        found = {key: str(path.parent) for key, path in paths(where).items()}
        return {**found, "metrics_file": str(paths(where)["metrics_file"])}

    daemon = await start(interval=AN_HOUR, **options("one"))
    await until(lambda: all(path.exists() for path in paths("one").values()))

    daemon.reload(**options("other"))
    await until(lambda: all(path.exists() for path in paths("other").values()))
    assert not any(path.exists() for path in paths("one").values())

    daemon.reload(**dict.fromkeys(keys, ""))
    await until(lambda: not any(path.exists() for path in paths("other").values()))


async def test_a_resource_that_has_ended_does_not_come_back_for_a_pod_that_has_ended(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a stream that the daemon closes tells nothing about the kubelet.

    Kubelets keep the entry of a pod that has ended until they admit another one with devices.
    """
    monkeypatch.setattr(ttdp, "STARTED_WITHIN", 0.5)
    (chip,) = node.add("p150a")
    daemon = await start(interval=0.05)
    await kubelet.run_pod("job", P150)
    kubelet.complete("job")
    await until(lambda: daemon.decision.holds == [])

    daemon.reload(exclude=(chip.bdf,))
    await until(lambda: not kubelet.manager.plugins.is_listed(P150))
    await polls(daemon)
    assert not daemon.sessions and daemon.decision.holds == []

    daemon.reload(exclude=(), resource_naming="arch")
    await kubelet.registered("tenstorrent.com/blackhole")
    await polls(daemon)
    assert daemon.view()["chips"][0]["pods"] == [] and daemon.decision.holds == []
