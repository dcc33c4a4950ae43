"""Targets of make without a network, beside the one that tests/test_make.py has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.test_make import check_without_a_network, offline

__all__ = ["offline"]  # a fixture


@pytest.mark.parametrize("target", ["demo", "test"])
def test_without_a_network(offline: Sequence[str], tmp_path: Path, target: str) -> None:
    """Two short lines, and no traceback."""
    check_without_a_network(target, offline, tmp_path)
