"""Runs on the node with cgroup v2: two pods with devices, one after the other.

See steps.py for what it prints.
"""

from __future__ import annotations

import json
import os
import platform
import ssl
import time
import urllib.request
from pathlib import Path

from tests.e2e.steps import JSON, shell, status_with, step, wait_for

DRIVERS = ("cgroupfs", "systemd")
CGROUPS = Path("/sys/fs/cgroup")
MANIFESTS = Path("/etc/kubernetes/manifests")
IMAGE = "localhost/realkubelet/busybox:1"
RESOURCE = "tenstorrent.com/n150"
CONFIGURATION = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "staticPodPath": str(MANIFESTS),
    "fileCheckFrequency": "1s",
    "failSwapOn": False,
    "address": "127.0.0.1",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "registerNode": False,
    "enableControllerAttachDetach": False,
    "makeIPTablesUtilChains": False,
    "resolvConf": "",
    "runtimeRequestTimeout": "15m",  # this machine is slow
    # A pod is not refused because the disk is small.
    "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
}
CONTAINERD = f"""
version = 2
[plugins.'io.containerd.grpc.v1.cri']
sandbox_image = '{IMAGE}'
[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]
SystemdCgroup = %s
"""
CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
UID = "3c5d0a51-7b0e-4f0e-9d6b-6f2f8b1c0e%02d"
# Opens and closes a device again and again, and does not end when it is told to.
STUBBORN = "trap '' TERM; while :; do exec 3<>/dev/tenstorrent/0; sleep 1; exec 3>&-; sleep 1; done"
GRACE = 20  # seconds that the kubelet waits before it kills a pod


def configure(driver: str) -> None:
    """Let kubelet and runc make cgroups by this driver, and start them."""
    shell("systemctl stop kubelet containerd")
    MANIFESTS.mkdir(parents=True, exist_ok=True)
    configuration = CONFIGURATION | {"cgroupDriver": driver}
    Path("/etc/kubernetes/kubelet.json").write_text(json.dumps(configuration, indent=1))
    Path("/etc/containerd/config.toml").write_text(CONTAINERD % str(driver == "systemd").lower())
    shell("systemctl start containerd")
    wait_for(lambda: ctr("version").count("Server:"), "containerd")
    ctr("images import /srv/image.tar")
    shell("systemctl start kubelet")


def ctr(command: str) -> str:
    return shell(f"ctr --namespace k8s.io {command}")


def put_manifest(name: str, uid: str, spec: JSON) -> None:
    """Put a static pod's manifest where the kubelet finds it."""
    # There is no network plugin.
    common = {"hostNetwork": True, "terminationGracePeriodSeconds": 1}
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "uid": uid},
        "spec": common | spec,
    }
    (MANIFESTS / f".{name}").write_text(json.dumps(manifest))  # the kubelet leaves such names alone
    (MANIFESTS / f".{name}").rename(MANIFESTS / f"{name}.json")


def pods() -> dict[str, JSON]:
    """Return the kubelet's pods by name; none while it does not answer."""
    context = ssl._create_unverified_context()  # it signed its certificate itself
    try:
        with urllib.request.urlopen("https://127.0.0.1:10250/pods", context=context) as answer:
            listed = json.load(answer)
    except OSError:
        return {}
    listed = listed.get("items") or ()
    return {pod["metadata"]["name"].removesuffix("-node"): pod for pod in listed}


def running(name: str) -> dict[str, str]:
    """Return the IDs of a pod's containers by name, if all of them run."""
    pod = pods().get(name)
    if not pod:
        return {}
    assert pod["status"]["phase"] != "Failed", pod["status"]
    states = [state for state in pod["status"].get("containerStatuses") or () if state["ready"]]
    if len(states) < len(pod["spec"]["containers"]):
        return {}
    return {state["name"]: state["containerID"].rpartition("/")[2] for state in states}


def wait_running(name: str) -> dict[str, str]:
    """Wait until a pod's containers run; return their IDs by name."""
    return wait_for(lambda: running(name), lambda: f"pod {name}, which is {pods().get(name)}")


class Container:
    """A running container."""

    def __init__(self, identity: str) -> None:
        [cgroup] = [path for path, _, _ in os.walk(CGROUPS) if identity in os.path.basename(path)]
        self.cgroup = cgroup.removeprefix(f"{CGROUPS}/")
        self.process = Path("/proc", Path(cgroup, "cgroup.procs").read_text().split()[0])

    @property
    def started_at(self) -> float:
        fields = (self.process / "stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5), starttime


def holders() -> dict[str, list[str]]:
    """Return who has which chip, by path of its device file, as `list` shows it."""
    rows = json.loads(shell("tt-device-plugin list --json"))
    return {row["path"]: [pod["pod"] for pod in row["pods"] or ()] for row in rows}


def are_held_by(pod: str) -> bool:
    """Return whether a pod holds all chips; another one that has ended may still be shown."""
    return all(pod in pods for pods in holders().values())


def hand_over(number: int) -> JSON:
    """Take a pod away that does not end, and let another one have its devices."""
    found: JSON = {"given too early": False, "last seen": 0.0}
    main: JSON = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}
    main["resources"] = {"limits": {RESOURCE: "2"}}
    names = (f"predecessor-{number}", f"successor-{number}")
    stubborn = main | {"command": ["sh", "-c", STUBBORN]}
    spec = {"containers": [stubborn], "terminationGracePeriodSeconds": GRACE}
    put_manifest(names[0], UID % number, spec)
    predecessor = Container(wait_running(names[0])["main"])
    found["cgroup"] = predecessor.cgroup
    opened = predecessor.process / "fd/3"
    wait_for(opened.exists, "it to open its device")
    wait_for(lambda: are_held_by(f"{names[0]}-node"), lambda: f"its name in {holders()}")
    (MANIFESTS / f"{names[0]}.json").unlink()
    wait_for(lambda: names[0] not in pods(), "the kubelet to have no such pod any longer")
    put_manifest(names[1], UID % (number + 1), {"containers": [main]})

    def has_ended() -> bool:
        if predecessor.process.exists():
            found["last seen"] = time.monotonic()
            found["given too early"] |= UID % (number + 1) in CHECKPOINT.read_text()
        return not predecessor.process.exists()

    wait_for(has_ended, "the predecessor to end")
    successor = Container(wait_running(names[1])["main"])
    found["later"] = round(successor.started_at - found["last seen"], 2)
    found["journal"] = shell("journalctl --identifier=tt-device-plugin --output=cat").splitlines()
    (MANIFESTS / f"{names[1]}.json").unlink()
    wait_for(lambda: not any(holders().values()), lambda: f"nobody to hold a chip: {holders()}")
    return found


with step("boot") as seen:
    seen["kernel"] = platform.release()
    seen["cgroup"] = shell("stat --file-system --format=%T /sys/fs/cgroup")
    seen["controllers"] = (CGROUPS / "cgroup.controllers").read_text().split()
    mounts = Path("/proc/mounts").read_text().splitlines()
    seen["version 1"] = [line for line in mounts if line.split()[2] == "cgroup"]
    seen["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
    for program in ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin"):
        seen[program] = shell(f"{program} --version").splitlines()[0]

for number, driver in enumerate(DRIVERS):
    with step(driver) as seen:
        configure(driver)
        seen["status"] = status_with(f"2 × {RESOURCE}, 2 healthy", "registered with kubelet")
        seen |= hand_over(2 * number)
