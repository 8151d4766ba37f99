"""Each metric against a slow formula written another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gem_train import metrics
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=60, deadline=None)


def slow_auc(y, z, w=None):
    w = np.ones(len(y)) if w is None else w
    won = pairs = 0.0
    for i in range(len(y)):
        for j in range(len(y)):
            if y[i] == 1 and y[j] == 0:
                pairs += w[i] * w[j]
                won += w[i] * w[j] * (1.0 if z[i] > z[j] else 0.5 if z[i] == z[j] else 0.0)
    return won / pairs if pairs else math.nan


def samples(seed, n, ties):
    rng = np.random.default_rng(seed)
    z = rng.integers(-3, 4, n).astype(float) if ties else rng.normal(0, 2, n)
    return rng.integers(0, 2, n).astype(float), z, rng.random(n) + 0.1, rng.integers(0, 5, n)


@SETTINGS
@given(seed=st.integers(0, 10**6), n=st.integers(1, 40), ties=st.booleans(), weighted=st.booleans())
def test_auc_counts_pairs(seed, n, ties, weighted):
    y, z, w, _ = samples(seed, n, ties)
    w = w if weighted else None
    np.testing.assert_allclose(metrics.auc(y, z, w), slow_auc(y, z, w), rtol=1e-12, equal_nan=True)


@SETTINGS
@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), ties=st.booleans())
def test_gauc_is_the_impression_weighted_mean_of_the_users(seed, n, ties):
    y, z, _, users = samples(seed, n, ties)
    users = users * 1000 - 7
    values = {u: (slow_auc(y[users == u], z[users == u]), (users == u).sum()) for u in set(users)}
    kept = {u: v for u, v in values.items() if not math.isnan(v[0])}
    expected = sum(a * c for a, c in kept.values()) / sum(c for _, c in kept.values()) if kept else math.nan
    got = metrics.grouped_auc(users, y, z)
    np.testing.assert_allclose(got.value, expected, rtol=1e-12, equal_nan=True)
    assert (got.groups, got.skipped) == (len(kept), len(values) - len(kept))


@SETTINGS
@given(seed=st.integers(0, 10**6), n=st.integers(2, 60), weighted=st.booleans())
def test_log_loss_ne_and_calibration_from_probabilities(seed, n, weighted):
    y, z, w, _ = samples(seed, n, False)
    y[:2] = 0, 1
    p = [1 / (1 + math.exp(-v)) for v in z]
    use = w if weighted else np.ones(n)
    loss = -sum(c * math.log(q if t else 1 - q) for c, q, t in zip(use, p, y, strict=True)) / sum(use)
    rate = sum(c * t for c, t in zip(use, y, strict=True)) / sum(use)
    entropy = -rate * math.log2(rate) * math.log(2) - (1 - rate) * math.log(1 - rate)
    given_weights = w if weighted else None
    assert metrics.log_loss(y, z, given_weights) == pytest.approx(loss, rel=1e-12)
    assert metrics.normalized_entropy(y, z, given_weights) == pytest.approx(loss / entropy, rel=1e-12)
    expected = sum(c * q for c, q in zip(use, p, strict=True)) / sum(use) / rate
    assert metrics.calibration(y, z, given_weights) == pytest.approx(expected, rel=1e-12)


def test_ne_of_the_base_rate_is_one():
    y = np.array([1, 0, 0, 1, 0.0])
    assert metrics.normalized_entropy(y, np.full(5, metrics.logit(0.4))) == pytest.approx(1.0, rel=1e-14)


def test_confident_predictions_keep_their_loss():
    # sigmoid(40) is 1 in float64, so that a loss from probabilities would be infinite.
    assert metrics.log_loss([0.0], [40.0]) == pytest.approx(40.0, rel=1e-12)
    assert metrics.log_loss([1.0], [-800.0]) == pytest.approx(800.0, rel=1e-12)


def test_logit_and_sigmoid_are_inverse():
    p = np.array([1e-300, 1e-9, 0.3, 0.5, 0.999])
    np.testing.assert_allclose(metrics.sigmoid(metrics.logit(p)), p, rtol=1e-12)
    np.testing.assert_array_equal(metrics.logit([0.0, 1.0]), [-math.inf, math.inf])
    np.testing.assert_array_equal(metrics.sigmoid([-1e4, 1e4]), [0.0, 1.0])
    with pytest.raises(ValueError, match=r"1\.5"):
        metrics.logit([0.2, 1.5])


def test_one_class_leaves_ratios_undefined():
    y, z = [1.0, 1.0], [0.3, -2.0]
    assert math.isnan(metrics.auc(y, z))
    assert math.isnan(metrics.normalized_entropy(y, z))
    assert math.isnan(metrics.calibration([0.0, 0.0], z))
    assert math.isnan(metrics.grouped_auc([1, 2], y, z).value)


def test_calibration_curve_covers_all_samples_in_order():
    y, z, _, _ = samples(3, 103, False)
    curve = metrics.calibration_curve(y, z, bins=10)
    assert sum(point["count"] for point in curve) == 103
    predicted = [point["predicted"] for point in curve]
    assert predicted == sorted(predicted)
    total = sum(point["observed"] * point["count"] for point in curve)
    assert total == pytest.approx(y.sum())
    assert len(metrics.calibration_curve(y[:3], z[:3], bins=10)) == 3


def test_summary_agrees_with_its_parts():
    y, z, _, users = samples(11, 80, True)
    found = metrics.summarize(users, y, z)
    assert found["samples"] == 80
    assert found["base_rate"] == pytest.approx(y.mean())
    assert found["auc"] == pytest.approx(slow_auc(y, z))
    assert found["gauc_users"] + found["gauc_skipped_users"] == len(set(users))


@pytest.mark.parametrize(
    ("labels", "logits", "weights", "says"),
    [
        ([], [], None, "empty"),
        ([0.5], [1.0], None, r"0\.5"),
        ([1.0], [math.nan], None, "NaN"),
        ([1.0, 0.0], [1.0], None, "shapes"),
        ([1.0], [1.0], [-1.0], "weights"),
        ([1.0], [1.0], [0.0], "weights"),
    ],
)
def test_bad_columns_are_refused(labels, logits, weights, says):
    with pytest.raises(ValueError, match=says):
        metrics.log_loss(labels, logits, weights)


def test_entropy_bounds():
    assert metrics.binary_entropy(0.0) == metrics.binary_entropy(1.0) == 0.0
    assert metrics.binary_entropy(0.5) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match=r"-0\.1"):
        metrics.binary_entropy(-0.1)


# MFU.


def test_mfu_is_useful_flops_over_the_peak():
    peak = metrics.peak_flops("NVIDIA H200", "bf16")
    assert peak.peak == 989.4e12
    assert "989.4" in peak.note
    assert metrics.model_flops_utilization(989.4e12, 4.0, peak.peak) == pytest.approx(0.25)
    assert metrics.peak_flops("NVIDIA A100-SXM4-80GB", "bf16").peak == 312e12
    assert metrics.peak_flops("NVIDIA H200", "fp8").peak == 1978.9e12


@pytest.mark.parametrize(
    ("card", "dtype", "says"),
    [(None, "fp32", "CPU"), ("NVIDIA GeForce RTX 2060", "bf16", "RTX 2060"), ("NVIDIA B200", "fp32", "fp32")],
)
def test_without_a_sure_peak_there_is_no_mfu(card, dtype, says):
    found = metrics.peak_flops(card, dtype)
    assert found.peak is None
    assert says in found.note
    assert metrics.model_flops_utilization(1e12, 1.0, found.peak) is None


def test_mfu_needs_a_duration():
    with pytest.raises(ValueError, match="seconds"):
        metrics.model_flops_utilization(1e12, 0.0, 1e15)
