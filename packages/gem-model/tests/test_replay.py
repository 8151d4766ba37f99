"""Layers on events brought to a capacity, and replayed from CUDA graphs."""

from __future__ import annotations

import json

import pytest
import torch
from gem_kernels.schedule import TileShape, tiles
from gem_model import GEM, TowerConfig, preset, replay
from gem_model.layers import one_by_one
from gem_model.replay import GradientSums, Replay, Room, at_capacity, capacity
from gem_model.sequence import History
from gem_model.testing import example_inputs, random_batch
from gem_model.testing_graphs import OneByOne
from hypothesis import assume, given
from hypothesis import strategies as st

VARIANTS = {
    "softmax": {"qk_norm": True},
    "gdpa": {"attention": "gdpa", "layers": 2, "window": 2, "causal": True, "rotary": "both"},
    "bare": {"pma_queries": 0, "recent": 0, "pffn_tokens": 0, "rotary": "none"},
    "experts": {"experts": ("wukong", "dcn", "attention"), "cross_rank": 4, "layers": 2, "self_attention_every": 2},
    "seeds": {"pma_seeds": 5},
    "towers": {
        "layers": 2,
        "evidence_heads": 3,
        "towers": (TowerConfig(source="views", layers=0), TowerConfig(source="ratings", width=24, layers=1)),
    },
}


def build(**changes):
    torch.manual_seed(0)
    inputs = example_inputs()
    return GEM(preset("tiny", **changes), inputs), inputs


on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@given(st.integers(0, 1 << 24))
def test_a_capacity_is_the_least_of_its_grid_that_is_enough(events):
    size = capacity(events)
    assert size >= max(events, 1)
    assert size - events <= max(32, events / 32 + 1)
    assert capacity(size) == size


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=3), st.integers(1, 12))
def test_a_room_serves_the_batch_that_it_was_made_for_and_takes_what_it_leaves(events, bits):
    longest = tuple(1 << bits for _ in events)
    room = Room(batch=4, events=tuple(map(capacity, events)), longest=longest)
    assert room.serves(4, tuple(events), longest)
    assert not room.serves(5, tuple(events), longest)
    assert not room.serves(4, tuple(n + 64 + n // 8 for n in events), longest)
    for have, size in zip(events, room.events, strict=True):
        assert -(-(size - have) // room.added) <= longest[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_added_samples_change_nothing_for_the_others(variant):
    model, inputs = build(**VARIANTS[variant])
    batch = random_batch(inputs, 9, seed=2)
    model.train()
    found = []
    for kept in (None, OneByOne(model.layers)):
        model.layers.replay = kept
        model.zero_grad()
        logits = model(batch)
        model.loss(logits, batch).backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
    (room,) = kept.rooms
    given = [len(batch.sequences[source].time) for source in model.layers[0].sources]
    assert all(n < size for n, size in zip(given, room.events, strict=True)), "nothing was added"
    with one_by_one(model):
        assert model.layers.replay is None
        model(batch)
    assert model.layers.replay is kept
    assert kept.graphs == {}


@given(st.lists(st.integers(0, 8), min_size=1, max_size=40), st.integers(0, 9), st.integers(0, 3))
def test_tile_lists_have_room_for_the_added_samples(lengths, cls, spare):
    """Those of kernels are as long as sizes known on the host allow; short histories fill them to the end."""
    events = sum(lengths)
    room = Room(batch=len(lengths), events=(capacity(events + 30 * spare),), longest=(8,))
    assume(room.serves(len(lengths), (events,), (8,)))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    history = History(
        tokens=torch.zeros(events, 2), offsets=offsets, max_len=8, rank=torch.zeros(events, dtype=torch.int64),
        age=torch.zeros(events),
    )  # fmt: skip
    full = at_capacity(torch.zeros(len(lengths), 1, 2), {"a": history}, {}, room)[1]["a"]
    samples, keys = len(lengths) + room.added, full.offsets
    assert keys[-1] == room.events[0]
    assert keys.diff().amin() >= 0
    assert keys.diff().amax() <= 8
    queries = keys + torch.arange(samples + 1) * cls
    shape = TileShape(consumers=3, step=64)
    assert len(tiles(queries, keys, 4, shape)) <= shape.bound(int(queries[-1]), samples, 4)
    assert len(tiles(keys, queries, 4, shape)) <= shape.bound(room.events[0], samples, 4)


def test_gradient_sums_go_on_from_what_is_there():
    parameters = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (2, 5, 4)]
    sums = GradientSums(parameters)
    sums.flat.fill_(float("nan"))  # of an earlier step
    parameters[1].grad = torch.full((5, 3), 2.0)
    sums.take([0, 1])
    for view in sums.views[:2]:
        view += 1
    torch.testing.assert_close(parameters[0].grad, torch.ones(2, 3))
    torch.testing.assert_close(parameters[1].grad, torch.full((5, 3), 3.0))
    assert parameters[2].grad is None, "the optimizer must leave alone what has no gradient"
    sums.take([0, 1])
    torch.testing.assert_close(parameters[1].grad, torch.full((5, 3), 3.0))
    for p in parameters:
        p.grad = None
    sums.take([0, 1])
    assert not parameters[0].grad.any()
    assert not parameters[1].grad.any()


def test_graphs_refuse_a_cpu():
    model, _ = build()
    with pytest.raises(ValueError, match="parameters on \\['cpu'\\]"):
        Replay(model.layers)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_on_a_card_replayed_layers_are_the_same_layers(variant):
    model, inputs = build(**VARIANTS[variant])
    model = model.cuda().train()
    rows = []
    for graphs in (False, True):
        model.layers.replay = Replay(model.layers) if graphs else None
        model.zero_grad()
        for seed in (2, 3, 2, 4):  # accumulated over parts of different sizes
            batch = random_batch(inputs, 9, seed=seed).to("cuda")
            logits = model(batch)
            model.loss(logits, batch).backward()
        named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        rows.append({"logits": logits.detach(), **named})
    want, got = rows
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=3e-4, rtol=3e-3, msg=lambda m, name=name: f"{name}: {m}")
    assert 1 <= len(model.layers.replay.graphs) <= 3
    again = Replay(model.layers)
    again.load(json.loads(json.dumps(model.layers.replay.state())))
    assert again.rooms == model.layers.replay.rooms == list(model.layers.replay.graphs)


@pytest.mark.gpu
@on_a_card
def test_on_a_card_dropout_follows_the_seed_and_a_full_store_is_announced(monkeypatch):
    monkeypatch.setattr(replay, "GRAPHS", 1)
    model, inputs = build(dropout=0.5)
    model = model.cuda().train()
    model.layers.replay = Replay(model.layers)
    batch = random_batch(inputs, 9, seed=2).to("cuda")
    seen = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        seen.append(model(batch).detach().clone())
    first = model(batch).sum()
    model(batch).sum().backward()
    with pytest.raises(RuntimeError, match="has overwritten"):
        first.backward()
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
    with pytest.warns(UserWarning, match="none of the 1 CUDA graphs"):
        model(random_batch(inputs, 7, seed=3).to("cuda"))
