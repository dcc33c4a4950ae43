"""The arm64 package on arm64 machines: Debian's own kernels and systemd, in virtual machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import arm64, vm
from tests.e2e.conftest import Told
from tests.e2e.container import optional
from tests.e2e.steps import assert_sandboxed
from tests.world.processes import ROOT

Guest = tuple[arm64.Release, vm.Steps]


@pytest.fixture(scope="module", params=arm64.RELEASES, ids=lambda release: release.name)
def guest(request: pytest.FixtureRequest) -> Guest:
    """A release, and what arm64_guest.py has found on it."""
    debs = sorted(ROOT.glob("dist/*_arm64.deb"), key=lambda deb: deb.stat().st_mtime)
    if not debs:
        pytest.exit("make deb ARCHES=arm64: there is no package to test", returncode=1)
    with optional():
        output = arm64.run(request.param, debs[-1], Path(__file__).with_name("arm64_guest.py"))
    return request.param, vm.steps(output)


def step(guest: Guest, name: str) -> dict[str, Any]:
    """Return the results of a step, which must have succeeded."""
    found = guest[1][name]
    assert "failed" not in found, found["failed"]
    return found


def test_the_machine(guest: Guest, told: Told) -> None:
    """It has an arm64 kernel with this page size, no failed unit, and consistent packages."""
    release, found = guest[0], step(guest, "boot")
    assert (found["machine"], found["page size"]) == ("aarch64", release.page_size)
    assert not found["failed units"] and found["dpkg"].splitlines() == ["arm64", "0"], found
    seconds = sum(each["seconds"] for each in guest[1].values())
    told(f"{found['kernel']}; {seconds:.0f} s of the machine's clock")


def test_installation(guest: Guest, told: Told) -> None:
    """apt installs only this package; it is enabled, active and READY, with the same exposure."""
    found = step(guest, "install")
    assert "0 upgraded, 1 newly installed, 0 to remove" in found["output"], found["output"]
    assert found["output"].endswith("status 0") and not found["verify"], found
    names = ("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    seen = [found["properties"][name] for name in names]
    assert seen == ["notify", "active", "running", "enabled", "success"], seen
    assert 0.9 <= found["exposure"] <= 1.5
    told(f"{found['version']}, exposure {found['exposure']}")


def test_sandbox_from_inside(guest: Guest) -> None:
    """System calls have other numbers here; the same ones are denied as on amd64."""
    assert_sandboxed(step(guest, "sandbox")["answers"])


def test_allocation(guest: Guest, told: Told) -> None:
    """The kubelet starts later; a pod gets both chips of a board with its environment."""
    found = step(guest, "allocate")
    assert (found["tenstorrent.com/n150"], found["tenstorrent.com/p300"]) == (1, 2)
    admitted = found["admitted"]
    assert "TT_VISIBLE_DEVICES=0000:02:00.0,0000:03:00.0" in admitted["env"], admitted
    inside = [device.split(":/dev/")[1] for device in admitted["devices"]]
    assert inside == ["tenstorrent/1:rw", "tenstorrent/2:rw"], admitted
    assert found["violations"] == []
    told(found["status"])
