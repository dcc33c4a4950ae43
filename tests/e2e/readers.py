"""The real programs that read what the daemon writes, and what it takes to run them here."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from tests.e2e.machine import (
    CACHE,
    HERE,
    IMAGE,
    JSON,
    Machine,
    build_go,
    busybox_layer,
    image_archive,
)
from tests.e2e.node import OPENABLE, Daemon, Program
from tests.world.node import SimulatedNode, Ticker

JUDGES = HERE / "judges"

A = TypeVar("A", bound="Alone")
_numbers = itertools.count(1)


class Alone:
    """A machine with cards and the daemon, and no kubelet. The daemon polls five times a second."""

    def __init__(self, machine: Machine, program: Program) -> None:
        self.machine = machine
        root = machine.scratch / f"cards-{next(_numbers)}"
        self.cards = SimulatedNode(root, nodes="mknod", numbers=OPENABLE)
        self.daemon = Daemon(machine, self.cards, program, interval=0.2)
        self._ticker = contextlib.ExitStack()

    def start(self, config: str = "") -> None:
        """Start the daemon, with this in its configuration file."""
        self.daemon.configure(config)
        self.daemon.start()

    def __enter__(self: A) -> A:
        self._ticker.enter_context(Ticker(self.cards))
        return self

    def __exit__(self, *_: object) -> None:
        if self.daemon.process:
            self.daemon.stop()
        self._ticker.close()


def built(name: str, package: str, sources: Sequence[Path]) -> Path:
    """Return a Go program below judges/, built where that was not done before (minutes)."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    program = CACHE / f"judge-{name}-{digest[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "judges.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            build_go(sources[0].parent, program, package)
    return program


def judge(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the programs of our own below judges/."""
    sources = [JUDGES / file for file in ("go.mod", "go.sum", f"{name}/main.go")]
    command = [str(built(name, f"./{name}", sources)), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def kustomized(directory: Path) -> list[JSON]:
    """Return the objects that kubectl's kustomize makes of a directory."""
    here = JUDGES / "kustomize"
    package = "sigs.k8s.io/kustomize/kustomize/v5"
    program = built("kustomize", package, [here / "go.mod", here / "go.sum"])
    done = subprocess.run([program, "build", directory], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [*yaml.safe_load_all(done.stdout)]


KUBECONFIG = {
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "none", "user": {}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "current-context": "none",
}


def labels_by_nfd(features: Path, *options: str) -> dict[str, str]:
    """Return the labels that the real nfd-worker would give a node with this directory of files.

    It has the directory's path built in, so it runs with a root of its own. With -no-publish it
    says what it would publish, and connects nowhere.
    """
    here = JUDGES / "nfd-worker"
    package = "sigs.k8s.io/node-feature-discovery/cmd/nfd-worker"
    program = built("nfd-worker", package, [here / "go.mod", here / "go.sum"])
    with tempfile.TemporaryDirectory(prefix="nfd-", dir=CACHE) as directory:
        root = Path(directory)
        os.link(program, root / "nfd-worker")
        (root / "kubeconfig").write_text(json.dumps(KUBECONFIG))
        shutil.copytree(features, root / "etc/kubernetes/node-feature-discovery/features.d")
        flags = ["-oneshot", "-no-publish", "-kubeconfig=/kubeconfig", "-v=1", *options]
        flags += ["-metrics=0", "-grpc-health=0", "-skip_headers"]
        command = ["unshare", "--net", "chroot", directory, "/nfd-worker", *flags]
        environ = {"NODE_NAME": "node", "KUBERNETES_NAMESPACE": "default"}
        done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _, found, rest = done.stderr.partition('"feature discovery completed" labels=')
    assert found, done.stderr
    return dict(re.findall(r'(?m)^\t(\S+): "?(.*?)"?$', rest.partition("\n >")[0]))


def packages(suite: str, *names: str) -> Path:
    """Return a directory with the files of Debian packages and of what they need."""
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(names)}"]
    command += ["--aptopt=Acquire::Check-Valid-Until false", "--format=directory", suite]
    tree = CACHE / f"{suite}-{hashlib.sha256(repr(command).encode()).hexdigest()[:12]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{tree.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            partial = tree.with_name(f"{tree.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            made = subprocess.run(["nice", *command, str(partial)], capture_output=True, text=True)
            assert made.returncode == 0, f"{' '.join(command)}:\n{made.stderr}"
            partial.rename(tree)
    return tree


def containerd_of(suite: str) -> Path:
    """Return a directory with another Debian release's containerd, to be run on this one.

    It needs nothing but a C library, which may be older; runc is the host's own.
    """
    here = packages(suite, "containerd") / "usr/bin"
    chosen = CACHE / f"{here.parents[1].name}-containerd"
    chosen.mkdir(exist_ok=True)
    for name in ("containerd", "containerd-shim-runc-v2", "ctr"):
        if not (chosen / name).exists():
            shutil.copy2(here / name, chosen / name)
    return chosen


class Podman:
    """Debian's podman on a machine, with busybox's image."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        archive = machine.scratch / "podman.tar"
        archive.write_bytes(image_archive(IMAGE, busybox_layer()))
        loaded = self._podman("load", "--input", str(archive))
        assert loaded.returncode == 0, loaded.stderr

    def _podman(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = ["podman", "--cgroup-manager=cgroupfs", "--events-backend=none", *argv]
        return self._machine.run(command)

    def run(self, device: str, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script in a container with this device."""
        argv = ["run", "--rm", "--network=none", f"--cgroup-parent={self._machine.cgroup}"]
        argv += [f"--device={device}", *options, "--entrypoint=/bin/sh", IMAGE, "-c", script]
        return self._podman(*argv)


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def labelled(name: str, labels: Mapping[str, str]) -> str:
    """Return a series as PromQL writes it; a label without a value is none."""
    pairs = (f"{key}={json.dumps(value)}" for key, value in labels.items() if value)
    return f"{name}{{{','.join(pairs)}}}"


def device_numbers(container: JSON) -> dict[str, tuple[int, int]]:
    """Return a container's device files by path, in the OCI runtime's words."""
    devices = container.get("linux", {}).get("devices", ())
    return {node["path"]: (node["major"], node["minor"]) for node in devices}
