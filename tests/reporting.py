"""What a run says at its end: the tests that did not run here, each with its name and the reason.

`make` loads this plugin; .ci/run repeats its lines after everything else. It also has the option of
tests that compare with tests/golden.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]
MARK = "NOT RUN: "


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of tests that compare with tests/golden."""
    parser.addoption("--update-golden", action="store_true", help="write the outputs of now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with the one in tests/golden/reports that has this name."""

    def compare(name: str, text: str) -> None:
        file = Path(__file__).with_name("golden") / "reports" / f"{name}.out"
        if request.config.getoption("--update-golden"):
            file.write_text(text)
        assert text == file.read_text()

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write a line for each test that was skipped."""
    lines = [line_of(report) for report in terminalreporter.stats.get("skipped", [])]
    if not lines:
        return

    terminalreporter.section("not run")
    for line in lines:
        terminalreporter.write_line(line)


def line_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the line of a test, or of a file that was skipped as a whole."""
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return f"{MARK}{report.nodeid}: {reason.removeprefix('Skipped: ').removeprefix(MARK)}"
