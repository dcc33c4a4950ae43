"""The configuration files and other examples in packaging/deb."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.world.processes import ROOT

DEB = ROOT / "packaging/deb"


def listed(name: str) -> set[str]:
    """Return the files that one of debhelper's lists installs, by their place in packaging/deb."""
    lines = (DEB / name).read_text().split()
    return {line.removeprefix("debian/") for line in lines}


def test_every_example_is_installed() -> None:
    """And every text; a file that is listed exists."""
    examples = {path.name for path in DEB.glob("tt-device-plugin.*") if path.suffix != ".5"}
    examples -= {"tt-device-plugin.8"}
    for directory in ("pods", "rollout"):
        examples |= {f"{directory}/{path.name}" for path in (DEB / directory).iterdir()}
    assert listed("examples") == examples | {"config.toml", "tt-inference-server"}
    assert {path.name for path in DEB.glob("*.md")} < listed("docs")


def test_each_fault_in_the_log_is_an_event_of_the_node() -> None:
    """A chip's, and a board's of which chips are missing; not one that waits for a pod's end."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    rule, *_ = json.loads(example["data"]["journal.json"])["rules"]
    ill = [chip(bus, fault=kind) for bus, kind in enumerate(ttdp.Kind, 1)]
    half = chip(0x41, "p300c", serial="A" * 16)
    held = [chip(bus, "p300c", serial="B" * 16) for bus in (0x51, 0x52)]
    holds = [hold("p300", bdf(0x51), buses=[0x51])]
    decision = decide([*ill, half, *held], ttdp.Settings(unit="board"), holds)

    lines = [line for _, line in ttdp.changes(None, decision)]
    events = [line for line in lines if re.fullmatch(rule["pattern"], line)]

    assert events == [line for line in lines if "unhealthy: " in line]
    assert len(events) == len(ill) + 1


def test_the_first_configuration_sets_nothing(tmp_path: Path) -> None:
    """It is valid as it is, and also if each of its examples is used: together or alone."""
    text = (DEB / "config-at-first.toml").read_text()
    assert all(line.startswith("#") for line in text.splitlines() if line)
    keys = re.findall(r"(?m)^#([a-z_]+) = ", text)
    assert {"unit", "resource_naming", "name", "replicas"} <= {*keys}
    blocks = ["\n".join(re.findall(r"(?m)^#(\S.*)$", block)) for block in text.split("\n\n")]
    for example in ("", *blocks, "\n".join(blocks)):
        (tmp_path / "config.toml").write_text(example)
        ttdp.load_settings({"config_file": str(tmp_path / "config.toml")}, {})
