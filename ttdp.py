"""tt-device-plugin: makes Tenstorrent accelerators schedulable in Kubernetes, as a host daemon.

One asyncio loop observes, decides and applies (see Daemon). A chapter uses only those above it:

    what the node shows     CONFIGURATION, INVENTORY, HEALTH, CHIPS, ALLOCATIONS
    pure decisions          RESOURCES to REPORTS
    infrastructure          THREADS, FILES, SYSTEMD, KERNEL EVENTS, NODE
    the kubelet's API       REQUESTS, SESSION, POD RESOURCES
    what ties it together   METRICS SERVER, DAEMON, COMMAND LINE
"""

from __future__ import annotations

import _thread  # threading would join blocked threads at exit
import argparse
import asyncio
import base64
import ctypes
import difflib
import errno
import fcntl
import json
import logging
import operator
import os
import queue
import re
import signal
import socket
import stat
import sys
import textwrap
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, combinations, count
from math import inf
from os.path import abspath, basename, dirname, exists, isdir
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import grpc
import sdnotify
from google.protobuf.message import DecodeError

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc
from generated import podresources_pb2

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__version__ = "0.2.0"

Json = dict[str, Any]
Names = frozenset[str]  # resources, IDs or PCI addresses
Task = asyncio.Task[None]

log = logging.getLogger("tt-device-plugin")


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def abbreviate(names: Sequence[str]) -> str:
    """Return the first three names, quoted."""
    shown = ", ".join(repr(name[:63]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# ==== CONFIGURATION: flag, variable, file, default ================================================

DEFAULT_CONFIG_FILE = "/etc/tt-device-plugin/config.toml"
EXIT_CONFIG = 78  # EX_CONFIG
NEEDS_RESTART = ("device_plugin_dir", "sysfs_root", "dev_root", "proc_root")
SOCKET_PATH_MAX = 107  # sun_path without its NUL
PLUGIN_DIR_MAX = SOCKET_PATH_MAX - 43  # a slash, a session's socket name
MISSES_MAX = 1_000_000
TRUE = ("true", "yes", "on", "1")  # in flags and variables
FALSE = ("false", "no", "off", "0")


class ConfigError(Exception):
    """An invalid configuration: source, value and valid values, on one line."""


class Rule(NamedTuple):
    """The values that an option accepts."""

    valid: str  # completes "must be"
    accepts: Callable[[Any], object]
    convert: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()


def _one_of(*choices: str) -> Rule:
    valid = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return Rule(valid, lambda value: value in choices, choices=choices)


def _number(valid: str, least: float, most: float, *kinds: type) -> Rule:
    # By type(): isinstance() takes a boolean for an int.
    return Rule(valid, lambda value: type(value) in kinds and least <= value <= most)


def _text(valid: str, form: str, check: Callable[[str], object] = lambda text: True) -> Rule:
    def accepts(value: Any) -> object:
        return isinstance(value, str) and re.fullmatch(form, value) and check(value)

    return Rule(valid, accepts)


def _path(valid: str, form: str = ".+", most: int = 4095) -> Rule:
    def fits(path: str) -> bool:
        return path.isprintable() and len(os.fsencode(abspath(path or "/"))) <= most

    rule = _text(valid, form, fits)
    return rule._replace(convert=lambda path: abspath(path) if path else "")


def _absolute(valid: str, *forbidden: str) -> Rule:
    def normal(path: str) -> str:
        return os.path.normpath("/" + path.lstrip("/"))  # normpath() alone keeps a leading "//"

    rule = _text(valid, "/.*", lambda path: path.isprintable() and normal(path) not in forbidden)
    return rule._replace(convert=normal)


def _is_selection(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(item) in (str, int) for item in value)
    return value == "all" or (type(value) is int and value >= 1)


_SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
_SWITCH_AS_TEXT = _one_of(*TRUE, *FALSE)._replace(convert=lambda text: text in TRUE)
_RESERVED = ("/", "/dev", "/proc", "/sys", "/dev/tenstorrent")
_TARGET = _absolute(f"an absolute path other than {', '.join(_RESERVED)}", *_RESERVED)
_DIRECTORY = _path("the path of a directory")
_OR_NONE = _path("a path, or empty", ".*")
_SOCKET = _path(f"a unix socket's path of at most {SOCKET_PATH_MAX} bytes", most=SOCKET_PATH_MAX)
_PLUGIN_DIR = _path(f"a path of at most {PLUGIN_DIR_MAX} bytes", most=PLUGIN_DIR_MAX)
_RESOURCE_NAME = _text(
    "the name of a resource, such as n300 or tenstorrent.com/n300",
    "([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
)
# With "requests." before it, a DNS subdomain of 253 characters (IsExtendedResourceName).
_DOMAIN = _text(
    "a lower-case DNS name outside kubernetes.io, such as tenstorrent.com",
    r"(?!requests\.)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
    lambda text: len(text) <= 244 and "kubernetes.io" not in text,
)
_SELECTION = Rule(
    '"all", a count, or a list of PCI addresses, board IDs or device numbers',
    _is_selection,
    lambda value: tuple(map(str, value)) if isinstance(value, list) else value,
)
_LIMIT = Rule(
    'a number of °C from 1 to 200, or "card"',
    lambda value: value == "card" or (type(value) in (int, float) and 1 <= value <= 200),
)
_PARTITIONING = ("memory_gb", "memory", "mps", "cores", "timeslice")  # other plugins' keys
_OWN_NAME = re.compile(r"([np]\d+[a-z]?|(galaxy-)?(wormhole|blackhole))(-board)?")


def _key(default: Any, rule: Rule, help: str) -> Any:
    return field(default=default, metadata={"rule": rule, "help": help})


def _section(default: Any, kind: type) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount for every container with a device."""

    host: str = _key(MISSING, _absolute("an absolute path"), "path on the host")
    container: str = _key("", _TARGET, "path in the container; default: the same path")
    read_only: bool = _key(False, _SWITCH, "mount it read-only")


Mounts = tuple[Mount, ...]


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Section [health]."""

    interval: float = _key(  # a heartbeat takes 0.1 s
        5.0,
        _number("a number of seconds from 0.1 to 3600", 0.1, 3600, int, float),
        "seconds between two polls",
    )
    temperature_limit: Any = _key(
        None, _LIMIT, '°C from which a chip is too hot, or "card" for its own limit; default: none'
    )
    heartbeat_misses: int = _key(
        2,
        _number("a whole number of polls, at least 1", 1, MISSES_MAX, int),
        "polls in a row without a heartbeat after which the firmware has stopped",
    )
    trip_holdoff: float = _key(
        300.0,
        _number("a number of seconds, at least 0", 0, 1e9, int, float),
        "seconds after a thermal trip until a chip is healthy again",
    )


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An entry [[sharing.resources]]: several containers per device."""

    name: str = _key(MISSING, _RESOURCE_NAME, "unshared name of the resource")
    replicas: int = _key(
        MISSING, _number("a whole number from 2 to 100", 2, 100, int), "containers per device"
    )
    rename: str | None = _key(None, _RESOURCE_NAME, "name of the shared resource")
    devices: str | int | tuple[str, ...] = _key(
        "all", _SELECTION, "devices to share; the others stay exclusive"
    )

    @property
    def listed(self) -> Names:
        """Return the devices that it selects one by one."""
        return frozenset(self.devices if isinstance(self.devices, tuple) else ())


@dataclass(frozen=True, slots=True)
class Sharing:
    """Section [sharing]."""

    rename_by_default: bool = _key(False, _SWITCH, "append .shared to names of shared resources")
    fail_requests_greater_than_one: bool = _key(
        True, _SWITCH, "refuse a container that requests more than one replica"
    )
    lock_dir: str = _key(
        "/run/ttdp/shm",
        _OR_NONE,
        "host directory that containers on shared devices get as /dev/shm, for their locks; "
        "/dev/shm: the host's own, but logind deletes files there; empty: no common locks",
    )
    resources: tuple[SharedResource, ...] = _section((), SharedResource)

    def shared_name(self, entry: SharedResource) -> str:
        return entry.rename or (f"{entry.name}.shared" if self.rename_by_default else entry.name)


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration. Every path is absolute."""

    device_plugin_dir: str = _key(
        "/var/lib/kubelet/device-plugins", _PLUGIN_DIR, "the kubelet's device plugin directory"
    )
    sysfs_root: str = _key("/sys", _DIRECTORY, "mount point of sysfs")
    dev_root: str = _key("/dev", _DIRECTORY, "directory of the device files")
    proc_root: str = _key("/proc", _DIRECTORY, "mount point of procfs")
    resource_domain: str = _key("tenstorrent.com", _DOMAIN, "domain of all resource names")
    resource_naming: str = _key(
        "board",
        _one_of("board", "card", "arch"),
        "name resources after the board (n300, p150), card (p150a) or arch (wormhole)",
    )
    visible_devices: str = _key(
        "bdf",
        _one_of("bdf", "index", "none"),
        "value of TT_VISIBLE_DEVICES: bdf, index (0 to n-1 in the container) or none (not set)",
    )
    unit: str = _key(
        "chip",
        _one_of("chip", "board"),
        "one device is one chip, or one board (a p300's 2 chips, a Galaxy tray's 8)",
    )
    device_list_strategy: str = _key(
        "device-specs",
        _one_of("device-specs", "cdi"),
        "containers get device files by device-specs (from the kubelet) or cdi (from CDI files)",
    )
    cdi_dir: str = _key("/var/run/cdi", _OR_NONE, "directory of CDI files; empty: no file")
    labels_dir: str = _key(
        "/etc/kubernetes/node-feature-discovery/features.d",
        _OR_NONE,
        "directory of feature files for node-feature-discovery; empty: no file",
    )
    metrics_file: str = _key(
        "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
        _OR_NONE,
        "metrics for node_exporter's textfile collector; empty: no file",
    )
    pod_resources_socket: str = _key(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        _SOCKET,
        "socket of the kubelet's pod resources API, the source of pod names",
    )
    fail_on_init_error: bool = _key(
        False, _SWITCH, "exit with status 1 if there is no driver or device at start"
    )
    log_level: str = _key(
        "info", _one_of("debug", "info", "warning", "error"), "minimum level to log"
    )
    health: HealthSettings = _section(HealthSettings(), HealthSettings)
    sharing: Sharing = _section(Sharing(), Sharing)
    mounts: Mounts = _section((), Mount)  # (): the hugepages below dev_root
    state_dir: str | None = None  # systemd's StateDirectory=; None: state is not saved
    runtime_dir: str | None = None  # systemd's RuntimeDirectory=; None: no status socket


class Option(NamedTuple):
    """A setting with a flag and a variable."""

    key: str
    flag: str
    variable: str
    rule: Rule
    help: str
    is_switch: bool


def _flag_and_variable(key: str) -> tuple[str, str]:
    return f"--{key.replace('_', '-')}", f"TTDP_{key.upper()}"


def _option(key: str, rule: Rule, help: str) -> Option:
    return Option(key, *_flag_and_variable(key), rule, help, is_switch=rule is _SWITCH)


OPTIONS = [_option(key.name, **key.metadata) for key in fields(Settings) if "rule" in key.metadata]
Flags = Mapping[str, str | None]
Environment = Mapping[str, str]


def load_settings(flags: Flags, environ: Environment, *, ignore_file: bool = False) -> Settings:
    """Return the settings; raises ConfigError."""
    named_by, path = _given("config_file", flags, environ)
    if path == "":
        raise _invalid(named_by, path, "the path of a file")
    file = path or DEFAULT_CONFIG_FILE
    shown = file if file.isprintable() else repr(file)
    values = {} if ignore_file else _read_config_file(file, shown, named_by if path else "")
    sources = {key: f"{shown}: {key}" for key in values}
    for key in ("state", "runtime"):
        directory = environ.get(f"{key.upper()}_DIRECTORY", "").partition(":")[0]
        values[f"{key}_dir"] = directory or None
    for option in OPTIONS:
        source, text = _given(option.key, flags, environ)
        if text is not None:
            rule = _SWITCH_AS_TEXT if option.is_switch else option.rule
            value = text.lower() if option.is_switch else text
            values[option.key] = _checked(rule, value, source)
            sources[option.key] = source
    settings = Settings(**values)
    if settings.device_list_strategy == "cdi" and not settings.cdi_dir:
        raise _invalid(sources["device_list_strategy"], "cdi", "device-specs if cdi_dir is empty")
    mounts = _checked_mounts(settings, f"{shown}: [[mounts]] container")
    sharing = _checked_sharing(settings, f"{shown}: [[sharing.resources]] ")
    return replace(settings, mounts=mounts, sharing=sharing)


def _given(key: str, flags: Flags, environ: Environment) -> tuple[str, str | None]:
    """Return a flag's or else a variable's name and text."""
    flag, variable = _flag_and_variable(key)
    if (text := flags.get(key)) is not None:
        return flag, text
    return variable, environ.get(variable) or None


def _invalid(source: str, value: object, valid: str) -> ConfigError:
    try:
        shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or brackets
        shown = f"this {type(value).__name__}"
    shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
    return ConfigError(f"{source}: {shown} is not valid; must be {valid}")


def _checked(rule: Rule, value: object, source: str) -> Any:
    with suppress(OSError, ValueError):  # no working directory; thousands of digits
        if rule.accepts(value):
            return rule.convert(value)
    raise _invalid(source, value, rule.valid)


def _read_config_file(path: str, shown: str, named_by: str) -> Json:
    """Return arguments for Settings. named_by: what named this path."""
    try:
        with open(path, "rb") as file:
            document = tomllib.loads(file.read().decode("utf-8-sig"))
    except FileNotFoundError:
        if not named_by:
            return {}
        raise ConfigError(f"{named_by}: {shown} does not exist; must be a TOML file") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ConfigError(f"{shown}: {reason}; must be a readable TOML file") from None
    except (ValueError, RecursionError) as error:  # no UTF-8; a thousand brackets
        reason = " ".join(str(error).split())
        example = 'lines in UTF-8 such as: unit = "board"'
        raise ConfigError(f"{shown}: invalid TOML: {reason}; must be {example}") from None
    return _arguments(f"{shown}: ", "", document, Settings)


def _arguments(file: str, heading: str, table: object, kind: Any) -> Json:
    """Return arguments for a dataclass. heading: "[health]"; "": the whole file."""
    name = heading.strip("[]")
    if not isinstance(table, dict):
        raise _invalid(f"{file}{name}", table, f"a table: {heading}")
    source = f"{file}{heading} " if heading else file
    known = {key.name: key for key in fields(kind) if key.metadata}
    values = {}
    for key, each in known.items():
        if each.default is MISSING and key not in table:
            raise ConfigError(f"{source}{key} is missing")
    for key, value in table.items():
        if key in _PARTITIONING:
            valid = "removed: a chip cannot be partitioned, only time-shared"
            raise _invalid(f"{source}{key}", value, valid)
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            nearest = f"; did you mean {near[0]}?" if near else ""
            keys = f"valid keys: {', '.join(known)}"
            raise ConfigError(f"{source}{key!r} is not a known key{nearest}; {keys}")
        metadata = known[key].metadata
        inner = metadata.get("kind")
        section = f"{name}.{key}".lstrip(".")
        if inner is None:
            values[key] = _checked(metadata["rule"], value, f"{source}{key}")
        elif known[key].default != ():
            values[key] = inner(**_arguments(file, f"[{section}]", value, inner))
        elif isinstance(value, list):
            tables = [_arguments(file, f"[[{section}]]", each, inner) for each in value]
            values[key] = tuple(inner(**each) for each in tables)
        else:
            raise _invalid(f"{file}{section}", value, f"tables: [[{section}]]")
    return values


def _checked_mounts(settings: Settings, source: str) -> Mounts:
    mounts = {}
    has_locks = settings.sharing.resources and settings.sharing.lock_dir
    for mount in settings.mounts:
        target = _checked(_TARGET, mount.container or mount.host, source)
        if target in mounts:
            raise _invalid(source, target, "a different path in each table")
        if target == "/dev/shm" and has_locks:
            raise _invalid(source, target, "another path: shared devices have their locks there")
        mounts[target] = replace(mount, container=target)
    return tuple(mounts.values())


def _checked_sharing(settings: Settings, source: str) -> Sharing:
    sharing = settings.sharing
    entries: list[SharedResource] = []
    for entry in sharing.resources:
        for name in filter(None, (entry.name, entry.rename)):
            if "/" in name and not name.startswith(f"{settings.resource_domain}/"):
                raise ConfigError(f"{source}{name}: its domain is not {settings.resource_domain}")
        rename = basename(entry.rename or "") or None
        entry = replace(entry, name=basename(entry.name), rename=rename)
        if conflict := _sharing_conflict(sharing, entry, entries):
            raise ConfigError(f"{source}{entry.name}: {conflict}")
        entries.append(entry)
    return replace(sharing, resources=tuple(entries))


def _sharing_conflict(
    sharing: Sharing, entry: SharedResource, others: Sequence[SharedResource]
) -> str | None:
    shared = sharing.shared_name(entry)
    if len(shared) > 63:
        return f"{shared} is longer than the 63 characters of a resource's name"
    if entry.devices != "all" and shared == entry.name:
        return "set rename: the exclusive devices keep this name"
    if shared != entry.name and _OWN_NAME.fullmatch(shared):
        return f"{shared} can be another resource's name; choose another one for rename"
    for other in others:
        if sharing.shared_name(other) == shared:
            return f"{shared} is the name of two entries; choose another one for rename"
        duplicates = entry.listed & other.listed
        if other.name == entry.name and ("all" in (entry.devices, other.devices) or duplicates):
            return f"{abbreviate(sorted(duplicates)) or 'every device'} is selected twice"
    return None


# ==== INVENTORY: sysfs and /proc. Devices are never opened: that powers them up ===================

VENDOR = 0x1E52
ARCHES = {0x401E: "wormhole", 0xB140: "blackhole"}  # by PCI device ID
DRIVER = "tenstorrent"

# By PCI subsystem ID (tt-kmd's telemetry.c), until the firmware reports the card type.
CARDS = {
    0x14: "n300",
    0x18: "n150",
    0x35: "galaxy-wormhole",
    0x36: "p100",
    0x40: "p150a",
    0x41: "p150b",
    0x42: "p150c",
    0x43: "p100a",
    0x44: "p300b",
    0x45: "p300a",
    0x46: "p300c",
    0x47: "galaxy-blackhole",
    0x202: "galaxy-blackhole",  # with 7 of 8 memory tiles
}

# MiB of GDDR6 behind one device file, by board.
MEMORY = {
    "n150": 12288,
    "n300": 24576,
    "p100": 28672,
    "p150": 32768,
    "p300": 32768,
    "galaxy-wormhole": 12288,
    "galaxy-blackhole": 32768,
}
MEMORY_BY_SUBSYSTEM = {0x202: 28672}

ALL_ONES = 0xFFFFFFFF  # a register of a dead chip
DEAD_TEMPERATURE = 65535999  # m°C: all ones, converted by hwmon
DEAD_VOLTAGE = 65535  # mV: likewise, of in0_max
DEAD_VALUE = 2**32 - 10**6  # the least of all ones' other conversions

ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ELOOP)
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # the daemon's

UDEV_RULE = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"  # makes /dev/tenstorrent/by-pci
BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
FileIdentity = tuple[int, int, int]
Result = TypeVar("Result")


class PciFunction(NamedTuple):
    """A PCI function of a card, and its device file."""

    bdf: str  # PCI address "0000:03:00.0"
    arch: str | None = None  # None: only its address is known
    subsystem: int = 0  # PCI subsystem ID
    numa_node: int | None = None  # None: unknown to the platform
    directory: str = ""  # in sysfs
    driver: str | None = None  # "": none is bound; None: not on the bus
    ordinal: int | None = None  # N of /dev/tenstorrent/N
    path: str = ""  # device file on the host
    file_fault: str | None = None  # why the device file is invalid

    @property
    def sysfs(self) -> str:
        """Return the directory of its class device, with the tt_* attributes."""
        return f"{self.directory}/{DRIVER}/{DRIVER}!{self.ordinal}"

    def is_same_card(self, other: PciFunction) -> bool:
        return (self.arch, self.subsystem) == (other.arch, other.subsystem)

    def without_device(self, driver: str | None) -> PciFunction:
        return self._replace(driver=driver, ordinal=None, path="", file_fault=None)


Bus = dict[str, PciFunction | None]  # by address; None: another vendor's


class Identity(NamedTuple):
    """What the firmware reports of a chip; None: not reported."""

    card: str | None = None  # "p150a"
    serial: str | None = None  # the board's, 16 hex digits
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # the bundle's version, "19.4.0.0"


class Telemetry(NamedTuple):
    """Firmware telemetry of a chip; None: not offered, or all ones."""

    identity: Identity = Identity()
    heartbeat: int | None = None  # changes while the firmware runs
    temperature: float | None = None  # °C
    throttles_at: float | None = None  # °C, hwmon's temp1_max
    trips: int | None = None  # thermal trips (Blackhole)
    all_ones: bool = False  # every register reads as ones
    error: tuple[str, int] | None = None  # the attribute, and errno


ProcessRow = dict[str, object]  # pid, command, of_pod


class Reading(NamedTuple):
    """What was read of a chip."""

    function: PciFunction
    telemetry: Telemetry
    at: float  # seconds of a monotonic clock
    periodic: bool = True  # by a poll, not an event
    sensors: Mapping[str, float] | None = None  # None: not read, nor processes
    processes: Sequence[ProcessRow] | None = None  # None: unknown


@lru_cache(maxsize=1024)  # every poll sorts by it
def address(bdf: str) -> tuple[int, ...]:
    """Return a PCI address as numbers."""
    return tuple(int(part, 16) for part in re.split("[:.]", bdf))


def if_exists(look: Callable[[str], Result], path: str) -> Result | None:
    """Return look(path), None if nothing is there."""
    try:
        return look(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def file_identity(path: str) -> FileIdentity | None:
    """Return device, inode and time: inodes are reused."""
    status = if_exists(os.stat, path)
    if status is None:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns)


def names_in(directory: str) -> list[str]:
    return if_exists(os.listdir, directory) or []


def read_attribute(path: str) -> str | None:
    """Return an attribute's text, None if it does not exist."""
    with closing(AttributeFiles()) as files:
        return if_exists(files.read, path)


def try_read(path: str) -> str | None:
    """Return a file's text, None on any error."""
    with suppress(OSError), open(path, "rb", 0) as file:
        return file.read().decode("utf-8", "replace").strip()
    return None


def decimal(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("-?[0-9]{1,20}", text) else None


def _below(most: int, text: str | None) -> int | None:
    number = decimal(text)
    return number if number is not None and 0 <= number < most else None


def _celsius(text: str | None) -> float | None:
    millidegrees = _below(DEAD_TEMPERATURE, text)
    return millidegrees / 1000 if millidegrees else None


def _pci_id(path: str) -> int:
    text = read_attribute(path) or ""
    return int(text, 16) if re.fullmatch("0x[0-9a-f]{1,8}", text) else 0


def driver_version(settings: Settings) -> str | None:
    """Return the loaded driver's version, or "unknown"; None: not loaded."""
    module = f"{settings.sysfs_root}/module/{DRIVER}"
    is_loaded = isdir(module) or isdir(f"{settings.sysfs_root}/class/{DRIVER}")
    return (try_read(f"{module}/version") or "unknown") if is_loaded else None


def can_be_bound(function: PciFunction) -> bool:
    """Return whether the driver has, or can have, a function."""
    override = try_read(f"{function.directory}/driver_override")
    driver = function.driver or override or DRIVER
    return function.driver is not None and driver in (DRIVER, "(null)")


def pci_directory(settings: Settings, bdf: str = "") -> str:
    return f"{settings.sysfs_root}/bus/pci/devices/{bdf}"


def scan(settings: Settings, known: Bus) -> Bus:
    """Return the PCI functions. known: the last result."""
    found = {}
    for bdf in filter(BDF.fullmatch, names_in(pci_directory(settings))):
        function = known[bdf] if bdf in known else _read_function(settings, bdf)
        found[bdf] = _with_device(settings, function) if function else None
    return found


def _read_function(settings: Settings, bdf: str) -> PciFunction | None:
    directory = pci_directory(settings, bdf)
    if _pci_id(f"{directory}/vendor") != VENDOR:
        return None
    arch = ARCHES.get(_pci_id(f"{directory}/device"))
    subsystem = _pci_id(f"{directory}/subsystem_device")
    numa_node = _below(ALL_ONES, read_attribute(f"{directory}/numa_node"))
    return PciFunction(bdf, arch, subsystem, numa_node, directory) if arch else None


def _with_device(settings: Settings, function: PciFunction) -> PciFunction:
    """Return a function with its present driver and device file."""
    if function.path and not function.file_fault and not file_fault_now(function):
        return function
    # Not from the class: after a renumbering, a name there leads to another chip.
    for name in names_in(f"{function.directory}/{DRIVER}"):
        ordinal = decimal(name.removeprefix(f"{DRIVER}!"))
        if ordinal is not None:
            path = f"{settings.dev_root}/{DRIVER}/{ordinal}"
            function = function._replace(driver=DRIVER, ordinal=ordinal, path=path)
            return function._replace(file_fault=file_fault_now(function))
    driver = if_exists(os.readlink, f"{function.directory}/driver")
    return function.without_device(basename(driver or ""))


def file_fault_now(function: PciFunction) -> str | None:
    """Return why a device file cannot be used."""
    path = function.path
    number = read_attribute(f"{function.sysfs}/dev")
    status = if_exists(os.stat, path)
    if number is None:
        return f"{path} is being removed"
    if status is None:
        return f"{path} does not exist"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a character device"
    found = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return None if found == number else f"{path} is device {found}, but sysfs has {number}"


def processes_on(settings: Settings, ordinal: int) -> list[ProcessRow] | None:
    """Return the openers of a device file, None: unknown (driver before 2.5). Can block."""
    proc = settings.proc_root
    text = try_read(f"{proc}/driver/{DRIVER}/{ordinal}/pids")
    pids = {*map(int, re.findall(r"\d+", text or ""))}
    if text is None or 0 in pids:  # 0: of another PID namespace
        return None
    rows = []
    for pid in sorted(pids):
        of_pod = "kubepods" in (try_read(f"{proc}/{pid}/cgroup") or "")
        command = try_read(f"{proc}/{pid}/comm") or "?"  # hidden, or only a child still runs
        rows.append({"pid": pid, "command": command, "of_pod": of_pod})
    return rows


def link_path(settings: Settings, function: PciFunction) -> str | None:
    """Return udev's link to a chip's device file, if it points there now."""
    # Runtimes resolve it for each container (containerd 1.6, 2.1): it outlives a renumbering.
    link = f"{settings.dev_root}/{DRIVER}/by-pci/{function.bdf}"
    with suppress(OSError):
        if os.readlink(link) in (f"../{function.ordinal}", function.path):
            return link
    return None


def expects_links(settings: Settings) -> bool:
    """Return whether the package's udev rule is in force."""
    if settings.dev_root == "/dev" and exists(UDEV_RULE):
        return True
    return isdir(f"{settings.dev_root}/{DRIVER}/by-pci")


def existing_mounts(settings: Settings) -> Mounts:
    """Return the configured mounts; without any, those hugepages that exist."""
    names = ("hugepages-1G", "hugepages")
    defaults = (Mount(f"{settings.dev_root}/{name}", f"/dev/{name}") for name in names)
    return settings.mounts or tuple(each for each in defaults if exists(each.host))


class AttributeFiles:
    """Attributes of a chip, kept open between polls: that halves a poll's cost."""

    def __init__(self) -> None:
        self._hwmon = ""
        self._open: dict[str, int] = {}

    def hwmon(self, function: PciFunction) -> str:
        """Return the directory of the sensors: its number has no meaning."""
        directory = f"{function.directory}/hwmon"
        if not self._hwmon and (names := names_in(directory)):
            self._hwmon = f"{directory}/{min(names)}"
        return self._hwmon

    def read(self, path: str) -> str:
        try:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            return os.pread(self._open[path], 4096, 0).decode("ascii", "replace").strip()
        except OSError as error:
            error.filename = path
            raise

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._hwmon = ""


_ID = "(?!0{16})(?!F{8})[0-9A-F]{8}(?!F{8})[0-9A-F]{8}"  # a half can be all ones during a reset
_IDENTITY = {  # attributes and forms by Identity's fields
    "tt_card_type": "(?!unknown)[a-z][a-z0-9-]{0,40}[a-z0-9]",
    "tt_serial": _ID,
    "tt_asic_id": _ID,
    "tt_fw_bundle_ver": r"(?!0\.0\.0\.0|255\.255\.)\d{1,5}(\.\d{1,5}){1,4}",
}
_DEAD = {  # values of a chip that does not respond
    "tt_heartbeat": str(ALL_ONES),
    "tt_card_type": "unknown",
    "tt_serial": "F" * 16,
    "tt_asic_id": "F" * 16,
    "temp1_input": str(DEAD_TEMPERATURE),
}
_TT_ATTRIBUTES = ("tt_heartbeat", *_IDENTITY, "tt_therm_trip_count")


def parse_telemetry(raw: Mapping[str, str]) -> Telemetry:
    shown = [raw[name] == dead for name, dead in _DEAD.items() if name in raw]
    if len(shown) > 1 and all(shown):
        return Telemetry(all_ones=True)
    identity = []
    for name, form in _IDENTITY.items():
        text = raw.get(name, "")
        identity.append(text if re.fullmatch(form, text) else None)
    return Telemetry(
        Identity(*identity),
        decimal(raw.get("tt_heartbeat")),  # even all ones: it stalls
        _celsius(raw.get("temp1_input")),
        _celsius(raw.get("temp1_max")),
        _below(ALL_ONES, raw.get("tt_therm_trip_count")),
    )


def read_telemetry(function: PciFunction, files: AttributeFiles) -> Telemetry:
    """Read a chip's telemetry; raises OSError for OWN_ERRORS only. Can block for ten seconds."""
    try:
        return _read_attributes(function, files)
    except OSError as error:
        files.close()
        if error.errno in OWN_ERRORS:
            raise
        return Telemetry(error=(basename(error.filename or function.sysfs), error.errno or 0))


def _read_attributes(function: PciFunction, files: AttributeFiles) -> Telemetry:
    hwmon = files.hwmon(function)
    raw = {}
    for name in (*_TT_ATTRIBUTES, "temp1_input", "temp1_max"):
        directory = hwmon if name.startswith("temp1") else function.sysfs
        try:
            raw[name] = files.read(f"{directory}/{name}")
        except OSError as error:
            # ENODATA of the heartbeat is a reset, another's a tag no longer reported.
            is_missing = error.errno == errno.ENODATA and name != "tt_heartbeat"
            if not is_missing and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
    if raw:
        return parse_telemetry(raw)
    if not isdir(function.sysfs):
        return Telemetry(error=(basename(function.sysfs), errno.ENODEV))
    # Late firmware, or a chip that was dead when the driver was bound.
    with suppress(OSError), open(f"{function.directory}/config", "rb", 0) as config:
        return Telemetry(all_ones=config.read(4) == b"\xff" * 4)
    return Telemetry()


class Sensor(NamedTuple):
    """A value that only metrics have."""

    attribute: str
    metric: str  # without "tt_device_"
    help: str
    factor: float = 1.0  # to the metric's unit
    labels: Mapping[str, object] = {}


_CLOCK = "Clock frequency in hertz."
_ERRORS = "PCIe errors reported by AER, by severity."
_SPEED = "pcie_link_transfers_per_second"
_SPEED_HELP = "PCIe link speed in transfers per second."
# hwmon: µW, mA, mV and rpm; tt_*: MHz (tt-kmd's telemetry.c).
SENSORS = (
    Sensor("power1_input", "power_watts", "Power draw in watts.", 1e-6),
    Sensor("power1_max", "power_limit_watts", "Power limit in watts.", 1e-6),
    Sensor("curr1_input", "current_amperes", "Core current in amperes.", 1e-3),
    Sensor("curr1_max", "current_limit_amperes", "Core current limit in amperes.", 1e-3),
    Sensor("in0_input", "voltage_volts", "Core voltage in volts.", 1e-3),
    Sensor("in0_max", "voltage_limit_volts", "Core voltage limit in volts.", 1e-3),
    Sensor("fan1_input", "fan_rpm", "Fan speed in revolutions per minute."),
    Sensor("tt_aiclk", "clock_hertz", _CLOCK, 1e6, {"clock": "aiclk"}),
    Sensor("tt_axiclk", "clock_hertz", _CLOCK, 1e6, {"clock": "axiclk"}),
    Sensor("tt_arcclk", "clock_hertz", _CLOCK, 1e6, {"clock": "arcclk"}),
    Sensor("current_link_width", "pcie_link_width", "Current PCIe link width in lanes."),
    Sensor("max_link_width", "pcie_link_width_max", "Maximum PCIe link width in lanes."),
    Sensor("current_link_speed", _SPEED, f"Current {_SPEED_HELP}", 1e9),
    Sensor("max_link_speed", f"{_SPEED}_max", f"Maximum {_SPEED_HELP}", 1e9),
    Sensor("aer_dev_correctable", "pcie_errors_total", _ERRORS, 1, {"severity": "correctable"}),
    Sensor("aer_dev_nonfatal", "pcie_errors_total", _ERRORS, 1, {"severity": "nonfatal"}),
    Sensor("aer_dev_fatal", "pcie_errors_total", _ERRORS, 1, {"severity": "fatal"}),
)


def read_sensors(function: PciFunction, hwmon: str) -> dict[str, float]:
    """Return sensor values by attribute, in the metric's unit. Can block."""
    values = {}
    for sensor in SENSORS:
        name = sensor.attribute
        directory = function.directory
        if name.startswith("tt_"):
            directory = function.sysfs
        elif name.startswith(("power1", "curr1", "in0", "fan1")):
            directory = hwmon
        with suppress(OSError):
            value = _sensor_value(name, read_attribute(f"{directory}/{name}") or "")
            if value is not None:
                values[name] = value * sensor.factor
    return values


def _sensor_value(attribute: str, text: str) -> float | None:
    most = {"in0_max": DEAD_VOLTAGE, "current_link_width": 63, "max_link_width": 63}
    if attribute.endswith("_link_speed"):
        match = re.match(r"(\d+(?:\.\d+)?) GT/s", text)  # "16.0 GT/s PCIe"; "Unknown"
    elif attribute.startswith("aer_"):
        match = re.search(r"^TOTAL_\w+ (\d+)$", text, re.MULTILINE)
    else:
        return _below(most.get(attribute, DEAD_VALUE), text)
    return float(match[1]) if match else None


# ==== HEALTH: per chip, with a reason. Pure =======================================================

HYSTERESIS = 5.0  # °C by which a hot chip must cool down
READ_TIMEOUT = 2.0  # seconds after which a telemetry read counts as blocked
FIRMWARE_TIMEOUT = 10.0  # seconds without telemetry after a rebind


class Fault(Enum):
    """Why a chip is unhealthy. Each change of it is logged."""

    GONE = "gone"
    NODE = "node"
    RESETTING = "resetting"
    NO_RESPONSE = "no_response"
    BLOCKED = "blocked"
    READ_ERROR = "read_error"
    STALLED = "stalled"
    HOT = "hot"
    TRIPPED = "tripped"
    SILENT = "silent"


_BIND = "/sys/bus/pci/drivers/tenstorrent"
_RESET = "reset it: tt-smi -r {bdf}"  # without an address tt-smi resets every card
LOAD_DRIVER = "run: modprobe tenstorrent"
REMEDIES = {
    Fault.NODE: "remove the file that is there, then run: "
    "udevadm trigger --subsystem-match=tenstorrent",
    Fault.RESETTING: "if this persists, rebind the driver: "
    f"cd {_BIND} && echo {{bdf}} > unbind && echo {{bdf}} > bind",
    Fault.NO_RESPONSE: _RESET,
    Fault.BLOCKED: f"if this persists, {_RESET}",
    Fault.READ_ERROR: _RESET,
    Fault.STALLED: _RESET,
    Fault.HOT: "check its cooling",
    Fault.TRIPPED: "check its cooling",
    Fault.SILENT: _RESET,
}


class Verdict(NamedTuple):
    """Health of a chip by its telemetry."""

    fault: Fault | None = None
    problem: str | None = None  # without remedy
    throttles: bool = False  # it has reached its own limit


class Vitals(NamedTuple):
    """Values that the next verdict depends on."""

    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change
    hot: bool = False  # at the operator's limit
    trips: int | None = None
    tripped_at: float | None = None  # when trips last rose
    empty_since: float | None = None  # since when telemetry has been missing


_BY_ERRNO = {
    errno.ENODATA: Verdict(Fault.RESETTING, "resetting (no telemetry)"),
    errno.ENODEV: Verdict(Fault.GONE, "device is being removed"),
}


def judge(
    verdict: Verdict, vitals: Vitals, reading: Reading, settings: HealthSettings, *, was_seen: bool
) -> tuple[Verdict, Vitals]:
    """Judge a chip by a reading. was_seen: it had telemetry since boot."""
    telemetry = reading.telemetry
    if telemetry.error:
        attribute, number = telemetry.error
        problem = f"telemetry cannot be read: {attribute}: {os.strerror(number)}"
        return _BY_ERRNO.get(number, Verdict(Fault.READ_ERROR, problem)), vitals
    if telemetry.all_ones:
        return Verdict(Fault.NO_RESPONSE, "chip does not respond (registers read as ones)"), vitals
    if telemetry == Telemetry() and was_seen:  # the driver was rebound
        since = reading.at if vitals.empty_since is None else vitals.empty_since
        if reading.at - since >= FIRMWARE_TIMEOUT:
            verdict = Verdict(Fault.SILENT, "no telemetry since the driver was rebound")
        return verdict, vitals._replace(empty_since=since)
    limit = settings.temperature_limit
    if limit == "card":
        limit = telemetry.throttles_at
    throttles = _reaches(telemetry.temperature, telemetry.throttles_at, verdict.throttles)
    vitals = _next_vitals(vitals, reading, limit)
    return Verdict(*_judge_vitals(vitals, reading, settings, limit), throttles), vitals


def _next_vitals(vitals: Vitals, reading: Reading, limit: float | None) -> Vitals:
    telemetry = reading.telemetry
    # Any change shows life: resets restart heartbeats. Only polls are far enough apart.
    beats = telemetry.heartbeat is None or telemetry.heartbeat != vitals.heartbeat
    trips = vitals.trips if telemetry.trips is None else telemetry.trips
    rose = trips is not None and vitals.trips is not None and trips > vitals.trips
    return Vitals(
        heartbeat=telemetry.heartbeat if reading.periodic else vitals.heartbeat,
        misses=0 if beats else vitals.misses + reading.periodic,
        hot=_reaches(telemetry.temperature, limit, vitals.hot),
        trips=trips,
        tripped_at=reading.at if rose else vitals.tripped_at,
    )


def _reaches(degrees: float | None, limit: float | None, before: bool) -> bool:
    """Return whether a chip is too hot. before: it was."""
    if degrees is None or limit is None:
        return False
    return degrees >= limit or (before and degrees > limit - HYSTERESIS)


def _judge_vitals(
    vitals: Vitals, reading: Reading, settings: HealthSettings, limit: float | None
) -> tuple[Fault | None, str | None]:
    telemetry = reading.telemetry
    holdoff = settings.trip_holdoff
    if vitals.misses >= settings.heartbeat_misses:
        return Fault.STALLED, f"heartbeat stalled at {telemetry.heartbeat} (firmware stopped)"
    if vitals.hot:
        return Fault.HOT, f"too hot: {telemetry.temperature:.1f} °C, limit {limit:g} °C"
    if vitals.tripped_at is not None and reading.at - vitals.tripped_at < holdoff:
        again = f"healthy again after {holdoff:g} s without another"
        return Fault.TRIPPED, f"thermal trip ({vitals.trips} so far; {again})"
    return None, None


# ==== CHIPS: followed over time ===================================================================


class Chip(NamedTuple):
    """A Tenstorrent PCI function, known until the daemon ends."""

    function: PciFunction
    identity: Identity = Identity()  # as last reported
    verdict: Verdict = Verdict()
    seen: bool = False  # it had a device file since boot
    listed: bool = False  # it is a device of a resource
    reason: str | None = None  # why it is unhealthy; see explain()

    @property
    def bdf(self) -> str:
        return self.function.bdf

    @property
    def label(self) -> str:
        return f"{self.bdf} ({self.card_type or self.function.arch or 'unknown card'})"

    @property
    def present(self) -> bool:
        """Return whether it has a device file."""
        return self.function.ordinal is not None

    @property
    def fault(self) -> Fault | None:
        if not self.present:
            return Fault.GONE
        return Fault.NODE if self.function.file_fault else self.verdict.fault

    @property
    def is_readable(self) -> bool:
        dead = (Fault.GONE, Fault.BLOCKED, Fault.NO_RESPONSE, Fault.RESETTING, Fault.READ_ERROR)
        return self.fault not in dead

    @property
    def card_type(self) -> str | None:
        """Return the exact card type, "p150a"."""
        return self.identity.card or CARDS.get(self.function.subsystem)

    @property
    def board_type(self) -> str:
        """Return the card type without its trailing letter, or the architecture."""
        card = self.card_type or self.function.arch or "unknown"
        return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", card)

    @property
    def memory(self) -> int:
        """Return the MiB of GDDR6 behind its device file, 0: unknown."""
        usual = MEMORY.get(self.board_type, 0)
        return MEMORY_BY_SUBSYSTEM.get(self.function.subsystem, usual)

    @property
    def tray(self) -> tuple[object, ...]:
        """Return its Galaxy tray, by the bus number's high nibble; (): no Galaxy."""
        domain, bus, *_ = address(self.bdf)
        card = self.card_type or ""
        return (card, domain, bus >> 4) if card.startswith("galaxy") else ()

    @property
    def board(self) -> tuple[object, ...]:
        """Return what only chips of its board have in common."""
        return (*self.tray, self.identity.serial or self.bdf)

    @property
    def device_chips(self) -> int:
        """Return how many chips a device of unit = "board" has."""
        if self.tray:
            return 8
        return 2 if self.board_type == "p300" else 1

    @property
    def device_id(self) -> str | None:
        """Return its ID: a tray's buses ("0000:c0"), else the board's serial."""
        return f"{self.bdf[:-6]}0" if self.tray else self.identity.serial


Chips = Iterable[Chip]


@dataclass(slots=True)
class ChipRecord:
    """All that is known of a chip; decisions depend on `chip`."""

    chip: Chip
    vitals: Vitals
    was_seen: bool = False  # it had telemetry since boot
    telemetry: Telemetry | None = None  # since the device appeared
    sensors: Mapping[str, float] = field(default_factory=dict)
    processes: Sequence[ProcessRow] | None = None

    def appear(self, function: PciFunction) -> None:
        self.chip = self.chip._replace(function=function, seen=True)
        self.telemetry = None

    def vanish(self, driver: str | None) -> None:
        if self.chip.present:
            verdict = Verdict(Fault.GONE, "driver is bound; waiting for firmware telemetry")
            self.chip = self.chip._replace(verdict=verdict)
            self.vitals = self.vitals._replace(empty_since=None)
        self.chip = self.chip._replace(function=self.chip.function.without_device(driver))

    def apply(self, reading: Reading, settings: HealthSettings) -> None:
        telemetry = reading.telemetry
        state = (self.chip.verdict, self.vitals)
        verdict, self.vitals = judge(*state, reading, settings, was_seen=self.was_seen)
        identity = self.chip.identity
        if telemetry.identity != Identity():
            # The slot can have another card.
            former = identity if self.telemetry else Identity()
            both = zip(telemetry.identity, former, strict=True)
            identity = Identity(*(new or old for new, old in both))
        if telemetry != Telemetry() and not telemetry.error and not telemetry.all_ones:
            self.telemetry = telemetry
            self.was_seen = True
        if reading.sensors is not None:
            self.sensors = reading.sensors
            self.processes = reading.processes
        if (identity, verdict) != (self.chip.identity, self.chip.verdict):
            self.chip = self.chip._replace(identity=identity, verdict=verdict)
        self.start_listing()

    def start_listing(self) -> None:
        """List it, unless its device file was invalid from the start."""
        if not self.chip.listed and not self.chip.function.file_fault:
            self.chip = self.chip._replace(listed=True)

    def block(self) -> None:
        problem = "telemetry read timed out (the driver may be waiting for a reset)"
        self.chip = self.chip._replace(verdict=Verdict(Fault.BLOCKED, problem))

    def to_state(self) -> Sequence[Any]:
        """Return what a restart needs: the chip and its lasting faults."""
        vitals = self.vitals
        stalled_at = vitals.heartbeat if self.chip.fault is Fault.STALLED else None
        lasting = (stalled_at, vitals.trips, vitals.tripped_at, vitals.empty_since)
        function = self.chip.function.without_device(None)
        return function, self.chip.identity, self.was_seen, lasting

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> ChipRecord:
        function, identity, was_seen, (stalled_at, *lasting) = state
        misses = 0 if stalled_at is None else MISSES_MAX
        chip = Chip(PciFunction(*function), Identity(*identity), seen=True)
        return cls(chip, Vitals(stalled_at, misses, False, *lasting), was_seen)


class Inventory:
    """The chips of the node since boot."""

    def __init__(self, state: Mapping[str, Sequence[Any]]) -> None:
        self.records = {bdf: ChipRecord.from_state(each) for bdf, each in state.items()}
        self.driver: str | None = None  # see driver_version()
        self._bus: Bus = {}

    @property
    def chips(self) -> dict[str, Chip]:
        return {bdf: record.chip for bdf, record in self.records.items()}

    @property
    def present(self) -> list[PciFunction]:
        """Return functions with a device file."""
        return [chip.function for chip in self.chips.values() if chip.present]

    def observe(self, settings: Settings) -> None:
        self._bus = scan(settings, self._bus)
        self.driver = driver_version(settings)
        functions = {bdf: function for bdf, function in self._bus.items() if function}
        for bdf, function in functions.items():
            record = self.records.get(bdf)
            if record is None or not record.chip.function.is_same_card(function):
                record = self.records[bdf] = ChipRecord(Chip(function), Vitals())
            if function.ordinal is None:
                record.vanish(function.driver)
            elif function != record.chip.function or not record.chip.seen:
                record.appear(function)
        for bdf in self.records.keys() - functions.keys():
            self.records[bdf].vanish(None)

    def apply(self, readings: Iterable[Reading], settings: HealthSettings) -> None:
        for reading in readings:
            record = self.records[reading.function.bdf]
            if record.chip.function.ordinal == reading.function.ordinal:  # else it has moved since
                record.apply(reading, settings)

    def chip_at(self, path: str) -> str | None:
        """Return the chip with this device file, or link to it."""
        for function in self.present:
            if path == function.path or basename(path) == function.bdf:
                return function.bdf
        return None


# ==== ALLOCATIONS: which pod holds which chips, by the kubelet's checkpoint =======================

CHECKPOINT = "kubelet_internal_checkpoint"  # in the device plugin directory
KUBELET_SOCKET = "kubelet.sock"  # likewise; each kubelet creates a new one
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"  # an answer's chips, by PCI address
ANSWER_VALIDITY = 20.0  # seconds for which an answer is evidence
GRACE_PERIOD = 10.0  # seconds that an allocation outlasts its evidence
LOOK_INTERVAL = 5.0  # seconds between looks at all pods' cgroups
BUSY_INTERVAL = 0.1  # seconds between looks at one that had processes
ROOT_DEPTH = 4  # levels searched for kubepods
QOS_CLASS = re.compile(r"(.+-)?(burstable|besteffort)(\.slice)?")

Label = Callable[["Allocation"], str]  # its pod's name
PodNames = Mapping[tuple[str, str, str], str]  # "namespace/name" by resource, ID and container
Key = tuple[str, ...]  # of an allocation


class Allocation(NamedTuple):
    """A container's devices, from one answer to Allocate."""

    resource: str
    ids: Names
    chips: Names  # PCI addresses
    pod: str = ""  # UID; "": pending, in no checkpoint yet
    container: str = ""

    @property
    def key(self) -> Key:
        if self.pod:
            return (self.pod, self.container, self.resource)
        return ("", self.resource, *sorted(self.ids))


class Checkpoint(NamedTuple):
    """The kubelet's checkpoint (devicemanager/checkpoint), without other vendors."""

    # Each with device files, if the answer names no chips: it is another plugin's.
    entries: Sequence[tuple[Allocation, Sequence[str]]] = ()
    registered: Mapping[str, Names] = {}  # healthy IDs, by resource


def parse_checkpoint(content: bytes) -> Checkpoint:
    """Return a checkpoint without odd entries; raises ValueError."""
    odd = (LookupError, TypeError, AttributeError, ValueError, RecursionError, DecodeError)
    try:
        data = json.loads(content)["Data"]
        items = list(data["PodDeviceEntries"] or ())
        registered = dict(data["RegisteredDevices"] or {})
    except odd as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    entries = []
    healthy = {}
    for item in items:
        with suppress(*odd):
            chips, paths = _parse_answer(item["AllocResp"])
            ids = Names().union(*map(_names, item["DeviceIDs"].values()))
            names = [item["ResourceName"], item["PodUID"], item["ContainerName"]]
            if (chips or paths) and ids and "" not in _names(names):
                resource, pod, container = names
                entries.append((Allocation(resource, ids, chips, pod, container), paths))
    for name, theirs in registered.items():
        with suppress(*odd):
            healthy[name] = _names(theirs or [])
    return Checkpoint(entries, healthy)


def _names(value: list[Any]) -> Names:
    if not isinstance(value, list) or not all(name.isprintable() for name in value):
        raise ValueError("not a list of names")
    return frozenset(value)


@lru_cache(maxsize=1024)  # checkpoints are written often
def _parse_answer(answer: str) -> tuple[Names, Sequence[str]]:
    """Return an answer's chips, else its device files."""
    content = base64.b64decode(answer)
    if ADDRESSES.encode() not in content and b"/tenstorrent/" not in content:
        return frozenset(), ()
    response = pb.ContainerAllocateResponse.FromString(content)
    chips = frozenset(filter(BDF.fullmatch, response.envs.get(ADDRESSES, "").split(",")))
    paths = [device.host_path for device in response.devices]
    return chips, () if chips else paths


class Cgroups:
    """The cgroups of pods, named after UIDs (kubernetes' pod_container_manager_linux.go)."""

    def __init__(self, sysfs_root: str) -> None:
        self.roots: list[str] = []  # empty: to be searched for
        self._mount = f"{sysfs_root}/fs/cgroup"
        self._is_v2 = False
        self._paths: dict[str, list[str]] = {}  # by UID with "_" for "-"
        self._busy_at: dict[str, float] = {}  # when a pod last had processes

    def look(self) -> None:
        """List the pods' directories."""
        self.roots = self.roots or self._find_roots()
        self._paths = {}
        for root in self.roots:
            classes = filter(QOS_CLASS.fullmatch, names_in(root))
            for directory in (root, *(f"{root}/{name}" for name in classes)):
                for name in names_in(directory):
                    if match := re.fullmatch(r"pod(.+)|.+-pod([^-]+)\.slice", name):
                        uid = (match[1] or match[2]).replace("-", "_")
                        self._paths.setdefault(uid, []).append(f"{directory}/{name}")

    def paths(self, pod: str) -> list[str]:
        return self._paths.get(pod.replace("-", "_"), [])

    def has_processes(self, pod: str, now: float) -> bool:
        """Return whether a process is, or just was, in a pod's cgroup."""
        if now - self._busy_at.get(pod, -inf) < BUSY_INTERVAL:
            return True
        self.look()
        if any(map(self._is_populated, self.paths(pod))):
            self._busy_at[pod] = now
            return True
        self._busy_at.pop(pod, None)
        return False

    def _is_populated(self, directory: str) -> bool:
        """Return whether a process is, or may be, in a cgroup or below it."""
        try:
            if self._is_v2:
                with open(f"{directory}/cgroup.events", "rb", 0) as file:
                    return b"populated 1" in file.read()
            # Not cgroup.procs: old kernels leave out threads whose leader has ended.
            with open(f"{directory}/tasks", "rb", 0) as file:
                if file.read(1):
                    return True
            with os.scandir(directory) as entries:
                below = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            return error.errno not in ABSENT
        return any(map(self._is_populated, below))

    def _find_roots(self) -> list[str]:
        """Return root's kubepods directories nearest to the mount point."""
        names = names_in(self._mount)
        self._is_v2 = "cgroup.controllers" in names
        v1 = [name for name in ("devices", "memory", "systemd") if name in names]
        level = [self._mount if self._is_v2 or not v1 else f"{self._mount}/{v1[0]}"]
        ends = ("/kubepods", "/kubepods.slice", "-kubepods.slice")
        for _ in range(ROOT_DEPTH):
            level = [*chain(*map(_directories_of_root, level))]
            if roots := [path for path in level if path.endswith(ends)]:
                return roots
        return []


def _directories_of_root(directory: str) -> Iterator[str]:
    """Yield the directories of root, except users' sessions."""
    for name in names_in(directory):
        path = f"{directory}/{name}"
        status = if_exists(os.lstat, path)
        is_directory = status and stat.S_ISDIR(status.st_mode) and name != "user.slice"
        if status and is_directory and status.st_uid in (0, os.geteuid()):
            yield path


@dataclass(slots=True)
class AllocationRecord:
    """An allocation, and its evidence."""

    allocation: Allocation
    answered_at: float | None = None  # None: by another daemon
    evident_at: float = -inf  # at the last evidence

    def is_in_force(self, now: float) -> bool:
        return now - self.evident_at <= GRACE_PERIOD


class AllocationTracker:
    """Tracks which allocations are in force: with evidence, and GRACE_PERIOD longer."""

    def __init__(self, settings: Settings, state: Sequence[Any], now: float) -> None:
        self.checkpoint = Checkpoint()
        self.has_read = False  # a checkpoint was parsed
        self.unreadable: str | None = None  # why the present one was not
        self.names: dict[str, str] = {}  # "namespace/name" by UID
        self._cgroups = Cgroups(settings.sysfs_root)
        self._directory = settings.device_plugin_dir
        self._file: FileIdentity | None = None  # that was read
        self._kubelet: FileIdentity | None = None  # the last kubelet's socket
        self._seen: Names = frozenset()  # pods with a cgroup since it started
        self._looked_at = -inf
        self._records: dict[Key, AllocationRecord] = {}
        for resource, ids, chips, pod, container, answered_at, kubelet in state:
            if kubelet:  # during whose life its cgroup was seen
                self._kubelet = (*kubelet,)
                self._seen |= {pod}
            allocation = Allocation(resource, frozenset(ids), frozenset(chips), pod, container)
            self._records[allocation.key] = AllocationRecord(allocation, answered_at, now)

    def observe(
        self, ours: Collection[str], chip_at: Callable[[str], str | None], now: float
    ) -> FileIdentity | None:
        """Read checkpoint and evidence; return the kubelet's socket. ours: resources."""
        kubelet = file_identity(f"{self._directory}/{KUBELET_SOCKET}")
        is_new_kubelet = kubelet not in (None, self._kubelet)
        self._read()
        entries = {}
        for allocation, paths in self.checkpoint.entries:
            if paths and allocation.resource in ours:  # another plugin's answer
                chips = frozenset(filter(None, map(chip_at, paths)))
                allocation = allocation._replace(chips=chips)
            if allocation.chips:
                entries[allocation.key] = allocation
        is_new = self._add(entries)
        if is_new_kubelet or is_new or now - self._looked_at >= LOOK_INTERVAL:
            self._looked_at = -inf  # until it succeeds
            self._look(entries, now, is_new_kubelet=is_new_kubelet)
            self._looked_at = now
            self._kubelet = kubelet or self._kubelet
        for key, record in [*self._records.items()]:
            if key not in entries and not record.is_in_force(now):
                del self._records[key]
        return kubelet

    def _read(self) -> None:
        """Read the checkpoint if it changed. The last one outlives its file."""
        path = f"{self._directory}/{CHECKPOINT}"
        identity = file_identity(path)
        if identity in (None, self._file):
            return
        with suppress(FileNotFoundError), open(path, "rb") as file:
            content = file.read()
            self._file = identity
            try:
                self.checkpoint = parse_checkpoint(content)
            except ValueError as error:
                if self.unreadable is None:
                    log.warning("%s cannot be parsed: %s", path, error)
                self.unreadable = f"{CHECKPOINT} cannot be parsed"
                self.checkpoint = self.checkpoint._replace(registered={})  # it is out of date
                return
            if self.unreadable:
                log.info("%s can be parsed again", path)
            self.unreadable = None
            self.has_read = True

    def _add(self, entries: Mapping[Key, Allocation]) -> bool:
        """Record new entries in place of pending answers; return whether there are any."""
        is_new = False
        for key, allocation in entries.items():
            record = self._records.get(key)
            if record is None or record.allocation != allocation:
                pending = self._records.pop(allocation._replace(pod="").key, None)
                answered_at = pending.answered_at if pending else None
                self._records.pop(key, None)  # the newest last
                self._records[key] = AllocationRecord(allocation, answered_at)
                is_new = True
        return is_new

    def _look(self, entries: Collection[Key], now: float, *, is_new_kubelet: bool) -> None:
        """Look for evidence. A kubelet that starts recreates the cgroups of its pods."""
        pods = {record.allocation.pod for record in self._records.values()}
        self._cgroups.roots = []  # others can appear
        if pods:
            self._cgroups.look()
        existing = frozenset(filter(self._cgroups.paths, pods))
        self._seen = existing if is_new_kubelet else existing | (self._seen & pods)
        for key, record in self._records.items():
            if self._is_evident(record, now, has_entry=key in entries):
                record.evident_at = now
        self.names = {pod: name for pod, name in self.names.items() if pod in pods}

    def _is_evident(self, record: AllocationRecord, now: float, *, has_entry: bool) -> bool:
        pod = record.allocation.pod
        has_cgroup = bool(self._cgroups.paths(pod))
        if record.answered_at is not None and now - record.answered_at < ANSWER_VALIDITY:
            return True
        if self.unreadable and record.is_in_force(now):
            return True
        # Up to 1.31 the last admitted pod's entry stays. An empty cgroup does not show that a
        # pod has ended: volumes are being mounted, or its sandbox replaced.
        if has_entry and (has_cgroup or pod not in self._seen):
            return True
        # A forced deletion removes the entry at once.
        return has_cgroup and self._cgroups.has_processes(pod, now)

    def add_pending(self, allocation: Allocation, now: float) -> None:
        """Record an answer to Allocate, until the checkpoint contains it."""
        self._records.pop(allocation.key, None)
        self._records[allocation.key] = AllocationRecord(allocation, now, now)

    def in_force(self, now: float) -> tuple[Allocation, ...]:
        """Return the allocations in force, the newest last."""
        records = self._records.values()
        return tuple(each.allocation for each in records if each.is_in_force(now))

    def is_running(self, allocation: Allocation, now: float) -> bool:
        return bool(allocation.pod) and self._cgroups.has_processes(allocation.pod, now)

    def apply_names(self, listed: PodNames) -> None:
        names = dict(self.names)
        for each, _ in self.checkpoint.entries:
            for identifier in each.ids:
                if name := listed.get((each.resource, identifier, each.container)):
                    names[each.pod] = name
        self.names = names

    def to_state(self) -> list[Any]:
        state = []
        for record in self._records.values():
            resource, ids, chips, pod, container = record.allocation
            kubelet = self._kubelet if pod in self._seen else None
            names = (resource, sorted(ids), sorted(chips), pod, container)
            state.append((*names, record.answered_at, kubelet))
        return state


# ==== RESOURCES: which devices exist, and their names. Pure =======================================


def explain(
    chip: Chip, siblings: Sequence[str], pods: Mapping[str, list[str]], driver: str | None
) -> str | None:
    """Return why a chip is unhealthy, with the remedy and what else this affects."""
    fault = chip.fault
    if fault is None:
        return None
    if not chip.present:
        return _explain_absence(chip.function, driver)
    problem = chip.verdict.problem
    if fault is Fault.NODE:
        problem = f"device file is invalid: {chip.function.file_fault}"
    remedy = REMEDIES.get(fault, "").format(bdf=chip.bdf)
    affected = []
    users = pods[chip.bdf]
    if "tt-smi" in remedy and siblings:
        affected.append(f"also resets {', '.join(siblings)} on that board")
        for bdf in siblings:
            users = users + pods[bdf]
    if users and chip.bdf in remedy:
        affected.append(f"in use by {', '.join(dict.fromkeys(users))}")
    if affected:
        remedy += f" ({'; '.join(affected)})"
    return f"{problem}; {remedy}" if remedy else problem


def _explain_absence(function: PciFunction, driver: str | None) -> str:
    if function.driver is None:
        return "PCI device is gone; healthy again when it returns"
    if driver is None:
        return f"driver is not loaded; {LOAD_DRIVER}"
    if function.driver:
        return f"driver {function.driver} is bound; waiting for a device file"
    return f"driver is not bound; run: echo {function.bdf} > {_BIND}/bind"


class Device(NamedTuple):
    """A chip or a board; if it is shared, it has several IDs."""

    identifier: str
    chips: tuple[Chip, ...]  # in the order of PCI addresses
    whole: int = 1  # number of chips it should have
    holder: str | None = None  # the pod for which it is withheld
    withheld: str | None = None  # the reason, if it is
    is_retained: bool = False  # held by a pod, and no longer configured

    @property
    def addresses(self) -> Names:
        return frozenset(chip.bdf for chip in self.chips)

    @property
    def incomplete(self) -> str | None:
        known = len(self.chips)
        return None if known == self.whole else f"{known} of {self.whole} chips"

    @property
    def reason(self) -> str | None:
        """Return why the kubelet sees it as unhealthy."""
        for chip in self.chips:
            if chip.reason:
                return f"{chip.bdf}: {chip.reason}" if self.whole > 1 else chip.reason
        return self.incomplete or self.withheld

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        nodes = {chip.function.numa_node for chip in self.chips}
        return tuple(sorted(node for node in nodes if node is not None))


@dataclass(frozen=True)
class Resource:
    """An extended resource."""

    name: str  # "tenstorrent.com/n300"
    devices: Mapping[str, Device]  # by ID, in the order of PCI addresses
    replicas: int = 0  # per device; 0: not shared
    max_one_replica: bool = False  # per container
    base_name: str = ""  # unshared, without the domain

    @property
    def short_name(self) -> str:
        return basename(self.name)

    @cached_property
    def ids_of_devices(self) -> list[list[str]]:
        found = defaultdict(list)
        for identifier, device in self.devices.items():
            found[device.identifier, device.addresses].append(identifier)
        return list(found.values())

    @property
    def unique_devices(self) -> list[Device]:
        """Return each device once: withheld, if one of its IDs is."""
        groups = ([self.devices[each] for each in ids] for ids in self.ids_of_devices)
        return [max(group, key=lambda device: bool(device.withheld)) for group in groups]

    @cached_property
    def summary(self) -> str:
        devices = self.unique_devices
        unhealthy = [f"{each.identifier}: {each.reason}" for each in devices if each.reason]
        shared = f", {self.replicas} replicas each" if self.replicas else ""
        healthy = f"{len(devices) - len(unhealthy)} healthy"
        first = f" ({unhealthy[0]}{', …' if len(unhealthy) > 1 else ''})" if unhealthy else ""
        return f"{len(devices)} × {self.name}{shared}, {healthy}{first}"

    def chips(self, ids: Iterable[str]) -> list[Chip]:
        """Return these IDs' chips."""
        chips: dict[str, Chip] = {}
        for identifier in ids:
            if identifier in self.devices:
                chips |= {chip.bdf: chip for chip in self.devices[identifier].chips}
        return [*chips.values()]


Resources = dict[str, Resource]  # by name


def replica_ids(identifier: str, replicas: int) -> list[str]:
    return [f"{identifier}::{number}" for number in range(replicas)] or [identifier]


def is_replica(identifier: str) -> bool:
    return "::" in identifier


def short_name(chip: Chip, settings: Settings) -> str:
    """Return a chip's resource, unshared and without the domain."""
    arch = chip.function.arch or "unknown"
    names = {"card": chip.card_type or arch, "arch": arch}
    is_board = settings.unit == "board" and chip.device_chips > 1
    return names.get(settings.resource_naming, chip.board_type) + ("-board" if is_board else "")


def devices_by_name(chips: Chips, settings: Settings) -> dict[str, list[Device]]:
    """Return unshared devices by resource. chips: in the order of addresses."""
    is_board = settings.unit == "board"
    groups = defaultdict(list)
    for chip in chips:
        identifier = chip.device_id if is_board and chip.device_chips > 1 else chip.bdf
        if identifier:  # else a p300's chip waits for its serial
            groups[short_name(chip, settings), identifier].append(chip)
    devices = defaultdict(list)
    for (name, identifier), members in groups.items():
        whole = members[0].device_chips if is_board else 1
        if len(members) > whole:  # the card was moved
            members = [chip for chip in members if chip.present]
        devices[name].append(Device(identifier, tuple(members), whole))
    return dict(sorted(devices.items()))


def configured_resources(chips: Chips, settings: Settings) -> Resources:
    """Return the resources that the configuration gives, by name."""
    sharing = settings.sharing
    found: Resources = {}

    def add(short: str, base_name: str, devices: Iterable[Device], replicas: int) -> None:
        by_id = {}
        for device in devices:
            by_id.update(dict.fromkeys(replica_ids(device.identifier, replicas), device))
        if by_id:
            name = f"{settings.resource_domain}/{short}"
            max_one_replica = replicas > 0 and sharing.fail_requests_greater_than_one
            found[name] = Resource(name, by_id, replicas, max_one_replica, base_name)

    for base_name, rest in devices_by_name(chips, settings).items():
        for entry in sharing.resources:
            if entry.name == base_name:
                selected = selection(entry, rest)
                rest = [device for device in rest if device not in selected]
                add(sharing.shared_name(entry), base_name, selected, entry.replicas)
        add(base_name, base_name, rest, 0)
    return found


def resources(
    configured: Resources,
    chips: Mapping[str, Chip],
    allocations: Iterable[Allocation],
    label: Label,
) -> Resources:
    """Return the resources as they are advertised, by name.

    An ID that a pod holds means the chips that it was given: kubelets 1.35 to 1.37 crash at their
    start if it is not listed (topology_hints.go).
    """
    held: dict[str, dict[str, Device]] = defaultdict(dict)  # by resource and ID
    holders = defaultdict(list)  # by chip
    for allocation in allocations:
        resource = configured.get(allocation.resource, Resource(allocation.resource, {}))
        for bdf in allocation.chips:
            holders[bdf].append(allocation)
        for identifier, addresses in chips_by_id(allocation, resource).items():
            device = resource.devices.get(identifier)
            if not device or device.addresses != addresses:
                theirs = tuple(chips[bdf] for bdf in sorted(addresses, key=address))
                name = identifier.partition("::")[0]
                device = Device(name, theirs, len(theirs), is_retained=True)
            held[allocation.resource][identifier] = device
    found = {}
    for name, resource in configured.items():
        devices = {}
        for ids in resource.ids_of_devices:
            device = _withheld(resource.devices[ids[0]], resource, holders, label)
            devices.update(dict.fromkeys(ids, device))
        found[name] = replace(resource, devices=devices | held.pop(name, {}))
    return found | {name: Resource(name, devices) for name, devices in held.items()}


def _withheld(
    device: Device, resource: Resource, holders: Mapping[str, list[Allocation]], label: Label
) -> Device:
    """Withhold a device if a pod holds a chip of it under another name or ID."""
    replicas = replica_ids(device.identifier, resource.replicas)
    for chip in device.chips:
        for each in holders.get(chip.bdf, ()):
            if each.resource != resource.name or each.ids.isdisjoint(replicas):
                held_as = f"held by {label(each)} as {each.resource} {', '.join(sorted(each.ids))}"
                reason = f"{held_as}, until that pod ends"
                return device._replace(holder=label(each), withheld=reason)
    return device


def chips_by_id(allocation: Allocation, resource: Resource) -> dict[str, Names]:
    """Return each ID's chips; those of unknown IDs are the rest."""
    found = {}
    for identifier in allocation.ids:
        device = resource.devices.get(identifier)
        named = frozenset([identifier.partition("::")[0]])
        if device and not device.incomplete and device.addresses <= allocation.chips:
            found[identifier] = device.addresses
        elif named <= allocation.chips:
            found[identifier] = named
    rest = allocation.chips.difference(*found.values()) or allocation.chips
    return {identifier: found.get(identifier, rest) for identifier in sorted(allocation.ids)}


def selection(entry: SharedResource, devices: Sequence[Device]) -> Sequence[Device]:
    if isinstance(entry.devices, int):
        return devices[: entry.devices]
    if entry.devices == "all":
        return devices
    return [device for device in devices if aliases(device) & entry.listed]


def aliases(device: Device) -> set[str]:
    numbers = {str(chip.function.ordinal) for chip in device.chips}
    return {device.identifier, *device.addresses, *numbers}


def unselected(chips: Chips, settings: Settings) -> Iterator[str]:
    """Yield messages for shared resources and devices that do not exist."""
    devices = devices_by_name(chips, settings)
    for entry in settings.sharing.resources:
        found = devices.get(entry.name, [])
        missing = sorted(entry.listed.difference(*map(aliases, found)))
        if missing:
            yield f"{entry.name}: no such device: {abbreviate(missing)}"
        elif not found:
            available = ", ".join(devices) or "none"
            yield f"{entry.name}: no such resource; available: {available}"


# ==== PREFERRED ALLOCATION: neighbours; whole boards stay whole. Pure =============================

Status = grpc.StatusCode


class RequestError(Exception):
    """A request that is rejected: gRPC status code and reason."""


class Cost(NamedTuple):
    """The cost of a choice, compared field by field. Costs add up."""

    must_include: int = 0  # minus their number
    busy: int = 0  # IDs on which a pod runs that the kubelet does not know
    again: int = 0  # replicas of its device chosen before
    users: int = 0  # of its device, before this choice
    boards: int = 0
    trays: int = 0
    numa_nodes: int = 0
    whole_boards: int = 0  # with all listed devices available
    whole_trays: int = 0
    whole_numa_nodes: int = 0
    addresses: int = 0  # minus one bit per ID, the highest for the first

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return tuple.__new__(Cost, map(operator.add, self, other))


NO_COST = Cost()
BySize = list[Cost]  # the least costs of 0, 1, 2, … devices
Nodes = frozenset[int]


class Candidate(NamedTuple):
    """An available ID, and its place."""

    cost: Cost  # without its groups
    board: object
    tray: object
    numa_nodes: Nodes  # {-1}: unknown


def preferred_allocation(
    resource: Resource,
    available: Sequence[str],
    must_include: Sequence[str],
    size: int,
    busy: Collection[str] = (),
) -> list[str]:
    """Return the best of the available IDs; raises RequestError. busy: see Cost."""
    free = frozenset(available)
    required = frozenset(must_include)
    _check_question(resource, free, required, size)
    ids = [*resource.devices]
    bits = {identifier: 1 << number for number, identifier in enumerate(reversed(ids))}
    candidates = []
    partly_used: set[object] = set()
    for replicas in resource.ids_of_devices:
        device = resource.devices[replicas[0]]
        board = device.chips[0].board
        tray = device.chips[0].tray or board
        nodes = frozenset(device.numa_nodes or (-1,))
        left = [each for each in replicas if each in free]
        left.sort(key=lambda each: (each not in required, -bits[each]))
        if not left:
            partly_used |= {board, tray, *nodes}
        for again, identifier in enumerate(left[:size]):
            cost = Cost(
                must_include=-(identifier in required),
                busy=identifier in busy or resource.devices[identifier].is_retained,
                again=again,
                users=len(replicas) - len(left),
                addresses=-bits[identifier],
            )
            candidates.append(Candidate(cost, board, tray, nodes))
    best = _Search(partly_used, size).solve(candidates)[size]
    return [identifier for identifier in ids if bits[identifier] & -best.addresses]


def _check_question(resource: Resource, free: Names, required: Names, size: int) -> None:
    available = f"{len(free)} available devices, {len(required)} of them must-include"
    reason = f"cannot choose {size} of {available}"
    if unknown := sorted((free | required) - resource.devices.keys()):
        reason = f"{resource.name} has no device {abbreviate(unknown)}"
    elif size < 0:
        reason = f"allocation size {size} is negative"
    elif missing := sorted(required - free):
        reason = f"must-include device {abbreviate(missing)} is not available"
    elif len(required) <= size <= len(free):
        return
    raise RequestError(Status.INVALID_ARGUMENT, reason)


Candidates = Iterable[Candidate]


class _Search(NamedTuple):
    """Computes the least costs by number of devices."""

    partly_used: Collection[object]  # boards, trays, NUMA nodes with a taken device
    size: int

    def solve(self, candidates: Candidates) -> BySize:
        """Search NUMA nodes separately, unless a tray or device connects them."""
        parts: list[Nodes] = []
        for tray in _grouped(candidates, "tray"):
            nodes = Nodes().union(*(each.numa_nodes for each in tray))
            connected = nodes.union(*(part for part in parts if part & nodes))
            parts = [part for part in parts if not part & nodes] + [connected]
        costs = []
        for part in parts:
            inside = [each for each in candidates if each.numa_nodes & part]
            costs.append(self._numa_nodes(part, inside))
        return self._joined(costs)

    def _numa_nodes(self, touched: Nodes, candidates: Candidates) -> BySize:
        """Try every subset of NUMA nodes: only unused ones cost nothing."""
        best: BySize = []
        counts = range(len(touched), -1, -1)
        for chosen in chain(*(combinations(touched, n) for n in counts)):
            inside = [each for each in candidates if each.numa_nodes.issubset(chosen)]
            whole = sum(node not in self.partly_used for node in chosen)
            group_cost = Cost(numa_nodes=len(chosen), whole_numa_nodes=whole)
            costs = self._joined(map(self._tray, _grouped(inside, "tray")), group_cost)
            if best:
                costs = [*map(min, best, costs), *best[len(costs) :]]
            best = costs
        return best

    def _tray(self, candidates: list[Candidate]) -> BySize:
        is_whole = candidates[0].tray not in self.partly_used
        group_cost = Cost(trays=1, whole_trays=is_whole)
        return self._joined(map(self._board, _grouped(candidates, "board")), group_cost)

    def _board(self, candidates: list[Candidate]) -> BySize:
        is_whole = candidates[0].board not in self.partly_used
        costs = sorted(each.cost for each in candidates)
        by_size = [*accumulate(costs, initial=NO_COST)]
        return self._joined([by_size], Cost(boards=1, whole_boards=is_whole))

    def _joined(self, parts: Iterable[BySize], group_cost: Cost = NO_COST) -> BySize:
        """Return the least costs over all parts. group_cost: of using any device."""
        total, *others = [*parts] or [[NO_COST]]
        for part in others:
            joined = []
            most = len(total) - 1
            for size in range(min(most + len(part), self.size + 1)):
                least = max(0, size - most)
                counts = range(least, min(size + 1, len(part)))
                joined.append(min(part[n] + total[size - n] for n in counts))
            total = joined
        return total[:1] + [each + group_cost for each in total[1 : self.size + 1]]


def _grouped(candidates: Candidates, key: str) -> list[list[Candidate]]:
    groups = defaultdict(list)
    for candidate in candidates:
        groups[getattr(candidate, key)].append(candidate)
    return list(groups.values())


# ==== CONTAINER EDITS: from a request for devices. Pure ===========================================

Containers = Sequence[Sequence[str]]  # IDs of each
Edits = pb.ContainerAllocateResponse
DeviceList = pb.ListAndWatchResponse


def check_request(resource: Resource, containers: Containers) -> None:
    """Raise RequestError if these IDs cannot be allocated."""
    invalid = Status.INVALID_ARGUMENT
    if not containers:
        raise RequestError(invalid, "no container")
    for ids in containers:
        if not ids:
            raise RequestError(invalid, "a container without devices")
        if resource.max_one_replica and len(ids) > 1:
            limit = "at most 1, as it is shared (fail_requests_greater_than_one)"
            reason = f"{len(ids)} of {resource.name} for one container: {limit}"
            raise RequestError(invalid, reason)
    for identifier, times in Counter(chain(*containers)).items():
        device = resource.devices.get(identifier)
        if device is None:
            reason = f"{resource.name} has no device {identifier[:63]!r}"
            raise RequestError(Status.NOT_FOUND, reason)
        if times > 1:
            raise RequestError(invalid, f"duplicate device {identifier!r}")
        fault = device.reason
        if device.is_retained and not fault:
            fault = f"this ID no longer refers to {', '.join(sorted(device.addresses))}"
        if fault:
            raise RequestError(Status.FAILED_PRECONDITION, f"device {identifier}: {fault}")


def container_edits(
    chips: Chips, links: Mapping[str, str], settings: Settings, mounts: Iterable[Mount]
) -> Edits:
    """Return a container's changes. links: udev's, by address."""
    chips = sorted(chips, key=lambda chip: address(chip.bdf))
    addresses = ",".join(chip.bdf for chip in chips)
    edits = Edits(envs={ADDRESSES: addresses})
    # tt-umd reads an integer as an index inside the container: a host's number would be wrong.
    if settings.visible_devices == "bdf":
        edits.envs["TT_VISIBLE_DEVICES"] = addresses
    elif settings.visible_devices == "index":
        edits.envs["TT_VISIBLE_DEVICES"] = ",".join(map(str, range(len(chips))))
    for chip in chips:
        if settings.device_list_strategy == "cdi":
            edits.cdi_devices.add(name=f"{settings.resource_domain}/device={chip.bdf}")
        else:  # tt-umd names its locks after the host's number
            path = f"/dev/tenstorrent/{chip.function.ordinal}"
            host_path = links.get(chip.bdf, chip.function.path)
            edits.devices.add(container_path=path, host_path=host_path, permissions="rw")
    for each in mounts:
        paths = {"host_path": each.host, "container_path": each.container}
        edits.mounts.add(**paths, read_only=each.read_only)
    return edits


def device_list(resource: Resource) -> DeviceList:
    """Return the kubelet's list, which renumbering does not change."""
    message = DeviceList()
    common: dict[int, Json] = {}  # by device, for up to 100 IDs
    for identifier, device in sorted(resource.devices.items()):
        if id(device) not in common:
            nodes = [pb.NUMANode(ID=node) for node in device.numa_nodes]
            topology = pb.TopologyInfo(nodes=nodes) if nodes else None
            health = "Unhealthy" if device.reason else "Healthy"
            common[id(device)] = {"health": health, "topology": topology}
        message.devices.add(ID=identifier, **common[id(device)])
    return message


# ==== CDI AND LABELS: descriptions of the devices for others. Pure ================================

CDI_FILE = "tenstorrent.com-device.json"
LABELS_FILE = "tt-device-plugin"


def cdi_spec(
    functions: Iterable[PciFunction], settings: Settings, mounts: Iterable[Mount]
) -> str | None:
    """Return a CDI file (spec 0.5.0, without links), None without chips."""
    nodes = {}
    for function in functions:
        path = f"/dev/tenstorrent/{function.ordinal}"
        nodes[function.bdf] = [{"path": path, "hostPath": function.path, "permissions": "rw"}]
    if not nodes:
        return None
    nodes["all"] = [*chain(*nodes.values())]
    devices = []
    for name, theirs in nodes.items():
        devices.append({"name": name, "containerEdits": {"deviceNodes": theirs}})
    kind = f"{settings.resource_domain}/device"
    spec: dict[str, object] = {"cdiVersion": "0.5.0", "kind": kind, "devices": devices}
    binds = []
    for mount in mounts:
        options = ["rbind", "ro" if mount.read_only else "rw"]
        binds.append({"hostPath": mount.host, "containerPath": mount.container, "options": options})
    if binds:
        spec["containerEdits"] = {"mounts": binds}
    return json.dumps(spec, indent=1)


def cdi_nodes(spec: str) -> dict[str, str]:
    """Return the device files by device; raises ValueError."""
    try:
        nodes = {}
        for device in json.loads(spec)["devices"]:
            nodes[str(device["name"])] = device["containerEdits"]["deviceNodes"][0]["hostPath"]
        nodes.pop("all", None)
        return nodes
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def feature_file(
    advertised: Iterable[Resource], chips: Chips, settings: Settings, driver: str | None
) -> str:
    """Return labels of existing devices, for NFD's local source."""
    present = [chip for chip in chips if chip.present]
    labels = {f"arch.{chip.function.arch}": "true" for chip in present}
    for resource in advertised:
        if not resource.name.startswith(f"{settings.resource_domain}/"):
            continue  # of a previous domain
        for key, value in _resource_labels(resource).items():
            labels[f"{resource.short_name}.{key}"] = value
    labels |= _version_labels("driver", driver or "")
    labels["firmware.version"] = _common(chip.identity.firmware for chip in present)
    labels["plugin.version"] = __version__
    lines = []
    for key, value in sorted(labels.items()):
        # Kubernetes' limits: 63 characters, alphanumeric at both ends.
        value = re.sub(r"[^A-Za-z0-9._-]+", "_", value)[:63].strip("._-")
        if value and len(key) <= 63:
            lines.append(f"{settings.resource_domain}/{key}={value}\n")
    return "".join(lines)


def _resource_labels(resource: Resource) -> dict[str, str]:
    unique = {each.addresses: each for each in resource.unique_devices}  # a retained ID adds none
    devices = [each for each in unique.values() if any(chip.present for chip in each.chips)]
    chips = [chip for chip in resource.chips(resource.devices) if chip.present]
    product = _common(chip.board_type for chip in chips)
    if resource.replicas and resource.short_name == resource.base_name:
        product += "-SHARED"
    memory = {sum(chip.memory for chip in device.chips) for device in devices}
    counts = Counter(chip.board for chip in chips)
    whole = {chip.board for chip in chips if counts[chip.board] == chip.device_chips}
    numa_nodes = {chip.function.numa_node for chip in chips} - {None}
    labels = _version_labels("firmware", _common(chip.identity.firmware for chip in chips))
    labels["count"] = str(len(devices))
    labels["product"] = product
    labels["replicas"] = str(resource.replicas or 1)
    labels["sharing"] = str(resource.replicas > 0).lower()
    labels["memory"] = str(*memory) if len(memory) == 1 and 0 not in memory else ""
    labels["boards"] = str(len(whole))
    labels["numa-nodes"] = str(len(numa_nodes) or "")
    return labels


def _common(values: Iterable[str | None]) -> str:
    """Return the common value, "mixed" if they differ."""
    found = {value for value in values if value}
    return "mixed" if len(found) > 1 else "".join(found)


def _version_labels(subject: str, version: str) -> dict[str, str]:
    labels = {f"{subject}.version": version}
    numbers = re.findall(r"\d+", version)
    for part, number in zip(("major", "minor"), numbers, strict=False):
        labels[f"{subject}.{part}"] = number
    return labels


# ==== DECISION: the desired state. Pure ===========================================================

User = dict[str, str]  # namespace, pod (else its UID) and container


class Observation(NamedTuple):
    """Everything that decisions depend on."""

    settings: Settings
    chips: Mapping[str, Chip]  # by PCI address
    driver: str | None  # see driver_version()
    allocations: tuple[Allocation, ...]  # in force, the newest last
    names: Mapping[str, str]  # of pods, "namespace/name" by UID
    unreadable: str | None  # why the checkpoint cannot be parsed
    mounts: Mounts


@dataclass(frozen=True)
class Decision:
    """The desired state: what is advertised, written and reported."""

    seen: Observation
    chips: Mapping[str, Chip]  # with reasons, also those that only pods know
    resources: Resources  # as advertised, by name
    lists: Mapping[str, DeviceList]
    users: Mapping[str, list[User]]  # by PCI address
    unselected: Sequence[str]  # see unselected()
    cdi: str | None
    labels: str

    @cached_property
    def owners(self) -> dict[str, tuple[Resource, Device]]:
        """Return each chip's resource and device, rather a configured than a retained one."""
        found = {}
        for resource in self.resources.values():
            for device in resource.unique_devices:
                for chip in device.chips:
                    if chip.bdf not in found or not device.is_retained:
                        found[chip.bdf] = (resource, device)
        return found

    @cached_property
    def withheld(self) -> dict[str, str]:
        """Return the reasons why devices are withheld, by resource and ID."""
        found = {}
        for name, resource in self.resources.items():
            for device in resource.unique_devices:
                if device.withheld:
                    found[f"{name} {device.identifier}"] = device.withheld
        return found

    def resource(self, name: str) -> Resource:
        return self.resources.get(name) or Resource(name, {})

    def advertises(self, chip: Chip) -> bool:
        """Return whether a chip is a device, or waits for its board's serial."""
        return chip.listed or chip.bdf in self.owners


def driver_problem(chips: Chips, driver: str | None) -> str | None:
    unbound = [
        chip for chip in chips if chip.function.driver == "" and not (driver and chip.listed)
    ]
    if not unbound:
        return None
    count = pluralize(len(unbound), "Tenstorrent PCI function")
    if driver is None:
        return f"driver not loaded, {count}; {LOAD_DRIVER}"
    return f"{count} without a driver ({unbound[0].bdf}: {unbound[0].reason})"


def pod_label(allocation: Allocation, names: Mapping[str, str]) -> str:
    if not allocation.pod:
        return "a pod that is being admitted"
    return names.get(allocation.pod, f"pod {allocation.pod}")


def decide(seen: Observation) -> Decision:
    settings = seen.settings
    label = partial(pod_label, names=seen.names)
    chips = _explained_chips(seen, label)
    listed = [chip for chip in chips.values() if chip.listed]
    configured = configured_resources(listed, settings)
    advertised = resources(configured, chips, seen.allocations, label)
    usable = [each.function for each in listed if each.present and not each.function.file_fault]
    users = defaultdict(list)
    for allocation in seen.allocations:
        namespace, _, pod = seen.names.get(allocation.pod, allocation.pod).rpartition("/")
        user = {"namespace": namespace, "pod": pod, "container": allocation.container}
        for bdf in allocation.chips if pod else ():
            users[bdf].append(user)
    return Decision(
        seen,
        chips=chips,
        resources=advertised,
        lists={name: device_list(resource) for name, resource in advertised.items()},
        users=users,
        unselected=[*unselected(listed, settings)],
        cdi=cdi_spec(usable, settings, seen.mounts),
        labels=feature_file(advertised.values(), listed, settings, seen.driver),
    )


def _explained_chips(seen: Observation, label: Label) -> dict[str, Chip]:
    """Return the chips with reasons, and absent ones that only a pod knows."""
    chips = dict(seen.chips)
    pods = defaultdict(list)
    for allocation in seen.allocations:
        for bdf in allocation.chips:
            chips.setdefault(bdf, Chip(PciFunction(bdf), seen=True))
            pods[bdf].append(label(allocation))
    boards = defaultdict(list)
    for bdf, chip in chips.items():
        if chip.present and chip.device_chips == 2:
            boards[chip.board].append(bdf)
    found = {}
    for bdf in sorted(chips, key=address):
        chip = chips[bdf]
        siblings = [each for each in boards[chip.board] if each != bdf]
        found[bdf] = chip._replace(reason=explain(chip, siblings, pods, seen.driver))
    return found


LogLines = Iterator[tuple[int, str]]  # with levels


def changes(before: Decision, after: Decision) -> LogLines:
    for chip in after.chips.values():
        yield from _chip_changes(before, after, chip)
    for name, reason in after.withheld.items():
        if name not in before.withheld:
            yield logging.WARNING, f"{name}: withheld: {reason}"
    for name in before.withheld.keys() - after.withheld.keys():
        yield logging.INFO, f"{name}: no longer withheld"
    for message in after.unselected:
        if message not in before.unselected:
            yield logging.INFO, f"sharing: {message}"


def _chip_changes(before: Decision, after: Decision, chip: Chip) -> LogLines:
    former = before.chips.get(chip.bdf, Chip(PciFunction(chip.bdf)))
    if not after.advertises(chip):
        if chip.function.file_fault and not former.function.file_fault:
            yield logging.WARNING, f"not listed: {chip.label}: {chip.reason}"
        return
    if not before.advertises(former):
        former = Chip(PciFunction(chip.bdf, ordinal=0))  # without a fault
    introduction = _introduction(chip)
    if chip.present and introduction != _introduction(former):
        yield logging.INFO, f"{chip.label}: {introduction}"
    unloaded = after.seen.driver is None and chip.reason != former.reason
    if chip.fault and (unloaded or chip.fault != former.fault):
        yield logging.WARNING, f"{chip.label}: unhealthy: {chip.reason}"
    if former.fault and not chip.fault:
        yield logging.INFO, f"{chip.label}: healthy again"
    if former.verdict.throttles != chip.verdict.throttles:
        reached = "has reached its own temperature limit and throttles"
        state = reached if chip.verdict.throttles else "no longer throttles"
        yield logging.INFO, f"{chip.label}: {state}"


def _introduction(chip: Chip) -> str:
    identity = chip.identity
    facts = {"board": identity.serial, "ASIC": identity.asic_id, "firmware": identity.firmware}
    known = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([chip.function.path, *known])


# ==== REPORTS: metrics, status, list. Pure ========================================================

REGISTERED = "registered with kubelet"  # the state of a session


class Samples:
    """Samples of metrics with a common prefix."""

    def __init__(self, prefix: str, helps: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._helps = helps
        self._series: dict[str, dict[str, float]] = defaultdict(dict)  # value by labels, by metric

    def add(self, name: str, value: float | None, **labels: object) -> None:
        if value is not None:
            text = ",".join(_label(key, each) for key, each in labels.items())
            self._series[name][f"{{{text}}}" if text else ""] = value

    def text(self) -> str:
        """Return Prometheus' text format, without metrics that have no sample."""
        lines: list[str] = []
        for name, help in self._helps.items():
            metric = f"{self._prefix}{name}"
            kind = "counter" if name.endswith("_total") else "gauge"
            if series := self._series.get(name):
                lines += [f"# HELP {metric} {help}", f"# TYPE {metric} {kind}"]
                lines += [f"{metric}{labels} {value:.15g}" for labels, value in series.items()]
        return "".join(f"{line}\n" for line in lines)


@lru_cache(maxsize=4096, typed=True)  # the same every few seconds
def _label(key: str, value: object) -> str:
    text = "" if value is None else str(value)
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{escaped}"'


CHIP_METRICS = {
    "info": "Identity of a chip, value is always 1.",
    "healthy": "Whether a chip is healthy.",
    "fault": "Fault of a chip by kind, value is 1 while it lasts.",
    "temperature_celsius": "Temperature in degrees Celsius at the last poll.",
    "temperature_limit_celsius": "Temperature in degrees Celsius at which a chip throttles.",
    "thermal_trips_total": "Thermal trips, as the firmware counts them.",
    **{sensor.metric: sensor.help for sensor in SENSORS},
    "allocated": "Chip is allocated to this container, value is always 1.",
}


def chip_metrics(decision: Decision, records: Mapping[str, ChipRecord]) -> str:
    """Return the metrics of chips that were seen since boot."""
    samples = Samples("tt_device_", CHIP_METRICS)
    for bdf, chip in decision.chips.items():
        if not chip.seen:
            continue
        resource, _ = decision.owners.get(bdf, (None, None))
        add = partial(samples.add, device=bdf)
        add(
            "info",
            1,
            board=chip.board_type,
            card=chip.card_type,
            arch=chip.function.arch,
            serial=chip.identity.serial,
            firmware=chip.identity.firmware,
            numa_node=chip.function.numa_node,
            resource=resource.name if resource else None,
        )
        add("healthy", chip.fault is None)
        if chip.fault:
            add("fault", 1, kind=chip.fault.value)
        if chip.is_readable and (record := records.get(bdf)):
            telemetry = record.telemetry or Telemetry()
            add("temperature_celsius", telemetry.temperature)
            add("temperature_limit_celsius", telemetry.throttles_at)
            add("thermal_trips_total", telemetry.trips)
            for sensor in SENSORS:
                add(sensor.metric, record.sensors.get(sensor.attribute), **sensor.labels)
    for bdf, users in sorted(decision.users.items()):
        for user in users:
            names = {"pod_namespace": user["namespace"], "pod_name": user["pod"]}
            samples.add("allocated", 1, device=bdf, **names, container_name=user["container"])
    return samples.text()


# By resource: REGISTERED, or why it is not; registrations.
States = Mapping[str, tuple[str, int]]
Counts = Counter[tuple[str, str]]  # of answers to Allocate, by resource and result
PLUGIN_METRICS = {
    "driver_info": "Version of the loaded driver, value is always 1.",
    "pci_functions": "Tenstorrent PCI functions by bound driver.",
    "resource_devices": "Advertised device IDs by health: a shared device counts once per replica.",
    "kubelet_registered": "Whether the resource is registered with the kubelet.",
    "kubelet_registrations_total": "Successful registrations with the kubelet.",
    "allocations_total": "Allocate requests by result.",
    "plugin_info": "Version of tt-device-plugin, value is always 1.",
    "plugin_start_time_seconds": "Start time of the daemon as Unix time.",
}


def plugin_metrics(decision: Decision, states: States, counts: Counts, started: float) -> str:
    """Return the metrics of node and daemon. started: Unix time."""
    samples = Samples("tt_", PLUGIN_METRICS)
    if version := decision.seen.driver:
        samples.add("driver_info", 1, version=version)
    drivers = Counter(chip.function.driver for chip in decision.chips.values())
    for driver, number in drivers.items():
        if driver is not None:
            samples.add("pci_functions", number, driver=driver)
    for name, resource in decision.resources.items():
        add = partial(samples.add, resource=name)
        unhealthy = sum(bool(device.reason) for device in resource.devices.values())
        add("resource_devices", len(resource.devices) - unhealthy, health="healthy")
        add("resource_devices", unhealthy, health="unhealthy")
        state, registrations = states.get(name, ("", 0))
        add("kubelet_registered", state == REGISTERED)
        add("kubelet_registrations_total", registrations)
        for result in ("granted", "refused"):
            add("allocations_total", counts.get((name, result), 0), result=result)
    samples.add("plugin_info", 1, version=__version__)
    samples.add("plugin_start_time_seconds", started)
    return samples.text()


def status_line(decision: Decision, states: States) -> str:
    parts = [resource.summary for resource in decision.resources.values()]
    if problem := driver_problem(decision.chips.values(), decision.seen.driver):
        parts.insert(0, problem)
    if not parts:
        return "no Tenstorrent device on this node; waiting for one"
    found = {name: state for name, (state, _) in states.items()}
    texts = {*found.values()}
    if len(texts) > 1:
        texts = {f"{name} {state}" for name, state in found.items() if state != REGISTERED}
    texts.add(decision.seen.unreadable or "")
    return "; ".join([*parts, *sorted(filter(None, texts))])


def chip_row(decision: Decision, chip: Chip, record: ChipRecord, *, knows_pods: bool) -> Json:
    """Return a chip as `list --json` shows it."""
    function = chip.function
    resource, device = decision.owners.get(chip.bdf, (None, None))
    pods = decision.users.get(chip.bdf, [])
    telemetry = record.telemetry or Telemetry()
    return {
        "id": device.identifier if device else None,
        "index": function.ordinal,
        "path": function.path if chip.present and not function.file_fault else None,
        "bdf": chip.bdf,
        "card": chip.card_type,
        "board": chip.board_type if chip.card_type else None,
        "arch": function.arch,
        "serial": chip.identity.serial,
        "asic_id": chip.identity.asic_id,
        "numa_node": function.numa_node,
        "firmware": chip.identity.firmware,
        "temperature": telemetry.temperature if chip.is_readable else None,
        "power": record.sensors.get("power1_input") if chip.is_readable else None,
        "healthy": chip.fault is None,
        "reason": chip.reason,
        "withheld": device.holder if device else None,
        "resource": resource.name if resource else None,
        "replicas": resource.replicas if resource else 0,
        "pods": pods if pods or knows_pods else None,
        "processes": record.processes if chip.present else (),
    }


# ==== THREADS: telemetry is read off the loop =====================================================

SLOW_AFTER = 0.1  # seconds for which reads are waited for
Wake = Callable[[], None]  # has the loop make a turn


@contextmanager
def log_and_continue(subject: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("internal error in %s; continuing", subject)


class ReadJob(NamedTuple):
    """A chip to be read."""

    function: PciFunction
    periodic: bool  # by a poll, not an event
    details: Settings | None  # to read sensors and processes, too
    files: AttributeFiles


# A job and when it began, then what was read (None: an internal error); no job: a thread ends.
ReadResult = tuple[ReadJob | None, float | Reading | OSError | None]


class TelemetryReaders:
    """Reads chips on a thread; while a read blocks, another thread goes on."""

    def __init__(self, wake: Wake, read: Callable[..., Telemetry] = read_telemetry) -> None:
        self._wake = wake
        self._read = read
        self._jobs = queue.SimpleQueue[ReadJob]()
        self._results = queue.SimpleQueue[ReadResult]()
        self._files: dict[PciFunction, AttributeFiles] = {}  # of idle chips
        self.pending: dict[str, float | None] = {}  # when it began; None: it waits
        self._threads = 0

    def submit(
        self, functions: Iterable[PciFunction], *, periodic: bool, details: Settings | None = None
    ) -> None:
        """Read these chips, except those that are being read."""
        for function in functions:
            if function.bdf not in self.pending:
                self.pending[function.bdf] = None
                files = self._files.pop(function, None) or AttributeFiles()
                self._jobs.put(ReadJob(function, periodic, details, files))
        # After this turn: side by side, both threads would wait for the GIL.
        asyncio.get_running_loop().call_soon(self._start_thread)

    def collect(self, now: float) -> list[Reading]:
        readings = []
        error = None
        while not self._results.empty():
            job, result = self._results.get()
            if job is None:
                self._threads -= 1
                continue
            bdf = job.function.bdf
            if isinstance(result, float):
                self.pending[bdf] = result
                continue
            del self.pending[bdf]
            self._files[job.function] = job.files
            if isinstance(result, Reading):
                readings.append(result)
            error = result if isinstance(result, OSError) else error
        self._start_thread()
        if error:
            raise error
        return readings

    def slow(self, now: float) -> dict[str, float]:
        """Return the ages of reads that take long, by address."""
        ages = {}
        for bdf, began in self.pending.items():
            if began is not None and now - began >= SLOW_AFTER:
                ages[bdf] = now - began
        return ages

    def is_settled(self, now: float) -> bool:
        """Return whether every read has ended or is slow."""
        return len(self.pending) == len(self.slow(now))

    def close_files(self, present: Collection[PciFunction]) -> None:
        for function in self._files.keys() - present:
            self._files.pop(function).close()

    def _start_thread(self) -> None:
        """Start a thread if jobs wait and all others are blocked."""
        if not self._jobs.empty() and self._threads <= len(self.slow(monotonic())):
            try:
                _thread.start_new_thread(self._run, (asyncio.get_running_loop(),))
            except RuntimeError as error:
                self._results.put((self._jobs.get_nowait(), OSError(errno.EAGAIN, str(error))))
            else:
                self._threads += 1

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                self._results.put((job, monotonic()))
                result = None
                with log_and_continue(f"reading {job.function.bdf}"):
                    result = self._read_chip(job)
                self._results.put((job, result))
        self._results.put((None, None))
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._wake)

    def _read_chip(self, job: ReadJob) -> Reading | OSError:
        """Return a reading, or the daemon's own error."""
        function = job.function
        sensors = processes = None
        try:
            if job.details:
                sensors = read_sensors(function, job.files.hwmon(function))
                processes = processes_on(job.details, function.ordinal or 0)
            # Afterwards: the chip was alive when its sensors were read.
            telemetry = self._read(function, job.files)
        except OSError as error:
            return error
        if sensors and (telemetry.all_ones or telemetry.error):
            sensors = {}
        return Reading(function, telemetry, monotonic(), job.periodic, sensors, processes)


# ==== FILES: for others, and to survive a restart =================================================


class OutputFile:
    """A file that is replaced when its text changes, and removed if that fails."""

    def __init__(self, path: str, mode: int = 0o644) -> None:
        self.path = path
        self._mode = mode
        self._kept: tuple[str | None, FileIdentity | None] | None = None  # text and file, if right
        self._failures: set[str] = set()  # that were logged

    def keep(self, text: str | None) -> None:
        with suppress(OSError):
            if self._kept == (text, file_identity(self.path)):
                return
        if text is None:
            self._remove()
        else:
            self.write(text)

    def write(self, text: str) -> None:
        new = f"{dirname(self.path)}/.{basename(self.path)}.new"
        self._kept = None
        try:
            with suppress(FileNotFoundError):
                os.unlink(new)  # a killed daemon's
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), self._mode)
            os.replace(new, self.path)
            self._kept = (text, file_identity(self.path))
            self._failures.clear()
        except FileNotFoundError:
            pass  # without its directory nothing reads it
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            self._log_failure(f"cannot be written: {error.strerror}")
            if self._mode != 0o600 and try_read(self.path) != text.strip():
                self._remove()

    def _remove(self) -> None:
        try:
            if_exists(os.unlink, self.path)
            self._kept = (None, None)
        except OSError as error:
            self._log_failure(f"is out of date and cannot be removed: {error.strerror}")

    def _log_failure(self, reason: str) -> None:
        if reason not in self._failures:
            log.warning("%s %s", self.path, reason)
        self._failures.add(reason)


class StateFile:
    """State that survives a restart of the daemon within the same boot."""

    VERSION = 2

    def __init__(self, settings: Settings) -> None:
        self.files: list[str] = []  # of previous daemons, in any boot
        self.chips: Json = {}
        self.allocations: list[Any] = []
        self._boot = try_read(f"{settings.proc_root}/sys/kernel/random/boot_id")
        self._file: OutputFile | None = None
        if settings.state_dir:
            self._file = OutputFile(f"{settings.state_dir}/state.json", 0o600)
            self._load(self._file.path)

    def _load(self, path: str) -> None:
        try:
            with open(path, encoding="utf-8") as file:
                checksum, _, text = file.read().partition("\n")
            content = json.loads(text)
            if checksum != _checksum(text) or content["version"] != self.VERSION:
                raise ValueError("wrong checksum or version")
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("%s is discarded: %s", path, error)
            return
        self.files = content["files"]
        if content["boot"] == self._boot:
            self.chips = content["chips"]
            self.allocations = content["allocations"]

    def save(self, **parts: Any) -> None:
        if self._file:
            text = json.dumps({"version": self.VERSION, "boot": self._boot, **parts})
            self._file.keep(f"{_checksum(text)}\n{text}")


def _checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


class OutputFiles:
    """The files for others, and those of former configurations."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.by_path = {path: OutputFile(path) for path in paths}

    def keep(self, wanted: Mapping[str, str | None], others: Collection[str]) -> None:
        """Write texts by path; None: no file for now. others: paths for touch()."""
        for path in {*wanted, *self.by_path}.difference(others):
            file = self.by_path.setdefault(path, OutputFile(path))
            file.keep(wanted.get(path))
            if path not in wanted and not os.path.lexists(path):
                del self.by_path[path]

    def touch(self, path: str, text: str) -> None:
        """Write a file: its time shows that the daemon is alive."""
        self.by_path.setdefault(path, OutputFile(path)).write(text)


def make_lock_directory(path: str) -> None:
    """Create a directory where containers can remove only their own locks."""
    for directory in (dirname(path), path):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o755)
            os.chmod(directory, 0o1777 if directory == path else 0o755)
        status = os.lstat(directory)
        # A container may own its /dev/shm.
        is_trusted = directory == path or status.st_uid in (0, os.geteuid())
        if not stat.S_ISDIR(status.st_mode) or not is_trusted:
            raise PermissionError(errno.EPERM, "not a directory, or another user's", directory)


# ==== SYSTEMD: readiness, status, watchdog, logs ==================================================


class ServiceManager:
    """Notifies systemd (sd_notify(3))."""

    def __init__(self, environ: Environment) -> None:
        self.status = ""
        self._environ = environ
        self._notifier = sdnotify.SystemdNotifier()
        if self._notifier.socket:
            self._notifier.socket.setblocking(False)  # a manager can hang
        timeout = decimal(environ.get("WATCHDOG_USEC"))
        self.feed_interval = timeout / 2e6 if timeout else inf  # seconds

    def notify(self, *states: str) -> None:
        # sdnotify encodes in Latin-1, systemd expects UTF-8.
        self._notifier.notify("\n".join(states).encode().decode("latin-1"))

    def show(self, status: str) -> None:
        if status != self.status:
            self.status = status
            self.notify(f"STATUS={status}")

    def feed_watchdog(self) -> None:
        if self.feed_interval < inf:
            self.notify("WATCHDOG=1")

    def sockets(self, name: str) -> list[socket.socket]:
        """Return the sockets that systemd passed in (sd_listen_fds(3))."""
        if self._environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        count = decimal(self._environ.get("LISTEN_FDS")) or 0
        names = self._environ.get("LISTEN_FDNAMES", "").split(":")[:count]
        return [socket.socket(fileno=fd) for fd, each in enumerate(names, 3) if each == name]


class _JournalFormatter(logging.Formatter):
    """Adds sd-daemon(3)'s priorities."""

    def format(self, record: logging.LogRecord) -> str:
        priorities = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4}
        priority = priorities.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _without_traceback_of_garbage(record: logging.LogRecord) -> bool:
    """Shorten gRPC's log record for a request that is no protobuf."""
    if record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.exc_info = record.exc_text = None
    return True


def set_up_logging(environ: Environment, *, has_timestamps: bool) -> None:
    """Log to stderr, an event a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_without_traceback_of_garbage)
    form = "%(asctime)s %(levelname)-7s %(message)s" if has_timestamps else None
    handler.setFormatter(logging.Formatter(form))
    with suppress(OSError):
        status = os.fstat(2)  # else redirected: systemd.exec(5)
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler.setFormatter(_JournalFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


# ==== KERNEL EVENTS: of devices, and in the kubelet's directory ===================================

NETLINK_KOBJECT_UEVENT = 15
OUR_PCI_ID = f"\0PCI_ID={VENDOR:04X}:".encode()
SOCKET_PREFIX = "tt-"
EXIT_DIRECTORY_UNUSABLE = 74  # EX_IOERR
EXIT_ALREADY_RUNNING = 75  # EX_TEMPFAIL
_libc = ctypes.CDLL(None, use_errno=True)


def open_uevent_socket() -> socket.socket:
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    kernel = socket.socket(socket.AF_NETLINK, kind, NETLINK_KOBJECT_UEVENT)
    kernel.bind((0, 1))  # group 1: the kernel's, 2: udevd's
    return kernel


class UeventSocket:
    """Receives the kernel's uevents about Tenstorrent devices and functions."""

    def __init__(self, wake: Wake) -> None:
        self.has_events = False
        self._wake = wake
        self._socket: socket.socket | None = None

    def open(self) -> None:
        try:
            self._socket = open_uevent_socket()
        except OSError as error:
            log.warning("no kernel events (%s): polling for changes instead", error.strerror)
            return
        asyncio.get_running_loop().add_reader(self._socket, self._read, self._socket)

    def close(self) -> None:
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _read(self, kernel: socket.socket) -> None:
        while True:
            try:
                message, sender = kernel.recvfrom(8192)
            except BlockingIOError:
                break
            except OSError:  # ENOBUFS: some were lost
                self.has_events = True
            else:
                is_ours = DRIVER.encode() in message or OUR_PCI_ID in message
                self.has_events |= is_ours and sender[0] == 0  # the kernel's port ID
        if self.has_events:
            self._wake()


class DirectoryError(Exception):
    """The kubelet's directory cannot be used: exit status and reason."""


class PluginDirectory:
    """The kubelet's device plugin directory: locked by one daemon, and watched."""

    # Moved from, to, created, deleted; itself deleted, moved; only a directory (inotify(7)).
    MASK = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x0100_0000

    def __init__(self, path: str, wake: Wake) -> None:
        self.path = path
        self.names: set[str] = set()  # others' files, without the checkpoint
        self._wake = wake
        self._locked = -1  # descriptor
        self._inotify = -1
        self.watch = -1  # negative: none

    def open(self) -> None:
        self._inotify = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._inotify >= 0:
            asyncio.get_running_loop().add_reader(self._inotify, self._read)
        self.check()
        if self.watch < 0:
            reason = f"{os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_*"
            log.warning("no inotify watch (%s): polling for kubelet restarts", reason)

    def close(self) -> None:
        for descriptor in (self._inotify, self._locked):
            if descriptor >= 0:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)

    def check(self) -> None:
        """Create, lock and watch the directory if it is a new one; raises DirectoryError."""
        try:
            if not isdir(self.path):
                os.makedirs(self.path, exist_ok=True)
                os.chmod(self.path, 0o750)  # despite the umask
            status = os.stat(self.path)
            if self._locked < 0 or not os.path.samestat(os.fstat(self._locked), status):
                self._lock()
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EROFS, "it is not writable")
        except OSError as error:
            reason = f"{self.path} cannot be used: {error.strerror}; exiting"
            raise DirectoryError(EXIT_DIRECTORY_UNUSABLE, reason) from None
        if self.watch < 0 <= self._inotify:
            path = os.fsencode(self.path)
            self.watch = _libc.inotify_add_watch(self._inotify, path, ctypes.c_uint32(self.MASK))

    def _lock(self) -> None:
        former = self._locked
        self._locked = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.watch = -1
        if former >= 0:
            os.close(former)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = "another process"
            inode = os.fstat(self._locked).st_ino
            line = rf"^\d+: FLOCK +\S+ +WRITE +(\d+) \S+:{inode} "
            if match := re.search(line, try_read("/proc/locks") or "", re.MULTILINE):
                holder = f"process {match[1]} ({try_read(f'/proc/{match[1]}/comm')!r})"
            reason = f"{self.path} is locked by {holder}; exiting"
            raise DirectoryError(EXIT_ALREADY_RUNNING, reason) from None

    def has_changed(self) -> bool:
        """Return whether others' files came or went since the last call."""
        before = self.names
        ours = (SOCKET_PREFIX, ".")
        names = {name for name in names_in(self.path) if not name.startswith(ours)}
        self.names = names - {CHECKPOINT}
        return self.names != before

    def _read(self) -> None:
        os.read(self._inotify, 65536)
        self._wake()


# ==== NODE: observes this machine, and decides ====================================================


class Node:
    """The one owner of settings, inventory and allocations."""

    def __init__(self, settings: Settings, wake: Wake) -> None:
        self.settings = settings
        self.state = StateFile(settings)
        self.inventory = Inventory(self.state.chips)
        self.allocations = AllocationTracker(settings, self.state.allocations, monotonic())
        self.readers = TelemetryReaders(wake)
        self.rejected = ""  # why the configuration on disk is not in force
        self.scanned_at = -inf
        self.polled_at = -inf
        self.kubelet: FileIdentity | None = None  # its socket
        self._decision: Decision | None = None

    def look(self, *, periodic: bool, details: bool = False) -> None:
        """Look for chips, and read each. details: sensors and processes, too."""
        self.inventory.observe(self.settings)
        self.scanned_at = monotonic()
        if periodic:
            self.polled_at = self.scanned_at
        present = self.inventory.present
        self.readers.close_files(present)
        settings = self.settings if details else None
        self.readers.submit(present, periodic=periodic, details=settings)

    def collect(self, now: float) -> None:
        self.inventory.apply(self.readers.collect(now), self.settings.health)
        for bdf, seconds in self.readers.slow(now).items():
            self.inventory.records[bdf].start_listing()
            if seconds > READ_TIMEOUT:
                self.inventory.records[bdf].block()

    def save_state(self, files: Sequence[str]) -> None:
        chips = {}
        for bdf, record in self.inventory.records.items():
            if record.chip.seen:
                chips[bdf] = record.to_state()
        self.state.save(files=files, chips=chips, allocations=self.allocations.to_state())

    def observe_allocations(self, now: float) -> None:
        ours = self._decision.resources if self._decision else ()
        self.kubelet = self.allocations.observe(ours, self.inventory.chip_at, now)

    def decide(self, now: float) -> Decision:
        """Return the desired state, the same object until something changes."""
        observation = Observation(
            self.settings,
            self.inventory.chips,
            self.inventory.driver,
            self.allocations.in_force(now),
            self.allocations.names,
            self.allocations.unreadable,
            existing_mounts(self.settings),
        )
        if self._decision is None or observation != self._decision.seen:
            self._decision = decide(observation)
        return self._decision

    def view(self, decision: Decision, states: States, status: str | None) -> Json:
        """Return what `list` and `check` show. status: None without a daemon."""
        knows_pods = self.allocations.has_read
        faults = {}
        chips = []
        for bdf, chip in decision.chips.items():
            record = self.inventory.records.get(bdf) or ChipRecord(chip, Vitals())
            chips.append(chip_row(decision, chip, record, knows_pods=knows_pods))
            if chip.fault:
                faults[bdf] = chip.fault.name
        resources = []
        for name, resource in decision.resources.items():
            devices = [device for device in resource.unique_devices if device.incomplete]
            incomplete = {device.identifier: device.incomplete for device in devices}
            state, _ = states.get(name, (None, 0))
            resources.append({"name": name, "state": state, "incomplete": incomplete})
        return {
            "version": __version__,
            **{key: getattr(self.settings, key) for key in NEEDS_RESTART},
            "status": status,
            "rejected": self.rejected,
            "driver": decision.seen.driver,
            "unreadable": decision.seen.unreadable,
            "withheld": decision.withheld,
            "resources": resources,
            "faults": faults,
            "chips": chips,
        }


# ==== REQUESTS: observe, decide, answer ===========================================================

LINK_TIMEOUT = 1.0  # seconds that udev has for a link
LINK_INTERVAL = 0.02
GATE_TIMEOUT = 25.0  # seconds; the kubelet waits 30
GATE_INTERVAL = 0.1


class Allocator:
    """Answers requests for devices, and delays containers on busy chips."""

    def __init__(self, node: Node) -> None:
        self.counts = Counts()
        self.is_closing = False
        self._node = node

    def _decide(self, now: float) -> Decision:
        self._node.observe_allocations(now)
        return self._node.decide(now)

    async def allocate(self, name: str, containers: Containers) -> list[Edits]:
        """Return what containers with these IDs get; raises RequestError."""
        deadline = monotonic() + LINK_TIMEOUT
        answer = None
        try:
            while answer is None:
                answer = self._answer(name, containers, may_wait=monotonic() < deadline)
                if answer is None:
                    await asyncio.sleep(LINK_INTERVAL)
        finally:
            self.counts[name, "refused" if answer is None else "granted"] += 1
        return answer

    def _answer(self, name: str, containers: Containers, *, may_wait: bool) -> list[Edits] | None:
        """Return the answer, None to wait for a link: the kubelet keeps it for the pod's life."""
        now = monotonic()
        settings = self._node.settings
        decision = self._decide(now)
        resource = decision.resource(name)
        check_request(resource, containers)
        chips = [resource.chips(ids) for ids in containers]
        links = {}
        for chip in chain(*chips):
            if fault := file_fault_now(chip.function):  # before its event
                reason = f"device {chip.bdf}: device file is invalid: {fault}"
                raise RequestError(Status.FAILED_PRECONDITION, reason)
            if link := link_path(settings, chip.function):
                links[chip.bdf] = link
            elif may_wait and expects_links(settings):
                return None
        mounts = [*decision.seen.mounts] if settings.device_list_strategy != "cdi" else []
        if locks := lock_path(resource, chain(*containers), settings):
            mounts.append(Mount(locks, "/dev/shm"))
        for ids, theirs in zip(containers, chips, strict=True):
            pending = Allocation(name, frozenset(ids), frozenset(chip.bdf for chip in theirs))
            self._node.allocations.add_pending(pending, now)
        return [container_edits(each, links, settings, mounts) for each in chips]

    def prefer(self, name: str, question: pb.ContainerPreferredAllocationRequest) -> list[str]:
        """Return the best IDs; raises RequestError."""
        now = monotonic()
        resource = self._decide(now).resource(name)
        allocations = self._node.allocations
        required = question.must_include_deviceIDs
        free = frozenset(question.available_deviceIDs).difference(required)
        busy: set[str] = set()
        for each in allocations.in_force(now):
            is_free = each.resource == name and not free.isdisjoint(each.ids)
            if is_free and allocations.is_running(each, now):
                busy |= each.ids
        available = question.available_deviceIDs
        return preferred_allocation(resource, available, required, question.allocation_size, busy)

    async def wait_until_free(self, name: str, ids: Collection[str]) -> None:
        """Wait until no other pod runs on these chips; raises RequestError.

        Kubelets pass on the device of a pod deleted by force while it runs. After an error they
        call again.
        """
        deadline = monotonic() + GATE_TIMEOUT
        pod = self._other_pod(name, ids)
        if pod:
            log.info("%s: container start waits for %s to terminate", name, pod)
        while pod:
            if monotonic() > deadline or self.is_closing:
                reason = f"{pod} still runs on the device and must end first"
                raise RequestError(Status.UNAVAILABLE, reason)
            await asyncio.sleep(GATE_INTERVAL)
            pod = self._other_pod(name, ids)

    def _other_pod(self, name: str, ids: Collection[str]) -> str | None:
        """Return another pod that runs on these chips without sharing them."""
        now = monotonic()
        allocations = self._node.allocations
        addresses = {chip.bdf for chip in self._decide(now).resource(name).chips(ids)}
        in_force = allocations.in_force(now)
        own = ""
        for each in in_force:
            if (each.resource, each.ids) == (name, frozenset(ids)):
                own = each.pod  # of the newest answer
        for each in in_force:
            shares_device = each.resource == name and all(map(is_replica, {*each.ids, *ids}))
            is_other = each.pod != own and not addresses.isdisjoint(each.chips)
            if is_other and not shares_device and allocations.is_running(each, now):
                return pod_label(each, allocations.names)
        return None


def lock_path(resource: Resource, ids: Iterable[str], settings: Settings) -> str | None:
    """Create and return the /dev/shm of replicas; raises RequestError."""
    path = settings.sharing.lock_dir
    if not path or not any(map(is_replica, ids)):
        return None
    if path == "/dev/shm":  # the host's
        return path
    path = f"{path}/{resource.short_name}"
    try:
        make_lock_directory(path)
    except OSError as error:
        reason = f"no directory for the locks of {resource.name}: {error.filename}"
        raise RequestError(Status.UNAVAILABLE, f"{reason}: {error.strerror}") from None
    return path


# ==== SESSION: device list, socket, registration (v1beta1) ========================================

REGISTER_TIMEOUT = 10.0  # seconds
STREAM_DELAY = 0.05  # seconds until a kubelet notices a stream's end
CHECKPOINT_TIMEOUT = 1.0  # seconds until a list is in the checkpoint
MAX_RESENDS = 2
BACKOFF = (0.1, 5.0)  # seconds: the first pause and the longest
# Else channels share the back-off from a dead socket.
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),
)
PLUGIN_OPTIONS = pb.DevicePluginOptions(
    pre_start_required=True, get_preferred_allocation_available=True
)
Context = grpc.aio.ServicerContext[Any, Any]
_endpoint_numbers = count(1)


class RegistrationError(Exception):
    """Why a resource is not registered."""


class DeviceListStream:
    """A resource's device list, for all open ListAndWatch streams."""

    def __init__(self) -> None:
        self.message = DeviceList()
        self.healthy: Names = frozenset()
        self.ever_advertised: set[str] = set()
        self.sent_at = -inf
        self._changed = asyncio.Event()

    def update(self, message: DeviceList) -> None:
        if message is not self.message and message != self.message:
            healthy = (each.ID for each in message.devices if each.health == "Healthy")
            self.healthy = frozenset(healthy)
            self.ever_advertised |= {device.ID for device in message.devices}
            self.message = message
            self.resend()

    def resend(self) -> None:
        """Send the list again: the kubelet then writes its checkpoint."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def messages(self) -> AsyncIterator[DeviceList]:
        while True:
            changed = self._changed
            self.sent_at = monotonic()
            yield self.message
            await changed.wait()


class Attempt(rpc.DevicePluginServicer):
    """One socket, registered once, and the kubelet's calls on it."""

    def __init__(self, session: KubeletSession, path: str) -> None:
        self.path = path
        self.file: FileIdentity | None = None  # its socket, while bound
        self.kubelet: FileIdentity | None = None  # the one that was sent Register
        self.appeared = asyncio.Event()  # the kubelet's socket
        self.is_watched = False  # by the kubelet
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self.retry_at = -inf  # when the next one is due, once this has ended
        self._session = session
        self.task = asyncio.create_task(session.run(self))

    def is_outdated(self, kubelet: FileIdentity | None) -> bool:
        """Return whether its socket was deleted, or another kubelet has started."""
        works = self.is_watched and kubelet is None
        is_lost = not works and self.file is not None and file_identity(self.path) != self.file
        return is_lost or (self.kubelet is not None and kubelet not in (None, self.kubelet))

    def end(self, reason: str) -> None:
        """End it, once."""
        if not self.ended.done():
            self.ended.set_result(reason)

    async def GetDevicePluginOptions(self, request: Any, context: Context) -> Any:
        return PLUGIN_OPTIONS

    async def ListAndWatch(self, request: Any, context: Context) -> AsyncIterator[DeviceList]:
        is_kubelet = self.kubelet is not None and not self.is_watched
        self.is_watched |= is_kubelet
        try:
            async for message in self._session.stream.messages():
                yield message
        finally:
            if is_kubelet:
                self.is_watched = False
                self.end("kubelet closed the ListAndWatch stream")

    async def GetPreferredAllocation(self, request: Any, context: Context) -> Any:
        response = pb.PreferredAllocationResponse()
        async with self._rejecting(context, "rejected GetPreferredAllocation"):
            for each in request.container_requests:
                ids = self._session.allocator.prefer(self._session.name, each)
                response.container_responses.add(deviceIDs=ids)
        return response

    async def Allocate(self, request: Any, context: Context) -> Any:
        containers = [list(each.devices_ids) for each in request.container_requests]
        async with self._rejecting(context, "rejected Allocate"):
            answers = await self._session.allocator.allocate(self._session.name, containers)
            log.debug("%s: allocated: %s", self._session.name, containers)
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(self, request: Any, context: Context) -> Any:
        async with self._rejecting(context, "container start delayed"):
            await self._session.allocator.wait_until_free(self._session.name, request.devices_ids)
        return pb.PreStartContainerResponse()

    @asynccontextmanager
    async def _rejecting(self, context: Context, event: str) -> AsyncIterator[None]:
        """Turn errors into the call's status, and log them."""
        try:
            yield
            return
        except RequestError as error:
            code, reason = error.args
        except OSError as error:  # of the daemon itself
            code = Status.UNAVAILABLE
            reason = f"internal error: {error}"
        log.warning("%s: %s: %s", self._session.name, event, reason)
        await context.abort(code, reason)


async def completed(work: Awaitable[object]) -> None:
    """Wait for something, even if cancelled."""
    future = asyncio.ensure_future(work)
    try:
        await asyncio.wait({future})
    finally:
        await asyncio.wait({future})


def grpc_message(error: Exception) -> str:
    text = str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        text = error.details() or error.code().name
    return " ".join(text.split())


def connection_error(path: str) -> int:
    """Return the errno of connecting to a socket, or 0."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as probe:
        number = probe.connect_ex(path)
    return 0 if number == errno.EAGAIN else number  # EAGAIN: its queue is full


def remove_dead_sockets(directory: str) -> None:
    for name in names_in(directory):
        if re.fullmatch(rf"{SOCKET_PREFIX}.+\.\d+-\d+\.sock", name):
            with suppress(OSError):
                os.unlink(f"{directory}/{name}")


class KubeletSession:
    """Keeps a resource registered, by one attempt after another: bind, register, serve.

    Each has a new socket name: kubelet 1.37 rejects one to which it has a connection
    (plugin/v1beta1/server.go), and a gRPC server that stops unlinks its path.
    """

    def __init__(self, name: str, allocator: Allocator, directory: str, wake: Wake) -> None:
        self.name = name
        self.state = ""  # REGISTERED, or why it is not; "": unknown
        self.registrations = 0  # that succeeded
        self.stream = DeviceListStream()
        self.allocator = allocator
        self._directory = directory
        self._wake = wake
        self._kubelet: FileIdentity | None = None  # its socket now
        self._attempt: Attempt | None = None
        self._backoff = BACKOFF[0]  # 0: the next attempt is due at once
        self._mismatch: tuple[float, int] | None = None  # since when; lists sent since

    @property
    def retry_at(self) -> float:
        """Return when the next attempt is due; inf: one is under way."""
        if self._attempt is None:
            return -inf
        return self._attempt.retry_at if self._attempt.task.done() else inf

    @property
    def is_serving(self) -> bool:
        """Return whether a socket is bound, or could not be."""
        return bool(self.state) or (self._attempt is not None and self._attempt.file is not None)

    def reconcile(
        self, devices: DeviceList, kubelet: FileIdentity | None, *, disturbed: bool
    ) -> None:
        """Bring list and registration in line. disturbed: the directory has changed."""
        self.stream.update(devices)
        attempt = self._attempt
        is_outdated = attempt is not None and attempt.is_outdated(kubelet)
        if attempt and is_outdated:
            attempt.task.cancel()  # once it has ended, another turn makes the next one
        # A kubelet replaces its socket within a turn: the names stay the same.
        if disturbed or is_outdated or kubelet not in (None, self._kubelet):
            self._backoff = 0.0  # also if the present attempt takes some turns to end
            if attempt:
                attempt.retry_at = -inf
        self._kubelet = kubelet
        if attempt is None or monotonic() >= self.retry_at:
            self._backoff = self._backoff or BACKOFF[0]
            name = basename(self.name)[:18]  # see PLUGIN_DIR_MAX
            number = f"{os.getpid()}-{next(_endpoint_numbers) % 100_000}"
            path = f"{self._directory}/{SOCKET_PREFIX}{name}.{number}.sock"
            attempt = self._attempt = Attempt(self, path)
            attempt.task.add_done_callback(lambda _: self._wake())
        if kubelet:
            attempt.appeared.set()

    async def run(self, attempt: Attempt) -> None:
        if self.state == REGISTERED:
            self.state = ""  # the former attempt was
        started = monotonic()
        with log_and_continue(f"the session of {self.name}"):
            try:
                await self._serve(attempt)
            except (RegistrationError, OSError) as error:
                self._set_state(str(error))
        if monotonic() - started > 30:  # seconds: it held
            self._backoff = BACKOFF[0]
        attempt.retry_at = monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, BACKOFF[1])

    async def _serve(self, attempt: Attempt) -> None:
        """Bind, register and serve; raises RegistrationError in the end."""
        # Connections without a handshake are closed; by default after two minutes.
        server = grpc.aio.server(options=[("grpc.server_handshake_timeout_ms", 5000)])
        rpc.add_DevicePluginServicer_to_server(attempt, server)  # type: ignore[no-untyped-call]
        try:
            try:
                server.add_insecure_port(f"unix:{attempt.path}")
            except RuntimeError:  # gRPC hides bind()'s error
                raise RegistrationError(f"cannot create sockets in {self._directory}") from None
            attempt.file = file_identity(attempt.path) or (0, 0, 0)  # it was deleted since
            await completed(server.start())
            await self._register(attempt)
            await asyncio.wait({attempt.ended}, timeout=REGISTER_TIMEOUT)
            if not attempt.is_watched:
                attempt.end("kubelet accepted Register but opened no ListAndWatch stream")
            raise RegistrationError(await attempt.ended)
        finally:
            was_watched = attempt.is_watched and attempt.kubelet == self._kubelet
            attempt.file = attempt.kubelet = None  # no longer outdated
            await completed(server.stop(0.1 if self.allocator.is_closing else None))
            if was_watched and not self.allocator.is_closing:
                # Before 1.37 the end of any stream ends the newest registration (manager.go,
                # PluginDisconnected), so it must come first.
                await asyncio.sleep(STREAM_DELAY)

    async def _register(self, attempt: Attempt) -> None:
        """Wait for the kubelet and register; raises RegistrationError."""
        path = f"{self._directory}/{KUBELET_SOCKET}"
        if not attempt.appeared.is_set():
            self._set_state(f"waiting for kubelet ({path} does not exist)")
            await attempt.appeared.wait()
        for pause in (0.001, 0.002, 0.004, 0.008):  # it is bound before it listens
            if connection_error(path):
                await asyncio.sleep(pause)
        if connection_error(path):
            raise RegistrationError("waiting for kubelet (its socket refuses connections)")
        attempt.kubelet = file_identity(path)
        if attempt.is_outdated(attempt.kubelet):  # kubelets delete all sockets first
            raise RegistrationError("its socket was deleted")
        endpoint = basename(attempt.path)
        request = pb.RegisterRequest(
            version="v1beta1", endpoint=endpoint, resource_name=self.name, options=PLUGIN_OPTIONS
        )
        async with grpc.aio.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) as channel:
            stub = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=REGISTER_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                reason = f"rejected Register: {grpc_message(error)}"
                if error.code() == Status.DEADLINE_EXCEEDED:
                    reason = f"did not answer Register within {REGISTER_TIMEOUT:g} s"
                raise RegistrationError(f"kubelet {reason}") from None
        self.registrations += 1
        count = pluralize(len(self.stream.message.devices), "device ID")
        log.info("%s: %s, %s", self.name, REGISTERED, count)
        self._set_state(REGISTERED)

    def compare(self, registered: Names | None, now: float) -> None:
        """Compare our list with the IDs that the checkpoint has as healthy.

        A write was overtaken, or another plugin has registered our name and gets our
        allocations, though our stream stays open (manager.go, addEndpoint).
        """
        if self.state != REGISTERED or registered in (None, self.stream.healthy):
            self._mismatch = None
            return
        since, resends = self._mismatch = self._mismatch or (now, 0)
        asyncio.get_running_loop().call_later(CHECKPOINT_TIMEOUT, self._wake)
        if now - since <= CHECKPOINT_TIMEOUT:
            return
        is_ours = registered <= self.stream.ever_advertised
        if is_ours and since - self.stream.sent_at <= CHECKPOINT_TIMEOUT and resends < MAX_RESENDS:
            self._mismatch = (now, resends + 1)
            self.stream.resend()
        elif self._attempt:
            self._mismatch = None
            self._attempt.end("another plugin has registered this name; stop it")

    async def close(self) -> None:
        if self._attempt:
            self._attempt.task.cancel()
            await asyncio.wait({self._attempt.task})

    def _set_state(self, state: str) -> None:
        if state != self.state and state != REGISTERED:
            level = logging.INFO if state.startswith("waiting") else logging.WARNING
            log.log(level, "%s: %s", self.name, state)
        self.state = state
        self._wake()


class Sessions:
    """The sessions, one for each resource."""

    def __init__(self, allocator: Allocator, directory: str, wake: Wake) -> None:
        self.by_name: dict[str, KubeletSession] = {}
        self.allocator = allocator
        self._directory = directory
        self._wake = wake
        self._closing: dict[str, Task] = {}

    @property
    def states(self) -> States:
        return {name: (each.state, each.registrations) for name, each in self.by_name.items()}

    @property
    def retry_at(self) -> float:
        return min((session.retry_at for session in self.by_name.values()), default=inf)

    def reconcile(
        self, lists: Mapping[str, DeviceList], node: Node, now: float, *, disturbed: bool
    ) -> None:
        """Bring the sessions in line with these lists and the checkpoint's healthy IDs."""
        for name in self.by_name.keys() - lists.keys():
            log.info("%s: no devices left; endpoint closed", name)
            task = asyncio.create_task(self.by_name.pop(name).close())
            task.add_done_callback(lambda _: self._wake())
            self._closing[name] = task
        registered = node.allocations.checkpoint.registered
        for name, devices in lists.items():
            closing = self._closing.get(name)
            if closing and not closing.done():
                continue
            session = self.by_name.get(name)
            if session is None:
                session = KubeletSession(name, self.allocator, self._directory, self._wake)
                self.by_name[name] = session
            session.reconcile(devices, node.kubelet, disturbed=disturbed)
            session.compare(registered.get(name, Names()) if registered else None, now)

    def resend_one(self) -> None:
        """Have the kubelet write its checkpoint."""
        for session in self.by_name.values():
            if session.state == REGISTERED:
                session.stream.resend()
                return

    async def close(self) -> None:
        self.allocator.is_closing = True
        closing = (session.close() for session in self.by_name.values())
        await asyncio.gather(*closing, *self._closing.values())


# ==== POD RESOURCES: pods' names, on which nothing depends ========================================

NAMES_TIMEOUT = 1.0  # seconds


class PodResources:
    """Asks for pods' names; kubelets then release ended pods' devices (GetDevices)."""

    def __init__(self, apply: Callable[[PodNames], None]) -> None:
        self.task: Task | None = None
        self._apply = apply
        self._has_failed = False  # which was logged

    def ask(self, path: str) -> None:
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._ask(path))

    async def _ask(self, path: str) -> None:
        names: PodNames = {}
        try:
            names = await list_pods(path)
            self._has_failed = False
        except (grpc.aio.AioRpcError, DecodeError) as error:
            if not self._has_failed:
                log.warning("cannot get pod names from %s: %s", path, grpc_message(error))
            self._has_failed = True
        self._apply(names)


async def list_pods(path: str) -> PodNames:
    """Return pods' names; raises AioRpcError, DecodeError."""
    async with grpc.aio.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) as channel:
        call: Any = channel.unary_unary("/v1.PodResourcesLister/List")
        answer = await call(b"", timeout=NAMES_TIMEOUT)
    names = {}
    for pod in podresources_pb2.ListPodResourcesResponse.FromString(answer).pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                for identifier in devices.device_ids:
                    key = (devices.resource_name, identifier, container.name)
                    names[key] = f"{pod.namespace}/{pod.name}"
    return names


# ==== METRICS SERVER: on a socket that systemd passes in ==========================================


class MetricsServer:
    """Serves `GET /metrics`. A client can only delay its own connection."""

    MAX_CONNECTIONS = 32
    HEAD_MAX = 8192  # bytes of a request
    TIMEOUT = 5.0  # seconds for all of it
    RENDER_TIMEOUT = 4.0  # seconds after which a client gets the last rendering

    def __init__(self, render: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._render = render
        self._rendering: Task | None = None  # shared
        self._last = ""
        self._open: dict[Task, socket.socket] = {}  # the oldest first

    async def text(self) -> str:
        """Return the metrics, rendered once for simultaneous calls."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._refresh())
        await asyncio.wait({self._rendering}, timeout=self.RENDER_TIMEOUT)
        return self._last

    async def _refresh(self) -> None:
        with log_and_continue("rendering metrics"):
            self._last = await self._render()

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections; the oldest makes room for the newest."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            while len(self._open) >= self.MAX_CONNECTIONS:
                oldest = next(iter(self._open))
                oldest.cancel()
                await asyncio.wait({oldest})
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("metrics: cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(self.TIMEOUT)
                continue
            task = asyncio.create_task(self._serve(connection))
            self._open[task] = connection
            task.add_done_callback(lambda task: self._open.pop(task).close())

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._answer(connection), self.TIMEOUT)

    async def _answer(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        head = b""
        while not re.search(rb"\r?\n\r?\n", head):
            received = await loop.sock_recv(connection, self.HEAD_MAX)
            head += received
            if not received or len(head) > self.HEAD_MAX:
                return
        status = "404 Not Found"
        text = "use GET /metrics\n"
        if re.match(rb"GET /metrics[ ?]", head):
            text = await self.text()
            status = "200 OK" if text else "503 Service Unavailable"
        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(text.encode())}",
            "Connection: close",
        ]
        await loop.sock_sendall(connection, "\r\n".join([*lines, "", text]).encode())


# ==== DAEMON: observe, decide, apply ==============================================================

TICK = 5.0  # seconds between turns without an event
START_TICK = 0.02  # likewise, before READY=1
RETRY_TICK = 1.0  # likewise, after an error or without inotify
DEBOUNCE = 0.04  # seconds for which kernel events are gathered
BIND_TIMEOUT = 10.0  # seconds that the driver has for the cards
METRICS_INTERVAL = 15.0  # seconds between readings of sensors
SETTLE_INTERVAL = 0.01  # seconds between looks at reads under way
STATUS_SOCKET = "status.sock"  # in the runtime directory


class Reporter:
    """Reports to those who ask: Prometheus, `list` and `check`."""

    def __init__(self, node: Node, sessions: Sessions) -> None:
        self.metrics = MetricsServer(self._render)
        self._node = node
        self._sessions = sessions
        self._started = time.time()
        self._details_at = -inf  # sensors' and processes'
        self._written_at = -inf  # the metrics file's
        self._tasks: set[Task] = set()

    async def open(self, sockets: Iterable[socket.socket]) -> None:
        """Serve metrics on these sockets, and the view on the status socket."""
        for each in sockets:
            self._start(self.metrics.serve(each))
        if directory := self._node.settings.runtime_dir:
            path = f"{directory}/{STATUS_SOCKET}"
            try:
                if_exists(os.unlink, path)
                await asyncio.start_unix_server(self._serve_view, path)
                os.chmod(path, 0o600)
            except OSError as error:
                log.warning("list and check cannot reach this daemon: %s: %s", path, error.strerror)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def status(self, decision: Decision) -> str:
        status = status_line(decision, self._sessions.states)
        return "; ".join(filter(None, [status, self._node.rejected]))

    def write_metrics(self, files: OutputFiles, now: float) -> None:
        path = self._node.settings.metrics_file
        if now - self._written_at >= METRICS_INTERVAL and path and isdir(dirname(path)):
            self._written_at = now
            self._start(self._write(files))

    async def _write(self, files: OutputFiles) -> None:
        text = await self.metrics.text()
        path = self._node.settings.metrics_file
        if path and text:
            files.touch(path, text)

    async def _render(self) -> str:
        await self._read_details(METRICS_INTERVAL)
        decision = self._node.decide(monotonic())
        counts = self._sessions.allocator.counts
        metrics = plugin_metrics(decision, self._sessions.states, counts, self._started)
        return chip_metrics(decision, self._node.inventory.records) + metrics

    async def _serve_view(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await self._read_details(0.0)
            decision = self._node.decide(monotonic())
            view = self._node.view(decision, self._sessions.states, self.status(decision))
            writer.write(json.dumps(view).encode())
            await writer.drain()
        writer.close()

    async def _read_details(self, max_age: float) -> None:
        await self._settle()
        now = monotonic()
        if now - self._details_at >= max_age:
            self._details_at = now
            with suppress(OSError):  # which the loop logs
                self._node.look(periodic=False, details=True)
            await self._settle()

    async def _settle(self) -> None:
        deadline = monotonic() + READ_TIMEOUT
        while not self._node.readers.is_settled(monotonic()) and monotonic() < deadline:
            await asyncio.sleep(SETTLE_INTERVAL)


@dataclass(slots=True)
class Condition:
    """The daemon's stage, and what events have recorded."""

    stage: str = "starting"  # then "binding", "linking", "ready"
    since: float = 0.0  # when this stage began
    exit_status: int | None = None
    wants_reload: bool = False
    is_failing: bool = False  # the last observation has failed

    def enter(self, stage: str, now: float) -> None:
        self.stage = stage
        self.since = now


class Daemon:
    """The service. Events only record work and wake the loop."""

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], manager: ServiceManager
    ) -> None:
        self._wake = asyncio.Event()
        wake = self._wake.set
        self._condition = Condition()
        self.node = Node(settings, wake)
        self._files = OutputFiles(self.node.state.files)
        self.sessions = Sessions(Allocator(self.node), settings.device_plugin_dir, wake)
        self._reporter = Reporter(self.node, self.sessions)
        self._directory = PluginDirectory(settings.device_plugin_dir, wake)
        self._uevents = UeventSocket(wake)
        self._pod_resources = PodResources(self._apply_names)
        self._manager = manager
        self._load = load
        nothing = self.node.decide(monotonic())  # is logged so far
        self._applied = replace(nothing, chips={}, resources={}, unselected=())

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        condition = self._condition
        try:
            await self._open()
            pause = 0.0
            while condition.exit_status is None:
                timer = asyncio.get_running_loop().call_later(pause, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                self._wake.clear()
                pause = RETRY_TICK
                with log_and_continue("a turn of the loop"):
                    self._turn(monotonic())
                    pause = self._pause(monotonic())
            return condition.exit_status
        finally:
            self._manager.notify("STOPPING=1")
            self._uevents.close()
            await self.sessions.close()
            self._directory.close()

    def end(self, status: int) -> None:
        self._condition.exit_status = status
        self._wake.set()

    def reload(self) -> None:
        self._condition.wants_reload = True
        self._wake.set()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, 0)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        log.setLevel(self.node.settings.log_level.upper())
        try:
            self._directory.open()
        except DirectoryError as error:
            self._exit(*error.args)
            return
        remove_dead_sockets(self._directory.path)
        self._uevents.open()
        await self._reporter.open(self._manager.sockets("metrics"))

    def _exit(self, status: int, reason: str) -> None:
        log.error("%s", reason)
        self.end(status)

    def _pause(self, now: float) -> float:
        if self._condition.is_failing:
            return RETRY_TICK
        node = self.node
        tick = min(TICK if self._directory.watch >= 0 else RETRY_TICK, self._manager.feed_interval)
        due = [now + tick, node.polled_at + node.settings.health.interval, self.sessions.retry_at]
        if self._condition.stage != "ready":
            due.append(now + START_TICK)
        if self._uevents.has_events:
            due.append(node.scanned_at + DEBOUNCE)
        if node.readers.pending:
            due.append(now + SLOW_AFTER)
        return max(0.0, min(due) - now)

    def _turn(self, now: float) -> None:
        wants_reload = self._condition.wants_reload
        is_reported = wants_reload and self._condition.stage == "ready"
        if is_reported:
            self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            if wants_reload:
                self._reload()
            self._reconcile(now)
        finally:
            if is_reported:
                self._manager.notify("READY=1")

    def _reconcile(self, now: float) -> None:
        condition = self._condition
        try:
            self._directory.check()
            is_poll = self._observe(now)
            if condition.is_failing and not self.node.readers.is_settled(now):
                return
            disturbed = self._directory.has_changed()
        except DirectoryError as error:
            self._exit(*error.args)
        except OSError as error:
            if not condition.is_failing:
                log.warning("cannot observe the node, keeping its last state: %s", error)
            condition.is_failing = True
            self.node.scanned_at = -inf  # read all again
            self._uevents.has_events = True
        else:
            if condition.is_failing:
                log.info("the node can be observed again")
            condition.is_failing = False
            if condition.stage != "starting":
                self._apply(now, is_poll=is_poll, disturbed=disturbed)
            self._manager.feed_watchdog()

    def _observe(self, now: float) -> bool:
        """Look at what may have changed; return whether it was a poll."""
        node = self.node
        is_poll = now - node.polled_at >= node.settings.health.interval
        if is_poll or (self._uevents.has_events and now - node.scanned_at >= DEBOUNCE):
            is_complete = node.readers.is_settled(now)
            node.look(periodic=is_poll)
            self._uevents.has_events = not is_complete  # a chip was being read: look once more
        node.collect(now)
        node.observe_allocations(now)
        if self._condition.stage == "starting" and node.readers.is_settled(now):
            self._condition.enter("binding", now)
        return is_poll

    def _apply(self, now: float, *, is_poll: bool, disturbed: bool) -> None:
        node = self.node
        decision = node.decide(now)
        before, self._applied = self._applied, decision
        if decision is not before:
            for level, line in changes(before, decision):
                log.log(level, "%s", line)
        if decision is not before or is_poll:
            self._write_files(decision)
        self.sessions.reconcile(decision.lists, node, now, disturbed=disturbed)
        if is_poll:
            pods = {each.pod for each in node.allocations.in_force(now)} - {""}
            if decision.withheld or pods - node.allocations.names.keys():
                self._pod_resources.ask(node.settings.pod_resources_socket)
            self._reporter.write_metrics(self._files, now)
        waiting = None if self._condition.stage == "ready" else self._get_ready(decision, now)
        self._manager.show(waiting or self._reporter.status(decision))

    def _write_files(self, decision: Decision) -> None:
        settings = self.node.settings
        for resource in decision.resources.values():  # containers start again with it
            with suppress(RequestError):  # Allocate answers with it
                lock_path(resource, resource.devices, settings)
        wanted = {}
        if settings.cdi_dir:
            wanted[f"{settings.cdi_dir}/{CDI_FILE}"] = decision.cdi
        if settings.labels_dir:
            wanted[f"{settings.labels_dir}/{LABELS_FILE}"] = decision.labels
        self._files.keep(wanted, [settings.metrics_file])
        self.node.save_state(sorted(self._files.by_path))

    def _apply_names(self, names: PodNames) -> None:
        """Record pods' names. The kubelet has released ended pods: have it write that."""
        self.node.allocations.apply_names(names)
        if self._applied.withheld:
            self.sessions.resend_one()
        self._wake.set()

    def _get_ready(self, decision: Decision, now: float) -> str | None:
        """Pass the stages up to READY=1; return a status while waiting for the driver."""
        condition = self._condition
        settings = self.node.settings
        present = self.node.inventory.present
        version = decision.seen.driver
        driver = f"driver {version or 'is not loaded'}"
        if condition.stage == "binding":
            unlisted = [each.function for each in decision.chips.values() if not each.listed]
            missing = [each.bdf for each in unlisted if version and can_be_bound(each)]
            if missing and now - condition.since < BIND_TIMEOUT:
                return f"waiting for the driver to create a device file for {missing[0]}"
            if missing:
                log.warning("%s: no device file; starting without it", missing[0])
            if settings.fail_on_init_error and (version is None or not decision.lists):
                self._exit(1, f"{driver}, {pluralize(len(present), 'device')}")
                return None
            condition.enter("linking", now)
        may_wait = expects_links(settings) and now - condition.since < LINK_TIMEOUT
        if may_wait and not all(link_path(settings, function) for function in present):
            return None
        if all(session.is_serving for session in self.sessions.by_name.values()):
            condition.enter("ready", now)
            count = pluralize(len(present), "device")
            log.info("tt-device-plugin %s: %s, %s", __version__, driver, count)
            self._manager.show(self._reporter.status(decision))
            self._manager.notify("READY=1")
        return None

    def _reload(self) -> None:
        self._condition.wants_reload = False
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("reload failed, keeping the old configuration: %s", error)
            self.node.rejected = f"the configuration on disk is rejected: {error}"
            return
        self.node.rejected = ""
        before = self.node.settings
        kept = {key: getattr(before, key) for key in (*NEEDS_RESTART, "state_dir", "runtime_dir")}
        for key in NEEDS_RESTART:
            if getattr(loaded, key) != kept[key]:
                log.warning("%s changes only with a restart; still %s", key, kept[key])
        self.node.settings = replace(loaded, **kept)
        log.setLevel(loaded.log_level.upper())
        log.info("configuration reloaded")


# ==== COMMAND LINE ================================================================================

View = Mapping[str, Any]  # see Node.view()
Finding = tuple[str, str, str]  # "ok", "warn" or "FAIL"; subject; text
Findings = Iterator[Finding]

VIEW_TIMEOUT = 10.0  # seconds: a telemetry read may be blocked
WIDTH = 110  # columns
COLUMNS = {  # by keys of a row
    "N": "index",
    "ADDRESS": "bdf",
    "ID": "id",
    "CARD": "card",
    "SERIAL": "serial",
    "NUMA": "numa_node",
    "FIRMWARE": "firmware",
    "RESOURCE": "resource",
    "°C": "temperature",
    "W": "power",
}

DESCRIPTION = """\
Makes the Tenstorrent accelerators of this node schedulable in Kubernetes.

commands:
  run     the daemon: serves the kubelet's device plugin API; SIGHUP reloads the configuration
  list    one row per chip: health, resource and users; --json for programs
  check   preflight for this node: service, driver, devices, hugepages, kubelet, configuration
"""

EPILOG = """\
Options can also be set by the environment variable in brackets, or in the configuration file, with
underscores. Precedence: flag, environment variable, file, default. Only the file has [health],
[sharing], [[sharing.resources]] and [[mounts]]; see tt-device-plugin(8).
"""


def argument_parser() -> argparse.ArgumentParser:
    usage = "tt-device-plugin run|list|check [OPTIONS]"
    form = partial(argparse.RawTextHelpFormatter, width=80)  # spares shutil
    parser = argparse.ArgumentParser(
        "tt-device-plugin",
        usage,
        DESCRIPTION,
        EPILOG,
        formatter_class=form,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "list", "check"), help=argparse.SUPPRESS)
    add("--version", action="version", version=f"tt-device-plugin {__version__}")
    add("--json", action="store_true", help="with list: an array of objects")
    add("--config-only", action="store_true", help="with check: only the configuration")
    file = f"default {DEFAULT_CONFIG_FILE} [TTDP_CONFIG_FILE]"
    add("--config-file", metavar="FILE", help=file)
    defaults = Settings()
    for option in OPTIONS:
        value = getattr(defaults, option.key)
        default = str(value).lower() if option.is_switch else value
        metavar = "[=BOOL]" if option.is_switch else option.key.rpartition("_")[2].upper()
        text = f"{option.help}; default {default} [{option.variable}]".replace("%", "%%")
        add(option.flag, metavar=metavar, help=textwrap.fill(text, 72, break_on_hyphens=False))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if "run" in words:  # until the daemon handles it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    options = _parsed_options(words)
    set_up_logging(os.environ, has_timestamps=options.command == "run")
    load = partial(load_settings, vars(options), os.environ)
    if options.command != "run":
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        log.setLevel("ERROR")  # the command prints the rest
    problem = None
    try:
        settings = load()
    except ConfigError as error:  # commands go on
        problem = str(error)
        settings = Settings(runtime_dir=os.environ.get("RUNTIME_DIRECTORY"))
        with suppress(ConfigError):
            settings = load(ignore_file=True)
    if options.command == "check":
        return check(settings, problem, config_only=options.config_only)
    if problem:
        log.error("%s", problem)
    if options.command == "list":
        return list_devices(settings, as_json=options.json)
    if problem:
        return EXIT_CONFIG
    return asyncio.run(Daemon(settings, load, ServiceManager(os.environ)).run())


def _parsed_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser()
    # The word after a bare switch is not its value.
    switches = {option.flag for option in OPTIONS if option.is_switch}
    options = parser.parse_args([f"{word}=true" if word in switches else word for word in words])
    if options.command is None:
        parser.print_help(sys.stderr)
        sys.exit(2)
    for flag, command in (("json", "list"), ("config_only", "check")):
        if getattr(options, flag) and options.command != command:
            parser.error(f"--{flag.replace('_', '-')} is an option of {command}")
    return options


def print_safely(text: str, stream: Any = None) -> None:
    """Print a text with escaped control characters; an ASCII terminal gets ASCII."""
    stream = stream or sys.stdout
    escaped = (each if each.isprintable() else ascii(each)[1:-1] for each in text)
    shown = "".join(escaped)
    if (stream.encoding or "ascii").lower() not in ("utf-8", "utf8"):
        shown = shown.translate(str.maketrans("×…°", "x. ")).encode("ascii", "replace").decode()
    print(shown, file=stream)


NOT_RUNNING = "is not running"


def get_view(settings: Settings) -> tuple[View, str | None]:
    """Return the daemon's view; else a sample, and the daemon's problem."""
    path = f"{settings.runtime_dir}/{STATUS_SOCKET}"
    problem = NOT_RUNNING
    if settings.runtime_dir:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(VIEW_TIMEOUT)
                connection.connect(path)
                view: View = json.load(connection.makefile("rb"))
            if all(view[key] == getattr(settings, key) for key in NEEDS_RESTART):
                return view, None
            problem = f"uses other directories than this command ({view['device_plugin_dir']})"
        except PermissionError:
            problem = f"cannot be reached: run as root (permission denied: {path})"
        except (FileNotFoundError, ConnectionRefusedError):
            pass
        except (OSError, ValueError, LookupError) as error:
            problem = f"does not answer on {path}: {error or type(error).__name__}"
    return asyncio.run(sample(settings)), problem


async def sample(settings: Settings) -> View:
    """Look at the node twice, a second apart, to see heartbeats stall."""
    rules = replace(settings, health=replace(settings.health, heartbeat_misses=1))
    node = Node(rules, wake=lambda: None)
    for pause in (0.0, 1.0):
        await asyncio.sleep(pause)
        node.look(periodic=True, details=True)
        deadline = monotonic() + READ_TIMEOUT + 2 * SLOW_AFTER
        while node.readers.pending and monotonic() < deadline:
            await asyncio.sleep(SETTLE_INTERVAL)
            node.collect(monotonic())
    with suppress(OSError):  # not root
        for _ in range(2):  # the first decides under which names entries count
            node.observe_allocations(monotonic())
            node.decide(monotonic())
    with suppress(grpc.aio.AioRpcError, DecodeError):
        node.allocations.apply_names(await list_pods(settings.pod_resources_socket))
    return node.view(node.decide(monotonic()), {}, None)


def list_devices(settings: Settings, *, as_json: bool) -> int:
    view, problem = get_view(settings)
    if problem:
        print_safely(f"the service {problem}; this is a sample", sys.stderr)
    if as_json:
        print(json.dumps(view["chips"], indent=2))
        return 0
    width = WIDTH
    with suppress(OSError):
        width = min(width, os.get_terminal_size(1).columns or width)
    for line in list_lines(view, width):
        print_safely(line)
    return 0


def list_lines(view: View, width: int) -> Iterator[str]:
    rows = view["chips"]
    if not rows:
        yield "no Tenstorrent device on this node"
        return
    firmware = _common(row["firmware"] for row in rows) or "unknown"
    yield f"driver {view['driver'] or 'not loaded'}, firmware {firmware}"
    yield from _table_lines(view, width)
    for text in _reasons(view):
        yield from textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)
    unhealthy = sum(not row["healthy"] for row in rows)
    in_use = sum(_users(row) not in ("-", "?") for row in rows)
    yield f"{pluralize(len(rows), 'chip')}, {unhealthy} unhealthy, {in_use} in use"


def _reasons(view: View) -> Iterator[str]:
    for row in view["chips"]:
        if row["reason"]:
            yield f"{row['bdf']}: {row['reason']}"
        elif row["id"] is None:
            yield f"{row['bdf']}: waiting for the serial number of its board"
    for device, reason in view["withheld"].items():
        yield f"{device}: withheld: {reason}"
    for resource in view["resources"]:
        for identifier, reason in resource["incomplete"].items():
            yield f"{identifier}: {reason}"


def _table_lines(view: View, width: int) -> Iterator[str]:
    """Yield the table, without columns that do not fit."""
    table = [_cells(row, view["faults"]) for row in view["chips"]]
    table.insert(0, {title: title for title in table[0]})
    widths = {title: max(len(cells[title]) for cells in table) for title in table[0]}
    if all(row["id"] in (row["bdf"], None) for row in view["chips"]):
        del widths["ID"]
    for title in ("FIRMWARE", "SERIAL", "NUMA", "CARD"):
        if sum(widths.values()) + 2 * len(widths) - 2 > width:
            del widths[title]
    for cells in table:
        padded = (cells[title].ljust(size) for title, size in widths.items())
        text = "  ".join(padded).rstrip()
        yield text if len(text) <= width else f"{text[: width - 1]}…"


def _cells(row: View, faults: Mapping[str, str]) -> dict[str, str]:
    cells = {}
    for title, key in COLUMNS.items():
        cells[title] = "-" if row[key] is None else str(row[key])
    for title in ("°C", "W"):
        cells[title] = cells[title].partition(".")[0]
    cells["RESOURCE"] = basename(cells["RESOURCE"])
    if row["replicas"]:
        cells["RESOURCE"] += f" ×{row['replicas']}"
    health = "withheld" if row["withheld"] else "healthy"
    cells["HEALTH"] = faults.get(row["bdf"], health)
    cells["USED BY"] = _users(row)
    return cells


def _users(row: View) -> str:
    """Return a chip's users: two names and a count. A pod's process is the pod."""
    pods = [f"{pod['namespace']}/{pod['pod']}".lstrip("/") for pod in row["pods"] or ()]
    users = [*dict.fromkeys(pods)]
    for process in row["processes"] or ():
        if not (pods and process["of_pod"]):
            users.append(f"{process['command']}[{process['pid']}]")
    if not users:
        return "?" if None in (row["pods"], row["processes"]) else "-"
    more = f" +{len(users) - 2}" if len(users) > 2 else ""
    return ", ".join(users[:2]) + more


def check(settings: Settings, problem: str | None, *, config_only: bool) -> int:
    """Print findings; return 1 if any FAILs. problem: of the configuration."""
    level, text = ("FAIL", problem) if problem else ("ok", "valid")
    findings = [(level, "configuration", text)]
    if not config_only:
        view, service_problem = get_view(settings)
        findings += _check_service(view, service_problem)
        for part in (_check_chips, _check_hugepages, _check_files, _check_kubelet):
            findings += part(view, settings)
    width = max(len(subject) for _, subject, _ in findings)
    for level, subject, text in findings:
        print_safely(f"{level:4}  {subject:{width}}  {text}")
    return int(any(level == "FAIL" for level, _, _ in findings))


def _check_service(view: View, problem: str | None) -> Findings:
    if problem == NOT_RUNNING:
        yield "FAIL", "service", "not running; start it: systemctl start tt-device-plugin"
    elif problem:
        yield "FAIL" if "does not answer" in problem else "warn", "service", f"it {problem}"
    elif view["rejected"]:
        yield "FAIL", "service", view["rejected"]
    else:
        yield "ok", "service", f"{view['version']}: {view['status']}"
    version = view["driver"]
    numbers = [int(number) for number in re.findall(r"\d+", version or "")[:2]]
    if version is None:
        yield "FAIL", "driver", f"not loaded; install tt-kmd, then {LOAD_DRIVER}"
    elif numbers and numbers < [2, 7]:
        yield "warn", "driver", f"{version}: update to 2.7 to detect stopped firmware"
    else:
        yield "ok", "driver", version


def _check_chips(view: View, settings: Settings) -> Findings:
    if not view["chips"]:
        yield "warn", "devices", "none on this node; list PCI devices with: lspci -d 1e52:"
    for row in view["chips"]:
        bdf = row["bdf"]
        card = row["card"] or row["arch"] or "unknown card"
        if not row["healthy"]:
            is_device = row["resource"] or row["index"] is not None
            yield "FAIL" if is_device else "warn", bdf, f"{card}: {row['reason']}"
            continue
        withheld = f", withheld: held by {row['withheld']}" if row["withheld"] else ""
        yield "ok", bdf, f"{card}, {row['path']}, healthy{withheld}"
        if row["temperature"] is None and row["firmware"] is None:
            yield "warn", bdf, "no firmware telemetry; if this persists, check dmesg"
        directory = pci_directory(settings, bdf)
        width = decimal(try_read(f"{directory}/current_link_width"))
        most = decimal(try_read(f"{directory}/max_link_width"))
        if width and most and width < most < 63:
            widths = f"PCIe link is x{width}, card supports x{most}"
            yield "warn", bdf, f"{widths}; reseat the card, or check its slot"
        with suppress(OSError):
            mode = stat.S_IMODE(os.stat(row["path"]).st_mode)
            if mode & 0o666 != 0o666:
                remedy = "install the driver's udev rules: not every user can open it"
                yield "warn", bdf, f"{row['path']} has mode {mode:04o}, not 0666; {remedy}"


def _check_hugepages(view: View, settings: Settings) -> Findings:
    """Check for 4 GiB per Wormhole chip without a translating IOMMU."""
    required = []
    for row in view["chips"]:
        group = try_read(f"{pci_directory(settings, row['bdf'])}/iommu_group/type") or ""
        if row["arch"] == "wormhole" and row["path"] and not group.startswith("DMA"):
            required.append(8 if row["board"] == "n300" else 4)
    pages = f"{settings.sysfs_root}/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
    available = decimal(try_read(pages)) or 0
    if available < sum(required):
        chips = f"{pluralize(len(required), 'Wormhole chip')} without an IOMMU"
        remedy = f"boot with hugepagesz=1G hugepages={sum(required)}, or install tt-system-tools"
        yield "warn", "hugepages", f"{available} × 1 GiB for {chips}; {remedy}"
    else:
        yield "ok", "hugepages", f"{available} × 1 GiB{'' if required else ', not needed'}"


def _check_files(view: View, settings: Settings) -> Findings:
    for mount in settings.mounts:
        if not exists(mount.host):
            yield "warn", "mounts", f"{mount.host} does not exist; pods with devices cannot start"
    lock_dir = settings.sharing.lock_dir
    if settings.sharing.resources and lock_dir not in ("", "/dev/shm"):
        start = "run: systemctl start run-ttdp-shm.mount"
        if not isdir(lock_dir):
            yield "warn", "locks", f"{lock_dir} is not a directory; {start}"
        elif lock_dir == Sharing().lock_dir and not os.path.ismount(lock_dir):
            yield "warn", "locks", f"{lock_dir} is not the package's tmpfs; {start}"
        with suppress(OSError):
            for path in (lock_dir, *(each.path for each in os.scandir(lock_dir))):
                if user := os.lstat(path).st_uid:
                    yield "warn", "locks", f"run: chown root {path}: it belongs to user {user}"
    path = f"{settings.cdi_dir}/{CDI_FILE}"
    nodes = {row["bdf"]: row["path"] for row in view["chips"] if row["path"]}
    try:
        with open(path, encoding="utf-8") as file:
            described = cdi_nodes(file.read())
    except (OSError, ValueError) as error:
        by_cdi = settings.device_list_strategy == "cdi"
        if (nodes and (by_cdi or isdir(settings.cdi_dir))) or exists(path):
            reason = getattr(error, "strerror", None) or error
            yield "FAIL", "CDI", f"{path} cannot be read: {reason}; is the service running?"
        return
    bdfs = described.keys() | nodes
    if stale := sorted(bdf for bdf in bdfs if described.get(bdf) != nodes.get(bdf)):
        yield "FAIL", "CDI", f"{path} is stale for {abbreviate(stale)}; is the service running?"
    else:
        yield "ok", "CDI", f"{path} describes the devices"


def _check_kubelet(view: View, settings: Settings) -> Findings:
    directory = settings.device_plugin_dir
    kubelet = f"{directory}/{KUBELET_SOCKET}"
    try:
        mode = os.stat(f"{directory}/.").st_mode
    except PermissionError:
        yield "warn", "kubelet", f"{directory}: run as root (permission denied)"
        return
    except OSError:
        remedy = "if the kubelet uses another directory, set device_plugin_dir"
        yield "warn", "kubelet", f"{directory} does not exist; {remedy}"
        return
    if not os.access(directory, os.W_OK | os.X_OK):
        yield "FAIL", "kubelet", f"{directory} is not writable; run as root, or check its mount"
    if mode & 0o004:
        yield "warn", "kubelet", f"other users can lock {directory}; run: chmod 0750 {directory}"
    number = connection_error(kubelet)
    if not number:
        yield "ok", "kubelet", f"{kubelet} accepts connections"
    elif number == errno.EACCES:
        yield "warn", "kubelet", f"{kubelet}: run as root (permission denied)"
    else:
        yield "warn", "kubelet", f"start the kubelet: {kubelet}: {os.strerror(number)}"
    if view["unreadable"]:
        yield "warn", "kubelet", f"{view['unreadable']}; the kubelet rewrites it with the next pod"
    for resource in view["resources"]:
        if not number and resource["state"] not in (None, REGISTERED):
            reason = resource["state"] or "no answer to Register yet"
            yield "FAIL", resource["name"], f"not registered: {reason}"
        for identifier, reason in resource["incomplete"].items():
            yield "FAIL", resource["name"], f"{identifier}: {reason}"


if __name__ == "__main__":
    sys.exit(main())
