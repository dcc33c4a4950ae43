"""`check`: whether a node is fit, what is not in order, and what to do about it."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttdp
from tests.commands import Answer, Host, ended, host_with, wait_for_reader

FIRST = "0000:01:00.0"
Finding = tuple[str, str, str]


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Host]:
    """A host with an n150, and nothing wrong with it."""
    with host_with(short_tmp, "n150") as host:
        yield host


def complaint(answer: Answer, level: str, subject: str) -> str:
    """Return the text of the one line that is not ok; a FAIL, and nothing else, is status 1."""
    assert [found[:2] for found in answer.complaints] == [(level, subject)], answer.out
    assert answer.status == int(level == "FAIL") and answer.err == ""
    return answer.complaints[0][2]


def test_a_sound_node_is_in_order(host: Host) -> None:
    """Configuration, driver, devices, hugepages, the kubelet's directory and socket: status 0."""
    answer = host.run_anew("check")
    kubelet = f"{host.plugins}/kubelet.sock"
    assert answer.findings == [
        ("ok", "configuration", "valid"),
        ("ok", "driver", "2.10.1-pre"),
        ("ok", FIRST, f"n150, {host.node.chips[0].device_node}, healthy"),
        ("ok", "hugepages", "0 of 1 GiB; none are needed"),
        ("ok", "kubelet", f"{host.plugins} can be written to"),
        ("ok", "kubelet", f"{kubelet} answers"),
    ]
    assert (answer.status, answer.err) == (0, "")


# -- the configuration -----------------------------------------------------------------------------


def test_a_bad_configuration_is_named_and_the_rest_is_checked(host: Host) -> None:
    """With the defaults, and so on this very machine."""
    answer = host.run_anew("check", "--log-level=loud")
    level, subject, text = answer.findings[0]
    assert (level, subject, answer.status) == ("FAIL", "configuration", 1)
    assert "--log-level: 'loud'" in text and "debug, info, warning or error" in text
    assert len(answer.findings) > 3


def test_the_configuration_alone_is_checked_at_once(host: Host) -> None:
    """One line, for `systemctl reload` and the package."""
    good = host.run("check", "--config-only")
    assert (good.findings, good.status) == ([("ok", "configuration", "valid")], 0)
    bad = host.run("check", "--config-only", "--log-level=loud")
    assert "--log-level: 'loud'" in complaint(bad, "FAIL", "configuration")


def test_what_is_to_be_shared_and_is_not_there_is_named(host: Host) -> None:
    """A device that is selected and missing."""
    config = host.root / "config.toml"
    entry = 'name = "n150"\nreplicas = 2\nrename = "half"\ndevices = ["0000:99:00.0"]\n'
    config.write_text(f"[[sharing.resources]]\n{entry}")
    text = complaint(host.run("check", f"--config-file={config}"), "warn", "sharing")
    assert text == "n150: no device is called '0000:99:00.0'"


# -- driver and devices ----------------------------------------------------------------------------


def test_without_a_driver_nothing_works(host: Host) -> None:
    """The devices that are on the bus are counted."""
    host.node.unload_driver()
    answer = host.run("check")
    driver, devices = answer.complaints
    assert driver[:2] == ("FAIL", "driver") and "modprobe tenstorrent" in driver[2]
    assert devices == ("warn", "devices", "1 on this node; the driver has none of them")


@pytest.mark.parametrize("version", ["1.34", "2.5.0"])
def test_a_driver_that_shows_no_heartbeat_is_old(short_tmp: Path, version: str) -> None:
    """Firmware that stops is not noticed."""
    with host_with(short_tmp, "n150", driver=version) as host:
        text = complaint(host.run("check"), "warn", "driver")
    assert version in text and "2.7" in text


def test_without_a_device_one_knows_how_to_look_for_it(host: Host) -> None:
    """It is no error."""
    host.node.chips[0].vanish()
    assert "lspci -d 1e52:" in complaint(host.run("check"), "warn", "devices")


def test_firmware_that_has_stopped_is_named_with_the_remedy_for_that_chip(host: Host) -> None:
    """Without an address the reset would be every card's."""
    host.node.chips[0].freeze()
    text = complaint(host.run("check"), "FAIL", FIRST)
    assert "heartbeat stalled" in text and text.endswith(f"tt-smi -r {FIRST}")


def test_a_wrong_node_is_named(host: Host) -> None:
    """What is no character device is no device of ours."""
    node = host.node.chips[0].device_node
    node.unlink()
    node.touch()
    assert f"{node} is not a character device" in complaint(host.run("check"), "FAIL", "devices")


def test_a_node_that_goes_meanwhile_is_worth_no_traceback(host: Host) -> None:
    """Between the two looks, whichever line is about it then."""
    (chip,) = host.node.chips
    node, fifo = chip.device_node, chip.attribute("tt_heartbeat")
    chip.block()
    with host.running("check") as process:
        wait_for_reader(fifo)
        node.unlink()
        chip.unblock()
        answer = ended(process)
    (finding,) = answer.complaints
    assert finding[:2] == ("FAIL", FIRST) and "No such file" in finding[2]
    assert (answer.status, answer.err) == (1, "")


def test_a_node_that_is_not_for_everybody_is_named(host: Host) -> None:
    """A terminal's stands in for it, which any user can have."""
    (chip,) = host.node.chips
    ends = pty.openpty()
    terminal = os.ttyname(ends[1])
    os.chmod(terminal, 0o620)
    number = os.stat(terminal).st_rdev
    chip.device_node.unlink()
    chip.device_node.symlink_to(terminal)
    chip.write("dev", f"{os.major(number)}:{os.minor(number)}\n".encode())
    text = complaint(host.run("check"), "warn", FIRST)
    for descriptor in ends:
        os.close(descriptor)
    assert "has mode 0620, not 0666" in text and "udev rules" in text


def test_a_function_that_no_driver_has_is_named(host: Host) -> None:
    """With the command that binds it."""
    host.node.add("p150a")[0].unbind()
    text = complaint(host.run("check"), "warn", "0000:02:00.0")
    assert "echo 0000:02:00.0 > /sys/bus/pci/drivers/tenstorrent/bind" in text


def test_silent_firmware_is_named(host: Host) -> None:
    """It may be late, or dead."""
    host.node.chips[0].silence()
    assert "firmware is silent" in complaint(host.run("check"), "warn", FIRST)


def test_a_link_that_is_narrower_than_it_can_be_is_named(host: Host) -> None:
    """The classic silent fault. A speed that drops at rest is none."""
    (chip,) = host.node.chips
    chip.write("current_link_speed", b"2.5 GT/s PCIe\n")
    assert host.run("check").complaints == []
    chip.write("current_link_width", b"4\n")
    text = complaint(host.run("check"), "warn", FIRST)
    assert text.startswith("PCI link of 4 lanes where it can have 16; reseat the card")


def test_a_chip_that_was_seen_and_is_gone_is_named(host: Host) -> None:
    """The daemon's memory of this boot has it."""
    chip = host.node.add("p150a")[0]
    remember(host)
    chip.vanish()
    assert "PCI device is gone" in complaint(host.run("check"), "FAIL", chip.bdf)


def remember(host: Host) -> None:
    """Let the daemon have been there: its state has the chips that there are."""
    flags = dict(flag[2:].split("=") for flag in host.flags)
    settings = ttdp.load_settings({key.replace("-", "_"): text for key, text in flags.items()}, {})
    fleet = ttdp.Fleet({}, [])
    for function in fleet.observe(settings):
        reading = ttdp.Reading(function, ttdp.read_telemetry(function), True, None)
        fleet.learn([reading], settings.health, 0.0)
    (host.root / "state.json").write_text(json.dumps({"boot": None, "chips": fleet.memory()}))
    host.environ["STATE_DIRECTORY"] = str(host.root)


# -- hugepages -------------------------------------------------------------------------------------


def reserve_hugepages(host: Host, count: int, *, mounted: bool = True, others: int = 0) -> None:
    """Pages of 1 GiB, and their mount under the host's own /dev, after so many others."""
    host.node.set_hugepages(count)
    overlay = "overlay /run/containerd/rootfs/{:064x} overlay rw,relatime 0 0\n"
    lines = [overlay.format(number) for number in range(others)]
    target = f"{host.node.root}/dev/hugepages-1G"
    lines += [f"hugetlbfs {target} hugetlbfs rw,pagesize=1024M 0 0\n"] if mounted else []
    mounts = host.node.root / "proc/mounts"
    mounts.unlink()
    mounts.write_text("".join(lines))


@pytest.fixture
def needy(host: Host) -> Host:
    """A host with a further Wormhole, which is not behind an IOMMU."""
    host.node.add("n150")
    return host


def test_a_kernel_that_has_no_such_pages_is_named(needy: Host) -> None:
    """One for 64 KiB pages, say: there is no directory for those of 1 GiB."""
    assert "this kernel has none" in complaint(needy.run("check"), "warn", "hugepages")


def test_a_wormhole_without_iommu_needs_hugepages(needy: Host) -> None:
    """Four for each of its chips; the text says how to get them."""
    reserve_hugepages(needy, 0)
    text = complaint(needy.run("check"), "warn", "hugepages")
    assert "0 of 1 GiB" in text and "1 Wormhole" in text and "hugepages=4" in text


def test_an_iommu_that_translates_nothing_is_none(host: Host) -> None:
    """Its group is of the type identity."""
    host.node.set_iommu(FIRST, "identity")
    reserve_hugepages(host, 0)
    assert "0 of 1 GiB" in complaint(host.run("check"), "warn", "hugepages")


def test_too_few_hugepages_are_named(needy: Host) -> None:
    """Three where four are needed."""
    reserve_hugepages(needy, 3)
    assert "3 of 1 GiB" in complaint(needy.run("check"), "warn", "hugepages")


def test_hugepages_that_are_not_mounted_are_of_no_use(needy: Host) -> None:
    """The text says where they belong."""
    reserve_hugepages(needy, 4, mounted=False)
    assert "/dev/hugepages-1G is not mounted" in complaint(needy.run("check"), "warn", "hugepages")


@pytest.mark.parametrize("others", [0, 500])
def test_hugepages_that_are_enough_are_in_order(needy: Host, others: int) -> None:
    """On a node with many pods' mounts, too."""
    reserve_hugepages(needy, 4, others=others)
    assert needy.run("check").complaints == []


def test_a_blackhole_needs_no_hugepages(host: Host) -> None:
    """Behind an IOMMU or not."""
    host.node.add("p150a")
    assert host.run("check").complaints == []


# -- the kubelet -----------------------------------------------------------------------------------


def test_a_kubelet_that_does_not_run_is_named(host: Host) -> None:
    """There is no socket, or nobody listens on it."""
    sock = host.plugins / "kubelet.sock"
    sock.unlink()
    assert f"{sock} is not there" in complaint(host.run("check"), "warn", "kubelet")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sock))
    assert f"nobody listens on {sock}" in complaint(host.run("check"), "warn", "kubelet")


def test_a_directory_that_is_not_there_is_named(host: Host) -> None:
    """A kubelet that is installed later makes it."""
    shutil.rmtree(host.plugins)
    assert f"{host.plugins} is not there" in complaint(host.run("check"), "warn", "kubelet")


def test_a_directory_that_cannot_be_written_is_named(host: Host) -> None:
    """No socket of ours can be made there."""
    host.plugins.chmod(0o555)
    answer = host.run_anew("check", as_other=True)
    host.plugins.chmod(0o755)
    assert "/dp cannot be written" in complaint(answer, "FAIL", "kubelet")


def test_who_may_not_look_is_told_so(host: Host) -> None:
    """An ordinary user; that says nothing of the node."""
    host.plugins.chmod(0)
    answer = host.run_anew("check", as_other=True)
    host.plugins.chmod(0o755)
    text = complaint(answer, "warn", "kubelet")
    assert text.endswith("you may not look there; run as root")


def write_checkpoint(host: Host, content: object) -> None:
    (host.plugins / ttdp.CHECKPOINT).write_text(json.dumps(content))


def test_another_plugin_under_our_name_is_named(host: Host) -> None:
    """The kubelet's record has IDs that are none of ours."""
    registered = {"tenstorrent.com/n150": ["somebody-elses"], "example.org/x": ["x"]}
    write_checkpoint(host, {"Data": {"PodDeviceEntries": None, "RegisteredDevices": registered}})
    text = complaint(host.run("check"), "FAIL", "kubelet")
    assert text.startswith("tenstorrent.com/n150 has the devices 'somebody-elses': another plugin")


def test_a_record_that_nobody_understands_is_named(host: Host) -> None:
    """What is offered anew is withheld then."""
    write_checkpoint(host, {"Data": 5})
    assert "cannot be understood" in complaint(host.run("check"), "warn", "kubelet")


# -- the CDI file ----------------------------------------------------------------------------------


def write_cdi(host: Host, nodes: dict[str, str]) -> None:
    """A CDI file that gives each of these chips this node."""
    host.cdi_file.parent.mkdir(exist_ok=True)
    functions = [
        ttdp.PciFunction(bdf, "wormhole", None, None, 0, path, "") for bdf, path in nodes.items()
    ]
    host.cdi_file.write_text(ttdp.cdi_spec(functions, ttdp.Settings(), ()) or "")


def test_a_cdi_file_that_is_true_is_in_order(host: Host) -> None:
    """It says of each chip where its node is."""
    write_cdi(host, {FIRST: str(host.node.chips[0].device_node)})
    assert ("ok", "CDI", f"{host.cdi_file} describes the devices") in host.run("check").findings


def test_a_cdi_file_that_is_false_is_named(host: Host) -> None:
    """Swapped nodes, a chip that is gone, one that is missing."""
    (second,) = host.node.add("p150a")
    paths = [str(chip.device_node) for chip in host.node.chips]
    swapped = {FIRST: paths[1], second.bdf: paths[0]}
    stale = {FIRST: paths[0], second.bdf: paths[1], "0000:99:00.0": "/dev/tenstorrent/9"}
    lacking = {FIRST: paths[0]}
    expected = [f"'{FIRST}', '{second.bdf}'", "'0000:99:00.0'", f"'{second.bdf}'"]
    for nodes, false in zip((swapped, stale, lacking), expected, strict=True):
        write_cdi(host, nodes)
        text = complaint(host.run("check"), "FAIL", "CDI")
        assert text == f"{host.cdi_file} is false of {false}; is the service running?"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"devices": [{"name": "all"}]}', "null"])
def test_a_cdi_file_of_garbage_is_named(host: Host, content: str) -> None:
    """Whatever has become of it."""
    host.cdi_file.parent.mkdir()
    host.cdi_file.write_text(content)
    text = complaint(host.run("check"), "FAIL", "CDI")
    assert text.startswith(f"{host.cdi_file} cannot be read: ")


def install_containerd(host: Host, version: str) -> None:
    """Let containerd be of this version, in its own words."""
    (host.root / "bin").mkdir()
    program = host.root / "bin/containerd"
    program.write_text(f"#!/bin/sh\necho containerd github.com/containerd/containerd {version}\n")
    program.chmod(0o755)
    host.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"


def test_no_cdi_file_matters_where_containers_depend_on_it(host: Host) -> None:
    """With device_list_strategy = "cdi"."""
    install_containerd(host, "1.7.24~ds1 1.7.24~ds1-6")
    answer = host.run("check", "--device-list-strategy=cdi")
    assert str(host.cdi_file) in complaint(answer, "FAIL", "CDI")


def test_a_containerd_that_cannot_read_the_file_is_named(host: Host) -> None:
    """Debian 12 has 1.6; it matters only with device_list_strategy = "cdi"."""
    install_containerd(host, "1.6.20~ds1 1.6.20~ds1-1+deb12u1")
    write_cdi(host, {FIRST: str(host.node.chips[0].device_node)})
    assert host.run("check").complaints == []
    answer = host.run("check", "--device-list-strategy=cdi")
    assert "containerd 1.6.20 cannot read CDI files" in complaint(answer, "warn", "CDI")
