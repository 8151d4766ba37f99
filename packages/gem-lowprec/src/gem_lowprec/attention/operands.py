"""Q, K and V of jagged attention in E4M3, laid out as Hopper's FP8 tensor cores read them.

    Q ~ data * scale[row, head]      K ~ data * scale[block, head]      V ~ data * scale[block, head]

All scales are powers of two. A block is 128 keys, counted from the start of the sequence; block j of sequence b is
number start_b // 128 + b + j, so that no two share a number and nobody has to count. V is kept transposed, [D, 128] for
each block, zero behind the sequence's end, with the keys of every 16 in the order of `ORDER` (`forward_kernel` says
why).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gem_kernels.hopper.launch import on_its_device
from torch import Tensor

from gem_lowprec.formats import E4M3, ScaleMode, e8m0_decode, encode, scale_code
from gem_lowprec.kernels import threshold

BLOCK = 128
# Where P's columns lie in a thread: place 4 t + 2 u + b of an operand holds score 8 u + 2 t + b.
ORDER = tuple(8 * u + 2 * t + b for t in range(4) for u in range(2) for b in range(2))
# Blocks of V whose largest magnitude is below this count as being this large. V's scales meet in one exponent, and
# two that differ by more than 2^60 would underflow there.
LEAST = 2.0**-52
HEAD_DIMS = (64, 128)
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What `quantise` made of Q [Tq, H, D], K and V [Tk, Hkv, D].

    q: [Tq, H, D] E4M3. q_scale: [Tq, H] float32. k: [Tk, Hkv, D] E4M3. v: [N, Hkv, D, 128] E4M3, N = Tk // 128 + B.
    kv_scale: [N, Hkv, 2] float32: K's scale and log2 of V's. Numbers without a block are not written.
    longest: at least the longest sequence of either side. dtype: of Q, K, V.
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    v: Tensor
    kv_scale: Tensor
    q_offsets: Tensor
    k_offsets: Tensor
    longest: int
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V as the products see them, in their own shapes; exact in bfloat16 and wider, down to 2^-126."""
        dtype = dtype or self.dtype
        if dtype in HALF and native(self.q.device, self.dtype, self.q.shape[2]):
            return _dequantise_native(self.q, self, dtype)
        block, place = key_blocks(self.k_offsets, self.k.shape[0])
        scales = self.kv_scale[block]  # [Tk, Hkv, 2]
        position = torch.tensor(_inverse(ORDER), device=block.device)[place % 16] + place // 16 * 16
        v = self.v.view(torch.uint8)[block, :, :, position].view(E4M3.dtype).float() * torch.exp2(scales[..., 1:])
        q = self.q.float() * self.q_scale[..., None]
        return tuple(x.to(dtype) for x in (q, self.k.float() * scales[..., :1], v))  # type: ignore[return-value]


def _inverse(order: tuple[int, ...]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def key_blocks(k_offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Of every key its block's number and its place there, [Tk] int64 each."""
    offsets = k_offsets.long()
    sequence = torch.repeat_interleave(
        torch.arange(offsets.numel() - 1, device=offsets.device), offsets.diff(), output_size=total
    )
    start = offsets[sequence]
    at = torch.arange(total, device=offsets.device) - start
    return start // BLOCK + sequence + at // BLOCK, at % BLOCK


def quantise(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int) -> Operands:
    """Q, K and V [T, H, D] to E4M3, scales by RCEIL: in one kernel on Hopper for 16-bit tensors with D 64 or 128, in
    PyTorch elsewhere, with the same bits. A block or row with an infinity or NaN becomes NaN.
    """
    if native(q.device, q.dtype, q.shape[2]) and v.dtype == k.dtype == q.dtype:
        return _quantise_native(q, k, v, q_offsets, k_offsets, max_q, max_k)
    return quantise_reference(q, k, v, q_offsets, k_offsets)


def native(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether the kernels take such tensors."""
    known = device.type == "cuda" and dtype in HALF and dim in HEAD_DIMS
    return known and torch.cuda.get_device_capability(device)[0] == 9


def quantise_reference(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor) -> Operands:
    """The same in plain PyTorch: the specification."""
    qf, kf, vf = (x.detach().float() for x in (q, k, v))
    q_scale = e8m0_decode(scale_code(qf.abs().amax(-1), E4M3, ScaleMode.RCEIL))
    blocks = k.shape[0] // BLOCK + k_offsets.numel() - 1
    block, place = key_blocks(k_offsets, k.shape[0])

    def amax(x: Tensor) -> Tensor:  # [N, Hkv]
        most = x.abs().amax(-1)
        most = most.nan_to_num(nan=torch.inf, posinf=torch.inf)  # scatter_reduce need not keep a NaN
        index = block[:, None].expand(most.shape)
        return torch.zeros(blocks, x.shape[1], device=x.device).scatter_reduce_(0, index, most, "amax")

    k_scale = e8m0_decode(scale_code(amax(kf), E4M3, ScaleMode.RCEIL))
    v_scale = e8m0_decode(scale_code(amax(vf).clamp(min=LEAST), E4M3, ScaleMode.RCEIL))
    turned = torch.zeros(blocks, BLOCK, v.shape[1], v.shape[2], device=v.device)
    turned[block, place] = vf / v_scale[block][..., None]
    turned = turned.view(blocks, -1, 16, *v.shape[1:])[:, :, list(ORDER)].flatten(1, 2)
    return Operands(
        q=encode(qf / q_scale[..., None], E4M3),
        q_scale=q_scale,
        k=encode(kf / k_scale[block][..., None], E4M3),
        v=encode(turned.permute(0, 2, 3, 1).contiguous(), E4M3),
        kv_scale=torch.stack((k_scale, torch.log2(v_scale)), -1),
        q_offsets=q_offsets,
        k_offsets=k_offsets,
        longest=max(q.shape[0], k.shape[0]),
        dtype=q.dtype,
    )


def operand_constants(dim: int) -> dict[str, object]:
    """The compile-time arguments of `quantise_kernel`."""
    return {"D": dim, "THRESHOLD": threshold(E4M3, ScaleMode.RCEIL), "EMAX": E4M3.emax, "LEAST": LEAST}


@on_its_device
def _quantise_native(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_q: int, max_k: int
) -> Operands:
    from gem_lowprec.attention.operand_kernel import quantise_kernel

    q, k, v = (x.detach() if x.stride(2) == 1 else x.detach().contiguous() for x in (q, k, v))
    (rows, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    batch = k_offsets.numel() - 1
    blocks = keys // BLOCK + batch
    u8, f32 = torch.uint8, torch.float32
    made = Operands(
        q=q.new_empty(rows, heads, dim, dtype=u8).view(E4M3.dtype), q_scale=q.new_empty(rows, heads, dtype=f32),
        k=q.new_empty(keys, kv_heads, dim, dtype=u8).view(E4M3.dtype),
        v=q.new_empty(blocks, kv_heads, dim, BLOCK, dtype=u8).view(E4M3.dtype),
        kv_scale=q.new_empty(blocks, kv_heads, 2, dtype=f32), q_offsets=q_offsets, k_offsets=k_offsets,
        longest=max(max_q, max_k), dtype=q.dtype,
    )  # fmt: skip
    longest = -(-max(max_q, max_k) // BLOCK)
    if batch * longest:
        quantise_kernel[(batch * longest, heads + 2 * kv_heads)](
            q, k, v, q_offsets, k_offsets.to(q_offsets.dtype), made.q.view(u8), made.q_scale, made.k.view(u8),
            made.v.view(u8), made.kv_scale, longest, heads, kv_heads, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            **operand_constants(dim), num_warps=4,
        )  # fmt: skip
    return made


@on_its_device
def _dequantise_native(_first: Tensor, made: Operands, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    from gem_lowprec.attention.operand_kernel import dequantise_kernel

    (_, heads, dim), kv_heads = made.q.shape, made.k.shape[1]
    q, k = (torch.empty(x.shape, dtype=dtype, device=x.device) for x in (made.q, made.k))
    v = torch.empty_like(k)
    batch, longest, u8 = made.k_offsets.numel() - 1, -(-made.longest // BLOCK), torch.uint8
    if batch * longest:
        dequantise_kernel[(batch * longest, heads + 2 * kv_heads)](
            made.q.view(u8), made.q_scale, made.k.view(u8), made.v.view(u8), made.kv_scale, made.q_offsets,
            made.k_offsets.to(made.q_offsets.dtype), q, k, v, longest, heads, kv_heads, D=dim, num_warps=4,
        )  # fmt: skip
    return q, k, v
