"""A node of today: cgroup v2, cgroups made by systemd, containerd 2, user namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import cgroup2, vm
from tests.e2e.conftest import Told
from tests.e2e.container import optional
from tests.e2e.steps import Steps

STRATEGIES = ("files", "cdi")  # how devices are given


@pytest.fixture(scope="module")
def node(deb: Path) -> Steps:
    """What cgroup2_guest.py has seen on a node."""
    with optional():
        return vm.run(cgroup2.GUEST, deb)


def all_opened(lines_by_pod: dict[str, list[str]]) -> bool:
    """Return whether pods have written nothing but that they opened their devices."""
    return all(set(lines) == {"opened"} for lines in lines_by_pod.values())


def test_the_node_has_version_2_only(node: Steps, told: Told) -> None:
    """The hierarchy is the unified one, with the controllers in it; no unit has failed."""
    boot = node["boot"]
    assert boot["cgroup"] == "cgroup2fs" and {"cpu", "memory", "pids"} <= set(boot["controllers"])
    assert not boot["version 1"] and not boot["failed units"], boot

    names = ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin")
    versions = "; ".join(boot[name] for name in names)
    told(f"Linux {boot['kernel']}; {versions}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_containers_get_their_devices(node: Steps, strategy: str) -> None:
    """Each pod's container finds the device file of its chip only, and can open it."""
    found = node[strategy]
    assert len(found["opened"]) == 2 and all_opened(found["opened"])
    assert all(found["own files"].values()), found


# --- Ownership ------------------------------------------------------------------------------------


def test_hand_overs(node: Steps, told: Told) -> None:
    """A completed job's and a deleted pod's chips are the next pod's, once their cgroups are gone.

    Pods that started less than two minutes before are waited for.
    """
    found = node["hand_over"]
    assert all_opened(found["opened"])
    told(f"two hand-overs, {found['waits']} waits")


def test_a_pods_successor_starts_after_its_last_process(node: Steps, told: Told) -> None:
    """The kubelet passes on the devices of a pod that runs; the container starts at its end."""
    found = node["forced"]
    assert found["cgroup"].startswith("kubepods.slice/")
    assert found["given too early"], "the kubelet waited by itself"
    assert found["later"] > 0
    told(f"it started {found['later']} s after the last process")


def test_a_container_that_crashes_starts_in_place(node: Steps) -> None:
    """It does not wait for its own pod."""
    found = node["crash_loop"]
    assert found["restarts"] == 2 and found["waits"] == 0


def test_kubelet_and_daemon_are_killed_together(node: Steps, told: Told) -> None:
    """No pod is killed, not even one whose init container had the device (kubernetes #138446)."""
    found = node["both_killed"]
    assert found["same"] and all_opened(found["opened"])
    told(f"the daemon was ready {found['daemon before kubelet']} s before the kubelet started")


# --- Access ---------------------------------------------------------------------------------------


def test_access_survives_systemd(node: Steps) -> None:
    """Containers open their devices again after systemd was reloaded, also by the package.

    systemd sets up its filter of devices anew then, by its own idea of what a container may open
    (runc #4859, systemd #38648). The devices are given as device files and by their CDI names.
    """
    found = node["reload"]
    for name in ("daemon-reload", "daemon-reexec", "installed again"):
        assert found[name]["status"] == "0" and all_opened(found[name]["opened"]), (name, found)
    assert found["same"]
    assert len(found["daemon-reload"]["opened"]) == 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_containers_take_turns(node: Steps, strategy: str) -> None:
    """Two containers on one shared chip see each other's locks, one with users of its own, too."""
    found = node[f"{strategy} locks"]
    assert found["chips"] == ["0000:00:15.0"] and found["taken"], found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pod_with_its_own_users(node: Steps, strategy: str) -> None:
    """It has its device file and the variables, as all others have."""
    found = node[strategy]
    inside, outside, _ = map(int, found["uid map"])
    assert inside == 0 and outside > 0
    names = {line.partition("=")[0] for line in found["output"]}
    assert {"TT_VISIBLE_DEVICES", "TT_DEVICE_PLUGIN_DEVICES"} <= names


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_renumbered_chips(node: Steps, told: Told, strategy: str) -> None:
    """A container that starts again has its own chip.

    With users of its own and a device file it has no chip, but not another pod's either: runc binds
    the host's file at the container's path there, and not the link by PCI address.
    """
    first, second = node[f"{strategy} renumbered"]["pods"]
    assert first["restarted"] == "running" and first["own file"], first
    assert first["lines"][-1] == "opened", first

    if strategy == "files":
        assert second["restarted"] != "running" or "opened" not in second["lines"], second
        told(f"with its own users: {second}")
    else:
        assert second["restarted"] == "running" and second["own file"], second
        assert second["lines"][-1] == "opened", second


# --- Hugepages ------------------------------------------------------------------------------------


def test_pods_do_not_see_each_others_pages(node: Steps) -> None:
    """Each starts with an empty directory, and has its own file in it, whatever its user."""
    found, kinds = node["pages"], ("root", "user", "own users")
    for kind in kinds:
        assert "files: " in found[kind] and "clean page" in found[kind], found[kind]
        assert found[f"files of {kind}"] == ["tenstorrent"]

    before, with_pods = found["free"]
    assert with_pods == before - len(kinds)
