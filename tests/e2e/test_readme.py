"""README's first pod, as it stands there, under the real kubelet."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.machine import NODE_NAME, VERSIONS, busybox_layer, image_archive
from tests.e2e.node import Node, Program
from tests.test_texts import fenced
from tests.world.processes import wait_until


@pytest.mark.parametrize("version", VERSIONS)
def test_the_first_pod_says_what_readme_says(program: Program, tmp_path: Path, version: str) -> None:
    """What it writes is, to the letter, what README shows below it."""
    manifest = yaml.safe_load(fenced("yaml")[0])
    name, (container,) = manifest["metadata"]["name"], manifest["spec"]["containers"]
    shown = next(block for block in fenced("console") if f"kubectl logs {name}\n" in block)
    image = tmp_path / "image.tar"
    image.write_bytes(image_archive(f"docker.io/library/{container['image']}", busybox_layer()))

    manifest["metadata"]["namespace"], container["imagePullPolicy"] = "default", "IfNotPresent"  # an API server's part
    manifest["spec"]["hostNetwork"] = True  # there is no network plugin
    with Node(version, program, static_pods=False, images=[image]) as node:
        assert node.api
        node.cards.add("n300")
        node.start_daemon()
        node.api.add_pod(manifest, NODE_NAME)

        def phase() -> str | None:
            return ((node.api and node.api.pod(name)) or {}).get("status", {}).get("phase")

        wait_until(lambda: phase() in ("Succeeded", "Failed"), lambda: chr(10).join(l for l in node.kubelet.log.read_text().splitlines() if "first-n300" in l or "v1.Pod\"" in l or "ource=\"api" in l or "ExtendedResource" in l), 20)
        said = [line.split(" ", 3)[3] for line in node.kubelet.logs(name).splitlines()]  # time, stream, whole or part
    assert said == shown.split(f"kubectl logs {name}\n")[1].splitlines()
