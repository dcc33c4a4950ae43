"""The reference kubelet's checkpoint: the file that records which pod was given which devices."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from google.protobuf.message import DecodeError

from generated import deviceplugin_pb2 as pb

CHECKPOINT = "kubelet_internal_checkpoint"
Corruption = Literal["missing", "empty", "truncated", "garbage", "checksum"]


@dataclass(slots=True)
class Held:
    """The devices of one resource that a container has, with the plugin's answer to Allocate."""

    per_node: dict[int, list[str]]  # by NUMA node; -1: none
    answer: pb.ContainerAllocateResponse

    @property
    def ids(self) -> set[str]:
        """The devices; one on two NUMA nodes is listed twice in `per_node`."""
        return {ident for ids in self.per_node.values() for ident in ids}


class Entry(NamedTuple):
    """One entry of the checkpoint: the devices of one resource that a container has."""

    uid: str
    container: str
    resource: str
    held: Held

    def json(self) -> dict[str, Any]:
        per_node = sorted((str(node), ids) for node, ids in self.held.per_node.items())
        return {
            "PodUID": self.uid,
            "ContainerName": self.container,
            "ResourceName": self.resource,
            "DeviceIDs": dict(per_node),
            "AllocResp": base64.b64encode(self.held.answer.SerializeToString()).decode(),
        }

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> Entry:
        """Return an entry of the file; raises an error of any type if it is malformed."""
        answer = base64.b64decode(item["AllocResp"] or "", validate=True)
        parsed = pb.ContainerAllocateResponse.FromString(answer)
        per_node = {int(node): [str(i) for i in ids] for node, ids in item["DeviceIDs"].items()}
        held = Held(per_node, parsed)
        return cls(str(item["PodUID"]), str(item["ContainerName"]), str(item["ResourceName"]), held)


class Snapshot(NamedTuple):
    """The content of the checkpoint at one moment: entries, and the healthy IDs by resource."""

    entries: list[Entry]
    registered: dict[str, list[str]]

    def json(self) -> bytes:
        """Return the file: as Go writes it, without spaces, keys of maps sorted.

        The checksum is a CRC of the JSON here. The original's is a hash of a Go value, which no
        other program can compute, so neither accepts the other's file.
        """
        data = {
            "PodDeviceEntries": [entry.json() for entry in self.entries] or None,
            "RegisteredDevices": dict(sorted(self.registered.items())),
        }
        content = {"Data": data, "Checksum": checksum(data)}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, text: bytes) -> Snapshot:
        """Return the content of a file; raises ValueError if it is damaged in any way."""
        try:
            content = json.loads(text)
            data = content["Data"]
            if content["Checksum"] != checksum(data):
                raise ValueError("checkpoint is corrupted")

            entries = [Entry.parse(item) for item in data["PodDeviceEntries"] or []]
            registered = {
                str(resource): [str(ident) for ident in ids or []]
                for resource, ids in (data["RegisteredDevices"] or {}).items()
            }
        except (LookupError, TypeError, AttributeError, RecursionError, DecodeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return cls(entries, registered)


def checksum(data: object) -> int:
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


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

    def write(self, snapshot: Snapshot) -> None:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace(self.path, snapshot.json())

    def read(self) -> Snapshot | None:
        """Return the file's content, None without a file. ValueError, OSError: it is damaged."""
        try:
            return Snapshot.parse(self.path.read_bytes())
        except FileNotFoundError:
            return None

    def corrupt(self, how: Corruption | bytes) -> None:
        """Damage the file, or replace it by these bytes."""
        if how == "missing":
            self.path.unlink(missing_ok=True)
            return

        whole = self.path.read_bytes() if self.path.is_file() else Snapshot([], {}).json()
        contents = {
            "empty": b"",
            "truncated": whole[: len(whole) // 2],
            "garbage": random.Random(1).randbytes(512),
            "checksum": whole.replace(b'"Checksum":', b'"Checksum":1'),
        }
        replace(self.path, how if isinstance(how, bytes) else contents[how])
