"""The apt repository as nodes use it: clean systems with a web server on their loopback.

The tests run in the order in which they stand here; each release has one system.
"""

from __future__ import annotations

import json
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
from tests.e2e.container import PACKAGES, Container, Missing
from tests.e2e.host import CONFIG, NEXT, UNIT, Packages
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
URL = "http://127.0.0.1:8000"
TREE = f"{PACKAGES},curl,unattended-upgrades"
# README's, with the address of this server.
INSTALLATION = (
    f"curl -fsSLo /etc/apt/keyrings/{UNIT}-archive-keyring.pgp {URL}/{UNIT}-archive-keyring.pgp",
    f"curl -fsSLo /etc/apt/sources.list.d/{UNIT}.sources {URL}/{UNIT}.sources",
    "apt update",
    f"apt install --yes {UNIT}",
)
UNATTENDED = 'Unattended-Upgrade::Origins-Pattern { "origin=tt-device-plugin"; };\n'
RELEASE = "dists/stable/Release"


@dataclass(frozen=True)
class Publisher:
    """Who makes repositories, with a key."""

    work: Path
    packages: Packages

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "GNUPGHOME": str(self.work / "gnupg")}

    def make_key(self, name: str) -> None:
        (self.work / "gnupg").mkdir(mode=0o700, exist_ok=True)
        without = ["--batch", "--quiet", "--pinentry-mode", "loopback", "--passphrase", ""]
        key = ["--quick-generate-key", name, "ed25519", "sign", "never"]
        subprocess.run(["gpg", *without, *key], env=self.environment, check=True)

    def deb(self, path: str) -> Path:
        """A package by its path in containers."""
        return self.packages.directory / Path(path).name

    def publish(self, output: Path, *debs: str, key: str = "publisher") -> str:
        """Make or extend a repository; returns what is said on stderr."""
        command = [sys.executable, "packaging/repository.py", "--url", URL, "--sign-key", key]
        command += ["--output", str(output), *(str(self.deb(deb)) for deb in debs)]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture(scope="session")
def publisher(deb: Path) -> Iterator[Publisher]:
    if os.geteuid() != 0:
        pytest.exit("this boots system containers: run it as root", returncode=1)
    tools = {
        "systemd-nspawn": "systemd-container",
        "apt-ftparchive": "apt-utils",
        "gpg": "gpg",
        "mmdebstrap": "mmdebstrap",
    }
    if missing := [package for tool, package in tools.items() if not shutil.which(tool)]:
        pytest.exit(f"apt-get install --no-install-recommends {' '.join(missing)}", returncode=1)
    with tempfile.TemporaryDirectory(prefix="ttdp-e2e-", dir="/var/tmp") as work:
        publisher = Publisher(Path(work), Packages.of(deb, Path(work)))
        publisher.make_key("publisher")
        publisher.make_key("somebody else")
        yield publisher
        subprocess.run(["gpgconf", "--kill", "all"], env=publisher.environment)


class Node(Container):
    """A system that knows of no other repository, beside a web server that serves `repository`."""

    def __init__(self, suite: str, publisher: Publisher) -> None:
        super().__init__(suite, {publisher.packages.directory: "/srv/packages"}, TREE)
        self.repository = self.shared / "repository"
        publisher.publish(self.repository, publisher.packages.current)

    def start(self) -> None:
        self.boot()
        self.shell("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*")
        self.write("/etc/apt/apt.conf.d/99test", UNATTENDED)
        served = ("--bind=127.0.0.1", "--directory=/srv/shared/repository", "8000")
        self("systemd-run", "--quiet", "--unit=web", "python3", "-m", "http.server", *served)
        wait_until(lambda: self.status_of("curl", "-fsS", URL) == 0, "the web server")

    def version(self) -> str:
        """Of the package that is installed; empty where none is."""
        return self("dpkg-query", "--show", "--showformat=${Version}", UNIT, check=False).strip()

    def update(self) -> str:
        """What `apt-get update` says; it fails where it has failed for one of the repositories."""
        done = self.run("apt-get", "--error-on=any", "update")
        return done.stdout + done.stderr if done.returncode else ""


@pytest.fixture(scope="module", params=SUITES)
def node(request: pytest.FixtureRequest, publisher: Publisher) -> Iterator[Node]:
    try:
        node = Node(request.param, publisher)
    except Missing as reason:
        pytest.fail(str(reason))
    try:
        node.start()
        yield node
    finally:
        node.delete()


@pytest.fixture
def genuine(node: Node) -> Iterator[Path]:
    """The repository, which is put back as it was after what a test does to it."""
    kept = node.repository.with_name("kept")
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(node.repository, kept)
    yield node.repository
    node.shell("rm -rf /srv/shared/repository && mv /srv/shared/kept /srv/shared/repository")
    assert not node.update()


def test_installation_in_four_lines(node: Node, publisher: Publisher, told: Told) -> None:
    """The key, where the packages are, apt update, apt install; indexes come by hash."""
    (node.shared / "before.json").write_text(json.dumps(sorted(node.files())))
    said = [node.shell(f"{line} 2>&1") for line in INSTALLATION]
    assert f"Setting up {UNIT}" in said[-1], said[-1]
    assert node.version() == publisher.packages.current.split("_")[1]
    assert node("systemctl", "is-active", UNIT).strip() == "active"
    requests = node("journalctl", "--unit=web", "--output=cat", "--no-pager")
    by_hash = r"GET /dists/stable/main/binary-\w+/by-hash/SHA256/[0-9a-f]{64} .* 200"
    assert re.search(by_hash, requests), requests
    answers = zip(INSTALLATION, said, strict=True)
    told("\n    ".join(f"# {line}\n    {text.strip()}" for line, text in answers))


def test_upgrade_with_an_edited_configuration(node: Node, publisher: Publisher, told: Told) -> None:
    """unattended-upgrades takes a newer version and asks nothing; the edited file stays."""
    node.write(CONFIG, 'log_level = "debug"\n')
    publisher.publish(node.repository, publisher.packages.following)
    assert not node.update()
    done = node.run("unattended-upgrade", "--verbose")
    assert done.returncode == 0, done.stderr
    assert node.version() == NEXT and NEXT in node("tt-device-plugin", "--version"), done.stderr
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'
    assert node("systemctl", "is-active", UNIT).strip() == "active"
    told(next(line for line in done.stdout.splitlines() if "upgraded" in line))


def test_back_to_an_earlier_version(node: Node, publisher: Publisher) -> None:
    """By its number: what has been published stays."""
    version = publisher.packages.current.split("_")[1]
    node("apt-get", "install", "--yes", "--allow-downgrades", f"{UNIT}={version}")
    assert node.version() == version
    assert node("systemctl", "is-active", UNIT).strip() == "active"
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "debug"\n'


def test_from_0_1_0_with_an_edited_conffile(node: Node, publisher: Publisher) -> None:
    """It had the configuration as a conffile: unattended-upgrades goes on from there, too."""
    node("apt-get", "purge", "--yes", UNIT)
    node("apt-get", "install", "--yes", "--allow-downgrades", publisher.packages.first)
    node.write(CONFIG, 'log_level = "warning"\n')
    done = node.run("unattended-upgrade", "--verbose")
    assert done.returncode == 0 and node.version() == NEXT, done.stderr
    assert (node.root / CONFIG[1:]).read_text() == 'log_level = "warning"\n'


def change(path: Path, old: bytes, new: bytes) -> None:
    """Change a file's text, not its length."""
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new))


def forge_signed_text(repository: Path, publisher: Publisher) -> None:
    """What was signed is changed."""
    change(repository / "dists/stable/InRelease", b"Suite: stable", b"Suite: stabel")
    (repository / "dists/stable/Release.gpg").unlink()


def forge_index(repository: Path, publisher: Publisher) -> None:
    """The list of packages names another hash for a package."""
    for path in repository.glob("dists/stable/main/binary-*/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"\n")


def sign_with_another_key(repository: Path, publisher: Publisher) -> None:
    """Somebody else publishes a repository of his own in this one's place."""
    shutil.rmtree(repository)
    publisher.publish(repository, publisher.packages.following, key="somebody else")


def no_signature(repository: Path, publisher: Publisher) -> None:
    """There is none at all."""
    for name in ("InRelease", "Release.gpg"):
        (repository / "dists/stable" / name).unlink()


FORGERIES: dict[str, tuple[Callable[[Path, Publisher], None], str]] = {
    "signed text": (forge_signed_text, r"BADSIG|has been manipulated"),
    "index": (forge_index, r"Hash Sum mismatch|unexpected size"),
    "another key": (
        sign_with_another_key,
        r"NO_PUBKEY|[Mm]issing key|not signed|No good signature",
    ),
    "no signature": (no_signature, r"not signed"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_index_is_refused(
    node: Node, genuine: Path, publisher: Publisher, forgery: str, told: Told
) -> None:
    """apt says why, and takes nothing from there."""
    act, words = FORGERIES[forgery]
    node.shell("rm -rf /var/lib/apt/lists/*")
    act(genuine, publisher)
    said = node.update()
    assert re.search(words, said), said
    assert URL not in node("apt-cache", "policy", UNIT)
    told(next(line for line in said.splitlines() if re.search(words, line)))


def test_a_forged_package_is_refused(
    node: Node, genuine: Path, publisher: Publisher, told: Told
) -> None:
    """Of the right name and length, with one byte changed: it is not even unpacked."""
    version = publisher.packages.current.split("_")[1]
    assert node.version() != version
    (deb,) = genuine.glob(f"pool/main/t/{UNIT}/{UNIT}_{version}_*.deb")
    content = bytearray(deb.read_bytes())
    content[len(content) // 2] ^= 1
    deb.write_bytes(content)
    node("apt-get", "clean")
    done = node.run("apt-get", "install", "--yes", "--allow-downgrades", f"{UNIT}={version}")
    assert done.returncode and "Hash Sum mismatch" in done.stderr, done
    assert node.version() == NEXT
    told(next(line for line in done.stderr.splitlines() if "mismatch" in line))


def test_removal_leaves_nothing(node: Node) -> None:
    """apt remove, apt purge: what is left are the two files that say where the repository is."""
    node("apt", "remove", "--yes", UNIT)
    assert (
        node.version()
        and node("systemctl", "show", "--value", "--property=LoadState", UNIT).strip()
        == "not-found"
    )
    node("apt", "purge", "--yes", UNIT)
    before = set(json.loads((node.shared / "before.json").read_text()))
    ours = {
        path
        for path in node.files() - before
        if UNIT in path or "kubernetes" in path or "kubelet" in path
    }
    assert ours == {
        f"etc/apt/keyrings/{UNIT}-archive-keyring.pgp",
        f"etc/apt/sources.list.d/{UNIT}.sources",
    }


# ----------------------------------------------------------------------- what is made, without apt


def contents(repository: Path) -> dict[str, bytes]:
    """Every file but the signatures and their key; of Release all but its date."""
    found = {}
    for path in sorted(repository.rglob("*")):
        name = str(path.relative_to(repository))
        if path.is_file() and path.suffix not in (".gpg", ".pgp") and path.name != "InRelease":
            found[name] = path.read_bytes()
    found[RELEASE] = re.sub(rb"(?m)^Date: .*$", b"", found[RELEASE])
    return found


def test_it_comes_out_the_same(publisher: Publisher, tmp_path: Path) -> None:
    """But for date and signatures: in any order, by any key, and made anew over itself."""
    packages = publisher.packages
    publisher.publish(tmp_path / "one", packages.current, packages.following)
    publisher.publish(tmp_path / "two", packages.following, packages.current, key="somebody else")
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one == two and len([name for name in one if name.startswith("pool/")]) == 2
    publisher.publish(tmp_path / "one", packages.following)
    assert contents(tmp_path / "one") == one


def test_what_was_published_cannot_change(publisher: Publisher, tmp_path: Path) -> None:
    """Another package of the same version is refused, and nothing is changed."""
    publisher.publish(tmp_path / "made", publisher.packages.current)
    before = contents(tmp_path / "made")
    other = tmp_path / publisher.deb(publisher.packages.current).name
    other.write_bytes(b"another")
    command = [sys.executable, "packaging/repository.py", "--url", URL, "--sign-key", "publisher"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "made"), str(other)],
        cwd=ROOT, env=publisher.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode and "cannot change" in done.stderr, done
    assert contents(tmp_path / "made") == before


def test_indexes_of_before_are_kept_once(publisher: Publisher, tmp_path: Path) -> None:
    """Who has read the Release of before still gets what it names; what is older is gone."""
    packages, output = publisher.packages, tmp_path / "made"
    named, there = [], []
    for deb in (packages.current, packages.following, packages.first):
        publisher.publish(output, deb)
        named.append(
            set(re.findall(r"(?m)^ ([0-9a-f]{64}) .*/Packages", (output / RELEASE).read_text()))
        )
        there.append({path.name for path in output.glob("dists/stable/main/*/by-hash/SHA256/*")})
    assert there[0] == named[0]
    assert there[1] == named[0] | named[1]
    assert there[2] == named[1] | named[2]
    assert named[0] - named[1] and named[1] - named[2]


def test_make_repository(publisher: Publisher, tmp_path: Path, told: Told) -> None:
    """Both architectures; without a key a loud line, and one for this time only."""
    output = tmp_path / "made"
    command = ["make", "--silent", "repository", f"REPOSITORY={output}", "SIGN_KEY="]
    done = subprocess.run(
        command, cwd=ROOT, env=publisher.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name.split("_")[2] for path in output.glob("pool/**/*.deb")} == {
        "amd64.deb",
        "arm64.deb",
    }
    for architecture in ("amd64", "arm64"):
        packages = (output / f"dists/stable/main/binary-{architecture}/Packages").read_text()
        assert re.findall(r"(?m)^Architecture: (.*)$", packages) == [architecture]
    assert "*** SIGNED WITH A THROWAWAY KEY" in done.stderr and "NOBODY CAN REACH" in done.stderr, (
        done.stderr
    )
    assert "Valid-Until" not in (output / RELEASE).read_text()
    told(done.stdout.strip().splitlines()[-1])
