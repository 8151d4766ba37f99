"""The rungs: which technique each one switches on, and what stands in the way of those that can't be measured here."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from gem_lowprec import attention_engine, engine
from gem_parallel import Runtime

from gem_train.assemble import resolve_precision
from gem_train.config import RunConfig
from gem_train.ladder.peers import Operators

Check = Callable[[RunConfig, Runtime], str]  # why a rung can't be measured, or ""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One step up.

    Attributes:
        name: short.
        what: one sentence for the reader of the table.
        operators: changes of the operators that the rung before has.
        settings: `a.b=c` assignments, on top of the rung before; or what makes them of the recipe's configuration.
        compile: whether what works on events goes through torch.compile.
        on: the rung that it stands on, where that is not the one before.
        aside: the next rung goes on from the one before this, not from this.
        start: the next rungs stand on it even where it can't be measured: it is what they are compared with.
        warm_up: steps that it needs before it is timed, where those of the call are fewer.
        same: whether it computes the same function as the first rung, up to rounding.
        hstu: whether it is not the model that is measured but HSTU layers of as many FLOPs (hstu.py).
        missing: why it can't be measured here, or "".
    """

    name: str
    what: str
    operators: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] | Callable[[RunConfig], tuple[str, ...]] = ()
    compile: bool = False
    on: str | None = None
    aside: bool = False
    start: bool = False
    warm_up: int = 0
    same: bool = True
    hstu: bool = False
    missing: Check = lambda config, runtime: ""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Operators and settings that have been reached so far: the defaults are the model as it is by itself."""

    operators: Operators = field(default_factory=Operators)
    settings: tuple[str, ...] = ()
    compile: bool = False

    def up(self, rung: Rung, config: RunConfig) -> Stand:
        """With what the rung changes, climbing with the recipe's `config`."""
        settings = rung.settings(config) if callable(rung.settings) else rung.settings
        return Stand(
            operators=dataclasses.replace(self.operators, **rung.operators),
            settings=(*self.settings, *settings),
            compile=rung.compile,
        )


def _cuda(config: RunConfig, runtime: Runtime) -> str:
    return "" if runtime.device.type == "cuda" else "its kernels need a CUDA device"


def _half(config: RunConfig, runtime: Runtime) -> str:
    return "the run's precision is fp32" if resolve_precision(config.train.precision, runtime.device) == "fp32" else ""


def _varlen(config: RunConfig, runtime: Runtime) -> str:
    if runtime.device.type != "cuda":
        return "torch's varlen_attn has no CPU implementation"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    if config.train.precision == "fp32":
        return "varlen_attn takes 16-bit tensors alone, train.precision is fp32"
    if config.model.causal or config.model.window is not None:
        return "compared without a window and without causal alone"
    return ""


def _softmax(config: RunConfig, runtime: Runtime) -> str:
    return "" if config.model.attention == "softmax" else f"the model's attention is {config.model.attention} already"


def _everything(config: RunConfig, runtime: Runtime) -> str:
    if config.model.causal or config.model.window is not None:
        return "events see a window or what precedes them, CLS tokens everything: no one call does both"
    return _cuda(config, runtime)


def _fp8(config: RunConfig, runtime: Runtime) -> str:
    runs = engine("fp8_block", runtime.device)
    return "" if runs.name == "native" else f"FP8 is {runs.name} here: {runs.why}"


def _fp8_attention(config: RunConfig, runtime: Runtime) -> str:
    model = config.model
    if model.attention != "softmax":
        return f"it is softmax attention, the model's is {model.attention}"
    half = torch.bfloat16 if resolve_precision(config.train.precision, runtime.device) != "fp32" else torch.float32
    q = torch.empty(1, model.heads, model.head_dim, dtype=half, device=runtime.device)
    runs = attention_engine("fp8", q, masked=model.causal or model.window is not None)
    return "" if runs.name == "native" else f"FP8 attention is {runs.name} here: {runs.why}"


def _several(config: RunConfig, runtime: Runtime) -> str:
    return "" if runtime.world > 1 else "needs several ranks: with one there is nothing to balance (torchrun)"


def _cards(config: RunConfig, runtime: Runtime) -> str:
    if runtime.device.type != "cuda":
        return "needs cards that reach one another's memory; these ranks are on CPUs"
    return "" if runtime.world > 1 else "needs several cards: one has nothing to gather"


def never(reason: str) -> Check:
    """A rung whose code is not written yet."""
    return lambda config, runtime: reason


RUNGS = (
    Rung(
        name="padded SDPA",
        what="torch: attention and personalised FFN over the padded batch, everything else by torch's own operators",
        operators={
            "attention": "padded",
            "ffn": "padded",
            "rope": "torch",
            "norm": "torch",
            "stream": "autocast",
            "parts": "torch",
            "queries": "apart",
        },
        settings=("train.cuda_graphs=off",),
        start=True,
        missing=_softmax,
    ),
    Rung(
        name="torch varlen",
        what="attention by torch's varlen_attn (FlashAttention-2)",
        operators={"attention": "varlen"},
        missing=_varlen,
    ),
    Rung(name="JFA", what="jagged attention of gem-kernels, learned queries shared", operators={"attention": "kernel"}),
    Rung(name="GDPA", what="the personalised FFN by the GDPA kernel, without padding", operators={"ffn": "kernel"}),
    Rung(name="fused rope", what="the rotary embedding as one kernel", operators={"rope": "kernel"}, missing=_cuda),
    Rung(
        name="norm fusions",
        what="LayerNorm as one kernel, which adds the residual in passing",
        operators={"norm": "kernel"},
        missing=_cuda,
    ),
    Rung(
        name="16-bit stream",
        what="the events' tokens in autocast's dtype between the blocks, too",
        operators={"stream": "half"},
        missing=_half,
    ),
    Rung(
        name="packed projections",
        what="gate, up, q, k, v taken from their projections by one kernel with norms and rotation, one gradient back",
        operators={"parts": "kernel"},
        missing=_cuda,
    ),
    Rung(
        name="queries together",
        what="CLS tokens ask among the events: keys and values are read once, and get one gradient",
        operators={"queries": "together"},
        missing=_everything,
    ),
    Rung(
        name="larger parts",
        what="half as many parts a step, in the memory that the rungs before have freed",
        settings=lambda config: (f"optim.accumulate={max(1, config.optim.accumulate // 2)}",),
    ),
    Rung(
        name="CUDA graphs",
        what="the layers of both passes replayed from CUDA graphs, the events brought to a capacity",
        settings=("train.cuda_graphs=on",),
        missing=_cuda,
    ),
    Rung(
        name="FP8 linear",
        what="linear layers in FP8 with a scale for every block, all three products",
        settings=("lowprec.recipe=fp8_block",),
        missing=_fp8,
        same=False,
    ),
    Rung(
        name="torch varlen + torch.compile",
        what="what works on events in that rung, through torch.compile",
        compile=True,
        on="torch varlen",
        aside=True,
        missing=_varlen,
    ),
    Rung(
        name="HSTU layers, torch varlen + torch.compile",
        what="another model: HSTU layers of as many FLOPs, without tables, features and heads",
        compile=True,
        hstu=True,
        on="torch varlen",
        aside=True,
        same=False,
        missing=_varlen,
    ),
    Rung(
        name="ours + torch.compile",
        what="what works on events on our kernels, in BF16, through torch.compile",
        compile=True,
        on="larger parts",
        aside=True,
        missing=_cuda,
    ),
    Rung(
        name="block attention",
        on="CUDA graphs",
        what="events attend inside blocks of 64 tokens (another function)",
        operators={"block": 64},
        aside=True,
        same=False,
    ),
    Rung(
        name="sliding window",
        on="CUDA graphs",
        what="an event sees 128 events to each side (another function)",
        settings=("model.window=128",),
        aside=True,
        same=False,
    ),
    Rung(
        name="computation skip",
        on="CUDA graphs",
        what="events attend to events in every other layer (another function)",
        settings=("model.self_attention_every=2",),
        aside=True,
        same=False,
    ),
    Rung(
        name="GDPA for softmax",
        on="CUDA graphs",
        what="the activation in the place of softmax everywhere (another function)",
        settings=("model.attention=gdpa",),
        aside=True,
        same=False,
    ),
    Rung(
        name="FP8 attention",
        what="events attend in FP8: Q, K, V and P in the forward, the backward in BF16 on those operands",
        operators={"attention": "fp8"},
        on="CUDA graphs",
        aside=True,
        same=False,
        missing=_fp8_attention,
    ),
    Rung(
        name="AutoAC",
        what="layers recomputed where that costs least, half of their activations kept",
        settings=("parallel.memory.policy=regions", "parallel.memory.budget=0.5"),
        on="larger parts",
        warm_up=4,
    ),
    Rung(
        name="activation quantisation",
        what="what is kept between the passes in FP8, on top of AutoAC (gradients become approximate)",
        settings=("parallel.memory.quantise=fp8",),
        on="AutoAC",
        warm_up=4,
        aside=True,
        same=False,
    ),
    Rung(
        name="BBS",
        what="sub-batches dealt to the ranks by cost",
        settings=("data.balance=bbs",),
        on="CUDA graphs",
        missing=_several,
    ),
    Rung(
        name="SM-free collectives",
        what="parameters gathered by copy engines, on top of BBS",
        settings=("parallel.comm.all_gather=copy_engine",),
        missing=_cards,
    ),
)
