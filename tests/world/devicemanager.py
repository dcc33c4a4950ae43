"""The reference kubelet's device manager: which devices a container gets and starts with.

It follows `pkg/kubelet/cm/devicemanager` of Kubernetes 1.30 to 1.37; functions are named as in
1.37.1. One `DeviceManager` is one life of a kubelet: a restart makes another one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CheckpointFile, Entry, Held, Snapshot
from tests.world.eventlog import EventLog
from tests.world.plugins import Client, Config, Devices, Failure, Plugins, numa_nodes

NO_NUMA_NODE = -1
PRE_START_TIMEOUT = 30.0  # seconds; no other call to a plugin has a deadline


class AdmissionError(Exception):
    """A pod that the kubelet rejects, with the reason and message of `kubectl describe`.

    `reason` is UnexpectedAdmissionError or OutOf<resource>.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class Panic(Exception):
    """A nil dereference in the kubelet, which ends it."""


class Claim(NamedTuple):
    """A container that requests devices, as the device manager sees it."""

    uid: str  # of its pod
    pod: str  # the pod's name, for events
    container: str
    request: Mapping[str, int]
    init: bool  # an ordinary init container: the pod's later containers reuse its devices
    running: bool  # it runs, and did so when this kubelet started


class Desired(Protocol):
    """The pods that the kubelet is to run, as far as it knows."""

    def active(self) -> set[str]:
        """Return the UIDs of the pods that it knows and that have not ended."""

    def all_sources_ready(self) -> bool:
        """Return whether it has heard of all of them, static pods and the API server's."""


@dataclass(slots=True)
class Allocation:
    """The answers for all resources of a container, merged as the kubelet does it."""

    held: dict[str, Held] = field(default_factory=dict)  # by resource
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[pb.Mount] = field(default_factory=list)
    devices: list[pb.DeviceSpec] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[str] = field(default_factory=list)

    @property
    def ids(self) -> dict[str, frozenset[str]]:
        """The device IDs by resource."""
        return {resource: frozenset(held.ids) for resource, held in self.held.items()}

    def add(self, answer: pb.ContainerAllocateResponse) -> None:
        """Merge an answer, except variables and annotations: what is there already wins."""
        known = {spec.container_path for spec in self.devices}
        self.devices.extend(d for d in answer.devices if d.container_path not in known)
        known = {mount.container_path for mount in self.mounts}
        self.mounts.extend(m for m in answer.mounts if m.container_path not in known)
        names = [cdi.name for cdi in answer.cdi_devices]
        self.cdi_devices.extend(name for name in names if name not in self.cdi_devices)

    def fields(self) -> dict[str, Any]:
        """Return the allocation as fields of an event."""
        pairs = [f"{resource}={ident}" for resource, ids in self.ids.items() for ident in ids]
        return {
            "ids": sorted(pairs),
            "env": [f"{key}={value}" for key, value in sorted(self.envs.items())],
            "devices": [f"{d.host_path}:{d.container_path}:{d.permissions}" for d in self.devices],
            "mounts": [f"{mount.host_path}:{mount.container_path}" for mount in self.mounts],
            "annotations": [f"{key}={value}" for key, value in sorted(self.annotations.items())],
            "cdi": self.cdi_devices,
        }


class PodDevices:
    """The devices of each pod, in the kubelet's memory (pod_devices.go)."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, dict[str, Held]]] = {}  # pod's UID, container, resource
        self.allocated: dict[str, set[str]] = {}  # by resource; also what is just being allocated
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})

    def of(self, uid: str, container: str) -> dict[str, Held]:
        """Return the devices of a container, by resource."""
        return self.held.get(uid, {}).get(container, {})

    def insert(self, uid: str, container: str, resource: str, held: Held) -> None:
        """Remember an answer."""
        self.held.setdefault(uid, {}).setdefault(container, {})[resource] = held

    def forget(self, uids: Iterable[str]) -> None:
        """Free the devices of these pods; the checkpoint follows with its next write."""
        for uid in uids:
            self.held.pop(uid, None)
        self.recount()

    def recount(self) -> None:
        """Mark exactly those devices allocated that a pod has."""
        self.allocated = {}
        for entry in self.entries():
            self.allocated.setdefault(entry.resource, set()).update(entry.held.ids)

    def entries(self) -> list[Entry]:
        """Return all devices as entries of the checkpoint."""
        return [
            Entry(uid, container, resource, held)
            for uid, containers in self.held.items()
            for container, resources in containers.items()
            for resource, held in resources.items()
        ]

    def reusable(self, uid: str) -> dict[str, set[str]]:
        """Return the devices that the pod's init containers leave to it, by resource.

        The original keeps them for the latest pod only (`devicesToReuse`).
        """
        if self._reusable[0] != uid:
            self._reusable = (uid, {})
        return self._reusable[1]


class DeviceManager:
    """The device manager in one life of the kubelet."""

    def __init__(
        self, config: Config, log: EventLog, file: CheckpointFile, desired: Desired
    ) -> None:
        self.config = config
        self.log = log
        self.desired = desired
        self.devices = Devices()
        self.pods = PodDevices()
        self.plugins = Plugins(config, log, self.devices, self.write_checkpoint, self.status)
        self.latest = ""  # the UID of the pod that was admitted last
        self._file = file

    def _snapshot(self) -> Snapshot:
        healthy = self.devices.healthy.items()
        registered = {resource: self.config.shuffled(ids) for resource, ids in healthy}
        entries = self.pods.entries()
        self.config.random.shuffle(entries)
        return Snapshot(entries, registered)

    async def write_checkpoint(self) -> None:
        """Write the checkpoint; returns when it is there."""
        await self._file.write(self._snapshot())

    def write_checkpoint_now(self) -> None:
        """Write the checkpoint past all writes that are under way."""
        self._file.write_now(self._snapshot())

    def read_checkpoint(self) -> None:
        """Read which pod has which devices; resources stay empty until a plugin registers.

        A file that cannot be read or fails its checksum counts as none.
        """
        try:
            snapshot = self._file.read()
        except (OSError, ValueError) as error:
            self.log.record("checkpoint-ignored", error=str(error))
            return
        if snapshot is None:
            return
        for uid, container, resource, held in snapshot.entries:
            self.pods.insert(uid, container, resource, held)
        self.pods.recount()
        for resource in snapshot.registered:
            self.devices.replace(resource, [])
            self.plugins.remember(resource)

    def status(self) -> dict[str, tuple[int, int]]:
        """Return capacity and allocatable by resource; removes what has expired (GetCapacity())."""
        known = {*self.devices.healthy, *self.devices.unhealthy}
        expired = sorted(resource for resource in known if self.plugins.is_expired(resource))
        for resource in expired:
            self.plugins.endpoints.pop(resource, None)
            self.devices.remove(resource)
        if expired:
            self.write_checkpoint_now()
        for resource in expired:
            self.log.record("removed", resource=resource)
        return {
            resource: (len(healthy) + len(self.devices.unhealthy.get(resource, ())), len(healthy))
            for resource, healthy in self.devices.healthy.items()
        }

    def prune(self) -> None:
        """Forget pods that have ended, in memory only (UpdateAllocatedDevices())."""
        if not self.desired.all_sources_ready():
            return
        gone = self.pods.held.keys() - self.desired.active()
        if self.config.keeps_the_last_pod:
            gone.discard(self.latest)
        if gone:
            self.log.record("forgotten", uids=sorted(gone))
            self.pods.forget(gone)

    def is_known(self, resource: str) -> bool:
        """Return whether a plugin has registered the resource, or a pod has a device of it.

        Other resources are ignored: a container gets no devices of them.
        """
        return resource in self.devices.healthy or resource in self.pods.allocated

    def dereference(self, resource: str, ident: str) -> None:
        """Use a device that a pod has, or is just getting, and that is not listed."""
        text = f"{resource} does not list {ident!r}, which a pod has or is just getting"
        if self.config.dereferences_unlisted:
            raise Panic(text)
        self.log.violation(text)

    def edits(self, claim: Claim) -> Allocation:
        """Merge the answers of a container's resources: the first in Go's random order wins."""
        result = Allocation()
        by_resource = self.pods.of(claim.uid, claim.container).items()
        for resource, held in self.config.shuffled(by_resource):
            result.held[resource] = held
            result.add(held.answer)
            texts = ((result.envs, held.answer.envs), (result.annotations, held.answer.annotations))
            for mine, theirs in texts:
                for key, value in theirs.items():
                    kept = mine.setdefault(key, value)
                    if kept != value:
                        where = {"resource": resource, "pod": claim.pod, "key": key}
                        self.log.record("conflict", **where, ignored=value, kept=kept)
        return result


# ---------------------------------------------------------------------------------- admission


def check_fit(
    manager: DeviceManager, uid: str, request: Mapping[str, int], used: Mapping[str, int]
) -> None:
    """Raise AdmissionError if a pod's request does not fit beside what other pods `used`.

    This is the predicate that every pod must pass after Allocate, also one that runs already
    (predicateAdmitHandler.Admit of pkg/kubelet/lifecycle/predicate.go, 1.33 to 1.37). Allocatable
    are the healthy devices, in the original as its Node object has them. If the pod has devices, it
    is at least the number of allocated devices (sanitizeNodeAllocatable of manager.go): so an
    intact checkpoint saves a pod whose device is Unhealthy, and without one the pod is rejected. A
    resource that the kubelet does not know is not checked (removeMissingExtendedResources).
    """
    for resource, (_, allocatable) in manager.status().items():
        requested = request.get(resource, 0)
        if uid in manager.pods.held:
            allocatable = max(allocatable, len(manager.pods.allocated.get(resource, ())))
        if requested > max(0, allocatable - used.get(resource, 0)):
            numbers = f"requested: {requested}, used: {used.get(resource, 0)}"
            text = f"Node didn't have enough resource: {resource}, {numbers}"
            raise AdmissionError(f"OutOf{resource}", f"{text}, capacity: {allocatable}")


class Admission:
    """The admission of one container."""

    def __init__(self, manager: DeviceManager, claim: Claim) -> None:
        self._manager = manager
        self._claim = claim

    async def run(self) -> Allocation:
        """Give the container the devices that it requests. Raises AdmissionError, or Panic."""
        manager = self._manager
        known = {r: n for r, n in self._claim.request.items() if manager.is_known(r)}
        if manager.config.policy != "none":
            self._find_hints(known)
        try:
            await self.allocate(known)
        except Failure as failure:
            message = f"Allocate failed due to {failure}, which is unexpected"
            raise AdmissionError("UnexpectedAdmissionError", message) from failure
        return manager.edits(self._claim)

    def _find_hints(self, request: Mapping[str, int]) -> None:
        """Use the devices that the Topology Manager asks about (GetTopologyHints()).

        Nothing is aligned here: all that matters to a plugin is that an unlisted device is fatal.
        """
        manager, claim = self._manager, self._claim
        manager.prune()
        for resource, needed in request.items():
            if not manager.devices.has_topology(resource):
                continue
            held = manager.pods.of(claim.uid, claim.container).get(resource)
            ids = held.ids if held else manager.pods.reusable(claim.uid).get(resource, set())
            if held and len(ids) != needed:
                continue
            for ident in ids - manager.devices.listed[resource].keys():
                manager.dereference(resource, ident)

    async def allocate(self, request: Mapping[str, int]) -> None:
        """Allocate all resources; the checkpoint is written once if the container got any.

        If one of several fails, the answers for the others stay in memory, and come into the file
        with the next write, of a pod that was rejected (allocateContainerResources()).
        """
        manager, claim = self._manager, self._claim
        manager.latest = claim.uid
        reusable = manager.pods.reusable(claim.uid)
        if request:
            manager.prune()
        allocated = False
        for resource, needed in manager.config.shuffled(request.items()):
            if chosen := await Choice(manager, claim, resource).devices(needed):
                await self._allocate(resource, chosen)
                allocated = True
        if allocated:
            await manager.write_checkpoint()
        for resource, held in manager.pods.of(claim.uid, claim.container).items():
            spare = reusable.get(resource, set())
            reusable[resource] = spare | held.ids if claim.init else spare - held.ids

    async def _allocate(self, resource: str, ids: set[str]) -> None:
        """Call Allocate, and remember the answer."""
        manager, claim = self._manager, self._claim
        endpoint = manager.plugins.endpoints.get(resource)
        if not endpoint:
            manager.pods.recount()
            raise Failure(f"unknown Device Plugin {resource}")
        begin = time.monotonic()
        requests = [pb.ContainerAllocateRequest(devices_ids=manager.config.shuffled(ids))]
        try:
            client = endpoint.running(resource)
            call = client.stub.Allocate(pb.AllocateRequest(container_requests=requests))
            response: pb.AllocateResponse = await client.answer(call)
        except Failure:
            manager.pods.recount()
            raise
        seconds = time.monotonic() - begin
        where = {"resource": resource, "pod": claim.pod, "container": claim.container}
        manager.log.record("allocate", **where, ids=sorted(ids), seconds=seconds)
        answer = self._inspect(resource, response)
        per_node: dict[int, list[str]] = {}
        for ident in manager.config.shuffled(ids):
            device = manager.devices.get(resource, ident)
            if device is None:
                manager.dereference(resource, ident)
            for node in numa_nodes(device) or [NO_NUMA_NODE]:
                per_node.setdefault(node, []).append(ident)
        manager.pods.insert(claim.uid, claim.container, resource, Held(per_node, answer))

    def _inspect(
        self, resource: str, response: pb.AllocateResponse
    ) -> pb.ContainerAllocateResponse:
        """Return the one answer that there should be."""
        log, answers = self._manager.log, response.container_responses
        if len(answers) != 1:
            log.violation(f"{resource} answers Allocate of one container for {len(answers)}")
        if not answers:
            raise Failure(f"no containers return in allocation response {response}")
        for spec in answers[0].devices:
            if not spec.permissions or set(spec.permissions) - set("rwm"):
                text = f"gives {spec.host_path} the permissions {spec.permissions!r}"
                log.violation(f"{resource} {text}")
        return answers[0]


class Choice:
    """The choice of devices for one container and one resource (devicesToAllocate())."""

    def __init__(self, manager: DeviceManager, claim: Claim, resource: str) -> None:
        self._manager = manager
        self._claim = claim
        self._resource = resource
        self._chosen: set[str] = set()

    async def devices(self, required: int) -> set[str]:
        """Return the devices to be allocated; none if the container has all that it requests."""
        if not self._needs_any(required):
            return set()
        manager, resource, chosen = self._manager, self._resource, self._chosen
        if self._take(manager.pods.reusable(self._claim.uid).get(resource, set()), required):
            return chosen
        taken = manager.pods.allocated.get(resource, set())
        available = manager.devices.healthy[resource] - taken
        needed = required - len(chosen)
        if len(available) < needed:
            numbers = f"Requested: {needed}, Available: {len(available)}"
            raise Failure(f"requested number of devices unavailable for {resource}. {numbers}")
        preferred = await self._prefer(available | chosen, required)
        if self._take(preferred & available, required) or self._take(available, required):
            return chosen
        numbers = f"Requested: {required}, Got: {len(chosen)}"
        raise Failure(f"unexpectedly allocated less resources than required. {numbers}")

    def _needs_any(self, required: int) -> bool:
        """Return whether there is anything to allocate; Failure if the container cannot have it.

        A container that ran when the kubelet started passes ("Container detected running, nothing
        to do"). After a reboot none does: pods are admitted whether their plugins have registered
        or not, and the three checks of health reject those whose plugin is late.
        """
        claim, resource = self._claim, self._resource
        held = self._manager.pods.of(claim.uid, claim.container).get(resource)
        have = held.ids if held else set()
        if held and len(have) != required:
            who = f'pod "{claim.uid}" container "{claim.container}"'
            change = f"from {len(have)} to {required}"
            raise Failure(f'{who} changed request for resource "{resource}" {change}')
        if claim.running:
            return False
        healthy = self._manager.devices.healthy.get(resource)
        if healthy is None:
            raise Failure(f"cannot allocate unregistered device {resource}")
        unhealthy = f"cannot allocate unhealthy devices {resource}"
        if not healthy:
            raise Failure(f"no healthy devices present; {unhealthy}")
        if not have <= healthy:
            raise Failure(f"previously allocated devices are no longer healthy; {unhealthy}")
        return required > len(have)

    def _take(self, candidates: set[str], required: int) -> bool:
        """Take as many of these as are still needed; returns whether they were enough."""
        missing = required - len(self._chosen)
        new = self._manager.config.shuffled(candidates - self._chosen)[:missing]
        self._chosen.update(new)
        self._manager.pods.allocated.setdefault(self._resource, set()).update(new)
        return len(self._chosen) == required

    async def _prefer(self, available: set[str], size: int) -> set[str]:
        """Return the plugin's preference, if it has one; unavailable devices in it are ignored."""
        manager, resource, must = self._manager, self._resource, set(self._chosen)
        endpoint = manager.plugins.endpoints.get(resource)
        if not endpoint:
            raise Failure(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options or not endpoint.options.get_preferred_allocation_available:
            return set()
        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=manager.config.shuffled(available),
            must_include_deviceIDs=manager.config.shuffled(must),
            allocation_size=size,
        )
        begin = time.monotonic()
        try:
            answers = await _preferred(endpoint.running(resource), question)
        except Failure as failure:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {failure}"
            raise Failure(text) from failure
        ids = list(answers[0].deviceIDs) if answers else []
        asked = {"available": sorted(available), "must": sorted(must), "size": size}
        seconds = time.monotonic() - begin
        manager.log.record("preferred", resource=resource, **asked, ids=ids, seconds=seconds)
        if len(answers) != 1 or len(ids) != size or len(set(ids)) != size:
            manager.log.violation(f"{resource} prefers {ids} where {size} devices were asked for")
        if not must <= set(ids) <= available:
            text = "not all available, or not all that must be included"
            manager.log.violation(f"{resource} prefers {ids}: {text}")
        return set(ids)


async def _preferred(client: Client, question: pb.ContainerPreferredAllocationRequest) -> Any:
    request = pb.PreferredAllocationRequest(container_requests=[question])
    response = await client.answer(client.stub.GetPreferredAllocation(request))
    return response.container_responses


# ------------------------------------------------------------------------ starting a container


class Preparation:
    """What a container is started with (GetDeviceRunContainerOptions())."""

    def __init__(self, manager: DeviceManager, claim: Claim) -> None:
        self._manager = manager
        self._claim = claim

    async def run(self) -> Allocation:
        """Call PreStartContainer if a plugin requires it. Failure: the container cannot start.

        A container whose devices the kubelet has lost with its file is allocated again, unless the
        plugin requires PreStartContainer, which cannot be called without devices.
        """
        manager, claim = self._manager, self._claim
        wanted = {r: n for r, n in claim.request.items() if n and manager.is_known(r)}
        is_lost = False
        for resource in manager.config.shuffled(wanted):
            await self._pre_start(resource)
            if resource not in manager.pods.of(claim.uid, claim.container):
                is_lost = True
        if is_lost and claim.uid in manager.desired.active():
            await Admission(manager, claim).allocate(wanted)
        return manager.edits(claim)

    async def _pre_start(self, resource: str) -> None:
        manager, claim = self._manager, self._claim
        endpoint = manager.plugins.endpoints.get(resource)
        if not endpoint:
            raise Failure(f"endpoint not found in cache for a registered resource: {resource}")
        if not endpoint.options or not endpoint.options.pre_start_required:
            return
        held = manager.pods.of(claim.uid, claim.container).get(resource)
        if not held:
            where = f"pod {claim.uid}, container {claim.container}, resource {resource}"
            raise Failure(f"no devices found allocated in local cache for {where}")
        who = {"resource": resource, "pod": claim.pod, "container": claim.container}
        manager.log.record("prestarting", **who, ids=sorted(held.ids))
        begin = time.monotonic()
        question = pb.PreStartContainerRequest(devices_ids=manager.config.shuffled(held.ids))
        try:
            client = endpoint.running(resource)
            call = client.stub.PreStartContainer(question, timeout=PRE_START_TIMEOUT)
            await client.answer(call)
        except Failure as failure:
            text = f"device plugin PreStartContainer rpc failed with err: {failure}"
            raise Failure(text) from failure
        seconds = time.monotonic() - begin
        manager.log.record("prestart", **who, ids=sorted(held.ids), seconds=seconds)
