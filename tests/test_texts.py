"""What README, man pages and package say by hand is so; make lint compares what is generated."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.commands import commanded
from tests.documents import DEB, README, fenced
from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (DEB / "tt-device-plugin.8").read_text()
KUBELETS = "kubelet k3s k3s-agent rke2-server rke2-agent k0sworker k0scontroller"
KUBELETS += " snap.microk8s.daemon-kubelite"


def configured(directory: Path, text: str) -> ttdp.Settings:
    """Return the settings from a file with this text; raises ConfigError."""
    file = directory / "config.toml"
    file.write_text(text)
    return ttdp.load_settings({"config_file": str(file)}, {})


# -- README and its like ---------------------------------------------------------------------------


def test_the_commands_print_readmes_examples(short_tmp: Path) -> None:
    """`check` on a node with one card; `list` and `fix` on one with more, which has a fault.

    All but times, the heartbeat, and where things are.
    """
    with commanded(short_tmp) as host:
        host.service.more["driver"] = "2.10.0"
        host.node.add("n300", numa_node=0)
        host.node.set_iommu(bdf(1), "identity")
        host.node.set_hugepages(4)
        checked = host.run("check").out

        host.node.add("n300", numa_node=0)
        host.node.add("p300c", numa_node=1)
        values = [(58.5, 91.0), (42.25, 16.5), (61.0, 97.0), (42.0, 24.0)]
        for number, (temperature, power) in enumerate(values):
            address = bdf(number + 1)
            host.service.rows[address] = {"temperature": temperature, "power": power}
            if number < 3:
                host.admit(f"default/train-{number}", address)
        host.open(bdf(4), 4711, "python3")
        host.node.chip(bdf(2)).freeze()
        listed = host.run("list").out

        with host.terminal("fix", bdf(2)) as terminal:
            terminal.shows("Do this? [y/N] ")
            terminal.type("y\n")
            terminal.ended()

    def in_general(text: str) -> str:
        places = rf"{host.root}/node|\S*(?=/tt-smi)"
        text = re.sub(rf"stalled at \d+|since [-\d: ]+|at most \d+ s|{places}", "", text)
        return text.replace(f"{host.root}/dp", ttdp.Settings().device_plugin_dir)

    for command, text in ("check", checked), ("list", listed), (f"fix {bdf(2)}", terminal.text):
        prompt = f"# tt-device-plugin {command}\n"
        (block,) = (each for each in fenced("console") if prompt in each)
        shown = re.split(r"(?m)^[$#] .*\n", block.partition(prompt)[2])[0]
        assert in_general(text) == in_general(shown)


def test_resources_in_texts_are_those_that_the_program_offers() -> None:
    """README names each; the pods are YAML, and ask for some. README's first pod is one of them."""
    resources = set()
    for card in {*ttdp.CARDS.values()}:
        for unit in ("chip", "board"):
            settings = ttdp.Settings(unit=unit)
            resources |= {*decide([chip(1, card, serial="S")], settings).resources}
    assert not [name for name in resources if f"`{name}`" not in README]

    for pod in DEB.glob("pods/*"):
        (container,) = yaml.safe_load(pod.read_text())["spec"]["containers"]
        asked = {name for name in container["resources"]["limits"] if name.startswith("tens")}
        assert asked and asked <= resources, pod
    assert fenced("yaml") == [(DEB / "pods/first-n300.yaml").read_text().partition("\n")[2]]


def test_examples_of_configurations_are_valid(tmp_path: Path) -> None:
    """README's, the file of a first installation, which sets nothing, and the documented one."""
    for block in fenced("toml"):
        assert configured(tmp_path, block) != ttdp.Settings(), block

    text = (DEB / "config-at-first.toml").read_text()
    assert configured(tmp_path, text) == ttdp.Settings()
    for block in text.split("\n\n"):
        configured(tmp_path, "\n".join(re.findall(r"(?m)^#(\S.*)$", block)))

    documented = re.sub(r"(?m)^#(?=[a-z\[])", "", (DEB / "config.toml").read_text())
    settings = configured(tmp_path, documented)
    assert settings.sharing.resources and settings.mounts


def test_no_text_has_the_commands_of_fix() -> None:
    """They would be old when somebody pastes them. README's example of fix shows one."""
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md", *filter(Path.is_file, DEB.rglob("*"))]
    text = "".join(each.read_text() for each in texts)
    commands = re.findall(r"tt-smi -r [/0-9A-Z$]|\bmknod\b|/(?:un)?bind\b|/rescan\b", text)
    assert commands == ["tt-smi -r /"]


@pytest.mark.parametrize("text", [*ROOT.glob("*.md"), *DEB.glob("*.md")], ids=str)
def test_links_and_make_targets_exist(text: Path) -> None:
    """Links lead to files, and to headings of the same page."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", text.read_text())
    headings = re.findall(r"(?m)^#+ (.*)$", prose)
    anchors = {re.sub(r"[^a-z0-9 -]", "", each.lower()).replace(" ", "-") for each in headings}
    for target in re.findall(r"\]\((?!https://)([^)]*)\)", prose):
        path, _, place = target.partition("#")
        assert (text.parent / path).exists() and (not place or place in anchors), target

    makefiles = [(ROOT / each).read_text() for each in ("Makefile", "packaging/packaging.mk")]
    targets = re.findall(r"(?m)^([a-z0-9-]+):", "".join(makefiles))
    named = re.findall(r"(?m)(?:^[$#] |`)make ([a-z0-9-]+)", text.read_text())
    assert {*named} <= {*targets}


# -- man pages -------------------------------------------------------------------------------------


def section(name: str) -> str:
    return re.split(r"(?m)^\.S[hs] ", re.split(rf"(?m)^\.S[hs] {name}(?:\\&)?\n", PAGE)[1])[0]


def sections() -> dict[str, tuple[str, set[str]]]:
    """Return the form of a section's items, and which there must be."""
    bootstrap = (ROOT / "packaging/bootstrap.py").read_text()
    statuses = {"0", "1", "2", "130", *re.findall(r"(?m)^EXIT_\w+ = (\d+)", bootstrap)}
    statuses |= {str(value) for name, value in vars(ttdp).items() if name.startswith("EXIT_")}
    metrics = {f"tt_device_{name}" for name in ttdp.CHIP_METRICS}
    metrics |= {f"tt_{name}" for name in ttdp.PLUGIN_METRICS}

    chips = [chip(1, "n300", firmware="19.4"), chip(2, "p300c", serial="S", firmware="19.4")]
    label = r"(?m)^tenstorrent\.com/(?:[np]300(?=\.))?([^=]+)="
    labels = {*re.findall(label, ttdp.labels_file(decide(chips)))}
    more: dict[str, Any] = {"status": "", "rejected": None, "knows_pods": True, "booted_at": 0.0}
    row = ttdp.view_of_node(decide(chips), {}, (), **more)["chips"][0]

    return {
        "FAULTS": (r"Sy (\w+) Em", {kind.value.upper() for kind in ttdp.Kind}),
        "METRICS": (r"Li (tt_\w+)", metrics),
        "JSON": (r"Li (.+)$", {*row}),
        "LABELS": (r"Li (?:NAME)?(\S+) Ta", labels),
        "EXIT STATUS": (r"(\d+)$", statuses),
    }


@pytest.mark.parametrize("name", sections())
def test_a_section_names_what_the_program_has(name: str) -> None:
    """And no other."""
    pattern, known = sections()[name]
    named = re.findall(rf"(?m)^\.It {pattern}", section(name))
    assert {*" ".join(named).replace(" ,", "").split()} == known


@pytest.mark.parametrize("name", ["FAULTS", "DIAGNOSTICS"])
def test_every_message_is_one_of_the_program(name: str) -> None:
    """Word by word, between the values that are filled in and what separates parts."""
    nodes = ast.walk(ast.parse((ROOT / "ttdp.py").read_text()))
    known = "\0".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    messages = re.findall(r"(?m)^\.It (?:Sy \w+ )?Em (.+)$", section(name))
    assert len(messages) > 10

    filled_in = r"\b[A-Z][A-Z_]*\d?\b|\d+ s\b|\d+|kubelet_\w+|[:;(),/>&]"
    for message in messages:
        pieces = re.split(filled_in, message.replace(r"\(de", "°").replace("Em ", ""))
        assert not [piece for piece in pieces if piece.strip() not in known], message


@pytest.mark.parametrize("page", [*DEB.glob("*.[58]")], ids=lambda page: page.name)
def test_every_reference_leads_somewhere(page: Path) -> None:
    """To a section of the same page, or to the other page."""
    text = page.read_text()
    named = re.findall(r"(?m)^\.Sx (.+?)(?: [.,;)])*$", text)
    assert {*named} <= {*re.findall(r"(?m)^\.S[hs] (.+?)(?:\\&)?$", text)}
    for name, number in re.findall(r"(?m)^\.Xr (tt-device-plugin\S*) (\d)", text):
        assert (DEB / f"{name}.{number}").exists()


# -- the package -----------------------------------------------------------------------------------


def test_the_unit_is_up_before_every_kubelet_and_needs_nothing() -> None:
    """No other unit, and by a hyphen no directory: without one it would end with status 226."""
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    before = " ".join(re.findall(r"(?m)^Before=(.*)$", unit)).split()
    assert {f"{kubelet}.service" for kubelet in KUBELETS.split()} <= {*before}
    assert not re.search(r"(?m)^(Requires|BindsTo|Requisite|PartOf)=", unit)

    drop_in = (DEB / "tt-device-plugin.toml.5").read_text()
    paths = re.findall(r"(?m)^ReadWritePaths=(.+)$", drop_in + unit)
    assert len(paths) > 1 and all(path.startswith("-/") for path in " ".join(paths).split())


def test_every_page_document_and_example_is_installed() -> None:
    """debhelper's lists have each, by its place in packaging/deb; a file that is listed exists."""
    pages, examples, documents = (
        {DEB / path.removeprefix("debian/") for path in (DEB / name).read_text().split()}
        for name in ("manpages", "examples", "docs")
    )
    assert pages == {*DEB.glob("*.[58]")}
    examples_of = ("tt-device-plugin.*", "config.toml", "pods/*", "rollout/*")
    assert examples == {path for each in examples_of for path in DEB.glob(each)} - pages
    assert {*DEB.glob("*.md")} < documents


def test_each_fault_and_each_rejected_configuration_is_an_event_of_the_node(tmp_path: Path) -> None:
    """By the patterns of the example: also a board of which chips are missing; nothing else is."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    rules = json.loads(example["data"]["journal.json"])["rules"]
    ill = [chip(bus, fault=kind) for bus, kind in enumerate(ttdp.Kind, 1)]
    half = chip(0x41, "p300c", serial="A" * 16)
    held = [chip(bus, "p300c", serial="B" * 16) for bus in (0x51, 0x52)]
    holds = [hold("p300", bdf(0x51), buses=[0x51])]
    decision = decide([*ill, half, *held], ttdp.Settings(unit="board"), holds)

    conditions = ttdp.conditions(decision, ttdp.problems_of(decision))
    lines = [line for _, line in ttdp.changes({}, conditions)]
    faults = [line for line in lines if "unhealthy: " in line or " is incomplete: " in line]
    with pytest.raises(ttdp.ConfigError) as error:
        configured(tmp_path, "unti = 'board'")
    rejected = [f"{error.value}", f"reload failed, keeping the old configuration: {error.value}"]

    lines += [*rejected, *ttdp.unknown_variables({"TTDP_UNTI": ""}), "configuration reloaded"]
    events = [line for line in lines if any(re.fullmatch(rule["pattern"], line) for rule in rules)]
    assert events == faults + rejected and len(faults) == len(ill) + 1


def test_versions_of_what_is_bundled_are_those_that_are_tested() -> None:
    """shiv.toml pins what the development group does."""
    bundled = tomllib.loads((ROOT / "shiv.toml").read_text())["requirements"]
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    del bundled["typing_extensions"]  # grpcio's own; the development group leaves it to pip
    assert {f"{name}=={version}" for name, version in bundled.items()} <= {*map(str, tested)}
