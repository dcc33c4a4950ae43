"""The command line: commands, options and their help, errors."""

from __future__ import annotations

import argparse
import re
import signal
from unittest.mock import Mock

import pytest

import ttdp
from tests.commands import forked
from tests.world.processes import environment


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


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "/x: Permission denied; run it as root",
        ),
        (OSError(28, "No space left on device"), 1, "stdout: No space left on device"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_of_a_command_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    error: BaseException, status: int, line: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(signal, "signal", Mock())

    assert ttdp.run_command(Mock(side_effect=error), argparse.Namespace()) == status
    assert "\n".join(caplog.messages) == line
