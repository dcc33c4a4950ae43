"""The package on real systemd: every release of Debian gets a fresh system container.

What is here needs systemd, its sandbox, dpkg or a boot. What the daemon tells systemd, and does at
a reload, is in tests/test_systemd.py; how the program is extracted in test_start.py; what postinst
checks in test_postinst.py.

The tests run in the order of this file, as an operator would do things; each can also be run alone.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import DEB
from tests.e2e import probe
from tests.e2e.conftest import Told
from tests.e2e.host import (
    CONFIG,
    CONFIGURATION,
    DIRECTORY,
    NEXT,
    PYZ,
    RESOURCE,
    Host,
    Packages,
)
from tests.e2e.steps import UNIT
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
CACHE = "/var/cache/tt-device-plugin"
LOCKS = "/run/ttdp/shm"
WRITTEN = (
    "/run/cdi/tenstorrent.com-device.json",
    "/etc/kubernetes/node-feature-discovery/features.d/tt-device-plugin",
    "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
)
BAD = 'log_level = "loud"\n'
METRICS_SOCKET = f"{UNIT}-metrics.socket"
GET = """
import urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:7762/metrics").read().decode())
except OSError as error:
    print(error)
"""


@pytest.fixture(scope="module", params=SUITES)
def host(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Host]:
    """A booted system of this release, at first without the package."""
    with Host(request.param, packages) as host:
        yield host


@pytest.fixture
def installed(host: Host) -> None:
    host.be_installed()


@pytest.fixture
def running(installed: None, host: Host) -> None:
    host.be_running()


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


# -- installation and sandbox ----------------------------------------------------------------------


def test_the_documents_have_the_names_that_the_man_page_gives(deb: Path) -> None:
    """None of them is compressed by debhelper, however long it gets."""
    manual = (DEB / "tt-device-plugin.8").read_text()
    named = re.findall(r"(?m)^\.It Pa (/usr/share/doc/\S+)$", manual)
    contents = subprocess.check_output(["dpkg-deb", "--contents", deb], text=True)
    packed = {line.split()[5].lstrip(".").rstrip("/") for line in contents.splitlines()}
    assert named and all(fnmatch.filter(packed, path) for path in named)


def test_install_on_a_minimal_system(host: Host, told: Told) -> None:
    """apt installs only this package; it is enabled, active and READY, with a status.

    The program was extracted and compiled by the installation, and any user can run it. Without a
    device it logs that it is there and has no kubelet, and nothing else.
    """
    output = host.install(host.packages.current)

    assert "0 upgraded, 1 newly installed, 0 to remove" in output, output
    assert host("dpkg", "--verify", UNIT) == ""
    seen = host.properties("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    assert seen == ["notify", "active", "running", "enabled", "success"], seen
    status = host.status_becomes("no Tenstorrent device")
    assert host("stat", "--format=%a %U", "/run/tt-device-plugin/status.sock") == "600 root\n"

    lines = [line.text for line in host.journal()]
    assert len(lines) == 2 and "0 chips" in lines[0] and "no kubelet is installed" in lines[1], (
        lines
    )

    [tree] = host.path(CACHE).glob("[!.]*")
    [compiled] = tree.glob("site-packages/__pycache__/ttdp.*.pyc")
    age = time.monotonic() - host.moment("ExecMainStart")
    assert compiled.stat().st_mtime < time.time() - age
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    version = host(*nobody, "tt-device-plugin", "--version").strip()

    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    assert size + host.path(PYZ).stat().st_size < 70e6
    told(f"{version}: {size / 1e6:.0f} MB below {CACHE}; STATUS={status!r}")


@pytest.mark.usefixtures("installed")
def test_sandbox_score(host: Host, told: Told) -> None:
    """The exposure is at most 1.5; the unit explains each setting that is missing."""
    analysis = host("systemd-analyze", "security", UNIT)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", analysis)
    assert score and float(score[1]) <= 1.5, analysis

    exposed = sorted(set(re.findall(r"^✗ (\S+?)=", analysis, re.MULTILINE)))
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    explanation = unit.split("# --- The sandbox")[1]
    assert not [name for name in exposed if f"{name}=" not in explanation]

    verify = ("systemd-analyze", "verify", "--man=no", f"{UNIT}.service")
    assert UNIT not in (warnings := host(*verify, check=False)), warnings
    told(f"{score[1]}; missing, and explained: {', '.join(exposed)}")


@pytest.mark.usefixtures("running")
def test_sandbox_from_inside(host: Host, told: Told) -> None:
    """It can open no device, reach no network, and write only to its own directories."""
    # 10:200 is /dev/net/tun, which every kernel has.
    script = ("sh", "-c", probe.RUN, "sh", "/srv/project/tests/e2e/probe.py", "/srv/shared/probe")
    host(*script, "10 200")

    denied = probe.assert_sandboxed(json.loads((host.shared / "probe").read_text()))
    told(f"denied: {denied}")


def locks(host: Host) -> str:
    """Return the device number of the locks' file system; "" if it is not mounted."""
    mounted = host.status_of("mountpoint", "--quiet", LOCKS) == 0
    return host("stat", "--format=%d", LOCKS).strip() if mounted else ""


@pytest.mark.usefixtures("installed")
def test_locks_have_a_separate_file_system(host: Host) -> None:
    """It stays mounted when the service is restarted, stopped, killed or reinstalled.

    Not in /dev/shm: logind deletes a user's files there when the last session ends.
    """
    before = locks(host)
    assert before and before != host("stat", "--format=%d", "/run").strip()
    assert host("stat", "--format=%A %U:%G", LOCKS) == "drwxr-xr-x root:root\n"
    options = host("findmnt", "--noheadings", "--output=OPTIONS", LOCKS).strip().split(",")
    assert {"nosuid", "nodev", "noexec"} <= {*options}

    for command in ("restart", "stop", "start"):
        host.systemctl(command, UNIT)
        assert locks(host) == before, command
    host.systemctl("kill", "--signal=KILL", UNIT)
    host.becomes("NRestarts", "1")
    host.install("--reinstall", host.packages.current)
    assert locks(host) == before


# -- configuration ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("running")
def test_reload_and_restart_with_a_bad_file(host: Host, told: Told) -> None:
    """A reload fails, and the daemon goes on. A restart ends it with status 78, and no other try.

    `systemctl status` shows the reason, which the journal has with its priority.
    """
    pid, since = host.property("MainPID"), time.monotonic()
    host.write(CONFIG, BAD)
    assert host.status_of("systemctl", "reload", UNIT) != 0
    assert host.line(since, CONFIG).priority == 3
    host.status_becomes("4 × tenstorrent.com/n300", CONFIG)
    assert host.properties("MainPID", "ActiveState") == [pid, "active"]

    since = time.monotonic()
    assert not host.restarts()
    # Not "auto-restart", which a pause before another start would be.
    seen = host.properties("SubState", "Result", "ExecMainStatus", "NRestarts")
    assert seen == ["failed", "exit-code", "78", "0"]
    line = host.line(since, f"{CONFIG}: log_level")
    assert [each for each in host.journal(since) if each.priority == 3] == [line]
    assert line.text in host.systemctl("status", UNIT, check=False)

    since = time.monotonic()
    host.write(CONFIG, CONFIGURATION)
    host.systemctl("start", UNIT)
    host.kubelet.event("registered", since, resource=RESOURCE)

    since, pid = time.monotonic(), host.property("MainPID")
    host.write(CONFIG, 'resource_naming = "arch"\n' + CONFIGURATION)
    host.systemctl("reload", UNIT)
    host.kubelet.event("registered", since, resource="tenstorrent.com/wormhole")
    assert host.property("MainPID") == pid
    told(f"journal and systemctl status: {line.text!r}")


# -- crashes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("running")
def test_a_daemon_that_is_killed_or_hangs(host: Host, told: Told) -> None:
    """It is started again at once, and by the watchdog, which leaves a daemon that works alone."""
    assert host.properties("WatchdogUSec", "RestartUSec") == ["20s", "100ms"]

    with host.drop_in("[Service]\nWatchdogSec=4s\n"):
        host.systemctl("restart", UNIT)
        host.status_becomes("registered with kubelet")
        later = host.moment("ActiveEnter") + 5
        wait_until(lambda: host.moment("Watchdog") > later, "notifications of the watchdog")
        assert host.property("NRestarts") == "0", "a working daemon was restarted"

        since = time.monotonic()
        host.systemctl("kill", "--signal=KILL", UNIT)
        killed = host.kubelet.event("registered", since, resource=RESOURCE)["at"] - since
        assert host.property("NRestarts") == "1"

        since = time.monotonic()
        host.systemctl("kill", "--signal=STOP", UNIT)
        stopped = host.kubelet.event("registered", since, resource=RESOURCE)["at"] - since
        assert host.property("NRestarts") == "2"
    told(f"registered {ms(killed)} after kill -9, {stopped:.1f} s after a stop of 4 s")


ROW = "/run/tt-device-plugin/starts"  # begins with the number of starts in a row, see back-off
STARTS = "/run/starts"  # each start's number in its row, and seconds since the boot of the machine


def failing() -> str:
    """Return a drop-in with a daemon that ends with status 1, 73, 74 or 75 at each start."""
    ready = "socket.socket(1, 2).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])"
    row = f"int(open('{ROW}').read().split()[0])"
    code = f"import socket, os; {ready}; exit((1, 73, 74, 75)[{row} %% 4])"
    write = f"ExecStartPre=+/bin/sh -c \"cut -d' ' -f1 {ROW} /proc/uptime >>{STARTS}\""
    return f'[Service]\n{write}\nExecStart=\nExecStart=/usr/bin/python3 -c "{code}"\n'


@pytest.mark.usefixtures("installed")
def test_a_daemon_that_fails_repeatedly(host: Host, told: Told) -> None:
    """It is restarted at growing intervals, whatever its status; a start by hand is not delayed.

    A back-off that cannot run, as in a full /run, prevents no start.
    """

    def starts() -> list[str]:
        return host("cat", STARTS).split()

    host.shell(f"systemctl stop {UNIT}; rm -f {STARTS}")
    with host.drop_in(failing()):
        host.systemctl("start", UNIT, check=False)
        wait_until(lambda: len(starts()) >= 10, "five starts")
        numbers, times = starts()[:10:2], map(float, starts()[1:10:2])
        pauses = [after - before for before, after in itertools.pairwise(times)]
        assert numbers == ["1", "2", "3", "4", "5"]
        assert pauses[1] > 1 and pauses[2] > 2 and pauses[3] > 4, pauses

        host.becomes("SubState", "start-pre")  # while the back-off script pauses
        host.shell(f"systemctl stop {UNIT}; rm {STARTS}")
        host.systemctl("start", UNIT)
        assert int(starts()[0]) <= 2, "the third start in a row is delayed"

    host.shell(f"rm -f {ROW} && mkdir {ROW}")
    assert host.restarts()
    host.shell(f"rmdir {ROW}")
    told(f"starts after {', '.join(f'{pause:.1f}' for pause in pauses)} s")


@pytest.mark.usefixtures("installed")
def test_another_python(host: Host) -> None:
    """When the system's Python changes, dpkg extracts the program for the new one."""
    trigger = "dpkg-trigger --no-await --by-package=python3-minimal /usr/bin/python3"
    host.shell(f"rm -rf {CACHE}/* && {trigger} && dpkg --triggers-only --pending")
    assert [*host.path(CACHE).glob("[!.]*")]


# -- metrics ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("running")
def test_the_socket_for_metrics(host: Host) -> None:
    """It is open as long as the service is not stopped; no number of starts disables it."""

    def answers() -> bool:
        return "\ntt_plugin_info{" in host("/usr/bin/python3", "-c", GET)

    assert not answers()
    host.systemctl("enable", METRICS_SOCKET)
    try:
        # systemd's own limit is five starts in ten seconds.
        for _ in range(6):
            host.systemctl("stop", UNIT)
            host.becomes("ActiveState", "inactive", METRICS_SOCKET)
            host.systemctl("start", UNIT)
        wait_until(answers, "metrics")

        opened = host.moment("ActiveEnter", METRICS_SOCKET)
        host.systemctl("restart", UNIT)
        host.systemctl("kill", "--signal=KILL", UNIT)
        wait_until(answers, "an answer after kill -9")
        assert host.moment("ActiveEnter", METRICS_SOCKET) == opened

        host.write(CONFIG, BAD)
        assert not host.restarts()
        host.becomes("ActiveState", "inactive", METRICS_SOCKET)
        assert not answers()
    finally:
        host.write(CONFIG, CONFIGURATION)
        host.shell(f"systemctl disable {METRICS_SOCKET}; systemctl stop {UNIT} {METRICS_SOCKET}")
        host.systemctl("start", UNIT)


# -- boot and upgrade ------------------------------------------------------------------------------


def admit_pod(host: Host) -> list[str]:
    """Have the kubelet admit a pod, or admit it again after a reboot; return its devices."""
    since = time.monotonic()
    host.kubelet.tell(f"admit before {RESOURCE}=2")
    ids: list[str] = host.kubelet.event("admitted", since, pod="before")["ids"]
    return ids


@pytest.mark.usefixtures("running")
def test_boot_with_the_kubelet(host: Host, told: Told) -> None:
    """The daemon is READY before the kubelet starts, and the pod gets its devices again.

    READY, and so the kubelet, waits for chips that the driver binds one after another.
    """
    host.systemctl("enable", "kubelet")
    held = admit_pod(host)
    host.shut_down()
    host.node.unload_driver()
    host.node.load_driver(probe=False)

    since = time.monotonic()
    host.power_on()
    manager = ("test", "-S", "/run/systemd/private")
    wait_until(lambda: host.status_of(*manager) == 0, "systemctl's socket")
    host.status_becomes("waiting for the driver", host.node.chips[0].bdf)
    for chip in host.node.chips:
        chip.bind()
        time.sleep(0.2)  # so that they do not appear at once
    host.wait_up()

    first = host.kubelet.event("list", since, resource=RESOURCE)
    began = host.kubelet.event("started", since)["at"]
    registered = host.kubelet.event("registered", since, resource=RESOURCE)["at"] - began
    assert first["healthy"] == 4, first
    assert admit_pod(host) == held
    early = host.moment("ExecMainStart", "kubelet") - host.moment("ActiveEnter")
    assert early >= 0
    told(f"READY {ms(early)} before the kubelet; registered {ms(registered)} after its socket")


@pytest.mark.usefixtures("running")
def test_upgrade_with_devices_allocated(host: Host, told: Told) -> None:
    """Pods keep their devices, locks and configuration stay, the old build is deleted."""
    held = admit_pod(host)
    builds = set(os.listdir(host.path(CACHE)))
    before = locks(host)

    since = time.monotonic()
    output = host.install(host.packages.following)
    assert "1 upgraded" in output, output

    ended = host.kubelet.event("ended", since, resource=RESOURCE)["at"]
    back = host.kubelet.event("list", ended, resource=RESOURCE, healthy=4)["at"]
    assert admit_pod(host) == held and not host.kubelet.events("violation", since)
    assert locks(host) == before and host.path(CONFIG).read_text() == CONFIGURATION

    assert NEXT in host("tt-device-plugin", "--version")
    assert host.line(since, f"tt-device-plugin {NEXT}").priority == 6
    now = set(os.listdir(host.path(CACHE)))
    assert len([name for name in now if not name.startswith(".")]) == 1 and not builds & now, now
    told(f"the kubelet was without the plugin for {ms(back - ended)}")


@pytest.mark.usefixtures("running")
def test_an_upgrade_that_would_not_start_waits(host: Host) -> None:
    """dpkg names the reason, and the daemon goes on; a valid file and one command are enough."""
    host.systemctl("stop", "kubelet")
    host("dpkg", "--purge", UNIT)
    host.install(host.packages.current)
    host.be_running()
    since, pid = time.monotonic(), host.property("MainPID")
    host.write(CONFIG, BAD + CONFIGURATION)

    done = host.run("apt-get", "install", "--yes", host.packages.following)

    output = done.stdout + done.stderr
    assert done.returncode == 100 and "run: dpkg --configure -a" in output, output
    assert f"{CONFIG}: log_level" in output
    # Unpacked, but only half configured.
    assert host("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", UNIT) == "iF "
    assert host.property("MainPID") == pid and not host.kubelet.events("ended", since)
    # The advice of the new program does not end the old daemon.
    advice = host("tt-device-plugin", "check", check=False)
    assert "; run: dpkg --configure -a" in advice and "systemctl restart" not in advice, advice
    # As long as it is not corrected, nothing changes.
    assert host.status_of("dpkg", "--configure", "-a") and host.property("MainPID") == pid

    since = time.monotonic()
    host.write(CONFIG, CONFIGURATION)
    host("dpkg", "--configure", "-a")
    host.kubelet.event("list", since, resource=RESOURCE, healthy=4)
    assert host.property("MainPID") != pid and NEXT in host("tt-device-plugin", "--version")


@pytest.mark.usefixtures("running")
def test_a_kubelet_that_is_installed_later(host: Host) -> None:
    """It is READY without that directory, and never makes it. It can be a link, as MicroK8s's.

    If its own directory in there is deleted, as by `kubeadm reset`, it makes that again.
    """
    own = str(Path(DIRECTORY).parent)
    elsewhere = "/var/snap/microk8s/common/var/lib/kubelet"
    host.systemctl("stop", "kubelet")
    host.shell(f"systemctl stop {UNIT} && rm -rf {own}")

    assert host.restarts()
    host.status_becomes(f"no kubelet is installed ({own} does not exist)")
    assert not host.exists(own)

    since = time.monotonic()
    host.shell(f"mkdir -p {elsewhere} && ln -s {elsewhere} {own} && systemctl start kubelet")
    host.kubelet.event("registered", since, resource=RESOURCE)
    host.status_becomes("registered with kubelet")

    since = time.monotonic()
    host.shell(f"systemctl stop kubelet && rm -rf {DIRECTORY}")  # beside the daemon's own removals
    mode = ("stat", "--format=%a %U", f"{DIRECTORY}/.")
    wait_until(lambda: host(*mode, check=False) == "750 root\n", f"{DIRECTORY} for root only")
    host.systemctl("start", "kubelet")
    host.kubelet.event("registered", since, resource=RESOURCE)

    host.systemctl("stop", "kubelet")
    host.shell(f"systemctl stop {UNIT} && rm -rf {own} /var/snap && mkdir {own}")
    host.shell(f"systemctl start {UNIT} kubelet")


# -- removal ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("running")
def test_removal(host: Host) -> None:
    """The service stops, and its sockets, program and files are deleted; pods keep their locks.

    After a purge all files are those from before the installation; hugepages are given back.
    """
    places = " ".join(str(Path(path).parent) for path in WRITTEN)
    host.shell(f"mkdir -p {places} && systemctl restart {UNIT}")
    for path in WRITTEN:
        wait_until(functools.partial(host.holds, path), f"{path} exists")

    since = time.monotonic()
    host("apt-get", "remove", "--yes", UNIT)
    host.kubelet.event("ended", since, resource=RESOURCE)
    host.shell("systemctl disable --now kubelet; rm /etc/systemd/system/kubelet.service")

    assert host.property("ActiveState") in ("inactive", "failed")
    assert host.property("LoadState") != "loaded"
    assert not [*host.path(DIRECTORY).glob("*.sock")]
    assert not host.exists(CACHE) and host.exists(CONFIG) and locks(host)
    stop = host("journalctl", "--no-pager", "--output=cat", "--unit", UNIT).splitlines()
    assert f"{UNIT}.service: Deactivated successfully." in stop[-4:], stop[-4:]
    for path in WRITTEN:
        assert host.shell(f"ls -A {Path(path).parent}") == "", path

    host.shell("rm -r /etc/kubernetes /var/lib/prometheus /var/lib/kubelet")
    host.be_installed()
    hugepages = "/dev/hugepages/tt-device-plugin"
    host.shell(f"mkdir -p {hugepages}/0000:01:00.0 && touch {hugepages}/0000:01:00.0/page")

    host("apt-get", "purge", "--yes", UNIT)
    for path in ("/run/tt-device-plugin", "/run/ttdp", hugepages):
        assert not host.holds(path), path
    assert host.left_behind() == []
    assert host.shell(f"dpkg-query --list {UNIT} 2>/dev/null || true") == ""
