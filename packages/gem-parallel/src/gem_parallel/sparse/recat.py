"""TorchRec's index tensors, made once.

After its all-to-all (which a world of one skips) TorchRec reorders ids by an index tensor that follows from a few small
numbers. It makes one for every lookup, from a list on the host: a copy for which the host waits until the device has
done all that was asked of it before. The step that could have been prepared meanwhile then starts on an idle device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torchrec.distributed import dist_data

KEPT = 256  # index tensors


def keep_recats() -> None:
    """Let TorchRec in this process keep the index tensors that it makes. A version without the function is let be."""
    made = getattr(dist_data, "_get_recat", None)
    if made is not None and not hasattr(made, "kept"):
        dist_data._get_recat = kept(made)


def kept(make: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    """`make` (torchrec.distributed.dist_data._get_recat), with an answer for each different question made once."""

    @functools.lru_cache(KEPT)
    def ask(*question: Any) -> torch.Tensor | None:
        *numbers, batches = question
        return make(*numbers, None if batches is None else list(batches))

    @functools.wraps(make)
    def recat(
        local_split: int,
        num_splits: int,
        stagger: int = 1,
        device: torch.device | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
    ) -> torch.Tensor | None:
        batches = None if batch_size_per_rank is None else tuple(batch_size_per_rank)
        return ask(local_split, num_splits, stagger, device, batches)

    recat.kept = ask  # type: ignore[attr-defined]
    return recat
