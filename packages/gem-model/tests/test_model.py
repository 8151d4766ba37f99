import dataclasses

import pytest
import torch
from gem_model import GEM, GemConfig, TowerConfig, preset
from gem_model.testing import example_inputs, random_batch

VARIANTS = {
    "evidence": {"evidence_heads": 3, "towers": (TowerConfig(source="views", layers=0),)},
    "softmax": {},
    "gdpa": {"attention": "gdpa"},
    "qk norm": {"attention": "gdpa", "activation": "gelu_poly", "qk_norm": True},
    "window": {"window": 2, "layers": 2},
    "causal": {"causal": True, "rotary": "both"},
    "skip": {"layers": 3, "self_attention_every": 2, "rotary": "position"},
    "bare": {"pma_queries": 0, "recent": 0, "pffn_tokens": 0, "rotary": "none"},
    "experts": {"experts": ("wukong", "dcn", "attention", "wukong"), "cross_rank": 4},
    "seeds": {"pma_seeds": 5},
    "towers": {
        "layers": 2,
        "window": 2,
        "towers": (
            TowerConfig(source="views", width=8, heads=1, layers=1),
            TowerConfig(source="ratings", width=24, window=0),
        ),
    },
}


def build(seed=0, inputs=None, **changes):
    torch.manual_seed(seed)
    inputs = inputs or example_inputs()
    return GEM(preset("tiny", **changes), inputs), inputs


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant):
    model, inputs = build(**VARIANTS[variant])
    batch = random_batch(inputs, 16, seed=1)
    logits = model(batch)
    assert logits.shape == (16, 2)
    assert logits.dtype == torch.float32
    model.loss(logits, batch).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_samples_do_not_see_each_other(variant):
    model, inputs = build(**VARIANTS[variant])
    model.eval()
    batch = random_batch(inputs, 9, seed=2)
    logits = model(batch)
    order = torch.randperm(9).tolist()
    torch.testing.assert_close(model(batch.select(order)), logits[order], atol=2e-5, rtol=1e-4)
    alone = torch.cat([model(batch.select([i])) for i in range(9)])
    torch.testing.assert_close(alone, logits, atol=2e-5, rtol=1e-4)


def test_other_users_events_do_not_matter_but_ones_own_do():
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 4, seed=3, lengths={"ratings": [3, 5, 4, 2], "views": [1, 2, 3, 4]})
    before = model(batch)
    batch.sequences["ratings"].ids["rating"][3:8] = (batch.sequences["ratings"].ids["rating"][3:8] + 1) % 6
    after = model(batch)
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]])
    assert (after[1] - before[1]).abs().min() > 1e-7


def test_history_is_read_in_the_light_of_the_candidate():
    """The effect of an event on the logit depends on the candidate: the model isn't a sum of the two."""
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 1, seed=3, lengths={"ratings": [4], "views": [0]}, single_valued=True)

    def effect(candidate):
        batch.sparse["item"].values[0] = candidate
        with torch.no_grad():
            logits = []
            for rating in (0, 5):
                batch.sequences["ratings"].ids["rating"][2] = rating
                logits.append(model(batch))
        return logits[1] - logits[0]

    assert (effect(1) - effect(2)).abs().max() > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_empty_histories(variant):
    model, inputs = build(**VARIANTS[variant])
    none = {"ratings": [0] * 5, "views": [0] * 5}
    batch = random_batch(inputs, 5, seed=4, lengths=none, max_len=0)
    logits = model(batch)
    model.loss(logits, batch).backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    mixed = random_batch(inputs, 5, seed=5, lengths={"ratings": [0, 3, 0, 1, 0], "views": [0, 0, 0, 2, 0]})
    torch.testing.assert_close(model(mixed)[[0, 2]], model(mixed.select([0, 2])), atol=2e-5, rtol=1e-4)


def test_no_source_at_all():
    full = example_inputs()
    tables = tuple(t for t in full.tables if t.name != "rating")  # nothing uses it without the history of ratings
    model, inputs = build(inputs=dataclasses.replace(full, sources=(), tables=tables))
    batch = random_batch(inputs, 6)
    model.loss(model(batch), batch).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_source_without_the_candidate():
    inputs = dataclasses.replace(example_inputs(), sparse=(("country", "country"),))
    model, _ = build(inputs=inputs)
    batch = random_batch(inputs, 6)
    model.loss(model(batch), batch).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_towers_are_shaped_one_by_one():
    model, inputs = build(**VARIANTS["towers"])
    assert [list(layer.towers) for layer in model.layers] == [["ratings", "views"], ["ratings"]]
    ratings, views = (model.layers[0].towers[name].sequence.attention for name in ("ratings", "views"))
    assert (ratings.heads, ratings.head_dim, ratings.window) == (2, 12, None)
    assert (views.heads, views.head_dim, views.window) == (1, 8, 2)
    assert model.events["views"].linear.out_features == 8
    with pytest.raises(ValueError, match="source 'view', which is unknown; did you mean 'views'"):
        build(towers=(TowerConfig(source="view"),))
    unread, _ = build(layers=1, towers=(TowerConfig(source="views", layers=0),))
    batch = random_batch(inputs, 4, seed=3)
    before = unread.eval()(batch)
    batch.sequences["views"].ids["item"].add_(1).remainder_(50)
    assert torch.equal(unread(batch), before)


def test_longer_max_len_changes_nothing():
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 5)
    longer = {k: dataclasses.replace(s, max_len=s.max_len + 7) for k, s in batch.sequences.items()}
    torch.testing.assert_close(model(dataclasses.replace(batch, sequences=longer)), model(batch))


def test_only_time_differences_matter():
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 5)
    moved = {k: dataclasses.replace(s, time=s.time + 10**9) for k, s in batch.sequences.items()}
    later = dataclasses.replace(batch, time=batch.time + 10**9, sequences=moved)
    torch.testing.assert_close(model(later), model(batch))
    stretched = {k: dataclasses.replace(s, time=s.time - 10**6) for k, s in batch.sequences.items()}
    assert (model(dataclasses.replace(batch, sequences=stretched)) - model(batch)).abs().max() > 1e-5


def test_same_seed_same_model_and_seeds_differ():
    batch = random_batch(example_inputs(), 4)
    assert torch.equal(build(7)[0].eval()(batch), build(7)[0].eval()(batch))
    assert not torch.equal(build(7)[0].eval()(batch), build(8)[0].eval()(batch))


def test_meta_device_then_reset():
    inputs = example_inputs()
    model = GEM(preset("tiny"), inputs, device="meta")
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(float("nan"))
    for table in (*model.tables.shared.parameters(), *model.tables.bags.parameters()):
        table.data.normal_()
    model.reset_parameters()
    assert torch.isfinite(model(random_batch(inputs, 4))).all()


def test_starts_at_the_base_rate():
    model, inputs = build()
    model.init_bias([0.2, 0.9])
    p = torch.sigmoid(model.eval()(random_batch(inputs, 64))).mean(0)
    torch.testing.assert_close(p, torch.tensor([0.2, 0.9]), atol=0.05, rtol=0)
    for bad in ([0.2], [0.2, 1.0]):
        with pytest.raises(ValueError, match="one rate in"):
            model.init_bias(bad)


def test_dense_statistics():
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 6)
    mean, std = torch.randn(5), torch.rand(5) + 0.5
    before = model(batch)
    model.init_dense(mean, std)
    torch.testing.assert_close(model(dataclasses.replace(batch, dense=batch.dense * std + mean)), before)
    model.init_dense(torch.zeros(5), torch.tensor([1.0, 1, 1, 1, 0]))
    torch.testing.assert_close(model(batch), before)
    with pytest.raises(ValueError, match="5 finite numbers as std"):
        model.init_dense(mean, std[:4])
    with pytest.raises(ValueError, match="negative"):
        model.init_dense(mean, -std)


def test_units_exist_and_hold_no_table():
    model, _ = build(layers=2)
    assert model.units() == ["layers.0", "layers.1", "heads"]
    for name in model.units():
        assert not any("embedding" in n for n, _ in model.get_submodule(name).named_parameters())


def test_missing_inputs_are_named():
    model, inputs = build()
    batch = random_batch(inputs, 3)
    with pytest.raises(ValueError, match=r"no sparse feature 'country'; it has \['genres', 'item'\]"):
        model(dataclasses.replace(batch, sparse={k: v for k, v in batch.sparse.items() if k != "country"}))
    with pytest.raises(ValueError, match="no sequence 'views'"):
        model(dataclasses.replace(batch, sequences={"ratings": batch.sequences["ratings"]}))
    with pytest.raises(ValueError, match=r"dense features \[B, 5\], got \(3, 4\)"):
        model(dataclasses.replace(batch, dense=batch.dense[:, :4]))


def test_dropout_is_off_in_eval_and_on_in_training():
    model, inputs = build(dropout=0.5)
    batch = random_batch(inputs, 8)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_autocast_keeps_float32_logits():
    model, inputs = build()
    model.eval()
    batch = random_batch(inputs, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch)
        loss = model.loss(logits, batch)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, model(batch), atol=0.05, rtol=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_asks_the_device_for_a_value(variant):
    """Meta tensors have no values: whatever would wait for a GPU raises here, forward and backward."""
    inputs = example_inputs()
    model = GEM(preset("tiny", dropout=0.1, **VARIANTS[variant]), inputs, device="meta")
    batch = random_batch(inputs, 7).to("meta")
    logits = model(batch)
    assert logits.shape == (7, 2)
    model.loss(logits, batch).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_autocast_without_waiting_for_the_device():
    inputs = example_inputs(dim=64)
    torch.manual_seed(0)
    model = GEM(GemConfig(width=64, heads=2, layers=2, evidence_heads=4), inputs).cuda()
    batch = random_batch(inputs, 32)
    expected = model.eval().cpu()(batch)
    model.cuda()
    on_gpu = batch.to("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model.loss(model(on_gpu), on_gpu).backward()  # compiles and warms up
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = model(on_gpu)
            model.loss(logits, on_gpu).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.cpu(), expected, atol=0.05, rtol=0.05)
