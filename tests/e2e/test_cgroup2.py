"""What a container can open on a node with cgroup v2, where a program in the kernel decides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cgroup2
from tests.e2e.conftest import Told
from tests.e2e.container import Missing

Steps = dict[str, dict[str, Any]]
DRIVERS = ("systemd", "cgroupfs")
CGROUPS = "/sys/fs/cgroup"
FORBIDDEN = "Operation not permitted"
SERIAL_PORT = "4:64"


@pytest.fixture(scope="module")
def steps(deb: Path) -> Steps:
    """What cgroup2_guest.py has seen, by step."""
    try:
        said = cgroup2.run(deb, Path(__file__).with_name("cgroup2_guest.py"))
    except Missing as reason:
        pytest.skip(f"NOT RUN: {reason}")
    seen = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert seen, said
    return {step["step"]: step for step in seen}


@pytest.fixture(params=DRIVERS)
def found(request: pytest.FixtureRequest, steps: Steps) -> dict[str, Any]:
    """What was seen with cgroups of this driver, kubelet's and runc's alike."""
    seen = steps[request.param]
    assert "failed" not in seen, seen["failed"]
    return seen


def own_node(seen: dict[str, Any]) -> str:
    """Return the one node that the pod's container with a device has."""
    [number] = seen["main"]["nodes"]
    return f"/dev/tenstorrent/{number}"


def test_the_node_has_version_2_only(steps: Steps, told: Told) -> None:
    """The hierarchy is the unified one, with the controllers in it; no unit has failed."""
    boot = steps["boot"]
    assert "failed" not in boot, boot["failed"]
    assert boot["cgroup"] == "cgroup2fs" and {"cpu", "memory", "pids"} <= set(boot["controllers"])
    assert not boot["version 1"] and not boot["failed units"], boot
    names = ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin")
    versions = "; ".join(boot[name] for name in names)
    told(f"Linux {boot['kernel']}; {versions}; {boot['seconds']} s")


def test_a_pod_opens_its_device(found: dict[str, Any]) -> None:
    """Each pod's container has one node, which is not the other pod's, and can open it."""
    mine, other = own_node(found["besteffort"]), own_node(found["guaranteed"])
    assert {mine, other} == set(found["nodes"])
    for pod, path in (("besteffort", mine), ("guaranteed", other)):
        attempts = found[pod]["main"]["attempts"]
        assert attempts[path] == "opened", attempts
        assert attempts[f"made {found['numbers'][path]}"] == "opened", attempts


def test_a_pod_opens_nothing_else(found: dict[str, Any], told: Told) -> None:
    """Not the other pod's device: by the host's own node, whose mode is 0666, or by its own."""
    assert found["nodes"] == dict.fromkeys(found["nodes"], "666")
    assert found["outside"] == ["opened"] * len(found["nodes"])
    for pod, other in (("besteffort", "guaranteed"), ("guaranteed", "besteffort")):
        foreign = own_node(found[other])
        attempts = found[pod]["main"]["attempts"]
        assert attempts[foreign.replace("/dev/tenstorrent", "/host")] == FORBIDDEN, attempts
        assert attempts[f"made {found['numbers'][foreign]}"] == FORBIDDEN, attempts
        assert attempts[f"made {SERIAL_PORT}"] == FORBIDDEN, attempts
    seen = found["besteffort"]
    told(f"{found['step']}: a pod with {own_node(seen)}: {seen['main']['attempts']}")


def test_a_container_without_a_device_opens_none(found: dict[str, Any]) -> None:
    """Though another container of its pod has one."""
    for pod in ("besteffort", "guaranteed"):
        without = found[pod]["without"]
        assert not without["nodes"]
        assert set(without["attempts"].values()) == {FORBIDDEN}, without["attempts"]
        assert len(without["attempts"]) == 2 * len(found["nodes"]) + 1


def test_it_is_the_device_program_that_forbids_it(found: dict[str, Any], told: Told) -> None:
    """One is attached to each container's cgroup. Without it the container opens everything."""
    for pod in ("besteffort", "guaranteed"):
        assert found[pod]["main"]["programs"] and found[pod]["without"]["programs"]
    assert set(found["without programs"].values()) == {"opened"}, found["without programs"]
    assert set(found["with them again"].values()) == {FORBIDDEN}, found["with them again"]
    program = found["besteffort"]["main"]["programs"][0]
    told(f"{found['step']}: {program}; without it: {found['without programs']}")


def test_a_pods_cgroup_has_its_uid_in_its_name(found: dict[str, Any], told: Told) -> None:
    """There is one, where the driver of kubelet and runc puts it; the containers' are in it."""
    systemd = found["step"] == "systemd"
    below = {
        "besteffort": "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{}.slice"
        if systemd
        else "kubepods/besteffort/pod{}",
        "guaranteed": "kubepods.slice/kubepods-pod{}.slice" if systemd else "kubepods/pod{}",
    }
    for pod, form in below.items():
        seen = found[pod]
        uid = seen["uid"].replace("-", "_") if systemd else seen["uid"]
        path = f"{CGROUPS}/{form.format(uid)}"
        assert seen["cgroup"] == [path], seen["cgroup"]
        for name in ("main", "without"):
            container = seen[name]
            scope = f"cri-containerd-{container['id']}.scope" if systemd else container["id"]
            assert container["cgroup"] == f"{path}/{scope}"
            assert container["in cgroup"] == f"0::{container['cgroup'][len(CGROUPS) :]}\n"
    told(f"{found['step']}: {found['besteffort']['main']['cgroup']}")


def test_list_names_the_pods(found: dict[str, Any], told: Told) -> None:
    """Who holds which chip, and nobody any longer when the pods have gone."""
    holders = {
        own_node(found[pod]): [f"default/{pod}-node"] for pod in ("besteffort", "guaranteed")
    }
    assert found["holders"] == holders
    assert not any(found["holders in the end"].values()), found["holders in the end"]
    told(f"{found['step']}: {holders}; all of it {found['seconds']:.0f} s of the guest's")


def test_a_device_is_opened_by_one_pod_at_a_time(steps: Steps, told: Told) -> None:
    """The kubelet gives devices away whose pod has yet to end; the next pod starts after that."""
    found = steps["handed over"]
    assert "failed" not in found, found["failed"]
    assert found["given too early"], "the kubelet waited by itself"
    assert found["open later"] == ["1"], "the successor cannot see who has its node open"
    assert found["open at its start"] == [], found
    told(f"{found['journal'][-3:]}; {found['seconds']:.0f} s of the guest's")
