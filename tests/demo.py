"""tt-device-plugin at work, without hardware and cluster: `python -m tests.demo [--pyz PATH]`.

The daemon runs as a separate process, from source or from the zipapp, on a simulated node; the
reference kubelet runs in this process. The first step that fails ends the demo with status 1. There
are two stories: single cards, from the first list to reboots; and whole boards and shared cards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.world.kubelet import AdmissionError, Allocation, Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import (
    Installation,
    Kernel,
    Service,
    run,
    within,
    workspace,
)  # fmt: skip

DOMAIN = "tenstorrent.com"
N150, N300, P300 = f"{DOMAIN}/n150", f"{DOMAIN}/n300", f"{DOMAIN}/p300"
RESOURCES = (N150, N300, P300)
GALAXY, TRAY = f"{DOMAIN}/galaxy-wormhole", f"{DOMAIN}/galaxy-wormhole-board"
STEP = 60.0  # seconds for actions that take milliseconds
INTERVAL = 1.0  # seconds between two polls; the default is 5


def ms(seconds: float) -> str:
    return f"{max(seconds, 0) * 1000:.1f} ms"


steps: list[str] = []  # their titles


def say(text: str) -> None:
    print(text, flush=True)


def step(title: str) -> None:
    steps.append(title)
    say(f"\n{len(steps):2}  {title}")


def fact(label: str, *texts: str) -> None:
    """Print a label, and texts in a column of at most 80 characters."""
    for text in texts:
        for line in textwrap.wrap(text, 80, break_on_hyphens=False):
            say(f"      {label:13} {line}")
            label = ""


def block(text: str) -> None:
    say(textwrap.indent(text.rstrip(), "      "))


class Story:
    """A node with a kubelet and a daemon, and the actions of the steps.

    They raise AssertionError, TimeoutError or AdmissionError if the story does not go as planned.
    """

    def __init__(self, home: Path, pyz: Path | None) -> None:
        self.home = home
        self.installation = Installation(home, pyz)
        self.directory = home / "device-plugins"
        self.directory.mkdir()

        self.uevents = home / "uevents"
        self.node = SimulatedNode(home / "node")
        self.kernel = Kernel(self.node, self.uevents)
        # A real one admits existing pods after 0.8 s, in which a busy machine can have done little.
        self.kubelet = Kubelet(self.directory, pods_come=STEP)
        self.configuration = home / "daemon.toml"
        self.daemon = self.new_daemon()

    def new_daemon(self) -> Service:
        place = (self.node, self.directory)
        return self.installation.daemon(*place, interval=INTERVAL, uevents=self.uevents)

    async def play(self) -> None:
        """Play all steps; a violation of the kubelet's API is a failure, too."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.kubelet.stop)
            stack.enter_context(Ticker(self.node, INTERVAL / 4))
            await self.act()
        assert not self.kubelet.violations, self.kubelet.violations

    async def act(self) -> None:
        raise NotImplementedError

    async def list(self) -> str:
        """Return the output of `list`, which reads the daemon's view."""
        command, environ = self.installation.command("list")
        environ["RUNTIME_DIRECTORY"] = str(self.home)

        # The daemon's notifications are read by this process, which must not wait for another one.
        look = partial(subprocess.run, env=environ, capture_output=True, text=True, timeout=STEP)
        try:
            done = await asyncio.to_thread(look, command)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"waited {STEP:g} s for tt-device-plugin list") from None

        assert done.returncode == 0, f"list exits with status {done.returncode}: {done.stderr}"
        return done.stdout

    async def show_status(self, words: str) -> None:
        """Wait for a status with these words, and print it."""
        status = self.short(await self.daemon.status(words))
        fact("status", *status.split("; "))

    def show_capacity(self, expected: Mapping[str, int]) -> None:
        """Print what the kubelet has of these resources, of which this must be the capacity."""
        capacity, allocatable = self.kubelet.capacity(), self.kubelet.allocatable()
        found = {name: capacity[name] for name in expected}
        assert found == expected, f"the capacity is {found}, not {expected}"

        rows = [f"{name:37}  {capacity[name]:8}  {allocatable[name]:11}" for name in expected]
        heading = f"\n{'node status':37}  capacity  allocatable"
        block("\n".join([heading, *rows]))

    def short(self, path: str) -> str:
        """Return a path of the simulated node as it would be on a real one."""
        return path.replace(str(self.node.root), "").replace(str(self.home), "")

    async def admit(self, pod: str, resource: str, number: int = 1) -> Allocation:
        return await self.kubelet.admit(pod, "main", {resource: number})

    async def readmitted(self, begin: float, *pods: str) -> None:
        """Wait until a starting kubelet has admitted these pods again."""

        def names(kind: str) -> set[object]:
            return {event.fields["pod"] for event in self.kubelet.find(kind, since=begin)}

        def are_all_there() -> bool:
            return {*pods} <= names("admitted") | names("rejected")

        await self.kubelet.wait_for(are_all_there, STEP, f"the admission of {', '.join(pods)}")
        assert not names("rejected"), f"the kubelet rejects {names('rejected')}"

    async def wait_for_list(
        self, resource: str, condition: Callable[[], object], begin: float
    ) -> float:
        """Return the seconds from `begin` to the list that makes the condition true."""
        await self.kubelet.wait_for(condition, STEP, f"another list of {resource}")
        return self.kubelet.find("list", resource)[-1].at - begin

    async def start_kubelet(self, *resources: str) -> float:
        """Start the kubelet, wait for these resources; return the seconds until the last list."""
        await self.kubelet.start()
        appeared = self.kubelet.find("started")[-1].at
        for resource in resources:
            await self.kubelet.registered(resource)

        lists = [self.kubelet.find("list", resource, appeared)[0].at for resource in resources]
        return max(lists, default=appeared) - appeared


class Cards(Story):
    """Single cards: lists, pods, packing, faults, hot-plug, restarts, reboots."""

    async def act(self) -> None:
        for card, numa_node in (("n300", 0), ("p300c", 0), ("n300", 1), ("p300c", 1), ("n150", 1)):
            self.node.add(card, numa_node=numa_node)
        self.node.set_hugepages(12)

        async with self.daemon:
            await self.register()
            await self.list_devices()
            await self.one_card()
            await self.failure()
            await self.hot_plug()
            await self.kubelet_restarts()
            await self.stop()

        await self.reboot()

    async def list_devices(self) -> None:
        step("Two n300, two p300c with two chips each, and an n150, on two NUMA nodes")
        text = await self.list()
        assert all(chip.bdf in text for chip in self.node.chips), f"list lacks chips:\n{text}"
        block(f"$ tt-device-plugin list\n{text}")

    async def register(self) -> None:
        step("The daemon starts, then the kubelet")
        fact("ready after", ms(await self.daemon.ready()))
        await self.show_status("waiting for kubelet")
        seconds = await self.start_kubelet(*RESOURCES)
        fact("registered", f"{ms(seconds)} after kubelet.sock appeared")

        await self.show_status("; registered with kubelet")
        self.show_capacity({N150: 1, N300: 2, P300: 4})

    async def one_card(self) -> None:
        step("A pod requests one n300")
        got = await self.admit("training", N300)
        assert len(got.devices) == 1 and got.envs and got.mounts, f"the pod gets {got}"

        [device] = got.devices
        paths = f"{self.short(device.host_path)} as {device.container_path}"
        fact("device", paths, device.permissions)
        fact("environment", *(f"{key}={value}" for key, value in sorted(got.envs.items())))
        mounts = (f"{self.short(each.host_path)} at {each.container_path}" for each in got.mounts)
        fact("mounts", *mounts)

    async def failure(self) -> None:
        """Stop the firmware of the unused n300: only its heartbeat shows it, no event."""
        kubelet = self.kubelet
        step(f"The firmware of the other n300 stops (polled every {INTERVAL:g} s)")
        [free] = kubelet.healthy(N300) - kubelet.allocated(N300)

        begin = time.monotonic()
        self.node.chip(free).freeze()
        seconds = await self.wait_for_list(N300, lambda: free in kubelet.unhealthy(N300), begin)
        capacity, allocatable = kubelet.capacity()[N300], kubelet.allocatable()[N300]
        assert (capacity, allocatable) == (2, 1), f"allocatable: {allocatable} of {capacity}"
        fact("unhealthy", f"{free} after {seconds:.1f} s; {allocatable} of {capacity} is left")
        await self.show_status("heartbeat stalled")

        begin = time.monotonic()
        self.node.chip(free).thaw()
        seconds = await self.wait_for_list(N300, lambda: free in kubelet.healthy(N300), begin)
        fact("healthy", f"{seconds:.1f} s after the firmware runs again")

    async def hot_plug(self) -> None:
        kubelet = self.kubelet
        step("The n150 disappears, and returns with another number")
        [chip] = [chip for chip in self.node.chips if chip.bdf in kubelet.healthy(N150)]
        old = chip.ordinal

        chip.vanish()
        begin = self.kernel.deliver()
        seconds = await self.wait_for_list(N150, lambda: not kubelet.healthy(N150), begin)
        fact("gone", f"/dev/tenstorrent/{old}; unhealthy after {ms(seconds)}")

        chip.come_back(ordinal=11)
        begin = self.kernel.deliver()
        seconds = await self.wait_for_list(N150, lambda: kubelet.healthy(N150), begin)
        fact("back", f"/dev/tenstorrent/11; healthy after {ms(seconds)}")

        paths = [device.container_path for device in (await self.admit("notebook", N150)).devices]
        assert paths == ["/dev/tenstorrent/11"], f"a pod gets {paths}"
        fact("a new pod", f"gets {paths[0]}; the device ID is still {chip.bdf}")

    async def kubelet_restarts(self) -> None:
        kubelet = self.kubelet
        step("The kubelet restarts ten times; each time it deletes all sockets")
        before = {resource: kubelet.allocated(resource) for resource in RESOURCES}

        times = []
        for _ in range(10):
            await kubelet.kill()
            await asyncio.sleep(0.1)
            begin = time.monotonic()
            times.append(await self.start_kubelet(*RESOURCES))

        median, most = ms(statistics.median(times)), ms(max(times))
        fact("registered", f"all three resources after {median} (median), at most {most}")

        held = {resource: kubelet.allocated(resource) for resource in RESOURCES}
        assert held == before, f"pods held {before}, and now {held}"
        await self.readmitted(begin, "training", "notebook")
        fact("pods", "all keep their devices")

    async def stop(self) -> None:
        step("SIGTERM")
        status, seconds = await self.daemon.stop()
        left = [path.name for path in self.directory.glob("tt-*")]
        assert status == 0 and not left, f"exit status {status}, files: {left}"
        fact("exit status", f"{status} after {ms(seconds)}; no socket is left")

    async def reboot(self) -> None:
        """Reboot the node; the kubelet admits its pods again as soon as it has read them."""
        kubelet = self.kubelet
        step("The node reboots; the daemon starts before the kubelet, as its unit orders")
        await kubelet.power_cut()
        async with self.new_daemon() as daemon:
            await daemon.ready()
            begin = time.monotonic()
            seconds = await self.start_kubelet(*RESOURCES)
            fact("registered", f"{ms(seconds)} after kubelet.sock appeared")

            await self.readmitted(begin, "training", "notebook")
            fact("pods", "all are admitted again")
            await daemon.stop(signal.SIGKILL)


class Boards(Story):
    """Neighbours on a Galaxy, whole boards, shared devices, and chips held through a reload."""

    async def act(self) -> None:
        for card in ("galaxy-wormhole", "n300"):
            self.node.add(card)

        async with self.daemon:
            await self.a_tray_of_chips()
            await self.neighbours()
            await self.reload()
            await self.sharing()

    async def a_tray_of_chips(self) -> None:
        step("Another node: a Galaxy of 32 chips, and an n300. A pod requests 8 chips")
        await self.daemon.ready()
        await self.start_kubelet(GALAXY)
        got = await self.admit("train", GALAXY, 8)

        ids = sorted(got.ids[GALAXY])
        trays = {self.node.chip(bdf).telemetry["tt_serial"] for bdf in ids}
        assert len(ids) == 8 and len(trays) == 1, f"the chips {ids} are on the trays {trays}"
        fact("allocated", f"{ids[0]} to {ids[-1]}, which are one tray, {trays.pop()}")

    async def neighbours(self) -> None:
        """On a tray, 1 to 4 are in one row and 5 to 8 opposite; the bus has tray and position."""
        step("A pod requests 4 chips: they are linked to each other")
        got = await self.admit("tune", GALAXY, 4)

        buses = sorted(int(bdf.split(":")[1], 16) for bdf in got.ids[GALAXY])
        trays = {bus & 0xF0 for bus in buses}
        positions = {bus & 0x0F for bus in buses}
        is_square = positions in ({1, 2, 5, 6}, {2, 3, 6, 7}, {3, 4, 7, 8})
        assert len(trays) == 1 and is_square, f"chips {positions} of the trays {trays}"

        row = " ".join(f"[{n}]" if n in positions else f" {n} " for n in range(1, 5))
        opposite = " ".join(f"[{n}]" if n in positions else f" {n} " for n in range(5, 9))
        block(f"of the tray 0x{trays.pop():02x}:  {row.rstrip()}\n{opposite.rstrip():>34}")

    async def reload(self) -> None:
        """Trays with chips that pods hold become other devices, which no other pod may get."""
        kubelet = self.kubelet
        step("systemctl reload: devices are whole boards, and four containers share the n300")
        shared = '[[sharing.resources]]\nname = "n300"\nreplicas = 4\n'
        block(f'unit = "board"\n\n{shared}')
        rest = f'[sharing]\nlock_dir = "{self.home}/locks"\n[health]\ninterval = {INTERVAL}\n'
        self.configuration.write_text(f'unit = "board"\n{rest}{shared}')

        self.daemon.send(signal.SIGHUP)

        def are_listed() -> bool:
            return (len(kubelet.healthy(TRAY)), len(kubelet.healthy(N300))) == (2, 4)

        await kubelet.wait_for(are_listed, STEP, "the lists of two healthy trays and four replicas")
        self.show_capacity({TRAY: 4, N300: 4})
        await self.show_status("held until default/train ends")

        got = await self.admit("serve", TRAY)
        assert len(got.devices) == 8, f"serve gets {len(got.devices)} device files"
        fact("pod serve", f"requests one tray and gets {len(got.devices)} device files")

    async def sharing(self) -> None:
        step("Four pods request the n300")
        got = [await self.admit(f"notebook-{number}", N300) for number in range(1, 5)]

        files = {device.container_path for each in got for device in each.devices}
        locks = {m.host_path for each in got for m in each.mounts if m.container_path == "/dev/shm"}
        assert len(files) == len(locks) == 1, f"they have {files} and the locks {locks}"
        shared = f"{self.short(locks.pop())} at /dev/shm"
        fact("four pods", f"have {files.pop()}, and take turns by locks: {shared}")


async def demo(pyz: Path | None) -> int:
    begin = time.monotonic()
    program = f"the zipapp {pyz.name}" if pyz else "from source"
    say(f"tt-device-plugin, {program} · simulated cards, reference kubelet, no cluster")

    try:
        for story in (Cards, Boards):
            with workspace() as home:
                await within(10 * STEP, "the story hangs", story(home, pyz).play())
    except (AssertionError, TimeoutError, AdmissionError) as error:
        say(f"\nFAILED in step {len(steps)} ({steps[-1]}): {error}")
        return 1

    seconds = time.monotonic() - begin
    say(f"\nSuccess: {len(steps)} steps in {seconds:.0f} s.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--pyz", type=lambda text: Path(text).absolute(), metavar="PATH", help="run this zipapp"
    )
    options = parser.parse_args()
    if options.pyz and not options.pyz.is_file():
        parser.error(f"--pyz: {options.pyz} does not exist")
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return run(demo(options.pyz))


if __name__ == "__main__":
    sys.exit(main())
