"""Whatever happens in whatever order: no chip has two owners, no pod gets a chip that is ill, and counts are right.

Kubelet and daemon are restarted and configured anew, pods come and go, chips come, go, die and are renumbered, as
hypothesis likes. TTDP_SEQUENCES and TTDP_STEPS in the environment say how many sequences, and how long.
"""

from __future__ import annotations

import asyncio
import collections
import os
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.world.kubelet import AdmissionError, Kubelet
from tests.world.node import Chip, SimulatedNode, Ticker
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


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    naming, unit = draw(st.sampled_from([*NAMES])), draw(st.sampled_from(["chip", "board"]))
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


def name_of(card: str, naming: str, unit: str) -> str:
    return NAMES[naming][card] + ("-board" if unit == "board" and card == "p300c" else "")


class Sequences(RuleBasedStateMachine):
    """The world, and what a test knows of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()  # runs all the time, as it does in reality
        self.loop.add_signal_handler = lambda *_: None  # type: ignore[method-assign]  # for the main thread only
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.resources = workspace()
        home = self.resources.__enter__()
        self.home: Path = home
        self.node = SimulatedNode(home / "node")
        self.chips: list[Chip] = [chip for card in CARDS for chip in self.node.add(card)]
        self.ticker = Ticker(self.node, 0.05).__enter__()
        self.pods: dict[str, set[str]] = {}  # the addresses of the chips that each running pod was given
        self.kept: dict[str, tuple[str, str]] = {}  # pod: the resource and the ID that it asked for and got
        self.number = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    @initialize(configuration=configurations())
    def begin(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.kubelet = Kubelet(self.home / "dp")
        self.do(self.kubelet.start())
        self.do(self._start_daemon())
        self.do(self._settle())

    async def _start_daemon(self) -> None:
        settings = settings_of(
            self.node, self.home / "dp", interval=0.1, state_dir=str(self.home), **self.configuration
        )  # fmt: skip
        self.daemon = await RunningDaemon(self.node, settings).__aenter__()
        self.seen = {chip.bdf for chip in self.chips if chip.facts.present}

    async def _reload(self) -> None:
        self.daemon.reload(**self.configuration)

    async def _settle(self) -> None:
        """Until the daemon knows the chips as they are, and the kubelet what the daemon has published."""

        def differences() -> list[str]:
            daemon, expected = self.daemon.daemon, self.expected()
            if not daemon._serving or (daemon._asking and not daemon._asking.done()):
                return ["the daemon is not ready"]
            found = [f"resources {[*daemon.sessions]}, not {[*expected]}"] * (daemon.sessions.keys() != expected.keys())
            for name, session in daemon.sessions.items():
                published = {i: device.reason for i, device in session.plugin.resource.devices.items()}
                healthy = {i for i, reason in published.items() if reason is None}
                has = {*self.kubelet.healthy(name)}, {*self.kubelet.unhealthy(name)}
                if has != (healthy, published.keys() - healthy):
                    found.append(f"{name} is {session.state}: {published}, but the kubelet has {has}")
            return found + [f"{chip.bdf} is {chip.facts}" for chip in self.chips if not self._is_known(chip)]

        try:
            await until(lambda: not differences(), "the daemon and the kubelet to agree", 15)
        except Broken as broken:
            raise Broken(f"{broken}: {differences()}") from None

    def _is_known(self, chip: Chip) -> bool:
        """Whether the daemon has the chip's state and place right."""
        known = self.daemon.daemon.fleet.chips.get(chip.bdf)
        facts = chip.facts
        if known is None:
            return not facts.present
        well = facts.present and facts.condition == "healthy"
        same_place = not facts.present or known.function.ordinal == facts.ordinal
        if not known.listed or (well and known.serial != facts.telemetry["tt_serial"]):
            return False  # it has not answered yet, or its firmware has only begun to speak
        return same_place and known.present is facts.present and (known.health.fault is None) is well

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(configuration=configurations())
    def reload(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.do(self._reload())
        self.do(self._settle())

    @rule(configuration=st.none() | configurations())
    def restart_daemon(self, configuration: dict[str, Any] | None) -> None:
        self.configuration = configuration or self.configuration
        self.do(self.daemon.__aexit__())
        self.do(self._start_daemon())
        self.do(self._settle())

    @rule()
    def restart_kubelet(self) -> None:
        """The pods run on; the kubelet admits them anew, before any other."""
        self.do(self.kubelet.restart())
        self.do(self._settle())
        self.kubelet._admitted |= self.pods.keys()

    @rule(configuration=configurations())
    def restart_both(self, configuration: dict[str, Any]) -> None:
        self.configuration = configuration
        self.do(self.daemon.__aexit__())
        self.do(self.kubelet.kill())
        self.do(self._start_daemon())
        self.do(self.kubelet.start())
        self.do(self._settle())
        self.kubelet._admitted |= self.pods.keys()

    @precondition(lambda self: self.daemon.daemon.sessions)
    @rule(choice=st.integers(0, 99), count=st.integers(1, 2))
    def admit(self, choice: int, count: int) -> None:
        names = sorted(self.daemon.daemon.sessions)
        resource, pod = names[choice % len(names)], f"pod-{self.number}"
        self.number += 1
        try:
            got = self.do(self.kubelet.admit(pod, "main", {resource: count}))
        except AdmissionError:
            self.kubelet.remove_pod(pod)
            return
        chips = set(got.envs["TT_DEVICE_PLUGIN_DEVICES"].split(","))
        for bdf in chips:
            facts = self.node.chip(bdf).facts
            assert facts.present and facts.condition == "healthy", f"{pod} was given {bdf}, which is {facts.condition}"
        self.pods[pod] = chips
        replica = {ident for ids in got.ids.values() for ident in ids}.pop()
        self.kept[pod] = resource, replica

    @precondition(lambda self: self.pods)
    @rule(choice=st.integers(0, 99))
    def remove(self, choice: int) -> None:
        pod = sorted(self.pods)[choice % len(self.pods)]
        self.kubelet.remove_pod(pod)
        del self.pods[pod], self.kept[pod]

    @rule(choice=st.integers(0, 99))
    def come_or_go(self, choice: int) -> None:
        chip = self.chips[choice % len(self.chips)]
        if chip.facts.present:
            chip.vanish()
        else:
            chip.come_back()
            self.seen.add(chip.bdf)
        self.do(self._settle())

    @rule(choice=st.integers(0, 99))
    def die_or_live(self, choice: int) -> None:
        chip = self.chips[choice % len(self.chips)]
        if chip.facts.present:
            chip.revive() if chip.facts.condition == "dead" else chip.die()
            self.do(self._settle())

    @rule(choice=st.integers(0, 99))
    def renumber(self, choice: int) -> None:
        there = [chip for chip in self.chips if chip.facts.present and chip.facts.condition == "healthy"]
        if len(there) > 1:
            one, other = there[choice % len(there)], there[(choice + 1) % len(there)]
            self.node.swap_ordinals(one.bdf, other.bdf)
            self.do(self._settle())

    # -- what must hold ------------------------------------------------------------------------------------------------

    def expected(self) -> dict[str, int]:
        """Capacity by resource, by the configuration's arithmetic: over what was seen since the daemon's start."""
        naming, unit = self.configuration["resource_naming"], self.configuration["unit"]
        devices: dict[str, set[str]] = collections.defaultdict(set)
        taken = set()  # a number is one chip's, whatever it is: of those that are there first of all
        for chip in sorted(self.chips, key=lambda chip: (not chip.facts.present, chip.bdf)):
            if chip.bdf in self.seen:
                card = chip.facts.telemetry["tt_card_type"]
                whole = unit == "board" and card == "p300c"
                key = chip.facts.telemetry["tt_serial"] if whole else self._id(chip)
                if whole or key not in taken:
                    devices[name_of(card, naming, unit)].add(key)
                    taken |= set() if whole else {key}
        capacity: dict[str, int] = {}
        for name, ids in devices.items():
            left = len(ids)
            for entry in self.configuration["sharing"].resources:
                if entry.name == name and left:
                    selected = left if entry.devices == "all" else min(entry.devices, left)
                    capacity[f"{DOMAIN}/{entry.rename or name}"] = selected * entry.replicas
                    left -= selected
            if left:
                capacity[f"{DOMAIN}/{name}"] = left
        return capacity

    def _id(self, chip: Chip) -> str:
        """By ordinals a chip that is away has the number that it had, which another one can have by now."""
        if self.configuration["device_id_strategy"] != "index":
            return chip.bdf
        known = self.daemon.daemon.fleet.chips.get(chip.bdf)
        return str(chip.facts.ordinal if chip.facts.present else known and known.function.ordinal)

    @invariant()
    def no_chip_has_two_owners(self) -> None:
        """Unless all of them have it as a replica of one resource."""
        owners: dict[str, list[str]] = collections.defaultdict(list)
        for pod, chips in self.pods.items():
            for bdf in chips:
                owners[bdf].append(pod)
        for bdf, pods in owners.items():
            kinds = {self.kept[pod][0] if "::" in self.kept[pod][1] else pod for pod in pods}
            assert len(kinds) == 1, f"{bdf} is held by {[(pod, *self.kept[pod]) for pod in pods]}"

    @precondition(lambda self: hasattr(self, "daemon"))
    @invariant()
    def capacity_is_what_the_configuration_says(self) -> None:
        known = self.daemon.daemon.sessions
        assert {name: count for name, count in self.kubelet.capacity().items() if name in known} == self.expected()

    def teardown(self) -> None:
        try:
            if hasattr(self, "daemon"):
                self.do(self.daemon.__aexit__())
                self.do(self.kubelet.stop())
                assert self.kubelet.violations == []
        finally:
            self.ticker.__exit__()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
            self.resources.__exit__(None, None, None)


TestSequences = Sequences.TestCase
TestSequences.settings = hypothesis_settings(
    max_examples=int(os.environ.get("TTDP_SEQUENCES", "8")),
    stateful_step_count=int(os.environ.get("TTDP_STEPS", "12")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a sequence takes longer than to read it
)
