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
            return "" if "default:" in self.help else "none"
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


class Section(NamedTuple):
    """A table of the configuration file."""

    heading: str
    kind: type
    text: str  # for all its keys


TOP_OF_FILE = Section("", ttdp.Settings, "")
SECTIONS = (
    Section("[health]", ttdp.HealthSettings, "How the health of chips is determined."),
    Section(
        "[sharing]",
        ttdp.Sharing,
        "Several containers on one device: they take turns, without isolation. By default, no "
        "device is shared.",
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
        "One table for each host path that containers with a device get, in addition to their "
        "hugepages. One at /dev/hugepages-1G or /dev/hugepages replaces that directory.",
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
    """Return the table: a row for each flag, and one for each section of the file."""
    rows = [("--config-file", ttdp.DEFAULT_CONFIG_FILE, "configuration file; must exist if named")]
    rows += [(key.flag, key.shown_default, key.text) for key in top_keys()]
    rows += [(key.name, key.shown_default, f"{key.text} (only in the file)") for key in file_keys()]
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [
        f"| {quoted(flag)} | {quoted(default)} | {escaped(text)} |" for flag, default, text in rows
    ]
    for section in SECTIONS:
        keys = [*keys_of(section)]
        names = " ".join(quoted(key.name) for key in keys)
        defaults = ", ".join(quoted(key.shown_default) or "–" for key in keys)
        lines.append(f"| {quoted(section.heading)} {names} | {defaults} | {section.text} |")
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
    lines = [line for each in key.sentences for line in roff(each)]
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
