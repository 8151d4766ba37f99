import dataclasses

import pytest
import torch
import torch.nn.functional as F
from gem_model.baselines import DIN, ConstantRate, DinConfig, LogisticRegression
from gem_model.testing import example_inputs, random_batch


def batches(count=4, seed=0):
    inputs = example_inputs()
    return inputs, [random_batch(inputs, 50, seed=seed + i) for i in range(count)]


def test_constant_is_the_weighted_rate():
    _, data = batches()
    y, m, w = (torch.cat([getattr(b, n) for b in data]) for n in ("labels", "label_mask", "weights"))
    weight = m * w[:, None]
    expected = (weight * y).double().sum(0) / weight.double().sum(0)
    model = ConstantRate().fit(data)
    torch.testing.assert_close(torch.sigmoid(model(data[0])), expected.expand(50, 2))
    hidden = [dataclasses.replace(b, label_mask=b.label_mask & torch.tensor([True, False])) for b in data]
    with pytest.raises(ValueError, match="every task needs"):
        ConstantRate().fit(hidden)
    with pytest.raises(RuntimeError, match="fit"):
        ConstantRate()(data[0])


def test_logistic_regression_is_at_the_optimum():
    _, data = batches()
    scale, shift = torch.tensor([1.0, 100.0, 1e-3, 5.0, 0.0]), torch.tensor([0.0, 1e4, 3.0, 0.0, 7.0])
    data = [dataclasses.replace(b, dense=b.dense * scale + shift) for b in data]  # the last feature never varies
    l2 = 0.01
    model = LogisticRegression(l2=l2).fit(data)
    x, y, m, w = (
        torch.cat([getattr(b, n) for b in data]).double() for n in ("dense", "labels", "label_mask", "weights")
    )
    mean = (w[:, None] * x).sum(0) / w.sum()
    std = ((w[:, None] * (x - mean) ** 2).sum(0) / w.sum()).sqrt()
    z = (x - mean)[:, :4] / std[:4]
    for k in range(2):
        weight = w * m[:, k] / (w * m[:, k]).sum()
        p = torch.sigmoid(z @ model.weight[k, :4] + model.bias[k])
        assert ((weight * (p - y[:, k])) @ z + l2 * model.weight[k, :4]).abs().max() < 1e-6
        assert (weight * (p - y[:, k])).sum().abs() < 1e-6
    assert (model.weight[:, 4] == 0).all()
    logits = model(data[1])
    torch.testing.assert_close(logits[:, 0], z[50:100] @ model.weight[0, :4] + model.bias[0], atol=1e-5, rtol=1e-5)


def test_logistic_regression_recovers_what_made_the_labels():
    g = torch.Generator().manual_seed(0)
    inputs = example_inputs(tasks=("click",))
    batch = random_batch(inputs, 4000, max_len=0)
    true = torch.tensor([1.0, -0.5, 0.0, 2.0, 0.3])
    p = torch.sigmoid(batch.dense @ true - 1.0)
    batch = dataclasses.replace(
        batch,
        labels=(torch.rand(4000, generator=g) < p).float()[:, None],
        label_mask=torch.ones(4000, 1, dtype=torch.bool),
        weights=torch.ones(4000),
    )
    model = LogisticRegression(l2=0.0).fit([batch])
    torch.testing.assert_close((model.weight / model.std)[0].float(), true, atol=0.2, rtol=0)


def test_logistic_regression_names_what_is_missing():
    with pytest.raises(ValueError, match="no batches"):
        LogisticRegression().fit([])
    _, data = batches(1)
    with pytest.raises(ValueError, match="no dense features"):
        LogisticRegression().fit([dataclasses.replace(data[0], dense=data[0].dense[:, :0])])
    with pytest.raises(ValueError, match="l2=-1"):
        LogisticRegression(l2=-1)
    with pytest.raises(RuntimeError, match="fit"):
        LogisticRegression()(data[0])


def test_din_against_a_loop_over_events():
    inputs = example_inputs()
    torch.manual_seed(0)
    model = DIN(DinConfig(), inputs).eval()
    batch = random_batch(inputs, 5, seed=2, single_valued=True)
    rows = model.tables(batch)
    interest = model.interests[0]
    s = batch.sequences["ratings"]
    pooled = interest(rows, batch)
    for b, (start, end) in enumerate(zip(s.offsets.tolist(), s.offsets[1:].tolist(), strict=False)):
        c = rows.pooled["item"][b]
        expected = torch.zeros(interest.width)
        for t in range(start, end):
            h = rows.events["ratings", "item"][t]
            before = s.time[t - 1] if t > start else s.time[t]
            ages = torch.log1p(torch.stack((batch.time[b] - s.time[t], s.time[t] - before)).float() / 60.0)
            event = torch.cat((h, rows.events["ratings", "rating"][t], s.floats["vector"][t], 0.1 * ages))
            expected = expected + interest.attention(torch.cat((event, c, h - c, h * c))) * event
        torch.testing.assert_close(pooled[b], expected, atol=1e-5, rtol=1e-5)


def test_din_trains_and_keeps_samples_apart():
    inputs = example_inputs()
    torch.manual_seed(0)
    model = DIN(DinConfig(dropout=0.0), inputs)
    batch = random_batch(inputs, 8)
    model.init_bias([0.3, 0.6])
    model.loss(model(batch), batch).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    torch.testing.assert_close(model(batch.select([3, 1])), model(batch)[[3, 1]], atol=1e-5, rtol=1e-4)
    empty = random_batch(inputs, 3, lengths={"ratings": [0] * 3, "views": [0] * 3})
    assert torch.isfinite(model(empty)).all()
    assert F.binary_cross_entropy_with_logits(model(batch), batch.labels) < 5.0
