#!/usr/bin/env python3
"""Writes the options into the manuals, from the tables of keys and commands in ttdp.py.

    options.py            replaces the text between the marks in each file (`make generate`)
    options.py --check    prints the differences, and fails if there are any (`make lint`)

The files are README.md and, in packaging/deb, both man pages, the documented configuration and
bash's completion. The program must be importable: PYTHONPATH=.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

import ttdp

TOP = Path(__file__).resolve().parent.parent
PAGE = "tt-device-plugin.toml 5"

# Values in the documented configuration for keys without a default.
EXAMPLES: dict[str, Any] = {
    "temperature_limit": 90,
    "name": "n300",
    "replicas": 4,
    "rename": "n300-quarter",
    "host": "/srv/models",
    "container": "/models",
}


# What the values of each key mean, for the manual: when to choose which, and what depends on it.
EXPLANATIONS = {
    "device_plugin_dir": (
        "Only for tests on a simulated node: it is a constant of every kubelet, whatever the "
        "kubelet's root directory is. A change needs a restart."
    ),
    "root": "Only for tests on a simulated node. A change needs a restart.",
    "resource_domain": (
        "CDI devices and labels are always of tenstorrent.com. After a change, new pods must "
        "request the new names."
    ),
    "resource_naming": (
        "board groups all variants of a board: a request for p150 is met by a p150a, p150b or "
        "p150c. card separates them. arch groups all cards of an architecture, for programs "
        "that run on any of them. After a change, new pods must request the new names."
    ),
    "visible_devices": (
        "bdf: the PCI addresses of the container's chips, for tt-umd v0.9.3 and later. index: the "
        "numbers 0 to n-1, for programs that expect numbers; tt-umd v0.9.3 and later counts the "
        "container's devices. none: not set, for tt-umd before v0.9.3, which takes N for "
        "/dev/tenstorrent/N; it then uses all devices of the container."
    ),
    "unit": (
        "With board, the two chips of a p300 are one device, and so are the 8 chips of a Galaxy's "
        "tray. The names of these resources end in -board. Boards with one device file do not "
        "change. Only board guarantees whole boards under any Topology Manager policy."
    ),
    "device_list_strategy": (
        "With cdi, the kubelet passes on names of CDI devices, and the runtime reads device files "
        "and mounts from the CDI file, see CDI in tt-device-plugin(8). Choose it if pods have user "
        "namespaces (hostUsers: false) and device numbers can change. It needs cdi_dir, kubelet "
        "1.29 or later, and containerd 2.0 or later, containerd 1.7 with enable_cdi = true, or "
        "CRI-O."
    ),
    "cdi_dir": (
        'The file is written if the directory exists. With device_list_strategy = "cdi", drain the '
        "node before you change it."
    ),
    "labels_dir": "The file is written if the directory exists.",
    "metrics_file": (
        "The file is written if its directory exists. Set it to the empty text if you scrape "
        "the plugin's own port, as both outputs together raise each alert twice."
    ),
    "fail_on_init_error": (
        "By default the daemon waits for a driver and for cards. Set it if a node without them is "
        "a mistake that systemd should show."
    ),
    "log_level": "info has one line for each change. debug also has one for each allocation.",
    "hugepages": (
        "See HUGEPAGES in tt-device-plugin(8). With host, every container can open the pages of "
        "all others. Choose none if pods bring their own volumes, or need no hugepages."
    ),
    "exclude": (
        'Devices with these chips are not advertised; with unit = "board" that is the whole '
        "board. A pod that holds such a device keeps it until that pod ends. While no pod holds "
        "them, these chips have no faults and no alerts. They stay in the metrics, and in the CDI "
        "file under their addresses, but not in its device all."
    ),
    "interval": (
        "Each poll reads all telemetry of each chip. A shorter interval finds stopped firmware "
        "sooner."
    ),
    "temperature_limit": (
        "A chip at the limit is unhealthy, and gets no new pods, until it is 5 °C below the limit. "
        "A card throttles at its own limit in any case."
    ),
    "rename_by_default": (
        "With it, pods that want a device alone cannot get a shared one by mistake."
    ),
    "fail_requests_greater_than_one": (
        "Two replicas can be one device, so a request for two is probably a mistake. If false, "
        "the container gets each distinct device behind its replicas."
    ),
    "lock_dir": (
        "See SHARING in tt-device-plugin(8). Do not set it to /dev/shm, where logind deletes "
        "files. Change it only while no container uses a shared device: containers from before "
        "and after the change would not wait for each other."
    ),
    "name": "Use the name that kubectl describe node shows while it is not shared.",
    "rename": "Needed if only some devices are shared.",
}
README_KEYS = (
    "unit",
    "resource_naming",
    "visible_devices",
    "device_list_strategy",
    "hugepages",
    "exclude",
)
# Rules that need no sentence: the key's help is enough.
PLAIN = ("an absolute path", "an absolute path, or empty")
# The options of the program itself and of single commands, whose texts in --help are shorter.
SWITCHES = {
    "help": "Print an overview and exit.\nAfter a command: print the options of that command.",
    "version": "Print the version and exit.",
    "json": "With\n.Cm list :\nprint an array of objects, see\n.Sx JSON .",
    "quiet": "With\n.Cm check :\nprint only the lines that are not ok, and those with FAIL first.",
    "config_only": "With\n.Cm check :\ncheck only the configuration.",
    "yes": "With\n.Cm fix :\nanswer yes to the questions, except before a reset on a Galaxy, or of "
    "a p300\nif the users of its other chip are not known.",
}
# What holds for all keys of a table.
TABLES = {
    "[health]": "Settings for chip health checks.",
    "[sharing]": (
        "Settings for devices that several containers share. The containers take turns, and are "
        "not isolated from each other. By default, no device is shared."
    ),
    "[[sharing.resources]]": (
        "One table for each shared resource. If it selects only some devices, the others stay "
        "exclusive, and the shared ones need another name."
    ),
    "[[mounts]]": (
        "Each table mounts one host path into every container that has a device, in addition to "
        "its hugepages. A mount at /dev/hugepages-1G or /dev/hugepages replaces the hugepage "
        "directory there. Use each path in the container only once, and not /dev/shm if a device "
        "is shared."
    ),
}


class Entry(NamedTuple):
    """A key as a manual shows it."""

    name: str
    default: Any  # MISSING: the key is required
    key: ttdp.Key

    @property
    def has_flag(self) -> bool:
        return self.name in ttdp.OPTIONS

    @property
    def text(self) -> str:
        """Its meaning, with the valid choices."""
        help, choices = self.key.help, self.key.choices
        named = all(re.search(rf"\b{re.escape(each)}\b", help) for each in choices)
        return help if named else f"{help}: {self.key.valid}"

    @property
    def sentence(self) -> str:
        return f"{self.text[0].upper()}{self.text[1:]}."

    @property
    def sentences(self) -> list[str]:
        """Its meaning and its valid values."""
        evident = self.key.choices or self.key.is_switch or self.key.valid in PLAIN
        return [self.sentence] if evident else [self.sentence, f"Must be {self.key.valid}."]

    @property
    def shown_default(self) -> str:
        """The default as in the file, without quotation marks; "" if there is none to show."""
        if self.default in (MISSING, None):
            return ""
        return self.default if isinstance(self.default, str) else json.dumps(self.default)

    @property
    def metavar(self) -> str:
        """The kind of the value of a flag."""
        return self.name.rpartition("_")[2]


def entries_of(heading: str) -> list[Entry]:
    """Return the keys of a table of the configuration file; "" for those above all tables."""
    table = ttdp.TABLES[heading]
    keys = ttdp.keys_of(table)
    return [
        Entry(each.name, each.default, keys[each.name])
        for each in fields(table)
        if each.name in keys
    ]


def flag_entries() -> list[Entry]:
    """Return the keys that are also flags."""
    return [entry for entry in entries_of("") if entry.has_flag]


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


# -- README ----------------------------------------------------------------------------------------


def readme() -> str:
    """Return the table of the options that administrators change."""
    entries = {entry.name: entry for entry in entries_of("")}
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for name in README_KEYS:
        entry = entries[name]
        row = (quoted(name), quoted(entry.shown_default), escaped(entry.text))
        lines.append(f"| {' | '.join(row)} |")
    return "".join(f"{line}\n" for line in lines)


def quoted(text: str) -> str:
    return f"`{text}`" if text else ""


def escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


# -- The man pages, in mdoc(7) ---------------------------------------------------------------------


def switches() -> str:
    """Return the list of the options that set nothing, and of --config-file."""
    if missing := ttdp.SWITCHES.keys() - SWITCHES:
        sys.exit(f"add {', '.join(missing)} to SWITCHES in {__file__}")
    lines = [".Bl -tag -width Ds"]
    for name, text in SWITCHES.items():
        lines += [f".It Fl {ttdp.flag_of(name)[1:]}", text]
    lines += [".It Fl -config-file Ar file", "The configuration file, see", f".Xr {PAGE} ."]
    lines += ["The default file may be absent; a file named explicitly must exist."]
    lines += [".br", "Default:", f".Pa {ttdp.DEFAULT_CONFIG_FILE} ."]
    lines += [".br", "Environment:", f".Ev {ttdp.variable_of('config_file')} .", ".El"]
    return "".join(f"{line}\n" for line in lines)


def keys() -> str:
    """Return the lists of the keys of the configuration file, by table."""
    lines = []
    for heading in ttdp.TABLES:
        if heading:
            lines += [f".Ss {heading}\\&"]  # or the bracket would be a trailing delimiter
            lines += [line for each in sentences(TABLES[heading]) for line in roff(each)]
        lines += [".Bl -tag -width Ds"]
        for entry in entries_of(heading):
            lines += [f".It Li {entry.name}", *meaning(entry)]
        lines += [".El"]
    return "".join(f"{line}\n" for line in lines)


def meaning(entry: Entry) -> list[str]:
    """Return a key's meaning, valid values, default, flag and variable.

    Each sentence is on its own line.
    """
    explanation = sentences(EXPLANATIONS[entry.name]) if entry.name in EXPLANATIONS else []
    lines = [line for each in (*entry.sentences, *explanation) for line in roff(each)]
    if entry.default is None:
        lines += [".br", "Default: not set."]
    if entry.shown_default:
        macro = ".Pa" if entry.shown_default.startswith("/") else ".Li"
        own_line = [".br"] if len(entry.shown_default) > 45 else []  # troff cannot break a path
        lines += [".br", "Default:", *own_line, f"{macro} {entry.shown_default} ."]
    if entry.has_flag:
        flag, variable = ttdp.flag_of(entry.name), ttdp.variable_of(entry.name)
        lines += [".br", "Flag:", f".Fl {flag[1:]} ;", "environment:", f".Ev {variable} ."]
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
    blocks = []
    for heading in ttdp.TABLES:
        lines = [*map(documented, entries_of(heading))]
        if heading:
            lines = [f"{comment(TABLES[heading])}#{heading}\n{''.join(lines)}"]
        blocks += lines
    return "\n".join(blocks)


def documented(entry: Entry) -> str:
    """Return a key's lines: its meaning, and its default or an example."""
    has_default = entry.default not in (None, MISSING, "")
    if not has_default and entry.name not in EXAMPLES:
        sys.exit(f"add a value for {entry.name}, which has no default, to EXAMPLES in {__file__}")
    value = entry.default if has_default else EXAMPLES[entry.name]
    note = {None: "  # an example; not set by default", MISSING: "  # an example; must be set"}
    shown = note.get(entry.default, "")
    return f"{comment(' '.join(entry.sentences))}#{entry.name} = {json.dumps(value)}{shown}\n"


def comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ") + "\n"


# -- Completion ------------------------------------------------------------------------------------


def completion() -> str:
    """Return the flags of each command, and the kind of value of each flag."""
    lines = [f"    local commands='{' '.join(ttdp.COMMANDS)}'", "    local -A flags=("]
    for name, command in ttdp.COMMANDS.items():
        lines += [f"        [{name}]='--help"]
        lines += [f"            {ttdp.flag_of(option)}" for option in command.options]
        lines[-1] += "'"
    lines += ["    )", "    local -A values=(", "        [--config-file]='FILE'"]

    kinds = {"file": "FILE", "dir": "DIRECTORY", "root": "DIRECTORY"}
    for entry in flag_entries():
        kind = "SWITCH" if entry.key.is_switch else kinds.get(entry.metavar, "TEXT")
        value = " ".join(entry.key.choices) or kind
        lines += [f"        [{ttdp.flag_of(entry.name)}]='{value}'"]
    return "".join(f"{line}\n" for line in [*lines, "    )"])


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "options"): readme,
    ("packaging/deb/tt-device-plugin.8", "switches"): switches,
    ("packaging/deb/tt-device-plugin.toml.5", "keys"): keys,
    ("packaging/deb/config.toml", "options"): configuration,
    ("packaging/deb/completion.bash", "options"): completion,
}

if __name__ == "__main__":
    sys.exit(main())
