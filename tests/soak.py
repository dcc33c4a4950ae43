"""Ten thousand kubelet restarts against one daemon: does it keep its memory and descriptors?

    python -m tests.soak [RESTARTS]

In between pods run, kubelets refuse and drop streams, cards go and come back, and the configuration
is reloaded. After a warm-up, the last sample must have as many descriptors as the first one, and at
most GROWTH more memory.
"""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import sys
from collections.abc import Callable

import grpc

from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import (
    Broken,
    Installation,
    Kernel,
    Service,
    footprint,
    run,
    within,
    workspace,
)  # fmt: skip

WARM_UP = 0.25  # of it all, until the pools of malloc and gRPC are full
GROWTH = 2048  # kB of RSS
STEP = 120.0  # seconds that a restart can take, with all that happens before it
N150, P300 = RESOURCES = ("tenstorrent.com/n150", "tenstorrent.com/p300")


class Soak:
    """One daemon, and a kubelet that is restarted again and again."""

    def __init__(
        self, node: SimulatedNode, kubelet: Kubelet, daemon: Service, kernel: Kernel
    ) -> None:
        self.node = node
        self.kubelet = kubelet
        self.daemon = daemon
        self.kernel = kernel
        self.random = random.Random(1)

    async def restart(self) -> None:
        self.kubelet.events.clear()
        # Each happens once in so many restarts, at random, so they meet in every combination.
        disturbances = {self.run_pods: 5, self.hot_plug: 25, self.refuse: 40, self.drop: 50}
        for disturb, period in {**disturbances, self.reload: 100}.items():
            if self.random.randrange(period) == 0:
                await disturb()

        await (self.kubelet.stop() if self.random.random() < 0.5 else self.kubelet.kill())
        await asyncio.sleep(self.random.choice((0, 0.001, 0.02)))
        await self.kubelet.start()
        await self.listed()

    async def listed(self) -> None:
        for name in RESOURCES:
            is_listed = functools.partial(self.kubelet.manager.plugins.is_listed, name)
            await self.seen(f"the list of {name}", is_listed)

    async def seen(self, what: str, condition: Callable[[], object]) -> None:
        try:
            await self.kubelet.wait_for(condition, what=what)
        except TimeoutError as error:
            raise Broken(f"{error}{self.daemon.latest()}") from None

    async def run_pods(self) -> None:
        for pod, request in (("one", {P300: 1}), ("two", {P300: 2, N150: 1})):
            await self.kubelet.admit(pod, "main", request)
        for pod in ("one", "two"):
            await self.kubelet.remove_pod(pod)

    async def hot_plug(self) -> None:
        chip = self.random.choice(self.node.chips)
        for operation in (chip.vanish, chip.come_back):
            operation()
            self.kernel.deliver()
            await self.seen(
                f"{chip.bdf} after {operation.__name__}",
                lambda: any(chip.bdf in self.kubelet.healthy(r) for r in RESOURCES) is chip.present,
            )

    async def refuse(self) -> None:
        self.kubelet.refuse_with(grpc.StatusCode.UNAVAILABLE, times=2)

    async def drop(self) -> None:
        await self.kubelet.drop_streams()

    async def reload(self) -> None:
        self.daemon.send(signal.SIGHUP)
        await self.daemon.note("READY=1")

    async def sample(self) -> tuple[int, int]:
        """Return the least of a few looks: a poll's thread or a connection may be just ending."""
        looks = []
        for _ in range(6):
            await asyncio.sleep(0.25)
            looks.append(footprint(self.daemon.pid))
        kilobytes, descriptors = map(min, zip(*looks, strict=True))
        return kilobytes, descriptors


async def soak(restarts: int) -> int:
    """Return the exit status: 1 if something has grown or was wrong."""
    with workspace() as home:
        node, uevents = SimulatedNode(home / "node"), home / "uevents"
        for card in ("n150", "n150", "p300c", "p300c"):
            node.add(card)
        daemon = Installation(home).daemon(node, home / "dp", interval=0.5, uevents=uevents)
        with Ticker(node):
            async with daemon, Kubelet(home / "dp") as kubelet:
                await daemon.ready()
                soak = Soak(node, kubelet, daemon, Kernel(node, uevents))
                await soak.listed()
                for number in range(restarts):
                    if number == int(restarts * WARM_UP):
                        first = await soak.sample()
                    await within(STEP, f"restart {number}", soak.restart())
                last = await soak.sample()

    print(f"{restarts} restarts; kB and descriptors: {first}, at the end {last}")
    print(f"violations of the kubelet's rules: {sorted({*kubelet.violations})}")
    is_kept = last[0] <= first[0] + GROWTH and last[1] == first[1] and not kubelet.violations
    return 0 if is_kept else 1


if __name__ == "__main__":
    try:
        sys.exit(run(soak(int(sys.argv[1]) if sys.argv[1:] else 10_000)))
    except (Broken, TimeoutError) as error:
        sys.exit(f"FAIL  {error}")
