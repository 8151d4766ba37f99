"""A job of the small model as a trainer has it: parallel model, optimizer, what it saves and restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gem_parallel.checkpoint.save import Checkpointer
from gem_parallel.config import ParallelConfig, RowWiseAdagrad
from gem_parallel.dense.optimizer import load_optimizer_state, optimizer_groups, optimizer_state
from gem_parallel.parallel import ParallelModel, parallelize
from gem_parallel.runtime import Runtime
from gem_parallel.shards import local_shards
from gem_parallel.testing.small import ROWS, UNITS, SmallModel, small_batch


class SmallJob:
    """Trains SmallModel with row-wise AdaGrad and AdamW, on batches and with losses that no layout changes.

    Args:
        runtime: of this rank.
        config: the layout; its `table_seed` is replaced by `seed`.
        seed: of all weights.
        experts: of the model's ensemble, 0 for none.
        rows: of the tables, by name.
        adam: options of AdamW besides the rate, which is 0.01.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: ParallelConfig,
        *,
        seed: int = 0,
        experts: int = 0,
        rows: Mapping[str, int] = ROWS,
        adam: Mapping[str, Any] | None = None,
    ) -> None:
        model = SmallModel(seed=seed, experts=experts, rows=rows)
        config = dataclasses.replace(config, table_seed=seed)
        sparse = RowWiseAdagrad(lr=0.05, eps=1e-4)
        self.runtime = runtime
        self.parallel = parallelize(model, model.roles(), config, runtime, sparse=sparse, units=UNITS)
        self.optimizer = torch.optim.AdamW(
            optimizer_groups([{"params": self.parallel.dense_parameters()}]), lr=1e-2, **(adam or {})
        )

    def train(self, steps: Iterable[int]) -> list[float]:
        """The loss of each step, the mean over all ranks; a step's number is the seed of its batch."""
        losses = []
        for step in steps:
            batch = small_batch(step).part(self.runtime.rank, self.runtime.world)
            loss = (self.parallel(batch) - batch.target).square().mean()
            loss.backward()
            self.parallel.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(sum(self.runtime.gather(loss.item(), "the loss")) / self.runtime.world)
        return losses

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.parallel.state_dict(), "optimizer": optimizer_state(self.parallel, self.optimizer)}

    def restore(self, checkpointer: Checkpointer, step: int | None = None, **options: Any) -> int:
        """Go on from a checkpoint, the latest by default; its step. Options are those of `Checkpointer.load`."""
        state = self.state()
        loaded = checkpointer.load(state, step, **options)
        self.parallel.load_state_dict(state["model"])
        load_optimizer_state(self.parallel, self.optimizer, state["optimizer"])
        return loaded

    def whole(self) -> dict[str, torch.Tensor]:
        """All weights and moments of all ranks as whole CPU tensors, by name."""
        found = {f"{part}/{k}": v for part, values in full_state(self.parallel).items() for k, v in values.items()}
        mine = {}
        for name, value in optimizer_state(self.parallel, self.optimizer)["state"].items():
            mine[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for held in self.runtime.gather(mine, "the moments"):  # of experts, every rank has others
            found |= {f"optimizer/{name}": value for name, value in held.items()}
        return found


def full_state(parallel: ParallelModel) -> dict[str, dict[str, torch.Tensor]]:
    """`parallel.state_dict()` with whole CPU tensors, on every rank."""
    full: dict[str, dict[str, torch.Tensor]] = {}
    for part, tensors in parallel.state_dict().items():
        blocks = {
            name: [(block.detach().cpu().clone(), offset) for block, offset in local_shards(tensor)]
            for name, tensor in tensors.items()
        }
        everyone = parallel.runtime.gather(blocks, "the whole state")
        full[part] = {}
        for name in sorted({name for rank in everyone for name in rank}):
            found = [pair for rank in everyone for pair in rank.get(name, [])]
            shape = [max(o[d] + b.shape[d] for b, o in found) for d in range(found[0][0].dim())]
            whole = torch.full(shape, torch.nan, dtype=found[0][0].dtype)
            for block, offset in found:
                whole[tuple(slice(o, o + n) for o, n in zip(offset, block.shape, strict=True))] = block
            full[part][name] = whole
    return full
