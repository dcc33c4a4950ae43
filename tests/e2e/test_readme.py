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
def test_the_first_pod_says_what_readme_says(
    program: Program, tmp_path: Path, version: str
) -> None:
    """What it writes is, to the letter, what README shows below it."""
    manifest = yaml.safe_load(fenced("yaml")[0])
    name, (container,) = manifest["metadata"]["name"], manifest["spec"]["containers"]
    shown = next(block for block in fenced("console") if f"kubectl logs {name}\n" in block)
    image = tmp_path / "image.tar"
    image.write_bytes(image_archive(f"docker.io/library/{container['image']}", busybox_layer()))

    manifest["spec"]["hostNetwork"] = True  # there is no network plugin
    with Node(version, program, static_pods=False, images=[image]) as node:
        node.cards.add("n300")
        node.start_daemon()
        api = node.api
        assert api
        api.add_pod(manifest, NODE_NAME)

        def ended() -> bool:
            pod = api.pod(name)
            return pod is not None and pod["status"]["phase"] in ("Succeeded", "Failed")

        wait_until(ended, lambda: f"{name} to end, which is {api.pod(name)}", 30)
        lines = node.kubelet.logs(name).splitlines()
    # Before what a container says stand the time, the stream, and whether it is a whole line.
    said = [line.split(" ", 3)[3] for line in lines]
    assert said == shown.split(f"kubectl logs {name}\n")[1].splitlines()
