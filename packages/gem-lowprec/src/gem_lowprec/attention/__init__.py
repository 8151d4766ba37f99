"""Softmax attention on jagged tensors in low precision: FP8 on Hopper, FP8 and MXFP8 emulated anywhere."""

from __future__ import annotations

import functools
import warnings

import torch
from gem_kernels.checks import UNLIMITED, check_problem, check_scale, normalise_window
from torch import Tensor

from gem_lowprec.attention.emulated import PRECISIONS, AttentionPrecision, Emulated, Problem
from gem_lowprec.gemm import Engine

__all__ = ["attention_engine", "low_precision_attention"]

BACKENDS = (None, "native", "emulated")


def low_precision_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    *,
    precision: AttentionPrecision = "fp8",
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`gem_kernels.jagged_attention` with quantised operands: for each sample and head::

        S = scale Q(Q) Q(K)^T        P = softmax(S)        O = Q(P) Q(V)        LSE = log sum exp S

    Args:
        q: [Tq, H, D] float16, bfloat16, float32 or float64; with `q_offsets=None` learned queries [Lq, H, D] that every
            sample uses.
        k: [Tk, Hkv, D] in q's dtype; Hkv divides H.
        v: [Tk, Hkv, D].
        q_offsets: [B + 1] int32 or int64, or None.
        k_offsets: [B + 1].
        max_q: at least the longest query sequence, a host int.
        max_k: at least the longest key sequence.
        precision: "fp8" is E4M3 with a power-of-two scale for every row of Q and for every 128 keys of K and of V, P
            quantised as it is made; the backward pass is that of BF16 on the FP8 operands, which are all that is kept.
            "mxfp8" is E4M3 with E8M0 scales for 32 elements along the contraction in all seven products of the two
            passes, for the numerics: it is emulated on every device.
        scale: 1 / sqrt(D) by default; the native kernel wants it positive.
        causal, window: as of `jagged_attention`; emulated only.
        return_lse: also return LSE. It can be differentiated.
        backend: "native", "emulated" or None for what `attention_engine` says.

    Returns:
        O: [Tq, H, D] in q's dtype; a query that sees no key gets 0.
        LSE: [Tq, H] float32 (float64 where emulated for float64), -inf where no key is seen; if asked for.

    Raises:
        TypeError, ValueError: as `jagged_attention`; a precision or backend that there is not.
        RuntimeError: the native backend was asked for and cannot run this.

    Source: FlashAttention-3 (Shah et al., 2024) for FP8 in the forward pass; OCP MX v1.0 for MXFP8.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be 'native', 'emulated' or None, got {backend!r}")
    check_problem(q, k, v, q_offsets, k_offsets, max_q, max_k, validate=False)
    left, right = normalise_window(causal, window)
    scale = check_scale(scale, q.shape[2])
    masked = left != UNLIMITED or right != UNLIMITED or scale <= 0
    runs = attention_engine(precision, q, masked=masked, shared=q_offsets is None)
    if backend == "native" and runs.name != "native":
        raise RuntimeError(f"low-precision attention cannot run natively: {runs.why}")
    if runs.name == "native" and backend != "emulated":
        from gem_lowprec.attention.native import native_attention

        assert q_offsets is not None
        out, lse = native_attention(q, k, v, q_offsets.contiguous(), k_offsets.contiguous(), max_q, max_k, scale)
    else:
        if backend is None:
            _say(precision, runs.why)
        problem = Problem(
            q_offsets=q_offsets, k_offsets=k_offsets, max_q=max_q, max_k=max_k, scale=scale, left=left, right=right,
            precision=precision,
        )  # fmt: skip
        out, lse = _emulated(q, k, v, problem)
    return (out, lse) if return_lse else out


@torch.compiler.disable
def _emulated(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Never traced: the emulation is for numbers, not for speed."""
    return Emulated.apply(q, k, v, problem)  # type: ignore[no-any-return]


def attention_engine(precision: str, q: Tensor, *, masked: bool = False, shared: bool = False) -> Engine:
    """What `low_precision_attention` runs a precision in for queries like `q`, and why."""
    if precision == "mxfp8":
        return Engine(name="emulated", why="no tensor core of today's Hopper cards scales by 32 elements")
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9:
        return Engine(name="emulated", why=f"the kernels are for Hopper, the tensors are on {q.device}")
    if q.dtype not in (torch.bfloat16, torch.float16):
        return Engine(name="emulated", why=f"the kernels take bfloat16 and float16, got {q.dtype}")
    if q.shape[2] not in (64, 128):
        return Engine(name="emulated", why=f"the kernels take head dimensions 64 and 128, got {q.shape[2]}")
    if masked:
        return Engine(name="emulated", why="the kernels take no causal mask, no window and only positive scales")
    if shared:
        return Engine(name="emulated", why="the kernels take no learned queries")
    return Engine(name="native", why="Gluon kernels for Hopper")


@functools.cache
def _say(precision: str, why: str) -> None:
    warnings.warn(f"{precision} attention is emulated in float32, padded and slow: {why}", stacklevel=3)
