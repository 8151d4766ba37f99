"""The machine: memory of a device, and the tiers of links between devices, read from a file or detected."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from gem_parallel.planning.fields import made


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One level of the interconnect.

    Attributes:
        name: "socket", "nvlink", "network", ...
        size: devices that reach one another inside this tier.
        bandwidth_gbps: gigabytes (10^9) per second that one device can send inside the tier.
        latency_us: microseconds of one message.
        oversubscription: by how much the tier's links fall short when all devices send at once (1: not at all).
    """

    name: str
    size: int
    bandwidth_gbps: float
    latency_us: float
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Tier {self.name!r}: size must be >= 1, got {self.size}")
        if not self.bandwidth_gbps > 0 or not self.latency_us >= 0:
            raise ValueError(
                f"Tier {self.name!r}: bandwidth_gbps must be > 0 and latency_us >= 0, "
                f"got {self.bandwidth_gbps} and {self.latency_us}"
            )
        if not self.oversubscription >= 1:
            raise ValueError(f"Tier {self.name!r}: oversubscription must be >= 1, got {self.oversubscription}")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices of one kind and how they are connected, innermost tier first.

    Attributes:
        device: the device's name.
        device_memory: bytes of memory of one device (0 on a CPU, whose memory is host_memory).
        memory_gbps: gigabytes (10^9) per second between a device and its memory.
        host_memory: bytes of memory of one host.
        tiers: the links; each tier's size is a multiple of the one before.
        notes: where each number comes from.
    """

    device: str
    device_memory: int
    memory_gbps: float
    host_memory: int
    tiers: tuple[Tier, ...]
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("Topology needs at least one tier")
        if self.device_memory < 0 or self.host_memory <= 0 or not self.memory_gbps > 0:
            raise ValueError(
                "Topology needs device_memory >= 0, host_memory > 0 and memory_gbps > 0, got "
                f"{self.device_memory}, {self.host_memory} and {self.memory_gbps}"
            )
        for inner, outer in zip(self.tiers, self.tiers[1:], strict=False):
            if outer.size % inner.size:
                raise ValueError(
                    f"tier {outer.name!r} of {outer.size} devices is not a multiple of tier {inner.name!r} of "
                    f"{inner.size}"
                )

    @classmethod
    def detect(cls, device: str = "auto") -> Topology:
        """This machine: sizes are read, bandwidths and latencies stated by kind of link (`notes` says which)."""
        import torch

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device == "cpu":
            cores = os.cpu_count() or 1
            tier = Tier(name="host", size=cores, bandwidth_gbps=10.0, latency_us=50.0)
            return cls(
                device="cpu",
                device_memory=0,
                memory_gbps=50.0,
                host_memory=host,
                tiers=(tier,),
                notes=(
                    f"{cores} cores and the size of memory read from the system; memory assumed at 50 GB/s",
                    "host: assumed 10 GB/s through shared memory",
                ),
            )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        count = torch.cuda.device_count()
        notes = [f"{count} x {properties.name}, size of memory read from the driver"]
        clock, bus = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
        if clock and bus:
            memory = 2 * clock * 1e3 * bus / 8 / 1e9  # kHz, two transfers per clock; bits
            notes.append("memory_gbps: from the driver's clock and bus width")
        else:
            memory = 1000.0
            notes.append("memory_gbps: assumed, this torch does not report the clock")
        if count == 1:
            tier = Tier(name="device", size=1, bandwidth_gbps=1000.0, latency_us=1.0)
            notes.append("device: one device, no links")
        elif all(torch.cuda.can_device_access_peer(0, i) for i in range(1, count)):
            speed = {8: 300.0, 9: 450.0, 10: 900.0}.get(properties.major, 25.0)
            name = "nvlink" if speed > 25.0 else "pcie"
            tier = Tier(name=name, size=count, bandwidth_gbps=speed, latency_us=3.0)
            notes.append(
                f"{name}: devices reach each other; {speed:g} GB/s one way by compute capability, not measured"
            )
        else:
            tier = Tier(name="pcie", size=count, bandwidth_gbps=25.0, latency_us=10.0)
            notes.append("pcie: no peer access; assumed 25 GB/s")
        return cls(
            device=properties.name,
            device_memory=properties.total_memory,
            memory_gbps=memory,
            host_memory=host,
            tiers=(tier,),
            notes=tuple(notes),
        )

    @classmethod
    def from_toml(cls, path: str | Path) -> Topology:
        """Read what `to_toml` writes.

        Raises:
            ValueError: a key that is missing, unknown or out of range, naming the file.
        """
        with open(path, "rb") as file:
            data = tomllib.load(file)
        try:
            tiers = tuple(made(Tier, tier) for tier in data.pop("tiers", ()))
            return made(cls, {"tiers": tiers, "notes": tuple(data.pop("notes", (f"read from {path}",))), **data})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a topology: {error}") from error

    def to_toml(self, path: str | Path) -> None:
        """Write the topology as TOML, to be edited by hand."""
        lines = [
            f"device = {_string(self.device)}",
            f"device_memory = {self.device_memory}  # bytes",
            f"memory_gbps = {float(self.memory_gbps)!r}",
            f"host_memory = {self.host_memory}  # bytes",
            f"notes = [{', '.join(map(_string, self.notes))}]",
        ]
        for tier in self.tiers:
            lines += [
                "",
                "[[tiers]]",
                f"name = {_string(tier.name)}",
                f"size = {tier.size}",
                f"bandwidth_gbps = {float(tier.bandwidth_gbps)!r}  # 10^9 bytes per second, one way, of one device",
                f"latency_us = {float(tier.latency_us)!r}",
                f"oversubscription = {float(tier.oversubscription)!r}",
            ]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def why(self) -> str:
        """A readable table of the tiers, and where the numbers come from."""
        gib = 1 << 30
        lines = [
            f"{self.device}: {self.device_memory / gib:.1f} GiB device memory at {self.memory_gbps:g} GB/s, "
            f"{self.host_memory / gib:.1f} GiB host memory",
            f"{'tier':12} {'devices':>8} {'GB/s':>10} {'us':>8} {'oversub.':>9}",
        ]
        lines += [
            f"{t.name:12} {t.size:>8} {t.bandwidth_gbps:>10g} {t.latency_us:>8g} {t.oversubscription:>9g}"
            for t in self.tiers
        ]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)])


def _string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
