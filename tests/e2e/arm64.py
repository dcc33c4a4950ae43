"""An emulated arm64 machine with Debian's own kernel, systemd and Python.

An installation under emulation would be slow, so mmdebstrap installs a system of this machine's
architecture. Then the arm64 packages of the same names replace its packages. With -icount the
guest's clock counts instructions: on a busy host it is slow, but not late by its own clock.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e import vm
from tests.e2e.container import CACHE, FRESH, Missing, root_tree
from tests.world.processes import ROOT

ARCHITECTURE = "arm64"
TERMINAL = "/dev/ttyS0"  # of a PCI card; the board's own serial port is the console
TIMEOUT = 3600.0  # seconds; a run takes three to four minutes on an idle machine
MEMORY = 4096  # MiB; the host needs only the pages that the guest uses


@dataclass(frozen=True)
class Release:
    """A release of Debian, with the kernel and the processor of the test."""

    name: str
    suite: str
    kernel: str  # the package that depends on the newest kernel
    processor: str
    page_size: int


# With branch target identification and pointer authentication, which Debian 13's C library uses.
EVERYTHING = "max,pauth-impdef=on"
RELEASES = (
    Release("bookworm", "bookworm", "linux-image-arm64", "neoverse-n1", 4096),
    Release("trixie-16k", "trixie", "linux-image-arm64-16k", EVERYTHING, 16384),
)


def run(release: Release, deb: Path, script: Path) -> str:
    """Boot a system, run a Python script on it, and return its output; raises Missing.

    The package and probe.py are in /srv, and the script can import tests.world.
    """
    place = system(release.suite)
    with tempfile.TemporaryDirectory(prefix="ttdp-arm64-", dir="/var/tmp") as directory:
        work = Path(directory)
        added = work / "added"
        _add_files(added, deb, script)
        # Several archives in one file are one file system.
        with (work / "initrd").open("wb") as initrd:
            with (place / "root.cpio").open("rb") as base:
                shutil.copyfileobj(base, initrd)
            vm.write_cpio(added, initrd)
        said, console = work / "said", work / "console"
        qemu = ["qemu-system-aarch64", "-machine", "virt,gic-version=3", "-cpu", release.processor]
        qemu += ["-icount", "shift=1,sleep=on", "-smp", "1", "-m", str(MEMORY), *vm.HEADLESS]
        qemu += ["-kernel", str(place / release.kernel), "-initrd", str(work / "initrd")]
        qemu += ["-append", "console=ttyAMA0 panic=-1 quiet"]
        qemu += ["-serial", f"file:{console}", "-chardev", f"file,id=said,path={said}"]
        qemu += ["-device", "pci-serial,chardev=said"]
        return vm.run_to_end(qemu, said, console, TIMEOUT)


def _add_files(root: Path, deb: Path, script: Path) -> None:
    unit = vm.service("/srv/script.py", TERMINAL)
    vm.put_files(root, {"init": vm.INIT}, 0o755)
    vm.put_files(root, {"etc/systemd/system/script.service": unit})
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir()
    (wanted / "script.service").symlink_to("../script.service")
    vm.put_modules(root)
    shutil.copy(ROOT / "tests/e2e/probe.py", root / "srv")
    shutil.copy(script, root / "srv/script.py")
    shutil.copy(deb, root / "srv/package.deb")


def system(suite: str) -> Path:
    """Return a directory with a root tree, root.cpio, and kernels by their packages' names.

    It is cached; to make it takes a minute or two. Raises Missing.
    """
    if not shutil.which("qemu-system-aarch64") or not shutil.which("mmdebstrap"):
        raise Missing("apt-get install --no-install-recommends qemu-system-arm mmdebstrap")
    kernels = sorted({release.kernel for release in RELEASES if release.suite == suite})
    key = hashlib.sha256(repr((vm.TREE, kernels)).encode() + Path(__file__).read_bytes())
    place = CACHE / f"{suite}-{ARCHITECTURE}-{key.hexdigest()[:12]}"
    if place.exists() and time.time() - place.stat().st_mtime < FRESH:
        return place
    installed = root_tree(suite, vm.TREE)
    shutil.rmtree(place, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{suite}-{ARCHITECTURE}-") as directory:
        work, half = Path(directory), Path(directory, "made")
        half.mkdir()
        root = work / "root"
        root.mkdir()
        subprocess.run(["tar", "-C", str(root), "-xf", str(installed)], check=True)
        names = [*_entries(root / "var/lib/dpkg/status")]
        packages = _download(suite, names, kernels, work / "packages")
        for kernel in kernels:
            _extract_kernel(packages, kernel, half / kernel)
        _become_arm64(root, packages)
        with (half / "root.cpio").open("wb") as archive:
            vm.write_cpio(root, archive)
        half.rename(place)
    return place


def _download(suite: str, names: Sequence[str], kernels: Sequence[str], into: Path) -> list[Path]:
    """Fetch the arm64 packages of these names, and the kernels' dependencies; raises Missing."""
    into.mkdir()
    depends = f"apt-cache depends {' '.join(kernels)}"
    # mmdebstrap sets up apt for the other suite and architecture; its tree is not used.
    script = f"""
        set -e
        export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
        cd {into}
        apt-get download {" ".join([*names, *kernels])}
        apt-get download $({depends} | sed -n 's/^ *Depends: linux-image/linux-image/p')
    """
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--architectures={ARCHITECTURE}"]
    command += ["--aptopt=Acquire::Check-Valid-Until false", "--aptopt=APT::Sandbox::User root"]
    command += [f"--extract-hook={script}", suite, "/dev/null"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise Missing(f"no packages of {suite} for {ARCHITECTURE}: {made.stderr.strip()[-500:]}")
    return sorted(into.glob("*.deb"))


def _extract_kernel(packages: Sequence[Path], meta: str, target: Path) -> None:
    """Put the kernel's image from the package that a meta package depends on at `target`."""
    depends = _field(_package(packages, meta), "Depends")
    found = re.match(r"linux-image-(\S+)", depends)
    assert found, f"{meta} depends on {depends}"
    image = _package(packages, found[0])
    target.write_bytes(_tar(image, "--to-stdout", f"./boot/vmlinuz-{found[1]}"))


def _tar(package: Path, *arguments: str) -> bytes:
    """Run `tar -x` on the files of a package; return its output."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as files:
        tar = ["tar", "-x", *arguments]
        return subprocess.run(tar, stdin=files.stdout, stdout=subprocess.PIPE, check=True).stdout


def _package(packages: Sequence[Path], name: str) -> Path:
    [found] = [package for package in packages if package.name.startswith(f"{name}_")]
    return found


def _field(package: Path, *names: str) -> str:
    """Return a field of a package's control file, or all fields."""
    command = ["dpkg-deb", "--field", str(package), *names]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _become_arm64(root: Path, packages: Sequence[Path]) -> None:
    """Replace each package of a root tree by the one of the same name, in dpkg's database, too."""
    info, status = root / "var/lib/dpkg/info", root / "var/lib/dpkg/status"
    for libraries in root.glob("usr/lib/*-linux-gnu"):
        shutil.rmtree(libraries)
    (root / "etc/ld.so.cache").unlink()  # optional, and of the other architecture
    entries = []
    for name, old in _entries(status).items():
        package = _package(packages, name)
        control = _field(package)
        # dpkg adds two fields to those of the package.
        conffiles = re.findall(r"(?m)^Conffiles:\n(?: .*\n?)+", f"{old}\n")
        entries.append("".join([control, "Status: install ok installed\n", *conffiles]))
        for path in info.glob(f"{name}[.:]*"):
            path.unlink()
        same = re.search(r"(?m)^Multi-Arch: same$", control)
        prefix = f"{name}:{ARCHITECTURE}" if same else name
        unpacked = _tar(package, "-C", str(root), "-v", "--keep-directory-symlink").decode()
        files = [line.removeprefix(".").rstrip("/") or "/." for line in unpacked.splitlines()]
        (info / f"{prefix}.list").write_text("".join(f"{file}\n" for file in files))
        extracted = root.parent / "control"
        subprocess.run(["dpkg-deb", "--control", str(package), str(extracted)], check=True)
        (extracted / "control").unlink()
        for path in extracted.iterdir():
            shutil.copy(path, info / f"{prefix}.{path.name}")
        shutil.rmtree(extracted)
    status.write_text("\n".join(entries))


def _entries(status: Path) -> dict[str, str]:
    """Return the entries of dpkg's database by package."""
    entries = status.read_text().strip().split("\n\n")
    return {re.findall(r"(?m)^Package: (\S+)", entry)[0]: entry for entry in entries}
