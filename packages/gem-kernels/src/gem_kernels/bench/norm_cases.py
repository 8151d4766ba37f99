"""The cases of the norms suite: norms, rotary embedding, a norm folded into a projection, and jagged helpers, each with
what torch and others have for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels import flops, jagged, jagged_to_padded, norms, padded_to_jagged, sequences, testing
from gem_kernels.bench import cases
from gem_kernels.norm_linear import linear_norm, norm_linear
from gem_kernels.norms import triton as usual
from gem_kernels.rotary import reference as rotary_reference
from gem_kernels.rotary import rope
from gem_kernels.sequences import reference

ROWS, BATCH, LONGEST, HEADS = 2**18, 1152, 1024, 4
KEPT = 64  # tokens that most_recent keeps
EPS = 1e-6
COMPILED = ("rms-512", "rms-residual-512")  # with torch.compile beside them, as products are: it takes seconds for each

Run = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case on the device: `ours(*inputs, backend=...)`, and the peers' `run(*inputs)` by name."""

    name: str
    op: str
    width: int
    inputs: list[Tensor]
    cost: flops.Cost
    ours: Run
    eager: Run
    operator: str = "norms"  # the dispatch's name
    compiled: bool = False  # whether torch.compile of `eager` is a peer: building it takes seconds
    others: dict[str, Callable[[], Run]] = field(default_factory=dict)  # peers by name; ImportError if not installed
    backends: tuple[str, ...] = ("triton",)  # the first that runs here is measured
    variants: dict[str, Run] = field(default_factory=dict)  # of that backend, off by default: only where asked for


def _normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


def _liger(kind: str, residual: bool) -> Run:
    """Liger's function of the same name, leaving its inputs alone; ImportError where Liger is not installed."""
    if residual:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Add

        return lambda x, r, w: Add.apply(x, r, w, EPS, 0.0, "llama", False)
    if kind == "rms":
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Rms

        return lambda x, w: Rms.apply(x, w, EPS, 0.0, "llama", False)
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Layer

    return lambda x, w, b: Layer.apply(x, w, b, EPS)


class _WithBackward(torch.autograd.Function):
    """The usual forward pass with another backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, kind: str, swish: bool, other: Run
    ) -> Any:  # fmt: skip
        y, total = usual.forward(x, residual, weight, bias, kind, EPS, swish)
        ctx.residual = residual is not None
        ctx.save_for_backward(total if ctx.residual else x, weight, bias)
        ctx.rest = kind, EPS, swish
        ctx.other = other
        return (y, total) if ctx.residual else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> Any:
        dx, dweight, dbias = ctx.other(dy, dtotal, *ctx.saved_tensors, *ctx.rest)
        return dx, dx if ctx.residual else None, dweight, dbias, None, None, None


def _with(backward: Run, x: Tensor, residual: Tensor | None, affine: tuple[Tensor, ...], kind: str, swish: bool) -> Any:
    return _WithBackward.apply(x, residual, *affine, kind, swish, backward)


def _backwards(width: int, *, residual: bool, swish: bool) -> dict[str, Run]:
    """Other backward passes of a LayerNorm, off by default."""
    if width > 1024:
        return {}
    alone = functools.partial(usual.alone, width, extra=residual + swish)
    return {
        "1-warp": functools.partial(usual.backward, how=alone()),
        "1-warp-4-stages": functools.partial(usual.backward, how=alone(stages=4)),
    }


def _norm(
    name: str, kind: str, width: int, device: torch.device, shrink: int, *, rows: int = ROWS, residual: bool = False,
    swish: bool = False, packed: bool = False,
) -> Problem:  # fmt: skip
    """A norm of [rows, width], or (`packed`) of the heads of one of three projections in a row."""
    rows = max(5, rows // shrink)
    layer = kind == "layer"

    def make() -> Tensor:
        return _normal(device, rows, 3 * HEADS, width)[:, :HEADS] if packed else _normal(device, rows, width)

    inputs = [make() for _ in range(1 + residual)] + [1 + 0.1 * _normal(device, width) for _ in range(1 + layer)]

    def parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        return tensors[0], tensors[1] if residual else None, tensors[1 + residual :]

    def ours(*tensors: Tensor, backend: str | None) -> Any:
        x, r, affine = parts(tensors)
        function: Run = norms.layer_norm if layer else norms.rms_norm
        return function(x, *affine, eps=EPS, residual=r, swish=swish, backend=backend)

    def eager(*tensors: Tensor) -> Any:
        x, r, affine = parts(tensors)
        h = x if r is None else x + r
        function: Run = F.layer_norm if layer else F.rms_norm
        y = function(h, (width,), *affine, eps=EPS)
        y = h * torch.sigmoid(y) if swish else y
        return y if r is None else (y, h)

    cost = flops.norm(rows * (HEADS if packed else 1), width, layer=layer, residual=residual, weight_size=2)
    op = f"{kind}_norm{'+residual' if residual else ''}{'+swish' if swish else ''}"
    known = not swish and not (layer and residual)
    others: dict[str, Callable[[], Run]] = {"liger": functools.partial(_liger, kind, residual)} if known else {}
    variants: dict[str, Run] = {}
    if layer and not packed:
        variants = {
            variant: lambda *tensors, backward=backward: _with(backward, *parts(tensors), kind=kind, swish=swish)
            for variant, backward in _backwards(width, residual=residual, swish=swish).items()
        }
    return Problem(
        name=name, op=op, width=width, inputs=inputs, cost=cost, ours=ours, eager=eager, others=others,
        compiled=name in COMPILED, variants=variants,
    )  # fmt: skip


def _linear(name: str, inputs: int, outputs: int, device: torch.device, shrink: int) -> Problem:
    """RMSNorm and a projection of ROWS rows. "parts" is our norm, then cuBLAS; "liger" Liger's norm, then cuBLAS."""
    rows = ROWS // shrink
    weight = _normal(device, outputs, inputs) / inputs**0.5

    def parts() -> Run:
        return lambda x, gain, weight: F.linear(norms.rms_norm(x, gain, eps=EPS), weight)  # type: ignore[arg-type]

    def liger() -> Run:
        norm = _liger("rms", False)
        return lambda x, gain, weight: F.linear(norm(x, gain), weight)

    def other(stays: bool, x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:  # the forward pass alone
        from gem_kernels.norm_linear import hopper

        config = hopper.RESIDENT[-(-inputs // hopper.WIDE.bk)] if stays else hopper.WIDE
        return hopper.forward(x, gain, weight, None, EPS, config=config)

    return Problem(
        name=name, op="norm_linear", operator="norm_linear", width=inputs, compiled=True,
        others={"parts": parts, "liger": liger}, backends=("hopper", "triton"),
        variants={n: functools.partial(other, n == "resident") for n in ("resident", "streamed") if inputs <= 256},
        inputs=[_normal(device, rows, inputs), 1 + 0.1 * _normal(device, inputs), weight],
        cost=flops.norm_linear(rows, inputs, outputs),
        ours=lambda x, gain, weight, backend: norm_linear(x, gain, weight, eps=EPS, backend=backend),
        eager=lambda x, gain, weight: F.linear(F.rms_norm(x, (inputs,), gain, EPS), weight),
    )  # fmt: skip


def _after(name: str, inputs: int, outputs: int, device: torch.device, shrink: int) -> Problem:
    """A projection of ROWS rows and the RMSNorm of its result; peers as in `_linear`."""
    rows = ROWS // shrink
    weight = _normal(device, outputs, inputs) / inputs**0.5

    def parts() -> Run:
        return lambda x, weight, gain: norms.rms_norm(F.linear(x, weight), gain, eps=EPS)

    def liger() -> Run:
        norm = _liger("rms", False)
        return lambda x, weight, gain: norm(F.linear(x, weight), gain)

    return Problem(
        name=name, op="linear_norm", operator="norm_linear", width=inputs, compiled=True,
        others={"parts": parts, "liger": liger}, backends=("hopper", "triton"),
        inputs=[_normal(device, rows, inputs), weight, 1 + 0.1 * _normal(device, outputs)],
        cost=flops.norm_linear(rows, inputs, outputs, after=True),
        ours=lambda x, weight, gain, backend: linear_norm(x, weight, gain, eps=EPS, backend=backend),
        eager=lambda x, weight, gain: F.rms_norm(F.linear(x, weight), (outputs,), gain, EPS),
    )  # fmt: skip


def _rotary(name: str, dim: int, device: torch.device, shrink: int) -> Problem:
    """RoPE of ROWS tokens at positions up to 4096."""
    tokens = ROWS // shrink
    positions = torch.arange(tokens, device=device).remainder(4096).float()
    return Problem(
        name=name, op="rope", operator="rotary", width=dim, inputs=[_normal(device, tokens, HEADS, dim)],
        cost=flops.rotary(tokens, heads=HEADS, head_dim=dim),
        ours=lambda x, backend: rope(x, None, positions=positions, backend=backend),
        eager=lambda x: rotary_reference.rotate(x, positions, 1e4),
    )  # fmt: skip


def _padded(name: str, back: bool, width: int, device: torch.device, shrink: int) -> Problem:
    """Rows into a padded tensor or, `back`, out of one."""
    batch, longest = (BATCH, LONGEST) if shrink == 1 else (max(5, BATCH // shrink), 16)
    lengths = cases.half(batch, longest)
    offsets = testing.offsets_of(lengths.tolist(), device)
    total = int(lengths.sum())
    index = jagged.dense_index(offsets, total, longest)
    cost = flops.to_dense(lengths, longest=longest, width=width)

    def fbgemm() -> Run:
        import fbgemm_gpu  # noqa: F401 (registers torch.ops.fbgemm)

        ops = torch.ops.fbgemm
        if back:
            return lambda padded: ops.dense_to_jagged(padded, [offsets], total)[0]
        return lambda rows: ops.jagged_to_padded_dense(rows, [offsets], [longest], 0.0)

    shared: dict[str, Any] = {"name": name, "operator": "sequences", "width": width, "others": {"fbgemm": fbgemm}}
    if back:
        turned = flops.Cost(forward_flops=0, forward_bytes=cost.backward_bytes, backward_bytes=cost.forward_bytes)
        return Problem(
            **shared, op="padded_to_jagged", cost=turned, inputs=[_normal(device, batch, longest, width)],
            ours=lambda padded, backend: padded_to_jagged(padded, offsets, total, backend=backend),
            eager=lambda padded: jagged.unpad(padded, index),
        )  # fmt: skip
    return Problem(
        **shared, op="jagged_to_padded", cost=cost, inputs=[_normal(device, total, width)],
        ours=lambda rows, backend: jagged_to_padded(rows, offsets, longest, backend=backend),
        eager=lambda rows: jagged.pad(rows, index, batch, longest),
    )  # fmt: skip


def _helper(name: str, op: str, width: int, device: torch.device, shrink: int, kept: int = KEPT) -> Problem:
    """A jagged helper on lengths uniform in 1..LONGEST."""
    batch, longest = (BATCH, LONGEST) if shrink == 1 else (max(5, BATCH // shrink), 16)
    lengths = cases.half(batch, longest)
    other = lengths[::-1].copy()
    offsets, others = (testing.offsets_of(n.tolist(), device) for n in (lengths, other))
    total = int(lengths.sum())
    x = _normal(device, total, width)
    shared: dict[str, Any] = {"name": name, "op": op, "operator": "sequences", "width": width}
    if op == "most_recent":
        return Problem(
            **shared, inputs=[x], cost=flops.most_recent(lengths, k=kept, width=width),
            ours=lambda x, backend: sequences.most_recent(x, offsets, kept, backend=backend),
            eager=lambda x: reference.most_recent(x, offsets, kept),
        )  # fmt: skip
    if op == "jagged_add":
        return Problem(
            **shared, inputs=[x, _normal(device, len(lengths), width)], cost=flops.jagged_add(lengths, width=width),
            ours=lambda x, bias, backend: sequences.jagged_add(x, bias, offsets, backend=backend),
            eager=lambda x, bias: reference.add(x, bias, offsets),
        )  # fmt: skip
    cost = flops.jagged_concat(lengths, other, width=width)
    both = offsets + others
    if op == "jagged_split":
        return Problem(
            **shared, inputs=[_normal(device, 2 * total, width)], cost=cost,
            ours=lambda x, backend: sequences.jagged_split(x, offsets, others, total, backend=backend),
            eager=lambda x: reference.split(x, offsets, both, total),
        )  # fmt: skip
    return Problem(
        **shared, inputs=[x, _normal(device, total, width)], cost=cost,
        ours=lambda a, b, backend: sequences.jagged_concat(a, b, offsets, others, backend=backend)[0],
        eager=lambda a, b: reference.concat(a, b, offsets, both),
    )  # fmt: skip


_MAKE: dict[str, Callable[..., Problem]] = {  # in this order, so that a run that is cut short has the main ones
    **{
        f"norm-linear-{k}-{n}": functools.partial(_linear, inputs=k, outputs=n)
        for k, n in ((512, 512), (1024, 1024), (256, 256))
    },
    **{f"rms-{w}": functools.partial(_norm, kind="rms", width=w) for w in (256, 512, 1024)},
    "rms-4096": functools.partial(_norm, kind="rms", width=4096, rows=ROWS // 4),
    "rms-8192": functools.partial(_norm, kind="rms", width=8192, rows=ROWS // 8),
    **{f"layer-{w}": functools.partial(_norm, kind="layer", width=w) for w in (384, 512, 768, 1024)},
    "rms-residual-512": functools.partial(_norm, kind="rms", width=512, residual=True),
    "layer-residual-512": functools.partial(_norm, kind="layer", width=512, residual=True),
    "layer-residual-384": functools.partial(_norm, kind="layer", width=384, residual=True),
    "layer-swish-512": functools.partial(_norm, kind="layer", width=512, swish=True),
    "layer-512-few": functools.partial(_norm, kind="layer", width=512, rows=ROWS // 64),
    "qk-128": functools.partial(_norm, kind="rms", width=128, packed=True),
    **{f"rope-{dim}": functools.partial(_rotary, dim=dim) for dim in (64, 128)},
    "most-recent-256": functools.partial(_helper, op="most_recent", width=256),
    "most-recent-256-of-256": functools.partial(_helper, op="most_recent", width=256, kept=256),  # more than L2 holds
    "concat-256": functools.partial(_helper, op="jagged_concat", width=256),
    "split-256": functools.partial(_helper, op="jagged_split", width=256),
    "add-256": functools.partial(_helper, op="jagged_add", width=256),
    "to-padded-256": functools.partial(_padded, back=False, width=256),
    "from-padded-256": functools.partial(_padded, back=True, width=256),
    **{
        f"norm-linear-{k}-{n}": functools.partial(_linear, inputs=k, outputs=n)
        for k, n in ((256, 1024), (1024, 256), (512, 1024), (1024, 512), (256, 512), (512, 256))
    },
    **{f"linear-norm-{k}-256": functools.partial(_after, inputs=k, outputs=256) for k in (256, 512, 1024)},
}
NAMES = tuple(_MAKE)


def problem(name: str, device: torch.device, shrink: int = 1) -> Problem:
    """The case called `name` with fresh BF16 inputs, with `shrink` fewer rows for a trial; ValueError if unknown."""
    if name not in _MAKE:
        raise ValueError(f"unknown case {name!r}; expected one of {', '.join(NAMES)}")
    return _MAKE[name](name, device=device, shrink=shrink)
