"""Many nodes at once: cloud-init and Ansible, as in the examples, and a copied repository.

A clean system's only repository is that of `make repository`, on a web server in the same system.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest

from tests.documents import DEB, MANY_NODES, root_commands
from tests.e2e.container import PACKAGES
from tests.e2e.host import CONFIG, CONFIGURATION
from tests.e2e.repository import AptNode, Publisher, of_this_server
from tests.e2e.steps import UNIT
from tests.world.node import SimulatedNode, Ticker
from tests.world.processes import wait_until

SUITE = "trixie"
ROLLOUT = DEB / "rollout"
COPY = f"/srv/{UNIT}"  # where many-nodes.md has a repository that was copied to the node
CLOUD_INIT = (ROLLOUT / "cloud-init.yaml").read_text()
PLAYBOOK = (ROLLOUT / "ansible.yaml").read_text()
WEB = """\
[Unit]
DefaultDependencies=no
After=local-fs.target
Before=cloud-init-local.service

[Service]
ExecStart=/usr/bin/python3 -m http.server --bind=127.0.0.1 --directory=/srv/shared/repository 8000

[Install]
WantedBy=multi-user.target
"""


class ManagedNode(AptNode):
    """A system with cloud-init and Ansible; cloud-init installs the package at the first boot."""

    TREE = f"{PACKAGES},curl,cloud-init,ansible-core,python3-apt,sudo,unattended-upgrades"

    def start(self) -> None:
        self.write("/etc/systemd/system/web.service", WEB)
        wanted = self.root / "etc/systemd/system/multi-user.target.wants/web.service"
        wanted.symlink_to("/etc/systemd/system/web.service")

        for path in self.root.glob("etc/apt/sources.list*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (self.root / "etc/apt/sources.list.d").mkdir()

        self.write("/var/lib/cloud/seed/nocloud/meta-data", "instance-id: node-1\n")
        self.write("/var/lib/cloud/seed/nocloud/user-data", of_this_server(CLOUD_INIT))
        self.boot()


@pytest.fixture(scope="module")
def node(publisher: Publisher) -> Iterator[ManagedNode]:
    with ManagedNode(SUITE, publisher) as node:
        yield node


def be_without(node: AptNode) -> None:
    """Remove the package, its repository and the key."""
    node("dpkg", "--purge", UNIT)
    node.shell(f"rm -f /etc/apt/keyrings/{UNIT}* /etc/apt/sources.list.d/{UNIT}*")
    node.update()


def test_cloud_init_installs_it_at_the_first_boot(node: ManagedNode, publisher: Publisher) -> None:
    """The service runs when cloud-init is done."""
    status = ("cloud-init", "status")
    wait_until(
        lambda: re.search("status: (done|error)", node(*status, check=False)),
        lambda: f"the end of cloud-init\n{node('cat', '/var/log/cloud-init-output.log')}",
    )
    assert node.version() == publisher.version, node("cat", "/var/log/cloud-init-output.log")
    assert node.is_active()


def test_ansible_installs_it_and_changes_nothing_twice(
    node: ManagedNode, publisher: Publisher
) -> None:
    """The second run changes no task but the check, which stops the roll-out at a bad node."""
    be_without(node)
    cards = SimulatedNode(node.shared / "node")
    cards.add("n300")
    node.write(CONFIG, CONFIGURATION)
    node.write("/root/playbook.yml", of_this_server(PLAYBOOK))
    node.write("/root/hosts", "[tenstorrent_nodes]\nlocalhost ansible_connection=local\n")
    command = ("ansible-playbook", "--inventory", "/root/hosts", "/root/playbook.yml")

    with Ticker(cards):
        for changed in (4, 1):
            output = node(*command)
            assert re.search(rf"changed={changed} .*failed=0", output), output
            assert node.version() == publisher.version and node.is_active()

        cards.chip(cards.chips[0].bdf).die()
        wait_until(lambda: node.status_of(UNIT, "check"), "a failed check")
        assert "does not respond" in node(*command, check=False)


def test_a_copied_repository(node: ManagedNode, publisher: Publisher) -> None:
    """Without a network: `make repository` with a file: address, copied to that directory."""
    be_without(node)
    node("systemctl", "stop", "web")
    current = publisher.packages.current
    url = f"file:{COPY}"

    assert not publisher.publish(node.shared / "copied", current, url=url)
    node.shell(f"cp -r /srv/shared/copied {COPY}")
    for line in root_commands(MANY_NODES, f"{COPY}/{UNIT}.sources"):
        node.shell(line.replace("apt install", "apt install --yes"))

    assert not node.update()
    assert node.version() == publisher.version and node.is_active()
