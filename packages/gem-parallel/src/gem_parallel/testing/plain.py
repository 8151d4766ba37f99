"""The small model's twin without TorchRec and FSDP, and how far two results are apart."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gem_parallel.testing.small import BAGS, SEQUENCES, SmallBatch, SmallModel, pool


class _Round(torch.autograd.Function):
    """To a dtype and back, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad.to(ctx.dtype).to(grad.dtype), None


class PlainModel:
    """SmallModel without TorchRec and FSDP: indexing, autograd, and row-wise AdaGrad as its formula, in one process.

    Args:
        model: gives the dense layers.
        tables: initial tables by name.
        lr, eps: of the sparse optimizer.
        sgd: plain SGD instead of row-wise AdaGrad.
        blocks: by table, into how many blocks of columns a row is cut, each with a moment of its own.
        divisor: what the moment is divided by before its root.
        exchange: embeddings and their gradients are rounded to it and back.
    """

    def __init__(
        self,
        model: SmallModel,
        tables: Mapping[str, torch.Tensor],
        lr: float,
        eps: float,
        *,
        sgd: bool = False,
        blocks: Mapping[str, int] | None = None,
        divisor: float = 1.0,
        exchange: torch.dtype = torch.float32,
    ) -> None:
        self.dense = copy.deepcopy(model.dense)
        self.gain = copy.deepcopy(model.gain)
        self.tables = {name: nn.Parameter(value.clone()) for name, value in tables.items()}
        self.blocks = {name: (blocks or {}).get(name, 1) for name in tables}
        self.moments = {name: value.new_zeros(self.blocks[name] * len(value)) for name, value in tables.items()}
        self.lr, self.eps, self.sgd, self.divisor, self.exchange = lr, eps, sgd, divisor, exchange

    def named_dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names as in SmallModel."""
        return [("gain", self.gain), *((f"dense.{name}", param) for name, param in self.dense.named_parameters())]

    def __call__(self, batch: SmallBatch) -> torch.Tensor:
        """The forward on a whole batch."""
        pooled = []
        for name, table in {**SEQUENCES, **BAGS}.items():
            vectors = self.tables[table][batch.ids[name]]
            if name in SEQUENCES:  # every vector travels; of a bag, the sum
                vectors = _Round.apply(vectors, self.exchange)
            total = pool(vectors, batch.lengths[name])
            pooled.append(total if name in SEQUENCES else _Round.apply(total, self.exchange))
        return self.gain * self.dense(torch.cat(pooled, dim=1))

    @torch.no_grad()
    def update_tables(self, scale: float = 1.0) -> None:
        """One step of the sparse optimizer from `scale` times the gradients that backward left."""
        for name, table in self.tables.items():
            assert table.grad is not None
            grad, blocks = table.grad * scale, self.blocks[name]
            table.grad = None
            if self.sgd:
                table.sub_(self.lr * grad)
                continue
            cut = grad.view(len(grad), blocks, -1)  # [rows, blocks, dim / blocks]
            self.moments[name] += cut.square().mean(2).T.reshape(-1)
            moment = self.moments[name].view(blocks, -1).T  # [rows, blocks]
            step = cut / ((moment / self.divisor).sqrt() + self.eps)[:, :, None]
            table.sub_(self.lr * step.view_as(table))


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """max |value - expected| / max |expected|; NaN anywhere gives infinity."""
    error = (value.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    return float(torch.nan_to_num(error, nan=float("inf")))
