"""A chip of the simulated node: its attributes, its firmware, its driver and its device file.

What the tree shows of it, and the kernel's events, are in the order of the real driver (tt-kmd),
of the PCI core and of udev, as recorded (see tests.world.cards).
"""

from __future__ import annotations

import functools
import inspect
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tests.world.cards import ARCHITECTURE_OF, ARCHITECTURES, NAMES, SENSOR, bus_of
from tests.world.tree import link, put, put_errno, remove, replace

if TYPE_CHECKING:
    from tests.world.node import SimulatedNode

ALL_ONES = "4294967295"
PROC_SINCE = (2, 5)  # release of the driver
NOT_KEPT = "(null)"  # driver_override of a function that any driver may have

Condition = Literal["healthy", "dead", "resetting"]
T = TypeVar("T")


def dead_value(name: str) -> str:
    """Return the value of an attribute when every register of the chip reads all ones.

    Captured for heartbeat, card type, ids, clock, versions, temp1_input and power1_input. The
    others follow from the same arithmetic (32 bits: mV unchanged, mA and limits in thousandths),
    tt_eth_fw_ver from its bit fields 8.4.12. Drivers before 2.9 show some other numbers.
    """
    special = {
        "tt_card_type": "unknown", "tt_serial": "F" * 16, "tt_asic_id": "F" * 16,
        "tt_eth_fw_ver": "255.15.4095", "temp1_input": "65535999", "temp1_max": "4294966296",
        "curr1_input": "4294966296", "curr1_max": "4294966296", "power1_input": "4293967296",
        "power1_max": "4293967296", "in0_max": "65535",
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


def lowest_free(used: Iterable[int | None]) -> int:
    """Return the lowest number that is not used, as the kernel's allocators do."""
    taken = {number for number in used if number is not None}
    return next(number for number in range(len(taken) + 1) if number not in taken)


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
    frozen: bool = False  # the firmware has stopped: the heartbeat, and nothing else
    present: bool = False  # on the PCI bus
    ordinal: int | None = None  # N of /dev/tenstorrent/N while the driver is bound
    hwmon: int | None = None  # while the driver shows telemetry
    driver: str = ""  # the bound one: "tenstorrent", or another such as "vfio-pci"
    has_reported: bool = False  # telemetry, at any time

    def __post_init__(self) -> None:
        root = self.node.root
        self.bdf = self.path.rsplit("/", 1)[-1]
        self.arch = ARCHITECTURE_OF[self.pci["device"]]
        self.lock = self.node.lock

        self.directory = root / "sys/devices" / self.path
        self.on_bus = root / "sys/bus/pci/devices" / self.bdf
        # The link to the device file that our package's udev rule makes.
        self.by_pci = root / "dev/tenstorrent/by-pci" / self.bdf

    @property
    def device_node(self) -> Path:
        """The device file's path, while the driver is bound."""
        return self.node.root / f"dev/tenstorrent/{self.ordinal}"

    @property
    def pids(self) -> Path:
        """The driver's file of the processes that have the device file open."""
        return self.node.root / f"proc/driver/tenstorrent/{self.ordinal}/pids"

    @property
    def class_directory(self) -> Path:
        """The directory of the class device."""
        return self.directory / f"tenstorrent/tenstorrent!{self.ordinal}"

    # Attributes

    def attribute(self, name: str) -> Path:
        """Return the path of an attribute: PCI's, tt_*, a sensor, or `dev`."""
        if name in self.pci:
            return self.directory / name

        hwmon = self.directory / f"hwmon/hwmon{self.hwmon}"
        return (hwmon if SENSOR.fullmatch(name) else self.class_directory) / name

    def _content(self, name: str) -> str | None:
        """Return an attribute's content in the chip's present condition; None: ENODATA."""
        if name in self.pci:
            return self.pci[name]

        value = (self.sensors if SENSOR.fullmatch(name) else self.telemetry)[name]
        if self.condition == "healthy" or name == "name" or name.endswith("_label"):
            return value
        return None if self.condition == "resetting" else dead_value(name)

    def show(self, *names: str) -> None:
        """Write attributes with their content in the chip's present condition."""
        for name in names:
            content = self._content(name)
            if content is None:
                put_errno(self.attribute(name), "ENODATA")
            else:
                put(self.attribute(name), content)
            self.node.step()

    def fail(self, attribute: str, error: str = "EIO") -> None:
        """Let reads of an attribute fail, until `show` or an operation that writes it."""
        put_errno(self.attribute(attribute), error)

    def write(self, attribute: str, content: bytes) -> None:
        """Let an attribute read exactly this, newline or not; it need not have existed."""
        put(self.attribute(attribute), content)

    def remove(self, attribute: str) -> None:
        """Remove an attribute (firmware that lacks the tag)."""
        remove(self.attribute(attribute))

    def block(self) -> None:
        """Let readers of the heartbeat wait until it is shown: one gets it, others nothing."""
        replace(self.attribute("tt_heartbeat"), os.mkfifo)

    # The firmware

    def beat(self) -> None:
        """Advance the heartbeat, if it can: not a stopped, dead, resetting or blocked chip's."""
        is_living = self.condition == "healthy" and not self.frozen
        if is_living and self.attribute("tt_heartbeat").is_file():
            self._count()
            self.show("tt_heartbeat")

    def _count(self) -> None:
        self.telemetry["tt_heartbeat"] = str(int(self.telemetry["tt_heartbeat"]) + 1)

    def freeze(self) -> None:
        self.frozen = True

    def silence(self) -> None:
        """Bind the driver again while the firmware is not ready: neither tt_* nor hwmon."""
        self.firmware = False
        self.rebind()

    def die(self) -> None:
        """Let every register read all ones, without error or event."""
        self._become("dead")

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
        if self.hwmon is not None:
            self.show(*self.telemetry, *self.sensors)
        if condition == "healthy":
            self._look_again()

    def speak(self) -> None:
        """Let the firmware become ready; Blackhole's driver shows it when it is bound again."""
        self.firmware = True
        self._look_again()

    def _look_again(self) -> None:
        is_unseen = self.ordinal is not None and self.hwmon is None
        if is_unseen and self.firmware and ARCHITECTURES[self.arch].asks_again:
            self._show_telemetry()

    # The bus

    def plug(self) -> None:
        """Let the PCI core find the function."""
        self.present = True
        self.directory.mkdir(parents=True)
        self.show(*self.pci)
        link(self.directory / "subsystem", self.node.root / "sys/bus/pci")
        link(self.on_bus, self.directory)
        self.node.step()
        self._emit("add")

    def vanish(self) -> None:
        """Remove the PCI function (unplugged, or by /sys/bus/pci/devices/*/remove)."""
        self.unbind()
        self._hide(*map(self.attribute, self.pci), self.on_bus, self.directory)
        self.present = False
        self._emit("remove")
        self.node.step()

    def come_back(self) -> None:
        """Let the function be found again, alive, now the last in the kernel's list."""
        self.condition = "healthy"
        if not self.frozen and "tt_heartbeat" in self.telemetry:  # it has lived on meanwhile
            self._count()
        self.pci["driver_override"] = NOT_KEPT

        self.node.chips.remove(self)
        self.node.chips.append(self)
        self.plug()
        self.bind()

    # The driver

    def bind(self, ordinal: int | None = None) -> None:
        """Let the driver take the chip, if it is loaded and can have it.

        Device file and class directory come first, telemetry next if the firmware is ready.
        """
        is_kept = self.pci["driver_override"] not in (NOT_KEPT, "tenstorrent")
        if not self.node.is_loaded or not self.present or is_kept or self.driver:
            return
        if self.condition == "resetting":  # a new probe looks at the chip again
            self.condition = "healthy"
        self.ordinal = self._free_ordinal() if ordinal is None else ordinal
        self._link_driver("tenstorrent")
        self._show_class()
        if self.firmware and self.condition == "healthy":
            self._show_telemetry()
        self._emit("bind")

    def unbind(self) -> None:
        """Unbind the driver; the function stays on the bus."""
        if not self.driver:
            return
        self._hide(self.directory / "driver", self._driver_directory / self.bdf)
        if self.ordinal is not None:
            self._hide_class()
        self.ordinal = self.hwmon = None
        self.driver = ""
        self._emit("unbind")
        self.node.step()

    def rebind(self) -> None:
        """Unbind and bind, with the same ordinal: the remedy for lost telemetry of a Blackhole."""
        ordinal = self.ordinal
        self.unbind()
        self.bind(ordinal)

    def keep_for(self, driver: str) -> None:
        """Write `driver_override`: only this driver, such as vfio-pci, may probe; "(null)": any."""
        self.pci["driver_override"] = driver
        self.show("driver_override")

    def bind_to(self, driver: str) -> None:
        """Bind another driver, such as vfio-pci, for which the function is kept."""
        self.unbind()
        self.keep_for(driver)
        self._link_driver(driver)
        self._emit("bind")

    @property
    def _driver_directory(self) -> Path:
        return self.node.root / "sys/bus/pci/drivers" / self.driver

    def _link_driver(self, name: str) -> None:
        self.driver = name
        link(self.directory / "driver", self._driver_directory)
        link(self._driver_directory / self.bdf, self.directory)

    def _free_ordinal(self) -> int:
        used = {each.ordinal for each in self.node.chips}
        card = NAMES.get(int(self.pci["subsystem_device"], 16), "")
        if card.startswith("galaxy"):
            bus = bus_of(self.bdf)
            tray, position = ARCHITECTURES[self.arch].trays.get(bus >> 4), bus & 15
            # In a virtual machine, a Galaxy's chips have buses that say nothing of trays.
            if tray is not None and 1 <= position <= 8 and tray + position - 1 not in used:
                return tray + position - 1
        return lowest_free(used)

    def _show_class(self) -> None:
        """Make the class directory and device file as device_add(): links, number, device file."""
        node, entry = self.node, self.class_directory
        major, minor = node.number_of(self.ordinal)
        entry.mkdir(parents=True)
        link(entry / "device", self.directory)
        link(entry / "subsystem", node.root / "sys/class/tenstorrent")
        link(node.root / "sys/class/tenstorrent" / entry.name, entry)
        node.step()
        put(entry / "dev", f"{major}:{minor}")
        node.step()

        if node.version >= PROC_SINCE:
            self.pids.parent.mkdir(parents=True)
            put(self.pids, b"")

        # devtmpfs makes the device file 0600, before the event of which udev makes it 0666.
        self.device_node.parent.mkdir(exist_ok=True)
        if node.is_linked:
            self.device_node.symlink_to(node.borrowed(major, minor))
        else:
            os.mknod(self.device_node, stat.S_IFCHR | 0o600, os.makedev(major, minor))
        node.step()

        self._emit("add", of_class=True)
        if not node.is_linked:
            self.device_node.chmod(0o666)
        if node.has_rule:
            remove(self.by_pci)
            link(self.by_pci, self.device_node)
        node.step()

    def _hide_class(self) -> None:
        entry = self.class_directory
        class_link = self.node.root / "sys/class/tenstorrent" / entry.name
        # device_del(): the links that lead to it and away from it go before its attributes.
        first = [entry / "dev", entry / "device", entry / "subsystem"]
        self._hide(self.directory / "hwmon", self.pids.parent, self.device_node, *first, class_link)
        self._hide(*sorted(entry.iterdir()), entry.parent)
        self._emit("remove", of_class=True)

        # udev comes after the event: the link can lead to another's device file already.
        if self.by_pci.is_symlink() and self.by_pci.readlink().name == str(self.ordinal):
            remove(self.by_pci)

    def _show_telemetry(self) -> None:
        """Make hwmon and tt_*, then send `change` (drivers before 2.6 do not)."""
        self.has_reported = True
        self.hwmon = lowest_free(each.hwmon for each in self.node.chips)
        (self.directory / f"hwmon/hwmon{self.hwmon}").mkdir(parents=True)
        self.show(*self.sensors, *self.telemetry)
        self._emit("change", of_class=True)

    def _hide(self, *paths: Path) -> None:
        for path in paths:
            remove(path)
            self.node.step()

    def _emit(self, action: str, *, of_class: bool = False) -> None:
        """Send a kernel event about the PCI function, or about the class device."""
        if of_class:
            devpath = f"/devices/{self.path}/tenstorrent/{self.class_directory.name}"
            self.node.emit(action, devpath, SUBSYSTEM="tenstorrent")
        else:
            pci_id = f"{self.pci['vendor'][2:]}:{self.pci['device'][2:]}".upper()
            self.node.emit(action, f"/devices/{self.path}", SUBSYSTEM="pci", PCI_ID=pci_id)

    def set_pids(self, pids: Iterable[int | str]) -> None:
        """Set who has the device file open, if there is one; 0: of another namespace."""
        if self.ordinal is not None:
            put(self.pids, "\n".join(map(str, pids)))
