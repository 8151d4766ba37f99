"""Regions under torch.compile, each with a budget of its own for the partitioner.

Where torch has `torch.autograd.graph.region_activation_memory_budget`, the budget is an annotation of the traced
region; before, and where torch refuses it, `torch._functorch.config.activation_memory_budget` is patched around the
region's compilation. Either way a region is compiled from a code object of its own: Dynamo keeps compiled code by code
object, and equal blocks would otherwise share the first one's budget.

With a budget below 1, torch (2.11 to 2.13) draws random numbers anew when it recomputes, and the gradients of dropout
are wrong. A region that draws any is therefore compiled without a budget, and kept whole or recomputed whole, by the
checkpoint that puts the generators back.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gem_parallel.memory.costs import declare_kernels
from gem_parallel.memory.profile import Curve, Point, count_saved, tensor_bytes
from gem_parallel.memory.recompute import Function

BACKEND = "inductor"
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
_ANNOTATION = "region_activation_memory_budget"  # in torch's messages about it
_number = itertools.count()
_said: set[str] = set()


def has_region_api() -> bool:
    """Whether this torch can annotate a region with its budget."""
    return hasattr(torch.autograd.graph, "region_activation_memory_budget")


def compile_region(
    function: Function, budget: float, backend: str | None = None, quantise_kib: float | None = None
) -> Function:
    """`function`, compiled so that its backward keeps about `budget` of what it would keep by default.

    With `quantise_kib`, torch's pass stores what is kept of at least that size, but inputs and weights, as scaled E4M3.

    Raises:
        ValueError: a budget outside [0, 1].
        RuntimeError: at the first call, with a budget below 1: the region draws random numbers.
    """
    backend = backend or BACKEND
    if not 0 <= budget <= 1:
        raise ValueError(f"a region's activation budget must be in [0, 1], got {budget}")
    declare_kernels()

    def annotated(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.region_activation_memory_budget(budget):
            return function(*args, **kwargs)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    compiled = [_compile(annotated if has_region_api() and budget < 1 else plain, backend)]
    checked = [budget == 1]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not checked[0]:
            if draws(function, args, kwargs):
                raise RuntimeError(
                    f"a region with an activation budget of {budget:g} draws random numbers (dropout), which torch "
                    "would draw anew when it recomputes; compile it with a budget of 1"
                )
            checked[0] = True
        with functorch_config.patch(activation_memory_budget=budget), _quantised(quantise_kib):
            try:
                return compiled[0](*args, **kwargs)
            except Exception as error:
                if _ANNOTATION not in str(error):
                    raise
                reason = " ".join(str(error).split()).partition(_ANNOTATION)[2][:300]
                _say_once(f"torch refuses to annotate a region, its configuration is used: {reason}")
            compiled[0] = _compile(plain, backend)
            return compiled[0](*args, **kwargs)

    return call


def draws(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call moves a random generator; a trial leaves them where they were."""
    devices = sorted({t.device.index for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_cuda})

    def states() -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]

    with torch.random.fork_rng(devices), torch.no_grad():
        before = states()
        function(*args, **kwargs)
        return any(not torch.equal(a, b) for a, b in zip(before, states(), strict=True))


def _say_once(text: str) -> None:
    """Python's own filter forgets what it showed whenever someone catches warnings, as the compiler does."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=3)


def _compile(region: Any, backend: str) -> Function:
    """Under a code object of its own."""
    assert isinstance(region, FunctionType)
    region.__code__ = region.__code__.replace(co_name=f"region_{next(_number)}")
    compiled: Function = torch.compile(region, backend=backend)
    return compiled


def _quantised(kib: float | None) -> Any:
    """torch's activation quantisation while a region is compiled."""
    if kib is None:
        return nullcontext()
    import torch._inductor.config as inductor_config

    options = {
        "quant_type": "torch.float8_e4m3fn",
        "size_in_mb": kib / 1024,
        "use_scaling": True,
        "exclude_primals": True,
        "allowed_dtypes": "torch.float32;torch.bfloat16;torch.float16",
    }
    more = {**inductor_config.post_grad_fusion_options, "activation_quantization_aten_pass": options}
    return inductor_config.patch(post_grad_fusion_options=more)


def measure(
    region: str,
    function: Function,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    module: nn.Module,
    budgets: Sequence[float] = BUDGETS,
    repeats: int = 3,
    backend: str | None = None,
    quantise_kib: float | None = None,
) -> tuple[Curve, dict[float, Function]]:
    """A compiled region's curve from runs on its real inputs, and the compiled functions by budget.

    A budget that keeps as much as a faster one is no point of the curve. A region that draws random numbers is kept
    whole or recomputed whole. Parameters' gradients are left alone.
    """
    inputs = tensor_bytes((args, kwargs))
    random = draws(function, args, kwargs)
    budgets = (1.0,) if random else budgets
    compiled = {budget: compile_region(function, budget, backend, quantise_kib) for budget in budgets}
    times: dict[float, float] = {}
    kept: dict[float, int] = {}
    forward_s = 0.0
    for budget, call in compiled.items():
        kept[budget] = max(count_saved(call, args, kwargs, module), inputs if budget == 0 else 0)
        took = [_step(call, args, kwargs, module) for _ in range(1 + repeats)][1:]  # the first one compiles backward
        times[budget] = min(whole for whole, _ in took)
        forward_s = min(forward for _, forward in took)
    fastest = min(times.values())
    points: list[Point] = []
    for budget in sorted(budgets, key=lambda b: (kept[b], times[b])):
        point = Point(
            kept=kept[budget], seconds=times[budget] - fastest, names=None, budget=budget, working=max(kept.values())
        )
        if not points or point.seconds < points[-1].seconds:
            points.append(point)
    if random:
        points.insert(0, Point(kept=inputs, seconds=forward_s, names=(), working=max(kept.values())))
    return Curve(region=region, points=tuple(points), forward_s=forward_s), compiled


def _step(call: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module) -> tuple[float, float]:
    """Seconds of forward and backward, and of the forward alone."""

    def leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    args, kwargs = tree_map(leaf, (args, dict(kwargs)))
    began = _now()
    out = call(*args, **kwargs)
    middle = _now()
    outputs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    wanted = [t for t in (*tree_leaves((args, kwargs)), *module.parameters()) if isinstance(t, torch.Tensor)]
    wanted = [t for t in wanted if t.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)
    return _now() - began, middle - began


def _now() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
