"""The package on real systemd: every release gets a fresh system container.

The tests run in the order in which they stand here, as an operator would do things; each can also
be run alone: `make e2e-systemd`, or as root
`python -m pytest -v tests/e2e/test_package.py [-k bookworm]`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import Missing
from tests.e2e.host import (
    CARDS,
    CONFIG,
    CONFIGURATION,
    DIRECTORY,
    DROP_IN,
    NEXT,
    RESOURCE,
    UNIT,
    Host,
    Packages,
)
from tests.e2e.steps import OTHER, probing
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie", "forky")
REQUIRED = ("bookworm", "trixie")  # the others only if they can be had
P300 = "tenstorrent.com/p300"
CACHE = "/var/cache/tt-device-plugin"
PYZ = "/usr/lib/tt-device-plugin/tt-device-plugin.pyz"
WRITTEN = (
    "/run/cdi/tenstorrent.com-device.json",
    "/etc/kubernetes/node-feature-discovery/features.d/tt-device-plugin",
    "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
)
# Seconds in which also a busy machine does what is to be done at once: `make bench` measures it.
AT_ONCE = 5.0
GET = """
import urllib.request
try:
    metrics = urllib.request.urlopen("http://127.0.0.1:7762/metrics", timeout=5)
    print(*[line for line in metrics if line.startswith(b"tt_plugin_info{")])
except OSError as error:
    print(error)
"""


@pytest.fixture(scope="session")
def packages(deb: Path) -> Iterator[Packages]:
    """Without root, tools and a package there is no run: one line says what to do."""
    tools = {
        "mmdebstrap": "mmdebstrap",
        "systemd-nspawn": "systemd-container",
        "dpkg-buildpackage": "dpkg-dev debhelper",
    }
    if os.geteuid() != 0:
        pytest.exit("this boots system containers: run it as root", returncode=1)
    if missing := [package for tool, package in tools.items() if not shutil.which(tool)]:
        pytest.exit(f"apt-get install --no-install-recommends {' '.join(missing)}", returncode=1)
    with tempfile.TemporaryDirectory(prefix="ttdp-e2e-", dir="/var/tmp") as work:
        yield Packages.of(deb, Path(work))


@pytest.fixture(scope="module", params=SUITES)
def host(request: pytest.FixtureRequest, packages: Packages) -> Iterator[Host]:
    """A booted system of this release, at first without the package."""
    try:
        host = Host(request.param, packages)
    except Missing as reason:
        if request.param in REQUIRED:
            pytest.fail(str(reason))
        pytest.skip(f"NOT RUN: {reason}")
    with host:
        yield host


@pytest.fixture
def installed(host: Host) -> None:
    """The package is installed; for a test that is run alone, or after one that has failed."""
    host.be_installed()


@pytest.fixture
def running(installed: None, host: Host) -> None:
    """So are the cards, and the kubelet runs, with whom the daemon is registered."""
    host.be_running()


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


# ---------------------------------------------------------------------------- install and first run


def test_install_from_a_clean_minimal_system(host: Host, told: Told) -> None:
    """apt install ./….deb: enabled, active, READY, a STATUS in words; nothing else is pulled in."""
    began = time.monotonic()
    said = host.install(host.packages.current)
    seconds = time.monotonic() - began
    assert "0 upgraded, 1 newly installed, 0 to remove" in said, said
    properties = host.properties()
    names = ("Type", "ActiveState", "SubState", "UnitFileState", "Result")
    seen = [properties[name] for name in names]
    assert seen == ["notify", "active", "running", "enabled", "success"], seen
    status = properties["StatusText"]
    assert status == "no Tenstorrent device on this node; waiting for one", status
    assert host.container("dpkg", "--verify", UNIT) == ""
    told(f"apt install took {seconds:.1f} s; Type=notify, active, enabled; STATUS={status!r}")


@pytest.mark.usefixtures("installed")
def test_the_program_is_extracted_and_compiled_at_install_time(host: Host, told: Told) -> None:
    """The first start extracts and compiles nothing, and any user can run the program."""
    trees = [name for name in os.listdir(host.path(CACHE)) if not name.startswith(".")]
    assert len(trees) == 1, trees
    tree = host.path(CACHE) / trees[0] / "site-packages"
    compiled = list(tree.glob("__pycache__/ttdp.*.pyc"))
    assert compiled, "ttdp is not compiled"
    begun = int(host.property("ExecMainStartTimestampMonotonic")) / 1e6
    assert compiled[0].stat().st_mtime < time.time() - (time.monotonic() - begun)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    said = host.container(*nobody, "tt-device-plugin", "list")
    assert said == "no Tenstorrent device on this node\n", said
    version = host.container("tt-device-plugin", "--version").strip()
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    assert size + host.path(PYZ).stat().st_size < 70e6
    python = host.container("python3", "--version").strip()
    told(f"{version} on {python}: {size / 1e6:.0f} MB below {CACHE}, compiled before the start")


@pytest.mark.usefixtures("installed")
def test_the_examples_are_as_they_are_here(host: Host) -> None:
    """Configuration, drop-in, alert rules and dashboard can be used where they are installed."""
    sources = {
        "config.toml": "deb",
        "kubelet-dir.conf": "systemd",
        "tt-device-plugin.rules.yml": "deb",
        "tt-device-plugin.dashboard.json": "deb",
    }
    examples = host.path(f"/usr/share/doc/{UNIT}/examples")
    assert {path.name for path in examples.iterdir()} == set(sources)
    for name, directory in sources.items():
        source = ROOT / "packaging" / directory / name
        assert (examples / name).read_bytes() == source.read_bytes(), name


@pytest.mark.usefixtures("installed")
def test_no_device_is_active_and_quiet(host: Host, told: Told) -> None:
    """Without a device it is active, says so in one line, and then nothing, while it polls."""
    polls = 3
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("restart", UNIT)
    begun = int(host.property("ExecMainStartTimestampMonotonic")) / 1e6
    wait_until(lambda: time.monotonic() > begun + 0.5 * polls + 1, "some polls have gone by")
    lines = host.journal(begun)
    assert len(lines) == 1 and "0 devices" in lines[0][1], lines
    assert host.property("ActiveState") == "active"
    told(f"after {polls} polls the journal holds one line: {lines[0][1]!r}")


@pytest.mark.usefixtures("installed")
def test_sandbox_score(host: Host, told: Told) -> None:
    """systemd-analyze security gives at most 1.5; what is open is what the unit's comments say."""
    said = host.container("systemd-analyze", "security", UNIT)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert score and float(score[1]) <= 1.5, said
    exposed = sorted(set(re.findall(r"^✗ (\S+?)=", said, re.MULTILINE)))
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    unexplained = [name for name in exposed if f"{name}=" not in unit.split("# --- The sandbox")[1]]
    assert not unexplained, unexplained
    verify = ("systemd-analyze", "verify", "--man=no", f"{UNIT}.service")
    warnings = host.container(*verify, check=False)
    assert UNIT not in warnings, warnings
    version = host.systemctl("--version").split()[1]
    explained = f"open, and explained in the unit: {', '.join(exposed)}"
    told(f"systemd {version}: {score[1]} (at most 1.5); {explained}")


@pytest.mark.usefixtures("installed")
def test_sandbox_from_inside(host: Host, told: Told) -> None:
    """From within it no device is opened, no network reached, nothing written but what is ours."""
    shell = host.container.shell
    made = "/dev/tenstorrent /var/lib/kubelet/pods /etc/kubernetes /var/lib/prometheus"
    written = " ".join(str(Path(path).parent) for path in WRITTEN[1:])
    shell(f"mkdir -p {made} {written}")
    shell("mknod -m 666 /dev/tenstorrent/7 c 10 200")
    # 10:200 is /dev/net/tun's driver, which there is everywhere. Outside, everybody can open it.
    shell("setpriv --reuid=65534 --clear-groups sh -c ': <>/dev/tenstorrent/7'")
    unit = host.path(host.property("FragmentPath")).read_text()
    shell(OTHER)
    probe = (
        f"/srv/project/tests/e2e/probe.py /dev/tenstorrent/7 {host.property('MainPID', 'other')}"
    )
    unit = probing(unit, probe, "/srv/shared/probe")
    host.container.write("/etc/systemd/system/probe.service", unit)
    shell("systemctl daemon-reload && systemctl start probe")
    shell(f"systemctl stop other && rm -r /etc/systemd/system/probe.service {made}")
    shell("systemctl daemon-reload")
    found = json.loads((host.shared / "probe").read_text())
    assert found.pop("capabilities") == "0000000000000000"
    assert found.pop("interfaces") in (["lo"], []), "more than a loopback"
    allowed = {name for name, answer in found.items() if answer == "yes"}
    assert allowed == {
        "stat a device",
        "unix sockets",
        "kernel events",
        "a directory for everybody's locks",
        "name of another user's process",
        "cgroup of another user's process",
        "cgroups",
        "write to the kubelet's directory",
        "write to CDI's",
        "write to the node exporter's",
        "write to labels",
    }, found
    denied = sorted(f"{name} ({answer})" for name, answer in found.items() if answer != "yes")
    told(f"no capability; allowed: {', '.join(sorted(allowed))}; denied: {', '.join(denied)}")


LOCKS = "/run/ttdp/shm"


def locks(host: Host) -> str:
    """Return the number of the locks' file system, which no other has; "" if it is not mounted."""
    mounted = host.container.status_of("mountpoint", "--quiet", LOCKS) == 0
    return host.container("stat", "--format=%d", LOCKS).strip() if mounted else ""


@pytest.mark.usefixtures("installed")
def test_the_locks_have_a_file_system_of_their_own(host: Host, told: Told) -> None:
    """Mounted with the service, as /dev/shm is in a container; it outlives whatever that does."""
    before = locks(host)
    assert before and before != host.container("stat", "--format=%d", "/run").strip()
    assert host.container("stat", "--format=%A %U:%G", LOCKS) == "drwxr-xr-x root:root\n"
    mounts = host.container("cat", "/proc/mounts").splitlines()
    [line] = [line for line in mounts if line.split()[1] == LOCKS]
    assert {"nosuid", "nodev", "noexec"} <= set(line.split()[3].split(",")), line
    host.container("touch", f"{LOCKS}/lock")
    for command in ("restart", "stop", "start"):
        host.systemctl(command, UNIT)
        assert locks(host) == before, command
    host.systemctl("kill", "--signal=KILL", UNIT)
    wait_until(lambda: host.property("NRestarts") == "1", "a new start")
    host.install("--reinstall", host.packages.current)
    assert locks(host) == before
    host.container("rm", f"{LOCKS}/lock")
    told(f"{line}; the same after restart, stop, kill -9 and reinstallation")


# ------------------------------------------------------------------------------ devices and kubelet


@pytest.mark.usefixtures("installed")
def test_devices_before_the_kubelet(host: Host, told: Told) -> None:
    """Cards that appear are found; STATUS counts them and says that the kubelet is awaited."""
    since = time.monotonic()
    host.plug(*CARDS)
    status = host.status_becomes(f"4 × {RESOURCE}, 4 healthy", "waiting for kubelet")
    assert host.line(since, "0000:01:00.0")[0] == 6
    host.systemctl("restart", UNIT)
    times = []
    for _ in range(5):
        host.systemctl("restart", UNIT)
        times.append(host.seconds_to_ready())
    assert sorted(times)[2] < AT_ONCE, times
    lines = host.container("cat", f"/proc/{host.property('MainPID')}/status").splitlines()
    memory = dict(line.split(":", 1) for line in lines)
    resident, anonymous = (int(memory[name].split()[0]) / 1024 for name in ("VmRSS", "RssAnon"))
    assert resident < 40, resident
    ready = f"warm start to READY: median {ms(sorted(times)[2])}, worst {ms(max(times))}"
    told(f"STATUS={status!r}; {ready}; resident {resident:.1f} MB ({anonymous:.1f} MB anonymous)")


@pytest.mark.usefixtures("installed")
def test_kubelet_starts_after(host: Host, told: Told) -> None:
    """A kubelet that starts later: both resources are registered, and a pod gets its devices."""
    host.have_cards()
    host.container.shell("systemctl daemon-reload")
    since = time.monotonic()
    host.systemctl("start", "kubelet")
    began = host.event(since, "started")["at"]
    registered = [host.event(since, "registered", resource=name)["at"] for name in (RESOURCE, P300)]
    took = max(registered) - began
    assert took < AT_ONCE, took
    status = host.status_becomes("registered with kubelet")
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    pod = host.event(since, "admitted", pod="before")
    assert "TT_VISIBLE_DEVICES=0000:01:00.0,0000:02:00.0" in pod["env"], pod
    assert pod["devices"][0].endswith(":/dev/tenstorrent/0:rw"), pod
    told(f"registered {ms(took)} after the socket; STATUS={status!r}; a pod got {pod['ids'][0]}")


@pytest.mark.usefixtures("running")
def test_journal_priorities(host: Host, told: Told) -> None:
    """Lines have their priorities: heat, which is no fault, 6; an error 3. (A fault has 4.)"""
    since = time.monotonic()
    host.chip("01:00.0").heat(110)
    priority, hot = host.line(since, "throttles")
    assert priority == 6, hot
    host.chip("01:00.0").heat(40)
    assert host.line(since, "0000:01:00.0 (n300): is cool again")[0] == 6
    host.container.write(CONFIG, "nonsense = 1\n")
    assert host.container.status_of("systemctl", "reload", UNIT) != 0
    priority, error = host.line(since, "configuration is not reloaded")
    assert priority == 3, error
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("reload", UNIT)
    assert not [text for _, text in host.journal() if re.match(r"<\d>", text)], "a prefix is left"
    told(f"6 {hot!r}, 3 {error!r}")


@pytest.mark.usefixtures("running")
def test_a_device_fails_and_recovers(host: Host, told: Told) -> None:
    """A chip that dies leaves allocatable, journal and STATUS say why, and it comes back."""
    since = time.monotonic()
    host.chip("02:00.0").die()
    lost = host.event(since, "list", resource=RESOURCE, healthy=3, unhealthy=1)
    assert lost["unhealthy_ids"] == ["0000:02:00.0"], lost
    priority, message = host.line(since, "does not respond")
    assert priority == 4
    status = host.status_becomes("3 healthy", "0000:02:00.0: chip does not respond")
    since = time.monotonic()
    host.chip("02:00.0").revive()
    host.event(since, "list", resource=RESOURCE, healthy=4, unhealthy=0)
    assert host.line(since, "0000:02:00.0 (n300): healthy again")[0] == 6
    host.status_becomes("4 healthy")
    told(f"journal: {message!r}; STATUS={status!r}; and healthy again")


@pytest.mark.usefixtures("running")
def test_list_knows_a_chip_that_the_daemon_remembers(host: Host, told: Told) -> None:
    """Card, serial number and firmware of a chip that was dead when the daemon started."""
    bdf = "0000:06:00.0"  # the second chip of a board
    columns = ("bdf", "card", "serial", "firmware", "resource")

    def listed(*environment: str) -> dict[str, Any]:
        said = host.container("env", *environment, "tt-device-plugin", "list", "--json")
        return next(row for row in json.loads(said) if row["bdf"] == bdf)

    known = listed()
    assert known["healthy"] and all(known[column] for column in columns), known
    since = time.monotonic()
    host.chip(bdf).die()
    host.line(since, "does not respond")
    host.systemctl("restart", UNIT)
    host.status_becomes(f"{bdf}: chip does not respond")
    remembered = listed()
    assert [remembered[column] for column in columns] == [known[column] for column in columns]
    assert not remembered["healthy"] and remembered["reason"].startswith("chip does not respond")
    assert listed("STATE_DIRECTORY=/nowhere")["serial"] is None  # not from the chip
    rows = host.container("tt-device-plugin", "list").splitlines()
    row = next(row for row in rows if bdf in row)
    assert known["serial"] in row and known["card"] in row and "UNHEALTHY" in row, row
    host.chip(bdf).revive()
    host.status_becomes("2 × tenstorrent.com/p300, 2 healthy", "registered with kubelet")
    told(f"list: {row!r}")


@pytest.mark.usefixtures("running")
def test_kubelet_restarts(host: Host, told: Told) -> None:
    """It deletes every socket: registered again at once, and the pod of before is admitted."""
    worst = 0.0
    for _ in range(5):
        since = time.monotonic()
        host.systemctl("restart", "kubelet")
        began = host.event(since, "started")["at"]
        worst = max(worst, host.event(since, "registered", resource=RESOURCE)["at"] - began)
    assert worst < AT_ONCE, worst
    host.event(began, "list", resource=RESOURCE, healthy=4)
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    host.event(since, "admitted", pod="before")
    assert host.property("NRestarts") == "0"
    told(f"5 restarts: registered after at most {ms(worst)}; the pod of before is admitted again")


@pytest.mark.usefixtures("running")
def test_kubelet_goes_away(host: Host, told: Told) -> None:
    """The service stays up and waits; a killed kubelet and a new directory are no problem."""
    since = time.monotonic()
    host.systemctl("stop", "kubelet")
    status = host.status_becomes("waiting for kubelet")
    # The directory itself is deleted, and a new one made, as by `kubeadm reset` and `join`. (By way
    # of another name: the plugin puts a deleted socket back, and the directory is not empty then.)
    old = f"{DIRECTORY}.old"
    host.container.shell(f"mv {DIRECTORY} {old} && rm -rf {old} && systemctl start kubelet")
    host.event(since, "registered", resource=RESOURCE)
    since = time.monotonic()
    host.systemctl("kill", "--signal=KILL", "kubelet")
    host.status_becomes("waiting for kubelet")
    host.systemctl("restart", "kubelet")
    host.event(since, "registered", resource=RESOURCE)
    host.status_becomes("registered with kubelet")
    assert host.property("ActiveState") == "active" and host.property("NRestarts") == "0"
    told(f"STATUS={status!r}; registered again in a directory made anew, and after kill -9")


@pytest.mark.usefixtures("running")
def test_reload_with_a_good_and_a_bad_file(host: Host, told: Told) -> None:
    """A good file is taken over without a restart; a bad one is refused with a line."""
    pid, since = host.property("MainPID"), time.monotonic()
    host.container.write(CONFIG, 'resource_naming = "arch"\n' + CONFIGURATION)
    host.systemctl("reload", UNIT)
    host.event(since, "registered", resource="tenstorrent.com/wormhole")
    host.status_becomes("4 × tenstorrent.com/wormhole", "2 × tenstorrent.com/blackhole")
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("reload", UNIT)
    for name in (RESOURCE, P300):
        host.event(since, "registered", resource=name)
    host.status_becomes("registered with kubelet")
    since = time.monotonic()
    host.container.write(CONFIG, 'log_level = "loud"\n')
    assert host.container.status_of("systemctl", "reload", UNIT) != 0
    message = host.line(since, "configuration is not reloaded")[1]
    errors = [line for line in host.journal(since) if line[0] <= 4]
    assert len(errors) == 1, errors
    assert CONFIG in message and "log_level" in message and "'loud'" in message, message
    status = host.status_becomes("registered with kubelet", CONFIG)
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("reload", UNIT)
    assert (host.property("MainPID"), host.property("ActiveState")) == (pid, "active")
    wait_until(lambda: CONFIG not in host.status(), "a status without the configuration")
    told(f"resources renamed and back, same PID; refused: {message!r}, STATUS={status!r}")


@pytest.mark.usefixtures("running")
def test_kill_minus_9(host: Host, told: Told) -> None:
    """kill -9: back at once, and registered."""
    host.systemctl("restart", UNIT)
    host.status_becomes("registered with kubelet")
    since = time.monotonic()
    host.systemctl("kill", "--signal=KILL", UNIT)
    took = host.event(since, "registered", resource=RESOURCE)["at"] - since
    assert took < AT_ONCE, took
    host.status_becomes("registered with kubelet")
    restarts = int(host.property("NRestarts"))
    assert restarts == 1, restarts
    told(f"registered {ms(took)} after the kill")


@pytest.mark.usefixtures("installed")
def test_a_daemon_that_fails_again_and_again(host: Host, told: Told) -> None:
    """It is started ever more slowly; who stops or starts it by hand waits for nothing."""
    host.container.write(CONFIG, 'fail_on_init_error = true\nsysfs_root = "/nowhere"\n')
    since = time.monotonic()
    assert not host.starts_again()

    def failures() -> list[float]:
        times = host.times_of(since, "no Tenstorrent driver is loaded")
        return times if len(times) >= 5 else []

    pauses = pauses_of(wait_until(failures, "five failures", 30))
    assert pauses[0] < AT_ONCE and 1 < pauses[1] < pauses[2] < pauses[3] > 4, pauses
    wait_until(lambda: host.property("SubState") == "start-pre", "it waits for the next start")
    began = time.monotonic()
    host.systemctl("stop", UNIT)
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("start", UNIT)
    took = time.monotonic() - began
    assert took < AT_ONCE, took
    told(f"starts after {shown(pauses)} s; by hand: stopped and started in {ms(took)}")


def pauses_of(times: list[float]) -> list[float]:
    """Return the seconds between moments."""
    return [after - before for before, after in itertools.pairwise(times)]


def shown(pauses: list[float]) -> str:
    return ", ".join(f"{pause:.1f}" for pause in pauses)


def ending(status: int, pause: str = "100ms") -> str:
    """Return a drop-in with a daemon that is ready, ends with a status and is started again."""
    ready = "socket.socket(1, 2).sendto(b'READY=1', os.environ['NOTIFY_SOCKET'])"
    code = f"import socket, os; {ready}; exit({status})"
    return f"""
[Service]
ExecStart=
ExecStart=/usr/bin/python3 -c "{code}"
RestartSec={pause}
"""


@pytest.fixture
def ending_daemon(installed: None, host: Host) -> Iterator[None]:
    """Whatever the unit is made to start, in the end it is the daemon again."""
    host.systemctl("stop", UNIT)
    yield
    host.path(DROP_IN).unlink(missing_ok=True)
    host.container.shell(f"systemctl daemon-reload; systemctl stop {UNIT}; systemctl start {UNIT}")


@pytest.mark.usefixtures("ending_daemon")
@pytest.mark.parametrize("status", [74, 75])
def test_a_daemon_that_wants_to_be_started_again(host: Host, status: int, told: Told) -> None:
    """The directory is lost (74) or another's (75): started again at once, and then ever later.

    Who starts it by hand waits for nothing, in whatever state it is.
    """
    began = time.monotonic()

    def starts() -> list[float]:
        said = host.container(
            "journalctl", "--unit", UNIT, "--output=short-monotonic", "--no-pager"
        )
        every = [
            float(line.split("]")[0][1:]) for line in said.splitlines() if ": Started " in line
        ]
        times = [at for at in every if at > began]
        return times if len(times) >= 5 else []

    host.container.write(DROP_IN, ending(status))
    host.container.shell(f"systemctl daemon-reload; systemctl start {UNIT}", check=False)
    times = wait_until(starts, "five starts", 60)
    pauses = pauses_of(times)
    assert pauses[0] < AT_ONCE and 1 < pauses[1] < pauses[2] < pauses[3], pauses
    host.container.write(DROP_IN, ending(status, "10min"))
    host.systemctl("daemon-reload")
    wait_until(lambda: host.property("SubState") == "auto-restart", "systemd to wait", 60)
    host.systemctl("stop", UNIT)
    host.systemctl("start", UNIT)
    row = host.container("cat", "/run/tt-device-plugin/starts")
    assert row.startswith("1 "), row
    told(f"starts after {shown(pauses)} s; by hand at once")


@pytest.mark.usefixtures("ending_daemon")
def test_a_daemon_that_cannot_be_configured(host: Host) -> None:
    """After 78 it is not started again."""
    host.container.write(DROP_IN, ending(78))
    host.container.shell(f"systemctl daemon-reload; systemctl start {UNIT}", check=False)
    wait_until(lambda: host.property("ActiveState") == "failed", "the service to have failed")
    assert (host.property("ExecMainStatus"), host.property("NRestarts")) == ("78", "0")


@pytest.mark.usefixtures("running")
def test_sigstop(host: Host, told: Told) -> None:
    """A daemon that hangs is restarted by the watchdog. Shipped: 20 s; here 2 s, by a drop-in."""
    assert host.property("WatchdogUSec") == "20s"
    host.container.write(DROP_IN, "[Service]\nWatchdogSec=2s\n")
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT}")
    host.status_becomes("registered with kubelet")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 4, "twice the watchdog's time has gone by")
    assert host.property("NRestarts") == "0", "a daemon that is well was restarted"
    since = time.monotonic()
    host.systemctl("kill", "--signal=STOP", UNIT)
    took = host.event(since, "registered", timeout=20, resource=RESOURCE)["at"] - since
    assert host.property("NRestarts") == "1"
    said = host.container("journalctl", "--unit", UNIT, "--no-pager", "--output=cat")
    assert "Watchdog timeout" in said, said
    host.path(DROP_IN).unlink()
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT}")
    host.status_becomes("registered with kubelet")
    told(f"with WatchdogSec=2s registered again {took:.1f} s after the stop")


@pytest.mark.usefixtures("running")
def test_a_damaged_program_never_starts_silently(host: Host, told: Told) -> None:
    """Changed, missing and cut files of the tree are told of and made anew; so is all of it."""
    tree = f"{CACHE}/*/site-packages"
    damages = {
        "changed": f"echo 'print(1)' >> $(echo {tree}/grpc/__init__.py)",
        "missing": f"rm {tree}/sdnotify/__init__.py",
        "cut": f"truncate --size=1M {tree}/grpc/_cython/cygrpc.*.so",
        "not packed": f"touch $(echo {tree})/stray.pth",
    }
    said = []
    for name, damage in damages.items():
        since = time.monotonic()
        host.container.shell(f"{damage} && systemctl restart {UNIT}")
        priority, message = host.line(since, "extracted anew")
        assert priority == 4
        said.append(f"{name} ({message.partition('(')[2].partition(')')[0].rpartition('/')[2]})")
        assert host.property("ActiveState") == "active"
    since = time.monotonic()
    host.container.shell(f"rm -r {CACHE} && systemctl restart {UNIT}")
    assert host.property("ActiveState") == "active"
    took = host.seconds_to_ready()
    host.container.shell(f"systemctl restart {UNIT}")
    assert not [line for line in host.journal(since) if "damaged" in line[1]]
    told(f"told of and made anew: {', '.join(said)}; without any tree a start takes {took:.1f} s")


@pytest.mark.usefixtures("installed")
def test_no_room_for_the_program(host: Host, told: Told) -> None:
    """A full disk, a read-only one, a noexec one: one line, status 78, no restart loop."""
    said = []
    for kind in ("size=1m", "ro", "noexec"):
        since = time.monotonic()
        host.systemctl("stop", UNIT)
        host.container("mount", "-t", "tmpfs", "-o", f"mode=755,{kind}", "tmpfs", CACHE)
        try:
            assert host.container.status_of("systemctl", "start", UNIT) != 0
            seen = [host.property(name) for name in ("ActiveState", "ExecMainStatus", "NRestarts")]
            assert seen == ["failed", "78", "0"], (kind, seen)
            errors = [text for priority, text in host.journal(since) if priority == 3]
            assert len(errors) == 1 and CACHE in errors[0], errors
            said.append(errors[0].rpartition(": ")[2])
        finally:
            host.container("umount", CACHE)
    host.systemctl("start", UNIT)
    told(f"status 78 each, and one line: {', '.join(said)}")


@pytest.mark.usefixtures("installed")
def test_no_endless_restarts_where_nothing_can_be_run(host: Host, told: Told) -> None:
    """Where systemd itself cannot make the service's directories, it gives up after seconds."""
    host.container.shell(f"systemctl stop {UNIT} && mount -t tmpfs -o ro,mode=700 tmpfs {CACHE}")
    try:
        began = time.monotonic()
        assert host.container.status_of("systemctl", "start", UNIT) != 0
        wait_until(lambda: host.property("ActiveState") == "failed", "it has given up", 60)
        took = time.monotonic() - began
        assert int(host.property("NRestarts")) > 20
    finally:
        host.container("umount", CACHE)
    host.container.shell(f"systemctl reset-failed {UNIT} && systemctl start {UNIT}")
    told(f"given up after {took:.1f} s")


def change_python(host: Host) -> str:
    """Do what an upgrade of the system's Python does; return what dpkg says."""
    trigger = "dpkg-trigger --no-await --by-package=python3-minimal /usr/bin/python3"
    host.container.shell(f"rm -r {CACHE}/* && {trigger}")
    return host.container("dpkg", "--triggers-only", "--pending")


@pytest.mark.usefixtures("installed")
def test_another_python(host: Host, told: Told) -> None:
    """When the system's Python changes, dpkg has the program extracted for the new one."""
    before = set(os.listdir(host.path(CACHE)))
    change_python(host)
    assert set(os.listdir(host.path(CACHE))) == before
    host.systemctl("restart", UNIT)
    told("extracted again by the trigger on /usr/bin/python3")


@pytest.mark.usefixtures("installed")
def test_a_python_that_is_not_packed(host: Host, told: Told) -> None:
    """dpkg says that the program does not run on it; the start ends with 78 and says what to do.

    The package stays installed, and with the next one, or the old Python, all is well again.
    """
    pyz = host.path(PYZ)
    whole = pyz.read_bytes()
    tag = host.container("python3", "-c", "import sys; print(sys.implementation.cache_tag)").strip()
    leave_out(pyz, tag)
    try:
        said = change_python(host)
        words = f"one of these Pythons: nothing is packed for this Python ({tag}-"
        assert "install a newer tt-device-plugin, or " + words in said, said
        assert words in said and said.count("nothing is packed") == 1, said
        assert host.dpkg_state() == "ii"
        since = time.monotonic()
        assert not host.starts_again()
        assert (host.property("ExecMainStatus"), host.property("NRestarts")) == ("78", "0")
        assert host.line(since, words)[0] == 3
    finally:
        pyz.write_bytes(whole)
    host.systemctl("restart", UNIT)
    told(f"dpkg: {said.splitlines()[-1]!r}; the start: status 78, not restarted")


def leave_out(pyz: Path, tag: str) -> None:
    """Make a zipapp one that says that nothing is packed for a Python."""
    changed = pyz.with_suffix(".changed")
    with zipfile.ZipFile(pyz) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename == "_bootstrap/packed.py":
                entries = rb"'%s-[^']*', |, '%s-[^']*'" % (tag.encode(), tag.encode())
                content, number = re.subn(entries, b"", content)
                assert number == 1, content
            new.writestr(entry, content)
    changed.chmod(0o755)
    changed.rename(pyz)


@pytest.mark.usefixtures("running")
def test_the_socket_for_metrics(host: Host, told: Told) -> None:
    """It comes and goes with the service, which answers on it while it has no network itself."""
    socket = f"{UNIT}-metrics.socket"

    def answers() -> bool:
        said = host.container("/usr/bin/python3", "-c", GET)
        assert "tt_plugin_info{" in said or "Connection refused" in said, said
        return "tt_plugin_info{" in said

    def states() -> list[str]:
        return [host.property("ActiveState"), host.property("ActiveState", socket)]

    try:
        assert host.container.status_of("systemctl", "start", socket) != 0, (
            "systemd has learned to, the comments are old"
        )
        assert not answers()
        host.systemctl("enable", socket)
        host.systemctl("restart", UNIT)
        assert states() == ["active", "active"] and answers()
        assert host.property("PrivateNetwork") == "yes"
        assert "0.0.0.0/0" in host.property("IPAddressDeny")
        host.systemctl("restart", UNIT)
        assert answers()
        host.systemctl("kill", "--signal=KILL", UNIT)
        wait_until(answers, "an answer after kill -9")
        host.systemctl("stop", UNIT)
        assert not answers() and states() == ["inactive", "inactive"]
        host.systemctl("start", UNIT)
        assert states() == ["active", "active"] and answers()
        host.container.write(CONFIG, 'log_level = "loud"\n')
        assert not host.starts_again()
        assert not answers() and states() == ["failed", "inactive"]
    finally:
        host.container.write(CONFIG, CONFIGURATION)
        host.systemctl("disable", socket)
        host.systemctl("restart", UNIT)
    told("answers on port 7762 with PrivateNetwork=yes, after restart, kill -9 and stop")


# --------------------------------------------------------------------------------- boot and upgrade


def allocate_before(host: Host) -> list[str]:
    """Have the kubelet admit a pod, or admit it again after a reboot; return its devices."""
    since = time.monotonic()
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    ids: list[str] = host.event(since, "admitted", pod="before")["ids"]
    return ids


@pytest.mark.usefixtures("running")
def test_boot_with_the_kubelet(host: Host, told: Told) -> None:
    """A boot starts the kubelet as well: READY before that, registered within its first second."""
    host.systemctl("enable", "kubelet")
    held = allocate_before(host)
    down = host.container.shut_down()
    since = time.monotonic()
    up = host.container.boot()
    began = host.event(since, "started", 20)["at"]
    times = [host.event(since, "registered", resource=name)["at"] for name in (RESOURCE, P300)]
    registered = max(times)
    host.event(since, "list", resource=RESOURCE, healthy=4)
    assert allocate_before(host) == held
    early = seconds_before_kubelet(host)
    assert registered - began < AT_ONCE, registered - began
    begun = int(host.property("UserspaceTimestampMonotonic", ""))
    ready = (int(host.property("ActiveEnterTimestampMonotonic")) - begun) / 1e6
    told(
        f"down in {down:.1f} s, up in {up:.1f} s; READY {ready:.1f} s into the boot, {ms(early)} "
        f"before the kubelet starts; registered {ms(registered - began)} after its socket; "
        f"the pod of before has {held[0]} again"
    )


@pytest.mark.usefixtures("running")
def test_boot_with_a_driver_that_takes_its_time(host: Host, told: Told) -> None:
    """READY, and so the kubelet, waits for chips that the driver binds to one after another."""
    host.systemctl("enable", "kubelet")
    held = allocate_before(host)
    host.container.shut_down()
    host.node.unload_driver()
    host.node.load_driver(probe=False)
    chips = host.node.chips

    def bind() -> str:
        socket = ("test", "-S", "/run/systemd/private")
        wait_until(lambda: host.container.status_of(*socket) == 0, "systemctl's socket")
        said = host.status_becomes(f"waiting for the driver to make a node for {chips[0].bdf}")
        for chip in chips:
            host.node.probe(chip.bdf)
            time.sleep(0.2)  # this is what is tried, nothing is waited for
        return said

    with ThreadPoolExecutor() as meanwhile:
        since, bound = time.monotonic(), []
        up = host.container.boot(begun=lambda: bound.append(meanwhile.submit(bind)))
        said = bound[0].result()
    early = seconds_before_kubelet(host)
    first = host.event(since, "list", resource=RESOURCE)
    assert first["healthy"] == 4, first
    assert allocate_before(host) == held
    told(f"up in {up:.1f} s; STATUS={said!r}; READY {ms(early)} before the kubelet starts")


def seconds_before_kubelet(host: Host) -> float:
    """How long before the kubelet's start the daemon was READY."""
    ready = int(host.property("ActiveEnterTimestampMonotonic")) / 1e6
    started = int(host.property("ExecMainStartTimestampMonotonic", "kubelet")) / 1e6
    assert ready <= started, f"READY {ms(ready - started)} after the kubelet's start"
    return started - ready


@pytest.mark.usefixtures("running")
def test_upgrade_with_devices_allocated(host: Host, told: Told) -> None:
    """The kubelet misses the resource for the restart only, and the old build is removed."""
    held = allocate_before(host)
    builds = set(os.listdir(host.path(CACHE)))
    before = locks(host)
    since = time.monotonic()
    said = host.install(host.packages.following)
    assert "1 upgraded" in said, said
    ended = host.event(since, "ended", resource=RESOURCE)["at"]
    back = host.event(ended, "list", resource=RESOURCE, healthy=4)["at"]
    stopped = int(host.property("InactiveExitTimestampMonotonic")) / 1e6
    ready = int(host.property("ActiveEnterTimestampMonotonic")) / 1e6
    assert back - ready < AT_ONCE, f"back {ms(back - ready)} after READY"
    host.tell_kubelet("capacity")
    capacity = host.event(back, "capacity", resource=RESOURCE)
    assert capacity["capacity"] == 4, capacity
    host.tell_kubelet("readmit before")
    assert host.event(back, "admitted", pod="before")["ids"] == held
    assert NEXT in host.container("tt-device-plugin", "--version")
    assert host.line(stopped, f"tt-device-plugin {NEXT}")
    now = set(os.listdir(host.path(CACHE)))
    assert len([name for name in now if not name.startswith(".")]) == 1 and not builds & now, now
    host.tell_kubelet("violations")
    assert host.event(back, "violations")["number"] == 0
    assert locks(host) == before
    assert host.path(CONFIG).read_text() == CONFIGURATION
    told(
        f"the kubelet was without the plugin for {ms(back - ended)} (the restart: "
        f"{ms(ready - ended)}); capacity is the same, the pod keeps its devices; the old build is "
        "removed, the configuration kept"
    )


def start_both(host: Host) -> None:
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT}")
    host.systemctl("start", "kubelet")


@pytest.mark.usefixtures("running")
def test_another_directory_by_the_drop_in(host: Host, told: Told) -> None:
    """The configuration and the example of a drop-in move it to another kubelet's directory."""
    example = host.path(f"/usr/share/doc/{UNIT}/examples/kubelet-dir.conf")
    other = "/var/snap/microk8s/common/var/lib/kubelet"
    host.container.write(DROP_IN, example.read_text().replace("/var/lib/k0s/kubelet", other))
    host.container.write(CONFIG, f'device_plugin_dir = "{other}/device-plugins"\n{CONFIGURATION}')
    host.systemctl("stop", "kubelet")
    host.install_kubelet(f"{other}/device-plugins")
    since = time.monotonic()
    start_both(host)
    host.event(since, "registered", resource=RESOURCE)
    since = time.monotonic()
    mode = host.container("stat", "--format=%a %U", f"{other}/device-plugins").strip()
    assert mode == "750 root", mode
    said = host.container("tt-device-plugin", "check", check=False)
    assert f"{other}/device-plugins/kubelet.sock answers" in said, said
    host.systemctl("stop", "kubelet")
    host.container.write(CONFIG, CONFIGURATION)
    host.install_kubelet(DIRECTORY)
    host.path(DROP_IN).unlink()
    start_both(host)
    host.event(since, "registered", resource=RESOURCE)
    host.container.shell("rm -r /var/snap")
    told(f"registered in {other}/device-plugins, which the start made with mode 0750, and back")


# ------------------------------------------------------------------------------- errors and removal


@pytest.mark.usefixtures("running")
def test_configuration_error(host: Host, told: Told) -> None:
    """Status 78, one clear line, which `systemctl status` shows, and no restart loop."""
    host.container.write(CONFIG, 'log_level = "loud"\n')
    since = time.monotonic()
    assert not host.starts_again()
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 1.5, "time for three restarts has gone by")
    properties = host.properties()
    names = ("ActiveState", "Result", "ExecMainStatus", "NRestarts")
    seen = [properties[name] for name in names]
    assert seen == ["failed", "exit-code", "78", "0"], seen
    lines = host.journal(since - 0.5)
    lines = [line for line in lines if line[0] == 3]
    assert len(lines) == 1 and lines[0][1].startswith(f"{CONFIG}: log_level"), lines
    shown = host.systemctl("status", UNIT, check=False)
    assert lines[0][1] in shown, shown
    told(f"status 78, not restarted; journal and systemctl status: {lines[0][1]!r}")


@pytest.mark.usefixtures("running")
def test_configuration_error_does_not_fail_the_installation(host: Host, told: Told) -> None:
    """apt reinstalls the package with a warning; corrected, a start is all it takes."""
    host.container.write(CONFIG, 'log_level = "loud"\n')
    assert not host.starts_again()
    said = host.install("--reinstall", host.packages.following)
    warning = next(line for line in said.splitlines() if "refuses" in line)
    assert CONFIG in warning and "'loud'" in warning, said
    assert host.dpkg_state() == "ii"
    assert host.property("ActiveState") == "failed" and host.property("ExecMainStatus") == "78"
    since = time.monotonic()
    host.container.write(CONFIG, CONFIGURATION)
    host.systemctl("start", UNIT)
    host.event(since, "registered", resource=RESOURCE)
    told(f"apt: installed (ii), says {warning!r}; failed with 78; corrected: registered")


@pytest.mark.usefixtures("running")
def test_remove(host: Host, told: Told) -> None:
    """apt remove stops the service, and takes its sockets, its program and its files along."""
    places = " ".join(str(Path(path).parent) for path in WRITTEN)
    host.container.shell(f"mkdir -p {places} && systemctl restart {UNIT}")
    for path in WRITTEN:
        wait_until(functools.partial(host.holds, path), f"{path} is there")
    since = time.monotonic()
    host.container("apt-get", "remove", "--yes", UNIT)
    host.event(since, "ended", resource=RESOURCE)
    host.systemctl("stop", "kubelet")
    assert host.property("ActiveState") in ("inactive", "failed")
    assert host.property("LoadState") != "loaded"
    sockets = [*host.path(DIRECTORY).glob("*.sock")]
    assert not sockets, sockets
    assert not host.container.exists(CACHE) and host.container.exists(CONFIG)
    stop = host.container("journalctl", "--no-pager", "--output=cat", "--unit", UNIT).splitlines()
    assert f"{UNIT}.service: Deactivated successfully." in stop[-4:], stop[-4:]
    for path in WRITTEN:
        assert host.container.shell(f"ls -A {Path(path).parent}") == "", path
    assert locks(host)  # of containers that still run
    host.container.shell("rm -r /etc/kubernetes /var/lib/prometheus")
    told("stopped, exit 0, no socket left; the configuration and the locks stay")


def test_purge(host: Host, told: Told) -> None:
    """apt purge leaves nothing: the system's files are what they were before the installation."""
    if not host.container.exists(CONFIG):
        host.be_installed()
    host.purge()
    host.container.shell("systemctl disable kubelet 2>/dev/null || true")
    kubelet = "/etc/systemd/system/kubelet.service /var/lib/kubelet"
    host.container.shell(f"rm -rf {Path(DROP_IN).parent} {kubelet}")
    assert not (left := host.left_behind()), left
    for path in ("/run/tt-device-plugin", "/run/ttdp", "/run/cdi"):
        assert not host.holds(path), path
    assert host.container.shell(f"dpkg-query --list {UNIT} 2>/dev/null || true") == ""
    told("the files are those of before the installation")


def test_purge_of_a_node_without_kubelet(host: Host, told: Told) -> None:
    """On a node that never had a kubelet the directory made for it is gone again."""
    host.install(host.packages.current)
    assert host.container.exists(DIRECTORY)
    host.purge()
    assert not (left := host.left_behind()), left
    told("nothing left, /var/lib/kubelet neither")


# --------------------------------------------------------------------------- from the first version


EDITED = 'log_level = "debug"\n'


@pytest.mark.parametrize("edited", [False, True], ids=["as installed", "edited"])
def test_upgrade_from_the_first_version(host: Host, edited: bool, told: Told) -> None:
    """0.1.0 had it as a conffile. Nobody is asked; edited, it stays; as installed, it makes way."""
    host.install(host.packages.first)
    assert len(host.path(CONFIG).read_text().splitlines()) > 50
    if edited:
        host.container.write(CONFIG, EDITED)
    try:
        said = host.install(host.packages.following)
        now = host.path(CONFIG).read_text()
        first = host.path("/usr/share/tt-device-plugin/config-at-first.toml").read_text()
        assert now == (EDITED if edited else first) and "onfiguration file" not in said, said
        assert host.property("ActiveState") == "active"
        host.container.write(CONFIG, EDITED)  # by now edited in both cases
        host.install("--reinstall", host.packages.following)
        assert host.path(CONFIG).read_text() == EDITED
        assert os.listdir(host.container.root / "etc/tt-device-plugin") == ["config.toml"]
    finally:
        host.purge()
    assert not (left := host.left_behind()), left
    told(f"nothing asked; the file is {'as it was' if edited else 'the short one'}")
