"""Prints as JSON what can be done in the service's sandbox, in which this program runs."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

KERNEL = 15  # NETLINK_KOBJECT_UEVENT
NEWUSER = 0x10000000


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "yes"


def shared_directory() -> None:
    path = "/run/ttdp/shm/probe"
    os.mkdir(path)
    os.chmod(path, 0o1777)
    os.rmdir(path)


def user_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")


def main(device: str, process: str) -> None:
    """Try with a device that every user can open, and a process of another user."""
    executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    attempts: dict[str, Callable[[], object]] = {
        "see a device": lambda: os.stat(device),
        "hear the kernel": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, KERNEL).bind(
            (0, 1)
        ),
        "make a directory for everybody": shared_directory,
        "read the name of a process": lambda: Path(f"/proc/{process}/comm").read_text(),
        "read the cgroup of a process": lambda: Path(f"/proc/{process}/cgroup").read_text(),
        "open a device": lambda: os.open(device, os.O_RDWR),
        "reach a network": lambda: socket.socket(socket.AF_INET),
        "write to /etc": lambda: Path("/etc/probe").touch(),
        "look into a process": lambda: os.readlink(f"/proc/{process}/exe"),
        "look into pods": lambda: os.listdir("/var/lib/kubelet/pods"),
        "make a user namespace": user_namespace,
        "write to executable memory": lambda: mmap.mmap(-1, 4096, prot=executable),
    }
    found = {name: attempt(act) for name, act in attempts.items()}
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:\t")[2].split()[0]
    print(json.dumps(found | {"capabilities": capabilities}))


if __name__ == "__main__":
    main(*sys.argv[1:])
