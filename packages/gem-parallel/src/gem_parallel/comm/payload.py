"""A plain payload for parameters' all-gathers: FP8 with a scale per block."""

from __future__ import annotations

import torch

from gem_parallel.memory.quantise import LEAST, SCALE


class Fp8Payload:
    """A flat shard as E4M3 with one float32 scale per block of `block` elements, a quarter of float32's bytes and more.

    Layout of the bytes: data [ceil(n / block) block], then scales [ceil(n / block)] float32. One pass of a Triton
    kernel on CUDA, plain PyTorch elsewhere; other payloads can be handed to `parallelize` instead.
    """

    def __init__(self, block: int = 128) -> None:
        if block < 4 or block % 4:
            raise ValueError(f"Fp8Payload.block must be a positive multiple of 4, got {block}")
        self.block = block

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        """See Payload."""
        blocks = -(-elements // self.block)
        return -(-blocks * (self.block + 4) // 16) * 16

    def pack(self, shard: torch.Tensor, out: torch.Tensor) -> None:
        """See Payload."""
        blocks = -(-shard.numel() // self.block)
        if shard.is_cuda:
            from gem_parallel.memory import kernels

            kernels.pack(shard.contiguous(), *self._views(out, blocks), self.block)
            return
        wide = shard.new_zeros((blocks, self.block), dtype=torch.float32)
        wide.view(-1)[: shard.numel()].copy_(shard)
        scale = wide.abs().amax(1, keepdim=True) * SCALE
        scale = torch.where(scale == 0, 1.0, scale.clamp(min=LEAST))
        data = blocks * self.block
        out[:data].copy_((wide * (1.0 / scale)).to(torch.float8_e4m3fn).view(torch.uint8).view(-1))
        out[data : data + 4 * blocks].copy_(scale.view(-1).view(torch.uint8))

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """See Payload."""
        blocks = -(-out.numel() // self.block)
        if out.is_cuda and out.is_contiguous():
            from gem_parallel.memory import kernels

            kernels.unpack(*self._views(packed, blocks), out, self.block)
            return
        data = blocks * self.block
        wide = packed[:data].view(torch.float8_e4m3fn).float().view(blocks, self.block)
        scale = packed[data : data + 4 * blocks].clone().view(torch.float32)
        out.copy_((wide * scale[:, None]).view(-1)[: out.numel()])

    def _views(self, packed: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = blocks * self.block
        return packed[:data].view(torch.float8_e4m3fn), packed[data : data + 4 * blocks].view(torch.float32)
