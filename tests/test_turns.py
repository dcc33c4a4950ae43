"""The loop of the daemon: what its turns do while something fails, and at what pace."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Mapping
from typing import Any

import pytest

import ttdp
from tests.conftest import StartDaemon
from tests.world.node import SimulatedNode
from tests.world.processes import until

NAME = "tenstorrent.com/n150"


@pytest.fixture
def node(node: SimulatedNode) -> SimulatedNode:
    node.add("n150")
    return node


async def test_a_failing_observation_is_tried_once_a_second(
    start: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without descriptors, a poll that is due does not make the loop spin."""
    daemon = await start()
    await until(lambda: daemon.notified("READY"))
    tries = 0

    def no_descriptors(*_: object) -> Mapping[str, Any]:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(ttdp, "scan", no_descriptors)
    await asyncio.sleep(1.5)
    assert 1 <= tries <= 4
