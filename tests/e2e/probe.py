"""The service's sandbox from inside: a program that prints as JSON what it can do there.

`RUN` runs it in a system with the package; `assert_sandboxed()` judges what it has printed.
Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "yes"


def writable(directory: str) -> Callable[[], None]:
    def act() -> None:
        path = f"{directory}/probe-{os.getpid()}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
        os.unlink(path)

    return act


def status_socket() -> None:
    path = f"{os.environ['RUNTIME_DIRECTORY']}/status.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
    os.unlink(path)


def lock_directory() -> None:
    path = f"/run/ttdp/shm/probe-{os.getpid()}"
    os.mkdir(path)
    os.chmod(path, 0o1777)
    os.rmdir(path)


def new_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000) < 0:
        raise OSError(ctypes.get_errno(), "unshare")


def executable_memory() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def cgroup_of(process: str) -> None:
    """Read whose a process is; where cgroups are not shown there is nothing but the root's."""
    lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
    if not any(line.endswith("other.service") for line in lines):
        raise OSError(errno.ENODATA, str(lines))


def main(device: str, process: str) -> None:
    """Print what can be done: with a device that others can open, and to another user's process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)

    plugins = "/var/lib/kubelet/device-plugins"
    attempts: dict[str, Callable[[], object]] = {
        "stat a device": lambda: os.stat(device),
        "open a device": lambda: os.close(os.open(device, os.O_RDONLY)),
        "open a device as the driver's users do": lambda: os.close(os.open(device, os.O_RDWR)),
        "make a device": lambda: os.mknod(f"{plugins}/null", 0o20600, os.makedev(1, 3)),
        "IPv4": lambda: socket.socket(socket.AF_INET).close(),
        "IPv6": lambda: socket.socket(socket.AF_INET6).close(),
        "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
        "unix sockets": lambda: socket.socket(socket.AF_UNIX).close(),
        "a socket in the run-time directory": status_socket,
        "kernel events": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15).bind(
            (0, 1)
        ),
        "write to the kubelet's directory": writable(plugins),
        "write to CDI's": writable("/var/run/cdi"),
        "write to labels": writable("/etc/kubernetes/node-feature-discovery/features.d"),
        "write to the node exporter's": writable("/var/lib/prometheus/node-exporter"),
        "write to its own state": writable(os.environ["STATE_DIRECTORY"]),
        "a directory for everybody's locks": lock_directory,
        "write to /etc": writable("/etc"),
        "write to /usr": writable("/usr"),
        "write to /var/lib": writable("/var/lib"),
        "write to /sys": writable("/sys"),
        "name of another user's process": lambda: Path(f"/proc/{process}/comm").read_bytes(),
        "cgroup of another user's process": lambda: cgroup_of(process),
        "cgroups": lambda: os.listdir("/sys/fs/cgroup/system.slice"),
        "make a cgroup": lambda: os.mkdir("/sys/fs/cgroup/probe"),
        "look into another user's process": lambda: os.readlink(f"/proc/{process}/exe"),
        "look into pods": lambda: os.listdir("/var/lib/kubelet/pods"),
        "look into home directories": lambda: os.listdir(os.path.expanduser("~root")),
        "new user namespace": new_namespace,
        "writable and executable memory": executable_memory,
    }

    found: dict[str, object] = {name: attempt(act) for name, act in attempts.items()}
    found["capabilities"] = status["CapEff"]
    found["interfaces"] = [name for _, name in socket.if_nameindex()]
    print(json.dumps(found))


# -- outside the sandbox ---------------------------------------------------------------------------


# A script that runs this file ($1) once in the service's own sandbox; its output is the file $2.
# The sandbox shows processes of containers, so there is one of another user, with capabilities. $3
# is the number of a device that any user outside the sandbox can open.
RUN = """
set -e
made="/dev/tenstorrent /var/lib/kubelet/pods /var/lib/prometheus"
mkdir -p $made /var/lib/prometheus/node-exporter
# Without a kubelet there is none, and the daemon makes it only some time after its parent is there.
mkdir -p /var/lib/kubelet/device-plugins
mkdir -p /etc/kubernetes/node-feature-discovery/features.d
mknod -m 666 /dev/tenstorrent/7 c $3
setpriv --reuid=65534 --clear-groups sh -c ': <>/dev/tenstorrent/7'
systemd-run --quiet --unit=other --uid=65534 \\
    --property=AmbientCapabilities='CAP_NET_RAW CAP_SYS_CHROOT' sleep infinity
probe="$1 /dev/tenstorrent/7 $(systemctl show --value --property=MainPID other)"
# The end of the probe must not delete the daemon's run-time directory.
sed -E -e 's/^Type=.*/Type=oneshot/' -e 's/^RuntimeDirectory=.*/RuntimeDirectory=probe/' \\
    -e '/^(Restart|WatchdogSec|ExecReload|NotifyAccess|ExecStopPost|ExecStartPre=.*back-off)/d' \\
    -e "s,^ExecStart=.*,ExecStart=/usr/bin/python3 $probe\\nStandardOutput=file:$2," \\
    $(systemctl show --value --property=FragmentPath tt-device-plugin) \\
    >/run/systemd/system/probe.service
systemctl daemon-reload
systemctl start probe
systemctl stop other
rm -r $made /run/systemd/system/probe.service
systemctl daemon-reload
"""
ALLOWED = {
    "stat a device",
    "unix sockets",
    "a socket in the run-time directory",
    "kernel events",
    "a directory for everybody's locks",
    "name of another user's process",
    "cgroup of another user's process",
    "cgroups",
    "write to the kubelet's directory",
    "write to CDI's",
    "write to the node exporter's",
    "write to labels",
    "write to its own state",
}


def assert_sandboxed(found: dict[str, Any]) -> str:
    """Check what was found to be possible; return a summary of what is not."""
    assert found["capabilities"] == "0000000000000000"
    assert found["interfaces"] in (["lo"], [])

    answers = {name: found[name] for name in found.keys() - {"capabilities", "interfaces"}}
    assert {name for name, answer in answers.items() if answer == "yes"} == ALLOWED, answers
    assert answers["open a device"] == "Operation not permitted", answers
    return ", ".join(f"{name} ({answers[name]})" for name in sorted(answers.keys() - ALLOWED))


if __name__ == "__main__":
    main(*sys.argv[1:])
