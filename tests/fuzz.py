"""Random operations on a node with its kubelet and daemon: are the promises kept?

    python -m tests.fuzz [--seed 1] [--seconds 600]

After each step: no unshared chip and no directory is in two running pods, containers find their
directories, the users of chips are the pods that run with them, the daemon's view is what node and
kubelet have, and the log has no error. When all pods have ended, every device is offered again, and
a pod gets one. The operations depend on the seed alone, never on what was seen in time.
"""

from __future__ import annotations

import os

# Read when grpc is imported: its core writes to stderr otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from logging.handlers import BufferingHandler
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ttdp
from tests.chips import chip as pure_chip
from tests.conftest import CALLER_HAS_GONE
from tests.world.kubelet import AdmissionError, Event, Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import PATIENCE, Broken, run, until, workspace
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import Settings, SharedResource, Sharing

POLLS = 200  # of the daemon, until everything must be in line; each takes 0.1 s at least
LATEST = 100  # events of the kubelet, shown after a failure: timing is not the seed's alone
CARDS = ("p300c", "n150", "p300c", "p150a")
CHIPS = [pure_chip(bus, CARDS[bus // 2], serial=f"{bus // 2}") for bus in range(2 * len(CARDS))]
HURRIED = patch.multiple(
    ttdp,
    # Seconds: answers and starts are old sooner.
    WRITTEN_WITHIN=2.0,
    STARTED_WITHIN=10.0,
    START_TIMEOUT=1.0,
    # No firmware plays here, and a busy machine may be late.
    MISSES=sys.maxsize,
    READ_TIMEOUT=PATIENCE,
)
Differences = Iterator[tuple[str, object, object]]  # what; found; expected


def draw_configuration(draw: random.Random, chips: Sequence[Chip] = ()) -> dict[str, Any]:
    """Return what a reload can change, without errors in it."""
    naming, unit = draw.choice(["board", "card", "arch"]), draw.choice(["chip", "board"])
    by_address = {chip.address: chip for chip in CHIPS}
    offer = ttdp.make_offer(by_address, Settings(resource_naming=naming, unit=unit))

    entries = []
    for resource in draw.sample([*offer.resources.values()], draw.choice([0, 0, 1, 2])):
        name = resource.short_name
        number = draw.choice([0, 1, 2])
        rename = f"{name}.few" if number or draw.random() < 0.5 else None
        devices = tuple(draw.sample([*resource.devices], min(number, len(resource.devices))))
        entries.append(SharedResource(name, draw.choice([2, 3]), rename, devices))

    return {
        "resource_naming": naming,
        "unit": unit,
        "resource_domain": draw.choice(["tenstorrent.com", "tenstorrent.com", "example.org"]),
        "exclude": tuple(chip.bdf for chip in draw.sample([*chips], draw.choice([0, 0, 0, 1]))),
        "hugepages": draw.choice(["private", "private", "none"]),
        "entries": tuple(entries),
    }


def is_well(chip: Chip) -> bool:
    return chip.present and chip.condition == "healthy"


class World:
    """A node with kubelet, daemon and pods, and what happens to them."""

    def __init__(self, home: Path, seed: int) -> None:
        draw = self.random = random.Random(seed)
        self.home = home
        self.node = SimulatedNode(home / "node")
        self.node.set_hugepages(8)
        self.chips = [chip for card in CARDS for chip in self.node.add(card)]
        for name in ("cdi", "run", "locks"):
            (home / name).mkdir()

        self.kubelet = Kubelet(
            home / "dp",
            host=self.node,
            pods_come=PATIENCE,
            on_event=self._note,
        )
        self.kubelet.plugins_are_back = self._plugins_are_back
        self.daemon: RunningDaemon
        self.configuration = draw_configuration(draw, self.chips)

        # What has happened.
        self.requests: dict[str, dict[str, int]] = {}  # of all pods, by name
        self.given: dict[str, Event] = {}  # to pods, at their admission
        self.counts = Counter[str]()
        self.log = BufferingHandler(sys.maxsize)
        self.log.setLevel(logging.ERROR)

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as changes of the settings."""
        changes = {**self.configuration}
        lock_dir = f"{self.home}/locks"
        sharing = Sharing(lock_dir=lock_dir, resources=changes.pop("entries"))
        return {**changes, "sharing": sharing}

    def _note(self, event: Event) -> None:
        """Follow what containers were given."""
        pod = event.fields.get("pod", "")
        if event.kind == "admitted":
            self.given[pod] = event

        elif event.kind == "running":
            for path in self.given[pod].fields["mounts"]:
                if not os.path.isdir(path):
                    self.kubelet.log.violation(f"{pod} starts without its directory {path}")

    def chips_of(self, pod: str) -> list[str]:
        """Return the addresses of a pod's chips."""
        variables = dict(each.split("=", 1) for each in self.given[pod].fields["env"])
        return [each for each in variables.get(ttdp.ADDRESSES, "").split(",") if each]

    def _plugins_are_back(self) -> bool:
        """Return whether the daemon has listed all that it has for a kubelet that starts."""
        resources = self.daemon.decision.resources
        return all(map(self.kubelet.manager.plugins.is_listed, resources))

    async def start_daemon(self) -> None:
        """Start it, and wait until it is ready, as systemd does."""
        places = {"state_dir": str(self.home), "runtime_dir": str(self.home / "run")}
        settings = settings_of(self.node, self.home / "dp", interval=0.1, **places, **self.settings)
        self.daemon = await RunningDaemon(self.node, settings).__aenter__()
        await self.daemon.ready()

    # Operations

    async def restart_daemon(self) -> None:
        """Restart it with another configuration, perhaps with the kubelet, by a power cut."""
        how = self.random.choice(["alone", "with the kubelet", "power cut"])
        await self.daemon.__aexit__()
        # A start takes longer in reality.
        await until(lambda: not self.kubelet.manager.plugins.open_streams)
        self.configuration = draw_configuration(self.random, self.chips)

        if how == "power cut":
            await self.kubelet.power_cut()
        elif how == "with the kubelet":
            await self.kubelet.kill()

        await self.start_daemon()
        if how != "alone":
            await self.kubelet.start()

    async def restart_kubelet(self) -> None:
        """Restart it, perhaps without its checkpoint."""
        how: Any = self.random.choice([None, None, "missing", "garbage", "checksum", "empty"])
        await self.kubelet.kill()
        if how:
            self.kubelet.corrupt(how)
        await self.kubelet.start()

    async def damage_checkpoint(self) -> None:
        how: Any = self.random.choice(["empty", "garbage", "missing", "truncated"])
        self.kubelet.corrupt(how)

    async def reload(self) -> None:
        self.configuration = draw_configuration(self.random, self.chips)
        self.daemon.reload(**self.settings)

    async def admit(self) -> None:
        """Admit a pod, or so many that all is taken, also what is offered wrongly."""
        chips = {chip.address: chip for chip in CHIPS}
        names = [*ttdp.make_offer(chips, Settings(**self.settings)).resources]
        request = {self.random.choice(names): self.random.choice([1, 1, 2])}
        for _ in range(self.random.choice([1, 1, 1, 1, 1, 5])):
            await self._admit(request)

    async def _admit(self, request: dict[str, int]) -> None:
        if not request.keys() & self.kubelet.capacity().keys():
            return  # no scheduler would choose this node

        pod = f"pod-{len(self.requests)}"
        self.requests[pod] = request
        with contextlib.suppress(AdmissionError):
            await self.kubelet.admit(pod, "main", request)
            self.counts["admitted"] += 1

    async def act_on_a_pod(self) -> None:
        """End one of the latest pods, or a part of it; others may request the same at once."""
        kubelet = self.kubelet
        acts = [kubelet.delete, kubelet.complete, *3 * [kubelet.force_delete]]
        acts += [lambda pod: kubelet.crash(pod, "main")]
        act = self.random.choice(acts)
        pod = self.random.choice([*self.requests][-8:] or [""])
        with contextlib.suppress(LookupError):  # it was not admitted
            act(pod)

        for _ in range(self.random.choice([0, 1, 5])):
            await self._admit(self.requests.get(pod, {}))

    async def catch_up(self) -> None:
        """Let pods end that were deleted by force."""
        for pod in [*self.kubelet.pods]:
            if not pod.over and not pod.wanted:
                self.kubelet.end(pod.uid)

    async def change_a_chip(self) -> None:
        """Let one disappear, die, or change numbers with another one; or repair it."""
        one, other = self.random.sample(self.chips, 2)
        change = self.random.choice([one.vanish, one.die, None])

        ill = [chip for chip in self.chips if not is_well(chip)]
        for chip in ill:
            chip.revive() if chip.present else chip.come_back()

        if change and not ill:
            change()
        elif not ill:
            self.node.swap_ordinals(one.bdf, other.bdf)

    async def start_over(self) -> None:
        """Delete all pods, and repair the chips: the next pod gets a device."""
        kubelet = self.kubelet
        for pod in [*kubelet.pods]:
            if pod.wanted:
                kubelet.delete(pod.uid)
        await self.catch_up()
        for chip in self.chips:
            if not is_well(chip):
                chip.revive() if chip.present else chip.come_back()
        # Else the entry of a pod whose cgroup nobody saw would stay until the next admission.
        kubelet.manager.prune()
        await kubelet.manager.write_checkpoint()

        def is_all_free() -> bool:
            decision = self.daemon.decision
            lists = {name: {*each.devices} for name, each in decision.resources.items()}
            is_listed = {name: kubelet.healthy(name) for name in lists} == lists
            return is_listed and bool(lists) and not decision.holds

        await until(is_all_free, "every device is offered once all pods have ended")
        pod = f"first-{len(self.requests)}"
        name = self.random.choice([*self.daemon.decision.resources])
        self.requests[pod] = {name: 1}
        await kubelet.admit(pod, "main", self.requests[pod])
        await kubelet.running(pod, "main")
        kubelet.events.clear()


OPERATIONS = [
    *16 * [World.admit],
    *12 * [World.act_on_a_pod],
    *8 * [World.change_a_chip],
    *4 * [World.catch_up, World.restart_kubelet],
    *2 * [World.reload, World.restart_daemon, World.damage_checkpoint],
    World.start_over,
]

# -- what must be true after each step -------------------------------------------------------------


def compare_with_node(view: dict[str, Any], world: World) -> Differences:
    """Compare the daemon's view with the chips of the node, and with what its pods run with."""
    rows = {row["bdf"]: row for row in view["chips"]}
    for chip in world.chips:
        # One that was absent at a boot is not known.
        row = rows.get(chip.bdf, {"index": None, "healthy": False, "reason": "not known"})
        healthy = is_well(chip) if row["healthy"] is not None else None  # it is excluded
        about = f"{chip.bdf} ({row['reason']})"
        yield about, (row["index"], row["healthy"]), (chip.ordinal, healthy)

    owners: dict[str, str] = {}  # pods by their directories for hugepages
    for pod in filter(lambda each: each.has_containers, world.kubelet.pods):
        for address in world.chips_of(pod.name):
            users = {user["pod"] for user in rows[address]["pods"]}
            is_user = not users.isdisjoint([pod.uid, pod.name])
            yield f"{pod.name} on {address} in {users}", is_user, True

        given = world.given[pod.name].fields
        is_shared = any("::" in each for each in given["ids"])
        for path in given["mounts"]:
            yield f"directory {path} of {pod.name}", os.path.isdir(path), True
            if "/hugepages" in path and not is_shared:
                yield f"owner of {path}", owners.setdefault(path, pod.uid), pod.uid


def compare_outputs(world: World, view: dict[str, Any]) -> Differences:
    """Compare the view with CDI, status and the lists of the kubelet."""
    kubelet, settings = world.kubelet, world.daemon.settings
    cdi = json.loads(ttdp.read_text(f"{settings.cdi_dir}/{ttdp.CDI_FILE}") or '{"devices": []}')
    nodes = {each["name"]: each["containerEdits"]["deviceNodes"] for each in cdi["devices"]}
    paths = {name: each[0]["hostPath"] for name, each in nodes.items() if name != "all"}
    yield "CDI", paths, {row["bdf"]: row["path"] for row in view["chips"] if row["path"]}

    for name, resource in world.daemon.decision.resources.items():
        healthy = {ident for ident, device in resource.devices.items() if not device.reason}
        yield f"{name} in the kubelet", kubelet.healthy(name), healthy
    for row in view["resources"]:
        yield f"state of {row['name']}", row["state"], ttdp.REGISTERED
        yield f"{row['name']} in the status", f" × {row['name']}," in view["status"], True

    host = world.daemon.host
    named = host.named_directories()
    unnamed = ttdp.unnamed_directories(named, host.settings)
    yield "directories that nothing names", unnamed if host.holds.has_read else {}, {}


async def differences(world: World) -> list[str]:
    path = f"{world.daemon.settings.runtime_dir}/{ttdp.STATUS_SOCKET}"
    reader, writer = await asyncio.open_unix_connection(path)
    view = json.loads(await reader.read())
    writer.close()

    found = [*compare_with_node(view, world), *compare_outputs(world, view)]
    return [f"{what}: {one}, not {other}" for what, one, other in found if one != other]


async def check(world: World) -> None:
    """Raise Broken if a promise is not kept, or if outputs keep contradicting each other.

    How long that takes is measured by what the daemon does: a busy machine is slow at everything.
    """
    begin = world.daemon.polls
    while (found := await differences(world)) and world.daemon.polls < begin + POLLS:
        await asyncio.sleep(0.005)

    lines = map(logging.Formatter().format, world.log.buffer)
    # A kubelet that dies does not complete a call: gRPC logs that.
    of_calls = ("Registration/Register", CALLER_HAS_GONE)
    errors = [line for line in lines if not any(each in line for each in of_calls)]

    if broken := found + world.kubelet.violations + errors:
        raise Broken("\n".join(broken))


async def take_steps(world: World, steps: int, seconds: float) -> None:
    """Take random steps; raise Broken after one if a promise is not kept."""
    begin = time.monotonic()
    step = 0
    while step < steps and time.monotonic() < begin + seconds:
        step += 1
        operation = world.random.choice(OPERATIONS)
        world.counts[operation.__name__] += 1
        world.kubelet.log.record("step", number=step, operation=operation.__name__)

        await operation(world)
        await check(world)

    print(f"{step} steps in {time.monotonic() - begin:.0f} s: {dict(world.counts)}")


async def run_fuzz(seed: int, steps: int = sys.maxsize, seconds: float = inf) -> int:
    """Return the exit status: 1 if a promise was not kept."""
    # Signals end this program, not the daemon alone.
    no_signals = patch.object(asyncio.get_running_loop(), "add_signal_handler")
    with workspace() as home, HURRIED, no_signals:
        world = World(home, seed)

        logging.getLogger().addHandler(world.log)
        await world.start_daemon()  # before the kubelet, as its unit orders
        async with world.kubelet:
            try:
                await take_steps(world, steps, seconds)
            except Exception as error:
                print(*(event.line() for event in world.kubelet.events[-LATEST:]), sep="\n")
                print(*world.daemon.decision.holds, sep="\n")
                print(f"FAIL  {dict(world.counts)}: {error!r}; again: make fuzz SEED={seed}")
                return 1
            finally:
                logging.getLogger().removeHandler(world.log)
                await world.daemon.__aexit__()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    return run(run_fuzz(options.seed, seconds=options.seconds))


if __name__ == "__main__":
    sys.exit(main())
