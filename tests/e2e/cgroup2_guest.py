"""Runs on the node with cgroup v2: what pods with devices go through, one step after the other.

containerd and the kubelet make cgroups by systemd. Standard library only.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.apiserver import PORT, ApiServer
from tests.e2e.kubeletconfig import COMMON, NODE_ADDRESS, NODE_NAME, READ_ONLY_PORT, kubeconfig
from tests.e2e.pods import IMAGE, Pod, manifest
from tests.e2e.steps import JSON, PATIENCE, UNIT, shell, status_with, step, wait_for

CGROUPS = Path("/sys/fs/cgroup")
CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
RESOURCE = "tenstorrent.com/n150"
CHIPS = 6
GRACE = 1200  # seconds that the kubelet waits before it kills a pod: `forced` does it before

CONTAINERD = f"""
version = 3
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = '{IMAGE}'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = true
"""
# A network plugin that gives pods an address and nothing else: pods with a user namespace of their
# own cannot have the host's network.
NETWORK_PLUGIN = """#!/bin/sh
case $CNI_COMMAND in
    VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["0.4.0", "1.0.0"]}' ;;
    ADD) echo '{
        "cniVersion": "1.0.0",
        "interfaces": [{"name": "'$CNI_IFNAME'", "sandbox": "'$CNI_NETNS'"}],
        "ips": [{"interface": 0, "address": "192.0.2.2/32"}]
    }' ;;
esac
"""
NETWORK = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}

# What containers run: they tell what they have been given, and open each device every second.
ATTEMPTS = ("opened", "not opened")
OPEN = """
exec 2>&1
trap {term} TERM
env | grep ^TT_
for node in /dev/tenstorrent/*; do stat -c 'file %t:%T' $node; done
while :; do
    for node in /dev/tenstorrent/*; do true <>$node && echo opened || echo not opened; done
    sleep 1
done
"""


def write(name: str, text: str, mode: int = 0o644) -> None:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def start_node() -> ApiServer:
    """Start containerd and the kubelet, and wait until the daemon is registered."""
    api = ApiServer()
    api.serve(lambda port: socket.create_server(("127.0.0.1", port)))
    shell(f"busybox ip address add {NODE_ADDRESS}/32 dev lo")

    # This machine is slow.
    config = COMMON | {"cgroupDriver": "systemd", "runtimeRequestTimeout": "15m"}
    write("/etc/kubernetes/kubelet.json", json.dumps(config))
    write("/etc/kubernetes/kubeconfig", json.dumps(kubeconfig(f"http://127.0.0.1:{PORT}")))
    write("/etc/containerd/config.toml", CONTAINERD)
    write("/etc/cni/net.d/10-none.conflist", json.dumps(NETWORK))
    for name in ("none", "loopback"):  # containerd calls the other one for lo
        for directory in ("/opt/cni/bin", "/usr/lib/cni"):  # Debian's containerd has its own
            write(f"{directory}/{name}", NETWORK_PLUGIN, 0o755)

    shell("systemctl start containerd")
    wait_for(lambda: shell("ctr version").count("Server:"), "containerd")
    shell("ctr --namespace k8s.io images import /srv/image.tar")
    shell("systemctl start kubelet")

    def listed() -> bool:
        return CHECKPOINT.exists() and RESOURCE in CHECKPOINT.read_text()

    wait_for(listed, lambda: f"a list: {shell(f'systemctl status {UNIT}')}")
    return api


def logged(text: str) -> int:
    """Return how often the daemon's log has a text."""
    return shell(f"journalctl --identifier={UNIT} --output=cat --no-pager").count(text)


# --- Pods -----------------------------------------------------------------------------------------


def create(
    api: ApiServer,
    chips: int,
    *,
    stubborn: bool = False,
    own_users: bool = False,
    **others: Any,
) -> Pod:
    """Create a pod. stubborn: it ignores SIGTERM; own_users: it has a user namespace.

    others: of pods.manifest().
    """
    command = ["sh", "-c", OPEN.replace("{term}", "''" if stubborn else "'exit 0'")]
    described = manifest({RESOURCE: chips}, command=command, **others)
    if own_users:
        described["spec"] |= {"hostUsers": False, "hostNetwork": False}
    api.add_pod(described, NODE_NAME)
    return Pod(api, described["metadata"]["name"], Path("/var/log/pods"), PATIENCE)


def process(pod: Pod) -> tuple[int, str]:
    """Return the first process of a pod's container, and its cgroup."""
    pod.wait_running()
    [cgroup] = CGROUPS.glob(f"kubepods*/**/*{pod.containers()['main']}*/")
    return int((cgroup / "cgroup.procs").read_text().split()[0]), str(cgroup.relative_to(CGROUPS))


def next_attempts(pods: Sequence[Pod]) -> list[list[str]]:
    """Wait until each of these pods has tried two times more to open its devices."""
    before = {pod: len(pod.output()) for pod in pods}

    def tried(pod: Pod) -> list[str] | None:
        found = [line for line in pod.output()[before[pod] :] if line in ATTEMPTS]
        return found if len(found) >= 2 else None

    return [wait_for(partial(tried, pod), pod.why) for pod in pods]


def given(pods: Sequence[Pod]) -> JSON:
    """Wait until pods run, and look what their containers were given, and whether it opens."""
    containers = [process(pod)[0] for pod in pods]
    found: JSON = {"opened": next_attempts(pods), "variables": [], "own": [], "uid maps": []}
    for pod, pid in zip(pods, containers, strict=True):
        output = "\n".join(pod.output())
        [chip] = re.findall("(?m)^TT_DEVICE_PLUGIN_DEVICES=(.*)$", output)
        [file] = Path("/sys/bus/pci/devices", chip).glob("tenstorrent/*/dev")
        major, minor = map(int, file.read_text().split(":"))

        found["variables"].append(re.findall("(?m)^TT_VISIBLE_DEVICES=(.*)$", output) == [chip])
        found["own"].append(re.findall("(?m)^file (.*)$", output) == [f"{major:x}:{minor:x}"])
        found["uid maps"].append(Path(f"/proc/{pid}/uid_map").read_text().split())
    return found


# --- Steps ----------------------------------------------------------------------------------------


def forced(api: ApiServer) -> JSON:
    """Delete a pod with all chips by force, and let another one have them: then it ends."""
    first = create(api, CHIPS, stubborn=True, grace=GRACE)
    pid, cgroup = process(first)

    def is_forgotten() -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{READ_ONLY_PORT}/pods") as answer:
            return first.uid not in answer.read().decode()

    first.force_delete()
    wait_for(is_forgotten, f"the kubelet to forget {first.name}")
    second = create(api, CHIPS)
    wait_for(lambda: logged("container start waits: "), second.why)
    found: JSON = {
        "cgroup": cgroup,
        "given": second.uid in CHECKPOINT.read_text(),
        "first runs": Path(f"/proc/{pid}").exists(),
        "second runs": second.is_running(),
    }

    os.kill(pid, signal.SIGKILL)
    second.wait_running()
    found["opened"] = next_attempts([second])
    second.delete()
    second.wait_finished()
    return found


def reload(pods: Sequence[Pod]) -> JSON:
    """Reload systemd, alone and by the installation of the package again."""
    before = [pod.containers() for pod in pods]
    found: JSON = {}
    for command in (
        "systemctl daemon-reload",
        "systemctl daemon-reexec",
        "dpkg --install --force-unsafe-io /srv/package.deb",
    ):
        status = shell(f"{command} >/dev/null 2>&1; echo $?")
        found[command] = {"status": status, "opened": next_attempts(pods)}
    return {"commands": found, "same": [pod.containers() for pod in pods] == before}


def main() -> None:
    with step("boot") as found:
        found["kernel"] = platform.release()
        found["cgroup"] = shell("stat --file-system --format=%T /sys/fs/cgroup")
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        for program in ("systemctl", "containerd", "runc", "kubelet"):
            found[program] = shell(f"{program} --version").splitlines()[0]

    with step("node") as found:
        api = start_node()
        found["status"] = status_with(f"{CHIPS} × {RESOURCE}", "registered")

    with step("forced") as found:
        found |= forced(api)

    pods = [create(api, 1), create(api, 1, own_users=True)]
    with step("files") as found:
        found |= given(pods)

    # Not by systemctl reload, which also checks the file, in another process.
    write("/etc/tt-device-plugin/config.toml", 'device_list_strategy = "cdi"\n')
    shell(f"systemctl kill --signal=HUP {UNIT}")
    wait_for(lambda: logged("configuration reloaded"), "the reload")
    by_name = [create(api, 1), create(api, 1, own_users=True)]
    with step("cdi") as found:
        found |= given(by_name)

    with step("reload") as found:
        found |= reload(pods + by_name)


if __name__ == "__main__":
    main()
