"""Runs on the node with cgroup v2: what pods with devices go through, one step after the other.

guestnode.py has the node.
"""

from __future__ import annotations

import platform
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.e2e.guestnode import (
    CGROUPS,
    CHECKPOINT,
    RESOURCE,
    GuestNode,
    GuestPod,
    cdi_numbers,
    chip_of,
    device_numbers,
    is_own_file,
    logged,
    next_attempts,
    swap,
    waits,
)
from tests.e2e.steps import JSON, UNIT, shell, status_with, step, wait_for

CONFIG = Path("/etc/tt-device-plugin/config.toml")
# Two of the chip with the highest address; the others are given to one pod at a time.
SHARED_CHIP = "0000:00:15.0"
HALF = "tenstorrent.com/n150-half"
SHARING = f"""
[sharing]
lock_dir = "/run/ttdp/shm"
[[sharing.resources]]
name = "n150"
devices = ["{SHARED_CHIP}"]
replicas = 2
rename = "n150-half"
"""
EXCLUSIVE = 5
ONE = {RESOURCE: "1"}
ALL = {RESOURCE: str(EXCLUSIVE)}
GRACE = 1200  # seconds that the kubelet waits before it kills a pod: `forced` does it before
# A container's part in taking turns on a chip, and what another one then sees.
LOCK = "/dev/shm/TT_UMD_LOCK.CHIP_IN_USE_0_PCIe"
TAKE = f"like_umd lock {LOCK} &"
TRY = f"like_umd trylock {LOCK}"
PAGES = Path("/dev/hugepages")
WITH_PAGE = ONE | {"hugepages-2Mi": "4Mi", "memory": "64Mi"}
# Files before the page is mapped, and of whom; then the page. It runs on without the page if that
# cannot be had, and tells so.
PAGE = """
echo "files: $(ls -A /dev/hugepages | tr '\\n' ' ')"
like_umd page /dev/hugepages/tenstorrent &
"""


def configure(config: str) -> None:
    """Write the daemon's configuration, and wait until it has taken effect.

    Not by systemctl reload, which also checks the file, in another process.
    """
    before = logged("configuration reloaded")
    CONFIG.write_text(config)
    shell(f"systemctl kill --signal=HUP {UNIT}")
    wait_for(lambda: logged("configuration reloaded") > before, "the reload")


def free_pages() -> int:
    return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())


def hand_over(node: GuestNode, last: list[GuestPod]) -> JSON:
    """Let one pod after another have all chips: after a job's end, and after a deletion."""
    job = node.started("job", ALL, once=True)
    job.wait_output("opened")
    job.process().signal(signal.SIGUSR1)
    job.wait_finished()

    second = node.started("after-the-job", ALL)
    second.delete()
    second.wait_deleted()
    last.append(node.started("after-the-deletion", ALL, stubborn=True, grace=GRACE))
    return {"waits": waits(), "opened": next_attempts(*last)}


def forced(node: GuestNode, last: list[GuestPod]) -> JSON:
    """Delete that pod by force, and let another one have its chips: then the first one ends."""
    first = last.pop()
    predecessor, before = first.process(), waits()

    first.force_delete()
    second = node.create("successor", ALL)
    wait_for(lambda: second.uid in CHECKPOINT.read_text() and waits() > before, second.why)
    found: JSON = {"cgroup": predecessor.cgroup, "given too early": predecessor.exists}

    ended = time.monotonic()
    predecessor.signal(signal.SIGKILL)
    found["later"] = round(second.process().started_at - ended, 2)
    last.append(second)
    return found


def crash_loop(node: GuestNode, last: list[GuestPod]) -> JSON:
    """Kill a container twice: it starts in place, and does not wait for its own pod."""
    pod = last.pop()
    before = waits()
    for _ in range(2):
        pod.kill()
        pod.wait_running()

    next_attempts(pod)
    [state] = pod.status["containerStatuses"]
    pod.delete()
    pod.wait_deleted()
    return {"restarts": state["restartCount"], "waits": waits() - before}


def given(*pods: GuestPod) -> JSON:
    """Wait until pods run, and look what their containers were given, and whether it opens."""
    for pod in pods:
        pod.wait_running()

    opened = next_attempts(*pods)
    own = {pod.name: is_own_file(pod.output()) for pod in pods}
    return {"own files": own, "opened": opened, "output": pods[-1].output()[:8]}


def containers(pods: Sequence[GuestPod]) -> list[dict[str, str]]:
    """Wait until pods run; return their containers' IDs, which are others after a restart."""
    for pod in pods:
        pod.wait_running()
    return [pod.containers() for pod in pods]


def both_killed(node: GuestNode, pods: list[GuestPod]) -> JSON:
    """Kill kubelet and daemon together. The pods' containers run on, and go on to open devices."""
    before = containers(pods)
    with node.restarted_kubelet():
        former = CHECKPOINT.stat().st_mtime_ns
        shell(f"systemctl kill --signal=KILL kubelet {UNIT}")
        wait_for(lambda: shell(f"systemctl is-active kubelet {UNIT}") == "active\nactive", "both")
        wait_for(lambda: CHECKPOINT.stat().st_mtime_ns > former, "the kubelet to write its list")

    # The kubelet has judged all pods of before when a new one runs.
    probe = node.started("after-both", {})
    probe.delete()
    started = "systemctl show --value -p ActiveEnterTimestampMonotonic"
    ready, kubelet = (int(shell(f"{started} {unit}")) for unit in (UNIT, "kubelet"))
    return {
        "opened": next_attempts(*pods),
        "same": containers(pods) == before,
        "daemon before kubelet": round((kubelet - ready) / 1e6, 2),
    }


def reload(pods: Sequence[GuestPod]) -> JSON:
    """Reload systemd, alone and by the installation of the package again."""
    before = containers(pods)
    found: JSON = {}
    for name, command in (
        ("daemon-reload", "systemctl daemon-reload"),
        ("daemon-reexec", "systemctl daemon-reexec"),
        ("installed again", "dpkg --install --force-unsafe-io /srv/package.deb"),
    ):
        status = shell(f"{command} >/dev/null 2>&1; echo $?")
        found[name] = {"status": status, "opened": next_attempts(*pods)}
    found["same"] = containers(pods) == before
    return found


def locks(node: GuestNode, name: str) -> JSON:
    """Let one container take a lock of a shared chip's, and one with its own users look for it."""
    one = node.started(f"{name}-lock", {HALF: "1"}, then=TAKE)
    one.wait_output("locked")
    other = node.started(f"{name}-try", {HALF: "1"}, then=TRY, own_users=True)
    output = other.wait_output("opened")

    chips = {chip_of(pod.output()) for pod in (one, other)}
    node.remove(one, other)
    return {"chips": sorted(chips), "taken": "taken" in output, "output": output[:8]}


def users(pod: GuestPod) -> JSON:
    """Return which users a pod with a user namespace of its own has."""
    return {"uid map": Path(f"/proc/{pod.process().pid}/uid_map").read_text().split()}


def renumbered(pods: Sequence[GuestPod]) -> JSON:
    """Let two pods' chips exchange their numbers, and let the containers start again."""
    [one, other] = [chip_of(pod.output()) for pod in pods]
    swap(one, other)
    wait_for(lambda: cdi_numbers() == device_numbers(), "the CDI file to follow")
    for pod in pods:
        pod.kill()

    found = []
    for pod in pods:
        restarted = wait_for(partial(restarted_or_failed, pod), pod.why)
        seen: JSON = {"pod": pod.name, "restarted": restarted}
        if restarted == "running":
            lines = next_attempts(pod)[pod.name]
            seen |= {"lines": lines, "own file": is_own_file(pod.output())}
        found.append(seen)
    return {"numbers": device_numbers(), "pods": found}


def restarted_or_failed(pod: GuestPod) -> str | None:
    """Return "running" if another container than the killed one runs, or why none can be made."""
    if pod.is_running():
        return "running"
    for state in pod.status.get("containerStatuses") or ():
        for kind in ("state", "lastState"):
            for described in state.get(kind, {}).values():
                if described.get("reason") in ("RunContainerError", "StartError"):
                    return str(described.get("message"))
    return None


def private_pages(node: GuestNode) -> JSON:
    """Have three pods with a page each, of different users."""
    found: JSON = {"free": [free_pages()]}
    kinds: dict[str, JSON] = {"root": {}, "user": {"user": 1000}, "own users": {"own_users": True}}
    pods = {
        name: node.create(f"pages-{name.replace(' ', '-')}", WITH_PAGE, then=PAGE, **kind)
        for name, kind in kinds.items()
    }
    for name, pod in pods.items():
        found[name] = pod.wait_output("page is mapped")
        inside = Path(f"/proc/{pod.process().pid}/root{PAGES}")
        found[f"files of {name}"] = sorted(path.name for path in inside.iterdir())

    found["free"].append(free_pages())
    node.remove(*pods.values())
    return found


def main() -> None:
    with step("boot") as found:
        found["kernel"] = platform.release()
        found["cgroup"] = shell("stat --file-system --format=%T /sys/fs/cgroup")
        found["controllers"] = (CGROUPS / "cgroup.controllers").read_text().split()
        mounts = Path("/proc/mounts").read_text().splitlines()
        found["version 1"] = [line for line in mounts if line.split()[2] == "cgroup"]
        found["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        for program in ("systemctl", "containerd", "runc", "kubelet"):
            found[program] = shell(f"{program} --version").splitlines()[0]
        found[UNIT] = shell(f"dpkg-query --show {UNIT}")

    node = GuestNode()
    with step("node") as found:
        configure(SHARING)
        node.start()
        found["status"] = status_with(f"{EXCLUSIVE} × {RESOURCE}", f"1 × {HALF}", "registered")

    last: list[GuestPod] = []
    for act in (hand_over, forced, crash_loop):
        with step(act.__name__) as found:
            found |= act(node, last)

    # With device files.
    files = [node.create("init-and-main", ONE, init=True)]
    files.append(node.create("other", ONE, own_users=True))
    with step("files") as found:
        found |= given(*files)
        found |= users(files[-1])
    with step("files locks") as found:
        found |= locks(node, "files")
    with step("both_killed") as found:
        found |= both_killed(node, files)

    # By their CDI names, beside those.
    configure(f'device_list_strategy = "cdi"\n{SHARING}')
    by_name = [node.create("cdi", ONE), node.create("cdi-other", ONE, own_users=True)]
    with step("cdi") as found:
        found |= given(*by_name)
        found |= users(by_name[-1])
    with step("cdi locks") as found:
        found |= locks(node, "cdi")

    with step("reload") as found:
        found |= reload(files + by_name)
    with step("files renumbered") as found:
        found |= renumbered(files)
    with step("cdi renumbered") as found:
        found |= renumbered(by_name)

    with step("pages") as found:
        node.remove(*files, *by_name)
        configure(SHARING)
        found |= private_pages(node)


if __name__ == "__main__":
    main()
