"""Synthetic impressions whose best possible normalized entropy is known.

Users come in segments, items in categories. A session shows a user one to three items at the same second. With x the
impression, the true probabilities are, sigma the logistic function,

    click      sigma(b0 + item_bias[item] + segment_effect[segment, category] + w_price price + w_affinity affinity)
    convert    click and sigma(c0 + item_quality[item] + v_price price + v_affinity affinity)
    affinity   the share of the user's last RECENT events, strictly before, that are clicks in the candidate's category

Everything that they depend on is in a batch: item, category, segment and price of the candidate, category and action
in the history. Histories have log-normal lengths, items a Zipf popularity within a category, and each user a favourite
category.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.log import EventLog
from gem_data.schema import Column, Counter, Schema, Task

ITEMS, CATEGORIES, SEGMENTS = 200, 8, 4
RECENT = 8  # events that the affinity looks back over
SKIP, CLICK, CONVERT = 1, 2, 3  # the action ids; 0 is left for padding
W_PRICE, W_AFFINITY, V_PRICE, V_AFFINITY = -0.4, 4.0, -0.5, 1.5
CLICK_BIAS, CONVERT_BIAS = -1.2, -0.9

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """About `events` impressions (users are kept whole) from `seed`; median and spread of a user's number of events."""

    events: int = 50_000
    seed: int = 0
    median_length: float = 30.0
    sigma: float = 0.9
    max_length: int = 500

    def __post_init__(self) -> None:
        if self.events < 1 or self.median_length < 1 or self.sigma < 0 or self.max_length < 1:
            raise ValueError(f"events, median_length and max_length must be 1 or more and sigma 0 or more: {self}")


def schema(users: int) -> Schema:
    """The schema of a log of `users` users (the number decides the size of the user table)."""
    return Schema(
        name="synthetic",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            Column(name="segment", kind="id", role="user", cardinality=SEGMENTS),
            Column(name="item", kind="id", role="context", cardinality=ITEMS),
            Column(name="category", kind="id", role="context", cardinality=CATEGORIES),
            Column(name="price", kind="float", role="context"),
            Column(name="action", kind="id", role="outcome", cardinality=CONVERT + 1),
            Column(name="p_click", kind="float", role="hidden"),
            Column(name="p_convert", kind="float", role="hidden"),
        ),
        tasks=(
            Task(name="click", column="action", minimum=CLICK),
            Task(name="convert", column="action", equals=CONVERT),
        ),
        counters=(
            Counter(name="item_count", kind="count", key=("item",)),
            Counter(name="item_click_rate", kind="rate", key=("item",), task="click"),
            Counter(name="user_count", kind="count", key=("user",)),
            Counter(name="user_click_rate", kind="rate", key=("user",), task="click"),
            Counter(name="user_since", kind="since", key=("user",)),
        ),
    )


def load(config: SyntheticConfig | None = None) -> tuple[pa.Table, Schema]:
    """The events in order of time, and their schema. The same configuration gives the same events."""
    config = config or SyntheticConfig()
    rng = np.random.default_rng(config.seed)
    mean = config.median_length * np.exp(config.sigma**2 / 2)
    lengths = np.empty(0, np.int64)
    while lengths.sum() < config.events:
        more = rng.lognormal(np.log(config.median_length), config.sigma, max(8, int(config.events / mean)))
        lengths = np.append(lengths, np.clip(np.round(more), 1, config.max_length).astype(np.int64))
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), config.events)) + 1]
    columns = _simulate(rng, lengths)
    order = np.argsort(columns["time"], kind="stable")
    return pa.table({name: values[order] for name, values in columns.items()}), schema(len(lengths))


def _simulate(rng: np.random.Generator, lengths: NDArray[np.int64]) -> dict[str, Array]:
    """All users in step: session s of every user that is not finished, then session s + 1."""
    users = len(lengths)
    category_of = np.arange(ITEMS) % CATEGORIES
    item_bias = rng.normal(0, 0.7, ITEMS)
    item_quality = rng.normal(0, 0.6, ITEMS)
    segment_effect = rng.normal(0, 0.5, (SEGMENTS, CATEGORIES))
    segment = rng.integers(SEGMENTS, size=users)
    favourite = rng.integers(CATEGORIES, size=users)
    per_category = ITEMS // CATEGORIES
    popularity = 1.0 / np.arange(1, per_category + 1)  # Zipf
    popularity = np.cumsum(popularity / popularity.sum())

    time = rng.integers(1_600_000_000, 1_600_000_000 + 30 * 86_400, size=users)  # users arrive over a month
    left = lengths.copy()
    recent_category = np.full((users, RECENT), -1)
    recent_click = np.zeros((users, RECENT))
    events: list[dict[str, Array]] = []
    while (left > 0).any():
        shown = np.minimum(rng.integers(1, 4, size=users), left)
        session: list[tuple[Array, Array, Array]] = []
        for slot in range(3):
            who = np.flatnonzero(shown > slot)
            n = len(who)
            at_home = rng.random(n) < 0.5
            category = np.where(at_home, favourite[who], rng.integers(CATEGORIES, size=n))
            rank = np.minimum(np.searchsorted(popularity, rng.random(n)), per_category - 1)
            item = rank * CATEGORIES + category
            price = rng.normal(0, 1, n).astype(np.float32)
            affinity = ((recent_category[who] == category[:, None]) * recent_click[who]).mean(axis=1)
            effect = item_bias[item] + segment_effect[segment[who], category]
            p_click = _sigmoid(CLICK_BIAS + effect + W_PRICE * price + W_AFFINITY * affinity)
            p_convert = p_click * _sigmoid(CONVERT_BIAS + item_quality[item] + V_PRICE * price + V_AFFINITY * affinity)
            # One draw decides: below p_convert a conversion, below p_click a click.
            draw = rng.random(n)
            action = np.where(draw < p_convert, CONVERT, np.where(draw < p_click, CLICK, SKIP))
            events.append(
                {
                    "user": who,
                    "time": time[who],
                    "segment": segment[who],
                    "item": item,
                    "category": category_of[item],
                    "price": price,
                    "action": action,
                    "p_click": p_click.astype(np.float32),
                    "p_convert": p_convert.astype(np.float32),
                }
            )
            session.append((who, category, (action >= CLICK).astype(np.float64)))
        # Only now does the session become history: its events share a second and do not see one another.
        for who, category, click in session:
            recent_category[who] = np.concatenate([recent_category[who, 1:], category[:, None]], axis=1)
            recent_click[who] = np.concatenate([recent_click[who, 1:], click[:, None]], axis=1)
        left -= shown
        time += 1 + rng.exponential(20_000, users).astype(np.int64)
    return {name: np.concatenate([e[name] for e in events]) for name in events[0]}


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def optimal_ne(log: EventLog, rows: Any) -> dict[str, float]:
    """The normalized entropy of the true probabilities on `rows`, by task: what no model beats, save by luck.

    NE = mean log loss / entropy of the empirical base rate, in float64 (He et al., "Practical Lessons from Predicting
    Clicks on Ads at Facebook", 2014). Raises ValueError for a log of another source, or labels that are all alike.
    """
    index = log.rows(rows)
    labels, _ = log.labels(index)
    out: dict[str, float] = {}
    for k, name in enumerate(log.schema.task_names):
        p = log.column(f"p_{name}")[index].astype(np.float64)
        y = labels[:, k].astype(np.float64)
        rate = y.mean() if len(y) else 0.0
        if not 0 < rate < 1:
            raise ValueError(f"task {name!r} has only one kind of label in these {len(y)} rows, so its entropy is 0")
        loss = -(y * np.log(p) + (1 - y) * np.log1p(-p)).mean()
        out[name] = float(loss / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
    return out
