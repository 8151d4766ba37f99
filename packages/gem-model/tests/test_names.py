import pytest
import torch
from gem_model import GEM, ModelInputs, Source, Table, baselines, preset
from gem_model.names import ByName, key
from gem_model.roles import roles
from gem_model.testing import random_batch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

AWKWARD = ["type", "keys", "items", "a.b", "a@b", "a/b", "%", "%type", "a%2Eb", "training", "_modules", "forward", " "]


@given(st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=6)), unique=True, max_size=8))
def test_any_names_are_keys_of_their_own(names):
    keys = [key(n) for n in names]
    assert len(set(keys)) == len(names)
    assert not any("." in k or "@" in k for k in keys)
    modules = {n: nn.Identity() for n in names}
    held = ByName(modules)
    assert list(held) == list(held.keys()) == names
    assert all(held[n] is m and n in held for n, m in modules.items())
    assert list(held.items()) == list(modules.items())
    assert len(dict(held.named_modules())) == len(names) + 1


def test_usual_names_are_as_they_are():
    assert key("country") == "country"
    assert key("a.b") == "a%2Eb"
    assert key("type") == "%type"


def awkward_inputs(dim=8):
    return ModelInputs(
        tables=tuple(Table(name=n, rows=9, dim=dim) for n in ("type", "a.b", "keys", "items")),
        sources=(
            Source(name="values", ids=(("type", "type"), ("a.b", "a.b"))),
            Source(name="values.a", ids=(("b", "a.b"), ("keys", "keys"))),
        ),
        sparse=(("type", "type"), ("values.type", "items"), ("a.b", "a.b")),
        dense=2,
        tasks=("type", "clear.now"),
    )


@pytest.mark.parametrize("name", ["gem", *baselines.TRAINED])
def test_models_learn_whatever_the_names_are(name):
    """The same numbers as under plain names: nothing is mixed up, nothing collides."""
    awkward = awkward_inputs()
    plain = {"type": "t", "a.b": "ab", "keys": "k", "items": "i", "values": "s0", "values.a": "s1", "b": "c",
             "values.type": "f", "clear.now": "task"}  # fmt: skip

    def p(n):
        return plain.get(n, n)

    inputs = ModelInputs(
        tables=tuple(Table(name=p(t.name), rows=t.rows, dim=t.dim) for t in awkward.tables),
        sources=tuple(Source(name=p(s.name), ids=tuple((p(c), p(t)) for c, t in s.ids)) for s in awkward.sources),
        sparse=tuple((p(f), p(t)) for f, t in awkward.sparse),
        dense=2,
        tasks=tuple(p(t) for t in awkward.tasks),
    )
    outputs = []
    for given_inputs in (awkward, inputs):
        torch.manual_seed(0)
        model = (
            GEM(preset("tiny", evidence_heads=2, layers=2), given_inputs)
            if name == "gem"
            else baselines.build(name, {"dropout": 0.0}, given_inputs)
        )
        batch = random_batch(given_inputs, 4, seed=2, max_len=5)
        loss = model.loss(model(batch), batch)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        assert set(roles(model)) == {n for n, _ in model.named_parameters()}
        modules = dict(model.named_modules())
        assert all(unit in modules for unit in model.units())
        outputs.append(loss)
    torch.testing.assert_close(*outputs)
