"""The command line: commands, options and their help, errors, log lines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import ttdp
from tests.commands import forked
from tests.world.processes import environment, finished


@pytest.mark.parametrize("name", ttdp.COMMANDS)
def test_the_help_of_a_command_has_its_options(name: str) -> None:
    """Each with variable, default and valid values; no options of other commands."""
    text = forked([name, "--help"], environment()).out
    words = " ".join(text.split())

    options = ttdp.COMMANDS[name].options
    assert re.findall(r"(?m)^  (--[a-z-]+)", text) == [*map(ttdp.flag_of, options)]
    assert max(map(len, text.splitlines())) <= 80
    for key in {*options} - ttdp.SWITCHES.keys():
        default = getattr(ttdp.Settings(), key, ttdp.DEFAULT_CONFIG_FILE)
        shown = str(default).lower() if isinstance(default, bool) else default
        assert f"default {shown} [{ttdp.variable_of(key)}]" in words
        if key in ttdp.OPTIONS and (choices := ttdp.OPTIONS[key].choices):
            assert f"{ttdp.flag_of(key)} {'|'.join(choices)} " in words


def test_without_a_command_it_is_the_help_on_stderr() -> None:
    """With status 2: a daemon starts only by `run`."""
    shown = forked(["--help"], environment())
    assert shown.status == 0 and all(f"\n    {name}" in shown.out for name in ttdp.COMMANDS)

    ended = forked([], environment())
    assert (ended.status, ended.out, ended.err) == (2, "", shown.out)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--json"],
        ["list", "--config-file=/x"],
        ["list", "--root=/x"],
        ["fix"],
        ["fix", "0000:01:00.0", "0000:02:00.0"],
        ["lst"],
        ["run", "--uni", "board"],
        ["run", "--log-level"],
        ["--unit", "board", "run"],
    ],
)
def test_unknown_words_are_a_usage_error(words: list[str]) -> None:
    """Status 2 and the usage. An abbreviated flag is unknown."""
    ended = forked(words, environment())
    assert (ended.status, ended.out) == (2, "") and ended.err.startswith("usage: tt-device-plugin")


def test_a_bad_value_ends_the_daemon_with_a_status_of_its_own() -> None:
    """After which systemd does not try again. The line has a time."""
    for words, environ in ((["--unit=boards"], {}), ([], {"TTDP_UNIT": "boards"})):
        ended = forked(["run", *words], environment(**environ))
        (line,) = ended.err.splitlines()
        assert line.endswith("'boards' is not valid; must be chip or board")
        assert (ended.status, ended.out) == (78, "")


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
    """Return the lines of a process that logs at each level and has an error.

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
