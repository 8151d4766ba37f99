"""The neural baselines: each against its formula, and all of them against what every ranker must do."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from gem_model.baselines import FITTED, TRAINED, BaselineConfig, ConstantRate, LogisticRegression, build, config_of
from gem_model.baselines.dcnv2 import Cross
from gem_model.baselines.deepfm import pairwise_sum
from gem_model.baselines.dlrm import pair_products
from gem_model.baselines.hstu import HSTULayer
from gem_model.baselines.sasrec import Block
from gem_model.baselines.sequential import SequentialConfig, append
from gem_model.history import ROPE_BASE, ROTE_BASE, History
from gem_model.roles import roles
from gem_model.testing import example_inputs, random_batch
from torch import nn

SMALL = {"din": {"hidden": (16,)}, **{name: {"width": 16, "hidden": (16,)} for name in TRAINED if name != "din"}}


def make(name, *, inputs=None, seed=0, **changes):
    inputs = inputs or example_inputs()
    torch.manual_seed(seed)
    return build(name, {**SMALL[name], "dropout": 0.0, **changes}, inputs), inputs


@pytest.mark.parametrize("name", TRAINED)
def test_every_parameter_gets_a_gradient(name):
    model, inputs = make(name)
    batch = random_batch(inputs, 24, seed=1)
    model.loss(model(batch), batch).backward()  # some of what starts at zero learns only from the second step on
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    logits = model(batch)
    assert logits.shape == (24, 2)
    assert logits.dtype == torch.float32
    model.loss(logits, batch).backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []


@pytest.mark.parametrize("name", TRAINED)
def test_samples_do_not_see_each_other(name):
    model, inputs = make(name)
    model.eval()
    batch = random_batch(inputs, 9, seed=2)
    logits = model(batch)
    order = torch.randperm(9).tolist()
    torch.testing.assert_close(model(batch.select(order)), logits[order], atol=2e-5, rtol=1e-4)
    alone = torch.cat([model(batch.select([i])) for i in range(9)])
    torch.testing.assert_close(alone, logits, atol=2e-5, rtol=1e-4)
    longer = {k: dataclasses.replace(s, max_len=s.max_len + 7) for k, s in batch.sequences.items()}
    torch.testing.assert_close(model(dataclasses.replace(batch, sequences=longer)), logits)


@pytest.mark.parametrize("name", TRAINED)
def test_own_events_matter_labels_do_not(name):
    model, inputs = make(name)
    model.eval()
    batch = random_batch(inputs, 4, seed=3, lengths={"ratings": [3, 5, 4, 2], "views": [1, 2, 3, 4]})
    before = model(batch)
    assert torch.equal(model(dataclasses.replace(batch, labels=1 - batch.labels)), before)
    ratings = batch.sequences["ratings"].ids["rating"]
    ratings[3:8] = (ratings[3:8] + 1) % 6
    after = model(batch)
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]])
    assert (after[1] - before[1]).abs().max() > 1e-7


@pytest.mark.parametrize("name", TRAINED)
def test_only_sequential_models_know_the_order(name):
    model, inputs = make(name)
    model.eval()
    batch = random_batch(inputs, 1, seed=3, lengths={"ratings": [5], "views": [0]})
    s = batch.sequences["ratings"]
    same_time = dataclasses.replace(s, time=torch.full_like(s.time, int(s.time[0])))
    backwards = dataclasses.replace(
        same_time, ids={k: v.flip(0) for k, v in s.ids.items()}, floats={k: v.flip(0) for k, v in s.floats.items()}
    )
    first, second = (
        model(dataclasses.replace(batch, sequences=batch.sequences | {"ratings": r})) for r in (same_time, backwards)
    )
    assert torch.allclose(first, second, atol=1e-6) == (name not in ("sasrec", "hstu"))


@pytest.mark.parametrize("name", TRAINED)
def test_empty_histories(name):
    model, inputs = make(name)
    batch = random_batch(inputs, 5, seed=4, lengths={"ratings": [0] * 5, "views": [0] * 5}, max_len=0)
    logits = model(batch)
    model.loss(logits, batch).backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    model.eval()
    mixed = random_batch(inputs, 5, seed=5, lengths={"ratings": [0, 3, 0, 1, 0], "views": [0, 0, 0, 2, 0]})
    torch.testing.assert_close(model(mixed)[[0, 2]], model(mixed.select([0, 2])), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("missing", ["sources", "candidate", "dense"])
def test_inputs_with_something_missing(name, missing):
    full = example_inputs()
    inputs = {
        "sources": dataclasses.replace(full, sources=(), tables=tuple(t for t in full.tables if t.name != "rating")),
        "candidate": dataclasses.replace(full, sparse=(("country", "country"),)),
        "dense": dataclasses.replace(full, dense=0),
    }[missing]
    model, _ = make(name, inputs=inputs)
    batch = random_batch(inputs, 6)
    model.loss(model(batch), batch).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", TRAINED)
def test_nothing_asks_the_device_for_a_value(name):
    inputs = example_inputs()
    model = build(name, SMALL[name], inputs, device="meta")
    batch = random_batch(inputs, 7).to("meta")
    logits = model(batch)
    assert logits.shape == (7, 2)
    model.loss(logits, batch).backward()
    model.to_empty(device="cpu")
    for p in model.parameters():
        p.data.fill_(float("nan"))
    for table in (*model.tables.shared.parameters(), *model.tables.bags.parameters()):
        table.data.normal_()
    model.reset_parameters()
    assert torch.isfinite(model(random_batch(inputs, 4))).all()


@pytest.mark.parametrize("name", TRAINED)
def test_driven_like_gem(name):
    model, inputs = make(name)
    model.eval()
    batch = random_batch(inputs, 64)
    model.init_bias([0.2, 0.9])
    before = model(batch)
    torch.testing.assert_close(torch.sigmoid(before).mean(0), torch.tensor([0.2, 0.9]), atol=0.1, rtol=0)
    mean, std = torch.randn(5), torch.rand(5) + 0.5
    model.init_dense(mean, std)
    moved = dataclasses.replace(batch, dense=batch.dense * std + mean)
    torch.testing.assert_close(model(moved), before, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="one rate in"):
        model.init_bias([0.2, 1.0])
    with pytest.raises(ValueError, match="5 finite numbers"):
        model.init_dense(mean[:4], std)
    kinds = roles(model)
    assert {n for n, kind in kinds.items() if kind == "table"} == {n for n in kinds if n.startswith("tables.")}
    units = [model.get_submodule(unit) for unit in model.units()]
    assert all(next(unit.parameters(), None) is not None for unit in units)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(batch).dtype == torch.float32


@pytest.mark.parametrize("name", TRAINED)
def test_memorises_a_small_random_dataset(name):
    model, inputs = make(name)
    batch = random_batch(inputs, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2, weight_decay=0.0)
    for _ in range(45):
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def into_top(model, batch):
    """What the network on top gets."""
    seen = []
    handle = model.top.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model(batch)
    handle.remove()
    return seen[0], logits


def test_fields_are_features_means_and_the_candidate():
    model, inputs = make("dlrm")
    model.eval()
    batch = random_batch(inputs, 6, seed=1, lengths={"ratings": [3, 0, 1, 2, 5, 4], "views": [1, 2, 0, 3, 0, 1]})
    fields, dense = model.fields(batch)
    assert fields.shape[1] == model.n_fields == 3 + 1 + 2 * 2
    rows = model.tables(batch)
    torch.testing.assert_close(fields[:, :4], model.features(rows, dense))
    events = model.history("ratings", rows, batch).tokens
    torch.testing.assert_close(fields[3, 4], events[4:6].mean(0))
    assert (fields[1, 4] == 0).all()
    torch.testing.assert_close(fields[:, 5], model.events["ratings"].candidate(rows, batch.dense))


def test_dlrm_formula():
    v = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = torch.stack([(v[:, i] * v[:, j]).sum(1) for i, j in itertools.combinations(range(5), 2)], dim=1)
    torch.testing.assert_close(pair_products(v), expected)
    model, inputs = make("dlrm")
    batch = random_batch(inputs, 6)
    seen, _ = into_top(model.eval(), batch)
    fields, _ = model.fields(batch)
    torch.testing.assert_close(seen, torch.cat((fields.flatten(1), pair_products(fields)), dim=1))


def test_deepfm_formula():
    v = torch.randn(3, 5, 4, dtype=torch.float64)
    expected = sum((v[:, i] * v[:, j]).sum(1) for i, j in itertools.combinations(range(5), 2))
    torch.testing.assert_close(pairwise_sum(v), expected)
    model, inputs = make("deepfm")
    nn.init.normal_(model.second)
    batch = random_batch(inputs, 6)
    _, logits = into_top(model.eval(), batch)
    fields, dense = model.fields(batch)
    w = model.first.weight.view(2, *fields.shape[1:])
    first = torch.einsum("bnd,knd->bk", fields, w)
    second = pair_products(fields).sum(1)[:, None] * model.second
    torch.testing.assert_close(logits, first + second + model.top(fields.flatten(1), dense), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rank", [None, 3])
def test_dcnv2_formula(rank):
    torch.manual_seed(0)
    cross = Cross(7, rank).double()
    x0, x = torch.randn(2, 4, 7, dtype=torch.float64)
    w = cross.up.weight if rank is None else cross.up.weight @ cross.down.weight
    torch.testing.assert_close(cross(x0, x), x0 * (x @ w.T + cross.up.bias) + x)
    model, inputs = make("dcnv2", rank=rank, cross_layers=2)
    batch = random_batch(inputs, 6)
    seen, _ = into_top(model.eval(), batch)
    x0 = x = model.fields(batch)[0].flatten(1)
    for layer in model.crosses:
        x = layer(x0, x)
    torch.testing.assert_close(seen, x)


def test_wukong_formula():
    """One layer of the ranker, by way of X X^T Y."""
    model, inputs = make("wukong", layers=1)
    batch = random_batch(inputs, 6)
    seen, _ = into_top(model.eval(), batch)
    x = model.fields(batch)[0]
    m = model.layers[0]
    products = torch.einsum("bnd,bmd,mk->bnk", x, x, m.fmb.compress).flatten(1)
    fm = m.fmb.linear(torch.relu(m.fmb.mlp[0](m.fmb.norm(products)))).view(6, -1, 16)
    expected = m.norm(torch.cat((fm, m.lcb.weight @ x), dim=1) + m.proj.weight @ x)
    torch.testing.assert_close(seen, expected.flatten(1), atol=1e-5, rtol=1e-5)


LENGTHS = [3, 1, 5]
OFFSETS = torch.tensor([0, 3, 4, 9])


def jagged(width):
    g = torch.Generator().manual_seed(0)
    return History(
        tokens=torch.randn(9, width, generator=g, dtype=torch.float64),
        offsets=OFFSETS,
        max_len=6,
        rank=torch.cat([torch.arange(n - 1, -1, -1) for n in LENGTHS]),
        age=torch.cat([torch.rand(n, generator=g).mul(9).sort(descending=True).values for n in LENGTHS]),
    )


def random_double(module):
    torch.manual_seed(1)
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module.double().eval()


def test_append_puts_the_candidate_last():
    history = jagged(2)
    last = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    longer = append(history, last)
    parts = [torch.cat((t, row[None])) for t, row in zip(history.tokens.split(LENGTHS), last, strict=True)]
    torch.testing.assert_close(longer.tokens, torch.cat(parts))
    assert longer.offsets.tolist() == [0, 4, 6, 12]
    assert longer.max_len == 7
    ends = longer.offsets[1:] - 1
    assert longer.rank[ends].tolist() == [0, 0, 0]
    assert longer.age[ends].tolist() == [0, 0, 0]
    assert longer.rank[:3].tolist() == [2, 1, 0]
    (longer.tokens[ends] * 2).sum().backward()
    assert (last.grad == 2).all()


def test_sasrec_block_formula():
    config = SequentialConfig(width=8, heads=2, dropout=0.0)
    block, history = random_double(Block(config)), jagged(8)
    expected = []
    for x in history.tokens.split(LENGTHS):
        n = len(x)
        q, k, v = block.qkv(x).view(n, 3, 2, 4).permute(1, 2, 0, 3)  # [heads, n, D]
        scores = (q @ k.transpose(1, 2) / math.sqrt(4)).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        x = x + block.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        expected.append(x + block.down(torch.relu(block.up(x))))
    torch.testing.assert_close(block(history.tokens, history), torch.cat(expected))


def rotated(x, place, base):
    """[n, D] by complex multiplication of neighbouring pairs."""
    half = x.shape[1] // 2
    angle = place.double()[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, ::2], x[:, 1::2]) * torch.polar(torch.ones_like(angle), angle)
    return torch.stack((z.real, z.imag), dim=2).flatten(1)


def test_hstu_layer_formula():
    config = SequentialConfig(width=8, heads=2, dropout=0.0)
    layer, history = random_double(HSTULayer(config)), jagged(8)
    expected = []
    for x, rank, age in zip(*(t.split(LENGTHS) for t in (history.tokens, history.rank, history.age)), strict=True):
        n = len(x)
        u, v, q, k = F.silu(layer.up(x)).chunk(4, dim=1)
        told = []
        for head, (place, base) in enumerate(((rank, ROPE_BASE), (age, ROTE_BASE))):
            at = slice(4 * head, 4 * head + 4)
            a = F.silu(rotated(q[:, at], place, base) @ rotated(k[:, at], place, base).T / math.sqrt(4))
            told.append(a.tril() @ v[:, at])
        expected.append(x + layer.down(layer.norm(torch.cat(told, dim=1)) * u))
    assert n == 5
    torch.testing.assert_close(layer(history.tokens, history), torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_candidate_is_asked_about_by_no_event(name):
    """The tower is causal: with another candidate, the events' own states stay."""
    model, _ = make(name)
    tower = model.towers["ratings"].double().eval()
    history = jagged(16)
    ends = OFFSETS[1:] + torch.arange(3)
    first, second = (tower(append(history, torch.randn(3, 16, dtype=torch.float64))) for _ in range(2))
    changed = (first - second).abs().amax(1) > 1e-9
    assert changed.nonzero()[:, 0].tolist() == ends.tolist()


def test_registry():
    inputs = example_inputs()
    assert isinstance(build("constant"), ConstantRate)
    fitted = build("logistic", {"l2": 0.5})
    assert isinstance(fitted, LogisticRegression)
    assert fitted.l2 == 0.5
    assert not set(FITTED) & set(TRAINED)
    assert build("dcnv2", config_of("dcnv2", width=8, rank=None), inputs).config.rank is None
    with pytest.raises(ValueError, match="baseline 'dlmr' is unknown; did you mean 'dlrm'"):
        build("dlmr", None, inputs)
    with pytest.raises(ValueError, match="field 'widht' is unknown; did you mean 'width'"):
        build("hstu", {"widht": 3}, inputs)
    with pytest.raises(TypeError, match="'dcnv2' takes a DCNv2Config"):
        build("dcnv2", BaselineConfig(), inputs)
    with pytest.raises(TypeError, match="needs ModelInputs"):
        build("dlrm")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("dlrm", {"width": 0}, "width must be an int of at least 1, got 0"),
        ("dlrm", {"dropout": 1.0}, "dropout"),
        ("dlrm", {"time_scale": 0.0}, "time_scale"),
        ("dlrm", {"hidden": (8, 0)}, "hidden"),
        ("dcnv2", {"rank": 0}, "rank"),
        ("wukong", {"n_fm": 12}, "n_fm must lie between 1 and n_tokens - 1 = 11, got 12"),
        ("sasrec", {"width": 12, "heads": 4}, "multiple of twice the heads, 8"),
    ],
)
def test_configurations_name_what_is_wrong(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(name, **changes)


def test_hstu_needs_two_heads():
    with pytest.raises(ValueError, match="heads must be at least 2, got 1"):
        build("hstu", {"heads": 1}, example_inputs())
