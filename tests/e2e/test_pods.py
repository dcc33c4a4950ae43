"""Real kubelets and the daemon: pods get their devices, and keep them through a reboot.

Kubelets of several versions, containerd and runc are real, and so are the device nodes; only the
cards are simulated.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.e2e.conftest import Results, Row
from tests.e2e.machine import VERSIONS
from tests.e2e.node import (
    OPENABLE,
    RUNNING,
    Daemon,
    Node,
    Outcome,
    Program,
    Race,
    race,
)
from tests.world.node import Chip
from tests.world.processes import percentile, wait_until

N300, P300, GALAXY = (
    "tenstorrent.com/n300",
    "tenstorrent.com/p300",
    "tenstorrent.com/galaxy-blackhole",
)


def ids(chips: list[Chip]) -> set[str]:
    return {chip.bdf for chip in chips}


# --- Devices and pods -----------------------------------------------------------------------------


def test_registers_every_resource(node: Node) -> None:
    """By the kubelet's account capacity and allocatable are the node's devices."""
    cards = {
        "tenstorrent.com/n150": ids(node.cards.add("n150")),
        N300: ids([*node.cards.add("n300"), *node.cards.add("n300")]),
        "tenstorrent.com/p150": ids(node.cards.add("p150a")),
        P300: ids(node.cards.add("p300c")),
    }
    node.start_daemon()
    assert {resource: node.kubelet.allocatable(resource) for resource in cards} == cards
    assert {resource: node.kubelet.capacity(resource) for resource in cards} == {
        r: len(c) for r, c in cards.items()
    }
    checkpoint = json.loads(
        (node.kubelet.device_plugin_dir / "kubelet_internal_checkpoint").read_text()
    )
    registered = checkpoint["Data"]["RegisteredDevices"]
    assert {resource: set(registered[resource]) for resource in cards} == cards


@pytest.mark.parametrize("version", VERSIONS)
def test_node_status_counts_devices(program: Program, version: str) -> None:
    """In the node's status a chip that dies stays in capacity and leaves allocatable."""
    with Node(
        version, program, static_pods=False, config={"nodeStatusUpdateFrequency": "1s"}
    ) as node:
        chips = [*node.cards.add("n300"), *node.cards.add("n300"), *node.cards.add("p300c")]
        node.start_daemon(interval=0.2)
        node.wait_status({N300: (2, 2), P300: (2, 2)})
        chips[0].die()
        node.wait_status({N300: (2, 1), P300: (2, 2)})
        chips[0].revive()
        node.wait_status({N300: (2, 2), P300: (2, 2)})


def test_pod_gets_exactly_its_device(node: Node) -> None:
    """A container can open the node that it asked for and no other, not even one that it makes."""
    for _ in range(3):
        node.cards.add("n300")
    node.start_daemon()
    names = [node.run({N300: 1}) for _ in range(3)]
    for name in names:
        node.kubelet.wait_running(name)
        (bdf,) = node.devices(N300, name)
        ordinal = node.cards.chip(bdf).ordinal
        own = node.host_number(bdf)
        assert node.inside(name, "ls", "-A", "/dev/tenstorrent").stdout.split() == [str(ordinal)]
        assert node.number_inside(name, f"/dev/tenstorrent/{ordinal}") == own
        assert node.open_inside(name, f"/dev/tenstorrent/{ordinal}") == "opened"
        assert node.access(name, own) == "rw"
        for number in (
            OPENABLE
        ):  # made by the container: its own device, the other cards', another one of the host
            expected = "opened" if number == own else "Operation not permitted"
            assert node.make_and_open_inside(name, number) == expected


def test_pod_gets_the_environment(node: Node) -> None:
    """The environment names the devices by PCI address; nothing else of ours is in it."""
    node.cards.add("n300")
    node.cards.add("n300")
    node.cards.add("n300")
    node.start_daemon()
    for count in (2, 1):
        name = node.started({N300: count})
        bdfs = ",".join(sorted(node.devices(N300, name)))
        ours = {
            key: value for key, value in node.environment(name).items() if key.startswith("TT_")
        }
        assert ours == {"TT_VISIBLE_DEVICES": bdfs, "TT_DEVICE_PLUGIN_DEVICES": bdfs}


def test_unprivileged_container_opens_its_device(node: Node) -> None:
    """A container that does not run as root can open its device."""
    node.cards.add("n300")
    node.start_daemon()
    name = node.started({N300: 1}, user=1000)
    assert node.inside(name, "id", "-u").stdout.strip() == "1000"
    assert node.open_inside(name, "/dev/tenstorrent/0") == "opened"


def test_hugepages_are_mounted_where_the_host_has_them(node: Node) -> None:
    """A pod gets the host's hugetlbfs once there is one, and no mount before."""
    node.cards.add("n300")
    node.cards.add("n300")
    node.start_daemon()
    without = node.started({N300: 1})
    node.cards.set_hugepages(4)
    for directory in (
        "hugepages",
        "hugepages-1G",
    ):  # only that of the default page size is sure to be had
        source = (
            ["-t", "hugetlbfs", "none"]
            if directory == "hugepages"
            else ["--bind", str(node.cards.root / "dev")]
        )
        done = node.machine.run(["mount", *source, str(node.cards.root / "dev" / directory)])
        assert done.returncode == 0, done.stderr
    with_pages = node.started({N300: 1})

    def mounted(name: str) -> set[str]:
        lines = node.inside(name, "cat", "/proc/mounts").stdout.splitlines()
        return {line.split()[1] for line in lines if line.split()[1].startswith("/dev/hugepages")}

    assert mounted(without) == set()
    assert mounted(with_pages) == {"/dev/hugepages", "/dev/hugepages-1G"}
    assert " /dev/hugepages hugetlbfs rw" in node.inside(with_pages, "cat", "/proc/mounts").stdout


def test_pods_never_share_a_device(node: Node) -> None:
    """Pods and containers have devices of their own; where there are no more a pod is refused."""
    cards = [chip for _ in range(5) for chip in node.cards.add("n300")]
    node.start_daemon()
    one, other, pair = node.run({N300: 1}), node.run({N300: 2}), node.run({N300: 1}, containers=2)
    for name in (one, other, pair):
        node.kubelet.wait_running(name)
    assigned = node.kubelet.assigned(N300)
    assert {place: len(devices) for place, devices in assigned.items()} == {
        (one, "main"): 1,
        (other, "main"): 2,
        (pair, "main"): 1,
        (pair, "main-1"): 1,
    }
    assert set().union(*assigned.values()) == ids(cards)  # five different ones
    for (name, container), devices in assigned.items():
        nodes = node.inside(
            name, "ls", "-A", "/dev/tenstorrent", container=container
        ).stdout.split()
        assert {int(n) for n in nodes} == {node.cards.chip(bdf).ordinal for bdf in devices}

    refused = node.kubelet.wait_rejected(node.run({N300: 1}))
    assert "Requested: 1, Available: 0" in refused


def test_pod_that_asks_for_too_much_is_refused(node: Node) -> None:
    """The kubelet refuses a pod that wants more devices than there are, in its own words."""
    node.cards.add("n300")
    node.cards.add("n300")
    node.start_daemon()
    refused = node.kubelet.wait_rejected(node.run({N300: 3}))
    assert refused.startswith("UnexpectedAdmissionError: Pod was rejected: Allocate failed due to ")
    assert (
        f"requested number of devices unavailable for {N300}. Requested: 3, Available: 2" in refused
    )
    assert node.outcome(node.run({N300: 2})) == RUNNING


def test_two_p300_chips_are_of_one_board(node: Node) -> None:
    """A pod with two p300 chips gets both of one board, though another's single one comes first."""
    boards = [ids(node.cards.add("p300c")) for _ in range(3)]
    node.start_daemon()
    single = node.devices(P300, node.started({P300: 1}))
    assert single < boards[0]
    pairs = [node.devices(P300, node.started({P300: 2})) for _ in range(2)]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, boards[1:]))


def test_eight_of_a_galaxy_are_one_tray(node: Node) -> None:
    """Pods with eight chips of a Galaxy get a tray each, but not the one that is broken into."""
    chips = node.cards.add("galaxy-blackhole")
    node.start_daemon()
    assert len(node.kubelet.allocatable(GALAXY)) == 32
    trays: dict[int, set[str]] = {}
    for chip in chips:
        trays.setdefault(int(chip.bdf.split(":")[1], 16) >> 4, set()).add(chip.bdf)
    single = node.devices(GALAXY, node.started({GALAXY: 1}))
    whole = [tray for tray in trays.values() if not single <= tray]
    eights = [node.run({GALAXY: 8}) for _ in range(3)]
    for name in eights:
        node.kubelet.wait_running(name)
    assert sorted(sorted(node.devices(GALAXY, name)) for name in eights) == sorted(
        map(sorted, whole)
    )
    assert len(node.inside(eights[0], "ls", "-A", "/dev/tenstorrent").stdout.split()) == 8


def test_single_numa_node(node: Node) -> None:
    """Under `single-numa-node` two chips are of one NUMA node, or the pod is refused."""
    near = [chip.bdf for _ in range(3) for chip in node.cards.add("n300", numa_node=0)]
    far = [chip.bdf for chip in node.cards.add("n300", numa_node=1)]
    node.kubelet.stop()
    node.kubelet.configure(topologyManagerPolicy="single-numa-node")
    try:
        node.kubelet.start()
        node.start_daemon()
        first = node.devices(N300, node.started({N300: 2}))
        assert len(first) == 2 and first < set(near)
        # Two are free: one here, one there.
        refused = node.kubelet.wait_rejected(node.run({N300: 2}))
        assert refused.startswith("TopologyAffinityError: Pod was rejected: Resources cannot be")
        last = [node.devices(N300, node.started({N300: 1})) for _ in range(2)]
        assert set().union(*last) == {*near, *far} - first
    finally:
        node.kubelet.stop()
        node.kubelet.configure(topologyManagerPolicy="none")
        node.kubelet.start()


# --- Faults and restarts --------------------------------------------------------------------------


def test_device_fails_and_recovers(node: Node, results: Results) -> None:
    """A chip that dies leaves allocatable, not capacity; its pod runs on; it comes back."""
    chips = [chip for _ in range(3) for chip in node.cards.add("n300")]
    node.start_daemon(interval=0.2)
    name = node.started({N300: 1})
    before = node.containers(name)
    (mine,) = node.devices(N300, name)
    delays = []
    for chip in sorted(chips, key=lambda chip: chip.bdf == mine):  # the pod's own comes last
        healthy = node.kubelet.allocatable(N300) - {chip.bdf}
        died = time.time()
        chip.die()
        node.kubelet.wait_allocatable(N300, healthy)
        last, _ = node.kubelet.logged(
            f'"Processed device updates for resource" resourceName="{N300}"'
        )[-1]
        delays.append(last - died)
        node.kubelet.wait_capacity(N300, 3)
    assert max(delays) < 2
    assert "no healthy devices present" in node.kubelet.wait_rejected(node.run({N300: 1}))
    assert node.kubelet.running(name) and node.containers(name) == before

    for chip in chips:
        chip.revive()
    node.kubelet.wait_allocatable(N300, ids(chips))
    assert node.kubelet.running(name) and node.containers(name) == before
    assert node.outcome(node.run({N300: 2})) == RUNNING
    results.add(
        "From a chip's death to its leaving allocatable, polls 0.2 s apart",
        {
            "kubelet": node.version,
            "median s": f"{statistics.median(delays):.2f}",
            "longest s": f"{max(delays):.2f}",
        },
    )


def restarted(daemon: Daemon) -> None:
    daemon.stop()


def upgraded(daemon: Daemon) -> None:
    daemon.install()  # dpkg replaces the file under the running daemon, then systemd restarts it
    daemon.stop()


def killed(daemon: Daemon) -> None:
    daemon.kill()


@pytest.mark.parametrize("ended", [restarted, upgraded, killed])
def test_daemon_ends_and_starts(
    node: Node, results: Results, ended: Callable[[Daemon], None]
) -> None:
    """While the daemon is restarted, upgraded or killed pods run on; after it new ones do, too."""
    cards = [chip for _ in range(3) for chip in node.cards.add("n300")]
    node.start_daemon()
    old = node.started({N300: 1})
    before = node.containers(old)
    held = node.devices(N300, old)

    ended(node.daemon)
    node.kubelet.wait_allocatable(N300, set())
    node.kubelet.wait_capacity(N300, 3)
    began = time.monotonic()
    node.daemon.start()
    node.kubelet.wait_allocatable(N300, ids(cards))
    allocatable = time.monotonic()
    new = node.started({N300: 2})
    seconds = {
        "allocatable after s": allocatable - began,
        "new pod runs after s": time.monotonic() - began,
    }

    assert max(seconds.values()) < 10
    assert node.kubelet.running(old) and node.containers(old) == before
    assert node.devices(N300, old) == held and node.devices(N300, new) == ids(cards) - held
    results.add(
        "The daemon ends and starts, pods run on",
        {"kubelet": node.version, "daemon": ended.__name__}
        | {k: f"{v:.1f}" for k, v in seconds.items()},
    )


# --- Which chip, after a renumbering --------------------------------------------------------------


def test_restarted_container_keeps_its_chip(node: Node) -> None:
    """A container that crashes after a renumbering is made again with the chip that it had."""
    bdfs = [chip.bdf for _ in range(2) for chip in node.cards.add("n300")]
    node.start_daemon(interval=0.2)
    name = node.started({N300: 1})
    (mine,) = node.devices(N300, name)
    path, number = f"/dev/tenstorrent/{node.cards.chip(mine).ordinal}", node.host_number(mine)
    before = node.containers(name)

    node.cards.swap_ordinals(*bdfs)
    node.kubelet.wait_allocatable(N300, set(bdfs))
    node.containerd.ctr("tasks", "kill", "--signal", "SIGKILL", node.kubelet.container_id(name))
    wait_until(
        lambda: node.kubelet.running(name) and node.containers(name) != before,
        "another container",
        30,
    )
    assert node.number_inside(name, path) == node.host_number(mine) != number
    assert node.open_inside(name, path) == "opened"


# --- A driver that comes late ---------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_reboot_with_a_driver_that_takes_its_time(program: Program, version: str) -> None:
    """The daemon, and so the kubelet, waits for a driver that is loading: no pod is lost."""
    with Node(version, program, static_pods=False) as node:
        chips = [chip for _ in range(4) for chip in node.cards.add("n300")]
        node.start_daemon()
        names = start_device_pods(node)
        held = node.kubelet.assigned(N300)

        def bind() -> None:
            for chip in chips:
                time.sleep(1)  # this is what is tried, nothing is waited for
                node.cards.probe(chip.bdf)

        with ThreadPoolExecutor() as meanwhile:

            def unload() -> None:
                node.daemon.starting = lambda: meanwhile.submit(bind)
                node.cards.unload_driver()
                node.cards.load_driver(probe=False)

            node.reboot(while_off=unload)
        assert [node.outcome(name) for name in names] == [RUNNING] * len(names)
        assert node.kubelet.assigned(N300) == held


@pytest.mark.parametrize("pods", ["static", "of an API server"])
@pytest.mark.parametrize("version", VERSIONS)
def test_reboot_with_a_driver_that_is_loaded_after_the_kubelet(
    program: Program, version: str, pods: str
) -> None:
    """Nobody waits for a driver that is not being loaded; its devices come with it.

    Static pods run again when the kubelet is restarted; an API server's have failed for good.
    """
    with Node(version, program, static_pods=pods == "static") as node:
        chips = [chip for _ in range(4) for chip in node.cards.add("n300")]
        node.start_daemon(interval=0.2)
        names = start_device_pods(node)
        node.reboot(while_off=node.cards.unload_driver)
        assert {node.outcome(name) for name in names} == {REFUSED}
        node.cards.load_driver()
        node.kubelet.wait_allocatable(N300, ids(chips))
        node.kubelet.stop()
        node.kubelet.start()
        node.kubelet.wait_allocatable(N300, ids(chips))
        if node.api:
            assert {node.outcome(name) for name in names} == {REFUSED}
            # Just started, the kubelet counts what refused pods had as in use for a moment.
            wait_until(lambda: node.outcome(node.run({N300: 4})) == RUNNING, "a pod to run", 60)
        else:
            node.assert_admitted(names)


# --- Reboots --------------------------------------------------------------------------------------

REBOOTS = int(os.environ.get("REBOOTS", "6"))  # of each kind; README.md's table is of 20
LATE = 5.0  # seconds
CARDS = 6
DEVICE_PODS = ((1, 1), (1, 1), (2, 2))  # chips and containers
REFUSED = (
    "UnexpectedAdmissionError: Pod was rejected: Allocate failed due to "
    f"no healthy devices present; cannot allocate unhealthy devices {N300}, which is unexpected"
)


@dataclass
class Reboots:
    """What became of a node's device pods, reboot by reboot, and how the kubelet's start went."""

    outcomes: list[list[Outcome]] = field(default_factory=list)
    races: list[Race] = field(default_factory=list)

    def __add__(self, other: Reboots) -> Reboots:
        return Reboots(self.outcomes + other.outcomes, self.races + other.races)

    @property
    def survived(self) -> int:
        """Reboots after which every device pod was admitted."""
        return sum(set(outcomes) == {RUNNING} for outcomes in self.outcomes)

    def row(self, version: str, pods: str, daemon: str) -> Row:
        all_outcomes = [outcome for outcomes in self.outcomes for outcome in outcomes]
        return {
            "kubelet": version,
            "pods": pods,
            "daemon starts": daemon,
            "reboots with every pod admitted": f"{self.survived} of {len(self.outcomes)}",
            "pods admitted": f"{all_outcomes.count(RUNNING)} of {len(all_outcomes)}",
            "devices there, ms after kubelet.sock": _range(
                [race.allocatable for race in self.races]
            ),
            "first pod's admission": _range([race.admission for race in self.races]),
            "the others' fate": " / ".join(sorted({*all_outcomes} - {RUNNING})) or "-",
        }


def _range(seconds: list[float]) -> str:
    return f"{min(seconds) * 1000:.0f} to {max(seconds) * 1000:.0f}"


def start_device_pods(node: Node) -> list[str]:
    """Return pods that run; right after others were refused that takes a few seconds."""

    def attempt() -> list[str] | None:
        names = []
        for chips, containers in DEVICE_PODS:
            names.append(node.run({N300: chips // containers}, containers=containers))
        outcomes = [node.outcome(name) for name in names]
        if set(outcomes) == {RUNNING}:
            return names
        node.withdraw(*names)
        return None

    return wait_until(attempt, "pods with devices to run", 60)


def rebooted(
    version: str, program: Program, times: int, *, static_pods: bool, late: float | None
) -> Reboots:
    """Reboot a node so often; its device pods stay the same for as long as they are admitted."""
    done = Reboots()
    with Node(version, program, static_pods=static_pods) as node:
        for _ in range(CARDS):
            node.cards.add("n300")
        node.start_daemon()
        names: list[str] = []
        for _ in range(times):
            names = names or start_device_pods(node)
            held = node.kubelet.assigned(N300)
            node.reboot(daemon_late_by=late)
            node.wait_complete()  # from now on nothing speaks against any pod
            outcomes = [node.outcome(name) for name in names]
            done.outcomes.append(outcomes)
            done.races.append(race(node.kubelet, N300, CARDS))
            if set(outcomes) == {RUNNING}:
                assert node.kubelet.assigned(N300) == held
            else:
                names = []  # a pod that was refused stays so
                node.withdraw()
    return done


@dataclass(frozen=True)
class RebootTable:
    """All of them, by version of the kubelet."""

    first: dict[str, Reboots]
    late: dict[str, Reboots]
    first_static: dict[str, Reboots]


@pytest.fixture(scope="session")
def reboots(program: Program, results: Results) -> RebootTable:
    """Reboot side by side where most of the time is waiting; where it is a race, no crowd."""

    def with_api(version: str, times: int, late: float | None) -> Reboots:
        return rebooted(version, program, times, static_pods=False, late=late)

    def side_by_side(versions: list[str], times: int, late: float | None) -> dict[str, Reboots]:
        done = {version: Reboots() for version in versions}
        with ThreadPoolExecutor(len(versions)) as threads:
            counts = [times] * len(versions)
            for version, part in zip(
                versions, threads.map(with_api, versions, counts, [late] * len(counts)), strict=True
            ):
                done[version] += part
        return done

    first = side_by_side(VERSIONS, REBOOTS, None)
    late = side_by_side(VERSIONS * 2, REBOOTS // 2, LATE)
    static = {
        version: rebooted(version, program, REBOOTS // 2, static_pods=True, late=None)
        for version in VERSIONS
    }
    title = f"Reboots with {len(DEVICE_PODS)} pods that hold devices"
    for version in VERSIONS:
        results.add(title, first[version].row(version, "of an API server", "before the kubelet"))
        results.add(title, late[version].row(version, "of an API server", f"{LATE:g} s after it"))
        results.add(title, static[version].row(version, "static", "before the kubelet"))
    return RebootTable(first, late, static)


@pytest.mark.parametrize("version", VERSIONS)
def test_reboot_with_the_daemon_first(reboots: RebootTable, version: str) -> None:
    """Started before the kubelet, as by systemd, the daemon costs no pod its life."""
    done = reboots.first[version]
    assert [
        outcome for outcomes in done.outcomes for outcome in outcomes if outcome != RUNNING
    ] == []
    assert done.survived == REBOOTS


@pytest.mark.parametrize("version", VERSIONS)
def test_reboot_with_the_daemon_late(reboots: RebootTable, version: str) -> None:
    """Started five seconds after the kubelet, as in a pod, it finds every device pod refused."""
    done = reboots.late[version]
    assert len(done.outcomes) == REBOOTS // 2 * 2
    assert {outcome for outcomes in done.outcomes for outcome in outcomes} == {REFUSED}


@pytest.mark.parametrize("version", VERSIONS)
def test_reboot_with_static_pods(reboots: RebootTable, version: str) -> None:
    """Static pods come within 100 ms of kubelet.sock, and are lost only if before the devices."""
    done = reboots.first_static[version]
    for outcomes, how in zip(done.outcomes, done.races, strict=True):
        assert set(outcomes) <= {RUNNING, REFUSED}
        assert outcomes[0] == RUNNING or how.admission < how.allocatable


# --- How fast -------------------------------------------------------------------------------------

RESTARTS = int(os.environ.get("RESTARTS", "20"))


@pytest.mark.parametrize("version", VERSIONS)
def test_allocatable_soon_after_a_kubelet_restart(
    program: Program, results: Results, version: str
) -> None:
    """From kubelet.sock to eight allocatable devices it takes milliseconds, at each restart."""
    with Node(version, program) as node:
        for _ in range(8):
            node.cards.add("n300")
        node.start_daemon()
        node.started({N300: 1})
        races, registered = [], []
        for _ in range(RESTARTS):
            node.kubelet.stop()
            node.kubelet.spawn()
            races.append(race(node.kubelet, N300, 8))
            request, _ = node.kubelet.logged('"Got registration request from device plugin')[0]
            registered.append(request - node.kubelet.socket_appeared())
        node.kubelet.wait_ready()
        assert len(node.kubelet.allocatable(N300)) == 8
    allocatable = [race.allocatable for race in races]
    results.add(
        f"From kubelet.sock to 8 allocatable devices, {RESTARTS} restarts of the kubelet, in ms",
        {
            "kubelet": version,
            "median": f"{statistics.median(allocatable) * 1000:.1f}",
            "p99": f"{percentile(allocatable, 99) * 1000:.1f}",
            "of that, until the daemon calls Register: median": (
                f"{statistics.median(registered) * 1000:.1f}"
            ),
        },
    )
    # A busy machine can hold up one of them; registrations that get lost would cost seconds.
    assert statistics.median(allocatable) < 0.5 and percentile(allocatable, 90) < 2
