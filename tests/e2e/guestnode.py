"""A node from the inside, on a virtual machine: containerd, the kubelet, an API server, and pods.

Both make cgroups by systemd. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.kubeletconfig import (
    COMMON,
    NODE_ADDRESS,
    NODE_NAME,
    READ_ONLY_PORT,
    WITH_API_SERVER,
    kubeconfig,
)
from tests.e2e.pods import IMAGE, Pod, manifest
from tests.e2e.steps import JSON, PATIENCE, UNIT, shell, wait_for

CGROUPS = Path("/sys/fs/cgroup")
CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
CDI_FILE = Path("/run/cdi/tenstorrent.com-device.json")
FUNCTIONS = Path("/sys/bus/pci/devices")
RESOURCE = "tenstorrent.com/n150"
POD_ADDRESS = "192.0.2.2"

KUBELET = {
    **COMMON,
    **WITH_API_SERVER,
    "cgroupDriver": "systemd",
    "runtimeRequestTimeout": "15m",  # this machine is slow
}
CONTAINERD = f"""
version = 3
[debug]
level = "warn"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{IMAGE}'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
"""
# A network plugin that gives pods an address and nothing else: pods with a user namespace of their
# own cannot have the host's network.
NETWORK_PLUGIN = f"""#!/bin/sh
case $CNI_COMMAND in
    VERSION) echo '{{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}}' ;;
    ADD) cat <<END
{{
    "cniVersion": "1.0.0",
    "interfaces": [{{"name": "$CNI_IFNAME", "sandbox": "$CNI_NETNS"}}],
    "ips": [{{"interface": 0, "address": "{POD_ADDRESS}/32"}}]
}}
END
esac
"""
NETWORK = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}

# What containers run: they tell what they have been given, and open each device every second. What
# goes wrong is told, too.
ATTEMPTS = ("opened", "not opened")
OPEN = """
exec 2>&1
trap {term} TERM
trap 'exit 0' USR1
env | grep ^TT_
grep -E ' /dev/(hugepages|shm)' /proc/mounts
for node in /dev/tenstorrent/*; do stat -c 'file %n %t:%T' $node; done
{then}
while :; do
    for node in /dev/tenstorrent/*; do true <>$node && echo opened || echo not opened; done
    sleep 1
done
"""


class Process:
    """The first process of a running container."""

    def __init__(self, container: str) -> None:
        [cgroup] = CGROUPS.glob(f"kubepods*/**/*{container}*/")
        self.cgroup = str(cgroup.relative_to(CGROUPS))
        self.pid = int((cgroup / "cgroup.procs").read_text().split()[0])

    @property
    def exists(self) -> bool:
        return Path(f"/proc/{self.pid}").exists()

    @property
    def started_at(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5), starttime

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class GuestPod(Pod):
    """A pod of the node."""

    patience = PATIENCE

    def __init__(self, api: ApiServer, name: str) -> None:
        found = api.pod(name)
        assert found, f"there is no pod {name}"
        super().__init__(name, found["metadata"]["uid"])
        self._api = api

    def read(self) -> JSON | None:
        return self._api.pod(self.name)

    @property
    def logs(self) -> Path:
        return Path("/var/log/pods")

    # Its end

    def delete(self) -> None:
        """Delete the pod in an orderly manner, and do not wait."""
        self._api.delete_pod(self.name, grace=1)

    def wait_deleted(self) -> None:
        """Wait until the pod's object has gone."""
        wait_for(lambda: self.read() is None, lambda: f"the end of {self.why()}")

    def wait_ended(self) -> None:
        """Wait until the pod's cgroup has gone."""
        wait_for(lambda: self.cgroup() is None, lambda: f"the end of {self.why()}")

    def force_delete(self) -> None:
        """Delete the pod's object, and wait until the kubelet has forgotten it. It runs on."""
        self._api.delete_pod(self.name)
        wait_for(lambda: self.name not in _kubelets_pods(), f"the kubelet to forget {self.name}")

    # Its container

    def cgroup(self) -> Path | None:
        """Return the pod's cgroup; the beginning of its name is that of its class of service."""
        # Unlike glob(), os.walk() goes on if a directory is removed meanwhile.
        for path, _, _ in os.walk(CGROUPS / "kubepods.slice"):
            if path.endswith(f"-pod{self.uid.replace('-', '_')}.slice"):
                return Path(path)
        return None

    def process(self) -> Process:
        """Wait until the pod runs; return its container's first process."""
        self.wait_running()
        return Process(self.containers()["main"])

    def kill(self) -> None:
        """Kill the container; `wait_running` then waits for another one."""
        process = self.process()
        self.forget_containers()
        process.signal(signal.SIGKILL)

    def wait_output(self, line: str) -> list[str]:
        """Wait until the output has this line; return all lines."""

        def written() -> list[str] | None:
            lines = self.output()
            return lines if line in lines else None

        return wait_for(written, lambda: f"{line!r} of {self.why()}")


def next_attempts(*pods: GuestPod, attempts: int = 2) -> dict[str, list[str]]:
    """Wait until each of these pods has opened devices so many times more, or has tried to.

    Returns by name what they have written since the first of these attempts. What a container tells
    at its start can come as late: the kubelet says that it runs before its first line is written.
    """
    before = {pod: len(pod.output()) for pod in pods}

    def tried(pod: GuestPod) -> list[str] | None:
        more = pod.output()[before[pod] :]
        found = [index for index, line in enumerate(more) if line in ATTEMPTS]
        return more[found[0] :] if len(found) >= attempts else None

    return {pod.name: wait_for(partial(tried, pod), pod.why) for pod in pods}


class GuestNode:
    """The node, with one API server for all of its life."""

    def __init__(self) -> None:
        """Configure containerd and kubelet."""
        self.api = ApiServer()
        self.serve_api()
        shell(f"busybox ip address add {NODE_ADDRESS}/32 dev lo")

        _write("/etc/kubernetes/kubelet.json", json.dumps(KUBELET, indent=1))
        _write("/etc/kubernetes/kubeconfig", json.dumps(kubeconfig(f"http://127.0.0.1:{PORT}")))
        _write("/etc/containerd/config.toml", CONTAINERD)
        _write("/etc/cni/net.d/10-none.conflist", json.dumps(NETWORK))
        for name in ("none", "loopback"):  # containerd calls the other one for lo
            for directory in ("/opt/cni/bin", "/usr/lib/cni"):  # Debian's containerd has its own
                _write(f"{directory}/{name}", NETWORK_PLUGIN, 0o755)

    def start(self) -> None:
        """Start containerd and the kubelet, and wait until the daemon is registered."""
        shell("systemctl start containerd")
        wait_for(lambda: ctr("version").count("Server:"), "containerd")
        ctr("images import /srv/image.tar")
        shell("systemctl start kubelet")
        self.wait_registered()

    def serve_api(self) -> None:
        self.api.serve(lambda port: socket.create_server(("127.0.0.1", port)))

    def wait_registered(self) -> None:
        """Wait until the kubelet has a list of the daemon's."""

        def listed() -> object:
            try:
                data = json.loads(CHECKPOINT.read_text())["Data"]
            except FileNotFoundError:
                return None
            return data["RegisteredDevices"].get(RESOURCE)

        wait_for(listed, lambda: f"a list: {shell(f'systemctl status {UNIT}')}")

    @contextlib.contextmanager
    def restarted_kubelet(self) -> Iterator[None]:
        """Wait until a kubelet that was restarted in the context has the daemon's list.

        Only then it is told its pods, of before, too. On a machine that is no emulation the list
        is there long before them: it takes milliseconds, and a kubelet asks once a second for its
        node before it asks for pods. Here both take as long.
        """
        self.api.close()
        try:
            yield
            self.wait_registered()
        finally:
            self.serve_api()

    # Pods

    def create(
        self,
        name: str,
        resources: JSON,
        *,
        then: str = "",
        stubborn: bool = False,
        own_users: bool = False,
        init: bool = False,
        **others: Any,
    ) -> GuestPod:
        """Create a pod whose container asks for these resources.

        then: what the script does before it opens devices; stubborn: it ignores SIGTERM; own_users:
        the pod has a user namespace; init: an init container has the resources before it; others:
        of pods.manifest().
        """
        term = "''" if stubborn else "'exit 0'"
        command = ["sh", "-c", OPEN.replace("{term}", term).replace("{then}", then)]
        described = manifest(resources, name=name, command=command, **others)

        spec = described["spec"]
        if own_users:
            spec |= {"hostUsers": False, "hostNetwork": False}
        if init:
            spec["initContainers"] = [spec["containers"][0] | {"name": "init", "command": ["true"]}]

        self.api.add_pod(described, NODE_NAME)
        return GuestPod(self.api, name)

    def started(self, name: str, resources: JSON, **others: Any) -> GuestPod:
        """Create a pod, and wait until it runs; others: of create()."""
        pod = self.create(name, resources, **others)
        pod.wait_running()
        return pod

    def remove(self, *pods: GuestPod) -> None:
        """Delete pods in an orderly manner, and wait until their cgroups have gone."""
        for pod in pods:
            pod.delete()
        for pod in pods:
            pod.wait_ended()


# --- What the kernel shows ------------------------------------------------------------------------


def device_numbers() -> dict[str, str]:
    """Return the numbers of the chips' device files by address, hexadecimal as busybox has them."""
    found = {}
    for file in FUNCTIONS.glob("*/tenstorrent/*/dev"):
        major, minor = map(int, file.read_text().split(":"))
        found[file.parents[2].name] = f"{major:x}:{minor:x}"
    return found


def cdi_numbers() -> dict[str, str]:
    """Return the same as the daemon's CDI file has them."""
    found = {}
    for device in json.loads(CDI_FILE.read_text())["devices"]:
        if device["name"] != "all":
            [node] = device["containerEdits"]["deviceNodes"]
            number = os.stat(node["hostPath"]).st_rdev if os.path.exists(node["hostPath"]) else 0
            found[device["name"]] = f"{os.major(number):x}:{os.minor(number):x}"
    return found


def is_own_file(output: Sequence[str]) -> bool:
    """Return whether a container's last start found one device file: that of the chip it names."""
    starts = [index for index, line in enumerate(output) if line.startswith("TT_DEVICE_PLUGIN_")]
    last = output[starts[-1] :]

    chips = last[0].partition("=")[2].split(",")
    files = [line.split()[2] for line in last if line.startswith("file ")]
    numbers = device_numbers()
    return sorted(files) == sorted(numbers[chip] for chip in chips)


def swap(one: str, other: str) -> None:
    """Let two chips, by PCI address, exchange the numbers of their device files."""
    before = device_numbers()
    driver = "/sys/bus/pci/drivers/tenstorrent"
    for chip in (one, other):
        shell(f"echo {chip} > {driver}/unbind")

    # The lowest free number is given first.
    numbers = sorted((one, other), key=lambda chip: int(before[chip].partition(":")[2], 16))
    for chip in reversed(numbers):
        shell(f"echo {chip} > {driver}/bind")

    # Containers find their files by udev's links.
    shell(f"udevadm settle --timeout={PATIENCE:.0f}")
    after = device_numbers()
    assert (after[one], after[other]) == (before[other], before[one]), (before, after)


def chip_of(output: Sequence[str]) -> str:
    """Return the address of the one chip that a container was given."""
    [chip] = {line.partition("=")[2] for line in output if line.startswith("TT_DEVICE_PLUGIN_")}
    return chip


def ctr(command: str) -> str:
    return shell(f"ctr --namespace k8s.io {command}")


def logged(text: str) -> int:
    """Return how often the daemon's log has a text."""
    return shell(f"journalctl --identifier={UNIT} --output=cat --no-pager").count(text)


def waits() -> int:
    """Return how often a container's start has waited for a pod."""
    return logged("container start waits: ")


def _kubelets_pods() -> set[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{READ_ONLY_PORT}/pods") as answer:
        listed = json.load(answer)
    return {pod["metadata"]["name"] for pod in listed.get("items") or ()}


def _write(name: str, text: str, mode: int = 0o644) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
