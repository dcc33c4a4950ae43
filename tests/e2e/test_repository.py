"""The apt repository as nodes use it: clean systems with a web server on their loopback.

The tests run in the order of this file; each release has one system.
"""

from __future__ import annotations

import re
import shutil
import subprocess
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
RELEASE = "dists/stable/Release"


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
    """With the key and the sources file; a node fetches only its own index, by hash."""
    output = [node.shell(line) for line in INSTALLATION]
    assert f"Setting up {UNIT}" in output[-1], output[-1]
    assert node.version() == publisher.version and node.is_active()

    requests = node("journalctl", "--unit=web", "--output=cat", "--no-pager")
    by_hash = r"GET /dists/stable/main/binary-(\w+)/by-hash/SHA256/[0-9a-f]{64} .* 200"
    assert {*re.findall(by_hash, requests)} == {node("dpkg", "--print-architecture").strip()}


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


# -- packaging/repository.py -----------------------------------------------------------------------


def contents(repository: Path) -> dict[str, bytes]:
    """Return all files, without signatures and their key, and Release without its date."""
    found: dict[str, bytes] = {}
    for path in sorted(repository.rglob("*")):
        name = str(path.relative_to(repository))
        if path.is_file() and path.suffix not in (".gpg", ".pgp") and path.name != "InRelease":
            found[name] = path.read_bytes()

    found[RELEASE] = re.sub(rb"(?m)^Date: .*$", b"", found[RELEASE])
    return found


def test_the_same_pool_gives_the_same_files(publisher: Publisher, tmp_path: Path) -> None:
    """Whatever the order of packages, and when it is written again; except for signatures."""
    packages, one, two = publisher.packages, tmp_path / "one", tmp_path / "two"
    publisher.publish(one, packages.current, packages.following)
    publisher.publish(two, packages.following, packages.current, key="another person")

    made = contents(one)
    assert made == contents(two) and len([name for name in made if name.startswith("pool/")]) == 2

    publisher.publish(one, packages.following)
    assert contents(one) == made


def test_a_published_package_cannot_change(publisher: Publisher, tmp_path: Path) -> None:
    """Another file with the same name is refused, and nothing is changed."""
    publisher.publish(tmp_path / "made", publisher.packages.current)
    before = contents(tmp_path / "made")

    other = tmp_path / Path(publisher.packages.current).name
    other.write_bytes(b"another")
    assert "cannot change" in publisher.publish(tmp_path / "made", other)
    assert contents(tmp_path / "made") == before


def packed_again(deb: Path, version: str, directory: Path) -> Path:
    """Return a package with these contents and another version."""
    tree = directory / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)

    control = tree / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*$", f"Version: {version}", control.read_text()))

    other = directory / deb.name.replace(f"_{deb.name.split('_')[1]}_", f"_{version}_")
    subprocess.run(["dpkg-deb", "--build", "-Znone", tree, other], check=True)
    return other


def test_indexes_of_the_previous_release_are_kept(publisher: Publisher, tmp_path: Path) -> None:
    """A node that has just read it can still fetch them; older ones are deleted."""
    packages, output = publisher.packages, tmp_path / "made"
    third = packed_again(packages.directory / Path(packages.current).name, "0.0.1", tmp_path)

    named, kept = [], []
    for deb in (packages.current, packages.following, third):
        publisher.publish(output, deb)
        release = (output / RELEASE).read_text()
        named.append({*re.findall(r"(?m)^ ([0-9a-f]{64}) .*/Packages", release)})
        kept.append({path.name for path in output.glob("dists/stable/main/*/by-hash/SHA256/*")})

    assert kept == [named[0], named[0] | named[1], named[1] | named[2]]
    assert named[0] - named[1] and named[1] - named[2]


def test_make_repository(publisher: Publisher, tmp_path: Path) -> None:
    """It has both architectures; without a key it uses a temporary one, and prints a warning."""
    output = tmp_path / "made"
    variables = (f"REPOSITORY={output}", f"REPOSITORY_URL={URL}", "SIGN_KEY=")
    done = publisher.run("make", "--silent", "repository", *variables)

    assert done.returncode == 0, done.stdout + done.stderr
    for architecture in ("amd64", "arm64"):
        assert [*output.glob(f"pool/**/*_{architecture}.deb")]
        packages = (output / f"dists/stable/main/binary-{architecture}/Packages").read_text()
        assert re.findall(r"(?m)^Architecture: (.*)$", packages) == [architecture]

    assert "*** SIGNED WITH A TEMPORARY KEY" in done.stderr
    assert f"URIs: {URL}\n" in (output / f"{UNIT}.sources").read_text()
    assert "Valid-Until" not in (output / RELEASE).read_text()
    assert "Architectures:" not in (output / f"{UNIT}.sources").read_text()
