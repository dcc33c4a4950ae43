"""Inventory: a node is seen as the real driver's captures are, and garbage in it harms nothing."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.chips import decide
from tests.conftest import StartDaemon
from tests.world.captures import capture, capture_names
from tests.world.kubelet import Kubelet
from tests.world.node import CARDS, Chip, SimulatedNode
from tests.world.processes import workspace
from tests.world.simulation import settings_of
from tests.world.watched import WatchedNode
from ttdp import Kind, Mount, PciFunction, Reading, Settings


def functions(node: SimulatedNode) -> dict[str, PciFunction]:
    """Return what a first scan finds."""
    watched = WatchedNode(node)
    watched.scan()
    return {address: chip.function for address, chip in watched.chips.items()}


@pytest.fixture
def chip(node: SimulatedNode) -> Chip:
    """A Blackhole alone on a node."""
    return node.add("p150a")[0]


# -- every capture ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=capture_names())
def captured(request: pytest.FixtureRequest) -> Iterator[tuple[str, SimulatedNode]]:
    """Each capture in turn, with its name."""
    with workspace() as directory:
        yield request.param, SimulatedNode.from_capture(directory, request.param)


def shown(name: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each bound function of a capture."""
    return {
        each["path"].rsplit("/")[-1]: each["pci"] | each["class"] | each.get("sensors", {})
        for each in capture(name)["functions"]
        if "class" in each
    }


def test_every_function_of_a_capture_is_found_as_it_was(
    captured: tuple[str, SimulatedNode],
) -> None:
    """With its device file, architecture, card and NUMA node."""
    name, node = captured
    numbers = {each["path"].rsplit("/")[-1]: each["ordinal"] for each in capture(name)["functions"]}

    found = functions(node)

    assert {address: each.number for address, each in found.items()} == numbers
    for address, function in found.items():
        path = f"{node.root}/dev/tenstorrent/{numbers[address]}"
        assert (function.path, function.file_fault, function.driver) == (path, None, "tenstorrent")

    for address, texts in shown(name).items():
        function = found[address]
        assert function.arch == {"0x401e": "wormhole", "0xb140": "blackhole"}[texts["device"]]
        assert function.subsystem == int(texts["subsystem_device"], 16)
        numa_node = -1 if function.numa_node is None else function.numa_node
        assert str(numa_node) == texts["numa_node"]


VALUES: dict[str, Callable[[Reading], Any]] = {
    "tt_card_type": lambda reading: reading.identity.card,
    "tt_serial": lambda reading: reading.identity.serial,
    "tt_asic_id": lambda reading: reading.identity.asic_id,
    "tt_fw_bundle_ver": lambda reading: reading.identity.firmware,
    "tt_therm_trip_count": lambda reading: reading.trips,
    "temp1_input": lambda reading: reading.temperature,
    "temp1_max": lambda reading: reading.throttles_at,
    "tt_heartbeat": lambda reading: reading.heartbeat,
}


def test_telemetry_and_sensors_of_a_capture_are_read_as_they_were(
    captured: tuple[str, SimulatedNode],
) -> None:
    """Every attribute that the capture has, and no other; firmware that reports none is silent."""
    name, node = captured
    for address, texts in shown(name).items():
        reading = WatchedNode(node).read(functions(node)[address])

        assert reading and reading.fault is None
        assert reading.is_silent is texts.keys().isdisjoint(VALUES)
        for attribute, value_of in VALUES.items():
            value = value_of(reading)
            if attribute.startswith("temp1") and value is not None:
                value = round(value * 1000)
            assert (None if value is None else str(value)) == texts.get(attribute)
        assert reading.sensors.keys() == texts.keys() & {each.attribute for each in ttdp.SENSORS}


# -- functions -------------------------------------------------------------------------------------


def test_the_pci_subsystem_indicates_the_card_until_the_firmware_reports_it(chip: Chip) -> None:
    """A Galaxy Blackhole with 7 of 8 memory tiles is a Galaxy, with less memory."""
    codes = {card: each.code for card, each in CARDS.items()}
    assert {card: code for code, card in ttdp.CARDS.items() if code != 0x202} == codes
    assert {ttdp.board_of_card(card) for card in codes} == ttdp.MEMORY.keys()

    for code, card, memory in (
        (0x47, "galaxy-blackhole", 32768),
        (0x202, "galaxy-blackhole", 28672),
        (0x43, "p100a", 28672),
        (0x99, None, 0),
    ):
        chip.write("subsystem_device", f"0x{code:04x}\n".encode())
        found = ttdp.Chip(functions(chip.node)[chip.bdf])
        assert (found.card_type, found.memory) == (card, memory)
        assert found.is_galaxys is str(card).startswith("galaxy")
        assert found.board_type == ttdp.board_of_card(card or "blackhole")


@pytest.mark.parametrize(
    ("attribute", "text", "is_named"),
    [
        ("vendor", b"0x10de\n", False),
        ("device", b"0xfaca\n", True),  # a Grayskull
        ("device", b"garbage\n", True),
    ],
)
def test_a_generation_that_is_not_known_is_named_and_never_a_chip(
    node: SimulatedNode, attribute: str, text: bytes, is_named: bool
) -> None:
    """Other vendors' functions are ignored."""
    strange, known = node.add("p150a") + node.add("n150")
    strange.write(attribute, text)
    watched = WatchedNode(node)

    for _ in range(2):
        watched.scan()
        assert watched.inventory.unsupported == ((strange.bdf,) if is_named else ())
        assert watched.chips.keys() == {known.bdf}


@pytest.mark.parametrize("late", ["vendor", "device", "subsystem_device"])
def test_a_function_whose_attributes_are_not_there_yet_is_looked_at_again(
    chip: Chip, late: str
) -> None:
    """The kernel makes the directory before its attributes."""
    path = chip.attribute(late)
    hidden = path.rename(chip.node.root / "hidden")
    watched = WatchedNode(chip.node)
    watched.scan()
    assert watched.chips == {}

    hidden.rename(path)
    watched.scan()
    assert watched.chips[chip.bdf].card_type == "p150a"


def test_a_numa_node_that_is_corrected_is_seen_at_the_next_scan(chip: Chip) -> None:
    """An administrator can write the attribute; a kernel without NUMA has none."""
    watched = WatchedNode(chip.node)
    for text, number in ((b"1\n", 1), (b"0\n", 0), (b"-1\n", None), (b"2\n", 2), (None, None)):
        chip.remove("numa_node") if text is None else chip.write("numa_node", text)
        watched.scan()
        assert watched.chips[chip.bdf].function.numa_node == number


def test_odd_names_of_class_devices_are_ignored(chip: Chip) -> None:
    """The chip beside them is found."""
    for name in ("tenstorrent!", "tenstorrent!0x1", "tenstorrent0", "power"):
        (chip.class_directory.parent / name).mkdir()
    assert functions(chip.node)[chip.bdf].number == chip.ordinal


@pytest.mark.parametrize(
    ("content", "version"),
    [(b"2.10.1\n", "2.10.1"), (b"2.1\x1b[2J\xff", r"2.1\x1b[2J�"), (None, "unknown")],
)
def test_any_module_can_have_any_version(
    node: SimulatedNode, content: bytes | None, version: str
) -> None:
    """Control characters are escaped, as it is printed on terminals."""
    file = node.root / "sys/module/tenstorrent/version"
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    settings = settings_of(node, node.root)
    assert ttdp.driver_version(settings) == version

    node.unload_driver()
    assert ttdp.driver_version(settings) is None


@pytest.mark.parametrize(
    ("text", "driver"), [("(null)", None), ("", None), ("vfio-pci", "vfio-pci")]
)
def test_a_function_can_be_kept_for_one_driver(chip: Chip, text: str, driver: str | None) -> None:
    """The kernel shows "(null)", older ones an empty line, for none."""
    chip.write("driver_override", f"{text}\n".encode())
    assert ttdp.driver_override(functions(chip.node)[chip.bdf]) == driver


def test_chips_that_come_and_go_are_seen_as_they_are_or_not_at_all(node: SimulatedNode) -> None:
    """At every step of a plug, a rebinding, a renumbering and a removal, none is another card."""
    watched = WatchedNode(node)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        watched.scan()
        for each in watched.inventory.present:
            card = CARDS["n300" if each.address == "0000:01:00.0" else "p150a"]
            assert each.subsystem == card.code

    node.on_step = step
    first, second = node.add("n300", numa_node=0) + node.add("p150a", numa_node=1)
    first.rebind()
    node.swap_ordinals(first.bdf, second.bdf)
    second.vanish()

    assert steps > 100 and len(watched.chips) == 2


# -- garbage, and errors of the daemon itself ------------------------------------------------------

IDS = ["vendor", "device", "subsystem_device"]
attributes = st.sampled_from([*VALUES, *(each.attribute for each in ttdp.SENSORS), *IDS])
nearly = st.sampled_from([b"-2\n", b"0x\n", b"1_0\n", b"9" * 20, b"unknown\n", "1.٣.0\n".encode()])


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Chip]:
    """A p150a whose attributes are overwritten, beside a sound one; many examples share it."""
    with workspace() as directory:
        yield SimulatedNode.from_capture(directory, "p150ax2").chip("0000:01:00.0")


@hypothesis_settings(deadline=None, max_examples=60)
@given(st.dictionaries(attributes, st.binary(max_size=20) | nearly, min_size=1),
       st.sampled_from([0, 0, 6000]))  # fmt: skip
def test_garbage_in_attributes_never_raises(
    fuzzed: Chip, content: dict[str, bytes], more: int
) -> None:
    """Binary, empty, huge: the other chip is healthy, and a kubelet can be sent the list."""
    for attribute, data in content.items():
        fuzzed.write(attribute, data + b"x" * more)
    watched = WatchedNode(fuzzed.node)
    try:
        watched.look()
    finally:
        for attribute in content:
            fuzzed.restore(attribute)

    assert watched.chips["0000:02:00.0"].fault is None
    assert decide([*watched.chips.values()]).resources


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", ["open", "listdir", "readlink", "stat"])
def test_a_scan_that_fails_changes_nothing(
    node: SimulatedNode, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Only "not found" means absence: no chip is gone, and the driver is as ever."""
    node.add("n150")[0].unbind()
    node.add("n150")
    watched = WatchedNode(node)
    watched.look()
    before, driver = dict(watched.chips), watched.inventory.driver

    monkeypatch.setattr(f"os.{call}", failing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        watched.scan()

    assert (watched.chips, watched.inventory.driver) == (before, driver)


# -- device files ----------------------------------------------------------------------------------

INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda path: None, "does not exist"),
    "file": (lambda path: path.touch(0o666), "is not a character device"),
    "directory": (lambda path: path.mkdir(), "is not a character device"),
    "fifo": (os.mkfifo, "is not a character device"),
    "link to itself": (lambda path: path.symlink_to(path.name), "does not exist"),
    "other number": (lambda path: path.symlink_to("/dev/zero"), "is device 1:5, but sysfs has 1:3"),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_a_chip_is_listed_once_its_device_file_is_valid(node: SimulatedNode, what: str) -> None:
    """udev can be slower than a scan, and a runtime can have made a directory there."""
    (wrong,) = node.add("n150")
    path = wrong.device_node
    hidden = path.rename(node.root / "hidden")
    make, text = INSTEAD[what]
    make(path)
    watched = WatchedNode(node)

    watched.look()
    assert not watched.chips[wrong.bdf].is_listed
    assert watched.chips[wrong.bdf].fault == ttdp.Fault(
        Kind.DEVICE_FILE, f"device file is invalid: {path} {text}"
    )

    if path.is_dir():
        path.rmdir()
    hidden.rename(path)
    watched.look()
    assert watched.chips[wrong.bdf].is_listed and watched.chips[wrong.bdf].fault is None


@pytest.mark.parametrize("content", [b"", b"1:99\n", b"1:3:0\n", None])
def test_a_device_file_of_another_number_than_sysfs_has_is_invalid(
    chip: Chip, content: bytes | None
) -> None:
    """A container would get another device; it is also invalid if sysfs has no number."""
    chip.remove("dev") if content is None else chip.write("dev", content)
    assert functions(chip.node)[chip.bdf].file_fault


@pytest.mark.parametrize("target", ["../0", "{file}", "../8", None])
def test_a_link_is_used_if_it_leads_to_the_chips_device_file_now(
    chip: Chip, target: str | None
) -> None:
    """A runtime resolves it at each start of the container."""
    function = functions(chip.node)[chip.bdf]
    chip.by_pci.unlink()
    if target:
        chip.by_pci.symlink_to(target.format(file=function.path))

    found = ttdp.link_path(settings_of(chip.node, chip.node.root), function)

    assert found == (str(chip.by_pci) if target in ("../0", "{file}") else None)


async def test_no_device_file_is_ever_opened(
    node: SimulatedNode, kubelet: Kubelet, start: StartDaemon, opened: list[str]
) -> None:
    """That would power the chip up; and one that another program has with O_EXCL would block."""
    node.add("p150a")
    await start()
    await kubelet.run_pod("train", "tenstorrent.com/p150")

    assert any(path.endswith("tt_heartbeat") for path in opened)
    assert not [path for path in opened if path.startswith((f"{node.root}/dev/", "/dev/tenst"))]


openings: list[list[str]] = []  # those who want to know what is opened


def _note_opening(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and openings and isinstance(arguments[0], (str, bytes)):
        openings[-1].append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opening)  # sees every way of opening a file that Python has


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The paths of all files that this process opens."""
    openings.append([])
    yield openings[-1]
    openings.pop()


# -- processes and mounts --------------------------------------------------------------------------


def test_processes_on_a_chip_are_named_and_those_of_pods_are_known(chip: Chip) -> None:
    """One that has it open twice is one; one without a name has ended, or is hidden."""
    path = [str(chip.device_node)]
    chip.node.start_process(9, "0::/kubepods.slice/kubepods-pod1.slice/cri-1.scope", path)
    chip.node.start_process(7, "0::/user.slice", [*path, *path], "tt-smi")
    chip.set_pids([9, 7, 7, 5])
    settings, function = settings_of(chip.node, chip.node.root), functions(chip.node)[chip.bdf]

    assert ttdp.processes_on(settings, function) == [
        {"pid": 5, "command": "?", "of_pod": False},
        {"pid": 7, "command": "tt-smi", "of_pod": False},
        {"pid": 9, "command": "python3", "of_pod": True},
    ]

    chip.set_pids(range(1, 400_000))  # any user can open a device file so often
    assert len(ttdp.processes_on(settings, function) or ()) == 1000

    chip.set_pids([7, 0])
    assert ttdp.processes_on(settings, function) is None
    chip.pids.unlink()
    assert ttdp.processes_on(settings, function) is None


def test_mounts_are_the_configured_ones_and_hugepages_that_exist(tmp_path: Path) -> None:
    """Below root. A configured mount need not exist; at the path of another it replaces that."""
    other, instead = Mount("/does/not/exist", "/x"), Mount("/mine", "/dev/hugepages-1G")
    large, small = (Mount(f"{tmp_path}/dev/{name}", f"/dev/{name}") for name in ttdp.HUGETLBFS)

    def mounts(*configured: Mount, hugepages: str = "host") -> list[Mount]:
        return ttdp.host_mounts(
            Settings(root=str(tmp_path), mounts=configured, hugepages=hugepages)
        )

    assert mounts(other) == [other]
    for mount in (small, large):
        Path(mount.host).mkdir(parents=True)
    assert mounts() == mounts(hugepages="private") == [large, small]
    assert mounts(other, instead) == [other, instead, small]
    assert mounts(other, instead, hugepages="none") == [other, instead]
