"""Collectives of this world: bandwidth alone, the rate of a matrix product beside them, and FSDP's ladder.

Run under torchrun. Every implementation is compared with the backend's own result before it is timed. The ladder trains
a stack of blocks on every rank's own batch (weak scaling): one rank without FSDP, then plain, prefetch, copy engine and
FP8 payload; its ratio is the first step time over the row's, and its exposed time is measured unit by unit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gem_parallel.bench.results import write
from gem_parallel.bench.stack import Stack
from gem_parallel.comm.apply import Collectives
from gem_parallel.comm.exposed import Exposed
from gem_parallel.comm.fsdp import (
    CopyEngineAllGather,
    CopyEngineReduceScatter,
    GroupReduceScatter,
    PlainAllGather,
    limited_group,
)
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.comm.windows import CudaWindow, Ring
from gem_parallel.config import CommConfig
from gem_parallel.dense.units import set_prefetch
from gem_parallel.planning.topology import Topology
from gem_parallel.runtime import Runtime, start

_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
PARTS = ("collectives", "ladder", "layouts")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the suite."""
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--mib", type=int, nargs="+", default=[32, 256], help="sizes of what is gathered")
    parser.add_argument("--ctas", type=int, nargs="+", default=[2, 4, 8], help="limits of the reduce-scatter")
    parser.add_argument("--gemm", type=int, default=8192, help="side of the matrix product beside a collective")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--parts", nargs="+", default=["collectives", "ladder"], choices=PARTS, help="in this order")
    parser.add_argument("--profile", help="JSON for the planner (Profile.read), written by rank 0")
    parser.add_argument("--out", help="JSON file, written by rank 0")


def run(args: argparse.Namespace) -> int:
    """Print a row per implementation; 1 when one of them computed something else."""
    with start(args.device) as runtime:
        if runtime.world == 1:
            _say(runtime, "one process: nothing travels. Run it under torchrun to measure collectives.")
        rows: list[dict[str, Any]] = []
        good = True
        for part in args.parts:
            if part == "layouts":
                from gem_parallel import selfcheck  # TorchRec is slow to import, and the other parts need none

                good &= selfcheck.table(runtime, steps=args.steps)
            else:
                good &= {"collectives": collectives, "ladder": ladder}[part](args, runtime, rows)
        _save(args, runtime, rows)
        if args.profile and runtime.is_main:
            Path(args.profile).write_text(json.dumps(profile(rows, runtime), indent=1) + "\n", encoding="utf-8")
        runtime.barrier("the end of the benchmark")
    return 0 if good else 1


# --- collectives


def collectives(args: argparse.Namespace, runtime: Runtime, rows: list[dict[str, Any]]) -> bool:
    """Bandwidth (bytes that a rank receives per second), alone and beside a matrix product."""
    group, device = dist.group.WORLD, runtime.device
    assert group is not None
    has = Collectives(CommConfig(), runtime).capabilities(group)
    windows = device.type == "cuda" and has.peers and has.symmetric
    _say(runtime, f"{has}")
    gathers: dict[str, Any] = {"default": PlainAllGather()}
    scatters: dict[str, Any] = {"default": None}
    if windows:
        gathers["copy engine"] = CopyEngineAllGather(Ring(group, 2))
        by_kernel = partial(CudaWindow, kernels=True)
        gathers["copy engine, kernel barriers"] = CopyEngineAllGather(Ring(group, 2, by_kernel))
        gathers["written, kernel barriers"] = CopyEngineAllGather(Ring(group, 2, by_kernel), pushes=True)
        for lanes in {runtime.world - 1} - {1}:
            ring = Ring(group, 2, by_kernel)
            gathers[f"written, kernel barriers, {lanes} lanes"] = CopyEngineAllGather(ring, pushes=True, lanes=lanes)
        scatters["copy engine"] = CopyEngineReduceScatter(Ring(group, 2))
    else:
        _say(runtime, "no copy engine here: the cards do not reach one another's memory, or this is a CPU")
    for ctas in args.ctas:
        scatters[f"{ctas} CTAs"] = GroupReduceScatter(limited_group(group, ctas))
    solo = _gemm(args, device)() if device.type == "cuda" else 0.0
    _say(runtime, f"{'collective':28} {'MiB':>6} {'ms':>8} {'GB/s':>8} {'product beside it':>18}  error")
    good = True
    for mib in args.mib:
        shard = mib * 2**20 // 2 // runtime.world // 128 * 128  # bfloat16 elements of one rank
        for name, comm in gathers.items():
            good &= _row(args, runtime, rows, f"all-gather, {name}", mib, solo, *_gather_call(comm, shard, runtime))
        for name, comm in scatters.items():
            good &= _row(
                args, runtime, rows, f"reduce-scatter, {name}", mib, solo, *_scatter_call(comm, shard // 2, runtime)
            )
        for kind in ("all-reduce", "all-to-all"):
            good &= _row(args, runtime, rows, f"{kind}, default", mib, solo, *_whole_call(kind, shard // 2, runtime))
    return good


def profile(rows: list[dict[str, Any]], runtime: Runtime) -> dict[str, Any]:
    """What the planner reads: the backend's own collectives, and what a product beside an all-gather loses."""
    kinds = {f"{kind}, default": kind.replace("-", "_") for kind in _KINDS}
    ours = [row for row in rows if row["op"] in kinds]
    found: dict[str, Any] = {
        "source": f"python -m gem_parallel.bench comm on {runtime.world} x {runtime.device.type}",
        "collectives": [
            {
                "tier": Topology.detect(runtime.device.type).tiers[0].name,
                "kind": kinds[row["op"]],
                "size": runtime.world,
                "bytes": row["bytes"],
                "ms": row["ms"],
            }
            for row in ours
        ],
    }
    beside = [row["gemm"] for row in ours if "all-gather" in row["op"] and row["gemm"] == row["gemm"]]  # nan on a CPU
    if beside:
        found["slowdown"] = min(0.99, max(0.0, 1 - min(beside)))
    return found


def _gather_call(comm: Any, shard: int, runtime: Runtime) -> tuple[Callable[[], Any], float, int]:
    device, group, world = runtime.device, dist.group.WORLD, runtime.world
    torch.manual_seed(runtime.rank)
    own = torch.randn(shard, device=device).to(torch.bfloat16)
    want = torch.empty(world * shard, dtype=torch.bfloat16, device=device)
    dist.all_gather_into_tensor(want, own)
    out = comm.allocate((world * shard,), dtype=torch.bfloat16, device=device)
    mine = out[runtime.rank * shard : (runtime.rank + 1) * shard]
    mine.copy_(own)

    def call() -> None:
        comm(output_tensor=out, input_tensor=mine, group=group)

    call()
    return call, float((out.float() - want.float()).abs().max()), 2 * shard * (world - 1)


def _scatter_call(comm: Any, shard: int, runtime: Runtime) -> tuple[Callable[[], Any], float, int]:
    device, group, world = runtime.device, dist.group.WORLD, runtime.world
    torch.manual_seed(runtime.rank)
    value = torch.randn(world * shard, device=device)
    want = torch.empty(shard, device=device)
    dist.reduce_scatter_tensor(want, value.clone())
    whole, out = value, torch.empty(shard, device=device)
    if comm is not None:
        whole = comm.allocate((world * shard,), dtype=torch.float32, device=device)
        whole.copy_(value)

    def call() -> None:
        if comm is None:
            dist.reduce_scatter_tensor(out, whole)
        else:
            comm(output_tensor=out, input_tensor=whole, group=group, op=dist.ReduceOp.SUM)

    call()
    return call, float((out - want).abs().max()), 4 * shard * (world - 1)


def _whole_call(kind: str, shard: int, runtime: Runtime) -> tuple[Callable[[], Any], float, int]:
    """Collectives for which a rank has as many bytes before as after; checked on ones."""
    device, world = runtime.device, runtime.world
    value, out = torch.ones(world * shard, device=device), torch.empty(world * shard, device=device)

    def call() -> None:
        if kind == "all-reduce":
            dist.all_reduce(value, op=dist.ReduceOp.AVG if device.type == "cuda" else dist.ReduceOp.MAX)
        else:
            dist.all_to_all_single(out, value)

    call()
    result = value if kind == "all-reduce" else out
    moved = 4 * shard * (world - 1) * (2 if kind == "all-reduce" else 1)
    return call, float((result - 1).abs().max()), moved


def _row(
    args: argparse.Namespace,
    runtime: Runtime,
    rows: list[dict[str, Any]],
    name: str,
    mib: int,
    solo: float,
    call: Callable[[], Any],
    error: float,
    nbytes: int,
) -> bool:
    right = error <= 1e-4
    ms = _timed(call, runtime, args.repeats) if right else float("nan")
    beside = _beside(args, runtime, call, ms) / solo if solo and right else float("nan")
    rows.append(
        {
            "case": f"{mib} MiB",
            "op": name,
            "pass": "forward",
            "ms": ms,
            "bytes": mib * 2**20 // runtime.world // 256 * 256 * runtime.world,
            "gbps": nbytes / ms / 1e6,
            "gemm": beside,
        }
    )
    share = "–" if math.isnan(beside) else f"{beside:.1%}"  # without a card there is no product beside it
    _say(
        runtime,
        f"{name:28} {mib:>6} {ms:>8.3f} {nbytes / ms / 1e6:>8.1f} {share:>18}  {error:.1e}"
        + ("" if right else "  WRONG: not timed"),
    )
    _save(args, runtime, rows)
    return right


def _save(args: argparse.Namespace, runtime: Runtime, rows: list[dict[str, Any]]) -> None:
    """A run that is cut short leaves what it has."""
    if args.out and runtime.is_main:
        write(args.out, "comm", rows, world=runtime.world)


def _timed(call: Callable[[], Any], runtime: Runtime, repeats: int) -> float:
    """Milliseconds of one call, of many in a row, on the slowest rank: how often to call it follows from it on all."""
    call()
    _sync(runtime)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _sync(runtime)
    return max(runtime.gather((time.perf_counter() - began) * 1e3 / repeats, "a collective's time"))


def _gemm(args: argparse.Namespace, device: torch.device) -> Callable[..., float]:
    """A function that gives the rate of a matrix product, in products per second, over about 50 ms."""
    a, b = (torch.randn(args.gemm, args.gemm, device=device, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)

    def rate(count: int = 24) -> float:
        for _ in range(3):
            torch.mm(a, b, out=c)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            torch.mm(a, b, out=c)
        end.record()
        end.synchronize()
        return float(count / begin.elapsed_time(end) * 1e3)

    return rate


def _beside(args: argparse.Namespace, runtime: Runtime, call: Callable[[], Any], ms: float) -> float:
    """The rate of the product while collectives run without a pause on another stream."""
    rate = _gemm(args, runtime.device)
    rate(3)
    _sync(runtime)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(int(200 / max(ms, 1e-3)) + 1):  # longer than the products take
            call()
    found = rate()
    _sync(runtime)
    return found


# --- the ladder


def ladder(args: argparse.Namespace, runtime: Runtime, rows: list[dict[str, Any]]) -> bool:
    """Weak scaling of a stack under FSDP, rung by rung."""
    rungs: list[tuple[str, int, CommConfig, Any]] = [
        ("plain", 0, CommConfig(), None),
        ("prefetch", 2, CommConfig(), None),
        ("copy engine", 2, CommConfig(all_gather="auto", reduce_scatter_ctas=args.ctas[-1]), None),
        ("fp8 payload", 2, CommConfig(all_gather="auto", reduce_scatter_ctas=args.ctas[-1]), Fp8Payload()),
    ]
    alone, reference, _ = _train(args, runtime, None)
    _say(runtime, f"{'ladder':16} {'step ms':>9} {'ratio':>7} {'exposed ms':>11}  error of the loss")
    _say(runtime, f"{'one rank alone':16} {alone:>9.2f} {1:>7.3f} {0:>11.2f}")
    good = True
    for name, ahead, config, payload in rungs:
        ms, loss, exposed = _train(args, runtime, (ahead, config, payload))
        error = abs(loss - reference) / abs(reference)
        limit = 0.02 if payload is not None else 2e-3
        good &= error <= limit
        waits = {unit: sum(kinds.values()) * 1e3 for unit, kinds in exposed.items()}
        rows.append({"case": "ladder", "op": name, "pass": "step", "ms": ms, "ratio": alone / ms, "exposed_ms": waits})
        _say(
            runtime,
            f"{name:16} {ms:>9.2f} {alone / ms:>7.3f} {sum(waits.values()):>11.2f}  {error:.1e}"
            + ("" if error <= limit else "  WRONG"),
        )
        worst = sorted(waits.items(), key=lambda kv: -kv[1])[:4]
        _say(runtime, "    longest: " + ", ".join(f"{unit} {value:.2f} ms" for unit, value in worst))
    return good


def _train(
    args: argparse.Namespace, runtime: Runtime, sharded: tuple[int, CommConfig, Any] | None
) -> tuple[float, float, dict[str, dict[str, float]]]:
    """(median milliseconds of a step, loss of the first step's batch, exposed seconds of one step)."""
    torch.manual_seed(0)
    device = runtime.device
    with device:  # one core of the host would draw the weights for long
        model: nn.Module = Stack(args.layers, args.width, max(1, args.width // 128), 0.0)
    torch.manual_seed(1)
    x = torch.randn(args.batch, args.length, args.width, device=device)
    if device.type == "cuda" and sharded is None:
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    units = [f"blocks.{i}" for i in range(3 * args.layers)]
    if sharded is not None:
        ahead, config, payload = sharded
        mesh = init_device_mesh(device.type, (runtime.world,), mesh_dim_names=("shard",))
        dtype = torch.bfloat16 if device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(model.get_submodule(unit), mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if ahead:
            set_prefetch(model, units, ahead)
        made = Collectives(config, runtime)
        made.install(model.modules(), payload)
        _say(runtime, "\n".join("    " + line for line in made.why().splitlines()))
    first, took = 0.0, []
    for step in range(3 + args.steps):
        _sync(runtime)
        began = time.perf_counter()
        loss = model(x).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        _sync(runtime)
        if step == 0:
            first = float(loss.detach())
        took.append((time.perf_counter() - began) * 1e3)
    exposed: dict[str, dict[str, float]] = {}
    if sharded is not None:
        with Exposed(model) as meter:
            model(x).float().square().mean().backward()
        exposed = meter.seconds()
    return statistics.median(took[3:]), first, exposed


def _sync(runtime: Runtime) -> None:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    if runtime.world > 1:
        dist.barrier(runtime.control)


def _say(runtime: Runtime, text: str) -> None:
    if runtime.is_main:
        print(text, flush=True)
