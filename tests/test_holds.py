"""Holds: which pod has which chips, whose start is allowed, and what follows for the lists.

tests.test_holds_explored proves the rules of starts, in any order of events. Here stand those about
times and files, and those that a reader looks for.
"""

from __future__ import annotations

import base64
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.world.book import ALWAYS, FIRST, N150, BookWorld, entry
from tests.world.checkpoint import Entry, Held, Snapshot
from ttdp import Mount, Settings

SECOND = "7f0d2c4e-8b9a-4c1d-a2f3-5e6d7c8b9a01"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def world(tmp_path: Path) -> BookWorld:
    return BookWorld(tmp_path)


def second(*buses: int, **others: Any) -> Entry:
    return entry(*buses, pod=SECOND, **others)


# -- which holds are current -----------------------------------------------------------------------

HAPPENINGS: dict[str, Callable[[BookWorld], object]] = {
    "answered": lambda world: world.answer(entry()),
    "written": lambda world: world.write(entry()),
    "runs": lambda world: world.run(entry()),
    "looked at": BookWorld.look,
    "deleted by force": BookWorld.write,
    "has a cgroup": BookWorld.make_cgroup,
    "has no process": lambda world: world.make_cgroup(populated=False),
    "over": BookWorld.remove_cgroup,
}

# What has happened to a pod, and for how many seconds its hold is current then.
TABLE = [
    # No checkpoint names it: it is not read yet, and the kubelet itself keeps the ID.
    ("answered", 0),
    # Its cgroup is still to come: the network is not ready.
    ("answered, written", ALWAYS),
    # By a daemon that has just started.
    ("written", 0),
    ("has no process, written", ALWAYS),
    ("runs", ALWAYS),
    ("runs, over", 0),
    ("runs, deleted by force", ALWAYS),
    ("runs, deleted by force, has no process", 120),
    # Before its start.
    ("answered, written, has a cgroup, looked at, deleted by force", 0),
    # By a daemon that has just started: it counts as started since it was found.
    ("has no process, written, looked at, deleted by force", 120),
]


@pytest.mark.parametrize(("happenings", "seconds"), TABLE)
def test_a_hold_is_current_by_the_table(world: BookWorld, happenings: str, seconds: int) -> None:
    for each in happenings.split(", "):
        HAPPENINGS[each](world)

    assert world.seconds(world.look) == seconds


@pytest.mark.parametrize(("connected", "seconds"), [(None, ALWAYS), (0, 120), (60, 60), (120, 0)])
def test_only_a_kubelet_ends_pods(tmp_path: Path, connected: float | None, seconds: int) -> None:
    """Cgroups also go by `systemctl stop kubelet kubepods.slice`, and by a reboot."""
    world = BookWorld(tmp_path, connected=connected)
    world.write(entry())

    assert world.seconds(world.look) == seconds


def test_streams_that_come_and_go_while_one_is_open_are_one_kubelet(world: BookWorld) -> None:
    """A debugging tool does not make it new; when the last has ended there is none."""
    world.write(entry())
    world.book.note_stream(world.now, is_open=True)
    world.book.note_stream(world.now, is_open=False)
    assert not world.look()

    world.book.note_stream(world.now, is_open=False)
    assert world.look()

    world.book.note_stream(world.now, is_open=True)
    assert world.seconds(world.look) == 120


def test_without_a_directory_of_pods_cgroups_the_checkpoint_decides(world: BookWorld) -> None:
    (world.cgroups / "kubepods/burstable").rmdir()
    (world.cgroups / "kubepods").rmdir()
    world.write(entry())

    assert world.look() == {bdf(1)}
    assert world.start(entry()) == "allowed"
    assert world.book.has_no_processes(world.now)


# -- who runs --------------------------------------------------------------------------------------


def test_a_pod_without_processes_runs_for_two_minutes_after_each_start(world: BookWorld) -> None:
    """A runtime without a pause process (CRI-O) may take so long to create a container."""
    world.run(entry())
    world.make_cgroup(populated=False)
    assert world.seconds(world.runs) == 120

    world.start(entry())
    assert world.seconds(world.runs) == 120

    world.make_cgroup()
    assert world.runs()

    # A static pod can return under its UID: it has not been started then.
    world.remove_cgroup()
    assert not world.runs()
    world.make_cgroup()
    assert not world.runs()


# -- starts ----------------------------------------------------------------------------------------


def hand_over(world: BookWorld) -> Entry:
    """Let the chip of a pod that was deleted by force pass on to the second pod."""
    world.run(entry())
    heir = second()
    world.answer(heir)
    world.write(heir)
    world.make_cgroup(SECOND)
    return heir


def test_a_container_waits_until_the_pod_that_was_deleted_by_force_has_ended(
    world: BookWorld,
) -> None:
    heir = hand_over(world)
    call = world.call(heir)

    assert world.outcome(call) == {FIRST}
    world.make_cgroup(populated=False)
    assert world.outcome(call) == {FIRST}, "its last start was allowed just now"
    world.remove_cgroup()
    assert world.outcome(call) == "allowed"


def test_a_container_waits_for_the_pod_of_a_former_daemon(world: BookWorld) -> None:
    """The next one knows which starts were allowed, and when."""
    world.run(entry())
    world.write()
    world.now += 119

    after = world.restarted()
    heir = second()
    after.answer(heir)
    after.write(heir)
    after.make_cgroup(SECOND)

    assert after.start(heir) == {FIRST}
    after.make_cgroup(populated=False)
    after.now += 1
    assert after.start(heir) == "allowed"


def test_a_container_does_not_wait_for_its_own_pods_others(world: BookWorld) -> None:
    """Nor for the former life of the container itself, nor for pods with other chips."""
    both = [entry(container="prepare"), entry()]
    for each in both:
        world.answer(each)
    world.write(*both, second(2))
    world.make_cgroup()
    world.make_cgroup(SECOND)

    assert [world.start(each) for each in (*both, both[1])] == ["allowed"] * 3


@pytest.mark.parametrize(
    ("resource", "ids", "expected"),
    [
        (N150, [f"{bdf(1)}::1"], "allowed"),
        (N150, [f"{bdf(2)}::1"], {FIRST}),
        (N150, [bdf(1)], {FIRST}),
        (f"{N150}.half", [f"{bdf(1)}::1"], {FIRST}),
    ],
    ids=["its device", "another device", "not shared", "another resource"],
)
def test_containers_share_a_device_by_replicas_of_it_in_one_resource(
    world: BookWorld, resource: str, ids: list[str], expected: str | set[str]
) -> None:
    first = entry(ids=[f"{bdf(1)}::0"])
    world.run(first)
    other = second(1, resource=resource, ids=ids)
    world.answer(other)
    world.write(first, other)
    world.make_cgroup(SECOND)

    assert world.start(other) == expected


@pytest.mark.parametrize(
    "written",
    [[], [entry(pod="third")], [second(2)]],
    ids=["deleted, or an older writing", "the next one's", "other IDs"],
)
def test_a_call_is_refused_when_its_pod_does_not_have_the_ids_any_more(
    world: BookWorld, written: list[Entry]
) -> None:
    """The kubelet does not cancel it. Else the pod's sandbox would hold the chip."""
    heir = hand_over(world)
    call = world.call(heir)
    assert world.outcome(call) == {FIRST}

    for each in written:
        world.answer(each)
    world.write(*written)
    world.remove_cgroup(FIRST)
    assert world.outcome(call) == "refused"
    assert not world.runs(SECOND)


# -- what the book keeps ---------------------------------------------------------------------------


def test_only_pods_that_were_started_are_saved(world: BookWorld) -> None:
    world.run(entry())
    waiting = second(2)
    world.answer(waiting)
    world.write(entry(), waiting)
    world.look()

    saved = ttdp.saved_holds(world.book.to_saved())
    assert [each.pod for each in saved.holds] == [FIRST] and saved.allowed.keys() == {FIRST}


def test_the_chips_of_a_pod_that_left_the_checkpoint_are_chosen_last(world: BookWorld) -> None:
    world.run(entry())
    assert not world.book.forgotten_chips(world.now)

    world.write()
    world.look()
    assert world.book.forgotten_chips(world.now) == {bdf(1)}


def test_pods_without_any_process_show_different_cgroup_drivers(world: BookWorld) -> None:
    """Two minutes after their starts, if none has ever had one, or if pods have no cgroups.

    A pod that has ended shows nothing: the kubelet removes its cgroup some seconds later.
    """
    world.answer(entry())
    world.write(entry())
    world.make_cgroup(populated=False)
    assert world.start(entry()) == "allowed"
    assert not world.book.has_no_processes(world.now)

    world.now += 120
    assert world.book.has_no_processes(world.now)

    world.make_cgroup()
    world.look()
    assert not world.book.has_no_processes(world.now)

    world.make_cgroup(populated=False)
    world.look()
    assert not world.book.has_no_processes(world.now)


# -- hugepage directories --------------------------------------------------------------------------


def in_directory(world: BookWorld, name: str, *buses: int, **others: Any) -> Entry:
    directory = world.home / "dev/hugepages-1G" / ttdp.OWN_DIRECTORY / name
    return entry(*buses, directory=directory, **others)


def named(world: BookWorld, ids: list[str] | None = None) -> str | None:
    """Return which existing directory an answer for these IDs would name."""
    world.look()
    return world.book.hugepages_for(N150, frozenset(ids or [bdf(1)]), world.now)


def test_a_pods_containers_have_one_directory_until_one_of_them_starts(world: BookWorld) -> None:
    """An init container's IDs are given to the pod's others, too; pages are there for one."""
    first = in_directory(world, "one", container="prepare")
    world.answer(first)
    assert named(world) == "one" and named(world, [bdf(2)]) is None

    world.write(first)
    assert named(world) == "one"

    world.now += 30
    assert named(world) is None


@pytest.mark.parametrize("how", ["its cgroup", "a start"])
def test_a_directory_that_a_pod_can_have_used_is_not_given_again(
    world: BookWorld, how: str
) -> None:
    given = in_directory(world, "one")
    world.answer(given)
    world.write(given)
    world.make_cgroup()
    if how == "a start":
        world.start(given)
        world.remove_cgroup()

    assert named(world) is None


def test_an_answer_keeps_its_directory_until_it_is_written_or_old(world: BookWorld) -> None:
    given = in_directory(world, "one")
    world.answer(given)
    assert [each.hugepages for each in world.book.unwritten(world.now)] == ["one"]

    world.write(given)
    world.look()
    assert not world.book.unwritten(world.now)

    world.answer(in_directory(world, "two", 2))
    assert not world.book.unwritten(world.now + 30)


# -- the checkpoint --------------------------------------------------------------------------------


def damage_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def damage_by_size(path: Path) -> None:
    os.truncate(path, ttdp.CHECKPOINT_MAX + 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\xff\0"),
    "another form": lambda path: path.write_text('{"Data": []}'),
    "a thousand brackets": lambda path: path.write_text("[" * 100_000),
    "a FIFO": damage_by_fifo,
    "terabytes": damage_by_size,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_that_cannot_be_used_is_as_if_it_had_not_changed(
    world: BookWorld, how: str
) -> None:
    assert not world.look() and not world.book.has_read
    assert world.book.problem is None, "no kubelet was here yet"
    world.run(entry())
    assert world.look() and world.book.problem is None

    DAMAGES[how](world.path)
    assert world.look() == {bdf(1)}
    problem = world.book.problem
    assert problem and ttdp.CHECKPOINT in problem and problem.isprintable()

    if world.path.is_fifo():
        world.path.unlink()
    world.write()
    world.look()
    assert world.book.problem is None


def test_pods_are_looked_at_with_a_new_checkpoint_and_else_only_if_that_is_asked_for(
    world: BookWorld,
) -> None:
    """It changes a hundred times more rarely than the loop turns."""
    world.make_cgroup()
    world.write(entry())
    assert world.book.refresh(world.now, look=False)
    assert {each.pod for each in world.current()} == {FIRST}

    world.remove_cgroup()
    assert not world.book.refresh(world.now, look=False)
    assert world.current(), "by the last look"
    assert not world.look()


@pytest.mark.parametrize("failing", ["open", "listdir"])
def test_the_daemons_own_error_ends_no_hold_and_loses_no_checkpoint(
    world: BookWorld, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Too many open files: the next look reads it all."""
    world.run(entry())
    other = second(2)
    world.write(entry(), other)
    world.make_cgroup(SECOND)

    def no_descriptors(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, failing, no_descriptors)
        world.look()

    assert {each.pod for each in world.current()} == {FIRST}
    assert world.look() == {bdf(1), bdf(2)}


@pytest.mark.parametrize(
    "odd",
    [
        {"AllocResp": ""},  # another vendor's
        {"AllocResp": "%"},
        {"AllocResp": base64.b64encode(ttdp.ADDRESSES.encode()).decode()},
        {"DeviceIDs": None},
        {"DeviceIDs": {"0": 7}},
        {"PodUID": None, "DeviceIDs": []},
        None,
    ],
)
def test_an_entry_of_others_or_that_cannot_be_read_is_skipped(odd: dict[str, Any] | None) -> None:
    """Those beside it count."""
    entries = [entry(2).json() | odd if odd else 7, entry().json()]
    content = {"Data": {"PodDeviceEntries": entries, "RegisteredDevices": None}}

    (found,) = ttdp.parse_checkpoint(json.dumps(content).encode()).holds.values()
    assert found.chips == {bdf(1)}


def test_a_hold_has_what_the_entry_and_the_answer_have() -> None:
    """A device on two NUMA nodes is in both lists; only directories of the daemon count."""
    paths = [
        "/dev/hugepages-1G/tt-device-plugin/one",
        "/dev/hugepages/tt-device-plugin/one",
        "/run/ttdp/shm/tt-device-plugin/n150",
        "/dev/hugepages",
        "/srv/models",
    ]
    mounts = [Mount(path, f"/container/{number}") for number, path in enumerate(paths)]
    chips = [chip(1, number=1), chip(2, number=2)]
    answer = ttdp.container_edits(chips, {}, Settings(), mounts, "token")
    given = Entry(FIRST, "main", N150, Held({0: [bdf(1), bdf(2)], 1: [bdf(2)]}, answer))

    (found,) = ttdp.parse_checkpoint(Snapshot([given], {}).json()).holds.values()
    assert found == ttdp.Hold(
        N150, frozenset([bdf(1), bdf(2)]), "token", frozenset([bdf(1), bdf(2)]),
        tuple(paths[:3]), FIRST, "main",
    )  # fmt: skip
    assert found.hugepages == "one"


@pytest.mark.parametrize(
    ("listed", "is_anothers"),
    [
        ([bdf(1)], False),
        (["0000:c0", "0000046131842007", "0000:03:00.0::12"], False),
        (["0"], True),
        ([bdf(1), "tenstorrent-0"], True),
        (None, False),
        ([7], True),
    ],
)
def test_ids_that_no_configuration_gives_are_another_plugins(
    listed: Any, is_anothers: bool
) -> None:
    """Those of a former configuration can be in the checkpoint still."""
    resource = decide([chip(1)]).resources[N150]

    assert ttdp.is_anothers(resource, {N150: listed}) is is_anothers


# -- pods' cgroups and names -----------------------------------------------------------------------

V2 = {
    "cgroupfs": "kubepods/burstable/pod{uid}",
    "guaranteed": "kubepods/pod{uid}",
    "systemd": "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{uid_}.slice",
    "below another": "k3s.slice/kubepods.slice/kubepods-pod{uid_}.slice",
    "nested": "k8s-kubepods.slice/k8s-kubepods-burstable.slice/"
    "k8s-kubepods-burstable-pod{uid_}.slice",
}
V1 = {
    "memory": "memory/kubepods.slice/kubepods-pod{uid_}.slice",
    "systemd, v1": "systemd/kubepods/pod{uid}",
}


class Tree:
    """A hierarchy of cgroups, of version 1 or 2."""

    def __init__(self, home: Path, *, is_v2: bool = True) -> None:
        self.top = home / "sys/fs/cgroup"
        self.top.mkdir(parents=True)
        if is_v2:
            (self.top / "cgroup.controllers").touch()
        self.is_v2 = is_v2
        self.cgroups = ttdp.Cgroups(Settings(root=str(home)))

    def make(self, where: str, *, populated: bool = True, pod: str = FIRST) -> Path:
        """Make a pod's cgroup, whose process is in a container's."""
        path = self.top / where.format(uid=pod, uid_=pod.replace("-", "_"))
        (path / "container/inner").mkdir(parents=True, exist_ok=True)
        if self.is_v2:
            (path / "cgroup.events").write_text(f"populated {int(populated)}\nfrozen 0\n")
        else:
            for directory in (path, path / "container"):
                (directory / "tasks").touch()
            (path / "container/inner/tasks").write_text("4711\n" if populated else "")
        return path

    def seen(self, pod: str = FIRST) -> bool | None:
        """Whether the pod has a process; None without a cgroup."""
        self.cgroups.refresh()
        return self.cgroups.is_populated(pod) if self.cgroups.exists(pod) else None


@pytest.mark.parametrize("pod", [FIRST, "34a7bb2f1e0c4c3b9d1f6e6a0c5d7e81"])
@pytest.mark.parametrize("layout", [*V2, *V1])
def test_a_pods_cgroup_is_found_in_every_layout(tmp_path: Path, layout: str, pod: str) -> None:
    """Of both drivers, each QoS class and both versions; a static pod's UID has no dashes."""
    tree = Tree(tmp_path, is_v2=layout in V2)
    assert tree.seen(pod) is None and not tree.cgroups.have_roots

    where = (V2 | V1)[layout]
    tree.make(where, populated=False, pod=pod)
    assert tree.seen(pod) is False and tree.cgroups.have_roots
    tree.make(where, pod=pod)
    assert tree.seen(pod) is True


def test_a_pod_with_two_cgroups_has_the_processes_of_both(tmp_path: Path) -> None:
    """After a change of the cgroup driver."""
    tree = Tree(tmp_path)
    tree.make(V2["cgroupfs"], populated=False)
    tree.make(V2["systemd"])

    assert tree.seen() is True


@pytest.mark.parametrize(
    "where", ["user.slice/a/kubepods/pod{uid}", "pods/pod{uid}", "kubepods/other/pod{uid}"]
)
def test_what_is_no_pods_cgroup_is_not_taken_for_one(tmp_path: Path, where: str) -> None:
    tree = Tree(tmp_path)
    tree.make(where)

    assert tree.seen() is None


@needs_root
@pytest.mark.parametrize("theirs", ["theirs.slice/kubepods", "theirs.slice"])
def test_a_root_that_a_user_can_make_is_none(tmp_path: Path, theirs: str) -> None:
    """In a delegated subtree."""
    tree = Tree(tmp_path)
    tree.make("theirs.slice/kubepods/pod{uid}")
    os.chown(tree.top / theirs, 1000, 1000)

    assert tree.seen() is None


def test_a_cgroup_that_cannot_be_read_counts_as_populated(tmp_path: Path) -> None:
    """Any error but that it has vanished."""
    tree = Tree(tmp_path)
    path = tree.make(V2["cgroupfs"]) / "cgroup.events"
    path.unlink()
    path.mkdir()
    assert tree.seen() is True

    path.rmdir()
    assert tree.seen() is False


def test_pods_have_the_names_of_their_log_directories(tmp_path: Path) -> None:
    """The kubelet makes one before a pod's first container."""
    settings = Settings(root=str(tmp_path))
    assert ttdp.pod_names(settings) == {}

    for name in (f"default_train-0_{FIRST}", "kube-system_etcd-a_34a7", "lost+found", "a_b\x1b_c"):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)

    names = ttdp.pod_names(settings)
    assert names == {FIRST: "default/train-0", "34a7": "kube-system/etcd-a", "c": "a/b\\x1b"}
    assert ttdp.name_of_pod(FIRST, names) == "default/train-0"
    assert ttdp.name_of_pod(SECOND, names) == f"pod {SECOND}"


# -- lists -----------------------------------------------------------------------------------------

CHIPS = [chip(1), chip(2), chip(3, "p300c", serial="A"), chip(4, "p300c", serial="A")]
P300, BOARD = "tenstorrent.com/p300", "tenstorrent.com/p300-board"
BY_BOARD = Settings(unit="board")


def test_an_id_that_only_a_hold_gives_is_not_given_again_and_a_withheld_one_says_why() -> None:
    decision = decide(CHIPS, BY_BOARD, [hold("p300", bdf(3), buses=[3])])

    with pytest.raises(ttdp.RequestError) as reserved:
        ttdp.check_request(decision.resources[P300], [[bdf(3)]])
    with pytest.raises(ttdp.RequestError) as withheld:
        ttdp.check_request(decision.resources[BOARD], [["A"]])

    code = ttdp.Status.FAILED_PRECONDITION
    assert reserved.value.args[0] is withheld.value.args[0] is code
    assert f"held until default/train ends (as {P300} {bdf(3)})" in withheld.value.args[1]


def test_a_board_that_is_incomplete_after_a_reboot_is_healthy_for_the_pod_that_has_it() -> None:
    """One chip reports its serial number later. Unhealthy, it would cost the pod its life."""
    late = [CHIPS[2], chip(4, "p300c")]
    found = decide(late, BY_BOARD, [hold("p300-board", "A", buses=[3, 4])]).resources[BOARD]

    assert found.list_entries == [("A", True, ())]
