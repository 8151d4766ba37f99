"""Host side of the block-wise FP8 product on Hopper: configurations, the choice among them, descriptors and the launch.

Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from gem_kernels.tiling import CompileCase, Tile
from torch import Tensor

from gem_lowprec.formats import E4M3
from gem_lowprec.quantize import QTensor

DEPTH = 128
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """`consumers` warpgroups of `rows` x `cols` blocks of 64 x 128 each, `stages` buffers of 128 of K, `out` buffers of
    64 x 128 for each consumer's results.
    """

    consumers: int
    rows: int
    cols: int
    stages: int
    out: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C in one tile."""
        return self.consumers * self.rows * 64, self.cols * 128

    def constants(self, *, by_rows: bool, bias: bool, by_tma: bool) -> dict[str, Any]:
        """The compile-time arguments of `hopper.gemm_kernel`."""
        wide = self.consumers == 3
        return {
            "NC": self.consumers, "RM": self.rows, "RN": self.cols, "STAGES": self.stages, "CB": self.out,
            "B_ROWS": by_rows, "HAS_BIAS": bias, "BY_TMA": by_tma,
            "REGS": 160 if wide else 240, "LOADER_REGS": 32 if wide else 24,
        }  # fmt: skip


CONFIGS = {
    "3x64x128": GemmConfig(consumers=3, rows=1, cols=1, stages=4, out=1),
    "2x64x256": GemmConfig(consumers=2, rows=1, cols=2, stages=3, out=2),
    "2x128x128": GemmConfig(consumers=2, rows=2, cols=1, stages=3, out=2),
    "2x64x128": GemmConfig(consumers=2, rows=1, cols=1, stages=5, out=1),
}
# Scales for every column of C leave registers for the smallest tile alone.
BY_ROWS = {"2x64x128": 1.0}
# Of the others, with what a step of a tile costs for each element of it (measured, docs/notes/lowprec.md).
BY_BLOCK = {"3x64x128": 1.0, "2x64x256": 1.06}


def choose(m: int, n: int, k_blocks: int, sms: int, *, by_rows: bool = False) -> tuple[GemmConfig, int]:
    """The configuration and into how many parts K is cut: what the busiest program does is least.

    A part costs about four steps more than its share of K: its result is written in float32 and added up.
    """
    best: tuple[float, GemmConfig, int] | None = None
    for name, cost in (BY_ROWS if by_rows else BY_BLOCK).items():
        config = CONFIGS[name]
        height, width = config.tile
        tiles = -(-m // height) * -(-n // width)
        for splits in range(1, max(1, min(32, k_blocks // 8)) + 1):
            steps = -(-tiles * splits // sms) * (-(-k_blocks // splits) + 4 * (splits > 1))
            time = steps * cost * height * width
            if best is None or time < best[0]:
                best = time, config, splits
    assert best is not None
    return best[1:]


@functools.cache
def programs(device: torch.device) -> int:
    """Programs of a persistent launch: one for each SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check(name: str, q: QTensor) -> None:
    if not isinstance(q, QTensor):
        raise TypeError(f"{name} must be a QTensor, got {type(q).__name__}")
    if q.spec.element is not E4M3 or q.spec.block not in ((1, DEPTH), (DEPTH, DEPTH)) or q.spec.scale == "e8m0":
        raise ValueError(f"{name} must be E4M3 in blocks of 1 x 128 or 128 x 128 with float32 scales, got {q.spec}")
    if len(q.shape) != 2 or (q.dim != -1 and not q.spec.symmetric):  # square blocks are the same along either dimension
        raise ValueError(
            f"{name} must be a matrix that is quantised along its last dim, got {list(q.shape)} dim {q.dim}"
        )


def operand(q: QTensor) -> QTensor:
    """`q` as TMA can load it: lines of data at multiples of 16 bytes, scales of rows in lines at multiples of 16 bytes.
    What `quantize_both` makes is returned as it is; the transposed view of a gathered weight is written out.
    """
    data, scale = q.data, q.scale
    if data.stride(1) != 1 or data.stride(0) % 16 or data.data_ptr() % 16:
        line = -(-q.shape[1] // 16) * 16
        bytes_ = data.new_empty(q.shape[0], line, dtype=torch.uint8)
        bytes_[:, : q.shape[1]].copy_(data.view(torch.uint8))
        data = bytes_.view(data.dtype)[:, : q.shape[1]]
    if q.spec.block[0] == 1 and (scale.stride(0) != 1 or scale.stride(1) % 4 or scale.data_ptr() % 16):
        pitch = -(-q.shape[0] // 4) * 4
        scale = scale.new_empty(scale.shape[1], pitch)[:, : q.shape[0]].copy_(scale.t()).t()
    return QTensor(data=data, scale=scale, spec=q.spec, dim=-1, shape=q.shape, dtype=q.dtype)


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    from triton.experimental.gluon import language as gl

    types = {
        torch.float8_e4m3fn: gl.float8e4nv, torch.float32: gl.float32, torch.bfloat16: gl.bfloat16,
        torch.float16: gl.float16,
    }  # fmt: skip
    return gl.NVMMASharedLayout.get_default_for(list(shape), types[dtype])


def _descriptor(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, list(shape), list(strides), list(block), _layout(block, x.dtype))


def _matrix(x: Tensor, block: tuple[int, int]) -> Any:
    return _descriptor(x, (*x.shape,), (x.stride(0), 1), block)


def _lines(scale: Tensor, block: int) -> Any:
    """Row scales [R, blocks of K], stored [blocks of K, pitch], as one line."""
    pitch = scale.stride(1)
    n = (scale.shape[1] - 1) * pitch + scale.shape[0]
    return _descriptor(scale.as_strided((n,), (1,)), (n,), (1,), (block,))


def block_matmul(
    a: QTensor, b: QTensor, dtype: torch.dtype, bias: Tensor | None = None, *, config: GemmConfig | None = None,
    splits: int | None = None,
) -> Tensor:  # fmt: skip
    """C[M, N] = A[M, K] B[N, K]^T + bias as `dtype`, of E4M3 operands; each 128 of K is added up in float32.

    `a` has a scale for each row and 128 of K (FP8_1X128), `b` the same or one for each 128 x 128 (FP8_128X128).
    `bias` [N]. `dtype` is bfloat16, float16 or float32. `config` and the number of parts that K is cut into, `splits`,
    are chosen by shape if not given; the result does not depend on the order in which programs finish. On Hopper cards
    alone. Raises TypeError or ValueError for operands that do not fit.
    """
    from gem_lowprec.hopper import gemm_kernel

    _check("a", a)
    _check("b", b)
    if a.spec.block[0] != 1:
        raise ValueError(f"a must have a scale for each row, got {a.spec}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must contract over the same K, got {list(a.shape)} and {list(b.shape)}")
    if dtype not in OUTPUTS:
        raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    (m, k), n = a.shape, b.shape[0]
    for name, given in (("b", b.data), ("bias", bias)):
        if given is not None and given.device != a.data.device:
            raise ValueError(f"{name} must be on {a.data.device} with a, got {given.device}")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias must be [{n}], got {list(bias.shape)}")
    if 0 in (m, n, k):
        out = a.data.new_zeros(m, n, dtype=dtype)
        return out if bias is None else out + bias.to(dtype)
    if not a.data.is_cuda:
        raise ValueError(f"the product runs on Hopper cards alone, the operands are on {a.data.device}")
    a, b = operand(a), operand(b)
    bias = None if bias is None else bias.contiguous()
    by_rows = b.spec.block[0] == 1
    k_blocks, sms = -(-k // DEPTH), programs(a.data.device)
    chosen, parts = choose(m, n, k_blocks, sms, by_rows=by_rows)
    config, splits = config or chosen, splits or parts
    height, width = config.tile
    tiles = -(-m // height) * -(-n // width)
    kind = torch.float32 if splits > 1 else dtype
    by_tma = kind != torch.float32 and n % 8 == 0
    out = a.data.new_empty((splits, m, n), dtype=kind)
    # What a configuration does not use gets something of its type.
    stores = out[0] if by_tma else a.data.new_empty((64, 128), dtype=torch.bfloat16)
    sb = _lines(b.scale if by_rows else a.scale, 128)
    constants = config.constants(by_rows=by_rows, bias=bias is not None and splits == 1, by_tma=by_tma)
    with torch.cuda.device_of(a.data):
        gemm_kernel[(min(sms, tiles * splits),)](
            _matrix(a.data, (64, DEPTH)), _matrix(b.data, (128, DEPTH)), _lines(a.scale, 64), sb,
            _matrix(stores, (64, 128)), out, b.scale, b.scale if bias is None else bias, m, n, k_blocks, splits,
            a.scale.stride(1), b.scale.stride(1) if by_rows else 0, b.scale.stride(0), b.scale.stride(1),
            **constants, num_warps=4,
        )  # fmt: skip
    if splits == 1:
        return out[0]
    total = out.sum(0)
    return (total if bias is None else total + bias).to(dtype)


def compile_cases() -> list[CompileCase]:
    """What can be built without a GPU: all configurations into BF16, those that are chosen also into float32."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec.hopper import gemm_kernel

    def desc(kind: str, block: tuple[int, ...], dtype: torch.dtype) -> str:
        return f"tensordesc<{kind}{list(block)},{_layout(block, dtype)!r}>"

    descriptors = {
        "a_desc": desc("fp8e4nv", (64, 128), torch.float8_e4m3fn),
        "b_desc": desc("fp8e4nv", (128, 128), torch.float8_e4m3fn),
        "sa_desc": desc("fp32", (64,), torch.float32),
        "sb_desc": desc("fp32", (128,), torch.float32),
        "c_desc": desc("bf16", (64, 128), torch.bfloat16),
    }
    cases = []
    wanted = [(name, False, True) for name in CONFIGS] + [(name, False, False) for name in BY_BLOCK]
    for name, by_rows, by_tma in [*wanted, ("2x64x128", True, False)]:
        config = CONFIGS[name]
        constants = config.constants(by_rows=by_rows, bias=by_tma, by_tma=by_tma)
        types = {a: "constexpr" if a in constants else "i32" for a in gemm_kernel.arg_names}
        types |= descriptors
        types |= {"c_ptr": "*bf16" if by_tma else "*fp32", "sb_ptr": "*fp32", "bias_ptr": "*bf16"}
        out = "bf16" if by_tma else "float32"
        cases.append(
            CompileCase(
                name=f"fp8 block gemm {name}{' by rows' if by_rows else ''} into {out}", kernel=gemm_kernel,
                signature=types, constants=constants, divisible=("c_ptr", "sb_ptr", "bias_ptr", "N"), arch=(90,),
                tile=Tile(bm=config.tile[0], bn=config.tile[1]), source=GluonASTSource,
            )
        )  # fmt: skip
    return cases
