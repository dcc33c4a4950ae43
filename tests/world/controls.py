"""What an operator does to a simulated node: writes to sysfs, modprobe, tt-smi.

The files of sysfs that only take commands (bind, unbind, rescan) are FIFOs, which `Controls` reads;
the programs in the directory `bin` below the node's root ask it over a socket. All of them are
recorded in `calls`, in their order. The kernel acts before a write returns; here it follows, see
settle().
"""

from __future__ import annotations

import json
import os
import select
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.world.chip import NOT_KEPT
from tests.world.node import SimulatedNode

PROGRAM = """#!{python} -I
import json, signal, socket, sys
for number in {ignored}:
    signal.signal(number, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as kernel:
    kernel.connect({socket!r})
    kernel.sendall(json.dumps([{name!r}, *sys.argv[1:]]).encode() + b"\\n")
    status, text = json.loads(kernel.makefile().readline() or '[70, "the simulation has ended"]')
print(text, end="")
sys.exit(status)
"""
ATTRIBUTES = ("drivers/tenstorrent/unbind", "drivers/tenstorrent/bind", "rescan")  # in their order


class Controls:
    """The other side of what an operator does: the kernel's and the card's. For `with`."""

    def __init__(self, node: SimulatedNode, directory: Path) -> None:
        """Args: directory: for the socket; its path must be short."""
        self.node = node
        self.path = str(directory / "controls")
        self.before: Callable[[str], object] = lambda call: None  # called with what is to be done
        self.calls: list[str] = []  # "tt-smi -r …", "bind 0000:01:00.0"

        # What comes of it.
        self.finds: set[str] = set()  # addresses of the cards that a rescan finds
        self.version = "6.8.0"  # of tt-smi
        self.status = 0  # of tt-smi -r, and of modprobe, which does nothing then
        self.hangs = False  # tt-smi -r, until it is ended
        self.waiting = 0  # programs that hang at the moment
        self.blocked: set[str] = set()  # attributes at which writers wait
        self._fifos: dict[str, tuple[int, int]] = {}  # inode and descriptor, by attribute
        self._rounds = 0  # of the kernel

    def __enter__(self) -> Controls:
        program = self._program

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                program(self)

        self._server = socketserver.ThreadingUnixStreamServer(self.path, Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self._is_ended = threading.Event()
        self._kernel = threading.Thread(target=self._be_the_kernel, daemon=True)
        self._kernel.start()
        self.install("tt-smi", "modprobe")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ended.set()
        self._kernel.join()
        for opened in self._fifos.values():
            os.close(opened[1])
        self._server.shutdown()
        self._server.server_close()

    def install(self, *names: str, ignored: tuple[int, ...] = ()) -> None:
        """Put programs into the node's `bin`; ignored: signals that do not end them."""
        directory = self.node.root / "bin"
        directory.mkdir(exist_ok=True)
        for name in names:
            file = directory / name
            values = {"python": sys.executable, "socket": self.path, "name": name}
            file.write_text(PROGRAM.format(ignored=tuple(map(int, ignored)), **values))
            file.chmod(0o755)

    def block(self, attribute: str) -> None:
        """Let writers wait until the attribute is no longer in `blocked`."""
        self.blocked.add(attribute)
        self.settle()  # it may be about to be opened
        path = self.node.root / "sys/bus/pci" / attribute
        path.unlink()
        os.mkfifo(path)

    def settle(self) -> None:
        """Wait until all that was written is done."""
        enough = self._rounds + 2  # one may be under way
        while self._rounds < enough and self._kernel.is_alive():
            time.sleep(0.001)

    # What is written to

    def _be_the_kernel(self) -> None:
        """Do what is written to sysfs, until the end."""
        while not self._is_ended.is_set():
            for attribute in ATTRIBUTES:
                if attribute not in self.blocked:
                    self._open(self.node.root / "sys/bus/pci" / attribute, attribute)
            descriptors = [descriptor for _, descriptor in self._fifos.values()]
            ready, _, _ = select.select(descriptors, [], [], 0.01)
            for attribute, (_, descriptor) in self._fifos.items():
                if descriptor in ready:
                    for text in os.read(descriptor, 4096).decode().split():
                        self._write(attribute.rpartition("/")[2], text)
            self._rounds += 1

    def _open(self, path: Path, attribute: str) -> None:
        """Open a FIFO if it is a new one: they come and go with the driver."""
        known, descriptor = self._fifos.get(attribute, (0, -1))
        try:
            if not path.is_fifo() or path.stat().st_ino == known:
                return
            opened = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        if descriptor >= 0:
            os.close(descriptor)
        self._fifos[attribute] = os.fstat(opened).st_ino, opened

    def _write(self, name: str, text: str) -> None:
        self.calls.append(f"{name} {text}")
        self.before(self.calls[-1])
        if name == "rescan":
            for chip in [each for each in self.node.chips if not each.present]:
                if chip.bdf in self.finds:
                    chip.come_back()
            return

        chip = self.node.chip(text)
        override = (chip.directory / "driver_override").read_text().strip()
        chip.pci["driver_override"] = override or NOT_KEPT
        if name == "unbind" and chip.driver == "tenstorrent":
            chip.unbind()
        if name == "bind":
            chip.bind()

    # What is run

    def _program(self, request: socketserver.StreamRequestHandler) -> None:
        """Answer a program, or let it hang."""
        words = json.loads(request.rfile.readline())
        answer: Any = (0, f"{self.version}\n")
        if words[1:] != ["--version"]:
            self.calls.append(" ".join(words))
            self.before(self.calls[-1])
            if self.hangs and words[0] == "tt-smi":
                self.waiting += 1
                request.rfile.read()  # until its end
                self.waiting -= 1
                return
            answer = (self.status, self._run(*words))
        request.wfile.write(json.dumps(answer).encode() + b"\n")

    def _run(self, name: str, *words: str) -> str:
        if name == "tt-smi":
            for chip in self.node.chips:
                if str(chip.ordinal) == words[1].rpartition("/")[2]:
                    chip.frozen = False
                    chip.post_reset()
            return ""
        if self.status:
            return f"modprobe: FATAL: Module {words[0]} not found\n"
        self.node.load_driver()
        return ""
