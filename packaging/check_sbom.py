#!/usr/bin/env python3
"""Validates SBOMs with CycloneDX's own library, against the official JSON schema.

check_sbom.py FILE…        `make sbom` runs it, in a virtual environment with that library
"""

from __future__ import annotations

import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator


def main() -> int:
    """Print a line for each file; fail if one is not valid."""
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    status = 0
    for path in map(Path, sys.argv[1:]):
        error = validator.validate_str(path.read_text())
        print(f"{path}: {error or 'valid'}")
        status = 1 if error else status
    return status


if __name__ == "__main__":
    sys.exit(main())
