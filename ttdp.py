"""tt-device-plugin: makes Tenstorrent accelerators schedulable in Kubernetes, as a host daemon.

Ten nouns, each with this one meaning:

    chip        a PCI function of a card, known by its PCI address, with one device file
    board       the chips that are one card; of a Galaxy, a tray is a board
    device      the unit of allocation: a chip, or with unit = "board" a board
    resource    a name at the kubelet, such as tenstorrent.com/n300, with its devices
    ID          a device's name; of a shared device one for each replica
    hold        an answer to Allocate, with all that a container was given
    fault       why a chip is unhealthy: a kind and a text
    problem     anything that is not right, faults included
    session     keeps one resource registered with the kubelet
    view        the node, as `list`, `check` and `fix` read it

The daemon is one asyncio loop: events only wake it, then it observes the host, decides what should
be advertised and written, and brings sockets and files in line with that (see Daemon). The chapters
stand bottom-up; each uses only those above it:

    the host                CONFIGURATION, INVENTORY, HEALTH, CHIPS
    who has what            RESOURCES, HOLDS
    pure decisions          DECISION, PREFERRED ALLOCATION, CONTAINER EDITS, CDI AND LABELS, REPORTS
    infrastructure          THREADS, FILES, SYSTEMD, KERNEL EVENTS
    the kubelet's API       HOST, REQUESTS, REGISTRATION
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
from asyncio import StreamReader, StreamWriter
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
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
from functools import cache, cached_property, partial
from io import TextIOWrapper
from itertools import accumulate, chain, combinations, count
from math import inf
from os.path import basename, dirname, exists, isdir, normpath
from textwrap import fill
from time import monotonic
from typing import Any, NamedTuple, TypeVar

# An engine that gRPC no longer has, such as epollex, would end the program without a word.
os.environ.pop("GRPC_POLL_STRATEGY", None)

import grpc
import sdnotify
from google.protobuf.message import DecodeError

from generated import deviceplugin_pb2 as pb
from generated import deviceplugin_pb2_grpc as rpc

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__version__ = "0.2.0"

Json = dict[str, Any]
Ids = frozenset[str]  # of devices, as the kubelet allocates them; see the head of this file

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
    runtime_dir: str | None = None  # None: without a status socket

    @property
    def sys(self) -> str:
        """Return the path of the host's /sys, which is below `root`."""
        return f"{self.root.rstrip('/')}/sys"

    @property
    def dev(self) -> str:
        return f"{self.root.rstrip('/')}/dev"

    @property
    def proc(self) -> str:
        return f"{self.root.rstrip('/')}/proc"

    @property
    def udev_control(self) -> str:
        """Return the path that exists while udevd runs."""
        return f"{self.root.rstrip('/')}/run/udev/control"

    @property
    def pod_logs(self) -> str:
        """Return the directory that has one for each pod, named after it."""
        return f"{self.root.rstrip('/')}/var/log/pods"

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

# errno values that mean absence (ELOOP: a link to itself). OWN_ERRORS are the daemon's, not the
# chip's.
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ELOOP)
OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

HUGETLBFS = ("hugepages-1G", "hugepages")  # in /dev
ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
PIDS_MAX = 2**18  # bytes of a list of process IDs
PROCESSES_MAX = 1000  # that are shown of a chip

Result = TypeVar("Result")
ProcessRow = dict[str, object]  # "pid", "command", "of_pod"


class PciFunction(NamedTuple):
    """A PCI function of a Tenstorrent card, as sysfs shows it.

    While the driver has a class device for it, it has a number, and the path at which its device
    file should be. A bound driver can lack the class device for a moment, while it appears or is
    removed.
    """

    address: str  # "0000:03:00.0", the identity that survives resets and renumbering
    arch: str | None = None  # None: not known, or not supported
    subsystem: int = 0  # PCI subsystem ID
    numa_node: int | None = None  # None: the platform does not say
    directory: str = ""  # in sysfs
    on_bus: bool = True  # False: it was, or a hold has it, but it is not there now
    driver: str | None = None  # None: no driver is bound
    driver_is_loaded: bool = True  # the driver `tenstorrent`, bound or not
    number: int | None = None  # N of /dev/tenstorrent/N; None without a class device
    path: str = ""  # of the device file on the host
    file_fault: str | None = None  # why the device file cannot be used

    @property
    def class_device(self) -> str:
        """Return the sysfs directory that has the tt_* attributes."""
        return f"{self.directory}/{DRIVER}/{DRIVER}!{self.number}"

    def without_class_device(self, driver: str | None = None) -> PciFunction:
        """Return the function with this driver, but without number and path of a device file."""
        return self._replace(driver=driver, number=None, path="", file_fault=None)


# The functions on the PCI bus, by address; None for one of another vendor.
Bus = dict[str, PciFunction | None]


@cache
def address_numbers(address: str) -> tuple[int, ...]:
    """Return domain, bus, device and function of a PCI address: chips are sorted by them."""
    return tuple(int(part, 16) for part in re.split("[:.]", address))


def if_exists(call: Callable[[str], Result], path: str) -> Result | None:
    """Return call(path), None if nothing exists there; raises OSError for any other reason."""
    try:
        return call(path)
    except OSError as error:
        if error.errno in ABSENT:
            return None
        raise


def names_in(directory: str) -> list[str]:
    """Return the names in a directory, none if it does not exist; raises OSError."""
    return if_exists(os.listdir, directory) or []


def read_attribute(path: str) -> str:
    """Return the text of a sysfs attribute; raises OSError. Telemetry can block for 10 s."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode("ascii", "replace").strip()
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
        if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
            raise ValueError(f"not a regular file of at most {max_bytes} bytes")
        return file.read(max_bytes)


def to_integer(text: str | None) -> int | None:
    """Return a decimal number of at most 20 digits; None for any other text."""
    return int(text) if text and re.fullmatch("-?[0-9]{1,20}", text) else None


def driver_version(settings: Settings) -> str | None:
    """Return the loaded driver's version, or "unknown"; None if the driver is not loaded.

    Raises OSError.
    """
    module = f"{settings.sys}/module/{DRIVER}"
    signs = (module, f"{settings.sys}/class/{DRIVER}")
    if not any(if_exists(os.stat, each) for each in signs):
        return None
    return printable(if_exists(read_attribute, f"{module}/version") or "unknown")


def pci_directory(settings: Settings, address: str = "") -> str:
    """Return the sysfs directory of a PCI function, or that of all functions."""
    return f"{settings.sys}/bus/pci/devices/{address}"


def driver_override(function: PciFunction) -> str | None:
    """Return the only driver that the kernel may bind to a function; None: any driver.

    driverctl, libvirt and KubeVirt set it, and can leave it behind.
    """
    text = read_text(f"{function.directory}/driver_override")
    return None if text in (None, "", "(null)") else text


def scan(settings: Settings, last: Bus, *, driver_is_loaded: bool) -> Bus:
    """Return the functions on the PCI bus. `last`: the last result; IDs are read only once."""
    found: Bus = {}
    for address in filter(ADDRESS.fullmatch, names_in(pci_directory(settings))):
        try:
            function = last[address] if address in last else _read_pci_ids(settings, address)
        except OSError as error:
            if error.errno not in ABSENT:
                raise
            continue  # it is appearing or being removed; the next scan looks again

        if function and function.arch:
            function = function._replace(driver_is_loaded=driver_is_loaded)
            function = _with_present_state(settings, function)
        found[address] = function
    return found


def _read_pci_ids(settings: Settings, address: str) -> PciFunction | None:
    """Return a function by its IDs, which never change; None for another vendor's.

    Raises OSError: while a function appears, its directory is there before its attributes.
    """
    directory = pci_directory(settings, address)
    if _pci_id(f"{directory}/vendor") != VENDOR:
        return None

    arch = ARCHES.get(_pci_id(f"{directory}/device"))
    subsystem = _pci_id(f"{directory}/subsystem_device")
    return PciFunction(address, arch, subsystem, directory=directory)


def _pci_id(path: str) -> int:
    """Return the number in an attribute such as "0x1e52", 0 for any other text; raises OSError."""
    text = read_attribute(path)
    return int(text, 16) if re.fullmatch("0x[0-9a-f]{1,8}", text) else 0


def _with_present_state(settings: Settings, function: PciFunction) -> PciFunction:
    """Return a function with its present NUMA node, driver and device file."""
    node = to_integer(if_exists(read_attribute, f"{function.directory}/numa_node"))
    # sysfs has -1 on a platform that does not say.
    function = function._replace(numa_node=node if node is not None and node >= 0 else None)

    # The class device is looked for below the PCI function. In /sys/class its name could lead to
    # another chip already, as numbers are reused.
    for name in names_in(f"{function.directory}/{DRIVER}"):
        number = to_integer(name.removeprefix(f"{DRIVER}!"))
        if number is not None:
            path = f"{settings.dev}/{DRIVER}/{number}"
            present = function._replace(driver=DRIVER, number=number, path=path)
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
        return f"{path} does not exist"
    if not stat.S_ISCHR(status.st_mode):
        return f"{path} is not a character device"

    found = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return None if found == expected else f"{path} is device {found}, but sysfs has {expected}"


def processes_on(settings: Settings, function: PciFunction) -> list[ProcessRow] | None:
    """Return the processes that opened a device file; None if unknown (a driver before 2.5).

    The driver's list has a line for each open file, and any user can open the device file a million
    times: so no more of it is read than is useful.
    """
    proc = settings.proc
    try:
        with open(f"{proc}/driver/{DRIVER}/{function.number}/pids", "rb") as file:
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
    link = f"{settings.dev}/{DRIVER}/by-pci/{function.address}"
    with suppress(OSError):
        if os.readlink(link) in (f"../{function.number}", function.path):
            return link
    return None


def hugetlbfs_mounts(settings: Settings) -> list[Mount]:
    """Return the hugetlbfs directories of the host, as containers would have them.

    A configured mount replaces the one at its path.
    """
    taken = {mount.container for mount in settings.mounts}
    mounts = [Mount(f"{settings.dev}/{name}", f"/dev/{name}") for name in HUGETLBFS]
    return [each for each in mounts if each.container not in taken and exists(each.host)]


def host_mounts(settings: Settings) -> list[Mount]:
    """Return the configured mounts, and the host's hugepages unless containers get none.

    The CDI file has these, also if hugepages are private: the daemon could not clean up after
    podman's containers.
    """
    hugepages = [] if settings.hugepages == "none" else hugetlbfs_mounts(settings)
    return [*settings.mounts, *hugepages]


# ==== HEALTH: what a chip's attributes show, and what is wrong with it ============================

HYSTERESIS = 5.0  # °C by which a hot chip must cool down
MISSES = 2  # polls in a row without a change of the heartbeat
TRIP_HOLDOFF = 300.0  # seconds
FIRMWARE_TIMEOUT = 10.0  # seconds without telemetry after which a chip counts as silent
READ_TIMEOUT = 5.0  # seconds; the driver can block for ten, and on a starved host 2 s were too few

# A register that reads as ones; the driver converts it like any value. Of the attributes, the first
# that exists decides: drivers before 2.7 have no heartbeat.
ONES = str(2**32 - 1)
ALL_ONES = {
    "tt_heartbeat": ONES,
    "tt_serial": "F" * 16,
    "tt_asic_id": "F" * 16,
}
IMPOSSIBLE_TEMPERATURE = 1_000_000  # m°C; -0.5 °C reads as 65535500, without a sign (tt-kmd)

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


class Fault(NamedTuple):
    """Why a chip is unhealthy."""

    kind: Kind
    text: str


class Problem(NamedTuple):
    """Something that is not right. As a text: PROBLEM; run: COMMAND."""

    subject: str  # a chip's address, a resource, or what else it is about
    text: str
    command: str = ""  # that helps; empty: there is nothing to run
    kind: str = ""  # of a chip's or device's; empty: of the node
    level: str = "warn"  # or "FAIL": it keeps pods from chips

    def __str__(self) -> str:
        return with_command(self.text, self.command)


def with_command(problem: str, command: str) -> str:
    """Return PROBLEM; run: COMMAND."""
    return f"{problem}; run: {command}" if command else problem


SILENT = Fault(Kind.SILENT, "firmware reports no telemetry")
BLOCKED = Fault(Kind.BLOCKED, "telemetry read timed out (the driver may be waiting for a reset)")


class Identity(NamedTuple):
    """Values from a chip's firmware; None: not reported."""

    card: str | None = None  # exact card type, "p150a"
    serial: str | None = None  # the board's, 16 hex digits
    asic_id: str | None = None  # the chip's own, 16 hex digits
    firmware: str | None = None  # version of the bundle, "19.4.0.0"


class Reading(NamedTuple):
    """A chip's attributes, all read at one moment; None: not offered, or impossible."""

    function: PciFunction
    at: float  # seconds of the monotonic clock
    is_poll: bool = True  # False: read after an event, too early to count an equal heartbeat
    fault: Fault | None = None  # why nothing could be read; all other values are unknown then
    identity: Identity = Identity()
    heartbeat: int | None = None  # changes while the firmware runs
    temperature: float | None = None  # °C
    throttles_at: float | None = None  # °C, hwmon's temp1_max
    trips: int | None = None  # thermal trips (Blackhole only)
    sensors: Mapping[str, float] = {}  # at the last poll: by attribute, in the metrics' units
    processes: Sequence[ProcessRow] | None = None  # a row for each PID; None: unknown

    @property
    def is_silent(self) -> bool:
        """Return whether the firmware reports nothing: it is late, or was dead at the probe."""
        values = (self.fault, self.heartbeat, self.temperature, self.throttles_at, self.trips)
        return self.identity == Identity() and set(values) == {None}


def read_chip(settings: Settings, function: PciFunction, *, is_poll: bool) -> Reading | None:
    """Read a present chip; None if it is being removed, as the next scan will show.

    Can block for ten seconds. Raises OSError for errors that are not the chip's.
    """
    sensors = read_sensors(function) if is_poll else {}
    processes = processes_on(settings, function)

    # Telemetry comes last: if the chip answers now, its sensors were those of a live chip.
    texts, error = _read_telemetry(function)
    if not isdir(function.class_device):
        return None

    reading = Reading(function, monotonic(), is_poll, error or fault_of(texts))
    if reading.fault:
        return reading
    return with_telemetry(reading, texts)._replace(sensors=sensors, processes=processes)


def _read_telemetry(function: PciFunction) -> tuple[dict[str, str], Fault | None]:
    """Return the texts of the attributes that the firmware reports, and why they are not all."""
    paths = {name: f"{function.class_device}/{name}" for name in TT_ATTRIBUTES}
    if hwmon := hwmon_directory(function):
        paths |= {name: f"{hwmon}/{name}" for name in HWMON_ATTRIBUTES}

    texts = {}
    for name, path in paths.items():
        try:
            texts[name] = read_attribute(path)
        except OSError as error:
            if error.errno in OWN_ERRORS:
                raise
            # During a reset every attribute answers ENODATA. After one into firmware that reports
            # fewer tags, only the attributes of the lost tags do, and the heartbeat goes on.
            if error.errno == errno.ENODATA and name == "tt_heartbeat":
                return {}, Fault(Kind.RESETTING, "resetting (no telemetry)")
            if error.errno not in (*ABSENT, errno.ENODATA):
                text = f"telemetry cannot be read: {name}: {error.strerror}"
                return {}, Fault(Kind.READ_ERROR, text)
    return texts, None


def fault_of(texts: Mapping[str, str]) -> Fault | None:
    """Return the fault of a chip whose registers read as ones.

    Its card type shows nothing: a living chip can have an unknown one, and drivers before 2.2 show
    PCI's of a dead Blackhole.
    """
    for name, dead in ALL_ONES.items():
        if name in texts:
            text = "chip does not respond (registers read as ones)"
            return Fault(Kind.NO_RESPONSE, text) if texts[name] == dead else None
    return None


def with_telemetry(reading: Reading, texts: Mapping[str, str]) -> Reading:
    """Return a reading with the values in these texts, by attribute."""
    return reading._replace(
        identity=Identity(
            card=to_card_type(texts.get("tt_card_type", "")),
            serial=to_hex_id(texts.get("tt_serial", "")),
            asic_id=to_hex_id(texts.get("tt_asic_id", "")),
            firmware=to_version(texts.get("tt_fw_bundle_ver", "")),
        ),
        heartbeat=to_integer(texts.get("tt_heartbeat")),
        temperature=to_celsius(texts.get("temp1_input", "")),
        throttles_at=to_celsius(texts.get("temp1_max", "")),
        trips=to_count(texts.get("tt_therm_trip_count", "")),
    )


def to_card_type(text: str) -> str | None:
    """Return an exact card type, which need not be in CARDS; None if the driver knows none."""
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


def to_count(text: str) -> int | None:
    """Return a counter; None for any other text, and for the value of a dead chip."""
    return None if text == ONES else to_integer(text)


def to_celsius(text: str) -> float | None:
    """Return a temperature above zero; None for any other text, as for a limit of 0."""
    millidegrees = to_integer(text) or 0
    return millidegrees / 1000 if 0 < millidegrees < IMPOSSIBLE_TEMPERATURE else None


def hwmon_directory(function: PciFunction) -> str | None:
    """Return the directory of a chip's sensors, hwmon/hwmonN, whose number has no meaning."""
    directory = f"{function.directory}/hwmon"
    names = names_in(directory)
    return f"{directory}/{min(names)}" if names else None


def _natural(text: str) -> float | None:
    number = to_integer(text)
    return float(number) if number is not None and number >= 0 else None


def _watts(text: str) -> float | None:
    number = _natural(text)  # µW
    return None if number is None else number / 1e6


def _hertz(text: str) -> float | None:
    number = _natural(text)  # MHz
    return None if number is None else number * 1e6


def _lanes(text: str) -> float | None:
    """Return the lanes of a link; None without a link, as in some virtual machines."""
    return _natural(text) or None


def _transfers(text: str) -> float | None:
    """Return the transfers per second of a link; None if its speed is unknown."""
    match = re.match(r"([0-9]{1,4}(\.[0-9]+)?) GT/s", text)  # "16.0 GT/s PCIe", or "Unknown"
    return float(match[1]) * 1e9 if match else None


def _total_errors(text: str) -> float | None:
    """Return the sum of AER's counters: its last line, "TOTAL_ERR_COR 7"."""
    match = re.search(r"^TOTAL_\w+ ([0-9]{1,20})$", text, re.MULTILINE)
    return float(match[1]) if match else None


class Sensor(NamedTuple):
    """A value that only metrics have."""

    source: str  # its directory: "hwmon", "class" device or "pci" function
    attribute: str
    metric: str  # without "tt_device_"
    help: str
    parse: Callable[[str], float | None]  # returns the value in the metric's unit
    labels: Mapping[str, object] = {}


_CLOCK = "Clock frequency in hertz."
_SPEED = "pcie_link_transfers_per_second"
_ERRORS = "pcie_errors_total"
_ERRORS_HELP = "PCIe errors reported by AER, by severity."
SENSORS = (
    Sensor("hwmon", "power1_input", "power_watts", "Power draw of the chip in watts.", _watts),
    Sensor("hwmon", "power1_max", "power_limit_watts", "Power limit in watts.", _watts),
    Sensor("class", "tt_aiclk", "clock_hertz", _CLOCK, _hertz, {"clock": "aiclk"}),
    Sensor("class", "tt_axiclk", "clock_hertz", _CLOCK, _hertz, {"clock": "axiclk"}),
    Sensor("class", "tt_arcclk", "clock_hertz", _CLOCK, _hertz, {"clock": "arcclk"}),
    Sensor("pci", "current_link_width", "pcie_link_width", "PCIe lanes in use.", _lanes),
    Sensor("pci", "max_link_width", "pcie_link_width_max", "PCIe lanes of the card.", _lanes),
    Sensor("pci", "current_link_speed", _SPEED, "PCIe transfers per second.", _transfers),
    Sensor(
        "pci", "max_link_speed", f"{_SPEED}_max", "PCIe transfers per second, at most.", _transfers
    ),
    *(
        Sensor("pci", f"aer_dev_{each}", _ERRORS, _ERRORS_HELP, _total_errors, {"severity": each})
        for each in ("correctable", "nonfatal", "fatal")
    ),
)


def read_sensors(function: PciFunction) -> dict[str, float]:
    """Return the sensors' values by attribute. Can block for ten seconds."""
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
        # Drivers and firmware offer different ones. If one cannot be read, the others still count;
        # whether the chip is well is for its telemetry to show.
        with suppress(OSError):
            text = read_attribute(f"{directories[sensor.source]}/{sensor.attribute}")
            value = sensor.parse(text)
            if value is not None:
                values[sensor.attribute] = value
    return values


class Vitals(NamedTuple):
    """Values of a chip on which its health depends, after each of its readings.

    While a chip reports nothing they stay: it is not cooler, nor is its heartbeat back.
    """

    heartbeat: int | None = None  # at the last poll
    misses: int = 0  # polls in a row without a change of it
    is_hot: bool = False
    trips: int | None = None
    tripped_at: float = -inf  # when trips last rose
    silent_since: float | None = None  # when telemetry was first missing; None: it is not

    def after(self, reading: Reading, limit: float | None) -> Vitals:
        """Return the vitals after a reading. `limit`: °C, see HealthSettings."""
        if reading.fault:
            return self
        if reading.is_silent:
            since = reading.at if self.silent_since is None else self.silent_since
            return self._replace(silent_since=since)

        # Only polls are far enough apart to count a heartbeat that has not changed. Any change
        # shows life: after a reset the heartbeat begins again, lower.
        heartbeat, misses = self.heartbeat, self.misses
        if reading.heartbeat is None or reading.heartbeat != heartbeat:
            misses = 0
        elif reading.is_poll:
            misses += 1
        if reading.is_poll:
            heartbeat = reading.heartbeat

        is_hot = self.is_hot and limit is not None
        if reading.temperature is not None and limit is not None:
            coolest = limit - HYSTERESIS
            is_hot = reading.temperature >= limit or (is_hot and reading.temperature > coolest)

        trips = self.trips if reading.trips is None else reading.trips
        has_tripped = trips is not None and self.trips is not None and trips > self.trips
        tripped_at = reading.at if has_tripped else self.tripped_at
        return Vitals(heartbeat, misses, is_hot, trips, tripped_at)


def judge(
    reading: Reading, vitals: Vitals, limit: float | None, *, had_telemetry: bool
) -> Fault | None:
    """Return the fault that a reading shows: the first rule that applies.

    `vitals`: after this reading; `limit`: °C; `had_telemetry`: at any time since boot.
    """
    if reading.fault:
        return reading.fault

    if vitals.misses >= MISSES:
        text = f"heartbeat stalled at {vitals.heartbeat} (firmware stopped)"
        return Fault(Kind.STALLED, text)

    if vitals.is_hot and limit is not None:
        degrees = "" if reading.temperature is None else f"{reading.temperature:.1f} °C, "
        return Fault(Kind.HOT, f"too hot: {degrees}limit {limit:g} °C; check the cooling")

    if reading.at - vitals.tripped_at < TRIP_HOLDOFF:
        recovery = f"healthy again after {TRIP_HOLDOFF:g} s without another one"
        text = f"thermal trip ({vitals.trips} since power-on; {recovery}); check the cooling"
        return Fault(Kind.TRIPPED, text)

    # A chip that never had telemetry may have old firmware.
    since = vitals.silent_since
    if since is not None and had_telemetry and reading.at - since >= FIRMWARE_TIMEOUT:
        return SILENT
    return None


# ==== CHIPS: followed over time ===================================================================


@cache
def board_of_card(card: str) -> str:
    """Return "p150" for "p150a"."""
    return re.sub(r"^([a-z]+\d+)[a-z]$", r"\1", card)


class Chip(NamedTuple):
    """A Tenstorrent PCI function, known from the first scan that finds it until the next boot.

    It is *present* while it has a class device, and *listed*, so a device of a resource, from the
    first scan that finds its device file valid.
    """

    function: PciFunction
    identity: Identity = Identity()  # as last reported
    is_listed: bool = False
    reading: Reading | None = None  # the last one, since it is present
    vitals: Vitals = Vitals()
    telemetry_fault: Fault | None = None  # counts only while it is present
    kind: Kind | None = None  # of the fault that `since` is about
    since: float | None = None  # seconds since boot until that kind began

    @property
    def address(self) -> str:
        return self.function.address

    @property
    def display_name(self) -> str:
        return f"{self.address} ({self.card_type or self.function.arch or 'unknown card'})"

    @property
    def is_present(self) -> bool:
        return self.function.number is not None

    @property
    def has_device_file(self) -> bool:
        return self.is_present and not self.function.file_fault

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
    def command(self) -> str:
        """Return the command that helps against its fault, empty if there is none."""
        fault, function = self.fault, self.function
        if fault is None or fault.kind in NO_COMMAND_HELPS:
            return ""
        if fault.kind is Kind.NO_DRIVER and function.driver:
            return ""  # a virtual machine may have it
        if fault.kind is Kind.NO_DRIVER and not function.driver_is_loaded:
            return f"modprobe {DRIVER}"
        return fix_command(self.address)

    @property
    def reason(self) -> str | None:
        """Return why it is unhealthy, and the command that helps."""
        return str(Problem(self.address, self.fault.text, self.command)) if self.fault else None

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

    def seen(self, function: PciFunction) -> Chip:
        """Return the chip as a scan has found it."""
        chip = self._replace(function=function)
        if function.number != self.function.number:
            chip = chip._replace(reading=None)  # it was absent meanwhile
        if chip.has_device_file:
            chip = chip._replace(is_listed=True)
        if chip.is_present:
            return chip

        # When it is back, it must show that it is well. A chip that never had telemetry cannot.
        absent = self.vitals._replace(heartbeat=None, misses=0, is_hot=False, silent_since=-inf)
        fault = SILENT if self.identity != Identity() else None
        return chip._replace(reading=None, vitals=absent, telemetry_fault=fault)

    def read(self, reading: Reading, limit: float | None) -> Chip:
        """Return the chip after a reading of it. `limit`: °C, see HealthSettings."""
        if self.reading and not (reading.is_poll or reading.fault):
            reading = reading._replace(sensors=self.reading.sensors)

        # Values that the firmware does not report at the moment stay.
        pairs = zip(reading.identity, self.identity, strict=True)
        identity = Identity(*(new or old for new, old in pairs))
        vitals = self.vitals.after(reading, limit)
        fault = judge(reading, vitals, limit, had_telemetry=identity != Identity())
        return self._replace(
            identity=identity, reading=reading, vitals=vitals, telemetry_fault=fault
        )

    def blocked(self) -> Chip:
        """Return the chip while a reading of it takes too long."""
        return self._replace(reading=None, telemetry_fault=BLOCKED)

    def dated(self, now: float) -> Chip:
        """Return the chip with the time at which its kind of fault began, at the latest `now`."""
        kind = self.fault.kind if self.fault else None
        if kind is self.kind:
            return self
        return self._replace(kind=kind, since=now if kind else None)


Chips = Iterable[Chip]
NO_COMMAND_HELPS = (Kind.HOT, Kind.TRIPPED)  # only cooling does


def fix_command(address: str) -> str:
    return f"tt-device-plugin fix {address}"


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
        found[chip.address] = Place(chip.address, board_id=chip.address)
        if chip.is_galaxys:
            galaxys.append(chip)
        elif chip.board_type == "p300":
            pairs[chip.identity.serial].append(chip)

    found |= _places_on_galaxy(galaxys)
    for serial, members in pairs.items():
        found |= _places_on_p300(serial, members)
    return found


def _places_on_galaxy(chips: Sequence[Chip]) -> dict[str, Place]:
    """Return the places of a Galaxy's chips, by their buses."""
    found = {}
    for chip in chips:
        domain, bus, *_ = address_numbers(chip.address)
        tray, position = Tray(chip.card_type or "", domain, bus & 0xF0), bus & 0x0F
        board_id = f"{domain:04x}:{tray.bus:02x}"
        found[chip.address] = Place(tray, 8, board_id, tray=tray, position=position)

        # One bus that no Galaxy has shows a virtual machine, in which the others mean nothing.
        if tray.bus not in GALAXY_TRAYS or position not in GALAXY_POSITIONS:
            reason = f"bus {bus:02x} is not one of a Galaxy's, so its trays are not known"
            return {each.address: Place(each.address, 8, unknown=reason) for each in chips}
    return found


def _places_on_p300(serial: str | None, chips: Sequence[Chip]) -> dict[str, Place]:
    """Return the places of chips of p300 boards that report this serial number."""
    if serial is None:
        reason = "waiting for the board's serial number"
    elif len(chips) > 2:
        reason = f"{len(chips)} chips report the serial number {serial}, but a p300 has 2"
    else:
        return {chip.address: Place(serial, 2, serial) for chip in chips}
    return {chip.address: Place(chip.address, 2, unknown=reason) for chip in chips}


def seconds_since_boot() -> float:
    """Return the present time by a clock that is never set; after a boot Unix time can be wrong."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Inventory:
    """The chips of the host since boot."""

    def __init__(self, chips: Mapping[str, Chip]) -> None:
        """`chips`: those that the last daemon of this boot has seen, by address."""
        self.chips = dict(chips)
        self.driver: str | None = None  # see driver_version()
        self.unsupported: tuple[str, ...] = ()  # Tenstorrent functions without a driver for them
        self._bus: Bus = {}

    @property
    def present(self) -> list[PciFunction]:
        """Return the functions of the chips that are present, so can be read."""
        return [chip.function for chip in self.chips.values() if chip.is_present]

    def scan(self, settings: Settings) -> None:
        """Look which chips and device files exist; raises OSError."""
        driver = driver_version(settings)
        self._bus = scan(settings, self._bus, driver_is_loaded=driver is not None)
        self.driver = driver

        found = [function for function in self._bus.values() if function]
        self.unsupported = tuple(sorted(each.address for each in found if not each.arch))
        functions = {function.address: function for function in found if function.arch}
        for address in functions.keys() - self.chips.keys():
            self.chips[address] = Chip(functions[address])

        for address, chip in self.chips.items():
            gone = chip.function.without_class_device()._replace(on_bus=False)
            self.chips[address] = chip.seen(functions.get(address, gone))

    def apply(self, readings: Iterable[Reading], settings: HealthSettings) -> None:
        """Record readings of chips."""
        for reading in readings:
            chip = self.chips[reading.function.address]
            # A reading from before the chip was renumbered is out of date.
            if chip.function.number == reading.function.number:
                limit = settings.temperature_limit
                self.chips[chip.address] = chip.read(reading, limit)

    def block(self, addresses: Iterable[str]) -> None:
        """Record chips of which a reading takes too long."""
        for address in addresses:
            self.chips[address] = self.chips[address].blocked()

    def date_faults(self) -> None:
        """Record which faults have begun or ended."""
        now = seconds_since_boot()
        self.chips = {address: chip.dated(now) for address, chip in self.chips.items()}

    def to_saved(self) -> Json:
        """Return what the next daemon of this boot cannot read again."""
        return {
            address: {
                "arch": chip.function.arch,
                "subsystem": chip.function.subsystem,
                "numa_node": chip.function.numa_node,
                "identity": chip.identity,
                "kind": chip.kind and chip.kind.value,
                "since": chip.since,
            }
            for address, chip in self.chips.items()
            if chip.is_listed
        }


def saved_chip(address: str, saved: Json) -> Chip:
    """Return a chip of Inventory.to_saved(), before it is seen. Raises many errors."""
    function = PciFunction(
        address, saved["arch"], saved["subsystem"], saved["numa_node"], on_bus=False
    )
    kind = Kind(saved["kind"]) if saved["kind"] else None
    chip = Chip(function, Identity(*saved["identity"]), True, kind=kind, since=saved["since"])
    return chip.seen(function)  # it must show that it is well


# ==== RESOURCES: as the configuration gives them, held or not. Pure ===============================

Status = grpc.StatusCode


class RequestError(Exception):
    """A kubelet's request that is rejected: gRPC status code and reason."""


class Device(NamedTuple):
    """The unit of allocation: a chip, or a board. If it is shared, it has several IDs."""

    id: str
    chips: tuple[Chip, ...]  # in the order of PCI addresses
    place: Place  # of its first chip
    expected_chips: int = 1  # how many it should have
    ids: tuple[str, ...] = ()  # under which it is advertised
    is_reserved: bool = False  # listed only for a hold: the configuration does not give this ID
    withheld: str | None = None  # why it is not offered: a pod holds its chips by another ID
    holder: str | None = None  # that pod

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(chip.address for chip in self.chips)

    @property
    def incomplete(self) -> str | None:
        """Return why its chips are not one whole board."""
        known, expected = len(self.chips), self.expected_chips
        return f"{known} of {expected} chips" if known < expected else None

    @property
    def reason(self) -> str | None:
        """Return why the kubelet sees it as unhealthy."""
        for chip in self.chips:
            if reason := chip.reason:
                return f"{chip.address}: {reason}" if self.expected_chips > 1 else reason
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

    @property
    def short_name(self) -> str:
        return without_domain(self.name)

    @cached_property
    def unique_devices(self) -> list[Device]:
        """Return each device once: as withheld, if one of its IDs is.

        A reserved ID can be called like a device, but have other chips: it is another device then.
        """
        found: dict[tuple[str, bool], Device] = {}
        for device in self.devices.values():
            key = (device.id, device.is_reserved)
            if key not in found or device.withheld:
                found[key] = device
        return list(found.values())

    @property
    def ids_by_device(self) -> list[list[str]]:
        """Return the IDs of each device: more than one, if it is shared."""
        found = defaultdict(list)
        for device_id, device in self.devices.items():
            found[device.id, device.is_reserved].append(device_id)
        return list(found.values())

    @cached_property
    def refused(self) -> Ids:
        """Return the IDs that Allocate refuses."""
        unhealthy = {device_id for device_id, is_healthy, _ in self.list_entries if not is_healthy}
        reserved = {device_id for device_id, each in self.devices.items() if each.is_reserved}
        return frozenset(unhealthy | reserved)

    @cached_property
    def list_entries(self) -> list[tuple[str, bool, tuple[int, ...]]]:
        """Return ID, health and NUMA nodes of each entry of the list for the kubelet.

        It has no device numbers, which can change.
        """
        entries = []
        of_device: dict[int, tuple[bool, tuple[int, ...]]] = {}  # all replicas have one object
        for device_id, device in self.devices.items():
            if id(device) not in of_device:
                of_device[id(device)] = (device.reason is None, device.numa_nodes)
            entries.append((device_id, *of_device[id(device)]))
        return entries

    def chips(self, ids: Iterable[str]) -> list[Chip]:
        """Return the chips of those of these IDs that exist, each once."""
        chips: dict[str, Chip] = {}
        for device_id in ids:
            if device := self.devices.get(device_id):
                chips |= {chip.address: chip for chip in device.chips}
        return list(chips.values())


Resources = dict[str, Resource]  # by name


class Offer(NamedTuple):
    """All resources that the configuration gives."""

    resources: Resources
    excluded: frozenset[str]  # addresses of chips out of service, with their whole boards
    unplaced: Mapping[str, str]  # why the boards of chips are not known, by address


def make_offer(chips: Mapping[str, Chip], settings: Settings) -> Offer:
    """Return the resources of these chips, which are by address and in that order."""
    listed = [chip for chip in chips.values() if chip.is_listed]
    chip_places = places(listed)
    devices = _devices_by_name(listed, chip_places, settings)

    # An excluded chip takes its whole device out of service.
    excluded = chips.keys() & set(settings.exclude)
    for device in chain(*devices.values()):
        if not device.addresses.isdisjoint(settings.exclude):
            excluded |= device.addresses

    unplaced = {address: place.unknown for address, place in chip_places.items() if place.unknown}
    resources = _configured_resources(devices, frozenset(excluded), settings)
    return Offer(resources, frozenset(excluded), unplaced)


def _devices_by_name(
    chips: Sequence[Chip], chip_places: Mapping[str, Place], settings: Settings
) -> dict[str, list[Device]]:
    """Return unshared devices by resource. The chips are in the order of PCI addresses."""
    by_board = settings.unit == "board"
    groups = defaultdict(list)
    for chip in chips:
        device_id = chip_places[chip.address].board_id if by_board else chip.address
        if device_id:  # a chip whose board is not known belongs to no device
            groups[resource_name(chip, settings), device_id].append(chip)

    devices = defaultdict(list)
    for (name, device_id), members in groups.items():
        place = chip_places[members[0].address]
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
    devices: Mapping[str, list[Device]], excluded: frozenset[str], settings: Settings
) -> Resources:
    """Return resources by full name: the shared devices of each name, and the exclusive others.

    `devices`: by the name of their resource, unshared and without the domain.
    """
    sharing = settings.sharing
    found: Resources = {}

    def add(short_name: str, members: Iterable[Device], replicas: int = 0) -> None:
        """Add the resource with this name, if it has devices."""
        by_id: dict[str, Device] = {}
        for device in members:
            ids = replica_ids(device.id, replicas)
            by_id |= dict.fromkeys(ids, device._replace(ids=ids))
        if by_id:
            name = f"{settings.resource_domain}/{short_name}"
            max_one_replica = replicas > 0 and sharing.fail_requests_greater_than_one
            found[name] = Resource(name, by_id, replicas, max_one_replica)

    for base_name, members in devices.items():
        exclusive = [device for device in members if excluded.isdisjoint(device.addresses)]
        for entry in sharing.resources:
            if entry.name == base_name:
                selected = [device for device in exclusive if is_selected(device, entry)]
                exclusive = [device for device in exclusive if device not in selected]
                add(sharing.shared_name(entry), selected, entry.replicas)
        add(base_name, exclusive)
    return found


def replica_ids(device_id: str, replicas: int) -> tuple[str, ...]:
    """Return the IDs under which a device is advertised."""
    if not replicas:
        return (device_id,)
    return tuple(f"{device_id}::{number}" for number in range(replicas))


def is_replica(device_id: str) -> bool:
    return "::" in device_id


def without_replica(device_id: str) -> str:
    """Return the device's ID of a replica's."""
    return device_id.partition("::")[0]


def is_selected(device: Device, entry: SharedResource) -> bool:
    """Return whether an entry of the configuration shares a device of its resource."""
    return not entry.devices or not {device.id, *device.addresses}.isdisjoint(entry.devices)


# ==== HOLDS: which pod has which chips, and the consequences ======================================
#
# A *hold* is an answer to Allocate, as the kubelet's checkpoint has it: resource, IDs, pod and
# container, and in the answer itself chips and directories. So holds are read, not remembered. One
# is *current*, so has its chips:
#
#     in the checkpoint   while its pod's cgroup exists, or is still to come: this daemon gave the
#                         answer and has not seen the cgroup; also while no kubelet is connected, or
#                         one has been for less than STARTED_WITHIN, or the node has no directory of
#                         pods' cgroups
#     no longer           while its pod runs: it was deleted by force, or the checkpoint was lost
#
# A pod *runs* on its chips if a start of one of its containers was allowed, and its cgroup has a
# process, or the cgroup exists and the last start was allowed less than STARTED_WITHIN ago.
#
# In this order below: the checkpoint, pods' cgroups, the book of holds with the starts that it
# allows, the lists that follow from holds, and the directories.

CHECKPOINT = "kubelet_internal_checkpoint"  # in the device plugin directory
CHECKPOINT_MAX = 64 << 20  # bytes
ADDRESSES = "TT_DEVICE_PLUGIN_DEVICES"  # variable with the PCI addresses of a container's chips
TOKEN = "tenstorrent.com/hold"  # annotation by which an answer is found again
WRITTEN_WITHIN = 30.0  # seconds in which a kubelet has written an answer into its checkpoint
STARTED_WITHIN = 120.0  # seconds that a runtime has to create a container, as the kubelet has it
OWN_DIRECTORY = "tt-device-plugin"  # root's, in each hugetlbfs and in lock_dir

HoldKey = tuple[str, str, str, str]  # pod, container, resource, token


class Hold(NamedTuple):
    """One answer to Allocate: the devices of a resource that a container was given."""

    resource: str
    ids: Ids
    token: str  # empty: another version gave the answer
    chips: frozenset[str]  # PCI addresses
    directories: tuple[str, ...] = ()  # on the host, each in an OWN_DIRECTORY
    pod: str = ""  # UID; empty while no checkpoint has named it
    container: str = ""

    @property
    def key(self) -> HoldKey:
        return (self.pod, self.container, self.resource, self.token)

    @property
    def hugepages(self) -> str | None:
        """Return the name of its hugepage directories, which is the same in each hugetlbfs."""
        for path in self.directories:
            if basename(dirname(dirname(path))) in HUGETLBFS:
                return basename(path)
        return None

    def is_for(self, resource: str, ids: Ids) -> bool:
        """Return whether it is for exactly these IDs."""
        return (self.resource, self.ids) == (resource, ids)

    def shares_device(self, resource: str, ids: Collection[str]) -> bool:
        """Return whether it has a replica of a device of which these are replicas, too."""
        if self.resource != resource or not all(map(is_replica, {*self.ids, *ids})):
            return False
        return not {*map(without_replica, self.ids)}.isdisjoint(map(without_replica, ids))


# -- the checkpoint --------------------------------------------------------------------------------


# Device, inode, time of change and size. Inodes are reused, and kernels before 6.13 give all files
# that are written in one tick of 1 to 10 ms the same time.
FileStamp = tuple[int, int, int, int]


def file_stamp(path: str) -> FileStamp | None:
    """Return a value that changes when the file is replaced; None if it does not exist."""
    status = if_exists(os.stat, path)
    if status is None:
        return None
    return (status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size)


class Checkpoint(NamedTuple):
    """The kubelet's checkpoint (devicemanager/checkpoint), without other vendors' devices."""

    holds: Mapping[HoldKey, Hold] = {}
    registered: Mapping[str, Any] = {}  # the IDs that the kubelet takes for healthy, by resource


# Raised while a JSON document is read that has another form than expected.
OTHER_FORM = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def parse_checkpoint(content: bytes) -> Checkpoint:
    """Return a checkpoint; raises ValueError."""
    try:
        data = json.loads(content)["Data"]
        entries = list(data["PodDeviceEntries"] or ())
        registered = dict(data["RegisteredDevices"] or {})
    except OTHER_FORM as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None

    holds = {}
    for entry in entries:
        try:
            hold = _parse_entry(entry)
        except (*OTHER_FORM, DecodeError) as error:
            log.debug("checkpoint: an entry is skipped: %s", error)
            continue
        if hold:
            holds[hold.key] = hold
    return Checkpoint(holds, registered)


def _parse_entry(entry: Json) -> Hold | None:
    """Return the hold of an entry, None for others' devices; raises OTHER_FORM, DecodeError."""
    content = base64.b64decode(entry["AllocResp"] or "")
    if ADDRESSES.encode() not in content:
        return None

    # By NUMA node; a device on two of them is in both lists.
    ids = frozenset(chain(*entry["DeviceIDs"].values()))
    hold = hold_of(pb.ContainerAllocateResponse.FromString(content), entry["ResourceName"], ids)
    pod, container = str(entry["PodUID"]), str(entry["ContainerName"])
    return hold._replace(pod=printable(pod), container=printable(container))


def hold_of(answer: pb.ContainerAllocateResponse, resource: str, ids: Ids) -> Hold:
    """Return the hold of an answer, without pod and container."""
    paths = [mount.host_path for mount in answer.mounts]
    return Hold(
        resource,
        ids,
        token=answer.annotations.get(TOKEN, ""),
        chips=frozenset(filter(ADDRESS.fullmatch, answer.envs[ADDRESSES].split(","))),
        directories=tuple(path for path in paths if basename(dirname(path)) == OWN_DIRECTORY),
    )


# Every ID that the daemon can give in any configuration: a PCI address, a Galaxy tray's buses, a
# p300's serial; of a shared device with the number of the replica.
POSSIBLE_ID = re.compile(
    r"([0-9a-f]{4,}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-7])?|[0-9A-F]{16})(::[0-9]+)?"
)


def is_anothers(resource: Resource, registered: Mapping[str, Any]) -> bool:
    """Return whether another plugin has listed IDs under a resource's name."""
    ids = registered.get(resource.name)
    if not isinstance(ids, list):
        return False
    others = {str(each) for each in ids}.difference(resource.devices)
    return not all(map(POSSIBLE_ID.fullmatch, others))


# -- pods ------------------------------------------------------------------------------------------

KUBEPODS = re.compile(r"kubepods(\.slice)?|.+-kubepods\.slice")
QOS_DIRECTORY = re.compile(r"(.+-)?(burstable|besteffort)(\.slice)?")
POD_DIRECTORY = re.compile(r"pod(.+)|.+-pod([^-]+)\.slice")


class Cgroups:
    """The cgroups of pods at the last refresh, by UID (pod_container_manager_linux.go)."""

    def __init__(self, settings: Settings) -> None:
        self.have_roots = False  # there is a directory of pods' cgroups
        self._mount = f"{settings.sys}/fs/cgroup"
        self._is_v2 = False
        self._directories: Mapping[str, list[str]] = {}  # of pods, by UID with "_" for "-"

    def refresh(self) -> None:
        """List the pods' directories; raises OSError."""
        roots = self._find_roots()
        found = defaultdict(list)
        for root in roots:
            qos = [f"{root}/{name}" for name in names_in(root) if QOS_DIRECTORY.fullmatch(name)]

            for directory in (root, *qos):
                for name in names_in(directory):
                    if match := POD_DIRECTORY.fullmatch(name):
                        uid = (match[1] or match[2]).replace("-", "_")
                        found[uid].append(f"{directory}/{name}")

        # Not before all are listed: the view is still that of the last refresh after an error.
        self._directories = found
        self.have_roots = bool(roots)

    def _find_roots(self) -> list[str]:
        """Return the kubepods directories that root owns, in the mount or one directory below."""
        names = names_in(self._mount)
        self._is_v2 = "cgroup.controllers" in names
        top = self._mount
        if not self._is_v2:
            # Not "devices": there a pod's directory appears with its first process only.
            top += "/memory" if "memory" in names else "/systemd"

        roots = []
        for name in names_in(top):
            path = f"{top}/{name}"
            # Users can make a `kubepods` in their own subtree, and close a directory, even to root
            # without capabilities.
            if not _is_roots_directory(path):
                continue
            if KUBEPODS.fullmatch(name):
                roots.append(path)
            else:
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
        """Return whether a process is, or may be, in a pod's cgroup now."""
        return any(map(self._has_processes, self._of(pod)))

    def _has_processes(self, directory: str) -> bool:
        """Return whether a process is, or may be, in a cgroup or below it."""
        try:
            if self._is_v2:
                with open(f"{directory}/cgroup.events", "rb", 0) as file:
                    return b"populated 1" in file.read()

            # Not cgroup.procs: old kernels leave out a process whose first thread has ended.
            with open(f"{directory}/tasks", "rb", 0) as file:
                if file.read(1):
                    return True
            with os.scandir(directory) as entries:
                below = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as error:
            return error.errno not in ABSENT
        return any(map(self._has_processes, below))


def _is_roots_directory(path: str) -> bool:
    status = if_exists(os.lstat, path)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return False
    return status.st_uid in (0, os.geteuid())  # or the daemon's user, if that is another one


def pod_names(settings: Settings) -> dict[str, str]:
    """Return "namespace/name" of the pods on this node, by UID.

    The kubelet makes a directory for a pod before its first container, and removes it with the pod
    (BuildPodLogsDirectory in kuberuntime/helpers.go). With podLogsDir it is somewhere else.
    """
    found = {}
    with suppress(OSError):
        for directory in os.listdir(settings.pod_logs):
            parts = printable(directory).split("_")
            if len(parts) == 3:
                namespace, name, uid = parts
                found[uid] = f"{namespace}/{name}"
    return found


def name_of_pod(pod: str, names: Mapping[str, str]) -> str:
    """Return a pod for messages: "namespace/name", or its UID while that is unknown."""
    return names.get(pod, f"pod {pod}")


# -- current holds, runs and starts ----------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """An answer of this daemon, for WRITTEN_WITHIN, and until its pod's cgroup was seen."""

    hold: Hold  # without pod and container
    at: float  # seconds of the monotonic clock
    is_written: bool = False  # a checkpoint has named it
    is_used: bool = False  # since then a start with its IDs was allowed
    cgroup_seen: bool = False  # its pod's


@dataclass(slots=True)
class Call:
    """A PreStartContainer call, which has only a resource and IDs."""

    resource: str
    ids: Ids
    came_at: float  # seconds of the monotonic clock
    callers: frozenset[str] = frozenset()  # the pods whose call it may be; none: not known yet
    chips: frozenset[str] = frozenset()  # in their answers


class SavedHolds(NamedTuple):
    """What the last daemon of this boot has left."""

    holds: Sequence[Hold] = ()
    allowed: Mapping[str, float] = {}  # see HoldBook


class HoldBook:
    """The holds of this host, and the starts that were allowed.

    Times are seconds of the monotonic clock. The rules were explored as a model, with writings of
    the checkpoint that are late, lost or overtaken by older ones. Whoever changes one changes the
    walk over holds first, which the tests have.
    """

    def __init__(self, settings: Settings, saved: SavedHolds) -> None:
        self.cgroups = Cgroups(settings)
        self.has_read = False  # a checkpoint was parsed
        self.problem: str | None = None  # why the present checkpoint cannot be used
        self.registered: Mapping[str, Any] = {}  # see Checkpoint

        self._path = f"{settings.device_plugin_dir}/{CHECKPOINT}"
        self._stamp: FileStamp | None = None  # of the checkpoint that was read last
        # Those in the checkpoint, and those that were, while their pod has a cgroup.
        self._holds: dict[HoldKey, Hold] = {hold.key: hold for hold in saved.holds}
        self._written: Collection[HoldKey] = ()  # those in the checkpoint
        self._answers: dict[str, Answer] = {}  # by token, the newest last
        self._allowed = dict(saved.allowed)  # when the last start was allowed, by pod
        self._have_run = False  # one of these pods had a process in its cgroup
        self._streams = 0  # open ListAndWatch streams
        self._connected_since = inf  # since when there was one, but for those closed here

    def refresh(self, now: float, *, look: bool) -> bool:
        """Read the checkpoint if it has changed; then, or to `look`, list the pods' cgroups.

        Returns whether these were listed. Raises OSError; the next call does it all then.
        """
        stamp = file_stamp(self._path)
        if stamp == self._stamp and not look:
            return False

        # Cgroups first: of a new entry's pod it matters whether it has one.
        self.cgroups.refresh()
        if stamp != self._stamp:
            if checkpoint := self._read_checkpoint():
                self._take(checkpoint, now)
            self._stamp = stamp
        self._follow(now)
        return True

    def _read_checkpoint(self) -> Checkpoint | None:
        """Return the present checkpoint, None if it cannot be used; raises OSError."""
        try:
            checkpoint = parse_checkpoint(read_others_file(self._path, CHECKPOINT_MAX))
        except FileNotFoundError:
            self.problem = f"{CHECKPOINT} has disappeared"
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in OWN_ERRORS:
                raise
            self.problem = f"{CHECKPOINT} cannot be read: {printable(str(error))}"
        else:
            self.problem = None
            self.has_read = True
            return checkpoint
        return None

    def _take(self, checkpoint: Checkpoint, now: float) -> None:
        """Bring the holds in line with the checkpoint."""
        for key, hold in checkpoint.holds.items():
            if key in self._holds:
                continue
            if answer := self._answers.get(hold.token):
                answer.is_written = True
            elif self.cgroups.exists(hold.pod):  # a container may have been started
                self._allowed.setdefault(hold.pod, now)

        self._holds |= checkpoint.holds
        self._written = checkpoint.holds.keys()
        self.registered = checkpoint.registered

    def _follow(self, now: float) -> None:
        """Drop what has ended with a pod's cgroup, and answers that are old."""
        exists = self.cgroups.exists
        self._allowed = {pod: at for pod, at in self._allowed.items() if exists(pod)}
        self._have_run = self._have_run or any(map(self.cgroups.is_populated, self._allowed))
        self._holds = {
            key: hold
            for key, hold in self._holds.items()
            if key in self._written or exists(hold.pod)
        }

        coming = set()  # the tokens of answers of which the pod's cgroup is to come
        for hold in self._holds.values():
            if answer := self._answers.get(hold.token):
                answer.cgroup_seen |= exists(hold.pod)
                if not answer.cgroup_seen:
                    coming.add(hold.token)
        self._answers = {
            token: answer
            for token, answer in self._answers.items()
            if token in coming or now - answer.at < WRITTEN_WITHIN
        }

    def note_stream(self, now: float, *, is_open: bool, is_closed_here: bool = False) -> None:
        """Note that a ListAndWatch stream has been opened or has ended: a kubelet is connected.

        The end of a stream that is closed here, as its resource has no devices left, tells nothing
        about the kubelet.
        """
        self._streams += 1 if is_open else -1
        if is_open:
            self._connected_since = min(self._connected_since, now)
        elif self._streams == 0 and not is_closed_here:
            self._connected_since = inf

    def is_current(self, hold: Hold, now: float) -> bool:
        """Return whether a hold still has its chips: see the table at the head of this chapter."""
        if hold.key not in self._written:
            return self.runs(hold.pod, now)
        if self.cgroups.exists(hold.pod):
            return True

        # Kubelets admit pods before they make their cgroups: minutes, if the network is not ready.
        answer = self._answers.get(hold.token)
        is_to_come = answer is not None and not answer.cgroup_seen
        # Only a kubelet ends pods. Their cgroups also go by `systemctl stop kubepods.slice`, a soft
        # reboot, and a restart of a system container.
        has_no_kubelet = now - self._connected_since < STARTED_WITHIN
        return is_to_come or has_no_kubelet or not self.cgroups.have_roots

    def current(self, now: float) -> list[Hold]:
        """Return the current holds."""
        return [hold for hold in self._holds.values() if self.is_current(hold, now)]

    def runs(self, pod: str, now: float) -> bool:
        """Return whether a pod runs on its chips: see the head of this chapter.

        Without a pause process (CRI-O) a pod has no process until its container is created, also if
        another container of it ends just then.
        """
        allowed_at = self._allowed.get(pod)
        if allowed_at is None or not self.cgroups.exists(pod):
            return False
        return now - allowed_at < STARTED_WITHIN or self.cgroups.is_populated(pod)

    def has_no_processes(self, now: float) -> bool:
        """Return whether pods were started long ago, and none has ever had a process.

        Then kubelet and runtime have different cgroup drivers, or the pods' cgroups are not found.
        A pod that has ended keeps its cgroup, without a process, until the kubelet removes it.
        """
        if self._streams and not self.cgroups.have_roots:
            return True
        were_started = any(now - at >= STARTED_WITHIN for at in self._allowed.values())
        return were_started and not self._have_run

    def add(self, hold: Hold, now: float) -> None:
        """Add an answer that is given now."""
        self._answers[hold.token] = Answer(hold, now)

    def _newest_answer(self, resource: str, ids: Ids, now: float) -> Answer | None:
        """Return the last answer for exactly these IDs, if kubelets may not have written it yet."""
        for answer in reversed(self._answers.values()):
            if answer.hold.is_for(resource, ids):
                return answer if now - answer.at < WRITTEN_WITHIN else None
        return None

    def blockers(self, call: Call, now: float) -> list[Hold] | None:
        """Return the holds whose pods must end before a start, None while the callers are unknown.

        Raises RequestError if the call can never be allowed. If one pod is the caller, its own
        containers do not count: the start is that of its next one, or a restart. If several pods
        have the IDs (kubernetes #137534), none of them may run.
        """
        entries = [
            hold
            for key, hold in self._holds.items()
            if key in self._written and hold.is_for(call.resource, call.ids)
        ]
        if not call.callers:
            self._find_callers(call, entries, now)
        elif call.callers.isdisjoint(hold.pod for hold in entries):
            raise RequestError(Status.FAILED_PRECONDITION, "the pod was deleted")
        if not call.callers:
            return None

        own = call.callers if len(call.callers) == 1 else frozenset()
        found = []
        for hold in self._holds.values():
            if hold.pod in own or hold.chips.isdisjoint(call.chips):
                continue
            if not hold.shares_device(call.resource, call.ids) and self.runs(hold.pod, now):
                found.append(hold)
        return found

    def _find_callers(self, call: Call, entries: Sequence[Hold], now: float) -> None:
        """Set the callers, and their chips, if they are known now; raises RequestError.

        Kubelets write late, and older writings land after newer ones, so callers are not known
        while the checkpoint lacks the newest answer. The chips are those in the callers' answers,
        as the present list can have the IDs for others.
        """
        newest = self._newest_answer(call.resource, call.ids, now)
        if newest and newest.at > call.came_at:
            text = "the device was given to another pod meanwhile"
            raise RequestError(Status.FAILED_PRECONDITION, text)

        is_up_to_date = not newest or newest.hold.token in {hold.token for hold in entries}
        if is_up_to_date:
            has_cgroup = self.cgroups.exists if self.cgroups.have_roots else bool
            own = [hold for hold in entries if has_cgroup(hold.pod)]
            call.callers = frozenset(hold.pod for hold in own)
            call.chips = frozenset().union(*(hold.chips for hold in own))

    def allow(self, call: Call, now: float) -> None:
        """Note that a start is allowed: it counts for all callers."""
        self._allowed |= dict.fromkeys(call.callers, now)
        for answer in self._answers.values():
            answer.is_used |= answer.hold.is_for(call.resource, call.ids)

    def forgotten_chips(self, now: float) -> frozenset[str]:
        """Return chips that the kubelet takes for free though a pod runs on them.

        The pod was deleted by force, or the kubelet has lost its checkpoint.
        """
        left = [hold for key, hold in self._holds.items() if key not in self._written]
        return frozenset(chain(*(hold.chips for hold in left if self.runs(hold.pod, now))))

    def unwritten(self, now: float) -> list[Hold]:
        """Return answers that no checkpoint has named yet: they keep their directories."""
        found = []
        for answer in self._answers.values():
            is_young = now - answer.at < WRITTEN_WITHIN
            if is_young and not answer.is_written and not answer.is_used:
                found.append(answer.hold)
        return found

    def hugepages_for(self, resource: str, ids: Ids, now: float) -> str | None:
        """Return the name of existing hugepage directories for a new answer; None: new ones.

        The kubelet gives an init container's IDs to the pod's other containers, too, each with an
        Allocate, before any of them starts; the node has pages for one of them. Containers on a
        shared device have one directory.
        """
        if all(map(is_replica, ids)):
            holds = [*self.current(now), *self.unwritten(now)]
            names = [hold.hugepages for hold in holds if hold.shares_device(resource, ids)]
            return next(filter(None, names), None)

        newest = self._newest_answer(resource, ids, now)
        if newest is None or newest.is_used:
            return None
        name = newest.hold.hugepages
        others = [hold.pod for hold in self._holds.values() if hold.hugepages == name]
        return None if any(map(self.cgroups.exists, others)) else name

    def to_saved(self) -> Json:
        """Return what the next daemon of this boot cannot read again."""
        holds = []
        for hold in self._holds.values():
            if hold.pod in self._allowed:
                saved = hold._asdict()
                holds.append(saved | {"ids": sorted(hold.ids), "chips": sorted(hold.chips)})
        return {"holds": holds, "allowed": self._allowed}


def saved_holds(saved: Json) -> SavedHolds:
    """Return the holds of HoldBook.to_saved(). Raises OTHER_FORM."""
    holds = []
    for each in saved["holds"]:
        # JSON has lists in place of sets and tuples.
        each |= {"ids": frozenset(each["ids"]), "chips": frozenset(each["chips"])}
        holds.append(Hold(**{**each, "directories": tuple(each["directories"])}))
    return SavedHolds(holds, {pod: float(at) for pod, at in saved["allowed"].items()})


# -- lists -----------------------------------------------------------------------------------------


def advertise(
    offer: Offer, chips: Mapping[str, Chip], holds: Iterable[Hold], names: Mapping[str, str]
) -> Resources:
    """Return the resources as the kubelet gets them, by name.

    Each ID of a hold is listed, whatever the configuration says now: kubelets 1.35 to 1.37 crash at
    their start without it (topology_hints.go), and end the pod if it is unhealthy then. Every other
    ID is withheld while a hold has one of its chips under another resource, or under an ID of
    another device. `chips`: known ones, and all chips of holds (see decide()).
    """
    found: dict[str, dict[str, Device]] = defaultdict(dict)  # by resource and ID
    of_chip: dict[str, tuple[str, Device]] = {}  # resource and device, by address
    for name, resource in offer.resources.items():
        found[name] |= resource.devices
        for device in resource.unique_devices:
            of_chip |= dict.fromkeys(device.addresses, (name, device))

    held = {(hold.resource, device_id) for hold in holds for device_id in hold.ids}
    for hold in holds:
        for address in hold.chips & of_chip.keys():
            name, device = of_chip[address]
            if hold.shares_device(name, device.ids[:1]):  # so with all of its replicas
                continue
            holder = name_of_pod(hold.pod, names)
            more = f" and {len(hold.ids) - 1} more" if len(hold.ids) > 1 else ""
            text = f"held until {holder} ends (as {hold.resource} {min(hold.ids)}{more})"
            withheld = device._replace(withheld=text, holder=holder)
            others = [each for each in device.ids if (name, each) not in held]
            found[name] |= dict.fromkeys(others, withheld)

        for device_id in hold.ids:
            given = found[hold.resource].get(device_id)
            # After a reboot, a board is incomplete until its chips report their serial number.
            if not given or not given.addresses <= hold.chips or given.incomplete:
                found[hold.resource][device_id] = _reserved_device(device_id, hold, chips)

    empty = Resource("", {})
    return {
        name: replace(offer.resources.get(name, empty), name=name, devices=devices)
        for name, devices in sorted(found.items())
    }


def _reserved_device(device_id: str, hold: Hold, chips: Mapping[str, Chip]) -> Device:
    """Return the device of an ID that only a hold gives."""
    members = tuple(chips[address] for address in sorted(hold.chips, key=address_numbers))
    device = Device(without_replica(device_id), members, Place(device_id), len(members))
    return device._replace(ids=(device_id,), is_reserved=True)


# -- directories -----------------------------------------------------------------------------------
#
# tt-umd opens hugepage files with fixed names, mode 0666 (hugepage.cpp). So containers that have
# the host's directory open each other's, and the files of a pod that was killed stay there, with
# their pages. With hugepages = "private" a container has its own directory, whose name never was
# there before. tt-umd's locks are in /dev/shm, of which containers on a shared device have one in
# common. Both exist while a current hold names them, or an answer that is still to be written. What
# a container has left in one can be anything.


class Directories:
    """The directories for containers: in <hugetlbfs>/OWN_DIRECTORY and <lock_dir>/OWN_DIRECTORY."""

    def __init__(self) -> None:
        self.problems: dict[str, Problem] = {}  # by path, at the last poll
        self.unremoved: Problem | None = None
        self._removal: asyncio.Task[None] | None = None  # at most one at a time

    def make_for_hugepages(self, name: str, settings: Settings) -> list[Mount]:
        """Make a directory of this name in each hugetlbfs in which that is possible."""
        mounts = []
        for hugetlbfs in hugetlbfs_mounts(settings):
            path = f"{hugetlbfs.host}/{OWN_DIRECTORY}/{name}"
            # DPDK's and libvirt's belong to others; behind an IOMMU pods do without.
            with self._noting_problem(dirname(path), "FAIL"):
                make_directory(path, HUGEPAGES_MODE)
                mounts.append(Mount(path, hugetlbfs.container))
        return mounts

    def remove_unnamed(self, named: Collection[str], settings: Settings) -> None:
        """Begin to remove the directories that are not named, unless a removal is under way.

        They get other names first: those of locks can be needed again long before it ends.
        """
        if self._removal is None or self._removal.done():
            found = {}
            for parent, names in unnamed_directories(named, settings).items():
                with suppress(OSError), opened_own_directory(parent) as directory:
                    found[parent] = [set_aside(name, directory) for name in names]
            self._removal = asyncio.create_task(self._remove(found))

    async def _remove(self, found: Mapping[str, Sequence[str]]) -> None:
        """Remove directories, given by their names in each parent."""
        left = []
        for parent, names in found.items():
            with suppress(OSError), opened_own_directory(parent) as directory:
                # A container that has the host's hugetlbfs could put a link in the parent's place:
                # rm works in the open directory. It can take minutes: a file of 1 GiB takes 0.1 s.
                rm = await asyncio.create_subprocess_exec(
                    *("rm", "-rf", "--one-file-system", "--", *names),
                    cwd=f"/proc/self/fd/{directory}",
                    stderr=subprocess.DEVNULL,
                )
                await rm.wait()
                left += [f"{parent}/{name}" for name in os.listdir(directory) if name in names]

        more = f" (and {len(left) - 1} more)" if left[1:] else ""
        self.unremoved = None
        if left:
            self.unremoved = Problem("directories", f"{min(left)} cannot be removed{more}")

    async def removed(self, timeout: float) -> None:
        """Wait until the removal under way has ended, but not longer."""
        if self._removal:
            await asyncio.wait({self._removal}, timeout=timeout)

    def make_missing(self, named: Iterable[str], settings: Settings) -> None:
        """Make the directories of holds that are missing.

        Runtimes resolve the paths of an answer each time that they create a container, and make
        missing ones 0755.
        """
        self.problems = {}
        parents = own_directories(settings)
        needed = []
        if settings.has_private_hugepages:
            needed += [path for path in parents if basename(dirname(path)) in HUGETLBFS]
        if settings.sharing.resources and settings.sharing.lock_dir:
            needed.append(f"{settings.sharing.lock_dir}/{OWN_DIRECTORY}")
        for parent in needed:
            with self._noting_problem(parent, "FAIL"):
                make_own_directory(parent)

        for path in named:
            if dirname(path) in parents and not os.path.lexists(path):
                is_hugepages = basename(dirname(dirname(path))) in HUGETLBFS
                with self._noting_problem(path, "warn"):
                    make_directory(path, HUGEPAGES_MODE if is_hugepages else LOCKS_MODE)

    @contextmanager
    def _noting_problem(self, path: str, level: str) -> Iterator[None]:
        """Record that a directory cannot be used."""
        try:
            yield
        except OSError as error:
            text = f"{error.filename or path}: {error.strerror}"
            self.problems[path] = Problem("directories", text, level=level)


# The only mode in which each user of a pod can open another one's hugepage files
# (fs.protected_regular). Locks can only be removed by those who made them.
HUGEPAGES_MODE = 0o777
LOCKS_MODE = 0o1777


def own_directories(settings: Settings) -> list[str]:
    """Return the directories in which the daemon makes and removes directories for containers."""
    found = [f"{settings.dev}/{name}" for name in HUGETLBFS]
    if settings.sharing.lock_dir:
        found.append(settings.sharing.lock_dir)
    return [f"{path}/{OWN_DIRECTORY}" for path in found if isdir(path)]


def unnamed_directories(named: Collection[str], settings: Settings) -> dict[str, list[str]]:
    """Return the names in each of own_directories() that are not those of these paths."""
    found = {}
    for parent in own_directories(settings):
        with suppress(OSError):
            names = [name for name in os.listdir(parent) if f"{parent}/{name}" not in named]
            if names:
                found[parent] = names
    return found


def set_aside(name: str, directory: int) -> str:
    """Rename an entry of an open directory, unless it was before; return its name.

    One that cannot be renamed, such as a mount point, keeps its name.
    """
    aside = f".{name}-{os.urandom(4).hex()}"
    if not name.startswith("."):
        with suppress(OSError):
            os.rename(name, aside, src_dir_fd=directory, dst_dir_fd=directory)
            return aside
    return name


def make_own_directory(path: str) -> None:
    """Make one of own_directories(), if it is missing; raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    with opened_own_directory(path):
        pass


def make_directory(path: str, mode: int) -> None:
    """Make a directory in one of own_directories(), if it is missing; raises OSError."""
    parent, name = os.path.split(path)
    make_own_directory(parent)
    with opened_own_directory(parent) as directory, suppress(FileExistsError):
        os.mkdir(name, dir_fd=directory)
        os.chmod(name, mode, dir_fd=directory)  # whatever the umask


@contextmanager
def opened_own_directory(path: str) -> Iterator[int]:
    """Open one of own_directories(); raises OSError if it is a link, or another user's."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's directory", path)
        yield directory
    finally:
        os.close(directory)


# ==== DECISION: the desired state. Pure ===========================================================


@dataclass(frozen=True)
class Decision:
    """The desired state. What others are told about it are functions of it."""

    settings: Settings
    driver: str | None  # see driver_version()
    unsupported: tuple[str, ...]  # addresses of functions that are not supported
    chips: Mapping[str, Chip]  # also chips that only a hold has, in the order of addresses
    holds: Sequence[Hold]
    names: Mapping[str, str]  # of pods, by UID
    offer: Offer  # by the configuration alone
    resources: Resources  # as advertised, by name

    @cached_property
    def devices(self) -> dict[str, tuple[Resource, Device]]:
        """Return each chip's resource and device, preferring a configured to a reserved one."""
        found: dict[str, tuple[Resource, Device]] = {}
        for resource in self.resources.values():
            for device in resource.unique_devices:
                for chip in device.chips:
                    if chip.address not in found or not device.is_reserved:
                        found[chip.address] = (resource, device)
        return found

    @cached_property
    def held_chips(self) -> frozenset[str]:
        return frozenset(chain(*(hold.chips for hold in self.holds)))

    def resource(self, name: str) -> Resource:
        """Return an advertised resource; one without devices if there is none of this name."""
        return self.resources.get(name) or Resource(name, {})

    def is_out_of_service(self, address: str) -> bool:
        """Return whether a chip is excluded and not held, so that its faults do not matter."""
        return address in self.offer.excluded and address not in self.held_chips


def decide(
    settings: Settings,
    chips: Mapping[str, Chip],
    holds: Sequence[Hold] = (),
    names: Mapping[str, str] = {},
    driver: str | None = None,
    unsupported: tuple[str, ...] = (),
) -> Decision:
    """Return the desired state; see Decision."""
    known = dict(chips)
    for hold in holds:
        # A chip that a pod was given, but that is missing since boot.
        for address in hold.chips - chips.keys():
            known[address] = Chip(PciFunction(address, on_bus=False))
    known = {address: known[address] for address in sorted(known, key=address_numbers)}

    offer = make_offer(known, settings)
    resources = advertise(offer, known, holds, names)
    return Decision(settings, driver, unsupported, known, holds, names, offer, resources)


# ==== PREFERRED ALLOCATION: neighbours, and whole boards stay whole. Pure =========================
#
# The kubelet asks which of the available IDs a container should get.
#
# 1. Each ID has a rank, wherever its device is. IDs are chosen in the order of their ranks, until
#    only some IDs of a rank are needed. Their devices are the candidates.
# 2. If they fit on one NUMA node, but not on one board, they come from the boards of that node.
# 3. They are taken from one board after the other, each time from the one with the lowest cost.
#    This is greedy: tests/test_preferred.py shows how far from the best set it can end.

# The links of a Galaxy (tt-metal's physical groupings; not seen on hardware). A tray's chips are
# 1 2 3 4 above 5 6 7 8, each linked to the next one in its row and to the opposite one.
TRAY_LINKS = [{n, n + 1} for n in (1, 2, 3, 5, 6, 7)] + [{n, n + 4} for n in (1, 2, 3, 4)]

# Its trays form a ring, in the order of GALAXY_TRAYS. Opposite ones are not linked: their buses
# differ in this bit.
OPPOSITE_TRAY = 0x80

# Of an ID: not must-include; refused by Allocate; forgotten; how many of the same device are chosen
# before it; how many of these are not available.
Rank = tuple[bool, bool, bool, int, int]


@dataclass
class Board:
    """The listed devices of a board, by their positions in a tray (0: not in a tray).

    Devices have numbers, in the order of PCI addresses: see Resource.ids_by_device.
    """

    bus: int  # of its tray; 0: not in a tray
    size: int = 0  # of all its devices
    numa_nodes: set[int] = field(default_factory=set)  # of all its devices
    chosen: set[int] = field(default_factory=set)  # positions
    candidates: dict[int, int] = field(default_factory=dict)  # positions, by the devices' numbers
    room_on_node: int = 0  # candidates on its NUMA node

    @property
    def room(self) -> int:
        return len(self.candidates)

    def offer(
        self, needed: int, used_nodes: set[int], used_buses: set[int]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Return the costs of using this board, the most important first, and what it gives.

        It gives as many candidates as are needed, or all of them. `used_nodes`, `used_buses`: of
        the boards in use.
        """
        sets = combinations(self.candidates, min(needed, self.room))
        links, devices = min((-self._links(each), each) for each in sets)
        is_whole = self.room == self.size

        cost = [
            not self.chosen,  # boards in use are the first
            max(needed - self.room, 0),  # then a large enough one, or else the largest
            len(self.numa_nodes - used_nodes),
            is_whole and needed < self.room,  # it would be broken up
            self.bus ^ OPPOSITE_TRAY in used_buses,
            links,  # before the size: a program for linked chips fails on others
            self.room,  # of boards that are large enough, the smallest
            is_whole,
            max(needed - self.room_on_node, 0),  # the same for NUMA nodes
            self.room_on_node,
        ]
        return cost, devices

    def _links(self, devices: Iterable[int]) -> int:
        """Return how many links there are if these candidates are chosen, too."""
        positions = self.chosen.union(self.candidates[number] for number in devices)
        return sum(map(positions.issuperset, TRAY_LINKS))


def preferred_allocation(
    resource: Resource,
    available: Collection[str],
    must_include: Collection[str],
    size: int,
    forgotten: Collection[str] = (),
) -> list[str]:
    """Return the best `size` of the available IDs; raises RequestError.

    `forgotten`: IDs that are free for the kubelet, but on whose chips a pod runs.
    """
    check_replicas(resource, size)
    free = frozenset(available)
    required = frozenset(must_include)
    _check_question(resource, free, required, size)

    chosen: set[str] = set()
    chosen_devices: set[int] = set()
    by_rank = _ids_by_rank(resource, free, required, frozenset(forgotten))
    for rank in sorted(by_rank):
        ids = by_rank[rank]
        needed = size - len(chosen)
        if needed < len(ids):
            devices = _nearest(_boards(resource, chosen_devices, ids), needed)
            chosen.update(ids[number] for number in devices)
            break

        chosen.update(ids.values())
        chosen_devices.update(ids)
    return [device_id for device_id in resource.devices if device_id in chosen]


def check_replicas(resource: Resource, number: int) -> None:
    """Raise RequestError if a container must not have this many IDs."""
    if resource.max_one_replica and number > 1:
        reason = (
            f"a container can request only 1 shared {resource.name}, not {number} "
            "(fail_requests_greater_than_one is true)"
        )
        raise RequestError(Status.INVALID_ARGUMENT, reason)


def _check_question(resource: Resource, free: Ids, required: Ids, size: int) -> None:
    """Raise RequestError if no choice of this size fits these IDs, or if one is unknown."""
    if unknown := sorted((free | required).difference(resource.devices)):
        reason = f"{resource.name} has no device {abbreviate(unknown)}"
        raise RequestError(Status.INVALID_ARGUMENT, reason)

    if not required <= free or not len(required) <= size <= len(free):
        reason = (
            f"cannot choose {size} of {len(free)} available devices, "
            f"with {len(required)} must-include devices"
        )
        raise RequestError(Status.INVALID_ARGUMENT, reason)


def _ids_by_rank(
    resource: Resource, free: Ids, required: Ids, forgotten: Ids
) -> dict[Rank, dict[int, str]]:
    """Return the IDs of each rank, by the numbers of their devices; of a device at most one."""
    refused = resource.refused

    def special(device_id: str) -> tuple[bool, bool, bool]:
        # The kubelet can offer a refused ID, by a former list. A pod runs on a forgotten one.
        return device_id not in required, device_id in refused, device_id in forgotten

    found: dict[Rank, dict[int, str]] = defaultdict(dict)
    for number, ids in enumerate(resource.ids_by_device):
        available = [device_id for device_id in ids if device_id in free]
        users = len(ids) - len(available)

        # Distinct devices first, then the least used.
        for repeats, device_id in enumerate(sorted(available, key=special)):
            rank = (*special(device_id), repeats, users)
            found[rank][number] = device_id
    return found


def _boards(resource: Resource, chosen: Container[int], candidates: Container[int]) -> list[Board]:
    """Return all boards. Chosen devices and candidates are given by their numbers."""
    by_place: dict[object, Board] = {}
    for number, ids in enumerate(resource.ids_by_device):
        device = resource.devices[ids[0]]
        place = device.place
        board = by_place.setdefault(place.board, Board(place.tray.bus if place.tray else 0))
        board.size += 1
        board.numa_nodes.update(device.numa_nodes)

        # A shared device can be both, with two of its IDs.
        if number in chosen:
            board.chosen.add(place.position)
        if number in candidates:
            board.candidates[number] = place.position

    boards = list(by_place.values())
    for board in boards:
        same_node = (each for each in boards if each.numa_nodes == board.numa_nodes)
        board.room_on_node = sum(each.room for each in same_node)
    return boards


def _nearest(boards: Sequence[Board], needed: int) -> list[int]:
    """Return the numbers of so many candidates: 2. and 3. above."""
    boards = _on_one_numa_node(boards, needed)
    found: list[int] = []
    while left := needed - len(found):
        used = [board for board in boards if board.chosen]
        nodes = _numa_nodes(used)
        buses = {board.bus for board in used}

        # Of equal costs the lowest addresses decide.
        offers = [(*board.offer(left, nodes, buses), board) for board in boards if board.candidates]
        _, devices, board = min(offers)
        board.chosen.update(board.candidates.pop(number) for number in devices)
        found += devices
    return found


def _on_one_numa_node(boards: Sequence[Board], needed: int) -> Sequence[Board]:
    """Return the boards to take so many candidates from: 2. above."""
    used_nodes = _numa_nodes(board for board in boards if board.chosen)
    if not used_nodes and any(board.room >= needed for board in boards):
        return boards

    # The node on which the fewest boards are enough, and of these the smallest.
    best = boards
    least: tuple[float, float] = inf, inf
    possible = [used_nodes] if used_nodes else [board.numa_nodes for board in boards]
    for numa_nodes in possible:
        group = [board for board in boards if board.numa_nodes <= numa_nodes]
        rooms = sorted((board.room for board in group), reverse=True)
        used_up = sum(total < needed for total in accumulate(rooms))
        if sum(rooms) >= needed and (used_up, sum(rooms)) < least:
            best, least = group, (used_up, sum(rooms))
    return best


def _numa_nodes(boards: Iterable[Board]) -> set[int]:
    return set().union(*(board.numa_nodes for board in boards))


# ==== CONTAINER EDITS: from a request for devices. Pure ===========================================

Containers = Sequence[Sequence[str]]  # the IDs that each container requests
Edits = pb.ContainerAllocateResponse
SHM = "/dev/shm"  # where tt-umd's locks are


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
    chips: Chips, links: Mapping[str, str], settings: Settings, mounts: Iterable[Mount], token: str
) -> Edits:
    """Return the edits for a container with exactly these chips.

    `links`: udev's, by address; `token`: of this answer, see Hold.
    """
    chips = sorted(chips, key=lambda chip: address_numbers(chip.address))
    addresses = ",".join(chip.address for chip in chips)
    edits = Edits(envs={ADDRESSES: addresses}, annotations={TOKEN: token})

    # tt-umd reads an integer as an index into the devices inside the container, so the host's
    # device number would be wrong. Before v0.9.3 it read the device number, not an index.
    if settings.visible_devices == "bdf":
        edits.envs["TT_VISIBLE_DEVICES"] = addresses
    elif settings.visible_devices == "index":
        edits.envs["TT_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(len(chips)))

    for chip in chips:
        if settings.device_list_strategy == "cdi":
            edits.cdi_devices.add(name=f"{CDI_KIND}={chip.address}")
        else:
            # Under the host's number, after which tt-umd names its locks and hugepage files.
            edits.devices.add(
                container_path=f"/dev/tenstorrent/{chip.function.number}",
                host_path=links.get(chip.address, chip.function.path),
                permissions="rw",
            )

    for mount in mounts:
        edits.mounts.add(
            host_path=mount.host, container_path=mount.container, read_only=mount.read_only
        )
    return edits


# ==== CDI AND LABELS: descriptions of the devices for others. Pure ================================

CDI_KIND = "tenstorrent.com/device"
CDI_FILE = "tenstorrent.com-device.json"
LABELS_FILE = "tt-device-plugin"
LABEL_PREFIX = "tenstorrent.com"


def cdi_file(decision: Decision) -> str | None:
    """Return a CDI file (spec 0.5.0, which refuses links as device nodes); None without chips.

    Excluded chips have an entry by address, but are not in "all".
    """
    nodes = {}
    for chip in decision.chips.values():
        if chip.has_device_file:
            path, host_path = f"/dev/tenstorrent/{chip.function.number}", chip.function.path
            nodes[chip.address] = [{"path": path, "hostPath": host_path, "permissions": "rw"}]
    if not nodes:
        return None

    excluded = decision.offer.excluded
    offered = [its_nodes for address, its_nodes in nodes.items() if address not in excluded]
    if offered:
        nodes["all"] = list(chain(*offered))

    devices = []
    for name, device_nodes in nodes.items():
        devices.append({"name": name, "containerEdits": {"deviceNodes": device_nodes}})
    spec: dict[str, object] = {"cdiVersion": "0.5.0", "kind": CDI_KIND, "devices": devices}

    binds = []
    for mount in host_mounts(decision.settings):
        options = ["rbind", "ro" if mount.read_only else "rw"]
        binds.append({"hostPath": mount.host, "containerPath": mount.container, "options": options})
    if binds:
        spec["containerEdits"] = {"mounts": binds}
    return json.dumps(spec)  # with an indent it would take ten times as long


def labels_file(decision: Decision) -> str:
    """Return labels of devices with a device file, for node-feature-discovery's local source."""
    chips = []
    for chip in decision.chips.values():
        if chip.has_device_file and chip.address not in decision.offer.excluded:
            chips.append(chip)

    labels = {f"arch.{chip.function.arch}": "true" for chip in chips}
    labels["driver.version"] = decision.driver or ""
    labels["firmware.version"] = common_value(chip.identity.firmware for chip in chips)
    labels["plugin.version"] = __version__
    for resource in decision.offer.resources.values():
        for key, value in _labels_of(resource).items():
            labels[f"{resource.short_name}.{key}"] = value

    lines = []
    for key, value in sorted(labels.items()):
        # Kubernetes' limits: 63 characters, alphanumeric at both ends.
        value = re.sub(r"[^A-Za-z0-9._-]+", "_", value)[:63].strip("._-")
        if value and len(key) <= 63:
            lines.append(f"{LABEL_PREFIX}/{key}={value}\n")
    return "".join(lines)


def _labels_of(resource: Resource) -> dict[str, str]:
    """Return the labels of a resource, without its name in the keys."""
    devices = []
    for device in resource.unique_devices:
        if any(chip.has_device_file for chip in device.chips):
            devices.append(device)

    product = common_value(chip.board_type for device in devices for chip in device.chips)
    labels = {
        "count": str(len(devices)),
        "replicas": str(resource.replicas or 1),
        "product": f"{product}-SHARED" if product and resource.replicas else product,
    }
    # One value for all devices, or none.
    whole = [device for device in devices if not device.incomplete]
    memory = {sum(chip.memory for chip in device.chips) for device in whole}
    if len(memory) == 1 and memory != {0}:
        labels["memory"] = str(memory.pop())
    return labels


def common_value(values: Iterable[str | None]) -> str:
    """Return the value that all have, "mixed" if they differ, "" without any."""
    found = {value for value in values if value}
    return "mixed" if len(found) > 1 else "".join(found)


# ==== REPORTS: problems, log, status, metrics, view. Pure =========================================


def problems_of(decision: Decision) -> list[Problem]:
    """Return what is wrong with chips and devices, except for chips that are out of service."""
    found = []
    for address, chip in decision.chips.items():
        if chip.fault and not decision.is_out_of_service(address):
            kind = chip.fault.kind.value
            found.append(Problem(address, chip.fault.text, chip.command, kind, "FAIL"))

    for name, resource in decision.resources.items():
        for device in resource.unique_devices:
            if device.incomplete:
                found.append(Problem(f"{name} {device.id}", device.incomplete, kind="incomplete"))
            if device.withheld:
                found.append(Problem(f"{name} {device.id}", device.withheld, kind="withheld"))

    # Without a board, a chip cannot be offered, and a Galaxy's has no neighbours.
    by_board = decision.settings.unit == "board"
    for address, text in decision.offer.unplaced.items():
        chip = decision.chips[address]
        matters = by_board or chip.is_galaxys
        if matters and not chip.fault and not decision.is_out_of_service(address):
            text = f"not advertised: {text}" if by_board else text
            found.append(Problem(address, text, kind="unplaced"))

    if not by_board:
        found += _missing_chips(decision)
    return found


def _missing_chips(decision: Decision) -> Iterator[Problem]:
    """Yield which boards are not whole: 1 of 2 chips of a p300, 7 of 8 of a Galaxy's tray."""
    # The other chip of a p300 may be one that does not report its serial number.
    if decision.offer.unplaced:
        return

    chips = [chip for chip in decision.chips.values() if chip.is_listed]
    boards = defaultdict(list)
    for address, place in places(chips).items():
        if place.board_id:
            boards[place.board_id, place.board_size].append(address)

    for (board_id, size), found in boards.items():
        if len(found) < size and not all(map(decision.is_out_of_service, found)):
            yield Problem("chips", f"only {len(found)} of {size} chips of board {board_id} found")


class Condition(NamedTuple):
    """Something that lasts, for the log."""

    level: int
    line: str
    kind: str  # another one is reported, but new numbers in the line are not
    end: str = ""  # line for its end; empty: not reported


def conditions(decision: Decision, problems: Iterable[Problem]) -> dict[str, Condition]:
    """Return the state of each chip and device, and the node's problems, by subject."""
    found = {}
    for address, chip in decision.chips.items():
        name, identity = chip.display_name, chip.identity
        if decision.is_out_of_service(address):
            found[address] = Condition(logging.INFO, f"{name}: excluded", "excluded")
        elif not chip.fault:
            facts = {"serial": identity.serial, "ASIC": identity.asic_id}
            facts |= {"firmware": identity.firmware}
            known = [f"{what} {value}" for what, value in facts.items() if value]
            text = f"{name}: healthy: {', '.join([chip.function.path, *known])}"
            found[address] = Condition(logging.INFO, text, text)

    for problem in problems:
        subject, kind = problem.subject, problem.kind
        if subject in decision.chips:
            chip = decision.chips[subject]
            line = f"{chip.display_name}: {'unhealthy: ' if chip.fault else ''}{problem}"
            found[subject] = Condition(logging.WARNING, line, kind)
        elif kind:
            end = f"{subject} is no longer {kind}"
            line = f"{subject} is {kind}: {problem}"
            found[f"{subject} {kind}"] = Condition(logging.WARNING, line, problem.text, end)
        else:
            line = f"{subject}: {problem}"
            found[line] = Condition(logging.WARNING, line, "", f"resolved: {line}")
    return found


def changes(
    former: Mapping[str, Condition], present: Mapping[str, Condition]
) -> Iterator[tuple[int, str]]:
    """Yield the log lines about all changes, with their levels."""
    for subject, condition in present.items():
        if subject not in former or former[subject].kind != condition.kind:
            yield condition.level, condition.line
    for subject, condition in former.items():
        if subject not in present and condition.end:
            yield logging.INFO, condition.end


class Registration(NamedTuple):
    """The state of a resource's registration with the kubelet."""

    text: str = "waiting for kubelet"  # for status and log
    is_registered: bool = False
    successes: int = 0  # since the daemon's start
    has_tried: bool = False  # it was registered, has failed, or there is no kubelet


Registrations = Mapping[str, Registration]  # by resource


def status_line(decision: Decision, registrations: Registrations, problems: Iterable[str]) -> str:
    """Return a summary for operators, which systemd shows as the service's status.

    `problems`: the node's, for its end.
    """
    parts = [_summary(resource) for resource in decision.resources.values()]

    unlisted = []
    for address, chip in decision.chips.items():
        if chip.fault and not chip.is_listed and not decision.is_out_of_service(address):
            unlisted.append(f"{address}: {chip.reason}")
    if unlisted:
        more = ", …" if unlisted[1:] else ""
        parts.append(f"{pluralize(len(unlisted), 'chip')} not advertised ({unlisted[0]}{more})")

    if not parts and decision.chips:
        chips = pluralize(len(decision.chips), "chip")
        parts = [f"{chips}, but no device to offer; for the reason, run: tt-device-plugin list"]
    elif not parts and decision.unsupported:
        parts = [
            f"no supported Tenstorrent device on this node: {abbreviate(decision.unsupported)}"
        ]
    elif not parts:
        parts = ["no Tenstorrent device on this node; waiting for one"]

    # One text for all resources. If the texts differ, unregistered resources are named.
    texts = {registration.text for registration in registrations.values()}
    if len(texts) > 1:
        texts = set()
        for name, registration in registrations.items():
            if not registration.is_registered:
                texts.add(f"{name} {registration.text}")
    return "; ".join([*parts, *sorted(texts), *problems])


def _summary(resource: Resource) -> str:
    """Return a resource's part of the status, with its first unhealthy device."""
    devices = resource.unique_devices
    unhealthy = [f"{each.id}: {each.reason}" for each in devices if each.reason]
    replicas = f", {resource.replicas} replicas each" if resource.replicas else ""
    text = f"{len(devices)} × {resource.name}{replicas}, {len(devices) - len(unhealthy)} healthy"
    if not unhealthy:
        return text
    return f"{text} ({unhealthy[0]}{', …' if unhealthy[1:] else ''})"


User = dict[str, str]  # "namespace", "pod" (else its UID) and "container"


def users(decision: Decision) -> dict[str, list[User]]:
    """Return the containers that hold each chip, by PCI address."""
    found: dict[str, list[User]] = defaultdict(list)
    for hold in decision.holds:
        namespace, _, pod = decision.names.get(hold.pod, hold.pod).rpartition("/")
        user = {"namespace": namespace, "pod": pod, "container": hold.container}
        for address in hold.chips:
            # A pod that is admitted again has another hold while the former one's runs.
            if user not in found[address]:
                found[address].append(user)
    return found


class Samples:
    """Samples of metrics with a common prefix."""

    def __init__(self, prefix: str, helps: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._helps = helps
        self._series: dict[str, dict[str, float]] = defaultdict(dict)  # value by labels, by metric

    def add(self, name: str, value: float | None, **labels: object) -> None:
        """Add a sample, unless it has no value. A label that is None is empty."""
        if value is not None:
            text = ",".join(f'{key}="{_escaped(each)}"' for key, each in labels.items())
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


def _escaped(value: object) -> str:
    """Return a label's value in Prometheus' text format."""
    text = "" if value is None else str(value)
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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


def chip_metrics(decision: Decision) -> str:
    """Return the metrics of chips."""
    samples = Samples("tt_device_", CHIP_METRICS)
    for address, chip in decision.chips.items():
        resource, _ = decision.devices.get(address, (None, None))
        is_out_of_service = decision.is_out_of_service(address)
        add = partial(samples.add, device=address)
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

        if reading := chip.reading:
            add("temperature_celsius", reading.temperature)
            add("temperature_limit_celsius", reading.throttles_at)
            add("thermal_trips_total", reading.trips)
            for sensor in SENSORS:
                add(sensor.metric, reading.sensors.get(sensor.attribute), **sensor.labels)
            if reading.processes is not None:
                add("open", len(reading.processes))

    for address, containers in sorted(users(decision).items()):
        for user in containers:
            samples.add(
                "allocated",
                1,
                device=address,
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
    if decision.driver:
        samples.add("driver_info", 1, version=decision.driver)

    drivers = ["unsupported"] * len(decision.unsupported)
    for address, chip in decision.chips.items():
        if chip.function.on_bus and not decision.is_out_of_service(address):
            drivers.append(chip.function.driver or "")
    for driver, number in Counter(drivers).items():
        samples.add("pci_functions", number, driver=driver)

    for name, resource in decision.resources.items():
        add = partial(samples.add, resource=name)
        healthy = sum(is_healthy for _, is_healthy, _ in resource.list_entries)
        add("resource_devices", healthy, health="healthy")
        add("resource_devices", len(resource.devices) - healthy, health="unhealthy")

        registration = registrations.get(name, Registration())
        add("kubelet_registered", 1 if registration.is_registered else 0)
        add("kubelet_registrations_total", registration.successes)

        # Prometheus' advice: a counter exists from the start, so that its first step is seen.
        for result in ("granted", "refused"):
            add("allocations_total", counts.get((name, result), 0), result=result)

    samples.add("plugin_info", 1, version=__version__)
    samples.add("plugin_start_time_seconds", started)
    return samples.text()


PROGRAM = "tt-device-plugin"  # by which readers recognise a view


def view_of_node(
    decision: Decision,
    registrations: Registrations,
    problems: Iterable[Problem],
    *,
    status: str,
    rejected: str | None,
    knows_pods: bool,
    booted_at: float,
) -> Json:
    """Return what `list`, `check` and `fix` read.

    `rejected`: why the configuration on disk is not in force; `knows_pods`: a checkpoint was read;
    `booted_at`: Unix time of the boot, by the present clock.
    """
    used_by = users(decision)
    chips = []
    for address, chip in decision.chips.items():
        pods = used_by.get(address, [])
        since = None if chip.since is None else booted_at + chip.since
        chips.append(_chip_row(decision, chip, pods if pods or knows_pods else None, since))

    resources = []
    for name, registration in registrations.items():
        state = {"is_registered": registration.is_registered, "state": registration.text}
        resources.append({"name": name, **state})

    shown = []
    for problem in problems:
        row: Json = problem._asdict()
        row["problem"] = row.pop("text")
        shown.append(row)

    return {
        "program": PROGRAM,
        "version": __version__,
        "status": status,
        "settings": asdict(decision.settings),
        "rejected": rejected,
        "driver": decision.driver,
        "unsupported": decision.unsupported,
        "chips": chips,
        "resources": resources,
        "problems": shown,
    }


def _chip_row(
    decision: Decision, chip: Chip, pods: Sequence[User] | None, since: float | None
) -> Json:
    """Return a chip as `list --json` shows it.

    `pods`: None if they are unknown; `since`: Unix time at which its fault began.
    """
    function, reading = chip.function, chip.reading
    resource, device = decision.devices.get(chip.address, (None, None))
    in_service = not decision.is_out_of_service(chip.address)
    began = time.gmtime(since) if in_service and since is not None else None

    processes: Sequence[ProcessRow] | None = ()
    if function.driver not in (None, DRIVER):
        processes = None  # a virtual machine may use it
    elif chip.is_present:
        processes = reading.processes if reading else None

    return {
        "id": device.id if device else None,
        "index": function.number,
        "path": function.path if chip.has_device_file else None,
        "bdf": chip.address,
        "card": chip.card_type,
        "board": chip.board_type if chip.card_type else None,
        "arch": function.arch,
        "serial": chip.identity.serial,
        "asic_id": chip.identity.asic_id,
        "numa_node": function.numa_node,
        "firmware": chip.identity.firmware,
        "temperature": reading.temperature if reading else None,
        "power": reading.sensors.get("power1_input") if reading else None,
        # Faults of a chip that is out of service do not matter.
        "healthy": chip.fault is None if in_service else None,
        "reason": chip.reason if in_service else None,
        "withheld": device.holder if device else None,
        "resource": resource.name if resource else None,
        "replicas": resource.replicas if resource else 0,
        "pods": pods,
        "processes": processes,
        "excluded": chip.address in decision.offer.excluded,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", began) if began else None,
    }


# ==== THREADS: chips are read off the loop, as the driver can block a read for ten seconds ========

SLOW_AFTER = 0.1  # seconds after which nothing waits for a reading any more
Wake = Callable[[], None]  # makes the loop take a turn
Job = tuple[Settings, PciFunction, bool]  # the arguments of read_chip()


@contextmanager
def log_and_continue(subject: str) -> Iterator[None]:
    """Log any error: the boundary at which the daemon survives its own mistakes."""
    try:
        yield
    except Exception:
        log.exception("internal error (%s); continuing", subject)


class Readers:
    """Reads chips, each on its own thread, so that a blocked one delays no other.

    The driver answers within microseconds, or blocks. So the threads take turns while nothing
    blocks: threads that contend for the interpreter take several times the processor time.
    """

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._jobs: dict[str, queue.SimpleQueue[Job]] = {}  # of each chip's thread, by address
        self._since: dict[str, float] = {}  # when each reading under way began, by address
        self._results: list[Reading | OSError] = []
        self._turn = threading.Lock()

    def submit(
        self, settings: Settings, functions: Iterable[PciFunction], *, is_poll: bool
    ) -> None:
        """Read these chips, unless they are being read; raises OSError without a thread."""
        for function in functions:
            address = function.address
            if address in self._since:
                continue
            if address not in self._jobs:
                jobs = queue.SimpleQueue[Job]()
                loop = asyncio.get_running_loop()
                thread = threading.Thread(target=self._run, args=(jobs, loop), daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise OSError(errno.EAGAIN, str(error)) from None
                self._jobs[address] = jobs

            self._since[address] = monotonic()
            self._jobs[address].put((settings, function, is_poll))

    def _run(self, jobs: queue.SimpleQueue[Job], loop: asyncio.AbstractEventLoop) -> None:
        """Read one chip again and again; the main function of a thread."""
        while True:
            settings, function, is_poll = jobs.get()
            has_turn = self._turn.acquire(timeout=SLOW_AFTER)
            result: Reading | OSError | None = None
            with log_and_continue(f"reading {function.address}"):
                try:
                    result = read_chip(settings, function, is_poll=is_poll)
                except OSError as error:  # the daemon's own
                    result = error
            if has_turn:
                self._turn.release()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, function.address, result)

    def _end(self, address: str, result: Reading | OSError | None) -> None:
        """Take the result of a reading; the last one wakes the loop."""
        del self._since[address]
        if result is not None:
            self._results.append(result)
        if self.are_settled(monotonic()):
            self._wake()

    def collect(self) -> list[Reading]:
        """Return the readings since the last call; raises the daemon's own OSError."""
        results, self._results = self._results, []
        for result in results:
            if isinstance(result, OSError):
                raise result
        return [result for result in results if isinstance(result, Reading)]

    def blocked(self, now: float) -> list[str]:
        """Return the addresses of chips of which the reading takes too long."""
        return [address for address, since in self._since.items() if now - since >= READ_TIMEOUT]

    def are_settled(self, now: float) -> bool:
        """Return whether every reading has ended or is slow."""
        return all(now - since >= SLOW_AFTER for since in self._since.values())

    def due(self, now: float) -> float:
        """Return when the next reading becomes slow, or counts as blocked."""
        times = [inf]
        for since in self._since.values():
            times += [each for each in (since + SLOW_AFTER, since + READ_TIMEOUT) if each > now]
        return min(times)


# ==== FILES: for others, and to survive a restart =================================================


def replace_file(path: str, text: str, mode: int) -> None:
    """Write a file, or replace it; raises OSError.

    A new one is created and renamed, so nothing that another user has put in its place is followed
    or written to.
    """
    new = f"{dirname(path)}/.{basename(path)}.new"
    if_exists(os.unlink, new)  # of a daemon that was killed

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)
        raise


def has_text(path: str, text: str) -> bool:
    """Return whether a file has exactly this text."""
    content = text.encode()
    with suppress(OSError, ValueError):
        return read_others_file(path, len(content)) == content
    return False


class OutputFiles:
    """The files for others. Without its directory nothing reads a file, so it is not written."""

    def __init__(self) -> None:
        self.problems: dict[str, Problem] = {}  # by path

    def keep(self, path: str, text: str | None) -> None:
        """Write a file with this text, unless it has it; None: remove the file."""
        self.problems.pop(path, None)
        if not isdir(dirname(path)):
            return
        try:
            if text is None:
                if_exists(os.unlink, path)
            elif not has_text(path, text):
                replace_file(path, text, 0o644)
        except OSError as error:
            self._note(path, error)

    def write(self, path: str, text: str) -> None:
        """Write a file, also if it has the text: its time shows that the daemon is alive."""
        self.problems.pop(path, None)
        try:
            replace_file(path, text, 0o644)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(path, error)

    def _note(self, path: str, error: OSError) -> None:
        """Record that a file cannot be written.

        A directory that is newer than the service is read-only in its sandbox. For other
        directories than these, the unit needs ReadWritePaths=.
        """
        usual = Settings()
        directories = (usual.cdi_dir, usual.labels_dir, dirname(usual.metrics_file))
        is_new = error.errno == errno.EROFS and dirname(path) in directories
        command = "systemctl restart tt-device-plugin" if is_new else ""
        text = f"{path} cannot be written: {error.strerror}"
        self.problems[path] = Problem("files", text, command)


class SavedState(NamedTuple):
    """What a daemon leaves to the next one of the same boot."""

    chips: Mapping[str, Chip] = {}  # by address
    holds: SavedHolds = SavedHolds()


class StateFile:
    """The state that survives a restart of the daemon within the same boot.

    It is root's own and taken as it is. If it does not fit, it is discarded as a whole.
    """

    FORMAT = 7
    MAX_BYTES = 16 << 20

    def __init__(self, settings: Settings) -> None:
        self.problem: Problem | None = None
        self._boot = read_text(f"{settings.proc}/sys/kernel/random/boot_id")
        self._path = f"{settings.state_dir}/state.json" if settings.state_dir else None
        self._written = ""

    def load(self) -> SavedState:
        """Return the saved state."""
        if not self._path or not self._boot:
            return SavedState()
        try:
            document = json.loads(read_others_file(self._path, self.MAX_BYTES))
            if document["format"] != self.FORMAT:
                raise ValueError(f"format {document['format']}, not {self.FORMAT}")
            if document["boot"] != self._boot:
                return SavedState()
            chips = {each: saved_chip(each, saved) for each, saved in document["chips"].items()}
            return SavedState(chips, saved_holds(document["holds"]))
        except FileNotFoundError:
            return SavedState()
        except (OSError, *OTHER_FORM) as error:
            log.warning("%s is discarded: %s: %s", self._path, type(error).__name__, error)
            return SavedState()

    def save(self, chips: Json, holds: Json) -> None:
        """Write the file if its content has changed; see SavedState and to_saved()."""
        if not self._path or not self._boot:
            return
        document = {"format": self.FORMAT, "boot": self._boot, "chips": chips, "holds": holds}
        text = json.dumps(document)
        try:
            if text != self._written:
                replace_file(self._path, text, 0o600)
            self._written, self.problem = text, None
        except OSError as error:
            problem = Problem("files", f"{self._path} cannot be written: {error.strerror}")
            if self.problem is None:
                log.warning("%s", problem)
            self.problem = problem


# ==== SYSTEMD: readiness, status, watchdog, logs ==================================================

STATUS_MAX = 4000  # bytes; systemd ignores a message of more than 4096 (manager.c)
NOTIFY_TIMEOUT = 0.1  # seconds that a manager whose queue is full may delay the loop


class ServiceManager:
    """Notifies systemd (sd_notify(3))."""

    def __init__(self, environ: Environment) -> None:
        self.status = ""  # that systemd has
        self._environ = environ
        self._socket = sdnotify.SystemdNotifier().socket  # None without a manager
        if self._socket:
            self._socket.settimeout(NOTIFY_TIMEOUT)
        # Half of the time-out, as sd_watchdog_enabled(3) recommends.
        timeout = to_integer(environ.get("WATCHDOG_USEC"))
        self.feed_interval = timeout / 2e6 if timeout else inf  # seconds

    def notify(self, *states: str) -> bool:
        """Send a message; return whether the manager has it, if there is one."""
        if self._socket is None:
            return True
        with suppress(OSError):  # it hangs, or has gone
            self._socket.send("\n".join(states).encode())
            return True
        return False

    def show(self, status: str) -> None:
        """Set the status that `systemctl status` shows, if it has changed."""
        status = status.encode()[:STATUS_MAX].decode(errors="ignore")
        if status != self.status and self.notify(f"STATUS={status}"):
            self.status = status

    def feed_watchdog(self) -> None:
        """Notify that the loop works, if the unit has WatchdogSec=."""
        if self.feed_interval < inf:
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
KUBELET_SOCKET = "kubelet.sock"  # in the kubelet's directory; each kubelet creates a new one
SOCKET_PREFIX = "tt-"  # of the daemon's sockets in that directory

# inotify(7): events of a directory's entries, then of the directory itself.
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_MOVE_SELF = 0x800
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

    # Not IN_DELETE_SELF: it does not come while the directory is open, for the lock.
    EVENTS = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | IN_MOVE_SELF

    def __init__(self, path: str, wake: Wake) -> None:
        self.path = path
        self.missing: Problem | None = None  # why it does not exist yet
        self.is_watched = False
        self._wake = wake
        self._has_changed = False  # since the last take_changes()
        self._locked: int | None = None  # descriptor of the directory
        self._inotify: int | None = None  # descriptor

    def close(self) -> None:
        for descriptor in (self._inotify, self._locked):
            if descriptor is not None:
                asyncio.get_running_loop().remove_reader(descriptor)
                os.close(descriptor)

    def check(self) -> None:
        """Create, lock and watch the directory, or see that it is the same; raises DirectoryError.

        It waits for the directory around it, the kubelet's own, which can be a link (MicroK8s).
        """
        parent = dirname(self.path)
        if self._locked is None and not isdir(parent):
            text = f"no kubelet is installed ({parent} does not exist)"
            self.missing = Problem("kubelet", text)
            return

        self.missing = None
        try:
            if self._locked is None:
                self._create_and_lock()
            elif not os.path.samestat(os.fstat(self._locked), os.stat(self.path)):
                # A new one is read-only in this service's mount namespace.
                raise OSError(errno.ESTALE, "it was replaced")
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it is not writable")
        except OSError as error:
            reason = f"{self.path} cannot be used: {error.strerror or error}; exiting"
            raise DirectoryError(EXIT_DIRECTORY_UNUSABLE, reason) from None

        if not self.is_watched:
            self._watch()

    def _create_and_lock(self) -> None:
        """Create the directory if it is missing, and lock it; raises OSError, DirectoryError.

        A lock ends with its descriptor, so with this process at the latest (flock(2)).
        """
        with suppress(FileExistsError):
            os.mkdir(self.path)
            os.chmod(self.path, 0o750)  # despite the umask

        self._locked = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = f"{self.path} is in use by another tt-device-plugin; exiting"
            raise DirectoryError(EXIT_ALREADY_RUNNING, reason) from None

    def _watch(self) -> None:
        """Watch the directory; while that fails, the loop polls, and tries again each time.

        There are few instances and watches for each user, and others can use them up.
        """
        if self._inotify is None:
            descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if descriptor >= 0:
                self._inotify = descriptor
                asyncio.get_running_loop().add_reader(descriptor, self._read, descriptor)

        if self._inotify is not None:
            path = os.fsencode(self.path)
            self.is_watched = _libc.inotify_add_watch(self._inotify, path, self.EVENTS) >= 0

    def take_changes(self) -> bool:
        """Return whether files of others have come or gone since the last call, or may have."""
        has_changed, self._has_changed = self._has_changed, False
        return has_changed or not self.is_watched

    def _read(self, inotify: int) -> None:
        """Note the events that wait, and wake the loop for those that need a turn.

        file                     needs a turn             is a change
        ------------------------------------------------------------------
        ".NUMBER"                no: it will be renamed   no
        the checkpoint           yes                      no
        the daemon's sockets     unless it is new         no
        others, the directory    yes                      yes
        """
        events = os.read(inotify, 65536)
        needs_turn = False
        while events:
            _, mask, _, length = INOTIFY_EVENT.unpack_from(events)
            end = INOTIFY_EVENT.size + length
            name = os.fsdecode(events[INOTIFY_EVENT.size : end].rstrip(b"\0"))
            events = events[end:]

            is_own = name.startswith(SOCKET_PREFIX)
            needs_turn |= not name.startswith(".") and not (is_own and mask & IN_CREATE)
            self._has_changed |= not name.startswith(".") and not is_own and name != CHECKPOINT
        if needs_turn:
            self._wake()


# ==== HOST: what loop and calls share =============================================================


class Host:
    """The one owner of settings, inventory and holds."""

    def __init__(self, settings: Settings, wake: Wake) -> None:
        """Begin with the state that the last daemon has saved, if it is of this boot."""
        self.settings = settings
        self.state_file = StateFile(settings)
        saved = self.state_file.load()
        self.inventory = Inventory(saved.chips)
        self.holds = HoldBook(settings, saved.holds)
        self.names: Mapping[str, str] = {}  # of pods, see pod_names()
        self.directories = Directories()
        self.files = OutputFiles()
        self.readers = Readers(wake)

        self.rejected: str | None = None  # why the configuration on disk is not in force
        self.unreadable: Problem | None = None  # the last turn could not observe, or not apply
        self.no_kubelet: Problem | None = None  # there is no directory of a kubelet
        self._looked_at = -inf  # when pods' cgroups were last looked at

    def scan(self, *, is_poll: bool) -> None:
        """Look for chips, and have each read; raises OSError."""
        self.inventory.scan(self.settings)
        self.readers.submit(self.settings, self.inventory.present, is_poll=is_poll)

    def take_readings(self, now: float) -> None:
        """Record readings of chips, and which take too long; raises OSError."""
        self.inventory.apply(self.readers.collect(), self.settings.health)
        self.inventory.block(self.readers.blocked(now))

    def refresh_holds(self, *, max_age: float = inf) -> None:
        """Read the checkpoint if it has changed; look at pods' cgroups then, or after `max_age`.

        Raises OSError.
        """
        now = monotonic()
        if self.holds.refresh(now, look=now - self._looked_at >= max_age):
            self._looked_at = now
            self.names = pod_names(self.settings)

    def decide(self) -> Decision:
        """Return the desired state."""
        inventory = self.inventory
        holds = self.holds.current(monotonic())
        return decide(
            self.settings,
            inventory.chips,
            holds,
            self.names,
            inventory.driver,
            inventory.unsupported,
        )

    def problems(self, decision: Decision) -> list[Problem]:
        """Return all that is known not to be right."""
        found = problems_of(decision)
        for resource in decision.resources.values():
            if is_anothers(resource, self.holds.registered):
                text = "another device plugin has registered this resource; stop that plugin"
                found.append(Problem(resource.name, text, level="FAIL"))

        if self.holds.problem:
            text = f"{self.holds.problem}; the kubelet writes it again when the next pod starts"
            found.append(Problem("kubelet", text))
        if self.holds.has_no_processes(monotonic()):
            text = (
                "no pod has a process in its cgroup, so devices of a pod that is deleted by force "
                "are not protected; give kubelet and container runtime the same cgroup driver"
            )
            found.append(Problem("kubelet", text))

        found += self.files.problems.values()
        found += self.directories.problems.values()
        others = [self.directories.unremoved, self.state_file.problem, self.no_kubelet]
        return found + [problem for problem in [*others, self.unreadable] if problem]

    def put_directories_in_order(self) -> None:
        """Begin to remove the directories that nothing names, and make the missing ones."""
        named = self.named_directories()
        if self.holds.has_read:  # else the holds may not be all that there are
            self.directories.remove_unnamed(named, self.settings)
        self.directories.make_missing(named, self.settings)

    def named_directories(self) -> set[str]:
        """Return the directories that must exist now."""
        now = monotonic()
        holds = [*self.holds.current(now), *self.holds.unwritten(now)]
        return set(chain(*(hold.directories for hold in holds)))

    def save_state(self) -> None:
        """Save what the next daemon of this boot cannot read again."""
        self.state_file.save(self.inventory.to_saved(), self.holds.to_saved())


# ==== REQUESTS: observe, decide, answer ===========================================================

LINK_TIMEOUT = 1.0  # seconds that udev has to make a chip's link
LINK_INTERVAL = 0.02
START_TIMEOUT = 25.0  # seconds; the kubelet waits 30 for PreStartContainer
START_INTERVAL = 0.1  # seconds between looks at pods while a container's start waits
REMOVED_WITHIN = 1.0  # seconds that a start waits for the pages of former pods


class Allocator:
    """Answers the kubelet's requests for devices, and delays containers on chips in use."""

    def __init__(self, host: Host) -> None:
        self.counts = Counts()
        self.host = host

    def _decide(self) -> Decision:
        """Observe, and return the decision for a call at this moment; raises OSError."""
        self.host.refresh_holds(max_age=0.0)
        return self.host.decide()

    async def allocate(self, name: str, containers: Containers) -> list[Edits]:
        """Return the edits for containers with these IDs; raises RequestError, OSError."""
        result = "refused"
        try:
            resource, links = await self._find_links(name, containers)
            answers = [self._answer(resource, ids, links) for ids in containers]
            result = "granted"
            return answers
        finally:
            self.counts[name, result] += 1

    async def _find_links(
        self, name: str, containers: Containers
    ) -> tuple[Resource, dict[str, str]]:
        """Check a request; return its resource and udev's links, by address of the chip.

        The kubelet keeps the answer for the pod's life, so it is worth waiting for a link, which
        udev makes a little later than the device file; in a container (LXC) no udev runs. Anything
        can change meanwhile, also the settings: all is checked again. Raises RequestError, OSError.
        """
        deadline = monotonic() + LINK_TIMEOUT
        while True:
            settings = self.host.settings
            resource = self._decide().resource(name)
            check_request(resource, containers)
            chips = resource.chips(chain(*containers))
            for chip in chips:
                # Looked at now: a uevent about the file may still be on the way.
                if fault := file_fault_now(chip.function):
                    reason = f"device {chip.address}: device file is invalid: {fault}"
                    raise RequestError(Status.FAILED_PRECONDITION, reason)

            if settings.device_list_strategy == "cdi":
                path = f"{settings.cdi_dir}/{CDI_FILE}"
                if problem := self.host.files.problems.get(path):
                    raise RequestError(Status.UNAVAILABLE, problem.text)
                return resource, {}

            links = {chip.address: link_path(settings, chip.function) for chip in chips}
            udev_runs = exists(settings.udev_control)
            if all(links.values()) or not udev_runs or monotonic() >= deadline:
                return resource, {address: link for address, link in links.items() if link}
            await asyncio.sleep(LINK_INTERVAL)

    def _answer(self, resource: Resource, ids: Sequence[str], links: Mapping[str, str]) -> Edits:
        """Return the edits for one container, with its directories; raises OSError."""
        host, settings = self.host, self.host.settings
        chips = resource.chips(ids)
        wanted = frozenset(ids)
        token = f"{chips[0].address}-{os.urandom(8).hex()}"  # which no other answer ever had

        mounts: list[Mount] = []
        if settings.has_private_hugepages:
            # Another container of the pod, or of the shared device, can have one already.
            name = host.holds.hugepages_for(resource.name, wanted, monotonic()) or token
            mounts += settings.mounts
            mounts += host.directories.make_for_hugepages(name, settings)
        elif settings.device_list_strategy != "cdi":  # else they are in the CDI file
            mounts += host_mounts(settings)

        if resource.replicas and settings.sharing.lock_dir:
            path = f"{settings.sharing.lock_dir}/{OWN_DIRECTORY}/{resource.short_name}"
            make_directory(path, LOCKS_MODE)
            mounts.append(Mount(path, SHM))

        # The hold is read from the answer, as it will be from the kubelet's checkpoint.
        edits = container_edits(chips, links, settings, mounts, token)
        host.holds.add(hold_of(edits, resource.name, wanted), monotonic())
        return edits

    def prefer(
        self, name: str, question: pb.ContainerPreferredAllocationRequest, listed: Ids
    ) -> list[str]:
        """Return the best IDs of a resource; raises RequestError, OSError.

        `listed`: all IDs that the kubelet may have been sent.
        """
        resource = self._decide().resource(name)
        forgotten: set[str] = set()
        if chips := self.host.holds.forgotten_chips(monotonic()):
            for device in resource.unique_devices:
                if not chips.isdisjoint(device.addresses):
                    forgotten.update(device.ids)

        # An ID that has gone with its hold can be in the list that the kubelet still has.
        gone = listed.difference(resource.devices)
        return preferred_allocation(
            resource,
            frozenset(question.available_deviceIDs) - gone,
            question.must_include_deviceIDs,
            question.allocation_size,
            forgotten,
        )

    async def wait_until_free(self, name: str, ids: Collection[str]) -> None:
        """Wait until a container may start with these IDs; raises RequestError, OSError.

        The kubelet gives the device of a pod that was deleted by force to the next pod while the
        first one still runs. It repeats a call that fails.
        """
        host, holds = self.host, self.host.holds
        call = Call(name, frozenset(ids), monotonic())
        max_age = 0.0
        logged = ""
        while True:
            host.refresh_holds(max_age=max_age)
            blockers = holds.blockers(call, monotonic())
            if blockers == []:
                break

            reason = _why_waiting(call, blockers, host.names)
            if monotonic() - call.came_at > START_TIMEOUT:
                raise RequestError(Status.UNAVAILABLE, reason)
            if reason != logged:
                log.info("%s: container start waits: %s", name, reason)
                logged = reason
            await asyncio.sleep(START_INTERVAL)
            max_age = START_INTERVAL  # starts that wait at the same time share their looks

        # Since the last look nothing was awaited, so that no other start was allowed.
        holds.allow(call, monotonic())
        host.save_state()

        # The container finds the node's pages free, and its own directories there.
        host.put_directories_in_order()
        await host.directories.removed(REMOVED_WITHIN)
        host.directories.make_missing(host.named_directories(), host.settings)


def _why_waiting(call: Call, blockers: Sequence[Hold] | None, names: Mapping[str, str]) -> str:
    """Return why a start waits for the pods of these holds; see HoldBook.blockers()."""
    if blockers is None:
        return "the kubelet has not written its checkpoint yet"

    pods = dict.fromkeys(hold.pod for hold in blockers)  # each once, in this order
    if call.callers.isdisjoint(pods):
        others = ", ".join(name_of_pod(pod, names) for pod in pods)
        return f"{others} must end first; it still has the device"

    # kubernetes #137534: one of the callers runs already, as its start was allowed first.
    both = [*pods, *sorted(call.callers.difference(pods))]
    named = " and ".join(name_of_pod(pod, names) for pod in both)
    ids = ", ".join(sorted(call.ids))
    return f"the kubelet has given {ids} to {named}; delete one of these pods"


# ==== REGISTRATION: device list, socket, Register (device plugin API v1beta1) =====================
#
# What depends on the kubelet's version:
#
#     up to 1.36   the end of any stream of a resource ends its newest registration (manager.go,
#                  PluginDisconnected): the old stream must have ended before the next Register
#     1.37         rejects an endpoint to which it has a connection (plugin/v1beta1/server.go): each
#                  registration has a socket with a new name
#     all          a gRPC server that stops unlinks the path of its socket: another reason for a new
#                  name. A kubelet that starts deletes all sockets, then creates its own

REGISTER_TIMEOUT = 10.0  # seconds
STREAM_DELAY = 0.05  # seconds until a kubelet has noticed the end of a stream
# Seconds: the first pause after a failure, and the longest. A kubelet can be interrupted before it
# listens on its new socket, and it decides on its pods about 50 ms later.
BACKOFF = (0.01, 5.0)
LAST_GRACE = 0.1  # seconds that calls have at the daemon's end
STOP_TIMEOUT = 0.3  # seconds; mostly a server stops within milliseconds
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # else channels share the back-off from a dead socket
)
# Connections without a handshake are closed after this time, and not after two minutes.
SERVER_OPTIONS = (("grpc.server_handshake_timeout_ms", 5000),)
PLUGIN_OPTIONS = pb.DevicePluginOptions(
    pre_start_required=True, get_preferred_allocation_available=True
)
REGISTERED = "registered with kubelet"
CLOSED = "its socket is closed"
Context = grpc.aio.ServicerContext[Any, Any]
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


def why_not_listening(path: str) -> str | None:
    """Return why no kubelet listens on its socket, None if one does; raises OSError.

    To register in vain would cost a hundred times as much.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        number = probe.connect_ex(path)
    if number == errno.ENOENT:
        return f"{path} does not exist"
    return CLOSED if number == errno.ECONNREFUSED else None


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


async def stop(server: grpc.aio.Server, grace: float | None) -> None:
    """Stop a server, which ends its calls and removes its socket at once.

    It then waits for its connections to close. That of a process that is stopped (SIGSTOP) and has
    much to read does not, so from STOP_TIMEOUT on nothing waits for it.
    """
    stopping = asyncio.ensure_future(server.stop(grace))
    await asyncio.wait({stopping}, timeout=STOP_TIMEOUT)


def grpc_message(error: grpc.aio.AioRpcError) -> str:
    """Return an error's message in one line; without a message, the name of its status code."""
    text = error.details() or error.code().name
    return printable(" ".join(text.split()))


class AdvertisedList:
    """The device list of a resource, as each open ListAndWatch stream gets it."""

    def __init__(self) -> None:
        self.message = pb.ListAndWatchResponse()
        self.ids: Ids = frozenset()  # that were ever in it
        self._entries: Sequence[tuple[str, bool, tuple[int, ...]]] = ()
        self._outdated = asyncio.Event()  # of this message, for the streams that have sent it

    def update(self, resource: Resource) -> None:
        """Send the list to all streams, unless it is the same as before."""
        entries = resource.list_entries
        if entries == self._entries:
            return

        self._entries = entries
        self.message = pb.ListAndWatchResponse()
        for device_id, is_healthy, numa_nodes in entries:
            nodes = [pb.NUMANode(ID=node) for node in numa_nodes]
            self.message.devices.add(
                ID=device_id,
                health="Healthy" if is_healthy else "Unhealthy",
                topology=pb.TopologyInfo(nodes=nodes) if nodes else None,
            )
        self.ids = self.ids.union(resource.devices)
        self._outdated.set()
        self._outdated = asyncio.Event()

    async def messages(self) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Yield the list, and each changed one."""
        while True:
            outdated = self._outdated
            yield self.message
            await outdated.wait()


class Ended(NamedTuple):
    """How an attempt to register has ended."""

    text: str
    is_failure: bool = True
    was_registered: bool = False


class Endpoint(rpc.DevicePluginServicer):
    """The socket of one registration, and the calls on it."""

    def __init__(
        self, resource: str, directory: str, devices: AdvertisedList, allocator: Allocator
    ) -> None:
        """`directory`: the kubelet's."""
        self.has_stream = asyncio.Event()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._resource = resource
        self._directory = directory
        self._devices = devices
        self._allocator = allocator
        self._newest: object = None  # of the open streams

        self._path = f"{directory}/{new_socket_name(resource)}"
        self._own: FileStamp | None = None  # of this socket
        self._kubelet: FileStamp | None = None  # of the kubelet's, at Register
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        rpc.add_DevicePluginServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]

    async def open(self) -> None:
        """Serve on the socket; raises OSError, of gRPC without the reason, which it hides."""
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError:
            raise OSError(f"cannot create sockets in {self._directory}") from None
        await self._server.start()
        self._own = file_stamp(self._path)
        if self._own is None:  # a kubelet that starts deletes all sockets
            raise OSError("the plugin's socket was deleted at once")

    async def close(self, grace: float | None) -> None:
        """Remove the socket, and end all calls, after this time.

        Returns when the kubelet has noticed the end of its stream.
        """
        was_open = self._newest is not None
        await stop(self._server, grace)
        if was_open and grace is None:
            await asyncio.sleep(STREAM_DELAY)

    async def register(self) -> Ended | None:
        """Call Register with the name of the socket; return how that fails. Raises OSError.

        UNAVAILABLE is always gRPC's own: a kubelet that refuses answers UNKNOWN, as it returns
        plain errors (v1beta1/server.go).
        """
        request = pb.RegisterRequest(
            version="v1beta1",
            endpoint=basename(self._path),
            resource_name=self._resource,
            options=PLUGIN_OPTIONS,
        )
        kubelet = f"{self._directory}/{KUBELET_SOCKET}"
        self._kubelet = file_stamp(kubelet)
        async with grpc.aio.insecure_channel(f"unix:{kubelet}", CHANNEL_OPTIONS) as channel:
            stub = rpc.RegistrationStub(channel)  # type: ignore[no-untyped-call]
            try:
                await stub.Register(request, timeout=REGISTER_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                if error.code() == Status.DEADLINE_EXCEEDED:
                    return Ended(f"kubelet did not answer Register within {REGISTER_TIMEOUT:g} s")
                if error.code() == Status.UNAVAILABLE:  # it has just ended
                    return Ended(f"waiting for kubelet ({CLOSED})", is_failure=False)
                return Ended(f"kubelet rejected Register: {grpc_message(error)}")
        return None

    def look(self) -> None:
        """Look whether both sockets are those of Register, once it was called; raises OSError.

        While there is no kubelet.sock, an open stream keeps working.
        """
        kubelet = file_stamp(f"{self._directory}/{KUBELET_SOCKET}")
        if kubelet is None or self._kubelet is None:
            return
        if kubelet != self._kubelet:
            self.lose("the kubelet has restarted; registering again")
        elif file_stamp(self._path) != self._own:
            self.lose("the plugin's socket was deleted; registering again")

    def lose(self, reason: str) -> None:
        """Have the registration end. `reason`: empty if the session is closed."""
        if not self.lost.done():
            self.lost.set_result(reason)

    async def GetDevicePluginOptions(self, request: Any, context: Context) -> Any:
        """Return the options."""
        return PLUGIN_OPTIONS

    async def ListAndWatch(
        self, request: Any, context: Context
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        """Yield the device list, now and whenever it changes.

        gRPC does not tell who calls. The newest stream is taken for the kubelet's, so that of a
        debugging tool costs one more Register at its end.
        """
        self._newest = stream = object()
        self.has_stream.set()
        self._allocator.host.holds.note_stream(monotonic(), is_open=True)
        try:
            async for message in self._devices.messages():
                yield message
        finally:
            is_closed_here = self.lost.done() and not self.lost.result()
            self._allocator.host.holds.note_stream(
                monotonic(), is_open=False, is_closed_here=is_closed_here
            )
            if self._newest is stream:
                self._newest = None
                self.lose("kubelet closed the ListAndWatch stream; registering again")

    async def GetPreferredAllocation(self, request: Any, context: Context) -> Any:
        """Return the best choice of the available IDs for each container."""
        response = pb.PreferredAllocationResponse()
        async with self._rejecting(context, "rejected GetPreferredAllocation"):
            for question in request.container_requests:
                ids = self._allocator.prefer(self._resource, question, self._devices.ids)
                response.container_responses.add(deviceIDs=ids)
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
    """Keeps a resource registered with the kubelet, until it is closed. _run() is its life."""

    def __init__(self, name: str, allocator: Allocator, directory: str, wake: Wake) -> None:
        """Begin to register the resource of this name. `directory`: the kubelet's."""
        self.name = name
        self.registration = Registration()
        self._allocator = allocator
        self._directory = directory
        self._wake = wake

        self._devices = AdvertisedList()
        self._endpoint: Endpoint | None = None  # of the present attempt
        self._disturbed = asyncio.Event()  # something has changed since the last attempt began
        self._grace: float | None = None  # at the daemon's end, calls have some time
        self._is_closing = False
        self._task = asyncio.create_task(self._run())

    def update(self, resource: Resource, *, is_disturbed: bool) -> None:
        """Take a new list, and look at the sockets; raises OSError.

        `is_disturbed`: something has changed that can make the next attempt succeed.
        """
        self._devices.update(resource)
        if self._endpoint:
            self._endpoint.look()
        if is_disturbed:
            self._disturbed.set()

    async def close(self, grace: float | None = None) -> None:
        """End it. `grace`: seconds that calls have, as the daemon ends."""
        self._is_closing, self._grace = True, grace
        self._disturbed.set()
        if self._endpoint:
            self._endpoint.lose("")
        await self._task

    async def _run(self) -> None:
        """Register, serve until that ends, pause, and start over.

        The pauses double, until one ends early because something has changed. Losing a
        registration is not a failure: the next attempt follows at once.
        """
        pause = BACKOFF[0]
        while not self._is_closing:
            self._disturbed.clear()
            began = monotonic()
            ended = Ended("internal error; registering again")
            with log_and_continue(f"the session of {self.name}"):
                try:
                    ended = await self._attempt()
                except OSError as error:  # of the daemon itself, such as too many open files
                    ended = Ended(str(error))
            if self._is_closing:
                return
            level = logging.WARNING if ended.is_failure else logging.INFO
            self._report(Registration(ended.text, successes=self.registration.successes), level)

            has_held = ended.was_registered and monotonic() - began > BACKOFF[1]
            if has_held or await wait_for_event(self._disturbed, pause):
                pause = BACKOFF[0]
            else:
                pause = min(2 * pause, BACKOFF[1])

    async def _attempt(self) -> Ended:
        """Register with a kubelet and serve it; return how that has ended. Raises OSError."""
        if reason := why_not_listening(f"{self._directory}/{KUBELET_SOCKET}"):
            return Ended(f"waiting for kubelet ({reason})", is_failure=False)

        endpoint = Endpoint(self.name, self._directory, self._devices, self._allocator)
        self._endpoint = endpoint
        try:
            await endpoint.open()
            registering = asyncio.create_task(self._register(endpoint))
            ends: list[asyncio.Future[Any]] = [endpoint.lost, registering]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if registering.done() and (failure := registering.result()):
                return failure
            reason = await endpoint.lost
            registering.cancel()
            return Ended(reason, is_failure=False, was_registered=True)
        finally:
            self._endpoint = None
            await endpoint.close(self._grace)

    async def _register(self, endpoint: Endpoint) -> Ended | None:
        """Register an endpoint; return why that fails, None once the kubelet has a stream."""
        if failure := await endpoint.register():
            return failure
        successes = self.registration.successes + 1
        self._report(Registration(REGISTERED, is_registered=True, successes=successes))
        if await wait_for_event(endpoint.has_stream, REGISTER_TIMEOUT):
            return None
        return Ended("kubelet accepted Register but opened no ListAndWatch stream; retrying")

    def _report(self, registration: Registration, level: int = logging.INFO) -> None:
        """Set the state of the registration; log it and wake the loop if it is something new."""
        former = self.registration
        self.registration = registration._replace(has_tried=True)
        if self.registration != former:
            log.log(level, "%s: %s", self.name, registration.text)
            self._wake()


class KubeletSessions:
    """The sessions, one for each resource."""

    def __init__(self, allocator: Allocator, directory: str, wake: Wake) -> None:
        self.by_name: dict[str, KubeletSession] = {}
        self.allocator = allocator
        self._directory = directory
        self._wake = wake
        self._closing: dict[str, asyncio.Task[None]] = {}  # sessions of resources that have ended

    @property
    def registrations(self) -> Registrations:
        return {name: session.registration for name, session in self.by_name.items()}

    def update(self, resources: Resources, *, is_disturbed: bool) -> None:
        """Bring the sessions in line with these resources; raises OSError."""
        for name in self.by_name.keys() - resources.keys():
            log.info("%s: no devices left; no longer registered", name)
            self._closing[name] = asyncio.create_task(self._close(self.by_name.pop(name)))

        for name, resource in resources.items():
            if name in self._closing:  # it returns once its former session has ended completely
                continue
            if name not in self.by_name:
                session = KubeletSession(name, self.allocator, self._directory, self._wake)
                self.by_name[name] = session
            self.by_name[name].update(resource, is_disturbed=is_disturbed)

    async def _close(self, session: KubeletSession) -> None:
        await session.close()
        del self._closing[session.name]
        self._wake()

    async def close(self) -> None:
        """End all sessions: the daemon ends."""
        closing = [session.close(LAST_GRACE) for session in self.by_name.values()]
        await asyncio.gather(*closing, *self._closing.values())


# ==== CONNECTIONS: readers of the view and of metrics =============================================

STATUS_SOCKET = "status.sock"  # in the runtime directory
CONNECTION_TIMEOUT = 5.0  # seconds for all of a connection
HEAD_MAX = 8192  # bytes of an HTTP request
Responder = Callable[[StreamReader, StreamWriter], Coroutine[Any, Any, None]]


class Reporter:
    """Answers those who ask for the view or for metrics: functions of the present state."""

    def __init__(self, host: Host, sessions: KubeletSessions) -> None:
        self._host = host
        self._sessions = sessions
        self._started = time.time()
        self._servers: list[asyncio.Server] = []
        self._path: str | None = None  # of the status socket, once it is this daemon's

    async def open(self, metrics_sockets: Iterable[socket.socket]) -> None:
        """Serve metrics on these sockets, and the view on the status socket."""
        for listening in metrics_sockets:
            server = await asyncio.start_server(
                self._limited(self._send_metrics), sock=listening, limit=HEAD_MAX
            )
            self._servers.append(server)

        if directory := self._host.settings.runtime_dir:
            path = f"{directory}/{STATUS_SOCKET}"
            try:
                server = await asyncio.start_unix_server(self._limited(self._send_view), path)
                self._servers.append(server)
                self._path = path
                os.chmod(path, 0o600)
            except OSError as error:
                reason = f"{error.strerror or error}; list, check and fix cannot reach this daemon"
                log.warning("cannot open the status socket %s: %s", path, reason)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        if self._path:
            with suppress(OSError):
                os.unlink(self._path)

    def status(self, decision: Decision, problems: Iterable[Problem]) -> str:
        """Return the status line, with the node's problems."""
        of_node = ("", "unreadable")  # what is wrong with devices is in their summary
        texts = [str(problem) for problem in problems if problem.kind in of_node]
        if reason := self._host.rejected:
            texts.append(f"the configuration was rejected at the last reload: {reason}")
        return status_line(decision, self._sessions.registrations, texts)

    def metrics(self) -> str | None:
        """Return all metrics; None while the node cannot be read: figures would be old."""
        if self._host.unreadable:
            return None
        decision, counts = self._host.decide(), self._sessions.allocator.counts
        plugin = plugin_metrics(decision, self._sessions.registrations, counts, self._started)
        return chip_metrics(decision) + plugin

    def view(self) -> Json:
        """Return what `list`, `check` and `fix` read."""
        host = self._host
        decision = host.decide()
        problems = host.problems(decision)
        status = self.status(decision, problems)

        if exists(f"{host.settings.device_plugin_dir}/{KUBELET_SOCKET}"):
            for name, registration in self._sessions.registrations.items():
                if not registration.is_registered:
                    text = f"not registered: {registration.text}"
                    problems.append(Problem(name, text, level="FAIL"))
        return view_of_node(
            decision,
            self._sessions.registrations,
            problems,
            status=status,
            rejected=host.rejected,
            knows_pods=host.holds.has_read,
            booted_at=time.time() - seconds_since_boot(),
        )

    def _limited(self, answer: Responder) -> Responder:
        """Return a callback for a server, by which a slow client delays only itself."""

        async def answer_all(reader: StreamReader, writer: StreamWriter) -> None:
            await answer(reader, writer)
            writer.close()
            await writer.wait_closed()

        async def serve(reader: StreamReader, writer: StreamWriter) -> None:
            with log_and_continue("a report"), suppress(asyncio.TimeoutError, OSError):
                await asyncio.wait_for(answer_all(reader, writer), CONNECTION_TIMEOUT)
            writer.transport.abort()  # else a client that does not read keeps its descriptor

        return serve

    async def _send_view(self, reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(json.dumps(self.view()).encode())

    async def _send_metrics(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Read one request, and answer it; nothing to a client that sends none."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return

        status, text = "404 Not Found", "use GET /metrics\n"
        if re.match(rb"GET /metrics[ ?]", head):
            metrics = self.metrics()
            status, text = "200 OK", metrics or ""
            if metrics is None:
                status, text = "503 Service Unavailable", "the node's state cannot be read\n"

        lines = [
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; version=0.0.4; charset=utf-8",
            f"Content-Length: {len(text.encode())}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", text]).encode())


# ==== DAEMON: observe, decide, apply ==============================================================

START_TICK = 0.02  # seconds between turns before READY=1
RETRY_TICK = 1.0  # seconds between turns after an error, or without inotify
DEBOUNCE = 0.03  # seconds for which kernel events after the first one are gathered
BIND_TIMEOUT = 10.0  # seconds that the driver has for the cards
METRICS_INTERVAL = 15.0  # seconds between writings of the metrics file


class Stage(Enum):
    """How far the start of the daemon is."""

    SCANNING = 1  # not all chips have been read: nothing is applied
    BINDING = 2  # the driver may still be binding cards; devices are advertised already
    READY = 3


class Daemon:
    """The service. Events only wake the loop, which observes, decides and applies.

    At a poll it looks at everything that sends no event, and counts missing heartbeats.
    """

    def __init__(
        self, settings: Settings, load: Callable[[], Settings], manager: ServiceManager
    ) -> None:
        """`load`: reads the settings again, for a reload; raises ConfigError."""
        log.setLevel(settings.log_level.upper())
        self._wake = asyncio.Event()
        wake = self._wake.set
        self.host = Host(settings, wake)
        self.sessions = KubeletSessions(Allocator(self.host), settings.device_plugin_dir, wake)
        self.reporter = Reporter(self.host, self.sessions)
        self._directory = PluginDirectory(settings.device_plugin_dir, wake)
        self._uevents = UeventSocket(self._scan_soon)
        self._manager = manager
        self._load = load

        self._stage = Stage.SCANNING
        self._wants_reload = False
        self._must_publish = False  # files and directories, once the readings of a scan are there
        self._conditions: Mapping[str, Condition] = {}  # that the log has
        self._exit_status: int | None = None
        # When something is due, in seconds of the monotonic clock.
        self._due = {"poll": -inf, "scan": inf, "metrics": -inf, "watchdog": -inf}
        self._scanned_at = -inf
        self._binding_since = inf

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit status."""
        # Else gRPC ends its thread whenever no socket is open, and starts it with the next one.
        grpc.aio.init_grpc_aio()
        try:
            await self._open()
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
            self.reporter.close()
            await self.sessions.close()
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
        """Have the next turn scan; events that follow within DEBOUNCE are handled together."""
        self._due["scan"] = min(self._due["scan"], self._scanned_at + DEBOUNCE)
        self._wake.set()

    async def _open(self) -> None:
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
        await self.reporter.open(self._manager.sockets("metrics"))

    def _exit(self, status: int, reason: str) -> None:
        log.error("%s", reason)
        self.end(status)

    def _pause(self, now: float) -> float:
        """Return the seconds until the next turn, if no event comes before."""
        if self.host.unreadable:
            return RETRY_TICK
        if self._stage is not Stage.READY:
            return START_TICK
        due = [*self._due.values(), self.host.readers.due(now)]
        if not self._directory.is_watched:
            due.append(now + RETRY_TICK)
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
        try:
            self._directory.check()
            host.no_kubelet = self._directory.missing
            self._observe(now)
            if self._stage is Stage.SCANNING:
                if not host.readers.are_settled(now):
                    return
                self._stage, self._binding_since = Stage.BINDING, now
            host.inventory.date_faults()

            # No call is answered meanwhile, as nothing is awaited.
            decision = host.decide()
            is_disturbed = self._directory.take_changes()
            self.sessions.update(decision.resources, is_disturbed=is_disturbed)
            await asyncio.sleep(0)  # the kubelet gets a changed list before files are written
            self._publish(decision, now)

        except DirectoryError as error:
            self._exit(*error.args)
        except OSError as error:
            self._note_failure(error)
        else:
            # Only here, so that systemd restarts a daemon whose observations keep failing.
            if now >= self._due["watchdog"]:
                self._due["watchdog"] = now + self._manager.feed_interval
                self._manager.feed_watchdog()

    def _note_failure(self, error: OSError) -> None:
        """Report that the last state is old from now on, and have the next turn scan."""
        text = f"cannot read the node's state; keeping the last one: {error}"
        if self.host.unreadable is None:
            log.warning("%s", text)
            self._manager.show(f"{self._manager.status}; {text}".removeprefix("; "))
        self.host.unreadable = Problem("node", text, kind="unreadable", level="FAIL")
        self._due["scan"] = -inf

    def _observe(self, now: float) -> None:
        """Look at everything that may have changed; raises OSError."""
        host = self.host
        host.take_readings(now)

        is_poll = now >= self._due["poll"]
        if is_poll or now >= self._due["scan"]:
            self._due["scan"] = inf
            if is_poll:
                self._due["poll"] = now + host.settings.health.interval
            self._scanned_at = now
            self._must_publish = True
            host.scan(is_poll=is_poll)
        host.refresh_holds(max_age=0.0 if is_poll else inf)

    def _publish(self, decision: Decision, now: float) -> None:
        """Bring in line what others read: files, log and status."""
        host = self.host
        # The readings that an event has caused can change the devices once more.
        if self._must_publish and host.readers.are_settled(now):
            self._must_publish = False
            host.put_directories_in_order()
            self._write_files(decision)
            host.save_state()
        if now >= self._due["metrics"]:
            self._due["metrics"] = now + METRICS_INTERVAL
            self._write_metrics()

        if host.unreadable:  # no longer, as all of the above could be done
            log.info("the node's state can be read again")
            host.unreadable = None

        problems = host.problems(decision)
        waiting = None if self._stage is Stage.READY else self._get_ready(decision, now)
        if self._stage is Stage.READY:
            present = conditions(decision, problems)
            for level, line in changes(self._conditions, present):
                log.log(level, "%s", line)
            self._conditions = present
        self._manager.show(waiting or self.reporter.status(decision, problems))

    def _write_files(self, decision: Decision) -> None:
        """Write the files for others, unless they are as they should be."""
        settings, files = decision.settings, self.host.files
        if settings.cdi_dir:
            files.keep(f"{settings.cdi_dir}/{CDI_FILE}", cdi_file(decision))
        if settings.labels_dir:
            files.keep(f"{settings.labels_dir}/{LABELS_FILE}", labels_file(decision))

    def _write_metrics(self) -> None:
        """Write the metrics file, if its directory exists; else it is left to grow old."""
        path, metrics = self.host.settings.metrics_file, self.reporter.metrics()
        if path and metrics is not None:
            self.host.files.write(path, metrics)

    def _get_ready(self, decision: Decision, now: float) -> str | None:
        """Notify READY=1 once all is served. While it waits for the driver, return that status."""
        missing = _chips_to_list(decision)
        if missing and now - self._binding_since < BIND_TIMEOUT:
            return f"waiting for the driver to create a device file for {missing[0]}"

        version = decision.driver
        driver = f"driver {version or 'is not loaded'}"
        present = pluralize(len(self.host.inventory.present), "chip")
        is_unfit = version is None or not decision.resources
        if decision.settings.fail_on_init_error and is_unfit:
            none = "" if decision.resources else "; no device to offer"
            self._exit(1, f"exiting (fail_on_init_error): {driver}, {present}{none}")
            return None
        if not all(each.has_tried for each in self.sessions.registrations.values()):
            return None

        # `systemctl start` ends with READY=1, and shows the status that is there by then.
        self._manager.show(self.reporter.status(decision, self.host.problems(decision)))
        if self._manager.notify("READY=1"):  # else it is tried again
            self._stage = Stage.READY
            if missing:
                log.warning("%s: no device file; starting without it", ", ".join(missing))
            log.info("tt-device-plugin %s: %s, %s", __version__, driver, present)
        return None

    def _reload(self) -> None:
        """Take the new configuration, except for the keys that need a restart."""
        self._wants_reload = False
        host, before = self.host, self.host.settings
        try:
            loaded = self._load()
        except ConfigError as error:
            log.error("reload failed, keeping the old configuration: %s", error)
            host.rejected = str(error)
            return

        # Files and sockets below these directories were opened at the start.
        host.rejected = None
        for key in NEEDS_RESTART:
            value = getattr(before, key)
            if getattr(loaded, key) != value:
                log.warning("%s needs a restart to change; still using %s", key, value)
        kept = {key: getattr(before, key) for key in NEEDS_RESTART}
        host.settings = replace(loaded, **kept)
        log.setLevel(loaded.log_level.upper())
        log.info("configuration reloaded")

        for path in _output_files(before) - _output_files(host.settings):
            host.files.keep(path, None)
        self._due["poll"] = -inf  # by the new interval from now on


def _output_files(settings: Settings) -> set[str]:
    """Return the paths of the files for others."""
    found = {settings.metrics_file} if settings.metrics_file else set()
    if settings.cdi_dir:
        found.add(f"{settings.cdi_dir}/{CDI_FILE}")
    if settings.labels_dir:
        found.add(f"{settings.labels_dir}/{LABELS_FILE}")
    return found


def _chips_to_list(decision: Decision) -> list[str]:
    """Return the chips that the loaded driver can bind, but that are not listed yet.

    systemd starts the kubelet after READY=1. Pods whose devices are not listed then would be ended
    (UnexpectedAdmissionError).
    """
    missing = []
    for address, chip in decision.chips.items():
        function = chip.function
        if chip.is_listed or function.file_fault or address in decision.settings.exclude:
            continue
        is_free = function.driver in (None, DRIVER) and driver_override(function) in (None, DRIVER)
        if decision.driver and function.on_bus and is_free:
            missing.append(address)
    return missing


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
        self.level, self.problem, self.command = level, problem, command
        super().__init__(f"the service {with_command(problem, command)}")


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
        yield with_command(text, problem["command"])

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
        return f"{self.level:4}  {self.subject}: {with_command(self.problem, self.command)}"


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
        command = view.command if view.command == START else ""
    elif view.get("version") == __version__:
        command = "systemctl reload tt-device-plugin"
    else:  # this version's package is not configured yet
        command = "dpkg --configure -a"
    return Finding("FAIL", "configuration", f"{invalid}; correct it first", command)


def _service(view: View | NoView, invalid: str | None) -> Finding:
    if isinstance(view, NoView):
        if invalid and view.command == START:
            return Finding("FAIL", "service", "is not running, and cannot start: see configuration")
        return Finding(view.level, "service", view.problem, view.command)

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
    directory = view["settings"]["device_plugin_dir"]
    path = f"{directory}/{KUBELET_SOCKET}"
    if exists(path):
        yield Finding("ok", "kubelet", f"{path} exists")
    elif exists(dirname(directory)):  # else there is no kubelet, which is a problem of the view's
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
        return row_of(self.view, self.function.address)

    @property
    def kind(self) -> str:
        """Return the kind of the chip's fault, by the daemon; empty if it has none."""
        fault = faults_of(self.view).get(self.function.address)
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
    elif function.number is None:
        step = Step.REBIND
    elif function.file_fault and kind != "silent":
        step = Step.MAKE_FILE
    elif not kind:
        return End("no fault is left" if done else "nothing needs to be done", is_well=True)
    elif kind in ("hot", "tripped"):
        return End("nothing is done: only cooling helps; check the fans and the air flow")
    elif kind in ("gone", "no_driver", "node"):
        if Step.WAIT in done:
            text = "nothing is done: the service still reports a fault that sysfs does not show"
            return End(f"{text}; see its log")
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
    """Return the shell command that is a step; empty to wait."""
    if step is Step.WAIT:
        return ""
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
        target = f"/dev/{DRIVER}/{function.number}"
        return f"env -u TT_VISIBLE_DEVICES {quote(tt_smi)} -r {target} --no_reinit"

    # While driver_override names another driver, the kernel refuses to bind ours (ENODEV). An
    # unbind can fail because the driver has let go meanwhile: the bind follows in any case.
    parts = []
    if look.override not in (None, DRIVER):
        parts.append(f"echo > {quote(f'{function.directory}/driver_override')}")
    if step is Step.REBIND:
        parts.append(f"echo {function.address} > {quote(f'{driver}/unbind')}")
    return "; ".join([*parts, f"echo {function.address} > {quote(f'{driver}/bind')}"])


def plan_of(step: Step, look: Look, command: str = "") -> Plan:
    """Return a step with those whom it concerns."""
    row, others = look.row, others_hit(step, look)
    lines = []
    needs_answer = False
    if step is Step.RESET and row["board"] == "p300":
        if len(others) == 1:
            whose = "the other chip of its board, is reset, too"
            lines.append(f"{others[0]['bdf']}, {whose}; {use_of(others[0])}")
            needs_answer = has_unknown_users(others[0])
        else:
            lines.append("the other chip of its board, which is not known, is reset, too")
            needs_answer = True
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
                say("the chip or its users have changed since the question; nothing was done yet")
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
        number = before.function.number
        for bdf, function in self._scan().items():
            if function and function.number == number and bdf != self._bdf:
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
        place = "install it from PyPI, with a link in /usr/local/bin"
        raise Refusal(f"{needed} was not found in {directories}; {place}")

    command = [path, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=VERSION_TAKES)
    except subprocess.TimeoutExpired:
        raise Refusal(f"{path} --version does not answer") from None
    if done.returncode:  # for example, a library is missing
        error = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise Refusal(f"{path} --version fails: {error or f'status {done.returncode}'}")

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
