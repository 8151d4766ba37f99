"""Saved activations as MXFP4: four bits an element, and eight for each block of 32 (OCP Microscaling Formats, 2023)."""

from __future__ import annotations

import torch

from gem_parallel.memory.quantise import ScaledTensor

BLOCK = 32  # elements that share a scale
HALF = BLOCK // 2  # bytes of a block: of two neighbours the first in the low bits, the second in the high ones
NOT_A_NUMBER = 255  # of E8M0
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1


class Mx4Quantiser:
    """MXFP4 with the least power of two as scale at which no element is cut off.

        s = 2^ceil(log2(max |x| / 6)),    data = e2m1(x / s), to the nearest, ties to even

    A tensor is cut into rows of 32 as it lies in memory: data [rows, 16] uint8, two elements each, scale [rows] uint8
    (E8M0: 127 + log2 s). An element x of a block with maximum m comes back within max(|x| / 5, m / 12). A block that
    holds an infinity or NaN comes back as NaN. On CUDA a Triton kernel passes over the tensor once (`fused`),
    elsewhere it is plain PyTorch.
    """

    bits = 4.25

    def __init__(self, *, fused: bool | None = None) -> None:
        self._fused = fused

    def pack(self, tensor: torch.Tensor) -> ScaledTensor:
        """See the class."""
        rows = -(-tensor.numel() // BLOCK)
        flat = tensor.reshape(-1)
        if not self._works_fused(tensor):
            wide = flat.new_zeros(rows * BLOCK, dtype=torch.float32)
            wide[: flat.numel()] = flat
            return ScaledTensor(*_pack(wide.view(rows, BLOCK)), tensor.shape, tensor.dtype)
        from gem_parallel.memory import kernels

        data = torch.empty((rows, HALF), dtype=torch.uint8, device=tensor.device)
        scale = torch.empty((rows,), dtype=torch.uint8, device=tensor.device)
        kernels.pack_mx4(flat.contiguous(), data, scale)
        return ScaledTensor(data, scale, tensor.shape, tensor.dtype)

    def unpack(self, packed: ScaledTensor) -> torch.Tensor:
        """See the class."""
        if not self._works_fused(packed.data):
            whole = _unpack(packed.data, packed.scale).flatten()[: packed.shape.numel()]
            return whole.to(packed.dtype).reshape(packed.shape)
        from gem_parallel.memory import kernels

        out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.data.device)
        kernels.unpack_mx4(packed.data, packed.scale, out)
        return out

    def _works_fused(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda if self._fused is None else self._fused


def _pack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # float32 [n, 32] -> uint8 [n, 16], uint8 [n]
    top = rows.abs().amax(1)
    bits = top.view(torch.int32)
    scale = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).int()  # m 2^k <= 1.5 2^(e + 2)
    scale = torch.where(top.isfinite(), scale.clamp(min=1), NOT_A_NUMBER)
    inverse = ((254 - scale).clamp(min=1) << 23).int().view(torch.float32)  # 2^(127 - scale)
    size = rows.abs() * inverse[:, None]
    code = torch.zeros_like(size, dtype=torch.uint8)
    for limit, even in (
        (0.25, True),
        (0.75, False),
        (1.25, True),
        (1.75, False),
        (2.5, True),
        (3.5, False),
        (5.0, True),
    ):
        code += size > limit if even else size >= limit  # a tie goes to the even code, below or above
    code += (rows < 0).to(torch.uint8) << 3
    return code[:, ::2] | code[:, 1::2] << 4, scale.to(torch.uint8)


def _unpack(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:  # uint8 [n, 16], uint8 [n] -> float32 [n, 32]
    code = torch.stack((data & 15, data >> 4), dim=2).flatten(1).int()
    size = torch.tensor(LEVELS, device=data.device)[code & 7]
    value = torch.where(code > 7, -size, size)
    power = (scale.int() << 23).view(torch.float32)[:, None]
    return torch.where((scale == NOT_A_NUMBER)[:, None], float("nan"), value * power)
