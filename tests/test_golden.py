"""What commands print, word by word: the cases in tests/golden, see tests/golden.py."""

from __future__ import annotations

import pytest

from tests import golden


@pytest.mark.parametrize("name", golden.names())
def test_the_output_is_that_of_the_case(name: str, pytestconfig: pytest.Config) -> None:
    """Run with --update-golden to write what is printed now, and read the difference."""
    file = golden.DIRECTORY / f"{name}.txt"
    expected = file.read_text()

    played = golden.played(expected)

    if pytestconfig.getoption("--update-golden"):
        file.write_text(played)
    else:
        assert played == expected
