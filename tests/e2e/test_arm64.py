"""The arm64 package's program on Debian's arm64 Pythons, which QEMU runs process by process."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.builds import cached, digest
from tests.e2e.container import debootstrap, optional, require
from tests.e2e.host import PYZ
from tests.world.kubelet import Kubelet
from tests.world.node import SimulatedNode
from tests.world.processes import ROOT, Service, environment, finished, outlet_flags

SUITES = ("bookworm", "trixie")
EMULATOR = "qemu-aarch64-static"
# The architecture's own pointer authentication would take ten times as long.
CPU = "max,pauth-impdef=on"
TREE = (
    "--variant=extract",
    "--architectures=arm64",
    "--format=directory",
    "--include=base-files,python3,libstdc++6",
)
P300 = "tenstorrent.com/p300"


@pytest.fixture
def node(short_tmp: Path) -> SimulatedNode:
    """In place of the real kubelet's: a machine with a p300c."""
    node = SimulatedNode(short_tmp / "node")
    node.add("p300c")
    return node


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize("suite", SUITES)
async def test_the_daemon_runs_on_arm64(
    suite: str, node: SimulatedNode, directory: Path, kubelet: Kubelet
) -> None:
    """It is extracted for arm64, serves a pod, sees a chip die, and ends by SIGTERM."""
    with optional():
        require({EMULATOR: "qemu-user-static", "mmdebstrap": "mmdebstrap"})
        make = partial(debootstrap, suite, arguments=TREE)
        tree = cached(f"{suite}-arm64-{digest(TREE)}", make)
    home = directory.parent
    [deb] = ROOT.glob("dist/*_arm64.deb")  # make deb leaves no former one
    subprocess.run(["dpkg-deb", "--extract", str(deb), str(home / "package")], check=True)
    [python] = tree.glob("usr/bin/python3.??")
    emulator = [EMULATOR, "-cpu", CPU, "-L", str(tree)]
    command = [*emulator, str(python), "-I", "-S", f"{home}/package{PYZ}"]
    variables = environment(SHIV_ROOT=f"{home}/cache", RUNTIME_DIRECTORY=str(home))
    assert "tt-device-plugin " in finished([*command, "--version"], **variables).stdout

    flags = [f"--device-plugin-dir={directory}", *node.flags, *outlet_flags(home)]
    async with Service([*command, "run", *flags], variables, home / "notify") as daemon:
        await daemon.ready()
        await daemon.status(f"2 × {P300}, 2 healthy; registered with kubelet")
        pod = await kubelet.run_pod("pod", P300, 2)
        assert pod.envs["TT_VISIBLE_DEVICES"] == ",".join(chip.bdf for chip in node.chips)

        node.chips[0].die()
        await kubelet.wait_for(lambda: kubelet.unhealthy(P300) == {node.chips[0].bdf})
        assert await daemon.stop() == 0

    assert [*home.glob("cache/*-aarch64-linux-gnu/site-packages/ttdp.py")]
