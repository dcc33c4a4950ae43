"""`check`: what only it can find out. Its lines: tests/golden/check."""

from __future__ import annotations

import json
import os
import pty
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands import Commanded, commanded
from tests.documents import DEB

ADDRESS = "0000:01:00.0"


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Commanded]:
    """A host with a card behind an IOMMU, on which nothing is wrong."""
    with commanded(short_tmp) as host:
        host.node.add("n150")
        host.node.set_iommu(ADDRESS)
        yield host


def test_a_device_file_that_not_every_user_can_open_is_named(host: Commanded) -> None:
    """A terminal stands in for it, which any user can have."""
    (chip,) = host.node.chips
    terminal = os.ttyname(pty.openpty()[1])
    os.chmod(terminal, 0o620)
    number = os.stat(terminal).st_rdev
    chip.device_node.unlink()
    chip.device_node.symlink_to(terminal)
    chip.write("dev", f"{os.major(number)}:{os.minor(number)}\n".encode())

    found = host.run("check", "--quiet")

    text = f"{chip.device_node} has mode 0620, so not every user can open it"
    assert found.out == f"warn  {ADDRESS}: {text}; install the driver's udev rules\n"
    assert found.status == 0


def test_the_condition_of_the_example_ends_with_the_command_in_its_message(
    host: Commanded,
) -> None:
    """node-problem-detector runs a check; its status is the condition, which taints the node.

    The message, as long as it may be, has the command, and after that the check finds no failure.
    """
    for _ in range(15):  # each a warning, which together are longer than a message
        host.node.add("p150a", firmware=False)
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    monitor = json.loads(example["data"]["check.json"])
    (rule,) = monitor["rules"]
    words = rule["args"][rule["args"].index("tt-device-plugin") + 1 :]
    assert host.run(*words).status == 0

    host.node.chip(ADDRESS).die()
    found = host.run(*words)

    message = found.out[: monitor["pluginConfig"]["max_output_length"]]
    assert found.status == 1 and len(found.out) > len(message)
    (command,) = re.findall(r"(?m)^FAIL .*; run: tt-device-plugin (.*)$", message)
    assert host.run(*command.split(), "--yes").status == 0
    assert host.run(*words).status == 0
