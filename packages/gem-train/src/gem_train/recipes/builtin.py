"""The recipes that come with gem-train."""

from __future__ import annotations

from gem_data.sources.synthetic import SyntheticConfig
from gem_model.config import GemConfig
from gem_model.presets import preset

from gem_train.config import DataConfig, InputsConfig, OptimConfig, RunConfig, TrainConfig


def ml100k() -> RunConfig:
    """MovieLens-100K as a click task (rating >= 4), split by global time 80/10/10; minutes on two CPU cores."""
    return RunConfig(
        data=DataConfig(source="movielens", batch_size=512, max_history=50),
        # Most test users are not in the training split, and what describes a user there is learned by heart, too.
        inputs=InputsConfig(table_dim=16, exclude=("user", "age", "gender", "occupation")),
        # Most is learned by the evidence; the towers are narrow, for wide ones learn 80,000 samples by heart.
        model=GemConfig(
            width=16,
            heads=2,
            layers=1,
            n_tokens=6,
            n_dense=2,
            n_sum=2,
            pma_queries=1,
            recent=1,
            evidence_heads=8,
            ff_mult=1.0,
            pffn_tokens=2,
            interaction_rank=4,
            interaction_hidden=2,
            interaction_fm=3,
            head_hidden=64,
            dropout=0.2,
        ),
        optim=OptimConfig(
            lr=5e-3,
            weight_decay=0.1,
            schedule="wsd",
            warmup_steps=30,
            ema_decay=0.98,
            sparse_lr=0.3,
            sparse_schedule="wsd",
        ),
        train=TrainConfig(epochs=3, eval_every=78, checkpoint_every=78),
    )


def synthetic() -> RunConfig:
    """Simulated clicks and conversions whose best possible NE is known; minutes on two CPU cores."""
    return RunConfig(
        data=DataConfig(source="synthetic", batch_size=256, max_history=32, synthetic=SyntheticConfig(events=100_000)),
        inputs=InputsConfig(table_dim=16, exclude=("user",)),
        model=GemConfig(width=32, heads=2, layers=1),
        optim=OptimConfig(lr=3e-3, sparse_lr=0.05, warmup_steps=20),
        train=TrainConfig(epochs=2, eval_every=100, checkpoint_every=100),
    )


def log() -> RunConfig:
    """A log of your own, built by `gem-train data prepare`: --set data.path=FOLDER."""
    return RunConfig(
        data=DataConfig(source="log", path="log", batch_size=512, max_history=100),
        inputs=InputsConfig(table_dim=32),
        model=preset("small"),
        optim=OptimConfig(lr=1e-3, weight_decay=0.1, sparse_lr=0.05, warmup_steps=100),
        train=TrainConfig(epochs=1, eval_every=200, checkpoint_every=200),
    )


def large() -> RunConfig:
    """The large shape on simulated impressions and searches, in eight parts a step: for one GPU, and for the ladder."""
    return RunConfig(
        data=DataConfig(
            source="synthetic",
            batch_size=1024,
            eval_batch_size=128,
            max_history=2048,
            synthetic=SyntheticConfig(events=50_000, searches=0.5),
        ),
        inputs=InputsConfig(table_dim=64, exclude=("user",)),
        model=preset("large"),
        optim=OptimConfig(lr=1e-3, sparse_lr=0.05, warmup_steps=50, accumulate=8),
        train=TrainConfig(epochs=1, eval_every=0, checkpoint_every=0),
    )
