"""What users may get wrong in low precision, and what they are told; and vectors that are columns of a matrix."""

from __future__ import annotations

import pytest
import torch
from gem_lowprec import (
    E4M3,
    FP8_1X128,
    MXFP8,
    Norm,
    Products,
    block_matmul,
    convert,
    dequantize,
    hadamard,
    low_precision_attention,
    low_precision_linear,
    mx_matmul,
    norm_quantize,
    quantize,
    quantize_both,
    random_signs,
    stochastic_round,
    watch,
)

X = torch.randn(8, 128)
HEADS = X.view(8, 2, 64)
OFFSETS = torch.tensor([0, 3, 8])
Q = quantize(X, FP8_1X128)


@pytest.mark.parametrize(
    ("run", "error", "message"),
    [
        (lambda: quantize(X, "mxfp8"), TypeError, "spec must be a QuantSpec such as MXFP8, got 'mxfp8'"),
        (lambda: quantize([1.0], MXFP8), TypeError, "expects a tensor, got list"),
        (lambda: quantize(X, MXFP8, randoms=3), TypeError, "randoms must be Randoms or None, got 3"),
        (lambda: dequantize(X), TypeError, "expects a QTensor, got Tensor"),
        (lambda: stochastic_round(X, E4M3, 3), TypeError, "randoms must be Randoms, got 3"),
        (lambda: hadamard(X, random_signs(128, 0), dim=2), ValueError, r"dim must name .* \[8, 128\], got 2"),
        (lambda: low_precision_linear(X, X, products="fp8"), TypeError, "products must be Products, got 'fp8'"),
        (lambda: convert(X, "mxfp8"), TypeError, "model must be a torch.nn.Module, got Tensor"),
        (lambda: watch(X), TypeError, "what `convert` returned, got Tensor"),
        (lambda: block_matmul(X, Q, torch.float32), TypeError, "a must be a QTensor, got Tensor"),
        (lambda: block_matmul(Q, Q, torch.float64), TypeError, "dtype must be bfloat16, .* got torch.float64"),
        (lambda: block_matmul(Q, Q, torch.float32), ValueError, "on Hopper cards alone, the operands are on cpu"),
        (lambda: mx_matmul(X, X, torch.float32), TypeError, "a must be a QTensor, got Tensor"),
        (lambda: norm_quantize(X, X[0], eps=0.0), ValueError, "eps must be positive; got 0.0"),
        (lambda: norm_quantize(X, X[0].to("meta")), ValueError, "must be on cpu with x, got meta"),
        (
            lambda: low_precision_attention(HEADS, HEADS, HEADS, OFFSETS, OFFSETS, 5, 5, scale="1"),
            TypeError,
            "scale must be a number; got str",
        ),
        (
            lambda: low_precision_attention(HEADS, HEADS, HEADS, OFFSETS, OFFSETS, 5, 4),
            ValueError,
            "longer than the maximal length given, 4",
        ),
    ],
)
def test_what_is_wrong_is_named(run, error, message):
    with pytest.raises(error, match=message):
        run()


def test_a_products_argument_is_taken():
    assert low_precision_linear(X, X, products=Products()).shape == (8, 8)


def test_a_norms_vectors_may_be_columns():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wide = torch.randn(128, 3, device=device)
    x = X.to(device)
    found = []
    for gain, bias in ((wide[:, 0].clone(), wide[:, 1].clone()), (wide[:, 0], wide[:, 1])):
        q, norm = norm_quantize(x, gain, bias)
        again = quantize_both(x, norm=Norm(gain=gain, bias=bias, rstd=norm.rstd, mean=norm.mean))
        found.append([q.data.view(torch.uint8), again.row.data.view(torch.uint8), again.col.data.view(torch.uint8)])
    for copied, column in zip(*found, strict=True):
        assert torch.equal(copied, column)
