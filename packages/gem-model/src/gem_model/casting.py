"""All weights of a layer in autocast's dtype by one kernel, and their gradients back by another.

Autocast casts every weight and bias by itself, and autograd every gradient back: in a layer of GEM two hundred kernels,
of which most move a few kilobytes. Here a layer's parameters are exchanged for 16-bit copies while it runs. The same
numbers come out; the gradients of biases, too, pass through 16 bits, as autocast's do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from gem_kernels.nn import PMA
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_model.interaction import FactorizationMachine, TokenMix
from gem_model.projection import working_dtype

ALIGNMENT = 64  # numbers: every part of a common buffer begins at a multiple of 128 bytes
CAST: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight", "bias"),
    TokenMix: ("weight",),
    FactorizationMachine: ("compress",),
    PMA: ("queries",),
}


@contextlib.contextmanager
def cast_once(layer: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """While the block runs, what products of ``layer`` read is in the dtype that autocast asks for on x's device.

    Gives the block what it has cast, tensors of one buffer.

    Parameters that autocast leaves alone, other layers than those of `CAST` (a precision recipe's), and parameters that
    are no plain tensors (sharded ones) stay as they are.
    """
    dtype = working_dtype(x)
    places = _places(layer) if dtype.itemsize == 2 and not torch.compiler.is_compiling() else []
    if not places:
        yield ()
        return
    held = [module._parameters[name] for module, name in places]
    halves = _Cast.apply(dtype, *held)
    for (module, name), half in zip(places, halves, strict=True):
        module._parameters[name] = half
    try:
        yield halves
    finally:
        for (module, name), parameter in zip(places, held, strict=True):
            module._parameters[name] = parameter


def _places(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where the parameters to be cast are held; each parameter once."""
    found: dict[int, tuple[nn.Module, str]] = {}
    for module in layer.modules():
        for name in CAST.get(type(module), ()):
            parameter = module._parameters[name]
            if type(parameter) is nn.Parameter and parameter.dtype == torch.float32:
                if id(parameter) in found:
                    return []  # one that several share is cast where it is used, as ever
                found[id(parameter)] = (module, name)
    return list(found.values())


def _parts(like: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors of these shapes in one buffer."""
    sizes = [-(-p.numel() // ALIGNMENT) * ALIGNMENT for p in like]
    flat = torch.empty(sum(sizes), dtype=dtype, device=like[0].device)
    return [part[: p.numel()].view(p.shape) for part, p in zip(flat.split(sizes), like, strict=True)]


class _Cast(torch.autograd.Function):
    """Tensors in another dtype, all at once."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = parameters[0].dtype
        halves = _parts(parameters, dtype)
        torch._foreach_copy_(halves, parameters)
        return tuple(halves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = tuple(g.contiguous() for g in gradients if g is not None)
        if not found:
            return None, *gradients
        whole = _parts(found, ctx.dtype)
        torch._foreach_copy_(whole, found)
        back = iter(whole)
        return None, *(None if g is None else next(back) for g in gradients)
