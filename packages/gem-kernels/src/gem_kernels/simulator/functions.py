"""Functions of tiles: what `gl` computes without memory.

Reductions and maxima treat NaN as the hardware does: `max` and `maximum` drop it unless it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gem_kernels.simulator.faults import place
from gem_kernels.simulator.values import FLOATS, Value, cast, is_float, promote, value

_ALL = tl.PropagateNan.ALL


def tile(x: Any) -> Value:
    """As a value whose data is a tensor."""
    x = value(x)
    return x if isinstance(x.data, Tensor) else Value(tensor(x), x.dtype)


def tensor(x: Any) -> Tensor:
    """The numbers of a value, or of a Python number."""
    x = value(x)
    return torch.as_tensor(x.data, dtype=FLOATS.get(x.dtype, torch.bool if x.dtype is tl.int1 else torch.int64))


def per_number(f: Callable[[Tensor], Tensor]) -> Callable[[Any], Value]:
    """A function of every float."""

    def apply(x: Any) -> Value:
        x = value(x)
        found = f(tensor(x))
        return Value(found if x.shape else found.item(), x.dtype)

    return apply


def larger(name: str) -> Callable[..., Value]:
    """`maximum` or `minimum`."""
    dropping, keeping = (torch.fmax, torch.maximum) if name == "maximum" else (torch.fmin, torch.minimum)

    def apply(a: Any, b: Any, propagate_nan: Any = None) -> Value:
        dtype = promote(value(a), b) if not isinstance(b, Value) else promote(a, b)
        x, y = tensor(cast(a, dtype)), tensor(cast(b, dtype))
        f = dropping if is_float(dtype) and propagate_nan is not _ALL else keeping
        found = f(*torch.broadcast_tensors(x, y))
        return Value(found if found.ndim else found.item(), dtype)

    return apply


def top(x: Any, axis: int | None = None) -> Value:
    """The largest along an axis, or of all; NaN only where there is nothing else."""
    x = tile(x)
    dims = list(range(x.data.ndim)) if axis is None else [axis]
    data = x.data
    if is_float(x.dtype):
        none = torch.isnan(data).all(dims[0]) if len(dims) == 1 else torch.isnan(data).all()
        data = torch.where(none, float("nan"), data.masked_fill(torch.isnan(data), float("-inf")).amax(dims))
    else:
        data = data.amax(dims)
    return Value(data if data.ndim else data.item(), x.dtype)


def total(x: Any, axis: int | None = None) -> Value:
    """The sum along an axis, or of all."""
    x = tile(x)
    data = x.data.sum() if axis is None else x.data.sum(axis)
    return Value(data if data.ndim else data.item(), tl.int32 if x.dtype is tl.int1 else x.dtype)


def _at_once(result: Any) -> Value:
    """What a function of numbers alone gives, of which the simulator makes a generator."""
    while isinstance(result, GeneratorType):
        try:
            next(result)
        except StopIteration as end:
            result = end.value
    assert isinstance(result, Value)
    return result


def reduce(x: Value, axis: int, combine: Callable[[Value, Value], Any]) -> Value:
    """Halves along an axis are combined until one is left."""
    while x.shape[axis] > 1:
        half = x.shape[axis] // 2
        a, b = (Value(x.data.narrow(axis, start, half), x.dtype) for start in (0, half))
        x = _at_once(combine(a, b))
    data = x.data.squeeze(axis)
    return Value(data if data.ndim else data.item(), x.dtype)


def where(condition: Any, a: Any, b: Any) -> Value:
    """One of two, number by number."""
    dtype = promote(a if isinstance(a, Value) else value(a), b) if not isinstance(b, Value) else promote(a, b)
    found = torch.where(tensor(condition).bool(), tensor(cast(a, dtype)), tensor(cast(b, dtype)))
    return Value(found if found.ndim else found.item(), dtype)


def count(*limits: Any) -> Iterator[Value]:
    """`range`, in values."""
    return iter([Value(i, tl.int32) for i in range(*(int(n) for n in limits))])


def static_assert(condition: Any, message: str = "") -> None:
    """What the compiler would check."""
    if not condition:
        raise AssertionError(message or place())


def join(a: Value, b: Value) -> Value:
    """Side by side in a new last dimension."""
    return Value(torch.stack([a.data, b.data], -1), a.dtype)


def full(shape: Sequence[int], x: Any, dtype: Any, _layout: Any = None) -> Value:
    """The same number everywhere."""
    return Value(torch.full([int(n) for n in shape], value(x).data).to(FLOATS.get(dtype, torch.int64)), dtype)


def turned(x: Value) -> Value:
    """movmatrix .trans: pairs of 16-bit numbers, every block of 8 x 8 of them turned."""
    rows, pairs = x.shape
    halves = x.data.to(torch.int32).view(torch.int16).reshape(rows // 8, 8, pairs // 4, 8)
    turned = halves.permute(0, 3, 2, 1).reshape(rows, 2 * pairs).contiguous()
    return Value(turned.view(torch.int32).to(torch.int64), tl.int32)


ASSEMBLY: dict[str, Callable[[Value], Value]] = {
    "mov.b32 $0, $1;": lambda x: x,
    "// $0": lambda x: x,
    "tanh.approx.f32 $0, $1;": per_number(torch.tanh),
    "cos.approx.ftz.f32 $0, $1;": per_number(torch.cos),
    "sin.approx.ftz.f32 $0, $1;": per_number(torch.sin),
    "cos.approx.f32 $0, $1;": per_number(torch.cos),
    "sin.approx.f32 $0, $1;": per_number(torch.sin),
    "lg2.approx.f32 $0, $1;": per_number(torch.log2),
    "rcp.approx.ftz.f32 $0, $1;": per_number(torch.reciprocal),
    "prefetch.global.L2 [$1]; mov.b32 $0, 0;": lambda x: x,
    "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;": turned,
}
