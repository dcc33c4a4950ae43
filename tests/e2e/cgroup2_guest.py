"""Runs on the node with cgroup v2: looks at what containers can open, and why.

See steps.py for what it prints.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import os
import platform
import ssl
import stat
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e.steps import JSON, shell, status_with, step, wait_for
from tests.world.processes import Broken, wait_until

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
# Runs in a container, with numbers of devices as arguments: opens the nodes that are there, and
# ones that it makes.
ATTEMPTS = """
attempt() {
    answer=$({ : <> "$2"; } 2>&1) && answer=opened
    echo "$1=${answer##*: }"
}
for path in /dev/tenstorrent/* /host/[0-9]*; do
    [ ! -c "$path" ] || attempt "$path" "$path"
done
for number; do
    made=/tmp/node-$number
    busybox mknod -m 666 "$made" c "${number%:*}" "${number#*:}"
    attempt "made $number" "$made"
    busybox rm "$made"
done
"""
SERIAL_PORT = "4:64"
UIDS = {
    "besteffort": "3c5d0a51-7b0e-4f0e-9d6b-6f2f8b1c0e01",
    "guaranteed": "3c5d0a51-7b0e-4f0e-9d6b-6f2f8b1c0e02",
}
PREDECESSOR = "3c5d0a51-7b0e-4f0e-9d6b-6f2f8b1c0e03"
SUCCESSOR = "3c5d0a51-7b0e-4f0e-9d6b-6f2f8b1c0e04"
CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
# Opens its nodes and does not end when it is told to.
STUBBORN = (
    "trap '' TERM; exec 3<>/dev/tenstorrent/0 4<>/dev/tenstorrent/1; while :; do sleep 1; done"
)
# Tells who has a node of its own open, and so once more when it has opened that itself.
LOOK = """
cat /proc/driver/tenstorrent/0/pids > /tmp/before
exec 3<>/dev/tenstorrent/0
cat /proc/driver/tenstorrent/0/pids > /tmp/after
trap exit TERM
while :; do sleep 1; done
"""
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


def run_pod(name: str, uid: str, processor: Mapping[str, str]) -> None:
    """Give the kubelet a static pod: one container with a device, one without.

    Both also see the host's nodes, in /host.
    """
    shared = {
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "volumeMounts": [{"name": "host", "mountPath": "/host"}],
    }
    containers: list[JSON] = [
        {"name": "main", "resources": {"limits": {RESOURCE: "1", **processor}}},
        {"name": "without", "resources": {"limits": {**processor}}},
    ]
    volumes = [{"name": "host", "hostPath": {"path": "/dev/tenstorrent"}}]
    containers = [shared | container for container in containers]
    put_manifest(name, uid, {"containers": containers, "volumes": volumes})


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


def cgroups_with(part: str) -> list[Path]:
    """Return the cgroups that have a part in their name."""
    return sorted(Path(path) for path, _, _ in os.walk(CGROUPS) if part in os.path.basename(path))


class Container:
    """A running container."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        [self.cgroup] = cgroups_with(identity)
        self.process = (self.cgroup / "cgroup.procs").read_text().split()[0]
        self._root = Path(f"/proc/{self.process}/root")
        self.in_cgroup = Path(f"/proc/{self.process}/cgroup").read_text()

    def read(self, path: str) -> str:
        """Return what a file in it says; nothing while it is not there."""
        file = self._root / path.lstrip("/")
        return file.read_text() if file.exists() else ""

    @property
    def nodes(self) -> list[str]:
        """The card's nodes in it."""
        return sorted(path.name for path in self._root.glob("dev/tenstorrent/*"))

    def attempts(self, numbers: Sequence[str]) -> dict[str, str]:
        """Let it open the nodes that it sees, and ones that it makes for these numbers.

        Returns by path or number "opened", or why not.
        """
        answers = self._root / "tmp/answers"
        script = f"exec > /tmp/answers 2>&1\n{ATTEMPTS}"
        enter = ["ctr", "--namespace", "k8s.io", "tasks", "exec", "--exec-id", next(_names)]
        subprocess.run([*enter, self._identity, "sh", "-c", script, "sh", *numbers], check=True)
        return dict(line.split("=", 1) for line in answers.read_text().splitlines())

    def programs(self) -> list[JSON]:
        """Return the programs that the kernel asks when a process in its cgroup opens a device."""
        listed: list[JSON] = json.loads(shell(f"bpftool --json cgroup show {self.cgroup}") or "[]")
        return [program for program in listed if "device" in program["attach_type"]]

    def without_programs(self, numbers: Sequence[str]) -> dict[str, str]:
        """Take the programs away, let it try again, and put them back."""
        taken = [f"{program['attach_type']} id {program['id']}" for program in self.programs()]
        for program in taken:
            # A file keeps it: a program is gone when it is attached to nothing.
            name = program.replace(" ", "-")
            shell(f"bpftool prog pin {program.split(' ', 1)[1]} /sys/fs/bpf/{name}")
            shell(f"bpftool cgroup detach {self.cgroup} {program}")
        found = self.attempts(numbers)
        for program in taken:
            shell(f"bpftool cgroup attach {self.cgroup} {program} multi")
        return found


_names = (f"attempts-{number}" for number in itertools.count())


def look_at(name: str, ids: Mapping[str, str], numbers: Sequence[str]) -> JSON:
    """Return what there is to be seen of a pod's containers."""
    cgroups = cgroups_with_uid(UIDS[name])
    found: JSON = {"uid": UIDS[name], "cgroup": [str(path) for path in cgroups]}
    for container, identity in ids.items():
        seen = Container(identity)
        found[container] = {
            "id": identity,
            "cgroup": str(seen.cgroup),
            "in cgroup": seen.in_cgroup,
            "nodes": seen.nodes,
            "programs": seen.programs(),
            "attempts": seen.attempts(numbers),
        }
    return found


def cgroups_with_uid(uid: str) -> list[Path]:
    """Return the cgroups that have a pod's UID in their name, as either driver writes it."""
    return [*cgroups_with(uid), *cgroups_with(uid.replace("-", "_"))]


def holders() -> dict[str, list[str]]:
    """Return who has which chip, by number of its node, as `list` shows it."""
    rows = json.loads(shell("tt-device-plugin list --json"))
    found = {}
    for row in rows:
        found[row["path"]] = [f"{pod['namespace']}/{pod['pod']}" for pod in row["pods"] or ()]
    return found


def try_driver(driver: str) -> JSON:
    """Run the pods with cgroups of this driver, and return what is to be seen of them."""
    configure(driver)
    found: JSON = {}
    found["status"] = status_with(f"2 × {RESOURCE}, 2 healthy", "registered with kubelet")
    nodes = {path: os.stat(path) for path in sorted(glob.glob("/dev/tenstorrent/[0-9]*"))}
    numbers = [f"{os.major(node.st_rdev)}:{os.minor(node.st_rdev)}" for node in nodes.values()]
    found["nodes"] = {path: f"{stat.S_IMODE(node.st_mode):o}" for path, node in nodes.items()}
    found["numbers"] = dict(zip(nodes, numbers, strict=True))
    nobody = "setpriv --reuid=65534 --clear-groups"
    found["outside"] = [shell(f"{nobody} sh -c ': <> {path}' && echo opened") for path in nodes]
    run_pod("besteffort", UIDS["besteffort"], {})
    run_pod("guaranteed", UIDS["guaranteed"], {"cpu": "500m", "memory": "64Mi"})
    for name in UIDS:
        ids = wait_running(name)
        found[name] = look_at(name, ids, [*numbers, SERIAL_PORT])
    found["holders"] = holders()
    found["without programs"] = Container(ids["without"]).without_programs(numbers)
    found["with them again"] = Container(ids["without"]).attempts(numbers)
    withdraw(**UIDS)
    found["holders in the end"] = last_holders()
    return found


def withdraw(**uids: str) -> None:
    """Take pods away, and wait until nothing is left of them."""
    for name in uids:
        (MANIFESTS / f"{name}.json").unlink()
    wait_for(
        lambda: not any(map(cgroups_with_uid, uids.values())),
        lambda: f"the pods' cgroups to go; there are {[*map(cgroups_with_uid, uids.values())]}",
    )


def last_holders() -> dict[str, list[str]]:
    """Return who has which chip when no pod is left; `list` has half a minute to notice that."""
    with contextlib.suppress(Broken):
        wait_until(lambda: not any(holders().values()), seconds=30)
    return holders()


def hand_over() -> JSON:
    """Take a pod away that does not end, and let another one have its devices.

    The latter tells who had one of them open when it was started: a line for each opening.
    """
    found: JSON = {"given too early": False}
    main: JSON = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never"}
    main["resources"] = {"limits": {RESOURCE: "2"}}
    stubborn = main | {"command": ["sh", "-c", STUBBORN]}
    spec = {"containers": [stubborn], "terminationGracePeriodSeconds": GRACE}
    put_manifest("predecessor", PREDECESSOR, spec)
    process = Container(wait_running("predecessor")["main"]).process
    (MANIFESTS / "predecessor.json").unlink()
    wait_for(lambda: "predecessor" not in pods(), "the kubelet to have no such pod any longer")
    put_manifest("successor", SUCCESSOR, {"containers": [main | {"command": ["sh", "-c", LOOK]}]})

    def has_ended() -> bool:
        has_it_open = process in Path("/proc/driver/tenstorrent/0/pids").read_text().split()
        found["given too early"] |= has_it_open and SUCCESSOR in CHECKPOINT.read_text()
        return not has_it_open

    wait_for(has_ended, "the predecessor to end")
    successor = Container(wait_running("successor")["main"])
    later = wait_for(lambda: successor.read("/tmp/after"), "the successor to look")
    found["open later"] = later.split()
    found["open at its start"] = successor.read("/tmp/before").split()
    found["journal"] = shell("journalctl --identifier=tt-device-plugin --output=cat").splitlines()
    withdraw(successor=SUCCESSOR)
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

for name in DRIVERS:
    with step(name) as seen:
        seen |= try_driver(name)

with step("handed over") as seen:
    seen |= hand_over()
