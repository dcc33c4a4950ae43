"""The real programs that read what the daemon writes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.e2e.builds import CACHE, HERE, build_go, cached
from tests.e2e.machine import HUNG

JUDGES = HERE / "judges"


# --- Go programs below judges/ --------------------------------------------------------------------


def _built(name: str, module: Path, package: str, *sources: str) -> Path:
    """Build a package. sources: those of its files in the module that are not go.mod or go.sum."""
    content = b"".join((module / file).read_bytes() for file in ("go.mod", "go.sum", *sources))
    key = hashlib.sha256(content).hexdigest()[:16]
    return cached(f"judge-{name}-{key}", lambda target: build_go(module, target, package))


def judge(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the programs of our own."""
    program = _built(name, JUDGES, f"./{name}", f"{name}/main.go")
    return subprocess.run(
        [program, *arguments], input=text, capture_output=True, text=True, timeout=HUNG
    )


KUBECONFIG = {
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "none", "user": {}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "current-context": "none",
}


def labels_by_nfd(features: Path, *options: str) -> dict[str, str]:
    """Return the labels that the real nfd-worker would give a node with this directory of files.

    With -no-publish it writes what it would publish, and connects nowhere.
    """
    package = "sigs.k8s.io/node-feature-discovery/cmd/nfd-worker"
    program = _built("nfd-worker", JUDGES / "nfd-worker", package)
    flags = ["-oneshot", "-no-publish", "-kubeconfig=/kubeconfig", "-v=1", *options]
    flags += ["-metrics=0", "-grpc-health=0", "-skip_headers"]
    environ = os.environ | {"NODE_NAME": "node", "KUBERNETES_NAMESPACE": "default"}

    # It has the directory's path built in, so it runs with a root of its own.
    with tempfile.TemporaryDirectory(prefix="nfd-", dir=CACHE) as root:
        os.link(program, f"{root}/nfd-worker")
        Path(root, "kubeconfig").write_text(json.dumps(KUBECONFIG))
        shutil.copytree(features, f"{root}/etc/kubernetes/node-feature-discovery/features.d")
        command = ["unshare", "--net", "chroot", root, "/nfd-worker", *flags]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    _, found, rest = done.stderr.partition('"feature discovery completed" labels=')
    assert found, done.stderr
    return dict(re.findall(r'(?m)^\t(\S+): "?(.*?)"?$', rest.partition("\n >")[0]))
