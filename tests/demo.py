"""tt-device-plugin at work, on a machine with no hardware and no cluster: `python -m tests.demo
[--pyz PATH]`.

The daemon runs as a process of its own, from source or from the zipapp, on a simulated node; the
reference kubelet runs in this one. Every step shows what happened, and the first that does not
happen ends the demo with exit status 1.

There are two stories: single cards, from the first list to reboots; and whole boards, shared cards,
and who else reads.
"""

from __future__ import annotations

import os

# Read when grpc is imported: its core writes to stderr otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.world.kubelet import AdmissionError, Allocation, Event, Kubelet
from tests.world.node import Chip, SimulatedNode, Ticker
from tests.world.processes import (
    Broken,
    Installation,
    Kernel,
    Service,
    outlet_flags,
    run,
    within,
    workspace,
)

DOMAIN = "tenstorrent.com"
N150, N300, P300 = f"{DOMAIN}/n150", f"{DOMAIN}/n300", f"{DOMAIN}/p300"
RESOURCES = (N150, N300, P300)
GALAXY, TRAY, PAIR = (
    f"{DOMAIN}/galaxy-wormhole",
    f"{DOMAIN}/galaxy-wormhole-board",
    f"{DOMAIN}/p300-board",
)
SURVIVORS = ("training", "single")  # pods that the reboots are about
PODS_COME = 0.8  # seconds after kubelet.sock at which pods come, measured with the real kubelet
PATIENCE = 900.0  # seconds for a story: only what hangs takes so long
STEP = 60.0  # seconds for what the daemon does within milliseconds
INTERVAL = 1.0  # seconds between two polls, so that nobody has to wait; the default is 5


def milliseconds(seconds: float) -> str:
    return f"{max(seconds, 0) * 1000:.1f} ms"


class Stage:
    """Where the demo is shown: numbered steps, aligned lines, colour on a terminal."""

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self.steps = 0
        self._colour = (
            sys.stdout.isatty()
            and "NO_COLOR" not in os.environ
            and os.environ.get("TERM") != "dumb"
        )

    def paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def step(self, title: str) -> None:
        self.steps += 1
        self.say(f"\n{self.paint('1;36', f'{self.steps:2}')}  {self.paint('1', title)}")

    def fact(self, label: str, *texts: str) -> None:
        """A label and what is to be said about it, in a column that leaves the whole within 100."""
        first, *more = (
            line for text in texts for line in textwrap.wrap(text, 80, break_on_hyphens=False)
        )
        self.say(f"      {self.paint('2', label.ljust(13))} {first}")
        for line in more:
            self.say(" " * 20 + line)

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Lines in columns, the first of which is the heading."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for index, row in enumerate(rows):
            text = "  ".join(map(str.ljust, row, widths)).rstrip()
            self.say(f"      {self.paint('2', text) if index == 0 else text}")

    def block(self, text: str) -> None:
        self.say(textwrap.indent(text.rstrip(), "      "))

    def noise(self, who: str, text: str) -> None:
        if self.verbose:
            self.say(self.paint("2", f"      {who}: {text}"))

    def good(self, text: str) -> str:
        return self.paint("32", text)

    def bad(self, text: str) -> str:
        return self.paint("31", text)


def check(condition: object, otherwise: str) -> None:
    if not condition:
        raise Broken(otherwise)


@contextlib.contextmanager
def expected(what: str) -> Iterator[None]:
    """What happens inside is a part of the demo: if it does not, this is what is said."""
    try:
        yield
    except (TimeoutError, AdmissionError) as error:
        raise Broken(f"{what}: {error}") from None


class Story:
    """A node with a kubelet and a daemon, and what the steps need."""

    def __init__(self, stage: Stage, home: Path, pyz: Path | None) -> None:
        self.stage = stage
        self.home = home
        self.installation = Installation(home, pyz)
        self.directory = home / "device-plugins"
        self.directory.mkdir()
        self.uevents = home / "uevents"
        self.node = SimulatedNode(home / "node")
        self.kernel = Kernel(self.node, self.uevents)
        self.kubelet = Kubelet(self.directory, on_event=self._kubelet_event)
        self.configuration = home / "daemon.toml"
        self.objections: list[str] = []  # of the kubelet
        self.daemon = self._new_daemon()

    def _new_daemon(self) -> Service:
        daemon = self.installation.daemon(
            self.node, self.directory, interval=INTERVAL, uevents=self.uevents
        )
        daemon.on_line = lambda line: self.stage.noise("daemon", line)
        return daemon

    def _kubelet_event(self, event: Event) -> None:
        self.stage.noise("kubelet", event.line())
        if event.kind == "violation":
            self.objections.append(f"{event.fields['text']} (in step {self.stage.steps})")

    async def play(self) -> None:
        """From the cards on; what the kubelet had to object to is a failure, too."""
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self.kubelet.stop)
            stack.enter_context(Ticker(self.node, INTERVAL / 4))
            await self.steps()
        check(not self.objections, f"the kubelet had to object: {self.objections[:1]}")

    async def steps(self) -> None:
        raise NotImplementedError

    async def list_text(self, *more: str) -> str:
        """What `list` shows; the daemon's configuration holds for it, too, and the kubelet here
        answers it.
        """
        flags = [f"--config-file={self.configuration}", f"--device-plugin-dir={self.directory}"]
        flags += [*self.node.flags, *outlet_flags(self.home), *more]
        command, environ = self.installation.command("list", *flags)
        listed = await asyncio.to_thread(
            subprocess.run, command, env=environ, capture_output=True, text=True, timeout=30
        )
        check(
            listed.returncode == 0, f"list ended with status {listed.returncode}: {listed.stderr}"
        )
        return listed.stdout

    async def _show_status(self, words: str) -> None:
        """What `systemctl status` would show, as soon as it says this."""
        self.stage.fact("status", *(await self.daemon.status(words)).split("; "))

    def _short(self, text: str) -> str:
        """Without the root of the simulated node, as it would be on a real one."""
        return text.replace(str(self.node.root), "")

    async def _log(self, pattern: str, since: float = 0.0) -> list[str]:
        """The daemon's lines of interest, without the time, as soon as there are some."""

        def found() -> list[str]:
            lines = (
                re.sub(r"^\S+ \S+ +[A-Z]+ +", "", line)
                for at, line in list(self.daemon.lines)
                if at >= since
            )
            return [self._short(line) for line in lines if re.search(pattern, line)]

        return await self.daemon.wait_for(found, f"the daemon's log has no line like {pattern!r}")

    def _chip(self, bdf: str) -> Chip:
        return self.node.chip(bdf)

    async def _admit(self, pod: str, request: dict[str, int]) -> Allocation:
        with expected(f"the pod {pod} is not admitted"):
            return await self.kubelet.admit(pod, "main", request)

    async def _listed(self, resource: str, condition: Callable[[], object], begin: float) -> float:
        """Seconds from `begin` until the list that made the condition true."""
        with expected("the kubelet does not hear of it"):
            await self.kubelet.wait_for(condition, STEP)
        return self.kubelet.find("list", resource)[-1].at - begin

    async def _kubelet_starts(self) -> float:
        await self.kubelet.start()
        return self.kubelet.find("started")[-1].at


class Cards(Story):
    """Single cards: lists, pods, neighbours, faults, hot-plug, restarts, reboots."""

    async def steps(self) -> None:
        self.plug_cards()
        await self.list_devices()
        async with self.daemon:
            await self.start()
            await self.register()
            await self.one_card()
            await self.one_board()
            await self.failure()
            await self.hot_plug()
            await self.kubelet_restarts()
            await self.end()
        await self.reboot()
        await self.reboot_with_a_late_daemon()

    # -- the cards ---------------------------------------------------------------------------------

    def plug_cards(self) -> None:
        for card, numa_node in (("n300", 0), ("p300c", 0), ("n300", 1), ("p300c", 1), ("n150", 1)):
            self.node.add(card, numa_node=numa_node)
        self.node.set_hugepages(12)

    async def list_devices(self) -> None:
        """The program's own table."""
        stage = self.stage
        stage.step("Two n300, two p300c with two chips each, and an n150, on two NUMA nodes")
        text = await self.list_text()
        check(len(text.splitlines()) == 8, f"list shows something else than 7 chips:\n{text}")
        check("UNHEALTHY" not in text, f"list shows a chip that is not healthy:\n{text}")
        stage.say(f"      {stage.paint('2', '$ tt-device-plugin list')}")
        stage.block(text)

    # -- the daemon and the kubelet ----------------------------------------------------------------

    async def start(self) -> None:
        """Up before the kubelet, as at boot."""
        stage = self.stage
        stage.step("The daemon starts; there is no kubelet yet")
        stage.fact("ready after", milliseconds(await self.daemon.ready()))
        stage.fact("log", *await self._log("driver"))
        await self._show_status("waiting for kubelet")

    async def register(self) -> None:
        stage = self.stage
        stage.step("The kubelet starts")
        appeared = await self._kubelet_starts()
        await self._registered()
        for resource in RESOURCES:
            seconds = self.kubelet.find("list", resource, appeared)[0].at - appeared
            stage.fact(
                "registered", f"{resource}, {milliseconds(seconds)} after kubelet.sock appeared"
            )
        await self._show_status("; registered with kubelet")
        stage.say()
        capacity, allocatable = self.kubelet.capacity(), self.kubelet.allocatable()
        check(
            capacity == allocatable == {N150: 1, N300: 2, P300: 4},
            f"capacity is {capacity}, not 1, 2 and 4",
        )
        rows = [["node status", "capacity", "allocatable"]]
        stage.rows(
            rows + [[name, str(capacity[name]), str(allocatable[name])] for name in RESOURCES]
        )

    async def _registered(self) -> None:
        with expected("the daemon does not register"):
            for resource in RESOURCES:
                await self.kubelet.registered(resource, STEP)

    # -- the pods ----------------------------------------------------------------------------------

    async def one_card(self) -> None:
        stage = self.stage
        stage.step("A pod asks for one n300")
        got = await self._admit("training", {N300: 1})
        check(len(got.devices) == 1 and got.envs and got.mounts, f"the pod has got {got}")
        for device in got.devices:
            stage.fact(
                "device",
                f"{self._short(device.host_path)} as {device.container_path}",
                device.permissions,
            )
        stage.fact("environment", *(f"{key}={value}" for key, value in sorted(got.envs.items())))
        stage.fact(
            "mounts",
            *(f"{self._short(mount.host_path)} at {mount.container_path}" for mount in got.mounts),
        )

    async def one_board(self) -> None:
        """One chip is taken first, so that there is a wrong answer."""
        stage = self.stage
        stage.step("One pod asks for one p300 chip, the next one for two")
        got = [await self._admit("single", {P300: 1}), await self._admit("pair", {P300: 2})]
        boards = [
            {self._chip(bdf).facts.telemetry["tt_serial"] for bdf in allocation.ids[P300]}
            for allocation in got
        ]
        for pod, allocation in zip(("single", "pair"), got, strict=True):
            for bdf in sorted(allocation.ids[P300]):
                stage.fact(pod, f"{bdf}  board {self._chip(bdf).facts.telemetry['tt_serial']}")
        check(len(boards[1]) == 1, f"the pair lies on the boards {boards[1]}")
        check(not boards[0] & boards[1], "the pair has a chip of the board that was broken into")
        stage.fact(
            "so",
            "the pair got the two chips of one board; the board that was broken into has one left",
        )

    # -- what happens ------------------------------------------------------------------------------

    async def failure(self) -> None:
        """The firmware of the n300 that nobody has stops: no event tells of that, only its
        heartbeat.
        """
        stage, kubelet = self.stage, self.kubelet
        stage.step(
            f"The firmware of the other n300 stops (polled every {INTERVAL:g} s; by default 5 s)"
        )
        free = next(iter(kubelet.healthy(N300) - kubelet.allocated(N300)))
        chip, begin = self._chip(free), time.monotonic()
        chip.freeze()
        seconds = await self._listed(N300, lambda: free in kubelet.unhealthy(N300), begin)
        capacity, allocatable = kubelet.capacity()[N300], kubelet.allocatable()[N300]
        check(
            (capacity, allocatable) == (2, 1), f"capacity is {capacity}, allocatable {allocatable}"
        )
        stage.fact(
            "unhealthy",
            f"{free} after {seconds:.1f} s; {N300}: capacity {capacity}, allocatable {allocatable}",
        )
        stage.fact("why", *await self._log("unhealthy", begin))
        try:
            await kubelet.admit("unlucky", "main", {N300: 1})
        except AdmissionError as error:
            stage.fact("a new pod", stage.bad(error.reason), error.message)
        else:
            raise Broken("a pod got a chip that is not healthy")
        begin = time.monotonic()
        chip.thaw()
        seconds = await self._listed(N300, lambda: free in kubelet.healthy(N300), begin)
        stage.fact(
            "healthy",
            f"{seconds:.1f} s after its heart beats again",
            f"allocatable {kubelet.allocatable()[N300]}",
        )

    async def hot_plug(self) -> None:
        stage, kubelet = self.stage, self.kubelet
        chip = next(
            chip for chip in self.node.chips if chip.facts.telemetry["tt_card_type"] == "n150"
        )
        old = chip.ordinal
        stage.step("The n150 is unplugged, and comes back under another number")
        chip.vanish()
        seconds = await self._listed(
            N150, lambda: chip.bdf in kubelet.unhealthy(N150), self.kernel.deliver()
        )
        stage.fact(
            "gone", f"/dev/tenstorrent/{old}; unhealthy in the list after {milliseconds(seconds)}"
        )
        chip.come_back(ordinal=11)
        seconds = await self._listed(
            N150, lambda: chip.bdf in kubelet.healthy(N150), self.kernel.deliver()
        )
        stage.fact(
            "back",
            f"/dev/tenstorrent/11; healthy in the kubelet's list after {milliseconds(seconds)}",
        )
        got = await self._admit("notebook", {N150: 1})
        paths = [device.container_path for device in got.devices]
        check(paths == ["/dev/tenstorrent/11"], f"a pod gets {paths}")
        stage.fact("a new pod", f"has {paths[0]}; the device is still called {chip.bdf}")

    async def kubelet_restarts(self) -> None:
        stage, kubelet, number = self.stage, self.kubelet, 10
        stage.step(
            f"The kubelet is restarted {number} times; each time it deletes everybody's socket"
        )
        before = {resource: kubelet.allocated(resource) for resource in RESOURCES}
        times = []
        for _ in range(number):
            await kubelet.kill()
            await asyncio.sleep(0.1)
            appeared = await self._kubelet_starts()
            await self._registered()
            times.append(self._latest_list(appeared))
        median, most = milliseconds(statistics.median(times)), milliseconds(max(times))
        stage.fact("registered", f"all three resources after {median} (median), at most {most}")
        held = {resource: kubelet.allocated(resource) for resource in RESOURCES}
        check(
            held == before and sum(map(len, held.values())) == 5,
            f"the pods held {before}, and now {held}",
        )
        counts = (f"{len(held[name])} × {name}" for name in RESOURCES)
        stage.fact("pods", "hold their devices as before:", *counts)
        with expected("a running pod is not admitted again"):
            for pod in ("training", "single", "pair", "notebook"):
                await kubelet.readmit(pod, running=True)

    # -- the end -----------------------------------------------------------------------------------

    async def end(self) -> None:
        stage = self.stage
        stage.step("SIGTERM")
        status, seconds = await self.daemon.stop()
        left = [path.name for path in self.directory.glob("tt-*")]
        check(status == 0, f"exit status {status}")
        check(not left, f"it left {', '.join(left)}")
        stage.fact("exit status", f"{status} after {milliseconds(seconds)}; no socket is left")

    async def reboot(self) -> None:
        """The kubelet admits the pods that it had as soon as it has found them: their devices have
        to be there.
        """
        stage, kubelet = self.stage, self.kubelet
        stage.step("The node reboots; the daemon starts before the kubelet, as its unit is ordered")
        await kubelet.kill()
        async with self._new_daemon() as daemon:
            await daemon.ready()
            appeared = await self._kubelet_starts()
            await self._registered()
            stage.fact(
                "registered",
                f"{milliseconds(self._latest_list(appeared))} after kubelet.sock appeared",
            )
            await self._until(appeared + PODS_COME)
            for pod in SURVIVORS:
                with expected(f"the pod {pod} does not survive the reboot"):
                    await kubelet.readmit(pod)
                stage.fact(f"pod {pod}", stage.good("admitted"))
            await daemon.stop(signal.SIGKILL)

    async def reboot_with_a_late_daemon(self) -> None:
        """The same pods, and a daemon that comes after them, as one that is a pod itself."""
        stage, kubelet = self.stage, self.kubelet
        stage.step(
            "It reboots again; this time the daemon starts after the kubelet, as a pod would"
        )
        await kubelet.kill()
        appeared = await self._kubelet_starts()
        await self._until(appeared + PODS_COME)
        for pod in SURVIVORS:
            try:
                await kubelet.readmit(pod)
            except AdmissionError as error:
                stage.fact(f"pod {pod}", stage.bad(error.reason), error.message)
            else:
                raise Broken("a kubelet without a plugin admits a pod that holds a device")
        async with self._new_daemon() as daemon:
            await daemon.ready()
            await self._registered()
            stage.fact(
                "registered", f"{self._latest_list(appeared):.1f} s after kubelet.sock appeared"
            )
            got = await self._admit("newcomer", {N300: len(kubelet.healthy(N300))})
            check(got.ids[N300] == kubelet.healthy(N300), "a pod that was refused holds a device")
            stage.fact(
                "so",
                "the devices are there again, and nobody has them",
                "a pod that was refused stays refused",
            )
            await daemon.stop()

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.monotonic()))

    def _latest_list(self, since: float) -> float:
        return (
            max(self.kubelet.find("list", resource, since)[0].at for resource in RESOURCES) - since
        )


class Boards(Story):
    """Devices that are whole boards, or shared; a chip that is held under another name; and what
    others read.
    """

    async def steps(self) -> None:
        for card in ("galaxy-wormhole", "p300c", "n300"):
            self.node.add(card)
        for directory in ("cdi", "features.d"):
            (self.home / directory).mkdir()
        async with self.daemon:
            await self.a_tray_of_chips()
            await self.configured_anew()
            await self.whole_boards()
            await self.the_pod_of_before_ends()
            await self.turns()
            await self.what_others_read()

    async def a_tray_of_chips(self) -> None:
        stage = self.stage
        stage.step(
            "Another node: a Galaxy of 32 chips, a p300c, an n300. A pod asks for 8 chips of it"
        )
        await self.daemon.ready()
        await self._kubelet_starts()
        with expected("the daemon does not register"):
            await self.kubelet.registered(GALAXY, STEP)
        ids = sorted((await self._admit("train", {GALAXY: 8})).ids[GALAXY])
        trays = {self._chip(bdf).facts.telemetry["tt_serial"] for bdf in ids}
        check(len(ids) == 8 and len(trays) == 1, f"the chips {ids} are of the trays {trays}")
        stage.fact("it got", f"{ids[0]} to {ids[-1]}, which are one tray, {trays.pop()}")

    async def configured_anew(self) -> None:
        """The tray that the pod has is another device now, which nobody else may have."""
        stage, kubelet = self.stage, self.kubelet
        stage.step(
            "systemctl reload: devices are whole boards now, and four containers share the n300"
        )
        shared = '[[sharing.resources]]\nname = "n300"\nreplicas = 4\n'
        stage.block(f'unit = "board"\n\n{shared}')
        rest = f'[sharing]\nlock_dir = "{self.home}/locks"\n[health]\ninterval = {INTERVAL}\n'
        self.configuration.write_text(f'unit = "board"\n{rest}{shared}')
        since = time.monotonic()
        self.daemon.send(signal.SIGHUP)
        names = {TRAY: 4, PAIR: 1, N300: 4}
        with expected("the boards are not offered"):
            await kubelet.wait_for(
                lambda: [len(kubelet.healthy(name)) for name in names] == [3, 1, 4], STEP
            )
        capacity, allocatable = kubelet.capacity(), kubelet.allocatable()
        check(
            {name: capacity[name] for name in names} == names,
            f"capacity is {capacity}, not {names}",
        )
        stage.say()
        rows = [["node status", "capacity", "allocatable"]]
        stage.rows(rows + [[name, str(capacity[name]), str(allocatable[name])] for name in names])
        stage.fact("because", *await self._log("held by default/", since))

    async def whole_boards(self) -> None:
        stage = self.stage
        stage.step("A pod asks for one tray, another one for one p300-board")
        for pod, resource, chips in (("serve", TRAY, 8), ("pair", PAIR, 2)):
            got = await self._admit(pod, {resource: 1})
            check(len(got.devices) == chips, f"{pod} has {len(got.devices)} device nodes")
            visible = got.envs["TT_VISIBLE_DEVICES"].split(",")
            stage.fact(
                pod,
                f"{chips} nodes, TT_VISIBLE_DEVICES={','.join(visible[:2])}" + ",…" * (chips > 2),
            )

    async def the_pod_of_before_ends(self) -> None:
        stage, kubelet = self.stage, self.kubelet
        stage.step("The pod from before the reload ends")
        begin = time.monotonic()
        kubelet.remove_pod("train")
        seconds = await self._listed(TRAY, lambda: len(kubelet.healthy(TRAY)) == 4, begin)
        stage.fact("its tray", f"is offered again after {seconds:.1f} s, as {TRAY}")

    async def turns(self) -> None:
        stage = self.stage
        stage.step("Five pods ask for the n300, which four can have")
        got = [await self._admit(f"notebook-{number}", {N300: 1}) for number in range(1, 5)]
        nodes = {device.container_path for allocation in got for device in allocation.devices}
        mounts = {
            mount.container_path: mount.host_path
            for allocation in got
            for mount in allocation.mounts
        }
        check(
            len(nodes) == 1 and "/dev/shm" in mounts,
            f"they have the nodes {nodes} and the mounts {mounts}",
        )
        locks = mounts["/dev/shm"].replace(str(self.home), "")
        stage.fact(
            "four", f"have {nodes.pop()}, and take turns by common locks: {locks} at /dev/shm"
        )
        try:
            await self.kubelet.admit("notebook-5", "main", {N300: 1})
        except AdmissionError as error:
            stage.fact("the fifth", stage.bad(error.reason))
        else:
            raise Broken("five pods have an n300 that four can have")

    async def what_others_read(self) -> None:
        """Of the list only the columns that matter here: a Galaxy's names make it wide."""
        stage = self.stage
        stage.step("What others find: container runtimes, node-feature-discovery, who is logged in")
        spec = json.loads((self.home / "cdi" / "tenstorrent.com-device.json").read_text())
        names = [device["name"] for device in spec["devices"]]
        check(len(names) == 36, f"the CDI file names {names}")
        stage.fact("CDI", f"--device {spec['kind']}={names[0]} … {names[-2]}, and {names[-1]}")
        features = (self.home / "features.d" / "tt-device-plugin").read_text().splitlines()
        shown = ("n300.product", "n300.replicas", "p300-board.boards", "p300-board.memory")
        labels = [
            line for line in features if line.startswith(tuple(f"{DOMAIN}/{key}" for key in shown))
        ]
        check(len(labels) == len(shown), f"labels are missing among {features}")
        stage.fact("labels", *labels)
        listed = json.loads(await self.list_text("--json"))
        users = {
            row["bdf"]: ", ".join(pod["pod"] for pod in row["pods"])
            for row in listed
            if row["pods"]
        }
        check(len(users) == 11, f"list --json names pods of {users}")
        rows = [["list --json", "resource", "pods"]]
        picked = (row for row in listed if row["card"] != "galaxy-wormhole")
        stage.say()
        stage.rows(rows + [[row["bdf"], row["resource"], users[row["bdf"]]] for row in picked])


async def demo(pyz: Path | None, verbose: bool) -> int:
    stage, begin = Stage(verbose), time.monotonic()
    what = f"the zipapp {pyz.name}" if pyz else "from source"
    stage.say(
        stage.paint("1", f"tt-device-plugin, {what}")
        + " · simulated cards, reference kubelet, no cluster"
    )
    try:
        for story in (Cards, Boards):
            with workspace() as home:
                await within(PATIENCE, "it does not go on", story(stage, home, pyz).play())
    except Broken as error:
        stage.say(f"\n{stage.bad('FAILED')} in step {stage.steps}: {error}")
        return 1
    seconds = time.monotonic() - begin
    stage.say(f"\n{stage.good('All as it should be')}: {stage.steps} steps in {seconds:.0f} s.")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.demo", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--pyz", type=lambda text: Path(text).absolute(), metavar="PATH", help="run this zipapp"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also show the daemon's log and the kubelet's events"
    )
    options = parser.parse_args()
    if options.pyz and not options.pyz.is_file():
        parser.error(f"--pyz: there is no {options.pyz}")
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    return run(demo(options.pyz, options.verbose))


if __name__ == "__main__":
    sys.exit(main())
