"""The whole of a run's configuration. Imports no torch: `--help`, `show` and `recipes` answer at once.

The sections `model` and `parallel` are the libraries' own classes, so that a new option there is an option here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gem_data.sources.synthetic import SyntheticConfig
from gem_model.config import GemConfig
from gem_parallel.config import ParallelConfig

from gem_train.config.lowprec import LowprecConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which events, split how, read how.

    Args:
        source: "movielens" (the 100K ratings, a positive is a rating of 4 or 5), "synthetic" (impressions with a known
            optimal NE), or "log" (a folder that gem_data built).
        path: the folder, for source="log".
        samples: the source of the schema whose events are the samples, where some events are history alone (searches);
            None is every event, and "impressions" for a synthetic log with searches.
        cache: where built logs and downloads are kept; None is $XDG_CACHE_HOME/gem-train or ~/.cache/gem-train.
        fallback: use the synthetic source, loudly, where movielens can't be had; False stops the run instead.
        fractions: train, validation and test shares of the global time order.
        batch_size: samples of a training step over all ranks.
        eval_batch_size: samples of an evaluation step over all ranks.
        max_history: the most recent events that a sample's history keeps.
        prefetch: batches prepared ahead in the background.
        synthetic: the make-up of the synthetic source.
    """

    source: Literal["movielens", "synthetic", "log"] = "synthetic"
    path: str | None = None
    samples: str | None = None
    cache: str | None = None
    fallback: bool = True
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1)
    batch_size: int = 512
    eval_batch_size: int = 1024
    max_history: int = 50
    prefetch: int = 2
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)

    def __post_init__(self) -> None:
        if (self.source == "log") != (self.path is not None):
            raise ValueError(
                f"path is {self.path!r} with source={self.source!r}; it is needed for 'log' and only there"
            )
        for name in ("batch_size", "eval_batch_size"):
            at_least(name, getattr(self, name), 1)
        for name in ("max_history", "prefetch"):
            at_least(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True)
class InputsConfig:
    """What of the data the model gets to see.

    Args:
        table_dim: the dim of every embedding table.
        exclude: columns (of the candidate, the user or the history) that are kept from the model.
        standardize: shift and scale the dense features by their mean and deviation over the training split.
    """

    table_dim: int = 32
    exclude: tuple[str, ...] = ()
    standardize: bool = True

    def __post_init__(self) -> None:
        at_least("table_dim", self.table_dim, 1)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW for the dense parameters (Loshchilov & Hutter 2019), row-wise AdaGrad for the tables.

    Both learning rates rise linearly over `warmup_steps`; then "cosine" takes them down to `final_ratio` of their peak
    at the last step, "constant" keeps them. Norms, biases and other vectors are not decayed.

    Args:
        lr, betas, eps, weight_decay: AdamW.
        clip_norm: the largest L2 norm of the dense gradient; None does not clip.
        warmup_steps: steps of linear warm-up.
        schedule: of the dense learning rate.
        final_ratio: where the cosine ends, as a share of the peak.
        sparse_lr, sparse_eps: row-wise AdaGrad.
        sparse_schedule: of the tables' learning rate.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float | None = 1.0
    warmup_steps: int = 50
    schedule: Literal["cosine", "constant"] = "cosine"
    final_ratio: float = 0.05
    sparse_lr: float = 0.05
    sparse_eps: float = 1e-8
    sparse_schedule: Literal["cosine", "constant"] = "cosine"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "sparse_lr"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm is {self.clip_norm}; expected a positive norm or none")
        if not 0.0 <= self.final_ratio <= 1.0:
            raise ValueError(f"final_ratio is {self.final_ratio}; expected a share in [0, 1]")
        at_least("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, how often, where.

    Args:
        epochs: passes over the training split.
        max_steps: stop after so many steps (and plan the schedule for them); None is all of the epochs.
        eval_every: steps between validations; 0 validates at the end alone.
        checkpoint_every: steps between checkpoints; 0 writes one at the end alone.
        keep_checkpoints: how many of them are kept.
        keep_best: test the weights with the best validation NE instead of the last ones.
        seed: of the initial weights, the order of the samples and dropout.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 on CUDA, fp32 on a CPU.
        device: "auto", "cpu" or "cuda".
        timeout_s: how long a collective waits for the other ranks.
    """

    epochs: int = 2
    max_steps: int | None = None
    eval_every: int = 100
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    keep_best: bool = True
    seed: int = 0
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("epochs", "keep_checkpoints"):
            at_least(name, getattr(self, name), 1)
        for name in ("eval_every", "checkpoint_every", "seed"):
            at_least(name, getattr(self, name), 0)
        if self.max_steps is not None:
            at_least("max_steps", self.max_steps, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. `recipe` is the name that it was made from; it names the run folder."""

    recipe: str = "custom"
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
