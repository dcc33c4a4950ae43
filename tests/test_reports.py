"""What others are told of a node: log, status, labels, CDI, metrics and view; and an answer's text.

Texts are those in tests/golden/reports; --update-golden writes them, and the diff is reviewed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.reporting import Golden
from ttdp import Chip, Decision, Kind, Mount, Problem, Settings, SharedResource, Sharing

Conditions = Mapping[str, ttdp.Condition]

# -- nodes -----------------------------------------------------------------------------------------

PAIR: dict[str, Any] = {"serial": "0000046131842007", "firmware": "19.5.2.0"}
N150_ID: dict[str, Any] = {"serial": "A" * 16, "asic_id": "C" * 16, "firmware": "19.4.0.0"}
ALL_VALUES: dict[str, Any] = {
    "temperature": 41.5,
    "throttles_at": 90.0,
    "trips": 3,
    "sensors": {sensor.attribute: 10.0 + n for n, sensor in enumerate(ttdp.SENSORS)},
    "processes": [{"pid": pid, "command": "python3", "of_pod": True} for pid in (7, 8)],
}


def measured(each: Chip, **values: Any) -> Chip:
    """Return a chip with a reading of these values."""
    return each._replace(reading=ttdp.Reading(each.function, 1.0, **values))


def faulty(each: Chip, since: float, **function: Any) -> Chip:
    """Return a chip whose function is like this, with a fault since then."""
    ill = each._replace(function=each.function._replace(**function))
    return ill._replace(kind=ill.fault and ill.fault.kind, since=since)


def after(bus: int, *readings: dict[str, Any]) -> Chip:
    """Return a chip after these readings, ten seconds apart."""
    each = chip(bus)
    for number, values in enumerate(readings):
        each = each.read(ttdp.Reading(each.function, 10.0 * number, **values), 80)
    return each


ABSENT = {"number": None, "path": ""}
HOT = measured(chip(3, "p150a", number=2, fault=Kind.HOT), temperature=91.0, processes=[])
MIXED = [
    measured(chip(1, numa_node=0, **N150_ID), **ALL_VALUES),
    faulty(chip(2, number=1, fault=Kind.STALLED), 100.0),
    faulty(HOT, 200.25),
    chip(4, "p300c", number=3, numa_node=1, asic_id="4" * 16, **PAIR),
    faulty(chip(5, "p300c", asic_id="5" * 16, **PAIR), 904.5, on_bus=False, driver=None, **ABSENT),
    faulty(chip(6, "n300"), 1.0, driver="vfio-pci", **ABSENT)._replace(is_listed=False),
    faulty(chip(7, "p150b", number=4), 2.0, file_fault="/dev/tenstorrent/4 does not exist"),
    chip(8, None, number=5),
    faulty(chip(9), 3.0, driver="vfio-pci", **ABSENT)._replace(is_listed=False),
    faulty(chip(10), 4.0, **ABSENT),
]
ILL = [  # each by another rule
    faulty(chip(1), 1.0, driver=None, **ABSENT),
    faulty(chip(2), 2.0, driver=None, driver_is_loaded=False, **ABSENT),
    chip(3).blocked(),
    after(4, *[{"heartbeat": 7}] * 3),
    after(5, {"temperature": 80.25}),
    after(6, {"trips": 1}, {"trips": 2}),
    after(7, {"identity": ttdp.Identity("n150")}, {}, {}),
]
BOARDS = [
    *(chip(bus, "p300c", number=bus, numa_node=bus - 1, **PAIR) for bus in (1, 2)),
    chip(3, "p300c", serial="2" * 16),
    chip(4, "p300c", number=4),
    chip(9, "p300c", number=9),
    *(chip(bus, "galaxy-wormhole", number=bus, firmware="19.4.0.0") for bus in (0x41, 0x48)),
]
WORMHOLES = [
    chip(1, firmware="19.4.0.0"),
    chip(2, "n300", number=1, firmware="19.5.0.0", present=False),
    chip(3, "n300", number=2, firmware="19.5.0.0"),
]
SHARED = Sharing(
    resources=(SharedResource("wormhole", 4), SharedResource("blackhole", 2, "half", (bdf(4),)))
)
OTHER_NAMES: dict[str, Any] = {"resource_naming": "arch", "resource_domain": "a.b"}


def settings(*exclude: int, **more: Any) -> Settings:
    """Settings without hugepages: a CDI file has those of this machine."""
    return Settings(exclude=tuple(map(bdf, exclude)), hugepages="none", **more)


NODES: dict[str, Decision] = {
    "mixed": decide(
        MIXED,
        settings(2, 9, mounts=(Mount("/srv", "/models", True), Mount("/x", "/y"))),
        [
            hold("n150", bdf(1), buses=[1]),
            hold("former", "x", buses=[4], pod="u2"),
            hold("former", bdf(11), buses=[11], pod="1f-2a"),
        ],
        unsupported=(bdf(12),),
    ),
    "boards": decide(BOARDS, settings(9, unit="board")),
    "boards-by-chip": decide([*BOARDS[1:3], BOARDS[-1]], settings(3)),
    "shared": decide(
        [*WORMHOLES, chip(4, "p100a", number=3), chip(5, "p150a", number=4)],
        settings(sharing=SHARED, **OTHER_NAMES),
        [
            hold("a.b/wormhole", f"{bdf(1)}::0", f"{bdf(1)}::1", buses=[1]),
            hold("a.b/wormhole", f"{bdf(1)}::2", buses=[1], token="again"),
            hold("a.b/wormhole", f"{bdf(1)}::2", buses=[1], pod="u2"),
        ],
    ),
    "faults": decide(ILL, settings()),
    "none": decide([], driver=None),
    "unsupported": decide([], unsupported=(bdf(12),)),
    "odd": decide(
        [chip(1, firmware="." * 9 + "1" * 90)],
        settings(sharing=Sharing(resources=(SharedResource("n150", 2, "x" * 57),))),
        driver='2"\\\n\u2028😀' + "a/b" * 40 + "..",
    ),
    "excluded": decide([chip(1)], settings(1)),
}
REGISTERED = ttdp.Registration("registered with kubelet", True, 2, True)
WAITING = ttdp.Registration("waiting for kubelet (its socket is closed)", has_tried=True)
COUNTS = Counter({("tenstorrent.com/n150", "granted"): 5, ("tenstorrent.com/n150", "refused"): 1})


def log(former: Conditions, present: Conditions) -> str:
    """Return the lines of the log, with their levels."""
    return "".join(f"{level} {line}\n" for level, line in ttdp.changes(former, present))


def in_lines(document: Mapping[str, Any]) -> str:
    """Return a JSON document with a line for each value and each row, without unknown values."""
    lines = []
    for key, value in document.items():
        is_table = isinstance(value, list) and value != [] and isinstance(value[0], dict)
        lines.append(f"{key}:\n" if is_table else f"{key}: {json.dumps(value)}\n")
        for row in value if is_table else ():
            known = {name: each for name, each in row.items() if each is not None}
            lines.append(f"    {json.dumps(known)}\n")
    return "".join(lines)


@pytest.mark.parametrize("name", NODES)
def test_what_others_are_told_of_a_node_is_as_it_was(golden: Golden, name: str) -> None:
    """Its status, the first lines of the log, labels, the CDI file, metrics and the view."""
    node = NODES[name]
    registrations = {each: WAITING if "former" in each else REGISTERED for each in node.resources}
    problems = [*ttdp.problems_of(node), Problem("files", "/x cannot be written", "mount /x")]
    status = ttdp.status_line(node, registrations, ["/x cannot be written"])
    facts: Any = {"rejected": None, "knows_pods": node.driver is not None, "booted_at": 1.5e9}
    view = ttdp.view_of_node(node, registrations, problems, status=status, **facts)
    assert (view.pop("settings")["unit"], view.pop("status")) == (node.settings.unit, status)

    told = {
        "status": f"{status}\n",
        "log": log({}, ttdp.conditions(node, problems)),
        "labels": ttdp.labels_file(node),
        "CDI": in_lines(json.loads(ttdp.cdi_file(node) or "{}")),
        "metrics": ttdp.chip_metrics(node)
        + ttdp.plugin_metrics(node, registrations, COUNTS, 1.5e9),
        "view": in_lines(view),
    }
    text = "\n".join(f"== {title}\n{each}" for title, each in told.items())
    golden(name, text.replace(ttdp.__version__, "VERSION"))


# -- the log ---------------------------------------------------------------------------------------


def ill(kind: Kind, text: str, **identity: Any) -> Chip:
    return chip(1, **identity)._replace(telemetry_fault=ttdp.Fault(kind, text))


WELL, KNOWN = chip(1), chip(1, **N150_ID)
WARM, WARMER = (ill(Kind.HOT, f"too hot: {degrees} °C", **N150_ID) for degrees in (96, 97))
DEAD = ill(Kind.NO_RESPONSE, "chip does not respond", **N150_ID)
P300S = [chip(bus, "p300c", **PAIR) for bus in (1, 2)]
BY_BOARD, OUT = Settings(unit="board"), Settings(exclude=(bdf(1),))
HELD, HALF_HELD = ([hold(name, bdf(1), buses=[1])] for name in ("n150", "p300"))
FULL = Problem("files", "/x cannot be written: No space left on device", "df /x")
STORIES: list[list[Any]] = [
    [
        ("a chip is found", decide([WELL])),
        ("its firmware reports", decide([KNOWN])),
        ("hot", decide([WARM])),
        ("hotter: no line", decide([WARMER])),
        ("dead", decide([DEAD])),
        ("well", decide([KNOWN])),
        ("excluded", decide([KNOWN], OUT)),
        ("dead while nobody has it: no line", decide([DEAD], OUT)),
        ("a pod has it", decide([DEAD], OUT, HELD)),
        ("in service", decide([DEAD])),
    ],
    [
        ("half of a board", decide(P300S[:1], BY_BOARD)),
        ("whole, but a pod has a chip", decide(P300S, BY_BOARD, HALF_HELD)),
        ("free, and a full disk", decide(P300S, BY_BOARD), FULL),
        ("each chip is a device; the disk is still full", decide(P300S), FULL),
        ("a chip waits for its serial; the disk has room", decide([P300S[0], chip(2, "p300c")])),
    ],
]


def test_each_change_is_one_line_of_the_log(golden: Golden) -> None:
    """Neither new numbers nor what nobody uses are lines."""
    text = ""
    for story in STORIES:
        former: Conditions = {}
        for title, decision, *more in story:
            present = ttdp.conditions(decision, [*ttdp.problems_of(decision), *more])
            text += f"== {title}\n{log(former, present)}"
            former = present
    golden("log", text)


# -- answers ---------------------------------------------------------------------------------------

ANSWERS: dict[str, dict[str, Any]] = {
    "as by default": {},
    "index": {"visible_devices": "index"},
    "none": {"visible_devices": "none"},
    "cdi": {"device_list_strategy": "cdi", "resource_domain": "a.b"},
}


def test_an_answer_has_device_files_mounts_variables_its_token_and_nothing_else(
    golden: Golden,
) -> None:
    """By address, also if numbers run against them, as a reload of the driver can leave them; read
    and write but no mknod; on the host by udev's link if there is one.
    """
    chips = [chip(0xC1, number=0), chip(0x0A, number=1), chip(0x03, number=7)]
    links = {"0000:03:00.0": "/dev/tenstorrent/by-pci/0000:03:00.0"}
    mounts = (Mount("/srv/m", "/m", True), Mount("/run/locks/n150", "/dev/shm"))
    text = ""
    for title, more in ANSWERS.items():
        edits = ttdp.container_edits(chips, links, Settings(**more), mounts, "a token")
        text += f"== {title}\n{in_lines(json.loads(MessageToJson(edits, sort_keys=True)))}"
    golden("answers", text)


ONE, TWO, THREE, FOUR = map(bdf, (1, 2, 3, 4))
ENTRY = (SharedResource("n150", 2),)
NOT_SHARED, ONE_EACH, MORE = Sharing(), Sharing(resources=ENTRY), Sharing(False, False, "", ENTRY)
REQUESTS: dict[str, tuple[Sharing, list[list[str]]]] = {
    "no container": (NOT_SHARED, []),
    "no devices": (NOT_SHARED, [[ONE], []]),
    "twice": (NOT_SHARED, [[ONE, ONE]]),
    "twice, in two containers": (NOT_SHARED, [[ONE], [ONE]]),
    "unknown": (NOT_SHARED, [["x" * 100_000]]),
    "unhealthy": (NOT_SHARED, [[TWO]]),
    "listed for a pod": (NOT_SHARED, [[FOUR]]),
    "possible": (NOT_SHARED, [[ONE, THREE]]),
    "one replica each": (ONE_EACH, [[f"{ONE}::0"], [f"{ONE}::1"]]),
    "two replicas": (ONE_EACH, [[f"{ONE}::0", f"{ONE}::1"]]),
    "replicas of two": (MORE, [[f"{ONE}::0", f"{ONE}::1", f"{THREE}::0"]]),
}


def test_an_impossible_allocation_is_refused(golden: Golden) -> None:
    """With the code of the cause, and a message of one line. A container gets one replica, unless
    more are allowed: then the distinct devices behind them, once each.
    """
    chips = [chip(1), chip(2, fault=Kind.HOT), chip(3), chip(4)]
    text = ""
    for title, (sharing, containers) in REQUESTS.items():
        node = decide(chips, settings(4, sharing=sharing), [hold("n150", FOUR, buses=[4])])
        resource = node.resource("tenstorrent.com/n150")
        try:
            ttdp.check_request(resource, containers)
            found = [[each.address for each in resource.chips(ids)] for ids in containers]
        except ttdp.RequestError as refused:
            found = [refused.args[0].name, refused.args[1]]
        text += f"{title}: {found}\n"
    golden("requests", text)
