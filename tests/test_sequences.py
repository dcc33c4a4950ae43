"""Whatever happens in whatever order: no chip has two owners, and no pod's ID is lost.

Kubelet, API server and daemon come and go, the configuration changes, pods are admitted and end,
are deleted in order or by force, chips come, go, die and are renumbered, and the checkpoint errs,
as hypothesis likes. What a step does depends on what was drawn alone, never on what happened to be
seen in time, or hypothesis would find another tree at each run.

TTDP_SEQUENCES and TTDP_STEPS in the environment say how many sequences, and how long.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
from collections.abc import Coroutine
from typing import Any

from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import ttdp
from tests.conftest import kubelet_of
from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import Chip, SimulatedNode
from tests.world.processes import Broken, until, workspace
from tests.world.simulation import RunningDaemon, settings_of
from ttdp import SharedResource, Sharing

DOMAIN = "tenstorrent.com"
CARDS = ("p300c", "n150", "p300c", "p150a")
NAMES = {
    "board": {"p300c": "p300", "n150": "n150", "p150a": "p150"},
    "card": {"p300c": "p300c", "n150": "n150", "p150a": "p150a"},
    "arch": {"p300c": "blackhole", "n150": "wormhole", "p150a": "blackhole"},
}
INTERVAL = 0.1  # seconds between two polls
numbers = st.integers(0, 99)


def name_of(card: str, naming: str, unit: str) -> str:
    return NAMES[naming][card] + ("-board" if unit == "board" and card == "p300c" else "")


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    naming = draw(st.sampled_from([*NAMES]))
    unit = draw(st.sampled_from(["chip", "board"]))
    names = sorted({name_of(card, naming, unit) for card in CARDS})
    entries = []
    for name in draw(st.lists(st.sampled_from(names), unique=True, max_size=2)):
        some: Any = draw(st.sampled_from(["all", 1, 2]))
        rename = f"{name}.few" if some != "all" or draw(st.booleans()) else None
        entries.append(SharedResource(name, draw(st.integers(2, 3)), rename, some))
    return {
        "resource_naming": naming,
        "unit": unit,
        "device_id_strategy": draw(st.sampled_from(["bdf", "asic", "index"])),
        "sharing": Sharing(lock_dir="", resources=tuple(entries)),
    }


class Sequences(RuleBasedStateMachine):
    """A node with its kubelet and daemon, and what a test does to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.add_signal_handler = lambda *_: None  # type: ignore[method-assign]  # pytest's
        self.workspace = workspace()
        self.home = self.workspace.__enter__()
        self.node = SimulatedNode(self.home / "node")
        self.chips: list[Chip] = [chip for card in CARDS for chip in self.node.add(card)]
        self.numbers = itertools.count()
        self.pods: dict[
            str, dict[str, int]
        ] = {}  # all that were ever admitted, with their requests
        self.given: dict[str, dict[str, Any]] = {}  # answers by UID and container

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @initialize(
        configuration=configurations(),
        version=st.sampled_from([(1, 31), (1, 33), (1, 36), (1, 37)]),
        policy=st.sampled_from(["none", "best-effort"]),
    )
    def begin(self, configuration: Any, version: tuple[int, int], policy: Any) -> None:
        self.configuration = configuration
        self.kubelet: Kubelet = self.do(self._make_kubelet(version=version, policy=policy))
        self.do(self.kubelet.start())
        self.do(self._start_daemon())
        self.do(self._settle())

    async def _make_kubelet(self, **options: Any) -> Kubelet:
        return kubelet_of(self.node, self.home / "dp", back_off=0.05, **options)

    async def _start_daemon(self) -> None:
        # What ails a chip here is seen by its registers; heartbeats need not go on for that.
        settings = settings_of(
            self.node,
            self.home / "dp",
            interval=INTERVAL,
            health={"heartbeat_misses": 1_000_000},
            state_dir=str(self.home),
            **self.configuration,
        )
        self.daemon = await RunningDaemon(self.node, settings).__aenter__()

    async def _stop_daemon(self) -> None:
        """Stop it, and wait until the kubelet has seen that: a start takes longer in reality."""
        names = [*self.daemon.sessions]
        await self.daemon.__aexit__()
        is_listed = self.kubelet.manager.plugins.is_listed
        await until(lambda: not any(map(is_listed, names)), "the kubelet to see the end")

    async def _settle(self) -> None:
        """Wait until the daemon knows the chips, and the kubelet what the daemon has published."""

        def differences() -> list[str]:
            found = [] if self.daemon.notified("READY=1") else ["the daemon is not ready"]
            for name, session in self.daemon.sessions.items():
                wanted = session.listing.healthy
                is_listed = self.kubelet.manager.plugins.is_listed(name)
                if not is_listed or self.kubelet.healthy(name) != wanted:
                    has = self.kubelet.healthy(name)
                    found.append(f"{name} is {session.state}: {wanted}, the kubelet has {has}")
            known = self.daemon.daemon.monitor.fleet.chips
            return found + [
                f"{chip.bdf} is {chip.facts}"
                for chip in self.chips
                if not self._is_known(chip, known.get(chip.bdf))
            ]

        try:
            await until(lambda: not differences(), "the daemon and the kubelet to agree")
        except Broken as broken:
            raise Broken(f"{broken}: {differences()}") from None

    def _is_known(self, chip: Chip, known: Any) -> bool:
        """Whether the daemon has a chip's state and place right."""
        facts = chip.facts
        if known is None:
            return not facts.present
        well = facts.present and facts.condition == "healthy"
        same_place = not facts.present or known.function.ordinal == facts.ordinal
        spoken = not well or known.identity.serial == facts.telemetry["tt_serial"]
        ill = known.health.fault is not None
        return bool(known.listed and spoken and same_place and known.present is facts.present) and (
            ill is not well
        )

    # What happens to daemon and kubelet

    @rule(configuration=configurations())
    def reload(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration

        async def reload() -> None:
            self.daemon.reload(**configuration)
            await self._settle()

        self.do(reload())

    @rule(configuration=st.none() | configurations())
    def restart_daemon(self, configuration: dict[str, Any] | None) -> None:
        self.configuration = configuration or self.configuration
        self.do(self._stop_daemon())
        self.do(self._start_daemon())
        self.do(self._settle())

    @rule(is_away=st.booleans())
    def restart_kubelet(self, is_away: bool) -> None:
        if is_away:
            self.kubelet.api_server_away()
        self.do(self.kubelet.restart())
        self.do(self._settle())

    @rule(configuration=configurations(), is_away=st.booleans(), daemon_first=st.booleans())
    def restart_both(
        self, configuration: dict[str, Any], is_away: bool, daemon_first: bool
    ) -> None:
        self.configuration = configuration
        if is_away:
            self.kubelet.api_server_away()
        self.do(self._stop_daemon())
        self.do(self.kubelet.kill())
        first, second = self._start_daemon(), self.kubelet.start()
        for start in (first, second) if daemon_first else (second, first):
            self.do(start)
        self.do(self._settle())

    @rule()
    def api_server_answers(self) -> None:
        async def answer() -> None:
            await self.kubelet.api_server_back()
            await self._settle()

        self.do(answer())

    @rule(how=st.sampled_from(["empty", "garbage", "missing"]))
    def corrupt_checkpoint(self, how: Any) -> None:
        self.kubelet.corrupt(how)
        self.do(self._settle())

    @rule(is_overtaking=st.booleans())
    def overtake(self, is_overtaking: bool) -> None:
        self.kubelet.overtake(is_overtaking)

    # What happens to pods

    async def _admit(self, request: dict[str, int], *, init: bool = False) -> bool:
        """Return whether a pod with this request was admitted."""
        pod = f"pod-{next(self.numbers)}"
        is_static = self.kubelet.node.pods.api_away
        try:
            if init:
                await self.kubelet.admit(pod, "init", request, init=True, static=is_static)
            await self.kubelet.admit(pod, "main", request, static=is_static)
        except AdmissionError:
            return False
        self.pods[pod] = request
        await self._settle()
        return True

    def _resource(self, card: str, few: bool) -> str:
        """What a card is called now, or its shared part."""
        naming, unit = self.configuration["resource_naming"], self.configuration["unit"]
        return f"{DOMAIN}/{name_of(card, naming, unit)}{'.few' if few else ''}"

    @rule(card=st.sampled_from(CARDS), few=st.booleans(), count=numbers, init=st.booleans())
    def admit(self, card: str, few: bool, count: int, init: bool) -> None:
        self.do(self._admit({self._resource(card, few): 1 + count % 2}, init=init))

    @rule(few=st.booleans())
    def fill(self, few: bool) -> None:
        """Pods take all that is on offer: what is offered wrongly is taken, too."""

        async def fill() -> None:
            for resource in {self._resource(card, few) for card in CARDS}:
                while self.kubelet.capacity().get(resource) and await self._admit({resource: 1}):
                    pass

        self.do(fill())

    @rule(number=numbers)
    def replace_by_force(self, number: int) -> None:
        """A pod is deleted by force, and another one asks for the same."""
        if self.pods:
            pod = [*self.pods][number % len(self.pods)]
            self._act(number, self.kubelet.force_delete)
            self.do(self._admit(self.pods[pod]))

    def _act(self, number: int, act: Any) -> None:
        """Do something to one of the pods, if it is there."""

        async def act_and_settle() -> None:
            if self.pods:
                try:
                    act([*self.pods][number % len(self.pods)])
                except LookupError:
                    return  # it was never admitted
            await self._settle()

        self.do(act_and_settle())

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        self._act(number, self.kubelet.delete)

    @rule(number=numbers)
    def delete_by_force(self, number: int) -> None:
        self._act(number, self.kubelet.force_delete)

    @rule(number=numbers)
    def end(self, number: int) -> None:
        self._act(number, self.kubelet.end)

    @rule(number=numbers)
    def complete(self, number: int) -> None:
        self._act(number, self.kubelet.complete)

    @rule(number=numbers)
    def crash(self, number: int) -> None:
        self._act(number, lambda pod: self.kubelet.crash(pod, "main"))

    # What happens to chips

    @rule(number=numbers)
    def come_or_go(self, number: int) -> None:
        chip = self.chips[number % len(self.chips)]
        chip.vanish() if chip.facts.present else chip.come_back()
        self.do(self._settle())

    @rule(number=numbers)
    def die_or_live(self, number: int) -> None:
        chip = self.chips[number % len(self.chips)]
        if chip.facts.present:
            chip.revive() if chip.facts.condition == "dead" else chip.die()
            self.do(self._settle())

    @rule(number=numbers)
    def renumber(self, number: int) -> None:
        well = [c for c in self.chips if c.facts.present and c.facts.condition == "healthy"]
        if len(well) > 1:
            one, other = well[number % len(well)], well[(number + 1) % len(well)]
            self.node.swap_ordinals(one.bdf, other.bdf)
            self.do(self._settle())

    # What must hold

    @invariant()
    def no_chip_has_two_owners(self) -> None:
        """Neither by what the kubelet has given to pods that it wants, nor by what is open."""
        given: dict[str, set[str]] = collections.defaultdict(set)
        for pod in self.kubelet.node.pods:
            if pod.wanted and not pod.over:
                for bdf in self._chips_of(pod.uid):
                    given[bdf].add(pod.uid)
        for chip in self.chips:
            pids = self.home / f"node/proc/driver/tenstorrent/{chip.ordinal}/pids"
            is_told = chip.facts.present and pids.exists()
            opened = {self._pod_of(pid) for pid in pids.read_text().split()} if is_told else set()
            self._check_owners(chip, given[chip.bdf])
            self._check_owners(chip, opened)

    def _pod_of(self, pid: str) -> str:
        cgroup = (self.home / f"node/proc/{pid}/cgroup").read_text()
        return cgroup.partition("/pod")[2].partition("/")[0]

    def _answers(self, uid: str) -> list[tuple[str, Any]]:
        """What a pod's containers were given, by resource."""
        containers = self.given.setdefault(uid, {})
        for container, held in self.kubelet.manager.pods.held.get(uid, {}).items():
            containers[container] = list(held.items())
        return [each for answers in containers.values() for each in answers]

    def _chips_of(self, uid: str) -> set[str]:
        answers = self._answers(uid)
        return {b for _, one in answers for b in one.answer.envs[ttdp.ADDRESSES].split(",")}

    def _check_owners(self, chip: Chip, uids: set[str]) -> None:
        """One pod has a chip, or all have shares of one resource."""
        for uid in uids if len(uids) > 1 else ():
            mine = [
                (resource, one.ids)
                for resource, one in self._answers(uid)
                if chip.bdf in one.answer.envs[ttdp.ADDRESSES]
            ]
            assert all("::" in ident for _, ids in mine for ident in ids), (chip.bdf, uid, mine)
        names = {resource for uid in uids for resource, _ in self._answers(uid)}
        assert len(uids) < 2 or len(names) == 1, (chip.bdf, names)

    def teardown(self) -> None:
        try:
            if hasattr(self, "daemon"):
                self.do(self.daemon.__aexit__())
                self.do(self.kubelet.stop())
                assert self.kubelet.violations == []
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            self.workspace.__exit__(None, None, None)


TestSequences = Sequences.TestCase
TestSequences.settings = hypothesis_settings(
    max_examples=int(os.environ.get("TTDP_SEQUENCES", "6")),
    stateful_step_count=int(os.environ.get("TTDP_STEPS", "12")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes longer than reading
)
