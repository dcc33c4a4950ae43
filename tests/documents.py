"""The documents that users read: a test runs the examples of theirs that it can."""

from __future__ import annotations

import re

from tests.world.processes import ROOT

DEB = ROOT / "packaging/deb"
README = (ROOT / "README.md").read_text()
MANY_NODES = (DEB / "many-nodes.md").read_text()


def fenced(language: str, text: str = README) -> list[str]:
    """Return the blocks of code in a language."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", text)


def root_commands(text: str, part: str) -> list[str]:
    """Return the lines, without the prompt, of the one example of a root shell with this part."""
    (example,) = (block for block in fenced("console", text) if part in block)
    return [line.removeprefix("# ") for line in example.splitlines()]
