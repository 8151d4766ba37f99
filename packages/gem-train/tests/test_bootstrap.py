"""Intervals and paired comparisons: against slow formulas, against how often they are right, and from the command."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
from gem_train import metrics
from gem_train.cli import main
from gem_train.comparison import compare
from gem_train.errors import UserError
from gem_train.metrics import METRICS, bootstrap, resample
from gem_train.run_dir import RunDir, read_json, write_json

NAMES = dict(zip(METRICS, range(len(METRICS)), strict=True))


def samples(seed, users=12, most=9, models=1, spread=0.0):
    """Groups, labels and logits of users with different numbers of samples and, by `spread`, different rates."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(rng.permutation(1000)[:users], rng.integers(1, most, users))
    own = {g: rng.normal(0, spread) for g in set(groups)}
    true = rng.normal(0, 1, len(groups)) + np.array([own[g] for g in groups])
    labels = (rng.random(len(groups)) < metrics.sigmoid(true)).astype(float)
    return groups, labels, [true + rng.normal(0, 0.3, len(groups)) for _ in range(models)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ties", [False, True])
def test_every_draw_is_the_figures_of_the_samples_written_out(seed, ties):
    groups, labels, logits = samples(seed, models=2)
    if ties:
        logits = [np.round(z) for z in logits]
    found = resample(groups, labels, logits, draws=100, seed=seed)
    users = np.unique(groups)
    (counts,) = list(bootstrap._counts(len(users), 100, seed))
    assert found.values.shape == (100, len(METRICS), 2)
    for row, count in [*zip(found.values, counts, strict=True), (found.points, np.ones(len(users)))]:
        copies = [(u, c) for u, n in zip(users, count, strict=True) for c in range(int(n))]
        rows = np.concatenate([np.flatnonzero(groups == u) for u, _ in copies])
        # A user who was drawn twice is two users.
        as_drawn = np.concatenate([np.full((groups == u).sum(), i) for i, (u, _) in enumerate(copies)])
        for k, z in enumerate(logits):
            slow = metrics.summarize(as_drawn, labels[rows], z[rows])
            for name, m in NAMES.items():
                np.testing.assert_allclose(row[m, k], slow[name], rtol=1e-9, equal_nan=True, err_msg=name)


def test_draws_take_each_user_as_often_as_another():
    counts = np.concatenate(list(bootstrap._counts(7, 4000, 1)))
    assert (counts.sum(axis=1) == 7).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(7), abs=0.06)
    assert counts.var(axis=0) == pytest.approx(np.full(7, 6 / 7), abs=0.1)  # of a multinomial


def test_draws_do_not_depend_on_the_block(monkeypatch):
    whole = np.concatenate(list(bootstrap._counts(5, 120, 3)))
    monkeypatch.setattr(bootstrap, "BLOCK", 35)
    np.testing.assert_array_equal(np.concatenate(list(bootstrap._counts(5, 120, 3))), whole)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    """95 % intervals of the mean label's log loss under users that differ; ones that ignore users fail by far."""
    hits = naive = 0
    rounds = 120
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        users, each = 60, 12
        rate = np.repeat(metrics.sigmoid(rng.normal(0, 1.5, users)), each)
        labels = (rng.random(users * each) < rate).astype(float)
        logits = np.full(users * each, 1.0)
        truth = math.log1p(math.exp(1.0)) - 0.5 * 1.0  # E log loss where the rate is 1/2 on average
        for groups, by_user in ((np.repeat(np.arange(users), each), True), (np.arange(users * each), False)):
            low, high = resample(groups, labels, [logits], draws=200, seed=seed).interval(0.95)
            inside = low[NAMES["log_loss"], 0] <= truth <= high[NAMES["log_loss"], 0]
            hits, naive = hits + (by_user and inside), naive + (not by_user and inside)
    assert hits / rounds > 0.88
    assert naive / rounds < 0.80


def test_a_paired_difference_shows_what_single_intervals_can_not():
    groups, labels, (z,) = samples(5, users=300, most=12, spread=1.0)
    found = resample(groups, labels, [z, 1.12 * z + 0.08], draws=400)
    ne = NAMES["ne"]
    (low, high), (difference, dlow, dhigh, p) = found.interval(0.95), found.difference(0.95)
    assert low[ne, 0] < found.points[ne, 1] < high[ne, 0]  # alone, each lies inside the other's
    assert dlow[ne] <= difference[ne] <= dhigh[ne]
    assert dhigh[ne] - dlow[ne] < 0.4 * (high[ne, 0] - low[ne, 0])
    assert 0 < p[ne] <= 1
    same = resample(groups, labels, [z, z], draws=400).difference(0.95)
    assert same[0] == pytest.approx(np.zeros(len(METRICS)))
    assert same[3] == pytest.approx(np.ones(len(METRICS)))


def test_p_is_small_by_chance_as_often_as_it_says():
    small = 0
    rounds = 150
    for seed in range(rounds):
        rng = np.random.default_rng(1000 + seed)
        groups = np.repeat(np.arange(80), 6)
        z = rng.normal(0, 1, len(groups))
        labels = (rng.random(len(groups)) < metrics.sigmoid(z)).astype(float)
        rivals = [z + rng.normal(0, 0.4, len(groups)) for _ in range(2)]  # equally good
        small += resample(groups, labels, rivals, draws=200, seed=seed).difference(0.95)[3][NAMES["ne"]] < 0.05
    assert small / rounds < 0.12


def test_a_large_split_gets_fewer_draws_of_the_auc_or_none(monkeypatch):
    groups, labels, (z,) = samples(2, users=50)
    monkeypatch.setattr(bootstrap, "AUC_WORK", 120 * len(z))
    some = resample(groups, labels, [z], draws=200)
    assert np.isfinite(some.values[:, NAMES["auc"], 0]).sum() == 120
    assert np.isfinite(some.interval(0.9)[0]).all()
    monkeypatch.setattr(bootstrap, "AUC_WORK", 99 * len(z))
    none = resample(groups, labels, [z], draws=200)
    assert np.isnan(none.interval(0.9)[0][NAMES["auc"], 0])
    assert np.isfinite(none.points).all()


def test_what_does_not_exist_has_no_interval():
    found = resample([1, 1, 2], [0, 0, 0], [[0.1, 0.2, 0.3]], draws=100)
    low, high = found.interval(0.95)
    for name in ("ne", "auc", "gauc", "calibration"):
        assert np.isnan([low[NAMES[name], 0], high[NAMES[name], 0], found.points[NAMES[name], 0]]).all()
    assert np.isfinite(low[NAMES["log_loss"], 0])
    for arguments, says in ((([], [], [[]]), "no samples"), (([1], [1.0], [[0.0]]), "draws is 3")):
        with pytest.raises(ValueError, match=says):
            resample(*arguments, draws=3 if says != "no samples" else 100)


# Runs.


def test_eval_json_has_an_interval_around_every_figure(finished_run):
    results = read_json(RunDir(finished_run).eval_file)
    for task, figures in results["model"].items():
        for name in METRICS:
            low, high = results["intervals"][task][name]
            assert low < figures[name] < high, (task, name)
    assert results["intervals"].keys() == results["model"].keys()
    users = len(set(pq.read_table(RunDir(finished_run).predictions_file)["group"].to_pylist()))
    warned = any(f"only {users} users" in note for note in results["notes"])
    assert warned == (users < metrics.FEW_USERS)


@pytest.fixture
def rival(finished_run, tmp_path):
    """A copy of the run with worse predictions, and no 5 of its samples."""
    copy = tmp_path / "rival"
    shutil.copytree(finished_run, copy, ignore=shutil.ignore_patterns("checkpoints", "best"))
    change(copy, lambda t, rng: t.set_column(t.column_names.index("p_click"), "p_click", [shrunk(t["p_click"], rng)]))
    return copy


def shrunk(p, rng):
    z = metrics.logit(p.to_numpy())
    return metrics.sigmoid(2.5 * z + rng.normal(0, 1.5, len(z)))


def change(folder, how):
    run = RunDir(folder)
    table = pq.read_table(run.predictions_file)
    pq.write_table(how(table, np.random.default_rng(0)), run.predictions_file)


def test_diff_finds_a_worse_run(finished_run, rival, capsys):
    change(rival, lambda t, _: t.slice(5))
    assert main(["diff", str(finished_run), str(rival), "--draws", "300"]) == 0
    text = capsys.readouterr().out
    assert "B is worse, at 95% confidence" in text
    assert "convert: NE" in text
    assert "5 test samples of" in text
    assert main(["diff", str(rival), str(finished_run), "--draws", "300", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ne = found["tasks"]["click"]["metrics"]["ne"]
    assert ne["low"] <= ne["difference"] <= ne["high"] < 0
    assert ne["p"] == pytest.approx(2 / 301)  # as small as 300 draws allow
    for metric, m in found["tasks"]["convert"]["metrics"].items():
        assert m["difference"] == 0, metric


def test_a_run_differs_from_itself_by_nothing(finished_run, capsys):
    assert main(["diff", str(finished_run), str(finished_run), "--draws", "100"]) == 0
    text = capsys.readouterr().out
    assert "click: " in text
    assert "no difference that" in text
    results = read_json(RunDir(finished_run).eval_file)
    found = compare(RunDir(finished_run), RunDir(finished_run), draws=100)
    for task, of_task in found["tasks"].items():
        assert of_task["metrics"]["ne"]["a"] == pytest.approx(results["model"][task]["ne"], rel=1e-9)


def test_probabilities_that_were_rounded_to_0_and_1_still_compare(finished_run, rival):
    change(
        rival,
        lambda t, _: t.set_column(t.column_names.index("p_click"), "p_click", [[float(i % 2) for i in range(len(t))]]),
    )
    found = compare(RunDir(finished_run), RunDir(rival), draws=100)
    assert found["tasks"]["click"]["metrics"]["ne"]["low"] > 1
    assert math.isfinite(found["tasks"]["click"]["metrics"]["log_loss"]["b"])


def test_runs_that_can_not_be_compared_are_refused(finished_run, rival):
    one, two = RunDir(finished_run), RunDir(rival)
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match="level is"):
            compare(one, two, draws=100, level=level)

    def flipped(table, _):
        column = [1.0 - i % 2 for i in range(len(table))]
        return table.set_column(table.column_names.index("label_click"), "label_click", [column])

    change(rival, flipped)
    with pytest.raises(UserError, match="the labels of task 'click' differ"):
        compare(one, two, draws=100)
    change(rival, lambda t, _: t.set_column(0, "sample_id", [[10**9 + i for i in range(len(t))]]))
    with pytest.raises(UserError, match="no test sample in common"):
        compare(one, two)
    write_json(two.data_file, {**read_json(two.data_file), "digest": "another"})
    with pytest.raises(UserError, match="different data: digest"):
        compare(one, two)
    two.predictions_file.unlink()
    write_json(two.data_file, read_json(one.data_file))
    assert main(["diff", str(finished_run), str(rival)]) == 2
