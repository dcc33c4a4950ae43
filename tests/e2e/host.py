"""One host: a container with the package, simulated cards and the reference kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
        """Copy the package, and make the other one of it in `work`."""
        directory, tree = work / "packages", work / "next"
        directory.mkdir()
        shutil.copy2(deb, directory)
        subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
        zipapp = tree / PYZ.lstrip("/")
        with zipfile.ZipFile(zipapp) as packed:  # without the program
            wanted = re.compile(r"site-packages/(?!ttdp\.py|generated/)")
            packed.extractall(work, [name for name in packed.namelist() if wanted.match(name)])

        control = tree / "DEBIAN/control"
        control.write_text(re.sub("(?m)^Version: .*", f"Version: {NEXT}", control.read_text()))
        _become_next(zipapp)
        following = directory / f"{UNIT}_{NEXT}_{deb.stem.rpartition('_')[2]}.deb"
        pack = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(following)]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)

        current, other = (f"/srv/packages/{path.name}" for path in (deb, following))
        return cls(directory, current, other, work / "site-packages")


def _become_next(zipapp: Path) -> None:
    """Give a zipapp the next version, as another build; of files of one name the last counts."""
    with zipfile.ZipFile(zipapp, "a") as packed, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = packed.read("site-packages/ttdp.py").decode()
        other = re.sub("(?m)^__version__ = .*", f'__version__ = "{NEXT}"', program)
        packed.writestr("site-packages/ttdp.py", other)
        environment = json.loads(packed.read("environment.json")) | {"build_id": NEXT}
        packed.writestr("environment.json", json.dumps(environment))


class Line(NamedTuple):
    """A line of the daemon in the journal; `at`: seconds of CLOCK_MONOTONIC, when it came there."""

    at: float
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
        self.write("/etc/systemd/system/kubelet.service", KUBELET)
        self.boot()
        self._files_before = self.files()

    def power_on(self) -> None:
        self.node.boot()  # the daemon reads the boot ID of the simulated node
        super().power_on()

    def delete(self) -> None:
        self._ticker.__exit__()
        super().delete()

    def last_words(self) -> str:
        """Return the end of the journal and of the kubelet's events."""
        shown = ("--no-pager", "--lines=30", "--output=short-monotonic")
        return self("journalctl", *shown, check=False) + self.kubelet.last_words()

    # The state that a test begins with, whatever another one that has failed has left.

    def be_installed(self) -> None:
        if not self.exists("/usr/bin/tt-device-plugin"):
            self.install(self.packages.current)

    def be_running(self) -> None:
        """Have the daemon with cards, registered with a running kubelet."""
        for card in CARDS if not self.node.chips else ():
            self.node.add(card)
        self.write("/etc/systemd/system/kubelet.service", KUBELET)
        if self.path(CONFIG).read_text() != CONFIGURATION:
            self.write(CONFIG, CONFIGURATION)
            self.systemctl("restart", UNIT)
        self.shell("systemctl daemon-reload; systemctl reset-failed")
        self.shell(f"systemctl start {UNIT} kubelet")
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

    # The service.

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self("systemctl", *words, check=check)

    def restarts(self) -> bool:
        """Return whether `systemctl restart` of the service succeeds."""
        return self.status_of("systemctl", "restart", UNIT) == 0

    @contextlib.contextmanager
    def drop_in(self, text: str) -> Iterator[None]:
        """Change the unit within the context, after which the service is started anew."""
        directory = f"/etc/systemd/system/{UNIT}.service.d"
        self.write(f"{directory}/test.conf", text)
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            self.shell(f"systemctl stop {UNIT}; rm -r {directory}; systemctl daemon-reload")
            self.systemctl("start", UNIT)

    def property(self, name: str, unit: str = UNIT) -> str:
        return self.systemctl("show", "--value", f"--property={name}", unit).strip()

    def properties(self, *names: str) -> list[str]:
        return [self.property(name) for name in names]

    def moment(self, name: str, unit: str = UNIT) -> float:
        """Return a property that is a time, such as "ActiveEnter"."""
        return int(self.property(f"{name}TimestampMonotonic", unit)) / 1e6

    def becomes(self, name: str, value: str, unit: str = UNIT) -> None:
        """Wait until a property of the service, or of another unit, has a value."""
        wait_until(lambda: self.property(name, unit) == value, f"{name}={value}")

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
                found.append(Line(at, int(entry["PRIORITY"]), str(entry["MESSAGE"])))
        return [line for line in found if line.at >= since]

    def line(self, since: float, part: str) -> Line:
        """Wait for the daemon's first line with a text."""
        return wait_until(
            lambda: [line for line in self.journal(since) if part in line.text],
            f"a line with {part!r} in the journal",
        )[0]
