"""A virtual machine, for what a container cannot have: a kernel module, and udev's answer to it.

Debian's kernel for virtual machines boots a root tree that is all in memory, in QEMU's interpreter,
which needs nothing of the host and takes a minute or two. The PCI functions are QEMU's "edu"
devices, the driver is driver/tenstorrent.c. Other modules make other machines with what is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.e2e.container import CACHE, FRESH, Missing, root_tree
from tests.world.processes import ROOT

Steps = dict[str, dict[str, Any]]
DRIVER = Path(__file__).with_name("driver")
TREE = "systemd,systemd-sysv,udev,dbus,kmod,python3"
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap"}
BOOTED = 600.0  # seconds for a whole run, on a machine that has much else to do


@dataclass(frozen=True)
class Kernel:
    release: str  # 6.1.0-56-cloud-amd64
    image: Path
    modules: Path  # /lib/modules/<release>
    driver: Path  # tenstorrent.ko


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


def kernel(suite: str = "bookworm") -> Kernel:
    """Return a Debian release's kernel, unpacked, and the driver, compiled for it; raises Missing.

    They come from the cache, or are made.
    """
    if os.uname().machine != "x86_64":
        raise Missing("the virtual machine is one for amd64")
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        raise Missing(f"apt-get install --no-install-recommends {' '.join(missing)}")
    sources = b"".join(path.read_bytes() for path in sorted(DRIVER.iterdir()))
    place = CACHE / f"kernel-{suite}-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not place.exists() or time.time() - place.stat().st_mtime > FRESH:
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            made = Path(directory, "made")
            _make_kernel(suite, Path(directory, "tree"), made)
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
    [modules] = (place / "modules").iterdir()
    return Kernel(modules.name, place / "vmlinuz", modules, place / "tenstorrent.ko")


def _make_kernel(suite: str, tree: Path, place: Path) -> None:
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
    [modules] = [*kernel.glob("lib/modules/*"), *kernel.glob("usr/lib/modules/*")]
    [image] = [*kernel.glob("boot/vmlinuz-*"), *modules.glob("vmlinuz")]
    shutil.copy(image, place / "vmlinuz")
    shutil.copytree(modules, place / "modules" / release, symlinks=True)
    shutil.copy(tree / "srv/driver/tenstorrent.ko", place)


def run(suite: str, deb: Path, script: Path, functions: Sequence[str]) -> str:
    """Boot a system with the package, run a Python script on it, and return what that has written.

    functions: the PCI functions' places on bus 0, such as "10.0".
    """
    booted = kernel()
    with tempfile.TemporaryDirectory(prefix="ttdp-vm-", dir="/var/tmp") as directory:
        work, root = Path(directory), Path(directory, "root")
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "-xf", str(root_tree(suite, TREE))], check=True)
        install_driver(booted, root)
        put_modules(root)
        shutil.copy(deb, root / "package.deb")
        shutil.copy(script, root / "script.py")
        put_files(root, {"etc/systemd/system/script.service": service("/script.py", "/dev/ttyS1")})
        put_files(root, {"init": INIT}, 0o755)
        inside(root, "dpkg", "--install", "/package.deb")
        inside(root, "systemctl", "enable", "script")
        (root / "package.deb").unlink()
        with (work / "initrd").open("wb") as archive:
            write_cpio(root, archive)
        shutil.rmtree(root)
        said, console = work / "said", work / "console"
        qemu = [*QEMU, "-m", "1536", "-smp", "2", *HEADLESS, "-kernel", str(booted.image)]
        qemu += ["-initrd", str(work / "initrd"), "-append", "console=ttyS0 panic=-1 quiet"]
        qemu += ["-serial", f"file:{console}", "-serial", f"file:{said}", *cards(functions)]
        return run_to_end(qemu, said, console, BOOTED)


def cards(functions: Sequence[str]) -> list[str]:
    """Return QEMU's arguments for PCI functions at these places on bus 0."""
    return [word for place in functions for word in ("-device", f"edu,addr={place}")]


def install_driver(booted: Kernel, root: Path) -> None:
    """Put the driver where modprobe finds it, in a root tree that has kmod; raises Missing."""
    modules = root / f"usr/lib/modules/{booted.release}"
    modules.mkdir(parents=True, exist_ok=True)
    shutil.copy(booted.driver, modules)
    for path in booted.modules.glob("modules.*"):
        shutil.copy(path, modules)
    inside(root, "depmod", "-a", booted.release)


def inside(root: Path, *command: str) -> str:
    """Run a command in a root tree for this machine's architecture; return its output."""
    inside = ("chroot", str(root), "/usr/bin/env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", *command)
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def run_to_end(qemu: Sequence[str], said: Path, console: Path, patience: float) -> str:
    """Run QEMU until its guest switches itself off; return what the guest's script has written.

    said, console: the files that QEMU writes the script's and the kernel's output to.
    patience: seconds after which a guest counts as hung; they have to do for a busy machine, too.
    """
    try:
        status = subprocess.run(qemu, timeout=patience, check=False).returncode
        ended = f"QEMU ended with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"the guest did not switch itself off within {patience:g} s"
    written = said.read_text(errors="replace") if said.exists() else ""
    shown = console.read_text(errors="replace") if console.exists() else ""
    if END not in written:
        raise AssertionError(
            f"the script did not come to its end; {ended}.\n"
            f"It wrote:\n{written[-6000:]}\nThe console says:\n{shown[-4000:]}"
        )
    return written.replace(END, "")


def steps(written: str) -> Steps:
    """Return the steps that a guest's script has written, one JSON object a line, by name."""
    lines = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    assert lines, written
    return {line["step"]: line for line in lines}


QEMU = ("qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-machine", "q35")
HEADLESS = ("-display", "none", "-nic", "none", "-no-reboot")
INIT = "#!/bin/sh\nexec /lib/systemd/systemd\n"
END = "The script has come to its end."


def service(script: str, terminal: str) -> str:
    """Return the unit that runs a Python script when all else is started, and then switches off.

    terminal: the serial device that the script's output goes to; after it, unless it failed, `END`.
    """
    return f"""
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Environment=PYTHONPATH=/srv/project PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -u {script}
ExecStartPost=/usr/bin/echo {END}
StandardOutput=file:{terminal}
StandardError=inherit
ExecStopPost=/usr/bin/systemctl --force --force poweroff
[Install]
WantedBy=multi-user.target
"""


def put_modules(root: Path) -> None:
    """Put what scripts can import into a root tree: tests.world, some modules of tests.e2e."""
    project = root / "srv/project"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests/world", project / "tests/world", ignore=ignored)
    (project / "tests/e2e").mkdir()
    shutil.copy(ROOT / "tests/__init__.py", project / "tests")
    for name in ("__init__.py", "steps.py", "apiserver.py", "guestnode.py"):
        shutil.copy(ROOT / "tests/e2e" / name, project / "tests/e2e")


def put_files(root: Path, files: Mapping[str, str], mode: int = 0o644) -> None:
    """Write files into a root tree, and make the directories that they are in."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)


def write_cpio(root: Path, archive: IO[bytes]) -> None:
    """Write a root tree as the kernel takes it for an initial RAM file system (cpio, "newc")."""
    for number, (name, path) in enumerate([*_paths(root), ("TRAILER!!!", None)], 1):
        found = path.lstat() if path else None
        mode = found.st_mode if found else 0
        content = b""
        if path and stat.S_ISLNK(mode):
            content = os.fsencode(os.readlink(path))
        elif path and stat.S_ISREG(mode):
            content = path.read_bytes()
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
