"""The reference kubelet's device manager: which devices a container gets and starts with.

It follows `pkg/kubelet/cm/devicemanager` of Kubernetes; functions are named as in 1.37.1.
One `DeviceManager` is one life of a kubelet: a restart makes another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CheckpointFile, Entry, Held, Snapshot
from tests.world.eventlog import EventLog
from tests.world.plugins import Config, Devices, Endpoint, Failure, Plugins, numa_nodes

if TYPE_CHECKING:
    from tests.world.pods import Container, Pod, Pods

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


@dataclass(slots=True)
class Allocation:
    """The answers for all resources of a container, merged as the kubelet does it."""

    held: dict[str, Held] = field(default_factory=dict)  # by resource
    envs: dict[str, str] = field(default_factory=dict)
    mounts: list[pb.Mount] = field(default_factory=list)
    devices: list[pb.DeviceSpec] = field(default_factory=list)
    cdi_devices: list[str] = field(default_factory=list)

    @property
    def ids(self) -> dict[str, frozenset[str]]:
        return {resource: frozenset(held.ids) for resource, held in self.held.items()}

    def add(self, answer: pb.ContainerAllocateResponse) -> None:
        """Merge an answer, except variables: what is there already wins."""
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
            "mounts": [mount.host_path for mount in self.mounts],
        }


class PodDevices:
    """The devices of each pod, in the kubelet's memory (pod_devices.go)."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, dict[str, Held]]] = {}  # pod's UID, container, resource
        self.allocated: dict[str, set[str]] = {}  # by resource; also what is just being allocated

    def of(self, uid: str, container: str) -> dict[str, Held]:
        """Return the devices of a container, by resource."""
        return self.held.get(uid, {}).get(container, {})

    def insert(self, uid: str, container: str, resource: str, held: Held) -> None:
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
        return [
            Entry(uid, container, resource, held)
            for uid, containers in self.held.items()
            for container, resources in containers.items()
            for resource, held in resources.items()
        ]


class DeviceManager:
    """The device manager in one life of the kubelet."""

    def __init__(self, config: Config, log: EventLog, file: CheckpointFile, desired: Pods) -> None:
        self.config = config
        self.log = log
        self.desired = desired
        self.devices = Devices()
        self.pods = PodDevices()
        self.plugins = Plugins(config, log, self.devices, self.write_checkpoint)
        self._file = file

    def _snapshot(self) -> Snapshot:
        healthy = self.devices.healthy.items()
        registered = {resource: self.config.shuffled(ids) for resource, ids in healthy}
        entries = self.pods.entries()
        self.config.random.shuffle(entries)
        return Snapshot(entries, registered)

    async def write_checkpoint(self) -> None:
        """Write the checkpoint; returns when it is there."""
        self._file.write(self._snapshot())

    def read_checkpoint(self) -> None:
        """Read which pod has which devices; resources stay empty until a plugin registers."""
        snapshot = self._file.read()
        for uid, container, resource, held in snapshot.entries:
            self.pods.insert(uid, container, resource, held)
        self.pods.recount()

        for resource in snapshot.registered:
            self.devices.replace(resource, [])
            self.plugins.endpoints[resource] = Endpoint()

    def status(self) -> dict[str, tuple[int, int]]:
        """Return capacity and allocatable by resource (GetCapacity())."""
        return {
            resource: (len(healthy) + len(self.devices.unhealthy.get(resource, ())), len(healthy))
            for resource, healthy in self.devices.healthy.items()
        }

    def prune(self) -> None:
        """Forget pods that have ended, in memory only (UpdateAllocatedDevices())."""
        if not self.desired.sources_ready:
            return
        gone = self.pods.held.keys() - self.desired.active()
        if gone:
            self.log.record("forgotten", uids=sorted(gone))
            self.pods.forget(gone)

    def is_known(self, resource: str) -> bool:
        """Return whether a plugin has registered the resource, or a pod has a device of it."""
        return resource in self.devices.healthy or resource in self.pods.allocated

    def dereference(self, resource: str, ident: str) -> None:
        """Use a device that a pod has, or is just getting, and that is not listed.

        Since 1.34 the original dies of that: `ResourceDeviceInstances` (pod_devices.go) holds
        pointers, which generateDeviceTopologyHints and allocateContainerResources do not check.
        """
        text = f"{resource} does not list {ident!r}, which a pod has or is just getting"
        self.log.violation(text)

    def edits(self, uid: str, container: str) -> Allocation:
        """Merge the answers of a container's resources: the first in Go's random order wins."""
        result = Allocation()
        by_resource = self.pods.of(uid, container).items()
        for resource, held in self.config.shuffled(by_resource):
            result.held[resource] = held
            result.add(held.answer)
            result.envs = {**held.answer.envs, **result.envs}
        return result


# ---------------------------------------------------------------------------------- admission


def check_fit(
    manager: DeviceManager, uid: str, request: Mapping[str, int], used: Mapping[str, int]
) -> None:
    """Raise AdmissionError if a pod's request does not fit beside what other pods `used`.

    Every pod must pass after Allocate, also one that runs already (predicateAdmitHandler.Admit of
    pkg/kubelet/lifecycle/predicate.go, 1.33 to 1.37). Allocatable are the healthy devices; if the
    pod has devices, at least the number of allocated devices (sanitizeNodeAllocatable): so an
    intact checkpoint saves a pod whose device is Unhealthy, and without one the pod is rejected.
    """
    for resource, (_, allocatable) in manager.status().items():
        requested = request.get(resource, 0)
        if uid in manager.pods.held:
            allocatable = max(allocatable, len(manager.pods.allocated.get(resource, ())))
        if requested > max(0, allocatable - used.get(resource, 0)):
            numbers = f"requested: {requested}, used: {used.get(resource, 0)}"
            text = f"Node didn't have enough resource: {resource}, {numbers}"
            raise AdmissionError(f"OutOf{resource}", f"{text}, capacity: {allocatable}")


class ContainerDevices:
    """The devices of one container: its admission, and its starts.

    `running`: it runs, and did so when this kubelet started.
    """

    def __init__(
        self, manager: DeviceManager, pod: Pod, container: Container, running: bool = False
    ) -> None:
        self._manager = manager
        self._pods = manager.pods
        self._uid = pod.uid
        self._container = container
        self._running = running
        self._who = {"pod": pod.name, "container": container.name}

    def _held(self, resource: str) -> Held | None:
        return self._pods.of(self._uid, self._container.name).get(resource)

    async def admit(self) -> Allocation:
        """Give the container the devices that it requests. Raises AdmissionError."""
        manager = self._manager
        known = {r: n for r, n in self._container.request.items() if manager.is_known(r)}
        self._find_hints(known)
        try:
            await self._allocate_all(known)
        except Failure as failure:
            message = f"Allocate failed due to {failure}, which is unexpected"
            raise AdmissionError("UnexpectedAdmissionError", message) from failure
        return manager.edits(self._uid, self._container.name)

    def _find_hints(self, request: Mapping[str, int]) -> None:
        """Use the devices that the Topology Manager asks about (GetTopologyHints()).

        Nothing is aligned here: all that matters to a plugin is that an unlisted device is fatal.
        The original does so with every policy but `none`.
        """
        manager = self._manager
        manager.prune()
        for resource in request:
            held = self._held(resource)
            if held and manager.devices.has_topology(resource):
                for ident in held.ids - manager.devices.listed[resource].keys():
                    manager.dereference(resource, ident)

    async def _allocate_all(self, request: Mapping[str, int]) -> None:
        """Allocate all resources; the checkpoint is written once if the container got any.

        If one of several fails, the answers for the others stay in memory, and come into the file
        with the next write, of a pod that was rejected (allocateContainerResources()).
        """
        manager = self._manager
        if request:
            manager.prune()

        is_new = False
        for resource, needed in manager.config.shuffled(request.items()):
            if chosen := await self._choose(resource, needed):
                await self._allocate(resource, chosen)
                is_new = True
        if is_new:
            await manager.write_checkpoint()

    async def _allocate(self, resource: str, ids: set[str]) -> None:
        """Call Allocate, and remember the answer."""
        manager = self._manager
        container = pb.ContainerAllocateRequest(devices_ids=manager.config.shuffled(ids))
        request = pb.AllocateRequest(container_requests=[container])
        try:
            response = await self._call(resource, "Allocate", request)
        except Failure:
            self._pods.recount()
            raise

        manager.log.record("allocate", resource=resource, **self._who, ids=sorted(ids))
        answer = self._inspect(resource, response)

        # A device on two NUMA nodes stands in both lists.
        per_node: dict[int, list[str]] = {}
        for ident in manager.config.shuffled(ids):
            device = manager.devices.get(resource, ident)
            if device is None:
                manager.dereference(resource, ident)
            for node in numa_nodes(device) or [NO_NUMA_NODE]:
                per_node.setdefault(node, []).append(ident)

        held = Held(per_node, answer)
        self._pods.insert(self._uid, self._container.name, resource, held)

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

    def _endpoint(self, resource: str) -> Endpoint:
        return self._manager.plugins.endpoints.get(resource, Endpoint())

    async def _call(
        self, resource: str, method: str, request: Any, timeout: float | None = None
    ) -> Any:
        """Return the answer of the resource's plugin. Raises Failure."""
        client = self._endpoint(resource).running(resource)
        return await client.answer(getattr(client.stub, method)(request, timeout=timeout))

    # The choice of devices (devicesToAllocate())

    async def _choose(self, resource: str, required: int) -> set[str]:
        """Return the devices to be allocated; none if the container has all that it requests."""
        if not self._needs_any(resource, required):
            return set()
        taken = self._pods.allocated.setdefault(resource, set())
        available = self._manager.devices.healthy[resource] - taken
        if len(available) < required:
            numbers = f"Requested: {required}, Available: {len(available)}"
            raise Failure(f"requested number of devices unavailable for {resource}. {numbers}")

        preferred = await self._prefer(resource, available, required)
        shuffled = self._manager.config.shuffled
        chosen = [*shuffled(preferred & available), *shuffled(available - preferred)][:required]
        taken.update(chosen)
        return {*chosen}

    def _needs_any(self, resource: str, required: int) -> bool:
        """Return whether there is anything to allocate; Failure if the container cannot have it.

        A container that ran when the kubelet started passes ("Container detected running, nothing
        to do"). After a reboot none does: pods are admitted whether their plugins have registered
        or not, and the three checks of health reject those whose plugin is late.
        """
        held = self._held(resource)
        have = held.ids if held else set()
        if self._running:
            return False

        healthy = self._manager.devices.healthy.get(resource, set())
        unhealthy = f"cannot allocate unhealthy devices {resource}"
        if not healthy:
            raise Failure(f"no healthy devices present; {unhealthy}")
        if not have <= healthy:
            raise Failure(f"previously allocated devices are no longer healthy; {unhealthy}")

        return required > len(have)

    async def _prefer(self, resource: str, available: set[str], size: int) -> set[str]:
        """Return the plugin's preference, if it has one; unavailable devices in it are ignored."""
        manager, endpoint = self._manager, self._endpoint(resource)
        if not endpoint.options or not endpoint.options.get_preferred_allocation_available:
            return set()

        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=manager.config.shuffled(available),
            allocation_size=size,
        )
        request = pb.PreferredAllocationRequest(container_requests=[question])

        try:
            response = await self._call(resource, "GetPreferredAllocation", request)
        except Failure as failure:
            text = f"device plugin GetPreferredAllocation rpc failed with err: {failure}"
            raise Failure(text) from failure

        answers = response.container_responses
        ids = list(answers[0].deviceIDs) if answers else []
        if len(answers) != 1 or len(ids) != size or len(set(ids)) != size:
            manager.log.violation(f"{resource} prefers {ids} where {size} devices were asked for")
        if not set(ids) <= available:
            manager.log.violation(f"{resource} prefers {ids}: not all are available")

        return set(ids)

    # The start of a container (GetDeviceRunContainerOptions())

    async def prepare(self) -> Allocation:
        """Call PreStartContainer if a plugin requires it. Failure: the container cannot start."""
        manager = self._manager
        wanted = [r for r, n in self._container.request.items() if n and manager.is_known(r)]
        for resource in manager.config.shuffled(wanted):
            await self._pre_start(resource)
        return manager.edits(self._uid, self._container.name)

    async def _pre_start(self, resource: str) -> None:
        manager, endpoint, held = self._manager, self._endpoint(resource), self._held(resource)
        if not endpoint.options or not endpoint.options.pre_start_required:
            return
        if not held:
            where = f"pod {self._uid}, container {self._container.name}"
            text = f"no devices found allocated in local cache for {where}, resource {resource}"
            raise Failure(text)

        who = {"resource": resource, **self._who, "ids": sorted(held.ids)}
        manager.log.record("prestarting", **who)

        request = pb.PreStartContainerRequest(devices_ids=manager.config.shuffled(held.ids))
        try:
            await self._call(resource, "PreStartContainer", request, PRE_START_TIMEOUT)
        except Failure as failure:
            text = f"device plugin PreStartContainer rpc failed with err: {failure}"
            raise Failure(text) from failure

        manager.log.record("prestart", **who)
