"""Tenstorrent's user-mode driver, tt-umd, as containers have it: an image with its wheel."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.e2e.builds import HERE, cached, debian_tree, digest
from tests.e2e.images import busybox_layer, image_archive

IMAGE = "localhost/tt-umd:1"

RELEASE = "0.9.14"
HASHES = {  # of the wheels for CPython 3.11
    "x86_64": "sha256:6d7b561b9fe1c4e38b0d112d0ab91e745f6e672fe44f1e30fc2f9bbb42359555",
    "aarch64": "sha256:dc0ced68b315e0da28515ba9c0f6d261ca53d3ad88f61a1b8a9ead7e8207abbd",
}
DEBIAN = ("python3.11-minimal", "libpython3.11-stdlib", "libstdc++6", "libatomic1")  # of bookworm
DRIVER = HERE / "umd_driver.c"

# What tt-umd does before it starts a chip: it takes the lock, or says after two seconds that it
# waits for it.
HOLD = """
import time, tt_umd
mutex = tt_umd.RobustMutex("CHIP_IN_USE_0_PCIe")
owner = mutex.probe_lock(2)
print("waits" if owner else "holds")
if owner:
    mutex.lock()
    print("holds")
time.sleep(3600)
"""
LOCK = "TT_UMD_LOCK.CHIP_IN_USE_0_PCIe"  # the file that is this mutex


def image() -> Path:
    """Return the image's archive: from the cache, or made of Debian packages and the wheel."""
    key = digest(IMAGE, RELEASE, HASHES, DEBIAN, DRIVER.read_text())
    return cached(
        f"tt-umd-{key}.tar", lambda target: target.write_bytes(image_archive(IMAGE, _layer()))
    )


def compile_driver(target: Path) -> None:
    """Make the library that answers what tt-umd asks the driver."""
    gcc = ["gcc", "-shared", "-fPIC", "-O1", "-Wall"]
    subprocess.run([*gcc, "-o", target, DRIVER], check=True)


def _layer() -> bytes:
    layer = io.BytesIO(busybox_layer())
    with tarfile.open(fileobj=layer, mode="a") as tar, tempfile.TemporaryDirectory() as directory:
        tree = debian_tree("bookworm", *DEBIAN)
        for name in ("lib", "lib64", "usr"):
            if (tree / name).exists():
                tar.add(tree / name, name, filter=_without_documentation)

        made = Path(directory)
        with zipfile.ZipFile(_wheel(made)) as wheel:
            wheel.extractall(made / "site")
        tar.add(made / "site", "usr/lib/python3.11")

        compile_driver(made / "driver.so")
        tar.add(made / "driver.so", "driver.so")
    return layer.getvalue()


def _without_documentation(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.startswith("usr/share/") else member


def _wheel(directory: Path) -> Path:
    machine = os.uname().machine
    (directory / "requirements.txt").write_text(f"tt-umd=={RELEASE} --hash={HASHES[machine]}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    pip += ["--only-binary=:all:", "--require-hashes", "--python-version=3.11"]
    pip += [f"--platform=manylinux_2_28_{machine}", f"--dest={directory}"]
    subprocess.run([*pip, f"--requirement={directory / 'requirements.txt'}"], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def said(output: str) -> list[str]:
    """Return what HOLD has said; tt-umd adds lines of its own."""
    words = [line.split()[-1] for line in output.splitlines() if line.strip()]
    return [word for word in words if word in ("waits", "holds")]


def python(text: str, cards: str | None = None) -> list[str]:
    """Return the command that runs a program with tt-umd in it.

    cards: what the driver answers, PCI addresses by number: "0=0000:01:00.0 1=…".
    """
    driver = [] if cards is None else ["env", "LD_PRELOAD=/driver.so", f"CARDS={cards}"]
    return [*driver, "/usr/bin/python3.11", "-u", "-c", text]
