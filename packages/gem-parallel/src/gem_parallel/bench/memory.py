"""Memory against step time: no recomputation, full, uniform budgets, budgets per region, with quantised activations.

Every variant trains the same model on the same batch. Its gradients are compared with the unchecked model's, as the
norm of the difference over the norm of the gradients, of all parameters and of each region's by themselves: what goes
wrong in one region hardly shows in the whole, where the heads' gradients are most of the norm. Recomputation must not
differ by more than two unchecked runs do (not at all, where the device's kernels repeat themselves); where backward
kernels write normed rows again, by no more than a rounding of some of them. What is rounded
may differ by what rounding gives, at any batch. E4M3 is off by 2.6% (root mean square) and MXFP4 by 11%, and a gradient
is a product of two or three of such tensors; a region is allowed twice what the whole is.

With `--graphs` the regions are replayed from CUDA graphs, as training on one card has them. What is kept then lies in
the graphs' pool, which the allocator takes for free memory: the peak is what was taken from the card beyond what it
held before, and "kept" what the plan says.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gem_parallel.bench.results import write
from gem_parallel.bench.stack import Workload
from gem_parallel.config import MemoryConfig
from gem_parallel.memory.profile import Curve
from gem_parallel.memory.regions import MEASURED_STEPS, Regions

FP8_TOLERANCE = 0.05
MX4_TOLERANCE = 0.25
INSIDE = {"inside": "exact", "inside8": "fp8"}  # of MemoryConfig, in the names of variants
INSIDE_TOLERANCE = 1e-4  # a row that is normed once more in another pass may be rounded otherwise here and there
REGION = 2.0  # times a tolerance, of the parameters of one region
WARM_UP = 1  # step, which compiles kernels where they are new and makes the allocator's pools


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--engines", nargs="+", default=["eager"], choices=("eager", "operators", "compile"))
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="these instead, such as 'operators: uniform 0.5'")
    parser.add_argument(
        "--larger", nargs="+", default=[], metavar="BATCH=NAME", help="then these at other batches, not compared"
    )
    parser.add_argument("--only", nargs="+", help="variants whose names contain one of these; none always runs")
    parser.add_argument(
        "--share", default="0/1", help="R/N: every Nth variant from the Rth on, for N cards side by side"
    )
    parser.add_argument("--graphs", action="store_true", help="regions replayed from CUDA graphs; eager engine alone")
    parser.add_argument("--min-kib", type=float, default=1024.0, help="smaller tensors are kept as they are")
    parser.add_argument(
        "--workload",
        default="gem_parallel.bench.stack:workload",
        help="package.module:function; function(device, batch) -> gem_parallel.bench.stack.Workload",
    )
    parser.add_argument("--out", help="JSON file")


def variants(budgets: list[float], engine: str) -> list[str]:
    """What is compared, by name; `config_of` reads them."""
    if engine != "eager":
        return [f"{engine}: none"] * (engine == "compile") + [
            f"{engine}: {policy} {budget:g}" for budget in budgets for policy in ("uniform", "regions")
        ]
    return [
        "none",
        "full",
        *(f"{policy} {budget:g}" for budget in budgets for policy in ("uniform", "regions")),
        "fp8 alone",
        "mx4 alone",
        *(f"regions {budget:g} + fp8" for budget in budgets),
        "full + fp8",
        "inside alone",
        "inside8 alone",
        "offload",
    ]


def config_of(name: str, min_kib: float = 1024.0) -> MemoryConfig | None:
    """ "[engine: ]none | full | (fp8 | mx4 | inside | inside8) alone | offload | (uniform | regions) (0.5 | 80GiB)",
    and " + fp8", " + mx4", " + inside" and " + inside8" (MemoryConfig.inside = "fp8") behind it.

    Raises:
        SystemExit: something else.
    """
    engine, _, rest = name.rpartition(": ")
    rest, *added = rest.split(" + ")
    policy, _, amount = rest.partition(" ")
    if amount == "alone":
        added.insert(0, policy)
    more: dict[str, Any] = {"quantise_min_kib": min_kib, "recompute_min_kib": min_kib}
    if engine:
        more["engine"] = engine
    for what in added:
        more |= {"inside": INSIDE[what]} if what in INSIDE else {"quantise": what}
    try:
        if rest == "none":
            return MemoryConfig(**more) if engine else None
        if amount == "alone":
            return MemoryConfig(**more)
        if rest == "offload":
            return MemoryConfig(offload_min_mib=16, **more)
        if rest != "full":
            more |= {"budget_gib": float(amount[:-3])} if amount.endswith("GiB") else {"budget": float(amount)}
        return MemoryConfig(policy=policy, **more)
    except ValueError as error:
        raise SystemExit(f"no variant {name!r}: {error}") from error


def run(args: argparse.Namespace) -> int:
    """Print a row per variant; 1 when a gradient is wrong."""
    device = torch.device(args.device)
    make = _find(args.workload)
    if args.graphs and device.type != "cuda":
        raise SystemExit(f"--graphs: CUDA graphs need a CUDA device, and --device is {args.device}")
    names = args.variants or [name for engine in args.engines for name in variants(args.budgets, engine)]
    if args.only:
        names = [name for name in names if any(part in name for part in args.only)]
    part, parts = map(int, args.share.split("/"))
    rest = [name for name in names if name != "none"]
    wanted = [(args.batch, name) for name in ("none", "none again", *rest[part::parts])]
    for text in args.larger:
        batch, _, name = text.partition("=")
        if not batch.isdigit():
            raise SystemExit(f"--larger {text!r}: expected BATCH=NAME")
        wanted.append((int(batch), name))
    configs = [config_of("none" if name == "none again" else name, args.min_kib) for _, name in wanted]
    if any(config is not None and config.engine == "compile" for config in configs):
        import torch._inductor.config as inductor_config

        inductor_config.fallback_random = True  # dropout as without the compiler, so that gradients can be compared
    reference: list[torch.Tensor] = []
    noise = 0.0, 0.0  # how much two unchecked runs differ, in the whole and in one region
    rows: list[dict[str, Any]] = []
    curves: dict[tuple[str, ...], dict[str, Curve]] = {}
    good = True
    heads = " ".join(f"{head:>9}" for head in ("step ms", "a sample", "host ms", "kept MiB", "peak MiB"))
    print(f"{'variant':28} {heads} {'against none':>13} {'memory':>7}  error, in a region")
    workload, made_for = Workload(*make(device, args.batch)), args.batch
    for (batch, name), config in zip(wanted, configs, strict=True):
        if batch != made_for:
            reference, curves = [], {}
            del workload
            workload, made_for = Workload(*make(device, batch)), batch
        compare = batch == args.batch
        label = name if compare else f"{batch}: {name}"
        try:
            row, grads, plan = measure(
                workload, device, config, args.steps, reference if compare else None, curves, graphs=args.graphs
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            rows.append({"op": "train", "pass": "step", "case": f"batch {batch}", "variant": f"{label}, does not fit"})
            print(f"{label:28} does not fit", flush=True)
            continue
        row |= {"case": f"batch {batch}", "variant": label, "ms_a_sample": row["ms"] / batch}
        rows.append(row)
        if compare and not reference:
            reference = grads
        if name == "none again":
            noise = row["error"], row["worst"]
        wrong = not (right(row, config, noise) if compare else row["finite"])
        good &= not wrong
        first = next(r for r in rows if "ms" in r)
        size = "peak_mib" if args.graphs else "kept_mib"
        share = row[size] / first[size] if first[size] else float("nan")
        print(
            f"{label:28} {row['ms']:9.2f} {row['ms_a_sample']:9.3f} {row['host_ms']:9.2f} {row['kept_mib']:9.0f} "
            f"{row['peak_mib']:9.0f} {row['ms_a_sample'] / first['ms_a_sample'] - 1:+13.1%} {share:7.2f}  "
            f"{row['error']:.1e} {row['worst']:.1e} {row['worst_in']}{'  WRONG' if wrong else ''}",
            flush=True,
        )
        if plan:
            print("    " + str(plan).splitlines()[0] + "\n    " + str(plan).splitlines()[2], flush=True)
        if args.out:  # a run that is cut short leaves what it has
            write(args.out, "memory", rows, batch=args.batch, workload=args.workload, graphs=args.graphs)
    return 0 if good else 1


def measure(
    workload: Workload,
    device: torch.device,
    config: MemoryConfig | None,
    steps: int,
    reference: list[torch.Tensor] | None,
    curves: dict[tuple[str, ...], dict[str, Curve]],
    *,
    graphs: bool = False,
) -> tuple[dict[str, Any], list[torch.Tensor], Any]:
    """(the row, gradients of the last step, the plan): median times of a step and of its launches on the host, bytes
    kept by the forward, peak. Gradients are compared where there is a reference, and returned where it is empty.
    Variants that differ in their budgets alone share the curves that the first one measures.
    """
    gc.collect()
    cuda = device.type == "cuda"
    model, names, loss, replayed = workload
    if graphs and replayed is None:
        raise SystemExit("--graphs: this workload has none")
    regions: Regions | None = None
    known: dict[str, Curve] | None = None
    if config is not None:
        family = (config.engine, config.quantise, config.inside, "keep" * (config.policy == "keep"))
        known = curves.get(family) if config.policy in ("uniform", "regions") else None
        regions = Regions(model, names, config, curves=known)
        regions.launched = not graphs
    measured = regions is not None and regions.measuring and not known
    if cuda:
        torch.cuda.empty_cache()
    before_all = torch.cuda.memory_reserved() if graphs else 0

    def may_be_captured() -> bool:
        return regions is None or not regions.measuring

    around: AbstractContextManager[None] = nullcontext()
    if graphs and replayed is not None:
        around = replayed(may_be_captured)

    def step(seed: int) -> tuple[float, float, int]:
        if regions is not None:
            regions.begin()
        torch.manual_seed(seed)
        before = torch.cuda.memory_allocated() if cuda else 0
        began = _now(cuda)
        value = loss()
        kept = (torch.cuda.memory_allocated() if cuda else 0) - before
        value.backward()
        issued = time.perf_counter() - began
        return _now(cuda) - began, issued, kept

    with around, _closing(regions, model):
        model.zero_grad(set_to_none=True)
        for seed in range(WARM_UP + (MEASURED_STEPS if measured else 0)):
            step(seed)
            model.zero_grad(set_to_none=True)
        if regions is not None and regions.curves:
            curves[family] = regions.curves
        resting = 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
        took = []
        for seed in range(steps):
            model.zero_grad(set_to_none=True)
            took.append(step(seed))
        peak = 0
        if graphs:
            peak = torch.cuda.max_memory_reserved() - before_all
        elif cuda:
            peak = torch.cuda.max_memory_allocated() - resting
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        error, worst, where = errors(model, names, reference) if reference else (0.0, 0.0, "")
        finite = bool(torch.stack([g.isfinite().all() for g in grads]).all())
        copies = [g.detach().clone() for g in grads] if reference == [] else []
    row = {
        "op": "train",
        "pass": "step",
        "ms": statistics.median(t for t, _, _ in took) * 1e3,
        "host_ms": statistics.median(t for _, t, _ in took) * 1e3,
        "kept_mib": took[-1][2] / 2**20 if not graphs else 0.0,
        "peak_mib": peak / 2**20,
        "error": error,
        "worst": worst,
        "worst_in": where,
        "finite": finite,
    }
    if regions is not None and regions.plan is not None:
        row["plan_kept_mib"] = regions.plan.kept / 2**20
        row["plan_peak_mib"] = regions.plan.peak / 2**20
        row["plan_recomputed_ms"] = regions.plan.seconds * 1e3
        if not cuda or graphs:
            row["kept_mib"] = row["plan_kept_mib"]
    return row, copies, regions and regions.plan


def errors(
    model: torch.nn.Module, regions: Sequence[str], reference: Sequence[torch.Tensor]
) -> tuple[float, float, str]:
    """Differences of the gradients from `reference`, over the reference's norm: (of all, the largest of one region's
    parameters, that region). What is outside of the regions counts as one more, called "outside".
    """
    pairs = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    sums: dict[str, tuple[float, float]] = {}
    for (name, mine), theirs in zip(pairs, reference, strict=True):
        at = next((region for region in regions if name.startswith(f"{region}.")), "outside")
        wrong, whole = sums.get(at, (0.0, 0.0))
        wide = theirs.double()
        sums[at] = wrong + float((mine.double() - wide).square().sum()), whole + float(wide.square().sum())

    def relative(wrong: float, whole: float) -> float:
        return math.sqrt(wrong / max(whole, 1e-30))

    each = {at: relative(*found) for at, found in sums.items()}
    where = max(each, key=lambda at: (math.isnan(each[at]), each[at]))  # one that is no number is the largest
    return relative(*(sum(part) for part in zip(*sums.values(), strict=True))), each[where], where


def right(row: dict[str, Any], config: MemoryConfig | None, noise: tuple[float, float]) -> bool:
    """Whether a row's gradients are as near as they have to be, `noise` being how much two unchecked runs differ."""
    exact = config is None or (config.quantise == "none" and config.engine != "compile" and config.inside != "fp8")
    near = MX4_TOLERANCE if config is not None and config.quantise == "mx4" else FP8_TOLERANCE
    again = INSIDE_TOLERANCE if config is not None and config.inside == "exact" else 0.0
    limits = (max(2 * noise[0], again), max(2 * noise[1], REGION * again)) if exact else (near, REGION * near)
    return bool(row["error"] <= limits[0] and row["worst"] <= limits[1])


@contextmanager
def _closing(regions: Regions | None, model: torch.nn.Module) -> Iterator[None]:
    """What a variant leaves at its end, or where it does not fit: nothing."""
    try:
        yield
    finally:
        if regions is not None:
            regions.close()
        model.zero_grad(set_to_none=True)


def _out_of_memory(error: BaseException | None) -> bool:
    """Also where it was met inside a capture, whose end then fails in its own words."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _out_of_memory(error.__context__))


def _find(name: str) -> Callable[[torch.device, int], Any]:
    module, _, function = name.partition(":")
    if not function:
        raise SystemExit(f"--workload {name!r}: expected package.module:function")
    found: Callable[[torch.device, int], Any] = getattr(importlib.import_module(module), function)
    return found


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
