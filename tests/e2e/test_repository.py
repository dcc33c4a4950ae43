"""The apt repository as nodes use it: clean systems with a web server on their loopback.

The tests run in the order of this file; each release has one system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documents import DEB, MANY_NODES, root_commands
from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, require_root
from tests.e2e.host import CONFIG, CONFIGURATION, NEXT, Packages
from tests.e2e.machine import Scratch
from tests.e2e.steps import UNIT
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
URL = "http://127.0.0.1:8000"  # of a node's own web server
EXAMPLE = "https://apt.example.org"  # the web server's address in all documents
COPY = f"/srv/{UNIT}"  # where many-nodes.md has a repository that was copied to the node
PATTERN = "origin=tt-device-plugin,suite=stable"


@dataclass(frozen=True)
class Publisher:
    """Makes repositories of these packages, with a key, and has a second key."""

    work: Path
    packages: Packages

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "GNUPGHOME": str(self.work / "gnupg")}

    @property
    def version(self) -> str:
        return self.packages.current.split("_")[1]

    def make_key(self, name: str) -> None:
        (self.work / "gnupg").mkdir(mode=0o700, exist_ok=True)
        unattended = ["--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        key = ["--quick-generate-key", name, "ed25519", "sign", "never"]
        subprocess.run(["gpg", *unattended, *key], env=self.environment, check=True)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True
        )

    def publish(self, output: Path, package: str, key: str = "publisher", url: str = URL) -> None:
        """Make or extend a repository. package: one of `packages`, by its path in a container."""
        deb = self.packages.directory / Path(package).name
        done = self.run("packaging/repository.sh", url, key, output, deb)
        assert done.returncode == 0, done.stderr


class AptNode(Container):
    """A system without Debian's repositories, beside a web server that serves `repository`."""

    TREE = f"{PACKAGES},curl,unattended-upgrades,ansible-core,python3-apt,sudo"

    def __init__(self, suite: str, publisher: Publisher) -> None:
        super().__init__(suite, {publisher.packages.directory: "/srv/packages"}, self.TREE)
        self.repository = self.shared / "repository"
        publisher.publish(self.repository, publisher.packages.current)

    def start(self) -> None:
        self.boot()
        self.shell("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        served = ("--bind=127.0.0.1", "--directory=/srv/shared/repository", "8000")
        self("systemd-run", "--quiet", "--unit=web", "python3", "-m", "http.server", *served)
        wait_until(lambda: self.status_of("curl", "-fsS", URL) == 0, "the web server")

    def follow(self, part: str) -> list[str]:
        """Run many-nodes.md's commands with this part, without questions; return their outputs."""
        commands = (line.replace(EXAMPLE, URL) for line in root_commands(MANY_NODES, part))
        return [self.shell(line.replace("apt install", "apt install --yes")) for line in commands]

    def be_without(self) -> None:
        """Remove the package, its repository and the key."""
        self("dpkg", "--purge", UNIT)
        self.shell(f"rm -f /etc/apt/keyrings/{UNIT}* /etc/apt/sources.list.d/{UNIT}*")
        self.update()

    def has(self, version: str) -> bool:
        """Return whether this version of the package is installed, and its service active."""
        shown = ("dpkg-query", "--show", "--showformat=${Version}", UNIT)
        is_active = self.status_of("systemctl", "is-active", UNIT) == 0
        return is_active and self(*shown, check=False).strip() == version

    def update(self) -> str:
        """Run `apt-get update`; return its output if it fails for any repository."""
        done = self.run("apt-get", "--error-on=any", "update")
        return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def publisher(packages: Packages) -> Iterator[Publisher]:
    require_root(apt_ftparchive="apt-utils", gpg="gpg")
    with Scratch() as work:
        publisher = Publisher(work, packages)
        publisher.make_key("publisher")
        publisher.make_key("another person")
        yield publisher

        publisher.run("gpgconf", "--kill", "all")  # the agent of that directory


@pytest.fixture(scope="module", params=SUITES)
def node(request: pytest.FixtureRequest, publisher: Publisher) -> Iterator[AptNode]:
    with AptNode(request.param, publisher) as node:
        yield node


@pytest.fixture
def genuine(node: AptNode) -> Iterator[Path]:
    """The repository, which is restored after a test has changed it."""
    kept = node.repository.with_name("kept")
    shutil.copytree(node.repository, kept)
    yield node.repository

    shutil.rmtree(node.repository)
    kept.rename(node.repository)
    assert not node.update()


# -- installation and upgrade ----------------------------------------------------------------------


def test_installation_in_four_lines(node: AptNode, publisher: Publisher) -> None:
    """With the key and the sources file; a node fetches only the index of its architecture."""
    output = node.follow(f"{EXAMPLE}/{UNIT}.sources")
    assert f"Setting up {UNIT}" in output[-1], output[-1]
    assert node.has(publisher.version)

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
    publisher.publish(node.repository, publisher.packages.following)
    assert not node.update()

    node("unattended-upgrade")
    assert node.has(publisher.version)

    node.follow("Unattended-Upgrade")
    output = node("unattended-upgrade", "--dry-run", "--debug")
    [allowed] = [line for line in output.splitlines() if line.startswith("Allowed origins are")]
    assert PATTERN in allowed and "label=Debian-Security" in allowed, allowed

    node("unattended-upgrade")
    assert node.has(NEXT) and NEXT in node("tt-device-plugin", "--version")
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'
    told(allowed)


def test_back_to_an_earlier_version(node: AptNode, publisher: Publisher) -> None:
    """By its number: published packages stay."""
    name = f"{UNIT}={publisher.version}"
    node("apt-get", "install", "--yes", "--allow-downgrades", name)
    assert node.has(publisher.version)
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'


# -- forgeries -------------------------------------------------------------------------------------


def sign_with_another_key(repository: Path, publisher: Publisher) -> None:
    shutil.rmtree(repository)
    publisher.publish(repository, publisher.packages.following, key="another person")


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


# -- many nodes ------------------------------------------------------------------------------------


def test_ansible_installs_it_and_changes_nothing_twice(node: AptNode, publisher: Publisher) -> None:
    """The second run changes no task but the check, which stops the roll-out at a bad node."""
    node.be_without()
    cards = SimulatedNode(node.shared / "node")
    cards.add("n300")
    node.write(CONFIG, CONFIGURATION)
    playbook = (DEB / "rollout/ansible.yaml").read_text()
    node.write("/root/playbook.yml", playbook.replace(EXAMPLE, URL))
    node.write("/root/hosts", "[tenstorrent_nodes]\nlocalhost ansible_connection=local\n")
    command = ("ansible-playbook", "--inventory", "/root/hosts", "/root/playbook.yml")

    with Ticker(cards):
        for changed in (4, 1):
            output = node(*command)
            assert re.search(rf"changed={changed} .*failed=0", output), output
            assert node.has(NEXT)

        cards.chip(cards.chips[0].bdf).die()
        wait_until(lambda: node.status_of(UNIT, "check"), "a failed check")
        assert "does not respond" in node(*command, check=False)


def test_a_copied_repository(node: AptNode, publisher: Publisher) -> None:
    """Without a network: `make repository` with a file: address, copied to that directory."""
    node.be_without()
    node("systemctl", "stop", "web")
    publisher.publish(node.shared / "copied", publisher.packages.current, url=f"file:{COPY}")
    node.shell(f"cp -r /srv/shared/copied {COPY}")

    node.follow(f"{COPY}/{UNIT}.sources")
    assert not node.update()
    assert node.has(publisher.version)


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
