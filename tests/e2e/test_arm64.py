"""The arm64 package on arm64 machines: Debian's own kernels and systemd, in virtual machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import arm64
from tests.e2e.conftest import Told
from tests.e2e.container import Missing
from tests.world.processes import ROOT

Steps = dict[str, dict[str, Any]]
HUGEPAGE_SIZES = {
    4096: {"hugepages-64kB", "hugepages-2048kB", "hugepages-32768kB", "hugepages-1048576kB"},
    16384: {"hugepages-2048kB", "hugepages-32768kB", "hugepages-1048576kB"},
}


class Guest:
    """What arm64_guest.py has seen on a release, and what the tests made of it."""

    def __init__(self, release: arm64.Release, steps: Steps) -> None:
        self.release = release
        self.steps = steps
        self._results: dict[str, str] = {}

    def __getitem__(self, step: str) -> dict[str, Any]:
        """Return what a step has found; an AssertionError says why it was not seen to its end."""
        assert step in self.steps, f"there is no step {step!r} among {[*self.steps]}"
        found = self.steps[step]
        assert "failed" not in found, found["failed"]
        return found

    def tell(self, step: str, result: str) -> None:
        """Note what a test made of a step, for the table."""
        self._results[step] = result

    def table(self) -> str:
        """Return a line for each step: the check, the guest's seconds, the result."""
        width = max(len(step) for step in self.steps)
        lines = [f"{'check':{width}}  seconds  result"]
        for step, found in self.steps.items():
            result = self._results.get(step, "FAILED")
            lines.append(f"{step:{width}}  {found['seconds']:7.1f}  {result}")
        return "\n    ".join(lines)


@pytest.fixture(scope="module")
def arm64_deb() -> Path:
    """The latest package for arm64; without one there is no run."""
    debs = sorted(ROOT.glob("dist/*_arm64.deb"), key=lambda deb: deb.stat().st_mtime)
    if not debs:
        pytest.exit("no package to test: make deb ARCHES=arm64", returncode=1)
    return debs[-1]


@pytest.fixture(scope="module", params=arm64.RELEASES, ids=lambda release: release.name)
def guest(request: pytest.FixtureRequest, arm64_deb: Path) -> Guest:
    """A machine of this release, on which everything was done."""
    try:
        said = arm64.run(request.param, arm64_deb, Path(__file__).with_name("arm64_guest.py"))
    except Missing as reason:
        pytest.skip(f"NOT RUN: {reason}")
    seen = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert seen, said
    return Guest(request.param, {step["step"]: step for step in seen})


def test_the_machine_is_what_it_should_be(guest: Guest) -> None:
    """An arm64 kernel with these pages, on which no unit has failed; dpkg and apt are content."""
    boot = guest["boot"]
    assert (boot["machine"], boot["page size"]) == ("aarch64", guest.release.page_size)
    assert not boot["failed units"] and boot["dpkg"].splitlines() == ["arm64", "0"], boot
    if guest.release.processor == arm64.EVERYTHING:  # what the C library uses where it is there
        assert {"bti", "paca"} <= set(boot["features"]), boot["features"]
    size = boot["page size"] // 1024
    programs = f"systemd {boot['systemd']}, Python {boot['python']}"
    guest.tell("boot", f"Linux {boot['kernel']}, pages of {size} KiB, {programs}")


def test_apt_installs_it(guest: Guest) -> None:
    """What it depends on is there, and nothing else is pulled in. It is enabled, active, READY."""
    found = guest["install"]
    assert "0 upgraded, 1 newly installed, 0 to remove" in found["said"], found["said"]
    assert found["said"].endswith("status 0") and not found["verify"], found
    seen = found["properties"]
    assert seen.pop("StatusText") == "no Tenstorrent device on this node; waiting for one"
    assert seen == {
        "Type": "notify",
        "ActiveState": "active",
        "SubState": "running",
        "UnitFileState": "enabled",
        "Result": "success",
    }
    guest.tell("install", f"{found['version']}, active; Depends: {found['depends']}")


def test_sandbox_score(guest: Guest) -> None:
    """systemd-analyze security gives as little as on amd64."""
    exposure = guest["sandbox"]["exposure"]
    assert 0.9 <= exposure <= 1.5, exposure
    guest.tell("sandbox", f"exposure {exposure}")


def test_sandbox_from_inside(guest: Guest) -> None:
    """System calls are filtered by other numbers here; what is denied on amd64 is denied, too."""
    found = guest["sandbox from inside"]["answers"]
    assert found.pop("outside") == "yes", "the device cannot be opened anyway"
    assert found.pop("capabilities") == "0" * 16
    assert found.pop("interfaces") in (["lo"], [])
    denied = {name: answer for name, answer in found.items() if answer != "yes"}
    for name in ("open a device", "open a device as the driver's users do"):
        assert denied[name] == "Operation not permitted", found
    expected = {"make a device", "IPv4", "IPv6", "packets", "write to /etc", "write to /sys"}
    expected |= {"new user namespace", "writable and executable memory"}
    assert expected <= set(denied), found
    allowed = {"stat a device", "unix sockets", "kernel events", "cgroups"}
    allowed |= {f"{what} of another user's process" for what in ("name", "cgroup")}
    assert not allowed & set(denied), found
    guest.tell("sandbox from inside", f"denied: {', '.join(sorted(denied))}")


def test_registers(guest: Guest) -> None:
    """With a kubelet that starts later, each resource with its devices."""
    found = guest["register"]
    assert "waiting for kubelet" in found["waiting"]
    assert (found["n150"], found["p300"]) == (1, 2)
    guest.tell("register", found["status"])


def test_reloads(guest: Guest) -> None:
    """A good file is taken over without a restart; a bad one is refused, the status says why."""
    found = guest["reload"]
    assert found["good"] == "status 0" and found["bad"].endswith("status 1"), found
    assert "log_level" in found["status"], found
    assert "2 × tenstorrent.com/blackhole" in found["status"], found
    assert found["same process"]
    guest.tell("reload", f"{found['renamed']}; then: {found['status'].partition('kubelet; ')[2]}")


def test_allocates(guest: Guest) -> None:
    """A pod gets both chips of a board, with their nodes and its environment."""
    admitted = guest["allocate"]["admitted"]
    assert "TT_VISIBLE_DEVICES=0000:02:00.0,0000:03:00.0" in admitted["env"], admitted
    inside = [device.split(":/dev/")[1] for device in admitted["devices"]]
    assert inside == ["tenstorrent/1:rw", "tenstorrent/2:rw"], admitted
    guest.tell("allocate", f"{' '.join(admitted['ids'])}: {' '.join(admitted['env'])}")


def test_a_fault_and_the_recovery(guest: Guest) -> None:
    """A chip that dies is not allocatable, `check` says why, and it comes back by itself."""
    found = guest["fault and recovery"]
    assert found["lost"]["unhealthy_ids"] == found["back"]["healthy_ids"] == ["0000:01:00.0"]
    [[level, _, text]] = found["check"]
    assert level == "FAIL" and "does not respond" in text, found["check"]
    guest.tell("fault and recovery", text.rpartition("tenstorrent/0: ")[2])


def test_kill_minus_9(guest: Guest) -> None:
    """systemd starts it again, and it is registered."""
    found = guest["kill -9"]
    assert found["properties"] == {"ActiveState": "active", "NRestarts": "1"}
    guest.tell("kill -9", f"registered again after {found['registered after']} s of the guest's")


def test_check(guest: Guest) -> None:
    """`check` finds nothing that fails."""
    found = guest["check"]
    assert found["status"] == "status 0" and not [
        line for line in found["findings"] if line[0] == "FAIL"
    ], found
    subjects = {subject for _, subject, _ in found["findings"]}
    assert {"configuration", "driver", "kubelet", "hugepages", "0000:01:00.0"} <= subjects, subjects
    levels = [level for level, _, _ in found["findings"]]
    guest.tell("check", f"{levels.count('ok')} ok, {levels.count('warn')} warn, 0 FAIL")


def test_list(guest: Guest) -> None:
    """`list` has a row for each chip, in words and in JSON."""
    found = guest["list"]
    rows = {row["bdf"]: (row["card"], row["resource"], row["healthy"]) for row in found["rows"]}
    assert rows == {
        "0000:01:00.0": ("n150", "tenstorrent.com/n150", True),
        "0000:02:00.0": ("p300c", "tenstorrent.com/p300", True),
        "0000:03:00.0": ("p300c", "tenstorrent.com/p300", True),
    }
    assert all(bdf in found["text"] for bdf in rows), found["text"]
    guest.tell("list", f"{len(rows)} chips, healthy")


def test_the_advice_on_hugepages_can_be_followed(guest: Guest) -> None:
    """This kernel has pages of 1 GiB. `check` is content when its advice was followed."""
    assert set(guest["boot"]["page sizes"]) == HUGEPAGE_SIZES[guest.release.page_size]
    found = guest["hugepages"]
    assert found["reserved"].startswith("warn 4 of 1 GiB, but"), found
    assert "not mounted" in found["reserved"], found
    assert found["mounted"] == "ok 4 of 1 GiB", found
    assert found["two cards"].startswith("warn 4 of 1 GiB for 2 Wormholes"), found
    assert "hugepagesz=1G hugepages=8" in found["two cards"], found
    guest.tell("hugepages", f"{found['mounted']}; another card: {found['two cards']}")


def test_stops_and_leaves(guest: Guest) -> None:
    """It takes its sockets with it, a purge leaves nothing, and the kubelet had no complaint."""
    found = guest["stop and purge"]
    assert found["violations"] == []
    assert found["properties"] == {"ActiveState": "inactive", "Result": "success"}
    assert [name for name in found["sockets"] if name.endswith(".sock")] == ["kubelet.sock"], found
    assert found["said"].endswith("status 0") and not found["left"], found
    guest.tell("stop and purge", "nothing is left")


def test_every_step_came_to_its_end(guest: Guest, told: Told) -> None:
    """What each test made of its step stands in the table; a step that failed is one of them."""
    told(guest.table())
    assert [name for name, found in guest.steps.items() if "failed" in found] == []
