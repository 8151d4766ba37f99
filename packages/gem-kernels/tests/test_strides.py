"""Offsets, weights and positions that are columns of something wider give what copies of them give."""

from __future__ import annotations

import pytest
import torch
from gem_kernels import (
    Rope,
    Turn,
    block_attention,
    gated_heads,
    gdpa,
    jagged_add,
    jagged_attention,
    jagged_concat,
    jagged_to_padded,
    layer_norm,
    linear_norm,
    most_recent,
    norm_linear,
    norm_rows,
    rms_norm,
    rope,
    rotary_heads,
    sigmoid_gate,
)
from gem_kernels.testing import random_heads

TOKENS, HEADS, DIM = 8, 2, 16
X = random_heads(TOKENS, HEADS, DIM)
ROWS = X.flatten(1)
BACKEND = {"backend": "triton"}


def columns(sizes, dtype, device):
    """Vectors, each a column of a matrix, and copies of them."""
    wide = [torch.randn(n, 3, dtype=dtype, device=device)[:, 1] for n in sizes]
    return [[x.clone().requires_grad_() for x in wide], [x.detach().requires_grad_() for x in wide]]


WITH_OFFSETS = {
    "jagged_attention": lambda x, o: jagged_attention(x, x, x, o, o, 5, 5, **BACKEND),
    "gdpa": lambda x, o: gdpa(x, x, x, o, o, 5, 5, **BACKEND),
    "block_attention": lambda x, o: block_attention(x, x, x, o, block=16, rope=10.0, **BACKEND),
    "rope": lambda x, o: rope(x, o, **BACKEND),
    "most_recent": lambda x, o: most_recent(x, o, 2, **BACKEND),
    "jagged_concat": lambda x, o: jagged_concat(x, x, o, o, **BACKEND)[0],
    "jagged_to_padded": lambda x, o: jagged_to_padded(x, o, 5, **BACKEND),
    "jagged_add": lambda x, o: jagged_add(x, x[:2].detach(), o, **BACKEND),
}


@pytest.mark.parametrize("name", WITH_OFFSETS)
def test_offsets(name, device):
    found = []
    wide = torch.tensor([[0, 7], [3, 1], [8, 2]], device=device)
    for offsets in (wide[:, 0].clone(), wide[:, 0]):
        x = X.detach().to(device).requires_grad_()
        out = WITH_OFFSETS[name](x, offsets)
        found += [out, *torch.autograd.grad(out.square().sum(), x)]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


WITH_VECTORS = {
    "rms_norm": (lambda w: rms_norm(ROWS.to(w), w, **BACKEND), (32,)),
    "layer_norm": (
        lambda w, b, r: layer_norm(ROWS.to(w), w, b, residual=ROWS.to(w), residual_bias=r, **BACKEND),
        (32, 32, 32),
    ),
    "norm_rows": (lambda w, b: norm_rows(ROWS.to(w), w, b, kind="layer", eps=1e-5, **BACKEND)[:2], (32, 32)),
    "norm_linear": (lambda w, b: norm_linear(ROWS.to(w), w, ROWS.to(w), b, **BACKEND), (32, 8)),
    "linear_norm": (lambda w, b: linear_norm(ROWS.to(w), ROWS.to(w), w, b, **BACKEND), (8, 8)),
    "gated_heads": (lambda w, b: gated_heads(ROWS.to(w), 8, 2, w, bias=b, **BACKEND), (8, 32)),
    "rotary_heads": (
        lambda w, k, b, p: rotary_heads(ROWS[:, :24].to(w), 2, (w, k), turns=(Turn(positions=p),), bias=b, **BACKEND),
        (4, 4, 24, TOKENS),
    ),
    "sigmoid_gate": (lambda b: sigmoid_gate(ROWS.to(b), ROWS.to(b), bias=b, **BACKEND), (32,)),
    "rope": (lambda p: rope(X.to(p) * p[0], None, positions=p, **BACKEND), (TOKENS,)),
    "block_attention": (
        lambda p: block_attention(
            *(X.to(p) * p[0],) * 3, torch.tensor([0, 3, 8]).to(p.device), block=16, rope=Rope(positions=p), **BACKEND
        ),
        (TOKENS,),
    ),
}


@pytest.mark.parametrize("name", WITH_VECTORS)
def test_vectors(name, device):
    run, sizes = WITH_VECTORS[name]
    dtype = torch.bfloat16 if "linear" in name else torch.float32
    found = []
    for vectors in columns(sizes, dtype, device):
        out = run(*vectors)
        parts = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(sum(p.float().square().sum() for p in parts), vectors, allow_unused=True)
        found.append([*parts, *(g for g in grads if g is not None)])
    for copied, column in zip(*found, strict=True):
        assert torch.equal(copied, column)
