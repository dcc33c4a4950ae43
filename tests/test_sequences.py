"""Random operations on a node with its kubelet and daemon, and what they have found.

`make fuzz` makes more of them.
"""

from __future__ import annotations

import os

import pytest

import ttdp
from tests.fuzz import run_fuzz
from tests.world.chip import dead_value

STEPS = int(os.environ.get("TTDP_STEPS", "25"))


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
async def test_random_operations_keep_every_promise(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No chip has two owners, no running pod is killed, no output contradicts another."""
    status = await run_fuzz(seed, STEPS)
    assert status == 0, capsys.readouterr().out


def test_a_chip_that_dies_while_it_is_read_has_not_tripped() -> None:
    """Its heartbeat was read before, and shows life; it would be unhealthy for 300 s."""
    function = ttdp.PciFunction("0000:01:00.0", "blackhole")
    alive = {"tt_heartbeat": "7", "tt_therm_trip_count": "0"}
    dying = {"tt_heartbeat": "8"} | {
        name: dead_value(name)
        for name in (*ttdp.TT_ATTRIBUTES, *ttdp.HWMON_ATTRIBUTES)
        if name != "tt_heartbeat"
    }

    chip = ttdp.Chip(function)
    for at, texts in enumerate((alive, dying, alive)):
        reading = ttdp.with_telemetry(ttdp.Reading(function, float(at)), texts)
        chip = chip.read(reading, None)

        assert chip.telemetry_fault is None and chip.identity == ttdp.Identity()
