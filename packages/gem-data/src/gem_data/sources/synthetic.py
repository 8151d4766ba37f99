"""Synthetic impressions whose best possible normalized entropy is known.

Users come in segments, items in categories. A session shows a user one to three items at the same second. With x the
impression, the true probabilities are, sigma the logistic function,

    click      sigma(b0 + item_bias[item] + segment_effect[segment, category] + w_price price + w_affinity affinity)
    convert    click and sigma(c0 + item_quality[item] + v_price price + v_affinity affinity)
    affinity   the share of the user's last `recent` events, strictly before, that are clicks in the item's category

With `drift`, a category's taste moves over the days: drift sin(2 pi (day / DRIFT_DAYS + phase[category])) is added to
the click's logit. With `searches`, users also search for a category now and then, in a history of its own, and
w_intent [the last search, strictly before, was for the candidate's category] is added.

Everything that they depend on is in a batch: item, category, segment and price of the candidate, category and action
in the history. Histories have log-normal or Zipf lengths, items a Zipf popularity within a category, and each user a
favourite category.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gem_data.log.event_log import EventLog
from gem_data.schema import Column, Counter, Schema, Source, Task

ITEMS, CATEGORIES, SEGMENTS = 200, 8, 4
RECENT = 8  # events that the affinity looks back over, unless a configuration says otherwise
SKIP, CLICK, CONVERT = 1, 2, 3  # the action ids; 0 is left for padding
SEARCH = 4  # the action of a search, where there are searches
W_INTENT = 1.5
DRIFT_DAYS = 20.0
W_PRICE, W_AFFINITY, V_PRICE, V_AFFINITY = -0.4, 4.0, -0.5, 1.5
CLICK_BIAS, CONVERT_BIAS = -1.2, -0.9

Array = NDArray[Any]
Lengths = Literal["lognormal", "zipf"]


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """About `events` impressions (users are kept whole) from `seed`.

    A user's number of events, at most `max_length`: log-normal with `median_length` and `sigma`, or with `lengths`
    "zipf" P(n) ~ n^-exponent, most users having next to none.
    """

    events: int = 50_000
    seed: int = 0
    median_length: float = 30.0
    sigma: float = 0.9
    max_length: int = 500
    recent: int = RECENT  # events that the affinity looks back over
    drift: float = 0.0
    searches: float = 0.0  # the share of sessions that begin with a search
    lengths: Lengths = "lognormal"
    exponent: float = 1.5

    def __post_init__(self) -> None:
        for name in ("events", "median_length", "max_length", "recent"):
            if not 1 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name in ("seed", "sigma", "drift", "exponent"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more")
        if not 0 <= self.searches <= 1:
            raise ValueError(f"searches is {self.searches}; expected a share in [0, 1]")
        if self.lengths not in get_args(Lengths):
            raise ValueError(f"lengths is {self.lengths!r}; expected one of {', '.join(get_args(Lengths))}")

    def draw_lengths(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Events of each user, as many users as `events` takes."""
        found = np.empty(0, np.int64)
        mean = self.median_length * np.exp(self.sigma**2 / 2)
        share = 1.0 / np.arange(1, self.max_length + 1) ** self.exponent
        while found.sum() < self.events:
            if self.lengths == "zipf":
                more = 1.0 + np.searchsorted(np.cumsum(share / share.sum()), rng.random(max(8, self.events // 4)))
            else:
                more = rng.lognormal(np.log(self.median_length), self.sigma, max(8, int(self.events / mean)))
            found = np.append(found, np.clip(np.round(more), 1, self.max_length).astype(np.int64))
        return found[: int(np.searchsorted(np.cumsum(found), self.events)) + 1]


def schema(users: int, *, searches: bool = False) -> Schema:
    """The schema of a log of `users` users (the number decides the size of the user table).

    With `searches`, impressions and searches are two histories; `log.source_rows("impressions")` are the samples.
    """
    return Schema(
        name="synthetic",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=users),
            Column(name="segment", kind="id", role="user", cardinality=SEGMENTS),
            Column(name="item", kind="id", role="context", cardinality=ITEMS),
            Column(name="category", kind="id", role="context", cardinality=CATEGORIES),
            Column(name="price", kind="float", role="context"),
            Column(name="action", kind="id", role="outcome", cardinality=CONVERT + 1 + searches),
            *((Column(name="clicked", kind="id", role="outcome", cardinality=2),) if searches else ()),
            Column(name="p_click", kind="float", role="hidden"),
            Column(name="p_convert", kind="float", role="hidden"),
        ),
        tasks=(
            _click(searches),
            Task(name="convert", column="action", equals=CONVERT),
        ),
        counters=(
            Counter(name="item_count", kind="count", key=("item",)),
            Counter(name="item_click_rate", kind="rate", key=("item",), task="click"),
            Counter(name="user_count", kind="count", key=("user",)),
            Counter(name="user_click_rate", kind="rate", key=("user",), task="click"),
            Counter(name="user_since", kind="since", key=("user",)),
        ),
        sources=(
            Source(name="impressions", column="action", values=(SKIP, CLICK, CONVERT)),
            Source(name="searches", column="action", values=(SEARCH,), columns=("category",)),
        )
        if searches
        else (),
    )


def _click(searches: bool) -> Task:
    return Task(name="click", column="clicked" if searches else "action", minimum=CLICK if not searches else 1)


def load(config: SyntheticConfig | None = None) -> tuple[pa.Table, Schema]:
    """The events in order of time, and their schema. The same configuration gives the same events."""
    config = config or SyntheticConfig()
    rng = np.random.default_rng(config.seed)
    lengths = config.draw_lengths(rng)
    columns = _simulate(rng, lengths, config)
    order = np.argsort(columns["time"], kind="stable")
    table = pa.table({name: values[order] for name, values in columns.items()})
    return table, schema(len(lengths), searches=config.searches > 0)


def _simulate(rng: np.random.Generator, lengths: NDArray[np.int64], config: SyntheticConfig) -> dict[str, Array]:
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
    phase = np.random.default_rng(config.seed + 1).random(CATEGORIES)
    wanted = np.full(users, -1)  # the category of the last search
    recent_category = np.full((users, config.recent), -1)
    recent_click = np.zeros((users, config.recent))
    events: list[dict[str, Array]] = []
    while (left > 0).any():
        if config.searches:
            events.append(_search(rng, config.searches, time, left, favourite, segment, wanted))
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
            if config.drift:
                effect = effect + config.drift * drift(time[who], phase[category])
            if config.searches:
                effect = effect + W_INTENT * (wanted[who] == category)
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
                    **({"clicked": (action >= CLICK).astype(np.int64)} if config.searches else {}),
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


def drift(time: Array, phase: Array) -> Array:
    """sin(2 pi (day / DRIFT_DAYS + phase)) for times in seconds: what `SyntheticConfig.drift` multiplies."""
    return np.sin(2 * np.pi * ((time - 1_600_000_000) / 86_400 / DRIFT_DAYS + phase))


def _search(
    rng: np.random.Generator, share: float, time: Array, left: Array, favourite: Array, segment: Array, wanted: Array
) -> dict[str, Array]:
    """Some users search before their session, a second earlier; changes `time` and `wanted`."""
    who = np.flatnonzero((left > 0) & (rng.random(len(time)) < share))
    category = np.where(rng.random(len(who)) < 0.5, favourite[who], rng.integers(CATEGORIES, size=len(who)))
    wanted[who] = category
    when = time[who].copy()
    time[who] += 1
    nothing = np.zeros(len(who), np.int64)
    return {
        "user": who,
        "time": when,
        "segment": segment[who],
        "item": nothing,
        "category": category,
        "price": np.zeros(len(who), np.float32),
        "action": np.full(len(who), SEARCH),
        "clicked": nothing,
        "p_click": np.zeros(len(who), np.float32),
        "p_convert": np.zeros(len(who), np.float32),
    }


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
