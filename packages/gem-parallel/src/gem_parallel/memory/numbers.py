"""Random numbers of a region that runs twice inside a CUDA graph.

While a graph is captured no generator can be asked where it stands, and none be put back: it only counts on from where
the replay will begin. So the numbers that the forward pass draws are kept, and the second run is handed them. What a
backward graph computes again then draws nothing, the generator stands where it would without recomputation, and each
replay, whose forward pass draws anew, computes again with its own numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

KEPT = frozenset((torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like))
# Their results hold what a gradient flows through, or they write in place: to hand them out again would be wrong.
REFUSED = frozenset(
    (
        *(functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, functional.rrelu),
        *(functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.gumbel_softmax),
        *(torch.dropout, torch.native_dropout, torch.bernoulli, torch.normal, torch.multinomial, torch.randperm),
        *(torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.uniform_, torch.Tensor.normal_),
        *(torch.Tensor.exponential_, torch.Tensor.random_, torch.Tensor.multinomial),
    )
)


class Numbers:
    """Of one call of a region: `drawn` around the first run, `again` around those that follow.

    Raises (inside the first run):
        RuntimeError: at a function that draws otherwise than by a tensor of numbers alone, naming it.
    """

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    @property
    def drawn(self) -> TorchFunctionMode:
        """The mode of the first run."""
        return _Drawn(self.kept)

    @property
    def again(self) -> TorchFunctionMode:
        """The mode of those that follow; entered anew, it begins with the first numbers."""
        return _Again(self.kept)


class _Drawn(TorchFunctionMode):
    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED and kwargs.get("training", True):
            raise RuntimeError(
                f"a region that is computed again inside a CUDA graph calls {func.__name__}, whose random numbers "
                "can't be kept apart; expected torch.rand or another function that makes nothing but numbers, as "
                "gem_model's Dropout does"
            )
        out = func(*args, **kwargs)
        if func in KEPT:
            self.kept.append(out.detach())
        return out


class _Again(TorchFunctionMode):
    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self.kept, self.left = kept, iter(kept)

    def __enter__(self) -> Any:
        self.left = iter(self.kept)
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            return next(self.left).detach()
        return func(*args, **(kwargs or {}))
