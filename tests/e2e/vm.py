"""Virtual machines, for what a container cannot have: a kernel module, udev, cgroups of version 2.

A `Guest` says what is special about one: its Debian, its cards, and a script, which is a module of
tests.e2e that runs on it. `run()` builds it, boots it in QEMU's interpreter, which needs nothing of
the host, and returns the script's steps (see steps.py) when the guest has switched itself off. On
an idle machine that takes a minute or two, a whole node ten.

The kernel is Debian's for virtual machines, which boots in seconds. The PCI functions are QEMU's
"edu" devices, the driver is driver/tenstorrent.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.builds import CACHE, FRESH, cached, digest
from tests.e2e.container import Missing, debootstrap, in_tree, require, root_tree, unpack
from tests.e2e.machine import Scratch
from tests.e2e.steps import Steps
from tests.world.processes import ROOT

DRIVER = Path(__file__).with_name("driver")
PACKAGES = "systemd,systemd-sysv,udev,dbus,kmod,python3"
PROJECT = "srv/project"  # in the guest: tests.world and tests.e2e
DEB = "srv/package.deb"  # the package under test, which is installed before the boot
MODULES = ("overlay",)  # of the kernel's, for containerd
HUNG = 3600.0  # seconds after which a run will have no end, on a busy machine
END = "The script has come to its end."
# One processor. With two, which are threads, QEMU 7.2 now and then executes a breakpoint that the
# kernel, which patches itself, has removed already ("Oops: int3"); they are not faster. Counted
# instructions would be independent of the host's load, but take twice the time.
QEMU = (
    "qemu-system-x86_64 -accel tcg -machine q35 -cpu max -smp 1 -display none -nic none -no-reboot"
)
# The kernel's arguments. An emulated machine on a busy host takes longer than systemd's 90 s; and
# nobody logs in at the console, whose device it would wait for.
ARGUMENTS = (
    "console=ttyS0 panic=-1 quiet systemd.default_timeout_start_sec=900 "
    "systemd.mask=serial-getty@ttyS0.service"
)
# It waits for all that is wanted at the boot. When it has ended, however that was, the guest
# switches itself off, without an orderly shutdown, which takes an emulated processor long.
SERVICE = """
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=PYTHONPATH=/{project} PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -u -m tests.e2e.{script}
ExecStartPost=/usr/bin/echo {end}
StandardOutput=file:/dev/ttyS1
StandardError=inherit
ExecStopPost=/usr/bin/systemctl --force --force poweroff
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Guest:
    """A virtual machine with a Debian release, on which one script runs."""

    script: str  # a module of tests.e2e, which has the standard library only
    suite: str
    kernel: str  # the release that it is of
    packages: str = PACKAGES
    functions: Sequence[str] = ()  # the PCI functions' places on bus 0, such as "10.0"
    files: Mapping[str, str] = field(default_factory=dict)  # texts by paths below the root
    prepare: Callable[[Path], object] = lambda root: None  # what else is done to the root tree
    disk: int = 0  # bytes of the disk with the root file system; 0 if that is in memory
    memory: int = 2048  # MiB; the host needs only the pages that the guest uses
    arguments: str = ""  # the kernel's


def run(guest: Guest, deb: Path) -> Steps:
    """Build a guest with this package, boot it, wait until it has ended; return its script's steps.

    Raises Missing if something that it needs is not available here.
    """
    if os.uname().machine != "x86_64":
        raise Missing("the virtual machine is one for amd64")
    tools = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap"}
    require(tools | {"mke2fs": "e2fsprogs", "busybox": "busybox-static"})

    with Scratch() as work:
        root, image = work / "root", work / "image"
        kernel = _kernel(guest.kernel)
        _make_root(guest, kernel, deb, root)
        if guest.disk:
            device, arguments = _to_disk(root, image, guest.disk)
        else:
            device, arguments = _to_initrd(root, image)
        shutil.rmtree(root)

        command = [*QEMU.split(), "-m", str(guest.memory), *device]
        for place in guest.functions:
            command += ["-device", f"edu,addr={place}"]
        command += ["-kernel", str(kernel / "vmlinuz")]
        command += ["-append", f"{arguments} {ARGUMENTS} {guest.arguments}"]
        return _boot(command, work)


def _make_root(guest: Guest, kernel: Path, deb: Path, root: Path) -> None:
    """Make a guest's root tree, with the driver where modprobe finds it, and the script."""
    unpack(root_tree(guest.suite, guest.packages), root)
    shutil.copytree(kernel / "modules", root / "usr/lib/modules", dirs_exist_ok=True)
    in_tree(root, "depmod", "-a", next((kernel / "modules").iterdir()).name)

    ignored = shutil.ignore_patterns("__pycache__", "driver")
    for name in ("world", "e2e"):
        shutil.copytree(ROOT / "tests" / name, root / PROJECT / "tests" / name, ignore=ignored)
    shutil.copy(ROOT / "tests/__init__.py", root / PROJECT / "tests")
    service = SERVICE.format(project=PROJECT, script=guest.script, end=END)
    for name, text in {"etc/systemd/system/script.service": service, **guest.files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    in_tree(root, "systemctl", "enable", "script")

    shutil.copy(deb, root / DEB)
    in_tree(root, "dpkg", "--install", f"/{DEB}")
    guest.prepare(root)


def _to_disk(root: Path, image: Path, size: int) -> tuple[list[str], str]:
    """Write a root tree to a disk's image; return QEMU's and the kernel's arguments for it."""
    with image.open("wb") as file:
        file.truncate(size)  # of which the host has only what is used
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(image)], check=True)

    # Debian's kernels for virtual machines have NVMe and ext4 built in, and need no initrd for
    # them. The image is deleted after the run, so nothing has to be flushed to it.
    drive = f"file={image},if=none,id=disk,format=raw,cache=unsafe"
    return ["-drive", drive, "-device", "nvme,drive=disk,serial=disk"], "root=/dev/nvme0n1 rw"


def _to_initrd(root: Path, image: Path) -> tuple[list[str], str]:
    """Do the same with an initial RAM file system, which is the root to the end."""
    pack = 'find . | busybox cpio -o -H newc >"$1"'
    subprocess.run(["sh", "-c", pack, "sh", str(image)], cwd=root, check=True)
    return ["-initrd", str(image)], "rdinit=/sbin/init"


def _boot(command: Sequence[str], work: Path) -> Steps:
    """Run QEMU until the guest switches itself off; return the script's steps."""
    console, steps = work / "console", work / "steps"
    ports = ["-serial", f"file:{console}", "-serial", f"file:{steps}"]
    try:
        status = subprocess.run([*command, *ports], timeout=HUNG).returncode
        ended = f"QEMU ended with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"the guest did not switch itself off within {HUNG:g} s"

    written, shown = (
        file.read_text(errors="replace") if file.exists() else "" for file in (steps, console)
    )
    assert END in written, (
        f"the script did not come to its end; {ended}.\n"
        f"It wrote:\n{written[-6000:]}\nThe console says:\n{shown[-4000:]}"
    )
    return Steps(written.replace(END, ""))


# -- the kernel, with the driver -------------------------------------------------------------------


def _kernel(suite: str) -> Path:
    """Return a directory with a Debian release's kernel, vmlinuz, and some modules; raises Missing.

    modules/<release> has the driver, which is compiled for it, and MODULES. All is cached.
    """

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            _make_kernel(suite, Path(directory, "tree"), target)

    sources = b"".join(path.read_bytes() for path in sorted(DRIVER.iterdir()))
    return cached(f"kernel-{suite}-{digest(sources, MODULES)}", make, lasts=FRESH)


# Runs while a tree with the kernel's headers and compiler is made, with apt set up for its suite.
# Newer kernels are in several packages, which the one with the old name depends on.
FETCH_KERNEL = r"""
set -e
export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
cd "$1/srv"
release=$(basename "$1"/usr/src/linux-headers-*-cloud-amd64 | sed s/linux-headers-//)
image=linux-image-$release
apt-get download $image $(
    apt-cache depends $image | sed -n "s/^ *Depends: \(linux-.*$release\)$/\1/p"
)
for package in *.deb; do dpkg-deb --extract "$package" kernel; done
rm *.deb
"""
# With /proc, which tools of the kernel's read, for as long as it runs.
COMPILE_DRIVER = """
mount -t proc proc "$1/proc" && exec chroot "$1" /usr/bin/env PATH=/usr/sbin:/usr/bin:/sbin:/bin \\
    make -C "/usr/src/linux-headers-$2" M=/srv/driver modules
"""


def _make_kernel(suite: str, tree: Path, place: Path) -> None:
    """Make a tree with the kernel's headers and compiler, and compile the driver in it."""
    packages = "--include=linux-headers-cloud-amd64,make"
    fetch = f"--customize-hook={FETCH_KERNEL}"
    debootstrap(suite, tree, ["--variant=minbase", "--format=directory", packages, fetch])

    [headers] = tree.glob("usr/src/linux-headers-*-cloud-amd64")
    release = headers.name.removeprefix("linux-headers-")
    shutil.copytree(DRIVER, tree / "srv/driver")
    alone = ["unshare", "--mount", "--propagation=private", "sh", "-c", COMPILE_DRIVER, "sh"]
    made = subprocess.run([*alone, str(tree), release], capture_output=True, text=True)
    if made.returncode:
        raise RuntimeError(f"the driver cannot be compiled:\n{made.stderr}")

    unpacked = tree / "srv/kernel"
    # Newer packages have all below /usr, and compress the modules.
    [modules] = [*unpacked.glob("lib/modules/*"), *unpacked.glob("usr/lib/modules/*")]
    [image] = [*unpacked.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz")]
    kept = place / "modules" / release
    kept.mkdir(parents=True)
    shutil.copy(image, place / "vmlinuz")
    for path in (tree / "srv/driver/tenstorrent.ko", *modules.glob("modules.*")):
        shutil.copy(path, kept)
    for name in MODULES:
        [module] = modules.rglob(f"{name}.ko*")
        shutil.copy(module, kept)
