"""Random operations on a node with its kubelet and daemon; `make fuzz` makes more of them."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import run_fuzz

STEPS = int(os.environ.get("TTDP_STEPS", "25"))


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
async def test_random_operations_keep_every_promise(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No chip has two owners, no running pod is killed, no output contradicts another.

    With the seeds 2 and 5, the runtime has no pause processes.
    """
    status = await run_fuzz(seed, STEPS)
    assert status == 0, capsys.readouterr().out
