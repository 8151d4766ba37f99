import math
from dataclasses import replace

import pytest
import torch
from gem_model import GEM, preset
from gem_model.config import Source
from gem_model.evidence import Evidence, EvidenceTokens
from gem_model.testing import example_inputs, random_batch


def inputs_with_floats():
    """The histories of `ratings` show a vector that the candidate has, too, and an outcome that it has not."""
    inputs = example_inputs(dense=5)
    ratings, views = inputs.sources
    ratings = replace(ratings, floats=(("vector", 3), ("score", 1)))
    return replace(inputs, sources=(ratings, views), dense_columns=(("vector", 3),))


def model_of(inputs, **changes):
    torch.manual_seed(1)
    model = GEM(preset("tiny", evidence_heads=3, evidence_dim=7, evidence_values=2, **changes), inputs)
    for module in model.modules():  # nothing at a special value
        if isinstance(module, (Evidence, EvidenceTokens)):
            for p in module.parameters():
                torch.nn.init.normal_(p, std=0.3)
    return model


def by_hand(evidence, rows, batch, history, b):
    """The equation of the docstring for one sample, in float64, one event at a time."""
    source = evidence.source
    sequence = batch.sequences[source]
    w = {n: p.detach().double() for n, p in evidence.named_parameters()}
    candidate = [rows.pooled[f][b] for f in evidence.shared.values()]
    candidate += [batch.dense[b, start : start + size] for start, size in evidence.shared_floats.values()]
    c = torch.cat(candidate).double()
    heads, content = evidence.heads, evidence.dim - 3
    q = (w["q.weight"] @ c + w["q.bias"]).view(heads, content)
    scores, values = [], []
    for t in range(int(sequence.offsets[b]), int(sequence.offsets[b + 1])):
        e = torch.cat(
            [rows.events[source, column][t] for column in evidence.shared]
            + [sequence.floats[column][t] for column in evidence.shared_floats]
        ).double()
        y = [rows.events[source, column][t] for column in evidence.outcomes]
        y += [sequence.floats[column][t] for column in evidence.outcome_floats]
        age, rank = history.age[t].double(), history.rank[t].double().log()
        k = (w["k.weight"] @ e).view(heads, content)
        place = w["place"] @ torch.stack((age, rank, age * rank))
        scores.append((q * k).sum(1) / math.sqrt(content) + place)
        v = torch.cat([*(t.double() for t in y), torch.stack((age, rank)) / 10])
        values.append((w["v.weight"] @ v).view(heads, evidence.value_dim))
    if not scores:
        return torch.zeros(heads, evidence.value_dim, dtype=torch.float64)
    weight = torch.stack(scores).exp()  # [n, H]
    weight = weight / (w["sink"].exp() + weight.sum(0))
    return torch.einsum("nh,nhv->hv", weight, torch.stack(values))


@pytest.mark.parametrize("source", ["ratings", "views"])
def test_evidence_is_the_equation(source):
    inputs = inputs_with_floats()
    model = model_of(inputs)
    batch = random_batch(inputs, 6, seed=3, lengths={"ratings": [4, 0, 7, 1, 12, 3], "views": [0, 2, 6, 1, 5, 3]})
    rows, history = model.tables(batch), model.history(source, model.tables(batch), batch)
    evidence = model.evidence[source]
    found = evidence(rows, batch, history)
    assert found.shape == (6, 3, 2)
    for b in range(6):
        torch.testing.assert_close(found[b].double(), by_hand(evidence, rows, batch, history, b), rtol=1e-4, atol=1e-5)


def test_what_the_candidate_shares_is_no_outcome():
    inputs = inputs_with_floats()
    evidence = model_of(inputs).evidence["ratings"]
    assert evidence.shared == {"item": "item"}
    assert evidence.outcomes == ["rating"]
    assert evidence.shared_floats == {"vector": (0, 3)}
    assert evidence.outcome_floats == ["score"]
    assert inputs.evidence_widths(inputs.sources[0]) == (8 + 3, 8 + 1 + 2)


def test_a_source_that_shares_no_column_gives_none():
    inputs = example_inputs()
    lonely = Source(name="alone", ids=(("rating", "rating"),))
    inputs = replace(inputs, sources=(*inputs.sources, lonely))
    model = model_of(inputs)
    assert set(model.evidence) == {"ratings", "views"}
    assert torch.isfinite(model(random_batch(inputs, 3))).all()


def test_every_parameter_learns_and_empty_histories_are_zero():
    inputs = inputs_with_floats()
    model = model_of(inputs)
    lengths = {"ratings": [0, 5, 0], "views": [0, 3, 0]}
    batch = random_batch(inputs, 3, lengths=lengths)
    told = model.evidence["ratings"](model.tables(batch), batch, model.history("ratings", model.tables(batch), batch))
    assert (told[[0, 2]] == 0).all()
    assert (told[1] != 0).any()
    torch.nn.init.normal_(model.heads.wide.weight)
    model.loss(model(batch), batch).backward()
    for name, p in model.named_parameters():
        if "evidence" in name:
            assert torch.isfinite(p.grad).all(), name
            assert (p.grad != 0).any(), name
    none = random_batch(inputs, 2, lengths={"ratings": [0, 0], "views": [0, 0]})
    model.zero_grad()
    model.loss(model(none), none).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_heads_begin_with_different_memories():
    evidence = GEM(preset("tiny", evidence_heads=3), inputs_with_floats()).evidence["ratings"]
    assert evidence.place[:, 0].tolist() == [0.0, -1.0, -2.0]


def test_impossible_shapes_are_named():
    with pytest.raises(ValueError, match="evidence_dim must be more than 3"):
        preset("tiny", evidence_dim=3)
    with pytest.raises(ValueError, match="evidence_values from 1 to evidence_dim"):
        preset("tiny", evidence_dim=8, evidence_values=9)
    with pytest.raises(ValueError, match="wider than dense = 2"):
        replace(example_inputs(dense=2), dense_columns=(("vector", 3),))


def test_the_reader_is_the_equation_and_the_rest_starts_as_a_correction_of_nothing():
    inputs = inputs_with_floats()
    torch.manual_seed(5)
    model = GEM(preset("tiny", evidence_heads=3, evidence_dim=7, evidence_values=2, reader=(6, 5)), inputs).eval()
    model.init_dense(torch.full((5,), 0.3), torch.full((5,), 1.7))
    batch = random_batch(inputs, 6, seed=3)
    caught = {}
    model.heads.register_forward_pre_hook(lambda _, args: caught.update(wide=args[1], rows=args[2][0]))
    logits = model(batch)

    w = {n: p.detach().double() for n, p in model.heads.named_parameters()}
    # `vector`, the first three dense features, is what events show as well: as it is, not standardised
    x = torch.cat((caught["wide"][:, 3:], caught["rows"], batch.dense[:, :3]), dim=1).double()
    assert caught["rows"].shape == (6, len(inputs.sparse) * inputs.table_dim)
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    x = x * w["reader.norm.weight"] + w["reader.norm.bias"]
    for i in range(2):
        x = x @ w[f"reader.hidden.{i}.weight"].T + w[f"reader.hidden.{i}.bias"]
        x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    bias = torch.cat([w[f"out.{task}.bias"] for task in inputs.tasks])
    torch.testing.assert_close(logits.double(), x @ w["reader.out.weight"].T + bias, rtol=1e-4, atol=1e-5)

    for out in model.heads.out.values():  # once the rest is heard, it changes the logits
        torch.nn.init.normal_(out.weight)
    assert not torch.allclose(model(batch), logits)


def test_without_rows_or_wide_inputs_the_reader_has_nothing_to_read():
    inputs = example_inputs(dense=0)
    model = GEM(preset("tiny", reader=(4,)), replace(inputs, dense=0))
    assert model.heads.reader is None
    with pytest.raises(ValueError, match=r"hidden units of the reader must be at least 1, got 0"):
        preset("tiny", reader=(0,))
