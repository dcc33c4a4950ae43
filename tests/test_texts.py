"""What README and package say by hand is so; what is generated there, make lint compares."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import tests
import ttdp
from tests import chips as chips_module
from tests.commands import Commanded, commanded
from tests.documents import DEB, README, fenced
from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KUBELETS = "kubelet k3s k3s-agent rke2-server rke2-agent k0sworker k0scontroller"
KUBELETS += " snap.microk8s.daemon-kubelite"


def configured(directory: Path, text: str) -> ttdp.Settings:
    """Return the settings from a file with this text; raises ConfigError."""
    file = directory / "config.toml"
    file.write_text(text)
    return ttdp.load_settings({"config_file": str(file)}, {})


def names(unit: str) -> Iterator[str]:
    """Yield every resource's name, without the domain."""
    for card in {*ttdp.CARDS.values()}:
        chip = chips_module.chip(1, card, serial="S")
        yield from chips_module.decide([chip], ttdp.Settings(unit=unit)).resources


def test_readme_names_every_resource() -> None:
    """Every board's, and those of whole boards."""
    for name in (*names("chip"), *names("board")):
        assert f"`{name}`" in README


@pytest.mark.parametrize("pod", [*DEB.glob("pods/*")], ids=lambda path: path.stem)
def test_pods_ask_for_what_there_is(pod: Path) -> None:
    """They are YAML, and every resource of ours in them is one that the program offers.

    README's first pod is one of them.
    """
    text = pod.read_text()
    (container,) = yaml.safe_load(text)["spec"]["containers"]
    asked = {name for name in container["resources"]["limits"] if name.startswith("tenstorrent")}
    assert asked and asked <= {*names("chip"), *names("board")}
    assert pod.stem != "first-n300" or fenced("yaml") == [text.partition("\n")[2]]


# -- README ----------------------------------------------------------------------------------------


def test_readme_is_read_in_a_quarter_of_an_hour() -> None:
    """What only some readers need is in the man pages and the other documents."""
    assert README.count("\n") <= 300


def shown(command: str) -> str:
    """Return what README shows of a command."""
    (block,) = (each for each in fenced("console") if f"# {command}\n" in each)
    return re.split(r"(?m)^[$#] .*\n", block.partition(f"# {command}\n")[2])[0]


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Commanded]:
    with commanded(short_tmp) as host:
        host.service.more["driver"] = "2.10.0"
        yield host


def test_it_lists_readmes_chips(host: Commanded) -> None:
    """All but the heartbeat, and the date."""
    for card, node in (("n300", 0), ("n300", 0), ("p300c", 1)):
        host.node.add(card, numa_node=node)
    values = [(58.5, 91.0), (42.25, 16.5), (61.0, 97.0), (42.0, 24.0)]
    for number, (temperature, power) in enumerate(values):
        bdf = chips_module.bdf(number + 1)
        host.service.rows[bdf] = {"temperature": temperature, "power": power}
        if number < 3:
            host.admit(f"default/train-{number}", bdf)
    host.open(chips_module.bdf(4), 4711, "python3")
    host.node.chip(chips_module.bdf(2)).freeze()

    def in_general(text: str) -> str:
        return re.sub(r"stalled at \d+|since [-\d: ]+", "", text)

    assert in_general(host.run("list").out) == in_general(shown("tt-device-plugin list"))


def test_it_checks_readmes_node(host: Commanded) -> None:
    """All but the place of the simulated node."""
    (chip,) = host.node.add("n300")
    host.node.set_iommu(chip.bdf, "identity")
    host.node.set_hugepages(4)

    printed = host.run("check").out.replace(f"{host.root}/node", "")
    printed = printed.replace(f"{host.root}/dp", ttdp.Settings().device_plugin_dir)
    assert printed == shown("tt-device-plugin check")


def test_readme_configurations_are_valid(tmp_path: Path) -> None:
    """Each of them, as a file of its own, changes something."""
    blocks = fenced("toml")
    assert len(blocks) > 1

    for block in blocks:
        assert configured(tmp_path, block) != ttdp.Settings(), block


def test_only_fix_resets_chips() -> None:
    """No text tells anybody to run its commands: they would be old when somebody pastes them.

    But there is a warning of tt-smi, and a transcript of fix.
    """
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    texts += [path for path in DEB.rglob("*") if path.is_file()]

    found = []
    for path in texts:
        for line in path.read_text().splitlines():
            if re.search(r"tt-smi -r|\bmknod\b|/(un)?bind\b|/rescan\b", line):
                found.append((path.name, line))

    warning = "`tt-smi -r` resets **every** card in the node"
    transcript = "    env -u TT_VISIBLE_DEVICES /usr/local/bin/tt-smi -r"
    assert [name for name, _ in found] == ["README.md", "README.md", "tt-device-plugin.8"]
    assert found[0][1].startswith(transcript) and warning in found[1][1]


@pytest.mark.parametrize("text", [*ROOT.glob("*.md"), *DEB.glob("*.md")], ids=str)
def test_links_lead_somewhere(text: Path) -> None:
    """To files that exist, and to headings of the same page."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", text.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", prose)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}

    for target in re.findall(r"\]\((?!https://)([^)]*)\)", prose):
        path, _, place = target.partition("#")
        assert (text.parent / path).exists() and (not place or place in anchors), target


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(name: str) -> None:
    """All that a text names; variables may come with them."""
    makefiles = [(ROOT / each).read_text() for each in ("Makefile", "packaging/packaging.mk")]
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", "".join(makefiles)))

    named = re.findall(r"(?m)(?:^[$#] |`)make ([a-z0-9-]+)", (ROOT / name).read_text())
    assert "deb" in named and {*named} <= targets


def test_no_text_installs_by_a_pattern() -> None:
    """apt takes the last of several packages, and the shell sorts 0.10.0 before 0.9.0."""
    texts = [*ROOT.glob("*.md"), *DEB.glob("*.md"), *DEB.glob("*.[0-9]")]
    assert not [path for path in texts if re.search(r"apt\S* install[^`\n]*\*", path.read_text())]


def test_the_maps_of_program_and_tests_have_every_chapter_and_every_file() -> None:
    """CONTRIBUTING.md, in the order of the program, and tests/__init__.py."""
    chapters = re.findall(r"(?m)^# ==== ([A-Z ]+\b)", (ROOT / "ttdp.py").read_text())
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"(?m)^\| ([A-Z ]+) \|", page) == chapters

    files = [path.stem for path in (ROOT / "tests").glob("test_*.py")]
    contents = tests.__doc__ or ""
    assert not [name for name in (*chapters, *files) if not re.search(rf"\b{name}\b", contents)]


def test_unit_is_ordered_before_every_kubelet_and_requires_none() -> None:
    """It is up before the kubelet, whatever that is called."""
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    before = " ".join(re.findall(r"(?m)^Before=(.*)$", unit)).split()
    assert {f"{kubelet}.service" for kubelet in KUBELETS.split()} <= {*before}
    assert not re.search(r"(?m)^(Requires|BindsTo|Requisite|PartOf)=", unit)


def test_documented_configuration_is_valid(tmp_path: Path) -> None:
    """With all its lines in force: examples in its tables, defaults above them."""
    text = re.sub(r"(?m)^#(?=[a-z\[])", "", (DEB / "config.toml").read_text())

    settings = configured(tmp_path, text)

    assert settings.health != ttdp.HealthSettings()
    assert settings.sharing.resources and settings.mounts

    default = ttdp.Settings()
    tables = {name: getattr(default, name) for name in ("health", "sharing", "mounts")}
    assert replace(settings, **tables) == default


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

    assert listed("examples") == examples | {"config.toml"}
    assert {path.name for path in DEB.glob("*.md")} < listed("docs")


def test_each_fault_in_the_log_is_an_event_of_the_node() -> None:
    """A chip's, and a board's of which chips are missing; not one that waits for a pod's end."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    rule, *_ = json.loads(example["data"]["journal.json"])["rules"]
    ill = [chips_module.chip(bus, fault=kind) for bus, kind in enumerate(ttdp.Kind, 1)]
    half = chips_module.chip(0x41, "p300c", serial="A" * 16)
    held = [chips_module.chip(bus, "p300c", serial="B" * 16) for bus in (0x51, 0x52)]
    holds = [chips_module.hold("p300", chips_module.bdf(0x51), buses=[0x51])]
    decision = chips_module.decide([*ill, half, *held], ttdp.Settings(unit="board"), holds)

    conditions = ttdp.conditions(decision, ttdp.problems_of(decision))
    lines = [line for _, line in ttdp.changes({}, conditions)]
    events = [line for line in lines if re.fullmatch(rule["pattern"], line)]

    assert events == [line for line in lines if "unhealthy: " in line or " is incomplete: " in line]
    assert len(events) == len(ill) + 1


@pytest.mark.parametrize(
    "content",
    [
        "unit =",
        "unti = 'board'",
        "[[sharing.resources]]\nname = 'n300'\nreplicas = 4\ndevices = 1",
    ],
)
def test_each_rejected_configuration_is_an_event_of_the_node(tmp_path: Path, content: str) -> None:
    """At a reload, and at a start, which ends with it; other lines of the log are none."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    *_, rule = json.loads(example["data"]["journal.json"])["rules"]

    def is_event(line: str) -> bool:
        return re.fullmatch(rule["pattern"], line) is not None

    with pytest.raises(ttdp.ConfigError) as error:
        configured(tmp_path, content)
    assert is_event(f"{error.value}")
    assert is_event(f"reload failed, keeping the old configuration: {error.value}")

    (unknown,) = ttdp.unknown_variables({"TTDP_UNTI": ""})
    for line in (unknown, "configuration reloaded", "/run/x/status.sock: permission denied"):
        assert not is_event(line)


def test_the_first_configuration_sets_nothing(tmp_path: Path) -> None:
    """It is valid as it is, and also if each of its examples is used: together or alone."""
    text = (DEB / "config-at-first.toml").read_text()
    assert all(line.startswith("#") for line in text.splitlines() if line)
    keys = re.findall(r"(?m)^#([a-z_]+) = ", text)
    assert {"unit", "resource_naming", "name", "replicas"} <= {*keys}

    blocks = ["\n".join(re.findall(r"(?m)^#(\S.*)$", block)) for block in text.split("\n\n")]
    for example in ("", *blocks, "\n".join(blocks)):
        configured(tmp_path, example)


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
