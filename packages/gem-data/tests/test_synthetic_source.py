from __future__ import annotations

import numpy as np
import pytest
import torch
from gem_data import Collator, EventLog, build_log, time_split
from gem_data.sources import synthetic


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> EventLog:
    folder = tmp_path_factory.mktemp("logs") / "synthetic"
    build_log(*synthetic.load(synthetic.SyntheticConfig(events=20_000, seed=3)), folder)
    return EventLog.open(folder)


def affinities(log: EventLog, recent: int) -> np.ndarray:
    """The affinity, recomputed from the histories that a batch shows."""
    sequence = Collator(log, max_history=recent)(np.arange(len(log))).sequences["events"]
    sample = np.repeat(np.arange(len(log)), sequence.offsets.diff().numpy())
    hit = (sequence.ids["action"] >= synthetic.CLICK).numpy() & (
        sequence.ids["category"].numpy() == log.column("category")[sample]
    )
    return np.bincount(sample, weights=hit, minlength=len(log)) / recent


@pytest.fixture(scope="module", params=[synthetic.RECENT, 24])
def told(request, log, tmp_path_factory) -> tuple[EventLog, np.ndarray]:
    """A log and its affinity, which looks back as far as the source says, or as it was told to."""
    if request.param != synthetic.RECENT:
        folder = tmp_path_factory.mktemp("logs") / "longer"
        config = synthetic.SyntheticConfig(events=20_000, seed=4, recent=request.param)
        build_log(*synthetic.load(config), folder)
        log = EventLog.open(folder)
    return log, affinities(log, request.param)


def logit(p: np.ndarray) -> np.ndarray:
    p = p.astype(np.float64)
    return np.log(p) - np.log1p(-p)


@pytest.mark.parametrize(("task", "groups"), [("click", ("item", "segment")), ("convert", ("item",))])
def test_the_true_probability_is_a_function_of_what_a_batch_shows(told, task, groups):
    log, affinity = told
    price = log.column("price")
    p = log.column("p_click")
    if task == "convert":
        p = log.column("p_convert") / p
        rest = logit(p) - synthetic.V_PRICE * price - synthetic.V_AFFINITY * affinity
    else:
        rest = logit(p) - synthetic.W_PRICE * price - synthetic.W_AFFINITY * affinity
    key = np.zeros(len(log), np.int64)
    for name in groups:
        key = key * log.schema.tables[name] + log.column(name)
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(key[order]) != 0])
    spread = np.maximum.reduceat(rest[order], starts) - np.minimum.reduceat(rest[order], starts)
    assert spread.max() < 1e-5
    assert rest.std() > 0.3


def test_labels_are_drawn_from_the_true_probabilities(log):
    labels, _ = log.labels(np.arange(len(log)))
    for k, task in enumerate(("click", "convert")):
        p = log.column(f"p_{task}").astype(np.float64)
        error = (labels[:, k] - p) / np.sqrt(p * (1 - p))
        for part in (p < np.median(p), p >= np.median(p)):
            assert abs(error[part].sum()) / np.sqrt(part.sum()) < 4
        assert 0.95 < (error**2).mean() < 1.05


def test_the_optimum_is_the_entropy_of_the_truth(log):
    split = time_split(log)
    rows = split.test
    labels, _ = log.labels(rows)
    best = synthetic.optimal_ne(log, rows)
    for k, task in enumerate(("click", "convert")):
        y = torch.from_numpy(labels[:, k]).double()
        p = torch.from_numpy(log.column(f"p_{task}")[rows]).double()
        entropy = torch.nn.functional.binary_cross_entropy(y.mean().expand(len(y)), y)
        assert best[task] == pytest.approx(float(torch.nn.functional.binary_cross_entropy(p, y) / entropy), abs=1e-9)
        assert 0.5 < best[task] < 0.95
    with pytest.raises(ValueError, match="only one kind of label"):
        synthetic.optimal_ne(log, rows[:1])


def test_the_optimum_can_be_learnt_and_needs_the_history(log):
    """A logistic regression on the right features comes within 2.5% of the optimum; not so without the affinity."""
    split = time_split(log)
    labels, _ = log.labels(np.arange(len(log)))
    y = torch.from_numpy(labels[:, 0])
    item = torch.from_numpy(log.column("item").copy())
    cell = torch.from_numpy(log.column("segment") * synthetic.CATEGORIES + log.column("category"))

    def fit(features: list[np.ndarray]) -> float:
        x = torch.from_numpy(np.stack([np.ones(len(log)), log.column("price"), *features], axis=1)).float()
        tables = [torch.zeros(n, requires_grad=True) for n in (synthetic.ITEMS, 32, x.shape[1])]
        train, test = torch.from_numpy(split.train), torch.from_numpy(split.test)

        def logits(rows: torch.Tensor) -> torch.Tensor:
            return tables[0][item[rows]] + tables[1][cell[rows]] + x[rows] @ tables[2]

        optimizer = torch.optim.LBFGS(tables, max_iter=30)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value = torch.nn.functional.binary_cross_entropy_with_logits(logits(train), y[train])
            value = value + 2e-5 * sum((t**2).sum() for t in tables)
            value.backward()
            return value

        optimizer.step(loss)
        with torch.no_grad():
            rate = y[test].mean().expand(len(test))
            entropy = torch.nn.functional.binary_cross_entropy(rate, y[test])
            return float(torch.nn.functional.binary_cross_entropy_with_logits(logits(test), y[test]) / entropy)

    best = synthetic.optimal_ne(log, split.test)["click"]
    assert best < fit([affinities(log, synthetic.RECENT)]) < best * 1.025
    assert fit([]) > best * 1.1


def test_shape_of_the_log(log):
    assert 20_000 <= len(log) <= 20_000 + 500
    assert log.manifest["rejected"] == {}
    lengths = np.diff(log.user_offsets)
    assert 25 < np.median(lengths) < 36
    assert 0.7 < np.log(lengths).std() < 1.0
    ties = np.diff(log.time) == 0
    assert ties[np.diff(log.user) == 0].mean() > 0.2
    counts = np.sort(np.bincount(log.column("item"), minlength=synthetic.ITEMS))[::-1]
    assert counts[: synthetic.ITEMS // 10].sum() > 0.3 * len(log)


def test_seed_and_size():
    small = synthetic.SyntheticConfig(events=500, seed=1)
    a, schema = synthetic.load(small)
    assert a.equals(synthetic.load(small)[0])
    assert not a.equals(synthetic.load(synthetic.SyntheticConfig(events=500, seed=2))[0])
    assert 500 <= a.num_rows <= 1000
    assert schema.column("user").cardinality > 5
    with pytest.raises(ValueError, match="1 or more"):
        synthetic.SyntheticConfig(events=0)


def test_zipf_lengths_follow_their_law():
    config = synthetic.SyntheticConfig(events=300_000, lengths="zipf", exponent=1.3, max_length=64)
    table, _ = synthetic.load(config)
    lengths = np.bincount(table["user"].to_numpy())
    n = np.arange(1, 65)
    expected = n**-1.3 / (n**-1.3).sum() * len(lengths)
    found = np.bincount(lengths, minlength=65)[1:]
    assert found.sum() == len(lengths) > 10_000
    assert ((found - expected) ** 2 / expected).sum() < 103.4  # 0.1% point of chi-squared, 63 degrees
    wrong = {"lengths": "zipff", "exponent": -1, "events": 0, "median_length": float("nan"), "searches": 1.5}
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"^{name} is {value!r}; expected"):
            synthetic.SyntheticConfig(**{name: value})


def test_drift_and_searches_are_in_the_true_probability_and_in_the_batch(tmp_path):
    config = synthetic.SyntheticConfig(events=15_000, seed=5, drift=0.8, searches=0.4)
    build_log(*synthetic.load(config), tmp_path / "log")
    log = EventLog.open(tmp_path / "log")
    rows = log.source_rows("impressions")
    assert 0.1 < 1 - len(rows) / len(log) < 0.3
    batch = Collator(log, max_history={"impressions": synthetic.RECENT * 3, "searches": 1})(rows)
    category = log.column("category")[rows]
    # The last search, from its own history.
    searches = batch.sequences["searches"]
    assert set(searches.ids) == {"category"}
    last = np.full(len(rows), -1)
    last[searches.offsets.diff().numpy() > 0] = searches.ids["category"].numpy()
    intent = last == category
    # The affinity, from the last RECENT impressions.
    seen = batch.sequences["impressions"]
    affinity = np.zeros(len(rows))
    for b, (a, z) in enumerate(zip(seen.offsets[:-1].tolist(), seen.offsets[1:].tolist(), strict=True)):
        part = slice(max(a, z - synthetic.RECENT), z)
        hit = (seen.ids["action"][part] >= synthetic.CLICK) & (seen.ids["category"][part] == int(category[b]))
        affinity[b] = float(hit.sum()) / synthetic.RECENT
    phase = np.random.default_rng(config.seed + 1).random(synthetic.CATEGORIES)
    wave = np.sin(2 * np.pi * ((log.time[rows] - 1.6e9) / 86_400 / synthetic.DRIFT_DAYS + phase[category]))
    rest = logit(log.column("p_click")[rows]) - synthetic.W_PRICE * log.column("price")[rows]
    rest = rest - synthetic.W_AFFINITY * affinity - synthetic.W_INTENT * intent - config.drift * wave
    key = log.column("item")[rows] * synthetic.SEGMENTS + log.column("segment")[rows]
    for k in np.unique(key)[::7]:
        assert np.ptp(rest[key == k]) < 1e-4
    labels, mask = log.labels(rows)
    p = log.column("p_click")[rows].astype(np.float64)
    assert mask.all()
    assert abs((labels[:, 0] - p).sum()) / np.sqrt((p * (1 - p)).sum()) < 4
    assert 0.5 < synthetic.optimal_ne(log, rows)["click"] < 0.95
    with pytest.raises(ValueError, match="a share"):
        synthetic.SyntheticConfig(searches=1.5)
