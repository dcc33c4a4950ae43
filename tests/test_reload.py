"""Reloads: what changes, what stays, and what systemd hears of it."""

from __future__ import annotations

import re
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
    """RELOADING=1 has the time on the monotonic clock; at READY=1 the settings are in force.

    A new interval counts from now on, not from the end of the last one, an hour from now.
    """
    caplog.set_level("DEBUG")
    node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await daemon.ready()
    daemon.forget_notes()
    before = time.monotonic_ns() // 1000

    health = ttdp.HealthSettings(interval=0.05)
    daemon.reload(resource_naming="arch", log_level="error", health=health)
    await daemon.ready()

    reloading, *_, status, ready = daemon.notes
    match = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reloading)
    assert match and before <= int(match[1]) <= time.monotonic_ns() // 1000
    assert status.startswith(f"STATUS=1 × {ARCH}, 1 healthy") and ready == "READY=1"
    assert "configuration reloaded" not in caplog.messages  # the new level is in force

    await polls(daemon)
    assert daemon.notes.count("READY=1") == 1


async def test_a_rejected_configuration_changes_nothing_and_is_shown_until_it_is_valid(
    node: SimulatedNode, start: StartDaemon, kubelet: Kubelet, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, status and view have the reason; systemd hears that the reload has ended."""
    (chip,) = node.add("n150")
    daemon = await start(interval=AN_HOUR)
    await kubelet.registered(N150)
    valid = daemon.loaded
    error = "config.toml: unit: 'half' is not valid; must be chip or board"

    def reject() -> ttdp.Settings:
        raise ttdp.ConfigError(error)

    daemon.loaded = reject
    daemon.forget_notes()
    daemon.reload()
    await daemon.ready()
    reason = f"the configuration was rejected at the last reload: {error}"
    assert reason in daemon.status and daemon.view()["rejected"] == error
    assert errors(caplog) == [f"reload failed, keeping the old configuration: {error}"]

    chip.vanish()
    await kubelet.wait_for(lambda: kubelet.unhealthy(N150))
    assert reason in daemon.status

    daemon.loaded = valid
    daemon.reload()
    await until(lambda: reason not in daemon.status)
    assert daemon.view()["rejected"] is None and len(kubelet.find("register")) == 1


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

    for key, value in (("device_plugin_dir", directory), ("root", node.root)):
        line = f"{key} needs a restart to change; still using {value}"
        assert caplog.messages.count(line) == 1


async def test_files_for_others_move_with_their_keys(
    node: SimulatedNode, start: StartDaemon, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those at the former paths are removed."""
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 0.1)
    node.add("n150")
    names = {ttdp.CDI_FILE, ttdp.LABELS_FILE, "m.prom"}
    one, other = short_tmp / "one", short_tmp / "other"

    def outputs(path: Path) -> dict[str, str]:
        path.mkdir()
        return {"cdi_dir": str(path), "labels_dir": str(path), "metrics_file": f"{path}/m.prom"}

    def holds(path: Path, files: set[str]) -> bool:
        return {each.name for each in path.iterdir()} == files

    daemon = await start(interval=AN_HOUR, **outputs(one))
    await until(lambda: holds(one, names))

    daemon.reload(**outputs(other))
    await until(lambda: holds(other, names) and holds(one, set()))

    daemon.reload(cdi_dir="", labels_dir="", metrics_file="")
    await until(lambda: holds(other, set()))


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
