"""Block random Hadamard transform along a GEMM's contraction dimension.

y = H (s * x) / sqrt(b) on each block of b consecutive elements, with H the Sylvester Hadamard matrix (entries +-1,
symmetric, H H = b I) and s random signs. The map Q = H diag(s) / sqrt(b) is orthogonal, so a product whose two operands
are both transformed along the contraction with the same signs is unchanged in exact arithmetic:
(A Q^T)(B Q^T)^T = A B^T. An outlier is spread over its block, which narrows the range that a quantiser has to cover.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_lowprec.rounding import Randoms

_STREAM = 0xFFFFFFFF  # of the random numbers; stochastic rounding counts its streams from zero


def random_signs(n: int, seed: int, *, step: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """`n` signs +-1, float32, a function of (seed, step, position) alone."""
    words = Randoms(seed=seed, stream=_STREAM, step=step).words(n, device)
    return 1.0 - 2.0 * (words >> 31).to(torch.float32)


def hadamard_matrix(n: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Sylvester Hadamard matrix [n, n] of +-1, n a power of two: H[i, j] = (-1)^popcount(i & j)."""
    if n < 1 or n & (n - 1):
        raise ValueError(f"the size of a Hadamard matrix must be a power of two, got {n}")
    h = torch.ones(1, 1, device=device, dtype=dtype)
    while h.shape[0] < n:
        h = torch.cat((torch.cat((h, h), dim=1), torch.cat((h, -h), dim=1)))
    return h


def hadamard(x: Tensor, signs: Tensor, *, block: int = 32, dim: int = -1, inverse: bool = False) -> Tensor:
    """Block random Hadamard transform of `x` along `dim`, or with `inverse` its inverse (exact up to rounding).

    `signs` is [x.shape[dim]] from `random_signs`; both operands of a product must be given the same. `block` is a
    power of two, commonly 16 to 128. A tail shorter than `block` is covered by the largest powers of two that fit (a
    length of 100 with block 32 is 32 + 32 + 32 + 4), so shapes are kept and the transform stays orthogonal. Computed
    in float32 (float64 for float64 inputs) and returned in the dtype of `x`.
    """
    if x.ndim == 0 or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must name a dimension of a tensor of shape {list(x.shape)}, got {dim}")
    n = x.shape[dim]
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    if signs.shape != (n,):
        raise ValueError(f"signs must have shape [{n}], the size of dim {dim}, got {list(signs.shape)}")
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.movedim(dim, -1).to(compute)
    s = signs.to(device=x.device, dtype=compute)
    if not inverse:
        y = y * s
    parts, start = [], 0
    while start < n:
        while block > n - start:
            block //= 2
        stop = start + (n - start) // block * block
        h = hadamard_matrix(block, device=x.device, dtype=compute) * block**-0.5
        parts.append((y[..., start:stop].unflatten(-1, (-1, block)) @ h).flatten(-2))
        start = stop
    y = torch.cat(parts, dim=-1) if parts else y
    if inverse:
        y = y * s
    return y.to(x.dtype).movedim(-1, dim)
