"""A node with cgroup v2: who holds which chip, and when the next pod may start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cgroup2, vm
from tests.e2e.conftest import Told
from tests.e2e.container import Missing


@pytest.fixture(scope="module")
def steps(deb: Path) -> vm.Steps:
    """Return what cgroup2_guest.py has seen, by step."""
    try:
        return vm.steps(cgroup2.run(deb, Path(__file__).with_name("cgroup2_guest.py")))
    except Missing as reason:
        pytest.skip(f"NOT RUN: {reason}")


def test_the_node_has_version_2_only(steps: vm.Steps, told: Told) -> None:
    """The hierarchy is the unified one, with the controllers in it; no unit has failed."""
    boot = steps["boot"]
    assert "failed" not in boot, boot["failed"]
    assert boot["cgroup"] == "cgroup2fs" and {"cpu", "memory", "pids"} <= set(boot["controllers"])
    assert not boot["version 1"] and not boot["failed units"], boot
    names = ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin")
    versions = "; ".join(boot[name] for name in names)
    told(f"Linux {boot['kernel']}; {versions}; {boot['seconds']} s")


@pytest.mark.parametrize("driver", ["cgroupfs", "systemd"])
def test_a_pods_successor_starts_after_its_last_process(
    steps: vm.Steps, told: Told, driver: str
) -> None:
    """The kubelet passes on the devices of a pod that runs; the container starts at its end."""
    found = steps[driver]
    assert "failed" not in found, found["failed"]
    assert found["cgroup"].startswith("kubepods.slice/" if driver == "systemd" else "kubepods/")
    assert found["given too early"], "the kubelet waited by itself"
    assert found["later"] > 0
    told(f"{driver}: it started {found['later']} s after; {found['journal'][-3:]}")
