"""Whether the layers are launched kernel by kernel or replayed from CUDA graphs.

In a world of one all layers are one graph (gem_model.replay); where FSDP2 shards them, each is one of its own, inside
FSDP2's hooks (gem_model.replay_sharded). All ranks answer alike: it follows from the configuration and the machine.
"""

from __future__ import annotations

from typing import Any

from gem_lowprec import Conversion
from gem_model import GEM
from gem_model.layers import Layers
from gem_model.replay import Replay, Rooms
from gem_model.replay_sharded import ShardedReplay
from gem_parallel import PerRank, Regions, Runtime
from torch import nn

from gem_train.config import RunConfig


def replay_layers(
    config: RunConfig, model: nn.Module, conversion: Conversion, runtime: Runtime, memory: Regions | None = None
) -> str:
    """Let graphs run the layers of `model` in training as `train.cuda_graphs` says; why they don't, or "".

    Where `memory` computes activations again, it measures the layers first, launched one by one: they are captured as
    its plan has them run.

    Raises ValueError where graphs are asked for ("on") and can't be had.
    """
    asked = config.train.cuda_graphs
    reason = "train.cuda_graphs is off" if asked == "off" else why_not(config, model, conversion, runtime)
    if reason and asked == "on":
        raise ValueError(f"train.cuda_graphs is on, but {reason}")
    if not reason:
        assert isinstance(model, GEM)
        model.layers.replay = replay = (Replay if runtime.world == 1 else ShardedReplay)(model.layers)
        if memory is not None:
            memory.launched = False
            replay.ready = lambda: not memory.measuring
    return reason


def why_not(config: RunConfig, model: nn.Module, conversion: Conversion, runtime: Runtime) -> str:
    """What stands in the way of graphs, or ""."""
    if runtime.device.type != "cuda":
        return f"CUDA graphs need a CUDA device; this run is on {runtime.device}"
    if not isinstance(model, GEM):
        return f"only GEM's layers can be replayed; this model is a {type(model).__name__}"
    if runtime.world > 1 and config.parallel.experts > 1:
        return f"parallel.experts is {config.parallel.experts}: layers with experts on other ranks hold collectives"
    if runtime.world > 1 and config.parallel.comm.payload == "lowprec":
        return "parallel.comm.payload is 'lowprec': graphs read copies of whole weights, and gathered ones are FP8"
    if config.data.share_requests:
        return "data.share_requests makes the numbers of samples and of histories differ from batch to batch"
    if config.lowprec.numerics_every:
        return "lowprec.numerics_every has the layers' operands measured on some steps only"
    memory = config.parallel.memory
    if memory.works and runtime.world > 1:
        return f"parallel.memory and graphs go together on one device only; this is a world of {runtime.world}"
    if memory.engine != "eager":
        return f"parallel.memory.engine is {memory.engine!r}; only what 'eager' does can be captured"
    if memory.offload_min_mib:
        return "parallel.memory.offload_min_mib moves activations to the host, which no graph waits for"
    rules = conversion.recipe.rules
    if any(rule.stochastic or rule.hadamard or rule.wgrad_every > 1 for rule in rules):
        return f"the recipe {conversion.recipe.name!r} does something else in each step (random numbers or wgrad_every)"
    return ""


def describe(reason: str) -> str:
    """One line for the run's folder."""
    return f"launched kernel by kernel: {reason}" if reason else "replayed from CUDA graphs in training"


def state(model: nn.Module) -> list[dict[str, Any]] | PerRank:
    """What a checkpoint needs to know of the graphs; each rank has its own."""
    replay = _replay(model)
    if isinstance(replay, ShardedReplay):
        return PerRank(replay.state())
    return [] if replay is None else replay.state()


def load(model: nn.Module, rooms: list[dict[str, Any]] | PerRank) -> None:
    """The graphs of an earlier process, to be captured again."""
    replay = _replay(model)
    if replay is not None:
        replay.load(rooms.value if isinstance(rooms, PerRank) else rooms)


def _replay(model: nn.Module) -> Rooms | None:
    layers = getattr(model, "layers", None)
    replay = layers.replay if isinstance(layers, Layers) else None
    return replay if isinstance(replay, Rooms) else None
