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
from typing import Any

from tests import pythons
from tests.e2e.container import Container
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import ROOT, wait_until

UNIT = "tt-device-plugin"
RESOURCE = "tenstorrent.com/n300"
CARDS = ("n300", "n300", "n300", "n300", "p300c")
PYZ = f"/usr/lib/{UNIT}/{UNIT}.pyz"
DIRECTORY = "/var/lib/kubelet/device-plugins"
CONFIG = "/etc/tt-device-plugin/config.toml"
NEXT = "9.9.9"  # the version of the upgrade
# Its commands come through a FIFO, which is opened for reading and writing, so that it has no end
# when a test closes it.
KUBELET = f"""
[Unit]
Description=Reference kubelet
StartLimitIntervalSec=0

[Service]
Environment=PYTHONPATH=/srv/project:/srv/shared/python PYTHONDONTWRITEBYTECODE=1
ExecStart=/bin/sh -c 'exec /usr/bin/python3 -m tests.world.kubelet --json {DIRECTORY} \\
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


def unpacked_zipapp(deb: Path, tree: Path) -> Path:
    """Unpack a package into a directory, and return its zipapp."""
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(tree)], check=True)
    return tree / PYZ.lstrip("/")


class Host(Container):
    """The container, as tests use it. Times are seconds of CLOCK_MONOTONIC, the host's clock."""

    def __init__(self, suite: str, packages: Packages) -> None:
        super().__init__(suite, {ROOT: "/srv/project", packages.directory: "/srv/packages"})
        self.packages = packages
        self._node: SimulatedNode | None = None
        self._heartbeats = contextlib.ExitStack()
        self._kubelets_input = self.shared / "input"
        self._kubelets_events = self.shared / "events"

    # Its life.

    def start(self) -> None:
        shutil.copytree(self.packages.modules, self.shared / "python")
        os.mkfifo(self._kubelets_input)
        self._kubelets_events.touch()
        self._install_kubelet()
        self.boot()
        self._files_before = self.files()

    def power_on(self) -> None:
        if self._node:
            self._node.boot()  # the daemon reads the boot ID of the simulated node
        super().power_on()

    def delete(self) -> None:
        self._heartbeats.close()
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
        return journal + "\n".join(self._kubelets_events.read_text().splitlines()[-12:])

    # The state that a test begins with.

    def be_installed(self) -> None:
        if not self.exists("/usr/bin/tt-device-plugin"):
            self.install(self.packages.current)

    def have_cards(self) -> None:
        """Have the package installed, and the daemon find cards with running firmware."""
        is_new = not self._node
        if is_new:
            self._node = SimulatedNode(self.shared / "node")
            for card in CARDS:
                self._node.add(card)
            self._heartbeats.enter_context(Ticker(self._node))

        # A daemon that has started without this node has not read its boot ID.
        if is_new or self.path(CONFIG).read_text() != CONFIGURATION:
            self.write(CONFIG, CONFIGURATION)
            self.systemctl("restart", UNIT)

    def be_running(self) -> None:
        """Have the daemon registered with a running kubelet."""
        self.have_cards()
        self.shell(f"systemctl daemon-reload; systemctl start {UNIT} kubelet")
        self.status_becomes("registered with kubelet")

    @property
    def node(self) -> SimulatedNode:
        assert self._node, "have_cards() was not called"
        return self._node

    # Files and packages.

    def path(self, path: str) -> Path:
        """Return a path of the container as one of this machine, for which links are wrong."""
        return self.root / path.lstrip("/")

    def holds(self, path: str) -> bool:
        """Return whether a path exists in the container, mounts included."""
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

    # The kubelet.

    def _install_kubelet(self) -> None:
        self.write("/etc/systemd/system/kubelet.service", KUBELET)

    def tell_kubelet(self, line: str) -> None:
        with self._kubelets_input.open("w") as commands:
            commands.write(line + "\n")

    def events(self, since: float, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return the kubelet's events of a kind since a moment, with these values."""
        lines = self._kubelets_events.read_text().splitlines(keepends=True)
        events = (json.loads(line) for line in lines if line.endswith("\n"))
        events = (event for event in events if event["event"] == kind and event["at"] >= since)
        return [event for event in events if wanted.items() <= event.items()]

    def event(self, since: float, kind: str, **wanted: Any) -> dict[str, Any]:
        """Wait for the first such event."""
        what = f"the kubelet's event {kind} {wanted}"
        return wait_until(lambda: self.events(since, kind, **wanted), what)[0]

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

    def journal(self, since: float = 0.0) -> list[tuple[float, int, str]]:
        """Return times, priorities and messages of the daemon's own lines."""
        found = []
        for line in self(
            "journalctl", f"--unit={UNIT}", "--output=json", "--no-pager"
        ).splitlines():
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
