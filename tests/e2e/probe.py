"""Prints as JSON what can be done in the service's sandbox, in which this program runs."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

UEVENTS = 15  # NETLINK_KOBJECT_UEVENT


def attempt(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return os.strerror(error.errno or 0)
    return "yes"


def hear_the_kernel() -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, UEVENTS).bind((0, 1))


def share_a_directory() -> None:
    path = "/run/ttdp/shm/probe"
    os.mkdir(path)
    os.chmod(path, 0o1777)
    os.rmdir(path)


def main(device: str, process: str) -> None:
    """Try with a device that every user can open, and a process of another user."""
    attempts: dict[str, Callable[[], object]] = {
        "see a device": lambda: os.stat(device),
        "hear the kernel": hear_the_kernel,
        "share a directory": share_a_directory,
        "read a process's name": lambda: Path(f"/proc/{process}/comm").read_text(),
        "read a process's cgroup": lambda: Path(f"/proc/{process}/cgroup").read_text(),
        "open a device": lambda: os.open(device, os.O_RDWR),
        "reach a network": lambda: socket.socket(socket.AF_INET),
        "write to /etc": lambda: Path("/etc/probe").touch(),
        "look into pods": lambda: os.listdir("/var/lib/kubelet/pods"),
    }
    print(json.dumps({name: attempt(act) for name, act in attempts.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
