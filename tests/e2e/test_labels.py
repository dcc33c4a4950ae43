"""What becomes of the feature file: labels that the API server takes, whatever the firmware says.

A file is read as node-feature-discovery reads it; Kubernetes' own validation judges what that
gives, and a real kubelet admits pods by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import VERSIONS, Machine
from tests.e2e.node import RUNNING, Node, Program
from tests.e2e.readers import Alone, judge, labels_by_nfd, read_features
from tests.world.processes import wait_until

DOMAIN = "tenstorrent.com"
DIRECTORY = "/run/features.d"


class LabelsHost(Alone):
    """With the directory of feature files; the cards are the test's, which starts the daemon."""

    @property
    def directory(self) -> Path:
        return self.machine.path(DIRECTORY)

    def start(self, config: str = "") -> None:
        """Start the daemon, and wait for its file."""
        super().start(f'labels_dir = "{DIRECTORY}"\n{config}')
        wait_until((self.directory / "tt-device-plugin").exists, "the feature file")

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


SHARED = """
[sharing]
lock_dir = ""
[[sharing.resources]]
name = "n300"
replicas = 2
rename = "%s"
"""


def test_labels_of_a_node(host: LabelsHost) -> None:
    """All of them are ours, and valid; nothing but the file is there for others to see."""
    for card in ("n300", "n300", "p300c"):
        host.cards.add(card)
    host.start(SHARED % "n300-half")
    assert host.ours("arch") == {"arch.wormhole": "true", "arch.blackhole": "true"}
    counts = {key: value for key, value in host.ours("").items() if key.endswith(".count")}
    assert counts == {"n300-half.count": "2", "p300.count": "2"}
    assert all(key.startswith(f"{DOMAIN}/") for key in host.labels())
    assert judged(host.labels()) == ""
    shown = [file.name for file in host.directory.iterdir() if not file.name.startswith(".")]
    assert shown == ["tt-device-plugin"]


def test_labels_of_a_resource_with_the_longest_name(host: LabelsHost) -> None:
    """A name may have 63 characters, as many as a label's; no label has more."""
    host.cards.add("n300")
    host.start(SHARED % ("n" * 63))
    assert judged(host.labels()) == ""
    assert host.ours("arch") == {"arch.wormhole": "true"}


def test_nfd_worker_makes_labels_of_them(host: LabelsHost) -> None:
    """As it is installed: `local` is among its sources, and it takes every label as it is."""
    host.cards.add("n300")
    host.cards.add("p300c")
    host.start()
    found = labels_by_nfd(host.directory)
    ours = {key: value for key, value in found.items() if key.startswith(f"{DOMAIN}/")}
    assert ours == host.labels() and len(ours) > 20
    assert ours.keys() < found.keys()


def test_nfd_worker_takes_none_without_its_source(host: LabelsHost) -> None:
    """Configured with other sources alone, it does not read the file."""
    host.cards.add("n300")
    host.start()
    sources = ("-feature-sources=cpu", "-label-sources=cpu,custom")
    found = labels_by_nfd(host.directory, *sources)
    assert found and not [key for key in found if key.startswith(DOMAIN)]


def test_nfd_worker_objects(tmp_path: Path) -> None:
    """It would: a key with a blank in it makes no label."""
    (tmp_path / "file").write_text(f"{DOMAIN}/bad key=1\n{DOMAIN}/good=1\n.hidden\n")
    assert labels_by_nfd(tmp_path, "-label-sources=local") == {f"{DOMAIN}/good": "1"}


def test_labels_follow_the_devices(host: LabelsHost) -> None:
    """A card that comes is counted; one that is ill still is; the file is written only when a label
    changes.
    """
    host.cards.add("n300")
    host.start()
    file = host.directory / "tt-device-plugin"
    assert host.ours("n300.count") == {"n300.count": "1"}
    added = host.cards.add("n300")
    wait_until(lambda: host.ours("n300.count") == {"n300.count": "2"}, "the second", 10)
    before = file.stat()
    added[0].die()
    wait_until(
        lambda: "does not respond" in host.daemon.log.read_text(), "the daemon to notice", 10
    )
    assert host.ours("n300.count") == {"n300.count": "2"}
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


GARBAGE = [
    "a" * 300,
    "1.2.3 (beta)\nevil=true",
    "-1.2-",
    "½.0.0.0",
    "#1.0",
    "..",
    "=",
    " ",
    "1.2.3.4=5",
]


@pytest.mark.parametrize("text", GARBAGE)
def test_labels_are_valid_whatever_firmware_and_driver_say(host: LabelsHost, text: str) -> None:
    """Neither a firmware's version nor the driver's can make a label that is refused, or one that
    is not ours.
    """
    (chip,) = host.cards.add("n300")
    chip.write("tt_fw_bundle_ver", f"{text}\n".encode())
    host.cards.root.joinpath("sys/module/tenstorrent/version").write_text(f"{text}\n")
    host.start()
    labels = host.labels()
    assert judged(labels) == ""
    assert all(key.startswith(f"{DOMAIN}/") for key in labels)
    assert labels_by_nfd(host.directory, "-label-sources=local") == labels
    assert host.ours("n300.count") == {"n300.count": "1"}


def test_the_judge_objects() -> None:
    """It would: a value that is too long, one with a blank, a name with two slashes."""
    assert "no more than 63" in judged({f"{DOMAIN}/firmware.version": "1" * 64})
    assert "a valid label" in judged({f"{DOMAIN}/firmware.version": "1 2"})
    assert "a qualified name" in judged({f"{DOMAIN}/n300/count": "1"})


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_select_nodes_by_them(program: Program, version: str) -> None:
    """With these labels on its node a pod's nodeSelector that fits is admitted, and one that does
    not is refused.
    """
    with Node(version, program, static_pods=False) as node:
        node.machine.path(DIRECTORY).mkdir()
        node.cards.add("n300")
        node.start_daemon(config=f'labels_dir = "{DIRECTORY}"')
        features = node.machine.path(f"{DIRECTORY}/tt-device-plugin")
        wait_until(features.exists, "the feature file")
        node.kubelet.stop()
        node.label(read_features(features.read_text()))
        node.kubelet.start()  # it has read its node's labels before it admits a pod
        node.wait_complete()
        fitting = {
            f"{DOMAIN}/arch.wormhole": "true",
            f"{DOMAIN}/n300.sharing": "false",
            f"{DOMAIN}/n300.count": "1",
        }
        assert node.outcome(node.run({f"{DOMAIN}/n300": 1}, selector=fitting)) == RUNNING
        for label in ({f"{DOMAIN}/n300.count": "8"}, {f"{DOMAIN}/arch.blackhole": "true"}):
            assert "NodeAffinity" in node.outcome(node.run({}, selector=fitting | label))
