"""The reference kubelet's checkpoint: the file that records which pod was given which devices."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from generated import deviceplugin_pb2 as pb

CHECKPOINT = "kubelet_internal_checkpoint"


class Entry(NamedTuple):
    """One entry: the devices of one resource that a container has, and the answer to Allocate."""

    uid: str
    container: str
    resource: str
    per_node: dict[int, list[str]]  # the devices by NUMA node; -1: none
    answer: pb.ContainerAllocateResponse

    @property
    def ids(self) -> set[str]:
        """The devices; one on two NUMA nodes is listed twice in `per_node`."""
        return {ident for ids in self.per_node.values() for ident in ids}

    def json(self) -> dict[str, Any]:
        return {
            "PodUID": self.uid,
            "ContainerName": self.container,
            "ResourceName": self.resource,
            "DeviceIDs": dict(sorted((str(node), ids) for node, ids in self.per_node.items())),
            "AllocResp": base64.b64encode(self.answer.SerializeToString()).decode(),
        }


class Snapshot(NamedTuple):
    """The content of the checkpoint at one moment: entries, and the healthy IDs by resource."""

    entries: list[Entry]
    registered: dict[str, list[str]]

    def json(self) -> bytes:
        """Return the file: as Go writes it, without spaces, keys of maps sorted.

        The original's checksum is a hash of a Go value, which no other program can compute.
        """
        data = {
            "PodDeviceEntries": [entry.json() for entry in self.entries] or None,
            "RegisteredDevices": dict(sorted(self.registered.items())),
        }
        content = {"Data": data, "Checksum": 1}
        return json.dumps(content, separators=(",", ":")).encode()


def replace(path: Path, content: bytes) -> None:
    """Replace the checkpoint: a dot file beside it, then a rename. A plugin sees both events."""
    temporary = path.with_name(".1234567890")  # the original's number is random
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    temporary.rename(path)


class CheckpointFile:
    """The file `kubelet_internal_checkpoint`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / CHECKPOINT
        self._latest = Snapshot([], {})  # that was written

    def write(self, snapshot: Snapshot) -> None:
        self._latest = snapshot
        replace(self.path, snapshot.json())

    def read(self) -> Snapshot:
        """Return what the file has: nothing if it is missing or damaged."""
        is_whole = self.path.is_file() and self.path.read_bytes() == self._latest.json()
        return self._latest if is_whole else Snapshot([], {})
