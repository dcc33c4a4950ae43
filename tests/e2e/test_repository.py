"""The apt repository as nodes use it: a clean system with a web server on its loopback.

The tests are one story in the order of this file, for each release.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import MANY_NODES, root_commands
from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, require_root
from tests.e2e.host import CONFIG, NEXT, Packages
from tests.e2e.machine import Scratch
from tests.e2e.steps import UNIT
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
URL = "http://127.0.0.1:8000"  # of a node's own web server
EXAMPLE = "https://apt.example.org"  # the web server's address in all documents
TREE = f"{PACKAGES},curl,unattended-upgrades"


class Publisher:
    """Makes repositories, with two keys of its own."""

    def __init__(self, work: Path) -> None:
        self._environment = {**os.environ, "GNUPGHOME": str(work)}
        unattended = ["--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        for name in ("publisher", "stranger"):
            key = ["--quick-generate-key", name, "ed25519", "sign", "never"]
            self.run("gpg", *unattended, *key)

    def run(self, *command: str | Path) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def publisher() -> Iterator[Publisher]:
    require_root(apt_ftparchive="apt-utils", gpg="gpg")
    with Scratch() as work:
        publisher = Publisher(work)
        yield publisher
        publisher.run("gpgconf", "--kill", "all")  # the agent of that directory


class AptNode(Container):
    """A system without Debian's repositories, beside a web server that serves `repository`."""

    @property
    def repository(self) -> Path:
        return self.shared / "repository"

    def start(self) -> None:
        self.repository.mkdir()
        self.boot()
        self.shell("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        served = ("--bind=127.0.0.1", "--directory=/srv/shared/repository", "8000")
        self("systemd-run", "--quiet", "--unit=web", "python3", "-m", "http.server", *served)
        wait_until(lambda: self.status_of("curl", "-fsS", URL) == 0, "the web server")

    def follow(self, part: str) -> list[str]:
        """Run many-nodes.md's commands with this part, without questions; return their outputs."""
        commands = (line.replace(EXAMPLE, URL) for line in root_commands(MANY_NODES, part))
        return [self.shell(line.replace("apt install", "apt install --yes")) for line in commands]

    def version(self) -> str:
        """Return the version of the package, whose service must be active."""
        self("systemctl", "is-active", UNIT)
        return self("tt-device-plugin", "--version").split()[-1]


@pytest.fixture(scope="module", params=SUITES)
def node(request: pytest.FixtureRequest, publisher: Publisher) -> Iterator[AptNode]:
    with AptNode(request.param, {}, TREE) as node:
        yield node


def test_installation_in_four_lines(node: AptNode, publisher: Publisher) -> None:
    """`make repository` has both architectures, of which a node fetches one; apt trusts its key."""
    variables = (f"REPOSITORY={node.repository}", f"REPOSITORY_URL={URL}", "SIGN_KEY=publisher")
    publisher.run("make", "--silent", "repository", *variables)

    assert f"Setting up {UNIT}" in node.follow(f"{EXAMPLE}/{UNIT}.sources")[-1]

    published = {path.stem for path in node.repository.glob("pool/**/*.deb")}
    assert published == {f"{UNIT}_{node.version()}_{machine}" for machine in ("amd64", "arm64")}
    requests = node("journalctl", "--unit=web", "--output=cat", "--no-pager")
    indexes = {*re.findall(r"GET /dists/stable/main/binary-(\w+)/Packages\S* .* 200", requests)}
    assert indexes == {node("dpkg", "--print-architecture").strip()}


def test_a_forged_repository_is_rejected(
    node: AptNode, publisher: Publisher, packages: Packages
) -> None:
    """The sources file accepts no other key: apt uses nothing of it."""
    genuine = node.repository.rename(node.shared / "genuine")
    following = packages.directory / Path(packages.following).name
    publisher.run("packaging/repository.sh", URL, "stranger", node.repository, following)

    done = node.run("apt-get", "--error-on=any", "update")

    reason = r"NO_PUBKEY|[Mm]issing key|not signed|No good signature"  # the releases' words
    assert done.returncode and re.search(reason, done.stderr), done
    assert NEXT not in node("apt-cache", "policy", UNIT)
    shutil.rmtree(node.repository)
    genuine.rename(node.repository)


def test_unattended_upgrades(
    node: AptNode, publisher: Publisher, packages: Packages, told: Told
) -> None:
    """With the line of many-nodes.md, and without a question about an edited configuration.

    Debian's own patterns stay in force. A node can go back: published packages stay.
    """
    node.write(CONFIG, 'log_level = "debug"\n')
    following = packages.directory / Path(packages.following).name
    publisher.run("packaging/repository.sh", URL, "publisher", node.repository, following)
    node("apt-get", "--error-on=any", "update")
    before = node.version()
    node("unattended-upgrade")
    assert node.version() == before

    node.follow("Unattended-Upgrade")
    output = node("unattended-upgrade", "--debug")

    assert node.version() == NEXT
    assert node.path(CONFIG).read_text() == 'log_level = "debug"\n'
    [allowed] = re.findall(r"(?m)^Allowed origins are.*$", output)
    assert "label=Debian-Security" in allowed
    told(allowed)
    node("apt-get", "install", "--yes", "--allow-downgrades", f"{UNIT}={before}")
    assert node.version() == before
