"""What must be there before a test can begin: the host's tools, and programs that are built once.

What is built, or made of packages, stays in a cache outside the project. `python -m
tests.e2e.builds` builds the kubelets, which takes minutes the first time.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tt-device-plugin"
FRESH = 14 * 86400  # seconds for which a system of Debian's packages is used again
HICCUP = 20.0  # seconds after which a mirror, or a proxy, may have recovered

# The kubelets that can be had: a Go module beside this file pins each of them.
VERSIONS = sorted(path.name.removeprefix("kubelet-") for path in HERE.glob("kubelet-*"))

PACKAGES = {  # of Debian, by program
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
    """Return what is missing to run real kubelets here, in one line, or None."""
    if os.geteuid() != 0:
        return "the real kubelet needs root"

    packages = {package for tool, package in PACKAGES.items() if shutil.which(tool) is None}
    if packages:
        return f"apt-get install --no-install-recommends {' '.join(sorted(packages))}"

    if shutil.which("go") or all(kubelet_path(version).exists() for version in VERSIONS):
        return None
    return "building the kubelet needs Go 1.21 or newer (golang-go of bookworm-backports)"


def cached(name: str, make: Callable[[Path], object], *, lasts: float = math.inf) -> Path:
    """Return the cache's file or directory of this name.

    If there is none, or if it was made more than `lasts` seconds ago, `make` makes it at the path
    that it is given. It is called again if that fails: most of it downloads something. Test runs
    that want the same at the same time wait for the first one, and none ever finds it half made.
    """
    target, half = CACHE / name, CACHE / f"{name}.partial"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists() or time.time() - target.stat().st_mtime > lasts:
            try:
                _remove(half)
                make(half)
            except Exception as error:
                print(f"{name}: {error}; trying again")
                time.sleep(HICCUP)
                _remove(half)
                make(half)
            _remove(target)
            half.rename(target)
    return target


def _remove(path: Path) -> None:
    """Remove a file or a directory, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def digest(*parts: object) -> str:
    """Return what tells these parts from others, for a name in the cache."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# --- Go programs ----------------------------------------------------------------------------------


def build_go(module: Path, target: Path, *arguments: str) -> None:
    """Build a Go program, without disturbing others much."""
    command = ["nice", "-n", "10", "go", "build", "-trimpath", "-buildvcs=false"]
    command += ["-o", str(target), *arguments]
    environ = os.environ | {"CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    subprocess.run(command, cwd=module, env=environ, check=True)


def kubelet_path(version: str) -> Path:
    """Return where a minor version's kubelet is once built; another go.sum is another kubelet."""
    module = HERE / f"kubelet-{version}"
    content = (module / "go.mod").read_bytes() + (module / "go.sum").read_bytes()
    return CACHE / f"kubelet-{version}-{hashlib.sha256(content).hexdigest()[:16]}"


def build_kubelet(version: str) -> Path:
    """Return cmd/kubelet as the module's go.mod pins it."""
    module = HERE / f"kubelet-{version}"
    required = (module / "go.mod").read_text()
    release = re.search(r"(?m)^\s*k8s\.io/kubernetes (v\S+)", required)
    assert release is not None, f"{module}/go.mod requires no k8s.io/kubernetes"
    stamp = f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={release[1]}"

    def make(target: Path) -> None:
        build_go(module, target, "-p", "2", stamp, "k8s.io/kubernetes/cmd/kubelet")

    return cached(kubelet_path(version).name, make)


# --- Debian packages ------------------------------------------------------------------------------


def debian_tree(suite: str, *names: str) -> Path:
    """Return a directory with the files of Debian packages and of what they need."""
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--include={','.join(names)}"]
    command += ["--aptopt=Acquire::Check-Valid-Until false", "--format=directory", suite]

    def make(target: Path) -> None:
        made = subprocess.run(["nice", *command, str(target)], capture_output=True, text=True)
        assert made.returncode == 0, f"{' '.join(command)}:\n{made.stderr}"

    return cached(f"{suite}-{digest(command)}", make)


def main() -> None:
    """Build the kubelets; the newest one first, which virtual machines wait for."""
    if missing := missing_tools():
        raise SystemExit(missing)
    for version in reversed(VERSIONS):
        print(build_kubelet(version))


if __name__ == "__main__":
    main()
