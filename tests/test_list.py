"""`list` and `check`: their view of the node, and its outlets. What they print: tests/golden."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import ttdp
from tests.commands import Commanded, Served, commanded
from tests.world.processes import PATIENCE, ROOT, environment
from tests.world.service import Service

KEYS = "id index path bdf card board arch serial asic_id numa_node firmware temperature power"
KEYS += " healthy reason withheld resource replicas pods processes excluded since"
PROGRAM = [sys.executable, str(ROOT / "ttdp.py")]


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Commanded]:
    """A host with a card."""
    with commanded(short_tmp) as host:
        host.node.add("n150")
        yield host


async def test_the_daemons_view_is_that_of_the_tests(served: Served) -> None:
    """It has the form of the stand-in's, so what is tested with that is true of the daemon."""
    sick, _ = served.node.add("n150") + served.node.add("p300c")[:1]
    service = Service(served.node, served.root)
    daemon = await served.serve(interval=0.1)
    sick.die()
    await daemon.sees(sick.bdf, ttdp.Kind.NO_RESPONSE)

    view = await served.view()
    theirs = service.view()

    assert view.keys() == theirs.keys() and ttdp.is_usable(view)
    assert view["settings"].keys() == theirs["settings"].keys()
    assert [[*row] for row in view["chips"]] == [KEYS.split()] * 3
    assert [[*row] for row in theirs["chips"]] == [KEYS.split()] * 3
    (problem,) = [each for each in view["problems"] if each["kind"]]
    (expected,) = theirs["problems"]
    assert problem == {**expected, "problem": problem["problem"]}

    since = datetime.strptime(view["chips"][0]["since"], "%Y-%m-%dT%H:%M:%S%z")
    assert abs(datetime.now(timezone.utc) - since) < timedelta(minutes=5)


def test_a_fault_has_the_time_at_which_it_began() -> None:
    """Local time, with the date from the second day on."""
    row = {"since": "2026-11-25T16:38:00Z"}
    for now, shown in ("25T23:59", "17:38"), ("26T00:00", "2026-11-25 17:38"):
        local = datetime.fromisoformat(f"2026-11-{now}:00+01:00")
        assert ttdp.since_text(row, local) == f" (since {shown})"


# -- whatever answers ------------------------------------------------------------------------------

STRANGE = {
    "nothing": b"",
    "no JSON": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "no text": b"\xff\xfe",
    "an array": b"[]",
    "another program's": b'{"program": "x", "version": "0.2.0"}',
    "nested deeply": b"[" * 1_000_000,
}


@pytest.mark.parametrize("answer", STRANGE)
def test_what_is_not_a_view_is_one_line(host: Commanded, answer: str) -> None:
    """For check, it is a FAIL. (A view of another form: golden/list/version.txt.)"""
    host.service.answer = STRANGE[answer]
    text = f"service does not answer on {host.service.path} with its view of the node"

    listed, checked = host.run("list"), host.run("check", "--quiet")

    command = "journalctl -u tt-device-plugin"
    assert (listed.status, listed.out, listed.err) == (1, "", f"the {text}; run: {command}\n")
    assert checked.status == 1
    assert checked.out == f"FAIL  service: {text[8:]}; run: {command}\n"


def test_a_service_that_does_not_answer_is_one_line(host: Commanded) -> None:
    """It has time, but not for ever."""
    host.constants["VIEW_TIMEOUT"] = 0.1
    host.service.stop()
    host.service.path.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(host.service.path))
        listening.listen()
        found = host.run("list")

    text = f"the service does not answer on {host.service.path}: timed out\n"
    assert (found.err, found.status) == (text, 1)


@pytest.mark.parametrize("command", ["list", "fix 01:00.0", "check"])
def test_who_may_not_ask_is_told_to_be_root(host: Commanded, command: str) -> None:
    """In one line; for check it is only a warning."""
    host.service.path.chmod(0)
    # Root may write everywhere; without this capability it may not.
    other = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    environ = environment(RUNTIME_DIRECTORY=str(host.root))

    found = subprocess.run(
        [*other, *PROGRAM, *command.split()], env=environ, capture_output=True, text=True
    )

    *_, line = (found.stdout + found.stderr).splitlines()
    reason = f"cannot be asked: {host.service.path}: permission denied; run it as root"
    assert line.endswith(reason) and found.returncode == int(command != "check")


def test_a_device_file_that_not_every_user_can_open_is_named(host: Commanded) -> None:
    """By check. A terminal stands in for it, which any user can have."""
    (chip,) = host.node.chips
    host.node.set_iommu(chip.bdf)
    terminal = os.ttyname(pty.openpty()[1])
    os.chmod(terminal, 0o620)
    number = os.stat(terminal).st_rdev
    chip.device_node.unlink()
    chip.device_node.symlink_to(terminal)
    chip.write("dev", f"{os.major(number)}:{os.minor(number)}\n".encode())

    found = host.run("check", "--quiet")

    text = f"{chip.device_node} has mode 0620, so not every user can open it"
    expected = f"warn  {chip.bdf}: {text}; install the driver's udev rules\n"
    assert (found.out, found.status) == (expected, 0)


# -- outputs ---------------------------------------------------------------------------------------


def test_a_closed_pipe_is_not_an_error(host: Commanded) -> None:
    """`list | head -1`: there is nothing to report, least of all a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    environ = environment(RUNTIME_DIRECTORY=str(host.root))

    with subprocess.Popen(
        [*PROGRAM, "list"], env=environ, stdout=writer, stderr=subprocess.PIPE
    ) as process:
        os.close(writer)
        _, err = process.communicate(timeout=4 * PATIENCE)

    assert err == b"" and process.returncode in (0, -signal.SIGPIPE)
