"""What the package says of the program, in files of its own, is what the program does. No root, no container."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest

import ttdp
from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEB = ROOT / "packaging/deb"
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
        set(entry) == {field.name for field in fields(ttdp.SharedResource)} for entry in shown["sharing"]["resources"]
    )
    assert all(set(mount) == {field.name for field in fields(ttdp.Mount)} for mount in shown["mounts"])
    loaded, default = ttdp.load_settings({"config_file": str(file)}, {}), ttdp.Settings()
    for option in ttdp.OPTIONS:
        assert getattr(loaded, option.key) == getattr(default, option.key), option.key
    for field in fields(ttdp.HealthSettings):
        if field.name != "temperature_limit":  # its default is the card's own
            assert getattr(loaded.health, field.name) == getattr(default.health, field.name), field.name
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
    tables = {"[health]": ttdp.HealthSettings, "[sharing]": ttdp.Sharing, "[[sharing.resources]]": ttdp.SharedResource}
    for table, settings in tables.items():
        for field in fields(settings):
            assert (
                re.search(rf"^\.It Li {re.escape(table)} .*\b{field.name}\b", plain, re.M) or field.name == "resources"
            )
    assert "[[mounts]]" in plain
    flags = {f"-{flag}" for flag in re.findall(r"--([a-z-]+)", ttdp.argument_parser().format_help())}
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
            assert any(file.startswith(wheel) and machines[architecture] in file for file in bundled["sha256"]), (
                architecture,
                abi,
            )


def test_package_has_the_version_of_the_program() -> None:
    """Debian's changelog and the program agree."""
    assert (DEB / "changelog").read_text().startswith(f"tt-device-plugin ({ttdp.__version__}) ")
