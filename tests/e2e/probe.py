"""Prints as JSON what it can do in the service's sandbox. Standard library only."""

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


device, process = sys.argv[1:]
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
    "kernel events": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15).bind((0, 1)),
    "write to the kubelet's directory": writable(plugins),
    "write to CDI's": writable("/var/run/cdi"),
    "write to labels": writable("/etc/kubernetes/node-feature-discovery/features.d"),
    "write to the node exporter's": writable("/var/lib/prometheus/node-exporter"),
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
