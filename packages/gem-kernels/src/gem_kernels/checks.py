"""Validation of what users pass: every message names the value found and what was expected."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gem_kernels.jagged import lengths

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
UNLIMITED = -1


def check_heads(name: str, x: Tensor) -> None:
    """`x` must be a floating tensor [T, H, D]."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
    if x.dim() != 3:
        raise ValueError(f"{name} must be [T, H, D]; got {tuple(x.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}")


def check_number(name: str, value: float, *, positive: bool = False) -> float:
    """`value` as a float; it must be a finite number, and with `positive` above 0."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if not torch.compiler.is_compiling() and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    if positive and value <= 0:
        raise ValueError(f"{name} must be positive; got {value}")
    return float(value)


def check_count(name: str, value: int, least: int) -> None:
    """`value` must be an int, `least` or more."""
    if not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")


def check_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the scores, 1 / sqrt(head_dim) where none is given."""
    return 1.0 / math.sqrt(head_dim) if scale is None else check_number("scale", scale)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [Tq, H, D] and k, v [Tk, Hkv, D] must agree in dtype, device and head size, and Hkv must divide H."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_heads(name, x)
        if x.dtype != q.dtype:
            raise TypeError(f"q, k and v must share a dtype; q is {q.dtype}, {name} is {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must share a device; q is on {q.device}, {name} is on {x.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape [Tk, Hkv, D]; got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must have the same head dimension; got {q.shape[2]} and {k.shape[2]}")
    if q.shape[2] == 0:
        raise ValueError(f"the head dimension must be at least 1; q is {tuple(q.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"the number of key heads must divide that of query heads; got {k.shape[1]} and {q.shape[1]}")


def check_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    validate: bool,
) -> None:
    """All that attention asks of its operands; offsets' values are read on a CPU, and on a GPU only with `validate`."""
    check_qkv(q, k, v)
    values = validate or q.device.type == "cpu"
    check_count("max_q", max_q, 0)
    check_count("max_k", max_k, 0)
    check_offsets("k_offsets", k_offsets, k.shape[0], max_k, q.device, values=values)
    if q_offsets is None:
        if max_q != q.shape[0]:
            raise ValueError(f"max_q must be the number of learned queries, {q.shape[0]}; got {max_q}")
        return
    if q_offsets is not k_offsets or max_q != max_k or q.shape[0] != k.shape[0]:
        check_offsets("q_offsets", q_offsets, q.shape[0], max_q, q.device, values=values)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(
            "q_offsets and k_offsets must hold as many sequences; "
            f"got {q_offsets.shape[0] - 1} and {k_offsets.shape[0] - 1}"
        )


def check_offsets(name: str, offsets: Tensor, total: int, max_len: int, device: torch.device, *, values: bool) -> None:
    """Offsets must be [B + 1] int32/int64 on `device`, and with `values` also start at 0, ascend, end at `total`, fit
    `max_len`.

    Reading the values of a CUDA tensor waits for the device.
    """
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} must be [B + 1]; got {tuple(offsets.shape)}")
    if offsets.device != device:
        raise ValueError(f"{name} must be on {device} with the values; it is on {offsets.device}")
    check_count(f"the maximal length that goes with {name}", max_len, 0)
    if values and not torch.compiler.is_compiling():
        _check_values(name, offsets, total, max_len)


def _check_values(name: str, offsets: Tensor, total: int, max_len: int) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(f"{name} must run from 0 to the number of tokens, {total}; it runs from {first} to {last}")
    if offsets.shape[0] == 1:
        return
    shortest, longest = (int(x) for x in torch.aminmax(lengths(offsets)))
    if shortest < 0:
        raise ValueError(f"{name} must not decrease; one sequence has length {shortest}")
    if longest > max_len:
        raise ValueError(
            f"{name} holds a sequence of length {longest}, longer than the maximal length given, {max_len}"
        )


def normalise_window(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """(left, right) with -1 for unlimited; causal means that nothing to the right is seen."""
    if window is None:
        left = right = UNLIMITED
    else:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise ValueError(f"window must be (left, right); got {window!r}")
        if not all(side is None or isinstance(side, (int, torch.SymInt)) for side in window):
            raise TypeError(f"window sides must be ints or None; got {window!r}")
        left, right = (UNLIMITED if side is None else int(side) for side in window)
        if min(left, right) < UNLIMITED:
            raise ValueError(f"window sides must be non-negative, or -1 or None for unlimited; got {window!r}")
    return left, 0 if causal else right


def dense(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors as kernels read them, one number after the other; a column of a matrix, say, is copied."""
    return tuple(None if x is None else x.contiguous() for x in tensors)


def check_bias(bias: Tensor, q: Tensor, batch: int, max_q: int, max_k: int) -> None:
    """The bias must be floating, on q's device and [B or 1, H or 1, max_q, max_k]."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise TypeError(f"bias must be a floating tensor; got {getattr(bias, 'dtype', type(bias).__name__)}")
    if bias.device != q.device:
        raise ValueError(f"bias must be on {q.device} with q; it is on {bias.device}")
    if (
        bias.dim() != 4
        or bias.shape[0] not in (1, batch)
        or bias.shape[1] not in (1, q.shape[1])
        or bias.shape[2] != max_q
        or bias.shape[3] != max_k
    ):
        raise ValueError(
            f"bias must be [{batch} or 1, {q.shape[1]} or 1, {max_q}, {max_k}] (batch, heads, max_q, max_k); "
            f"got {tuple(bias.shape)}"
        )
