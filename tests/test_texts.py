"""What README and package say by hand is so; what is generated there, make lint compares."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import ttdp
from tests.e2e.test_metrics import FREE, HOTTEST, UNHEALTHY
from tests.e2e.test_repository import INSTALLATION, URL
from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEB = ROOT / "packaging/deb"
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"(?ms)^```.*?^```$", "", README)
KUBELETS = (
    "kubelet",
    "k3s",
    "k3s-agent",
    "rke2-server",
    "rke2-agent",
    "snap.microk8s.daemon-kubelite",
    "k0sworker",
    "k0scontroller",
)


# -- README ----------------------------------------------------------------------------------------


def fenced(language: str) -> list[str]:
    """README's blocks of code in a language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", README)


def cells(heading: str) -> list[list[str]]:
    """The rows of README's tables below a heading, without what marks code."""
    part = re.split(r"(?m)^#+ ", PROSE.split(f"\n## {heading}\n")[1])[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def names(unit: Any) -> Iterator[str]:
    """Every resource's name, without the domain, by the cards that there are."""
    for card in ttdp.CARDS.values():
        arch: Any = "wormhole" if card in ("n150", "n300", "galaxy-wormhole") else "blackhole"
        function = ttdp.PciFunction("0000:01:00.0", arch, card, None, 0, "", "")
        yield ttdp.short_name(ttdp.Chip(function), ttdp.Settings(unit=unit))


@pytest.mark.parametrize("unit", get_args(ttdp.Unit))
def test_readme_names_every_resource(unit: str) -> None:
    """Every board's, and those of whole boards."""
    for name in names(unit):
        assert f"`tenstorrent.com/{name}`" in README


def limits(document: Any) -> Iterator[str]:
    """What a manifest, or a part of one, asks for."""
    parts = document if isinstance(document, list) else []
    if isinstance(document, dict):
        yield from document.get("limits", ())
        parts = list(document.values())
    for part in parts:
        yield from limits(part)


def test_readme_manifests_ask_for_what_there_is() -> None:
    """They are YAML, and every resource of ours in them is one that the program offers."""
    blocks = [yaml.safe_load(block) for block in fenced("yaml")]
    wanted = {name for block in blocks for name in limits(block)}
    ours = {name for name in wanted if name.startswith("tenstorrent.com/")}
    assert len(blocks) >= 3 and ours
    assert ours <= {f"tenstorrent.com/{name}" for name in names("chip")}


def test_readme_configurations_are_valid(tmp_path: Path) -> None:
    """Each of them, as a file of its own, changes something."""
    for number, block in enumerate(fenced("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert ttdp.load_settings({"config_file": str(file)}, {}) != ttdp.Settings(), block


def test_readme_names_every_metric_and_fault() -> None:
    """Those that the program writes, and no others."""
    families = [*ttdp.chip_metrics([], {}, []), *ttdp.plugin_metrics([], {}, 0.0)]
    rows = cells("Metrics")
    named = {name for row in rows for name in re.findall(r"tt_[a-z]+_\w+", row[0])}
    assert named == {family.name for family in families}
    faults = next(row[1] for row in rows if row[0].startswith("tt_device_fault"))
    assert re.findall(r"`(\w+)", faults)[1:] == [fault.name.lower() for fault in ttdp.Fault]


def test_readme_names_every_label() -> None:
    """Those of a node with an n300, and no others; its example asks for labels that there are."""
    function = ttdp.PciFunction("0000:01:00.0", "wormhole", "n300", 0, 0, "", "")
    chips = [ttdp.Chip(function, identity=ttdp.Identity(firmware="19.4.0.0"))]
    listed = ttdp.configured_resources(chips, ttdp.Settings()).values()
    lines = ttdp.feature_file(listed, chips, ttdp.Settings(), "2.10.0").splitlines()
    written = {line.partition("=")[0].partition("/")[2] for line in lines}
    text = " ".join(row[0] for row in cells("Node labels"))
    named = {*re.findall(r"(?:tenstorrent\.com/|….)([a-z0-9.-]+)", text)}
    assert named == {*written, "arch.blackhole"}
    example = next(block for block in fenced("yaml") if "matchExpressions" in block)
    asked = re.findall(r"key: tenstorrent\.com/([^,]+)", example)
    assert asked and {key.replace("p300", "n300") for key in asked} <= written


def test_readme_queries_are_tested() -> None:
    """Word for word, so that what is copied works."""
    queries = {query.strip() for query in fenced("promql")}
    assert queries and queries <= {query.strip() for query in (FREE, UNHEALTHY, HOTTEST)}


def test_readme_installation_is_tested() -> None:
    """Its four lines are the test's, with the address that `make repository` puts into it."""
    makefile = (ROOT / "packaging/packaging.mk").read_text()
    served = re.search(r"(?m)^REPOSITORY_URL \?= (\S+)$", makefile)
    assert served
    tested = [line.replace(URL, served[1]).replace(" --yes", "") for line in INSTALLATION]
    assert fenced("console")[1].splitlines() == [f"# {line}" for line in tested]


def test_readme_links_lead_somewhere() -> None:
    """To files that are there, and to headings of its own."""
    headings = re.findall(r"(?m)^#+ (.*)$", PROSE)
    plain = (re.sub(r"[^a-z0-9 -]", "", heading.lower()) for heading in headings)
    anchors = {text.replace(" ", "-") for text in plain}
    targets = re.findall(r"\]\((?!https://)([^)]*)\)", PROSE)
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists() and (not anchor or anchor in anchors), target


def test_readme_commands_exist() -> None:
    """Every `make` target that it names; variables may come with it."""
    makefiles = [(ROOT / name).read_text() for name in ("Makefile", "packaging/packaging.mk")]
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", "".join(makefiles)))
    named = re.findall(r"(?m)^[$#] make ((?:[a-z0-9]+ ?)+)|`make (.*?)`", README)
    words = {word for each in named for word in " ".join(each).split() if "=" not in word}
    assert {"demo", "test", "deb", "release"} <= words <= targets


# -- the package -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kubelet", KUBELETS)
def test_unit_is_ordered_before_every_kubelet_and_requires_none(kubelet: str) -> None:
    """It is up before the kubelet, whatever that is called."""
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    before = " ".join(re.findall(r"(?m)^Before=(.*)$", unit)).split()
    assert f"{kubelet}.service" in before
    assert not re.search(r"(?m)^(Requires|BindsTo|Requisite|PartOf)=", unit)


def test_documented_configuration_is_valid(tmp_path: Path) -> None:
    """With all its lines in force: examples in its tables, defaults above them."""
    text = re.sub(r"(?m)^#(?=[a-z\[])", "", (DEB / "config.toml").read_text())
    (tmp_path / "config.toml").write_text(text)
    settings = ttdp.load_settings({"config_file": str(tmp_path / "config.toml")}, {})
    assert settings.health != ttdp.HealthSettings()
    assert settings.sharing.resources and settings.mounts
    default = ttdp.Settings()
    tables = {name: getattr(default, name) for name in ("health", "sharing", "mounts")}
    assert replace(settings, **tables) == default


def test_versions_of_what_is_bundled_are_those_that_are_tested() -> None:
    """shiv.toml pins what the development group does, with hashes for every ABI and machine."""
    bundled = tomllib.loads((ROOT / "shiv.toml").read_text())
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    for name, version in bundled["requirements"].items():
        if name != "typing_extensions":  # grpcio's own; the development group leaves it to pip
            assert f"{name}=={version}" in tested
    machines = {"amd64": "x86_64", "arm64": "aarch64"}
    grpcio = bundled["requirements"]["grpcio"]
    for architecture in bundled["architectures"]:
        for abi in bundled["abis"]:
            wheel = f"grpcio-{grpcio}-{abi}-{abi}-"
            packed = [file for file in bundled["sha256"] if file.startswith(wheel)]
            assert any(machines[architecture] in file for file in packed), wheel
