"""Where the numbers start."""

from __future__ import annotations

import math

import torch
from gem_kernels.nn import PMA, RMSNorm
from torch import Tensor, nn

from gem_model.embed import EventEncoder, FeatureEncoder
from gem_model.evidence import Evidence, EvidenceTokens
from gem_model.heads import Heads
from gem_model.interaction import FactorizationMachine, TokenMix
from gem_model.sequence import SequenceLayer

HEAD_INIT = 0.1  # of the usual size: the first logits are the base rate with a little noise


@torch.no_grad()
def initialise(model: nn.Module, *, layers: int) -> None:
    """Draw every dense parameter of a GEM from torch's generator; embedding tables are left to TorchRec.

    Linear maps keep the variance of what passes through them (N(0, 1 / fan_in), zero bias). What adds to the event's
    residual stream starts 1 / sqrt(2 layers) smaller, so that the stream's variance does not grow with depth (GPT-2).
    The map that makes logits starts small, and the wide part at zero.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _normal(module.weight, module.in_features)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, (nn.LayerNorm, RMSNorm)):
            module.reset_parameters()
        elif isinstance(module, TokenMix):
            _normal(module.weight, module.weight.shape[1])
        elif isinstance(module, FactorizationMachine):
            _normal(module.compress, module.compress.shape[0])
        elif isinstance(module, PMA):
            module.queries.normal_()  # with normed keys, the logits q.k / sqrt(D) then have unit variance
        elif isinstance(module, EventEncoder) and module.mark is not None:
            _normal(module.mark, 1)
        elif isinstance(module, FeatureEncoder) and module.features:
            _normal(module.projections, module.projections.shape[1])
    for module in model.modules():
        if isinstance(module, (Evidence, EvidenceTokens)):
            module.reset_parameters()
        elif isinstance(module, SequenceLayer):
            residual = [module.ffn.down, module.attention.out] + ([module.ffn.out] if module.ffn.personal else [])
            for linear in residual:
                linear.weight.mul_(1.0 / math.sqrt(2.0 * layers))
        elif isinstance(module, Heads):
            for out in module.out.values():
                assert isinstance(out, nn.Linear)
                out.weight.mul_(HEAD_INIT)
            if module.wide is not None:
                module.wide.weight.zero_()


def _normal(weight: Tensor, fan_in: int) -> None:
    nn.init.normal_(weight, std=1.0 / math.sqrt(fan_in))
