#!/usr/bin/env python3
"""Makes an apt repository (suite stable, component main), which any web server can serve.

    repository.py --url URL [--sign-key KEY] [--output DIRECTORY] DEB…

Packages already in the directory's pool stay, so nodes can go back to an earlier version. Beside
pool and indexes there are two files for nodes: tt-device-plugin.sources and the key. The same pool
gives the same bytes, except for the date and the signatures.

There is no Valid-Until. It would limit how long an attacker between node and server can replay old,
validly signed indexes to hide a new version. But if it is not renewed in time, `apt update` fails
on every node.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

NAME = "tt-device-plugin"
SUITE = "stable"
COMPONENT = "main"
ARCHITECTURES = ("amd64", "arm64")
POOL = f"pool/{COMPONENT}/t/{NAME}"
KEYRING = f"{NAME}-archive-keyring.pgp"
TOOLS = {"apt-ftparchive": "apt-utils", "gpg": "gpg", "gpg-agent": "gpg-agent"}
# One kind of hash: apt requests from by-hash/ the strongest one in Release.
ONLY_SHA256 = ("--no-md5", "--no-sha1", "--no-sha512")
# Without Architectures, each node fetches only the index of its own architecture.
SOURCES = """\
Types: deb
URIs: {url}
Suites: {suite}
Components: {component}
Signed-By: /etc/apt/keyrings/{keyring}
"""
# unattended-upgrades selects repositories by Origin and Suite: README.md names both.
RELEASE = {
    "Origin": NAME,
    "Label": NAME,
    "Suite": SUITE,
    "Codename": SUITE,
    "Architectures": " ".join(ARCHITECTURES),
    "Components": COMPONENT,
    "Description": "Kubernetes device plugin for Tenstorrent accelerators",
    "Acquire-By-Hash": "yes",
}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Makes an apt repository.")
    parser.add_argument("debs", nargs="+", type=Path, metavar="DEB", help="added to the pool")
    parser.add_argument("--url", required=True, help="the address of its web server")
    parser.add_argument(
        "--sign-key", default="", help="the key, as gpg knows it; default: a new, temporary one"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("dist/repository"), help="default: %(default)s"
    )
    options = parser.parse_args()
    if not re.match(r"https?://[^/]|file:/", options.url):
        sys.exit(f"--url: {options.url} is not an address such as https://apt.example.org")
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        sys.exit(f"repository.py needs: apt install --no-install-recommends {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="ttdp-gpg-") as home:
        signer = Signer(options.sign_key, Path(home))
        add_packages(options.output, options.debs)
        write_indexes(options.output)
        write_release(options.output, signer)
        write_for_nodes(options.output, options.url, signer)
    for line in warnings(options.debs, options.sign_key):
        print(f"*** {line}", file=sys.stderr)
    print(f"{options.output}: {', '.join(sorted(os.listdir(options.output / POOL)))}")
    return 0


class Signer:
    """The key that signs the repository: an existing or a temporary one."""

    def __init__(self, key: str, home: Path) -> None:
        self._environment = dict(os.environ)
        self._key = key
        if not key:
            self._environment["GNUPGHOME"] = str(home)
            self._key = f"{NAME}, a temporary key"
            without = ["--pinentry-mode", "loopback", "--passphrase", ""]
            self._gpg(*without, "--quick-generate-key", self._key, "ed25519", "sign", "never")

    def sign(self, source: Path, target: Path, how: str) -> None:
        """Write a file's signature, or with "--clearsign" its text with a signature; atomic."""
        half = target.with_name(f".{target.name}.new")
        half.unlink(missing_ok=True)
        self._gpg("--local-user", self._key, "--armor", "--output", str(half), how, str(source))
        half.rename(target)

    def public_key(self) -> bytes:
        """Return the public key in the format of apt's keyrings."""
        exported = self._gpg("--export-options", "export-minimal", "--export", self._key)
        if not exported:
            sys.exit(f"gpg has no public key {self._key}")
        return exported

    def _gpg(self, *arguments: str) -> bytes:
        command = ["gpg", "--batch", "--quiet", "--digest-algo", "SHA512", *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True)
        if done.returncode:
            sys.exit(f"gpg: {done.stderr.decode().strip()}")
        return done.stdout


def add_packages(output: Path, debs: Sequence[Path]) -> None:
    """Add packages to the pool. Exits if the pool has another file of the same name."""
    pool = output / POOL
    pool.mkdir(parents=True, exist_ok=True)
    for deb in debs:
        target = pool / deb.name
        if target.exists() and target.read_bytes() != deb.read_bytes():
            sys.exit(f"{target} exists with other contents: a published package cannot change")
        half = pool / f".{deb.name}.new"
        shutil.copyfile(deb, half)
        half.chmod(0o644)
        half.rename(target)


def write_indexes(output: Path) -> None:
    """Write the package list of each architecture, under its name and its hash."""
    suite = output / "dists" / SUITE
    listed = hashes_of(suite / "Release")
    for architecture, text in package_lists(output).items():
        directory = suite / COMPONENT / f"binary-{architecture}"
        by_hash = directory / "by-hash/SHA256"
        by_hash.mkdir(parents=True, exist_ok=True)
        content = text.encode()
        made = {
            "Packages": content,
            "Packages.gz": gzip.compress(content, mtime=0),
            "Packages.xz": lzma.compress(content),
        }
        digests = {hashlib.sha256(each).hexdigest() for each in made.values()}
        for name, each in made.items():
            write(by_hash / hashlib.sha256(each).hexdigest(), each)
            write(directory / name, each)
        # Keep the files of the previous Release, for nodes that have just read it.
        for path in by_hash.iterdir():
            if path.name not in digests | listed:
                path.unlink()


def package_lists(output: Path) -> dict[str, str]:
    """Return apt-ftparchive's paragraphs for the pool by architecture, sorted by file name."""
    command = ["apt-ftparchive", *ONLY_SHA256, "packages", "pool"]
    made = subprocess.run(command, cwd=output, check=True, stdout=subprocess.PIPE, text=True)
    lists: dict[str, list[tuple[str, str]]] = {architecture: [] for architecture in ARCHITECTURES}
    for stanza in filter(None, made.stdout.split("\n\n")):
        fields = dict(re.findall(r"(?m)^(Architecture|Filename): (.*)$", stanza))
        lists[fields["Architecture"]].append((fields["Filename"], stanza.strip("\n") + "\n"))
    return {
        architecture: "\n".join(text for _, text in sorted(each))
        for architecture, each in lists.items()
    }


def hashes_of(release: Path) -> set[str]:
    """Return the hashes in a Release file; none if it does not exist."""
    return (
        set(re.findall(r"(?m)^ ([0-9a-f]{64}) ", release.read_text()))
        if release.exists()
        else set()
    )


def write_release(output: Path, signer: Signer) -> None:
    """Write Release, with the hash of each index, and both forms of signature that apt reads."""
    suite = output / "dists" / SUITE
    fields = [
        word
        for name, value in RELEASE.items()
        for word in ("-o", f"APT::FTPArchive::Release::{name}={value}")
    ]
    command = ["apt-ftparchive", *ONLY_SHA256, *fields, "release", "."]
    with tempfile.TemporaryDirectory() as directory:
        # In a copy, without the previous Release and without by-hash/, which repeats the indexes.
        ignore = shutil.ignore_patterns("by-hash")
        shutil.copytree(suite / COMPONENT, Path(directory, "indexes", COMPONENT), ignore=ignore)
        made = subprocess.run(
            command, cwd=f"{directory}/indexes", check=True, stdout=subprocess.PIPE
        )
        text = Path(directory, "Release")
        text.write_bytes(made.stdout)
        signer.sign(text, suite / "InRelease", "--clearsign")
        signer.sign(text, suite / "Release.gpg", "--detach-sign")
    write(suite / "Release", made.stdout)


def write_for_nodes(output: Path, url: str, signer: Signer) -> None:
    """Write the two files that a node needs below /etc/apt."""
    sources = SOURCES.format(url=url, suite=SUITE, component=COMPONENT, keyring=KEYRING)
    write(output / f"{NAME}.sources", sources.encode())
    write(output / KEYRING, signer.public_key())


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: the web server may read it at any moment."""
    half = path.with_name(f".{path.name}.new")
    half.write_bytes(content)
    half.chmod(0o644)
    half.rename(path)


def warnings(debs: Sequence[Path], sign_key: str) -> Iterator[str]:
    """Yield the reasons why this repository cannot be published."""
    if not sign_key:
        yield "SIGNED WITH A TEMPORARY KEY: make repository SIGN_KEY=<a key, as gpg knows it>"
    for version in sorted({deb.name.split("_")[1] for deb in debs}):
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            yield f"{version} IS NOT A RELEASE"


if __name__ == "__main__":
    sys.exit(main())
