"""The feature file, read by nfd-worker, judged by Kubernetes' validation, used by a kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.daemon import Site
from tests.e2e.readers import judge, labels_by_nfd
from tests.world.processes import wait_until

DOMAIN = "tenstorrent.com"
DIRECTORY = "/run/features.d"


@pytest.fixture
def host(tools: None) -> Iterator[Site]:
    """A host with an empty directory of feature files."""
    with Site() as site:
        site.machine.path(DIRECTORY).mkdir()
        yield site


def judged(labels: dict[str, str]) -> str:
    """Return what the API server would have against these labels."""
    return judge("labels", text="".join(f"{key}={value}\n" for key, value in labels.items())).stderr


NAME = "n" * 63  # no label can be named after it, as a key has at most 63 characters
SHARED = f"""
labels_dir = "{DIRECTORY}"
[sharing]
lock_dir = ""
[[sharing.resources]]
name = "n300"
replicas = 2
rename = "{NAME}"
"""


def test_labels_of_a_node_are_valid(host: Site) -> None:
    """nfd-worker, as installed, makes a label of each line; all are valid and of our domain."""
    directory = host.machine.path(DIRECTORY)
    file = directory / "tt-device-plugin"
    for card in ("n300", "n300", "p300c"):
        host.cards.add(card)
    host.start_daemon(SHARED)
    # It is written again when a chip was read, which is where the firmware is from.
    firmware = f"{DOMAIN}/firmware.version="
    wait_until(lambda: file.exists() and firmware in file.read_text(), "all labels")

    labels = labels_by_nfd(directory, "-label-sources=local")
    assert {f"{DOMAIN}/arch.wormhole", f"{DOMAIN}/arch.blackhole"} <= labels.keys()
    assert labels[f"{DOMAIN}/p300.count"] == "2" and NAME not in file.read_text()
    assert judged(labels) == ""
    assert file.read_text().splitlines() == [*map("=".join, labels.items())]

    # Beside the labels of its other sources.
    found = labels_by_nfd(directory)
    assert {key: value for key, value in found.items() if key.startswith(f"{DOMAIN}/")} == labels

    shown = [file.name for file in directory.iterdir() if not file.name.startswith(".")]
    assert shown == ["tt-device-plugin"]


def test_the_judges_object(tmp_path: Path) -> None:
    """Values that are too long or have a blank, and names with two slashes, are found."""
    assert "no more than 63" in judged({f"{DOMAIN}/firmware.version": "1" * 64})
    assert "a valid label" in judged({f"{DOMAIN}/firmware.version": "1 2"})
    assert "a qualified name" in judged({f"{DOMAIN}/n300/count": "1"})
    (tmp_path / "file").write_text(f"{DOMAIN}/bad key=1\n{DOMAIN}/good=1\n.hidden\n")
    assert labels_by_nfd(tmp_path, "-label-sources=local") == {f"{DOMAIN}/good": "1"}
