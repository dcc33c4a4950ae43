"""The package's SBOM, by packaging/sbom.py. `make sbom` validates it with CycloneDX's schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.world.processes import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SETTINGS = tomllib.loads((ROOT / "shiv.toml").read_text())
TOOLS = tuple(f"{name}-" for name in SETTINGS["build"])


@pytest.mark.parametrize(("arch", "other"), [("amd64", "aarch64"), ("arm64", "x86_64")])
def test_it_has_what_is_packed(arch: str, other: str) -> None:
    """The pinned requirements with licences, and all files of this machine as they are locked.

    It is reproducible: it has no serial number, and the time of the source.
    """
    command = [sys.executable, "packaging/sbom.py", arch, "0.2.0+git1"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    document: dict[str, Any] = json.loads(
        subprocess.check_output(command, cwd=ROOT, env=environment)
    )

    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert "serialNumber" not in document
    program = document["metadata"]["component"]
    assert program["purl"] == f"pkg:generic/tt-device-plugin@0.2.0%2Bgit1?arch={arch}"

    files = {}
    for each in document["components"]:
        name, version = each["name"], each["version"]
        assert each["purl"] == f"pkg:pypi/{name.replace('_', '-')}@{version}"
        assert each["licenses"] == [{"license": {"id": SETTINGS["licences"][name]}}]
        for reference in each["externalReferences"]:
            files[reference["url"]] = reference["hashes"][0]["content"]
    found = {each["name"]: each["version"] for each in document["components"]}
    assert found == SETTINGS["requirements"]

    locked = SETTINGS["sha256"]
    names = [name for name in locked if not name.startswith(TOOLS) and other not in name]
    assert files == {name: locked[name] for name in names}
