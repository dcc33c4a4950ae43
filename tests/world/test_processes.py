"""Programs are started, heard and ended as a service manager would do it, and what does not happen is said."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.world.processes import Broken, Service, environment, finished, until, wait_until

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
    """Each notification is waited for once; the present status can be asked for; the exit status comes last."""
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


async def test_a_service_that_does_not_obey_is_killed_with_its_context(short_tmp: Path) -> None:
    """After SIGTERM it has some seconds; nothing of it is left."""
    command = [sys.executable, "-c", TALKER.replace("sys.exit(7)", "time.sleep(600)")]
    async with Service(command, environment(), short_tmp / "notify") as service:
        await service.ready()
        with pytest.raises(Broken, match="no end"):
            await service.stop(seconds=0.2)
    assert not Path(f"/proc/{service.pid}").exists()


async def test_what_does_not_happen_is_said_with_its_name() -> None:
    """Both ways of waiting give the first true value, or an error that names what was waited for."""
    values = iter([0, "", None, 7])
    assert await until(lambda: next(values)) == 7
    values = iter([0, 7])
    assert wait_until(lambda: next(values)) == 7
    with pytest.raises(Broken, match=r"rain: not within 0\.01 s"):
        await until(lambda: False, "rain", 0.01)
    began = time.monotonic()
    with pytest.raises(Broken, match=r"snow after \d+ s: not within 0\.01 s"):
        wait_until(lambda: False, lambda: f"snow after {time.monotonic() - began:.0f} s", 0.01)


def test_nothing_of_ours_reaches_the_program_but_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that configure the daemon, Python or a service are not inherited."""
    for name in (
        "TTDP_LOG_LEVEL",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "PYTHONSTARTUP",
        "RUNTIME_DIRECTORY",
        "LISTEN_FDS",
    ):
        monkeypatch.setenv(name, "1")
    ended = finished([sys.executable, "-c", "import os; print(*os.environ)"], {"TTDP_UNIT": "board"})
    seen = set(ended.stdout.split())
    assert "PATH" in seen and "TTDP_UNIT" in seen and "PYTHONPATH" in seen
    assert not seen & {"TTDP_LOG_LEVEL", "NOTIFY_SOCKET", "WATCHDOG_USEC", "PYTHONSTARTUP", "RUNTIME_DIRECTORY"}
