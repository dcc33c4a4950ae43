"""Which devices `fix` has the real tt-smi reset: one, or none.

tt-smi and tt-umd are PyPI's. They run in a mount namespace of which the simulated node is the
machine, and what they ask the driver is answered by umd_driver.c, which writes down resets.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ttdp
from tests.commands import Commanded, commanded
from tests.e2e.builds import CACHE, cached
from tests.e2e.container import require_root
from tests.e2e.daemon import OPENABLE
from tests.e2e.machine import HUNG
from tests.e2e.umd import compile_driver
from tests.world.node import Chip
from tests.world.processes import wait_until

ILL = "0000:02:00.0"
VERSIONS = ("4.2.0", "6.8.0")  # the first that accepts a device file as target, and one of today

# The program `bin/tt-smi` of the simulated node, whose root is {node}. /dev has the devices that
# any program needs, and the node's. Which number is which card, sysfs shows at that moment.
TT_SMI = """#!/bin/sh
exec unshare --mount sh -c '
    set -e
    mount -t tmpfs dev {node}/host-dev
    for name in null zero full random urandom tty; do cp -a /dev/$name {node}/host-dev; done
    mkdir {node}/host-dev/shm {node}/host-dev/tenstorrent
    mount --bind {node}/dev/tenstorrent {node}/host-dev/tenstorrent
    mount --bind {node}/sys /sys
    mount --rbind {node}/host-dev /dev
    for each in /sys/class/tenstorrent/*; do
        CARDS="$CARDS ${{each##*!}}=$(basename $(readlink -f $each/device))"
    done
    export CARDS="${{CARDS# }}" RESETS={node}/resets LD_PRELOAD={node}/driver.so
    exec {program} "$@"
' tt-smi "$@"
"""


def installed(version: str) -> Path:
    """Return the path of a tt-smi, in a virtual environment of its own in the cache."""
    name = f"tt-smi-{version}-{sys.version_info.major}.{sys.version_info.minor}"
    place = CACHE / f"{name}-environment"  # a path that its programs contain

    def make(marker: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        pip = [str(place / "bin/pip"), "install", "--quiet", "--only-binary=:all:"]
        subprocess.run([*pip, f"tt-smi=={version}"], check=True)
        marker.touch()

    cached(f"{name}-complete", make)
    return place / "bin/tt-smi"


@pytest.fixture(scope="module", params=VERSIONS)
def program(request: pytest.FixtureRequest) -> Path:
    require_root(unshare="util-linux", gcc="gcc libc6-dev")
    return installed(request.param)


@pytest.fixture
def host(program: Path, short_tmp: Path, tmp_path: Path) -> Iterator[Commanded]:
    """A host with three chips, of which the firmware of the second has stopped."""
    # Not in /dev, which the script hides.
    with commanded(short_tmp, tmp_path / "node", nodes="mknod", numbers=OPENABLE) as host:
        host.node.add("n150")
        host.node.add("p300c")
        host.node.chip(ILL).freeze()
        (host.node.root / "host-dev").mkdir()
        compile_driver(host.node.root / "driver.so")
        tt_smi_of(host).write_text(TT_SMI.format(node=host.node.root, program=program))
        yield host


def tt_smi_of(host: Commanded) -> Path:
    return host.node.root / "bin/tt-smi"


def resets(host: Commanded) -> set[int]:
    """Return the numbers of the devices that were reset."""
    file = host.node.root / "resets"
    return {int(line) for line in file.read_text().split()} if file.exists() else set()


def fix(host: Commanded, **environ: str) -> None:
    """Run `fix` to its end; the chip is healthy as soon as something has been reset."""

    def mend() -> None:
        wait_until(lambda: resets(host), "a reset")
        host.node.chip(ILL).frozen = False

    mending = threading.Thread(target=mend, daemon=True)
    mending.start()
    answer = host.run("fix", ILL, "--yes", **environ)
    assert answer.status == 0, answer.out + answer.err


def test_fix_resets_this_chip_only(host: Commanded) -> None:
    """Even if the operator's TT_VISIBLE_DEVICES names another one."""
    fix(host, TT_VISIBLE_DEVICES="0000:01:00.0")
    assert resets(host) == {1}


def test_fix_resets_the_number_of_this_moment(host: Commanded) -> None:
    """After a renumbering it is another one."""
    host.node.swap_ordinals(ILL, "0000:03:00.0")
    fix(host)
    assert resets(host) == {2}


def run(host: Commanded, command: str) -> None:
    """Run a command, whose status proves nothing."""
    subprocess.run(["sh", "-c", command], capture_output=True, check=False, timeout=HUNG)


def command(host: Commanded) -> str:
    """Return what `fix` would run for this chip at this moment."""
    settings = ttdp.Settings(root=str(host.node.root))
    function = ttdp.scan(settings, {}, driver_is_loaded=True)[ILL]
    assert function
    look = ttdp.Look(function, host.service.view())
    return ttdp.command_of(ttdp.Step.RESET, look, settings, str(tt_smi_of(host)))


GONE: dict[str, Callable[[Chip], object]] = {
    "off the bus": Chip.vanish,
    "not bound": Chip.unbind,
    "without its file": lambda chip: chip.device_node.unlink(),
}


@pytest.mark.parametrize("how", GONE)
def test_a_chip_that_goes_away_at_the_last_moment(host: Commanded, how: str) -> None:
    """Between the last look and the reset: then none is reset."""
    words = command(host)
    GONE[how](host.node.chip(ILL))
    run(host, words)
    assert resets(host) == set()


def test_an_address_that_is_not_found_resets_all(host: Commanded) -> None:
    """Which is why `fix` never gives tt-smi an address; this test would show when that changes."""
    run(host, f"{tt_smi_of(host)} -r 0000:99:00.0 --no_reinit")
    assert resets(host) == {0, 1, 2}
