"""The apt repository as nodes use it: clean systems with a web server on their loopback.

The tests run in the order of this file; each release has one system.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import PACKAGES, Container, require_root
from tests.e2e.host import CONFIG, NEXT, UNIT, Packages
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
URL = "http://127.0.0.1:8000"
# The commands of many-nodes.md, with the address of this server.
INSTALLATION = (
    f"curl -fsSLo /etc/apt/keyrings/{UNIT}-archive-keyring.pgp {URL}/{UNIT}-archive-keyring.pgp",
    f"curl -fsSLo /etc/apt/sources.list.d/{UNIT}.sources {URL}/{UNIT}.sources",
    "apt update",
    f"apt install --yes {UNIT}",
)
# Those for a repository that was copied to the node.
COPIED_REPOSITORY = f"/srv/{UNIT}"
INSTALLATION_OF_COPY = (
    f"cp {COPIED_REPOSITORY}/{UNIT}-archive-keyring.pgp /etc/apt/keyrings",
    f"cp {COPIED_REPOSITORY}/{UNIT}.sources /etc/apt/sources.list.d",
    "apt update",
    f"apt install --yes {UNIT}",
)
# The line of many-nodes.md for unattended-upgrades, in a file beside Debian's own configuration.
PATTERN = "origin=tt-device-plugin,suite=stable"
UNATTENDED = f'Unattended-Upgrade::Origins-Pattern {{ "{PATTERN}"; }};\n'
UNATTENDED_FILE = f"/etc/apt/apt.conf.d/52{UNIT}"
RELEASE = "dists/stable/Release"


@dataclass(frozen=True)
class Publisher:
    """Makes repositories, with a key."""

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

    def publish(
        self, output: Path, *debs: str | Path, key: str = "publisher", url: str = URL
    ) -> str:
        """Make or extend a repository; return the error, if any.

        debs: of this machine, or those of `packages` by their paths in a container.
        """
        paths = [
            self.packages.directory / Path(deb).name if isinstance(deb, str) else deb
            for deb in debs
        ]

        script = (sys.executable, "packaging/repository.py", "--url", url, "--sign-key", key)
        done = self.run(*script, "--output", output, *paths)
        return done.stderr if done.returncode else ""


@pytest.fixture(scope="session")
def publisher(packages: Packages) -> Iterator[Publisher]:
    require_root(apt_ftparchive="apt-utils", gpg="gpg")
    with tempfile.TemporaryDirectory(prefix="ttdp-e2e-", dir="/var/tmp") as work:
        publisher = Publisher(Path(work), packages)
        publisher.make_key("publisher")
        publisher.make_key("another person")
        yield publisher

        publisher.run("gpgconf", "--kill", "all")  # the agent of that directory


class Node(Container):
    """A system without Debian's repositories, beside a web server that serves `repository`."""

    TREE = f"{PACKAGES},curl,unattended-upgrades"

    def __init__(self, suite: str, publisher: Publisher) -> None:
        super().__init__(suite, {publisher.packages.directory: "/srv/packages"}, self.TREE)
        self.repository = self.shared / "repository"
        assert not publisher.publish(self.repository, publisher.packages.current)

    def start(self) -> None:
        self.boot()
        self.shell("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        served = ("--bind=127.0.0.1", "--directory=/srv/shared/repository", "8000")
        self("systemd-run", "--quiet", "--unit=web", "python3", "-m", "http.server", *served)
        wait_until(lambda: self.status_of("curl", "-fsS", URL) == 0, "the web server")

    def version(self) -> str:
        """Return the version of the installed package."""
        return self("dpkg-query", "--show", "--showformat=${Version}", UNIT, check=False).strip()

    def is_active(self) -> bool:
        return self("systemctl", "is-active", UNIT, check=False) == "active\n"

    def update(self) -> str:
        """Run `apt-get update`; return its output if it fails for any repository."""
        done = self.run("apt-get", "--error-on=any", "update")
        return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module", params=SUITES)
def node(request: pytest.FixtureRequest, publisher: Publisher) -> Iterator[Node]:
    with Node(request.param, publisher) as node:
        yield node


@pytest.fixture
def genuine(node: Node) -> Iterator[Path]:
    """The repository, which is restored after a test has changed it."""
    kept = node.repository.with_name("kept")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(node.repository, kept)
    yield node.repository

    node.shell("rm -rf /srv/shared/repository && mv /srv/shared/kept /srv/shared/repository")
    assert not node.update()


# -- installation and upgrade ----------------------------------------------------------------------


def test_installation_in_four_lines(node: Node, publisher: Publisher) -> None:
    """With the key and the sources file; a node fetches only its own index, by hash."""
    output = [node.shell(line) for line in INSTALLATION]
    assert f"Setting up {UNIT}" in output[-1], output[-1]
    assert node.version() == publisher.version and node.is_active()

    requests = node("journalctl", "--unit=web", "--output=cat", "--no-pager")
    by_hash = r"GET /dists/stable/main/binary-(\w+)/by-hash/SHA256/[0-9a-f]{64} .* 200"
    assert {*re.findall(by_hash, requests)} == {node("dpkg", "--print-architecture").strip()}


def test_unattended_upgrades_with_an_edited_configuration(
    node: Node, publisher: Publisher, told: Told
) -> None:
    """With the line of many-nodes.md it installs a newer version; without it, it does not.

    It asks no question, Debian's own patterns stay in force, and the edited file stays.
    """
    node.write(CONFIG, 'log_level = "debug"\n')
    assert not publisher.publish(node.repository, publisher.packages.following)
    assert not node.update()

    node("unattended-upgrade")
    assert node.version() == publisher.version

    node.write(UNATTENDED_FILE, UNATTENDED)
    output = node("unattended-upgrade", "--dry-run", "--debug")
    [allowed] = [line for line in output.splitlines() if line.startswith("Allowed origins are")]
    assert PATTERN in allowed and "label=Debian-Security" in allowed, allowed

    node("unattended-upgrade")
    assert node.version() == NEXT in node("tt-device-plugin", "--version") and node.is_active()
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'
    told(allowed)


def test_back_to_an_earlier_version(node: Node, publisher: Publisher) -> None:
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
    node: Node, genuine: Path, publisher: Publisher, forge: Callable[[Path, Publisher], None]
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
