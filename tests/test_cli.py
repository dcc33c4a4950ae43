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
    "line",
    ["run --json", "list --config-file=/x", "fix", "fix 01:00.0 02:00.0", "lst", "run --uni board"],
)
def test_unknown_words_are_a_usage_error(line: str) -> None:
    """Status 2 and the usage. An abbreviated flag is unknown."""
    ended = forked(line.split(), environment())
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


@pytest.mark.parametrize("is_journal", [True, False])
def test_only_lines_for_the_journal_have_a_priority(tmp_path: Path, is_journal: bool) -> None:
    """Each line of a traceback, too. Others have a time; a redirected stderr is no journal."""
    file = tmp_path / "err"
    with file.open("w") as stderr:
        status = os.fstat(stderr.fileno())
        inode = status.st_ino if is_journal else status.st_ino + 1
        variables = {"JOURNAL_STREAM": f"{status.st_dev}:{inode}"}
        finished([sys.executable, "-c", TALK], variables, stderr=stderr)
    said, traceback = file.read_text().splitlines()[:4], file.read_text().splitlines()[4:]

    assert "a test" in traceback[0] and len(traceback) > 4
    if is_journal:
        assert said == ["<7>said", "<6>said", "<4>said", "<3>said"]
        assert all(line.startswith("<3>") for line in traceback)
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} DEBUG +said", said[0])
        assert not any(line.startswith("<") for line in said + traceback)
