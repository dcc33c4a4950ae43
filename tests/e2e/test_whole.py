"""The whole way: the package's unit in its sandbox and a real kubelet, under one systemd."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import container
from tests.e2e.conftest import Told
from tests.e2e.host import CONFIG, CONFIGURATION, UNIT
from tests.e2e.machine import (
    NODE_ADDRESS,
    SYSCTLS,
    VERSIONS,
    Containerd,
    Kubelet,
    Machine,
    build_kubelet,
    make_cgroups,
)
from tests.e2e.node import N300, RUNNING, Node, Program

PACKAGES = f"{container.PACKAGES},containerd,runc,busybox-static,mount"

# As in container.BOOT, but with the controllers of cgroup version 1, which the kubelet needs.
BOOT = """
set -e
for group in /sys/fs/cgroup/*/"$NAME"; do echo $$ > "$group/cgroup.procs"; done
mkdir -p /run/systemd/nspawn
mount -t tmpfs tmpfs /run/systemd/nspawn
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=0
exec systemd-nspawn --quiet --register=no --keep-unit --console=pipe --private-network \\
    --machine="$NAME" --system-call-filter='@keyring bpf' --capability=all "$@"
"""
# Before it becomes systemd. A node's root may do what a container's may not: write to cgroups, and
# to settings of the kernel, of which this one gets copies. A kubelet takes the address for its own.
INIT = f"""
set -e
for controller in $(grep -o '/sys/fs/cgroup/[a-z,_]* cgroup ro' /proc/mounts | cut -d' ' -f1); do
    mount -o remount,bind,rw $controller
done
for setting in {" ".join(SYSCTLS)}; do
    mkdir -p /run/sysctl/$(dirname $setting)
    cat /proc/sys/$setting > /run/sysctl/$setting
    mount --bind /run/sysctl/$setting /proc/sys/$setting
done
busybox ip address add {NODE_ADDRESS}/32 dev lo
exec /lib/systemd/systemd
"""
KUBELET = """\
[Unit]
Wants=containerd.service
After=containerd.service

[Service]
ExecStartPre=-/bin/mknod -m 600 /dev/kmsg c 1 11
ExecStart={command}
StandardOutput=append:{log}
StandardError=inherit

[Install]
WantedBy=multi-user.target
"""


class System(Machine):
    """A machine whose processes are the units of a systemd. It is switched off orderly."""

    def __init__(self, kubelet: Path, deb: Path) -> None:
        self.container = container.Container(
            "bookworm", {kubelet: str(kubelet), deb.parent: "/srv/packages"}, PACKAGES
        )
        self.container.script = BOOT
        self.scratch = self.logs = self.container.shared
        # At its own place, too; and what runs in the container.
        self.container.arguments += [f"--bind={self.scratch}", "/bin/sh", "-c", INIT]
        self.cgroup = "/"
        self.begun: Callable[[], object] = lambda: None  # called in the middle of each boot
        for file in ("/etc/hosts", "/etc/resolv.conf"):  # which the minimal system lacks
            self.container.write(file, "")
        self.container.write("/etc/containerd/config.toml", Containerd(self).config())

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.container.leader}/root{inside}")

    def power_on(self) -> None:
        def begun() -> None:
            self._init_pid = self.container.leader
            self.begun()

        make_cgroups(f"/{self.container.name}")
        self.container.boot(begun)

    def power_off(self) -> None:
        self.container.shut_down()

    def destroy(self) -> None:
        self.container.delete()

    def run(self, argv: Sequence[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
        return self.container.run(*argv, timeout=timeout)


class UnitOfKubelet(Kubelet):
    """A kubelet that systemd starts, at each boot too."""

    def spawn(self) -> None:
        assert isinstance(self.machine, System)
        self._stale_socket = self.socket_identity()
        unit = KUBELET.format(command=shlex.join(self.command()), log=self.log)
        self.machine.container.write("/etc/systemd/system/kubelet.service", unit)
        self.machine.container("systemctl", "enable", "--now", "kubelet")


class SystemNode(Node):
    """A node on such a machine, with an API server that answers from early in its boot on."""

    def __init__(self, version: str, program: Program, deb: Path) -> None:
        self.system = System(build_kubelet(version), deb)
        kinds: Any = {"machine": self.system, "kubelet": UnitOfKubelet}
        super().__init__(version, program, static_pods=False, **kinds)

    def _power_on(self) -> None:
        assert self.api
        api = self.api
        self.system.begun = lambda: api.serve(self.system.listen)
        self._begin_boot()
        self.system.power_on()
        self.containerd.prepare()

    def reboot(
        self, *, daemon_late_by: float | None = None, while_off: Callable[[], object] = lambda: None
    ) -> None:
        assert daemon_late_by is None, "systemd decides on that"
        self._dead |= {
            container for name in self._pods for container in self.containers(name).values()
        }
        self.system.power_off()
        while_off()
        self._power_on()
        self.kubelet.wait_ready()

    def last_words(self) -> str:
        journal = self.system.container("journalctl", "--no-pager", "--lines=40", check=False)
        return journal + "\n".join(line for _, line in self.kubelet.logged("^E")[-20:])


@pytest.fixture
def node(deb: Path, program: Program) -> Iterator[SystemNode]:
    """A booted system with containerd and the kubelet; the package is not installed yet."""
    if not Path("/sys/fs/cgroup/devices").is_dir():
        pytest.skip("NOT RUN: only tried where cgroup version 1 has the controllers")
    with SystemNode(VERSIONS[-1], program, deb) as node:
        yield node


def test_the_unit_serves_the_kubelet_and_boots_before_it(
    node: SystemNode, deb: Path, told: Told
) -> None:
    """In its sandbox the daemon gives pods their chips, and the same ones after a reboot."""
    system = node.system.container
    bdfs = [chip.bdf for _ in range(2) for chip in node.cards.add("n300")]
    tree = f"/srv/shared/{node.cards.root.name}"
    system.write(CONFIG, CONFIGURATION.replace("/srv/shared/node", tree))
    keep = ("-o", "Dpkg::Options::=--force-confold")
    system("apt-get", "install", "--yes", *keep, f"/srv/packages/{deb.name}")
    node.kubelet.wait_allocatable(N300, set(bdfs))
    names = [node.run({N300: 1}) for _ in bdfs]
    assert [node.outcome(name) for name in names] == [RUNNING, RUNNING]
    held = {name: next(iter(node.devices(N300, name))) for name in names}
    paths = {name: f"/dev/tenstorrent/{node.cards.chip(held[name]).ordinal}" for name in names}
    assert [node.open_inside(name, paths[name]) for name in names] == ["opened", "opened"]

    pid = system("systemctl", "show", "--value", "--property=MainPID", UNIT).strip()
    status = dict(re.findall(r"(\w+):\t(.*)", system("cat", f"/proc/{pid}/status")))
    assert (status["CapEff"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")
    devices = f"/sys/fs/cgroup/devices/system.slice/{UNIT}.service/devices.list"
    allowed = system("cat", devices).splitlines()
    assert "a *:* rwm" not in allowed and "c 1:3 rwm" in allowed

    node.reboot(while_off=lambda: node.cards.swap_ordinals(*bdfs))
    assert [node.outcome(name) for name in names] == [RUNNING, RUNNING]
    for name in names:
        assert node.devices(N300, name) == {held[name]}
        assert node.number_inside(name, paths[name]) == node.host_number(held[name])
        assert node.open_inside(name, paths[name]) == "opened"
    ready = moment(system, UNIT, "ActiveEnter")
    started = moment(system, "kubelet", "ExecMainStart")
    assert ready <= started
    early = (started - ready) * 1000
    told(
        f"kubelet {node.version}: READY {early:.0f} ms before it starts; both pods have their chips"
    )


def moment(system: container.Container, unit: str, name: str) -> float:
    shown = ("show", "--value", f"--property={name}TimestampMonotonic")
    return int(system("systemctl", *shown, unit)) / 1e6
