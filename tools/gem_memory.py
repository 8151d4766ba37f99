"""The GEM model for `python -m gem_parallel.bench memory --workload gem_memory:large`, with this folder on the path.

Random histories at half of their longest length, random features; regions are the model's layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gem_model import GEM, ModelInputs, preset
from gem_model.config import Source, Table
from gem_model.testing import random_batch
from torch import Tensor, nn


def inputs(length: int, dim: int) -> ModelInputs:
    """Two histories of up to `length` and `length` / 2 events, twenty categorical and thirteen dense features."""
    features = tuple(Table(name=f"f{i}", rows=1000, dim=dim) for i in range(20))
    return ModelInputs(
        tables=(Table(name="item", rows=100_000, dim=dim), Table(name="action", rows=16, dim=dim), *features),
        sources=(
            Source(name="views", ids=(("item", "item"), ("action", "action")), max_len=length),
            Source(name="orders", ids=(("item", "item"),), max_len=length // 2),
        ),
        sparse=(("item", "item"), *((t.name, t.name) for t in features)),
        dense=13,
        tasks=("click", "buy"),
    )


def _workload(
    name: str, device: torch.device, batch: int, length: int, dim: int
) -> tuple[nn.Module, list[str], Callable[[], Tensor]]:
    torch.manual_seed(0)
    shape = inputs(length, dim)
    model = GEM(preset(name, dropout=0.1), shape).to(device)
    data = random_batch(shape, batch, single_valued=True).to(device)

    def loss() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(data)
        return model.loss(logits, data)

    return model, model.units(), loss


def large(device: torch.device, batch: int) -> tuple[nn.Module, list[str], Callable[[], Tensor]]:
    """The preset "large" with histories of up to 512 events."""
    return _workload("large", device, batch, 512, 128)


def tiny(device: torch.device, batch: int) -> tuple[nn.Module, list[str], Callable[[], Tensor]]:
    """The preset "tiny", to try the script."""
    return _workload("tiny", device, batch, 16, 8)
