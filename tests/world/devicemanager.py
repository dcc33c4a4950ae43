"""The reference kubelet's device manager: which devices a container gets and starts with.

It follows `pkg/kubelet/cm/devicemanager` of Kubernetes; functions are named as in 1.37.1.
One `DeviceManager` is one life of a kubelet: a restart makes another one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from generated import deviceplugin_pb2 as pb
from tests.world.checkpoint import CheckpointFile, Entry, Held, Snapshot
from tests.world.eventlog import EventLog
from tests.world.plugins import Client, Failure, Plugins, numa_nodes

if TYPE_CHECKING:
    from tests.world.pods import Pod, Pods

NO_NUMA_NODE = -1
T = TypeVar("T")


class AdmissionError(Exception):
    """A rejected pod: UnexpectedAdmissionError or OutOf<resource>, and `kubectl`'s message."""


class Allocation(NamedTuple):
    """A container's devices, and the plugins' answers to Allocate, merged."""

    held: dict[str, Held]  # by resource
    envs: dict[str, str]
    mounts: list[pb.Mount]
    devices: list[pb.DeviceSpec]
    cdi_devices: list[str]

    @property
    def ids(self) -> dict[str, frozenset[str]]:
        return {resource: frozenset(held.ids) for resource, held in self.held.items()}

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
        self.entries: list[Entry] = []
        self.allocated: dict[str, set[str]] = {}  # by resource; also what is just being allocated

    def of(self, uid: str) -> dict[str, Held]:
        """Return the devices of a pod, by resource."""
        return {entry.resource: entry.held for entry in self.entries if entry.uid == uid}

    def recount(self) -> None:
        """Mark exactly those devices allocated that a pod has."""
        self.allocated = {}
        for entry in self.entries:
            self.allocated.setdefault(entry.resource, set()).update(entry.held.ids)


class DeviceManager:
    """The device manager in one life of the kubelet."""

    def __init__(self, directory: Path, log: EventLog, file: CheckpointFile, desired: Pods) -> None:
        self.pods = PodDevices()
        self.plugins = Plugins(directory, log, self.write_checkpoint)
        self._log = log
        self._file = file
        self._desired = desired
        self._random = random.Random(1)

    def _shuffled(self, items: Iterable[T]) -> list[T]:
        """Return the items in an order that no plugin can rely on, as Go's maps have none."""
        ordered = sorted(items, key=repr)
        return self._random.sample(ordered, len(ordered))

    async def write_checkpoint(self) -> None:
        """Write the checkpoint; returns when it is there."""
        resources = self.plugins.listed
        registered = {each: self._shuffled(self.plugins.healthy(each)) for each in resources}
        self._file.write(Snapshot(self._shuffled(self.pods.entries), registered))

    def read_checkpoint(self) -> None:
        """Read which pod has which devices; resources stay empty until a plugin registers."""
        snapshot = self._file.read()
        self.pods.entries = [*snapshot.entries]
        self.pods.recount()
        self.plugins.listed = {resource: {} for resource in snapshot.registered}

    def prune(self) -> None:
        """Forget pods that have ended, in memory only (UpdateAllocatedDevices())."""
        active = self._desired.active()
        kept = [entry for entry in self.pods.entries if entry.uid in active]
        if self._desired.sources_ready and kept != self.pods.entries:
            self.pods.entries = kept
            self.pods.recount()

    def edits(self, uid: str) -> Allocation:
        """Merge the answers for a pod's resources."""
        held, answer = self.pods.of(uid), pb.ContainerAllocateResponse()
        for each in held.values():
            answer.MergeFrom(each.answer)
        names = [device.name for device in answer.cdi_devices]
        return Allocation(held, {**answer.envs}, [*answer.mounts], [*answer.devices], names)

    def _is_known(self, resource: str) -> bool:
        """Return whether a plugin has registered the resource, or a pod has a device of it."""
        return resource in self.plugins.listed or resource in self.pods.allocated

    def _dereference(self, resource: str, ids: Iterable[str]) -> None:
        """Use devices that a pod has, or is just getting.

        Since 1.34 the original dies of one that is not listed: `ResourceDeviceInstances`
        (pod_devices.go) holds pointers, which generateDeviceTopologyHints and
        allocateContainerResources do not check.
        """
        for ident in {*ids} - self.plugins.listed.get(resource, {}).keys():
            text = f"{resource} does not list {ident!r}, which a pod has or is just getting"
            self._log.violation(text)

    # Admission

    async def admit(self, pod: Pod, is_running: bool = False) -> Allocation:
        """Give a pod the devices that it requests. Raises AdmissionError.

        `is_running`: it did so when this kubelet started.
        """
        self.prune()
        request = {r: n for r, n in pod.request.items() if self._is_known(r)}

        # The Topology Manager asks about them (GetTopologyHints()), with every policy but `none`.
        for resource, held in self.pods.of(pod.uid).items():
            if any(map(numa_nodes, self.plugins.listed.get(resource, {}).values())):
                self._dereference(resource, held.ids)

        is_new = False
        try:
            # If one of several resources fails, the answers for the others stay in memory.
            for resource, needed in self._shuffled(request.items()):
                if not is_running and (ids := await self._choose(pod, resource, needed)):
                    await self._allocate(pod, resource, ids)
                    is_new = True
        except Failure as failure:
            message = f"Allocate failed due to {failure}, which is unexpected"
            raise AdmissionError("UnexpectedAdmissionError", message) from failure

        if is_new:
            await self.write_checkpoint()
        self._check_fit(pod)
        return self.edits(pod.uid)

    def _check_fit(self, pod: Pod) -> None:
        """Raise AdmissionError if a pod's request does not fit beside those of others.

        Every pod must pass after Allocate, also one that runs already (predicateAdmitHandler.Admit
        of pkg/kubelet/lifecycle/predicate.go, 1.33 to 1.37). Allocatable are the healthy devices;
        if the pod has devices, at least the number of allocated ones (sanitizeNodeAllocatable): so
        an intact checkpoint saves a pod whose device is Unhealthy.
        """
        others = [other for other in self._desired.active().values() if other is not pod]
        used = sum((Counter(other.request) for other in others), Counter[str]())
        for resource in self.plugins.listed:
            allocatable = len(self.plugins.healthy(resource))
            if self.pods.of(pod.uid):
                allocatable = max(allocatable, len(self.pods.allocated.get(resource, ())))

            requested = pod.request.get(resource, 0)
            if requested > max(0, allocatable - used[resource]):
                numbers = f"requested: {requested}, used: {used[resource]}"
                text = f"Node didn't have enough resource: {resource}, {numbers}"
                raise AdmissionError(f"OutOf{resource}", f"{text}, capacity: {allocatable}")

    async def _choose(self, pod: Pod, resource: str, required: int) -> set[str]:
        """Return the devices to be allocated; none if the pod has all (devicesToAllocate()).

        After a reboot pods are admitted whether their plugins have registered or not, and the
        checks of health reject those whose plugin is late.
        """
        held = self.pods.of(pod.uid).get(resource)
        have = held.ids if held else set()
        healthy = self.plugins.healthy(resource)
        unhealthy = f"cannot allocate unhealthy devices {resource}"
        if not healthy:
            raise Failure(f"no healthy devices present; {unhealthy}")
        if not have <= healthy:
            raise Failure(f"previously allocated devices are no longer healthy; {unhealthy}")
        if required <= len(have):
            return set()

        taken = self.pods.allocated.setdefault(resource, set())
        available = healthy - taken
        if len(available) < required:
            numbers = f"Requested: {required}, Available: {len(available)}"
            raise Failure(f"requested number of devices unavailable for {resource}. {numbers}")

        preferred = await self._prefer(resource, available, required)
        others = self._shuffled(available - preferred)
        chosen = [*self._shuffled(preferred & available), *others][:required]
        taken.update(chosen)
        return {*chosen}

    def _client(self, resource: str) -> Client:
        if client := self.plugins.clients.get(resource):
            return client
        raise Failure(f"endpoint {resource} has been stopped")  # it is in the checkpoint only

    async def _prefer(self, resource: str, available: set[str], size: int) -> set[str]:
        """Return the plugin's preference, if it has one."""
        client = self._client(resource)
        if not client.options.get_preferred_allocation_available:
            return set()

        question = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=self._shuffled(available), allocation_size=size
        )
        request = pb.PreferredAllocationRequest(container_requests=[question])
        response = await client.call("GetPreferredAllocation", request)

        (answer,) = response.container_responses
        ids = {*answer.deviceIDs}
        if not len(answer.deviceIDs) == len(ids) == size or not ids <= available:
            self._log.violation(f"{resource} prefers {answer.deviceIDs}, not {size} available ones")
        return ids

    async def _allocate(self, pod: Pod, resource: str, ids: set[str]) -> None:
        """Call Allocate, and remember the answer."""
        container = pb.ContainerAllocateRequest(devices_ids=self._shuffled(ids))
        request = pb.AllocateRequest(container_requests=[container])
        try:
            response = await self._client(resource).call("Allocate", request)
        except Failure:
            self.pods.recount()
            raise
        (answer,) = response.container_responses

        # The list can have changed meanwhile. A device on two NUMA nodes stands in both lists.
        self._dereference(resource, ids)
        listed = self.plugins.listed[resource]
        per_node: dict[int, list[str]] = {}
        for ident in self._shuffled(ids):
            for node in numa_nodes(listed.get(ident, pb.Device())) or [NO_NUMA_NODE]:
                per_node.setdefault(node, []).append(ident)

        held = Held(per_node, answer)
        self.pods.entries.append(Entry(pod.uid, pod.container, resource, held))

    # The start of a container

    async def prepare(self, pod: Pod) -> Allocation:
        """Call PreStartContainer if a plugin requires it (GetDeviceRunContainerOptions()).

        Raises Failure: the container cannot start.
        """
        wanted = [r for r, n in pod.request.items() if n and self._is_known(r)]
        for resource in self._shuffled(wanted):
            await self._pre_start(pod, resource)
        return self.edits(pod.uid)

    async def _pre_start(self, pod: Pod, resource: str) -> None:
        client, held = self.plugins.clients.get(resource), self.pods.of(pod.uid).get(resource)
        if not client or not client.options.pre_start_required:
            return
        if not held:
            where = f"pod {pod.uid}, container {pod.container}, resource {resource}"
            raise Failure(f"no devices found allocated in local cache for {where}")

        who = {"resource": resource, "pod": pod.name, "ids": sorted(held.ids)}
        self._log.record("prestarting", **who)
        request = pb.PreStartContainerRequest(devices_ids=self._shuffled(held.ids))
        await client.call("PreStartContainer", request, timeout=30.0)  # others have no deadline
        self._log.record("prestart", **who)
