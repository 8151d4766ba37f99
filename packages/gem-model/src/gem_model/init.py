"""Where the numbers start."""

from __future__ import annotations

import math

import torch
from gem_kernels.nn import PMA, RMSNorm
from torch import Tensor, nn

from gem_model.buckets import BucketLinear
from gem_model.distillation import Adapter
from gem_model.embed import EventEncoder, FeatureEncoder
from gem_model.evidence import Affinity, Evidence, EvidenceTokens
from gem_model.heads import Heads
from gem_model.hstu import HSTULayer
from gem_model.interaction import FactorizationMachine, TokenMix
from gem_model.sequence import SequenceLayer

READER_INIT = 3.0**-0.5  # of the usual size: the smaller the first weights, the smoother what is learned first
HEAD_INIT = 0.1  # of the usual size: the first logits are the base rate with a little noise


@torch.no_grad()
def initialise(model: nn.Module, *, layers: int) -> None:
    """Draw every dense parameter of a GEM from torch's generator; embedding tables are left to TorchRec.

    Linear maps keep the variance of what passes through them (N(0, 1 / fan_in), zero bias). What adds to the event's
    residual stream starts 1 / sqrt(2 layers) smaller, so that the stream's variance does not grow with depth (GPT-2).
    The map that makes logits starts small, and the wide part at zero.
    """
    for module in model.modules():
        for name, fan_in in _fan_ins(module).items():
            _normal(getattr(module, name), fan_in)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
        elif isinstance(module, (nn.LayerNorm, RMSNorm)):
            module.reset_parameters()
        elif isinstance(module, PMA):
            module.queries.normal_()  # with normed keys, the logits q.k / sqrt(D) then have unit variance
    for module in model.modules():
        if isinstance(module, (Adapter, Affinity, BucketLinear, Evidence, EvidenceTokens)):
            module.reset_parameters()
        elif isinstance(module, SequenceLayer):
            residual = [module.ffn.down, module.attention.out] + ([module.ffn.out] if module.ffn.personal else [])
            for linear in residual:
                linear.weight.mul_(1.0 / math.sqrt(2.0 * layers))
        elif isinstance(module, HSTULayer):
            module.out.weight.mul_(1.0 / math.sqrt(layers))
        elif isinstance(module, Heads):
            for out in module.out.values():
                assert isinstance(out, nn.Linear)
                out.weight.mul_(HEAD_INIT if module.reader is None else 0.0)
            if module.reader is not None:
                module.reader.out.weight.mul_(HEAD_INIT)
                for hidden in module.reader.hidden:
                    assert isinstance(hidden, nn.Linear)
                    hidden.weight.mul_(READER_INIT)
            if module.wide is not None:
                module.wide.weight.zero_()


def fan_ins(model: nn.Module) -> dict[str, int]:
    """How many numbers each weight sums over, by the parameter's name; biases and norms sum nothing."""
    return {
        f"{prefix}.{name}" if prefix else name: fan_in
        for prefix, module in model.named_modules()
        for name, fan_in in _fan_ins(module).items()
    }


def _fan_ins(module: nn.Module) -> dict[str, int]:
    """Of the parameters that the module itself holds."""
    if isinstance(module, nn.Linear):
        return {"weight": module.in_features}
    if isinstance(module, (TokenMix, EvidenceTokens)):
        return {"weight": module.weight.shape[1]}
    if isinstance(module, FactorizationMachine):
        return {"compress": module.compress.shape[0]}
    if isinstance(module, EventEncoder) and module.mark is not None:
        return {"mark": 1}
    if isinstance(module, FeatureEncoder) and module.features:
        return {"projections": module.projections.shape[1]}
    return {}


def _normal(weight: Tensor, fan_in: int) -> None:
    nn.init.normal_(weight, std=1.0 / math.sqrt(fan_in))
