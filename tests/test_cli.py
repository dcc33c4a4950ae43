"""The command line, and the form of log lines."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ttdp
from tests.commands import Answer, forked
from tests.world.processes import environment, finished

Parse = Callable[..., Answer]


def run(*words: str, **environ: str) -> Answer:
    return forked(words, environment() | environ)


@pytest.fixture
def parse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Parses words at which the program ends, on a wide terminal; returns what it has printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def parse(*words: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            ttdp.parse_command_line(words)
        out, err = capsys.readouterr()
        return Answer(int(end.value.code or 0), out, err)

    return parse


def width(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_version_is_one_line(parse: Parse) -> None:
    """The program's name and its version, on stdout."""
    ended = parse("--version")
    assert (ended.out, ended.status) == (f"tt-device-plugin {ttdp.__version__}\n", 0)


def test_the_help_is_an_overview_of_the_commands(parse: Parse) -> None:
    """It has no options of commands, and says where these are; a manual can quote it."""
    ended = parse("--help")

    assert ended.status == 0 and "COMMAND --help" in ended.out
    assert width(ended.out) <= 80

    for name, command in ttdp.COMMANDS.items():
        assert f"  {name}  " in ended.out
        assert command.help in " ".join(ended.out.split())
    assert "--config-file" not in ended.out


@pytest.mark.parametrize("name", ttdp.COMMANDS)
def test_the_help_of_a_command_has_its_options_and_an_example(parse: Parse, name: str) -> None:
    """Each with variable, default and valid values; and no options of other commands."""
    text = parse(name, "--help").out

    assert width(text) <= 80
    flags = re.findall(r"(?m)^  (--[a-z-]+)", text)
    assert flags == [*map(ttdp.flag_of, ttdp.COMMANDS[name].options)]
    assert text.endswith(f"example:\n  {ttdp.COMMANDS[name].example}\n")

    for key in ttdp.COMMANDS[name].options:
        if key in ttdp.SWITCHES:
            continue

        default = getattr(ttdp.Settings(), key, ttdp.DEFAULT_CONFIG_FILE)
        shown = str(default).lower() if isinstance(default, bool) else default
        words = " ".join(text.split())
        assert f"default {shown} [{ttdp.variable_of(key)}]" in words
        if key in ttdp.KEYS and (choices := ttdp.KEYS[key].choices):
            assert f"{ttdp.flag_of(key)} {'|'.join(choices)} " in words
        if key in ttdp.KEYS and ttdp.KEYS[key].is_switch:  # a space would make it the next word
            assert f"  {ttdp.flag_of(key)}[=BOOL]\n" in text


@pytest.mark.parametrize("name", ttdp.COMMANDS)
def test_the_example_of_a_command_works(name: str) -> None:
    """What --help shows can be pasted: it is of that command, and valid."""
    program, *words = ttdp.COMMANDS[name].example.split()
    assert program == "tt-device-plugin" and ttdp.parse_command_line(words)[0] == name


def test_no_command_is_the_help_on_stderr(parse: Parse) -> None:
    """With status 2: a daemon starts only by `run`. The last line says what is missing."""
    ended = parse()
    assert (ended.status, ended.out) == (2, "")

    missing = "tt-device-plugin: a command is missing: run, list, check or fix"
    assert ended.err == f"{parse('--help').out}\n{missing}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "--json"], "--json is valid only with list"),
        (["list", "--config-only"], "--config-only is valid only with check"),
        (["list", "run"], "unrecognized arguments: run"),
        (["fix"], "the following arguments are required: ADDRESS"),
        (["fix", "0000:01:00.0", "0000:02:00.0"], "unrecognized arguments: 0000:02:00.0"),
        (["lst"], "invalid choice: 'lst'"),
        (["run", "--uni", "board"], "unrecognized arguments: --uni board; did you mean --unit?"),
        (["run", "--units=board"], "unrecognized arguments: --units=board; did you mean --unit?"),
        # As the file has it.
        (["run", "--cdi_dir=/x"], "unrecognized arguments: --cdi_dir=/x; did you mean --cdi-dir?"),
        (["check", "--config"], "unrecognized arguments: --config; did you mean --config-only?"),
        (["run", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["run", "--log-level"], "argument --log-level: expected one argument"),
        (["--unit", "board", "run"], "invalid choice: 'board'"),
    ],
)
def test_unknown_words_are_a_usage_error(parse: Parse, words: list[str], reason: str) -> None:
    """Status 2 and the usage, before anything else happens."""
    ended = parse(*words)

    assert (ended.status, ended.out) == (2, "")

    usage, error = ended.err.splitlines()
    command = words[0] if words[0] in ttdp.COMMANDS else "|".join(ttdp.COMMANDS)
    if command == "fix":
        command = "fix ADDRESS"

    assert usage == f"usage: tt-device-plugin {command} [OPTIONS]"
    assert error.partition(": error: ")[2].removeprefix("argument command: ").startswith(reason)


@pytest.mark.parametrize(("command", "status"), [("run", 78), ("list", 1)])
@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        (["--unit=boards"], {}, "--unit: 'boards' is not valid; must be chip or board"),
        ([], {"TTDP_UNIT": "boards"}, "TTDP_UNIT: 'boards'"),
    ],
)
def test_a_bad_value_is_one_line_and_a_status(
    command: str, status: int, words: list[str], environ: dict[str, str], text: str
) -> None:
    """Of the daemon, it is one after which systemd does not try again.

    Other commands cannot know which node is meant. (An invalid file is no reason to end.)
    """
    ended = run(command, *words, **environ)

    (line,) = ended.err.splitlines()
    assert (ended.status, ended.out) == (status, "") and text in line
    assert line.startswith(text) is (command != "run"), "the daemon's lines begin with the time"


def test_check_warns_of_an_unknown_variable() -> None:
    """Whether the configuration is valid or not."""
    ended = run("check", "--config-only", TTDP_UNTI="board")
    warning = ("warn", "configuration", "unknown variable 'TTDP_UNTI'; did you mean TTDP_UNIT?")
    assert ended.findings == [("ok", "configuration", "valid"), warning]
    assert ended.status == 0


TALK = """
import logging, os, ttdp
ttdp.set_up_logging(os.environ, has_timestamps=True)
ttdp.log.setLevel("DEBUG")
for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
    ttdp.log.log(level, "said")
with ttdp.log_and_continue("a test"):
    raise RuntimeError("first line\\nsecond line")
"""


def talk(err: Path, difference: int) -> list[str]:
    """The lines of a process that logs at each level and has an error.

    difference: between its stderr's inode and the one in JOURNAL_STREAM.
    """
    with err.open("w") as file:
        status = os.fstat(file.fileno())
        variable = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + difference}"}
        finished([sys.executable, "-c", TALK], variable, stderr=file)
    return err.read_text().splitlines()


def test_lines_for_the_journal_have_a_priority(tmp_path: Path) -> None:
    """Each line begins with its syslog level, each line of a traceback, too."""
    lines = talk(tmp_path / "err", 0)
    assert lines[:4] == ["<7>said", "<6>said", "<4>said", "<3>said"]

    traceback = lines[4:]
    assert "a test" in traceback[0] and traceback[-1] == "<3>second line" and len(traceback) > 4
    assert all(line.startswith("<3>") for line in traceback)


def test_other_lines_have_a_time_and_a_level(tmp_path: Path) -> None:
    """A stderr that was redirected is not the journal, whatever JOURNAL_STREAM contains."""
    lines = talk(tmp_path / "err", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG +said", lines[0])
    assert not any(line.startswith("<") for line in lines)
