"""The command line, and the form of log lines."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import ttdp
from tests.commands import Answer, forked
from tests.world.processes import environment, finished


def run(*words: str, **environ: str) -> Answer:
    return forked(words, environment() | environ)


def test_version_is_one_line() -> None:
    """The program's name and its version, on stdout."""
    ended = run("--version")
    assert (ended.out, ended.status) == (f"tt-device-plugin {ttdp.__version__}\n", 0)


def test_help_mentions_every_command_flag_variable_and_default() -> None:
    """Also the sections that only the file has."""
    text = " ".join(run("--help").out.split())
    for option in ttdp.OPTIONS:
        default = getattr(ttdp.Settings(), option.key)
        assert option.flag in text and f"[{option.variable}]" in text
        assert f"default {str(default).lower() if option.is_switch else default}" in text
        if choices := option.rule.choices:
            assert f"{option.flag} {'|'.join(choices)} " in text
    for word in ("run", "list", "check", "--json", "--quiet", "--config-only", "--version",
                 "--config-file", "TTDP_CONFIG_FILE", ttdp.DEFAULT_CONFIG_FILE, "[health]",
                 "[sharing]", "[[mounts]]"):  # fmt: skip
        assert word in text


@pytest.mark.parametrize("columns", ["40", "200"])
def test_help_fits_80_columns(columns: str) -> None:
    """Whatever the terminal has, so that a manual can quote it."""
    assert max(map(len, run("--help", COLUMNS=columns).out.splitlines())) <= 80


def test_no_command_is_the_help_on_stderr() -> None:
    """With status 2: a daemon starts only by `run`."""
    ended = run()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == run("--help").out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "--json"], "--json is valid only with list"),
        (["list", "--config-only"], "--config-only is valid only with check"),
        (["list", "--quiet"], "--quiet is valid only with check"),
        (["list", "run"], "unrecognized arguments: run"),
        (["lst"], "invalid choice: 'lst'"),
        (["run", "--uni", "board"], "unrecognized arguments: --uni"),
        (["run", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["list", "--log-level"], "argument --log-level: expected one argument"),
    ],
)
def test_unknown_words_are_a_usage_error(words: list[str], reason: str) -> None:
    """Status 2 and the usage, before anything else happens."""
    ended = run(*words)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("usage: tt-device-plugin run|list|check [OPTIONS]\n")
    assert reason in ended.err


@pytest.mark.parametrize(
    ("words", "environ", "text"),
    [
        (["--unit=boards"], {}, "--unit: 'boards' is not valid; must be chip or board"),
        ([], {"TTDP_UNIT": "boards"}, "TTDP_UNIT: 'boards'"),
        (["--config-file=/nowhere"], {}, "--config-file: /nowhere does not exist"),
        ([], {"TTDP_CONFIG_FILE": "/no"}, "TTDP_CONFIG_FILE: /no does not exist"),
        (
            ["--device-list-strategy=cdi", "--cdi-dir="],
            {},
            '--device-list-strategy: "cdi" needs cdi_dir',
        ),
    ],
)
def test_a_bad_value_is_status_78_and_one_line(
    words: list[str], environ: dict[str, str], text: str
) -> None:
    """The line has the flag, the variable or the file, and the valid values."""
    ended = run("run", *words, **environ)
    (line,) = ended.err.splitlines()
    assert (ended.status, ended.out) == (78, "") and text in line


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
