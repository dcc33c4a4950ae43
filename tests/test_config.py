"""Configuration: where a setting comes from, and the one line about one that is not valid."""

from __future__ import annotations

import itertools
import json
import re
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
from tests.conftest import READ_TIMEOUT
from ttdp import KEYS, OPTIONS, ConfigError, HealthSettings, Mount, Settings, Sharing, load_settings

Shared = ttdp.SharedResource

# The design's keys and defaults. Then values for file, variable and flag, each different from the
# next one, and from the default if possible.
SAMPLES: dict[str, tuple[Any, str, str, str]] = {
    "device_plugin_dir": ("/var/lib/kubelet/device-plugins", "/file/d", "/variable/d", "/flag/d"),
    "root": ("/", "/file/root", "/variable/root", "/flag/root"),
    "resource_domain": ("tenstorrent.com", "file.example", "variable.example", "flag.example"),
    "resource_naming": ("board", "card", "arch", "card"),
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
    "hugepages": ("private", "host", "none", "host"),
}  # fmt: skip

# Texts that are not valid, and the valid values as the message has them.
LONG = "/" + "x" * 4096
DOMAINS = ["", "Tenstorrent.com", "tenstorrent_com", "a..b", "-a.b", "a/b", "kubernetes.io", "a\nb"]
DOMAINS += ["x.kubernetes.io", "requests.example", "a" * 245, "tenstorrent.com\n"]
WRONG: dict[str, tuple[list[str], str]] = {
    **dict.fromkeys(("root",), (["", "/a\nb"], "the path of a directory")),
    **dict.fromkeys(
        ("cdi_dir", "labels_dir", "metrics_file"), ([LONG, "/a\x1b"], "a path, or empty")
    ),
    "device_plugin_dir": (["", "/" + "x" * 100], "a path of at most 64 bytes"),
    "resource_domain": (DOMAINS, "a lower-case DNS name outside kubernetes.io, such as example.c"),
    "resource_naming": (["", "cards", "BOARD", " board"], "board, card or arch"),
    "visible_devices": (["", "all", "0"], "bdf, index or none"),
    "device_list_strategy": (["", "CDI", "envvar"], "device-specs or cdi"),
    "unit": (["", "tray", "chips"], "chip or board"),
    "pod_resources_socket": (["", "/" + "x" * 107], "the path of a Unix socket, at most 107"),
    "fail_on_init_error": (["", "maybe", "2", "tru"], "true, yes, on, 1, false, no, off or 0"),
    "log_level": (["", "verbose", "INFO", "10"], "debug, info, warning or error"),
    "hugepages": (["", "shared", "PRIVATE"], "private, host or none"),
}


def toml(value: object) -> str:
    """A string, boolean, number or list of them as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        plain = [c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value]
        return f'"{"".join(plain)}"'
    return repr(value)


def line_of(key: str) -> str:
    """The line of the file with the key's sample."""
    _, in_file, *_ = SAMPLES[key]
    return f"{key} = {in_file if KEYS[key].is_switch else toml(in_file)}"


def from_file(
    content: str | bytes,
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings from a file with this content, which an error calls "FILE"."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()

        try:
            return load_settings({**(flags or {}), "config_file": file.name}, environ or {})
        except ConfigError as error:
            raise ConfigError(str(error).replace(file.name, "FILE")) from None


def rejection(content: str | bytes = "", **sources: Any) -> str:
    """The one line with which these are rejected."""
    with pytest.raises(ConfigError) as rejected:
        from_file(content, **sources)
    (line,) = str(rejected.value).splitlines()
    return line


def test_the_options_are_those_of_the_design() -> None:
    """Every option has its flag, variable, key and default."""
    defaults = Settings()

    assert {key: getattr(defaults, key) for key in OPTIONS} == {
        key: default for key, (default, *_) in SAMPLES.items()
    }
    assert (ttdp.flag_of("cdi_dir"), ttdp.variable_of("cdi_dir")) == ("--cdi-dir", "TTDP_CDI_DIR")
    assert defaults.health == HealthSettings(5.0, None, 2, 300.0)
    assert defaults.sharing == Sharing(False, True, "/run/ttdp/shm", ())
    assert defaults.mounts == () and defaults.exclude == ()


@pytest.mark.parametrize("key", OPTIONS)
def test_a_flag_precedes_a_variable_the_file_and_the_default(key: str) -> None:
    """In every combination of the three sources."""
    default, in_file, in_variable, in_flag = SAMPLES[key]

    for has_file, has_variable, has_flag in itertools.product((False, True), repeat=3):
        given = [in_file] * has_file + [in_variable] * has_variable + [in_flag] * has_flag
        wanted: Any = [default, *given][-1]
        if given and KEYS[key].is_switch:
            wanted = given[-1] == "true"

        environ = {ttdp.variable_of(key): in_variable} if has_variable else {}
        flags = {key: in_flag if has_flag else None}

        settings = from_file(line_of(key) if has_file else "", flags, environ)

        assert getattr(settings, key) == wanted, given


def test_the_file_is_the_flags_else_the_variables_else_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default one may be absent, `ignore_file` ignores any; a byte order mark is ignored.

    An empty name is as if it were not given.
    """
    assert ttdp.DEFAULT_CONFIG_FILE == "/etc/tt-device-plugin/config.toml"
    default, one, other = (tmp_path / name for name in ("default", "one", "other"))
    monkeypatch.setattr(ttdp, "DEFAULT_CONFIG_FILE", str(default))
    assert load_settings({}, {}) == Settings()

    for file in (default, one, other):
        file.write_text(f'\ufeffresource_domain = "{file.name}.example"')
    variable = {"TTDP_CONFIG_FILE": str(one)}
    flag = {"config_file": str(other)}
    empty_variable, empty_flag = {"TTDP_CONFIG_FILE": ""}, {"config_file": ""}

    assert load_settings({}, {}).resource_domain == "default.example"
    assert load_settings(empty_flag, empty_variable).resource_domain == "default.example"
    assert load_settings({"config_file": None}, variable).resource_domain == "one.example"
    assert load_settings(empty_flag, variable).resource_domain == "one.example"

    one.unlink()
    assert load_settings(flag, variable).resource_domain == "other.example"
    assert load_settings(flag, variable, ignore_file=True) == Settings()


MAY_BE_EMPTY = {"cdi_dir", "labels_dir", "metrics_file"}


@pytest.mark.parametrize("key", OPTIONS)
@pytest.mark.parametrize("kind", ["variable", "flag"])
def test_an_empty_text_is_a_value_where_one_is_accepted_and_otherwise_not_set(
    key: str, kind: str
) -> None:
    """`TTDP_CDI_DIR=`: no CDI file; `TTDP_UNIT=`: environment files have this for a default."""
    default, in_file, in_variable, _ = SAMPLES[key]
    variable = ttdp.variable_of(key)
    flags = {key: ""} if kind == "flag" else {}
    environ = {variable: ""} if kind == "variable" else {variable: in_variable}
    otherwise: Any = in_variable if kind == "flag" else in_file
    if KEYS[key].is_switch:
        otherwise = otherwise == "true"

    found = from_file(line_of(key), flags, environ)
    alone = load_settings(flags, environ if kind == "variable" else {})

    assert getattr(found, key) == ("" if key in MAY_BE_EMPTY else otherwise)
    assert getattr(alone, key) == ("" if key in MAY_BE_EMPTY else default)


@pytest.mark.parametrize("texts", ["true yes on 1 True YES On", "false no off 0 False NO Off"])
def test_the_switch_has_several_spellings_and_works_without_a_value(texts: str) -> None:
    """In upper and lower case; the word after it is not its value."""
    wanted = texts.startswith("true")
    for text in texts.split():
        assert load_settings({"fail_on_init_error": text}, {}).fail_on_init_error is wanted
        assert load_settings({}, {"TTDP_FAIL_ON_INIT_ERROR": text}).fail_on_init_error is wanted

    words = ["run", "--fail-on-init-error", "--unit=board"]
    command, options = ttdp.parse_command_line(words)

    assert (command, options.fail_on_init_error, options.unit) == ("run", "true", "board")


@pytest.mark.parametrize("key", OPTIONS)
def test_a_wrong_value_is_reported_with_its_source_and_the_valid_values(key: str) -> None:
    """From flag, variable and file alike, in one line."""
    flag, variable, is_switch = ttdp.flag_of(key), ttdp.variable_of(key), KEYS[key].is_switch
    texts, valid = WRONG[key]

    for text in texts:
        lines = {}
        if text:
            lines[flag] = rejection(flags={key: text})
            lines[variable] = rejection(environ={variable: text})
        if not is_switch:
            lines[f"FILE: {key}"] = rejection(f"{key} = {toml(text)}")

        shown = repr(text) if len(repr(text)) <= 80 else f"{text!r:.80}…"
        for source, line in lines.items():
            assert line.startswith(f"{source}: {shown} is not valid; must be {valid}")

    valid = "true or false" if is_switch else valid
    for value in ("1", "1.5", "[]", "{}", "2024-01-01", '"true"' if is_switch else "true"):
        line = rejection(f"{key} = {value}")
        assert line.startswith(f"FILE: {key}: ") and f"; must be {valid}" in line


def test_what_python_cannot_convert_is_reported_like_any_wrong_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that is not UTF-8, thousands of digits, a relative path without a directory."""
    assert rejection(environ={"TTDP_ROOT": "/\udcff"}).startswith("TTDP_ROOT: '/")

    entry = f"[[sharing.resources]]\nname = 'n150'\nreplicas = 2\ndevices = [0x{'f' * 5000}]"
    assert "FILE: [[sharing.resources]] devices: " in rejection(entry)

    # A relative path is one from the current directory, which can have been removed.
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert rejection(flags={"root": "dev"}).startswith("--root: 'dev' is not valid")
    assert from_file("cdi_dir = ''").cdi_dir == ""


@pytest.mark.parametrize(
    ("given", "source"),
    [
        ({"content": "device_list_strategy = 'cdi'\ncdi_dir = ''"}, "FILE: device_list_strategy"),
        ({"environ": {"TTDP_DEVICE_LIST_STRATEGY": "cdi"}, "content": "cdi_dir = ''"},
         "TTDP_DEVICE_LIST_STRATEGY"),
        ({"flags": {"device_list_strategy": "cdi", "cdi_dir": ""}}, "--device-list-strategy"),
    ],
)  # fmt: skip
def test_the_strategy_cdi_without_a_directory_is_reported_with_its_source(
    given: dict[str, Any], source: str
) -> None:
    """Containers would not start with CDI devices that no file describes."""
    assert rejection(**given) == f'{source}: "cdi" needs cdi_dir, which is empty'


def test_a_domain_that_begins_with_a_digit_needs_a_node_without_a_cdi_file() -> None:
    """Kubernetes accepts it as a domain, but no runtime as the vendor of a CDI device."""
    valid = "a name that begins with a letter, as a CDI vendor does, unless cdi_dir is empty"
    text = "resource_domain = '3d.example'"

    assert rejection(text) == f"FILE: resource_domain: '3d.example' is not valid; must be {valid}"
    assert from_file(f"{text}\ncdi_dir = ''").resource_domain == "3d.example"


SHARED = "[[sharing.resources]]\nname = 'n300'\nreplicas = 4\n"
HEALTH_KEYS = "interval, temperature_limit, heartbeat_misses, trip_holdoff"
TABLES = {  # the least of each kind
    "": "",
    "[health] ": "[health]\n",
    "[sharing] ": "[sharing]\n",
    "[[mounts]] ": "[[mounts]]\nhost = '/x'\n",
    "[[sharing.resources]] ": SHARED,
}
ALL_KEYS = ", ".join([*SAMPLES, "exclude", "health", "sharing", "mounts"])


@pytest.mark.parametrize(
    ("table", "key", "advice"),
    [
        ("", "unt", "did you mean unit?"),
        ("", "option", f"valid keys: {ALL_KEYS}"),
        ("[health] ", "intervall", "did you mean interval?"),
        ("[health] ", "two\nlines", f"valid keys: {HEALTH_KEYS}"),
        ("[sharing] ", "mps", "valid keys: rename_by_default, fail_requests_greater_than_one, "
         "lock_dir, resources"),
        ("[[mounts]] ", "readonly", "did you mean read_only?"),
        ("[[mounts]] ", "gpu", "valid keys: host, container, read_only"),
        ("[[sharing.resources]] ", "replica", "did you mean replicas?"),
        ("[[sharing.resources]] ", "memory_gb", "valid keys: name, replicas, rename, devices"),
        # In TOML, keys below a heading belong to it, which is easily forgotten.
        ("", "temperature_limit", "it belongs in [health]"),
        ("", "resources", "it belongs in [sharing]"),
        ("[sharing] ", "replicas", "it belongs in [[sharing.resources]]"),
        ("[[mounts]] ", "unit", "it belongs above the first table"),
        ("[health] ", "mounts", "it belongs above the first table"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_reported_with_the_nearest_one_its_table_or_the_valid_keys(
    table: str, key: str, advice: str
) -> None:
    """Otherwise somebody would believe in a setting that is not read."""
    line = rejection(f"{TABLES[table]}{toml(key)} = 1")
    assert line == f"FILE: {table}unknown key {key!r}; {advice}"


def test_a_message_is_short_and_has_what_is_wrong() -> None:
    """Of a long list the elements that are not valid, of a long key its begin."""
    known = [f"0000:{bus:02x}:00.0" for bus in range(32)]
    line = rejection(f"exclude = {toml([*known, '0000:3:00.0'])}")
    assert line.startswith("FILE: exclude: ['0000:3:00.0'] is not valid; must be a list")

    line = rejection(f"{SHARED}devices = {toml([*known, True])}")
    assert line.startswith("FILE: [[sharing.resources]] devices: [True] is not valid")

    line = rejection(f"{'unit' * 1000} = 1")
    assert line.startswith("FILE: unknown key 'unitunit") and len(line) < 500


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("TTDP_UNTI", "did you mean TTDP_UNIT?"),
        ("TTDP_CONFIGFILE", "did you mean TTDP_CONFIG_FILE?"),
        ("TTDP_Unit", "did you mean TTDP_UNIT?"),
        ("TTDP_EXCLUDE", "see tt-device-plugin.toml(5)"),
        ("TTDP_", "see tt-device-plugin.toml(5)"),
    ],
)
def test_an_unknown_variable_is_a_warning_with_the_nearest_one(variable: str, advice: str) -> None:
    """It changes nothing; others' variables and our own are not warned of."""
    environ = {"PATH": "/bin", variable: "board"} | dict.fromkeys(
        map(ttdp.variable_of, OPTIONS), ""
    )
    assert [*ttdp.unknown_variables(environ)] == [f"unknown variable {variable!r}; {advice}"]
    assert load_settings({}, {variable: "board"}) == Settings()


@pytest.mark.parametrize(
    "value", ['"0000:01:00.0"', '["01:00.0"]', '["0000:01:00.0\\n"]', "[1]", "true", '["all"]']
)
def test_chips_are_excluded_by_a_list_of_addresses(value: str) -> None:
    """Only in the file: a flag or variable has no lists."""
    chips = ("0000:01:00.0", "10000:c1:00.0")

    assert from_file(f"exclude = {toml(chips)}").exclude == chips
    assert from_file(f"exclude = {toml([*map(str.upper, chips)])}").exclude == chips

    assert rejection(f"exclude = {value}").endswith(
        "is not valid; must be a list of PCI addresses, such as 0000:03:00.0"
    )
    assert from_file("", environ={"TTDP_EXCLUDE": chips[0]}).exclude == ()


HUGE = "1" + "0" * 400  # too large for a float
WRONG_NUMBERS = {
    "[health] interval": ["0", "-1", "0.09", "3601", "'5'", "true", "nan", "inf", "[]", HUGE],
    "[health] temperature_limit": ["0", "0.9", "-5", "201", "'90'", "'Card'", "false", "nan", HUGE],
    "[health] heartbeat_misses": ["0", "-1", "1.5", "2.0", "'2'", "true", "{}"],
    "[health] trip_holdoff": ["-1", "-0.1", "'x'", "true", "inf", "nan", HUGE],
    "[[sharing.resources]] replicas": ["1", "101", "2.0", "true", "'2'"],
}


@pytest.mark.parametrize("place", WRONG_NUMBERS)
def test_a_number_that_is_not_valid_is_reported(place: str) -> None:
    """Wrong types, signs and limits, booleans (integers for Python), infinity and NaN."""
    for value in WRONG_NUMBERS[place]:
        line = rejection(f"{place.replace(' ', chr(10))} = {value}\nname = 'n300'")

        source, _, valid = line.partition(" is not valid; must be a ")
        assert source.startswith(f"FILE: {place}: {value[:50]}"), value
        assert valid.startswith(("number", "whole number"))


@pytest.mark.parametrize("place", WRONG_NUMBERS)
def test_the_limits_of_a_number_are_those_that_the_message_has(place: str) -> None:
    """Both are valid, and nothing beyond them."""
    key = KEYS[place.rpartition(" ")[2]]
    limits = re.search(r"number.* from (\S+) to ([0-9]+)", key.valid)
    assert limits
    least, most = map(json.loads, limits.groups())

    assert key.accepts(least) and key.accepts(most)
    assert not key.accepts(least - 1) and not key.accepts(most + 1)


def test_the_limit_of_a_temperature_can_be_the_cards_own() -> None:
    """It is the only limit that is not a number."""
    assert from_file('[health]\ntemperature_limit = "card"').health.temperature_limit == "card"


@pytest.mark.parametrize(
    "content",
    [b"log_level = ", b"unit = board", b"= 1", b"[health", b"a = 1\na = 2", b"log_level = 'info'\r",
     b"log_level = 'caf\xe9'", b"\xff\xfe\x00", b"x = 2024-13-01", b"health = " + b"[" * 10_000],
)  # fmt: skip
def test_a_file_that_is_not_toml_is_reported_with_an_example(content: bytes) -> None:
    """A syntax error, another encoding, a nesting that is too deep."""
    line = rejection(content)

    assert line.startswith("FILE: invalid TOML: ")
    assert line.endswith('(example of a valid line: unit = "board")')


@pytest.mark.parametrize("name", ["missing", "file/below", ".", "x" * 300, "two\nlines"])
def test_a_file_named_explicitly_must_be_a_readable_file(name: str, tmp_path: Path) -> None:
    """The line has its path and, if it does not exist, the flag or variable that names it."""
    (tmp_path / "file").touch()
    path = str(tmp_path / name)
    shown = path if path.isprintable() else repr(path)

    flag: dict[str, str | None] = {"config_file": path}
    for source, flags in (("--config-file", flag), ("TTDP_CONFIG_FILE", {})):
        with pytest.raises(ConfigError) as rejected:
            load_settings(flags, {"TTDP_CONFIG_FILE": path})

        reason = f"{source}: {shown} does not exist"
        if name not in ("missing", "two\nlines"):
            reason = f"{shown}: cannot be read: "
        assert str(rejected.value).startswith(reason)


def test_a_mount_needs_only_a_host_path() -> None:
    """`container` defaults to `host`, `read_only` to false; nobody asks whether `host` exists."""
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


RESERVED = ["/", "/dev", "/proc", "/sys", "/dev/tenstorrent"]
OTHER = f"is not valid; must be an absolute path other than {', '.join(RESERVED)}"


def test_a_mount_has_printable_absolute_paths_and_hides_nothing_of_the_runtime() -> None:
    """Neither as `container` nor, if that is left out, as `host`."""
    for path in ("", "x", "./x", "/x\ny", "/x\0", "/\x1b[2J"):
        wanted = f"FILE: [[mounts]] host: {path!r} is not valid; must be an absolute path"
        assert rejection(mount(path)) == wanted
        assert rejection(mount("/x", path)) == f"FILE: [[mounts]] container: {path!r} {OTHER}"

    for target in (*RESERVED, "//", "//dev", "/dev/tenstorrent/", "/x/../dev"):
        for text in (mount("/x", target), mount(target)):
            assert rejection(text).startswith("FILE: [[mounts]] container: '/")
            assert rejection(text).endswith(OTHER)


def test_an_entry_of_sharing_needs_a_name_and_replicas() -> None:
    """Names may have the domain; devices are all, a count, or addresses, board IDs and numbers."""
    text = f"""
        {SHARED.replace("n300", "example.org/n300")}
        [[sharing.resources]]
        name = "p300"
        replicas = 100
        rename = "example.org/p300-half"
        devices = ["0000:c1:00.0", "0000:03", 3]
    """
    assert from_file(text, {"resource_domain": "example.org"}).sharing.resources == (
        Shared("n300", 4),
        Shared("p300", 100, "p300-half", ("0000:c1:00.0", "0000:03", "3")),
    )


def test_devices_are_selected_by_addresses_in_any_case() -> None:
    """As chips are excluded; a board's serial number stays as its firmware reports it."""
    text = f"{SHARED}rename = 'half'\ndevices = ['0000:0A:00.0', '0000:C0', '00000465ABCDEF03']"

    (entry,) = from_file(text).sharing.resources

    assert entry.devices == ("0000:0a:00.0", "0000:c0", "00000465ABCDEF03")


ENTRY = "[[sharing.resources]] "
BOTH = f"{SHARED}rename = 'a'\n{SHARED}rename = 'b'"
LONG_NAME = SHARED.replace("n300", "x" * 60)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("health = 5", "health: 5 is not valid; must be a table: [health]"),
        ("[[health]]\ninterval = 5", "health: [{'interval': 5}] is not valid; must be a table"),
        ("[health]\ninterval = 0x" + "f" * 5000, "[health] interval: this int is not valid"),
        ("log_level = [0x" + "f" * 5000 + "]", "log_level: this list is not valid; must be debug"),
        ("[mounts]\nhost = '/x'", "mounts: {'host': '/x'} is not valid; must be tables: [[mounts]"),
        (mount("/x", "/a") + mount("/y", "/b/../a"),
         "[[mounts]] container: '/a' is not valid; must be a different path in each table"),
        (mount("/dev/shm") + SHARED, "[[mounts]] container: '/dev/shm' is not valid; must be an"),
        (mount("/srv/n300", "/dev/shm") + f"[sharing]\nlock_dir = ''\n{SHARED}",
         "[[mounts]] container: '/dev/shm' is not valid; must be another path: shared devices h"),
        ("mounts = ['/x']", "mounts: '/x' is not valid; must be a table: [[mounts]]"),
        ("[sharing]\nresources = 1", "sharing.resources: 1 is not valid; must be tables: [[shari"),
        ("[[sharing.resources]]\nname = 'n300'", f"{ENTRY}replicas is missing"),
        ("[[sharing.resources]]\nreplicas = 2", f"{ENTRY}name is missing"),
        ("[[sharing.resources]]\nnam = 'n300'\nreplicas = 2", f"{ENTRY}unknown key 'nam'; did you"),
        (SHARED.replace("n300", "a/b/c"), f"{ENTRY}name: 'a/b/c' is not valid; must be the name"),
        (SHARED.replace("'n300'", '"two\\nlines/n300"'), f"{ENTRY}name: 'two\\nlines/n300' is not"),
        (SHARED.replace("n300", "b.c/n300"), f"{ENTRY}b.c/n300: its domain is not tenstorrent.com"),
        (SHARED + "rename = 'b.c/x'", f"{ENTRY}b.c/x: its domain is not tenstorrent.com"),
        (SHARED + "rename = 'n150'", f"{ENTRY}n300: rename: n150 could clash with"),
        (SHARED + f"rename = '{'x' * 64}'", f"{ENTRY}rename: 'xxx"),
        (f"[sharing]\nrename_by_default = true\n{LONG_NAME}",
         f"{ENTRY}{'x' * 60}: {'x' * 60}.shared exceeds 63 characters"),
        (SHARED + SHARED, f"{ENTRY}n300: two entries have the name n300; choose a different"),
        (BOTH.replace("'b'", "'a'"), f"{ENTRY}n300: two entries have the name a"),
        (BOTH, f"{ENTRY}n300: selected by two tables; one without devices selects all"),
        (BOTH.replace("'a'", "'a'\ndevices = [1, 2]") + "\ndevices = ['2']",
         f"{ENTRY}n300: '2' is selected twice"),
        (SHARED + "devices = 2", f"{ENTRY}n300: needs rename: the devices that are not shared"),
        (SHARED + "devices = 0", f'{ENTRY}devices: 0 is not valid; must be "all", a count, or a'),
        (SHARED + "devices = [1.5]", f"{ENTRY}devices: [1.5] is not valid"),
        (SHARED + "devices = []", f"{ENTRY}devices: [] is not valid"),
    ],
)  # fmt: skip
def test_a_configuration_that_contradicts_itself_is_reported(content: str, line: str) -> None:
    """One line with the place in the file, the value, and what is wrong with it."""
    assert rejection(content).startswith(f"FILE: {line}")


def test_a_mount_on_dev_shm_and_shared_devices_are_valid_one_without_the_other() -> None:
    """Only together they are not: see above."""
    assert len(from_file(mount("/dev/shm")).mounts) == 1
    assert len(from_file(mount("/srv") + SHARED).mounts) == 1


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ("name = 'n150'", "replicas is missing"),
        ("name = 'n150'\nreplicas = 1", "replicas: 1 is not valid"),
        ("name = 'n150'\nreplicas = 2\nrenam = 'x'", "unknown key 'renam'; did you mean rename?"),
    ],
)
def test_of_several_tables_with_one_heading_the_message_has_the_number(
    second: str, problem: str
) -> None:
    """Otherwise nobody finds the one among many that lacks a key."""
    line = rejection(f"{SHARED}[[sharing.resources]]\n{second}")
    assert line.startswith(f"FILE: {ENTRY}(2 of 2) {problem}")


VALID_LINES = [
    f"{key} = {toml(value)}" for key, (_, value, *_) in SAMPLES.items() if not KEYS[key].is_switch
]
VALID_TABLES = [
    "[health]\ninterval = 7.5\ntemperature_limit = 'card'",
    "[health]\nheartbeat_misses = 3\ntrip_holdoff = 0",
    "[sharing]\nrename_by_default = true\nlock_dir = ''",
    SHARED,
    f"{SHARED.replace('n300', 'p300')}rename = 'half'\ndevices = ['0000:01:00.0', 3]",
    "[[mounts]]\nhost = '/x'\nread_only = true",
    "[[mounts]]\nhost = '/y'\ncontainer = '/z'",
]

# Not all of Unicode: hypothesis takes seconds to prepare it.
any_text = st.text("ab09٣/.-_=#[]{}\"'\\ \t\r\n\x00\x1b\x7f\x85é\u2028\ufeff😀", max_size=40)
any_key = st.sampled_from([*SAMPLES, *HEALTH_KEYS.split(", "), "host", "a b", "two\nlines"])
any_value = any_text | st.booleans() | st.integers() | st.floats()
any_line = any_text | st.builds(
    lambda key, value: f"{toml(key)} = {toml(value)}", any_key, any_value
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """Valid lines and tables, and in some files one line of anything."""
    parts = draw(st.lists(st.sampled_from(VALID_LINES), unique=True, max_size=4))
    parts += draw(st.lists(st.sampled_from(VALID_TABLES), unique=True, max_size=3))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), draw(any_line))
    return "\n".join(parts).encode("utf-8", "replace")


@hypothesis_settings(deadline=None, max_examples=150)
@given(files() | st.binary(max_size=60))
def test_any_file_gives_settings_or_one_line(content: bytes) -> None:
    """Settings survive being written and read again."""
    try:
        settings = from_file(content)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return

    written = [f"{key} = {toml(getattr(settings, key))}" for key in (*OPTIONS, "exclude")]
    sections: list[tuple[str, Any]] = [
        ("[health]", settings.health),
        ("[sharing]", settings.sharing),
        *(("[[sharing.resources]]", each) for each in settings.sharing.resources),
        *(("[[mounts]]", each) for each in settings.mounts),
    ]
    for heading, section in sections:
        names = [each.name for each in fields(section) if each.name in KEYS]
        values = [(name, getattr(section, name)) for name in names]
        written.append(heading)
        written += [f"{name} = {toml(value)}" for name, value in values if value is not None]

    assert from_file("\n".join(written)) == settings


def test_times_are_those_of_the_design() -> None:
    """Other tests hurry them, or wait for what they are."""
    names = "START_TIMEOUT METRICS_INTERVAL WRITTEN_WITHIN CREATED_WITHIN LINK_TIMEOUT EMPTY_WITHIN"
    assert [getattr(ttdp, name) for name in names.split()] == [25, 15, 30, 120, 1, 1]
    assert (ttdp.REGISTER_TIMEOUT, ttdp.BACKOFF) == (10, (0.1, 5))
    assert (READ_TIMEOUT, ttdp.FIRMWARE_TIMEOUT, ttdp.BIND_TIMEOUT) == (2, 10, 10)
    assert (ttdp.ROUND, ttdp.START_INTERVAL, ttdp.METRICS_ARE_OLD) == (5, 0.1, 120)
