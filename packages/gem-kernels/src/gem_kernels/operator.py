"""Custom operators of torch, with a way around the dispatcher for plain eager calls.

A call of a custom operator from Python costs the host about 0.1 ms, and as much again in the backward pass: more than
launching the kernels. What it buys is needed by torch.compile, export, fake tensors and dispatch modes alone. So an
`Operator` called eagerly on plain tensors runs as a torch.autograd.Function of the same name and the same parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

PLAIN = (Tensor, nn.Parameter)


def _contiguous(run: Callable[..., Any]) -> Callable[..., Any]:
    """What compilers are promised by the fakes; eager callers may get views."""

    @functools.wraps(run)
    def promised(*args: Any) -> Any:
        out = run(*args)
        if isinstance(out, (tuple, list)):
            return type(out)(x.contiguous() if isinstance(x, Tensor) else x for x in out)
        return out.contiguous() if isinstance(out, Tensor) else out

    return promised


class Operator:
    """`gem_kernels::<name>`: calls like the function that it is made of; takes positional arguments alone."""

    def __init__(self, name: str, run: Callable[..., Any], schema: str | None = None) -> None:
        self.name, self._run = f"gem_kernels::{name}", run
        self._custom = torch.library.custom_op(self.name, _contiguous(run), mutates_args=(), schema=schema)
        self._apply: Callable[..., Any] = run

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """As of torch's custom operators: shapes and dtypes of what comes out."""
        return self._custom.register_fake(fake)

    def register_autograd(self, gradient: Callable[..., Any], *, setup_context: Callable[..., Any]) -> None:
        """As of torch's custom operators, but a gradient cannot be differentiated again."""
        self._custom.register_autograd(gradient, setup_context=setup_context)
        run = self._run

        def forward(ctx: Any, *args: Any) -> Any:
            out = run(*args)
            setup_context(ctx, args, out)
            return out

        parts = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(gradient))}
        self._apply = type(self.name, (torch.autograd.Function,), parts).apply  # type: ignore[attr-defined]

    def __call__(self, *args: Any) -> Any:
        """The operator where something looks on, the short way where nothing does."""
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return self._custom(*args)
        for x in args:
            if isinstance(x, Tensor) and type(x) not in PLAIN:
                return self._custom(*args)
        return self._apply(*args)


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Operator]:
    """Make a typed function of tensors the operator `gem_kernels::<name>`; a `schema` stands in for the types."""
    return lambda run: Operator(name, run, schema)
