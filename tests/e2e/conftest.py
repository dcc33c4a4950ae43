"""Fixtures: nodes with the real kubelet and the daemon; and what tests tell at the end of the run.

These tests are collected only when they are named: `python -m pytest tests/e2e/test_pods.py`. They
need root.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from tests.e2e.host import Host
from tests.e2e.machine import VERSIONS, build_kubelet, missing_tools
from tests.e2e.node import Node, Program, stale_zipapp
from tests.world.processes import ROOT

RESULTS = ROOT / "dist/realkubelet.json"

Row = dict[str, str]


class Results:
    """Tables of what was measured: for the terminal at the end, and for dist/realkubelet.json."""

    def __init__(self) -> None:
        self.program = ""
        self.tables: dict[str, list[Row]] = {}

    def add(self, table: str, row: Row) -> None:
        self.tables.setdefault(table, []).append(row)

    def lines(self) -> Iterator[str]:
        yield f"of {self.program}"
        for title, rows in self.tables.items():
            yield f"\n{title}"
            cells = [[*rows[0]], *([str(value) for value in row.values()] for row in rows)]
            widths = [max(len(line[column]) for line in cells) for column in range(len(rows[0]))]
            texts = [" | ".join(map(str.ljust, line, widths)) for line in cells]
            texts.insert(1, "-|-".join("-" * width for width in widths))
            yield from (f"| {text} |" for text in texts)


_results = pytest.StashKey[Results]()


Told = Callable[[str], None]
_told = pytest.StashKey[list[tuple[str, str]]]()


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Told:
    """Give what is called with a sentence on what was measured, for the end of the run."""
    sentences = request.config.stash.setdefault(_told, [])
    return lambda sentence: sentences.append((request.node.name, sentence))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes of waiting; only with -m slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, unless -m names it."""
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what a failed test's host or node said last, and mend the host for the next test."""
    report = yield
    if call.when == "call" and report.failed:
        for name, place in getattr(item, "funcargs", {}).items():
            if isinstance(place, (Host, Node)):
                report.sections.append((f"last words of the {name}", place.last_words()))
            if isinstance(place, Host):
                place.recover()
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if sentences := config.stash.get(_told, []):
        terminalreporter.section("checked and measured")
        for name, sentence in sentences:
            terminalreporter.write_line(f"{name}\n    {sentence}")
    results = config.stash.get(_results, None)
    if results is None or not results.tables:
        return
    terminalreporter.section("measured on the real kubelet")
    for line in results.lines():
        terminalreporter.write_line(line)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"program": results.program, **results.tables}, indent=1, ensure_ascii=False)
        + "\n"
    )
    terminalreporter.write_line(f"\nalso in {RESULTS.relative_to(ROOT)}")


@pytest.fixture(scope="session")
def deb() -> Path:
    """The latest package for this machine; without one there is no run."""
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], capture_output=True, text=True, check=True
    ).stdout.strip()
    debs = sorted(ROOT.glob(f"dist/*_{machine}.deb"), key=lambda deb: deb.stat().st_mtime)
    if not debs:
        pytest.exit("no package to test: make deb", returncode=1)
    return debs[-1]


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config) -> None:
    """Without what it takes there is no run: one line says what to install. Nothing is skipped."""
    if missing := missing_tools():
        pytest.exit(missing, returncode=1)
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for each in VERSIONS:
            build_kubelet(each)


@pytest.fixture(scope="session")
def program(tools: None, pytestconfig: pytest.Config) -> Program:
    """The zipapp. Where there is none of this very program the sources do, loudly; not in CI."""
    if (reason := stale_zipapp()) and os.environ.get("CI") == "true":
        pytest.exit(reason, returncode=1)
    if reason:
        capture = pytestconfig.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            print(f"\n*** NOT AS SHIPPED: {reason}. ttdp.py itself is tested instead.", flush=True)
    return Program(zipapp=not reason)


@pytest.fixture(scope="session")
def results(program: Program, pytestconfig: pytest.Config) -> Results:
    found = pytestconfig.stash.setdefault(_results, Results())
    found.program = program.name
    return found


@pytest.fixture(scope="session")
def running_nodes(program: Program) -> Iterator[dict[str, Node]]:
    with contextlib.ExitStack() as stack:
        yield {version: stack.enter_context(Node(version, program)) for version in VERSIONS}


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, running_nodes: dict[str, Node]) -> Iterator[Node]:
    """A node with a running kubelet, without cards, daemon and pods. The versions take turns."""
    node = running_nodes[request.param]
    node.wait_clear()
    yield node
    node.clear()
