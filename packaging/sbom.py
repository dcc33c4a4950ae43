#!/usr/bin/env python3
"""Makes the SBOM of a package, in CycloneDX's JSON, from the versions and hashes in shiv.toml.

    sbom.py [--arch amd64|arm64] [--version VERSION]     prints it

It lists the Python packages in the zipapp, with the files that pip may take for this architecture:
those and no others, as pip compares their hashes. The same commit gives the same bytes: the time is
SOURCE_DATE_EPOCH, and there is no serial number.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

import build_pyz

NAME = "tt-device-plugin"
LICENCE = "Apache-2.0"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Prints the SBOM of a package.")
    here = build_pyz.MACHINES.get(os.uname().machine)
    parser.add_argument("--arch", default=here, help="default: this machine's")
    parser.add_argument("--version", help="default: the version of version.py")
    options = parser.parse_args()
    version = options.version or build_pyz.package_version()
    print(text(options.arch, version, build_pyz.source_date_epoch()), end="")
    return 0


def text(arch: str, version: str, epoch: int) -> str:
    """Return the SBOM of a package as a file's text. epoch: seconds since 1970."""
    settings = build_pyz.read_settings()
    return json.dumps(document(settings, arch, version, epoch), indent=2) + "\n"


def document(settings: Mapping[str, Any], arch: str, version: str, epoch: int) -> dict[str, Any]:
    """Return the SBOM of a package."""
    moment = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc)
    program = {
        "bom-ref": NAME,
        "type": "application",
        "name": NAME,
        "version": version,
        "licenses": [{"license": {"id": LICENCE}}],
        "purl": f"pkg:generic/{NAME}@{quoted(version)}?arch={arch}",
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
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}@{quoted(version)}"
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
            for file, digest in files(settings, arch, name).items()
        ],
    }


def files(settings: Mapping[str, Any], arch: str, name: str) -> dict[str, str]:
    """Return the hashes of a package's files for an architecture, by file name."""
    stem = f"{name}-{settings['requirements'][name]}"
    platforms = settings["architectures"][arch]
    found = {}
    for file, digest in settings["sha256"].items():
        is_for_all = file.endswith(("-any.whl", ".tar.gz"))
        is_for_this = any(platform in file for platform in platforms)
        if file.startswith((f"{stem}-", f"{stem}.")) and (is_for_all or is_for_this):
            found[file] = digest
    if not found:
        sys.exit(f"shiv.toml has no hash of {stem} for {arch}; run: make lock")
    return found


def quoted(version: str) -> str:
    """Return a version as a part of a package URL."""
    return urllib.parse.quote(version, safe="")


if __name__ == "__main__":
    sys.exit(main())
