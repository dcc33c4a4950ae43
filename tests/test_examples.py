"""The configuration files and other examples in packaging/deb."""

from __future__ import annotations

import re
from pathlib import Path

import ttdp
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
