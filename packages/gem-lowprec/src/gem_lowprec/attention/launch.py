"""Host side of the FP8 forward on Hopper: configurations, descriptors and the launch. It never waits for the device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from gem_kernels.hopper import tiles as tile_lists
from gem_kernels.hopper.launch import LOG2E, on_its_device, programs
from gem_kernels.hopper.tiles import Tiles
from gem_kernels.schedule import TileShape
from gem_kernels.tiling import CompileCase, Tile
from torch import Tensor

from gem_lowprec.attention.operands import BLOCK, HEAD_DIMS, Operands, operand_constants

KINDS = {torch.float8_e4m3fn: "float8e4nv", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """`stages`: buffers of K and of V; three consumers of 64 query rows share them."""

    stages: int = 3

    @property
    def shape(self) -> TileShape:
        """The tile shape for the schedule."""
        return TileShape(consumers=3, step=BLOCK)

    def constants(self, dim: int, group: int, *, also: bool = False) -> dict[str, Any]:
        """The compile-time arguments of `forward_kernel`."""
        powers = operand_constants(dim)
        return {
            "D": dim, "KS": self.stages, "QS": 2, "GROUP": group, "REGS": 160, "LOADER_REGS": 32,
            "ALSO": also, "THRESHOLD": powers["THRESHOLD"], "EMAX": powers["EMAX"],
        }  # fmt: skip


@functools.cache
def _layout(block: tuple[int, ...], kind: str) -> Any:
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, kind))


def _descriptor(x: Tensor, shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """TMA descriptor of contiguous data seen as `shape`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [1]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    return TensorDescriptor(x.view(shape), list(shape), strides, list(block), _layout(block, KINDS[x.dtype]))


@on_its_device
def _forward(
    q: Tensor, operands: Operands, scale: float, config: Config, tiles: Tiles | None, also: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from gem_lowprec.attention.forward_kernel import forward_kernel

    (rows, heads, dim), (keys, kv_heads, _) = q.shape, operands.k.shape
    out = torch.empty(rows, heads, dim, dtype=operands.dtype, device=q.device)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
    # Where nothing is written, something of the type.
    data = torch.empty(rows if also else 0, heads * dim, dtype=torch.uint8, device=q.device)
    data_scale = torch.empty(heads if also else 0, -(-rows // 4) * 4, dtype=torch.float32, device=q.device)
    if rows == 0:
        return out, lse, data, data_scale
    if keys == 0:
        return out.zero_(), lse.fill_(float("-inf")), data.zero_(), data_scale.fill_(2.0**-127)
    if tiles is None:
        tiles = tile_lists.build(operands.q_offsets, operands.k_offsets, rows, heads, config.shape)
    lines = operands.v.numel() // BLOCK
    k_shape, v_shape = (keys, kv_heads, dim), (lines, BLOCK)
    forward_kernel[(programs(q.device),)](
        _descriptor(q, (rows, heads, dim), (64, 1, dim)), _descriptor(operands.k, k_shape, (BLOCK, 1, dim)),
        _descriptor(operands.k, k_shape, (64, 1, dim)), _descriptor(operands.v, v_shape, (dim, 64)),
        _descriptor(out, (rows, heads, dim), (64, 1, dim)), out, lse,
        operands.q_scale, operands.kv_scale,
        heads, kv_heads, tiles.table, tiles.count, tiles.cursor, data, data_scale, data_scale.shape[1], scale * LOG2E,
        **config.constants(dim, heads // kv_heads, also=also), num_warps=4,
    )  # fmt: skip
    return out, lse, data, data_scale


def compile_cases() -> list[CompileCase]:
    """What can be built without a GPU."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec.attention.forward_kernel import forward_kernel
    from gem_lowprec.attention.operand_kernel import dequantise_kernel, quantise_kernel

    def desc(kind: str, gluon: str, *block: int) -> str:
        return f"tensordesc<{kind}{list(block)},{_layout(block, gluon)!r}>"

    cases = []
    for dim in HEAD_DIMS:
        rows = {n: desc("fp8e4nv", "float8e4nv", 64, 1, dim) for n in ("q_desc", "k_short")}
        descriptors = rows | {
            "k_desc": desc("fp8e4nv", "float8e4nv", BLOCK, 1, dim), "v_desc": desc("fp8e4nv", "float8e4nv", dim, 64),
            "o_desc": desc("bf16", "bfloat16", 64, 1, dim),
        }  # fmt: skip
        pointers = {"o_ptr": "*bf16", "lse_ptr": "*fp32", "q_scale_ptr": "*fp32", "kv_scale_ptr": "*fp32"}
        pointers |= dict.fromkeys(("tiles_ptr", "count_ptr", "cursor_ptr"), "*i32")
        pointers |= {"o8_ptr": "*u8", "o8_scale_ptr": "*fp32"}
        forwards = [("forward", Config().constants(dim, 1))]
        if dim == BLOCK:
            forwards.append(("forward and rows", Config().constants(dim, 1, also=True)))
        small = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
        small |= dict.fromkeys(("q_offsets", "k_offsets"), "*i64") | {"qs_ptr": "*fp32", "kvs_ptr": "*fp32"}
        small |= dict.fromkeys(("qd_ptr", "kd_ptr", "vd_ptr"), "*u8")
        for name, kernel, types, values in (
            *((n, forward_kernel, descriptors | pointers | {"scale": "fp32"}, c) for n, c in forwards),
            ("operands", quantise_kernel, small, operand_constants(dim)),
            ("operands back", dequantise_kernel, small, {"D": dim}),
        ):
            known = {n: "constexpr" if n in values else "i32" for n in kernel.arg_names} | types
            cases.append(
                CompileCase(
                    name=f"fp8 attention {name} d{dim}", kernel=kernel, signature=known, constants=values, arch=(90,),
                    divisible=tuple(n for n in kernel.arg_names if n.endswith(("_ptr", "_row", "_head"))),
                    tile=Tile(bm=64, bn=BLOCK), source=GluonASTSource, defined=kernel is forward_kernel,
                )
            )  # fmt: skip
    return cases


def forward(
    operands: Operands, scale: float, *, config: Config | None = None, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] in the operands' dtype and LSE [Tq, H] float32; scale > 0.

    tiles: the tile list of these offsets and this configuration, where several calls share one; None builds it.
    """
    return _forward(operands.q, operands, scale, config or Config(), tiles, False)[:2]


def forward_with_rows(
    operands: Operands, scale: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `forward`, and O once more in E4M3 for a projection of it: bytes [Tq, H D] and their scales [H, pitch]
    float32, one for each row and head, as `block_gemm.block_matmul` loads them. D must be 128, the block of a scale.
    """
    assert operands.q.shape[2] == BLOCK
    return _forward(operands.q, operands, scale, config or Config(), None, True)
