"""What others are told of a node: log, status, labels, CDI, metrics and view; and an answer's text.

Texts are those in tests/golden/reports; --update-golden writes them, and the diff is reviewed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import bdf, chip, decide, hold
from tests.world.node import SimulatedNode
from tests.world.watched import WatchedNode
from ttdp import (
    Chip,
    Decision,
    Kind,
    Mount,
    Problem,
    Registration,
    Settings,
    SharedResource,
    Sharing,
)

Golden = Callable[[str, str], None]


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compares a text with the one in tests/golden/reports that has this name."""

    def compare(name: str, text: str) -> None:
        file = Path(__file__).with_name("golden") / "reports" / f"{name}.out"
        text = text.replace(ttdp.__version__, "VERSION")
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert text == file.read_text()

    return compare


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
]
BOARDS = [
    *(chip(bus, "p300c", number=bus, numa_node=bus - 1, **PAIR) for bus in (1, 2)),
    chip(3, "p300c", serial="2" * 16),
    chip(4, "p300c", number=4),
    chip(9, "p300c", number=9),
    *(chip(bus, "galaxy-wormhole", number=bus, firmware="19.4.0.0") for bus in (0x41, 0x48)),
]
SHARED = Sharing(
    resources=(SharedResource("wormhole", 4), SharedResource("blackhole", 2, "half", (bdf(4),)))
)
# Without hugepages where there is a CDI file: that has those of this machine.
NODES: dict[str, Decision] = {
    "mixed": decide(
        MIXED,
        Settings(
            exclude=(bdf(2), bdf(9)),
            mounts=(Mount("/srv", "/models", True),),
            hugepages="none",
        ),
        [
            hold("n150", bdf(1), buses=[1]),
            hold("former", "x", buses=[4], pod="u2"),
            hold("former", bdf(11), buses=[11], pod="1f-2a"),
        ],
        unsupported=(bdf(12),),
    ),
    "boards": decide(BOARDS, Settings(unit="board", exclude=(bdf(9),))),
    "boards-by-chip": decide([*BOARDS[1:3], BOARDS[-1]], Settings(exclude=(bdf(3),))),
    "shared": decide(
        [
            chip(1, firmware="19.4.0.0"),
            chip(2, "n300", number=1, firmware="19.5.0.0", present=False),
            chip(3, "n300", number=2, firmware="19.5.0.0"),
            chip(4, "p100a", number=3),
            chip(5, "p150a", number=4),
        ],
        Settings(sharing=SHARED, resource_naming="arch", resource_domain="a.b", hugepages="none"),
        [
            hold("a.b/wormhole", f"{bdf(1)}::0", f"{bdf(1)}::1", buses=[1]),
            hold("a.b/wormhole", f"{bdf(1)}::2", buses=[1], token="again"),
            hold("a.b/wormhole", f"{bdf(1)}::2", buses=[1], pod="u2"),
        ],
    ),
    "none": decide([], driver=None),
    "unsupported": decide([], unsupported=(bdf(12),)),
    "excluded": decide([chip(1)], Settings(exclude=(bdf(1),), hugepages="none")),
}
REGISTERED = Registration("registered with kubelet", True, 2, True)
WAITING = Registration("waiting for kubelet (its socket is closed)", has_tried=True)
COUNTS = Counter({("tenstorrent.com/n150", "granted"): 5, ("tenstorrent.com/n150", "refused"): 1})


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


def told(decision: Decision, titles: str) -> Iterator[str]:
    """Yield what others are told of a node, under these titles."""
    names = [*decision.resources]
    registrations = {name: WAITING if "former" in name else REGISTERED for name in names}
    problems = [*ttdp.problems_of(decision), Problem("files", "/x cannot be written", "mount /x")]
    status = ttdp.status_line(decision, registrations, ["/x cannot be written"])
    log = ttdp.changes({}, ttdp.conditions(decision, problems))
    metrics = ttdp.plugin_metrics(decision, registrations, COUNTS, 1.5e9)
    view = ttdp.view_of_node(
        decision,
        registrations,
        problems,
        status=status,
        rejected=None,
        knows_pods=decision.driver is not None,
        booted_at=1.5e9,
    )
    assert (view.pop("settings")["unit"], view.pop("status")) == (decision.settings.unit, status)

    texts = {
        "status": f"{status}\n",
        "log": "".join(f"{level} {line}\n" for level, line in log),
        "labels": ttdp.labels_file(decision),
        "CDI": in_lines(json.loads(ttdp.cdi_file(decision) or "{}")),
        "metrics": ttdp.chip_metrics(decision) + metrics,
        "view": in_lines(view),
    }
    for title in titles.split():
        yield f"== {title}\n{texts[title]}"


@pytest.mark.parametrize(
    ("name", "titles"),
    [
        ("mixed", "status log labels CDI metrics view"),
        ("shared", "status log labels CDI metrics view"),
        ("boards", "status log labels view"),
        ("boards-by-chip", "log labels"),
        ("none", "status labels CDI metrics view"),
        ("unsupported", "status"),
        ("excluded", "status log labels CDI"),
    ],
)
def test_what_others_are_told_of_a_node_is_as_it_was(
    golden: Golden, name: str, titles: str
) -> None:
    """Its status, the first lines of the log, labels, the CDI file, metrics and the view."""
    golden(name, "\n".join(told(NODES[name], titles)))


# -- the log ---------------------------------------------------------------------------------------


def ill(kind: Kind, text: str, **identity: Any) -> Chip:
    return chip(1, **identity)._replace(telemetry_fault=ttdp.Fault(kind, text))


WELL, KNOWN = chip(1), chip(1, **N150_ID)
WARM, WARMER = (ill(Kind.HOT, f"too hot: {degrees} °C", **N150_ID) for degrees in (96, 97))
DEAD = ill(Kind.NO_RESPONSE, "chip does not respond", **N150_ID)
P300S = [chip(bus, "p300c", **PAIR) for bus in (1, 2)]
BY_BOARD, OUT = Settings(unit="board"), Settings(exclude=(bdf(1),))
WAITING_FOR_SERIAL = [P300S[0], chip(2, "p300c")]
HELD, HALF_HELD = ([hold(name, bdf(1), buses=[1])] for name in ("n150", "p300"))
FULL = Problem("files", "/x cannot be written: No space left on device", "df /x")
STORIES: dict[str, list[tuple[str, Decision, list[Problem]]]] = {
    "a chip": [
        ("found", decide([WELL]), []),
        ("its firmware reports", decide([KNOWN]), []),
        ("the same again", decide([KNOWN]), []),
        ("hot", decide([WARM]), []),
        ("hotter: no line", decide([WARMER]), []),
        ("dead", decide([DEAD]), []),
        ("well", decide([KNOWN]), []),
        ("excluded", decide([KNOWN], OUT), []),
        ("dead while nobody has it: no line", decide([DEAD], OUT), []),
        ("a pod has it", decide([DEAD], OUT, HELD), []),
        ("in service", decide([DEAD]), []),
    ],
    "a board": [
        ("half of it", decide(P300S[:1], BY_BOARD), []),
        ("whole, but a pod has a chip", decide(P300S, BY_BOARD, HALF_HELD), []),
        ("free", decide(P300S, BY_BOARD), []),
        ("each chip is a device", decide(P300S), []),
        ("a chip waits for its serial", decide(WAITING_FOR_SERIAL), []),
        ("a chip is missing", decide(P300S[:1]), []),
    ],
    "the node": [
        ("a full disk", decide([WELL]), [FULL]),
        ("still", decide([WELL]), [FULL]),
        ("no longer", decide([WELL]), []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_each_change_is_one_line_of_the_log(golden: Golden, name: str) -> None:
    """Neither new numbers nor what nobody uses are lines."""
    lines: list[str] = []
    former: Mapping[str, ttdp.Condition] = {}
    for title, decision, more in STORIES[name]:
        present = ttdp.conditions(decision, [*ttdp.problems_of(decision), *more])
        lines += [f"== {title}\n"]
        lines += [f"{level} {line}\n" for level, line in ttdp.changes(former, present)]
        former = present
    golden(f"log of {name}", "".join(lines))


def test_each_fault_has_one_reason_with_the_command_that_helps(
    node: SimulatedNode, golden: Golden, stalls: None
) -> None:
    """It comes last, so that it can be pasted; none takes a card from another driver."""
    (card,) = node.add("p150a")
    file = node.borrowed(*node.number_of(0))
    devices, hidden = card.class_directory.parent, node.root / "hidden"

    def hide() -> None:
        card.freeze()
        devices.rename(hidden)

    def show() -> None:
        hidden.rename(devices)
        card.thaw()

    steps: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("well", node.tick, node.tick),
        ("vanished", card.vanish, card.come_back),
        ("not bound", card.unbind, card.bind),
        ("not loaded", node.unload_driver, node.load_driver),
        ("vfio-pci", lambda: card.bind_to("vfio-pci"), lambda: card.keep_for("(null)")),
        ("unbound again", card.unbind, card.bind),
        ("no class device", hide, show),
        ("no file", card.device_node.unlink, lambda: card.device_node.symlink_to(file)),
        ("reset", card.reset, card.post_reset),
        ("dead", card.die, card.revive),
        ("unreadable", lambda: card.fail("tt_serial"), lambda: card.restore("tt_serial")),
        ("frozen", card.freeze, card.thaw),
        ("hot", lambda: card.heat(80.25), lambda: card.heat(40)),
        ("tripped", card.trip, node.tick),
        ("silent", card.silence, card.speak),
    ]
    lines = []
    for title, happens, ends in steps:
        watched = WatchedNode(node, temperature_limit=80)
        watched.look()
        happens()
        for _ in range(3):
            node.tick()
            watched.now += 10
            watched.look()
        lines.append(f"{title}: {watched.kind(card.bdf)}: {watched.chips[card.bdf].reason}\n")
        ends()
    watched.look(blocked=frozenset({card.bdf}))
    lines.append(f"blocked: {watched.chips[card.bdf].reason}\n")
    golden("reasons", "".join(lines).replace(str(node.root), "ROOT"))


# -- answers ---------------------------------------------------------------------------------------

# Numbers run against the addresses, as a reload of the driver can leave them.
THREE = [chip(0xC1, number=0), chip(0x0A, number=1), chip(0x03, number=7)]
ADDRESSES = "0000:03:00.0,0000:0a:00.0,0000:c1:00.0"
MOUNTS = (Mount("/srv/m", "/m", True), Mount("/run/locks/n150", "/dev/shm"))


def edits(chips: list[Chip], links: Mapping[str, str] | None = None, **settings: Any) -> ttdp.Edits:
    return ttdp.container_edits(chips, links or {}, Settings(**settings), MOUNTS, "a token")


@pytest.mark.parametrize(
    ("style", "of_three", "of_one"),
    [("bdf", ADDRESSES, "0000:c1:00.0"), ("index", "0,1,2", "0"), ("none", None, None)],
)
def test_visible_devices_has_three_settings(
    style: str, of_three: str | None, of_one: str | None
) -> None:
    """Addresses, positions inside the container (never the host's numbers), or not set."""
    for chips, value in ((THREE, of_three), (THREE[:1], of_one)):
        variables = edits(chips, visible_devices=style).envs
        assert variables.get("TT_VISIBLE_DEVICES") == value
        assert variables["TT_DEVICE_PLUGIN_DEVICES"] == (ADDRESSES if chips is THREE else bdf(0xC1))


def test_an_answer_has_device_files_mounts_variables_its_token_and_nothing_else() -> None:
    """Read and write but no mknod; on the host by udev's link if there is one; in any order."""
    links = {"0000:03:00.0": "/dev/tenstorrent/by-pci/0000:03:00.0"}
    answer = edits(THREE, links)

    assert [(each.host_path, each.container_path, each.permissions) for each in answer.devices] == [
        ("/dev/tenstorrent/by-pci/0000:03:00.0", "/dev/tenstorrent/7", "rw"),
        ("/dev/tenstorrent/1", "/dev/tenstorrent/1", "rw"),
        ("/dev/tenstorrent/0", "/dev/tenstorrent/0", "rw"),
    ]
    mounts = [(each.host_path, each.container_path, each.read_only) for each in answer.mounts]
    assert mounts == [("/srv/m", "/m", True), ("/run/locks/n150", "/dev/shm", False)]
    assert answer.envs.keys() == {"TT_DEVICE_PLUGIN_DEVICES", "TT_VISIBLE_DEVICES"}
    assert dict(answer.annotations) == {"tenstorrent.com/hold": "a token"}
    assert not answer.cdi_devices
    assert all(edits([*order], links) == answer for order in itertools.permutations(THREE))


def test_the_strategy_cdi_names_cdi_devices_instead_of_device_files() -> None:
    """With the same variables, and tenstorrent.com whatever the resources' domain is."""
    answer = edits(THREE, device_list_strategy="cdi", resource_domain="a.b")

    names = [f"tenstorrent.com/device={address}" for address in ADDRESSES.split(",")]
    assert [device.name for device in answer.cdi_devices] == names
    assert answer.envs == edits(THREE).envs and not answer.devices


REPLICAS = [f"{bdf(1)}::0", f"{bdf(1)}::1", f"{bdf(3)}::0"]


@pytest.mark.parametrize(
    ("containers", "code", "reason"),
    [
        ([], "INVALID_ARGUMENT", "names no container"),
        ([[bdf(1)], []], "INVALID_ARGUMENT", "a container requests no devices"),
        ([[bdf(1), bdf(1)]], "INVALID_ARGUMENT", f"duplicate device '{bdf(1)}'"),
        ([[bdf(1)], [bdf(1)]], "INVALID_ARGUMENT", f"duplicate device '{bdf(1)}'"),
        ([["x" * 100_000]], "NOT_FOUND", "tenstorrent.com/n150 has no device 'x"),
        ([[bdf(2)]], "FAILED_PRECONDITION", f"device {bdf(2)}: it is ill"),
        ([[bdf(4)]], "FAILED_PRECONDITION", f"device {bdf(4)} is reserved for the pod that"),
    ],
)
def test_an_impossible_allocation_is_refused(
    containers: list[list[str]], code: str, reason: str
) -> None:
    """With the code of the cause, and a message of one line."""
    chips = [chip(1), chip(2, fault=Kind.HOT), chip(3), chip(4)]
    held = [hold("n150", bdf(4), buses=[4])]
    (resource,) = decide(chips, Settings(exclude=(bdf(4),)), held).resources.values()

    ttdp.check_request(resource, [[bdf(1), bdf(3)]])
    assert resource.refused == {bdf(2), bdf(4)}
    with pytest.raises(ttdp.RequestError) as refused:
        ttdp.check_request(resource, containers)
    found, message = refused.value.args
    assert found.name == code and reason in message and len(message) < 400


def test_a_container_gets_one_replica_unless_more_are_allowed() -> None:
    """Then it gets the distinct devices behind its replicas, once each."""
    entry = (SharedResource("n150", 2),)
    for is_strict in (True, False):
        sharing = Sharing(fail_requests_greater_than_one=is_strict, resources=entry)
        (resource,) = decide([chip(1), chip(3)], Settings(sharing=sharing)).resources.values()
        ttdp.check_request(resource, [[each] for each in REPLICAS])
        with pytest.raises(ttdp.RequestError) if is_strict else contextlib.nullcontext() as refused:
            ttdp.check_request(resource, [REPLICAS])
        assert not refused or refused.value.args[0].name == "INVALID_ARGUMENT"
    assert [each.address for each in resource.chips([*REPLICAS, "gone"])] == [bdf(1), bdf(3)]


# -- any values ------------------------------------------------------------------------------------

versions = st.text("aZ019._-+/ \nü😀", max_size=90)


@hypothesis_settings(deadline=None, max_examples=50)
@given(versions, versions)
@example("1" * 90, f"..{'2' * 61}.5")
def test_labels_are_valid_whatever_versions_are_reported(firmware: str, driver: str) -> None:
    """The API server accepts each name and value; a name that is too long is left out."""
    part = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
    sharing = Sharing(resources=(SharedResource("n150", 2, "x" * 57),))

    text = ttdp.labels_file(
        decide([chip(1, firmware=firmware)], Settings(sharing=sharing), driver=driver)
    )

    assert f"tenstorrent.com/{'x' * 57}.count=1\n" in text and "x.memory" not in text
    for line in text.splitlines():
        assert re.fullmatch(rf"tenstorrent\.com/{part}={part}", line), line


@hypothesis_settings(deadline=None)
@given(st.text('ab"\\\n\r\t\x00\x85é\u2028😀'))
def test_a_label_of_a_metric_can_have_any_value(value: str) -> None:
    """In one line; backslashes, quotes and newlines are escaped as the format requires."""
    found = ttdp.Samples("tt_", {"x": "X."})
    found.add("x", 1, label=value)

    line = found.text().split("\n", 2)[2].removesuffix("\n")
    match = re.fullmatch(r'tt_x\{label="((?:[^"\\\n]|\\[\\n"])*)"\} 1', line)
    assert match and re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), match[1]) == value
