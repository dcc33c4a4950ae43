"""The apt repository as nodes use it: clean systems with a web server on their loopback.

The tests run in the order of this file; each release has one system.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.documents import MANY_NODES, root_commands
from tests.e2e.conftest import Told
from tests.e2e.host import CONFIG, NEXT
from tests.e2e.repository import EXAMPLE, URL, AptNode, Publisher, of_this_server
from tests.e2e.steps import UNIT

SUITES = ("bookworm", "trixie")
# The commands of many-nodes.md, without questions.
INSTALLATION = [
    of_this_server(line).replace("apt install", "apt install --yes")
    for line in root_commands(MANY_NODES, f"{EXAMPLE}/{UNIT}.sources")
]
UNATTENDED = root_commands(MANY_NODES, "Unattended-Upgrade")
PATTERN = "origin=tt-device-plugin,suite=stable"


@pytest.fixture(scope="module", params=SUITES)
def node(request: pytest.FixtureRequest, publisher: Publisher) -> Iterator[AptNode]:
    with AptNode(request.param, publisher) as node:
        yield node


@pytest.fixture
def genuine(node: AptNode) -> Iterator[Path]:
    """The repository, which is restored after a test has changed it."""
    kept = node.repository.with_name("kept")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(node.repository, kept)
    yield node.repository

    node.shell("rm -rf /srv/shared/repository && mv /srv/shared/kept /srv/shared/repository")
    assert not node.update()


# -- installation and upgrade ----------------------------------------------------------------------


def test_installation_in_four_lines(node: AptNode, publisher: Publisher) -> None:
    """With the key and the sources file; a node fetches only the index of its architecture."""
    output = [node.shell(line) for line in INSTALLATION]
    assert f"Setting up {UNIT}" in output[-1], output[-1]
    assert node.version() == publisher.version and node.is_active()

    requests = node("journalctl", "--unit=web", "--output=cat", "--no-pager")
    indexes = re.findall(r"GET /dists/stable/main/binary-(\w+)/Packages\S* .* 200", requests)
    assert {*indexes} == {node("dpkg", "--print-architecture").strip()}


def test_unattended_upgrades_with_an_edited_configuration(
    node: AptNode, publisher: Publisher, told: Told
) -> None:
    """With the line of many-nodes.md it installs a newer version; without it, it does not.

    It asks no question, Debian's own patterns stay in force, and the edited file stays.
    """
    node.write(CONFIG, 'log_level = "debug"\n')
    assert not publisher.publish(node.repository, publisher.packages.following)
    assert not node.update()

    node("unattended-upgrade")
    assert node.version() == publisher.version

    for line in UNATTENDED:
        node.shell(line)
    output = node("unattended-upgrade", "--dry-run", "--debug")
    [allowed] = [line for line in output.splitlines() if line.startswith("Allowed origins are")]
    assert PATTERN in allowed and "label=Debian-Security" in allowed, allowed

    node("unattended-upgrade")
    assert node.version() == NEXT in node("tt-device-plugin", "--version") and node.is_active()
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'
    told(allowed)


def test_back_to_an_earlier_version(node: AptNode, publisher: Publisher) -> None:
    """By its number: published packages stay."""
    name = f"{UNIT}={publisher.version}"
    node("apt-get", "install", "--yes", "--allow-downgrades", name)
    assert node.version() == publisher.version and node.is_active()
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'


# -- forgeries -------------------------------------------------------------------------------------


def sign_with_another_key(repository: Path, publisher: Publisher) -> None:
    shutil.rmtree(repository)
    assert not publisher.publish(repository, publisher.packages.following, key="another person")


def remove_signatures(repository: Path, publisher: Publisher) -> None:
    for name in ("InRelease", "Release.gpg"):
        (repository / "dists/stable" / name).unlink()


FORGERIES: dict[Callable[[Path, Publisher], None], str] = {
    sign_with_another_key: r"NO_PUBKEY|[Mm]issing key|not signed|No good signature",
    remove_signatures: r"not signed",
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_forged_repository_is_rejected(
    node: AptNode, genuine: Path, publisher: Publisher, forge: Callable[[Path, Publisher], None]
) -> None:
    """The sources file accepts no other key: apt prints the reason, and uses nothing of it."""
    node.shell("rm -rf /var/lib/apt/lists/*")
    forge(genuine, publisher)

    output = node.update()
    assert re.search(FORGERIES[forge], output), output
    assert URL not in node("apt-cache", "policy", UNIT)


# -- make repository -------------------------------------------------------------------------------


def test_make_repository(publisher: Publisher, tmp_path: Path) -> None:
    """It has a package and an index for each architecture, and the two files for nodes."""
    output = tmp_path / "made"
    variables = (f"REPOSITORY={output}", f"REPOSITORY_URL={URL}", "SIGN_KEY=publisher")
    done = publisher.run("make", "--silent", "repository", *variables)

    assert done.returncode == 0, done.stdout + done.stderr
    for architecture in ("amd64", "arm64"):
        assert [*output.glob(f"pool/**/*_{architecture}.deb")]
        packages = (output / f"dists/stable/main/binary-{architecture}/Packages").read_text()
        assert re.findall(r"(?m)^Architecture: (.*)$", packages) == [architecture]

    sources = (output / f"{UNIT}.sources").read_text()
    assert f"URIs: {URL}\n" in sources and "Architectures:" not in sources
    assert "Valid-Until" not in (output / "dists/stable/Release").read_text()
