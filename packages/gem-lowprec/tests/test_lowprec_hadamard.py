"""The block random Hadamard transform: orthogonal, invertible, invisible in products, and useful."""

from __future__ import annotations

import pytest
import torch
from gem_lowprec import MXFP4, hadamard, quantize, random_signs
from gem_lowprec.hadamard import hadamard_matrix


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_matrix(n):
    h = hadamard_matrix(n, dtype=torch.float64)
    parity = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    assert torch.equal(h, torch.tensor(parity, dtype=torch.float64))
    assert torch.equal(h @ h.t(), n * torch.eye(n, dtype=torch.float64))


def test_signs():
    signs = random_signs(4096, 3)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 4.5 / 64
    assert torch.equal(signs[:100], random_signs(100, 3))
    assert not torch.equal(signs, random_signs(4096, 4))
    assert not torch.equal(signs, random_signs(4096, 3, step=1))


@pytest.mark.parametrize("n", [0, 1, 31, 32, 96, 100, 255])
@pytest.mark.parametrize("block", [16, 32, 128])
def test_orthogonal_and_undone(n, block):
    signs = random_signs(n, 0)
    eye = torch.eye(n, dtype=torch.float64)
    q = hadamard(eye, signs, block=block)
    torch.testing.assert_close(q @ q.t(), eye, rtol=0, atol=1e-13)
    x = torch.randn(5, n, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(x, signs, block=block), signs, block=block, inverse=True), x)


def test_against_the_matrix():
    signs = random_signs(64, 1).double()
    x = torch.randn(7, 64, dtype=torch.float64)
    y = hadamard(x, signs, block=32)
    h = hadamard_matrix(32, dtype=torch.float64) / 32**0.5
    expected = torch.cat([(x * signs)[:, :32] @ h.t(), (x * signs)[:, 32:] @ h.t()], dim=1)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("k", [64, 100])
def test_product_is_unchanged(k):
    a, b = torch.randn(9, k, dtype=torch.float64), torch.randn(k, 11, dtype=torch.float64)
    signs = random_signs(k, 5)
    product = hadamard(a, signs) @ hadamard(b, signs, dim=0)
    torch.testing.assert_close(product, a @ b)


def test_dtype_and_shape_are_kept():
    x = torch.randn(2, 3, 48, dtype=torch.bfloat16)
    y = hadamard(x, random_signs(3, 0), dim=1, block=2)
    assert y.dtype == torch.bfloat16
    assert y.shape == x.shape


def test_it_helps_a_product_of_fp4_with_outliers():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 1024, generator=g), torch.randn(64, 1024, generator=g)
    a[torch.rand(64, 1024, generator=g) < 0.03] *= 8
    signs = random_signs(1024, 0)
    exact = a.double() @ b.double().t()

    def error(x: torch.Tensor, y: torch.Tensor) -> float:
        approx = quantize(x, MXFP4).dequantize().double() @ quantize(y, MXFP4).dequantize().double().t()
        return ((approx - exact).norm() / exact.norm()).item()

    assert error(hadamard(a, signs, block=128), hadamard(b, signs, block=128)) < 0.85 * error(a, b)


def test_errors():
    with pytest.raises(ValueError, match="got 24"):
        hadamard(torch.ones(4, 48), torch.ones(48), block=24)
    with pytest.raises(ValueError, match=r"\[48\]"):
        hadamard(torch.ones(4, 48), torch.ones(4))
    with pytest.raises(ValueError, match="got 12"):
        hadamard_matrix(12)
