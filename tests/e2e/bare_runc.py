#!/usr/bin/python3
"""Stands before runc, and lets containerd make pods as CRI-O does: without a pause process in them.

CRI-O drops the pod's infrastructure container (`drop_infra_ctr`, its default), so the cgroup of a
pod is empty until its first container's process exists. Here the pause process gets a cgroup
outside the pod's. The creation of any other container waits while the test wants it to, as on a
slow node, and fails if the test wants that.

A `BareRuntime` installs it on a machine, and is what a test asks. As a program it is on its own:
standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

OUTSIDE = "outside"  # the cgroup of all pause processes, in the machine's
FAIL = "fail"
CRI = "io.kubernetes.cri"  # containerd's annotations (pkg/cri/annotations)


class BareRuntime:
    """The program in a directory of its own, in which files tell it what to do."""

    def __init__(self, directory: Path) -> None:
        self.program = directory / "runc"
        self._hold, self._held = _files(directory)
        self._held.mkdir(parents=True)
        shutil.copy2(__file__, self.program)
        self.program.chmod(0o755)

    def hold(self) -> None:
        """Let the creation of each container wait, from now on, until its pod is released."""
        self._hold.touch()

    def hold_no_more(self) -> None:
        """Let the creation of containers go on; those that wait do so until they are released."""
        self._hold.unlink(missing_ok=True)

    def is_held(self, pod: str) -> bool:
        """Return whether the creation of a container of this pod has begun, and waits."""
        return (self._held / pod).exists()

    def release(self, pod: str, *, fail: bool = False) -> None:
        """Let a creation that waits go on, or fail."""
        if fail:
            (self._held / pod).write_text(FAIL)
        else:
            (self._held / pod).unlink()

    def release_all(self) -> None:
        self.hold_no_more()
        for waiting in self._held.iterdir():
            waiting.unlink()


def _files(directory: Path) -> tuple[Path, Path]:
    """Return the file that tells the program to wait, and the directory for what waits."""
    return directory / "hold", directory / "held"


def main() -> None:
    arguments = sys.argv[1:]
    if "create" in arguments:
        _prepare(Path(arguments[arguments.index("--bundle") + 1], "config.json"))
    search = os.environ["PATH"]
    runc = shutil.which("runc", path=f"{search}:/usr/sbin:/usr/local/sbin")
    assert runc is not None, f"no runc in {search}"
    os.execv(runc, ["runc", *arguments])


def _prepare(bundle: Path) -> None:
    """Change the container's configuration, or wait."""
    config = json.loads(bundle.read_text())
    annotations = config["annotations"]
    pod = annotations[f"{CRI}.sandbox-name"]
    if annotations[f"{CRI}.container-type"] == "sandbox":
        path = Path(config["linux"]["cgroupsPath"])  # /MACHINE/kubepods/…/pod<UID>/<container>
        machine = path.parts[1]
        config["linux"]["cgroupsPath"] = f"/{machine}/{OUTSIDE}/{path.name}"
        bundle.write_text(json.dumps(config))
        return

    hold, held = _files(Path(__file__).parent)
    if not hold.exists():
        return
    waiting = held / pod
    waiting.touch()
    while waiting.exists():
        if waiting.read_text() == FAIL:
            waiting.unlink()
            sys.exit("the test wants this to fail")
        time.sleep(0.02)  # so that it goes on at once


if __name__ == "__main__":
    main()
