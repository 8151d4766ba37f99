"""Local MFU: each layer of the model run alone on one device, without recomputation and without communication.

    local MFU = sum_u FLOPs_u / (sum_u seconds_u x peak)

over the units u: the features, the event encoders, the interleaved layers, the heads. FLOPs are useful training FLOPs
(3 x the forward's: valid events, visible pairs); seconds are those of a forward and a backward pass over the inputs
that the unit had in a real forward pass. On a card the layers are timed from CUDA graphs: how fast the device
is, whatever the host takes to launch them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from gem_data import JaggedBatch
from gem_model.flops import unit_flops
from gem_model.layers import one_by_one
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gem_train.instruments import TRAINING_FLOPS
from gem_train.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class UnitTime:
    """A unit alone: `flops` of training, median `seconds` of its forward and of both passes."""

    name: str
    flops: float
    forward_s: float
    seconds: float

    def mfu(self, peak: float | None) -> float | None:
        """FLOPs over seconds and `peak` (FLOP/s), None without one."""
        return None if peak is None else self.flops / self.seconds / peak


def local_mfu(units: list[UnitTime], peak: float | None) -> float | None:
    """All units' FLOPs over all their seconds and the peak."""
    if peak is None:
        return None
    return sum(u.flops for u in units) / sum(u.seconds for u in units) / peak


def time_units(
    trainer: Trainer, batch: JaggedBatch, *, repeats: int = 5, module: nn.Module | None = None
) -> list[UnitTime]:
    """Every unit that has FLOPs, alone, on the inputs that it gets of `batch`.

    `module` holds the units to time, the model itself by default; in a world larger than one it must be another, as a
    sharded unit gathers its parameters.
    """
    parts = trainer.parts
    device = trainer.runtime.device
    batch = batch.to(device)
    lengths = {s.name: batch.sequences[s.name].offsets.diff().tolist() for s in parts.inputs.sources}
    flops = unit_flops(parts.model_config, parts.inputs, lengths, batch_size=batch.batch_size)
    names = [name for name, count in flops.items() if count]
    inputs = _capture(trainer, batch, names)
    where = trainer.model.module if module is None else module
    bf16 = parts.precision == "bf16"
    found = []
    for name in names:
        unit, (args, kwargs) = where.get_submodule(name), inputs.pop(name)

        def forward(unit: nn.Module = unit, args: Any = args, kwargs: Any = kwargs, bf16: bool = bf16) -> Any:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False):
                return unit(*args, **kwargs)

        wanted = [t for t in (*tensors(args), *tensors(kwargs), *unit.parameters()) if t.requires_grad]

        def both(forward: Callable[[], Any] = forward, wanted: list[Tensor] = wanted) -> None:
            outputs = [t for t in tensors(forward()) if t.requires_grad]
            torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)

        graph = device.type == "cuda" and name.startswith("layers.")
        ahead, whole = (timed(as_graph(run, name) if graph else run, device, repeats) for run in (forward, both))
        found.append(UnitTime(name=name, flops=TRAINING_FLOPS * flops[name], forward_s=ahead, seconds=whole))
    return found


def as_graph(run: Callable[[], Any], name: str) -> Callable[[], Any]:
    """`run` captured, after two runs outside; as it is where it can't be captured, which is said."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(), run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
    except RuntimeError as error:
        warnings.warn(f"{name} is timed with its launches, for no CUDA graph takes it: {error}", stacklevel=2)
        return run
    return graph.replay


def timed(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _capture(trainer: Trainer, batch: JaggedBatch, names: list[str]) -> dict[str, tuple[Any, Any]]:
    """What each unit is called with in a forward pass, tensors as leaves."""
    caught: dict[str, tuple[Any, Any]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, args: Any, kwargs: Any) -> None:
            caught[name] = (_leaves(args), _leaves(kwargs))

        return look

    units = {name: trainer.model.module.get_submodule(name) for name in names}
    handles = [unit.register_forward_pre_hook(hook(name), with_kwargs=True) for name, unit in units.items()]
    try:
        trainer.model.train()
        with one_by_one(trainer.model.module), saved_tensors_hooks(lambda _kept: None, lambda nothing: nothing):
            trainer.forward(batch)
    finally:
        for handle in handles:
            handle.remove()
    return caught


def _leaves(value: Any) -> Any:
    """`value` with its tensors as leaves, which want gradients where they do inside the model."""
    if hasattr(type(value), "wait"):  # an answer of TorchRec's tables that nobody has asked for yet
        value = value.wait()
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, Mapping):
        return {k: _leaves(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(v) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: _leaves(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor inside."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))
