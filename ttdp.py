"""tt-device-plugin: Tenstorrent accelerators, schedulable in Kubernetes, by a daemon that runs on the host.

It enumerates the cards from sysfs, serves the kubelet's device plugin API (v1beta1) and follows kernel events. Read it
from top to bottom; a chapter uses only what stands above it.

    what the world looks like    CONFIGURATION, INVENTORY
    what we decide               HEALTH, RESOURCES, PREFERRED ALLOCATION, CONTAINER EDITS
    how we talk                  DEVICE PLUGIN SERVICE, KUBELET SESSION, KERNEL EVENTS, TELEMETRY READERS, SYSTEMD
    what ties it together        DAEMON, COMMAND LINE

The deciding chapters are functions over frozen data: no file, socket or clock. One asyncio loop drives the rest; only
reads of telemetry, which the driver can block for ten seconds, happen on threads of their own.
"""

from __future__ import annotations

import os
import sys

# Both must be said before grpc and asyncio are imported. gRPC's core would write lines of its own, without priority, to
# stderr; asyncio would load OpenSSL (4 MB of memory) for TLS, which nobody speaks on a unix socket.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]

import argparse
import asyncio
import collections
import contextlib
import ctypes
import enum
import errno
import functools
import itertools
import logging
import math
import re
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import grpc
import sdnotify

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__version__ = "0.1.0"

log = logging.getLogger("tt-device-plugin")


# ======================================================================================================================
#  CONFIGURATION: flag, then environment variable, then file, then default
# ======================================================================================================================

ResourceNaming = Literal["board", "card", "arch"]
DeviceIdStrategy = Literal["bdf", "asic", "index"]
VisibleDevices = Literal["bdf", "index", "none"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_CONFIG_FILE = "/etc/tt-device-plugin/config.toml"
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the unit's RestartPreventExitStatus

# The kernel's sun_path holds 108 bytes with its NUL, and the kubelet has to reach our sockets under their full path.
SOCKET_PATH_MAX = 107
SOCKET_NAME_MAX = 42  # our part of that


class ConfigError(Exception):
    """A configuration that cannot be used: one line with the source, the value and what would be valid."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount for every container that gets a device; it counts only while `host` exists."""

    host: str
    container: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Section [health] of the configuration file."""

    interval: float = 5.0  # seconds between two polls
    temperature_limit: float | None = None  # °C; None: the card's own temp1_max
    heartbeat_misses: int = 2  # polls in a row without a change of tt_heartbeat
    trip_holdoff: float = 300.0  # seconds without a further thermal trip until a card counts as healthy again


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the configuration can say. Every path is absolute."""

    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    sysfs_root: str = "/sys"
    dev_root: str = "/dev"
    proc_root: str = "/proc"
    resource_domain: str = "tenstorrent.com"
    resource_naming: ResourceNaming = "board"
    device_id_strategy: DeviceIdStrategy = "bdf"
    visible_devices: VisibleDevices = "bdf"
    fail_on_init_error: bool = False
    log_level: LogLevel = "info"
    health: HealthSettings = field(default_factory=HealthSettings)
    mounts: tuple[Mount, ...] | None = None  # None: the hugepages under dev_root
    runtime_dir: str | None = None  # systemd's RuntimeDirectory=, for links to the nodes; None: there are none


NEEDS_RESTART = ("device_plugin_dir", "sysfs_root", "dev_root", "proc_root", "runtime_dir")  # not taken over on SIGHUP


def _directory(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("the path of a directory")
    return os.path.abspath(text)


def _device_plugin_dir(text: str) -> str:
    path = _directory(text)
    most = SOCKET_PATH_MAX - len("/") - SOCKET_NAME_MAX
    if len(os.fsencode(path)) > most:
        raise ValueError(f"a path of at most {most} bytes: the sockets in it have to fit into a unix socket address")
    return path


def _domain(text: str) -> str:
    """A DNS subdomain that the API server takes as the prefix of an extended resource.

    Kubernetes reserves *.kubernetes.io and the prefix `requests.`, with which it names quotas: so 253 - 9 characters.
    """
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    ours = re.fullmatch(rf"{label}(\.{label})*", text) and len(text) <= 244
    if not ours or "kubernetes.io" in text or text.startswith("requests."):
        raise ValueError("a DNS name in lower case that is not Kubernetes' own, such as tenstorrent.com")
    return text


def _boolean(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError("true, yes, on, 1, false, no, off or 0")
    return word in ("true", "yes", "on", "1")


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(" or ".join([", ".join(choices[:-1]), choices[-1]]))
        return text

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """A setting that has a flag, an environment variable and a key in the file."""

    key: str
    parse: Callable[[str], Any]  # raises ValueError with what would be valid
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "TTDP_" + self.key.upper()

    @property
    def is_switch(self) -> bool:
        return self.parse is _boolean


_NAMING = "what names the resource: board (n300, p150), card (p150a) or arch (wormhole)"
_IDS = "device IDs: bdf (0000:03:00.0), asic (wormhole-<asic id>) or index (N of /dev/tenstorrent/N)"
_VISIBLE = "what TT_VISIBLE_DEVICES holds: bdf, index (0 to n-1 inside the container) or none (not set)"

OPTIONS = (
    Option("device_plugin_dir", _device_plugin_dir, "the kubelet's device plugin directory"),
    Option("sysfs_root", _directory, "where sysfs is mounted"),
    Option("dev_root", _directory, "where the device nodes are"),
    Option("proc_root", _directory, "where procfs is mounted"),
    Option("resource_domain", _domain, "the resource's name before the slash"),
    Option("resource_naming", _one_of(get_args(ResourceNaming)), _NAMING),
    Option("device_id_strategy", _one_of(get_args(DeviceIdStrategy)), _IDS),
    Option("visible_devices", _one_of(get_args(VisibleDevices)), _VISIBLE),
    Option("fail_on_init_error", _boolean, "exit with status 1 if there is no driver or no device at start"),
    Option("log_level", _one_of(get_args(LogLevel)), "debug, info, warning or error"),
)


def load_settings(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Settings:
    """Settings from flags (by key, None where not given), the environment and the file that they name.

    An empty environment variable counts as not set. Raises ConfigError.
    """
    path, explicit = DEFAULT_CONFIG_FILE, False
    for value in (environ.get("TTDP_CONFIG_FILE"), flags.get("config_file")):
        if value:
            path, explicit = value, True
    if flags.get("config_file") == "":
        raise _invalid("--config-file", "", "the path of a file")
    values = _read_config_file(path, must_exist=explicit)
    values["runtime_dir"] = (environ.get("RUNTIME_DIRECTORY") or "").partition(":")[0] or None
    for option in OPTIONS:
        for source, text in (
            (option.variable, environ.get(option.variable) or None),
            (option.flag, flags.get(option.key)),
        ):
            if text is not None:
                values[option.key] = _parsed(option.parse, text, source)
    return Settings(**values)


def _invalid(source: str, value: object, valid: object) -> ConfigError:
    try:
        shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or brackets
        shown = f"this {type(value).__name__}"
    return ConfigError(f"{source}: {shown if len(shown) <= 80 else shown[:80] + '…'} is not valid; it must be {valid}")


def _parsed(parse: Callable[[str], Any], text: str, source: str) -> Any:
    try:
        return parse(text)
    except ValueError as valid:
        raise _invalid(source, text, valid) from None


def _read_config_file(path: str, *, must_exist: bool) -> dict[str, Any]:
    """Keyword arguments for Settings from a TOML file; raises ConfigError."""
    name, path = path, path if path.isprintable() else repr(path)  # as errors call it
    try:
        with open(name, "rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path}: there is no such file; name one that exists or leave the option out") from None
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; it must be a readable TOML file") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError; a thousand brackets
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: is not valid TOML: {reason}") from None

    _only_known(path, "", document, [*(option.key for option in OPTIONS), "health", "mounts"])
    values: dict[str, Any] = {}
    for option in OPTIONS:
        value = document.get(option.key)
        if option.key not in document:
            continue
        if option.is_switch and isinstance(value, bool):
            values[option.key] = value
        elif not option.is_switch and isinstance(value, str):
            values[option.key] = _parsed(option.parse, value, f"{path}: {option.key}")
        else:
            raise _invalid(f"{path}: {option.key}", value, "true or false" if option.is_switch else "a string")
    if "health" in document:
        values["health"] = _health_settings(path, document["health"])
    if "mounts" in document:
        values["mounts"] = _mounts(path, document["mounts"])
    return values


def _only_known(path: str, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{path}: {where}{key!r} is no key of this file; valid are {', '.join(known)}")


def _health_settings(path: str, table: object) -> HealthSettings:
    if not isinstance(table, dict):
        raise _invalid(f"{path}: health", table, "a table: [health]")
    _only_known(path, "[health] ", table, [item.name for item in fields(HealthSettings)])

    def check(key: str, kind: type | tuple[type, ...], valid: Callable[[Any], bool], wanted: str) -> None:
        value = table.get(key)
        if key in table and (isinstance(value, bool) or not isinstance(value, kind) or not valid(value)):
            raise _invalid(f"{path}: [health] {key}", value, wanted)

    number = (int, float)
    check("interval", number, lambda v: 0 < v <= 3600, "a number of seconds above 0 and at most 3600")
    check("temperature_limit", number, lambda v: 0 < v <= 200, "a number of °C above 0 and at most 200")
    check("heartbeat_misses", int, lambda v: 1 <= v <= 1_000_000, "a whole number of polls from 1 on")
    check("trip_holdoff", number, lambda v: 0 <= v <= 1e9, "a number of seconds from 0 on")
    return HealthSettings(**table)


def _mounts(path: str, tables: object) -> tuple[Mount, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(f"{path}: mounts", tables, "tables: [[mounts]]")
    mounts: list[Mount] = []
    for table in tables:
        _only_known(path, "[[mounts]] ", table, [item.name for item in fields(Mount)])
        mount = Mount(**{"host": None, "container": table.get("host"), **table})
        for key, value in (("host", mount.host), ("container", mount.container)):
            if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
                raise _invalid(f"{path}: [[mounts]] {key}", value, "an absolute path")
        if not isinstance(mount.read_only, bool):
            raise _invalid(f"{path}: [[mounts]] read_only", mount.read_only, "true or false")
        if any(mount.container == other.container for other in mounts):
            raise _invalid(f"{path}: [[mounts]] container", mount.container, "another path in each of them")
        mounts.append(mount)
    return tuple(mounts)


# ======================================================================================================================
#  INVENTORY: what sysfs, stat() and /proc show of the devices. No device is ever opened: that would power it up
# ======================================================================================================================

Arch = Literal["wormhole", "blackhole"]

VENDOR = 0x1E52
ARCHES: dict[int, Arch] = {0x401E: "wormhole", 0xB140: "blackhole"}  # by PCI device id

# The board's code, which is also the PCI subsystem id: what tells the card's type while the firmware is silent.
CARDS = {
    0x14: "n300", 0x18: "n150", 0x35: "galaxy-wormhole", 0x36: "p100", 0x40: "p150a", 0x41: "p150b", 0x42: "p150c",
    0x43: "p100a", 0x44: "p300b", 0x45: "p300a", 0x46: "p300c", 0x47: "galaxy-blackhole",
}  # fmt: skip

ALL_ONES = 0xFFFFFFFF  # what every register of a chip reads that has left the bus
DEAD_TEMPERATURE = 65535999  # m°C: all ones through hwmon's conversion

TELEMETRY_ATTRIBUTES = (  # beside tt_heartbeat
    "tt_card_type", "tt_serial", "tt_asic_id", "tt_fw_bundle_ver", "tt_therm_trip_count",
)  # fmt: skip
HWMON_ATTRIBUTES = ("temp1_input", "temp1_max")

_BDF = re.compile(r"([0-9a-f]{4,}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


@dataclass(frozen=True, slots=True)
class Chip:
    """One PCI function with the driver bound to it, as sysfs and stat() show it at one moment."""

    bdf: str  # PCI address "0000:03:00.0": what survives resets and renumbering
    arch: Arch
    pci_card: str | None  # card type by the PCI subsystem id; None if it is not in CARDS
    numa_node: int | None  # None where the platform does not say
    ordinal: int  # N of /dev/tenstorrent/N: good for nothing but the present path
    path: str  # the host's device node
    sysfs: str  # the class device's directory below the PCI function's, which holds the tt_* attributes
    node_fault: str | None  # why the node cannot be used; None if it is what sysfs says
    number: str | None = None  # sysfs's "major:minor" of the node


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What the firmware of one chip said at one moment. None: not offered, unreadable as such, or all ones."""

    card: str | None = None  # "p150a"
    serial: str | None = None  # the board's, 16 hex digits; the two chips of a p300 share it
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # the bundle's version, "19.4.0.0"
    heartbeat: int | None = None  # changes while the firmware lives; starts again lower after a reset
    temperature: float | None = None  # °C
    temperature_limit: float | None = None  # °C
    trips: int | None = None  # thermal trips (Blackhole)
    hwmon: str | None = field(default=None, compare=False)  # the directory of its sensors
    all_ones: bool = False  # the chip answers nothing: every register that can show it reads all ones
    error: tuple[str, int] | None = None  # the attribute whose read failed, and its errno


@dataclass(frozen=True, slots=True)
class Scan:
    """One look at the class directory."""

    chips: Mapping[str, Chip]  # by PCI address, in the order of the addresses
    oddities: tuple[str, ...]  # class devices that are none of ours, in words


def address(bdf: str) -> tuple[int, ...]:
    """A PCI address as numbers, for sorting: domain, bus, device, function."""
    match = _BDF.fullmatch(bdf)
    assert match is not None, bdf
    return tuple(int(part, 16) for part in match.groups())


def read_attribute(path: str, flags: int = 0) -> str | None:
    """Text of a sysfs attribute, a page at most, without the newline; None if it is not there. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)


def _read_quick(path: str) -> str | None:
    """An attribute that never blocks (PCI's, `dev`, a module's version). None, too, where it cannot be read."""
    try:
        return read_attribute(path, os.O_NONBLOCK)
    except OSError:
        return None


def _decimal(text: str | None) -> int | None:
    """A number as the kernel writes it; None if it is of no such form."""
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _hexadecimal(text: str | None) -> int | None:
    return int(text, 16) if text and re.fullmatch(r"0x[0-9a-f]{1,8}", text) else None


def driver_version(settings: Settings) -> str | None:
    """Version of the loaded driver, such as "2.10.0"; "" if it does not say; None if no driver is loaded."""
    module = f"{settings.sysfs_root}/module/tenstorrent"
    if os.path.isdir(module) or os.path.isdir(f"{settings.sysfs_root}/class/tenstorrent"):
        return _read_quick(f"{module}/version") or ""
    return None


def scan(settings: Settings, known: Iterable[Chip] = ()) -> Scan:
    """Look for chips in /sys/class/tenstorrent. Never raises, never blocks: none of these reads touches a chip.

    Of a known chip that is where it was only the node is looked at again, which costs a quarter.
    """
    directory = f"{settings.sysfs_root}/class/tenstorrent"
    try:
        names = os.listdir(directory)
    except OSError:
        names = []  # the directory goes with the module
    places = {chip.sysfs: chip for chip in known}
    chips, oddities = [], []
    for name in names:
        # Not by way of the class: after a renumbering the same name there leads to another chip, but below the PCI
        # function it is gone, and what a late read finds is nothing instead of the other's telemetry.
        sysfs = f"{directory}/{name}"
        with contextlib.suppress(OSError):
            sysfs = os.path.normpath(f"{directory}/{os.readlink(sysfs)}")
        found: Chip | str | None = places.get(sysfs)
        if isinstance(found, Chip):
            fault = _node_fault(found.path, found.number)
            chips.append(found if fault == found.node_fault else replace(found, node_fault=fault))
        elif isinstance(found := _sight(settings, sysfs), Chip):
            chips.append(found)
        elif found:
            oddities.append(found)
    chips.sort(key=lambda chip: address(chip.bdf))
    return Scan({chip.bdf: chip for chip in chips}, tuple(sorted(oddities)))


def _sight(settings: Settings, sysfs: str) -> Chip | str | None:
    """The chip behind a class device, or what is odd about it, or None if it is just going away."""
    match = re.search(r"/tenstorrent!(\d{1,5})$", sysfs)
    if not match:
        return f"{sysfs}: not a device of the driver"
    try:
        bdf = os.path.basename(os.readlink(f"{sysfs}/device"))
    except OSError:
        return None
    if not _BDF.fullmatch(bdf):
        return f"{sysfs}: its device {bdf!r} is not a PCI function"
    vendor, device, subsystem = (
        _hexadecimal(_read_quick(f"{sysfs}/device/{attribute}"))
        for attribute in ("vendor", "device", "subsystem_device")
    )
    numa_node = _decimal(_read_quick(f"{sysfs}/device/numa_node"))
    if vendor is None or device is None:
        return None
    arch = ARCHES.get(device)
    if vendor != VENDOR or arch is None:
        return f"{bdf}: PCI device {vendor:04x}:{device:04x} is neither Wormhole nor Blackhole"
    path = f"{settings.dev_root}/tenstorrent/{int(match[1])}"
    number = _read_quick(f"{sysfs}/dev")
    return Chip(
        bdf=bdf,
        arch=arch,
        pci_card=CARDS.get(subsystem) if subsystem is not None else None,
        numa_node=numa_node if numa_node is not None and 0 <= numa_node < 2**31 else None,
        ordinal=int(match[1]),
        path=path,
        sysfs=sysfs,
        number=number,
        node_fault=_node_fault(path, number),
    )


def _node_fault(path: str, dev: str | None) -> str | None:
    """Why `path` is not the character device with sysfs's number `dev` ("245:0"), or None if it is."""
    try:
        status = os.stat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a character device"
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return None if number == dev else f"{path} has the number {number}, sysfs says {dev}"


def pci_function_exists(settings: Settings, bdf: str) -> bool:
    return os.path.exists(f"{settings.sysfs_root}/bus/pci/devices/{bdf}")


def open_descriptors(settings: Settings, ordinal: int) -> int:
    """How many descriptors are open on a node (driver 2.5 and later; 0 where it does not say)."""
    return len((_read_quick(f"{settings.proc_root}/driver/tenstorrent/{ordinal}/pids") or "").split())


def node_link(runtime_dir: str, bdf: str) -> str:
    """Path of the link that leads to a device's node, whatever its number is at the time."""
    return f"{runtime_dir}/by-pci/{bdf}"


def keep_node_links(runtime_dir: str, nodes: Mapping[str, str]) -> None:
    """Make the links lead to these nodes (paths by PCI address), and no other link exist. Raises OSError.

    A kubelet calls Allocate once in a pod's life. When it starts a container again, after a reboot too, it uses the old
    answer: with a node's path in it the container would get whichever chip has that number by then. A runtime resolves
    a link each time that it makes a container (seen with kubelet 1.33 and 1.37, containerd 1.6 and 2.1).
    """
    directory = os.path.dirname(node_link(runtime_dir, ""))
    os.makedirs(directory, exist_ok=True)
    present = {name: os.readlink(f"{directory}/{name}") for name in os.listdir(directory)}
    for name in present.keys() - nodes.keys():
        os.unlink(f"{directory}/{name}")
    for bdf, path in nodes.items():
        if present.get(bdf) != path:
            os.symlink(path, f"{directory}/.new")
            os.rename(f"{directory}/.new", f"{directory}/{bdf}")


def read_telemetry(chip: Chip, last: Telemetry | None = None) -> Telemetry:
    """Ask a chip's firmware, through the driver. Never raises, but can block for ten seconds and more: not on the loop.

    last: what it said before. If its heartbeat has simply gone on, it is the same firmware of the same chip, and only
    the sensors are read anew. A chip that has left the bus gives no error: every value is there, in its usual form, and
    is all ones.
    """
    raw: dict[str, str] = {}
    attribute = "tt_heartbeat"
    try:
        beat = read_attribute(f"{chip.sysfs}/{attribute}")
        if last and (same := _went_on(chip, last, _decimal(beat))):
            return same
        if beat is not None:
            raw[attribute] = beat
        for attribute in TELEMETRY_ATTRIBUTES:
            if (text := read_attribute(f"{chip.sysfs}/{attribute}")) is not None:
                raw[attribute] = text
        attribute = "hwmon"
        hwmon = _hwmon(chip)
        for attribute in HWMON_ATTRIBUTES if hwmon else ():
            if (text := read_attribute(f"{hwmon}/{attribute}")) is not None:
                raw[attribute] = text
        if not raw and not os.path.isdir(chip.sysfs):
            return Telemetry(error=(os.path.basename(chip.sysfs), errno.ENODEV))
    except OSError as error:
        return Telemetry(error=(attribute, error.errno or 0))
    return replace(parse_telemetry(raw), hwmon=hwmon)


def _hwmon(chip: Chip) -> str | None:
    """The directory of the chip's sensors, whose number has nothing to do with the chip's."""
    directory = f"{chip.sysfs}/device/hwmon"
    try:
        return f"{directory}/{min(os.listdir(directory))}"
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def _went_on(chip: Chip, last: Telemetry, beat: int | None) -> Telemetry | None:
    """What the chip says now, if its heartbeat has gone on since it said `last`; raises OSError."""
    if beat is None or last.heartbeat is None or not last.heartbeat < beat < ALL_ONES or not last.hwmon:
        return None
    temperature = _celsius(read_attribute(f"{last.hwmon}/temp1_input"))
    trips = None if last.trips is None else _count(read_attribute(f"{chip.sysfs}/tt_therm_trip_count"))
    if (temperature is None) != (last.temperature is None) or (trips is None) != (last.trips is None):
        return None
    return replace(last, heartbeat=beat, temperature=temperature, trips=trips)


def _count(text: str | None) -> int | None:
    number = _decimal(text)
    return number if number is not None and 0 <= number < ALL_ONES else None


def _celsius(text: str | None) -> float | None:
    millidegrees = _decimal(text)
    return millidegrees / 1000 if millidegrees is not None and 0 < millidegrees < DEAD_TEMPERATURE else None


_HEX_ID = re.compile(r"[0-9A-F]{16}")
_NO_ID = ("F" * 16, "0" * 16)  # all ones; and what a board without an ID reports, which would make all of them the same
_WORDS: Mapping[str, tuple[re.Pattern[str], Collection[str]]] = {  # the form that the driver writes; what says nothing
    "tt_card_type": (re.compile(r"[a-z][a-z0-9-]{0,40}[a-z0-9]"), ("unknown",)),
    "tt_serial": (_HEX_ID, _NO_ID),
    "tt_asic_id": (_HEX_ID, _NO_ID),
    "tt_fw_bundle_ver": (re.compile(r"\d{1,5}(\.\d{1,5}){1,4}"), ("255.255.255.255",)),
}
_DEAD = {
    "tt_heartbeat": str(ALL_ONES), "tt_card_type": "unknown", "tt_serial": "F" * 16, "tt_asic_id": "F" * 16,
    "temp1_input": str(DEAD_TEMPERATURE),
}  # fmt: skip


def parse_telemetry(raw: Mapping[str, str]) -> Telemetry:
    """Telemetry from the attributes' texts. What is not of the form that the driver writes counts as not offered."""

    def word(attribute: str) -> str | None:
        text = raw.get(attribute, "")
        form, never = _WORDS[attribute]
        return text if text not in never and form.fullmatch(text) else None

    shown = [raw[attribute] == dead for attribute, dead in _DEAD.items() if attribute in raw]
    if len(shown) > 1 and all(shown):
        return Telemetry(all_ones=True)
    return Telemetry(
        card=word("tt_card_type"),
        serial=word("tt_serial"),
        asic_id=word("tt_asic_id"),
        firmware=word("tt_fw_bundle_ver"),
        heartbeat=_decimal(raw.get("tt_heartbeat")),  # all ones, too: then it must not be seen to change
        temperature=_celsius(raw.get("temp1_input")),
        temperature_limit=_celsius(raw.get("temp1_max")),
        trips=_count(raw.get("tt_therm_trip_count")),
    )


# ======================================================================================================================
#  HEALTH: per device, with a reason in words. Pure: a verdict follows from the last verdict and one look
# ======================================================================================================================

HYSTERESIS = 5.0  # °C below the limit at which a hot chip counts as cool again
READ_DEADLINE = 2.0  # seconds after which a read of telemetry counts as one that does not return


class Fault(enum.Enum):
    """The kinds of reasons for which a device is unhealthy; a change from one to another is worth a log line."""

    GONE = enum.auto()
    NODE = enum.auto()
    BLOCKED = enum.auto()
    RESETTING = enum.auto()
    READ_ERROR = enum.auto()
    NO_RESPONSE = enum.auto()
    STALLED = enum.auto()
    HOT = enum.auto()
    TRIPPED = enum.auto()


@dataclass(frozen=True, slots=True)
class Health:
    """A device's state, and what the rules have to remember from one look to the next."""

    fault: Fault | None = None
    reason: str | None = None  # in words, with the remedy where there is one; None while healthy
    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change of it
    hot: bool = False
    trips: int | None = None  # the last count seen
    tripped_at: float | None = None  # when the count was last seen to rise, in seconds of the caller's clock


def unhealthy(health: Health, fault: Fault, reason: str) -> Health:
    return replace(health, fault=fault, reason=reason)


def gone(health: Health, bdf: str, *, function_exists: bool) -> Health:
    """The class device is no longer there."""
    if function_exists:
        return unhealthy(health, Fault.GONE, f"driver is not bound; echo {bdf} > /sys/bus/pci/drivers/tenstorrent/bind")
    return unhealthy(health, Fault.GONE, "PCI device is gone; it counts again when it comes back")


def blocked(health: Health) -> Health:
    """A read of telemetry has been under way for longer than READ_DEADLINE."""
    return unhealthy(health, Fault.BLOCKED, "telemetry read does not return; the driver may be waiting for a reset")


def judge(
    health: Health, chip: Chip, telemetry: Telemetry, settings: HealthSettings, now: float, *, periodic: bool
) -> Health:
    """The verdict after one look at a device.

    periodic: this look is one of the polls that come every `settings.interval`, so it can prove that a heartbeat has
    stopped. Looks that an event caused come at any distance and cannot.
    """
    if chip.node_fault:
        return unhealthy(health, Fault.NODE, f"device node is wrong: {chip.node_fault}")
    if telemetry.error:
        attribute, number = telemetry.error
        if number == errno.ENODATA:
            return unhealthy(health, Fault.RESETTING, _resetting(chip))
        if number == errno.ENODEV:
            return unhealthy(health, Fault.GONE, "PCI device is going away")
        return unhealthy(health, Fault.READ_ERROR, f"telemetry cannot be read: {attribute}: {os.strerror(number)}")
    if telemetry.all_ones:
        return unhealthy(
            health, Fault.NO_RESPONSE, "chip does not respond (all registers read as ones); reset it: tt-smi -r"
        )

    # Any change is life: the count starts again from below after a reset. What an event's look finds is life too, but
    # not what the next poll compares with: that may follow sooner than a heartbeat.
    beats = telemetry.heartbeat is None or telemetry.heartbeat != health.heartbeat
    misses = 0 if beats else health.misses + periodic
    limit = telemetry.temperature_limit if settings.temperature_limit is None else settings.temperature_limit
    degrees = telemetry.temperature
    if degrees is None or limit is None:
        hot = False
    else:
        hot = degrees > limit - HYSTERESIS if health.hot else degrees >= limit
    rose = telemetry.trips is not None and health.trips is not None and telemetry.trips > health.trips
    tripped_at = now if rose else health.tripped_at
    health = Health(
        heartbeat=telemetry.heartbeat if periodic or health.heartbeat is None else health.heartbeat,
        misses=misses,
        hot=hot,
        trips=telemetry.trips if telemetry.trips is not None else health.trips,
        tripped_at=tripped_at,
    )
    if misses >= settings.heartbeat_misses:
        reason = f"heartbeat stalled at {telemetry.heartbeat}; the firmware has stopped, reset it: tt-smi -r"
        return replace(health, fault=Fault.STALLED, reason=reason)
    if hot:
        reason = f"too hot: {degrees:.1f} °C, limit {limit:g} °C; check its cooling"
        return replace(health, fault=Fault.HOT, reason=reason)
    if tripped_at is not None and now - tripped_at < settings.trip_holdoff:
        reason = f"thermal trip ({health.trips} so far); it counts again after {settings.trip_holdoff:g} s without one"
        return replace(health, fault=Fault.TRIPPED, reason=reason)
    return health


def _resetting(chip: Chip) -> str:
    if chip.arch == "blackhole":
        # Seen on Blackhole when the firmware was not ready at POST_RESET: it stays so for good, though the chip runs.
        return "resetting (no telemetry); if it stays so, unbind and bind the driver"
    return "resetting (no telemetry)"


# ======================================================================================================================
#  RESOURCES: which devices there are, what they are called, and where they sit. Pure
# ======================================================================================================================

DEVICE_ID_MAX = 63  # characters that Kubernetes takes in a device's ID


@dataclass(frozen=True, slots=True)
class Device:
    """A device once seen: it stays, and stays known, while its chip is away."""

    chip: Chip  # as last seen
    present: bool = True
    card: str | None = None  # what the firmware has said of itself, once: never unlearnt for silence or garbage
    serial: str | None = None
    asic_id: str | None = None
    firmware: str | None = None
    telemetry: Telemetry | None = field(
        default=None, compare=False
    )  # the last; None: it has to be asked for everything
    health: Health = field(default_factory=Health)
    listed: bool = False  # a new one is announced when it has spoken, or has had the time to

    @property
    def bdf(self) -> str:
        return self.chip.bdf

    @property
    def card_type(self) -> str | None:
        """The exact card type, "p150a"; by PCI until the firmware tells; None if neither does."""
        return self.card or self.chip.pci_card

    @property
    def board_type(self) -> str:
        """The card type without its trailing letter, "p150"; the architecture if the card type is not known."""
        return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", self.card_type or self.chip.arch)

    @property
    def board(self) -> tuple[object, ...]:
        """Key of the board: the chips of one board share its serial. Without one a chip is a board of its own.

        A Galaxy's boards are its trays, so a board never reaches beyond a tray.
        """
        return (*self._galaxy_tray, self.serial or self.bdf)

    @property
    def tray(self) -> tuple[object, ...]:
        """Key of the Galaxy's tray; outside a Galaxy a board is its own tray."""
        return self._galaxy_tray or self.board

    @property
    def _galaxy_tray(self) -> tuple[object, ...]:
        """Tray = high nibble of the bus number, in every Galaxy."""
        domain, bus, *_ = address(self.bdf)
        return (self.card_type, domain, bus >> 4) if (self.card_type or "").startswith("galaxy") else ()


def with_identity(device: Device, telemetry: Telemetry) -> Device:
    """The device after a look at its chip: what the firmware says now counts, what it leaves out stays known."""
    return replace(
        device,
        telemetry=telemetry,
        card=telemetry.card or device.card,
        serial=telemetry.serial or device.serial,
        asic_id=telemetry.asic_id or device.asic_id,
        firmware=telemetry.firmware or device.firmware,
    )


def device_ids(devices: Collection[Device], strategy: DeviceIdStrategy) -> dict[str, Device]:
    """Devices by ID; each ID at most once.

    An ordinal or ASIC ID can be somebody else's by the time: a number that was freed is reused at once, a card can move
    to another slot. What is present wins over what is away; of two present chips with one ASIC ID both get their
    address.
    """

    def wanted(device: Device) -> str:
        if strategy == "index":
            return str(device.chip.ordinal)
        if strategy == "asic" and device.asic_id:
            return f"{device.chip.arch}-{device.asic_id}"
        return device.bdf

    present = collections.Counter(wanted(device) for device in devices if device.present)
    ids: dict[str, Device] = {}
    for device in sorted(devices, key=lambda device: (not device.present, address(device.bdf))):
        unique = present[wanted(device)] <= 1
        ids.setdefault(wanted(device) if unique or not device.present else device.bdf, device)
    return ids


def resource_name(device: Device, settings: Settings) -> str:
    names = {"board": device.board_type, "card": device.card_type or device.chip.arch, "arch": device.chip.arch}
    return f"{settings.resource_domain}/{names[settings.resource_naming]}"


@dataclass(frozen=True, slots=True)
class Resource:
    """What the kubelet knows as one extended resource."""

    name: str  # "tenstorrent.com/n300"
    devices: Mapping[str, Device]  # by ID, in the order of PCI addresses

    @property
    def healthy(self) -> int:
        return sum(device.health.fault is None for device in self.devices.values())


def resources(devices: Collection[Device], settings: Settings) -> dict[str, Resource]:
    """Every resource that has a device, by name."""
    grouped: dict[str, dict[str, Device]] = {}
    ids = device_ids(devices, settings.device_id_strategy)
    for identifier, device in sorted(ids.items(), key=lambda item: address(item[1].bdf)):
        grouped.setdefault(resource_name(device, settings), {})[identifier] = device
    return {name: Resource(name, grouped[name]) for name in sorted(grouped)}


# ======================================================================================================================
#  PREFERRED ALLOCATION: neighbours, and whole boards left for those who need them. Pure
# ======================================================================================================================


class InvalidRequest(ValueError):
    """A question that has no answer; its text says why."""


def preferred_allocation(
    resource: Resource, available: Sequence[str], must_include: Sequence[str], size: int
) -> list[str]:
    """The `size` best of the available IDs, in the order of PCI addresses. Raises InvalidRequest.

    Best is the set that touches the fewest boards, then trays, then NUMA nodes; then the fewest boards, trays and NUMA
    nodes that are still whole (all their devices of this resource are available); then the lowest addresses.

    Every one of these criteria adds up over disjoint sets, the last one too: of two sets of one size the one with the
    lowest addresses is the one whose bit mask (lowest address in the highest bit) is the larger number. So the cost of
    a set is a single integer, and the cheapest set of each size follows from the cheapest ones of its parts: boards
    make up trays, trays make up NUMA nodes, and these the host.
    """
    free, must = frozenset(available), frozenset(must_include)
    if unknown := sorted((free | must) - resource.devices.keys()):
        raise InvalidRequest(f"{resource.name} has no device {_few(unknown)}")
    if size < 0:
        raise InvalidRequest(f"allocation size {size} is negative")
    if missing := sorted(must - free):
        raise InvalidRequest(f"must-include device {_few(missing)} is not available")
    if not len(must) <= size <= len(free):
        raise InvalidRequest(f"cannot choose {size} of {len(free)} available devices, {len(must)} of them a must")

    places = _places(resource, free, must)
    best = _joined(_cluster_costs(cluster) for cluster in _clusters(places))[size]
    mask = -int(best)
    return [place.identifier for place in places if place.bit & mask]


@dataclass(frozen=True, slots=True)
class _Place:
    """An available device in the search, with what it costs to be the first in a group."""

    identifier: str
    bit: int  # in the mask of a set
    must: bool
    board: object
    tray: object
    numa_node: int | None
    board_fee: int  # one board more and, if it is whole, one whole board less
    tray_fee: int
    node_fee: int


def _places(resource: Resource, free: frozenset[str], must: frozenset[str]) -> list[_Place]:
    """The available devices. A cost's lowest bits are the mask, negated, so that larger masks cost less.

    Above them stand six numbers, to the base of one more than there are devices: boards, trays, NUMA nodes, and the
    whole ones of each.
    """
    devices, width = resource.devices, len(resource.devices)
    groups = {i: (device.board, device.tray, device.chip.numa_node) for i, device in devices.items()}
    broken = [{groups[identifier][level] for identifier in devices.keys() - free} for level in range(3)]
    units = [(width + 1) ** power << width for power in (5, 4, 3, 2, 1, 0)]

    def fee(level: int, group: object) -> int:
        return units[level] + (0 if group in broken[level] else units[level + 3])

    places = []
    for position, identifier in enumerate(devices):
        if identifier in free:
            board, tray, numa_node = groups[identifier]
            bit = 1 << (width - 1 - position)
            fees = fee(0, board), fee(1, tray), fee(2, numa_node)
            places.append(_Place(identifier, bit, identifier in must, board, tray, numa_node, *fees))
    return places


def _board_costs(places: list[_Place]) -> list[float]:
    """Within a board all chips are equal but for their addresses: the musts, then the lowest."""
    chosen = sorted(places, key=lambda place: (not place.must, -place.bit))
    sums = itertools.accumulate((-place.bit for place in chosen), initial=0)
    return _entered(list(sums), sum(place.must for place in places), places[0].board_fee)


def _tray_costs(places: list[_Place]) -> list[float]:
    boards = _grouped(places, lambda place: place.board)
    return _entered(_joined(_board_costs(board) for board in boards), 0, places[0].tray_fee)


def _cluster_costs(places: list[_Place]) -> list[float]:
    """Trays that hang together over NUMA nodes which they share: the trays of one node, in any sane machine.

    Where a tray spans nodes, every choice of nodes is tried: leaving a node out is the only way not to touch it.
    """
    fees = {place.numa_node: place.node_fee for place in places}
    best = [math.inf] * (len(places) + 1)
    for count in range(len(fees) + 1):
        for nodes in itertools.combinations(fees, count):
            if all(place.numa_node in nodes for place in places if place.must):
                inside = [place for place in places if place.numa_node in nodes]
                costs = _joined(_tray_costs(tray) for tray in _grouped(inside, lambda place: place.tray))
                fee = sum(fees[node] for node in nodes)
                best[: len(costs)] = [min(known, cost + fee) for known, cost in zip(best, costs, strict=False)]
    return best


def _grouped(places: Iterable[_Place], key: Callable[[_Place], object]) -> list[list[_Place]]:
    groups: dict[object, list[_Place]] = {}
    for place in places:
        groups.setdefault(key(place), []).append(place)
    return list(groups.values())


def _clusters(places: list[_Place]) -> list[list[_Place]]:
    """Places by NUMA node, with those nodes put together that a tray connects."""
    clusters: list[tuple[set[object], list[_Place]]] = []
    for tray in _grouped(places, lambda place: place.tray):
        nodes: set[object] = {place.numa_node for place in tray}
        apart = []
        for known, members in clusters:
            if known & nodes:
                nodes |= known
                tray = members + tray
            else:
                apart.append((known, members))
        clusters = [*apart, (nodes, tray)]
    return [members for _, members in clusters]


def _entered(costs: list[float], least: int, fee: float) -> list[float]:
    """Costs per number of devices, with the fee for any at all, and impossible below the number of musts."""
    return [math.inf if count < least else cost + fee if count else cost for count, cost in enumerate(costs)]


def _joined(parts: Iterable[list[float]]) -> list[float]:
    """The least cost of every number of devices, spread over the parts in the best way."""
    total: list[float] = [0]
    for part in parts:
        best = [math.inf] * (len(total) + len(part) - 1)
        for here, cost in enumerate(total):
            for there, more in enumerate(part):
                if cost + more < best[here + there]:
                    best[here + there] = cost + more
        total = best
    return total


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _few(names: Sequence[str]) -> str:
    """Names for one line of an error; a request can hold ten thousand."""
    shown = ", ".join(repr(name[:DEVICE_ID_MAX]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# ======================================================================================================================
#  CONTAINER EDITS: exactly what a container needs to use its devices. Pure
# ======================================================================================================================


@dataclass(frozen=True, slots=True)
class DeviceNode:
    host: str
    container: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container runtime adds to a container that was given devices."""

    environment: Mapping[str, str]
    nodes: tuple[DeviceNode, ...]
    mounts: tuple[Mount, ...]


def visible_devices(devices: Sequence[Device], style: VisibleDevices) -> str | None:
    """Value of TT_VISIBLE_DEVICES for a container that gets exactly these devices; None: not to be set.

    tt-umd reads it inside the container. An integer there is an index into the devices which *the container* sees, so
    a host's ordinal would be wrong; a token with a colon is a PCI address.
    """
    if style == "none":
        return None
    return ",".join(device.bdf if style == "bdf" else str(index) for index, device in enumerate(devices))


def default_mounts(settings: Settings) -> tuple[Mount, ...]:
    return tuple(Mount(f"{settings.dev_root}/{name}", f"/dev/{name}") for name in ("hugepages-1G", "hugepages"))


def container_edits(devices: Iterable[Device], settings: Settings, exists: Callable[[str], bool]) -> ContainerEdits:
    """Edits for a container that gets these devices; `exists` tells whether a host's path is there now."""
    chosen = sorted(devices, key=lambda device: address(device.bdf))
    environment = {"TT_DEVICE_PLUGIN_DEVICES": ",".join(device.bdf for device in chosen)}
    visible = visible_devices(chosen, settings.visible_devices)
    if visible is not None:
        environment["TT_VISIBLE_DEVICES"] = visible
    mounts = default_mounts(settings) if settings.mounts is None else settings.mounts

    def host_path(device: Device) -> str:
        link = node_link(settings.runtime_dir, device.bdf) if settings.runtime_dir else ""
        return link if exists(link) else device.chip.path

    return ContainerEdits(
        environment=environment,
        # Under the host's number: tt-umd names its files and locks after it.
        nodes=tuple(DeviceNode(host_path(device), f"/dev/tenstorrent/{device.chip.ordinal}") for device in chosen),
        mounts=tuple(mount for mount in mounts if exists(mount.host)),
    )


# ======================================================================================================================
#  DEVICE PLUGIN SERVICE: what the kubelet calls
# ======================================================================================================================

PLUGIN_OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True)


def device_list(resource: Resource) -> pb.ListAndWatchResponse:
    """The resource's devices as the kubelet wants them: no topology at all where the NUMA node is not known."""

    def topology(device: Device) -> pb.TopologyInfo | None:
        node = device.chip.numa_node
        return None if node is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node)])

    return pb.ListAndWatchResponse(
        devices=[
            pb.Device(
                ID=identifier,
                health="Healthy" if device.health.fault is None else "Unhealthy",
                topology=topology(device),
            )
            for identifier, device in resource.devices.items()
        ]
    )


def container_response(edits: ContainerEdits) -> pb.ContainerAllocateResponse:
    return pb.ContainerAllocateResponse(
        envs=dict(edits.environment),
        mounts=[
            pb.Mount(container_path=mount.container, host_path=mount.host, read_only=mount.read_only)
            for mount in edits.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=node.container, host_path=node.host, permissions=node.permissions)
            for node in edits.nodes
        ],
    )


class DevicePlugin(rpc.DevicePluginServicer):
    """One resource, as the kubelet sees it. The daemon publishes, the kubelet watches and allocates."""

    def __init__(self, resource: Resource, settings: Settings) -> None:
        self.resource = resource
        self.settings = settings
        self._list = device_list(resource)
        self._streams: set[asyncio.Event] = set()
        self.watched = asyncio.Event()  # at least one ListAndWatch stream is open
        self.unwatched = asyncio.Event()
        self.unwatched.set()

    def publish(self, resource: Resource, settings: Settings) -> None:
        """Take over a new state; open streams hear of it if the list is another one."""
        self.resource, self.settings = resource, settings
        devices = device_list(resource)
        if devices != self._list:
            self._list = devices
            for changed in self._streams:
                changed.set()

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.DevicePluginOptions]
    ) -> pb.DevicePluginOptions:
        return PLUGIN_OPTIONS

    async def ListAndWatch(
        self, request: pb.Empty, context: grpc.aio.ServicerContext[pb.Empty, pb.ListAndWatchResponse]
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        changed = asyncio.Event()
        self._streams.add(changed)
        self.unwatched.clear()
        self.watched.set()
        sent = None
        try:
            while True:
                changed.clear()
                if self._list != sent:
                    sent = self._list
                    yield sent
                else:
                    await changed.wait()
        finally:
            self._streams.discard(changed)
            if not self._streams:
                self.watched.clear()
                self.unwatched.set()

    async def GetPreferredAllocation(
        self,
        request: pb.PreferredAllocationRequest,
        context: grpc.aio.ServicerContext[pb.PreferredAllocationRequest, pb.PreferredAllocationResponse],
    ) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        for container in request.container_requests:
            try:
                chosen = preferred_allocation(
                    self.resource,
                    container.available_deviceIDs,
                    container.must_include_deviceIDs,
                    container.allocation_size,
                )
            except InvalidRequest as reason:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(reason))
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def Allocate(
        self, request: pb.AllocateRequest, context: grpc.aio.ServicerContext[pb.AllocateRequest, pb.AllocateResponse]
    ) -> pb.AllocateResponse:
        code, reason = self._objection([list(container.devices_ids) for container in request.container_requests])
        if code is not None:
            log.warning("%s: refused an allocation: %s", self.resource.name, reason)
            await context.abort(code, reason)
        response = pb.AllocateResponse()
        for container in request.container_requests:
            devices = [self.resource.devices[identifier] for identifier in container.devices_ids]
            response.container_responses.append(
                container_response(container_edits(devices, self.settings, os.path.exists))
            )
            log.debug("%s: allocated %s", self.resource.name, ", ".join(container.devices_ids))
        return response

    def _objection(self, containers: Sequence[Sequence[str]]) -> tuple[grpc.StatusCode | None, str]:
        """Why an allocation of these IDs per container is refused, or (None, "")."""
        wanted = list(itertools.chain.from_iterable(containers))
        if not containers or not all(containers):
            return grpc.StatusCode.INVALID_ARGUMENT, "a container without devices" if containers else "no container"
        if unknown := [identifier for identifier in wanted if identifier not in self.resource.devices]:
            return grpc.StatusCode.NOT_FOUND, f"{self.resource.name} has no device {_few(unknown)}"
        if len(set(wanted)) < len(wanted):
            twice = [identifier for identifier, count in collections.Counter(wanted).items() if count > 1]
            return grpc.StatusCode.INVALID_ARGUMENT, f"device {_few(twice)} is asked for more than once"
        for identifier in wanted:
            if reason := self.resource.devices[identifier].health.reason:
                return grpc.StatusCode.FAILED_PRECONDITION, f"device {identifier} is unhealthy: {reason}"
        return None, ""

    async def PreStartContainer(
        self,
        request: pb.PreStartContainerRequest,
        context: grpc.aio.ServicerContext[pb.PreStartContainerRequest, pb.PreStartContainerResponse],
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()  # nothing to do, and the options do not ask for the call


# ======================================================================================================================
#  KUBELET SESSION: a socket for each resource, and its registration, for as long as both of us live
# ======================================================================================================================

KUBELET_SOCKET = "kubelet.sock"
SOCKET_PREFIX = "tt-"
REGISTERED = "registered with kubelet"
REGISTER_TIMEOUT = 10.0  # seconds
BACKOFF = (0.1, 5.0)  # seconds: the first pause and the longest
STABLE = 30.0  # seconds after which a registration counts as one that held
CLOSE_GRACE = 0.1  # seconds that calls under way have when a server is closed

# Before 1.37 the end of any stream of a resource makes the kubelet forget the newest registration of it, so it has to
# have noticed the end of the old stream before it hears of the new one.
FORGET_PAUSE = 0.05  # seconds

# A kubelet makes its socket's file by bind() and accepts from listen() on, some microseconds later.
LISTEN_PAUSES = (0.001, 0.002, 0.004, 0.008)  # seconds

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 5000),  # a connection that says nothing is closed; default two minutes
)
CHANNEL_OPTIONS = (
    # Subchannels are shared between channels by default, and with them the back-off from a dead kubelet's socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class RegistrationError(Exception):
    """The kubelet cannot be reached, refuses, or has dropped us; in words."""


class KubeletSession:
    """Serves one resource on a socket in the device plugin directory and keeps it registered.

    An attempt (bind, register, stay until the kubelet is lost) runs as a task. What happens in the directory ends the
    attempt and begins the next at once; without any event, attempts that fail come again after a growing pause.
    """

    def __init__(self, plugin: DevicePlugin, directory: str, changed: Callable[[], None]) -> None:
        """changed: called when `state` has become another."""
        self.plugin = plugin
        self.name = plugin.resource.name
        self.state = "starting"
        self.tried_to_serve = asyncio.Event()
        self._directory = directory
        self._kubelet_socket = f"{directory}/{KUBELET_SOCKET}"
        self._changed = changed
        self._server: grpc.aio.Server | None = None
        self._socket = ""  # its path
        self._bound: SocketIdentity | None = None  # its file
        self._offered = False  # the kubelet has been told of it
        self._kubelet: SocketIdentity | None = None  # the kubelet's socket, as it was when the attempt began
        self._pausing = False
        self._stirred = False  # something foreign happened in the directory during the attempt
        self._task: asyncio.Task[None] | None = None  # the present attempt, and those that come after it without events
        self._ending: set[asyncio.Task[None]] = set()  # former attempts and servers, for the moment that it takes them

    def begin(self) -> None:
        """Drop the present attempt, if there is one, and make the next one now."""
        if self._task:
            self._task.cancel()
            self._end(self._task)
        self._task = asyncio.get_running_loop().create_task(self._attempts())

    def look(self, *, kubelet_is_new: bool = False, stirred: bool = False) -> None:
        """Something may have happened in the directory: begin anew if it concerns us.

        kubelet_is_new: a kubelet.sock was made, even if it looks like the last one. stirred: something else happened
        there, which is no reason to give up an attempt, but one to end a pause between two.
        """
        moved = socket_identity(self._kubelet_socket) != self._kubelet
        removed = self._bound is not None and socket_identity(self._socket) != self._bound
        if kubelet_is_new or moved or removed or (stirred and self._pausing):
            self.begin()
        self._stirred |= stirred

    async def close(self) -> None:
        """End the session: no task, server or socket is left."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task, *self._ending})
        if stop := self._unbind(CLOSE_GRACE):
            await stop

    def _end(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _attempts(self) -> None:
        while self._ending:
            await asyncio.wait(self._ending)
        pause, longest = BACKOFF
        while True:
            self._pausing, self._stirred, started = False, False, time.monotonic()
            former_kubelet, self._kubelet = self._kubelet, socket_identity(self._kubelet_socket)
            with surviving(f"the session of {self.name}"):
                try:
                    await self._bind(same_kubelet=self._kubelet == former_kubelet)
                    self.tried_to_serve.set()
                    await self._register()
                    while self._ending:  # the former server: the streams that are left are the new one's
                        await asyncio.wait(self._ending)
                    await self._until_lost()
                except RegistrationError as error:
                    self._tell(str(error))
            self.tried_to_serve.set()
            if self._stirred or time.monotonic() - started > STABLE:
                pause = BACKOFF[0]
            self._pausing = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _bind(self, *, same_kubelet: bool) -> None:
        """Serve on a socket that the kubelet has not been told of yet, unless we do.

        Each registration gets a socket of its own name. Kubelet 1.37 refuses a name that it still has a connection to,
        and then loses sight of that connection; and gRPC, too, unlinks the path of a server that stops late.
        """
        if self._bound and not self._offered and socket_identity(self._socket) == self._bound:
            return
        stop = self._unbind(None)
        if stop and self.plugin.watched.is_set() and same_kubelet:
            await asyncio.shield(stop)
            await asyncio.sleep(FORGET_PAUSE)
        if not os.path.isdir(self._directory):
            raise RegistrationError(f"waiting for {self._directory}")
        server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_DevicePluginServicer_to_server(self.plugin, server)  # type: ignore[no-untyped-call]
        self._socket = f"{self._directory}/{new_socket_name(self.name)}"
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError:  # gRPC does not pass on what bind() said
            raise RegistrationError(f"cannot serve in {self._directory}: can it be written to?") from None
        self._server, self._offered, self._bound = server, False, socket_identity(self._socket)
        start = asyncio.get_running_loop().create_task(server.start())
        self._end(start)
        # An attempt can be dropped here, too; half a start would leave a server that never serves.
        await asyncio.shield(start)
        if self._bound is None:
            raise RegistrationError(f"{self._socket} has gone while it was made")

    def _unbind(self, grace: float | None) -> asyncio.Task[None] | None:
        """Begin to stop the server, which takes some milliseconds; the next attempt comes after that in any case."""
        server, self._server, self._bound = self._server, None, None
        if server is None:
            return None
        stop = asyncio.get_running_loop().create_task(server.stop(grace))
        self._end(stop)
        return stop

    async def _register(self) -> None:
        if self._kubelet is None:
            raise RegistrationError(f"waiting for kubelet ({self._kubelet_socket} is not there)")
        for pause in LISTEN_PAUSES:
            if listens(self._kubelet_socket):
                break
            await asyncio.sleep(pause)
        else:
            raise RegistrationError("waiting for kubelet (nobody listens on its socket)")
        endpoint = os.path.basename(self._socket)
        request = pb.RegisterRequest(
            version="v1beta1", endpoint=endpoint, resource_name=self.name, options=PLUGIN_OPTIONS
        )
        self._offered = True
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet_socket}", options=CHANNEL_OPTIONS) as channel:
            try:
                kubelet = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
                await kubelet.Register(request, timeout=REGISTER_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise RegistrationError(f"kubelet has not answered within {REGISTER_TIMEOUT:g} s") from None
                reason = " ".join((error.details() or error.code().name).split())
                raise RegistrationError(f"kubelet refuses: {reason}") from None
        log.info("%s: registered with kubelet, %s", self.name, _counted(len(self.plugin.resource.devices), "device"))
        self._tell(REGISTERED)

    async def _until_lost(self) -> NoReturn:
        """Ends with a RegistrationError, once the kubelet no longer watches us."""
        await _within(
            REGISTER_TIMEOUT, self.plugin.watched, "kubelet took the registration but does not watch the devices"
        )
        await self.plugin.unwatched.wait()
        raise RegistrationError("kubelet no longer watches the devices")

    def _tell(self, state: str) -> None:
        """The session's state has become another: worth a log line, but for the good one, which has had its own."""
        if state == self.state:
            return
        self.state = state
        if state != REGISTERED:
            level = logging.INFO if state.startswith("waiting") else logging.WARNING
            log.log(level, "%s: %s", self.name, state)
        self._changed()


SocketIdentity = tuple[int, int, int]

_bindings = itertools.count(1)


def socket_identity(path: str) -> SocketIdentity | None:
    """Device, inode and time of making of a socket's file: inode numbers are reused, so two of them do not suffice."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def new_socket_name(resource: str) -> str:
    """File name for a socket of a resource that nobody has used before, such as "tt-n300.4711-1.sock"."""
    name = resource.partition("/")[2]
    return f"{SOCKET_PREFIX}{name[:18]}.{os.getpid()}-{next(_bindings) % 100_000}.sock"


def remove_dead_sockets(directory: str) -> None:
    """Remove what a daemon left that was killed: sockets of ours on which nobody listens."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            path = f"{directory}/{name}"
            if re.fullmatch(rf"{SOCKET_PREFIX}.+\.\d+-\d+\.sock", name) and not listens(path):
                os.unlink(path)


def listens(path: str) -> bool:
    """Whether somebody accepts connections on a unix socket. Does not block."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as probe:
        return probe.connect_ex(path) in (0, errno.EAGAIN)  # EAGAIN: so many have connected that the queue is full


async def _within(seconds: float, event: asyncio.Event, otherwise: str) -> None:
    """Wait for an event. Not by wait_for(): before Python 3.12 that can swallow a cancellation which comes with it."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    try:
        done, _ = await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
    if not done:
        raise RegistrationError(otherwise)


@contextlib.contextmanager
def surviving(what: str) -> Iterator[None]:
    """The boundary at which the daemon outlives an error of its own: it is logged with its traceback."""
    try:
        yield
    except Exception:
        log.exception("internal error in %s; going on", what)


# ======================================================================================================================
#  KERNEL EVENTS: what changes among devices (netlink) and in the kubelet's directory (inotify)
# ======================================================================================================================

NETLINK_KOBJECT_UEVENT = 15
UEVENT_GROUP_KERNEL = 1  # udevd's own messages go to group 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Uevent:
    action: str  # "add", "remove", "change", "bind", "unbind"
    ordinal: int | None  # of the node that it is about; None if it is about a PCI function


def open_uevent_socket() -> socket.socket:
    """A socket that gets the kernel's uevents; raises OSError where that is not allowed."""
    kernel = socket.socket(
        socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT
    )
    kernel.bind((0, UEVENT_GROUP_KERNEL))
    return kernel


def sent_by_kernel(sender: object) -> bool:
    """Whether a netlink message came from the kernel itself, which has port id 0 and which nobody can take."""
    return isinstance(sender, tuple) and sender[0] == 0


def parse_uevent(message: bytes) -> Uevent | None:
    """The event if it is about one of our devices, else None: a machine has many others."""
    pairs = (part.split("=", 1) for part in message.decode("utf-8", "replace").split("\0") if "=" in part)
    variables = {pair[0]: pair[1] for pair in pairs}
    action, subsystem = variables.get("ACTION", ""), variables.get("SUBSYSTEM")
    if subsystem == "tenstorrent":
        name = re.fullmatch(r"tenstorrent/(\d{1,5})", variables.get("DEVNAME", ""))
        return Uevent(action, int(name[1]) if name else None)
    if subsystem == "pci" and variables.get("PCI_ID", "").upper().startswith(f"{VENDOR:04X}:"):
        return Uevent(action, None)
    return None


def receive_uevents(kernel: socket.socket, trusted: Callable[[object], bool]) -> Iterator[Uevent | None]:
    """Everything about our devices that waits in the socket; None stands for messages that were lost."""
    while True:
        try:
            message, sender = kernel.recvfrom(8192)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            yield None
            continue
        if trusted(sender) and (event := parse_uevent(message)):
            yield event


class DirectoryWatch:
    """Tells what happens in a directory, from before it exists until after it is gone, and again.

    While it is missing, the nearest ancestor that there is is watched. `check()` finds what no event tells of: that the
    path leads somewhere else now (a mount, a renamed ancestor).
    """

    MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = 0x40, 0x80, 0x100, 0x200, 0x400, 0x800
    OVERFLOW, ONLYDIR = 0x4000, 0x0100_0000
    MASK = MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | ONLYDIR

    def __init__(self, path: str, happened: Callable[[Collection[str], Collection[str]], None]) -> None:
        """happened: called with the names that something happened to, and with those of them that are new.

        Names are file names within the directory; "" stands for the directory itself, and for lost events.
        Raises OSError if there is no inotify to be had.
        """
        self._path = path
        self._happened = happened
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "no inotify instance; raise fs.inotify.max_user_instances")
        self._watch = -1
        self._watched: tuple[str, tuple[int, int] | None] = ("", None)  # the path, and device and inode of what it was

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._arm()
        loop.add_reader(self._descriptor, self._readable)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    def check(self) -> None:
        watched = path, identity = self._watched
        if path != self._path or _directory_identity(path) != identity:
            self._arm()
            if self._watched != watched:
                self._happened({""}, ())

    def _arm(self) -> None:
        """Watch the directory or, while there is none, its nearest ancestor."""
        if self._watch >= 0:
            _libc.inotify_rm_watch(self._descriptor, self._watch)
        path = ""
        # Until nothing has come into being between the look and the watch.
        while path != (path := self._nearest()):
            self._watched = (path, _directory_identity(path))
            self._watch = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(self.MASK))
        if self._watch < 0:
            log.warning(
                "cannot watch %s (%s): a kubelet is seen at the next poll only", path, os.strerror(ctypes.get_errno())
            )

    def _nearest(self) -> str:
        path = self._path
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        return path

    def _readable(self) -> None:
        buffer = os.read(self._descriptor, 65536)
        offset, names, new = 0, set(), set()
        while offset < len(buffer):
            watch, mask, _, length = struct.unpack_from("iIII", buffer, offset)
            name = os.fsdecode(buffer[offset + 16 : offset + 16 + length].rstrip(b"\0"))
            offset += 16 + length
            if watch == self._watch or mask & self.OVERFLOW:  # else from a watch that was given up
                names.add(name)
                if mask & (self.CREATE | self.MOVED_TO):
                    new.add(name)
        if names and (self._watched[0] != self._path or "" in names):
            self._arm()
            self._happened({""}, ())
        elif names:
            self._happened(names, new)


def _directory_identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


# ======================================================================================================================
#  TELEMETRY READERS: the one thing that must not run on the loop
# ======================================================================================================================

READ_PATIENCE = 0.1  # seconds after which the other chips no longer wait for the one that is being read


class Look(NamedTuple):
    """A chip to be read, and what it said last, None to have everything read."""

    chip: Chip
    last: Telemetry | None
    periodic: bool  # it belongs to a poll, not to an event


class Reading(NamedTuple):
    chip: Chip
    telemetry: Telemetry
    periodic: bool


class TelemetryReaders:
    """Reads chips one after another on a thread; a chip that blocks keeps its thread, and another goes on.

    A chip has at most one read under way, so there is at most one thread more than there are chips that block. Threads
    end with their work: there is none between two polls.
    """

    def __init__(
        self,
        deliver: Callable[[list[Reading]], None],
        read: Callable[[Chip, Telemetry | None], Telemetry] = read_telemetry,
    ) -> None:
        """deliver: called on the loop with what was read, possibly nothing, whenever there is something to see."""
        self._deliver = deliver
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._todo: collections.deque[Look] = collections.deque()
        self._done: collections.deque[Reading] = collections.deque()
        self._since: dict[str, float] = {}  # reads under way: PCI address and when they began
        self._timer: asyncio.TimerHandle | None = None

    def request(self, looks: Iterable[Look]) -> None:
        """Read these chips, but for those whose read waits or is under way."""
        waiting = {look.chip.bdf for look in self._todo} | self._since.keys()
        self._todo.extend(look for look in looks if look.chip.bdf not in waiting)
        if self._todo and not self._responsive():
            self._start_thread()
        self._set_timer()

    def seconds_under_way(self, bdf: str) -> float:
        """How long the read of a chip has been under way; 0 if there is none."""
        since = self._since.get(bdf)
        return 0.0 if since is None else time.monotonic() - since

    def is_settled(self) -> bool:
        """Whether every chip that was asked for has answered, or has taken longer than READ_PATIENCE."""
        return not self._todo and not self._done and not self._responsive()

    def _responsive(self) -> bool:
        """Whether a thread is at work that has not been held up."""
        now = time.monotonic()
        return any(now - since < READ_PATIENCE for since in list(self._since.values()))

    def _start_thread(self) -> None:
        look = self._todo.popleft()
        self._since[look.chip.bdf] = time.monotonic()
        # A daemon thread: a read that cannot be interrupted must not keep the process from exiting.
        threading.Thread(target=self._work, args=(look,), name=f"telemetry {look.chip.bdf}", daemon=True).start()

    def _work(self, look: Look) -> None:
        while True:
            try:
                self._done.append(Reading(look.chip, self._read(look.chip, look.last), look.periodic))
            finally:
                self._since.pop(look.chip.bdf, None)
            try:
                look = self._todo.popleft()
            except IndexError:
                break
            self._since[look.chip.bdf] = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended meanwhile
            self._loop.call_soon_threadsafe(self._collect)

    def _set_timer(self) -> None:
        """Look again when a read under way has used up its patience, or its deadline."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        ages = [now - since for since in list(self._since.values())]
        waits = [(READ_PATIENCE if age < READ_PATIENCE else READ_DEADLINE) - age for age in ages if age < READ_DEADLINE]
        if waits:
            self._timer = self._loop.call_later(min(waits) + 0.002, self._collect)

    def _collect(self) -> None:
        readings = []
        while self._done:
            readings.append(self._done.popleft())
        if self._todo and not self._responsive():
            self._start_thread()
        self._set_timer()
        self._deliver(readings)


# ======================================================================================================================
#  SYSTEMD: readiness, status and watchdog, and log lines with a priority
# ======================================================================================================================


class ServiceManager:
    """What systemd wants to know of a Type=notify service; does nothing where nobody listens."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._notifier = sdnotify.SystemdNotifier()
        if self._notifier.socket:
            self._notifier.socket.setblocking(False)  # a manager that hangs must not make us hang
        self._status = ""
        self.watchdog_pause = math.inf  # seconds after which the next sign of life is due, inf if none is wanted
        pid, microseconds = environ.get("WATCHDOG_PID"), _decimal(environ.get("WATCHDOG_USEC"))
        if microseconds and microseconds > 0 and (not pid or pid == str(os.getpid())):
            self.watchdog_pause = microseconds / 2e6

    def _notify(self, state: str) -> None:
        # sdnotify encodes in Latin-1, systemd wants UTF-8: so it gets characters that are the bytes of that.
        self._notifier.notify(state.encode().decode("latin-1"))

    def ready(self) -> None:
        self._notify("READY=1")

    def reloading(self) -> None:
        self._notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._notify("STOPPING=1")

    def alive(self) -> None:
        if self.watchdog_pause < math.inf:
            self._notify("WATCHDOG=1")

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self._notify(f"STATUS={text}")


class _JournalFormatter(logging.Formatter):
    """Lines with the priority prefix of sd-daemon(3), every line of a traceback too."""

    def format(self, record: logging.LogRecord) -> str:
        priority = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4}.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def stderr_is_journal(environ: Mapping[str, str]) -> bool:
    """Whether stderr is the journal's own stream (systemd.exec(5), JOURNAL_STREAM), and not redirected since."""
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def set_up_logging(environ: Mapping[str, str], *, timestamps: bool) -> None:
    """One event a line on stderr; the journal has a time of its own."""
    handler = logging.StreamHandler(sys.stderr)
    if stderr_is_journal(environ):
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s" if timestamps else "%(message)s")
        )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


# ======================================================================================================================
#  DAEMON: follows the devices, judges them, publishes them
# ======================================================================================================================


class Fleet:
    """The devices of the node as they are followed over time. What changes is logged, once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.devices: dict[str, Device] = {}  # by PCI address; none is ever taken out
        self.oddities: tuple[str, ...] = ()  # what is there but not listed, and why
        self.changed = True  # since somebody looked and set it to False: anything but what only the rules remember

    def observe(self, *, thorough: bool = True) -> list[Chip]:
        """Look at sysfs; returns the chips that are new, back or at another place: their telemetry is wanted.

        thorough: read again, too, what cannot change as long as the same device is at the same place.
        """
        known = [] if thorough else [device.chip for device in self.devices.values() if device.present]
        seen = scan(self.settings, known)
        nodes = [c.node_fault for c in seen.chips.values() if c.node_fault and c.bdf not in self.devices]
        for oddity in (oddities := (*seen.oddities, *nodes)):
            if oddity not in self.oddities:
                log.warning("not listed: %s", oddity)
        self.oddities = oddities

        wanted = []
        for bdf, chip in seen.chips.items():
            device = self.devices.get(bdf)
            if device is None:
                if chip.node_fault:
                    continue
                self.devices[bdf] = Device(chip)
            elif device.present and device.chip == chip:
                continue
            elif (device.chip.arch, device.chip.pci_card) != (chip.arch, chip.pci_card):
                self._update(Device(chip))  # another card at the same address
            else:
                # What was away stays so until it speaks.
                self._update(replace(device, chip=chip, present=True, telemetry=None))
            wanted.append(chip)
        for bdf in self.devices.keys() - seen.chips.keys():
            device = self.devices[bdf]
            exists = pci_function_exists(self.settings, bdf)
            self._update(replace(device, present=False, health=gone(device.health, bdf, function_exists=exists)))
        return wanted

    def learn(self, readings: Iterable[Reading], now: float) -> None:
        """Take over what the chips said; `now` in seconds of any clock that only goes forward."""
        for chip, telemetry, periodic in readings:
            device = self.devices[chip.bdf]
            if device.present and device.chip == chip:  # else it was asked before it went or was renumbered
                health = judge(device.health, chip, telemetry, self.settings.health, now, periodic=periodic)
                self._update(replace(with_identity(device, telemetry), health=health, listed=True))

    def wait_no_longer(self, seconds_under_way: Callable[[str], float]) -> None:
        """Go on without the chips that do not answer: list those that are new, and call it a fault at the deadline."""
        for device in list(self.devices.values()):
            seconds = seconds_under_way(device.bdf)
            if device.present and seconds > READ_DEADLINE:
                self._update(replace(device, health=blocked(device.health), listed=True))
            elif seconds > READ_PATIENCE:
                self._update(replace(device, listed=True))

    def _update(self, device: Device) -> None:
        before, self.devices[device.bdf] = self.devices[device.bdf], device
        old, new = before.health, device.health
        if replace(before, health=new) == device and (old.fault, old.reason) == (new.fault, new.reason):
            return
        self.changed = True
        what = f"{device.bdf} ({device.card_type or device.chip.arch})"
        if device.listed and _introduction(device) != (_introduction(before) if before.listed else ""):
            log.info("%s: %s", what, _introduction(device))
        if old.fault != new.fault:
            if new.fault:
                log.warning("%s: unhealthy: %s", what, new.reason)
            else:
                log.info("%s: healthy again", what)


def _introduction(device: Device) -> str:
    """A device's path and identity, for the log."""
    facts = {"board": device.serial, "ASIC": device.asic_id, "firmware": device.firmware}
    told = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([device.chip.path, *told] if told else [device.chip.path, "its firmware is silent"])


THOROUGH = 12  # every so many polls everything is read again, a minute by default


class Daemon:
    """Ties it together: kernel events, polls and signals in; device lists, registrations and systemd's view out."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        manager: ServiceManager,
        uevents: Callable[[], socket.socket],
        trusted: Callable[[object], bool],
    ) -> None:
        """load: reads the configuration again, for SIGHUP. uevents, trusted: where kernel events come from."""
        self.settings = settings
        self.fleet = Fleet(settings)
        self.sessions: dict[str, KubeletSession] = {}
        self._load = load
        self._manager = manager
        self._open_uevents = uevents
        self._trusted = trusted
        self._serving = False  # the first look at every device is done
        self._stopping = False
        self._polls = 0
        self._attention = asyncio.Event()  # the loop of polls has to look up: stop, or another interval
        self._told = asyncio.Event()  # telemetry has arrived
        self._closing: set[asyncio.Task[None]] = set()
        self._readers = TelemetryReaders(self._telemetry_arrived)
        self._watch = DirectoryWatch(settings.device_plugin_dir, self._directory_changed)

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        log.setLevel(self.settings.log_level.upper())
        kernel = None
        try:
            kernel = self._open_uevents()
            loop.add_reader(kernel, self._uevents_arrived, kernel)
        except OSError as error:
            log.warning("no kernel events (%s): what changes is seen at the next poll only", error.strerror)
        self._watch.open(loop)
        remove_dead_sockets(self.settings.device_plugin_dir)
        try:
            return await self._serve()
        finally:
            self._manager.stopping()
            if kernel:
                loop.remove_reader(kernel)
                kernel.close()
            self._watch.close(loop)
            await asyncio.gather(*(session.close() for session in self.sessions.values()), *self._closing)

    async def _serve(self) -> int:
        self._readers.request(Look(chip, None, periodic=False) for chip in self.fleet.observe())
        while not self._readers.is_settled():
            self._told.clear()
            await self._told.wait()
        version = driver_version(self.settings)
        if self.settings.fail_on_init_error and not self.fleet.devices:
            log.error("no Tenstorrent driver is loaded" if version is None else "there is no Tenstorrent device")
            return 1
        driver = "no driver is loaded" if version is None else f"driver {version or 'of unknown version'}"
        log.info("tt-device-plugin %s: %s, %s", __version__, driver, _counted(len(self.fleet.devices), "device"))
        self._serving = True
        self.publish()
        for session in list(self.sessions.values()):
            await session.tried_to_serve.wait()
        self._manager.ready()
        await self._poll_until_stopped()
        return 0

    async def _poll_until_stopped(self) -> None:
        polled = time.monotonic()
        while not self._stopping:
            due = polled + self.settings.health.interval - time.monotonic()
            self._attention.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._attention.wait(), max(0, min(due, self._manager.watchdog_pause)))
            if time.monotonic() - polled >= self.settings.health.interval:
                polled = time.monotonic()
                with surviving("a poll"):
                    self.poll()
            self._manager.alive()

    def poll(self) -> None:
        """The net under all events, and the only way to see a chip die: that sends none."""
        self._polls += 1
        thorough = self._polls % THOROUGH == 0
        self.fleet.observe(thorough=thorough)
        present = [device for device in self.fleet.devices.values() if device.present]
        self._readers.request(
            Look(device.chip, None if thorough else device.telemetry, periodic=True) for device in present
        )
        self._watch.check()
        for session in self.sessions.values():
            session.look()
        self.publish_changes()

    def publish_changes(self) -> None:
        if self.fleet.changed and self._serving:
            self.publish()

    def publish(self) -> None:
        """Bring resources, their sessions and systemd's status in line with the devices."""
        self.fleet.changed = False
        if self.settings.runtime_dir:
            nodes = {d.bdf: d.chip.path for d in self.fleet.devices.values() if d.present and not d.chip.node_fault}
            with surviving("the links to the nodes"):
                keep_node_links(self.settings.runtime_dir, nodes)
        wanted = resources([device for device in self.fleet.devices.values() if device.listed], self.settings)
        for name in self.sessions.keys() - wanted.keys():
            log.info("%s: no device is of this resource any longer", name)
            task = asyncio.get_running_loop().create_task(self.sessions.pop(name).close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, resource in wanted.items():
            if session := self.sessions.get(name):
                session.plugin.publish(resource, self.settings)
            else:
                plugin = DevicePlugin(resource, self.settings)
                self.sessions[name] = KubeletSession(plugin, self.settings.device_plugin_dir, self._show_status)
                self.sessions[name].begin()
        self._show_status()

    def stop(self) -> None:
        self._stopping = True
        self._attention.set()

    def reload(self) -> None:
        """SIGHUP: take over what a running daemon can; a bad configuration changes nothing."""
        self._manager.reloading()
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("configuration is not reloaded, the old one stays: %s", error)
        else:
            kept = {key: getattr(self.settings, key) for key in NEEDS_RESTART}
            for key, value in kept.items():
                if getattr(loaded, key) != value:
                    log.warning("%s needs a restart to change; until then it is %s", key, value)
            self.settings = self.fleet.settings = replace(loaded, **kept)
            log.setLevel(self.settings.log_level.upper())
            log.info("configuration reloaded")
            self.fleet.changed = True
            self.publish_changes()
            self._attention.set()
        if self._serving:
            self._manager.ready()

    def _uevents_arrived(self, kernel: socket.socket) -> None:
        events = list(receive_uevents(kernel, self._trusted))
        if not events:
            return
        log.debug("kernel events: %s", events)
        new = self.fleet.observe()
        ordinals = {event.ordinal for event in events if event}
        named = [d.chip for d in self.fleet.devices.values() if d.present and d.chip.ordinal in ordinals]
        self._readers.request(Look(chip, None, periodic=False) for chip in [*new, *named])
        self.publish_changes()

    def _telemetry_arrived(self, readings: list[Reading]) -> None:
        self.fleet.learn(readings, time.monotonic())
        self.fleet.wait_no_longer(self._readers.seconds_under_way)
        self._told.set()
        self.publish_changes()

    def _directory_changed(self, names: Collection[str], new: Collection[str]) -> None:
        foreign = any(not name.startswith(SOCKET_PREFIX) for name in names)
        for session in self.sessions.values():
            session.look(kubelet_is_new=KUBELET_SOCKET in new, stirred=foreign)

    def _show_status(self) -> None:
        sessions = self.sessions.values()
        self._manager.status(status_line([(session.plugin.resource, session.state) for session in sessions]))


def status_line(listed: Sequence[tuple[Resource, str]]) -> str:
    """What `systemctl status` shows of resources and the states of their registrations.

    "8 × tenstorrent.com/n300, 8 healthy; registered with kubelet"
    """
    if not listed:
        return "no Tenstorrent device on this node; waiting for one"
    counts = []
    for resource, _ in listed:
        reasons = [
            f"{device.bdf}: {device.health.reason}" for device in resource.devices.values() if device.health.fault
        ]
        unhealthy = f" ({reasons[0]}{', …' if len(reasons) > 1 else ''})" if reasons else ""
        counts.append(f"{len(resource.devices)} × {resource.name}, {resource.healthy} healthy{unhealthy}")
    states = {state for _, state in listed}
    if len(states) > 1:
        states = {f"{resource.name} {state}" for resource, state in listed if state != REGISTERED}
    return "; ".join([*counts, *sorted(states)])


# ======================================================================================================================
#  COMMAND LINE
# ======================================================================================================================

DESCRIPTION = """\
Makes the Tenstorrent accelerators of this node schedulable in Kubernetes.

commands:
  run     the daemon (default): serves the kubelet's device plugin API until SIGTERM; SIGHUP re-reads the configuration
  list    one row per device, with its health and the resource that it belongs to; --json for programs
  check   whether this node is fit: driver, devices, hugepages, the kubelet's directory, configuration; exit 1 if not
"""

EPILOG = """\
Each option can also be set by the environment variable in brackets, or in the configuration file under the flag's name
without dashes in front and with underscores. A flag wins over the environment, the environment over the file.
The file can say more: [health] interval, temperature_limit, heartbeat_misses, trip_holdoff, and [[mounts]].

exit status: 0 in order; 1 check failed, or nothing found with --fail-on-init-error; 2 usage; 78 bad configuration
"""


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tt-device-plugin",
        usage="tt-device-plugin [run|list|check] [OPTIONS]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", nargs="?", choices=("run", "list", "check"), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"tt-device-plugin {__version__}")
    parser.add_argument("--json", action="store_true", help="with list: an array of objects")
    parser.add_argument(
        "--config-file", metavar="FILE", help=f"default {DEFAULT_CONFIG_FILE}, which may be absent [TTDP_CONFIG_FILE]"
    )
    for option in OPTIONS:
        default = getattr(Settings(), option.key)
        shown = str(default).lower() if option.is_switch else default
        parser.add_argument(
            option.flag,
            metavar="BOOL" if option.is_switch else option.key.rpartition("_")[2].upper(),
            help=f"{option.help}; default {shown} [{option.variable}]",
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: returns its exit status (see EPILOG)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A switch takes its value after "=" only: what follows a bare one is the next word, such as a command.
    switches = {option.flag for option in OPTIONS if option.is_switch}
    parser = argument_parser()
    options = parser.parse_args([f"{word}=true" if word in switches else word for word in words])
    if options.json and options.command != "list":
        parser.error("--json goes with list")
    set_up_logging(os.environ, timestamps=options.command == "run")
    load = functools.partial(load_settings, vars(options), os.environ)

    if options.command != "run":
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        log.setLevel("ERROR")  # what a survey finds is in its answer, not in the log
    if options.command == "check":
        return check(load)
    try:
        settings = load()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    if options.command == "list":
        return list_devices(settings, as_json=options.json)
    return asyncio.run(_run(settings, load))


async def _run(settings: Settings, load: Callable[[], Settings]) -> int:
    return await Daemon(settings, load, ServiceManager(os.environ), open_uevent_socket, sent_by_kernel).run()


async def survey(settings: Settings) -> Fleet:
    """The node's devices, asked twice, one second apart: a heartbeat that stands still shows only then."""
    fleet = Fleet(replace(settings, health=replace(settings.health, heartbeat_misses=1)))
    told = asyncio.Event()

    def arrived(readings: list[Reading]) -> None:
        fleet.learn(readings, time.monotonic())
        fleet.wait_no_longer(readers.seconds_under_way)
        told.set()

    readers = TelemetryReaders(arrived)
    for pause in (0.0, 1.0):
        await asyncio.sleep(pause)
        fleet.observe()
        asked = [device.chip for device in fleet.devices.values() if device.present]
        readers.request(Look(chip, None, periodic=True) for chip in asked)
        while (
            any(0 < readers.seconds_under_way(chip.bdf) <= READ_DEADLINE for chip in asked) or not readers.is_settled()
        ):
            told.clear()
            await told.wait()
    return fleet


def list_devices(settings: Settings, *, as_json: bool) -> int:
    fleet = asyncio.run(survey(settings))
    rows = [
        _row(identifier, device, resource.name)
        for resource in resources(list(fleet.devices.values()), settings).values()
        for identifier, device in resource.devices.items()
    ]
    rows.sort(key=lambda row: address(str(row["bdf"])))
    for oddity in fleet.oddities:
        print(f"not listed: {oddity}", file=sys.stderr)
    if as_json:
        import json  # here, not above: the daemon has no use for it

        print(json.dumps(rows, indent=2))
    elif rows:
        print(_table(rows))
    else:
        print("no Tenstorrent device on this node")
    return 0


def _row(identifier: str, device: Device, resource: str) -> dict[str, object]:
    chip = device.chip
    return {
        "id": identifier,
        "index": chip.ordinal,
        "path": chip.path if device.present and not chip.node_fault else None,
        "bdf": device.bdf,
        "card": device.card_type,
        "board": device.board_type if device.card_type else None,
        "arch": chip.arch,
        "serial": device.serial,
        "asic_id": device.asic_id,
        "numa_node": chip.numa_node,
        "firmware": device.firmware,
        "healthy": device.health.fault is None,
        "reason": device.health.reason,
        "resource": resource,
    }


def _table(rows: Sequence[Mapping[str, object]]) -> str:
    columns = ("id", "path", "card", "board", "arch", "serial", "numa_node", "firmware", "resource", "health")
    titles = {"path": "NODE", "numa_node": "NUMA"}
    lines = [[titles.get(column, column.upper()) for column in columns]]
    for row in rows:
        cells = {**row, "health": "healthy" if row["healthy"] else f"UNHEALTHY: {row['reason']}"}
        lines.append(["-" if cells[column] is None else str(cells[column]) for column in columns])
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `check`."""

    level: Literal["ok", "warn", "FAIL"]
    subject: str
    text: str  # what is so and, unless it is ok, what to do


def check(load: Callable[[], Settings]) -> int:
    """Preflight for a node; returns 1 if anything FAILs."""
    findings: list[Finding] = []
    try:
        settings = load()
        findings.append(Finding("ok", "configuration", "valid"))
    except ConfigError as error:
        findings.append(Finding("FAIL", "configuration", f"{error}; the rest is checked with the defaults"))
        settings = Settings()
    fleet = asyncio.run(survey(settings))
    findings += [_check_driver(settings), *_check_devices(settings, fleet), *_check_hugepages(settings, fleet)]
    findings += _check_kubelet(settings)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.level:4}  {finding.subject:{width}}  {finding.text}")
    return 1 if any(finding.level == "FAIL" for finding in findings) else 0


def _check_driver(settings: Settings) -> Finding:
    version = driver_version(settings)
    if version is None:
        return Finding("FAIL", "driver", "not loaded; install tt-kmd and run: modprobe tenstorrent")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < (2, 7):
        return Finding(
            "warn", "driver", f"{version} shows no heartbeat: firmware that stops is not noticed; update to 2.7"
        )
    return Finding("ok", "driver", version or "loaded; it does not say its version")


def _check_devices(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    if not fleet.devices and not fleet.oddities:
        yield Finding("warn", "devices", "none on this node; look for them with: lspci -d 1e52:")
    for oddity in fleet.oddities:
        yield Finding(
            "FAIL", "devices", f"{oddity}; reload the driver: modprobe -r tenstorrent && modprobe tenstorrent"
        )
    for device in fleet.devices.values():
        what = f"{device.card_type or device.chip.arch}, {device.chip.path}"
        if device.health.fault:
            yield Finding("FAIL", device.bdf, f"{what}: {device.health.reason}")
            continue
        users = open_descriptors(settings, device.chip.ordinal)
        yield Finding("ok", device.bdf, f"{what}, healthy{f', open {users} times' if users else ''}")
        mode = stat.S_IMODE(os.stat(device.chip.path).st_mode)
        if mode & 0o666 != 0o666:
            advice = "containers that do not run as root cannot open it; install the driver's udev rules"
            yield Finding("warn", device.bdf, f"{device.chip.path} has mode {mode:04o}, not 0666: {advice}")


def _check_hugepages(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """A Wormhole without an IOMMU that translates needs memory in one piece: four pages of 1 GiB for each chip."""

    def translated(bdf: str) -> bool:
        group = _read_quick(f"{settings.sysfs_root}/bus/pci/devices/{bdf}/iommu_group/type")
        return (group or "").startswith("DMA")

    needy = [d for d in fleet.devices.values() if d.present and d.chip.arch == "wormhole" and not translated(d.bdf)]
    wanted = sum(8 if device.board_type == "n300" else 4 for device in needy)
    pool = f"{settings.sysfs_root}/kernel/mm/hugepages/hugepages-1048576kB"
    there = _decimal(_read_quick(f"{pool}/nr_hugepages")) or 0
    try:
        with open(f"{settings.proc_root}/mounts", errors="replace") as file:
            mounts = file.read()
    except OSError:
        mounts = ""
    directory = f"{settings.dev_root}/hugepages-1G"
    if not needy:
        yield Finding("ok", "hugepages", f"{there} of 1 GiB; none are needed")
    elif there < wanted:
        advice = f"boot with hugepagesz=1G hugepages={wanted}, or install Tenstorrent's tt-system-tools"
        yield Finding(
            "warn", "hugepages", f"{there} of 1 GiB for {len(needy)} Wormhole devices without IOMMU; {advice}"
        )
    elif not re.search(rf"^\S+ {re.escape(directory)} hugetlbfs ", mounts, re.MULTILINE):
        yield Finding("warn", "hugepages", f"{there} of 1 GiB, but {directory} is not mounted; mount hugetlbfs there")
    else:
        yield Finding("ok", "hugepages", f"{there} of 1 GiB")


def _check_kubelet(settings: Settings) -> Iterator[Finding]:
    directory = settings.device_plugin_dir
    if not os.path.isdir(directory):
        yield Finding(
            "warn", "kubelet", f"{directory} is not there (yet); is kubelet installed, and is this its directory?"
        )
        return
    if os.access(directory, os.W_OK | os.X_OK):
        yield Finding("ok", "kubelet", f"{directory} can be written to")
    else:
        yield Finding("FAIL", "kubelet", f"{directory} cannot be written to; run as root, and look at its mount")
    kubelet = f"{directory}/{KUBELET_SOCKET}"
    if not os.path.exists(kubelet):
        yield Finding("warn", "kubelet", f"{kubelet} is not there; kubelet is not running")
    elif not os.access(kubelet, os.W_OK):
        yield Finding("warn", "kubelet", f"{kubelet} may not be connected to; run as root")
    elif not listens(kubelet):
        yield Finding("warn", "kubelet", f"nobody listens on {kubelet}; kubelet is not running")
    else:
        yield Finding("ok", "kubelet", f"{kubelet} answers")


if __name__ == "__main__":
    sys.exit(main())
