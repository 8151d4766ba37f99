"""Host side of the Hopper backward: configurations, the choice among them, the workspace, launches. Nothing here waits
for the device.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.hopper import tiles as tile_lists
from gem_kernels.hopper.backward import backward_kernel
from gem_kernels.hopper.launch import LOG2E, descriptor, flat, on_its_device, programs
from gem_kernels.hopper.pre_post import clear_without_keys, row_statistics
from gem_kernels.hopper.query_gradient import query_gradient_kernel
from gem_kernels.hopper.short_backward import short_backward_kernel
from gem_kernels.schedule import TileShape

BLOCK = 64  # queries and keys of a block of dS
CONSUMERS = 4  # of `query_gradient_kernel`
LONGEST = 1 << 29  # bytes of dS of one head of a sequence: 16384 queries and keys
WHOLE = 1 << 16  # row groups of a tile that is a whole (sequence, head)


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """own: "keys" or "queries" for one kernel that does everything, where all sequences have at most 64 of them; else
    None: dK, dV and dS first, then dQ from dS, of which at most `workspace` bytes are kept at a time (None: a tenth of
    the GPU's memory), or twice what the longest sequence needs if that is more.
    """

    own: str | None = None
    workspace: int | None = None

    def fits(self, max_q: int, max_k: int) -> bool:
        """Whether this configuration can do sequences of these lengths."""
        return self.own is None or {"queries": max_q, "keys": max_k}[self.own] <= BLOCK

    def constants(self, dim: int, act: str) -> dict[str, Any]:
        """The compile-time arguments of `backward_kernel` or `short_backward_kernel`."""
        if self.own is None:
            return {"D": dim, "QS": 3, "DS": 2, "ACT": act}
        return {"D": dim, "MS": 2, "OWN": self.own, "ACT": act}


BACKWARD = {
    "stream": BackwardConfig(),
    "short-keys": BackwardConfig(own="keys"),
    "short-queries": BackwardConfig(own="queries"),
}
QUERY_GRADIENT = {"NC": CONSUMERS, "KS": 3}


@functools.cache
def memory(device: torch.device) -> int:
    """Bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def choose_backward(max_q: int, max_k: int) -> BackwardConfig | None:
    """The configuration for sequences of at most these lengths (docs/notes/hopper-attention.md); None, announced once:
    the portable Triton kernels, where dS of one head of a sequence would take more than `LONGEST` bytes.
    """
    if max_k <= BLOCK:
        return BACKWARD["short-keys"]
    if max_q <= BLOCK:
        return BACKWARD["short-queries"]
    if 2 * max_q * max_k > LONGEST:
        _announce_long_sequences()
        return None
    return BACKWARD["stream"]


@functools.cache
def _announce_long_sequences() -> None:
    warnings.warn(
        "the Hopper backward's workspace is too large for sequences this long: the portable one runs", stacklevel=2
    )


@dataclass(frozen=True)
class Workspace:
    """Numbers of blocks of 64 x 64 in dS. Sequence b's query blocks are numbered from q_offsets[b] // 64 + b on: no two
    share a number, and the host need not know the lengths. A launch does the sequences whose first number is in a
    window of `step` numbers; their last one may lie `longest` - 1 behind it.
    """

    query_blocks: int
    key_blocks: int
    longest: int
    step: int

    @classmethod
    def plan(cls, total_q: int, batch: int, heads: int, max_q: int, max_k: int, limit: int) -> Workspace:
        """As few windows as fit in `limit` bytes, but none shorter than the longest sequence."""
        query_blocks, key_blocks = total_q // BLOCK + batch, triton.cdiv(max_k, BLOCK)
        longest = triton.cdiv(max_q, BLOCK)
        fit = limit // (heads * key_blocks * BLOCK * BLOCK * 2) - longest
        return cls(query_blocks, key_blocks, longest, min(max(fit, longest, 1), query_blocks))

    @property
    def window_blocks(self) -> int:
        """Query blocks of one head that a launch may write."""
        return min(self.step + self.longest, self.query_blocks)

    @property
    def windows(self) -> list[tuple[int, int]]:
        """The windows, first and behind the last number."""
        return [(first, first + self.step) for first in range(0, self.query_blocks, self.step)]


@on_its_device
def backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None,
    q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int, scale: float, *,
    act: str, out_scale: float, config: BackwardConfig,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV in the shapes of q, k, v (contiguous). `out` and `lse` are needed for softmax only."""
    if q_offsets is None:  # learned queries: as if every sequence had its own, then summed in a fixed order
        batch, length = k_offsets.shape[0] - 1, q.shape[0]
        own = torch.arange(batch + 1, device=q.device) * length
        dq, dk, dv = backward(
            dout, dlse, q.repeat(batch, 1, 1), k, v, out, lse, own, k_offsets, max_q, max_k, scale,
            act=act, out_scale=out_scale, config=config,
        )  # fmt: skip
        return dq.view(batch, *q.shape).sum(0, dtype=torch.float32).to(q.dtype), dk, dv
    assert config.fits(max_q, max_k)
    heads, dim = q.shape[1:]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0] == 0 or k.shape[0] == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, dout = flat(q), flat(k), flat(v), flat(dout)
    batch, total = q_offsets.shape[0] - 1, q.shape[0]
    limit = memory(q.device) // 10 if config.workspace is None else config.workspace
    work = Workspace.plan(total, batch, heads, max_q, max_k, limit)
    if act == "softmax":
        assert lse is not None
        rows = _statistics(dout, dlse, None if config.own == "keys" else out, lse, q_offsets, max_q, work.query_blocks)
        inner = scale * LOG2E
    else:
        rows, inner = torch.empty(BLOCK, device=q.device), scale
    loads = (*(descriptor(x, BLOCK) for x in (q, k, v, dout)), _rows_descriptor(rows))
    stores = [descriptor(x, BLOCK) for x in (dq, dk, dv)]
    scales = (out_scale, scale * out_scale)
    constants = config.constants(dim, act)
    shape = TileShape(block=BLOCK, consumers=2 if config.own is None else WHOLE, step=BLOCK)
    tiles = tile_lists.build(k_offsets, q_offsets, k.shape[0], heads, shape)
    if config.own is not None:
        clear_without_keys[(batch,)](
            dq, q_offsets, k_offsets, HD=heads * dim, COLS=triton.next_power_of_2(heads * dim), ROWS=4, num_warps=4
        )
        short_backward_kernel[(2 * programs(q.device),)](
            *loads, *stores, dq, dk, dv, heads * dim, tiles.table, tiles.count, work.query_blocks,
            inner, scale * out_scale, *scales, **constants, num_warps=4, maxnreg=128,
        )  # fmt: skip
        return dq, dk, dv
    blocks = heads * work.window_blocks * work.key_blocks
    ds = torch.empty(blocks * BLOCK, BLOCK, dtype=q.dtype, device=q.device)
    ds_descriptor = descriptor(ds[:, None], BLOCK)
    dq_shape = TileShape(block=BLOCK, consumers=CONSUMERS, step=BLOCK)
    dq_tiles = tile_lists.build(q_offsets, k_offsets, total, heads, dq_shape)
    for first, last in work.windows:
        backward_kernel[(programs(q.device),)](
            *loads, ds_descriptor, *stores[1:], dk, dv, heads * dim, tiles.table, tiles.count,
            first, last, work.query_blocks, work.window_blocks, work.key_blocks, inner, *scales,
            **constants, num_warps=4,
        )  # fmt: skip
        query_gradient_kernel[(programs(q.device),)](
            ds_descriptor, loads[1], stores[0], dq, heads * dim, dq_tiles.table, dq_tiles.count,
            first, last, work.window_blocks, work.key_blocks, scale * out_scale,
            D=dim, **QUERY_GRADIENT, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv


def _rows_descriptor(rows: Tensor) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK], gl.float32)
    return TensorDescriptor(rows, [rows.numel()], [1], [BLOCK], layout)


def _statistics(
    dout: Tensor, dlse: Tensor | None, out: Tensor | None, lse: Tensor, q_offsets: Tensor, max_q: int, query_blocks: int
) -> Tensor:
    """LSE in base 2 and delta of every query block, see `row_statistics`; without `out` only -dLSE of delta."""
    heads, dim = dout.shape[1:]
    rows = torch.empty(heads * query_blocks * 2 * BLOCK, dtype=torch.float32, device=dout.device)
    o = dout if out is None else flat(out)
    row_statistics[(triton.cdiv(max_q, BLOCK), q_offsets.shape[0] - 1)](
        o, dout, lse.contiguous(), lse if dlse is None else dlse.contiguous(), rows, q_offsets, query_blocks,
        o.stride(0), dout.stride(0), H=heads, D=dim, HAS_OUT=out is not None, HAS_DLSE=dlse is not None, num_warps=4,
    )  # fmt: skip
    return rows
