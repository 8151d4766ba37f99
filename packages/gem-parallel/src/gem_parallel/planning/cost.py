"""What a collective costs: bytes on every tier of links, and seconds. Pure arithmetic.

A group is `size` ranks that are `stride` apart. In the domains of tier t it has m_t members (all, in the outermost
tier that it reaches). Collectives are hierarchical, as NCCL's rings over several network cards are:

    all-gather to S bytes:  tier t carries  S / m_(t-1) - S / m_t  bytes of every rank
    reduce-scatter:         the same, mirrored
    all-reduce:             both
    all-to-all of V bytes:  tier t carries  V (m_t - m_(t-1)) / size

Tiers work at the same time, so that the slowest decides; ring steps add latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from gem_parallel.planning.profile import KINDS, Profile
from gem_parallel.planning.topology import Topology


@dataclass(frozen=True)
class Group:
    """Ranks base, base + stride, ..., base + (size - 1) stride, for every base."""

    size: int
    stride: int = 1

    def members(self, topology: Topology) -> tuple[int, ...]:
        """How many ranks of the group share a domain of each tier."""
        return tuple(min(self.size, max(1, tier.size // self.stride)) for tier in topology.tiers)

    def reach(self, topology: Topology) -> str:
        """The name of the outermost tier that the group crosses; "device" for a group of one."""
        if self.size == 1:
            return "device"
        for tier, inside in zip(topology.tiers, self.members(topology), strict=True):
            if inside == self.size:
                return tier.name
        raise ValueError(f"a group of {self.size} ranks, {self.stride} apart, does not fit into the topology")


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective, and bytes that one rank sends on every tier."""

    seconds: float
    sent: tuple[float, ...]


class Links:
    """The costs of collectives on one topology."""

    def __init__(self, topology: Topology, profile: Profile) -> None:
        self.topology = topology
        self._message = profile.message_us * 1e-6
        self._rings: dict[tuple[str, Group, float], Cost] = {}  # equal units ask for the same, part by part
        self._rates: dict[str, list[float]] = {}
        self._latency: dict[str, list[float]] = {}
        for kind in KINDS:
            measured = [profile.link(tier.name, kind) for tier in topology.tiers]
            self._rates[kind] = [
                link.gbps * 1e9 if link else tier.bandwidth_gbps * 1e9 * profile.link_efficiency / tier.oversubscription
                for tier, link in zip(topology.tiers, measured, strict=True)
            ]
            self._latency[kind] = [
                (link.latency_us if link else tier.latency_us) * 1e-6
                for tier, link in zip(topology.tiers, measured, strict=True)
            ]

    def all_gather(self, group: Group, size: float) -> Cost:
        """Every rank ends with `size` bytes, of which it had size / group.size."""
        return self._ring("all_gather", group, size)

    def reduce_scatter(self, group: Group, size: float) -> Cost:
        """The same bytes in the other direction."""
        return self._ring("reduce_scatter", group, size)

    def _ring(self, kind: str, group: Group, size: float) -> Cost:
        if (kind, group, size) in self._rings:
            return self._rings[kind, group, size]
        inner, sent, seconds, latency = 1, [], 0.0, 0.0
        for tier, members in enumerate(group.members(self.topology)):
            moved = size / inner - size / members
            sent.append(moved)
            seconds = max(seconds, moved / self._rates[kind][tier])
            latency += (members // inner - 1) * self._latency[kind][tier]
            inner = members
        return self._rings.setdefault((kind, group, size), Cost(seconds + latency, tuple(sent)))

    def all_reduce(self, group: Group, size: float) -> Cost:
        """A reduce-scatter and an all-gather of `size` bytes."""
        half = self._ring("all_reduce", group, size)
        return Cost(2 * half.seconds, tuple(2 * moved for moved in half.sent))

    def all_to_all(self, group: Group, size: float) -> Cost:
        """Every rank sends `size` bytes in equal parts to all, itself included."""
        inner, sent, seconds, latency = 1, [], 0.0, 0.0
        for tier, members in enumerate(group.members(self.topology)):
            moved = size * (members - inner) / group.size
            sent.append(moved)
            seconds = max(seconds, moved / self._rates["all_to_all"][tier])
            if members > inner:
                latency = self._latency["all_to_all"][tier]
            inner = members
        return Cost(seconds + latency + (group.size - 1) * self._message, tuple(sent))
