"""The program as a process on a simulated node, and all that it prints: for tests of commands."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import json
import multiprocessing
import os
import pty
import re
import signal
import socket
import struct
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ttdp
from tests.world import simulation
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import PATIENCE, ROOT, environment, finished, outlet_flags, until
from tests.world.simulation import RunningDaemon, StartDaemon

PROGRAM = [sys.executable, str(ROOT / "ttdp.py")]

# Root may write everywhere; without this capability it may not.
AS_OTHERS = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]

# Constants of the program under test. On a busy machine, chips and services that answer at once can
# seem not to: a process that does not run counts the time, too. Tests of what does not answer have
# other constants.
UNHURRIED = dict.fromkeys(("READ_TIMEOUT", "NAMES_TIMEOUT", "VIEW_TIMEOUT"), PATIENCE)

# Its children are the program within milliseconds: importing gRPC takes most of what it does.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.commands"])


@dataclass
class Answer:
    """What one run of the program gave."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The objects of `list --json`."""
        rows: list[dict[str, Any]] = json.loads(self.out)
        return rows

    @property
    def table(self) -> list[dict[str, str]]:
        """The rows of `list` by its columns, which are separated by two spaces."""
        _, header, *lines = self.out.splitlines()
        titles = re.split(r"  +", header)
        rows = [re.split(r"  +", line) for line in lines]
        return [dict(zip(titles, row, strict=True)) for row in rows if len(row) == len(titles)]

    @property
    def below(self) -> str:
        """The text below the table, unwrapped."""
        text = "\n".join(self.out.splitlines()[2 + len(self.table) :])
        return re.sub(r"\n +", " ", text)

    @property
    def findings(self) -> list[tuple[str, str, str]]:
        """The lines of `check`, unwrapped: level, subject and text."""
        lines = re.sub(r"\n +", " ", self.out).splitlines()
        form = r"(ok|warn|FAIL) +(\S+(?: \S+)*)  +(\S.*)"  # a subject can be of two words
        found = [re.fullmatch(form, line) for line in lines]
        assert all(found), self.out + self.err
        return [(line[1], line[2], line[3]) for line in found if line]

    @property
    def complaints(self) -> list[tuple[str, str, str]]:
        """Those of them that are not ok, except that no daemon runs."""
        findings = [finding for finding in self.findings if finding[0] != "ok"]
        return [finding for finding in findings if not finding[2].startswith("is not running")]


@dataclass
class Host:
    """A simulated node on which an operator types commands; its directories are below `root`."""

    root: Path
    node: SimulatedNode
    environ: dict[str, str] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)  # of the program: beside UNHURRIED

    @property
    def plugins(self) -> Path:
        return self.root / "dp"

    @property
    def cdi_file(self) -> Path:
        return self.root / "cdi/tenstorrent.com-device.json"

    @property
    def flags(self) -> list[str]:
        """The options that make the program look at this host and at nothing else."""
        plugins = f"--device-plugin-dir={self.plugins}"
        return [*self.node.flags, plugins, *outlet_flags(self.root)]

    def configure(self, *lines: str) -> Path:
        """Return a configuration file with these lines."""
        file = self.root / "config.toml"
        file.write_text("\n".join(lines))
        return file

    def run(self, *words: str, **environ: str) -> Answer:
        """Run the program to its end, in a process that has imported it already.

        Attributes can fail. Without RUNTIME_DIRECTORY, the service's is `root`, not the machine's.
        """
        given = environment() | self.environ | environ
        where = str(self.root)
        return forked([*words, *self.flags], given, runtime_directory=where, **self.constants)

    def on_terminal(self, *words: str, columns: int = 110) -> Terminal:
        """Return the program on a terminal, for `async with`; as run() runs it."""
        constants = {**UNHURRIED, **self.constants, "RUNTIME_DIR": str(self.root)}
        given = environment() | self.environ
        return Terminal([*words, *self.flags], given, constants, columns)

    async def ask(self, *words: str, **environ: str) -> Answer:
        return await asyncio.to_thread(self.run, *words, **environ)

    def run_as_process(self, *words: str, as_other: bool = False, **environ: str) -> Answer:
        """Run the program as it is installed. as_other: without root's right to look everywhere."""
        command = [*(AS_OTHERS if as_other else []), *PROGRAM, *words, *self.flags]
        ended = finished(command, {**self.environ, **environ})
        return Answer(ended.returncode, ended.stdout, ended.stderr)


@dataclass(kw_only=True)
class Served(Host):
    """A host with a kubelet and, after serve(), a daemon."""

    kubelet: Kubelet
    start: StartDaemon
    daemon: RunningDaemon = field(init=False)

    async def serve(self, resource: str = "", **settings: Any) -> RunningDaemon:
        """Start the daemon, and wait until it is ready and has registered this resource."""
        self.daemon = await self.start(runtime_dir=str(self.root), **settings)
        await self.daemon.ready()
        if resource:
            await self.kubelet.registered(resource)
        return self.daemon


def forked(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    runtime_directory: str = "/nowhere",
    **constants: Any,
) -> Answer:
    """Run the program to its end, in a process that has imported it already.

    runtime_directory: of the service, where commands look without a variable; constants: of the
    program, beside UNHURRIED.
    """
    constants = {**UNHURRIED, **constants, "RUNTIME_DIR": runtime_directory}
    with tempfile.TemporaryDirectory() as home:
        outputs = [f"{home}/{name}" for name in "oe"]
        arguments = (words, environ, constants, *outputs)
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
    faulthandler.enable(2)

    os.environ.clear()
    os.environ.update(environ)
    for name, value in constants.items():
        assert hasattr(ttdp, name)
        setattr(ttdp, name, value)

    sys.exit(simulation.main(words))


def view_of(decision: ttdp.Decision, since: float | None = None) -> dict[str, Any]:
    """Return the view of a node without a daemon, whose faults began at this Unix time."""
    states = {bdf: ttdp.ChipState(chip, since=since) for bdf, chip in decision.chips.items()}
    view = ttdp.view_of_node(decision, states, None, knows_pods=True, unreadable=(), booted_at=0.0)
    found: dict[str, Any] = json.loads(json.dumps(view))
    return found


class Terminal:
    """The program on a terminal of its own; it ends with the context."""

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        constants: Mapping[str, Any],
        columns: int,
    ) -> None:
        self.text = ""  # all that was to be seen so far
        self._seen = 0  # the end of what a test has waited for

        self._terminal, self._end = pty.openpty()
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, size)

        arguments = (os.ttyname(self._end), words, environ, constants)
        self._process = _forks.Process(target=_be_on_terminal, args=arguments, daemon=True)

    async def __aenter__(self) -> Terminal:
        self._process.start()
        os.set_blocking(self._terminal, False)
        asyncio.get_running_loop().add_reader(self._terminal, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        if self._process.is_alive():
            self._process.kill()
        os.close(self._end)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            self.text += os.read(self._terminal, 65536).decode().replace("\r\n", "\n")

    async def shows(self, text: str) -> str:
        """Wait until a text is to be seen, after the last one; return all between the two."""
        begin = self._seen

        def found() -> bool:
            return text in self.text[begin:]

        await until(found, f"no {text!r} in {self.text[begin:]!r} of {self.text!r}")
        self._seen = self.text.index(text, begin) + len(text)
        return self.text[begin : self._seen]

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def send(self, number: int) -> None:
        os.kill(self._process.pid or 0, number)

    def close(self) -> None:
        """Close the terminal, as a window is closed."""
        if self._terminal >= 0:
            asyncio.get_running_loop().remove_reader(self._terminal)
            os.close(self._terminal)
            self._terminal = -1

    async def ended(self) -> int:
        """Return its exit status."""
        await until(lambda: self._process.exitcode is not None, "its end")
        if self._terminal >= 0:
            self._read()
        return self._process.exitcode or 0


def _be_on_terminal(
    terminal: str, words: Sequence[str], environ: Mapping[str, str], constants: Mapping[str, Any]
) -> None:
    os.setsid()  # the first terminal that it opens from now on is its own
    descriptor = os.open(terminal, os.O_RDWR)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    _be_the_program(words, environ, constants, terminal, terminal)


@contextlib.contextmanager
def host_with(root: Path, *cards: str, driver: str = "2.10.1-pre") -> Iterator[Host]:
    """Give a host with these cards behind an IOMMU, and a kubelet: nothing is wrong with it."""
    (root / "node").mkdir()
    node = SimulatedNode(root / "node", driver=driver)
    for card in cards:
        for chip in node.add(card):
            node.set_iommu(chip.bdf)

    host = Host(root, node)
    host.plugins.mkdir(mode=0o750)
    with socket.socket(socket.AF_UNIX) as kubelet:
        kubelet.bind(str(host.plugins / "kubelet.sock"))
        kubelet.listen()
        yield host
