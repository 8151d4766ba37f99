"""What every region keeps: the plan, as a table to read and as a file to keep with the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gem_parallel.memory.allocate import Option, allocate, peak
from gem_parallel.memory.profile import Curve, Point

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RegionPlan:
    """One region's part.

    Attributes:
        region: the module's name.
        point: what it keeps.
        whole: bytes that it would keep without recomputation.
        forward_s: seconds of its forward pass.
    """

    region: str
    point: Point
    whole: int
    forward_s: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The choice for all regions under one budget.

    Attributes:
        engine: of MemoryConfig.
        policy: "keep" (all but what backward kernels write on their way), "full", "uniform" or "regions".
        budget: bytes that all regions together may hold at any time.
        regions: in the order of the forward pass.
        asked: what was asked for, in words.
    """

    engine: str
    policy: str
    budget: int
    regions: tuple[RegionPlan, ...]
    asked: str = ""

    @property
    def kept(self) -> int:
        """Bytes of all regions between forward and backward, on the device (quantised where that is asked for)."""
        return sum(row.point.kept for row in self.regions)

    @property
    def peak(self) -> int:
        """The most that the regions hold: while one runs backward it is there as a whole, beside what those before it
        keep."""
        return peak([row.point.option for row in self.regions])

    @property
    def seconds(self) -> float:
        """Seconds recomputed in a step."""
        return sum(row.point.seconds for row in self.regions)

    def __str__(self) -> str:
        forward = sum(row.forward_s for row in self.regions)
        whole = sum(row.whole for row in self.regions)
        lines = [
            f"activations, {self.policy}, {self.engine}: {self.kept / _MIB:.1f} of {whole / _MIB:.1f} MiB kept "
            f"(peak {self.peak / _MIB:.1f}, budget {self.budget / _MIB:.1f}), {self.seconds * 1e3:.2f} ms of "
            f"{forward * 1e3:.2f} ms forward again",
            f"{'region':28} {'kept MiB':>10} {'of':>9} {'share':>6} {'again ms':>9} {'of forward':>10}  keeps",
        ]
        for row in self.regions:
            packed = "" if row.point.packs else ", as it is"
            packed += "" if row.point.inside == "none" else f", {row.point.inside} inside"
            share = row.point.kept / row.whole if row.whole else 1.0
            again = row.point.seconds / row.forward_s if row.forward_s else 0.0
            lines.append(
                f"{row.region:28} {row.point.kept / _MIB:>10.2f} {row.whole / _MIB:>9.2f} {share:>6.0%} "
                f"{row.point.seconds * 1e3:>9.3f} {again:>10.0%}  {_what(row.point, self.engine)}{packed}"
            )
        return "\n".join(lines)

    def write(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> MemoryPlan:
        """Read what `write` wrote.

        Raises:
            ValueError: another kind of file, naming it.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = []
            for row in data.pop("regions"):
                point = row.pop("point")
                point["names"] = None if point["names"] is None else tuple(point["names"])
                point["again"] = tuple(point["again"])
                rows.append(RegionPlan(point=Point(**point), **row))
            return cls(regions=tuple(rows), **data)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a memory plan: {error}") from error


def _what(point: Point, engine: str) -> str:
    if point.names is None:
        if point.again:
            return "all but " + _counted(point.again)
        return "all" if engine != "compile" or point.budget == 1 else f"budget {point.budget:g}"
    if not point.names:
        return "inputs"
    return _counted(point.names)


def _counted(names: Sequence[str]) -> str:
    """The most frequent kinds."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = name.split("#")[0].removesuffix(".default").removeprefix("aten.")
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{kind} x {n}" if n > 1 else kind for kind, n in sorted(kinds.items(), key=lambda kv: -kv[1])[:4])


def make_plan(
    curves: Sequence[Curve], *, policy: str, engine: str, share: float = 1.0, limit: int | None = None, asked: str = ""
) -> MemoryPlan:
    """Choose a point of every curve.

    Args:
        curves: of the regions, in the order of the forward pass.
        policy: "full" or "keep" (the fewest bytes everywhere; a curve for "keep" has nothing but all that is kept, with
            and without what kernels write on their way), "uniform" (each region within the same share of its own bytes)
            or "regions" (the least seconds for all together at no higher a peak than that share would have, exactly).
        engine: which engine the points are for.
        share: of the bytes that each region keeps without recomputation.
        limit: bytes that all of them may hold at any time, instead of a share.
        asked: goes into the plan.

    A region that runs backward is there as a whole, so that the last ones cost little more when they are kept whole,
    and "regions" spends more on them than on the first ones. Below what the regions keep at least, the plan is the one
    that keeps least; its `budget` says what was asked for.
    """
    options = [[point.option for point in curve.points] for curve in curves]
    if limit is not None:
        share = _share_within(options, limit)
    budget = peak([_like(o, share) for o in options]) if limit is None else limit
    if policy in ("full", "keep"):
        chosen = [0] * len(curves)
    elif policy == "uniform":
        chosen = [max(i for i, p in enumerate(c.points) if i == 0 or p.kept <= share * c.whole) for c in curves]
    else:
        chosen = allocate(options, max(budget, peak([region[0] for region in options])))
    rows = [
        RegionPlan(region=c.region, point=c.points[i], whole=c.whole, forward_s=c.forward_s)
        for c, i in zip(curves, chosen, strict=True)
    ]
    return MemoryPlan(engine=engine, policy=policy, budget=budget, regions=tuple(rows), asked=asked)


def _like(options: Sequence[Option], share: float) -> Option:
    """A region that keeps this share of what it can keep."""
    whole = options[-1]
    return whole if share >= 1 else Option(kept=int(share * whole.kept), seconds=0.0, working=options[0].most)


def _share_within(options: Sequence[Sequence[Option]], limit: int) -> float:
    """The largest common share whose peak is within the limit, to a thousandth."""
    return next((s / 1000 for s in range(1000, 0, -1) if peak([_like(o, s / 1000) for o in options]) <= limit), 0.0)
