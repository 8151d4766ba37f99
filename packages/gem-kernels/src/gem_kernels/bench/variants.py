"""Something to check and to time: an operator or a peer on given inputs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Run = Callable[..., Any]


def _tuple(outputs: Any) -> Outputs:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _cotangents(outputs: Outputs) -> Outputs:
    """N(0, 1) of a fixed seed, the same for every variant."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    like = [torch.randn(x.shape, device=x.device, generator=generator, dtype=torch.float32) for x in outputs]
    return tuple(g.bfloat16().to(x.dtype) for g, x in zip(like, outputs, strict=True))


class Variant:
    """Something to check and to time. The graph of the backward pass is built at the first call on a stream, since a
    backward runs on the stream of its forward.
    """

    def __init__(self, run: Run, inputs: Iterable[Tensor]) -> None:
        self.run, self.inputs = run, [x.detach() for x in inputs]  # strides are kept
        self.kept: dict[Any, tuple[list[Tensor], Outputs, Outputs]] = {}

    def forward(self) -> Outputs:
        """The outputs."""
        return _tuple(self.run(*self.inputs))

    def cotangents(self, outputs: Outputs) -> Outputs:
        """What the outputs' gradients are."""
        return _cotangents(outputs)

    def backward(self) -> Outputs:
        """The gradients of all inputs."""
        stream = torch.cuda.current_stream() if self.inputs[0].is_cuda else None
        if stream not in self.kept:
            leaves = [x.detach().requires_grad_() for x in self.inputs]
            outputs = _tuple(self.run(*leaves))
            self.kept[stream] = leaves, outputs, self.cotangents(outputs)
        leaves, outputs, cotangents = self.kept[stream]
        return torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)

    def do(self, what: str) -> Outputs:
        """`forward` or `backward`, by name."""
        return self.forward() if what == "forward" else self.backward()
