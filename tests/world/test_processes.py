"""Programs are started, heard and ended as a service manager would do it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.world.processes import Broken, Service, environment, finished

TALKER = r"""
import os, signal, socket, sys, time
manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
manager.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
def stop(*_):
    manager.send(b"STOPPING=1")
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("hello", file=sys.stderr, flush=True)
for text in (b"STATUS=one", b"READY=1\nSTATUS=two", b"STATUS=three of three"):
    manager.send(text)
signal.pause()
"""


def talker(address: str | Path) -> Service:
    return Service([sys.executable, "-c", TALKER], environment(), address)


@pytest.mark.parametrize("abstract", [False, True])
async def test_a_service_is_heard_in_its_order_and_ended(short_tmp: Path, abstract: bool) -> None:
    """Each notification is waited for once; the present status can be asked for."""
    async with talker(f"@tt-talker-{os.getpid()}" if abstract else short_tmp / "notify") as service:
        assert 0 < await service.ready() < 60
        assert await service.status("three", "three") == "three of three"
        with pytest.raises(Broken, match=r"(?s)no READY=1: not within 0\.05 s\n.*hello"):
            await service.note("READY=1", 0.05)
        status, _ = await service.stop()
        assert status == 7
        assert service.heard[-1] == "STOPPING=1" and service.said == ["hello"]


async def test_a_service_that_ends_by_itself_keeps_nobody_waiting(short_tmp: Path) -> None:
    """Who waits for a notification is told at once that none will come, and what was said last."""
    command = [sys.executable, "-c", "import sys; print('no luck', file=sys.stderr); sys.exit(3)"]
    async with Service(command, environment(), short_tmp / "notify") as service:
        with pytest.raises(Broken, match="the process ended with status 3\n    no luck"):
            await service.note("READY=1")
        assert await service.ended() == 3


def test_nothing_of_ours_reaches_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that configure the daemon, Python or a service are not inherited."""
    foreign = {"TTDP_LOG_LEVEL", "NOTIFY_SOCKET", "WATCHDOG_USEC", "PYTHONSTARTUP", "LISTEN_FDS"}
    for name in foreign:
        monkeypatch.setenv(name, "1")
    show = [sys.executable, "-c", "import os; print(*os.environ)"]
    ended = finished(show, {"TTDP_UNIT": "board"})
    seen = set(ended.stdout.split())
    assert "PATH" in seen and "TTDP_UNIT" in seen and "PYTHONPATH" in seen
    assert not seen & foreign
