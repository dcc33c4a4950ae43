"""Fixtures: a simulated node, a reference kubelet, the daemon, and a host for commands."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

import ttdp
from generated import deviceplugin_pb2_grpc as rpc
from tests.commands import UNHURRIED, Served
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import finished, until, workspace
from tests.world.simulation import RunningDaemon, settings_of
from tests.world.simulation import StartDaemon as StartDaemon

READ_TIMEOUT = ttdp.READ_TIMEOUT  # the program's own, see `unhurried`
MISSES = ttdp.MISSES
NEVER = 1_000_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT RUN: needs root, for another user")


def plugin_sockets(directory: Path) -> list[str]:
    """Return the names of the sockets in the device plugin directory, except the kubelet's."""
    names = [path.name for path in directory.iterdir() if path.is_socket()]
    return [name for name in names if name != "kubelet.sock"]


@contextlib.asynccontextmanager
async def client(directory: Path, name: str | None = None) -> AsyncIterator[Any]:
    """Give a client of the daemon's socket of this name, or of its only one."""
    path = directory / (name or plugin_sockets(directory)[0])
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        yield rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]


CALLER_HAS_GONE = "ExecuteBatchError raised in core"


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines of the log that are errors, but for gRPC's of a caller that has gone."""
    lines = [record.message for record in caplog.records if record.levelname == "ERROR"]
    return [line for line in lines if not line.startswith(CALLER_HAS_GONE)]


def no_descriptors(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def polls(daemon: RunningDaemon, number: int = 3) -> None:
    """Wait for polls, at each of which the daemon looks at chips and pods' cgroups."""
    for _ in range(number):
        last = daemon.polls
        await until(lambda: daemon.polls > last)  # noqa: B023


def unshared(*namespaces: str) -> list[str]:
    """Return a command that runs another in namespaces of its own; without the right to, skip.

    namespaces: options of unshare, such as "--net". Outside of root's sessions, a user namespace
    gives the right to them.
    """
    for options in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *options, *namespaces]
        if shutil.which("unshare") and finished([*command, "true"]).returncode == 0:
            return command
    pytest.skip(f"neither root nor allowed to make a user namespace, for unshare {namespaces[0]}")


def kubelet_of(node: SimulatedNode, directory: Path, **options: Any) -> Kubelet:
    """Return a kubelet whose pods have cgroups and processes on this node."""
    return Kubelet(directory, host=node, **options)


@pytest.fixture(scope="session", autouse=True)
def unhurried() -> Iterator[None]:
    """Let reads of chips take as long as they need on a busy machine; see `reads_time_out`.

    A busy kubelet also notices the end of a stream later.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ttdp, "READ_TIMEOUT", UNHURRIED["READ_TIMEOUT"])
        patch.setattr(ttdp, "STREAM_DELAY", 4 * ttdp.STREAM_DELAY)
        # On a busy machine, firmware that a thread plays does not keep up with such polls.
        patch.setattr(ttdp, "MISSES", NEVER)
        yield


@pytest.fixture
def reads_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads of chips count as blocked as early as in the real program."""
    monkeypatch.setattr(ttdp, "READ_TIMEOUT", READ_TIMEOUT)


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """Give a directory with a short path: a unix socket's address holds 107 bytes."""
    with workspace() as path:
        yield path


@pytest.fixture
def directory(short_tmp: Path) -> Path:
    """Return the kubelet's device plugin directory, not made yet."""
    return short_tmp / "dp"


@pytest.fixture
def node() -> Iterator[SimulatedNode]:
    """Give a machine without cards, driver loaded."""
    with workspace() as path:
        yield SimulatedNode(path / "node")


@pytest.fixture
def ticking(node: SimulatedNode) -> Iterator[None]:
    """Let the firmware of the node's cards live: for tests in which one stops, see STALLS."""
    with Ticker(node, 0.05):
        yield


@pytest.fixture
async def kubelet(node: SimulatedNode, directory: Path) -> AsyncIterator[Kubelet]:
    """Give a running kubelet of this node; a good daemon causes no violation."""
    async with kubelet_of(node, directory) as running:
        yield running
    assert running.violations == []


@pytest.fixture
async def start(node: SimulatedNode, directory: Path) -> AsyncIterator[StartDaemon]:
    """Starts the daemon on the node with these settings; it is stopped at the end."""
    async with contextlib.AsyncExitStack() as stack:

        async def start_daemon(
            environ: Mapping[str, str] | None = None, **settings: Any
        ) -> RunningDaemon:
            return await stack.enter_async_context(
                RunningDaemon(node, settings_of(node, directory, **settings), environ)
            )

        yield start_daemon


@pytest.fixture
def served(short_tmp: Path, node: SimulatedNode, kubelet: Kubelet, start: StartDaemon) -> Served:
    """Return the host of the kubelet and, after serve(), of a daemon: for commands that ask it."""
    environ = {"RUNTIME_DIRECTORY": str(short_tmp)}
    return Served(short_tmp, node, environ, kubelet=kubelet, start=start)
