"""A node of today, as a guest: cgroup v2 only, systemd's cgroups, containerd 2, the newest kubelet.

It is of Debian's testing release. The hugepages are of 2 MiB, in a hugetlbfs that systemd mounts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e import vm
from tests.e2e.builds import VERSIONS, build_kubelet, kubelet_path
from tests.e2e.container import Missing, in_tree, require
from tests.e2e.images import busybox_archive

KUBELET = VERSIONS[-1]
# What the real driver's package has: without it the device files are root's own, by their mode.
RULE = 'SUBSYSTEM=="tenstorrent", MODE="0666"\n'
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
# What tells where a guest hangs. All that programs write would take the emulated port too long.
JOURNAL = "systemd.journald.forward_to_console=1 systemd.journald.max_level_console=warning"


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
        "etc/udev/rules.d/50-tenstorrent.rules": RULE,
    },
    prepare=prepare,
    # runc cannot leave a root that is the kernel's first, as one in memory is.
    disk=3 << 30,
    memory=3072,
    arguments=f"hugepages=64 {JOURNAL}",
)
