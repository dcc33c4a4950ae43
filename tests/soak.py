"""Ten thousand kubelet restarts against one daemon: does it keep its memory and descriptors?

    python -m tests.soak [--restarts 10000] [--minutes 10] [--seed 1]

The reference kubelet runs in this process, the daemon in its own. In between kubelets refuse, hang
and run pods, sockets are deleted, the configuration is reloaded, and cards go, come back, die and
change numbers. The daemon is measured at rest: the last sample must have as many descriptors as the
first one after a warm-up, and at most GROWTH more memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

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
    run,
    within,
    workspace,
)

WARM_UP = 0.25  # of it all, until the pools of malloc and gRPC are full
GROWTH = 2048  # kB of RSS
INTERVAL = 0.5  # seconds between the daemon's polls
STEP = 120.0  # seconds that a restart can take, with all that happens before it
CARDS = ("n150", "n150", "n300", "n300", "p300c", "p300c")
N150, _, P300 = RESOURCES = tuple(f"tenstorrent.com/{name}" for name in ("n150", "n300", "p300"))


class Soak:
    """One daemon, and a kubelet that is restarted again and again."""

    def __init__(
        self, node: SimulatedNode, kubelet: Kubelet, daemon: Service, kernel: Kernel, seed: int
    ) -> None:
        self.node = node
        self.kubelet = kubelet
        self.daemon = daemon
        self.kernel = kernel
        self.restarts = 0
        self.disturbances = Counter[str]()
        self._random = random.Random(seed)

    async def step(self) -> None:
        """Restart the kubelet. Nothing may delay it: most of its calls have no deadline."""
        await within(STEP, f"restart {self.restarts} does not end", self._restart())

    async def _restart(self) -> None:
        kubelet = self.kubelet
        kubelet.events.clear()

        # Each happens once in so many restarts, at random, so they meet in every combination.
        disturbances = {
            self.run_pods: 5,
            self.delete_a_socket: 10,
            self.hot_plug: 25,
            self.refuse: 40,
            self.drop: 50,
            self.kill_a_chip: 75,
            self.reload: 100,
            self.hang: 150,
        }
        for disturbance, period in disturbances.items():
            if self._random.randrange(period) == 0:
                self.disturbances[disturbance.__name__] += 1
                await disturbance()

        await (kubelet.stop() if self.restarts % 2 else kubelet.kill())
        await asyncio.sleep(self._random.choice((0, 0, 0.001, 0.005, 0.02)))
        await kubelet.start()
        await self.registered()
        self.restarts += 1

    async def registered(self) -> None:
        """Wait until the kubelet has a list of each resource."""
        is_listed = self.kubelet.manager.plugins.is_listed
        for name in RESOURCES:
            await self.seen(f"{name} is not registered", functools.partial(is_listed, name))

    async def seen(self, otherwise: str, condition: Callable[[], object]) -> None:
        """Wait until the kubelet has seen something; raise Broken with `otherwise` if it does not.

        It is looked for after each event of the kubelet.
        """
        try:
            await self.kubelet.wait_for(condition, 15)
        except TimeoutError:
            text = f"after {self.restarts} restarts: {otherwise}{self.daemon.latest()}"
            raise Broken(text) from None

    # The disturbances

    async def run_pods(self) -> None:
        for pod, request in (("one", {P300: 1}), ("two", {P300: 2, N150: 1})):
            with contextlib.suppress(AdmissionError):  # a chip is dead or absent
                await self.kubelet.admit(pod, "main", request)

        for pod in ("one", "two"):
            await self.kubelet.remove_pod(pod)

    async def delete_a_socket(self) -> None:
        name = self._random.choice(RESOURCES)
        since = time.monotonic()
        endpoint = self.kubelet.find("registered", name)

        sockets = [*self.kubelet.directory.glob(f"tt-{name.partition('/')[2]}.*.sock")]
        for path in sockets:
            path.unlink(missing_ok=True)  # the daemon may be removing an old one itself

        if endpoint or sockets:
            is_listed = functools.partial(self.kubelet.find, "list", name, since)
            await self.seen("a deleted socket is not registered again", is_listed)

    async def hot_plug(self) -> None:
        chip = self._random.choice(self.node.chips)
        if not chip.present or chip.condition != "healthy":
            return

        chip.vanish()
        self.kernel.deliver()
        await self.seen("an absent card is healthy", lambda: not self._is_healthy(chip.bdf))

        # It returns with another number, which must not matter.
        ordinals = {other.ordinal for other in self.node.chips}
        chip.come_back(next(n for n in self._random.sample(range(32), 32) if n not in ordinals))
        self.kernel.deliver()
        await self.seen("a card that returned is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def refuse(self) -> None:
        self.kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, times=self._random.randrange(1, 4))

    async def drop(self) -> None:
        since = time.monotonic()
        await self.kubelet.drop_streams()

        for name in RESOURCES:
            is_listed = functools.partial(self.kubelet.find, "list", name, since)
            await self.seen("a stream that ended is not opened again", is_listed)

    async def kill_a_chip(self) -> None:
        chip = self._random.choice(self.node.chips)
        ails = [(chip.die, chip.revive), (chip.reset, chip.post_reset)]
        ail, cure = self._random.choice(ails)

        ail()
        await self.seen("a dead chip is healthy", lambda: not self._is_healthy(chip.bdf))

        cure()
        await self.seen("a revived chip is unhealthy", lambda: self._is_healthy(chip.bdf))

    async def reload(self) -> None:
        self.daemon.send(signal.SIGHUP)
        await self.daemon.note("READY=1")

    async def hang(self) -> None:
        """Have a kubelet's socket on which connections are accepted and nothing is answered."""
        await self.kubelet.stop()
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(self.kubelet.socket))
            silent.listen()
            await asyncio.sleep(0.1)

    # What is measured

    def _is_healthy(self, bdf: str) -> bool:
        return any(bdf in self.kubelet.healthy(name) for name in RESOURCES)

    async def sample(self) -> Footprint:
        """Return the least of a few looks: a poll's thread or a connection may be just ending."""
        looks = []
        for _ in range(6):
            await asyncio.sleep(0.25)
            looks.append(footprint(self.daemon.pid))

        return Footprint(*map(min, zip(*looks, strict=True)))


@contextlib.asynccontextmanager
async def soaking(seed: int) -> AsyncIterator[Soak]:
    """Give a daemon that has registered all resources with a kubelet."""
    with workspace() as home:
        node, uevents = SimulatedNode(home / "node"), home / "uevents"
        for index, card in enumerate(CARDS):
            node.add(card, numa_node=index % 2)

        daemon = Installation(home).daemon(node, home / "dp", interval=INTERVAL, uevents=uevents)
        with Ticker(node, INTERVAL / 2):
            async with daemon, Kubelet(home / "dp") as kubelet:
                await daemon.ready()
                soak = Soak(node, kubelet, daemon, Kernel(node, uevents), seed)
                await soak.registered()
                yield soak


async def soak(restarts: int, minutes: float, seed: int) -> int:
    """Return the exit status: 1 if something has grown or was wrong."""
    begin = time.monotonic()
    first: Footprint | None = None
    progress = 0.0
    async with soaking(seed) as soak:
        while progress < 1:
            await soak.step()
            spent = (time.monotonic() - begin) / 60
            progress = min(soak.restarts / restarts, spent / minutes if minutes else 1)
            if first is None and progress >= WARM_UP:
                first = await soak.sample()
        last = await soak.sample()

    print(f"{soak.restarts} restarts; in between: {dict(soak.disturbances)}")
    assert first
    verdicts = judge(first, last, soak.kubelet.violations)
    for text, is_kept in verdicts.items():
        print(f"{'ok  ' if is_kept else 'FAIL'}  {text}")
    return 0 if all(verdicts.values()) else 1


def judge(first: Footprint, last: Footprint, violations: Sequence[str]) -> dict[str, bool]:
    """Return what was promised, and whether it was kept."""
    same = first.descriptors == last.descriptors
    return {
        f"RSS: {first.rss} kB, at the end {last.rss} kB": last.rss <= first.rss + GROWTH,
        f"descriptors: {first.descriptors}, {last.descriptors}": same,
        f"violations of the kubelet's rules: {sorted({*violations})}": not violations,
    }


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.soak")
    parser.add_argument("--restarts", type=int, default=10_000, help="at least (default: 10000)")
    parser.add_argument("--minutes", type=float, default=10.0, help="at least (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="of the disturbances (default: 1)")
    options = parser.parse_args()
    try:
        return run(soak(options.restarts, options.minutes, options.seed))
    except (Broken, TimeoutError) as error:
        print(f"FAIL  {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
