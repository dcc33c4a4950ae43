"""The image that containers run: busybox, without a registry or a tool that makes images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from tests.e2e.builds import HERE, cached, digest
from tests.e2e.pods import IMAGE

APPLETS = "sh sleep ls cat env grep sort stat id dd mount true false test"

# A bare sleep, as its namespace's first process, gets no SIGTERM.
SLEEP = "trap exit TERM; while :; do sleep 3600 & wait; done"


def like_umd() -> Path:
    """Return like_umd.c, compiled."""
    source = HERE / "like_umd.c"

    def make(target: Path) -> None:
        subprocess.run(["gcc", "-static", "-O2", "-o", target, source], check=True)

    return cached(f"like_umd-{digest(source.read_text())}", make)


def busybox_layer() -> bytes:
    """Return an image's layer: busybox, static, under the names that tests use, and like_umd."""
    busybox = shutil.which("busybox")
    assert busybox is not None

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "dev", "proc", "sys", "etc", "tmp"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(directory)

        tar.add(busybox, "bin/busybox")
        tar.add(like_umd(), "bin/like_umd")
        for applet in APPLETS.split():
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return layer.getvalue()


def image_archive(name: str, layer: bytes) -> bytes:
    """Return an archive, as of `docker save`, of an image that sleeps unless told otherwise."""
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "config": {"Env": ["PATH=/bin"], "Entrypoint": ["/bin/sh", "-c", SLEEP]},
    }
    listed = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {"manifest.json": listed, "config.json": config}

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        contents = {path: json.dumps(content).encode() for path, content in files.items()}
        for path, content in {**contents, "layer.tar": layer}.items():
            member = tarfile.TarInfo(path)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def busybox_archive() -> bytes:
    """Return the archive of IMAGE, which pods have unless told otherwise, and pause containers."""
    return image_archive(IMAGE, busybox_layer())
