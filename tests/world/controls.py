"""What an operator does to a simulated node: writes to sysfs, modprobe, tt-smi.

The kernel acts before such a write returns, and can refuse it. A file cannot do that, so
tests.world.simulation sends each write to the socket that `Controls` listens on. The programs in
the directory `bin` beside sysfs do the same. All of them are recorded in `calls`, in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ttdp
from tests.world.node import Chip, SimulatedNode

PROGRAM = """#!{python} -I
import json, os, signal, socket, sys
for number in {ignored}:
    signal.signal(number, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as kernel:
    kernel.connect({socket!r})
    kernel.sendall(json.dumps([[{name!r}, *sys.argv[1:]], dict(os.environ)]).encode() + b"\\n")
    status, text = json.loads(kernel.makefile().readline() or '[70, "the simulation has ended"]')
print(text, end="")
sys.exit(status)
"""
Answer = tuple[int, str]  # a program's status and output; for a write, an errno and ""


def mend(chip: Chip) -> None:
    """Do what a reset does to firmware that has stopped."""
    chip.thaw()
    chip.post_reset()


class Controls:
    """The other side of what an operator does: the kernel's and the card's."""

    def __init__(self, node: SimulatedNode, directory: Path) -> None:
        """Args: directory: for the socket; its path must be short."""
        self.node = node
        self.path = str(directory / "controls")
        self.before: Callable[[str], None] = lambda call: None  # called with what is to be done

        # What was done.
        self.calls: list[str] = []  # "tt-smi -r …", "bind 0000:01:00.0"
        self.environments: list[dict[str, str]] = []  # of the programs

        # What comes of it.
        self.finds: set[str] = set()  # addresses of the cards that a rescan finds
        self.refused: dict[str, str] = {}  # names of errno by name of the attribute
        self.version = "6.8.0"  # of tt-smi
        self.reset: Callable[[Chip], object] = mend
        self.status = 0  # of tt-smi -r
        self.hangs = False  # tt-smi -r, until it is ended
        self.waiting = 0  # programs that hang at the moment

    def install(self, *names: str, ignored: tuple[int, ...] = ()) -> None:
        """Put programs into the node's `bin`; ignored: signals that do not end them."""
        directory = self.node.root / "bin"
        directory.mkdir(exist_ok=True)
        for name in names:
            file = directory / name
            values = {"python": sys.executable, "socket": self.path, "name": name}
            file.write_text(PROGRAM.format(ignored=tuple(map(int, ignored)), **values))
            file.chmod(0o755)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Controls]:
        """Listen while the context lasts."""
        tasks: set[asyncio.Task[Any]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            tasks.add(task := asyncio.current_task())  # type: ignore[arg-type]
            try:
                request = json.loads(await reader.readline())
                if answer := self._answer(*request):
                    writer.write(json.dumps(answer).encode() + b"\n")
                else:
                    self.waiting += 1
                    await reader.read()  # until its end
                    self.waiting -= 1
            finally:
                writer.close()
                tasks.discard(task)

        server = await asyncio.start_unix_server(serve, self.path)
        async with server:
            yield self
            for task in tasks:
                task.cancel()

    def _answer(self, words: list[str], environ: dict[str, str] | None) -> Answer | None:
        """Return what a program or a write gives; None: it hangs."""
        name, *words = words
        if environ is not None:
            self.environments.append(environ)
        if name == "tt-smi" and words == ["--version"]:
            return 0, f"{self.version}\n"

        call = " ".join([name, *words])
        self.calls.append(call)
        self.before(call)
        try:
            answer: Answer | None = getattr(self, f"_{name.replace('-', '_')}")(*words)
            return answer
        except LookupError:
            return errno.ENODEV, ""

    # What is written to

    def _rescan(self, _: str) -> Answer:
        for chip in [*self.node.chips]:
            if chip.bdf in self.finds and not chip.present:
                chip.come_back()
        return self._refusal("rescan")

    def _driver_override(self, text: str, bdf: str) -> Answer:
        self.node.chip(bdf).keep_for(text or "(null)")
        return 0, ""

    def _bind(self, bdf: str) -> Answer:
        chip = self.node.chip(bdf)
        refusal = self._refusal("bind")
        if not refusal[0] and not chip.can_be_bound:
            refusal = (errno.ENODEV, "")
        if not refusal[0]:
            chip.bind()
        return refusal

    def _unbind(self, bdf: str) -> Answer:
        chip = self.node.chip(bdf)
        if chip.driver != "tenstorrent":
            return errno.ENODEV, ""
        chip.unbind()
        return 0, ""

    def _refusal(self, name: str) -> Answer:
        return getattr(errno, self.refused.get(name, ""), 0), ""

    # What is run

    def _modprobe(self, module: str) -> Answer:
        if "modprobe" in self.refused:
            return 1, f"modprobe: FATAL: Module {module} not found\n"
        self.node.load_driver()
        return 0, ""

    def _tt_smi(self, option: str, target: str, *_: str) -> Answer | None:
        if self.hangs:
            return None
        chip = self.node.chip(target.rpartition("/")[2])
        self.reset(chip)
        return self.status, f"{option} {target}: done\n"


@contextlib.contextmanager
def kernel_writes(controls: str | None) -> Iterator[None]:
    """Send what the program writes to sysfs to the Controls at this socket, if there is one."""

    def simulated(path: str, text: str) -> None:
        os.close(os.open(path, os.O_WRONLY))  # it must exist, and may be forbidden
        file = Path(path)
        words = [file.name, text.strip()]
        if file.name == "driver_override":
            words.append(file.parent.name)

        # The kernel acts, and answers, before the write returns.
        with socket.socket(socket.AF_UNIX) as kernel:
            kernel.connect(controls or "")
            kernel.sendall(json.dumps([words, None]).encode() + b"\n")
            number, _ = json.loads(kernel.makefile().readline())
        if number:
            raise OSError(number, os.strerror(number), path)

    with patch.object(ttdp, "write_attribute", simulated) if controls else contextlib.nullcontext():
        yield
