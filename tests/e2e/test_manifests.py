"""The example pods of the package, on a real kubelet: each is admitted, and gets its devices.

A kubelet validates a static pod as the API server does. Only image and network are replaced: there
is neither a registry nor a network plugin. Nor is there a card: the programs that compute are
replaced by one that shows what the container got.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.documents import DEB, fenced
from tests.e2e.builds import VERSIONS
from tests.e2e.node import Node
from tests.e2e.pods import IMAGE
from tests.e2e.steps import JSON
from tests.world.processes import wait_until

PODS = {path.stem: path for path in sorted(DEB.glob("pods/*"))}
FIRST = "first-n300"  # README shows what it prints
PAGES_PER_CHIP = 4  # as Tenstorrent's tt-system-tools reserves for each device file
LOOK = ["sh", "-c", "ls /dev/tenstorrent/*; env | grep ^TT_ | sort"]

# By resource: the card that has it, and the chips of one device.
CARDS = {
    "n300": ("n300", 1),
    "p150": ("p150a", 1),
    "p300": ("p300c", 1),
    "galaxy-wormhole-board": ("galaxy-wormhole", 8),
}


class LargeNode(Node):
    """A node whose kubelet finds memory and pages of 1 GiB; only the kubelet counts them."""

    def power_on(self) -> None:
        super().power_on()
        pages = self.machine.scratch / "hugepages"
        for name, count in (("hugepages-1048576kB", 64), ("hugepages-2048kB", 0)):
            (pages / name).mkdir(parents=True)
            for file in ("nr_hugepages", "free_hugepages"):
                (pages / name / file).write_text(f"{count}\n")
        self.machine.mount("--bind", str(pages), "/sys/kernel/mm/hugepages")

        memory = self.machine.scratch / "meminfo"
        text = Path("/proc/meminfo").read_text()
        memory.write_text(re.sub(r"(?m)^MemTotal: .*$", "MemTotal: 536870912 kB", text))
        self.machine.mount("--bind", str(memory), "/proc/meminfo")

        self.machine.path("/run/ttdp/shm").mkdir(parents=True)  # the package's mount unit


@pytest.fixture
def node(tools: None) -> Iterator[LargeNode]:
    with LargeNode(VERSIONS[-1]) as node:
        yield node


@pytest.mark.parametrize("name", PODS)
def test_an_example_gets_its_devices(node: Node, name: str) -> None:
    """On a node with the configuration in its comment; it requests hugepages for each chip.

    It prints its device files and its variables; what README's prints is what README shows.
    """
    text = PODS[name].read_text()
    pod: JSON = yaml.safe_load(text)
    (container,) = pod["spec"]["containers"]
    limits = container["resources"]["limits"]
    ((resource, count),) = [each for each in limits.items() if each[0].startswith("tenstorrent")]
    card, chips = CARDS[resource.partition("/")[2]]

    node.cards.add(card)
    config = "\n".join(re.findall("(?m)^#     (.*)$", text))
    node.start_daemon(config, expected={})
    wait_until(lambda: len(node.kubelet.allocatable().get(resource, ())) >= count, resource)
    pod["metadata"]["namespace"] = "default"
    pod["spec"]["hostNetwork"] = True
    if not container["image"].startswith("busybox:"):
        container["command"] = LOOK
    container["image"] = IMAGE
    created = node.add(pod)
    created.wait_finished()
    assert created.status["phase"] == "Succeeded", created.status
    lines = created.output()

    files = {line for line in lines if line.startswith("/dev/tenstorrent/")}
    variables = dict(line.split("=", 1) for line in lines if line.startswith("TT_"))
    addresses = variables["TT_DEVICE_PLUGIN_DEVICES"].split(",")
    assert len(addresses) == count * chips
    assert files == {f"/dev/tenstorrent/{node.cards.chip(bdf).ordinal}" for bdf in addresses}
    assert variables["TT_VISIBLE_DEVICES"] == ",".join(addresses)

    if "hugepages-1Gi" in limits:
        pages = PAGES_PER_CHIP * len(addresses)
        assert limits["hugepages-1Gi"] == f"{pages}Gi"
        # They count towards it where hugetlb accounting is on: as much again for the rest.
        assert int(limits["memory"].removesuffix("Gi")) >= 2 * pages
    if name == FIRST:
        shown = next(block for block in fenced("console") if f"kubectl logs {name}\n" in block)
        assert lines == shown.split(f"kubectl logs {name}\n")[1].splitlines()


@pytest.mark.parametrize("name", PODS)
def test_an_example_has_no_privileges(name: str) -> None:
    """It meets the Pod Security Standard "restricted"; a program for a card is Python."""
    spec = yaml.safe_load(PODS[name].read_text())["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] >= 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}

    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    program, _, code = container["command"]
    assert program == "sh" or ast.parse(code)
