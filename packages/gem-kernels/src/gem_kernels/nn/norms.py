"""Norms over the last dim, alone and before a projection."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from gem_kernels.late import LateProduct
from gem_kernels.norms import layer_norm, rms_norm
from gem_kernels.stream import norm_rows, norm_rows_twice


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in float32 for 16-bit inputs."""

    def __init__(self, dim: int, eps: float = 1e-6, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weight 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Any:
        """[..., C] -> [..., C] in x's dtype; with a residual, the norm of x + residual, and that sum."""
        return rms_norm(x, self.weight, eps=self.eps, residual=residual, residual_bias=residual_bias)

    def rows(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        offsets: Tensor | None = None,
        recent: int = 0,
        places: Tensor | None = None,
        others: Tensor | None = None,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `norm_rows`."""
        return norm_rows(
            x, self.weight, kind="rms", eps=self.eps, residual=residual, residual_bias=residual_bias, offsets=offsets,
            recent=recent, places=places, others=others, product=product,
        )  # fmt: skip

    def rows_twice(
        self,
        x: Tensor,
        residual: Tensor,
        residual_bias: Tensor | None,
        offsets: Tensor,
        recent: int,
        places: Tensor,
        others: Tensor,
        bare_eps: float,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """See `norm_rows_twice`."""
        return norm_rows_twice(
            x, self.weight, kind="rms", eps=self.eps, bare_eps=bare_eps, residual=residual,
            residual_bias=residual_bias, places=places, others=others, offsets=offsets, recent=recent,
            product=product,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shown in the module's repr."""
        return f"{self.dim}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm over the last dim, by `layer_norm`: computed in float32 and returned in x's dtype."""

    def __init__(self, dim: int, eps: float = 1e-5, *, device: torch.device | str | None = None) -> None:
        super().__init__(dim, eps, device=device)

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Any:
        """[..., C] -> [..., C] in x's dtype; with a residual, the norm of x + residual, and that sum."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps, residual=residual, residual_bias=residual_bias)

    def rows(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        residual_bias: Tensor | None = None,
        offsets: Tensor | None = None,
        recent: int = 0,
        places: Tensor | None = None,
        others: Tensor | None = None,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `norm_rows`."""
        return norm_rows(
            x, self.weight, self.bias, kind="layer", eps=self.eps, residual=residual, residual_bias=residual_bias,
            offsets=offsets, recent=recent, places=places, others=others, product=product,
        )  # fmt: skip


class NormLinear(nn.Module):
    """y = W norm(x) + b. One module, so that a recipe can fuse the norm into the projection's input quantisation.

    Args:
        in_features: width of x.
        out_features: width of y.
        bias: whether there is a b.
        norm: "rms" (`RMSNorm`) or "layer" (`LayerNorm`).
        eps: added to the mean square, or to the variance.

    Raises:
        ValueError: another norm.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        norm: Literal["rms", "layer"] = "rms",
        eps: float = 1e-6,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if norm not in ("rms", "layer"):
            raise ValueError(f"norm must be 'rms' or 'layer'; got {norm!r}")
        self.in_features, self.out_features = in_features, out_features
        self.norm: nn.Module
        if norm == "rms":
            self.norm = RMSNorm(in_features, eps, device=device)
        else:
            self.norm = LayerNorm(in_features, eps, device=device)
        self.linear = nn.Linear(in_features, out_features, bias, device=device)

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Any:
        """[..., in_features] -> [..., out_features]; with a residual, y of x + residual, and that sum in x's dtype.

        A `residual_bias` is one that the residual holds already: see `gem_kernels.rms_norm`.
        """
        if residual is None:
            return self.linear(self.norm(x))
        normal, total = self.norm(x, residual.to(x.dtype), residual_bias)
        return self.linear(normal), total
