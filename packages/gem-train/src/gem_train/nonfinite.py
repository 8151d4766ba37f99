"""Where the first NaN or infinity of a forward pass comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from gem_data import JaggedBatch
from torch import Tensor, nn


def find(module: nn.Module, forward: Callable[[], Any], batch: JaggedBatch) -> str:
    """Run `forward` (which calls `module` on `batch`) again and say where the first non-finite value appears.

    The first submodule to *finish* with one is the innermost culprit; whether its inputs or parameters were bad already
    tells a poisoned input from a broken weight from an overflow. Run it with the step's random state and weights.
    """
    if bad := batch_problem(batch):
        return f"the batch itself: {bad}"
    found: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def look(this: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not found and not _finite(output):
                reasons = [
                    f"parameter {n} is not finite" for n, p in this.named_parameters(recurse=False) if not _finite(p)
                ]
                reasons = reasons or [
                    "its inputs were finite" if _finite((args, kwargs)) else "its inputs were not finite"
                ]
                found.append(f"{name or 'the model'} ({type(this).__name__}; {'; '.join(reasons)})")

        return look

    handles = [m.register_forward_hook(hook(n), with_kwargs=True) for n, m in module.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "no module's output: the loss overflowed, or the failure did not repeat"


def batch_problem(batch: JaggedBatch) -> str:
    """Which floating-point part of a batch is not finite, or ""."""
    if not _finite(batch.dense):
        columns = (~torch.isfinite(batch.dense)).any(0).nonzero().flatten().tolist()
        return f"dense feature(s) {', '.join(map(str, columns[:8]))} hold non-finite values"
    for source, sequence in batch.sequences.items():
        for name, values in sequence.floats.items():
            if not _finite(values):
                return f"the history column {source}.{name} holds non-finite values"
    if not _finite(torch.where(batch.label_mask, batch.labels, 0.0)):
        return "a label is not finite"
    return "" if _finite(batch.weights) else "a sample weight is not finite"


def bad_samples(logits: Tensor, batch: JaggedBatch) -> list[int]:
    """The ids of the samples whose logits are not finite."""
    bad = ~torch.isfinite(logits).all(1)
    return [int(i) for i in batch.sample_ids[bad.to(batch.sample_ids.device)].tolist() if i >= 0]


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every floating-point tensor inside.

    The lazy results of sharded lookups are left alone: the modules that consume them are looked at.
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None))
