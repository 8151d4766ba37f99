"""Quantisers of saved activations: a plain one for FP8, and the protocol of those that others hand in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch

FP8_MAX = 448.0  # of float8_e4m3fn
SCALE = 1.0 / FP8_MAX  # a factor, rounded to float32: devices divide by a constant each in its own way
PART = 512  # elements of a long row that share a scale: a kernel holds so many of several rows at once
LEAST = math.ldexp(1.0, -126)  # scale, the least normal number: its inverse is finite


class Quantiser(Protocol):
    """Turns a floating-point tensor into something smaller, and back into a tensor of its shape and dtype.

    `pack` returns whatever `unpack` understands; its tensors must not alias the input, and it has `nbytes`. A plan
    reckons with `bits` per element (8 where the quantiser does not say). What is to wait in host memory needs
    `tensors()` and `with_tensors(...)`, as ScaledTensor has.
    """

    def pack(self, tensor: torch.Tensor) -> Any:
        """The small form."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """A contiguous tensor, near the one that was packed."""


@dataclass(frozen=True)
class ScaledTensor:
    """Data and scales as their quantiser lays them out; what was packed has `shape` and `dtype`."""

    data: torch.Tensor
    scale: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self.data.nbytes + self.scale.nbytes

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What an offload has to move."""
        return self.data, self.scale

    def with_tensors(self, data: torch.Tensor, scale: torch.Tensor) -> ScaledTensor:
        """The same with moved tensors."""
        return ScaledTensor(data, scale, self.shape, self.dtype)


class Fp8Quantiser:
    """E4M3 with one float32 scale per row of the last dimension, or per block of `block` neighbouring elements.

    A row whose width is a multiple of 512 is cut into parts of that. data [rows, cols] float8_e4m3fn, scale [rows, 1]
    float32.

        scale = max |x| * SCALE,    data = e4m3(x * (1 / scale)),    SCALE = 1 / 448

    so that an element x of a block with maximum m comes back within max(|x| / 16, m / 448 / 1024). A block that holds
    an infinity or NaN comes back as NaN. On CUDA a Triton kernel passes over the tensor once (`fused`), elsewhere it is
    plain PyTorch.
    """

    def __init__(self, block: int = 0, *, fused: bool | None = None) -> None:
        if block < 0:
            raise ValueError(f"Fp8Quantiser.block must be >= 0 (0: one scale per row), got {block}")
        self.block = block
        self._fused = fused

    def pack(self, tensor: torch.Tensor) -> ScaledTensor:
        """See the class."""
        last = tensor.shape[-1] if tensor.dim() else 1
        cols = PART if last % PART == 0 else last
        if self.block and tensor.numel() % self.block == 0:
            cols = self.block
        rows = tensor.reshape(-1, cols) if cols else tensor.reshape(0, 1)
        if not self._works_fused(tensor):
            return ScaledTensor(*_pack(rows), tensor.shape, tensor.dtype)
        from gem_parallel.memory import kernels

        rows = rows.contiguous()
        data = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        scale = torch.empty((len(rows), 1), dtype=torch.float32, device=rows.device)
        kernels.pack(rows, data, scale, rows.shape[1])
        return ScaledTensor(data, scale, tensor.shape, tensor.dtype)

    def unpack(self, packed: ScaledTensor) -> torch.Tensor:
        """See the class."""
        if not self._works_fused(packed.data):
            return _unpack(packed.data, packed.scale, packed.dtype).reshape(packed.shape)
        from gem_parallel.memory import kernels

        out = torch.empty(packed.shape, dtype=packed.dtype, device=packed.data.device)
        kernels.unpack(packed.data, packed.scale, out, packed.data.shape[1])
        return out

    def _works_fused(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda if self._fused is None else self._fused


def _pack(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [n, c] -> float8 [n, c], float32 [n, 1]
    wide = rows.float()
    scale = wide.abs().amax(1, keepdim=True) * SCALE
    scale = torch.where(scale > 0, scale.clamp(min=LEAST), torch.where(scale == 0, 1.0, scale))
    return (wide * (1.0 / scale)).to(torch.float8_e4m3fn), scale


def _unpack(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (data.float() * scale).to(dtype)
