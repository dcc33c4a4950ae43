"""The reference kubelet's checkpoint: who was given what, in the file that survives it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from google.protobuf.message import DecodeError

from generated import deviceplugin_pb2 as pb
from tests.world.eventlog import EventLog

CHECKPOINT = "kubelet_internal_checkpoint"
Corruption = Literal[
    "missing", "empty", "truncated", "garbage", "not utf-8", "deep", "checksum", "directory"
]
WRONG: Sequence[Any] = (None, True, 7, 1e300, "x", "", [], [[]], {}, {"x": {}})


@dataclass(slots=True)
class Held:
    """The devices of one resource that a container has, with the plugin's answer to Allocate."""

    per_node: dict[int, list[str]]
    answer: pb.ContainerAllocateResponse

    @property
    def ids(self) -> set[str]:
        """The devices, each once, whatever NUMA nodes it is on."""
        return {ident for ids in self.per_node.values() for ident in ids}


class Entry(NamedTuple):
    """One entry of the checkpoint: what a container has of a resource."""

    uid: str
    container: str
    resource: str
    held: Held

    def json(self) -> dict[str, Any]:
        """Return it as the file has it."""
        per_node = sorted(self.held.per_node.items(), key=lambda item: str(item[0]))
        return {
            "PodUID": self.uid,
            "ContainerName": self.container,
            "ResourceName": self.resource,
            "DeviceIDs": {str(node): ids for node, ids in per_node},
            "AllocResp": base64.b64encode(self.held.answer.SerializeToString()).decode(),
        }

    @classmethod
    def parse(cls, item: Mapping[str, Any]) -> Entry:
        """Return what the file has; an error of any sort if it is no entry."""
        try:
            answer = base64.b64decode(item["AllocResp"] or "", validate=True)
            parsed = pb.ContainerAllocateResponse.FromString(answer)
        except (binascii.Error, DecodeError) as error:
            raise ValueError(str(error)) from error
        per_node = {int(node): [str(i) for i in ids] for node, ids in item["DeviceIDs"].items()}
        held = Held(per_node, parsed)
        return cls(str(item["PodUID"]), str(item["ContainerName"]), str(item["ResourceName"]), held)


class Snapshot(NamedTuple):
    """What is written at one moment: entries, and the healthy IDs by resource."""

    entries: list[Entry]
    registered: dict[str, list[str]]

    def json(self) -> bytes:
        """Return the file: as Go writes it, without spaces, keys of maps sorted.

        The checksum is a CRC of the JSON here; the original's is a hash of a Go value, which no
        other program can compute. So neither reads the other's file.
        """
        data = {
            "PodDeviceEntries": [entry.json() for entry in self.entries] or None,
            "RegisteredDevices": dict(sorted(self.registered.items())),
        }
        content = {"Data": data, "Checksum": checksum(data)}
        return json.dumps(content, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, text: bytes) -> Snapshot:
        """Return what a file says; ValueError if it is damaged in any way."""
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
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return cls(entries, registered)


def checksum(data: object) -> int:
    """Return the checksum of a checkpoint's data."""
    return zlib.crc32(json.dumps(data, sort_keys=True).encode())


@dataclass(eq=False, slots=True)
class _Writing:
    """A snapshot that is under way to the file."""

    number: int
    content: bytes
    begun: float
    landed: asyncio.Event


class CheckpointFile:
    """The file `kubelet_internal_checkpoint`.

    The original takes a snapshot under one lock and writes it under another, so writings that come
    from different streams and from admissions overtake each other. With `overtaking` set they do so
    here: a writing is put off for up to LATE seconds, in which others of other origins pass it, and
    a file that has gone back to an older state stays there for up to STALE seconds. (Measured with
    bursts of messages on several resources; each stream, and admission, waits for the end of its
    own writing, so one message at a time is never overtaken.) The last to land is the newest.
    """

    LATE = 0.345
    STALE = 0.031

    def __init__(self, directory: Path, log: EventLog, source: random.Random) -> None:
        self.path = directory / CHECKPOINT
        self.overtaking = False
        self._log = log
        self._random = source
        self._taken = 0
        self._newest = 0  # the number of the newest snapshot that has landed
        self._stale = False  # an older one landed after that
        self._pending: list[_Writing] = []
        self._pump: asyncio.Task[None] | None = None

    async def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot; returns when it has landed: at once unless others may overtake it."""
        self._taken += 1
        begun = asyncio.get_running_loop().time()
        writing = _Writing(self._taken, snapshot.json(), begun, asyncio.Event())
        if not self.overtaking and not self._pending:
            self._land(writing)
            return
        self._pending.append(writing)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._land_pending())
        await writing.landed.wait()

    async def _land_pending(self) -> None:
        """Land what is pending in random order, but the newest never before an older one."""
        while self._pending:
            oldest = self._pending[0]
            age = asyncio.get_running_loop().time() - oldest.begun
            left = max(0.0, self.LATE - self.STALE - age)
            longest = min(self.STALE, left) if self._stale else left
            await asyncio.sleep(self._random.uniform(0, longest) if self.overtaking else 0)
            older = self._pending[:-1] or self._pending
            chosen = self._random.choice(older) if left and self.overtaking else self._pending[0]
            self._pending.remove(chosen)
            self._land(chosen)

    def _land(self, writing: _Writing) -> None:
        """Write a dot file beside it and rename that: a plugin sees both events."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self._random.randrange(10**8, 10**10)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(writing.content)
        temporary.rename(self.path)
        self._stale = writing.number < self._newest
        self._newest = max(self._newest, writing.number)
        writing.landed.set()
        self._log.record("written", number=writing.number, stale=self._stale)

    def write_now(self, snapshot: Snapshot) -> None:
        """Write a snapshot past all that is pending, which then is as good as written."""
        self._taken += 1
        for writing in self._pending:
            writing.landed.set()
        self._pending.clear()
        self._land(_Writing(self._taken, snapshot.json(), 0.0, asyncio.Event()))

    def abandon(self) -> None:
        """Let what is pending be lost, as the end of the process does."""
        if self._pump:
            self._pump.cancel()
        self._pending.clear()

    def read(self) -> Snapshot | None:
        """Return what the file says; None if there is none. ValueError, OSError: it is damaged."""
        try:
            return Snapshot.parse(self.path.read_bytes())
        except FileNotFoundError:
            return None

    # What can befall it

    def corrupt(self, how: Corruption | bytes) -> None:
        """Damage the file, or replace it by these bytes."""
        if how == "missing":
            self.path.unlink(missing_ok=True)
            return
        if how == "directory":
            self.path.unlink(missing_ok=True)
            self.path.mkdir()
            return
        whole = self.path.read_bytes() if self.path.is_file() else Snapshot([], {}).json()
        contents = {
            "empty": b"",
            "truncated": whole[: len(whole) // 2],
            "garbage": bytes(self._random.randrange(256) for _ in range(512)),
            "not utf-8": whole[:-1] + b'"\xff\xfe"}',
            "deep": b"[" * 100_000,
            "checksum": whole.replace(b'"Checksum":', b'"Checksum":1'),
        }
        content = how if isinstance(how, bytes) else contents[how]
        temporary = self.path.with_name(".1")
        temporary.write_bytes(content)
        temporary.chmod(0o600)
        temporary.rename(self.path)

    def misshapen(self) -> Iterator[tuple[str, bytes]]:
        """Yield what is wrong, and the file with a value of a wrong type, for each place in it."""
        document = json.loads(self.path.read_bytes())
        for place in _places(document, ()):
            for value in WRONG:
                name = f"{'.'.join(map(str, place)) or 'all of it'} is {json.dumps(value)}"
                yield name, json.dumps(_with(document, place, value)).encode()


def _places(value: Any, here: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    yield here
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, part in inner:
        yield from _places(part, (*here, key))


def _with(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return the document with another value in one place."""
    if not place:
        return value
    result: Any = dict(document) if isinstance(document, dict) else list(document)
    result[place[0]] = _with(document[place[0]], place[1:], value)
    return result
