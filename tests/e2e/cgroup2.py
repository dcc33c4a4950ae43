"""A node of today: cgroup v2 only, systemd's cgroups, containerd 2, and the newest kubelet.

It is a virtual machine in QEMU's interpreter, of Debian's testing release. Its root is on a disk,
not in memory, because runc cannot leave a root that is the kernel's first. The cards are QEMU's
"edu" devices, for which driver/tenstorrent.c makes device nodes. The hugepages are of 2 MiB, in a
hugetlbfs that systemd mounts.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.e2e import vm
from tests.e2e.container import Missing, root_tree
from tests.e2e.machine import (
    IMAGE,
    VERSIONS,
    build_kubelet,
    busybox_layer,
    image_archive,
    kubelet_path,
)

SUITE = "forky"
KUBELET = VERSIONS[-1]
TREE = f"{vm.TREE},containerd,runc"
TOOLS = {"mke2fs": "e2fsprogs", "busybox": "busybox-static", "gcc": "gcc libc6-dev"}
FUNCTIONS = ("10.0", "11.0", "12.0", "13.0", "14.0", "15.0")
HUGEPAGES = 64
DISK = 3 << 30  # bytes, of which the file has only those that are used
HUNG = 2400.0  # seconds; a run takes about ten minutes
MODULES = ("overlay",)  # of the kernel, for containerd
# What tells where a guest hangs. All that programs write would take the emulated port too long.
JOURNAL = "systemd.journald.forward_to_console=1 systemd.journald.max_level_console=warning"
# What the real driver's package has: without it the nodes are root's own, by their mode.
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


def run(deb: Path, script: Path) -> str:
    """Boot a node with the package, run a Python script on it, and return what that has written.

    Raises Missing.
    """
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        raise Missing(f"apt-get install --no-install-recommends {' '.join(missing)}")
    if not kubelet_path(KUBELET).exists() and not shutil.which("go"):
        raise Missing("building the kubelet needs Go 1.21 or newer")
    booted, kubelet = vm.kernel(SUITE), build_kubelet(KUBELET)
    with tempfile.TemporaryDirectory(prefix="ttdp-cgroup2-", dir="/var/tmp") as directory:
        work, root = Path(directory), Path(directory, "root")
        root.mkdir()
        tree = root_tree(SUITE, TREE)
        subprocess.run(["tar", "-C", str(root), "-xf", str(tree)], check=True)
        _put_kernel_modules(booted, root)
        vm.install_driver(booted, root)
        shutil.copy(kubelet, root / "usr/local/bin/kubelet")
        shutil.copy(str(shutil.which("busybox")), root / "usr/local/bin/busybox")
        (root / "srv/image.tar").write_bytes(image_archive(IMAGE, busybox_layer()))
        vm.put_modules(root)
        shutil.copy(script, root / "srv/script.py")
        _install(root, deb)
        disk = work / "disk"
        with disk.open("wb") as file:
            file.truncate(DISK)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk)], check=True)
        shutil.rmtree(root)
        return _boot(booted, disk, work)


def _put_kernel_modules(booted: vm.Kernel, root: Path) -> None:
    for name in MODULES:
        [module] = booted.modules.rglob(f"{name}.ko*")  # newer kernels' are compressed
        target = root / "usr/lib/modules" / booted.release / module.relative_to(booted.modules)
        target.parent.mkdir(parents=True)
        shutil.copy(module, target)


def _install(root: Path, deb: Path) -> None:
    files = {
        "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 node\n",  # which containerd copies
        "etc/hostname": "node\n",
        "etc/resolv.conf": "",
        "etc/systemd/system/script.service": vm.service("/srv/script.py", "/dev/ttyS1"),
        "etc/systemd/system/kubelet.service": KUBELET_UNIT,
        "etc/udev/rules.d/50-tenstorrent.rules": RULE,
        "etc/modules-load.d/containers.conf": "".join(f"{name}\n" for name in MODULES),
    }
    vm.put_files(root, files)
    shutil.copy(deb, root / "srv/package.deb")
    vm.inside(root, "dpkg", "--install", "/srv/package.deb")
    # The script starts these two when it has written their configuration.
    vm.inside(root, "systemctl", "disable", "containerd")
    vm.inside(root, "systemctl", "enable", "script")
    for directory in ("etc", "var"):  # systemd-update-done: the boot brings nothing up to date
        (root / directory / ".updated").touch()


def _boot(booted: vm.Kernel, disk: Path, work: Path) -> str:
    said, console = work / "said", work / "console"
    # A thread for each processor. Counted instructions would be independent of the host's load,
    # but take twice the time.
    qemu = [*vm.QEMU, "-m", "3072", "-smp", "2", *vm.HEADLESS, *vm.cards(FUNCTIONS)]
    qemu += ["-drive", f"file={disk},if=none,id=disk,format=raw,cache=unsafe"]
    qemu += ["-device", "nvme,drive=disk,serial=disk", "-kernel", str(booted.image)]
    arguments = f"root=/dev/nvme0n1 rw console=ttyS0 panic=-1 quiet hugepages={HUGEPAGES}"
    qemu += ["-append", f"{arguments} {JOURNAL}"]
    qemu += ["-serial", f"file:{console}", "-serial", f"file:{said}"]
    return vm.run_to_end(qemu, said, console, HUNG)
