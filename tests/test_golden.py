"""What commands print, as texts in tests/golden: a node, what happens, commands and their output.

`pytest tests/test_golden.py --update-golden` writes what they print now; the difference is to be
read like code. Outputs are indented; a status is there if it is not 0.

    # A chip that does not respond is a FAIL with the command that helps.
    add n150
    break 0000:01:00.0 die

    $ tt-device-plugin check --quiet
        FAIL  0000:01:00.0: chip does not respond …; run: tt-device-plugin fix 0000:01:00.0
        status 1

What else can happen: prepare(). "calls" shows what has reached the node so far. In outputs, ROOT is
the directory in which all is, and VERSION the program's. stderr follows stdout.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.commands import Commanded, commanded
from tests.world.processes import ROOT
from tests.world.service import problem

DIRECTORY = ROOT / "tests/golden"
NAMES = sorted(str(path.relative_to(DIRECTORY))[:-4] for path in DIRECTORY.rglob("*.txt"))


@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_that_of_the_case(
    name: str, short_tmp: Path, pytestconfig: pytest.Config
) -> None:
    """Word by word."""
    file = DIRECTORY / f"{name}.txt"
    expected = file.read_text()
    lines = [line for line in expected.splitlines() if line and not line.startswith("    ")]
    driver = next((line.split()[1] for line in lines if line.startswith("driver ")), "2.10")

    with commanded(short_tmp, driver=driver) as host:
        host.constants["LOOK_INTERVAL"] = 0.01
        host.environ |= {"TZ": "UTC", "USER": "operator"}
        text = "\n".join(play(host, lines)).replace(str(host.root), "ROOT")
    played = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    if pytestconfig.getoption("--update-golden"):
        file.write_text(played)
    else:
        assert played == expected


def play(host: Commanded, lines: list[str]) -> Iterator[str]:
    """Yield the lines of a case, with the outputs of now."""
    for line in lines:
        if line.startswith(("$ ", "calls")):
            yield f"\n{line}"
            for written in output(host, *shlex.split(line.removeprefix("$ "))):
                yield f"    {written}".rstrip()
            yield ""
        else:
            yield line
            if not line.startswith("#"):
                prepare(host, shlex.split(line))


def output(host: Commanded, program: str, *arguments: str) -> Iterator[str]:
    """Yield what a command prints, and its status."""
    if program == "calls":
        yield from host.controls.calls
    elif program == "config":
        yield from config(host.root / "config.toml", *arguments)
    else:
        answer = host.run(*(word.replace("ROOT", str(host.root)) for word in arguments))
        yield from (answer.out + answer.err).replace(ttdp.__version__, "VERSION").splitlines()
        if answer.status:
            yield f"status {answer.status}"


def config(file: Path, content: str, *words: str) -> Iterator[str]:
    """Yield what a configuration file means, beside flags and variables: "unit=board"."""
    file.write_text(content.replace("\\n", "\n"))
    given = dict(word.split("=", 1) for word in words)
    flags = {key: text for key, text in given.items() if key in ttdp.OPTIONS}
    try:
        settings = ttdp.load_settings({"config_file": str(file), **flags}, given)
    except ttdp.ConfigError as error:
        yield str(error).replace(str(file), "FILE")
        return

    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if value != getattr(ttdp.Settings(), each.name):
            yield f"{each.name} = {value!r}"


def prepare(host: Commanded, words: list[str]) -> None:
    """Let something happen to the node, to its daemon, or to the commands."""
    match words:
        case ["driver", _]:  # from the start
            pass
        case ["add", card, *options]:  # behind an IOMMU; options of SimulatedNode.add(): NAME=JSON
            given: dict[str, Any] = {}
            for name, text in (option.split("=", 1) for option in options):
                given[name] = text if ":" in text else json.loads(text)
            for chip in host.node.add(card, **given):
                host.node.set_iommu(chip.bdf)
        case ["break", bdf, operation, *more]:  # a method of the chip
            getattr(host.node.chip(bdf), operation)(*more)
        case ["attribute", bdf, name, text]:
            host.node.chip(bdf).write(name, f"{text}\n".encode())
        case ["node", operation, *more]:  # a method of the node
            getattr(host.node, operation)(*map(value_of, more))
        case ["file", path, *text]:  # below ROOT; those of sysfs and procfs cannot be written to
            file = host.root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            file.write_text("".join(text).replace("\\n", "\n"))
            file.chmod(0o755)
        case ["remove", path]:
            (host.root / path).unlink()
        case ["pod", name, *addresses]:
            host.admit(name, *addresses)
        case ["process", bdf, pid, command]:
            host.open(bdf, int(pid), command.encode().decode("unicode_escape"))
        case ["fault", bdf, kind]:
            host.service.faults[bdf] = kind
        case ["exclude", bdf]:
            host.service.excluded.add(bdf)
        case ["row", bdf, values]:  # of a chip, in the view
            host.service.rows.setdefault(bdf, {}).update(json.loads(values))
        case ["view", values]:
            host.service.more |= json.loads(values)
        case ["setting", values]:  # of the daemon
            host.service.settings |= json.loads(values.replace("ROOT", str(host.root)))
        case ["problem", *parts]:  # level, subject, text, command and kind
            host.service.problems.append(problem(*parts))
        case ["stop"]:  # the service
            host.service.stop()
        case ["environ", name, text]:
            host.environ[name] = text
        case ["constant", name, seconds]:  # of the program
            host.constants[name] = float(seconds)
        case ["finds", *addresses]:  # a rescan
            host.controls.finds |= {*addresses}
        case ["control", name, text]:  # an attribute of Controls
            setattr(host.controls, name, value_of(text))
        case _:
            raise ValueError(words)


def value_of(word: str) -> object:
    return int(word) if word.isdigit() else word
