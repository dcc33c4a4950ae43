"""Allocations count while there is evidence: responses, the checkpoint, processes in cgroups.

The clock is the test's. The rule is the table at the head of ALLOCATIONS in ttdp.py.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.chips import chip, decide
from ttdp import Allocation, AllocationRecord, AllocationTracker

UID = "0b6cd6e4-9fd5-4b5c-8d4e-4a3a5f6f2d61"
OTHER_UID = "5d1f7a52-0c3e-4f0b-9d55-3a1b2c4d5e6f"
N150 = "tenstorrent.com/n150"
A, B = "0000:01:00.0", "0000:02:00.0"
START = 1000.0
ENOUGH = 200  # seconds after which nothing counts without evidence
LASTS = 31  # seconds until evidence is too old, looking each second


def entry(chip: str = A, pod: str = UID, container: str = "main", **others: Any) -> dict[str, Any]:
    """Return an entry of the checkpoint, with a response of the daemon."""
    response = pb.ContainerAllocateResponse(envs={ttdp.ADDRESSES: chip}).SerializeToString()
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": N150,
        "DeviceIDs": {"-1": [chip]},
        "AllocResp": base64.b64encode(response).decode(),
        **others,
    }


def checkpoint(entries: object, registered: object = None) -> bytes:
    data = {"PodDeviceEntries": entries, "RegisteredDevices": registered}
    return json.dumps({"Data": data}).encode()


def held(chip: str = A, pod: str = UID, container: str = "main") -> Allocation:
    """Return what the tracker makes of an entry."""
    return Allocation(N150, frozenset([chip]), frozenset([chip]), pod, container)


class Tracked:
    """An allocation tracker, and the checkpoint, cgroups and clock that a test gives it."""

    def __init__(
        self, home: Path, records: Iterable[AllocationRecord] = (), now: float = START
    ) -> None:
        self.home = home
        self.now = now
        self.cgroups = home / "sys/fs/cgroup"
        self.settings = ttdp.Settings(device_plugin_dir=str(home), sysfs_root=str(home / "sys"))
        self.tracker = AllocationTracker(self.settings, records)

    def restarted(self) -> Tracked:
        """Return what the next daemon knows, by way of the state file."""
        rows = json.loads(json.dumps(self.tracker.to_state(self.now)))
        records = [AllocationRecord.from_state(row, self.now) for row in rows]
        return Tracked(self.home, records, self.now)

    def respond(self, chip: str = A) -> None:
        """Give these chips to a container, of which the kubelet has not written yet."""
        self.tracker.add_response(held(chip, pod="", container=""), self.now)

    def write(self, content: bytes) -> None:
        new = self.home / ".new"
        new.write_bytes(content)
        new.rename(self.home / ttdp.CHECKPOINT)

    def make_cgroup(self, *, populated: bool, where: str = f"kubepods/pod{UID}") -> Path:
        """Make a cgroup of version 2, or change it."""
        cgroup = self.cgroups / where
        cgroup.mkdir(parents=True, exist_ok=True)
        (self.cgroups / "cgroup.controllers").touch()
        (cgroup / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
        return cgroup

    def remove_cgroups(self) -> None:
        shutil.rmtree(self.cgroups / "kubepods", ignore_errors=True)

    def look(self) -> set[str]:
        """Look at everything; return the chips whose allocations count now."""
        self.tracker.observe(self.now, look=True)
        return {bdf for each in self.tracker.counting(self.now) for bdf in each.chips}

    def seconds_counting(self) -> float:
        """Return for how long anything counts, looking each second; at most ENOUGH."""
        began = self.now
        while self.look() and self.now < began + ENOUGH:
            self.now += 1
        return self.now - began


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    return Tracked(tmp_path)


# -- the table -------------------------------------------------------------------------------------


def only_a_response(tracked: Tracked) -> None:
    tracked.respond()


def an_entry_before_any_cgroup(tracked: Tracked) -> None:
    tracked.write(checkpoint([entry()]))


def an_entry_and_an_empty_cgroup(tracked: Tracked) -> None:
    tracked.write(checkpoint([entry()]))
    tracked.make_cgroup(populated=False)


def an_entry_and_a_process(tracked: Tracked) -> None:
    tracked.write(checkpoint([entry()]))
    tracked.make_cgroup(populated=True)


def an_entry_and_a_cgroup_that_is_gone(tracked: Tracked) -> None:
    an_entry_and_a_process(tracked)
    tracked.look()
    tracked.remove_cgroups()


def no_entry_but_a_process(tracked: Tracked) -> None:
    an_entry_and_a_process(tracked)
    tracked.look()
    tracked.write(checkpoint([]))


def no_entry_and_an_empty_cgroup(tracked: Tracked) -> None:
    no_entry_but_a_process(tracked)
    tracked.make_cgroup(populated=False)


def no_entry_and_no_cgroup(tracked: Tracked) -> None:
    an_entry_before_any_cgroup(tracked)
    tracked.look()
    tracked.write(checkpoint([]))


def no_entry_and_a_cgroup_that_is_gone(tracked: Tracked) -> None:
    no_entry_but_a_process(tracked)
    tracked.remove_cgroups()


TABLE: list[tuple[Callable[[Tracked], None], int]] = [
    (only_a_response, LASTS),
    (an_entry_before_any_cgroup, ENOUGH),
    (an_entry_and_an_empty_cgroup, ENOUGH),
    (an_entry_and_a_process, ENOUGH),
    (an_entry_and_a_cgroup_that_is_gone, LASTS),
    (no_entry_but_a_process, ENOUGH),
    (no_entry_and_an_empty_cgroup, LASTS),
    (no_entry_and_no_cgroup, LASTS),
    (no_entry_and_a_cgroup_that_is_gone, LASTS),
]
rows = pytest.mark.parametrize(("row", "seconds"), TABLE, ids=[each[0].__name__ for each in TABLE])


@rows
def test_an_allocation_counts_while_there_is_evidence_and_thirty_seconds_more(
    tracked: Tracked, row: Callable[[Tracked], None], seconds: int
) -> None:
    """In each row of the table."""
    row(tracked)
    assert tracked.seconds_counting() == seconds


@rows
@pytest.mark.parametrize("looks", [True, False])
def test_a_restart_of_the_daemon_changes_no_row(
    tracked: Tracked, row: Callable[[Tracked], None], seconds: int, looks: bool
) -> None:
    """What counted counts, for thirty seconds more without evidence; the state file has all."""
    row(tracked)
    if looks:
        tracked.look()
    tracked.now += 5
    after = tracked.restarted()
    assert after.seconds_counting() == seconds


@rows
def test_a_restart_of_the_daemon_revives_nothing(
    tracked: Tracked, row: Callable[[Tracked], None], seconds: int
) -> None:
    """An entry of a pod that has ended stays up to 1.31: its cgroup was seen, and is gone."""
    row(tracked)
    tracked.seconds_counting()
    assert bool(tracked.restarted().look()) is (seconds == ENOUGH)
    assert bool(tracked.restarted().restarted().look()) is (seconds == ENOUGH)


def test_after_a_reboot_an_entry_counts_until_its_pod_was_started(tracked: Tracked) -> None:
    """Nothing is known of this boot: the kubelet admits its pods again, in its own time."""
    an_entry_and_a_cgroup_that_is_gone(tracked)
    assert tracked.seconds_counting() == LASTS
    rebooted = Tracked(tracked.home, now=tracked.now)
    assert rebooted.seconds_counting() == ENOUGH
    rebooted.make_cgroup(populated=True)
    assert rebooted.look() == {A}
    rebooted.remove_cgroups()
    assert rebooted.seconds_counting() == LASTS


def test_evidence_that_returns_counts_again(tracked: Tracked) -> None:
    """A static pod returns, or a runtime has replaced all cgroups."""
    an_entry_and_a_cgroup_that_is_gone(tracked)
    tracked.now += 29
    assert tracked.look() == {A}
    tracked.make_cgroup(populated=False)
    assert tracked.seconds_counting() == ENOUGH
    tracked.remove_cgroups()
    assert tracked.seconds_counting() == LASTS
    tracked.make_cgroup(populated=False)
    assert tracked.look() == {A}


def test_a_response_counts_on_when_its_entry_comes_and_goes(tracked: Tracked) -> None:
    """An older write without the entry has overtaken the one with it."""
    tracked.respond()
    tracked.now += 10
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == LASTS


def test_a_response_that_is_repeated_counts_from_then_on(tracked: Tracked) -> None:
    """The kubelet asks again for the ID of an init container."""
    tracked.respond()
    tracked.now += 20
    tracked.respond()
    assert tracked.seconds_counting() == LASTS
    tracked.respond()
    assert [each.ids for each in tracked.tracker.counting(tracked.now)] == [{A}]


def test_without_a_look_only_the_checkpoint_is_read(tracked: Tracked) -> None:
    """Each Allocate does this; a checkpoint that has changed makes it look."""
    no_entry_but_a_process(tracked)
    assert tracked.look() == {A}
    tracked.make_cgroup(populated=False)
    (allocation,) = tracked.tracker.counting(tracked.now)
    tracked.tracker.observe(tracked.now, look=False)
    assert tracked.tracker.is_running(allocation)
    tracked.write(checkpoint([entry(B, pod=OTHER_UID)]))
    tracked.tracker.observe(tracked.now, look=False)
    assert not tracked.tracker.is_running(allocation)
    assert [each.chips for each in tracked.tracker.counting(tracked.now)] == [{A}, {B}]


# -- pods' cgroups ---------------------------------------------------------------------------------


ROOTS = {  # layouts of pods' cgroups, by cgroup driver, QoS class and version
    "guaranteed": "kubepods/pod{uid}",
    "burstable": "kubepods/burstable/pod{uid}",
    "besteffort": "kubepods/besteffort/pod{uid}",
    "systemd, guaranteed": "kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd, burstable": "kubepods.slice/kubepods-burstable.slice/"
    "kubepods-burstable-pod{uid_}.slice",
    "a root of another name": "k8s-kubepods.slice/k8s-kubepods-besteffort.slice/"
    "k8s-kubepods-besteffort-pod{uid_}.slice",
    "one directory deep": "system.slice/kubepods/pod{uid}",
    "devices/v1": "devices/kubepods/burstable/pod{uid}",
    "memory/v1": "memory/kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd/v1": "systemd/kubepods/pod{uid}",
}


@pytest.mark.parametrize("pod", [UID, "static-pod_1"])
@pytest.mark.parametrize("layout", ROOTS)
def test_a_process_is_evidence_in_every_layout(tracked: Tracked, layout: str, pod: str) -> None:
    """A forced deletion removes the entry while containers run on, in cgroups below the pod's."""
    cgroup = tracked.cgroups / ROOTS[layout].format(uid=pod, uid_=pod.replace("-", "_"))
    (cgroup / "container").mkdir(parents=True)
    if layout.endswith("v1"):
        (cgroup / "tasks").touch()
        state = cgroup / "container/tasks"
        busy, idle = "4711\n", ""
    else:
        (tracked.cgroups / "cgroup.controllers").touch()
        state = cgroup / "cgroup.events"
        busy, idle = "populated 1\n", "populated 0\n"
    state.write_text(busy)
    tracked.write(checkpoint([entry(pod=pod)]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == ENOUGH
    state.write_text(idle)  # an empty cgroup that is left over holds nothing
    assert tracked.seconds_counting() == LASTS


def test_roots_are_searched_for_one_directory_deep(tracked: Tracked) -> None:
    """Not in containers of containers, whose pods are another kubelet's."""
    tracked.make_cgroup(populated=True, where=f"system.slice/docker/kubepods/pod{UID}")
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == LASTS


def test_another_root_is_found_when_it_appears(tracked: Tracked) -> None:
    """A kubelet makes its directory of pods when it starts; after a change of driver there are two.

    A process in one of them is enough.
    """
    tracked.make_cgroup(populated=True, where="one/kubepods/podother")
    assert tracked.look() == set()
    tracked.make_cgroup(populated=True, where=f"two/kubepods/pod{UID}")
    tracked.make_cgroup(populated=False, where=f"one/kubepods/pod{UID}")
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == ENOUGH


def test_nothing_is_kept_of_a_pod_that_has_ended(tracked: Tracked) -> None:
    """Otherwise memory and state file would grow with every pod."""
    tracked.respond(B)
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A, B}
    tracked.tracker.apply_names({(N150, A, "main"): "default/train"})
    assert tracked.tracker.names == {UID: "default/train"}
    assert len(tracked.tracker.to_state(tracked.now)) == 2
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == LASTS
    assert not tracked.tracker.names and not tracked.tracker.to_state(tracked.now)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_look_that_fails_is_repeated_at_once(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The daemon's own errors end no allocation."""
    tracked.make_cgroup(populated=True)
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([entry(container="other")]))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            tracked.tracker.observe(tracked.now, look=False)
    tracked.now += 1
    tracked.tracker.observe(tracked.now, look=False)
    found = tracked.tracker.counting(tracked.now)
    assert [each.container for each in found] == ["main", "other"]
    assert tracked.seconds_counting() == ENOUGH


def test_a_cgroup_that_cannot_be_read_counts_as_busy(tracked: Tracked) -> None:
    """Only "not found" means that there is no process."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    (cgroup / "cgroup.events").unlink()
    (cgroup / "cgroup.events").mkdir()
    assert tracked.seconds_counting() == ENOUGH


@pytest.mark.parametrize("whose", ["a user's session", "another user's", "below another user's"])
def test_cgroups_that_users_can_make_are_no_evidence(tracked: Tracked, whose: str) -> None:
    """A user with a delegated subtree could block any chip by a former pod's name."""
    if os.geteuid() and whose != "a user's session":
        pytest.skip("needs root to give a directory away")
    top = "user.slice" if whose == "a user's session" else "theirs.slice"
    where = f"{top}/kubepods/pod{UID}"
    tracked.make_cgroup(populated=True, where=where)
    if whose != "a user's session":
        theirs = f"{top}/kubepods" if whose == "another user's" else top
        os.chown(tracked.cgroups / theirs, 1000, 1000)
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == LASTS


# -- which pods run --------------------------------------------------------------------------------


def starting(tracked: Tracked) -> Tracked:
    """Bring a pod to the point where its container's start was just allowed (CRI-O: no process)."""
    tracked.write(checkpoint([entry()]))
    tracked.make_cgroup(populated=False)
    tracked.look()
    assert not tracked.tracker.is_running(held())
    tracked.tracker.allow_start(held(), tracked.now)
    return tracked


def seconds_running(tracked: Tracked, allocation: Allocation) -> float:
    began = tracked.now
    while tracked.tracker.is_running(allocation) and tracked.now < began + ENOUGH:
        tracked.now += 1
        tracked.look()
    return tracked.now - began


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_pod_without_a_process_runs_from_the_moment_that_its_start_was_allowed(
    tracked: Tracked, is_restarted: bool
) -> None:
    """For sixty seconds, if none appears; a restart of the daemon does not prolong that."""
    tracked = starting(tracked)
    assert tracked.tracker.has_starting_pods
    if is_restarted:
        tracked.now += 20
        tracked = tracked.restarted()
        tracked.look()
    assert seconds_running(tracked, held()) == (41 if is_restarted else 61)
    assert not tracked.tracker.has_starting_pods


def test_a_start_ends_with_the_first_process(tracked: Tracked) -> None:
    """Then the cgroup shows whether the pod runs."""
    starting(tracked)
    tracked.make_cgroup(populated=True)
    tracked.look()
    assert tracked.tracker.is_running(held()) and not tracked.tracker.has_starting_pods
    tracked.make_cgroup(populated=False)
    tracked.look()
    assert not tracked.tracker.is_running(held())


def test_a_start_ends_with_the_cgroup(tracked: Tracked) -> None:
    """The pod was deleted before its first process."""
    starting(tracked)
    tracked.remove_cgroups()
    tracked.look()
    assert not tracked.tracker.is_running(held()) and not tracked.tracker.has_starting_pods


def test_each_start_has_its_own_sixty_seconds(tracked: Tracked) -> None:
    """The kubelet tries again, or an init container has ended before the main one starts."""
    starting(tracked)
    tracked.now += 50
    tracked.look()
    tracked.tracker.allow_start(held(), tracked.now)
    assert seconds_running(tracked, held()) == 61


def test_a_pod_runs_whichever_of_its_containers_starts(tracked: Tracked) -> None:
    """Another one's devices are the pod's, too; those of other pods are not."""
    entries = [entry(), entry(B, container="side"), entry(B, pod=OTHER_UID)]
    tracked.write(checkpoint(entries))
    for uid in (UID, OTHER_UID):
        tracked.make_cgroup(populated=False, where=f"kubepods/pod{uid}")
    tracked.look()
    tracked.tracker.allow_start(held(), tracked.now)
    side, other = held(B, container="side"), held(B, pod=OTHER_UID)
    running = [tracked.tracker.is_running(each) for each in (held(), side, other)]
    assert running == [True, True, False]

    tracked.now += 40
    tracked.tracker.allow_start(side, tracked.now)
    assert seconds_running(tracked, held()) == 61


def test_a_start_is_allowed_before_the_checkpoint_has_the_response(tracked: Tracked) -> None:
    """Its writing can be late: then the start is that of the pod in the entry."""
    tracked.respond()
    response = held(pod="", container="")
    tracked.look()
    tracked.tracker.allow_start(response, tracked.now)
    assert tracked.tracker.is_running(response)
    tracked.make_cgroup(populated=False)
    tracked.write(checkpoint([entry()]))
    tracked.look()
    assert tracked.tracker.is_running(held()) and tracked.tracker.has_starting_pods


# -- files that are missing or damaged -------------------------------------------------------------


def test_a_checkpoint_that_disappears_counts_on(tracked: Tracked) -> None:
    """A kubelet that starts without it knows of no pod, while pods run on."""
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A}
    (tracked.home / ttdp.CHECKPOINT).unlink()
    assert tracked.seconds_counting() == ENOUGH


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[" * 100_000, b"{}", checkpoint(1)])
def test_garbage_ends_nothing_until_the_checkpoint_can_be_parsed(
    tracked: Tracked, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when it cannot be parsed, one when it can be again; responses stay, too."""
    caplog.set_level("INFO")
    tracked.write(checkpoint([entry()], {N150: ["GPU-1"]}))
    tracked.respond(B)
    assert tracked.look() == {A, B}
    assert tracked.tracker.checkpoint.rivals == {N150}
    for content in (garbage, garbage + b" "):
        tracked.write(content)
        assert tracked.seconds_counting() == ENOUGH and tracked.look() == {A, B}
        assert tracked.tracker.unreadable == f"{ttdp.CHECKPOINT} cannot be parsed"
        assert not tracked.tracker.checkpoint.rivals  # by now it is out of date
    tracked.write(checkpoint([]))
    assert tracked.seconds_counting() == LASTS and tracked.tracker.unreadable is None
    assert ["parsed: " in line or "parsed again" in line for line in caplog.messages] == [True] * 2


def test_a_checkpoint_that_was_never_readable_revives_nothing(tracked: Tracked) -> None:
    """Neither what had ended before, nor what the state file has no longer."""
    an_entry_and_a_cgroup_that_is_gone(tracked)
    assert tracked.seconds_counting() == LASTS
    tracked.write(b"{}")
    assert tracked.look() == tracked.restarted().look() == set()


def test_an_unchanged_checkpoint_is_read_once(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 5 MB takes a while to parse; each Allocate looks at it."""
    parsed: list[int] = []

    def parse(content: bytes) -> ttdp.Checkpoint:
        parsed.append(len(content))
        return genuine(content)

    genuine: Callable[[bytes], ttdp.Checkpoint] = ttdp.parse_checkpoint
    monkeypatch.setattr("ttdp.parse_checkpoint", parse)
    tracked.write(checkpoint([entry()], {"example.com/gpu": ["x" * 60] * 80_000}))
    assert tracked.seconds_counting() == ENOUGH and len(parsed) == 1
    tracked.write(checkpoint([entry()]))
    assert tracked.look() == {A} and len(parsed) == 2


# -- keys ------------------------------------------------------------------------------------------


def test_a_replaced_allocation_is_the_newest(tracked: Tracked) -> None:
    """A static pod returns, and gets the chip of a pod that was deleted by force and runs on."""
    tracked.write(checkpoint([entry(A, pod="static"), entry(B, pod="other")]))
    tracked.make_cgroup(populated=True, where="kubepods/podother")
    assert tracked.look() == {A, B}
    tracked.write(checkpoint([entry(B, pod="static")]))
    tracked.look()
    assert [each.pod for each in tracked.tracker.counting(tracked.now)] == ["other", "static"]


def test_a_new_allocation_of_a_container_replaces_the_former_one(tracked: Tracked) -> None:
    """A static pod has the same UID again when its manifest returns."""
    tracked.write(checkpoint([entry(A)]))
    tracked.make_cgroup(populated=True)
    assert tracked.look() == {A}
    tracked.write(checkpoint([entry(B)]))
    assert tracked.look() == {B}


def test_containers_of_a_pod_can_have_the_same_device(tracked: Tracked) -> None:
    """An init container's entry stays as long as its pod; the others reuse its devices."""
    tracked.write(checkpoint([entry(container="prepare"), entry(), entry(B, container="side")]))
    assert tracked.look() == {A, B}
    tracked.write(checkpoint([entry()]))
    tracked.now += LASTS
    assert tracked.look() == {A}


# -- entries of others -----------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(entry())), anything)
def test_an_odd_entry_is_skipped(key: str, value: Any) -> None:
    """Whatever it is, the others count: it may be another vendor's."""
    parsed = ttdp.parse_checkpoint(checkpoint([{**entry(), key: value}, value, entry(B)]))
    assert parsed.entries[-1].chips == {B}


@pytest.mark.parametrize("odd", ["\n", "\x1b[2J", "\ud800"])
@pytest.mark.parametrize("key", ["PodUID", "ContainerName", "ResourceName", "DeviceIDs"])
def test_control_characters_and_lone_surrogates_reach_no_output(key: str, odd: str) -> None:
    """Entries with them are skipped; the others stay."""
    value = {"-1": [odd]} if key == "DeviceIDs" else odd
    parsed = ttdp.parse_checkpoint(checkpoint([{**entry(), key: value}, entry(B)]))
    assert [each.chips for each in parsed.entries] == [{B}]


def test_a_device_on_two_numa_nodes_is_one() -> None:
    """The kubelet lists its ID for each node."""
    both = checkpoint([entry(DeviceIDs={"0": [A, B], "1": [B]})])
    (allocation,) = ttdp.parse_checkpoint(both).entries
    assert allocation.ids == {A, B}


OURS = [A, "10000:01:00.7", "0000:c0", "0000046131842007", f"{A}::0", "0000:c0::99"]
THEIRS = ["GPU-1", "0", "", "0000:01:00", f"{A}::", f"{A}::x", "0000046131842O07", "a\n", "\ud800"]


@pytest.mark.parametrize("identifier", [*OURS, *THEIRS])
def test_an_id_that_no_configuration_gives_is_a_rivals(identifier: str) -> None:
    """Another plugin has registered the name. Ours are addresses, board IDs, and their replicas."""
    registered = {N150: [A, identifier], "example.com/gpu": [A], "odd": 5, "odder": [5]}
    rivals = ttdp.parse_checkpoint(checkpoint(None, registered)).rivals
    assert rivals == (set() if identifier in OURS else {N150})


@pytest.mark.parametrize("path", ["/dev/tenstorrent/3", f"/dev/tenstorrent/by-pci/{A}"])
@pytest.mark.parametrize("name", [N150, "example.com/gpu"])
def test_another_plugins_response_under_our_name_counts_by_its_device_files(
    tracked: Tracked, name: str, path: str
) -> None:
    """Under other names it is none of ours."""
    response = pb.ContainerAllocateResponse()
    response.devices.add(host_path=path, container_path="/dev/x", permissions="rw")
    encoded = base64.b64encode(response.SerializeToString()).decode()
    tracked.write(checkpoint([entry(ResourceName=name, AllocResp=encoded)]))
    tracked.look()
    for daemon in (tracked, tracked.restarted()):
        daemon.look()
        counting = daemon.tracker.counting(daemon.now)
        found = decide([chip(1, ordinal=3), chip(2)], allocations=counting).allocations
        assert [each.chips for each in found] == ([{A}] if name == N150 else [])

        # A reset would end that pod all the same.
        stalled = chip(1, ordinal=3, fault=ttdp.Fault.STALLED)
        reason = decide([stalled, chip(2)], allocations=counting).chips[A].reason
        assert "interrupts pod " in str(reason)


# -- what a look costs -----------------------------------------------------------------------------


def test_any_number_of_nested_cgroups_is_a_pod_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may create cgroups can nest them deeper than a program can recurse."""

    def endless(*_: object) -> bool:
        raise RecursionError

    monkeypatch.setattr(ttdp.Cgroups, "_is_populated", endless)
    cgroups = ttdp.Cgroups("/nowhere")
    cgroups._directories = {"u1": ["/nowhere/u1"]}
    assert cgroups.has_processes("u1")


def test_any_number_of_waiting_containers_cost_one_look(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 containers wait for one former pod: the loop looks, and all of them see the same."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    tracked.look()
    files: list[str] = []
    genuine = ttdp.Cgroups._is_populated

    def counted(self: ttdp.Cgroups, directory: str) -> bool:
        files.append(directory)
        return genuine(self, directory)

    monkeypatch.setattr(ttdp.Cgroups, "_is_populated", counted)
    for populated in (True, False):
        tracked.make_cgroup(populated=populated)
        tracked.look()
        assert [tracked.tracker.is_running(held()) for _ in range(31)] == [populated] * 31
    assert files == [str(cgroup)] * 2


@pytest.mark.parametrize("has_pod", [True, False])
def test_foreign_cgroups_are_not_looked_into(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, has_pod: bool
) -> None:
    """Of a hundred other pods and services; without a pod with a chip none is listed."""
    for number in range(100):
        (tracked.cgroups / f"system.slice/service-{number}").mkdir(parents=True)
        tracked.make_cgroup(populated=True, where=f"kubepods/burstable/pod{number}")
    if has_pod:
        tracked.make_cgroup(populated=True)
        tracked.write(checkpoint([entry()]))
    assert tracked.look() == ({A} if has_pod else set())
    opened: list[str] = []

    def list_names(path: str) -> list[str]:
        if os.path.isdir(path):
            opened.append(path.removeprefix(str(tracked.cgroups)))
        return names_in(path)

    names_in = ttdp.names_in
    monkeypatch.setattr("ttdp.names_in", list_names)
    tracked.look()
    roots = {"", "/system.slice", "/kubepods", "/kubepods/burstable"}
    assert {*opened} == (roots if has_pod else set())
