"""What a machine really achieves: assumed rates, and measurements that replace them.

A profile is a TOML or JSON file with keys of `Profile` and, optionally, two lists of measurements:

    units         name, batch, forward_ms, backward_ms            a unit alone on one device, at one or more batches
    collectives   tier, kind, size, bytes, ms                     a collective alone, over `size` ranks of one tier

`kind` is "all_gather" or "reduce_scatter" (bytes of the whole tensor), "all_reduce" or "all_to_all" (bytes that every
rank has). Lines are fitted through them: seconds of a unit = fixed + per sample x batch, of a collective = latency +
bytes on the links / bandwidth. `gem-train bench` and `python -m gem_parallel.bench comm` measure both.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gem_parallel.planning.fields import made, require

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class UnitTime:
    """Seconds of a unit: forward = forward_fixed_s + forward_s x batch, and the backward pass alike."""

    name: str
    forward_fixed_s: float
    forward_s: float
    backward_fixed_s: float
    backward_s: float

    def seconds(self, batch: int, *, backward: bool) -> float:
        """Of `batch` samples on one device."""
        if backward:
            return self.backward_fixed_s + self.backward_s * batch
        return self.forward_fixed_s + self.forward_s * batch


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """A kind of collective on a tier: 10^9 bytes per second on a device's links, and latency (of one ring step)."""

    tier: str
    kind: str
    gbps: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What the machine really achieves; the defaults are assumptions, a measured profile replaces them.

    Attributes:
        tflops: 10^12 useful FLOPs per second of one device inside the layers (peak times local MFU).
        unit_us: microseconds of a layer's fixed cost, forward.
        link_efficiency: share of a tier's bandwidth that a collective attains.
        message_us: microseconds to send one message of an all-to-all, beside its bytes.
        lookup_efficiency: share of the memory bandwidth that table lookups and updates attain.
        memory_efficiency: the same of what goes over memory in order: the optimizer, sums of gradients, V3's owners.
        slowdown: share of the compute rate that is lost while a collective runs beside it (SMs and memory traffic).
        reserve_bytes: memory taken by the driver, the allocator and communication buffers.
        usable: share of the device memory that may be planned.
        source: where the numbers come from.
        units: measured units; they replace FLOPs over tflops for the layers of their names.
        links: measured collectives; they replace bandwidth times link_efficiency for their tiers and kinds.
    """

    tflops: float = 350.0
    unit_us: float = 20.0
    link_efficiency: float = 0.8
    message_us: float = 1.0
    lookup_efficiency: float = 0.5
    memory_efficiency: float = 0.5
    slowdown: float = 0.09
    reserve_bytes: int = 6 << 30
    usable: float = 0.92
    source: str = "assumed"
    units: tuple[UnitTime, ...] = ()
    links: tuple[LinkRate, ...] = ()

    def __post_init__(self) -> None:
        for key in ("tflops", "link_efficiency", "lookup_efficiency", "memory_efficiency", "usable"):
            require(getattr(self, key) > 0, f"Profile.{key} must be > 0, got {getattr(self, key)!r}")
        for key in ("unit_us", "message_us", "slowdown", "reserve_bytes"):
            require(getattr(self, key) >= 0, f"Profile.{key} must be >= 0, got {getattr(self, key)!r}")
        for key in ("link_efficiency", "lookup_efficiency", "memory_efficiency", "usable"):
            require(getattr(self, key) <= 1, f"Profile.{key} must be <= 1, got {getattr(self, key)!r}")
        require(self.slowdown < 1, f"Profile.slowdown must be < 1, got {self.slowdown!r}")

    def unit(self, name: str) -> UnitTime | None:
        """The measured unit of that name."""
        return next((unit for unit in self.units if unit.name == name), None)

    def link(self, tier: str, kind: str) -> LinkRate | None:
        """The measured collective."""
        return next((link for link in self.links if (link.tier, link.kind) == (tier, kind)), None)

    def measured(
        self, *, units: Iterable[Mapping[str, Any]] = (), collectives: Iterable[Mapping[str, Any]] = ()
    ) -> Profile:
        """This profile with lines through measurements (see the module).

        Raises:
            ValueError: a measurement that lacks a key or has a value out of range.
        """
        return replace(self, units=self.units + _fit_units(units), links=self.links + _fit_links(collectives))

    @classmethod
    def read(cls, *paths: str | Path) -> Profile:
        """Read TOML or JSON files (by their endings): keys of this class, measurements as the module describes.

        Measurements of several files are joined; of a key that several have, the last one's value holds.

        Raises:
            ValueError: an unknown key or a value out of range, naming the file.
        """
        values: dict[str, Any] = {}
        units: list[Any] = []
        collectives: list[Any] = []
        sources = []
        for path in map(Path, paths):
            try:
                text = path.read_text(encoding="utf-8")
                data: dict[str, Any] = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
                units += data.pop("units", ())
                collectives += data.pop("collectives", ())
                sources.append(str(data.pop("source", path)))
                values |= data
                made(cls, data)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: not a profile: {error}") from error
        try:
            found = cls(**values, source="; ".join(sources) or "assumed")
            return found.measured(units=units, collectives=collectives)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{', '.join(map(str, paths))}: not a profile: {error}") from error

    @classmethod
    def from_toml(cls, path: str | Path) -> Profile:
        """The same as `read`."""
        return cls.read(path)


def _fit_units(rows: Iterable[Mapping[str, Any]]) -> tuple[UnitTime, ...]:
    points: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        batch, forward, backward = _number(row, "batch"), _time_ms(row, "forward_ms"), _time_ms(row, "backward_ms")
        points.setdefault(str(row.get("name", "")), []).append((batch, forward * 1e-3, backward * 1e-3))
    found = []
    for name, measured in points.items():
        require(bool(name), "a measured unit has no name")
        fixed, slope = _line([(batch, forward) for batch, forward, _ in measured])
        back_fixed, back_slope = _line([(batch, backward) for batch, _, backward in measured])
        found.append(
            UnitTime(
                name=name,
                forward_fixed_s=fixed,
                forward_s=slope,
                backward_fixed_s=back_fixed,
                backward_s=back_slope,
            )
        )
    return tuple(found)


def _fit_links(rows: Iterable[Mapping[str, Any]]) -> tuple[LinkRate, ...]:
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    steps: dict[tuple[str, str], float] = {}
    for row in rows:
        kind = str(row.get("kind"))
        require(kind in KINDS, f"a measured collective's kind must be one of {', '.join(KINDS)}, got {kind!r}")
        size, nbytes, ms = (_number(row, key) for key in ("size", "bytes", "ms"))
        require(size >= 2, f"a measured collective needs at least 2 ranks, got {size:g}")
        key = (str(row.get("tier")), kind)
        moved = nbytes * (size - 1) / size * (2 if kind == "all_reduce" else 1)
        points.setdefault(key, []).append((moved, ms * 1e-3))
        steps[key] = 1.0 if kind == "all_to_all" else (size - 1) * (2 if kind == "all_reduce" else 1)
    found = []
    for (tier, kind), measured in points.items():
        latency, slope = _line(measured)
        require(slope > 0, f"{kind} on {tier!r}: larger sizes took no longer; measure sizes that fill the links")
        found.append(LinkRate(tier=tier, kind=kind, gbps=1e-9 / slope, latency_us=latency / steps[(tier, kind)] * 1e6))
    return tuple(found)


def _number(row: Mapping[str, Any], key: str) -> float:
    value = row.get(key)
    require(isinstance(value, int | float) and value > 0, f"a measurement's {key} must be > 0, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _time_ms(row: Mapping[str, Any], key: str) -> float:
    """A difference of two measurements may be nothing: a microsecond then."""
    return 1e-3 if row.get(key) == 0 else _number(row, key)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) >= 0 of the line of least relative squares; through zero when there is but one abscissa."""
    xs = {x for x, _ in points}
    weight = [1 / (y * y) for _, y in points]
    if len(xs) > 1:
        total = sum(weight)
        mx = sum(w * x for w, (x, _) in zip(weight, points, strict=True)) / total
        my = sum(w * y for w, (_, y) in zip(weight, points, strict=True)) / total
        sxx = sum(w * (x - mx) ** 2 for w, (x, _) in zip(weight, points, strict=True))
        sxy = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weight, points, strict=True))
        slope = sxy / sxx
        if slope <= 0:
            return my, 0.0
        if my - slope * mx >= 0:
            return my - slope * mx, slope
    sxx = sum(w * x * x for w, (x, _) in zip(weight, points, strict=True))
    return 0.0, sum(w * x * y for w, (x, y) in zip(weight, points, strict=True)) / sxx
