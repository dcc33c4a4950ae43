"""tt-device-plugin: Tenstorrent accelerators, schedulable in Kubernetes, by a daemon that runs on the host.

It enumerates the cards from sysfs, serves the kubelet's device plugin API (v1beta1) and follows kernel events. Read it
from top to bottom; a chapter uses only what stands above it.

    what the world looks like    CONFIGURATION, INVENTORY
    what we decide               HEALTH, RESOURCES, PREFERRED ALLOCATION, CONTAINER EDITS, WHAT OTHERS READ
    how we talk                  DEVICE PLUGIN SERVICE, KUBELET SESSION, OWNERS, KERNEL EVENTS, OFF THE LOOP, SYSTEMD,
                                 FILES AND METRICS
    what ties it together        DAEMON, COMMAND LINE

The deciding chapters are functions over frozen data: no file, socket or clock. One asyncio loop drives the rest; only
what can block for seconds, a chip's telemetry above all, is read on threads, which get and give back plain data.
"""

from __future__ import annotations

import os
import sys

# Both must be said before grpc and asyncio are imported. gRPC's core would write lines of its own, without priority, to
# stderr; asyncio would load OpenSSL (4 MB of memory) for TLS, which nobody speaks on a unix socket.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
sys.modules.setdefault("ssl", None)  # type: ignore[arg-type]

import _thread  # not threading: nobody waits for these threads, neither to have begun (two wake-ups) nor at the end
import argparse
import asyncio
import collections
import contextlib
import ctypes
import enum
import errno
import functools
import itertools
import json
import logging
import math
import queue
import re
import signal
import socket
import stat
import struct
import subprocess
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import grpc
import sdnotify
from google.protobuf.message import DecodeError

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from generated import podresources_pb2 as pods

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__version__ = "0.1.0"

log = logging.getLogger("tt-device-plugin")


# ==== CONFIGURATION: flag, then environment variable, then file, then default =========================================

ResourceNaming = Literal["board", "card", "arch"]
DeviceIdStrategy = Literal["bdf", "asic", "index"]
VisibleDevices = Literal["bdf", "index", "none"]
Unit = Literal["chip", "board"]
DeviceListStrategy = Literal["device-specs", "cdi"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_CONFIG_FILE = "/etc/tt-device-plugin/config.toml"
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the unit's RestartPreventExitStatus
NEEDS_RESTART = ("device_plugin_dir", "sysfs_root", "dev_root", "proc_root", "state_dir")  # not taken over on SIGHUP

# The kernel's sun_path holds 108 bytes with its NUL, and the kubelet has to reach our sockets under their full path.
SOCKET_PATH_MAX = 107
PLUGIN_DIR_MAX = SOCKET_PATH_MAX - len("/") - 42  # our part of that


class ConfigError(Exception):
    """A configuration that cannot be used: one line with the source, the value and what would be valid."""


# A parser takes what stands in the file, or the text of a variable or flag; it raises ValueError with what is valid.
Parser = Callable[[Any], Any]


def _valid(what: str, is_valid: Callable[[Any], object]) -> Parser:
    def parse(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(what)
        return value

    return parse


def _one_of(*choices: str) -> Parser:
    return _valid(" or ".join([", ".join(choices[:-1]), choices[-1]]), lambda value: value in choices)


def _number(least: float, most: float, what: str, *only: type) -> Parser:
    kinds = only or (int, float)
    return _valid(what, lambda value: type(value) in kinds and least <= value <= most)  # a boolean is an int to Python


def _matching(what: str, form: str, is_valid: Parser = lambda text: True) -> Parser:
    return _valid(what, lambda value: isinstance(value, str) and re.fullmatch(form, value) and is_valid(value))


def _path(what: str, form: str = r"[^\0]+", most: int = 4095) -> Parser:
    """An absolute path from any path, of so many bytes at most; "", if the form allows it, stays empty."""
    fits = _matching(what, form, lambda path: len(os.fsencode(os.path.abspath(path))) <= most)
    return lambda value: fits(value) and os.path.abspath(value)


def _selection(value: Any) -> Any:
    if value == "all" or (type(value) is int and value >= 1):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) or type(item) is int for item in value):
        return tuple(str(item) for item in value)
    raise ValueError('"all", a number of devices from 1 on, or a list of PCI addresses, IDs and ordinals')


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")  # as flags and variables have it
_in_words = _one_of(*_TRUE, *_FALSE)
_switch = _valid("true or false", lambda value: isinstance(value, bool))
_absolute = _matching("an absolute path", r"/[^\0]*")
_directory = _path("the path of a directory")
_or_none = _path("a path, or empty", r"[^\0]*")
_NAMED = "the name of a resource, such as n300 or tenstorrent.com/n300"
_resource_name = _matching(_NAMED, r"([^/]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_OWN_NAME = re.compile(r"([np]\d+[a-z]?|(galaxy-)?(wormhole|blackhole))(-board)?")  # that the program gives a resource
# A DNS subdomain that the API server takes as the prefix of an extended resource. Kubernetes reserves *.kubernetes.io
# and the prefix `requests.`, with which it names quotas: so 253 - 9 characters.
_domain = _matching(
    "a DNS name in lower case that is not Kubernetes' own, such as tenstorrent.com",
    r"(?!requests\.)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
    lambda value: len(value) <= 244 and "kubernetes.io" not in value,
)
_socket = _path(f"the path of a unix socket, of at most {SOCKET_PATH_MAX} bytes", most=SOCKET_PATH_MAX)
_FITTING = f"a path of at most {PLUGIN_DIR_MAX} bytes: the sockets in it have to fit into a unix socket address"
_plugin_dir = _path(_FITTING, most=PLUGIN_DIR_MAX)
# What other vendors' plugins have beside it.
_LEFT_OUT: dict[str, Parser] = dict.fromkeys(
    ("memory_gb", "memory", "mps", "cores", "timeslice"),
    _valid("left out: users of a chip take turns, nothing divides its memory or its cores", lambda value: False),
)


def _key(default: Any, parse: Parser, help: str = "") -> Any:
    """A key of the file, as a dataclass's field. help: the text of its flag, if it has one."""
    return field(default=default, metadata={"parse": parse, "help": help})


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount for every container that gets a device; it counts only while `host` exists."""

    host: str = _key(MISSING, _absolute)
    container: str = _key(MISSING, _absolute)
    read_only: bool = _key(False, _switch)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Section [health] of the configuration file."""

    interval: float = _key(5.0, _number(0.1, 3600, "a number of seconds from 0.1 to 3600"))  # a heartbeat takes 0.1 s
    temperature_limit: float | None = _key(None, _number(1, 200, "a number of °C from 1 to 200"))  # None: the card's
    heartbeat_misses: int = _key(2, _number(1, 1_000_000, "a whole number of polls from 1 on", int))  # in a row
    trip_holdoff: float = _key(300.0, _number(0, 1e9, "a number of seconds from 0 on"))  # without a further trip


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An entry [[sharing.resources]]: several containers on each of these devices."""

    name: str = _key(MISSING, _resource_name)  # as it is called unshared, without the domain: "n300"
    replicas: int = _key(MISSING, _number(2, 100, "a whole number of containers for each device, from 2 to 100", int))
    rename: str | None = _key(None, _resource_name)  # under which they are offered, without the domain
    devices: Literal["all"] | int | tuple[str, ...] = _key("all", _selection)  # so many, or by address, ID or ordinal


@dataclass(frozen=True, slots=True)
class Sharing:
    """Section [sharing] of the configuration file."""

    rename_by_default: bool = _key(False, _switch)
    fail_requests_greater_than_one: bool = _key(True, _switch)
    lock_dir: str = _key("/dev/shm/tt-device-plugin", _or_none)  # "": containers get no common locks
    resources: tuple[SharedResource, ...] = _key((), lambda value: value)

    def shared_name(self, entry: SharedResource) -> str:
        return entry.rename or (f"{entry.name}.shared" if self.rename_by_default else entry.name)


_PLUGIN_DIR = "the kubelet's device plugin directory"
_NAMING = "what names the resource: board (n300, p150), card (p150a) or arch (wormhole)"
_IDS = "device IDs: bdf (0000:03:00.0), asic (wormhole-<asic id>) or index (N of /dev/tenstorrent/N)"
_VISIBLE = "what TT_VISIBLE_DEVICES holds: bdf, index (0 to n-1 inside the container) or none (not set)"
_UNIT = "what one device is: chip, or board (a p300's 2 chips, a Galaxy tray's 8)"
_STRATEGY = "how a container gets its devices: device-specs (from the kubelet) or cdi (from the CDI file)"
_LABELS_DIR = "where node-feature-discovery looks for features, if it exists; empty: no file"
_METRICS_FILE = "the file for node_exporter, if its directory exists; empty: no file"
_PODS = "where the kubelet tells which pod has which device"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the configuration can say. Every path is absolute."""

    device_plugin_dir: str = _key("/var/lib/kubelet/device-plugins", _plugin_dir, _PLUGIN_DIR)
    sysfs_root: str = _key("/sys", _directory, "where sysfs is mounted")
    dev_root: str = _key("/dev", _directory, "where the device nodes are")
    proc_root: str = _key("/proc", _directory, "where procfs is mounted")
    resource_domain: str = _key("tenstorrent.com", _domain, "the resource's name before the slash")
    resource_naming: ResourceNaming = _key("board", _one_of(*get_args(ResourceNaming)), _NAMING)
    device_id_strategy: DeviceIdStrategy = _key("bdf", _one_of(*get_args(DeviceIdStrategy)), _IDS)
    visible_devices: VisibleDevices = _key("bdf", _one_of(*get_args(VisibleDevices)), _VISIBLE)
    unit: Unit = _key("chip", _one_of(*get_args(Unit)), _UNIT)
    device_list_strategy: DeviceListStrategy = _key("device-specs", _one_of(*get_args(DeviceListStrategy)), _STRATEGY)
    cdi_dir: str = _key("/var/run/cdi", _or_none, "where runtimes look for CDI files, if it exists; empty: no file")
    labels_dir: str = _key("/etc/kubernetes/node-feature-discovery/features.d", _or_none, _LABELS_DIR)
    metrics_file: str = _key("/var/lib/prometheus/node-exporter/tt-device-plugin.prom", _or_none, _METRICS_FILE)
    pod_resources_socket: str = _key("/var/lib/kubelet/pod-resources/kubelet.sock", _socket, _PODS)
    fail_on_init_error: bool = _key(False, _switch, "exit with status 1 if there is no driver or no device at start")
    log_level: LogLevel = _key("info", _one_of(*get_args(LogLevel)), "debug, info, warning or error")
    health: HealthSettings = field(default_factory=HealthSettings)
    sharing: Sharing = field(default_factory=Sharing)
    mounts: tuple[Mount, ...] | None = None  # None: the hugepages under dev_root
    state_dir: str | None = None  # systemd's StateDirectory=, for what a restart must not forget; None: it forgets


class Option(NamedTuple):
    """A setting that has a flag, an environment variable and a key in the file."""

    key: str
    flag: str
    variable: str
    parse: Parser
    help: str
    is_switch: bool


OPTIONS = [
    Option(k.name, "--" + k.name.replace("_", "-"), "TTDP_" + k.name.upper(), **k.metadata, is_switch=k.type == "bool")
    for k in fields(Settings)
    if k.metadata
]


def load_settings(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Settings:
    """Settings from flags (by key, None: not given), environment ("" is not set) and file; raises ConfigError."""
    if flags.get("config_file") == "":
        raise _invalid("--config-file", "", "the path of a file")
    named = flags.get("config_file") or environ.get("TTDP_CONFIG_FILE")
    path = named or DEFAULT_CONFIG_FILE
    values = _read_config_file(path, must_exist=bool(named))
    values["state_dir"] = (environ.get("STATE_DIRECTORY") or "").partition(":")[0] or None
    for option in OPTIONS:
        variable, flag = environ.get(option.variable) or None, flags.get(option.key)
        for source, text in ((option.variable, variable), (option.flag, flag)):
            if text is not None and option.is_switch:
                values[option.key] = _parsed(_in_words, text.lower(), source) in _TRUE
            elif text is not None:
                values[option.key] = _parsed(option.parse, text, source)
    settings = Settings(**values)
    return replace(settings, sharing=_checked_sharing(settings, path))


def _invalid(source: str, value: object, what: object) -> ConfigError:
    try:
        shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or brackets
        shown = f"this {type(value).__name__}"
    return ConfigError(f"{source}: {shown if len(shown) <= 80 else shown[:80] + '…'} is not valid; it must be {what}")


def _parsed(parse: Parser, value: object, source: str) -> Any:
    try:
        return parse(value)
    except ValueError as what:
        raise _invalid(source, value, what) from None


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
        raise ConfigError(f"{path}: is not valid TOML: {' '.join(str(error).split())}") from None

    sections: dict[str, Parser] = {
        "health": lambda table: HealthSettings(**_table(path, "[health] ", table, HealthSettings)),
        "sharing": lambda table: _sharing(path, table),
        "mounts": lambda tables: _mounts(path, tables),
    }
    return _table(path, "", document, Settings, **sections)


def _table(path: str, heading: str, table: object, kind: Any, **more: Parser) -> dict[str, Any]:
    """The values of a table of the file by the parsers of a dataclass's keys, and more; raises ConfigError."""
    keys = {key.name: key.metadata["parse"] for key in fields(kind) if key.metadata} | more
    if not isinstance(table, dict):
        raise _invalid(f"{path}: {heading.strip('[] ')}", table, f"a table: {heading}".rstrip())
    for key in table:
        if key not in keys:
            raise ConfigError(f"{path}: {heading}{key!r} is no key of this file; valid are {', '.join(keys)}")
    return {key: _parsed(keys[key], value, f"{path}: {heading}{key}") for key, value in table.items()}


def _tables(path: str, heading: str, tables: object, kind: Any, *needed: str, **more: Parser) -> list[dict[str, Any]]:
    """The values of all tables of one name. needed: keys that each of them must have."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(f"{path}: {heading.strip('[] ')}", tables, f"tables: {heading}".rstrip())
    if missing := next((key for table in tables for key in needed if key not in table), None):
        raise ConfigError(f"{path}: {heading}{missing} is missing")
    return [_table(path, heading, table, kind, **more) for table in tables]


def _mounts(path: str, tables: object) -> tuple[Mount, ...]:
    mounts: dict[str, Mount] = {}
    for values in _tables(path, "[[mounts]] ", tables, Mount, "host"):
        mount = Mount(**{"container": values["host"]} | values)
        if mount.container in mounts:
            raise _invalid(f"{path}: [[mounts]] container", mount.container, "another path in each of them")
        mounts[mount.container] = mount
    return tuple(mounts.values())


def _sharing(path: str, table: object) -> Sharing:
    values = _table(path, "[sharing] ", table, Sharing)
    found, heading = values.pop("resources", []), "[[sharing.resources]] "
    entries = _tables(path, heading, found, SharedResource, "name", "replicas", **_LEFT_OUT)
    return Sharing(resources=tuple(SharedResource(**entry) for entry in entries), **values)


def _checked_sharing(settings: Settings, path: str) -> Sharing:
    """The section with names that have lost their domain; raises ConfigError if its entries contradict each other."""
    where, domain, entries = f"{path}: [[sharing.resources]] ", settings.resource_domain, list[SharedResource]()
    for entry in settings.sharing.resources:
        for name in filter(None, (entry.name, entry.rename)):
            if "/" in name and not name.startswith(f"{domain}/"):
                raise ConfigError(f"{where}{name}: its domain is not {domain}")
        entry = replace(entry, name=entry.name.split("/")[-1], rename=entry.rename and entry.rename.split("/")[-1])
        if wrong := _contradiction(settings.sharing, entry, entries):
            raise ConfigError(f"{where}{entry.name}: {wrong}")
        entries.append(entry)
    return replace(settings.sharing, resources=tuple(entries))


def _contradiction(sharing: Sharing, entry: SharedResource, others: Sequence[SharedResource]) -> str | None:
    shared = sharing.shared_name(entry)
    if len(shared) > 63:
        return f"{shared} is longer than the 63 characters of a resource's name"
    if entry.devices != "all" and shared == entry.name:
        return "a selection of its devices needs a name of its own: rename"
    if shared != entry.name and _OWN_NAME.fullmatch(shared):
        return f"{shared} can be another resource's name; choose another one to rename it"
    for other in others:
        if sharing.shared_name(other) == shared:
            return f"{shared} is the name of two entries; choose another one to rename it"
        mine, others_own = (set(e.devices) if isinstance(e.devices, tuple) else set() for e in (entry, other))
        if other.name == entry.name and ("all" in (entry.devices, other.devices) or mine & others_own):
            return f"{min(mine & others_own, default='every device')} is selected twice"
    return None


# ==== INVENTORY: what sysfs, stat() and /proc show of the devices. None is ever opened: that would power it up ========

Arch = Literal["wormhole", "blackhole"]

VENDOR = 0x1E52
ARCHES: dict[int, Arch] = {0x401E: "wormhole", 0xB140: "blackhole"}  # by PCI device id
DRIVER = "tenstorrent"

# The board's code, which is also the PCI subsystem id: what tells the card's type while the firmware is silent.
CARDS = {
    0x14: "n300", 0x18: "n150", 0x35: "galaxy-wormhole", 0x36: "p100", 0x40: "p150a", 0x41: "p150b", 0x42: "p150c",
    0x43: "p100a", 0x44: "p300b", 0x45: "p300a", 0x46: "p300c", 0x47: "galaxy-blackhole",
}  # fmt: skip

ALL_ONES = 0xFFFFFFFF  # what every register of a chip reads that has left the bus
DEAD_TEMPERATURE = 65535999  # m°C: all ones through hwmon's conversion

_BDF = re.compile(r"([0-9a-f]{4,}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


class PciFunction(NamedTuple):
    """One PCI function with the driver bound to it, as sysfs and stat() show it at one moment."""

    bdf: str  # PCI address "0000:03:00.0": what survives resets and renumbering
    arch: Arch
    pci_card: str | None  # card type by the PCI subsystem id; None if it is not in CARDS
    numa_node: int | None  # None where the platform does not say
    ordinal: int  # N of /dev/tenstorrent/N: good for nothing but the present path
    path: str  # the host's device node
    sysfs: str  # the class device's directory below the PCI function's, which holds the tt_* attributes
    number: str | None = None  # sysfs's "major:minor" of the node
    node_fault: str | None = None  # why the node cannot be used; None if it is what sysfs says


class Telemetry(NamedTuple):
    """What the firmware of one chip said at one moment. None: not offered, unreadable as such, or all ones."""

    card: str | None = None  # "p150a"
    serial: str | None = None  # the board's, 16 hex digits; the two chips of a p300 share it
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # the bundle's version, "19.4.0.0"
    heartbeat: int | None = None  # changes while the firmware lives; starts again lower after a reset
    temperature: float | None = None  # °C
    temperature_limit: float | None = None  # °C
    trips: int | None = None  # thermal trips (Blackhole)
    hwmon: str | None = None  # the directory of its sensors
    all_ones: bool = False  # the chip answers nothing: every register that can show it reads all ones
    off_bus: bool = False  # nor does its PCI configuration space
    error: tuple[str, int] | None = None  # the attribute whose read failed, and its errno


class Scan(NamedTuple):
    """One look at the class directory."""

    functions: Mapping[str, PciFunction]  # by PCI address, in the order of the addresses
    oddities: tuple[str, ...]  # class devices that are none of ours, in words


@functools.lru_cache(maxsize=256)  # by which every poll sorts
def address(bdf: str) -> tuple[int, ...]:
    """A PCI address as numbers, for sorting: domain, bus, device, function."""
    return tuple(int(part, 16) for part in re.split("[:.]", bdf))


def read_attribute(path: str, flags: int = 0) -> str | None:
    """A sysfs attribute, a page at most, without the newline; None if it is not there. Every OSError has its path."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace").strip()
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


def _read_quick(path: str) -> str | None:
    """An attribute that never blocks (PCI's, `dev`, a module's version). None, too, where it cannot be read."""
    with contextlib.suppress(OSError):
        return read_attribute(path, os.O_NONBLOCK)
    return None


def _link_name(path: str) -> str | None:
    """The last part of where a link leads; None if there is none."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(path))
    return None


def _names(directory: str) -> list[str]:
    """What is in a directory; nothing if there is none."""
    with contextlib.suppress(OSError):
        return os.listdir(directory)
    return []


def _decimal(text: str | None) -> int | None:
    """A number as the kernel writes it; None if it is of no such form."""
    return int(text) if text and re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _count(text: str | None) -> int | None:
    number = _decimal(text)
    return number if number is not None and 0 <= number < ALL_ONES else None


def _celsius(text: str | None) -> float | None:
    millidegrees = _decimal(text)
    return millidegrees / 1000 if millidegrees is not None and 0 < millidegrees < DEAD_TEMPERATURE else None


def _pci_id(path: str) -> int | None:
    text = _read_quick(path) or ""
    return int(text, 16) if re.fullmatch(r"0x[0-9a-f]{1,8}", text) else None


def driver_version(settings: Settings) -> str | None:
    """Version of the loaded driver, such as "2.10.0"; "" if it does not say; None if no driver is loaded."""
    module = f"{settings.sysfs_root}/module/{DRIVER}"
    if os.path.isdir(module) or os.path.isdir(f"{settings.sysfs_root}/class/{DRIVER}"):
        return _read_quick(f"{module}/version") or ""
    return None


def functions_on_bus(settings: Settings) -> list[str]:
    """Addresses of the PCI functions that the driver is for, whether it has them or not."""
    directory = f"{settings.sysfs_root}/bus/pci/devices"
    ours = [bdf for bdf in filter(_BDF.fullmatch, _names(directory)) if _pci_id(f"{directory}/{bdf}/vendor") == VENDOR]
    return sorted((bdf for bdf in ours if _pci_id(f"{directory}/{bdf}/device") in ARCHES), key=address)


def is_for_driver(settings: Settings, bdf: str) -> bool:
    """Whether the driver has a PCI function or can have it: it is not another's, nor kept for another."""
    function = f"{settings.sysfs_root}/bus/pci/devices/{bdf}"
    wanted = _link_name(f"{function}/driver") or _read_quick(f"{function}/driver_override") or DRIVER
    return os.path.isdir(function) and wanted in (DRIVER, "(null)")


def scan(settings: Settings, known: Iterable[PciFunction] = ()) -> Scan:
    """Look for chips; of a known one that is where it was only at its node, for a quarter of the cost. Never blocks."""
    directory = f"{settings.sysfs_root}/class/{DRIVER}"  # which goes with the module
    places = {function.sysfs: function for function in known}
    functions, oddities = [], []
    for name in _names(directory):
        # Not by way of the class: after a renumbering the same name there leads to another chip, but below the PCI
        # function it is gone, and what a late read finds is nothing instead of the other's telemetry.
        sysfs = f"{directory}/{name}"
        with contextlib.suppress(OSError):
            sysfs = os.path.normpath(f"{directory}/{os.readlink(sysfs)}")
        found = places.get(sysfs) or read_function(settings, sysfs)
        if isinstance(found, PciFunction):
            fault = _node_fault(found.path, found.number)
            functions.append(found if found.node_fault == fault else found._replace(node_fault=fault))
        elif found:
            oddities.append(found)
    functions.sort(key=lambda function: address(function.bdf))
    return Scan({function.bdf: function for function in functions}, tuple(sorted(oddities)))


def read_function(settings: Settings, sysfs: str) -> PciFunction | str | None:
    """The PCI function behind a class device, its node unseen; or what is odd; or None if it is going away just now."""
    match, bdf = re.search(rf"/{DRIVER}!(\d{{1,5}})$", sysfs), _link_name(f"{sysfs}/device")
    if not match:
        return f"{sysfs}: not a device of the driver"
    if bdf and not _BDF.fullmatch(bdf):
        return f"{sysfs}: its device {bdf!r} is not a PCI function"
    vendor, device, subsystem = (_pci_id(f"{sysfs}/device/{name}") for name in ("vendor", "device", "subsystem_device"))
    numa_node, number = _count(_read_quick(f"{sysfs}/device/numa_node")), _read_quick(f"{sysfs}/dev")
    # The link goes with the class device: if it is there still, then what could not be read is really not there.
    if vendor is None or device is None or bdf is None or _link_name(f"{sysfs}/device") != bdf:
        return None
    if vendor != VENDOR or device not in ARCHES:
        return f"{bdf}: PCI device {vendor:04x}:{device:04x} is neither Wormhole nor Blackhole"
    ordinal = int(match[1])
    path = f"{settings.dev_root}/{DRIVER}/{ordinal}"
    return PciFunction(bdf, ARCHES[device], CARDS.get(subsystem or 0), numa_node, ordinal, path, sysfs, number)


def _node_fault(path: str, number: str | None) -> str | None:
    """Why `path` is not the character device with sysfs's number ("245:0"), or None if it is."""
    if number is None:
        return f"{path} is going away"
    try:
        status = os.stat(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a character device"
    found = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return None if found == number else f"{path} has the number {found}, sysfs says {number}"


class Process(NamedTuple):
    pid: int
    command: str
    of_pod: bool  # it runs in a pod's container


def processes_on(settings: Settings, ordinal: int) -> list[Process] | None:
    """Who has a node open; None where that cannot be known: a driver before 2.5, or another PID namespace's view."""
    text, proc = _read_quick(f"{settings.proc_root}/driver/{DRIVER}/{ordinal}/pids"), settings.proc_root
    pids = sorted({int(word) for word in (text or "").split() if word.isdecimal()})
    if text is None or 0 in pids:
        return None
    running = ((pid, command) for pid in pids if (command := _read_quick(f"{proc}/{pid}/comm")))  # others have ended
    return [Process(*one, "kubepods" in (_read_quick(f"{proc}/{one[0]}/cgroup") or "")) for one in running]


def node_path(settings: Settings, function: PciFunction) -> str:
    """The path by which a container's runtime shall find the chip's node: udev's link, exactly if it leads there now.

    A kubelet calls Allocate once in a pod's life. When it starts a container again, after a reboot too, it uses the old
    answer: with a node's path in it the container would get whichever chip has that number by then. A runtime resolves
    a link each time that it makes a container (seen with kubelet 1.33 and 1.37, containerd 1.6 and 2.1).
    """
    links = f"{settings.dev_root}/{DRIVER}/by-pci"
    with contextlib.suppress(OSError):
        if os.readlink(f"{links}/{function.bdf}") in (f"../{function.ordinal}", function.path):
            return f"{links}/{function.bdf}"
    return function.path


def _word(form: str, *nothing: str) -> Callable[[str | None], str | None]:
    """A text of the driver's form; nothing: what says nothing, though it is of that form."""
    return lambda text: text if text and text not in nothing and re.fullmatch(form, text) else None


_hex_id = _word(r"[0-9A-F]{16}", "F" * 16, "0" * 16)  # all ones; what a board without an ID reports, so all of them
_ATTRIBUTES: Mapping[str, tuple[str, Callable[[str | None], object]]] = {  # by Telemetry's fields; read in this order
    "heartbeat": ("tt_heartbeat", _decimal),  # all ones, too: then it must not be seen to change
    "card": ("tt_card_type", _word(r"[a-z][a-z0-9-]{0,40}[a-z0-9]", "unknown")), "serial": ("tt_serial", _hex_id),
    "firmware": ("tt_fw_bundle_ver", _word(r"\d{1,5}(\.\d{1,5}){1,4}", "255.255.255.255")),
    "asic_id": ("tt_asic_id", _hex_id), "trips": ("tt_therm_trip_count", _count),
    "temperature": ("temp1_input", _celsius), "temperature_limit": ("temp1_max", _celsius),
}  # fmt: skip
_DEAD = {
    "tt_heartbeat": str(ALL_ONES), "tt_card_type": "unknown", "tt_serial": "F" * 16, "tt_asic_id": "F" * 16,
    "temp1_input": str(DEAD_TEMPERATURE),
}  # fmt: skip


def parse_telemetry(raw: Mapping[str, str]) -> Telemetry:
    """Telemetry from the attributes' texts. What is not of the form that the driver writes counts as not offered."""
    shown = [raw[attribute] == dead for attribute, dead in _DEAD.items() if attribute in raw]
    if len(shown) > 1 and all(shown):
        return Telemetry(all_ones=True)
    told: dict[str, Any] = {key: parse(raw.get(attribute)) for key, (attribute, parse) in _ATTRIBUTES.items()}
    return Telemetry(**told)


def read_telemetry(function: PciFunction, last: Telemetry | None = None) -> Telemetry:
    """Ask a chip's firmware, through the driver. Never raises, but can block for ten seconds and more: not on the loop.

    If its heartbeat has simply gone on since it said `last`, it is the same firmware of the same chip, and only the
    sensors are read anew. A chip that has left the bus gives no error: every value is there, and is all ones.
    """
    try:
        return (last and _as_before(function, last)) or _read_everything(function)
    except OSError as error:
        return Telemetry(error=(os.path.basename(error.filename or function.sysfs), error.errno or 0))


def _as_before(function: PciFunction, last: Telemetry) -> Telemetry | None:
    """What the chip says, if its heartbeat has gone on since it said `last`, else None; raises OSError."""
    if last.heartbeat is None or not last.hwmon:
        return None
    heartbeat = _decimal(read_attribute(f"{function.sysfs}/tt_heartbeat"))
    if heartbeat is None or not last.heartbeat < heartbeat < ALL_ONES:
        return None
    temperature = _celsius(read_attribute(f"{last.hwmon}/temp1_input"))
    trips = None if last.trips is None else _count(read_attribute(f"{function.sysfs}/tt_therm_trip_count"))
    if (temperature is None) != (last.temperature is None) or (trips is None) != (last.trips is None):
        return None
    return last._replace(heartbeat=heartbeat, temperature=temperature, trips=trips)


def _read_everything(function: PciFunction) -> Telemetry:
    """Raises OSError."""
    hwmon = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):  # its number has nothing to tell
        directory = f"{function.sysfs}/device/hwmon"
        hwmon = f"{directory}/{min(os.listdir(directory))}"
    raw: dict[str, str] = {}
    for attribute, _ in _ATTRIBUTES.values():
        place = function.sysfs if attribute.startswith("tt_") else hwmon
        if place and (text := read_attribute(f"{place}/{attribute}")) is not None:
            raw[attribute] = text
    if raw:
        return parse_telemetry(raw)._replace(hwmon=hwmon)
    if not os.path.isdir(function.sysfs):
        return Telemetry(error=(os.path.basename(function.sysfs), errno.ENODEV))
    # Firmware that is late offers nothing, and so does a chip that was dead when the driver bound to it: vendor and
    # device, with which its PCI configuration space begins, read all ones.
    with contextlib.suppress(OSError), open(f"{function.sysfs}/device/config", "rb", buffering=0) as config:
        if config.read(4) == b"\xff" * 4:
            return Telemetry(all_ones=True, off_bus=True)
    return Telemetry()


# ==== HEALTH: per chip, with a reason in words. Pure: a verdict follows from the last verdict and one look ============

BLOCKED = "telemetry read does not return; the driver may be waiting for a reset"
HYSTERESIS = 5.0  # °C below the limit at which a hot chip counts as cool again
READ_DEADLINE = 2.0  # seconds after which a read of telemetry counts as one that does not return

# The kinds of reasons for which a chip is unhealthy; a change from one to another is worth a log line.
Fault = enum.Enum("Fault", "GONE NODE BLOCKED RESETTING READ_ERROR NO_RESPONSE STALLED HOT TRIPPED")


class Health(NamedTuple):
    """A chip's state and, from `heartbeat` on, what the rules have to remember from one look to the next."""

    fault: Fault | None = None
    reason: str | None = None  # in words, with the remedy where there is one; None while healthy
    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change of it
    hot: bool = False
    trips: int | None = None  # the last count seen
    tripped_at: float | None = None  # when it rose last, in seconds of the caller's clock


def unhealthy(health: Health, fault: Fault, reason: str) -> Health:
    return health._replace(fault=fault, reason=reason)


def gone(health: Health, bdf: str, *, function_exists: bool) -> Health:
    """The class device is no longer there."""
    if function_exists:
        return unhealthy(health, Fault.GONE, f"driver is not bound; echo {bdf} > /sys/bus/pci/drivers/tenstorrent/bind")
    return unhealthy(health, Fault.GONE, "PCI device is gone; it counts again when it comes back")


def judge(
    health: Health, function: PciFunction, telemetry: Telemetry, settings: HealthSettings, now: float, *, periodic: bool
) -> Health:
    """The verdict after one look. periodic: a poll, which can prove that a heartbeat has stopped; an event's cannot."""
    if function.node_fault:
        return unhealthy(health, Fault.NODE, f"device node is wrong: {function.node_fault}")
    if telemetry.error:
        attribute, number = telemetry.error
        if number == errno.ENODATA:
            # Seen on Blackhole when the firmware was not ready at POST_RESET: it stays so for good, though it runs.
            advice = "; if it stays so, unbind and bind the driver" if function.arch == "blackhole" else ""
            return unhealthy(health, Fault.RESETTING, f"resetting (no telemetry){advice}")
        if number == errno.ENODEV:
            return unhealthy(health, Fault.GONE, "PCI device is going away")
        return unhealthy(health, Fault.READ_ERROR, f"telemetry cannot be read: {attribute}: {os.strerror(number)}")
    if telemetry.all_ones:
        what = "its PCI configuration space reads" if telemetry.off_bus else "all registers read"
        return unhealthy(health, Fault.NO_RESPONSE, f"chip does not respond ({what} as ones); reset it: tt-smi -r")

    # Any change is life: the count starts again from below after a reset. What an event's look finds is life too, but
    # not what the next poll compares with: that may follow sooner than a heartbeat.
    beats = telemetry.heartbeat is None or telemetry.heartbeat != health.heartbeat
    misses = 0 if beats else health.misses + periodic
    heartbeat = telemetry.heartbeat if periodic or health.heartbeat is None else health.heartbeat
    limit = settings.temperature_limit or telemetry.temperature_limit or math.inf
    degrees = telemetry.temperature or -math.inf
    hot = degrees >= limit or (health.hot and degrees > limit - HYSTERESIS)
    trips = health.trips if telemetry.trips is None else telemetry.trips
    rose = trips is not None and health.trips is not None and trips > health.trips
    tripped_at = now if rose else health.tripped_at
    health = Health(None, None, heartbeat, misses, hot, trips, tripped_at)
    if misses >= settings.heartbeat_misses:
        reason = f"heartbeat stalled at {telemetry.heartbeat}; the firmware has stopped, reset it: tt-smi -r"
        return unhealthy(health, Fault.STALLED, reason)
    if hot:
        return unhealthy(health, Fault.HOT, f"too hot: {degrees:.1f} °C, limit {limit:g} °C; check its cooling")
    if tripped_at is not None and now - tripped_at < settings.trip_holdoff:
        reason = f"thermal trip ({trips} so far); it counts again after {settings.trip_holdoff:g} s without one"
        return unhealthy(health, Fault.TRIPPED, reason)
    return health


# ==== RESOURCES: which devices there are, what they are called, and where they sit. Pure ==============================

IDENTITY = ("card", "serial", "asic_id", "firmware")  # what the firmware says of itself
ASKING = "the kubelet is being asked who holds it"
Holders = Mapping[str, Sequence["Holder"]]  # of chips, by PCI address


class Chip(NamedTuple):
    """A chip once seen: it stays, and stays known, while it is away."""

    function: PciFunction  # as last seen
    present: bool = True
    card: str | None = None  # what the firmware has said of itself, once: never unlearnt for silence or garbage
    serial: str | None = None
    asic_id: str | None = None
    firmware: str | None = None
    listed: bool = False  # a new one is announced when it has spoken, or has had the time to
    health: Health = Health()
    telemetry: Telemetry | None = None  # the last; None: everything has to be asked for

    @property
    def shown(self) -> tuple[object, ...]:
        """What others learn of it: no figures, and nothing that only the rules remember."""
        return (*self[: self._fields.index("health")], self.health.fault, self.health.reason)

    @property
    def bdf(self) -> str:
        return self.function.bdf

    @property
    def card_type(self) -> str | None:
        """The exact card type, "p150a"; by PCI until the firmware tells; None if neither does."""
        return self.card or self.function.pci_card

    @property
    def board_type(self) -> str:
        """The card type without its trailing letter, "p150"; the architecture if the card type is not known."""
        return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", self.card_type or self.function.arch)

    @property
    def board_chips(self) -> int:
        """How many chips with a node the whole board has; of a Galaxy, its tray."""
        return 8 if self._galaxy_tray else 2 if self.board_type == "p300" else 1

    @property
    def board(self) -> tuple[object, ...]:
        """Key of the board: its chips share a serial, one without it is a board of its own; none exceeds a tray."""
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


def with_identity(chip: Chip, telemetry: Telemetry, **more: Any) -> Chip:
    """The chip after it was read: what the firmware says now counts, what it leaves out stays known. more: as well."""
    known = {key: getattr(telemetry, key) or getattr(chip, key) for key in IDENTITY}
    return chip._replace(telemetry=telemetry, **known, **more)


class Holder(NamedTuple):
    """A container that was given a device, under the name and ID that it had then."""

    resource: str
    identifier: str
    pod: str  # "namespace/name"
    container: str = ""

    def place(self) -> dict[str, str]:
        namespace, _, pod = self.pod.rpartition("/")
        return {"namespace": namespace, "pod": pod, "container": self.container}


class Device(NamedTuple):
    """What the kubelet knows under one ID or, where it is shared, under several: a chip, or a board with its chips."""

    identifier: str
    chips: tuple[Chip, ...]  # in the order of PCI addresses
    whole: int = 1  # how many chips it has when all are there
    held: str | None = None  # by whom under another name or ID, in words: two pods would have it

    @property
    def reason(self) -> str | None:
        """Why it is not healthy, in words; None if it is."""
        if ill := next((chip for chip in self.chips if chip.health.fault), None):
            return f"{ill.bdf}: {ill.health.reason}" if self.whole > 1 else ill.health.reason
        if len(self.chips) != self.whole:
            return f"{len(self.chips)} of {self.whole} chips"
        return self.held

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """Every NUMA node that it touches, as far as they are known."""
        return tuple(sorted({node for chip in self.chips if (node := chip.function.numa_node) is not None}))


class Resource(NamedTuple):
    """What the kubelet knows as one extended resource."""

    name: str  # "tenstorrent.com/n300"
    devices: Mapping[str, Device]  # by ID, in the order of PCI addresses; a shared one by each ID that it has
    replicas: int = 0  # how many containers a device is for; 0: it is not shared
    one_each: bool = False  # a container gets one replica at most
    unshared: str = ""  # its name without the domain, as it would be if it were not shared

    @property
    def distinct(self) -> list[Device]:
        """Each of the devices once."""
        return list({device.identifier: device for device in self.devices.values()}.values())

    @property
    def healthy(self) -> int:
        return sum(device.reason is None for device in self.distinct)


def replica_ids(identifier: str, replicas: int) -> list[str]:
    """The IDs under which the kubelet has a device."""
    return [f"{identifier}::{number}" for number in range(replicas)] or [identifier]


def device_ids(chips: Collection[Chip], strategy: DeviceIdStrategy) -> dict[str, Chip]:
    """Chips by ID, each once. Present ones win: a freed ordinal is reused at once, a card can move to another slot."""
    wanted = {
        chip.bdf: {"bdf": chip.bdf, "asic": asic_name(chip) or chip.bdf, "index": str(chip.function.ordinal)}[strategy]
        for chip in chips
    }
    present = collections.Counter(wanted[chip.bdf] for chip in chips if chip.present)
    ids: dict[str, Chip] = {}
    for chip in sorted(chips, key=lambda chip: (not chip.present, address(chip.bdf))):
        contested = chip.present and present[wanted[chip.bdf]] > 1  # two of one ASIC ID: both get their address
        ids.setdefault(chip.bdf if contested else wanted[chip.bdf], chip)
    return ids


def asic_name(chip: Chip) -> str | None:
    """As udev's by-id links have it."""
    return f"{chip.function.arch}-{chip.asic_id}" if chip.asic_id else None


def board_name(chip: Chip) -> str | None:
    """ID of a board, which no chip changes: a p300's serial, a Galaxy tray's buses ("0000:c0"); None: not known yet."""
    return chip.bdf[: chip.bdf.rindex(":") - 1] + "0" if chip.board_chips == 8 else chip.serial


def resource_name(chip: Chip, settings: Settings) -> str:
    """Without the domain."""
    names = {"board": chip.board_type, "card": chip.card_type or chip.function.arch, "arch": chip.function.arch}
    return names[settings.resource_naming] + ("-board" if settings.unit == "board" and chip.board_chips > 1 else "")


def devices_by_name(chips: Collection[Chip], settings: Settings) -> dict[str, list[Device]]:
    """Devices by their resource's name, unshared, in the order of addresses. A p300's chip without a serial waits."""
    alone, boards = list[Chip](), collections.defaultdict[tuple[str, str], list[Chip]](list)
    for chip in sorted(chips, key=lambda chip: address(chip.bdf)):
        if settings.unit == "chip" or chip.board_chips == 1:
            alone.append(chip)
        elif board := board_name(chip):
            boards[resource_name(chip, settings), board].append(chip)
    devices = collections.defaultdict[str, list[Device]](list)
    for identifier, chip in device_ids(alone, settings.device_id_strategy).items():
        devices[resource_name(chip, settings)].append(Device(identifier, (chip,)))
    for (name, board), members in boards.items():
        # A card that was put into another slot has left its chips at the old addresses, too.
        here = [chip for chip in members if chip.present] if len(members) > members[0].board_chips else members
        devices[name].append(Device(board, tuple(here), members[0].board_chips))
    return {name: sorted(devices[name], key=lambda device: address(device.chips[0].bdf)) for name in sorted(devices)}


def resources(
    chips: Collection[Chip], settings: Settings, holders: Holders, asking: Collection[str] = ()
) -> dict[str, Resource]:
    """Every resource that has a device, by name. asking: PCI addresses of which nobody knows yet who holds them."""
    found: dict[str, Resource] = {}

    def offer(short: str, unshared: str, devices: Sequence[Device], replicas: int) -> None:
        name, listed = f"{settings.resource_domain}/{short}", dict[str, Device]()
        for device in devices:
            ids = replica_ids(device.identifier, replicas)
            holding = itertools.chain.from_iterable(holders.get(chip.bdf, ()) for chip in device.chips)
            if other := next((h for h in holding if h.resource != name or h.identifier not in ids), None):
                place = f"{other.resource} {other.identifier}"
                device = device._replace(held=f"held by {other.pod} as {place}, until that ends")
            elif any(chip.bdf in asking for chip in device.chips):
                device = device._replace(held=ASKING)
            listed |= dict.fromkeys(ids, device)
        one_each = replicas > 0 and settings.sharing.fail_requests_greater_than_one
        found[name] = Resource(name, listed, replicas, one_each, unshared)

    for unshared, rest in devices_by_name(chips, settings).items():
        for entry in settings.sharing.resources:
            if entry.name == unshared and (selected := selection(entry, rest)):
                rest = [device for device in rest if device not in selected]
                offer(settings.sharing.shared_name(entry), unshared, selected, entry.replicas)
        if rest:
            offer(unshared, unshared, rest, 0)
    return found


def selection(entry: SharedResource, devices: Sequence[Device]) -> Sequence[Device]:
    """Those of the devices that the entry selects."""
    if isinstance(entry.devices, int):
        return devices[: entry.devices]
    return [device for device in devices if entry.devices == "all" or called(device) & set(entry.devices)]


def called(device: Device) -> set[str]:
    """Everything that the configuration can call a device: its ID, and its chips' PCI addresses, ASICs and ordinals."""
    names = {device.identifier}
    for chip in device.chips:
        names |= {chip.bdf, asic_name(chip) or chip.bdf, str(chip.function.ordinal) if chip.present else chip.bdf}
    return names


# ==== PREFERRED ALLOCATION: neighbours, and whole boards left for those who need them. Pure ===========================

Code = grpc.StatusCode


class Refusal(Exception):
    """A request of the kubelet's that has no answer, for gRPC and in words."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code


# What choices are compared by, the weightiest first. Each is a digit of one number, the cost; so costs of disjoint sets
# add up, and the cheapest set of each size follows from the cheapest ones of its parts.
COUNTS = (
    "musts",  # minus those that have to be chosen
    "again",  # how often a shared device was chosen before
    "users",  # that the devices have already
    "boards", "trays", "numa_nodes",
    "whole_boards", "whole_trays", "whole_numa_nodes",  # of these, those whose listed devices are all available
)  # fmt: skip
_SHIFTS = {name: 32 * number for number, name in enumerate(reversed(COUNTS))}
BySize = list[int]  # the least cost of choosing no device of a group, one, two, and so on


def cost(**counts: int) -> int:
    return sum(count << _SHIFTS[name] for name, count in counts.items())


class Place(NamedTuple):
    """An ID in the search."""

    cost: int  # of its own; least of all counts the address: below the digits, minus a bit, of the lowest the highest
    board: object
    tray: object
    numa_nodes: frozenset[int | None]  # {None}: unknown, which is a group of its own


def preferred_allocation(resource: Resource, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
    """The `size` best of the available IDs: distinct devices first, then unused ones, then neighbours; or Refusal."""
    free, musts = frozenset(available), frozenset(must)
    if unknown := sorted((free | musts) - resource.devices.keys()):
        raise Refusal(Code.INVALID_ARGUMENT, f"{resource.name} has no device {_few(unknown)}")
    if size < 0:
        raise Refusal(Code.INVALID_ARGUMENT, f"allocation size {size} is negative")
    if missing := sorted(musts - free):
        raise Refusal(Code.INVALID_ARGUMENT, f"must-include device {_few(missing)} is not available")
    if not len(musts) <= size <= len(free):
        reason = f"cannot choose {size} of {len(free)} available devices, {len(musts)} of them a must"
        raise Refusal(Code.INVALID_ARGUMENT, reason)

    bits = {identifier: 1 << number for number, identifier in enumerate(reversed([*resource.devices]))}
    places, broken = list[Place](), set[object]()
    for device in resource.distinct:
        chip, nodes = device.chips[0], frozenset(device.numa_nodes or (None,))
        ids = replica_ids(device.identifier, resource.replicas)
        left = sorted((i for i in ids if i in free), key=lambda identifier: identifier not in musts)
        if not left:
            broken |= {chip.board, chip.tray, *nodes}
        for again, identifier in enumerate(left[:size]):  # of a hundred replicas no more than that can matter
            own = cost(musts=-(identifier in musts), again=again, users=len(ids) - len(left)) << len(bits)
            places.append(Place(own - bits[identifier], chip.board, chip.tray, nodes))
    least = _Search(broken, size, len(bits)).host(places)[size]
    return [identifier for identifier in resource.devices if bits[identifier] & -least]


class _Search(NamedTuple):
    """The least cost of each size up to the one that is wanted, from the board up."""

    broken: Collection[object]  # boards, trays and NUMA nodes of which some device is taken
    size: int
    bits: int  # below the digits of a cost

    def host(self, places: Collection[Place]) -> BySize:
        """NUMA nodes stand for themselves where nothing connects them: neither a tray nor a device."""
        parts: list[frozenset[int | None]] = []
        for tray in _grouped(places, "tray"):
            nodes = frozenset[int | None]().union(*(place.numa_nodes for place in tray))
            connected = nodes.union(*(part for part in parts if part & nodes))
            parts = [part for part in parts if not part & nodes] + [connected]
        return self._joined(self._numa_nodes(part, [p for p in places if p.numa_nodes & part]) for part in parts)

    def _numa_nodes(self, touched: Collection[int | None], places: Sequence[Place]) -> BySize:
        """Every choice of nodes is tried, of one in most machines: leaving one out is the only way not to touch it."""
        best: BySize = []
        choices = (itertools.combinations(touched, count) for count in range(len(touched), -1, -1))
        for chosen in itertools.chain.from_iterable(choices):
            inside = [place for place in places if place.numa_nodes.issubset(chosen)]
            fee = cost(numa_nodes=len(chosen), whole_numa_nodes=sum(node not in self.broken for node in chosen))
            costs = self._joined(map(self._tray, _grouped(inside, "tray")), fee)
            best = [*map(min, best, costs), *best[len(costs) :]] if best else costs  # all of them come first
        return best

    def _tray(self, places: Sequence[Place]) -> BySize:
        fee = cost(trays=1, whole_trays=places[0].tray not in self.broken)
        return self._joined(map(self._board, _grouped(places, "board")), fee)

    def _board(self, places: Sequence[Place]) -> BySize:
        """Within a board devices differ by what each costs of its own."""
        costs = itertools.accumulate(sorted(place.cost for place in places), initial=0)
        return self._joined([[*costs]], cost(boards=1, whole_boards=places[0].board not in self.broken))

    def _joined(self, parts: Iterable[BySize], fee: int = 0) -> BySize:
        """The least cost of every size, spread over the parts in the best way. fee: for any device at all."""
        total, *others = [*parts] or [[0]]
        for part in others:
            sizes = range(min(len(total) + len(part) - 1, self.size + 1))
            splits = (range(max(0, size - len(total) + 1), min(size + 1, len(part))) for size in sizes)
            total = [min(part[n] + total[size - n] for n in split) for size, split in zip(sizes, splits, strict=True)]
        return total[:1] + [each + (fee << self.bits) for each in total[1 : self.size + 1]]


def _grouped(places: Iterable[Place], key: Literal["board", "tray"]) -> list[list[Place]]:
    groups = collections.defaultdict[object, list[Place]](list)
    for place in places:
        groups[getattr(place, key)].append(place)
    return list(groups.values())


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _few(names: Sequence[str]) -> str:
    """Names for one line of an error: a request can hold ten thousand, and longer ones than Kubernetes takes."""
    shown = ", ".join(repr(name[:63]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# ==== CONTAINER EDITS: exactly what a container needs to use its devices. Pure ========================================


def lock_directory(sharing: Sharing, resource: Resource) -> str | None:
    """What containers on shared devices get as their /dev/shm: tt-umd's locks are there, by which users take turns."""
    if not resource.replicas or not sharing.lock_dir:
        return None
    joined = sharing.lock_dir == "/dev/shm"  # with the host's own processes
    return sharing.lock_dir if joined else f"{sharing.lock_dir}/{resource.name.partition('/')[2]}"


def container_edits(
    devices: Iterable[Device], settings: Settings, mounts: tuple[Mount, ...], locks: str | None,
    host_path: Callable[[PciFunction], str],
) -> pb.ContainerAllocateResponse:  # fmt: skip
    """What a runtime adds to a container. mounts: which exist; locks: its /dev/shm; host_path: where to find a node."""
    by_address = {address(chip.bdf): chip for device in devices for chip in device.chips}
    chips, by_cdi = [by_address[key] for key in sorted(by_address)], settings.device_list_strategy == "cdi"
    addresses, style = [chip.bdf for chip in chips], settings.visible_devices
    edits = pb.ContainerAllocateResponse(envs={"TT_DEVICE_PLUGIN_DEVICES": ",".join(addresses)})
    if style != "none":
        # tt-umd reads it inside the container. An integer there is an index into the devices which *the container*
        # sees, so a host's ordinal would be wrong; a token with a colon is a PCI address.
        edits.envs["TT_VISIBLE_DEVICES"] = ",".join(addresses if style == "bdf" else map(str, range(len(chips))))
    for chip in chips:
        if by_cdi:
            edits.cdi_devices.add(name=f"{settings.resource_domain}/device={chip.bdf}")
        else:  # under the host's number: tt-umd names its files and locks after it
            node = f"/dev/tenstorrent/{chip.function.ordinal}"
            edits.devices.add(container_path=node, host_path=host_path(chip.function), permissions="rw")
    for mount in (*(() if by_cdi else mounts), *([Mount(locks, "/dev/shm")] if locks else ())):
        edits.mounts.add(container_path=mount.container, host_path=mount.host, read_only=mount.read_only)
    return edits


# ==== WHAT OTHERS READ: CDI for runtimes, labels for node-feature-discovery, metrics for Prometheus. Pure =============

CDI_FILE = "tenstorrent.com-device.json"
LABELS_FILE = "tt-device-plugin"
Labels = Mapping[str, object]
Family = tuple[str, str, str, Iterable[tuple[Labels, float]]]  # name, type, help text; labels and value of each sample


def cdi_spec(functions: Iterable[PciFunction], settings: Settings, mounts: Iterable[Mount]) -> str | None:
    """A CDI file with each of these chips by its PCI address, and `all`; None without any: CDI knows no empty file."""
    nodes = {  # by their own paths: a runtime refuses a link there
        f.bdf: [{"path": f"/dev/tenstorrent/{f.ordinal}", "hostPath": f.path, "permissions": "rw"}] for f in functions
    }
    if not nodes:
        return None
    nodes["all"] = list(itertools.chain.from_iterable(nodes.values()))
    devices = [{"name": name, "containerEdits": {"deviceNodes": some}} for name, some in nodes.items()]
    options = {False: ["rbind", "rw"], True: ["rbind", "ro"]}
    shared = [{"hostPath": m.host, "containerPath": m.container, "options": options[m.read_only]} for m in mounts]
    spec = {"cdiVersion": "0.5.0", "kind": f"{settings.resource_domain}/device", "devices": devices}
    return json.dumps(spec | ({"containerEdits": {"mounts": shared}} if shared else {}), indent=1)


def feature_file(resources: Iterable[Resource], chips: Collection[Chip], settings: Settings, driver: str | None) -> str:
    """Labels for node-feature-discovery's local source. Counts are of devices that exist, healthy or not."""
    labels = {f"arch.{chip.function.arch}": "true" for chip in chips if chip.present}
    for resource in resources:
        there = [device for device in resource.distinct if any(chip.present for chip in device.chips)]
        boards = {chip.board_type for device in there for chip in device.chips}
        name = resource.name.partition("/")[2]
        product = boards.pop() if len(boards) == 1 else "mixed"
        labels |= {
            f"{name}.count": str(len(there)),
            f"{name}.product": f"{product}-SHARED" if resource.replicas and name == resource.unshared else product,
            f"{name}.replicas": str(resource.replicas or 1),
            f"{name}.sharing": str(resource.replicas > 0).lower(),
        }
    labels |= zip(("driver.major", "driver.minor"), re.findall(r"\d+", driver or ""), strict=False)
    firmware = {chip.firmware for chip in chips if chip.present and chip.firmware}
    labels["firmware.version"] = "mixed" if len(firmware) > 1 else "".join(firmware)
    labels |= {"driver.version": driver or "", "plugin.version": __version__}
    # Kubernetes takes 63 characters for a label's name, and as many for its value, which is alphanumeric at both ends.
    values = {key: re.sub(r"[^A-Za-z0-9._-]+", "_", labels[key])[:63].strip("._-") for key in sorted(labels)}
    domain = settings.resource_domain
    return "".join(f"{domain}/{key}={value}\n" for key, value in values.items() if value and len(key) <= 63)


def exposition(families: Iterable[Family]) -> str:
    """Prometheus' text format; what has no sample is left out, a label that is None is empty."""
    lines: list[str] = []
    for name, kind, text, samples in families:
        told = [(",".join([_label(*label) for label in labels.items()]), value) for labels, value in samples]
        if shown := [f"{name}{{{label}}} {value:.15g}" if label else f"{name} {value:.15g}" for label, value in told]:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *shown]
    return "".join(f"{line}\n" for line in lines)


@functools.lru_cache(maxsize=2048, typed=True)  # the same ones every few seconds
def _label(key: str, value: object) -> str:
    text = ("" if value is None else str(value)).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{text}"'


def chip_metrics(chips: Iterable[Chip], resource_of: Mapping[str, Resource], holders: Holders) -> list[Family]:
    """What is known of each chip; `device` is its PCI address."""
    told = [({"device": chip.bdf}, chip, chip.telemetry or Telemetry()) for chip in chips]
    return [
        ("tt_device_info", "gauge", "A chip, and what it is.",
         [({**labels, "board": chip.board_type, "card": chip.card_type, "arch": chip.function.arch,
            "serial": chip.serial, "firmware": chip.firmware, "numa_node": chip.function.numa_node,
            "resource": r.name if (r := resource_of.get(chip.bdf)) else None}, 1) for labels, chip, _ in told]),
        ("tt_device_healthy", "gauge", "Whether nothing is wrong with a chip.",
         [(labels, chip.health.fault is None) for labels, chip, _ in told]),
        ("tt_device_fault", "gauge", "What is wrong with a chip, while it is.",
         [({**labels, "kind": chip.health.fault.name.lower()}, 1) for labels, chip, _ in told if chip.health.fault]),
        ("tt_device_temperature_celsius", "gauge", "The chip's temperature at the last poll.",
         [(labels, t.temperature) for labels, chip, t in told if chip.present and t.temperature is not None]),
        ("tt_device_temperature_limit_celsius", "gauge", "The limit that the card itself names.",
         [(labels, t.temperature_limit) for labels, _, t in told if t.temperature_limit is not None]),
        ("tt_device_thermal_trips_total", "counter", "Thermal trips that the firmware has counted.",
         [(labels, t.trips) for labels, _, t in told if t.trips is not None]),
        ("tt_device_allocated", "gauge", "A container that was given the chip.",
         [({**labels, **one.place()}, 1) for labels, chip, _ in told for one in holders.get(chip.bdf, ())]),
    ]  # fmt: skip


def plugin_metrics(
    listed: Sequence[tuple[Resource, bool, int]], allocations: Mapping[tuple[str, str], int], started: float
) -> list[Family]:
    """Of the resources, with whether they are registered and how often they were; of the daemon. started: Unix time."""
    counts = {r.name: {"healthy": r.healthy, "unhealthy": len(r.distinct) - r.healthy} for r, *_ in listed}
    return [
        ("tt_resource_devices", "gauge", "Devices of a resource, as the kubelet knows them.",
         [({"resource": name, "health": health}, counts[name][health]) for name in counts for health in counts[name]]),
        ("tt_kubelet_registered", "gauge", "Whether the kubelet has a resource.",
         [({"resource": resource.name}, registered) for resource, registered, _ in listed]),
        ("tt_kubelet_registrations_total", "counter", "Registrations with the kubelet that succeeded.",
         [({"resource": resource.name}, count) for resource, _, count in listed]),
        ("tt_allocations_total", "counter", "The kubelet's requests for devices, by what came of them.",
         [({"resource": name, "result": result}, count) for (name, result), count in allocations.items()]),
        ("tt_plugin_info", "gauge", "The version that runs.", [({"version": __version__}, 1)]),
        ("tt_plugin_start_time_seconds", "gauge", "When it was started, in Unix time.", [({}, started)]),
    ]  # fmt: skip


# ==== DEVICE PLUGIN SERVICE: what the kubelet calls ===================================================================

PLUGIN_OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True)
Context = grpc.aio.ServicerContext[Any, Any]
ContainerResponses = list[pb.ContainerAllocateResponse]
# Answers for a resource's IDs, per container, or raises Refusal.
Allocator = Callable[["DevicePlugin", Sequence[Sequence[str]]], Coroutine[Any, Any, ContainerResponses]]


def device_list(resource: Resource) -> pb.ListAndWatchResponse:
    """The resource's devices by ID, as the kubelet wants them: no topology at all where no NUMA node is known."""
    response = pb.ListAndWatchResponse()
    for identifier, device in sorted(resource.devices.items()):  # in an order that is no news when numbers are swapped
        listed = response.devices.add(ID=identifier, health="Unhealthy" if device.reason else "Healthy")
        if device.numa_nodes:
            listed.topology.nodes.extend(pb.NUMANode(ID=node) for node in device.numa_nodes)
    return response


def check_allocation(resource: Resource, containers: Sequence[Sequence[str]]) -> None:
    """Raises Refusal if these IDs, per container, cannot be allocated as things stand."""
    wanted = list(itertools.chain.from_iterable(containers))
    if not containers or not all(containers):
        raise Refusal(Code.INVALID_ARGUMENT, "a container without devices" if containers else "no container")
    if unknown := [identifier for identifier in wanted if identifier not in resource.devices]:
        raise Refusal(Code.NOT_FOUND, f"{resource.name} has no device {_few(unknown)}")
    if len(wanted) != len({*wanted}):
        twice = [identifier for identifier, count in collections.Counter(wanted).items() if count > 1]
        raise Refusal(Code.INVALID_ARGUMENT, f"device {_few(twice)} is asked for more than once")
    if resource.one_each and (most := max(map(len, containers))) > 1:
        reason = f"{most} of {resource.name} for one container: each is a share of a device, two are no more of it"
        raise Refusal(Code.INVALID_ARGUMENT, f"{reason} (fail_requests_greater_than_one)")
    for identifier in wanted:
        if fault := resource.devices[identifier].reason:
            raise Refusal(Code.FAILED_PRECONDITION, f"device {identifier} is unhealthy: {fault}")


class Watch:
    """A ListAndWatch stream that is awaited; its futures are to be awaited by wait() only, which cancels nothing."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.opened, self.ended = loop.create_future(), loop.create_future()


class DevicePlugin(rpc.DevicePluginServicer):
    """One resource, as the kubelet sees it. The daemon publishes, the kubelet watches and allocates."""

    def __init__(self, resource: Resource, allocate: Allocator) -> None:
        self.resource = resource
        self._allocate = allocate
        self._list = device_list(resource)
        self._stirred = asyncio.Event()  # the streams have something to do; then they wait for the next such event
        self._awaited: Watch | None = None
        self._ending = False

    def publish(self, resource: Resource) -> None:
        """Take over a new state; open streams hear of it if the list is another one."""
        self.resource = resource
        devices = device_list(resource)
        if devices != self._list:
            self._list = devices
            self._stirred.set()
            self._stirred = asyncio.Event()

    def await_watch(self) -> Watch:
        """The next stream to be opened: after a Register it is the kubelet's. Others, whoever opens them, are not."""
        self._awaited = Watch()
        return self._awaited

    def end_streams(self) -> None:
        """For good: a server without calls stops at once."""
        self._ending = True
        self._stirred.set()

    async def GetDevicePluginOptions(self, request: pb.Empty, context: Context) -> pb.DevicePluginOptions:
        return PLUGIN_OPTIONS

    async def ListAndWatch(self, request: pb.Empty, context: Context) -> AsyncIterator[pb.ListAndWatchResponse]:
        watch, self._awaited, sent = self._awaited or Watch(), None, None
        watch.opened.set_result(None)
        try:
            while not self._ending:
                if self._list != sent:
                    sent = self._list
                    yield sent
                else:
                    await self._stirred.wait()
        finally:
            watch.ended.set_result(None)

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Context
    ) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        for asked in request.container_requests:
            available, must = asked.available_deviceIDs, asked.must_include_deviceIDs
            try:
                chosen = preferred_allocation(self.resource, available, must, asked.allocation_size)
            except Refusal as refusal:
                await context.abort(refusal.code, str(refusal))
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        containers = [list(container.devices_ids) for container in request.container_requests]
        try:
            response = pb.AllocateResponse(container_responses=await self._allocate(self, containers))
        except Refusal as refusal:
            log.warning("%s: refused an allocation: %s", self.resource.name, refusal)
            await context.abort(refusal.code, str(refusal))
        log.debug("%s: allocated %s", self.resource.name, containers)
        return response

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: Context
    ) -> pb.PreStartContainerResponse:
        return pb.PreStartContainerResponse()  # nothing to do, and the options do not ask for the call


# ==== KUBELET SESSION: a socket for each resource, and its registration, for as long as both of us live ===============

KUBELET_SOCKET = "kubelet.sock"
SOCKET_PREFIX = "tt-"
DROP_IN = "/usr/share/doc/tt-device-plugin/examples/kubelet-dir.conf"  # lets the unit write to another directory
REGISTERED = "registered with kubelet"
REGISTER_TIMEOUT = 10.0  # seconds
BACKOFF = (0.1, 5.0)  # seconds: the first pause and the longest
CHANNEL_OPTIONS = (
    # Subchannels are shared between channels by default, and with them the back-off from a dead kubelet's socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),  # the kubelet's own limit for its list of pods
)
SocketIdentity = tuple[int, int, int]
_bindings = itertools.count(1)


class RegistrationError(Exception):
    """The kubelet cannot be reached, refuses, or has dropped us; in words."""


class KubeletSession:
    """Serves one resource on a socket in the device plugin directory and keeps it registered.

    An attempt (bind, register, stay until the kubelet is lost) runs as a task. What happens in the directory ends the
    attempt and starts the next at once; without any event, attempts that fail come again after a growing pause.
    """

    def __init__(self, plugin: DevicePlugin, directory: str, changed: Callable[[], None]) -> None:
        """changed: called when `state` has become another."""
        self.plugin = plugin
        self.name = plugin.resource.name
        self.state = "starting"
        self.registrations = 0  # that succeeded
        self.tried_to_serve = asyncio.Event()  # or was closed before it could
        self._directory = directory
        self._changed = changed
        self._server: grpc.aio.Server | None = None
        self._socket = ""  # its path
        self._bound: SocketIdentity | None = None  # its file
        self._watch: Watch | None = None  # the kubelet's stream; None as long as it has not been told of the socket
        self._kubelet_socket = f"{directory}/{KUBELET_SOCKET}"
        self._kubelet: SocketIdentity | None = None  # as it was when the attempt began
        self._pausing = False
        self._disturbed = False  # something foreign happened in the directory during the attempt
        self._ending: set[asyncio.Task[None]] = set()  # former attempts and servers, for the moment that it takes them
        self._task = asyncio.create_task(self._attempts())  # the present one, and what comes after it without events

    def check_sockets(self, *, kubelet_is_new: bool, disturbed: bool) -> None:
        """Start anew if what may have happened in the directory concerns us.

        kubelet_is_new: even if it looks like the last one. disturbed: by something that ends a pause, but no attempt.
        """
        moved = socket_identity(self._kubelet_socket) != self._kubelet
        removed = self._bound is not None and socket_identity(self._socket) != self._bound
        if kubelet_is_new or moved or removed or (disturbed and self._pausing):
            self._task.cancel()
            self._end(self._task)
            self._task = asyncio.create_task(self._attempts())
        self._disturbed |= disturbed

    async def close(self) -> None:
        """End the session: no task, server or socket is left."""
        self.plugin.end_streams()
        self._task.cancel()
        await asyncio.wait({self._task, *self._ending})
        if stop := self._unbind(0.1):  # seconds that calls under way have
            await stop
        self.tried_to_serve.set()

    def _end(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Have the next attempt wait for this."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _attempts(self) -> None:
        while self._ending:
            await asyncio.wait(self._ending)
        pause, longest = BACKOFF
        while True:
            self._pausing, self._disturbed, started = False, False, time.monotonic()
            with surviving(f"the session of {self.name}"):
                try:
                    await self._bind()
                    self.tried_to_serve.set()
                    watch = await self._register()
                    while self._ending:  # the former server: the streams that are left are the new one's
                        await asyncio.wait(self._ending)
                    await asyncio.wait({watch.opened}, timeout=REGISTER_TIMEOUT)
                    if not watch.opened.done():
                        raise RegistrationError("kubelet took the registration but does not watch the devices")
                    await asyncio.wait({watch.ended})
                    self._tell("kubelet no longer watches the devices")
                except RegistrationError as error:
                    self._tell(str(error))
            self.tried_to_serve.set()
            if self._disturbed or time.monotonic() - started > 30:  # seconds: a registration that held
                pause = BACKOFF[0]
            self._pausing = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _bind(self) -> None:
        """Serve on a socket that the kubelet has not been told of yet, unless we do.

        Its name, such as "tt-n300.4711-1.sock", is a new one: kubelet 1.37 refuses one that it still has a connection
        to, and then loses sight of that connection; and gRPC, too, unlinks the path of a server that stops late.
        """
        former_kubelet, self._kubelet = self._kubelet, socket_identity(self._kubelet_socket)
        if self._bound and not self._watch and socket_identity(self._socket) == self._bound:
            return
        stop = self._unbind(None)
        watched = self._watch and self._watch.opened.done() and not self._watch.ended.done()
        if stop and watched and self._kubelet == former_kubelet:
            # Before 1.37 the end of any stream of a resource makes the kubelet forget the newest registration of it, so
            # it has to have noticed the end of the old stream before it hears of the new one.
            await asyncio.shield(stop)
            await asyncio.sleep(0.05)
        if not os.path.isdir(self._directory):
            raise RegistrationError(f"waiting for {self._directory}")
        # A connection that says nothing is closed; the default is two minutes.
        server = grpc.aio.server(options=[("grpc.server_handshake_timeout_ms", 5000)])
        rpc.add_DevicePluginServicer_to_server(self.plugin, server)  # type: ignore[no-untyped-call]
        name = self.name.partition("/")[2][:18]  # the path of a socket has 107 bytes at most
        self._socket = f"{self._directory}/{SOCKET_PREFIX}{name}.{os.getpid()}-{next(_bindings) % 100_000}.sock"
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError:  # gRPC does not pass on what bind() said
            reason = f"cannot serve in {self._directory}; if the unit's sandbox forbids it: {DROP_IN}"
            raise RegistrationError(reason) from None
        self._server, self._watch, self._bound = server, None, socket_identity(self._socket)
        # An attempt can be dropped here, too; half a start would leave a server that never serves.
        await asyncio.shield(self._end(asyncio.create_task(server.start())))
        if self._bound is None:
            raise RegistrationError(f"{self._socket} has gone while it was made")

    def _unbind(self, grace: float | None) -> asyncio.Task[None] | None:
        """Begin to stop the server, which takes some milliseconds; the next attempt comes after that in any case."""
        server, self._server, self._bound = self._server, None, None
        return self._end(asyncio.create_task(server.stop(grace))) if server else None

    async def _register(self) -> Watch:
        if self._kubelet is None:
            raise RegistrationError(f"waiting for kubelet ({self._kubelet_socket} is not there)")
        for pause in (0.001, 0.002, 0.004, 0.008):  # seconds: bind() makes the file, listen() comes microseconds later
            if listens(self._kubelet_socket):
                break
            await asyncio.sleep(pause)
        else:
            raise RegistrationError("waiting for kubelet (nobody listens on its socket)")
        request = pb.RegisterRequest(version="v1beta1", resource_name=self.name, options=PLUGIN_OPTIONS)
        request.endpoint = os.path.basename(self._socket)
        self._watch = watch = self.plugin.await_watch()
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet_socket}", options=CHANNEL_OPTIONS) as channel:
            try:
                kubelet = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
                await kubelet.Register(request, timeout=REGISTER_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise RegistrationError(f"kubelet has not answered within {REGISTER_TIMEOUT:g} s") from None
                reason = " ".join((error.details() or error.code().name).split())
                raise RegistrationError(f"kubelet refuses: {reason}") from None
        log.info("%s: registered with kubelet, %s", self.name, _counted(len(self.plugin.resource.distinct), "device"))
        self.registrations += 1
        self._tell(REGISTERED)
        return watch

    def _tell(self, state: str) -> None:
        if state != self.state:
            self.state = state
            if state != REGISTERED:  # which has had a line of its own
                log.log(logging.INFO if state.startswith("waiting") else logging.WARNING, "%s: %s", self.name, state)
            self._changed()


def socket_identity(path: str) -> SocketIdentity | None:
    """Device, inode and time of making of a socket's file: inode numbers are reused, so two of them do not suffice."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino, status.st_mtime_ns
    return None


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


@contextlib.contextmanager
def surviving(what: str) -> Iterator[None]:
    """The boundary at which the daemon outlives an error of its own: it is logged with its traceback."""
    try:
        yield
    except Exception:
        log.exception("internal error in %s; going on", what)


# ==== OWNERS: who holds which chip, which the kubelet knows ===========================================================

ASK_TIMEOUT = 1.0  # seconds
ADMISSION = 10.0  # seconds after an allocation by which the kubelet lists the pod, or never will


class Owners:
    """The holders of chips: those that the kubelet lists, and those that it was answered about since."""

    def __init__(self, stood_for: dict[str, dict[str, list[str]]]) -> None:
        """stood_for: the PCI addresses of what was handed out last under an ID, by resource and ID."""
        self.stood_for = stood_for
        self._listed: list[Holder] = []
        self._of_before: list[Holder] = []  # whom this kubelet has not named yet, since it has just started
        self._told = -math.inf  # when the kubelet answered
        self._asked: SocketIdentity | None = None  # the kubelet's socket for this, as it was then
        self._granted: dict[Holder, float] = {}  # and when
        self._complained = False  # that the kubelet does not tell

    def granted(self, resource: str, ids: Mapping[str, Device], now: float) -> bool:
        """These devices are being given to a pod, under these IDs; returns whether `stood_for` has changed."""
        changed, known = False, self.stood_for.setdefault(resource, {})
        for identifier, device in ids.items():
            chips = [chip.bdf for chip in device.chips]
            if chips not in ([device.identifier], known.get(device.identifier)):  # an address stands for itself
                known[device.identifier], changed = chips, True  # an ordinal can be another chip's by then
            self._granted[Holder(resource, identifier, "a pod that is being admitted")] = now
        return changed

    def holders(self, chips: Mapping[str, Chip], now: float) -> dict[str, list[Holder]]:
        """By PCI address; `now` by the same clock as that of `granted`."""
        held: dict[str, list[Holder]] = {}
        fresh = [holder for holder, at in self._granted.items() if now - at < ADMISSION]
        for holder in [*self._listed, *self._of_before, *fresh]:
            for bdf in self._chips_of(holder, chips):
                held.setdefault(bdf, []).append(holder)
        return held

    def _chips_of(self, holder: Holder, chips: Mapping[str, Chip]) -> Collection[str]:
        identifier = holder.identifier.partition("::")[0]  # of the device, not of its replica
        if known := self.stood_for.get(holder.resource, {}).get(identifier):
            return known
        board = [bdf for bdf, chip in chips.items() if chip.board_chips > 1 and board_name(chip) == identifier]
        return board or [bdf for bdf, chip in chips.items() if identifier in (bdf, asic_name(chip))]

    def are_stale(self, seconds: float) -> bool:
        """Whether the kubelet told so long ago, and can tell something else: where nobody is, nobody can have left."""
        somebody = self._listed or self._of_before or self._granted or self._told < 0
        return bool(somebody) and time.monotonic() - self._told >= seconds

    def kubelet_is_young(self, kubelet: str) -> bool:
        """Whether it may not have admitted all pods of before its start yet, which its list leaves out until then."""
        identity = socket_identity(kubelet)
        return identity is not None and time.time() - identity[2] / 1e9 < ADMISSION

    async def ask(self, kubelet: str) -> str | None:
        """Have the kubelet tell; returns why it does not, in words, "" if there is none, None if it does."""
        if not listens(kubelet):
            return ""
        if self._asked != (identity := socket_identity(kubelet)):
            # It names a pod only once it has admitted it anew: that it does not is no proof that the pod has ended.
            self._asked, self._of_before, self._listed = identity, [*self._of_before, *self._listed], []
        try:
            async with grpc.aio.insecure_channel(f"unix:{kubelet}", options=CHANNEL_OPTIONS) as channel:
                call: Any = channel.unary_unary("/v1.PodResourcesLister/List")
                answer = pods.ListPodResourcesResponse.FromString(await call(b"", timeout=ASK_TIMEOUT))
        except (grpc.aio.AioRpcError, DecodeError) as error:
            said = error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
            reason = " ".join(said.split())
            if not self._complained:
                log.warning("kubelet does not tell which pod holds which device (%s): %s", kubelet, reason)
            self._complained = True
            return reason
        self._complained, self._told = False, time.monotonic()
        self._listed = [
            Holder(devices.resource_name, identifier, f"{pod.namespace}/{pod.name}", container.name)
            for pod in answer.pod_resources for container in pod.containers
            for devices in container.devices for identifier in devices.device_ids
        ]  # fmt: skip
        self._of_before = [h for h in self._of_before if h not in self._listed and self.kubelet_is_young(kubelet)]
        named = {(holder.resource, holder.identifier) for holder in self._listed}
        fresh = ((h, at) for h, at in self._granted.items() if self._told - at < ADMISSION)
        self._granted = {h: at for h, at in fresh if (h.resource, h.identifier) not in named}
        return None


# ==== KERNEL EVENTS: what changes among devices (netlink) and in the kubelet's directory (inotify) ====================

NETLINK_KOBJECT_UEVENT = 15
OUR_PCI_ID = f"\0PCI_ID={VENDOR:04X}:".encode()
_libc = ctypes.CDLL(None, use_errno=True)


class Uevent(NamedTuple):
    action: str  # "add", "remove", "change", "bind", "unbind"
    ordinal: int | None  # of the node that it is about; None if it is about a PCI function


def open_uevent_socket() -> socket.socket:
    """A socket that gets the kernel's uevents; raises OSError where that is not allowed."""
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, NETLINK_KOBJECT_UEVENT)
    kernel.bind((0, 1))  # to the kernel's group; udevd's own messages go to group 2
    return kernel


def sent_by_kernel(sender: object) -> bool:
    """Whether a netlink message came from the kernel itself, which has port id 0 and which nobody can take."""
    return isinstance(sender, tuple) and sender[0] == 0


def parse_uevent(message: bytes) -> Uevent | None:
    """The event if it is about one of our devices, else None: a machine has many others, of each container's start."""
    if b"tenstorrent" not in message and OUR_PCI_ID not in message:
        return None
    variables = dict(part.split("=", 1) for part in message.decode("utf-8", "replace").split("\0") if "=" in part)
    action, subsystem = variables.get("ACTION", ""), variables.get("SUBSYSTEM")
    if subsystem == "tenstorrent":
        name = re.fullmatch(r"tenstorrent/(\d{1,5})", variables.get("DEVNAME", ""))
        return Uevent(action, int(name[1]) if name else None)
    return Uevent(action, None) if subsystem == "pci" and OUR_PCI_ID in message else None


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

    While it is missing, its nearest ancestor is watched. `check()` finds what no event tells of: that the path leads
    elsewhere now (a mount, a renamed ancestor). Without inotify (a user's 128 instances are soon used up) it is silent.
    """

    MOVED_FROM, MOVED_TO, CREATE, DELETE, DELETE_SELF, MOVE_SELF = 0x40, 0x80, 0x100, 0x200, 0x400, 0x800
    OVERFLOW, ONLYDIR = 0x4000, 0x0100_0000
    MASK = MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF | ONLYDIR

    def __init__(self, path: str, happened: Callable[[Collection[str], Collection[str]], None]) -> None:
        """happened: gets the names that something happened to, "" for itself or lost events, and which are new."""
        self._path = path
        self._happened = happened
        self._descriptor = self._watch = -1
        self._watched: tuple[str, tuple[int, int] | None] = ("", None)  # the path, and device and inode of what it was

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            reason = f"{os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_instances"
            log.warning("no inotify instance (%s): a kubelet is seen at the next poll only", reason)
            return
        self._arm()
        loop.add_reader(self._descriptor, self._readable)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._descriptor >= 0:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def check(self) -> None:
        if self._descriptor >= 0 and self._nearest() != self._watched:
            self._arm()
            self._happened({""}, ())

    def _nearest(self) -> tuple[str, tuple[int, int] | None]:
        """The directory or, while there is none, its nearest ancestor; with device and inode."""
        path = self._path
        while not os.path.isdir(path) and path != os.path.dirname(path):
            path = os.path.dirname(path)
        identity = socket_identity(path)
        return path, identity and identity[:2]

    def _arm(self) -> None:
        """Watch what is the nearest now."""
        self._watched = ("", None)
        while self._watched != (nearest := self._nearest()):  # something can come into being before it is watched
            self._watched, path = nearest, nearest[0]
            _libc.inotify_rm_watch(self._descriptor, self._watch)  # refused if there is none
            self._watch = _libc.inotify_add_watch(self._descriptor, os.fsencode(path), ctypes.c_uint32(self.MASK))
        if self._watch < 0:
            reason = os.strerror(ctypes.get_errno())
            log.warning("cannot watch %s (%s): a kubelet is seen at the next poll only", self._watched[0], reason)

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
            names, new = {""}, set()
        if names:
            self._happened(names, new)


# ==== OFF THE LOOP: what can block for seconds. Threads get plain data and give back plain data =======================

READ_PATIENCE = 0.1  # seconds after which the other chips no longer wait for the one that is being read
Read = Callable[[PciFunction, "Telemetry | None"], Telemetry]


class Request(NamedTuple):
    function: PciFunction  # of a chip to be read
    last: Telemetry | None  # what it said last; None to have everything read
    periodic: bool  # it belongs to a poll, not to an event


class Reading(NamedTuple):
    function: PciFunction
    telemetry: Telemetry
    periodic: bool


class TelemetryReaders:
    """Reads chips one after another on a thread; a chip that blocks keeps its thread, and another one goes on.

    Two queues, of requests and of readings, are all that loop and threads share. A chip has at most one read under way,
    so there is at most one thread more than there are chips that block. Threads end with their work.
    """

    def __init__(self, deliver: Callable[[list[Reading]], None], read: Read = read_telemetry) -> None:
        """deliver: called on the loop with what was read, possibly nothing, whenever there is something to see."""
        self._deliver = deliver
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._asked: dict[str, Request] = {}  # those that have not answered, by PCI address, in the order of the queue
        self._again: dict[str, Request] = {}  # what was asked of a chip while it was being read
        self._since: dict[str, float] = {}  # when a chip was first seen to be no longer in the queue
        self._timer: asyncio.TimerHandle | None = None
        self._no_thread = False  # the system gives us none, which was said

    def request(self, requests: Iterable[Request]) -> None:
        """Read these chips, never two at once of one: what an event wants of one that is asked already comes after."""
        for request in requests:
            bdf = request.function.bdf
            if bdf not in self._asked:
                self._ask(request)
            elif not request.periodic or self._asked[bdf].function != request.function:
                # So soon after the other reading its heartbeat proves nothing.
                self._again[bdf] = request._replace(last=None, periodic=False)
        self._loop.call_soon(self._attend)  # later: a thread that reads meanwhile would only wait for the interpreter

    def seconds_under_way(self, bdf: str) -> float:
        """How long the read of a chip has been under way; 0 if there is none."""
        now = time.monotonic()
        return now - self._since.get(bdf, now)

    def is_settled(self) -> bool:
        """Whether every chip that was asked for has answered, or has taken longer than READ_PATIENCE."""
        return self._no_thread or all(self.seconds_under_way(bdf) >= READ_PATIENCE for bdf in self._asked)

    def _ask(self, request: Request) -> None:
        self._asked[request.function.bdf] = request
        self._waiting.put(request)

    def _attend(self) -> None:
        """Hand on what was read; let a thread go on with what waits, unless one is at work that gets on."""
        readings = []
        while not self._done.empty():
            readings.append(reading := self._done.get())
            bdf = reading.function.bdf
            del self._asked[bdf]
            self._since.pop(bdf, None)
            if again := self._again.pop(bdf, None):
                self._ask(again)
        now, waiting = time.monotonic(), self._waiting.qsize()
        ages = [now - self._since.setdefault(bdf, now) for bdf in list(self._asked)[: len(self._asked) - waiting]]
        if waiting and all(age >= READ_PATIENCE for age in ages):
            self._start_thread()
        # Look again when a read under way has used up its patience, or its deadline.
        waits = [(READ_PATIENCE if age < READ_PATIENCE else READ_DEADLINE) - age for age in ages if age < READ_DEADLINE]
        wait = min([*waits, READ_PATIENCE] if waiting else waits, default=math.inf)
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait + 0.002, self._attend) if wait < math.inf else None
        self._deliver(readings)

    def _start_thread(self) -> None:
        try:
            _thread.start_new_thread(self._work, ())
            self._no_thread = False
        except RuntimeError as error:
            if not self._no_thread:
                log.error("telemetry is not read for now: %s", error)
            self._no_thread = True

    def _work(self) -> None:
        """Runs on a thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                function, last, periodic = self._waiting.get_nowait()
                telemetry = Telemetry(error=("telemetry", 0))
                with surviving(f"the reading of {function.bdf}"):
                    telemetry = self._read(function, last)
                self._done.put(Reading(function, telemetry, periodic))
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended meanwhile
            self._loop.call_soon_threadsafe(self._attend)


class HostPaths:
    """Whether paths of the host are there. On a dead network file system nobody ever learns that."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, asyncio.Future[bool]] = {}  # whose threads have not answered: one for each path at most

    async def is_there(self, path: str, seconds: float) -> bool | None:
        """None: there is no answer within these seconds."""
        if path not in self._asked:
            try:
                _thread.start_new_thread(self._look, (path,))
            except RuntimeError:
                return None
            self._asked[path] = self._loop.create_future()
        answer = self._asked[path]
        await asyncio.wait({answer}, timeout=seconds)
        return answer.result() if answer.done() else None

    def _look(self, path: str) -> None:
        """Runs on a thread."""
        there = os.path.exists(path)
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(lambda: self._asked.pop(path).set_result(there))


# ==== SYSTEMD: readiness, status and watchdog, and log lines with a priority ==========================================


class ServiceManager:
    """What systemd wants to know of a Type=notify service; does nothing where nobody listens."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._notifier = sdnotify.SystemdNotifier()
        if self._notifier.socket:
            self._notifier.socket.setblocking(False)  # a manager that hangs must not make us hang
        self._status = ""
        self.watchdog_pause = math.inf  # seconds after which the next sign of life is due, inf if none is wanted
        pid, microseconds = environ.get("WATCHDOG_PID"), _decimal(environ.get("WATCHDOG_USEC"))
        if microseconds and microseconds > 0 and (not pid or pid == str(os.getpid())):
            self.watchdog_pause = microseconds / 2e6

    def notify(self, *states: str) -> None:
        """Tell it these, such as "READY=1"."""
        # sdnotify encodes in Latin-1, systemd wants UTF-8: so it gets characters that are the bytes of that.
        self._notifier.notify("\n".join(states).encode().decode("latin-1"))

    def sockets(self, name: str) -> list[socket.socket]:
        """The listening sockets of this name that it has handed in (sd_listen_fds(3))."""
        if self._environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        names = self._environ.get("LISTEN_FDNAMES", "").split(":")[: _decimal(self._environ.get("LISTEN_FDS")) or 0]
        return [socket.socket(fileno=3 + number) for number, given in enumerate(names) if given == name]

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self.notify(f"STATUS={text}")


class _JournalFormatter(logging.Formatter):
    """Lines with the priority prefix of sd-daemon(3), every line of a traceback too."""

    def format(self, record: logging.LogRecord) -> str:
        priority = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4}.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _without_traceback_of_garbage(record: logging.LogRecord) -> bool:
    """gRPC logs a request that is no protobuf like an error of ours."""
    if record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.exc_info = record.exc_text = None
    return True


def set_up_logging(environ: Mapping[str, str], *, timestamps: bool) -> None:
    """One event a line on stderr; the journal has a time of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_without_traceback_of_garbage)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s" if timestamps else None))
    with contextlib.suppress(OSError):
        status = os.fstat(2)  # the journal's own stream, unless it was redirected since (systemd.exec(5))?
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler.setFormatter(_JournalFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


# ==== FILES AND METRICS: the ways out for what others read ============================================================


class OwnFile:
    """A file that we write for others: as a whole or not at all, and only when its text has become another."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._text: str | None = None  # as written last
        self._failed = False  # which was said

    def is_there(self) -> bool:
        """Whether it is where it was put; always, if it was not put anywhere."""
        return self._text is None or os.path.exists(self.path)

    def write(self, text: str | None, *, again: bool = False) -> None:
        """All of it at once, readable for everybody; None: no file. What fails is logged once, and tried again."""
        if text == self._text and text is not None and not again and self.is_there():
            return
        new = f"{os.path.dirname(self.path)}/.{os.path.basename(self.path)}.new"
        try:
            if text is None:
                os.unlink(self.path)
            else:
                with open(new, "w", encoding="utf-8") as file:
                    file.write(text)
                    os.fchmod(file.fileno(), 0o644)
                os.replace(new, self.path)
            self._text, self._failed = text, False
        except FileNotFoundError:  # where its directory is not there nobody wants it
            self._text = None
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(new)
            if not self._failed:
                log.warning("%s cannot be written: %s", self.path, error.strerror)
            self._failed = True


class MetricsServer:
    """`GET /metrics` by HTTP. Whatever a client does costs its own connection and nothing else."""

    MOST, HEAD_MAX, SECONDS = 32, 8192, 5.0  # connections at a time; bytes of a request; for all of it

    def __init__(self, text: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._text = text
        self.open = 0  # connections

    async def start(self, listening: socket.socket) -> None:
        await asyncio.start_server(self._connected, sock=listening, limit=self.HEAD_MAX)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            if self.open <= self.MOST:
                await asyncio.wait_for(self._answer(reader, writer), self.SECONDS)
        except (asyncio.TimeoutError, asyncio.CancelledError, OSError, ValueError):  # ValueError: a line is too long
            pass  # as the daemon's end is, which asyncio would log
        finally:
            self.open -= 1
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines: list[bytes] = []
        while not lines or lines[-1].strip():
            lines.append(await reader.readline())
            if not lines[-1] or sum(map(len, lines)) > self.HEAD_MAX:
                return
        method, path, *_ = [*lines[0].decode("latin-1").split(), "", ""]
        status, text = "404 Not Found", "there is /metrics\n"
        if method not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "GET /metrics\n"
        elif path.partition("?")[0] == "/metrics":
            status, text = "200 OK", await self._text()
        head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        head += f"Content-Length: {len(text.encode())}\r\nConnection: close\r\n\r\n"
        writer.write((head if method == "HEAD" else head + text).encode())
        writer.close()
        await writer.wait_closed()


# ==== DAEMON: follows the chips, judges them, publishes them ==========================================================


class Fleet:
    """The chips of the node as they are followed over time. What changes is logged, once."""

    def __init__(self, remembered: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """remembered: what `memory` said before a restart."""
        self.chips: dict[str, Chip] = {}  # by PCI address; none is ever taken out
        self.oddities: tuple[str, ...] = ()  # what is there but not listed, and why
        self.version = 0  # another one after every change, but for what only the rules remember
        self._remembered = remembered or {}

    def observe(self, settings: Settings, *, thorough: bool = True) -> list[PciFunction]:
        """Look at sysfs; returns what is new, back or elsewhere, to be asked. thorough: also at what seldom changes."""
        known = [] if thorough else [chip.function for chip in self.chips.values() if chip.present]
        seen = scan(settings, known)
        nodes = [f.node_fault for f in seen.functions.values() if f.node_fault and f.bdf not in self.chips]
        before, self.oddities = self.oddities, (*seen.oddities, *nodes)
        for oddity in [oddity for oddity in self.oddities if oddity not in before]:
            log.warning("not listed: %s", oddity)
        wanted = []
        for bdf, function in seen.functions.items():
            chip = self.chips.get(bdf)
            if chip is None:
                if function.node_fault:
                    continue
                self.chips[bdf] = self._recalled(function, settings.health)
            elif chip.present and chip.function == function:
                continue
            elif (chip.function.arch, chip.function.pci_card) != (function.arch, function.pci_card):
                self._update(Chip(function))  # another card at the same address
            else:
                # What was away stays so until it speaks.
                self._update(chip._replace(function=function, present=True, telemetry=None))
            wanted.append(function)
        for bdf in self.chips.keys() - seen.functions.keys():
            chip = self.chips[bdf]
            exists = os.path.exists(f"{settings.sysfs_root}/bus/pci/devices/{bdf}")
            self._update(chip._replace(present=False, health=gone(chip.health, bdf, function_exists=exists)))
        return wanted

    def learn(self, readings: Iterable[Reading], settings: HealthSettings, now: float) -> None:
        """Take over what the chips said; `now` in seconds of any clock that only goes forward."""
        for function, telemetry, periodic in readings:
            chip = self.chips[function.bdf]
            if chip.present and chip.function == function:  # else it was asked before it went or was renumbered
                health = judge(chip.health, function, telemetry, settings, now, periodic=periodic)
                self._update(with_identity(chip, telemetry, health=health, listed=True))

    def wait_no_longer(self, seconds_under_way: Callable[[str], float]) -> None:
        """Go on without the chips that do not answer: list those that are new, and call it a fault at the deadline."""
        for chip in list(self.chips.values()):
            if (seconds := seconds_under_way(chip.bdf)) > READ_PATIENCE:
                late = chip.present and seconds > READ_DEADLINE
                health = unhealthy(chip.health, Fault.BLOCKED, BLOCKED) if late else chip.health
                self._update(chip._replace(listed=True, health=health))

    def memory(self) -> dict[str, dict[str, Any]]:
        """What a restart of the daemon must not forget: who the chips are, and which of them are known to be dead."""
        memory: dict[str, dict[str, Any]] = {}
        for bdf, chip in self.chips.items():
            stalled_at = chip.health.heartbeat if chip.health.fault is Fault.STALLED else None
            memory[bdf] = {"arch": chip.function.arch, "pci_card": chip.function.pci_card, "stalled_at": stalled_at}
            memory[bdf] |= {key: getattr(chip, key) for key in IDENTITY}
        return memory

    def _recalled(self, function: PciFunction, settings: HealthSettings) -> Chip:
        """A new chip, with what is remembered of it."""
        known = self._remembered.get(function.bdf, {})
        if (known.get("arch"), known.get("pci_card")) != (function.arch, function.pci_card):
            return Chip(function)
        identity: dict[str, Any] = {key: known.get(key) for key in IDENTITY}
        misses = settings.heartbeat_misses if known.get("stalled_at") is not None else 0
        return Chip(function, **identity, health=Health(heartbeat=known.get("stalled_at"), misses=misses))

    def _update(self, chip: Chip) -> None:
        before, self.chips[chip.bdf] = self.chips[chip.bdf], chip
        if before.shown == chip.shown:
            return
        old, new = before.health, chip.health
        self.version += 1
        what = f"{chip.bdf} ({chip.card_type or chip.function.arch})"
        if chip.listed and _introduction(chip) != (_introduction(before) if before.listed else ""):
            log.info("%s: %s", what, _introduction(chip))
        if new.fault and old.fault != new.fault:
            log.warning("%s: unhealthy: %s", what, new.reason)
        elif old.fault != new.fault:
            log.info("%s: healthy again", what)


def _introduction(chip: Chip) -> str:
    """A chip's node and identity, for the log."""
    facts = {"board": chip.serial, "ASIC": chip.asic_id, "firmware": chip.firmware}
    told = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([chip.function.path, *told] if told else [chip.function.path, "its firmware is silent"])


class Memory:
    """What outlives the daemon, in a file: JSON; who the chips are, of this boot only, and what IDs have stood for."""

    def __init__(self, settings: Settings) -> None:
        self._path = f"{settings.state_dir}/state.json" if settings.state_dir else None
        self._file = OwnFile(self._path) if self._path else None
        self._boot = _read_quick(f"{settings.proc_root}/sys/kernel/random/boot_id")
        self.chips: dict[str, dict[str, Any]] = {}  # by PCI address, as Fleet.memory has it
        self.stood_for: dict[str, dict[str, list[str]]] = {}  # as Owners has it
        with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):  # none, or garbage
            with open(self._path or "", encoding="utf-8") as file:
                content = json.load(file)
            if content["boot"] == self._boot:
                self.chips = {bdf: dict(chip) for bdf, chip in content["chips"].items()}
            self.stood_for = {
                resource: {identifier: [str(bdf) for bdf in bdfs] for identifier, bdfs in ids.items()}
                for resource, ids in content["stood_for"].items()
            }

    def keep(self, chips: Mapping[str, Mapping[str, Any]], stood_for: Mapping[str, Mapping[str, list[str]]]) -> None:
        if self._file:
            content = {"boot": self._boot, "chips": chips, "stood_for": stood_for}
            self._file.write(json.dumps(content, indent=1))


def make_lock_directory(path: str) -> None:
    """A directory in which everybody may make locks, and nobody remove another's. Raises OSError."""
    if path == "/dev/shm":
        return
    for directory in (os.path.dirname(path), path):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is somebody else's", directory)
    os.chmod(path, 0o1777)


BIND_PATIENCE = 10.0  # seconds for which the start waits for the driver to bind to what is on the bus
MOUNT_PATIENCE = 1.0  # seconds that the host has to say whether the path of a mount is there
NEW_KUBELET_PAUSE = 0.05  # seconds for which a kubelet that starts is left alone with the registrations
METRICS_PAUSE = 15.0  # seconds between two writes of the metrics' file, and for which holders count as known
THOROUGH = 12  # every so many polls everything is read again, a minute by default
Offer = tuple[str, str, str, int]  # a chip's PCI address, and the resource, ID and replicas under which it is offered


@dataclass(eq=False)
class Daemon:
    """Ties it together: kernel events, polls and signals in; device lists, registrations and systemd's view out."""

    settings: Settings
    load: Callable[[], Settings]  # reads the configuration again, for SIGHUP
    manager: ServiceManager
    open_uevents: Callable[[], socket.socket]  # where kernel events come from
    trusted: Callable[[object], bool]  # whether such an address is the kernel's

    def __post_init__(self) -> None:
        self.memory = Memory(self.settings)
        self.fleet = Fleet(self.memory.chips)
        self.owners = Owners(self.memory.stood_for)
        self.sessions: dict[str, KubeletSession] = {}
        self._refused = ""  # why the configuration on disk is not the one in force
        self._serving = False  # the first look at every chip is done
        self._published = -1  # the fleet's version that the kubelet knows
        self._settled: set[Offer] | None = None  # what is offered with the kubelet asked; None: it was asked just now
        self._unsettled: set[Offer] = set()  # what is offered, but not yet: the kubelet has to say who holds it
        self._asking: asyncio.Task[None] | None = None
        self._held: Mapping[str, str | None] = {}  # who holds what under another name, which was logged
        self._kubelet: SocketIdentity | None = None  # the last one that was asked
        self._polls = 0
        self.stop = asyncio.Event()
        self._told = asyncio.Event()  # telemetry has arrived, or something changed on the bus
        self._rescheduled = asyncio.Event()  # another interval between polls
        self._closing: set[asyncio.Task[None]] = set()
        self._background: set[asyncio.Task[None]] = set()  # what may be dropped at the end
        self._readers = TelemetryReaders(self._telemetry_arrived)
        self._host_paths = HostPaths()
        self._watch = DirectoryWatch(self.settings.device_plugin_dir, self._directory_changed)
        self._files: dict[str, OwnFile] = {}  # for others to read, by kind
        self._described: object = None  # what they were made of
        self._measured = -math.inf  # when the metrics were written last
        self._scrapes = MetricsServer(self._metrics)
        self._started = time.time()
        self._allocations = collections.Counter[tuple[str, str]]()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        log.setLevel(self.settings.log_level.upper())
        self._choose_files()
        kernel = None
        try:
            kernel = self.open_uevents()
            loop.add_reader(kernel, self._uevents_arrived, kernel)
        except OSError as error:
            log.warning("no kernel events (%s): what changes is seen at the next poll only", error.strerror)
        self._watch.open(loop)
        remove_dead_sockets(self.settings.device_plugin_dir)
        serving, stop = loop.create_task(self._serve()), loop.create_task(self.stop.wait())
        try:
            await asyncio.wait({serving, stop}, return_when=asyncio.FIRST_COMPLETED)
            return serving.result() if serving.done() else 0
        finally:
            self.manager.notify("STOPPING=1")
            for task in (serving, stop, *self._background):
                task.cancel()
            if kernel:
                loop.remove_reader(kernel)
                kernel.close()
            self._watch.close(loop)
            await asyncio.gather(*(session.close() for session in self.sessions.values()), *self._closing)

    async def _serve(self) -> int:
        self._read(self.fleet.observe(self.settings))
        while not self._readers.is_settled():
            await self._news(None)
        self._kubelet = socket_identity(f"{self.settings.device_plugin_dir}/{KUBELET_SOCKET}")
        await self.owners.ask(self.settings.pod_resources_socket)
        self._serving = True
        self.publish_changes()
        for listening in self.manager.sockets("metrics"):
            await self._scrapes.start(listening)
        version = driver_version(self.settings)
        await self._until_bound(functions_on_bus(self.settings) if version is not None else [])
        if self.settings.fail_on_init_error and not self.fleet.chips:
            log.error("no Tenstorrent driver is loaded" if version is None else "there is no Tenstorrent device")
            return 1
        driver = "no driver is loaded" if version is None else f"driver {version or 'of unknown version'}"
        log.info("tt-device-plugin %s: %s, %s", __version__, driver, _counted(len(self.fleet.chips), "device"))
        for session in list(self.sessions.values()):
            await session.tried_to_serve.wait()
        self._show_status()
        self.manager.notify("READY=1")
        await self._poll_for_ever()

    async def _until_bound(self, on_bus: Collection[str]) -> None:
        """Until what is on the bus is listed, or had the time to be: a kubelet refuses pods whose devices are late."""
        deadline = time.monotonic() + BIND_PATIENCE
        while True:
            listed = {chip.bdf for chip in self.fleet.chips.values() if chip.listed}
            missing = [bdf for bdf in on_bus if bdf not in listed and is_for_driver(self.settings, bdf)]
            if not missing:
                return
            if (left := deadline - time.monotonic()) <= 0:
                log.warning("%s: no node of the driver's in %g s; ready without it", missing[0], BIND_PATIENCE)
                return
            self.manager.status(f"waiting for the driver to make a node for {missing[0]}")
            await self._news(min(left, 0.5))  # events can be lost, or there are none
            self._read(self.fleet.observe(self.settings))

    async def _news(self, seconds: float | None) -> None:
        """Until telemetry has arrived or the kernel has told of something, for so long at most."""
        self._told.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._told.wait(), seconds)

    async def _poll_for_ever(self) -> NoReturn:
        polled, sound = time.monotonic(), True
        while True:
            due = polled + self.settings.health.interval - time.monotonic()
            self._rescheduled.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._rescheduled.wait(), max(0, min(due, self.manager.watchdog_pause)))
            if time.monotonic() - polled >= self.settings.health.interval:
                polled, sound = time.monotonic(), False
                with surviving("a poll"):
                    self.poll()
                    sound = True
            if sound and self.manager.watchdog_pause < math.inf:  # a loop whose polls fail does not do its work
                self.manager.notify("WATCHDOG=1")

    def poll(self) -> None:
        """The net under all events, and the only way to see a chip die: that sends none."""
        self._polls += 1
        thorough = self._polls % THOROUGH == 0
        self.fleet.observe(self.settings, thorough=thorough)
        self._watch.check()
        self._directory_changed((), ())
        held = any(device.held for session in self.sessions.values() for device in session.plugin.resource.distinct)
        if held or self.owners.kubelet_is_young(self.settings.pod_resources_socket):
            self._ask_kubelet()
        self.publish_changes()
        self._in_background(self._describe())
        if time.monotonic() - self._measured >= METRICS_PAUSE and (metrics := self._files.get("metrics")):
            self._measured = time.monotonic()
            self._in_background(self._write_metrics(metrics))
        last = {c.function: None if thorough else c.telemetry for c in self.fleet.chips.values() if c.present}
        self._readers.request(Request(function, telemetry, periodic=True) for function, telemetry in last.items())

    def _in_background(self, work: Coroutine[Any, Any, None], *, to_its_end: bool = False) -> None:
        """to_its_end: whether the daemon's own end waits for it."""
        tasks = self._closing if to_its_end else self._background
        tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(tasks.discard)

    def _read(self, functions: Iterable[PciFunction]) -> None:
        """Ask these chips for everything, because of an event."""
        self._readers.request(Request(function, None, periodic=False) for function in functions)

    # What the kubelet gets

    def publish_changes(self) -> None:
        """Bring resources, their sessions and systemd's status in line with the chips, if anything is new of them."""
        if not self._serving or self._published == self.fleet.version:
            return
        self._published = self.fleet.version
        self.memory.keep(self.fleet.memory(), self.owners.stood_for)
        wanted = self._settled_resources()
        self._log_holders(wanted.values())
        for name in self.sessions.keys() - wanted.keys():
            log.info("%s: no device is of this resource any longer", name)
            session = self.sessions.pop(name)
            session.plugin.publish(Resource(name, {}))
            self._in_background(session.close(), to_its_end=True)
        for name, resource in wanted.items():
            if locks := lock_directory(self.settings.sharing, resource):
                # After a reboot containers start with the old answer: what it names has to be there.
                with surviving(f"making {locks}"):
                    make_lock_directory(locks)
            if name in self.sessions:
                self.sessions[name].plugin.publish(resource)
            else:
                plugin = DevicePlugin(resource, self._allocate)
                self.sessions[name] = KubeletSession(plugin, self.settings.device_plugin_dir, self._show_status)
        self._show_status()
        self._in_background(self._describe())

    def _settled_resources(self) -> dict[str, Resource]:
        """As they can be published: no chip is offered under another name before the kubelet has said who holds it."""
        chips = [chip for chip in self.fleet.chips.values() if chip.listed]
        holders = self.owners.holders(self.fleet.chips, time.monotonic())
        wanted = resources(chips, self.settings, holders)
        devices = ((resource, device) for resource in wanted.values() for device in resource.distinct)
        offers = {(chip.bdf, r.name, device.identifier, r.replicas) for r, device in devices for chip in device.chips}
        self._settled = offers if self._settled is None else self._settled & offers
        if offers - self._settled and not listens(self.settings.pod_resources_socket):
            self._settled = offers
        self._unsettled = offers - self._settled
        if self._unsettled:
            self._ask_kubelet()
            return resources(chips, self.settings, holders, {bdf for bdf, *_ in self._unsettled})
        return wanted

    def _ask_kubelet(self, *, after: float = 0.0) -> None:
        """Learn who holds what, and publish what follows from it, unless that is under way already."""

        async def ask() -> None:
            await asyncio.sleep(after)
            settling, reason = self._unsettled, "an internal error"
            with surviving("asking the kubelet who holds what"):
                reason = await self.owners.ask(self.settings.pod_resources_socket) or ""
            if reason and settling:
                log.warning("whether pods still hold what is offered anew cannot be known: %s", reason)
            if self._settled is not None:
                self._settled |= settling
            self._asking, self._published = None, -1
            self.publish_changes()  # which asks once more if more is offered anew by now

        if self._asking is None:
            self._asking = asyncio.create_task(ask())

    async def _asked(self) -> None:
        """Until a question that is under way has been answered, for as long as an answer may take."""
        if self._asking:
            await asyncio.wait({self._asking}, timeout=ASK_TIMEOUT)

    def _log_holders(self, wanted: Iterable[Resource]) -> None:
        """Who holds what under another name than it has now, when that begins and when it ends."""
        held = {f"{r.name} {d.identifier}": d.held for r in wanted for d in r.distinct if d.held not in (None, ASKING)}
        before, self._held = self._held, held
        for what, holder in sorted(held.items() - before.items()):
            log.warning("%s: unhealthy: %s", what, holder)
        for what in before.keys() - held.keys():
            log.info("%s: nobody holds it under another name any longer", what)

    async def _allocate(self, plugin: DevicePlugin, containers: Sequence[Sequence[str]]) -> ContainerResponses:
        """What containers with these IDs get, as things stand at this moment. Raises Refusal."""
        result = "refused"
        try:
            await self._asked()
            if self.owners.kubelet_is_young(self.settings.pod_resources_socket):
                self._ask_kubelet()  # it admits the pods of before first, so by now it names them
                await self._asked()
            mounts, resource = await self._existing_mounts(), plugin.resource
            check_allocation(resource, containers)
            devices = {identifier: resource.devices[identifier] for ids in containers for identifier in ids}
            locks = self._ready_to_start(resource, devices.values())
            if self.owners.granted(resource.name, devices, time.monotonic()):
                self.memory.keep(self.fleet.memory(), self.owners.stood_for)
            path, result = functools.partial(node_path, self.settings), "granted"
            chosen = ([devices[identifier] for identifier in ids] for ids in containers)
            return [container_edits(some, self.settings, mounts, locks, path) for some in chosen]
        finally:
            self._allocations[plugin.resource.name, result] += 1

    def _ready_to_start(self, resource: Resource, chosen: Iterable[Device]) -> str | None:
        """The directory for the locks of these devices, whose nodes are as they should be. Raises Refusal."""
        for device in chosen:
            for function in (chip.function for chip in device.chips):  # by sysfs as it is now; the news is under way
                if fault := _node_fault(function.path, _read_quick(f"{function.sysfs}/dev")):
                    reason = f"device {device.identifier} is unhealthy: device node is wrong: {fault}"
                    raise Refusal(Code.FAILED_PRECONDITION, reason)
        if locks := lock_directory(self.settings.sharing, resource):
            try:
                make_lock_directory(locks)
            except OSError as error:
                reason = f"no directory for the locks of {resource.name}: {error.filename}: {error.strerror}"
                raise Refusal(Code.UNAVAILABLE, reason) from None
        return locks

    async def _existing_mounts(self) -> tuple[Mount, ...]:
        """The mounts whose host paths are there. Raises Refusal if one does not answer: no container could start."""
        if (mounts := self.settings.mounts) is None:
            dev, names = self.settings.dev_root, ("hugepages-1G", "hugepages")
            return tuple([Mount(f"{dev}/{name}", f"/dev/{name}") for name in names if os.path.exists(f"{dev}/{name}")])
        found = await asyncio.gather(*(self._host_paths.is_there(mount.host, MOUNT_PATIENCE) for mount in mounts))
        if None in found:
            silent = mounts[found.index(None)].host
            raise Refusal(Code.UNAVAILABLE, f"the host's {silent}, a mount, does not answer")
        return tuple(itertools.compress(mounts, found))

    # What others get

    def _choose_files(self) -> None:
        """The files that the configuration wants; one that it no longer wants is removed."""
        cdi, labels = self.settings.cdi_dir, self.settings.labels_dir
        paths = {"cdi": cdi and f"{cdi}/{CDI_FILE}", "labels": labels and f"{labels}/{LABELS_FILE}"}
        for kind, path in {**paths, "metrics": self.settings.metrics_file}.items():
            if kind in self._files and self._files[kind].path != path:
                self._files.pop(kind).write(None)
            if path:
                self._files.setdefault(kind, OwnFile(path))
        self._described, self._measured = None, -math.inf

    async def _describe(self) -> None:
        """Bring the files for runtimes and node-feature-discovery in line with what is there."""
        try:
            mounts = await self._existing_mounts()
        except Refusal:
            return  # what a runtime would wait for is better not named
        made_of = self.fleet.version, mounts
        if self._described == made_of and all(file.is_there() for file in self._files.values()):
            return
        self._described, chips = made_of, [chip for chip in self.fleet.chips.values() if chip.listed]
        if cdi := self._files.get("cdi"):
            with_node = [chip.function for chip in chips if chip.present and not chip.function.node_fault]
            cdi.write(cdi_spec(with_node, self.settings, mounts))
        if labels := self._files.get("labels"):
            listed = [session.plugin.resource for session in self.sessions.values()]
            labels.write(feature_file(listed, chips, self.settings, driver_version(self.settings)))

    async def _metrics(self) -> str:
        if self.owners.are_stale(METRICS_PAUSE):
            await self.owners.ask(self.settings.pod_resources_socket)
        listed = [(s.plugin.resource, s.state == REGISTERED, s.registrations) for s in self.sessions.values()]
        resource_of = {c.bdf: resource for resource, *_ in listed for d in resource.distinct for c in d.chips}
        holders = self.owners.holders(self.fleet.chips, math.inf)  # without those that are just being admitted
        families = chip_metrics([chip for chip in self.fleet.chips.values() if chip.listed], resource_of, holders)
        return exposition([*families, *plugin_metrics(listed, self._allocations, self._started)])

    async def _write_metrics(self, file: OwnFile) -> None:
        if os.path.isdir(os.path.dirname(file.path)):  # else nobody wants it, and nobody need be asked
            file.write(await self._metrics(), again=True)  # its age tells others that we are at work

    # What happens

    def reload(self) -> None:
        """SIGHUP: take over what a running daemon can; a bad configuration changes nothing, and is told of."""
        self.manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            loaded = self.load()
        except ConfigError as error:
            log.error("configuration is not reloaded, the old one stays: %s", error)
            self._refused = f"the configuration on disk is refused: {error}"
        else:
            kept = {key: getattr(self.settings, key) for key in NEEDS_RESTART}
            for key, value in kept.items():
                if getattr(loaded, key) != value:
                    log.warning("%s needs a restart to change; until then it is %s", key, value)
            if self.settings.sharing.lock_dir != loaded.sharing.lock_dir:
                log.warning("lock_dir has changed: containers from before and after do not know of each other")
            self.settings, self._refused = replace(loaded, **kept), ""
            log.setLevel(self.settings.log_level.upper())
            log.info("configuration reloaded")
            self._choose_files()
            self._published = -1
            self.publish_changes()
            self._rescheduled.set()
        if self._serving:
            self._show_status()
            self.manager.notify("READY=1")

    def _uevents_arrived(self, kernel: socket.socket) -> None:
        events = list(receive_uevents(kernel, self.trusted))
        if not events:
            return
        log.debug("kernel events: %s", events)
        new = self.fleet.observe(self.settings)
        ordinals = {event.ordinal for event in events if event}
        named = [c.function for c in self.fleet.chips.values() if c.present and c.function.ordinal in ordinals]
        self._read({function.bdf: function for function in [*new, *named]}.values())
        self._told.set()
        self.publish_changes()

    def _telemetry_arrived(self, readings: list[Reading]) -> None:
        self.fleet.learn(readings, self.settings.health, time.monotonic())
        self.fleet.wait_no_longer(self._readers.seconds_under_way)
        self._told.set()
        self.publish_changes()

    def _directory_changed(self, names: Collection[str], new: Collection[str]) -> None:
        foreign = any(not name.startswith(SOCKET_PREFIX) for name in names)
        kubelet = socket_identity(f"{self.settings.device_plugin_dir}/{KUBELET_SOCKET}")
        if self._serving and kubelet not in (None, self._kubelet):
            self._kubelet = kubelet
            self._ask_kubelet(after=NEW_KUBELET_PAUSE)
        for session in self.sessions.values():
            session.check_sockets(kubelet_is_new=KUBELET_SOCKET in new, disturbed=foreign)

    def _show_status(self) -> None:
        sessions = self.sessions.values()
        status = status_line([(session.plugin.resource, session.state) for session in sessions])
        self.manager.status("; ".join(filter(None, [status, self._refused])))


def status_line(listed: Sequence[tuple[Resource, str]]) -> str:
    """What `systemctl status` shows: "8 × tenstorrent.com/n300, 8 healthy; registered with kubelet"."""
    if not listed:
        return "no Tenstorrent device on this node; waiting for one"
    counts = []
    for resource, _ in listed:
        reasons = [f"{device.identifier}: {device.reason}" for device in resource.distinct if device.reason]
        unhealthy = f" ({reasons[0]}{', …' if len(reasons) > 1 else ''})" if reasons else ""
        shared = f", shared by {resource.replicas}" if resource.replicas else ""
        counts.append(f"{len(resource.distinct)} × {resource.name}{shared}, {resource.healthy} healthy{unhealthy}")
    states = {state for _, state in listed}
    if len(states) > 1:
        states = {f"{resource.name} {state}" for resource, state in listed if state != REGISTERED}
    return "; ".join([*counts, *sorted(states)])


# ==== COMMAND LINE ====================================================================================================

Finding = tuple[Literal["ok", "warn", "FAIL"], str, str]  # a line of `check`: subject; what is so and what to do

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
The file can say more: [health] interval, temperature_limit, heartbeat_misses, trip_holdoff; [sharing] and
[[sharing.resources]]; [[mounts]].

exit status: 0 in order; 1 check failed, or nothing found with --fail-on-init-error; 2 usage; 78 bad configuration
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)  # a path is one word

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return super()._format_action_invocation(action).replace(" [=", "[=")  # a switch takes its value so only


def argument_parser() -> argparse.ArgumentParser:
    usage = "tt-device-plugin [run|list|check] [OPTIONS]"
    parser = argparse.ArgumentParser(
        "tt-device-plugin", usage, DESCRIPTION, EPILOG, formatter_class=_Formatter, allow_abbrev=False
    )
    parser.add_argument("command", nargs="?", choices=("run", "list", "check"), default="run", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"tt-device-plugin {__version__}")
    parser.add_argument("--json", action="store_true", help="with list: an array of objects")
    parser.add_argument("--config-only", action="store_true", help="with check: the configuration and nothing else")
    file = f"default {DEFAULT_CONFIG_FILE}, which may be absent [TTDP_CONFIG_FILE]"
    parser.add_argument("--config-file", metavar="FILE", help=file)
    for option in OPTIONS:
        default = getattr(Settings(), option.key)
        metavar = "[=BOOL]" if option.is_switch else option.key.rpartition("_")[2].upper()
        text = f"{option.help}; default {str(default).lower() if option.is_switch else default} [{option.variable}]"
        parser.add_argument(option.flag, metavar=metavar, help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: returns its exit status (see EPILOG)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # What follows a bare switch is the next word, such as a command.
    switches = {option.flag for option in OPTIONS if option.is_switch}
    parser = argument_parser()
    options = parser.parse_args([f"{word}=true" if word in switches else word for word in words])
    for flag, given, command in (("--json", options.json, "list"), ("--config-only", options.config_only, "check")):
        if given and options.command != command:
            parser.error(f"{flag} goes with {command}")
    set_up_logging(os.environ, timestamps=options.command == "run")
    load = functools.partial(load_settings, vars(options), os.environ)
    if options.command != "run":
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        log.setLevel("ERROR")  # what a survey finds is in its answer, not in the log
    if options.command == "check":
        return check(load, config_only=options.config_only)
    try:
        settings = load()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    if options.command == "list":
        return list_devices(settings, as_json=options.json)

    async def run() -> int:
        return await Daemon(settings, load, ServiceManager(os.environ), open_uevent_socket, sent_by_kernel).run()

    return asyncio.run(run())


async def survey(settings: Settings) -> tuple[Fleet, Holders | None]:
    """The node's chips, asked twice, one second apart, or a stalled heartbeat would not show; and who holds them."""
    memory, told, rules = Memory(settings), asyncio.Event(), replace(settings.health, heartbeat_misses=1)
    fleet, owners = Fleet(memory.chips), Owners(memory.stood_for)

    def arrived(readings: list[Reading]) -> None:
        fleet.learn(readings, rules, time.monotonic())
        fleet.wait_no_longer(readers.seconds_under_way)
        told.set()

    readers = TelemetryReaders(arrived)
    for pause in (0.0, 1.0):
        await asyncio.sleep(pause)
        fleet.observe(settings)
        asked = [chip.function for chip in fleet.chips.values() if chip.present]
        readers.request(Request(function, None, periodic=True) for function in asked)
        while not readers.is_settled() or any(0 < readers.seconds_under_way(f.bdf) <= READ_DEADLINE for f in asked):
            told.clear()
            await told.wait()
    known = await owners.ask(settings.pod_resources_socket) is None
    return fleet, owners.holders(fleet.chips, math.inf) if known else None


def list_devices(settings: Settings, *, as_json: bool) -> int:
    fleet, holders = asyncio.run(survey(settings))
    for oddity in fleet.oddities:
        print(f"not listed: {oddity}", file=sys.stderr)
    rows = list(_rows(settings, fleet, holders))
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        print(_as_text(rows) if rows else "no Tenstorrent device on this node")
    return 0


def _rows(settings: Settings, fleet: Fleet, holders: Holders | None) -> Iterator[dict[str, Any]]:
    """What there is to say of each chip, as `list --json` says it."""
    listed = resources(fleet.chips.values(), settings, holders or {}).values()
    owned = {chip.bdf: (r, device) for r in listed for device in r.distinct for chip in device.chips}
    for bdf in sorted(fleet.chips, key=address):
        chip, function, (resource, device) = fleet.chips[bdf], fleet.chips[bdf].function, owned.get(bdf, (None, None))
        reason = chip.health.reason or (device.held if device else "its board is not known yet")
        processes = processes_on(settings, function.ordinal) if chip.present else []
        yield {
            "id": device.identifier if device else None, "index": function.ordinal,
            "path": function.path if chip.present and not function.node_fault else None, "bdf": bdf,
            "card": chip.card_type, "board": chip.board_type if chip.card_type else None, "arch": function.arch,
            "serial": chip.serial, "asic_id": chip.asic_id, "numa_node": function.numa_node, "firmware": chip.firmware,
            "healthy": reason is None, "reason": reason,
            "resource": resource.name if resource else None, "replicas": resource.replicas if resource else 0,
            "pods": None if holders is None else [holder.place() for holder in holders.get(bdf, ())],
            "processes": None if processes is None else [process._asdict() for process in processes],
        }  # fmt: skip


def _as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of 100 columns, where names are of usual length."""
    ids = {"ID": "id"} if any(row["id"] not in (row["bdf"], None) for row in rows) else {}
    keys = {"ADDRESS": "bdf", **ids, "CARD": "card", "SERIAL": "serial", "NUMA": "numa_node", "FIRMWARE": "firmware"}
    lines: list[list[Any]] = [["N", *keys, "RESOURCE", "USED BY", "HEALTH"]]
    for row in rows:
        shared = f" ×{row['replicas']}" if row["replicas"] else ""
        resource = f"{row['resource'].partition('/')[2]}{shared}" if row["resource"] else None
        pods = dict.fromkeys(f"{pod['namespace']}/{pod['pod']}" for pod in row["pods"] or ())
        processes = [f"{p['command']}[{p['pid']}]" for p in row["processes"] or () if not (pods and p["of_pod"])]
        users = ", ".join([*pods, *processes]) or ("-" if None not in (row["pods"], row["processes"]) else "?")
        health = "healthy" if row["healthy"] else f"UNHEALTHY: {row['reason']}"
        number, known = row["index"] if row["path"] else None, (row[key] for key in keys.values())
        lines.append([number, *known, resource, users, health])
    texts = [["-" if cell is None else str(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in texts)


def check(load: Callable[[], Settings], *, config_only: bool) -> int:
    """Preflight for a node; returns 1 if anything FAILs."""
    findings: list[Finding] = [("ok", "configuration", "valid")]
    settings = Settings()
    try:
        settings = load()
    except ConfigError as error:
        more = "" if config_only else "; the rest is checked with the defaults"
        findings = [("FAIL", "configuration", f"{error}{more}")]
    if not config_only:
        fleet, holders = asyncio.run(survey(settings))
        findings += [*_check_driver(settings), *_check_chips(settings, fleet, holders or {})]
        findings += [*_check_hugepages(settings, fleet), *_check_sharing(settings, fleet)]
        findings += [*_check_cdi(settings), *_check_kubelet(settings)]
    width = max(len(subject) for _, subject, _ in findings)
    for level, subject, text in findings:
        print(f"{level:4}  {subject:{width}}  {text}")
    return int(any(level == "FAIL" for level, _, _ in findings))


def _check_driver(settings: Settings) -> Iterator[Finding]:
    version = driver_version(settings)
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None:
        yield "FAIL", "driver", "not loaded; install tt-kmd and run: modprobe tenstorrent"
    elif numbers and (int(numbers[1]), int(numbers[2])) < (2, 7):
        yield "warn", "driver", f"{version} shows no heartbeat: firmware that stops is not noticed; update to 2.7"
    else:
        yield "ok", "driver", version or "loaded; it does not say its version"


def _check_chips(settings: Settings, fleet: Fleet, holders: Holders) -> Iterator[Finding]:
    on_bus = functions_on_bus(settings)
    if not fleet.chips and not fleet.oddities:
        advice = "the driver has none of them" if on_bus else "look for them with: lspci -d 1e52:"
        yield "warn", "devices", f"{len(on_bus) or 'none'} on this node; {advice}"
    for bdf in on_bus if driver_version(settings) is not None else ():
        if bdf not in fleet.chips and not _link_name(f"{settings.sysfs_root}/bus/pci/devices/{bdf}/driver"):
            advice = f"look into dmesg, then: echo {bdf} > /sys/bus/pci/drivers/tenstorrent/bind"
            yield "warn", bdf, f"no driver is bound to it; {advice}"
    for oddity in fleet.oddities:
        yield "FAIL", "devices", f"{oddity}; reload the driver: modprobe -r tenstorrent && modprobe tenstorrent"
    for chip in fleet.chips.values():
        what = f"{chip.card_type or chip.function.arch}, {chip.function.path}"
        if chip.health.fault:
            yield "FAIL", chip.bdf, f"{what}: {chip.health.reason}"
            continue
        yield "ok", chip.bdf, f"{what}, healthy"
        strangers = [p for p in processes_on(settings, chip.function.ordinal) or () if not p.of_pod]
        if (pods := holders.get(chip.bdf)) and strangers:
            who = f"{strangers[0].command} ({strangers[0].pid})"
            yield "warn", chip.bdf, f"{pods[0].pod} was given it, and {who} of the host has it open; end that"
        if (mode := stat.S_IMODE(os.stat(chip.function.path).st_mode)) & 0o666 != 0o666:
            advice = "containers that do not run as root cannot open it; install the driver's udev rules"
            yield "warn", chip.bdf, f"{chip.function.path} has mode {mode:04o}, not 0666: {advice}"


def _check_hugepages(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    """A Wormhole without an IOMMU that translates needs memory in one piece: four pages of 1 GiB for each chip."""
    bus, chips = f"{settings.sysfs_root}/bus/pci/devices", fleet.chips.items()
    wormholes = {bdf: chip for bdf, chip in chips if chip.present and chip.function.arch == "wormhole"}
    groups = {bdf: _read_quick(f"{bus}/{bdf}/iommu_group/type") or "" for bdf in wormholes}
    needy = [chip for bdf, chip in wormholes.items() if not groups[bdf].startswith("DMA")]
    wanted = sum(8 if chip.board_type == "n300" else 4 for chip in needy)
    pages = _read_quick(f"{settings.sysfs_root}/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages")
    there, mounts, directory = _decimal(pages) or 0, "", f"{settings.dev_root}/hugepages-1G"
    with contextlib.suppress(OSError), open(f"{settings.proc_root}/mounts", errors="replace") as file:
        mounts = file.read()
    if needy and there < wanted:
        advice = f"boot with hugepagesz=1G hugepages={wanted}, or install Tenstorrent's tt-system-tools"
        yield "warn", "hugepages", f"{there} of 1 GiB for {len(needy)} Wormholes without IOMMU; {advice}"
    elif needy and not re.search(rf"^\S+ {re.escape(directory)} hugetlbfs ", mounts, re.MULTILINE):
        yield "warn", "hugepages", f"{there} of 1 GiB, but {directory} is not mounted; mount hugetlbfs there"
    else:
        yield "ok", "hugepages", f"{there} of 1 GiB{'' if needy else '; none are needed'}"


def _check_sharing(settings: Settings, fleet: Fleet) -> Iterator[Finding]:
    devices = devices_by_name(fleet.chips.values(), settings)
    for entry in settings.sharing.resources:
        there = devices.get(entry.name, [])
        names = set(entry.devices) if isinstance(entry.devices, tuple) else set()
        if missing := sorted(names.difference(*map(called, there))):
            yield "warn", "sharing", f"{entry.name}: no device is called {_few(missing)}"
        elif not there:
            known = ", ".join(devices) or "none"
            yield "warn", "sharing", f"no device is a {entry.name}; those that there are: {known}"


def _check_cdi(settings: Settings) -> Iterator[Finding]:
    file, by_cdi = f"{settings.cdi_dir}/{CDI_FILE}", settings.device_list_strategy == "cdi"
    if settings.cdi_dir and os.path.exists(file):
        yield "ok", "CDI", f"{file} describes the devices"
    elif by_cdi:
        advice = "which containers need by device_list_strategy; is the service running?"
        yield "FAIL", "CDI", f"there is no {file}, {advice}"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["containerd", "--version"], capture_output=True, text=True, timeout=5).stdout
        version = re.search(r"\bv?(\d+)\.(\d+)\.\d+", said)
        if by_cdi and version and (int(version[1]), int(version[2])) < (1, 7):
            yield "warn", "CDI", f"containerd {version[0]} cannot read CDI files; update to 1.7, or leave device-specs"


def _check_kubelet(settings: Settings) -> Iterator[Finding]:
    directory, kubelet = settings.device_plugin_dir, f"{settings.device_plugin_dir}/{KUBELET_SOCKET}"
    try:
        os.stat(f"{directory}/.")
    except OSError as error:
        advice = "is kubelet installed, and is this its directory? device_plugin_dir in the configuration file says so"
        denied = f"{directory}: you may not look there; run as root"
        yield "warn", "kubelet", denied if error.errno == errno.EACCES else f"{directory} is not there (yet); {advice}"
        return
    if os.access(directory, os.W_OK | os.X_OK):
        yield "ok", "kubelet", f"{directory} can be written to"
    else:
        yield "FAIL", "kubelet", f"{directory} cannot be written to; run as root, and look at its mount"
    if not os.path.exists(kubelet):
        yield "warn", "kubelet", f"{kubelet} is not there; kubelet is not running"
    elif not os.access(kubelet, os.W_OK):
        yield "warn", "kubelet", f"{kubelet} may not be connected to; run as root"
    elif not listens(kubelet):
        yield "warn", "kubelet", f"nobody listens on {kubelet}; kubelet is not running"
    else:
        yield "ok", "kubelet", f"{kubelet} answers"
    # Whether the installed unit, if there is one, lets the daemon write there.
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["systemctl", "show", "--value", "--property=ReadWritePaths", "tt-device-plugin.service"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
        open_paths = [os.path.normpath(path.lstrip("-+")) for path in shown.split()]
        if open_paths and not any(f"{directory}/".startswith(f"{path}/") for path in open_paths):
            yield "FAIL", "sandbox", f"the service may not write to {directory}; a drop-in opens it: {DROP_IN}"


if __name__ == "__main__":
    sys.exit(main())
