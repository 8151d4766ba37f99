"""Operators: the short way of eager calls, and who still meets the custom operator."""

from __future__ import annotations

import pytest
import torch
from gem_kernels.operator import operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@operator("test_scaled")
def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


@scaled.register_fake
def _(x, factor):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    _, ctx.factor = inputs
    ctx.save_for_backward(output)


def _gradient(ctx, dy):
    (output,) = ctx.saved_tensors
    assert output.shape == dy.shape
    return scaled(dy, ctx.factor), None


scaled.register_autograd(_gradient, setup_context=_setup)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_both_ways_compute_the_same_with_gradients():
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    y = scaled(x, 3.0)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    with Seen() as seen:
        again = scaled(x, 3.0)
        (dx_again,) = torch.autograd.grad(again.square().sum(), x)
    assert seen.names.count("gem_kernels::test_scaled") == 2  # forward, and in the gradient
    assert torch.equal(y, again)
    assert torch.equal(dx, dx_again)
    torch.testing.assert_close(dx, 18 * x)


def test_a_gradient_is_not_differentiated_again():
    x = torch.randn(3, requires_grad=True)
    (dx,) = torch.autograd.grad(scaled(x, 2.0).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiat"):
        torch.autograd.grad(dx.sum(), x)


def test_compiled_graphs_hold_the_operator():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: scaled(x, 2.0) + 1, backend=backend, fullgraph=True)
    x = torch.randn(4, requires_grad=True)
    torch.testing.assert_close(compiled(x), 2 * x + 1)
    assert "test_scaled" in graphs[0].code


def test_eager_calls_meet_no_dispatcher(monkeypatch):
    """The custom operator is never reached, so its cost is not paid."""

    def reached(*_args):
        raise AssertionError("the custom operator was called")

    monkeypatch.setattr(scaled, "_custom", reached)
    x = torch.nn.Parameter(torch.randn(3))
    scaled(x, 2.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
