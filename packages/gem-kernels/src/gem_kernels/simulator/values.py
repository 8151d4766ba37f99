"""Numbers of a simulated kernel: scalars and tiles with Triton's types, rounded and wrapped as a GPU has them.

Integers of every width are kept as int64 and checked: a sum or product of signed numbers that does not fit is a
`Fault`, shifts and unsigned numbers wrap. Floats are kept in their own type, so that every operation rounds. Layouts
carry no numbers and are ignored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gem_kernels.simulator.faults import Fault

FLOATS = {
    tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.float64: torch.float64,
}  # fmt: skip
INTS = {
    tl.int1: torch.bool, tl.int8: torch.int8, tl.uint8: torch.uint8, tl.int16: torch.int16, tl.int32: torch.int32,
    tl.uint32: torch.uint32, tl.int64: torch.int64,
}  # fmt: skip
STORED = {**FLOATS, **INTS}  # how a type lies in memory
TYPES = {dtype: kind for kind, dtype in STORED.items()}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}  # where conversions saturate
_ORDER = (tl.float64, tl.float32, tl.float16, tl.bfloat16, tl.float8e5, tl.float8e4nv)


class Layout:
    """Stands for every layout."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    @staticmethod
    def get_default_for(*_args: Any, **_options: Any) -> Layout:
        """As of `NVMMASharedLayout`."""
        return LAYOUT


LAYOUT = Layout()


class Type:
    """What `x.type` is asked for."""

    def __init__(self, shape: tuple[int, ...], element: Any) -> None:
        self.shape, self.element_ty, self.scalar, self.layout = shape, element, element, LAYOUT
        self.nbytes = itemsize(element) * torch.Size(shape).numel()


def itemsize(kind: Any) -> int:
    """Bytes of a number in memory."""
    return int(STORED[kind].itemsize)


def is_float(kind: Any) -> bool:
    """Whether numbers of this type are floats."""
    return kind in FLOATS


class Value:
    """A scalar (`data` is a Python number) or a tile (a tensor) of one type; `memory` is what a pointer points to, and
    `data` then counts bytes.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: Any, dtype: Any, memory: Any = None) -> None:
        self.data, self.dtype, self.memory = data, dtype, memory

    # What kernels ask of a value.
    @property
    def shape(self) -> tuple[int, ...]:
        """() of a scalar."""
        return tuple(self.data.shape) if isinstance(self.data, Tensor) else ()

    @property
    def type(self) -> Type | Any:
        """With shape, type of a number and layout; of a pointer, what it is."""
        return Type(self.shape, self.dtype) if self.dtype in STORED else self.dtype

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        """See `cast`."""
        return cast(self, dtype, bitcast=bitcast)

    def reshape(self, *shape: Any) -> Value:
        """The same numbers in other dimensions."""
        return Value(self.data.reshape(_ints(shape)), self.dtype, self.memory)

    def permute(self, *order: Any) -> Value:
        """The dimensions in another order."""
        return Value(self.data.permute(_ints(order)), self.dtype, self.memory)

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index], self.dtype, self.memory)

    def __bool__(self) -> bool:
        if isinstance(self.data, Tensor) and self.data.numel() != 1:
            raise Fault("unsupported", f"a branch on a tile of shape {self.shape}")
        return bool(self.data)

    def __index__(self) -> int:
        if is_float(self.dtype) or self.shape:
            raise Fault("unsupported", f"an index of type {self.dtype} and shape {self.shape}")
        return int(self.data)

    def __repr__(self) -> str:
        return f"Value({self.data}, {self.dtype})"

    def __invert__(self) -> Value:
        return Value(_map(self.data, torch.logical_not if self.dtype is tl.int1 else torch.bitwise_not), self.dtype)

    def __neg__(self) -> Value:
        return binary("sub", 0, self) if not is_float(self.dtype) else Value(-self.data, self.dtype)


class Unusable(Value):
    """A tile whose numbers may not be used: `because` is raised where they are. Code that the compiler would drop, as
    its result is not used, raises nothing.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, because: Fault) -> None:
        self.size, self.dtype, self.memory, self.because = shape, dtype, None, because

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were there."""
        return self.size

    @property
    def data(self) -> Any:
        """Raises."""
        raise self.because


def _ints(shape: Sequence[Any]) -> tuple[int, ...]:
    if len(shape) == 1 and isinstance(shape[0], (list, tuple)):
        shape = shape[0]
    return tuple(int(n) for n in shape)


def _map(data: Any, f: Callable[[Tensor], Tensor]) -> Any:
    return f(data) if isinstance(data, Tensor) else f(torch.tensor(data)).item()


def literal(x: Any) -> Any:
    """The type that a Python number gets."""
    if isinstance(x, bool):
        return tl.int1
    if isinstance(x, int):
        return tl.int32 if -(2**31) <= x < 2**31 else tl.int64
    return tl.float32


def value(x: Any) -> Value:
    """A Python number as a value."""
    if isinstance(x, Value):
        return x
    kind = literal(x)
    return Value(_round(x, torch.float32) if kind is tl.float32 else x, kind)


def assigned(x: Any) -> Any:
    """What a variable holds after `variable = x`: Triton makes tensors of numbers."""
    if isinstance(x, tuple):
        return tuple(assigned(y) for y in x)
    return value(x) if isinstance(x, (bool, int, float)) else x


def _round(x: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(x, dtype=dtype).item())


def cast(x: Any, dtype: Any, *, bitcast: bool = False) -> Value:
    """x in another type: floats to nearest even, FP8 saturating; integers wrapping, and from floats towards zero."""
    x = value(x)
    if x.memory is not None:  # the address of something is still something's address
        return Value(x.data, dtype, x.memory)
    if x.dtype is dtype:
        return x
    data = x.data if isinstance(x.data, Tensor) else torch.tensor(x.data)
    if bitcast:
        data = data.to(STORED[x.dtype]).contiguous().view(STORED[dtype])
        data = data if is_float(dtype) else data.to(torch.int64)
    elif is_float(dtype):
        target = FLOATS[dtype]
        data = data.to(torch.float32) if not is_float(x.dtype) and dtype is not tl.float64 else data
        if target in LARGEST:
            data = data.float().clamp(-LARGEST[target], LARGEST[target])
        data = data.to(target)
    elif dtype is tl.int1:
        data = data != 0
    else:
        data = wrap(data.to(torch.int64), dtype)
    if x.shape == ():
        return Value(data.float().item() if is_float(dtype) else data.item(), dtype)
    return Value(data, dtype)


def wrap(data: Any, dtype: Any) -> Any:
    """An integer modulo 2^width."""
    bits = dtype.primitive_bitwidth
    if bits == 64 or dtype is tl.int1:
        return data
    low = data & (2**bits - 1)
    if dtype.is_int_unsigned():
        return low
    return low - ((low >> (bits - 1)) << bits)


def _fits(data: Any, dtype: Any) -> bool:
    if dtype.primitive_bitwidth == 64 or dtype is tl.int1:
        return True
    half = 2 ** (dtype.primitive_bitwidth - 1)
    if isinstance(data, Tensor):
        return data.numel() == 0 or bool((data.amin() >= -half) & (data.amax() < half))
    return -half <= data < half


def promote(a: Any, b: Any) -> Any:
    """The type of an operation on two values, or on a value and a Python number, which adapts."""
    if not isinstance(a, Value):
        return promote(b, a)
    if not isinstance(b, Value):
        if is_float(a.dtype) or isinstance(b, bool):
            return a.dtype
        if isinstance(b, float):
            return tl.float32
        return literal(b) if a.dtype is tl.int1 else a.dtype if _fits(b, a.dtype) else literal(b)
    if a.dtype is b.dtype:
        return a.dtype
    if is_float(a.dtype) or is_float(b.dtype):
        kinds = [x.dtype for x in (a, b) if is_float(x.dtype)]
        return min(kinds, key=_ORDER.index) if set(kinds) != {tl.float16, tl.bfloat16} else tl.float32
    widths = a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth
    if widths[0] != widths[1]:
        return a.dtype if widths[0] > widths[1] else b.dtype
    return a.dtype if a.dtype.is_int_unsigned() else b.dtype


def _quotient(a: Any, b: Any) -> Any:
    """Towards zero, as hardware divides."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.div(a, b, rounding_mode="trunc")
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: Any, b: Any) -> Any:
    return a - _quotient(a, b) * b


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": _quotient, "mod": _remainder,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift,
}  # fmt: skip
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}


def number(x: Any, dtype: Any) -> Any:
    """The data of x as `dtype` for an operation."""
    if isinstance(x, Value):
        return cast(x, dtype).data
    return float(x) if is_float(dtype) else int(x) if dtype is not tl.int1 else bool(x)


def binary(name: str, a: Any, b: Any) -> Value:
    """An operation on two values or numbers."""
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Value) and x.memory is not None and name in ("add", "sub"):
            offset = value(y)
            moved = offset.data * itemsize(x.dtype.element_ty)
            return Value(x.data + moved if name == "add" else x.data - moved, x.dtype, x.memory)
    dtype = promote(a, b)
    if name == "truediv" and not is_float(dtype):
        dtype = tl.float32
    x, y = number(a, dtype), number(b, dtype)
    if name in _COMPARISONS:
        return Value(_COMPARISONS[name](x, y), tl.int1)
    if name == "truediv":
        return Value(_divided(x, y, dtype), dtype)
    result = _ARITHMETIC[name](x, y)
    if is_float(dtype):
        return Value(result if isinstance(result, Tensor) else _round(result, FLOATS[dtype]), dtype)
    if dtype is tl.int1:
        return Value(result, dtype)
    if name in ("add", "sub", "mul") and not dtype.is_int_unsigned():
        if not _fits(result, dtype):
            raise Fault("overflow", f"{name} of {dtype} leaves its range")
        return Value(result, dtype)
    return Value(wrap(result, dtype), dtype)


def _divided(x: Any, y: Any, dtype: Any) -> Any:
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return torch.as_tensor(x, dtype=FLOATS[dtype]) / torch.as_tensor(y, dtype=FLOATS[dtype])
    return (torch.tensor(x, dtype=FLOATS[dtype]) / torch.tensor(y, dtype=FLOATS[dtype])).item()


def _method(name: str, *, swapped: bool = False) -> Callable[[Value, Any], Value]:
    def method(self: Value, other: Any) -> Value:
        return binary(name, other, self) if swapped else binary(name, self, other)

    return method


for _name in (*_ARITHMETIC, "truediv"):
    setattr(Value, f"__{_name}__", _method(_name))
    setattr(Value, f"__r{_name}__", _method(_name, swapped=True))
for _name in _COMPARISONS:
    setattr(Value, f"__{_name}__", _method(_name))
