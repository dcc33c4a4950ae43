"""Scenarios of kubelets and device plugins that run against any kubelet.

A scenario runs on the reference kubelet (tests.world.test_kubelet) and on originals
(tests.e2e.test_reference), and writes a record: after each step the calls that the plugin got, the
content of the checkpoint, and the pods that have a cgroup. Above each scenario is the record that
it must write, taken from originals; a line that begins with a version is of that version only.

In the file, `one/main=x:a | x:a,b` is an entry of the container main of the pod one, which has the
device a of the resource x, of which a and b are registered as healthy; `a@0`: on the NUMA node 0.

That writes of the checkpoint overtake each other is left to the reference: it happens by chance.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tests.world.stage import Part, Stage, Wish, World, device

Script = Callable[[Stage], Awaitable[None]]


class Scenario(NamedTuple):
    """A script, and the record that it must write."""

    name: str
    script: Script
    record: str

    def expected(self, version: tuple[int, int]) -> list[str]:
        """Return the lines of the record for a version."""
        name = ".".join(map(str, version))
        lines = [line.partition("| ") for line in self.record.strip("\n").splitlines()]
        return [text for mark, _, text in lines if mark.strip() in ("", name)]


SCENARIOS: dict[str, Scenario] = {}


def writes(record: str) -> Callable[[Script], Script]:
    """Make a scenario of a script."""

    def add(script: Script) -> Script:
        SCENARIOS[script.__name__] = Scenario(script.__name__, script, record)
        return script

    return add


A, B, C, D = (device(ident) for ident in "abcd")


def one(name: str, count: int = 1, **others: Any) -> Wish:
    """Return a pod of one container that requests devices of the resource x."""
    return Wish(name, [Part("main", {"x": count})], **others)


def with_init(name: str, count: int = 1) -> Wish:
    """Return a pod whose container main reuses the device of its init container."""
    return Wish(name, [Part("setup", {"x": 1}, "init"), Part("main", {"x": count})])


async def perform(scenario: Scenario, world: World, prefix: str) -> list[str]:
    """Run a scenario; returns its record."""
    stage = Stage(world, prefix)
    try:
        await scenario.script(stage)
    finally:
        await stage.close()
    return stage.record.lines


@writes("""
     | one runs: options x; prefer x a,b for 1; allocate x a; prestart x a;
     |   file one/main=x:a | x:a,b; cgroups one
     | the plugin is gone: file one/main=x:a | x:a,b; cgroups one
     | another socket: options x; file one/main=x:a | x:a,b; cgroups one
     | one started again: prestart x a; file one/main=x:a | x:a,b; cgroups one
""")
async def registering_again(stage: Stage) -> None:
    """A plugin that ends its stream and registers another socket has its devices back."""
    first = await stage.plugin(A, B)
    await stage.run(one("one"), "one runs")
    await stage.stop(first)
    stage.note("the plugin is gone")
    await stage.plugin(A, B)
    stage.note("another socket")
    await stage.crash("one", note="one started again")


# -- Admission
@writes("""
     | one runs: options x; prefer x a,b,c for 1; allocate x a; prestart x a;
     |   file one/main=x:a | x:a,b,c; cgroups one
     | two runs: prefer x b,c for 2; allocate x b,c; prestart x b,c;
     |   file one/main=x:a two/main=x:b@0,b@1,c | x:a,b,c; cgroups one two
     | asked: List names one/main=x:a two/main=x:b,x:b,x:c
     |   three: UnexpectedAdmissionError: Allocate failed due to requested number of devices
     |     unavailable for x. Requested: 1, Available: 0, which is unexpected
     | three is refused: file one/main=x:a two/main=x:b@0,b@1,c | x:a,b,c; cgroups one two
""")
async def admission(stage: Stage) -> None:
    """Preference, Allocate, PreStartContainer; a device on two NUMA nodes is in both lists."""
    await stage.plugin(A, device("b", nodes=[0, 1]), C)
    await stage.run(one("one"), "one runs")
    await stage.run(one("two", 2), "two runs")
    await stage.ask("asked")
    await stage.run(one("three"), "three is refused")


@writes("""
     | one runs: options x; prefer x a,b,c,d for 1; allocate x a;
     |   prefer x a,b,c,d with a for 2; allocate x a,b; prestart x a; prestart x a,b;
     |   file one/main=x:a,b one/setup=x:a | x:a,b,c,d; cgroups one
     | two runs: prefer x c,d for 1; allocate x c; prefer x d for 1; allocate x d;
     |   prestart x c; prestart x d;
     |   file one/main=x:a,b one/setup=x:a two/main=x:d two/setup=x:c | x:a,b,c,d;
     |   cgroups one two
     | asked: List names one/main=x:a,x:b two/main=x:d two/setup=x:c
""")
async def init_containers(stage: Stage) -> None:
    """The next container gets the same devices, by another Allocate, unless it is restartable."""
    await stage.plugin(A, B, C, D)
    await stage.run(with_init("one", 2), "one runs")
    await stage.run(
        Wish("two", [Part("setup", {"x": 1}, "restartable"), Part("main", {"x": 1})]), "two runs"
    )
    await stage.ask("asked")


@writes("""
     | registered: options x; options y; file - | x:a y:a
     |   one: UnexpectedAdmissionError: Allocate failed due to rpc error: code =
     |     FailedPrecondition desc = not now, which is unexpected
     | one is refused: prefer first a for 1; allocate first a; prefer second a for 1;
     |   allocate second a; file - | first:a second:a
     | a message: file one/main=first:a | first:a second:a
1.33 | asked: List names one/main=-
1.37 | asked: List names none
     | another message: file - | first:a second:a
""")
async def a_refused_second_resource(stage: Stage) -> None:
    """The answer of the first resource's plugin comes into the file with the next message."""
    plugins = [await stage.plugin(A, resource="x"), await stage.plugin(A, resource="y")]
    stage.note("registered")
    answers = itertools.count()
    for plugin in plugins:
        plugin.refuses = lambda method: method == "Allocate" and next(answers) == 1
    await stage.run(Wish("one", [Part("main", {"x": 1, "y": 1})]))
    stage.record.call_by_order("first", "second")
    stage.note("one is refused")
    await stage.send(plugins[0], "a message")
    await stage.ask("asked")
    await stage.send(plugins[0], "another message")


@writes("""
     |   one: CreateContainerConfigError: device plugin PreStartContainer rpc failed with err:
     |     rpc error: code = FailedPrecondition desc = not now
     | one runs: options x; prefer x a,b for 1; allocate x a; prestart x a; prestart x a;
     |   prestart x a; file one/main=x:a | x:a,b; cgroups one
""")
async def a_refused_start(stage: Stage) -> None:
    """PreStartContainer is tried again until it is granted; the pod keeps what it has."""
    plugin = await stage.plugin(A, B)
    refusals = itertools.count()
    plugin.refuses = lambda method: method == "PreStartContainer" and next(refusals) < 2
    await stage.create(one("one"))
    await stage.settled("one", but=("", "running"))
    await stage.until_state("one", lambda state: state == "running")
    stage.note("one runs")


# -- The end of a pod
@writes("""
     | one and two run: options x; prefer x a,b for 1; allocate x a; prestart x a;
     |   prefer x b for 1; allocate x b; prestart x b; file one/main=x:a two/main=x:b | x:a,b;
     |   cgroups one two
     | one is complete: file one/main=x:a two/main=x:b | x:a,b; cgroups two
     | a message: file one/main=x:a two/main=x:b | x:a,b; cgroups two
1.33 | asked: List names one/main=- two/main=x:b
1.37 | asked: List names two/main=x:b
     | another message: file two/main=x:b | x:a,b; cgroups two
     | three runs, and List was not asked: prefer x a,b for 1; allocate x a; prestart x a;
     |   file three/main=x:a | x:a,b; cgroups three
""")
async def orderly_deletion(stage: Stage) -> None:
    """A pod that has ended is forgotten when List asks; the file follows with the next message."""
    plugin = await stage.plugin(A, B)
    await stage.run(one("one", once=True))
    await stage.run(one("two"), "one and two run")
    await stage.world.complete(stage.full("one"))
    stage.note("one is complete")
    await stage.send(plugin, "a message")
    await stage.ask("asked")
    await stage.send(plugin, "another message")
    await stage.delete("two")
    await stage.run(one("three"), "three runs, and List was not asked")


@writes("""
     | asked: List names one/main=x:a
     | one waits: options x; prefer x a for 1; allocate x a; prestart x a;
     |   file one/main=x:a | x:a; cgroups one
     | asked again: List names none
     | two waits: prefer x a for 1; allocate x a; prestart x a; file - | x:a; cgroups two
     | two is gone: file - | x:a
""")
async def deletion_during_a_start(stage: Stage) -> None:
    """PreStartContainer is not cancelled: the pod stays until it has returned, forced or not."""
    plugin = await stage.plugin(A)
    plugin.grants.clear()
    await stage.create(one("one"))
    await stage.called("prestart", 1)
    await stage.world.delete(stage.full("one"))
    await stage.ask("asked")
    await stage.send(plugin, "one waits")
    plugin.grants.set()
    await stage.gone("one")
    plugin.grants.clear()
    await stage.create(one("two"))
    await stage.called("prestart", 1)
    await stage.force_delete("two")
    await stage.ask("asked again")
    await stage.send(plugin, "two waits")
    plugin.grants.set()
    await stage.gone("two")
    stage.note("two is gone")


@writes("""
     | both run: options x; prefer x a,b for 1; allocate x a; prestart x a; prefer x b for 1;
     |   allocate x b; prestart x b; file one/main=x:a static/main=x:b | x:a,b;
     |   cgroups one static
     | asked: List names none
     | a message: file - | x:a,b; cgroups one static
     | two runs: prefer x a,b for 1; allocate x a; prestart x a; file two/main=x:a | x:a,b;
     |   cgroups one static two
     | both have ended: file two/main=x:a | x:a,b; cgroups two
""")
async def forced_deletion(stage: Stage) -> None:
    """Devices go to other pods while containers run on; so they do if a manifest is removed."""
    plugin = await stage.plugin(A, B)
    await stage.run(one("one", stubborn=True))
    await stage.run(one("static", static=True, stubborn=True), "both run")
    await stage.force_delete("one")
    await stage.force_delete("static")
    await stage.ask("asked")
    await stage.send(plugin, "a message")
    await stage.run(one("two"), "two runs")
    await stage.gone("one")
    await stage.gone("static")
    stage.note("both have ended")


# -- The kubelet restarts
@writes("""
     | all run: options x; prefer x a,b,c for 1; allocate x a; prestart x a;
     |   prefer x b,c for 1; allocate x b; prestart x b; prefer x c for 1; allocate x c;
     |   allocate x c; prestart x c; prestart x c;
     |   file api/main=x:a init/main=x:c init/setup=x:c static/main=x:b | x:a,b,c;
     |   cgroups api init static
     | it is down: file api/main=x:a init/main=x:c init/setup=x:c static/main=x:b | x:a,b,c;
     |   cgroups api init static
     | it is up: options x;
     |   file api/main=x:a init/main=x:c init/setup=x:c static/main=x:b | x:a,b,c;
     |   cgroups api init static
     | asked: List names api/main=x:a init/main=x:c static/main=x:b
     | api started again: prestart x a;
     |   file api/main=x:a init/main=x:c init/setup=x:c static/main=x:b | x:a,b,c;
     |   cgroups api init static
""")
async def a_restart(stage: Stage) -> None:
    """Pods run on and keep their devices, without a call; also those of ended init containers."""
    plugin = await stage.plugin(A, B, C)
    await stage.run(one("api"))
    await stage.run(one("static", static=True))
    await stage.run(with_init("init"), "all run")
    await stage.world.stop()
    stage.note("it is down")
    await stage.start(plugin)
    await stage.world.heard_of_all()
    await stage.settled("init")
    stage.note("it is up")
    await stage.ask("asked")
    await stage.crash("api", note="api started again")


@writes("""
     | both run: options x; prefer x a,b for 1; allocate x a; prestart x a; prefer x b for 1;
     |   allocate x b; allocate x b; prestart x b; prestart x b;
     |   file one/main=x:a two/main=x:b two/setup=x:b | x:a,b; cgroups one two
     |   two: UnexpectedAdmissionError: Allocate failed due to no healthy devices present;
     |     cannot allocate unhealthy devices x, which is unexpected
     | it is up: file one/main=x:a two/main=x:b two/setup=x:b | x:a,b; cgroups one
""")
async def a_restart_without_the_plugin(stage: Stage) -> None:
    """A pod that runs is left alone; one whose init container has ended is killed."""
    plugin = await stage.plugin(A, B)
    await stage.run(one("one"))
    await stage.run(with_init("two"), "both run")
    await stage.world.stop()
    await plugin.stop()
    await stage.start()
    await stage.world.heard_of_all()
    await stage.settled("one")
    await stage.settled("two", but=("", "running", "done"))
    await stage.world.gone(stage.full("two"))
    stage.note("it is up")


@writes("""
     | all run: options x; prefer x a,b,c for 1; allocate x a; prestart x a;
     |   prefer x b,c for 1; allocate x b; prestart x b; prefer x c for 1; allocate x c;
     |   prestart x c; file gone/main=x:a static/main=x:c stays/main=x:b | x:a,b,c;
     |   cgroups gone static stays
     | it is up: options x; file gone/main=x:a static/main=x:c stays/main=x:b | x:a,b,c;
     |   cgroups gone static stays
     | asked: List names static/main=x:c
     | a message: file gone/main=x:a static/main=x:c stays/main=x:b | x:a,b,c;
     |   cgroups gone static stays
     | asked again: List names static/main=x:c stays/main=x:b
     | another message: file static/main=x:c stays/main=x:b | x:a,b,c; cgroups static stays
""")
async def a_restart_without_the_api_server(stage: Stage) -> None:
    """No pod is forgotten, and List names static pods only, until the API server is back."""
    plugin = await stage.plugin(A, B, C)
    await stage.run(one("gone", stubborn=True))
    await stage.run(one("stays"))
    await stage.run(one("static", static=True), "all run")
    await stage.world.stop()
    await stage.force_delete("gone")
    await stage.world.api_server_away()
    await stage.start(plugin)
    await stage.world.uid(stage.full("static"))
    stage.note("it is up")
    await stage.ask("asked")
    await stage.send(plugin, "a message")
    await stage.world.api_server_back()
    await stage.world.heard_of_all()
    await stage.ask("asked again")
    await stage.send(plugin)
    await stage.gone("gone")
    stage.note("another message")


@writes("""
     | it is up: options x; prefer x a,b,c for 1; allocate x a; prestart x a;
     |   prefer x b,c for 1; allocate x b; prestart x b; options x; file - | x:a,b,c;
     |   cgroups one two
     | three runs: prefer x a,b,c for 1; allocate x a; prestart x a;
     |   file three/main=x:a | x:a,b,c; cgroups one three two
     |   four: OutOfx: Node didn't have enough resource: x, requested: 1, used: 3, capacity: 3
     | four is refused: prefer x b,c for 1; allocate x b;
     |   file four/main=x:b three/main=x:a | x:a,b,c; cgroups one three two
     |   one: CreateContainerConfigError: no devices found allocated in local cache for pod
     |     <one>, container main, resource x
     | one has crashed: file four/main=x:b three/main=x:a | x:a,b,c; cgroups one three two
""")
async def a_deleted_file(stage: Stage) -> None:
    """Pods run on; their devices go to others as well, and a container that ends cannot return."""
    plugin = await stage.plugin(A, B, C)
    await stage.run(one("one"))
    await stage.run(one("two"))
    await stage.restart(plugin, file=b"", note="it is up")
    await stage.run(one("three"), "three runs")
    await stage.run(one("four"), "four is refused")
    await stage.world.crash(stage.full("one"), "main")
    await stage.settled("one", but=("", "running"))
    stage.note("one has crashed")


@writes("""
     |   deleted-1: OutOfdeleted: Node didn't have enough resource: deleted, requested: 1,
     |     used: 0, capacity: 0
     |   deleted-2: OutOfdeleted: Node didn't have enough resource: deleted, requested: 1,
     |     used: 0, capacity: 0
     | deleted: options deleted; prefer deleted a,b for 1; allocate deleted a;
     |   prestart deleted a; prefer deleted b for 1; allocate deleted b; prestart deleted b;
     |   options deleted; file - | deleted:-
     |   garbled-1: OutOfgarbled: Node didn't have enough resource: garbled, requested: 1,
     |     used: 0, capacity: 0
     |   garbled-2: OutOfgarbled: Node didn't have enough resource: garbled, requested: 1,
     |     used: 0, capacity: 0
     | garbled: options garbled; prefer garbled a,b for 1; allocate garbled a;
     |   prestart garbled a; prefer garbled b for 1; allocate garbled b; prestart garbled b;
     |   options deleted; options garbled; file - | deleted:- garbled:-
""")
async def a_lost_file_and_unhealthy_devices(stage: Stage) -> None:
    """Running pods are killed if there is no healthy device for them."""
    for what, file in {"deleted": b"", "garbled": b"garbage"}.items():
        plugin = await stage.plugin(A, B, resource=what)
        pods = [f"{what}-1", f"{what}-2"]
        for pod in pods:
            await stage.run(Wish(pod, [Part("main", {what: 1})]))
        await stage.restart(plugin, device("a", "Unhealthy"), device("b", "Unhealthy"), file=file)
        for pod in pods:
            await stage.settled(pod, but=("", "running"))
            await stage.world.gone(stage.full(pod))
        stage.note(what)
        for pod in pods:
            await stage.delete(pod)


@writes("""
     | it is up: options x; prefer x a,b for 1; allocate x a; prestart x a; prefer x b for 1;
     |   allocate x b; prestart x b; options x; file one/main=x:a two/main=x:b | x:-;
     |   cgroups one two
     | both started again: prestart x b; file one/main=x:a two/main=x:b | x:-; cgroups one two
""")
async def an_intact_file_and_missing_devices(stage: Stage) -> None:
    """Pods run on, and containers start again, though devices are unhealthy or not listed."""
    plugin = await stage.plugin(A, B)
    await stage.run(one("one"))
    await stage.run(one("two"))
    await stage.restart(plugin, device("a", "Unhealthy"), note="it is up")
    await stage.crash("one")
    await stage.crash("two", note="both started again")


@writes("""
     | one runs: options x; prefer x a,b for 1; allocate x a; allocate x a; prestart x a;
     |   prestart x a; file one/main=x:a one/setup=x:a | x:a,b; cgroups one
     | the power is cut: file one/main=x:a one/setup=x:a | x:a,b
     | one runs again: options x; prestart x a; prestart x a;
     |   file one/main=x:a one/setup=x:a | x:a,b; cgroups one
""")
async def a_reboot(stage: Stage) -> None:
    """Pods keep their devices, without Allocate; init containers run again."""
    plugin = await stage.plugin(A, B)
    await stage.run(with_init("one"), "one runs")
    await stage.world.stop()
    await stage.world.cut_power()
    stage.note("the power is cut")
    await stage.start(plugin)
    await stage.called("prestart", 2)
    await stage.settled("one")
    stage.note("one runs again")


@writes("""
     | one runs: options x; prefer x a for 1; allocate x a; prestart x a;
     |   file one/main=x:a | x:a; cgroups one
     |   one: UnexpectedAdmissionError: Allocate failed due to no healthy devices present;
     |     cannot allocate unhealthy devices x, which is unexpected
     | one is refused: file one/main=x:a | x:a
     | two runs: options x; prefer x a for 1; allocate x a; prestart x a;
     |   file two/main=x:a | x:a; cgroups two
""")
async def a_reboot_with_a_late_plugin(stage: Stage) -> None:
    """Pods that come before the plugin has registered are refused, and their devices free."""
    plugin = await stage.plugin(A)
    await stage.run(one("one"), "one runs")
    await stage.world.stop()
    await stage.world.cut_power()
    await plugin.stop()
    await stage.start()
    await stage.world.heard_of_all()
    await stage.settled("one", but=("", "running"))
    stage.note("one is refused")
    await stage.delete("one")
    await stage.register(plugin)
    await stage.run(one("two"), "two runs")


# -- Topology
@writes("""
     | one runs: options x; prefer x a,b for 1; allocate x a; prestart x a;
     |   file one/main=x:a@0 | x:a,b; cgroups one
     | listed as Unhealthy: options x; file one/main=x:a@0 | x:b; cgroups one
1.33 | not listed: it lives
1.37 | not listed: it dies
     | listed again: options x; options x; file one/main=x:a@0 | x:a,b; cgroups one
""")
async def an_id_that_is_not_listed(stage: Stage) -> None:
    """A kubelet with a Topology Manager crashes at its start, but not if the ID is Unhealthy."""
    both = [device("a", nodes=[0]), device("b", nodes=[1])]
    plugin = await stage.plugin(*both)
    await stage.run(one("one"), "one runs")
    await stage.world.stop()
    await stage.world.api_server_away()
    plugin.devices = [device("a", "Unhealthy", nodes=[0]), device("b", nodes=[1])]
    await stage.start(plugin, policy="best-effort")
    await stage.world.api_server_back()
    await stage.world.heard_of_all()
    stage.note("listed as Unhealthy")
    await stage.world.stop()
    await stage.world.api_server_away()
    plugin.devices = [device("b", nodes=[1])]
    await stage.start(plugin)
    await stage.world.api_server_back()
    died = await stage.world.dead()
    stage.record.lines.append(f"not listed: {'it dies' if died else 'it lives'}")
    await stage.world.stop()
    plugin.devices = both
    await stage.start(plugin, policy="none")
    await stage.world.heard_of_all()
    await stage.settled("one")
    stage.note("listed again")


# -- Others
@writes("""
     | the second has registered: options x; options x of two; file - | x:c,d
     | the first sends its list: file - | x:a,b
     | one runs: prefer x a,b for 1 of two; allocate x a of two; prestart x a of two;
     |   file one/main=x:a | x:a,b; cgroups one
1.33 |   two: UnexpectedAdmissionError: Allocate failed due to no healthy devices present;
1.33 |     cannot allocate unhealthy devices x, which is unexpected
1.33 | the second is gone: file one/main=x:a | x:a,b; cgroups one
1.37 | the second is gone: prefer x b for 1; allocate x b; prestart x b;
1.37 |   file one/main=x:a two/main=x:b | x:a,b; cgroups one two
""")
async def a_second_plugin(stage: Stage) -> None:
    """The latest plugin is called with the IDs of the latest list; its end is not written."""
    first = await stage.plugin(A, B)
    second = await stage.plugin(C, D, alias="two")
    stage.note("the second has registered")
    await stage.send(first, "the first sends its list")
    await stage.run(one("one"), "one runs")
    await stage.stop(second)
    await stage.run(one("two"), "the second is gone")
