"""Linear layers whose readers make the gradient of a bias, or add what is added anyway, in passing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gem_kernels import LateProduct, layer_norm
from gem_kernels.nn import NormLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def working_dtype(x: Tensor) -> torch.dtype:
    """What matrix products of ``x`` come out in: autocast's dtype where it is on, else its own."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


ALIGNED = 8  # numbers of 16 bits that a matrix product wants to read at once


def unaligned(count: int, x: Tensor) -> int:
    """How many zeros a sum over ``count`` numbers like x lacks, for a product to read whole words.

    Only where it matters: 16-bit products on a GPU, which are several times slower otherwise.
    """
    return -count % ALIGNED if x.is_cuda and working_dtype(x).itemsize == 2 else 0


class WithBias(torch.autograd.Function):
    """x [T, C], which holds the bias [C] already: its gradient is the sum of x's, as a linear layer makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        """x itself."""
        ctx.dtype = bias.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of x as it is, and its columns' sums."""
        return dx, dx.sum(0).to(ctx.dtype)


def with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """x, which was made with ``bias.detach()``: gradients reach the bias as well."""
    return x if bias is None else WithBias.apply(x, bias)  # type: ignore[no-any-return]


def hooked(module: nn.Module) -> bool:
    """Whether somebody watches this module's calls, so that they must not be passed by."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def plain(*linears: nn.Module) -> bool:
    """Whether the layers' weights may be used in the place of the layers: those of a precision recipe make all
    themselves, and those that somebody watches are called as they are.
    """
    return all(type(linear) is nn.Linear and not hooked(linear) for linear in linears)


def linear_of(linear: nn.Module, columns: list[Tensor]) -> Tensor:
    """linear(columns side by side), [T, .] each, with zeros behind them where the product wants them."""
    extra = unaligned(sum(c.shape[1] for c in columns), columns[0]) if plain(linear) else 0
    if not extra:
        return linear(torch.cat(columns, dim=1))  # type: ignore[no-any-return]
    x = torch.cat([*columns, columns[0].new_zeros(columns[0].shape[0], extra)], dim=1)
    return F.linear(x, F.pad(linear.weight, (0, extra)), linear.bias)  # type: ignore[arg-type]


def late_product(linear: nn.Module, like: Tensor) -> LateProduct | None:
    """The layer's product with rows of like's dtype, for whoever makes these rows; None where the layer makes its
    gradients itself, or autocast would have the product in another dtype.
    """
    if not plain(linear) or like.dtype != working_dtype(like):
        return None
    return LateProduct(linear.weight.to(like.dtype))  # type: ignore[union-attr, operator, arg-type]


def project(linear: nn.Module, x: Tensor, late: LateProduct | None = None) -> tuple[Tensor, Tensor | None]:
    """linear(x), and the layer's bias where its gradient is still to be made by whoever reads the result: a sum over a
    gradient [T, out] is best made where that gradient is written. `late`: the layer's, which x was made with.
    """
    if not plain(linear) or linear.bias is None:
        return (linear(x) if late is None else late(x)), None
    if late is not None:
        return late(x, linear.bias.detach().to(x.dtype)), linear.bias  # type: ignore[operator, union-attr, return-value]
    return F.linear(x, linear.weight, linear.bias.detach()), linear.bias  # type: ignore[arg-type, return-value, operator]


def project_bare(
    layer: NormLinear, bare: Tensor, tokens: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """What a projection behind a LayerNorm makes of rows that are normed but for the norm's weight and bias, and a bias
    as :func:`project` gives it: W (g * x + h) + b = (W g) x + (W h + b). With the `tokens` whose LayerNorm with `eps`
    they are, the bare rows are not kept, but had from these again.
    """
    weight, bias = folded(layer)
    if tokens is None or bare.dtype != working_dtype(bare):
        return F.linear(bare, weight, bias.detach()), bias
    given = (weight.to(bare.dtype), bias.detach().to(bare.dtype), tokens.detach(), eps)
    return _BareProduct.apply(bare, *given), bias  # type: ignore[no-any-return]


def folded(layer: NormLinear) -> tuple[Tensor, Tensor]:
    """Weight and bias of a projection that has taken over those of the LayerNorm before it."""
    norm, linear = layer.norm, layer.linear
    return _Folded.apply(linear.weight, linear.bias, norm.weight, norm.bias)  # type: ignore[no-any-return]


class _BareProduct(torch.autograd.Function):
    """n W^T + b [T, out] of n = LayerNorm(tokens) without weight and bias [T, C], which is normed again for dW; no
    gradient of b.
    """

    @staticmethod
    def forward(ctx: Any, bare: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(weight, tokens, bias)  # the bias for whoever computes the product again
        ctx.eps = eps
        return F.linear(bare, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, tokens, _ = ctx.saved_tensors
        dbare = dout @ weight
        bare = layer_norm(tokens, eps=ctx.eps)
        assert isinstance(bare, Tensor)
        return dbare, dout.t() @ bare, None, None, None


class _Folded(torch.autograd.Function):
    """W g [out, in] and W h + b [out], of W [out, in], b [out], g [in] and h [in], in W's dtype."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, b: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        ctx.dtypes = g.dtype, h.dtype
        g, h = g.to(w.dtype), h.to(w.dtype)
        ctx.save_for_backward(w, g, h)
        return w * g, torch.addmv(b.to(w.dtype), w, h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweight: Tensor, dbias: Tensor) -> tuple[Tensor, ...]:
        w, g, h = ctx.saved_tensors
        total = torch.promote_types(w.dtype, torch.float32)
        dg, dh = (dweight * w).sum(0, dtype=total), torch.mv(w.t(), dbias)
        return torch.addr(dweight * g, dbias, h), dbias, dg.to(ctx.dtypes[0]), dh.to(ctx.dtypes[1])


def project_both(
    first: nn.Module, x: Tensor, second: nn.Module, y: Tensor, late: LateProduct | None = None
) -> tuple[Tensor, Tensor | None]:
    """first(x) + second(y) for rows [T, .], and what is left of the biases' gradients, as :func:`project`, also for
    `late`, the first layer's.

    The second product adds to the first where that lies, and one product makes both inputs' gradients: the sum costs no
    pass over memory of its own.
    """
    if not plain(first, second) or first.bias is None or second.bias is None or x.dtype != y.dtype:
        (a, bias), (b, other) = project(first, x, late), project(second, y)
        return a + b, other if bias is None else bias if other is None else bias + other
    bias = first.bias + second.bias  # type: ignore[operator]
    given = (x, y, first.weight, second.weight, bias.detach())
    late = late if late is not None and late.taken else None
    return _Both.apply(*(t.to(working_dtype(x)) for t in given), late), bias  # type: ignore[union-attr]


class _Both(torch.autograd.Function):
    """x W^T + y V^T + b, for x [T, a], y [T, c], W [out, a] and V [out, c]; no gradient of b. With `late`, whoever
    made x makes the gradient of W, and x is not kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, w: Tensor, v: Tensor, bias: Tensor, late: LateProduct | None
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if late is None else None, y, torch.cat((w, v), dim=1))
        ctx.late, ctx.split = late, x.shape[1]
        out = F.linear(x, w, bias)
        return torch.addmm(out, y, v.t(), out=out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, y, both = ctx.saved_tensors
        dx, dy = (dout @ both).split((ctx.split, y.shape[1]), dim=1)
        if ctx.late is not None and ctx.needs_input_grad[2]:
            ctx.late.leave(dout)
        return dx, dy, None if x is None else dout.t() @ x, dout.t() @ y, None, None


def taken(x: Tensor, places: Tensor, others: Tensor) -> Tensor:
    """x[places], [T, C] of [T + N, C], where no place comes twice and `others` [N] are the rest: a gradient by a copy,
    where indexing adds to zeros.
    """
    return _Taken.apply(x, places, others)  # type: ignore[no-any-return]


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, others: Tensor) -> Tensor:
        ctx.save_for_backward(places, others)
        return x.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        places, others = ctx.saved_tensors
        dx = dout.new_empty(places.shape[0] + others.shape[0], dout.shape[1])
        return dx.index_copy_(0, places, dout).index_fill_(0, others, 0), None, None


def project_apart(linear: nn.Module, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """linear(x) [T, out] with the bias as :func:`project` gives it, and its rows `others` [N] by themselves.

    What comes back for these rows is added where the product has made the gradient of x, not to a gradient of all rows.
    """
    if not plain(linear) or linear.bias is None:
        out, rest = _Apart.apply(linear(x), others)
        return out, None, rest
    given = (x, linear.weight, linear.bias.detach())  # type: ignore[operator]
    out, rest = _ProjectApart.apply(*(t.to(working_dtype(x)) for t in given), others)  # type: ignore[union-attr]
    return out, linear.bias, with_bias(rest, linear.bias)  # type: ignore[return-value, arg-type]


class _Apart(torch.autograd.Function):
    """x [T, C], and its rows `others`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(others)
        return x.view_as(x), x.index_select(0, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, drest: Tensor) -> tuple[Tensor, None]:
        (others,) = ctx.saved_tensors
        return dx.index_add(0, others, drest), None


class _ProjectApart(torch.autograd.Function):
    """x W^T + b [T, out], and its rows `others`; no gradient of b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w, others)
        out = F.linear(x, w, bias)
        return out, out.index_select(0, others)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, drest: Tensor) -> tuple[Tensor | None, ...]:
        x, w, others = ctx.saved_tensors
        dx, dw = dout @ w, dout.t() @ x
        return dx.index_add_(0, others, drest @ w), dw.addmm_(drest.t(), x.index_select(0, others)), None, None
