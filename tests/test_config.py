"""Configuration: where a setting comes from. Messages about bad values: tests/golden/config."""

from __future__ import annotations

import itertools
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
from ttdp import OPTIONS, ConfigError, HealthSettings, Settings, Sharing, load_settings

# The contract's keys and defaults. Then values for file, variable and flag, each different from the
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
    "hugepages": ("private", "host", "none", "host"),
    "fail_on_init_error": (False, "true", "false", "true"),
    "log_level": ("info", "error", "warning", "debug"),
}  # fmt: skip
MAY_BE_EMPTY = {"cdi_dir", "labels_dir", "metrics_file"}


def toml(value: object) -> str:
    """Return a string, boolean, number or list of them as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):
        plain = [c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value]
        return f'"{"".join(plain)}"'
    return repr(value)


def line_of(key: str) -> str:
    """Return the line of the file with the key's sample."""
    _, in_file, *_ = SAMPLES[key]
    return f"{key} = {in_file if OPTIONS[key].is_switch else toml(in_file)}"


def from_file(
    content: str | bytes,
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Return the settings from a file with this content."""
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
        file.flush()
        return load_settings({**(flags or {}), "config_file": file.name}, environ or {})


def test_the_keys_are_those_of_the_contract() -> None:
    """With their defaults; names of flags and variables follow from them."""
    defaults = Settings()

    found = {key: getattr(defaults, key) for key in OPTIONS}
    assert found == {key: default for key, (default, *_) in SAMPLES.items()}
    assert (ttdp.flag_of("cdi_dir"), ttdp.variable_of("cdi_dir")) == ("--cdi-dir", "TTDP_CDI_DIR")
    assert defaults.health == HealthSettings(5.0, None)
    assert defaults.sharing == Sharing(False, True, "/run/ttdp/shm", ())
    assert defaults.mounts == () and defaults.exclude == ()


@pytest.mark.parametrize("key", OPTIONS)
def test_a_flag_precedes_a_variable_the_file_and_the_default(key: str) -> None:
    """In every combination of the three sources."""
    default, in_file, in_variable, in_flag = SAMPLES[key]

    for has_file, has_variable, has_flag in itertools.product((False, True), repeat=3):
        given = [in_file] * has_file + [in_variable] * has_variable + [in_flag] * has_flag
        wanted: Any = [default, *given][-1]
        if given and OPTIONS[key].is_switch:
            wanted = given[-1] == "true"

        environ = {ttdp.variable_of(key): in_variable} if has_variable else {}
        flags = {key: in_flag if has_flag else None}
        settings = from_file(line_of(key) if has_file else "", flags, environ)

        assert getattr(settings, key) == wanted, given


@pytest.mark.parametrize("key", OPTIONS)
@pytest.mark.parametrize("kind", ["variable", "flag"])
def test_an_empty_text_is_a_value_where_one_is_accepted_and_otherwise_not_set(
    key: str, kind: str
) -> None:
    """`TTDP_CDI_DIR=`: no CDI file; `TTDP_UNIT=`: environment files have this for a default."""
    flags = {key: ""} if kind == "flag" else {}
    environ = {ttdp.variable_of(key): ""} if kind == "variable" else {}
    _, in_file, *_ = SAMPLES[key]
    otherwise: Any = in_file == "true" if OPTIONS[key].is_switch else in_file

    found = from_file(line_of(key), flags, environ)

    assert getattr(found, key) == ("" if key in MAY_BE_EMPTY else otherwise)


def test_the_file_is_the_flags_else_the_variables_else_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default one may be absent. A byte order mark is ignored, and so is an empty name."""
    assert ttdp.DEFAULT_CONFIG_FILE == "/etc/tt-device-plugin/config.toml"
    default, one, other = (tmp_path / name for name in ("default", "one", "other"))
    monkeypatch.setattr(ttdp, "DEFAULT_CONFIG_FILE", str(default))
    assert load_settings({}, {}) == Settings()

    for file in (default, one, other):
        file.write_text(f'\ufeffresource_domain = "{file.name}.example"')
    variable, flag = {"TTDP_CONFIG_FILE": str(one)}, {"config_file": str(other)}

    empty: tuple[Any, Any] = {"config_file": ""}, {"TTDP_CONFIG_FILE": ""}
    assert load_settings(*empty).resource_domain == "default.example"
    assert load_settings({"config_file": None}, variable).resource_domain == "one.example"
    assert load_settings(flag, variable).resource_domain == "other.example"


@pytest.mark.parametrize("name", ["missing", "file/below", ".", "x" * 300, "two\nlines"])
def test_a_file_named_explicitly_must_be_a_readable_file(name: str, tmp_path: Path) -> None:
    """The line has its path and, if it does not exist, the flag or variable that names it."""
    (tmp_path / "file").touch()
    path = str(tmp_path / name)
    flag: dict[str, str | None] = {"config_file": path}

    for source, flags in (("--config-file", flag), ("TTDP_CONFIG_FILE", {})):
        with pytest.raises(ConfigError) as rejected:
            load_settings(flags, {"TTDP_CONFIG_FILE": path})

        shown = path.replace("\n", r"\n")
        is_missing = name in ("missing", "two\nlines")
        line = f"{source}: {shown} does not exist" if is_missing else f"{shown}: cannot be read: "
        assert str(rejected.value).startswith(line)


@pytest.mark.parametrize(
    "content",
    [b"log_level = ", b"[health", b"a = 1\na = 2", b"log_level = 'caf\xe9'", b"\xff\xfe\x00",
     b"x = 2024-13-01", b"health = " + b"[" * 10_000],
)  # fmt: skip
def test_a_file_that_is_not_toml_is_one_line_with_an_example(content: bytes) -> None:
    """A syntax error, another encoding, a nesting that is too deep."""
    with pytest.raises(ConfigError, match=r".*\.toml: invalid TOML: ") as rejected:
        from_file(content)
    (line,) = str(rejected.value).splitlines()
    assert line.endswith('(example of a valid line: unit = "board")')


def test_an_unknown_variable_is_a_warning() -> None:
    """It changes nothing; others' variables and our own are not warned of."""
    ours = dict.fromkeys(map(ttdp.variable_of, ("config_file", *OPTIONS)), "")
    others = {"PATH": "/bin", "TTDP_EXCLUDE": "03:00.0", "TTDP_Unit": "board"}

    warnings = [*ttdp.unknown_variables({**ours, **others})]

    form = "unknown variable {!r}; see tt-device-plugin.toml(5)"
    assert warnings == [form.format("TTDP_EXCLUDE"), form.format("TTDP_Unit")]
    assert from_file("", environ=others) == Settings()


def test_a_switch_has_several_spellings() -> None:
    """A bare flag is true."""
    for text in (*ttdp.BOOLEANS, "True", "OFF"):
        found = load_settings({"fail_on_init_error": text}, {})
        assert found.fail_on_init_error is (text.lower() in ("true", "yes", "on", "1"))

    options = ttdp.make_parser().parse_args(["run", "--fail-on-init-error", "--unit=board"])
    assert (options.fail_on_init_error, options.unit) == ("true", "board")


def test_directories_are_those_that_systemd_sets() -> None:
    """The first of several."""
    environ = {"STATE_DIRECTORY": "/a:/b", "RUNTIME_DIRECTORY": "/run/x"}
    settings = load_settings({}, environ)
    assert (settings.state_dir, settings.runtime_dir) == ("/a", "/run/x")
    assert load_settings({}, {"STATE_DIRECTORY": ""}).state_dir is None


VALID_LINES = [line_of(key) for key in SAMPLES]
VALID_TABLES = [
    "[health]\ninterval = 7.5\ntemperature_limit = 90",
    "[sharing]\nrename_by_default = true\nlock_dir = ''",
    "[[sharing.resources]]\nname = 'n300'\nreplicas = 4",
    "[[sharing.resources]]\nname = 'p300'\nreplicas = 2\nrename = 'half'\ndevices = ['01:00.0']",
    "[[mounts]]\nhost = '/x'\nread_only = true",
    "[[mounts]]\nhost = '/y'\ncontainer = '/z'",
]

# Not all of Unicode: hypothesis takes seconds to prepare it.
any_text = st.text("ab09٣/.-_=#[]{}\"'\\ \t\r\n\x00\x1b\x7f\x85é\u2028\ufeff😀", max_size=40)
any_key = st.sampled_from([*SAMPLES, "exclude", "interval", "devices", "host", "two\nlines"])
any_value = any_text | st.booleans() | st.integers() | st.floats()
any_line = any_text | st.builds("{} = {}".format, any_key.map(toml), any_value.map(toml))


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

    sections: list[tuple[str, Any]] = [
        ("", settings),
        ("[health]", settings.health),
        ("[sharing]", settings.sharing),
        *(("[[sharing.resources]]", each) for each in settings.sharing.resources),
        *(("[[mounts]]", each) for each in settings.mounts),
    ]
    written = []
    for heading, section in sections:
        values = [(each.name, getattr(section, each.name)) for each in fields(section)]
        known = ttdp.keys_of(type(section))
        written.append(heading)
        written += [f"{name} = {toml(v)}" for name, v in values if name in known and v is not None]

    assert from_file("\n".join(written)) == settings
