#!/usr/bin/env python3
"""Explains why pip could not fetch packages: two short lines if there is no network.

offline.py WHAT LOG        prints the explanation of a pip that has failed; make calls it
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What pip prints if it reaches no index: the last one is for each requirement.
NO_NETWORK = r"Connection|Temporary failure|Retrying|timed out|\(from versions: none\)"


def main() -> int:
    """Run the command."""
    what, log = sys.argv[1:]
    print(explanation(what, Path(log).read_text()), file=sys.stderr)
    return 0


def explanation(what: str, output: str) -> str:
    """Return the reason for a user. output: of pip, which explains all other errors itself."""
    if not re.search(NO_NETWORK, output):
        return output.strip()
    return (
        f"cannot fetch {what} from PyPI: is there a network?\n"
        "The .deb needs only python3 and libstdc++6: build it elsewhere and copy it."
    )


if __name__ == "__main__":
    sys.exit(main())
