"""The whole of a run's configuration. Imports no torch: `--help`, `show` and `recipes` answer at once.

The sections `model` and `parallel` are the libraries' own classes, so that a new option there is an option here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gem_data.sources.synthetic import SyntheticConfig
from gem_model.config import GemConfig
from gem_model.presets import shape
from gem_parallel.config import ParallelConfig

from gem_train.config.lowprec import LowprecConfig

Schedule = Literal["cosine", "linear", "constant", "wsd"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which events, split how, read how.

    Args:
        source: "movielens" (the 100K ratings, a positive is a rating of 4 or 5), "synthetic" (impressions with a known
            optimal NE), "log" (a folder that gem_data built), or "own" (what `load` brings).
        path: the folder, for source="log".
        load: "package.module:function" of yours, for source="own": it takes no argument and returns an Arrow table of
            events and their gem_data.Schema. The log is built once, and again when the module's text changes.
        samples: the source of the schema whose events are the samples, where some events are history alone (searches);
            None is every event, and "impressions" for a synthetic log with searches.
        cache: where built logs and downloads are kept; None is $XDG_CACHE_HOME/gem-train or ~/.cache/gem-train.
        fallback: use the synthetic source, loudly, where movielens can't be had; False stops the run instead.
        fractions: train, validation and test shares of the global time order.
        batch_size: samples of a training step over all ranks.
        eval_batch_size: samples of an evaluation step over all ranks.
        max_history: the most recent events that a sample's history keeps.
        order: of the training samples: "shuffled" anew each epoch, or "time", as a stream would bring them. The first
            epoch in order of time is also a progressive validation: each sample is predicted before it is trained on.
        share_requests: samples of one user and second, where they come in one training batch (order "time"), share a
            history, on which GEM's towers then work once (gem_model.sharing); without CUDA graphs.
        balance: how a global batch is dealt to the ranks (gem_data.balance); "none" cuts it as it comes.
        prefetch: batches prepared ahead in the background.
        workers: processes that prepare batches; 0 is a thread.
        synthetic: the make-up of the synthetic source.
    """

    source: Literal["movielens", "synthetic", "log", "own"] = "synthetic"
    path: str | None = None
    load: str | None = None
    samples: str | None = None
    cache: str | None = None
    fallback: bool = True
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    batch_size: int = 512
    eval_batch_size: int = 1024
    max_history: int = 50
    order: Literal["shuffled", "time"] = "shuffled"
    share_requests: bool = False
    balance: Literal["none", "bbs", "lpt", "karmarkar-karp", "exchange"] = "none"
    prefetch: int = 2
    workers: int = 0
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def __post_init__(self) -> None:
        if (self.source == "log") != (self.path is not None):
            raise ValueError(
                f"path is {self.path!r} with source={self.source!r}; it is needed for 'log' and only there"
            )
        if (self.source == "own") != (self.load is not None):
            raise ValueError(
                f"load is {self.load!r} with source={self.source!r}; it is needed for 'own' and only there"
            )
        for name in ("batch_size", "eval_batch_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_history", "prefetch", "workers"):
            at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class InputsConfig:
    """What of the data the model gets to see.

    Args:
        table_dim: the dim of every embedding table.
        exclude: columns (of the candidate, the user or the history) that are kept from the model.
        managed: id columns whose ids are without bound: `managed_rows` of them have a row of their own at a time, those
            that come most and latest (TorchRec's managed collision). For one process alone.
        managed_rows: rows of each such table.
        standardize: shift and scale the dense features by their mean and deviation over the training split.
    """

    table_dim: int = 32
    exclude: tuple[str, ...] = ()
    managed: tuple[str, ...] = ()
    managed_rows: int = 100_000
    standardize: bool = True

    def __post_init__(self) -> None:
        at_least("table_dim", self.table_dim, 1)
        at_least("managed_rows", self.managed_rows, 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) or Muon for the dense parameters, row-wise AdaGrad for the tables.

    Both learning rates rise linearly over `warmup_steps`; then "cosine" and "linear" take them down to `final_ratio` of
    their peak at the last step, "constant" keeps them, and "wsd" keeps them until the last tenth of the steps, over
    which they fall linearly (warm-up, stable, decay). Norms, biases and other vectors are not decayed.

    Args:
        optimizer: "adamw", or "muon" (Jordan et al. 2024): the matrices of linear maps move along the orthogonal part
            of their momentum, by steps of AdamW's size; everything else has AdamW.
        lr, betas, eps, weight_decay: AdamW; Muon has the same lr and weight_decay.
        base_width: the model width at which `lr` was found (muP, gem_model.scaling): where the model is wider, matrices
            that sum over the width learn more slowly in proportion, so that a rate can be found on a small model. None
            uses `lr` as it is.
        base_shape: in its place, the preset at which `lr` was found, with changes as in "tiny+width=32": what has more
            layers, tokens, ranks and hidden units learns more slowly, too, and its branches start smaller.
        clip_norm: the largest L2 norm of the dense gradient; None does not clip.
        accumulate: parts that each rank's batch is computed in, one after another, to save memory. The dense gradient
            is that of the whole batch; the tables, whose optimizer runs inside the backward pass, are updated part by
            part.
        ema_decay: decay of an average of the dense weights, which validations and tests then use; None for none.
        warmup_steps: steps of linear warm-up.
        schedule: of the dense learning rate.
        final_ratio: where the cosine ends, as a share of the peak.
        sparse_lr, sparse_eps: row-wise AdaGrad.
        sparse_schedule: of the tables' learning rate.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 2e-3
    base_width: int | None = None
    base_shape: str | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    warmup_steps: int = 50
    accumulate: int = 1
    ema_decay: float | None = None
    schedule: Schedule = "cosine"
    final_ratio: float = 0.05
    sparse_lr: float = 0.05
    sparse_eps: float = 1e-8
    sparse_schedule: Schedule = "cosine"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "sparse_lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; expected a positive norm or none")
        if not 0.0 <= self.final_ratio <= 1.0:
            raise ValueError(f"final_ratio is {self.final_ratio}; expected a share in [0, 1]")
        if self.ema_decay is not None and not 0.0 < self.ema_decay < 1.0:
            raise ValueError(f"ema_decay is {self.ema_decay}; expected a share between 0 and 1, or none")
        if self.base_width is not None:
            at_least("base_width", self.base_width, 1)
        if self.base_shape is not None:
            shape(self.base_shape)
            if self.base_width is not None:
                raise ValueError(
                    f"base_shape is {self.base_shape!r} and base_width {self.base_width}; expected one of them, for a "
                    f"shape has a width"
                )
        at_least("warmup_steps", self.warmup_steps, 0)
        at_least("accumulate", self.accumulate, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how often, where.

    Args:
        epochs: passes over the training split.
        max_steps: stop after so many steps (and plan the schedule for them); None is all of the epochs.
        eval_every: steps between validations; 0 validates at the end alone.
        patience: stop after so many validations in a row without a better NE; None trains to the end.
        min_delta: by how much an NE must be lower to count as better for `patience`.
        checkpoint_every: steps between checkpoints; 0 writes one at the end alone.
        keep_checkpoints: how many of them are kept.
        keep_best: test the weights with the best validation NE instead of the last ones.
        spike_sigmas: a step whose loss lies so many standard deviations above its running mean is recorded with the ids
            of its samples; 0 looks for none.
        bad_batches: "stop" ends the run at a loss that is not finite (a spike is trained on); "skip" leaves out the
            updates of both, up to `max_skipped` in all. A gradient that is not finite always stops the run: the tables
            have seen it.
        sinks: where the figures of each step go beside the run folder: names of entry points of the group
            `gem_train.sinks` (tensorboard, wandb, trackio, prometheus).
        seed: of the initial weights, the order of the samples and dropout.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 on CUDA, fp32 on a CPU.
        device: "auto", "cpu" or "cuda".
        cuda_graphs: "on" replays the layers from CUDA graphs in training (gem_model.replay), so that the host does not
            launch their kernels one by one; "auto" does so where it is possible (model.json says why not); "off" never.
        timeout_s: how long a collective waits for the other ranks.
    """

    epochs: int = 2
    max_steps: int | None = None
    eval_every: int = 100
    patience: int | None = None
    min_delta: float = 0.0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    keep_best: bool = True
    spike_sigmas: float = 8.0
    bad_batches: Literal["stop", "skip"] = "stop"
    max_skipped: int = 20
    sinks: tuple[str, ...] = ()
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("epochs", "keep_checkpoints"):
            at_least(name, getattr(self, name), 1)
        for name in ("eval_every", "checkpoint_every", "seed", "max_skipped"):
            at_least(name, getattr(self, name), 0)
        for name in ("min_delta", "spike_sigmas"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.patience is not None:
            at_least("patience", self.patience, 1)
        if self.max_steps is not None:
            at_least("max_steps", self.max_steps, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. `recipe` is the name that it was made from; it names the run folder.

    `build` is "package.module:function" of yours, in the place of GEM: it takes this configuration and the
    gem_model.ModelInputs, and returns a module with the methods of `gem_model.ranker.Ranker`.
    """

    recipe: str = "custom"
    build: str | None = None
    data: DataConfig = field(default_factory=DataConfig)
    inputs: InputsConfig = field(default_factory=InputsConfig)
    model: GemConfig = field(default_factory=GemConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lowprec: LowprecConfig = field(default_factory=LowprecConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a value below `least`."""
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")
