"""A simulated node: sysfs, /dev and /proc of a machine with Tenstorrent cards, as a tree.

`SimulatedNode(root)` keeps `<root>/sys`, `<root>/dev` and `<root>/proc` as the real driver (tt-kmd)
and udev show them: same names, links, formats, order of appearance and kernel uevents;
tests.world.captures has what it is modelled on.

A plain tree cannot do all that the kernel does: for reads that fail or block see tests.world.tree.
A device node is a real character device where the process may make one ("mknod"); elsewhere it is a
symlink to /dev/null or one of its siblings ("link"), whose number sysfs's `dev` then repeats:
stat() agrees either way.

The state that files cannot tell is kept in `<root>/state.json` under a lock, so several processes
can work on one tree: `SimulatedNode.open(root)`, or by hand `python -m tests.world.node`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import json
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tests.world.captures import CONFIG_BYTES, PCI_ATTRIBUTES, SENSOR, capture
from tests.world.tree import link, put, put_errno, remove, remove_empty, replace

ALL_ONES = "4294967295"
DRIVER_MAJOR = 245  # dynamic in reality; the number of every capture

# The board's code: bits 36-51 of its serial, and the PCI subsystem device id.
CARDS = {
    "n300": 0x14, "n150": 0x18, "galaxy-wormhole": 0x35, "p100": 0x36, "p150a": 0x40,
    "p150b": 0x41, "p150c": 0x42, "p100a": 0x43,
    "p300b": 0x44, "p300a": 0x45, "p300c": 0x46, "galaxy-blackhole": 0x47,
}  # fmt: skip
ARCHITECTURES = {"0x401e": "wormhole", "0xb140": "blackhole"}
# First ordinal of a Galaxy tray by the high nibble of the bus number, a table in the driver (since
# 2.8).
GALAXY_ORDINALS = {
    "wormhole": {0xC: 0, 0x8: 8, 0x0: 16, 0x4: 24},
    "blackhole": {0x0: 0, 0x4: 8, 0xC: 16, 0x8: 24},
}
GALAXY_PROBE_ORDER = (0x0, 0xC, 0x8, 0x4)  # as the captured machine enumerated its root buses

# The release which brought an attribute; nothing listed here was in 1.34. Which architecture got
# tt_asic_id in 2.1 is not recorded, from 2.3 both had it. Blackhole's *_max were missing up to 2.5.
SINCE = {
    "tt_asic_id": (2, 3),
    "tt_heartbeat": (2, 7),
    "tt_therm_trip_count": (2, 7),
    "fan1_input": (2, 0),
    "fan1_label": (2, 0),
}
BLACKHOLE_MAX_SINCE = (2, 6)
COUNTERS_SINCE, PROC_SINCE, CHANGE_SINCE, GALAXY_SINCE, ENODATA_SINCE = (
    (2, 0),
    (2, 5),
    (2, 6),
    (2, 8),
    (2, 9),
)

# Link nodes borrow the numbers of these, which every machine and container has.
BORROWED = {(1, 3): "/dev/null", (1, 5): "/dev/zero", (1, 7): "/dev/full", (1, 8): "/dev/random",
            (1, 9): "/dev/urandom"}  # fmt: skip

Condition = Literal["healthy", "dead", "off-bus", "resetting", "lost"]


def wire(action: str, devpath: str, env: Mapping[str, str], seqnum: int) -> bytes:
    """A kernel uevent as it arrives: a header, then NUL-terminated assignments, SEQNUM last."""
    lines = [
        f"{action}@{devpath}",
        f"ACTION={action}",
        f"DEVPATH={devpath}",
        *(f"{k}={v}" for k, v in env.items()),
    ]
    return "".join(f"{line}\0" for line in [*lines, f"SEQNUM={seqnum}"]).encode()


def dead_value(name: str, healthy: str) -> str:
    """What an attribute reads when every register of the chip reads all ones.

    Captured for heartbeat, card type, ids, clock, versions, temp1_input and power1_input. The
    others follow from the same arithmetic (32 bits: mV as they are, mA and limits in thousandths),
    tt_eth_fw_ver from its bit fields 8.4.12.
    """
    if name.endswith("_label") or name == "name":
        return healthy
    special = {
        "tt_card_type": "unknown",
        "tt_serial": "F" * 16,
        "tt_asic_id": "F" * 16,
        "tt_eth_fw_ver": "255.15.4095",
        "temp1_input": "65535999",
        "temp1_max": "4294966296",
        "curr1_input": "4294966296",
        "curr1_max": "4294966296",
        "power1_input": "4293967296",
        "power1_max": "4293967296",
    }
    return special.get(name, "255.255.255.255" if name.endswith("_ver") else ALL_ONES)


# --------------------------------------------------------------------------------------------------
# The node
# --------------------------------------------------------------------------------------------------


@dataclass
class Function:
    """A PCI function in state.json: its place, what it shows while well, and what ails it."""

    path: str  # below /sys/devices: "pci0000:00/0000:00:02.0/0000:01:00.0"
    pci: dict[str, str]
    telemetry: dict[str, str]  # tt_*; the heartbeat's present value is in its file only
    counters: dict[str, str]  # pcie_perf_counters/*
    sensors: dict[str, str]  # hwmon
    firmware: bool = True  # ready when the driver looks
    condition: Condition = "healthy"
    frozen: bool = False
    present: bool = False  # on the PCI bus
    ordinal: int | None = None  # while the driver is bound
    hwmon: int | None = None  # while the driver shows telemetry
    iommu: tuple[int, str] | None = None  # group and its type
    other_driver: str | None = None  # such as "vfio-pci", while that is bound

    @property
    def bdf(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def arch(self) -> str:
        return ARCHITECTURES[self.pci["device"]]

    def uevent_environment(self) -> dict[str, str]:
        """What the kernel says of it in uevents and, after DRIVER, in its `uevent` file."""
        ids = {name: self.pci[name][2:].upper() for name in PCI_ATTRIBUTES[:5]}
        return {
            "PCI_CLASS": ids["class"].lstrip("0"),
            "PCI_ID": f"{ids['vendor']}:{ids['device']}",
            "PCI_SUBSYS_ID": f"{ids['subsystem_vendor']}:{ids['subsystem_device']}",
            "PCI_SLOT_NAME": self.bdf,
            "MODALIAS": self.pci["modalias"],
        }


class SimulatedNode:
    """A machine's device tree under `root`, and the operations that befall it.

    `driver` is a release of tt-kmd ("1.34" to "2.10.1-pre") and decides which attributes, events
    and links there are; unless `loaded=False` it is loaded. `numbers` are (major, minor) by ordinal
    where the default (245:N, or the borrowed ones of "link") will not do. `udev_rules=False`:
    without the driver's rules the node stays 0600 and there are no by-id links; `links=False`:
    without our package's rule there are no by-pci links.

    `on_uevent` is called with each raw kernel uevent, at the moment of the operation at which the
    kernel sends it. `on_step` is called in the middle of operations, with a part of a device there
    and another not.
    """

    def __init__(
        self,
        root: Path,
        *,
        driver: str = "2.10.1-pre",
        nodes: Literal["auto", "mknod", "link"] = "auto",
        numbers: Sequence[tuple[int, int]] | None = None,
        udev_rules: bool = True,
        links: bool = True,
        loaded: bool = True,
    ) -> None:
        self._attach(root)
        if self._state_file.exists():
            raise FileExistsError(f"{root} holds a simulated node already")
        for path in (
            "sys/class/hwmon",
            "sys/bus/pci/devices",
            "sys/devices",
            "sys/dev/char",
            "dev",
            "proc/driver",
        ):
            (root / path).mkdir(parents=True, exist_ok=True)
        self._state: dict[str, Any] = {
            "driver": driver,
            "nodes": _node_kind(root / "dev") if nodes == "auto" else nodes,
            "numbers": numbers,
            "udev_rules": udev_rules,
            "links": links,
            "driver_state": "",
            "bound": [],
            "seqnum": 1050,
        }
        self._save()
        if loaded:
            self.load_driver()

    def _attach(self, root: Path) -> None:
        self.root = root
        self.on_uevent: Callable[[bytes], None] | None = None
        self.on_step: Callable[[], None] | None = None
        self._state_file = root / "state.json"
        self._functions: dict[
            str, Function
        ] = {}  # in the order of the kernel's list: a rescanned function is the last
        self._loaded: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self._depth = 0

    @classmethod
    def open(cls, root: Path) -> SimulatedNode:
        """The node that this or another process made under `root`."""
        if not (root / "state.json").exists():
            raise FileNotFoundError(f"{root} holds no simulated node")
        node = cls.__new__(cls)
        node._attach(root)
        with node.holding():
            return node

    @classmethod
    def from_capture(
        cls,
        root: Path,
        name: str,
        *,
        nodes: Literal["auto", "mknod", "link"] = "auto",
        numbers: Sequence[tuple[int, int]] | None = None,
    ) -> SimulatedNode:
        """The tree of a capture, with its driver's version, ordinals, hwmon numbers and values."""
        facts = capture(name)
        functions = sorted(
            facts["functions"], key=lambda function: (function["hwmon"] or 0, function["ordinal"])
        )
        rules = all(function["mode"] == "0666" for function in functions)
        node = cls(root, driver=facts["driver"], nodes=nodes, numbers=numbers, udev_rules=rules)
        with node.changing():
            for facts in functions:
                shown = facts.get("class", {})
                if (
                    "board" in facts
                ):  # the capture shows no telemetry (or nothing at all): this is what it would be
                    card = next(
                        card
                        for card, code in CARDS.items()
                        if code == int(facts["board"]["ssid"], 16)
                    )
                    function = node._function(
                        card, facts["path"], facts["board"]["serial"], facts["board"]["asic_id"]
                    )
                    function.pci |= facts.get("pci", {})
                    function.firmware = not shown
                else:
                    telemetry = {k: v for k, v in shown.items() if k.startswith("tt_")}
                    counters = {k: v for k, v in shown.items() if "/" in k}
                    sensors = {k: v for k, v in facts["sensors"].items() if k != "uevent"}
                    function = Function(
                        facts["path"], dict(facts["pci"]), telemetry, counters, sensors
                    )
                node._functions[function.bdf] = function
                node._plug(function)
                node._probe(function, ordinal=facts["ordinal"], hwmon=facts["hwmon"])
        return node

    # -- state -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the tree: what happens inside is one step to who else goes through this class."""
        with self._lock, contextlib.ExitStack() as stack:
            if self._depth == 0:
                lock = stack.enter_context((self.root / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                status = self._state_file.stat()
                if self._loaded != (status.st_ino, status.st_mtime_ns):
                    stored = json.loads(self._state_file.read_text())
                    self._functions = {
                        bdf: Function(**function)
                        for bdf, function in stored.pop("functions").items()
                    }
                    self._state, self._loaded = stored, (status.st_ino, status.st_mtime_ns)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the tree, and keep what changes of the state, also if it fails halfway."""
        with self.holding():
            before = self._dump()
            try:
                yield
            finally:
                if self._dump() != before:
                    self._save()

    def _dump(self) -> str:
        return json.dumps(
            self._state | {"functions": {bdf: asdict(f) for bdf, f in self._functions.items()}},
            indent=1,
        )

    def _save(self) -> None:
        put(self._state_file, self._dump())
        status = self._state_file.stat()
        self._loaded = (status.st_ino, status.st_mtime_ns)

    @property
    def version(self) -> tuple[int, ...]:
        """The driver's release: (2, 10) for "2.10.1-pre"."""
        return tuple(int(part) for part in re.findall(r"\d+", self._state["driver"])[:2])

    @property
    def chips(self) -> list[Chip]:
        """Every function that was ever added, those that vanished too, in the kernel's order."""
        with self.holding():
            return [Chip(self, bdf) for bdf in self._functions]

    def chip(self, name: str | int) -> Chip:
        """A function by its BDF ("0000:01:00.0" or "01:00.0") or by its present ordinal."""
        with self.holding():
            for bdf, function in self._functions.items():
                if str(name) in (bdf, bdf.removeprefix("0000:"), str(function.ordinal)):
                    return Chip(self, bdf)
        raise LookupError(f"no function {name} among {', '.join(self._functions) or 'none'}")

    @property
    def flags(self) -> list[str]:
        """The options that make the daemon look at this tree."""
        return [f"--{name}-root={self.root / directory}" for name, directory in
                (("sysfs", "sys"), ("dev", "dev"), ("proc", "proc"))]  # fmt: skip

    # -- what can happen to a machine --------------------------------------------------------------

    def add(
        self,
        card: str,
        *,
        bdf: str | None = None,
        numa_node: int | None = None,
        serial: str | None = None,
        asic_id: str | None = None,
        ordinal: int | None = None,
        firmware: bool = True,
    ) -> list[Chip]:
        """Plug a card: its functions appear and are probed, with the events of a hot-plug.

        A p300* has two functions with one serial, a Galaxy 32 on its own buses (8 for each serial),
        any other card one. `bdf`, `asic_id` and `ordinal` are those of the first function. NUMA
        node: -1 unless told, but on a Galaxy 0 for the trays below bus 0x80 and 1 above.
        `firmware=False`: not ready when the driver looks.
        """
        galaxy, code = card.startswith("galaxy-"), CARDS[card]
        with self.changing():
            if galaxy:
                places = [
                    f"0000:{tray << 4 | chip:02x}:00.0"
                    for tray in GALAXY_PROBE_ORDER
                    for chip in range(1, 9)
                ]
            else:
                used = {int(bdf.split(":")[1], 16) for bdf in self._functions}
                domain, first = (bdf or "0000:01").split(":")[:2]
                free = [bus for bus in range(int(first, 16), 256) if bdf or bus not in used]
                places = [
                    f"{domain}:{bus:02x}:00.0"
                    for bus in free[: 2 if card.startswith("p300") else 1]
                ]
                if bdf:
                    places[0] = bdf
            if taken := self._functions.keys() & set(places):
                raise ValueError(f"{', '.join(taken)} is occupied")
            added, first_chip = [], len(self._functions) + 1
            for index, place in enumerate(places):
                bus = int(place.split(":")[1], 16)
                board = bus >> 4 if galaxy else first_chip
                own_serial = serial or f"000{code:04X}{511700100 + board}"
                own_id = f"{0x3B1D7A5620E40000 + (code << 8) + first_chip + index:016X}"
                node_number = (
                    numa_node
                    if numa_node is not None
                    else (0 if bus < 0x80 else 1)
                    if galaxy
                    else -1
                )
                function = self._function(
                    card, _path(place), own_serial, own_id if index else asic_id or own_id
                )
                cpus = "0-1" if node_number < 0 else str(node_number)
                function.pci |= {"numa_node": str(node_number), "local_cpulist": cpus}
                function.firmware = firmware
                self._functions[place] = function
                self._plug(function)
                self._probe(function, ordinal=None if ordinal is None else ordinal + index)
                added.append(Chip(self, place))
            return added

    def _function(self, card: str, path: str, serial: str, asic_id: str) -> Function:
        """A function of `card` with the values of the captured board of its architecture."""
        code = CARDS[card]
        sample = capture("n150-p150a")["functions"][
            0 if card == "n150" or card in ("n300", "galaxy-wormhole") else 1
        ]
        blackhole = sample["pci"]["device"] == "0xb140"

        def offered(name: str) -> bool:
            since = (
                BLACKHOLE_MAX_SINCE
                if blackhole and name.endswith("_max")
                else SINCE.get(name, (0,))
            )
            return self.version >= since

        shown = {k: v for k, v in sample["class"].items() if offered(k)}
        identity = {"tt_card_type": card, "tt_serial": serial, "tt_asic_id": asic_id}
        modalias = re.sub("sd0000....", f"sd0000{code:04X}", sample["pci"]["modalias"])
        config = (
            sample["pci"]["config"][:92] + f"{code:02x}00" + sample["pci"]["config"][96:]
        )  # its own at 0x2e
        return Function(
            path=path,
            pci=sample["pci"]
            | {"subsystem_device": f"0x{code:04x}", "modalias": modalias, "config": config},
            telemetry={k: identity.get(k, v) for k, v in shown.items() if k.startswith("tt_")},
            counters={
                k: v for k, v in shown.items() if "/" in k and self.version >= COUNTERS_SINCE
            },
            sensors={k: v for k, v in sample["sensors"].items() if k != "uevent" and offered(k)},
        )

    def load_driver(self, probe: bool = True) -> None:
        """modprobe: the functions are probed in the kernel's order, which may be another by now.

        `probe=False` stops before the first of them, with the module still initialising; go on with
        `probe`.
        """
        with self.changing():
            if self._state["driver_state"]:
                raise ValueError("the driver is loaded")
            self._state["driver_state"] = "coming"
            driver = self.root / "sys/bus/pci/drivers/tenstorrent"
            module = self.root / "sys/module/tenstorrent"
            (module / "drivers").mkdir(parents=True)
            put(module / "version", self._state["driver"])
            put(module / "initstate", "coming")
            (self.root / "sys/class/tenstorrent").mkdir()
            if self.version >= PROC_SINCE:
                (self.root / "proc/driver/tenstorrent").mkdir()
            self._emit("add", "/class/tenstorrent", SUBSYSTEM="class")
            link(driver / "module", module)
            link(module / "drivers/pci:tenstorrent", driver)
            if probe:
                for function in self._functions.values():
                    self._probe(function)
            self._loaded_after_the_last()

    def probe(self, chip: str | int) -> None:
        """While the driver is being loaded it takes this one next; with the last it is loaded."""
        with self.changing():
            self._probe(self._functions[self.chip(chip).bdf])
            self._loaded_after_the_last()

    def _loaded_after_the_last(self) -> None:
        if any(
            self._is_ours(function) and function.ordinal is None
            for function in self._functions.values()
        ):
            return
        self._state["driver_state"] = "live"
        put(self.root / "sys/module/tenstorrent/initstate", "live")
        self._emit("add", "/bus/pci/drivers/tenstorrent", SUBSYSTEM="drivers")
        self._emit("add", "/module/tenstorrent", SUBSYSTEM="module")

    def _is_ours(self, function: Function) -> bool:
        """Whether the driver can have it: it is there, no other driver's, nor kept for one."""
        kept = function.pci["driver_override"] not in ("(null)", "tenstorrent")
        return function.present and function.other_driver is None and not kept

    def unload_driver(self) -> None:
        """rmmod: the functions are released, the last bound first.

        (The real one refuses while a node is open.)
        """
        with self.changing():
            for bdf in reversed(list(self._state["bound"])):
                self._release(self._functions[bdf])
            for directory, subsystem in (
                ("bus/pci/drivers", "drivers"),
                ("class", "class"),
                ("module", "module"),
            ):
                remove(self.root / "sys" / directory / "tenstorrent")
                if subsystem == "class":
                    remove_empty(self.root / "proc/driver/tenstorrent")
                self._emit("remove", f"/{directory}/tenstorrent", SUBSYSTEM=subsystem)
            self._state["driver_state"] = ""

    def swap_ordinals(self, a: str | int, b: str | int) -> None:
        """Renumber two functions, as a reload can: unbound, then bound as the other's number."""
        with self.changing():
            one, other = (self._functions[self.chip(name).bdf] for name in (a, b))
            ordinals = one.ordinal, other.ordinal
            self._release(one)
            self._release(other)
            self._probe(other, ordinal=ordinals[0])
            self._probe(one, ordinal=ordinals[1])

    def set_hugepages(self, count_1g: int) -> None:
        """Reserve 1 GiB pages, all free, and mount hugetlbfs twice, on the host's paths."""
        with self.changing():
            pool = self.root / "sys/kernel/mm/hugepages/hugepages-1048576kB"
            pool.mkdir(parents=True, exist_ok=True)
            for name in ("nr_hugepages", "free_hugepages"):
                put(pool / name, str(count_1g))
            mounts = {"hugepages": "pagesize=2M", "hugepages-1G": "mode=777,pagesize=1024M"}
            for name in mounts:
                (self.root / "dev" / name).mkdir(exist_ok=True)
            lines = [
                f"hugetlbfs /dev/{name} hugetlbfs rw,relatime,{options} 0 0"
                for name, options in mounts.items()
            ]
            put(self.root / "proc/mounts", "\n".join(lines))

    def set_iommu(self, bdf: str, type: str = "DMA-FQ") -> None:
        """Put a function behind an IOMMU, in a group of its own; "identity" translates nothing."""
        with self.changing():
            function = self._functions[self.chip(bdf).bdf]
            used = {
                other.iommu[0]
                for other in self._functions.values()
                if other.iommu and other is not function
            }
            self._iommu_down(function)
            function.iommu = (_lowest_free(used), type)
            self._iommu_up(function)

    def tick(self) -> None:
        """One beat of every chip whose firmware lives and is not frozen."""
        with self.holding():
            for function in self._functions.values():
                if not function.frozen:
                    self._beat(function, 1)

    def start_process(
        self, pid: int, cgroup: str, nodes: Sequence[str], command: str = "python3"
    ) -> None:
        """Show a process that has opened device nodes, each named by its path or by a CDI name.

        `cgroup` is its /proc/<pid>/cgroup. What is no node of a card here is opened without a
        trace; FileNotFoundError if a path leads nowhere.
        """
        with self.changing():
            ordinals = [self._ordinal_of(node) for node in nodes]
            process = self.root / f"proc/{pid}"
            process.mkdir()
            put(process / "comm", command)
            put(process / "cgroup", cgroup)
            for ordinal in ordinals:
                if ordinal is not None:
                    self._change_pids(ordinal, lambda pids: [*pids, str(pid)])

    def end_process(self, pid: int) -> None:
        """Show it no longer: it has closed what it had open."""
        with self.changing():
            remove(self.root / f"proc/{pid}")
            for function in self._functions.values():
                if function.ordinal is not None:
                    self._change_pids(
                        function.ordinal, lambda pids: [p for p in pids if p != str(pid)]
                    )

    def _ordinal_of(self, node: str) -> int | None:
        """The number of the card's node that a path leads to, or that a CDI name stands for."""
        name = node.rpartition("=")[2]
        if name in self._functions:
            return self._functions[name].ordinal
        path = Path(node)
        path.lstat()
        while path.is_symlink() and path.parent.name.startswith("by-"):
            path = Path(os.path.normpath(path.parent / path.readlink()))
            path.lstat()
        is_here = path.resolve().parent == (self.root / "dev/tenstorrent").resolve()
        ours = is_here or path.parent.name == "tenstorrent"
        return int(path.name) if ours and path.name.isdigit() else None

    def _change_pids(self, ordinal: int, change: Callable[[list[str]], list[str]]) -> None:
        """Who has a node open; a driver before 2.5 does not tell."""
        file = self.root / f"proc/driver/tenstorrent/{ordinal}/pids"
        if file.exists():
            put(file, "\n".join(change(file.read_text().split())))

    # -- where things are --------------------------------------------------------------------------

    def _pci(self, function: Function) -> Path:
        return self.root / "sys/devices" / function.path

    def _class(self, function: Function) -> Path:
        return self._pci(function) / f"tenstorrent/tenstorrent!{function.ordinal}"

    def _hwmon(self, function: Function) -> Path:
        return self._pci(function) / f"hwmon/hwmon{function.hwmon}"

    def _number(self, ordinal: int) -> tuple[int, int]:
        numbers = self._state["numbers"]
        if numbers is not None and ordinal < len(numbers):
            return int(numbers[ordinal][0]), int(numbers[ordinal][1])
        return (
            (DRIVER_MAJOR, ordinal)
            if self._state["nodes"] == "mknod"
            else [*BORROWED][ordinal % len(BORROWED)]
        )

    def _emit(self, action: str, devpath: str, **env: str) -> None:
        self._state["seqnum"] += 1
        if self.on_uevent:
            self.on_uevent(wire(action, devpath, env, self._state["seqnum"]))

    def _step(self) -> None:
        if self.on_step:
            self.on_step()

    def _emit_pci(self, action: str, function: Function, *, without: str = "", **env: str) -> None:
        own = {k: v for k, v in function.uevent_environment().items() if k != without}
        self._emit(action, f"/devices/{function.path}", SUBSYSTEM="pci", **env, **own)

    def _emit_class(self, action: str, function: Function) -> None:
        assert function.ordinal is not None
        major, minor = self._number(function.ordinal)
        env = {
            "MAJOR": str(major),
            "MINOR": str(minor),
            "DEVNAME": f"tenstorrent/{function.ordinal}",
        }
        devpath = f"/devices/{function.path}/tenstorrent/tenstorrent!{function.ordinal}"
        self._emit(action, devpath, SUBSYSTEM="tenstorrent", **env)

    # -- coming ------------------------------------------------------------------------------------

    def _plug(self, function: Function) -> None:
        """The PCI core finds the function."""
        function.present = True
        pci = self._pci(function)
        pci.mkdir(parents=True)
        for name in PCI_ATTRIBUTES:
            self._show(function, name)
            self._step()
        link(pci / "subsystem", self.root / "sys/bus/pci")
        link(self.root / "sys/bus/pci/devices" / function.bdf, pci)
        self._step()
        self._iommu_up(function)
        self._emit_pci("add", function)

    def _probe(
        self, function: Function, *, ordinal: int | None = None, hwmon: int | None = None
    ) -> None:
        """The driver takes the function.

        Node and class directory come first, telemetry next if firmware is ready.
        """
        if not self._state["driver_state"] or not self._is_ours(function):
            return
        if function.condition in ("resetting", "lost"):  # a new probe looks at the chip afresh
            function.condition = "healthy"
        function.ordinal = self._free_ordinal(function) if ordinal is None else ordinal
        if any(
            f is not function and f.ordinal == function.ordinal for f in self._functions.values()
        ):
            raise ValueError(f"ordinal {function.ordinal} is in use")
        self._state["bound"].append(function.bdf)
        pci, driver = self._pci(function), self.root / "sys/bus/pci/drivers/tenstorrent"
        link(pci / "driver", driver)
        link(driver / function.bdf, pci)
        self._show(function, "uevent", pci=True)
        ready = function.firmware and function.condition == "healthy"
        early = self.version < PROC_SINCE  # old drivers registered hwmon before the node
        if ready and early:
            self._hwmon_up(function, hwmon)
        self._class_up(function)
        if ready:
            self._telemetry_up(function, hwmon)
        self._emit_pci("bind", function, DRIVER="tenstorrent")

    def _free_ordinal(self, function: Function) -> int:
        used = {f.ordinal for f in self._functions.values() if f.ordinal is not None}
        if (
            function.pci["subsystem_device"] in ("0x0035", "0x0047")
            and self.version >= GALAXY_SINCE
        ):
            bus = int(function.bdf.split(":")[1], 16)
            tray = GALAXY_ORDINALS[function.arch].get(bus >> 4)
            if (
                tray is not None
                and 1 <= bus & 15 <= 8
                and (ordinal := tray + (bus & 15) - 1) not in used
            ):
                return ordinal
        return _lowest_free(used)

    def _class_up(self, function: Function) -> None:
        """As device_add(): the class leads to the device before its number and node are there."""
        assert function.ordinal is not None
        entry, (major, minor) = self._class(function), self._number(function.ordinal)
        entry.mkdir(parents=True)
        put(
            entry / "uevent",
            f"MAJOR={major}\nMINOR={minor}\nDEVNAME=tenstorrent/{function.ordinal}",
        )
        link(entry / "device", self._pci(function))
        link(entry / "subsystem", self.root / "sys/class/tenstorrent")
        link(self.root / "sys/class/tenstorrent" / entry.name, entry)
        self._step()
        if function.counters:
            (entry / "pcie_perf_counters").mkdir()
            for name in function.counters:
                self._show(function, name)
        put(entry / "dev", f"{major}:{minor}")
        self._step()
        with contextlib.suppress(FileExistsError):  # two link nodes may have borrowed one number
            link(self.root / f"sys/dev/char/{major}:{minor}", entry)
        if self.version >= PROC_SINCE:
            (self.root / f"proc/driver/tenstorrent/{function.ordinal}").mkdir()
            put(self.root / f"proc/driver/tenstorrent/{function.ordinal}/pids", b"")
        node = self.root / f"dev/tenstorrent/{function.ordinal}"
        node.parent.mkdir(exist_ok=True)
        if self._state["nodes"] == "mknod":
            os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        else:
            node.symlink_to(BORROWED.get((major, minor), f"/dev/char/{major}:{minor}"))
        self._step()
        self._emit_class("add", function)
        self._udev_add(function)
        self._step()

    def _hwmon_up(self, function: Function, number: int | None) -> None:
        used = {f.hwmon for f in self._functions.values() if f.hwmon is not None}
        function.hwmon = _lowest_free(used) if number is None else number
        hwmon = self._hwmon(function)
        hwmon.mkdir(parents=True)
        link(hwmon / "device", self._pci(function))
        link(hwmon / "subsystem", self.root / "sys/class/hwmon")
        put(hwmon / "uevent", "")
        for name in function.sensors:
            self._show(function, name)
        link(self.root / "sys/class/hwmon" / hwmon.name, hwmon)
        self._emit("add", f"/devices/{function.path}/hwmon/{hwmon.name}", SUBSYSTEM="hwmon")

    def _telemetry_up(self, function: Function, hwmon: int | None = None) -> None:
        """hwmon and tt_* appear, then `change` says so, then udev makes the by-id link."""
        if function.hwmon is None:
            self._hwmon_up(function, hwmon)
        for name in function.telemetry:
            self._show(function, name)
            self._step()
        if self.version >= CHANGE_SINCE:
            self._emit_class("change", function)
            self._udev_change(function)

    def _iommu_up(self, function: Function) -> None:
        if function.iommu and function.present:
            group = self.root / f"sys/kernel/iommu_groups/{function.iommu[0]}"
            link(group / "devices" / function.bdf, self._pci(function))
            put(group / "type", function.iommu[1])
            link(self._pci(function) / "iommu_group", group)

    # -- going -------------------------------------------------------------------------------------

    def _release(self, function: Function) -> None:
        """The driver lets the function go, in the kernel's order: links, hwmon, node, class."""
        if function.ordinal is None:
            return
        self._keep_heartbeat(function)
        pci, entry, ordinal = self._pci(function), self._class(function), function.ordinal
        remove(pci / "driver")
        remove(self.root / "sys/bus/pci/drivers/tenstorrent" / function.bdf)
        self._step()
        if function.hwmon is not None:
            hwmon = self._hwmon(function)
            remove(self.root / "sys/class/hwmon" / hwmon.name)
            remove(hwmon.parent)
            self._emit("remove", f"/devices/{function.path}/hwmon/{hwmon.name}", SUBSYSTEM="hwmon")
            self._step()
        remove(self.root / f"proc/driver/tenstorrent/{ordinal}")
        remove(self.root / f"dev/tenstorrent/{ordinal}")
        remove_empty(self.root / "dev/tenstorrent")
        self._step()
        char = self.root / "sys/dev/char/{}:{}".format(*self._number(ordinal))
        if char.is_symlink() and char.readlink().name == entry.name:
            remove(char)
        # device_del(): the links that lead to it and away from it go before its attributes.
        for gone in (
            entry / "dev",
            entry / "device",
            entry / "subsystem",
            self.root / "sys/class/tenstorrent" / entry.name,
        ):
            remove(gone)
            self._step()
        for attribute in sorted(entry.iterdir()):
            remove(attribute)
            self._step()
        remove(entry.parent)
        self._emit_class("remove", function)
        self._udev_remove(function)
        function.ordinal = function.hwmon = None
        self._state["bound"].remove(function.bdf)
        self._show(function, "uevent", pci=True)
        self._emit_pci("unbind", function, without="MODALIAS")
        self._step()

    def _release_other(self, function: Function) -> None:
        """The same for a function that another driver has."""
        if function.other_driver is None:
            return
        remove(self._pci(function) / "driver")
        remove(self.root / "sys/bus/pci/drivers" / function.other_driver / function.bdf)
        function.other_driver = None
        self._show(function, "uevent", pci=True)
        self._emit_pci("unbind", function, without="MODALIAS")

    def _unplug(self, function: Function) -> None:
        self._release(function)
        self._release_other(function)
        self._iommu_down(function)
        for name in PCI_ATTRIBUTES:
            remove(self._pci(function) / name)
            self._step()
        remove(self.root / "sys/bus/pci/devices" / function.bdf)
        remove(self._pci(function))
        function.present = False
        self._emit_pci("remove", function)
        self._step()

    def _iommu_down(self, function: Function) -> None:
        if function.iommu:
            remove(self.root / f"sys/kernel/iommu_groups/{function.iommu[0]}")
            remove(self._pci(function) / "iommu_group")

    # -- udev, which comes after the kernel's event ------------------------------------------------

    def _links(self, function: Function) -> dict[str, Path]:
        """The function's links in /dev/tenstorrent, by directory."""
        directory = self.root / "dev/tenstorrent"
        links = {"by-pci": directory / "by-pci" / function.bdf} if self._state["links"] else {}
        if (
            self._state["udev_rules"]
            and "tt_asic_id" in function.telemetry
            and self.version >= CHANGE_SINCE
        ):
            links["by-id"] = (
                directory / "by-id" / f"{function.arch}-{function.telemetry['tt_asic_id']}"
            )
        return links

    def _udev_add(self, function: Function) -> None:
        if self._state["udev_rules"] and self._state["nodes"] == "mknod":
            (self.root / f"dev/tenstorrent/{function.ordinal}").chmod(0o666)
        self._lead(function, "by-pci")

    def _udev_change(self, function: Function) -> None:
        if function.hwmon is not None:
            self._lead(function, "by-id")

    def _lead(self, function: Function, kind: str) -> None:
        if path := self._links(function).get(kind):
            remove(path)
            link(path, self.root / f"dev/tenstorrent/{function.ordinal}")

    def _udev_remove(self, function: Function) -> None:
        """Takes its links, unless they are another's by now."""
        for path in self._links(function).values():
            if path.is_symlink() and path.readlink().name == str(function.ordinal):
                remove(path)
            remove_empty(path.parent)
        remove_empty(self.root / "dev/tenstorrent")

    # -- attributes --------------------------------------------------------------------------------

    def _file(self, function: Function, name: str) -> Path:
        """Where an attribute is: PCI's own, hwmon's, or (tt_*, `dev`, counters) the class's."""
        if name in PCI_ATTRIBUTES and name != "uevent":
            return self._pci(function) / name
        if (SENSOR.fullmatch(name) and function.hwmon is None) or function.ordinal is None:
            raise LookupError(f"{function.bdf} shows no {name} now")
        return (self._hwmon(function) if SENSOR.fullmatch(name) else self._class(function)) / name

    def _show(self, function: Function, name: str, *, pci: bool = False) -> None:
        """Write an attribute with what it reads in the function's present condition."""
        condition = function.condition
        pre_enodata = condition in ("resetting", "lost") and self.version < ENODATA_SINCE
        if name == "uevent":
            driver = "tenstorrent" if function.ordinal is not None else function.other_driver
            env = {"DRIVER": driver} if driver else {}
            text = "\n".join(f"{k}={v}" for k, v in (env | function.uevent_environment()).items())
            put(self._pci(function) / name, text)
        elif name == "config":
            off = condition in ("off-bus", "resetting")
            put(
                self._pci(function) / name,
                b"\xff" * CONFIG_BYTES if off else bytes.fromhex(function.pci[name]),
            )
        elif name in PCI_ATTRIBUTES:
            off = name == "current_link_speed" and condition in ("off-bus", "resetting")
            put(self._pci(function) / name, "Unknown" if off else function.pci[name])
        elif (
            name in function.counters
        ):  # these read the chip's registers even between reset and POST_RESET
            put(
                self._file(function, name),
                function.counters[name] if condition in ("healthy", "lost") else ALL_ONES,
            )
        else:
            value = (function.sensors if SENSOR.fullmatch(name) else function.telemetry)[name]
            constant = name == "name" or name.endswith("_label")
            if (
                condition in ("dead", "off-bus") or pre_enodata
            ):  # before 2.9 a chip in reset was read; not captured
                put(self._file(function, name), dead_value(name, value))
            elif condition in ("resetting", "lost") and not constant:
                put_errno(self._file(function, name), "ENODATA")
            else:
                put(self._file(function, name), value)

    def _show_all(self, function: Function) -> None:
        names = ["current_link_speed", "config"] if function.present else []
        names += function.counters if function.ordinal is not None else []
        names += [*function.telemetry, *function.sensors] if function.hwmon is not None else []
        for name in names:
            self._show(function, name)

    def _heartbeat(self, function: Function) -> tuple[Path, int] | None:
        """The heartbeat's file and present value, where there is a living one."""
        if (
            function.hwmon is None
            or "tt_heartbeat" not in function.telemetry
            or function.condition != "healthy"
        ):
            return None
        file = self._class(function) / "tt_heartbeat"
        if not file.exists() or not stat.S_ISREG(
            file.lstat().st_mode
        ):  # removed, blocked or failing
            return None
        text = file.read_bytes().strip()
        return (file, int(text)) if text.isdigit() and len(text) < 20 else None

    def _keep_heartbeat(self, function: Function) -> None:
        if heartbeat := self._heartbeat(function):
            function.telemetry["tt_heartbeat"] = str(heartbeat[1])

    def _beat(self, function: Function, n: int) -> None:
        if heartbeat := self._heartbeat(function):
            file, value = heartbeat
            put(file, str((value + n) & 0xFFFFFFFF))


def _lowest_free(used: set[int]) -> int:
    return next(number for number in range(len(used) + 1) if number not in used)


def _path(bdf: str) -> str:
    """Where a function hangs: below a root bus for every 16 buses, a root port for each card."""
    domain, bus = bdf.split(":")[0], int(bdf.split(":")[1], 16)
    root = max(bus - 1, 0) & 0xF0
    port = bus - root + (1 if root == 0 else -1)  # the first two slots of bus 0 are taken
    return f"pci{domain}:{root:02x}/{domain}:{root:02x}:{port:02x}.0/{bdf}"


def _node_kind(directory: Path) -> Literal["mknod", "link"]:
    """Whether this process can make a device node here (by CAP_MKNOD in no user namespace)."""
    try:
        os.mknod(directory / ".probe", stat.S_IFCHR | 0o600, os.makedev(DRIVER_MAJOR, 0))
    except OSError:
        return "link"
    os.unlink(directory / ".probe")
    return "mknod"


class Chip:
    """A handle to one PCI function: nothing but its name, so it outlives whatever happens."""

    def __init__(self, node: SimulatedNode, bdf: str) -> None:
        self.node = node
        self.bdf = bdf

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Function]:
        with self.node.changing():
            yield self.node._functions[self.bdf]

    @property
    def facts(self) -> Function:
        """The function's state: identity, ordinal, condition."""
        with self.node.holding():
            return self.node._functions[self.bdf]

    @property
    def ordinal(self) -> int | None:
        """N of /dev/tenstorrent/N, None while the driver is not bound."""
        return self.facts.ordinal

    @property
    def device_node(self) -> Path:
        """The device node's path; LookupError while there is none."""
        if (ordinal := self.ordinal) is None:
            raise LookupError(f"{self.bdf} has no node")
        return self.node.root / f"dev/tenstorrent/{ordinal}"

    def attribute(self, name: str) -> Path:
        """The real path of an attribute: tt_*, a sensor, PCI's, `dev`, `pcie_perf_counters/...`."""
        with self.node.holding():
            return self.node._file(self.node._functions[self.bdf], name)

    # -- the firmware ------------------------------------------------------------------------------

    def beat(self, n: int = 1) -> None:
        """Advance the heartbeat where there is one that can: no dead, resetting, blocked chip's."""
        with self.node.holding():
            self.node._beat(self.node._functions[self.bdf], n)

    def freeze(self) -> None:
        """The firmware stops: the ticker leaves the heartbeat alone, all else is as before."""
        with self._changing() as function:
            function.frozen = True

    def thaw(self) -> None:
        """The firmware runs again."""
        with self._changing() as function:
            function.frozen = False

    def heat(self, celsius: float) -> None:
        """Set the temperature (temp1_input, in thousandths)."""
        self._set("sensors", "temp1_input", str(round(celsius * 1000)))

    def trip(self, n: int = 1) -> None:
        """Count thermal trips (Blackhole since 2.7; KeyError elsewhere)."""
        self._set(
            "telemetry",
            "tt_therm_trip_count",
            str(int(self.facts.telemetry["tt_therm_trip_count"]) + n),
        )

    def _set(self, group: Literal["telemetry", "sensors"], name: str, value: str) -> None:
        with self._changing() as function:
            {"telemetry": function.telemetry, "sensors": function.sensors}[group][name] = value
            if function.hwmon is not None:
                self.node._show(function, name)

    def die(self, bus: bool = False) -> None:
        """Every register reads all ones, without error or event; with `bus`, `config`, too."""
        self._become("off-bus" if bus else "dead")

    def revive(self) -> None:
        """The chip answers again, as before.

        (Where it was dead at probe, that is as late as `speak`.)
        """
        self._become("healthy")

    def reset(self) -> None:
        """Between reset and POST_RESET: ENODATA from all tt_* and hwmon (since 2.9), no event."""
        self._become("resetting")

    def post_reset(self, heartbeat: int = 20, late: bool = False) -> None:
        """After POST_RESET: values again, and the heartbeat restarts lower; no event.

        `late`: the firmware was not ready. Blackhole then gives ENODATA until the driver is bound
        anew (`rebind`); Wormhole goes on with the old addresses, so its values return all the same.
        """
        with self._changing() as function:
            if "tt_heartbeat" in function.telemetry:
                function.telemetry["tt_heartbeat"] = str(heartbeat)
            self._become("lost" if late and function.arch == "blackhole" else "healthy")

    def _become(self, condition: Condition) -> None:
        with self._changing() as function:
            self.node._keep_heartbeat(function)
            function.condition = condition
            self.node._show_all(function)
            if condition == "healthy":
                self._look_again(function)

    def silence(self) -> None:
        """Firmware not ready when the driver looked: probed again, with neither tt_* nor hwmon.

        Same ordinal.
        """
        with self._changing() as function:
            function.firmware = False
            if function.ordinal is not None:
                self.rebind()

    def speak(self) -> None:
        """The firmware becomes ready. Wormhole polls: hwmon `add`, then `change`.

        Blackhole's driver looked once, at probe: nothing happens until `rebind`, or `vanish` and
        `come_back`.
        """
        with self._changing() as function:
            function.firmware = True
            self._look_again(function)

    def _look_again(self, function: Function) -> None:
        unseen = function.ordinal is not None and function.hwmon is None
        if unseen and function.firmware and function.arch == "wormhole":
            self.node._telemetry_up(function)

    # -- the bus and the driver --------------------------------------------------------------------

    def vanish(self) -> None:
        """The PCI function is removed (unplugged, or by /sys/bus/pci/devices/*/remove)."""
        with self._changing() as function:
            if function.present:
                self.node._unplug(function)

    def come_back(self, ordinal: int | None = None) -> None:
        """The function is found again, alive, the last in the kernel's list now.

        Lowest free ordinal unless told.
        """
        with self._changing() as function:
            if function.present:
                raise ValueError(f"{self.bdf} is there")
            function.condition = "healthy"
            function.pci["driver_override"] = "(null)"
            self.node._functions[self.bdf] = self.node._functions.pop(self.bdf)
            self.node._plug(function)
            self.node._probe(function, ordinal=ordinal)

    def unbind(self) -> None:
        """The driver lets the function go; it stays on the bus."""
        with self._changing() as function:
            self.node._release(function)
            self.node._release_other(function)

    def bind(self, ordinal: int | None = None) -> None:
        """The driver probes the function (anew). Lowest free ordinal unless told."""
        with self._changing() as function:
            if function.ordinal is not None or not function.present:
                raise ValueError(f"{self.bdf} is not there to be bound")
            self.node._probe(function, ordinal=ordinal)

    def rebind(self) -> None:
        """Unbind and bind, with the same ordinal: the remedy for lost telemetry of a Blackhole."""
        with self._changing() as function:
            ordinal = function.ordinal
            self.unbind()
            self.bind(ordinal)

    def keep_for(self, driver: str) -> None:
        """Write `driver_override`: only this driver, such as vfio-pci, may probe; "(null)": any."""
        with self._changing() as function:
            function.pci["driver_override"] = driver
            self.node._show(function, "driver_override")

    def bind_to(self, driver: str) -> None:
        """Another driver, such as vfio-pci, takes the function, which is kept for it."""
        with self._changing() as function:
            self.unbind()
            self.keep_for(driver)
            function.other_driver = driver
            pci, theirs = self.node._pci(function), self.node.root / "sys/bus/pci/drivers" / driver
            link(pci / "driver", theirs)
            link(theirs / self.bdf, pci)
            self.node._show(function, "uevent", pci=True)
            self.node._emit_pci("bind", function, DRIVER=driver)

    @property
    def by_pci(self) -> Path:
        """Where our package's udev rule makes the link to the node."""
        return self.node.root / "dev/tenstorrent/by-pci" / self.bdf

    def mislead(self, target: str = "") -> None:
        """The by-pci link leads to something else, such as "../7"; "": it is not there."""
        with self._changing():
            remove(self.by_pci)
            if target:
                self.by_pci.parent.mkdir(parents=True, exist_ok=True)
                self.by_pci.symlink_to(target)

    def set_pids(self, pids: Sequence[int]) -> None:
        """Who has the node open: a line for each descriptor (0: of another PID namespace)."""
        with self._changing() as function:
            put(
                self.node.root / f"proc/driver/tenstorrent/{function.ordinal}/pids",
                "\n".join(map(str, pids)),
            )

    # -- one attribute: lasts until `restore`, or until the operation that writes it next ----------

    def fail(self, attribute: str, error: str = "EIO") -> None:
        """Reads of the attribute fail with this errno (see the module's conventions)."""
        if not hasattr(errno, error):
            raise ValueError(f"{error} is no errno")
        with self._changing() as function:
            self.node._keep_heartbeat(function)
            put_errno(self.node._file(function, attribute), error)

    def write(self, attribute: str, content: bytes) -> None:
        """The attribute reads exactly this, newline or not; it need not have existed."""
        with self._changing() as function:
            self.node._keep_heartbeat(function)
            put(self.node._file(function, attribute), content)

    def remove(self, attribute: str) -> None:
        """The attribute is not there (firmware that lacks the tag)."""
        with self._changing() as function:
            self.node._keep_heartbeat(function)
            remove(self.node._file(function, attribute))

    def block(self, attribute: str = "tt_heartbeat") -> None:
        """Whoever opens the attribute for reading waits until `unblock`."""
        with self._changing() as function:
            self.node._keep_heartbeat(function)
            replace(self.node._file(function, attribute), os.mkfifo)

    def unblock(self, attribute: str = "tt_heartbeat") -> None:
        """A reader that waits gets its value (others, an empty read), and the file is back."""
        self.restore(attribute)

    def restore(self, attribute: str) -> None:
        """The attribute reads what the chip makes it read (undoes fail, write, remove, block)."""
        with self._changing() as function:
            if attribute in ("dev", "uevent"):
                raise ValueError(f"{attribute} is not the chip's")
            self.node._show(function, attribute)


class Ticker:
    """Advances every living heartbeat at 10 Hz, as firmware does, while the context lasts."""

    def __init__(self, node: SimulatedNode, interval: float = 0.1) -> None:
        self._node = node
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            self._node.tick()
            due += self._interval

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


# --------------------------------------------------------------------------------------------------
# By hand
# --------------------------------------------------------------------------------------------------

USAGE = """\
usage: python -m tests.world.node DIR create [CARD …] | from-capture NAME | add CARD … | beat | show
       python -m tests.world.node DIR OPERATION [ARGUMENT …]
       python -m tests.world.node DIR OPERATION BDF [ARGUMENT …]

A node with two boards, of which one overheats, and what the daemon's flags are for it:
  python -m tests.world.node /tmp/node create n150 p300c
  python -m tests.world.node /tmp/node beat &                 (heartbeats)
  python -m tests.world.node /tmp/node heat 01:00.0 95

A BDF may be short or the ordinal. Operations are the methods of the classes SimulatedNode and Chip,
by their names; each prints the kernel uevents that the real driver would send.
"""


def _value(text: str, annotation: str) -> object:
    """Return an argument as a method wants it; texts need no quotes."""
    if annotation == "bytes":
        return os.fsencode(text)
    try:
        return text if annotation == "str" else json.loads(text)
    except ValueError:
        return text


def _operate(node: SimulatedNode, operation: str, words: Sequence[str]) -> None:
    """Call a method of the node, or of the chip that the first word names."""
    name = operation.replace("-", "_")
    arguments = list(words)
    method = getattr(node, name, None) or getattr(node.chip(arguments.pop(0)), name)
    parameters = inspect.signature(method).parameters.values()
    method(*(_value(text, each.annotation) for text, each in zip(arguments, parameters)))  # noqa: B905


def _show(chip: Chip) -> str:
    """Return a line about a chip."""
    facts = chip.facts
    where = "not bound" if facts.ordinal is None else f"/dev/tenstorrent/{facts.ordinal}"
    state = facts.condition if facts.present else "vanished"
    ails = [*["frozen"] * facts.frozen, *["firmware not ready"] * (not facts.firmware)]
    card = facts.telemetry.get("tt_card_type", facts.arch)
    return f"{chip.bdf}  {where:19} {card:16} {', '.join([state, *ails])}"


def main(arguments: Sequence[str]) -> int:
    """The command line; the exit status."""
    if len(arguments) < 2:
        print(USAGE)
        return 0 if arguments == ["--help"] else 2
    root, operation, words = Path(arguments[0]).absolute(), arguments[1], arguments[2:]
    if operation in ("create", "from-capture"):
        root.mkdir(parents=True, exist_ok=True)
        is_new = operation == "create"
        node = SimulatedNode(root) if is_new else SimulatedNode.from_capture(root, words[0])
        for card in words if is_new else ():
            node.add(card)
        print(" ".join(node.flags))
        return 0
    node = SimulatedNode.open(root)
    node.on_uevent = lambda message: print(message.split(b"\0", 1)[0].decode())
    if operation == "beat":
        with contextlib.suppress(KeyboardInterrupt), Ticker(node):
            threading.Event().wait()
    elif operation == "show":
        print("\n".join(map(_show, node.chips)))
    elif operation == "add":
        for card in words:
            node.add(card)
    else:
        _operate(node, operation, words)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (AttributeError, LookupError, TypeError, ValueError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
