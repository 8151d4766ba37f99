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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.hopper import first_call
from gem_kernels.hopper import tiles as tile_lists
from gem_kernels.hopper.activations import slope_unit
from gem_kernels.hopper.backward import backward_kernel
from gem_kernels.hopper.bias_gradient import AHEAD, bias_gradient_kernel
from gem_kernels.hopper.first_call import Launch
from gem_kernels.hopper.launch import (
    LOG2E,
    _bias_arguments,
    descriptor,
    head_descriptor,
    on_its_device,
    padded,
    programs,
    readable,
)
from gem_kernels.hopper.pre_post import clear_without_keys, row_statistics
from gem_kernels.hopper.query_gradient import query_gradient_kernel
from gem_kernels.hopper.short_backward import short_backward_kernel
from gem_kernels.projections import side_by_side
from gem_kernels.schedule import TileShape

BLOCK = 64  # queries and keys of a block of dS
CONSUMERS = 4  # of `query_gradient_kernel`
LONGEST = 1 << 29  # bytes of dS of one head of a sequence: 16384 queries and keys
LONGEST_BIASED = BLOCK << 15  # queries of a sequence, where a record also tells where a bias begins
WHOLE = 1 << 16  # row groups of a tile that is a whole (sequence, head)


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """own: "keys" or "queries" for one kernel that does everything, where all sequences have at most 64 of them; else
    None: dK, dV and dS first, then dQ from dS, of which at most `workspace` bytes are kept at a time (None: a tenth of
    the GPU's memory), or twice what the longest sequence needs if that is more.
    """

    own: str | None = None
    workspace: int | None = None

    def fits(self, max_q: int, max_k: int, group: int = 1) -> bool:
        """Whether this configuration can do sequences of these lengths, with `group` query heads on a key head."""
        if self.own == "queries":  # which would have to keep dK and dV of a head until the others of its group are done
            return max_q <= BLOCK and group == 1
        return self.own is None or max_k <= BLOCK

    def consumers(self, dim: int, bias: bool = False) -> int:
        """Warpgroups of 64 keys: as many as the registers for their dK and dV, and a bias, allow."""
        return 3 if padded(dim) == 64 and not bias else 2

    def constants(
        self, dim: int, *, group: int, act: str, left: bool = False, right: bool = False, shared: bool = False,
        bias: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """The compile-time arguments of `backward_kernel` or `short_backward_kernel`."""
        common = {
            "D": padded(dim), "DIM": dim, "GROUP": group, "ACT": act, "LEFT": left, "RIGHT": right, "SHARED": shared
        }  # fmt: skip
        if self.own is not None:
            return {**common, "MS": 2, "OWN": self.own}
        three = self.consumers(dim, bias > 0) == 3
        return {
            **common, "BIAS": bias, "NC": 3 if three else 2, "QS": 4 if three else 3, "DS": 3 if three else 2,
            "REGS": 160 if three else 240, "LOADER_REGS": 32 if three else 24,
        }  # fmt: skip


BACKWARD = {
    "stream": BackwardConfig(),
    "short-keys": BackwardConfig(own="keys"),
    "short-queries": BackwardConfig(own="queries"),
}


def kernel_of(config: BackwardConfig) -> Any:
    """The kernel that a configuration's constants are for."""
    return short_backward_kernel if config.own else backward_kernel


def bias_arguments(bias: Tensor | None, other: Tensor) -> tuple[int, tuple[Any, ...]]:
    """The unit of the strides of a bias [B or 1, H or 1, max_q, max_k], 0 without one; then the bias (or `other`) and
    the strides of sequences, heads and rows in this unit, 0 where it is shared. 2 where its rows can be read in pairs
    of 16-bit numbers.
    """
    unit, arguments = _bias_arguments(bias, other)
    if bias is not None and unit == 2 and (bias.element_size() != 2 or bias.shape[3] % 2):
        return 1, (arguments[0], *(2 * x for x in arguments[1:]))
    return unit, arguments


def query_gradient_constants(dim: int, *, group: int, left: bool = False, right: bool = False) -> dict[str, Any]:
    """The compile-time arguments of `query_gradient_kernel`."""
    return {"D": padded(dim), "DIM": dim, "NC": CONSUMERS, "KS": 3, "GROUP": group, "LEFT": left, "RIGHT": right}


@functools.cache
def memory(device: torch.device) -> int:
    """Bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


def keys_in_sight(max_k: int, left: int, right: int) -> int:
    """The key blocks, of 64, that a block of 64 queries can see at most."""
    blocks = -(-max_k // BLOCK)
    if left < 0 or right < 0:
        return blocks
    return min(blocks, -(-(left + right + BLOCK - 1) // BLOCK) + 1)


def choose_backward(
    max_q: int, max_k: int, group: int = 1, left: int = -1, right: int = -1, bias: bool = False
) -> BackwardConfig | None:  # fmt: skip
    """The configuration for sequences of at most these lengths (docs/notes/hopper-attention.md); None, announced once:
    the portable Triton kernels, where dS of one head of a sequence would take more than `LONGEST` bytes.
    """
    for name in ("short-keys", "short-queries"):
        if BACKWARD[name].fits(max_q, max_k, group) and not bias:
            return BACKWARD[name]
    too_long = 2 * max_q * keys_in_sight(max_k, left, right) * BLOCK > LONGEST
    if too_long or (bias and max_q > LONGEST_BIASED):
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
    window of `step` numbers; their last one may lie `longest` - 1 behind it. A query block has places for `key_blocks`
    key blocks.
    """

    query_blocks: int
    key_blocks: int
    longest: int
    step: int

    @classmethod
    def plan(
        cls, total_q: int, batch: int, heads: int, max_q: int, max_k: int, limit: int, left: int = -1, right: int = -1
    ) -> Workspace:
        """As few windows as fit in `limit` bytes, but none shorter than the longest sequence."""
        query_blocks, key_blocks = total_q // BLOCK + batch, keys_in_sight(max_k, left, right)
        longest = -(-max_q // BLOCK)
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
    act: str, out_scale: float, left: int = -1, right: int = -1, config: BackwardConfig,
    bias: Tensor | None = None, bias_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV in the shapes of q, k, v: contiguous, or dK and dV side by side where K and V are. `out` and `lse` are
    needed for softmax only.

    `q_offsets=None`: q [L, H, D] serves every sequence, whose gradients are summed in a fixed order. `bias_grad`: where
    to write that of `bias`, contiguous; both with softmax and "stream" only.
    """
    group, batch = q.shape[1] // k.shape[1], k_offsets.shape[0] - 1
    assert config.fits(max_q, max_k, group)
    total = dout.shape[0]
    if side_by_side(k, v):
        dk, dv = torch.empty(k.shape[0], 2, *k.shape[1:], dtype=k.dtype, device=k.device).unbind(1)
    else:
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    if total == 0 or k.shape[0] == 0:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device), dk.zero_(), dv.zero_()
    dq = torch.empty(dout.shape, dtype=q.dtype, device=q.device)
    problem = _Problem(
        readable(dout), dlse, readable(q), readable(k), readable(v), out, lse,
        torch.arange(batch + 1, device=q.device) * q.shape[0] if q_offsets is None else q_offsets, k_offsets,
        max_q, max_k, scale, act, out_scale,
        min(left, max_q + max_k), min(right, max_q + max_k), group, q_offsets is None, bias, bias_grad,
    )  # fmt: skip
    run = _short if config.own else _stream
    run(problem, config, dq, dk, dv)
    if q_offsets is None:
        dq = dq.view(batch, *q.shape).sum(0, dtype=torch.float32).to(q.dtype)
    return dq, dk, dv


@dataclass(frozen=True)
class _Problem:
    """The arguments of `backward`, made ready: every tensor readable by TMA, offsets of the queries in any case."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor | None
    q_offsets: Tensor
    k_offsets: Tensor
    max_q: int
    max_k: int
    scale: float
    act: str
    out_scale: float
    left: int
    right: int
    group: int
    shared: bool
    bias: Tensor | None
    bias_grad: Tensor | None

    @property
    def masks(self) -> dict[str, bool]:
        """LEFT and RIGHT of the kernels, as the configurations name them."""
        return {"left": self.left >= 0, "right": self.right >= 0}

    @property
    def inner_scale(self) -> float:
        """What the kernels multiply scores with: they take powers of 2."""
        return self.scale * LOG2E if self.act == "softmax" else self.scale

    @property
    def gradient_scale(self) -> float:
        """The factor of dQ and dK: dS is in units of `slope_unit`."""
        return self.scale * self.out_scale * slope_unit(self.act)

    def constants(self, config: BackwardConfig) -> dict[str, Any]:
        """The compile-time arguments of the kernels of `config`."""
        return config.constants(
            self.q.shape[2], group=self.group, act=self.act, shared=self.shared, **self.masks
        )  # fmt: skip

    def workspace(self, limit: int | None) -> Workspace:
        """The plan of dS within `limit` bytes; None: a tenth of the GPU's memory."""
        total, heads = self.dout.shape[:2]
        return Workspace.plan(
            total, self.k_offsets.shape[0] - 1, heads, self.max_q, self.max_k,
            memory(self.q.device) // 10 if limit is None else limit, self.left, self.right,
        )  # fmt: skip

    def statistics(self, query_blocks: int, with_out: bool) -> tuple[Tensor, list[Launch]]:
        """LSE in base 2 and delta of every query block, see `row_statistics`, and the launch that fills them in;
        without O only -dLSE of delta. Nothing for an activation.
        """
        if self.act != "softmax":
            return torch.empty(BLOCK, device=self.q.device), []
        assert self.lse is not None
        dout, out = self.dout, self.out if with_out else None
        o = dout if out is None else out
        assert o.stride(2) == dout.stride(2) == 1
        heads, dim = dout.shape[1:]
        rows = torch.empty(heads * query_blocks * 2 * BLOCK, dtype=torch.float32, device=dout.device)
        grid = (-(-self.max_q // BLOCK), self.q_offsets.shape[0] - 1)
        arguments = (
            o, dout, self.lse.contiguous(), self.lse if self.dlse is None else self.dlse.contiguous(), rows,
            self.q_offsets, query_blocks, o.stride(0), dout.stride(0), o.stride(1), dout.stride(1),
        )  # fmt: skip
        constants = {
            "H": heads, "D": dim, "COLS": triton.next_power_of_2(dim),
            "HAS_OUT": out is not None, "HAS_DLSE": self.dlse is not None, "num_warps": 4,
        }  # fmt: skip
        return rows, [Launch(kernel=row_statistics, grid=grid, arguments=arguments, constants=constants)]


def _loads(p: _Problem, rows: Tensor) -> tuple[TensorDescriptor, ...]:
    statistics = descriptor(rows, [rows.numel()], [1], (BLOCK,))
    return (*(head_descriptor(x, BLOCK) for x in (p.q, p.k, p.v, p.dout)), statistics)


def _short(p: _Problem, config: BackwardConfig, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """Everything in one pass."""
    heads, dim = dq.shape[1:]
    batch = p.k_offsets.shape[0] - 1
    query_blocks = p.workspace(0).query_blocks
    tiles, listing = tile_lists.plan(
        p.k_offsets, p.q_offsets, p.k.shape[0], p.k.shape[1], TileShape(block=BLOCK, consumers=WHOLE, step=BLOCK)
    )
    rows, statistics = p.statistics(query_blocks, config.own != "keys")
    constants = p.constants(config)
    columns = {"HD": heads * dim, "COLS": triton.next_power_of_2(heads * dim), "ROWS": 4, "num_warps": 4}
    clear = Launch(
        kernel=clear_without_keys, grid=(batch,), arguments=(dq, p.q_offsets, p.k_offsets), constants=columns
    )  # fmt: skip
    whole = Launch(kernel=short_backward_kernel, grid=(2 * programs(dq.device),), arguments=(
        *_loads(p, rows), *(head_descriptor(x, BLOCK) for x in (dq, dk, dv)),
        dq, dk, dv, heads * dim, dk.stride(0), tiles.table, tiles.count, query_blocks, p.left, p.right,
        p.inner_scale, p.gradient_scale, p.out_scale, p.gradient_scale,
    ), constants={**constants, "num_warps": 4, "maxnreg": 128})  # fmt: skip
    key = ("short", p.q.dtype, heads, *constants.values())
    first_call.run([*listing, clear, *statistics, whole], key, dq.device)


def _stream(p: _Problem, config: BackwardConfig, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """dK, dV and dS, then dQ from dS and perhaps the bias's gradient, window by window."""
    heads, dim = dq.shape[1:]
    work = p.workspace(config.workspace)
    rows, statistics = p.statistics(work.query_blocks, True)
    loads = _loads(p, rows)
    dq_out, dk_out, dv_out = (head_descriptor(x, BLOCK) for x in (dq, dk, dv))
    shape = TileShape(block=BLOCK, consumers=config.consumers(dim, p.bias is not None), step=BLOCK)
    tiles, listing = tile_lists.plan(p.k_offsets, p.q_offsets, p.k.shape[0], p.k.shape[1], shape)
    shape = TileShape(block=BLOCK, consumers=CONSUMERS, step=BLOCK)
    dq_tiles, dq_listing = tile_lists.plan(p.q_offsets, p.k_offsets, dq.shape[0], heads, shape)
    blocks = heads * work.window_blocks * work.key_blocks
    dS = torch.empty(blocks * BLOCK, 1, BLOCK, dtype=dq.dtype, device=dq.device)
    ds, grid, masked = head_descriptor(dS, BLOCK), (programs(dq.device),), max(p.left, p.right) >= 0
    unit, bias = bias_arguments(p.bias, dk)
    constants = {**p.constants(config), "BIAS": unit, "num_warps": 4}
    dq_constants = {**query_gradient_constants(dim, group=p.group, **p.masks), "num_warps": 4}
    dbias = p.bias_grad
    if dbias is not None and dbias.shape[0] == 1 and len(work.windows) > 1:  # a sum over all of them
        dbias = torch.empty(dbias.shape, dtype=torch.float32, device=dbias.device)
    shared = None if dbias is None else (dbias.shape[0] == 1, dbias.shape[1] == 1)
    key = ("stream", p.q.dtype, heads, shared, *constants.values())
    launches = [*statistics, *listing, *dq_listing]
    for first, last in work.windows:
        window = (first, last, work.window_blocks, work.key_blocks, p.left, p.right)
        launches += [
            Launch(kernel=backward_kernel, grid=grid, constants=constants, arguments=(
                *loads, ds, dk_out, dv_out, dk, dv, dk.stride(0),
                tiles.table, tiles.count, tiles.cursor, p.k_offsets if masked else tiles.count,
                first, last, work.query_blocks, *window[2:], p.inner_scale, p.out_scale, p.gradient_scale, *bias,
            )),
            Launch(kernel=query_gradient_kernel, grid=grid, constants=dq_constants, arguments=(
                ds, loads[1], dq_out, dq, heads * dim,
                dq_tiles.table, dq_tiles.count, dq_tiles.cursor, p.q_offsets if masked else tiles.count,
                *window, p.gradient_scale,
            )),
        ]  # fmt: skip
        if dbias is not None:
            launches.append(_bias_gradient(p, dS, dbias, window))
    first_call.run(launches, key, dq.device)
    if p.bias_grad is not None and dbias is not None and dbias is not p.bias_grad:
        p.bias_grad.copy_(dbias)


def _bias_gradient(p: _Problem, dS: Tensor, dbias: Tensor, window: tuple[int, ...]) -> Launch:
    """What a window's dS adds to the bias's gradient; the first window's sets it."""
    own_batch, own_heads, max_q, max_k = dbias.shape
    tiles = -(-max_q // BLOCK) * -(-max_k // BLOCK)
    constants = {
        "HEADS": p.q.shape[1], "ALL_BATCH": own_batch == 1, "ALL_HEADS": own_heads == 1, "LEFT": p.left >= 0,
        "RIGHT": p.right >= 0, "ADD": own_batch == 1 and window[0] > 0, "AHEAD": AHEAD, "num_warps": 4,
    }  # fmt: skip
    batch = p.k_offsets.shape[0] - 1
    return Launch(kernel=bias_gradient_kernel, grid=(tiles * own_batch * own_heads,), constants=constants, arguments=(
        dS, dbias, p.q_offsets, p.k_offsets, batch, max_q, max_k, tiles, *window,
    ))  # fmt: skip
