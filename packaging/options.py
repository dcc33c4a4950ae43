#!/usr/bin/env python3
"""Writes the options into the manuals, from ttdp.Settings and the argument parser.

    options.py            replaces the text between the marks in each file (`make generate`)
    options.py --check    prints the differences, and fails if there are any (`make lint`)

The files are README.md and, in packaging/deb, the man page, the documented configuration and bash's
completion. The program must be importable: PYTHONPATH=.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import ttdp

TOP = Path(__file__).resolve().parent.parent

# Values in the documented configuration for keys without a default.
EXAMPLES: dict[str, Any] = {
    "temperature_limit": "card",
    "name": "n300",
    "replicas": 4,
    "rename": "n300-quarter",
    "host": "/srv/models",
    "container": "/models",
}


# What the values of each key mean, for the man page: when to choose which, and what depends on it.
EXPLANATIONS = {
    "device_plugin_dir": (
        "The daemon creates its sockets here, and the kubelet its own, kubelet.sock. Set it if "
        "the kubelet has another root directory than /var/lib/kubelet. The service's sandbox "
        "must allow it, see EXAMPLES. A change needs a restart."
    ),
    "sysfs_root": "Only for tests on a simulated node. A change needs a restart.",
    "dev_root": (
        "Only for tests on a simulated node. Inside containers, device files are always in "
        "/dev/tenstorrent. A change needs a restart."
    ),
    "proc_root": "Only for tests on a simulated node. A change needs a restart.",
    "resource_domain": (
        "It is also the vendor of the CDI devices and the prefix of the labels. After a change,"
        " new pods must request the new names; pods that run keep their devices."
    ),
    "resource_naming": (
        "board groups all variants of a board: a request for p150 is met by a p150a, p150b or "
        "p150c. card separates them. arch groups all cards of an architecture, for programs "
        "that run on any of them. After a change, new pods must request the new names."
    ),
    "visible_devices": (
        "bdf sets the variable to the PCI addresses of the container's chips, which tt-umd "
        "v0.9.3 and later understands. index sets it to the numbers 0 to n-1, which count the "
        "devices inside the container, for older versions. none leaves it to the image."
    ),
    "unit": (
        "chip: each device file is a device. board: the two chips of a p300 are one device, and"
        " so are the 8 chips of a Galaxy's tray; boards with one device file do not change. "
        "With board, whole boards are guaranteed under any Topology Manager policy, and the "
        "names of these resources end in -board."
    ),
    "device_list_strategy": (
        "device-specs: the kubelet passes device files and mounts on to the runtime. cdi: it "
        "passes on names of CDI devices, and the runtime reads the rest from the CDI file. "
        "Choose cdi if pods have user namespaces (hostUsers: false) and device numbers can "
        "change. It needs cdi_dir, kubelet 1.29 or later, and containerd 1.7 or later or CRI-O."
    ),
    "cdi_dir": "The file is written if the directory exists.",
    "labels_dir": "The file is written if the directory exists.",
    "metrics_file": (
        "The file is written if its directory exists. Set it to the empty text if you scrape "
        "the plugin's own port, as both outputs together raise each alert twice."
    ),
    "pod_resources_socket": (
        "Without it, pods are shown by their UIDs; nothing else depends on it."
    ),
    "fail_on_init_error": (
        "By default the daemon waits for a driver and for cards. Use this where a node without "
        "them is a mistake that systemd should show."
    ),
    "log_level": "info has one line for each change. debug also has one for each allocation.",
    "hugepages": (
        "private: each device has its own directories, see HUGEPAGES. host: every container "
        "has the host's directories, and can open the pages of all others. none: containers get"
        " no hugepage directory, for example because pods bring their own volumes."
    ),
    "exclude": (
        'Devices with these chips are not advertised; with unit = "board" that is the whole '
        "board. A pod that holds such a device keeps it until that pod ends. The chips stay in "
        "the metrics and in the CDI file, except in the CDI device all."
    ),
    "interval": (
        "Each poll reads all telemetry of each chip. A shorter interval finds stopped firmware "
        "sooner."
    ),
    "temperature_limit": (
        "A chip at the limit is unhealthy, and gets no new pods, until it is 5 °C below the "
        "limit. By default, a card that reaches its own limit throttles, which is one line of "
        "the log and not a fault."
    ),
    "heartbeat_misses": "The firmware changes its heartbeat every 0.1 seconds.",
    "trip_holdoff": "A further trip starts the time again.",
    "rename_by_default": (
        "With it, pods that want a device alone cannot get a shared one by mistake."
    ),
    "fail_requests_greater_than_one": (
        "Two replicas can be one device, so a request for two is probably a mistake. If false, "
        "the container gets each distinct device behind its replicas."
    ),
    "lock_dir": "See SHARING. Change it only while no container uses a shared device.",
    "name": "Use the name that kubectl describe node shows while it is not shared.",
    "rename": "Needed if only some devices are shared.",
    "devices": "A count shares the devices with the lowest addresses.",
}
README_KEYS = (
    "unit",
    "resource_naming",
    "visible_devices",
    "device_list_strategy",
    "hugepages",
    "exclude",
    "metrics_file",
    "device_plugin_dir",
)
# Rules that need no sentence: the key's help is enough.
PLAIN = ("the path of a directory", "a path, or empty", "an absolute path")
# The options of single commands, whose texts in --help are shorter.
COMMAND_OPTIONS = {
    "--help": "Print the help text and exit.",
    "--version": "Print the version and exit.",
    "--json": "With\n.Cm list :\nprint an array of objects, see\n.Sx JSON .",
    "--quiet": "With\n.Cm check :\nprint only the lines that are not ok.",
    "--config-only": "With\n.Cm check :\ncheck only the configuration.",
}


class Key(NamedTuple):
    """A key of the configuration file, with its flag and environment variable if it has them."""

    section: str  # "[health]"; "" for the keys above all sections
    name: str
    default: Any  # MISSING: the key is required, or its default is that of another key
    rule: ttdp.Rule
    help: str
    flag: str = ""
    variable: str = ""

    @property
    def text(self) -> str:
        """Its meaning, with the valid choices."""
        choices = self.rule.choices
        named = all(re.search(rf"\b{re.escape(each)}\b", self.help) for each in choices)
        return self.help if named else f"{self.help}: {self.rule.valid}"

    @property
    def sentences(self) -> list[str]:
        """Its meaning and its valid values."""
        found = [f"{self.text[0].upper()}{self.text[1:]}."]
        evident = self.rule.choices or isinstance(self.default, bool)
        if not evident and self.rule.valid not in PLAIN:
            found.append(f"Must be {self.rule.valid}.")
        return found

    @property
    def shown_default(self) -> str:
        """The default as in the file, without quotation marks; "" if there is none to show."""
        if self.default is MISSING:
            return ""
        if self.default is None:
            return ""
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


class Section(NamedTuple):
    """A table of the configuration file."""

    heading: str
    kind: type
    text: str  # for all its keys


TOP_OF_FILE = Section("", ttdp.Settings, "")
SECTIONS = (
    Section("[health]", ttdp.HealthSettings, "Settings for chip health checks."),
    Section(
        "[sharing]",
        ttdp.Sharing,
        "Settings for devices that several containers share. They take turns, without isolation. "
        "By default, no device is shared.",
    ),
    Section(
        "[[sharing.resources]]",
        ttdp.SharedResource,
        "One table for each shared resource. If it selects only some devices, the others stay "
        "exclusive, and the shared ones need another name.",
    ),
    Section(
        "[[mounts]]",
        ttdp.Mount,
        "Each table mounts one host path into every container that has a device, in addition to "
        "its hugepages. A mount at /dev/hugepages-1G or /dev/hugepages replaces the hugepage "
        "directory there. Use each path in the container only once, and not /dev/shm if a device "
        "is shared.",
    ),
)


def main() -> int:
    """Write the options, or check them."""
    parser = argparse.ArgumentParser(description="Writes the options into the manuals.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if they differ")
    check = parser.parse_args().check
    differ = False
    for (name, mark), make in PARTS.items():
        path = TOP / name
        before = path.read_text()
        after = with_part(before, mark, make())
        if check and before != after:
            differ = True
            lines = (before.splitlines(True), after.splitlines(True))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, generated"))
        elif before != after:
            path.write_text(after)
    if differ:
        print("run make generate: these options do not match ttdp.py")
    return int(differ)


def with_part(text: str, mark: str, part: str) -> str:
    """Return a file's text with this part between two lines that have its mark."""
    begin, end = f"{mark}, made by: make generate", f"end of the {mark}"
    pattern = rf"(?ms)^([^\n]*{begin}[^\n]*\n).*?^([^\n]*{end}[^\n]*\n)"
    result, number = re.subn(pattern, lambda found: found[1] + part + found[2], text)
    if number != 1:
        raise ValueError(f"expected one place for the {mark}, found {number}")
    return result


def top_keys() -> Iterator[Key]:
    """Yield the keys that also have a flag and an environment variable."""
    defaults = ttdp.Settings()
    for each in ttdp.OPTIONS:
        default = getattr(defaults, each.key)
        yield Key("", each.key, default, each.rule, each.help, each.flag, each.variable)


def file_keys() -> Iterator[Key]:
    """Yield the keys above all sections that only the file has."""
    flagged = {each.key for each in ttdp.OPTIONS}
    return (key for key in keys_of(TOP_OF_FILE) if key.name not in flagged)


def keys_of(section: Section) -> Iterator[Key]:
    """Yield the keys of a section."""
    for each in fields(section.kind):
        if "rule" in each.metadata:
            rule, text = each.metadata["rule"], each.metadata["help"]
            yield Key(section.heading, each.name, each.default, rule, text)


def metavar(key: Key) -> str:
    """Return the placeholder of a flag's value, unless it has choices."""
    return key.name.rpartition("_")[2]


# -- README ----------------------------------------------------------------------------------------


def readme() -> str:
    """Return the table of the options that operators change."""
    keys = {key.name: key for key in (*top_keys(), *file_keys())}
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name in README_KEYS:
        key = keys[name]
        row = (quoted(name), quoted(key.shown_default), escaped(key.text))
        lines.append(f"| {' | '.join(row)} |")
    return "".join(f"{line}\n" for line in lines)


def quoted(text: str) -> str:
    return f"`{text}`" if text else ""


def escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


# -- The man page, in mdoc(7) ----------------------------------------------------------------------


def manual() -> str:
    """Return the list of flags, the options of the commands first."""
    lines = [".Bl -tag -width Ds"]
    for action in ttdp.argument_parser()._actions:
        flag = action.option_strings[-1] if action.option_strings else ""
        if flag and action.nargs == 0:
            lines += [f".It Fl {flag[1:]}", COMMAND_OPTIONS[flag]]
    lines += [".It Fl -config-file Ar file", "The configuration file."]
    lines += ["The default file may be absent; a file named explicitly must exist."]
    lines += [".br", "Default:", f".Pa {ttdp.DEFAULT_CONFIG_FILE} ."]
    lines += environment("TTDP_CONFIG_FILE")
    for key in top_keys():
        value = f"Ar {metavar(key)}"
        if isinstance(key.default, bool):
            value = "Ns Op = Ns Ar bool"
        elif key.rule.choices:
            value = f"Cm {' | '.join(key.rule.choices)}"
        lines += [f".It Fl {key.flag[1:]} {value}", *manual_text(key), *environment(key.variable)]
    return "".join(f"{line}\n" for line in [*lines, ".El"])


def environment(variable: str) -> list[str]:
    return [".br", "Environment:", f".Ev {variable} ."]


def manual_keys() -> str:
    """Return the lists of the keys that only the configuration file has, by section."""
    lines = [".Bl -tag -width Ds"]
    for key in file_keys():
        lines += [f".It Li {key.name}", *manual_text(key)]
    lines += [".El"]
    for section in SECTIONS:
        lines += [f".Ss {section.heading}\\&"]  # or the bracket would be a trailing delimiter
        lines += [line for each in sentences(section.text) for line in roff(each)]
        lines += [".Bl -tag -width Ds"]
        for key in keys_of(section):
            lines += [f".It Li {key.name}", *manual_text(key)]
        lines += [".El"]
    return "".join(f"{line}\n" for line in lines)


def manual_text(key: Key) -> list[str]:
    """Return a key's meaning, valid values and default, each sentence on its own line."""
    explanation = sentences(EXPLANATIONS[key.name]) if key.name in EXPLANATIONS else []
    lines = [line for each in (*key.sentences, *explanation) for line in roff(each)]
    if key.default is None:
        lines += [".br", "Default: not set."]
    if key.shown_default:
        macro = ".Pa" if key.shown_default.startswith("/") else ".Li"
        own_line = [".br"] if len(key.shown_default) > 45 else []  # troff cannot break a path
        lines += [".br", "Default:", *own_line, f"{macro} {key.shown_default} ."]
    return lines


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=\.) ", text)


def roff(text: str) -> list[str]:
    """Return lines of text in which the characters that are special to roff are escaped."""
    for each, name in {"\\": "\\e", "°": "\\(de", '"': "\\(dq", "'": "\\(aq"}.items():
        text = text.replace(each, name)
    lines = textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False)
    return [f"\\&{each}" if each.startswith(".") else each for each in lines]


# -- The documented configuration ------------------------------------------------------------------


def configuration() -> str:
    """Return all keys with their defaults; each line is a comment."""
    blocks = [documented(key) for key in (*top_keys(), *file_keys())]
    for section in SECTIONS:
        heading = f"{comment(section.text)}#{section.heading}\n"
        blocks.append(heading + "".join(map(documented, keys_of(section))))
    return "\n".join(blocks)


def documented(key: Key) -> str:
    """Return a key's lines: its meaning, and its default or an example."""
    has_default = key.default not in (None, MISSING, "")
    if not has_default and key.name not in EXAMPLES:
        sys.exit(f"add a value for {key.name}, which has no default, to EXAMPLES in {__file__}")
    value = key.default if has_default else EXAMPLES[key.name]
    note = "  # an example; not set by default" if key.default in (None, "") else ""
    return f"{comment(' '.join(key.sentences))}#{key.name} = {json.dumps(value)}{note}\n"


def comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ") + "\n"


# -- Completion ------------------------------------------------------------------------------------


def completion() -> str:
    """Return the commands, the flags, and the kind of value of each flag."""
    actions = ttdp.argument_parser()._actions
    commands = next(each.choices for each in actions if not each.option_strings) or ()
    flags = [each.option_strings[-1] for each in actions if each.option_strings]
    kinds = {"file": "FILE", "socket": "FILE", "dir": "DIRECTORY", "root": "DIRECTORY"}
    values = {"--config-file": "FILE"}
    for key in top_keys():
        value = "SWITCH" if isinstance(key.default, bool) else kinds.get(metavar(key), "TEXT")
        values[key.flag] = " ".join(key.rule.choices) or value
    lines = [f"    local commands='{' '.join(commands)}'", f"    local flags='{flags[0]}"]
    lines += [f"        {each}" for each in flags[1:]]
    lines[-1] += "'"
    lines += ["    local -A values=("]
    lines += [f"        [{flag}]='{value}'" for flag, value in values.items()]
    return "".join(f"{line}\n" for line in [*lines, "    )"])


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "options"): readme,
    ("packaging/deb/tt-device-plugin.8", "options"): manual,
    ("packaging/deb/tt-device-plugin.8", "configuration keys"): manual_keys,
    ("packaging/deb/config.toml", "options"): configuration,
    ("packaging/deb/completion.bash", "options"): completion,
}

if __name__ == "__main__":
    sys.exit(main())
