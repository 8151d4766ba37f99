import dataclasses

import pytest
import torch
from gem_model import GEM, preset
from gem_model.embed import EventEncoder, Tables, keyed_jagged, sum_pool
from gem_model.roles import roles
from gem_model.testing import example_inputs, random_batch
from torch import nn


def weight(tables, name):
    collection = tables.shared.embeddings if name in tables.shared.embeddings else tables.bags.embedding_bags
    return collection[name].weight


def test_each_id_finds_its_row():
    inputs = example_inputs()
    tables = Tables(inputs)
    batch = random_batch(inputs, 6, seed=3)
    rows = tables(batch)
    assert set(rows.events) == {("ratings", "item"), ("ratings", "rating"), ("views", "item"), ("views", "genre")}
    for source in inputs.sources:
        for column, table in source.ids:
            expected = weight(tables, table)[batch.sequences[source.name].ids[column]]
            assert torch.equal(rows.events[source.name, column], expected)
    for feature, table in inputs.sparse:
        ids = batch.sparse[feature]
        expected = [
            weight(tables, table)[ids.values[a:b]].sum(0) for a, b in zip(ids.offsets, ids.offsets[1:], strict=False)
        ]
        torch.testing.assert_close(rows.pooled[feature], torch.stack(expected))


def test_tables_of_histories_and_others_are_apart():
    tables = Tables(example_inputs())
    assert set(tables.shared.embeddings) == {"item", "rating", "genre"}
    assert set(tables.bags.embedding_bags) == {"country"}


def test_no_table_of_one_kind():
    inputs = example_inputs()
    only_shared = dataclasses.replace(inputs, tables=inputs.tables[:3], sparse=(("item", "item"), ("genres", "genre")))
    assert Tables(only_shared).bags is None
    only_bags = dataclasses.replace(inputs, tables=inputs.tables[3:], sources=(), sparse=(("country", "country"),))
    tables = Tables(only_bags)
    assert tables.shared is None
    assert tables(random_batch(only_bags, 3)).pooled["country"].shape == (3, 8)


def test_rows_start_with_one_scale_whatever_the_table():
    inputs = example_inputs(dim=64)
    tables = Tables(inputs)
    for table in inputs.tables:
        std = weight(tables, table.name).std().item()
        assert std == pytest.approx(inputs.table_std, rel=0.12)


def test_sum_pool_and_its_gradient():
    rows = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 2, 5])
    out = sum_pool(rows, offsets)
    torch.testing.assert_close(out, torch.stack((rows[:2].sum(0), torch.zeros(3).double(), rows[2:].sum(0))))
    probe = torch.randn(3, 3, dtype=torch.float64)
    (out * probe).sum().backward()
    torch.testing.assert_close(rows.grad, probe[[0, 0, 2, 2, 2]])
    assert torch.equal(sum_pool(rows[:0], torch.tensor([0, 0])), torch.zeros(1, 3, dtype=torch.float64))


def test_keyed_jagged_knows_its_sizes_without_asking():
    kjt = keyed_jagged(
        {"a": (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])), "b": (torch.tensor([4]), torch.tensor([0, 0, 1]))}
    )
    assert kjt._length_per_key == [3, 1]  # given, not computed: nothing waits for the device
    assert kjt["b"].to_dense()[0].tolist() == []
    assert [t.tolist() for t in kjt["a"].to_dense()] == [[1], [2, 3]]


def test_candidate_is_an_event_without_outcome():
    """The candidate's token is that of an event of the same item, its other columns zero but the vector it has, too."""
    inputs = dataclasses.replace(example_inputs(), dense_columns=(("other", 1), ("vector", 3)))
    source = inputs.sources[0]
    torch.manual_seed(0)
    encoder = EventEncoder(source, preset("tiny"), inputs)
    nn.init.normal_(encoder.mark)
    batch = random_batch(inputs, 4, single_valued=True)
    rows = Tables(inputs)(batch)
    item, vector = encoder.linear.weight[:, :8], encoder.linear.weight[:, 16:19]  # after item and rating
    known = rows.pooled["item"] @ item.T + batch.dense[:, 1:4] @ vector.T
    expected = encoder.norm(known + encoder.linear.bias + encoder.mark)
    torch.testing.assert_close(encoder.candidate(rows, batch.dense), expected)


def test_roles_are_complete():
    model = GEM(preset("tiny"), example_inputs())
    found = roles(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    tables = {name.split(".")[-2] for name, role in found.items() if role == "table"}
    assert tables == {"item", "rating", "genre", "country"}
    assert sum(role == "table" for role in found.values()) == 4
    assert set(found.values()) == {"table", "dense"}
    assert roles(nn.Linear(2, 2)) == {"weight": "dense", "bias": "dense"}
