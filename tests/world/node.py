"""A simulated node: sysfs, /dev and /proc of a machine with Tenstorrent cards, as a tree.

`SimulatedNode(root)` keeps `<root>/sys`, `<root>/dev` and `<root>/proc` as the real driver (tt-kmd)
and udev show them: same names, links, formats, order of appearance and kernel uevents.
tests.world.captures has the recordings that it is modelled on.

For reads that fail or block see tests.world.tree. A device file is a symlink to /dev/null or a
similar device ("link"), whose number sysfs's `dev` then repeats, or, where a test runs as root, a
real character device ("mknod").
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from tests.world.captures import CONFIG_BYTES, PCI_ATTRIBUTES, SENSOR, capture
from tests.world.tree import link, put, put_control, put_errno, remove, remove_empty, replace

ALL_ONES = "4294967295"
DRIVER_MAJOR = 245  # dynamic in reality; the number of every capture


class Card(NamedTuple):
    """A kind of card. All else about it is its architecture's, see SimulatedNode._chip()."""

    code: int  # bits 36-51 of its serial, and the PCI subsystem device id
    arch: str
    functions: int = 1


CARDS = {
    "n300": Card(0x14, "wormhole"),
    "n150": Card(0x18, "wormhole"),
    "galaxy-wormhole": Card(0x35, "wormhole", 32),
    "p100": Card(0x36, "blackhole"),
    "p150a": Card(0x40, "blackhole"),
    "p150b": Card(0x41, "blackhole"),
    "p150c": Card(0x42, "blackhole"),
    "p100a": Card(0x43, "blackhole"),
    "p300b": Card(0x44, "blackhole", 2),
    "p300a": Card(0x45, "blackhole", 2),
    "p300c": Card(0x46, "blackhole", 2),
    "galaxy-blackhole": Card(0x47, "blackhole", 32),
}
ARCHITECTURES = {"0x401e": "wormhole", "0xb140": "blackhole"}
# First ordinal of a Galaxy tray by the high nibble of the bus number, a table of the driver.
GALAXY_ORDINALS = {
    "wormhole": {0xC: 0, 0x8: 8, 0x0: 16, 0x4: 24},
    "blackhole": {0x0: 0, 0x4: 8, 0xC: 16, 0x8: 24},
}
# In the order in which the captured machine enumerated its root buses.
GALAXY_BUSES = [tray << 4 | chip for tray in (0x0, 0xC, 0x8, 0x4) for chip in range(1, 9)]

PROC_SINCE, CHANGE_SINCE = (2, 5), (2, 6)  # releases of the driver

# Symlinks borrow the numbers of these devices, which every machine and container has.
BORROWED = {
    (1, 3): "/dev/null", (1, 5): "/dev/zero", (1, 7): "/dev/full", (1, 8): "/dev/random",
    (1, 9): "/dev/urandom",
}  # fmt: skip

Condition = Literal["healthy", "dead", "off-bus", "resetting"]
T = TypeVar("T")


def wire(action: str, devpath: str, env: Mapping[str, str], seqnum: int) -> bytes:
    """Return a kernel uevent as it arrives: a header, then NUL-terminated assignments."""
    assignments = {"ACTION": action, "DEVPATH": devpath, **env, "SEQNUM": str(seqnum)}
    lines = [f"{action}@{devpath}", *(f"{k}={v}" for k, v in assignments.items())]
    return "".join(f"{line}\0" for line in lines).encode()


def dead_value(name: str) -> str:
    """Return the value of an attribute when every register of the chip reads all ones.

    Captured for heartbeat, card type, ids, clock, versions, temp1_input and power1_input. The
    others follow from the same arithmetic (32 bits: mV unchanged, mA and limits in thousandths),
    tt_eth_fw_ver from its bit fields 8.4.12.
    """
    special = {
        "tt_card_type": "unknown", "tt_serial": "F" * 16, "tt_asic_id": "F" * 16,
        "tt_eth_fw_ver": "255.15.4095", "temp1_input": "65535999", "temp1_max": "4294966296",
        "curr1_input": "4294966296", "curr1_max": "4294966296", "power1_input": "4293967296",
        "power1_max": "4293967296",
    }  # fmt: skip
    return special.get(name, "255.255.255.255" if name.endswith("_ver") else ALL_ONES)


def in_steps(cls: type[T]) -> type[T]:
    """Let each public method be one step for other threads."""

    def one_step(operation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(operation)
        def in_one_step(self: Any, *arguments: Any, **keywords: Any) -> Any:
            with self.lock:
                return operation(self, *arguments, **keywords)

        return in_one_step

    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, one_step(member))
    return cls


# ---------------------------------------------------------------------------------------- the chip


@in_steps
@dataclass(eq=False)
class Chip:
    """A PCI function: its identity while healthy, its present state, and its operations."""

    node: SimulatedNode
    path: str  # below /sys/devices: "pci0000:00/0000:00:02.0/0000:01:00.0"
    pci: dict[str, str]
    telemetry: dict[str, str]  # tt_*
    sensors: dict[str, str]  # hwmon
    firmware: bool = True  # ready when the driver looks
    condition: Condition = "healthy"
    frozen: bool = False
    present: bool = False  # on the PCI bus
    ordinal: int | None = None  # N of /dev/tenstorrent/N while the driver is bound
    hwmon: int | None = None  # while the driver shows telemetry
    driver: str = ""  # the bound one: "tenstorrent", or another such as "vfio-pci"
    overridden: set[str] = field(default_factory=set)  # attributes that a test has set

    def __post_init__(self) -> None:
        self.bdf = self.path.rsplit("/", 1)[-1]
        self.arch = ARCHITECTURES[self.pci["device"]]
        self.lock = self.node.lock
        self.directory = self.node.root / "sys/devices" / self.path
        # The link to the device file that our package's udev rule makes.
        self.by_pci = self.node.root / "dev/tenstorrent/by-pci" / self.bdf

    @property
    def device_node(self) -> Path:
        """The device file's path; LookupError without one."""
        if self.ordinal is None:
            raise LookupError(f"{self.bdf} has no device file")
        return self.node.root / f"dev/tenstorrent/{self.ordinal}"

    @property
    def pids(self) -> Path:
        """The driver's file of the processes that have the device file open."""
        return self.node.root / f"proc/driver/tenstorrent/{self.ordinal}/pids"

    @property
    def class_directory(self) -> Path:
        """The directory of the class device."""
        return self.directory / f"tenstorrent/tenstorrent!{self.ordinal}"

    @property
    def hwmon_directory(self) -> Path:
        """The directory of the sensors."""
        return self.directory / f"hwmon/hwmon{self.hwmon}"

    # Attributes

    def attribute(self, name: str) -> Path:
        """Return the path of an attribute: PCI's, tt_*, a sensor, or `dev`."""
        if name in PCI_ATTRIBUTES and name != "uevent":
            return self.directory / name
        is_sensor = SENSOR.fullmatch(name)
        if self.ordinal is None or (is_sensor and self.hwmon is None):
            raise LookupError(f"{self.bdf} has no {name} now")
        return (self.hwmon_directory if is_sensor else self.class_directory) / name

    def _content(self, name: str) -> str | bytes | None:
        """Return an attribute's content in the chip's present condition; None: ENODATA."""
        is_off_bus = self.condition in ("off-bus", "resetting")
        if name == "config":
            return b"\xff" * CONFIG_BYTES if is_off_bus else bytes.fromhex(self.pci[name])
        if name in self.pci:
            return "Unknown" if is_off_bus and name == "current_link_speed" else self.pci[name]
        value = (self.sensors if SENSOR.fullmatch(name) else self.telemetry)[name]
        if self.condition == "healthy" or name == "name" or name.endswith("_label"):
            return value
        return None if self.condition == "resetting" else dead_value(name)

    def show(self, *names: str) -> None:
        """Write attributes with their content in the chip's present condition."""
        for name in names:
            self.overridden.discard(name)
            content = self._content(name)
            if content is None:
                put_errno(self.attribute(name), "ENODATA")
            else:
                put(self.attribute(name), content)

    def environment(self, *without: str) -> dict[str, str]:
        ids = {name: self.pci[name][2:].upper() for name in PCI_ATTRIBUTES[:5]}
        environment = {
            "PCI_CLASS": ids["class"].lstrip("0"),
            "PCI_ID": f"{ids['vendor']}:{ids['device']}",
            "PCI_SUBSYS_ID": f"{ids['subsystem_vendor']}:{ids['subsystem_device']}",
            "PCI_SLOT_NAME": self.bdf,
            "MODALIAS": self.pci["modalias"],
        }
        return {key: value for key, value in environment.items() if key not in without}

    def show_uevent(self) -> None:
        lines = ({"DRIVER": self.driver} if self.driver else {}) | self.environment()
        put(self.directory / "uevent", "\n".join(f"{k}={v}" for k, v in lines.items()))

    def fail(self, attribute: str, error: str = "EIO") -> None:
        """Let reads of an attribute fail, until `restore` or an operation that writes it."""
        self.overridden.add(attribute)
        put_errno(self.attribute(attribute), error)

    def write(self, attribute: str, content: bytes) -> None:
        """Let an attribute read exactly this, newline or not; it need not have existed."""
        self.overridden.add(attribute)
        put(self.attribute(attribute), content)

    def remove(self, attribute: str) -> None:
        """Remove an attribute (firmware that lacks the tag)."""
        self.overridden.add(attribute)
        remove(self.attribute(attribute))

    def block(self, attribute: str = "tt_heartbeat") -> None:
        """Let readers of an attribute wait until `unblock`."""
        self.overridden.add(attribute)
        replace(self.attribute(attribute), os.mkfifo)

    def restore(self, attribute: str = "tt_heartbeat") -> None:
        """Undo fail, write, remove or block; one waiting reader gets the value, others nothing."""
        self.show(attribute)

    unblock = restore

    # The firmware

    def beat(self) -> None:
        """Advance the heartbeat, if it can: not a dead, resetting or blocked chip's."""
        is_shown = self.hwmon is not None and "tt_heartbeat" in self.telemetry
        if is_shown and self.condition == "healthy" and "tt_heartbeat" not in self.overridden:
            self._count("tt_heartbeat")

    def freeze(self) -> None:
        """Stop the firmware: the ticker leaves the heartbeat alone, all else is as before."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False

    def trip(self) -> None:
        """Count a thermal trip (Blackhole only)."""
        self._count("tt_therm_trip_count")

    def _count(self, name: str) -> None:
        self.telemetry[name] = str(int(self.telemetry[name]) + 1)
        if self.hwmon is not None:
            self.show(name)

    def die(self, bus: bool = False) -> None:
        """Let every register read all ones, without error or event; with `bus`, `config`, too."""
        self._become("off-bus" if bus else "dead")

    def revive(self) -> None:
        """Let the chip answer again; if it was dead at probe, that is as late as `speak`."""
        self._become("healthy")

    def reset(self) -> None:
        """Begin a reset: ENODATA from all tt_* and hwmon until POST_RESET, without an event."""
        self._become("resetting")

    def post_reset(self) -> None:
        """End a reset: values again, and the heartbeat restarts lower; no event."""
        if "tt_heartbeat" in self.telemetry:
            self.telemetry["tt_heartbeat"] = "20"
        self._become("healthy")

    def _become(self, condition: Condition) -> None:
        self.condition = condition
        if self.present:
            self.show("current_link_speed", "config")
        if self.hwmon is not None:
            self.show(*self.telemetry, *self.sensors)
        if condition == "healthy":
            self._look_again()

    def silence(self) -> None:
        """Bind the driver again while the firmware is not ready: neither tt_* nor hwmon."""
        self.firmware = False
        if self.ordinal is not None:
            self.rebind()

    def speak(self) -> None:
        """Let the firmware become ready; Blackhole's driver shows it when it is bound again."""
        self.firmware = True
        self._look_again()

    def _look_again(self) -> None:
        is_unseen = self.ordinal is not None and self.hwmon is None
        if is_unseen and self.firmware and self.arch == "wormhole":
            self.node.show_telemetry(self)

    # The bus and the driver

    def vanish(self) -> None:
        """Remove the PCI function (unplugged, or by /sys/bus/pci/devices/*/remove)."""
        if self.present:
            self.node.unplug(self)

    def come_back(self, ordinal: int | None = None) -> None:
        """Let the function be found again, alive, now the last in the kernel's list."""
        if self.present:
            raise ValueError(f"{self.bdf} is there")
        self.condition = "healthy"
        if not self.frozen and "tt_heartbeat" in self.telemetry:  # it has lived on meanwhile
            self._count("tt_heartbeat")
        self.pci["driver_override"] = "(null)"
        self.node.chips.remove(self)
        self.node.chips.append(self)
        self.node.plug(self)
        self.node.bind(self, ordinal)

    def unbind(self) -> None:
        """Unbind the driver; the function stays on the bus."""
        self.node.release(self)

    def bind(self, ordinal: int | None = None) -> None:
        """Bind the driver, with the lowest free ordinal unless one is given."""
        if self.ordinal is not None or not self.present:
            raise ValueError(f"{self.bdf} cannot be bound")
        self.node.bind(self, ordinal)

    def rebind(self) -> None:
        """Unbind and bind, with the same ordinal: the remedy for lost telemetry of a Blackhole."""
        ordinal = self.ordinal
        self.unbind()
        self.bind(ordinal)

    def keep_for(self, driver: str) -> None:
        """Write `driver_override`: only this driver, such as vfio-pci, may probe; "(null)": any."""
        self.pci["driver_override"] = driver
        self.show("driver_override")

    def lose_class_device(self) -> None:
        """Let the driver, which stays bound, have no device: its probe has failed half-way."""
        self.node.hide(self)

    def bind_to(self, driver: str) -> None:
        """Bind another driver, such as vfio-pci, for which the function is kept."""
        self.unbind()
        self.keep_for(driver)
        self.driver = driver
        self.node.bind_driver(self)
        self.node.emit_pci("bind", self, DRIVER=driver)

    def mislead(self, target: str = "") -> None:
        """Let the by-pci link point elsewhere, such as to "../7"; "": remove it."""
        remove(self.by_pci)
        if target:
            self.by_pci.parent.mkdir(parents=True, exist_ok=True)
            self.by_pci.symlink_to(target)

    def set_pids(self, pids: Iterable[int | str]) -> None:
        """Set who has the device file open, if there is one; 0: of another namespace."""
        if self.ordinal is not None:
            put(self.pids, "\n".join(map(str, pids)))


# ---------------------------------------------------------------------------------------- the node


@in_steps
class SimulatedNode:
    """A machine's device tree under `root`, and the operations on it.

    `driver` is a release of tt-kmd ("1.34" to "2.10.1-pre"), which is loaded. A captured card has
    the attributes that it had with it, and one that is added has all of 2.10. `numbers` are (major,
    minor) by ordinal instead of the default (245:N, or the borrowed ones of "link").
    `links=False`: without our package's udev rule there are no by-pci links.

    `on_uevent` is called with each raw kernel uevent, at the moment of the operation at which the
    kernel sends it. `on_step` is called in the middle of operations, when a part of a device exists
    and another does not. `chips` has every function that was ever added, in the kernel's order.
    """

    def __init__(
        self,
        root: Path,
        *,
        driver: str = "2.10.1-pre",
        nodes: Literal["link", "mknod"] = "link",
        numbers: Sequence[tuple[int, int]] = (),
        links: bool = True,
    ) -> None:
        self.root = root
        self.chips: list[Chip] = []
        self.on_uevent: Callable[[bytes], None] | None = None
        self.on_step: Callable[[], None] | None = None
        self.version = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
        for path in ("class/hwmon", "bus/pci/devices", "devices"):
            (root / "sys" / path).mkdir(parents=True)
        (root / "dev").mkdir()
        (root / "proc/driver").mkdir(parents=True)
        put_control(root / "sys/bus/pci/rescan")
        self._driver = driver
        self._is_linked = nodes == "link"
        self._numbers = numbers
        self._links = links
        self._is_loaded = False
        self._bound: list[Chip] = []  # in the order of their probes
        self.lock = threading.RLock()  # keeps other threads from changing the tree
        self.boot()
        self.load_driver()

    @classmethod
    def from_capture(cls, root: Path, name: str, **options: Any) -> SimulatedNode:
        """Return the tree of a capture, with its driver, ordinals, hwmon numbers and values."""
        facts = capture(name)
        node = cls(root, driver=facts["driver"], **options)
        for function in sorted(facts["functions"], key=lambda f: (f["hwmon"] or 0, f["ordinal"])):
            shown = function.get("class", {})
            if board := function.get("board"):  # no telemetry, or nothing at all, was shown
                ident = board["serial"], board["asic_id"]
                code = int(board["ssid"], 16)
                card = next(name for name, each in CARDS.items() if each.code == code)
                chip = node._chip(card, function["path"], *ident)
                chip.pci |= function.get("pci", {})
                chip.firmware = not shown
            else:
                telemetry = {k: v for k, v in shown.items() if k.startswith("tt_")}
                sensors = {k: v for k, v in function["sensors"].items() if k != "uevent"}
                chip = Chip(node, function["path"], dict(function["pci"]), telemetry, sensors)
            node.chips.append(chip)
            node.plug(chip)
            node.bind(chip, function["ordinal"], function["hwmon"])
        return node

    def chip(self, name: str | int) -> Chip:
        """Return a chip by its BDF ("0000:01:00.0" or "01:00.0") or by its present ordinal."""
        for chip in self.chips:
            if str(name) in (chip.bdf, chip.bdf.removeprefix("0000:"), str(chip.ordinal)):
                return chip
        raise LookupError(f"no chip {name} among {[chip.bdf for chip in self.chips]}")

    @property
    def flags(self) -> list[str]:
        """The options that let the daemon use this tree."""
        roots = {"sysfs": "sys", "dev": "dev", "proc": "proc"}
        return [f"--{name}-root={self.root / path}" for name, path in roots.items()]

    # What can happen to a machine

    def add(
        self,
        card: str,
        *,
        bdf: str | None = None,
        numa_node: int | None = None,
        serial: str | None = None,
        asic_id: str | None = None,
        firmware: bool = True,
    ) -> list[Chip]:
        """Plug a card: its functions appear and are probed, with the events of a hot-plug.

        `bdf` and `asic_id` are those of the first. The NUMA node is -1 by default, but
        on a Galaxy 0 for the trays below bus 0x80 and 1 above. `firmware=False`: it is not ready.
        """
        code, _, functions = CARDS[card]
        is_galaxy = functions == len(GALAXY_BUSES)
        number = len(self.chips) + 1
        added = []
        for index, place in enumerate(self._places(card, bdf)):
            bus = int(place.split(":")[1], 16)
            board = bus >> 4 if is_galaxy else number
            own_serial = serial or f"000{code:04X}{511700100 + board}"
            own_id = f"{0x3B1D7A5620E40000 + (code << 8) + number + index:016X}"
            if asic_id and not index:
                own_id = asic_id
            chip = self._chip(card, _path(place), own_serial, own_id)
            numa = int(bus >= 0x80) if is_galaxy else -1
            numa = numa if numa_node is None else numa_node
            cpus = "0-1" if numa < 0 else str(numa)
            chip.pci |= {"numa_node": str(numa), "local_cpulist": cpus}
            chip.firmware = firmware
            self.chips.append(chip)
            self.plug(chip)
            self.bind(chip)
            added.append(chip)
        return added

    def _places(self, card: str, bdf: str | None) -> list[str]:
        functions = CARDS[card].functions
        if functions == len(GALAXY_BUSES):
            places = [f"0000:{bus:02x}:00.0" for bus in GALAXY_BUSES]
        else:
            used = {int(chip.bdf.split(":")[1], 16) for chip in self.chips}
            domain, first = (bdf or "0000:01").split(":")[:2]
            free = [bus for bus in range(int(first, 16), 256) if bdf or bus not in used]
            places = [f"{domain}:{bus:02x}:00.0" for bus in free[:functions]]
            places[0] = bdf or places[0]
        if taken := {chip.bdf for chip in self.chips} & {*places}:
            raise ValueError(f"{', '.join(taken)} is occupied")
        return places

    def _chip(self, card: str, path: str, serial: str, asic_id: str) -> Chip:
        """Return a chip of a card, with the values of the captured one of its architecture."""
        code, arch, _ = CARDS[card]
        sample = capture("n150-p150a")["functions"][0 if arch == "wormhole" else 1]
        identity = {"tt_card_type": card, "tt_serial": serial, "tt_asic_id": asic_id}
        config = sample["pci"]["config"]
        own = {
            "subsystem_device": f"0x{code:04x}",
            "modalias": re.sub("sd0000....", f"sd0000{code:04X}", sample["pci"]["modalias"]),
            "config": f"{config[:92]}{code:02x}00{config[96:]}",  # the same number at 0x2e
        }
        telemetry = {k: v for k, v in sample["class"].items() if k.startswith("tt_")} | identity
        sensors = {k: v for k, v in sample["sensors"].items() if k != "uevent"}
        return Chip(self, path, sample["pci"] | own, telemetry, sensors)

    def load_driver(self, probe: bool = True) -> None:
        """Load the driver, and probe all chips, or (`probe=False`) let `probe` do that."""
        if self._is_loaded:
            raise ValueError("the driver is loaded")
        self._is_loaded = True
        driver = self.root / "sys/bus/pci/drivers/tenstorrent"
        module = self.root / "sys/module/tenstorrent"
        (module / "drivers").mkdir(parents=True)
        put(module / "version", self._driver)
        (self.root / "sys/class/tenstorrent").mkdir()
        if self.version >= PROC_SINCE:
            (self.root / "proc/driver/tenstorrent").mkdir()
        self._emit("add", "/class/tenstorrent", SUBSYSTEM="class")
        link(driver / "module", module)
        for name in ("bind", "unbind"):
            put_control(driver / name)
        link(module / "drivers/pci:tenstorrent", driver)
        for chip in self.chips if probe else ():
            self.bind(chip)
        self._emit("add", "/bus/pci/drivers/tenstorrent", SUBSYSTEM="drivers")
        self._emit("add", "/module/tenstorrent", SUBSYSTEM="module")

    def probe(self, chip: str | int) -> None:
        """Let the driver, which was loaded without that, probe a chip."""
        self.bind(self.chip(chip))

    def can_bind(self, chip: Chip) -> bool:
        """Return whether the driver, if it is loaded, could take the chip now."""
        is_kept = chip.pci["driver_override"] not in ("(null)", "tenstorrent")
        return chip.present and not is_kept and not chip.driver

    def unload_driver(self) -> None:
        """Unload the driver: chips are released, the last bound first."""
        for chip in reversed(list(self._bound)):
            self.release(chip)
        for directory in ("bus/pci/drivers", "class", "module"):
            remove(self.root / "sys" / directory / "tenstorrent")
            if directory == "class":
                remove_empty(self.root / "proc/driver/tenstorrent")
            subsystem = directory.rpartition("/")[2]
            self._emit("remove", f"/{directory}/tenstorrent", SUBSYSTEM=subsystem)
        self._is_loaded = False

    def swap_ordinals(self, a: str | int, b: str | int) -> None:
        """Renumber two chips, as a reload can: unbound, then bound with the other's number."""
        one, other = self.chip(a), self.chip(b)
        ordinals = one.ordinal, other.ordinal
        self.release(one)
        self.release(other)
        self.bind(other, ordinals[0])
        self.bind(one, ordinals[1])

    def set_hugepages(self, count_1g: int) -> None:
        """Reserve 1 GiB pages, all free, and mount hugetlbfs twice, on the host's paths."""
        pool = self.root / "sys/kernel/mm/hugepages/hugepages-1048576kB"
        pool.mkdir(parents=True, exist_ok=True)
        for name in ("nr_hugepages", "free_hugepages"):
            put(pool / name, str(count_1g))
        lines = []
        for name, size in {"hugepages": "2M", "hugepages-1G": "1024M"}.items():
            (self.root / "dev" / name).mkdir(exist_ok=True)
            lines.append(f"hugetlbfs /dev/{name} hugetlbfs rw,relatime,pagesize={size} 0 0")
        put(self.root / "proc/mounts", "\n".join(lines))

    def set_iommu(self, bdf: str, type: str = "DMA-FQ") -> None:
        """Put a chip behind an IOMMU, in a group of its own; "identity" translates nothing."""
        chip = self.chip(bdf)
        group = self.root / f"sys/kernel/iommu_groups/{self.chips.index(chip)}"
        remove(group)
        remove(chip.directory / "iommu_group")
        link(group / "devices" / chip.bdf, chip.directory)
        put(group / "type", type)
        link(chip.directory / "iommu_group", group)

    def tick(self) -> None:
        """Advance the heartbeat of every chip whose firmware lives and is not frozen."""
        for chip in self.chips:
            if not chip.frozen:
                chip.beat()

    def boot(self) -> None:
        """Give the machine another boot ID; what else a boot changes is the caller's."""
        path = self.root / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, str(uuid.uuid4()))

    def start_process(
        self, pid: int, cgroup: str, nodes: Sequence[str], command: str = "python3"
    ) -> None:
        """Show a process of this /proc/<pid>/cgroup that has opened device files.

        Each is named by its path (FileNotFoundError if it does not exist) or by a CDI name.
        """
        opened = [self._opened(node) for node in nodes]
        process = self.root / f"proc/{pid}"
        process.mkdir()
        put(process / "comm", command)
        put(process / "cgroup", cgroup)
        for opener in filter(None, opened):
            opener.set_pids([*opener.pids.read_text().split(), pid])

    def end_process(self, pid: int) -> None:
        """Remove a process: it has closed what it had open."""
        remove(self.root / f"proc/{pid}")
        for chip in self.chips:
            if chip.ordinal is not None:
                chip.set_pids([p for p in chip.pids.read_text().split() if p != str(pid)])

    def _opened(self, node: str) -> Chip | None:
        """Return the chip that a path leads to, or that a CDI name stands for."""
        for chip in self.chips:
            if chip.bdf == node.rpartition("=")[2]:
                return chip if chip.ordinal is not None else None
        path = Path(node)
        path.lstat()
        while path.is_symlink() and path.parent.name.startswith("by-"):
            path = Path(os.path.normpath(path.parent / path.readlink()))
            path.lstat()
        for chip in self.chips if path.parent.name == "tenstorrent" else ():
            if str(chip.ordinal) == path.name:
                return chip
        return None

    # Kernel uevents

    def _number(self, ordinal: int) -> tuple[int, int]:
        if ordinal < len(self._numbers):
            return self._numbers[ordinal]
        borrowed = [*BORROWED][ordinal % len(BORROWED)]
        return borrowed if self._is_linked else (DRIVER_MAJOR, ordinal)

    def _emit(self, action: str, devpath: str, **env: str) -> None:
        if self.on_uevent:
            self.on_uevent(wire(action, devpath, env, 0))

    def _step(self) -> None:
        if self.on_step:
            self.on_step()

    def emit_pci(self, action: str, chip: Chip, *without: str, **env: str) -> None:
        env |= chip.environment(*without)
        self._emit(action, f"/devices/{chip.path}", SUBSYSTEM="pci", **env)

    def _emit_class(self, action: str, chip: Chip) -> None:
        assert chip.ordinal is not None
        major, minor = map(str, self._number(chip.ordinal))
        env = {"MAJOR": major, "MINOR": minor, "DEVNAME": f"tenstorrent/{chip.ordinal}"}
        devpath = f"/devices/{chip.path}/tenstorrent/tenstorrent!{chip.ordinal}"
        self._emit(action, devpath, SUBSYSTEM="tenstorrent", **env)

    # A chip comes

    def plug(self, chip: Chip) -> None:
        """Let the PCI core find a function."""
        chip.present = True
        chip.directory.mkdir(parents=True)
        for name in PCI_ATTRIBUTES:
            chip.show_uevent() if name == "uevent" else chip.show(name)
            self._step()
        link(chip.directory / "subsystem", self.root / "sys/bus/pci")
        link(self.root / "sys/bus/pci/devices" / chip.bdf, chip.directory)
        self._step()
        self.emit_pci("add", chip)

    def bind(self, chip: Chip, ordinal: int | None = None, hwmon: int | None = None) -> None:
        """Let the driver take a chip, if it is loaded and can have it.

        Device file and class directory come first, telemetry next if the firmware is ready.
        """
        if not self._is_loaded or not self.can_bind(chip):
            return
        if chip.condition == "resetting":  # a new probe looks at the chip again
            chip.condition = "healthy"
        chip.ordinal = self._free_ordinal(chip) if ordinal is None else ordinal
        if any(other.ordinal == chip.ordinal and other is not chip for other in self.chips):
            raise ValueError(f"ordinal {chip.ordinal} is in use")
        self._bound.append(chip)
        chip.driver = "tenstorrent"
        self.bind_driver(chip)
        is_ready = chip.firmware and chip.condition == "healthy"
        self._show_class(chip)
        if is_ready:
            self.show_telemetry(chip, hwmon)
        self.emit_pci("bind", chip, DRIVER="tenstorrent")

    def bind_driver(self, chip: Chip) -> None:
        driver = self.root / "sys/bus/pci/drivers" / chip.driver
        link(chip.directory / "driver", driver)
        link(driver / chip.bdf, chip.directory)
        chip.show_uevent()

    def _free_ordinal(self, chip: Chip) -> int:
        used = {other.ordinal for other in self.chips if other.ordinal is not None}
        is_galaxy = chip.pci["subsystem_device"] in ("0x0035", "0x0047")
        if is_galaxy:
            bus = int(chip.bdf.split(":")[1], 16)
            tray = GALAXY_ORDINALS[chip.arch].get(bus >> 4)
            if tray is not None and 1 <= bus & 15 <= 8 and tray + (bus & 15) - 1 not in used:
                return tray + (bus & 15) - 1
        return _lowest_free(used)

    def _show_class(self, chip: Chip) -> None:
        """Make the class directory and device file as device_add(): links, number, device file."""
        assert chip.ordinal is not None
        entry, (major, minor) = chip.class_directory, self._number(chip.ordinal)
        entry.mkdir(parents=True)
        name = f"DEVNAME=tenstorrent/{chip.ordinal}"
        put(entry / "uevent", f"MAJOR={major}\nMINOR={minor}\n{name}")
        link(entry / "device", chip.directory)
        link(entry / "subsystem", self.root / "sys/class/tenstorrent")
        link(self.root / "sys/class/tenstorrent" / entry.name, entry)
        self._step()
        put(entry / "dev", f"{major}:{minor}")
        self._step()
        if self.version >= PROC_SINCE:
            chip.pids.parent.mkdir()
            put(chip.pids, b"")
        chip.device_node.parent.mkdir(exist_ok=True)
        if self._is_linked:
            chip.device_node.symlink_to(BORROWED.get((major, minor), f"/dev/char/{major}:{minor}"))
        else:
            os.mknod(chip.device_node, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        self._step()
        self._emit_class("add", chip)
        if not self._is_linked:
            chip.device_node.chmod(0o666)
        self._make_link(chip, "by-pci")
        self._step()

    def _show_hwmon(self, chip: Chip, number: int | None) -> None:
        used = {other.hwmon for other in self.chips if other.hwmon is not None}
        chip.hwmon = _lowest_free(used) if number is None else number
        hwmon = chip.hwmon_directory
        hwmon.mkdir(parents=True)
        link(hwmon / "device", chip.directory)
        link(hwmon / "subsystem", self.root / "sys/class/hwmon")
        put(hwmon / "uevent", "")
        chip.show(*chip.sensors)
        link(self.root / "sys/class/hwmon" / hwmon.name, hwmon)
        self._emit("add", f"/devices/{chip.path}/hwmon/{hwmon.name}", SUBSYSTEM="hwmon")

    def show_telemetry(self, chip: Chip, hwmon: int | None = None) -> None:
        """Make hwmon and tt_*, send `change`, then let udev make the by-id link."""
        self._show_hwmon(chip, hwmon)
        for name in chip.telemetry:
            chip.show(name)
            self._step()
        if self.version >= CHANGE_SINCE:
            self._emit_class("change", chip)
            self._make_link(chip, "by-id")

    # A chip goes

    def release(self, chip: Chip) -> None:
        """Let its driver release a chip, in the order: links, hwmon, device file, class."""
        if not chip.driver:
            return
        remove(chip.directory / "driver")
        remove(self.root / "sys/bus/pci/drivers" / chip.driver / chip.bdf)
        self._step()
        self.hide(chip)
        chip.driver = ""
        chip.show_uevent()
        self.emit_pci("unbind", chip, "MODALIAS")
        self._step()

    def hide(self, chip: Chip) -> None:
        """Remove the device of a chip, if there is one."""
        if chip.ordinal is not None:
            self._hide_hwmon(chip)
            self._hide_class(chip)
            self._bound.remove(chip)
        chip.ordinal = chip.hwmon = None

    def _hide_hwmon(self, chip: Chip) -> None:
        if chip.hwmon is not None:
            hwmon = chip.hwmon_directory
            remove(self.root / "sys/class/hwmon" / hwmon.name)
            remove(hwmon.parent)
            self._emit("remove", f"/devices/{chip.path}/hwmon/{hwmon.name}", SUBSYSTEM="hwmon")
            self._step()

    def _hide_class(self, chip: Chip) -> None:
        assert chip.ordinal is not None
        entry = chip.class_directory
        remove(chip.pids.parent)
        remove(chip.device_node)
        remove_empty(chip.device_node.parent)
        self._step()
        # device_del(): the links that lead to it and away from it go before its attributes.
        links = [entry / "dev", entry / "device", entry / "subsystem"]
        links.append(self.root / "sys/class/tenstorrent" / entry.name)
        for gone in [*links, *sorted({*entry.iterdir()} - {*links})]:
            remove(gone)
            self._step()
        remove(entry.parent)
        self._emit_class("remove", chip)
        self._remove_links(chip)

    def unplug(self, chip: Chip) -> None:
        """Remove a function from the bus, after its driver has released it."""
        self.release(chip)
        for name in PCI_ATTRIBUTES:
            remove(chip.directory / name)
            self._step()
        remove(self.root / "sys/bus/pci/devices" / chip.bdf)
        remove(chip.directory)
        chip.present = False
        self.emit_pci("remove", chip)
        self._step()

    # udev, which comes after the kernel's event

    def _link_paths(self, chip: Chip) -> dict[str, Path]:
        """Return the chip's links in /dev/tenstorrent, by directory."""
        links = {"by-pci": chip.by_pci} if self._links else {}
        if "tt_asic_id" in chip.telemetry and self.version >= CHANGE_SINCE:
            name = f"{chip.arch}-{chip.telemetry['tt_asic_id']}"
            links["by-id"] = self.root / "dev/tenstorrent/by-id" / name
        return links

    def _make_link(self, chip: Chip, kind: str) -> None:
        if path := self._link_paths(chip).get(kind):
            remove(path)
            link(path, chip.device_node)

    def _remove_links(self, chip: Chip) -> None:
        """Remove the chip's links, unless they lead to another's device file by now."""
        for path in self._link_paths(chip).values():
            if path.is_symlink() and path.readlink().name == str(chip.ordinal):
                remove(path)
            remove_empty(path.parent)
        remove_empty(self.root / "dev/tenstorrent")


def _lowest_free(used: set[int]) -> int:
    return next(number for number in range(len(used) + 1) if number not in used)


def _path(bdf: str) -> str:
    """Return a function's path: below a root bus for every 16 buses, a root port for each card."""
    domain, bus = bdf.split(":")[0], int(bdf.split(":")[1], 16)
    root = max(bus - 1, 0) & 0xF0
    port = bus - root + (1 if root == 0 else -1)  # the first two slots of bus 0 are taken
    return f"pci{domain}:{root:02x}/{domain}:{root:02x}:{port:02x}.0/{bdf}"


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
