"""README's commands for a newcomer: a minimal Debian, an ordinary user, a fresh clone."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Told
from tests.e2e.container import Container, in_tree, require_root
from tests.world.processes import ROOT

PACKAGES = "git,make,python3,python3-venv"
USER = "newcomer"
TIMEOUT = "1500"  # seconds for a command on a busy machine, setup included
# Variables that configure the access to the package index, some of them by files.
NETWORK = re.compile(
    r"PIP_|(HTTPS?|NO|ALL|FTP)_PROXY$|SSL_CERT_|REQUESTS_CA_BUNDLE$|CURL_CA_BUNDLE$", re.IGNORECASE
)


class Tree(Container):
    """A clean system with a clone of this repository in its user's home; it is never booted."""

    def start(self) -> None:
        in_tree(self.root, "useradd", "--create-home", "--shell=/bin/bash", USER)
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT)]
        subprocess.run([*clone, str(self.root / "home" / USER / "clone")], check=True)
        in_tree(self.root, "chown", "-R", f"{USER}:", f"/home/{USER}")


def package_index() -> list[str]:
    """Return systemd-nspawn's options for an access to the package index like this machine's."""
    variables = {name: value for name, value in os.environ.items() if NETWORK.match(name)}
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "pip/pip.conf")
    if config.exists():
        variables["PIP_CONFIG_FILE"] = str(config)
    files = {*filter(os.path.isabs, variables.values()), "/etc/pip.conf"}

    options = [f"--setenv={name}={value}" for name, value in variables.items()]
    return options + [f"--bind-ro={file}" for file in sorted(files) if os.path.exists(file)]


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    require_root()
    with Tree("trixie", {}, PACKAGES) as tree:
        yield tree


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands(tree: Tree, target: str, told: Told) -> None:
    """`make demo` and `make test` pass; both announce how long the setup takes.

    The demo packs one Python only.
    """
    # The network is the host's.
    options = ["--as-pid2", f"--user={USER}", f"--chdir=/home/{USER}/clone"]
    options += ["--resolv-conf=copy-host", *package_index()]
    done = subprocess.run(
        tree.nspawn(*options, "timeout", TIMEOUT, "make", target),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    output = done.stdout
    assert done.returncode == 0 and "Traceback" not in output, output[-6000:]
    assert " once: about " in output, output[:3000]
    fetched = re.findall(r"(?m)^fetching .* for \w+, cp3\d+$", output)
    assert len(fetched) == (1 if target == "demo" else 0), output
    told(output.splitlines()[-1])
