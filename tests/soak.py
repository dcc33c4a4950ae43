"""Ten thousand kubelet restarts against one daemon: does it keep its memory and its file
descriptors?

    python -m tests.soak [--restarts 10000] [--minutes 10]

The reference kubelet runs in this process, the daemon in its own. Kubelets end orderly or as if
killed, and in between they refuse, hang, delete sockets, run pods, while cards go, come back, die
and are reloaded. What is measured is the daemon after things have settled: the first sample comes
after a warm-up, and the last must have as many descriptors, and not be more than 2 MB above the
smallest. It runs until both the restarts and the minutes are reached.
"""

from __future__ import annotations

import os

# Read when grpc is imported: its core writes to stderr otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import functools
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import (
    Broken,
    Footprint,
    Installation,
    Kernel,
    Service,
    footprint,
    percentile,
    run,
    within,
    workspace,
)

WARM_UP = 200  # restarts before the first sample
GROWTH = 2048  # kB of RSS that the last sample may be above the smallest
INTERVAL = 0.5  # seconds between the daemon's polls
STEP = 120.0  # seconds within which a restart and all that comes with it has to be over
CARDS = ("n150", "n150", "n300", "n300", "p300c", "p300c")
RESOURCES = ("tenstorrent.com/n150", "tenstorrent.com/n300", "tenstorrent.com/p300")


class Soak:
    """One daemon, one directory, and a kubelet that is restarted again and again."""

    def __init__(
        self, node: SimulatedNode, kubelet: Kubelet, daemon: Service, kernel: Kernel, seed: int
    ) -> None:
        self.node = node
        self.kubelet = kubelet
        self.daemon = daemon
        self.kernel = kernel
        self.restarts = 0
        self.seconds: list[
            float
        ] = []  # per plain restart, from kubelet.sock until every resource was registered
        self.disturbances: dict[str, int] = {}
        self._random = random.Random(seed)

    async def step(self) -> None:
        """One restart, which nothing may hold up: the kubelet, as the original, waits for most
        answers for ever.
        """
        await within(STEP, f"restart {self.restarts} does not come to an end", self.restart())

    async def restart(self) -> None:
        """One restart of the kubelet, and now and then something else that befalls a node."""
        number, kubelet = self.restarts, self.kubelet
        kubelet.events.clear()
        every: list[tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = [
            (5, self.run_pods),
            (10, self.delete_a_socket),
            (25, self.hot_plug),
            (40, self.refuse),
            (50, self.drop),
            (75, self.kill_a_chip),
            (100, self.reload),
            (150, self.deaf),
            (200, self.renumber),
        ]
        # Every so often at a random moment of the period, so that they meet each other in every
        # combination.
        for period, disturbance in every:
            if self._random.randrange(period) == 0:
                name = disturbance.__name__
                self.disturbances[name] = self.disturbances.get(name, 0) + 1
                await disturbance()
        plain = kubelet.is_sound
        await (kubelet.stop() if number % 2 else kubelet.kill())
        await asyncio.sleep(self._random.choice((0, 0, 0.001, 0.005, 0.02)))
        await kubelet.start()
        since = kubelet.find("started")[-1].at
        await self.registered()
        if plain:
            self.seconds.append(
                max(kubelet.find("registered", name, since)[-1].at for name in RESOURCES) - since
            )
        self.restarts += 1

    async def registered(self) -> None:
        for name in RESOURCES:
            try:
                await self.kubelet.registered(name, 15)
            except TimeoutError:
                raise Broken(
                    f"after {self.restarts} restarts, no {name}{self.daemon.latest()}"
                ) from None

    async def seen(self, what: str, condition: Callable[[], object]) -> None:
        try:
            await self.kubelet.wait_for(condition, 15)
        except TimeoutError:
            raise Broken(f"after {self.restarts} restarts, {what}{self.daemon.latest()}") from None

    async def run_pods(self) -> None:
        for pod, request in (
            ("one", {RESOURCES[2]: 1}),
            ("two", {RESOURCES[2]: 2, RESOURCES[0]: 1}),
        ):
            with contextlib.suppress(AdmissionError):  # a chip is dead or away just now
                await self.kubelet.admit(pod, "main", request)
        for pod in ("one", "two"):
            self.kubelet.remove_pod(pod)

    async def delete_a_socket(self) -> None:
        name = self._random.choice(RESOURCES)
        since = time.monotonic()
        endpoint = self.kubelet.find("registered", name)
        ours = [
            path
            for path in self.kubelet.directory.glob("tt-*.sock")
            if name.partition("/")[2] in path.name
        ]
        for path in ours:
            path.unlink(missing_ok=True)  # the daemon may be removing an old one itself
        if endpoint or ours:
            await self.seen(
                "a deleted socket is not registered anew",
                lambda: self.kubelet.find("list", name, since),
            )

    async def hot_plug(self) -> None:
        chip = self._random.choice(self.node.chips)
        facts = chip.facts
        if not facts.present or facts.condition != "healthy":
            return
        chip.vanish()
        self.kernel.deliver()
        await self.seen("a card that went is healthy", lambda: not self._is_healthy(chip.bdf))
        ordinals = {other.ordinal for other in self.node.chips}
        chip.come_back(next(n for n in self._random.sample(range(32), 32) if n not in ordinals))
        self.kernel.deliver()
        await self.seen("a card that came back is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def refuse(self) -> None:
        self.kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, times=self._random.randrange(1, 4))

    async def drop(self) -> None:
        since = time.monotonic()
        await self.kubelet.drop_streams()
        for name in RESOURCES:
            await self.seen(
                "a broken stream is not opened again",
                functools.partial(self.kubelet.find, "list", name, since),
            )

    async def kill_a_chip(self) -> None:
        chip = self._random.choice(self.node.chips)
        for ail, cure in self._random.sample(
            ((chip.die, chip.revive), (chip.reset, chip.post_reset)), 1
        ):
            ail()
            await self.seen("a dead chip is healthy", lambda: not self._is_healthy(chip.bdf))
            cure()
            await self.seen("a revived chip is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def reload(self) -> None:
        self.daemon.send(signal.SIGHUP)
        await self.daemon.note("READY=1")

    async def deaf(self) -> None:
        await self.kubelet.restart(deaf=True)
        await asyncio.sleep(0.1)

    async def renumber(self) -> None:
        first, second = self._random.sample([chip.bdf for chip in self.node.chips], 2)
        self.node.swap_ordinals(first, second)
        self.kernel.deliver()

    def _descriptors(self) -> int:
        """Return how many the daemon has, but for the cards' attributes."""
        count = 0
        for descriptor in Path(f"/proc/{self.daemon.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it has just been closed
                count += not descriptor.readlink().is_relative_to(self.node.root)
        return count

    def _is_healthy(self, bdf: str) -> bool:
        return any(bdf in self.kubelet.healthy(name) for name in RESOURCES)

    async def sample(self) -> Footprint:
        """What the daemon holds while nothing is under way: the least of a few looks.

        A poll's thread comes and goes, as does a connection that is just ending. Attributes that
        polls keep open do not count: they are returned and opened again now and then.
        """
        looks = []
        for _ in range(6):
            await asyncio.sleep(0.25)
            held = footprint(self.daemon.pid)
            looks.append(replace(held, descriptors=self._descriptors()))
        return Footprint(
            *(min(getattr(look, key) for look in looks) for key in Footprint.__slots__)
        )


@contextlib.asynccontextmanager
async def soaking(seed: int) -> AsyncIterator[Soak]:
    with workspace() as home:
        node, directory, uevents = SimulatedNode(home / "node"), home / "dp", home / "uevents"
        for index, card in enumerate(CARDS):
            node.add(card, numa_node=index % 2)
        daemon = Installation(home).daemon(node, directory, interval=INTERVAL, uevents=uevents)
        kernel = Kernel(node, uevents)
        with Ticker(node, INTERVAL / 2):
            async with daemon, Kubelet(directory) as kubelet:
                await daemon.ready()
                soak = Soak(node, kubelet, daemon, kernel, seed)
                await soak.registered()
                yield soak


async def soak(restarts: int, minutes: float, seed: int) -> int:
    async with soaking(seed) as soak:
        begin = time.monotonic()

        def progress() -> float:
            return min(
                soak.restarts / restarts,
                (time.monotonic() - begin) / (minutes * 60) if minutes else 1.0,
            )

        def line(held: Footprint, remark: str = "") -> str:
            p99 = percentile(soak.seconds, 99) * 1000
            minutes = (time.monotonic() - begin) / 60
            return (
                f"{progress():5.0%} {minutes:6.1f} {soak.restarts:9d} {held.rss:9d} "
                f"{held.anonymous:9d} {held.descriptors:5d} {held.threads:8d} {p99:12.1f}{remark}"
            )

        print("       min  restarts    RSS kB   anon kB   fds  threads  restart p99 ms", flush=True)
        while soak.restarts < min(WARM_UP, restarts // 2):
            await soak.step()
        samples = [await soak.sample()]
        print(line(samples[0], "   baseline"), flush=True)
        reported = int(progress() * 20)
        while progress() < 1:
            await soak.step()
            if int(progress() * 20) > reported:
                reported = int(progress() * 20)
                samples.append(await soak.sample())
                print(line(samples[-1]), flush=True)

        first, last, median = samples[0], samples[-1], statistics.median(soak.seconds) * 1000
        least = min(sample.rss for sample in samples)
        between = ", ".join(
            f"{name.replace('_', ' ')} {n}" for name, n in sorted(soak.disturbances.items())
        )
        print(f"{soak.restarts} restarts, registered again after {median:.1f} ms (median)")
        print(f"in between: {between}")
        for violation in sorted(set(soak.kubelet.violations)):
            print(f"violation: {violation}")
        limit = f"limit: {GROWTH} above the least"
        rss = f"RSS: {first.rss} kB before, {least} at least, {last.rss} after ({limit})"
        descriptors = (first.descriptors, last.descriptors)
        violations = soak.kubelet.violations
        verdicts = {
            rss: last.rss - least <= GROWTH,
            "descriptors: {} before, {} after".format(*descriptors): len({*descriptors}) == 1,
            f"{len(violations)} violations of the kubelet's rules": not violations,
        }
        for text, ok in verdicts.items():
            print(f"{'ok  ' if ok else 'FAIL'}  {text}")
        return 0 if all(verdicts.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--restarts", type=int, default=10_000, help="at least as many (default: 10000)"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="at least as long (default: 10)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the order of what happens in between (default: 1)"
    )
    options = parser.parse_args()
    if options.restarts < 2:
        parser.error("--restarts: at least 2")
    try:
        return run(soak(options.restarts, options.minutes, options.seed))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
