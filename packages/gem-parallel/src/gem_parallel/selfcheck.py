"""`python -m gem_parallel.selfcheck` (or under torchrun): this world against plain PyTorch on the whole global batch.

Every rank trains a small model with sequence tables, bag tables and dense layers, sharded; beside it, an unsharded
plain float32 model sees the global batch. Both start from the same numbers; losses, gradient norms, parameters and
moments must agree. (AdaGrad divides a row's gradient by its own size, so that where contributions cancel, rounding is
magnified up to lr / eps: eps is chosen large enough for the comparison to mean something.) The last column is the bytes
of tables and moments on the fullest rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from gem_parallel.config import CommConfig, ParallelConfig, RowWiseAdagrad, SparseSGD
from gem_parallel.parallel import ParallelModel, parallelize
from gem_parallel.runtime import Runtime, start
from gem_parallel.testing import UNITS, PlainModel, SmallBatch, SmallModel, full_state, relative_error, small_batch


def compare(
    runtime: Runtime,
    config: ParallelConfig,
    *,
    steps: int = 10,
    samples: int = 16,
    lr: float = 0.05,
    sparse: RowWiseAdagrad | SparseSGD | None = None,
    experts: int = 0,
    exchange: torch.dtype = torch.float32,
    count: int = 1,
    broken: Mapping[int, str] | None = None,
) -> tuple[dict[str, float], ParallelModel]:
    """Train both for `steps` steps on global batches of `samples`; the model has an ensemble of `experts`.

    A step has `count` parts, each a batch of its own, of whose losses it takes the mean; tables learn in every part.
    In the steps in `broken` the first part runs backward, then the second ends the step without an update of the dense
    parameters: by a "loss" that is not trained on, or by an exception in a "forward" or "backward" pass.

    `exchange` is how the plain model rounds embeddings and gradients. With table_strategy "v2", the plain model has as
    many copies of its tables, which see the samples of their groups.

    Returns:
        the largest relative error of each kind of number, and the sharded model.
    """
    sparse = sparse or RowWiseAdagrad(lr=lr, eps=1e-4)
    lr, eps, sgd = sparse.lr, getattr(sparse, "eps", 0.0), isinstance(sparse, SparseSGD)
    model = SmallModel(experts=experts)
    twin = SmallModel(experts=experts)
    parallel = parallelize(model, model.roles(), config, runtime, sparse=sparse, units=UNITS)
    before = full_state(parallel)["model"]
    tables = {name.split(".")[-2]: value.to(runtime.device) for name, value in before.items() if _is_table(name)}
    blocks = {name: len({row.cols for row in parallel.describe() if row.table == name}) for name in tables}
    groups = [list(range(runtime.world))]
    if config.table_strategy == "v2":
        made = parallel.copied
        assert made is not None
        groups = made.groups.rows()
    divisor = len(groups) if config.table_moment_scaling else 1
    twins = [
        PlainModel(twin, tables, lr, eps, sgd=sgd, blocks=blocks, divisor=divisor, exchange=exchange) for _ in groups
    ]
    plain = twins[0]
    plain.dense.to(runtime.device)
    plain.gain.data = plain.gain.data.to(runtime.device)
    for other in twins[1:]:
        other.dense, other.gain = plain.dense, plain.gain
    plain_params = [param for _, param in plain.named_dense_parameters()]
    optimizer = torch.optim.AdamW(parallel.dense_parameters(), lr=1e-2, eps=1e-4)
    plain_optimizer = torch.optim.AdamW(plain_params, lr=1e-2, eps=1e-4)
    error = dict.fromkeys(("loss", "grad norm", "tables", "moments", "dense"), 0.0)
    passes = 0
    series: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"loss": [], "grad norm": []}
    for step in range(steps):
        rate = lr / (1 + step)  # a schedule, so that a rate that is not handed on shows
        parallel.set_sparse_lr(rate)
        mean, expected = torch.zeros((), device=runtime.device), torch.zeros((), device=runtime.device)
        how = (broken or {}).get(step)
        for i in range(count):
            batch = small_batch(count * step + i, samples)
            parts = [batch.part(rank, runtime.world).to(runtime.device) for rank in range(runtime.world)]
            mine = parts[runtime.rank]
            parallel.reduce_gradients(i + 1 == count)
            if how and i:
                _break_off(parallel, mine, how)
                break
            loss = (parallel(mine) - mine.target).square().mean() / count
            loss.backward()
            mean += loss.detach()
            wanted = torch.zeros((), device=runtime.device)
            for model_copy, ranks in zip(twins, groups, strict=True):
                for rank in ranks:
                    wanted = wanted + (model_copy(parts[rank]) - parts[rank].target).square().mean()
            wanted = wanted / (runtime.world * count)
            wanted.backward()
            expected += wanted.detach()
            for model_copy in twins:
                model_copy.lr = rate
                model_copy.update_tables(scale=len(groups))
            passes += 1
            if passes % config.table_sync_every == 0:
                _average(twins)
        if not how:
            norm = parallel.clip_grad_norm_(1.0)
            optimizer.step()
            plain_norm = torch.nn.utils.clip_grad_norm_(plain_params, 1.0)
            plain_optimizer.step()
            dist.all_reduce(mean)
            series["loss"].append((mean / runtime.world, expected))
            series["grad norm"].append((norm, plain_norm))
        parallel.forget_gradients()
        plain_optimizer.zero_grad()
    # Like elements of a tensor, steps are measured against the largest: where a gradient nearly vanishes, float32
    # itself is 1e-5 of its norm away from float64, in one process.
    for kind, pairs in series.items():
        values, wanted = (torch.stack([pair[i].detach().float() for pair in pairs]) for i in (0, 1))
        error[kind] = relative_error(values, wanted)
    _average(twins)  # as state_dict does
    after = full_state(parallel)
    for name, value in after["model"].items():
        if _is_table(name):
            error["tables"] = max(
                error["tables"], relative_error(value, plain.tables[name.split(".")[-2]].detach().cpu())
            )
    for name, value in after["sparse_optimizer"].items():
        moment = plain.moments[name.split(".")[-3]].cpu()
        error["moments"] = max(error["moments"], relative_error(value, moment))
    for name, param in plain.named_dense_parameters():
        error["dense"] = max(error["dense"], relative_error(after["model"][name], param.detach().cpu()))
    return error, parallel


def _break_off(parallel: ParallelModel, batch: SmallBatch, how: str) -> None:
    """Begin a part and don't finish it: all ranks fail in the last unit of the pass, when others have done theirs."""

    def fail(*_: object) -> None:
        raise ArithmeticError(how)

    def fail_later(_: object, inputs: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    if how == "loss":
        parallel(batch)
        return
    last = parallel.module.get_submodule(UNITS[-1] if how == "forward" else UNITS[0])
    hook = last.register_forward_hook(fail if how == "forward" else fail_later)
    try:
        parallel(batch).sum().backward()
    except ArithmeticError:
        return
    finally:
        hook.remove()
    raise AssertionError(f"nothing failed in the {how} pass")


@torch.no_grad()
def _average(twins: list[PlainModel]) -> None:
    for name in twins[0].tables:
        for kind in ("tables", "moments"):
            mean = torch.stack([getattr(twin, kind)[name] for twin in twins]).mean(0)
            for twin in twins:
                getattr(twin, kind)[name].copy_(mean)


def _is_table(name: str) -> bool:
    return name.startswith(("sequences.", "bags."))


def main() -> int:
    """Print a table; the exit status is 1 when an error exceeds the tolerance."""
    parser = argparse.ArgumentParser(prog="python -m gem_parallel.selfcheck", description=__doc__)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative error that passes")
    args = parser.parse_args()
    with start(args.device) as runtime:
        return 0 if table(runtime, steps=args.steps, tolerance=args.tolerance) else 1


def table(runtime: Runtime, *, steps: int = 10, tolerance: float = 1e-5) -> bool:
    """Print a row per layout of this world; whether all errors are within the tolerance."""
    good = True
    if runtime.is_main:
        print(f"world {runtime.world} on {runtime.device.type} ({runtime.backend}), torch {torch.__version__}")
        print(
            f"{'tables':22} {'replicate x fsdp (ep)':>21} "
            + " ".join(f"{k:>10}" for k in ("loss", "norm", "tables", "moments", "dense", "bytes"))
        )
    for config in layouts(runtime.world, runtime.device.type):
        experts = 2 * config.experts
        error, parallel = compare(
            runtime, config, steps=steps, samples=16 * runtime.world, experts=experts if experts > 2 else 0
        )
        worst = max(error.values())
        good &= worst <= tolerance
        memory = parallel.table_memory()
        held = max(runtime.gather(memory["weights"] + memory["moments"], "the tables' memory"))
        if runtime.is_main:
            shard = config.shard_group or runtime.world
            copies = f" x {config.table_copies}" if config.table_copies > 1 else ""
            mesh = f"{runtime.world // shard} x {shard} ({config.experts})"
            numbers = " ".join(f"{value:10.1e}" for value in error.values())
            verdict = "equal" if worst <= tolerance else "DIFFERENT"
            how = ", copies" if config.comm.all_gather == "copy_engine" else ""
            tables = f"{config.table_sharding} {config.table_strategy}{copies}{how}"
            print(f"{tables:22} {mesh:>21} {numbers} {held:10}  {verdict}", flush=True)
    return good


def layouts(world: int, device: str = "cpu") -> list[ParallelConfig]:
    """What a world of this size can be laid out as: shardings first, then all pairs of dense and table axes; on CUDA, a
    last one whose parameters, gradients and tables move by copy engine."""
    found = [ParallelConfig(table_sharding=sharding) for sharding in ("auto", "table_wise", "row_wise")]
    if world % 2:
        return found
    dense = [{"shard_group": 0}, {"shard_group": world // 2}, {"experts": 2}]
    if world % 4 == 0:
        dense += [{"shard_group": world // 2, "experts": 2}, {"experts": 4}]
    tables: list[tuple[str, int]] = [("v1", 1), ("v2", 2), ("v3", 2), ("v3", world)]
    found += [
        ParallelConfig(
            table_sharding="row_wise",
            table_strategy=strategy,
            table_copies=copies,
            shard_group=axes.get("shard_group", 0),
            experts=axes.get("experts", 1),
        )
        for axes in dense
        for strategy, copies in dict.fromkeys(tables)
        if (strategy, axes) != ("v1", {"shard_group": 0})
    ]
    if device == "cuda":
        by_copy = CommConfig(all_gather="copy_engine", reduce_scatter="copy_engine")
        found.append(replace(next(c for c in found if c.table_strategy == "v3"), comm=by_copy))
    return found


if __name__ == "__main__":
    sys.exit(main())
