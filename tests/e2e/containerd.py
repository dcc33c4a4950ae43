"""Debian's containerd and runc on a machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import grpc

from tests.e2e.builds import cached, debian_tree
from tests.e2e.images import busybox_archive
from tests.e2e.machine import Machine, Process, tail
from tests.e2e.pods import IMAGE
from tests.world.processes import wait_until


class Containerd:
    """containerd with busybox's image, and with others that are given to it."""

    SOCKET = "/run/containerd/containerd.sock"

    def __init__(
        self, machine: Machine, programs: Path | None = None, images: Sequence[Path] = ()
    ) -> None:
        """programs: a directory with other ones than the host's; images: archives of more."""
        self._machine = machine
        self._images = images
        self._env = dict(os.environ)
        if programs is not None:
            self._env["PATH"] = f"{programs}:{self._env['PATH']}"
        self._binary = shutil.which("containerd", path=self._env["PATH"]) or "containerd"
        self._ctr = shutil.which("ctr", path=self._env["PATH"]) or "ctr"
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, and wait until it answers; the first time, import the images."""
        config = self._machine.scratch / "containerd.toml"
        config.write_text(self._config())
        command = [self._binary, "--config", str(config)]
        self._process = self._machine.spawn(
            command, self._machine.logs / "containerd.log", env=self._env
        )
        wait_until(self._answers, "containerd's socket")

        archive = self._machine.scratch / "image.tar"
        if not archive.exists():
            archive.write_bytes(busybox_archive())
            for each in [archive, *self._images]:
                self.ctr("images", "import", str(each))

    def _config(self) -> str:
        """Return the defaults, but for the pause image and what a restricted root may not do."""
        version = subprocess.check_output([self._binary, "--version"], text=True)
        if re.search(r" v?1\.\d+\.\d+", version):
            lines = ["version = 2", "[plugins.'io.containerd.grpc.v1.cri']"]
            lines += [f"sandbox_image = '{IMAGE}'", "enable_cdi = true"]  # since 1.7
        else:
            lines = ["version = 3", "[plugins.'io.containerd.cri.v1.images'.pinned_images]"]
            lines += [f"sandbox = '{IMAGE}'", "[plugins.'io.containerd.cri.v1.runtime']"]

        # Without CAP_SYS_RESOURCE runc fails: pods want less than our own.
        return "\n".join([*lines, "restrict_oom_score_adj = true", ""])

    def _answers(self) -> bool:
        if self._process is not None and not self._process.alive:
            raise RuntimeError(f"containerd ended:\n{tail(self._process.log)}")

        path = self._machine.path(self.SOCKET)
        if not path.exists():
            return False

        # containerd's own services answer some time before that for the kubelet does.
        with grpc.insecure_channel(f"unix://{path}") as channel:
            call = channel.unary_unary("/runtime.v1.RuntimeService/Version", bytes, bytes)
            try:
                call(b"", timeout=5)
            except grpc.RpcError:
                return False
        return True

    def ctr(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run containerd's own client, in the namespace of the kubelet's containers."""
        done = self._machine.run(self._ctr, "--namespace", "k8s.io", *argv)
        if done.returncode != 0 and argv[:2] != ("tasks", "exec"):
            raise RuntimeError(f"ctr {' '.join(argv)}: {done.stderr.strip()}")
        return done


def containerd_of(suite: str) -> Path:
    """Return a directory with another Debian release's containerd, to be run on this one.

    It needs nothing but a C library, which may be older; runc is the host's own.
    """
    tree = debian_tree(suite, "containerd")

    def make(target: Path) -> None:
        target.mkdir()
        for name in ("containerd", "containerd-shim-runc-v2", "ctr"):
            shutil.copy2(tree / "usr/bin" / name, target / name)

    return cached(f"{tree.name}-containerd", make)
