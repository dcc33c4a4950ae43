"""Which devices `fix` has the real tt-smi reset: one, or none.

tt-smi and tt-umd are PyPI's. They run in a mount namespace of which the simulated node is the
machine, and what they ask the driver is answered by umd_driver.c, which writes down resets.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

import ttdp
from tests.commands import Host
from tests.e2e.builds import CACHE, cached
from tests.e2e.container import require_root
from tests.e2e.daemon import OPENABLE
from tests.e2e.machine import HUNG
from tests.e2e.umd import compile_driver
from tests.world.node import Chip, SimulatedNode, Ticker
from tests.world.processes import until
from tests.world.simulation import STALLS, RunningDaemon, settings_of

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


class FixHost(Host):
    """A host with three chips, the second of which `fix` is to mend."""

    @property
    def tt_smi(self) -> Path:
        return self.node.root / "bin/tt-smi"

    @property
    def ill(self) -> Chip:
        return self.node.chip("0000:02:00.0")

    @property
    def resets(self) -> set[int]:
        """The numbers of the devices that were reset."""
        file = self.node.root / "resets"
        return {int(line) for line in file.read_text().split()} if file.exists() else set()


@pytest.fixture(scope="module", params=VERSIONS)
def program(request: pytest.FixtureRequest) -> Path:
    require_root(unshare="util-linux", gcc="gcc libc6-dev")
    return installed(request.param)


@pytest.fixture
def host(program: Path, short_tmp: Path, tmp_path: Path) -> Iterator[FixHost]:
    node = SimulatedNode(tmp_path / "node", nodes="mknod", numbers=OPENABLE)
    node.add("n150")
    node.add("p300c")
    for name in ("bin", "host-dev"):
        (node.root / name).mkdir()
    compile_driver(node.root / "driver.so")

    environ = {"RUNTIME_DIRECTORY": str(short_tmp)}
    host = FixHost(short_tmp, node, environ, {"FOLLOWS_WITHIN": 60.0})

    host.tt_smi.write_text(TT_SMI.format(node=node.root, program=program))
    host.tt_smi.chmod(0o755)
    with Ticker(node, 0.05):
        yield host


@pytest.fixture
async def stalled(host: FixHost) -> AsyncIterator[FixHost]:
    """A daemon sees that its firmware has stopped."""
    more = {"runtime_dir": str(host.root), "health": STALLS}
    settings = settings_of(host.node, host.plugins, **more)
    async with RunningDaemon(host.node, settings) as daemon:
        await daemon.ready()
        host.ill.freeze()
        await daemon.sees(host.ill.bdf, ttdp.Kind.STALLED)
        yield host


async def fixed(host: FixHost, **environ: str) -> None:
    """Run `fix` to its end; the chip is healthy as soon as something has been reset."""
    running = asyncio.ensure_future(host.ask("fix", host.ill.bdf, "--yes", **environ))
    await until(lambda: host.resets or running.done(), "a reset")
    host.ill.thaw()

    answer = await running
    assert answer.status == 0, answer.out + answer.err


async def test_fix_resets_this_chip_only(stalled: FixHost) -> None:
    """Even if the operator's TT_VISIBLE_DEVICES names another one."""
    await fixed(stalled, TT_VISIBLE_DEVICES="0000:01:00.0")
    assert stalled.resets == {1}


async def test_fix_resets_the_number_of_this_moment(stalled: FixHost) -> None:
    """After a renumbering it is another one."""
    stalled.node.swap_ordinals("0000:02:00.0", "0000:03:00.0")
    await fixed(stalled)
    assert stalled.resets == {2}


def run(host: FixHost, *words: str) -> None:
    """Run tt-smi, whose status proves nothing."""
    subprocess.run([host.tt_smi, *words], capture_output=True, check=False, timeout=HUNG)


def command(host: FixHost) -> list[str]:
    """What `fix` would run for this chip at this moment."""
    bus = ttdp.scan(
        ttdp.Settings(root=str(host.node.root)),
        {},
        driver_is_loaded=True,
    )
    function = bus[host.ill.bdf]
    assert function
    return ttdp.reset_command(function, "tt-smi")[1:]


GONE: dict[str, Callable[[Chip], object]] = {
    "off the bus": Chip.vanish,
    "not bound": Chip.unbind,
    "without its file": lambda chip: chip.device_node.unlink(),
}


@pytest.mark.parametrize("how", GONE)
def test_a_chip_that_goes_away_at_the_last_moment(host: FixHost, how: str) -> None:
    """Between the last look and the reset: then none is reset."""
    words = command(host)
    GONE[how](host.ill)
    run(host, *words)
    assert host.resets == set()


def test_an_address_that_is_not_found_resets_all(host: FixHost) -> None:
    """Which is why `fix` never gives tt-smi an address; this test would show when that changes."""
    run(host, "-r", "0000:99:00.0", "--no_reinit")
    assert host.resets == {0, 1, 2}
