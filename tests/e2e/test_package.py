"""The package on real systemd: the life of a node, in a fresh system container of each Debian.

What is here needs systemd, its sandbox, dpkg or a boot. What the daemon tells systemd, and does at
a reload, is in tests/test_systemd.py; how the program is extracted in test_start.py; what postinst
checks in test_postinst.py.

The tests are one story in the order of this file: each begins where the one before has ended, with
a pod that has two devices from the fourth on.
"""

from __future__ import annotations

import fnmatch
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.documents import DEB
from tests.e2e import probe
from tests.e2e.conftest import Told
from tests.e2e.host import CONFIG, CONFIGURATION, DIRECTORY, NEXT, USER, Host, Packages
from tests.e2e.steps import UNIT
from tests.world.kubelet import Kubelet
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie")
RESOURCE = "tenstorrent.com/n300"
CACHE = "/var/cache/tt-device-plugin"
LOCK = "/run/ttdp/shm/a-pods/lock"  # as a container has it, which runs under a user of the host
WRITTEN = (
    "/run/cdi/tenstorrent.com-device.json",
    "/etc/kubernetes/node-feature-discovery/features.d/tt-device-plugin",
    "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
)
BAD = 'log_level = "loud"\n'


@pytest.fixture(scope="module", params=SUITES)
def host(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Host]:
    with Host(request.param, packages) as host:
        yield host


def test_the_documents_have_the_names_that_the_man_page_gives(deb: Path) -> None:
    """None of them is compressed by debhelper, however long it gets."""
    manual = (DEB / "tt-device-plugin.8").read_text()
    named = re.findall(r"(?m)^\.It Pa (/usr/share/doc/\S+)$", manual)
    contents = subprocess.check_output(["dpkg-deb", "--contents", deb], text=True)
    packed = {line.split()[5].lstrip(".").rstrip("/") for line in contents.splitlines()}
    assert named and all(fnmatch.filter(packed, path) for path in named)


# -- installation and sandbox ----------------------------------------------------------------------


def test_installation(host: Host, told: Told) -> None:
    """apt installs only this package, which is enabled and READY; any user can run the program.

    Without a device and a kubelet it says so, and nothing else. The installation has extracted and
    compiled the program.
    """
    output = host.install(host.packages.current)

    assert "0 upgraded, 1 newly installed, 0 to remove" in output, output
    assert host("dpkg", "--verify", UNIT) == ""
    seen = host.properties("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    assert seen == ["notify", "active", "running", "enabled", "success"], seen
    host.status_becomes("no Tenstorrent device")
    assert host("stat", "--format=%a %U", "/run/tt-device-plugin/status.sock") == "600 root\n"

    said = [line.text for line in host.journal()]
    assert len(said) == 2 and "0 chips" in said[0] and "no kubelet is installed" in said[1], said
    assert not host.holds("/var/lib/kubelet")

    [compiled] = host.path(CACHE).glob("[!.]*/site-packages/__pycache__/ttdp.*.pyc")
    age = time.monotonic() - host.moment("ExecMainStart")
    assert compiled.stat().st_mtime < time.time() - age
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    told(host(*nobody, "tt-device-plugin", "--version").strip())


def test_sandbox_score(host: Host, told: Told) -> None:
    """The exposure is at most 1.5; the unit explains each setting that is missing."""
    analysis = host("systemd-analyze", "security", UNIT)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", analysis)
    assert score and float(score[1]) <= 1.5, analysis

    missing = {*re.findall(r"^✗ (\S+?)=", analysis, re.MULTILINE)}
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    explanation = unit.split("# --- The sandbox")[1]
    assert not [name for name in missing if f"{name}=" not in explanation]

    verify = ("systemd-analyze", "verify", "--man=no", f"{UNIT}.service")
    assert UNIT not in (warnings := host(*verify, check=False)), warnings
    told(f"{score[1]}; missing, and explained: {', '.join(sorted(missing))}")


def test_sandbox_from_inside(host: Host) -> None:
    """It sees devices and processes, and opens none; it reaches no network, no pod, no /etc."""
    device = "/dev/every-users"
    shutil.copy(probe.__file__, host.shared / "probe.py")
    # 10:200 is /dev/net/tun, which every kernel has. Processes of containers have capabilities.
    host.shell(f"""
        mkdir -p /var/lib/kubelet/pods && mknod -m 666 {device} c 10 200 && : <>{device}
        systemd-run --quiet --unit=other --uid=65534 --property=AmbientCapabilities=CAP_NET_RAW \\
            sleep infinity
    """)
    program = f"/usr/bin/python3 /srv/shared/probe.py {device} {host.property('MainPID', 'other')}"
    once = "Type=oneshot\nRestart=no\nWatchdogSec=0\nExecStartPre=\nExecStopPost=\nExecReload=\n"

    with host.drop_in(
        f"{once}StandardOutput=file:/srv/shared/probed\nExecStart=\nExecStart={program}"
    ):
        host.systemctl("start", UNIT)

    found = json.loads((host.shared / "probed").read_text())
    denied = {name: answer for name, answer in found.items() if answer != "yes"}
    assert denied.keys() == {"open a device", "reach a network", "write to /etc", "look into pods"}
    assert denied["open a device"] == "Operation not permitted", denied
    host.shell(f"systemctl stop other; rm -r {device} /var/lib/kubelet")


# -- kubelet and configuration ---------------------------------------------------------------------


def test_cards_and_a_kubelet_that_is_installed_later(host: Host) -> None:
    """It never makes the kubelet's own directory, which can be a link, as MicroK8s's.

    If its own directory in there is deleted, as by `kubeadm reset`, it makes that again.
    """
    for card in ("n300", "n300", "n300", "n300", "p300c"):
        host.node.add(card)
    host.write(CONFIG, CONFIGURATION)
    host.systemctl("restart", UNIT)
    own = str(Path(DIRECTORY).parent)
    host.status_becomes("4 × tenstorrent.com/n300", f"no kubelet is installed ({own} does not")
    assert not host.holds(own)

    elsewhere = "/var/snap/microk8s/common/var/lib/kubelet"
    host.shell(f"mkdir -p {elsewhere} && ln -s {elsewhere} {own}")
    kubelet = Kubelet(host.path(f"{elsewhere}/device-plugins"))
    host.do(kubelet.start())
    host.is_registered()
    host.do(kubelet.stop())

    host.shell(f"systemctl stop {UNIT} && rm -r {own} /var/snap && mkdir {own}")
    host.systemctl("start", UNIT)
    host.shell(f"rm -rf {DIRECTORY}")
    mode = ("stat", "--format=%a %U", DIRECTORY)
    wait_until(lambda: host(*mode, check=False) == "750 root\n", f"{DIRECTORY} for root only")

    host.do(host.kubelet.start())
    host.is_registered()
    host.do(host.kubelet.run_pod("pod", RESOURCE, 2))


def test_reload_and_restart_with_a_bad_file(host: Host, told: Told) -> None:
    """A reload fails, and the daemon goes on. A restart ends it with status 78, and no other try.

    `systemctl status` shows the reason, which the journal has with its priority.
    """
    pid, since = host.property("MainPID"), time.monotonic()
    host.write(CONFIG, BAD)
    assert host.status_of("systemctl", "reload", UNIT) != 0
    assert host.line(since, CONFIG).priority == 3
    host.is_registered(CONFIG)
    assert host.properties("MainPID", "ActiveState") == [pid, "active"]

    since = time.monotonic()
    assert host.status_of("systemctl", "restart", UNIT) != 0
    # Not "auto-restart", which a pause before another start would be.
    seen = host.properties("SubState", "Result", "ExecMainStatus", "NRestarts")
    assert seen == ["failed", "exit-code", "78", "0"]
    line = host.line(since, f"{CONFIG}: log_level")
    assert [each for each in host.journal(since) if each.priority == 3] == [line]
    assert line.text in host.systemctl("status", UNIT, check=False)

    host.write(CONFIG, CONFIGURATION)
    host.systemctl("start", UNIT)
    pid = host.property("MainPID")
    host.write(CONFIG, f'exclude = ["{host.node.chips[-1].bdf}"]\n{CONFIGURATION}')
    host.systemctl("reload", UNIT)
    host.is_registered("1 × tenstorrent.com/p300")
    assert host.property("MainPID") == pid
    told(f"journal and systemctl status: {line.text!r}")


# -- locks -----------------------------------------------------------------------------------------


def test_locks_outlive_the_sessions_of_their_user(host: Host) -> None:
    """logind deletes all files of a user in /dev/shm when the last session ends, and not these."""
    directory = Path(LOCK).parent
    user = f"setpriv --reuid={USER} --regid={USER} --clear-groups"
    host.shell(f"mkdir {directory} && chmod 1777 {directory} && {user} touch {LOCK} /dev/shm/file")
    assert host("stat", "--format=%A %U", str(directory.parent)) == "drwxr-xr-x root\n"

    session = ("--unit=session", f"--uid={USER}", "--property=PAMName=login")
    host("systemd-run", "--quiet", "--collect", *session, "sleep", "infinity")
    sessions = ("loginctl", "list-sessions", "--no-legend")
    wait_until(lambda: str(USER) in host(*sessions), "the session")
    host.systemctl("stop", "session")

    wait_until(lambda: not host.holds("/dev/shm/file"), "logind to delete files")
    host(*sessions)  # which logind answers after that
    assert host.holds(LOCK)


# -- crashes ---------------------------------------------------------------------------------------


def test_a_daemon_that_is_killed_or_hangs(host: Host, told: Told) -> None:
    """It is started again at once, and by the watchdog, which leaves a daemon that works alone."""
    assert host.properties("WatchdogUSec", "RestartUSec") == ["20s", "100ms"]

    with host.drop_in("WatchdogSec=4s\n"):
        host.systemctl("start", UNIT)
        later = host.moment("ActiveEnter") + 5
        wait_until(lambda: host.moment("Watchdog") > later, "notifications of the watchdog")
        assert host.property("NRestarts") == "0", "a working daemon was restarted"

        for restarts, signal in (("1", "KILL"), ("2", "STOP")):
            since = time.monotonic()
            host.systemctl("kill", f"--signal={signal}", UNIT)
            wait_until(lambda: host.property("NRestarts") == restarts, "a restart")  # noqa: B023
            host.is_registered()
            told(f"registered {time.monotonic() - since:.1f} s after SIG{signal}")


def test_a_daemon_that_fails_repeatedly(host: Host, told: Told) -> None:
    """It is restarted at growing intervals; a start by hand is not delayed."""
    # Of each start its number in the row of failures, and the seconds since the boot.
    file, row = host.shared / "starts", "/run/tt-device-plugin/starts"
    write = f"cut -d' ' -f1 {row} /proc/uptime >>/srv/shared/{file.name}"
    failing = f'ExecStartPre=+/bin/sh -c "{write}"\nExecStart=\nExecStart=/bin/sh -c "exit 74"\n'

    def starts(number: int) -> list[str]:
        words = file.read_text().split() if file.exists() else []
        return words if len(words) >= 2 * number else []

    with host.drop_in(failing):
        host.systemctl("start", UNIT, check=False)
        words = wait_until(lambda: starts(5), "five starts")
        pauses = [float(b) - float(a) for a, b in itertools.pairwise(words[1:10:2])]
        assert pauses[1] > 1 and pauses[2] > 2 and pauses[3] > 4, pauses

        host.systemctl("stop", UNIT)
        file.unlink()
        host.systemctl("start", UNIT, check=False)
        assert int(starts(1)[0]) <= 2, "the third start in a row is delayed"
    told(f"starts after {', '.join(f'{pause:.1f}' for pause in pauses)} s")


# -- metrics ---------------------------------------------------------------------------------------


def test_the_socket_for_metrics(host: Host) -> None:
    """It is open as long as the service is not stopped; no number of starts disables it."""

    get = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:7762/metrics').read())"

    def answers() -> bool:
        return "tt_plugin_info{" in host("/usr/bin/python3", "-c", get, check=False)

    assert not answers()
    socket = f"{UNIT}-metrics.socket"
    host.systemctl("enable", socket)
    for _ in range(6):  # systemd's own limit is five starts in ten seconds
        host.systemctl("stop", UNIT)
        wait_until(lambda: host.property("ActiveState", socket) == "inactive", "the socket's end")
        assert not answers()
        host.systemctl("start", UNIT)
    wait_until(answers, "metrics")

    opened = host.moment("ActiveEnter", socket)
    host.systemctl("restart", UNIT)
    host.systemctl("kill", "--signal=KILL", UNIT)
    wait_until(answers, "an answer after kill -9")
    assert host.moment("ActiveEnter", socket) == opened
    host.shell(f"systemctl disable {socket}; systemctl stop {UNIT}; systemctl start {UNIT}")


# -- boot and upgrade ------------------------------------------------------------------------------


def test_an_upgrade_that_would_not_start_waits(host: Host) -> None:
    """dpkg names the reason, and the daemon goes on; a valid file and one command are enough."""
    host.is_registered()
    pid, builds = host.property("MainPID"), {*os.listdir(host.path(CACHE))}
    host.write(CONFIG, BAD + CONFIGURATION)

    done = host.run("apt-get", "install", "--yes", host.packages.following)

    output = done.stdout + done.stderr
    assert done.returncode == 100 and "run: dpkg --configure -a" in output, output
    assert f"{CONFIG}: log_level" in output
    # Unpacked, but only half configured; as long as the file is not corrected, nothing changes.
    assert host.status_of("dpkg", "--configure", "-a") and host.property("MainPID") == pid
    assert host("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", UNIT) == "iF "
    # The advice of the new program does not end the old daemon.
    advice = host("tt-device-plugin", "check", check=False)
    assert "; run: dpkg --configure -a" in advice and "systemctl restart" not in advice, advice

    host.write(CONFIG, CONFIGURATION)
    host("dpkg", "--configure", "-a")
    host.is_registered()
    assert host.property("MainPID") != pid and NEXT in host("tt-device-plugin", "--version")
    assert host.path(CONFIG).read_text() == CONFIGURATION
    [build] = host.path(CACHE).glob("[!.]*")
    assert build.name not in builds


def test_boot_with_the_kubelet(host: Host, told: Told) -> None:
    """The daemon is READY before the kubelet starts, and the pod gets its devices again.

    READY, and so the kubelet, waits for chips that the driver binds one after another.
    """
    assert host.holds(LOCK), "the locks of running containers are gone"
    unit = "[Service]\nType=oneshot\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n"
    host.write("/etc/systemd/system/kubelet.service", unit)
    host.systemctl("enable", "kubelet")
    host.do(host.kubelet.power_cut())
    host.shut_down()
    host.node.unload_driver()
    host.node.boot()
    host.node.load_driver(probe=False)

    host.power_on()
    manager = ("test", "-S", "/run/systemd/private")
    wait_until(lambda: host.status_of(*manager) == 0, "systemctl's socket")
    host.status_becomes("waiting for the driver", host.node.chips[0].bdf)
    for chip in host.node.chips:
        chip.bind()
    host.wait_up()

    early = host.moment("ExecMainStart", "kubelet") - host.moment("ActiveEnter")
    assert early >= 0
    host.do(host.kubelet.start())
    host.do(host.kubelet.running("pod", "main"))
    host.is_registered("4 healthy")
    assert not host.kubelet.killed
    told(f"READY {early * 1000:.0f} ms before the kubelet")


def test_another_python(host: Host) -> None:
    """When the system's Python changes, dpkg extracts the program for the new one."""
    trigger = "dpkg-trigger --no-await --by-package=python3-minimal /usr/bin/python3"
    host.shell(f"rm -rf {CACHE}/* && {trigger} && dpkg --triggers-only --pending")
    assert [*host.path(CACHE).glob("[!.]*")]


# -- removal ---------------------------------------------------------------------------------------


def test_removal(host: Host) -> None:
    """The service stops, and its sockets, program and files are deleted; pods keep their locks.

    After a purge all files are those from before the installation; hugepages are given back.
    """
    places = " ".join(str(Path(path).parent) for path in WRITTEN)
    host.shell(f"mkdir -p {places} {Path(LOCK).parent} && touch {LOCK} && systemctl restart {UNIT}")
    for path in WRITTEN:
        wait_until(partial(host.holds, path), f"{path} exists")
    host.is_registered()

    host("apt-get", "remove", "--yes", UNIT)

    assert host.property("LoadState") != "loaded"
    assert f"{UNIT}.service: Deactivated successfully." in host.last_words()
    assert not [*host.path(DIRECTORY).glob("tt*.sock")] and not host.holds(CACHE)
    assert host.holds(CONFIG) and host.holds(LOCK)
    for path in WRITTEN:
        assert host.shell(f"ls -A {Path(path).parent}") == "", path
    assert host.kubelet.violations == []

    host.do(host.kubelet.stop())
    host.shell("systemctl disable --now kubelet; rm /etc/systemd/system/kubelet.service")
    host.shell("rm -r /etc/kubernetes /var/lib/prometheus /var/lib/kubelet")
    host.install(host.packages.current)
    hugepages = "/dev/hugepages/tt-device-plugin"
    host.shell(f"mkdir -p {hugepages}/0000:01:00.0 && touch {hugepages}/0000:01:00.0/page")

    host("apt-get", "purge", "--yes", UNIT)

    for path in ("/run/tt-device-plugin", "/run/ttdp", hugepages):
        assert not host.holds(path), path
    assert not host.left_behind()
    assert host.shell(f"dpkg-query --list {UNIT} 2>/dev/null || true") == ""
