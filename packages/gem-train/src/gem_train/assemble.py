"""Where all packages meet: data -> model -> lowprec.convert -> parallel.parallelize -> trainer. Read this first.

gem_data      the events, their split and the batches
gem_model     the model, shaped by the configuration and by what the data offers
gem_lowprec   replaces linear layers by low-precision ones, by name
gem_parallel  spreads the tables and the dense parameters over the ranks
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from gem_data import SourceUnavailable
from gem_lowprec import Conversion, Gathers, Recipe, convert, get_recipe, quantize_gathers
from gem_lowprec.fsdp import PAYLOADS
from gem_model import GEM, ModelInputs
from gem_model.presets import shape
from gem_model.ranker import Ranker
from gem_model.roles import roles
from gem_model.scaling import Ratios, matrices, scale_branches, scale_outputs, shape_ratios, width_ratios
from gem_parallel import MemoryPlan, RowWiseAdagrad, Runtime, parallelize
from torch import nn

from gem_train import data as data_source
from gem_train import graphs
from gem_train.config import RunConfig
from gem_train.config.named import function
from gem_train.data import Data
from gem_train.errors import UserError, user_errors
from gem_train.events import Events
from gem_train.inputs import model_inputs
from gem_train.metrics import Mfu, peak_flops
from gem_train.optimizers import dense_optimizer
from gem_train.progress import Progress
from gem_train.run_dir import RunDir
from gem_train.trainer import Parts, Trainer


def build_gem(config: RunConfig, inputs: ModelInputs) -> Ranker:
    """GEM, or the model that the configuration names in its place."""
    if config.build is None:
        return GEM(config.model, inputs)
    model: Ranker = function(config.build)(config, inputs)
    missing = [name for name in ("units", "init_bias", "init_dense") if not hasattr(model, name)]
    if not isinstance(model, nn.Module) or missing:
        raise TypeError(
            f"build: {config.build} returned a {type(model).__name__}; expected a torch.nn.Module with units(), "
            f"init_bias() and init_dense() (see gem_model.ranker.Ranker)"
        )
    return model


def rate_ratios(config: RunConfig, gem: Ranker, inputs: ModelInputs) -> Ratios:
    """By what to divide the learning rate of each parameter, as `optim.base_width` or `base_shape` asks; the model's
    first weights are made to go with it. A baseline has no such parametrisation.
    """
    width, base = config.optim.base_width, config.optim.base_shape
    if not isinstance(gem, GEM) or (width is None and base is None):
        return Ratios()
    if base is not None:
        ratios = shape_ratios(config.model, inputs, shape(base))
        scale_branches(gem, shape(base))
    else:
        assert width is not None
        ratios = width_ratios(config.model, inputs, width)
    scale_outputs(gem, ratios)
    return ratios


def assemble(
    config: RunConfig,
    runtime: Runtime,
    run: RunDir,
    *,
    events: Events,
    progress: Progress,
    build: Callable[[RunConfig, ModelInputs], Ranker] = build_gem,
) -> tuple[Data, Trainer]:
    """Put the whole system together for one run.

    `build` may make another model than GEM (a baseline), whose FLOPs are then not counted, or change it.

    Raises UserError for every setting that one of the packages refuses.
    """
    with user_errors("data"):
        try:
            data = data_source.open_data(config.data, runtime)
        except SourceUnavailable as error:
            raise UserError(str(error)) from error
        train = data_source.loader(
            data, "train", config.data, runtime, seed=config.train.seed, parts=config.optim.accumulate
        )
        validation = data_source.loader(data, "validation", config.data, runtime)
        test = data_source.loader(data, "test", config.data, runtime)

    with user_errors("model"):
        torch.manual_seed(config.train.seed)
        inputs = model_inputs(data.schema, config.inputs, max_history=config.data.max_history)
        gem = build(config, inputs)
        ratios = rate_ratios(config, gem, inputs)
        gem.init_bias(data_source.base_rates(data))
        if inputs.dense and config.inputs.standardize:
            gem.init_dense(*data_source.dense_statistics(data))

    with user_errors("lowprec"):
        conversion = convert(gem, lowprec_recipe(config), seed=config.train.seed * 65_537 + runtime.rank)
        _warn_if_nothing(conversion)

    with user_errors("parallel"):
        if config.inputs.managed and runtime.world > 1:
            raise ValueError(
                f"managed tables ({', '.join(config.inputs.managed)}) need one process, for each would learn a map of "
                f"its own; this world has {runtime.world}"
            )
        _check_gathers(config, conversion)
        memory = config.parallel.memory
        if memory.plans and not memory.plan_file:  # a resumed run follows the plan that it has
            memory = dataclasses.replace(memory, plan_file=str(run.plan_file))
        layout = dataclasses.replace(
            config.parallel,
            memory=memory,
            batch_size=train.local_batch_size,  # what the planner reckons with; not the user's to know
            table_seed=config.parallel.table_seed + config.train.seed,  # another run seed draws other tables, too
            table_std=config.parallel.table_std or inputs.table_std,
        )
        adagrad = RowWiseAdagrad(lr=config.optim.sparse_lr, eps=config.optim.sparse_eps)
        linear = frozenset(matrices(gem))
        model = parallelize(
            gem, roles(gem), layout, runtime, sparse=adagrad, units=gem.units(), lowprec=quantize_gathers
        )
        _warn_if_plain(config, model.gathers)
        if model.memory is not None:
            model.memory.made = lambda plan: _tell_of(plan, events, progress)
        kernel_by_kernel = graphs.replay_layers(config, model.module, conversion, runtime, model.memory)

    precision = resolve_precision(config.train.precision, runtime.device)
    trainer = Trainer(
        Parts(
            config=config,
            runtime=runtime,
            run=run,
            inputs=inputs,
            model=model,
            model_config=config.model,
            counts_flops=isinstance(gem, GEM),
            units=tuple(gem.units()),
            conversion=conversion,
            layers=graphs.describe(kernel_by_kernel),
            optimizer=dense_optimizer(model, config.optim, runtime.device, ratios=ratios, matrices=linear),
            train=train,
            validation=validation,
            test=test,
            precision=precision,
            peak=peak_of(config, runtime.device),
            events=events,
            progress=progress,
        )
    )
    return data, trainer


def _tell_of(plan: MemoryPlan, events: Events, progress: Progress) -> None:
    progress.note(str(plan))
    events.message("memory_plan", kept=plan.kept, peak=plan.peak, budget=plan.budget, seconds=plan.seconds)


def resolve_precision(asked: str, device: torch.device) -> str:
    """ "auto" is bf16 on CUDA and fp32 on a CPU, where bf16 has no fast units on most machines."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    return asked


def describe(trainer: Trainer) -> dict[str, Any]:
    """The model as it was assembled, for model.json: inputs, parameters, precisions, sharding."""
    parts = trainer.parts
    shards = [str(shard) for shard in parts.model.describe()]
    dense = sum(p.numel() for p in parts.model.dense_parameters())
    table = sum(t.rows * t.dim for t in parts.inputs.tables)
    return {
        "inputs": dataclasses.asdict(parts.inputs),
        "parameters": {"dense": dense, "tables": table},
        "precision": parts.precision,
        "layers": parts.layers,
        "linear_layers": [dataclasses.asdict(row) for row in parts.conversion.rows],
        "sharding": shards,
        "gathers": str(parts.model.gathers or "").splitlines(),
        "world": parts.runtime.world,
        "device": str(parts.runtime.device),
        "mfu": parts.peak.note,
    }


def lowprec_recipe(config: RunConfig) -> Recipe:
    """The precision recipe that is asked for, with its changes. Raises ValueError for an unknown one."""
    recipe = get_recipe(config.lowprec.recipe)
    changes: dict[str, Any] = {}
    if config.lowprec.keep is not None:
        changes["keep"] = config.lowprec.keep
    if config.lowprec.min_size is not None:
        changes["min_size"] = config.lowprec.min_size
    return dataclasses.replace(recipe, **changes)


def peak_of(config: RunConfig, device: torch.device) -> Mfu:
    """The peak of the device for the dtype of the configuration's matrix products, or why there is none."""
    return peak_flops(_card(device), _peak_dtype(resolve_precision(config.train.precision, device)))


def _card(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def _peak_dtype(precision: str) -> str:
    """The dtype of the matrix products; low-precision layers are measured against bf16, and the note says so."""
    if precision == "bf16":
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "fp32"


def _warn_if_nothing(conversion: Conversion) -> None:
    """Say so when a low-precision recipe changed nothing: the run should not be taken for what it is not."""
    asked = conversion.recipe.name not in ("none", "bf16")
    if asked and not any(row.converted for row in conversion.rows):
        reasons = "; ".join(dict.fromkeys(row.why for row in conversion.rows))
        warnings.warn(f"the recipe {conversion.recipe.name!r} converted no layer: {reasons}", stacklevel=3)


def _check_gathers(config: RunConfig, conversion: Conversion) -> None:
    """Raises ValueError where parallel.comm.payload asks for weights in FP8 and the recipe runs none of them so."""
    if config.parallel.comm.payload != "lowprec" or any(
        rule.forward == rule.dgrad and rule.forward in PAYLOADS for rule in conversion.recipe.rules
    ):
        return
    raise ValueError(
        f"parallel.comm.payload='lowprec' gathers weights as their layers use them in FP8; it expects a lowprec.recipe "
        f"whose forward and dgrad are both one of {', '.join(PAYLOADS)}, got {conversion.recipe.name!r}"
    )


def _warn_if_plain(config: RunConfig, gathers: object | None) -> None:
    """Say so when the payload "lowprec" packs nothing."""
    if config.parallel.comm.payload != "lowprec":
        return
    reasons = "this world has one rank, which gathers nothing"
    if isinstance(gathers, Gathers):
        if any(row.payload is not None for row in gathers.rows):
            return
        reasons = "; ".join(dict.fromkeys(row.why for row in gathers.rows))
    warnings.warn(f"parallel.comm.payload='lowprec' packs no weight: {reasons}", stacklevel=3)
