"""Allocations are in force while there is evidence: answers, the checkpoint, processes in cgroups.

The clock is the test's. Evidence is looked for every five seconds.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from generated import deviceplugin_pb2 as pb

UID = "0b6cd6e4-9fd5-4b5c-8d4e-4a3a5f6f2d61"
N150 = "tenstorrent.com/n150"
A, B = "0000:01:00.0", "0000:02:00.0"
START = 1000.0
ENOUGH = 200  # seconds after which nothing is in force without evidence


def entry(chip: str = A, pod: str = UID, container: str = "main", **others: Any) -> dict[str, Any]:
    """Return an entry of the checkpoint, with an answer of the daemon."""
    answer = pb.ContainerAllocateResponse(envs={ttdp.ADDRESSES: chip}).SerializeToString()
    return {
        "PodUID": pod,
        "ContainerName": container,
        "ResourceName": N150,
        "DeviceIDs": {"-1": [chip]},
        "AllocResp": base64.b64encode(answer).decode(),
        **others,
    }


def checkpoint(entries: object, registered: object = None) -> bytes:
    data = {"PodDeviceEntries": entries, "RegisteredDevices": registered}
    return json.dumps({"Data": data}).encode()


class Tracked:
    """An allocation tracker, and the checkpoint, cgroups and clock that a test gives it."""

    def __init__(self, home: Path, state: Any = ()) -> None:
        self.home = home
        self.now = START
        self.cgroups = home / "sys/fs/cgroup"
        self.settings = ttdp.Settings(device_plugin_dir=str(home), sysfs_root=str(home / "sys"))
        self.tracker = ttdp.AllocationTracker(self.settings, state, self.now)

    def write(self, content: bytes) -> None:
        new = self.home / ".new"
        new.write_bytes(content)
        new.rename(self.home / ttdp.CHECKPOINT)

    def start_kubelet(self) -> None:
        (self.home / "new.sock").touch()
        (self.home / "new.sock").rename(self.home / "kubelet.sock")

    def make_cgroup(self, *, populated: bool, where: str = f"kubepods/pod{UID}") -> Path:
        """Make a cgroup of version 2, or change it."""
        cgroup = self.cgroups / where
        cgroup.mkdir(parents=True, exist_ok=True)
        (self.cgroups / "cgroup.controllers").touch()
        (cgroup / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
        return cgroup

    def in_force(self) -> set[str]:
        """Return the chips that are held now."""
        self.tracker.observe((), lambda path: None, self.now)
        return {bdf for each in self.tracker.in_force(self.now) for bdf in each.chips}

    def seconds_in_force(self) -> float:
        """Return for how long anything stays in force, looking each second; at most ENOUGH."""
        began = self.now
        while self.in_force() and self.now < began + ENOUGH:
            self.now += 1
        return self.now - began


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    tracked = Tracked(tmp_path)
    tracked.start_kubelet()
    return tracked


PENDING = ttdp.Allocation(N150, frozenset([A]), frozenset([A]))

# -- each kind of evidence, and ten seconds more ---------------------------------------------------


def test_an_answer_is_evidence_for_twenty_seconds(tracked: Tracked) -> None:
    """A kubelet writes within milliseconds, but writes can overtake each other."""
    tracked.tracker.add_pending(PENDING, tracked.now)
    assert 20 < tracked.seconds_in_force() <= 31


def test_an_answer_counts_on_when_its_entry_comes_and_goes(tracked: Tracked) -> None:
    """An older write without the entry has overtaken the one with it."""
    tracked.tracker.add_pending(PENDING, tracked.now)
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    assert 20 < tracked.seconds_in_force() <= 31


@pytest.mark.parametrize("populated", [None, False, True])
def test_an_entry_is_evidence(tracked: Tracked, populated: bool | None) -> None:
    """Before the pod has a cgroup, and while that is empty: volumes are being mounted."""
    tracked.write(checkpoint([entry()]))
    if populated is not None:
        tracked.make_cgroup(populated=populated)
    assert tracked.seconds_in_force() == ENOUGH
    tracked.make_cgroup(populated=False)
    tracked.write(checkpoint([]))
    assert 5 < tracked.seconds_in_force() <= 11


def test_an_entry_of_a_pod_whose_cgroup_is_gone_counts_for_the_next_kubelet(
    tracked: Tracked,
) -> None:
    """Up to 1.31 the last admitted pod's entry stays. A kubelet that starts recreates cgroups."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    shutil.rmtree(cgroup)
    assert 5 < tracked.seconds_in_force() <= 15
    tracked.start_kubelet()
    assert tracked.seconds_in_force() == ENOUGH


ROOTS = {  # layouts of pods' cgroups, by cgroup driver, QoS class and version
    "guaranteed": "kubepods/pod{uid}",
    "burstable": "kubepods/burstable/pod{uid}",
    "besteffort": "kubepods/besteffort/pod{uid}",
    "systemd, guaranteed": "kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd, burstable": "kubepods.slice/kubepods-burstable.slice/"
    "kubepods-burstable-pod{uid_}.slice",
    "a root of another name": "k8s-kubepods.slice/k8s-kubepods-besteffort.slice/"
    "k8s-kubepods-besteffort-pod{uid_}.slice",
    "a deeper root": "system.slice/docker.service/kubelet/kubepods/pod{uid}",
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
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_in_force() == ENOUGH
    state.write_text(idle)  # an empty cgroup that is left over holds nothing
    assert 5 < tracked.seconds_in_force() <= 15


def test_another_root_is_found_when_it_appears(tracked: Tracked) -> None:
    """A kubelet's directory of pods can be created after the kubelet's socket."""
    tracked.make_cgroup(populated=True, where="one/kubepods/podother")
    assert tracked.in_force() == set()
    tracked.make_cgroup(populated=True, where=f"two/kubepods/pod{UID}")
    tracked.make_cgroup(populated=False, where=f"one/kubepods/pod{UID}")
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_in_force() == ENOUGH


def test_nothing_is_kept_of_a_pod_that_has_ended(tracked: Tracked) -> None:
    """Otherwise memory and state file would grow with every pod."""
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    tracked.tracker.apply_names({(N150, A, "main"): "default/train"})
    assert tracked.tracker.names == {UID: "default/train"} and tracked.tracker.to_state()
    tracked.write(checkpoint([]))
    tracked.seconds_in_force()
    tracked.now += 5
    assert not tracked.in_force()
    assert not tracked.tracker.names and not tracked.tracker.to_state()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_look_that_fails_is_repeated_at_once(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The daemon's own errors end no allocation, also if a kubelet has just started."""
    tracked.make_cgroup(populated=True)
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    shutil.rmtree(tracked.cgroups / "kubepods")
    tracked.start_kubelet()
    tracked.write(checkpoint([entry(container="other")]))

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fail)
        with pytest.raises(OSError, match=os.strerror(number)):
            tracked.in_force()
    tracked.now += 1
    assert tracked.in_force() == {A}
    assert [each.container for each in tracked.tracker.in_force(tracked.now)][-1] == "other"
    assert tracked.seconds_in_force() == ENOUGH


def test_a_cgroup_that_cannot_be_read_counts_as_busy(tracked: Tracked) -> None:
    """Only "not found" means that there is no process."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    (cgroup / "cgroup.events").unlink()
    (cgroup / "cgroup.events").mkdir()
    assert tracked.seconds_in_force() == ENOUGH


@pytest.mark.parametrize("whose", ["a user's session", "another user's", "below another user's"])
def test_cgroups_that_users_can_make_are_no_evidence(tracked: Tracked, whose: str) -> None:
    """A user with a delegated subtree could block any chip by a former pod's name."""
    if os.geteuid():
        pytest.skip("needs root to give a directory away")
    top = "user.slice" if whose == "a user's session" else "theirs.slice"
    where = f"{top}/kubepods/pod{UID}"
    tracked.make_cgroup(populated=True, where=where)
    if whose != "a user's session":
        theirs = f"{top}/kubepods" if whose == "another user's" else top
        os.chown(tracked.cgroups / theirs, 1000, 1000)
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    assert tracked.seconds_in_force() <= 15


# -- files that are missing or damaged -------------------------------------------------------------


def test_a_checkpoint_that_disappears_counts_on(tracked: Tracked) -> None:
    """A kubelet that starts without it knows of no pod, while pods run on."""
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A}
    (tracked.home / ttdp.CHECKPOINT).unlink()
    assert tracked.seconds_in_force() == ENOUGH


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[" * 100_000, b"{}", checkpoint(1)])
def test_garbage_ends_nothing_until_the_checkpoint_can_be_parsed(
    tracked: Tracked, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """One line when it cannot be parsed, one when it can be again."""
    caplog.set_level("INFO")
    tracked.write(checkpoint([entry()], {N150: [A, B]}))
    tracked.tracker.add_pending(PENDING._replace(ids=frozenset([B]), chips=frozenset([B])), START)
    assert tracked.in_force() == {A, B}
    for content in (garbage, garbage + b" "):
        tracked.write(content)
        assert tracked.seconds_in_force() == ENOUGH and tracked.in_force() == {A, B}
        assert tracked.tracker.unreadable == f"{ttdp.CHECKPOINT} cannot be parsed"
        assert not tracked.tracker.checkpoint.registered  # by now it is out of date
    tracked.write(checkpoint([]))
    assert tracked.seconds_in_force() <= 15 and tracked.tracker.unreadable is None
    assert ["parsed: " in line or "parsed again" in line for line in caplog.messages] == [True] * 2


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
    assert tracked.seconds_in_force() == ENOUGH and len(parsed) == 1
    tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == {A} and len(parsed) == 2


# -- keys ------------------------------------------------------------------------------------------


def test_a_replaced_allocation_is_the_newest(tracked: Tracked) -> None:
    """A static pod returns, and gets the chip of a pod that was deleted by force and runs on."""
    tracked.write(checkpoint([entry(A, pod="static"), entry(B, pod="other")]))
    tracked.make_cgroup(populated=True, where="kubepods/podother")
    assert tracked.in_force() == {A, B}
    tracked.write(checkpoint([entry(B, pod="static")]))
    tracked.in_force()
    assert [each.pod for each in tracked.tracker.in_force(tracked.now)] == ["other", "static"]


def test_a_new_allocation_of_a_container_replaces_the_former_one(tracked: Tracked) -> None:
    """A static pod has the same UID again when its manifest returns."""
    tracked.write(checkpoint([entry(A)]))
    tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([entry(B)]))
    assert tracked.in_force() == {B}


def test_containers_of_a_pod_can_have_the_same_device(tracked: Tracked) -> None:
    """An init container's entry stays as long as its pod; the others reuse its devices."""
    tracked.write(checkpoint([entry(container="prepare"), entry(), entry(B, container="side")]))
    assert tracked.in_force() == {A, B}
    tracked.write(checkpoint([entry()]))
    tracked.now += 30
    assert tracked.in_force() == {A}


def test_a_restart_of_the_daemon_forgets_no_evidence(tracked: Tracked) -> None:
    """Of a pod deleted by force only the state file knows; of an answer, when it was given."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    tracked.write(checkpoint([]))
    tracked.tracker.add_pending(PENDING._replace(ids=frozenset([B]), chips=frozenset([B])), START)
    after = Tracked(tracked.home, json.loads(json.dumps(tracked.tracker.to_state())))
    assert after.in_force() == {A, B}
    after.now += 19
    assert after.in_force() == {A, B}
    after.now += 12
    assert after.in_force() == {A}
    shutil.rmtree(cgroup)
    assert after.seconds_in_force() <= 15


def test_a_restart_of_the_daemon_does_not_revive_a_pod_that_has_ended(tracked: Tracked) -> None:
    """Its cgroup was seen and is gone, and no kubelet has started since."""
    tracked.write(checkpoint([entry()]))
    cgroup = tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    shutil.rmtree(cgroup)
    state = json.loads(json.dumps(tracked.tracker.to_state()))
    assert Tracked(tracked.home, state).seconds_in_force() <= 15
    tracked.start_kubelet()
    assert Tracked(tracked.home, state).seconds_in_force() == ENOUGH


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
    assert [each.chips for each, _ in parsed.entries][-1] == {B}


@pytest.mark.parametrize("odd", ["\n", "\x1b[2J", "\ud800"])
@pytest.mark.parametrize("key", ["PodUID", "ContainerName", "ResourceName", "DeviceIDs"])
def test_control_characters_and_lone_surrogates_reach_no_output(key: str, odd: str) -> None:
    """Entries with them are skipped, and so are lists of healthy IDs."""
    value = {"-1": [odd]} if key == "DeviceIDs" else odd
    parsed = ttdp.parse_checkpoint(checkpoint([{**entry(), key: value}], {N150: [A, odd]}))
    assert (parsed.entries, parsed.registered) == ([], {})


def test_a_device_on_two_numa_nodes_is_one() -> None:
    """The kubelet lists its ID for each node."""
    both = checkpoint([entry(DeviceIDs={"0": [A, B], "1": [B]})], {N150: [A]})
    ((allocation, _),) = ttdp.parse_checkpoint(both).entries
    assert allocation.ids == {A, B} and ttdp.parse_checkpoint(both).registered == {N150: {A}}


@pytest.mark.parametrize("name", [N150, "example.com/gpu"])
def test_another_plugins_answer_under_our_name_counts_by_its_device_files(
    tracked: Tracked, name: str
) -> None:
    """Under other names it is none of ours."""
    answer = pb.ContainerAllocateResponse()
    answer.devices.add(host_path="/dev/tenstorrent/3", container_path="/dev/x", permissions="rw")
    response = base64.b64encode(answer.SerializeToString()).decode()
    tracked.write(checkpoint([entry(ResourceName=name, AllocResp=response)]))
    tracked.tracker.observe({N150}, {"/dev/tenstorrent/3": A}.get, tracked.now)
    found = tracked.tracker.in_force(tracked.now)
    assert [each.chips for each in found] == ([{A}] if name == N150 else [])


# -- looks at the pods that still run --------------------------------------------------------------


def test_any_number_of_waiting_containers_cost_one_look_in_a_tenth_of_a_second(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 containers wait for one former pod; all see its end within that time."""
    tracked.write(checkpoint([entry()]))
    tracked.make_cgroup(populated=True)
    assert tracked.in_force() == {A}
    (allocation,) = tracked.tracker.in_force(tracked.now)
    looks: list[float] = []
    look = ttdp.Cgroups.look

    def counted(self: ttdp.Cgroups) -> None:
        looks.append(tracked.now)
        look(self)

    monkeypatch.setattr(ttdp.Cgroups, "look", counted)

    def ask(seconds: float) -> list[bool]:
        answers = []
        for _ in range(round(seconds * 310)):
            answers.append(tracked.tracker.is_running(allocation, tracked.now))
            tracked.now += 1 / 310
        return answers

    assert all(ask(1.0)) and 9 <= len(looks) <= 11
    tracked.make_cgroup(populated=False)
    ask(0.1)
    assert not any(ask(0.1))


@pytest.mark.parametrize("has_pod", [True, False])
def test_foreign_cgroups_are_not_looked_into(
    tracked: Tracked, monkeypatch: pytest.MonkeyPatch, has_pod: bool
) -> None:
    """1,500 of other pods, 1,500 of other services; without a pod with a chip none is listed."""
    for number in range(1500):
        (tracked.cgroups / f"service-{number}").mkdir(parents=True)
        tracked.make_cgroup(populated=True, where=f"kubepods/burstable/pod{number}")
    if has_pod:
        tracked.make_cgroup(populated=True)
        tracked.write(checkpoint([entry()]))
    assert tracked.in_force() == ({A} if has_pod else set())
    opened: list[str] = []

    def list_names(path: str) -> list[str]:
        opened.append(path.removeprefix(str(tracked.cgroups)))
        return names_in(path)

    names_in = ttdp.names_in
    monkeypatch.setattr("ttdp.names_in", list_names)
    tracked.now += 5
    tracked.in_force()
    assert {*opened} == ({"", "/kubepods", "/kubepods/burstable"} if has_pod else set())
