"""Cases of what the program prints, as texts in tests/golden: a node, what happens, and the output.

A case is a file: a comment that says what it promises, lines that prepare a node, and commands with
all that they print. `pytest tests/test_golden.py --update-golden` writes what they print now; the
difference is to be read like code. Outputs are indented; a status is there if it is not 0.

    # A chip that does not respond is a FAIL with the command that helps.
    add n150
    break 0000:01:00.0 die

    $ tt-device-plugin check --quiet
        FAIL  0000:01:00.0: chip does not respond …; run: tt-device-plugin fix 0000:01:00.0
        status 1

A line that prepares is a method of `Case`, with words as a shell has them. In outputs, ROOT is the
directory in which all is, and VERSION the program's. stderr follows stdout.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import ttdp
from tests.commands import Commanded, commanded
from tests.world.processes import MEMORY, ROOT, is_usable
from tests.world.service import problem

DIRECTORY = ROOT / "tests/golden"


def names() -> list[str]:
    """Return the names of all cases: "check/hugepages"."""
    return sorted(str(path.relative_to(DIRECTORY))[:-4] for path in DIRECTORY.rglob("*.txt"))


def played(text: str) -> str:
    """Return the text of a case with the outputs that its commands have now."""
    lines = [line for line in text.splitlines() if line]
    place = MEMORY if is_usable(MEMORY) else None
    with tempfile.TemporaryDirectory(prefix="tt-", dir=place) as home:
        driver = next((line.split()[1] for line in lines if line.startswith("driver ")), "2.10")
        with commanded(Path(home), driver=driver) as host:
            played = "\n".join(Case(host).play(lines))
            return re.sub(r"\n{3,}", "\n\n", played).strip() + "\n"


class Case:
    """A node to which the lines of a case happen."""

    def __init__(self, host: Commanded) -> None:
        self._host = host
        host.constants["LOOK_INTERVAL"] = 0.01
        host.environ |= {"TZ": "UTC", "USER": "operator"}

    def play(self, lines: list[str]) -> Iterator[str]:
        """Yield the lines of the case that are not outputs, and the outputs of now."""
        for line in lines:
            if line.startswith("    "):
                continue
            if line.startswith(("$ ", "calls")):
                yield f"\n{line}"
                for written in self._output(*shlex.split(line.removeprefix("$ "))):
                    yield f"    {written}".rstrip()
                yield ""
                continue

            yield line
            if not line.startswith("#"):
                verb, *words = shlex.split(line)
                act: Callable[..., object] = getattr(self, verb.replace("break", "do"))
                act(*words)

    def _output(self, program: str, *arguments: str) -> Iterator[str]:
        """Yield what a command prints, and its status; of "calls", what has reached the node."""
        if program == "calls":
            yield from self._host.controls.calls
            return
        if program == "config":
            yield from self._config(*arguments)
            return

        assert program == "tt-device-plugin"
        answer = self._host.run(*(each.replace("ROOT", str(self._host.root)) for each in arguments))
        text = (answer.out + answer.err).replace(str(self._host.root), "ROOT")
        yield from text.replace(ttdp.__version__, "VERSION").splitlines()
        if answer.status:
            yield f"status {answer.status}"

    def _config(self, content: str, *words: str) -> Iterator[str]:
        """Yield what a configuration file means, beside flags and variables: "unit=board"."""
        file = self._host.configure(content.replace("\\n", "\n"))
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

    # Lines that prepare

    def driver(self, version: str) -> None:
        """Have this version of the driver from the start."""

    def add(self, card: str, *options: str) -> None:
        """Add a card behind an IOMMU; options: those of SimulatedNode.add(), as NAME=JSON."""
        given = dict(option.split("=", 1) for option in options)
        values = {name: json.loads(f'"{v}"' if ":" in v else v) for name, v in given.items()}
        for chip in self._host.node.add(card, **values):
            self._host.node.set_iommu(chip.bdf)

    def do(self, bdf: str, operation: str, *words: str) -> None:
        """Let something happen to a chip: a method of it."""
        getattr(self._host.node.chip(bdf), operation)(*words)

    def attribute(self, bdf: str, name: str, text: str) -> None:
        self._host.node.chip(bdf).write(name, f"{text}\n".encode())

    def node(self, operation: str, *words: str) -> None:
        """Let something happen to the node: a method of it."""
        getattr(self._host.node, operation)(*map(_value, words))

    def pod(self, name: str, *addresses: str) -> None:
        self._host.admit(name, *addresses)

    def process(self, bdf: str, pid: str, command: str) -> None:
        self._host.open(bdf, int(pid), command.encode().decode("unicode_escape"))

    def fault(self, bdf: str, kind: str) -> None:
        self._host.service.faults[bdf] = kind

    def exclude(self, bdf: str) -> None:
        self._host.service.excluded.add(bdf)

    def row(self, bdf: str, values: str) -> None:
        """Change a chip's row in the view."""
        self._host.service.rows.setdefault(bdf, {}).update(json.loads(values))

    def view(self, values: str) -> None:
        """Change the view."""
        self._host.service.more |= json.loads(values)

    def setting(self, values: str) -> None:
        """Change the daemon's settings."""
        self._host.service.settings |= json.loads(values.replace("ROOT", str(self._host.root)))

    def problem(self, *words: str) -> None:
        """Let the daemon know of a problem: level, subject, text, command and kind."""
        self._host.service.problems.append(problem(*words))

    def file(self, path: str, text: str = "") -> None:
        """Write a file; a path below ROOT."""
        file = self._host.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)  # sysfs and procfs have files that nobody can write to
        file.write_text(text.replace("\\n", "\n"))

    def remove(self, path: str) -> None:
        (self._host.root / path).unlink()

    def environ(self, name: str, value: str) -> None:
        self._host.environ[name] = value

    def finds(self, *addresses: str) -> None:
        """Let a rescan find these cards."""
        self._host.controls.finds |= {*addresses}

    def stop(self) -> None:
        """Stop the service."""
        self._host.service.stop()

    def patience(self, seconds: str) -> None:
        """Let `fix` wait so long for what follows from a step: in cases in which nothing does."""
        self._host.constants["FOLLOWS_WITHIN"] = float(seconds)

    def control(self, name: str, value: str) -> None:
        """Change what comes of a command: an attribute of Controls."""
        setattr(self._host.controls, name, _value(value))


def _value(word: str) -> object:
    return int(word) if word.isdigit() else word
