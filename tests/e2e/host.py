"""One host: a container with the package and simulated cards; its kubelet runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import warnings
import zipfile
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tests.e2e.container import PACKAGES, Container, in_tree
from tests.e2e.steps import UNIT
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import LONG_PATIENCE, wait_until

PYZ = f"/usr/lib/{UNIT}/{UNIT}.pyz"
CONFIG = "/etc/tt-device-plugin/config.toml"
CONFIGURATION = """
root = "/srv/shared/node"
[health]
interval = 0.5
"""
DIRECTORY = "/var/lib/kubelet/device-plugins"
NEXT = "9.9.9"  # the version of the upgrade
USER = 1000  # of the host
# By default, logind deletes a user's files ten seconds after the last session.
LOGIND = "[Login]\nUserStopDelaySec=0\n"
T = TypeVar("T")


@dataclass(frozen=True)
class Packages:
    """The package under test and one of the next version, as paths in the container."""

    directory: Path
    current: str
    following: str

    @classmethod
    def of(cls, deb: Path, work: Path) -> Packages:
        """Copy the package, and make the other one of it in `work`."""
        directory, tree = work / "packages", work / "next"
        directory.mkdir()
        shutil.copy2(deb, directory)
        subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
        zipapp = tree / PYZ.lstrip("/")
        control = tree / "DEBIAN/control"
        control.write_text(re.sub("(?m)^Version: .*", f"Version: {NEXT}", control.read_text()))
        # Of files of one name in a zipapp the last one counts.
        with zipfile.ZipFile(zipapp, "a") as packed, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = packed.read("site-packages/ttdp.py").decode()
            program = re.sub("(?m)^__version__ = .*", f'__version__ = "{NEXT}"', program)
            packed.writestr("site-packages/ttdp.py", program)
            environment = json.loads(packed.read("environment.json")) | {"build_id": NEXT}
            packed.writestr("environment.json", json.dumps(environment))

        following = directory / f"{UNIT}_{NEXT}_{deb.stem.rpartition('_')[2]}.deb"
        pack = ["dpkg-deb", "--root-owner-group", "-Znone", "--build", str(tree), str(following)]
        subprocess.run(pack, check=True, stdout=subprocess.DEVNULL)
        return cls(directory, *(f"/srv/packages/{path.name}" for path in (deb, following)))


class Line(NamedTuple):
    """A line of the daemon in the journal."""

    priority: int
    text: str


class Host(Container):
    """The container, as tests use it. Times are seconds of CLOCK_MONOTONIC, the host's clock."""

    def __init__(self, suite: str, packages: Packages) -> None:
        tree = f"{PACKAGES},libpam-systemd,passwd"
        super().__init__(suite, {packages.directory: "/srv/packages"}, tree)
        self.packages = packages
        self.node = SimulatedNode(self.shared / "node")  # at first without cards
        self.kubelet = Kubelet(self.path(DIRECTORY), pods_come=LONG_PATIENCE)
        self._ticker = Ticker(self.node)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        self._ticker.__enter__()
        self._thread.start()
        self.write("/etc/systemd/logind.conf.d/test.conf", LOGIND)
        in_tree(self.root, "useradd", "--create-home", f"--uid={USER}", "somebody")
        self.boot()
        self._files_before = self.files()

    def delete(self) -> None:
        if self.kubelet.alive:
            self.do(self.kubelet.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._ticker.__exit__()
        super().delete()

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        """Return the result of what the kubelet does, on its loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(LONG_PATIENCE)

    def last_words(self) -> str:
        """Return the end of the journal."""
        shown = ("--no-pager", "--lines=40", "--output=short-monotonic")
        return self("journalctl", *shown, check=False)

    # Files and packages.

    def holds(self, path: str) -> bool:
        """Return whether a path exists as the container sees it, by its mounts and links."""
        return self.status_of("test", "-e", path) == 0

    def files(self) -> set[str]:
        """Return everything in the root tree but what logs and package management keep."""
        kept = "/var/lib/apt /var/lib/dpkg /var/log /var/backups /var/cache/apt /var/cache/debconf "
        kept += "/var/cache/ldconfig /var/tmp /tmp /run /dev /proc /sys"
        found: set[str] = set()
        for place, directories, files in os.walk(self.root):
            below = place.removeprefix(str(self.root))
            directories[:] = [name for name in directories if f"{below}/{name}" not in kept.split()]
            found |= {f"{below}/{name}" for name in (*directories, *files)}
        return found

    def left_behind(self) -> set[str]:
        """Return files that did not exist before the first installation."""
        return self.files() - self._files_before

    def install(self, *packages: str) -> str:
        """Install packages with apt; return its output."""
        return self("apt-get", "install", "--yes", *packages)

    # The service.

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self("systemctl", *words, check=check)

    @contextlib.contextmanager
    def drop_in(self, text: str) -> Iterator[None]:
        """Change the unit within the context, after which the service is started anew."""
        directory = f"/etc/systemd/system/{UNIT}.service.d"
        self.shell(f"systemctl stop {UNIT}")
        self.write(f"{directory}/test.conf", f"[Service]\n{text}")
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

    def status_becomes(self, *parts: str) -> str:
        """Wait until the status text has all these parts, and return it."""

        def text() -> str:
            status = self.property("StatusText")
            return status if all(part in status for part in parts) else ""

        return wait_until(text, lambda: f"{parts} in the status {self.property('StatusText')!r}")

    def is_registered(self, *parts: str) -> None:
        """Wait until the cards are registered with the kubelet, and the status has these parts."""
        self.status_becomes("4 × tenstorrent.com/n300", "registered with kubelet", *parts)

    def journal(self, since: float = 0.0) -> list[Line]:
        """Return the daemon's own lines since a moment."""
        output = self("journalctl", f"--identifier={UNIT}", "--output=json", "--no-pager")
        entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return [
            Line(int(entry["PRIORITY"]), entry["MESSAGE"])
            for entry in entries
            if int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6 >= since
        ]

    def line(self, since: float, part: str) -> Line:
        """Wait for the daemon's first line with a text."""
        return wait_until(
            lambda: [line for line in self.journal(since) if part in line.text],
            f"a line with {part!r} in the journal",
        )[0]
