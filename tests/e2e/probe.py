"""Prints as JSON what it can do in the service's sandbox. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
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
status = dict(
    line.split(":\t", 1)
    for line in Path("/proc/self/status").read_text().splitlines()
    if ":\t" in line
)
print(
    json.dumps(
        {
            "stat a device": attempt(lambda: os.stat(device)),
            "open a device": attempt(lambda: os.close(os.open(device, os.O_RDONLY))),
            "open a device as the driver's users do": attempt(
                lambda: os.close(os.open(device, os.O_RDWR))
            ),
            "make a device": attempt(
                lambda: os.mknod("/var/lib/kubelet/device-plugins/null", 0o20600, os.makedev(1, 3))
            ),
            "IPv4": attempt(lambda: socket.socket(socket.AF_INET).close()),
            "IPv6": attempt(lambda: socket.socket(socket.AF_INET6).close()),
            "packets": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()),
            "unix sockets": attempt(lambda: socket.socket(socket.AF_UNIX).close()),
            "a socket in the run-time directory": attempt(status_socket),
            "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "kernel events": attempt(
                lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15).bind((0, 1))
            ),
            "write to the kubelet's directory": attempt(
                writable("/var/lib/kubelet/device-plugins")
            ),
            "write to CDI's": attempt(writable("/var/run/cdi")),
            "write to labels": attempt(
                writable("/etc/kubernetes/node-feature-discovery/features.d")
            ),
            "write to the node exporter's": attempt(writable("/var/lib/prometheus/node-exporter")),
            "a directory for everybody's locks": attempt(lock_directory),
            "write to /etc": attempt(writable("/etc")),
            "write to /usr": attempt(writable("/usr")),
            "write to /var/lib": attempt(writable("/var/lib")),
            "write to /sys": attempt(writable("/sys")),
            "name of another user's process": attempt(
                lambda: Path(f"/proc/{process}/comm").read_bytes()
            ),
            "cgroup of another user's process": attempt(lambda: cgroup_of(process)),
            "cgroups": attempt(lambda: os.listdir("/sys/fs/cgroup/system.slice")),
            "make a cgroup": attempt(lambda: os.mkdir("/sys/fs/cgroup/probe")),
            "look into another user's process": attempt(
                lambda: os.readlink(f"/proc/{process}/exe")
            ),
            "look into pods": attempt(lambda: os.listdir("/var/lib/kubelet/pods")),
            "look into home directories": attempt(lambda: os.listdir(os.path.expanduser("~root"))),
            "new user namespace": attempt(new_namespace),
            "writable and executable memory": attempt(executable_memory),
            "capabilities": status["CapEff"],
            "interfaces": [name for _, name in socket.if_nameindex()]
            if hasattr(socket, "if_nameindex")
            else [],
        }
    )
)
