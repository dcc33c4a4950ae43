#!/usr/bin/env python3
"""Makes an apt repository (suite stable, component main), which any web server can serve.

    repository.py --url URL [--sign-key KEY] [--output DIRECTORY] DEB…

What is in the directory's pool already stays, so that nodes can go back to an earlier version.
Beside pool and indexes it has what a node needs to know: tt-device-plugin.sources and the key. The
same pool gives the same bytes, but for the date and the signatures.

There is no Valid-Until. It would end what a holder of old, validly signed indexes can do (keep
nodes from seeing a new version, where he is also between them and the server); but where nobody
renews it, `apt update` fails on every node.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NAME = "tt-device-plugin"
SUITE = "stable"
COMPONENT = "main"
ARCHITECTURES = ("amd64", "arm64")
POOL = f"pool/{COMPONENT}/t/{NAME}"
KEYRING = f"{NAME}-archive-keyring.pgp"
TOOLS = {"apt-ftparchive": "apt-utils", "gpg": "gpg", "gpg-agent": "gpg-agent"}
# One kind of hash: apt asks by-hash/ for the strongest that Release has.
ONLY_SHA256 = ("--no-md5", "--no-sha1", "--no-sha512")
SOURCES = """\
Types: deb
URIs: {url}
Suites: {suite}
Components: {component}
Architectures: {architectures}
Signed-By: /etc/apt/keyrings/{keyring}
"""
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
    """Do as the command line says."""
    parser = argparse.ArgumentParser(description="Makes an apt repository.")
    parser.add_argument("debs", nargs="+", type=Path, metavar="DEB", help="goes into the pool")
    parser.add_argument("--url", required=True, help="where it will be served")
    parser.add_argument(
        "--sign-key", default="", help="gpg's name of the key; default: one for this time only"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("dist/repository"), help="default: %(default)s"
    )
    options = parser.parse_args()
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        sys.exit(
            f"make repository needs more: apt install --no-install-recommends {' '.join(missing)}"
        )
    with tempfile.TemporaryDirectory(prefix="ttdp-gpg-") as home:
        signer = Signer(options.sign_key, Path(home))
        add_packages(options.output, options.debs)
        write_indexes(options.output)
        write_release(options.output, signer)
        write_for_nodes(options.output, options.url, signer)
    for line in warnings(options.debs, options.url, options.sign_key):
        print(f"*** {line}", file=sys.stderr)
    print(f"{options.output}: {', '.join(sorted(os.listdir(options.output / POOL)))}")
    return 0


class Signer:
    """The key by which the repository is signed: a named one, or one for this time only."""

    def __init__(self, key: str, home: Path) -> None:
        self._environment = dict(os.environ)
        self._key = key
        if not key:
            self._environment["GNUPGHOME"] = str(home)
            self._key = f"{NAME}, a throwaway key"
            without = ["--pinentry-mode", "loopback", "--passphrase", ""]
            self._gpg(*without, "--quick-generate-key", self._key, "ed25519", "sign", "never")

    def sign(self, source: Path, target: Path, how: str) -> None:
        """Write the signature, or with "--clearsign" the text with its signature, in one step."""
        half = target.with_name(f".{target.name}.new")
        half.unlink(missing_ok=True)
        self._gpg("--local-user", self._key, "--armor", "--output", str(half), how, str(source))
        half.rename(target)

    def public_key(self) -> bytes:
        """Return the key as apt takes it."""
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
    """Put packages into the pool. One that is there already has to be the same to the byte."""
    pool = output / POOL
    pool.mkdir(parents=True, exist_ok=True)
    for deb in debs:
        target = pool / deb.name
        if target.exists() and target.read_bytes() != deb.read_bytes():
            sys.exit(f"{target} is another one: what has been published cannot change")
        half = pool / f".{deb.name}.new"
        shutil.copyfile(deb, half)
        half.chmod(0o644)
        half.rename(target)


def write_indexes(output: Path) -> None:
    """Write the list of packages of each architecture, by its name and by its hash."""
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
        # Those of before stay for who has read the Release of before; older ones go.
        for path in by_hash.iterdir():
            if path.name not in digests | listed:
                path.unlink()


def package_lists(output: Path) -> dict[str, str]:
    """Return what apt-ftparchive says of the pool, by architecture, in the order of file names."""
    command = ["apt-ftparchive", *ONLY_SHA256, "packages", "pool"]
    said = subprocess.run(command, cwd=output, check=True, stdout=subprocess.PIPE, text=True).stdout
    lists: dict[str, list[tuple[str, str]]] = {architecture: [] for architecture in ARCHITECTURES}
    for stanza in filter(None, said.split("\n\n")):
        fields = dict(re.findall(r"(?m)^(Architecture|Filename): (.*)$", stanza))
        lists[fields["Architecture"]].append((fields["Filename"], stanza.strip("\n") + "\n"))
    return {
        architecture: "\n".join(text for _, text in sorted(each))
        for architecture, each in lists.items()
    }


def hashes_of(release: Path) -> set[str]:
    """Return the hashes that a Release file names; none where there is none."""
    return (
        set(re.findall(r"(?m)^ ([0-9a-f]{64}) ", release.read_text()))
        if release.exists()
        else set()
    )


def write_release(output: Path, signer: Signer) -> None:
    """Write Release, which has every index's hash, and sign it, in both ways that apt reads."""
    suite = output / "dists" / SUITE
    fields = [
        word
        for name, value in RELEASE.items()
        for word in ("-o", f"APT::FTPArchive::Release::{name}={value}")
    ]
    command = ["apt-ftparchive", *ONLY_SHA256, *fields, "release", "."]
    with tempfile.TemporaryDirectory() as directory:
        # Away from the Release of before, and from what only has another name.
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
    """Write what a node puts below /etc/apt."""
    fields: Mapping[str, str] = {
        "url": url,
        "suite": SUITE,
        "component": COMPONENT,
        "architectures": " ".join(ARCHITECTURES),
        "keyring": KEYRING,
    }
    write(output / f"{NAME}.sources", SOURCES.format(**fields).encode())
    write(output / KEYRING, signer.public_key())


def write(path: Path, content: bytes) -> None:
    """Write a file in one step: who reads it while it is served has the old one or the new one."""
    half = path.with_name(f".{path.name}.new")
    half.write_bytes(content)
    half.chmod(0o644)
    half.rename(path)


def warnings(debs: Sequence[Path], url: str, sign_key: str) -> Iterator[str]:
    """Yield what keeps this from being a repository to publish."""
    if not sign_key:
        yield "SIGNED WITH A THROWAWAY KEY: make repository SIGN_KEY=<a key, as gpg knows it>"
    if url.split("/")[2].endswith(".invalid"):
        yield f"NOBODY CAN REACH {url}: set REPOSITORY_URL in packaging/packaging.mk"
    for version in sorted({deb.name.split("_")[1] for deb in debs}):
        if not re.fullmatch(r"\d+\.\d+\.\d+", version):
            yield f"{version} IS NO RELEASE"


if __name__ == "__main__":
    sys.exit(main())
