"""A simulated node: sysfs, /dev and /proc of a machine with Tenstorrent cards, as a tree.

`SimulatedNode(root)` keeps `<root>/sys`, `<root>/dev` and `<root>/proc` as the real driver (tt-kmd)
and udev show them, as far as programs look at it: names, formats, order of appearance and events.

For reads that fail or block see tests.world.tree. A device file is a symlink to /dev/null or a
similar device ("link"), whose number sysfs's `dev` then repeats, or, where a test runs as root, a
real character device ("mknod").
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.world.cards import ARCHITECTURES, CARDS, GALAXY_BUSES, bus_of, capture
from tests.world.chip import Chip, in_steps
from tests.world.tree import put, put_control, remove

__all__ = ["CARDS", "Chip", "SimulatedNode", "Ticker", "wire"]

DRIVER_MAJOR = 245  # dynamic in reality; the number of every capture

# Symlinks borrow the numbers of these devices, which every machine and container has.
BORROWED = {
    (1, 3): "/dev/null", (1, 5): "/dev/zero", (1, 7): "/dev/full", (1, 8): "/dev/random",
    (1, 9): "/dev/urandom",
}  # fmt: skip
NOT_SIMULATED = {"config", "local_cpulist", "modalias", "uevent"}  # attributes of captures


def wire(action: str, devpath: str, env: Mapping[str, str]) -> bytes:
    """Return a kernel uevent as it arrives: a header, then NUL-terminated assignments."""
    assignments = {"ACTION": action, "DEVPATH": devpath, **env, "SEQNUM": "1"}
    lines = [f"{action}@{devpath}", *(f"{k}={v}" for k, v in assignments.items())]
    return "".join(f"{line}\0" for line in lines).encode()


@in_steps
class SimulatedNode:
    """A machine's device tree under `root`, and the operations on it.

    `driver` is a release of tt-kmd ("1.34" to "2.10.1-pre"), which is loaded. A captured card has
    the attributes that it had with it, and one that is added has all of 2.10. `numbers` are (major,
    minor) by ordinal instead of the default (245:N, or the borrowed ones of "link").
    `links=False`: no udevd runs, so there are no by-pci links.

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
        self.version = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
        self.is_linked = nodes == "link"
        self.has_rule = links
        self.chips: list[Chip] = []
        self.is_loaded = False
        self.on_uevent: Callable[[bytes], object] | None = None
        self.on_step: Callable[[], None] | None = None
        self.lock = threading.RLock()  # keeps other threads from changing the tree
        self._driver = driver
        self._numbers = numbers

        for path in ("sys/bus/pci/devices", "sys/devices", "dev", "proc"):
            (root / path).mkdir(parents=True)
        if links:  # udevd runs, with our rule
            (root / "run/udev").mkdir(parents=True)
            (root / "run/udev/control").touch()
        put_control(root / "sys/bus/pci/rescan")

        self.boot()
        self.load_driver()

    @classmethod
    def from_capture(cls, root: Path, name: str, **options: Any) -> SimulatedNode:
        """Return the tree of a capture, with its driver, ordinals, hwmon numbers and values."""
        facts = capture(name)
        node = cls(root, driver=facts["driver"], **options)
        for function in sorted(facts["functions"], key=lambda f: (f["hwmon"] or 0, f["ordinal"])):
            chip = Chip(node, function["path"], *_values(function))
            chip.firmware = bool(chip.telemetry)
            node.chips.append(chip)
            chip.plug()
            chip.bind(function["ordinal"])
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
        return [f"--root={self.root}"]

    # Cards

    def add(
        self,
        card: str,
        *,
        bdf: str | None = None,
        numa_node: int | None = None,
        firmware: bool = True,
    ) -> list[Chip]:
        """Plug a card: its functions appear and are probed, with the events of a hot-plug.

        `bdf` is that of the first. The NUMA node is -1 by default, but on a Galaxy 0 for the trays
        below bus 0x80 and 1 above. `firmware=False`: it is not ready.
        """
        is_galaxy = card.startswith("galaxy")
        code, arch, _ = CARDS[card]
        sample = capture("n150-p150a")["functions"][ARCHITECTURES[arch].sample]
        number = len(self.chips) + 1
        added = []
        for index, address in enumerate(self._addresses(card, bdf)):
            path = f"pci{address[:4]}:00/{address[:4]}:00:02.0/{address}"
            chip = Chip(self, path, *_values(sample), firmware)

            usual = int(bus_of(address) >= 0x80) if is_galaxy else -1
            chip.pci["numa_node"] = str(usual if numa_node is None else numa_node)
            chip.pci["subsystem_device"] = f"0x{code:04x}"
            # The functions of one board, such as a tray of a Galaxy, share its serial.
            board = bus_of(address) >> 4 if is_galaxy else number
            asic = 0x3B1D7A5620E40000 + (code << 8) + number + index
            chip.telemetry |= {
                "tt_card_type": card,
                "tt_serial": f"000{code:04X}{511700100 + board}",
                "tt_asic_id": f"{asic:016X}",
            }

            self.chips.append(chip)
            chip.plug()
            chip.bind()
            added.append(chip)
        return added

    def _addresses(self, card: str, bdf: str | None) -> list[str]:
        """Return where a card's functions are: its own, or free buses behind `bdf`'s."""
        if card.startswith("galaxy"):
            return [f"0000:{bus:02x}:00.0" for bus in GALAXY_BUSES]
        used = {bus_of(chip.bdf) for chip in self.chips}
        domain, first = (bdf or "0000:01").split(":")[:2]
        free = [bus for bus in range(int(first, 16), 256) if bdf or bus not in used]
        found = [f"{domain}:{bus:02x}:00.0" for bus in free[: CARDS[card].functions]]
        return [bdf or found[0], *found[1:]]

    # The driver

    def load_driver(self, probe: bool = True) -> None:
        """Load the driver, and probe all chips, or (`probe=False`) let Chip.bind() do that."""
        self.is_loaded = True

        driver = self.root / "sys/bus/pci/drivers/tenstorrent"
        module = self.root / "sys/module/tenstorrent"
        module.mkdir(parents=True)
        put(module / "version", self._driver)
        (self.root / "sys/class/tenstorrent").mkdir(parents=True)
        driver.mkdir(parents=True)
        for name in ("bind", "unbind"):
            put_control(driver / name)
        for chip in self.chips if probe else ():
            chip.bind()
        self.emit("add", "/module/tenstorrent", SUBSYSTEM="module")

    def unload_driver(self) -> None:
        """Unload the driver: chips are released, the last found first."""
        for chip in reversed(self.chips):
            if chip.driver == "tenstorrent":
                chip.unbind()

        for directory in ("sys/bus/pci/drivers", "sys/class", "sys/module", "proc/driver"):
            remove(self.root / directory / "tenstorrent")
        self.emit("remove", "/module/tenstorrent", SUBSYSTEM="module")
        self.is_loaded = False

    def swap_ordinals(self, a: str | int, b: str | int) -> None:
        """Renumber two chips, as a reload can: unbound, then bound with the other's number."""
        one, other = self.chip(a), self.chip(b)
        ordinals = one.ordinal, other.ordinal
        one.unbind()
        other.unbind()
        other.bind(ordinals[0])
        one.bind(ordinals[1])

    # The rest of the machine

    def boot(self) -> None:
        """Give the machine another boot ID; what else a boot changes is the caller's."""
        path = self.root / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, str(uuid.uuid4()))

    def tick(self) -> None:
        """Advance the heartbeat of every chip whose firmware lives and is not frozen."""
        for chip in self.chips:
            chip.beat()

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
        """Put a chip behind an IOMMU; "identity" translates nothing."""
        group = self.chip(bdf).directory / "iommu_group"
        group.mkdir(exist_ok=True)
        put(group / "type", type)

    def start_process(self, pid: int, cgroup: str, command: str) -> None:
        """Show a process of this /proc/<pid>/cgroup."""
        process = self.root / f"proc/{pid}"
        process.mkdir()
        put(process / "comm", command)
        put(process / "cgroup", cgroup)

    # What its chips need

    def number_of(self, ordinal: int | None) -> tuple[int, int]:
        """Return major and minor of a device file."""
        assert ordinal is not None
        if ordinal < len(self._numbers):
            return self._numbers[ordinal]
        borrowed = [*BORROWED][ordinal % len(BORROWED)]
        return borrowed if self.is_linked else (DRIVER_MAJOR, ordinal)

    def borrowed(self, major: int, minor: int) -> str:
        """Return the device of this machine that a device file leads to."""
        return BORROWED.get((major, minor), f"/dev/char/{major}:{minor}")

    def emit(self, action: str, devpath: str, **env: str) -> None:
        """Send a kernel uevent."""
        if self.on_uevent:
            self.on_uevent(wire(action, devpath, env))

    def step(self) -> None:
        """Let others look: a part of a device exists, and another does not."""
        if self.on_step:
            self.on_step()


def _values(function: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return PCI's attributes, the telemetry and the sensors of a captured function."""
    telemetry = {k: v for k, v in function.get("class", {}).items() if k.startswith("tt_")}
    pci, sensors = (
        {name: text for name, text in function.get(group, {}).items() if name not in NOT_SIMULATED}
        for group in ("pci", "sensors")
    )
    return pci, telemetry, sensors


class Ticker:
    """Advances every living heartbeat, as firmware does (at 10 Hz), while the context lasts."""

    def __init__(self, node: SimulatedNode, interval: float = 0.1) -> None:
        self._node = node
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._node.tick()

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
