#!/usr/bin/env python3
"""Prints the SBOM of a package, in CycloneDX's JSON, from the versions and hashes in shiv.toml.

    sbom.py ARCH VERSION

It lists the Python packages in the zipapp, with the files that pip may take for this architecture:
those and no others, as pip compares their hashes. The same commit gives the same bytes: the time is
SOURCE_DATE_EPOCH, and there is no serial number.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import build_pyz

NAME = "tt-device-plugin"


def main() -> int:
    """Run the command."""
    arch, version = sys.argv[1:]
    print(json.dumps(document(build_pyz.read_settings(), arch, version), indent=2))
    return 0


def document(settings: Mapping[str, Any], arch: str, version: str) -> dict[str, Any]:
    """Return the SBOM of a package."""
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    moment = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    program = {
        "bom-ref": NAME,
        "type": "application",
        "name": NAME,
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:generic/{NAME}@{quote(version)}?arch={arch}",
    }
    components = [component(settings, arch, name) for name in sorted(settings["requirements"])]
    references = [each["bom-ref"] for each in components]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": program,
        },
        "components": components,
        "dependencies": [
            {"ref": NAME, "dependsOn": references},
            *({"ref": reference} for reference in references),
        ],
    }


def component(settings: Mapping[str, Any], arch: str, name: str) -> dict[str, Any]:
    """Return a Python package, with the hash of each file that can be in the zipapp."""
    version = settings["requirements"][name]
    # Package URLs of PyPI have the normalized name.
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}"
    return {
        "bom-ref": purl,
        "type": "library",
        "name": name,
        "version": version,
        "licenses": [{"license": {"id": settings["licences"][name]}}],
        "purl": purl,
        "externalReferences": [
            {
                "type": "distribution",
                "url": file,
                "hashes": [{"alg": "SHA-256", "content": digest}],
            }
            for file, digest in settings["sha256"].items()
            if is_packed(file, f"{name}-{version}", settings["architectures"][arch])
        ],
    }


def is_packed(file: str, stem: str, platforms: list[str]) -> bool:
    """Return whether a file is of this package and version, and for one of these platforms."""
    is_pure = file.endswith(("-any.whl", ".tar.gz"))
    is_for_this = is_pure or any(platform in file for platform in platforms)
    return file.startswith((f"{stem}-", f"{stem}.tar.gz")) and is_for_this


if __name__ == "__main__":
    sys.exit(main())
