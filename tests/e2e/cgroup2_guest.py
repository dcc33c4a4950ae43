"""Runs on the node with cgroup v2: what pods with devices go through, one step after the other.

See steps.py for what it prints, and guestnode.py for the node. Its arguments are those of main().
"""

from __future__ import annotations

import platform
import signal
import sys
import time
from functools import partial
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
    last.append(node.started("after-the-deletion", ALL, stubborn=True, grace=GRACE))
    return {"waits": waits(), "opened": node.next_output(last)}


def forced(node: GuestNode, last: list[Pod]) -> JSON:
    """Delete that pod by force, which does not end, and let another one have its chips."""
    first = last.pop()
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
    pod = last.pop()
    before = waits()
    [container] = node.wait_running(pod)
    for _ in range(2):
        Process(container).signal(signal.SIGKILL)
        container = node.wait_restarted(pod, container)
    node.next_output([pod])
    [state] = node.status(pod)["containerStatuses"]
    node.delete(pod)
    return {"restarts": state["restartCount"], "waits": waits() - before}


def given(node: GuestNode, *pods: Pod) -> JSON:
    """Wait until pods run, and look what their containers were given, and whether it opens."""
    node.wait_running(*pods)
    opened = node.next_output(pods)
    own = {pod.name: is_own_file(node.output(pod)) for pod in pods}
    return {"own files": own, "opened": opened, "output": node.output(pods[-1])[:8]}


def both_killed(node: GuestNode, pods: list[Pod]) -> JSON:
    """Kill kubelet and daemon together. The pods' containers run on, and go on to open devices."""
    before = node.wait_running(*pods)
    with node.restarted_kubelet():
        former = CHECKPOINT.stat().st_mtime_ns
        shell(f"systemctl kill --signal=KILL kubelet {UNIT}")
        wait_for(lambda: shell(f"systemctl is-active kubelet {UNIT}") == "active\nactive", "both")
        wait_for(lambda: CHECKPOINT.stat().st_mtime_ns > former, "the kubelet to write its list")

    # The kubelet has judged all pods of before when a new one runs.
    probe = node.started("after-both", {})
    node.api.delete_pod(probe.name, grace=1)
    started = "systemctl show --value -p ActiveEnterTimestampMonotonic"
    ready, kubelet = (int(shell(f"{started} {unit}")) for unit in (UNIT, "kubelet"))
    return {
        "opened": node.next_output(pods),
        "same": node.wait_running(*pods) == before,
        "daemon before kubelet": round((kubelet - ready) / 1e6, 2),
    }


def reload(node: GuestNode, pods: list[Pod]) -> JSON:
    """Reload systemd, alone and by the installation of the package again."""
    before = node.wait_running(*pods)
    found: JSON = {}
    for name, command in (
        ("daemon-reload", "systemctl daemon-reload"),
        ("daemon-reexec", "systemctl daemon-reexec"),
        ("installed again", "dpkg --install --force-unsafe-io /srv/package.deb"),
    ):
        status = shell(f"{command} >/dev/null 2>&1; echo $?")
        found[name] = {"status": status, "opened": node.next_output(pods)}
    found["same"] = node.wait_running(*pods) == before
    return found


def lost_checkpoint(node: GuestNode, pods: list[Pod]) -> JSON:
    """Start the kubelet without its checkpoint: no pod is killed, and their chips are avoided."""
    before = node.wait_running(*pods)
    with node.restarted_kubelet():
        shell("systemctl kill --signal=KILL kubelet; systemctl stop kubelet")
        CHECKPOINT.unlink()
        shell("systemctl start kubelet")
    # One only: the kubelet may have given another chip to the init container of before.
    other = node.create("after-the-loss", ONE)
    found: JSON = {"theirs": [chip_of(node.output(pod)) for pod in pods]}
    found["given"] = chip_of(node.wait_output(other, "opened"))
    found["opened"] = node.next_output(pods)
    found["same"] = node.wait_running(*pods) == before
    node.remove(other, *pods)
    return found


def locks(node: GuestNode, name: str, *, own_users: bool) -> JSON:
    """Let one container take a lock of a shared chip's, and another one look for it."""
    one = node.started(f"{name}-lock", {HALF: "1"}, then=TAKE)
    node.wait_output(one, "locked")
    other = node.started(f"{name}-try", {HALF: "1"}, then=TRY, own_users=own_users)
    output = node.wait_output(other, "opened")
    chips = {chip_of(node.output(pod)) for pod in (one, other)}
    node.remove(one, other)
    return {"chips": sorted(chips), "taken": "taken" in output, "output": output[:8]}


def users(node: GuestNode, pod: Pod) -> JSON:
    """Return which users a pod with a user namespace of its own has."""
    process = Process(node.wait_running(pod)[0])
    return {"uid map": Path(f"/proc/{process.pid}/uid_map").read_text().split()}


def renumbered(node: GuestNode, pods: list[Pod]) -> JSON:
    """Let two pods' chips exchange their numbers, and let the containers start again."""
    before = node.wait_running(*pods)
    [one, other] = [chip_of(node.output(pod)) for pod in pods]
    swap(one, other)
    wait_for(lambda: cdi_numbers() == device_numbers(), "the CDI file to follow")
    for container in before:
        Process(container).signal(signal.SIGKILL)

    found = []
    for pod, container in zip(pods, before, strict=True):
        restarted = wait_for(
            partial(restarted_or_failed, node, pod, container), partial(node.why, pod)
        )
        seen: JSON = {"pod": pod.name, "restarted": restarted}
        if restarted == "running":
            lines = node.next_output([pod])[pod.name]
            seen |= {"lines": lines, "own file": is_own_file(node.output(pod))}
        found.append(seen)
    return {"numbers": device_numbers(), "pods": found}


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


def private_pages(node: GuestNode, *, has_users: bool) -> JSON:
    """Have two pods with a page each, then kill one, with and without a successor."""
    root = PAGES / "tt-device-plugin"
    found: JSON = {"directories": {str(root): _mode(root)}, "free": [free_pages()]}
    for directory in sorted(root.iterdir()):
        found["directories"][directory.name] = _mode(directory)

    kinds: dict[str, JSON] = {"root": {}, "user": {"user": 1000}}
    if has_users:
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
    fillers = [node.create(f"filler-{number}", ONE) for number in range(free)]
    node.wait_running(*fillers)
    node.force_delete(pods["user"])
    successor = node.started("pages-successor", WITH_PAGE, then=PAGE, user=2000)
    found["successor"] = node.wait_output(successor, "page is mapped")[:10]
    found["same chip"] = chip_of(node.output(successor)) == chip
    rest = [pod for name, pod in pods.items() if name not in ("root", "user")]
    node.remove(*fillers, *rest, successor)
    wait_for(lambda: free_pages() == found["free"][0], lambda: f"{free_pages()} free pages")
    return found


def closed_pages(node: GuestNode) -> JSON:
    """Let a container's root close its directory, with a page in it, and see who has it next."""
    root = PAGES / "tt-device-plugin"
    close = f"{PAGE}\nchown 4711 {PAGES}; chmod 700 {PAGES}; echo closed"
    first = node.started("closes", WITH_PAGE, then=close)
    chip = chip_of(node.wait_output(first, "closed"))
    found: JSON = {"before": {each.name: _mode(each) for each in root.iterdir()}, "chip": chip}
    node.remove(first)
    wait_for(lambda: _mode(root / chip) == "777 0:0", lambda: f"a new one: {_mode(root / chip)}")
    found["after"] = {each.name: _mode(each) for each in root.iterdir()}
    found["check"] = shell("tt-device-plugin check --quiet").splitlines()

    # All chips are free, so the next pod gets the one with the lowest address, as the first did.
    second = node.create("after-closed", WITH_PAGE, then=PAGE)
    output = node.wait_output(second, "page is mapped")
    found |= {"next chip": chip_of(output), "next": output[:10]}
    node.remove(second)
    return found


def _mode(path: Path) -> str:
    """Return a directory's mode and owner; nothing while there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ""
    return f"{status.st_mode & 0o7777:o} {status.st_uid}:{status.st_gid}"


def main(driver: str, abilities: list[str]) -> None:
    """Go through all; `driver`: of the cgroups; `abilities`: of "cdi" and "users"."""
    has_users, has_cdi = ("users" in abilities, "cdi" in abilities)
    with step("boot") as seen:
        seen["kernel"] = platform.release()
        seen["cgroup"] = shell("stat --file-system --format=%T /sys/fs/cgroup")
        seen["controllers"] = (CGROUPS / "cgroup.controllers").read_text().split()
        mounts = Path("/proc/mounts").read_text().splitlines()
        seen["version 1"] = [line for line in mounts if line.split()[2] == "cgroup"]
        seen["failed units"] = shell("systemctl list-units --failed --no-legend --plain")
        for program in ("systemctl", "containerd", "runc", "kubelet"):
            seen[program] = shell(f"{program} --version").splitlines()[0]
        seen[UNIT] = shell(f"dpkg-query --show {UNIT}")

    node = GuestNode(driver)
    with step("node") as seen:
        configure(SHARING)
        node.start()
        seen["status"] = status_with(f"{EXCLUSIVE} × {RESOURCE}", f"1 × {HALF}", "registered")

    last: list[Pod] = []
    for act in (hand_over, forced, crash_loop):
        with step(act.__name__) as seen:
            seen |= act(node, last)

    # With device files.
    files = [node.create("init-and-main", ONE, init=True)]
    files.append(node.create("other", ONE, own_users=has_users))
    with step("files") as seen:
        seen |= given(node, *files)
        if has_users:
            seen |= users(node, files[-1])
    with step("files locks") as seen:
        seen |= locks(node, "files", own_users=has_users)
    with step("both_killed") as seen:
        seen |= both_killed(node, files)

    # By their CDI names, beside those.
    by_name: list[Pod] = []
    if has_cdi:
        configure(f'device_list_strategy = "cdi"\n{SHARING}')
        by_name = [node.create("cdi", ONE), node.create("cdi-other", ONE, own_users=has_users)]
        with step("cdi") as seen:
            seen |= given(node, *by_name)
            if has_users:
                seen |= users(node, by_name[-1])
        with step("cdi locks") as seen:
            seen |= locks(node, "cdi", own_users=has_users)

    with step("reload") as seen:
        seen |= reload(node, files + by_name)
    with step("files renumbered") as seen:
        seen |= renumbered(node, files)
    if has_cdi:
        with step("cdi renumbered") as seen:
            seen |= renumbered(node, by_name)
    if has_users:  # that one has no device file any longer
        node.remove(files.pop())
    with step("lost_checkpoint") as seen:
        seen |= lost_checkpoint(node, files + by_name)

    with step("pages") as seen:
        seen["private"] = "--hugepages" in shell("tt-device-plugin run --help")
        if seen["private"]:
            configure(SHARING)
            seen |= private_pages(node, has_users=has_users)
    if seen["private"]:
        with step("closed pages") as seen:
            seen |= closed_pages(node)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
