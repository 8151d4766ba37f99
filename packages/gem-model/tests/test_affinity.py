import math
from dataclasses import replace

import pytest
import torch
from gem_model import GEM, preset
from gem_model.evidence import FEW, Affinity
from gem_model.testing import example_inputs, random_batch


def inputs_with_floats():
    """The histories of `ratings` show a vector that the candidate has, too, and an outcome that it has not."""
    inputs = example_inputs(dense=5)
    ratings, views = inputs.sources
    ratings = replace(ratings, floats=(("vector", 3), ("score", 1)))
    return replace(inputs, sources=(ratings, views), dense_columns=(("vector", 3),))


def model_of(inputs, **changes):
    torch.manual_seed(1)
    model = GEM(preset("tiny", affinity_heads=3, evidence_dim=7, **changes), inputs)
    for module in model.modules():  # nothing at a special value
        if isinstance(module, Affinity):
            for p in module.parameters():
                torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("source", ["ratings", "views"])
def test_affinity_is_the_equation(source):
    inputs = inputs_with_floats()
    model = model_of(inputs)
    lengths = {"ratings": [4, 0, 7, 1, 12, 3], "views": [0, 2, 6, 1, 5, 3]}
    batch = random_batch(inputs, 6, seed=3, lengths=lengths)
    rows, history = model.tables(batch), model.history(source, model.tables(batch), batch)
    affinity = model.affinity[source]
    found = affinity(rows, batch, history)
    assert found.shape == (6, 3)
    sequence = batch.sequences[source]
    w = {n: p.detach().double() for n, p in affinity.named_parameters()}
    for b in range(6):
        c = [rows.pooled[f][b] for f in affinity.shared.values()]
        c += [batch.dense[b, start : start + size] for start, size in affinity.shared_floats.values()]
        q = (w["q.weight"] @ torch.cat(c).double() + w["q.bias"]).view(3, 7)
        u, total = torch.zeros(3, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for t in range(int(sequence.offsets[b]), int(sequence.offsets[b + 1])):
            e = [rows.events[source, column][t] for column in affinity.shared]
            e += [sequence.floats[column][t] for column in affinity.shared_floats]
            y = [rows.events[source, column][t] for column in affinity.outcomes]
            y += [sequence.floats[column][t] for column in affinity.outcome_floats]
            rank = int(history.rank[t])
            y.append(torch.tensor([float(history.age[t]) / 10, math.log(rank) / 10]))
            omega = float(rank) ** w["decay"]
            k = (w["k.weight"] @ torch.cat(e).double() + w["k.bias"]).view(3, 7)
            u += (omega * (w["v.weight"] @ torch.cat(y).double()))[:, None] * k
            total += omega
        expected = (q * u / (FEW + total).sqrt()[:, None]).sum(1) / math.sqrt(7)
        torch.testing.assert_close(found[b].double(), expected, rtol=1e-4, atol=1e-5)


def test_an_event_unlike_the_candidate_speaks_against_it():
    """With the candidate's content turned round, what was said for it is said against it: attention cannot do that."""
    inputs = inputs_with_floats()
    model = model_of(inputs)
    affinity = model.affinity["ratings"]
    with torch.no_grad():
        affinity.q.bias.zero_()
    batch = random_batch(inputs, 5, seed=4)
    rows, history = model.tables(batch), model.history("ratings", model.tables(batch), batch)
    turned = replace(rows, pooled={f: -x for f, x in rows.pooled.items()})
    told = affinity(rows, batch, history)
    torch.testing.assert_close(affinity(turned, replace(batch, dense=-batch.dense), history), -told)
    assert (told.abs() > 1e-4).any()


def test_affinity_reaches_the_logits_and_learns():
    inputs = inputs_with_floats()
    model = model_of(inputs, reader=(8,))
    batch = random_batch(inputs, 16, seed=5)
    model.loss(model(batch), batch).backward()
    gradients = [p.grad for m in model.affinity.values() for p in m.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert any((g != 0).any() for g in gradients)
    nothing = random_batch(inputs, 3, seed=6, lengths={"ratings": [0, 0, 0], "views": [0, 0, 0]})
    rows, history = model.tables(nothing), model.history("ratings", model.tables(nothing), nothing)
    assert (model.affinity["ratings"](rows, nothing, history) == 0).all()
