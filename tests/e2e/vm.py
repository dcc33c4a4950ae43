"""Virtual machines, for what a container cannot have: a kernel module, udev, another architecture.

A `Guest` says what is special about one: its Debian, its cards, and a script, which is a module of
tests.e2e that runs on it. `run()` builds it, boots it in QEMU's interpreter, which needs nothing of
the host, and returns the script's steps (see steps.py) when the guest has switched itself off. On
an idle machine that takes a minute or two, a whole node ten. For another one, write a Guest and a
script, as test_fix.py and fix_guest.py.

The kernel for amd64 is Debian's for virtual machines, which boots in seconds. The PCI functions are
QEMU's "edu" devices, the driver is driver/tenstorrent.c. arm64.py has the other platform.
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
from tests.e2e.container import Missing, in_tree, require, root_tree, unpack
from tests.e2e.machine import Scratch
from tests.e2e.steps import Steps
from tests.world.processes import ROOT

DRIVER = Path(__file__).with_name("driver")
PACKAGES = "systemd,systemd-sysv,udev,dbus,kmod,python3"
PROJECT = "srv/project"  # in the guest: tests.world and tests.e2e
DEB = "srv/package.deb"  # the package under test
MODULES = ("overlay",)  # of the kernel's, for containerd
HUNG = 3600.0  # seconds after which a run will have no end, on a busy machine
END = "The script has come to its end."
# The kernel's arguments. An emulated machine on a busy host takes longer than systemd's 90 s; and
# nobody logs in at the console, whose device it would wait for.
CONSOLE = (
    "console={0} panic=-1 quiet systemd.default_timeout_start_sec=900 "
    "systemd.mask=serial-getty@{0}.service"
)


@dataclass(frozen=True)
class Guest:
    """A virtual machine with a Debian release, on which one script runs."""

    script: str  # a module of tests.e2e, which has the standard library only
    suite: str
    platform: Platform
    packages: str = PACKAGES
    functions: Sequence[str] = ()  # the PCI functions' places on bus 0, such as "10.0"
    is_installed: bool = True  # the package under test, before the boot; it is /srv/package.deb
    files: Mapping[str, str] = field(default_factory=dict)  # texts by paths below the root
    prepare: Callable[[Path], object] = lambda root: None  # what else is done to the root tree
    disk: int = 0  # bytes of the disk with the root file system; 0 if that is in memory
    memory: int = 2048  # MiB; the host needs only the pages that the guest uses
    arguments: str = ""  # the kernel's


@dataclass(frozen=True)
class Platform:
    """An emulated computer, and the root trees and kernels that it can boot."""

    qemu: Sequence[str]  # the program, its accelerator, machine and processors
    console: str  # the serial port that is the kernel's console, as the kernel names it
    port: Sequence[str]  # QEMU's arguments for another one, before the character device "steps"
    terminal: str  # that port in the guest
    make_root: Callable[[Guest, Path], Path]
    """Makes a guest's root tree in a directory; returns the kernel for it. Raises Missing."""


def run(guest: Guest, deb: Path) -> Steps:
    """Build a guest with this package, boot it, wait until it has ended; return its script's steps.

    Raises Missing if something that it needs is not available here.
    """
    with Scratch() as work:
        root = work / "root"
        kernel = guest.platform.make_root(guest, root)
        _put_script(guest, root)
        put_files(root, guest.files)

        shutil.copy(deb, root / DEB)
        if guest.is_installed:
            in_tree(root, "dpkg", "--install", f"/{DEB}")
        guest.prepare(root)

        pack = _to_disk if guest.disk else _to_initrd
        qemu, arguments = pack(guest, root, work / "image")
        shutil.rmtree(root)

        arguments += f" {CONSOLE.format(guest.platform.console)} {guest.arguments}"
        qemu += ["-kernel", str(kernel), "-append", arguments]
        return _boot(guest, qemu, work)


def _to_disk(guest: Guest, root: Path, image: Path) -> tuple[list[str], str]:
    """Write a root tree to a disk's image; return QEMU's and the kernel's arguments for it."""
    require({"mke2fs": "e2fsprogs"})
    with image.open("wb") as file:
        file.truncate(guest.disk)  # of which the host has only what is used
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(image)], check=True)

    # Debian's kernels for virtual machines have NVMe and ext4 built in, and need no initrd for
    # them. The image is deleted after the run, so nothing has to be flushed to it.
    drive = f"file={image},if=none,id=disk,format=raw,cache=unsafe"
    return ["-drive", drive, "-device", "nvme,drive=disk,serial=disk"], "root=/dev/nvme0n1 rw"


def _to_initrd(guest: Guest, root: Path, image: Path) -> tuple[list[str], str]:
    """Do the same with an initial RAM file system, which is the root to the end."""
    require({"busybox": "busybox-static"})
    pack = 'find . | busybox cpio -o -H newc >"$1"'
    subprocess.run(["sh", "-c", pack, "sh", str(image)], cwd=root, check=True)
    return ["-initrd", str(image)], "rdinit=/sbin/init"


def _boot(guest: Guest, qemu: Sequence[str], work: Path) -> Steps:
    """Run QEMU until the guest switches itself off; return the script's steps."""
    console, steps = work / "console", work / "steps"
    command = [*guest.platform.qemu, "-m", str(guest.memory)]
    command += ["-display", "none", "-nic", "none", "-no-reboot"]
    command += ["-serial", f"file:{console}"]
    command += ["-chardev", f"file,id=steps,path={steps}", *guest.platform.port]
    for place in guest.functions:
        command += ["-device", f"edu,addr={place}"]

    try:
        status = subprocess.run([*command, *qemu], timeout=HUNG).returncode
        ended = f"QEMU ended with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"the guest did not switch itself off within {HUNG:g} s"

    written, shown = (
        file.read_text(errors="replace") if file.exists() else "" for file in (steps, console)
    )
    assert END in written, (
        f"{guest.script} did not come to its end; {ended}.\n"
        f"It wrote:\n{written[-6000:]}\nThe console says:\n{shown[-4000:]}"
    )
    return Steps(written.replace(END, ""))


# -- the script ------------------------------------------------------------------------------------


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
StandardOutput=file:{terminal}
StandardError=inherit
ExecStopPost=/usr/bin/systemctl --force --force poweroff
"""


def _put_script(guest: Guest, root: Path) -> None:
    """Put what scripts import into a root tree, and a service that runs the guest's script."""
    ignored = shutil.ignore_patterns("__pycache__", "driver")
    for name in ("world", "e2e"):
        shutil.copytree(ROOT / "tests" / name, root / PROJECT / "tests" / name, ignore=ignored)
    shutil.copy(ROOT / "tests/__init__.py", root / PROJECT / "tests")

    service = SERVICE.format(
        project=PROJECT, script=guest.script, end=END, terminal=guest.platform.terminal
    )
    put_files(root, {"etc/systemd/system/script.service": service})

    # What `systemctl enable` does, which cannot run in a tree for another architecture.
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(exist_ok=True)
    (wanted / "script.service").symlink_to("../script.service")


def put_files(root: Path, files: Mapping[str, str]) -> None:
    """Write files into a root tree, and make the directories that they are in."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# -- amd64, and its kernel with the driver ---------------------------------------------------------


def amd64(release: str) -> Platform:
    """Return a computer that boots root trees of any release with the kernel of this one.

    They have the driver where modprobe finds it.
    """

    def make_root(guest: Guest, root: Path) -> Path:
        kernel = _kernel(release)
        unpack(root_tree(guest.suite, guest.packages), root)
        shutil.copytree(kernel / "modules", root / "usr/lib/modules", dirs_exist_ok=True)
        in_tree(root, "depmod", "-a", next((kernel / "modules").iterdir()).name)
        return kernel / "vmlinuz"

    # One processor. With two, which are threads, QEMU 7.2 now and then executes a breakpoint that
    # the kernel, which patches itself, has removed already ("Oops: int3"); they are not faster.
    # Counted instructions would be independent of the host's load, but take twice the time.
    return Platform(
        qemu=("qemu-system-x86_64", "-accel", "tcg", "-machine", "q35", "-cpu", "max", "-smp", "1"),
        console="ttyS0",
        port=("-serial", "chardev:steps"),
        terminal="/dev/ttyS1",
        make_root=make_root,
    )


def _kernel(suite: str) -> Path:
    """Return a directory with a Debian release's kernel, vmlinuz, and some modules; raises Missing.

    modules/<release> has the driver, which is compiled for it, and MODULES. All is cached.
    """
    if os.uname().machine != "x86_64":
        raise Missing("the virtual machine is one for amd64")
    require({"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap"})

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
    tree.parent.chmod(0o755)  # apt downloads as a user of its own
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--format=directory"]
    command += ["--include=linux-headers-cloud-amd64,make", f"--customize-hook={FETCH_KERNEL}"]
    command += ["--aptopt=Acquire::Check-Valid-Until false", "--aptopt=APT::Sandbox::User root"]
    fetched = subprocess.run([*command, suite, str(tree)], capture_output=True, text=True)
    if fetched.returncode:
        raise Missing(f"no kernel of {suite}: {fetched.stderr.strip()[-500:]}")

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
