"""One host: a container with the package, simulated cards and the reference kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests import pythons
from tests.e2e.container import Container
from tests.e2e.remote_kubelet import RemoteKubelet
from tests.e2e.steps import UNIT
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, wait_until

RESOURCE = "tenstorrent.com/n300"
CARDS = ("n300", "n300", "n300", "n300", "p300c")
PYZ = f"/usr/lib/{UNIT}/{UNIT}.pyz"
DIRECTORY = "/var/lib/kubelet/device-plugins"
CONFIG = "/etc/tt-device-plugin/config.toml"
NEXT = "9.9.9"  # the version of the upgrade
KUBELET = f"""
[Unit]
Description=Reference kubelet
StartLimitIntervalSec=0

[Service]
Environment=PYTHONPATH=/srv/project:/srv/shared/python PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/sh -c '{RemoteKubelet.script(DIRECTORY, "/srv/shared")}'

[Install]
WantedBy=multi-user.target
"""
# No heartbeat is missed: on a busy machine, firmware that a thread plays does not keep up.
CONFIGURATION = """
root = "/srv/shared/node"
[health]
interval = 0.5
"""


@dataclass(frozen=True)
class Packages:
    """The package under test and one of the next version, as paths in the container."""

    directory: Path
    current: str
    following: str
    modules: Path  # of this machine: the Python packages in the zipapp, for the reference kubelet

    @classmethod
    def of(cls, deb: Path, work: Path) -> Packages:
        """Copy the package, and build the other one in `work`."""
        directory = work / "packages"
        directory.mkdir()
        shutil.copy2(deb, directory)
        _build_next(deb, directory, work / "next")
        [following] = directory.glob(f"*_{NEXT}_*.deb")

        modules = pythons.bundled(unpacked_zipapp(deb, work / "unpacked"), work / "bundled")
        current, other = (f"/srv/packages/{path.name}" for path in (deb, following))
        return cls(directory, current, other, modules)


def _build_next(deb: Path, directory: Path, source: Path) -> None:
    """Build a copy of the sources as another version."""
    names = ["Makefile", "ttdp.py", "shiv.toml", "README.md", "CHANGELOG.md"]
    names += ["generated", "packaging"]
    work = f"build/{deb.stem.rpartition('_')[2]}"
    fetched = [f"{work}/tools", f"{work}/wheels"]
    names += [name for name in fetched if (ROOT / name).exists()]
    source.mkdir()
    subprocess.run(["cp", "-r", "--parents", *names, source], cwd=ROOT, check=True)

    command = ["make", "deb", f"PACKAGE_VERSION={NEXT}", f"VENV={sys.prefix}"]
    subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL)
    for made in source.glob("dist/*.deb"):
        shutil.copy(made, directory)


def unpacked_zipapp(deb: Path, tree: Path) -> Path:
    """Unpack a package into a directory, and return its zipapp."""
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(tree)], check=True)
    return tree / PYZ.lstrip("/")


class Line(NamedTuple):
    """A line of the daemon in the journal; `at`: seconds of CLOCK_MONOTONIC, when it came there."""

    at: float
    pid: int
    priority: int
    text: str


class Host(Container):
    """The container, as tests use it. Times are seconds of CLOCK_MONOTONIC, the host's clock."""

    def __init__(self, suite: str, packages: Packages) -> None:
        super().__init__(suite, {ROOT: "/srv/project", packages.directory: "/srv/packages"})
        self.packages = packages
        self.node = SimulatedNode(self.shared / "node")  # at first without cards
        self.kubelet = RemoteKubelet(self.shared)
        self._ticker = Ticker(self.node)

    # Its life.

    def start(self) -> None:
        self._ticker.__enter__()
        shutil.copytree(self.packages.modules, self.shared / "python")
        self._install_kubelet()
        self.boot()
        self._files_before = self.files()

    def power_on(self) -> None:
        self.node.boot()  # the daemon reads the boot ID of the simulated node
        super().power_on()

    def delete(self) -> None:
        self._ticker.__exit__()
        super().delete()

    def recover(self) -> None:
        """Undo the changes of a test that has failed."""
        self._install_kubelet()
        self.shell("rm -rf /var/snap; systemctl daemon-reload", check=False)
        self.shell(f"systemctl reset-failed; systemctl --no-block restart {UNIT}", check=False)

    def last_words(self) -> str:
        """Return the end of the journal and of the kubelet's events."""
        shown = ("--no-pager", "--lines=30", "--output=short-monotonic")
        journal = self("journalctl", *shown, check=False)
        return journal + self.kubelet.last_words()

    # The state that a test begins with.

    def be_installed(self) -> None:
        if not self.exists("/usr/bin/tt-device-plugin"):
            self.install(self.packages.current)

    def be_running(self) -> None:
        """Have the daemon with cards, registered with a running kubelet."""
        if not self.node.chips:
            for card in CARDS:
                self.node.add(card)
        if self.path(CONFIG).read_text() != CONFIGURATION:
            self.write(CONFIG, CONFIGURATION)
            self.systemctl("restart", UNIT)

        self.shell(f"systemctl daemon-reload; systemctl start {UNIT} kubelet")
        self.status_becomes("4 × tenstorrent.com/n300", "registered with kubelet")

    # Files and packages.

    def path(self, path: str) -> Path:
        """Return a path of the container as one of this machine, for which links are wrong."""
        return self.root / path.lstrip("/")

    def holds(self, path: str) -> bool:
        """Return whether a path exists as the container sees it, by its mounts and links."""
        return self.status_of("test", "-e", path) == 0

    def files(self) -> set[str]:
        """Return everything in the root tree but what logs and package management keep."""
        kept = ("var/lib/apt", "var/lib/dpkg", "var/log", "var/backups", "var/cache/apt",
                "var/cache/debconf", "var/cache/ldconfig", "tmp", "var/tmp", "run", "dev", "proc",
                "sys")  # fmt: skip
        found: set[str] = set()
        for directory, names, files in os.walk(self.root):
            place = os.path.relpath(directory, self.root)
            paths = {name: os.path.normpath(os.path.join(place, name)) for name in names}
            names[:] = [name for name in names if paths[name] not in kept]
            found.update(os.path.normpath(os.path.join(place, name)) for name in [*names, *files])
        return found

    def left_behind(self) -> list[str]:
        """Return files that did not exist before the first installation."""
        return sorted(self.files() - self._files_before)

    def install(self, *packages: str) -> str:
        """Install packages with apt; return its output."""
        return self("apt-get", "install", "--yes", *packages)

    def _install_kubelet(self) -> None:
        self.write("/etc/systemd/system/kubelet.service", KUBELET)

    # The service.

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self("systemctl", *words, check=check)

    def restarts(self) -> bool:
        """Return whether `systemctl restart` of the service succeeds."""
        return self.status_of("systemctl", "restart", UNIT) == 0

    @contextlib.contextmanager
    def drop_in(self, unit: str, text: str) -> Iterator[None]:
        """Change a unit within the context."""
        directory = f"/etc/systemd/system/{unit}.d"
        self.write(f"{directory}/test.conf", text)
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            self.shell(f"rm -r {directory} && systemctl daemon-reload")

    def property(self, name: str, unit: str = UNIT) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def moment(self, name: str, unit: str = UNIT) -> float:
        """Return a property that is a time, such as "ActiveEnter"."""
        return int(self.property(f"{name}TimestampMonotonic", unit)) / 1e6

    def becomes(self, name: str, value: str) -> None:
        """Wait until a property of the service has a value."""
        wait_until(lambda: self.property(name) == value, f"{name}={value}")

    def status_becomes(self, *parts: str) -> str:
        """Wait until the status text has all these parts, and return it."""

        def text() -> str:
            status = self.property("StatusText")
            return status if all(part in status for part in parts) else ""

        return wait_until(text, lambda: f"{parts} in the status {self.property('StatusText')!r}")

    def journal(self, since: float = 0.0) -> list[Line]:
        """Return the daemon's own lines since a moment."""
        output = self("journalctl", f"--unit={UNIT}", "--output=json", "--no-pager")
        found = []
        for line in output.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("SYSLOG_IDENTIFIER") == UNIT:
                at = int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
                pid, priority = int(entry["_PID"]), int(entry["PRIORITY"])
                found.append(Line(at, pid, priority, str(entry["MESSAGE"])))
        return [line for line in found if line.at >= since]

    def line(self, since: float, part: str) -> Line:
        """Wait for the daemon's first line with a text."""
        return wait_until(
            lambda: [line for line in self.journal(since) if part in line.text],
            f"a line with {part!r} in the journal",
        )[0]
