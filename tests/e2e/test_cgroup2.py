"""A node of today: cgroup v2 only, systemd's cgroups, containerd 2, user namespaces.

It is a virtual machine with Debian's testing release and the newest kubelet, on which
cgroup2_guest.py runs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e import vm
from tests.e2e.builds import VERSIONS, build_kubelet, kubelet_path
from tests.e2e.conftest import Told
from tests.e2e.container import Missing, in_tree, optional, require
from tests.e2e.images import busybox_archive
from tests.e2e.steps import Steps

KUBELET = VERSIONS[-1]
# As kubeadm's package has it.
KUBELET_UNIT = """
[Unit]
After=containerd.service
Wants=containerd.service
StartLimitIntervalSec=0
[Service]
ExecStart=/usr/local/bin/kubelet --config=/etc/kubernetes/kubelet.json \\
    --kubeconfig=/etc/kubernetes/kubeconfig --hostname-override=node --node-ip=192.0.2.1
Restart=always
RestartSec=10
"""


def prepare(root: Path) -> None:
    """Put kubelet, busybox and an image with it into the root tree."""
    require({"busybox": "busybox-static", "gcc": "gcc libc6-dev"})
    if not kubelet_path(KUBELET).exists() and not shutil.which("go"):
        raise Missing("building the kubelet needs Go 1.21 or newer")

    shutil.copy(build_kubelet(KUBELET), root / "usr/local/bin/kubelet")
    shutil.copy(str(shutil.which("busybox")), root / "usr/local/bin/busybox")
    (root / "srv/image.tar").write_bytes(busybox_archive())

    # The script starts it, and the kubelet, when it has written their configuration.
    in_tree(root, "systemctl", "disable", "containerd")
    # systemd-update-done(8): the boot brings nothing up to date.
    for directory in ("etc", "var"):
        (root / directory / ".updated").touch()


GUEST = vm.Guest(
    script="cgroup2_guest",
    suite="forky",
    kernel="forky",
    packages=f"{vm.PACKAGES},containerd,runc",
    functions=("10.0", "11.0", "12.0", "13.0", "14.0", "15.0"),
    files={
        "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 node\n",  # which containerd copies
        "etc/hostname": "node\n",
        "etc/resolv.conf": "",
        "etc/modules-load.d/containers.conf": "overlay\n",
        "etc/systemd/system/kubelet.service": KUBELET_UNIT,
        # The real driver's package has this; without it the device files are root's own.
        "etc/udev/rules.d/50-tenstorrent.rules": 'SUBSYSTEM=="tenstorrent", MODE="0666"\n',
    },
    prepare=prepare,
    # runc cannot leave a root that is the kernel's first, as one in memory is.
    disk=3 << 30,
    memory=3072,
    # Pages of 2 MiB. The journal tells where a guest hangs; all of it would take the emulated port
    # too long.
    arguments="hugepages=64 systemd.journald.forward_to_console=1 "
    "systemd.journald.max_level_console=warning",
)


@pytest.fixture(scope="module")
def node(deb: Path) -> Steps:
    """What cgroup2_guest.py has seen on a node."""
    with optional():
        return vm.run(GUEST, deb)


def all_opened(attempts_by_pod: list[list[str]], pods: int = 1) -> bool:
    """Return whether each of so many pods has opened its devices at each attempt."""
    opened = [set(attempts) == {"opened"} for attempts in attempts_by_pod]
    return opened == [True] * pods


def test_the_node_has_version_2_only(node: Steps, told: Told) -> None:
    """The hierarchy is the unified one; no unit has failed."""
    boot = node["boot"]
    assert boot["cgroup"] == "cgroup2fs" and not boot["failed units"]
    programs = "; ".join(boot[name] for name in ("systemctl", "containerd", "runc", "kubelet"))
    told(f"Linux {boot['kernel']}; {programs}")


def test_a_pods_successor_starts_after_its_last_process(node: Steps) -> None:
    """The kubelet passes on the devices of a pod that was deleted by force and runs on."""
    found = node["forced"]
    assert found["cgroup"].startswith("kubepods.slice/")
    assert found["given"] and found["first runs"] and not found["second runs"]
    assert all_opened(found["opened"])


@pytest.mark.parametrize("strategy", ["files", "cdi"])
def test_containers_get_their_devices(node: Steps, strategy: str) -> None:
    """A container finds its chip's device file only, and can open it; with own users, too."""
    found = node[strategy]
    assert found["own"] == found["variables"] == [True, True] and all_opened(found["opened"], 2)
    hosts, own = found["uid maps"]
    assert int(hosts[1]) == 0 and int(own[1]) > 0


def test_access_survives_systemd(node: Steps) -> None:
    """Containers open their devices again after systemd was reloaded, also by the package.

    systemd sets up its filter of devices anew then, by its own idea of what a container may open
    (runc #4859, systemd #38648).
    """
    found = node["reload"]
    assert found["same"] and len(found["commands"]) == 3
    for command, seen in found["commands"].items():
        assert seen["status"] == "0" and all_opened(seen["opened"], 4), command
