"""Chips out of service: not offered, live by a reload, and every output agrees."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.commands import view_of
from tests.conftest import StartDaemon
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import outlets, until
from tests.world.simulation import RunningDaemon
from ttdp import Chip, Kind, Settings, SharedResource, Sharing

P300, N150 = "tenstorrent.com/p300", "tenstorrent.com/n150"
BOARD, HALF = f"{P300}-board", "tenstorrent.com/half"
PAIR = [chip(1, "p300c", serial="A" * 16), chip(2, "p300c", serial="A" * 16, ordinal=1)]
FOUR = [*PAIR, *(chip(bus, "p300c", serial="B" * 16, ordinal=bus) for bus in (3, 4))]


def replicas(device_id: str) -> list[str]:
    return [f"{device_id}::{number}" for number in (0, 1)]


def without(*buses: int, **settings: Any) -> Settings:
    return Settings(exclude=tuple(map(bdf, buses)), **settings)


# -- what is offered -------------------------------------------------------------------------------

BOARDS: dict[str, Any] = {"unit": "board"}
SHARED_BOARDS = {**BOARDS, "sharing": Sharing(resources=(SharedResource("p300-board", 2),))}
TWO_SHARED = {"sharing": Sharing(resources=(SharedResource("p300", 2, "half", (bdf(2), bdf(3))),))}


@pytest.mark.parametrize(
    ("bus", "settings", "offered"),
    [
        (2, {}, {P300: [bdf(1), bdf(3), bdf(4)]}),
        (2, BOARDS, {BOARD: ["B" * 16]}),
        (2, SHARED_BOARDS, {BOARD: replicas("B" * 16)}),
        (1, TWO_SHARED, {P300: [bdf(4)], HALF: [*replicas(bdf(2)), *replicas(bdf(3))]}),
    ],
    ids=["chips", "boards", "shared boards", "two shared chips"],
)
def test_an_excluded_chip_is_not_offered(
    bus: int, settings: dict[str, Any], offered: dict[str, list[str]]
) -> None:
    """With whole boards the board is excluded. A selection by count has only what is offered."""
    found = decide(FOUR, without(bus, **settings))

    assert {name: [*each.devices] for name, each in found.resources.items()} == offered
    devices = [each for resource in found.resources.values() for each in resource.devices.values()]
    chips = {bdf for each in devices for bdf in each.addresses}
    assert found.offer.excluded == found.chips.keys() - chips


def test_the_status_of_a_node_whose_chips_are_all_excluded_does_not_deny_them() -> None:
    """It leads to `list`, which has the reasons."""
    found = decide(FOUR, without(1, 2, 3, 4))

    assert not found.resources
    text = "4 chips, but no device to offer; for the reason, run: tt-device-plugin list"
    assert ttdp.status_line(found, {}) == text


def test_a_chip_that_is_not_on_the_node_is_a_line_of_the_log() -> None:
    """Once, and it changes nothing else: the chip may still come."""
    found = decide(FOUR, without(9))

    assert found.offer.without_effect == [f"exclude: {bdf(9)} is not a chip of this node"]
    assert len(found.resource(P300).devices) == 4 and not found.offer.excluded
    assert found.offer.without_effect[0] in [line for _, line in ttdp.changes(None, found)]
    assert [*ttdp.changes(found, found)] == []


def test_a_chip_that_never_had_a_device_file_is_a_chip_of_the_node_too() -> None:
    """It has another driver since boot: that of virtual machines."""
    absent = chip(9)
    function = absent.function.without_class_device(driver="vfio-pci")
    absent = absent._replace(function=function, is_listed=False, was_present=False)

    found = decide([*FOUR, absent], without(9))

    assert found.offer.without_effect == [] and found.offer.excluded == {bdf(9)}
    assert "vfio" not in ttdp.plugin_metrics(found, {}, Counter(), 0.0)


def test_an_excluded_chip_without_a_driver_is_not_reported() -> None:
    """It was taken out of service for that, or for a virtual machine."""
    gone = chip(1, present=False)
    unbound = gone._replace(function=gone.function._replace(on_bus=True), is_listed=False)

    assert ttdp.driver_problem(decide([unbound])) is not None
    assert ttdp.driver_problem(decide([unbound], without(1))) is None


# -- outputs ---------------------------------------------------------------------------------------


def test_cdi_has_an_excluded_chip_by_address_only() -> None:
    """Whoever debugs it names it; `all` is for the others."""
    spec = json.loads(ttdp.cdi_file(decide(FOUR[:2], without(2))) or "")
    paths = {
        device["name"]: [node["path"] for node in device["containerEdits"]["deviceNodes"]]
        for device in spec["devices"]
    }

    one, two = "/dev/tenstorrent/0", "/dev/tenstorrent/1"
    assert paths == {bdf(1): [one], bdf(2): [two], "all": [one]}

    alone = json.loads(ttdp.cdi_file(decide(FOUR[:1], without(1))) or "")
    assert [device["name"] for device in alone["devices"]] == [bdf(1)]


@pytest.fixture(params=[False, True], ids=["free", "held"])
def is_held(request: pytest.FixtureRequest) -> bool:
    """Whether a pod holds the excluded chip."""
    return bool(request.param)


@pytest.fixture
def found(is_held: bool) -> ttdp.Decision:
    """Two chips, of which the second one is dead and excluded."""
    holds = [hold("n150", bdf(2), buses=[2])] if is_held else []
    return decide([chip(1), chip(2, fault=Kind.STALLED)], without(2), holds)


def test_labels_do_not_count_it(found: ttdp.Decision) -> None:
    """A chip out of service is no device for the scheduler, not even while a pod holds it."""
    assert "tenstorrent.com/n150.count=1\n" in ttdp.labels_file(found)


def test_nodes_are_not_selected_by_it() -> None:
    """Neither by its architecture nor by its firmware, which would be mixed."""
    chips = [chip(1, firmware="19.4.0.0"), chip(2, "p150a", firmware="18.0.0.0")]
    text = ttdp.labels_file(decide(chips, without(2)))
    assert "tenstorrent.com/firmware.version=19.4.0.0\n" in text and "blackhole" not in text


def test_of_a_chip_out_of_service_metrics_have_only_that_it_is(
    found: ttdp.Decision, is_held: bool
) -> None:
    """Neither health nor a fault, nor is its function counted, unless a pod holds the chip."""
    metrics = ttdp.chip_metrics(found, {}) + ttdp.plugin_metrics(found, {}, Counter(), 0.0)

    label = f'excluded="{"false" if is_held else "true"}"'
    assert re.search(rf'tt_device_info{{device="{bdf(2)}".*,{label}}} 1', metrics)
    assert f'tt_device_healthy{{device="{bdf(1)}"}} 1' in metrics
    assert (f'tt_device_healthy{{device="{bdf(2)}"}} 0' in metrics) is is_held
    assert (f'tt_device_healthy{{device="{bdf(2)}"}}' in metrics) is is_held
    assert (f'tt_device_fault{{device="{bdf(2)}",kind="stalled"}} 1' in metrics) is is_held
    assert f'tt_pci_functions{{driver="tenstorrent"}} {1 + is_held}' in metrics


def test_the_log_has_the_fault_of_an_excluded_chip_only_while_a_pod_holds_it(
    found: ttdp.Decision, is_held: bool
) -> None:
    """Without a pod, nobody is to mend what was taken out of service for that."""
    log = " ".join(text for _, text in ttdp.changes(None, found))
    assert ("unhealthy" in log) is is_held


def test_in_json_a_chip_out_of_service_has_neither_health_nor_reason(
    found: ttdp.Decision, is_held: bool
) -> None:
    """Both while a pod holds it; `excluded` is what the configuration says."""
    _, row = view_of(found, 1.5e9)["chips"]

    assert row["excluded"] is True
    assert row["resource"] == (N150 if is_held else None)
    assert row["id"] == (bdf(2) if is_held else None)
    assert row["healthy"] is (False if is_held else None)
    assert (row["reason"] is not None) is is_held
    assert row["since"] == ("2017-07-14T02:40:00Z" if is_held else None)


def test_a_chip_that_another_plugins_pod_holds_is_in_service() -> None:
    """Under whatever name of our domain that plugin gave it."""
    theirs = hold("theirs", "0", buses=[2])._replace(is_ours=False)
    found = decide(FOUR, without(2, 3), [theirs])

    assert not found.is_out_of_service(bdf(2))
    assert found.is_out_of_service(bdf(3))


def test_a_chip_out_of_service_does_not_wait_for_its_board() -> None:
    """`list` reports no board that is not known for it: nobody would use it."""
    chips = [chip(bus, "p300c", ordinal=bus) for bus in (1, 2)]
    view = view_of(decide(chips, without(2, unit="board")))

    unplaced = [each["subject"] for each in view["problems"] if each["kind"] == "unplaced"]
    assert unplaced == [bdf(1)]


GALAXY = [chip(tray + n, "galaxy-wormhole") for tray in (0, 0x40, 0x80, 0xC0) for n in range(1, 9)]
UNKNOWN = chip(2, "p300c", ordinal=1)  # a virtual machine has had it since boot
MOVED = [chip(bus, "p300c", ordinal=bus, serial="B" * 16, present=bus > 4) for bus in range(3, 7)]


@pytest.mark.parametrize(
    ("chips", "excluded", "missing"),
    [
        (GALAXY[:-1], [1], ["only 31 of 32 chips of the Galaxy in PCI domain 0000 found"]),
        (GALAXY, [1], []),
        (PAIR[:1], [], [f"only 1 of 2 chips of the board with serial {'A' * 16} found"]),
        (PAIR[:1], [1], []),
        (PAIR, [2], []),
        ([PAIR[0], UNKNOWN], [], []),
        ([PAIR[0], UNKNOWN], [2], []),
        (
            [PAIR[0], *MOVED],
            [],
            [f"only 1 of 2 chips of the board with serial {'A' * 16} found"],
        ),
    ],
    ids=[
        "another one is missing", "the Galaxy is whole", "in service", "its board is out", "half",
        "a chip without a serial", "that one excluded", "another board in another slot",
    ],
)  # fmt: skip
def test_an_excluded_chip_is_not_missing_on_its_board(
    chips: list[Chip], excluded: list[int], missing: list[str]
) -> None:
    """Nor does a board matter that is out of service. A chip without a serial can be missing."""
    assert [*ttdp.missing_chips(decide(chips, without(*excluded)))] == missing


# -- live ------------------------------------------------------------------------------------------


async def test_a_reload_takes_a_chip_out_of_service_and_back(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, short_tmp: Path,
) -> None:  # fmt: skip
    """A pod that has it keeps it; no other pod gets it; one line each way."""
    caplog.set_level("INFO")
    monkeypatch.setattr(ttdp, "ROUND", 0.1)

    labels = Path(outlets(short_tmp)["labels_dir"]) / ttdp.LABELS_FILE
    labels.parent.mkdir()
    first, second = node.add("p300c")

    daemon = await start()
    await kubelet.run_pod("train", P300)

    (mine,) = kubelet.allocated(P300)
    other = ({first.bdf, second.bdf} - {mine}).pop()

    daemon.reload(exclude=(mine, other))
    await kubelet.wait_for(lambda: kubelet.healthy(P300) == {mine})
    await until(lambda: "p300.count" not in labels.read_text())

    kubelet.crash("train", "main")
    await kubelet.wait_for(lambda: len(kubelet.find("running")) == 2)

    kubelet.delete("train")
    await until(lambda: P300 not in daemon.sessions)

    daemon.reload(exclude=())
    await kubelet.wait_for(lambda: kubelet.healthy(P300) == {mine, other})

    lines = [line for line in caplog.messages if "excluded" in line]
    assert len(lines) == 4 and sum("no longer" in line for line in lines) == 2


@pytest.fixture
async def daemon(start: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> RunningDaemon:
    """One that looks at nothing unless something happens."""
    for name in ("ROUND", "HELD_INTERVAL"):
        monkeypatch.setattr(ttdp, name, 3600)
    daemon: RunningDaemon = await start(interval=3600)
    return daemon


async def exclude_in_use(daemon: RunningDaemon, kubelet: Kubelet, bdf: str) -> None:
    """Let a pod have the first chip, and exclude that."""
    await kubelet.run_pod("train", N150)
    await until(lambda: not daemon.host.holds.is_awaiting_containers)

    daemon.forget_notes()
    daemon.reload(exclude=(bdf,))
    await daemon.ready()


async def test_of_a_deployments_pods_one_at_most_is_refused_after_the_one_that_had_the_chip(
    node: SimulatedNode, kubelet: Kubelet, daemon: RunningDaemon
) -> None:
    """The ID leaves the list with the hold, as soon as a request shows that this has ended."""
    (chip,) = node.add("n150")
    await exclude_in_use(daemon, kubelet, chip.bdf)
    assert kubelet.healthy(N150) == {chip.bdf}

    kubelet.delete("train")
    with pytest.raises(AdmissionError):
        await kubelet.admit("next", "main", {N150: 1})

    await kubelet.wait_for(lambda: not kubelet.healthy(N150))


async def test_a_pod_gets_another_chip_when_the_excluded_one_has_just_become_free(
    node: SimulatedNode, kubelet: Kubelet, daemon: RunningDaemon
) -> None:
    """The kubelet still has its ID in the list, and asks which of both is preferred."""
    first, second = node.add("n150") + node.add("n150")
    await exclude_in_use(daemon, kubelet, first.bdf)

    kubelet.delete("train")
    await kubelet.admit("next", "main", {N150: 1})

    assert kubelet.allocated(N150) == {second.bdf}
