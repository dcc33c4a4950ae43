"""Nodes with cgroup v2, as they are today: cgroups made by systemd, containerd 2, user namespaces.

CGROUP2=all runs them on former releases of Debian, too, with what their containerd can do, and
CGROUP2='trixie-systemd bookworm-cgroupfs' on these.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cgroup2, vm
from tests.e2e.conftest import Told
from tests.e2e.container import Missing

CHOSEN = os.environ.get("CGROUP2", cgroup2.TODAY.name).split()
RELEASES = [each for each in cgroup2.RELEASES if CHOSEN == ["all"] or each.name in CHOSEN]
STRATEGIES = ("files", "cdi")  # how devices are given
JSON = dict[str, Any]


class Node:
    """What cgroup2_guest.py has seen on a node, by step."""

    def __init__(self, release: cgroup2.Release, steps: vm.Steps) -> None:
        self.release = release
        self._steps = steps

    def __getitem__(self, name: str) -> JSON:
        assert name in self._steps, f"the script did not come to {name}"
        found = self._steps[name]
        assert "failed" not in found, found["failed"]
        return found

    def require(self, *abilities: str) -> None:
        """Skip the test if this release's containerd lacks something."""
        if missing := [each for each in abilities if each not in self.release.abilities]:
            pytest.skip(f"NOT RUN: containerd of {self.release.suite}: {', '.join(missing)}")

    def require_strategy(self, strategy: str) -> None:
        if strategy == "cdi":
            self.require("cdi")

    def require_private_pages(self) -> None:
        if not self["pages"]["private"]:
            pytest.skip("NOT RUN: the program has no option --hugepages")


@pytest.fixture(scope="module", params=RELEASES, ids=lambda release: release.name)
def node(request: pytest.FixtureRequest, deb: Path) -> Node:
    script = Path(__file__).with_name("cgroup2_guest.py")
    try:
        return Node(request.param, vm.steps(cgroup2.run(request.param, deb, script)))
    except Missing as reason:
        pytest.skip(f"NOT RUN: {reason}")


def all_opened(lines_by_pod: dict[str, list[str]]) -> bool:
    """Return whether pods have written nothing but that they opened their devices."""
    return all(set(lines) == {"opened"} for lines in lines_by_pod.values())


def test_the_node_has_version_2_only(node: Node, told: Told) -> None:
    """The hierarchy is the unified one, with the controllers in it; no unit has failed."""
    boot = node["boot"]
    assert boot["cgroup"] == "cgroup2fs" and {"cpu", "memory", "pids"} <= set(boot["controllers"])
    assert not boot["version 1"] and not boot["failed units"], boot
    names = ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin")
    versions = "; ".join(boot[name] for name in names)
    told(f"Linux {boot['kernel']}; {versions}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_containers_get_their_devices(node: Node, strategy: str) -> None:
    """Each pod's container finds the device file of its chip only, and can open it."""
    node.require_strategy(strategy)
    found = node[strategy]
    assert len(found["opened"]) == 2 and all_opened(found["opened"])
    assert all(found["own files"].values()), found


# --- Ownership ------------------------------------------------------------------------------------


def test_hand_overs_do_not_wait(node: Node) -> None:
    """A completed job's and a deleted pod's chips are the next pod's at once."""
    found = node["hand_over"]
    assert found["waits"] == 0 and all_opened(found["opened"])


def test_a_pods_successor_starts_after_its_last_process(node: Node, told: Told) -> None:
    """The kubelet passes on the devices of a pod that runs; the container starts at its end."""
    found = node["forced"]
    prefix = {"systemd": "kubepods.slice/", "cgroupfs": "kubepods/"}[node.release.driver]
    assert found["cgroup"].startswith(prefix)
    assert found["given too early"], "the kubelet waited by itself"
    assert found["later"] > 0 and found["waits"] > 0
    told(f"it started {found['later']} s after the last process")


def test_a_container_that_crashes_starts_in_place(node: Node) -> None:
    """It does not wait for its own pod."""
    found = node["crash_loop"]
    assert found["restarts"] == 2 and found["waits"] == 0


def test_kubelet_and_daemon_are_killed_together(node: Node, told: Told) -> None:
    """No pod is killed, not even one whose init container had the device (kubernetes #138446)."""
    found = node["both_killed"]
    assert found["same"] and all_opened(found["opened"])
    told(f"the daemon was ready {found['daemon before kubelet']} s before the kubelet started")


def test_a_kubelet_that_starts_without_its_checkpoint(node: Node) -> None:
    """No pod is killed, and the next pod gets a chip that no pod holds."""
    found = node["lost_checkpoint"]
    assert found["same"] and all_opened(found["opened"])
    assert found["given"] not in found["theirs"], found


# --- Access ---------------------------------------------------------------------------------------

RELOADS = ("daemon-reload", "daemon-reexec", "installed again")


def assert_access_survives(found: JSON) -> None:
    for name in RELOADS:
        assert found[name]["status"] == "0" and all_opened(found[name]["opened"]), (name, found)
    assert found["same"]


def test_access_survives_systemd(node: Node) -> None:
    """Containers open their devices again after systemd was reloaded, also by the package.

    systemd sets up its filter of devices anew then, by its own idea of what a container may open
    (runc #4859, systemd #38648). The devices are given as device files and by their CDI names.
    """
    found = node["reload"]
    for name in ("daemon-reload", "daemon-reexec", "installed again"):
        assert found[name]["status"] == "0" and all_opened(found[name]["opened"]), (name, found)
    assert found["same"]
    assert len(found["daemon-reload"]["opened"]) == (4 if "cdi" in node.release.abilities else 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_containers_take_turns(node: Node, strategy: str) -> None:
    """Two containers on one shared chip see each other's locks, one with users of its own, too."""
    node.require_strategy(strategy)
    found = node[f"{strategy} locks"]
    assert found["chips"] == ["0000:00:15.0"] and found["taken"], found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pod_with_its_own_users(node: Node, strategy: str) -> None:
    """It has its device file and the variables, as all others have."""
    node.require("users")
    found = node[strategy]
    inside, outside, _ = map(int, found["uid map"])
    assert inside == 0 and outside > 0
    names = {line.partition("=")[0] for line in found["output"]}
    assert {"TT_VISIBLE_DEVICES", "TT_DEVICE_PLUGIN_DEVICES"} <= names


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_renumbered_chips(node: Node, told: Told, strategy: str) -> None:
    """A container that starts again has its own chip.

    With users of its own and a device file it has no chip, but not another pod's either: runc binds
    the host's file at the container's path there, and not the link by PCI address.
    """
    node.require_strategy(strategy)
    first, second = node[f"{strategy} renumbered"]["pods"]
    assert first["restarted"] == "running" and first["own file"], first
    assert first["lines"][-1] == "opened", first
    if strategy == "files" and "users" in node.release.abilities:
        assert second["restarted"] != "running" or "opened" not in second["lines"], second
        told(f"with its own users: {second}")
    else:
        assert second["restarted"] == "running" and second["own file"], second
        assert second["lines"][-1] == "opened", second


# --- Hugepages ------------------------------------------------------------------------------------


def test_directories_for_hugepages(node: Node) -> None:
    """In its sandbox, as root without capabilities, the daemon makes one for each device."""
    node.require_private_pages()
    directories = node["pages"]["directories"]
    assert directories.pop("/dev/hugepages/tt-device-plugin") == "700 0:0"
    assert len(directories) >= 5 and set(directories.values()) == {"777 0:0"}, directories


def kinds(node: Node) -> list[str]:
    return ["root", "user", *(["own users"] if "users" in node.release.abilities else [])]


def test_pods_do_not_see_each_others_pages(node: Node) -> None:
    """Each starts with an empty directory, and has its own file in it, whatever its user."""
    node.require_private_pages()
    found = node["pages"]
    for kind in kinds(node):
        assert "files: " in found[kind] and "clean page" in found[kind], found[kind]
        assert found[f"files of {kind}"] == ["tenstorrent"]
    before, with_pods = found["free"]
    assert with_pods == before - len(kinds(node))


def test_pages_return_without_a_successor(node: Node, told: Told) -> None:
    """Within a minute of the end of a pod that was killed."""
    node.require_private_pages()
    assert node["pages"]["back after"] < 60
    told(f"after {node['pages']['back after']} s")


def test_pages_outlive_a_container_but_not_its_pod(node: Node) -> None:
    """A container that starts again has its pod's pages; the next pod with that chip has none."""
    node.require_private_pages()
    found = node["pages"]
    assert "dirty page" in found["restarted"]
    assert found["same chip"]
    assert "files: " in found["successor"] and "clean page" in found["successor"]


def test_a_directory_that_a_container_has_closed(node: Node) -> None:
    """The daemon, which has no capability, renames it away; the device gets a new one."""
    node.require_private_pages()
    found = node["closed pages"]
    chip = found["chip"]
    assert found["before"][chip] == "700 4711:0" and found["after"][chip] == "777 0:0"
    [left] = found["after"].keys() - found["before"].keys()
    assert found["after"][left] == "700 4711:0"
    assert any(left in line for line in found["check"]), found["check"]
    assert found["next chip"] == chip
    assert "files: " in found["next"] and "clean page" in found["next"], found["next"]
