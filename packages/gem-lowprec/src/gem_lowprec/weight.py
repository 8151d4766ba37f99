"""A weight that arrives quantised: what an FSDP all-gather leaves on every rank, ready for the products.

To the outside it is a matrix [N, K] of the dtype that a plain gather would have; inside are only its elements and
scales, one byte per element. The low-precision layers take these as they are. Any other operation sees the
dequantised values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gem_lowprec.quantize import QTensor


class QuantizedWeight(Tensor):
    """A read-only tensor whose values are decode(data) * scale; `quantized` holds them. Gradients may flow to it."""

    quantized: QTensor

    @staticmethod
    def __new__(cls, q: QTensor) -> QuantizedWeight:
        """The tensor that `q` stands for, with the shape and dtype of `q`; nothing is copied."""
        self = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=q.dtype, device=q.data.device)
        self.quantized = q
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedWeight({list(self.shape)}, {self.dtype}, spec={self.quantized.spec})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight = args[0] if args and isinstance(args[0], QuantizedWeight) else None
        if weight is not None and (func is torch.ops.aten.detach.default or _same_view(func, weight, args)):
            return QuantizedWeight(weight.quantized)
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, QuantizedWeight):
                raise RuntimeError(f"{func} writes to a gathered weight; only the shards of it can be changed")
        args, kwargs = tree_map_only(QuantizedWeight, lambda w: w.quantized.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)


def _same_view(func: Any, weight: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether the call is as_strided to what the weight is already: FSDP does that to everything it gathers."""
    if func is not torch.ops.aten.as_strided.default:
        return False
    size, stride, *offset = args[1:]
    return (*size,) == (*weight.shape,) and (*stride,) == weight.stride() and not any(o for o in offset if o)
