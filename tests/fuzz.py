"""Random operations on a node with its kubelet and daemon: are the promises kept?

    python -m tests.fuzz [--seed 1] [--seconds 600] [--steps 1000000]

After each step: no unshared chip is in two running pods, the kubelet has killed no running pod
because of the daemon's list, the pods that run with a chip are shown as its users, no output
contradicts another, and the log has no error. Every CALM steps: nothing has grown. The operations
depend on the seed alone, never on what was seen in time.
"""

from __future__ import annotations

import os

# Read when grpc is imported: its core writes to stderr otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import operator
import random
import re
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ttdp
from tests.world.kubelet import AdmissionError, Event, Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.pods import Container
from tests.world.processes import Broken, run, until, workspace
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

CALM = 100  # steps after which everything is put right, and what is in use is counted
CARDS = ("p300c", "n150", "p300c", "p150a")
NAMES = {
    "board": {"p300c": "p300", "n150": "n150", "p150a": "p150"},
    "card": {"p300c": "p300c", "n150": "n150", "p150a": "p150a"},
    "arch": {"p300c": "blackhole", "n150": "wormhole", "p150a": "blackhole"},
}
ORIGINAL: dict[str, Any] = {
    "resource_naming": "board",
    "unit": "chip",
    "resource_domain": "tenstorrent.com",
    "sharing": Sharing(lock_dir=""),
}
HURRIED = {  # seconds: evidence ends sooner, and the metrics are written at each poll
    "ANSWER_VALIDITY": 2.0,
    "GRACE_PERIOD": 1.0,
    "LOOK_INTERVAL": 0.2,
    "GATE_TIMEOUT": 1.0,
    "METRICS_INTERVAL": 0.0,
}


# -- outputs ---------------------------------------------------------------------------------------


class Errors(logging.Handler):
    """Keeps error lines, except those of gRPC about calls that a kubelet did not complete."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        if "Registration/Register" not in line:
            self.lines.append(line)


Metrics = dict[str, dict[str, dict[str, str]]]
Comparison = tuple[str, object, object]  # what; found; expected


def parse_metrics(text: str) -> Metrics:
    """Return the labels of samples, and the value under "", by metric and the labels' values."""
    found: Metrics = defaultdict(dict)
    for name, labels, value in re.findall(r"(?m)^(\w+)(?:\{(.*)\})? (\S+)$", text):
        pairs = re.findall(r'(\w+)="(.*?)"', labels)
        found[name][" ".join(text for _, text in pairs)] = {**dict(pairs), "": value}
    return found


def contradictions(view: dict[str, Any], kubelet: Kubelet, files: dict[str, str]) -> Iterator[str]:
    """Yield where the daemon's outputs or the kubelet's lists differ from the daemon's view."""
    metrics = parse_metrics(files["metrics"])
    comparisons = [*_compare_chips(view, metrics, files["cdi"])]
    for resource in view["resources"]:
        comparisons += _compare_resource(resource, view, metrics, kubelet, files["labels"])
    for what, found, expected in comparisons:
        if found != expected:
            yield f"{what}: {found}, not {expected}"


def _compare_chips(view: dict[str, Any], metrics: Metrics, cdi: str) -> Iterator[Comparison]:
    rows = view["chips"]
    faults = view["faults"]
    nodes = {row["bdf"]: row["path"] for row in rows if row["path"]}
    yield "CDI", ttdp.cdi_nodes(cdi) if cdi else {}, nodes
    yield "reasons", {row["bdf"] for row in rows if row["reason"]}, {*faults}
    yield "health", {row["bdf"] for row in rows if not row["healthy"]}, {*faults}
    kinds = {each["device"]: each["kind"].upper() for each in metrics["tt_device_fault"].values()}
    yield "faults in the metrics", kinds, faults
    users = {f"{row['bdf']} {pod['pod']}" for row in rows for pod in row["pods"] or ()}
    held = {f"{a['device']} {a['pod_name']}" for a in metrics["tt_device_allocated"].values()}
    yield "users in the metrics", held, users
    *_, total = ttdp.list_lines(view, 110)
    yield "total", re.findall(r"\d+", total)[:2], [str(len(rows)), str(len(faults))]


def _compare_resource(
    resource: dict[str, Any],
    view: dict[str, Any],
    metrics: Metrics,
    kubelet: Kubelet,
    labels: str,
) -> Iterator[Comparison]:
    name = resource["name"]
    yield f"state of {name}", resource["state"], ttdp.REGISTERED
    registered = metrics["tt_kubelet_registered"].get(name, {})
    yield f"{name} registered in the metrics", registered.get(""), "1"
    unhealthy = len(kubelet.unhealthy(name))
    counts = {"healthy": len(kubelet.healthy(name)), "unhealthy": unhealthy}
    shown = metrics["tt_resource_devices"].values()
    found = {each["health"]: int(each[""]) for each in shown if each["resource"] == name}
    yield f"{name} in the metrics", found, counts
    form = rf"(\d+) × {name}(?:, \d+ replicas each)?, (\d+) healthy"
    summary = re.search(form, view["status"]) or [0, 0, 1]
    yield f"{name} in the status", summary[1] == summary[2], not unhealthy
    present = {row["id"] for row in view["chips"] if row["resource"] == name and row["path"]}
    label = re.search(rf"(?m)^{name}\.count=(\d+)$", labels) or [0, 0]
    yield f"{name} in the labels", int(label[1]) >= len(present), True  # a pod's former ID, too


# -- a node and its life ---------------------------------------------------------------------------


def is_well(chip: Chip) -> bool:
    return chip.present and chip.condition == "healthy"


def names_of(naming: str, unit: str) -> list[str]:
    """Return the names of the resources of all cards."""
    names = NAMES[naming] | (
        {"p300c": NAMES[naming]["p300c"] + "-board"} if unit == "board" else {}
    )
    return sorted({*names.values()})


class World:
    """A node with kubelet, daemon and pods, and what can happen to them."""

    def __init__(self, home: Path, seed: int) -> None:
        draw = self.random = random.Random(seed)
        self.home = home
        self.node = SimulatedNode(home / "node")
        self.chips = [chip for card in CARDS for chip in self.node.add(card)]
        for name in ("cdi", "features.d", "metrics", "run"):
            (home / name).mkdir()
        self.kubelet = Kubelet(
            home / "dp",
            version=draw.choice([(1, 31), (1, 33), (1, 36), (1, 37)]),
            policy=draw.choice(["none", "best-effort"]),
            layout=draw.choice(["cgroupfs", "systemd", "v1"]),
            cgroups=self.node.root / "sys/fs/cgroup",
            host=self.node,
            back_off=0.05,
            pods_come=1.0,
            seed=seed,
            on_event=self._note,
        )
        self.daemon: RunningDaemon
        self.configuration = ORIGINAL
        self.requests: dict[str, dict[str, int]] = {}  # of all pods, by name
        self.chips_of: dict[tuple[str, str], set[str]] = {}  # of containers, when they started
        self.is_fair = True  # since the kubelet started, chips were well and no pod was admitted
        self.is_late = False  # writes were delayed, so the end of a stream is noticed late
        self.counts = Counter[str]()
        self._answers: dict[tuple[str, str], set[str]] = {}

    def _note(self, event: Event) -> None:
        """Follow which chips containers run with, and which pods the kubelet kills."""
        container = (event.fields.get("pod", ""), event.fields.get("container", ""))
        if event.kind == "admitted":
            variables = dict(each.split("=", 1) for each in event.fields["env"])
            self._answers[container] = {*variables.get(ttdp.ADDRESSES, "").split(",")} - {""}
        elif event.kind == "running":
            self.chips_of[container] = self._answers[container]
        elif event.kind == "started":
            is_ready = hasattr(self, "daemon") and self.daemon.notified("READY=1")
            self.is_fair = is_ready and all(map(is_well, self.chips))
        elif event.kind == "pod-killed":
            self.counts["killed"] += 1
            # An init container that has ended is allocated again, which can fail for other reasons.
            is_list = re.search("OutOf|no longer healthy", str(event.fields))
            # Kubelets admit static pods at once, before any plugin can have registered.
            is_static = any(p.static for p in self.kubelet.pods if p.name == container[0])
            if self.is_fair and is_list and not is_static:
                self.kubelet.log.violation(f"the kubelet has killed {event.fields}")

    def draw_configuration(self) -> dict[str, Any]:
        draw = self.random
        naming, unit = draw.choice([*NAMES]), draw.choice(["chip", "board"])
        entries = []
        for name in draw.sample(names_of(naming, unit), draw.choice([0, 0, 1, 2])):
            some: Any = draw.choice(["all", 1, 2])
            rename = f"{name}.few" if some != "all" or draw.random() < 0.5 else None
            entries.append(SharedResource(name, draw.choice([2, 3]), rename, some))
        return {
            "resource_naming": naming,
            "unit": unit,
            "resource_domain": draw.choice(["tenstorrent.com", "tenstorrent.com", "example.org"]),
            "sharing": Sharing(lock_dir="", resources=tuple(entries)),
        }

    def draw_request(self) -> dict[str, int]:
        """Return one or two devices of a resource that the configuration gives, or may give."""
        configuration = self.configuration
        names = names_of(configuration["resource_naming"], configuration["unit"])
        name = self.random.choice(names) + self.random.choice(["", "", ".few"])
        return {f"{configuration['resource_domain']}/{name}": self.random.choice([1, 1, 2])}

    # What happens to daemon and kubelet

    async def start_daemon(self) -> None:
        # Chips that are not well are seen by their registers: heartbeats can stand still.
        settings = settings_of(
            self.node,
            self.home / "dp",
            interval=0.1,
            health={"heartbeat_misses": 1_000_000},
            state_dir=str(self.home),
            runtime_dir=str(self.home / "run"),
            **self.configuration,
        )
        self.daemon = await RunningDaemon(self.node, settings).__aenter__()

    async def stop_daemon(self) -> None:
        """Stop it, and wait until the kubelet has noticed: a start takes longer in reality."""
        names = [*self.daemon.sessions]
        await self.daemon.__aexit__()
        is_listed = self.kubelet.manager.plugins.is_listed
        await until(lambda: not any(map(is_listed, names)), "the kubelet to see the end")

    async def restart_daemon(self) -> None:
        self.configuration = self.random.choice([self.configuration, self.draw_configuration()])
        await self.stop_daemon()
        await self.start_daemon()

    async def reload(self) -> None:
        self.configuration = self.draw_configuration()
        self.daemon.reload(**self.configuration)

    async def reload_twice(self) -> None:
        former = self.configuration
        await self.reload()
        await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.003]))
        self.configuration = former
        self.daemon.reload(**former)

    async def restart_kubelet(self) -> None:
        """Restart it, perhaps without its checkpoint, perhaps without its API server."""
        how: Any = self.random.choice([None, None, "missing", "garbage", "checksum", "empty"])
        is_away = self.random.random() < 0.3
        await self.kubelet.kill()
        if how:
            self.kubelet.corrupt(how)
        if is_away:
            self.kubelet.api_server_away()
        await self.kubelet.start()

    async def restart_both(self) -> None:
        """Restart both in any order, perhaps by a power cut."""
        self.configuration = self.random.choice([self.configuration, self.draw_configuration()])
        is_power_cut = self.random.random() < 0.5
        is_in_order = self.random.random() < 0.7
        await self.stop_daemon()
        self.daemon.forget_notes()
        if is_power_cut:
            await self.kubelet.power_cut()
            boot = self.node.root / "proc/sys/kernel/random/boot_id"
            boot.parent.mkdir(parents=True, exist_ok=True)
            boot.write_text(f"{self.counts['restart_both']}\n")
        else:
            await self.kubelet.kill()
        if is_in_order:
            await self.start_daemon()
            await until(lambda: self.daemon.notified("READY=1"))  # as systemd does
        await self.kubelet.start()
        if not is_in_order:
            await self.start_daemon()

    async def api_server(self) -> None:
        if self.random.random() < 0.3:
            self.kubelet.api_server_away()
        else:
            await self.kubelet.api_server_back()

    async def checkpoint(self) -> None:
        self.kubelet.corrupt(self.random.choice(["empty", "garbage", "missing", "truncated"]))

    async def overtake(self) -> None:
        self.kubelet.overtake(self.random.random() < 0.5)
        self.is_late = True

    # What happens to pods

    async def admit(self) -> None:
        await self._admit(self.draw_request(), has_init=self.random.random() < 0.3)

    async def _admit(self, request: dict[str, int], *, has_init: bool = False) -> None:
        pod = f"pod-{len(self.requests)}"
        self.requests[pod] = request
        self.is_fair = False
        containers = [Container("init", {**request}, "init")] if has_init else []
        containers.append(Container("main", {**request}))
        try:
            await self.kubelet.admit_pod(pod, containers, static=self.kubelet.pods.api_away)
            self.counts["admitted"] += 1
        except AdmissionError:
            self.counts["refused"] += 1

    async def fill(self) -> None:
        """Request all that is left: what is offered wrongly is taken, too."""
        request = self.draw_request()
        for _ in range(5):
            await self._admit(request)

    async def replace_by_force(self) -> None:
        """Delete a pod by force; another one requests the same at once."""
        pod = self._act(self.kubelet.force_delete)
        await self._admit(self.requests.get(pod, {}))

    async def on_pod(self) -> None:
        kubelet = self.kubelet
        acts: list[Callable[[str], object]] = [
            kubelet.delete,
            kubelet.force_delete,
            kubelet.complete,
            lambda pod: kubelet.crash(pod, "main"),
            kubelet.kill_sandbox,
        ]
        self._act(self.random.choice(acts))

    def _act(self, act: Callable[[str], object]) -> str:
        """Do something to one of the latest pods, whether it was admitted or not."""
        pod = self.random.choice([*self.requests, "none"][-12:])
        with contextlib.suppress(LookupError):
            act(pod)
        return pod

    async def end(self) -> None:
        """End the processes of the pods that were deleted by force."""
        for pod in [*self.kubelet.pods]:
            if pod.has_processes and not pod.wanted:
                self.kubelet.end(pod.uid)

    # What happens to chips

    async def come_or_go(self) -> None:
        self.is_fair = False
        chip = self.random.choice(self.chips)
        chip.vanish() if chip.present else chip.come_back()

    async def die_or_live(self) -> None:
        self.is_fair = False
        chip = self.random.choice(self.chips)
        if chip.present:
            chip.revive() if chip.condition == "dead" else chip.die()

    async def renumber(self) -> None:
        one, other = self.random.sample(self.chips, 2)
        if is_well(one) and is_well(other):
            self.node.swap_ordinals(one.bdf, other.bdf)

    async def calm(self) -> None:
        """Put everything right, with all pods at their end."""
        kubelet = self.kubelet
        for chip in self.chips:
            chip.revive() if chip.present else chip.come_back()
        kubelet.overtake(False)
        await kubelet.api_server_back()
        for pod in [*kubelet.pods]:
            if pod.wanted:
                kubelet.delete(pod.uid)
        await self.end()
        self.configuration = ORIGINAL
        await self.stop_daemon()
        await kubelet.restart()
        await self.start_daemon()


OPERATIONS = {  # with their weights
    World.admit: 10,
    World.fill: 2,
    World.replace_by_force: 4,
    World.on_pod: 8,
    World.end: 3,
    World.reload: 4,
    World.reload_twice: 1,
    World.restart_daemon: 2,
    World.restart_kubelet: 4,
    World.restart_both: 2,
    World.api_server: 4,
    World.checkpoint: 2,
    World.overtake: 1,
    World.come_or_go: 2,
    World.die_or_live: 3,
    World.renumber: 3,
}


# -- promises --------------------------------------------------------------------------------------


class Fuzz:
    """Makes steps, and checks the promises after each of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps = 0
        self.latest: deque[str] = deque(maxlen=8)
        self.errors = Errors()
        self.in_use: list[tuple[int, int, int]] = []

    async def step(self) -> None:
        world = self.world
        (operation,) = world.random.choices([*OPERATIONS], [*OPERATIONS.values()])
        self.steps += 1
        self.latest.append(operation.__name__)
        world.counts[operation.__name__] += 1
        await operation(world)
        await self.check()
        if self.steps % CALM == 0:
            await world.calm()
            await until(lambda: len(world.daemon.sessions) == 3, "the end of former resources")
            await self.check()
            world.is_late = False
            world.kubelet.events.clear()
            gc.collect()
            first = self.in_use[0] if self.in_use else (1 << 30,) * 3
            root = world.node.root

            def is_bounded() -> bool:
                return all(map(operator.le, in_use(root), first))

            with contextlib.suppress(Broken):
                await until(is_bounded)
            self.in_use.append(in_use(root))
            if not is_bounded():
                raise Broken(f"descriptors, threads and tasks have grown: {self.in_use}")

    async def check(self) -> None:
        """Raise Broken if a promise is not kept, or if outputs keep contradicting each other."""
        world = self.world
        deadline = time.monotonic() + 15
        while (found := await self._differences()) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        lost = " are lost" if world.is_late else "-"
        found += [text for text in world.kubelet.violations if not text.endswith(lost)]
        world.kubelet.violations.clear()
        if found + self.errors.lines:
            raise Broken("\n".join(found + self.errors.lines))

    async def _differences(self) -> list[str]:
        """Return what is not yet as it must be."""
        world, daemon = self.world, self.world.daemon
        if not daemon.notified("READY=1"):
            return ["the daemon is not ready"]
        settings = daemon.settings
        view = await read_view(settings)
        rows = {row["bdf"]: row for row in view["chips"]}
        found = []
        for chip in world.chips:
            row = rows.get(chip.bdf, {"index": None, "healthy": False})
            if (chip.ordinal, is_well(chip)) != (row["index"], row["healthy"]):
                found.append(f"{chip.bdf} is {chip.ordinal}, {chip.condition}, not {row}")
        for pod in world.kubelet.pods:
            for container in pod.containers.values():
                chips = world.chips_of.get((pod.name, container.name), set())
                for bdf in chips if container.pid is not None else ():
                    if not {pod.uid, pod.name} & {user["pod"] for user in rows[bdf]["pods"]}:
                        found.append(f"{pod.name} runs with {bdf}, list has {rows[bdf]}")
        for name, session in daemon.sessions.items():
            if world.kubelet.healthy(name) != session.stream.healthy:
                found.append(f"the kubelet has {world.kubelet.healthy(name)} of {name}")
        paths = {
            "cdi": f"{settings.cdi_dir}/{ttdp.CDI_FILE}",
            "labels": f"{settings.labels_dir}/{ttdp.LABELS_FILE}",
            "metrics": settings.metrics_file,
        }
        files = {name: ttdp.try_read(path) or "" for name, path in paths.items()}
        return found or [*contradictions(view, world.kubelet, files)]


def in_use(root: Path) -> tuple[int, int, int]:
    """Return how many descriptors, except of chips' attributes, threads and tasks there are."""
    links = [
        ttdp.if_exists(os.readlink, f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
    ]
    descriptors = [link for link in links if link and not link.startswith(str(root))]
    return len(descriptors), threading.active_count(), len(asyncio.all_tasks())


async def read_view(settings: ttdp.Settings) -> dict[str, Any]:
    """Return what the daemon answers on its status socket."""
    path = f"{settings.runtime_dir}/{ttdp.STATUS_SOCKET}"
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        return dict(json.loads(await reader.read()))
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def fuzzing(seed: int) -> AsyncIterator[Fuzz]:
    """Give a node with kubelet and daemon, both running."""
    with contextlib.ExitStack() as stack:
        for name, value in HURRIED.items():
            stack.enter_context(patch.object(ttdp, name, value))
        world = World(stack.enter_context(workspace()), seed)
        fuzz = Fuzz(world)
        logging.getLogger().addHandler(fuzz.errors)
        stack.callback(logging.getLogger().removeHandler, fuzz.errors)
        # Signals end this program, not the daemon alone.
        stack.enter_context(patch.object(asyncio.get_running_loop(), "add_signal_handler"))
        async with world.kubelet:
            await world.start_daemon()
            try:
                await fuzz.check()
                yield fuzz
            finally:
                await world.daemon.__aexit__()


async def run_fuzz(seed: int, seconds: float, steps: int) -> int:
    """Return the exit status: 1 if a promise was not kept."""
    begin = time.monotonic()
    async with fuzzing(seed) as fuzz:
        config = fuzz.world.kubelet.config
        print(f"seed {seed}, kubelet {config.version}, policy {config.policy}", flush=True)
        while time.monotonic() < begin + seconds and fuzz.steps < steps:
            try:
                await fuzz.step()
            except (Broken, TimeoutError) as broken:
                print(f"FAIL  step {fuzz.steps}, after {', '.join(fuzz.latest)}: {broken}")
                print(f"FAIL  again: make fuzz SEED={seed}")
                return 1
    counts = ", ".join(f"{name} {number}" for name, number in sorted(fuzz.world.counts.items()))
    print(f"{fuzz.steps} steps in {time.monotonic() - begin:.0f} s: {counts}")
    print(
        f"descriptors, threads and tasks at rest: {fuzz.in_use[:1]}, at the end {fuzz.in_use[-1:]}"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    return run(run_fuzz(options.seed, options.seconds, options.steps))


if __name__ == "__main__":
    sys.exit(main())
