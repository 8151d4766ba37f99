"""Makes Triton's CPU interpreter right for bfloat16 and E4M3, so that kernels can be tested without a GPU.

The interpreter keeps bfloat16 as 16-bit integers. Its matrix product and arithmetic then work on the bit patterns,
and its cast from float32 truncates where hardware rounds to nearest even. `install` routes these through float32. To
E4M3 it rounds without the carry into the exponent: casts from and to float32 are torch's instead, and saturate as the
card's. It changes the interpreter of this process only, once, and never compiled kernels. `handed_to` shows what it
launches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

if TYPE_CHECKING:  # the interpreter itself needs NumPy; the kernels do not, so it is imported where it is used
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"


E4M3_MAX = 448.0


def widen(bits: Array) -> Array:
    """bfloat16 bit patterns -> float32; exact."""
    import numpy as np

    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def narrow(x: Array) -> Array:
    """float32 -> bfloat16 bit patterns, round to nearest even; a NaN stays one."""
    import numpy as np

    x = np.ascontiguousarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


@contextlib.contextmanager
def handed_to(take: Callable[..., Any]) -> Iterator[None]:
    """Within the block each launch of a kernel in the interpreter becomes `take(run, launch, arguments, options)`,
    which runs it, now or later, by `run(launch, *arguments, **options)`.
    """
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def call(launch: Any, *arguments: Any, **options: Any) -> Any:
        return take(run, launch, arguments, options)

    with mock.patch.object(GridExecutor, "__call__", call):
        yield


@functools.cache
def install() -> None:
    """Patch the interpreter; later calls do nothing."""
    import numpy as np
    import torch
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    builder: Any = interpreter.InterpreterBuilder
    handle: Any = interpreter.TensorHandle

    def is_bf16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def up(x: Any) -> Any:
        return handle(widen(np.asarray(x.data)), tl.float32) if is_bf16(x) else x

    def down(x: Array) -> Any:
        return handle(narrow(x), tl.bfloat16)

    def patch(name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        setattr(builder, name, make(getattr(builder, name)))

    def dot(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any, **options: Any) -> Any:
            return original(self, up(a), up(b), d, *rest, **options)

        return create_dot

    def elementwise(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, *operands: Any) -> Any:
            *tensors, op = operands
            if not tensors or not all(hasattr(x, "dtype") and is_bf16(x) for x in tensors):
                return original(self, *operands)
            out = op(*(widen(np.asarray(x.data)) for x in tensors))
            return handle(out, tl.int1) if out.dtype == np.bool_ else down(out)

        return apply

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast_impl(self: Any, src: Any, target: Any) -> Any:
            scalar = target.scalar
            if is_bf16(src):
                return src if scalar == tl.bfloat16 else original(self, up(src), target)
            if scalar == tl.bfloat16:
                return down(np.asarray(src.data).astype(np.float32))
            return original(self, src, target)

        return cast_impl

    def between(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_fp_to_fp(self: Any, src: Any, target: Any, *rest: Any) -> Any:
            kinds = (src.dtype.scalar, target.scalar)
            data = np.ascontiguousarray(src.data)
            if kinds == (tl.float32, tl.float8e4nv):
                small = torch.from_numpy(data).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
                return handle(small.view(torch.uint8).numpy(), tl.float8e4nv)
            if kinds == (tl.float8e4nv, tl.float32):
                return handle(torch.from_numpy(data).view(torch.float8_e4m3fn).float().numpy(), tl.float32)
            return original(self, src, target, *rest)

        return create_fp_to_fp

    patch("create_dot", dot)
    patch("create_fp_to_fp", between)
    patch("binary_op", elementwise)
    patch("unary_op", elementwise)
    patch("cast_impl", cast)
