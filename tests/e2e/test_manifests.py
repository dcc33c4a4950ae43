"""The example pods of the package, on a real kubelet: each is admitted, and gets its devices.

A kubelet validates a static pod as the API server does. Only image and network are replaced: there
is neither a registry nor a network plugin. Nor is there a card: their programs are replaced
by one that shows what the container got.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.documents import DEB, fenced
from tests.e2e.builds import VERSIONS
from tests.e2e.node import Node
from tests.e2e.pods import IMAGE
from tests.e2e.readers import kustomized
from tests.e2e.steps import JSON
from tests.world.processes import wait_until

PODS = DEB / "pods"
PAGES_PER_CHIP = 4  # as Tenstorrent's tt-system-tools reserves for each device file
BOARDS = 'unit = "board"\n'
SHARED = '[[sharing.resources]]\nname = "n300"\nreplicas = 4\n'
LOOK = ["sh", "-c", "ls /dev/tenstorrent/*; env | grep ^TT_ | sort"]


@dataclass(frozen=True)
class Example:
    """What an example needs, and gets."""

    card: str
    resource: str
    chips: int = 1
    config: str = ""
    devices: int | None = None  # of the kubelet, if not one for each chip of the node


FIRST = "first-n300"  # README shows what it prints
EXAMPLES = {
    FIRST: Example("n300", "n300"),
    "one-chip": Example("p150a", "p150"),
    "compute": Example("p150a", "p150"),
    "linked-chips": Example("p300c", "p300", chips=2),
    "several-chips": Example("p300c", "p300", chips=2),
    "galaxy-tray": Example(
        "galaxy-wormhole", "galaxy-wormhole-board", chips=8, config=BOARDS, devices=4
    ),
    "shared-chip": Example("n300", "n300", config=SHARED, devices=4),
}


def manifest(name: str) -> JSON:
    return dict(yaml.safe_load((PODS / f"{name}.yaml").read_text()))


class LargeNode(Node):
    """A node whose kubelet finds memory and pages of 1 GiB; only the kubelet counts them."""

    def power_on(self) -> None:
        super().power_on()
        pages = self.machine.scratch / "hugepages"
        for name, count in (("hugepages-1048576kB", 64), ("hugepages-2048kB", 0)):
            (pages / name).mkdir(parents=True)
            for file in ("nr_hugepages", "free_hugepages"):
                (pages / name / file).write_text(f"{count}\n")
        self.machine.mount("--bind", str(pages), "/sys/kernel/mm/hugepages")

        memory = self.machine.scratch / "meminfo"
        text = Path("/proc/meminfo").read_text()
        memory.write_text(re.sub(r"(?m)^MemTotal: .*$", "MemTotal: 536870912 kB", text))
        self.machine.mount("--bind", str(memory), "/proc/meminfo")

        self.machine.path("/run/ttdp/shm").mkdir(parents=True)  # the package's mount unit


@pytest.fixture(scope="module")
def large_node(tools: None) -> Iterator[LargeNode]:
    with LargeNode(VERSIONS[-1]) as node:
        yield node


@pytest.fixture
def node(large_node: LargeNode) -> Iterator[LargeNode]:
    with large_node.for_one_test() as node:
        yield node


def serve(node: Node, resource: str, devices: int, config: str = "") -> None:
    """Start the daemon, and wait until the kubelet has so many devices."""
    node.start_daemon(config, expected={})
    wait_until(
        lambda: len(node.kubelet.allocatable().get(f"tenstorrent.com/{resource}", ())) == devices,
        f"{devices} × {resource}",
    )


def printed(node: Node, pod: JSON) -> list[str]:
    """Run a pod, wait until it has succeeded, and return the lines of its container's log."""
    created = node.add(pod)
    created.wait_finished()
    assert created.status["phase"] == "Succeeded", created.status
    return created.output()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gets_its_devices(node: Node, name: str) -> None:
    """It is admitted and ends with success; it prints its device files and its variables.

    What README's prints is what README shows.
    """
    example = EXAMPLES[name]
    node.cards.add(example.card)
    serve(node, example.resource, example.devices or len(node.cards.chips), example.config)

    pod = manifest(name)
    pod["metadata"]["namespace"] = "default"
    pod["spec"]["hostNetwork"] = True
    for container in pod["spec"]["containers"]:
        if not container["image"].startswith("busybox:"):
            container["command"] = LOOK
        container["image"] = IMAGE
    lines = printed(node, pod)

    files = [line for line in lines if line.startswith("/dev/tenstorrent/")]
    variables = dict(line.split("=", 1) for line in lines if line.startswith("TT_"))
    addresses = variables["TT_DEVICE_PLUGIN_DEVICES"].split(",")
    assert len(files) == len(addresses) == example.chips
    ordinals = {f"/dev/tenstorrent/{node.cards.chip(bdf).ordinal}" for bdf in addresses}
    assert ordinals == {*files}
    assert variables["TT_VISIBLE_DEVICES"] == ",".join(addresses)

    if name == FIRST:
        shown = next(block for block in fenced("console") if f"kubectl logs {name}\n" in block)
        assert lines == shown.split(f"kubectl logs {name}\n")[1].splitlines()


# --- Tenstorrent's chart tt-inference-server ------------------------------------------------------

# What its output has in common with the chart's.
CHART = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: server, namespace: default}
data: {MODEL: some}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: server-tt, namespace: default}
spec:
  spec:
    devices:
      requests: [{name: tt, exactly: {deviceClassName: tenstorrent.com, count: 1}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: server, namespace: default}
spec:
  selector: {matchLabels: {app: server}}
  template:
    metadata: {labels: {app: server}}
    spec:
      hostIPC: true
      resourceClaims: [{name: tt, resourceClaimTemplateName: server-tt}]
      initContainers:
        - name: fix-cache-permissions
          image: busybox
          command: [sh, -c, chown -R 1000:1000 /cache]
          volumeMounts: [{name: cache, mountPath: /cache}]
        - name: cleanup-hugepages
          image: busybox
          command: [sh, -c, rm -f /dev/hugepages-1G/tenstorrent]
          resources: {claims: [{name: tt}]}
          volumeMounts: [{name: hugepages-1g, mountPath: /dev/hugepages-1G}]
      containers:
        - name: inference-server
          image: server
          volumeMounts:
            - {name: cache, mountPath: /home/user/cache}
            - {name: hugepages-1g, mountPath: /dev/hugepages-1G}
          resources:
            limits: {hugepages-1Gi: 32Gi}
            requests: {cpu: "1", memory: 64Gi, hugepages-1Gi: 32Gi}
            claims: [{name: tt}]
      volumes:
        - {name: cache, hostPath: {path: /run/cache, type: DirectoryOrCreate}}
        - {name: hugepages-1g, hostPath: {path: /dev/hugepages-1G, type: Directory}}
"""


@pytest.fixture
def rendered(tmp_path: Path) -> dict[str, JSON]:
    """The chart's output after the post-renderer, by kind."""
    shutil.copytree(DEB / "tt-inference-server", tmp_path, dirs_exist_ok=True)
    (tmp_path / "chart.yaml").write_text(CHART)
    return {each["kind"]: each for each in kustomized(tmp_path)}


def test_the_inference_server_has_limits_instead_of_a_claim(rendered: dict[str, JSON]) -> None:
    """Neither the host's hugepages nor their clean-up are left; everything else is."""
    config, _, expected = yaml.safe_load_all(CHART)
    spec = expected["spec"]["template"]["spec"]
    del spec["resourceClaims"], spec["initContainers"][1], spec["volumes"][1]
    (server,) = spec["containers"]
    del server["volumeMounts"][1], server["resources"]["claims"]
    server["resources"]["limits"] = {"tenstorrent.com/n300": 1, "hugepages-1Gi": "4Gi"}
    server["resources"]["requests"]["hugepages-1Gi"] = "4Gi"

    assert rendered == {"ConfigMap": config, "Deployment": expected}


def test_the_inference_servers_pod_gets_its_device(node: Node, rendered: dict[str, JSON]) -> None:
    """The kubelet admits it, and the container of the server has the chip."""
    (chip,) = node.cards.add("n300")
    serve(node, "n300", 1)

    spec = rendered["Deployment"]["spec"]["template"]["spec"]
    spec |= {"hostNetwork": True, "restartPolicy": "Never"}
    (server,) = spec["containers"]
    server |= {"name": "main", "command": LOOK}
    for container in [server, *spec["initContainers"]]:
        container["image"] = IMAGE
    metadata = {"name": "server", "namespace": "default"}
    lines = printed(node, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    assert f"/dev/tenstorrent/{node.cards.chip(chip.bdf).ordinal}" in lines
    assert f"TT_VISIBLE_DEVICES={chip.bdf}" in lines


# --- All pods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_no_privileges(name: str) -> None:
    """It meets the Pod Security Standard "restricted", and requests pages for each chip."""
    spec = manifest(name)["spec"]

    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] >= 1000
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}

        limits = container["resources"]["limits"]
        if "hugepages-1Gi" in limits:
            pages = PAGES_PER_CHIP * EXAMPLES[name].chips
            assert limits["hugepages-1Gi"] == f"{pages}Gi"
            # They count towards it where hugetlb accounting is on: as much again for the rest.
            assert int(limits["memory"].removesuffix("Gi")) >= 2 * pages


@pytest.mark.parametrize("name", ["compute", "linked-chips"])
def test_the_program_of_an_example_is_python(name: str) -> None:
    """It can only run on a card; it uses nothing but torch and ttnn."""
    (container,) = manifest(name)["spec"]["containers"]
    program, option, code = container["command"]

    assert (program, option) == ("python3", "-c")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Import)]
    assert {alias.name for node in imports for alias in node.names} == {"torch", "ttnn"}


def test_each_example_is_tested() -> None:
    """And each is named after its pod."""
    files = {path.stem for path in PODS.iterdir()}
    assert files == EXAMPLES.keys()
    assert all(manifest(name)["metadata"]["name"] == name for name in files)
