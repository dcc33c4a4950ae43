"""Fixtures: nodes with the real kubelet and the daemon; and what tests tell at the end of the run.

These tests are collected only when they are named: `python -m pytest tests/e2e/test_pods.py`. They
need root. What they are made of, from below:

    builds.py      tools of the host; programs and packages, in a cache
    images.py      the image that containers run, with busybox
    machine.py     Machine: namespaces, with processes and cgroups, that can lose power
    containerd.py, kubelet.py, apiserver.py    what a node runs
    daemon.py      Site: a machine with cards and the daemon
    pods.py        manifests, and what the API says of a pod; also for virtual machines
    node.py        Node: a Site with a kubelet, and its pods; a test begins like the one there
    watchednode.py WatchedNode: a Node of whose pods is known what they have open
    readers.py     programs of others that read what the daemon writes; umd.py: tt-umd
    container.py   a booted Debian; host.py: with the package
    vm.py          a virtual machine; scripts with steps.py run in it
    kubeletconfig.py    what nodes, guests and containers have in common
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.builds import VERSIONS, build_kubelet, missing_tools
from tests.e2e.container import require_root
from tests.e2e.daemon import Site, stale_zipapp
from tests.e2e.host import Host, Packages
from tests.e2e.machine import Scratch
from tests.e2e.node import Node
from tests.world.processes import ROOT

Told = Callable[[str], None]


@pytest.fixture
def told(record_property: Callable[[str, object], None]) -> Told:
    """Return a function that takes a sentence on what was measured, for the end of the run."""
    return partial(record_property, "told")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what a failed test's host or node said last."""
    report = yield
    if call.when == "call" and report.failed:
        for name, place in getattr(item, "funcargs", {}).items():
            # An error here would end the run. A host that does not answer fails its other tests.
            with contextlib.suppress(OSError, subprocess.SubprocessError, AssertionError):
                if isinstance(place, (Host, Site)):
                    report.sections.append((f"last words of the {name}", place.last_words()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("checked and measured")
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call" and report.user_properties:
                terminalreporter.write_line(report.nodeid.partition("::")[2])
                for _, sentence in report.user_properties:
                    terminalreporter.write_line(f"    {sentence}")


@pytest.fixture(scope="session")
def deb() -> Path:
    """Return the latest package for this machine; without one there is no run."""
    machine = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    debs = sorted(ROOT.glob(f"dist/*_{machine}.deb"), key=lambda deb: deb.stat().st_mtime)
    if not debs:
        pytest.exit("no package to test: make deb", returncode=1)
    return debs[-1]


@pytest.fixture(scope="session")
def packages(deb: Path) -> Iterator[Packages]:
    """Return this package and one of a later version."""
    require_root(dpkg_buildpackage="dpkg-dev debhelper")
    with Scratch() as work:
        yield Packages.of(deb, work)


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config) -> None:
    """Build what a real kubelet needs, and have the zipapp of this very program.

    If something is missing, the run ends with one line that says what to install, or to make.
    """
    if missing := missing_tools() or stale_zipapp():
        pytest.exit(missing, returncode=1)

    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for version in VERSIONS:
            build_kubelet(version)


@pytest.fixture(params=VERSIONS)
def node(request: pytest.FixtureRequest, tools: None) -> Iterator[Node]:
    """A node with a running kubelet, and without cards, daemon and pods; it takes three seconds."""
    with Node(request.param) as node:
        yield node
