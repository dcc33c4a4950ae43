"""The package's SBOM, by packaging/sbom.py. `make sbom` validates it with CycloneDX's schema."""

from __future__ import annotations

import importlib.metadata
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

ARCHITECTURES = ("amd64", "arm64")
EPOCH = "1700000000"  # 2023-11-14T22:13:20Z


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "shiv.toml").read_text())


def sbom(arch: str) -> dict[str, Any]:
    command = [sys.executable, "packaging/sbom.py", arch, "0.2.0+git1"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
    document: dict[str, Any] = json.loads(
        subprocess.check_output(command, cwd=ROOT, env=environment)
    )
    return document


def files(document: dict[str, Any]) -> dict[str, str]:
    """Return the hashes of all files in an SBOM, by name."""
    return {
        reference["url"]: digest["content"]
        for component in document["components"]
        for reference in component["externalReferences"]
        for digest in reference["hashes"]
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_components_are_the_pinned_requirements(arch: str) -> None:
    """Each has its package URL, version and licence; the program depends on all of them.

    The document is reproducible: it has no serial number, and the time of the source.
    """
    document = sbom(arch)
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert "serialNumber" not in document

    found = {each["name"]: each["version"] for each in document["components"]}
    assert found == settings()["requirements"]
    for each in document["components"]:
        name = each["name"].replace("_", "-")
        assert each["purl"] == f"pkg:pypi/{name}@{each['version']}"
        assert each["licenses"] == [{"license": {"id": settings()["licences"][each["name"]]}}]

    program = document["metadata"]["component"]
    assert program["purl"] == f"pkg:generic/tt-device-plugin@0.2.0%2Bgit1?arch={arch}"
    depends = {each["ref"]: each.get("dependsOn") for each in document["dependencies"]}
    wanted = {each["bom-ref"] for each in document["components"]}
    assert {*depends[program["bom-ref"]]} == wanted


def test_files_are_those_that_are_locked() -> None:
    """Each architecture has its own wheels, with the hashes of shiv.toml; tools are not listed."""
    found = {arch: files(sbom(arch)) for arch in ARCHITECTURES}

    for arch, machine in (("amd64", "x86_64"), ("arm64", "aarch64")):
        for name in found[arch]:
            assert machine in name or name.endswith(("-any.whl", ".tar.gz")), name
        extensions = [name for name in found[arch] if name.startswith("grpcio-")]
        assert len(extensions) == len(settings()["abis"])

    tools = tuple(f"{name}-" for name in settings()["build"])
    locked = {
        name: digest for name, digest in settings()["sha256"].items() if not name.startswith(tools)
    }
    assert found["amd64"] | found["arm64"] == locked


def test_licences_are_those_of_the_packages() -> None:
    """Where a package names its licence in SPDX's words, shiv.toml has the same."""
    compared = 0
    for name, licence in settings()["licences"].items():
        metadata = importlib.metadata.metadata(name)
        if "License-Expression" in metadata:
            assert metadata["License-Expression"] == licence, name
            compared += 1

    assert compared >= 3
