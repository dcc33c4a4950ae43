"""What becomes of the feature file: labels that the API server takes, whatever the firmware says.

A file is read as node-feature-discovery reads it; Kubernetes' own validation judges what that gives, and a real kubelet
admits pods by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import VERSIONS, Machine
from tests.e2e.node import RUNNING, Node, Program
from tests.e2e.readers import Alone, judge, read_features
from tests.world.processes import wait_until

DOMAIN = "tenstorrent.com"
DIRECTORY = "/run/features.d"


class LabelsHost(Alone):
    """With the directory of feature files; the cards are the test's, which starts the daemon."""

    @property
    def directory(self) -> Path:
        return self.machine.path(DIRECTORY)

    def start(self, config: str = "") -> None:
        super().start(f'labels_dir = "{DIRECTORY}"\n{config}')

    def labels(self) -> dict[str, str]:
        return read_features((self.directory / "tt-device-plugin").read_text())

    def ours(self, *names: str) -> dict[str, str]:
        """Those of the labels, without the domain, that begin with one of these."""
        found = {key.removeprefix(f"{DOMAIN}/"): value for key, value in self.labels().items()}
        return {key: value for key, value in found.items() if key.startswith(names)}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with Machine() as machine:
        machine.path(DIRECTORY).mkdir()
        yield machine


@pytest.fixture
def host(machine: Machine, program: Program) -> Iterator[LabelsHost]:
    for file in machine.path(DIRECTORY).iterdir():
        file.unlink()
    with LabelsHost(machine, program) as host:
        yield host


def judged(labels: dict[str, str]) -> str:
    """What the API server would have against these labels."""
    return judge("labels", text="".join(f"{key}={value}\n" for key, value in labels.items())).stderr


def test_labels_of_a_node(host: LabelsHost) -> None:
    """The labels name what is there: architectures, each resource, versions; all of them are ours, and valid."""
    for card in ("n300", "n300", "p300c"):
        host.cards.add(card)
    host.start()
    assert host.ours("arch") == {"arch.wormhole": "true", "arch.blackhole": "true"}
    n300 = {"n300.count": "2", "n300.product": "n300", "n300.replicas": "1", "n300.sharing": "false"}
    p300 = {"p300.count": "2", "p300.product": "p300", "p300.replicas": "1", "p300.sharing": "false"}
    assert host.ours("n300", "p300") == n300 | p300
    assert host.ours("driver") == {"driver.version": "2.10.1-pre", "driver.major": "2", "driver.minor": "10"}
    assert {*host.ours("firmware", "plugin")} == {"firmware.version", "plugin.version"}
    assert all(key.startswith(f"{DOMAIN}/") for key in host.labels())
    assert judged(host.labels()) == ""
    assert [file.name for file in host.directory.iterdir() if not file.name.startswith(".")] == ["tt-device-plugin"]


@pytest.mark.parametrize(
    ("rename", "name", "product"), [("", "n300", "n300-SHARED"), ('rename = "n300-third"', "n300-third", "n300")]
)
def test_labels_of_a_shared_resource(host: LabelsHost, rename: str, name: str, product: str) -> None:
    """A shared resource says how many replicas a device has; its product says so too where its name does not."""
    host.cards.add("n300")
    host.cards.add("n300")
    host.start(f'[sharing]\nlock_dir = ""\n[[sharing.resources]]\nname = "n300"\nreplicas = 3\n{rename}\n')
    shared = {"count": "2", "product": product, "replicas": "3", "sharing": "true"}
    assert host.ours("n300") == {f"{name}.{key}": value for key, value in shared.items()}
    assert judged(host.labels()) == ""


def test_labels_of_a_resource_with_the_longest_name(host: LabelsHost) -> None:
    """A resource's name may have 63 characters, as many as a label's; there is no label that would have more."""
    host.cards.add("n300")
    host.start(f'[sharing]\nlock_dir = ""\n[[sharing.resources]]\nname = "n300"\nreplicas = 2\nrename = "{"n" * 63}"\n')
    assert judged(host.labels()) == ""
    assert host.ours("arch") == {"arch.wormhole": "true"}


def test_labels_follow_the_devices(host: LabelsHost) -> None:
    """A card that comes is counted; one that is ill still is; the file is written only when a label changes."""
    host.cards.add("n300")
    host.start()
    file = host.directory / "tt-device-plugin"
    assert host.ours("n300.count") == {"n300.count": "1"}
    added = host.cards.add("n300")
    wait_until(lambda: host.ours("n300.count") == {"n300.count": "2"}, "the second", 10)
    before = file.stat()
    added[0].die()
    wait_until(lambda: "does not respond" in host.daemon.log.read_text(), "the daemon to notice", 10)
    assert host.ours("n300.count") == {"n300.count": "2"}
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


GARBAGE = ["a" * 300, "1.2.3 (beta)\nevil=true", "-1.2-", "½.0.0.0", "#1.0", "..", "=", " ", "1.2.3.4=5"]


@pytest.mark.parametrize("text", GARBAGE)
def test_labels_are_valid_whatever_firmware_and_driver_say(host: LabelsHost, text: str) -> None:
    """Neither a firmware's version nor the driver's can make a label that is refused, or one that is not ours."""
    (chip,) = host.cards.add("n300")
    chip.write("tt_fw_bundle_ver", f"{text}\n".encode())
    host.cards.root.joinpath("sys/module/tenstorrent/version").write_text(f"{text}\n")
    host.start()
    labels = host.labels()
    assert judged(labels) == ""
    assert all(key.startswith(f"{DOMAIN}/") for key in labels)
    assert host.ours("n300.count") == {"n300.count": "1"}


def test_the_judge_objects() -> None:
    """It would: a value that is too long, one with a blank, a name with two slashes."""
    assert "no more than 63" in judged({f"{DOMAIN}/firmware.version": "1" * 64})
    assert "a valid label" in judged({f"{DOMAIN}/firmware.version": "1 2"})
    assert "a qualified name" in judged({f"{DOMAIN}/n300/count": "1"})


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_select_nodes_by_them(program: Program, version: str) -> None:
    """With these labels on its node a pod's nodeSelector that fits is admitted, and one that does not is refused."""
    with Node(version, program, static_pods=False) as node:
        node.machine.path(DIRECTORY).mkdir()
        node.cards.add("n300")
        node.start_daemon(config=f'labels_dir = "{DIRECTORY}"')
        node.kubelet.stop()
        node.label(read_features(node.machine.path(f"{DIRECTORY}/tt-device-plugin").read_text()))
        node.kubelet.start()  # it has read its node's labels before it admits a pod
        node.wait_complete()
        fitting = {f"{DOMAIN}/arch.wormhole": "true", f"{DOMAIN}/n300.sharing": "false", f"{DOMAIN}/n300.count": "1"}
        assert node.outcome(node.run({f"{DOMAIN}/n300": 1}, selector=fitting)) == RUNNING
        for label in ({f"{DOMAIN}/n300.count": "8"}, {f"{DOMAIN}/arch.blackhole": "true"}):
            assert "NodeAffinity" in node.outcome(node.run({}, selector=fitting | label))
