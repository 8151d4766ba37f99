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

from gem_kernels.hopper import tiles as tile_lists
from gem_kernels.hopper.forward import forward_kernel
from gem_kernels.hopper.tiles import Tiles
from gem_kernels.schedule import TileShape

Run = TypeVar("Run", bound=Callable[..., Any])

LOG2E = 1.4426950408889634
_GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """`consumers` warpgroups of 64 query rows, `step` keys a step, `stages` buffers of K and of V.

    pipeline: "plain": one product after the other; "ahead": Q K^T of the next step together with P V; "across": so
        across tiles too.
    prefetch: so many of the next tile's last K and V rows are brought into L2 while a tile is computed.
    groups: row groups of a tile ("across" only); up to `stages` steps of K and V stay in shared memory for all of them.
    """

    consumers: int
    step: int
    stages: int
    pipeline: str
    groups: int = 1
    prefetch: int = 0

    @property
    def shape(self) -> TileShape:
        """The tile shape for the schedule."""
        return TileShape(consumers=self.consumers * self.groups, step=self.step)

    def constants(self, dim: int, *, group: int, act: str) -> dict[str, Any]:
        """The compile-time arguments of `forward_kernel`."""
        wide = self.consumers == 3
        return {
            "BN": self.step, "D": dim, "NC": self.consumers, "KS": self.stages, "QS": 2, "GROUP": group, "ACT": act,
            "PIPELINE": self.pipeline, "PREFETCH": self.prefetch, "REGS": 160 if wide else 240,
            "LOADER_REGS": 32 if wide else 24,
        }  # fmt: skip


FORWARD = {
    "3x128": ForwardConfig(consumers=3, step=128, stages=2, pipeline="plain"),
    "3x128-prefetch": ForwardConfig(consumers=3, step=128, stages=2, pipeline="plain", prefetch=512),
    "2x128-ahead": ForwardConfig(consumers=2, step=128, stages=2, pipeline="ahead"),
    "2x128-ahead-prefetch": ForwardConfig(consumers=2, step=128, stages=2, pipeline="ahead", prefetch=512),
    "3x64": ForwardConfig(consumers=3, step=64, stages=4, pipeline="plain"),
    "3x64-across-6": ForwardConfig(consumers=3, step=64, stages=4, pipeline="across", groups=6),
    "2x64-across-8": ForwardConfig(consumers=2, step=64, stages=4, pipeline="across", groups=8),
}


def choose_forward(rows_q: float, rows_k: float, softmax: bool) -> ForwardConfig:
    """The configuration for `rows_q` queries and `rows_k` keys on average (docs/notes/hopper-attention.md)."""
    if min(rows_q, rows_k) <= 64:  # learned queries, very short keys: bound by memory
        return FORWARD["3x64"]
    if min(rows_q, rows_k) < 384:
        return FORWARD["2x128-ahead" if softmax else "3x64"]
    return FORWARD["3x128"]


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


def flat(x: Tensor) -> Tensor:
    """`x` [T, H, D], copied only if heads are not side by side or TMA cannot address the rows."""
    aligned = x.stride(0) * x.element_size() % 16 == 0 and x.stride(0) > 0 and x.data_ptr() % 16 == 0
    if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1) and aligned:
        return x
    return x.contiguous()


def descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of `x` [T, H, D] seen as [T, H * D], in blocks of `rows` rows of one head."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, x.shape[2]], _GL_DTYPES[x.dtype])
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]], layout)


@on_its_device
def forward(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int, scale:
        float, *,
    act: str, out_scale: float, config: ForwardConfig | None = None, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """O [Tq, H, D] and LSE [Tq, H] (empty unless `act` is "softmax"). `q_offsets=None`: q [L, H, D] serves every
    sequence.
    """
    batch = k_offsets.shape[0] - 1
    heads, dim = q.shape[1:]
    total = q.shape[0] * (1 if q_offsets is not None else batch)
    out = torch.empty(total, heads, dim, dtype=q.dtype, device=q.device)
    softmax = act == "softmax"
    lse = torch.empty(total if softmax else 0, heads, dtype=torch.float32, device=q.device)
    if total == 0:
        return out, lse
    if k.shape[0] == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = flat(q), flat(k), flat(v)
    if config is None:
        config = choose_forward(total / batch, k.shape[0] / batch, softmax)
    if tiles is None:
        own = q_offsets if q_offsets is not None else torch.arange(2, device=q.device) * q.shape[0]
        tiles = tile_lists.build(own, k_offsets, total, heads, config.shape, shared_own=q_offsets is None)
    forward_kernel[(programs(q.device),)](
        descriptor(q, 64), descriptor(k, config.step), descriptor(v, config.step), descriptor(out, 64),
        q, k, v, out, q.stride(0), k.stride(0), v.stride(0), out.stride(0),
        lse, heads, tiles.table, tiles.count, scale * LOG2E if softmax else scale, out_scale,
        **config.constants(dim, group=heads // k.shape[1], act=act), num_warps=4,
    )  # fmt: skip
    return out, lse
