"""Runs on the node with cgroup v2: what pods with devices go through, one step after the other.

See steps.py for what it prints, and guestnode.py for the node. Its arguments are the driver of the
cgroups, cgroupfs or systemd, and what the runtime can do besides, of `cdi` and `users`.
"""

from __future__ import annotations

import platform
import signal
import sys
import time
from pathlib import Path

from tests.e2e.guestnode import (
    CGROUPS,
    CHECKPOINT,
    RESOURCE,
    GuestNode,
    Pod,
    Process,
    cdi_numbers,
    cgroup_of,
    chip_of,
    device_numbers,
    is_own_file,
    swap,
    waits,
)
from tests.e2e.steps import JSON, UNIT, shell, status_with, step, wait_for

driver, *abilities = sys.argv[1:]
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
# Opens and closes its devices again and again, and does not end when it is told to.
SOMETIMES = (
    "trap '' TERM; while :; do exec 3<>/dev/tenstorrent/0; sleep 1; exec 3>&-; sleep 1; done"
)
GRACE = 15  # seconds that the kubelet waits before it kills a pod
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
    """Write the daemon's configuration, and let it take effect.

    Not by systemctl reload, which also checks the file, in another process.
    """
    CONFIG.write_text(config)
    shell(f"systemctl kill --signal=HUP {UNIT}")


def free_pages() -> int:
    return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())


def hand_over(node: GuestNode, last: list[Pod]) -> JSON:
    """Let one pod after another have all chips: after a job's end, and after a deletion."""
    job = node.started("job", ALL, once=True)
    node.wait_output(job, "opened")
    Process(node.wait_running(job)[0]).signal(signal.SIGUSR1)
    wait_for(lambda: node.status(job).get("phase") == "Succeeded", lambda: node.why(job))
    second = node.started("after-the-job", ALL)
    node.delete(second)
    last.append(node.started("after-the-deletion", ALL))
    return {"waits": waits(), "opened": node.next_output(last)}


def forced(node: GuestNode, last: list[Pod]) -> JSON:
    """Delete a pod by force that does not end, and let another one have its chips."""
    node.delete(last.pop())
    first = node.started("predecessor", ALL, script=SOMETIMES, grace=GRACE)
    predecessor = Process(node.wait_running(first)[0])
    found: JSON = {"cgroup": predecessor.cgroup, "given too early": False, "last seen": 0.0}
    node.force_delete(first)
    second = node.create("successor", ALL)

    def has_ended() -> bool:
        if predecessor.exists:
            found["last seen"] = time.monotonic()
            found["given too early"] |= second.uid in CHECKPOINT.read_text()
        return not predecessor.exists

    wait_for(has_ended, "the predecessor to end")
    successor = Process(node.wait_running(second)[0])
    found["later"] = round(successor.started_at - found["last seen"], 2)
    found["waits"] = waits()
    last.append(second)
    return found


def crash_loop(node: GuestNode, last: list[Pod]) -> JSON:
    """Kill a container twice: it starts in place, and does not wait for its own pod."""
    [pod] = last
    before = waits()
    [container] = node.wait_running(pod)
    for _ in range(2):
        Process(container).signal(signal.SIGKILL)
        container = node.wait_restarted(pod, container)
    node.next_output([pod])
    [state] = node.status(pod)["containerStatuses"]
    node.delete(last.pop())
    return {"restarts": state["restartCount"], "waits": waits() - before}


def both_killed(node: GuestNode, pods: list[Pod]) -> JSON:
    """Kill kubelet and daemon together. The pods' containers run on, and go on to open devices."""
    before = node.wait_running(*pods)
    shell(f"systemctl kill --signal=KILL kubelet {UNIT}")
    started = "systemctl show --value -p ActiveEnterTimestampMonotonic"
    wait_for(lambda: shell(f"systemctl is-active kubelet {UNIT}") == "active\nactive", "both")
    node.wait_registered()
    # A pod that the kubelet has admitted again is reported again; one that it kills, too.
    probe = node.started("after-both", {})
    node.delete(probe)
    opened = node.next_output(pods)
    ready, kubelet = (int(shell(f"{started} {unit}")) for unit in (UNIT, "kubelet"))
    return {
        "same": node.wait_running(*pods) == before,
        "opened": opened,
        "daemon before kubelet": round((kubelet - ready) / 1e6, 2),
    }


def reload(node: GuestNode, pods: list[Pod]) -> JSON:
    """Reload systemd, alone and by the installation of the package again."""
    before = node.wait_running(*pods)
    found: JSON = {}
    for name, command in (
        ("daemon-reload", "systemctl daemon-reload"),
        ("daemon-reexec", "systemctl daemon-reexec"),
        ("installed again", "dpkg --install /srv/package.deb"),
    ):
        status = shell(f"{command} >/dev/null 2>&1; echo $?")
        found[name] = {"status": status, "opened": node.next_output(pods)}
    found["same"] = node.wait_running(*pods) == before
    return found


def lost_checkpoint(node: GuestNode, pods: list[Pod]) -> JSON:
    """Start the kubelet without its checkpoint: no pod is killed, and their chips are avoided."""
    before = node.wait_running(*pods)
    node.restart_kubelet(CHECKPOINT.unlink)
    node.wait_registered()
    theirs = [chip_of(node.output(pod)) for pod in pods]
    others = [node.started(f"free-{number}", ONE) for number in range(EXCLUSIVE - len(pods))]
    given = [chip_of(node.wait_output(pod, "opened")) for pod in others]
    found: JSON = {"theirs": theirs, "given": given, "same": node.wait_running(*pods) == before}
    found["opened"] = node.next_output(pods)
    for pod in (*others, *pods):
        node.api.delete_pod(pod.name, grace=1)
    for pod in (*others, *pods):
        wait_for(lambda pod=pod: cgroup_of(pod) is None, f"the end of {pod.name}")  # type: ignore[misc]
    return found


def locks(node: GuestNode, name: str, *, own_users: bool) -> JSON:
    """Let one container take a lock of a shared chip's, and another one look for it."""
    one = node.started(f"{name}-lock", {HALF: "1"}, then=TAKE)
    node.wait_output(one, "locked")
    other = node.started(f"{name}-try", {HALF: "1"}, then=TRY, own_users=own_users)
    output = node.wait_output(other, "opened")
    chips = {chip_of(node.output(pod)) for pod in (one, other)}
    node.api.delete_pod(one.name, grace=1)
    node.api.delete_pod(other.name, grace=1)
    return {"chips": sorted(chips), "taken": "taken" in output, "output": output[:8]}


def users(node: GuestNode, pod: Pod) -> JSON:
    """Look into a pod with a user namespace of its own."""
    output = node.wait_output(pod, "opened")
    process = Process(node.wait_running(pod)[0])
    uids = Path(f"/proc/{process.pid}/uid_map").read_text().split()
    return {"uid map": uids, "output": output[:8], "own file": is_own_file(output)}


def renumbered(node: GuestNode, pods: list[Pod]) -> JSON:
    """Let two pods' chips exchange their numbers, and let the containers start again."""
    before = node.wait_running(*pods)
    [one, other] = [chip_of(node.output(pod)) for pod in pods]
    swap(one, other)
    wait_for(lambda: cdi_numbers() == device_numbers(), "the CDI file to follow")
    found: JSON = {"numbers": device_numbers()}
    for pod, container in zip(pods, before, strict=True):
        Process(container).signal(signal.SIGKILL)
        found[pod.name] = {}
    for pod, container in zip(pods, before, strict=True):
        restarted = wait_for(
            lambda pod=pod, container=container: restarted_or_failed(node, pod, container),  # type: ignore[misc]
            lambda pod=pod: node.why(pod),  # type: ignore[misc]
        )
        found[pod.name]["restarted"] = restarted
        if restarted == "running":
            lines = node.next_output([pod])[pod.name]
            found[pod.name] |= {"lines": lines, "own file": is_own_file(node.output(pod))}
    return found


def restarted_or_failed(node: GuestNode, pod: Pod, former: str) -> str | None:
    """Return "running" if another container than this one runs, or why none can be made."""
    for state in node.status(pod).get("containerStatuses") or ():
        identity = str(state.get("containerID")).rpartition("/")[2]
        if "running" in state["state"] and identity != former:
            return "running"
        for kind in ("state", "lastState"):
            for described in state.get(kind, {}).values():
                if described.get("reason") in ("RunContainerError", "StartError"):
                    return str(described.get("message"))
    return None


def private_pages(node: GuestNode) -> JSON:
    """Have two pods with a page each, then kill one, with and without a successor."""
    root = PAGES / "tt-device-plugin"
    found: JSON = {"directories": {str(root): _mode(root)}, "free": [free_pages()]}
    for directory in sorted(root.iterdir()):
        found["directories"][directory.name] = _mode(directory)

    kinds: dict[str, JSON] = {"root": {}, "user": {"user": 1000}}
    if "users" in abilities:
        kinds["own users"] = {"own_users": True}
    pods = {
        name: node.create(
            f"pages-{name.replace(' ', '-')}", WITH_PAGE, then=PAGE, stubborn=True, **kind
        )
        for name, kind in kinds.items()
    }
    node.wait_running(*pods.values())
    for name, pod in pods.items():
        found[name] = node.wait_output(pod, "page is mapped")[:10]
        container = Process(node.wait_running(pod)[0])
        inside = Path(f"/proc/{container.pid}/root{PAGES}")
        found[f"files of {name}"] = sorted(path.name for path in inside.iterdir())
    found["free"].append(free_pages())

    # One ends without a successor, the other one's container is killed and starts in place.
    [killed] = node.wait_running(pods["user"])
    Process(killed).signal(signal.SIGKILL)
    node.wait_restarted(pods["user"], killed)
    found["restarted"] = node.wait_output(pods["user"], "dirty page")[-8:]
    node.force_delete(pods["root"])
    wait_for(lambda: cgroup_of(pods["root"]) is None, "the end of the pod with a page")
    ended = time.monotonic()
    left = found["free"][0] - len(pods) + 1
    wait_for(lambda: free_pages() == left, lambda: f"{free_pages()} free pages, not {left}")
    found["back after"] = round(time.monotonic() - ended, 1)

    # And one that is killed with its page mapped has a successor with the same chip.
    chip = chip_of(node.output(pods["user"]))
    free = EXCLUSIVE - (len(pods) - 1)
    fillers = [node.started(f"filler-{number}", ONE) for number in range(free)]
    node.force_delete(pods["user"])
    successor = node.started("pages-successor", WITH_PAGE, then=PAGE, user=2000)
    found["successor"] = node.wait_output(successor, "page is mapped")[:10]
    found["same chip"] = chip_of(node.output(successor)) == chip
    rest = [pod for name, pod in pods.items() if name not in ("root", "user")]
    for pod in (*fillers, *rest, successor):
        node.api.delete_pod(pod.name, grace=1)
    wait_for(lambda: cgroup_of(successor) is None, "the end of the successor")
    wait_for(lambda: free_pages() == found["free"][0], lambda: f"{free_pages()} free pages")
    return found


def _mode(path: Path) -> str:
    status = path.stat()
    return f"{status.st_mode & 0o7777:o} {status.st_uid}:{status.st_gid}"


def main() -> None:
    with step("boot") as seen:
        seen["kernel"] = platform.release()
        seen["cgroup"] = shell("stat --file-system --format=%T /sys/fs/cgroup")
        seen["controllers"] = (CGROUPS / "cgroup.controllers").read_text().split()
        mounts = Path("/proc/mounts").read_text().splitlines()
        seen["version 1"] = [line for line in mounts if line.split()[2] == "cgroup"]
        seen["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        for program in ("systemctl", "containerd", "runc", "kubelet", "tt-device-plugin"):
            seen[program] = shell(f"{program} --version").splitlines()[0]

    node = GuestNode(driver)
    with step("node") as seen:
        configure(SHARING)
        node.start()
        seen["status"] = status_with(f"{EXCLUSIVE} × {RESOURCE}", f"1 × {HALF}", "registered")

    last: list[Pod] = []
    for act in (hand_over, forced, crash_loop):
        with step(act.__name__) as seen:
            seen |= act(node, last)

    with step("pods") as seen:
        init = node.create("init-and-main", ONE, init=True)
        plain = node.create("plain", ONE)
        pods = [init, plain]
        if "users" in abilities:
            pods.append(node.create("own-users", ONE, own_users=True))
        node.wait_running(*pods)
        seen["opened"] = node.next_output(pods)
        seen["own files"] = [is_own_file(node.output(pod)) for pod in pods]
    if "users" in abilities:
        with step("users") as seen:
            seen |= users(node, pods[-1])
    with step("locks") as seen:
        seen |= locks(node, "files", own_users="users" in abilities)
    for do in (both_killed, reload, lost_checkpoint):
        with step(do.__name__) as seen:
            seen |= do(node, pods)

    with step("pages") as seen:
        seen["private"] = "--hugepages" in shell("tt-device-plugin run --help")
        if seen["private"]:
            seen |= private_pages(node)

    if "users" in abilities:
        with step("renumbered") as seen:
            pods = [node.create("files", ONE), node.create("files-own-users", ONE, own_users=True)]
            node.wait_running(*pods)
            node.next_output(pods)
            seen |= renumbered(node, pods)
            for pod in pods:
                node.api.delete_pod(pod.name, grace=1)
    if "cdi" in abilities:
        with step("cdi") as seen:
            configure(f'device_list_strategy = "cdi"\n{SHARING}')
            pods = [node.create("cdi", ONE)]
            if "users" in abilities:
                pods.append(node.create("cdi-own-users", ONE, own_users=True))
            node.wait_running(*pods)
            seen["opened"] = node.next_output(pods)
            seen["own files"] = [is_own_file(node.output(pod)) for pod in pods]
        with step("cdi reload") as seen:
            seen |= reload(node, pods)
        with step("cdi locks") as seen:
            seen |= locks(node, "cdi", own_users="users" in abilities)
        if "users" in abilities:
            with step("cdi users") as seen:
                seen |= users(node, pods[-1])
            with step("cdi renumbered") as seen:
                seen |= renumbered(node, pods)


if __name__ == "__main__":
    main()
