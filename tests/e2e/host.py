"""One host: a container with the package, simulated cards and the reference kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.container import Container
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import PATIENCE, ROOT, wait_until

UNIT = "tt-device-plugin"
RESOURCE = "tenstorrent.com/n300"
CARDS = ("n300", "n300", "n300", "n300", "p300c")
DIRECTORY = "/var/lib/kubelet/device-plugins"
CONFIG = "/etc/tt-device-plugin/config.toml"
DROP_IN = f"/etc/systemd/system/{UNIT}.service.d/test.conf"
NEXT = "9.9.9"  # the version of the upgrade
KUBELET = """
[Unit]
Description=Reference kubelet
StartLimitIntervalSec=0

[Service]
Environment=PYTHONPATH=/srv/project:/srv/shared/python PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/sh -c 'exec /usr/bin/python3 -m tests.world.kubelet --json %s \\
    <>/srv/shared/input >>/srv/shared/events'

[Install]
WantedBy=multi-user.target
"""
CONFIGURATION = """
sysfs_root = "/srv/shared/node/sys"
dev_root = "/srv/shared/node/dev"
proc_root = "/srv/shared/node/proc"
[health]
interval = 0.5
"""


@dataclass(frozen=True)
class Packages:
    """The package under test and one of the next version, as paths in the container."""

    directory: Path
    current: str
    following: str
    modules: Path
    """The Python packages in the zipapp, with which the reference kubelet runs in the container."""

    @classmethod
    def of(cls, deb: Path, work: Path) -> Packages:
        """Copy the package, and build the other one in `work`."""
        directory = work / "packages"
        directory.mkdir()
        shutil.copy2(deb, directory)
        _build_next(deb, directory, work / "next")
        following = next(path.name for path in directory.iterdir() if f"_{NEXT}_" in path.name)
        with zipfile.ZipFile(_zipapp_of(deb, work / "unpacked")) as packed:
            names = [name for name in packed.namelist() if name.startswith("site-packages/")]
            packed.extractall(work, names)
        current, following = (f"/srv/packages/{name}" for name in (deb.name, following))
        return cls(directory, current, following, work / "site-packages")


def _build_next(deb: Path, output: Path, source: Path) -> None:
    """Build the sources as another version."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("generated", "packaging", "build/wheels"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("ttdp.py", "shiv.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "packaging/build_deb.py", "--output", str(output)]
    command += ["--no-lintian", "--version", NEXT]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(int(deb.stat().st_mtime))}
    subprocess.run(command, cwd=source, check=True, env=environ, stdout=subprocess.DEVNULL)


def _zipapp_of(deb: Path, tree: Path) -> Path:
    """Unpack a package, and return its zipapp."""
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(tree)], check=True)
    return tree / f"usr/lib/{UNIT}/{UNIT}.pyz"


class Host(Container):
    """The container, as tests use it. Times are seconds of CLOCK_MONOTONIC, the host's clock."""

    def __init__(self, suite: str, packages: Packages) -> None:
        super().__init__(suite, {ROOT: "/srv/project", packages.directory: "/srv/packages"})
        self.packages = packages
        shutil.copytree(packages.modules, self.shared / "python")
        os.mkfifo(self.shared / "input")
        self._events = self.shared / "events"
        self._events.touch()
        self._node: SimulatedNode | None = None
        self._heartbeats = contextlib.ExitStack()

    def start(self) -> None:
        self.install_kubelet()
        self.boot()
        self._files_before = self.files()

    def boot(self, begun: Callable[[], object] = lambda: None) -> float:
        if self._node:
            self._node.boot()  # the daemon reads the boot ID of the simulated node
        return super().boot(begun)

    def delete(self) -> None:
        self._heartbeats.close()
        super().delete()

    # The state that a test begins with.

    def be_installed(self) -> None:
        if not self.exists("/usr/bin/tt-device-plugin"):
            self.install(self.packages.current)

    def have_cards(self) -> None:
        """The package is installed, and the daemon has found the cards."""
        is_new = not self._node
        if is_new:
            self.plug()
        # A daemon that has started without this node has not read its boot ID.
        if is_new or self.path(CONFIG).read_text() != CONFIGURATION:
            self.write(CONFIG, CONFIGURATION)
            self.systemctl("restart", UNIT)

    def be_running(self) -> None:
        """The daemon is registered with a running kubelet."""
        self.have_cards()
        self.shell(f"systemctl daemon-reload; systemctl start {UNIT} kubelet")
        self.status_becomes("registered with kubelet")

    def recover(self) -> None:
        """Undo the changes of a test that has failed."""
        self.install_kubelet()
        self.shell(f"rm -rf {Path(DROP_IN).parent} /var/snap; systemctl daemon-reload", check=False)
        self.shell(f"systemctl reset-failed; systemctl --no-block restart {UNIT}", check=False)

    def left_behind(self) -> list[str]:
        """Files that did not exist before the first installation."""
        return sorted(self.files() - self._files_before)

    def last_words(self) -> str:
        """The end of the journal and of the kubelet's events."""
        shown = ("--no-pager", "--lines=30", "--output=short-monotonic")
        journal = self("journalctl", *shown, check=False)
        return journal + "\n".join(self._events.read_text().splitlines()[-12:])

    # The commands of an operator.

    def path(self, path: str) -> Path:
        """A path of the container as one of this machine."""
        return self.root / path.lstrip("/")

    def holds(self, path: str) -> bool:
        """Whether a path exists in the container, mounts included."""
        return self.status_of("test", "-e", path) == 0

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self("systemctl", *words, check=check)

    def restarts(self) -> bool:
        """Whether `systemctl restart` of the service succeeds."""
        return self.status_of("systemctl", "restart", UNIT) == 0

    def use_drop_in(self, text: str) -> None:
        """Change the unit; without text undo it."""
        self.path(DROP_IN).unlink(missing_ok=True)
        if text:
            self.write(DROP_IN, text)
        self.systemctl("daemon-reload")

    def install(self, *packages: str) -> str:
        """Install packages with apt; return its output."""
        return self("apt-get", "install", "--yes", *packages)

    def purge(self) -> None:
        """Purge the package; no file may be left."""
        self("apt-get", "purge", "--yes", UNIT)
        assert not (left := self.left_behind()), left

    # The cards.

    def plug(self) -> None:
        """Plug in cards with running firmware."""
        self._node = SimulatedNode(self.shared / "node")
        for card in CARDS:
            self._node.add(card)
        self._heartbeats.enter_context(Ticker(self._node))

    @property
    def node(self) -> SimulatedNode:
        assert self._node, "no card was plugged in"
        return self._node

    # The kubelet.

    def install_kubelet(self) -> None:
        self.write("/etc/systemd/system/kubelet.service", KUBELET % DIRECTORY)

    def tell_kubelet(self, line: str) -> None:
        with (self.shared / "input").open("w") as commands:
            commands.write(line + "\n")

    def events(self, since: float, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """The kubelet's events of a kind since a moment, with these values."""
        lines = self._events.read_text().splitlines(keepends=True)
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        events = (event for event in events if event["event"] == kind and event["at"] >= since)
        return [event for event in events if wanted.items() <= event.items()]

    def event(
        self, since: float, kind: str, timeout: float = PATIENCE, **wanted: Any
    ) -> dict[str, Any]:
        """Wait for the first such event."""
        what = f"the kubelet's event {kind} {wanted}"
        return wait_until(lambda: self.events(since, kind, **wanted), what, timeout)[0]

    # The service.

    def property(self, name: str, unit: str = UNIT) -> str:
        """A property of a unit, or of systemd if the unit is empty."""
        shown = ["show", "--value", f"--property={name}"]
        return self.systemctl(*shown, *filter(None, [unit])).strip()

    def becomes(self, name: str, value: str, timeout: float = PATIENCE) -> None:
        """Wait until a property of the service has a value."""
        wait_until(lambda: self.property(name) == value, f"{name}={value}", timeout)

    def moment(self, name: str, unit: str = UNIT) -> float:
        """A property that is a time, such as "ActiveEnter"."""
        return int(self.property(f"{name}TimestampMonotonic", unit)) / 1e6

    def status_becomes(self, *parts: str) -> str:
        """Wait until the status text has all these parts, and return it."""

        def text() -> str:
            status = self.property("StatusText")
            return status if all(part in status for part in parts) else ""

        what = f"{parts} in the status"
        return wait_until(text, lambda: f"{what} {self.property('StatusText')!r}", PATIENCE)

    def journal(self, since: float = 0.0) -> list[tuple[float, int, str]]:
        """Times, priorities and messages of the daemon's own lines."""
        lines = self("journalctl", "--unit", UNIT, "--output=json", "--no-pager").splitlines()
        found = []
        for line in lines:
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("SYSLOG_IDENTIFIER") == UNIT:
                at = int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
                found.append((at, int(entry["PRIORITY"]), str(entry["MESSAGE"])))
        return [entry for entry in found if entry[0] >= since]

    def line(self, since: float, part: str, priority: int) -> str:
        """Wait for the daemon's first line with a text; it must have this priority."""

        def found() -> list[tuple[float, int, str]]:
            return [entry for entry in self.journal(since) if part in entry[2]]

        entry = wait_until(found, f"a line with {part!r} in the journal")[0]
        assert entry[1] == priority, entry
        return entry[2]
