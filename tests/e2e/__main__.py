"""The package on real systemd: `make e2e`, or as root `python -m tests.e2e [--suite SUITE]… [--deb FILE]`.

Every release gets a fresh system container. The tests run in the order in which they stand here, as an operator would
do things; a name and its docstring are the promise, and what it prints is what was checked and measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.e2e.container import Missing
from tests.e2e.host import CONFIGURATION, UNIT, Host
from tests.world.processes import ROOT, wait_until

SUITES = ("bookworm", "trixie", "forky")
REQUIRED = ("bookworm", "trixie")  # the others only if they can be had
RESOURCE = "tenstorrent.com/n300"
CARDS = ("n300", "n300", "n300", "n300", "p300c")
DIRECTORY = "/var/lib/kubelet/device-plugins"
CONFIG = "/etc/tt-device-plugin/config.toml"
DROP_IN = f"/etc/systemd/system/{UNIT}.service.d/test.conf"
LINKS = "/run/tt-device-plugin/by-pci"
CACHE = "/var/cache/tt-device-plugin"
NEXT = "9.9.9"  # the version that is upgraded to

Test = Callable[[Host], str]
TESTS: list[Test] = []


def test(function: Test) -> Test:
    TESTS.append(function)
    return function


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def package(host: Host, version: str) -> str:
    directory = host.container.shared.parent.parent / "packages"
    return f"/srv/packages/{next(directory.glob(f'*_{version}_*.deb')).name}"


def current(host: Host) -> str:
    return package(host, "[!9]*")


# ------------------------------------------------------------------------------------------------ install and first run


@test
def test_install_from_a_clean_minimal_system(host: Host) -> str:
    """apt install ./….deb: enabled, active, READY seen, a STATUS worth reading; nothing else is pulled in."""
    began = time.monotonic()
    said = host.container("apt-get", "install", "--yes", current(host))
    seconds = time.monotonic() - began
    assert "0 upgraded, 1 newly installed, 0 to remove" in said, said
    properties = host.properties()
    seen = {name: properties[name] for name in ("Type", "ActiveState", "SubState", "UnitFileState", "Result")}
    assert list(seen.values()) == ["notify", "active", "running", "enabled", "success"], seen
    assert properties["StatusText"] == "no Tenstorrent device on this node; waiting for one", properties["StatusText"]
    assert host.container("dpkg", "--verify", UNIT) == ""
    return f"apt install took {seconds:.1f} s; Type=notify, active, enabled; STATUS={properties['StatusText']!r}"


@test
def test_the_program_is_extracted_and_compiled_at_install_time(host: Host) -> str:
    """The first start extracts and compiles nothing; any user can run the program; the help and the version answer."""
    trees = [name for name in os.listdir(host.container.root / CACHE[1:]) if not name.startswith(".")]
    assert len(trees) == 1, trees
    tree = host.container.root / CACHE[1:] / trees[0] / "site-packages"
    compiled = list(tree.glob("__pycache__/ttdp.*.pyc"))
    assert compiled, "ttdp is not compiled"
    begun = int(host.property("ExecMainStartTimestampMonotonic")) / 1e6
    assert compiled[0].stat().st_mtime < time.time() - (time.monotonic() - begun)
    said = host.container("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "tt-device-plugin", "list")
    assert said == "no Tenstorrent device on this node\n", said
    version = host.container("tt-device-plugin", "--version").strip()
    size = sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    python = host.container("python3", "--version").strip()
    return f"{version} on {python}: {size / 1e6:.0f} MB below {CACHE}, compiled before the start; nobody can run `list`"


@test
def test_no_device_is_active_and_quiet(host: Host) -> str:
    """Without a device it is active, says so in one line, and then nothing, while it polls."""
    polls = 3
    host.container.write(CONFIG, CONFIGURATION)
    host.container("systemctl", "restart", UNIT)
    begun = int(host.property("ExecMainStartTimestampMonotonic")) / 1e6
    wait_until(lambda: time.monotonic() > begun + 0.5 * polls + 1, "some polls have gone by")
    lines = host.journal(begun)
    assert len(lines) == 1 and "0 devices" in lines[0][1], lines
    assert host.property("ActiveState") == "active"
    return f"after {polls} polls the journal holds one line: {lines[0][1]!r}"


@test
def test_sandbox_score(host: Host) -> str:
    """systemd-analyze security gives at most 1.5, and what is left open is what the unit's comment says."""
    said = host.container("systemd-analyze", "security", UNIT)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", said)
    assert score and float(score[1]) <= 1.5, said
    exposed = sorted(set(re.findall(r"^✗ (\S+?)=", said, re.MULTILINE)))
    unit = (ROOT / "packaging/systemd/tt-device-plugin.service").read_text()
    unexplained = [name for name in exposed if f"{name}=" not in unit.split("# --- The sandbox")[1]]
    assert not unexplained, unexplained
    warnings = host.container("systemd-analyze", "verify", "--man=no", f"{UNIT}.service", check=False)
    assert UNIT not in warnings, warnings
    version = host.container("systemctl", "--version").split()[1]
    return f"systemd {version}: {score[1]} (at most 1.5); open, and explained in the unit: {', '.join(exposed)}"


@test
def test_sandbox_from_inside(host: Host) -> str:
    """From within the same sandbox: no device can be opened, no network reached, nothing written but the sockets."""
    shell = host.container.shell
    shell("mkdir -p /dev/tenstorrent /var/lib/kubelet/pods && mknod -m 666 /dev/tenstorrent/7 c 10 200")
    # 10:200 is /dev/net/tun's driver, which there is everywhere. Outside, everybody can open it.
    shell("setpriv --reuid=65534 --clear-groups sh -c ': <>/dev/tenstorrent/7'")
    path = shell(f"systemctl show --value --property=FragmentPath {UNIT}").strip()
    unit = (host.container.root / path[1:]).read_text()
    unit = re.sub(r"^Type=.*$", "Type=oneshot", unit, flags=re.MULTILINE)
    unit = re.sub(r"^(Restart|WatchdogSec|ExecReload|NotifyAccess).*\n", "", unit, flags=re.MULTILINE)
    probe = "ExecStart=/usr/bin/python3 /srv/project/tests/e2e/probe.py /dev/tenstorrent/7"
    unit = re.sub(r"^ExecStart=.*$", f"{probe}\nStandardOutput=file:/srv/shared/probe", unit, flags=re.MULTILINE)
    host.container.write("/etc/systemd/system/probe.service", unit)
    shell("systemctl daemon-reload && systemctl start probe")
    shell("rm -r /etc/systemd/system/probe.service /dev/tenstorrent /var/lib/kubelet/pods && systemctl daemon-reload")
    found = json.loads((host.shared / "probe").read_text())
    assert found.pop("capabilities") == "0000000000000000"
    assert found.pop("interfaces") in (["lo"], []), "the network namespace holds more than a loopback"
    allowed = {name for name, answer in found.items() if answer == "yes"}
    assert allowed == {"stat a device", "unix sockets", "kernel events", "write to the kubelet's directory"}, found
    denied = sorted(f"{name} ({answer})" for name, answer in found.items() if answer != "yes")
    return f"no capability; allowed: {', '.join(sorted(allowed))}; denied: {', '.join(denied)}"


# -------------------------------------------------------------------------------------------------- devices and kubelet


@test
def test_devices_before_the_kubelet(host: Host) -> str:
    """Cards that appear are found; STATUS counts them and says that the kubelet is awaited; start to READY in time."""
    since = time.monotonic()
    host.plug(*CARDS)
    status = host.status_becomes(f"4 × {RESOURCE}, 4 healthy", "waiting for kubelet")
    assert host.line(since, "0000:01:00.0")[0] == 6
    host.container("systemctl", "restart", UNIT)
    times = []
    for _ in range(5):
        host.container("systemctl", "restart", UNIT)
        times.append(host.seconds_to_ready())
    assert sorted(times)[2] < 1, times
    pid = host.property("MainPID")
    memory = dict(line.split(":", 1) for line in host.container("cat", f"/proc/{pid}/status").splitlines())
    resident = int(memory["VmRSS"].split()[0]) / 1024
    assert resident < 60, resident
    return (
        f"STATUS={status!r}; warm start to READY: median {ms(sorted(times)[2])}, worst {ms(max(times))}; "
        f"resident {resident:.1f} MB ({int(memory['RssAnon'].split()[0]) / 1024:.1f} MB anonymous)"
    )


@test
def test_kubelet_starts_after(host: Host) -> str:
    """A kubelet that starts later: both resources are registered at once, and a pod gets its devices."""
    host.container.shell("systemctl daemon-reload")
    since = time.monotonic()
    host.container("systemctl", "start", "kubelet")
    began = host.event(since, "started")["at"]
    took = max(
        host.event(since, "registered", resource=name)["at"] - began for name in (RESOURCE, "tenstorrent.com/p300")
    )
    assert took < 1, took
    status = host.status_becomes("registered with kubelet")
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    pod = host.event(since, "admitted", pod="before")
    assert "TT_VISIBLE_DEVICES=0000:01:00.0,0000:02:00.0" in pod["env"], pod
    assert pod["devices"][0] == f"{LINKS}/0000:01:00.0:/dev/tenstorrent/0:rw", pod
    return f"registered {ms(took)} after the socket appeared; STATUS={status!r}; a pod got {pod['ids'][0]}"


@test
def test_journal_priorities(host: Host) -> str:
    """Journal lines carry their priority: information 6, an unhealthy device 4, an error 3; identifier and unit too."""
    since = time.monotonic()
    host.chip("01:00.0").heat(110)
    priority, message = host.line(since, "too hot")
    assert priority == 4, (priority, message)
    host.chip("01:00.0").heat(40)
    assert host.line(since, "0000:01:00.0 (n300): healthy again")[0] == 6
    good = (host.container.root / CONFIG[1:]).read_text()
    host.container.write(CONFIG, "nonsense = 1\n")
    host.container("systemctl", "reload", UNIT)
    error = host.line(since, "configuration is not reloaded")
    host.container.write(CONFIG, good)
    assert error[0] == 3, error
    assert not [entry for entry in host.journal() if re.match(r"<\d>", entry[1])], "a prefix is left in a message"
    return f"6 information, 4 {message!r}, 3 {error[1]!r}"


@test
def test_a_device_fails_and_recovers(host: Host) -> str:
    """A chip that dies leaves allocatable, with a reason in journal and STATUS, and comes back by itself."""
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
    return f"journal: {message!r}; STATUS={status!r}; and healthy again"


@test
def test_kubelet_restarts(host: Host) -> str:
    """The kubelet restarts and deletes every socket: registered again at once, and the pod of before is admitted."""
    worst = 0.0
    for _ in range(5):
        since = time.monotonic()
        host.container("systemctl", "restart", "kubelet")
        began = host.event(since, "started")["at"]
        worst = max(worst, host.event(since, "registered", resource=RESOURCE)["at"] - began)
    assert worst < 1, worst
    host.event(began, "list", resource=RESOURCE, healthy=4)
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    host.event(since, "admitted", pod="before")
    assert host.property("NRestarts") == "0"
    return f"5 restarts: registered after at most {ms(worst)}; the pod that held 2 devices is admitted again"


@test
def test_kubelet_goes_away(host: Host) -> str:
    """No kubelet: the service stays up and says that it waits; a killed one, and a new directory, are no problem."""
    since = time.monotonic()
    host.container("systemctl", "stop", "kubelet")
    status = host.status_becomes("waiting for kubelet")
    # The directory itself is deleted, and a new one made, as by `kubeadm reset` and `join`. (By way of another name:
    # the plugin puts a deleted socket back at once, and the directory is not empty then.)
    host.container.shell(f"mv {DIRECTORY} {DIRECTORY}.old && rm -rf {DIRECTORY}.old && systemctl start kubelet")
    host.event(since, "registered", resource=RESOURCE)
    since = time.monotonic()
    host.container("systemctl", "kill", "--signal=KILL", "kubelet")
    host.status_becomes("waiting for kubelet")
    host.container("systemctl", "restart", "kubelet")
    host.event(since, "registered", resource=RESOURCE)
    host.status_becomes("registered with kubelet")
    assert host.property("ActiveState") == "active" and host.property("NRestarts") == "0"
    return f"STATUS={status!r}; registered again in a directory that was deleted and made anew, and after kill -9"


@test
def test_reload_with_a_good_and_a_bad_file(host: Host) -> str:
    """systemctl reload takes a good file over without a restart; a bad one is refused in one line and the old stays."""
    pid, since = host.property("MainPID"), time.monotonic()
    host.container.write(CONFIG, 'resource_naming = "arch"\n' + CONFIGURATION)
    host.container("systemctl", "reload", UNIT)
    host.event(since, "registered", resource="tenstorrent.com/wormhole")
    host.status_becomes("4 × tenstorrent.com/wormhole", "2 × tenstorrent.com/blackhole")
    host.container.write(CONFIG, CONFIGURATION)
    host.container("systemctl", "reload", UNIT)
    for name in (RESOURCE, "tenstorrent.com/p300"):
        host.event(since, "registered", resource=name)
    host.status_becomes("registered with kubelet")
    since = time.monotonic()
    host.container.write(CONFIG, 'log_level = "loud"\n')
    host.container("systemctl", "reload", UNIT)
    message = host.line(since, "configuration is not reloaded")[1]
    errors = [line for line in host.journal(since) if line[0] <= 4]
    assert len(errors) == 1, errors
    assert CONFIG in message and "log_level" in message and "'loud'" in message, message
    host.container.write(CONFIG, CONFIGURATION)
    assert (host.property("MainPID"), host.property("ActiveState")) == (pid, "active")
    host.status_becomes("registered with kubelet")
    return f"resources renamed and back, same PID; refused: {message!r}"


@test
def test_links_outlive_the_service(host: Host) -> str:
    """The links by PCI address lead to the nodes, and stay while the service is stopped: containers start with them."""
    link = f"{LINKS}/0000:02:00.0"
    target = host.container("readlink", link).strip()
    assert target == "/srv/shared/node/dev/tenstorrent/1", target
    since = time.monotonic()
    host.container("systemctl", "stop", UNIT)
    assert host.container("readlink", link).strip() == target
    host.container("systemctl", "start", UNIT)
    host.event(since, "registered", resource=RESOURCE)
    return f"{link} -> {target}, also while the service is stopped"


@test
def test_kill_minus_9(host: Host) -> str:
    """kill -9: back within two seconds, and registered."""
    since = time.monotonic()
    host.container("systemctl", "kill", "--signal=KILL", UNIT)
    took = host.event(since, "registered", resource=RESOURCE)["at"] - since
    assert took < 2, took
    host.status_becomes("registered with kubelet")
    restarts = int(host.property("NRestarts"))
    assert restarts == 1, restarts
    return f"registered {ms(took)} after the kill"


@test
def test_sigstop(host: Host) -> str:
    """A daemon that hangs (SIGSTOP) is restarted by the watchdog. Shipped: 20 s; here 2 s, by a drop-in."""
    assert host.property("WatchdogUSec") == "20s"
    host.container.write(DROP_IN, "[Service]\nWatchdogSec=2s\n")
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT}")
    host.status_becomes("registered with kubelet")
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 4, "twice the watchdog's time has gone by")
    assert host.property("NRestarts") == "0", "a daemon that is well was restarted"
    since = time.monotonic()
    host.container("systemctl", "kill", "--signal=STOP", UNIT)
    took = host.event(since, "registered", timeout=20, resource=RESOURCE)["at"] - since
    assert host.property("NRestarts") == "1"
    said = host.container("journalctl", "--unit", UNIT, "--no-pager", "--output=cat")
    assert "Watchdog timeout" in said, said
    (host.container.root / DROP_IN[1:]).unlink()
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT}")
    host.status_becomes("registered with kubelet")
    return f"with WatchdogSec=2s registered again {took:.1f} s after the stop, and never restarted while it was well"


@test
def test_a_damaged_program_never_starts_silently(host: Host) -> str:
    """Changed, missing and cut files of the extracted tree are told of and made anew; so is the whole tree."""
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
        priority, message = host.line(since, "extracting it anew")
        assert priority == 4
        said.append(f"{name} ({message.partition(': ')[2].partition(';')[0].rpartition('/')[2]})")
        assert host.property("ActiveState") == "active"
    since = time.monotonic()
    host.container.shell(f"rm -r {CACHE} && systemctl restart {UNIT}")
    assert host.property("ActiveState") == "active"
    took = host.seconds_to_ready()
    host.container.shell(f"systemctl restart {UNIT}")
    assert not [line for line in host.journal(since) if "damaged" in line[1]]
    return f"told of and made anew: {', '.join(said)}; without any tree a start takes {took:.1f} s"


# --------------------------------------------------------------------------------------------------- boot and upgrade


@test
def test_boot_with_the_kubelet(host: Host) -> str:
    """A boot that starts the kubelet as well: READY before it starts, registered within its first second."""
    host.container("systemctl", "enable", "kubelet")
    host.event(0, "registered", resource=RESOURCE)
    down = host.container.shut_down()
    since = time.monotonic()
    up = host.container.boot()
    began = host.event(since, "started", 20)["at"]
    registered = max(
        host.event(since, "registered", resource=name)["at"] for name in (RESOURCE, "tenstorrent.com/p300")
    )
    host.event(since, "list", resource=RESOURCE, healthy=4)
    host.tell_kubelet(f"admit before {RESOURCE}=2")
    admitted = host.event(since, "admitted", pod="before")
    ready = int(host.property("ActiveEnterTimestampMonotonic")) / 1e6
    started = int(host.property("ExecMainStartTimestampMonotonic", "kubelet")) / 1e6
    assert ready <= started, f"READY {ms(ready - started)} after the kubelet's start"
    assert registered - began < 1, registered - began
    ready_after = int(host.property("ActiveEnterTimestampMonotonic")) - int(
        host.property("UserspaceTimestampMonotonic", "")
    )
    return (
        f"down in {down:.1f} s, up in {up:.1f} s; READY {ms(started - ready)} before the kubelet starts, registered "
        f"{ms(registered - began)} after its socket is there; the pod of before has {admitted['ids'][0]} again"
        f" (READY {ready_after / 1e6:.1f} s into the boot)"
    )


@test
def test_upgrade_with_devices_allocated(host: Host) -> str:
    """apt install of the next version: the kubelet misses the resource for the restart only; the old build is gone."""
    host.event(0, "registered", resource=RESOURCE)
    builds = set(os.listdir(host.container.root / CACHE[1:]))
    since = time.monotonic()
    said = host.container("apt-get", "install", "--yes", package(host, NEXT))
    assert "1 upgraded" in said, said
    ended = host.event(since, "ended", resource=RESOURCE)["at"]
    back = host.event(ended, "list", resource=RESOURCE, healthy=4)["at"]
    stopped = int(host.property("InactiveExitTimestampMonotonic")) / 1e6
    ready = int(host.property("ActiveEnterTimestampMonotonic")) / 1e6
    assert back - ready < 1, f"back {ms(back - ready)} after READY"
    host.tell_kubelet("capacity")
    capacity = host.event(back, "capacity", resource=RESOURCE)
    assert capacity["capacity"] == 4, capacity
    host.tell_kubelet("readmit before")
    host.event(back, "admitted", pod="before")
    assert NEXT in host.container("tt-device-plugin", "--version")
    assert host.line(stopped, f"tt-device-plugin {NEXT}")
    now = set(os.listdir(host.container.root / CACHE[1:]))
    assert len([name for name in now if not name.startswith(".")]) == 1 and not builds & now, now
    host.tell_kubelet("violations")
    assert host.event(back, "violations")["number"] == 0
    assert (host.container.root / CONFIG[1:]).read_text() == CONFIGURATION
    return (
        f"the kubelet was without the plugin for {ms(back - ended)} (the restart: {ms(ready - ended)}); capacity "
        "is the same, the pod keeps its devices; "
        "the old build is removed, the configuration kept"
    )


@test
def test_another_directory_by_the_drop_in(host: Host) -> str:
    """The drop-in example, with its path changed as it says, moves the plugin to another kubelet's directory."""
    example = host.container.root / "usr/share/doc/tt-device-plugin/examples/kubelet-dir.conf"
    other = "/var/snap/microk8s/common/var/lib/kubelet"
    host.container.write(DROP_IN, example.read_text().replace("/var/lib/k0s/kubelet", other))
    host.container("systemctl", "stop", "kubelet")
    host.install_kubelet(f"{other}/device-plugins")
    since = time.monotonic()
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT} && systemctl start kubelet")
    host.event(since, "registered", resource=RESOURCE)
    since = time.monotonic()
    mode = host.container("stat", "--format=%a %U", f"{other}/device-plugins").strip()
    assert mode == "750 root", mode
    host.container("systemctl", "stop", "kubelet")
    host.install_kubelet(DIRECTORY)
    (host.container.root / DROP_IN[1:]).unlink()
    host.container.shell(f"systemctl daemon-reload && systemctl restart {UNIT} && systemctl start kubelet")
    host.event(since, "registered", resource=RESOURCE)
    host.container.shell("rm -r /var/snap")
    return f"registered in {other}/device-plugins, which the start made with mode 0750, and back"


# ------------------------------------------------------------------------------------------------- errors and removal


@test
def test_configuration_error(host: Host) -> str:
    """A bad configuration: status 78, one clear line, which `systemctl status` shows, and no restart loop."""
    host.container.write(CONFIG, 'log_level = "loud"\n')
    since = time.monotonic()
    assert host.container.status_of("systemctl", "restart", UNIT) != 0
    began = time.monotonic()
    wait_until(lambda: time.monotonic() > began + 1.5, "time for three restarts has gone by")
    properties = host.properties()
    seen = {name: properties[name] for name in ("ActiveState", "Result", "ExecMainStatus", "NRestarts")}
    assert list(seen.values()) == ["failed", "exit-code", "78", "0"], seen
    lines = host.journal(since - 0.5)
    lines = [line for line in lines if line[0] == 3]
    assert len(lines) == 1 and lines[0][1].startswith(f"{CONFIG}: log_level"), lines
    shown = host.container("systemctl", "status", UNIT, check=False)
    assert lines[0][1] in shown, shown
    return f"status 78, not restarted; journal and systemctl status: {lines[0][1]!r}"


@test
def test_configuration_error_does_not_fail_the_installation(host: Host) -> str:
    """With a bad configuration, apt reinstalls the package without an error; corrected, a start is all it takes."""
    host.container("apt-get", "install", "--yes", "--reinstall", package(host, NEXT))
    assert host.container("dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", UNIT).strip() == "ii"
    assert host.property("ActiveState") == "failed" and host.property("ExecMainStatus") == "78"
    since = time.monotonic()
    host.container.write(CONFIG, CONFIGURATION)
    host.container("systemctl", "start", UNIT)
    host.event(since, "registered", resource=RESOURCE)
    return "apt: installed (ii), service failed with 78; after the correction: started and registered"


@test
def test_remove(host: Host) -> str:
    """apt remove stops the service within a second or so, and takes its sockets and its program along."""
    since = time.monotonic()
    host.container("apt-get", "remove", "--yes", UNIT)
    host.event(since, "ended", resource=RESOURCE)
    host.container("systemctl", "stop", "kubelet")
    assert host.property("ActiveState") in ("inactive", "failed") and host.property("LoadState") != "loaded"
    sockets = [name for name in os.listdir(host.container.root / DIRECTORY[1:]) if name.endswith(".sock")]
    assert not sockets, sockets
    assert not host.container.exists(CACHE) and host.container.exists(CONFIG)
    stop = host.container("journalctl", "--no-pager", "--output=cat", "--unit", UNIT).splitlines()
    assert f"{UNIT}.service: Deactivated successfully." in stop[-4:], stop[-4:]
    return "stopped, exit 0, no socket left; the configuration stays"


@test
def test_purge(host: Host) -> str:
    """apt purge leaves nothing: the system's files are what they were before the installation."""
    host.container("apt-get", "purge", "--yes", UNIT)
    host.container.shell("systemctl disable kubelet 2>/dev/null; rm -f /etc/systemd/system/kubelet.service")
    host.container.shell(f"rm -rf {Path(DROP_IN).parent} /var/lib/kubelet")
    left = host.container.files() - host.files_before
    left = {path for path in left if not path.startswith(("dev/", "proc/", "sys/"))}
    assert not left, sorted(left)
    assert host.container.status_of("test", "-e", "/run/tt-device-plugin") != 0
    assert host.container.shell(f"dpkg-query --list {UNIT} 2>/dev/null || true") == ""
    return f"{len(host.files_before)} files as before the installation, and none more"


@test
def test_purge_of_a_node_without_kubelet(host: Host) -> str:
    """Installed and purged on a node that never had a kubelet: the directory made for it is gone again."""
    host.container("apt-get", "install", "--yes", current(host))
    assert host.container.exists(DIRECTORY)
    host.container("apt-get", "purge", "--yes", UNIT)
    left = {
        path for path in host.container.files() - host.files_before if not path.startswith(("dev/", "proc/", "sys/"))
    }
    assert not left, sorted(left)
    return "nothing left, /var/lib/kubelet neither"


# ------------------------------------------------------------------------------------------------------------- runner


def next_version(deb: Path, packages: Path, work: Path) -> None:
    """A package of another version and another program, made of the same sources, to upgrade to."""
    source = work / "next"
    needless = shutil.ignore_patterns("__pycache__")
    for name in ("generated", "packaging", "build/wheels"):
        if (ROOT / name).exists():
            shutil.copytree(ROOT / name, source / name, ignore=needless)
    for name in ("ttdp.py", "shiv.toml"):
        shutil.copy(ROOT / name, source)
    for path, old in (
        (source / "ttdp.py", r'(?m)^__version__ = ".*"$'),
        (source / "packaging/deb/changelog", r"\A\S+ \(\S+\)"),
    ):
        new = f'__version__ = "{NEXT}"' if path.suffix == ".py" else f"{UNIT} ({NEXT})"
        path.write_text(re.sub(old, new, path.read_text(), count=1))
    command = [sys.executable, "packaging/build_deb.py", "--output", str(packages), "--no-lintian"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(int(deb.stat().st_mtime))}
    subprocess.run(command, cwd=source, check=True, env=environment, stdout=subprocess.DEVNULL)


def run_suite(suite: str, work: Path, packages: Path, python: Path, wanted: str) -> tuple[int, list[str]]:
    """How many tests have passed on one release, and the names of those that have failed."""
    began = time.monotonic()
    host = Host(suite, work, packages, python)
    passed = 0
    failed: list[str] = []
    try:
        up = host.container.boot()
        host.files_before = host.container.files()
        release = re.search(r'PRETTY_NAME="(.*)"', host.container("cat", "/etc/os-release"))
        version = host.container("systemctl", "--version").splitlines()[0]
        print(f"\n=== {release[1] if release else suite}, {version}: booted in {up:.1f} s", flush=True)
        for function in TESTS:
            if not re.search(wanted, function.__name__) and function is not TESTS[0]:
                continue
            since = time.monotonic()
            try:
                found = function(host)
                passed += 1
                print(
                    f"ok    {suite} {function.__name__} ({time.monotonic() - since:.1f} s)\n      {found}", flush=True
                )
            except Exception as error:
                failed.append(f"{suite} {function.__name__}")
                print(f"FAIL  {suite} {function.__name__}: {function.__doc__}", flush=True)
                traceback.print_exception(error, file=sys.stdout)
                with contextlib.suppress(Exception):
                    print(host.container("journalctl", "--no-pager", "--lines=12", "--output=short-monotonic"))
                    print(host.last_events(12))
                    host.recover()
    finally:
        host.close()
    print(f"=== {suite}: {passed} ok, {len(failed)} failed, in {time.monotonic() - began:.0f} s", flush=True)
    return passed, failed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e", description=__doc__.partition("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all that can be had")
    parser.add_argument("--deb", type=Path, help="default: the one in dist")
    parser.add_argument("--only", default="", metavar="REGEX", help="tests by name (and the installation)")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("this boots system containers: run it as root")
    tools = {
        "mmdebstrap": "mmdebstrap",
        "systemd-nspawn": "systemd-container",
        "dpkg-buildpackage": "dpkg-dev debhelper",
    }
    if missing := [package for tool, package in tools.items() if not shutil.which(tool)]:
        sys.exit(f"missing: apt install {' '.join(missing)}")
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True).stdout.strip()
    deb = options.deb or next(iter(sorted(ROOT.glob(f"dist/*_{architecture}.deb"))), None)
    if deb is None:
        sys.exit("no package to test: make deb")

    began = time.monotonic()
    passed = 0
    failed: list[str] = []
    without: list[str] = []
    work = Path(tempfile.mkdtemp(prefix="ttdp-e2e-", dir="/var/tmp"))
    try:
        packages = work / "packages"
        packages.mkdir()
        shutil.copy2(deb, packages)
        next_version(deb, packages, work)
        subprocess.run(["dpkg-deb", "--extract", str(deb), str(work / "deb")], check=True)
        pyz = work / "deb/usr/lib/tt-device-plugin/tt-device-plugin.pyz"
        extract = [sys.executable, "-I", str(pyz), "--version"]
        subprocess.run(
            extract, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "SHIV_ROOT": str(work / "shiv")}
        )
        python = next((work / "shiv").glob("*/site-packages"))
        for suite in options.suite or SUITES:
            try:
                more, wrong = run_suite(suite, work / suite, packages, python, options.only)
                passed, failed = passed + more, failed + wrong
            except Missing as reason:
                without.append(f"{suite}: {reason}")
                if suite in REQUIRED:
                    failed.append(f"{suite}: {reason}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\n{passed} tests passed, {len(failed)} failed, in {time.monotonic() - began:.0f} s")
    for line in without:
        print(f"NOT RUN: {line}")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
