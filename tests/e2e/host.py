"""One host: a container with the package, simulated cards and the reference kubelet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.container import Container
from tests.world.node import Chip, SimulatedNode, Ticker
from tests.world.processes import PATIENCE, ROOT, wait_until

UNIT = "tt-device-plugin"
RESOURCE = "tenstorrent.com/n300"
CARDS = ("n300", "n300", "n300", "n300", "p300c")
DIRECTORY = "/var/lib/kubelet/device-plugins"
CONFIG = "/etc/tt-device-plugin/config.toml"
DROP_IN = f"/etc/systemd/system/{UNIT}.service.d/test.conf"
NEXT = "9.9.9"  # the version that is upgraded to
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
    """The package under test and one of a next version, as paths in the container."""

    directory: Path
    current: str
    following: str
    first: str
    """As 0.1.0 was: with the configuration as a conffile."""
    modules: Path
    """What the program is bundled with. The reference kubelet runs on it in the container."""

    @classmethod
    def of(cls, deb: Path, work: Path) -> Packages:
        """Copy the package, and build the next one in `work`."""
        directory = work / "packages"
        directory.mkdir()
        shutil.copy2(deb, directory)
        _build_next(deb, directory, work / "next")
        following = next(path.name for path in directory.iterdir() if f"_{NEXT}_" in path.name)
        first = _build_first(deb, directory, work / "first")
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(work / "deb")], check=True)
        with zipfile.ZipFile(work / "deb/usr/lib/tt-device-plugin/tt-device-plugin.pyz") as packed:
            names = [name for name in packed.namelist() if name.startswith("site-packages/")]
            packed.extractall(work, names)
        inside = Path("/srv/packages")
        return cls(
            directory,
            current=str(inside / deb.name),
            following=str(inside / following),
            first=str(inside / first),
            modules=work / "site-packages",
        )


def _build_next(deb: Path, output: Path, source: Path) -> None:
    """Build a package of another version of the program from the same sources, to upgrade to."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("generated", "packaging", "build/wheels"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("ttdp.py", "shiv.toml"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "packaging/build_deb.py", "--output", str(output)]
    command += ["--no-lintian", "--version", NEXT]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(int(deb.stat().st_mtime))}
    subprocess.run(command, cwd=source, check=True, env=environ, stdout=subprocess.DEVNULL)


def _build_first(deb: Path, output: Path, tree: Path) -> str:
    """Build it as 0.1.0, with a long configuration as its conffile; return its file's name."""
    subprocess.run(["dpkg-deb", "--raw-extract", str(deb), str(tree)], check=True)
    (tree / CONFIG[1:]).parent.mkdir(parents=True)
    shutil.copy(tree / f"usr/share/doc/{UNIT}/examples/config.toml", tree / CONFIG[1:])
    (tree / "DEBIAN/conffiles").write_text(f"{CONFIG}\n")
    control = (tree / "DEBIAN/control").read_text()
    (tree / "DEBIAN/control").write_text(re.sub(r"(?m)^Version: .*$", "Version: 0.1.0", control))
    name = re.sub("_.*_", "_0.1.0_", deb.name)
    command = ["dpkg-deb", "-Znone", "--root-owner-group", "--build", str(tree), str(output / name)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return name


class Host:
    """What the tests see of it. Times are seconds of CLOCK_MONOTONIC, as in the container."""

    def __init__(self, suite: str, packages: Packages) -> None:
        self.packages = packages
        binds = {ROOT: "/srv/project", packages.directory: "/srv/packages"}
        self.container = Container(suite, binds)
        self.shared = self.container.shared
        shutil.copytree(packages.modules, self.shared / "python")
        os.mkfifo(self.shared / "input")
        self._events = self.shared / "events"
        self._events.touch()
        self._node: SimulatedNode | None = None
        self._heartbeats = contextlib.ExitStack()
        self.install_kubelet(DIRECTORY)

    def __enter__(self) -> Host:
        try:
            self.container.boot()
        except BaseException:
            self.__exit__()
            raise
        self._files_before = self.container.files()
        return self

    def __exit__(self, *_: object) -> None:
        self._heartbeats.close()
        self.container.delete()

    # The state that a test begins with.

    def be_installed(self) -> None:
        if not self.container.exists("/usr/bin/tt-device-plugin"):
            self.install(self.packages.current)

    def have_cards(self) -> None:
        """Installed, with cards that the daemon knows."""
        if not self._node:
            self.plug(*CARDS)
        if self.path(CONFIG).read_text() != CONFIGURATION:
            self.container.write(CONFIG, CONFIGURATION)
            self.systemctl("restart", UNIT)

    def be_running(self) -> None:
        """The same, and registered with a kubelet that runs."""
        self.have_cards()
        self.container.shell(f"systemctl daemon-reload; systemctl start {UNIT} kubelet")
        self.status_becomes("registered with kubelet")

    def recover(self) -> None:
        """After a test that has failed: undo what it may have left half done."""
        self.install_kubelet(DIRECTORY)
        self.container.shell(
            f"""
            rm -rf {Path(DROP_IN).parent} /var/snap
            systemctl daemon-reload
            systemctl reset-failed
            systemctl --no-block restart {UNIT}
            """,
            check=False,
        )

    def left_behind(self) -> list[str]:
        """Files that were not there before the first installation."""
        return sorted(self.container.files() - self._files_before)

    def last_words(self) -> str:
        """What journal and kubelet say at the end."""
        shown = ("--no-pager", "--lines=30", "--output=short-monotonic")
        journal = self.container("journalctl", *shown, check=False)
        return journal + "\n".join(self._events.read_text().splitlines()[-12:])

    # What an operator does.

    def path(self, path: str) -> Path:
        """Where a path of the container is on this machine."""
        return self.container.root / path.lstrip("/")

    def holds(self, path: str) -> bool:
        """Whether a path is there, as the container sees it."""
        return self.container.status_of("test", "-e", path) == 0

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.container("systemctl", *words, check=check)

    def starts_again(self) -> bool:
        """Whether `systemctl restart` of the service succeeds."""
        return self.container.status_of("systemctl", "restart", UNIT) == 0

    def install(self, *packages: str) -> str:
        """Have apt install packages; return what it says."""
        return self.container("apt-get", "install", "--yes", *packages)

    def purge(self) -> None:
        self.container("apt-get", "purge", "--yes", UNIT)

    def dpkg_state(self) -> str:
        """The package's state as dpkg abbreviates it: "ii" is installed."""
        shown = "--showformat=${db:Status-Abbrev}"
        return self.container("dpkg-query", "--show", shown, UNIT).strip()

    # The cards.

    def plug(self, *cards: str) -> None:
        """Cards, and firmware that lives."""
        self._node = SimulatedNode(self.shared / "node")
        for card in cards:
            self._node.add(card)
        self._heartbeats.enter_context(Ticker(self._node))

    @property
    def node(self) -> SimulatedNode:
        assert self._node, "no card was plugged"
        return self._node

    def chip(self, name: str) -> Chip:
        return self.node.chip(name)

    # The kubelet.

    def install_kubelet(self, directory: str) -> None:
        self.container.write("/etc/systemd/system/kubelet.service", KUBELET % directory)

    def tell_kubelet(self, line: str) -> None:
        with (self.shared / "input").open("w") as commands:
            commands.write(line + "\n")

    def events(self, since: float, kind: str, **wanted: Any) -> list[dict[str, Any]]:
        """What the kubelet has seen: the events of a kind since a moment, with these values."""
        lines = self._events.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [
            event
            for event in events
            if event["event"] == kind and event["at"] >= since and wanted.items() <= event.items()
        ]

    def event(
        self, since: float, kind: str, timeout: float = PATIENCE, **wanted: Any
    ) -> dict[str, Any]:
        """The first such event, as soon as there is one."""
        what = f"the kubelet to see {kind} {wanted}"
        return wait_until(lambda: self.events(since, kind, **wanted), what, timeout)[0]

    # The service.

    def properties(self, unit: str = UNIT) -> dict[str, str]:
        pairs = self.systemctl("show", "--all", unit).splitlines()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def property(self, name: str, unit: str = UNIT) -> str:
        """A property of a unit; of systemd itself where the unit is empty."""
        shown = ["show", "--value", f"--property={name}"]
        return self.systemctl(*shown, *filter(None, [unit])).strip()

    def status(self) -> str:
        return self.property("StatusText")

    def status_becomes(self, *parts: str, timeout: float = PATIENCE) -> str:
        """The status text, once it holds all these parts."""

        def text() -> str:
            status = self.status()
            return status if all(part in status for part in parts) else ""

        what = f"STATUS to say {parts}"
        return wait_until(text, lambda: f"{what}; it says {self.status()!r}", timeout)

    def journal(self, since: float = 0.0) -> list[tuple[int, str]]:
        """Priorities and messages of the daemon's own lines."""
        return [(priority, message) for _, priority, message in self._entries(since)]

    def times_of(self, since: float, part: str) -> list[float]:
        """When the daemon's lines came that hold a text."""
        return [at for at, _, message in self._entries(since) if part in message]

    def _entries(self, since: float) -> list[tuple[float, int, str]]:
        said = self.container("journalctl", "--unit", UNIT, "--output=json", "--no-pager")
        found = []
        for line in said.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("SYSLOG_IDENTIFIER") == UNIT:
                at = int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
                found.append((at, int(entry["PRIORITY"]), str(entry["MESSAGE"])))
        return [entry for entry in found if entry[0] >= since]

    def line(self, since: float, part: str, timeout: float = PATIENCE) -> tuple[int, str]:
        """The daemon's first line that holds a text, as soon as there is one."""

        def found() -> list[tuple[int, str]]:
            return [entry for entry in self.journal(since) if part in entry[1]]

        return wait_until(found, f"a line with {part!r} in the journal", timeout)[0]

    def seconds_to_ready(self) -> float:
        """From the program's start to READY=1, by systemd's clock."""
        properties = self.properties()
        ready = int(properties["ActiveEnterTimestampMonotonic"])
        return (ready - int(properties["ExecMainStartTimestampMonotonic"])) / 1e6
