"""The man pages name exactly what the program has; options and keys are generated."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch

import pytest

import ttdp
from tests.chips import chip, decide
from tests.documents import DEB
from tests.world.processes import ROOT
from ttdp import Kind

PAGE = (DEB / "tt-device-plugin.8").read_text()
PAGES = sorted(path.name for path in DEB.glob("*.[0-9]"))


def section(name: str) -> str:
    return re.split(r"(?m)^\.Sh ", PAGE.split(f"\n.Sh {name}\n")[1])[0]


def messages(name: str) -> list[str]:
    """Return the heads in a section, without its subsections; CAPITALS stand for anything."""
    return re.findall(r"(?m)^\.It (?:Sy \w+ )?Em (.+)$", section(name).partition("\n.Ss ")[0])


def literals() -> str:
    """Return the text of all literals of the program, without what is filled in."""
    nodes = ast.walk(ast.parse((ROOT / "ttdp.py").read_text()))
    found = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\0".join(text for text in found if isinstance(text, str))


@pytest.mark.parametrize("name", PAGES)
def test_every_reference_leads_somewhere(name: str) -> None:
    """To a section of the same page, or to the other page of the package."""
    text = (DEB / name).read_text()
    sections = re.findall(r"(?m)^\.S[hs] (.+)$", text)
    named = re.findall(r"(?m)^\.Sx (.+?)(?: [.,;)])*$", text)
    assert {*named} <= {section.removesuffix(r"\&") for section in sections}

    ours = re.findall(r"(?m)^\.Xr (tt-device-plugin\S*) (\d)", text)
    ours += re.findall(r"\b(tt-device-plugin[.a-z]*)\((\d)\)", text)
    assert ours and {f"{page}.{number}" for page, number in ours} <= {*PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_installed_without_a_version(name: str) -> None:
    """debhelper has a list; a release would not change a version in a footer."""
    assert f"debian/{name}" in (DEB / "manpages").read_text().split()
    assert re.findall(r"(?m)^\.Os (.*)$", (DEB / name).read_text()) == ["tt-device-plugin"]


def test_the_service_starts_without_the_directories_that_it_may_write_to() -> None:
    """By a hyphen: without it, a directory that is not there ends each start with status 226."""
    drop_in = (DEB / "tt-device-plugin.toml.5").read_text()
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    paths = re.findall(r"(?m)^ReadWritePaths=(.+)$", drop_in + unit)
    assert len(paths) > 1 and all(path.startswith("-/") for path in " ".join(paths).split())


def test_every_document_and_example_is_in_files() -> None:
    """By its name or by a pattern."""
    paths = re.findall(r"(?m)^\.It Pa /usr/share/doc/tt-device-plugin/(\S+)$", section("FILES"))
    names = [place.rpartition("/")[2] for place in (DEB / "docs").read_text().split()]
    places = (DEB / "examples").read_text().split()
    names += [f"examples/{place.rpartition('/')[2]}" for place in places]
    assert len(names) > 10
    assert not [name for name in names if not any(fnmatch(name, path) for path in paths)]


def test_every_key() -> None:
    """The page of the configuration has all of them, also as flags; (8) has the other options."""
    text = (DEB / "tt-device-plugin.toml.5").read_text()
    keys = {name for table in ttdp.TABLES.values() for name in ttdp.keys_of(table)}
    assert {*re.findall(r"(?m)^\.It Li (\w+)$", text)} == keys
    assert {f"-{flag}" for flag in re.findall(r"(?m)^\.Fl (\S+) ;$", text)} == {
        *map(ttdp.flag_of, ttdp.OPTIONS)
    }

    flags = {ttdp.flag_of(key) for key in ("config_file", *ttdp.SWITCHES)}
    named = re.findall(r"(?m)^\.It Fl (-[a-z-]+)", section("OPTIONS"))
    assert {f"-{flag}" for flag in named} == flags | {"--help", "--version"}


def test_every_fault() -> None:
    """FAULTS has each kind, and no step of `fix` for those against which no command helps."""
    entries = re.findall(r"(?ms)^\.It Sy (\w+) Em [^\n]+\n(.*?)(?=^\.It|^\.El)", section("FAULTS"))
    assert {kind for kind, _ in entries} == {each.value.upper() for each in Kind}

    without_step = {kind for kind, text in entries if re.search(r"(?m)^None\b", text)}
    assert without_step == {kind.value.upper() for kind in ttdp.NO_COMMAND_HELPS} | {"NO_DRIVER"}


@pytest.mark.parametrize("name", ["FAULTS", "DIAGNOSTICS"])
def test_every_message_is_one_of_the_program(name: str) -> None:
    """Word by word, between the values that are filled in and what separates parts."""
    known, unknown = literals(), []
    assert len(messages(name)) > 10

    for message in messages(name):
        filled_in = r"\b[A-Z][A-Z_]*\d?\b|\d+ s\b|\d+|kubelet_\w+|[:;(),/>&]"
        pieces = re.split(filled_in, message.replace(r"\(de", "°").replace("Em ", ""))
        unknown += [(message, piece) for piece in pieces if piece.strip() not in known]

    assert not unknown, unknown


def test_every_metric() -> None:
    """METRICS has all that the daemon writes, and no other."""
    named = re.findall(r"(?m)^\.It Li (tt_\w+)", section("METRICS"))
    chips = {f"tt_device_{name}" for name in ttdp.CHIP_METRICS}
    assert {*named} == chips | {f"tt_{name}" for name in ttdp.PLUGIN_METRICS}


def test_every_exit_status() -> None:
    """EXIT STATUS has those of the program and of its start, and the usual ones."""
    bootstrap = (ROOT / "packaging/bootstrap.py").read_text()
    statuses = {value for name, value in vars(ttdp).items() if name.startswith("EXIT_")}
    statuses |= {int(value) for value in re.findall(r"(?m)^EXIT_\w+ = (\d+)", bootstrap)}

    named = re.findall(r"(?m)^\.It (\d+)$", section("EXIT STATUS"))
    assert {*map(int, named)} == statuses | {0, 1, 2, 130}


def test_every_json_key() -> None:
    """JSON has the keys of a row of `list --json`, and no other."""
    view = ttdp.view_of_node(
        decide([chip(1)]), {}, (), status="", rejected=None, knows_pods=True, booted_at=0.0
    )
    (row,) = view["chips"]
    text = re.split(r"(?m)^\.S[sh] ", PAGE.split("\n.Ss JSON\\&\n")[1])[0]
    named = re.findall(r"(?m)^\.It Li (.+)$", text)
    assert {*", ".join(named).replace(" ,", ",").split(", ")} == {*row}


def test_every_label() -> None:
    """LABELS has all that the feature file can have, and no other."""
    firmware = "19.4.0.0"
    cards = enumerate(("n300", "p300c"), 1)
    chips = [chip(bus, card, numa_node=0, serial="S", firmware=firmware) for bus, card in cards]

    written = re.findall(
        r"(?m)^tenstorrent\.com/(?:[np]300(?=\.))?([^=]+)=", ttdp.labels_file(decide(chips))
    )
    named = re.findall(r"(?m)^\.It Li (?:NAME)?(\S+) Ta", section("LABELS"))
    assert {*named} == {*written}
