"""The recipes that come with gem-train."""

from __future__ import annotations

from gem_data.sources.synthetic import SyntheticConfig
from gem_model.config import GemConfig, TowerConfig
from gem_model.presets import preset

from gem_train.config import DataConfig, InputsConfig, OptimConfig, RunConfig, TrainConfig


def ml100k() -> RunConfig:
    """MovieLens-100K as a click task (rating >= 4), split by global time 80/10/10; minutes on two CPU cores."""
    return RunConfig(
        data=DataConfig(source="movielens", batch_size=512, max_history=50),
        # Most test users are not in the training split.
        inputs=InputsConfig(table_dim=16, exclude=("user",)),
        # What is learned, the reader learns from evidence; interactions correct it, and are small, for wide ones learn
        # 80,000 samples by heart.
        model=GemConfig(
            width=16,
            heads=2,
            layers=1,
            n_tokens=4,
            n_dense=1,
            n_sum=1,
            pma_queries=0,
            recent=0,
            evidence_heads=8,
            evidence_dim=19,
            evidence_dropout=0.2,
            reader=(64, 64),
            interaction_rank=2,
            interaction_hidden=1,
            interaction_fm=2,
            head_hidden=16,
            dropout=0.2,
            towers=(TowerConfig(source="events", layers=0),),
        ),
        optim=OptimConfig(
            lr=5e-3,
            weight_decay=0.1,
            schedule="cosine",
            final_ratio=0.35,  # the best weights are those of the third of five or six epochs
            warmup_steps=50,
            ema_decay=0.99,
            sparse_lr=0.1,
            sparse_schedule="cosine",
        ),
        train=TrainConfig(epochs=3, eval_every=78, checkpoint_every=0),
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


def clicks10m() -> RunConfig:
    """Ten million simulated impressions whose best possible NE is known, in one pass; minutes on one GPU."""
    return RunConfig(
        data=DataConfig(
            source="synthetic",
            fractions=(0.985, 0.005, 0.01),  # 100,000 to test: a difference to the optimum needs no more
            batch_size=16_384,  # a step of 1024 takes the host as long
            eval_batch_size=16_384,
            max_history=8,  # what the truth looks back over
            synthetic=SyntheticConfig(events=10_000_000),
        ),
        inputs=InputsConfig(table_dim=16, exclude=("user",)),
        # The truth is additive but for the share of the last eight events that were clicks in the candidate's category:
        # they enter the interaction one by one, and the affinity sums what they were worth.
        model=GemConfig(
            width=32,
            heads=2,
            layers=1,
            n_tokens=12,
            n_dense=2,
            n_sum=4,
            pma_queries=2,
            recent=8,
            evidence_heads=4,
            affinity_heads=4,
            reader=(64, 64),
            ff_mult=1.0,
            pffn_tokens=4,
            interaction_fm=6,
            head_hidden=64,
        ),
        optim=OptimConfig(lr=4e-3, sparse_lr=0.1, warmup_steps=50, ema_decay=0.98),
        train=TrainConfig(epochs=1, eval_every=0, checkpoint_every=0),
    )


def openbandit() -> RunConfig:
    """Clicks on fashion items, one impression in 200: the Open Bandit sample, 60,000 impressions; a minute on a CPU."""
    return RunConfig(
        data=DataConfig(
            source="own",
            load="gem_data.sources.open_bandit:load",
            batch_size=4096,  # 19 clicks
            eval_batch_size=6000,
            max_history=0,  # people are anonymous: a "user" is everyone of the same four features
        ),
        inputs=InputsConfig(table_dim=8, exclude=("user",)),
        model=preset("tiny", head_hidden=1),
        # 222 clicks to learn from. AdamW divides a gradient by its size, so that chance moves what it knows nothing of
        # as far as evidence does. With an eps above any gradient here steps are in proportion to it, as SGD's with a
        # rate of lr / eps, and the model stays at the base rate but for what the clicks agree on.
        optim=OptimConfig(
            lr=1.5,
            eps=0.1,
            weight_decay=0.1,
            sparse_lr=0.001,
            warmup_steps=0,
        ),
        train=TrainConfig(epochs=2, eval_every=0, checkpoint_every=0),
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
