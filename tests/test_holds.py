"""Holds: which are current, and what the program reads of checkpoint, cgroups and log directories.

Who may start, and in which directory, is in tests.test_holds_explored, in any order of events.
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
from tests.chips import bdf, chip, decide
from tests.conftest import needs_root
from tests.world.book import ALWAYS, FIRST, N150, BookWorld, entry
from tests.world.checkpoint import Entry, Snapshot
from ttdp import Mount, Settings

SECOND = "7f0d2c4e-8b9a-4c1d-a2f3-5e6d7c8b9a01"


@pytest.fixture
def world(tmp_path: Path) -> BookWorld:
    return BookWorld(tmp_path)


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
    # A static pod returns under its UID, without a start.
    ("runs, over, looked at, has a cgroup, looked at, deleted by force", 0),
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


@pytest.mark.parametrize(
    ("other", "has_cgroup"),
    [
        (entry(2, pod=SECOND), True),
        (entry(1, 2, pod=SECOND), True),
        (entry(pod=SECOND, resource=f"{N150}.half"), True),
        (entry(pod=SECOND), False),
    ],
    ids=["other IDs", "more IDs", "another resource", "no cgroup"],
)
def test_a_call_is_of_the_pods_with_a_cgroup_that_have_exactly_its_ids(
    world: BookWorld, other: Entry, has_cgroup: bool
) -> None:
    world.write(entry(), other)
    world.make_cgroup()
    if has_cgroup:
        world.make_cgroup(SECOND)

    assert world.call(entry()).callers == {FIRST}


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
def test_containers_share_a_chip_by_replicas_of_one_device_in_one_resource(
    world: BookWorld, resource: str, ids: list[str], expected: str | set[str]
) -> None:
    """Else the second one waits, whatever its IDs are: after a reload they are others."""
    first = entry(ids=[f"{bdf(1)}::0"])
    second = entry(pod=SECOND, resource=resource, ids=ids)
    world.run(first)
    world.answer(second)
    world.write(first, second)
    world.make_cgroup(SECOND)

    assert world.start(second) == expected


def test_an_answer_keeps_its_directory_until_it_is_written_or_old(world: BookWorld) -> None:
    world.answer(entry())
    world.run(entry(2, pod=SECOND))
    assert [each.chips for each in world.book.unwritten(world.now + 29)] == [{bdf(1)}]
    assert not world.book.unwritten(world.now + 30)

    world.write(entry())
    world.look()
    assert not world.book.unwritten(world.now)


def test_an_answer_names_the_last_ones_directory_unless_a_pod_can_have_used_it(
    world: BookWorld,
) -> None:
    """An init container's IDs are given to the pod's others, too; pages are there for one."""
    given = entry(directory=Path("/dev/hugepages", ttdp.OWN_DIRECTORY, "one"))
    world.answer(given)
    world.write(given)

    def name(after: float = 0.0) -> str | None:
        world.look()
        return world.book.hugepages_for(N150, frozenset([bdf(1)]), world.now + after)

    assert name() == name(after=29) == "one" and name(after=30) is None
    world.make_cgroup()
    assert name() is None


def test_only_pods_that_were_started_are_saved(world: BookWorld) -> None:
    waiting = entry(2, pod=SECOND)
    world.run(entry())
    world.answer(waiting)
    world.write(entry(), waiting)
    world.look()

    saved = ttdp.saved_holds(world.book.to_saved())
    assert [each.pod for each in saved.holds] == [FIRST]
    assert saved.allowed == {FIRST: world.now}


def test_the_chips_of_a_pod_that_runs_on_without_the_kubelet_are_chosen_last(
    world: BookWorld,
) -> None:
    world.run(entry())
    assert not world.book.forgotten_chips(world.now)

    world.write()
    world.look()
    assert world.book.forgotten_chips(world.now) == {bdf(1)}

    world.make_cgroup(populated=False)
    assert not world.book.forgotten_chips(world.now + 120)


def test_pods_without_any_process_show_different_cgroup_drivers(world: BookWorld) -> None:
    """Two minutes after their starts, if none has ever had one.

    A pod that has ended shows nothing: the kubelet removes its cgroup some seconds later.
    """
    world.answer(entry())
    world.write(entry())
    world.make_cgroup(populated=False)
    assert world.start(entry()) == "allowed"
    assert not world.book.has_no_processes(world.now + 119)
    assert world.book.has_no_processes(world.now + 120)

    for populated in (True, False):
        world.make_cgroup(populated=populated)
        world.look()
        assert not world.book.has_no_processes(world.now + 120)


# -- the checkpoint --------------------------------------------------------------------------------


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "garbage": lambda path: path.write_bytes(b"\xff\0"),
    "another form": lambda path: path.write_text('{"Data": []}'),
    "many brackets": lambda path: path.write_text("[" * 100_000),
    "terabytes": lambda path: os.truncate(path, ttdp.CHECKPOINT_MAX + 1),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_that_cannot_be_used_is_as_if_it_had_not_changed(
    world: BookWorld, how: str
) -> None:
    """It is a problem until the kubelet writes again; that there was none yet is not."""
    assert not world.look() and not world.book.has_read and world.book.problem is None
    world.answer(entry())
    world.write(entry())
    world.make_cgroup()
    assert world.look() and world.book.has_read

    DAMAGES[how](world.path)
    assert world.look() == {bdf(1)}
    problem = world.book.problem
    assert problem and ttdp.CHECKPOINT in problem and problem.isprintable()

    world.write()
    world.look()
    assert world.book.problem is None


@pytest.mark.parametrize("failing", ["open", "listdir"])
def test_the_daemons_own_error_ends_no_hold_and_loses_no_checkpoint(
    world: BookWorld, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Too many open files: the next look reads it all."""
    world.run(entry())
    world.write(entry(), entry(2, pod=SECOND))
    world.make_cgroup(SECOND)

    def no_descriptors(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, failing, no_descriptors)
        world.look()

    assert [each.pod for each in world.current()] == [FIRST]
    assert world.look() == {bdf(1), bdf(2)}


@pytest.mark.parametrize(
    "odd",
    [
        {"AllocResp": ""},  # another vendor's
        {"AllocResp": "%"},
        {"AllocResp": base64.b64encode(ttdp.ADDRESSES.encode()).decode()},
        {"DeviceIDs": None},
        {"DeviceIDs": {"0": 7}},
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
        "/run/ttdp/shm/tt-device-plugin/n150",
        "/dev/hugepages-1G/tt-device-plugin/one",
        "/dev/hugepages/tt-device-plugin/one",
        "/dev/hugepages",
        "/srv/models",
    ]
    mounts = [Mount(path, f"/container/{number}") for number, path in enumerate(paths)]
    chips = [chip(1, number=1), chip(2, number=2)]
    answer = ttdp.container_edits(chips, {}, Settings(), mounts, "token")
    given = Entry(FIRST, "main", N150, {0: [bdf(1), bdf(2)], 1: [bdf(2)]}, answer)

    (found,) = ttdp.parse_checkpoint(Snapshot([given], {}).json()).holds.values()

    both = frozenset([bdf(1), bdf(2)])
    assert found == ttdp.Hold(N150, both, "token", both, tuple(paths[:3]), FIRST, "main")
    assert found.hugepages == "one"


@pytest.mark.parametrize(
    ("listed", "is_anothers"),
    [
        ([bdf(1)], False),
        (["0000:c0", "0000046131842007", "0000:03:00.0::12"], False),
        ([bdf(1), "tenstorrent-0"], True),
        ([7], True),
        (None, False),
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


def make_cgroup(home: Path, where: str, *, pod: str = FIRST, has_process: bool = True) -> Path:
    """Make a pod's cgroup, whose process is in a container's."""
    top = home / "sys/fs/cgroup"
    path = top / where.format(uid=pod, uid_=pod.replace("-", "_"))
    (path / "container/inner").mkdir(parents=True, exist_ok=True)
    if where in V1.values():
        for directory in (path, path / "container"):
            (directory / "tasks").touch()
        (path / "container/inner/tasks").write_text("4711\n" if has_process else "")
    else:
        (top / "cgroup.controllers").touch()
        (path / "cgroup.events").write_text(f"populated {int(has_process)}\nfrozen 0\n")
    return path


def has_process(home: Path, pod: str = FIRST) -> bool | None:
    """Return whether a pod is seen to have a process; None: it has no cgroup."""
    cgroups = ttdp.Cgroups(Settings(root=str(home)))
    cgroups.refresh()
    return cgroups.is_populated(pod) if cgroups.exists(pod) else None


@pytest.mark.parametrize("pod", [FIRST, "34a7bb2f1e0c4c3b9d1f6e6a0c5d7e81"], ids=["UUID", "static"])
@pytest.mark.parametrize("layout", [*V2, *V1])
def test_a_pods_cgroup_is_found_in_every_layout(tmp_path: Path, layout: str, pod: str) -> None:
    """Of both drivers, each QoS class and both versions; a static pod's UID has no dashes."""
    where = (V2 | V1)[layout]
    assert has_process(tmp_path, pod) is None

    for expected in (False, True):
        make_cgroup(tmp_path, where, pod=pod, has_process=expected)
        assert has_process(tmp_path, pod) is expected


@pytest.mark.parametrize(
    "where", ["user.slice/a/kubepods/pod{uid}", "pods/pod{uid}", "kubepods/other/pod{uid}"]
)
def test_what_is_no_pods_cgroup_is_not_taken_for_one(tmp_path: Path, where: str) -> None:
    make_cgroup(tmp_path, where)

    assert has_process(tmp_path) is None


@needs_root
@pytest.mark.parametrize("theirs", ["theirs.slice/kubepods", "theirs.slice"])
def test_a_root_that_a_user_can_make_is_none(tmp_path: Path, theirs: str) -> None:
    """In a delegated subtree."""
    make_cgroup(tmp_path, "theirs.slice/kubepods/pod{uid}")
    os.chown(tmp_path / "sys/fs/cgroup" / theirs, 1000, 1000)

    assert has_process(tmp_path) is None


def test_a_cgroup_that_cannot_be_read_counts_as_populated(tmp_path: Path) -> None:
    """Any error but that it has vanished."""
    path = make_cgroup(tmp_path, V2["cgroupfs"]) / "cgroup.events"
    path.unlink()
    path.mkdir()
    assert has_process(tmp_path)

    path.rmdir()
    assert has_process(tmp_path) is False


def test_pods_have_the_names_of_their_log_directories(tmp_path: Path) -> None:
    """The kubelet makes one before a pod's first container."""
    settings = Settings(root=str(tmp_path))
    assert ttdp.pod_names(settings) == {}

    for name in (f"default_train-0_{FIRST}", "lost+found", "a_b\x1b_c"):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)

    names = ttdp.pod_names(settings)
    assert names == {FIRST: "default/train-0", "c": "a/b\\x1b"}
    assert ttdp.name_of_pod(FIRST, names) == "default/train-0"
    assert ttdp.name_of_pod(SECOND, names) == f"pod {SECOND}"
