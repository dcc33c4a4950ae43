"""The program as a process on a simulated node, and all that it prints: for tests of commands."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import multiprocessing
import os
import pty
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ttdp
from tests.world import simulation
from tests.world.controls import Controls
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, environment, wait_until
from tests.world.service import Service
from tests.world.simulation import RunningDaemon, StartDaemon

# Constants of the program under test. On a busy machine, chips and services that answer at once can
# seem not to. Tests of what does not answer have other constants.
UNHURRIED = dict.fromkeys(("READ_TIMEOUT", "VIEW_TIMEOUT"), PATIENCE)

# Its children are the program within milliseconds: importing gRPC takes most of what it does.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.commands"])


class Answer(NamedTuple):
    """What one run of the program gave."""

    status: int
    out: str
    err: str


@dataclass
class Host:
    """A simulated node on which an operator types commands; all else of it is in `root`."""

    root: Path
    node: SimulatedNode
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)  # of the program: beside UNHURRIED

    def run(self, *words: str, **environ: str) -> Answer:
        """Run the program to its end, in a process that has imported it already."""
        return forked(words, self._given(environ), **self.constants)

    async def ask(self, *words: str) -> Answer:
        return await asyncio.to_thread(self.run, *words)

    def terminal(self, *words: str) -> Terminal:
        """Return the program on a terminal, for `with`."""
        return Terminal(words, self._given({}), {**UNHURRIED, **self.constants})

    def _given(self, environ: Mapping[str, str]) -> dict[str, str]:
        return environment() | {"RUNTIME_DIRECTORY": str(self.root)} | self.environ | {**environ}


@dataclass(kw_only=True)
class Served(Host):
    """A host with a kubelet and, after serve(), a daemon."""

    kubelet: Kubelet
    start: StartDaemon

    async def serve(self, resource: str = "", **settings: Any) -> RunningDaemon:
        """Start the daemon, and wait until it is ready and has registered this resource."""
        daemon = await self.start(runtime_dir=str(self.root), **settings)
        await daemon.ready()
        if resource:
            await self.kubelet.registered(resource)
        return daemon

    async def view(self) -> dict[str, Any]:
        """Return what the daemon answers on its status socket."""

        def read() -> Any:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.root / ttdp.STATUS_SOCKET))
                return json.loads(connection.makefile("rb").read())

        view: dict[str, Any] = await asyncio.to_thread(read)
        return view


@dataclass(kw_only=True)
class Commanded(Host):
    """A host with a stand-in for the daemon, and with what an operator's commands reach."""

    service: Service
    controls: Controls

    def admit(self, pod: str, *addresses: str) -> None:
        """Let a pod hold these chips."""
        namespace, _, name = pod.rpartition("/")
        user = {"namespace": namespace, "pod": name, "container": "main"}
        for bdf in addresses:
            self.service.pods[bdf] = [*(self.service.pods.get(bdf) or []), user]

    def open(self, bdf: str, pid: int, command: str) -> None:
        """Let a process of the host open a chip's device file."""
        row = {"pid": pid, "command": command, "of_pod": False}
        self.service.processes[bdf] = [*(self.service.processes.get(bdf) or []), row]


@contextlib.contextmanager
def commanded(root: Path, tree: Path | None = None, **node: Any) -> Iterator[Commanded]:
    """Give a host without cards, with a kubelet's socket, and with a service that answers.

    tree: the directory for the node; else it is in `root`.
    """
    (root / "dp").mkdir()
    (root / "dp/kubelet.sock").touch()
    simulated = SimulatedNode(tree or root / "node", **node)
    with Service(simulated, root) as service, Controls(simulated, root) as controls:
        service.before = controls.settle
        yield Commanded(root, simulated, service=service, controls=controls)


def forked(words: Sequence[str], environ: Mapping[str, str], **constants: Any) -> Answer:
    """Do what Host.run() does; constants: of the program, beside UNHURRIED."""
    with tempfile.TemporaryDirectory() as home:
        outputs = [f"{home}/{name}" for name in "oe"]
        arguments = (words, environ, {**UNHURRIED, **constants}, *outputs)
        process = _forks.Process(target=_be_the_program, args=arguments, daemon=True)
        process.start()
        process.join(4 * PATIENCE)
        is_hung = process.exitcode is None
        if is_hung and process.pid:
            os.kill(process.pid, signal.SIGABRT)  # it shows where it is
            process.join(PATIENCE)

        out, err = (Path(path).read_text() for path in outputs)
        assert not is_hung and process.exitcode is not None, f"{words} does not end\n{out}\n{err}"
        return Answer(process.exitcode, out, err)


def _be_the_program(
    words: Sequence[str], environ: Mapping[str, str], constants: Mapping[str, Any], *outputs: str
) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    faulthandler.enable(2)

    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    for name, value in constants.items():
        assert hasattr(ttdp, name)
        setattr(ttdp, name, value)

    sys.exit(simulation.main(words))


class Terminal:
    """The program on a terminal of its own; it ends with the context."""

    def __init__(self, words: Sequence[str], *given: Mapping[str, Any]) -> None:
        """Args: given: environment and constants."""
        self.text = ""  # all that was to be seen so far
        self._seen = 0  # the end of what a test has waited for
        self._terminal, self._end = pty.openpty()
        arguments = (os.ttyname(self._end), words, *given)
        self._process = _forks.Process(target=_be_on_terminal, args=arguments, daemon=True)

    def __enter__(self) -> Terminal:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        if self._process.is_alive():
            self._process.kill()
        os.close(self._end)

    def shows(self, text: str) -> str:
        """Wait until a text is to be seen, after the last one; return all between the two."""
        begin = self._seen
        self._wait(lambda: text in self.text[begin:], f"no {text!r}")
        self._seen = self.text.index(text, begin) + len(text)
        return self.text[begin : self._seen]

    def _read(self) -> None:
        while self._terminal >= 0 and select.select([self._terminal], [], [], 0)[0]:
            part = os.read(self._terminal, 65536).decode("utf-8", "replace")
            self.text += part.replace("\r\n", "\n")

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def send(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        """Close the terminal, as a window is closed."""
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1

    def ended(self) -> int:
        """Return its exit status; the text has all that it has printed."""
        self._wait(lambda: self._process.exitcode is not None, "no end")
        self._read()
        return self._process.exitcode or 0

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        """Read what is to be seen until a condition is true."""

        def is_so() -> object:
            self._read()
            return condition()

        wait_until(is_so, lambda: f"{what} after {self.text!r}", PATIENCE)


def _be_on_terminal(terminal: str, *given: Any) -> None:
    os.setsid()  # the first terminal that it opens from now on is its own
    descriptor = os.open(terminal, os.O_RDWR)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    _be_the_program(*given, terminal, terminal)
