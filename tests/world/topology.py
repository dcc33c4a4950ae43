"""The reference kubelet's Topology Manager: on which NUMA nodes a container's devices shall lie.

It follows `pkg/kubelet/cm/topologymanager` and the device manager's `topology_hints.go`, with the
device manager as the only one that gives hints and with containers as the scope.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from generated import deviceplugin_pb2 as pb

Policy = Literal["none", "best-effort", "restricted", "single-numa-node"]


def numa_nodes(device: pb.Device | None) -> list[int]:
    """Return the NUMA nodes that a device names; none of one that is not listed."""
    return [node.ID for node in device.topology.nodes] if device is not None else []


class Hint(NamedTuple):
    """NUMA nodes on which a request can be met (None: anywhere), and whether no fewer would do."""

    nodes: frozenset[int] | None
    preferred: bool


def hints_of(
    devices: Mapping[str, pb.Device],
    numa: Sequence[int],
    usable: set[str],
    reusable: set[str],
    request: int,
) -> list[Hint]:
    """Return the sets of NUMA nodes that can meet a request; generateDeviceTopologyHints().

    `usable` and `reusable` may name devices that are not listed; those are on no node.
    """

    def lies_in(ident: str, nodes: frozenset[int]) -> bool:
        return not nodes.isdisjoint(numa_nodes(devices.get(ident)))

    smallest = len(numa)
    found: list[frozenset[int]] = []
    placed = {ident for ident in reusable if numa_nodes(devices.get(ident))}
    for nodes in _subsets(numa):
        if sum(lies_in(ident, nodes) for ident in devices) >= request:
            smallest = min(smallest, len(nodes))
        if not all(lies_in(ident, nodes) for ident in placed):
            continue
        if len(placed) + sum(lies_in(ident, nodes) for ident in usable) >= request:
            found.append(nodes)
    return [Hint(nodes, len(nodes) == smallest) for nodes in found]


def _subsets(numa: Sequence[int]) -> Iterator[frozenset[int]]:
    for size in range(1, len(numa) + 1):
        yield from map(frozenset, itertools.combinations(sorted(numa), size))


def best_hint(
    policy: Policy, numa: Sequence[int], by_resource: Iterable[list[Hint] | None]
) -> Hint:
    """Return the hint that a policy makes of those of all resources; HintMerger.Merge().

    None for a resource is no preference; an empty list is that nothing fits.
    """
    everywhere = frozenset(numa)
    columns: list[list[Hint]] = []
    for hints in by_resource:
        if hints is None:
            hints = [Hint(None, True)]
        columns.append(hints or [Hint(None, False)])
    if policy == "single-numa-node":
        columns = [[hint for hint in hints if _is_single(hint)] for hints in columns]
    # maxOfMinAffinityCounts()
    widest = max((_narrowest(hints) for hints in columns), default=0)
    best: Hint | None = None
    for row in itertools.product(*columns):
        merged = _merge(everywhere, row)
        if merged.nodes and (best is None or _is_better(merged, best, widest)):
            best = merged
    best = best or Hint(everywhere, False)
    if policy == "single-numa-node" and best.nodes == everywhere:
        return Hint(None, best.preferred)
    return best


def _is_single(hint: Hint) -> bool:
    return hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)


def _narrowest(hints: Iterable[Hint]) -> int:
    """Return how many nodes the smallest of the hints has."""
    return min((len(hint.nodes) for hint in hints if hint.nodes is not None), default=0)


def _merge(everywhere: frozenset[int], row: Sequence[Hint]) -> Hint:
    """Return what all hints of a row have in common; mergePermutation()."""
    given = [hint.nodes for hint in row if hint.nodes is not None]
    preferred = all(hint.preferred for hint in row) and len(set(given)) <= 1
    return Hint(everywhere.intersection(*given), preferred)


def _is_better(candidate: Hint, current: Hint, widest: int) -> bool:
    """Tell whether a merged hint replaces the best one so far; HintMerger.compare()."""
    assert candidate.nodes is not None and current.nodes is not None
    if candidate.preferred != current.preferred:
        return candidate.preferred
    new, old = len(candidate.nodes), len(current.nodes)
    # Equally many nodes: those with the lower numbers, as the numerically smaller mask.
    narrower = (new, _mask(candidate.nodes)) < (old, _mask(current.nodes))
    if candidate.preferred or old > widest:
        return narrower
    if old == widest:
        return new == widest and narrower
    if new == old:
        return narrower
    return old < new <= widest


def _mask(nodes: Iterable[int]) -> int:
    return sum(1 << node for node in nodes)
