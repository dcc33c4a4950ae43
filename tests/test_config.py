"""Configuration: where a setting comes from. Messages about bad values: tests/golden/config."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import ttdp
from ttdp import OPTIONS, ConfigError, HealthSettings, Settings, Sharing, load_settings

# The contract's keys and defaults. Then values for file, variable and flag, each different from the
# next one, and from the default if possible.
SAMPLES: dict[str, tuple[Any, Any, str, str]] = {
    "device_plugin_dir": ("/var/lib/kubelet/device-plugins", "/file/d", "/variable/d", "/flag/d"),
    "root": ("/", "/file/root", "/variable/root", "/flag/root"),
    "resource_domain": ("tenstorrent.com", "file.example", "variable.example", "flag.example"),
    "resource_naming": ("board", "card", "arch", "card"),
    "visible_devices": ("bdf", "index", "none", "index"),
    "unit": ("chip", "board", "chip", "board"),
    "device_list_strategy": ("device-specs", "cdi", "device-specs", "cdi"),
    "cdi_dir": ("/var/run/cdi", "/file/cdi", "/variable/cdi", "/flag/cdi"),
    "labels_dir": ("/etc/kubernetes/node-feature-discovery/features.d", "", "/variable/l", "/l"),
    "metrics_file": ("/var/lib/prometheus/node-exporter/tt-device-plugin.prom", "/file/x.prom",
                     "/variable/x.prom", "/flag/x.prom"),
    "hugepages": ("private", "host", "none", "host"),
    "fail_on_init_error": (False, True, "false", "true"),
    "log_level": ("info", "error", "warning", "debug"),
}  # fmt: skip
MAY_BE_EMPTY = ("cdi_dir", "labels_dir", "metrics_file")
toml = partial(json.dumps, ensure_ascii=False)  # a string, boolean, number or list is written alike


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
    """An empty text is a value where one is accepted, else as if not set."""
    default, in_file, variable, flag = SAMPLES[key]

    for has_file, of_variable, of_flag in product([0, 1], [None, "", variable], [None, "", flag]):
        texts = [text for text in (of_flag, of_variable) if text or key in MAY_BE_EMPTY]
        given = [text for text in texts if text is not None]
        wanted: Any = [*given, *[in_file] * has_file, default][0]
        if given and OPTIONS[key].is_switch:
            wanted = wanted == "true"

        environ = {} if of_variable is None else {ttdp.variable_of(key): of_variable}
        content = f"{key} = {toml(in_file)}" if has_file else ""
        assert getattr(from_file(content, {key: of_flag}, environ), key) == wanted


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
    for flag, variable, used in (("", "", default), (None, one, one), (other, one, other)):
        environ = {"TTDP_CONFIG_FILE": str(variable)}
        settings = load_settings({"config_file": str(flag or "")}, environ)
        assert settings.resource_domain == f"{used.name}.example"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("two\nlines", r"{}: {}/two\nlines does not exist"),
        ("", "{1}/: cannot be read: Is a directory"),
    ],
)
def test_a_file_named_explicitly_must_be_a_readable_file(
    tmp_path: Path, name: str, line: str
) -> None:
    """The line has its path and, if it does not exist, the flag or variable that names it."""
    path = f"{tmp_path}/{name}"
    for source, flag in (("--config-file", path), ("TTDP_CONFIG_FILE", None)):
        with pytest.raises(ConfigError) as rejected:
            load_settings({"config_file": flag}, {"TTDP_CONFIG_FILE": path})
        assert str(rejected.value) == line.format(source, tmp_path)


def test_an_unknown_variable_is_a_warning() -> None:
    """It changes nothing; others' variables and our own are not warned of."""
    ours = dict.fromkeys(map(ttdp.variable_of, ("config_file", *OPTIONS)), "")
    others = {"PATH": "/bin", "TTDP_EXCLUDE": "03:00.0"}
    line = "unknown variable 'TTDP_EXCLUDE'; see tt-device-plugin.toml(5)"
    assert [*ttdp.unknown_variables(ours | others)] == [line]
    assert from_file("", environ=others) == Settings()


def test_a_bare_switch_is_true_and_directories_are_those_that_systemd_sets() -> None:
    """The first of several directories."""
    options = ttdp.make_parser().parse_args(["run", "--fail-on-init-error", "--unit=board"])
    assert (options.fail_on_init_error, options.unit) == ("true", "board")

    settings = load_settings({}, {"STATE_DIRECTORY": "/a:/b", "RUNTIME_DIRECTORY": "/run/x"})
    assert (settings.state_dir, settings.runtime_dir) == ("/a", "/run/x")
    assert load_settings({}, {"STATE_DIRECTORY": ""}).state_dir is None


VALID = [f"{key} = {toml(in_file)}" for key, (_, in_file, *_) in SAMPLES.items()]
VALID += [
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
    parts = sorted(draw(st.lists(st.sampled_from(VALID), unique=True, max_size=7)), key=VALID.index)
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), draw(any_line))
    return "\n".join(parts).encode("utf-8", "replace")


@hypothesis_settings(deadline=None, max_examples=150)
@given(files() | st.binary(max_size=60))
@example("\n".join(VALID).encode())
@example(b"log_level = 'caf\xe9'")
@example(b"x = 2024-13-01")
@example(b"health = " + b"[" * 10_000)
def test_any_file_gives_settings_or_one_line(content: bytes) -> None:
    """Settings survive being written and read again."""
    try:
        settings = from_file(content)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1
        return

    sections: list[tuple[str, Any]] = [("", settings), ("[health]", settings.health)]
    sections += [("[sharing]", settings.sharing)]
    sections += [("[[sharing.resources]]", each) for each in settings.sharing.resources]
    sections += [("[[mounts]]", each) for each in settings.mounts]
    written = []
    for heading, section in sections:
        values = {each.name: getattr(section, each.name) for each in fields(section)}
        known = ttdp.keys_of(type(section)).keys()
        written.append(heading)
        written += [f"{key} = {toml(values[key])}" for key in known if values[key] is not None]
    assert from_file("\n".join(written)) == settings
