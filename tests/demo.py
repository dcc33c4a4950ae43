"""What the program does better, on simulated nodes: `python -m tests.demo [--pyz PATH]`.

The daemon and its commands are separate processes, from source or from the zipapp. A reference
kubelet for each node runs in this process. Whatever is shown has happened and was checked. The
first check that fails ends the demo with status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pty
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from tests.world.cards import bus_of
from tests.world.controls import Controls
from tests.world.kubelet import AdmissionError, Event, Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import (
    PATIENCE,
    Installation,
    Service,
    run,
    workspace,
)  # fmt: skip

N300, GALAXY = "tenstorrent.com/n300", "tenstorrent.com/galaxy-wormhole"
PLUGIN = "kube-system/plugin"  # a DaemonSet's pod
PODS = ("ml/train-0", "ml/train-1")
NEXT = "ml/train-2"
ADMITS_AFTER = 0.8  # seconds from a real kubelet's start until it admits its existing pods
OFTEN, NEVER = 0.5, 60.0  # seconds between two polls of a daemon; the default is 5
QUESTION = "Do this? [y/N] "
WIDTH = 100
INTRODUCTION = """\
tt-device-plugin lets pods request Tenstorrent cards. It runs on the host, not as a pod.
Here the real program ({}) runs on simulated nodes: cards, cgroups, tt-smi and
kubelet are models. The tests of this repository also use real kubelets and containers."""

Rows = list[tuple[float, str]]  # when, and what has happened

steps: list[str] = []  # their titles


def say(text: str) -> None:
    print(text, flush=True)


def step(title: str) -> None:
    steps.append(title)
    say(f"\n{len(steps):2}  {title}")


def block(text: str) -> None:
    """Print lines below a title. A long one goes on in the next line, but commands stay whole."""
    for line in text.splitlines():
        margin = " " * (4 + len(line) - len(line.lstrip()))
        words = re.sub("(?<=run: ).*", lambda found: found[0].replace(" ", "\xa0"), line.strip())
        for part in textwrap.wrap(
            words, WIDTH, initial_indent=margin, subsequent_indent=f"{margin}    ",
            break_on_hyphens=False, break_long_words=False,
        ):  # fmt: skip
            say(part.replace("\xa0", " "))


def why(text: str) -> None:
    block(f"Why: {text}")


def timeline(begin: float, rows: Rows) -> list[str]:
    """Return rows in their order, with the seconds since the beginning."""
    return [f"{at - begin:.2f} s  {text}" for at, text in sorted(rows)]


def on_terminal(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Run a program on a terminal, and agree; return its status, and all that is to be seen."""
    limited = ["timeout", "--foreground", f"{PATIENCE}", *command]
    terminal, end = pty.openpty()
    with subprocess.Popen(
        limited, env=environ, stdin=end, stdout=end, stderr=end, start_new_session=True
    ) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the program has ended
            while True:
                shown += os.read(terminal, 65536)
                if shown.endswith(QUESTION.encode()):
                    os.write(terminal, b"y\n")
    os.close(terminal)
    return process.returncode, shown.decode(errors="replace").replace("\r\n", "\n")


class Node:
    """A simulated node with a kubelet and, once it has booted, the daemon."""

    def __init__(
        self,
        installation: Installation,
        home: Path,
        *cards: str,
        interval: float = NEVER,
        plugin_is_pod: bool = False,
    ) -> None:
        """Args: interval: seconds between the daemon's polls."""
        self.home = home
        self.machine = SimulatedNode(home / "node", driver="2.10.0")
        for card in cards:
            self.machine.add(card)
        self.daemon: Service | None = None

        # A busy machine can need longer than a real kubelet waits.
        pods_come = ADMITS_AFTER if plugin_is_pod else PATIENCE
        self.kubelet = Kubelet(home / "dp", host=self.machine, pods_come=pods_come)
        if plugin_is_pod:
            self.kubelet.pods.get_or_add(PLUGIN)

        self._installation = installation
        self._interval = interval
        self._plugin_is_pod = plugin_is_pod
        self._processes = contextlib.AsyncExitStack()
        self._booted = 0.0

    async def boot(self, resource: str) -> None:
        """Start kubelet and daemon, and wait until the kubelet has a list of the resource.

        The daemon comes first, as its unit orders, or when the kubelet has started its pod.
        """
        self._booted = time.monotonic()
        if self._plugin_is_pod:
            await self.kubelet.start()
            await self.kubelet.running(PLUGIN, "main")
        place = (self.machine, self.kubelet.directory)
        daemon = self._installation.daemon(*place, interval=self._interval)
        self.daemon = await self._processes.enter_async_context(daemon)
        if not self._plugin_is_pod:
            await daemon.note("READY=1")
            await self.kubelet.start()
        await self.kubelet.registered(resource)

    async def shut_down(self) -> None:
        await self.kubelet.power_cut()
        await self._processes.aclose()

    def events(self, kind: str, *pods: str) -> list[Event]:
        """Return the kubelet's events of a kind since the boot, about these pods or all."""
        found = self.kubelet.find(kind, since=self._booted)
        return [event for event in found if not pods or event.fields["pod"] in pods]

    def boot_log(self) -> list[str]:
        """Return what has happened since the boot, with the seconds since then."""
        rows = [(self.events("started")[0].at, "kubelet starts")]
        rows.append((self.events("list")[0].at, "plugin is registered"))
        if self.daemon and not self._plugin_is_pod:
            rows += [(at, "plugin is ready") for at, _ in self.daemon.notes[:1]]
        for event in [*self.events("running"), *self.events("rejected")]:
            text = f"{event.fields['pod']}  {event.fields.get('reason', 'Running')}"
            rows.append((event.at, text))
        return timeline(self._booted, rows)

    def device_of(self, pod: str) -> str:
        """Return the ID of the only device that a pod has."""
        [[ident]] = self.kubelet.allocation(pod, "main").ids.values()
        return ident

    async def show_allocatable(self, number: int) -> None:
        """Wait until the kubelet has so many healthy n300, and print that."""
        what = f"{number} allocatable n300"
        await self.kubelet.wait_for(lambda: self.kubelet.allocatable()[N300] == number, what=what)
        block(f"node status: {number} of {self.kubelet.capacity()[N300]} {N300} allocatable")

    async def show_command(self, *words: str) -> str:
        """Run a command on a terminal, print all that it shows, and answer its question."""
        command, environ = self._installation.command(*words)
        environ["RUNTIME_DIRECTORY"] = str(self.home)
        status, text = await asyncio.to_thread(on_terminal, command, environ)
        text = text.replace(str(self.machine.root), "")  # paths as on a real node
        block(f"root# tt-device-plugin {' '.join(words)}\n{text}")
        assert status == 0, f"its status is {status}"
        return text


# -- the steps -------------------------------------------------------------------------------------


async def both_reboot(late: Node, ours: Node) -> None:
    """On one node the kubelet starts the daemon as a pod, on the other one it is a service."""
    step("Two nodes reboot. Each has two cards, and two pods that use them.")
    both = (late, ours)
    await asyncio.gather(*(node.boot(N300) for node in both))
    for node in both:
        for pod in PODS:
            await node.kubelet.run_pod(pod, N300)
    devices = [ours.device_of(pod) for pod in PODS]

    await asyncio.gather(*(node.shut_down() for node in both))
    await asyncio.gather(*(node.boot(N300) for node in both))
    for pod in PODS:
        await ours.kubelet.running(pod, "main")

    rejections = late.events("rejected", *PODS)
    reasons = [event.fields["reason"] for event in rejections]
    assert reasons == ["UnexpectedAdmissionError"] * len(PODS), late.boot_log()
    assert [ours.device_of(pod) for pod in PODS] == devices, "the pods have other chips now"

    left = ["this plugin as a pod, of a DaemonSet:", *late.boot_log()]
    right = ["this plugin as a service of the host:", *ours.boot_log()]
    for pair in zip_longest(left, right, fillvalue=""):
        block("{:48}{}".format(*pair))
    block(f"{PODS[0]} on the left: {rejections[0].fields['message']}")
    why(
        "a kubelet admits its pods within a second of its start (here at once if the plugin is "
        "there). A plugin in a pod cannot start before that, so it is too late at each reboot."
    )


async def a_chip_stops(node: Node) -> None:
    user = PODS[1]
    chip = node.machine.chip(node.device_of(user))
    step("The firmware of a card stops. The kernel reports nothing, the device file is as before.")
    chip.freeze()
    await node.show_allocatable(1)
    text = await node.show_command("list")
    assert re.search(rf"\s{chip.bdf} .* STALLED +{user}\n", text), "list does not name the chip"

    # As an operator does: the command that the list names.
    [words] = re.findall("run: tt-device-plugin (.*)", text)
    with Controls(node.machine, node.home) as controls:
        text = await node.show_command(*words.split())
    assert text.count(QUESTION) == 1, "it does not ask once"
    assert controls.calls == [f"tt-smi -r /dev/tenstorrent/{chip.ordinal} --no_reinit"]
    await node.show_allocatable(2)
    why("no new pod gets a bad chip. One command mends it, asks first, and names who is affected.")


async def a_pod_is_deleted_by_force(node: Node) -> None:
    """Its last process is a real one, which ends a second after its stdin."""
    kubelet, old, daemon = node.kubelet, PODS[1], node.daemon
    assert daemon
    device = node.device_of(old)
    script = ["sh", "-c", "read line; exec sleep 1"]
    process = await asyncio.create_subprocess_exec(*script, stdin=asyncio.subprocess.PIPE)
    step(f"{old} is deleted by force. Its process {process.pid} ends a second later.")

    def waits() -> Rows:
        return [(at, line) for at, line in daemon.lines if f"waits: {old} must end" in line]

    kubelet.force_delete(old)
    await kubelet.admit(NEXT, "main", {N300: 1})
    assert node.device_of(NEXT) == device, f"{NEXT} has {node.device_of(NEXT)}, not {device}"
    at, line = (await daemon.wait_for(waits, f"the start of {NEXT} does not wait"))[0]

    await process.communicate(b"\n")
    ended = time.monotonic()
    assert not node.events("running", NEXT), f"{NEXT} runs beside {old}"
    kubelet.end(old)
    await kubelet.running(NEXT, "main")

    [admitted], [running] = node.events("admitted", NEXT), node.events("running", NEXT)
    rows = [
        (admitted.at, f"kubelet: {NEXT} is admitted, and gets the chip of {old}, {device}"),
        (at, f"tt-device-plugin: {line.partition('INFO')[2].strip()}"),
        (ended, f"process {process.pid} has ended"),
        (running.at, f"kubelet: {NEXT} runs"),
    ]
    block("\n".join(timeline(admitted.at, rows)))
    why("a kubelet gives a deleted pod's chip away at once. Here the next pod waits for its turn.")


async def neighbours(node: Node) -> None:
    """On a tray, 1 to 4 are in one row and 5 to 8 opposite; the bus has tray and position."""
    step(
        "A Galaxy has four trays of 8 linked chips. One pod requests 2 (n), and another one 4 [n]."
    )
    await node.boot(GALAXY)
    first = await node.kubelet.run_pod("ml/eval", GALAXY, 2)
    second = await node.kubelet.run_pod("ml/tune", GALAXY, 4)

    marks = {bus_of(bdf): "({})" for bdf in first.ids[GALAXY]}
    marks |= {bus_of(bdf): "[{}]" for bdf in second.ids[GALAXY]}
    square = {bus & 0x0F for bus, mark in marks.items() if mark == "[{}]"}
    assert square in ({1, 2, 5, 6}, {2, 3, 6, 7}, {3, 4, 7, 8}), f"chips {square} of a tray"
    assert len(marks) == 6 and len({bus >> 4 for bus in marks}) == 1, f"buses {sorted(marks)}"

    trays = sorted({bus_of(chip.bdf) & 0xF0 for chip in node.machine.chips})
    block("".join(f"{f'tray 0x{tray:02x}':22}" for tray in trays))
    for positions in (range(1, 5), range(5, 9)):
        rows = [[marks.get(tray | n, " {} ").format(n) for n in positions] for tray in trays]
        block("".join(f"{' '.join(cells):22}" for cells in rows))
    block(f"in the second pod: TT_VISIBLE_DEVICES={second.envs['TT_VISIBLE_DEVICES']}")
    why("each pod has linked neighbours, and three trays stay whole. A kubelet alone takes any.")


async def play(late: Node, ours: Node, galaxy: Node) -> None:
    """Play all steps. It is a failure, too, if a plugin or pod breaks a rule of the kubelet."""
    with Ticker(ours.machine):
        await both_reboot(late, ours)
        await a_chip_stops(ours)
        await a_pod_is_deleted_by_force(ours)
    await neighbours(galaxy)
    for node in (late, ours, galaxy):
        assert not node.kubelet.violations, node.kubelet.violations


async def demo(pyz: Path | None) -> int:
    began = time.monotonic()
    say(INTRODUCTION.format(pyz.name if pyz else "ttdp.py"))
    with workspace() as home:
        installation = Installation(home, pyz)
        nodes = (
            Node(installation, home / "late", "n300", "n300", plugin_is_pod=True),
            Node(installation, home / "ours", "n300", "n300", interval=OFTEN),
            Node(installation, home / "galaxy", "galaxy-wormhole"),
        )
        try:
            await asyncio.wait_for(play(*nodes), 10 * PATIENCE)
        except (AssertionError, asyncio.TimeoutError, AdmissionError, OSError) as error:
            say(f"\nFAILED in step {len(steps)} ({''.join(steps[-1:])}): {error}")
            for node in nodes:
                if node.daemon:
                    say(f"The daemon on the node {node.home.name!r}:{node.daemon.latest()}")
            return 1
        finally:
            await asyncio.gather(*(node.shut_down() for node in nodes))

    say(f"\nAll of this was checked, in {time.monotonic() - began:.0f} s. To install it: README.md")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo")
    parser.add_argument("--pyz", type=Path, metavar="PATH", help="run this zipapp")
    pyz: Path | None = parser.parse_args().pyz
    if pyz and not pyz.is_file():
        parser.error(f"--pyz: {pyz} does not exist")
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return run(demo(pyz and pyz.absolute()))


if __name__ == "__main__":
    sys.exit(main())
