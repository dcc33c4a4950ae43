"""The driver and the links by PCI address, with a real kernel and udev, in virtual machines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import vm
from tests.e2e.conftest import Told
from tests.e2e.container import Missing

SUITES = ("bookworm", "trixie")
FUNCTIONS = ("10.0", "11.0", "12.0")

Steps = dict[str, dict[str, Any]]


@pytest.fixture(scope="module", params=SUITES)
def steps(request: pytest.FixtureRequest, deb: Path) -> Steps:
    """What guest.py has seen, by step."""
    try:
        said = vm.run(request.param, deb, Path(__file__).with_name("guest.py"), FUNCTIONS)
    except Missing as reason:
        pytest.skip(f"NOT RUN: {reason}")
    seen = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert seen, said
    return {step["step"]: step for step in seen}


def assert_links_lead_to_their_chips(step: dict[str, Any], number: int = len(FUNCTIONS)) -> None:
    assert len(step["chips"]) == number and step["links"] == step["chips"], step


def test_the_driver_is_loaded_before_the_daemon_starts(steps: Steps, told: Told) -> None:
    """systemd-modules-load does it, by the package's file. The links are there from the start."""
    boot = steps["boot"]
    assert 0 < boot["loaded"] < boot["began"] and not boot["failed"], boot
    assert_links_lead_to_their_chips(boot)
    later = (boot["began"] - boot["loaded"]) / 1e6
    begun = f"the daemon is started {later:.1f} s after the driver"
    told(f"udev {boot['version']}: {begun}; links: {boot['links']}")


def test_links_follow_their_chips(steps: Steps, told: Told) -> None:
    """They go and come with the driver's functions, and follow chips to nodes of new numbers."""
    assert_links_lead_to_their_chips(steps["two unbound"], 1)
    before, after = steps["boot"], steps["bound in the other order"]
    assert_links_lead_to_their_chips(after)
    assert before["chips"] != after["chips"], "the driver has given the same numbers again"
    assert steps["driver unloaded"]["directory"] is None
    assert_links_lead_to_their_chips(steps["driver loaded"])
    told(f"{before['links']}, and after binding in another order {after['links']}")


def test_links_come_with_the_package_and_go_with_it(steps: Steps) -> None:
    """An installation makes them for the cards that are there; a removal leaves the nodes only."""
    assert not steps["without the rule"]["links"]
    assert_links_lead_to_their_chips(steps["installed with cards there"])
    purged = steps["purged"]
    assert purged["directory"] == sorted(purged["chips"].values()) and not purged["links"], purged


def test_the_first_installation_loads_the_driver(steps: Steps, told: Told) -> None:
    """Not only the next boot does. Where it is not wanted, or not there, nobody hears an error."""
    assert_links_lead_to_their_chips(steps["installed with the driver not loaded"])
    for step in (
        "installed with the driver not loaded",
        "installed with the driver not wanted",
        "installed without the driver",
    ):
        assert steps[step]["said"] == "status 0" and steps[step]["errors"] == "", steps[step]
        told(f"{step}: {len(steps[step]['chips'])} devices")
    assert not steps["installed with the driver not wanted"]["chips"]
    assert not steps["installed without the driver"]["chips"]


def test_a_driver_that_is_not_installed_is_a_line(steps: Steps, told: Told) -> None:
    """Without the module the boot goes on: one line says that it was not found."""
    missing = steps["without the driver"]
    assert "Failed to find module 'tenstorrent'" in missing["journal"], missing
    told(f"{missing['status']}: {missing['journal']}")
