"""Biases from tables of positions and times: against loops, and their gradients through attention in float64."""

from __future__ import annotations

import pytest
import torch
from gem_kernels import jagged_attention, position_bias, time_bias
from gem_kernels.testing import offsets_of, random_heads

Q, K = [3, 0, 7, 1], [5, 2, 4, 0]


def table(rows: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(rows, heads, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


@pytest.mark.parametrize("reach", [0, 2, 9])
def test_positions(reach: int) -> None:
    rows = table(2 * reach + 1)
    got = position_bias(rows, 8, 6, q_offsets=offsets_of(Q), k_offsets=offsets_of(K))
    assert got.shape == (4, 2, 8, 6)
    assert got.is_contiguous()
    for b, (n, m) in enumerate(zip(Q, K, strict=True)):
        for i in range(n):
            for j in range(m):
                distance = max(-reach, min(reach, j - (i + m - n)))
                assert torch.equal(got[b, :, i, j], rows[distance + reach])
    same = position_bias(rows, 5, 5)
    assert same.shape == (1, 2, 5, 5)
    assert torch.equal(same[0, :, 4, 3], rows[max(reach - 1, 0)])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_times(dtype: torch.dtype) -> None:
    rows, bounds = table(4), torch.tensor([0, 10, 100])
    generator = torch.Generator().manual_seed(0)
    q_times, k_times = (torch.randint(0, 300, (sum(n),), generator=generator).to(dtype) for n in (Q, K))
    got = time_bias(rows, bounds, q_times, k_times, offsets_of(Q), offsets_of(K), 7, 5)
    assert got.shape == (4, 2, 7, 5)
    begin_q = begin_k = 0
    for b, (n, m) in enumerate(zip(Q, K, strict=True)):
        for i in range(n):
            for j in range(m):
                age = float(q_times[begin_q + i] - k_times[begin_k + j])
                assert torch.equal(got[b, :, i, j], rows[sum(age > bound for bound in (0, 10, 100))])
        begin_q, begin_k = begin_q + n, begin_k + m


def test_gradients_through_attention() -> None:
    q, k, v = (random_heads(n, 2, 8, dtype=torch.float64, seed=i) for i, n in enumerate((sum(Q), sum(K), sum(K))))
    where = offsets_of(Q), offsets_of(K), 7, 5
    times = torch.arange(sum(Q)), torch.arange(sum(K))

    def attend(positions: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        bias = position_bias(positions, 7, 5, q_offsets=where[0], k_offsets=where[1])
        bias = bias + time_bias(ages, torch.tensor([0, 2]), *times, *where)
        return jagged_attention(q, k, v, *where, bias=bias, backend="reference")  # type: ignore[return-value]

    assert torch.autograd.gradcheck(attend, (table(5).requires_grad_(), table(3).requires_grad_()))


def test_what_does_not_fit_is_named() -> None:
    offsets = offsets_of(Q)
    with pytest.raises(ValueError, match="odd number of rows"):
        position_bias(table(4), 7, 5)
    with pytest.raises(ValueError, match="together"):
        position_bias(table(5), 7, 5, q_offsets=offsets)
    with pytest.raises(ValueError, match="2 bounds need a table of 3 rows"):
        time_bias(table(5), torch.tensor([1, 2]), torch.ones(11), torch.ones(11), offsets, offsets, 7, 7)
    with pytest.raises(ValueError, match="floating"):
        position_bias(torch.ones(3, dtype=torch.int64), 7, 5)
