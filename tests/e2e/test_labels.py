"""The feature file, read by nfd-worker, judged by Kubernetes' validation, used by a kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machine import Machine
from tests.e2e.node import Program
from tests.e2e.readers import Alone, judge, labels_by_nfd
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
        """Return the labels that nfd-worker makes of the file."""
        return labels_by_nfd(self.directory, "-label-sources=local")


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
    """Return what the API server would have against these labels."""
    return judge("labels", text="".join(f"{key}={value}\n" for key, value in labels.items())).stderr


SHARED = """
[sharing]
lock_dir = ""
[[sharing.resources]]
name = "n300"
replicas = 2
rename = "%s"
"""


@pytest.mark.parametrize("name", ["n300-half", "n" * 63])
def test_labels_of_a_node_are_valid(host: LabelsHost, name: str) -> None:
    """nfd-worker, as installed, makes a label of each line; all are valid and of our domain."""
    for card in ("n300", "n300", "p300c"):
        host.cards.add(card)
    host.start(SHARED % name)
    labels = host.labels()
    assert {f"{DOMAIN}/arch.wormhole", f"{DOMAIN}/arch.blackhole"} <= labels.keys()
    assert labels[f"{DOMAIN}/p300.count"] == "2" and len(labels) > 15
    assert judged(labels) == ""
    lines = (host.directory / "tt-device-plugin").read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == [*map("=".join, labels.items())]
    found = labels_by_nfd(host.directory)
    assert {key: value for key, value in found.items() if key.startswith(f"{DOMAIN}/")} == labels
    shown = [file.name for file in host.directory.iterdir() if not file.name.startswith(".")]
    assert shown == ["tt-device-plugin"]


def test_the_judges_object(tmp_path: Path) -> None:
    """Values that are too long or have a blank, and names with two slashes, are found."""
    assert "no more than 63" in judged({f"{DOMAIN}/firmware.version": "1" * 64})
    assert "a valid label" in judged({f"{DOMAIN}/firmware.version": "1 2"})
    assert "a qualified name" in judged({f"{DOMAIN}/n300/count": "1"})
    (tmp_path / "file").write_text(f"{DOMAIN}/bad key=1\n{DOMAIN}/good=1\n.hidden\n")
    assert labels_by_nfd(tmp_path, "-label-sources=local") == {f"{DOMAIN}/good": "1"}
