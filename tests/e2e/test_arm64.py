"""The arm64 package on arm64 machines: Debian's own kernels and systemd, in virtual machines."""

from __future__ import annotations

import pytest

from tests.e2e import arm64, vm
from tests.e2e.conftest import Told
from tests.e2e.container import optional
from tests.e2e.probe import assert_sandboxed
from tests.e2e.steps import Steps
from tests.world.processes import ROOT

PAGE_SIZES = {"bookworm": 4096, "trixie-16k": 16384}


@pytest.fixture(scope="module", params=arm64.GUESTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def steps(name: str) -> Steps:
    """What arm64_guest.py has found on the guest with this name."""
    debs = sorted(ROOT.glob("dist/*_arm64.deb"), key=lambda deb: deb.stat().st_mtime)
    if not debs:
        pytest.exit("make deb ARCHES=arm64: there is no package to test", returncode=1)
    with optional():
        return vm.run(arm64.GUESTS[name], debs[-1])


def test_the_machine(name: str, steps: Steps, told: Told) -> None:
    """It has an arm64 kernel with this page size, no failed unit, and consistent packages."""
    found = steps["boot"]
    assert (found["machine"], found["page size"]) == ("aarch64", PAGE_SIZES[name])
    assert not found["failed units"] and found["dpkg"].splitlines() == ["arm64", "0"], found
    told(f"{found['kernel']}; {steps.seconds:.0f} s of the machine's clock")


def test_installation(steps: Steps, told: Told) -> None:
    """apt installs only this package; it is enabled, active and READY, with the same exposure."""
    found = steps["install"]
    assert "0 upgraded, 1 newly installed, 0 to remove" in found["output"], found["output"]
    assert found["output"].endswith("status 0") and not found["verify"], found

    names = ("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    seen = [found[name] for name in names]
    assert seen == ["notify", "active", "running", "enabled", "success"], seen

    assert 0.9 <= found["exposure"] <= 1.5
    told(f"{found['version']}, exposure {found['exposure']}")


def test_sandbox_from_inside(steps: Steps) -> None:
    """System calls have other numbers here; the same ones are denied as on amd64."""
    assert_sandboxed(steps["sandbox"]["answers"])


def test_allocation(steps: Steps, told: Told) -> None:
    """The kubelet starts later; a pod gets both chips of a board with its environment."""
    found = steps["allocate"]
    assert (found["tenstorrent.com/n150"], found["tenstorrent.com/p300"]) == (1, 2)

    admitted = found["admitted"]
    assert "TT_VISIBLE_DEVICES=0000:02:00.0,0000:03:00.0" in admitted["env"], admitted
    inside = [device.split(":/dev/")[1] for device in admitted["devices"]]
    assert inside == ["tenstorrent/1:rw", "tenstorrent/2:rw"], admitted
    assert found["violations"] == []
    told(found["status"])
