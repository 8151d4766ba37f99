"""The kernel that sums blocks of dS to the gradient of a bias, against the definition, on made-up blocks."""

from __future__ import annotations

import pytest
import torch
from gem_kernels.testing import offsets_of

LQ, LK = [70, 0, 127, 1], [129, 40, 0, 130]
HEADS, MAX_Q, MAX_K = 2, 128, 131


@pytest.mark.parametrize(
    ("own_batch", "own_heads", "mask", "step"),
    [(1, HEADS, (-1, -1), 99), (1, 1, (-1, 0), 2), (len(LQ), HEADS, (60, 10), 3), (len(LQ), 1, (-1, -1), 99)],
)
def test_sums_of_blocks(device, own_heads, own_batch, mask, step):
    """In one window or in several; blocks that nobody wrote are NaN, as outside of a mask's sight."""
    from gem_kernels.hopper.bias_gradient import AHEAD, bias_gradient_kernel

    batch, (left, right) = len(LQ), mask
    q_offsets, k_offsets = offsets_of(LQ, device), offsets_of(LK, device, torch.int32)
    key_blocks, longest, query_blocks = -(-MAX_K // 64), -(-MAX_Q // 64), sum(LQ) // 64 + batch
    step = min(step, query_blocks)
    window_blocks = step + longest
    expected = torch.zeros(own_batch, own_heads, MAX_Q, MAX_K, dtype=torch.float64)
    out = torch.full(expected.shape, float("nan"), device=device)
    torch.manual_seed(0)
    for first in range(0, query_blocks, step):
        blocks = torch.full((HEADS, window_blocks, key_blocks, 64, 64), float("nan"), dtype=torch.bfloat16)
        for b, (q, k) in enumerate(zip(LQ, LK, strict=True)):
            number = int(q_offsets[b]) // 64 + b
            if not first <= number < first + step:
                continue
            distance = torch.arange(k)[None, :] - (torch.arange(q)[:, None] + k - q)
            seen = torch.ones_like(distance, dtype=torch.bool)
            if left >= 0:
                seen &= distance >= -left
            if right >= 0:
                seen &= distance <= right
            ds = torch.randn(HEADS, q, k).bfloat16() * seen
            padded = torch.zeros(HEADS, -(-q // 64) * 64, -(-k // 64) * 64, dtype=torch.bfloat16)
            padded[:, :q, :k] = ds
            for i in range(-(-q // 64)):
                for j in range(-(-k // 64)):
                    rows, cols = slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64)
                    if seen[rows, cols].any():
                        blocks[:, number - first + i, j] = padded[:, rows, cols].transpose(1, 2)
            ds = ds.double().sum(0, keepdim=True) if own_heads == 1 else ds.double()
            expected[b if own_batch > 1 else 0, :, :q, :k] += ds
        tiles = longest * key_blocks
        bias_gradient_kernel[(tiles * own_batch * own_heads,)](
            blocks.to(device), out, q_offsets, k_offsets, batch, MAX_Q, MAX_K, tiles, first, first + step,
            window_blocks, key_blocks, left, right, HEADS=HEADS, ALL_BATCH=own_batch == 1, ALL_HEADS=own_heads == 1,
            LEFT=left >= 0, RIGHT=right >= 0, ADD=own_batch == 1 and first > 0, AHEAD=AHEAD, num_warps=4,
        )  # fmt: skip
    assert (out.cpu().double() - expected).abs().max() < 1e-5
