"""Configuration: where a setting comes from, and what is said of one that cannot be used."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from tests.world.processes import finished
from ttdp import (
    OPTIONS,
    ConfigError,
    HealthSettings,
    Mount,
    Option,
    Settings,
    SharedResource,
    Sharing,
    load_settings,
)

PROGRAM = Path(ttdp.__file__)
unhurried = hypothesis_settings(deadline=None)

# What the design says: key and default.
DEFAULTS: dict[str, Any] = {
    "device_plugin_dir": "/var/lib/kubelet/device-plugins", "sysfs_root": "/sys", "dev_root": "/dev",
    "proc_root": "/proc", "resource_domain": "tenstorrent.com", "resource_naming": "board",
    "device_id_strategy": "bdf", "visible_devices": "bdf", "unit": "chip",
    "device_list_strategy": "device-specs", "cdi_dir": "/var/run/cdi",
    "labels_dir": "/etc/kubernetes/node-feature-discovery/features.d",
    "metrics_file": "/var/lib/prometheus/node-exporter/tt-device-plugin.prom",
    "pod_resources_socket": "/var/lib/kubelet/pod-resources/kubelet.sock", "fail_on_init_error": False,
    "log_level": "info",
}  # fmt: skip

# Values for file, environment and flag. Each differs from the default where it can, and from the next one always.
SAMPLES: dict[str, tuple[str, str, str]] = {
    "device_plugin_dir": ("/file/plugins", "/variable/plugins", "/flag/plugins"),
    "sysfs_root": ("/file/sys", "/variable/sys", "/flag/sys"),
    "dev_root": ("/file/dev", "/variable/dev", "/flag/dev"),
    "proc_root": ("/file/proc", "/variable/proc", "/flag/proc"),
    "resource_domain": ("file.example", "variable.example", "flag.example"),
    "resource_naming": ("card", "arch", "card"),
    "device_id_strategy": ("asic", "index", "asic"),
    "visible_devices": ("index", "none", "index"),
    "unit": ("board", "chip", "board"),
    "device_list_strategy": ("cdi", "device-specs", "cdi"),
    "cdi_dir": ("/file/cdi", "/variable/cdi", "/flag/cdi"),
    "labels_dir": ("", "/variable/labels", "/flag/labels"),
    "metrics_file": ("/file/x.prom", "/variable/x.prom", ""),
    "pod_resources_socket": ("/file/pods.sock", "/variable/pods.sock", "/flag/pods.sock"),
    "fail_on_init_error": ("true", "false", "true"),
    "log_level": ("error", "warning", "debug"),
}

# Texts that are no value, and words that the message has to contain because they say what is one.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "device_plugin_dir": (["", "/" + "x" * 100], ["path"]),
    "sysfs_root": ([""], ["path"]),
    "dev_root": ([""], ["path"]),
    "proc_root": ([""], ["path"]),
    "resource_domain": (
        ["", "Tenstorrent.com", "tenstorrent_com", "a..b", "-a.b", "a/b", "kubernetes.io", "x.kubernetes.io",
         "requests.example", "a" * 245, "a\nb", "tenstorrent.com\n"],
        ["DNS"],
    ),
    "resource_naming": (["", "cards", "BOARD", " board"], ["board", "card", "arch"]),
    "device_id_strategy": (["", "uuid", "bdf "], ["bdf", "asic", "index"]),
    "visible_devices": (["", "all", "0"], ["bdf", "index", "none"]),
    "device_list_strategy": (["", "CDI", "envvar"], ["device-specs", "cdi"]),
    "cdi_dir": (["/" + "x" * 4096], ["path"]),
    "labels_dir": (["/" + "x" * 4096], ["path"]),
    "metrics_file": (["/" + "x" * 4096], ["path"]),
    "unit": (["", "tray", "chips"], ["chip", "board"]),
    "pod_resources_socket": (["", "/" + "x" * 107], ["path"]),
    "fail_on_init_error": (["", "maybe", "2", "tru"], ["true", "yes", "on", "1", "false", "no", "off", "0"]),
    "log_level": (["", "verbose", "INFO", "10"], ["debug", "info", "warning", "error"]),
}  # fmt: skip
WRONG_TEXTS = [(option, text) for option in OPTIONS for text in WRONG[option.key][0]]


def toml(value: object) -> str:
    """A value as TOML: strings, booleans, numbers."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value) + '"'
    return repr(value)


def from_file(text: str | bytes) -> Settings:
    """The settings from a configuration file with this content, and nothing else."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
        file.flush()
        return load_settings({"config_file": file.name}, {})


def refusal(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> str:
    """The one line with which these are refused."""
    with pytest.raises(ConfigError) as refused:
        load_settings(flags, environ)
    (line,) = str(refused.value).splitlines()
    return line


def refusal_of_file(tmp_path: Path, text: str | bytes) -> str:
    """The one line with which a file of this content is refused; it begins with the file's name."""
    file = tmp_path / "config.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    line = refusal({"config_file": str(file)}, {})
    assert line.startswith(f"{file}: ")
    return line.removeprefix(f"{file}: ")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The program itself, with no configuration but this one."""
    return finished([sys.executable, PROGRAM, *words], environ)


# -- where a value comes from ------------------------------------------------------------------------------------------


def test_the_options_are_those_of_the_design() -> None:
    """Every option has its flag, variable and key, and its default; there is none besides."""
    shown = {option.key: (option.flag, option.variable, getattr(Settings(), option.key)) for option in OPTIONS}
    assert shown == {
        key: ("--" + key.replace("_", "-"), "TTDP_" + key.upper(), default) for key, default in DEFAULTS.items()
    }
    assert Settings().health == HealthSettings(5.0, None, 2, 300.0)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(option: Option, tmp_path: Path) -> None:
    """Of every combination of the three sources the strongest counts; of none, the default."""
    file = tmp_path / "config.toml"
    in_file, in_variable, in_flag = SAMPLES[option.key]
    for has_file, has_variable, has_flag in itertools.product((False, True), repeat=3):
        file.write_text(f"{option.key} = {in_file if option.is_switch else toml(in_file)}" if has_file else "")
        environ = {option.variable: in_variable} if has_variable else {}
        flags = {"config_file": str(file), option.key: in_flag if has_flag else None}
        wanted = in_flag if has_flag else in_variable if has_variable else in_file if has_file else None
        got = getattr(load_settings(flags, environ), option.key)
        assert got == (DEFAULTS[option.key] if wanted is None else wanted == "true" if option.is_switch else wanted)


def test_the_default_file_may_be_absent_and_counts_if_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any word of a file, the one in /etc is read if it is there."""
    assert ttdp.DEFAULT_CONFIG_FILE == "/etc/tt-device-plugin/config.toml"
    file = tmp_path / "config.toml"
    monkeypatch.setattr(ttdp, "DEFAULT_CONFIG_FILE", str(file))
    assert load_settings({}, {}) == Settings()
    file.write_text('log_level = "debug"')
    assert load_settings({}, {}) == Settings(log_level="debug")


def test_the_file_is_the_one_that_the_flag_names_else_the_variable(tmp_path: Path) -> None:
    """--config-file wins over TTDP_CONFIG_FILE, which need not even exist then."""
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text('resource_domain = "one.example"')
    other.write_text('resource_domain = "other.example"')
    variable = {"TTDP_CONFIG_FILE": str(one)}
    assert load_settings({"config_file": None}, variable).resource_domain == "one.example"
    assert load_settings({"config_file": str(other)}, variable).resource_domain == "other.example"
    one.unlink()
    assert load_settings({"config_file": str(other)}, variable).resource_domain == "other.example"


def test_an_empty_variable_counts_as_not_set() -> None:
    """Environment files often say VARIABLE= for what is left out."""
    environ = {option.variable: "" for option in OPTIONS} | {"TTDP_CONFIG_FILE": ""}
    assert load_settings({}, environ) == Settings()


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path counts from where the program was started, and the result has no detours."""
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"sysfs_root": "node/../sys/", "dev_root": "."}, {})
    assert (settings.sysfs_root, settings.dev_root) == (f"{tmp_path}/sys", str(tmp_path))


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        (["true", "yes", "on", "1", "True", "YES", "On"], True),
        (["false", "no", "off", "0", "False", "NO", "Off"], False),
    ],
)
def test_booleans_in_every_spelling(texts: list[str], value: bool) -> None:
    """In variables and flags all usual spellings of a boolean are one."""
    for text in texts:
        assert load_settings({}, {"TTDP_FAIL_ON_INIT_ERROR": text}).fail_on_init_error is value
        assert load_settings({"fail_on_init_error": text}, {}).fail_on_init_error is value


def test_the_state_directory_is_systemds_first() -> None:
    """STATE_DIRECTORY may hold several, separated by colons; without one nothing outlives the daemon."""
    assert load_settings({}, {}).state_dir is None
    assert load_settings({}, {"STATE_DIRECTORY": ""}).state_dir is None
    assert load_settings({}, {"STATE_DIRECTORY": "/var/lib/one"}).state_dir == "/var/lib/one"
    assert load_settings({}, {"STATE_DIRECTORY": "/var/lib/one:/var/lib/two"}).state_dir == "/var/lib/one"


# -- what cannot be used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "text"), WRONG_TEXTS, ids=lambda part: getattr(part, "key", None))
def test_a_wrong_value_is_named_with_its_source_and_what_is_valid(option: Option, text: str, tmp_path: Path) -> None:
    """From flag, variable and file alike: one line with the source, the value, and every valid choice."""
    lines = {option.flag: refusal({option.key: text}, {})}
    if text:
        lines[option.variable] = refusal({}, {option.variable: text})
    if not option.is_switch:
        lines[option.key] = refusal_of_file(tmp_path, f"{option.key} = {toml(text)}")
    for source, line in lines.items():
        assert line.startswith(source) and repr(text)[:60] in line
        assert all(word in line.partition("must be")[2] for word in WRONG[option.key][1])


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
@pytest.mark.parametrize("value", ["1", "1.5", "[]", "{}", "2024-01-01", "text or boolean"])
def test_a_value_of_the_wrong_type_is_named(option: Option, value: str, tmp_path: Path) -> None:
    """A key of the file takes strings, the switch takes a boolean, and neither takes anything else."""
    if value == "text or boolean":
        value = '"true"' if option.is_switch else "true"
    line = refusal_of_file(tmp_path, f"{option.key} = {value}")
    assert line.startswith(option.key)
    words = ["true or false"] if option.is_switch else WRONG[option.key][1]
    assert all(word in line.partition("must be")[2] for word in words)


@pytest.mark.parametrize(
    ("text", "named", "valid"),
    [
        ("log-level = 'info'", "log-level", "log_level"),
        ("config_file = '/x'", "config_file", "resource_domain"),
        ("[health]\nintervall = 1", "intervall", "interval, temperature_limit, heartbeat_misses, trip_holdoff"),
        ("[[mounts]]\nhost = '/x'\nreadonly = true", "readonly", "host, container, read_only"),
        ("[options]\nx = 1", "options", "health, sharing, mounts"),
        ("[sharing]\nreplicas = 2", "replicas", "lock_dir, resources"),
        ("[[sharing.resources]]\nname = 'n300'\nreplicas = 2\nnumber = 4", "number", "replicas, rename, devices"),
        ('"two\\nlines" = 1', "two", "log_level"),
        ('[health]\n"two\\nlines" = 1', "two", "interval"),
    ],
)
def test_an_unknown_key_is_named_and_so_are_the_known_ones(tmp_path: Path, text: str, named: str, valid: str) -> None:
    """A key that nobody reads would be a setting that somebody believes in."""
    before, _, after = refusal_of_file(tmp_path, text).partition("valid are")
    assert named in before and valid in after


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *itertools.product(
            ("interval",), ("0", "-1", "0.09", "1e-09", "3601", "'5'", "true", "nan", "inf", "[]", "1" + "0" * 400)
        ),
        *itertools.product(("temperature_limit",), ("0", "0.9", "-5", "201", "'90'", "false", "nan", "1" + "0" * 400)),
        *itertools.product(("heartbeat_misses",), ("0", "-1", "1.5", "2.0", "'2'", "true", "{}")),
        *itertools.product(("trip_holdoff",), ("-1", "-0.1", "'x'", "true", "inf", "nan", "1" + "0" * 400)),
    ],
    ids=lambda text: text[:20],
)
def test_a_wrong_rule_of_health_is_named_with_its_value(key: str, value: str, tmp_path: Path) -> None:
    """Wrong types, signs, booleans (which Python takes for numbers), and numbers that are none."""
    source, _, valid = refusal_of_file(tmp_path, f"[health]\n{key} = {value}").partition("must be")
    assert all(word in source for word in ("health", key, value[:50])) and valid.split()[0] == "a"


def test_the_limits_of_the_rules_of_health_are_valid() -> None:
    """Integers are numbers of seconds and degrees, and the bounds belong to what is valid."""
    text = "[health]\ninterval = 3600\ntemperature_limit = 200\nheartbeat_misses = 1\ntrip_holdoff = 0"
    assert from_file(text).health == HealthSettings(3600, 200, 1, 0)
    assert from_file("[health]\ninterval = 0.1\ntemperature_limit = 1").health == HealthSettings(0.1, 1)


def test_a_mount_needs_a_host_path_only() -> None:
    """`container` is the same path unless told, and a mount is writable unless told."""
    text = """
        [[mounts]]
        host = "/srv/models"
        [[mounts]]
        host = "/dev/hugepages-1G"
        container = "/huge"
        read_only = true
    """
    assert from_file(text).mounts == (
        Mount("/srv/models", "/srv/models", False),
        Mount("/dev/hugepages-1G", "/huge", True),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[mounts]]\nhost = 'x'", "mounts host 'x'"),
        ("[[mounts]]\nhost = ''", "mounts host ''"),
        ("[[mounts]]\nhost = 1", "mounts host 1"),
        ("[[mounts]]\nhost = '/x'\ncontainer = 'x'", "mounts container 'x'"),
        ("[[mounts]]\nhost = '/x'\ncontainer = ''", "mounts container ''"),
        ('[[mounts]]\nhost = "/x\\u0000"', "mounts host '/x\\x00'"),
        ("[[mounts]]\nhost = '/x'\nread_only = 'no'", "mounts read_only 'no'"),
        ("[[mounts]]\nhost = '/x'\nread_only = 0", "mounts read_only 0"),
        ("[[mounts]]\nhost = '/a'\ncontainer = '/x'\n[[mounts]]\nhost = '/x'", "mounts container '/x'"),
        ("[mounts]\nhost = '/x'", "mounts {'host': '/x'}"),
        ("mounts = '/x'", "mounts '/x'"),
        ("mounts = ['/x']", "mounts ['/x']"),
        ("health = 5", "health 5"),
        ("[[health]]\ninterval = 5", "health [{'interval': 5}]"),
        ("[health]\ninterval = 0x" + "f" * 5000, "health interval"),  # Python does not print that many digits
        ("log_level = [0x" + "f" * 5000 + "]", "log_level"),
    ],
    ids=lambda text: text[:40],
)
def test_a_wrong_mount_or_section_is_named(text: str, named: str, tmp_path: Path) -> None:
    """Paths have to be absolute, no two mounts may have one place, and a section has to be one."""
    source, must_be, _ = refusal_of_file(tmp_path, text).partition("must be")
    assert must_be and all(word in source for word in named.split())


def test_a_colon_in_a_files_name_is_the_names(tmp_path: Path) -> None:
    """What is wrong is named behind the whole of it."""
    directory = tmp_path / "of: me"
    directory.mkdir()
    assert refusal_of_file(directory, "health = 5").startswith("health: 5 is not valid; it must be a table: [health]")
    assert refusal_of_file(directory, "mounts = 5").startswith("mounts: 5 is not valid; it must be tables: [[mounts]]")


SHARED = "[[sharing.resources]]\nname = 'n300'\nreplicas = 4\n"


def test_what_is_shared_has_a_name_and_replicas_and_the_rest_has_its_default() -> None:
    """The domain may be left out of names; devices are all, a number, or named by address, ID or ordinal."""
    text = f"""
        {SHARED}
        [[sharing.resources]]
        name = "tenstorrent.com/p300"
        replicas = 2
        rename = "tenstorrent.com/p300-half"
        devices = ["0000:03:00.0", 3]
        [[sharing.resources]]
        name = "p150"
        replicas = 100
        rename = "p150.many"
        devices = 2
    """
    assert from_file(text).sharing == Sharing(
        resources=(
            SharedResource("n300", 4),
            SharedResource("p300", 2, "p300-half", ("0000:03:00.0", "3")),
            SharedResource("p150", 100, "p150.many", 2),
        )
    )
    assert Sharing() == Sharing(False, True, "/dev/shm/tt-device-plugin", ())
    assert from_file("[sharing]\nlock_dir = ''\nrename_by_default = true").sharing == Sharing(True, lock_dir="")


def test_a_shared_resource_keeps_its_name_unless_it_is_renamed() -> None:
    """By an entry's own name, or all of them with `.shared`."""
    plain, named = SharedResource("n300", 4), SharedResource("n300", 4, "quarter")
    assert [Sharing().shared_name(entry) for entry in (plain, named)] == ["n300", "quarter"]
    assert [Sharing(rename_by_default=True).shared_name(e) for e in (plain, named)] == ["n300.shared", "quarter"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SHARED.replace("4", "1"), ["replicas: 1", "from 2 to 100"]),
        (SHARED.replace("4", "101"), ["replicas: 101", "from 2 to 100"]),
        (SHARED.replace("4", "2.0"), ["replicas: 2.0", "whole number"]),
        (SHARED.replace("4", "true"), ["replicas: true"]),
        ("[[sharing.resources]]\nname = 'n300'", ["replicas is missing"]),
        ("[[sharing.resources]]\nreplicas = 2", ["name is missing"]),
        (SHARED.replace("n300", "a/b/c"), ["name: 'a/b/c'", "name of a resource"]),
        (SHARED.replace("n300", "-x"), ["name: '-x'", "name of a resource"]),
        (SHARED.replace("'n300'", "5"), ["name: 5"]),
        (SHARED.replace("n300", "example.org/n300"), ["example.org/n300", "domain is not tenstorrent.com"]),
        (SHARED + "rename = 'example.org/x'", ["example.org/x", "domain is not tenstorrent.com"]),
        (SHARED + "rename = 'n150'", ["n150 can be another resource's name"]),
        (SHARED + "rename = 'p300-board'", ["p300-board can be another resource's name"]),
        (SHARED + "rename = 'wormhole'", ["wormhole can be another resource's name"]),
        (SHARED + "rename = '" + "x" * 64 + "'", ["rename", "name of a resource"]),
        ("[sharing]\nrename_by_default = true\n" + SHARED.replace("n300", "x" * 60), ["63 characters"]),
        (SHARED + SHARED, ["n300 is the name of two entries"]),
        (SHARED + "rename = 'a'\n" + SHARED + "rename = 'a'", ["a is the name of two entries"]),
        (SHARED + "rename = 'a'\n" + SHARED + "rename = 'b'", ["every device is selected twice"]),
        (SHARED + "rename = 'a'\ndevices = 2\n" + SHARED + "rename = 'b'", ["every device is selected twice"]),
        (SHARED + "rename = 'a'\ndevices = [1, 2]\n" + SHARED + "rename = 'b'\ndevices = ['2']",
         ["2 is selected twice"]),
        (SHARED + "devices = 2", ["n300: a selection of its devices needs a name of its own"]),
        (SHARED + "devices = ['0000:01:00.0']", ["a selection of its devices needs a name of its own"]),
        (SHARED + "devices = 0", ["devices: 0", '"all", a number']),
        (SHARED + "devices = []", ["devices: []"]),
        (SHARED + "devices = 'some'", ["devices: 'some'"]),
        (SHARED + "devices = [1.5]", ["devices: [1.5]"]),
        (SHARED + "memory_gb = 4", ["memory_gb", "left out", "turns", "memory"]),
        (SHARED + "mps = true", ["mps", "left out", "turns"]),
        ("[sharing]\nlock_dir = 5", ["lock_dir: 5", "a path, or empty"]),
        ("sharing = true", ["sharing: true", "a table: [sharing]"]),
        ("[sharing]\nresources = 'n300'", ["sharing.resources: 'n300'", "tables: [[sharing.resources]]"]),
    ],
)  # fmt: skip
def test_sharing_that_cannot_be_has_a_sentence_of_its_own(text: str, words: list[str], tmp_path: Path) -> None:
    """What is missing, what contradicts what, and what exists for other hardware only."""
    line = refusal_of_file(tmp_path, text)
    assert all(word in line for word in words)


def test_a_name_of_another_domain_is_right_where_that_is_the_domain(tmp_path: Path) -> None:
    """Wherever the domain comes from: the file, the environment or a flag."""
    file = tmp_path / "config.toml"
    file.write_text(SHARED.replace("n300", "example.org/n300"))
    flags = {"config_file": str(file), "resource_domain": "example.org"}
    assert load_settings(flags, {}).sharing.resources == (SharedResource("n300", 4),)


@pytest.mark.parametrize(
    "content",
    [b"log_level = ", b"log_level", b"= 1", b"[health", b"a = 1\na = 2", b"log_level = 'caf\xe9'", b"\xff\xfe\x00",
     b"log_level = 'info'\r", b"x = 2024-13-01", b"health = " + b"[" * 10_000],
)  # fmt: skip
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    """Syntax errors, text that is not UTF-8, and a nesting that no parser follows."""
    assert refusal_of_file(tmp_path, content)


def test_a_file_that_was_named_has_to_be_a_readable_file(tmp_path: Path) -> None:
    """Missing, below something that is no directory, or a directory: one line that names it."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file/below", tmp_path, tmp_path / ("x" * 300)):
        assert refusal({"config_file": str(path)}, {}).startswith(f"{path}: ")
        assert refusal({}, {"TTDP_CONFIG_FILE": str(path)}).startswith(f"{path}: ")


# -- the program -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "environ", "named"),
    [
        (["--log-level=loud"], {}, "--log-level: 'loud'"),
        (["list", "--fail-on-init-error=perhaps"], {}, "--fail-on-init-error: 'perhaps'"),
        (["run"], {"TTDP_RESOURCE_NAMING": "size"}, "TTDP_RESOURCE_NAMING: 'size'"),
        (["--config-file=/nowhere/config.toml"], {}, "/nowhere/config.toml: "),
        (["--config-file={file}"], {}, "{file}: log_level"),
    ],
)
def test_the_program_ends_with_status_78_and_one_line(
    words: list[str], environ: dict[str, str], named: str, tmp_path: Path
) -> None:
    """A configuration that cannot be used is for a human to mend: systemd does not restart on this status."""
    file = tmp_path / "config.toml"
    file.write_text("log_level = 3")
    ended = run(*(word.format(file=file) for word in words), **environ)
    (line,) = ended.stderr.splitlines()
    assert named.format(file=file) in line
    assert (ended.returncode, ended.stdout) == (78, "")


@pytest.mark.parametrize("words", [["--verbose"], ["serve"], ["--log-level"], ["--log", "info"]])
def test_an_unknown_word_is_a_usage_error(words: list[str]) -> None:
    """Unknown flags and commands, a flag without its value, an abbreviated flag: usage, and status 2."""
    ended = run(*words)
    assert ended.returncode == 2 and ended.stderr.startswith("usage: tt-device-plugin")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--fail-on-init-error", "run"], 1),
        (["run", "--fail-on-init-error"], 1),
        (["--fail-on-init-error=yes"], 1),
        (["--fail-on-init-error=no", "--log-level=loud"], 78),
        (["--fail-on-init-error", "list"], 0),
    ],
)
def test_the_switch_works_bare_with_a_value_and_before_a_command(words: list[str], status: int, tmp_path: Path) -> None:
    """Bare it means true and swallows no word that follows; without any device, true shows by the status 1."""
    roots = [f"--{name}-root={tmp_path}/{name}" for name in ("sysfs", "dev", "proc")]
    assert run(*words, *roots, f"--device-plugin-dir={tmp_path.root}none").returncode == status


# -- whatever there may be ---------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.text(max_size=8), st.booleans(), st.integers(), st.floats(), st.sampled_from(["bdf", "card", "/x", "info"])
)
keys = st.sampled_from([*DEFAULTS, "health", "mounts", *(f.name for f in fields(HealthSettings)), "host", "x", "a b"])
lines = st.one_of(
    st.builds(lambda key, value: f"{toml(key)} = {toml(value)}", keys | st.text("a\n\x1b\x85 ", max_size=3), scalars),
    st.sampled_from(["[health]", "[[mounts]]", "[[health]]", "[mounts]", "host = '/x'", "interval = 1e999"]),
    st.text(max_size=20),
)


@unhurried
@given(st.one_of(st.lists(lines, max_size=6).map("\n".join).map(lambda text: text.encode("utf-8", "replace")),
                 st.binary(max_size=60)))  # fmt: skip
def test_any_file_gives_settings_or_one_line(content: bytes) -> None:
    """Whatever a file holds, the answer is a valid configuration or a single line that says what is wrong."""
    try:
        settings = from_file(content)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert from_file(as_toml(settings)) == settings


def as_toml(settings: Settings) -> str:
    """A file that says all of this."""
    text = [f"{key} = {toml(getattr(settings, key))}" for key in DEFAULTS]
    health = {f.name: getattr(settings.health, f.name) for f in fields(HealthSettings)}
    text += ["[health]", *(f"{key} = {toml(value)}" for key, value in health.items() if value is not None)]
    sharing = settings.sharing
    text += ["[sharing]", *(f"{f.name} = {toml(getattr(sharing, f.name))}" for f in fields(Sharing)[:3])]
    for entry in sharing.resources:
        shown = {f.name: getattr(entry, f.name) for f in fields(SharedResource)}
        shown["devices"] = list(entry.devices) if isinstance(entry.devices, tuple) else entry.devices
        text += ["[[sharing.resources]]", *(f"{k} = {toml(v)}" for k, v in shown.items() if v is not None)]
    for mount in settings.mounts or ():
        text += ["[[mounts]]", *(f"{f.name} = {toml(getattr(mount, f.name))}" for f in fields(Mount))]
    return "\n".join(["mounts = []", *text] if settings.mounts == () else text)


def contradicts_itself(sharing: Sharing) -> bool:
    entries = sharing.resources
    return any(ttdp._contradiction(sharing, entry, entries[:number]) for number, entry in enumerate(entries))


paths = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
).map(lambda text: os.path.abspath("/" + text.lstrip("/")))  # fmt: skip
shared_resources = st.builds(
    SharedResource, st.sampled_from(["n150", "n300", "p150", "p300-board"]), st.integers(2, 100),
    st.none() | st.sampled_from(["one", "two"]),
    st.just("all") | st.integers(1, 9) | st.sets(st.sampled_from(["0000:01:00.0", "0", "7"]), min_size=1).map(tuple),
)  # fmt: skip
seconds = st.floats(0.1, 3600) | st.integers(1, 3600)
mount_lists = st.lists(st.builds(Mount, paths, paths, st.booleans()), max_size=3, unique_by=lambda m: m.container)
whole = st.builds(
    Settings, paths, paths, paths, paths,
    resource_domain=st.from_regex(r"[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?(\.[a-z0-9]{1,9}){0,3}", fullmatch=True),
    resource_naming=st.sampled_from(["board", "card", "arch"]),
    device_id_strategy=st.sampled_from(["bdf", "asic", "index"]),
    visible_devices=st.sampled_from(["bdf", "index", "none"]),
    unit=st.sampled_from(["chip", "board"]),
    device_list_strategy=st.sampled_from(["device-specs", "cdi"]),
    cdi_dir=st.just("") | paths,
    labels_dir=st.just("") | paths,
    metrics_file=st.just("") | paths,
    pod_resources_socket=paths,
    fail_on_init_error=st.booleans(),
    log_level=st.sampled_from(["debug", "info", "warning", "error"]),
    health=st.builds(HealthSettings, seconds, st.none() | st.floats(1, 200), st.integers(1, 99), st.floats(0, 1e9)),
    mounts=st.none() | mount_lists.map(tuple),
    sharing=st.builds(
        Sharing, st.booleans(), st.booleans(), st.just("") | paths, st.lists(shared_resources, max_size=2).map(tuple)
    ).filter(lambda sharing: not contradicts_itself(sharing)),
)  # fmt: skip


@unhurried
@given(whole)
def test_valid_settings_survive_being_written_and_read(settings: Settings) -> None:
    """A file that says all of a configuration gives exactly that one."""
    assert from_file(as_toml(settings)) == settings


@unhurried
@given(whole)
def test_what_a_file_leaves_out_has_its_default(settings: Settings) -> None:
    """Each key stands for itself: a file with one half of them leaves the other half alone."""
    half = [key for index, key in enumerate(DEFAULTS) if index % 2]
    text = "\n".join(f"{key} = {toml(getattr(settings, key))}" for key in half)
    assert from_file(text) == replace(Settings(), **{key: getattr(settings, key) for key in half})
