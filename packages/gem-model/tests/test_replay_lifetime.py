"""Graphs of the layers know addresses alone: what they need is there at every replay, and holds what it should."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys

import pytest
import torch
from gem_kernels import dispatch
from gem_model import GEM, TowerConfig, preset, replay, replay_checks, sequence
from gem_model.layers import one_by_one
from gem_model.recorder import waited_for
from gem_model.replay import Replay
from gem_model.testing import example_inputs, random_batch
from gem_model.testing_graphs import CpuGraphs, DanglingPointer, HostAsked, OneByOne
from torch import nn

STEPS = 10
VARIANTS = {
    "softmax": {"qk_norm": True, "layers": 2},
    "gdpa": {"attention": "gdpa", "window": 2, "causal": True, "rotary": "both"},
    "blocks": {"block": 16, "layers": 2},
    "hstu": {"sequence_layer": "hstu"},
    "experts": {"experts": ("wukong", "dcn", "attention"), "cross_rank": 4, "self_attention_every": 2},
    "seeds": {"pma_seeds": 5, "layers": 2},
    "towers": {
        "layers": 2,
        "evidence_heads": 3,
        "towers": (TowerConfig(source="views", layers=0), TowerConfig(source="ratings", width=24, layers=1)),
    },
}


def build(**changes):
    torch.manual_seed(0)
    inputs = example_inputs()
    return GEM(preset("tiny", **changes), inputs).train(), inputs


def replayed(model, recorder=None):
    model.layers.replay = Replay(model.layers, recorder=recorder or CpuGraphs())
    return model.layers.replay


def passes(model, batches, half=False, none=True):
    """Logits of each batch, and the gradients that they add up to."""
    model.zero_grad(set_to_none=none)
    logits = []
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits.append(model(batch))
        model.loss(logits[-1], batch).backward()
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**{f"logits {i}": x.detach() for i, x in enumerate(logits)}, **named}


def bits(found, wanted):
    assert found.keys() == wanted.keys()
    assert not [name for name, want in wanted.items() if not torch.equal(found[name], want)]


def short_histories(inputs, samples, seed, longest=8):
    """As the source of clicks has them: hardly any history is longer than a few events, and many are empty."""
    draw = random.Random(seed)
    lengths = {s.name: [min(int(draw.expovariate(0.25)), longest) for _ in range(samples)] for s in inputs.sources}
    return random_batch(inputs, samples, seed=seed, lengths=lengths, max_len=longest)


@pytest.mark.parametrize(
    ("variant", "half"), [*((name, False) for name in VARIANTS), ("softmax", True), ("seeds", True)]
)
def test_graphs_do_what_their_operators_do_one_by_one(variant, half):
    model, inputs = build(**VARIANTS[variant])
    batches = [random_batch(inputs, 9, seed=seed) for seed in (2, 4, 2)]  # of two rooms
    model.layers.replay = OneByOne(model.layers)
    wanted = passes(model, batches, half)
    used = replayed(model)
    for _ in range(2):
        bits(passes(model, batches, half), wanted)
    assert len(used.record.passes) == 2 * len(used.graphs) > 2
    inside = [t for graph in used.graphs.values() for t in (*graph.inputs, graph.upstream)]
    owned = [*inside, used.sums.flat, *model.layers.parameters(), *model.layers.buffers()]
    known = {t.untyped_storage().data_ptr() for t in owned}
    for recorded in used.record.passes:
        assert not [place.described for address, place in recorded.outside.items() if address not in known]


@pytest.mark.filterwarnings("ignore:none of the 3 CUDA graphs")
@pytest.mark.parametrize("seed", range(int(os.environ.get("GEM_FUZZ", "1"))))
def test_thousands_of_short_histories(seed, monkeypatch):
    """Rooms that grow, batches that fit in none, several parts, evaluation, graphs let go of, a new process."""
    monkeypatch.setattr(replay, "GRAPHS", 3)
    draw, none = random.Random(seed), True
    model, inputs = build(width=8, heads=1, layers=1, n_tokens=6, n_sum=2, pma_queries=2, recent=2, pffn_tokens=2)
    used, longest, served, other = replayed(model), 8, 0, draw.choice((1, 5, 600))
    plain = OneByOne(model.layers)
    for step in range(STEPS):
        sizes = [2048] if draw.random() < 0.7 else [other] * draw.choice((1, 3))
        parts = [short_histories(inputs, n, 1000 * seed + 10 * step + i, longest) for i, n in enumerate(sizes)]
        found = passes(model, parts, none=none)
        model.layers.replay = plain
        bits(found, passes(model, parts))
        model.layers.replay, none, event = used, draw.random() < 0.7, draw.random()
        if event < 0.15:
            with torch.no_grad():
                assert torch.isfinite(model.eval()(parts[0])).all()
            model.train()
        elif event < 0.25:
            with one_by_one(model):
                passes(model, parts)
        elif event < 0.35:
            state, served = used.state(), served + used.passes
            used = replayed(model)
            used.load(state)
        elif event < 0.45:
            longest = draw.choice((4, 8, 16))
        assert used.rooms == plain.rooms
    assert served + used.passes > STEPS // 3


def drop_inputs(model, used, graph):
    graph.inputs = [t.detach().clone() for t in graph.inputs]


def drop_sums(model, used, graph):
    model.zero_grad()
    used.sums = replay.GradientSums(used.parameters)


def move_a_weight(model, used, graph):
    used.parameters[3].data = used.parameters[3].data.clone()


def drop_upstream(model, used, graph):
    graph.upstream = torch.zeros_like(graph.upstream)


@pytest.mark.parametrize("change", [drop_inputs, drop_sums, move_a_weight, drop_upstream])
def test_memory_that_is_given_back_is_found(change):
    model, inputs = build()
    used = replayed(model)
    batch = random_batch(inputs, 9, seed=2)
    passes(model, [batch])
    (graph,) = used.graphs.values()
    change(model, used, graph)
    with pytest.raises(DanglingPointer, match=r"in the (forward|backward) pass of a room of 9 samples"):
        passes(model, [batch])


def test_an_index_that_a_cache_lets_go_of_is_found(monkeypatch):
    model, inputs = build(window=2)
    batch, asking = random_batch(inputs, 9, seed=2), sys.modules[sequence.askers.__module__]
    kept = {(b, n): asking.uniform_offsets(b, n, torch.device("cpu")) for b in range(40) for n in range(1, 20)}
    monkeypatch.setattr(asking, "uniform_offsets", lambda b, n, device: kept[b, n])
    replayed(model)
    passes(model, [batch])
    passes(model, [batch])
    kept.clear()
    with pytest.raises(DanglingPointer, match="int64 that has been freed since"):
        passes(model, [batch])


def test_what_another_pass_has_overwritten_is_found():
    """With the guard against it taken out."""
    model, inputs = build()
    used = replayed(model)
    small, large = random_batch(inputs, 3, seed=2), random_batch(inputs, 40, seed=3)
    passes(model, [small, large])
    wanted = passes(model, [small])
    model.zero_grad()
    logits = model(small)
    model(large)
    with pytest.raises(RuntimeError, match="has overwritten what it needs"):
        model.loss(logits, small).backward()
    logits = model(small)
    number = used.passes
    model(large)
    used.passes = number
    model.zero_grad()
    error = None
    try:
        model.loss(logits, small).backward()
    except (RuntimeError, IndexError) as raised:
        error = raised  # an index that was overwritten
    gradients = [(p.grad, wanted[n]) for n, p in model.named_parameters() if p.grad is not None]
    assert "out of" in str(error) or not all(torch.equal(got, want) for got, want in gradients)


class Asking(nn.Module):
    def forward(self, x):
        return x * float(x.detach().abs().max() > 0)


def test_who_asks_the_host_is_found():
    model, inputs = build()
    model.layers[0].dropout = Asking()
    replayed(model)
    with pytest.raises(HostAsked, match="_local_scalar_dense"):
        model(random_batch(inputs, 9, seed=2))


def test_what_was_let_go_of_is_not_read():
    model, inputs = build()
    used = replayed(model)
    batch = random_batch(inputs, 9, seed=2)
    model(batch)
    (graph,) = used.graphs.values()
    used.forget()
    assert torch.isnan(graph.out).all()
    graph.ahead()
    assert used.graphs == {}
    again = model(batch)
    with one_by_one(model):
        torch.testing.assert_close(again, model(batch), atol=2e-5, rtol=1e-4)


def test_dropout_follows_the_seed():
    model, inputs = build(dropout=0.5)
    replayed(model)
    batch = random_batch(inputs, 9, seed=2)
    seen = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        seen.append(passes(model, [batch]))
    assert all(torch.equal(seen[0][n], seen[2][n]) for n in seen[0])
    assert not torch.equal(seen[0]["logits 0"], seen[1]["logits 0"])


def test_a_replay_that_fails_says_which_it_was():
    done, broken = [], []

    def again():
        if broken:
            raise RuntimeError("unspecified launch failure")
        done.append(1)

    run = waited_for(again, "forward pass of a room", lambda: None)
    run()
    broken.append(1)
    with pytest.raises(RuntimeError, match=r"^replay 2 of the forward pass of a room has failed: unspecified"):
        run()
    assert done == [1]

    def wait():
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match=r"^what was enqueued before replay 1 of the backward pass has failed"):
        waited_for(again, "backward pass", wait)()


@pytest.fixture
def checked(monkeypatch):
    """A model whose replay looks at everything, its batch and its one graph."""
    monkeypatch.setenv("GEM_CHECK_GRAPHS", "1")
    model, inputs = build(dropout=0.5)
    used = replayed(model)
    assert used.checks
    batch = random_batch(inputs, 9, seed=2)
    passes(model, [batch])
    (graph,) = used.graphs.values()
    return model, batch, graph


def test_checks_change_nothing(checked, recwarn):
    model, batch, graph = checked
    torch.manual_seed(5)
    found = passes(model, [batch])
    stands = torch.get_rng_state()
    graph.replay.checks = False
    torch.manual_seed(5)
    bits(found, passes(model, [batch]))
    assert torch.equal(stands, torch.get_rng_state())
    assert not [w for w in recwarn if "replay" in str(w.message)]


def test_passes_that_do_not_repeat_and_gradients_that_are_not_finite_are_named(checked):
    model, batch, graph = checked
    names, views, back = graph.replay.names, graph.replay.sums.views, graph.back
    ran = []

    def racing():
        back()
        ran.append(1)
        if len(ran) == 2:
            views[3].flatten()[0] += 0.5

    graph.back = racing
    with pytest.warns(
        UserWarning, match=rf"two replays differ by up to 0\.5 in the gradients of {re.escape(names[3])} \("
    ):
        passes(model, [batch])

    def infinite():
        back()
        views[4].fill_(float("inf"))

    graph.back = infinite
    with pytest.warns(
        UserWarning, match=rf"that was finite, .* not finite of {re.escape(names[4])} \(pass \d+, room of 9"
    ):
        passes(model, [batch])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda h: {"offsets": h.offsets + 1}, "must ascend from 0 to its"),
        (lambda h: {"offsets": h.offsets.flip(0).sort().values[:-1]}, "must ascend from 0|offsets for 9 samples"),
        (lambda h: {"rank": h.rank[1:]}, "ranks and"),
        (lambda h: {"tokens": h.tokens * float("nan")}, "events of 'ratings' that are not finite"),
        (lambda h: {}, "holds a history of"),
    ],
)
def test_a_batch_that_no_room_takes_is_refused(checked, spoil, message):
    model, batch, graph = checked
    calls = []
    through = model.layers.replay
    model.layers.replay = lambda *inputs: calls.append(inputs) or through(*inputs)
    model(batch)
    x, histories, cls = calls[0]
    change = spoil(histories["ratings"])
    histories = {**histories, "ratings": dataclasses.replace(histories["ratings"], **change)}
    longest = tuple(1 if not change else most for most in graph.room.longest)
    with pytest.raises(ValueError, match=message):
        replay_checks.batch(x, histories, cls, longest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [2, 4, 8])  # of 128, 64 and 32 numbers
def test_on_a_card_passes_repeat_for_thousands_of_short_histories(heads, monkeypatch, recwarn):
    monkeypatch.setenv("GEM_CHECK_GRAPHS", "1")
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("base", heads=heads, layers=2, dropout=0.0), inputs).cuda().train()
    model.layers.replay = used = Replay(model.layers)
    for step in range(12):
        batch = short_histories(inputs, 2048, step, longest=16).to("cuda")
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(batch)
        model.loss(logits, batch).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    assert used.passes >= 6
    assert not [str(w.message) for w in recwarn if "replay" in str(w.message)]


@pytest.mark.slow
def test_portable_kernels_have_what_they_need():
    """In Triton's interpreter, in a process of its own: it is chosen before kernels are imported."""
    code = f"import runpy; runpy.run_path({__file__!r})['with_kernels']()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    used = "gdpa jagged_attention norms project_gated project_rotary projections sequences"
    assert done.stdout.split() == used.split()


def with_kernels():
    """Layers of portable kernels; prints for which operators there were any."""
    used = set()

    def choose(op, q, backend, features):
        problem = dispatch.Problem(op=op, device=q.device, dtype=q.dtype, head_dim=q.shape[-1])
        assert dispatch._triton_applies(problem)[0]
        used.add(op)
        return "triton"

    dispatch.choose = choose
    model, inputs = build(width=16, heads=1, layers=1, n_tokens=6, n_sum=2, pma_queries=2, recent=2, pffn_tokens=2)
    batch = short_histories(inputs, 2, 1, 3)
    model.layers.replay = OneByOne(model.layers)
    wanted = passes(model, [batch])
    replayed(model)
    bits(passes(model, [batch]), wanted)
    print(*sorted(used))
