"""The reference kubelet's device manager: what containers are given and started with.

It follows `pkg/kubelet/cm/devicemanager` of Kubernetes 1.30 to 1.37. One `DeviceManager` is one
life of a kubelet: what a restart forgets is a new object's.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CheckpointFile, Entry, Held, Snapshot
from tests.world.eventlog import EventLog
from tests.world.plugins import Config, Devices, Failure, Plugins
from tests.world.topology import Hint, best_hint, hints_of, numa_nodes

NO_NUMA_NODE = -1
PRE_START_TIMEOUT = 30.0  # seconds; the only call to a plugin for which the kubelet has a deadline


class AdmissionError(Exception):
    """A pod that the kubelet rejects: what `kubectl describe` would say.

    `reason` is UnexpectedAdmissionError or TopologyAffinityError.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class Panic(Exception):
    """A nil dereference in the kubelet, which ends it."""


class Claim(NamedTuple):
    """A container that wants devices, as the device manager sees it."""

    uid: str  # of its pod
    pod: str  # its name, for events
    container: str
    request: Mapping[str, int]
    init: bool  # an ordinary init container: what it gets, the pod's later containers get again
    running: bool  # it runs, and did so when this kubelet started


class Desired(Protocol):
    """Which pods the kubelet is to run, as far as it knows."""

    def active(self) -> set[str]:
        """Return the UIDs of the pods that it knows and that have not ended."""

    def all_sources_ready(self) -> bool:
        """Tell whether it has heard of all of them, static pods and the API server's."""


@dataclass(slots=True)
class Allocation:
    """What a container gets: the answers for all of its resources, merged as the kubelet does."""

    ids: dict[str, frozenset[str]] = field(default_factory=dict)  # by resource
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[pb.Mount] = field(default_factory=list)
    devices: list[pb.DeviceSpec] = field(default_factory=list)
    annotations: dict[str, str] = field(default_factory=dict)
    cdi_devices: list[str] = field(default_factory=list)

    def add(self, answer: pb.ContainerAllocateResponse) -> None:
        """Merge an answer but for its texts: what is there already wins."""
        known = {spec.container_path for spec in self.devices}
        self.devices.extend(d for d in answer.devices if d.container_path not in known)
        known = {mount.container_path for mount in self.mounts}
        self.mounts.extend(m for m in answer.mounts if m.container_path not in known)
        names = [cdi.name for cdi in answer.cdi_devices]
        self.cdi_devices.extend(name for name in names if name not in self.cdi_devices)

    def fields(self) -> dict[str, Any]:
        """Return it for an event."""
        pairs = [f"{resource}={ident}" for resource, ids in self.ids.items() for ident in ids]
        mounts = [
            (m.host_path, m.container_path, "ro" if m.read_only else "rw") for m in self.mounts
        ]
        return {
            "ids": sorted(pairs),
            "env": [f"{key}={value}" for key, value in sorted(self.envs.items())],
            "devices": [f"{d.host_path}:{d.container_path}:{d.permissions}" for d in self.devices],
            "mounts": [":".join(mount) for mount in mounts],
            "annotations": [f"{key}={value}" for key, value in sorted(self.annotations.items())],
            "cdi": self.cdi_devices,
        }


class PodDevices:
    """Who was given what, in the kubelet's memory (pod_devices.go)."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, dict[str, Held]]] = {}  # pod's UID, container, resource
        self.allocated: dict[str, set[str]] = {}  # by resource; also what is just being allocated
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})

    def of(self, uid: str, container: str) -> dict[str, Held]:
        """Return what a container has, by resource."""
        return self.held.get(uid, {}).get(container, {})

    def insert(self, uid: str, container: str, resource: str, held: Held) -> None:
        """Remember an answer."""
        self.held.setdefault(uid, {}).setdefault(container, {})[resource] = held

    def forget(self, uids: Iterable[str]) -> None:
        """Free the devices of these pods; the checkpoint says so with its next writing."""
        for uid in uids:
            self.held.pop(uid, None)
        self.recount()

    def recount(self) -> None:
        """Let those devices be allocated that somebody has, and no others."""
        self.allocated = {}
        for entry in self.entries():
            self.allocated.setdefault(entry.resource, set()).update(entry.held.ids)

    def entries(self) -> list[Entry]:
        """Return it all, as the checkpoint has it."""
        return [
            Entry(uid, container, resource, held)
            for uid, containers in self.held.items()
            for container, resources in containers.items()
            for resource, held in resources.items()
        ]

    def reusable(self, uid: str) -> dict[str, set[str]]:
        """Return what the pod's init containers have left behind, by resource.

        Another pod's question ends that: the original keeps it for the pod that it looks at only.
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
        """Write the checkpoint past all writings that are under way."""
        self._file.write_now(self._snapshot())

    def read_checkpoint(self) -> None:
        """Let pods have their devices again; resources are empty until a plugin registers.

        A file that cannot be read or fails its checksum is as good as none.
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
            self.devices.healthy.pop(resource, None)
            self.devices.unhealthy.pop(resource, None)
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
        """Tell whether a plugin has registered the resource, or a pod has some of it.

        What the kubelet has never heard of it ignores: a container gets none of it.
        """
        return resource in self.devices.healthy or resource in self.pods.allocated

    def dereference(self, resource: str, ident: str) -> None:
        """Follow a device that a pod has, or is just getting, and that is not listed."""
        text = f"{resource} does not list {ident!r}, which a pod has or is just getting"
        if self.config.dereferences_unlisted:
            raise Panic(text)
        self.log.violation(text)

    def edits(self, claim: Claim) -> Allocation:
        """Merge the answers of a container's resources: the first in Go's random order wins."""
        result = Allocation()
        by_resource = self.pods.of(claim.uid, claim.container).items()
        for resource, held in self.config.shuffled(by_resource):
            result.ids[resource] = frozenset(held.ids)
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


class Admission:
    """The admission of one container."""

    def __init__(self, manager: DeviceManager, claim: Claim) -> None:
        self._manager = manager
        self._claim = claim

    async def run(self) -> Allocation:
        """Give the container what it asks for. Raises AdmissionError, or Panic."""
        manager = self._manager
        known = {r: n for r, n in self._claim.request.items() if manager.is_known(r)}
        nodes = self._affinity(known)
        try:
            await self.allocate(known, nodes)
        except Failure as failure:
            message = f"Allocate failed due to {failure}, which is unexpected"
            raise AdmissionError("UnexpectedAdmissionError", message) from failure
        return manager.edits(self._claim)

    def _affinity(self, request: Mapping[str, int]) -> frozenset[int] | None:
        """Return the Topology Manager's answer: NUMA nodes to take devices from, None for any."""
        config = self._manager.config
        if config.policy == "none":
            return None
        self._manager.prune()
        hints = [self._hints(resource, needed) for resource, needed in request.items()]
        best = best_hint(config.policy, config.numa_nodes, hints)
        if config.policy != "best-effort" and not best.preferred:
            text = "Resources cannot be allocated with Topology locality"
            raise AdmissionError("TopologyAffinityError", text)
        return best.nodes

    def _hints(self, resource: str, needed: int) -> list[Hint] | None:
        """Return where the request can be met; None if no device says where it is."""
        manager, claim = self._manager, self._claim
        devices = manager.devices
        if not devices.has_topology(resource):
            return None
        held = manager.pods.of(claim.uid, claim.container).get(resource)
        if held and len(held.ids) != needed:
            return []
        if held:
            usable, reusable = held.ids, set[str]()
        else:
            taken = manager.pods.allocated.get(resource, set())
            usable = devices.healthy.get(resource, set()) - taken
            reusable = manager.pods.reusable(claim.uid).get(resource, set())
            if len(usable | reusable) < needed:
                return []
        listed = devices.listed[resource]
        for ident in (usable | reusable) - listed.keys():
            manager.dereference(resource, ident)
        return hints_of(listed, manager.config.numa_nodes, usable, reusable, needed)

    async def allocate(self, request: Mapping[str, int], nodes: frozenset[int] | None) -> None:
        """Allocate all resources; the checkpoint is written once if the container got any.

        If one of several fails, what the others gave stays in memory, and comes into the file with
        the next writing: of a pod that was refused (allocateContainerResources()).
        """
        manager, claim = self._manager, self._claim
        manager.latest = claim.uid
        reusable = manager.pods.reusable(claim.uid)
        if request:
            manager.prune()
        allocated = False
        for resource, needed in manager.config.shuffled(request.items()):
            choice = Choice(manager, claim, resource, nodes)
            if chosen := await choice.devices(needed):
                await self._ask(resource, chosen)
                allocated = True
        if allocated:
            await manager.write_checkpoint()
        for resource, held in manager.pods.of(claim.uid, claim.container).items():
            spare = reusable.get(resource, set())
            reusable[resource] = spare | held.ids if claim.init else spare - held.ids

    async def _ask(self, resource: str, ids: set[str]) -> None:
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

    def __init__(
        self, manager: DeviceManager, claim: Claim, resource: str, nodes: frozenset[int] | None
    ) -> None:
        self._manager = manager
        self._claim = claim
        self._resource = resource
        self._nodes = nodes
        self._chosen: set[str] = set()

    async def devices(self, required: int) -> set[str]:
        """Return the devices that are still to be allocated; none if it has all that it wants.

        Nobody is asked for what reuse or the exact number of aligned devices decides.
        """
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
        aligned = self._aligned(available)
        if needed < len(aligned):
            preferred = await self._prefer(aligned | chosen, required)
            if self._take(preferred & aligned, required) or self._take(aligned, required):
                return chosen
        elif self._take(aligned, required):
            return chosen
        preferred = await self._prefer(available | chosen, required)
        if self._take(preferred & available, required):
            return chosen
        if self._nodes is not None and self._take(self._placed(available), required):
            return chosen
        if self._take(available, required):
            return chosen
        numbers = f"Requested: {required}, Got: {len(chosen)}"
        raise Failure(f"unexpectedly allocated less resources than required. {numbers}")

    def _needs_any(self, required: int) -> bool:
        """Tell whether there is anything to allocate; Failure if the container cannot have it.

        A node that comes up admits its pods whether their plugins have registered or not: the three
        checks of health are what costs the pods of a plugin that is late their lives.
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
        """Take as many of these as are still needed; tells whether that were enough."""
        missing = required - len(self._chosen)
        new = self._manager.config.shuffled(candidates - self._chosen)[:missing]
        self._chosen.update(new)
        self._manager.pods.allocated.setdefault(self._resource, set()).update(new)
        return len(self._chosen) == required

    def _aligned(self, available: set[str]) -> set[str]:
        """Return the devices on the NUMA nodes that the Topology Manager has chosen."""
        nodes = self._nodes or frozenset()
        return {ident for ident in available if not nodes.isdisjoint(self._places(ident))}

    def _placed(self, available: set[str]) -> set[str]:
        """Return the devices that say where they are."""
        return {ident for ident in available if self._places(ident)}

    def _places(self, ident: str) -> list[int]:
        return numa_nodes(self._manager.devices.get(self._resource, ident))

    async def _prefer(self, available: set[str], size: int) -> set[str]:
        """Return the plugin's preference, if it has one; what of it is not available is ignored."""
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
        request = pb.PreferredAllocationRequest(container_requests=[question])
        begin = time.monotonic()
        try:
            client = endpoint.running(resource)
            call = client.stub.GetPreferredAllocation(request)
            response: pb.PreferredAllocationResponse = await client.answer(call)
        except Failure as failure:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {failure}"
            raise Failure(text) from failure
        answers = response.container_responses
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


# ------------------------------------------------------------------------ starting a container


class Preparation:
    """What a container is started with (GetDeviceRunContainerOptions())."""

    def __init__(self, manager: DeviceManager, claim: Claim) -> None:
        self._manager = manager
        self._claim = claim

    async def run(self) -> Allocation:
        """Call PreStartContainer where a plugin asks for it. Failure: the container cannot start.

        A container of which the kubelet knows no devices, because its file was lost, is allocated
        anew, unless the plugin asks for PreStartContainer: it cannot be called for nothing.
        """
        manager, claim = self._manager, self._claim
        wanted = {r: n for r, n in claim.request.items() if n and manager.is_known(r)}
        unknown = False
        for resource in manager.config.shuffled(wanted):
            await self._pre_start(resource)
            if resource not in manager.pods.of(claim.uid, claim.container):
                unknown = True
        if unknown and claim.uid in manager.desired.active():
            await Admission(manager, claim).allocate(wanted, None)
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
