"""Host side of the projections that write attention's operands; it never waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from gem_kernels.hopper.launch import on_its_device
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec.attention.operands import BLOCK, Operands, operand_constants
from gem_lowprec.block_gemm import DEPTH, _check, _layout, _matrix, operand, programs
from gem_lowprec.formats import E4M3
from gem_lowprec.quantize import QTensor

STAGES = 4
CHUNK = 256  # sequences that a program counts at a time
LIST = Tile(bm=BLOCK, bn=1, warps=4)


@dataclass(frozen=True, kw_only=True)
class Between:
    """What happens to heads of q and k after a projection: each is divided by its root mean square (`eps` added to the
    mean square) and multiplied by a gain [128] where there are `gains` of q and of k; then pairs of dims are turned by
    the token's place in its sequence where there is a `base` (`gem_kernels.rope`).
    """

    gains: tuple[Tensor, Tensor] | None = None
    eps: float = 1e-6
    base: float | None = None

    @property
    def nothing(self) -> bool:
        """Whether nothing happens."""
        return self.gains is None and self.base is None


@functools.cache
def _frequencies(base: float, device: torch.device) -> Tensor:
    """base^(-2 i / 128), [64] float32."""
    pair = torch.arange(BLOCK // 2, dtype=torch.float64, device=device)
    return torch.pow(torch.tensor(base, dtype=torch.float64, device=device), pair * (-2.0 / BLOCK)).float()


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The blocks of 128 tokens of jagged rows: `table` [bound, 4] int32, of which the first `count` [1] rows hold a
    block's first token, its tokens (128 but for a sequence's last), its number (`operands`) and its first token's place
    in its sequence. `bound`: T // 128 + B.
    """

    table: Tensor
    count: Tensor


def list_blocks(offsets: Tensor, total: int) -> Blocks:
    """The blocks of sequences with these offsets [B + 1]; `total` = T. On CUDA or in Triton's interpreter."""
    from gem_lowprec.attention.projection_kernel import list_blocks as kernel

    batch = offsets.shape[0] - 1
    table = torch.empty(max(total // BLOCK + batch, 1), 4, dtype=torch.int32, device=offsets.device)
    count = torch.zeros(1, dtype=torch.int32, device=offsets.device)
    launch(kernel, batch, offsets.device, LIST, offsets, table, count, batch, CHUNK=CHUNK)
    return Blocks(table=table, count=count)


def project(
    x: QTensor, weight: QTensor, bias: Tensor | None, offsets: Tensor, max_len: int, *, heads: int, kv_heads: int,
    dtype: torch.dtype, between: Between | None = None,
) -> tuple[Operands, Tensor]:  # fmt: skip
    """Operands of self-attention from its packed projection, [q || k || v] = X W^T + bias, which is never written::

        project(x, w, b, ...)  =  quantise(*split(block_matmul(x, w, float32, b)), ...)       bit for bit

    Args:
        x: [T, K] with a scale for each 1 x 128 (FP8_1X128).
        weight: [(heads + 2 kv_heads) 128, K] with one for each 128 x 128 (FP8_128X128).
        bias: as many numbers as W has rows, or None.
        offsets: [B + 1] of the sequences.
        max_len: at least the longest of them.
        heads: of q, 128 columns each.
        kv_heads: of k and of v.
        dtype: of attention's result.
        between: what happens to heads of q and k before they are quantised, in float32.

    Returns:
        The operands; and, for the backward of what happens between, [q || k || v] before it in `dtype`, of which v is
        not written (nobody reads it); empty without it.

    Raises:
        ValueError: operands that do not fit.
    """
    _check("x", x)
    _check("weight", weight)
    width = (heads + 2 * kv_heads) * BLOCK
    if x.spec.block[0] != 1 or weight.spec.block[0] != BLOCK:
        raise ValueError(f"x must have scales per 1 x 128 and W per 128 x 128, got {x.spec} and {weight.spec}")
    if weight.shape != (width, x.shape[1]):
        raise ValueError(f"weight must be [{width}, {x.shape[1]}], got {list(weight.shape)}")
    if bias is not None and bias.shape != (width,):
        raise ValueError(f"bias must be [{width}], got {list(bias.shape)}")
    return _project(x.data, x, weight, bias, offsets, max_len, heads, kv_heads, dtype, between or Between())


@on_its_device
def _project(
    first: Tensor, x: QTensor, weight: QTensor, bias: Tensor | None, offsets: Tensor, max_len: int, heads: int,
    kv_heads: int, dtype: torch.dtype, between: Between,
) -> tuple[Operands, Tensor]:  # fmt: skip
    from gem_lowprec.attention.projection_kernel import projection_kernel

    x, weight = operand(x), operand(weight)
    (rows, depth), batch = x.shape, offsets.shape[0] - 1
    u8, f32, numbers = torch.uint8, torch.float32, rows // BLOCK + batch
    made = Operands(
        q=first.new_empty(rows, heads, BLOCK, dtype=u8).view(E4M3.dtype),
        q_scale=first.new_empty(rows, heads, dtype=f32),
        k=first.new_empty(rows, kv_heads, BLOCK, dtype=u8).view(E4M3.dtype),
        v=first.new_empty(numbers, kv_heads, BLOCK, BLOCK, dtype=u8).view(E4M3.dtype),
        kv_scale=first.new_empty(numbers, kv_heads, 2, dtype=f32), q_offsets=offsets, k_offsets=offsets,
        longest=max_len, dtype=dtype,
    )  # fmt: skip
    raw = first.new_empty(0 if between.nothing else rows, weight.shape[0], dtype=dtype)
    if rows and batch:
        q_gain, k_gain = (weight.scale,) * 2 if between.gains is None else between.gains
        freq = weight.scale if between.base is None else _frequencies(between.base, first.device)
        blocks = list_blocks(offsets, rows)
        tiles = -(-blocks.table.shape[0] // 2) * (heads + 2 * kv_heads)
        projection_kernel[(min(programs(first.device), tiles),)](
            _matrix(x.data, (64, DEPTH)), _matrix(weight.data, (BLOCK, DEPTH)), x.scale, weight.scale,
            weight.scale if bias is None else bias, blocks.table, blocks.count, made.q.view(u8), made.q_scale,
            made.k.view(u8), made.v.view(u8), made.kv_scale, q_gain, k_gain, raw, freq, between.eps,
            -(-depth // DEPTH), x.scale.stride(1), rows - 1, *weight.scale.stride(), heads, kv_heads,
            **_constants(bias=bias is not None, norm=between.gains is not None, turn=between.base is not None),
            num_warps=4,
        )  # fmt: skip
    return made, raw


def _constants(*, bias: bool, norm: bool, turn: bool) -> dict[str, Any]:
    powers = {name: value for name, value in operand_constants(BLOCK).items() if name != "D"}
    return {"STAGES": STAGES, "HAS_BIAS": bias, "NORM": norm, "TURN": turn, **powers}


def compile_cases() -> list[CompileCase]:
    """What can be built without a GPU."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec.attention.projection_kernel import projection_kernel

    def desc(kind: str, block: tuple[int, ...], dtype: torch.dtype) -> str:
        return f"tensordesc<{kind}{list(block)},{_layout(block, dtype)!r}>"

    cases = []
    for name, both in (("", False), (", normed and turned", True)):
        constants = _constants(bias=True, norm=both, turn=both)
        types = {n: "constexpr" if n in constants else "i32" for n in projection_kernel.arg_names}
        types |= {
            "x_desc": desc("fp8e4nv", (64, DEPTH), E4M3.dtype), "w_desc": desc("fp8e4nv", (BLOCK, DEPTH), E4M3.dtype),
            "table_ptr": "*i32", "count_ptr": "*i32", "eps": "fp32",
        }  # fmt: skip
        types |= dict.fromkeys(("ws_ptr", "sx_ptr", "qs_ptr", "kvs_ptr", "freq_ptr"), "*fp32")
        types |= dict.fromkeys(("bias_ptr", "raw_ptr", "q_gain_ptr", "k_gain_ptr"), "*bf16")
        types |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*u8")
        cases.append(
            CompileCase(
                name=f"fp8 projection of attention{name}", kernel=projection_kernel, signature=types,
                constants=constants, divisible=tuple(n for n in projection_kernel.arg_names if n.endswith("_ptr")),
                arch=(90,), tile=Tile(bm=2 * BLOCK, bn=BLOCK), source=GluonASTSource, defined=True,
            )
        )  # fmt: skip
    return cases
