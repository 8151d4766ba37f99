"""The optimizer of the dense parameters: AdamW, or Muon for the matrices with AdamW for the rest.

Each group has a `scale`, which the trainer multiplies its learning rate by (:mod:`gem_model.scaling`).
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from gem_model.scaling import Ratios
from gem_parallel import ParallelModel, optimizer_groups
from torch import Tensor, nn

from gem_train.config import OptimConfig

MUON_ADJUST = "match_rms_adamw"  # its steps have the size of AdamW's, so that one learning rate serves both


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, AdamW for the others, as one optimizer.

    A matrix W moves by -lr 0.2 sqrt(max(W's sides)) U V^T, where U S V^T is what its momentum is by singular values,
    by a few Newton-Schulz iterations (Jordan et al. 2024; the factor: Liu et al. 2025). torch's implementations of
    both do the work. A shard of FSDP is gathered for its iterations, by DTensor.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, fused: bool):
        kinds: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in groups:
            kinds[group.pop("muon")].append(group)
        self.parts: list[torch.optim.Optimizer] = []
        if kinds[True]:
            self.parts.append(torch.optim.Muon(kinds[True], lr=lr, momentum=0.95, adjust_lr_fn=MUON_ADJUST))
        if kinds[False]:
            self.parts.append(torch.optim.AdamW(kinds[False], lr=lr, betas=betas, eps=eps, fused=fused))
        super().__init__([p for part in self.parts for g in part.param_groups for p in g["params"]], {})
        # One state and one list of groups, shared with the parts: to whoever saves, loads or sets rates it is one.
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for part in self.parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every part."""
        assert closure is None, "the trainer has none"
        for part in self.parts:
            part.step()


def dense_optimizer(
    model: ParallelModel,
    config: OptimConfig,
    device: torch.device,
    *,
    ratios: Ratios | None = None,
    matrices: frozenset[str] = frozenset(),
) -> torch.optim.Optimizer:
    """The optimizer over the dense parameters; matrices are decayed, vectors (norms, biases, marks) are not.

    Args:
        model: has the parameters.
        config: says which optimizer, and its settings.
        device: where the parameters are.
        ratios: by parameter, how much larger the model is than where `config.lr` was found (`config.base_width`).
        matrices: names of the parameters that Muon takes, where the configuration asks for it.
    """
    muon, ratios = config.optimizer == "muon", ratios or Ratios()
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_dense_parameters():
        ratio, branch = ratios.fan_in.get(name, 1.0), ratios.branch.get(name, 1.0)
        by_muon = muon and name in matrices
        # A step of Muon, in the size of AdamW's, moves the layer's output sqrt(fan-in) times as far, AdamW's fan-in.
        scale = 1.0 / ((math.sqrt(ratio) if by_muon else ratio) * branch)
        groups.setdefault((by_muon, parameter.dim() > 1, scale), []).append(parameter)
    if muon and not any(by_muon for by_muon, _, _ in groups):
        warnings.warn("optim.optimizer is 'muon', but the model has no matrix for it: AdamW takes all", stacklevel=2)
    made = [
        {"params": params, "weight_decay": config.weight_decay / scale if decayed else 0.0, "scale": scale, "muon": m}
        for (m, decayed, scale), params in groups.items()
    ]
    made = optimizer_groups(made)
    fused = device.type == "cuda"
    if muon:
        return Muon(made, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    for group in made:
        del group["muon"]
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group its learning rate: `lr` times the group's `scale`."""
    for group in optimizer.param_groups:
        rate = lr * group.get("scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
