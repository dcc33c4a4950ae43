"""Virtual machines, for what a container cannot have: a kernel module, udev, another architecture.

A `Guest` says what is special about one: its Debian, its cards, and a script, which is a module of
tests.e2e that runs on it. `run()` builds it, boots it in QEMU's interpreter, which needs nothing of
the host, and returns the script's steps (see steps.py) when the guest has switched itself off. That
takes a minute or two, a whole node ten minutes. For another one, write a Guest and a script.

The kernel for amd64 is Debian's for virtual machines, which boots in seconds. The PCI functions are
QEMU's "edu" devices, the driver is driver/tenstorrent.c. arm64.py has the other platform.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.e2e.container import CACHE, Missing, in_tree, is_fresh, require, root_tree, unpack
from tests.e2e.steps import Steps
from tests.world.processes import ROOT

DRIVER = Path(__file__).with_name("driver")
PACKAGES = "systemd,systemd-sysv,udev,dbus,kmod,python3"
PROJECT = "srv/project"  # in the guest: tests.world and tests.e2e
DEB = "srv/package.deb"  # the package under test
END = "The script has come to its end."


@dataclass(frozen=True)
class Guest:
    """A virtual machine with a Debian release, on which one script runs."""

    script: str
    """The module of tests.e2e that runs when all else is started. It has the standard library."""
    suite: str
    platform: Platform
    packages: str = PACKAGES
    functions: Sequence[str] = ()
    """The PCI functions' places on bus 0, such as "10.0"."""
    is_installed: bool = True
    """Whether the package under test is installed before the boot. It is at /srv/package.deb."""
    kernel_modules: Sequence[str] = ()
    """What is loaded at the boot, by the kernel's names."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of files by their paths, relative to the root."""
    prepare: Callable[[Path], object] = lambda root: None
    """What else is done to the root tree, at the end."""
    disk: int = 0
    """Bytes of the disk with the root file system, of which the host has only those in use. Without
    a disk it is in memory."""
    memory: int = 2048
    """MiB, of which the host has only the pages in use."""
    arguments: str = ""
    """The kernel's."""
    patience: float = 1800.0
    """Seconds after which a run counts as hung, on a machine that has much else to do."""


@dataclass(frozen=True)
class Platform:
    """An emulated computer, and the root trees and kernels that it can boot."""

    qemu: Sequence[str]
    """The program, its accelerator, machine and processors."""
    console: str
    """The kernel's name of the serial port that is its console."""
    port: Sequence[str]
    """QEMU's arguments for another serial port, which the character device "steps" is behind."""
    terminal: str
    """That port in the guest."""
    make_root: Callable[[Guest, Path], Path]
    """Makes a guest's root tree in a directory; returns the kernel for it. Raises Missing."""


def run(guest: Guest, deb: Path) -> Steps:
    """Build a guest with this package, boot it, wait until it has ended; return its script's steps.

    Raises Missing if something that it needs is not available here.
    """
    with tempfile.TemporaryDirectory(prefix="ttdp-vm-", dir="/var/tmp") as directory:
        work = Path(directory)
        root = work / "root"
        kernel = guest.platform.make_root(guest, root)
        _put_script(guest, root)
        put_files(root, guest.files)

        shutil.copy(deb, root / DEB)
        if guest.is_installed:
            in_tree(root, "dpkg", "--install", f"/{DEB}")
        guest.prepare(root)

        if guest.disk:
            booted = _write_disk(root, guest.disk, work / "disk")
        else:
            booted = _write_initrd(root, work / "initrd")
        shutil.rmtree(root)

        return _boot(guest, kernel, booted, work)


def _boot(guest: Guest, kernel: Path, booted: _RootFileSystem, work: Path) -> Steps:
    """Run QEMU until the guest switches itself off; return the script's steps."""
    console, steps = work / "console", work / "steps"
    terminal = guest.platform.console
    # An emulated machine on a busy host takes longer than systemd's 90 s. Nobody logs in at the
    # console, for whose device it would wait so long.
    arguments = f"console={terminal} panic=-1 quiet systemd.default_timeout_start_sec=900"
    arguments += f" systemd.mask=serial-getty@{terminal}.service"
    qemu = [*guest.platform.qemu, "-m", str(guest.memory)]
    qemu += ["-display", "none", "-nic", "none", "-no-reboot"]
    qemu += ["-serial", f"file:{console}", "-chardev", f"file,id=steps,path={steps}"]
    qemu += [*guest.platform.port, "-kernel", str(kernel), *booted.qemu]
    qemu += ["-append", f"{arguments} {booted.arguments} {guest.arguments}"]
    for place in guest.functions:
        qemu += ["-device", f"edu,addr={place}"]

    try:
        status = subprocess.run(qemu, timeout=guest.patience).returncode
        ended = f"QEMU ended with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"the guest did not switch itself off within {guest.patience:g} s"

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


@dataclass(frozen=True)
class Kernel:
    release: str  # 6.1.0-56-cloud-amd64
    image: Path
    modules: Path  # /lib/modules/<release>
    driver: Path  # tenstorrent.ko


def amd64(release: str) -> Platform:
    """Return a computer that boots root trees of any release with the kernel of this one.

    They have the driver where modprobe finds it.
    """

    def make_root(guest: Guest, root: Path) -> Path:
        kernel = _kernel(release)
        unpack(root_tree(guest.suite, guest.packages), root)
        _put_modules(kernel, guest.kernel_modules, root)
        return kernel.image

    # A thread for each processor. Counted instructions would be independent of the host's load, but
    # take twice the time.
    return Platform(
        qemu=("qemu-system-x86_64", "-accel", "tcg", "-machine", "q35", "-cpu", "max", "-smp", "2"),
        console="ttyS0",
        port=("-serial", "chardev:steps"),
        terminal="/dev/ttyS1",
        make_root=make_root,
    )


def _put_modules(kernel: Kernel, names: Sequence[str], root: Path) -> None:
    """Put the driver into a root tree, and those of the kernel's modules that its boot loads."""
    modules = root / f"usr/lib/modules/{kernel.release}"
    modules.mkdir(parents=True)
    shutil.copy(kernel.driver, modules)
    for path in kernel.modules.glob("modules.*"):
        shutil.copy(path, modules)

    for name in names:
        [module] = kernel.modules.rglob(f"{name}.ko*")  # newer kernels' are compressed
        target = modules / module.relative_to(kernel.modules)
        target.parent.mkdir(parents=True)
        shutil.copy(module, target)
    put_files(root, {"etc/modules-load.d/guest.conf": "".join(f"{name}\n" for name in names)})

    in_tree(root, "depmod", "-a", kernel.release)


def _kernel(suite: str) -> Kernel:
    """Return a Debian release's kernel, unpacked, and the driver, compiled for it; raises Missing.

    They come from the cache, or are made.
    """
    if os.uname().machine != "x86_64":
        raise Missing("the virtual machine is one for amd64")
    require({"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap"})

    sources = b"".join(path.read_bytes() for path in sorted(DRIVER.iterdir()))
    place = CACHE / f"kernel-{suite}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not is_fresh(place):
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            made = Path(directory, "made")
            _make_kernel(suite, Path(directory, "tree"), made)
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)

    [modules] = (place / "modules").iterdir()
    return Kernel(modules.name, place / "vmlinuz", modules, place / "tenstorrent.ko")


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

    place.mkdir()
    kernel = tree / "srv/kernel"
    # Newer packages have all below /usr.
    [modules] = [*kernel.glob("lib/modules/*"), *kernel.glob("usr/lib/modules/*")]
    [image] = [*kernel.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz")]
    shutil.copy(image, place / "vmlinuz")
    shutil.copytree(modules, place / "modules" / release, symlinks=True)
    shutil.copy(tree / "srv/driver/tenstorrent.ko", place)


# -- the root file system --------------------------------------------------------------------------


@dataclass(frozen=True)
class _RootFileSystem:
    qemu: Sequence[str]  # its arguments
    arguments: str  # the kernel's


def _write_disk(root: Path, size: int, disk: Path) -> _RootFileSystem:
    """Write a root tree to the image of a disk with so many bytes."""
    require({"mke2fs": "e2fsprogs"})
    with disk.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk)], check=True)

    # The kernels for virtual machines have NVMe and ext4 built in, and need no initrd for them. The
    # image is deleted after the run, so nothing has to be flushed to it.
    qemu = ["-drive", f"file={disk},if=none,id=disk,format=raw,cache=unsafe"]
    qemu += ["-device", "nvme,drive=disk,serial=disk"]
    return _RootFileSystem(qemu, "root=/dev/nvme0n1 rw")


def _write_initrd(root: Path, initrd: Path) -> _RootFileSystem:
    """Write a root tree to an initial RAM file system, which is the root to the end."""
    with initrd.open("wb") as archive:
        _write_cpio(root, archive)
    return _RootFileSystem(["-initrd", str(initrd)], "rdinit=/sbin/init")


def _write_cpio(root: Path, archive: IO[bytes]) -> None:
    """Write a root tree as the kernel takes it for an initial RAM file system (cpio, "newc")."""
    for number, (name, path) in enumerate([*_paths(root), ("TRAILER!!!", None)], 1):
        found = path.lstat() if path else None
        mode = found.st_mode if found else 0

        content = b""
        if path and stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        elif path and stat.S_ISREG(mode):
            content = path.read_bytes()

        # Of one link each, and from 1970: neither is needed.
        owner = (found.st_uid, found.st_gid) if found else (0, 0)
        device = (os.major(found.st_rdev), os.minor(found.st_rdev)) if found else (0, 0)
        encoded = os.fsencode(name) + b"\0"

        fields = (number, mode, *owner, 1, 0, len(content), 0, 0, *device, len(encoded), 0)
        header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
        archive.write(header + bytes(-len(header) % 4) + content + bytes(-len(content) % 4))


def _paths(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = Path(directory, name)
            yield str(path.relative_to(root)), path
