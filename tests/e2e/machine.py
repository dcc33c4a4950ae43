"""Runs the real kubelet, with the real containerd and runc, for one test at a time.

A `Machine` is a node: namespaces of its own, in which /var/lib, /var/log and /run are directories
of a scratch tree. Kubelet and containerd use their usual paths (the kubelet's directory for device
plugins cannot be moved) and never see those of the host. A power cut is the death of one process,
the namespace's first, which takes all others with it. Only cgroups are shared: everything is kept
below one cgroup, which is removed at the end.

Without an API server (`apiserver.ApiServer`) the kubelet runs standalone: pods are static pods,
and what became of them is read from the kubelet's own /pods.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import grpc

from generated import podresources_pb2, podresources_pb2_grpc
from tests.world.processes import wait_until

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-device-plugin"
# The kubelets that can be had: a Go module beside this file pins each of them.
VERSIONS = sorted(path.name.removeprefix("kubelet-") for path in HERE.glob("kubelet-*"))

NODE_NAME = "node"
NODE_ADDRESS = "192.0.2.1"  # TEST-NET-1: a kubelet takes none of the loopback range
IMAGE = "localhost/realkubelet/busybox:1"  # static; for the pods and for the pause container
JSON = dict[str, Any]


# --- What it takes --------------------------------------------------------------------------------

_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "runc": "runc",
    "busybox": "busybox-static",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "gcc": "gcc libc6-dev",
    "mmdebstrap": "mmdebstrap",
    "podman": "podman",
    "promtool": "prometheus",
    "prometheus-node-exporter": "prometheus-node-exporter",
}


def missing_tools() -> str | None:
    """Return what is missing to run these kubelets here, in one line, or None."""
    if os.geteuid() != 0:
        return "the real kubelet needs root"
    packages = {package for tool, package in _PACKAGES.items() if shutil.which(tool) is None}
    if packages:
        return f"apt-get install --no-install-recommends {' '.join(sorted(packages))}"
    if shutil.which("go") or all(kubelet_path(version).exists() for version in VERSIONS):
        return None
    return "building the kubelet needs Go 1.21 or newer (golang-go of bookworm-backports)"


def kubelet_path(version: str) -> Path:
    """Return where a minor version's kubelet is once built; another go.sum is another kubelet."""
    module = HERE / f"kubelet-{version}"
    content = (module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()
    return CACHE / f"kubelet-{version}-{hashlib.sha256(content).hexdigest()[:16]}"


def build_kubelet(version: str) -> Path:
    """Build cmd/kubelet as the module's go.mod pins it, which takes minutes the first time."""
    target = kubelet_path(version)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"kubelet-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs, one build
        if target.exists():
            return target
        module = HERE / f"kubelet-{version}"
        required = (module / "go.mod").read_text()
        release = re.search(r"(?m)^\s*k8s\.io/kubernetes (v\S+)", required)
        assert release is not None, f"{module}/go.mod requires no k8s.io/kubernetes"
        stamp = f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={release[1]}"
        build_go(module, target, "-p", "2", stamp, "k8s.io/kubernetes/cmd/kubelet")
    return target


def build_go(module: Path, target: Path, *arguments: str) -> None:
    """Build a Go program, without disturbing others much."""
    half = target.with_name(f"{target.name}.partial")
    command = ["nice", "-n", "10", "go", "build", "-trimpath", "-buildvcs=false"]
    environ = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    command += ["-o", str(half), *arguments]
    subprocess.run(command, cwd=module, env=environ, check=True)
    half.rename(target)


# --- A machine that can be switched off -----------------------------------------------------------

NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
_CLONE_NEWNET = 0x40000000
# What the kubelet sets for the whole kernel; in here it gets plain files to write to.
SYSCTLS = ["vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"]
SYSCTLS += ["kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes"]


class Process:
    """A process in a machine's namespaces, its output in a file."""

    def __init__(self, entered: subprocess.Popen[bytes], log: Path) -> None:
        self._entered = entered  # nsenter, which waits for the process and passes no signals on
        self.log = log
        self.pid = wait_until(self._behind, "the process behind nsenter", 10)

    def _behind(self) -> int | None:
        if self._entered.poll() is not None:
            raise RuntimeError(f"exit status {self._entered.returncode} at once:\n{tail(self.log)}")
        return _child_of(self._entered.pid)

    @property
    def alive(self) -> bool:
        return self._entered.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal and wait for the end."""
        if self.alive:
            os.kill(self.pid, number)
        self._entered.wait(15)

    @property
    def status(self) -> int:
        """Return how it ended: exit status, or the signal's number negated."""
        assert self._entered.returncode is not None, "it has not ended"
        return self._entered.returncode


def in_network(pid: int, make: Callable[[], socket.socket]) -> socket.socket:
    """Return a socket that is made in a process's network namespace, and works from here."""

    def enter() -> socket.socket:  # a namespace is a thread's own
        with open(f"/proc/{pid}/ns/net", "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


def _child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def tail(log: Path, lines: int = 40) -> str:
    """Return the end of a log file, without the kubelet's notes of what this harness asked it."""
    if not log.exists():
        return "(no output)"
    said = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in said if "httplog.go" not in line][-lines:])


class Machine:
    """A node without its software: processes that can lose power, a disk that survives it.

    Everything lies below `scratch`, which `destroy()` removes. It is in /var/tmp because overlayfs
    needs another file system than a tmpfs, and short because paths of sockets have to be.
    """

    # Whole directories that every host has: a mount point of our own, /var/lib/kubelet say, would
    # have to be made and removed on the host, which would unmount it in every other machine.
    _mounts: ClassVar = {"/run": "run", "/var/log": "log", "/var/lib": "lib"}

    def __init__(self, numa_nodes: int | None = None) -> None:
        """numa_nodes: how many the kubelet is shown; the CPUs are dealt out to them."""
        _remove_abandoned()
        self.scratch = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/var/tmp"))
        self._lock = (self.scratch / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.cgroup = f"/{self.scratch.name}"
        self.logs = self.scratch / "logs"
        self._numa_nodes = numa_nodes
        self._init: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Machine:
        try:
            self.power_on()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def cgroups(self) -> Path:
        """Return the machine's cgroup in one hierarchy: the kubelet makes a pod's in all."""
        roots = [Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")]
        return next(root for root in roots if root.is_dir()) / self.cgroup[1:]

    def pod_processes(self, uid: str = "") -> set[int]:
        """Return the processes in a pod's cgroup, or in those of all pods."""
        found: set[int] = set()
        for path, _, _ in os.walk(self.cgroups):
            if f"/pod{uid}" in path:
                with contextlib.suppress(OSError):  # it has just been removed
                    found.update(map(int, Path(path, "cgroup.procs").read_text().split()))
        return found

    def path(self, inside: str) -> Path:
        """Return where a file of the node's /var/lib, /var/log or /run is on the host."""
        for directory, outside in self._mounts.items():
            if inside.startswith(f"{directory}/"):
                return self.scratch / outside / inside[len(directory) + 1 :]
        raise ValueError(f"{inside} is the host's own")

    @property
    def root(self) -> Path:
        """Return the machine's root directory, with all that is mounted in it, while it is on."""
        return Path(f"/proc/{self._init_pid}/root")

    def power_on(self) -> None:
        """Make the namespaces, with one process in them that does nothing but keep them."""
        assert self._init is None, "it is on already"
        self.logs.mkdir(parents=True, exist_ok=True)
        script = "\n".join(self._first_script())
        make_cgroups(self.cgroup)
        unshare = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
        self._init = subprocess.Popen(
            [*unshare, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.logs / "machine.log").open("ab"),
        )
        assert self._init.stdout is not None
        if self._init.stdout.readline() != b"on\n":
            self._init.wait()
            raise RuntimeError(f"no namespaces:\n{tail(self.logs / 'machine.log')}")
        pid = self._init.pid
        self._init_pid = wait_until(lambda: _child_of(pid), "the first process", 5)

    def _first_script(self) -> Iterator[str]:
        """Yield the lines of what the first process does; make what they need."""
        yield "set -e"
        for inside, outside in self._mounts.items():
            (self.scratch / outside).mkdir(exist_ok=True)
            yield f"mount --bind {self.scratch / outside} {inside}"
        for name in SYSCTLS:
            private = self.scratch / "sysctl" / name
            private.parent.mkdir(parents=True, exist_ok=True)
            private.write_text(Path("/proc/sys", name).read_text())
            yield f"mount --bind {private} /proc/sys/{name}"
        if self._numa_nodes is not None:
            yield f"mount --bind {self._fake_numa(self._numa_nodes)} /sys/devices/system/node"
        yield f"busybox hostname {NODE_NAME}"
        yield "busybox ip link set lo up"
        yield f"busybox ip address add {NODE_ADDRESS}/32 dev lo"
        # It inherits every orphan; with SIGCHLD ignored the kernel reaps them. It ends with its
        # stdin: should the tests be killed outright, the machine goes down all the same.
        yield "echo on"
        yield "exec env --ignore-signal=CHLD cat"

    def power_off(self) -> None:
        """Cut the power: every process dies in one instant, every mount is gone, /run is empty."""
        if self._init is None:
            return
        assert self._init.stdin is not None and self._init.stdout is not None
        # The kernel kills all others, and holds this one until they are gone.
        os.kill(self._init_pid, signal.SIGKILL)
        self._init.wait(30)
        self._init.stdin.close()
        self._init.stdout.close()
        self._init = None
        shutil.rmtree(self.scratch / "run")
        remove_cgroups(self.cgroup)

    def destroy(self) -> None:
        """Switch off and leave nothing behind but the cached kubelets."""
        self.power_off()
        remove_cgroups(self.cgroup)
        shutil.rmtree(self.scratch)
        self._lock.close()

    def _entering(self, argv: Sequence[str]) -> list[str]:
        assert self._init is not None, "the machine is off"
        return ["nsenter", f"--target={self._init_pid}", *NAMESPACES, "--", *argv]

    def spawn(
        self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        """Start a process in the machine; its output is appended to `log`."""
        with log.open("ab") as file:
            output: Any = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            return Process(subprocess.Popen(self._entering(argv), env=env, **output), log)

    def run(self, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the machine to its end."""
        streams: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        return subprocess.run(self._entering(argv), timeout=30, **streams)

    def connect(self, port: int) -> socket.socket:
        """Connect to the machine's loopback device."""
        return in_network(
            self._init_pid, lambda: socket.create_connection(("127.0.0.1", port), timeout=10)
        )

    def listen(self, port: int) -> socket.socket:
        """Listen on the machine's loopback device."""
        return in_network(self._init_pid, lambda: socket.create_server(("127.0.0.1", port)))

    def _fake_numa(self, nodes: int) -> Path:
        """Make a /sys/devices/system/node with that many nodes; the first have the CPUs."""
        root = self.scratch / "numa"
        shutil.rmtree(root, ignore_errors=True)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024 // nodes
        for node in range(nodes):
            directory = root / f"node{node}"
            directory.mkdir(parents=True)
            (directory / "meminfo").write_text(f"Node {node} MemTotal: {memory} kB\n")
            distances = ("10" if other == node else "20" for other in range(nodes))
            (directory / "distance").write_text(" ".join(distances))
        for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
            (root / f"node{int(path.name[3:]) % nodes}" / path.name).symlink_to(path)
        for name in ("online", "possible", "has_cpu", "has_memory"):
            (root / name).write_text(f"0-{nodes - 1}\n" if nodes > 1 else "0\n")
        return root


_PREFIX = "ttdp-node-"


def _remove_abandoned() -> None:
    """Remove the files of machines whose tests were killed: only their processes died with them."""
    for scratch in Path("/var/tmp").glob(f"{_PREFIX}*"):
        try:
            with (scratch / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = time.time() - os.fstat(lock.fileno()).st_mtime
                if age > 60:  # not one that is just about to lock it
                    remove_cgroups(f"/{scratch.name}")
                    shutil.rmtree(scratch)
        except (FileNotFoundError, BlockingIOError):
            continue


def cgroup_hierarchies() -> Iterator[tuple[Path, bool]]:
    """Yield the cgroup hierarchies, and whether it is version 2's with all controllers.

    Beside version 1 there can be one of version 2 without them, in which runc makes cgroups, too.
    """
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield Path(where), where == "/sys/fs/cgroup"


def make_cgroups(cgroup: str) -> None:
    """Make a cgroup of this name in every hierarchy, in which processes can run."""
    for root, unified in cgroup_hierarchies():
        ours = root / cgroup[1:]
        ours.mkdir(exist_ok=True)
        if unified:
            names = (root / "cgroup.controllers").read_text().split()
            for directory in (root, ours):
                text = " ".join(f"+{name}" for name in names)
                (directory / "cgroup.subtree_control").write_text(text)
            continue
        for name in ("cpuset.cpus", "cpuset.mems"):  # empty in a new one: nothing could run in it
            if (root / name).exists():
                (ours / name).write_text((root / name).read_text())


def remove_cgroups(cgroup: str) -> None:
    for root, _ in cgroup_hierarchies():
        for path, _, _ in os.walk(root / cgroup[1:], topdown=False):
            wait_until(partial(_removed, Path(path)), f"the cgroup {path} to empty", 10)


def _removed(cgroup: Path) -> bool:
    try:
        cgroup.rmdir()
    except OSError:  # busy for the moment in which the kernel still takes its last processes apart
        return False
    return True


# --- containerd -----------------------------------------------------------------------------------


class Containerd:
    """Debian's containerd and runc (or those in `bin_dir`), with the one image that is needed."""

    SOCKET = "/run/containerd/containerd.sock"

    def __init__(self, machine: Machine, bin_dir: Path | None = None) -> None:
        self.machine = machine
        self._env = dict(os.environ)
        if bin_dir is not None:
            self._env["PATH"] = f"{bin_dir}:{self._env['PATH']}"
        self._binary = shutil.which("containerd", path=self._env["PATH"]) or "containerd"
        self._ctr = shutil.which("ctr", path=self._env["PATH"]) or "ctr"
        self.images: list[Path] = []  # archives of further ones, for the next start
        self.process: Process | None = None

    def start(self) -> None:
        """Start it, and wait until it answers; the first time, import the images."""
        assert self.process is None or not self.process.alive, "it runs already"
        config = self.machine.scratch / "containerd.toml"
        config.write_text(self._config())
        self.process = self.machine.spawn(
            [self._binary, "--config", str(config)],
            self.machine.logs / "containerd.log",
            env=self._env,
        )
        wait_until(self._answers, "containerd's socket", 30)
        archive = self.machine.scratch / "image.tar"
        if not archive.exists():
            archive.write_bytes(image_archive(IMAGE, busybox_layer()))
            for each in [archive, *self.images]:
                self.ctr("images", "import", str(each))

    def _answers(self) -> bool:
        if self.process is not None and not self.process.alive:
            raise RuntimeError(f"containerd ended:\n{tail(self.process.log)}")
        path = self.machine.path(self.SOCKET)
        if not path.exists():
            return False
        with grpc.insecure_channel(f"unix://{path}") as channel:
            call = channel.unary_unary("/runtime.v1.RuntimeService/Version", bytes, bytes)
            try:  # containerd's own services answer some time before that for the kubelet does
                call(b"", timeout=5)
            except grpc.RpcError:
                return False
        return True

    def ctr(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run containerd's own client, in the namespace of the kubelet's containers."""
        done = self.machine.run([self._ctr, "--namespace", "k8s.io", *argv])
        if done.returncode != 0 and argv[:2] != ("tasks", "exec"):
            raise RuntimeError(f"ctr {' '.join(argv)}: {done.stderr.strip()}")
        return done

    def _config(self) -> str:
        """Return the defaults, but for the pause image and what a restricted root may not do."""
        said = subprocess.check_output([self._binary, "--version"], text=True)
        found = re.search(r" v?(\d+)\.(\d+)\.\d+", said)
        assert found is not None, f"containerd --version: {said}"
        if int(found[1]) >= 2:
            lines = ["version = 3", "[plugins.'io.containerd.cri.v1.images'.pinned_images]"]
            lines += [f"sandbox = '{IMAGE}'", "[plugins.'io.containerd.cri.v1.runtime']"]
        else:
            lines = ["version = 2", "[plugins.'io.containerd.grpc.v1.cri']"]
            lines.append(f"sandbox_image = '{IMAGE}'")
            if (int(found[1]), int(found[2])) >= (1, 7):
                lines.append("enable_cdi = true")  # the default of 2.0

        if not _has_capability(_CAP_SYS_RESOURCE):  # runc fails: pods want less than our own
            lines.append("restrict_oom_score_adj = true")

        return "\n".join(lines) + "\n"


_CAP_SYS_RESOURCE = 24


def _has_capability(number: int) -> bool:
    found = re.search(r"CapEff:\s+(\w+)", Path("/proc/self/status").read_text())
    return found is not None and bool(int(found[1], 16) >> number & 1)


# A bare sleep, as its namespace's first process, gets no SIGTERM.
_SLEEP = "trap exit TERM; while :; do sleep 3600 & wait; done"


def like_umd() -> Path:
    """Return like_umd.c, compiled."""
    source = HERE / "like_umd.c"
    program = CACHE / f"like_umd-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        half = program.with_name(f"{program.name}.{os.getpid()}")
        subprocess.run(["gcc", "-static", "-O2", "-o", str(half), str(source)], check=True)
        half.rename(program)
    return program


def busybox_layer() -> bytes:
    """Return an image's layer: busybox, static, under the names that tests use, and like_umd."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "dev", "proc", "sys", "etc", "tmp"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)
        tar.add(busybox, "bin/busybox")
        tar.add(like_umd(), "bin/like_umd")
        applets = "sh sleep ls cat env grep sort stat id dd mount true false test"
        for applet in applets.split(" "):
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return layer.getvalue()


def image_archive(name: str, layer: bytes) -> bytes:
    """Return an OCI image archive of one layer; the image sleeps unless told otherwise."""
    blobs: dict[str, bytes] = {}
    stored_layer = _store(blobs, layer, "layer.v1.tar")
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [stored_layer["digest"]]},
        "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sh", "-c", _SLEEP]},
    }
    described = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _store(blobs, json.dumps(config).encode(), "config.v1+json"),
        "layers": [stored_layer],
    }
    manifest = _store(blobs, json.dumps(described).encode(), "manifest.v1+json")
    named = manifest | {"annotations": {"io.containerd.image.name": name}}
    files = {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
    files["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [named]}).encode()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _store(blobs: dict[str, bytes], content: bytes, media_type: str) -> JSON:
    """Add a blob, by its digest; return its descriptor."""
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    media_type = f"application/vnd.oci.image.{media_type}"
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


# --- The kubelet ----------------------------------------------------------------------------------


def pod(
    name: str,
    resources: Mapping[str, int],
    *,
    containers: int = 1,
    command: Sequence[str] | None = None,
    restart: str = "Always",
    image: str = IMAGE,
) -> JSON:
    """Return a manifest: containers main, main-1, … that each ask for these resources and sleep."""
    wanted = {resource: str(count) for resource, count in resources.items()}
    container: JSON = {
        "image": image,
        "imagePullPolicy": "Never",
        "resources": {"limits": wanted, "requests": wanted},
    }
    if command is not None:
        container["command"] = list(command)
    spec = {
        "hostNetwork": True,  # there is no network plugin
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": 1,
        "enableServiceLinks": False,
        "containers": [
            {"name": f"main-{n}" if n else "main"} | container for n in range(containers)
        ],
    }
    metadata = {"name": name, "namespace": "default"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def refusal(status: Mapping[str, Any]) -> str | None:
    """Return why a kubelet refused the pod with this status ("reason: message"), if it did."""
    message = str(status.get("message"))
    if status.get("phase") != "Failed" or not message.startswith("Pod was rejected"):
        return None
    return f"{status.get('reason')}: {message}"


def all_run(manifest: Mapping[str, Any]) -> bool:
    """Return whether each of a pod's containers runs."""
    states = manifest["status"].get("containerStatuses") or []
    running = [each for each in states if "running" in each["state"]]
    return len(running) == len(manifest["spec"]["containers"])


PORT = 10250


def _configuration(version: str, machine: Machine) -> JSON:
    """Return the KubeletConfiguration of a kubelet without API server."""
    config: JSON = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{Containerd.SOCKET}",
        "staticPodPath": str(machine.scratch / "manifests"),
        "fileCheckFrequency": "1s",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": machine.cgroup,
        "failSwapOn": False,
        # Reached by nobody but this harness: the loopback device is the machine's own.
        "address": "127.0.0.1",
        "port": PORT,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "registerNode": False,
        "enableControllerAttachDetach": False,
        "makeIPTablesUtilChains": False,
        "resolvConf": "",
        # However full the disk is, pods are not refused and images not removed for that.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    signals = ("memory.available", "nodefs.available", "nodefs.inodesFree", "imagefs.available")
    config["evictionHard"] = dict.fromkeys([*signals, "imagefs.inodesFree"], "0%")
    has_v1 = not Path("/sys/fs/cgroup/cgroup.controllers").exists()
    if int(version.split(".")[1]) >= 31 and has_v1:
        config["failCgroupV1"] = False  # refused by default since 1.35
    return config


class Kubelet:
    """A kubelet of one minor version; stopped, killed and started again it keeps its state."""

    def __init__(
        self,
        version: str,
        machine: Machine,
        containerd: Containerd,
        *,
        config: JSON | None = None,
        api_server: str | None = None,
    ) -> None:
        """Args:
        config: further keys of its configuration, which win over the ones made here;
        api_server: the URL of one; without it, all pods are static.
        """
        self.version = version
        self.machine = machine
        self.containerd = containerd
        self._config = _configuration(version, machine)
        self.configure(**(config or {}))
        self.api_server = api_server
        # What a kubelet without API server adds to the names of pods.
        self._suffix = f"-{NODE_NAME}" if api_server is None else ""
        if api_server is not None:
            self._config |= {"registerNode": True, "contentType": "application/json"}
        self._starts = 0
        self._connection: http.client.HTTPConnection | None = None
        self.process: Process | None = None

    @property
    def device_plugin_dir(self) -> Path:
        path = self.machine.path("/var/lib/kubelet/device-plugins")
        path.mkdir(mode=0o750, parents=True, exist_ok=True)
        return path

    @property
    def log(self) -> Path:
        """Return what this start of the kubelet has logged."""
        return self.machine.logs / f"kubelet-{self.version}-{self._starts}.log"

    def configure(self, **keys: Any) -> None:
        """Set keys of its configuration, from the next start on."""
        self._config |= keys

    def start(self) -> None:
        """Start it, again or for the first time, and wait until it answers."""
        assert self.process is None or not self.process.alive, "it runs already"
        self._starts += 1
        self._hang_up()
        self._stale_socket = self._socket_identity()
        self.process = self.machine.spawn(self._command(), self.log)
        wait_until(self._ready, f"kubelet {self.version} to answer", 60)

    def _command(self) -> list[str]:
        """Write its configuration; return the command that starts it with that."""
        Path(self._config["staticPodPath"]).mkdir(exist_ok=True)
        config = self.machine.scratch / "kubelet.json"
        config.write_text(json.dumps(self._config, indent=1))
        program = str(build_kubelet(self.version))
        hostname = f"--hostname-override={NODE_NAME}"
        return [program, f"--config={config}", hostname, "--v=4", *self._flags()]

    def _flags(self) -> list[str]:
        if self.api_server is None:
            return []
        kubeconfig = self.machine.scratch / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.api_server}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}],
            "current-context": "c",
        }
        kubeconfig.write_text(json.dumps(config))
        return [f"--kubeconfig={kubeconfig}", f"--node-ip={NODE_ADDRESS}"]

    def _ready(self) -> bool:
        """Return whether it answers on its port and takes registrations."""
        if self.process is not None and not self.process.alive:
            raise RuntimeError(f"kubelet {self.version} ended:\n{tail(self.log)}")
        try:
            is_healthy = self.get("/healthz") == b"ok"
        except OSError:
            return False
        return is_healthy and self._socket_identity() not in (None, self._stale_socket)

    def _socket_identity(self) -> int | None:
        """Return what tells this start's registration socket from the one that the last left."""
        try:
            return (self.device_plugin_dir / "kubelet.sock").stat().st_ctime_ns
        except FileNotFoundError:
            return None

    def stop(self) -> None:
        """Stop it; the pods run on."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.signal(number)
            self.process = None

    def get(self, path: str) -> bytes:
        """GET from its own HTTPS port."""
        is_kept = self._connection is not None
        try:
            return self._get(path)
        except (OSError, http.client.HTTPException):
            if not is_kept:
                raise
            return self._get(path)  # a kubelet hangs up when nothing was asked for 90 seconds

    def _get(self, path: str) -> bytes:
        if self._connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=10)
            context = ssl._create_unverified_context()  # it signed its certificate itself
            connection.sock = context.wrap_socket(self.machine.connect(PORT))
            self._connection = connection  # kept: who polls makes a handshake only once
        try:
            self._connection.request("GET", path)
            return self._connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait_logged(self, text: str) -> None:
        """Wait until this start's log has a text."""
        wait_until(
            lambda: text in self.log.read_text(errors="replace"), f"the kubelet to log {text!r}", 30
        )

    # Pods

    def run_pod(self, manifest: JSON) -> None:
        """Put a pod's manifest where the kubelet finds it.

        Take a new name each time: the kubelet lets ten seconds pass before it starts a static pod
        whose name was that of one just deleted.
        """
        directory = Path(self._config["staticPodPath"])
        directory.mkdir(exist_ok=True)
        # A static pod's UID is a hash of its manifest, and a kubelet that sees a UID again
        # remembers what became of it.
        manifest["metadata"].setdefault("annotations", {})["realkubelet/attempt"] = uuid.uuid4().hex
        name = manifest["metadata"]["name"]
        hidden = directory / f".{name}"  # which it leaves alone
        hidden.write_text(json.dumps(manifest))
        hidden.rename(directory / f"{name}.json")

    def withdraw_pod(self, name: str) -> None:
        """Remove a pod's manifest; the kubelet takes about two seconds to remove the pod."""
        Path(self._config["staticPodPath"], f"{name}.json").unlink()

    def get_pod(self, name: str) -> JSON | None:
        """Return the pod as the kubelet's /pods shows it, None while it knows none of that name."""
        listed = json.loads(self.get("/pods"))
        for item in listed.get("items") or ():
            if item["metadata"]["name"] == f"{name}{self._suffix}":
                return dict(item)
        return None

    def pod_status(self, name: str) -> JSON:
        """Return the pod's status; empty while the kubelet does not know it."""
        found = self.get_pod(name)
        return dict(found["status"]) if found else {}

    def running(self, name: str) -> bool:
        """Return whether each of its containers runs."""
        found = self.get_pod(name)
        return found is not None and all_run(found)

    def wait_running(self, name: str) -> None:
        def probe() -> bool:
            if refused := refusal(self.pod_status(name)):
                raise AssertionError(f"pod {name} was refused: {refused}")
            return self.running(name)

        wait_until(probe, f"pod {name} to run", 30)

    def container_id(self, name: str) -> str:
        """Return the ID of a pod's container main."""
        for state in self.pod_status(name).get("containerStatuses", ()):
            if state["name"] == "main":
                return str(state["containerID"]).removeprefix("containerd://")
        raise LookupError(f"pod {name} has no container main")

    def exec(self, name: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in a pod's container, and again if its output does not come to its end.

        A process that ends at once can be gone before containerd has copied what it wrote.
        """
        end = uuid.uuid4().hex
        script = f'"$@"; status=$?; printf {end}; printf {end} >&2; exit $status'
        identity = self.container_id(name)
        for _ in range(10):
            command = ("tasks", "exec", "--exec-id", uuid.uuid4().hex, identity)
            done = self.containerd.ctr(*command, "sh", "-c", script, "sh", *argv)
            if done.stdout.endswith(end) and end in done.stderr:
                done.stdout = done.stdout.removesuffix(end)
                done.stderr = done.stderr.replace(end, "")
                return done
        raise RuntimeError(f"{' '.join(argv)} in {name}: no whole output in ten attempts: {done}")

    def logs(self, name: str) -> str:
        """Return what a pod's container main has written, with the runtime's time stamps."""
        where = self.machine.path("/var/log/pods")
        files = sorted(where.glob(f"default_{name}{self._suffix}_*/main/*.log"))
        return "".join(file.read_text(errors="replace") for file in files)

    # Devices

    def _ask(self, method: str, request: Any) -> Any:
        """Call the pod resources API."""
        socket_path = self.machine.path("/var/lib/kubelet/pod-resources/kubelet.sock")
        with grpc.insecure_channel(f"unix://{socket_path}") as channel:
            stub = podresources_pb2_grpc.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
            return getattr(stub, method)(request, timeout=10)

    def allocatable(self, resource: str) -> set[str]:
        """Return the IDs of the resource's healthy devices, in use or not."""
        return self.allocatable_by_resource().get(resource, set())

    def allocatable_by_resource(self) -> dict[str, set[str]]:
        """Return the IDs of all healthy devices."""
        question = podresources_pb2.AllocatableResourcesRequest()
        answer = self._ask("GetAllocatableResources", question)
        found: dict[str, set[str]] = {}
        for devices in answer.devices:
            found.setdefault(devices.resource_name, set()).update(devices.device_ids)
        return found

    def assigned(self, resource: str) -> dict[tuple[str, str], set[str]]:
        """Return which devices the containers have, by pod and container."""
        answer = self._ask("List", podresources_pb2.ListPodResourcesRequest())
        found: dict[tuple[str, str], set[str]] = {}
        for p in answer.pod_resources:
            for c in p.containers:
                place = p.name.removesuffix(self._suffix), c.name
                for devices in c.devices:
                    if devices.resource_name == resource:
                        found.setdefault(place, set()).update(devices.device_ids)
        return found

    def wait_allocatable(self, resource: str, devices: set[str]) -> None:
        what = f"{resource} to be {sorted(devices)}"
        wait_until(lambda: self.allocatable(resource) == devices, what, 30)


if __name__ == "__main__":  # build the kubelets, which takes minutes the first time
    if missing := missing_tools():
        raise SystemExit(missing)
    for each in reversed(VERSIONS):  # virtual machines wait for the newest one
        print(build_kubelet(each))
