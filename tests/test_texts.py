"""What README, man pages and package say by hand is so; make lint compares what is generated."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

import tests
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
UNIT = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
KUBELETS = "kubelet k3s k3s-agent rke2-server rke2-agent k0sworker k0scontroller"
KUBELETS += " snap.microk8s.daemon-kubelite"
# Each resource's name, without the domain.
RESOURCES = {
    name
    for card in {*ttdp.CARDS.values()}
    for unit in ("chip", "board")
    for name in decide([chip(1, card, serial="S")], ttdp.Settings(unit=unit)).resources
}


def configured(directory: Path, text: str) -> ttdp.Settings:
    """Return the settings from a file with this text; raises ConfigError."""
    file = directory / "config.toml"
    file.write_text(text)
    return ttdp.load_settings({"config_file": str(file)}, {})


# -- README ----------------------------------------------------------------------------------------


def shown(command: str) -> str:
    """Return what README shows of a command; see in_general()."""
    (block,) = (each for each in fenced("console") if f"# {command}\n" in each)
    return in_general(re.split(r"(?m)^[$#] .*\n", block.partition(f"# {command}\n")[2])[0])


def in_general(text: str) -> str:
    """Return an output without times, the heartbeat, and where tt-smi is."""
    text = re.sub(r"stalled at \d+|since [-\d: ]+|at most \d+ s", "", text)
    return re.sub(r"\S*/tt-smi", "tt-smi", text)


def test_the_commands_print_readmes_examples(short_tmp: Path) -> None:
    """`check` on a node with one card; `list` and `fix` on one with more, which has a fault."""
    with commanded(short_tmp) as host:
        host.service.more["driver"] = "2.10.0"
        host.node.add("n300", numa_node=0)
        host.node.set_iommu(bdf(1), "identity")
        host.node.set_hugepages(4)
        checked = host.run("check").out.replace(f"{host.root}/node", "")

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

    checked = checked.replace(f"{host.root}/dp", ttdp.Settings().device_plugin_dir)
    assert checked == shown("tt-device-plugin check")
    assert in_general(listed) == shown("tt-device-plugin list")
    assert in_general(terminal.text) == shown(f"tt-device-plugin fix {bdf(2)}")


def test_resources_in_texts_are_those_that_the_program_offers() -> None:
    """README names each; the pods are YAML, and ask for some. README's first pod is one of them."""
    assert not [name for name in RESOURCES if f"`{name}`" not in README]

    for pod in DEB.glob("pods/*"):
        (container,) = yaml.safe_load(pod.read_text())["spec"]["containers"]
        asked = {name for name in container["resources"]["limits"] if name.startswith("tens")}
        assert asked and asked <= RESOURCES, pod
    assert fenced("yaml") == [(DEB / "pods/first-n300.yaml").read_text().partition("\n")[2]]


def test_examples_of_configurations_are_valid(tmp_path: Path) -> None:
    """README's, the file of a first installation, which sets nothing, and the documented one."""
    for block in fenced("toml"):
        assert configured(tmp_path, block) != ttdp.Settings(), block

    text = (DEB / "config-at-first.toml").read_text()
    assert configured(tmp_path, text) == ttdp.Settings()
    for example in ("\n".join(re.findall(r"(?m)^#(\S.*)$", block)) for block in text.split("\n\n")):
        configured(tmp_path, example)

    documented = re.sub(r"(?m)^#(?=[a-z\[])", "", (DEB / "config.toml").read_text())
    settings = configured(tmp_path, documented)
    assert settings.sharing.resources and settings.mounts


def test_no_text_has_the_commands_of_fix_or_installs_by_a_pattern() -> None:
    """They would be old when pasted; of several packages apt takes the last, 0.9.0 after 0.10.0.

    But there is a warning of tt-smi, and a transcript of fix.
    """
    texts = [ROOT / "README.md", ROOT / "CHANGELOG.md"]
    texts += [path for path in DEB.rglob("*") if path.is_file()]

    found = []
    for path in texts:
        for line in path.read_text().splitlines():
            if re.search(r"tt-smi -r|\bmknod\b|/(un)?bind\b|/rescan\b", line):
                found.append((path.name, line))
            assert not re.search(r"apt\S* install[^`]*\*", line) or path.name == "rules"

    assert [name for name, _ in found] == ["README.md", "README.md", "tt-device-plugin.8"]
    assert found[0][1].startswith("    env -u TT_VISIBLE_DEVICES /usr/local/bin/tt-smi -r")
    assert "`tt-smi -r` resets **every** card in the node" in found[1][1]


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


def test_the_maps_of_program_and_tests_have_every_chapter_and_every_file() -> None:
    """CONTRIBUTING.md, in the order of the program, and tests/__init__.py."""
    chapters = re.findall(r"(?m)^# ==== ([A-Z ]+\b)", (ROOT / "ttdp.py").read_text())
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"(?m)^\| ([A-Z ]+) \|", page) == chapters

    names = chapters + [path.stem for path in (ROOT / "tests").glob("test_*.py")]
    assert not [each for each in names if not re.search(rf"\b{each}\b", tests.__doc__ or "")]


# -- man pages -------------------------------------------------------------------------------------


def section(name: str) -> str:
    return re.split(r"(?m)^\.S[hs] ", re.split(rf"(?m)^\.S[hs] {name}(?:\\&)?\n", PAGE)[1])[0]


def labels() -> set[str]:
    """Return all that the feature file can have, without domain and resource."""
    cards = enumerate(("n300", "p300c"), 1)
    chips = [chip(bus, card, numa_node=0, serial="S", firmware="19.4") for bus, card in cards]
    pattern = r"(?m)^tenstorrent\.com/(?:[np]300(?=\.))?([^=]+)="
    return {*re.findall(pattern, ttdp.labels_file(decide(chips)))}


def exit_statuses() -> set[str]:
    """Return those of the program and of its start, and the usual ones."""
    bootstrap = (ROOT / "packaging/bootstrap.py").read_text()
    found = {str(value) for name, value in vars(ttdp).items() if name.startswith("EXIT_")}
    return {"0", "1", "2", "130", *found, *re.findall(r"(?m)^EXIT_\w+ = (\d+)", bootstrap)}


METRICS = {f"tt_device_{name}" for name in ttdp.CHIP_METRICS}
METRICS |= {f"tt_{name}" for name in ttdp.PLUGIN_METRICS}
KINDS = {kind.value.upper() for kind in ttdp.Kind}
ROW = ttdp.view_of_node(
    decide([chip(1)]), {}, (), status="", rejected=None, knows_pods=True, booted_at=0.0
)["chips"][0]


@pytest.mark.parametrize(
    ("name", "pattern", "known"),
    [
        ("FAULTS", r"Sy (\w+) Em", KINDS),
        ("METRICS", r"Li (tt_\w+)", METRICS),
        ("JSON", r"Li (.+)$", {*ROW}),
        ("LABELS", r"Li (?:NAME)?(\S+) Ta", labels()),
        ("EXIT STATUS", r"(\d+)$", exit_statuses()),
    ],
)
def test_a_section_names_what_the_program_has(
    name: str, pattern: str, known: Iterable[str]
) -> None:
    """And no other."""
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


@pytest.mark.parametrize("name", ["tt-device-plugin.8", "tt-device-plugin.toml.5"])
def test_every_reference_leads_somewhere(name: str) -> None:
    """To a section of the same page, or to the other page. The page is installed."""
    text = (DEB / name).read_text()
    sections = re.findall(r"(?m)^\.S[hs] (.+)$", text)
    named = re.findall(r"(?m)^\.Sx (.+?)(?: [.,;)])*$", text)
    assert {*named} <= {each.removesuffix(r"\&") for each in sections}

    pages = {path.removeprefix("debian/") for path in (DEB / "manpages").read_text().split()}
    ours = re.findall(r"(?m)^\.Xr (tt-device-plugin\S*) (\d)", text)
    assert name in pages and {f"{page}.{number}" for page, number in ours} <= pages


# -- the package -----------------------------------------------------------------------------------


def test_the_unit_is_up_before_every_kubelet_and_needs_nothing() -> None:
    """No other unit, and by a hyphen no directory: without one it would end with status 226."""
    before = " ".join(re.findall(r"(?m)^Before=(.*)$", UNIT)).split()
    assert {f"{kubelet}.service" for kubelet in KUBELETS.split()} <= {*before}
    assert not re.search(r"(?m)^(Requires|BindsTo|Requisite|PartOf)=", UNIT)

    drop_in = (DEB / "tt-device-plugin.toml.5").read_text()
    paths = re.findall(r"(?m)^ReadWritePaths=(.+)$", drop_in + UNIT)
    assert len(paths) > 1 and all(path.startswith("-/") for path in " ".join(paths).split())


def test_every_document_and_example_is_installed() -> None:
    """debhelper's lists have each, by its place in packaging/deb; a file that is listed exists."""
    examples = {DEB / "config.toml", *DEB.glob("tt-device-plugin.*"), *DEB.glob("pods/*")}
    examples |= {*DEB.glob("rollout/*")}
    examples -= {*DEB.glob("*.[58]")}
    listed = {
        name: {DEB / path.removeprefix("debian/") for path in (DEB / name).read_text().split()}
        for name in ("examples", "docs")
    }

    assert listed["examples"] == examples
    assert {*DEB.glob("*.md")} < listed["docs"]


def rules() -> list[re.Pattern[str]]:
    """Return the example's patterns for events of the node: for faults, for configurations."""
    example = yaml.safe_load((DEB / "tt-device-plugin.node-problem-detector.yml").read_text())
    journal = json.loads(example["data"]["journal.json"])
    return [re.compile(rule["pattern"]) for rule in journal["rules"]]


def test_each_fault_in_the_log_is_an_event_of_the_node() -> None:
    """A chip's, and a board's of which chips are missing; not one that waits for a pod's end."""
    ill = [chip(bus, fault=kind) for bus, kind in enumerate(ttdp.Kind, 1)]
    half = chip(0x41, "p300c", serial="A" * 16)
    held = [chip(bus, "p300c", serial="B" * 16) for bus in (0x51, 0x52)]
    holds = [hold("p300", bdf(0x51), buses=[0x51])]
    decision = decide([*ill, half, *held], ttdp.Settings(unit="board"), holds)

    conditions = ttdp.conditions(decision, ttdp.problems_of(decision))
    lines = [line for _, line in ttdp.changes({}, conditions)]
    events = [line for line in lines if rules()[0].fullmatch(line)]

    assert events == [line for line in lines if "unhealthy: " in line or " is incomplete: " in line]
    assert len(events) == len(ill) + 1


def test_a_rejected_configuration_is_an_event_of_the_node(tmp_path: Path) -> None:
    """At a reload, and at a start, which ends with it; other lines of the log are none."""
    with pytest.raises(ttdp.ConfigError) as error:
        configured(tmp_path, "unti = 'board'")
    (unknown,) = ttdp.unknown_variables({"TTDP_UNTI": ""})

    _, rule = rules()
    for line in ("", "reload failed, keeping the old configuration: "):
        assert rule.fullmatch(f"{line}{error.value}")
    for line in (unknown, "configuration reloaded", "/run/x/status.sock: permission denied"):
        assert not rule.fullmatch(line)


def test_versions_of_what_is_bundled_are_those_that_are_tested() -> None:
    """shiv.toml pins what the development group does, and make pyz fetches no other."""
    bundled = tomllib.loads((ROOT / "shiv.toml").read_text())
    tested = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    for name, version in bundled["requirements"].items():
        if name != "typing_extensions":  # grpcio's own; the development group leaves it to pip
            assert f"{name}=={version}" in tested
