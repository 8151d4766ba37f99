"""Choices of a configuration that are parts of their own: HSTU layers, blocks, buckets, weighted features."""

import math
from statistics import NormalDist

import pytest
import torch
from gem_model import GEM, ModelInputs, Source, Table, preset
from gem_model.buckets import BucketLinear
from gem_model.embed import Tables
from gem_model.history import History as Events
from gem_model.hstu import HSTULayer
from gem_model.sequence import HistoryAttention
from gem_model.testing import example_inputs, random_batch
from torch.nn import functional as F


def events(lengths, width, *, seed=0):
    """A history of so many events in each sample, float64."""
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    rank = torch.cat([torch.arange(n, 0, -1) for n in lengths] or [torch.zeros(0, dtype=torch.int64)])
    return Events(
        tokens=torch.randn(int(offsets[-1]), width, generator=g, dtype=torch.float64),
        offsets=offsets,
        max_len=max(lengths),
        rank=rank,
        age=rank.float() * 0.3,
    )


def turned(x, place):
    """RoPE of x [n, H, D], dims 2 i and 2 i + 1 a pair."""
    half = x.shape[-1] // 2
    angles = place.double()[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(2)


@pytest.mark.parametrize("attend", [True, False])
@pytest.mark.parametrize("limits", [{}, {"window": 2}, {"causal": True}])
def test_hstu_layer_is_its_formula(attend, limits):
    torch.manual_seed(1)
    config = preset("tiny", sequence_layer="hstu", rotary="time", **limits)
    layer = HSTULayer(config, events_attend=attend).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (p if p.dim() == 1 else 0.0))
    lengths, d, heads = [4, 0, 7], config.width, config.heads
    history, cls = events(lengths, d), torch.randn(3, 5, d, dtype=torch.float64)
    x_sum = torch.randn(3, 2, d, dtype=torch.float64)
    found, told = layer(history, cls, x_sum)
    cls[:, :2] += x_sum
    tokens = found.settled().tokens

    def normed(norm, x):
        return F.layer_norm(x, (d,), norm.weight, norm.bias, norm.eps)

    def answer(q, k, v, u, x, visible):
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d // heads)
        seen = torch.einsum("hqk,khd->qhd", F.silu(scores) * visible, v).flatten(1)
        return x + layer.out(normed(layer.norm, seen) * u)

    for b, n in enumerate(lengths):
        here = slice(int(history.offsets[b]), int(history.offsets[b + 1]))
        x, age = history.tokens[here], history.age[here]
        parts = F.silu(layer.up.linear(normed(layer.up.norm, x))).split(d, dim=1)
        *front, k, v = (p.view(n, heads, d // heads) for p in parts)
        k = turned(k, age)
        if attend:
            i, j = torch.arange(n)[:, None], torch.arange(n)
            visible = (abs(i - j) <= limits.get("window", n)) & ((j <= i) | ("causal" not in limits))
            want = answer(turned(front[1], age), k, v, parts[0], x, visible)
        else:
            want = x
        torch.testing.assert_close(tokens[here], want, rtol=1e-6, atol=1e-6)
        u, q = F.silu(layer.cls_up.linear(normed(layer.cls_up.norm, cls[b]))).split(d, dim=1)
        want = answer(q.view(5, heads, -1), k, v, u, cls[b], torch.ones(5, n))
        torch.testing.assert_close(told[b], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "gdpa"])
def test_a_block_is_a_history_of_its_own(attention):
    """Cut into blocks of 16, the events answer as they do where each block is a sample; the CLS tokens see them all."""
    torch.manual_seed(2)
    config = preset("tiny", rotary="position", attention=attention)
    whole = HistoryAttention(config, events_attend=True).double()
    cut = HistoryAttention(
        preset("tiny", rotary="position", attention=attention, block=16), events_attend=True
    ).double()
    cut.load_state_dict(whole.state_dict())
    lengths, blocks = [40, 3, 16], [16, 16, 8, 3, 16]
    history = events(lengths, config.width)
    apart = events(blocks, config.width)
    apart = Events(tokens=history.tokens, offsets=apart.offsets, max_len=16, rank=history.rank, age=history.age)
    cls = torch.randn(3, 2, config.width, dtype=torch.float64)
    found, told = cut(history, cls)
    wanted, _ = whole(apart, cls.new_zeros(5, 2, config.width))
    torch.testing.assert_close(found.settled().tokens, wanted.settled().tokens)
    _, everything = whole(history, cls)
    torch.testing.assert_close(told, everything)


def test_buckets_hold_as_much_of_the_normal_distribution_each():
    torch.manual_seed(3)
    layer = BucketLinear(3, 5, 4).double()
    x = torch.randn(50, 3, dtype=torch.float64)
    cdf = NormalDist().cdf
    rows = layer.weight.view(3, 5, 4)
    want = [sum(rows[f, int(cdf(x[b, f]) * 5)] for f in range(3)) for b in range(50)]
    torch.testing.assert_close(layer(x.float()), torch.stack(want) + layer.bias)
    meta = BucketLinear(3, 5, 4).to("meta").to_empty(device="cpu")
    meta.reset_parameters()
    torch.testing.assert_close(meta.edges.double(), layer.edges)


def weighted_inputs():
    """A weighted feature with a table of its own, one that shares the history's, and one without weights."""
    return ModelInputs(
        tables=tuple(Table(name=n, rows=20, dim=4) for n in ("item", "tag", "word")),
        sources=(Source(name="views", ids=(("item", "item"),), max_len=4),),
        sparse=(("item", "item"), ("bought", "item"), ("tags", "tag"), ("words", "word")),
        weighted=("bought", "tags"),
        tasks=("click",),
    )


def test_rows_of_weighted_features_are_multiplied():
    inputs = weighted_inputs()
    tables, batch = Tables(inputs), random_batch(inputs, 6)
    rows = tables(batch)
    assert set(tables.bags.embedding_bags) == {"word"}
    for feature, table in inputs.sparse:
        ids = batch.sparse[feature]
        place = tables.bags.embedding_bags if table == "word" else tables.shared.embeddings
        each = place[table].weight[ids.values] * (1.0 if ids.weights is None else ids.weights[:, None])
        want = [each[a:b].sum(0) for a, b in zip(ids.offsets[:-1], ids.offsets[1:], strict=True)]
        torch.testing.assert_close(rows.pooled[feature], torch.stack(want))
    del inputs
    batch.sparse["tags"] = type(ids)(values=ids.values, offsets=ids.offsets)
    with pytest.raises(ValueError, match="'tags' is weighted: expected a weight for each of its ids, got none"):
        tables(batch)
    with pytest.raises(ValueError, match="weighted feature 'tag' is"):
        ModelInputs(tables=(Table(name="t", rows=2, dim=2),), sparse=(("tags", "t"),), weighted=("tag",), tasks=("x",))


@pytest.mark.parametrize(
    "changes",
    [
        {"sequence_layer": "hstu", "layers": 3, "self_attention_every": 2, "qk_norm": True},
        {"block": 16, "layers": 2},
        {"dense_buckets": 6},
    ],
)
def test_every_parameter_of_the_model_learns(changes):
    torch.manual_seed(4)
    inputs = example_inputs()
    model = GEM(preset("tiny", **changes), inputs)
    batch = random_batch(inputs, 24, max_len=20)
    model.loss(model(batch), batch).backward()
    none = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    rest = [n for n in none if not n.startswith(("heads.out", "heads.wide"))]
    assert not [n for n in rest if "hidden" not in n], rest


def test_what_does_not_go_together_is_named():
    with pytest.raises(ValueError, match="block must be one of 16, 32, 64, 128, or None, got 20"):
        preset("tiny", block=20)
    with pytest.raises(ValueError, match="block 64 goes with no window"):
        preset("tiny", block=64, window=8)
    with pytest.raises(ValueError, match="dense_buckets must be 0 or at least 2, got 1"):
        preset("tiny", dense_buckets=1)
    with pytest.raises(ValueError, match="sequence_layer 'hst' is"):
        preset("tiny", sequence_layer="hst")
