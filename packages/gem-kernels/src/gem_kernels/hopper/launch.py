"""Host side of the Hopper forward: configurations, the choice among them, descriptors and launches;
`launch_backward` is the backward's. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels.hopper import first_call
from gem_kernels.hopper import tiles as tile_lists
from gem_kernels.hopper.first_call import Launch
from gem_kernels.hopper.forward import forward_kernel
from gem_kernels.hopper.tiles import Tiles
from gem_kernels.schedule import TileShape

Run = TypeVar("Run", bound=Callable[..., Any])

LOG2E = 1.4426950408889634
_GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """`consumers` warpgroups of 64 query rows, `step` keys a step, `stages` buffers of K and of V.

    turns: the consumers take blocks in turn, so that none is idle for long where tiles have few of them; that needs
    stages to be ahead by.
    lean: K and V of a step share barriers, and rows are reduced with less waiting (`consumers`).
    once: a block has one step (`once`): for at most `step` keys a sequence, without masks and biases.
    halves: weights of half a step's keys are made under the product of the other half's (`halves`), and addresses of
    stores where they are used (`consumers`): not with masks or biases, and not at head dimensions from 65 to 96, whose
    scores are two products.
    """

    consumers: int
    step: int
    stages: int
    turns: bool = False
    lean: bool = False
    once: bool = False
    halves: bool = False

    @property
    def shape(self) -> TileShape:
        """The tile shape for the schedule."""
        return TileShape(consumers=self.consumers, step=self.step)

    def fits(self, dim: int, max_k: int, *, masked: bool = False, bias: bool = False) -> bool:
        """Whether this configuration can do head dimension `dim` and sequences of up to `max_k` keys."""
        if self.once and max_k > self.step:
            return False
        if self.halves and 64 < dim <= 96:
            return False
        return not (self.once or self.halves) or not (masked or bias)

    def constants(
        self, dim: int, *, group: int, act: str, left: bool = False, right: bool = False, shared: bool = False,
        bias: int = 0, residual: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """The compile-time arguments of `forward_kernel`."""
        return {
            "BN": self.step, "D": padded(dim), "DIM": dim, "NC": self.consumers, "KS": self.stages,
            "QS": 2, "TURNS": self.turns, "GROUP": group, "ACT": act, "LEFT": left, "RIGHT": right, "SHARED": shared,
            "REGS": 160, "LOADER_REGS": 32, "LEAN": self.lean, "ONCE": self.once,
            "BIAS": bias, "RESIDUAL": residual, "HALVES": self.halves,
        }  # fmt: skip


FORWARD = {
    "3x128": ForwardConfig(consumers=3, step=128, stages=2),
    "3x128-lean": ForwardConfig(consumers=3, step=128, stages=2, lean=True),
    "3x128-halves": ForwardConfig(consumers=3, step=128, stages=2, halves=True),
    "3x64": ForwardConfig(consumers=3, step=64, stages=4, turns=True, lean=True),
    "3x64-halves": ForwardConfig(consumers=3, step=64, stages=4, turns=True, lean=True, halves=True),
    "3x64-once": ForwardConfig(consumers=3, step=64, stages=4, turns=True, once=True),
}


def choose_forward(
    rows_q: float, rows_k: float, max_q: int, max_k: int,
    *, dim: int, softmax: bool, masked: bool, bias: bool = False,
) -> ForwardConfig:  # fmt: skip
    """The configuration for `rows_q` queries and `rows_k` keys on average (docs/notes/hopper-attention.md).

    Steps of 64 keys for short keys where lengths differ (with an activation: those of keys), so that tiles end or have
    fewer blocks than there are consumers, and where memory is the bound anyway (learned queries, very short keys);
    elsewhere 128. Softmax in halves, where that can be: an activation has too little to hide.
    """
    if FORWARD["3x64-once"].fits(dim, max_k, masked=masked, bias=bias):
        return FORWARD["3x64-once"]
    if bias:  # which takes registers
        return FORWARD["3x64"]
    if masked:
        return FORWARD["3x128-lean"]
    ragged = rows_k < 0.75 * max_k or (softmax and rows_q < 0.75 * max_q)
    name = "3x64" if min(rows_q, rows_k) <= 64 or (ragged and max_k <= 512) else "3x128"
    halves = FORWARD[f"{name}-halves"]
    return halves if softmax and halves.fits(dim, max_k) else FORWARD[name]


@functools.cache
def programs(device: torch.device) -> int:
    """Programs of a persistent launch: one for each SM."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_its_device(run: Run) -> Run:
    """Launch where the first argument lies: Triton launches on the current device."""

    @functools.wraps(run)
    def wrapped(first: Tensor, *args: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first):
            return run(first, *args, **options)

    return cast(Run, wrapped)


def padded(dim: int) -> int:
    """The width that a head is read with: what is over is 0."""
    return 64 if dim <= 64 else 128


def _addressable(x: Tensor) -> bool:
    """Whether TMA can read the rows of `x` [T, H, D]."""
    size = x.element_size()
    return (
        x.stride(2) == 1
        and x.stride(0) > 0
        and x.stride(0) * size % 16 == 0
        and (x.shape[1] == 1 or (x.stride(1) > 0 and x.stride(1) * size % 16 == 0))
        and x.data_ptr() % 16 == 0
    )


def readable(x: Tensor) -> Tensor:
    """`x` [T, H, D], copied only if TMA cannot read its rows."""
    return x if _addressable(x) else x.contiguous()


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(shape), _GL_DTYPES[dtype])


def head_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of `x` [T, H, D] in blocks of `rows` rows of one head, D filled up with zeros to `padded(D)`."""
    strides = [x.stride(0), x.stride(1) if x.shape[1] > 1 else x.shape[2], 1]
    return descriptor(x, list(x.shape), strides, (rows, 1, padded(x.shape[2])))


def descriptor(x: Tensor, shape: list[int], strides: list[int], block: tuple[int, ...]) -> TensorDescriptor:
    """Made without the checks of its constructor, of which a call would pay for up to ten: `readable` is stricter."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, shape, strides
    made.block_shape, made.layout, made.padding = list(block), _layout(block, x.dtype), "zero"
    return made


def _bias_arguments(bias: Tensor | None, other: Tensor) -> tuple[int, tuple[Any, ...]]:
    """The unit of the strides of a bias [B or 1, H or 1, max_q, max_k]: 2 where its rows can be read in pairs, else 1,
    or 0 without a bias; then the bias (or `other`) and these strides, 0 where it is shared.
    """
    if bias is None:
        return 0, (other, 0, 0, 0)
    if bias.stride(3) != 1:
        bias = bias.contiguous()
    strides = [bias.stride(i) if bias.shape[i] > 1 else 0 for i in range(3)]
    unit = 2 if all(x % 2 == 0 for x in strides) and bias.data_ptr() % 16 == 0 else 1
    return unit, (bias, *(x // unit for x in strides))


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int, scale: float,
    *, act: str, out_scale: float, left: int = -1, right: int = -1, config: ForwardConfig | None = None,
    tiles: Tiles | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H] (empty unless `act` is "softmax"). `q_offsets=None`: q [L, H, D] serves every
    sequence. `residual`, shaped as O, is added to it, with an activation only.
    """
    assert residual is None or act != "softmax"
    batch = k_offsets.shape[0] - 1
    length, heads, dim = q.shape
    shared = q_offsets is None
    total = length * batch if shared else length
    softmax = act == "softmax"
    out = torch.empty(total, heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(total if softmax else 0, heads, dtype=torch.float32, device=q.device)
    if total == 0:
        return out, lse
    if k.shape[0] == 0:
        return (out.zero_() if residual is None else out.copy_(residual)), lse.fill_(float("-inf"))
    q, k, v = readable(q), readable(k), readable(v)
    masked = left >= 0 or right >= 0
    config = config or choose_forward(
        total / batch, k.shape[0] / batch, max_q, max_k, dim=dim, softmax=softmax, masked=masked, bias=bias is not None
    )
    assert config.fits(dim, max_k, masked=masked, bias=bias is not None)
    own = torch.arange(2, device=q.device) * length if q_offsets is None else q_offsets
    launches: list[Launch] = []
    if tiles is None:
        tiles, launches = tile_lists.plan(own, k_offsets, total, heads, config.shape, shared_own=shared)
    unit, bias_arguments = _bias_arguments(bias, out)
    constants = config.constants(
        dim, group=heads // k.shape[1], act=act, left=left >= 0, right=right >= 0, shared=shared and masked, bias=unit,
        residual=residual is not None,
    )  # fmt: skip
    k_short, v_short = head_descriptor(k, 64), head_descriptor(v, 64)
    k_desc, v_desc = (k_short, v_short) if config.step == 64 else (head_descriptor(x, config.step) for x in (k, v))
    launches.append(Launch(kernel=forward_kernel, grid=(programs(q.device),), arguments=(
        head_descriptor(q, 64), k_desc, v_desc, k_short, v_short, head_descriptor(out, 64), out, lse, heads,
        tiles.table, tiles.count, tiles.cursor, own if masked else tiles.count,
        scale * LOG2E if softmax else scale, out_scale, out if residual is None else residual.contiguous(), left, right,
        *bias_arguments, max_q, max_k,
    ), constants={**constants, "num_warps": 4}))  # fmt: skip
    first_call.run(launches, ("forward", q.dtype, *constants.values()), q.device)
    return out, lse
