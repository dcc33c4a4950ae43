"""tt-device-plugin: Tenstorrent accelerators, schedulable in Kubernetes, by a daemon on the host.

It finds the cards in sysfs, serves the kubelet's device plugin API (v1beta1) and follows kernel
events. A chapter uses only what stands above it.

    what the world looks like    CONFIGURATION, INVENTORY, CUSTODY
    what we decide               HEALTH, RESOURCES, PREFERRED ALLOCATION
    how we work                  THREADS, FILES, SYSTEMD, KERNEL EVENTS
    how we talk to the kubelet   ALLOCATION, DEVICE PLUGIN SERVICE, KUBELET SESSION, POD RESOURCES
    what ties it together        WHAT OTHERS READ, FLEET, PUBLICATION, DAEMON, COMMAND LINE

The deciding chapters are functions over frozen data: no file, socket or clock. One asyncio loop
drives the rest; only what can block for seconds is read on threads.
"""

from __future__ import annotations

import _thread  # threading's start() waits for the new thread, and its end joins it
import argparse
import asyncio
import base64
import ctypes
import difflib
import errno
import fcntl
import functools
import itertools
import json
import logging
import operator
import os
import queue
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import Enum, auto
from itertools import chain
from math import inf
from os.path import basename, dirname, isdir
from time import monotonic
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, get_args

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

log = logging.getLogger("tt-device-plugin")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def few(names: Sequence[str]) -> str:
    """Return the first of the names: a request can hold ten thousand."""
    shown = ", ".join(repr(name[:63]) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# ==== CONFIGURATION: flag, then environment variable, then file, then default ====================

ResourceNaming = Literal["board", "card", "arch"]
DeviceIdStrategy = Literal["bdf", "asic", "index"]
VisibleDevices = Literal["bdf", "index", "none"]
Unit = Literal["chip", "board"]
DeviceListStrategy = Literal["device-specs", "cdi"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_CONFIG_FILE = "/etc/tt-device-plugin/config.toml"
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: the unit's RestartPreventExitStatus
NEEDS_RESTART = ("device_plugin_dir", "sysfs_root", "dev_root", "proc_root", "state_dir")

SOCKET_PATH_MAX = 107  # the kernel's sun_path holds 108 bytes with its NUL
PLUGIN_DIR_MAX = SOCKET_PATH_MAX - 43  # a slash, and the longest name of ours

TRUE = ("true", "yes", "on", "1")  # in flags and variables
FALSE = ("false", "no", "off", "0")


class ConfigError(Exception):
    """What is wrong with the configuration: source, value and what is valid, on one line."""


class Rule(NamedTuple):
    """What a value in the file, a variable or a flag has to be."""

    valid: str  # in words
    accepts: Callable[[Any], object]
    convert: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()


def _one_of(*choices: str) -> Rule:
    valid = " or ".join([", ".join(choices[:-1]), choices[-1]])
    return Rule(valid, lambda value: value in choices, choices=choices)


def _number(
    valid: str,
    least: float,
    most: float,
    *kinds: type,
) -> Rule:
    kinds = kinds or (int, float)  # a boolean is an int to isinstance()
    return Rule(valid, lambda value: type(value) in kinds and least <= value <= most)


def _text(
    valid: str,
    form: str,
    also: Callable[[str], object] = lambda text: True,
) -> Rule:
    def accepts(value: Any) -> object:
        return isinstance(value, str) and re.fullmatch(form, value) and also(value)

    return Rule(valid, accepts)


def _path(valid: str, form: str = r"[^\0]+", most: int = 4095) -> Rule:
    """Return the rule for a path, which is made absolute; "" stays ""."""
    rule = _text(valid, form, lambda path: len(os.fsencode(os.path.abspath(path))) <= most)
    return rule._replace(convert=lambda path: path and os.path.abspath(path))


def _absolute(valid: str, forbidden: Collection[str] = ()) -> Rule:
    def normal(path: str) -> str:
        return os.path.normpath("/" + path.lstrip("/"))  # normpath() alone keeps a leading "//"

    rule = _text(valid, "/.*", lambda path: path.isprintable() and normal(path) not in forbidden)
    return rule._replace(convert=normal)


def _is_selection(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(item) in (str, int) for item in value)
    return value == "all" or (type(value) is int and value >= 1)


_IN_WORDS = _one_of(*TRUE, *FALSE)
_SWITCH = Rule("true or false", lambda value: isinstance(value, bool))
_TARGET = _absolute(
    "an absolute path in the container that is not the runtime's or ours",
    ("/", "/dev", "/proc", "/sys", "/dev/tenstorrent"),
)
_DIRECTORY = _path("the path of a directory")
_OR_NONE = _path("a path, or empty", r"[^\0]*")
_SOCKET = _path(f"a unix socket's path of at most {SOCKET_PATH_MAX} bytes", most=SOCKET_PATH_MAX)
_PLUGIN_DIR = _path(
    f"a path of at most {PLUGIN_DIR_MAX} bytes, so that sockets in it have an address",
    most=PLUGIN_DIR_MAX,
)
_RESOURCE_NAME = _text(
    "the name of a resource, such as n300 or tenstorrent.com/n300",
    "([A-Za-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
)
# A DNS subdomain, not *.kubernetes.io; 253 characters with a quota's "requests." before it
# (IsExtendedResourceName of kubernetes' pkg/apis/core/v1/helper).
_DOMAIN = _text(
    "a DNS name in lower case that is not Kubernetes' own, such as tenstorrent.com",
    r"(?!requests\.)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*",
    lambda text: len(text) <= 244 and "kubernetes.io" not in text,
)
_SELECTION = Rule(
    '"all", a number of devices from 1 on, or a list of PCI addresses, IDs and ordinals',
    _is_selection,
    lambda value: tuple(map(str, value)) if isinstance(value, list) else value,
)
_DEGREES = _number("", 1, 200)
_LIMIT = Rule(
    'a number of °C from 1 to 200, or "card"',
    lambda value: value == "card" or _DEGREES.accepts(value),
)
_NEVER = Rule("left out: users of a chip take turns, nothing divides it", lambda value: False)

# Names that the program itself gives resources.
_OWN_NAME = re.compile(r"([np]\d+[a-z]?|(galaxy-)?(wormhole|blackhole))(-board)?")


def _key(default: Any, rule: Rule, help: str) -> Any:
    """Make a key of the file; help is its text in every manual."""
    return field(default=default, metadata={"rule": rule, "help": help})


@dataclass(frozen=True, slots=True)
class Mount:
    """A bind mount for every container with a device, while `host` exists."""

    host: str = _key(
        MISSING, _absolute("an absolute path"), "a path of the host, mounted while it exists"
    )
    container: str = _key(MISSING, _TARGET, "where; default: the same path")
    read_only: bool = _key(False, _SWITCH, "whether the container may only read")


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Section [health]."""

    interval: float = _key(
        5.0,
        _number("a number of seconds from 0.1 to 3600", 0.1, 3600),  # a heartbeat takes 0.1 s
        "seconds between two polls",
    )
    temperature_limit: float | Literal["card"] | None = _key(
        None, _LIMIT, '°C at which a chip is too hot, or "card": its own limit; default: none is'
    )
    heartbeat_misses: int = _key(
        2,
        _number("a whole number of polls from 1 on", 1, 1_000_000, int),
        "polls in a row without a heartbeat after which the firmware has stopped",
    )
    trip_holdoff: float = _key(
        300.0,
        _number("a number of seconds from 0 on", 0, 1e9),
        "seconds without a thermal trip after which a chip is healthy again",
    )


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An entry [[sharing.resources]]: several containers on each of these devices."""

    name: str = _key(MISSING, _RESOURCE_NAME, "the resource, as it is called unshared")
    replicas: int = _key(
        MISSING,
        _number("a whole number of containers a device, from 2 to 100", 2, 100, int),
        "containers for each device",
    )
    rename: str | None = _key(None, _RESOURCE_NAME, "the name under which it is shared")
    devices: Literal["all"] | int | tuple[str, ...] = _key(
        "all", _SELECTION, "all, so many, or a list of PCI addresses, IDs or ordinals"
    )

    @property
    def named_devices(self) -> frozenset[str]:
        return frozenset(self.devices if isinstance(self.devices, tuple) else ())


@dataclass(frozen=True, slots=True)
class Sharing:
    """Section [sharing]."""

    rename_by_default: bool = _key(False, _SWITCH, "call what is shared n300.shared, say")
    fail_requests_greater_than_one: bool = _key(
        True, _SWITCH, "refuse a container that asks for several shares: they are no more of it"
    )
    lock_dir: str = _key(
        "/run/ttdp/shm",
        _OR_NONE,
        "where containers on shared devices get their /dev/shm from, and so find their locks; "
        "/dev/shm: the host's, whose files logind deletes at a log-out; empty: none in common",
    )
    resources: tuple[SharedResource, ...] = ()

    def shared_name(self, entry: SharedResource) -> str:
        """Return the name, without the domain, under which devices are shared."""
        return entry.rename or (f"{entry.name}.shared" if self.rename_by_default else entry.name)


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration. Every path is absolute."""

    device_plugin_dir: str = _key(
        "/var/lib/kubelet/device-plugins", _PLUGIN_DIR, "the kubelet's device plugin directory"
    )
    sysfs_root: str = _key("/sys", _DIRECTORY, "where sysfs is mounted")
    dev_root: str = _key("/dev", _DIRECTORY, "where the device nodes are")
    proc_root: str = _key("/proc", _DIRECTORY, "where procfs is mounted")
    resource_domain: str = _key("tenstorrent.com", _DOMAIN, "the resource's name before the slash")
    resource_naming: ResourceNaming = _key(
        "board",
        _one_of(*get_args(ResourceNaming)),
        "what names the resource: board (n300, p150), card (p150a) or arch (wormhole)",
    )
    device_id_strategy: DeviceIdStrategy = _key(
        "bdf",
        _one_of(*get_args(DeviceIdStrategy)),
        "device IDs: bdf (0000:03:00.0), asic (wormhole-<asic id>) or index (the node's number)",
    )
    visible_devices: VisibleDevices = _key(
        "bdf",
        _one_of(*get_args(VisibleDevices)),
        "what TT_VISIBLE_DEVICES holds: bdf, index (0 to n-1 in the container) or none (not set)",
    )
    unit: Unit = _key(
        "chip",
        _one_of(*get_args(Unit)),
        "what one device is: chip, or board (a p300's 2 chips, a Galaxy tray's 8)",
    )
    device_list_strategy: DeviceListStrategy = _key(
        "device-specs",
        _one_of(*get_args(DeviceListStrategy)),
        "how a container gets devices: device-specs (from the kubelet) or cdi (from the CDI file)",
    )
    cdi_dir: str = _key(
        "/var/run/cdi", _OR_NONE, "where runtimes look for CDI files, if it exists; empty: no file"
    )
    labels_dir: str = _key(
        "/etc/kubernetes/node-feature-discovery/features.d",
        _OR_NONE,
        "where node-feature-discovery looks for features, if it exists; empty: no file",
    )
    metrics_file: str = _key(
        "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
        _OR_NONE,
        "the file for node_exporter, if its directory exists; empty: no file",
    )
    pod_resources_socket: str = _key(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        _SOCKET,
        "where the kubelet tells the names of pods that have devices",
    )
    fail_on_init_error: bool = _key(
        False, _SWITCH, "exit with status 1 if there is no driver or no device at start"
    )
    log_level: LogLevel = _key("info", _one_of(*get_args(LogLevel)), "the least that is logged")
    health: HealthSettings = field(default_factory=HealthSettings)
    sharing: Sharing = field(default_factory=Sharing)
    mounts: tuple[Mount, ...] | None = None  # None: the hugepages under dev_root
    state_dir: str | None = None  # systemd's StateDirectory=; None: a restart forgets


class Option(NamedTuple):
    """A setting with a flag, an environment variable and a key in the file."""

    key: str
    flag: str
    variable: str
    rule: Rule
    help: str
    is_switch: bool


OPTIONS = [
    Option(
        key=each.name,
        flag="--" + each.name.replace("_", "-"),
        variable="TTDP_" + each.name.upper(),
        is_switch=each.type == "bool",  # annotations are texts here
        **each.metadata,
    )
    for each in fields(Settings)
    if each.metadata
]


def load_settings(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> Settings:
    """Return the settings by flags, environment and file; raises ConfigError."""
    source = "--config-file"
    path = flags.get("config_file")
    if path is None:
        source = "TTDP_CONFIG_FILE"
        path = environ.get(source) or None
    if path == "":
        raise _invalid(source, path, "the path of a file")
    file = path or DEFAULT_CONFIG_FILE
    values = _read_config_file(file, named_by=source if path else "")
    values["state_dir"] = environ.get("STATE_DIRECTORY", "").partition(":")[0] or None
    for option in OPTIONS:
        texts = {
            option.variable: environ.get(option.variable) or None,
            option.flag: flags.get(option.key),
        }
        for name, text in texts.items():
            if text is not None and option.is_switch:
                values[option.key] = _checked(_IN_WORDS, text.lower(), name) in TRUE
            elif text is not None:
                values[option.key] = _checked(option.rule, text, name)
    settings = Settings(**values)
    if settings.device_list_strategy == "cdi" and not settings.cdi_dir:
        raise _invalid("device_list_strategy", "cdi", "device-specs where cdi_dir is empty")
    return replace(settings, sharing=_checked_sharing(settings, _in_one_line(file)))


def _in_one_line(path: str) -> str:
    return path if path.isprintable() else repr(path)


def _invalid(source: str, value: object, valid: str) -> ConfigError:
    try:
        shown = repr(value).lower() if isinstance(value, bool) else repr(value)
    except (ValueError, RecursionError):  # thousands of digits or brackets
        shown = f"this {type(value).__name__}"
    if len(shown) > 80:
        shown = f"{shown[:80]}…"
    return ConfigError(f"{source}: {shown} is not valid; it must be {valid}")


def _checked(rule: Rule, value: object, source: str) -> Any:
    if not rule.accepts(value):
        raise _invalid(source, value, rule.valid)
    return rule.convert(value)


def _read_config_file(path: str, *, named_by: str) -> dict[str, Any]:
    """Return arguments for Settings; named_by: what names the file, if anything does."""
    shown = _in_one_line(path)
    try:
        with open(path, "rb") as file:
            document = _parse_toml(file.read(), shown)
    except FileNotFoundError:
        if not named_by:
            return {}
        advice = f"{named_by} names it: name one that exists, or leave it out"
        raise ConfigError(f"{shown}: there is no such file; {advice}") from None
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise ConfigError(f"{shown}: {reason}; it must be a readable TOML file") from None
    sections = {"health": _health, "sharing": _sharing, "mounts": _mounts}
    values = _table(shown, "", document, Settings, *sections)
    for name, read in sections.items():
        if name in values:
            values[name] = read(shown, values[name])
    return values


def _parse_toml(content: bytes, path: str) -> dict[str, Any]:
    if content.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # a thousand brackets; no UTF-8
        reason = " ".join(str(error).split())
        advice = 'it holds lines in UTF-8 such as: unit = "board"'
        raise ConfigError(f"{path}: is not valid TOML: {reason}; {advice}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known word most like this one, or ""."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _table(
    path: str,
    heading: str,
    table: object,
    kind: Any,
    *more: str,
) -> dict[str, Any]:
    """Return a table's values, by a dataclass's rules; more: keys without a rule."""
    rules = {key.name: key.metadata["rule"] for key in fields(kind) if key.metadata}
    known = [*rules, *more]
    if kind is SharedResource:  # what other vendors' plugins have beside `replicas`
        rules |= dict.fromkeys(("memory_gb", "memory", "mps", "cores", "timeslice"), _NEVER)
    if not isinstance(table, dict):
        raise _invalid(f"{path}: {heading.strip('[] ')}", table, f"a table: {heading}".rstrip())
    for key in table:
        if key not in rules and key not in more:
            valid = f"valid are {', '.join(known)}{nearest(key, known)}"
            raise ConfigError(f"{path}: {heading}{key!r} is no key of this file; {valid}")
    return {
        key: _checked(rules[key], value, f"{path}: {heading}{key}") if key in rules else value
        for key, value in table.items()
    }


def _tables(
    path: str,
    heading: str,
    tables: object,
    kind: Any,
    *needed: str,
) -> list[Any]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _invalid(f"{path}: {heading.strip('[] ')}", tables, f"tables: {heading}".rstrip())
    for key, table in itertools.product(needed, tables):
        if key not in table:
            raise ConfigError(f"{path}: {heading}{key} is missing")
    return [_table(path, heading, table, kind) for table in tables]


def _health(path: str, table: object) -> HealthSettings:
    return HealthSettings(**_table(path, "[health] ", table, HealthSettings))


def _mounts(path: str, tables: object) -> tuple[Mount, ...]:
    mounts: dict[str, Mount] = {}
    source = f"{path}: [[mounts]] container"
    for values in _tables(path, "[[mounts]] ", tables, Mount, "host"):
        target = _checked(_TARGET, values.get("container", values["host"]), source)
        if target in mounts:
            raise _invalid(source, target, "another path in each of them")
        mounts[target] = Mount(**values | {"container": target})
    return tuple(mounts.values())


def _sharing(path: str, table: object) -> Sharing:
    values = _table(path, "[sharing] ", table, Sharing, "resources")
    tables = values.pop("resources", [])
    heading = "[[sharing.resources]] "
    entries = _tables(path, heading, tables, SharedResource, "name", "replicas")
    return Sharing(resources=tuple(SharedResource(**entry) for entry in entries), **values)


def _checked_sharing(settings: Settings, path: str) -> Sharing:
    """Return the section with names without domain."""
    where = f"{path}: [[sharing.resources]] "
    sharing = settings.sharing
    entries: list[SharedResource] = []
    for entry in sharing.resources:
        for name in filter(None, (entry.name, entry.rename)):
            if "/" in name and not name.startswith(f"{settings.resource_domain}/"):
                raise ConfigError(f"{where}{name}: its domain is not {settings.resource_domain}")
        rename = entry.rename and entry.rename.rpartition("/")[2]
        entry = replace(entry, name=entry.name.rpartition("/")[2], rename=rename)
        if clash := _clash(sharing, entry, entries):
            raise ConfigError(f"{where}{entry.name}: {clash}")
        entries.append(entry)
    targets = [mount.container for mount in settings.mounts or ()]
    if entries and sharing.lock_dir and "/dev/shm" in targets:
        valid = "another path: shared devices have their locks there"
        raise _invalid(f"{path}: [[mounts]] container", "/dev/shm", valid)
    return replace(sharing, resources=tuple(entries))


def _clash(
    sharing: Sharing,
    entry: SharedResource,
    others: Sequence[SharedResource],
) -> str | None:
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
        twice = entry.named_devices & other.named_devices
        if other.name == entry.name and ("all" in (entry.devices, other.devices) or twice):
            return f"{few(sorted(twice)) or 'every device'} is selected twice"
    return None


# ==== INVENTORY: what sysfs, stat() and /proc show. No device is ever opened: that powers it up ==

Arch = Literal["wormhole", "blackhole"]

VENDOR = 0x1E52
ARCHES: dict[int, Arch] = {0x401E: "wormhole", 0xB140: "blackhole"}  # by PCI device id
DRIVER = "tenstorrent"

# By PCI subsystem id, the board's code (tt-kmd's telemetry.c): for while the firmware is silent.
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
}

ALL_ONES = 0xFFFFFFFF  # each register of a chip that has left the bus
DEAD_TEMPERATURE = 65535999  # m°C: all ones through hwmon's conversion
DEAD_FIGURE = 4_293_967_296  # the least of hwmon's other conversions

UDEV_RULE = "/usr/lib/udev/rules.d/60-tt-device-plugin.rules"  # makes /dev/tenstorrent/by-pci

_BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
FileIdentity = tuple[int, int, int]


class PciFunction(NamedTuple):
    """A PCI function with the driver bound to it."""

    bdf: str  # PCI address "0000:03:00.0", which survives resets and renumbering
    arch: Arch
    pci_card: str | None  # card type by CARDS
    numa_node: int | None  # None where the platform does not say
    ordinal: int  # N of /dev/tenstorrent/N, at present
    path: str  # the host's device node
    sysfs: str  # the class device's directory, with the tt_* attributes
    number: str | None = None  # sysfs's "major:minor"
    node_fault: str | None = None  # why the node cannot be used

    @property
    def directory(self) -> str:
        return dirname(dirname(self.sysfs))


class Identity(NamedTuple):
    """What a chip's firmware says of itself, if it does."""

    card: str | None = None  # "p150a"
    serial: str | None = None  # the board's, 16 hex digits; a p300's chips share it
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # the bundle's version, "19.4.0.0"

    @classmethod
    def checked(cls, texts: Mapping[str, object]) -> Identity:
        """Take over what has the driver's form."""
        return cls(
            _word(texts.get("card"), "[a-z][a-z0-9-]{0,40}[a-z0-9]", "unknown"),
            _word(texts.get("serial"), "[0-9A-F]{16}", *_NO_ID),
            _word(texts.get("asic_id"), "[0-9A-F]{16}", *_NO_ID),
            _word(texts.get("firmware"), r"\d{1,5}(\.\d{1,5}){1,4}", "255.255.255.255"),
        )

    def or_else(self, former: Identity) -> Identity:
        """Return this identity, completed by a former one."""
        return Identity(*(new or old for new, old in zip(self, former, strict=True)))


_NO_ID = ("F" * 16, "0" * 16)  # all ones; a board without an ID


def _word(text: object, form: str, *nothing: str) -> str | None:
    if isinstance(text, str) and text not in nothing and re.fullmatch(form, text):
        return text
    return None


class Telemetry(NamedTuple):
    """What a chip's firmware said at one moment; None: not offered, or all ones."""

    identity: Identity = Identity()
    heartbeat: int | None = None  # changes while the firmware lives; restarts at a reset
    temperature: float | None = None  # °C
    throttles_at: float | None = None  # °C, hwmon's temp1_max
    trips: int | None = None  # thermal trips (Blackhole)
    hwmon: str | None = None  # the directory of its sensors
    all_ones: bool = False  # whether every register that can show it reads so
    off_bus: bool = False  # and its PCI configuration space, too
    error: tuple[str, int] | None = None  # the attribute whose read failed, and errno

    @property
    def is_silent(self) -> bool:
        """Whether the firmware offers nothing."""
        return self == Telemetry()


class Scan(NamedTuple):
    """The class directory at one moment."""

    functions: Mapping[str, PciFunction]  # by PCI address, in order
    oddities: tuple[str, ...]  # class devices that are not ours, in words


@functools.lru_cache(maxsize=256)  # every poll sorts by it
def address(bdf: str) -> tuple[int, ...]:
    """Return a PCI address as numbers, for sorting."""
    return tuple(int(part, 16) for part in re.split("[:.]", bdf))


def file_identity(path: str) -> FileIdentity | None:
    """Return device, inode and time: inode numbers are soon used again."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_dev, status.st_ino, status.st_mtime_ns
    return None


def read_attribute(path: str, flags: int = 0) -> str | None:
    """Return an attribute's text, None if it is not there; raises OSError with its path."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _read_open(descriptor, path)
    finally:
        os.close(descriptor)


def _read_open(descriptor: int, path: str) -> str:
    try:
        return os.pread(descriptor, 4096, 0).decode("ascii", "replace").strip()  # a page at most
    except OSError as error:
        error.filename = path
        raise


def read_quick(path: str) -> str | None:
    """Return an attribute that never blocks, if it can be read."""
    with suppress(OSError):
        return read_attribute(path, os.O_NONBLOCK)
    return None


def link_name(path: str) -> str | None:
    with suppress(OSError):
        return basename(os.readlink(path))
    return None


def names_in(directory: str) -> list[str]:
    with suppress(OSError):
        return os.listdir(directory)
    return []


def decimal(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch("-?[0-9]{1,20}", text) else None


def _below(most: int, text: str | None) -> int | None:
    number = decimal(text)
    return number if number is not None and 0 <= number < most else None


def _celsius(text: str | None) -> float | None:
    millidegrees = _below(DEAD_TEMPERATURE, text)
    return millidegrees / 1000 if millidegrees else None


def _pci_id(path: str) -> int | None:
    text = read_quick(path) or ""
    return int(text, 16) if re.fullmatch("0x[0-9a-f]{1,8}", text) else None


def driver_version(settings: Settings) -> str | None:
    """Return the loaded driver's version, such as "2.10.0"; "": unknown; None: not loaded."""
    module = f"{settings.sysfs_root}/module/{DRIVER}"
    if isdir(module) or isdir(f"{settings.sysfs_root}/class/{DRIVER}"):
        return read_quick(f"{module}/version") or ""
    return None


def pci_directory(settings: Settings, bdf: str = "") -> str:
    return f"{settings.sysfs_root}/bus/pci/devices/{bdf}"


def functions_on_bus(settings: Settings) -> list[str]:
    """Return the addresses of what the driver is for."""
    found = []
    for bdf in filter(_BDF.fullmatch, names_in(pci_directory(settings))):
        directory = pci_directory(settings, bdf)
        if _pci_id(f"{directory}/vendor") == VENDOR and _pci_id(f"{directory}/device") in ARCHES:
            found.append(bdf)
    return sorted(found, key=address)


def is_for_driver(settings: Settings, bdf: str) -> bool:
    """Whether the driver has a function or can have it."""
    directory = pci_directory(settings, bdf)
    override = read_quick(f"{directory}/driver_override")
    wanted = link_name(f"{directory}/driver") or override or DRIVER
    return isdir(directory) and wanted in (DRIVER, "(null)")


def scan(settings: Settings, known: Iterable[PciFunction] = ()) -> Scan:
    """Look for chips; of known ones that have not moved only at the node. Never blocks.

    A class device is read below its PCI function: after a renumbering its name in the class leads
    to another chip, while a late read below the function fails.
    """
    directory = f"{settings.sysfs_root}/class/{DRIVER}"
    known_by_path = {function.sysfs: function for function in known}
    functions = []
    oddities = []
    for name in names_in(directory):
        sysfs = f"{directory}/{name}"
        with suppress(OSError):
            sysfs = os.path.normpath(f"{directory}/{os.readlink(sysfs)}")
        found = known_by_path.get(sysfs) or read_function(settings, sysfs)
        if isinstance(found, PciFunction):
            functions.append(found._replace(node_fault=_node_fault(found.path, found.number)))
        elif found:
            oddities.append(found)
    functions.sort(key=lambda function: address(function.bdf))
    return Scan({function.bdf: function for function in functions}, tuple(sorted(oddities)))


def read_function(settings: Settings, sysfs: str) -> PciFunction | str | None:
    """Return the function behind a class device, what is odd of it, or None: it is going away."""
    match = re.fullmatch(rf"(.*/([^/]+))/{DRIVER}/{DRIVER}!(\d{{1,5}})", sysfs)
    if not match:
        return f"{sysfs}: not a device of the driver"
    directory, bdf, number = match.groups()
    if not _BDF.fullmatch(bdf):
        return f"{sysfs}: its device {bdf!r} is not a PCI function"
    ids = [_pci_id(f"{directory}/{name}") for name in ("vendor", "device", "subsystem_device")]
    if None in ids:
        return None
    vendor, device, subsystem = (each or 0 for each in ids)
    if vendor != VENDOR or device not in ARCHES:
        return f"{bdf}: PCI device {vendor:04x}:{device:04x} is neither Wormhole nor Blackhole"
    return PciFunction(
        bdf,
        ARCHES[device],
        CARDS.get(subsystem),
        _below(ALL_ONES, read_quick(f"{directory}/numa_node")),
        int(number),
        f"{settings.dev_root}/{DRIVER}/{int(number)}",
        sysfs,
        read_quick(f"{sysfs}/dev"),
    )


def _node_fault(path: str, number: str | None) -> str | None:
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


def node_fault_now(function: PciFunction) -> str | None:
    """Return what is wrong with a chip's node."""
    return _node_fault(function.path, read_quick(f"{function.sysfs}/dev"))


class Process(NamedTuple):
    pid: int
    command: str
    cgroup: str  # /proc/<pid>/cgroup

    @property
    def is_of_pod(self) -> bool:
        return "kubepods" in self.cgroup


def processes_on(settings: Settings, ordinal: int) -> list[Process] | None:
    """Return who has a node open; None: a driver before 2.5, or another PID namespace."""
    proc = settings.proc_root
    text = read_quick(f"{proc}/driver/{DRIVER}/{ordinal}/pids")
    pids = {int(word) for word in (text or "").split() if word.isdecimal()}
    if text is None or 0 in pids:
        return None
    found = []
    for pid in sorted(pids):
        if command := read_quick(f"{proc}/{pid}/comm"):  # else it has ended
            found.append(Process(pid, command, read_quick(f"{proc}/{pid}/cgroup") or ""))
    return found


def link_path(settings: Settings, function: PciFunction) -> str | None:
    """Return udev's link to a chip's node, if it leads there now.

    A kubelet uses Allocate's answer again after a reboot; runtimes resolve links for each container
    (seen with containerd 1.6 and 2.1).
    """
    link = f"{settings.dev_root}/{DRIVER}/by-pci/{function.bdf}"
    with suppress(OSError):
        if os.readlink(link) in (f"../{function.ordinal}", function.path):
            return link
    return None


def expects_links(settings: Settings) -> bool:
    """Whether the package's udev rule is in force."""
    if settings.dev_root == "/dev" and os.path.exists(UDEV_RULE):
        return True
    return isdir(f"{settings.dev_root}/{DRIVER}/by-pci")


class AttributeFiles:
    """What every poll reads of a chip, kept open: that halves a poll's cost.

    It goes to the thread that reads the chip and comes back. When the device has gone the kernel
    answers ENODEV, never another chip's value.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def read(self, path: str) -> str:
        """Return an attribute's text; raises OSError."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _read_open(self._open[path], path)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


_IDENTITY = {  # attributes by Identity's fields
    "card": "tt_card_type",
    "serial": "tt_serial",
    "firmware": "tt_fw_bundle_ver",
    "asic_id": "tt_asic_id",
}
_DEAD = {  # what a chip reads that answers nothing
    "tt_heartbeat": str(ALL_ONES),
    "tt_card_type": "unknown",
    "tt_serial": "F" * 16,
    "tt_asic_id": "F" * 16,
    "temp1_input": str(DEAD_TEMPERATURE),
}


def parse_telemetry(raw: Mapping[str, str]) -> Telemetry:
    """Return telemetry by the attributes' texts."""
    shown = [raw[name] == dead for name, dead in _DEAD.items() if name in raw]
    if len(shown) > 1 and all(shown):
        return Telemetry(all_ones=True)
    return Telemetry(
        Identity.checked({key: raw.get(attribute) for key, attribute in _IDENTITY.items()}),
        decimal(raw.get("tt_heartbeat")),  # all ones, too: it shows as stalled
        _celsius(raw.get("temp1_input")),
        _celsius(raw.get("temp1_max")),
        _below(ALL_ONES, raw.get("tt_therm_trip_count")),
    )


def read_telemetry(
    function: PciFunction, former: Telemetry | None = None, files: AttributeFiles | None = None
) -> Telemetry:
    """Ask a chip's firmware, through the driver. Never raises, but can block for ten seconds.

    If the heartbeat has gone on since it said `former`, it is the same firmware of the same chip,
    and only what changes is read.
    """
    files = files or AttributeFiles()
    with suppress(OSError):  # reading everything shows why
        if former and (telemetry := _read_changes(function, former, files)):
            return telemetry
    files.close()
    try:
        return _read_everything(function)
    except OSError as error:
        name = basename(error.filename or function.sysfs)
        return Telemetry(error=(name, error.errno or 0))


def _read_changes(
    function: PciFunction, former: Telemetry, files: AttributeFiles
) -> Telemetry | None:
    """Return what a chip says if its heartbeat has gone on; raises OSError."""
    if former.heartbeat is None or former.temperature is None or not former.hwmon:
        return None
    heartbeat = decimal(files.read(f"{function.sysfs}/tt_heartbeat"))
    temperature = _celsius(files.read(f"{former.hwmon}/temp1_input"))
    trips = former.trips
    if trips is not None:
        trips = _below(ALL_ONES, files.read(f"{function.sysfs}/tt_therm_trip_count"))
    goes_on = heartbeat is not None and former.heartbeat < heartbeat < ALL_ONES
    if not goes_on or temperature is None or (trips is None) != (former.trips is None):
        return None
    return former._replace(heartbeat=heartbeat, temperature=temperature, trips=trips)


def _hwmon(function: PciFunction) -> str | None:
    names = names_in(f"{function.directory}/hwmon")  # its number has no meaning
    return f"{function.directory}/hwmon/{min(names)}" if names else None


def _read_everything(function: PciFunction) -> Telemetry:
    """Read all attributes; raises OSError.

    ENODATA of the heartbeat is a reset, another's a tag that is no longer reported.
    """
    hwmon = _hwmon(function)
    names = ("tt_heartbeat", *_IDENTITY.values(), "tt_therm_trip_count")
    paths = [f"{function.sysfs}/{name}" for name in names]
    if hwmon:
        paths += [f"{hwmon}/temp1_input", f"{hwmon}/temp1_max"]
    raw = {}
    for path in paths:
        name = basename(path)
        try:
            text = read_attribute(path)
        except OSError as error:
            if error.errno != errno.ENODATA or name == "tt_heartbeat":
                raise
            continue
        if text is not None:
            raw[name] = text
    if raw:
        return parse_telemetry(raw)._replace(hwmon=hwmon)
    if not isdir(function.sysfs):
        return Telemetry(error=(basename(function.sysfs), errno.ENODEV))
    # Firmware that is late offers nothing, and so does a chip that was dead when the driver was
    # bound: its PCI configuration space begins with all ones.
    with suppress(OSError), open(f"{function.directory}/config", "rb", 0) as config:
        if config.read(4) == b"\xff" * 4:
            return Telemetry(all_ones=True, off_bus=True)
    return Telemetry()


class Sensor(NamedTuple):
    """A figure beside telemetry, and its metric."""

    attribute: str
    metric: str  # without "tt_device_"
    help: str
    factor: float = 1.0  # to the metric's unit
    labels: Mapping[str, object] = {}


# hwmon's are µW, mA, mV and rpm, tt_* MHz (tt-kmd's telemetry.c), the others the PCI function's.
SENSORS = (
    Sensor("power1_input", "power_watts", "What the card draws.", 1e-6),
    Sensor("power1_max", "power_limit_watts", "What the card may draw.", 1e-6),
    Sensor("curr1_input", "current_amperes", "The core's current.", 1e-3),
    Sensor("curr1_max", "current_limit_amperes", "The core's highest current.", 1e-3),
    Sensor("in0_input", "voltage_volts", "The core's voltage.", 1e-3),
    Sensor("in0_max", "voltage_limit_volts", "The core's highest voltage.", 1e-3),
    Sensor("fan1_input", "fan_rpm", "The fan's speed."),
    Sensor("tt_aiclk", "clock_hertz", "A clock.", 1e6, {"clock": "aiclk"}),
    Sensor("tt_axiclk", "clock_hertz", "A clock.", 1e6, {"clock": "axiclk"}),
    Sensor("tt_arcclk", "clock_hertz", "A clock.", 1e6, {"clock": "arcclk"}),
    Sensor("current_link_width", "pcie_link_width", "Lanes in use."),
    Sensor("max_link_width", "pcie_link_width_max", "Lanes that the card has."),
    Sensor("current_link_speed", "pcie_link_transfers_per_second", "The link's speed."),
    Sensor("max_link_speed", "pcie_link_transfers_per_second_max", "The card's highest."),
    Sensor("aer_dev_correctable", "pcie_errors_total", "By AER.", 1, {"severity": "correctable"}),
    Sensor("aer_dev_nonfatal", "pcie_errors_total", "By AER.", 1, {"severity": "nonfatal"}),
    Sensor("aer_dev_fatal", "pcie_errors_total", "By AER.", 1, {"severity": "fatal"}),
)
Figures = Mapping[str, float]  # by the sensor's attribute, in the metric's unit
NO_FIGURES: Figures = {}


def read_sensors(function: PciFunction) -> Figures:
    """Return what a card offers, without what a dead one says. Can block."""
    hwmon = _hwmon(function) or ""
    figures = {}
    for sensor in SENSORS:
        name = sensor.attribute
        directory = function.sysfs if name.startswith("tt_") else function.directory
        if "1_" in name or "0_" in name:
            directory = hwmon
        figure = _figure(name, read_quick(f"{directory}/{name}") or "")
        if figure is not None:
            figures[name] = figure * sensor.factor
    return figures


def _figure(attribute: str, text: str) -> float | None:
    if attribute.endswith("_link_speed"):
        speed = re.match(r"(\d+(?:\.\d+)?) GT/s", text)  # "16.0 GT/s PCIe"; "Unknown"
        return float(speed[1]) * 1e9 if speed else None
    if attribute.startswith("aer_"):
        total = re.search(r"^TOTAL_\w+ (\d+)$", text, re.MULTILINE)
        return float(total[1]) if total else None
    return _below(63 if attribute.endswith("_link_width") else DEAD_FIGURE, text)


# ==== CUSTODY: which pod was given which chips, by the kubelet's own file =========================

CHECKPOINT = "kubelet_internal_checkpoint"  # in the device plugin directory
KUBELET_SOCKET = "kubelet.sock"  # there, too; made anew at each start
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"  # the variable of each answer that names its chips
SETTLING = 3.0  # seconds after which a kubelet has written an answer, or never will
LINGERING = 10.0  # seconds for which an entry counts whose pod's cgroup has gone
CGROUP_DEPTH = 6  # levels from the hierarchy's root to a pod's

ChipAt = Callable[[str], "str | None"]  # the address of the chip with this node


class Allocation(NamedTuple):
    """What one answer to Allocate gave to a container."""

    resource: str
    ids: frozenset[str]
    chips: frozenset[str]  # PCI addresses
    pod: str = ""  # UID; "": a grant, which no checkpoint has contained yet
    container: str = ""


class Checkpoint(NamedTuple):
    """What the kubelet's record says of our devices."""

    allocations: Collection[Allocation]
    registered: Mapping[str, frozenset[str]]  # healthy IDs, by resource
    paths: Mapping[Allocation, Collection[str]] = {}  # of nodes, by the answers


def parse_checkpoint(content: bytes, ours: Collection[str], chip_at: ChipAt) -> Checkpoint:
    """Return what a checkpoint (kubernetes' devicemanager/checkpoint) says; raises ValueError.

    ours: resources that count even where another plugin answered, with nodes but no addresses.
    """
    try:
        data = json.loads(content)["Data"]
        paths = {}
        for entry in data["PodDeviceEntries"] or ():
            answer = base64.b64decode(entry["AllocResp"])
            resource = entry["ResourceName"]
            if ADDRESSES.encode() in answer or resource in ours:
                response = pb.ContainerAllocateResponse.FromString(answer)
                chips = _chips_in_answer(response, chip_at)
                ids = frozenset().union(*map(_texts, entry["DeviceIDs"].values()))
                names = (entry["PodUID"], entry["ContainerName"])
                if chips and all(_texts([resource, *names])):
                    allocation = Allocation(resource, ids, chips, *names)
                    paths[allocation] = [device.host_path for device in response.devices]
        registered = data["RegisteredDevices"] or {}
        healthy = {name: _texts(ids or []) for name, ids in registered.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return Checkpoint(paths.keys(), healthy, paths)


def _texts(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError("not a list of strings")
    return frozenset(value)


def _chips_in_answer(response: pb.ContainerAllocateResponse, chip_at: ChipAt) -> frozenset[str]:
    if response.envs.get(ADDRESSES):
        return frozenset(response.envs[ADDRESSES].split(","))
    return frozenset(filter(None, (chip_at(device.host_path) for device in response.devices)))


class Cgroups:
    """The cgroups of pods, which show that a pod has ended where the kubelet's file errs.

    They are named by the pod's UID (kubernetes' pod_container_manager_linux.go), and are there from
    before its first container until after its last.
    """

    def __init__(self, sysfs_root: str, seen: Mapping[str, str]) -> None:
        self.seen = dict(seen)  # directories since boot, by UID
        self._gone_at: dict[str, float] = {}
        self._root = f"{sysfs_root}/fs/cgroup"

    def look(self, pods: Collection[str], now: float) -> None:
        """Find the cgroups of these pods; forget other pods."""
        self.seen = {pod: path for pod, path in self.seen.items() if pod in pods}
        missing = [pod for pod in pods if pod and not self.exists(pod)]
        if missing:
            self._find({pod.replace("-", "_"): pod for pod in missing})
        gone = (pod for pod in self.seen if not self.exists(pod))
        self._gone_at = {pod: self._gone_at.get(pod, now) for pod in gone}

    def exists(self, pod: str) -> bool:
        return pod in self.seen and isdir(self.seen[pod])

    def seconds_gone(self, pod: str, now: float) -> float | None:
        """Return for how long a cgroup has been gone; None: never seen."""
        return now - self._gone_at.get(pod, now) if pod in self.seen else None

    def forget_gone(self) -> None:
        """Forget which have gone: a kubelet that starts makes those of its pods anew."""
        self.seen = {pod: path for pod, path in self.seen.items() if isdir(path)}

    def _find(self, missing: Mapping[str, str]) -> None:
        there = names_in(self._root)
        controllers = [name for name in ("devices", "memory", "systemd") if name in there]
        level = ["/".join([self._root, *controllers[:1]])]  # v1: each controller has them all
        for _ in range(CGROUP_DEPTH):
            level = [path for directory in level for path in self._descend(directory, missing)]

    def _descend(self, directory: str, missing: Mapping[str, str]) -> Iterator[str]:
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                match = re.search(r"(?:^|-)pod(.+?)(?:\.slice)?$", entry.name)
                name = match[1] if match else ""
                pod = missing.get(name.replace("-", "_"))
                is_pod = re.fullmatch("[0-9a-f_-]{32,36}", name)  # a manifest can have any UID
                if pod:
                    self.seen[pod] = entry.path
                elif not is_pod and entry.is_dir(follow_symlinks=False):
                    yield entry.path


class Custody:
    """Who has what: the allocations that count, from the checkpoint and our own grants.

    The checkpoint errs: writings overtake each other, an entry goes while its containers run on (a
    forced deletion), or stays when they have ended. So an allocation ends when its entry and its
    pod's cgroup are gone; where none was seen, with a writing that we caused and that lacks it.
    """

    def __init__(
        self,
        directory: str,
        sysfs_root: str,
        memory: Mapping[str, Any],
    ) -> None:
        """memory: of the same boot."""
        self.checkpoint = Checkpoint((), {})
        self.unreadable: str | None = None  # why the checkpoint cannot be understood
        self.names: dict[str, str] = {}  # "namespace/name" by UID
        self.cgroups = Cgroups(sysfs_root, memory.get("cgroups", {}))
        self._path = f"{directory}/{CHECKPOINT}"
        self._socket = f"{directory}/{KUBELET_SOCKET}"
        self._kubelet = file_identity(self._socket)  # which of its lives
        self._identity: FileIdentity | None = None  # of the file that was read
        # Since when an allocation is missing from the file; inf: it is there. The newest is last.
        self._missing_since: dict[Allocation, float] = {}
        self._filed_since: dict[Allocation, float] = {}  # when it was in the file first
        self._expected: tuple[float, FileIdentity | None] | None = None  # see expect_writing()
        self._written_since = -inf  # the file's writing began after this
        self._is_continuous = False  # whether this kubelet wrote the file that was read
        for resource, ids, chips, *pod in memory.get("allocations", ()):
            former = Allocation(resource, frozenset(ids), frozenset(chips), *pod)
            self._missing_since[former] = monotonic()
        # Missing since the kubelet started, or the whole file was lost: to the kubelet the devices
        # of these pods, which go on, are free.
        self.cgroups.look({each.pod for each in self._missing_since}, monotonic())
        self.lost = self._unfiled_that_go_on()

    def refresh(
        self,
        ours: Collection[str],
        chip_at: ChipAt,
        now: float,
    ) -> bool:
        """Read the checkpoint if it has changed; returns whether it or the kubelet has.

        A file that vanishes changes nothing: pods run on.
        """
        is_new = self._is_new_kubelet()
        identity = file_identity(self._path)
        if identity == self._identity:
            return is_new
        was_continuous = self._is_continuous
        self._is_continuous = False
        try:
            with open(self._path, "rb") as file:
                self.checkpoint = parse_checkpoint(file.read(), ours, chip_at)
        except FileNotFoundError:
            self._identity = None
            return is_new
        except (OSError, ValueError) as error:
            if self.unreadable is None:
                log.warning("%s cannot be understood: %s", self._path, error)
            self.unreadable = f"{CHECKPOINT} cannot be understood"
            self._identity = identity
            return True
        self._identity = identity
        if identity and self._kubelet:  # by their times
            self._is_continuous = identity[2] > self._kubelet[2]
        self.unreadable = None
        if self._expected and self._expected[1] != identity:
            self._written_since = self._expected[0]
            self._expected = None
        self._compare(now)
        self.lost -= {*self.checkpoint.allocations}
        if not was_continuous:
            self.lost |= self._unfiled_that_go_on()
        return True

    def _is_new_kubelet(self) -> bool:
        """Whether a kubelet has started, which knows what it has read; perhaps nothing."""
        kubelet = file_identity(self._socket)
        if kubelet in (None, self._kubelet):
            return False
        self._kubelet = kubelet
        self._is_continuous = False
        self.cgroups.forget_gone()
        self.lost |= self._unfiled_that_go_on()
        return True

    def _unfiled_that_go_on(self) -> set[Allocation]:
        unfiled = (each for each in self._missing_since if not self.is_filed(each))
        return {each for each in unfiled if self.cgroups.exists(each.pod)}

    def _compare(self, now: float) -> None:
        """Take over the file's entries."""
        filed = self.checkpoint.allocations
        for allocation in filed:
            if allocation not in self._missing_since:  # it was a grant
                self._missing_since.pop(allocation._replace(pod="", container=""), None)
            self._missing_since[allocation] = inf
            self._filed_since.setdefault(allocation, now)
        gone = {each for each in self._missing_since if self.is_filed(each) and each not in filed}
        self._missing_since |= dict.fromkeys(gone, now)
        if gone:  # what is not seen now was never started
            self.cgroups.look({each.pod for each in self._missing_since}, now)

    def reread(self) -> None:
        self._identity = None

    def look(self, now: float) -> None:
        """Look at cgroups, and forget what has ended."""
        self.cgroups.look({allocation.pod for allocation in self._missing_since}, now)
        for allocation in [*self._missing_since]:
            if not self._counts(allocation, now) and not self.is_filed(allocation):
                del self._missing_since[allocation]
                self._filed_since.pop(allocation, None)
                self.lost.discard(allocation)
        pods = {allocation.pod for allocation in self._missing_since}
        self.names = {pod: name for pod, name in self.names.items() if pod in pods}

    def grant(self, allocation: Allocation, now: float) -> None:
        self._missing_since[allocation] = now

    def allocations(self, now: float) -> list[Allocation]:
        """Return those that count, the newest last."""
        return [each for each in self._missing_since if self._counts(each, now)]

    def is_filed(self, allocation: Allocation) -> bool:
        """Whether the kubelet knows of an allocation."""
        return self._missing_since.get(allocation) == inf

    def has_doubts(self) -> bool:
        """Whether something counts of which the kubelet does not know."""
        return any(since < inf for since in self._missing_since.values())

    def awaits_writing(self, resource: str, ids: Collection[str]) -> bool:
        """Whether a pod has such an ID by a file that this kubelet did not write.

        It asks for the ID because it could not read the file, which it writes with our list.
        """
        if self._is_continuous:
            return False
        filed = filter(self.is_filed, self._missing_since)
        return any(each.resource == resource and not each.ids.isdisjoint(ids) for each in filed)

    def expect_writing(self, now: float) -> None:
        """Take the file's next change for a writing that begins after now."""
        self._expected = (now, file_identity(self._path))

    def _counts(self, allocation: Allocation, now: float) -> bool:
        if self.cgroups.exists(allocation.pod):
            return True
        since = self._missing_since[allocation]
        seconds_gone = self.cgroups.seconds_gone(allocation.pod, now)
        if since == inf:  # before 1.34 the entry of the pod admitted last stays
            return seconds_gone is None or seconds_gone < LINGERING
        # An entry that was there for long is in every writing until its pod has ended: one without
        # a cgroup was refused after a reboot.
        was_settled = since - self._filed_since.get(allocation, inf) >= SETTLING
        is_written = self._written_since >= since + SETTLING
        return seconds_gone is None and not was_settled and not is_written

    def learn_names(self, listed: Mapping[tuple[str, str, str], str]) -> None:
        """Take over pods' names, by resource, ID and container."""
        for allocation in filter(self.is_filed, self._missing_since):
            for identifier in allocation.ids:
                key = (allocation.resource, identifier, allocation.container)
                if key in listed:
                    self.names[allocation.pod] = listed[key]

    def describe(self, allocation: Allocation) -> str:
        if not allocation.pod:
            return "a pod that is being admitted"
        return self.names.get(allocation.pod, f"pod {allocation.pod}")

    def memory(self) -> dict[str, Any]:
        allocations = []
        for resource, ids, chips, *pod in self._missing_since:
            allocations.append([resource, sorted(ids), sorted(chips), *pod])
        return {"allocations": allocations, "cgroups": self.cgroups.seen}


# ==== HEALTH: per chip, with a reason in words. Pure: a verdict follows from the last one =========

BLOCKED = "telemetry read does not return; the driver may be waiting for a reset"
HYSTERESIS = 5.0  # °C below a limit at which a hot chip counts as cool again
READ_DEADLINE = 2.0  # seconds after which a read counts as one that does not return
FIRMWARE_PATIENCE = 10.0  # seconds of silence after the driver is bound anew


class Fault(Enum):
    """Why a chip is unhealthy. A change of kind is logged, one of words is not."""

    GONE = auto()
    NODE = auto()
    BLOCKED = auto()
    RESETTING = auto()
    READ_ERROR = auto()
    NO_RESPONSE = auto()
    STALLED = auto()
    SILENT = auto()
    HOT = auto()
    TRIPPED = auto()


class Health(NamedTuple):
    """A chip's state and, from `heartbeat` on, what the rules remember."""

    fault: Fault | None = None
    reason: str | None = None  # in words, with a remedy
    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change of it
    hot: bool = False  # at the operator's limit
    throttles: bool = False  # at the card's own
    trips: int | None = None
    tripped_at: float | None = None  # when trips last rose
    silent_since: float | None = None


class Look(NamedTuple):
    """What one look at a chip found."""

    function: PciFunction
    telemetry: Telemetry
    now: float  # seconds of a monotonic clock
    periodic: bool = True  # a poll, not an event
    has_spoken: bool = False  # its firmware, since boot
    mates: Collection[str] = ()  # addresses of its board's other chips

    @property
    def remedy(self) -> str:
        """The reset of this chip; without an address tt-smi resets every card."""
        mates = ", ".join(sorted(self.mates))
        others = f" (that resets {mates} of its board, too)" if mates else ""
        return f"reset it: tt-smi -r {self.function.bdf}{others}"


def unhealthy(health: Health, fault: Fault, reason: str) -> Health:
    return health._replace(fault=fault, reason=reason)


def gone(health: Health, bdf: str, *, on_bus: bool) -> Health:
    """Judge a chip whose class device is no longer there."""
    health = health._replace(silent_since=None)
    if on_bus:
        bind = f"echo {bdf} > /sys/bus/pci/drivers/tenstorrent/bind"
        return unhealthy(health, Fault.GONE, f"driver is not bound; {bind}")
    return unhealthy(health, Fault.GONE, "PCI device is gone; it counts again when it comes back")


def judge(health: Health, look: Look, settings: HealthSettings) -> Health:
    telemetry = look.telemetry
    if look.function.node_fault:
        return unhealthy(health, Fault.NODE, f"device node is wrong: {look.function.node_fault}")
    if telemetry.error:
        return _judge_error(health, look.function, *telemetry.error)
    if telemetry.all_ones:
        what = "its PCI configuration space reads" if telemetry.off_bus else "all registers read"
        reason = f"chip does not respond ({what} as ones); {look.remedy}"
        return unhealthy(health, Fault.NO_RESPONSE, reason)
    if telemetry.is_silent and look.has_spoken:
        return _judge_silence(health, look)
    limit = settings.temperature_limit
    if limit == "card":
        limit = telemetry.throttles_at
    return _judge_figures(_remember(health, look, limit), look, settings, limit)


def _judge_error(health: Health, function: PciFunction, attribute: str, number: int) -> Health:
    if number == errno.ENODATA:
        # Seen: a Blackhole whose firmware was not ready at POST_RESET stays so, though it runs.
        stays = function.arch == "blackhole"
        advice = "; if it stays so, unbind and bind the driver" if stays else ""
        return unhealthy(health, Fault.RESETTING, f"resetting (no telemetry){advice}")
    if number == errno.ENODEV:
        return unhealthy(health, Fault.GONE, "PCI device is going away")
    reason = f"telemetry cannot be read: {attribute}: {os.strerror(number)}"
    return unhealthy(health, Fault.READ_ERROR, reason)


def _judge_silence(health: Health, look: Look) -> Health:
    """Judge a chip without attributes: the driver was bound anew, nothing else takes them."""
    since = look.now if health.silent_since is None else health.silent_since
    health = health._replace(silent_since=since)
    if look.now - since >= FIRMWARE_PATIENCE:
        reason = f"firmware is silent since the driver was bound anew; {look.remedy}"
        return unhealthy(health, Fault.SILENT, reason)
    if health.fault:
        return health._replace(reason="the driver is bound; the firmware has not spoken yet")
    return health


def _remember(health: Health, look: Look, limit: float | None) -> Health:
    """Return a healthy verdict that remembers the figures.

    Any change of the heartbeat is life: a reset starts it again. What an event finds is life, too,
    but the next poll, which can come before a beat, does not compare with it.
    """
    telemetry = look.telemetry
    beats = telemetry.heartbeat is None or telemetry.heartbeat != health.heartbeat
    is_first = look.periodic or health.heartbeat is None
    trips = health.trips if telemetry.trips is None else telemetry.trips
    rose = trips is not None and health.trips is not None and trips > health.trips
    return Health(
        heartbeat=telemetry.heartbeat if is_first else health.heartbeat,
        misses=0 if beats else health.misses + look.periodic,
        hot=_reaches(telemetry.temperature, limit, health.hot),
        throttles=_reaches(telemetry.temperature, telemetry.throttles_at, health.throttles),
        trips=trips,
        tripped_at=look.now if rose else health.tripped_at,
    )


def _reaches(degrees: float | None, limit: float | None, before: bool) -> bool:
    if degrees is None or limit is None:
        return False
    return degrees >= limit or (before and degrees > limit - HYSTERESIS)


def _judge_figures(
    health: Health, look: Look, settings: HealthSettings, limit: float | None
) -> Health:
    telemetry = look.telemetry
    if health.misses >= settings.heartbeat_misses:
        what = f"heartbeat stalled at {telemetry.heartbeat}; the firmware has stopped"
        return unhealthy(health, Fault.STALLED, f"{what}, {look.remedy}")
    if health.hot:
        reason = f"too hot: {telemetry.temperature:.1f} °C, limit {limit:g} °C; check its cooling"
        return unhealthy(health, Fault.HOT, reason)
    tripped_at = health.tripped_at
    if tripped_at is not None and look.now - tripped_at < settings.trip_holdoff:
        again = f"it counts again after {settings.trip_holdoff:g} s without one"
        return unhealthy(health, Fault.TRIPPED, f"thermal trip ({health.trips} so far); {again}")
    return health


# ==== RESOURCES: which devices there are, what they are called, where they sit. Pure ==============


class Chip(NamedTuple):
    """A chip once seen, which stays known while it is away."""

    function: PciFunction  # as last seen
    present: bool = True
    identity: Identity = Identity()  # what its firmware has ever said
    has_spoken: bool = False  # since boot
    left_bus: bool = False  # another card may come back to its address
    listed: bool = False  # once it has spoken, or has had the time to
    health: Health = Health()
    telemetry: Telemetry | None = None  # the last; None: read everything
    figures: Figures = NO_FIGURES  # the last

    @property
    def shown(self) -> tuple[object, ...]:
        """What others learn of it."""
        health = self.health
        return self.function, self.present, self.identity, self.listed, health.fault, health.reason

    @property
    def bdf(self) -> str:
        return self.function.bdf

    @property
    def card_type(self) -> str | None:
        """The exact card type, "p150a"."""
        return self.identity.card or self.function.pci_card

    @property
    def board_type(self) -> str:
        """The card type without its trailing letter, or the architecture."""
        return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", self.card_type or self.function.arch)

    @property
    def board_chips(self) -> int:
        """How many chips with a node the board, or a Galaxy's tray, has."""
        if self._galaxy_tray:
            return 8
        return 2 if self.board_type == "p300" else 1

    @property
    def board(self) -> tuple[object, ...]:
        return (*self._galaxy_tray, self.identity.serial or self.bdf)

    @property
    def tray(self) -> tuple[object, ...]:
        return self._galaxy_tray or self.board

    @property
    def _galaxy_tray(self) -> tuple[object, ...]:
        """The bus's high nibble tells trays apart."""
        domain, bus, *_ = address(self.bdf)
        card = self.card_type or ""
        return (card, domain, bus >> 4) if card.startswith("galaxy") else ()

    @property
    def asic_name(self) -> str | None:
        """The name in udev's by-id links."""
        asic_id = self.identity.asic_id
        return f"{self.function.arch}-{asic_id}" if asic_id else None

    @property
    def board_name(self) -> str | None:
        """Its board's ID: a p300's serial, a Galaxy tray's buses ("0000:c0")."""
        if self.board_chips == 8:
            return self.bdf[: self.bdf.rindex(":") - 1] + "0"
        return self.identity.serial

    @property
    def aliases(self) -> set[str]:
        """What the configuration can call it."""
        names = {self.bdf, self.asic_name or self.bdf}
        return names | {str(self.function.ordinal)} if self.present else names


class Device(NamedTuple):
    """A chip or a board, which the kubelet knows under an ID, or several if it is shared."""

    identifier: str
    chips: tuple[Chip, ...]  # in the order of PCI addresses
    whole: int = 1  # how many chips it should have
    absent: tuple[str, ...] = ()  # addresses of chips that are not on this node
    withheld: str | None = None  # why it is not offered
    is_former: bool = False  # a pod's, which the configuration does not give

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset((*(chip.bdf for chip in self.chips), *self.absent))

    @property
    def defect(self) -> str | None:
        for chip in self.chips:
            if chip.health.fault:
                several = len(self.addresses) > 1
                return f"{chip.bdf}: {chip.health.reason}" if several else chip.health.reason
        if self.absent:
            return f"{self.absent[0]}: PCI device is gone; it counts again when it comes back"
        if len(self.chips) != self.whole:
            return f"{len(self.chips)} of {self.whole} chips"
        return None

    @property
    def reason(self) -> str | None:
        return self.defect or self.withheld

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        nodes = {chip.function.numa_node for chip in self.chips}
        return tuple(sorted(node for node in nodes if node is not None))


class Resource(NamedTuple):
    """An extended resource."""

    name: str  # "tenstorrent.com/n300"
    devices: Mapping[str, Device]  # by ID, in the order of PCI addresses
    replicas: int = 0  # containers a device; 0: it is not shared
    one_each: bool = False  # a container gets one replica at most
    unshared: str = ""  # its name unshared, without the domain

    @property
    def short_name(self) -> str:
        return self.name.partition("/")[2]

    @property
    def distinct(self) -> list[Device]:
        """Each device once."""
        return [self.devices[ids[0]] for ids in self.replicas_of_devices]

    @property
    def replicas_of_devices(self) -> list[list[str]]:
        """The IDs of each device."""
        found = defaultdict[tuple[str, frozenset[str]], list[str]](list)
        for identifier, device in self.devices.items():
            found[device.identifier, device.addresses].append(identifier)
        return list(found.values())


class Offered(NamedTuple):
    resource: str
    identifier: str
    chips: frozenset[str]


class Claims(NamedTuple):
    """Who has what, as custody knows it."""

    allocations: Sequence[Allocation] = ()
    filed: Collection[Allocation] = ()  # of which the kubelet knows
    lost: Collection[Allocation] = ()  # of which it no longer does, though their pods go on
    describe: Callable[[Allocation], str] = lambda allocation: allocation.pod
    unreadable: str | None = None  # why it cannot be known
    offered: Collection[Offered] = ()  # while it was known


NO_CLAIMS = Claims()


def replica_ids(identifier: str, replicas: int) -> list[str]:
    return [f"{identifier}::{number}" for number in range(replicas)] or [identifier]


def is_share(identifier: str) -> bool:
    return "::" in identifier


def device_ids(chips: Iterable[Chip], strategy: DeviceIdStrategy) -> dict[str, Chip]:
    """Return chips by ID. Present ones win: a freed ordinal is reused at once."""

    def wanted(chip: Chip) -> str:
        names = {"asic": chip.asic_name or chip.bdf, "index": str(chip.function.ordinal)}
        return names.get(strategy, chip.bdf)

    chips = sorted(chips, key=lambda chip: (not chip.present, address(chip.bdf)))
    present = Counter(wanted(chip) for chip in chips if chip.present)
    ids: dict[str, Chip] = {}
    for chip in chips:
        contested = chip.present and present[wanted(chip)] > 1  # two of one ASIC ID
        ids.setdefault(chip.bdf if contested else wanted(chip), chip)
    return ids


def short_name(chip: Chip, settings: Settings) -> str:
    """Return the name of a chip's resource, unshared and without the domain."""
    names = {"card": chip.card_type or chip.function.arch, "arch": chip.function.arch}
    several = settings.unit == "board" and chip.board_chips > 1
    return names.get(settings.resource_naming, chip.board_type) + ("-board" if several else "")


def devices_by_name(chips: Iterable[Chip], settings: Settings) -> dict[str, list[Device]]:
    """Return unshared devices by resource, in the order of addresses.

    A p300's chip without a serial belongs to no board yet, and waits.
    """
    alone: list[Chip] = []
    boards = defaultdict[tuple[str, str], list[Chip]](list)
    for chip in sorted(chips, key=lambda chip: address(chip.bdf)):
        if settings.unit == "chip" or chip.board_chips == 1:
            alone.append(chip)
        elif chip.board_name:
            boards[short_name(chip, settings), chip.board_name].append(chip)
    devices = defaultdict[str, list[Device]](list)
    for identifier, chip in device_ids(alone, settings.device_id_strategy).items():
        devices[short_name(chip, settings)].append(Device(identifier, (chip,)))
    for (name, board), members in boards.items():
        whole = members[0].board_chips
        if len(members) > whole:  # the card was in another slot before
            members = [chip for chip in members if chip.present]
        devices[name].append(Device(board, tuple(members), whole))
    for found in devices.values():
        found.sort(key=lambda device: address(device.chips[0].bdf))
    return dict(sorted(devices.items()))


def configured_resources(chips: Iterable[Chip], settings: Settings) -> dict[str, Resource]:
    """Return the configuration's resources, by name."""
    sharing = settings.sharing
    found: dict[str, Resource] = {}

    def add(
        short: str,
        unshared: str,
        devices: Iterable[Device],
        replicas: int,
    ) -> None:
        listed = {}
        for device in devices:
            listed.update(dict.fromkeys(replica_ids(device.identifier, replicas), device))
        name = f"{settings.resource_domain}/{short}"
        one_each = replicas > 0 and sharing.fail_requests_greater_than_one
        found[name] = Resource(name, listed, replicas, one_each, unshared)

    for unshared, rest in devices_by_name(chips, settings).items():
        for entry in sharing.resources:
            selected = selection(entry, rest) if entry.name == unshared else ()
            if selected:
                rest = [device for device in rest if device not in selected]
                add(sharing.shared_name(entry), unshared, selected, entry.replicas)
        if rest:
            add(unshared, unshared, rest, 0)
    return found


def resources(
    configured: Mapping[str, Resource], chips: Iterable[Chip], claims: Claims = NO_CLAIMS
) -> dict[str, Resource]:
    """Return the resources as they are listed, by name. configured: by the configuration.

    Each ID that a pod has stands for the chips of that pod's answer, whatever the configuration
    says by now. (Kubelets 1.35 to 1.37 crash at their start when one is not listed:
    topology_hints.go.) Other IDs are withheld while a pod has their chips.
    """
    listed = dict(configured)
    chips_by_address = {chip.bdf: chip for chip in chips}
    claimed: dict[str, dict[str, Device]] = {}
    for allocation in sorted(claims.allocations, key=lambda each: each not in claims.filed):
        resource = listed.get(allocation.resource, Resource(allocation.resource, {}))
        for identifier, addresses in chips_by_id(allocation, resource).items():
            device = resource.devices.get(identifier)
            kubelet_sees_free = allocation in claims.lost
            if not device or device.addresses != addresses:
                device = _former_device(identifier, addresses, chips_by_address)
                kubelet_sees_free = allocation not in claims.filed
            if kubelet_sees_free:
                device = device._replace(withheld=_held_by(allocation, claims))
            claimed.setdefault(allocation.resource, {}).setdefault(identifier, device)
    for name, resource in listed.items():
        devices = {}
        for identifier, device in resource.devices.items():
            why = _why_withheld(resource, identifier, claims)
            devices[identifier] = device._replace(withheld=why)
        listed[name] = resource._replace(devices=devices | claimed.pop(name, {}))
    return listed | {name: Resource(name, theirs) for name, theirs in claimed.items()}


def chips_by_id(allocation: Allocation, resource: Resource) -> dict[str, frozenset[str]]:
    """Return the chips of each ID of an allocation; if unclear, all that are left."""
    found: dict[str, frozenset[str]] = {}
    for identifier in allocation.ids:
        device = resource.devices.get(identifier)
        named = frozenset([identifier.partition("::")[0]])
        if device and device.addresses <= allocation.chips:
            found[identifier] = device.addresses
        elif named <= allocation.chips:
            found[identifier] = named
    rest = allocation.chips.difference(*found.values()) or allocation.chips
    return {identifier: found.get(identifier, rest) for identifier in sorted(allocation.ids)}


def _former_device(
    identifier: str, addresses: Collection[str], known: Mapping[str, Chip]
) -> Device:
    chips = tuple(known[bdf] for bdf in sorted(addresses) if bdf in known)
    absent = tuple(sorted(set(addresses).difference(known)))
    return Device(identifier.partition("::")[0], chips, len(chips), absent, is_former=True)


def _held_by(allocation: Allocation, claims: Claims) -> str:
    ids = ", ".join(sorted(allocation.ids))
    return f"held by {claims.describe(allocation)} as {allocation.resource} {ids}, until that ends"


def _why_withheld(resource: Resource, identifier: str, claims: Claims) -> str | None:
    device = resource.devices[identifier]
    replicas = replica_ids(device.identifier, resource.replicas)
    for allocation in claims.allocations:
        fellow = allocation.resource == resource.name and not allocation.ids.isdisjoint(replicas)
        if allocation.chips & device.addresses and not fellow:
            return _held_by(allocation, claims)
    if (
        claims.unreadable
        and Offered(resource.name, identifier, device.addresses) not in claims.offered
    ):
        return claims.unreadable
    return None


def selection(entry: SharedResource, devices: Sequence[Device]) -> Sequence[Device]:
    if isinstance(entry.devices, int):
        return devices[: entry.devices]
    if entry.devices == "all":
        return devices
    return [device for device in devices if aliases(device) & entry.named_devices]


def aliases(device: Device) -> set[str]:
    return {device.identifier}.union(*(chip.aliases for chip in device.chips))


def unselected(chips: Iterable[Chip], settings: Settings) -> Iterator[str]:
    """Yield what is to be shared and is not there, in words."""
    devices = devices_by_name(chips, settings)
    for entry in settings.sharing.resources:
        found = devices.get(entry.name, [])
        missing = sorted(entry.named_devices.difference(*map(aliases, found)))
        if missing:
            yield f"{entry.name}: no device is called {few(missing)}"
        elif not found:
            known = ", ".join(devices) or "none"
            yield f"no device is a {entry.name}; those that there are: {known}"


# ==== PREFERRED ALLOCATION: neighbours, whole boards left for those who need them. Pure ===========

Status = grpc.StatusCode


class Refusal(Exception):
    """A question of the kubelet's that has no answer."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Cost(NamedTuple):
    """What choices are compared by, the weightiest first. Costs of disjoint sets add up."""

    musts: int = 0  # minus how many must-includes
    again: int = 0  # how often a shared device was chosen before
    users: int = 0  # that the devices have already
    boards: int = 0
    trays: int = 0
    numa_nodes: int = 0
    whole_boards: int = 0  # whose listed devices are all available
    whole_trays: int = 0
    whole_numa_nodes: int = 0
    addresses: int = 0  # minus a bit for each ID, the highest for the lowest address

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return tuple.__new__(Cost, map(operator.add, self, other))


NO_COST = Cost()

BySize = list[Cost]  # the least costs of choosing no device of a group, one, two, and so on


class Candidate(NamedTuple):
    """An available ID, and where it is."""

    cost: Cost  # of its own
    board: object
    tray: object
    numa_nodes: frozenset[int | None]  # {None}: unknown, a group of its own


def preferred_allocation(
    resource: Resource, available: Sequence[str], must: Sequence[str], size: int
) -> list[str]:
    """Return the best of the available IDs; raises Refusal."""
    free = frozenset(available)
    musts = frozenset(must)
    _check_question(resource, free, musts, size)
    ids = [*resource.devices]
    bits = {identifier: 1 << number for number, identifier in enumerate(reversed(ids))}
    candidates: list[Candidate] = []
    broken: set[object] = set()
    for replicas in resource.replicas_of_devices:
        device = resource.devices[replicas[0]]
        board: object = device.identifier
        tray: object = device.identifier
        if device.chips:
            board = device.chips[0].board
            tray = device.chips[0].tray
        nodes = frozenset(device.numa_nodes or (None,))
        left = sorted(
            free.intersection(replicas), key=lambda each: (each not in musts, -bits[each])
        )
        if not left:
            broken |= {board, tray, *nodes}
        for again, identifier in enumerate(left[:size]):  # more of one cannot matter
            own = Cost(
                musts=-(identifier in musts),
                again=again,
                users=len(replicas) - len(left),
                addresses=-bits[identifier],
            )
            candidates.append(Candidate(own, board, tray, nodes))
    best = _Search(broken, size).host(candidates)[size]
    return [identifier for identifier in ids if bits[identifier] & -best.addresses]


def _check_question(
    resource: Resource, free: frozenset[str], musts: frozenset[str], size: int
) -> None:
    reason = f"cannot choose {size} of {len(free)} available devices, {len(musts)} of them a must"
    if unknown := sorted((free | musts) - resource.devices.keys()):
        reason = f"{resource.name} has no device {few(unknown)}"
    elif size < 0:
        reason = f"allocation size {size} is negative"
    elif missing := sorted(musts - free):
        reason = f"must-include device {few(missing)} is not available"
    elif len(musts) <= size <= len(free):
        return
    raise Refusal(Status.INVALID_ARGUMENT, reason)


class _Search(NamedTuple):
    """The least costs by size, from the board up."""

    broken: Collection[object]  # boards, trays and NUMA nodes with a device that is taken
    size: int

    def host(self, candidates: Sequence[Candidate]) -> BySize:
        """Search apart the NUMA nodes that no tray or device connects."""
        parts: list[frozenset[int | None]] = []
        for tray in _grouped(candidates, "tray"):
            nodes = frozenset[int | None]().union(*(each.numa_nodes for each in tray))
            connected = nodes.union(*(part for part in parts if part & nodes))
            parts = [part for part in parts if not part & nodes] + [connected]
        return self._joined(
            self._numa_nodes(part, [each for each in candidates if each.numa_nodes & part])
            for part in parts
        )

    def _numa_nodes(
        self, touched: Collection[int | None], candidates: Sequence[Candidate]
    ) -> BySize:
        """Try every choice of nodes: leaving one out is the only way not to touch it."""
        best: BySize = []
        counts = range(len(touched), -1, -1)
        for chosen in chain(*(itertools.combinations(touched, n) for n in counts)):
            inside = [each for each in candidates if each.numa_nodes.issubset(chosen)]
            whole = sum(node not in self.broken for node in chosen)
            fee = Cost(numa_nodes=len(chosen), whole_numa_nodes=whole)
            costs = self._joined(map(self._tray, _grouped(inside, "tray")), fee)
            best = [*map(min, best, costs), *best[len(costs) :]] if best else costs
        return best

    def _tray(self, candidates: Sequence[Candidate]) -> BySize:
        fee = Cost(trays=1, whole_trays=candidates[0].tray not in self.broken)
        return self._joined(map(self._board, _grouped(candidates, "board")), fee)

    def _board(self, candidates: Sequence[Candidate]) -> BySize:
        """Take the cheapest: on a board only their own costs differ."""
        own = sorted(each.cost for each in candidates)
        fee = Cost(boards=1, whole_boards=candidates[0].board not in self.broken)
        return self._joined([[*itertools.accumulate(own, initial=NO_COST)]], fee)

    def _joined(self, parts: Iterable[BySize], fee: Cost = NO_COST) -> BySize:
        """Return the least costs over the parts; fee: for any device at all."""
        total, *others = [*parts] or [[NO_COST]]
        for part in others:
            joined: BySize = []
            most = len(total) - 1
            for size in range(min(most + len(part), self.size + 1)):
                least = max(0, size - most)
                counts = range(least, min(size + 1, len(part)))
                joined.append(min(part[n] + total[size - n] for n in counts))
            total = joined
        return total[:1] + [each + fee for each in total[1 : self.size + 1]]


def _grouped(
    candidates: Iterable[Candidate], key: Literal["board", "tray"]
) -> list[list[Candidate]]:
    groups = defaultdict[object, list[Candidate]](list)
    for candidate in candidates:
        groups[candidate.board if key == "board" else candidate.tray].append(candidate)
    return list(groups.values())


# ==== THREADS: what can block for seconds. They get plain data and hand back plain data ===========

READ_PATIENCE = 0.1  # seconds after which nothing waits for a job
Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def log_and_continue(what: str) -> Iterator[None]:
    """The boundary at which the daemon outlives an error of its own."""
    try:
        yield
    except Exception:
        log.exception("internal error in %s; going on", what)


class ThreadPool(Generic[Job, Result]):
    """Does one job after another on a thread; a job that blocks keeps it, and another goes on.

    Loop and threads share two queues. Of a key one job is under way, so there is at most one thread
    more than jobs that block. Threads end with their work, and nobody waits for them.
    """

    def __init__(
        self,
        work: Callable[[Job], Result],
        deliver: Callable[[list[tuple[Job, Result | None]]], None],
    ) -> None:
        """deliver: gets results on the loop; None after an exception."""
        self._work = work
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[tuple[str, Job]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, Job, Result | None]] = queue.SimpleQueue()
        self._pending: dict[str, None] = {}  # keys without result, in the queue's order
        self._next: dict[str, Job] = {}  # after a key's present job
        self._since: dict[str, float] = {}  # when a job was seen to have left the queue
        self._timer: asyncio.TimerHandle | None = None
        self._is_attending = False  # soon
        self._lacks_threads = False  # which was logged

    def submit(self, key: str, job: Job) -> None:
        """Have a job done, after the key's present one."""
        if key in self._pending:
            self._next[key] = job
            return
        self._pending[key] = None
        self._jobs.put((key, job))
        if not self._is_attending:
            self._is_attending = True
            self._loop.call_soon(self._attend)  # once for all that comes now

    def is_pending(self, key: str) -> bool:
        return key in self._pending

    def seconds_under_way(self, key: str) -> float:
        now = monotonic()
        return now - self._since.get(key, now)

    def is_settled(self) -> bool:
        """Whether no job is worth waiting for."""
        if self._lacks_threads:
            return True
        return all(self.seconds_under_way(key) >= READ_PATIENCE for key in self._pending)

    def _attend(self) -> None:
        """Hand on results; start a thread if jobs wait and every other is blocked."""
        self._is_attending = False
        done = []
        while not self._results.empty():
            key, job, result = self._results.get()
            done.append((job, result))
            del self._pending[key]
            self._since.pop(key, None)
            if key in self._next:
                self.submit(key, self._next.pop(key))
        now = monotonic()
        waiting = self._jobs.qsize()
        begun = itertools.islice(self._pending, len(self._pending) - waiting)
        ages = [now - self._since.setdefault(key, now) for key in begun]
        if waiting and all(age >= READ_PATIENCE for age in ages):
            self._start_thread()
        self._look_again(ages, waiting)
        self._deliver(done)

    def _look_again(self, ages: Iterable[float], waiting: int) -> None:
        """Wake up when a job has used up its patience, or its deadline."""
        pauses = [READ_PATIENCE] if waiting else []
        for age in ages:
            if age < READ_DEADLINE:
                pauses.append((READ_PATIENCE if age < READ_PATIENCE else READ_DEADLINE) - age)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if pauses:
            self._timer = self._loop.call_later(min(pauses) + 0.002, self._attend)

    def _start_thread(self) -> None:
        try:
            _thread.start_new_thread(self._run, ())
            self._lacks_threads = False
        except RuntimeError as error:
            if not self._lacks_threads:
                log.error("no thread can be started, nothing is read for now: %s", error)
            self._lacks_threads = True

    def _run(self) -> None:
        with suppress(queue.Empty):
            while True:
                key, job = self._jobs.get_nowait()
                result = None
                with log_and_continue(f"the work on {key}"):
                    result = self._work(job)
                self._results.put((key, job, result))
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._attend)


class ReadJob(NamedTuple):
    function: PciFunction
    former: Telemetry | None = None  # None: read everything
    periodic: bool = False  # for a poll, not an event
    wants_figures: bool = False
    files: AttributeFiles | None = None


ReadResult = tuple[Telemetry, "Figures | None"]


class Reading(NamedTuple):
    function: PciFunction
    telemetry: Telemetry
    periodic: bool
    figures: Figures | None


class TelemetryReaders:
    """Reads chips off the loop, never two at a time of one chip."""

    def __init__(
        self,
        deliver: Callable[[list[Reading]], None],
        read: Callable[..., Telemetry] = read_telemetry,
    ) -> None:
        self._deliver = deliver
        self._read = read
        self._files: dict[str, AttributeFiles] = {}  # except of chips that are being read
        self.pool = ThreadPool[ReadJob, ReadResult](self._work, self._done)

    def submit(self, jobs: Iterable[ReadJob]) -> None:
        """Read these chips; one that is being read is read again for an event."""
        for job in jobs:
            bdf = job.function.bdf
            if not self.pool.is_pending(bdf):
                files = self._files.pop(bdf, None) or AttributeFiles()
                self.pool.submit(bdf, job._replace(files=files))
            elif not job.periodic:  # so soon after another reading its heartbeat proves nothing
                self.pool.submit(bdf, job._replace(former=None))

    def release(self, present: Collection[str]) -> None:
        for bdf in self._files.keys() - present:
            self._files.pop(bdf).close()

    def _work(self, job: ReadJob) -> ReadResult:
        telemetry = self._read(job.function, job.former, job.files)
        figures = None
        if job.wants_figures and not (telemetry.all_ones or telemetry.error):
            figures = read_sensors(job.function)
        return telemetry, figures

    def _done(self, done: list[tuple[ReadJob, ReadResult | None]]) -> None:
        readings = []
        for job, result in done:
            telemetry, figures = result or (Telemetry(error=("telemetry", errno.EIO)), None)
            readings.append(Reading(job.function, telemetry, job.periodic, figures))
            if job.files:
                self._files[job.function.bdf] = job.files
        self._deliver(readings)


class HostPaths:
    """Whether paths of the host exist: a dead network file system never answers."""

    def __init__(self) -> None:
        self._pool = ThreadPool[str, bool](os.path.exists, self._done)
        self._answers: dict[str, asyncio.Future[bool]] = {}

    async def exists(self, path: str, seconds: float) -> bool | None:
        """Return None if there is no answer in time."""
        if path not in self._answers:
            self._answers[path] = asyncio.get_running_loop().create_future()
            self._pool.submit(path, path)
        answer = self._answers[path]
        await asyncio.wait({answer}, timeout=seconds)
        return answer.result() if answer.done() else None

    def _done(self, done: list[tuple[str, bool | None]]) -> None:
        for path, exists in done:
            self._answers.pop(path).set_result(bool(exists))


# ==== FILES: what we write, for others and for ourselves ==========================================


class OutputFile:
    """A file that is written as a whole when its text changes.

    What cannot be written is removed if it is false, which works on a full disk, too.
    """

    def __init__(self, path: str, *, is_state: bool = False) -> None:
        """is_state: for ourselves; an old one is better than none."""
        self.path = path
        self._is_state = is_state
        self._text: str | None = None
        self._written: tuple[str, FileIdentity | None] | None = None
        self._failures: set[str] = set()  # that were logged

    def want(self, text: str | None) -> None:
        self._text = text

    def keep(self) -> None:
        if self._text is None:
            self.remove()
        elif self._written != (self._text, file_identity(self.path)):
            self.write()

    def write(self) -> None:
        text = self._text or ""
        new = f"{dirname(self.path)}/.{basename(self.path)}.new"
        try:
            self._write_new(new, text)
            os.replace(new, self.path)
            self._written = (text, file_identity(self.path))
            self._failures.clear()
        except FileNotFoundError:  # without its directory nobody wants it
            self._written = None
        except OSError as error:
            with suppress(OSError):
                os.unlink(new)
            self._say(f"cannot be written: {error.strerror}")
            if not self._is_state:
                self.remove()

    def _write_new(self, new: str, text: str) -> None:
        """Write the file that is then renamed, never through somebody's link."""
        with suppress(FileNotFoundError):
            os.unlink(new)  # of a daemon that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o600 if self._is_state else 0o644)

    def remove(self) -> None:
        self._written = None
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._say(f"is false and cannot be removed: {error.strerror}")

    def _say(self, reason: str) -> None:
        if reason not in self._failures:
            log.warning("%s %s", self.path, reason)
        self._failures.add(reason)


class Memory:
    """What outlives the daemon, checked value by value; what is of another boot is forgotten."""

    def __init__(self, settings: Settings) -> None:
        boot = read_quick(f"{settings.proc_root}/sys/kernel/random/boot_id")
        self._file = None
        content: Any = None
        if settings.state_dir:
            path = f"{settings.state_dir}/state.json"
            self._file = OutputFile(path, is_state=True)
            errors = (OSError, ValueError, RecursionError)  # none, or garbage
            with suppress(*errors), open(path, encoding="utf-8") as file:
                content = json.load(file)
        if not isinstance(content, dict):
            content = {}
        files = content.get("files")
        self.files = [*filter(_is_path, files)] if isinstance(files, list) else []  # that we wrote
        self._parts = {"boot": json.dumps(boot), "files": json.dumps(self.files)}
        if content.get("boot") != boot:
            content = {}
        self.chips: dict[str, Any] = _table_of(content.get("chips"), dict)
        custody = _table_of(content.get("custody"), (dict, list))
        allocations = custody.get("allocations", ())
        self.custody = {
            "cgroups": _table_of(custody.get("cgroups"), str),
            "allocations": [each for each in allocations if _is_allocation(each)],
        }

    def save(self, **parts: Any) -> None:
        """Save these parts, `chips`, `custody` or `files`, beside the others."""
        self._parts |= {name: json.dumps(content) for name, content in parts.items()}
        if self._file:
            text = ", ".join(f'"{name}": {part}' for name, part in self._parts.items())
            self._file.want(f"{{{text}}}")
            self._file.keep()


def _table_of(value: object, kinds: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    return {key: item for key, item in value.items() if isinstance(item, kinds)}


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/") and value.isprintable()


def _is_allocation(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 5:
        return False
    resource, ids, chips, pod, container = value
    texts = [resource, pod, container]
    for several in (ids, chips):
        texts += several if isinstance(several, list) and several else [None]
    return all(isinstance(text, str) and text.isascii() for text in texts)


def make_lock_directory(path: str) -> None:
    """Make or mend a directory where anybody makes locks, and nobody removes another's."""
    if path == "/dev/shm":
        return
    for directory in (dirname(path), path):
        with suppress(FileExistsError):
            os.mkdir(directory, 0o755)
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it is somebody else's", directory)
    if stat.S_IMODE(os.lstat(path).st_mode) != 0o1777:
        os.chmod(path, 0o1777)


class DirectoryLock:
    """Keeps a second daemon out of the device plugin directory, by flock() on it."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor = -1
        self._is_writable = False

    def holder(self) -> str | None:
        """Lock the directory that there is now; return who else has it, in words."""
        with suppress(OSError):
            if self._descriptor >= 0:
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self._directory)):
                    return None
                self.release()
            self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                inode = os.fstat(self._descriptor).st_ino
                self.release()
                return _owner_of_lock(inode)
        return None

    def has_lost_write_access(self) -> bool:
        """Whether it was replaced by one that cannot be written to.

        A directory that is removed on the host loses its mount in the sandbox.
        """
        could = self._is_writable
        self._is_writable = os.access(self._directory, os.W_OK)
        return could and not self._is_writable and isdir(self._directory)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _owner_of_lock(inode: int) -> str:
    for line in (read_quick("/proc/locks") or "").splitlines():
        match = re.match(rf"\d+: FLOCK +\S+ +WRITE +(\d+) \S+:{inode} ", line)
        if match:
            return f"process {match[1]}"
    return "another process"


# ==== SYSTEMD: readiness, status, watchdog, and log lines with a priority =========================


class ServiceManager:
    """What systemd wants to know of a Type=notify service (sd_notify(3))."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._notifier = sdnotify.SystemdNotifier()
        if self._notifier.socket:
            self._notifier.socket.setblocking(False)  # a manager that hangs must not hang us
        self._status = ""
        self.watchdog_pause = inf  # seconds between two signs of life
        own = str(os.getpid())
        microseconds = decimal(environ.get("WATCHDOG_USEC")) or 0
        if microseconds > 0 and (environ.get("WATCHDOG_PID") or own) == own:
            self.watchdog_pause = microseconds / 2e6

    def notify(self, *states: str) -> None:
        # sdnotify encodes in Latin-1, systemd wants UTF-8.
        self._notifier.notify("\n".join(states).encode().decode("latin-1"))

    def sockets(self, name: str) -> list[socket.socket]:
        """Return the sockets of this name that were handed in (sd_listen_fds(3))."""
        if self._environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        count = decimal(self._environ.get("LISTEN_FDS")) or 0
        names = self._environ.get("LISTEN_FDNAMES", "").split(":")[:count]
        return [socket.socket(fileno=fd) for fd, each in enumerate(names, 3) if each == name]

    def status(self, text: str) -> None:
        if text != self._status:
            self._status = text
            self.notify(f"STATUS={text}")


class _JournalFormatter(logging.Formatter):
    """Lines with the priority prefix of sd-daemon(3)."""

    def format(self, record: logging.LogRecord) -> str:
        priorities = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4}
        priority = priorities.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _without_traceback_of_garbage(record: logging.LogRecord) -> bool:
    """Shorten what gRPC logs of a request that is no protobuf."""
    if record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.exc_info = record.exc_text = None
    return True


def set_up_logging(environ: Mapping[str, str], *, has_timestamps: bool) -> None:
    """Log one event a line on stderr; the journal has a time of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_without_traceback_of_garbage)
    form = "%(asctime)s %(levelname)-7s %(message)s" if has_timestamps else None
    handler.setFormatter(logging.Formatter(form))
    with suppress(OSError):
        status = os.fstat(2)  # systemd.exec(5): else it was redirected
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler.setFormatter(_JournalFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


# ==== KERNEL EVENTS: among devices (netlink) and in the kubelet's directory (inotify) =============

NETLINK_KOBJECT_UEVENT = 15
OUR_PCI_ID = f"\0PCI_ID={VENDOR:04X}:".encode()
_libc = ctypes.CDLL(None, use_errno=True)


class Uevent(NamedTuple):
    """A kernel event about a device of ours."""

    action: str  # "add", "remove", "change", "bind", "unbind"
    ordinal: int | None  # of the node; None if it is about a PCI function


def open_uevent_socket() -> socket.socket:
    """Return a socket that gets the kernel's uevents; raises OSError."""
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    kernel = socket.socket(socket.AF_NETLINK, kind, NETLINK_KOBJECT_UEVENT)
    kernel.bind((0, 1))  # the kernel's group; udevd's own messages go to group 2
    return kernel


def sent_by_kernel(sender: object) -> bool:
    """Whether a netlink message is the kernel's, which alone has port id 0."""
    return isinstance(sender, tuple) and sender[0] == 0


def parse_uevent(message: bytes) -> Uevent | None:
    """Return the event if it is about a device of ours."""
    if b"tenstorrent" not in message and OUR_PCI_ID not in message:
        return None
    parts = message.decode("utf-8", "replace").split("\0")
    variables = dict(part.split("=", 1) for part in parts if "=" in part)
    action = variables.get("ACTION", "")
    subsystem = variables.get("SUBSYSTEM")
    if subsystem == "tenstorrent":
        node = re.fullmatch(r"tenstorrent/(\d{1,5})", variables.get("DEVNAME", ""))
        return Uevent(action, int(node[1]) if node else None)
    return Uevent(action, None) if subsystem == "pci" and OUR_PCI_ID in message else None


def receive_uevents(
    kernel: socket.socket, trusted: Callable[[object], bool]
) -> Iterator[Uevent | None]:
    """Yield the events that wait; None: messages were lost."""
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
    """Tells what happens in a directory, from before it exists until after it is gone.

    While it is missing, its nearest ancestor is watched. Without inotify it is silent.
    """

    # Moved from, moved to, created, deleted; itself deleted, moved; only a directory (inotify(7)).
    MASK = 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x0100_0000
    OVERFLOW = 0x4000

    def __init__(self, path: str, changed: Callable[[Collection[str]], None]) -> None:
        """changed: gets the names concerned; "": the directory itself, or unknown ones."""
        self._path = path
        self._changed = changed
        self._descriptor = -1
        self._watch = -1
        self._watched: tuple[str, tuple[int, ...]] = ("", ())  # as nearest() said
        self._is_refused = False  # which was logged

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            reason = f"{os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_instances"
            log.warning("no inotify instance (%s): a kubelet is seen at the next poll only", reason)
            return
        self._arm()
        loop.add_reader(self._descriptor, self._read)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._descriptor >= 0:
            loop.remove_reader(self._descriptor)
            os.close(self._descriptor)

    def check(self) -> None:
        """Find what no event tells of: a mount, a renamed ancestor."""
        if self._descriptor >= 0 and self.nearest() != self._watched:
            self._arm()
            self._changed({""})

    def nearest(self) -> tuple[str, tuple[int, ...]]:
        """Return the directory, or its nearest ancestor, with device and inode."""
        path = self._path
        while not isdir(path) and path != dirname(path):
            path = dirname(path)
        return path, (file_identity(path) or ())[:2]

    def _arm(self) -> None:
        self._watched = ("", ())
        nearest = self.nearest()
        while self._watched != nearest:  # something can come into being before it is watched
            self._watched = nearest
            path = os.fsencode(nearest[0])
            _libc.inotify_rm_watch(self._descriptor, self._watch)  # refused if there is none
            mask = ctypes.c_uint32(self.MASK)
            self._watch = _libc.inotify_add_watch(self._descriptor, path, mask)
            nearest = self.nearest()
        if self._watch < 0:
            self._watched = ("", ())  # the next check tries again
            reason = os.strerror(ctypes.get_errno())
            if not self._is_refused:
                what = "the next poll sees a kubelet"
                log.warning("cannot watch %s (%s); %s", nearest[0], reason, what)
        self._is_refused = self._watch < 0

    def _read(self) -> None:
        buffer = os.read(self._descriptor, 65536)
        offset = 0
        names: set[str] = set()
        while offset < len(buffer):
            watch, mask, _, length = struct.unpack_from("iIII", buffer, offset)
            start = offset + 16
            offset = start + length
            if watch == self._watch or mask & self.OVERFLOW:  # else one that was given up
                names.add(os.fsdecode(buffer[start:offset].rstrip(b"\0")))
        if names and (self._watched[0] != self._path or "" in names):
            self._arm()
            names = {""}
        if names:
            self._changed(names)


# ==== ALLOCATION: a request for devices, from the kubelet's question to the answer ================

MOUNT_PATIENCE = 1.0  # seconds that the host has to say whether a mount's path is there
LINK_PATIENCE = 1.0  # seconds that udev has to make a link
WRITING_PATIENCE = 1.0  # seconds that a kubelet has to write its checkpoint after a list
GATE_PATIENCE = 25.0  # seconds; the kubelet's deadline for PreStartContainer is 30
PAUSE = 0.02  # seconds between two looks at what sends no event


def check_request(resource: Resource, containers: Sequence[Sequence[str]]) -> None:
    """Raise Refusal if these IDs, per container, cannot be allocated."""
    counts = Counter(chain(*containers))
    unknown = [identifier for identifier in counts if identifier not in resource.devices]
    twice = [identifier for identifier, count in counts.items() if count > 1]
    most = max(map(len, containers), default=0)
    code = Status.INVALID_ARGUMENT
    reason = ""
    if not containers:
        reason = "no container"
    elif not all(containers):
        reason = "a container without devices"
    elif unknown:
        code = Status.NOT_FOUND
        reason = f"{resource.name} has no device {few(unknown)}"
    elif twice:
        reason = f"device {few(twice)} is asked for more than once"
    elif resource.one_each and most > 1:
        why = "shares of a device are no more of it (fail_requests_greater_than_one)"
        reason = f"{most} of {resource.name} for one container: {why}"
    if reason:
        raise Refusal(code, reason)
    for identifier in counts:
        device = resource.devices[identifier]
        fault = device.reason
        if device.is_former and not fault:
            addresses = ", ".join(sorted(device.addresses))
            fault = f"the configuration no longer gives it for {addresses}"
        if fault:
            raise Refusal(Status.FAILED_PRECONDITION, f"device {identifier} is unhealthy: {fault}")


def container_edits(
    chips: Iterable[Chip], settings: Settings, mounts: Iterable[Mount], locks: str | None
) -> pb.ContainerAllocateResponse:
    """Return what a runtime adds to a container. locks: its /dev/shm."""
    chips = sorted(chips, key=lambda chip: address(chip.bdf))
    addresses = ",".join(chip.bdf for chip in chips)
    edits = pb.ContainerAllocateResponse(envs={ADDRESSES: addresses})
    # tt-umd reads it inside the container: a colon makes an address, an integer is an index into
    # the devices that *the container* sees, so a host's ordinal would be wrong.
    if settings.visible_devices == "bdf":
        edits.envs["TT_VISIBLE_DEVICES"] = addresses
    elif settings.visible_devices == "index":
        edits.envs["TT_VISIBLE_DEVICES"] = ",".join(map(str, range(len(chips))))
    by_cdi = settings.device_list_strategy == "cdi"
    for chip in chips:
        if by_cdi:
            edits.cdi_devices.add(name=f"{settings.resource_domain}/device={chip.bdf}")
        else:  # under the host's number: tt-umd names its files and locks after it
            node = f"/dev/tenstorrent/{chip.function.ordinal}"
            host_path = link_path(settings, chip.function) or chip.function.path
            edits.devices.add(container_path=node, host_path=host_path, permissions="rw")
    wanted = [] if by_cdi else [*mounts]
    if locks:
        wanted.append(Mount(locks, "/dev/shm"))
    for mount in wanted:
        edits.mounts.add(
            container_path=mount.container, host_path=mount.host, read_only=mount.read_only
        )
    return edits


class Allocator:
    """Answers requests for devices, and guards each start of a container."""

    def __init__(
        self, settings: Settings, custody: Custody, refresh: Callable[[], None],
        save: Callable[[], None],
    ) -> None:  # fmt: skip
        """refresh: brings lists in line with the checkpoint; save: keeps custody's memory."""
        self.settings = settings
        self.counts = Counter[tuple[str, str]]()  # by resource and result
        self._custody = custody
        self._refresh = refresh
        self._save = save
        self._host_paths = HostPaths()

    async def allocate(
        self, listed: Callable[[], Resource], containers: Sequence[Sequence[str]]
    ) -> list[pb.ContainerAllocateResponse]:
        """Return what containers with these IDs get; raises Refusal. listed: the resource now."""
        result = "refused"
        try:
            mounts = await self.existing_mounts(must_answer=True)
            # A kubelet keeps the answer for a pod's life: a link is better than the node.
            await wait_for_links(self.settings, _chips(listed(), chain(*containers)))
            await self._until_written(listed, frozenset(chain(*containers)))
            resource = listed()  # nothing is awaited from here on
            check_request(resource, containers)
            chips = [_chips(resource, ids) for ids in containers]
            for chip in chain(*chips):
                if fault := node_fault_now(chip.function):  # the event is under way
                    reason = f"device {chip.bdf} is unhealthy: device node is wrong: {fault}"
                    raise Refusal(Status.FAILED_PRECONDITION, reason)
            locks = self.make_locks(resource, chain(*containers))
            for ids, theirs in zip(containers, chips, strict=True):
                addresses = frozenset(chip.bdf for chip in theirs)
                grant = Allocation(resource.name, frozenset(ids), addresses)
                self._custody.grant(grant, monotonic())
            self._save()
            result = "granted"
            return [container_edits(theirs, self.settings, mounts, locks) for theirs in chips]
        finally:
            self.counts[listed().name, result] += 1

    async def _until_written(self, listed: Callable[[], Resource], ids: Collection[str]) -> None:
        """Read the checkpoint; wait where a kubelet that has started has to write it first."""
        deadline = monotonic() + WRITING_PATIENCE
        self._refresh()
        while self._custody.awaits_writing(listed().name, ids) and monotonic() < deadline:
            await asyncio.sleep(PAUSE)
            self._refresh()

    async def existing_mounts(self, *, must_answer: bool) -> list[Mount]:
        """Return those that exist; one that does not answer is left out, or raises Refusal."""
        if self.settings.mounts is None:
            dev = self.settings.dev_root
            defaults = [Mount(f"{dev}/{n}", f"/dev/{n}") for n in ("hugepages-1G", "hugepages")]
            return [mount for mount in defaults if os.path.exists(mount.host)]
        mounts = self.settings.mounts
        answers = (self._host_paths.exists(mount.host, MOUNT_PATIENCE) for mount in mounts)
        existing = []
        for mount, exists in zip(mounts, await asyncio.gather(*answers), strict=True):
            if exists:
                existing.append(mount)
            elif exists is None and must_answer:
                reason = f"the host's {mount.host}, a mount, does not answer"
                raise Refusal(Status.UNAVAILABLE, reason)
        return existing

    def make_locks(self, resource: Resource, ids: Iterable[str]) -> str | None:
        """Return what containers with shares get as /dev/shm, made; raises Refusal."""
        locks = self.settings.sharing.lock_dir
        if not locks or not any(map(is_share, ids)):
            return None
        if locks != "/dev/shm":  # the host's own
            locks = f"{locks}/{resource.short_name}"
        try:
            make_lock_directory(locks)
        except OSError as error:
            reason = f"no directory for the locks of {resource.name}: {error.filename}"
            raise Refusal(Status.UNAVAILABLE, f"{reason}: {error.strerror}") from None
        return locks

    async def wait_until_free(self, listed: Callable[[], Resource], ids: Collection[str]) -> None:
        """Wait until no pod that was given these chips before has them open; raises Refusal.

        A kubelet gives the device of a pod deleted by force to the next while the first runs on.
        It asks before each start, again after an error (manager.go, PreStartContainer).
        """
        deadline = monotonic() + GATE_PATIENCE
        user = self._other_user(listed, ids)
        if path := self._false_path(listed(), ids):
            reason = f"{path}, which it was given, is another chip by now; delete the pod"
            raise Refusal(Status.FAILED_PRECONDITION, reason)
        if user:
            log.info("%s: a container waits for the end of %s", listed().name, user)
        while user:
            if monotonic() > deadline:
                reason = f"{user} has the device open and has to end first"
                raise Refusal(Status.UNAVAILABLE, reason)
            await asyncio.sleep(5 * PAUSE)
            user = self._other_user(listed, ids)

    def _other_user(self, listed: Callable[[], Resource], ids: Collection[str]) -> str | None:
        """Return the pod, in words, that has these chips open by another answer.

        Other processes do not count, nor do fellow users of a shared device.
        """
        self._refresh()
        resource = listed()
        allocations = self._custody.allocations(monotonic())
        answer = (resource.name, frozenset(ids))
        same = [each.pod for each in allocations if (each.resource, each.ids) == answer]
        own = ["", *same[-1:]]  # the newest answer's; that can be a grant
        chips = _chips(resource, ids)
        for each in allocations:
            # Both were shares of one resource, whatever the configuration says by now.
            is_fellow = each.resource == resource.name and all(map(is_share, {*each.ids, *ids}))
            if is_fellow or each.pod in own:
                continue
            for chip in chips:
                if chip.bdf in each.chips and self._has_open(each.pod, chip):
                    return self._custody.describe(each)
        return None

    def _false_path(self, resource: Resource, ids: Collection[str]) -> str | None:
        """Return the node of another chip to which the newest answer with these IDs leads now.

        A kubelet uses an answer for a pod's life; one without a link does not survive renumbering.
        """
        answer = (resource.name, frozenset(ids))
        answers = self._custody.allocations(monotonic())
        same = [each for each in answers if (each.resource, each.ids) == answer]
        own = {chip.function.path for chip in _chips(resource, ids) if chip.present}
        for path in self._custody.checkpoint.paths.get(same[-1], ()) if same else ():
            is_node = re.fullmatch(rf".*/{DRIVER}/\d+", path)
            if is_node and path not in own and os.path.exists(path):
                return path
        return None

    def _has_open(self, pod: str, chip: Chip) -> bool:
        """Whether a pod has a node open; where nobody tells, whether it has a cgroup."""
        if not chip.present:
            return False
        processes = processes_on(self.settings, chip.function.ordinal)
        if processes is None:
            self._custody.look(monotonic())
            return self._custody.cgroups.exists(pod)
        names = (pod, pod.replace("-", "_"))
        return any(name in process.cgroup for process in processes for name in names)


def _chips(resource: Resource, ids: Iterable[str]) -> list[Chip]:
    """Return chips, each once."""
    devices = (resource.devices[each] for each in ids if each in resource.devices)
    return list({chip.bdf: chip for device in devices for chip in device.chips}.values())


async def wait_for_links(settings: Settings, chips: Sequence[Chip]) -> None:
    """Wait until udev has made these links, or has had the time to."""
    deadline = monotonic() + LINK_PATIENCE
    while expects_links(settings) and monotonic() < deadline:
        if all(link_path(settings, chip.function) for chip in chips):
            return
        await asyncio.sleep(PAUSE)


# ==== DEVICE PLUGIN SERVICE: what the kubelet calls (device plugin API v1beta1) ===================

PLUGIN_OPTIONS = pb.DevicePluginOptions(
    pre_start_required=True, get_preferred_allocation_available=True
)
Context = grpc.aio.ServicerContext[Any, Any]


def device_list(resource: Resource) -> pb.ListAndWatchResponse:
    """Return the kubelet's list, by ID: chips that swap ordinals leave it unchanged."""
    response = pb.ListAndWatchResponse()
    for identifier, device in sorted(resource.devices.items()):
        health = "Unhealthy" if device.reason else "Healthy"
        listed = response.devices.add(ID=identifier, health=health)
        if device.numa_nodes:
            listed.topology.nodes.extend(pb.NUMANode(ID=node) for node in device.numa_nodes)
    return response


class Listing:
    """One resource, as the kubelet's streams are told of it."""

    def __init__(self, resource: Resource) -> None:
        self.resource = resource
        self.message = device_list(resource)
        self.ever_listed = {*resource.devices}
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def healthy(self) -> frozenset[str]:
        return frozenset(each.ID for each in self.message.devices if each.health == "Healthy")

    def publish(self, resource: Resource) -> None:
        """Send the list to open streams if it is another one now."""
        self.resource = resource
        self.ever_listed |= resource.devices.keys()
        message = device_list(resource)
        if message != self.message:
            self.message = message
            self.repeat()

    def repeat(self) -> None:
        """Send the list, even unchanged: the kubelet writes its checkpoint then."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        self._is_closed = True
        self._changed.set()

    async def messages(self) -> AsyncIterator[pb.ListAndWatchResponse]:
        while not self._is_closed:
            changed = self._changed
            yield self.message
            await changed.wait()


# ==== KUBELET SESSION: a resource's socket and registration, for as long as both of us live =======

SOCKET_PREFIX = "tt-"
REGISTERED = "registered with kubelet"
REGISTER_TIMEOUT = 10.0  # seconds
STREAM_PAUSE = 0.05  # seconds in which a kubelet notices that a stream has ended
RIVAL_PATIENCE = 1.0  # seconds in which a kubelet has written what it was told
BACKOFF = (0.1, 5.0)  # seconds: the first pause and the longest
CHANNEL_OPTIONS = (
    # By default channels share subchannels, and so the back-off from a dead socket.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 16 << 20),  # the kubelet's own limit
)
_endpoint_numbers = itertools.count(1)


class RegistrationError(Exception):
    """The kubelet cannot be reached, refuses, or has dropped us; in words."""


class Disturbance(RegistrationError):
    """What happened in the directory ends the attempt under way."""


class Endpoint(rpc.DevicePluginServicer):
    """One server on one socket, registered once.

    Its name, "tt-n300.4711-1.sock", is new each time: kubelet 1.37 refuses one to which it still
    has a connection (plugin/v1beta1/server.go), and gRPC unlinks a server's path when it stops.
    """

    def __init__(self, listing: Listing, allocator: Allocator, directory: str) -> None:
        loop = asyncio.get_running_loop()
        self.opened = loop.create_future()  # the kubelet's stream
        self.stream_has_ended = False
        self.ended = loop.create_future()  # its use: why, in words
        self.is_announced = False  # to the kubelet
        self.kubelet: FileIdentity | None = None  # its socket when we last looked
        self.registered_with: FileIdentity | None = None  # None: perhaps with its successor
        self._listing = listing
        self._allocator = allocator
        self._file: FileIdentity | None = None
        name = listing.resource.short_name[:18]  # see PLUGIN_DIR_MAX
        number = next(_endpoint_numbers) % 100_000
        self._path = f"{directory}/{SOCKET_PREFIX}{name}.{os.getpid()}-{number}.sock"
        # A connection that says nothing is closed; the default is two minutes.
        self._server = grpc.aio.server(options=[("grpc.server_handshake_timeout_ms", 5000)])
        rpc.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    async def serve(self) -> None:
        """Bind and answer; raises RegistrationError."""
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError:  # gRPC does not pass on what bind() said
            raise RegistrationError(f"cannot serve in {dirname(self._path)}") from None
        self._file = file_identity(self._path)
        await self._server.start()
        if self._file is None:
            raise RegistrationError(f"{self._path} has gone while it was made")

    def is_lost(self) -> bool:
        """Whether the socket is no longer where it was made."""
        return self._file is not None and file_identity(self._path) != self._file

    def is_fresh(self) -> bool:
        """Whether it serves and was not announced."""
        return self._file is not None and not self.is_lost() and not self.is_announced

    async def find_kubelet(self, kubelet_socket: str) -> None:
        """Wait until it listens; raises RegistrationError."""
        for pause in (0.001, 0.002, 0.004, 0.008, 0):  # bind() makes the file before listen()
            if listens(kubelet_socket):
                self.kubelet = file_identity(kubelet_socket)  # it can have come just now
                return
            await asyncio.sleep(pause)
        raise RegistrationError("waiting for kubelet (nobody listens on its socket)")

    async def register(self, kubelet_socket: str) -> None:
        """Register; raises RegistrationError. The kubelet opens its stream before it answers."""
        if self.is_lost():  # swept by the kubelet that starts
            raise RegistrationError(f"{self._path} has gone")
        request = pb.RegisterRequest(
            version="v1beta1",
            endpoint=basename(self._path),
            resource_name=self._listing.resource.name,
            options=PLUGIN_OPTIONS,
        )
        self.is_announced = True
        async with grpc.aio.insecure_channel(f"unix:{kubelet_socket}", CHANNEL_OPTIONS) as channel:
            stub = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=REGISTER_TIMEOUT)
                if file_identity(kubelet_socket) == self.kubelet:
                    self.registered_with = self.kubelet
            except grpc.aio.AioRpcError as error:
                reason = f"refuses: {words_of(error)}"
                if error.code() == Status.DEADLINE_EXCEEDED:
                    reason = f"has not answered within {REGISTER_TIMEOUT:g} s"
                raise RegistrationError(f"kubelet {reason}") from None

    def lose(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    async def close(self, grace: float | None = None) -> None:
        """Stop the server. grace: seconds that calls have."""
        self._file = None
        await self._server.stop(grace)

    async def GetDevicePluginOptions(
        self, request: pb.Empty, context: Context
    ) -> pb.DevicePluginOptions:
        return PLUGIN_OPTIONS

    async def ListAndWatch(
        self, request: pb.Empty, context: Context
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        is_kubelet = self.is_announced and not self.opened.done()
        if is_kubelet:
            self.opened.set_result(None)
        try:
            async for message in self._listing.messages():
                yield message
        finally:
            if is_kubelet:
                self.stream_has_ended = True
                self.lose("kubelet no longer watches the devices")

    async def GetPreferredAllocation(
        self, request: pb.PreferredAllocationRequest, context: Context
    ) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        for each in request.container_requests:
            question = (each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size)
            try:
                chosen = preferred_allocation(self._resource(), *question)
            except Refusal as refusal:
                await context.abort(refusal.code, str(refusal))
            response.container_responses.add(deviceIDs=chosen)
        return response

    async def Allocate(self, request: pb.AllocateRequest, context: Context) -> pb.AllocateResponse:
        containers = [list(each.devices_ids) for each in request.container_requests]
        try:
            answers = await self._allocator.allocate(self._resource, containers)
        except Refusal as refusal:
            log.warning("%s: refused an allocation: %s", self._resource().name, refusal)
            await context.abort(refusal.code, str(refusal))
        log.debug("%s: allocated %s", self._resource().name, containers)
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(
        self, request: pb.PreStartContainerRequest, context: Context
    ) -> pb.PreStartContainerResponse:
        try:
            await self._allocator.wait_until_free(self._resource, request.devices_ids)
        except Refusal as refusal:
            log.warning("%s: a container cannot start yet: %s", self._resource().name, refusal)
            await context.abort(refusal.code, str(refusal))
        return pb.PreStartContainerResponse()

    def _resource(self) -> Resource:
        return self._listing.resource


def _take_note(task: asyncio.Task[None]) -> None:
    """Look at a task's error, which asyncio logs else when a disturbance comes with it."""
    if not task.cancelled():
        task.exception()


class KubeletSession:
    """Keeps one resource registered, attempt after attempt: bind, register, stay until it is lost.

    What happens in the directory starts the next at once; else there is a pause, which grows.
    """

    def __init__(
        self, listing: Listing, allocator: Allocator, directory: str, changed: Callable[[], None]
    ) -> None:
        """changed: called when `state` is another."""
        self.listing = listing
        self.state = "starting"
        self.registrations = 0  # that succeeded
        self.tried_to_serve = asyncio.Event()  # or was closed before it could
        self._allocator = allocator
        self._directory = directory
        self._changed = changed
        self._endpoint: Endpoint | None = None
        self._closing: set[asyncio.Task[None]] = set()  # former endpoints, for some milliseconds
        self._disturbance = asyncio.get_running_loop().create_future()
        self._pause = BACKOFF[0]
        self._is_pausing = False
        self._differs_since: float | None = None  # the kubelet's file from our list
        self._task = asyncio.create_task(self._run())

    @property
    def name(self) -> str:
        return self.listing.resource.name

    async def close(self) -> None:
        """End the session, and leave no task, server or socket."""
        self.listing.close()
        self._task.cancel()
        await asyncio.wait({self._task, *self._closing})
        if self._endpoint:
            await self._endpoint.close(0.1)
        self.tried_to_serve.set()

    def check_sockets(self, *, is_disturbed: bool) -> None:
        """Start anew if something is new. is_disturbed: by another's file, which ends a pause."""
        concerns_us = is_disturbed and self._is_pausing
        if self._endpoint:
            kubelet = file_identity(f"{self._directory}/{KUBELET_SOCKET}")
            concerns_us |= self._endpoint.is_lost() or kubelet != self._endpoint.kubelet
        if is_disturbed:
            self._pause = BACKOFF[0]
        if concerns_us:
            self.start_anew()

    def start_anew(self) -> None:
        """End the attempt or the pause that is under way."""
        if not self._disturbance.done():
            self._disturbance.set_result(None)

    def check_registered(self, healthy: frozenset[str], now: float) -> None:
        """Compare our list with the IDs that the kubelet's file takes for healthy.

        When another plugin registers our name, our stream stays open, but allocations go there
        (manager.go, addEndpoint): its IDs tell. Else a writing was overtaken.
        """
        if self.state != REGISTERED or healthy == self.listing.healthy:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = now
        elif now - self._differs_since > RIVAL_PATIENCE:
            self._differs_since = None
            if healthy <= self.listing.ever_listed:
                self.listing.repeat()
            elif self._endpoint:
                self._endpoint.lose("another plugin has registered this name; stop it")

    async def _run(self) -> None:
        while True:
            self._disturbance = asyncio.get_running_loop().create_future()
            started = monotonic()
            with log_and_continue(f"the session of {self.name}"):
                try:
                    await self._attempt()
                except Disturbance:
                    self._pause = BACKOFF[0]
                except RegistrationError as error:
                    self._tell(str(error))
            self.tried_to_serve.set()
            if monotonic() - started > 30:  # seconds: it held
                self._pause = BACKOFF[0]
            self._is_pausing = True
            await asyncio.wait({self._disturbance}, timeout=self._pause)
            self._is_pausing = False
            self._pause = min(2 * self._pause, BACKOFF[1])

    async def _attempt(self) -> None:
        """Bind, register, stay; raises RegistrationError in the end."""
        kubelet_socket = f"{self._directory}/{KUBELET_SOCKET}"
        endpoint = await self._bind(file_identity(kubelet_socket))
        self.tried_to_serve.set()
        if endpoint.kubelet is None:
            raise RegistrationError(f"waiting for kubelet ({kubelet_socket} is not there)")
        await self._undisturbed(endpoint.find_kubelet(kubelet_socket))
        await self._undisturbed(endpoint.register(kubelet_socket))
        self.registrations += 1
        count = counted(len(self.listing.resource.distinct), "device")
        log.info("%s: %s, %s", self.name, REGISTERED, count)
        self._tell(REGISTERED)
        await self._until(endpoint.opened, REGISTER_TIMEOUT)
        if not endpoint.opened.done():
            raise RegistrationError("kubelet took the registration but does not watch the devices")
        await self._until(endpoint.ended)
        raise RegistrationError(endpoint.ended.result())

    async def _bind(self, kubelet: FileIdentity | None) -> Endpoint:
        """Return an endpoint that was not announced."""
        former = self._endpoint
        if former and former.is_fresh():
            former.kubelet = kubelet
            return former
        if former:
            closing = asyncio.create_task(former.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            if former.is_announced and not former.stream_has_ended:
                # Before 1.37 the end of any stream makes the kubelet forget the resource's newest
                # registration (manager.go, PluginDisconnected): so the end comes first.
                await asyncio.wait({closing})
                if former.registered_with in (None, kubelet):
                    await asyncio.sleep(STREAM_PAUSE)
        if not isdir(self._directory):
            raise RegistrationError(f"waiting for {self._directory}")
        self._endpoint = Endpoint(self.listing, self._allocator, self._directory)
        self._endpoint.kubelet = kubelet
        await self._endpoint.serve()
        return self._endpoint

    async def _undisturbed(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a piece of work to its end; raises Disturbance at once."""
        task = asyncio.create_task(work)
        task.add_done_callback(_take_note)
        try:
            await self._until(task)
        finally:
            task.cancel()
        task.result()

    async def _until(self, awaited: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait; raises Disturbance at once."""
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait({awaited, self._disturbance}, timeout=seconds, return_when=first)
        if self._disturbance.done():
            raise Disturbance

    def _tell(self, state: str) -> None:
        if state == self.state:
            return
        self.state = state
        if state != REGISTERED:  # which has its own line
            level = logging.INFO if state.startswith("waiting") else logging.WARNING
            log.log(level, "%s: %s", self.name, state)
        self._changed()


def words_of(error: grpc.aio.AioRpcError) -> str:
    """Return a call's error on one line."""
    return " ".join((error.details() or error.code().name).split())


def listens(path: str) -> bool:
    """Whether somebody accepts connections on a unix socket."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, kind) as probe:
        return probe.connect_ex(path) in (0, errno.EAGAIN)  # EAGAIN: the queue is full


def remove_dead_sockets(directory: str) -> None:
    """Remove what a killed daemon of ours has left."""
    with suppress(OSError):
        for name in os.listdir(directory):
            path = f"{directory}/{name}"
            if re.fullmatch(rf"{SOCKET_PREFIX}.+\.\d+-\d+\.sock", name) and not listens(path):
                os.unlink(path)


# ==== POD RESOURCES: the kubelet's names for pods, on which nothing depends =======================

NAMES_PAUSE = 15.0  # seconds between two questions for the same pods
PodNames = dict[tuple[str, str, str], str]  # "namespace/name" by resource, ID and container


class PodResources:
    """Asks which pods have devices (pod resources API v1), one question at a time.

    Asked, a kubelet forgets the devices of pods that have ended (manager.go, GetDevices).
    """

    TIMEOUT = 1.0  # seconds

    def __init__(self, path: str) -> None:
        self.path = path
        self._asking: asyncio.Task[PodNames] | None = None
        self._has_complained = False
        self._nameless: Collection[str] = ()
        self._due_at = -inf

    def is_due(self, nameless: Collection[str], now: float) -> bool:
        """Whether to ask for these pods: new ones at once, the same ones after a pause."""
        is_due = bool(nameless) and (nameless != self._nameless or now >= self._due_at)
        if is_due:
            self._due_at = now + NAMES_PAUSE
        self._nameless = nameless
        return is_due

    async def names(self) -> PodNames:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> PodNames:
        try:
            async with grpc.aio.insecure_channel(f"unix:{self.path}", CHANNEL_OPTIONS) as channel:
                call: Any = channel.unary_unary("/v1.PodResourcesLister/List")
                answer = await call(b"", timeout=self.TIMEOUT)
            pods = podresources_pb2.ListPodResourcesResponse.FromString(answer).pod_resources
        except (grpc.aio.AioRpcError, DecodeError) as error:
            if not self._has_complained:
                reason = words_of(error) if isinstance(error, grpc.aio.AioRpcError) else error
                log.warning("kubelet does not tell the names of pods (%s): %s", self.path, reason)
            self._has_complained = True
            return {}
        self._has_complained = False
        names = {}
        for pod in pods:
            for container in pod.containers:
                for devices in container.devices:
                    for identifier in devices.device_ids:
                        key = (devices.resource_name, identifier, container.name)
                        names[key] = f"{pod.namespace}/{pod.name}"
        return names


# ==== WHAT OTHERS READ: CDI for runtimes, labels for NFD, metrics for Prometheus =================

CDI_FILE = "tenstorrent.com-device.json"
LABELS_FILE = "tt-device-plugin"

# MiB of one device, by board: GDDR6 behind one node.
MEMORY = {
    "n150": 12288,
    "n300": 24576,
    "p100": 28672,
    "p150": 32768,
    "p300": 32768,
    "galaxy-wormhole": 12288,
    "galaxy-blackhole": 32768,
}


def cdi_spec(
    functions: Iterable[PciFunction], settings: Settings, mounts: Iterable[Mount]
) -> str | None:
    """Return a CDI file (spec 0.5.0), of nodes, as runtimes refuse links; None without chips."""
    nodes = {}
    for function in functions:
        path = f"/dev/tenstorrent/{function.ordinal}"
        nodes[function.bdf] = [{"path": path, "hostPath": function.path, "permissions": "rw"}]
    if not nodes:
        return None
    nodes["all"] = [*chain(*nodes.values())]
    spec: dict[str, Any] = {
        "cdiVersion": "0.5.0",
        "kind": f"{settings.resource_domain}/device",
        "devices": [
            {"name": name, "containerEdits": {"deviceNodes": theirs}}
            for name, theirs in nodes.items()
        ],
    }
    binds = [
        {
            "hostPath": mount.host,
            "containerPath": mount.container,
            "options": ["rbind", "ro" if mount.read_only else "rw"],
        }
        for mount in mounts
    ]
    if binds:
        spec["containerEdits"] = {"mounts": binds}
    return json.dumps(spec, indent=1)


def cdi_nodes(spec: str) -> dict[str, str]:
    """Return the nodes by device in a CDI file; raises ValueError."""
    try:
        devices = json.loads(spec)["devices"]
        nodes = {}
        for device in devices:
            first = device["containerEdits"]["deviceNodes"][0]
            nodes[device["name"]] = first["hostPath"]
        nodes.pop("all", None)
        return nodes
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def feature_file(
    listed: Iterable[Resource], chips: Collection[Chip], settings: Settings, driver: str | None
) -> str:
    """Return labels for NFD's local source, of devices that exist, healthy or not."""
    present = [chip for chip in chips if chip.present]
    labels = {f"arch.{chip.function.arch}": "true" for chip in present}
    for resource in listed:
        if resource.name != f"{settings.resource_domain}/{resource.short_name}":
            continue  # a pod's, of another domain before
        for key, value in _resource_labels(resource).items():
            labels[f"{resource.short_name}.{key}"] = value
    labels |= _version_labels("driver", driver or "")
    labels["firmware.version"] = _common(chip.identity.firmware for chip in present)
    labels["plugin.version"] = __version__
    lines = []
    for key, value in sorted(labels.items()):
        # Kubernetes takes 63 characters each, alphanumeric at both ends.
        value = re.sub(r"[^A-Za-z0-9._-]+", "_", value)[:63].strip("._-")
        if value and len(key) <= 63:
            lines.append(f"{settings.resource_domain}/{key}={value}\n")
    return "".join(lines)


def _resource_labels(resource: Resource) -> dict[str, str]:
    distinct = {each.addresses: each for each in resource.distinct}  # a pod's former ID is no more
    devices = [each for each in distinct.values() if any(chip.present for chip in each.chips)]
    chips = [chip for device in devices for chip in device.chips if chip.present]
    product = _common(chip.board_type for chip in chips)
    if resource.replicas and resource.short_name == resource.unshared:
        product += "-SHARED"
    memory = {sum(MEMORY.get(chip.board_type, 0) for chip in each.chips) for each in devices}
    return {
        "count": str(len(devices)),
        "product": product,
        "replicas": str(resource.replicas or 1),
        "sharing": str(resource.replicas > 0).lower(),
        "memory": str(*memory) if len(memory) == 1 and 0 not in memory else "",
        "boards": str(len(_whole_boards(chips))),
        "numa-nodes": str(len({chip.function.numa_node for chip in chips} - {None}) or ""),
        **_version_labels("firmware", _common(chip.identity.firmware for chip in chips)),
    }


def _whole_boards(chips: Sequence[Chip]) -> set[object]:
    counts = Counter(chip.board for chip in chips)
    return {chip.board for chip in chips if counts[chip.board] == chip.board_chips}


def _common(values: Iterable[str | None]) -> str:
    """Return what all have, if anything; "mixed" where they differ."""
    found = {value for value in values if value}
    return "mixed" if len(found) > 1 else "".join(found)


def _version_labels(subject: str, version: str) -> dict[str, str]:
    keys = (f"{subject}.version", f"{subject}.major", f"{subject}.minor")
    return dict(zip(keys, [version, *re.findall(r"\d+", version)], strict=False))


Sample = tuple[Mapping[str, object], float]  # labels and value


class Family(NamedTuple):
    """A metric with its samples."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    samples: Iterable[Sample]


def _families(
    prefix: str, helps: Mapping[str, str], samples: Mapping[str, list[Sample]]
) -> list[Family]:
    families = []
    for name, text in helps.items():
        kind: Literal["gauge", "counter"] = "counter" if name.endswith("_total") else "gauge"
        families.append(Family(f"{prefix}{name}", kind, text, samples.get(name, ())))
    return families


def exposition(families: Iterable[Family]) -> str:
    """Return Prometheus' text format: nothing without a sample, no series twice."""
    lines: list[str] = []
    for family in families:
        series = {}
        for labels, value in family.samples:
            text = ",".join(_label(key, each) for key, each in labels.items())
            series[f"{family.name}{{{text}}}" if text else family.name] = value
        if series:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{each} {value:.15g}" for each, value in series.items()]
    return "".join(f"{line}\n" for line in lines)


@functools.lru_cache(maxsize=4096, typed=True)  # the same ones every few seconds
def _label(key: str, value: object) -> str:
    text = "" if value is None else str(value)
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{escaped}"'


CHIP_METRICS = {
    "info": "A chip, and what it is.",
    "healthy": "Whether nothing is wrong with a chip.",
    "fault": "What is wrong with a chip, while it is.",
    "temperature_celsius": "At the last poll.",
    "temperature_limit_celsius": "Where it throttles.",
    "thermal_trips_total": "As the firmware counts.",
    **{sensor.metric: sensor.help for sensor in SENSORS},
    "allocated": "A container that has it.",
}


def chip_metrics(
    chips: Collection[Chip], resource_of: Mapping[str, Resource], users: Iterable[ChipUser]
) -> list[Family]:
    """Return what is known of chips."""
    samples = defaultdict[str, list[Sample]](list)
    for chip in chips:
        device: dict[str, object] = {"device": chip.bdf}
        facts = _facts(chip, resource_of.get(chip.bdf))
        samples["info"].append((device | facts, 1))
        samples["healthy"].append((device, chip.health.fault is None))
        if chip.health.fault:
            kind = chip.health.fault.name.lower()
            samples["fault"].append((device | {"kind": kind}, 1))
        if not is_readable(chip):
            continue
        telemetry = chip.telemetry or Telemetry()
        if telemetry.temperature is not None:
            samples["temperature_celsius"].append((device, telemetry.temperature))
        if telemetry.throttles_at is not None:
            samples["temperature_limit_celsius"].append((device, telemetry.throttles_at))
        if telemetry.trips is not None:
            samples["thermal_trips_total"].append((device, telemetry.trips))
        for sensor in SENSORS:
            if sensor.attribute in chip.figures:
                labels = {**device, **sensor.labels}
                samples[sensor.metric].append((labels, chip.figures[sensor.attribute]))
    known = {chip.bdf for chip in chips}
    for user in users:
        if user.bdf in known:
            labels = dict(zip(("device", "namespace", "pod", "container"), user, strict=True))
            samples["allocated"].append((labels, 1))
    return _families("tt_device_", CHIP_METRICS, samples)


def is_readable(chip: Chip) -> bool:
    """Whether what a chip said last is what it says now."""
    dead = (Fault.GONE, Fault.BLOCKED, Fault.NO_RESPONSE, Fault.RESETTING, Fault.READ_ERROR)
    return chip.present and chip.health.fault not in dead


def _facts(chip: Chip, resource: Resource | None) -> dict[str, object]:
    return {
        "board": chip.board_type,
        "card": chip.card_type,
        "arch": chip.function.arch,
        "serial": chip.identity.serial,
        "firmware": chip.identity.firmware,
        "numa_node": chip.function.numa_node,
        "resource": resource.name if resource else None,
    }


class ChipUser(NamedTuple):
    """A container that was given a chip."""

    bdf: str
    namespace: str
    pod: str  # its UID if the kubelet has not told its name
    container: str


def chip_users(custody: Custody, now: float) -> list[ChipUser]:
    users = []
    for allocation in custody.allocations(now):
        if allocation.pod:
            name = custody.names.get(allocation.pod, allocation.pod)
            namespace, _, pod = name.rpartition("/")
            for bdf in sorted(allocation.chips):
                users.append(ChipUser(bdf, namespace, pod, allocation.container))
    return users


class ListedResource(NamedTuple):
    """A resource, and how it stands with the kubelet."""

    resource: Resource
    state: str
    registrations: int


PLUGIN_METRICS = {
    "resource_devices": "IDs, as the kubelet has them.",
    "kubelet_registered": "Whether it has a resource.",
    "kubelet_registrations_total": "That succeeded.",
    "allocations_total": "Requests for devices.",
    "plugin_info": "What runs.",
    "plugin_start_time_seconds": "Unix time.",
}


def plugin_metrics(
    listed: Sequence[ListedResource], counts: Mapping[tuple[str, str], int], started: float
) -> list[Family]:
    """Return what is known of resources and daemon. started: Unix time."""
    samples = defaultdict[str, list[Sample]](list)
    for resource, state, registrations in listed:
        label = {"resource": resource.name}
        ill = sum(device.reason is not None for device in resource.devices.values())
        well = len(resource.devices) - ill
        for health, number in (("healthy", well), ("unhealthy", ill)):
            samples["resource_devices"].append((label | {"health": health}, number))
        samples["kubelet_registered"].append((label, state == REGISTERED))
        samples["kubelet_registrations_total"].append((label, registrations))
        for result in ("granted", "refused"):
            count = counts.get((resource.name, result), 0)
            samples["allocations_total"].append((label | {"result": result}, count))
    samples["plugin_info"].append(({"version": __version__}, 1))
    samples["plugin_start_time_seconds"].append(({}, started))
    return _families("tt_", PLUGIN_METRICS, samples)


# ==== FLEET: the chips of the node, followed over time ============================================


class Fleet:
    """The chips that were seen. What changes is logged, once."""

    def __init__(self, remembered: Mapping[str, Any], on_bus: Collection[str]) -> None:
        """remembered: by `memory`; on_bus: addresses of functions that are there."""
        self.chips: dict[str, Chip] = {}  # by PCI address; none is ever taken out
        self.oddities: tuple[str, ...] = ()  # what is there but not listed, and why
        self.version = 0  # changes with what others learn
        self._former: dict[str, Chip] = {}  # of this boot, and not seen by this process
        for bdf, content in remembered.items():
            chip = _recall_chip(bdf, content)
            if chip:
                self._former[bdf] = chip._replace(left_bus=chip.left_bus or bdf not in on_bus)

    @property
    def present(self) -> list[Chip]:
        return [chip for chip in self.chips.values() if chip.present]

    @property
    def listed(self) -> list[Chip]:
        return [chip for chip in self.chips.values() if chip.listed]

    def observe(self, settings: Settings, *, is_thorough: bool = True) -> list[PciFunction]:
        """Look at sysfs, thoroughly or only at what often changes; returns what is to be read."""
        known = [] if is_thorough else [chip.function for chip in self.present]
        found = scan(settings, known)
        functions = found.functions.values()
        oddities = [*found.oddities]
        oddities += [f.node_fault for f in functions if f.node_fault and f.bdf not in self.chips]
        for oddity in oddities:
            if oddity not in self.oddities:
                log.warning("not listed: %s", oddity)
        self.oddities = tuple(oddities)
        new = [function for function in functions if self._appears(function)]
        for bdf in self.chips.keys() - found.functions.keys():
            chip = self.chips[bdf]
            on_bus = os.path.exists(pci_directory(settings, bdf))
            health = gone(chip.health, bdf, on_bus=on_bus)
            left_bus = chip.left_bus or not on_bus
            self._update(chip._replace(present=False, left_bus=left_bus, health=health))
        return new

    def _appears(self, function: PciFunction) -> bool:
        """Take over a function; returns whether it is new, back or elsewhere."""
        bdf = function.bdf
        known = self.chips.get(bdf)
        if known is None and function.node_fault:
            return False
        if known and known.present and known.function == function:
            return False
        chip = known or self._former.pop(bdf, Chip(function))
        if (chip.function.arch, chip.function.pci_card) != (function.arch, function.pci_card):
            chip = Chip(function)  # another card at the same address
        elif chip.left_bus:  # and perhaps this one, too
            chip = chip._replace(identity=Identity(), left_bus=False)
        self.chips.setdefault(bdf, chip)
        self._update(chip._replace(function=function, present=True, telemetry=None))
        return True

    def learn(
        self,
        readings: Iterable[Reading],
        settings: HealthSettings,
        now: float,
    ) -> None:
        """Take over what chips said."""
        for function, telemetry, is_periodic, figures in readings:
            chip = self.chips[function.bdf]
            if not chip.present or chip.function != function:
                continue  # it has gone since, or was renumbered
            speaks = not (telemetry.is_silent or telemetry.error or telemetry.all_ones)
            spoken = chip.has_spoken
            look = Look(function, telemetry, now, is_periodic, spoken, self.mates(chip))
            chip = chip._replace(
                identity=telemetry.identity.or_else(chip.identity),
                has_spoken=spoken or speaks,
                listed=True,
                health=judge(chip.health, look, settings),
                telemetry=telemetry,
                figures=chip.figures if figures is None else figures,
            )
            self._update(chip)

    def mates(self, chip: Chip) -> list[str]:
        """Return the p300's other chip, which a reset concerns, too."""
        if chip.board_chips != 2 or not chip.identity.serial:
            return []
        return [
            mate.bdf for mate in self.present if mate.board == chip.board and mate.bdf != chip.bdf
        ]

    def give_up_waiting(self, seconds_under_way: Callable[[str], float]) -> None:
        """List chips that do not answer; at the deadline that is a fault."""
        for chip in [*self.chips.values()]:
            seconds = seconds_under_way(chip.bdf)
            health = chip.health
            if chip.present and seconds > READ_DEADLINE:
                health = unhealthy(health, Fault.BLOCKED, BLOCKED)
            if seconds > READ_PATIENCE:
                self._update(chip._replace(listed=True, health=health))

    def chip_at(self, path: str) -> str | None:
        """Return the address of the chip with this node, or link to it."""
        name = basename(path)
        for chip in self.present:
            if path == chip.function.path or name in (chip.bdf, chip.asic_name):
                return chip.bdf
        return None

    def show_former(self) -> None:
        """Show chips that were seen since boot."""
        for bdf, chip in self._former.items():
            health = gone(chip.health, bdf, on_bus=not chip.left_bus)
            self.chips[bdf] = chip._replace(present=False, listed=True, health=health)

    def memory(self) -> dict[str, Any]:
        chips = self._former | self.chips
        return {bdf: _chip_memory(chip) for bdf, chip in chips.items()}

    def _update(self, chip: Chip) -> None:
        before = self.chips[chip.bdf]
        self.chips[chip.bdf] = chip
        new = chip.health
        what = f"{chip.bdf} ({chip.card_type or chip.function.arch})"
        if before.health.throttles != new.throttles and not new.fault:
            limit = chip.telemetry.throttles_at if chip.telemetry else None
            news = f"has reached {limit:g} °C and throttles" if new.throttles else "is cool again"
            log.info("%s: %s", what, news)
        if before.shown == chip.shown:
            return
        self.version += 1
        if chip.listed and not (before.listed and _introduction(before) == _introduction(chip)):
            log.info("%s: %s", what, _introduction(chip))
        if before.health.fault == new.fault:
            return
        if new.fault:
            log.warning("%s: unhealthy: %s", what, new.reason)
        else:
            log.info("%s: healthy again", what)


def _introduction(chip: Chip) -> str:
    identity = chip.identity
    facts = {"board": identity.serial, "ASIC": identity.asic_id, "firmware": identity.firmware}
    known = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([chip.function.path, *(known or ["its firmware is silent"])])


def _chip_memory(chip: Chip) -> dict[str, Any]:
    return {
        "function": chip.function._replace(number=None, node_fault=None)._asdict(),
        "identity": chip.identity._asdict(),
        "has_spoken": chip.has_spoken,
        "left_bus": chip.left_bus,
        "stalled_at": chip.health.heartbeat if chip.health.fault is Fault.STALLED else None,
    }


def _recall_chip(bdf: str, content: Mapping[str, Any]) -> Chip | None:
    """Return a chip by what can be any JSON; None if it is garbage."""
    match content:
        case {
            "function": {
                "arch": arch,
                "pci_card": card,
                "numa_node": numa_node,
                "ordinal": ordinal,
                "path": str(path),
                "sysfs": str(sysfs),
            },
            "identity": dict(identity),
        }:
            pass
        case _:
            return None
    if (
        not _BDF.fullmatch(bdf)
        or arch not in ARCHES.values()
        or card not in (*CARDS.values(), None)
        or type(ordinal) is not int
        or not (numa_node is None or (type(numa_node) is int and 0 <= numa_node < ALL_ONES))
    ):
        return None
    health = Health()
    if type(content.get("stalled_at")) is int:
        health = Health(heartbeat=content["stalled_at"], misses=1_000_000)  # more than any setting
    return Chip(
        PciFunction(bdf, arch, card, numa_node, ordinal, path, sysfs),
        identity=Identity.checked(identity),
        has_spoken=content.get("has_spoken") is True,
        left_bus=content.get("left_bus") is True,
        health=health,
    )


class Monitor:
    """Follows the chips: kernel events and telemetry in, changes of the fleet out."""

    GATHERING = 0.05  # seconds in which further kernel events are taken together

    def __init__(
        self,
        settings: Settings,
        remembered: Mapping[str, Any],
        changed: Callable[[], None],
        open_events: Callable[[], socket.socket] = open_uevent_socket,
        trusted: Callable[[object], bool] = sent_by_kernel,
    ) -> None:
        """changed: called for what was seen; trusted: whether a sender is the kernel."""
        self.settings = settings
        self.fleet = Fleet(remembered, functions_on_bus(settings))
        self.readers = TelemetryReaders(self._telemetry_arrived)
        self._changed = changed
        self._open_events = open_events
        self._trusted = trusted
        self._news = asyncio.Event()
        self._kernel: socket.socket | None = None
        self._handled_at = -inf
        self._gathering: asyncio.TimerHandle | None = None
        self._events: list[Uevent | None] = []

    def open(self) -> None:
        try:
            self._kernel = self._open_events()
        except OSError as error:
            log.warning("no kernel events (%s): the next poll sees what changes", error.strerror)
            return
        asyncio.get_running_loop().add_reader(self._kernel, self._uevents_arrived, self._kernel)

    def close(self) -> None:
        if self._kernel:
            asyncio.get_running_loop().remove_reader(self._kernel)
            self._kernel.close()
        if self._gathering:
            self._gathering.cancel()

    def look(self) -> None:
        """Look for chips, and read those that are new."""
        self._read(self.fleet.observe(self.settings))

    def poll(self, *, is_thorough: bool, wants_figures: bool = False) -> None:
        """Look at every chip, the only way to see one die."""
        self.fleet.observe(self.settings, is_thorough=is_thorough)
        present = self.fleet.present
        self.readers.release([chip.bdf for chip in present])
        self.readers.submit(
            ReadJob(chip.function, None if is_thorough else chip.telemetry, True, wants_figures)
            for chip in present
        )

    async def measure(self) -> None:
        """Read sensors, too."""
        self.readers.submit(
            ReadJob(chip.function, chip.telemetry, wants_figures=True)
            for chip in self.fleet.present
        )
        await self.until_settled()

    async def until_settled(self) -> None:
        """Wait until each chip has answered, or has taken too long."""
        while not self.readers.pool.is_settled():
            await self.wait(None)

    async def wait(self, seconds: float | None) -> None:
        """Wait for news, so long at most."""
        self._news.clear()
        await event_within(self._news, seconds)

    def _read(self, functions: Iterable[PciFunction]) -> None:
        self.readers.submit(ReadJob(function) for function in functions)

    def _uevents_arrived(self, kernel: socket.socket) -> None:
        """Act on an event at once, on those that follow closely together."""
        self._events += receive_uevents(kernel, self._trusted)
        if self._events and not self._gathering:
            pause = self._handled_at + self.GATHERING - monotonic()
            if pause <= 0:
                self._handle_events()
            else:
                loop = asyncio.get_running_loop()
                self._gathering = loop.call_later(pause, self._handle_events)

    def _handle_events(self) -> None:
        log.debug("kernel events: %s", self._events)
        ordinals = {event.ordinal for event in self._events if event}
        self._events = []
        self._gathering = None
        found = {function.bdf: function for function in self.fleet.observe(self.settings)}
        for chip in self.fleet.present:
            if chip.function.ordinal in ordinals:
                found[chip.bdf] = chip.function
        self._read(found.values())
        self._handled_at = monotonic()
        self._seen()

    def _telemetry_arrived(self, readings: list[Reading]) -> None:
        self.fleet.learn(readings, self.settings.health, monotonic())
        self.fleet.give_up_waiting(self.readers.pool.seconds_under_way)
        self._seen()

    def _seen(self) -> None:
        self._news.set()
        self._changed()


async def event_within(event: asyncio.Event, seconds: float | None) -> None:
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiter}, timeout=seconds)
    finally:
        waiter.cancel()


# ==== PUBLICATION: files and metrics, brought in line with what there is ==========================

METRICS_PAUSE = 15.0  # seconds for which figures count as new


class Publication:
    """What others read: the CDI file, the feature file and the metrics."""

    def __init__(self, settings: Settings, memory: Memory) -> None:
        self._memory = memory
        self._started = time.time()
        self._cdi: OutputFile | None = None
        self._labels: OutputFile | None = None
        self._metrics: OutputFile | None = None
        self.configure(settings)

    def configure(self, settings: Settings) -> None:
        """Take over which files are wanted."""
        self.settings = settings
        self._made_of: object = None  # what CDI and feature file were made of
        self._cdi = _file_at(self._cdi, settings.cdi_dir, CDI_FILE)
        self._labels = _file_at(self._labels, settings.labels_dir, LABELS_FILE)
        self._metrics = _file_at(self._metrics, *os.path.split(settings.metrics_file))

    def describe(
        self, chips: Sequence[Chip], listed: Sequence[Resource], mounts: Sequence[Mount]
    ) -> None:
        """Bring the CDI and feature files in line; remove what is no longer wanted."""
        files = [file.path for file in (self._cdi, self._labels, self._metrics) if file]
        if files != self._memory.files:
            for path in self._memory.files:
                if path not in files:
                    OutputFile(path).remove()
            self._memory.files = files
            self._memory.save(files=files)
        driver = driver_version(self.settings)
        made_of = ([chip.shown for chip in chips], listed, mounts, driver)
        if made_of != self._made_of:
            self._made_of = made_of
            present = [chip.function for chip in chips if chip.present]
            usable = [function for function in present if not function.node_fault]
            if self._cdi:
                self._cdi.want(cdi_spec(usable, self.settings, mounts))
            if self._labels:
                self._labels.want(feature_file(listed, chips, self.settings, driver))
        for file in filter(None, (self._cdi, self._labels)):
            file.keep()

    def wants_metrics(self) -> bool:
        """Whether somebody takes the metrics from the file."""
        return self._metrics is not None and isdir(dirname(self._metrics.path))

    def write_metrics(self, text: str) -> None:
        if self._metrics:
            self._metrics.want(text)
            self._metrics.write()  # even the same: its age says that we work

    def render_metrics(
        self,
        chips: Sequence[Chip],
        registrar: Registrar,
        now: float,
    ) -> str:
        listed = registrar.listed()
        resource_of = {}
        for each in listed:
            for device in each.resource.distinct:
                resource_of.update({chip.bdf: each.resource for chip in device.chips})
        families = chip_metrics(chips, resource_of, chip_users(registrar.custody, now))
        families += plugin_metrics(listed, registrar.allocator.counts, self._started)
        return exposition(families)


def _file_at(former: OutputFile | None, directory: str, name: str) -> OutputFile | None:
    path = os.path.join(directory, name)
    if former and former.path == path:
        return former
    return OutputFile(path) if directory else None


class MetricsServer:
    """`GET /metrics` by HTTP. What a client does costs its own connection only."""

    MOST = 32  # connections
    HEAD_MAX = 8192  # bytes of a request
    SECONDS = 5.0  # for all of it

    def __init__(self, render: Callable[[], Coroutine[Any, Any, str]]) -> None:
        self._render = render
        self._rendering: asyncio.Task[str] | None = None  # for all who ask meanwhile
        self._idle: dict[asyncio.StreamWriter, None] = {}  # connections, the oldest first

    async def start(self, listening: socket.socket) -> None:
        await asyncio.start_server(self._connected, sock=listening, limit=self.HEAD_MAX)

    async def text(self) -> str:
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._render())
        return await asyncio.shield(self._rendering)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._idle) >= self.MOST:  # who says nothing keeps nobody out
            next(iter(self._idle)).transport.abort()
        self._idle[writer] = None
        try:
            await asyncio.wait_for(self._answer(reader, writer), self.SECONDS)
        except (asyncio.TimeoutError, asyncio.CancelledError, OSError, ValueError):
            pass  # ValueError: a line is too long; CancelledError, which would be logged: the end
        finally:
            self._idle.pop(writer, None)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines: list[bytes] = []
        while not lines or lines[-1].strip():
            lines.append(await reader.readline())
            if not lines[-1] or sum(map(len, lines)) > self.HEAD_MAX:
                return
        self._idle.pop(writer, None)
        method, path, *_ = [*lines[0].decode("latin-1").split(), "", ""]
        status = "404 Not Found"
        text = "there is /metrics\n"
        if method not in ("GET", "HEAD"):
            status = "405 Method Not Allowed"
            text = "GET /metrics\n"
        elif path.partition("?")[0] == "/metrics":
            status = "200 OK"
            text = await self.text()
        head = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(text.encode())}",
            "Connection: close",
        ]
        body = "" if method == "HEAD" else text
        writer.write("\r\n".join([*head, "", body]).encode())
        writer.close()
        await writer.wait_closed()


# ==== DAEMON: what ties the parts together ========================================================

BIND_PATIENCE = 10.0  # seconds
THOROUGH = 12  # every so many polls everything is read again
EXIT_LOST = 74  # EX_IOERR: the sandbox has lost the directory; systemd starts us again
EXIT_SECOND = 75  # EX_TEMPFAIL: another daemon serves the directory


class Registrar:
    """Keeps the kubelet in line: a session for each resource, by who has what."""

    def __init__(
        self, settings: Settings, fleet: Fleet, memory: Memory, changed: Callable[[], None]
    ) -> None:
        """changed: called for what others should learn."""
        self.settings = settings
        self.custody = Custody(settings.device_plugin_dir, settings.sysfs_root, memory.custody)
        self.allocator = Allocator(settings, self.custody, self.refresh, self._save)
        self.sessions: dict[str, KubeletSession] = {}  # by the resource's name
        self._fleet = fleet
        self._memory = memory
        self._changed = changed
        self._pod_resources = PodResources(settings.pod_resources_socket)
        self._configured: Mapping[str, Resource] = {}  # by the configuration
        self._nodes: Mapping[str, str] = {}  # paths by address, when the checkpoint was read
        self._published: object = None  # what the lists were made of
        self._offered: set[Offered] = set()
        self._withheld: dict[str, str] = {}  # and why, which was logged
        self._tasks: set[asyncio.Task[None]] = set()

    def configure(self, settings: Settings) -> None:
        self.settings = settings
        self.allocator.settings = settings
        if self._pod_resources.path != settings.pod_resources_socket:
            self._pod_resources = PodResources(settings.pod_resources_socket)
        self._published = None
        self.publish()

    def refresh(self) -> None:
        """Publish what follows if the checkpoint has changed."""
        if self.custody.refresh(self._configured, self._fleet.chip_at, monotonic()):
            self.publish()

    def publish(self) -> None:
        """Bring sessions in line with chips, configuration and custody."""
        custody = self.custody
        allocations = custody.allocations(monotonic())
        filed = frozenset(filter(custody.is_filed, allocations))
        seen = dict(custody.cgroups.seen)  # what is saved below
        names = dict(custody.names)
        lost = frozenset(custody.lost)
        made_of = (self._fleet.version, allocations, filed, lost, custody.unreadable, names, seen)
        if made_of == self._published:
            return
        chips = self._fleet.listed
        configured = configured_resources(chips, self.settings)
        nodes = {chip.bdf: chip.function.path for chip in self._fleet.present}
        # Entries under new names count, and others' answers name nodes.
        if (configured.keys(), nodes) != (self._configured.keys(), self._nodes):
            self._configured = configured
            self._nodes = nodes
            custody.reread()
            if custody.refresh(configured, self._fleet.chip_at, monotonic()):
                return self.publish()
        self._published = made_of
        more = (custody.describe, custody.unreadable, self._offered)
        claims = Claims(allocations, filed, lost, *more)
        listed = resources(configured, chips, claims)
        if not custody.unreadable:
            self._offered = {
                Offered(name, identifier, device.addresses)
                for name, resource in listed.items()
                for identifier, device in resource.devices.items()
                if not device.withheld
            }
        self._log_withheld(listed)
        self._bring_sessions(listed)
        self._memory.save(chips=self._fleet.memory(), custody=custody.memory())
        self._changed()

    def _bring_sessions(self, listed: Mapping[str, Resource]) -> None:
        directory = self.settings.device_plugin_dir
        for name in self.sessions.keys() - listed.keys():
            log.info("%s: no device is of this resource any longer", name)
            ending = self.sessions.pop(name)
            ending.listing.resource = Resource(name, {})  # for a call that is under way
            self._run(ending.close())
        for name, resource in listed.items():
            self._make_locks(resource)
            if name in self.sessions:
                self.sessions[name].listing.publish(resource)
            else:
                session = (Listing(resource), self.allocator, directory, self._changed)
                self.sessions[name] = KubeletSession(*session)

    def _make_locks(self, resource: Resource) -> None:
        """Make what containers start with again after a reboot."""
        with suppress(Refusal):  # which Allocate answers with
            self.allocator.make_locks(resource, resource.devices)  # pods' former ones, too

    def _log_withheld(self, listed: Mapping[str, Resource]) -> None:
        before = self._withheld
        self._withheld = {
            f"{name} {device.identifier}": device.withheld
            for name, resource in listed.items()
            for device in resource.devices.values()
            if device.withheld and device.withheld != self.custody.unreadable
        }
        for what, reason in sorted(self._withheld.items() - before.items()):
            log.warning("%s: unhealthy: %s", what, reason)
        for what in sorted(before.keys() - self._withheld.keys()):
            log.info("%s: nobody holds it under another name any longer", what)

    def poll(self) -> None:
        """Look at what no event tells of."""
        now = monotonic()
        self.custody.look(now)
        self.refresh()
        self.publish()
        for name, session in self.sessions.items():
            self._make_locks(session.listing.resource)
            healthy = self.custody.checkpoint.registered.get(name, session.listing.healthy)
            session.check_registered(healthy, now)
        pods = {each.pod for each in self.custody.allocations(now)}
        is_due = self._pod_resources.is_due(pods - self.custody.names.keys() - {""}, now)
        if self._withheld or self.custody.has_doubts():
            self._run(self._prune())
        elif is_due:
            self._run(self.learn_names())

    async def learn_names(self) -> None:
        """Learn pods' names; the kubelet forgets those that have ended."""
        self.custody.learn_names(await self._pod_resources.names())
        self.publish()

    async def _prune(self) -> None:
        """Have the kubelet forget ended pods, and write its checkpoint."""
        await self.learn_names()
        for session in self.sessions.values():
            if session.state == REGISTERED:
                self.custody.expect_writing(monotonic())
                session.listing.repeat()
                return

    def directory_changed(self, names: Collection[str]) -> None:
        """Act on what happened to these names; "": to any."""
        if {CHECKPOINT, KUBELET_SOCKET, ""}.intersection(names):
            self.refresh()
        foreign = [name for name in names if not name.startswith((SOCKET_PREFIX, "."))]
        for session in self.sessions.values():
            session.check_sockets(is_disturbed=foreign not in ([], [CHECKPOINT]))

    def listed(self) -> list[ListedResource]:
        return [
            ListedResource(each.listing.resource, each.state, each.registrations)
            for each in self.sessions.values()
        ]

    async def close(self) -> None:
        closing = (session.close() for session in self.sessions.values())
        await asyncio.gather(*closing, *self._tasks)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _save(self) -> None:
        self._memory.save(custody=self.custody.memory())


class Daemon:
    """The life of the service: start, polls, reload, end."""

    def __init__(
        self,
        settings: Settings,
        load: Callable[[], Settings],
        manager: ServiceManager,
        open_events: Callable[[], socket.socket] = open_uevent_socket,
        trusted: Callable[[object], bool] = sent_by_kernel,
    ) -> None:
        """load: reads the configuration; open_events, trusted: Monitor's."""
        memory = Memory(settings)
        self.settings = settings
        self.monitor = Monitor(settings, memory.chips, self._chips_changed, open_events, trusted)
        self.registrar = Registrar(settings, self.monitor.fleet, memory, self._show_status)
        self._publication = Publication(settings, memory)
        self._scrapes = MetricsServer(self._take_metrics)
        self._load = load
        self._manager = manager
        self._lock = DirectoryLock(settings.device_plugin_dir)
        self._watch = DirectoryWatch(settings.device_plugin_dir, self._directory_changed)
        self._refused = ""  # why the configuration on disk is not the one in force
        self._stage: Literal["starting", "serving", "ready"] = "starting"
        self._wake = asyncio.Event()  # from the pause between polls
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._measured_at = -inf

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, 0)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        log.setLevel(self.settings.log_level.upper())
        self._check_directory()
        if self._status.done():
            self._lock.release()
            return self._status.result()
        self.monitor.open()
        self._watch.open(loop)
        remove_dead_sockets(self.settings.device_plugin_dir)
        serving = loop.create_task(self._serve())
        try:
            await asyncio.wait({serving, self._status}, return_when=asyncio.FIRST_COMPLETED)
            return self._status.result() if self._status.done() else serving.result()
        finally:
            self._manager.notify("STOPPING=1")
            serving.cancel()
            self.monitor.close()
            self._watch.close(loop)
            await self.registrar.close()
            self._lock.release()

    def end(self, status: int) -> None:
        """Have run() return this."""
        if not self._status.done():
            self._status.set_result(status)

    async def _serve(self) -> int:
        self.monitor.look()
        await self.monitor.until_settled()
        self._stage = "serving"
        self.registrar.configure(self.settings)  # a SIGHUP may have come meanwhile
        self.registrar.refresh()  # pods have chips, though none is here
        for listening in self._manager.sockets("metrics"):
            await self._scrapes.start(listening)
        await self._until_bound()
        version = driver_version(self.settings)
        fleet = self.monitor.fleet
        driver = "no Tenstorrent driver is loaded" if version is None else f"driver {version}"
        if self.settings.fail_on_init_error and not fleet.chips:
            log.error("%s", driver if version is None else "there is no Tenstorrent device")
            return 1
        count = counted(len(fleet.chips), "device")
        log.info("tt-device-plugin %s: %s, %s", __version__, driver, count)
        self._log_sharing()
        for session in [*self.registrar.sessions.values()]:
            await session.tried_to_serve.wait()
        await wait_for_links(self.settings, fleet.present)
        await self._describe()
        self._stage = "ready"
        self._show_status()
        self._manager.notify("READY=1")
        await self._poll_for_ever()

    async def _until_bound(self) -> None:
        """Wait for the driver to bind: without these chips a kubelet refuses pods."""
        deadline = monotonic() + BIND_PATIENCE
        on_bus = functions_on_bus(self.settings)
        while driver_version(self.settings) is not None:
            await self._describe()  # what is offered already
            listed = [chip.bdf for chip in self.monitor.fleet.listed]
            unlisted = (bdf for bdf in on_bus if bdf not in listed)
            missing = [bdf for bdf in unlisted if is_for_driver(self.settings, bdf)]
            left = deadline - monotonic()
            if not missing:
                return
            if left <= 0:
                what = f"no node of the driver's in {BIND_PATIENCE:g} s; ready without it"
                log.warning("%s: %s", missing[0], what)
                return
            self._manager.status(f"waiting for the driver to make a node for {missing[0]}")
            await self.monitor.wait(min(left, 0.5))  # events can be lost
            self.monitor.look()

    async def _poll_for_ever(self) -> NoReturn:
        polls = 0
        polled_at = monotonic()
        is_sound = True
        while True:
            due = polled_at + self.settings.health.interval - monotonic()
            await event_within(self._wake, max(0, min(due, self._manager.watchdog_pause)))
            self._wake.clear()
            with log_and_continue("the files for others"):
                await self._describe()
            if monotonic() - polled_at >= self.settings.health.interval:
                polled_at = monotonic()
                polls += 1
                is_sound = False
                with log_and_continue("a poll"):
                    await self._poll(is_thorough=polls % THOROUGH == 0)
                    is_sound = True
            if is_sound and self._manager.watchdog_pause < inf:
                self._manager.notify("WATCHDOG=1")  # polls that fail are no life

    async def _poll(self, *, is_thorough: bool) -> None:
        self._check_directory()
        self._watch.check()
        self.registrar.poll()
        is_due = monotonic() - self._measured_at >= METRICS_PAUSE
        wants_figures = is_due and self._publication.wants_metrics()
        self.monitor.poll(is_thorough=is_thorough, wants_figures=wants_figures)
        await self._describe()
        if wants_figures:
            self._measured_at = monotonic()
            await self.monitor.until_settled()
            self._publication.write_metrics(await self._scrapes.text())

    async def _describe(self) -> None:
        mounts = await self.registrar.allocator.existing_mounts(must_answer=False)
        listed = [each.resource for each in self.registrar.listed()]
        self._publication.describe(self.monitor.fleet.listed, listed, mounts)

    async def _take_metrics(self) -> str:
        if monotonic() - self._measured_at >= METRICS_PAUSE:
            self._measured_at = monotonic()
            await self.monitor.measure()
            await self.registrar.learn_names()
        chips = self.monitor.fleet.listed
        return self._publication.render_metrics(chips, self.registrar, monotonic())

    def reload(self) -> None:
        """Take over what a running daemon can, nothing of a bad configuration."""
        if self._stage == "ready":
            microseconds = time.monotonic_ns() // 1000
            self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={microseconds}")
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("configuration is not reloaded, the old one stays: %s", error)
            self._refused = f"the configuration on disk is refused: {error}"
        else:
            self._refused = ""
            self._take_over(loaded)
        self._show_status()
        if self._stage == "ready":
            self._manager.notify("READY=1")

    def _take_over(self, loaded: Settings) -> None:
        before = self.settings
        kept = {key: getattr(before, key) for key in NEEDS_RESTART}
        for key, value in kept.items():
            if getattr(loaded, key) != value:
                log.warning("%s needs a restart to change; until then it is %s", key, value)
        if before.sharing.lock_dir != loaded.sharing.lock_dir:
            log.warning("lock_dir has changed: containers from before and after share no locks")
        by_cdi = "cdi" in (before.device_list_strategy, loaded.device_list_strategy)
        if by_cdi and before.resource_domain != loaded.resource_domain:
            log.warning("resource_domain has changed: containers of before find no CDI device")
        self.settings = self.monitor.settings = settings = replace(loaded, **kept)
        log.setLevel(settings.log_level.upper())
        log.info("configuration reloaded")
        self._publication.configure(settings)
        if self._stage != "starting":
            self.registrar.configure(settings)
            self._log_sharing()
        self._wake.set()

    def _log_sharing(self) -> None:
        for what in unselected(self.monitor.fleet.listed, self.settings):
            log.info("sharing: %s", what)

    def _chips_changed(self) -> None:
        if self._stage != "starting":
            self.registrar.publish()

    def _directory_changed(self, names: Collection[str]) -> None:
        if "" in names:  # it can be there only now, and another's
            self._check_directory()
        if self._stage != "starting" and not self._status.done():
            self.registrar.directory_changed(names)

    def _check_directory(self) -> None:
        directory = self.settings.device_plugin_dir
        holder = self._lock.holder()
        if holder:
            log.error("%s: another tt-device-plugin serves it already, %s", directory, holder)
            self.end(EXIT_SECOND)
        elif self._lock.has_lost_write_access():
            log.error("%s was made anew, and this service's sandbox forbids it", directory)
            self.end(EXIT_LOST)

    def _show_status(self) -> None:
        self._wake.set()  # the files for others follow
        status = status_line(self.registrar.listed())
        self._manager.status(f"{status}; {self._refused}" if self._refused else status)


def status_line(listed: Sequence[ListedResource]) -> str:
    """Return what `systemctl status` shows: "8 × tenstorrent.com/n300, 8 healthy; …"."""
    if not listed:
        return "no Tenstorrent device on this node; waiting for one"
    parts = []
    for resource, _, _ in listed:
        devices = resource.distinct
        ill = [f"{device.identifier}: {device.reason}" for device in devices if device.reason]
        part = f"{len(devices)} × {resource.name}"
        if resource.replicas:
            part += f", shared by {resource.replicas}"
        part += f", {len(devices) - len(ill)} healthy"
        if ill:
            part += f" ({ill[0]}, …)" if len(ill) > 1 else f" ({ill[0]})"
        parts.append(part)
    states = {each.state for each in listed}
    if len(states) > 1:
        lagging = (each for each in listed if each.state != REGISTERED)
        states = {f"{each.resource.name} {each.state}" for each in lagging}
    return "; ".join([*parts, *sorted(states)])


# ==== COMMAND LINE ================================================================================

Finding = tuple[Literal["ok", "warn", "FAIL"], str, str]  # subject; what is so and what to do

DESCRIPTION = """\
Makes the Tenstorrent accelerators of this node schedulable in Kubernetes.

commands:
  run     the daemon: serves the kubelet's device plugin API until SIGTERM; SIGHUP reads the
          configuration again
  list    a row for each chip, with its health, its resource and who uses it; --json for programs
  check   whether this node is fit: driver, devices, hugepages, kubelet, configuration
"""

EPILOG = """\
Each option can also be set by the environment variable in brackets, or in the configuration file
under the flag's name, with underscores. A flag wins over the environment, that over the file. The
file can say more: [health], [sharing], [[sharing.resources]], [[mounts]]; tt-device-plugin(8).

exit status: 0 in order; 1 check failed, or nothing found with --fail-on-init-error; 2 usage;
74 the directory was lost; 75 another daemon serves it; 78 bad configuration
"""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """A path is one word."""
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """A switch takes its value with "=" only."""
        return super()._format_action_invocation(action).replace(" [=", "[=")


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tt-device-plugin",
        "tt-device-plugin run|list|check [OPTIONS]",
        DESCRIPTION,
        EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("command", nargs="?", choices=("run", "list", "check"), help=argparse.SUPPRESS)
    add("--version", action="version", version=f"tt-device-plugin {__version__}")
    add("--json", action="store_true", help="with list: an array of objects")
    add("--config-only", action="store_true", help="with check: the configuration, nothing else")
    file = f"default {DEFAULT_CONFIG_FILE}, which may be absent [TTDP_CONFIG_FILE]"
    add("--config-file", metavar="FILE", help=file)
    defaults = Settings()
    for option in OPTIONS:
        default = str(getattr(defaults, option.key))
        metavar = option.key.rpartition("_")[2].upper()
        if option.is_switch:
            default = default.lower()
            metavar = "[=BOOL]"
        text = f"{option.help}; default {default} [{option.variable}]".replace("%", "%%")
        add(option.flag, metavar=metavar, help=text)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status (see EPILOG)."""
    words = sys.argv[1:] if arguments is None else arguments
    if "run" in words:  # until the daemon handles it, a SIGHUP waits
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    options = _parsed_options(words)
    set_up_logging(os.environ, has_timestamps=options.command == "run")
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
        return await Daemon(settings, load, ServiceManager(os.environ)).run()

    return asyncio.run(run())


def _parsed_options(words: Sequence[str]) -> argparse.Namespace:
    """Return the options, or end with usage and status 2."""
    parser = argument_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]
    for name in (word.partition("=")[0] for word in words):
        if name.startswith("--") and name not in flags:
            parser.error(f"there is no option {name}{nearest(name, flags)}")
    # What follows a bare switch is the next word, such as a command.
    switches = {option.flag for option in OPTIONS if option.is_switch}
    options = parser.parse_args([f"{word}=true" if word in switches else word for word in words])
    if options.command is None:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if options.json and options.command != "list":
        parser.error("--json goes with list")
    if options.config_only and options.command != "check":
        parser.error("--config-only goes with check")
    return options


def say(text: str) -> None:
    """Print what may hold others' names; an ASCII terminal gets ASCII."""
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    if (sys.stdout.encoding or "ascii").lower() not in ("utf-8", "utf8"):
        shown = shown.replace("×", "x").replace("…", "...").replace("°", " ")
        shown = shown.encode("ascii", "replace").decode()
    print(shown)


class Survey(NamedTuple):
    """A node, as `list` and `check` see it."""

    settings: Settings
    fleet: Fleet
    custody: Custody
    listed: Mapping[str, Resource]
    users: Sequence[ChipUser]
    knows_pods: bool  # the kubelet's checkpoint can be read

    def pods(self, bdf: str) -> list[ChipUser]:
        return [user for user in self.users if user.bdf == bdf]


async def survey(settings: Settings) -> Survey:
    """Look twice, a second apart: a stalled heartbeat shows only then."""
    memory = Memory(settings)
    rules = replace(settings, health=replace(settings.health, heartbeat_misses=1))
    monitor = Monitor(rules, memory.chips, lambda: None)
    fleet = monitor.fleet
    under_way = monitor.readers.pool.seconds_under_way
    for pause in (0.0, 1.0):
        await asyncio.sleep(pause)
        monitor.poll(is_thorough=True, wants_figures=True)
        await monitor.until_settled()
        while any(0 < under_way(bdf) <= READ_DEADLINE for bdf in fleet.chips):
            await monitor.wait(None)
    fleet.show_former()
    chips = fleet.chips.values()
    configured = configured_resources(chips, settings)
    custody = Custody(settings.device_plugin_dir, settings.sysfs_root, memory.custody)
    now = monotonic()
    custody.refresh(configured, fleet.chip_at, now)
    custody.look(now)
    custody.learn_names(await PodResources(settings.pod_resources_socket).names())
    now += LINGERING  # a pod whose cgroup has gone has ended
    users = chip_users(custody, now)
    allocations = custody.allocations(now)
    listed = resources(configured, chips, Claims(allocations, allocations, (), custody.describe))
    is_readable = os.access(f"{settings.device_plugin_dir}/{CHECKPOINT}", os.R_OK)
    return Survey(settings, fleet, custody, listed, users, is_readable and not custody.unreadable)


def list_devices(settings: Settings, *, as_json: bool) -> int:
    found = asyncio.run(survey(settings))
    for oddity in found.fleet.oddities:
        print(f"not listed: {oddity}", file=sys.stderr)
    rows = list(_rows(found))
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for line in _table_lines(rows) if rows else ["no Tenstorrent device on this node"]:
        say(line)
    return 0


def _rows(found: Survey) -> Iterator[dict[str, Any]]:
    """Yield chips as `list --json` has them."""
    owners: dict[str, tuple[Resource, Device | None]] = {}
    for each in found.listed.values():
        for device in each.distinct:
            if not device.is_former:
                owners.update({chip.bdf: (each, device) for chip in device.chips})
    for bdf in sorted(found.fleet.chips, key=address):
        chip = found.fleet.chips[bdf]
        function = chip.function
        resource, owner = owners.get(bdf, (Resource("", {}), None))
        reason = chip.health.reason or (owner.reason if owner else "its board is not known yet")
        pods = [user._asdict() for user in found.pods(bdf)]
        for pod in pods:
            del pod["bdf"]
        processes = processes_on(found.settings, function.ordinal) if chip.present else []
        yield {
            "id": owner.identifier if owner else None,
            "index": function.ordinal,
            "path": function.path if chip.present and not function.node_fault else None,
            "bdf": bdf,
            "card": chip.card_type,
            "board": chip.board_type if chip.card_type else None,
            "arch": function.arch,
            "serial": chip.identity.serial,
            "asic_id": chip.identity.asic_id,
            "numa_node": function.numa_node,
            "firmware": chip.identity.firmware,
            "temperature": chip.telemetry.temperature if chip.telemetry else None,
            "power": chip.figures.get("power1_input"),
            "healthy": reason is None,
            "reason": reason,
            "resource": resource.name or None,
            "replicas": resource.replicas,
            "pods": pods if found.knows_pods else None,
            "processes": None if processes is None else [*map(_process_row, processes)],
        }


def _process_row(process: Process) -> dict[str, Any]:
    return {"pid": process.pid, "command": process.command, "of_pod": process.is_of_pod}


def _table_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of 110 columns, where names are of usual length."""
    keys = {
        "ADDRESS": "bdf",
        "ID": "id",
        "CARD": "card",
        "SERIAL": "serial",
        "NUMA": "numa_node",
        "FIRMWARE": "firmware",
    }
    if all(row["id"] in (row["bdf"], None) for row in rows):
        del keys["ID"]
    lines = [["N", *keys, "RESOURCE", "°C", "W", "HEALTH", "USED BY"]]
    for row in rows:
        number = row["index"] if row["path"] else None
        cells = [number, *(row[key] for key in keys.values())]
        shared = f" ×{row['replicas']}" if row["replicas"] else ""
        cells.append(row["resource"] and row["resource"].partition("/")[2] + shared)
        for figure in (row["temperature"], row["power"]):
            cells.append(figure if figure is None else round(figure))
        cells.append(f"UNHEALTHY: {row['reason']}" if row["reason"] else "healthy")
        cells.append(_users(row))
        lines.append(["-" if cell is None else str(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  ".join(map(str.ljust, line, widths)).rstrip()


def _users(row: Mapping[str, Any]) -> str:
    """Return who uses a chip; a process of a pod is the pod."""
    pods = [f"{pod['namespace']}/{pod['pod']}".lstrip("/") for pod in row["pods"] or ()]
    users = [*dict.fromkeys(pods)]
    for process in row["processes"] or ():
        if not (pods and process["of_pod"]):
            users.append(f"{process['command']}[{process['pid']}]")
    is_unknown = None in (row["pods"], row["processes"])
    return ", ".join(users) or ("?" if is_unknown else "-")


def check(load: Callable[[], Settings], *, config_only: bool) -> int:
    """Say whether a node is fit; returns 1 if anything FAILs."""
    findings: list[Finding] = []
    try:
        settings = load()
        findings.append(("ok", "configuration", "valid"))
    except ConfigError as error:
        settings = Settings()
        more = "" if config_only else "; the rest is checked with the defaults"
        findings.append(("FAIL", "configuration", f"{error}{more}"))
    if not config_only:
        found = asyncio.run(survey(settings))
        for part in (
            _check_driver,
            _check_chips,
            _check_hugepages,
            _check_sharing,
            _check_cdi,
            _check_kubelet,
        ):
            findings += part(found)
    width = max(len(subject) for _, subject, _ in findings)
    for level, subject, text in findings:
        say(f"{level:4}  {subject:{width}}  {text}")
    return int(any(level == "FAIL" for level, _, _ in findings))


def _check_driver(found: Survey) -> Iterator[Finding]:
    version = driver_version(found.settings)
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if version is None:
        yield "FAIL", "driver", "not loaded; install tt-kmd and run: modprobe tenstorrent"
    elif numbers and tuple(map(int, numbers.groups())) < (2, 7):
        advice = "firmware that stops is not noticed; update to 2.7"
        yield "warn", "driver", f"{version} shows no heartbeat: {advice}"
    else:
        yield "ok", "driver", version or "loaded; it does not say its version"


def _check_chips(found: Survey) -> Iterator[Finding]:
    fleet = found.fleet
    settings = found.settings
    on_bus = functions_on_bus(settings)
    if not fleet.chips and not fleet.oddities:
        advice = "the driver has none of them" if on_bus else "look for them with: lspci -d 1e52:"
        yield "warn", "devices", f"{len(on_bus) or 'none'} on this node; {advice}"
    for bdf in on_bus if driver_version(settings) is not None else ():
        if bdf not in fleet.chips and not link_name(f"{pci_directory(settings, bdf)}/driver"):
            advice = f"look into dmesg, then: echo {bdf} > /sys/bus/pci/drivers/tenstorrent/bind"
            yield "warn", bdf, f"no driver is bound to it; {advice}"
    for oddity in fleet.oddities:
        advice = "reload the driver: modprobe -r tenstorrent && modprobe tenstorrent"
        yield "FAIL", "devices", f"{oddity}; {advice}"
    reasons = {row["bdf"]: row["reason"] for row in _rows(found)}
    for bdf, chip in fleet.chips.items():
        what = f"{chip.card_type or chip.function.arch}, {chip.function.path}"
        if reasons[bdf] and not reasons[bdf].startswith("held by"):
            yield "FAIL", bdf, f"{what}: {reasons[bdf]}"
        else:
            yield "ok", bdf, f"{what}, healthy"
            yield from _check_chip(found, chip)


def _check_chip(found: Survey, chip: Chip) -> Iterator[Finding]:
    bdf = chip.bdf
    path = chip.function.path
    if chip.telemetry and chip.telemetry.is_silent:
        yield "warn", bdf, "its firmware is silent; if it stays so, look into dmesg"
    width = chip.figures.get("current_link_width")
    most = chip.figures.get("max_link_width")
    if width and most and width < most:
        advice = "reseat the card, and look at its slot"
        yield "warn", bdf, f"PCI link of {width:g} lanes where it can have {most:g}; {advice}"
    processes = processes_on(found.settings, chip.function.ordinal) or ()
    strangers = [f"{each.command} ({each.pid})" for each in processes if not each.is_of_pod]
    for user in found.pods(bdf)[:1] if strangers else ():
        what = f"was given it, and {strangers[0]} of the host has it open; end that"
        yield "warn", bdf, f"{user.namespace}/{user.pod} {what}"
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except OSError as error:
        yield "FAIL", bdf, f"{path}: {error.strerror}"
        return
    if mode & 0o666 != 0o666:
        advice = "who is not root cannot open it; install the driver's udev rules"
        yield "warn", bdf, f"{path} has mode {mode:04o}, not 0666: {advice}"


def _check_hugepages(found: Survey) -> Iterator[Finding]:
    """Look for 4 pages of 1 GiB for each chip of a Wormhole without an IOMMU that translates."""
    settings = found.settings
    needy = []
    for chip in found.fleet.present:
        group = read_quick(f"{pci_directory(settings, chip.bdf)}/iommu_group/type") or ""
        if chip.function.arch == "wormhole" and not group.startswith("DMA"):
            needy.append(8 if chip.board_type == "n300" else 4)
    chips = f"{counted(len(needy), 'Wormhole')} without IOMMU"
    wanted = sum(needy)
    directory = f"{settings.sysfs_root}/kernel/mm/hugepages/hugepages-1048576kB"
    there = decimal(read_quick(f"{directory}/nr_hugepages")) or 0
    mount = f"{settings.dev_root}/hugepages-1G"
    mounts = ""
    with suppress(OSError), open(f"{settings.proc_root}/mounts", "rb") as file:
        mounts = file.read().decode(errors="replace")
    if needy and not isdir(directory):
        advice = "this kernel has none; use an IOMMU, or a kernel with pages of 4 KiB"
        yield "warn", "hugepages", f"{chips} cannot have them of 1 GiB: {advice}"
    elif needy and there < wanted:
        advice = f"boot with hugepagesz=1G hugepages={wanted}, or install tt-system-tools"
        yield "warn", "hugepages", f"{there} of 1 GiB for {chips}; {advice}"
    elif needy and not re.search(rf"^\S+ {re.escape(mount)} hugetlbfs ", mounts, re.MULTILINE):
        yield "warn", "hugepages", f"{there} of 1 GiB, but {mount} is not mounted; mount it there"
    else:
        yield "ok", "hugepages", f"{there} of 1 GiB{'' if needy else '; none are needed'}"


def _check_sharing(found: Survey) -> Iterator[Finding]:
    for what in unselected(found.fleet.chips.values(), found.settings):
        yield "warn", "sharing", what


def _check_cdi(found: Survey) -> Iterator[Finding]:
    path = f"{found.settings.cdi_dir}/{CDI_FILE}"
    by_cdi = found.settings.device_list_strategy == "cdi"
    nodes = {chip.bdf: chip.function.path for chip in found.fleet.present}
    try:
        with open(path, encoding="utf-8") as file:
            described = cdi_nodes(file.read())
    except (OSError, ValueError) as error:
        if by_cdi or (found.settings.cdi_dir and os.path.exists(path)):
            reason = getattr(error, "strerror", None) or error
            yield "FAIL", "CDI", f"{path} cannot be read: {reason}; is the service running?"
    else:
        known = described.keys() | nodes
        false = sorted(bdf for bdf in known if described.get(bdf) != nodes.get(bdf))
        if false:
            yield "FAIL", "CDI", f"{path} is false of {few(false)}; is the service running?"
        else:
            yield "ok", "CDI", f"{path} describes the devices"
    with suppress(OSError, subprocess.SubprocessError):
        version = re.search(r"\bv?(\d+)\.(\d+)\.\d+", _output("containerd", "--version"))
        if by_cdi and version and tuple(map(int, version.groups())) < (1, 7):
            advice = "update to 1.7, or leave device-specs"
            yield "warn", "CDI", f"containerd {version[0]} cannot read CDI files; {advice}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout


def _check_kubelet(found: Survey) -> Iterator[Finding]:
    directory = found.settings.device_plugin_dir
    kubelet = f"{directory}/{KUBELET_SOCKET}"
    try:
        os.stat(f"{directory}/.")
    except PermissionError:
        yield "warn", "kubelet", f"{directory}: you may not look there; run as root"
        return
    except OSError:
        advice = "is kubelet installed, and is this its directory? device_plugin_dir says so"
        yield "warn", "kubelet", f"{directory} is not there (yet); {advice}"
        return
    if os.access(directory, os.W_OK | os.X_OK):
        yield "ok", "kubelet", f"{directory} can be written to"
    else:
        advice = "run as root, and look at its mount"
        yield "FAIL", "kubelet", f"{directory} cannot be written to; {advice}"
    if not os.path.exists(kubelet):
        yield "warn", "kubelet", f"{kubelet} is not there; kubelet is not running"
    elif not os.access(kubelet, os.W_OK):
        yield "warn", "kubelet", f"{kubelet} may not be connected to; run as root"
    elif not listens(kubelet):
        yield "warn", "kubelet", f"nobody listens on {kubelet}; kubelet is not running"
    else:
        yield "ok", "kubelet", f"{kubelet} answers"
    if found.custody.unreadable:
        yield "warn", "kubelet", f"{found.custody.unreadable}; what is offered anew is withheld"
    for name, ids in found.custody.checkpoint.registered.items():
        resource = found.listed.get(name)
        if resource and ids and ids.isdisjoint(resource.devices):
            advice = "another plugin has registered this name; stop it"
            yield "FAIL", "kubelet", f"{name} has the devices {few(sorted(ids))}: {advice}"
    yield from _check_sandbox(directory)


def _check_sandbox(directory: str) -> Iterator[Finding]:
    with suppress(OSError, subprocess.SubprocessError):
        show = ("systemctl", "show", "--value", "--property=ReadWritePaths")
        shown = _output(*show, "tt-device-plugin.service").split()
        paths = [os.path.normpath(path.lstrip("-+")) for path in shown]
        if paths and not any(f"{directory}/".startswith(f"{path}/") for path in paths):
            advice = "a drop-in opens it, see tt-device-plugin(8)"
            yield "FAIL", "sandbox", f"the service may not write to {directory}; {advice}"


if __name__ == "__main__":
    sys.exit(main())
