#!/usr/bin/env python3
"""Writes what manuals say of the options: from ttdp.Settings and the argument parser.

    options.py            writes it, between the marks in each of the files (`make generate`)
    options.py --check    says where a file has something else, and fails (`make lint`)

The files are README.md and, in packaging/deb, the manual page, the documented configuration and
bash's completion. The program has to be importable: PYTHONPATH=.
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
BEGIN, END = "options, made by: make generate", "end of the options"

# What stands in the documented configuration for a key that has no default.
EXAMPLES: dict[str, Any] = {
    "temperature_limit": "card",
    "name": "n300",
    "replicas": 4,
    "rename": "n300-quarter",
    "host": "/srv/models",
    "container": "/models",
}


# What a key may be where that goes without saying.
PLAIN = ("the path of a directory", "a path, or empty", "an absolute path")


class Key(NamedTuple):
    """A key of the configuration file, and its flag and variable where it has them."""

    section: str  # "[health]"; "" for those on top
    name: str
    default: Any  # MISSING: the key has to be there, or follows another one
    rule: ttdp.Rule
    help: str
    flag: str = ""
    variable: str = ""

    @property
    def text(self) -> str:
        """What it means, with the choices that there are."""
        choices = self.rule.choices
        named = all(re.search(rf"\b{re.escape(each)}\b", self.help) for each in choices)
        return self.help if named else f"{self.help}: {self.rule.valid}"

    @property
    def sentences(self) -> list[str]:
        """What it means, and what it may be."""
        said = [f"{self.text[0].upper()}{self.text[1:]}."]
        evident = self.rule.choices or isinstance(self.default, bool)
        if not evident and self.rule.valid not in PLAIN:
            said.append(f"It has to be {self.rule.valid}.")
        return said

    @property
    def shown_default(self) -> str:
        """As the file has it, but for the quotation marks; "" where there is none."""
        none = self.default is MISSING or (self.default is None and "default:" in self.help)
        if none or self.default is None:
            return "" if none else "none"
        return self.default if isinstance(self.default, str) else json.dumps(self.default)


class Section(NamedTuple):
    """A table of the configuration file."""

    heading: str
    kind: type
    text: str  # what is true of all its keys


SECTIONS = (
    Section("[health]", ttdp.HealthSettings, "When a chip counts as unhealthy."),
    Section(
        "[sharing]",
        ttdp.Sharing,
        "Several containers on one device: they take turns, and nothing keeps them apart. As "
        "installed, no device is shared.",
    ),
    Section(
        "[[sharing.resources]]",
        ttdp.SharedResource,
        "One such table for each resource that is shared. Devices that it does not select stay "
        "for one container each; then the shared ones need another name.",
    ),
    Section(
        "[[mounts]]",
        ttdp.Mount,
        "One such table for each path that containers on a device get. Without any these are "
        "/dev/hugepages-1G and /dev/hugepages; naming one replaces both.",
    ),
)


def main() -> int:
    """Do as the command line says."""
    parser = argparse.ArgumentParser(description="Writes what manuals say of the options.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if they differ")
    check = parser.parse_args().check
    differ = False
    for name, make in FILES.items():
        path = TOP / name
        before = path.read_text()
        after = with_part(before, make())
        if check and before != after:
            differ = True
            lines = (before.splitlines(True), after.splitlines(True))
            sys.stdout.writelines(difflib.unified_diff(*lines, name, f"{name}, generated"))
        elif before != after:
            path.write_text(after)
    if differ:
        print("what stands there of the options is not what ttdp.py says; run: make generate")
    return int(differ)


def with_part(text: str, part: str) -> str:
    """Return a file's text with this between the marks; each of them is on a line of its own."""
    pattern = rf"(?ms)^([^\n]*{BEGIN}[^\n]*\n).*?^([^\n]*{END}[^\n]*\n)"
    result, number = re.subn(pattern, lambda found: found[1] + part + found[2], text)
    if number != 1:
        raise ValueError(f"{number} places for the options where there has to be one")
    return result


def top_keys() -> Iterator[Key]:
    """Yield those that have a flag and a variable, too."""
    defaults = ttdp.Settings()
    for each in ttdp.OPTIONS:
        default = getattr(defaults, each.key)
        yield Key("", each.key, default, each.rule, each.help, each.flag, each.variable)


def keys_of(section: Section) -> Iterator[Key]:
    for each in fields(section.kind):
        if each.metadata:
            rule, text = each.metadata["rule"], each.metadata["help"]
            yield Key(section.heading, each.name, each.default, rule, text)


def metavar(key: Key) -> str:
    """Return what stands for a flag's value, as --help says."""
    return key.name.rpartition("_")[2]


# -- README ----------------------------------------------------------------------------------------


def readme() -> str:
    """Return its table: a row for each flag, and one for each section of the file."""
    file = "may be absent; one that is named has to exist"
    rows = [("--config-file", "TTDP_CONFIG_FILE", "", ttdp.DEFAULT_CONFIG_FILE, file)]
    for key in top_keys():
        rows.append((key.flag, key.variable, key.name, key.shown_default, key.text))
    lines = ["| flag | environment | key in the file | default | |", "|---|---|---|---|---|"]
    for *code, text in rows:
        lines.append(f"| {' | '.join([*map(quoted, code), escaped(text)])} |")
    for section in SECTIONS:
        keys = [*keys_of(section)]
        names = " ".join(quoted(key.name) for key in keys)
        defaults = ", ".join(quoted(key.shown_default) or "–" for key in keys)
        cells = ["", "", f"{quoted(section.heading)} {names}", defaults, section.text]
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def quoted(text: str) -> str:
    return f"`{text}`" if text else ""


def escaped(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;")


# -- The manual page, in mdoc(7) -------------------------------------------------------------------


def manual() -> str:
    """Return the list of flags, and that of what only the file can say."""
    lines = [".Bl -tag -width Ds"]
    lines += [".It Fl -config-file Ar file", "The configuration file.", "Default"]
    lines += [f".Pa {ttdp.DEFAULT_CONFIG_FILE} ,"]
    lines += ["which may be absent; a file that is named has to exist.", ".Ev TTDP_CONFIG_FILE"]
    for key in top_keys():
        value = f"Ar {metavar(key)}"
        if isinstance(key.default, bool):
            value = "Ns Op = Ns Ar bool"
        lines.append(f".It Fl {key.flag[1:]} {value}")
        lines += [*manual_text(key), f".Ev {key.variable}"]
    for action in ttdp.argument_parser()._actions:
        flag = action.option_strings[-1] if action.option_strings else ""
        if flag and action.nargs == 0:
            lines += [f".It Fl {flag[1:]}", roff(f"{str(action.help).capitalize()}.")]
    lines += [".El", ".Pp", "The file can say more:", ".Bl -tag -width Ds"]
    for section in SECTIONS:
        lines += [f".It Li {section.heading}", *map(roff, re.split(r"(?<=\.) ", section.text))]
        for key in keys_of(section):
            lines += [f".It Li {section.heading} {key.name}", *manual_text(key)]
    lines.append(".El")
    return "".join(f"{line}\n" for line in lines)


def manual_text(key: Key) -> list[str]:
    """Return what a key means, what it may be and its default, each sentence on its own line."""
    lines = [roff(each) for each in key.sentences]
    if key.shown_default:
        macro = ".Pa" if key.shown_default.startswith("/") else ".Li"
        lines += ["Default", f"{macro} {key.shown_default} ."]
    return lines


def roff(text: str) -> str:
    """Return a line of text with what roff would take for something else."""
    for each, name in {"\\": "\\e", "°": "\\(de", '"': "\\(dq", "'": "\\(aq"}.items():
        text = text.replace(each, name)
    return text


# -- The documented configuration ------------------------------------------------------------------


def configuration() -> str:
    """Return every key with its default, each line a comment."""
    blocks = [documented(key) for key in top_keys()]
    for section in SECTIONS:
        heading = f"{comment(section.text)}#{section.heading}\n"
        blocks.append(heading + "".join(map(documented, keys_of(section))))
    return "\n".join(blocks)


def documented(key: Key) -> str:
    """Return a key's lines."""
    has_default = key.default not in (None, MISSING)
    if not has_default and key.name not in EXAMPLES:
        sys.exit(f"{key.name} has no default: EXAMPLES in {__file__} needs a value for it")
    value = key.default if has_default else EXAMPLES[key.name]
    note = "  # an example; as installed there is none" if key.default is None else ""
    return f"{comment(' '.join(key.sentences))}#{key.name} = {json.dumps(value)}{note}\n"


def comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="# ") + "\n"


# -- Completion ------------------------------------------------------------------------------------


def completion() -> str:
    """Return the words that the function below them completes, and what each flag takes."""
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


FILES: dict[str, Callable[[], str]] = {
    "README.md": readme,
    "packaging/deb/tt-device-plugin.8": manual,
    "packaging/deb/config.toml": configuration,
    "packaging/deb/completion.bash": completion,
}

if __name__ == "__main__":
    sys.exit(main())
