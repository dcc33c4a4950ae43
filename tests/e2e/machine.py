"""A machine for one test at a time: namespaces of its own, processes that can lose power.

/var/lib, /var/log and /run in it are directories of a scratch tree. Kubelet and containerd use
their usual paths (the kubelet's directory for device plugins cannot be moved) and never see those
of the host. A power cut is the death of one process, the namespace's first, which takes all others
with it. Only cgroups are shared: everything is kept below one cgroup, which is removed at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.kubeletconfig import NODE_ADDRESS, NODE_NAME
from tests.world.processes import LONG_PATIENCE, Broken, wait_until

PREFIX = "ttdp-e2e-"
HUNG = 1200.0  # seconds after which a command will not end
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
CLONE_NEWNET = 0x40000000

# Whole directories that every host has: a mount point of our own, /var/lib/kubelet say, would have
# to be made and removed on the host, which would unmount it in every other machine.
MOUNTS = {"/run": "run", "/var/log": "log", "/var/lib": "lib"}

# What the kubelet sets for the whole kernel; in here it gets plain files to write to.
SYSCTLS = ["vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"]
SYSCTLS += ["kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"]


class Machine:
    """A node without its software: processes that can lose power, a disk that survives it.

    Everything lies below `scratch`, which `destroy()` removes. It is in /var/tmp because overlayfs
    needs another file system than a tmpfs, and short because paths of sockets have to be.
    """

    def __init__(self) -> None:
        self._held = Scratch()
        self.scratch = self._held.path
        self.cgroup = f"/{self.scratch.name}"
        self.logs = self.scratch / "logs"
        self.logs.mkdir()
        self._unshare: subprocess.Popen[bytes] | None = None
        self._init_pid = 0

    # Power

    def power_on(self) -> None:
        """Make the namespaces, with one process in them that does nothing but keep them."""
        assert self._unshare is None, "it is on already"
        script = "\n".join(self._first_script())
        make_cgroups(self.cgroup)
        self._unshare = subprocess.Popen(
            ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.logs / "machine.log").open("ab"),
        )

        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"on\n":
            self._unshare.wait()
            raise RuntimeError(f"no namespaces:\n{tail(self.logs / 'machine.log')}")
        pid = self._unshare.pid
        self._init_pid = wait_until(lambda: _child_of(pid), "the first process")

    def _first_script(self) -> Iterator[str]:
        """Yield the lines of what the first process does; make what they need."""
        yield "set -e"
        for inside, outside in MOUNTS.items():
            (self.scratch / outside).mkdir(exist_ok=True)
            yield f"mount --bind {self.scratch / outside} {inside}"

        for name in SYSCTLS:
            private = self.scratch / "sysctl" / name
            private.parent.mkdir(parents=True, exist_ok=True)
            private.write_text(Path("/proc/sys", name).read_text())
            yield f"mount --bind {private} /proc/sys/{name}"

        yield f"mount --bind {self._two_numa_nodes()} /sys/devices/system/node"
        yield f"busybox hostname {NODE_NAME}"
        yield "busybox ip link set lo up"
        yield f"busybox ip address add {NODE_ADDRESS}/32 dev lo"

        # It inherits every orphan; with SIGCHLD ignored the kernel reaps them. It ends with its
        # stdin: should the tests be killed outright, the machine goes down all the same.
        yield "echo on"
        yield "exec env --ignore-signal=CHLD cat"

    def _two_numa_nodes(self) -> Path:
        """Make a /sys/devices/system/node with two nodes, to which the CPUs are dealt out."""
        root = self.scratch / "numa"
        shutil.rmtree(root, ignore_errors=True)

        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024 // 2
        for node, distance in enumerate(("10 20", "20 10")):
            directory = root / f"node{node}"
            directory.mkdir(parents=True)
            (directory / "meminfo").write_text(f"Node {node} MemTotal: {memory} kB\n")
            (directory / "distance").write_text(distance)

        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
            (root / f"node{int(path.name[3:]) % 2}" / path.name).symlink_to(path)
        for name in ("online", "possible", "has_cpu", "has_memory"):
            (root / name).write_text("0-1\n")
        return root

    def power_off(self) -> None:
        """Cut the power: every process dies in one instant, every mount is gone, /run is empty."""
        if self._unshare is None:
            return

        # The kernel kills all others, and holds this one until they are gone.
        if self._init_pid:
            os.kill(self._init_pid, signal.SIGKILL)
        self._unshare.wait(LONG_PATIENCE)

        assert self._unshare.stdin is not None and self._unshare.stdout is not None
        self._unshare.stdin.close()
        self._unshare.stdout.close()
        self._unshare, self._init_pid = None, 0
        shutil.rmtree(self.scratch / "run")
        remove_cgroups(self.cgroup)

    def destroy(self) -> None:
        """Switch off and leave nothing behind."""
        self.power_off()
        self._held.remove()

    # Inside

    def _entering(self, argv: Sequence[str]) -> list[str]:
        assert self._unshare is not None, "the machine is off"
        return ["nsenter", f"--target={self._init_pid}", *NAMESPACES, "--", *argv]

    def spawn(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a process in the machine; its output is appended to `log`."""
        with log.open("ab") as file:
            output: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            return Process(subprocess.Popen(self._entering(argv), env=env, **output), log)

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end."""
        command = self._entering(argv)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HUNG
        )

    def mount(self, *arguments: str) -> None:
        """Mount something, until the machine loses power."""
        done = self.run("mount", *arguments)
        assert done.returncode == 0, done.stderr

    def connect(self, port: int) -> socket.socket:
        """Connect to the machine's loopback device."""
        address = ("127.0.0.1", port)
        return in_network(self._init_pid, lambda: socket.create_connection(address, LONG_PATIENCE))

    def listen(self, port: int) -> socket.socket:
        """Listen on it."""
        return in_network(self._init_pid, lambda: socket.create_server(("127.0.0.1", port)))

    # What the host sees of it

    def path(self, inside: str) -> Path:
        """Return where a file of the node's /var/lib, /var/log or /run is on the host."""
        for directory, outside in MOUNTS.items():
            if inside.startswith(f"{directory}/"):
                return self.scratch / outside / inside[len(directory) + 1 :]
        raise ValueError(f"{inside} is the host's own")

    @property
    def root(self) -> Path:
        """Return the machine's root directory, with all that is mounted in it, while it is on."""
        return Path(f"/proc/{self._init_pid}/root")

    def pod_cgroups(self, uid: str = "") -> Iterator[Path]:
        """Yield the cgroups of a pod, or of all pods, and of their containers, in one hierarchy."""
        roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
        root = next(root for root in roots if root.is_dir())
        for path, _, _ in os.walk(root / self.cgroup[1:]):
            if f"/pod{uid}" in path:
                yield Path(path)

    def pod_processes(self, uid: str = "") -> set[int]:
        """Return the processes of a pod, or of all pods."""
        found: set[int] = set()
        for cgroup in self.pod_cgroups(uid):
            with contextlib.suppress(OSError):  # it has just been removed
                found.update(map(int, (cgroup / "cgroup.procs").read_text().split()))
        return found


# --- Scratch trees --------------------------------------------------------------------------------


class Scratch:
    """A directory on a disk, and the cgroup of its name, if a system has made one.

    Both are removed by `remove()`, or by a later test run if the tests were killed, which also ends
    processes: those of a container go on.
    """

    def __init__(self) -> None:
        self._remove_abandoned()
        # Without an underscore, as tempfile's names can have one: systemd-nspawn refuses that.
        self.path = Path("/var/tmp", f"{PREFIX}{os.urandom(4).hex()}")
        self.path.mkdir(mode=0o700)
        self._lock = (self.path / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        remove_cgroups(f"/{self.path.name}")
        shutil.rmtree(self.path)
        self._lock.close()

    @staticmethod
    def _remove_abandoned() -> None:
        for path in Path("/var/tmp").glob(f"{PREFIX}*"):
            # What cannot be removed now is no reason for these tests to fail.
            with contextlib.suppress(OSError, Broken), (path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = time.time() - os.fstat(lock.fileno()).st_mtime
                if age > 60:  # not one that is just about to lock it
                    kill_processes(f"/{path.name}")
                    remove_cgroups(f"/{path.name}")
                    shutil.rmtree(path)


# --- Processes ------------------------------------------------------------------------------------


class Process:
    """A process in a machine's namespaces, its output in a file."""

    def __init__(self, entered: subprocess.Popen[bytes], log: Path) -> None:
        self._entered = entered  # nsenter, which waits for the process and passes no signals on
        self.log = log
        self.pid = wait_until(self._behind, "the process behind nsenter")

    def _behind(self) -> int | None:
        if self._entered.poll() is not None:
            raise RuntimeError(f"exit status {self._entered.returncode} at once:\n{tail(self.log)}")
        return _child_of(self._entered.pid)

    @property
    def alive(self) -> bool:
        return self._entered.poll() is None

    def end(self, number: signal.Signals) -> int:
        """Send a signal and wait for the end; return the exit status, or the signal negated."""
        if self.alive:
            os.kill(self.pid, number)
        return self._entered.wait(LONG_PATIENCE)


def _child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def tail(log: Path, lines: int = 40) -> str:
    """Return the end of a log file, without what a kubelet says again and again."""
    if not log.exists():
        return "(no output)"
    noise = re.compile("httplog.go|factory.go|generic.go|ignoring container")
    said = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in said if not noise.search(line)][-lines:])


def in_network(pid: int, make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that is made in a process's network namespace, and works from here."""

    def enter() -> socket.socket:
        with open(f"/proc/{pid}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return make()

    # A namespace is a thread's own: this one ends, and the others stay where they are.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


# --- Cgroups --------------------------------------------------------------------------------------


def cgroup_hierarchies() -> list[Path]:
    """Return where the cgroup hierarchies are mounted.

    Beside version 1 there can be one of version 2 without controllers; runc makes cgroups in it.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [Path(where) for _, where, kind, *_ in mounts if kind in ("cgroup", "cgroup2")]


def make_cgroups(cgroup: str) -> None:
    """Make a cgroup of this name in every hierarchy, in which processes can run."""
    for root in cgroup_hierarchies():
        ours = root / cgroup[1:]
        ours.mkdir(exist_ok=True)

        if root == Path("/sys/fs/cgroup"):  # version 2's, with all controllers
            names = (root / "cgroup.controllers").read_text().split()
            for directory in (root, ours):
                text = " ".join(f"+{name}" for name in names)
                (directory / "cgroup.subtree_control").write_text(text)
            continue

        # Version 1's are empty in a new cgroup: nothing could run in it.
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (root / name).exists():
                (ours / name).write_text((root / name).read_text())


def kill_processes(cgroup: str) -> None:
    """Kill all processes in a cgroup of this name and all below it, in every hierarchy."""
    for path in _cgroups(cgroup):
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                if pid != "0":  # a process outside of this PID namespace
                    os.kill(int(pid), signal.SIGKILL)


def _cgroups(cgroup: str) -> Iterator[Path]:
    """Yield a cgroup of this name and all below it, in every hierarchy; those within first."""
    for root in cgroup_hierarchies():
        for path, _, _ in os.walk(root / cgroup[1:], topdown=False):
            yield Path(path)


def remove_cgroups(cgroup: str) -> None:
    """Remove a cgroup of this name and all below it, in every hierarchy, once they are empty."""
    for path in _cgroups(cgroup):
        wait_until(partial(_removed, path), f"the cgroup {path} to empty")


def _removed(cgroup: Path) -> bool:
    # It is busy for the moment in which the kernel still takes its last processes apart.
    with contextlib.suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()
