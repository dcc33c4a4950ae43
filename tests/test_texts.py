"""What README and package say of the program, in files of their own, is what it does. No root, no container."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import ttdp
from tests.e2e.test_metrics import FREE, HOTTEST, UNHEALTHY
from tests.test_resources import NAMES, device
from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEB = ROOT / "packaging/deb"
README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"(?ms)^```.*?^```$", "", README)
TABLES = {"[health]": ttdp.HealthSettings, "[sharing]": ttdp.Sharing, "[[sharing.resources]]": ttdp.SharedResource,
          "[[mounts]]": ttdp.Mount}  # fmt: skip
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


# -- README ------------------------------------------------------------------------------------------------------------


def fenced(language: str) -> list[str]:
    """README's blocks of code in a language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", README)


def cells(heading: str) -> list[list[str]]:
    """The rows of README's tables below a heading, without what marks code."""
    part = re.split(r"(?m)^#+ ", PROSE.split(f"\n## {heading}\n")[1])[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_readme_has_every_option_with_its_default() -> None:
    """Flag, variable, key and default of each, as the program has them, in its order; and every key of the tables."""
    rows = [row[:4] for row in cells("Configuration") if row[0].startswith("--")]
    config_file = ["--config-file", "TTDP_CONFIG_FILE", "", ttdp.DEFAULT_CONFIG_FILE]
    defaults = {option.key: str(getattr(ttdp.Settings(), option.key)) for option in ttdp.OPTIONS}
    options = [
        [o.flag, o.variable, o.key, defaults[o.key].replace("False", "false")] for o in ttdp.OPTIONS
    ]
    assert rows == [config_file, *options]
    keys = {row[2]: row[3] for row in cells("Configuration") if row[2].startswith("[")}
    settings = {
        f"{table} {field.name}": field for table, kind in TABLES.items() for field in fields(kind)
    }
    assert keys.keys() == settings.keys() - {"[sharing] resources"}
    for key in keys:
        if settings[key].default not in (None, "") and isinstance(
            settings[key].default, (str, int, float)
        ):
            assert keys[key] == str(settings[key].default).replace("True", "true").replace(
                "False", "false"
            ), key


def test_readme_names_every_resource() -> None:
    """Every board's, and those of whole boards."""
    for card, (_, arch) in NAMES.items():
        for unit in get_args(ttdp.Unit):
            name = ttdp.resource_name(
                device("0000:01:00.0", arch=arch, pci_card=card), ttdp.Settings(unit=unit)
            )
            assert f"`tenstorrent.com/{name}`" in README, (card, unit)


def limits(document: Any) -> Iterator[str]:
    """What a manifest, or a part of one, asks for."""
    if isinstance(document, dict):
        yield from document.get("limits", ())
    for part in (
        document.values()
        if isinstance(document, dict)
        else document
        if isinstance(document, list)
        else ()
    ):
        yield from limits(part)


def test_readme_manifests_ask_for_what_there_is() -> None:
    """They are YAML, and every resource of ours in them is one that the program offers."""
    blocks = fenced("yaml")
    wanted = {
        name
        for block in blocks
        for name in limits(yaml.safe_load(block))
        if name.startswith("tenstorrent.com/")
    }
    assert len(blocks) >= 3 and wanted
    assert wanted <= {f"tenstorrent.com/{board}" for board, _ in NAMES.values()}


def test_readme_configurations_are_valid(tmp_path: Path) -> None:
    """Each of them, as a file of its own."""
    for number, block in enumerate(fenced("toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        assert ttdp.load_settings({"config_file": str(file)}, {}) != ttdp.Settings(), block


def test_readme_names_every_metric_and_fault() -> None:
    """Those that the program writes, and no others."""
    prefixes = "device|resource|kubelet|allocations|plugin"
    source = (ROOT / "ttdp.py").read_text()
    named = {
        name for row in cells("Metrics") for name in re.findall(rf"tt_(?:{prefixes})_\w+", row[0])
    }
    assert named == set(re.findall(rf'"(tt_(?:{prefixes})_\w+)"', source))
    faults = next(row[1] for row in cells("Metrics") if row[0].startswith("tt_device_fault"))
    assert re.findall(r"`(\w+)", faults)[1:] == [fault.name.lower() for fault in ttdp.Fault]


def test_readme_queries_are_those_that_are_tested() -> None:
    """Word for word, so that what is copied works."""
    assert [query.strip() for query in fenced("promql")] == [
        query.strip() for query in (FREE, UNHEALTHY, HOTTEST)
    ]


def test_readme_links_lead_somewhere() -> None:
    """To files that are there, and to headings of its own."""
    headings = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", PROSE)
    }
    targets = re.findall(r"\]\((?!https://)([^)]*)\)", PROSE)
    assert targets
    for target in targets:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists() and (not anchor or anchor in headings), target


def test_readme_commands_exist() -> None:
    """Every `make` target that it names."""
    makefiles = "".join(
        (ROOT / name).read_text() for name in ("Makefile", "packaging/packaging.mk")
    )
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", makefiles))
    named = re.findall(r"(?m)^[$#] make ((?:[a-z0-9]+ ?)+)|`make (.*?)`", README)
    assert (
        {"demo", "test", "deb"}
        <= {word for words in named for word in " ".join(words).split()}
        <= targets
    )


def test_alerts_are_installed_where_readme_says() -> None:
    """As an example of the package; and they are YAML."""
    name = "tt-device-plugin.rules.yml"
    assert f"/usr/share/doc/tt-device-plugin/examples/{name}" in README
    assert name in (DEB / "examples").read_text()
    assert yaml.safe_load((DEB / name).read_text())["groups"]


# -- the package -------------------------------------------------------------------------------------------------------


def uncommented(text: str) -> str:
    """The configuration with every option switched on: `#key = value` and `#[table]`, but not `# prose`."""
    return re.sub(r"(?m)^#(?=[\[\w])", "", text)


def test_installed_configuration_is_all_comments() -> None:
    """As installed, the configuration changes nothing."""
    assert tomllib.loads((DEB / "config.toml").read_text()) == {}


def test_installed_configuration_shows_every_option_with_its_default(tmp_path: Path) -> None:
    """Uncommented, it is valid, names every option there is, and each with its default."""
    file = tmp_path / "config.toml"
    file.write_text(uncommented((DEB / "config.toml").read_text()))
    shown = tomllib.loads(file.read_text())
    assert set(shown) == {*(option.key for option in ttdp.OPTIONS), "health", "sharing", "mounts"}
    assert set(shown["health"]) == {field.name for field in fields(ttdp.HealthSettings)}
    assert set(shown["sharing"]) == {field.name for field in fields(ttdp.Sharing)}
    assert all(
        set(entry) == {field.name for field in fields(ttdp.SharedResource)}
        for entry in shown["sharing"]["resources"]
    )
    assert all(
        set(mount) == {field.name for field in fields(ttdp.Mount)} for mount in shown["mounts"]
    )
    loaded, default = ttdp.load_settings({"config_file": str(file)}, {}), ttdp.Settings()
    for option in ttdp.OPTIONS:
        assert getattr(loaded, option.key) == getattr(default, option.key), option.key
    for field in fields(ttdp.HealthSettings):
        if field.name != "temperature_limit":  # its default is the card's own
            assert getattr(loaded.health, field.name) == getattr(default.health, field.name), (
                field.name
            )
    assert replace(loaded.sharing, resources=()) == default.sharing
    assert [mount.host for mount in loaded.mounts or ()] == ["/dev/hugepages-1G", "/dev/hugepages"]


def test_man_page_describes_every_flag_and_variable() -> None:
    """Every flag, variable and default, every key that only the file has, and every exit status."""
    page = (DEB / "tt-device-plugin.8").read_text()
    plain = page.replace("\\-", "-")
    for option in ttdp.OPTIONS:
        assert f".It Fl -{option.flag[2:]}" in plain, option.flag
        assert option.variable in plain, option.variable
        default = getattr(ttdp.Settings(), option.key)
        assert str(default).lower() in plain, f"{option.flag}: {default}"
    for table, settings in TABLES.items():
        for field in fields(settings):
            assert (
                re.search(rf"^\.It Li {re.escape(table)} .*\b{field.name}\b", plain, re.M)
                or field.name == "resources"
            )
    flags = {
        f"-{flag}" for flag in re.findall(r"--([a-z-]+)", ttdp.argument_parser().format_help())
    }
    assert flags == set(re.findall(r"^\.It Fl (-[a-z-]+)", plain, re.MULTILINE))
    assert {"0", "1", "2", "78"} <= set(re.findall(r"^\.It (\d+)$", plain, re.MULTILINE))


def test_completion_knows_every_word() -> None:
    """Every command, every flag, and the values of those that have a choice."""
    words = set(re.findall(r"[\w-]+", (DEB / "completion.bash").read_text()))
    help_text = ttdp.argument_parser().format_help()
    assert {f"--{flag}" for flag in re.findall(r"--([a-z-]+)", help_text)} <= words
    for choices in (
        ttdp.ResourceNaming,
        ttdp.DeviceIdStrategy,
        ttdp.VisibleDevices,
        ttdp.Unit,
        ttdp.DeviceListStrategy,
        ttdp.LogLevel,
    ):
        assert set(get_args(choices)) <= words
    assert {"run", "list", "check"} <= words


@pytest.mark.parametrize("kubelet", KUBELETS)
def test_unit_is_ordered_before_every_kubelet_and_requires_none(kubelet: str) -> None:
    """The unit is up before the kubelet, whatever its name."""
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    before = " ".join(re.findall(r"(?m)^Before=(.*)$", unit)).split()
    assert f"{kubelet}.service" in before
    assert not re.search(r"(?m)^(Requires|BindsTo|Requisite|PartOf)=", unit)


def test_versions_of_what_is_bundled_are_those_that_are_tested() -> None:
    """shiv.toml pins what pyproject.toml's development group pins, each with hashes, for every ABI and architecture."""
    bundled = tomllib.loads((ROOT / "shiv.toml").read_text())
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    for name, version in bundled["requirements"].items():
        if name != "typing_extensions":  # grpcio's own; the development group leaves it to pip
            assert f"{name}=={version}" in tested
    machines = {"amd64": "x86_64", "arm64": "aarch64"}
    for architecture in bundled["architectures"]:
        for abi in bundled["abis"]:
            wheel = f"grpcio-{bundled['requirements']['grpcio']}-{abi}-{abi}-"
            assert any(
                file.startswith(wheel) and machines[architecture] in file
                for file in bundled["sha256"]
            ), (
                architecture,
                abi,
            )


def test_package_has_the_version_of_the_program() -> None:
    """Debian's changelog and the program agree."""
    assert (DEB / "changelog").read_text().startswith(f"tt-device-plugin ({ttdp.__version__}) ")
