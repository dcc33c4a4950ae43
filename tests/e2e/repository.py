"""An apt repository, as its publisher makes it, and nodes that have no other one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.container import PACKAGES, Container
from tests.e2e.host import Packages
from tests.e2e.steps import UNIT
from tests.world.processes import ROOT, wait_until

URL = "http://127.0.0.1:8000"  # of a node's own web server
EXAMPLE = "https://apt.example.org"  # the web server's address in all documents


def of_this_server(text: str) -> str:
    """Return a document's text for nodes with a web server of their own."""
    return text.replace(EXAMPLE, URL)


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

        done = self.run("packaging/repository.sh", url, key, output, *paths)
        return done.stderr if done.returncode else ""


class AptNode(Container):
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
