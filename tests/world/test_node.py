"""The simulated node shows what the captures of the real driver show."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.world.captures import capture, capture_names, captured_uevents, compact
from tests.world.node import BORROWED, Chip, SimulatedNode, Ticker, wire
from tests.world.processes import finished
from tests.world.tree import errno_of, observe

NUMBERS = [(245, ordinal) for ordinal in range(32)]  # of every capture
DRIVER_RELEASES = ("1.34", "2.0.0", "2.5.0", "2.9.0", "2.10.0")


def as_built_here(facts: dict[str, Any], node_kind: str) -> dict[str, Any]:
    """The capture's facts, with the numbers and modes of borrowed nodes in place of its own."""
    for function in facts["functions"]:
        function.pop("board", None)
        if node_kind == "link":
            major, minor = [*BORROWED][function["ordinal"] % len(BORROWED)]
            function |= {"dev": f"{major}:{minor}", "mode": None}
            if "class" in function:
                uevent = f"MAJOR={major}\nMINOR={minor}\nDEVNAME=tenstorrent/{function['ordinal']}"
                function["class"] |= {"dev": f"{major}:{minor}", "uevent": uevent}
    facts.pop("events_on_load", None)
    return facts


def facts_of(root: Path, node_kind: str) -> dict[str, Any]:
    """The tree, reduced like a capture.

    Link nodes that borrowed one number share the first one's char link.
    """
    facts = compact(observe(root))
    if node_kind == "link":
        for function in facts["functions"]:
            function["mode"] = None
    return facts


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory in memory where there is such a place: a Galaxy is 2500 files."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(params=["auto", "link"])
def nodes(request: pytest.FixtureRequest) -> Any:
    """Both kinds of node that the present user can have."""
    return request.param


@pytest.fixture
def events() -> list[bytes]:
    return []


@pytest.fixture
def build(tmp_path: Path, events: list[bytes]) -> Callable[..., SimulatedNode]:
    """A node of these cards with the captures' numbers, whose uevents go into `events`."""

    def build(*cards: str, firmware: bool = True, driver: str = "2.10.1-pre") -> SimulatedNode:
        node = SimulatedNode(tmp_path, driver=driver, nodes="link", numbers=NUMBERS)
        for card in cards:
            node.add(card, firmware=firmware)
        node.on_uevent = events.append
        return node

    return build


def captured_messages(name: str, step: str) -> list[bytes]:
    """The step's kernel messages, without those of the platform's ACPI, all of number 0."""
    return [wire(action, devpath, env, 0) for action, devpath, env in captured_uevents(name, step)
            if env["SUBSYSTEM"] != "wakeup"]  # fmt: skip


def taken(events: list[bytes]) -> list[bytes]:
    """The events so far, without their sequence numbers; the next call starts anew."""
    messages = [re.sub(rb"SEQNUM=\d+\0$", b"SEQNUM=0\0", message) for message in events]
    events.clear()
    return messages


# -- trees -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name for name in capture_names() if not name.startswith("galaxy")]
)
def test_every_capture_round_trips(tmp_path: Path, name: str, nodes: Any) -> None:
    """A tree built from a capture has its names, contents, modes, links, numbers, and no others."""
    SimulatedNode.from_capture(tmp_path, name, nodes=nodes)
    kind = SimulatedNode.open(tmp_path)._state["nodes"]
    expected = as_built_here(capture(name), kind)
    observed = facts_of(tmp_path, kind)
    if name == "n150-no-udev-rules":  # of this one only /dev was recorded
        observed["module"], observed["directories"] = {}, ["/dev/tenstorrent"]
        (function,) = observed["functions"]
        function |= {"hwmon": None, "pids": None}
        links = {
            char: target
            for char, target in function["links"].items()
            if char.startswith("/sys/dev/")
        }
        observed["functions"] = [{k: links if k == "links" else v for k, v in function.items()
                                  if k in expected["functions"][0]}]  # fmt: skip
    assert observed == expected


@pytest.mark.parametrize("name", [name for name in capture_names() if name.startswith("galaxy")])
def test_galaxies_round_trip(tmp_path: Path, name: str) -> None:
    """A Galaxy's 32 functions are rebuilt as captured, with the driver's ordinals and trays."""
    node = SimulatedNode.from_capture(tmp_path, name, nodes="link", numbers=NUMBERS)
    observed, expected = compact(observe(node.root)), capture(name)
    for function in [*observed["functions"], *expected["functions"]]:
        function.pop("mode")
    assert observed == expected


BOARDS: dict[str, list[dict[str, Any]]] = {
    "n150": [{"card": "n150"}],
    "p150ax2": [{"card": "p150a"}] * 2,
    "p300cx2": [{"card": "p300c"}] * 2,
    "n300x4-numa2": [{"card": "n300", "bdf": f"0000:{bus}:00.0", "numa_node": numa}
                     for bus, numa in (("a1", 1), ("a2", 1), ("21", 0), ("22", 0))],
    "galaxy-wormhole": [{"card": "galaxy-wormhole"}],
    "galaxy-blackhole": [{"card": "galaxy-blackhole"}],
    **{f"n150-p150a-kmd-{release}": [{"card": "n150"}, {"card": "p150a"}]
       for release in DRIVER_RELEASES},
}  # fmt: skip
CHIPS_OWN = {"tt_serial": "[0-9A-F]{16}", "tt_asic_id": "[0-9A-F]{16}", "tt_heartbeat": r"\d+"}


@pytest.mark.parametrize("name", BOARDS)
def test_added_boards_look_like_captured_ones(tmp_path: Path, name: str) -> None:
    """`add` gives a board the captured names, values, links and ordinals.

    Only IDs, heartbeat, a Galaxy's NUMA nodes and addresses in the configuration space are others.
    """
    expected = capture(name)
    node = SimulatedNode(tmp_path, driver=expected["driver"], nodes="link", numbers=NUMBERS)
    for board in BOARDS[name]:
        node.add(**board)
    observed = compact(observe(tmp_path))

    serials: list[list[str]] = []
    for facts in (observed, expected):
        serials.append([function["class"]["tt_serial"] for function in facts["functions"]])
        for function in facts["functions"]:
            own = function["class"]
            assert all(
                re.fullmatch(form, own[name]) for name, form in CHIPS_OWN.items() if name in own
            )
            function["class"] = {
                name: "own" if name in CHIPS_OWN else value for name, value in own.items()
            }
            function["by_id"] = [re.sub("-.*", "", link) for link in function["by_id"]]
            config = bytes.fromhex(function["pci"]["config"])
            function["pci"]["config"] = config[:0x10] + config[0x28:]
            function.pop("mode")
            if name.startswith("galaxy"):
                del function["pci"]["numa_node"], function["pci"]["local_cpulist"]
    assert observed["functions"] == expected["functions"]
    boards = [[those.index(serial) for serial in those] for those in serials]
    assert boards[0] == boards[1]


def test_serial_encodes_the_board(build: Callable[..., SimulatedNode]) -> None:
    """Bits 36-51 of a generated serial are the board's code, and so is the PCI subsystem device."""
    node = build("n300", "p100a", "p300b")
    for facts in (chip.facts for chip in node.chips):
        code = int(facts.telemetry["tt_serial"], 16) >> 36 & 0xFFFF
        assert code == int(facts.pci["subsystem_device"], 16)


def test_nodes_agree_with_sysfs(tmp_path: Path, nodes: Any) -> None:
    """A node of either kind is a character device with the number of sysfs's `dev` to stat()."""
    node = SimulatedNode(tmp_path, nodes=nodes)
    for chip in node.add("n150") + node.add("p300c"):
        status = chip.device_node.stat()
        assert chip.device_node.is_char_device()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
        assert chip.attribute("dev").read_text() == f"{number}\n"


def test_numbers_are_honoured(tmp_path: Path) -> None:
    """`numbers` decides major and minor by ordinal."""
    node = SimulatedNode(tmp_path, numbers=[(1, 5), (1, 3)])
    first, second = node.add("p300a")
    assert [os.minor(chip.device_node.stat().st_rdev) for chip in (first, second)] == [5, 3]


# -- udev, and drivers that come late --------------------------------------------------------------


def links(node: SimulatedNode) -> dict[str, str]:
    """What is in /dev/tenstorrent: links with where they lead, and nodes."""
    top = node.root / "dev/tenstorrent"
    return {
        str(path.relative_to(top)): os.readlink(path) if path.parent != top else ""
        for path in top.rglob("*")
        if os.path.lexists(path) and not (path.is_dir() and not path.is_symlink())
    }


def test_udev_links_nodes_by_address(build: Callable[..., SimulatedNode]) -> None:
    """A link by PCI address comes after the kernel's `add` and goes after its `remove`."""
    node = build()
    seen = []
    node.on_uevent = lambda message: seen.append(
        (message.split(b"@")[0].decode(), sorted(links(node)))
    )
    (chip,) = node.add("n150", asic_id="3B1D7A5620E41F08")
    by_id = "by-id/wormhole-3B1D7A5620E41F08"
    assert links(node) == {"0": "", "by-pci/0000:01:00.0": "../0", by_id: "../0"}
    assert chip.by_pci.resolve() == chip.device_node.resolve()
    chip.unbind()
    assert not (node.root / "dev/tenstorrent").exists()
    both = ["0", "by-pci/0000:01:00.0"]
    assert seen == [
        ("add", []), ("add", ["0"]), ("add", both), ("change", both),
        ("bind", sorted([*both, by_id])),
        ("remove", sorted([*both, by_id])), ("remove", sorted([*both[1:], by_id])), ("unbind", []),
    ]  # fmt: skip


@pytest.mark.parametrize("udev_rules", [True, False])
def test_without_our_rule_there_are_no_links_by_address(tmp_path: Path, udev_rules: bool) -> None:
    """The driver's rules and ours are two things."""
    for name, ours in (("with", True), ("without", False)):
        node = SimulatedNode(tmp_path / name, udev_rules=udev_rules, links=ours)
        node.add("n150")
        assert {path.partition("/")[0] for path in links(node)} == {
            "0", *["by-pci"] * ours, *["by-id"] * udev_rules
        }  # fmt: skip


def test_links_can_be_stale(build: Callable[..., SimulatedNode]) -> None:
    """Without udev nothing follows; when it runs again, links of what went are left behind."""
    node = build("n150", "n150")
    first, second = node.chips
    node.stop_udev()
    node.swap_ordinals(first.bdf, second.bdf)
    assert [os.readlink(chip.by_pci) for chip in (first, second)] == ["../0", "../1"]
    assert [chip.ordinal for chip in (first, second)] == [1, 0]
    second.vanish()
    node.start_udev()
    assert [os.readlink(chip.by_pci) for chip in (first, second)] == ["../1", "../1"]
    first.mislead("../7")
    assert os.readlink(first.by_pci) == "../7"
    first.mislead()
    assert not os.path.lexists(first.by_pci)
    first.rebind()
    assert os.readlink(first.by_pci) == "../1"


def test_a_driver_that_comes_late(tmp_path: Path, events: list[bytes]) -> None:
    """A module that is loaded takes one function after the other, and is live after the last."""
    node = SimulatedNode(tmp_path, nodes="link", numbers=NUMBERS, loaded=False)
    first, second = node.add("p150a") + node.add("p150a")
    sys_ = node.root / "sys"
    assert not list(sys_.glob("class/tenstorrent*")) and not (sys_ / "module").exists()
    assert len(list((sys_ / "bus/pci/devices").iterdir())) == 2
    node.on_uevent = events.append
    node.load_driver(probe=False)
    initstate = sys_ / "module/tenstorrent/initstate"
    assert initstate.read_text() == "coming\n" and not (first.ordinal or second.ordinal)
    node.probe(first.bdf)
    assert first.ordinal == 0 and second.ordinal is None and initstate.read_text() == "coming\n"
    node.probe(second.bdf)
    assert second.ordinal == 1 and initstate.read_text() == "live\n"
    assert taken(events) == captured_messages("p150ax2", "module-load")


def test_functions_of_other_drivers_are_left_alone(build: Callable[..., SimulatedNode]) -> None:
    """A function that vfio-pci has, or shall have, is none of the driver's."""
    node = build("n150", "n150", "n150")
    ours, theirs, kept = node.chips
    pci = node.root / "sys/bus/pci/devices"
    theirs.bind_to("vfio-pci")
    kept.unbind()
    kept.keep_for("vfio-pci")
    assert (pci / theirs.bdf / "driver").resolve().name == "vfio-pci"
    assert not (pci / kept.bdf / "driver").exists()
    assert "DRIVER=vfio-pci\n" in (pci / theirs.bdf / "uevent").read_text()
    assert (pci / kept.bdf / "driver_override").read_text() == "vfio-pci\n"
    node.unload_driver()
    node.load_driver()
    assert [chip.ordinal for chip in (ours, theirs, kept)] == [0, None, None]
    theirs.unbind()
    theirs.keep_for("(null)")
    theirs.bind()
    assert theirs.ordinal == 1 and (pci / theirs.bdf / "driver").resolve().name == "tenstorrent"


def test_devices_come_and_go_in_parts(build: Callable[..., SimulatedNode]) -> None:
    """The class leads to a device whose number is not there yet; it goes before attributes do."""
    node = build()
    states = set()

    def look() -> None:
        entry = (
            node.root / "sys/devices/pci0000:00/0000:00:02.0/0000:01:00.0/tenstorrent/tenstorrent!0"
        )
        names = ("device", "dev", "tt_serial", "device/numa_node")
        seen = {name for name in names if (entry / name).exists()}
        seen |= {"class"} if (node.root / "sys/class/tenstorrent/tenstorrent!0").exists() else set()
        states.add(
            frozenset(
                seen | ({"node"} if (node.root / "dev/tenstorrent/0").is_symlink() else set())
            )
        )

    node.on_step = look
    (chip,) = node.add("n150")
    coming, states = states, set()
    chip.vanish()
    whole = {"device", "dev", "tt_serial", "device/numa_node", "class", "node"}
    assert {frozenset(), frozenset(whole), frozenset(whole - {"dev", "node", "tt_serial"})} < coming
    assert {frozenset(), frozenset(whole - {"node"}), frozenset({"tt_serial"})} < states


# -- uevents ---------------------------------------------------------------------------------------


def test_life_of_a_blackhole_pair_replays(
    build: Callable[..., SimulatedNode], events: list[bytes]
) -> None:
    """Load, remove, rescan, unbind, bind, unload, load (renumbered), removal of a dead function:
    message by message.
    """
    node = build("p150a", "p150a")
    chip = node.chip("0000:01:00.0")
    node.unload_driver()
    taken(events)

    node.load_driver()
    assert taken(events) == captured_messages("p150ax2", "module-load")
    chip.vanish()
    assert taken(events) == captured_messages("p150ax2", "pci-remove")
    chip.come_back()
    assert taken(events) == captured_messages("p150ax2", "pci-rescan")
    chip.unbind()
    assert taken(events) == captured_messages("p150ax2", "unbind")
    chip.bind()
    assert taken(events) == captured_messages("p150ax2", "bind")
    node.unload_driver()
    assert taken(events) == captured_messages("p150ax2", "rmmod")
    node.load_driver()
    assert taken(events) == captured_messages("p150ax2", "modprobe-again")
    chip.die(bus=True)
    chip.vanish()
    assert taken(events) == captured_messages("p150ax2", "unplug-surprise-bus-dead")


def test_life_of_a_wormhole_replays(
    build: Callable[..., SimulatedNode], events: list[bytes]
) -> None:
    """The same of a Wormhole, whose telemetry events the real driver puts before or behind `bind`
    at random.
    """
    node = build("n150")
    (chip,) = node.chips
    steps: dict[str, Callable[[], None]] = {
        "pci-remove": chip.vanish, "pci-rescan": chip.come_back,
        "unbind": chip.unbind, "bind": chip.bind,
        "rmmod": node.unload_driver, "modprobe-again": node.load_driver,
    }  # fmt: skip
    for step, operation in steps.items():
        operation()
        messages = taken(events)
        assert sorted(messages) == sorted(captured_messages("n150", step)), step
        assert step == "bind" or messages == captured_messages("n150", step)


def test_adding_a_card_is_a_hot_plug(
    build: Callable[..., SimulatedNode], events: list[bytes]
) -> None:
    """`add` sends the events of the platform's plug, `vanish` those of its unplug."""
    (chip,) = build().add("n150")
    assert taken(events) == captured_messages("hotplug-n150", "plug")
    chip.vanish()
    assert taken(events) == captured_messages("hotplug-n150", "unplug")


def test_late_wormhole_speaks_with_events(
    build: Callable[..., SimulatedNode], events: list[bytes]
) -> None:
    """Wormhole firmware that is late: no telemetry at probe, hwmon `add` and `change` when it is
    ready.
    """
    node = build("n150", firmware=False)
    node.unload_driver()
    taken(events)
    node.load_driver()
    assert taken(events) == captured_messages("n150-late", "module-load-not-ready")
    node.chips[0].speak()
    assert taken(events) == captured_messages("n150-late", "firmware-becomes-ready")


def test_late_blackhole_needs_to_be_bound_again(
    build: Callable[..., SimulatedNode], events: list[bytes]
) -> None:
    """Blackhole's driver asks once: late firmware shows nothing until it is unbound and bound."""
    (chip,) = build("p150a", firmware=False).chips
    chip.speak()
    assert taken(events) == captured_messages("p150a-late", "firmware-becomes-ready") == []
    chip.rebind()
    assert taken(events) == captured_messages("p150a-late", "unbind-bind-when-ready")


@pytest.mark.parametrize("release", DRIVER_RELEASES)
def test_old_drivers_send_their_own_events(
    tmp_path: Path, events: list[bytes], release: str
) -> None:
    """Loading sends what was recorded: no `change` before 2.6, hwmon first before 2.5."""
    name = f"n150-p150a-kmd-{release}"
    node = SimulatedNode.from_capture(tmp_path, name)
    node.unload_driver()
    node.on_uevent = events.append
    node.load_driver()
    headers = [message.split(b"\0")[0].decode().split("@") for message in events]
    assert sorted(headers) == sorted(capture(name)["events_on_load"])
    assert headers == capture(name)["events_on_load"]


def test_faults_send_nothing(build: Callable[..., SimulatedNode], events: list[bytes]) -> None:
    """There is no event for a death, a stopped heartbeat, a reset or a failing attribute."""
    (chip,) = build("p150a").chips
    for operation in (chip.freeze, chip.die, chip.revive, chip.reset, chip.post_reset, chip.trip):
        operation()
    chip.fail("tt_serial", "EIO")
    assert events == []


def test_parts_appear_between_the_events(build: Callable[..., SimulatedNode]) -> None:
    """At `add` there is a node without telemetry, at `change` all is, at `remove` neither."""
    node = build()
    seen = []

    def look(message: bytes) -> None:
        found = [
            *node.root.glob("sys/class/tenstorrent/*"),
            *node.root.glob("sys/class/hwmon/*"),
            *node.root.glob("sys/class/tenstorrent/*/tt_serial"),
            *node.root.glob("dev/tenstorrent/*[0-9]"),
        ]
        seen.append((message.split(b"@")[0].decode(), sorted(path.name for path in found)))

    node.on_uevent = look
    (chip,) = node.add("n150")
    chip.vanish()
    assert seen == [
        ("add", []), ("add", ["0", "tenstorrent!0"]), ("add", ["0", "hwmon0", "tenstorrent!0"]),
        ("change", ["0", "hwmon0", "tenstorrent!0", "tt_serial"]),
        ("bind", ["0", "hwmon0", "tenstorrent!0", "tt_serial"]),
        ("remove", ["0", "tenstorrent!0", "tt_serial"]), ("remove", []), ("unbind", []),
        ("remove", []),
    ]  # fmt: skip
    assert not (node.root / "dev/tenstorrent").exists()


# -- what befalls a chip ---------------------------------------------------------------------------


COUNTER = "pcie_perf_counters/mst_rd_data_word_received0"


def reads(chip: Chip) -> dict[str, str]:
    """What attributes read that do not fail."""
    names = (
        "tt_heartbeat", "tt_card_type", "tt_serial", "tt_asic_id", "tt_aiclk", "tt_fw_bundle_ver",
        "temp1_input", "power1_input", "name", "vendor", "current_link_speed", COUNTER,
    )  # fmt: skip
    files = {name: chip.attribute(name) for name in names}
    return {name: file.read_text() for name, file in files.items() if errno_of(file) is None}


def test_dead_chip_reads_all_ones(build: Callable[..., SimulatedNode]) -> None:
    """Death after probe gives texts of the usual form and no error, until the chip revives."""
    (chip,) = build("n150").chips
    alive = reads(chip)
    chip.die(bus=True)
    assert reads(chip) == {
        "tt_heartbeat": "4294967295\n", "tt_card_type": "unknown\n",
        "tt_serial": "FFFFFFFFFFFFFFFF\n", "tt_asic_id": "FFFFFFFFFFFFFFFF\n",
        "tt_aiclk": "4294967295\n", "tt_fw_bundle_ver": "255.255.255.255\n",
        "temp1_input": "65535999\n", "power1_input": "4293967296\n", "name": "wormhole\n",
        "vendor": "0x1e52\n", "current_link_speed": "Unknown\n", COUNTER: "4294967295\n",
    }  # fmt: skip
    assert chip.attribute("config").read_bytes() == b"\xff" * 64
    chip.revive()
    assert reads(chip) == alive
    config = chip.attribute("config").read_bytes()
    ids = config[:4], config[0x2C:0x30]
    assert len(config) == 64 and ids == (b"\x52\x1e\x1e\x40", b"\x52\x1e\x18\x00")
    assert chip.attribute("config").stat().st_mode & 0o777 == 0o644
    chip.die()
    assert chip.attribute("config").read_bytes() == config


def test_reset_gives_enodata_and_a_lower_heartbeat(build: Callable[..., SimulatedNode]) -> None:
    """Every telemetry value is ENODATA until POST_RESET; then the heartbeat starts again."""
    (chip,) = build("p150a").chips
    chip.reset()
    for name in ("tt_serial", "temp1_max"):
        assert errno_of(chip.attribute(name)) == errno.ENODATA
    assert set(reads(chip)) == {"name", "vendor", "current_link_speed", COUNTER}
    chip.post_reset()
    assert chip.attribute("tt_heartbeat").read_text() == "20\n"


def test_blackhole_can_lose_its_telemetry_for_good(build: Callable[..., SimulatedNode]) -> None:
    """POST_RESET before Blackhole's firmware is ready leaves ENODATA until it is bound anew."""
    (chip,) = build("p150a").chips
    chip.reset()
    chip.post_reset(late=True)
    assert errno_of(chip.attribute("tt_heartbeat")) == errno.ENODATA
    chip.rebind()
    assert chip.attribute("tt_heartbeat").read_text() == "20\n"


def test_blocked_read_waits_and_gets_its_value(build: Callable[..., SimulatedNode]) -> None:
    """A blocked attribute holds its reader until `unblock` answers it and puts the file back."""
    (chip,) = build("n150").chips
    file, values = chip.attribute("tt_heartbeat"), list[str]()
    value = file.read_text()
    chip.block("tt_heartbeat")
    reader = threading.Thread(target=lambda: values.append(file.read_text()), daemon=True)
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()
    chip.unblock("tt_heartbeat")
    reader.join(5)
    assert values == [value] and file.read_text() == value


@pytest.mark.parametrize("attribute", ["temp1_input", "tt_heartbeat"])
def test_blocked_reader_survives_removal(
    build: Callable[..., SimulatedNode], attribute: str
) -> None:
    """When the function goes, whoever waits in a blocked read is let go."""
    (chip,) = build("n150").chips
    file = chip.attribute(attribute)
    chip.block(attribute)
    reader = threading.Thread(target=file.read_text, daemon=True)
    reader.start()
    reader.join(0.05)
    chip.vanish()
    reader.join(5)
    assert not reader.is_alive() and not file.exists()


def test_one_attribute_can_be_spoilt(build: Callable[..., SimulatedNode]) -> None:
    """A single attribute can fail, hold anything or be missing, and be as before."""
    (chip,) = build("n150").chips
    file = chip.attribute("temp1_input")
    before = file.read_bytes()
    chip.fail("temp1_input", "EIO")
    assert errno_of(file) == errno.EIO and not file.exists()
    chip.write("temp1_input", b"\xffgarbage")
    assert file.read_bytes() == b"\xffgarbage" and errno_of(file) is None
    chip.remove("temp1_input")
    assert not os.path.lexists(file) and errno_of(file) is None
    chip.restore("temp1_input")
    assert file.read_bytes() == before


def test_readings_can_be_set(build: Callable[..., SimulatedNode]) -> None:
    """Temperature, trip counter and holders are what the caller says, in the driver's units."""
    node = build("p150a")
    (chip,) = node.chips
    chip.heat(95.5)
    chip.trip(2)
    chip.set_pids([7, 0])
    assert chip.attribute("temp1_input").read_text() == "95500\n"
    assert chip.attribute("tt_therm_trip_count").read_text() == "2\n"
    assert (node.root / "proc/driver/tenstorrent/0/pids").read_text() == "7\n0\n"


def test_renumbering(build: Callable[..., SimulatedNode]) -> None:
    """Two chips can swap their ordinals; one that returns gets the lowest free number."""
    node = build("n150", "n150", "n150")
    first, second, third = node.chips
    node.swap_ordinals(first.bdf, second.bdf)
    assert [chip.ordinal for chip in (first, second, third)] == [1, 0, 2]
    first.vanish()
    second.vanish()
    assert first.ordinal is None
    first.come_back()
    second.come_back()
    assert [chip.ordinal for chip in (first, second, third)] == [0, 1, 2]
    assert [chip.bdf for chip in node.chips] == [third.bdf, first.bdf, second.bdf]


def test_only_the_living_beat(build: Callable[..., SimulatedNode]) -> None:
    """A tick advances healthy chips only: no frozen, dead, blocked or removed heartbeat."""
    node = build(*["n150"] * 5)
    alive, frozen, dead, blocked, gone = node.chips
    frozen.freeze()
    dead.die()
    blocked.block()
    gone.vanish()
    before = [reads(chip)["tt_heartbeat"] for chip in (alive, frozen, dead)]
    node.tick()
    after = [reads(chip)["tt_heartbeat"] for chip in (alive, frozen, dead)]
    assert [a != b for a, b in zip(after, before, strict=True)] == [True, False, False]
    assert blocked.attribute("tt_heartbeat").is_fifo()


def test_readers_never_see_half_a_value(build: Callable[..., SimulatedNode]) -> None:
    """While the heartbeat advances every read is whole, and a listing shows attributes only."""
    node = build("n150")
    (chip,) = node.chips
    file = chip.attribute("tt_heartbeat")
    names, first = set(os.listdir(file.parent)), int(file.read_text())
    with Ticker(node, interval=0.0005):
        for _ in range(500):
            assert re.fullmatch(r"\d+\n", file.read_text())
            assert {name for name in os.listdir(file.parent) if name[0] != "."} == names
    assert int(file.read_text()) > first


def test_hugepages_and_iommu(build: Callable[..., SimulatedNode]) -> None:
    """The node can have 1 GiB pages, and a function an IOMMU, which also survives a removal."""
    node = build("n150")
    (chip,) = node.chips
    node.set_hugepages(4)
    pool = node.root / "sys/kernel/mm/hugepages/hugepages-1048576kB"
    assert (pool / "nr_hugepages").read_text() == "4\n"
    assert (node.root / "dev/hugepages-1G").is_dir()
    assert "/dev/hugepages-1G hugetlbfs" in (node.root / "proc/mounts").read_text()
    node.set_iommu(chip.bdf, "DMA-FQ")
    chip.vanish()
    chip.come_back()
    assert (chip.attribute("vendor").parent / "iommu_group/type").read_text() == "DMA-FQ\n"


# -- by hand ---------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> str:
    return finished([sys.executable, "-m", "tests.world.node", *arguments]).stdout


def test_another_process_can_work_on_the_tree(tmp_path: Path) -> None:
    """The command line makes a node, prints the daemon's flags, and changes the tree."""
    flags = run(tmp_path, "create", "n150", "p300c")
    roots = {"sysfs": "sys", "dev": "dev", "proc": "proc"}
    wanted = [f"--{name}-root={tmp_path}/{directory}" for name, directory in roots.items()]
    assert flags.split() == wanted
    node = SimulatedNode.open(tmp_path)
    chip = node.chip("01:00.0")
    events = run(tmp_path, "vanish", "01:00.0")
    assert "remove@/devices/pci0000:00/0000:00:02.0/0000:01:00.0\n" in events
    assert chip.ordinal is None
    run(tmp_path, "come-back", "01:00.0", "--ordinal", "7")
    assert chip.ordinal == 7
    assert "tenstorrent/7" in run(tmp_path, "show")
