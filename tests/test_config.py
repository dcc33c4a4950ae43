"""Configuration: where a setting comes from, and what is said of one that cannot be used."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from ttdp import OPTIONS, ConfigError, HealthSettings, Mount, Settings, Sharing, load_settings

Shared = ttdp.SharedResource

# What the design says: keys and defaults. Then values for file, variable and flag, each another
# than the next, and than the default if it can.
SAMPLES: dict[str, tuple[Any, str, str, str]] = {
    "device_plugin_dir": ("/var/lib/kubelet/device-plugins", "/file/d", "/variable/d", "/flag/d"),
    "sysfs_root": ("/sys", "/file/sys", "/variable/sys", "/flag/sys"),
    "dev_root": ("/dev", "/file/dev", "/variable/dev", "/flag/dev"),
    "proc_root": ("/proc", "/file/proc", "/variable/proc", "/flag/proc"),
    "resource_domain": ("tenstorrent.com", "file.example", "variable.example", "flag.example"),
    "resource_naming": ("board", "card", "arch", "card"),
    "device_id_strategy": ("bdf", "asic", "index", "asic"),
    "visible_devices": ("bdf", "index", "none", "index"),
    "unit": ("chip", "board", "chip", "board"),
    "device_list_strategy": ("device-specs", "cdi", "device-specs", "cdi"),
    "cdi_dir": ("/var/run/cdi", "/file/cdi", "/variable/cdi", "/flag/cdi"),
    "labels_dir": ("/etc/kubernetes/node-feature-discovery/features.d", "",
                   "/variable/l", "/flag/l"),
    "metrics_file": ("/var/lib/prometheus/node-exporter/tt-device-plugin.prom", "/file/x.prom",
                     "/variable/x.prom", ""),
    "pod_resources_socket": ("/var/lib/kubelet/pod-resources/kubelet.sock", "/file/pods.sock",
                             "/variable/pods.sock", "/flag/pods.sock"),
    "fail_on_init_error": (False, "true", "false", "true"),
    "log_level": ("info", "error", "warning", "debug"),
}  # fmt: skip
DEFAULTS = {key: values[0] for key, values in SAMPLES.items()}

# Texts that are no value, and the words by which the message says what would be one.
LONG = "/" + "x" * 4096
DOMAINS = ["", "Tenstorrent.com", "tenstorrent_com", "a..b", "-a.b", "a/b", "kubernetes.io", "a\nb"]
DOMAINS += ["x.kubernetes.io", "requests.example", "a" * 245, "tenstorrent.com\n"]
BOOLEANS = ["true", "yes", "on", "1", "false", "no", "off", "0"]
WRONG: dict[str, tuple[list[str], list[str]]] = {
    **dict.fromkeys(("sysfs_root", "dev_root", "proc_root"), ([""], ["path"])),
    **dict.fromkeys(("cdi_dir", "labels_dir", "metrics_file"), ([LONG], ["path"])),
    "device_plugin_dir": (["", "/" + "x" * 100], ["path"]),
    "resource_domain": (DOMAINS, ["DNS"]),
    "resource_naming": (["", "cards", "BOARD", " board"], ["board", "card", "arch"]),
    "device_id_strategy": (["", "uuid", "bdf "], ["bdf", "asic", "index"]),
    "visible_devices": (["", "all", "0"], ["bdf", "index", "none"]),
    "device_list_strategy": (["", "CDI", "envvar"], ["device-specs", "cdi"]),
    "unit": (["", "tray", "chips"], ["chip", "board"]),
    "pod_resources_socket": (["", "/" + "x" * 107], ["path"]),
    "fail_on_init_error": (["", "maybe", "2", "tru"], BOOLEANS),
    "log_level": (["", "verbose", "INFO", "10"], ["debug", "info", "warning", "error"]),
}
WRONG_TEXTS = [(option, text) for option in OPTIONS for text in WRONG[option.key][0]]


def toml(value: object) -> str:
    """A string, boolean, number or list of them as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        plain = [c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value]
        return f'"{"".join(plain)}"'
    return repr(value)


def from_file(
    content: str | bytes, flags: Mapping[str, str | None] | None = None, **environ: str
) -> Settings:
    """The settings from a file with this content; of an error, what comes behind its name."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        try:
            return load_settings({**(flags or {}), "config_file": file.name}, environ)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix(f"{file.name}: ")) from None


def refusal(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> str:
    """The one line with which these are refused."""
    with pytest.raises(ConfigError) as refused:
        load_settings(flags, environ)
    (line,) = str(refused.value).splitlines()
    return line


def refusal_of_file(content: str | bytes) -> str:
    """The one line with which a file of this content is refused, behind the file's name."""
    with pytest.raises(ConfigError) as refused:
        from_file(content)
    (line,) = str(refused.value).splitlines()
    return line


# -- where a value comes from ----------------------------------------------------------------------


def test_the_options_are_those_of_the_design() -> None:
    """Every option has its flag, variable and key, and its default; there is none besides."""
    defaults = Settings()
    shown = {each.key: (each.flag, each.variable, getattr(defaults, each.key)) for each in OPTIONS}
    assert shown == {
        key: ("--" + key.replace("_", "-"), "TTDP_" + key.upper(), default)
        for key, default in DEFAULTS.items()
    }
    assert defaults.health == HealthSettings(5.0, None, 2, 300.0)
    assert defaults.sharing == Sharing(False, True, "/run/ttdp/shm", ())
    assert defaults.mounts is None


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(option: ttdp.Option) -> None:
    """Of every combination of the three sources the strongest counts; of none, the default."""
    default, in_file, in_variable, in_flag = SAMPLES[option.key]
    line = f"{option.key} = {in_file if option.is_switch else toml(in_file)}"
    for has_file, has_variable, has_flag in itertools.product((False, True), repeat=3):
        given = [in_file] * has_file + [in_variable] * has_variable + [in_flag] * has_flag
        strongest: Any = (
            given[-1] == "true" if given and option.is_switch else [default, *given][-1]
        )
        environ = {option.variable: in_variable} if has_variable else {}
        flags = {option.key: in_flag if has_flag else None}
        settings = from_file(line if has_file else "", flags, **environ)
        assert getattr(settings, option.key) == strongest, given


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
    one = tmp_path / "one.toml"
    other = tmp_path / "other.toml"
    one.write_text('resource_domain = "one.example"')
    other.write_text('resource_domain = "other.example"')
    variable = {"TTDP_CONFIG_FILE": str(one)}
    assert load_settings({"config_file": None}, variable).resource_domain == "one.example"
    one.unlink()
    assert load_settings({"config_file": str(other)}, variable).resource_domain == "other.example"


def test_an_empty_variable_counts_as_not_set() -> None:
    """Environment files often say VARIABLE= for what is left out."""
    environ = {option.variable: "" for option in OPTIONS} | {"TTDP_CONFIG_FILE": ""}
    assert load_settings({}, environ) == Settings()


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A relative path counts from where the program was started, and has no detours."""
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"sysfs_root": "node/../sys/", "dev_root": "."}, {})
    assert (settings.sysfs_root, settings.dev_root) == (f"{tmp_path}/sys", str(tmp_path))


def test_booleans_in_every_spelling() -> None:
    """In variables and flags all usual spellings of a boolean are one."""
    spellings = {True: "true yes on 1 True YES On", False: "false no off 0 False NO Off"}
    for value, texts in spellings.items():
        for text in texts.split():
            assert load_settings({}, {"TTDP_FAIL_ON_INIT_ERROR": text}).fail_on_init_error is value
            assert load_settings({"fail_on_init_error": text}, {}).fail_on_init_error is value


def test_the_state_directory_is_systemds_first() -> None:
    """STATE_DIRECTORY may hold several; without one nothing outlives the daemon."""
    for text, directory in {"": None, "/one": "/one", "/one:/two": "/one"}.items():
        assert load_settings({}, {"STATE_DIRECTORY": text}).state_dir == directory
    assert load_settings({}, {}).state_dir is None


# -- what cannot be used ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text"), WRONG_TEXTS, ids=lambda part: getattr(part, "key", None)
)
def test_a_wrong_value_is_named_with_its_source_and_what_is_valid(
    option: ttdp.Option, text: str
) -> None:
    """From flag, variable and file alike: one line with source, value and every valid choice."""
    lines = {option.flag: refusal({option.key: text}, {})}
    if text:
        lines[option.variable] = refusal({}, {option.variable: text})
    if not option.is_switch:
        lines[option.key] = refusal_of_file(f"{option.key} = {toml(text)}")
    for source, line in lines.items():
        named, _, valid = line.partition("must be")
        assert named.startswith(source) and repr(text)[:60] in named
        assert all(word in valid for word in WRONG[option.key][1])


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
@pytest.mark.parametrize("value", ["1", "1.5", "[]", "{}", "2024-01-01", "text or boolean"])
def test_a_value_of_the_wrong_type_is_named(option: ttdp.Option, value: str) -> None:
    """A key takes strings, the switch takes a boolean, and neither takes anything else."""
    if value == "text or boolean":
        value = '"true"' if option.is_switch else "true"
    named, _, valid = refusal_of_file(f"{option.key} = {value}").partition("must be")
    words = ["true or false"] if option.is_switch else WRONG[option.key][1]
    assert named.startswith(option.key) and all(word in valid for word in words)


@pytest.mark.parametrize(
    ("text", "named", "valid", "nearest"),
    [
        ("log-level = 'info'", "log-level", "resource_domain", "log_level"),
        ("[health]\nintervall = 1", "intervall", "temperature_limit", "interval"),
        ("[[mounts]]\nhost = '/x'\nreadonly = true", "readonly", "host, container", "read_only"),
        ("[option]\nx = 1", "option", "health, sharing, mounts", ""),
        ("[sharing]\nlock_directory = ''", "lock_directory", "resources", "lock_dir"),
        ("[[sharing.resources]]\nname = 'a'\nreplicas = 2\nfoo = 'x'", "foo", "devices", ""),
        ('[health]\n"two\\nlines" = 1', "two", "interval", ""),
    ],
)
def test_an_unknown_key_is_named_and_so_is_the_nearest_known_one(
    text: str, named: str, valid: str, nearest: str
) -> None:
    """A key that nobody reads would be a setting that somebody believes in."""
    before, _, after = refusal_of_file(text).partition("valid are")
    known, _, advice = after.partition("; did you mean ")
    assert named in before and valid in known
    assert advice == (f"{nearest}?" if nearest else "")


HUGE = "1" + "0" * 400  # Python cannot even make a float of it
WRONG_RULES = {
    "interval": ["0", "-1", "0.09", "1e-09", "3601", "'5'", "true", "nan", "inf", "[]", HUGE],
    "temperature_limit": ["0", "0.9", "-5", "201", "'90'", "'Card'", "false", "nan", HUGE],
    "heartbeat_misses": ["0", "-1", "1.5", "2.0", "'2'", "true", "{}"],
    "trip_holdoff": ["-1", "-0.1", "'x'", "true", "inf", "nan", HUGE],
}


@pytest.mark.parametrize("key", WRONG_RULES)
def test_a_wrong_rule_of_health_is_named_with_its_value(key: str) -> None:
    """Wrong types, signs, booleans (which Python takes for numbers), and numbers that are none."""
    for value in WRONG_RULES[key]:
        named, _, valid = refusal_of_file(f"[health]\n{key} = {value}").partition("must be a ")
        assert all(word in named for word in ("[health]", key, value[:50])), value
        assert valid.startswith(("number", "whole number"))


def test_the_limits_of_the_rules_of_health_are_valid() -> None:
    """Integers are seconds and degrees, too, and the bounds belong to what is valid."""
    text = "[health]\ninterval = 3600\ntemperature_limit = 200\nheartbeat_misses = 1\n"
    assert from_file(f"{text}trip_holdoff = 0").health == HealthSettings(3600, 200, 1, 0)
    text = "[health]\ninterval = 0.1\ntemperature_limit = 1"
    assert from_file(text).health == HealthSettings(0.1, 1)
    assert from_file("[health]\ntemperature_limit = 'card'").health.temperature_limit == "card"


def test_cdi_needs_a_directory_for_its_file() -> None:
    """Containers whose CDI devices nobody describes would not start."""
    text = "device_list_strategy = 'cdi'\ncdi_dir = ''"
    assert "cdi_dir is empty" in refusal_of_file(text)
    assert "cdi_dir is empty" in refusal({"device_list_strategy": "cdi", "cdi_dir": ""}, {})
    assert from_file("cdi_dir = ''").cdi_dir == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("health = 5", "health: 5 is not valid; it must be a table: [health]"),
        ("[[health]]\ninterval = 5", "health: [{'interval': 5}] is"),
        ("[mounts]\nhost = '/x'", "mounts: {'host': '/x'} is not valid; it must be tables: [[m"),
        ("mounts = '/x'", "mounts: '/x' is"),
        ("mounts = ['/x']", "mounts: ['/x'] is"),
        ("[health]\ninterval = 0x" + "f" * 5000, "[health] interval: this int is"),
        ("log_level = [0x" + "f" * 5000 + "]", "log_level: this list is"),
    ],
    ids=lambda text: text[:20],
)
def test_a_section_that_is_none_is_named(text: str, named: str) -> None:
    """A section is a table, mounts are several, and a value that Python cannot print is one."""
    assert refusal_of_file(text).startswith(named)


# -- mounts ----------------------------------------------------------------------------------------


def test_a_mount_needs_a_host_path_only() -> None:
    """`container` is the same path unless told, and a mount is writable unless told."""
    text = """
        [[mounts]]
        host = "/srv/models/"
        [[mounts]]
        host = "/dev/hugepages-1G"
        container = "/huge/../pages"
        read_only = true
    """
    assert from_file(text).mounts == (
        Mount("/srv/models", "/srv/models", False),
        Mount("/dev/hugepages-1G", "/pages", True),
    )


def mount(host: str, container: str | None = None) -> str:
    """A table of the file."""
    where = "" if container is None else f"container = {toml(container)}\n"
    return f"[[mounts]]\nhost = {toml(host)}\n{where}"


@pytest.mark.parametrize("path", ["", "x", "./x", "/x\ny", "/x\0", "/\x1b[2J"])
def test_a_mount_has_absolute_paths_in_one_line(path: str) -> None:
    """On both sides: what a runtime or a terminal would take for something else is no path."""
    for text, key in ((mount(path), "host"), (mount("/x", path), "container")):
        named, _, valid = refusal_of_file(text).partition("must be")
        assert named.startswith(f"[[mounts]] {key}: {path!r}") and "absolute path" in valid


TARGETS = ["/", "//", "/dev", "/proc", "/sys", "/dev/tenstorrent", "/dev/tenstorrent/", "/x/../dev"]


@pytest.mark.parametrize("target", [*TARGETS, *(f"/{each}" for each in TARGETS[2:6])])
def test_a_mount_does_not_hide_what_the_runtime_or_we_put_there(target: str) -> None:
    """Neither as `container` nor, where that is left out, as `host`."""
    for text in (mount("/x", target), mount(target)):
        assert refusal_of_file(text).startswith("[[mounts]] container: '/")


@pytest.mark.parametrize("same", ["/a", "/a/", "/b/../a", "/a/.", "//a"])
def test_no_two_mounts_have_one_place(same: str) -> None:
    """However its path is written."""
    assert "'/a' is not valid" in refusal_of_file(mount("/x", "/a") + mount("/y", same))


def test_the_shared_memory_of_shared_devices_is_where_their_locks_are() -> None:
    """A mount there would be one of two; without shares or common locks it is a place like any."""
    there = mount("/x", "/dev/shm")
    assert "have their locks there" in refusal_of_file(there + SHARED)
    assert from_file(there).mounts == (Mount("/x", "/dev/shm"),)
    assert from_file(f"{there}[sharing]\nlock_dir = ''\n{SHARED}").mounts


# -- sharing ---------------------------------------------------------------------------------------

SHARED = "[[sharing.resources]]\nname = 'n300'\nreplicas = 4\n"


def test_what_is_shared_has_a_name_and_replicas_and_the_rest_has_its_default() -> None:
    """Names may have the domain; devices are all, a number, or named by address, ID or ordinal."""
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
    assert from_file(text).sharing.resources == (
        Shared("n300", 4),
        Shared("p300", 2, "p300-half", ("0000:03:00.0", "3")),
        Shared("p150", 100, "p150.many", 2),
    )
    text = "[sharing]\nlock_dir = ''\nrename_by_default = true"
    assert from_file(text).sharing == Sharing(rename_by_default=True, lock_dir="")


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
        (SHARED.replace("n300", "other.org/n300"), ["other.org/n300", "is not tenstorrent.com"]),
        (SHARED + "rename = 'other.org/x'", ["other.org/x", "domain is not tenstorrent.com"]),
        (SHARED + "rename = 'n150'", ["n150 can be another resource's name"]),
        (SHARED + "rename = 'p300-board'", ["p300-board can be another resource's name"]),
        (SHARED + "rename = 'wormhole'", ["wormhole can be another resource's name"]),
        (SHARED + f"rename = '{'x' * 64}'", ["rename", "name of a resource"]),
        ("[sharing]\nrename_by_default = true\n" + SHARED.replace("n300", "x" * 60),
         ["63 characters"]),
        (SHARED + SHARED, ["n300 is the name of two entries"]),
        (SHARED + "rename = 'a'\n" + SHARED + "rename = 'a'", ["a is the name of two entries"]),
        (SHARED + "rename = 'a'\n" + SHARED + "rename = 'b'", ["every device is selected twice"]),
        (SHARED + "rename = 'a'\ndevices = 2\n" + SHARED + "rename = 'b'", ["selected twice"]),
        (SHARED + "rename = 'a'\ndevices = [1, 2]\n" + SHARED + "rename = 'b'\ndevices = ['2']",
         ["2", " is selected twice"]),
        (SHARED + "devices = 2", ["n300: a selection of its devices needs a name of its own"]),
        (SHARED + "devices = ['0000:01:00.0']", ["a selection of its devices needs a name"]),
        (SHARED + "devices = 0", ["devices: 0", '"all", a number']),
        (SHARED + "devices = []", ["devices: []"]),
        (SHARED + "devices = 'some'", ["devices: 'some'"]),
        (SHARED + "devices = [1.5]", ["devices: [1.5]"]),
        (SHARED + "memory_gb = 4", ["memory_gb", "left out", "turns"]),
        (SHARED + "mps = true", ["mps", "left out", "turns"]),
        ("[sharing]\nlock_dir = 5", ["lock_dir: 5", "a path, or empty"]),
        ("sharing = true", ["sharing: true", "a table: [sharing]"]),
        ("[sharing]\nresources = 'n300'", ["sharing.resources: 'n300'", "tables: [[sharing.res"]),
    ],
)  # fmt: skip
def test_sharing_that_cannot_be_has_a_sentence_of_its_own(text: str, words: list[str]) -> None:
    """What is missing, what contradicts what, and what exists for other hardware only."""
    line = refusal_of_file(text)
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", SHARED.replace("'n300'", '"two\\nlines/n300"')),
        ("a.toml", "".join(f'{SHARED}rename = "{n}"\ndevices = ["x\\ny"]\n' for n in "ab")),
        ("two\nlines.toml", SHARED + SHARED),
    ],
)
def test_a_refusal_is_one_line_whatever_names_hold(name: str, text: str, tmp_path: Path) -> None:
    """A name with a newline in it does not write a second line of the log."""
    (tmp_path / name).write_text(text)
    assert refusal({"config_file": str(tmp_path / name)}, {})


def test_a_name_of_another_domain_is_right_where_that_is_the_domain() -> None:
    """Also where the domain is not the file's word."""
    text = SHARED.replace("n300", "example.org/n300")
    found = from_file(text, {"resource_domain": "example.org"})
    assert found.sharing.resources == (Shared("n300", 4),)


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"log_level = ", b"unit = board", b"= 1", b"[health", b"a = 1\na = 2", b"log_level = 'info'\r",
     b"log_level = 'caf\xe9'", b"\xff\xfe\x00", b"x = 2024-13-01", b"health = " + b"[" * 10_000],
)  # fmt: skip
def test_a_file_that_is_no_toml_says_what_to_do(content: bytes) -> None:
    """A syntax error, no UTF-8, a nesting that no parser follows: with a line as it has to be."""
    line = refusal_of_file(content)
    assert line.startswith("is not valid TOML: ") and 'such as: unit = "board"' in line


def test_a_byte_order_mark_is_called_by_its_name() -> None:
    """An editor has put it there, and no editor shows it."""
    line = refusal_of_file(b'\xef\xbb\xbfunit = "board"')
    assert line == "begins with a byte order mark; save it as UTF-8 without one"


@pytest.mark.parametrize("name", ["missing", "file/below", "", "x" * 300])
def test_a_file_that_was_named_has_to_be_a_readable_file(name: str, tmp_path: Path) -> None:
    """Missing, below what is no directory, or a directory: the line names it, and who named it."""
    assert refusal({"config_file": ""}, {}).startswith("--config-file: '' is not valid")
    (tmp_path / "file").touch()
    path = str(tmp_path / name)
    for line, source in (
        (refusal({"config_file": path}, {}), "--config-file"),
        (refusal({}, {"TTDP_CONFIG_FILE": path}), "TTDP_CONFIG_FILE"),
    ):
        assert line.startswith(f"{path}: ")
        assert (f"{source} names it" in line) is ("no such file" in line) is (name == "missing")


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--fail-on-init-error", "run"], "true"),
        (["run", "--fail-on-init-error"], "true"),
        (["run", "--fail-on-init-error=no", "--log-level=info"], "no"),
        (["run"], None),
    ],
)
def test_the_switch_works_bare_with_a_value_and_before_a_command(
    words: list[str], value: str | None
) -> None:
    """Bare it means true, and swallows no word that follows."""
    options = ttdp._parsed_options(words)
    assert (options.command, options.fail_on_init_error) == ("run", value)


# -- whatever there may be -------------------------------------------------------------------------

values = st.sampled_from(["bdf", "card", "/x", "info", True, 0, -1, 1e999, "two\nlines"])
scalars = st.text(max_size=8) | st.booleans() | st.integers() | st.floats() | values
known_keys = [*DEFAULTS, "health", "mounts", "sharing", *(f.name for f in fields(HealthSettings))]
keys = st.sampled_from([*known_keys, "host", "name", "x", "a b"]) | st.text("a\n\x1b ", max_size=3)
sections = ["[health]", "[[mounts]]", "[[health]]", "[mounts]", "[sharing]", "host = '/x'"]
lines = st.one_of(
    st.builds(lambda key, value: f"{toml(key)} = {toml(value)}", keys, scalars),
    st.sampled_from(sections),
    st.text(max_size=20),
)
texts = st.lists(lines, max_size=6).map(lambda them: "\n".join(them).encode("utf-8", "replace"))


@hypothesis_settings(deadline=None)
@given(texts | st.binary(max_size=60))
def test_any_file_gives_settings_or_one_line(content: bytes) -> None:
    """Whatever a file holds, it is a valid configuration, or a line says what is wrong."""
    try:
        settings = from_file(content)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert from_file(as_toml(settings)) == settings


def as_toml(settings: Settings) -> str:
    """A file that says all of this."""

    def table(heading: str, value: Any) -> list[str]:
        shown = {f.name: getattr(value, f.name) for f in fields(value) if f.metadata}
        shown = {key: list(v) if isinstance(v, tuple) else v for key, v in shown.items()}
        return [heading, *(f"{key} = {toml(v)}" for key, v in shown.items() if v is not None)]

    text = ["mounts = []"] if settings.mounts == () else []
    text += table("", settings)
    text += table("[health]", settings.health)
    text += table("[sharing]", settings.sharing)
    for entry in settings.sharing.resources:
        text += table("[[sharing.resources]]", entry)
    for each in settings.mounts or ():
        text += table("[[mounts]]", each)
    return "\n".join(text)


characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
paths = st.text(characters, min_size=1, max_size=12).map(
    lambda text: os.path.abspath("/" + text.lstrip("/"))
)
targets = paths.filter(lambda path: path.isprintable() and path not in TARGETS)
domains = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,9}[a-z0-9])?(\.[a-z0-9]{1,9}){0,3}", fullmatch=True)
mounts = st.builds(Mount, targets, targets, st.booleans())
selected = st.sets(st.sampled_from(["0000:01:00.0", "0", "7"]), min_size=1).map(tuple)
shares = st.tuples(
    st.builds(Shared, st.just("n150"), st.integers(2, 100)),
    st.builds(Shared, st.just("n300"), st.integers(2, 100), st.just("one"), selected),
    st.builds(Shared, st.just("n300"), st.just(2), st.just("two"), st.integers(1, 9)),
)
rules = st.builds(
    HealthSettings,
    st.floats(0.1, 3600) | st.integers(1, 3600),
    st.none() | st.just("card") | st.floats(1, 200),
    st.integers(1, 99),
    st.floats(0, 1e9),
)
whole = st.builds(
    Settings,
    **{each.name: paths for each in fields(Settings)[:4]},
    resource_domain=domains,
    **{
        option.key: st.sampled_from(option.rule.choices)
        for option in OPTIONS
        if option.rule.choices
    },
    cdi_dir=paths,
    labels_dir=st.just("") | paths,
    metrics_file=st.just("") | paths,
    pod_resources_socket=paths,
    fail_on_init_error=st.booleans(),
    health=rules,
    mounts=st.none() | st.lists(mounts, max_size=3, unique_by=lambda m: m.container).map(tuple),
    sharing=st.builds(Sharing, st.booleans(), st.booleans(), st.just("") | paths, shares),
)


@hypothesis_settings(deadline=None, max_examples=60)
@given(whole)
def test_valid_settings_survive_being_written_and_read(settings: Settings) -> None:
    """A file that says all of a configuration gives exactly that one."""
    assert from_file(as_toml(settings)) == settings
