"""The real programs that read what the daemon writes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.e2e.builds import CACHE, HERE, build_go, cached
from tests.e2e.machine import HUNG
from tests.e2e.steps import JSON

JUDGES = HERE / "judges"


# --- Go programs below judges/ --------------------------------------------------------------------


def _built(name: str, package: str, sources: Sequence[Path]) -> Path:
    key = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]
    return cached(
        f"judge-{name}-{key}", lambda target: build_go(sources[0].parent, target, package)
    )


def _fetched(name: str, package: str) -> Path:
    """Return somebody else's program, as a go.mod in a directory of this name pins it."""
    directory = JUDGES / name
    return _built(name, package, [directory / "go.mod", directory / "go.sum"])


def judge(name: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the programs of our own."""
    sources = [JUDGES / file for file in ("go.mod", "go.sum", f"{name}/main.go")]
    command = [str(_built(name, f"./{name}", sources)), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=HUNG)


def kustomized(directory: Path) -> list[JSON]:
    """Return the objects that kubectl's kustomize makes of a directory."""
    program = _fetched("kustomize", "sigs.k8s.io/kustomize/kustomize/v5")
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

    With -no-publish it writes what it would publish, and connects nowhere.
    """
    program = _fetched("nfd-worker", "sigs.k8s.io/node-feature-discovery/cmd/nfd-worker")
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


# --- Prometheus -----------------------------------------------------------------------------------


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=HUNG)


def assert_rules(path: Path, test: JSON, rule_files: Sequence[Path] = ()) -> None:
    """Have promtool run a test of rules and queries, a sample a minute; its file is `path`."""
    file = {"rule_files": [*map(str, rule_files)], "evaluation_interval": "1m"}
    path.write_text(json.dumps({**file, "tests": [{"interval": "1m", **test}]}))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


def labelled(name: str, labels: Mapping[str, str]) -> str:
    """Return a series as PromQL writes it; a label without a value is none."""
    pairs = (f"{key}={json.dumps(value)}" for key, value in labels.items() if value)
    return f"{name}{{{','.join(pairs)}}}"
