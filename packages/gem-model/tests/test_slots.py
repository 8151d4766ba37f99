from dataclasses import replace

import pytest
import torch
from gem_model import GEM, preset
from gem_model.config import Table
from gem_model.slots import Slots
from gem_model.testing import example_inputs, random_batch

CPU = torch.device("cpu")


def managed_inputs(*names, rows=64):
    inputs = example_inputs()
    tables = tuple(replace(t, managed=True, rows=rows) if t.name in names else t for t in inputs.tables)
    return replace(inputs, tables=tables)


def spread(batch, names=("item", "country")):
    """The same batch with ids far beyond any table."""
    far = lambda ids: ids * 1_000_003_000_019 + 5  # noqa: E731
    sequences = {
        n: replace(s, ids={c: far(v) if c in names else v for c, v in s.ids.items()})
        for n, s in batch.sequences.items()
    }
    sparse = {n: replace(v, values=far(v.values)) if n in names else v for n, v in batch.sparse.items()}
    return replace(batch, sequences=sequences, sparse=sparse)


def lookup(slots, *ids):
    columns = {"user": (torch.tensor(ids), torch.tensor([0, len(ids)]))}
    return slots(columns)["user"][0].tolist()


def test_frequent_ids_get_rows_of_their_own_and_keep_them():
    slots = Slots([Table(name="user", rows=8, dim=4)], {"user": ["user"]}, device=CPU, interval=2)
    often = [10**17, -3, 2**61]
    for step in range(8):
        lookup(slots, *often, 1000 + step)
    slots.eval()
    rows = lookup(slots, *often)
    assert len(set(rows)) == 3
    assert all(0 <= row < 8 for row in rows)
    assert lookup(slots, *often) == rows
    assert lookup(slots, 77, 78) == [7, 7]  # never seen: the last row is everyone else's
    assert lookup(slots) == []


def test_a_full_table_gives_rows_to_those_who_come_now_and_says_which():
    slots = Slots([Table(name="user", rows=4, dim=4)], {"user": ["user"]}, device=CPU, interval=1)
    for _ in range(3):
        lookup(slots, 1, 2, 3)
    lookup(slots, 1, 2, 3)
    assert sorted(slots.evicted()["user"].tolist()) == [0, 1, 2]  # all were given away for the first time
    changed = set()
    for _ in range(60):
        lookup(slots, 7, 7, 8, 8, 9, 9)
        changed |= set(slots.evicted().get("user", torch.empty(0)).tolist())
    slots.eval()
    rows = dict(zip((1, 2, 3, 7, 8, 9), lookup(slots, 1, 2, 3, 7, 8, 9), strict=True))
    newcomers = {rows[i] for i in (7, 8, 9)} - {3}
    assert len(newcomers) >= 2
    assert newcomers == changed
    assert [rows[i] for i in (1, 2, 3)].count(3) == len(newcomers)  # the others share the last row now


def test_a_gem_with_managed_tables_learns_from_ids_beyond_any_table():
    torch.manual_seed(0)
    inputs = managed_inputs("item", "country")
    model = GEM(preset("tiny"), inputs)
    batch = spread(random_batch(inputs, 48, seed=2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    model.eval()
    told = model(batch)
    again = GEM(preset("tiny"), inputs)
    again.load_state_dict(model.state_dict())  # the maps are part of it
    torch.testing.assert_close(again.eval()(batch), told)


def test_a_row_that_changes_hands_begins_afresh():
    inputs = managed_inputs("country", rows=3)
    model = GEM(preset("tiny"), inputs)
    weight = model.tables.bags.embedding_bags["country"].weight
    with torch.no_grad():
        weight.fill_(9.0)
    model.tables._refresh({"country": torch.tensor([0, 2])})
    assert (weight[[0, 2]].abs() <= model.tables.bound).all()
    assert weight[[0, 2]].unique().numel() > 8
    assert (weight[1] == 9.0).all()


def test_meta_is_refused_for_managed_tables():
    with pytest.raises(ValueError, match="managed tables cannot be made on"):
        GEM(preset("tiny"), managed_inputs("item"), device="meta")
