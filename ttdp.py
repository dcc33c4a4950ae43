"""tt-device-plugin: makes Tenstorrent accelerators schedulable in Kubernetes, as a host daemon.

Ten nouns, each with this one meaning:

    chip        a PCI function of a card, known by its PCI address, with one device file
    board       the chips that are one card; of a Galaxy, a tray is a board
    tray        8 chips of a Galaxy
    device      the unit of allocation: a chip, or with unit = "board" a board
    resource    a name at the kubelet, such as tenstorrent.com/n300, with its devices
    ID          a device's name; of a shared device one for each replica
    hold        one answer to Allocate, with all that a container was given
    fault       why a chip is unhealthy: a kind and a text
    session     keeps one resource registered with the kubelet
    view        the node, as `list --json` shows it

The daemon is one asyncio loop: events only wake it, then it observes the host, decides what should
be advertised and written, and brings sockets and files in line with that (see Daemon). The chapters
stand bottom-up; each uses only those above it:

    the host                CONFIGURATION, INVENTORY, HEALTH, CHIPS
    who has what            RESOURCES, HOLDS
    pure decisions          PREFERRED ALLOCATION, CONTAINER EDITS, CDI AND LABELS, DECISION, REPORTS
    infrastructure          THREADS, FILES, SYSTEMD, KERNEL EVENTS, HOST
    the kubelet's API       REQUESTS, REGISTRATION, POD RESOURCES
    what ties it together   CONNECTIONS, DAEMON
    commands                COMMAND LINE
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import ctypes
import errno
import fcntl
import json
import logging
import os
import queue
import re
import shlex
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Container,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import datetime
from enum import Enum
from functools import cached_property, lru_cache, partial
from io import TextIOWrapper
from itertools import chain, combinations, count
from math import inf
from operator import add
from os.path import abspath, basename, dirname, exists, isdir, normpath
from textwrap import fill
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
ChipAddresses = frozenset[str]  # PCI addresses, "0000:03:00.0"
DeviceIds = frozenset[str]  # as the kubelet allocates them; an unshared chip has its address
Task = asyncio.Task[None]

log = logging.getLogger("tt-device-plugin")


def pluralize(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def abbreviate(names: Sequence[str]) -> str:
    """Return the first three names, quoted and cut, and the number of the others."""
    quoted = ", ".join(repr(name[:63]) for name in names[:3])
    return quoted if len(names) <= 3 else f"{quoted} and {len(names) - 3} more"


def either(words: Sequence[str]) -> str:
    """Return the words as a choice: "a, b or c"."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def printable(text: str) -> str:
    """Return a text that others control with its control characters escaped."""
    # ascii() gives a character as '\x1b'; without its quotes.
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def without_domain(resource: str) -> str:
    return resource.rpartition("/")[2]


# ==== CONFIGURATION: flag, variable, file, default ================================================

DEFAULT_CONFIG_FILE = "/etc/tt-device-plugin/config.toml"
# Exit statuses of `run`, as in sysexits.h.
EXIT_DIRECTORY_UNUSABLE = 74  # EX_IOERR
EXIT_ALREADY_RUNNING = 75  # EX_TEMPFAIL
EXIT_CONFIG = 78  # EX_CONFIG; systemd does not restart the service after it
NEEDS_RESTART = ("device_plugin_dir", "root")

PLUGIN_DIR_MAX = 64  # bytes, of the 107 of a socket's path (unix(7)); the daemon's are in it
RESERVED_PATHS = ("/", "/dev", "/proc", "/sys", "/dev/tenstorrent")  # no mount may hide these

# A switch as a flag or variable. TOML has its own booleans.
BOOLEANS = {"true": True, "yes": True, "on": True, "1": True}
BOOLEANS |= {"false": False, "no": False, "off": False, "0": False}

Flags = Mapping[str, str | None]  # by key
Environment = Mapping[str, str]


class ConfigError(Exception):
    """An invalid configuration: one line with source, value and valid values."""


def _invalid(source: str, value: object, valid: str) -> ConfigError:
    """Return the error that names a bad value, with what `valid` says it must be."""
    # A boolean as TOML writes it: true. The value is cut if it is long.
    text = repr(value).lower() if isinstance(value, bool) else repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}…"
    return ConfigError(f"{source}: {shown} is not valid; must be {valid}")


class Key(NamedTuple):
    """A key of the file, which can also be a flag and a variable."""

    help: str
    valid: str  # completes the sentence "must be …"
    convert: Callable[[Any], Any]  # to the value in Settings; raises ValueError
    choices: tuple[str, ...] = ()
    is_list: bool = False  # of what `convert` accepts

    @property
    def is_switch(self) -> bool:
        return self.convert is _boolean

    def parse(self, value: object, source: str) -> Any:
        """Return a value of the file as Settings have it; raises ConfigError."""
        if not self.is_list:
            return self._convert(value, source)
        if not isinstance(value, list):
            raise _invalid(source, value, self.valid)
        return tuple(self._convert(each, source) for each in value)

    def _convert(self, value: object, source: str) -> Any:
        try:
            return self.convert(value)
        except ValueError:
            raise _invalid(source, value, self.valid) from None

    def parse_text(self, text: str, source: str) -> Any:
        """Return the value of a flag or variable; raises ConfigError."""
        if not self.is_switch:
            return self.parse(text, source)
        if text.lower() not in BOOLEANS:
            raise _invalid(source, text, either([*BOOLEANS]))
        return BOOLEANS[text.lower()]


# -- kinds of values: each function returns the value in Settings, or raises ValueError ------------


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _path(value: object, most: int = 4095) -> str:
    """Return an absolute path of at most so many bytes, without "..", "." and double slashes."""
    if not isinstance(value, str) or not value.startswith("/") or not value.isprintable():
        raise ValueError

    path = "/" + normpath(value).lstrip("/")  # normpath() alone keeps two slashes at the beginning
    if len(os.fsencode(path)) > most:
        raise ValueError
    return path


def _path_or_empty(value: object) -> str:
    return "" if value == "" else _path(value)


def _container_path(value: object) -> str:
    path = _path(value)
    if path in RESERVED_PATHS:
        raise ValueError
    return path


def _matching(pattern: str, value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError
    return value


def _domain(value: object) -> str:
    """Return a domain that resources can have (Kubernetes' IsExtendedResourceName)."""
    label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    name = _matching(rf"{label}(\.{label})*", value)
    # A ResourceQuota puts "requests." in front of the domain, which must stay a DNS name then.
    is_too_long = len(f"requests.{name}") > 253
    if is_too_long or name.startswith("requests.") or "kubernetes.io" in name:
        raise ValueError
    return name


def _resource_name(value: object) -> str:
    name = "[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    return _matching(rf"([a-z0-9.-]{{1,253}}/)?{name}", value)


def full_address(value: object) -> str:
    """Return a PCI address in sysfs's form: "0000:0a:00.0" for "0A:00.0", as lspci prints it."""
    if not isinstance(value, str):
        raise ValueError
    address = _matching(r"([0-9a-f]{4,8}:)?[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", value.lower())
    return address if address.count(":") == 2 else f"0000:{address}"


def _device_id(value: object) -> str:
    """Return a chip's address or a board's ID: a p300's serial, the buses of a Galaxy's tray."""
    with suppress(ValueError):
        return full_address(value)
    if isinstance(value, str) and ":" in value:
        return _matching("[0-9a-f]{4,8}:[048c]0", value.lower())
    return _matching("(?i)[0-9a-f]{16}", value).upper()


# -- the tables of the file: each key stands beside its default ------------------------------------


def _key(
    default: Any,
    help: str,
    valid: str,
    convert: Callable[[Any], Any],
    choices: tuple[str, ...] = (),
    is_list: bool = False,
) -> Any:
    """Return a dataclass's field that is a key; MISSING as the default: it must be in the file."""
    return field(default=default, metadata={"key": Key(help, valid, convert, choices, is_list)})


def _switch(default: bool, help: str) -> Any:
    return _key(default, help, "true or false", _boolean)


def _choice(default: str, choices: tuple[str, ...], help: str) -> Any:
    return _key(default, help, either(choices), partial(_matching, "|".join(choices)), choices)


def _number(default: Any, least: float, most: float, help: str, is_whole: bool = False) -> Any:
    def convert(value: Any) -> Any:
        # type() and not isinstance(), for which a boolean is an integer. No range contains NaN.
        kinds = (int,) if is_whole else (int, float)
        if type(value) not in kinds or not least <= value <= most:
            raise ValueError
        return value

    kind = "a whole number" if is_whole else "a number"
    return _key(default, help, f"{kind} from {least} to {most}", convert)


def _output(default: str, help: str) -> Any:
    return _key(default, f"{help}; empty for none", "an absolute path, or empty", _path_or_empty)


def _resource(default: Any, help: str) -> Any:
    valid = "the name of a resource, such as n300 or tenstorrent.com/n300"
    return _key(default, help, valid, _resource_name)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """Table [health]."""

    # The heartbeat changes every 0.1 s, so in each of two polls.
    interval: float = _number(5.0, 0.5, 3600, "seconds between two polls of each chip")
    temperature_limit: float | None = _number(
        None, 1, 200, "°C at which a chip is too hot; not set: high temperature is not a fault"
    )


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An entry [[sharing.resources]]: several containers on one device."""

    name: str = _resource(MISSING, "name of the resource to share")
    replicas: int = _number(MISSING, 2, 100, "containers per device", is_whole=True)
    rename: str | None = _resource(None, "name of the shared resource")
    devices: tuple[str, ...] = _key(
        (),
        "devices to share, while the others stay exclusive; empty for all",
        'a list of PCI addresses, such as 03:00.0, or IDs of boards (with unit = "board")',
        _device_id,
        is_list=True,
    )


@dataclass(frozen=True, slots=True)
class Sharing:
    """Table [sharing]."""

    rename_by_default: bool = _switch(False, "append .shared to names of shared resources")
    fail_requests_greater_than_one: bool = _switch(
        True, "refuse a container that requests more than one replica"
    )
    lock_dir: str = _output(
        "/run/ttdp/shm",
        "host directory for the locks of containers on shared devices, which they get as /dev/shm",
    )
    resources: tuple[SharedResource, ...] = ()

    def shared_name(self, entry: SharedResource) -> str:
        """Return the name of the resource that the shared devices of an entry make up."""
        return entry.rename or (f"{entry.name}.shared" if self.rename_by_default else entry.name)


@dataclass(frozen=True, slots=True)
class Mount:
    """An entry [[mounts]]: a bind mount for every container with a device."""

    host: str = _key(MISSING, "path on the host", "an absolute path", _path)
    container: str = _key(
        "",  # in the file: the same path as on the host; see _with_targets()
        "path in the container; default: the same path",
        f"an absolute path other than {', '.join(RESERVED_PATHS)}",
        _container_path,
    )
    read_only: bool = _switch(False, "mount it read-only")


Mounts = tuple[Mount, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration. Every path is absolute, or empty where that is valid."""

    device_plugin_dir: str = _key(
        "/var/lib/kubelet/device-plugins",
        "the kubelet's device plugin directory",
        f"an absolute path of at most {PLUGIN_DIR_MAX} bytes",
        partial(_path, most=PLUGIN_DIR_MAX),
    )
    root: str = _key(
        "/",
        "directory that has the host's /sys, /dev, /proc, /run/udev and /var/log/pods",
        "an absolute path",
        _path,
    )
    resource_domain: str = _key(
        "tenstorrent.com",
        "domain of all resource names",
        "a lower-case DNS name outside kubernetes.io, such as example.com",
        _domain,
    )
    resource_naming: str = _choice(
        "board",
        ("board", "card", "arch"),
        "name resources after the board (n300, p150), card (p150a) or arch (wormhole)",
    )
    visible_devices: str = _choice(
        "bdf",
        ("bdf", "index", "none"),
        "value of TT_VISIBLE_DEVICES: bdf, index (0 to n-1 in the container) or none (not set)",
    )
    unit: str = _choice(
        "chip",
        ("chip", "board"),
        "unit of allocation: chip, or board (a p300's 2 chips, a Galaxy tray's 8)",
    )
    device_list_strategy: str = _choice(
        "device-specs",
        ("device-specs", "cdi"),
        "containers get device files by device-specs (from the kubelet) or cdi (from CDI files)",
    )
    cdi_dir: str = _output("/var/run/cdi", "directory of CDI files")
    labels_dir: str = _output(
        "/etc/kubernetes/node-feature-discovery/features.d",
        "directory of feature files for node-feature-discovery",
    )
    metrics_file: str = _output(
        "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
        "metrics for node_exporter's textfile collector",
    )
    hugepages: str = _choice(
        "private",
        ("private", "host", "none"),
        "hugepage directories of containers: private (each has its own), host (the host's own) "
        "or none",
    )
    fail_on_init_error: bool = _switch(
        False, "exit with status 1 if the driver or all devices are missing at start"
    )
    log_level: str = _choice("info", ("debug", "info", "warning", "error"), "minimum level to log")
    exclude: tuple[str, ...] = _key(
        (),
        "chips that are not offered, for example to return a card or to give it to a virtual "
        "machine",
        "a list of PCI addresses, such as 0000:03:00.0 or 03:00.0",
        full_address,
        is_list=True,
    )
    health: HealthSettings = HealthSettings()
    sharing: Sharing = Sharing()
    mounts: Mounts = ()

    # Not in the file: the directories that systemd sets.
    state_dir: str | None = None  # None: the state is not saved
    runtime_dir: str | None = None  # None: there is no status socket

    @property
    def sys(self) -> str:
        """Return the host's /sys, below `root`; dev and proc likewise."""
        return f"{self.root.rstrip('/')}/sys"

    @property
    def dev(self) -> str:
        return f"{self.root.rstrip('/')}/dev"

    @property
    def proc(self) -> str:
        return f"{self.root.rstrip('/')}/proc"

    @property
    def has_private_hugepages(self) -> bool:
        """Return whether containers get hugepage directories of the daemon's."""
        return self.hugepages == "private" and self.device_list_strategy != "cdi"


TABLES = {  # by their headings in the file
    "": Settings,
    "[health]": HealthSettings,
    "[sharing]": Sharing,
    "[[sharing.resources]]": SharedResource,
    "[[mounts]]": Mount,
}


def keys_of(table: type) -> dict[str, Key]:
    """Return the keys of a table by name; tables in it are left out."""
    found = {each.name: each.metadata.get("key") for each in fields(table)}
    return {name: key for name, key in found.items() if key}


# The keys that are flags and variables, too: those with one value.
OPTIONS = {name: key for name, key in keys_of(Settings).items() if not key.is_list}


def flag_of(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def variable_of(key: str) -> str:
    return f"TTDP_{key.upper()}"


# -- reading it ------------------------------------------------------------------------------------


def load_settings(flags: Flags, environ: Environment) -> Settings:
    """Return the settings; raises ConfigError."""
    file, document = _read_file(flags, environ)
    settings: Settings = _parse_table("", document, file)
    sources = {key: f"{file}: {key}" for key in document}

    values: Json = {}
    for name, key in OPTIONS.items():
        # A flag outweighs the variable, and both outweigh the file.
        texts = {flag_of(name): flags.get(name), variable_of(name): environ.get(variable_of(name))}
        for source, text in texts.items():
            # An empty text counts only for a key that can be empty; else as if it were not set.
            if text or (text == "" and key.convert is _path_or_empty):
                values[name] = key.parse_text(text, source)
                sources[name] = source
                break

    # systemd.exec(5): several directories would be separated by colons.
    for name, variable in (("state_dir", "STATE_DIRECTORY"), ("runtime_dir", "RUNTIME_DIRECTORY")):
        values[name] = environ.get(variable, "").partition(":")[0] or None
    settings = replace(settings, **values)

    if settings.device_list_strategy == "cdi" and not settings.cdi_dir:
        source = sources["device_list_strategy"]
        raise ConfigError(f'{source}: "cdi" needs cdi_dir, which is empty')
    sharing = _with_plain_names(settings, file)
    return replace(settings, sharing=sharing, mounts=_with_targets(settings, file))


def unknown_variables(environ: Environment) -> Iterator[str]:
    """Yield a warning of each variable that is named like those of options, but is none."""
    known = map(variable_of, ("config_file", *OPTIONS))
    ours = {name for name in environ if name.startswith("TTDP_")}
    for name in sorted(ours.difference(known)):
        yield f"unknown variable {name!r}; see tt-device-plugin.toml(5)"


def _read_file(flags: Flags, environ: Environment) -> tuple[str, Json]:
    """Return the path of the configuration file, and its content; raises ConfigError."""
    path, named_by = DEFAULT_CONFIG_FILE, ""  # the flag or variable that has the path
    if text := environ.get(variable_of("config_file")):
        path, named_by = text, variable_of("config_file")
    if text := flags.get("config_file"):
        path, named_by = text, flag_of("config_file")
    file = printable(path)

    try:
        with open(path, "rb") as content:
            # With or without the mark (BOM) that some editors put at the beginning.
            return file, tomllib.loads(content.read().decode("utf-8-sig"))
    except FileNotFoundError:
        if not named_by:
            return file, {}
        raise ConfigError(f"{named_by}: {file} does not exist") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor TOML; a thousand brackets
        reason = " ".join(str(error).split())
        example = '(example of a valid line: unit = "board")'
        raise ConfigError(f"{file}: invalid TOML: {reason} {example}") from None


def _parse_table(heading: str, content: object, file: str) -> Any:
    """Return a table of the file as an object of its class; raises ConfigError.

    `heading`: one of TABLES.
    """
    if not isinstance(content, dict):
        raise _invalid(f"{file}: {heading}", content, "a table")

    table, path = TABLES[heading], heading.strip("[]")
    source = f"{file}: {heading} " if heading else f"{file}: "
    keys = keys_of(table)
    known = [each.name for each in fields(table) if each.name not in ("state_dir", "runtime_dir")]
    values: Json = {}
    for name, value in content.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in known:
            valid = f"valid keys: {', '.join(known)}"
            raise ConfigError(f"{source}unknown key {name[:63]!r}; {valid}")

        # A key's value, a table [inner], or tables [[inner]].
        if name in keys:
            values[name] = keys[name].parse(value, f"{source}{name}")
        elif f"[{inner}]" in TABLES:
            values[name] = _parse_table(f"[{inner}]", value, file)
        elif isinstance(value, list):
            values[name] = tuple(_parse_table(f"[[{inner}]]", each, file) for each in value)
        else:
            raise _invalid(f"{source}{name}", value, f"tables: [[{inner}]]")

    for each in fields(table):
        if each.default is MISSING and each.name not in values:
            raise ConfigError(f"{source}{each.name} is missing in {content!r:.80}")
    return table(**values)


def _with_targets(settings: Settings, file: str) -> Mounts:
    """Return the mounts, each with its path in the container; raises ConfigError."""
    source = f"{file}: [[mounts]] container"
    # Containers on shared devices have a directory of lock_dir as /dev/shm.
    taken = {"/dev/shm"} if settings.sharing.resources else set()
    mounts = []
    for mount in settings.mounts:
        target = keys_of(Mount)["container"].parse(mount.container or mount.host, source)
        if target in taken:
            raise _invalid(source, target, "a path that nothing else has in the container")
        taken.add(target)
        mounts.append(replace(mount, container=target))
    return tuple(mounts)


def _with_plain_names(settings: Settings, file: str) -> Sharing:
    """Return the sharing with names of resources without their domain; raises ConfigError."""
    sharing = settings.sharing
    source = f"{file}: [[sharing.resources]]"
    entries: list[SharedResource] = []
    for entry in sharing.resources:
        for name in filter(None, (entry.name, entry.rename)):
            if "/" in name and not name.startswith(f"{settings.resource_domain}/"):
                raise ConfigError(f"{source} {name}: its domain is not {settings.resource_domain}")

        rename = without_domain(entry.rename) if entry.rename else None
        entry = replace(entry, name=without_domain(entry.name), rename=rename)
        if conflict := _sharing_conflict(sharing, entry, entries):
            raise ConfigError(f"{source} {entry.name}: {conflict}")
        entries.append(entry)
    return replace(sharing, resources=tuple(entries))


def _sharing_conflict(
    sharing: Sharing, entry: SharedResource, others: Sequence[SharedResource]
) -> str | None:
    """Return why an entry is not possible in itself, or beside the entries before it."""
    shared = sharing.shared_name(entry)
    if entry.devices and shared == entry.name:
        return "needs rename: the devices that are not shared keep this name"

    # The names of resources of known cards, also of those of other nodes.
    board_name = r"([np]\d+[a-z]?|(galaxy-)?(wormhole|blackhole))(-board)?"
    if shared != entry.name and re.fullmatch(board_name, shared):
        return f"rename: {shared} could clash with another resource; choose a different name"

    for other in others:
        if sharing.shared_name(other) == shared:
            return f"two entries have the name {shared}; choose a different rename for one of them"
        if other.name == entry.name and not (entry.devices and other.devices):
            return "selected by two tables; one without devices selects all"
        if duplicates := sorted({*entry.devices} & {*other.devices}):
            return f"{abbreviate(duplicates)} is selected twice"
    return None


# ==== INVENTORY: sysfs and /proc. Device files are never opened: that powers chips up =============

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

# Each register of a chip that does not respond reads as ones; the driver converts them like any
# value. Its results are called DEAD_… below.
ALL_ONES = 0xFFFFFFFF

# errno values that mean absence (ELOOP: a link to itself). OWN_ERRORS are the daemon's, not the
# chip's.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ELOOP)
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

HUGETLBFS = ("hugepages-1G", "hugepages")  # in /dev
BDF = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# Device, inode, mtime and size: inodes are reused, and kernels before 6.13 give all files that are
# written in one tick of 1 to 10 ms the same mtime.
FileStamp = tuple[int, int, int, int]
Result = TypeVar("Result")


class PciFunction(NamedTuple):
    """A PCI function of a Tenstorrent card, as sysfs shows it.

    While the driver has a class device for it, it has a number, and the path at which its device
    file should be. A bound driver can lack the class device for a moment, while it appears or is
    removed.
    """

    bdf: str  # PCI address "0000:03:00.0", the identity that survives resets and renumbering
    arch: str | None = None  # None: not known, or not supported
    subsystem: int = 0  # PCI subsystem ID
    numa_node: int | None = None  # None: the platform does not say
    directory: str = ""  # in sysfs
    on_bus: bool = True  # False: it was, or a hold has it, but it is not there now
    driver: str | None = None  # None: no driver is bound
    driver_is_loaded: bool = True  # the driver `tenstorrent`, bound or not
    ordinal: int | None = None  # N of /dev/tenstorrent/N; None without a class device
    path: str = ""  # of the device file on the host
    file_fault: str | None = None  # why the device file cannot be used

    @property
    def class_device(self) -> str:
        """Return the sysfs directory that has the tt_* attributes."""
        return f"{self.directory}/{DRIVER}/{DRIVER}!{self.ordinal}"

    def is_same_model(self, other: PciFunction) -> bool:
        return (self.arch, self.subsystem) == (other.arch, other.subsystem)

    def without_class_device(self, driver: str | None = None) -> PciFunction:
        """Return the function with this driver, but without number and path of a device file."""
        return self._replace(driver=driver, ordinal=None, path="", file_fault=None)


# The functions on the PCI bus, by address; None for one of another vendor.
Bus = dict[str, PciFunction | None]


class Identity(NamedTuple):
    """Values from a chip's firmware; None: not reported."""

    card: str | None = None  # exact card type, "p150a"
    serial: str | None = None  # the board's, 16 hex digits
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # version of the bundle, "19.4.0.0"

    def contradicts(self, other: Identity) -> bool:
        """Return whether it is another chip's, as an update of the firmware cannot change it."""
        pairs = zip(self[:3], other[:3], strict=True)  # card, serial, asic_id
        return any(ours and theirs and ours != theirs for ours, theirs in pairs)


class ReadError(NamedTuple):
    """A telemetry attribute that could not be read."""

    attribute: str
    number: int  # errno


class Telemetry(NamedTuple):
    """Firmware telemetry of a chip; None: not offered, or all ones."""

    identity: Identity = Identity()
    heartbeat: int | None = None  # changes while the firmware runs
    temperature: float | None = None  # °C
    throttles_at: float | None = None  # °C, hwmon's temp1_max
    trips: int | None = None  # thermal trips (Blackhole only)
    all_ones: bool = False  # every register reads as ones
    error: ReadError | None = None

    @property
    def is_empty(self) -> bool:
        """Return whether the firmware reports nothing: it is late, or was dead at the probe."""
        return self == Telemetry()

    @property
    def has_failed(self) -> bool:
        """Return whether nothing could be read, so that all other values are unknown."""
        return self.all_ones or self.error is not None


ProcessRow = dict[str, object]  # "pid", "command", "of_pod"


class Reading(NamedTuple):
    """The attributes of a chip, all read at one moment."""

    function: PciFunction
    telemetry: Telemetry
    at: float  # seconds of the monotonic clock
    is_poll: bool = True  # False: read after an event, too early to count an equal heartbeat
    sensors: Mapping[str, float] | None = None  # None: neither sensors nor processes were read
    processes: Sequence[ProcessRow] | None = None  # a row for each PID; None: unknown


@lru_cache(maxsize=1024)
def address_numbers(bdf: str) -> tuple[int, ...]:
    """Return domain, bus, device and function of a PCI address: chips are sorted by them."""
    return tuple(int(part, 16) for part in re.split("[:.]", bdf))


def if_exists(call: Callable[[str], Result], path: str) -> Result | None:
    """Return call(path), None if nothing exists there; raises OSError for any other reason."""
    try:
        return call(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def file_stamp(path: str) -> FileStamp | None:
    """Return a value that changes when the file is replaced; None if it does not exist."""
    status = if_exists(os.stat, path)
    if status is None:
        return None
    return (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def names_in(directory: str) -> list[str]:
    """Return the names in a directory, none if it does not exist; raises OSError."""
    return if_exists(os.listdir, directory) or []


def read_attribute(path: str) -> str:
    """Return the text of a sysfs attribute; raises OSError. Telemetry can block for 10 s."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace").strip()
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


def read_text(path: str) -> str | None:
    """Return the text of a file in sysfs or procfs, None on any error."""
    with suppress(OSError), open(path, "rb", 0) as file:
        return file.read().decode("utf-8", "replace").strip()
    return None


def read_others_file(path: str, max_bytes: int) -> bytes:
    """Return a file that others can replace; raises OSError, ValueError.

    Instead of the file there can be a FIFO, which would block, a link, or terabytes of zeros.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY)
    with open(descriptor, "rb", 0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")

        if status.st_size > max_bytes:
            raise ValueError(f"larger than {max_bytes} bytes")
        return file.read(max_bytes)


def to_integer(text: str | None) -> int | None:
    """Return a decimal number of at most 20 digits; None for any other text."""
    return int(text) if text and re.fullmatch("-?[0-9]{1,20}", text) else None


def to_natural(text: str | None, *, less_than: int) -> int | None:
    """Return a number from 0 up to, but not including, `less_than`; None for any other text."""
    number = to_integer(text)
    return number if number is not None and 0 <= number < less_than else None


def driver_version(settings: Settings) -> str | None:
    """Return the loaded driver's version, or "unknown"; None if the driver is not loaded.

    Raises OSError.
    """
    module = f"{settings.sys}/module/{DRIVER}"
    signs = (module, f"{settings.sys}/class/{DRIVER}")
    if not any(if_exists(os.stat, each) for each in signs):
        return None
    return printable(if_exists(read_attribute, f"{module}/version") or "unknown")


def driver_can_bind(function: PciFunction) -> bool:
    """Return whether the driver is, or could be, bound to a function."""
    if not function.on_bus:
        return False
    if function.driver:
        return function.driver == DRIVER
    return driver_override(function) in (None, DRIVER)


def driver_override(function: PciFunction) -> str | None:
    """Return the only driver that the kernel may bind to a function; None: any driver.

    driverctl, libvirt and KubeVirt set it, and can leave it behind.
    """
    text = read_text(f"{function.directory}/driver_override")
    return None if text in (None, "", "(null)") else text


def pci_directory(settings: Settings, bdf: str = "") -> str:
    """Return the sysfs directory of a PCI function, or that of all functions."""
    return f"{settings.sys}/bus/pci/devices/{bdf}"


def scan(settings: Settings, last: Bus, *, driver_is_loaded: bool) -> Bus:
    """Return the functions on the PCI bus. `last`: the last result; IDs are read only once."""
    found: Bus = {}
    for bdf in filter(BDF.fullmatch, names_in(pci_directory(settings))):
        try:
            function = last[bdf] if bdf in last else _read_pci_ids(settings, bdf)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            continue  # it is appearing or being removed; the next scan looks again

        if function and function.arch:
            function = function._replace(driver_is_loaded=driver_is_loaded)
            function = _with_present_state(settings, function)
        found[bdf] = function
    return found


def _read_pci_ids(settings: Settings, bdf: str) -> PciFunction | None:
    """Return a function by its IDs, which never change; None for another vendor's.

    Raises OSError: while a function appears, its directory is there before its attributes.
    """
    directory = pci_directory(settings, bdf)
    if _pci_id(f"{directory}/vendor") != VENDOR:
        return None

    arch = ARCHES.get(_pci_id(f"{directory}/device"))
    subsystem = _pci_id(f"{directory}/subsystem_device")
    return PciFunction(bdf, arch, subsystem, directory=directory)


def _pci_id(path: str) -> int:
    """Return the number in an attribute such as "0x1e52", 0 for any other text; raises OSError."""
    text = read_attribute(path)
    return int(text, 16) if re.fullmatch("0x[0-9a-f]{1,8}", text) else 0


def _with_present_state(settings: Settings, function: PciFunction) -> PciFunction:
    """Return a function with its present NUMA node, driver and device file."""
    text = if_exists(read_attribute, f"{function.directory}/numa_node")
    # sysfs has -1 on a platform that does not say.
    function = function._replace(numa_node=to_natural(text, less_than=ALL_ONES))

    # The class device is looked for below the PCI function. In /sys/class its name could lead to
    # another chip already, as numbers are reused.
    for name in names_in(f"{function.directory}/{DRIVER}"):
        ordinal = to_integer(name.removeprefix(f"{DRIVER}!"))
        if ordinal is not None:
            path = f"{settings.dev}/{DRIVER}/{ordinal}"
            present = function._replace(driver=DRIVER, ordinal=ordinal, path=path)
            return present._replace(file_fault=file_fault_now(present))

    driver = if_exists(os.readlink, f"{function.directory}/driver")
    return function.without_class_device(basename(driver) if driver else None)


def file_fault_now(function: PciFunction) -> str | None:
    """Return why the device file cannot be used at this moment.

    devtmpfs made it when the device appeared; only `fix` makes it again.
    """
    path = function.path
    expected = if_exists(read_attribute, f"{function.class_device}/dev")  # "245:0"
    if expected is None:
        return f"{path} is being removed"

    status = if_exists(os.stat, path)
    if status is None:
        is_link = os.path.lexists(path)
        return f"{path} is a link to nothing" if is_link else f"{path} does not exist"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a character device"

    found = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return None if found == expected else f"{path} is device {found}, but sysfs has {expected}"


PIDS_MAX = 2**18  # bytes of a list of process IDs
PROCESSES_MAX = 1000  # that are shown of a chip


def processes_on(settings: Settings, function: PciFunction) -> list[ProcessRow] | None:
    """Return the processes that opened a device file; None if unknown (a driver before 2.5).

    The driver's list has a line for each open file, and any user can open the device file a million
    times: so no more of it is read than is useful.
    """
    proc = settings.proc
    try:
        with open(f"{proc}/driver/{DRIVER}/{function.ordinal}/pids", "rb") as file:
            lines = file.readlines(PIDS_MAX)
    except OSError:
        return None
    pids = {int(pid) for pid in re.findall(rb"\d+", b"".join(lines))}
    if 0 in pids:  # the kernel's number for a process outside of our PID namespace
        return None

    rows = []
    for pid in sorted(pids)[:PROCESSES_MAX]:
        of_pod = "kubepods" in (read_text(f"{proc}/{pid}/cgroup") or "")
        # No name: the process is hidden, or has ended while its children have the device open.
        command = read_text(f"{proc}/{pid}/comm") or "?"
        rows.append({"pid": pid, "command": command, "of_pod": of_pod})
    return rows


def link_path(settings: Settings, function: PciFunction) -> str | None:
    """Return udev's link to a chip's device file, if it points there now.

    Runtimes resolve the link each time that they create a container (containerd 1.6 and 2.1,
    CRI-O 1.35), so a path that the kubelet has stored is right after a renumbering, too.
    """
    link = f"{settings.dev}/{DRIVER}/by-pci/{function.bdf}"
    with suppress(OSError):
        if os.readlink(link) in (f"../{function.ordinal}", function.path):
            return link
    return None


def expects_links(settings: Settings) -> bool:
    """Return whether udev makes links, by the package's rule. In a container (LXC) none runs."""
    return exists(f"{settings.root.rstrip('/')}/run/udev/control")


def hugetlbfs_mounts(settings: Settings) -> list[Mount]:
    """Return the hugetlbfs directories of the host, as containers would have them."""
    mounts = [Mount(f"{settings.dev}/{name}", f"/dev/{name}") for name in HUGETLBFS]
    return [mount for mount in mounts if exists(mount.host)]


def with_configured_mounts(settings: Settings, hugepages: Iterable[Mount]) -> Mounts:
    """Return the configured mounts, and hugepages at the paths that those leave free."""
    targets = {mount.container for mount in settings.mounts}
    others = [mount for mount in hugepages if mount.container not in targets]
    return (*settings.mounts, *others)


def host_mounts(settings: Settings) -> Mounts:
    """Return the configured mounts, and the host's hugepages unless containers get none.

    The CDI file has these, also if hugepages are private: the daemon could not clean up after
    podman's containers.
    """
    hugepages = [] if settings.hugepages == "none" else hugetlbfs_mounts(settings)
    return with_configured_mounts(settings, hugepages)


# The attributes that are telemetry: those of the class device, and those of hwmon.
TT_ATTRIBUTES = (
    "tt_heartbeat",
    "tt_card_type",
    "tt_serial",
    "tt_asic_id",
    "tt_fw_bundle_ver",
    "tt_therm_trip_count",
)
HWMON_ATTRIBUTES = ("temp1_input", "temp1_max")

CARD_TYPE = re.compile("[a-z][a-z0-9-]{0,40}[a-z0-9]")
UNKNOWN_CARD = "unknown"  # as the driver calls a board whose code it does not know
HEX_ID = re.compile("[0-9A-F]{16}")
VERSION = re.compile(r"[0-9]{1,5}(\.[0-9]{1,5}){1,4}")

# m°C, which no chip reaches. The firmware's number has a sign, and the driver reads it without one
# (tt-kmd's telemetry.c, hwmon.c): -0.5 °C is 65535500.
IMPOSSIBLE_TEMPERATURE = 1_000_000

# The texts of a chip that does not respond. Its card type is not one: a living chip can have an
# unknown one, and drivers before 2.2 show PCI's of a dead Blackhole.
DEAD_TEXTS = {
    "tt_heartbeat": [str(ALL_ONES)],
    "tt_serial": ["F" * 16],
    "tt_asic_id": ["F" * 16],
    "temp1_input": ["65535999", "4095937"],  # of 32 bits; of a Wormhole's 16 bits before 2.9
}


def to_card_type(text: str) -> str | None:
    """Return an exact card type, also one that is not in CARDS; None if the driver knows none."""
    return text if CARD_TYPE.fullmatch(text) and text != UNKNOWN_CARD else None


def to_hex_id(text: str) -> str | None:
    """Return a serial number or an ASIC ID; None for other texts, and for a value of a reset.

    The driver reads the two halves one after the other. During a reset one can be all ones.
    """
    if not HEX_ID.fullmatch(text) or text == "0" * 16:
        return None
    return None if "F" * 8 in (text[:8], text[8:]) else text


def to_version(text: str) -> str | None:
    """Return a firmware's version; None for other texts, and for a value of a reset."""
    is_of_reset = text.startswith(("0.0.0.0", "255.255."))
    return text if VERSION.fullmatch(text) and not is_of_reset else None


def to_celsius(text: str) -> float | None:
    """Return a temperature above zero; None for any other text, as for a limit of 0."""
    millidegrees = to_natural(text, less_than=IMPOSSIBLE_TEMPERATURE)
    return millidegrees / 1000 if millidegrees else None


def parse_telemetry(texts: Mapping[str, str]) -> Telemetry:
    """Return the telemetry in these texts, by attribute."""
    names = texts.keys() & DEAD_TEXTS.keys()
    if names and all(texts[name] in DEAD_TEXTS[name] for name in names):
        return Telemetry(all_ones=True)

    return Telemetry(
        identity=Identity(
            card=to_card_type(texts.get("tt_card_type", "")),
            serial=to_hex_id(texts.get("tt_serial", "")),
            asic_id=to_hex_id(texts.get("tt_asic_id", "")),
            firmware=to_version(texts.get("tt_fw_bundle_ver", "")),
        ),
        # Also if it is all ones: as that does not change, the chip counts as stalled.
        heartbeat=to_integer(texts.get("tt_heartbeat")),
        temperature=to_celsius(texts.get("temp1_input", "")),
        throttles_at=to_celsius(texts.get("temp1_max", "")),
        trips=to_natural(texts.get("tt_therm_trip_count"), less_than=ALL_ONES),
    )


def read_telemetry(function: PciFunction) -> Telemetry:
    """Read a chip's telemetry; raises OSError for OWN_ERRORS only. Can block for ten seconds."""
    try:
        texts = _read_attributes(function)
    except OSError as error:
        if error.errno in OWN_ERRORS:
            raise
        attribute = basename(error.filename or function.class_device)
        return Telemetry(error=ReadError(attribute, error.errno or 0))

    return parse_telemetry(texts) if texts else _without_attributes(function)


def _read_attributes(function: PciFunction) -> dict[str, str]:
    """Return the texts of the attributes that the firmware reports.

    Raises OSError: ENODATA while the chip is reset, or any other error of an attribute.
    """
    paths = {name: f"{function.class_device}/{name}" for name in TT_ATTRIBUTES}
    if hwmon := hwmon_directory(function):
        paths |= {name: f"{hwmon}/{name}" for name in HWMON_ATTRIBUTES}

    texts = {}
    for name, path in paths.items():
        try:
            texts[name] = read_attribute(path)
        except OSError as error:
            was_never_reported = error.errno in (errno.ENOENT, errno.ENOTDIR)
            # During a reset every attribute answers ENODATA. After one into firmware that reports
            # fewer tags, only the attributes of the lost tags do, and the heartbeat goes on.
            was_lost = error.errno == errno.ENODATA and name != "tt_heartbeat"
            if not (was_never_reported or was_lost):
                raise
    return texts


def _without_attributes(function: PciFunction) -> Telemetry:
    """Return the telemetry of a chip that has no attributes.

    The device has just been removed, or its firmware is silent: it is late, or the chip was dead
    when the driver was bound. Then PCI's own registers read as ones.
    """
    if not isdir(function.class_device):
        return Telemetry(error=ReadError(basename(function.class_device), errno.ENODEV))

    with suppress(OSError), open(f"{function.directory}/config", "rb", 0) as config:
        return Telemetry(all_ones=config.read(4) == b"\xff" * 4)
    return Telemetry()


def hwmon_directory(function: PciFunction) -> str | None:
    """Return the directory of a chip's sensors, hwmon/hwmonN, whose number has no meaning."""
    directory = f"{function.directory}/hwmon"
    names = names_in(directory)
    return f"{directory}/{min(names)}" if names else None


# The least number that hwmon shows for a register of all ones: that of power, which the driver
# converts from W to µW in 32 bits. With the smaller factors of other units the number is larger.
DEAD_VALUE = ALL_ONES * 10**6 % 2**32
DEAD_VOLTAGE = 65535  # mV, of in0_max
DEAD_LINK_WIDTH = 63  # lanes, in a field of 6 bits


def _scaled(text: str, factor: float = 1, dead: int = DEAD_VALUE) -> float | None:
    """Return a number times `factor`; None for other texts, and for numbers from `dead` on."""
    number = to_natural(text, less_than=dead)
    return None if number is None else number * factor


def _lanes(text: str) -> float | None:
    """Return the width of a link; None if it is unknown, which is 0 in the register."""
    return _scaled(text, dead=DEAD_LINK_WIDTH) or None


def _transfers(text: str) -> float | None:
    """Return the transfers per second of a link; None if its speed is unknown."""
    match = re.match(r"([0-9]{1,4}(\.[0-9]+)?) GT/s", text)  # "16.0 GT/s PCIe", or "Unknown"
    return float(match[1]) * 1e9 if match else None


def _total_errors(text: str) -> float | None:
    """Return the sum of AER's counters: its last line, "TOTAL_ERR_COR 7"."""
    match = re.search(r"^TOTAL_\w+ ([0-9]{1,20})$", text, re.MULTILINE)
    return float(match[1]) if match else None


# hwmon has µW, mA, mV and rpm, tt_* has MHz (tt-kmd's telemetry.c).
_micro = partial(_scaled, factor=1e-6)
_milli = partial(_scaled, factor=1e-3)
_mega = partial(_scaled, factor=1e6)
_volts = partial(_milli, dead=DEAD_VOLTAGE)


class Sensor(NamedTuple):
    """A value that only metrics have."""

    source: str  # its directory: "hwmon", "class" device or "pci" function
    attribute: str
    metric: str  # without "tt_device_"
    help: str
    parse: Callable[[str], float | None]  # returns the value in the metric's unit
    labels: Mapping[str, object] = {}


_CLOCK = "Clock frequency in hertz."
_WIDTH_HELP = "PCIe link width in lanes."
_SPEED = "pcie_link_transfers_per_second"
_SPEED_HELP = "PCIe link speed in transfers per second."
_ERRORS = "pcie_errors_total"
_ERRORS_HELP = "PCIe errors reported by AER, by severity."
SENSORS = (
    Sensor("hwmon", "power1_input", "power_watts", "Power draw of the chip in watts.", _micro),
    Sensor("hwmon", "power1_max", "power_limit_watts", "Power limit in watts.", _micro),
    Sensor("hwmon", "curr1_input", "current_amperes", "Core current in amperes.", _milli),
    Sensor("hwmon", "curr1_max", "current_limit_amperes", "Core current limit in amperes.", _milli),
    Sensor("hwmon", "in0_input", "voltage_volts", "Core voltage in volts.", _volts),
    Sensor("hwmon", "in0_max", "voltage_limit_volts", "Core voltage limit in volts.", _volts),
    Sensor("hwmon", "fan1_input", "fan_rpm", "Fan speed in revolutions per minute.", _scaled),
    Sensor("class", "tt_aiclk", "clock_hertz", _CLOCK, _mega, {"clock": "aiclk"}),
    Sensor("class", "tt_axiclk", "clock_hertz", _CLOCK, _mega, {"clock": "axiclk"}),
    Sensor("class", "tt_arcclk", "clock_hertz", _CLOCK, _mega, {"clock": "arcclk"}),
    Sensor("pci", "current_link_width", "pcie_link_width", f"Current {_WIDTH_HELP}", _lanes),
    Sensor("pci", "max_link_width", "pcie_link_width_max", f"Maximum {_WIDTH_HELP}", _lanes),
    Sensor("pci", "current_link_speed", _SPEED, f"Current {_SPEED_HELP}", _transfers),
    Sensor("pci", "max_link_speed", f"{_SPEED}_max", f"Maximum {_SPEED_HELP}", _transfers),
    *(
        Sensor("pci", f"aer_dev_{each}", _ERRORS, _ERRORS_HELP, _total_errors, {"severity": each})
        for each in ("correctable", "nonfatal", "fatal")
    ),
)


def read_sensors(function: PciFunction) -> dict[str, float]:
    """Return the sensors' values by attribute, in the metric's unit. Can block for ten seconds."""
    hwmon = None
    with suppress(OSError):
        hwmon = hwmon_directory(function)
    directories = {
        "hwmon": hwmon or f"{function.directory}/hwmon",  # which has no attributes
        "class": function.class_device,
        "pci": function.directory,
    }

    values = {}
    for sensor in SENSORS:
        # Drivers and firmware offer different ones. An unreadable one is no reason to lack the
        # others; whether the chip is well is for its telemetry to show.
        with suppress(OSError):
            text = read_attribute(f"{directories[sensor.source]}/{sensor.attribute}")
            value = sensor.parse(text)
            if value is not None:
                values[sensor.attribute] = value
    return values


def read_chip(function: PciFunction, *, is_poll: bool, settings: Settings | None) -> Reading:
    """Read a present chip's telemetry; with settings, also its sensors, and who has it open.

    Raises OSError for OWN_ERRORS only. Can block for ten seconds.
    """
    sensors = processes = None
    if settings:
        sensors = read_sensors(function)
        processes = processes_on(settings, function)

    # Telemetry comes last: if the chip answers now, its sensors were those of a live chip.
    telemetry = read_telemetry(function)
    return Reading(function, telemetry, monotonic(), is_poll, sensors, processes)


# ==== HEALTH: per chip, with a reason. Pure =======================================================

HYSTERESIS = 5.0  # °C by which a hot chip must cool down
READ_TIMEOUT = 2.0  # seconds after which a telemetry read counts as blocked
HEARTBEAT_MISSES = 2  # polls without a change of the heartbeat after which a chip is stalled
TRIP_HOLDOFF = 300.0  # seconds for which a chip that has tripped stays unhealthy
FIRMWARE_TIMEOUT = 10.0  # seconds without telemetry after which a chip counts as silent


class Kind(Enum):
    """The kinds of faults. Each change of it is logged."""

    GONE = "gone"  # not on the PCI bus
    NO_DRIVER = "no_driver"
    DEVICE_FILE = "node"  # a device file is a device node to Unix
    RESETTING = "resetting"
    NO_RESPONSE = "no_response"
    BLOCKED = "blocked"
    READ_ERROR = "read_error"
    STALLED = "stalled"
    HOT = "hot"
    TRIPPED = "tripped"
    SILENT = "silent"  # no telemetry


NO_COMMAND_HELPS = (Kind.HOT, Kind.TRIPPED)  # only cooling does
WAITING = "waiting for firmware telemetry"  # text of a chip's fault after ChipState.vanish()


class Fault(NamedTuple):
    """Why a chip is unhealthy."""

    kind: Kind
    text: str


class Reason(NamedTuple):
    """A problem, and the command that helps. As a text: PROBLEM; run: COMMAND."""

    problem: str
    command: str = ""  # empty: there is nothing to run

    def __str__(self) -> str:
        return f"{self.problem}; run: {self.command}" if self.command else self.problem


LOAD_DRIVER = "modprobe tenstorrent"


def fix_command(bdf: str) -> str:
    return f"tt-device-plugin fix {bdf}"


class Vitals(NamedTuple):
    """Values of a chip on which its health depends, after each of its readings.

    While a chip reports nothing they stay: it is not cooler, nor is its heartbeat back.
    """

    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change of it
    limit_reached: float | None = None  # °C, the administrator's; None: it is not too hot
    is_throttling: bool = False  # at its own limit, which is not a fault
    trips: int | None = None
    tripped_at: float | None = None  # when trips last rose
    had_telemetry: bool = False  # at any time since boot
    empty_since: float | None = None  # since when there is none, also if there never was any

    def after(self, reading: Reading, settings: HealthSettings) -> Vitals:
        """Return the vitals after a reading."""
        telemetry = reading.telemetry
        if telemetry.has_failed:
            return self
        if telemetry.is_empty:
            since = reading.at if self.empty_since is None else self.empty_since
            return self._replace(empty_since=since)

        # A reading is compared with the last poll, not with the last reading: only polls are far
        # enough apart to count a heartbeat that has not changed. So 7 at a poll, 8 at an event and
        # 8 at the next poll is a chip that is alive. Any change shows life: after a reset the
        # heartbeat begins again, lower.
        heartbeat, misses = self.heartbeat, self.misses
        if telemetry.heartbeat is None or telemetry.heartbeat != heartbeat:
            misses = 0
        elif reading.is_poll:
            misses += 1
        if reading.is_poll:
            heartbeat = telemetry.heartbeat

        trips = self.trips if telemetry.trips is None else telemetry.trips
        has_tripped = trips is not None and self.trips is not None and trips > self.trips
        degrees = telemetry.temperature

        # The hysteresis is one of this limit. A chip can have reached another one before a reload.
        limit = hot_limit(telemetry, settings)
        is_hot = _reaches(degrees, limit, reached_before=self.limit_reached == limit)

        # `empty_since` is left out: it ends with this reading.
        return Vitals(
            heartbeat=heartbeat,
            misses=misses,
            limit_reached=limit if is_hot else None,
            is_throttling=_reaches(degrees, telemetry.throttles_at, self.is_throttling),
            trips=trips,
            tripped_at=reading.at if has_tripped else self.tripped_at,
            had_telemetry=True,
        )


def hot_limit(telemetry: Telemetry, settings: HealthSettings) -> float | None:
    """Return the °C at which a chip is too hot; None: high temperature is not a fault."""
    return settings.temperature_limit


def _reaches(degrees: float | None, limit: float | None, reached_before: bool) -> bool:
    """Return whether a chip is at a limit; once there it must cool down by HYSTERESIS."""
    if degrees is None or limit is None:
        return False
    if reached_before:
        return degrees > limit - HYSTERESIS
    return degrees >= limit


def judge(
    reading: Reading, vitals: Vitals, settings: HealthSettings, former: Fault | None
) -> Fault | None:
    """Return the fault that a reading shows: the first rule that applies.

    `vitals`: after this reading; `former`: the fault before it.
    """
    telemetry = reading.telemetry
    if telemetry.error:
        attribute, number = telemetry.error
        if number == errno.ENODATA:
            return Fault(Kind.RESETTING, "resetting (no telemetry)")
        if number == errno.ENODEV:
            return former  # the device is being removed: the next scan shows why
        problem = f"telemetry cannot be read: {attribute}: {os.strerror(number)}"
        return Fault(Kind.READ_ERROR, problem)

    if telemetry.all_ones:
        return Fault(Kind.NO_RESPONSE, "chip does not respond (registers read as ones)")

    # Vitals are from before, while a chip reports nothing.
    if not telemetry.is_empty:
        if vitals.misses >= HEARTBEAT_MISSES:
            problem = f"heartbeat stalled at {telemetry.heartbeat} (firmware stopped)"
            return Fault(Kind.STALLED, problem)

        if vitals.limit_reached is not None:
            degrees = f"{telemetry.temperature:.1f} °C, limit {vitals.limit_reached:g} °C"
            return Fault(Kind.HOT, f"too hot: {degrees}; check the cooling")

    holdoff = TRIP_HOLDOFF
    if vitals.tripped_at is not None and reading.at - vitals.tripped_at < holdoff:
        recovery = f"healthy again after {holdoff:g} s without another one"
        problem = f"thermal trip ({vitals.trips} since power-on; {recovery}); check the cooling"
        return Fault(Kind.TRIPPED, problem)

    # After a rebind the firmware of a healthy chip has ten seconds; an unhealthy one must show that
    # it is well. A chip that never had telemetry may have old firmware.
    missing_since = vitals.empty_since if vitals.had_telemetry else None
    if missing_since is not None and (former or reading.at - missing_since >= FIRMWARE_TIMEOUT):
        return Fault(Kind.SILENT, "firmware reports no telemetry")
    return None


# ==== CHIPS: followed over time ===================================================================


@lru_cache
def board_of_card(card: str) -> str:
    """Return "p150" for "p150a"."""
    return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", card)


class Chip(NamedTuple):
    """A Tenstorrent PCI function, known until the daemon ends.

    It is *seen* from the first scan that finds it, *present* while it has a class device, and
    *listed*, so a device of a resource, from its first reading with a valid device file. Measured
    values are not here, but in the text of a fault: they change all the time, and no decision
    depends on them.
    """

    function: PciFunction
    identity: Identity = Identity()  # as last reported
    telemetry_fault: Fault | None = None  # by its last reading; counts only while it is present
    is_throttling: bool = False  # for the log
    was_present: bool = False  # at any time since boot
    is_listed: bool = False  # see ChipState.start_listing()

    @property
    def bdf(self) -> str:
        return self.function.bdf

    @property
    def display_name(self) -> str:
        return f"{self.bdf} ({self.card_type or self.function.arch or 'unknown card'})"

    @property
    def is_present(self) -> bool:
        return self.function.ordinal is not None

    @property
    def fault(self) -> Fault | None:
        """Return why it is unhealthy."""
        function = self.function
        if not function.on_bus:
            return Fault(Kind.GONE, "PCI device is gone")
        if not self.is_present:
            return _absence(function)
        if function.file_fault:
            return Fault(Kind.DEVICE_FILE, f"device file is invalid: {function.file_fault}")
        return self.telemetry_fault

    @property
    def reason(self) -> Reason | None:
        """Return why it is unhealthy, and the command that helps."""
        fault, function = self.fault, self.function
        if fault is None:
            return None
        if fault.kind in NO_COMMAND_HELPS or fault.text == WAITING:
            return Reason(fault.text)
        if fault.kind is Kind.NO_DRIVER and function.driver:
            return Reason(fault.text)  # a virtual machine may have it
        if fault.kind is Kind.NO_DRIVER and not function.driver_is_loaded:
            return Reason(fault.text, LOAD_DRIVER)
        return Reason(fault.text, fix_command(self.bdf))

    @property
    def card_type(self) -> str | None:
        """Return the exact card type, "p150a"."""
        return self.identity.card or CARDS.get(self.function.subsystem)

    @property
    def board_type(self) -> str:
        """Return the card type without its trailing letter, or the architecture."""
        return board_of_card(self.card_type or self.function.arch or "unknown")

    @property
    def memory(self) -> int:
        """Return the MiB of GDDR6 behind its device file, 0 if unknown."""
        usual = MEMORY.get(self.board_type, 0)
        return MEMORY_BY_SUBSYSTEM.get(self.function.subsystem, usual)

    @property
    def is_galaxys(self) -> bool:
        return (self.card_type or "").startswith("galaxy")


Chips = Iterable[Chip]


def _absence(function: PciFunction) -> Fault:
    """Return why a function that is on the bus has no class device."""
    if function.driver == DRIVER:
        return Fault(Kind.DEVICE_FILE, "driver is bound, but there is no device file")
    if function.driver:
        release = "release the card there, or add it to exclude"
        return Fault(Kind.NO_DRIVER, f"driver {function.driver} is bound; {release}")
    if not function.driver_is_loaded:
        return Fault(Kind.NO_DRIVER, "driver is not loaded")
    return Fault(Kind.NO_DRIVER, "driver is not bound")


# A Galaxy's chips are on 32 buses: the high nibble is the tray, the low one the position in it
# (tt-metal's get_ubb_id()). In a virtual machine they are on the machine's buses.
GALAXY_TRAYS = (0x00, 0x40, 0x80, 0xC0)
GALAXY_POSITIONS = range(1, 9)
GALAXY_SIZE = len(GALAXY_TRAYS) * len(GALAXY_POSITIONS)


class Tray(NamedTuple):
    """A tray of a Galaxy."""

    card: str  # "galaxy-wormhole"
    domain: int  # of its PCI addresses
    bus: int  # one of GALAXY_TRAYS


class Place(NamedTuple):
    """The board that a chip is on, and its position on a Galaxy."""

    board: object  # equal for the chips of one board; a Galaxy's tray is a board
    board_size: int = 1  # chips of the whole board, also if it is not known which they are
    board_id: str | None = None  # its ID with unit = "board"; None: it is not known
    unknown: str = ""  # why it is not known
    tray: Tray | None = None  # None: not on a Galaxy, or not known
    position: int = 0  # in the tray, one of GALAXY_POSITIONS; 0 without a tray


def places(chips: Chips) -> dict[str, Place]:
    """Return the place of each chip, by its address.

    Serial numbers are not unique (tt-smi #243, tt-umd #1302). So they count only for a p300, whose
    two chips have nothing else in common.
    """
    galaxys, pairs, found = [], defaultdict(list), {}
    for chip in chips:
        found[chip.bdf] = Place(chip.bdf, board_id=chip.bdf)
        if chip.is_galaxys:
            galaxys.append(chip)
        elif chip.board_type == "p300":
            pairs[chip.identity.serial].append(chip)

    found |= _places_on_galaxy(galaxys)
    for serial, members in pairs.items():
        found |= _places_on_p300(serial, members)
    return found


def _places_on_galaxy(chips: Sequence[Chip]) -> dict[str, Place]:
    """Return the places of a Galaxy's chips, by their buses.

    One bus that no Galaxy has, or one with several chips, shows a virtual machine, in which the
    others mean nothing either.
    """
    found, strange = {}, []
    chips_on_bus = Counter(address_numbers(chip.bdf)[:2] for chip in chips)
    for chip in chips:
        domain, bus, *_ = address_numbers(chip.bdf)
        tray = Tray(chip.card_type or "", domain, bus & 0xF0)
        board_id = f"{domain:04x}:{tray.bus:02x}"
        place = Place(tray, 8, board_id, tray=tray, position=bus & 0x0F)
        found[chip.bdf] = place

        is_on_galaxy = tray.bus in GALAXY_TRAYS and place.position in GALAXY_POSITIONS
        if not is_on_galaxy or chips_on_bus[domain, bus] > 1:
            strange.append(f"{bus:02x}")

    if strange:
        reason = f"bus {strange[0]} is not one of a Galaxy's, so its trays are not known"
        return {chip.bdf: Place(chip.bdf, 8, unknown=reason) for chip in chips}
    return found


def _places_on_p300(serial: str | None, chips: Sequence[Chip]) -> dict[str, Place]:
    """Return the places of chips of p300 boards that report this serial number."""
    if serial is None:
        reason = "waiting for the board's serial number"
        return {chip.bdf: Place(chip.bdf, 2, unknown=reason) for chip in chips}

    on_bus = [chip for chip in chips if chip.function.on_bus]
    if len(on_bus) > 2:
        reason = f"{len(on_bus)} chips report the serial number {serial}, but a p300 has 2"
        return {chip.bdf: Place(chip.bdf, 2, unknown=reason) for chip in chips}

    # More than two were seen if the board was moved to another slot: then its former addresses are
    # not on the bus. If it is absent there as well, any two of its addresses will do.
    members = chips
    if len(chips) > 2:
        members = on_bus or chips[-2:]
    found = {chip.bdf: Place(chip.bdf, 2, unknown="its board has moved") for chip in chips}
    return found | {chip.bdf: Place(serial, 2, serial) for chip in members}


@dataclass(slots=True)
class ChipState:
    """All that is known of a chip; decisions depend on `chip`.

    Values are only kept while they are true. So a chip whose last reading has failed, or that has
    not been read since it was present again, has neither telemetry nor sensors.
    """

    chip: Chip
    vitals: Vitals = field(default_factory=Vitals)
    fault_kind: str | None = None  # value of the kind of fault that `since` is about
    since: float | None = None  # seconds since boot until that kind began; None: unknown
    telemetry: Telemetry | None = None
    sensors: Mapping[str, float] = field(default_factory=dict)
    processes: Sequence[ProcessRow] | None = None  # None: unknown

    def appear(self, function: PciFunction) -> None:
        """Record that it is present. With another number than before it was absent meanwhile."""
        if function.ordinal != self.chip.function.ordinal:
            self._drop_values()
        self.chip = self.chip._replace(function=function, was_present=True)

    def vanish(self, function: PciFunction) -> None:
        """Record that it is not present.

        When it is back, it has a fault of the present kind until it has been read.
        """
        self.chip = self.chip._replace(function=function)
        if self.chip.fault and self.chip.was_present:
            waiting = self.chip.fault._replace(text=WAITING)
            self.chip = self.chip._replace(telemetry_fault=waiting)
        self._drop_values()

    def apply(self, reading: Reading, settings: HealthSettings) -> None:
        """Record a reading: the chip's identity, its fault, and the values to show."""
        telemetry = reading.telemetry

        # The slot has another card by now: nothing of the former one counts.
        if telemetry.identity.contradicts(self.chip.identity):
            self.chip = self.chip._replace(identity=Identity(), telemetry_fault=None)
            self.vitals = Vitals()
            self.fault_kind = self.since = None
            self._drop_values()

        self.vitals = self.vitals.after(reading, settings)
        fault = judge(reading, self.vitals, settings, self.chip.telemetry_fault)

        # Values that the firmware does not report at the moment stay.
        pairs = zip(telemetry.identity, self.chip.identity, strict=True)
        self.chip = self.chip._replace(
            identity=Identity(*(new or old for new, old in pairs)),
            telemetry_fault=fault,
            is_throttling=self.vitals.is_throttling,
        )

        # Sensors are read before telemetry: if that has failed, they can be those of a dead chip.
        self.telemetry = None if telemetry.has_failed else telemetry
        if reading.sensors is not None:
            self.sensors, self.processes = reading.sensors, reading.processes
        if telemetry.has_failed:
            self.sensors = {}
        self.start_listing()

    def _drop_values(self) -> None:
        """Forget what was read of it, until it is read again."""
        self.telemetry = self.processes = None
        self.sensors = {}

    def start_listing(self) -> None:
        """List it, as soon as its device file is valid."""
        if not self.chip.function.file_fault:
            self.chip = self.chip._replace(is_listed=True)

    def block(self) -> None:
        """Record that a read of its telemetry takes too long."""
        text = "telemetry read timed out (the driver may be waiting for a reset)"
        self.chip = self.chip._replace(telemetry_fault=Fault(Kind.BLOCKED, text))
        self._drop_values()

    def date_fault(self, now: float | None) -> None:
        """Record when the present kind of fault has begun; see Inventory.date_faults()."""
        fault = self.chip.fault
        kind = fault.kind.value if fault else None
        if kind != self.fault_kind:
            self.fault_kind = kind
            self.since = now if fault else None

    def to_saved(self) -> Json:
        """Return the part of the state that the next daemon cannot read again.

        A heartbeat that goes on is left out: a healthy node's file is not written at each poll.
        """
        function, fault = self.chip.function, self.chip.telemetry_fault
        vitals = self.vitals if self.vitals.misses else self.vitals._replace(heartbeat=None)
        return {
            "arch": function.arch,
            "subsystem": function.subsystem,
            "numa_node": function.numa_node,
            "identity": self.chip.identity,
            "telemetry_fault": (fault.kind.value, fault.text) if fault else None,
            "is_listed": self.chip.is_listed,
            "vitals": vitals,
            "fault_kind": self.fault_kind,
            "since": self.since,
        }

    @classmethod
    def from_saved(cls, bdf: str, saved: Json) -> ChipState:
        """Return a chip that has not been seen yet. Raises many errors: see StateFile."""
        function = PciFunction(
            bdf, saved["arch"], saved["subsystem"], saved["numa_node"], on_bus=False
        )
        fault = None
        if saved["telemetry_fault"]:
            kind, text = saved["telemetry_fault"]
            fault = Fault(Kind(kind), text)

        chip = Chip(
            function,
            Identity(*saved["identity"]),
            fault,
            was_present=True,  # as no other chip is saved
            is_listed=saved["is_listed"],
        )
        vitals = Vitals(*saved["vitals"])
        return cls(chip, vitals, saved["fault_kind"], saved["since"])


def seconds_since_boot() -> float:
    """Return the present time by a clock that is never set; after a boot Unix time can be wrong."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Inventory:
    """The chips of the host since boot."""

    def __init__(self, states: dict[str, ChipState]) -> None:
        self.states = states  # by PCI address
        self.driver: str | None = None  # see driver_version()
        self.unsupported: tuple[str, ...] = ()  # Tenstorrent functions without a driver for them
        self._bus: Bus = {}

    @property
    def chips(self) -> dict[str, Chip]:
        return {bdf: state.chip for bdf, state in self.states.items()}

    @property
    def present(self) -> list[PciFunction]:
        """Return the functions of the chips that are present, so can be read."""
        states = self.states.values()
        return [state.chip.function for state in states if state.chip.is_present]

    def scan(self, settings: Settings) -> None:
        """Look which chips and device files exist; raises OSError."""
        driver = driver_version(settings)
        self._bus = scan(settings, self._bus, driver_is_loaded=driver is not None)
        self.driver = driver

        found = [function for function in self._bus.values() if function]
        self.unsupported = tuple(sorted(each.bdf for each in found if not each.arch))
        functions = {function.bdf: function for function in found if function.arch}
        for bdf, function in functions.items():
            # A card of another model in the slot is another chip.
            state = self.states.get(bdf)
            if state is None or not state.chip.function.is_same_model(function):
                state = self.states[bdf] = ChipState(Chip(function))

            if function.ordinal is None:
                state.vanish(function)
            else:
                state.appear(function)

        # States stay until the daemon ends.
        for bdf in self.states.keys() - functions.keys():
            last = self.states[bdf].chip.function
            self.states[bdf].vanish(last.without_class_device()._replace(on_bus=False))

    def apply(self, readings: Iterable[Reading], settings: HealthSettings) -> None:
        """Record readings of chips."""
        for reading in readings:
            state = self.states[reading.function.bdf]
            # A reading from before the chip was renumbered is out of date.
            if state.chip.function.ordinal == reading.function.ordinal:
                state.apply(reading, settings)

    def date_faults(self, now: float | None) -> None:
        """Record which faults have begun or ended.

        `now`: seconds since boot; None: the chips were not watched, so new faults can be old ones.
        """
        for state in self.states.values():
            state.date_fault(now)


# ==== RESOURCES: as the configuration gives them, held or not. Pure ===============================

Status = grpc.StatusCode
DeviceList = pb.ListAndWatchResponse


class RequestError(Exception):
    """A kubelet's request that is rejected: gRPC status code and reason."""


class Device(NamedTuple):
    """The unit of allocation: a chip, or a board. If it is shared, it has several IDs."""

    id: str
    chips: tuple[Chip, ...]  # in the order of PCI addresses
    place: Place  # of its first chip
    expected_chips: int = 1  # how many it should have
    is_reserved: bool = False  # listed only for a hold: the configuration does not give this ID
    withheld: str | None = None  # why it is not offered: a pod holds its chips by another ID
    holder: str | None = None  # that pod

    @property
    def addresses(self) -> ChipAddresses:
        return frozenset(chip.bdf for chip in self.chips)

    @property
    def incomplete(self) -> str | None:
        """Return why its chips are not one whole board."""
        known, expected = len(self.chips), self.expected_chips
        return f"only {known} of {expected} chips found" if known < expected else None

    @property
    def reason(self) -> str | None:
        """Return why the kubelet sees it as unhealthy."""
        for chip in self.chips:
            if reason := chip.reason:
                return f"{chip.bdf}: {reason}" if self.expected_chips > 1 else str(reason)
        return self.incomplete or self.withheld

    @property
    def numa_nodes(self) -> tuple[int, ...]:
        """Return the known NUMA nodes of its chips, ascending."""
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
        return without_domain(self.name)

    @cached_property
    def ids_by_device(self) -> list[list[str]]:
        """Return the IDs of each device: more than one, if it is shared.

        A reserved ID can be called like a device, but have other chips: it is another device then.
        """
        found = defaultdict(list)
        for device_id, device in self.devices.items():
            found[device.id, device.addresses].append(device_id)
        return list(found.values())

    @cached_property
    def unique_devices(self) -> list[Device]:
        """Return each device once: as withheld, if one of its IDs is."""
        found = []
        for ids in self.ids_by_device:
            devices = [self.devices[device_id] for device_id in ids]
            found.append(next((each for each in devices if each.withheld), devices[0]))
        return found

    @cached_property
    def unhealthy(self) -> list[str]:
        """Return the unhealthy devices: each one's ID and reason."""
        return [f"{each.id}: {each.reason}" for each in self.unique_devices if each.reason]

    @cached_property
    def refused(self) -> DeviceIds:
        """Return the IDs that Allocate refuses."""
        refused = [
            device_id
            for device_id, device in self.devices.items()
            if device.is_reserved or device.reason
        ]
        return frozenset(refused)

    @cached_property
    def device_list(self) -> DeviceList:
        """Return the message for the kubelet: without device numbers, which can change."""
        message = DeviceList()
        for device_id, device in self.devices.items():
            nodes = [pb.NUMANode(ID=node) for node in device.numa_nodes]
            message.devices.add(
                ID=device_id,
                health="Unhealthy" if device.reason else "Healthy",
                topology=pb.TopologyInfo(nodes=nodes) if nodes else None,
            )
        return message

    def chips(self, ids: Iterable[str]) -> list[Chip]:
        """Return the chips of those of these IDs that exist, each once."""
        chips: dict[str, Chip] = {}
        for device_id in ids:
            if device := self.devices.get(device_id):
                chips |= {chip.bdf: chip for chip in device.chips}
        return list(chips.values())


Resources = dict[str, Resource]  # by name


@dataclass(frozen=True)
class Offer:
    """All resources that the configuration gives."""

    resources: Resources
    excluded: ChipAddresses  # chips that are taken out of service, with their whole boards
    unplaced: Mapping[str, str]  # why the boards of chips are not known, by address
    without_effect: Sequence[str]  # messages about settings that concern nothing on this node

    @cached_property
    def by_chip(self) -> dict[str, tuple[Resource, list[str]]]:
        """Return the resource of each chip, and the IDs of its device, by address."""
        found = {}
        for resource in self.resources.values():
            for ids in resource.ids_by_device:
                for chip in resource.devices[ids[0]].chips:
                    found[chip.bdf] = (resource, ids)
        return found


def make_offer(chips: Mapping[str, Chip], settings: Settings) -> Offer:
    """Return the resources of these chips, which are by address and in that order."""
    listed = [chip for chip in chips.values() if chip.is_listed]
    devices = devices_by_name(listed, settings)

    # An excluded chip takes its whole device out of service.
    excluded = chips.keys() & set(settings.exclude)
    for device in chain(*devices.values()):
        if not device.addresses.isdisjoint(settings.exclude):
            excluded |= device.addresses

    unplaced = {bdf: place.unknown for bdf, place in places(listed).items() if place.unknown}
    resources = _configured_resources(devices, frozenset(excluded), settings)
    return Offer(
        resources=resources,
        excluded=frozenset(excluded),
        unplaced=unplaced,
        without_effect=list(_without_effect(chips, devices, resources, settings)),
    )


def devices_by_name(chips: Sequence[Chip], settings: Settings) -> dict[str, list[Device]]:
    """Return unshared devices by resource. The chips are in the order of PCI addresses."""
    by_board = settings.unit == "board"
    chip_places = places(chips)
    groups = defaultdict(list)
    for chip in chips:
        device_id = chip_places[chip.bdf].board_id if by_board else chip.bdf
        if device_id:  # a chip whose board is not known belongs to no device
            groups[resource_name(chip, settings), device_id].append(chip)

    devices = defaultdict(list)
    for (name, device_id), members in groups.items():
        place = chip_places[members[0].bdf]
        expected = place.board_size if by_board else 1
        devices[name].append(Device(device_id, tuple(members), place, expected))
    return dict(sorted(devices.items()))


def resource_name(chip: Chip, settings: Settings) -> str:
    """Return a chip's resource, unshared and without the domain."""
    name = chip.board_type
    if settings.resource_naming == "arch":
        name = chip.function.arch or "unknown"
    elif settings.resource_naming == "card":
        name = chip.card_type or chip.function.arch or "unknown"

    has_several_chips = settings.unit == "board" and (chip.is_galaxys or chip.board_type == "p300")
    return f"{name}-board" if has_several_chips else name


def _configured_resources(
    devices: Mapping[str, list[Device]], excluded: ChipAddresses, settings: Settings
) -> Resources:
    """Return resources by full name: the shared devices of each name, and the exclusive others.

    `devices`: by the name of their resource, unshared and without the domain.
    """
    sharing = settings.sharing
    # A count takes what the entries that name their devices leave.
    entries = sharing.resources
    found: Resources = {}

    def add(short: str, base_name: str, members: Iterable[Device], replicas: int = 0) -> None:
        """Add the resource with this short name, if it has devices."""
        by_id = {}
        for device in members:
            by_id.update(dict.fromkeys(replica_ids(device.id, replicas), device))
        if by_id:
            name = f"{settings.resource_domain}/{short}"
            max_one_replica = replicas > 0 and sharing.fail_requests_greater_than_one
            found[name] = Resource(name, by_id, replicas, max_one_replica, base_name)

    for base_name, members in devices.items():
        exclusive = [device for device in members if excluded.isdisjoint(device.addresses)]
        for entry in entries:
            if entry.name == base_name:
                selected = selection(entry, exclusive)
                exclusive = [device for device in exclusive if device not in selected]
                add(sharing.shared_name(entry), base_name, selected, entry.replicas)
        add(base_name, base_name, exclusive)
    return found


def replica_ids(device_id: str, replicas: int) -> list[str]:
    """Return the IDs under which a device is advertised."""
    if not replicas:
        return [device_id]
    return [f"{device_id}::{number}" for number in range(replicas)]


def is_replica(device_id: str) -> bool:
    return "::" in device_id


def without_replica(device_id: str) -> str:
    """Return the device's ID of a replica's."""
    return device_id.partition("::")[0]


def selection(entry: SharedResource, devices: Sequence[Device]) -> Sequence[Device]:
    """Return the devices that an entry of the configuration shares."""
    if not entry.devices:
        return devices
    return [device for device in devices if aliases(device) & {*entry.devices}]


def aliases(device: Device) -> set[str]:
    """Return the names by which the configuration can select a device."""
    return {device.id, *device.addresses}


def _without_effect(
    chips: Container[str],
    devices: Mapping[str, list[Device]],
    resources: Resources,
    settings: Settings,
) -> Iterator[str]:
    """Yield messages about settings that concern nothing on this node.

    `resources`: those that these devices have become.
    """
    for bdf in settings.exclude:
        if bdf not in chips:
            yield f"exclude: {bdf} is not a chip of this node"

    resource_of = {}  # by device; excluded ones have none
    for resource in resources.values():
        resource_of.update(dict.fromkeys((each.id for each in resource.unique_devices), resource))

    for entry in settings.sharing.resources:
        found = devices.get(entry.name, [])
        missing = sorted({*entry.devices}.difference(*map(aliases, found)))
        if not found:
            available = ", ".join(devices) or "none"
            yield f"sharing: there is no resource {entry.name}; available: {available}"
        elif missing:
            yield f"sharing: {entry.name} has no device {abbreviate(missing)}"

        name = settings.sharing.shared_name(entry)
        shared = resources.get(f"{settings.resource_domain}/{name}")
        selected = [each for each in selection(entry, found) if each.id in resource_of]
        others = [each.id for each in selected if resource_of[each.id] is not shared]
        if others:
            yield f"sharing: {name} lacks {abbreviate(others)}, which another table selects"


# ==== HOLDS: which pod has which chips, and the consequences ======================================
#
# A *hold* is one answer to Allocate, for one container. The chips and directories can be read in
# the answer. The kubelet keeps it in its checkpoint, with resource, IDs, pod and container. So
# holds are read, not remembered:
#
#     the hold is                           it is *current*, so has its chips
#     ----------------------------------    ------------------------------------------------------
#     in the checkpoint, or an answer of    while its pod's cgroup exists, or none was seen since
#     the last WRITTEN_WITHIN seconds       the answer (or the boot, if that is later)
#     neither                               while its pod *runs*: it was deleted by force, or the
#                                           kubelet has lost its checkpoint
#
# An answer need not be in the checkpoint: kubelets write late, and their writings overtake each
# other. A checkpoint that has disappeared or cannot be parsed is as if it had not changed.
#
# The current holds have these consequences, in this order below:
#
#     runs          which pods use their chips: others' containers do not start on these
#     starts        whose start a PreStartContainer call may be, and when it is allowed
#     lists         which IDs the kubelet gets, and which are withheld
#     directories   for hugepages and locks: they exist while a current hold names them

CHECKPOINT = "kubelet_internal_checkpoint"  # in the device plugin directory
CHECKPOINT_MAX = 64 << 20  # bytes
KUBELET_SOCKET = "kubelet.sock"  # in the same directory; each kubelet creates a new one
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"  # variable with the PCI addresses of a container's chips
OWN_DIRECTORY = "tt-device-plugin"  # root's, in each hugetlbfs; in it those of holds
SHM = "/dev/shm"
ANSWER_NAME = "tenstorrent.com/hold"  # annotation with the name of an answer
WRITTEN_WITHIN = 30.0  # seconds after an answer in which the kubelet has written its checkpoint
CREATED_WITHIN = 120.0  # seconds that a runtime has to create a container, as the kubelet has it
UNNAMED_MAX = 4  # answers for the same IDs that no checkpoint names
MISSING_FOR = 0.1  # seconds in which an older checkpoint, written last, is followed by the newest

# "namespace/name" of pods by resource, ID and container: of two pods, if both were given the ID
PodNames = Mapping[tuple[str, str, str], Collection[str]]
HoldKey = tuple[str, str, str, str]  # pod, container, resource, name of the answer


class Hold(NamedTuple):
    """One answer to Allocate: the devices of a resource that a container was given."""

    resource: str
    ids: DeviceIds
    name: str = ""  # that we gave this answer; empty: another version did, or another plugin
    chips: ChipAddresses = frozenset()  # another plugin's has more, by its device files
    device_files: tuple[str, ...] = ()  # only of another plugin's hold: see with_chips()
    directories: tuple[str, ...] = ()  # for hugepages, on the host
    locks: str = ""  # host directory that is its /dev/shm
    is_ours: bool = True
    pod: str = ""  # UID; empty while no checkpoint has named it
    container: str = ""

    @property
    def key(self) -> HoldKey:
        return (self.pod, self.container, self.resource, self.name)

    def of(self, resource: str, ids: Iterable[str]) -> Hold:
        """Return this hold, as read from an answer alone, with what the answer was given for."""
        ids = frozenset(ids)
        # Another mount on /dev/shm is an administrator's, and has no locks.
        has_locks = all(map(is_replica, ids)) and basename(self.locks) == without_domain(resource)
        return self._replace(resource=resource, ids=ids, locks=self.locks if has_locks else "")

    def is_for(self, resource: str, ids: DeviceIds) -> bool:
        """Return whether it is for exactly these IDs."""
        return (self.resource, self.ids) == (resource, ids)

    def shares_device(self, resource: str, ids: Collection[str]) -> bool:
        """Return whether it has a replica of a device of which these are replicas, too."""
        if self.resource != resource or not all(map(is_replica, {*self.ids, *ids})):
            return False
        return not {*map(without_replica, self.ids)}.isdisjoint(map(without_replica, ids))


# -- the checkpoint --------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """The kubelet's checkpoint (devicemanager/checkpoint), without other vendors' devices."""

    holds: Sequence[Hold] = ()
    unreadable: Sequence[str] = ()  # entries about our devices, "pod UID, container NAME"
    registered: Mapping[str, Any] = {}  # the IDs that the kubelet takes for healthy, by resource


def parse_checkpoint(content: bytes, domain: str) -> Checkpoint:
    """Return a checkpoint; raises ValueError. `domain`: that of the resources."""
    try:
        data = json.loads(content)["Data"]
        entries = list(data["PodDeviceEntries"] or ())
        registered = dict(data["RegisteredDevices"] or {})
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None

    holds, unreadable = [], []
    for entry in entries:
        try:
            if hold := _parse_entry(entry, domain):
                holds.append(hold)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if _concerns_us(entry, domain):
                pod, container = str(entry.get("PodUID")), str(entry.get("ContainerName"))
                unreadable.append(printable(f"pod {pod[:63]}, container {container[:63]}"))
                log.debug("checkpoint: %s: %s", unreadable[-1], error)
    return Checkpoint(holds, unreadable, registered)


def _concerns_us(entry: object, domain: str) -> bool:
    """Return whether an entry that cannot be read is about our devices, whoever answered."""
    if not isinstance(entry, dict):
        return False
    with suppress(TypeError, ValueError):  # the domain can be another one by now
        if ADDRESSES.encode() in base64.b64decode(entry.get("AllocResp") or ""):
            return True
    return str(entry.get("ResourceName")).startswith(f"{domain}/")


def _parse_entry(entry: Json, domain: str) -> Hold | None:
    """Return the hold of an entry, None for others' devices; raises ValueError and others.

    Another plugin's answer under our domain counts, whatever the resource is called: its chips are
    ours. Its ID must be listed even if the answer does not show which chips these are. One under
    another domain does not count: a monitoring pod can have all chips.
    """
    resource = _name(entry["ResourceName"])
    answer = _parse_answer(entry["AllocResp"] or "", resource.startswith(f"{domain}/"))
    if not answer:
        return None

    ids: set[str] = set()
    for ids_of_node in entry["DeviceIDs"].values():  # by NUMA node; one on two nodes is in both
        if not isinstance(ids_of_node, list):
            raise ValueError("device IDs are not a list")
        ids.update(map(_name, ids_of_node))
    if not ids:
        raise ValueError("no device IDs")

    pod, container = _name(entry["PodUID"]), _name(entry["ContainerName"])
    return answer.of(resource, ids)._replace(pod=pod, container=container)


def _name(value: object) -> str:
    """Return a name that can be printed; raises ValueError."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("not a name")
    return value


@lru_cache(maxsize=1024)  # a checkpoint is written often, with the same answers
def _parse_answer(encoded: str, is_our_domain: bool) -> Hold | None:
    """Return the hold of an answer, None if it is another vendor's; raises ValueError."""
    content = base64.b64decode(encoded, validate=True)
    if not is_our_domain and ADDRESSES.encode() not in content:
        return None

    try:
        answer = read_answer(pb.ContainerAllocateResponse.FromString(content))
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return answer if is_our_domain or answer.is_ours else None


def read_answer(answer: pb.ContainerAllocateResponse) -> Hold:
    """Return the hold of an answer, without resource, IDs and pod.

    Another plugin's has the PCI addresses in its texts, and its device files: see with_chips().
    """
    ours = frozenset(filter(BDF.fullmatch, answer.envs.get(ADDRESSES, "").split(",")))
    if not ours:
        texts = [*answer.envs.values(), *(each.name for each in answer.cdi_devices)]
        paths = [each.host_path for each in answer.devices if f"/{DRIVER}/" in each.host_path]
        chips = frozenset(BDF.findall(" ".join([*texts, *paths])))
        return Hold("", frozenset(), chips=chips, device_files=tuple(paths), is_ours=False)

    directories, locks = [], ""
    for mount in answer.mounts:
        parent, name = os.path.split(mount.host_path)
        hugetlbfs, own = os.path.split(parent)

        # Only directories in our own directory of a hugetlbfs may be emptied: not the hugetlbfs
        # itself, which hugepages = "host" mounts, and not a configured mount such as
        # /var/lib/tt-device-plugin/models, or a path that leads out again with "..".
        is_in_own = own == OWN_DIRECTORY and basename(hugetlbfs) in HUGETLBFS
        if is_in_own and name not in ("", ".", ".."):
            directories.append(mount.host_path)

        # The host's own is nobody's to empty, either.
        if mount.container_path == SHM and mount.host_path != SHM:
            locks = mount.host_path

    return Hold(
        "",
        frozenset(),
        name=printable(answer.annotations.get(ANSWER_NAME, "")),
        chips=ours,
        directories=tuple(directories),
        locks=locks,
    )


def with_chips(holds: Iterable[Hold], chips: Mapping[str, Chip]) -> Iterator[Hold]:
    """Yield the holds; another plugin's with the chips that its device files have now."""
    for hold in holds:
        if hold.is_ours:
            yield hold
            continue

        found = {*hold.chips} & chips.keys()
        names = {basename(path) for path in hold.device_files}
        for bdf, chip in chips.items():
            by_id = f"{chip.function.arch}-{chip.identity.asic_id}"  # the driver's link
            if chip.is_present and not names.isdisjoint((str(chip.function.ordinal), by_id)):
                found.add(bdf)
        yield hold._replace(chips=frozenset(found))


# Every ID that the daemon can have given in any configuration: a PCI address, a Galaxy tray's
# buses, a p300's serial; of a shared device with the number of the replica. Others are strange.
POSSIBLE_ID = re.compile(
    r"([0-9a-f]{4,}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-7])?|[0-9A-F]{16})(::[0-9]+)?"
)


def strange_ids(registered: Mapping[str, Any]) -> dict[str, DeviceIds]:
    """Return strange IDs by resource: another plugin's, unless a hold has them."""
    found = {}
    for resource, ids in registered.items():
        if isinstance(ids, list) and (strange := _strange_of(frozenset(map(str, ids)))):
            found[resource] = strange
    return found


@lru_cache(maxsize=32)  # each checkpoint has the same thousands of replicas, in another order
def _strange_of(ids: DeviceIds) -> DeviceIds:
    return frozenset(each for each in ids if not POSSIBLE_ID.fullmatch(each))


# -- pods' cgroups ---------------------------------------------------------------------------------

KUBEPODS = re.compile(r"kubepods(\.slice)?|.+-kubepods\.slice")
QOS_DIRECTORY = re.compile(r"(.+-)?(burstable|besteffort)(\.slice)?")
POD_DIRECTORY = re.compile(r"pod(.+)|.+-pod([^-]+)\.slice")
CONMON = "crio-conmon-"  # CRI-O's monitor, in a cgroup beside its container's


class Cgroups:
    """The cgroups of pods at the last refresh, by UID (pod_container_manager_linux.go)."""

    def __init__(self, settings: Settings) -> None:
        self._mount = f"{settings.sys}/fs/cgroup"
        self._is_v2 = False
        self._directories: Mapping[str, list[str]] = {}  # of pods, by UID with "_" for "-"
        self._populated: dict[str, bool] = {}  # by UID; of the pods that were asked for since then

    def refresh(self) -> None:
        """List the pods' directories, and drop all former findings; raises OSError."""
        found = defaultdict(list)
        for root in self._find_roots():
            qos = [f"{root}/{name}" for name in names_in(root) if QOS_DIRECTORY.fullmatch(name)]

            for directory in (root, *qos):
                for name in names_in(directory):
                    if match := POD_DIRECTORY.fullmatch(name):
                        uid = (match[1] or match[2]).replace("-", "_")
                        found[uid].append(f"{directory}/{name}")

        # Not before all are listed: the view is still that of the last refresh after an error.
        self._directories = found
        self._populated = {}

    def _find_roots(self) -> list[str]:
        """Return the kubepods directories that root owns, in the mount or one directory below."""
        names = names_in(self._mount)
        self._is_v2 = "cgroup.controllers" in names
        top = self._mount
        if not self._is_v2:
            # Not "devices" first: there a pod's directory appears with its first process only.
            for controller in ("memory", "devices", "systemd"):
                if controller in names:
                    top = f"{self._mount}/{controller}"
                    break

        roots = []
        for name in names_in(top):
            path = f"{top}/{name}"
            # Another user can close a directory, even to root without capabilities.
            if not _is_roots_directory(path):
                continue
            if KUBEPODS.fullmatch(name):
                roots.append(path)
            elif name != "user.slice":  # users' sessions
                inner = [f"{path}/{each}" for each in names_in(path) if KUBEPODS.fullmatch(each)]
                roots += filter(_is_roots_directory, inner)
        return roots

    def _of(self, pod: str) -> Sequence[str]:
        # After a change of the cgroup driver a pod has two directories.
        return self._directories.get(pod.replace("-", "_"), ())

    def exists(self, pod: str) -> bool:
        """Return whether a pod, given by its UID, has a cgroup."""
        return bool(self._of(pod))

    def is_populated(self, pod: str) -> bool:
        """Return whether a process is in a pod's cgroup, read at most once after each refresh."""
        if pod not in self._populated:
            self._populated[pod] = any(map(self._has_processes, self._of(pod)))
        return self._populated[pod]

    def containers(self, pod: str) -> frozenset[str]:
        """Return the names of the cgroups of a pod's containers, pause process included."""
        found: set[str] = set()
        for directory in self._of(pod):
            for each in if_exists(os.scandir, directory) or ():
                if each.is_dir(follow_symlinks=False) and not each.name.startswith(CONMON):
                    found.add(each.name)
        return frozenset(found)

    def has_populated_one(self, pod: str, containers: Iterable[str]) -> bool:
        """Return whether a process is in one of these cgroups of a pod."""
        paths: list[str] = []
        for name in containers:
            paths += [f"{directory}/{name}" for directory in self._of(pod)]

        # The pod's own file can have been read before the process was there.
        if found := any(map(self._has_processes, paths)):
            self._populated[pod] = True
        return found

    def _has_processes(self, directory: str) -> bool:
        """Return whether a process is, or may be, in a cgroup or below it."""
        waiting = [directory]
        while waiting:
            directory = waiting.pop()
            try:
                if self._is_v2:
                    with open(f"{directory}/cgroup.events", "rb", 0) as file:
                        return b"populated 1" in file.read()

                # Not cgroup.procs: old kernels leave out a process whose first thread has ended.
                with open(f"{directory}/tasks", "rb", 0) as file:
                    if file.read(1):
                        return True
                with os.scandir(directory) as entries:
                    waiting += [each.path for each in entries if each.is_dir(follow_symlinks=False)]
            except OSError as error:
                if error.errno not in ABSENT:
                    return True
        return False


def _is_roots_directory(path: str) -> bool:
    """Return whether a directory is root's: users can make a `kubepods` in their own subtree."""
    status = if_exists(os.lstat, path)
    return bool(status and stat.S_ISDIR(status.st_mode) and _is_roots(status))


# -- current holds, runs and starts ----------------------------------------------------------------


class Start(Enum):
    """The last allowed start of a container with a hold's chips."""

    NONE = "none"  # its pod has only a sandbox
    AWAITED = "awaited"  # the container was not seen yet
    SEEN = "seen"
    OVER = "over"  # since then the pod's cgroup was empty, or it was given other devices


@dataclass(slots=True)
class HoldState:
    """A hold, and its history."""

    hold: Hold
    answered_at: float = 0.0  # in this boot; 0: it was found in the checkpoint
    is_in_checkpoint: bool = False
    left_at: float = -inf  # when the checkpoint lost it
    cgroup_seen: bool = False  # its pod's, since the answer or the boot
    start: Start = Start.NONE
    allowed_at: float = 0.0  # when that start was allowed
    containers: frozenset[str] = frozenset()  # the pod's container cgroups when it was allowed

    @property
    def pod_key(self) -> HoldKey | str:
        """Return a key that is equal for holds of one pod; a hold without a pod has its own."""
        return self.hold.pod or self.hold.key

    def is_recent(self, now: float) -> bool:
        """Return whether the kubelet may still have to write the answer."""
        return self.answered_at > 0.0 and now - self.answered_at < WRITTEN_WITHIN

    @property
    def has_left(self) -> bool:
        """Return whether a checkpoint has named it, but the present one does not."""
        return bool(self.hold.pod) and not self.is_in_checkpoint

    def to_saved(self) -> Json:
        """Return the state for the next daemon of this boot; from_saved() is the reverse.

        `left_at` is left out: a restart takes longer than MISSING_FOR.
        """
        hold = {**self.hold._asdict(), "ids": sorted(self.hold.ids)}
        hold["chips"] = sorted(self.hold.chips)
        return {
            "hold": hold,
            "answered_at": self.answered_at,
            "is_in_checkpoint": self.is_in_checkpoint,
            "cgroup_seen": self.cgroup_seen,
            "start": self.start.value,
            "allowed_at": self.allowed_at,
            "containers": sorted(self.containers),
        }

    @classmethod
    def from_saved(cls, saved: Json) -> HoldState:
        """Return a hold of the last daemon. Raises many errors: see StateFile."""
        # JSON has lists in place of sets and tuples.
        hold = saved["hold"]
        for key, kind in (("ids", frozenset), ("chips", frozenset)):
            hold[key] = kind(hold[key])
        for key in ("device_files", "directories"):
            hold[key] = tuple(hold[key])

        return cls(
            Hold(**hold),
            answered_at=saved["answered_at"],
            is_in_checkpoint=saved["is_in_checkpoint"],
            cgroup_seen=saved["cgroup_seen"],
            start=Start(saved["start"]),
            allowed_at=saved["allowed_at"],
            containers=frozenset(saved["containers"]),
        )


class Call(NamedTuple):
    """A PreStartContainer call, which has only a resource and IDs."""

    resource: str
    ids: DeviceIds
    chips: ChipAddresses  # of these IDs
    callers: Sequence[HoldState]  # the holds whose container it may be, when it came
    came_at: float = 0.0  # seconds of the monotonic clock

    @property
    def directories(self) -> frozenset[str]:
        """Return the hugepage directories of these holds, which are not emptied for it."""
        return frozenset().union(*(state.hold.directories for state in self.callers))


class HoldBook:
    """The holds of this host: from answers, from checkpoints, and from the last daemon.

    refresh() reads the checkpoint and lists the pods' cgroups. Whether these have processes is read
    on demand. Times are seconds of the monotonic clock.
    """

    def __init__(self, settings: Settings, saved: Iterable[HoldState]) -> None:
        """`saved`: the states of the last daemon of this boot."""
        self.checkpoint_stamp: FileStamp | None = None  # of the checkpoint that was read last
        self.has_read = False  # a checkpoint was parsed
        self.problem: str | None = None  # why the present checkpoint cannot be used
        self.unreadable: Sequence[str] = ()  # its entries that cannot be read
        self.names: dict[str, str] = {}  # "namespace/name" by UID

        self._path = f"{settings.device_plugin_dir}/{CHECKPOINT}"
        self._domain = ""  # for which the checkpoint was read
        self._cgroups = Cgroups(settings)
        self._is_stale = True  # cgroups must be listed; stays so while that fails
        self._new_entries: Sequence[Hold] | None = None  # the checkpoint's; no state has them yet
        self._strange: Mapping[str, DeviceIds] = {}  # see strange_ids()
        # In the order in which they were answered, then named or found.
        self._states: dict[HoldKey, HoldState] = {state.hold.key: state for state in saved}

    def refresh(self, now: float, domain: str, *, look: bool) -> None:
        """Read the checkpoint if it has changed; then, or if `look`, list the pods' cgroups.

        Raises OSError; the next call does it all then.
        """
        self._read_checkpoint(domain)
        self._is_stale |= look or self._new_entries is not None
        if self._is_stale:
            # Cgroups first: of a new entry's pod it matters whether it has one.
            self._cgroups.refresh()
            if self._new_entries is not None:
                self._take_entries(self._new_entries, now)
            self._follow(now)
            self._is_stale, self._new_entries = False, None

    def _read_checkpoint(self, domain: str) -> None:
        """Read the checkpoint if it has changed; raises OSError."""
        stamp = file_stamp(self._path)
        # A missing one stays as it is: no kubelet has written one yet, or it has disappeared.
        if stamp == self.checkpoint_stamp and (stamp is None or domain == self._domain):
            return

        checkpoint = self._parse_checkpoint(domain)
        self.checkpoint_stamp, self._domain = stamp, domain
        if checkpoint is None:
            return

        if self.problem:
            log.info("%s can be read again", self._path)
        for entry in checkpoint.unreadable:
            if entry not in self.unreadable:
                log.warning("%s: cannot read the entry of %s", self._path, entry)
        self._strange = strange_ids(checkpoint.registered)
        self.problem, self.unreadable = None, checkpoint.unreadable
        self.has_read = True
        self._new_entries = checkpoint.holds

    def _parse_checkpoint(self, domain: str) -> Checkpoint | None:
        """Return the present checkpoint, None if it cannot be used; raises OSError."""
        try:
            return parse_checkpoint(read_others_file(self._path, CHECKPOINT_MAX), domain)
        except FileNotFoundError:
            self._note_problem("has disappeared", "the kubelet has forgotten its pods")
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OWN_ERRORS:
                raise
            self._note_problem("cannot be read", str(error))
        return None

    def _note_problem(self, what: str, why: str) -> None:
        """Record that the checkpoint cannot be used, and log that once."""
        if self.problem is None:
            log.warning("%s %s (%s); its last content stays in use", self._path, what, why)
        self.problem = f"{CHECKPOINT} {what}"
        self._strange = {}  # the present registrations are not known

    def _take_entries(self, entries: Iterable[Hold], now: float) -> None:
        """Bring the states in line with the checkpoint's entries."""
        present = {hold.key: hold for hold in entries}
        for key, hold in present.items():
            if key not in self._states:
                self._states[key] = self._take_unnamed(hold) or self._found(hold)
            self._states[key].hold = hold
            self._states[key].is_in_checkpoint = True

        for key, state in self._states.items():
            if state.is_in_checkpoint and key not in present:
                state.is_in_checkpoint = False
                state.left_at = now

    def _take_unnamed(self, hold: Hold) -> HoldState | None:
        """Take out the state of an answer that a checkpoint names for the first time."""
        return self._states.pop(("", "", hold.resource, hold.name), None) if hold.name else None

    def _found(self, hold: Hold) -> HoldState:
        """Return the state of a hold that this daemon and the last one have not answered.

        If its pod's cgroup exists, a container may have started.
        """
        start = Start.SEEN if self._cgroups.exists(hold.pod) else Start.NONE
        return HoldState(hold, start=start)

    def _follow(self, now: float) -> None:
        """Note the progress of pods and starts, and drop the states that no longer matter."""
        for state in self._states.values():
            pod = state.hold.pod
            if not state.cgroup_seen:
                state.cgroup_seen = self._cgroups.exists(pod)
            if state.start is Start.AWAITED and self._is_start_over(state, now):
                state.start = Start.SEEN

            # Most ends are noted by note_ended_pods(). That of a pod without an entry or a cgroup
            # is noted at once: a static pod comes back under its UID, and would seem to have run
            # on.
            if not (state.is_in_checkpoint and self._cgroups.exists(pod)):
                self._note_end(state)
        self._note_given_again()

        # A hold that is not current keeps its state while its entry is in the checkpoint, or can
        # return to it: without the state, the next refresh would take a pod that has ended for one
        # whose cgroup does not exist yet. A recent hold keeps it because it may have used a
        # directory that another recent answer names: see directory_for().
        kept = {}
        for key, state in self._states.items():
            was_there = state.is_in_checkpoint or now - state.left_at < MISSING_FOR
            if was_there or state.is_recent(now) or self.is_current(state, now):
                kept[key] = state
        self._states = kept

        pods = {state.hold.pod for state in self._states.values()}
        self.names = {pod: name for pod, name in self.names.items() if pod in pods}

    def _note_given_again(self) -> None:
        """Note the end of containers that were given other devices since: they run on those.

        Their pod is static, and has come back under its UID; or the kubelet has lost its
        checkpoint, and allocates again for a container that it starts again.
        """
        states = self._states.values()
        left = [state for state in states if state.has_left and state.start is not Start.NONE]
        if not left:
            return  # as mostly: what follows costs more

        given_at: dict[tuple[str, str, str], float] = defaultdict(float)  # the last time
        for state in states:
            container = state.hold.key[:3]
            given_at[container] = max(given_at[container], state.answered_at)
        for state in left:
            if state.answered_at < given_at[state.hold.key[:3]]:
                state.start = Start.OVER

    def _is_start_over(self, state: HoldState, now: float) -> bool:
        """Return whether the container of an awaited start was seen, or will not come."""
        if now - state.allowed_at > CREATED_WITHIN:
            return True

        pod = state.hold.pod
        if not pod:
            return False  # its cgroup cannot be found yet
        if not self._cgroups.exists(pod):
            return True
        new = self._cgroups.containers(pod) - state.containers
        return self._cgroups.has_populated_one(pod, new)

    def note_ended_pods(self) -> None:
        """Note which pods have an empty cgroup now. It is read for each, so not at each refresh."""
        for state in self._states.values():
            self._note_end(state)

    def _note_end(self, state: HoldState) -> None:
        """Note that a pod has ended, if its containers were started and its cgroup is empty."""
        pod = state.hold.pod
        if state.start is Start.SEEN and pod and not self._cgroups.is_populated(pod):
            state.start = Start.OVER

    def add(self, hold: Hold, now: float) -> None:
        """Add an answer that is given now.

        Kubelets write a checkpoint after each answer, so only a tool that asks for the same IDs
        again and again has many that none names. The oldest of these are dropped.
        """
        unnamed = []  # in the order in which they were answered
        for key, state in self._states.items():
            is_same = state.hold.is_for(hold.resource, hold.ids)
            if is_same and not state.hold.pod and state.start is Start.NONE:
                unnamed.append(key)

        while len(unnamed) >= UNNAMED_MAX:
            del self._states[unnamed.pop(0)]
        self._states[hold.key] = HoldState(hold, answered_at=now)

    def is_current(self, state: HoldState, now: float) -> bool:
        """Return whether a hold still has its chips: see the table at the head of this chapter."""
        if state.is_in_checkpoint or state.is_recent(now):
            return not state.cgroup_seen or self._cgroups.exists(state.hold.pod)
        return self.runs(state)

    def current(self, now: float) -> tuple[Hold, ...]:
        """Return the current holds."""
        states = self._states.values()
        return tuple(state.hold for state in states if self.is_current(state, now))

    def runs(self, state: HoldState) -> bool:
        """Return whether the pod of a hold runs on its chips.

        It does from the first allowed start of one of its containers with these chips until its
        cgroup is empty; after that, only a new allowed start makes it run again. From each allowed
        start until the new container's cgroup was seen populated (at most CREATED_WITHIN), the pod
        counts as not empty: without a pause process (CRI-O) it has no process meanwhile. Of another
        plugin's holds no start is seen, so that the processes decide alone.
        """
        pod = state.hold.pod
        if not pod:
            return state.start is Start.AWAITED

        if not state.hold.is_ours:
            return self._cgroups.is_populated(pod)
        if state.start is Start.AWAITED:
            return self._cgroups.exists(pod)
        return state.start is Start.SEEN and self._cgroups.is_populated(pod)

    @property
    def is_awaiting_containers(self) -> bool:
        return any(state.start is Start.AWAITED for state in self._states.values())

    def call(self, resource: str, ids: DeviceIds, chips: ChipAddresses, now: float) -> Call:
        """Return a PreStartContainer call that comes now, with its possible callers.

        These are all holds of exactly these IDs that may call. If several have left the checkpoint,
        only the last answer is one: the kubelet has given the IDs away since the others.
        """
        callers = []
        for state in self._states.values():
            if state.hold.is_for(resource, ids) and self._may_call(state, now, now):
                callers.append(state)

        last = max((state.answered_at for state in callers), default=0.0)
        callers = [state for state in callers if not state.has_left or state.answered_at == last]
        return Call(resource, ids, chips, callers, now)

    def _may_call(self, state: HoldState, came_at: float, now: float) -> bool:
        """Return whether a PreStartContainer call that came then can be that of a hold's container.

        It can be while the hold is current, unless the pod was refused. A hold that leaves the
        checkpoint during the call has lost its pod: it was deleted.
        """
        if not state.has_left:
            return self.is_current(state, now) and not self._was_refused(state)

        # The kubelet calls for a recent answer also while an older checkpoint is the last that was
        # written. The entry is then missing already when the call comes.
        was_missing = state.left_at < came_at
        if was_missing and state.is_recent(came_at):
            return self.is_current(state, now)

        # An entry that has just left can return.
        return now - state.left_at < MISSING_FOR

    def _was_refused(self, state: HoldState) -> bool:
        """Return whether the kubelet has refused the pod of an answer, at another resource.

        It admits one pod after the other. So a checkpoint with a later answer would name this one,
        too, if the kubelet still had it.
        """
        if state.hold.pod:
            return False
        states = self._states.values()
        return any(each.hold.pod and each.answered_at > state.answered_at for each in states)

    def was_deleted(self, call: Call, now: float) -> bool:
        """Return whether the pod of a call was deleted: none of its callers may call any more."""
        remaining = [each for each in call.callers if self._may_call(each, call.came_at, now)]
        return bool(call.callers) and not remaining

    def waits_for(self, call: Call, holds: Iterable[Hold]) -> list[Hold]:
        """Return the holds for whose pods' end a start must wait; none if it is allowed.

        It waits while another pod runs on one of the chips without sharing them. `holds`: the
        current ones. If only one pod can be the caller, its own containers do not count: the start
        is that of its next one, or a restart.
        """
        pods = {state.pod_key for state in call.callers}
        own_pod = pods if len(pods) == 1 else set()

        running = []
        for hold in holds:
            if call.chips.isdisjoint(hold.chips) or hold.shares_device(call.resource, call.ids):
                continue
            state = self._states[hold.key]
            if self.runs(state) and state.pod_key not in own_pod:
                running.append(hold)
        return running

    def allow(self, call: Call, now: float) -> None:
        """Note that a start is allowed: it counts for all possible callers."""
        for caller in call.callers:
            # One that was deleted and dropped during the call can be the one that starts.
            state = self._states.setdefault(caller.hold.key, caller)
            state.start = Start.AWAITED
            state.allowed_at = now
            state.containers = self._cgroups.containers(state.hold.pod)

    def forgotten_ids(self, resource: str, holds: Iterable[Hold]) -> DeviceIds:
        """Return IDs that the kubelet takes for free though a pod runs on them.

        It was deleted by force, or the kubelet has lost its checkpoint.
        """
        found: set[str] = set()
        for hold in holds:
            state = self._states[hold.key]
            if hold.resource == resource and not state.is_in_checkpoint and self.runs(state):
                found |= hold.ids
        return frozenset(found)

    def other_plugins(self, holds: Iterable[Hold]) -> set[str]:
        """Return the resources under whose name another plugin has registered.

        The kubelet takes IDs for healthy that are neither possible here nor a hold's.
        """
        if not self._strange:
            return set()
        held: dict[str, set[str]] = defaultdict(set)
        for hold in holds:
            held[hold.resource] |= hold.ids
        return {name for name, ids in self._strange.items() if not ids <= held[name]}

    def apply_names(self, listed: PodNames, asked: Collection[HoldKey]) -> None:
        """Record the names of pods, as the kubelet has listed them when these holds were current.

        It lists who has a device now. If a pod was deleted by force, that can be the next one,
        while the checkpoint does not have it yet, or has it only since the kubelet was asked. So a
        known name stays, and an ID that was given away since the checkpoint's answer has no name.
        """
        pods = defaultdict(set)  # of the checkpoint, by resource, ID and container
        last_holds: dict[tuple[str, str], Hold] = {}  # of the last answer with each ID
        for state in sorted(self._states.values(), key=lambda state: state.answered_at):
            hold = state.hold
            for device_id in hold.ids:
                last_holds[hold.resource, device_id] = hold
                if state.is_in_checkpoint:
                    pods[hold.resource, device_id, hold.container].add(hold.pod)

        names = dict(self.names)
        for (resource, device_id, container), holders in pods.items():
            # If several pods have the ID, the names of all others must be known.
            unnamed = holders - names.keys()
            taken = {names[pod] for pod in holders - unnamed}
            possible = {*listed.get((resource, device_id, container), ())} - taken
            if len(unnamed) != 1 or len(possible) != 1:
                continue

            # It is this pod's if the ID was given to it last, before the kubelet was asked.
            (pod,) = unnamed
            last = last_holds.get((resource, device_id))
            if last and last.pod == pod and last.key in asked:
                (names[pod],) = possible
        self.names = names

    def to_saved(self) -> list[Json]:
        return [state.to_saved() for state in self._states.values()]

    def directory_for(self, hold: Hold, now: float) -> str | None:
        """Return the name of an existing hugepage directory for a new answer; None: a new one.

        The kubelet gives an init container's IDs to the pod's other containers, too, each with an
        Allocate, before any of them starts. So an answer for the same IDs as a recent one has its
        directory, if nobody can have used that.
        """
        if all(map(is_replica, hold.ids)):
            return self._shared_directory(hold, now)

        used: set[str] = set()
        for state in self._states.values():
            if state.cgroup_seen or state.start is not Start.NONE:
                used.update(state.hold.directories)

        for state in reversed(self._states.values()):
            is_same = state.hold.is_for(hold.resource, hold.ids)
            is_unused = used.isdisjoint(state.hold.directories)
            if is_same and state.is_recent(now) and is_unused and state.hold.directories:
                return basename(state.hold.directories[0])
        return None

    def _shared_directory(self, hold: Hold, now: float) -> str | None:
        """Return the name of the directory that containers on a shared device have in common."""
        for device_id in sorted(hold.ids):
            for state in self._states.values():
                shares = state.hold.shares_device(hold.resource, [device_id])
                if shares and state.hold.directories and self.is_current(state, now):
                    return basename(state.hold.directories[0])
        return None

    def left_behind(self, call: Call, holds: Iterable[Hold]) -> set[str]:
        """Return the hugepage directories that must be emptied before a start.

        A pod that was killed leaves its files, and with them the pages that its successor needs;
        and the kubelet gives its chips away before its cgroup is removed. So the result has the
        directories of holds of the call's chips, unless a running pod, a hold of other chips, or a
        possible caller has them as well. `holds`: the current ones.
        """
        found: set[str] = set()
        kept = {*call.directories}
        for hold in holds:
            has_other_chips = call.chips.isdisjoint(hold.chips)
            if has_other_chips or self.runs(self._states[hold.key]):
                kept.update(hold.directories)
            else:
                found.update(hold.directories)
        return found - kept


# -- lists -----------------------------------------------------------------------------------------


def name_of_pod(hold: Hold, names: Mapping[str, str]) -> str:
    """Return the pod of a hold for messages: "namespace/name", or its UID while that is unknown."""
    if not hold.pod:
        return "a pod that is being admitted"
    return names.get(hold.pod, f"pod {hold.pod}")


def advertise(
    offer: Offer, chips: Mapping[str, Chip], holds: Sequence[Hold], names: Mapping[str, str]
) -> Resources:
    """Return the resources as the kubelet gets them, by name: those of the offer, if holds fit it.

    Each ID of a hold is listed, whatever the configuration says now: kubelets 1.35 to 1.37 crash at
    their start without it (topology_hints.go), and end the pod if it is unhealthy then. If the
    configuration gives the ID for chips of the hold, it has their health. Otherwise it is reserved,
    and healthy if all chips of the hold are. Every other ID is withheld while a hold has one of its
    chips under another resource, or under an ID of another device.
    """
    changed: dict[str, dict[str, Device]] = defaultdict(dict)  # by resource and ID
    held: set[tuple[str, str]] = set()  # resource and ID

    # The IDs of holds. If the configuration gives an ID for the same chips, it stays as it is.
    for hold in holds:
        configured = offer.resources.get(hold.resource)
        if not hold.is_ours and not configured:
            continue  # another plugin's resource, under a name that is not one of ours
        for device_id in sorted(hold.ids):
            held.add((hold.resource, device_id))
            device = configured.devices.get(device_id) if configured else None
            # After a reboot, a board is incomplete until its chips report their serial number.
            is_given = device and device.addresses <= hold.chips and not device.incomplete
            if not is_given:
                changed[hold.resource][device_id] = _reserved_device(device_id, hold, chips)

    # Other IDs that the configuration gives for chips of holds.
    for hold in holds:
        for bdf in hold.chips & offer.by_chip.keys():
            resource, ids = offer.by_chip[bdf]
            if hold.shares_device(resource.name, ids[:1]):  # as for the device's other replicas
                continue
            for device_id in ids:
                if (resource.name, device_id) not in held:
                    device = _withheld_device(resource.devices[device_id], hold, names)
                    changed[resource.name][device_id] = device

    if not changed:
        return offer.resources
    found = dict(offer.resources)
    for name in sorted(changed):
        resource = found.get(name) or Resource(name, {})
        found[name] = replace(resource, devices={**resource.devices, **changed[name]})
    return found


def _reserved_device(device_id: str, hold: Hold, chips: Mapping[str, Chip]) -> Device:
    """Return the device of an ID that only a hold gives.

    `chips`: known ones, and all chips of holds (see decide()).
    """
    members = tuple(chips[bdf] for bdf in sorted(hold.chips, key=address_numbers))
    place = Place(device_id)
    return Device(without_replica(device_id), members, place, len(members), is_reserved=True)


def _withheld_device(device: Device, hold: Hold, names: Mapping[str, str]) -> Device:
    """Return a device as the kubelet gets it while a pod holds its chips by another ID."""
    holder = name_of_pod(hold, names)
    held_as = f"{hold.resource} {', '.join(sorted(hold.ids))}"
    return device._replace(holder=holder, withheld=f"held until {holder} ends (as {held_as})")


# -- directories -----------------------------------------------------------------------------------
#
# tt-umd opens hugepage files with fixed names, mode 0666 (hugepage.cpp). So containers that have
# the host's directory open each other's, and the files of a pod that was killed stay there, with
# their pages. With hugepages = "private" each container has its own directory, with a name that
# never was there before: its pages are clean from the beginning, and processes of a former pod
# cannot reach them. It exists while a current hold names it. What a container has left in it can be
# anything: nothing here follows a link, or depends on how deep or how large it is.

STEPS = 1000  # files that are removed at a time: about 10 ms
STEPS_TAKE = 0.01  # seconds after which none is begun: a file of 1 GiB in memory takes 0.1 s alone
RETRY_PAUSES = (5.0, 300.0)  # seconds until a directory that resists is tried again, growing


class OutOfSteps(Exception):
    """There is more to remove."""


class RemovalSteps:
    """How many files may be removed, and for how long, until other work goes on."""

    def __init__(self, number: int = STEPS, seconds: float = inf) -> None:
        self._number = number
        self._deadline = monotonic() + seconds
        self.taken = 0

    def take(self) -> None:
        """Raise OutOfSteps if none is left. One always is, so that each turn gets on."""
        if self.taken >= self._number or (self.taken and monotonic() > self._deadline):
            raise OutOfSteps
        self.taken += 1


class Resistance(NamedTuple):
    """A directory that could not be emptied."""

    reason: str
    pause: float  # seconds
    next_try: float  # of the monotonic clock


class Directories:
    """The directories of holds on this host: for hugepages in each hugetlbfs, and for locks."""

    def __init__(self, settings: Settings, began_at: float = -inf) -> None:
        """`began_at`: the daemon's start, in seconds of the monotonic clock."""
        self.resisting: dict[str, Resistance] = {}  # by path
        self._settings = settings  # only root counts, which never changes
        self._lock_paths: set[str] = set()  # that can have locks in them
        self._tried_at: dict[str, float] = {}  # by path
        self._began_at = began_at
        self._made: set[str] = set()  # paths that were not there before

    def make_for_hugepages(self, name: str, hugetlbfs: Iterable[Mount]) -> list[Mount]:
        """Make a directory of this name in each of these hugetlbfs; raises OSError."""
        mounts = []
        for mount in hugetlbfs:
            path = f"{mount.host}/{OWN_DIRECTORY}/{name}"
            self._note_new(path)
            _make_hugepage_directory(path)
            mounts.append(Mount(path, mount.container))
        return mounts

    def make_for_locks(self, path: str) -> None:
        """Make a directory in which containers can remove only their own locks; raises OSError."""
        self._lock_paths.add(path)
        self._note_new(path)
        parent = dirname(path)
        with _naming(parent):
            if not os.path.lexists(parent):
                _make_directory(parent, 0o755)
            _check_lock_dir(parent)
        with _naming(path), _opened_directory(parent) as directory:
            _make_directory(path, 0o1777, directory)

    def _note_new(self, path: str) -> None:
        """Note a path that is about to be made, unless it exists."""
        if not os.path.lexists(path):
            self._made.add(path)

    def note_locks(self, path: str) -> None:
        """Have a directory for locks emptied once no current hold names it, whoever has made it."""
        if path != SHM:  # the host's own
            self._lock_paths.add(path)

    def put_right(self, hold: Hold) -> None:
        """Make the missing directories of a hold, with their modes; raises OSError.

        Runtimes resolve the paths of an answer each time that they create a container.
        """
        for path in hold.directories:
            if not _is_directory(path, 0o777):
                # Without its hugetlbfs, the pages would be ordinary files.
                own = [f"{each.host}/{OWN_DIRECTORY}" for each in hugetlbfs_mounts(self._settings)]
                if dirname(path) in own:
                    _make_hugepage_directory(path)

        if hold.locks:
            self._lock_paths.add(hold.locks)
            if not _is_directory(hold.locks, 0o1777):
                self.make_for_locks(hold.locks)

    def unnamed(self, holds: Iterable[Hold], now: float) -> set[str]:
        """Return the directories that no current hold names; raises OSError.

        In the daemon's first WRITTEN_WITHIN seconds only its own are returned: answers of the
        daemon before it may not be in the checkpoint yet.
        """
        present = {*self._hugepage_paths(), *self._lock_paths}
        self._forget_all_but(present)
        if now - self._began_at < WRITTEN_WITHIN:
            present &= self._made

        named: set[str] = set()
        for hold in holds:
            named.update(hold.directories)
            if hold.locks:
                named.add(hold.locks)

        unnamed = present - named
        if not unnamed:
            return unnamed  # as mostly: what follows costs more

        # One directory can have two paths: /dev/hugepages-1G can be a bind mount of /dev/hugepages.
        parents = {dirname(path) for path in unnamed | named}
        identities = {parent: _file_identity(parent) for parent in parents}
        in_use = {(identities[dirname(path)], basename(path)) for path in named}
        return {
            path for path in unnamed if (identities[dirname(path)], basename(path)) not in in_use
        }

    def _forget_all_but(self, present: set[str]) -> None:
        """Drop what is recorded of other paths, which do not exist any more."""
        self._made &= present
        for by_path in (self.resisting, self._tried_at):
            for path in by_path.keys() - present:
                del by_path[path]

    def clear(
        self,
        unnamed: Collection[str],
        left_behind: Collection[str],
        now: float,
        steps: RemovalSteps,
    ) -> None:
        """Remove these directories, and empty those that are left behind; raises OutOfSteps.

        One that resists keeps nothing else from being removed. It is tried again later, or for the
        container that starts with it.
        """
        paths = {*unnamed, *left_behind}
        # The directory that took all steps of the last time comes last.
        for path in sorted(paths, key=lambda path: (self._tried_at.get(path, 0.0), path)):
            is_due = path not in self.resisting or now >= self.resisting[path].next_try
            if is_due or path in left_behind:
                self._tried_at[path] = now
                self._clear(path, now, steps, is_kept=path in left_behind)

    def problems(self, holds: Iterable[Hold]) -> dict[str, Reason]:
        """Return why directories could not be emptied, by path. `holds`: the current ones."""
        found = {}
        named = set(chain(*(hold.directories for hold in holds)))
        for path, each in self.resisting.items():
            # One that no hold names is never used again, so that the command cannot hurt.
            is_over = basename(dirname(path)) == OWN_DIRECTORY and path not in named
            command = f"rm -rf --one-file-system {shlex.quote(path)}" if is_over else ""
            found[path] = Reason(each.reason, command)
        return found

    def _hugepage_paths(self) -> Iterator[str]:
        """Yield all that is in our directory of each hugetlbfs; raises OSError."""
        for hugetlbfs in hugetlbfs_mounts(self._settings):
            parent = f"{hugetlbfs.host}/{OWN_DIRECTORY}"
            # In a missing directory, or another user's, there is nothing for us to remove.
            unusable = (FileNotFoundError, NotADirectoryError, PermissionError)
            with suppress(*unusable), _opened_own_directory(parent) as directory:
                for name in os.listdir(directory):
                    yield f"{parent}/{name}"

    def _clear(self, path: str, now: float, steps: RemovalSteps, *, is_kept: bool) -> None:
        """Empty a directory for locks; remove one for hugepages, or empty it if it `is_kept`.

        Raises OutOfSteps. A directory that resists is recorded, and logged once.
        """
        try:
            if path in self._lock_paths:
                _check_lock_dir(dirname(path))
                with _opened_to_empty(path, 0o1777) as directory:
                    _empty(directory, steps)
            elif is_kept:
                with (
                    _opened_own_directory(dirname(path)) as parent,
                    _opened_to_empty(path, 0o777, parent) as directory,
                ):
                    _empty(directory, steps)
            else:
                with _opened_own_directory(dirname(path)) as parent:
                    _remove_entry(basename(path), parent, steps)
            self.resisting.pop(path, None)

        except FileNotFoundError:
            self.resisting.pop(path, None)

        except OSError as error:
            reason = error.strerror or str(error)
            former = self.resisting.get(path)
            pause = min(2 * former.pause, RETRY_PAUSES[1]) if former else RETRY_PAUSES[0]
            self.resisting[path] = Resistance(reason, pause, now + pause)
            if former is None:
                log.warning("%s cannot be emptied: %s", printable(path), reason)


def _make_hugepage_directory(path: str) -> None:
    """Make a directory that is missing, or put its mode right; raises OSError.

    0777 and not sticky is the only mode in which each user of a pod can open another one's files
    (fs.protected_regular). Only root can enter the directory around it.
    """
    parent = dirname(path)
    with _naming(parent):
        _make_directory(parent, 0o700)
        with _opened_own_directory(parent) as directory, _naming(path):
            _make_directory(path, 0o777, directory)


def _check_lock_dir(path: str) -> None:
    """Raise OSError if others than root can change a directory of lock directories.

    A user who could replace one of these could redirect root. The container may own its own.
    """
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or not _is_roots(status) or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "other users can change it", path)


def _empty(directory: int, steps: RemovalSteps) -> None:
    """Remove all that is in an open directory, also beside what cannot be removed.

    Raises OutOfSteps, or the first OSError. A tree can be deeper than there are descriptors, or
    bytes in a path. So what a subdirectory contains is moved up beside it first, until nothing is
    nested.
    """
    failures: list[OSError] = []
    taken_before = steps.taken
    is_flat = False

    try:
        while not is_flat:
            is_flat = True
            for entry in _entries(directory, steps):
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if _remove_if_empty(entry.name, directory):
                            continue
                        # This pass may not come to what is moved here.
                        is_flat &= not _move_up(entry.name, directory, steps, failures)
                        os.rmdir(entry.name, dir_fd=directory)
                    else:
                        os.unlink(entry.name, dir_fd=directory)
                except OSError as error:
                    failures.append(error)
    except OutOfSteps:
        # The next turn goes on, unless most entries resist. That is an error, and there is a pause:
        # these would be the first again, and take all steps of each turn.
        most_resist = 2 * len(failures) > steps.taken - taken_before
        if not most_resist:
            raise

    if failures:
        raise failures[0]


def _remove_if_empty(name: str, parent: int) -> bool:
    """Remove a directory if it is empty, and return whether it was.

    Raises OSError for a mount point: what is mounted there is not for us to remove.
    """
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise
        return False
    return True


def _move_up(name: str, parent: int, steps: RemovalSteps, failures: list[OSError]) -> bool:
    """Remove a subdirectory's files, and move its directories to the parent.

    Returns whether there were directories. What cannot be removed or moved is added to `failures`.
    """
    has_moved = False
    with _opened_to_empty(name, 0o700, parent) as directory:
        for entry in _entries(directory, steps):
            try:
                if entry.is_dir(follow_symlinks=False):
                    _set_mode(entry.name, 0o700, directory)  # which a move needs, too
                    # Its own name may exist in the parent as well.
                    new = f"moved-{os.urandom(8).hex()}"
                    os.rename(entry.name, new, src_dir_fd=directory, dst_dir_fd=parent)
                    has_moved = True
                else:
                    os.unlink(entry.name, dir_fd=directory)
            except OSError as error:
                failures.append(error)
    return has_moved


def _entries(directory: int, steps: RemovalSteps) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of an open directory; each takes a step."""
    with os.scandir(directory) as entries:
        for entry in entries:
            steps.take()
            yield entry


def _remove_entry(name: str, parent: int, steps: RemovalSteps) -> None:
    """Remove a directory with all that is in it, or a file; raises OSError, OutOfSteps."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    if not _remove_if_empty(name, parent):
        with _opened_to_empty(name, 0o700, parent) as directory:
            _empty(directory, steps)
        os.rmdir(name, dir_fd=parent)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Put this path into an OSError that has no absolute one, as those of open directories."""
    try:
        yield
    except OSError as error:
        is_whole = isinstance(error.filename, str) and error.filename.startswith("/")
        raise OSError(error.errno, error.strerror, error.filename if is_whole else path) from None


def _make_directory(path: str, mode: int, parent: int | None = None) -> None:
    """Make a directory that is missing, in an open parent, or put its mode right; raises OSError.

    The umask changes the mode of a new one, and runtimes make missing ones 0755.
    """
    with suppress(FileExistsError):
        os.mkdir(path if parent is None else basename(path), mode, dir_fd=parent)
    _set_mode(path, mode, parent)


def _set_mode(path: str, mode: int, parent: int | None = None) -> None:
    """Set the mode of a directory, unless a container has made it its own; raises OSError."""
    name = path if parent is None else basename(path)
    # A container can have closed it. Root without capabilities cannot read it then.
    with _opened_directory(name, parent, os.O_PATH) as directory:
        status = os.fstat(directory)
        if not _is_roots(status) or stat.S_IMODE(status.st_mode) == mode:
            return
        try:
            os.chmod(f"/proc/self/fd/{directory}", mode)  # fchmod() needs more than O_PATH
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None


def _is_directory(path: str, mode: int) -> bool:
    status = if_exists(os.lstat, path)
    return bool(status and stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == mode)


def _file_identity(path: str) -> tuple[int, int] | str:
    """Return the device and inode of a file, the path itself if these cannot be read."""
    with suppress(OSError):
        status = os.lstat(path)
        return (status.st_dev, status.st_ino)
    return path


def _is_roots(status: os.stat_result) -> bool:
    """Return whether root owns a file, or the daemon's user if that is another one."""
    return status.st_uid in (0, os.geteuid())


@contextmanager
def _opened_directory(
    path: str, parent: int | None = None, access: int = os.O_RDONLY
) -> Iterator[int]:
    """Open a directory, but not through a link; raises OSError."""
    directory = os.open(path, access | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _opened_to_empty(path: str, mode: int, parent: int | None = None) -> Iterator[int]:
    """Open a directory whose entries are to be removed, with this mode if it is root's.

    Root without capabilities obeys modes, also those that root in a container has set. Raises
    OSError.
    """
    _set_mode(path, mode, parent)
    with _opened_directory(path if parent is None else basename(path), parent) as directory:
        yield directory


@contextmanager
def _opened_own_directory(path: str) -> Iterator[int]:
    """Open one of our directories; raises OSError if it is another user's.

    Its entries are reached by this descriptor. By its path, a container that has the host's
    hugetlbfs could lead the daemon elsewhere, with a link in its place.
    """
    with _opened_directory(path) as directory:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's directory", path)
        yield directory


# ==== PREFERRED ALLOCATION: neighbours, and whole boards stay whole. Pure =========================
#
# The kubelet asks which of the available IDs a container should get.
#
# 1. Each ID has a rank, wherever its device is. IDs are chosen in the order of their ranks, until
#    only some IDs of a rank are needed. Their devices are the candidates. Between these, places
#    decide: all chosen devices together must have the lowest cost.
# 2. A board has few choices: the cheapest one for each number of its candidates.
# 3. Boards are combined one by one, and their costs are added.
# 4. NUMA nodes and trays do not add up: boards share a node, and trays are neighbours or not. So
#    the cheapest choice is kept for each number of candidates, NUMA nodes and trays. A node that no
#    later board is on is counted, and no longer distinguishes choices. So are the trays of a ring.
# 5. A choice that cannot end on the fewest boards is dropped. In the end one is left.

# The links of a Galaxy (tt-metal's physical groupings; not seen on hardware). A tray's chips are
# 1 2 3 4 above 5 6 7 8, each linked to the next one in its row and to the opposite one.
TRAY_LINKS = [{n, n + 1} for n in (1, 2, 3, 5, 6, 7)] + [{n, n + 4} for n in (1, 2, 3, 4)]
TRAY_HALVES = [{1, 2, 5, 6}, {3, 4, 7, 8}]

# The trays of a Galaxy form a ring, in the order of GALAXY_TRAYS: two trays are neighbours unless
# they are opposite, and of three trays one is the neighbour of both others.
OPPOSITE_TRAYS = [{0x00, 0x80}, {0x40, 0xC0}]

UNKNOWN_NUMA_NODE = -1  # shared by all devices that report none


class Rank(NamedTuple):
    """What decides about an ID wherever its device is. The lowest rank is chosen first."""

    is_optional: bool  # not a must-include
    is_refused: bool  # by Allocate, if the kubelet offers it all the same
    is_forgotten: bool  # the kubelet takes it for free, but a pod runs on it
    repeats: int  # IDs of the same device that are chosen before it
    users: int  # IDs of the same device that are not available


class Cost(NamedTuple):
    """What decides between devices by their places, the most important number first.

    A Galaxy's tray is a board, and any other board is its own tray, so there are as many trays as
    boards. A board, NUMA node or half is whole if all its listed devices are available.
    """

    boards: int = 0  # with a chosen device
    numa_nodes: int = 0  # of these boards
    whole_boards: int = 0  # of these boards: a choice that breaks up no whole one is better
    whole_numa_nodes: int = 0  # of these nodes
    tray_groups: int = 0  # groups of neighbouring trays
    links: int = 0  # between chosen chips of a tray; negative, as more are better
    whole_halves: int = 0  # halves of trays with a chosen chip

    def plus(self, other: Cost) -> Cost:
        return Cost(*map(add, self, other))


class Choice(NamedTuple):
    """Some candidates on some boards. The least choice is the best one.

    Devices have numbers, in the order of PCI addresses: see Resource.ids_by_device.
    """

    cost: Cost = Cost()
    devices: tuple[int, ...] = ()  # the candidates' numbers, ascending
    numa_nodes: frozenset[int] = frozenset()  # in use, but not yet in the cost
    trays: frozenset[Tray] = frozenset()  # in use, but not yet in the cost

    def plus(self, other: Choice) -> Choice:
        """Return the choice on the boards of both, which have none in common."""
        return Choice(
            self.cost.plus(other.cost),
            tuple(sorted(self.devices + other.devices)),
            self.numa_nodes | other.numa_nodes,
            self.trays | other.trays,
        )


@dataclass
class Board:
    """The listed devices of a board, by their positions in a tray (0: not in a tray)."""

    tray: Tray | None
    chosen: set[int] = field(default_factory=set)  # positions of those chosen by their rank
    candidates: dict[int, int] = field(default_factory=dict)  # positions, by the devices' numbers
    taken: set[int] = field(default_factory=set)  # positions of those not available
    numa_nodes: set[int] = field(default_factory=set)  # of all of them
    taken_numa_nodes: set[int] = field(default_factory=set)  # of those not available

    @property
    def ring(self) -> object:
        """Return a key that is the same for the trays of one Galaxy."""
        return self.tray and (self.tray.card, self.tray.domain)

    def best_choice(self, size: int) -> Choice:
        """Return the best choice of this many candidates, with the cost of `chosen`: 2. above."""
        return min(map(self._choice, combinations(self.candidates, size)))

    def _choice(self, devices: tuple[int, ...]) -> Choice:
        """Return the choice of these candidates, together with those chosen by their rank."""
        # A device that is a whole tray has the position of its first chip, which makes no
        # difference: it has no links inside, and each tray counts as one half.
        positions = self.chosen | {self.candidates[number] for number in devices}
        halves = [half for half in TRAY_HALVES if half & positions and not half & self.taken]
        cost = Cost(
            boards=1,
            whole_boards=not self.taken,
            links=-sum(map(positions.issuperset, TRAY_LINKS)),
            whole_halves=len(halves),
        )
        trays = [self.tray] if self.tray else []
        return Choice(cost, devices, frozenset(self.numa_nodes), frozenset(trays))


def preferred_allocation(
    resource: Resource,
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    forgotten: Collection[str] = (),
) -> list[str]:
    """Return the best `size` of the available IDs; raises RequestError.

    `forgotten`: see HoldBook.forgotten_ids().
    """
    check_replicas(resource, size)
    free = frozenset(available)
    required = frozenset(must_include)
    _check_question(resource, free, required, size)

    chosen: set[str] = set()
    chosen_devices: set[int] = set()
    by_rank = _ids_by_rank(resource, free, required, size, frozenset(forgotten))
    for rank in sorted(by_rank):
        ids = by_rank[rank]
        needed = size - len(chosen)
        if needed == 0:
            break

        # Places make no difference between devices of which an ID is already chosen.
        devices: Sequence[int] = list(ids)[:needed]
        if needed < len(ids) and rank.repeats == 0:
            devices = _best_devices(_boards(resource, free, chosen_devices, ids), needed)

        chosen.update(ids[number] for number in devices)
        chosen_devices.update(devices)
    return [device_id for device_id in resource.devices if device_id in chosen]


def check_replicas(resource: Resource, number: int) -> None:
    """Raise RequestError if a container must not have this many IDs."""
    if resource.max_one_replica and number > 1:
        reason = (
            f"a container can request only 1 shared {resource.name}, not {number} "
            "(fail_requests_greater_than_one is true)"
        )
        raise RequestError(Status.INVALID_ARGUMENT, reason)


def _check_question(resource: Resource, free: DeviceIds, required: DeviceIds, size: int) -> None:
    """Raise RequestError if no choice of this size fits these IDs, or if one is unknown."""
    invalid = Status.INVALID_ARGUMENT

    if unknown := sorted((free | required).difference(resource.devices)):
        raise RequestError(invalid, f"{resource.name} has no device {abbreviate(unknown)}")
    if size < 0:
        raise RequestError(invalid, f"allocation size {size} is negative")

    if missing := sorted(required - free):
        reason = f"must-include device {abbreviate(missing)} is not available"
        raise RequestError(invalid, reason)
    if not len(required) <= size <= len(free):
        devices = f"{len(free)} available devices, {len(required)} of them must-include"
        raise RequestError(invalid, f"cannot choose {size} of {devices}")


def _ids_by_rank(
    resource: Resource,
    free: DeviceIds,
    required: DeviceIds,
    size: int,
    forgotten: DeviceIds,
) -> dict[Rank, dict[int, str]]:
    """Return the IDs of each rank, by the numbers of their devices: 1. above.

    A rank has no two IDs of a device. IDs that cannot be among the first `size` are left out.
    """
    refused = resource.refused
    special = required | refused | forgotten

    found: dict[Rank, dict[int, str]] = defaultdict(dict)
    for number, ids in enumerate(resource.ids_by_device):
        available = [device_id for device_id in ids if device_id in free]
        users = len(ids) - len(available)

        # Of a device, in the order of ranks; most have no special IDs.
        if not special.isdisjoint(available):
            available.sort(key=lambda it: (it not in required, it in refused, it in forgotten))

        for repeats, device_id in enumerate(available[:size]):
            is_optional = device_id not in required
            rank = Rank(is_optional, device_id in refused, device_id in forgotten, repeats, users)
            found[rank][number] = device_id
    return found


def _boards(
    resource: Resource, free: DeviceIds, chosen: Collection[int], candidates: Collection[int]
) -> list[Board]:
    """Return all boards. Chosen devices and candidates are given by their numbers."""
    boards: dict[object, Board] = {}
    for number, ids in enumerate(resource.ids_by_device):
        device = resource.devices[ids[0]]
        place = device.place
        numa_nodes = device.numa_nodes or (UNKNOWN_NUMA_NODE,)
        board = boards.setdefault(place.board, Board(place.tray))
        board.numa_nodes.update(numa_nodes)

        if number in chosen:
            board.chosen.add(place.position)
        elif number in candidates:
            board.candidates[number] = place.position
        elif free.isdisjoint(ids):
            board.taken.add(place.position)
            board.taken_numa_nodes.update(numa_nodes)
    return list(boards.values())


def _best_devices(boards: Sequence[Board], size: int) -> tuple[int, ...]:
    """Return the numbers of the candidates of the best choice of this size: 3. to 5. above."""
    taken_nodes = set[int]().union(*(board.taken_numa_nodes for board in boards))

    # Trays of a ring are adjacent, so that the ring ends with the last of them. Other boards on
    # the same NUMA nodes are adjacent to keep the number of choices low.
    boards = [board for board in boards if board.chosen or board.candidates]
    boards.sort(key=lambda board: (board.tray or (), sorted(board.numa_nodes)))
    max_boards = _fewest_boards(boards, size)[size]

    choices = [Choice()]
    for index, board in enumerate(boards, 1):
        later = boards[index:]
        ended_nodes = board.numa_nodes.difference(*(each.numa_nodes for each in later))
        is_end_of_ring = not later or later[0].ring != board.ring

        best: dict[tuple[object, ...], Choice] = {}
        for choice in _extended(choices, board, later, size, max_boards):
            nodes = choice.numa_nodes & ended_nodes
            trays = choice.trays if is_end_of_ring else frozenset()
            if nodes or trays:
                choice = _counted(choice, nodes, trays, taken_nodes)

            key = len(choice.devices), choice.numa_nodes, choice.trays
            if key not in best or choice < best[key]:
                best[key] = choice
        choices = list(best.values())

    # After the last board all nodes and trays are counted, and all choices have `size` candidates.
    (choice,) = choices
    return choice.devices


def _fewest_boards(boards: Sequence[Board], size: int) -> list[float]:
    """Return for 0, 1, 2, … `size` chosen candidates the lowest number of boards in use.

    It is infinite if the boards have fewer candidates.
    """
    in_use = [len(board.candidates) for board in boards if board.chosen]  # by its rank, anyway
    others = [len(board.candidates) for board in boards if not board.chosen]

    # Each further board that is taken into use is the one with the most candidates.
    fewest: list[float] = [len(in_use)] * (1 + sum(in_use))
    for number, room in enumerate(sorted(others, reverse=True), len(in_use) + 1):
        fewest += [number] * room
    return fewest + [inf] * size  # at least as many as are asked for


def _extended(
    choices: Iterable[Choice],
    board: Board,
    later: Sequence[Board],
    size: int,
    max_boards: float,
) -> Iterator[Choice]:
    """Yield these choices with each number of candidates of one more board.

    Those that cannot be completed to `size` on at most `max_boards` are left out.
    """
    fewest_later = _fewest_boards(later, size)
    for own_size in range(min(len(board.candidates), size) + 1):
        is_used = bool(own_size or board.chosen)
        fitting = []
        for choice in choices:
            left = size - own_size - len(choice.devices)  # for the later boards
            if left < 0:
                continue
            boards_in_all = choice.cost.boards + is_used + fewest_later[left]
            if boards_in_all <= max_boards:
                fitting.append(choice)

        if not is_used:
            yield from fitting
        elif fitting:
            best = board.best_choice(own_size)
            yield from map(best.plus, fitting)


def _counted(
    choice: Choice, nodes: frozenset[int], trays: frozenset[Tray], taken_nodes: set[int]
) -> Choice:
    """Return the choice with these NUMA nodes, and these trays of one ring, in its cost."""
    groups = 0
    if trays:
        groups = 2 if {tray.bus for tray in trays} in OPPOSITE_TRAYS else 1

    whole_nodes = nodes - taken_nodes
    cost = Cost(numa_nodes=len(nodes), whole_numa_nodes=len(whole_nodes), tray_groups=groups)
    return Choice(
        choice.cost.plus(cost), choice.devices, choice.numa_nodes - nodes, choice.trays - trays
    )


# ==== CONTAINER EDITS: from a request for devices. Pure ===========================================

Containers = Sequence[Sequence[str]]  # the IDs that each container requests
Edits = pb.ContainerAllocateResponse


def check_request(resource: Resource, containers: Containers) -> None:
    """Raise RequestError if these IDs cannot be allocated."""
    invalid = Status.INVALID_ARGUMENT
    if not containers:
        raise RequestError(invalid, "the request names no container")
    for ids in containers:
        if not ids:
            raise RequestError(invalid, "a container requests no devices")
        check_replicas(resource, len(ids))

    for device_id, times in Counter(chain(*containers)).items():
        device = resource.devices.get(device_id)
        if device is None:
            reason = f"{resource.name} has no device {device_id[:63]!r}"
            raise RequestError(Status.NOT_FOUND, reason)
        if times > 1:
            raise RequestError(invalid, f"duplicate device {device_id!r}")
        if device.reason:
            raise RequestError(Status.FAILED_PRECONDITION, f"device {device_id}: {device.reason}")
        if device.is_reserved:
            reason = f"device {device_id} is reserved for the pod that holds it"
            raise RequestError(Status.FAILED_PRECONDITION, reason)


def container_edits(
    chips: Chips, links: Mapping[str, str], settings: Settings, mounts: Iterable[Mount], name: str
) -> Edits:
    """Return the edits for a container with exactly these chips.

    `links`: udev's, by address; `name`: of this answer, see Hold.
    """
    chips = sorted(chips, key=lambda chip: address_numbers(chip.bdf))
    addresses = ",".join(chip.bdf for chip in chips)
    edits = Edits(envs={ADDRESSES: addresses}, annotations={ANSWER_NAME: name})

    # tt-umd reads an integer as an index into the devices inside the container, so the host's
    # device number would be wrong. Before v0.9.3 it read the device number, not an index.
    if settings.visible_devices == "bdf":
        edits.envs["TT_VISIBLE_DEVICES"] = addresses
    elif settings.visible_devices == "index":
        edits.envs["TT_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(len(chips)))

    for chip in chips:
        if settings.device_list_strategy == "cdi":
            edits.cdi_devices.add(name=f"{settings.resource_domain}/device={chip.bdf}")
        else:
            # Under the host's number, after which tt-umd names its locks and hugepage files.
            edits.devices.add(
                container_path=f"/dev/tenstorrent/{chip.function.ordinal}",
                host_path=links.get(chip.bdf, chip.function.path),
                permissions="rw",
            )

    for mount in mounts:
        edits.mounts.add(
            host_path=mount.host, container_path=mount.container, read_only=mount.read_only
        )
    return edits


# ==== CDI AND LABELS: descriptions of the devices for others. Pure ================================

CDI_FILE = "tenstorrent.com-device.json"
LABELS_FILE = "tt-device-plugin"


def cdi_spec(
    functions: Iterable[PciFunction],
    settings: Settings,
    mounts: Iterable[Mount],
    excluded: Collection[str] = (),
) -> str | None:
    """Return a CDI file (spec 0.5.0, which refuses links as device nodes); None without chips.

    `excluded` chips have an entry by address, but are not in "all".
    """
    nodes = {}
    for function in functions:
        path = f"/dev/tenstorrent/{function.ordinal}"
        nodes[function.bdf] = [{"path": path, "hostPath": function.path, "permissions": "rw"}]
    if not nodes:
        return None

    offered = [its_nodes for bdf, its_nodes in nodes.items() if bdf not in excluded]
    if offered:
        nodes["all"] = list(chain(*offered))

    devices = []
    for name, device_nodes in nodes.items():
        devices.append({"name": name, "containerEdits": {"deviceNodes": device_nodes}})
    kind = f"{settings.resource_domain}/device"
    spec: dict[str, object] = {"cdiVersion": "0.5.0", "kind": kind, "devices": devices}

    binds = []
    for mount in mounts:
        options = ["rbind", "ro" if mount.read_only else "rw"]
        binds.append({"hostPath": mount.host, "containerPath": mount.container, "options": options})
    if binds:
        spec["containerEdits"] = {"mounts": binds}
    return json.dumps(spec)  # with an indent it would take ten times as long


def cdi_nodes(spec: str) -> dict[str, str]:
    """Return the host's device file of each device in a CDI file of cdi_spec().

    "all" is left out, and the names are addresses then. Raises ValueError for another text.
    """
    try:
        nodes = {}
        for device in json.loads(spec)["devices"]:
            nodes[str(device["name"])] = device["containerEdits"]["deviceNodes"][0]["hostPath"]
        nodes.pop("all", None)
        return nodes
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def feature_file(
    resources: Iterable[Resource], chips: Chips, settings: Settings, driver: str | None
) -> str:
    """Return labels of existing devices, for node-feature-discovery's local source."""
    present = [chip for chip in chips if chip.is_present]
    labels = {f"arch.{chip.function.arch}": "true" for chip in present}
    for resource in resources:
        for key, value in _resource_labels(resource).items():
            labels[f"{resource.short_name}.{key}"] = value
    labels |= _version_labels("driver", driver or "")
    labels["firmware.version"] = common_value(chip.identity.firmware for chip in present)
    labels["plugin.version"] = __version__

    lines = []
    for key, value in sorted(labels.items()):
        # Kubernetes' limits: 63 characters, alphanumeric at both ends.
        value = re.sub(r"[^A-Za-z0-9._-]+", "_", value)[:63].strip("._-")
        if value and len(key) <= 63:
            lines.append(f"{settings.resource_domain}/{key}={value}\n")
    return "".join(lines)


def _resource_labels(resource: Resource) -> dict[str, str]:
    """Return the labels of a resource's existing devices, without its name in the keys."""
    unique = resource.unique_devices
    devices = [each for each in unique if any(chip.is_present for chip in each.chips)]
    chips = [chip for device in devices for chip in device.chips if chip.is_present]

    labels = _version_labels("firmware", common_value(chip.identity.firmware for chip in chips))
    labels["count"] = str(len(devices))
    labels["replicas"] = str(resource.replicas or 1)
    labels["sharing"] = "true" if resource.replicas else "false"

    # A shared resource that has kept its name is told apart by its product.
    product = common_value(chip.board_type for chip in chips)
    if product and resource.replicas and resource.short_name == resource.base_name:
        product += "-SHARED"
    labels["product"] = product

    # One value for all devices, or none.
    complete = [device for device in devices if not device.incomplete]
    memory = {sum(chip.memory for chip in device.chips) for device in complete}
    if len(memory) == 1 and memory != {0}:
        labels["memory"] = str(memory.pop())

    # A device can be one chip of its board, so whole boards are counted by their chips.
    numbers: Counter[object] = Counter()
    for device in devices:
        numbers[device.place.board] += sum(chip.is_present for chip in device.chips)
    sizes = {device.place.board: device.place.board_size for device in devices}
    whole_boards = [board for board, number in numbers.items() if number == sizes[board]]
    labels["boards"] = str(len(whole_boards))

    if numa_nodes := {chip.function.numa_node for chip in chips} - {None}:
        labels["numa-nodes"] = str(len(numa_nodes))
    return labels


def common_value(values: Iterable[str | None]) -> str:
    """Return the value that all have, "mixed" if they differ, "" without any."""
    found = {value for value in values if value}
    return "mixed" if len(found) > 1 else "".join(found)


def _version_labels(subject: str, version: str) -> dict[str, str]:
    """Return the labels of a version: the whole, and its first two numbers."""
    labels = {f"{subject}.version": version}
    numbers = re.findall(r"\d+", version)
    for part, number in zip(("major", "minor"), numbers, strict=False):
        labels[f"{subject}.{part}"] = number
    return labels


# ==== DECISION: the desired state. Pure ===========================================================


class Observation(NamedTuple):
    """Everything that decisions depend on."""

    settings: Settings
    chips: Mapping[str, Chip]  # by PCI address
    unsupported: tuple[str, ...]  # Tenstorrent functions that are not supported
    driver: str | None  # see driver_version()
    holds: tuple[Hold, ...]  # the current ones
    names: Mapping[str, str]  # of pods, "namespace/name" by UID
    checkpoint_problem: str | None  # why the checkpoint cannot be used
    mounts: Mounts


@dataclass(frozen=True)
class Decision:
    """The desired state. REPORTS computes the texts about it, when somebody wants them."""

    observation: Observation
    chips: Mapping[str, Chip]  # also chips that only a hold has, in the order of addresses
    holds: Sequence[Hold]  # with the chips of other plugins' holds
    offer: Offer  # by the configuration alone
    resources: Resources  # as advertised, by name

    @cached_property
    def devices(self) -> dict[str, tuple[Resource, Device]]:
        """Return each chip's resource and device, preferring a configured to a reserved one."""
        found: dict[str, tuple[Resource, Device]] = {}
        for resource in self.resources.values():
            for device in resource.unique_devices:
                for chip in device.chips:
                    if chip.bdf not in found or not device.is_reserved:
                        found[chip.bdf] = (resource, device)
        return found

    @cached_property
    def held_chips(self) -> ChipAddresses:
        return frozenset(chain(*(hold.chips for hold in self.holds)))

    def resource(self, name: str) -> Resource:
        """Return an advertised resource; one without devices if there is none of this name."""
        return self.resources.get(name) or Resource(name, {})

    def name_of_pod(self, hold: Hold) -> str:
        return name_of_pod(hold, self.observation.names)

    @property
    def depends_on_holds(self) -> bool:
        """Return whether a hold reserves or withholds an ID, so that its end changes the list."""
        return self.resources is not self.offer.resources  # see the end of advertise()

    def is_out_of_service(self, bdf: str) -> bool:
        """Return whether a chip is excluded and not held, so that its faults do not matter."""
        return bdf in self.offer.excluded and bdf not in self.held_chips


def decide(observation: Observation, former: Decision | None = None) -> Decision:
    """Return the desired state. `former` is the last one, whose offer is used if it is the same."""
    chips = dict(observation.chips)
    holds = list(with_chips(observation.holds, chips))
    for hold in holds:
        # A chip that a pod was given was present once.
        for bdf in hold.chips - chips.keys():
            chips[bdf] = Chip(PciFunction(bdf, on_bus=False), was_present=True)
    chips = {bdf: chips[bdf] for bdf in sorted(chips, key=address_numbers)}

    # Chips rarely change, as a Chip has no measured values.
    settings = observation.settings
    if former and former.observation.settings == settings and former.chips == chips:
        offer = former.offer
    else:
        offer = make_offer(chips, settings)

    advertised = advertise(offer, chips, holds, observation.names)
    # Holds change with each pod, their IDs' devices rarely: keep the former resources, as they have
    # their messages for the kubelet and all else that they have computed already.
    if former and former.offer is offer and former.resources == advertised:
        advertised = former.resources
    return Decision(observation, chips, holds, offer, advertised)


# ==== REPORTS: log, labels, metrics, status, view. Pure ===========================================

LogLines = Iterator[tuple[int, str]]  # with levels
UNSUPPORTED = "a Tenstorrent card of a generation that this program does not know"


class Condition(NamedTuple):
    """Something that lasts. The log reports that it begins, changes its kind, and ends.

    New numbers in its text are not reported.
    """

    level: int
    begin: str  # text for the log, without the subject
    end: str = ""  # likewise; empty: not reported
    kind: str = ""
    detail: str = ""  # another one is reported, too, unless it is empty

    def is_news_after(self, last: Condition) -> bool:
        return self.kind != last.kind or self.detail not in ("", last.detail)


Conditions = dict[str, Condition]  # of one subject, by what they are
Subject = tuple[str, Conditions]  # with how its lines begin


def changes(former: Decision | None, decision: Decision) -> LogLines:
    """Yield log lines about all changes; without a former decision, about everything.

    If a subject has gone, such as a chip that is excluded, the end of its conditions is unknown.
    """
    if former and _has_same_subjects(former, decision):
        return

    before = _subjects(former) if former else {}
    for key, (name, conditions) in _subjects(decision).items():
        _, last = before.get(key, ("", {}))
        for what, condition in conditions.items():
            if what not in last or condition.is_news_after(last[what]):
                yield condition.level, f"{name}{condition.begin}"
        for what, condition in last.items():
            if condition.end and what not in conditions:
                yield logging.INFO, f"{name}{condition.end}"


def _has_same_subjects(one: Decision, other: Decision) -> bool:
    """Return whether no condition can differ, as mostly: then only a hold has come or gone."""
    if one.offer is not other.offer or one.resources is not other.resources:
        return False
    if one.observation.unsupported != other.observation.unsupported:
        return False
    # A hold takes an excluded chip back into service.
    excluded = other.offer.excluded
    return all(one.is_out_of_service(bdf) == other.is_out_of_service(bdf) for bdf in excluded)


def _subjects(decision: Decision) -> dict[str, Subject]:
    """Return the chips, the devices and the node, with all their conditions."""
    found: dict[str, Subject] = {}
    for bdf, chip in decision.chips.items():
        if is_logged(decision, bdf):
            found[bdf] = (f"{chip.display_name}: ", _conditions_of_chip(chip))
        elif chip.function.file_fault and not decision.is_out_of_service(bdf):
            text = f"is not advertised: {chip.reason}"
            conditions = {"file": Condition(logging.WARNING, text)}
            found[f"{bdf}, not listed"] = (f"{chip.display_name} ", conditions)

    for name, resource in decision.resources.items():
        for device in resource.unique_devices:
            key = f"{name} {device.id}"
            # A reserved device, which has no conditions, can have the ID of another one.
            _, conditions = found.setdefault(key, (f"{key} is ", {}))
            conditions |= _conditions_of_device(device)
    found["node"] = ("", _conditions_of_node(decision))
    return found


def _conditions_of_chip(chip: Chip) -> Conditions:
    """Return the conditions of a chip of which the log has the faults."""
    found = {}
    if chip.is_present:
        introduction = _introduction(chip)
        found["found"] = Condition(logging.INFO, f"found {introduction}", kind=introduction)

    if chip.fault:
        found["fault"] = Condition(
            logging.WARNING,
            f"unhealthy: {chip.reason}",
            "healthy again",
            kind=chip.fault.kind.value,
            # If the driver is unloaded, the kind of an absent chip's fault stays, but the command
            # that helps is another one.
            detail="" if chip.is_present else str(chip.reason),
        )
    if chip.is_throttling:
        begin = "throttling: it has reached its temperature limit"
        found["throttling"] = Condition(logging.INFO, begin, "no longer throttling")
    return found


def _conditions_of_device(device: Device) -> Conditions:
    """Return why a device is unhealthy although its chips may be healthy."""
    if device.incomplete:
        text = f"unhealthy: {device.incomplete}"
        return {"problem": Condition(logging.WARNING, text, "complete", "incomplete")}
    if device.withheld:
        text = f"withheld: {device.withheld}"
        return {"problem": Condition(logging.WARNING, text, "no longer withheld", "withheld")}
    return {}


def _conditions_of_node(decision: Decision) -> Conditions:
    """Return the conditions of chips and settings that are not those of devices."""
    found = {}
    for bdf in sorted(decision.offer.excluded):
        begin = f"{decision.chips[bdf].display_name} is excluded: not offered to pods"
        end = f"{bdf} is no longer excluded"
        found[f"{bdf} is excluded"] = Condition(logging.INFO, begin, end)
    for text in decision.offer.without_effect:
        found[text] = Condition(logging.INFO, text)
    for bdf in decision.observation.unsupported:
        text = f"{bdf} is not supported: {UNSUPPORTED}"
        found[text] = Condition(logging.WARNING, text)
    return found


def is_logged(decision: Decision, bdf: str) -> bool:
    """Return whether the log has a chip's faults: it is a device, or waits for its board."""
    is_listed = decision.chips[bdf].is_listed or bdf in decision.devices
    return is_listed and not decision.is_out_of_service(bdf)


def _introduction(chip: Chip) -> str:
    """Return a chip's device file and identity for the log."""
    identity = chip.identity
    facts = {"serial": identity.serial, "ASIC": identity.asic_id, "firmware": identity.firmware}
    known = [f"{name} {value}" for name, value in facts.items() if value]
    return ", ".join([chip.function.path, *known])


def missing_chips(decision: Decision) -> Iterator[str]:
    """Yield which boards are not whole: 1 of 2 chips of a p300, 31 of 32 of a Galaxy.

    An excluded chip is not missing. A chip whose board is not known counts for any board, unless it
    has left the bus, as those of a board that was moved to another slot.
    """
    whole: dict[str, int] = {}  # number of chips of the whole, by the name of a board or Galaxy
    found = defaultdict(list)  # addresses of the chips found, by that name
    unknown = 0  # chips on the bus whose board is not known
    for bdf, place in places(decision.chips.values()).items():
        if place.tray:
            name, size = f"the Galaxy in PCI domain {place.tray.domain:04x}", GALAXY_SIZE
        elif place.board_id:
            name, size = f"the board with serial {place.board_id}", place.board_size
        else:
            unknown += decision.chips[bdf].function.on_bus
            continue
        whole[name] = size
        found[name].append(bdf)

    for name, size in whole.items():
        number = len(found[name])
        is_in_service = not all(map(decision.is_out_of_service, found[name]))
        if number + unknown < size and is_in_service:
            yield f"only {number} of {size} chips of {name} found"


def driver_problem(decision: Decision) -> Reason | None:
    """Return how many functions on the bus have no driver, and why."""
    driver = decision.observation.driver
    unbound = []
    for bdf, chip in decision.chips.items():
        has_no_driver = chip.function.on_bus and chip.function.driver is None
        # With a driver, a listed chip is in the summary of its resource already.
        has_own_line = driver is not None and chip.is_listed
        if has_no_driver and not has_own_line and not decision.is_out_of_service(bdf):
            unbound.append(chip)
    if not unbound:
        return None

    functions = pluralize(len(unbound), "Tenstorrent PCI function")
    if driver is None:
        return Reason(f"driver not loaded, {functions}", LOAD_DRIVER)
    return Reason(f"{functions} without a driver; {unbound[0].bdf}: {unbound[0].reason}")


User = dict[str, str]  # "namespace", "pod" (else its UID) and "container"


def users(decision: Decision) -> dict[str, list[User]]:
    """Return the containers that hold each chip, by PCI address."""
    found: dict[str, list[User]] = defaultdict(list)
    for hold in decision.holds:
        if hold.pod:
            name = decision.observation.names.get(hold.pod, hold.pod)
            namespace, _, pod = name.rpartition("/")
            user = {"namespace": namespace, "pod": pod, "container": hold.container}
            for bdf in hold.chips:
                # A pod that is admitted again has another hold while the former one's runs.
                if user not in found[bdf]:
                    found[bdf].append(user)
    return found


def cdi_file(decision: Decision) -> str | None:
    """Return the text of the CDI file: the chips that have a usable device file."""
    functions = []
    for chip in decision.chips.values():
        if chip.is_listed and chip.is_present and not chip.function.file_fault:
            functions.append(chip.function)
    observation = decision.observation
    return cdi_spec(functions, observation.settings, observation.mounts, decision.offer.excluded)


def labels_file(decision: Decision) -> str:
    """Return the text of the feature file: of the devices that the configuration gives."""
    observation, offer = decision.observation, decision.offer
    chips = []
    for bdf, chip in decision.chips.items():
        if chip.is_listed and bdf not in offer.excluded:
            chips.append(chip)
    resources = offer.resources.values()
    return feature_file(resources, chips, observation.settings, observation.driver)


def summary(resource: Resource) -> str:
    """Return a resource's part of the status, with its first unhealthy device."""
    devices, unhealthy = resource.unique_devices, resource.unhealthy
    replicas = f", {resource.replicas} replicas each" if resource.replicas else ""
    healthy = len(devices) - len(unhealthy)
    text = f"{len(devices)} × {resource.name}{replicas}, {healthy} healthy"
    if not unhealthy:
        return text
    return f"{text} ({unhealthy[0]}{', …' if len(unhealthy) > 1 else ''})"


class Phase(Enum):
    """How far the registration of a resource is."""

    STARTING = "starting"  # the first attempt has not ended
    WAITING = "waiting"  # for a kubelet
    REGISTERED = "registered"
    LOST = "lost"  # which is not a failure: the next attempt follows at once
    FAILED = "failed"  # the next attempt follows after a pause


class Registration(NamedTuple):
    """The state of a resource's registration with the kubelet."""

    phase: Phase = Phase.STARTING
    text: str = "waiting for the kubelet's answer"  # for status and log
    successes: int = 0  # registrations since the daemon's start


REGISTERED_TEXT = "registered with kubelet"
Registrations = Mapping[str, Registration]  # by resource


class Samples:
    """Samples of metrics with a common prefix."""

    def __init__(self, prefix: str, helps: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._helps = helps
        self._series: dict[str, dict[str, float]] = defaultdict(dict)  # value by labels, by metric

    def add(self, name: str, value: float | None, **labels: object) -> None:
        """Add a sample, unless it has no value. A label that is None is empty."""
        if value is not None:
            text = ",".join(_sample_label(key, each) for key, each in labels.items())
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
def _sample_label(key: str, value: object) -> str:
    """Return a label in Prometheus' text format."""
    text = "" if value is None else str(value)
    escaped = text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{escaped}"'


CHIP_METRICS = {
    "info": "Identity of a chip; always 1.",
    "healthy": "Whether a chip is healthy.",
    "fault": "Fault of a chip by kind; 1 while it lasts.",
    "temperature_celsius": "Temperature in degrees Celsius at the last poll.",
    "temperature_limit_celsius": "Temperature in degrees Celsius at which a chip throttles.",
    "thermal_trips_total": "Thermal trips since power-on, counted by the firmware.",
    **{sensor.metric: sensor.help for sensor in SENSORS},
    "open": "Processes that have the device file open.",
    "allocated": "Chip is allocated to this container; always 1.",
}


def chip_metrics(decision: Decision, states: Mapping[str, ChipState]) -> str:
    """Return the metrics of chips that were present at any time since boot."""
    samples = Samples("tt_device_", CHIP_METRICS)
    for bdf, chip in decision.chips.items():
        if not chip.was_present:
            continue

        resource, _ = decision.devices.get(bdf, (None, None))
        is_out_of_service = decision.is_out_of_service(bdf)
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
            excluded="true" if is_out_of_service else "false",
        )
        if not is_out_of_service:
            add("healthy", 0 if chip.fault else 1)
            if chip.fault:
                add("fault", 1, kind=chip.fault.kind.value)

        state = states.get(bdf)
        if state and state.telemetry:
            add("temperature_celsius", state.telemetry.temperature)
            add("temperature_limit_celsius", state.telemetry.throttles_at)
            add("thermal_trips_total", state.telemetry.trips)
            for sensor in SENSORS:
                add(sensor.metric, state.sensors.get(sensor.attribute), **sensor.labels)
            if state.processes is not None:
                add("open", len(state.processes))

    for bdf, containers in sorted(users(decision).items()):
        for user in containers:
            samples.add(
                "allocated",
                1,
                device=bdf,
                pod_namespace=user["namespace"],
                pod_name=user["pod"],
                container_name=user["container"],
            )
    return samples.text()


Counts = Counter[tuple[str, str]]  # of Allocate requests, by resource and result
PLUGIN_METRICS = {
    "driver_info": "Version of the loaded driver; always 1.",
    "pci_functions": "Tenstorrent PCI functions in service, by bound driver.",
    "resource_devices": "Advertised device IDs by health: a shared device counts once per replica.",
    "kubelet_registered": "Whether the resource is registered with the kubelet.",
    "kubelet_registrations_total": "Successful registrations with the kubelet.",
    "allocations_total": "Allocate requests by result.",
    "plugin_info": "Version of tt-device-plugin; always 1.",
    "plugin_start_time_seconds": "Start time of the daemon as Unix time.",
}


def plugin_metrics(
    decision: Decision, registrations: Registrations, counts: Counts, started: float
) -> str:
    """Return the metrics of node and daemon, which has started at this Unix time."""
    samples = Samples("tt_", PLUGIN_METRICS)
    if decision.observation.driver:
        samples.add("driver_info", 1, version=decision.observation.driver)

    drivers = ["unsupported"] * len(decision.observation.unsupported)
    for bdf, chip in decision.chips.items():
        if chip.function.on_bus and not decision.is_out_of_service(bdf):
            drivers.append(chip.function.driver or "")
    for driver, number in Counter(drivers).items():
        samples.add("pci_functions", number, driver=driver)

    for name, resource in decision.resources.items():
        add = partial(samples.add, resource=name)
        unhealthy = sum(1 for device in resource.devices.values() if device.reason)
        add("resource_devices", len(resource.devices) - unhealthy, health="healthy")
        add("resource_devices", unhealthy, health="unhealthy")

        registration = registrations.get(name, Registration())
        add("kubelet_registered", 1 if registration.phase is Phase.REGISTERED else 0)
        add("kubelet_registrations_total", registration.successes)

        # Prometheus' advice: a counter exists from the start, so that its first step is seen.
        for result in ("granted", "refused"):
            add("allocations_total", counts.get((name, result), 0), result=result)

    samples.add("plugin_info", 1, version=__version__)
    samples.add("plugin_start_time_seconds", started)
    return samples.text()


def status_line(
    decision: Decision, registrations: Registrations, problems: Iterable[str | None] = ()
) -> str:
    """Return a summary for operators, which systemd shows as the service's status.

    `problems`: further parts for its end; None is left out.
    """
    parts = [summary(resource) for resource in decision.resources.values()]
    if problem := driver_problem(decision):
        parts.insert(0, str(problem))

    if not parts and decision.chips:
        chips = pluralize(len(decision.chips), "chip")
        parts = [f"{chips}, but no device to offer; for the reason, run: tt-device-plugin list"]
    elif not parts and not decision.observation.unsupported:
        parts = ["no Tenstorrent device on this node; waiting for one"]
    parts += [f"{bdf} is not supported" for bdf in decision.observation.unsupported]

    # One text for all resources. If the texts differ, unregistered resources are named.
    texts = {registration.text for registration in registrations.values()}
    if len(texts) > 1:
        texts = set()
        for name, registration in registrations.items():
            if registration.phase is not Phase.REGISTERED:
                texts.add(f"{name} {registration.text}")

    parts += sorted(texts)
    parts += filter(None, [decision.observation.checkpoint_problem, *problems])
    return "; ".join(parts)


UNREADABLE_HOST = "node"  # a subject of Service.problems: the host cannot be read at the moment


class Service(NamedTuple):
    """What only the running daemon knows."""

    status: str
    registrations: Registrations
    rejected: str | None  # why the configuration on disk is not in force
    files: Mapping[str, str]  # why files that it writes are not as they should be, by path
    problems: Mapping[str, Reason]  # of the host, by subject
    resisting: Mapping[str, Reason]  # why directories cannot be emptied, by path


PROGRAM = "tt-device-plugin"  # by which `ask` recognises a view


def view_of_node(
    decision: Decision,
    states: Mapping[str, ChipState],
    service: Service,
    *,
    knows_pods: bool,
    unreadable: Sequence[str],
    booted_at: float,
) -> Json:
    """Return what `list`, `check` and `fix` read.

    `knows_pods`: a checkpoint was read; `unreadable`: entries of it; `booted_at`: Unix time of the
    boot, by the present clock.
    """
    settings = decision.observation.settings
    used_by = users(decision)
    chips = []
    for bdf, chip in decision.chips.items():
        state = states.get(bdf) or ChipState(chip)  # not seen since boot: only a hold has it
        pods = used_by.get(bdf, [])
        since = None if state.since is None else booted_at + state.since
        chips.append(_chip_row(decision, chip, state, pods if pods or knows_pods else None, since))

    resources = []
    for name in decision.resources:
        registration = service.registrations.get(name, Registration())
        is_registered = registration.phase is Phase.REGISTERED
        row = {"name": name, "is_registered": is_registered, "state": registration.text}
        resources.append(row)

    problems = [*_problems(decision, service)]
    for entry in unreadable:
        text = f"{CHECKPOINT}: the entry of {entry} cannot be read: its chips are not protected"
        problems.append(_problem("warn", "kubelet", text))
    return {
        "program": PROGRAM,
        "version": __version__,
        "status": service.status,
        "settings": asdict(settings),
        "rejected": service.rejected,
        "driver": decision.observation.driver,
        "unsupported": decision.observation.unsupported,
        "chips": chips,
        "resources": resources,
        "problems": problems,
    }


def _problem(level: str, subject: str, problem: str, command: str = "", kind: str = "") -> Json:
    return {
        "level": level,
        "subject": subject,
        "kind": kind,
        "problem": problem,
        "command": command,
    }


def _problems(decision: Decision, service: Service) -> Iterator[Json]:
    """Yield all that is known not to be right."""
    settings = decision.observation.settings
    for bdf, chip in decision.chips.items():
        if chip.fault and chip.reason and not decision.is_out_of_service(bdf):
            yield _problem("FAIL", bdf, *chip.reason, chip.fault.kind.value)
        elif decision.is_out_of_service(bdf):
            continue
        elif settings.unit == "board" and bdf in decision.offer.unplaced:
            text = f"not advertised: {decision.offer.unplaced[bdf]}"
            yield _problem("warn", bdf, text, kind="unplaced")

    for name, resource in decision.resources.items():
        for device in resource.unique_devices:
            if device.incomplete:
                yield _problem("FAIL", device.id, device.incomplete, kind="incomplete")
            if device.withheld:
                text = f"withheld from {name}: {device.withheld}"
                yield _problem("warn", device.id, text, kind="withheld")
        registration = service.registrations.get(name, Registration())
        is_kubelet_there = exists(f"{settings.device_plugin_dir}/{KUBELET_SOCKET}")
        if is_kubelet_there and registration.phase is not Phase.REGISTERED:
            yield _problem("FAIL", name, f"not registered: {registration.text}")

    if problem := driver_problem(decision):
        yield _problem("FAIL", "driver", *problem)
    for text in missing_chips(decision):
        yield _problem("warn", "chips", text)
    if text := decision.observation.checkpoint_problem or "":
        yield _problem("warn", "kubelet", text)
    for subject, reason in service.problems.items():
        kind = "unreadable" if subject == UNREADABLE_HOST else ""
        yield _problem("FAIL", subject, *reason, kind)
    for path, text in service.files.items():
        if isdir(dirname(path)):
            restart = text.endswith(os.strerror(errno.EROFS))
            command = "systemctl restart tt-device-plugin" if restart else ""
            yield _problem("warn", "files", f"{path} {text}", command)
    for path, reason in service.resisting.items():
        yield _problem("warn", "directories", f"{path} cannot be emptied: {reason[0]}", reason[1])


def _chip_row(
    decision: Decision,
    chip: Chip,
    state: ChipState,
    pods: Sequence[User] | None,
    since: float | None,
) -> Json:
    """Return a chip as `list --json` shows it.

    `pods`: None if they are unknown; `since`: Unix time at which its fault began.
    """
    function = chip.function
    resource, device = decision.devices.get(chip.bdf, (None, None))
    in_service = not decision.is_out_of_service(chip.bdf)
    began = time.gmtime(since) if in_service and since is not None else None

    return {
        "id": device.id if device else None,
        "index": function.ordinal,
        "path": function.path if chip.is_present and not function.file_fault else None,
        "bdf": chip.bdf,
        "card": chip.card_type,
        "board": chip.board_type if chip.card_type else None,
        "arch": function.arch,
        "serial": chip.identity.serial,
        "asic_id": chip.identity.asic_id,
        "numa_node": function.numa_node,
        "firmware": chip.identity.firmware,
        "temperature": state.telemetry.temperature if state.telemetry else None,
        "power": state.sensors.get("power1_input"),
        # Faults of a chip that is out of service do not matter.
        "healthy": chip.fault is None if in_service else None,
        "reason": str(chip.reason) if chip.reason and in_service else None,
        "withheld": device.holder if device else None,
        "resource": resource.name if resource else None,
        "replicas": resource.replicas if resource else 0,
        "pods": pods,
        "processes": _present_processes(chip, state),
        "excluded": chip.bdf in decision.offer.excluded,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", began) if began else None,
    }


def _present_processes(chip: Chip, state: ChipState) -> Sequence[ProcessRow] | None:
    """Return the processes that use a chip, by its device file; None if they are unknown."""
    if chip.function.driver not in (None, DRIVER):
        return None  # a virtual machine may use it
    return state.processes if chip.is_present else ()


# ==== THREADS: telemetry is read off the loop, as the driver can block a read for ten seconds =====

SLOW_AFTER = 0.1  # seconds after which the other chips no longer wait for a read
Wake = Callable[[], None]  # makes the loop take a turn
ReadChip = Callable[[PciFunction], Reading]


@contextmanager
def log_and_continue(subject: str) -> Iterator[None]:
    """Log any error: the boundary at which the daemon survives its own mistakes."""
    try:
        yield
    except Exception:
        log.exception("internal error (%s); continuing", subject)


class ReadState(Enum):
    """How long a read of a chip that has not ended has taken so far."""

    RUNNING = 1
    SLOW = 2  # longer than SLOW_AFTER: neither other chips nor READY wait for it
    BLOCKED = 3  # longer than READ_TIMEOUT: the chip is unhealthy until the read ends


def _take(waiting: deque[PciFunction]) -> Iterator[PciFunction]:
    """Yield the chips that wait, until none is left; two threads can take from one deque."""
    # popleft() is atomic, but a test before it could be out of date.
    with suppress(IndexError):
        while True:
            yield waiting.popleft()


class TelemetryReaders:
    """Reads chips on threads, never a chip on two at once.

    The driver answers within microseconds, or blocks. So one thread reads all chips of a poll in
    turn: threads that contend for the interpreter take several times the processor time. If it has
    not ended after SLOW_AFTER, a read is slow, and each chip that waits behind it gets a thread of
    its own. A thread ends when no chip waits. Threads share nothing but the chips that wait and the
    results.
    """

    def __init__(self, wake: Wake, read: Callable[..., Reading] = read_chip) -> None:
        self._wake = wake
        self._read = read
        self._since: dict[str, float] = {}  # when each read began, by address, until collect()
        self._skipped: set[str] = set()  # addresses of chips that were submitted during a read
        self._results = queue.SimpleQueue[tuple[str, Reading | OSError | None]]()

    def submit(
        self, functions: Iterable[PciFunction], *, is_poll: bool, settings: Settings | None = None
    ) -> None:
        """Read these chips, see read_chip(), unless they are being read: see take_skipped()."""
        waiting = deque[PciFunction]()
        for function in functions:
            if function.bdf in self._since:
                self._skipped.add(function.bdf)
            else:
                self._since[function.bdf] = monotonic()
                waiting.append(function)

        if waiting:
            read = partial(self._read, is_poll=is_poll, settings=settings)
            # Not during this turn of the loop, which would wait: Python runs one thread at a time.
            asyncio.get_running_loop().call_soon(self._start, waiting, read)

    def _start(self, waiting: deque[PciFunction], read: ReadChip) -> None:
        """Read these chips on a new thread. The time of their reads begins now.

        Without a thread, as when the host has no processes left, each read fails with an OSError.
        """
        for function in waiting:
            self._since[function.bdf] = monotonic()

        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._run, args=(waiting, read, loop), daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            for function in _take(waiting):
                self._results.put((function.bdf, OSError(errno.EAGAIN, str(error))))
            self._wake()
        else:
            loop.call_later(SLOW_AFTER, self._relieve, thread, waiting, read)

    def _relieve(
        self, thread: threading.Thread, waiting: deque[PciFunction], read: ReadChip
    ) -> None:
        """If a thread has not ended, give each chip that waits for it another thread."""
        if not thread.is_alive():
            return
        for function in _take(waiting):
            self._start(deque([function]), read)

        # The loop takes a turn now, as nothing waits for this read from here on, and when the read
        # counts as blocked.
        self._wake()
        asyncio.get_running_loop().call_later(READ_TIMEOUT - SLOW_AFTER, self._wake)

    def _run(
        self, waiting: deque[PciFunction], read: ReadChip, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Read chips until none waits; the main function of a thread."""
        for function in _take(waiting):
            result: Reading | OSError | None = None  # None: an internal error, which is logged
            with log_and_continue(f"reading {function.bdf}"):
                try:
                    result = read(function)
                except OSError as error:  # the daemon's own
                    result = error
            self._results.put((function.bdf, result))

        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._wake)

    def collect(self) -> list[Reading]:
        """Return the readings since the last call; raises the daemon's own OSError."""
        readings = []
        failure = None
        while not self._results.empty():
            bdf, result = self._results.get()
            del self._since[bdf]
            if isinstance(result, Reading):
                readings.append(result)
            elif isinstance(result, OSError):
                failure = result

        if failure:  # then the loop has all chips read again
            raise failure
        return readings

    def take_skipped(self) -> bool:
        """Return whether chips must be submitted again: once, after the read that made them wait.

        That read may have begun before the event for which they were submitted.
        """
        skipped = self._skipped - self._since.keys()
        self._skipped -= skipped
        return bool(skipped)

    def under_way(self, now: float) -> dict[str, ReadState]:
        """Return the state of each read that has not been collected, by the chip's address."""
        states = {}
        for bdf, since in self._since.items():
            if now - since >= READ_TIMEOUT:
                states[bdf] = ReadState.BLOCKED
            elif now - since >= SLOW_AFTER:
                states[bdf] = ReadState.SLOW
            else:
                states[bdf] = ReadState.RUNNING
        return states

    def is_settled(self, now: float) -> bool:
        """Return whether every read has ended or is slow."""
        return ReadState.RUNNING not in self.under_way(now).values()

    def is_over(self, now: float) -> bool:
        """Return whether every read has ended or counts as blocked."""
        return all(state is ReadState.BLOCKED for state in self.under_way(now).values())


# ==== FILES: for others, and to survive a restart =================================================


# Raised while a JSON document is read that has another form than expected.
OTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class OutputFile:
    """A file that is replaced when its text changes, and removed if that fails.

    A new file is created and renamed: nothing that another user has put in its place is followed or
    written to. Without its directory nothing reads it, so it is not written.
    """

    def __init__(self, path: str, mode: int = 0o644, *, keep_outdated: bool = False) -> None:
        """`keep_outdated`: do not remove the file if it cannot be written."""
        self.path = path
        self.problem: str | None = None  # why it is not as it should be
        self._mode = mode
        self._keep_outdated = keep_outdated
        # The text that was written last, and the file's identity then; None for no file.
        self._written: tuple[str | None, FileStamp | None] | None = None

    def keep(self, text: str | None) -> None:
        """Write the text, None for no file, unless the file is as it should be."""
        with suppress(OSError):
            if self._written == (text, file_stamp(self.path)):
                return
        if text is None:
            self._report(self._remove())
        else:
            self.write(text)

    def write(self, text: str) -> None:
        """Write the text; if that fails, remove a file with another text, and record why.

        A file that has the text already is as it should be.
        """
        self._written = None
        problem = None
        try:
            self._replace(text)
            self._written = (text, file_stamp(self.path))
        except FileNotFoundError:  # no line in the log, as nothing reads files there
            self.problem = f"{dirname(self.path)} does not exist"
            return
        except OSError as error:
            if not self._has(text):
                problem = f"cannot be written: {error.strerror}"
                if not self._keep_outdated:
                    problem = self._remove() or problem

        self._report(problem)

    def _replace(self, text: str) -> None:
        """Replace the file; raises OSError."""
        new = f"{dirname(self.path)}/.{basename(self.path)}.new"
        try:
            if_exists(os.unlink, new)  # of a daemon that was killed

            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(file.fileno(), self._mode)
            os.replace(new, self.path)
        except OSError:
            with suppress(OSError):
                os.unlink(new)
            raise

    def _has(self, text: str) -> bool:
        """Return whether the file has this text already, as written by a former daemon."""
        content = text.encode()
        with suppress(OSError, ValueError):
            return read_others_file(self.path, len(content)) == content
        return False

    def _remove(self) -> str | None:
        """Remove the file; return why that fails."""
        try:
            if_exists(os.unlink, self.path)
        except OSError as error:
            return f"is out of date and cannot be removed: {error.strerror}"
        self._written = (None, None)
        return None

    def _report(self, problem: str | None) -> None:
        """Record why the file is not as it should be; a new problem is logged."""
        if problem and problem != self.problem:
            log.warning("%s %s", self.path, problem)
        self.problem = problem


class OutputFiles:
    """The files for others, also files that a former configuration wanted."""

    def __init__(self, former: Iterable[str]) -> None:
        self.by_path = {path: OutputFile(path) for path in former}

    def keep(self, wanted: Mapping[str, str | None], unmanaged: Collection[str]) -> None:
        """Write these texts by path, None for no file, and remove the other files.

        `unmanaged`: paths that are left as they are, as write() writes these files.
        """
        for path in sorted({*wanted, *self.by_path}.difference(unmanaged)):
            file = self.by_path.setdefault(path, OutputFile(path))
            file.keep(wanted.get(path))

            # While the removal fails, the file stays here to be tried again.
            if path not in wanted and not os.path.lexists(path):
                del self.by_path[path]

    @property
    def problems(self) -> dict[str, str]:
        """Return why files are not as they should be, by path."""
        return {path: file.problem for path, file in self.by_path.items() if file.problem}

    def write(self, path: str, text: str) -> None:
        """Write a file, also if it has not changed: its time shows that the daemon is alive."""
        self.by_path.setdefault(path, OutputFile(path)).write(text)


class SavedState(NamedTuple):
    """The state that a daemon leaves to the next one."""

    files: Sequence[str] = ()  # for others, also from an earlier boot
    chips: Mapping[str, ChipState] = {}
    holds: Sequence[HoldState] = ()


class StateFile:
    """The state that survives a restart of the daemon within the same boot.

    It is root's own and taken as it is. If it does not fit, it is discarded as a whole.
    """

    FORMAT = 6
    MAX_BYTES = 16 << 20

    def __init__(self, settings: Settings) -> None:
        self._boot = read_text(f"{settings.proc}/sys/kernel/random/boot_id")
        self._file: OutputFile | None = None
        if settings.state_dir:
            path = f"{settings.state_dir}/state.json"
            self._file = OutputFile(path, 0o600, keep_outdated=True)

    @property
    def problems(self) -> dict[str, str]:
        """Return why the file is not as it should be, by its path."""
        file = self._file
        return {file.path: file.problem} if file and file.problem else {}

    def load(self) -> SavedState:
        """Return the saved state."""
        if self._file is None:
            return SavedState()

        path = self._file.path
        try:
            document = json.loads(read_others_file(path, self.MAX_BYTES))
            if document["format"] != self.FORMAT:
                raise ValueError(f"format {document['format']}, not {self.FORMAT}")

            files = [str(each) for each in document["files"]]
            if not self._boot or document["boot"] != self._boot:
                return SavedState(files)

            return SavedState(
                files,
                {bdf: ChipState.from_saved(bdf, each) for bdf, each in document["chips"].items()},
                [HoldState.from_saved(each) for each in document["holds"]],
            )

        except FileNotFoundError:
            return SavedState()
        except (OSError, *OTHER_FORM) as error:
            log.warning("%s is discarded: %s: %s", path, type(error).__name__, error)
            return SavedState()

    def save(self, files: Sequence[str], chips: Json, holds: Sequence[Json]) -> None:
        """Write the file if its content has changed; see SavedState and to_saved()."""
        if self._file:
            document = {
                "format": self.FORMAT,
                "boot": self._boot,
                "files": files,
                "chips": chips,
                "holds": holds,
            }
            self._file.keep(json.dumps(document))


# ==== SYSTEMD: readiness, status, watchdog, logs ==================================================

# Bytes of a status. systemd ignores a message of more than 4096 bytes (manager.c's
# NOTIFY_BUFFER_MAX), so it would show the status before.
STATUS_MAX = 4096 - len("STATUS=")


def without_middle(text: str, most: int) -> str:
    """Return a text of at most so many bytes of UTF-8: its begin and its end, if it is longer."""
    content = text.encode()
    if len(content) <= most:
        return text
    half = (most - len("…".encode())) // 2
    begin, end = content[:half], content[-half:]
    return f"{begin.decode(errors='ignore')}…{end.decode(errors='ignore')}"


class ServiceManager:
    """Notifies systemd (sd_notify(3))."""

    def __init__(self, environ: Environment) -> None:
        self.status = ""
        self._environ = environ
        self._socket = sdnotify.SystemdNotifier().socket  # None: there is no manager
        if self._socket:
            self._socket.setblocking(False)  # a manager that hangs must not block the loop
        self._unsent = deque[str]()
        # Half of the time-out, as sd_watchdog_enabled(3) recommends.
        timeout = to_integer(environ.get("WATCHDOG_USEC"))
        self.feed_interval = timeout / 2e6 if timeout else inf  # seconds

    def notify(self, *states: str) -> None:
        """Send a message. If the manager's queue is full, it follows with the next one."""
        if self._socket is None:
            return
        self._unsent.append("\n".join(states))
        while self._unsent:
            try:
                self._socket.send(self._unsent[0].encode())
            except BlockingIOError:
                return
            except OSError:  # the manager has gone
                pass
            self._unsent.popleft()

    def show(self, status: str) -> None:
        """Set the status that `systemctl status` shows, if it has changed."""
        status = without_middle(status, STATUS_MAX)
        if status != self.status:
            self.status = status
            self.notify(f"STATUS={status}")

    def feed_watchdog(self) -> None:
        """Notify that the loop works, if the unit has WatchdogSec=."""
        if self.feed_interval < inf:
            # One is enough, however long the manager takes to read it.
            with suppress(ValueError):
                self._unsent.remove("WATCHDOG=1")
            self.notify("WATCHDOG=1")

    def sockets(self, name: str) -> list[socket.socket]:
        """Return the sockets of this name that systemd has passed in (sd_listen_fds(3))."""
        if self._environ.get("LISTEN_PID") != str(os.getpid()):
            return []
        number = to_integer(self._environ.get("LISTEN_FDS")) or 0
        names = self._environ.get("LISTEN_FDNAMES", "").split(":")[:number]
        # The first one is always descriptor 3.
        return [socket.socket(fileno=fd) for fd, each in enumerate(names, 3) if each == name]


class _JournalFormatter(logging.Formatter):
    """Adds the priorities of sd-daemon(3)."""

    def format(self, record: logging.LogRecord) -> str:
        priorities = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4}
        priority = priorities.get(record.levelno, 3)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _shorten_garbage(record: logging.LogRecord) -> bool:
    """Remove the traceback that gRPC logs for a request that is not protobuf."""
    if record.exc_info and isinstance(record.exc_info[1], DecodeError):
        record.exc_info = record.exc_text = None
    return True


def set_up_logging(environ: Environment, *, has_timestamps: bool) -> None:
    """Log to stderr, one event per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_shorten_garbage)
    form = "%(asctime)s %(levelname)-7s %(message)s" if has_timestamps else None
    handler.setFormatter(logging.Formatter(form))

    with suppress(OSError):
        # systemd.exec(5): the variable names the journal's stream; stderr can be redirected.
        status = os.fstat(2)
        if environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}":
            handler.setFormatter(_JournalFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


# ==== KERNEL EVENTS: of devices, and in the kubelet's directory ===================================

NETLINK_KOBJECT_UEVENT = 15
OUR_PCI_ID = f"\0PCI_ID={VENDOR:04X}:".encode()
SOCKET_PREFIX = "tt-"  # of the daemon's sockets in the kubelet's directory

# inotify(7): events of a directory's entries, then of the directory itself; a flag.
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800
IN_ONLYDIR = 0x0100_0000
INOTIFY_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows

_libc = ctypes.CDLL(None, use_errno=True)


def open_uevent_socket() -> socket.socket:
    """Return a socket that receives the kernel's uevents (netlink(7)); raises OSError."""
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    kernel = socket.socket(socket.AF_NETLINK, kind, NETLINK_KOBJECT_UEVENT)
    kernel.bind((0, 1))  # group 1 is the kernel's, 2 is udevd's
    return kernel


class UeventSocket:
    """Receives the kernel's uevents about Tenstorrent devices and functions."""

    def __init__(self, on_events: Wake) -> None:
        self._on_events = on_events
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Receive events from now on; without a socket the daemon polls, which is logged."""
        try:
            self._socket = open_uevent_socket()
        except OSError as error:
            log.warning("cannot receive kernel events (%s); polling instead", error.strerror)
            return
        asyncio.get_running_loop().add_reader(self._socket, self._read, self._socket)

    def close(self) -> None:
        if self._socket:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _read(self, kernel: socket.socket) -> None:
        """Take all events that wait, and report once if any of them is about our devices."""
        is_relevant = False
        while True:
            try:
                message, sender = kernel.recvfrom(8192)
            except BlockingIOError:
                break
            except OSError as error:
                is_relevant = True
                # Some events were lost. Until none waits, the kernel drops more without a second
                # report (netlink_overrun() in af_netlink.c), so the scan must come after that.
                if error.errno == errno.ENOBUFS:
                    continue
                break

            is_ours = DRIVER.encode() in message or OUR_PCI_ID in message
            if is_ours and sender[0] == 0:  # the kernel's port ID, which no process can have
                is_relevant = True
        if is_relevant:
            self._on_events()


class DirectoryError(Exception):
    """The kubelet's directory cannot be used: exit status and reason."""


class PluginDirectory:
    """The kubelet's device plugin directory: locked by one daemon, and watched."""

    ENTRIES = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
    ITSELF = IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR

    def __init__(self, path: str, wake: Wake) -> None:
        self.path = path
        self.problem: str | None = None  # why it cannot exist yet
        self.is_watched = False
        self._wake = wake
        self._has_changed = False  # since the last take_changes()
        # Names of others' files, and kubelet.sock; kept without inotify only.
        self._seen: tuple[frozenset[str], FileStamp | None] = (frozenset(), None)
        self._locked: int | None = None  # descriptor of the directory
        self._inotify: int | None = None  # descriptor
        self._has_failed = False  # the last attempt to watch; of failures in a row one is logged

    def close(self) -> None:
        for descriptor in (self._inotify, self._locked):
            if descriptor is not None:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)

    def check(self) -> None:
        """Create, lock and watch the directory, if it is not watched; raises DirectoryError.

        It waits for the directory around it, the kubelet's own, which can be a link (MicroK8s).
        """
        parent = dirname(self.path)
        self.problem = None
        if not isdir(parent):
            why = "is a link to nothing" if os.path.islink(parent) else "does not exist"
            self.problem = f"no kubelet is installed ({parent} {why})"
            self.is_watched = False
            return

        try:
            self._create_and_lock()
        except FileNotFoundError:  # it was deleted meanwhile; the next turn makes it again
            self.is_watched = False
            return
        except OSError as error:
            why = error.strerror or str(error)
            if os.path.islink(self.path) and not exists(self.path):
                why = "it is a link to nothing"
            reason = f"{self.path} cannot be used: {why}; exiting"
            raise DirectoryError(EXIT_DIRECTORY_UNUSABLE, reason) from None

        if not self.is_watched:
            self._watch()

    def _create_and_lock(self) -> None:
        """Create and lock the directory, if it is a new one; raises OSError, DirectoryError."""
        if not isdir(self.path):
            try:
                os.mkdir(self.path)
                os.chmod(self.path, 0o750)  # despite the umask
            except FileExistsError:
                if not isdir(self.path):
                    raise  # the kubelet has not made it meanwhile

        status = os.stat(self.path)
        if self._locked is None or not os.path.samestat(os.fstat(self._locked), status):
            self._lock()
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.stat(self.path)  # raises FileNotFoundError if it was deleted
            raise PermissionError(errno.EACCES, "it is not writable")

    def _lock(self) -> None:
        """Lock the directory; raises DirectoryError if another process has locked it.

        A lock ends with its descriptor, so with this process at the latest (flock(2)).
        """
        former, self._locked = self._locked, os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self.is_watched = False
        if former is not None:
            os.close(former)

        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = holder_of_lock(os.fstat(self._locked).st_ino)
            reason = f"{self.path} is in use by {holder}; exiting"
            raise DirectoryError(EXIT_ALREADY_RUNNING, reason) from None

    def _watch(self) -> None:
        """Watch the directory; while that fails, the loop polls, and tries again each time.

        There are few instances and watches for each user, and others can use them up.
        """
        if self._inotify is None:
            descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor >= 0:
                self._inotify = descriptor
                asyncio.get_running_loop().add_reader(descriptor, self._read)

        if self._inotify is not None:
            mask = ctypes.c_uint32(self.ENTRIES | self.ITSELF)
            path = os.fsencode(self.path)
            self.is_watched = _libc.inotify_add_watch(self._inotify, path, mask) >= 0
            self._has_changed |= self.is_watched  # what came or went before has caused no event

        if not self.is_watched and not self._has_failed:
            reason = f"{os.strerror(ctypes.get_errno())}; raise fs.inotify.max_user_*"
            log.warning("cannot watch %s (%s); polling instead", self.path, reason)
        self._has_failed = not self.is_watched

    def take_changes(self) -> bool:
        """Return whether files of others have come or gone since the last call; raises OSError.

        The first call after the directory is watched returns that, too.
        """
        has_changed, self._has_changed = self._has_changed, False
        if not self.is_watched:
            names = frozenset(filter(_is_of_others, names_in(self.path)))
            seen = names, file_stamp(f"{self.path}/{KUBELET_SOCKET}")
            has_changed |= seen != self._seen
            self._seen = seen
        return has_changed

    def _read(self) -> None:
        """Note the events that wait, and wake the loop for those that need a turn.

        file                     needs a turn             is a change (see _is_of_others())
        -----------------------------------------------------------------------------------
        ".NUMBER"                no: it will be renamed   no
        the checkpoint           yes                      no
        the daemon's sockets     unless it is new         no
        others, the directory    yes                      yes
        """
        if self._inotify is None:
            return

        events = os.read(self._inotify, 65536)
        needs_turn = False
        while events:
            _, mask, _, length = INOTIFY_EVENT.unpack_from(events)
            end = INOTIFY_EVENT.size + length
            name = os.fsdecode(events[INOTIFY_EVENT.size : end].rstrip(b"\0"))
            events = events[end:]
            self._has_changed |= _is_of_others(name)

            is_new_socket = name.startswith(SOCKET_PREFIX) and bool(mask & IN_CREATE)
            needs_turn |= not is_new_socket and not name.startswith(".")
        if needs_turn:
            self._wake()


def _is_of_others(name: str) -> bool:
    """Return whether a file in the kubelet's directory says something about the kubelet.

    The name is empty in events of the directory itself, which do.
    """
    return not name.startswith((SOCKET_PREFIX, ".")) and name != CHECKPOINT


def holder_of_lock(inode: int) -> str:
    """Return the process that has locked a file, by /proc/locks (proc(5))."""
    pattern = rf"^\d+: FLOCK +\S+ +WRITE +(\d+) \S+:{inode} "
    match = re.search(pattern, read_text("/proc/locks") or "", re.MULTILINE)
    if match is None:
        return "another process"
    return f"process {match[1]} ({read_text(f'/proc/{match[1]}/comm')!r})"


# ==== HOST: observes this machine, and decides ====================================================


class Host:
    """The one owner of settings, inventory and holds, and all else that loop and calls share."""

    def __init__(self, settings: Settings, wake: Wake) -> None:
        """Begin with the state that the last daemon has saved, if it is of this boot."""
        self.settings = settings
        self.state_file = StateFile(settings)
        saved = self.state_file.load()
        self.files = OutputFiles(saved.files)

        self.inventory = Inventory(dict(saved.chips))
        self.holds = HoldBook(settings, saved.holds)
        self.directories = Directories(settings, monotonic())
        self.readers = TelemetryReaders(wake)

        self.rejected: str | None = None  # why the configuration on disk is not in force
        self.waits_for_directory: str | None = None  # why the kubelet's cannot be used yet
        self.problems: dict[str, Reason] = {}  # of the host, by subject
        self.wake = wake

        # Seconds of the monotonic clock.
        self.save_by = inf  # until when a new answer must be saved
        self.scanned_at = -inf  # when chips were last looked for
        self.polled_at = -inf  # when a poll was last begun
        self.looked_at = -inf  # when pods' cgroups were last looked at

        self.applied: Decision | None = None  # the last decision that the loop has applied
        self._decision: Decision | None = None

    @property
    def is_unreadable(self) -> bool:
        """Return whether the last turn of the loop could not observe, or not apply."""
        return UNREADABLE_HOST in self.problems

    def read_chips(self, *, is_poll: bool, details: bool = False) -> None:
        """Scan for chips, and have each read; with `details`, its sensors and processes, too."""
        self.inventory.scan(self.settings)
        self.scanned_at = monotonic()
        if is_poll:
            self.polled_at = self.scanned_at
        settings = self.settings if details else None
        self.readers.submit(self.inventory.present, is_poll=is_poll, settings=settings)

    def take_readings(self, now: float) -> None:
        """Record readings of chips, and which reads are late; raises OSError."""
        self.inventory.apply(self.readers.collect(), self.settings.health)
        for bdf, read in self.readers.under_way(now).items():
            state = self.inventory.states[bdf]
            if read is not ReadState.RUNNING:
                state.start_listing()  # READY does not wait for a chip whose reads are slow
            if read is ReadState.BLOCKED:
                state.block()

    def refresh_holds(self, now: float, *, look: bool = False) -> None:
        """Read the checkpoint if it has changed, and look at pods' cgroups then, or if wanted.

        Raises OSError.
        """
        if look:
            self.looked_at = now
        self.holds.refresh(now, self.settings.resource_domain, look=look)

    def decide(self, now: float) -> Decision:
        """Return the desired state, the same object until something changes."""
        observation = Observation(
            self.settings,
            self.inventory.chips,
            self.inventory.unsupported,
            self.inventory.driver,
            self.holds.current(now),
            self.holds.names,
            self.holds.problem,
            host_mounts(self.settings),
        )

        if self._decision is None or observation != self._decision.observation:
            self._decision = decide(observation, self._decision)
        return self._decision

    def unnamed_directories(self, decision: Decision, now: float) -> set[str]:
        """Return the directories that can be removed; raises OSError."""
        # Without a checkpoint, or one of its entries, the holds may not be all that there are.
        holds = self.holds
        if not holds.has_read or holds.problem or holds.unreadable:
            return set()
        return self.directories.unnamed(decision.holds, now)

    def note_problem(self, subject: str, problem: Reason | None) -> None:
        """Record a problem of the host, None if there is none; a new one is logged."""
        if problem and problem != self.problems.get(subject):
            log.warning("%s", problem)
        if problem:
            self.problems[subject] = problem
        else:
            self.problems.pop(subject, None)

    def save_state(self) -> None:
        """Save the state that the next daemon cannot read again."""
        self.save_by = inf
        chips = {}
        for bdf, state in self.inventory.states.items():
            if state.chip.was_present:
                chips[bdf] = state.to_saved()
        self.state_file.save(sorted(self.files.by_path), chips, self.holds.to_saved())

    def view(self, decision: Decision, service: Service) -> Json:
        """Return what `list` and `check` show; without a daemon, only the host itself is known."""
        return view_of_node(
            decision,
            self.inventory.states,
            service,
            knows_pods=self.holds.has_read,
            unreadable=self.holds.unreadable,
            booted_at=time.time() - seconds_since_boot(),
        )


# ==== REQUESTS: observe, decide, answer ===========================================================

LINK_TIMEOUT = 1.0  # seconds that udev has to make a chip's link
LINK_INTERVAL = 0.02
START_TIMEOUT = 25.0  # seconds; the kubelet waits 30 for PreStartContainer
START_INTERVAL = 0.1  # seconds between looks at pods while a container waits, or is created
EMPTY_WITHIN = 1.0  # seconds that a start waits for the pages of former pods
SAVED_WITHIN = 1.0  # seconds; mostly the container's start comes before, and saves it


class Allocator:
    """Answers the kubelet's requests for devices, and delays containers on chips in use."""

    def __init__(self, host: Host) -> None:
        self.counts = Counts()
        self._host = host

    def _decide(self, *, look: bool = False) -> Decision:
        """Observe, and return the decision for a call at this moment; raises OSError."""
        host, now = self._host, monotonic()
        host.refresh_holds(now, look=look)
        decision = host.decide(now)
        # For example, an ID that has gone with its hold leaves the list before the next request.
        if decision is not host.applied:
            host.wake()
        return decision

    async def allocate(self, name: str, containers: Containers) -> list[Edits]:
        """Return the edits for containers with these IDs; raises RequestError, OSError."""
        result = "refused"
        try:
            answer = await self._allocate(name, containers)
            result = "granted"
            return answer
        finally:
            self.counts[name, result] += 1

    async def _allocate(self, name: str, containers: Containers) -> list[Edits]:
        """Check the request, wait for udev's links, and record a hold for each container.

        `name`: of the resource. Raises RequestError, OSError.
        """
        resource, links = await self._find_links(name, containers)
        settings = self._host.settings
        answers: list[Edits] = []
        for ids in containers:
            if answers:  # kubelets name one container; others could name thousands
                await asyncio.sleep(0)
                resource, settings = self._decide().resource(name), self._host.settings
                check_request(resource, [ids])

            # The hold is read from the answer, as it will be from the kubelet's checkpoint.
            chips = resource.chips(ids)
            hold = Hold(name, frozenset(ids), name=_new_name(chips))
            mounts = self._mounts(hold, resource, settings)
            edits = container_edits(chips, links, settings, mounts, hold.name)
            self._host.holds.add(read_answer(edits).of(name, ids), monotonic())
            answers.append(edits)

        self._host.save_by = min(self._host.save_by, monotonic() + SAVED_WITHIN)
        self._host.wake()
        return answers

    async def _find_links(
        self, name: str, containers: Containers
    ) -> tuple[Resource, dict[str, str]]:
        """Check a request; return its resource and udev's links, by address of the chip.

        The kubelet keeps the answer for the pod's life, so it is worth waiting for a link, which
        udev makes a little later than the device file. If it takes longer than LINK_TIMEOUT, the
        file itself is used. Anything can change meanwhile, also the settings: all is checked again.
        Raises RequestError, OSError.
        """
        deadline = monotonic() + LINK_TIMEOUT
        decision = self._decide(look=True)
        while True:
            settings = self._host.settings
            by_cdi = settings.device_list_strategy == "cdi"
            if by_cdi and "CDI" in self._host.problems:
                raise RequestError(Status.UNAVAILABLE, self._host.problems["CDI"].problem)

            resource = decision.resource(name)
            check_request(resource, containers)

            links = {}
            for chip in resource.chips(chain(*containers)):
                # Looked at now: a uevent about the file may still be on the way.
                if fault := file_fault_now(chip.function):
                    reason = f"device {chip.bdf}: device file is invalid: {fault}"
                    raise RequestError(Status.FAILED_PRECONDITION, reason)
                if not by_cdi:
                    links[chip.bdf] = link_path(settings, chip.function)

            has_all_links = all(links.values()) or not expects_links(settings)
            if has_all_links or monotonic() >= deadline:
                return resource, {bdf: link for bdf, link in links.items() if link}
            await asyncio.sleep(LINK_INTERVAL)
            decision = self._decide()

    def _mounts(self, hold: Hold, resource: Resource, settings: Settings) -> list[Mount]:
        """Return the mounts of a container, and make its directories; raises RequestError."""
        host = self._host
        mounts: list[Mount] = []
        try:
            locks = lock_path(resource, hold.ids, settings)
            if locks and locks != SHM:
                host.directories.make_for_locks(locks)

            if settings.has_private_hugepages:
                # Another container of the pod, or of the shared device, can have one already.
                name = host.holds.directory_for(hold, monotonic()) or hold.name
                taken = {mount.container for mount in settings.mounts}
                free = [each for each in hugetlbfs_mounts(settings) if each.container not in taken]
                mounts += settings.mounts
                mounts += host.directories.make_for_hugepages(name, free)
            elif settings.device_list_strategy != "cdi":  # else they are in the CDI file
                mounts += host_mounts(settings)
        except OSError as error:
            reason = f"no directory for a container: {error.filename}: {error.strerror}"
            raise RequestError(Status.UNAVAILABLE, reason) from None
        return [*mounts, Mount(locks, SHM)] if locks else mounts

    def prefer(
        self,
        name: str,
        question: pb.ContainerPreferredAllocationRequest,
        listed: DeviceIds,
    ) -> list[str]:
        """Return the best IDs of a resource; raises RequestError, OSError.

        `listed`: all IDs that the kubelet may have been sent.
        """
        # Not by the last look at pods: a pod that has ended since has a chip to choose.
        decision = self._decide(look=True)
        resource = decision.resource(name)

        # An ID that has gone with its hold can be in the list that the kubelet still has.
        gone = listed.difference(resource.devices)
        return preferred_allocation(
            resource,
            frozenset(question.available_deviceIDs) - gone,
            question.must_include_deviceIDs,
            question.allocation_size,
            self._host.holds.forgotten_ids(name, decision.holds),
        )

    async def wait_until_free(self, name: str, ids: Collection[str]) -> None:
        """Wait until a container may start with these IDs; raises RequestError, OSError.

        The kubelet gives the device of a pod that was deleted by force to the next pod while the
        first one still runs. It repeats a call that fails.
        """
        host = self._host
        deadline = monotonic() + START_TIMEOUT
        decision = self._decide(look=True)
        chips = frozenset(chip.bdf for chip in decision.resource(name).chips(ids))
        call = host.holds.call(name, frozenset(ids), chips, monotonic())

        logged = ""
        has_freed = False
        while True:
            # Its pod can be deleted meanwhile: the kubelet does not cancel the call.
            if host.holds.was_deleted(call, monotonic()):
                raise RequestError(Status.FAILED_PRECONDITION, "the pod was deleted")

            others = host.holds.waits_for(call, decision.holds)
            if others:
                reason = _why_waiting(call, others, decision)
                if monotonic() > deadline:
                    raise RequestError(Status.UNAVAILABLE, reason)
                if reason != logged:
                    log.info("%s: container start waits: %s", name, reason)
                    logged = reason
                await asyncio.sleep(START_INTERVAL)
                # Starts that wait at the same time share their looks, also with the loop.
                is_due = monotonic() - host.looked_at >= START_INTERVAL
                decision = self._decide(look=is_due)
                has_freed = False

            elif has_freed:
                break
            else:
                # And then check once more, as another pod can begin to run meanwhile.
                await self._free_pages(call, decision)
                decision = self._decide()
                has_freed = True

        host.holds.allow(call, monotonic())
        host.save_state()
        host.wake()  # the loop looks often until the container was seen

    async def _free_pages(self, call: Call, decision: Decision) -> None:
        """Empty what former pods have left, so that a container finds the node's pages free.

        At most for EMPTY_WITHIN; what takes longer is left to the loop. Raises RequestError,
        OSError.
        """
        host = self._host
        try:
            for state in call.callers:
                host.directories.put_right(state.hold)
        except OSError as error:
            reason = f"no directory for the container: {error.filename}: {error.strerror}"
            raise RequestError(Status.UNAVAILABLE, reason) from None

        deadline = monotonic() + EMPTY_WITHIN
        while True:
            now = monotonic()
            try:
                unnamed = host.unnamed_directories(decision, now) - call.directories
                left_behind = host.holds.left_behind(call, decision.holds)
                steps = RemovalSteps(seconds=STEPS_TAKE)
                host.directories.clear(unnamed, left_behind, now, steps)
                return
            except OutOfSteps:
                if monotonic() > deadline:
                    log.warning(
                        "%s: a container starts before all hugepages are free", call.resource
                    )
                    return

            # Between two slices the loop takes its turns, and holds can change.
            await asyncio.sleep(0)
            decision = self._decide()


def _new_name(chips: Sequence[Chip]) -> str:
    """Return a name for an answer that no other one ever had; it begins with an address."""
    return f"{chips[0].bdf}-{os.urandom(8).hex()}"


def _why_waiting(call: Call, others: Sequence[Hold], decision: Decision) -> str:
    """Return why a start waits for these holds' pods."""
    callers = [state.hold for state in call.callers if not state.has_left]
    pods = dict.fromkeys(map(decision.name_of_pod, others))  # each once, in this order

    # kubernetes #137534: one of the possible callers runs already, as its start was allowed first.
    if {hold.key for hold in others} & {hold.key for hold in callers}:
        names = " and ".join(pods | dict.fromkeys(map(decision.name_of_pod, callers)))
        ids = ", ".join(sorted(call.ids))
        return f"the kubelet has given {ids} to {names}; delete one of these pods"
    return f"{', '.join(pods)} must end first; it still runs on the device"


def lock_path(resource: Resource, ids: Iterable[str], settings: Settings) -> str | None:
    """Return the host directory that containers on these IDs have as /dev/shm; None: their own.

    There tt-umd's locks are, by which containers on one chip take turns.
    """
    path = settings.sharing.lock_dir
    if not path or not any(map(is_replica, ids)):
        return None
    return path if path == SHM else f"{path}/{resource.short_name}"


# ==== REGISTRATION: device list, socket, Register (device plugin API v1beta1) =====================
#
# What depends on the kubelet's version:
#
#     up to 1.36   the end of any stream of a resource ends its newest registration (manager.go,
#                  PluginDisconnected): the old stream must have ended before the next Register
#     1.37         rejects an endpoint to which it has a connection (plugin/v1beta1/server.go): each
#                  registration has a socket with a new name
#     all          a gRPC server that stops unlinks the path of its socket: another reason for a new
#                  name. A kubelet that starts deletes all sockets, then creates its own. Its path
#                  exists from bind() on, and refuses connections until listen(), microseconds later
#
# Which ListAndWatch stream is the kubelet's: debugging tools can open streams at any time, and gRPC
# does not say who calls (on a unix socket context.peer() is "unix:" for everyone). But a kubelet
# calls in a fixed order (connectClient in plugin/v1beta1/handler.go): it connects and calls
# GetDevicePluginOptions before it answers Register, and opens its stream when it does. So its
# stream is the first one after the last GetDevicePluginOptions before the answer. All others get
# the list, too, but neither their opening nor their end means anything. Only a tool that opens a
# stream in the millisecond between these two calls is taken for the kubelet. Then the end of the
# kubelet's own stream goes unnoticed until the tool's has ended.

REGISTER_TIMEOUT = 10.0  # seconds
STREAM_DELAY = 0.05  # seconds until a kubelet has noticed the end of a stream
LISTEN_PAUSES = (0.002, 0.01)  # seconds between attempts to connect
BACKOFF = (0.1, 5.0)  # seconds: the first pause after a failure, and the longest
LAST_GRACE = 0.1  # seconds that calls have at the daemon's end
STOP_TIMEOUT = 0.3  # seconds; mostly a server stops within milliseconds
LASTING = 30.0  # seconds after which a registration has held, so that the back-off starts over
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else channels share the back-off from a dead socket
    ("grpc.max_receive_message_length", 16 << 20),
)
# Connections without a handshake are closed after this time, and not after two minutes.
SERVER_OPTIONS = (("grpc.server_handshake_timeout_ms", 5000),)
PLUGIN_OPTIONS = pb.DevicePluginOptions(
    pre_start_required=True, get_preferred_allocation_available=True
)
Context = grpc.aio.ServicerContext[Any, Any]
Ended = tuple[Phase, str]  # of a registration: the phase that follows, and the reason
_socket_numbers = count(1)


def new_socket_name(resource: str) -> str:
    """Return a name that no socket has had, of at most 42 bytes: see PLUGIN_DIR_MAX."""
    # The largest process ID is 4194304 (proc(5)).
    number = f"{os.getpid()}-{next(_socket_numbers) % 100_000}"
    return f"{SOCKET_PREFIX}{without_domain(resource)[:20]}.{number}.sock"


def remove_dead_sockets(directory: str) -> None:
    """Remove the sockets of daemons that were killed."""
    for name in names_in(directory):
        if re.fullmatch(rf"{SOCKET_PREFIX}.+\.\d+-\d+\.sock", name):
            with suppress(OSError):
                os.unlink(f"{directory}/{name}")


async def completed(work: Awaitable[Result]) -> Result:
    """Wait for the end of something, however often this task is cancelled meanwhile.

    A gRPC server that is cancelled while it starts or stops keeps its socket and its threads.
    """
    future = asyncio.ensure_future(work)
    cancellation = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancellation = error

    if cancellation:
        if not future.cancelled():
            future.exception()  # asyncio logs an error that is never read
        raise cancellation
    return future.result()


async def stop(server: grpc.aio.Server, grace: float | None) -> None:
    """Stop a server, which ends its calls and removes its socket at once.

    It then waits for its connections to close. That of a process that is stopped (SIGSTOP) and has
    much to read does not, so from STOP_TIMEOUT on nobody waits for it.
    """
    stopping = asyncio.ensure_future(server.stop(grace))
    await asyncio.wait({stopping}, timeout=STOP_TIMEOUT)
    if stopping.done():
        stopping.result()


async def wait_for_event(event: asyncio.Event, timeout: float) -> bool:
    """Wait for an event, at most some seconds; return whether it has happened.

    asyncio.wait_for() can lose a cancellation up to Python 3.11.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout)
    finally:
        waiting.cancel()
    return event.is_set()


async def first_of(future: asyncio.Future[Result], work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a future or of some work, which ends early if the future is first."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({future, task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.wait({task})
    return future.result() if future.done() else task.result()


def connection_error(path: str) -> int:
    """Return the errno of connecting to a socket, 0 for success."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as probe:
        number = probe.connect_ex(path)
    return 0 if number == errno.EAGAIN else number  # EAGAIN: connections wait to be accepted


async def why_not_listening(kubelet: str) -> str | None:
    """Return why no kubelet listens on its socket; one that is starting has a moment to do so."""
    for pause in (0.0, *LISTEN_PAUSES):
        await asyncio.sleep(pause)
        number = connection_error(kubelet)
        if not number:
            return None
        if number == errno.ENOENT:
            return f"{kubelet} does not exist"
    return "its socket refuses connections"


def bind(server: grpc.aio.Server, path: str) -> None:
    """Bind a server to a unix socket; raises OSError, without the reason, which gRPC hides."""
    try:
        server.add_insecure_port(f"unix:{path}")
    except RuntimeError:
        raise OSError(f"cannot create sockets in {dirname(path)}") from None


def grpc_message(error: Exception) -> str:
    """Return an error's message in one line; without a message, the name of its status code."""
    text = str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        text = error.details() or error.code().name
    return printable(" ".join(text.split()))


class Sockets(NamedTuple):
    """The sockets of a registration at one moment; None: missing."""

    kubelet: FileStamp | None
    own: FileStamp | None  # the plugin's


def why_lost(at_register: Sockets, now: Sockets, *, is_anothers: bool) -> Ended | None:
    """Return how a registration ends under the present conditions, None if it goes on.

    `is_anothers`: the kubelet has another plugin's list in the place of the present one.

        kubelet.sock   own socket     another's   the registration
        ----------------------------------------------------------------------------------------
        missing        any            any         goes on: an open stream keeps working, and there
                                                  is no kubelet to register with
        another one    any            any         has ended with the former kubelet
        the same       not the same   any         ends: no new connection finds the plugin
        the same       the same       yes         is the other plugin's now
        the same       the same       no          goes on
    """
    if now.kubelet is None:
        return None
    if now.kubelet != at_register.kubelet:
        return Phase.LOST, "the kubelet has restarted; registering again"
    if now.own is None or now.own != at_register.own:
        return Phase.LOST, "the plugin's socket was deleted; registering again"
    if is_anothers:
        reason = "another device plugin has registered this resource; stop that plugin"
        return Phase.FAILED, reason
    return None


class AdvertisedList:
    """The device list of a resource, as each open ListAndWatch stream gets it."""

    def __init__(self) -> None:
        self.message = DeviceList()
        self.ids: DeviceIds = frozenset()  # that were ever in it
        self._outdated = asyncio.Event()  # of this message, for the streams that have sent it

    def update(self, message: DeviceList) -> None:
        """Send a list to all streams, unless it is the same as before."""
        if message is not self.message and message != self.message:
            self.message = message
            self.ids = self.ids.union(device.ID for device in message.devices)
            self._outdated.set()
            self._outdated = asyncio.Event()

    async def messages(self) -> AsyncIterator[DeviceList]:
        """Yield the list, and each changed one."""
        while True:
            outdated = self._outdated
            yield self.message
            await outdated.wait()


class Stream:
    """A ListAndWatch stream, from before it opens."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.ended = asyncio.Event()
        self.sent: DeviceList | None = None  # the last list
        self.checkpoint: FileStamp | None = None  # the kubelet's, when that list was sent

    @property
    def is_open(self) -> bool:
        return self.opened.is_set() and not self.ended.is_set()


class Endpoint(rpc.DevicePluginServicer):
    """The socket of one registration, the calls on it, and what the registration depends on."""

    def __init__(
        self, resource: str, directory: str, devices: AdvertisedList, allocator: Allocator
    ) -> None:
        """`directory`: the kubelet's."""
        self.stream = Stream()  # the kubelet's
        self.is_registered = False  # Register was answered
        self.lost: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._resource = resource
        self._directory = directory
        self._devices = devices
        self._allocator = allocator

        self._path = f"{directory}/{new_socket_name(resource)}"
        self._at_register = Sockets(None, None)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    async def open(self) -> None:
        """Serve on the socket; raises OSError."""
        bind(self._server, self._path)
        await completed(self._server.start())
        self._at_register = self._sockets()

    async def close(self, grace: float | None) -> None:
        """Remove the socket, and end all calls, after this time."""
        await completed(stop(self._server, grace))

    async def register(self) -> str | None:
        """Call Register with the name of the socket; return why that fails.

        A kubelet's own answer has the code UNKNOWN: it returns plain errors (v1beta1/server.go).
        """
        request = pb.RegisterRequest(
            version="v1beta1",
            endpoint=basename(self._path),
            resource_name=self._resource,
            options=PLUGIN_OPTIONS,
        )
        kubelet = f"unix:{self._directory}/{KUBELET_SOCKET}"
        async with grpc.aio.insecure_channel(kubelet, CHANNEL_OPTIONS) as channel:
            stub = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=REGISTER_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                if error.code() == Status.DEADLINE_EXCEEDED:
                    return f"kubelet did not answer Register within {REGISTER_TIMEOUT:g} s"
                if error.code() == Status.UNAVAILABLE:
                    # gRPC's own text differs at each attempt, and would be logged each time.
                    log.debug("%s: Register: %s", self._resource, grpc_message(error))
                    return "kubelet closed its socket before it answered Register"
                return f"kubelet rejected Register: {grpc_message(error)}"
            self.is_registered = True
        return None

    def judge(self, others_checkpoint: FileStamp | None) -> None:
        """Set `lost` if the registration is; raises OSError. See KubeletSession.update()."""
        # Kubelets write a checkpoint for each list. It can show that another plugin's list is in
        # the place of the present one only if it was written after that was sent.
        is_sent = self.stream.sent is self._devices.message
        is_anothers = is_sent and others_checkpoint not in (None, self.stream.checkpoint)

        ended = why_lost(self._at_register, self._sockets(), is_anothers=is_anothers)
        if ended and not self.lost.done():
            self.lost.set_result(ended)

    def has_same_kubelet(self) -> bool:
        """Return whether kubelet.sock is the one of Register; raises OSError."""
        return self._sockets().kubelet == self._at_register.kubelet

    def _sockets(self) -> Sockets:
        kubelet = file_stamp(f"{self._directory}/{KUBELET_SOCKET}")
        return Sockets(kubelet, file_stamp(self._path))

    async def GetDevicePluginOptions(self, request: Any, context: Context) -> Any:
        """Return the options; from a kubelet, this call announces its stream."""
        if not self.is_registered:  # the kubelet's stream is still to come
            self.stream = Stream()
        return PLUGIN_OPTIONS

    async def ListAndWatch(self, request: Any, context: Context) -> AsyncIterator[DeviceList]:
        """Yield the device list, now and whenever it changes; an OSError ends the stream.

        The first stream since the last GetDevicePluginOptions is taken for the kubelet's.
        """
        stream = Stream() if self.stream.opened.is_set() else self.stream
        stream.opened.set()
        try:
            async for message in self._devices.messages():
                stream.checkpoint = file_stamp(f"{self._directory}/{CHECKPOINT}")
                stream.sent = message
                yield message
        finally:
            stream.ended.set()

    async def GetPreferredAllocation(self, request: Any, context: Context) -> Any:
        """Return the best choice of the available IDs for each container."""
        response = pb.PreferredAllocationResponse()
        async with self._rejecting(context, "rejected GetPreferredAllocation"):
            for question in request.container_requests:
                ids = self._allocator.prefer(self._resource, question, self._devices.ids)
                response.container_responses.add(deviceIDs=ids)
                await asyncio.sleep(0)  # a request can have thousands of questions
        return response

    async def Allocate(self, request: Any, context: Context) -> Any:
        """Return what each container is given; the kubelet keeps it for the pod's life."""
        containers = [list(each.devices_ids) for each in request.container_requests]
        async with self._rejecting(context, "rejected Allocate"):
            answers = await self._allocator.allocate(self._resource, containers)
            log.debug("%s: allocated: %s", self._resource, containers)
        return pb.AllocateResponse(container_responses=answers)

    async def PreStartContainer(self, request: Any, context: Context) -> Any:
        """Return once a container may start with these IDs, at most after START_TIMEOUT."""
        async with self._rejecting(context, "container start delayed"):
            await self._allocator.wait_until_free(self._resource, request.devices_ids)
        return pb.PreStartContainerResponse()

    @asynccontextmanager
    async def _rejecting(self, context: Context, event: str) -> AsyncIterator[None]:
        """Turn errors into the call's status, and log them."""
        try:
            yield
        except RequestError as error:
            code, reason = error.args
            log.warning("%s: %s: %s", self._resource, event, reason)
            await context.abort(code, reason)
        except OSError as error:
            reason = f"internal error: {error}"
            log.warning("%s: %s: %s", self._resource, event, reason)
            await context.abort(Status.UNAVAILABLE, reason)


class KubeletSession:
    """Keeps a resource registered with the kubelet. _run() is its life, with these waits:

        for                                      at most            ends early if
        ----------------------------------------------------------------------------------------
        a kubelet that starts to listen          LISTEN_PAUSES
        its answer, then its stream              REGISTER_TIMEOUT   the registration is lost
        the stream's end                                            the registration is lost
        the server to stop                       STOP_TIMEOUT
        the kubelet to notice a stream's end     STREAM_DELAY       another kubelet comes
        the next attempt, unless it is at once   BACKOFF            the session is disturbed

    What the last column says is found out in update(), by each turn of the loop.
    """

    def __init__(self, name: str, allocator: Allocator, directory: str, wake: Wake) -> None:
        """Begin to register the resource of this name. `directory`: the kubelet's."""
        self.name = name
        self.registration = Registration()
        self._allocator = allocator
        self._directory = directory
        self._wake = wake

        self._devices = AdvertisedList()
        self._endpoint: Endpoint | None = None  # while Register is under way or has succeeded
        self._disturbed = asyncio.Event()  # since the last attempt began; see update()
        self._is_exiting = False  # the daemon ends
        self._task = asyncio.create_task(self._run())

    def update(
        self, devices: DeviceList, others_checkpoint: FileStamp | None, *, is_disturbed: bool
    ) -> None:
        """Take what the loop has seen in this turn, and look at the sockets; raises OSError.

        `others_checkpoint`: the kubelet's, if it has IDs that another plugin has listed, else None;
        `is_disturbed`: files of others have come or gone in the directory, or the node can be read
        again.
        """
        self._devices.update(devices)
        endpoint = self._endpoint
        if endpoint:
            endpoint.judge(others_checkpoint)

        # While it is registered, files of others do not matter. If they did, two plugins that take
        # a resource from each other would never back off.
        if is_disturbed and not (endpoint and endpoint.is_registered):
            self._disturbed.set()

    async def _run(self) -> None:
        """Register, serve until that ends, pause, and start over.

        The pauses double, until one ends early because something has changed. Losing a
        registration is not a failure: the next attempt follows at once.
        """
        pause = BACKOFF[0]
        while True:
            self._disturbed.clear()
            began = monotonic()
            phase, reason = Phase.FAILED, "internal error; registering again"
            with log_and_continue(f"the session of {self.name}"):
                try:
                    phase, reason = await self._attempt()
                except OSError as error:  # of the daemon itself, such as too many open files
                    reason = str(error)
            self._report(phase, reason)

            if monotonic() - began > LASTING:
                pause = BACKOFF[0]
            if phase is Phase.LOST or await wait_for_event(self._disturbed, pause):
                pause = BACKOFF[0]
            else:
                pause = min(2 * pause, BACKOFF[1])

    async def _attempt(self) -> Ended:
        """Register with a kubelet and serve it; return how that has ended. Raises OSError."""
        if reason := await why_not_listening(f"{self._directory}/{KUBELET_SOCKET}"):
            return Phase.WAITING, f"waiting for kubelet ({reason})"

        # The socket is bound only now, as a kubelet that starts deletes all sockets.
        async with self._serving() as endpoint:
            return await first_of(endpoint.lost, self._register_and_follow(endpoint))

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[Endpoint]:
        """Serve on a new socket; raises OSError."""
        endpoint = Endpoint(self.name, self._directory, self._devices, self._allocator)
        try:
            await endpoint.open()
            self._endpoint = endpoint
            yield endpoint
        finally:
            self._endpoint = None
            is_streaming = endpoint.stream.is_open

            # An error would take the place of a cancellation, and the session would never end.
            with log_and_continue(f"the server of {self.name}"):
                await endpoint.close(LAST_GRACE if self._is_exiting else None)
                if is_streaming and not self._is_exiting:
                    await self._have_end_noticed(endpoint)

    async def _have_end_noticed(self, endpoint: Endpoint) -> None:
        """Wait until the kubelet has seen the end of its stream, as must be before a Register.

        Another one, which has come already or comes meanwhile, has nothing to see. Raises OSError.
        """
        if endpoint.has_same_kubelet():
            has_changed = await wait_for_event(self._disturbed, STREAM_DELAY)
            if has_changed and endpoint.has_same_kubelet():
                await asyncio.sleep(STREAM_DELAY)

    async def _register_and_follow(self, endpoint: Endpoint) -> Ended:
        """Register an endpoint, and follow the kubelet's stream to its end."""
        if failure := await endpoint.register():
            return Phase.FAILED, failure
        self._report(Phase.REGISTERED, REGISTERED_TEXT)

        if not await wait_for_event(endpoint.stream.opened, REGISTER_TIMEOUT):
            reason = "kubelet accepted Register but opened no ListAndWatch stream; retrying"
            return Phase.FAILED, reason
        await endpoint.stream.ended.wait()
        return Phase.FAILED, "kubelet closed the ListAndWatch stream; registering again"

    def _report(self, phase: Phase, text: str) -> None:
        """Set the state of the registration; log it and wake the loop if it is something new."""
        former = self.registration
        successes = former.successes + (phase is Phase.REGISTERED)
        self.registration = Registration(phase, text, successes)
        if self.registration != former:
            level = logging.WARNING if phase is Phase.FAILED else logging.INFO
            if phase is Phase.REGISTERED:
                text += f", {pluralize(len(self._devices.message.devices), 'device ID')}"
            log.log(level, "%s: %s", self.name, text)
            self._wake()

    async def close(self, *, is_exiting: bool = False) -> None:
        """End it; `is_exiting`: no other session of the resource follows, as the daemon ends."""
        self._is_exiting = is_exiting
        self._task.cancel()
        await asyncio.wait({self._task})


class KubeletSessions:
    """The sessions, one for each resource."""

    def __init__(self, allocator: Allocator, directory: str, wake: Wake) -> None:
        self.by_name: dict[str, KubeletSession] = {}
        self.allocator = allocator
        self._directory = directory
        self._wake = wake
        self._closing: dict[str, Task] = {}  # sessions of resources that have ended

    @property
    def have_started(self) -> bool:
        """Return whether each session has registered, has failed to, or waits for a kubelet."""
        sessions = self.by_name.values()
        return all(session.registration.phase is not Phase.STARTING for session in sessions)

    @property
    def registrations(self) -> Registrations:
        return {name: session.registration for name, session in self.by_name.items()}

    def update(
        self,
        resources: Resources,
        checkpoint: FileStamp | None,
        others: Collection[str],
        *,
        is_disturbed: bool,
    ) -> None:
        """Bring the sessions in line with these resources; raises OSError.

        `others`: resources of which the checkpoint has IDs that another plugin has listed;
        `is_disturbed`: see KubeletSession.update().
        """
        for name in self.by_name.keys() - resources.keys():
            log.info("%s: no devices left; no longer registered", name)
            self._closing[name] = asyncio.create_task(self._close(self.by_name.pop(name)))

        for name, resource in resources.items():
            if name in self._closing:  # it returns once its former session has ended completely
                continue

            session = self.by_name.get(name)
            if session is None:
                session = KubeletSession(name, self.allocator, self._directory, self._wake)
                self.by_name[name] = session
            others_checkpoint = checkpoint if name in others else None
            session.update(resource.device_list, others_checkpoint, is_disturbed=is_disturbed)

    async def _close(self, session: KubeletSession) -> None:
        await session.close()
        del self._closing[session.name]
        self._wake()

    async def close(self) -> None:
        closing = (session.close(is_exiting=True) for session in self.by_name.values())
        await asyncio.gather(*closing, *self._closing.values())


# ==== POD RESOURCES: pods' names, on which nothing depends ========================================

NAMES_TIMEOUT = 1.0  # seconds
NAMES_PAUSES = (1.0, 300.0)  # seconds: the first pause until the same question, and the longest


class PodResources:
    """Asks the kubelet for the names of pods."""

    def __init__(self, apply: Callable[[PodNames, Collection[HoldKey]], None]) -> None:
        """`apply`: takes what the kubelet has listed, and the holds when it was asked."""
        self._apply = apply
        self._task: Task | None = None
        self._has_failed = False  # the last question; of failures in a row the first is logged
        self._pods: set[str] = set()  # for whose names it was asked last
        self._next_at = 0.0  # when it may be asked for them again
        self._pause = 0.0

    def ask(self, path: str, holds: Collection[HoldKey], pods: set[str], now: float) -> None:
        """Ask the kubelet at this socket for these pods' names, unless a question is under way.

        With each answer, the pause until the same question grows: some pods are never listed, such
        as one of which only an init container has devices; and while a kubelet before 1.38 answers,
        it can give one ID to two pods (kubernetes#137534). `holds`: the current ones.
        """
        if pods != self._pods:
            self._pods, self._next_at, self._pause = pods, now, NAMES_PAUSES[0]
        is_idle = self._task is None or self._task.done()
        if is_idle and now >= self._next_at:
            self._next_at = now + self._pause
            self._pause = min(2 * self._pause, NAMES_PAUSES[1])
            self._task = asyncio.create_task(self._ask(path, holds))

    async def _ask(self, path: str, holds: Collection[HoldKey]) -> None:
        try:
            self._apply(await list_pods(path), holds)
            self._has_failed = False
        except (grpc.aio.AioRpcError, DecodeError) as error:
            if not self._has_failed:
                log.warning("cannot get pod names from %s: %s", path, grpc_message(error))
            self._has_failed = True
            self._pods = set()  # as if it had not been asked: the next question is a new one


async def list_pods(path: str) -> PodNames:
    """Return pods' names; raises AioRpcError, DecodeError."""
    async with grpc.aio.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) as channel:
        # Without stubs: the request has no fields, so no bytes.
        call: Any = channel.unary_unary("/v1.PodResourcesLister/List")
        answer = await call(b"", timeout=NAMES_TIMEOUT)

    names = defaultdict(set)
    for pod in podresources_pb2.ListPodResourcesResponse.FromString(answer).pod_resources:
        for container in pod.containers:
            for devices in container.devices:
                for device_id in devices.device_ids:
                    key = (devices.resource_name, device_id, container.name)
                    names[key].add(printable(f"{pod.namespace}/{pod.name}"))
    return names


# ==== CONNECTIONS: readers of metrics and of the view =============================================


class SharedText:
    """A text that is rendered once for simultaneous readers."""

    # Seconds: Reporter._await_details() can wait for two reads. Less than a connection has.
    TIMEOUT = 2 * READ_TIMEOUT + 0.5

    def __init__(self, render: Callable[[], Coroutine[Any, Any, str | None]]) -> None:
        self._render = render
        self._rendering: asyncio.Task[str | None] | None = None

    async def get(self) -> str | None:
        """Return the text; None if it cannot be rendered, or not in time."""
        if self._rendering is None or self._rendering.done():
            self._rendering = asyncio.create_task(self._rendered())
        rendering = self._rendering
        await asyncio.wait({rendering}, timeout=self.TIMEOUT)
        return rendering.result() if rendering.done() else None

    async def _rendered(self) -> str | None:
        with log_and_continue("rendering a report"):
            return await self._render()
        return None


class ConnectionServer:
    """Accepts connections on a socket. A slow client delays only itself."""

    MAX_CONNECTIONS = 32
    TIMEOUT = 5.0  # seconds for all of a connection
    RETRY_AFTER = 5.0  # seconds, without descriptors for connections

    def __init__(self, answer: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
        self._answer = answer
        self._open: dict[Task, socket.socket] = {}  # the oldest first

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections; the oldest makes room for the newest."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        has_failed = False  # the last attempt to accept; of failures in a row one is logged
        while True:
            while len(self._open) >= self.MAX_CONNECTIONS:
                # When it has ended, its callback below has removed it.
                oldest = next(iter(self._open))
                oldest.cancel()
                await asyncio.wait({oldest})

            try:
                connection, _ = await loop.sock_accept(listening)
                has_failed = False
            except OSError as error:
                if not has_failed:
                    log.warning("cannot accept a connection: %s", error.strerror)
                has_failed = True
                await asyncio.sleep(self.RETRY_AFTER)
                continue

            task = asyncio.create_task(self._serve(connection))
            self._open[task] = connection
            task.add_done_callback(lambda task: self._open.pop(task).close())

    async def _serve(self, connection: socket.socket) -> None:
        with suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._answer(connection), self.TIMEOUT)


class MetricsServer:
    """Serves `GET /metrics`."""

    HEAD_MAX = 8192  # bytes of a request

    def __init__(self, text: SharedText) -> None:
        self._text = text
        self._server = ConnectionServer(self._answer)

    async def serve(self, listening: socket.socket) -> None:
        await self._server.serve(listening)

    async def _answer(self, connection: socket.socket) -> None:
        """Read one request, and answer it; nothing to a client that sends none."""
        loop = asyncio.get_running_loop()
        head = b""
        while not re.search(rb"\r?\n\r?\n", head):
            received = await loop.sock_recv(connection, self.HEAD_MAX)
            head += received
            if not received or len(head) > self.HEAD_MAX:
                return

        status, text = "404 Not Found", "use GET /metrics\n"
        if re.match(rb"GET /metrics[ ?]", head):
            metrics = await self._text.get()
            status, text = "200 OK", metrics or ""
            if metrics is None:
                status, text = "503 Service Unavailable", "the metrics cannot be collected\n"

        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(text.encode())}",
            "Connection: close",
        ]
        await loop.sock_sendall(connection, "\r\n".join([*lines, "", text]).encode())


# ==== DAEMON: observe, decide, apply ==============================================================
#
# A turn of the loop looks at:
#
#     always            the kubelet's directory, the checkpoint if it has changed, readings that
#                       have arrived
#     after a uevent    which chips and device files exist; each chip's telemetry
#     at a poll         the same, and missing heartbeats are counted ([health] interval)
#     in a round        everything that sends no event: pods' cgroups, files for others, names of
#                       pods; at each poll, and at least every ROUND seconds
#     while a pod       pods' cgroups, every START_INTERVAL seconds
#     starts
#     while the list    pods' cgroups, every HELD_INTERVAL seconds
#     depends on holds

ROUND = 5.0  # seconds, at most, between looks at cgroups, files and pods' names
START_TICK = 0.02  # seconds between turns before READY=1
RETRY_TICK = 1.0  # seconds between turns after an error, or without inotify
HELD_INTERVAL = 1.0  # seconds between looks at pods while the list depends on one's end
TIDY_INTERVAL = 0.02  # seconds between turns that remove directories
DEBOUNCE = 0.03  # seconds for which kernel events after the first one are gathered
BIND_TIMEOUT = 10.0  # seconds that the driver has for the cards
METRICS_INTERVAL = 15.0  # seconds between readings of sensors
STATUS_SOCKET = "status.sock"  # in the runtime directory


class Reporter:
    """Reports to those who ask: Prometheus, `list` and `check`.

    It looks at nothing itself: the loop reads sensors and processes for it.
    """

    def __init__(self, host: Host, sessions: KubeletSessions) -> None:
        self.metrics = SharedText(self._render_metrics)
        self._view = SharedText(self._render_view)
        self._host = host
        self._sessions = sessions
        self._started = time.time()
        self.wants_details = False  # until the loop has chips read with them
        self.is_up_to_date = asyncio.Event()  # set by the loop; cleared by a report that waits
        self._details_at = -inf  # when sensors and processes were read
        self._written_at = -inf  # when the metrics file was written last, or should have been
        self._tasks: set[Task] = set()
        self._status_socket: socket.socket | None = None

    def open(self, metrics_sockets: Iterable[socket.socket]) -> None:
        """Serve metrics on these sockets, and the view on the status socket."""
        server = MetricsServer(self.metrics)
        for listening in metrics_sockets:
            self._start(server.serve(listening))

        if directory := self._host.settings.runtime_dir:
            path = f"{directory}/{STATUS_SOCKET}"
            try:
                self._status_socket = listening = _listen_for_root(path)
            except OSError as error:
                reason = f"{error.strerror or error}; list and check cannot reach this daemon"
                log.warning("cannot open the status socket %s: %s", path, reason)
            else:
                self._start(ConnectionServer(self._send_view).serve(listening))

    async def close(self) -> None:
        """Stop serving, so that the next daemon can have the status socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._status_socket:
            self._status_socket.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._tasks.discard)

    def status(self, decision: Decision) -> str:
        """Return the status line, with all problems that the daemon knows of."""
        host = self._host
        rejected = f"the configuration was rejected at the last reload: {host.rejected}"
        problems = [*map(str, host.problems.values()), host.waits_for_directory]
        problems += [rejected] if host.rejected else []
        return status_line(decision, self._sessions.registrations, problems)

    def write_metrics_if_due(self, now: float) -> None:
        """Begin to write the metrics file, if its directory exists."""
        path = self._host.settings.metrics_file
        if path and now - self._written_at >= METRICS_INTERVAL and isdir(dirname(path)):
            self._written_at = now
            self._start(self._write_metrics())

    async def _write_metrics(self) -> None:
        """Write the metrics file, if the metrics can be rendered."""
        text = await self.metrics.get()
        path = self._host.settings.metrics_file
        if path and text is not None:  # else the file is left to grow old
            self._host.files.write(path, text)

    async def _render_metrics(self) -> str | None:
        """Return all metrics, with sensors that are at most METRICS_INTERVAL old; None: none."""
        await self._await_details(METRICS_INTERVAL)
        if self._host.is_unreadable:
            return None  # figures of the last state would pass for new ones
        decision = self._host.decide(monotonic())
        counts = self._sessions.allocator.counts
        metrics = plugin_metrics(decision, self._sessions.registrations, counts, self._started)
        return chip_metrics(decision, self._host.inventory.states) + metrics

    async def _render_view(self) -> str:
        """Return the view as JSON, with sensors and processes as they are now."""
        host = self._host
        await self._await_details(0.0)
        decision = host.decide(monotonic())

        service = Service(
            self.status(decision),
            self._sessions.registrations,
            host.rejected,
            {**host.files.problems, **host.state_file.problems},
            host.problems,
            host.directories.problems(decision.holds),
        )
        return json.dumps(host.view(decision, service))

    async def _send_view(self, connection: socket.socket) -> None:
        if text := await self._view.get():
            await asyncio.get_running_loop().sock_sendall(connection, text.encode())

    async def _await_details(self, max_age: float) -> None:
        """Have the loop read sensors and processes, unless they were within `max_age` seconds.

        Returns when the loop has applied what it found, or has failed.
        """
        if monotonic() - self._details_at < max_age:
            return

        self.wants_details = True
        self.is_up_to_date.clear()
        self._host.wake()
        await self.is_up_to_date.wait()
        if not self._host.is_unreadable:
            self._details_at = monotonic()


def _listen_for_root(path: str) -> socket.socket:
    """Return a listening socket that only root can connect to; raises OSError.

    A daemon of another directory, started by hand, does not take the socket of the service.
    """
    if not connection_error(path):  # somebody answers
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    if_exists(os.unlink, path)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen()
    return listening


def _has_same_devices(decision: Decision, other: Decision) -> bool:
    """Return whether files for others have the same texts: no hold or name of a pod is in them."""
    one, two = decision.observation, other.observation
    is_same_host = (one.driver, one.mounts) == (two.driver, two.mounts)
    return is_same_host and decision.offer is other.offer


def _chips_to_list(decision: Decision) -> list[str]:
    """Return the chips that the loaded driver can bind, but that are not listed yet.

    systemd starts the kubelet after READY=1. Pods whose devices are not listed then would be ended
    (UnexpectedAdmissionError).
    """
    observation = decision.observation
    if observation.driver is None:
        return []

    missing = []
    for bdf, chip in decision.chips.items():
        if chip.is_listed or chip.function.file_fault or bdf in observation.settings.exclude:
            continue
        if driver_can_bind(chip.function):
            missing.append(bdf)
    return missing


def directory_problem(error: OSError) -> Reason:
    """Return why a directory of a hold cannot be used, and the command that helps."""
    problem = f"directory for containers cannot be used: {error.filename}: {error.strerror}"
    path = abspath(error.filename)
    while not os.path.lexists(path):  # it cannot be made in the one around it
        path = dirname(path)

    if error.errno == errno.EROFS:
        while not os.path.ismount(path):
            path = dirname(path)
        return Reason(problem, f"mount -o remount,rw {shlex.quote(path)}")
    if error.errno in (errno.EPERM, errno.EACCES):
        command = "chmod u+rwx,go-w" if _is_roots(os.lstat(path)) else "chown root"
        return Reason(problem, f"{command} {shlex.quote(path)}")
    return Reason(problem)


class Stage(Enum):
    """How far the start of the daemon is."""

    SCANNING = 1  # not all chips have been read: nothing is applied
    BINDING = 2  # the driver may still be binding cards; devices are advertised already
    READY = 3


class Daemon:
    """The service. Events only wake the loop, which observes, decides and applies."""

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], manager: ServiceManager
    ) -> None:
        """`load`: reads the settings again, for a reload; raises ConfigError."""
        log.setLevel(settings.log_level.upper())
        self._wake = asyncio.Event()
        wake = self._wake.set
        self.host = Host(settings, wake)
        self.sessions = KubeletSessions(Allocator(self.host), settings.device_plugin_dir, wake)
        self._reporter = Reporter(self.host, self.sessions)
        self._directory = PluginDirectory(settings.device_plugin_dir, wake)
        self._uevents = UeventSocket(self._scan_soon)
        self._pod_resources = PodResources(self._apply_names)
        self._manager = manager
        self._load = load

        self._stage = Stage.SCANNING
        self._binding_since = 0.0
        self._round_at = -inf
        self._must_tidy = False  # there are directories to remove
        self._must_write = False  # the devices have changed, but not yet the files for others
        self._wants_reload = False
        self._must_scan = False  # events, or a failure, ask for a scan
        self._exit_status: int | None = None

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        # Else gRPC ends its thread whenever no socket is open, and starts it with the next one.
        grpc.aio.init_grpc_aio()
        try:
            self._open()
            pause = 0.0
            while self._exit_status is None:
                timer = asyncio.get_running_loop().call_later(pause, self._wake.set)
                await self._wake.wait()
                timer.cancel()
                self._wake.clear()

                pause = RETRY_TICK
                with log_and_continue("main loop"):
                    await self._turn(monotonic())
                    pause = self._pause(monotonic())
            return self._exit_status
        finally:
            self._manager.notify("STOPPING=1")
            self._uevents.close()
            await self._reporter.close()
            await self.sessions.close()
            if self.host.save_by < inf:  # calls can have been answered until now
                self.host.save_state()
            self._directory.close()

    def end(self, status: int) -> None:
        """Have the daemon end with this exit status."""
        self._exit_status = status
        self._wake.set()

    def reload(self) -> None:
        """Have the configuration read again in the next turn."""
        self._wants_reload = True
        self._wake.set()

    def _scan_soon(self) -> None:
        self._must_scan = True
        self._wake.set()

    def _open(self) -> None:
        """Handle signals, take the kubelet's directory, and open the sockets for events and views.

        If another daemon has the directory, this one ends.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.end, 0)
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # main() has blocked it

        try:
            self._directory.check()
        except DirectoryError as error:
            self._exit(*error.args)
            return

        # Only now: a daemon that has the directory would have sockets of these names.
        remove_dead_sockets(self._directory.path)
        self._uevents.open()
        self._reporter.open(self._manager.sockets("metrics"))

    def _exit(self, status: int, reason: str) -> None:
        log.error("%s", reason)
        self.end(status)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next turn, if no event comes before."""
        if self.host.is_unreadable:
            return RETRY_TICK

        host = self.host
        due = [
            now + self._manager.feed_interval,
            self._round_at + ROUND,
            host.save_by,
            host.polled_at + host.settings.health.interval,
        ]

        if not self._directory.is_watched:
            due.append(now + RETRY_TICK)
        if self._stage is not Stage.READY:
            due.append(now + START_TICK)
        if self._must_scan:
            due.append(host.scanned_at + DEBOUNCE)
        if host.holds.is_awaiting_containers:
            due.append(now + START_INTERVAL)
        if host.applied and host.applied.depends_on_holds:
            due.append(host.looked_at + HELD_INTERVAL)
        if self._must_tidy:
            due.append(now + TIDY_INTERVAL)
        return max(0.0, min(due) - now)

    async def _turn(self, now: float) -> None:
        """Reload the configuration if that is wanted, and reconcile.

        A reload ends, for systemd, only after the attempt to apply it.
        """
        is_reload = self._wants_reload
        # Before READY=1, systemd expects no RELOADING=1.
        is_reported = is_reload and self._stage is Stage.READY
        if is_reported:
            self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

        try:
            if is_reload:
                self._reload()
            await self._reconcile(now)
        finally:
            if is_reported:
                self._manager.notify("READY=1")

    async def _reconcile(self, now: float) -> None:
        """Observe, decide, apply. If a file cannot be read, the next turn begins with a scan."""
        host = self.host
        is_poll = now - host.polled_at >= host.settings.health.interval
        is_round = is_poll or now - self._round_at >= ROUND
        try:
            self._directory.check()
            host.waits_for_directory = self._directory.problem
            self._observe(now, is_poll=is_poll, is_round=is_round)

            # After a failure all chips are read again before anything is applied.
            if host.is_unreadable and not host.readers.is_settled(now):
                return
            if self._stage is not Stage.SCANNING:
                decision = self._apply(now, is_round=is_round)
                await asyncio.sleep(0)  # the kubelet gets a changed list before files are written
                self._publish(decision, now, is_round=is_round)

        except DirectoryError as error:
            self._exit(*error.args)

        except OSError as error:
            self._note_failure(error)
            return

        if is_round:
            self._round_at = now
        if not self._reporter.wants_details and host.readers.is_over(now):
            self._reporter.is_up_to_date.set()
        # Only here, so that systemd restarts a daemon whose observations keep failing.
        self._manager.feed_watchdog()

    def _note_failure(self, error: OSError) -> None:
        """Report that the last state is old from now on, and have the next turn scan."""
        host = self.host
        if not host.is_unreadable:
            reason = Reason(f"cannot read the node's state; keeping the last one: {error}")
            host.note_problem(UNREADABLE_HOST, reason)
            applied = host.applied
            self._manager.show(self._reporter.status(applied) if applied else str(reason))

        self._must_scan = True
        host.scanned_at = -inf  # at once: a turn without a scan would apply an old state
        self._reporter.is_up_to_date.set()

    def _observe(self, now: float, *, is_poll: bool, is_round: bool) -> None:
        """Look at everything that may have changed; raises OSError."""
        host = self.host
        host.take_readings(now)
        self._must_scan |= host.readers.take_skipped()

        # A chip that is being read would be left out.
        details = self._reporter.wants_details and host.readers.is_over(now)
        if is_poll or details or (self._must_scan and now - host.scanned_at >= DEBOUNCE):
            self._must_scan = False
            self._reporter.wants_details &= not details
            host.read_chips(is_poll=is_poll, details=details)
        host.inventory.date_faults(seconds_since_boot())

        is_starting = host.holds.is_awaiting_containers
        look = is_round or is_starting or now - host.looked_at >= HELD_INTERVAL
        host.refresh_holds(now, look=look)
        if is_round:
            host.holds.note_ended_pods()

        if self._stage is Stage.SCANNING and host.readers.is_settled(now):
            self._stage = Stage.BINDING
            self._binding_since = now

    def _apply(self, now: float, *, is_round: bool) -> Decision:
        """Decide, and bring in line what pods depend on: directories and sessions.

        No call is answered meanwhile, as nothing is awaited: the decision knows all holds, so no
        directory is removed that one names.
        """
        host = self.host
        former, decision = host.applied, host.decide(now)
        has_same_devices = former is not None and _has_same_devices(decision, former)
        self._must_write |= not has_same_devices

        if is_round or not has_same_devices:
            self._put_directories_right(decision)
        if is_round or decision is not former or self._must_tidy:
            self._remove_directories(decision, now)

        self.sessions.update(
            decision.resources,
            host.holds.checkpoint_stamp,
            host.holds.other_plugins(decision.holds),
            # What has failed can have kept them from registering, too: descriptors, memory.
            is_disturbed=self._directory.take_changes() or host.is_unreadable,
        )
        return decision

    def _publish(self, decision: Decision, now: float, *, is_round: bool) -> None:
        """Bring in line what others read: log, files and status."""
        host = self.host
        if decision is not host.applied:
            for level, line in changes(host.applied, decision):
                log.log(level, "%s", line)
        host.applied = decision  # if anything before has failed, the next turn repeats it

        # The readings that an event has caused can change the devices once more.
        writes = is_round or (self._must_write and host.readers.is_settled(monotonic()))
        if writes:
            self._must_write = False
            self._write_files(decision)
        if writes or now >= host.save_by:
            host.save_state()
        if is_round:
            self._ask_for_names(decision, now)
            self._reporter.write_metrics_if_due(now)

        if host.is_unreadable:  # no longer, as all of the above could be done
            log.info("the node's state can be read again")
            host.note_problem(UNREADABLE_HOST, None)
        waiting = None if self._stage is Stage.READY else self._get_ready(decision, now)
        self._manager.show(waiting or self._reporter.status(decision))

    def _put_directories_right(self, decision: Decision) -> None:
        """Make the directories that holds name, if they are missing; Allocate makes new ones."""
        host = self.host
        problem = None
        for hold in decision.holds:
            try:
                host.directories.put_right(hold)
            except OSError as error:
                problem = problem or directory_problem(error)
        host.note_problem("directories", problem)

    def _remove_directories(self, decision: Decision, now: float) -> None:
        """Remove the directories that no hold names, as many as one turn can."""
        host = self.host

        # Locks are looked for in what the configuration names: a former daemon's pods can have left
        # some, and no hold names their directory.
        for resource in decision.resources.values():
            if locks := lock_path(resource, resource.devices, host.settings):
                host.directories.note_locks(locks)

        try:
            unnamed = host.unnamed_directories(decision, now)
            steps = RemovalSteps(seconds=STEPS_TAKE)
            host.directories.clear(unnamed, left_behind=(), now=now, steps=steps)
            self._must_tidy = False
        except OutOfSteps:
            self._must_tidy = True

    def _write_files(self, decision: Decision) -> None:
        """Write the files for others, unless they are as they should be."""
        settings = self.host.settings
        texts: dict[str, str | None] = {}  # by path; None: no file
        if settings.cdi_dir:
            texts[f"{settings.cdi_dir}/{CDI_FILE}"] = cdi_file(decision)
        if settings.labels_dir:
            texts[f"{settings.labels_dir}/{LABELS_FILE}"] = labels_file(decision)

        self.host.files.keep(texts, unmanaged=[settings.metrics_file])
        self._check_cdi_file()

    def _check_cdi_file(self) -> None:
        """Note whether pods can get their devices through the CDI file."""
        settings = self.host.settings
        problem = None
        if settings.device_list_strategy == "cdi":
            path = f"{settings.cdi_dir}/{CDI_FILE}"
            if reason := self.host.files.problems.get(path):
                problem = Reason(f"pods cannot get devices through {path}: {reason}")
        self.host.note_problem("CDI", problem)

    def _ask_for_names(self, decision: Decision, now: float) -> None:
        """Ask for the names of holds' pods that are not known."""
        pods = {hold.pod for hold in decision.holds} - {""} - self.host.holds.names.keys()
        if pods:
            holds = {hold.key for hold in decision.holds}
            directory = dirname(self.host.settings.device_plugin_dir)
            path = f"{directory}/pod-resources/kubelet.sock"
            self._pod_resources.ask(path, holds, pods, now)

    def _apply_names(self, names: PodNames, asked: Collection[HoldKey]) -> None:
        self.host.holds.apply_names(names, asked)
        self._wake.set()

    def _get_ready(self, decision: Decision, now: float) -> str | None:
        """Notify READY=1 once all is served. While it waits for the driver, return that status."""
        missing = _chips_to_list(decision)
        if missing and now - self._binding_since < BIND_TIMEOUT:
            return f"waiting for the driver to create a device file for {missing[0]}"

        version = decision.observation.driver
        driver = f"driver {version or 'is not loaded'}"
        present = pluralize(len(self.host.inventory.present), "chip")
        is_unfit = version is None or not decision.resources
        if self.host.settings.fail_on_init_error and is_unfit:
            none = "" if decision.resources else "; no device to offer"
            self._exit(1, f"exiting (fail_on_init_error): {driver}, {present}{none}")
            return None
        if not self.sessions.have_started:
            return None

        if missing:
            log.warning("%s: no device file; starting without it", ", ".join(missing))
        self._stage = Stage.READY
        log.info("tt-device-plugin %s: %s, %s", __version__, driver, present)
        # `systemctl start` ends with READY=1, and shows the status that is there by then.
        self._manager.show(self._reporter.status(decision))
        self._manager.notify("READY=1")
        return None

    def _reload(self) -> None:
        """Take the new configuration, except for the keys that need a restart."""
        self._wants_reload = False
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("reload failed, keeping the old configuration: %s", error)
            self.host.rejected = str(error)
            return

        # Files and sockets below these directories were opened at the start.
        self.host.rejected = None
        before = self.host.settings
        for key in NEEDS_RESTART:
            value = getattr(before, key)
            if getattr(loaded, key) != value:
                log.warning("%s needs a restart to change; still using %s", key, value)
        kept = {key: getattr(before, key) for key in NEEDS_RESTART}
        self.host.settings = replace(loaded, **kept)
        log.setLevel(loaded.log_level.upper())
        log.info("configuration reloaded")


# ==== COMMAND LINE ================================================================================
#
# `list`, `check` and `fix` read the view that the running daemon serves, so they cannot contradict
# the log, the metrics or the kubelet.

View = Mapping[str, Any]  # as view_of_node() makes it, or a part of it

RUNTIME_DIR = "/run/tt-device-plugin"  # as systemd makes it for the service
VIEW_TIMEOUT = 10.0  # seconds; the daemon ends a connection after 5
START = "systemctl start tt-device-plugin"
RESTART = "systemctl restart tt-device-plugin"


class Refusal(Exception):
    """Why a command cannot go on, in one line, and its exit status."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status


class NoView(Refusal):
    """Why the daemon's view cannot be read; `level`: of the finding of `check`."""

    def __init__(self, level: str, problem: str, command: str = "") -> None:
        self.level = level
        self.reason = Reason(problem, command)
        super().__init__(f"the service {self.reason}")


def say(text: str) -> None:
    """Print a line at once, with the control characters of names that others choose escaped."""
    print(printable(text), flush=True)


# -- the view of the node --------------------------------------------------------------------------

# What the commands need of a view. A service that was not restarted after an upgrade has another
# version; its view will do if it has all of this.
NEEDED = {
    "view": "version settings rejected driver unsupported chips problems",
    "settings": "root runtime_dir device_plugin_dir cdi_dir hugepages mounts health",
    "problems": "level subject kind problem command",
    "chips": "id index bdf path card board arch serial numa_node firmware temperature power "
    "healthy withheld resource replicas pods processes excluded since",
}


def read_view() -> View:
    """Return the view of the running daemon, of whatever version; raises NoView."""
    path = f"{os.environ.get('RUNTIME_DIRECTORY') or RUNTIME_DIR}/{STATUS_SOCKET}"
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(VIEW_TIMEOUT)
            connection.connect(path)
            view: View = json.loads(connection.makefile("rb").read())
        if not isinstance(view, dict) or view.get("program") != PROGRAM:
            raise ValueError

    # A daemon that was killed leaves its socket.
    except (FileNotFoundError, ConnectionRefusedError):
        raise NoView("FAIL", "is not running", START) from None
    except PermissionError:
        text = f"cannot be asked: {path}: permission denied; run it as root"
        raise NoView("warn", text) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise NoView("FAIL", f"does not answer on {path}: {reason}") from None
    except (ValueError, RecursionError):  # nothing, or another program's answer
        text = f"does not answer on {path} with its view of the node"
        raise NoView("FAIL", text, "journalctl -u tt-device-plugin") from None
    return view


def read_usable_view() -> View:
    """Return the view of the running daemon, with all that is needed; raises NoView."""
    view = read_view()
    if not is_usable(view):
        # Only `check` knows whether a restart is safe: it reads the configuration.
        text = f"is of version {view.get('version')}, whose view has another form"
        raise NoView("warn", text, "tt-device-plugin check")
    return view


def is_usable(view: View) -> bool:
    """Return whether a view has all that the commands need."""
    parts = [("view", view), ("settings", view.get("settings", {}))]
    parts += [(name, each) for name in ("problems", "chips") for each in view.get(name, ())]
    return all({*NEEDED[name].split()} <= part.keys() for name, part in parts)


def faults_of(view: View) -> dict[str, View]:
    """Return the problems that are faults of chips, by address."""
    kinds = {kind.value for kind in Kind}
    return {each["subject"]: each for each in view["problems"] if each["kind"] in kinds}


def users_of(row: View) -> list[str]:
    """Return the pods and processes that use a chip. A pod's process is the pod."""
    found = pods_of(row)
    for process in row["processes"] or ():
        if not (row["pods"] and process["of_pod"]):
            found.append(f"{process['command']}[{process['pid']}]")
    return found


def pods_of(row: View) -> list[str]:
    """Return the pods that hold a chip, each once: "namespace/name", or the UID."""
    pods = [f"{pod['namespace']}/{pod['pod']}".lstrip("/") for pod in row["pods"] or ()]
    return list(dict.fromkeys(pods))


def since_text(row: View, now: datetime) -> str:
    """Return when a chip's fault began, in local time; with the date from the second day on."""
    if row["since"] is None:
        return ""
    # Python 3.10 does not know the Z.
    began = datetime.fromisoformat(row["since"].replace("Z", "+00:00")).astimezone(now.tzinfo)
    form = "%H:%M" if began.date() == now.date() else "%Y-%m-%d %H:%M"
    return began.strftime(f" (since {form})")


# -- list ------------------------------------------------------------------------------------------


def list_chips(options: argparse.Namespace) -> int:
    """Print the chips; return the exit status."""
    view = read_usable_view()
    if options.json:
        print(json.dumps(view["chips"], indent=2))
    else:
        for line in list_lines(view, datetime.now().astimezone()):
            say(line)
    return 0


def list_lines(view: View, now: datetime) -> Iterator[str]:
    """Yield the versions, a row for each chip, a line for each fault, and a total."""
    rows = view["chips"]
    if rows:
        versions = {row["firmware"] for row in rows} - {None}
        firmware = "mixed" if len(versions) > 1 else next(iter(versions), "unknown")
        yield f"driver {view['driver'] or 'not loaded'}, firmware {firmware}"
        yield from _table(view)

    times = {row["bdf"]: since_text(row, now) for row in rows}
    problems = [problem for problem in view["problems"] if problem["kind"]]
    for problem in problems:
        subject = problem["subject"]
        text = f"{subject}: {problem['problem']}{times.get(subject, '')}"
        yield str(Reason(text, problem["command"]))

    unhealthy = sum(1 for row in rows if row["healthy"] is False)
    in_use = sum(1 for row in rows if users_of(row))
    if rows:
        yield f"{pluralize(len(rows), 'chip')}, {unhealthy} unhealthy, {in_use} in use"
    elif not problems:
        yield "no Tenstorrent device on this node"


def _table(view: View) -> Iterator[str]:
    """Yield the titles and a row for each chip."""
    table = [_cells(view, row) for row in view["chips"]]
    if all(row["id"] in (row["bdf"], None) for row in view["chips"]):
        for cells in table:
            del cells["ID"]  # which is there for the IDs of boards

    table.insert(0, {title: title for title in table[0]})
    widths = {title: max(len(cells[title]) for cells in table) for title in table[0]}
    for cells in table:
        yield "  ".join(cells[title].ljust(width) for title, width in widths.items()).rstrip()


def _cells(view: View, row: View) -> dict[str, str]:
    """Return a chip's row of the table, by the titles of the columns."""
    health = "withheld" if row["withheld"] else "healthy"
    if fault := faults_of(view).get(row["bdf"]):
        health = fault["kind"].upper()
    elif row["healthy"] is None:
        health = "excluded"

    found = users_of(row)
    users = ", ".join(found[:2]) or ("?" if None in (row["pods"], row["processes"]) else "-")
    resource = without_domain(row["resource"] or "")
    values = {
        "N": row["index"],
        "ADDRESS": row["bdf"],
        "ID": row["id"],
        "CARD": row["card"],
        "SERIAL": row["serial"],
        "NUMA": row["numa_node"],
        "FIRMWARE": row["firmware"],
        "RESOURCE": f"{resource} ×{row['replicas']}" if row["replicas"] else resource,
        "°C": None if row["temperature"] is None else int(row["temperature"]),
        "W": None if row["power"] is None else int(row["power"]),
        "HEALTH": health,
        "USED BY": f"{users} +{len(found) - 2}" if len(found) > 2 else users,
    }
    return {title: "-" if value in (None, "") else str(value) for title, value in values.items()}


# -- check -----------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A line of `check`."""

    level: str  # "ok", "warn" or "FAIL"
    subject: str
    problem: str
    command: str = ""  # that helps

    def __str__(self) -> str:
        return f"{self.level:4}  {self.subject}: {Reason(self.problem, self.command)}"


Findings = Iterator[Finding]
PAGES_PER_CHIP = 4  # of 1 GiB, as Tenstorrent's tt-system-tools reserves for each device file
GIANT_PAGES = "/dev/hugepages-1G"
LANES_MAX = 32  # of a link; one of a chip that does not respond has 63 (all ones)


def check(options: argparse.Namespace) -> int:
    """Print what is in order on this node, and what is not; return 1 if anything FAILs."""
    invalid = None
    try:
        load_settings(vars(options), os.environ)
    except ConfigError as error:
        invalid = str(error)

    if options.config_only:
        found = [Finding("FAIL" if invalid else "ok", "configuration", invalid or "valid")]
    else:
        try:
            view: View | NoView = read_view()
        except NoView as no_view:
            view = no_view
        found = [*findings(view, invalid)]
    found += [Finding("warn", "configuration", text) for text in unknown_variables(os.environ)]

    shown = [each for each in found if each.level != "ok" or not options.quiet]
    if options.quiet:  # for readers that cut it: node-problem-detector, a pager
        shown.sort(key=lambda finding: finding.level != "FAIL")
    for finding in shown:
        say(str(finding))
    return 1 if any(each.level == "FAIL" for each in found) else 0


def findings(view: View | NoView, invalid: str | None) -> Findings:
    """Yield all findings about a node; `invalid`: why the configuration on disk is not valid."""
    yield _configuration(view, invalid)
    found = [_service(view, invalid)]
    if not isinstance(view, NoView) and is_usable(view):
        for each in view["problems"]:
            found.append(Finding(each["level"], each["subject"], each["problem"], each["command"]))
        for part in (_driver, _chips, _hugepages, _mounts, _kubelet, _other_allocators):
            found += part(view)

    for finding in found:
        # The service would not start again: it runs on with its last valid configuration.
        if invalid and finding.command == RESTART:
            problem = f"{finding.problem}; correct the configuration first"
            finding = finding._replace(problem=problem, command="")
        yield finding


def _configuration(view: View | NoView, invalid: str | None) -> Finding:
    if invalid is None:
        return Finding("ok", "configuration", "valid")
    if isinstance(view, NoView):
        command = view.reason.command if view.reason.command == START else ""
    elif view.get("version") == __version__:
        command = "systemctl reload tt-device-plugin"
    else:  # this version's package is not configured yet
        command = "dpkg --configure -a"
    return Finding("FAIL", "configuration", f"{invalid}; correct it first", command)


def _service(view: View | NoView, invalid: str | None) -> Finding:
    if isinstance(view, NoView):
        if invalid and view.reason.command == START:
            return Finding("FAIL", "service", "is not running, and cannot start: see configuration")
        return Finding(view.level, "service", *view.reason)

    version = view.get("version")
    if version != __version__:
        return Finding("warn", "service", f"is still version {version}, not {__version__}", RESTART)
    if view.get("rejected") and not invalid:
        text = f"the last reload was rejected: {view['rejected']}"
        return Finding("FAIL", "service", text, "systemctl reload tt-device-plugin")
    return Finding("ok", "service", f"version {version} is running")


def _driver(view: View) -> Findings:
    version = view["driver"]
    numbers = [int(number) for number in re.findall(r"\d+", version or "")[:2]]
    if numbers and numbers < [2, 0]:
        text = f"{version}: tt-umd of August 2026 and later needs tt-kmd 2.0 or later"
        yield Finding("warn", "driver", text)
    elif numbers and numbers < [2, 7]:
        text = f"{version} cannot report stopped firmware; update tt-kmd to 2.7 or later"
        yield Finding("warn", "driver", text)
    elif version:
        yield Finding("ok", "driver", version)


def _chips(view: View) -> Findings:
    for bdf in view["unsupported"]:
        text = "not supported: a Tenstorrent card of a generation that this program does not know"
        yield Finding("warn", bdf, text)
    if not view["chips"] and not view["unsupported"]:
        yield Finding("warn", "chips", "none found")

    for row in view["chips"]:
        card = row["card"] or row["arch"] or "unknown card"
        if row["healthy"] is None:
            yield Finding("ok", row["bdf"], f"{card}, excluded by the configuration")
        elif row["healthy"]:
            yield Finding("ok", row["bdf"], f"{card}, {row['path']}, healthy")
            yield from _healthy_chip(row, _pci_directory(view, row))


def _healthy_chip(row: View, directory: str) -> Findings:
    """Check a chip's telemetry, its PCIe link and its file's mode; `directory`: in sysfs."""
    bdf, path = row["bdf"], row["path"]
    if row["temperature"] is None and row["firmware"] is None:
        yield Finding("warn", bdf, "no firmware telemetry; if this persists, check dmesg")

    width = to_integer(read_text(f"{directory}/current_link_width"))
    most = to_integer(read_text(f"{directory}/max_link_width"))
    if width and most and width < most <= LANES_MAX:
        text = f"PCIe link is x{width}, card supports x{most}; reseat the card, or check its slot"
        yield Finding("warn", bdf, text)

    with suppress(OSError):
        mode = stat.S_IMODE(os.stat(path or "").st_mode)
        if mode & 0o666 != 0o666:
            text = f"{path} has mode {mode:04o}, so not every user can open it"
            yield Finding("warn", bdf, f"{text}; install the driver's udev rules")


def _pci_directory(view: View, row: View) -> str:
    return f"{view['settings']['root'].rstrip('/')}/sys/bus/pci/devices/{row['bdf']}"


def _hugepages(view: View) -> Findings:
    """Check for pages of 1 GiB, which chips need unless an IOMMU translates their addresses."""
    settings = view["settings"]
    if settings["hugepages"] == "none":
        return

    chips = 0
    for row in view["chips"]:
        domain = read_text(f"{_pci_directory(view, row)}/iommu_group/type") or ""
        if row["path"] and row["healthy"] is not None and not domain.startswith("DMA"):
            chips += 1

    root = settings["root"].rstrip("/")
    mounts = read_text(f"{root}/proc/mounts") or ""
    if chips:
        yield _giant_pages(chips, root, mounts, settings["mounts"])
    else:
        yield Finding("ok", "hugepages", "none needed")

    if re.search(r" cgroup2 \S*\bmemory_hugetlb_accounting\b", mounts):
        text = "hugepages count towards a pod's memory limit (memory_hugetlb_accounting)"
        yield Finding("ok", "hugepages", text)


def _giant_pages(chips: int, root: str, mounts: str, configured: Sequence[View]) -> Finding:
    """Check the pages of 1 GiB for so many chips; `mounts`: the text of /proc/mounts."""
    needed = chips * PAGES_PER_CHIP
    without = f"{pluralize(chips, 'chip')} without an IOMMU, or with iommu=pt, "
    need = f"{without}{'needs' if chips == 1 else 'need'} {needed}"
    pool = f"{root}/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages"
    pages = to_integer(read_text(pool))
    if pages is None:
        text = f"this kernel has no pages of 1 GiB, but {need}; enable the IOMMU"
        return Finding("warn", "hugepages", text)

    available = f"{pluralize(pages, 'page')} of 1 GiB"
    if pages < needed:
        add = f"add hugepagesz=1G hugepages={needed} to the kernel command line and reboot"
        text = f"{available}, but {need}; {add}, or install tt-system-tools"
        return Finding("warn", "hugepages", text)

    # The kernel prints a page size of 1 GiB as 1024M.
    mounted = re.search(rf" {GIANT_PAGES} hugetlbfs \S*\bpagesize=(\w+)", mounts)
    is_replaced = any(mount["container"] == GIANT_PAGES for mount in configured)
    if not is_replaced and not mounted:
        text = f"no hugetlbfs is mounted on {GIANT_PAGES}, so containers get no pages of 1 GiB"
        mount = f"mount -t hugetlbfs -o X-mount.mkdir,pagesize=1G hugetlbfs {GIANT_PAGES}"
        return Finding("warn", "hugepages", text, mount)
    if not is_replaced and mounted and mounted[1] != "1024M":
        text = f"{GIANT_PAGES} has pages of {mounted[1]}; mount it with pagesize=1G"
        return Finding("warn", "hugepages", text)
    return Finding("ok", "hugepages", f"{available}, {needed} needed")


def _mounts(view: View) -> Findings:
    for mount in view["settings"]["mounts"]:
        if not exists(mount["host"]):
            text = f"{mount['host']} does not exist; pods with devices cannot start"
            yield Finding("warn", "mounts", text)


def _kubelet(view: View) -> Findings:
    path = f"{view['settings']['device_plugin_dir']}/{KUBELET_SOCKET}"
    if exists(path):
        yield Finding("ok", "kubelet", f"{path} exists")
    else:
        yield Finding("warn", "kubelet", f"{path} does not exist; is the kubelet running?")


def _other_allocators(view: View) -> Findings:
    """Look for Tenstorrent's DRA driver, which would give our chips to other pods."""
    settings = view["settings"]
    registry = f"{dirname(settings['device_plugin_dir'])}/plugins_registry"
    for directory, sign in (registry, "tenstorrent"), (settings["cdi_dir"], "k8s.tenstorrent.com-"):
        for name in names_in(directory) if directory else ():
            if sign in name:
                text = (
                    f"Tenstorrent's DRA driver is also on this node ({directory}/{name}), and can "
                    "give chips of this plugin to other pods; remove one of them"
                )
                yield Finding("warn", "allocators", text)


# -- fix: looks before it mends --------------------------------------------------------------------
#
# A command in a text is old when it is pasted: the device number can be another chip's by then. And
# tt-smi resets *all* other cards of the node if it does not find the address that it was given. So
# texts about a chip name this command, which takes one step at a time, each after a look at sysfs
# and at the daemon's view. It runs with the operator's rights; the daemon does none of this.

LOOK_INTERVAL = 0.25  # seconds between looks
FOLLOWS_WITHIN = 30.0  # seconds, at least, for a step's effect, or for a reset to end by itself
ANSWERS_WITHIN = 10.0  # seconds that a starved daemon has to answer after a step
ENDS_WITHIN = 5.0  # seconds that an interrupted tt-smi has to end before it is killed
VERSION_TAKES = 30.0  # seconds that tt-smi has to print its version
TT_SMI_NEEDED = (4, 2)  # the first version that accepts a device file as target
GALAXY_RESETS = (
    "a reset of one chip of a Galaxy needs CPLD firmware 1.16 or later, and users report chips "
    "that could not be used afterwards (tt-umd #3458); tt-smi -glx_reset resets all 32 chips "
    "instead, which interrupts every pod"
)


class Step(Enum):
    """What can help a chip; the value is how it is shown."""

    RESCAN = "rescan the PCI bus, so that the kernel finds missing cards again"
    LOAD = "load the driver, which concerns all chips of this node"
    BIND = "bind the driver to the chip"
    REBIND = "unbind the driver from the chip and bind it again"
    MAKE_FILE = "make the device file again, with the numbers that sysfs has"
    RESET = "reset the chip with tt-smi"
    WAIT = "wait"  # without a command, as it affects nobody


class End(NamedTuple):
    """The reason not to take another step."""

    text: str
    is_well: bool = False


class Look(NamedTuple):
    """A chip at one moment, as sysfs and the daemon show it."""

    function: PciFunction  # by sysfs
    view: View  # the daemon's
    override: str | None = None  # the only driver that the kernel may bind; None: any
    is_arm64: bool = False

    @property
    def row(self) -> View:
        return row_of(self.view, self.function.bdf)

    @property
    def kind(self) -> str:
        """Return the kind of the chip's fault, by the daemon; empty if it has none."""
        fault = faults_of(self.view).get(self.function.bdf)
        return fault["kind"] if fault else ""


class Plan(NamedTuple):
    """A step, and all that an answer to it is about."""

    step: Step
    command: str  # which is shown and run
    users: str  # of the chip
    lines: tuple[str, ...] = ()  # whom else it concerns, and what must be known of it
    pods: tuple[str, ...] = ()  # that lose their chips by it, or have lost them
    needs_answer: bool = False  # which --yes does not give


def row_of(view: View, address: str) -> View:
    """Return the row of a chip; raises Refusal if it was not seen since boot.

    The domain of its address can be left out, as lspci does.
    """
    wanted = address.lower()
    found = [row for row in view["chips"] if wanted in (row["bdf"], row["bdf"].partition(":")[2])]
    if len(found) == 1:
        row: View = found[0]
        return row
    text = f"{address!r} fits several chips" if found else f"{address!r} was not seen since boot"
    raise Refusal(f"{text}; run: tt-device-plugin list", 2)


def next_step(look: Look, done: Sequence[Step]) -> Step | End:
    """Return what to do next about a chip, or why nothing: the first row that applies.

        excluded                            nothing
        not on the bus                      RESCAN
        driver not loaded                   LOAD
        bound to another driver             nothing: a virtual machine may use the card
        not bound                           BIND
        bound, but no class device; silent  REBIND
        device file missing or another's    MAKE_FILE
        healthy                             nothing
        hot, tripped                        nothing: only cooling helps
        resetting                           WAIT, then REBIND
        other faults of a present chip      RESET; nothing on arm64, where tt-smi cannot
        a fault that sysfs does not show    WAIT, then nothing: the daemon has not seen it yet

    A chip that is silent or resetting after REBIND is reset, too.
    """
    function, kind = look.function, look.kind
    if look.row["excluded"]:
        return End("nothing is done: the chip is excluded", look.row["healthy"] is not False)

    step = Step.RESET
    if not function.on_bus:
        step = Step.RESCAN
    elif not function.driver_is_loaded:
        step = Step.LOAD
    elif function.driver not in (None, DRIVER):
        block = f"unbinding {function.driver} would block until the virtual machine ends"
        return End(f"nothing is done: a virtual machine may use the card; {block}")
    elif function.driver is None:
        step = Step.BIND
    elif function.ordinal is None:
        step = Step.REBIND
    elif function.file_fault and kind != "silent":
        step = Step.MAKE_FILE
    elif not kind:
        return End(f"nothing {'more ' if done else ''}needs to be done", is_well=True)
    elif kind in ("hot", "tripped"):
        return End("nothing is done: only cooling helps; check the fans and the air flow")
    elif kind in ("gone", "no_driver", "node"):
        if Step.WAIT in done:
            return End("nothing is done: the service does not see that this is over; see its log")
        step = Step.WAIT
    elif kind == "resetting" and Step.WAIT not in done:
        step = Step.WAIT
    elif kind in ("silent", "resetting") and _is_new(Step.REBIND, done):
        step = Step.REBIND

    if step is Step.RESET and look.is_arm64:
        return End("tt-smi cannot reset chips on arm64; drain this node and reboot it")
    if _is_new(step, done):
        return step
    if step is Step.LOAD:
        return End("no step is left; install the driver (tt-kmd) for the running kernel")
    late = "if the firmware is late, try again in some minutes"
    return End(f"no step is left; {late}; else drain this node and power-cycle it")


def _is_new(step: Step, done: Sequence[Step]) -> bool:
    """Return whether a step was not taken yet; a Blackhole is bound again after its reset.

    Its driver asks for the firmware's telemetry only when it binds (tt-kmd).
    """
    if step is Step.REBIND and Step.RESET in done:
        done = done[done.index(Step.RESET) :]
    return step not in done


def command_of(step: Step, look: Look, settings: Settings, tt_smi: str = "") -> str:
    """Return the shell command that is a step."""
    function = look.function
    bus, quote = f"{settings.sys}/bus/pci", shlex.quote
    driver = f"{bus}/drivers/{DRIVER}"

    if step is Step.RESCAN:
        return f"echo 1 > {quote(f'{bus}/rescan')}"
    if step is Step.LOAD:
        modprobe = "modprobe" if settings.root == "/" else f"{settings.root}/bin/modprobe"
        return f"{quote(modprobe)} {DRIVER}"
    if step is Step.MAKE_FILE:
        # Container runtimes can have made a directory there, for a file that did not exist.
        path = quote(function.path)
        number = f"$(tr : ' ' < {quote(f'{function.class_device}/dev')})"
        make = f"mknod -m 666 {path} c {number}"
        return f"mkdir -p -m 755 {quote(dirname(function.path))}; rm -df {path}; {make}"
    if step is Step.RESET:
        # To tt-smi an address that it does not find is *all* chips; a device file never is, nor is
        # one that TT_VISIBLE_DEVICES leaves out. Its search for devices afterwards (--no_reinit:
        # none) would open those that are in use.
        target = f"/dev/{DRIVER}/{function.ordinal}"
        return f"env -u TT_VISIBLE_DEVICES {quote(tt_smi)} -r {target} --no_reinit"

    # While driver_override names another driver, the kernel refuses to bind ours (ENODEV). An
    # unbind can fail because the driver has let go meanwhile: the bind follows in any case.
    parts = []
    if look.override not in (None, DRIVER):
        parts.append(f"echo > {quote(f'{function.directory}/driver_override')}")
    if step is Step.REBIND:
        parts.append(f"echo {function.bdf} > {quote(f'{driver}/unbind')}")
    return "; ".join([*parts, f"echo {function.bdf} > {quote(f'{driver}/bind')}"])


def plan_of(step: Step, look: Look, command: str = "") -> Plan:
    """Return a step with those whom it concerns."""
    row, others = look.row, others_hit(step, look)
    lines = []
    needs_answer = False
    if step is Step.RESET and row["board"] == "p300":
        whose = "the other chip of its board, is reset, too"
        lines += [f"{each['bdf']}, {whose}; {use_of(each)}" for each in others]
        needs_answer = len(others) != 1 or has_unknown_users(others[0])
        if len(others) != 1:
            lines = ["the other chip of its board, which is not known, is reset, too"]
    else:
        used = [each for each in others if use_of(each) != UNUSED]
        lines += [f"this also concerns {each['bdf']}: {use_of(each)}" for each in used]

    if step is Step.RESET and str(row["board"]).startswith("galaxy"):
        lines.append(GALAXY_RESETS)
        needs_answer = True
    if step in (Step.BIND, Step.REBIND) and look.override not in (None, DRIVER):
        lines.append(f"driver_override keeps the chip for {look.override}, and is cleared")

    pods = chain.from_iterable(map(pods_of, [row, *others]))
    return Plan(step, command, use_of(row), tuple(lines), tuple(pods), needs_answer)


def others_hit(step: Step, look: Look) -> list[View]:
    """Return the rows of the other chips that a step concerns."""
    row, faults = look.row, faults_of(look.view)
    others = [each for each in look.view["chips"] if each["bdf"] != row["bdf"]]
    if step in (Step.RESCAN, Step.LOAD):
        kind = "gone" if step is Step.RESCAN else "no_driver"
        return [each for each in others if faults.get(each["bdf"], {}).get("kind") == kind]
    if step is Step.RESET and row["board"] == "p300" and row["serial"]:
        return [
            each for each in others if (each["board"], each["serial"]) == ("p300", row["serial"])
        ]
    return []


UNUSED = "not in use"


def use_of(row: View) -> str:
    """Return who uses a chip, as the end of a line about it."""
    found = users_of(row)
    if not found:
        return "its users are not known" if has_unknown_users(row) else UNUSED
    more = " (others are not known)" if has_unknown_users(row) else ""
    return f"used by {', '.join(found)}{more}"


def has_unknown_users(row: View) -> bool:
    """Return whether not all users of a chip are known: a virtual machine may be one."""
    return None in (row["pods"], row["processes"])


def fix(options: argparse.Namespace) -> int:
    """Mend a chip; return the exit status. Raises Refusal, OSError."""
    view = read_usable_view()
    mender = Mender(view, row_of(view, options.address)["bdf"], says_yes=options.yes)

    # One at a time on a node; the lock ends with this process.
    path = f"{view['settings']['runtime_dir']}/fix.lock"
    try:
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refusal("another fix is at work on this node") from None

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.default_int_handler)
    try:
        return mender.mend()
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 130
    finally:
        if mender.pods:
            say(f"pods that must be started again: {', '.join(mender.pods)}")


def _is_well(step: Step | End) -> bool:
    return isinstance(step, End) and step.is_well


class Mender:
    """Brings a chip back to health, step after step."""

    def __init__(self, view: View, bdf: str, *, says_yes: bool) -> None:
        self._settings = Settings(root=view["settings"]["root"])
        # The daemon sees what has followed from a step at its polls.
        self._patience = max(FOLLOWS_WITHIN, 3 * view["settings"]["health"]["interval"])
        self._bdf = bdf
        self._says_yes = says_yes
        self._tt_smi = ""  # its path, once its version is known to be new enough
        self._done: list[Step] = []
        self.pods: dict[str, None] = {}  # those that must be started again

    def mend(self) -> int:
        """Look, ask and take a step, until there is none; return the exit status.

        Raises Refusal, OSError, KeyboardInterrupt.
        """
        look = self._look()
        self._show(look)
        while True:
            plan = self._plan(look)
            if isinstance(plan, End):
                say(plan.text)
                return 0 if plan.is_well else 1

            if plan.step is Step.WAIT:
                look = self._wait(lambda step: step is not Step.WAIT)
                self._done.append(Step.WAIT)
                self._show(look)
                continue

            for line in plan.lines:
                say(line)
            is_loss = plan.step in (Step.REBIND, Step.RESET) and plan.users != UNUSED
            say(f"next step: {plan.step.value}{', which interrupts its users' if is_loss else ''}")
            say(f"    {plan.command}")
            if not self._is_agreed(plan):
                return 1

            # A person has thought about it, perhaps for hours.
            look = self._look()
            if self._plan(look) != plan:
                say("this has changed since the question; nothing was done, it is asked again")
                self._show(look)
                continue

            status = self._take(plan)
            if plan.step is Step.RESET:
                self._look_after_reset(look)
            has_effect = status == 0 or plan.step is Step.RESET  # tt-smi's status proves nothing
            look = self._wait(_is_well) if has_effect else self._look()
            self._show(look)

    # Looks

    def _look(self) -> Look:
        """Return what sysfs and the daemon show now; raises Refusal, OSError."""
        # A step can starve the daemon for a while.
        deadline = monotonic() + (ANSWERS_WITHIN if self._done else 0)
        while True:
            try:
                view = read_usable_view()
                break
            except NoView:
                if monotonic() >= deadline:
                    raise
                time.sleep(LOOK_INTERVAL)

        function = self._scan().get(self._bdf)
        if function is None or function.arch is None:  # another vendor's card, or none
            function = PciFunction(self._bdf, on_bus=False)
        return Look(
            function,
            view,
            override=driver_override(function) if function.on_bus else None,
            is_arm64=os.uname().machine == "aarch64",
        )

    def _scan(self) -> Bus:
        is_loaded = driver_version(self._settings) is not None
        return scan(self._settings, {}, driver_is_loaded=is_loaded)

    def _wait(self, is_enough: Callable[[Step | End], bool]) -> Look:
        """Look until the next step is as wanted, or the time is over; return the last look."""
        say(f"waiting, at most {self._patience:g} s")
        deadline = monotonic() + self._patience
        while True:
            time.sleep(LOOK_INTERVAL)
            look = self._look()
            if is_enough(next_step(look, self._done)) or monotonic() >= deadline:
                return look

    def _show(self, look: Look) -> None:
        """Print how the chip is, and who uses it."""
        row, state = look.row, "healthy"
        if fault := faults_of(look.view).get(self._bdf):
            state = fault["problem"] + since_text(row, datetime.now().astimezone())
        elif row["healthy"] is None:
            state = "excluded"
        card = row["card"] or row["arch"] or "unknown card"
        say(f"{self._bdf} ({card}): {state}; {use_of(row)}")

    # Plans and questions

    def _plan(self, look: Look) -> Plan | End:
        """Return the next step, or why there is none; raises Refusal without tt-smi."""
        step = next_step(look, self._done)
        if isinstance(step, End):
            return step
        if step is Step.RESET and not self._tt_smi:
            self._tt_smi = find_tt_smi(self._settings)
        return plan_of(step, look, command_of(step, look, self._settings, self._tt_smi))

    def _is_agreed(self, plan: Plan) -> bool:
        """Return whether the operator wants a step."""
        if self._says_yes and not plan.needs_answer:
            return True

        undone = "nothing more is done" if self._done else "nothing is done"
        if not (os.isatty(0) and os.isatty(1)):
            advice = "ssh -t" if plan.needs_answer else "ssh -t, or --yes"
            say(f"{undone}: the question needs a terminal ({advice})")
            return False

        with suppress(termios.error):  # the terminal has been closed
            termios.tcflush(0, termios.TCIFLUSH)  # the answer must be typed after the question
        print("Do this? [y/N] ", end="", flush=True)
        answer = os.read(0, 4096)
        if not answer.endswith(b"\n"):
            print()
        if answer.strip().lower() in (b"y", b"yes"):
            return True
        say(undone)
        return False

    # Steps

    def _take(self, plan: Plan) -> int:
        """Take a step, and note whose pods it has hit; return the status of its command."""
        pods = dict.fromkeys(plan.pods)
        user = os.environ.get("SUDO_USER") or os.environ.get("USER") or f"UID {os.getuid()}"
        text = f"fix {self._bdf}: {user} runs: {plan.command}; pods: {', '.join(pods) or 'none'}"
        write_to_journal(self._settings, text)

        self._done.append(plan.step)
        if plan.step in (Step.REBIND, Step.RESET):  # also if it fails, or is interrupted
            self.pods |= pods
        status = run_step(plan.command, can_be_ended=plan.step is Step.RESET)
        if status:
            say(f"the command has ended with status {status}")
        elif plan.step is not Step.MAKE_FILE:
            self.pods |= pods
        return status

    def _look_after_reset(self, before: Look) -> None:
        """Say which card was reset if the chip has lost its number while tt-smi started.

        Another pod can have got the other chip of a p300 meanwhile: it was healthy.
        """
        after = self._look()
        self.pods |= dict.fromkeys(plan_of(Step.RESET, after).pods)
        number = before.function.ordinal
        for bdf, function in self._scan().items():
            if function and function.ordinal == number and bdf != self._bdf:
                say(f"the device number {number} is that of {bdf} now: tt-smi may have reset it")
                self.pods |= dict.fromkeys(pods_of(row_of(after.view, bdf)))


def find_tt_smi(settings: Settings) -> str:
    """Return the path of tt-smi; raises Refusal if there is none that can be used.

    A simulated node has its own programs in the directory `bin` below its root.
    """
    import shutil  # here, because it would cost 2 ms of each start

    directories = os.environ.get("PATH", os.defpath)
    if settings.root != "/":
        directories = f"{settings.root}/bin"
    needed = f"tt-smi {'.'.join(map(str, TT_SMI_NEEDED))} or later"
    path = shutil.which("tt-smi", path=directories)
    if path is None:
        place = "install it from PyPI into root's PATH (sudo has a PATH of its own)"
        raise Refusal(f"{needed} was not found in {directories}; {place}")

    command = [path, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=VERSION_TAKES)
    except subprocess.TimeoutExpired:
        raise Refusal(f"{path} --version does not answer") from None
    version = done.stdout.decode("utf-8", "replace").strip()
    numbers = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", version)
    if not numbers or (int(numbers[1]), int(numbers[2])) < TT_SMI_NEEDED:
        raise Refusal(f"{path} is version {version[:63] or 'unknown'}; {needed} is required")
    return path


def run_step(command: str, *, can_be_ended: bool) -> int:
    """Run a shell command; return its status.

    It has a session of its own, so that Ctrl-C does not end it between an unbind and its bind. If
    it can be ended, an interrupt ends it, with all that it has started.
    """
    shell = ["sh", "-c", command]
    process = subprocess.Popen(shell, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        if not can_be_ended:
            process.wait()
            raise
        try:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS_WITHIN)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise


def write_to_journal(settings: Settings, text: str) -> None:
    """Write a line to the journal, if there is one (RFC 3164; 29: a notice of a daemon)."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.connect(f"{settings.dev}/log")
        journal.send(f"<29>tt-device-plugin[{os.getpid()}]: {printable(text)}".encode())


# -- arguments -------------------------------------------------------------------------------------


class Command(NamedTuple):
    """A command, which is the first word of the command line."""

    act: Callable[[argparse.Namespace], int]  # returns the exit status
    help: str
    options: tuple[str, ...]  # without dashes, and with underscores
    argument: str = ""  # a word that it needs
    argument_help: str = ""


def run(options: argparse.Namespace) -> int:
    """Run the daemon; return its exit status."""

    def load() -> Settings:
        settings = load_settings(vars(options), os.environ)
        for warning in unknown_variables(os.environ):
            log.warning("%s", warning)
        return settings

    try:
        settings = load()
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    return asyncio.run(Daemon(settings, load, ServiceManager(os.environ)).run())


SWITCHES = {  # options of commands that have no value
    "json": "print an array of objects, see JSON in tt-device-plugin(8)",
    "quiet": "print only lines that are not ok, those with FAIL first",
    "config_only": "check only the configuration",
    "yes": "answer yes, except before a reset on a Galaxy, or of a p300 if the users of its other "
    "chip are not known",
}
COMMANDS = {
    "run": Command(
        run,
        "the daemon, which systemd starts: serves the kubelet's device plugin API",
        ("config_file", *OPTIONS),
    ),
    "list": Command(list_chips, "one row per chip: health, resource and users", ("json",)),
    "check": Command(
        check,
        "preflight for this node: configuration, service, driver, chips, hugepages, kubelet",
        ("quiet", "config_only", "config_file"),
    ),
    "fix": Command(
        fix,
        "mends a chip step by step: looks, shows the step and whom it hits, asks, takes it",
        ("yes",),
        "ADDRESS",
        "PCI address of the chip, as list or lspci shows it",
    ),
}
ABOUT = "Makes the Tenstorrent accelerators of this node available to Kubernetes."
EPILOG = """\
For the options of a command, run: tt-device-plugin COMMAND --help
Most options can also be set by an environment variable or in the configuration
file; see tt-device-plugin(8) and tt-device-plugin.toml(5).
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; an abbreviated flag is an unknown one."""
    # With a width argparse does not import shutil, which costs 2 ms of each start.
    form = partial(argparse.RawDescriptionHelpFormatter, width=80, max_help_position=12)
    common: Json = {"formatter_class": form, "allow_abbrev": False}
    parser = argparse.ArgumentParser(PROGRAM, description=ABOUT, epilog=EPILOG, **common)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        about = f"{command.help[0].upper()}{command.help[1:]}."
        added = commands.add_parser(name, help=command.help, description=fill(about, 80), **common)
        if command.argument:
            added.add_argument("address", metavar=command.argument, help=command.argument_help)
        for option in command.options:
            _add_option(added, option)
    return parser


def _add_option(parser: argparse.ArgumentParser, name: str) -> None:
    """Add a flag. Values are parsed with the configuration, whose errors have other statuses."""
    if name in SWITCHES:
        parser.add_argument(flag_of(name), action="store_true", help=SWITCHES[name])
        return

    key = OPTIONS.get(name)
    default = getattr(Settings(), name, DEFAULT_CONFIG_FILE)
    shown = str(default).lower() if isinstance(default, bool) else default
    help = f"{key.help if key else 'configuration file'}; default {shown} [{variable_of(name)}]"
    metavar = "|".join(key.choices) if key and key.choices else name.rpartition("_")[2].upper()
    if key and key.is_switch:
        parser.add_argument(flag_of(name), metavar="BOOL", nargs="?", const="true", help=help)
    else:
        parser.add_argument(flag_of(name), metavar=metavar, help=help)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if "run" in words[:1]:  # a reload must not kill the daemon before it has a handler for it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})

    parser = make_parser()
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2

    set_up_logging(os.environ, has_timestamps=options.command == "run")
    act = COMMANDS[options.command].act
    return act(options) if options.command == "run" else run_command(act, options)


def run_command(act: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command that shows something; return its exit status. An error is one line."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader can end first, as `head` does
    if isinstance(sys.stdout, TextIOWrapper):  # it can be closed
        sys.stdout.reconfigure(errors="backslashreplace")

    try:
        return act(options)
    except Refusal as refusal:
        log.error("%s", printable(str(refusal)))
        return refusal.status
    except OSError as error:
        reason = f"{error.filename or 'stdout'}: {error.strerror or error}"
        advice = "; run it as root" if isinstance(error, PermissionError) else ""
        log.error("%s", printable(f"{reason}{advice}"))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
