"""`check`: whether a node is fit, what is not in order, and the remedy."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
import os
import pty
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ttdp
from generated import deviceplugin_pb2 as pb
from tests.commands import Host, Served, forked, host_with
from tests.world.node import Chip as Card
from tests.world.processes import environment, until
from tests.world.simulation import kernel_errors, settings_of
from tests.world.tree import put
from ttdp import OWN_DIRECTORY, Reason, Settings, SharedResource, Sharing

FIRST = "0000:01:00.0"
N150 = "tenstorrent.com/n150"
Line = tuple[str, str, str]  # level, subject and text
NOT_RUNNING = ("FAIL", "service", "is not running; run: systemctl start tt-device-plugin")


@pytest.fixture(autouse=True)
def runtime_directory(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service of this machine is asked."""
    monkeypatch.setattr(ttdp, "RUNTIME_DIR", str(short_tmp))


@pytest.fixture
def host(short_tmp: Path) -> Iterator[Host]:
    """A host with an n150, on which nothing is wrong but that no daemon runs."""
    with host_with(short_tmp, "n150") as host:
        yield host


def findings(host: Host, *words: str) -> list[Line]:
    """Look at the node as `check` does; with the configuration that was made, if any."""
    file = host.root / "config.toml"
    config = [f"--config-file={file}"] if file.exists() else []
    _, options = ttdp.parse_command_line(["check", *host.flags, *config, *words])
    settings = ttdp.load_settings(vars(options), {})
    with kernel_errors():
        found = [*ttdp.Checks(settings, None).findings()]
    return [(each.level, each.subject, str(Reason(each.text, each.command))) for each in found]


def complaints(host: Host, *words: str) -> list[Line]:
    """Return what is not ok, except that no daemon runs."""
    return [line for line in findings(host, *words) if line[0] != "ok" and line != NOT_RUNNING]


def complaint(host: Host, level: str, subject: str, *words: str) -> str:
    """Return the text of the only complaint."""
    (line,) = complaints(host, *words)
    assert line[:2] == (level, subject)
    return line[2]


def test_a_sound_node_without_a_daemon_fails_for_that_only(host: Host) -> None:
    """Its service is started by the command; everything else is checked by one look."""
    answer = host.run("check")

    assert answer.findings == [
        ("ok", "configuration", "valid"),
        NOT_RUNNING,
        ("ok", "driver", "2.10.1-pre"),
        ("ok", FIRST, f"n150, {host.node.chips[0].device_node}, healthy"),
        ("ok", "hugepages", "0 pages of 1 GiB, none needed"),
        ("ok", "kubelet", f"{host.plugins}/kubelet.sock accepts connections"),
    ]
    assert (answer.status, answer.err) == (1, "")


# -- the configuration -----------------------------------------------------------------------------


def test_an_invalid_configuration_fails(host: Host) -> None:
    """Everything else is checked, except with --config-only, for `systemctl reload`.

    The service does not start with it, so nobody is told to start the service.
    """
    file = host.configure("log_level = 'loud'")
    problem = f"{file}: log_level: 'loud' is not valid; must be debug, info, warning or error"

    answer = host.run("check", f"--config-file={file}")
    assert answer.findings[:2] == [
        ("FAIL", "configuration", problem),
        ("FAIL", "service", "is not running, and cannot start: see configuration"),
    ]
    assert ("ok", "driver", "2.10.1-pre") in answer.findings and answer.err == ""

    only = host.run("check", "--config-only", f"--config-file={file}")
    assert (only.findings, only.status) == ([("FAIL", "configuration", problem)], 1)


def test_a_node_that_cannot_be_looked_at_fails_beside_what_is_known(host: Host) -> None:
    """What reads only this output has the reason, too."""
    file = host.configure("log_level = 'loud'")
    devices = host.node.root / "sys/bus/pci/devices"
    devices.chmod(0)

    answer = host.run_as_process("check", f"--config-file={file}", as_other=True)

    devices.chmod(0o755)
    configuration, node = answer.findings
    assert configuration[:2] == ("FAIL", "configuration")
    reason = f"cannot look at this node: {devices}/: Permission denied"
    assert (node, answer.status, answer.err) == (("FAIL", "node", reason), 1, "")


def test_a_variable_that_only_the_file_makes_valid_is_valid(host: Host) -> None:
    """The service runs with both, so the package's script must not reject the variable alone."""
    domain = {"TTDP_RESOURCE_DOMAIN": "3d.example"}
    flags = host.node.flags  # without --cdi-dir, which would outweigh the file

    file = host.configure("cdi_dir = ''")
    words = ["check", "--config-only", f"--config-file={file}", *flags]
    answer = forked(words, environment() | domain)
    assert (answer.findings, answer.status) == ([("ok", "configuration", "valid")], 0)

    file = host.configure("cdi_dir = '/run/cdi'")
    answer = forked(words, environment() | domain)
    assert answer.status == 1 and "TTDP_RESOURCE_DOMAIN: '3d.example' is not valid" in answer.err


def test_quiet_prints_only_what_is_not_ok(host: Host) -> None:
    """Nothing if all is well; the status is the same."""
    answer = host.run("check", "--quiet")
    assert (answer.findings, answer.status) == ([NOT_RUNNING], 1)

    answer = host.run("check", "--quiet", "--config-only")
    assert (answer.out, answer.status) == ("", 0)


def test_failures_come_first_in_what_others_cut(host: Host) -> None:
    """node-problem-detector's message has 1000 bytes: eight chips without firmware fill it."""
    for _ in range(15):
        add(host, "p150a")[0].silence()
    (host.root / "cdi").mkdir()

    lines = host.run("check", "--quiet").findings
    assert [line[:2] for line in lines[:2]] == [NOT_RUNNING[:2], ("FAIL", "CDI")]
    assert {level for level, *_ in lines[2:]} == {"warn"} and len(str(lines)) > 1000

    every = [line for line in host.run("check").findings if line[0] != "ok"]
    assert every[0] == NOT_RUNNING and every[1][0] == "warn" and sorted(every) == sorted(lines)


PROBLEM = "n150: chip does not respond (registers read as ones), and this is long"
COMMAND = f"tt-device-plugin fix {FIRST} --and-more-than-fits-into-a-line"


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int | None
) -> list[str]:
    """The lines of two findings, of which the first has a command; width: of the terminal."""
    monkeypatch.setattr(ttdp, "terminal_width", lambda: width)
    findings = [ttdp.Finding("FAIL", FIRST, PROBLEM, COMMAND), ttdp.Finding("warn", "chips", "no")]
    ttdp.print_findings(findings, is_quiet=False)

    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "warn  chips         no"
    return lines


def test_on_a_terminal_a_command_is_a_line_of_its_own_below_lines_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the width, it is never broken, so that it can be pasted."""
    for width in range(40, 111):
        *lines, shown = printed(monkeypatch, capsys, width)

        assert shown.strip() == COMMAND and lines[-1].endswith("run:")
        assert max(map(len, lines)) <= width


def test_in_a_pipe_a_command_ends_the_only_line_of_its_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that `grep` gets all of it."""
    assert printed(monkeypatch, capsys, None) == [f"FAIL  {FIRST}  {PROBLEM}; run: {COMMAND}"]


# -- the service -----------------------------------------------------------------------------------


@pytest.fixture
def served(served: Served) -> Served:
    """With an n150 behind an IOMMU."""
    add(served, "n150")
    return served


async def test_a_resource_that_is_not_registered_fails_while_a_kubelet_runs(served: Served) -> None:
    """The line has the reason that the kubelet gave."""
    served.kubelet.refuse_with(ttdp.Status.UNKNOWN, "not welcome", times=99)
    daemon = await served.serve()
    await until(lambda: "not welcome" in str(daemon.notes))

    answer = await served.ask("check")
    text = "not registered: kubelet rejected Register: not welcome"
    assert ("FAIL", N150, text) in answer.complaints


async def test_a_rejected_configuration_on_disk_fails(served: Served) -> None:
    """The daemon keeps the old one."""
    daemon = await served.serve()

    def load() -> ttdp.Settings:
        raise ttdp.ConfigError("/etc/x: unit: 'boards' is not valid; must be chip or board")

    daemon.loaded = load
    daemon.reload()
    await until(lambda: daemon.host.rejected)

    level, subject, text = (await served.ask("check")).findings[1]
    assert (level, subject) == ("FAIL", "service")
    rejected = "the configuration was rejected at the last reload: /etc/x: unit: 'boards' is"
    assert text.startswith(rejected) and text.endswith("run: systemctl reload tt-device-plugin")


# -- what is found on a node -----------------------------------------------------------------------


def add(host: Host, card: str, **more: Any) -> list[Card]:
    """Add a card behind an IOMMU, so that it needs no hugepages."""
    added = host.node.add(card, **more)
    for chip in added:
        host.node.set_iommu(chip.bdf)
    return added


def first(host: Host) -> Card:
    return host.node.chips[0]


def have_only_a_strange_card(host: Host) -> None:
    """One of a generation that is not known; whatever is bound to it."""
    (strange,) = add(host, "p150a", bdf="0000:05:00.0")
    strange.write("device", b"0xfaca\n")
    strange.bind_to("vfio-pci")
    first(host).vanish()


def give_away(host: Host, number: int) -> None:
    """Add cards that a virtual machine has had since boot."""
    for _ in range(number):
        add(host, "p150a")[0].bind_to("vfio-pci")


def add_a_p300_and_unload(host: Host) -> None:
    add(host, "p300c")
    host.node.unload_driver()


def make_a_link_to_nothing(host: Host) -> None:
    shutil.rmtree(host.plugins)
    host.plugins.symlink_to("nothing")


def write_entry_that_cannot_be_read(host: Host) -> None:
    answer = pb.ContainerAllocateResponse(envs={ttdp.ADDRESSES: FIRST})
    entry = {
        "PodUID": "u1",
        "ContainerName": "main",
        "ResourceName": N150,
        "DeviceIDs": "garbage",
        "AllocResp": base64.b64encode(answer.SerializeToString()).decode(),
    }
    data = {"PodDeviceEntries": [entry], "RegisteredDevices": {}}
    (host.plugins / ttdp.CHECKPOINT).write_text(json.dumps({"Data": data}))


def add_the_dra_driver(host: Host) -> None:
    """Add its CDI file and its registration socket, and those of another vendor."""
    write_cdi(host, {FIRST: str(first(host).device_node)})
    for name in ("k8s.tenstorrent.com-tenstorrent.com_0.json", "nvidia.com-gpu.yaml"):
        (host.root / "cdi" / name).touch()
    (host.root / "plugins_registry").mkdir()
    for name in ("tenstorrent.sock", "nvidia.com-gpu-reg.sock"):
        (host.root / "plugins_registry" / name).touch()


def share(host: Host) -> None:
    lines = ["[sharing]", f'lock_dir = "{host.root}/locks"']
    host.configure(*lines, "[[sharing.resources]]", 'name = "n150"', "replicas = 2")


CHECKPOINT = ttdp.CHECKPOINT
VFIO = "driver vfio-pci is bound; release the card there, or add it to exclude"
# How a line begins, and what was done to the node, or configured.
FINDINGS: dict[str, Callable[[Host], object]] = {
    # As in status and list: modprobe, once for all cards.
    "FAIL driver: driver not loaded, 3 Tenstorrent PCI functions; run: modprobe tenstorrent": (
        add_a_p300_and_unload
    ),
    # It is not a device of a resource.
    "warn 0000:02:00.0: p150a: driver is not bound; run: tt-device-plugin fix 0000:02:00.0": (
        lambda host: add(host, "p150a")[0].unbind()
    ),
    # There is no command: a virtual machine may have it, and unbinding would block. Nothing was
    # offered to pods that they could miss. The line names each card.
    f"warn 0000:02:00.0: p150a: {VFIO}": lambda host: give_away(host, 1),
    f"warn 2 chips: {VFIO}: 0000:02:00.0, 0000:03:00.0": lambda host: give_away(host, 2),
    "warn 0000:05:00.0: not supported: ": have_only_a_strange_card,
    # Some nodes of a cluster have no card.
    "warn chips: none found": lambda host: first(host).vanish(),
    # The firmware may be late, or dead.
    f"warn {FIRST}: no firmware telemetry; ": lambda host: first(host).silence(),
    f"warn {FIRST}: PCIe link is x4, card supports x16; reseat the card": (
        lambda host: first(host).write("current_link_width", b"4\n")
    ),
    # It is mounted all the same.
    "warn mounts: /nowhere does not exist; pods with devices cannot start": (
        lambda host: host.configure("[[mounts]]", 'host = "/nowhere"')
    ),
    "warn locks: {host.root}/locks is not a directory; run: mkdir -m 755 -p {host.root}": share,
    "warn kubelet: kubelet does not answer on {host.plugins}/kubelet.sock: No such file or "
    "directory; is it running?": lambda host: (host.plugins / "kubelet.sock").unlink(),
    # A kubelet makes it.
    "warn kubelet: {host.plugins} does not exist; no kubelet has run yet": (
        lambda host: shutil.rmtree(host.plugins)
    ),
    # The service says the same, and ends.
    "warn kubelet: {host.plugins} is a link to nothing; no kubelet has run yet": (
        make_a_link_to_nothing
    ),
    # Any user could lock it, which keeps the daemon out.
    "warn kubelet: every user can read {host.plugins}, and so lock it, which would keep the daemon "
    "from starting; run: chmod 0750 {host.plugins}": lambda host: host.plugins.chmod(0o755),
    f"warn kubelet: {CHECKPOINT} cannot be read; the kubelet writes it again when the next pod "
    "starts": lambda host: (host.plugins / CHECKPOINT).write_text("garbage"),
    # The chips of that pod can be given to another one.
    f"warn kubelet: {CHECKPOINT}: the entry of pod u1, container main cannot be read: its chips "
    "are not protected": write_entry_that_cannot_be_read,
    "warn allocators: Tenstorrent's DRA driver is on this node, too "
    "({host.root}/plugins_registry/tenstorrent.sock and 1 more), ": add_the_dra_driver,
    # It is needed where its directory is.
    "FAIL CDI: {host.cdi_file} does not exist; is the service running?": (
        lambda host: host.cdi_file.parent.mkdir()
    ),
}


@pytest.mark.parametrize("line", FINDINGS)
def test_what_is_wrong_is_one_line_with_its_remedy(host: Host, line: str) -> None:
    """There is no other complaint about it."""
    FINDINGS[line](host)

    ((level, subject, text),) = complaints(host)

    assert f"{level} {subject}: {text}".startswith(line.format(host=host))


SOUND: dict[str, Callable[[Host], object]] = {
    "firmware without a version": lambda host: first(host).remove("tt_fw_bundle_ver"),
    "firmware without a temperature": lambda host: first(host).remove("temp1_input"),
    "a link that is slow at rest": (
        lambda host: first(host).write("current_link_speed", b"2.5 GT/s PCIe\n")
    ),
    "two boards with one serial": (
        lambda host: [add(host, "p300c", serial="0000046131842007") for _ in range(2)]
    ),
    "no lock directory, as nothing is shared": (
        lambda host: host.configure("[sharing]", f'lock_dir = "{host.root}/locks"')
    ),
}


@pytest.mark.parametrize("what", SOUND)
def test_what_is_sound_is_no_complaint(host: Host, what: str) -> None:
    """Nobody is to look for what is not wrong."""
    SOUND[what](host)
    assert complaints(host) == []


def test_a_node_without_driver_and_cards_is_not_a_failure(host: Host) -> None:
    """Some nodes of a cluster have none."""
    first(host).vanish()
    host.node.unload_driver()
    text = "not loaded, and no card on the PCI bus needs it"
    assert complaints(host) == [("warn", "driver", text), ("warn", "chips", "none found")]


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("1.34", "1.34: tt-umd of August 2026 and later needs 2.0 or later"),
        ("2.0.0", "2.0.0 cannot report stopped firmware; update to 2.7 or later"),
        ("2.6.9", "2.6.9 cannot report stopped firmware; update to 2.7 or later"),
    ],
)
def test_a_driver_that_is_too_old_is_named(short_tmp: Path, version: str, problem: str) -> None:
    """tt-umd refuses it, or it has no heartbeat: firmware that stops goes unnoticed."""
    with host_with(short_tmp, "n150", driver=version) as host:
        assert complaint(host, "warn", "driver") == problem


def test_a_device_file_that_not_every_user_can_open_is_named(host: Host) -> None:
    """A terminal stands in for it, which any user can have."""
    (chip,) = host.node.chips
    ends = pty.openpty()
    terminal = os.ttyname(ends[1])
    os.chmod(terminal, 0o620)
    number = os.stat(terminal).st_rdev
    chip.device_node.unlink()
    chip.device_node.symlink_to(terminal)
    chip.write("dev", f"{os.major(number)}:{os.minor(number)}\n".encode())

    text = complaint(host, "warn", FIRST)

    for descriptor in ends:
        os.close(descriptor)
    assert "has mode 0620" in text and text.endswith("install the driver's udev rules")


# -- boards ----------------------------------------------------------------------------------------


@pytest.fixture
def empty(short_tmp: Path) -> Iterator[Host]:
    """A host without cards."""
    with host_with(short_tmp) as host:
        yield host


@pytest.mark.parametrize("unit", ["chip", "board"])
def test_galaxy_chips_on_a_virtual_machines_buses_are_a_warning(empty: Host, unit: str) -> None:
    """Nothing says which of them are on one tray, so none is a neighbour of another."""
    for _ in range(9):  # on the buses 01 to 09
        (chip,) = add(empty, "p150a")
        chip.write("subsystem_device", b"0x0047\n")
        chip.write("tt_card_type", b"galaxy-blackhole\n")
    add(empty, "p300c", firmware=False)  # to which its board matters only as a device

    found = complaints(empty, f"--unit={unit}")

    reason = "bus 09 is not one of a Galaxy's, so its trays are not known"
    text = f"not advertised: {reason}" if unit == "board" else reason
    addresses = ", ".join(f"0000:{bus:02x}:00.0" for bus in range(1, 10))
    assert ("warn", "9 chips", f"{text}: {addresses}") in found
    assert ("waiting for the board's serial number" in str(found)) is (unit == "board")


def test_a_board_of_which_chips_are_missing_is_a_warning(empty: Host) -> None:
    """Also if chips are devices: those that are there work, and nobody misses the others."""
    add(empty, "p300c", serial="0000046131842007")[-1].vanish()
    text = "only 1 of 2 chips of the board with serial 0000046131842007 found"
    assert complaint(empty, "warn", "chips") == text


# -- hugepages, locks, mounts ----------------------------------------------------------------------


def test_a_chip_without_a_translating_iommu_needs_four_hugepages(host: Host) -> None:
    """Of whatever architecture. The text has the boot option for all of them."""
    chips = host.node.add("p150a") + host.node.add("p150a")
    for chip, kind in zip(chips, ("identity", "DMA-FQ"), strict=True):
        host.node.set_iommu(chip.bdf, kind)

    for pages in (None, 1, 3):  # None: the kernel has none of 1 GiB
        if pages is not None:
            host.node.set_hugepages(pages)
        text = complaint(host, "warn", "hugepages")
        number = f"{pages or 0} page{'' if pages == 1 else 's'} of 1 GiB"
        assert text.startswith(
            f"{number}, but 1 chip without an IOMMU (or iommu=pt): 4 needed; "
            "add hugepagesz=1G hugepages=4 to the kernel command line"
        )

    host.node.set_hugepages(4)
    assert complaints(host) == []
    assert ("ok", "hugepages", "4 pages of 1 GiB, 4 needed") in findings(host)


def test_pages_without_their_file_system_are_a_warning(host: Host) -> None:
    """The boot option reserves them, but mounts nothing; a configuration can do without."""
    host.node.set_iommu(FIRST, "identity")
    host.node.set_hugepages(4)
    put(host.node.root / "proc/mounts", "hugetlbfs /dev/hugepages hugetlbfs rw,pagesize=2M 0 0")

    path = "/dev/hugepages-1G"
    assert complaint(host, "warn", "hugepages") == (
        f"no hugetlbfs is mounted on {path}, so containers get no pages of 1 GiB; run: "
        f"mountpoint -q {path} || mount -t hugetlbfs -o X-mount.mkdir,pagesize=1G hugetlbfs {path}"
    )

    (host.root / "pages").mkdir()
    host.configure("[[mounts]]", f'host = "{host.root}/pages"', f'container = "{path}"')
    assert complaints(host) == []
    host.configure('hugepages = "none"')
    assert complaints(host) == []


def test_hugepages_are_for_chips_in_service_that_have_a_device_file(host: Host) -> None:
    """Not for one that a virtual machine has, nor for one that is excluded."""
    other, excluded = host.node.add("n300") + host.node.add("n150")
    for chip in host.node.chips:
        host.node.set_iommu(chip.bdf, "identity")
    other.bind_to("vfio-pci")
    host.node.set_hugepages(4)
    host.configure(f'exclude = ["{excluded.bdf}"]')

    assert ("ok", "hugepages", "4 pages of 1 GiB, 4 needed") in findings(host)


def test_hugepages_that_count_towards_memory_limits_are_mentioned(host: Host) -> None:
    """As systemd 259 and later mounts the cgroup file system: it is how that host is, not wrong."""
    mounts = host.node.root / "proc/mounts"
    options = "rw,nosuid,nodev,noexec,relatime,nsdelegate,memory_recursiveprot"
    mounts.write_text(f"cgroup2 /sys/fs/cgroup cgroup2 {options} 0 0\n")
    text = "hugepages count towards a pod's memory limit (memory_hugetlb_accounting)"
    assert ("ok", "hugepages", text) not in findings(host)

    options += ",memory_hugetlb_accounting"
    mounts.write_text(f"cgroup2 /sys/fs/cgroup cgroup2 {options} 0 0\n")
    assert ("ok", "hugepages", text) in findings(host)


@pytest.mark.parametrize("is_mounted", [True, False])
def test_without_the_packages_tmpfs_the_command_that_mounts_it_is_shown(
    host: Host, monkeypatch: pytest.MonkeyPatch, is_mounted: bool
) -> None:
    """A mount unit of the package makes it."""
    default = Sharing().lock_dir
    monkeypatch.setattr("os.path.ismount", lambda path: is_mounted and path == default)
    sharing = Sharing(resources=(SharedResource("n150", 2),))
    settings = settings_of(host.node, host.plugins, sharing=sharing)

    findings = [*ttdp.Checks(settings, None).findings()]

    command = "systemctl start run-ttdp-shm.mount"
    finding = ttdp.Finding("warn", "locks", f"no tmpfs is mounted on {default}", command)
    assert (finding in findings) is not is_mounted


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to chown")
@pytest.mark.parametrize("owned", ["locks", "locks/n150"])
def test_a_lock_directory_that_is_not_roots_is_named(host: Host, owned: str) -> None:
    """Root in a container can take its /dev/shm, and remove the locks of others in it."""
    (host.root / "locks/n150").mkdir(parents=True)
    share(host)
    path = host.root / owned
    os.chown(path, 1234, 1234)

    problem = f"{path} belongs to user 1234, so containers may not take turns"
    assert complaints(host) == [("warn", "locks", f"{problem}; run: chown root {path}")]


# -- the kubelet -----------------------------------------------------------------------------------


@pytest.mark.parametrize("has_directory", [True, False])
def test_a_kubelet_where_all_kubelets_are_is_named_if_the_directory_is_another(
    host: Host, monkeypatch: pytest.MonkeyPatch, has_directory: bool
) -> None:
    """The directory is a constant of the kubelet's, which its --root-dir does not move."""
    constant = "/var/lib/kubelet/device-plugins"
    theirs = f"{constant}/kubelet.sock"
    monkeypatch.setattr("ttdp.exists", lambda path: path == theirs or os.path.exists(path))
    checks = ttdp.Checks(settings_of(host.node, host.plugins), None)
    text = f"a kubelet is on {constant}, where each kubelet is; remove device_plugin_dir"
    assert text not in [each.text for each in checks.findings()]

    shutil.rmtree(host.plugins)
    if has_directory:
        host.plugins.mkdir(mode=0o750)

    assert ttdp.Finding("warn", "kubelet", text) in [*checks.findings()]


@pytest.mark.parametrize(
    ("mode", "level", "problem"),
    [
        (0o555, "FAIL", " is not writable; run this as root, or check its mount"),
        (0, "warn", ": permission denied; run this as root"),
    ],
)
def test_a_directory_that_cannot_be_used_is_named(
    host: Host, mode: int, level: str, problem: str
) -> None:
    """A mount can be read-only; an ordinary user cannot enter it."""
    host.plugins.chmod(mode)

    answer = host.run_as_process("check", as_other=True)

    host.plugins.chmod(0o755)
    assert answer.complaints[0] == (level, "kubelet", f"{host.plugins}{problem}")


# -- the CDI file ----------------------------------------------------------------------------------


def write_cdi(host: Host, paths: dict[str, str]) -> None:
    """Write a CDI file with these device files."""
    host.cdi_file.parent.mkdir(exist_ok=True)
    functions = [
        ttdp.PciFunction(bdf, "wormhole", ordinal=0, path=path) for bdf, path in paths.items()
    ]
    host.cdi_file.write_text(ttdp.cdi_spec(functions, ttdp.Settings(), ()) or "")


def test_a_cdi_file_is_compared_with_the_device_files(host: Host) -> None:
    """Swapped, gone, missing: it is out of date."""
    (second,) = host.node.add("p150a")
    host.node.set_iommu(second.bdf)
    paths = [str(chip.device_node) for chip in host.node.chips]
    right = {FIRST: paths[0], second.bdf: paths[1]}
    write_cdi(host, right)
    assert ("ok", "CDI", f"{host.cdi_file} is up to date") in findings(host)

    swapped = {FIRST: paths[1], second.bdf: paths[0]}
    wrong = [
        (swapped, f"'{FIRST}', '{second.bdf}'"),
        ({**right, "0000:99:00.0": "/dev/tenstorrent/9"}, "'0000:99:00.0'"),
        ({FIRST: paths[0]}, f"'{second.bdf}'"),
    ]
    for described, stale in wrong:
        write_cdi(host, described)

        text = complaint(host, "FAIL", "CDI")
        assert text == f"{host.cdi_file} is out of date for {stale}; is the service running?"


async def test_cdi_without_its_directory_fails_though_the_service_runs(served: Served) -> None:
    """Pods cannot get devices, until the directory appears.

    The strategy is that of the service, which can have it from a variable of its unit.
    """
    await served.serve(N150, interval=0.1, device_list_strategy="cdi")
    text = f"{served.cdi_file} does not exist; {served.cdi_file.parent} does not exist"
    assert ("FAIL", "CDI", text) in (await served.ask("check")).complaints

    served.cdi_file.parent.mkdir()
    await until(served.cdi_file.exists)
    answer = await served.ask("check")
    assert ("ok", "CDI", f"{served.cdi_file} is up to date") in answer.findings


def test_a_cdi_file_that_cannot_be_read_fails(host: Host) -> None:
    """Garbage; a missing one, if containers depend on it; and what is not a file."""
    missing = f"{host.cdi_file} does not exist; is the service running?"
    assert complaint(host, "FAIL", "CDI", "--device-list-strategy=cdi") == missing

    host.cdi_file.parent.mkdir()
    for content in ("", "{", "[]", '{"devices": [{"name": "all"}]}', "null"):
        host.cdi_file.write_text(content)
        text = complaint(host, "FAIL", "CDI")
        assert text.startswith(f"{host.cdi_file} cannot be read: ")

    # To open a FIFO would block, and any user of that directory can make one.
    host.cdi_file.unlink()
    os.mkfifo(host.cdi_file)
    problem = ("FAIL", "CDI", f"{host.cdi_file} cannot be read: not a regular file")
    assert host.run("check").complaints == [problem]


# -- files for others ------------------------------------------------------------------------------


async def test_a_directory_that_cannot_be_made_fails(served: Served) -> None:
    """A pod that has it cannot start again, so `check` has the reason of the status."""
    served.node.set_hugepages(4)
    daemon = await served.serve(N150, interval=0.1)
    await served.kubelet.admit("pod", "main", {N150: 1})

    own = served.node.root / "dev/hugepages-1G" / OWN_DIRECTORY
    shutil.rmtree(own)
    own.touch()
    await until(lambda: daemon.host.problems)

    text = f"directory for containers cannot be used: {own}: Not a directory"
    assert ("FAIL", "directories", text) in (await served.ask("check")).complaints


@pytest.mark.parametrize("is_missing", [True, False])
@pytest.mark.parametrize(
    ("number", "is_roots", "command"),
    [
        (errno.EROFS, True, "mount -o remount,rw {hugetlbfs}"),
        (errno.EACCES, False, "chown root {found}"),
        (errno.EPERM, False, "chown root {found}"),
        (errno.EACCES, True, "chmod u+rwx,go-w {found}"),
        (errno.ENOTDIR, True, ""),
    ],
)
def test_the_command_for_a_directory_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    number: int, is_roots: bool, command: str, is_missing: bool,
) -> None:  # fmt: skip
    """Of what is missing, the one around it must be writable; or else its file system."""
    path = tmp_path / "one/two"
    path.parent.mkdir()
    if not is_missing:
        path.mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == str(tmp_path))
    monkeypatch.setattr(ttdp, "_is_roots", lambda status: is_roots)

    reason = ttdp.directory_problem(OSError(number, os.strerror(number), str(path)))

    found = path.parent if is_missing else path
    assert reason.command == command.format(hugetlbfs=tmp_path, found=found)
    assert reason.problem.endswith(f": {path}: {os.strerror(number)}")


async def test_a_directory_that_cannot_be_emptied_is_named_with_the_command(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container that has the host's hugetlbfs can choose any name: it is quoted, and one line."""
    served.node.set_hugepages(4)
    path = served.node.root / "dev/hugepages-1G" / OWN_DIRECTORY / "x; reboot\n<3>forged"
    path.mkdir(parents=True)
    monkeypatch.setattr(ttdp, "WRITTEN_WITHIN", 0.0)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(ttdp, "_remove_entry", busy)
    daemon = await served.serve(N150, interval=0.1)
    await until(lambda: daemon.host.directories.resisting)

    answer = await served.ask("check")

    text = f"{path} cannot be emptied: Device or resource busy"
    assert ttdp.printable(text) in caplog.messages
    found = f"{text}; run: rm -rf --one-file-system {shlex.quote(str(path))}"
    assert ("warn", "directories", ttdp.printable(found)) in answer.complaints


async def test_files_are_looked_for_where_the_service_writes_them(served: Served) -> None:
    """A variable of its unit is not one of the command."""
    other = served.root / "other"
    other.mkdir()
    await served.serve(N150, cdi_dir=str(other))

    answer = await served.ask("check")
    assert ("ok", "CDI", f"{other / ttdp.CDI_FILE} is up to date") in answer.findings


async def test_a_metrics_file_is_old_after_two_minutes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon writes it every 15 s; the log has the reason if it does not."""
    monkeypatch.setattr(ttdp, "METRICS_INTERVAL", 3600.0)  # it is written once
    file = served.root / "metrics/tt-device-plugin.prom"
    file.parent.mkdir()
    daemon = await served.serve(N150, metrics_file=str(file))
    await until(file.exists)
    os.utime(file, (1_000_000_000, 1_000_000_000))

    async def finding_after(seconds: float) -> list[ttdp.Finding]:
        monkeypatch.setattr("ttdp.time.time", lambda: 1_000_000_000 + seconds)
        checks = await asyncio.to_thread(ttdp.Checks, daemon.settings, None)
        return [each for each in checks.findings() if each.subject == "metrics"]

    assert await finding_after(120) == []
    text = f"{file} is 2 minutes old; the log has the reason"
    command = "journalctl -t tt-device-plugin -p warning"
    assert await finding_after(120.5) == [ttdp.Finding("FAIL", "metrics", text, command)]


async def test_files_that_cannot_be_written_fail(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """`check` has the reason as soon as the log has it."""
    labels = served.root / "features.d/tt-device-plugin"
    metrics = served.root / "metrics/tt-device-plugin.prom"
    for path in (labels, metrics):
        path.mkdir(parents=True)
        (path / "full").touch()
    state = served.root / "state.json"
    (served.root / ".state.json.new").mkdir()  # in the way of a new version
    settings = {"labels_dir": str(labels.parent), "metrics_file": str(metrics)}
    await served.serve(N150, interval=0.1, state_dir=str(state.parent), **settings)
    await until(lambda: caplog.text.count("Is a directory") == 3)

    problem = "is out of date and cannot be removed: Is a directory"
    answer = await served.ask("check")
    for path in (labels, metrics):
        assert ("FAIL", "files", f"{path} {problem}") in answer.complaints
    problem = "cannot be written: Is a directory"
    assert ("FAIL", "files", f"{state} {problem}") in answer.complaints


@pytest.mark.parametrize("cdi_dir", ["", "new"])
async def test_a_cdi_file_of_a_former_configuration_that_stays_fails(
    served: Served, cdi_dir: str
) -> None:
    """Runtimes read it on, if they look in its directory."""
    for name in ("former", "new"):
        (served.root / name).mkdir()
    former = served.root / "former" / ttdp.CDI_FILE
    daemon = await served.serve(N150, interval=0.1, cdi_dir=str(former.parent))
    await until(former.exists)

    former.unlink()
    former.mkdir()
    (former / "full").touch()
    daemon.reload(cdi_dir=cdi_dir and str(served.root / cdi_dir))
    await until(lambda: str(former) in daemon.daemon.host.files.problems)

    problem = "is out of date and cannot be removed: Is a directory"
    assert ("FAIL", "files", f"{former} {problem}") in (await served.ask("check")).complaints


async def test_a_directory_that_is_newer_than_the_service_needs_a_restart(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read-only in the service's sandbox; others need a drop-in, so a restart is no help."""
    problem = f"cannot be written: {os.strerror(errno.EROFS)}"
    restart = "systemctl restart tt-device-plugin"
    for path in (Settings().metrics_file, f"{Settings().cdi_dir}/{ttdp.CDI_FILE}"):
        assert ttdp.file_command(path, problem) == restart
        assert ttdp.file_command(path, "cannot be written: No space left on device") == ""
    assert ttdp.file_command("/srv/metrics/x.prom", problem) == ""

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    labels = served.root / "features.d"
    labels.mkdir()
    usual = replace(Settings(), labels_dir=str(labels), cdi_dir=str(served.root / "cdi"))
    served.cdi_file.parent.mkdir()
    monkeypatch.setattr(ttdp.OutputFile, "_replace", read_only)
    daemon = await served.serve(N150, interval=0.1)
    await until(lambda: len(daemon.daemon.host.files.problems) == 2)

    monkeypatch.setattr(ttdp, "Settings", lambda: usual)
    checks = await asyncio.to_thread(ttdp.Checks, daemon.settings, None)
    found = {each.subject: each for each in checks.findings() if each.command == restart}
    assert {*found} == {"files", "CDI"} and problem in found["CDI"].text
