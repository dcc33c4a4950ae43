"""The platform arm64 of virtual machines, with Debian's own kernels, systemd and Python.

An installation under emulation would be slow, so mmdebstrap installs a system of this machine's
architecture. Then the arm64 packages of the same names replace its packages. It takes a minute or
two, and is cached.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e import vm
from tests.e2e.builds import CACHE, FRESH, cached, digest
from tests.e2e.container import Missing, require, root_tree, unpack

ARCHITECTURE = "arm64"


def platform(kernel: str, processor: str) -> vm.Platform:
    """Return a computer with this processor, and the kernel of a package that depends on it."""

    def make_root(guest: vm.Guest, root: Path) -> Path:
        require({"qemu-system-aarch64": "qemu-system-arm", "mmdebstrap": "mmdebstrap"})
        system = _system(guest.suite, guest.packages, kernel)
        unpack(system / "root.tar", root)
        return system / "kernel"

    # With -icount the guest's clock counts instructions: on a busy host it is slow, but not late by
    # its own clock. The board has one serial port, so the other is of a PCI card.
    qemu = ("qemu-system-aarch64", "-machine", "virt,gic-version=3", "-cpu", processor)
    return vm.Platform(
        qemu=(*qemu, "-icount", "shift=1,sleep=on", "-smp", "1"),
        console="ttyAMA0",
        port=("-device", "pci-serial,chardev=steps"),
        terminal="/dev/ttyS0",
        make_root=make_root,
    )


def _guest(suite: str, system: vm.Platform) -> vm.Guest:
    return vm.Guest(
        script="arm64_guest",
        suite=suite,
        platform=system,
        is_installed=False,  # the script does it
        memory=4096,
    )


# The second processor has branch target identification and pointer authentication, which Debian
# 13's C library uses.
GUESTS = {
    "bookworm": _guest("bookworm", platform("linux-image-arm64", "neoverse-n1")),
    "trixie-16k": _guest("trixie", platform("linux-image-arm64-16k", "max,pauth-impdef=on")),
}


def _system(suite: str, packages: str, kernel: str) -> Path:
    """Return a directory with root.tar, a root tree, and kernel; raises Missing."""

    def make(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as directory:
            work = Path(directory)
            root = work / "root"
            unpack(root_tree(suite, packages), root)
            names = [*_entries(root / "var/lib/dpkg/status")]
            debs = _download(suite, names, kernel, work / "packages")
            _become_arm64(root, debs)

            target.mkdir()
            _extract_kernel(debs, kernel, target / "kernel")
            tar = ["tar", "-C", str(root), "--numeric-owner", "-cf", f"{target}/root.tar", "."]
            subprocess.run(tar, check=True)

    key = digest(packages, kernel, Path(__file__).read_bytes())
    return cached(f"{suite}-{ARCHITECTURE}-{key}", make, lasts=FRESH)


def _download(suite: str, names: Sequence[str], kernel: str, into: Path) -> list[Path]:
    """Fetch the arm64 packages of these names, and of the kernel; raises Missing."""
    into.mkdir()
    # mmdebstrap sets up apt for the other suite and architecture; its tree is not used.
    script = f"""
        set -e
        export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG"
        cd {into}
        apt-get download {" ".join([*names, kernel])}
        apt-get download $(
            apt-cache depends {kernel} | sed -n 's/^ *Depends: linux-image/linux-image/p'
        )
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
