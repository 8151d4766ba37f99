"""What tests of jagged operators need: random inputs, float64 formulas that loop over sequences, poison, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gem_kernels import checks

Rows = tuple[Tensor, Tensor | None]


def offsets_of(lengths: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64) -> Tensor:
    """Lengths [B] -> offsets [B + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=dtype, device=device)
    offsets[1:] = torch.as_tensor(lengths, dtype=dtype, device=device).cumsum(0)
    return offsets


def random_heads(
    rows: int,
    heads: int,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> Tensor:
    """N(0, 1) of shape [rows, heads, dim]; the same numbers for a seed on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=generator).to(device=device, dtype=dtype)
    return x.requires_grad_(requires_grad)


def check_offsets(name: str, offsets: Tensor, total: int, max_len: int) -> None:
    """Raise ValueError unless `offsets` run from 0 to `total`, never decrease and fit `max_len`; waits for a GPU.

    The operators check this themselves on a CPU, and with `validate=True` on a GPU.
    """
    checks.check_offsets(name, offsets, total, max_len, offsets.device, values=True)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| in the Frobenius norm and float64; 0 for two empty tensors, NaN shows as NaN."""
    if got.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(got.shape)} and {tuple(expected.shape)}")
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if got.numel() == 0:
        return 0.0
    norm = expected.norm().item()
    error = (got - expected).norm().item()
    return error if norm == 0.0 else error / norm


NOWHERE = 1 << 28


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty and its kin hand out with NaN, so that an element which a kernel forgets to write shows.
    On a CPU integers get one that is no place in a test's tensors and far from an overflow, so that what the simulator
    finds does not depend on what memory held.
    """
    owners: list[tuple[Any, str]] = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    kept = [(owner, name, getattr(owner, name)) for owner, name in owners]

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                return x.fill_(float("nan"))
            numbers = x.dtype in (torch.int32, torch.int64) and x.device.type == "cpu"
            return x.fill_(NOWHERE) if numbers else x

        return wrapped

    for owner, name, make in kept:
        setattr(owner, name, filling(make))
    try:
        yield
    finally:
        for owner, name, make in kept:
            setattr(owner, name, make)


# Independent formulas: one sequence and one head at a time, in float64, straight from the definitions.

_SQRT_HALF, _TANH_FACTOR = math.sqrt(0.5), math.sqrt(2.0 / math.pi)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": lambda x: (x > 0) * x,
    "relu2": lambda x: (x > 0) * x**2,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x * _SQRT_HALF)),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(_TANH_FACTOR * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "hardswish": lambda x: x * ((x + 3) / 6).clamp(0, 1),
}


def seen(len_q: int, len_k: int, causal: bool, window: tuple[int | None, int | None] | None) -> Tensor:
    """Which keys each query sees, [Lq, Lk] bool, element by element."""
    left, right = window if window is not None else (None, None)
    mask = torch.zeros(len_q, len_k, dtype=torch.bool)
    for i in range(len_q):
        for j in range(len_k):
            distance = j - (i + len_k - len_q)
            mask[i, j] = not (
                (causal and distance > 0)
                or (left not in (None, -1) and distance < -left)  # type: ignore[operator]
                or (right not in (None, -1) and distance > right)  # type: ignore[operator]
            )
    return mask


def loop_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    activation: str | None = None,
    scale: float | None = None,
    out_scale: float = 1.0,
    bias: Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
) -> Rows:
    """Attention by its definition in float64, with softmax (activation None; then also LSE) or an activation."""
    q, k, v = q.double(), k.double(), v.double()
    scale = q.shape[2] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for b in range(k_offsets.numel() - 1):
        k0, k1 = int(k_offsets[b]), int(k_offsets[b + 1])
        q0, q1 = (0, q.shape[0]) if q_offsets is None else (int(q_offsets[b]), int(q_offsets[b + 1]))
        mask = seen(q1 - q0, k1 - k0, causal, window).to(q.device)
        heads, head_lses = [], []
        for h in range(q.shape[1]):
            s = scale * q[q0:q1, h] @ k[k0:k1, h // group].T
            if bias is not None:
                bb, hh = b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0
                s = s + bias[bb, hh, : q1 - q0, : k1 - k0].double()
            if activation is not None:
                p = torch.where(mask, ACTIVATIONS[activation](s), 0.0)
            else:
                rows_p, rows_lse = [], []
                for i in range(q1 - q0):
                    row = s[i][mask[i]]
                    lse = torch.logsumexp(row, 0) if len(row) else s.new_tensor(-math.inf)
                    rows_p.append(s.new_zeros(k1 - k0).index_put((mask[i].nonzero()[:, 0],), torch.exp(row - lse)))
                    rows_lse.append(lse)
                p = torch.stack(rows_p) if rows_p else s.new_zeros(0, k1 - k0)
                head_lses.append(torch.stack(rows_lse) if rows_lse else s.new_zeros(0))
            heads.append(out_scale * p @ v[k0:k1, h // group])
        outs.append(torch.stack(heads, 1))
        if activation is None:
            lses.append(torch.stack(head_lses, 1))
    out = torch.cat(outs) if outs else q.new_zeros(0, *q.shape[1:])
    return out, torch.cat(lses) if lses else None


def loop_rope(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding as complex multiplication, in float64."""
    x = x.double()
    frequency = torch.tensor([base ** (-2.0 * i / x.shape[2]) for i in range(x.shape[2] // 2)], dtype=torch.float64)
    angle = positions.double()[:, None] * frequency.to(x.device)
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.view_as_real(pairs).flatten(-2)


def loop_blocks(offsets: Tensor, block: int) -> Tensor:
    """The offsets of all blocks of all sequences, without empty ones."""
    out = [0]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        out.extend(min(first + block, end) for first in range(start, end, block))
    return torch.tensor(out, device=offsets.device)
